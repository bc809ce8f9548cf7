// device/cuda: the driver of NVIDIA GPUs (libcuda), as a Runtime.
//
// Protocol: driver-level calls in the primary context of the GPU, which the CUDA runtime (and so torch) uses too.
// The declarations below are those of the driver's interface: CUDA Driver API reference, versions 12 and 13.
//
// Threading: see runtime.h.
//
// Ordering: see runtime.h; words are written with CU_STREAM_WRITE_VALUE_DEFAULT, which has the barrier.
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "runtime.h"

namespace hdma {

namespace {

using Result = int;
using Pointer = unsigned long long;

constexpr Result kNotReady = 600;
constexpr int kCapabilityMajor = 75, kCapabilityMinor = 76, kDeviceOrdinal = 9;
// CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING and its value ALL_DEVICES: any GPU sees in order what a NIC writes.
constexpr int kRdmaWritesOrdering = 118, kOrderedForAllDevices = 200;
constexpr int kDmaBuf = 1;  // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
constexpr unsigned kNonBlocking = 1, kDisableTiming = 2, kLazyPeerAccess = 1, kPortableMapped = 3;
constexpr unsigned kGreaterOrEqual = 0;
// Below this many hardware queues a stream that waits may stop all others (measured on an H200: one of 1, 8 of 8).
constexpr int kMinConnections = 4, kDefaultConnections = 8;

union MemOp {
    struct {
        int operation;
        Pointer address;
        unsigned long long value;
        unsigned flags;
        Pointer alias;
    } word;
    unsigned long long pad[6];
};
static_assert(sizeof(MemOp) == 48, "CUstreamBatchMemOpParams");
constexpr int kWaitValue32 = 1, kWriteValue32 = 2;
constexpr size_t kMaxMemOps = 255;

struct Location {
    int type, id;
};
struct CopyAttributes {
    int source_order;
    Location source, destination;
    unsigned flags;
};
constexpr int kStreamOrder = 1;
constexpr unsigned kPreferOverlap = 1;

struct Functions {
    Result (*init)(unsigned);
    Result (*error_name)(Result, const char **), (*error_string)(Result, const char **);
    Result (*device_count)(int *), (*device_get)(int *, int), (*device_name)(char *, int, int);
    Result (*device_attribute)(int *, int, int), (*device_pci)(char *, int, int);
    Result (*can_access)(int *, int, int), (*pointer_attribute)(void *, int, Pointer);
    Result (*retain)(void **, int), (*push)(void *), (*pop)(void **);
    Result (*priorities)(int *, int *);
    Result (*allocate)(Pointer *, size_t), (*free)(Pointer), (*memory)(size_t *, size_t *);
    Result (*get_handle)(IpcHandle *, Pointer), (*open_handle)(Pointer *, IpcHandle, unsigned), (*close_handle)(Pointer);
    Result (*range_handle)(void *, Pointer, size_t, int, unsigned long long);
    Result (*host_register)(void *, size_t, unsigned), (*host_unregister)(void *);
    Result (*host_pointer)(Pointer *, void *, unsigned);
    Result (*stream_create)(Stream *, unsigned, int), (*stream_capturing)(Stream, int *);
    Result (*event_create)(Event *, unsigned), (*event_record)(Event, Stream), (*event_query)(Event);
    Result (*stream_wait_event)(Stream, Event, unsigned);
    Result (*write32)(Stream, Pointer, uint32_t, unsigned), (*wait32)(Stream, Pointer, uint32_t, unsigned);
    Result (*batch_words)(Stream, unsigned, MemOp *, unsigned);
    Result (*copy)(Pointer, Pointer, size_t, Stream);
    Result (*batch_copy)(Pointer *, Pointer *, size_t *, size_t, CopyAttributes *, size_t *, size_t, Stream);
    Result (*module_load)(void **, const void *), (*module_function)(void **, void *, const char *);
    Result (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void **, void **);
};

class Cuda final : public Runtime {
  public:
    Cuda()
        : library_({"libcuda.so.1"}, "no CUDA driver",
                   "Install NVIDIA's driver, give the container access to the GPU (--gpus all), or pass tensors in host memory") {
        auto find = [&](auto &function, const char *name) { library_.find(function, name); };
        find(f_.init, "cuInit");
        find(f_.error_name, "cuGetErrorName");
        find(f_.error_string, "cuGetErrorString");
        find(f_.device_count, "cuDeviceGetCount");
        find(f_.device_get, "cuDeviceGet");
        find(f_.device_name, "cuDeviceGetName");
        find(f_.device_attribute, "cuDeviceGetAttribute");
        find(f_.device_pci, "cuDeviceGetPCIBusId");
        find(f_.can_access, "cuDeviceCanAccessPeer");
        find(f_.pointer_attribute, "cuPointerGetAttribute");
        find(f_.retain, "cuDevicePrimaryCtxRetain");
        find(f_.push, "cuCtxPushCurrent_v2");
        find(f_.pop, "cuCtxPopCurrent_v2");
        find(f_.priorities, "cuCtxGetStreamPriorityRange");
        find(f_.allocate, "cuMemAlloc_v2");
        find(f_.free, "cuMemFree_v2");
        find(f_.memory, "cuMemGetInfo_v2");
        find(f_.get_handle, "cuIpcGetMemHandle");
        find(f_.open_handle, "cuIpcOpenMemHandle_v2");
        find(f_.close_handle, "cuIpcCloseMemHandle");
        library_.find(f_.range_handle, "cuMemGetHandleForAddressRange", true);  // from CUDA 11.7 on
        find(f_.host_register, "cuMemHostRegister_v2");
        find(f_.host_unregister, "cuMemHostUnregister");
        find(f_.host_pointer, "cuMemHostGetDevicePointer_v2");
        find(f_.stream_create, "cuStreamCreateWithPriority");
        find(f_.stream_capturing, "cuStreamIsCapturing");
        find(f_.event_create, "cuEventCreate");
        find(f_.event_record, "cuEventRecord");
        find(f_.event_query, "cuEventQuery");
        find(f_.stream_wait_event, "cuStreamWaitEvent");
        find(f_.write32, "cuStreamWriteValue32_v2");
        find(f_.wait32, "cuStreamWaitValue32_v2");
        find(f_.batch_words, "cuStreamBatchMemOp_v2");
        find(f_.copy, "cuMemcpyAsync");
        library_.find(f_.batch_copy, "cuMemcpyBatchAsync_v2", true);  // from CUDA 13 on
        find(f_.module_load, "cuModuleLoadData");
        find(f_.module_function, "cuModuleGetFunction");
        find(f_.launch, "cuLaunchKernel");
        check(f_.init(0), "cuInit(0)");
    }

    const char *name() const override { return "cuda"; }

    int count() override {
        int n = 0;
        check(f_.device_count(&n), "cuDeviceGetCount()");
        return n;
    }

    GpuInfo info(int ordinal) override {
        int device = device_of(ordinal), major = 0, minor = 0;
        char name[128] = "", pci[32] = "";
        check(f_.device_name(name, sizeof name, device), "cuDeviceGetName()");
        check(f_.device_pci(pci, sizeof pci, device), "cuDeviceGetPCIBusId()");
        check(f_.device_attribute(&major, kCapabilityMajor, device), "cuDeviceGetAttribute()");
        check(f_.device_attribute(&minor, kCapabilityMinor, device), "cuDeviceGetAttribute()");
        return {name, pci, format("sm_%d%d", major, minor)};
    }

    bool reaches(int ordinal, int other) override {
        int can = 0;
        check(f_.can_access(&can, device_of(ordinal), device_of(other)), "cuDeviceCanAccessPeer(%d, %d)", ordinal, other);
        return can != 0;
    }

    int owner(const void *memory) override {
        int ordinal = -1;
        return f_.pointer_attribute(&ordinal, kDeviceOrdinal, pointer(memory)) == 0 ? ordinal : -1;
    }

    bool holds(std::string &why_not) const override {
        const char *set = getenv("CUDA_DEVICE_MAX_CONNECTIONS"), *blocking = getenv("CUDA_LAUNCH_BLOCKING");
        int connections = set && atoi(set) > 0 ? atoi(set) : kDefaultConnections;
        if (blocking && atoi(blocking)) why_not = "CUDA_LAUNCH_BLOCKING is set";
        if (connections < kMinConnections) why_not = format("CUDA_DEVICE_MAX_CONNECTIONS=%d", connections);
        return why_not.empty();
    }

    void *begin(int ordinal) override {
        check(f_.push(context_of(ordinal)), "cuCtxPushCurrent()");
        return nullptr;
    }

    void end(void *) noexcept override {
        void *context;
        f_.pop(&context);
    }

    char *allocate(size_t nbytes) override {
        Pointer p = 0;
        check(f_.allocate(&p, nbytes), "cuMemAlloc(%zu bytes)", nbytes);
        return reinterpret_cast<char *>(p);
    }
    void free(char *memory) noexcept override { f_.free(pointer(memory)); }
    size_t memory_left() override {
        size_t left = 0, all = 0;
        check(f_.memory(&left, &all), "cuMemGetInfo()");
        return left;
    }

    IpcHandle handle(char *memory) override {
        IpcHandle handle;
        check(f_.get_handle(&handle, pointer(memory)), "cuIpcGetMemHandle()");
        return handle;
    }
    char *open(const IpcHandle &handle) override {
        Pointer p = 0;
        check(f_.open_handle(&p, handle, kLazyPeerAccess), "cuIpcOpenMemHandle()");
        return reinterpret_cast<char *>(p);
    }
    void close(char *mapped) noexcept override { f_.close_handle(pointer(mapped)); }

    int export_memory(char *memory, size_t nbytes) override {
        int fd = -1;
        if (!f_.range_handle) throw Error(Kind::Device, "the CUDA driver has no cuMemGetHandleForAddressRange: too old");
        check(f_.range_handle(&fd, reinterpret_cast<Pointer>(memory), nbytes, kDmaBuf, 0),
              "cuMemGetHandleForAddressRange(%zu bytes, dma-buf)", nbytes);
        return fd;
    }

    bool flushes(int ordinal) override {
        int ordering = 0;
        check(f_.device_attribute(&ordering, kRdmaWritesOrdering, device_of(ordinal)), "cuDeviceGetAttribute()");
        return ordering < kOrderedForAllDevices;
    }

    char *pin(void *memory, size_t nbytes) override {
        Pointer p = 0;
        check(f_.host_register(memory, nbytes, kPortableMapped), "cuMemHostRegister(%zu bytes)", nbytes);
        check(f_.host_pointer(&p, memory, 0), "cuMemHostGetDevicePointer()");
        return reinterpret_cast<char *>(p);
    }
    void unpin(void *memory) noexcept override { f_.host_unregister(memory); }

    Stream make_stream(bool high_priority) override {
        int least = 0, greatest = 0;
        Stream stream = nullptr;
        check(f_.priorities(&least, &greatest), "cuCtxGetStreamPriorityRange()");
        check(f_.stream_create(&stream, kNonBlocking, high_priority ? greatest : least), "cuStreamCreateWithPriority()");
        return stream;
    }

    bool capturing(Stream stream) override {
        int status = 0;
        check(f_.stream_capturing(stream, &status), "cuStreamIsCapturing()");
        return status != 0;
    }

    Event make_event() override {
        Event event = nullptr;
        check(f_.event_create(&event, kDisableTiming), "cuEventCreate()");
        return event;
    }
    void record(Event event, Stream stream) override { check(f_.event_record(event, stream), "cuEventRecord()"); }
    bool passed(Event event) override {
        Result result = f_.event_query(event);
        if (result == kNotReady) return false;
        check(result, "cuEventQuery()");
        return true;
    }
    void follow(Stream stream, Event event) override {
        check(f_.stream_wait_event(stream, event, 0), "cuStreamWaitEvent()");
    }

    void words(Stream stream, const WordOp *ops, size_t count) override {
        if (count == 1) {
            auto *call = ops->waits ? f_.wait32 : f_.write32;
            check(call(stream, pointer(ops->word), ops->value, ops->waits ? kGreaterOrEqual : 0), "cuStream%sValue32()",
                  ops->waits ? "Wait" : "Write");
            return;
        }
        MemOp list[kMaxMemOps];
        while (count) {
            size_t n = count < kMaxMemOps ? count : kMaxMemOps;
            std::memset(list, 0, n * sizeof *list);
            for (size_t i = 0; i < n; ++i) {
                list[i].word.operation = ops[i].waits ? kWaitValue32 : kWriteValue32;
                list[i].word.address = pointer(ops[i].word);
                list[i].word.value = ops[i].value;
                list[i].word.flags = ops[i].waits ? kGreaterOrEqual : 0;
            }
            check(f_.batch_words(stream, static_cast<unsigned>(n), list, 0), "cuStreamBatchMemOp(%zu)", n);
            ops += n, count -= n;
        }
    }

    void copy(Stream stream, const Transfer *transfers, size_t count) override {
        if (count > 1 && f_.batch_copy) {
            std::vector<Pointer> dsts, srcs;
            std::vector<size_t> sizes;
            for (size_t i = 0; i < count; ++i) {
                dsts.push_back(pointer(transfers[i].dst));
                srcs.push_back(pointer(transfers[i].src));
                sizes.push_back(transfers[i].nbytes);
            }
            CopyAttributes attributes{kStreamOrder, {0, 0}, {0, 0}, kPreferOverlap};
            size_t first = 0;
            check(f_.batch_copy(dsts.data(), srcs.data(), sizes.data(), count, &attributes, &first, 1, stream),
                  "cuMemcpyBatchAsync(%zu copies)", count);
            return;
        }
        for (size_t i = 0; i < count; ++i)
            check(f_.copy(pointer(transfers[i].dst), pointer(transfers[i].src), transfers[i].nbytes, stream),
                  "cuMemcpyAsync(%zu bytes)", transfers[i].nbytes);
    }

    void *load_code(const std::string &code) override {
        void *module = nullptr;
        check(f_.module_load(&module, code.data()), "cuModuleLoadData(%zu bytes)", code.size());
        return module;
    }
    void *function(void *module, const char *name) override {
        void *function = nullptr;
        check(f_.module_function(&function, module, name), "cuModuleGetFunction(%s)", name);
        return function;
    }
    void launch(void *function, Stream stream, unsigned blocks, unsigned threads, void *argument) override {
        void *arguments[] = {argument};
        check(f_.launch(function, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, nullptr), "cuLaunchKernel()");
    }

  private:
    static Pointer pointer(const void *p) { return reinterpret_cast<Pointer>(p); }

    template <class... Arguments>
    void check(Result result, const char *pattern, Arguments... arguments) const {
        if (result == 0) return;
        const char *name = nullptr, *text = nullptr;
        f_.error_name(result, &name);
        f_.error_string(result, &text);
        throw Error(Kind::Device, driver_error(name, text, result, pattern, arguments...));
    }

    int device_of(int ordinal) {
        int device = 0, n = count();
        if (ordinal < 0 || ordinal >= n)
            throw Error(Kind::Device, format("there is no GPU %d: this process sees %d (CUDA_VISIBLE_DEVICES)", ordinal, n));
        check(f_.device_get(&device, ordinal), "cuDeviceGet(%d)", ordinal);
        return device;
    }

    void *context_of(int ordinal) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (static_cast<int>(contexts_.size()) <= ordinal) contexts_.resize(ordinal + 1);
        void *&context = contexts_[ordinal];
        if (!context) check(f_.retain(&context, device_of(ordinal)), "cuDevicePrimaryCtxRetain(%d)", ordinal);
        return context;
    }

    Library library_;
    Functions f_{};
    std::mutex mutex_;
    std::vector<void *> contexts_;
};

}  // namespace

std::shared_ptr<Runtime> cuda_runtime() { return std::make_shared<Cuda>(); }

}  // namespace hdma
