// wire/flusher: holds back the flags of what a device has written into memory of a GPU until that has landed there.
//
// Protocol: a queue pair to itself, by which the device reads a word from the window. One read covers all that was held
// before it was posted; its completion lets their flags pass.
//
// Threading: the wire's.
//
// Ordering: the bus does not let a read pass the writes that the same device has posted before it (PCI Express ordering
// rules); NCCL's network plugin does so too.
#pragma once

#include "nic.h"

namespace hdma {

class Flusher {
  public:
    static constexpr uint64_t kRequest = ~0ull;  // the wr_id of its reads, which complete with the wire's requests

    // `window`: what is read, `rkey` its key. `scratch`: registered memory of the host that the word goes to.
    Flusher(Nic &nic, int rank, const char *window, uint32_t rkey, ibv::Piece scratch);
    void hold(uint32_t flag, uint32_t value) { held_.push_back({flag, value}); }
    // Reads, if anything is held and no read is under way. Throws Error(Wire).
    void read();
    void completed(const ibv::Completion &completion, Wire::Sink &sink);

  private:
    struct Arrival {
        uint32_t flag, value;
    };
    Nic &nic_;
    int rank_;
    uint64_t window_;
    uint32_t rkey_;
    ibv::Piece scratch_;
    ibv::Qp *qp_;
    std::vector<Arrival> held_, covered_;
};

}  // namespace hdma
