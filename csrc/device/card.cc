// card: see card.h.
#include "card.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace hdma {

namespace {

constexpr unsigned kThreads = 512;
// Of csrc/kernels/reduce_gpu.cu.
constexpr size_t kMaxSources = 64;
struct ReduceArguments {
    void *dst, *also;
    const void *srcs[kMaxSources];
    unsigned source_count, op;
    int divisor;
    unsigned unused;
    long long element_count;
};
// What a block does at least, so that small tensors do not occupy more compute units than they need.
constexpr size_t kBlockNbytes = kThreads * 16;
// How often the watchdog looks at the oldest call, and at those that it releases.
constexpr auto kLook = std::chrono::milliseconds(20), kRelease = std::chrono::milliseconds(1);
// Looks without a call after which it sleeps.
constexpr int kIdleLooks = 50;
// After this time a call is taken to be over whose end the driver does not tell.
constexpr int64_t kLostNs = 5 * 1000 * 1000 * 1000ll;

std::atomic<bool> in_child{false};

// By Dtype, as the kernels are named.
const char *const kNames[] = {"bytes", "float32", "bfloat16", "float16", "float64", "int8", "int16", "int32",
                              "int64", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"};

}  // namespace

std::shared_ptr<Card> Card::of(const std::string &runtime, int ordinal, const std::string &code, Settings settings) {
    static auto &mutex = *new std::mutex;
    static auto &cards = *new std::map<std::pair<std::string, int>, std::shared_ptr<Card>>;
    static const int registered = pthread_atfork(nullptr, nullptr, [] { in_child = true; });
    (void)registered;
    if (in_child)
        throw Error(Kind::Device, "GPUs cannot be used in a forked process whose parent has used them: start it by spawn");
    std::lock_guard<std::mutex> lock(mutex);
    auto &card = cards[{runtime, ordinal}];
    if (!card) card.reset(new Card(Runtime::load(runtime), ordinal, code, settings));
    return card;
}

bool Card::forked() { return in_child; }

Card::Card(std::shared_ptr<Runtime> runtime, int ordinal, const std::string &code, Settings settings)
    : runtime_(std::move(runtime)), ordinal_(ordinal), settings_(settings), info_(runtime_->info(ordinal)) {
    holds_ = runtime_->holds(why_not_);
    Current here(*runtime_, ordinal_);
    for (Stream &stream : streams_) stream = runtime_->make_stream(settings.high_priority);
    void *module = runtime_->load_code(code);
    copy_kernel_ = runtime_->function(module, "hdma_copy");
    auto load = [&](Dtype from, Dtype to) {
        std::string name = format("hdma_reduce_%s_%s", kNames[static_cast<int>(from)], kNames[static_cast<int>(to)]);
        reduce_kernels_[{from, to}] = runtime_->function(module, name.c_str());
    };
    for (int type = 1; type < static_cast<int>(std::size(kNames)); ++type) load(static_cast<Dtype>(type), static_cast<Dtype>(type));
    for (Dtype type : {Dtype::Bfloat16, Dtype::Float16}) {
        load(type, Dtype::Float32);
        load(Dtype::Float32, type);
    }
    // The driver may load a kernel when it is first launched, and wait for all streams to do so.
    ReduceArguments nothing{};
    nothing.divisor = 1;
    runtime_->launch(copy_kernel_, streams_[0], 1, kThreads, &nothing);
    for (auto &[types, kernel] : reduce_kernels_) runtime_->launch(kernel, streams_[0], 1, kThreads, &nothing);
}

Moment Card::record(Stream stream) {
    std::shared_ptr<Event> moment;
    {
        // Oldest first, since calls end in order: the first one asked is free, or hardly any is.
        std::lock_guard<std::mutex> lock(events_mutex_);
        if (!events_.empty()) {
            auto &oldest = events_[next_event_ %= events_.size()];
            if (oldest.use_count() == 1) {
                std::atomic_thread_fence(std::memory_order_acquire);  // With who let go of it last.
                moment = oldest;
                ++next_event_;
            }
        }
    }
    if (!moment) {
        moment = std::make_shared<Event>(runtime_->make_event());
        std::lock_guard<std::mutex> lock(events_mutex_);
        next_event_ = std::min(next_event_, events_.size());
        events_.insert(events_.begin() + static_cast<long>(next_event_++), moment);
    }
    runtime_->record(*moment, stream);
    return moment;
}

unsigned Card::blocks(size_t nbytes) const {
    return static_cast<unsigned>(std::clamp<size_t>((nbytes + kBlockNbytes - 1) / kBlockNbytes, 1, settings_.blocks));
}

void Card::copy(Stream stream, char *dst, char *also, const char *src, size_t nbytes) {
    ReduceArguments arguments{};
    arguments.dst = dst;
    arguments.also = also;
    arguments.srcs[0] = src;
    arguments.source_count = 1;
    arguments.divisor = 1;
    arguments.element_count = static_cast<long long>(nbytes);
    runtime_->launch(copy_kernel_, stream, blocks(nbytes), kThreads, &arguments);
}

void Card::reduce(Stream stream, Op op, int divisor, void *dst, Dtype dst_type, const void *const *srcs,
                  size_t source_count, Dtype src_type, size_t element_count) {
    if (source_count > kMaxSources)
        throw Error(Kind::Usage, format("a sum of %zu parts: on GPUs at most %zu nodes, and as many ranks a node",
                                        source_count, kMaxSources));
    ReduceArguments arguments{};
    arguments.dst = dst;
    std::copy(srcs, srcs + source_count, arguments.srcs);
    arguments.source_count = static_cast<unsigned>(source_count);
    arguments.op = static_cast<unsigned>(op);
    arguments.divisor = divisor;
    arguments.element_count = static_cast<long long>(element_count);
    void *kernel = reduce_kernels_.at({src_type, dst_type});
    runtime_->launch(kernel, stream, blocks(element_count * dtype_nbytes(src_type)), kThreads, &arguments);
}

void Card::follow(const std::shared_ptr<Aloft> &call, const std::vector<Device::Flight::Awaited> &waits,
                  std::optional<Ends> ends, bool open) {
    std::lock_guard<std::mutex> lock(mutex_);
    call->flight.waits.insert(call->flight.waits.end(), waits.begin(), waits.end());
    call->open = open;
    call->since_ns = ends ? 0 : now_ns();
    bool listed = std::exchange(call->listed, true);
    auto is_lost = [&] { return std::find(lost_.begin(), lost_.end(), call) != lost_.end(); };
    if (!listed) {
        (ends ? aloft_ : lost_).push_back(call);
    } else if (!ends && !is_lost()) {
        aloft_.erase(std::remove(aloft_.begin(), aloft_.end(), call), aloft_.end());
        lost_.push_back(call);
    }
    call->ends = std::move(ends);
    if (!watchdog_.started()) watchdog_.start("hdma-watchdog", [this] { watch(); });
    if (asleep_) changed_.notify_all();
}

void Card::watch() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (int idle = 0;;) {
        if (aloft_.empty() && lost_.empty()) {
            // Not at once: to be woken for every call would cost the caller more than the rest of it.
            asleep_ = ++idle > kIdleLooks;
            if (asleep_)
                changed_.wait(lock);
            else
                changed_.wait_for(lock, kLook);
            asleep_ = false;
            continue;
        }
        idle = 0;
        // Before the driver is asked anything: it may be held up by who waits in it for what is released here.
        bool releasing = false;
        for (auto *calls : {&aloft_, &lost_})
            for (auto &call : *calls)
                if (call->owner->gone || call->owner->ended()) {
                    call->owner->release();
                    releasing = true;
                }
        std::vector<Report> reports;
        look(reports);
        if (!reports.empty()) {
            telling_ = true;
            lock.unlock();
            for (Report &report : reports) report.late(report.flight, report.failure, report.behind);
            reports.clear();
            lock.lock();
            telling_ = false;
            changed_.notify_all();
        } else {
            changed_.wait_for(lock, releasing ? kRelease : kLook);
        }
    }
}

// At the calls on the lanes, for those that are over and those that have to be reported.
void Card::look(std::vector<Report> &reports) try {
    auto let_go = [&](std::shared_ptr<Aloft> &call) {
        if (call->owner->gone) over_.push_back(std::move(call));
    };
    while (!lost_.empty() && now_ns() - lost_.front()->since_ns > kLostNs) {
        let_go(lost_.front());
        lost_.pop_front();
    }
    Current here(*runtime_, ordinal_);
    auto passed = [&](const Moment &moment) { return !moment || runtime_->passed(event(moment)); };
    for (auto at = aloft_.begin(); at != aloft_.end();) {
        Aloft &call = **at;
        if (std::all_of(call.ends->begin(), call.ends->end(), passed)) {
            if (call.open) {
                ++at;
                continue;
            }
            let_go(*at);
            at = aloft_.erase(at);
            changed_.notify_all();
            continue;
        }
        // This one holds up those behind it.
        if (!call.since_ns && passed(call.entered)) call.since_ns = now_ns();
        Owner &owner = *call.owner;
        bool late = call.since_ns && now_ns() - call.since_ns > owner.timeout_ns;
        if (late && !call.told) {
            call.told = true;
            auto next = std::find_if(at, aloft_.end(), [&](const auto &each) { return each->owner != call.owner; });
            std::string behind = next == aloft_.end() ? "" : (*next)->flight.call.text;
            if (!owner.gone) reports.push_back({owner.late, call.flight, "", std::move(behind)});
        }
        if (!late) break;
        ++at;
    }
} catch (const Error &error) {
    // The GPU has failed: nobody will know what on it is over.
    for (auto &call : aloft_) {
        if (!call->owner->gone) reports.push_back({call->owner->late, call->flight, error.text, ""});
        call->since_ns = now_ns();
        lost_.push_back(call);
    }
    aloft_.clear();
    changed_.notify_all();
}

bool Card::drain(const Owner &owner, int64_t deadline_ns) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto over = [&] {
        return std::none_of(aloft_.begin(), aloft_.end(), [&](const auto &call) { return call->owner.get() == &owner; });
    };
    while (!over()) {
        int64_t left = deadline_ns - now_ns();
        if (left <= 0) return false;
        changed_.notify_all();  // Now rather than at its next look.
        changed_.wait_for(lock, std::chrono::nanoseconds(std::min<int64_t>(left, 1000 * 1000)));
    }
    return true;
}

bool Card::in_use(const void *what) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto *calls : {&aloft_, &lost_})
        for (auto &call : *calls)
            if (call->owner->uses.get() == what) return true;
    return false;
}

void Card::forget(Owner &owner) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return !telling_; });
    owner.gone = true;
}

void Card::bury(char *memory, std::function<bool()> unmapped) {
    if (forked()) return;
    {
        std::lock_guard<std::mutex> lock(graves_mutex_);
        graves_.push_back({memory, std::move(unmapped)});
    }
    sweep();
}

void Card::sweep() {
    if (forked()) return;
    std::vector<std::shared_ptr<Aloft>> over;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        over.swap(over_);
    }
    over.clear();
    std::vector<char *> free;
    {
        std::lock_guard<std::mutex> lock(graves_mutex_);
        for (size_t i = 0; i < graves_.size();) {
            if (!graves_[i].unmapped()) {
                ++i;
                continue;
            }
            free.push_back(graves_[i].memory);
            graves_.erase(graves_.begin() + static_cast<long>(i));
        }
    }
    if (free.empty()) return;
    try {
        Current here(*runtime_, ordinal_);
        for (char *memory : free) runtime_->free(memory);
    } catch (const Error &) {  // The driver is gone, and its memory with it.
    }
}

}  // namespace hdma
