// shared: see shared.h.
#include "shared.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

#include "memory.h"

namespace hdma {

namespace {

constexpr int64_t kYieldNs = 100 * 1000;
// A sleeper looks up this often even if nobody wakes it: a raiser may be killed between raising and waking.
constexpr int64_t kSliceNs = 100 * 1000 * 1000;

void futex_wait(std::atomic<uint32_t> &word, uint32_t seen, int64_t ns) {
    timespec t{static_cast<time_t>(ns / 1000000000), static_cast<long>(ns % 1000000000)};
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &t, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t> &word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

size_t Shared::nbytes(size_t flags_nbytes) { return sizeof(Board) + flags_nbytes; }

Shared::Shared(int rank, int size, std::vector<Part> parts, size_t flags_nbytes, int64_t spin_ns,
               const Fault &fault)
    : rank_(rank), flags_nbytes_(flags_nbytes), spin_ns_(spin_ns), fault_(fault), peers_(size) {
    for (Part &part : parts) {
        void *at = mmap(nullptr, nbytes(flags_nbytes), PROT_READ | PROT_WRITE, MAP_SHARED, part.flags.get(), 0);
        if (at == MAP_FAILED)
            throw Error(Kind::Device, format("rank %d cannot map the flags of rank %d (%zu bytes): %s", rank, part.rank,
                                             nbytes(flags_nbytes), mmap_error_text(errno).c_str()));
        peers_[part.rank].board = static_cast<Board *>(at);
        peers_[part.rank].doorbell = std::move(part.doorbell);
    }
}

Shared::~Shared() {
    for (Peer &peer : peers_)
        if (peer.board) munmap(peer.board, nbytes(flags_nbytes_));
}

bool Shared::wait(Word &word, uint32_t value, int64_t deadline_ns) {
    auto there = [&](std::memory_order order) { return reached(word.value.load(order), value); };
    if (there(std::memory_order_acquire)) return true;
    for (int64_t until = now_ns() + spin_ns_; now_ns() < until;)
        for (int i = 0; i < 16; ++i) {
            relax();
            if (there(std::memory_order_acquire)) return true;
        }
    // Then gives its core to whom it waits for, if he is here: a third of the time of sleeping and being woken.
    for (int64_t until = now_ns() + kYieldNs; now_ns() < until;) {
        sched_yield();
        if (there(std::memory_order_acquire)) return true;
    }
    word.sleepers.fetch_add(1, std::memory_order_seq_cst);
    bool done;
    for (;;) {
        uint32_t seen = word.value.load(std::memory_order_seq_cst);
        int64_t left = deadline_ns - now_ns();
        if ((done = reached(seen, value)) || fault_.raised() || left <= 0) break;
        futex_wait(word.value, seen, std::min(left, kSliceNs));
    }
    word.sleepers.fetch_sub(1, std::memory_order_relaxed);
    return done;
}

void Shared::raise(int rank, uint32_t flag, uint32_t value, bool doorbell) {
    if (doorbell) {
        flags(rank)[flag].value.store(value, std::memory_order_seq_cst);
        ring(rank);
    } else {
        raise(flags(rank)[flag], value);
    }
}

void Shared::raise(Word &word, uint32_t value) {
    word.value.store(value, std::memory_order_seq_cst);
    if (word.sleepers.load(std::memory_order_seq_cst)) futex_wake(word.value);
}

void Shared::ring(int rank) {
    if (!board(rank).proxy_asleep.load(std::memory_order_seq_cst)) return;
    uint64_t one = 1;
    while (write(peers_[rank].doorbell.get(), &one, sizeof one) < 0 && errno == EINTR) {
    }
}

void Shared::wake() {
    for (size_t i = 0; i < flags_nbytes_ / sizeof(Word); ++i)
        if (flags(rank_)[i].sleepers.load(std::memory_order_seq_cst)) futex_wake(flags(rank_)[i].value);
    for (Peer &peer : peers_)
        if (peer.board) futex_wake(peer.board->window_ready.value);
    ring(rank_);
}

}  // namespace hdma
