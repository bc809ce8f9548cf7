// base: see base.h.
#include "base.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace hdma {

std::string format(const char *pattern, ...) {
    va_list args, again;
    va_start(args, pattern);
    va_copy(again, args);
    int length = vsnprintf(nullptr, 0, pattern, args);
    va_end(args);
    std::string text(length > 0 ? length : 0, '\0');
    vsnprintf(text.data(), text.size() + 1, pattern, again);
    va_end(again);
    return text;
}

std::string errno_text(int error) {
    char buffer[128];
    // The GNU form returns the text, which need not lie in the buffer.
    return format("%s (errno %d)", strerror_r(error, buffer, sizeof buffer), error);
}

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

Fd &Fd::operator=(Fd &&other) noexcept {
    if (this != &other) {
        reset();
        fd_ = other.release();
    }
    return *this;
}

int Fd::release() {
    int fd = fd_;
    fd_ = -1;
    return fd;
}

void Fd::reset() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
}

void Thread::start(const char *name, std::function<void()> body) {
    body_ = std::move(body);
    name_ = name;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(
        &thread_, nullptr,
        [](void *self) -> void * {
            static_cast<Thread *>(self)->body_();
            return nullptr;
        },
        this);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (error) throw Error(Kind::Device, "cannot start the thread " + name_ + ": " + errno_text(error));
    pthread_setname_np(thread_, name_.substr(0, 15).c_str());
    started_ = true;
}

void Thread::join() {
    if (started_) pthread_join(thread_, nullptr);
    started_ = false;
}

bool Fault::raise(Kind kind, const std::string &text) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (raised_.load(std::memory_order_relaxed)) return false;
        kind_ = kind;
        text_ = text;
        raised_.store(true, std::memory_order_release);
    }
    for (auto &listener : listeners()) listener();
    return true;
}

void Fault::listen(std::function<void()> listener) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        listeners_.push_back(listener);
    }
    // One that comes in between is told twice, which does no harm.
    if (raised()) listener();
}

std::vector<std::function<void()>> Fault::listeners() {
    std::lock_guard<std::mutex> lock(mutex_);
    return listeners_;
}

}  // namespace hdma
