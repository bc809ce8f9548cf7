// gpu: one GPU as a device, on a Runtime: what a communicator has on it, and how its lanes become streams.
//
// Protocol: a GpuMemory is made before the ranks agree. It allocates this rank's window (allocation 0) and symmetric
// memory (1, 2, ...), whose handles the ranks exchange; each maps the mates'. Then it becomes a Device.
//
//     window of a rank         plain device memory, mapped by its node mates
//     flags, boards            Shared: host memory, mapped and pinned by all mates, so that CPUs can write every word
//                              that a stream waits on
//     window for the wire      the window itself, where NICs reach it by dma-buf (all ranks agree on that); otherwise
//                              host memory of this rank, pinned: what goes to other nodes is copied there by plan
//
// Steps of a lane are gathered and handed to the driver in groups: words in one call, copies that do not depend on one
// another in one batch, two copies of the same bytes on this GPU in one kernel. What moves between two GPUs, or to and
// from the host, goes by copy engine; what stays on one GPU (also from one process to another) is the reduction
// kernel's, since a driver's own copy there is a kernel of any size it likes (measured).
//
// Where streams cannot hold waits (Runtime::holds), the thread that walks polls the words instead: the communicator's
// worker, which then has the right to call the driver as the caller's threads do. It never waits inside the driver.
//
// Threading: see device.h; GpuMemory: any thread, under its lock.
//
// Ordering: a word is written by the stream that did what it stands for, after it.
#pragma once

#include "card.h"

namespace hdma {

class GpuMemory : public std::enable_shared_from_this<GpuMemory> {
  public:
    GpuMemory(std::shared_ptr<Card> card, int rank, int size);
    ~GpuMemory() { close(); }

    // Memory of this rank that mates can map. It lives as long as the owner that is returned or this object, and until
    // the mates have unmapped it.
    struct Allocation {
        char *at;
        size_t nbytes;
        IpcHandle handle;
    };
    // Throws Error(Device) with needed and free bytes, beginning with `what`.
    std::shared_ptr<const Allocation> allocate(size_t nbytes, const std::string &what);
    // Maps a mate's counterpart of this rank's `own`. `pci`: where the mate's GPU is; `pid`: of its process, 0 if unknown.
    void map(const std::shared_ptr<const Allocation> &own, int mate, const std::string &pci, int pid, const IpcHandle &handle);
    // Undoes the last allocate(), and the maps of it.
    void drop(const std::shared_ptr<const Allocation> &own);
    // Lets go of everything, or leaves that to the last call on the lanes. `agreed`: mates say when they have unmapped
    // what is here; where the start failed on any of them, none will, and nothing was moved.
    void close(bool agreed = true);

    Card &card() { return *card_; }
    // The number of the symmetric memory that holds these bytes, and their offset in it; number 0 if none does.
    std::pair<uint32_t, size_t> find(const char *at, size_t nbytes);
    char *mapped(int rank, const char *own);
    char *window(int rank) { return windows_[rank]; }
    // A dma-buf of the window, whole pages of the host. Throws Error(Device) where there can be none.
    Fd export_window();
    bool same_gpu(int a, int b) const { return pci_[a] == pci_[b]; }

    std::unique_ptr<Device> device(Fd wire_memory, size_t wire_nbytes, std::shared_ptr<Shared> shared, Fault &fault);

  private:
    struct Mapped {
        std::shared_ptr<const Allocation> own;
        std::vector<char *> by_rank;
    };
    void unmap(const std::vector<Mapped> &memory);
    // Whether all mates have unmapped what this rank allocated.
    struct Mates {
        std::shared_ptr<Shared> shared;
        std::vector<std::pair<int, int>> pids;  // rank, pid
        bool unmapped() const;
    };

    std::shared_ptr<Card> card_;
    int rank_, size_;
    std::shared_ptr<Mates> mates_ = std::make_shared<Mates>();
    std::mutex mutex_;
    std::vector<Mapped> memory_;  // 0: the window
    std::vector<char *> windows_;
    std::vector<std::string> pci_;
    const void *pins_ = nullptr;  // what calls on the lanes use together with this memory
};

}  // namespace hdma
