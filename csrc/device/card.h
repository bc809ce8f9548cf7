// card: what a process has once for each GPU, whatever the number of communicators: the reduction kernels, the two
// streams that may wait, the events, and the watchdog over the calls that are on the streams.
//
// Protocol: a communicator's device puts the calls of its lanes on the two streams and hands each to the watchdog, in
// the order of issue; a started call as often as its caller goes on with it. The watchdog looks at the oldest call: its
// time-out runs from when the caller's stream has come to it. A stream's wait has no deadline, so a call whose
// communicator has ended is released: the watchdog has the device write every awaited word, again and again (a live peer
// may write it back), until the call is over. What the call uses is kept until then, whatever becomes of its owner.
//
//     near  [call 1 ........][call 2 ......]        at most two hardware queues are held, since a stream that waits
//     rail  [call 1 ....][call 2 ........]          holds one: 8 waiting streams would stop all others (measured)
//
// Threading: any thread; the watchdog is the card's own. It asks events whether they have passed and writes words; it
// puts nothing on a stream, and frees nothing, since that may wait for streams. Cards are never destroyed: what is on the
// GPU goes with the process. A forked child leaves all of it alone.
//
// Ordering: a call's events are recorded before it is handed over, under the lock.
#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "device.h"
#include "runtime.h"

namespace hdma {

class Card {
  public:
    struct Settings {
        bool high_priority;
        unsigned blocks;  // of the reduction kernel, at most
    };
    // The one of this process. The code is loaded by the first caller, before anything waits: to load a kernel may need
    // a lock of the driver's that a launch behind a wait holds. Settings are the first caller's too.
    static std::shared_ptr<Card> of(const std::string &runtime, int ordinal, const std::string &code, Settings settings);

    Runtime &runtime() { return *runtime_; }
    Current current() { return Current(*runtime_, ordinal_); }
    int ordinal() const { return ordinal_; }
    const GpuInfo &info() const { return info_; }
    bool holds() const { return holds_; }
    const std::string &why_not() const { return why_not_; }

    Stream stream(Lane lane) const { return streams_[lane == Lane::Rail]; }
    static bool forked();          // whether this process is a child of the one that uses the GPUs
    Moment record(Stream stream);  // where the GPU is current
    static Event event(const Moment &moment) { return *static_cast<Event *>(moment.get()); }
    using Ends = std::array<Moment, 2>;  // of the lanes; null: the call put nothing there

    void copy(Stream stream, char *dst, char *also, const char *src, size_t nbytes);  // also: a second dst, or null
    // Throws Error(Usage) for more sources than a launch takes.
    void reduce(Stream stream, Op op, int divisor, void *dst, Dtype dst_type, const void *const *srcs,
                size_t source_count, Dtype src_type, size_t element_count);

    // Whose a call is: a communicator's device.
    struct Owner {
        std::function<bool()> ended;    // whether the communicator has
        std::function<void()> release;  // writes the awaited words
        Device::Late late;
        int64_t timeout_ns = 0;
        std::shared_ptr<const void> uses;  // what must be there while its calls are on the lanes
        bool gone = false;                 // the card's, under its lock: see forget()
    };
    // A call on the lanes. Its device does not change it once it was handed over.
    struct Aloft {
        std::shared_ptr<Owner> owner;
        Device::Flight flight;
        Moment entered;
        std::optional<Ends> ends;  // of all that is on the lanes so far; none where the driver has failed
        bool open = false;         // its caller goes on with it later
        bool listed = false;
        int64_t since_ns = 0;
        bool told = false;
    };
    // Again for a call that was open; `waits` are those since then. Without ends nobody can tell when it is over.
    void follow(const std::shared_ptr<Aloft> &call, const std::vector<Device::Flight::Awaited> &waits,
                std::optional<Ends> ends, bool open);
    bool drain(const Owner &owner, int64_t deadline_ns);
    bool in_use(const void *what);
    void forget(Owner &owner);  // of its calls nobody is told any more; they are released

    // Throw nothing, since the last owner of memory calls them from a destructor.
    // Frees memory that peers may still have mapped, as soon as `unmapped` says so: at one of the next calls of this or
    // sweep(), or at the process's end.
    void bury(char *memory, std::function<bool()> unmapped);
    void sweep();

  private:
    Card(std::shared_ptr<Runtime> runtime, int ordinal, const std::string &code, Settings settings);
    void watch();
    struct Report {
        Device::Late late;
        Device::Flight flight;
        std::string failure;  // of the GPU
        std::string behind;   // the first call of another communicator that this one holds up
    };
    void look(std::vector<Report> &reports);
    unsigned blocks(size_t nbytes) const;

    std::shared_ptr<Runtime> runtime_;
    int ordinal_;
    Settings settings_;
    GpuInfo info_;
    bool holds_;
    std::string why_not_;
    Stream streams_[2];
    void *copy_kernel_;
    std::map<std::pair<Dtype, Dtype>, void *> reduce_kernels_;

    std::mutex events_mutex_;
    std::vector<std::shared_ptr<Event>> events_;  // those that nobody else holds are free
    size_t next_event_ = 0;

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::shared_ptr<Aloft>> aloft_;
    std::deque<std::shared_ptr<Aloft>> lost_;  // nobody can tell when they are over
    std::vector<std::shared_ptr<Aloft>> over_;  // and nobody's: for sweep() to let go of
    bool telling_ = false, asleep_ = false;
    Thread watchdog_;

    std::mutex graves_mutex_;
    struct Grave {
        char *memory;
        std::function<bool()> unmapped;
    };
    std::vector<Grave> graves_;
};

}  // namespace hdma
