// device/hip: the runtime of AMD GPUs (libamdhip64), as a Runtime. Written against the headers of HIP 7; tests run it on
// a stub of the library. No MI300 or MI355 has run it.
//
// Protocol: what differs from CUDA, by the sources of ROCm's clr and rocr-runtime (2024 to 2026):
//
// - Copies (HDMA_AMD_COPY). `nocu`, the default: hipMemcpyAsync with kind 1024, DeviceToDeviceNoCU. Newer clr moves plain
//   copies of up to 1 MiB between processes by a kernel; NoCU always takes SDMA. `default`: the plain kind, which on
//   ROCm 6 also picks the engine that is best for the link. Copies of one batch go on a stream for each, since a stream
//   has one copy under way at a time and every peer has a link of its own.
// - Flags (HDMA_AMD_FLAG). A stream that waits for a value or writes one runs a kernel on this platform. So no stream
//   waits: a thread of the engine polls. `copy`, the default: a flag is raised by a 4-byte copy on the stream that
//   copied the data, by the same kind of engine. `write`: by hipStreamWriteValue32.
// - Windows are uncached: what SDMA writes for a peer does not pass that GPU's cache, and a kernel reads it.
//
// Threading: see runtime.h.
//
// Ordering: a stream's copies are executed in order, so the 4 bytes of a flag come after the data.
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime.h"

namespace hdma {

namespace {

using Result = int;

constexpr Result kNotReady = 600;
constexpr unsigned kNonBlocking = 1, kDisableTiming = 2, kLazyPeerAccess = 1, kPortableMapped = 3, kUncached = 3;
constexpr int kDeviceOrdinal = 9;
constexpr int kHostToDevice = 1, kDeviceToHost = 2, kDeviceToDevice = 3, kDefault = 4, kNoCu = 1024;
// Flags on their way on one stream before it is looked whether the oldest are through.
constexpr size_t kFlags = 2048;
// No stream waits here, so what is on one is over soon.
constexpr int64_t kStuckNs = 60 * 1000 * 1000 * 1000ll;

struct Functions {
    Result (*init)(unsigned), (*device_count)(int *), (*set_device)(int), (*get_device)(int *);
    const char *(*error_name)(Result), *(*error_string)(Result);
    Result (*device_name)(char *, int, int), (*device_pci)(char *, int, int);
    Result (*can_access)(int *, int, int), (*pointer_attribute)(void *, int, void *);
    Result (*priorities)(int *, int *);
    Result (*allocate)(void **, size_t), (*allocate_flags)(void **, size_t, unsigned), (*free)(void *);
    Result (*memory)(size_t *, size_t *);
    Result (*get_handle)(IpcHandle *, void *), (*open_handle)(void **, IpcHandle, unsigned), (*close_handle)(void *);
    Result (*host_register)(void *, size_t, unsigned), (*host_unregister)(void *), (*host_pointer)(void **, void *, unsigned);
    Result (*host_allocate)(void **, size_t, unsigned);
    Result (*stream_create)(Stream *, unsigned, int), (*stream_capturing)(Stream, int *);
    Result (*event_create)(Event *, unsigned), (*event_record)(Event, Stream), (*event_query)(Event);
    Result (*stream_wait_event)(Stream, Event, unsigned);
    Result (*write32)(Stream, void *, uint32_t, unsigned);
    Result (*copy)(void *, const void *, size_t, int, Stream);
    Result (*module_load)(void **, const void *), (*module_function)(void **, void *, const char *);
    Result (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void **, void **);
};

// "gfx942" from the kernel driver's list of nodes: no function of HIP's gives it without a structure that has changed.
std::string arch_at(const std::string &pci) {
    unsigned domain = 0, bus = 0, device = 0, function = 0;
    if (sscanf(pci.c_str(), "%x:%x:%x.%x", &domain, &bus, &device, &function) != 4) return "";
    for (int node = 0;; ++node) {
        std::ifstream file(format("/sys/class/kfd/kfd/topology/nodes/%d/properties", node));
        if (!file) return "";
        std::map<std::string, unsigned long> properties;
        std::string key;
        for (unsigned long value; file >> key >> value;) properties[key] = value;
        unsigned long version = properties["gfx_target_version"];
        if (version && properties["domain"] == domain && properties["location_id"] == (bus << 8 | device << 3 | function))
            return format("gfx%lu%lx%lx", version / 10000, version / 100 % 100, version % 100);
    }
}

class Hip final : public Runtime {
  public:
    Hip()
        : library_({"libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"}, "no HIP runtime",
                   "Install ROCm (or its libraries, which come with torch for ROCm), or pass tensors in host memory") {
        auto find = [&](auto &function, const char *name) { library_.find(function, name); };
        find(f_.init, "hipInit");
        find(f_.error_name, "hipGetErrorName");
        find(f_.error_string, "hipGetErrorString");
        find(f_.device_count, "hipGetDeviceCount");
        find(f_.set_device, "hipSetDevice");
        find(f_.get_device, "hipGetDevice");
        find(f_.device_name, "hipDeviceGetName");
        find(f_.device_pci, "hipDeviceGetPCIBusId");
        find(f_.can_access, "hipDeviceCanAccessPeer");
        library_.find(f_.pointer_attribute, "hipPointerGetAttribute", true);
        find(f_.priorities, "hipDeviceGetStreamPriorityRange");
        find(f_.allocate, "hipMalloc");
        library_.find(f_.allocate_flags, "hipExtMallocWithFlags", true);
        find(f_.free, "hipFree");
        find(f_.memory, "hipMemGetInfo");
        find(f_.get_handle, "hipIpcGetMemHandle");
        find(f_.open_handle, "hipIpcOpenMemHandle");
        find(f_.close_handle, "hipIpcCloseMemHandle");
        find(f_.host_register, "hipHostRegister");
        find(f_.host_unregister, "hipHostUnregister");
        find(f_.host_pointer, "hipHostGetDevicePointer");
        find(f_.host_allocate, "hipHostMalloc");
        find(f_.stream_create, "hipStreamCreateWithPriority");
        find(f_.stream_capturing, "hipStreamIsCapturing");
        find(f_.event_create, "hipEventCreateWithFlags");
        find(f_.event_record, "hipEventRecord");
        find(f_.event_query, "hipEventQuery");
        find(f_.stream_wait_event, "hipStreamWaitEvent");
        find(f_.write32, "hipStreamWriteValue32");
        find(f_.copy, "hipMemcpyAsync");
        find(f_.module_load, "hipModuleLoadData");
        find(f_.module_function, "hipModuleGetFunction");
        find(f_.launch, "hipModuleLaunchKernel");
        check(f_.init(0), "hipInit(0)");
    }

    const char *name() const override { return "hip"; }

    void configure(const std::string &copy, const std::string &flag) override {
        copy_kind_ = copy == "default" ? kDeviceToDevice : kNoCu;
        flags_by_copy_ = flag != "write";
    }

    int count() override {
        int n = 0;
        check(f_.device_count(&n), "hipGetDeviceCount()");
        return n;
    }

    GpuInfo info(int ordinal) override {
        if (int n = count(); ordinal < 0 || ordinal >= n)
            throw Error(Kind::Device, format("there is no GPU %d: this process sees %d (HIP_VISIBLE_DEVICES)", ordinal, n));
        char name[128] = "", pci[32] = "";
        check(f_.device_name(name, sizeof name, ordinal), "hipDeviceGetName()");
        check(f_.device_pci(pci, sizeof pci, ordinal), "hipDeviceGetPCIBusId()");
        return {name, pci, arch_at(pci)};
    }

    bool reaches(int ordinal, int other) override {
        int can = 0;
        check(f_.can_access(&can, ordinal, other), "hipDeviceCanAccessPeer(%d, %d)", ordinal, other);
        return can != 0;
    }

    int owner(const void *memory) override {
        int ordinal = -1;
        auto *p = const_cast<void *>(memory);
        return f_.pointer_attribute && f_.pointer_attribute(&ordinal, kDeviceOrdinal, p) == 0 ? ordinal : -1;
    }

    bool holds(std::string &why_not) const override {
        why_not = "waits of streams are kernels on AMD GPUs";
        return false;
    }

    void *begin(int ordinal) override {
        int before = 0;
        check(f_.get_device(&before), "hipGetDevice()");
        if (before != ordinal) check(f_.set_device(ordinal), "hipSetDevice(%d)", ordinal);
        return reinterpret_cast<void *>(static_cast<intptr_t>(before));
    }
    void end(void *before) noexcept override { f_.set_device(static_cast<int>(reinterpret_cast<intptr_t>(before))); }

    char *allocate(size_t nbytes) override {
        void *p = nullptr;
        if (f_.allocate_flags)
            check(f_.allocate_flags(&p, nbytes, kUncached), "hipExtMallocWithFlags(%zu bytes, uncached)", nbytes);
        else
            check(f_.allocate(&p, nbytes), "hipMalloc(%zu bytes)", nbytes);
        return static_cast<char *>(p);
    }
    void free(char *memory) noexcept override { f_.free(memory); }
    size_t memory_left() override {
        size_t left = 0, all = 0;
        check(f_.memory(&left, &all), "hipMemGetInfo()");
        return left;
    }

    IpcHandle handle(char *memory) override {
        IpcHandle handle;
        check(f_.get_handle(&handle, memory), "hipIpcGetMemHandle()");
        return handle;
    }
    char *open(const IpcHandle &handle) override {
        void *p = nullptr;
        check(f_.open_handle(&p, handle, kLazyPeerAccess), "hipIpcOpenMemHandle()");
        return static_cast<char *>(p);
    }
    void close(char *mapped) noexcept override { f_.close_handle(mapped); }

    char *pin(void *memory, size_t nbytes) override {
        void *p = nullptr;
        check(f_.host_register(memory, nbytes, kPortableMapped), "hipHostRegister(%zu bytes)", nbytes);
        check(f_.host_pointer(&p, memory, 0), "hipHostGetDevicePointer()");
        return static_cast<char *>(p);
    }
    void unpin(void *memory) noexcept override { f_.host_unregister(memory); }

    Stream make_stream(bool high_priority) override {
        int least = 0, greatest = 0;
        Stream stream = nullptr;
        check(f_.priorities(&least, &greatest), "hipDeviceGetStreamPriorityRange()");
        check(f_.stream_create(&stream, kNonBlocking, high_priority ? greatest : least), "hipStreamCreateWithPriority()");
        return stream;
    }

    bool capturing(Stream stream) override {
        int status = 0;
        check(f_.stream_capturing(stream, &status), "hipStreamIsCapturing()");
        return status != 0;
    }

    Event make_event() override {
        Event event = nullptr;
        check(f_.event_create(&event, kDisableTiming), "hipEventCreateWithFlags()");
        return event;
    }
    void record(Event event, Stream stream) override { check(f_.event_record(event, stream), "hipEventRecord()"); }
    bool passed(Event event) override {
        Result result = f_.event_query(event);
        if (result == kNotReady) return false;
        check(result, "hipEventQuery()");
        return true;
    }
    void follow(Stream stream, Event event) override {
        check(f_.stream_wait_event(stream, event, 0), "hipStreamWaitEvent()");
    }

    void words(Stream stream, const WordOp *ops, size_t count) override {
        for (size_t i = 0; i < count; ++i) {
            if (ops[i].waits) throw Error(Kind::Error, "a stream was told to wait for a word on an AMD GPU");
            if (!flags_by_copy_)
                check(f_.write32(stream, ops[i].word, ops[i].value, 0), "hipStreamWriteValue32()");
            else
                raise_by_copy(stream, ops[i]);
        }
    }

    void copy(Stream stream, const Transfer *transfers, size_t count) override {
        std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);  // Communicators share the lanes.
        if (count > 1) lock.lock();
        Side *side = count > 1 ? &side_of(stream, count) : nullptr;
        if (side) record(side->begun, stream);
        for (size_t i = 0; i < count; ++i) {
            const Transfer &t = transfers[i];
            Stream on = side ? side->streams[i] : stream;
            if (side) follow(on, side->begun);
            check(f_.copy(t.dst, t.src, t.nbytes, t.host ? kDefault : copy_kind_, on), "hipMemcpyAsync(%zu bytes)", t.nbytes);
            if (!side) continue;
            record(side->done[i], on);
            follow(stream, side->done[i]);
        }
    }

    void *load_code(const std::string &code) override {
        void *module = nullptr;
        check(f_.module_load(&module, code.data()), "hipModuleLoadData(%zu bytes)", code.size());
        return module;
    }
    void *function(void *module, const char *name) override {
        void *function = nullptr;
        check(f_.module_function(&function, module, name), "hipModuleGetFunction(%s)", name);
        return function;
    }
    void launch(void *function, Stream stream, unsigned blocks, unsigned threads, void *argument) override {
        void *arguments[] = {argument};
        check(f_.launch(function, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, nullptr), "hipModuleLaunchKernel()");
    }

  private:
    // Streams beside a lane's, for the copies of a batch.
    struct Side {
        Event begun = nullptr;
        std::vector<Stream> streams;
        std::vector<Event> done;
    };
    // Values of flags on their way: written by the CPU, brought to the GPU by one copy, from there to the flag by another
    // (from host to host there is no copy of an engine's). In two halves, each used again when its event has passed.
    struct Flags {
        uint32_t *host = nullptr, *device = nullptr;
        Event passed[2] = {};
        bool used[2] = {};
        size_t next = 0;
    };

    Side &side_of(Stream stream, size_t count) {
        Side &side = sides_[stream];
        if (!side.begun) side.begun = make_event();
        while (side.streams.size() < count) {
            side.streams.push_back(make_stream(true));
            side.done.push_back(make_event());
        }
        return side;
    }

    void raise_by_copy(Stream stream, const WordOp &op) {
        std::lock_guard<std::mutex> lock(mutex_);
        Flags &flags = flags_[stream];
        if (!flags.host) {
            void *p = nullptr;
            check(f_.host_allocate(&p, 2 * kFlags * sizeof(uint32_t), 0), "hipHostMalloc()");
            flags.host = static_cast<uint32_t *>(p);
            flags.device = reinterpret_cast<uint32_t *>(allocate(2 * kFlags * sizeof(uint32_t)));
            for (Event &event : flags.passed) event = make_event();
        }
        size_t at = flags.next, half = at / kFlags;
        if (at % kFlags == 0 && flags.used[half])
            for (int64_t until = now_ns() + kStuckNs; !passed(flags.passed[half]); std::this_thread::yield())
                if (now_ns() > until)
                    throw Error(Kind::Device, "flags that were put on a stream were not raised within 60 s: the GPU hangs");
        flags.host[at] = op.value;
        check(f_.copy(flags.device + at, flags.host + at, sizeof(uint32_t), kHostToDevice, stream), "hipMemcpyAsync(a flag)");
        check(f_.copy(op.word, flags.device + at, sizeof(uint32_t), kDeviceToHost, stream), "hipMemcpyAsync(a flag)");
        flags.next = (at + 1) % (2 * kFlags);
        if (flags.next % kFlags == 0) {
            record(flags.passed[half], stream);
            flags.used[half] = true;
        }
    }

    template <class... Arguments>
    void check(Result result, const char *pattern, Arguments... arguments) const {
        if (result)
            throw Error(Kind::Device,
                        driver_error(f_.error_name(result), f_.error_string(result), result, pattern, arguments...));
    }

    Library library_;
    Functions f_{};
    int copy_kind_ = kNoCu;
    bool flags_by_copy_ = true;
    std::mutex mutex_;
    std::map<Stream, Side> sides_;
    std::map<Stream, Flags> flags_;
};

}  // namespace

std::shared_ptr<Runtime> hip_runtime() { return std::make_shared<Hip>(); }

}  // namespace hdma
