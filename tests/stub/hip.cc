// hip: the names of libamdhip64.so (HIP 7) over driver.h, as many as hdma and its tests need.
//
// Protocol: types by their binary layout, no header of ROCm's. The runtime starts with the first call; a thread's device
// is 0 until it chooses another. Refuses what HIP refuses: handles opened with other flags than 1, or in the process
// that made them. Registered host memory has another address for the device. GPU_MAX_HW_QUEUES (default 4) stands in for
// CUDA's connections: a waiting stream holds a queue.
//
// Threading, Ordering: see driver.h.
#include <cstdio>
#include <cstring>

#include "driver.h"

using namespace stub;

using hipStream_t = void *;
using hipEvent_t = void *;
using hipModule_t = void *;
using hipFunction_t = void *;
using hipDevice_t = int;

#define NEEDS_DEVICE                                                \
    if (int error_ = initialize(true)) return error_;               \
    if (int error_ = enter(__func__, Needs::Device)) return error_

#define CHECK(condition, error) \
    if (!(condition)) return error

static bool is_device(int device) { return device >= 0 && device < device_count(); }

static uintptr_t number(const void *address) { return reinterpret_cast<uintptr_t>(address); }

// Turns a number that `call` gives into the pointer that HIP has in its place.
template <class Call>
static int pointer_from(void **pointer, Call call) {
    CHECK(pointer, kInvalidValue);
    uintptr_t at = 0;
    int error = call(&at);
    if (!error) *pointer = reinterpret_cast<void *>(at);
    return error;
}

STUB_API int hipInit(unsigned flags) {
    CHECK(flags == 0, kInvalidValue);
    NEEDS_DEVICE;
    return kOk;
}

STUB_API int hipDriverGetVersion(int *version) {
    CHECK(version, kInvalidValue);
    *version = 70000000;
    return kOk;
}

STUB_API int hipRuntimeGetVersion(int *version) {
    CHECK(version, kInvalidValue);
    *version = 70000000;
    return kOk;
}

STUB_API const char *hipGetErrorString(int error) {
    const char *text = error_text(error);
    return text ? text : "unknown error";
}

STUB_API const char *hipGetErrorName(int error) {
    switch (error) {
        case kOk: return "hipSuccess";
        case kInvalidValue: return "hipErrorInvalidValue";
        case kOutOfMemory: return "hipErrorOutOfMemory";
        case kNotInitialized: return "hipErrorNotInitialized";
        case kBadDirection: return "hipErrorInvalidMemcpyDirection";
        case kNoDevice: return "hipErrorNoDevice";
        case kInvalidDevice: return "hipErrorInvalidDevice";
        case kInvalidContext: return "hipErrorInvalidContext";
        case kNoPeerAccess: return "hipErrorPeerAccessUnsupported";
        case kInvalidHandle: return "hipErrorInvalidHandle";
        case kNotFound: return "hipErrorNotFound";
        case kNotReady: return "hipErrorNotReady";
        case kIllegalAddress: return "hipErrorIllegalAddress";
        case kPeerAccessTwice: return "hipErrorPeerAccessAlreadyEnabled";
        case kContextIsDestroyed: return "hipErrorContextIsDestroyed";
        case kRegisteredTwice: return "hipErrorHostMemoryAlreadyRegistered";
        case kNotRegistered: return "hipErrorHostMemoryNotRegistered";
        case kNotSupported: return "hipErrorNotSupported";
        case kCaptureUnsupported: return "hipErrorStreamCaptureUnsupported";
        default: return "hipErrorUnknown";
    }
}

// Devices.

STUB_API int hipGetDeviceCount(int *count) {
    CHECK(count, kInvalidValue);
    *count = 0;
    NEEDS_DEVICE;
    *count = device_count();
    return kOk;
}

STUB_API int hipSetDevice(int device) {
    NEEDS_DEVICE;
    return set_device(device);
}

STUB_API int hipGetDevice(int *device) {
    NEEDS_DEVICE;
    CHECK(device, kInvalidValue);
    *device = current_device();
    return kOk;
}

STUB_API int hipDeviceGetName(char *name, int length, hipDevice_t device) {
    NEEDS_DEVICE;
    CHECK(is_device(device), kInvalidDevice);
    snprintf(name, length, "stub GPU");
    return kOk;
}

STUB_API int hipDeviceGetPCIBusId(char *id, int length, int device) {
    NEEDS_DEVICE;
    CHECK(id && length > 12, kInvalidValue);
    CHECK(is_device(device), kInvalidDevice);
    snprintf(id, length, "%s", pci_id(device).c_str());
    return kOk;
}

STUB_API int hipDeviceGetByPCIBusId(int *device, const char *id) {
    NEEDS_DEVICE;
    CHECK(device && id, kInvalidValue);
    int found = device_of_pci_id(id);
    CHECK(found >= 0, kInvalidDevice);
    *device = found;
    return kOk;
}

STUB_API int hipDeviceGetAttribute(int *value, int attribute, int device) {
    NEEDS_DEVICE;
    CHECK(value, kInvalidValue);
    CHECK(is_device(device), kInvalidDevice);
    int bus = 0;
    sscanf(pci_id(device).c_str(), "0000:%x", &bus);
    switch (attribute) {
        case 23: *value = 9; break;      // compute capability: gfx950
        case 61: *value = 5; break;
        case 56: *value = 1024; break;   // threads of a block
        case 63: *value = 256; break;    // multiprocessors
        case 67: *value = bus; break;    // PCI bus
        case 87: *value = 64; break;     // threads of a warp
        case 3:                          // can map host memory
        case 85: *value = 1; break;      // unified addresses
        default: *value = 0;
    }
    return kOk;
}

STUB_API int hipPointerGetAttribute(void *value, int attribute, void *address) {
    NEEDS_DEVICE;
    int type, device;
    if (int error = pointer_attributes(reinterpret_cast<uint64_t>(address), &type, &device)) return error;
    CHECK(attribute == 9, kInvalidValue);
    *static_cast<int *>(value) = device;
    return kOk;
}

STUB_API int hipDeviceCanAccessPeer(int *can, int device, int peer) {
    NEEDS_DEVICE;
    CHECK(can, kInvalidValue);
    CHECK(is_device(device) && is_device(peer), kInvalidDevice);
    *can = can_access_peer(device, peer);
    return kOk;
}

STUB_API int hipDeviceEnablePeerAccess(int peer, unsigned flags) {
    NEEDS_DEVICE;
    CHECK(flags == 0, kInvalidValue);
    CHECK(is_device(peer) && peer != current_device(), kInvalidDevice);
    return enable_peer(peer);
}

STUB_API int hipDeviceGetStreamPriorityRange(int *least, int *greatest) {
    NEEDS_DEVICE;
    if (least) *least = 1;
    if (greatest) *greatest = -1;
    return kOk;
}

STUB_API int hipDeviceSynchronize() {
    NEEDS_DEVICE;
    return synchronize_device(current_device());
}

// Memory.

STUB_API int hipMalloc(void **address, size_t nbytes) {
    NEEDS_DEVICE;
    return pointer_from(address, [&](uintptr_t *at) { return allocate(at, nbytes); });
}

STUB_API int hipExtMallocWithFlags(void **address, size_t nbytes, unsigned flags) {
    NEEDS_DEVICE;
    enum { kDefault, kFineGrained, kSignal, kUncached };
    CHECK(flags <= kUncached && (flags != kSignal || nbytes == 8), kInvalidValue);
    return pointer_from(address, [&](uintptr_t *at) { return allocate(at, nbytes); });
}

STUB_API int hipFree(void *address) {
    NEEDS_DEVICE;
    return deallocate(number(address));
}

STUB_API int hipMemGetInfo(size_t *free_nbytes, size_t *total_nbytes) {
    NEEDS_DEVICE;
    return memory_info(free_nbytes, total_nbytes);
}

STUB_API int hipMemGetAddressRange(void **base, size_t *nbytes, void *address) {
    NEEDS_DEVICE;
    return pointer_from(base, [&](uintptr_t *at) { return address_range(number(address), at, nbytes); });
}

STUB_API int hipIpcGetMemHandle(IpcHandle *handle, void *address) {
    NEEDS_DEVICE;
    return export_memory(handle, number(address));
}

STUB_API int hipIpcOpenMemHandle(void **address, IpcHandle handle, unsigned flags) {
    NEEDS_DEVICE;
    return pointer_from(address, [&](uintptr_t *at) { return import_memory(at, handle, flags); });
}

STUB_API int hipIpcCloseMemHandle(void *address) {
    NEEDS_DEVICE;
    return close_memory(number(address));
}

STUB_API int hipHostRegister(void *at, size_t nbytes, unsigned) {
    NEEDS_DEVICE;
    return register_host(at, nbytes);
}

STUB_API int hipHostUnregister(void *at) {
    NEEDS_DEVICE;
    return unregister_host(at);
}

STUB_API int hipHostGetDevicePointer(void **address, void *at, unsigned flags) {
    NEEDS_DEVICE;
    CHECK(flags == 0, kInvalidValue);
    return pointer_from(address, [&](uintptr_t *found) { return host_device_pointer(at, found); });
}

STUB_API int hipHostMalloc(void **at, size_t nbytes, unsigned) {
    NEEDS_DEVICE;
    CHECK(at && nbytes, kInvalidValue);
    return allocate_host(at, nbytes);
}

STUB_API int hipHostFree(void *at) {
    NEEDS_DEVICE;
    return free_host(at);
}

// hipPointerAttribute_t of HIP 6 and later.
struct PointerAttributes {
    int type, device;
    void *device_pointer, *host_pointer;
    int is_managed;
    unsigned allocation_flags;
};

STUB_API int hipPointerGetAttributes(PointerAttributes *attributes, const void *address) {
    NEEDS_DEVICE;
    int type, device;
    if (int error = pointer_attributes(number(address), &type, &device)) return error;
    void *at = const_cast<void *>(address);
    *attributes = {type, device, at, type == 1 ? at : nullptr, 0, 0};
    return kOk;
}

// Copies. Kind 1024 (DeviceToDeviceNoCU): by an engine, not by a kernel.

static bool is_kind(int kind) { return (kind >= 0 && kind <= 4) || kind == 1024; }

STUB_API int hipMemcpyAsync(void *dst, const void *src, size_t nbytes, int kind, hipStream_t stream) {
    NEEDS_DEVICE;
    CHECK(is_kind(kind), kBadDirection);
    return copy(__func__, number(dst), number(src), nbytes, stream, " hip_kind=" + std::to_string(kind));
}

STUB_API int hipMemcpy(void *dst, const void *src, size_t nbytes, int kind) {
    NEEDS_DEVICE;
    CHECK(is_kind(kind), kBadDirection);
    std::string detail = " hip_kind=" + std::to_string(kind);
    if (int error = copy(__func__, number(dst), number(src), nbytes, nullptr, detail)) return error;
    return synchronize_stream(nullptr);
}

STUB_API int hipMemsetAsync(void *dst, int value, size_t nbytes, hipStream_t stream) {
    NEEDS_DEVICE;
    return fill(__func__, number(dst), static_cast<unsigned char>(value), nbytes, stream);
}

// Streams.

STUB_API int hipStreamCreateWithPriority(hipStream_t *stream, unsigned flags, int) {
    NEEDS_DEVICE;
    CHECK(stream && flags <= 1, kInvalidValue);
    return create_stream(stream);
}

STUB_API int hipStreamDestroy(hipStream_t stream) {
    NEEDS_DEVICE;
    return destroy_stream(stream);
}

STUB_API int hipStreamQuery(hipStream_t stream) {
    NEEDS_DEVICE;
    return query_stream(stream);
}

STUB_API int hipStreamSynchronize(hipStream_t stream) {
    NEEDS_DEVICE;
    return synchronize_stream(stream);
}

STUB_API int hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned) {
    NEEDS_DEVICE;
    return wait_event(stream, event);
}

STUB_API int hipStreamIsCapturing(hipStream_t stream, int *status) {
    NEEDS_DEVICE;
    CHECK(status, kInvalidValue);
    return is_capturing(stream, status);
}

STUB_API int hipStreamWriteValue32(hipStream_t stream, void *address, uint32_t value, unsigned) {
    NEEDS_DEVICE;
    return write_value(__func__, stream, number(address), value);
}

STUB_API int hipStreamWaitValue32(hipStream_t stream, void *address, uint32_t value, unsigned flags, uint32_t mask) {
    NEEDS_DEVICE;
    static const Compare compares[] = {Compare::GreaterOrEqual, Compare::Equal, Compare::And, Compare::Nor};
    CHECK(flags <= 3, kInvalidValue);
    return wait_value(__func__, stream, number(address), value, compares[flags], mask);
}

// Events.

STUB_API int hipEventCreateWithFlags(hipEvent_t *event, unsigned) {
    NEEDS_DEVICE;
    CHECK(event, kInvalidValue);
    return create_event(event);
}

STUB_API int hipEventDestroy(hipEvent_t event) {
    NEEDS_DEVICE;
    return destroy_event(event);
}

STUB_API int hipEventRecord(hipEvent_t event, hipStream_t stream) {
    NEEDS_DEVICE;
    return record_event(event, stream);
}

STUB_API int hipEventQuery(hipEvent_t event) {
    NEEDS_DEVICE;
    return query_event(event);
}

STUB_API int hipEventSynchronize(hipEvent_t event) {
    NEEDS_DEVICE;
    return synchronize_event(event);
}

// Kernels.

STUB_API int hipModuleLoadData(hipModule_t *module, const void *image) {
    NEEDS_DEVICE;
    return load_module(module, image);
}

STUB_API int hipModuleUnload(hipModule_t module) {
    NEEDS_DEVICE;
    return unload_module(module);
}

STUB_API int hipModuleGetFunction(hipFunction_t *function, hipModule_t module, const char *name) {
    NEEDS_DEVICE;
    return get_function(function, module, name);
}

STUB_API int hipModuleLaunchKernel(hipFunction_t function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned, hipStream_t stream,
                                   void **parameters, void **extra) {
    NEEDS_DEVICE;
    CHECK(!extra, kNotSupported);
    const unsigned grid[3] = {grid_x, grid_y, grid_z}, block[3] = {block_x, block_y, block_z};
    return launch(__func__, function, grid, block, stream, parameters);
}
