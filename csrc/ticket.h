// ticket: a call that was submitted, for who waits for it; and the ties that it shares with its communicator.
//
// Protocol: the engine gives marks and leaves as it walks, and completes the ticket. On a GPU "complete" is two things:
// all steps of the call are on the streams (from then on other streams can be ordered behind it), and they have been
// executed. As its engine closes a ticket is settled: it keeps its result and lets go of all else.
//
// Threading: any thread, under the ticket's lock.
//
// Ordering: a ticket is completed under its lock after the last step of its walk.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>

#include "control.h"
#include "device/device.h"

namespace hdma {

// What ties the ranks of a communicator together, whatever the device. Ends with its last engine.
struct Ties {
    int rank;
    Fault fault;
    std::unique_ptr<Calls> calls;
    std::unique_ptr<Control> control;

    // Around a call of the driver's outside of a walk: where it fails the peers must not wait for this rank.
    template <class What>
    auto told(What what) {
        try {
            return what();
        } catch (const Error &error) {
            if (error.kind != Kind::Device || fault.raised()) throw;
            Error whole(error.kind, format("rank %d: its GPU failed: %s", rank, error.text.c_str()));
            fault.raise(whole.kind, whole.text);
            throw whole;
        }
    }
};

// A call that was submitted. On a GPU "done" is two things: all of its steps are on the streams (from then on other
// streams can be ordered behind it), and they have been executed.
class Ticket {
  public:
    Ticket(uint32_t marks, std::shared_ptr<Device> device, std::shared_ptr<Ties> ties)
        : ties_(std::move(ties)), device_(std::move(device)), pushed_(marks), given_(marks) {}
    // True when done (on a GPU: issued), false at the deadline. Throws the call's Error.
    bool wait(int64_t deadline_ns);
    // The stream goes on after the call, which has been waited for.
    void order(CallerStream stream);
    // Whether the call is over. Throws nothing.
    bool done();
    // The error of a call that is over, if there is one.
    std::optional<Error> error();
    // Until the pair with this number is complete in the output (on a GPU: for what follows on the stream), or the call
    // is done; false at the deadline.
    bool wait_given(uint32_t mark, CallerStream stream, int64_t deadline_ns);

  private:
    friend class Engine;
    enum class Pushed { Yes, Late, Never };
    struct Mark {
        bool there = false;
        Moment moment;
    };
    void push(uint32_t mark, Moment moment);
    bool pushed(uint32_t mark, Moment &moment);
    bool all_pushed();
    Pushed wait_pushed(uint32_t mark, int64_t deadline_ns, const std::atomic<bool> &closing, Moment &moment);
    void give(uint32_t mark, Moment moment);
    void leave(Lane lane, Moment moment);
    void complete(std::optional<Error> error);
    // The engine is through with all calls: what the ticket has come to stays, and it holds nothing more.
    void settle();
    bool executed();
    void check();

    std::shared_ptr<Ties> ties_;  // before the device, which outlives no fault
    std::shared_ptr<Device> device_;
    std::mutex mutex_;
    std::condition_variable changed_;
    bool done_ = false, executed_ = false;
    std::optional<Error> error_;
    std::vector<Mark> pushed_, given_;
    Moment left_[2];
};

}  // namespace hdma
