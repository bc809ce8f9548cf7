// calls: the numbered calls of a communicator, and whether the ranks agree on them.
//
// Protocol: number() gives a call its fingerprint as it is issued. announce() writes it to this rank's board as it is
// walked, which may be later, and compares it with what node mates have on theirs; rail peers' fingerprints come with
// their puts (heard()). The later of two ranks that differ finds the difference, before it moves any data, and raises
// the fault, which control forwards to all.
//
// Threading: number: the caller's threads. announce: the walking thread. heard: a proxy. departed: control.
// whereabouts: any.
//
// Ordering: one lock holds all of these apart within a process; between processes the board's Dekker pair (shared.h)
// does.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "shared.h"

namespace hdma {

class Calls {
  public:
    Calls(int rank, int size, Fault &fault);
    // The boards of a device's calls: each device has its own, so that one far ahead leaves the others' records alone.
    void add(std::shared_ptr<Shared> boards);
    void remove(const std::shared_ptr<Shared> &boards);

    // The next call. Throws Error where the communicator has ended before; where it ends here, announce() does.
    Fingerprint number(const CallText &text);
    // Throws Error where the ranks differ. `boards`: of the device that makes the call; `input`: see Board::Record.
    void announce(const Fingerprint &mine, const void *input, Shared &boards);
    void heard(int peer, const Fingerprint &theirs);
    // The peer has closed its communicator after so many calls.
    void departed(int peer, uint64_t calls);

    bool has_departed(int peer) const { return departed_[peer].load(std::memory_order_acquire) != kHere; }
    uint64_t begun() const { return begun_.load(std::memory_order_acquire); }
    // "rank 1 is in call 7, all_gather(...); rank 2 ..." for every rank that this one hears of.
    std::string whereabouts();

  private:
    static constexpr uint64_t kHere = ~0ull;
    void compare(const Fingerprint &mine, int peer, const Fingerprint &theirs);
    void missed(int peer, uint64_t calls);

    int rank_;
    Fault &fault_;
    std::mutex mutex_;
    std::vector<std::shared_ptr<Shared>> boards_;
    std::atomic<uint64_t> begun_{0};
    Fingerprint mine_;                                    // of the last call numbered
    std::vector<std::map<uint64_t, Fingerprint>> heard_;  // by peer: calls that this rank has yet to announce
    std::vector<Fingerprint> last_heard_;
    std::vector<std::atomic<uint64_t>> departed_;
};

}  // namespace hdma
