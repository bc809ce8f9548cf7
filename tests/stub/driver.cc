// driver: see driver.h.
//
// Protocol: a memory handle names the owner's process and file descriptor; the importer maps /proc/<pid>/fd/<fd>, and
// the file's name tells whether that is still the same memory.
//
// Threading: Machine::mutex guards the tables (regions, streams, events, ...), Stream::mutex one queue; a stream's thread
// holds neither while an operation runs. Machine::mutex comes first.
//
// Ordering: see driver.h.
#include "driver.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "kernels.h"

namespace stub {

namespace {

using Lock = std::unique_lock<std::mutex>;

constexpr unsigned char kFresh = 0xCB, kStale = 0xDD;
constexpr size_t kPage = 4096;

int number_of(const char *variable, int otherwise) {
    const char *text = getenv(variable);
    return text && *text ? atoi(text) : otherwise;
}

std::string format(const char *text, ...) __attribute__((format(printf, 1, 2)));
std::string format(const char *text, ...) {
    char line[1024];
    va_list values;
    va_start(values, text);
    vsnprintf(line, sizeof line, text, values);
    va_end(values);
    return line;
}

// As measured on an H200: a stream that waits for a value holds one of its device's connections; while all are held no
// other operation of the process starts on that device. Streams that wait for events hold none.
class Gate {
  public:
    void open(int connections) { connections_ = std::max(connections, 1); }

    void pass() {
        Lock lock(mutex_);
        changed_.wait(lock, [&] { return held_ < connections_; });
    }

    void hold(const std::function<bool()> &reached) {
        {
            Lock lock(mutex_);
            changed_.wait(lock, [&] { return held_ < connections_; });
            if (reached()) return;
            ++held_;
        }
        for (int turn = 0; !reached(); ++turn) {
            if (turn < 20)
                std::this_thread::yield();
            else
                usleep(std::min(turn, 100));
        }
        Lock lock(mutex_);
        --held_;
        changed_.notify_all();
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    int connections_ = 1, held_ = 0;
};

// One cuEventRecord.
struct Record {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;

    void finish() {
        Lock lock(mutex);
        done = true;
        changed.notify_all();
    }
    void wait() {
        Lock lock(mutex);
        changed.wait(lock, [&] { return done; });
    }
    bool finished() {
        Lock lock(mutex);
        return done;
    }
};

struct Operation {
    bool gated;  // not before the gate lets it pass
    std::function<void()> run;
};

struct Stream {
    int device, number;
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Operation> queue;
    uint64_t submitted = 0, completed = 0;
    bool started = false, closed = false;
    std::atomic<bool> capturing{false};

    void wait_until(uint64_t count) {
        Lock lock(mutex);
        changed.wait(lock, [&] { return completed >= count; });
    }
    uint64_t so_far() {
        Lock lock(mutex);
        return submitted;
    }
};
using StreamPointer = std::shared_ptr<Stream>;

struct Event {
    int device, number;
    std::shared_ptr<Record> latest;
};

// View: host memory as HIP's devices see it.
enum class Origin { Allocated, Imported, Registered, HostAllocated, View };

struct Region {
    Origin origin;
    uintptr_t base;  // as the program sees it
    size_t nbytes;
    char *memory;  // where its bytes are
    int physical;  // device whose memory it is; of host memory the device that registered it
    int device;    // ordinal of the context in which it was made
    int fd = -1;
    uint64_t serial = 0;
    bool exported = false;
    // Imported:
    std::string handle;
    int opened = 0;
    std::vector<uintptr_t> given;  // addresses returned

    // Registered on HIP:
    uintptr_t view = 0;

    bool is_host() const { return origin != Origin::Allocated && origin != Origin::Imported; }
};

struct Device {
    int physical;
    size_t allocated = 0;
    int context_uses = 0;
    std::set<int> peers;
    Gate gate;
    StreamPointer null_stream;
};

struct Module {
    int device;
};
struct Function {
    Kernel kernel;
    std::string name;
    Module *module;
};
struct Failure {
    std::string function;
    int code, from;
};

struct Machine {
    std::mutex mutex;
    bool hip = false;
    pid_t pid = 0;
    int start_error = kNotInitialized;
    std::vector<std::unique_ptr<Device>> devices;
    std::map<uintptr_t, std::shared_ptr<Region>> regions;  // by base
    std::map<void *, StreamPointer> streams;
    std::vector<StreamPointer> all_streams;  // destroyed ones too, until their work is done
    std::map<void *, std::shared_ptr<Event>> events;
    std::set<Module *> modules;
    std::vector<std::unique_ptr<Function>> functions;
    std::vector<Failure> failures;
    uint64_t next_serial = 1;
    int next_stream = 1, next_event = 1;
    std::atomic<int> fault{kOk};  // sticky, as after an illegal address
};

Machine &machine() {
    static Machine *the = new Machine;  // never destroyed
    return *the;
}

thread_local std::vector<int> current;  // CUDA's stack of contexts, as device ordinals
thread_local int chosen = 0;            // HIP's device

// One write() a line, so that lines of several threads do not mix.
void log(const std::string &line) {
    static const char *prefix = getenv("STUB_LOG");
    if (!prefix || !*prefix) return;
    static std::mutex *mutex = new std::mutex;
    static int fd = -1;
    static pid_t owner = 0;
    Lock lock(*mutex);
    if (owner != getpid()) {
        owner = getpid();
        fd = ::open(format("%s.%d", prefix, owner).c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    }
    std::string whole = line + "\n";
    if (fd >= 0 && ::write(fd, whole.data(), whole.size()) < 0) fd = -1;
}

std::vector<int> visible_devices(bool hip, int count) {
    const char *list = nullptr;
    for (const char *name : {hip ? "HIP_VISIBLE_DEVICES" : "CUDA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"})
        if (!list) list = getenv(name);
    std::vector<int> devices;
    if (!list) {
        for (int d = 0; d < count; ++d) devices.push_back(d);
        return devices;
    }
    for (const char *at = list; *at;) {
        char *end;
        long d = strtol(at, &end, 10);
        if (end == at || d < 0 || d >= count) break;  // as the real ones: the list ends before the first wrong entry
        devices.push_back(static_cast<int>(d));
        at = *end == ',' ? end + 1 : end;
    }
    return devices;
}

std::vector<Failure> wanted_failures() {
    std::vector<Failure> failures;
    std::string text = getenv("STUB_FAIL") ? getenv("STUB_FAIL") : "";
    for (size_t at = 0; at < text.size();) {
        size_t end = std::min(text.find(',', at), text.size());
        std::string one = text.substr(at, end - at);
        size_t colon = one.find(':'), from = one.find('@');
        if (colon != std::string::npos)
            failures.push_back({one.substr(0, colon), atoi(one.c_str() + colon + 1),
                                from == std::string::npos ? 1 : atoi(one.c_str() + from + 1)});
        at = end + 1;
    }
    return failures;
}

// The region that holds all of [address, address + nbytes); `some`: the one that holds the first byte. The lock is held.
std::shared_ptr<Region> region_at(uintptr_t address, size_t nbytes, bool *some = nullptr) {
    auto &regions = machine().regions;
    auto after = regions.upper_bound(address);
    if (after == regions.begin()) return nullptr;
    auto &region = std::prev(after)->second;
    if (address >= region->base + region->nbytes) return nullptr;
    if (some) *some = true;
    return address + nbytes <= region->base + region->nbytes ? region : nullptr;
}

struct Place {
    char *memory;
    int physical;  // -1: host memory
    bool pageable;
};

// Where an address of a copy lies; what is in no region is ordinary host memory.
int place_of(uintptr_t address, size_t nbytes, Place *place) {
    Lock lock(machine().mutex);
    bool some = false;
    auto region = region_at(address, nbytes, &some);
    if (!address || (some && !region)) return kInvalidValue;
    if (!region)
        *place = {reinterpret_cast<char *>(address), -1, true};
    else
        *place = {region->memory + (address - region->base), region->is_host() ? -1 : region->physical, false};
    return kOk;
}

StreamPointer make_stream(int device, int number) {
    auto stream = std::make_shared<Stream>();
    stream->device = device, stream->number = number;
    machine().all_streams.push_back(stream);
    return stream;
}

int find_stream(StreamHandle handle, StreamPointer *stream) {
    auto &m = machine();
    Lock lock(m.mutex);
    if (reinterpret_cast<uintptr_t>(handle) <= 2) {
        auto &null_stream = m.devices[current_device()]->null_stream;
        if (!null_stream) null_stream = make_stream(current_device(), 0);
        *stream = null_stream;
        return kOk;
    }
    auto found = m.streams.find(handle);
    if (found == m.streams.end()) return kInvalidHandle;
    *stream = found->second;
    return kOk;
}

void work(StreamPointer stream) {
    auto &m = machine();
    Gate &gate = m.devices[stream->device]->gate;
    int delay_us = number_of("STUB_DELAY_US", 0);
    std::mt19937 random(static_cast<unsigned>(m.pid) * 1000003u + static_cast<unsigned>(stream->number));
    for (;;) {
        Operation next;
        {
            Lock lock(stream->mutex);
            stream->changed.wait(lock, [&] { return stream->closed || !stream->queue.empty(); });
            if (stream->queue.empty()) break;
            next = std::move(stream->queue.front());
            stream->queue.pop_front();
        }
        if (delay_us > 0) usleep(random() % (static_cast<unsigned>(delay_us) + 1));
        if (next.gated) gate.pass();
        next.run();
        next.run = nullptr;  // what it holds goes before others see that it is done
        Lock lock(stream->mutex);
        ++stream->completed;
        stream->changed.notify_all();
    }
    Lock lock(m.mutex);
    m.all_streams.erase(std::find(m.all_streams.begin(), m.all_streams.end(), stream));
}

// Threads of streams take no signals: those are the program's.
void start_thread(const StreamPointer &stream) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread(work, stream).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

uint64_t submit(const StreamPointer &stream, std::function<void()> run, bool gated = true) {
    Lock lock(stream->mutex);
    stream->queue.push_back({gated, std::move(run)});
    if (!stream->started) start_thread(stream);
    stream->started = true;
    stream->changed.notify_all();
    return ++stream->submitted;
}

std::string to_text(const unsigned size[3]) { return format("%u,%u,%u", size[0], size[1], size[2]); }

// A memory file mapped twice: its bytes for the driver, and the same length of addresses that nobody can touch.
bool map_file(Region &region) {
    size_t whole = (region.nbytes + kPage - 1) / kPage * kPage;
    void *memory = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED, region.fd, 0);
    if (memory == MAP_FAILED) return false;
    void *seen = mmap(nullptr, whole + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (seen == MAP_FAILED) {
        munmap(memory, whole);
        return false;
    }
    region.memory = static_cast<char *>(memory), region.base = reinterpret_cast<uintptr_t>(seen);
    return true;
}

void unmap_file(Region &region) {
    size_t whole = (region.nbytes + kPage - 1) / kPage * kPage;
    munmap(region.memory, whole);
    munmap(reinterpret_cast<void *>(region.base), whole + kPage);
    if (region.fd >= 0) close(region.fd);
}

// What an IpcHandle holds.
struct Ticket {
    char magic[8];
    int pid, fd, physical, unused;
    uint64_t serial, nbytes, offset;
};
static_assert(sizeof(Ticket) <= sizeof(IpcHandle));
constexpr char kMagic[8] = "stubipc";

std::string file_name(int pid, uint64_t serial) {
    return format("stub-%d-%llu", pid, static_cast<unsigned long long>(serial));
}

const char *kind_of(const Place &dst, const Place &src) {
    if (dst.physical < 0) return src.physical < 0 ? "host-to-host" : "device-to-host";
    if (src.physical < 0) return "host-to-device";
    return dst.physical == src.physical ? "local" : "peer";
}

struct Copy {
    Place dst, src;
    size_t nbytes;

    void run() const {
        auto *to = reinterpret_cast<std::atomic<uint32_t> *>(dst.memory);
        auto *from = reinterpret_cast<const std::atomic<uint32_t> *>(src.memory);
        bool word = nbytes == 4 && reinterpret_cast<uintptr_t>(to) % 4 == 0 && reinterpret_cast<uintptr_t>(from) % 4 == 0;
        if (word)  // It may be a flag: an engine's copy comes after all that the stream did before.
            to->store(from->load(std::memory_order_acquire), std::memory_order_release);
        else
            memcpy(dst.memory, src.memory, nbytes);
    }
};

int prepare_copy(const char *function, uintptr_t dst, uintptr_t src, size_t nbytes, const Stream &stream,
                 const std::string &detail, Copy *prepared) {
    prepared->nbytes = nbytes;
    if (int error = place_of(dst, nbytes, &prepared->dst)) return error;
    if (int error = place_of(src, nbytes, &prepared->src)) return error;
    log(format("copy call=%s kind=%s dst_gpu=%d src_gpu=%d nbytes=%zu stream=%d pageable=%d%s", function,
               kind_of(prepared->dst, prepared->src), prepared->dst.physical, prepared->src.physical, nbytes,
               stream.number, prepared->dst.pageable || prepared->src.pageable, detail.c_str()));
    return kOk;
}

int find_flag(uintptr_t address, std::atomic<uint32_t> **flag) {
    Lock lock(machine().mutex);
    auto region = address % 4 ? nullptr : region_at(address, 4);
    if (!region || region->view) return kInvalidValue;  // The host's address is not the device's.
    *flag = reinterpret_cast<std::atomic<uint32_t> *>(region->memory + (address - region->base));
    return kOk;
}

int find_event(EventHandle handle, std::shared_ptr<Event> *event) {
    Lock lock(machine().mutex);
    auto found = machine().events.find(handle);
    if (found == machine().events.end()) return kInvalidHandle;
    *event = found->second;
    return kOk;
}

}  // namespace

const char *error_text(int error) {
    static const std::map<int, const char *> *texts = new std::map<int, const char *>{
        {kOk, "no error"},
        {kInvalidValue, "invalid argument"},
        {kOutOfMemory, "out of memory"},
        {kNotInitialized, "initialization error"},
        {kBadDirection, "invalid copy direction for memcpy"},
        {kNoDevice, "no GPU is detected"},
        {kInvalidDevice, "invalid device ordinal"},
        {kInvalidContext, "invalid device context"},
        {kNoPeerAccess, "peer access is not supported between these two devices"},
        {kInvalidHandle, "invalid resource handle"},
        {kNotFound, "named symbol not found"},
        {kNotReady, "device not ready"},
        {kIllegalAddress, "an illegal memory access was encountered"},
        {kPeerAccessTwice, "peer access is already enabled"},
        {kContextIsDestroyed, "context is destroyed"},
        {kRegisteredTwice, "part or all of the requested memory range is already mapped"},
        {kNotRegistered, "pointer does not correspond to a registered memory region"},
        {kNotSupported, "operation not supported"},
        {kCaptureUnsupported, "operation not permitted when stream is capturing"},
    };
    auto found = texts->find(error);
    return found == texts->end() ? nullptr : found->second;
}

int initialize(bool hip) {
    auto &m = machine();
    Lock lock(m.mutex);
    if (m.pid && m.pid != getpid()) return kNotInitialized;
    if (m.pid) return m.start_error;
    m.pid = getpid(), m.hip = hip;
    m.failures = wanted_failures();
    if (!number_of("STUB_NO_GPU", 0))
        for (int physical : visible_devices(hip, number_of("STUB_GPUS", 2))) {
            m.devices.push_back(std::make_unique<Device>());
            m.devices.back()->physical = physical;
            m.devices.back()->gate.open(hip ? number_of("GPU_MAX_HW_QUEUES", 4)
                                            : number_of("CUDA_DEVICE_MAX_CONNECTIONS", 8));
        }
    return m.start_error = m.devices.empty() ? kNoDevice : kOk;
}

int enter(const char *function, Needs needs) {
    auto &m = machine();
    Lock lock(m.mutex);
    if (!m.pid || m.pid != getpid()) return kNotInitialized;
    if (m.start_error) return m.start_error;
    for (Failure &failure : m.failures)
        if (failure.function == function && --failure.from < 1) {
            log(format("fail call=%s code=%d", function, failure.code));
            return failure.code;
        }
    if (m.fault) return m.fault;
    if (needs == Needs::Driver) return kOk;
    if (m.hip) return kOk;
    if (current.empty()) return kInvalidContext;
    return m.devices[current.back()]->context_uses ? kOk : kContextIsDestroyed;
}

int device_count() { return static_cast<int>(machine().devices.size()); }

int current_device() { return machine().hip ? chosen : current.empty() ? -1 : current.back(); }

int physical(int device) { return machine().devices[device]->physical; }

std::string pci_id(int device) {
    return format(machine().hip ? "0000:%02x:00.0" : "0000:%02X:00.0", 0x0b + 0x10 * physical(device));
}

int device_of_pci_id(const char *id) {
    for (int d = 0; d < device_count(); ++d)
        if (strcasecmp(pci_id(d).c_str(), id) == 0) return d;
    return -1;
}

bool can_access_peer(int device, int peer) { return device != peer && !number_of("STUB_NO_PEER", 0); }

int enable_peer(int peer) {
    Lock lock(machine().mutex);
    if (!can_access_peer(current_device(), peer)) return kNoPeerAccess;
    return machine().devices[current_device()]->peers.insert(peer).second ? kOk : kPeerAccessTwice;
}

int synchronize_device(int device) {
    std::vector<std::pair<StreamPointer, uint64_t>> waits;
    {
        Lock lock(machine().mutex);
        for (auto &stream : machine().all_streams)
            if (stream->device == device) waits.push_back({stream, stream->so_far()});
    }
    for (auto &[stream, count] : waits) stream->wait_until(count);
    return kOk;
}

// A context's handle is never dereferenced: device 0's is 0x1000.
namespace {

Context context_of(int device) { return reinterpret_cast<Context>((device + 1) * uintptr_t{0x1000}); }

int device_of(Context context) {
    uintptr_t value = reinterpret_cast<uintptr_t>(context);
    bool known = value && value % 0x1000 == 0 && value / 0x1000 <= static_cast<uintptr_t>(device_count());
    int device = known ? static_cast<int>(value / 0x1000) - 1 : -1;
    return known && machine().devices[device]->context_uses ? device : -1;
}

}  // namespace

int retain_context(int device, Context *context) {
    Lock lock(machine().mutex);
    ++machine().devices[device]->context_uses;
    *context = context_of(device);
    return kOk;
}

int release_context(int device) {
    Lock lock(machine().mutex);
    int &uses = machine().devices[device]->context_uses;
    if (!uses) return kInvalidContext;
    --uses;  // stub: what it held stays; tests look for leaks themselves
    return kOk;
}

int push_context(Context context) {
    Lock lock(machine().mutex);
    int device = device_of(context);
    if (device < 0) return kInvalidContext;
    current.push_back(device);
    return kOk;
}

int pop_context(Context *context) {
    if (current.empty()) return kInvalidContext;
    if (context) *context = context_of(current.back());
    current.pop_back();
    return kOk;
}

int set_context(Context context) {
    Lock lock(machine().mutex);
    int device = context ? device_of(context) : -1;
    if (context && device < 0) return kInvalidContext;
    if (!current.empty()) current.pop_back();
    if (context) current.push_back(device);
    return kOk;
}

Context current_context() { return current.empty() ? nullptr : context_of(current.back()); }

int set_device(int device) {
    if (device < 0 || device >= device_count()) return kInvalidDevice;
    chosen = device;
    return kOk;
}

namespace {

size_t memory_nbytes() {
    const char *text = getenv("STUB_MEMORY_NBYTES");
    return text && *text ? strtoull(text, nullptr, 10) : size_t{16} << 30;
}

}  // namespace

int allocate(uintptr_t *address, size_t nbytes) {
    auto &m = machine();
    if (!address || !nbytes) return kInvalidValue;
    Lock lock(m.mutex);
    Device &device = *m.devices[current_device()];
    if (nbytes > memory_nbytes() || device.allocated > memory_nbytes() - nbytes) return kOutOfMemory;
    auto region = std::make_shared<Region>();
    region->origin = Origin::Allocated;
    region->nbytes = nbytes;
    region->device = current_device(), region->physical = device.physical;
    region->serial = m.next_serial++;
    region->fd = memfd_create(file_name(m.pid, region->serial).c_str(), MFD_CLOEXEC);
    if (region->fd < 0 || ftruncate(region->fd, static_cast<off_t>(nbytes)) != 0 || !map_file(*region)) {
        if (region->fd >= 0) close(region->fd);
        return kOutOfMemory;
    }
    device.allocated += nbytes;
    m.regions[region->base] = region;
    *address = region->base;
    log(format("allocate gpu=%d nbytes=%zu", region->physical, nbytes));
    lock.unlock();
    memset(region->memory, kFresh, nbytes);
    return kOk;
}

int deallocate(uintptr_t address) {
    auto &m = machine();
    if (!address) return m.hip ? kOk : kInvalidValue;
    std::shared_ptr<Region> region;
    {
        Lock lock(m.mutex);
        region = region_at(address, 1);
        if (!region || region->origin != Origin::Allocated || region->base != address) return kInvalidValue;
    }
    synchronize_device(region->device);
    Lock lock(m.mutex);
    if (!m.regions.erase(address)) return kInvalidValue;
    m.devices[region->device]->allocated -= region->nbytes;
    log(format("free gpu=%d nbytes=%zu", region->physical, region->nbytes));
    if (region->exported) memset(region->memory, kStale, region->nbytes);  // a peer that still reads it gets no sense
    unmap_file(*region);
    return kOk;
}

int memory_info(size_t *free_nbytes, size_t *total_nbytes) {
    Lock lock(machine().mutex);
    *total_nbytes = memory_nbytes();
    *free_nbytes = memory_nbytes() - machine().devices[current_device()]->allocated;
    return kOk;
}

int address_range(uintptr_t address, uintptr_t *base, size_t *nbytes) {
    Lock lock(machine().mutex);
    auto region = region_at(address, 1);
    if (!region) return machine().hip ? kInvalidValue : kNotFound;
    if (base) *base = region->base;
    if (nbytes) *nbytes = region->nbytes;
    return kOk;
}

int pointer_attributes(uintptr_t address, int *type, int *device) {
    Lock lock(machine().mutex);
    auto region = region_at(address, 1);
    if (!region) return kInvalidValue;
    *type = region->is_host() ? 1 : 2;
    *device = region->device;
    return kOk;
}

namespace {

int add_host(Origin origin, void *at, size_t nbytes) {
    auto &m = machine();
    Lock lock(m.mutex);
    uintptr_t base = reinterpret_cast<uintptr_t>(at);
    auto next = m.regions.lower_bound(base);
    if (region_at(base, 1) || (next != m.regions.end() && next->first < base + nbytes)) return kRegisteredTwice;
    auto region = std::make_shared<Region>();
    region->origin = origin;
    region->base = base, region->nbytes = nbytes, region->memory = static_cast<char *>(at);
    region->device = current_device(), region->physical = physical(current_device());
    if (m.hip && origin == Origin::Registered) {
        // The device's address of registered memory need not be the host's, so here it never is.
        void *seen = mmap(nullptr, nbytes + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (seen == MAP_FAILED) return kOutOfMemory;
        auto view = std::make_shared<Region>(*region);
        view->origin = Origin::View;
        region->view = view->base = reinterpret_cast<uintptr_t>(seen) + base % kPage;
        m.regions[view->base] = view;
    }
    m.regions[base] = region;
    log(format("register nbytes=%zu", nbytes));
    return kOk;
}

int remove_host(Origin origin, void *at, std::shared_ptr<Region> *removed) {
    auto &m = machine();
    Lock lock(m.mutex);
    auto found = m.regions.find(reinterpret_cast<uintptr_t>(at));
    if (found == m.regions.end() || found->second->origin != origin)
        return origin == Origin::Registered ? kNotRegistered : kInvalidValue;
    *removed = found->second;
    m.regions.erase(found);
    if (uintptr_t view = (*removed)->view) {
        m.regions.erase(view);
        munmap(reinterpret_cast<void *>(view - view % kPage), (*removed)->nbytes + 2 * kPage);
    }
    log(format("unregister nbytes=%zu", (*removed)->nbytes));
    return kOk;
}

}  // namespace

int register_host(void *at, size_t nbytes) {
    if (!at || !nbytes) return kInvalidValue;
    return add_host(Origin::Registered, at, nbytes);
}

int unregister_host(void *at) {
    std::shared_ptr<Region> region;
    return remove_host(Origin::Registered, at, &region);
}

int host_device_pointer(void *at, uintptr_t *address) {
    Lock lock(machine().mutex);
    auto region = region_at(reinterpret_cast<uintptr_t>(at), 1);
    if (!region || !region->is_host()) return kInvalidValue;
    uintptr_t base = region->view ? region->view : region->base;
    *address = base + (reinterpret_cast<uintptr_t>(at) - region->base);
    return kOk;
}

int allocate_host(void **at, size_t nbytes) {
    void *memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return kOutOfMemory;
    *at = memory;
    return add_host(Origin::HostAllocated, memory, nbytes);
}

int free_host(void *at) {
    if (!at) return kOk;
    std::shared_ptr<Region> region;
    synchronize_device(current_device());
    if (int error = remove_host(Origin::HostAllocated, at, &region)) return error;
    munmap(at, region->nbytes);
    return kOk;
}

int export_memory(IpcHandle *handle, uintptr_t address) {
    auto &m = machine();
    Lock lock(m.mutex);
    auto region = region_at(address, 1);
    if (!handle || !region || region->origin != Origin::Allocated) return kInvalidValue;
    // HIP opens the handle of an interior pointer at that pointer, CUDA at the base.
    Ticket ticket{{}, m.pid, region->fd, region->physical, 0, region->serial, region->nbytes,
                  m.hip ? address - region->base : 0};
    memcpy(ticket.magic, kMagic, sizeof ticket.magic);
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &ticket, sizeof ticket);
    region->exported = true;
    return kOk;
}

int rdma_ordering() { return number_of("STUB_RDMA_ORDERING", 0); }

int export_file(int *fd, uintptr_t address, size_t nbytes) {
    auto &m = machine();
    Lock lock(m.mutex);
    auto region = region_at(address, 1);
    if (!fd || !region || region->origin != Origin::Allocated || region->base != address || nbytes % kPage ||
        nbytes > (region->nbytes + kPage - 1) / kPage * kPage)
        return kInvalidValue;
    *fd = fcntl(region->fd, F_DUPFD_CLOEXEC, 0);
    return *fd < 0 ? kOutOfMemory : kOk;
}

int import_memory(uintptr_t *address, const IpcHandle &handle, unsigned flags) {
    auto &m = machine();
    Ticket ticket;
    memcpy(&ticket, &handle, sizeof ticket);
    if (!address || flags != 1) return kInvalidValue;
    if (memcmp(ticket.magic, kMagic, sizeof ticket.magic) != 0) return m.hip ? kInvalidValue : kInvalidHandle;
    if (ticket.pid == m.pid) return kInvalidContext;
    Lock lock(m.mutex);
    Device &device = *m.devices[current_device()];
    if (ticket.physical != device.physical && number_of("STUB_NO_PEER", 0)) return kNoPeerAccess;
    std::string key(reinterpret_cast<const char *>(&ticket), offsetof(Ticket, offset));
    key += format("@%d", current_device());
    for (auto &[base, region] : m.regions)
        if (region->origin == Origin::Imported && region->handle == key) {
            ++region->opened;
            *address = base + ticket.offset;
            region->given.push_back(*address);
            return kOk;
        }
    std::string path = format("/proc/%d/fd/%d", ticket.pid, ticket.fd);
    auto region = std::make_shared<Region>();
    region->fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (region->fd < 0) return kInvalidHandle;
    char name[128] = "";
    std::string mine = format("/proc/self/fd/%d", region->fd);
    bool same = readlink(mine.c_str(), name, sizeof name - 1) > 0 &&
                name == "/memfd:" + file_name(ticket.pid, ticket.serial) + " (deleted)";
    region->origin = Origin::Imported;
    region->nbytes = ticket.nbytes;
    region->physical = ticket.physical;
    region->device = current_device();
    region->handle = key;
    region->opened = 1;
    if (!same || !map_file(*region)) {
        close(region->fd);
        return kInvalidHandle;
    }
    close(region->fd);
    region->fd = -1;
    m.regions[region->base] = region;
    *address = region->base + ticket.offset;
    region->given.push_back(*address);
    log(format("import gpu=%d nbytes=%zu", region->physical, region->nbytes));
    return kOk;
}

int close_memory(uintptr_t address) {
    auto &m = machine();
    std::shared_ptr<Region> region;
    {
        Lock lock(m.mutex);
        region = region_at(address, 1);
        if (!region || region->origin != Origin::Imported) return kInvalidValue;
    }
    synchronize_device(region->device);
    Lock lock(m.mutex);
    auto given = std::find(region->given.begin(), region->given.end(), address);
    if (given == region->given.end()) return kInvalidValue;
    region->given.erase(given);
    if (--region->opened) return kOk;
    m.regions.erase(region->base);
    log(format("close gpu=%d nbytes=%zu", region->physical, region->nbytes));
    unmap_file(*region);
    return kOk;
}

int create_stream(StreamHandle *handle) {
    auto &m = machine();
    Lock lock(m.mutex);
    auto stream = make_stream(current_device(), m.next_stream++);
    *handle = stream.get();
    m.streams[*handle] = stream;
    return kOk;
}

int destroy_stream(StreamHandle handle) {
    auto &m = machine();
    Lock lock(m.mutex);
    auto found = m.streams.find(handle);
    if (found == m.streams.end()) return kInvalidHandle;
    StreamPointer stream = found->second;
    m.streams.erase(found);
    Lock inner(stream->mutex);
    stream->closed = true;  // its thread ends with its last operation
    stream->changed.notify_all();
    if (!stream->started) m.all_streams.erase(std::find(m.all_streams.begin(), m.all_streams.end(), stream));
    return kOk;
}

int query_stream(StreamHandle handle) {
    StreamPointer stream;
    if (int error = find_stream(handle, &stream)) return error;
    if (stream->capturing) return kCaptureUnsupported;
    Lock lock(stream->mutex);
    return stream->completed == stream->submitted ? kOk : kNotReady;
}

int synchronize_stream(StreamHandle handle) {
    StreamPointer stream;
    if (int error = find_stream(handle, &stream)) return error;
    if (stream->capturing) return kCaptureUnsupported;
    stream->wait_until(stream->so_far());
    return kOk;
}

int is_capturing(StreamHandle handle, int *status) {
    StreamPointer stream;
    if (int error = find_stream(handle, &stream)) return error;
    *status = stream->capturing;
    return kOk;
}

int copy(const char *function, uintptr_t dst, uintptr_t src, size_t nbytes, StreamHandle handle,
         const std::string &detail) {
    StreamPointer stream;
    if (int error = find_stream(handle, &stream)) return error;
    if (!nbytes) return kOk;
    Copy one;
    if (int error = prepare_copy(function, dst, src, nbytes, *stream, detail, &one)) return error;
    uint64_t count = submit(stream, [one] { one.run(); });
    // As the real ones may: a copy from or to memory that is not pinned keeps the caller.
    if (one.dst.pageable || one.src.pageable) stream->wait_until(count);
    return kOk;
}

int copy_batch(const char *function, const uintptr_t *dsts, const uintptr_t *srcs, const size_t *sizes, size_t count,
               StreamHandle handle) {
    StreamPointer stream;
    if (int error = find_stream(handle, &stream)) return error;
    std::vector<Copy> copies(count);
    for (size_t i = 0; i < count; ++i)
        if (int error = prepare_copy(function, dsts[i], srcs[i], sizes[i], *stream, format(" batch=%zu", count),
                                     &copies[i]))
            return error;
    static std::atomic<unsigned> calls{0};
    // The copies of a batch have no order among themselves.
    std::shuffle(copies.begin(), copies.end(), std::mt19937(static_cast<unsigned>(machine().pid) + ++calls));
    submit(stream, [copies] {
        for (const Copy &one : copies) one.run();
    });
    return kOk;
}

int fill(const char *function, uintptr_t dst, unsigned char value, size_t nbytes, StreamHandle handle) {
    StreamPointer stream;
    Place place;
    if (int error = find_stream(handle, &stream)) return error;
    if (!nbytes) return kOk;
    if (int error = place_of(dst, nbytes, &place)) return error;
    if (place.pageable) return kInvalidValue;
    log(format("fill call=%s gpu=%d nbytes=%zu stream=%d", function, place.physical, nbytes, stream->number));
    submit(stream, [=] { memset(place.memory, value, nbytes); });
    return kOk;
}

bool valid_flag(uintptr_t address) {
    std::atomic<uint32_t> *flag;
    return find_flag(address, &flag) == kOk;
}

int write_value(const char *function, StreamHandle handle, uintptr_t address, uint32_t value) {
    StreamPointer stream;
    std::atomic<uint32_t> *flag;
    if (int error = find_stream(handle, &stream)) return error;
    if (int error = find_flag(address, &flag)) return error;
    log(format("write call=%s address=%#zx value=%u stream=%d", function, address, value, stream->number));
    submit(stream, [=] { flag->store(value, std::memory_order_release); });
    return kOk;
}

int wait_value(const char *function, StreamHandle handle, uintptr_t address, uint32_t value, Compare compare,
               uint32_t mask) {
    StreamPointer stream;
    std::atomic<uint32_t> *flag;
    if (int error = find_stream(handle, &stream)) return error;
    if (int error = find_flag(address, &flag)) return error;
    log(format("wait call=%s address=%#zx value=%u stream=%d", function, address, value, stream->number));
    auto reached = [=] {
        uint32_t seen = flag->load(std::memory_order_acquire) & mask;
        switch (compare) {
            case Compare::GreaterOrEqualCyclic: return static_cast<int32_t>(seen - value) >= 0;
            case Compare::GreaterOrEqual: return seen >= value;
            case Compare::Equal: return seen == value;
            case Compare::And: return (seen & value) != 0;
            case Compare::Nor: return ~(seen | value) != 0;
        }
        return true;
    };
    Gate &gate = machine().devices[stream->device]->gate;
    submit(stream, [reached, &gate] { gate.hold(reached); }, false);
    return kOk;
}

int create_event(EventHandle *handle) {
    auto &m = machine();
    Lock lock(m.mutex);
    auto event = std::make_shared<Event>();
    event->device = current_device(), event->number = m.next_event++;
    *handle = event.get();
    m.events[*handle] = event;
    return kOk;
}

int destroy_event(EventHandle handle) {
    Lock lock(machine().mutex);
    return machine().events.erase(handle) ? kOk : kInvalidHandle;
}

int record_event(EventHandle handle, StreamHandle stream_handle) {
    StreamPointer stream;
    std::shared_ptr<Event> event;
    if (int error = find_stream(stream_handle, &stream)) return error;
    if (int error = find_event(handle, &event)) return error;
    if (event->device != stream->device) return kInvalidHandle;
    auto record = std::make_shared<Record>();
    {
        Lock lock(machine().mutex);
        event->latest = record;
    }
    log(format("record event=%d stream=%d", event->number, stream->number));
    submit(stream, [record] { record->finish(); });
    return kOk;
}

namespace {

int latest_record(EventHandle handle, std::shared_ptr<Record> *record, int *number) {
    std::shared_ptr<Event> event;
    if (int error = find_event(handle, &event)) return error;
    Lock lock(machine().mutex);
    *record = event->latest, *number = event->number;
    return kOk;
}

}  // namespace

int query_event(EventHandle handle) {
    std::shared_ptr<Record> record;
    int number;
    if (int error = latest_record(handle, &record, &number)) return error;
    return !record || record->finished() ? kOk : kNotReady;
}

int synchronize_event(EventHandle handle) {
    std::shared_ptr<Record> record;
    int number;
    if (int error = latest_record(handle, &record, &number)) return error;
    if (record) record->wait();
    return kOk;
}

int wait_event(StreamHandle stream_handle, EventHandle handle) {
    StreamPointer stream;
    std::shared_ptr<Record> record;
    int number;
    if (int error = find_stream(stream_handle, &stream)) return error;
    if (int error = latest_record(handle, &record, &number)) return error;
    log(format("wait_event event=%d stream=%d recorded=%d", number, stream->number, record != nullptr));
    if (record) submit(stream, [record] { record->wait(); }, false);
    return kOk;
}

int load_module(void **module, const void *image) {
    if (!module || !image) return kInvalidValue;
    Lock lock(machine().mutex);
    auto *loaded = new Module{current_device()};
    machine().modules.insert(loaded);
    *module = loaded;
    return kOk;
}

int unload_module(void *module) {
    Lock lock(machine().mutex);
    auto *loaded = static_cast<Module *>(module);
    if (!machine().modules.erase(loaded)) return kInvalidHandle;
    delete loaded;
    return kOk;
}

int get_function(void **function, void *module, const char *name) {
    auto &m = machine();
    Lock lock(m.mutex);
    auto *loaded = static_cast<Module *>(module);
    if (!function || !name) return kInvalidValue;
    if (!m.modules.count(loaded)) return kInvalidHandle;
    Kernel kernel = find_kernel(name);
    if (!kernel) return kNotFound;
    m.functions.push_back(std::make_unique<Function>(Function{kernel, name, loaded}));
    *function = m.functions.back().get();
    return kOk;
}

namespace {

// The driver's address of what a kernel was given; an address of no region is an error that a GPU never forgets.
template <class Pointer>
bool translate(Pointer &pointer, const char *kernel, const char *what) {
    uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    Lock lock(machine().mutex);
    auto region = region_at(address, 1);
    if (!region || region->view) {
        fprintf(stderr, "stub driver: kernel %s: its %s %#zx is no memory of a GPU\n", kernel, what, address);
        machine().fault = kIllegalAddress;
        return false;
    }
    pointer = region->memory + (address - region->base);
    return true;
}

}  // namespace

int launch(const char *call, void *function, const unsigned grid[3], const unsigned block[3], StreamHandle handle,
           void **parameters) {
    auto &m = machine();
    StreamPointer stream;
    if (int error = find_stream(handle, &stream)) return error;
    Function *known = nullptr;
    {
        Lock lock(m.mutex);
        for (auto &one : m.functions)
            if (one.get() == function && m.modules.count(one->module)) known = one.get();
        if (!known || stream->device != known->module->device) return kInvalidHandle;
    }
    size_t blocks = size_t{grid[0]} * grid[1] * grid[2], threads = size_t{block[0]} * block[1] * block[2];
    if (!blocks || !threads || threads > 1024 || !parameters || !parameters[0]) return kInvalidValue;
    ReduceArguments arguments;
    memcpy(&arguments, parameters[0], sizeof arguments);
    log(format("kernel call=%s name=%s grid=%s block=%s stream=%d sources=%u op=%u divisor=%d elements=%lld", call,
               known->name.c_str(), to_text(grid).c_str(), to_text(block).c_str(), stream->number,
               arguments.source_count, arguments.op, arguments.divisor, arguments.element_count));
    if (arguments.source_count > 64) return kInvalidValue;
    if (arguments.element_count > 0) {
        const char *name = known->name.c_str();
        if (!translate(arguments.dst, name, "destination")) return kOk;
        if (arguments.also && !translate(arguments.also, name, "second destination")) return kOk;
        for (unsigned s = 0; s < arguments.source_count; ++s)
            if (!translate(arguments.srcs[s], name, "source")) return kOk;
    }
    unsigned size[2][3];
    memcpy(size[0], grid, sizeof size[0]), memcpy(size[1], block, sizeof size[1]);
    std::vector<unsigned> flat(&size[0][0], &size[0][0] + 6);
    submit(stream, [kernel = known->kernel, flat, arguments] { run_kernel(kernel, &flat[0], &flat[3], arguments); });
    return kOk;
}

}  // namespace stub

// For tests only.

// Holds a stream for a while, as a long kernel does.
STUB_API int stub_sleep(void *handle, unsigned microseconds) {
    stub::StreamPointer stream;
    if (int error = stub::find_stream(handle, &stream)) return error;
    stub::submit(stream, [=] { usleep(microseconds); });
    return stub::kOk;
}

STUB_API int stub_set_capturing(void *handle, int capturing) {
    stub::StreamPointer stream;
    if (int error = stub::find_stream(handle, &stream)) return error;
    stream->capturing = capturing != 0;
    return stub::kOk;
}

// What this process has not given back: "allocated", "imported", "registered", "streams", "events", "modules",
// "contexts"; -1: no such thing.
STUB_API int stub_live(const char *what) {
    auto &m = stub::machine();
    stub::Lock lock(m.mutex);
    std::string name = what;
    auto regions = [&](stub::Origin origin) {
        return static_cast<int>(std::count_if(m.regions.begin(), m.regions.end(),
                                              [&](auto &one) { return one.second->origin == origin; }));
    };
    if (name == "allocated") return regions(stub::Origin::Allocated);
    if (name == "imported") return regions(stub::Origin::Imported);
    if (name == "registered") return regions(stub::Origin::Registered) + regions(stub::Origin::HostAllocated);
    if (name == "streams") return static_cast<int>(m.streams.size());
    if (name == "events") return static_cast<int>(m.events.size());
    if (name == "modules") return static_cast<int>(m.modules.size());
    if (name != "contexts") return -1;
    int uses = 0;
    for (auto &device : m.devices) uses += device->context_uses;
    return uses;
}
