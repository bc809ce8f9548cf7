// shared: the words that the ranks of a node share in host memory: flags, call records, the proxies' doorbells.
//
//     memfd of a rank, mapped by its node mates
//     +---------------------------------+-------------------------------+
//     | Board: ready, asleep, records   | flags, a cache line each      |
//     +---------------------------------+-------------------------------+
//
// Protocol: a flag is a word that only rises. Who waits spins briefly, then says so in `sleepers` and sleeps on a
// futex of the word; who raises looks at `sleepers` and wakes. A flag whose waiter is a proxy, which sleeps on file
// descriptors, is followed by a write to that rank's eventfd where its Board says that the proxy is asleep.
//
// Threading: any thread.
//
// Ordering: raise() stores the value with release after the data was written; test() and wait() load it with acquire.
// Sleeping is a Dekker pair: "value, then sleepers?" against "sleepers, then value?", all sequentially consistent, so
// one of the two sees the other and no wake-up is lost. The same holds for a proxy's `asleep`, and for call records:
// of two ranks that begin different calls at once, at least one sees the other's record.
#pragma once

#include <vector>

#include "base.h"
#include "plan.h"

namespace hdma {

// a >= b on counters that wrap.
inline bool reached(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) >= 0; }

struct alignas(64) Word {
    std::atomic<uint32_t> value;
    std::atomic<uint32_t> sleepers;
};
static_assert(sizeof(Word) == 64, "a cache line each: a waiter spins on its word while neighbours are written");

// Calls by which a mate may be ahead: on the host a ring of slots at most. On a GPU as many as its streams take, which
// is about 1,000 steps (measured), of which a call has three or more.
constexpr uint32_t kRecords = 512;

// What node mates read of a rank besides its flags.
struct Board {
    Word window_ready;  // 1 once mates may write the window
    std::atomic<uint32_t> proxy_asleep;
    // Before a call raises: from then on its caller may reuse the tensors that mates read directly.
    std::atomic<uint32_t> raising;
    std::atomic<uint64_t> latest_call;  // number of the last call begun
    std::atomic<uint32_t> unmapped;     // this rank has let go of its mates' GPU memory
    struct alignas(64) Record {
        std::atomic<uint64_t> call;  // stored after the rest; 0 while that changes
        Fingerprint fingerprint;
        uint64_t input;  // address of the caller's input, for mates that read it directly

        void write(const Fingerprint &mine, uint64_t address) {
            call.store(0, std::memory_order_relaxed);
            std::atomic_thread_fence(std::memory_order_release);
            fingerprint = mine;
            input = address;
            call.store(mine.call, std::memory_order_seq_cst);
        }
        // Whether it is that call's, and was so until it was read.
        bool read(uint64_t number, Fingerprint &found) const {
            if (call.load(std::memory_order_seq_cst) != number) return false;
            found = fingerprint;
            std::atomic_thread_fence(std::memory_order_acquire);
            return call.load(std::memory_order_relaxed) == number;
        }
    } records[kRecords];  // calls by number modulo kRecords
};

class Shared {
  public:
    struct Part {
        int rank;
        Fd flags, doorbell;
    };
    Shared(int rank, int size, std::vector<Part> parts, size_t flags_nbytes, int64_t spin_ns, const Fault &fault);
    ~Shared();
    static size_t nbytes(size_t flags_nbytes);  // of a rank's memfd

    bool test(uint32_t flag, uint32_t value) const {
        return reached(flags(rank_)[flag].value.load(std::memory_order_acquire), value);
    }
    // Blocks until the flag has reached the value, until the deadline, or until the fault; true if it has.
    bool wait(uint32_t flag, uint32_t value, int64_t deadline_ns) { return wait(flags(rank_)[flag], value, deadline_ns); }
    bool wait(Word &word, uint32_t value, int64_t deadline_ns);
    // Raises a flag of this rank or of a node mate. Doorbell: its waiter is that rank's proxy.
    void raise(int rank, uint32_t flag, uint32_t value, bool doorbell);
    void raise(Word &word, uint32_t value);
    // Wakes a rank's proxy if it sleeps.
    void ring(int rank);
    // Wakes every sleeper of this process, to look at the fault.
    void wake();

    Board &board(int rank) const { return *peers_[rank].board; }
    bool has(int rank) const { return peers_[rank].board != nullptr; }  // this rank or a node mate
    int doorbell() const { return peers_[rank_].doorbell.get(); }

    // For a GPU, whose streams wait for the words and write them.
    size_t flag_count() const { return flags_nbytes_ / sizeof(Word); }
    Word *word(int rank, uint32_t flag) const { return flags(rank) + flag; }
    void *mapping(int rank) const { return peers_[rank].board; }
    size_t mapping_nbytes() const { return nbytes(flags_nbytes_); }

  private:
    struct Peer {
        Fd doorbell;
        Board *board = nullptr;
    };
    Word *flags(int rank) const { return reinterpret_cast<Word *>(peers_[rank].board + 1); }

    int rank_;
    size_t flags_nbytes_;
    int64_t spin_ns_;
    const Fault &fault_;
    std::vector<Peer> peers_;  // by rank; empty but for this rank and its node mates
};

}  // namespace hdma
