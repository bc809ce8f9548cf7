// engine: walks plans. The heart of a communicator in C++: device, shared flags, calls, control and proxy together.
//
// Protocol: a call is plans, each run a number of times at increasing offsets. For every run the put and credit lanes
// go to the proxy, and the near and rail lanes are walked here, in issue order; then the running chunk count of every
// ring moves on by the plan's span. What a peer still needs after a call has returned (puts, credits) is the proxy's:
// a peer's progress never depends on this rank calling again.
//
//     caller --run--------------------> walk (near, rail)
//     caller --submit--> worker ------> walk             + proxy (put, credit) for each run
//
// Threading: one walk at a time: run() waits for the worker's queue to empty. The worker starts with the first
// submit(). Tickets may be waited for from any thread.
//
// Ordering: flags (shared.h). A ticket is completed under its lock after the last step of its walk.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <optional>
#include <thread>

#include "calls.h"
#include "control.h"
#include "device/device.h"
#include "proxy.h"

namespace hdma {

struct Piece {
    std::shared_ptr<const LoadedPlan> plan;
    uint32_t repeats;
    int64_t nbytes;                       // of a shard in one run: how far the next run starts
    int64_t offset;                       // where the first run starts
    int64_t input_stride, output_stride;  // bytes from shard to shard
};

// What calls do, apart from whose tensors they do it to: made once, run many times.
struct Request {
    CallText text;
    std::vector<Piece> pieces;
    Dtype dtype, wire_dtype;
    Op op;
    uint32_t marks;  // (shard, part) pairs that the caller pushes or waits for one by one; 0: none
    bool pushes;     // the walk holds before a pair that was not pushed
};

struct Call {
    std::shared_ptr<const Request> request;
    char *input, *output;
};

// An asynchronous call.
class Ticket {
  public:
    Ticket(uint32_t marks) : pushed_(marks), given_(marks) {}
    // True when done, false at the deadline. Throws the call's Error.
    bool wait(int64_t deadline_ns);
    bool done();
    // Until the pair with this number is complete in the output, or the call is done; false at the deadline.
    bool wait_given(uint32_t mark, int64_t deadline_ns);
    void push(uint32_t mark);

  private:
    friend class Engine;
    enum class Pushed { Yes, Late, Never };
    Pushed wait_pushed(uint32_t mark, int64_t deadline_ns, const Fault &fault, const std::atomic<bool> &closing);
    void give(uint32_t mark);
    void complete(std::optional<Error> error);

    std::mutex mutex_;
    std::condition_variable changed_;
    bool done_ = false;
    std::optional<Error> error_;
    std::vector<char> pushed_, given_;
};

class Engine {
  public:
    struct Peer {
        int rank;  // this rank or a node mate
        Fd flags, window, doorbell;
        int pid;  // of a mate whose tensors may be read directly, or 0
    };
    struct Config {
        int rank, size;
        size_t flag_count, ring_count, window_nbytes;
        int64_t timeout_ns, spin_ns;
        std::string limit;  // what the user sets the time-out by
        std::vector<std::string> flag_names;
        std::function<bool()> interrupted;  // whether the user wants to stop; asked now and then by run()
        std::vector<Peer> peers;
        std::vector<Control::Part> control;
        std::vector<TcpPart> tcp;
    };
    explicit Engine(Config config);
    ~Engine();

    void run(const Call &call);
    std::shared_ptr<Ticket> submit(const Call &call);
    // Ends the communicator on all ranks.
    void abort(Kind kind, const std::string &text) { fault_.raise(kind, text); }
    // Finishes what was submitted and what peers still need, says goodbye; at most the time-out.
    // A started call whose shards were not all pushed ends in an error, and so does a run() of another thread.
    void close();
    // In a forked child, which cannot use the parent's communicator: threads and links are the parent's.
    void forget();
    const Fault &fault() const { return fault_; }

    struct Stats {
        uint64_t calls, copies, copy_nbytes, reduces, reduce_nbytes, puts, put_nbytes, wire_sent_nbytes;
    };
    Stats stats();

  private:
    void execute(const Call &call, Ticket *ticket);
    void open_windows(bool callers_thread);
    void walk(const Call &call, const Piece &piece, int64_t offset, uint32_t first_mark, Ticket *ticket);
    void check_not_walking(const char *what);
    template <class Wait>
    void hold(bool callers_thread, const std::string &waits_for, Wait wait);
    [[noreturn]] void time_out(const std::string &waits_for);
    char *address(const Place &place, const Call &call, const Piece &piece, int64_t offset);
    void read_mate(const Place &place, const Piece &piece, int64_t offset, char *dst);
    void work();
    void drain_queue(std::unique_lock<std::mutex> &lock);

    Config config_;
    Fault fault_;
    std::unique_ptr<Shared> shared_;
    std::unique_ptr<Device> device_;
    std::unique_ptr<Calls> calls_;
    std::unique_ptr<Control> control_;
    std::unique_ptr<Proxy> proxy_;
    std::vector<uint32_t> base_;
    Fingerprint fingerprint_;
    bool windows_open_ = false;
    std::atomic<uint64_t> copies_{0}, copy_nbytes_{0}, reduces_{0}, reduce_nbytes_{0};

    struct Job {
        Call call;
        std::shared_ptr<Ticket> ticket;
    };
    std::mutex walk_mutex_, queue_mutex_;
    std::atomic<std::thread::id> walking_{};  // the thread that is in execute()
    std::condition_variable queue_changed_;
    std::deque<Job> queue_;  // the front is being walked
    std::atomic<bool> closing_{false};
    Thread worker_;
};

}  // namespace hdma
