// base: what every room shares. Errors with a kind, deadlines, file descriptors, and the fault of a communicator.
//
// Protocol: none. A Fault is the one place where the end of a communicator is recorded: the first cause stays.
//
// Threading: everything here may be called from any thread.
//
// Ordering: Fault::raise stores the cause before the flag that announces it (release); raised() acquires.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace hdma {

// The same numbers as hdma.errors.BY_CODE.
enum class Kind : uint8_t { Error = 0, Usage = 1, Device = 2, Wire = 3, Timeout = 4 };

struct Error : std::exception {
    Error(Kind kind, std::string text) : kind(kind), text(std::move(text)) {}
    const char *what() const noexcept override { return text.c_str(); }
    Kind kind;
    std::string text;
};

// printf into a string.
std::string format(const char *pattern, ...) __attribute__((format(printf, 1, 2)));
// "Connection reset by peer (errno 104)".
std::string errno_text(int error);

int64_t now_ns();

// A file descriptor with an owner.
class Fd {
  public:
    Fd() = default;
    explicit Fd(int fd) : fd_(fd) {}
    Fd(Fd &&other) noexcept : fd_(other.release()) {}
    Fd &operator=(Fd &&other) noexcept;
    ~Fd() { reset(); }
    int get() const { return fd_; }
    bool valid() const { return fd_ >= 0; }
    int release();
    void reset();

  private:
    int fd_ = -1;
};

// A thread that leaves signals to the threads of the application.
class Thread {
  public:
    Thread() = default;
    ~Thread() { join(); }
    void start(const char *name, std::function<void()> body);
    void join();
    // In a forked child: the thread exists in the parent only.
    void forget() { started_ = false; }
    bool started() const { return started_; }

  private:
    pthread_t thread_{};
    bool started_ = false;
    std::function<void()> body_;
    std::string name_;
};

// Why a communicator ended. Who waits, checks raised() whenever it wakes; raise() wakes them through the listeners.
class Fault {
  public:
    // The first cause is kept and announced to the listeners; false for all later ones.
    bool raise(Kind kind, const std::string &text);
    bool raised() const { return raised_.load(std::memory_order_acquire); }
    void check() const {
        if (raised()) throw Error(kind_, text_);
    }
    Kind kind() const { return kind_; }
    const std::string &text() const { return text_; }
    // Called at once where it is raised already; in the thread that raises.
    void listen(std::function<void()> listener);

  private:
    std::vector<std::function<void()>> listeners();
    std::mutex mutex_;
    std::atomic<bool> raised_{false};
    Kind kind_ = Kind::Error;
    std::string text_;
    std::vector<std::function<void()>> listeners_;
};

}  // namespace hdma
