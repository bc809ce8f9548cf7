// engine: see engine.h.
#include "engine.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace hdma {

namespace {

// Shards from this length on leave the caches before the caller can read them all.
constexpr int64_t kStreamingNbytes = 1 << 20;
// How long after its communicator has ended a GPU may take to be through with it.
constexpr int64_t kHungNs = 5 * 1000 * 1000 * 1000ll;
// How long the news of a mate's end may take.
constexpr int64_t kReasonNs = 1000 * 1000 * 1000ll;
// How often a wait looks whether the user has pressed Ctrl-C.
constexpr int64_t kInterruptNs = 200 * 1000 * 1000;

}  // namespace

Engine::Engine(Config config)
    : config_(std::move(config)), ties_(config_.ties), first_(!ties_), base_(config_.ring_count, 0) {
    std::vector<Shared::Part> shared;
    std::vector<WindowPart> windows;
    for (Peer &peer : config_.peers) {
        shared.push_back({peer.rank, std::move(peer.flags), std::move(peer.doorbell)});
        windows.push_back({peer.rank, std::move(peer.window), peer.pid});
    }
    int rank = config_.rank, size = config_.size;
    if (first_) {
        ties_ = std::make_shared<Ties>();
        ties_->rank = rank;
        ties_->calls = std::make_unique<Calls>(rank, size, ties_->fault);
    }
    Fault &fault = ties_->fault;
    shared_ = std::make_shared<Shared>(rank, size, std::move(shared), config_.flag_count * sizeof(Word), config_.spin_ns, fault);
    device_ = config_.make_device
                  ? config_.make_device(std::move(windows), shared_, fault)
                  : host_device(rank, size, std::move(windows), config_.window_nbytes, *shared_);
    holds_ = device_->holds();
    device_->watch(config_.timeout_ns, [this](const Device::Flight &flight, const std::string &failure, const std::string &behind) {
        late(flight, failure, behind);
    });
    fault.listen([shared = std::weak_ptr<Shared>(shared_)] {
        if (auto there = shared.lock()) there->wake();
    });
    if (first_) ties_->control = std::make_unique<Control>(std::move(config_.control), *ties_->calls, fault);
    if (device_->streams()) {
        // The ranks have met over it: nobody's first call is waited for.
        device_->allocate_window();
        shared_->raise(shared_->board(rank).window_ready, 1);
        windows_open_ = true;
    }
    if (!config_.links.empty()) {
        Landing landing{device_->wire_window(), config_.window_nbytes, static_cast<uint32_t>(config_.flag_count),
                        device_->wire_export(), device_->wire_flushes()};
        proxy_ = std::make_unique<Proxy>(rank, config_.ring_count, landing.window, device_->streams(), *shared_, *ties_->calls, fault);
        proxy_->start(config_.nic ? verbs_wire(*config_.nic, rank, std::move(config_.links), std::move(landing), *proxy_)
                                  : tcp_wire(rank, std::move(config_.links), std::move(landing), *proxy_));
    }
    ties_->calls->add(shared_);  // Last, so that an engine that cannot be made leaves nothing there.
    if (first_) ties_->control->start();
}

Engine::~Engine() {
    close();
    device_->abandon();
    ties_->calls->remove(shared_);
}

// The walker asks for the user's signals while it waits, and so runs their handlers: these must not wait for it.
void Engine::check_not_walking(const char *what) {
    if (walking_.load(std::memory_order_relaxed) == std::this_thread::get_id())
        throw Error(Kind::Usage, format("rank %d: %s from a signal handler that interrupted %s. Let the handler raise an "
                                        "exception, or set something for later",
                                        config_.rank, what, fingerprint_.text));
}

void Engine::run(const Call &call) {
    if (device_->streams()) {
        auto ticket = submit(call);
        while (!ticket->wait(now_ns() + kInterruptNs))
            if (config_.interrupted && config_.interrupted()) {
                // As in a walk of this thread's own: the caller lets go of the tensors.
                Error error(Kind::Error, format("rank %d was interrupted in %s", config_.rank, call.request->text.text));
                ties_->fault.raise(error.kind, error.text);
                throw error;
            }
        ticket->order(call.stream);
        return;
    }
    check_not_walking("a call");
    {
        std::unique_lock<std::mutex> lock(queue_mutex_);
        drain_queue(lock);
        if (closing_) throw Error(Kind::Error, "this communicator is closed");
    }
    std::lock_guard<std::mutex> lock(walk_mutex_);
    Walk walk;
    walk.call = call;
    walk.fingerprint = ties_->calls->number(call.request->text);
    advance(walk);
}

std::shared_ptr<Ticket> Engine::submit(const Call &call) {
    check_not_walking("a call");
    Walk walk;
    walk.call = call;
    auto ticket = walk.ticket = make_ticket(call);
    if (device_->streams()) check_pushed(ticket, call.request->pushes);
    if (holds_) {
        std::lock_guard<std::mutex> lock(walk_mutex_);
        if (closing_) throw Error(Kind::Error, "this communicator is closed");
        ties_->fault.check();
        if (suspended_) resume();  // All is pushed, and another thread has not gone on with it yet.
        walk.entered = moment(call.stream);
        walk.fingerprint = ties_->calls->number(call.request->text);
        go_on(walk);
        return ticket;
    }
    walk.entered = moment(call.stream);
    std::lock_guard<std::mutex> lock(queue_mutex_);
    if (closing_) throw Error(Kind::Error, "this communicator is closed");
    walk.fingerprint = ties_->calls->number(call.request->text);
    if (!worker_.started()) try {
            worker_.start("hdma-worker", [this] { work(); });
        } catch (const Error &error) {
            ties_->fault.raise(error.kind, format("rank %d: %s", config_.rank, error.what()));
            throw;
        }
    queue_.push_back(std::move(walk));
    queue_changed_.notify_all();
    return ticket;
}

Moment Engine::moment(CallerStream stream) {
    return ties_->told([&] { return device_->moment(stream); });
}

void Engine::follow(CallerStream stream, CallerStream behind) {
    ties_->told([&] { device_->order(stream, device_->moment(behind)); });
}

std::shared_ptr<Ticket> Engine::make_ticket(const Call &call) {
    auto ticket = std::make_shared<Ticket>(call.request->marks, device_, ties_);
    std::lock_guard<std::mutex> lock(queue_mutex_);
    if (tickets_.size() == tickets_.capacity())
        tickets_.erase(std::remove_if(tickets_.begin(), tickets_.end(), [](const auto &each) { return each.expired(); }),
                       tickets_.end());
    tickets_.push_back(ticket);
    return ticket;
}

// A call behind one whose shards are still to be pushed would be on the streams in an order that depends on when.
void Engine::check_pushed(const std::shared_ptr<Ticket> &next, bool pushes) {
    std::lock_guard<std::mutex> lock(queue_mutex_);
    auto before = started_.lock();
    if (before && !before->all_pushed())
        throw Error(Kind::Usage, format("rank %d: a started reduce_scatter waits for shards that were not pushed: push all of "
                                        "them before the next call of this communicator", config_.rank));
    started_ = pushes ? next : std::shared_ptr<Ticket>();
}

void Engine::push(const std::shared_ptr<Ticket> &ticket, uint32_t mark, CallerStream stream) {
    ticket->push(mark, moment(stream));
    if (!holds_) return;
    std::lock_guard<std::mutex> lock(walk_mutex_);
    if (suspended_ && suspended_->ticket == ticket) resume();
}

void Engine::resume() {
    Walk walk = std::move(*suspended_);
    suspended_.reset();
    go_on(walk);
}

// Fills the streams as far as the caller has pushed.
void Engine::go_on(Walk &walk) {
    try {
        if (advance(walk))
            walk.ticket->complete(std::nullopt);
        else
            suspended_ = std::move(walk);
    } catch (const Error &error) {
        walk.ticket->complete(error);
        throw;
    } catch (const std::exception &error) {
        walk.ticket->complete(Error(Kind::Error, error.what()));
        throw;
    }
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
        Walk walk = queue_.front();
        lock.unlock();
        std::optional<Error> error;
        try {
            std::lock_guard<std::mutex> walking(walk_mutex_);
            advance(walk);
        } catch (const Error &e) {
            error = e;
        } catch (const std::exception &e) {
            error = Error(Kind::Error, e.what());
        }
        walk.ticket->complete(std::move(error));
        lock.lock();
        queue_.pop_front();
        queue_changed_.notify_all();
    }
}

// Goes on until the end of the call, or (false) to a shard that was not pushed.
bool Engine::advance(Walk &walk) try {
    struct Walking {
        explicit Walking(std::atomic<std::thread::id> &who) : who(who) { who = std::this_thread::get_id(); }
        ~Walking() { who = std::thread::id(); }
        std::atomic<std::thread::id> &who;
    } walking(walking_);
    const Call &call = walk.call;
    fingerprint_ = walk.fingerprint;
    if (!walk.begun) {
        ties_->calls->announce(fingerprint_, call.input, *shared_);
        if (config_.size > 1 && !windows_open_) open_windows(!walk.ticket);
        device_->begin(fingerprint_, walk.entered);
        walk.begun = true;
    } else {
        ties_->fault.check();  // Its waits were released, and would pass.
    }
    device_->resume();
    const auto &pieces = call.request->pieces;
    for (; walk.piece < pieces.size(); ++walk.piece, walk.repeat = 0) {
        const Piece &piece = pieces[walk.piece];
        for (; walk.repeat < piece.repeats; ++walk.repeat) {
            if (!walk.run_begun && proxy_) proxy_->submit(piece.plan, fingerprint_);
            walk.run_begun = true;
            if (!run_once(walk, piece)) {
                device_->pause();
                return false;
            }
            for (const Span &span : piece.plan->spans) base_[span.ring] += span.chunks;
            walk.mark += piece.plan->order_count;
            walk.step = 0;
            walk.run_begun = false;
            bool last = walk.piece + 1 == pieces.size() && walk.repeat + 1 == piece.repeats;
            if (device_->streams() && !last) {
                ties_->fault.check();
                // A stream takes about 1,000 steps ahead (measured). Then the driver holds this thread up, and only what
                // the device has been handed before is watched.
                device_->pause();
                device_->resume();
            }
        }
    }
    device_->end();
    return true;
} catch (const Error &error) {
    Error whole = error;
    if (device_->streams() && error.kind == Kind::Device && !ties_->fault.raised())
        whole.text = format("rank %d: its GPU failed in call %llu, %s: %s", config_.rank,
                            static_cast<unsigned long long>(fingerprint_.call), fingerprint_.text, error.text.c_str());
    give_up(walk, whole);
    throw whole;
} catch (const std::exception &error) {  // No memory, for one.
    give_up(walk, Error(Kind::Error, format("rank %d: %s", config_.rank, error.what())));
    throw;
}

// Whatever stopped this rank in mid-call leaves its peers waiting: the communicator has ended for all.
void Engine::give_up(Walk &walk, const Error &error) {
    shared_->board(config_.rank).raising.store(1, std::memory_order_seq_cst);
    ties_->fault.raise(error.kind, error.text);
    if (walk.begun) try {
            device_->end();
        } catch (const Error &) {  // Of the GPU, and most likely the one that is being told.
        }
}

template <class Wait>
void Engine::hold(bool callers_thread, const std::string &waits_for, Wait wait) {
    int64_t deadline = now_ns() + config_.timeout_ns;
    for (int64_t now = now_ns(); now < deadline && !ties_->fault.raised(); now = now_ns()) {
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

// Of this rank, of a mate's window, or of a mate's symmetric memory.
Spot Engine::spot(const Place &place, const Walk &walk, const Piece &piece) {
    const Call &call = walk.call;
    switch (place.space) {
        case Space::Input: {
            char *base = place.rank == config_.rank ? call.input : device_->mapped(place.rank, call.input);
            return {base + place.shard * piece.input_stride + walk.offset + place.offset, place.rank, false};
        }
        case Space::Output:
            return {call.output + place.shard * piece.output_stride + walk.offset + place.offset, place.rank, false};
        case Space::Host: return {device_->wire_window() + place.offset, place.rank, true};
        default: return {device_->window(place.rank) + place.offset, place.rank, false};
    }
}

// From a mate's input: the flag that was waited for says that the mate is in this call, and so its record.
void Engine::read_mate(const Place &place, const Piece &piece, int64_t offset, char *dst) {
    const Board &board = shared_->board(place.rank);
    const Board::Record &record = board.records[(fingerprint_.call - 1) % kRecords];
    uint64_t address = record.input + place.shard * piece.input_stride + offset + place.offset;
    try {
        device_->read(place.rank, dst, address, place.nbytes);
    } catch (const Error &) {
        // Of a mate that has ended, its links tell more; all ranks are to have one cause.
        for (int64_t until = now_ns() + kReasonNs; now_ns() < until && !ties_->fault.raised();) usleep(1000);
        ties_->fault.check();
        throw;
    }
    // The mate says that it raises before its caller can write: what was read without that word is the call's.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!board.raising.load(std::memory_order_seq_cst)) return;
    ties_->fault.check();
    throw Error(Kind::Error, format("rank %d gave up %s while rank %d read its tensor", place.rank, fingerprint_.text,
                                    config_.rank));
}

// Whether the caller has pushed what the step needs; where the walk may not stop there, waits until it has.
bool Engine::pushed(Walk &walk, const Step &step) {
    uint32_t mark = walk.mark + static_cast<uint32_t>(step.needs);
    Moment moment;
    if (holds_) {
        if (!walk.ticket->pushed(mark, moment)) return false;
    } else {
        auto pushed = walk.ticket->wait_pushed(mark, now_ns() + config_.timeout_ns, closing_, moment);
        if (pushed == Ticket::Pushed::Late) time_out(format("its caller to push piece %u of the order", mark));
        if (pushed == Ticket::Pushed::Never)
            throw Error(Kind::Usage, format("rank %d closed its communicator in %s before it had pushed every shard",
                                            config_.rank, fingerprint_.text));
    }
    if (moment) come_after(step.lane, moment);
    return true;
}

// For as long as it takes: what is on the caller's stream before may take any time.
void Engine::come_after(Lane lane, const Moment &moment) {
    while (!device_->after(lane, moment, now_ns() + kInterruptNs)) {
        ties_->fault.check();
        if (closing_ && now_ns() - closing_since_ns_ > config_.timeout_ns)
            throw Error(Kind::Timeout, format("rank %d closed its communicator, but its own stream did not come to %s within "
                                              "%g s", config_.rank, fingerprint_.text, config_.timeout_ns * 1e-9));
    }
}

bool Engine::run_once(Walk &walk, const Piece &piece) {
    const Request &request = *walk.call.request;
    const LoadedPlan &plan = *piece.plan;
    Ticket *ticket = walk.ticket.get();
    bool last = walk.piece + 1 == request.pieces.size() && walk.repeat + 1 == piece.repeats;
    walk.offset = piece.offset + walk.repeat * piece.nbytes;
    for (; walk.step < plan.walk.size(); ++walk.step) {
        const Step &step = plan.walk[walk.step];
        uint32_t value = base_[step.ring] + step.value;
        if (step.needs >= 0 && request.pushes && !pushed(walk, step)) return false;
        switch (step.verb) {
            case Verb::Wait:
                if (shared_->test(step.flag, value)) break;
                if (holds_) {
                    device_->wait(step.lane, step.flag, value, 0);
                    break;
                }
                hold(!ticket, config_.flag_names[step.flag],
                     [&](int64_t deadline_ns) { return device_->wait(step.lane, step.flag, value, deadline_ns); });
                break;
            case Verb::Signal: device_->raise(step.lane, step.flag_owner, step.flag, value, step.doorbell); break;
            case Verb::Copy:
            case Verb::Reduce: copy_or_reduce(walk, piece, step); break;
            case Verb::Enter:
                if (!std::exchange(walk.inside[step.lane == Lane::Rail], true)) come_after(step.lane, walk.entered);
                break;
            case Verb::Leave:
                if (ticket && last) ticket->leave(step.lane, device_->mark(step.lane));
                break;
            default: break;
        }
        if (step.gives >= 0 && request.marks)
            ticket->give(walk.mark + static_cast<uint32_t>(step.gives), device_->mark(step.lane));
    }
    return true;
}

void Engine::copy_or_reduce(const Walk &walk, const Piece &piece, const Step &step) {
    const Request &request = *walk.call.request;
    const Place *sources = &piece.plan->sources[step.first_source];
    Spot dst = spot(step.dst, walk, piece), src = spot(*sources, walk, piece);
    bool streaming = step.dst.space == Space::Output && piece.output_stride >= kStreamingNbytes;
    if (step.source_count == 1 && sources->wire == step.dst.wire) {
        if (sources->space == Space::Input && sources->rank != config_.rank && !device_->streams())
            read_mate(*sources, piece, walk.offset, dst.at);
        else
            device_->copy(step.lane, dst, src, step.dst.nbytes, streaming);
        copies_.fetch_add(1, std::memory_order_relaxed);
        copy_nbytes_.fetch_add(step.dst.nbytes, std::memory_order_relaxed);
        return;
    }
    Dtype to = step.dst.wire ? request.wire_dtype : request.dtype;
    Dtype from = sources->wire ? request.wire_dtype : request.dtype;
    srcs_.clear();
    for (uint32_t s = 0; s < step.source_count; ++s) srcs_.push_back(spot(sources[s], walk, piece).at);
    // Only the last step of an average divides: the sums before it keep their bits.
    int divisor = request.op == Op::Avg && step.dst.space == Space::Output ? config_.size : 1;
    device_->reduce(step.lane, request.op, divisor, dst.at, to, srcs_.data(), step.source_count, from,
                    step.dst.nbytes / dtype_nbytes(to), streaming);
    reduces_.fetch_add(1, std::memory_order_relaxed);
    reduce_nbytes_.fetch_add(step.dst.nbytes, std::memory_order_relaxed);
}

std::string Engine::late_text(const Fingerprint &call, const std::string &waits_for) {
    std::string text = format("rank %d waited %g s in call %llu, %s, for: %s.", config_.rank, config_.timeout_ns * 1e-9,
                              static_cast<unsigned long long>(call.call), call.text, waits_for.c_str());
    std::string others = ties_->calls->whereabouts();
    if (!others.empty()) text += " Other ranks: " + others + ".";
    return text + " " + config_.limit + " sets the limit";
}

void Engine::time_out(const std::string &waits_for) {
    ties_->fault.check();
    throw Error(Kind::Timeout, late_text(fingerprint_, waits_for));
}

void Engine::late(const Device::Flight &flight, const std::string &failure, const std::string &behind) {
    if (!failure.empty()) {
        ties_->fault.raise(Kind::Device, format("rank %d: its GPU failed in or before call %llu, %s: %s", config_.rank,
                                                static_cast<unsigned long long>(flight.call.call), flight.call.text,
                                                failure.c_str()));
        return;
    }
    auto missing = std::find_if(flight.waits.begin(), flight.waits.end(),
                                [&](const auto &wait) { return !shared_->test(wait.flag, wait.value); });
    std::string text = late_text(flight.call, missing != flight.waits.end()
                                                  ? config_.flag_names[missing->flag]
                                                  : "its GPU to execute the copies and kernels (nothing is missing from others)");
    if (!behind.empty())
        text += format(". Behind it on this GPU waits %s of another communicator: ranks that share several must issue their "
                       "calls in the same order", behind.c_str());
    ties_->fault.raise(Kind::Timeout, text);
}

void Engine::drain() {
    if (!closing_) check_not_walking("close()");
    {
        std::lock_guard<std::mutex> lock(queue_mutex_);
        if (!closing_) closing_since_ns_ = now_ns();
        closing_ = true;
        queue_changed_.notify_all();
    }
    Fault &fault = ties_->fault;
    try {
        std::unique_lock<std::mutex> lock(queue_mutex_);
        drain_queue(lock);
    } catch (const Error &error) {
        fault.raise(error.kind, error.text);  // Interrupted: the worker's call ends with it.
    }
    worker_.join();
    std::lock_guard<std::mutex> walking(walk_mutex_);
    if (std::exchange(drained_, true)) return;
    if (suspended_) {
        Error error(Kind::Usage, format("rank %d closed its communicator in %s before it had pushed every shard", config_.rank,
                                        suspended_->call.request->text.text));
        suspended_->ticket->complete(error);
        give_up(*suspended_, error);
        suspended_.reset();
    }
    // A GPU that hangs is given up a little after the fault, with which its streams are released.
    int64_t deadline = now_ns() + config_.timeout_ns;
    for (int64_t now = now_ns(); now < deadline + kHungNs && !device_->drain(now + kInterruptNs); now = now_ns()) {
        if (fault.raised()) deadline = std::min(deadline, now);
        if (now >= deadline)
            fault.raise(Kind::Timeout, format("rank %d could not close: its GPU did not execute its calls within %g s",
                                              config_.rank, config_.timeout_ns * 1e-9));
        if (config_.interrupted && config_.interrupted())
            fault.raise(Kind::Error, format("rank %d was interrupted while it closed", config_.rank));
    }
    if (!proxy_) return;
    deadline = now_ns() + config_.timeout_ns;
    while (!proxy_->drain(std::min(deadline, now_ns() + kInterruptNs)) && !fault.raised()) {
        if (now_ns() >= deadline)
            fault.raise(Kind::Timeout,
                        format("rank %d could not close: within %g s its peers did not take what it had put, or did "
                               "not read what it holds for them. %s",
                               config_.rank, config_.timeout_ns * 1e-9, ties_->calls->whereabouts().c_str()));
        if (config_.interrupted && config_.interrupted())
            fault.raise(Kind::Error, format("rank %d was interrupted while it closed", config_.rank));
    }
}

void Engine::close() {
    drain();
    std::lock_guard<std::mutex> walking(walk_mutex_);
    if (std::exchange(closed_, true)) return;
    // The goodbye (or, after a fault, its cause) before the data connections end, so that their end is no loss.
    if (first_) ties_->control->close();
    if (proxy_) proxy_->close();
    for (auto &each : tickets_)
        if (auto ticket = each.lock()) ticket->settle();
    tickets_.clear();
}

void Engine::forget() {
    closing_ = drained_ = closed_ = true;
    worker_.forget();
    if (first_) ties_->control->forget();
    if (proxy_) proxy_->forget();
}

Engine::Stats Engine::stats() {
    Stats s{};
    s.calls = ties_->calls->begun();
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
