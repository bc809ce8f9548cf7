// gpu: see gpu.h.
#include "gpu.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "../memory.h"

namespace hdma {

namespace {

// How long a polling thread looks without sleeping, and how long it then sleeps between two looks.
constexpr int64_t kPollNs = 200 * 1000;
constexpr useconds_t kSleepUs = 20;
// Beyond every value that a stream may wait for, and not before it in the cyclic order.
constexpr uint32_t kReleased = 1u << 30;

size_t whole_pages(size_t nbytes) {
    size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return (nbytes + page - 1) / page * page;
}

// What the lanes use besides the window: pinned memory of the host. Calls on the lanes share it with their device.
class Pins {
  public:
    Pins(std::shared_ptr<GpuMemory> memory, int rank, int size, const Fd &wire_memory, size_t wire_nbytes,
         std::shared_ptr<Shared> shared)
        : memory_(std::move(memory)), rank_(rank), wire_nbytes_(whole_pages(wire_nbytes)), shared_(std::move(shared)),
          words_(size), awaited_(shared_->flag_count()) {
        Current here = memory_->card().current();
        try {
            for (int peer = 0; peer < size; ++peer)
                if (shared_->has(peer))
                    words_[peer] = runtime().pin(shared_->mapping(peer), whole_pages(shared_->mapping_nbytes()));
            if (wire_nbytes) map_wire_window(wire_memory);
        } catch (...) {
            let_go();
            throw;
        }
    }

    ~Pins() {
        if (Card::forked()) return;
        try {
            Current here = memory_->card().current();
            let_go();
        } catch (const Error &) {  // The driver is gone, and what it had pinned with it.
        }
    }
    Pins(const Pins &) = delete;
    Pins &operator=(const Pins &) = delete;

    char *wire_window() const { return wire_window_; }
    // To the GPU a pinned page has an address of its own, which need not be the CPU's.
    char *seen(char *at) const { return wire_seen_ + (at - wire_window_); }
    char *word(int rank, uint32_t flag) const {
        return words_[rank] + (reinterpret_cast<char *>(shared_->word(rank, flag)) - static_cast<char *>(shared_->mapping(rank)));
    }

    void await(uint32_t flag, uint32_t value) { awaited_[flag].store(kAwaited | value, std::memory_order_relaxed); }
    // Lets every wait of a stream pass. Any thread.
    void release() {
        for (size_t flag = 0; flag < awaited_.size(); ++flag)
            if (uint64_t awaited = awaited_[flag].load(std::memory_order_relaxed))
                shared_->word(rank_, static_cast<uint32_t>(flag))
                    ->value.store(static_cast<uint32_t>(awaited) + kReleased, std::memory_order_seq_cst);
    }

  private:
    static constexpr uint64_t kAwaited = 1ull << 32;

    Runtime &runtime() { return memory_->card().runtime(); }

    void map_wire_window(const Fd &memory) {
        reserve_memory(memory.get(), wire_nbytes_, 1, format("rank %d cannot allocate its host window", rank_));
        void *at = mmap(nullptr, wire_nbytes_, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
        if (at == MAP_FAILED)
            throw Error(Kind::Device, format("rank %d cannot map its host window (%zu bytes): %s", rank_, wire_nbytes_,
                                             mmap_error_text(errno).c_str()));
        wire_window_ = static_cast<char *>(at);
        wire_seen_ = runtime().pin(wire_window_, wire_nbytes_);
    }

    void let_go() {
        for (size_t peer = 0; peer < words_.size(); ++peer)
            if (words_[peer]) runtime().unpin(shared_->mapping(static_cast<int>(peer)));
        if (wire_seen_) runtime().unpin(wire_window_);
        if (wire_window_) munmap(wire_window_, wire_nbytes_);
    }

    std::shared_ptr<GpuMemory> memory_;
    int rank_;
    size_t wire_nbytes_;
    std::shared_ptr<Shared> shared_;
    std::vector<char *> words_;  // by rank: where the GPU sees its Shared; null but for this rank and its node mates
    char *wire_window_ = nullptr, *wire_seen_ = nullptr;
    std::vector<std::atomic<uint64_t>> awaited_;  // by flag: kAwaited and the highest value that a stream waits for
};

class GpuDevice final : public Device {
  public:
    GpuDevice(std::shared_ptr<GpuMemory> memory, int rank, std::shared_ptr<Pins> pins, std::shared_ptr<Shared> shared,
              Fault &fault)
        : memory_(std::move(memory)), card_(memory_->card()), runtime_(card_.runtime()), rank_(rank), pins_(std::move(pins)),
          shared_(std::move(shared)), fault_(fault) {
        // At once, by whoever ends the communicator: the watchdog may be held up in the driver. It repeats it.
        fault.listen([pins = std::weak_ptr<Pins>(pins_)] {
            if (auto there = pins.lock()) there->release();
        });
        owner_->ended = [&fault] { return fault.raised(); };
        owner_->release = [pins = pins_] { pins->release(); };
        owner_->uses = pins_;
    }

    ~GpuDevice() override {
        if (!Card::forked()) card_.forget(*owner_);
    }

    void allocate_window() override {}  // By GpuMemory, before the ranks agreed.
    char *window(int rank) override { return memory_->window(rank); }
    char *wire_window() override {
        char *host = pins_->wire_window();
        return host ? host : memory_->window(rank_);
    }
    Fd wire_export() override { return pins_->wire_window() ? Fd() : memory_->export_window(); }
    bool wire_flushes() override { return !pins_->wire_window() && runtime_.flushes(card_.ordinal()); }
    char *mapped(int mate, const char *own) override { return memory_->mapped(mate, own); }

    void copy(Lane lane, Spot dst, Spot src, size_t nbytes, bool) override {
        if (!nbytes || dst.at == src.at) return;
        bool host = dst.host || src.host;
        if (!host && memory_->same_gpu(dst.rank, src.rank)) {
            copy_here(lane, {dst.at, nullptr, src.at, nbytes});
            return;
        }
        Transfer transfer{dst.host ? pins_->seen(dst.at) : dst.at, src.host ? pins_->seen(src.at) : src.at, nbytes, host};
        Pending &pending = pending_[lane == Lane::Rail];
        if (!pending.words.empty() || pending.here.nbytes || depends(pending.copies, transfer)) flush(lane);
        pending.copies.push_back(transfer);
    }

    void read(int, void *, uint64_t, size_t) override {
        throw Error(Kind::Error, "a plan for the host was walked on a GPU");
    }

    void reduce(Lane lane, Op op, int divisor, void *dst, Dtype dst_type, const void *const *srcs, size_t source_count,
                Dtype src_type, size_t element_count, bool) override {
        if (!element_count) return;
        flush(lane);
        card_.reduce(put_on(lane), op, divisor, dst, dst_type, srcs, source_count, src_type, element_count);
    }

    bool wait(Lane lane, uint32_t flag, uint32_t value, int64_t deadline_ns) override {
        if (!card_.holds()) return poll([&] { return shared_->test(flag, value); }, deadline_ns);
        waits_.push_back({flag, value});
        pins_->await(flag, value);
        add(lane, {true, pins_->word(rank_, flag), value});
        return true;
    }

    void raise(Lane lane, int rank, uint32_t flag, uint32_t value, bool) override {
        add(lane, {false, pins_->word(rank, flag), value});
    }

    bool streams() const override { return true; }
    bool holds() const override { return card_.holds(); }

    Moment moment(CallerStream stream) override {
        Current here = card_.current();
        if (runtime_.capturing(stream))
            throw Error(Kind::Usage, format("rank %d: the current stream is being captured into a graph, which hdma cannot "
                                            "be part of: call it outside of the capture", rank_));
        return card_.record(stream);
    }

    bool passed(const Moment &moment) override {
        if (!moment) return true;
        Current here = card_.current();
        return runtime_.passed(Card::event(moment));
    }

    void order(CallerStream stream, const Moment &moment) override {
        if (!moment) return;
        Current here = card_.current();
        runtime_.follow(stream, Card::event(moment));
    }

    void begin(const Fingerprint &call, const Moment &entered) override {
        call_ = std::make_shared<Card::Aloft>();
        call_->owner = owner_;
        call_->flight.call = call;
        call_->entered = entered;
        waits_.clear();
        for (Filled &lane : lanes_) lane = {};
    }

    void resume() override { current_.emplace(runtime_, card_.ordinal()); }

    void pause() override { hand_over(true); }

    bool after(Lane lane, const Moment &moment, int64_t deadline_ns) override {
        if (!moment) return true;
        if (!card_.holds()) return poll([&] { return runtime_.passed(Card::event(moment)); }, deadline_ns);
        flush(lane);
        runtime_.follow(put_on(lane), Card::event(moment));
        return true;
    }

    Moment mark(Lane lane) override {
        flush(lane);
        Filled &filled = lanes_[lane == Lane::Rail];
        if (filled.further) filled = {false, card_.record(card_.stream(lane))};
        return filled.end;
    }

    void end() override { hand_over(false); }

    void watch(int64_t timeout_ns, Late late) override { owner_->timeout_ns = timeout_ns, owner_->late = std::move(late); }
    bool drain(int64_t deadline_ns) override { return card_.drain(*owner_, deadline_ns); }
    bool busy() override { return card_.in_use(pins_.get()); }
    void abandon() override { card_.forget(*owner_); }

  private:
    // A copy on this GPU, to one or two places.
    struct Here {
        char *dst, *also;
        const char *src;
        size_t nbytes;
    };
    // At most one of them is there.
    struct Pending {
        std::vector<WordOp> words;
        std::vector<Transfer> copies;
        Here here{};
        void clear() { words.clear(), copies.clear(), here = {}; }
    };

    // The lane's stream, for something to be put there.
    Stream put_on(Lane lane) {
        lanes_[lane == Lane::Rail].further = true;
        return card_.stream(lane);
    }

    // To the watchdog, also where the driver fails: what is on the lanes has to be released.
    void hand_over(bool open) {
        if (!call_) return;
        std::optional<Error> failed;
        auto attempt = [&](auto what) {
            try {
                what();
            } catch (const Error &error) {
                if (!failed) failed = error;
            }
        };
        Card::Ends ends;
        size_t ended = 0;
        attempt([&] {
            if (!current_) resume();
            for (Lane lane : {Lane::Near, Lane::Rail}) attempt([&] { flush(lane); });
            for (Pending &pending : pending_) pending.clear();
            for (Lane lane : {Lane::Near, Lane::Rail})
                attempt([&] {
                    ends[lane == Lane::Rail] = mark(lane);
                    ++ended;
                });
        });
        current_.reset();
        open = open && !failed;
        auto call = call_;
        if (!open) call_ = nullptr;
        card_.follow(call, waits_, ended == ends.size() ? std::optional(std::move(ends)) : std::nullopt, open);
        waits_.clear();
        if (failed) throw Error(*failed);
    }

    void add(Lane lane, const WordOp &op) {
        Pending &pending = pending_[lane == Lane::Rail];
        if (!pending.copies.empty() || pending.here.nbytes) flush(lane);
        pending.words.push_back(op);
    }

    // Two of the same bytes read them once, where that slows none down: the kernel moves units that all are aligned to.
    void copy_here(Lane lane, const Here &next) {
        Here &before = pending_[lane == Lane::Rail].here;
        auto alike = [](const char *a, const char *b) {
            return (reinterpret_cast<uintptr_t>(a) ^ reinterpret_cast<uintptr_t>(b)) % 16 == 0;
        };
        auto apart = [&](const char *a, const char *b) { return a + next.nbytes <= b || b + next.nbytes <= a; };
        if (before.nbytes == next.nbytes && before.src == next.src && !before.also && apart(before.dst, next.dst) &&
            apart(before.dst, next.src) && apart(next.dst, next.src) && alike(before.dst, next.dst)) {
            before.also = next.dst;
            return;
        }
        flush(lane);
        pending_[lane == Lane::Rail].here = next;
    }

    // The copies of a batch come in any order.
    static bool depends(const std::vector<Transfer> &before, const Transfer &next) {
        auto meet = [&](const char *a, size_t a_nbytes, const char *b) { return a < b + next.nbytes && b < a + a_nbytes; };
        return std::any_of(before.begin(), before.end(), [&](const Transfer &t) {
            return meet(t.dst, t.nbytes, next.dst) || meet(t.src, t.nbytes, next.dst) || meet(t.dst, t.nbytes, next.src);
        });
    }

    void flush(Lane lane) {
        Pending &pending = pending_[lane == Lane::Rail];
        if (const Here &here = pending.here; here.nbytes)
            card_.copy(put_on(lane), here.dst, here.also, here.src, here.nbytes);
        pending.here = {};
        if (!pending.words.empty()) runtime_.words(put_on(lane), pending.words.data(), pending.words.size());
        pending.words.clear();
        if (!pending.copies.empty()) runtime_.copy(put_on(lane), pending.copies.data(), pending.copies.size());
        pending.copies.clear();
    }

    template <class Condition>
    bool poll(Condition condition, int64_t deadline_ns) {
        for (Lane lane : {Lane::Near, Lane::Rail}) flush(lane);  // Peers may need it to come here.
        int64_t begun = now_ns(), now = begun;
        for (; !condition(); now = now_ns()) {
            if (now >= deadline_ns || fault_.raised()) return false;
            if (now - begun < kPollNs)
                sched_yield();
            else
                usleep(kSleepUs);
        }
        return true;
    }

    std::shared_ptr<GpuMemory> memory_;
    Card &card_;
    Runtime &runtime_;
    int rank_;
    std::shared_ptr<Pins> pins_;
    std::shared_ptr<Shared> shared_;
    const Fault &fault_;
    const std::shared_ptr<Card::Owner> owner_ = std::make_shared<Card::Owner>();

    // Of the call that is walked.
    Pending pending_[2];
    // What the call has put on a lane.
    struct Filled {
        bool further = false;  // there is something behind the end
        Moment end;            // null: nothing
    };
    Filled lanes_[2];
    std::vector<Flight::Awaited> waits_;
    std::shared_ptr<Card::Aloft> call_;
    std::optional<Current> current_;
};

}  // namespace

GpuMemory::GpuMemory(std::shared_ptr<Card> card, int rank, int size)
    : card_(std::move(card)), rank_(rank), size_(size), windows_(size), pci_(size) {
    pci_[rank] = card_->info().pci;
}

std::shared_ptr<const GpuMemory::Allocation> GpuMemory::allocate(size_t nbytes, const std::string &what) {
    card_->sweep();
    Current here = card_->current();
    auto allocation = std::make_unique<Allocation>();
    allocation->nbytes = nbytes;
    try {
        allocation->at = card_->runtime().allocate(whole_pages(std::max<size_t>(nbytes, 1)));
        allocation->handle = card_->runtime().handle(allocation->at);
    } catch (const Error &error) {
        if (allocation->at) card_->runtime().free(allocation->at);
        throw Error(Kind::Device, format("%s: %zu bytes of GPU memory needed, %zu free: %s. Set HDMA_WINDOW_BYTES lower, free "
                                         "memory (torch.cuda.empty_cache()), or run fewer ranks on this GPU",
                                         what.c_str(), nbytes, card_->runtime().memory_left(), error.text.c_str()));
    }
    // Mates may have it mapped still: the driver leaves open what then becomes of them.
    auto bury = [card = card_, mates = mates_](const Allocation *gone) {
        card->bury(gone->at, [mates] { return mates->unmapped(); });
        delete gone;
    };
    std::shared_ptr<const Allocation> owner(allocation.release(), bury);
    std::lock_guard<std::mutex> lock(mutex_);
    memory_.push_back({owner, std::vector<char *>(size_)});
    if (memory_.size() == 1) windows_[rank_] = owner->at;
    return owner;
}

void GpuMemory::map(const std::shared_ptr<const Allocation> &own, int mate, const std::string &pci, int pid,
                    const IpcHandle &handle) {
    Current here = card_->current();
    char *at;
    try {
        at = card_->runtime().open(handle);
    } catch (const Error &error) {
        throw Error(Kind::Device,
                    format("rank %d, on GPU %s, cannot map memory of rank %d, on GPU %s: %s. The GPUs must be linked (see "
                           "nvidia-smi topo -m), visible to both processes (CUDA_VISIBLE_DEVICES) and, in containers, share "
                           "the host's IPC namespace (--ipc=host)",
                           rank_, card_->info().pci.c_str(), mate, pci.c_str(), error.text.c_str()));
    }
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < memory_.size(); ++i)
        if (memory_[i].own == own) {
            memory_[i].by_rank[mate] = at;
            if (i == 0) {
                windows_[mate] = at;
                pci_[mate] = pci;
                mates_->pids.push_back({mate, pid});
            }
        }
}

void GpuMemory::unmap(const std::vector<Mapped> &memory) try {
    Current here = card_->current();
    for (const Mapped &each : memory)
        for (char *at : each.by_rank)
            if (at) card_->runtime().close(at);
} catch (const Error &) {  // The driver is gone, and all mappings with it.
}

void GpuMemory::drop(const std::shared_ptr<const Allocation> &own) {
    std::vector<Mapped> memory;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (memory_.empty() || memory_.back().own != own) return;
        memory.push_back(std::move(memory_.back()));
        memory_.pop_back();
    }
    unmap(memory);
}

void GpuMemory::close(bool agreed) {
    if (Card::forked() || (pins_ && card_->in_use(pins_))) return;  // With the last call on the lanes, then.
    std::vector<Mapped> memory;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        memory.swap(memory_);
    }
    if (memory.empty()) return;
    unmap(memory);
    if (!agreed) mates_->shared = nullptr;
    if (mates_->shared) mates_->shared->board(rank_).unmapped.store(1, std::memory_order_seq_cst);
    memory.clear();
    card_->sweep();
}

Fd GpuMemory::export_window() {
    Current here = card_->current();
    std::lock_guard<std::mutex> lock(mutex_);
    const Allocation &window = *memory_.at(0).own;
    return Fd(card_->runtime().export_memory(window.at, whole_pages(window.nbytes)));
}

std::pair<uint32_t, size_t> GpuMemory::find(const char *at, size_t nbytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 1; i < memory_.size(); ++i) {
        const Allocation &own = *memory_[i].own;
        if (at >= own.at && at + nbytes <= own.at + own.nbytes) return {static_cast<uint32_t>(i), at - own.at};
    }
    return {0, 0};
}

char *GpuMemory::mapped(int rank, const char *own) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 1; i < memory_.size(); ++i) {
        const Allocation &mine = *memory_[i].own;
        if (own >= mine.at && own < mine.at + mine.nbytes)
            return rank == rank_ ? const_cast<char *>(own) : memory_[i].by_rank[rank] + (own - mine.at);
    }
    return nullptr;
}

bool GpuMemory::Mates::unmapped() const {
    return std::all_of(pids.begin(), pids.end(), [&](const auto &mate) {
        auto [rank, pid] = mate;
        if (!shared || shared->board(rank).unmapped.load(std::memory_order_seq_cst)) return true;
        return pid > 0 && ::kill(pid, 0) != 0 && errno == ESRCH;
    });
}

std::unique_ptr<Device> GpuMemory::device(Fd wire_memory, size_t wire_nbytes, std::shared_ptr<Shared> shared, Fault &fault) {
    mates_->shared = shared;
    auto pins = std::make_shared<Pins>(shared_from_this(), rank_, size_, wire_memory, wire_nbytes, shared);
    pins_ = pins.get();
    return std::make_unique<GpuDevice>(shared_from_this(), rank_, std::move(pins), std::move(shared), fault);
}

}  // namespace hdma
