// device/host: host memory as a device. A window is a memfd, mapped by its node mates; lanes are the walking thread.
//
// Protocol: none of its own: flags are those of Shared.
//
// Threading: see device.h.
//
// Ordering: the walking thread copies, then raises with release; non-temporal stores, which are not ordered by that,
// are fenced before copy() returns.
#include <errno.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "../kernels/copy_host.h"
#include "../kernels/reduce_host.h"
#include "../memory.h"
#include "device.h"

namespace hdma {

namespace {

class Host final : public Device {
  public:
    Host(int rank, int size, std::vector<WindowPart> parts, size_t window_nbytes, Shared &shared)
        : rank_(rank), window_nbytes_(window_nbytes), shared_(shared), pids_(size), windows_(size) {
        for (WindowPart &part : parts) {
            void *at = mmap(nullptr, window_nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, part.memory.get(), 0);
            if (at == MAP_FAILED)
                throw Error(Kind::Device, format("rank %d cannot map the window of rank %d (%zu bytes): %s", rank,
                                                 part.rank, window_nbytes, mmap_error_text(errno).c_str()));
            pids_[part.rank] = part.pid;
            windows_[part.rank] = static_cast<char *>(at);
            if (part.rank == rank) memory_ = std::move(part.memory);
        }
    }

    ~Host() override {
        for (char *window : windows_)
            if (window) munmap(window, window_nbytes_);
    }

    void allocate_window() override {
        size_t sharers = 0;  // All mates come to their first collective.
        for (int peer = 0; peer < static_cast<int>(windows_.size()); ++peer)
            sharers += shared_.has(peer) && !shared_.board(peer).window_ready.value.load();
        reserve_memory(memory_.get(), window_nbytes_, std::max<size_t>(sharers, 1),
                       format("rank %d cannot allocate its window", rank_));
    }

    char *window(int rank) override { return windows_[rank]; }
    char *wire_window() override { return windows_[rank_]; }

    void copy(Lane, Spot dst, Spot src, size_t nbytes, bool streaming) override {
        if (dst.at == src.at || nbytes == 0) return;
        if (streaming)
            copy_streaming(dst.at, src.at, nbytes);
        else
            memcpy(dst.at, src.at, nbytes);
    }

    void read(int mate, void *dst, uint64_t src, size_t nbytes) override {
        if (!read_process(pids_[mate], dst, src, nbytes))
            throw Error(Kind::Device, format("rank %d cannot read %zu bytes of rank %d (pid %d): %s. It has ended, or gave its "
                                             "tensor's memory back during the call",
                                             rank_, nbytes, mate, pids_[mate], errno_text(errno).c_str()));
    }

    void reduce(Lane, Op op, int divisor, void *dst, Dtype dst_type, const void *const *srcs, size_t source_count,
                Dtype src_type, size_t element_count, bool streaming) override {
        reduce_host(op, divisor, dst, dst_type, srcs, source_count, src_type, element_count, streaming);
    }

    bool wait(Lane, uint32_t flag, uint32_t value, int64_t deadline_ns) override {
        return shared_.wait(flag, value, deadline_ns);
    }

    void raise(Lane, int rank, uint32_t flag, uint32_t value, bool doorbell) override {
        shared_.raise(rank, flag, value, doorbell);
    }

  private:
    int rank_;
    size_t window_nbytes_;
    Shared &shared_;
    Fd memory_;  // of this rank's window
    std::vector<int> pids_;
    std::vector<char *> windows_;  // by rank; null but for this rank and its node mates
};

}  // namespace

bool read_process(int pid, void *dst, uint64_t src, size_t nbytes) {
    auto *to = static_cast<char *>(dst);
    while (nbytes) {
        iovec local{to, nbytes}, remote{reinterpret_cast<void *>(src), nbytes};
        ssize_t n = process_vm_readv(pid, &local, 1, &remote, 1, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) {
            if (n == 0) errno = EFAULT;
            return false;
        }
        to += n, src += n, nbytes -= n;
    }
    return true;
}

std::unique_ptr<Device> host_device(int rank, int size, std::vector<WindowPart> parts, size_t window_nbytes,
                                    Shared &shared) {
    return std::make_unique<Host>(rank, size, std::move(parts), window_nbytes, shared);
}

}  // namespace hdma
