// proxy: see proxy.h.
#include "proxy.h"

#include <errno.h>
#include <poll.h>
#include <time.h>
#include <unistd.h>

namespace hdma {

namespace {

// Only a missed wake-up would ever be noticed this late.
constexpr int kSliceMs = 100;
// How often to look for what a stream raises.
constexpr int64_t kSilentNs = 20 * 1000;
// How long the end of a data connection may precede the goodbye on the control link.
constexpr int64_t kLossGraceNs = 1000 * 1000 * 1000;

}  // namespace

Proxy::Proxy(int rank, size_t ring_count, char *window, bool silent, Shared &shared, Calls &calls, Fault &fault)
    : rank_(rank), window_(window), silent_(silent), shared_(shared), calls_(calls), fault_(fault) {
    lanes_[0].steps = &LoadedPlan::put;
    lanes_[1].steps = &LoadedPlan::credit;
    for (Cursor &lane : lanes_) lane.base.assign(ring_count, 0);
}

void Proxy::start(std::unique_ptr<Wire> wire) {
    wire_ = std::move(wire);
    thread_.start("hdma-proxy", [this] { run(); });
}

void Proxy::submit(std::shared_ptr<const LoadedPlan> plan, const Fingerprint &fingerprint) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        submitted_.push_back({std::move(plan), fingerprint});
        submitted_count_.fetch_add(1, std::memory_order_seq_cst);
    }
    shared_.ring(rank_);
}

bool Proxy::drain(int64_t deadline_ns) {
    // Polled: it happens once in the life of a communicator, and the peers decide how long it takes.
    while (!fault_.raised() && now_ns() < deadline_ns) {
        // In this order: the proxy stops being idle before it counts what it takes.
        if (taken_count_.load() == submitted_count_.load() && idle_.load()) return true;
        shared_.ring(rank_);
        usleep(500);
    }
    return false;
}

void Proxy::close() {
    if (!thread_.started()) return;
    stop_.store(true);
    shared_.ring(rank_);
    thread_.join();
    std::lock_guard<std::mutex> lock(wire_mutex_);
    sent_nbytes_ = wire_->sent_nbytes();
    wire_.reset();
}

void Proxy::forget() {
    thread_.forget();
    if (wire_) wire_->forget();
    wire_.reset();
}

uint64_t Proxy::sent_nbytes() {
    std::lock_guard<std::mutex> lock(wire_mutex_);
    return wire_ ? wire_->sent_nbytes() : sent_nbytes_;
}

void Proxy::run() try {
    while (!stop_.load()) {
        take_submitted();
        bool moved = false;
        if (!fault_.raised()) {
            for (Cursor &lane : lanes_) moved |= advance(lane);
            // Peers may put before this rank has begun its first call: what they send waits in the socket.
            if (shared_.board(rank_).window_ready.value.load(std::memory_order_acquire)) moved |= wire_->progress();
            report_losses();
        }
        if (!moved) sleep();
    }
} catch (const Error &error) {
    fault_.raise(error.kind, error.text);
} catch (const std::exception &error) {
    fault_.raise(Kind::Error, format("rank %d: its proxy failed: %s", rank_, error.what()));
}

void Proxy::take_submitted() {
    if (taken_count_.load(std::memory_order_relaxed) == submitted_count_.load(std::memory_order_acquire)) return;
    std::lock_guard<std::mutex> lock(mutex_);
    idle_.store(false);
    for (const Run &run : submitted_)
        for (Cursor &lane : lanes_) lane.runs.push_back(run);
    taken_count_.fetch_add(submitted_.size());
    submitted_.clear();
}

bool Proxy::advance(Cursor &lane) {
    bool moved = false;
    while (!lane.runs.empty()) {
        const LoadedPlan &plan = *lane.runs.front().plan;
        const auto &steps = plan.*lane.steps;
        for (; lane.at < steps.size(); ++lane.at, moved = true)
            if (!execute(plan, steps[lane.at], lane)) return moved;
        for (const Span &span : plan.spans) lane.base[span.ring] += span.chunks;
        lane.runs.pop_front();
        lane.at = 0;
        moved = true;
    }
    return moved;
}

bool Proxy::execute(const LoadedPlan &plan, const Step &step, const Cursor &lane) {
    uint32_t value = lane.base[step.ring] + step.value;
    if (step.verb == Verb::Wait) return shared_.test(step.flag, value);
    Put put{};
    put.peer = step.flag_owner;
    put.lane = step.lane;
    put.flag = step.flag;
    put.value = value;
    put.local_flag = step.local_flag;
    put.local_value = lane.base[step.local_ring] + step.local_value;
    put.fingerprint = lane.runs.front().fingerprint;
    if (step.source_count) {
        put.offset = step.dst.offset;
        put.nbytes = step.dst.nbytes;
        put.src = window_ + plan.sources[step.first_source].offset;
    }
    if (!wire_->post(put)) return false;
    puts_.fetch_add(1, std::memory_order_relaxed);
    put_nbytes_.fetch_add(put.nbytes, std::memory_order_relaxed);
    return true;
}

bool Proxy::runnable(const Cursor &lane) {
    if (lane.runs.empty()) return false;
    const auto &steps = (*lane.runs.front().plan).*lane.steps;
    const Step &step = steps[lane.at];
    // A put that could not be posted waits for the wire, whose descriptor is polled.
    return step.verb == Verb::Wait && shared_.test(step.flag, lane.base[step.ring] + step.value);
}

void Proxy::sleep() {
    auto &asleep = shared_.board(rank_).proxy_asleep;
    asleep.store(1, std::memory_order_seq_cst);
    bool busy = taken_count_.load() != submitted_count_.load(std::memory_order_seq_cst);
    for (Cursor &lane : lanes_) busy |= !fault_.raised() && runnable(lane);
    if (!busy) {
        bool ready = shared_.board(rank_).window_ready.value.load(std::memory_order_seq_cst);
        idle_.store(lanes_[0].runs.empty() && lanes_[1].runs.empty() && wire_->drained());
        pollfd polled[2] = {{shared_.doorbell(), POLLIN, 0}, {ready && !fault_.raised() ? wire_->fd() : -1, POLLIN, 0}};
        int64_t ns = (losses_.empty() ? kSliceMs : kSliceMs / 10) * 1000000ll;
        if (silent_ && !fault_.raised() && !(lanes_[0].runs.empty() && lanes_[1].runs.empty())) ns = kSilentNs;
        timespec time{static_cast<time_t>(ns / 1000000000), static_cast<long>(ns % 1000000000)};
        ppoll(polled, 2, &time, nullptr);
        if (polled[0].revents) {
            uint64_t count;
            while (read(shared_.doorbell(), &count, sizeof count) < 0 && errno == EINTR) {
            }
        }
    }
    asleep.store(0, std::memory_order_seq_cst);
}

void Proxy::lost(int peer, const std::string &reason) { losses_.push_back({peer, reason, now_ns()}); }

void Proxy::garbled(int peer, const std::string &what) {
    fault_.raise(Kind::Wire, format("rank %d received what no rank sends from rank %d: %s", rank_, peer, what.c_str()));
}

void Proxy::report_losses() {
    for (size_t i = 0; i < losses_.size();) {
        Loss &loss = losses_[i];
        bool departed = calls_.has_departed(loss.peer);
        if (!departed && now_ns() - loss.since_ns < kLossGraceNs) {
            ++i;
            continue;
        }
        if (!departed)
            fault_.raise(Kind::Wire, format("rank %d lost rank %d, which is still alive: %s", rank_, loss.peer,
                                            loss.reason.c_str()));
        losses_.erase(losses_.begin() + i);
    }
}

}  // namespace hdma
