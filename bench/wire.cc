// A wire alone, between two processes of this machine: bandwidth one way, latency, and what posting costs.
//
//     wire tcp NBYTES COUNT | wire verbs NBYTES COUNT DEVICE GID DEVICE GID      (built and run by bench/wire.py)
//
// Protocol: end 0 puts COUNT chunks into a ring of slots in end 1's window, whose proxy gives each slot back by an
// empty put, as a rail peer's does; then both play ping-pong with empty puts. One line of JSON at the end.
//
// Threading: one thread an end, which sleeps on the wire's descriptor where nothing moves, as hdma's proxy does.
//
// Ordering: end 1 looks at a slot after its put has arrived, and before it gives the slot back.
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "wire/wire.h"

using namespace hdma;

namespace {

constexpr uint64_t kSlots = 4;  // as hdma's rings
constexpr uint32_t kFilled = 0, kCredit = 1, kPing = 2, kFlags = 3;
constexpr int kPings = 200, kWarmUp = 8;
constexpr int64_t kDeadlineNs = 120 * 1000 * 1000 * 1000ll;

class End final : public Wire::Sink {
  public:
    End(int rank, Fd put, Fd credit, uint64_t nbytes, const NicChoice *nic) : rank_(rank), nbytes_(nbytes) {
        window_ = static_cast<char *>(mmap(nullptr, kSlots * nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
        if (window_ == MAP_FAILED) throw Error(Kind::Device, "no memory for a window: " + errno_text(errno));
        std::vector<LinkPart> parts;
        parts.push_back({1 - rank, Lane::Put, std::move(put)});
        parts.push_back({1 - rank, Lane::Credit, std::move(credit)});
        Landing landing{window_, kSlots * nbytes, kFlags, Fd()};
        wire_ = nic ? verbs_wire(*nic, rank, std::move(parts), std::move(landing), *this)
                    : tcp_wire(rank, std::move(parts), std::move(landing), *this);
    }

    // The byte that fills a chunk.
    static char pattern(uint32_t chunk) { return static_cast<char>(chunk * 37 + 11); }

    // Seconds for `count` chunks that begin at number `first`, from the first post to the last credit.
    double send(uint32_t first, uint32_t count) {
        int64_t begun = now_ns();
        for (uint32_t i = first; i < first + count; ++i) {
            until(kCredit, i < kSlots ? 0 : i - kSlots + 1);
            post(Lane::Put, kFilled, i + 1, i % kSlots, nbytes_);
        }
        until(kCredit, first + count);
        return (now_ns() - begun) * 1e-9;
    }

    void receive(uint32_t first, uint32_t count) {
        for (uint32_t i = first; i < first + count; ++i) {
            until(kFilled, i + 1);
            post(Lane::Credit, kCredit, i + 1, 0, 0);
        }
    }

    // Every slot holds what its last chunk was filled with.
    void fill(uint32_t chunks) {
        for (uint32_t i = 0; i < chunks; ++i) std::memset(window_ + i % kSlots * nbytes_, pattern(i % kSlots), nbytes_);
    }
    void check() const {
        for (uint64_t at = 0; at < kSlots * nbytes_; ++at)
            if (window_[at] != pattern(static_cast<uint32_t>(at / nbytes_)))
                throw Error(Kind::Wire, format("byte %llu of the window is wrong", static_cast<unsigned long long>(at)));
    }

    // Seconds of one way, the median.
    double ping() {
        std::vector<double> times;
        for (uint32_t i = 1; i <= kPings; ++i) {
            int64_t begun = now_ns();
            if (rank_ == 0) post(Lane::Put, kPing, i, 0, 0);
            until(kPing, i);
            if (rank_ == 1) post(Lane::Put, kPing, i, 0, 0);
            times.push_back((now_ns() - begun) * 0.5e-9);
        }
        std::nth_element(times.begin(), times.begin() + kPings / 2, times.end());
        return times[kPings / 2];
    }

    void drain() {
        while (!wire_->drained()) step();
    }

    // Seconds of posting a chunk, the median, once the connection stands.
    double post_s() {
        std::nth_element(posts_.begin(), posts_.begin() + posts_.size() / 2, posts_.end());
        return posts_[posts_.size() / 2];
    }

    void announced(int, const Fingerprint &) override {}
    void arrived(uint32_t flag, uint32_t value) override { flags_[flag] = value; }
    void sent(uint32_t, uint32_t) override {}
    // The other end may have finished.
    void lost(int, const std::string &reason) override { lost_ = reason; }
    void garbled(int, const std::string &what) override { throw Error(Kind::Wire, "garbled: " + what); }

  private:
    void post(Lane lane, uint32_t flag, uint32_t value, uint64_t slot, uint64_t nbytes) {
        Put put{};
        put.peer = 1 - rank_;
        put.lane = lane;
        put.flag = flag, put.value = value;
        put.offset = slot * nbytes_;
        put.src = window_ + put.offset;
        put.nbytes = nbytes;
        put.local_flag = -1;
        for (;;) {
            int64_t begun = now_ns();
            bool posted = wire_->post(put);
            if (posted && nbytes && value > kWarmUp) posts_.push_back((now_ns() - begun) * 1e-9);
            if (posted) return;
            step();
        }
    }

    void until(uint32_t flag, uint32_t value) {
        while (flags_[flag] < value) step();
    }

    void step() {
        if (!lost_.empty()) throw Error(Kind::Wire, format("end %d lost the other: %s", rank_, lost_.c_str()));
        if (now_ns() > deadline_ns_) throw Error(Kind::Timeout, format("end %d waited too long", rank_));
        if (wire_->progress()) return;
        pollfd polled{wire_->fd(), POLLIN, 0};
        poll(&polled, 1, 100);
    }

    int rank_;
    uint64_t nbytes_;
    char *window_;
    std::unique_ptr<Wire> wire_;
    uint32_t flags_[kFlags] = {};
    std::string lost_;
    std::vector<double> posts_;
    int64_t deadline_ns_ = now_ns() + kDeadlineNs;
};

int run(int rank, Fd put, Fd credit, uint64_t nbytes, uint32_t count, const NicChoice *nic) try {
    End end(rank, std::move(put), std::move(credit), nbytes, nic);
    if (rank == 1) {
        end.receive(0, kWarmUp + count);
        end.ping();
        end.drain();
        end.check();
        return 0;
    }
    end.fill(kSlots);
    end.send(0, kWarmUp);
    double took_s = end.send(kWarmUp, count), one_way_s = end.ping();
    end.drain();
    printf("{\"nbytes\": %llu, \"count\": %u, \"gb_s\": %.6f, \"latency_s\": %.9f, \"post_s\": %.9f}\n",
           static_cast<unsigned long long>(nbytes), count, nbytes * count / took_s / 1e9, one_way_s, end.post_s());
    return 0;
} catch (const Error &error) {
    fprintf(stderr, "%s\n", error.what());
    return 1;
}

}  // namespace

int main(int argc, char **argv) {
    bool verbs = argc == 8 && !strcmp(argv[1], "verbs");
    if (!verbs && !(argc == 4 && !strcmp(argv[1], "tcp"))) {
        fprintf(stderr, "wire tcp NBYTES COUNT | wire verbs NBYTES COUNT DEVICE GID DEVICE GID\n");
        return 2;
    }
    uint64_t nbytes = strtoull(argv[2], nullptr, 10);
    auto count = static_cast<uint32_t>(strtoul(argv[3], nullptr, 10));
    int pairs[2][2];
    for (auto &pair : pairs)
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) return perror("socketpair"), 1;
    // Before anything of the network is opened: no device may be shared by a fork.
    pid_t child = fork();
    if (child < 0) return perror("fork"), 1;
    int rank = child ? 0 : 1;
    for (auto &pair : pairs) close(pair[1 - rank]);
    NicChoice nic{};
    if (verbs) nic = {argv[4 + 2 * rank], 1, atoi(argv[5 + 2 * rank]), 0, 0, 0, 17, 6};
    int failed = run(rank, Fd(pairs[0][rank]), Fd(pairs[1][rank]), nbytes, count, verbs ? &nic : nullptr);
    if (!child) _exit(failed);
    int status = 0;
    waitpid(child, &status, 0);
    return failed || status ? 1 : 0;
}
