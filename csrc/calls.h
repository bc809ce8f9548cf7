// calls: the numbered calls of a communicator, and whether the ranks agree on them.
//
// Protocol: begin() writes the call's fingerprint to this rank's board and compares it with what node mates have on
// theirs; rail peers' fingerprints come with their puts (heard()). The later of two ranks that differ finds the
// difference, before it moves any data, and raises the fault, which control forwards to all.
//
// Threading: begin: the walking thread. heard: the proxy. departed: control. whereabouts: any.
//
// Ordering: one lock holds begin, heard and departed apart within a process; between processes the board's
// Dekker pair (shared.h) does.
#pragma once

#include <map>
#include <mutex>
#include <string>

#include "shared.h"

namespace hdma {

class Calls {
  public:
    Calls(int rank, int size, Shared &shared, Fault &fault);

    // The next call. Throws Error where the communicator has ended or the ranks differ.
    // `input`: see Board::Record.
    Fingerprint begin(const CallText &text, const void *input);
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
    Shared &shared_;
    Fault &fault_;
    std::mutex mutex_;
    std::atomic<uint64_t> begun_{0};
    Fingerprint mine_;                                    // of the last call begun
    std::vector<std::map<uint64_t, Fingerprint>> heard_;  // by peer: calls that this rank has yet to begin
    std::vector<Fingerprint> last_heard_;
    std::vector<std::atomic<uint64_t>> departed_;
};

}  // namespace hdma
