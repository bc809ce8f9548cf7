// device: what the engine needs of a GPU runtime or of the host. One implementation a file in device/.
//
// Protocol: the engine hands over the steps of its lanes in issue order; a device executes those of one lane in order.
//
// Threading: allocate_window, copy, read, reduce, wait, raise: the thread that walks (the caller's, or the worker).
// window: any.
//
// Ordering: raise() comes after everything that the lane wrote before it, for whoever sees the flag raised; what
// follows a wait() sees everything that preceded the raise.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "../shared.h"

namespace hdma {

class Device {
  public:
    virtual ~Device() = default;

    // Allocates this rank's window, which no peer touches before. Throws Error(Device) with needed and free bytes.
    virtual void allocate_window() = 0;
    virtual char *window(int rank) = 0;  // of this rank or of a node mate, at its address in this process

    // `streaming`: nobody reads the destination soon.
    virtual void copy(void *dst, const void *src, size_t nbytes, bool streaming) = 0;
    // From `src` in the memory of a node mate's process; only where start-up found that possible.
    virtual void read(int mate, void *dst, uint64_t src, size_t nbytes) = 0;
    // dst = the sources combined in their order, accumulated wide, divided and rounded once; of one source a copy.
    virtual void reduce(Op op, int divisor, void *dst, Dtype dst_type, const void *const *srcs, size_t source_count,
                        Dtype src_type, size_t element_count, bool streaming) = 0;
    // Holds the lane until a flag of this rank has reached the value; false at the deadline or at the fault.
    virtual bool wait(uint32_t flag, uint32_t value, int64_t deadline_ns) = 0;
    // Raises a flag of this rank or of a node mate. Doorbell: its waiter is that rank's proxy.
    virtual void raise(int rank, uint32_t flag, uint32_t value, bool doorbell) = 0;
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
