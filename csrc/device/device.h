// device: what the engine needs of a GPU or of the host. One implementation a file in device/.
//
// Protocol: the engine hands over the steps of its lanes in issue order; a device executes those of one lane in order.
// The host executes them at once. A GPU puts them on a stream for each lane, and what has been put there is over later:
// a Moment says when.
//
//     moment(caller's stream), begin, [resume: after, wait, copy, reduce, raise, mark; pause], end, order(caller's stream)
//
// Threading: begin to end: the thread that walks (the caller's, or the worker), one walk at a time. The rest: any.
//
// Ordering: raise() comes after everything that the lane did before it, for whoever sees the flag raised; what follows
// a wait() on its lane sees everything that preceded the raise.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "../shared.h"

namespace hdma {

// A point in a stream of work: passed when everything that was put on the stream before it is over. Null: passed.
using Moment = std::shared_ptr<void>;
// A stream of the caller's, as its driver knows it.
using CallerStream = void *;

// Bytes that this process can address, and whose they are.
struct Spot {
    char *at;
    int rank;
    bool host;  // in memory of the host, though the device is a GPU
};

class Device {
  public:
    // A call whose steps are on the lanes and not over: what its lanes wait for.
    struct Flight {
        Fingerprint call;
        struct Awaited {
            uint32_t flag, value;
        };
        std::vector<Awaited> waits;
    };
    virtual ~Device() = default;

    // Allocates this rank's window, which no peer touches before. Throws Error(Device) with needed and free bytes.
    virtual void allocate_window() = 0;
    virtual char *window(int rank) = 0;  // of this rank or of a node mate, at its address in this process
    virtual char *wire_window() = 0;     // of this rank: what the wire reads and writes
    // Of a wire window in memory of a GPU: its dma-buf, and whether what a NIC writes there has to be flushed.
    virtual Fd wire_export() { return Fd(); }
    virtual bool wire_flushes() { return false; }

    // `streaming`: nobody reads the destination soon.
    virtual void copy(Lane lane, Spot dst, Spot src, size_t nbytes, bool streaming) = 0;
    // From `src` in the memory of a node mate's process; only where start-up found that possible.
    virtual void read(int mate, void *dst, uint64_t src, size_t nbytes) = 0;
    // dst = the sources combined in their order, accumulated wide, divided and rounded once.
    virtual void reduce(Lane lane, Op op, int divisor, void *dst, Dtype dst_type, const void *const *srcs,
                        size_t source_count, Dtype src_type, size_t element_count, bool streaming) = 0;
    // Holds the lane until a flag of this rank has reached the value; false at the deadline or at the fault.
    virtual bool wait(Lane lane, uint32_t flag, uint32_t value, int64_t deadline_ns) = 0;
    // Raises a flag of this rank or of a node mate. Doorbell: its waiter is that rank's proxy.
    virtual void raise(Lane lane, int rank, uint32_t flag, uint32_t value, bool doorbell) = 0;

    // Where the same place of a node mate's symmetric memory lies in this process; null where `own` is in none.
    virtual char *mapped(int, const char *) { return nullptr; }

    // What only a device with streams has.

    virtual bool streams() const { return false; }
    // Whether a walk never waits for another rank: the streams do. Otherwise the thread that walks does.
    virtual bool holds() const { return false; }
    // Throws Error(Usage) where the stream is being captured.
    virtual Moment moment(CallerStream) { return nullptr; }
    virtual bool passed(const Moment &) { return true; }
    // What is put on the caller's stream from now on comes after the moment.
    virtual void order(CallerStream, const Moment &) {}
    virtual void begin(const Fingerprint &, const Moment &) {}
    // Around each part of the walk, which may stop and go on in another thread; end() includes pause(), and is called
    // also where another of these has failed.
    virtual void resume() {}
    virtual void pause() {}
    // The lane goes on after the moment; false at the deadline or at the fault.
    virtual bool after(Lane, const Moment &, int64_t) { return true; }
    virtual Moment mark(Lane) { return nullptr; }
    virtual void end() {}
    // Is told of a call that has not come to its end within the time-out, or never will for the failure that is given,
    // in a thread of the device's; and which call of another communicator waits behind it.
    using Late = std::function<void(const Flight &, const std::string &failure, const std::string &behind)>;
    virtual void watch(int64_t, Late) {}
    // Until all calls have come to their ends; false at the deadline.
    virtual bool drain(int64_t) { return true; }
    // Whether calls may be going on, also those of which the driver cannot tell.
    virtual bool busy() { return false; }
    // Of calls that have not nobody is told any more.
    virtual void abandon() {}
};

struct WindowPart {
    int rank;
    Fd memory;
    int pid;
};

// Whether all bytes could be read, by process_vm_readv.
bool read_process(int pid, void *dst, uint64_t src, size_t nbytes);

// Host memory as a device (host.cc).
std::unique_ptr<Device> host_device(int rank, int size, std::vector<WindowPart> parts, size_t window_nbytes,
                                    Shared &shared);

}  // namespace hdma
