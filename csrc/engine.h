// engine: walks plans on one device. The heart of a communicator in C++: device, shared flags and proxy together, and
// the Ties that engines of other devices of the same communicator share.
//
// Protocol: a call is plans, each run a number of times at increasing offsets. For every run the put and credit lanes
// go to the proxy, and the near and rail lanes are walked here, in issue order; then the running chunk count of every
// ring moves on by the plan's span. What a peer still needs after a call has returned (puts, credits) is the proxy's:
// a peer's progress never depends on this rank calling again.
//
//     on the host:
//         caller --run--------------------> walk (near, rail)
//         caller --submit--> worker ------> walk             + proxy (put, credit) for each run
//     on a GPU whose streams hold waits, the walk only fills streams and is done at once, until they are full:
//         caller --submit, push-----------> walk             + proxy
//     on any other GPU every call goes by the worker, which polls the waits and then fills the streams; it calls the
//     driver for that, and never waits inside it.
//
// Threading: one walk at a time: run() waits for the worker's queue to empty. The worker starts with the first call
// that needs it. Tickets may be waited for from any thread.
//
// Ordering: flags (shared.h). A ticket is completed under its lock after the last step of its walk. Calls are numbered
// as they are issued, in the caller's order, which is the same on all ranks.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <optional>
#include <thread>

#include "proxy.h"
#include "ticket.h"

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
    CallerStream stream;  // on a GPU: the call comes after what is on it
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
        std::vector<LinkPart> links;    // to rail peers
        std::optional<NicChoice> nic;  // none: TCP
        std::shared_ptr<Ties> ties;  // of the communicator's first engine; null: this is the first
        // Null: the host.
        std::function<std::unique_ptr<Device>(std::vector<WindowPart>, std::shared_ptr<Shared>, Fault &)> make_device;
    };
    explicit Engine(Config config);
    ~Engine();

    void run(const Call &call);
    std::shared_ptr<Ticket> submit(const Call &call);
    // The pair with this number of a started call may be read; on a GPU: after what is on the stream.
    void push(const std::shared_ptr<Ticket> &ticket, uint32_t mark, CallerStream stream);
    // What is put on the stream from now on comes after what is on the other.
    void follow(CallerStream stream, CallerStream behind);
    // Ends the communicator on all ranks.
    void abort(Kind kind, const std::string &text) { ties_->fault.raise(kind, text); }
    // Finishes what was submitted and what peers still need; at most the time-out. No call is possible any more.
    // A started call whose shards were not all pushed ends in an error, and so does a run() of another thread.
    void drain();
    // Whether calls are on the GPU still.
    bool busy() { return device_->busy(); }
    // drain(), then says goodbye (the first engine) and ends the threads. The others drain before and close after it,
    // so that their connections end after the goodbye.
    void close();
    // In a forked child, which cannot use the parent's communicator: threads and links are the parent's.
    void forget();
    const Fault &fault() const { return ties_->fault; }
    const std::shared_ptr<Ties> &ties() const { return ties_; }

    struct Stats {
        uint64_t calls, copies, copy_nbytes, reduces, reduce_nbytes, puts, put_nbytes, wire_sent_nbytes;
    };
    Stats stats();

  private:
    // Where the walk of a call stands.
    struct Walk {
        Call call;
        Fingerprint fingerprint;
        std::shared_ptr<Ticket> ticket;  // null: run()
        Moment entered;
        size_t piece = 0, step = 0;
        uint32_t repeat = 0, mark = 0;
        int64_t offset = 0;
        bool begun = false, run_begun = false;
        bool inside[2] = {};  // lanes that have entered
    };
    std::shared_ptr<Ticket> make_ticket(const Call &call);
    void check_pushed(const std::shared_ptr<Ticket> &next, bool pushes);
    void go_on(Walk &walk);
    void resume();
    Moment moment(CallerStream stream);
    bool advance(Walk &walk);
    void give_up(Walk &walk, const Error &error);
    bool run_once(Walk &walk, const Piece &piece);
    bool pushed(Walk &walk, const Step &step);
    void come_after(Lane lane, const Moment &moment);
    void copy_or_reduce(const Walk &walk, const Piece &piece, const Step &step);
    void open_windows(bool callers_thread);
    void check_not_walking(const char *what);
    template <class Wait>
    void hold(bool callers_thread, const std::string &waits_for, Wait wait);
    [[noreturn]] void time_out(const std::string &waits_for);
    std::string late_text(const Fingerprint &call, const std::string &waits_for);
    void late(const Device::Flight &flight, const std::string &failure, const std::string &behind);
    Spot spot(const Place &place, const Walk &walk, const Piece &piece);
    void read_mate(const Place &place, const Piece &piece, int64_t offset, char *dst);
    void work();
    void drain_queue(std::unique_lock<std::mutex> &lock);

    Config config_;
    std::shared_ptr<Ties> ties_;
    bool first_;
    std::shared_ptr<Shared> shared_;
    std::shared_ptr<Device> device_;
    bool holds_ = false;  // the device's, which the hot path asks often
    std::unique_ptr<Proxy> proxy_;
    std::vector<uint32_t> base_;
    Fingerprint fingerprint_;  // of the call that is walked
    bool windows_open_ = false;
    std::vector<const void *> srcs_;
    std::vector<std::weak_ptr<Ticket>> tickets_;
    std::weak_ptr<Ticket> started_;  // the last call that takes shards one by one
    std::optional<Walk> suspended_;  // a started call on a GPU whose next shard was not pushed
    std::atomic<uint64_t> copies_{0}, copy_nbytes_{0}, reduces_{0}, reduce_nbytes_{0};

    std::mutex walk_mutex_, queue_mutex_;
    std::atomic<std::thread::id> walking_{};  // the thread that is in advance()
    std::condition_variable queue_changed_;
    std::deque<Walk> queue_;  // the front is being walked
    std::atomic<bool> closing_{false};
    std::atomic<int64_t> closing_since_ns_{0};
    bool drained_ = false, closed_ = false;
    Thread worker_;
};

}  // namespace hdma
