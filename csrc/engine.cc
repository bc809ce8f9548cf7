// engine: see engine.h.
#include "engine.h"

#include <algorithm>
#include <chrono>

namespace hdma {

namespace {

// Shards from this length on leave the caches before the caller can read them all.
constexpr int64_t kStreamingNbytes = 1 << 20;
// How often a wait looks whether the user has pressed Ctrl-C.
constexpr int64_t kInterruptNs = 200 * 1000 * 1000;

template <class Condition>
bool wait_until(std::condition_variable &changed, std::unique_lock<std::mutex> &lock, int64_t deadline_ns,
                Condition condition) {
    while (!condition()) {
        int64_t left = deadline_ns - now_ns();
        if (left <= 0) return false;
        changed.wait_for(lock, std::chrono::nanoseconds(std::min<int64_t>(left, 100 * 1000 * 1000)));
    }
    return true;
}

}  // namespace

bool Ticket::wait(int64_t deadline_ns) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!wait_until(changed_, lock, deadline_ns, [&] { return done_; })) return false;
    if (error_) throw Error(*error_);
    return true;
}

bool Ticket::done() {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_;
}

bool Ticket::wait_given(uint32_t mark, int64_t deadline_ns) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!wait_until(changed_, lock, deadline_ns, [&] { return done_ || given_.at(mark); })) return false;
    if (error_) throw Error(*error_);
    return true;
}

void Ticket::push(uint32_t mark) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (error_) throw Error(*error_);
    pushed_.at(mark) = 1;
    changed_.notify_all();
}

Ticket::Pushed Ticket::wait_pushed(uint32_t mark, int64_t deadline_ns, const Fault &fault,
                                   const std::atomic<bool> &closing) {
    std::unique_lock<std::mutex> lock(mutex_);
    wait_until(changed_, lock, deadline_ns, [&] { return pushed_[mark] || fault.raised() || closing.load(); });
    return pushed_[mark] ? Pushed::Yes : closing.load() ? Pushed::Never : Pushed::Late;
}

void Ticket::give(uint32_t mark) {
    std::lock_guard<std::mutex> lock(mutex_);
    given_[mark] = 1;
    changed_.notify_all();
}

void Ticket::complete(std::optional<Error> error) {
    std::lock_guard<std::mutex> lock(mutex_);
    done_ = true;
    error_ = std::move(error);
    changed_.notify_all();
}

Engine::Engine(Config config) : config_(std::move(config)), base_(config_.ring_count, 0) {
    std::vector<Shared::Part> shared;
    std::vector<WindowPart> windows;
    for (Peer &peer : config_.peers) {
        shared.push_back({peer.rank, std::move(peer.flags), std::move(peer.doorbell)});
        windows.push_back({peer.rank, std::move(peer.window), peer.pid});
    }
    int rank = config_.rank, size = config_.size;
    shared_ = std::make_unique<Shared>(rank, size, std::move(shared), config_.flag_count * sizeof(Word), config_.spin_ns, fault_);
    device_ = host_device(rank, size, std::move(windows), config_.window_nbytes, *shared_);
    calls_ = std::make_unique<Calls>(rank, size, *shared_, fault_);
    control_ = std::make_unique<Control>(std::move(config_.control), *calls_, fault_);
    fault_.listen([this] { shared_->wake(); });
    if (!config_.tcp.empty()) {
        char *window = device_->window(rank);
        proxy_ = std::make_unique<Proxy>(rank, config_.ring_count, window, *shared_, *calls_, fault_);
        proxy_->start(tcp_wire(std::move(config_.tcp), window, config_.window_nbytes, config_.flag_count, *proxy_));
    }
    control_->start();
}

Engine::~Engine() { close(); }

// The walker asks for the user's signals while it waits, and so runs their handlers: these must not wait for it.
void Engine::check_not_walking(const char *what) {
    if (walking_.load(std::memory_order_relaxed) == std::this_thread::get_id())
        throw Error(Kind::Usage, format("rank %d: %s from a signal handler that interrupted %s. Let the handler raise an "
                                        "exception, or set something for later",
                                        config_.rank, what, fingerprint_.text));
}

void Engine::run(const Call &call) {
    check_not_walking("a call");
    {
        std::unique_lock<std::mutex> lock(queue_mutex_);
        drain_queue(lock);
        if (closing_) throw Error(Kind::Error, "this communicator is closed");
    }
    std::lock_guard<std::mutex> lock(walk_mutex_);
    execute(call, nullptr);
}

std::shared_ptr<Ticket> Engine::submit(const Call &call) {
    check_not_walking("a call");
    auto ticket = std::make_shared<Ticket>(call.request->marks);
    std::lock_guard<std::mutex> lock(queue_mutex_);
    if (closing_) throw Error(Kind::Error, "this communicator is closed");
    fault_.check();
    if (!worker_.started()) try {
            worker_.start("hdma-worker", [this] { work(); });
        } catch (const Error &error) {
            fault_.raise(error.kind, format("rank %d: %s", config_.rank, error.what()));
            throw;
        }
    queue_.push_back({call, ticket});
    queue_changed_.notify_all();
    return ticket;
}

// No deadline of its own: the worker's waits have theirs, and empty the queue one way or the other.
void Engine::drain_queue(std::unique_lock<std::mutex> &lock) {
    while (!queue_changed_.wait_for(lock, std::chrono::nanoseconds(kInterruptNs), [&] { return queue_.empty(); })) {
        lock.unlock();
        bool stop = config_.interrupted && config_.interrupted();
        lock.lock();
        if (stop) throw Error(Kind::Error, format("rank %d was interrupted with calls in flight", config_.rank));
    }
}

void Engine::work() {
    std::unique_lock<std::mutex> lock(queue_mutex_);
    for (;;) {
        queue_changed_.wait(lock, [&] { return closing_.load() || !queue_.empty(); });
        if (queue_.empty()) return;
        Job job = queue_.front();
        lock.unlock();
        std::optional<Error> error;
        try {
            std::lock_guard<std::mutex> walking(walk_mutex_);
            execute(job.call, job.ticket.get());
        } catch (const Error &e) {
            error = e;
        } catch (const std::exception &e) {
            error = Error(Kind::Error, e.what());
        }
        job.ticket->complete(std::move(error));
        lock.lock();
        queue_.pop_front();
        queue_changed_.notify_all();
    }
}

void Engine::execute(const Call &call, Ticket *ticket) try {
    struct Walking {
        explicit Walking(std::atomic<std::thread::id> &who) : who(who) { who = std::this_thread::get_id(); }
        ~Walking() { who = std::thread::id(); }
        std::atomic<std::thread::id> &who;
    } walking(walking_);
    fingerprint_ = calls_->begin(call.request->text, call.input);
    if (config_.size > 1 && !windows_open_) open_windows(!ticket);
    uint32_t mark = 0;
    for (const Piece &piece : call.request->pieces) {
        const LoadedPlan &plan = *piece.plan;
        int64_t offset = piece.offset;
        for (uint32_t i = 0; i < piece.repeats; ++i) {
            if (proxy_) proxy_->submit(piece.plan, fingerprint_);
            walk(call, piece, offset, mark, ticket);
            for (const Span &span : plan.spans) base_[span.ring] += span.chunks;
            offset += piece.nbytes;
            mark += plan.order_count;
        }
    }
} catch (const Error &error) {
    shared_->board(config_.rank).raising.store(1, std::memory_order_seq_cst);
    // Whatever stopped this rank in mid-call leaves its peers waiting: the communicator has ended for all.
    fault_.raise(error.kind, error.text);
    throw;
} catch (const std::exception &error) {  // No memory, for one.
    shared_->board(config_.rank).raising.store(1, std::memory_order_seq_cst);
    fault_.raise(Kind::Error, format("rank %d: %s", config_.rank, error.what()));
    throw;
}

template <class Wait>
void Engine::hold(bool callers_thread, const std::string &waits_for, Wait wait) {
    int64_t deadline = now_ns() + config_.timeout_ns;
    for (int64_t now = now_ns(); now < deadline && !fault_.raised(); now = now_ns()) {
        if (wait(std::min(deadline, now + kInterruptNs))) return;
        if (callers_thread && closing_)
            throw Error(Kind::Usage, format("rank %d closed its communicator during %s", config_.rank, fingerprint_.text));
        if (callers_thread && config_.interrupted && config_.interrupted())
            throw Error(Kind::Error, format("rank %d was interrupted in %s", config_.rank, fingerprint_.text));
    }
    time_out(waits_for);
}

void Engine::open_windows(bool callers_thread) {
    int rank = config_.rank;
    device_->allocate_window();
    shared_->raise(shared_->board(rank).window_ready, 1);
    shared_->ring(rank);
    for (int peer = 0; peer < config_.size; ++peer)
        if (shared_->has(peer))
            hold(callers_thread, format("rank %d to begin its first call", peer), [&](int64_t deadline_ns) {
                return shared_->wait(shared_->board(peer).window_ready, 1, deadline_ns);
            });
    windows_open_ = true;
}

char *Engine::address(const Place &place, const Call &call, const Piece &piece, int64_t offset) {
    switch (place.space) {
        case Space::Input: return call.input + place.shard * piece.input_stride + offset + place.offset;
        case Space::Output: return call.output + place.shard * piece.output_stride + offset + place.offset;
        default: return device_->window(place.rank) + place.offset;
    }
}

// From a mate's input: the flag that was waited for says that the mate is in this call, and so its record.
void Engine::read_mate(const Place &place, const Piece &piece, int64_t offset, char *dst) {
    const Board &board = shared_->board(place.rank);
    const Board::Record &record = board.records[(fingerprint_.call - 1) % kRecords];
    uint64_t address = record.input + place.shard * piece.input_stride + offset + place.offset;
    device_->read(place.rank, dst, address, place.nbytes);
    // The mate says that it raises before its caller can write: what was read without that word is the call's.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!board.raising.load(std::memory_order_seq_cst)) return;
    fault_.check();
    throw Error(Kind::Error, format("rank %d gave up %s while rank %d read its tensor", place.rank, fingerprint_.text,
                                    config_.rank));
}

void Engine::walk(const Call &call, const Piece &piece, int64_t offset, uint32_t first_mark, Ticket *ticket) {
    const Request &request = *call.request;
    const LoadedPlan &plan = *piece.plan;
    std::vector<const void *> srcs;
    uint64_t copies = 0, copied = 0, reduces = 0, reduced = 0;
    for (const Step &step : plan.walk) {
        uint32_t value = base_[step.ring] + step.value;
        if (ticket && step.needs >= 0 && request.pushes) {
            uint32_t mark = first_mark + static_cast<uint32_t>(step.needs);
            auto pushed = ticket->wait_pushed(mark, now_ns() + config_.timeout_ns, fault_, closing_);
            if (pushed == Ticket::Pushed::Late) time_out(format("its caller to push piece %u of the order", mark));
            if (pushed == Ticket::Pushed::Never)
                throw Error(Kind::Usage, format("rank %d closed its communicator in %s before it had pushed every shard",
                                                config_.rank, request.text.text));
        }
        switch (step.verb) {
            case Verb::Wait:
                if (shared_->test(step.flag, value)) break;
                hold(!ticket, config_.flag_names[step.flag],
                     [&](int64_t deadline_ns) { return device_->wait(step.flag, value, deadline_ns); });
                break;
            case Verb::Signal: device_->raise(step.flag_owner, step.flag, value, step.doorbell); break;
            case Verb::Copy:
            case Verb::Reduce: {
                char *dst = address(step.dst, call, piece, offset);
                const Place *sources = &plan.sources[step.first_source];
                bool streaming = step.dst.space == Space::Output && piece.output_stride >= kStreamingNbytes;
                if (step.source_count == 1 && sources->wire == step.dst.wire) {
                    if (sources->space == Space::Input && sources->rank != config_.rank)
                        read_mate(*sources, piece, offset, dst);
                    else
                        device_->copy(dst, address(*sources, call, piece, offset), step.dst.nbytes, streaming);
                    ++copies;
                    copied += step.dst.nbytes;
                    break;
                }
                Dtype to = step.dst.wire ? request.wire_dtype : request.dtype;
                Dtype from = sources->wire ? request.wire_dtype : request.dtype;
                srcs.clear();
                for (uint32_t s = 0; s < step.source_count; ++s) srcs.push_back(address(sources[s], call, piece, offset));
                // Only the last step of an average divides: the sums before it keep their bits.
                int divisor = request.op == Op::Avg && step.dst.space == Space::Output ? config_.size : 1;
                device_->reduce(request.op, divisor, dst, to, srcs.data(), step.source_count, from,
                                step.dst.nbytes / dtype_nbytes(to), streaming);
                ++reduces;
                reduced += step.dst.nbytes;
                break;
            }
            default: break;
        }
        if (ticket && step.gives >= 0 && request.marks) ticket->give(first_mark + static_cast<uint32_t>(step.gives));
    }
    copies_.fetch_add(copies, std::memory_order_relaxed);
    copy_nbytes_.fetch_add(copied, std::memory_order_relaxed);
    reduces_.fetch_add(reduces, std::memory_order_relaxed);
    reduce_nbytes_.fetch_add(reduced, std::memory_order_relaxed);
}

void Engine::time_out(const std::string &waits_for) {
    fault_.check();
    std::string text = format("rank %d waited %g s in call %llu, %s, for: %s.", config_.rank, config_.timeout_ns * 1e-9,
                              static_cast<unsigned long long>(fingerprint_.call), fingerprint_.text, waits_for.c_str());
    std::string others = calls_->whereabouts();
    if (!others.empty()) text += " Other ranks: " + others + ".";
    throw Error(Kind::Timeout, text + " " + config_.limit + " sets the limit");
}

void Engine::close() {
    if (!closing_) check_not_walking("close()");
    {
        std::lock_guard<std::mutex> lock(queue_mutex_);
        if (closing_.exchange(true)) return;
        queue_changed_.notify_all();
    }
    try {
        std::unique_lock<std::mutex> lock(queue_mutex_);
        drain_queue(lock);
    } catch (const Error &error) {
        fault_.raise(error.kind, error.text);  // Interrupted: the worker's call ends with it.
    }
    worker_.join();
    std::lock_guard<std::mutex> walking(walk_mutex_);
    if (proxy_) {
        int64_t deadline = now_ns() + config_.timeout_ns;
        while (!proxy_->drain(std::min(deadline, now_ns() + kInterruptNs)) && !fault_.raised()) {
            if (now_ns() >= deadline)
                fault_.raise(Kind::Timeout,
                             format("rank %d could not close: within %g s its peers did not take what it had put, or did "
                                    "not read what it holds for them. %s",
                                    config_.rank, config_.timeout_ns * 1e-9, calls_->whereabouts().c_str()));
            if (config_.interrupted && config_.interrupted())
                fault_.raise(Kind::Error, format("rank %d was interrupted while it closed", config_.rank));
        }
    }
    // The goodbye (or, after a fault, its cause) before the data connections end, so that their end is no loss.
    control_->close();
    if (proxy_) proxy_->close();
}

void Engine::forget() {
    closing_ = true;
    worker_.forget();
    control_->forget();
    if (proxy_) proxy_->forget();
}

Engine::Stats Engine::stats() {
    Stats s{};
    s.calls = calls_->begun();
    s.copies = copies_.load();
    s.copy_nbytes = copy_nbytes_.load();
    s.reduces = reduces_.load();
    s.reduce_nbytes = reduce_nbytes_.load();
    if (proxy_) {
        s.puts = proxy_->puts();
        s.put_nbytes = proxy_->put_nbytes();
        s.wire_sent_nbytes = proxy_->sent_nbytes();
    }
    return s;
}

}  // namespace hdma
