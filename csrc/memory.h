// memory: reserving shared memory so that what does not fit is an error now, not a SIGBUS or the OOM killer later.
//
// Protocol: none. What is left is the least of the machine's memory and of every control group above this process.
//
// Threading: any thread.
//
// Ordering: ranks of a host reserve at once, so each asks for room for all of those that have yet to reserve.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace hdma {

struct MemoryLeft {
    uint64_t nbytes;
    std::string where;  // "control group /sys/fs/cgroup/job: limit 1000 bytes, 900 in use"
};

// `root`: where the system's files lie (tests give another).
MemoryLeft memory_left(const std::string &root);

// Gives the memfd this size, every page of it, where `sharers` like it fit. Throws Error(Device) that begins with `what`.
void reserve_memory(int fd, size_t nbytes, size_t sharers, const std::string &what);

// The system's text for an mmap that failed, and what to do about it.
std::string mmap_error_text(int error);

}  // namespace hdma
