// cuda: the names of libcuda.so.1 (CUDA 13) over driver.h, as many as hdma and its tests need.
//
// Protocol: types by their binary layout, no header of CUDA's. A thread needs a current context, but to ask about
// devices; the error is 201 otherwise.
//
// Threading, Ordering: see driver.h.
#include <cstdio>
#include <cstring>
#include <vector>

#include "driver.h"

using namespace stub;

using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = void *;
using CUstream = void *;
using CUevent = void *;
using CUmodule = void *;
using CUfunction = void *;

union CUstreamBatchMemOpParams {
    struct Value {
        int operation;
        CUdeviceptr address;
        union {
            uint32_t value;
            uint64_t value64;
        };
        unsigned flags;
        CUdeviceptr alias;
    };
    int operation;
    Value value;
    uint64_t pad[6];
};
static_assert(sizeof(CUstreamBatchMemOpParams) == 48 && offsetof(CUstreamBatchMemOpParams::Value, flags) == 24);

struct CUmemLocation {
    int type, id;
};
struct CUmemcpyAttributes {
    int src_access_order;
    CUmemLocation src_hint, dst_hint;
    unsigned flags;
};
static_assert(sizeof(CUmemcpyAttributes) == 24);

// First line of each function.
#define NEEDS(what) \
    if (int error_ = enter(__func__, Needs::what)) return error_

#define CHECK(condition, error) \
    if (!(condition)) return error

static bool is_device(CUdevice device) { return device >= 0 && device < device_count(); }

STUB_API int cuInit(unsigned flags) {
    CHECK(flags == 0, kInvalidValue);
    if (int error = initialize(false)) return error;
    return enter(__func__, Needs::Driver);
}

STUB_API int cuDriverGetVersion(int *version) {
    CHECK(version, kInvalidValue);
    *version = 13000;
    return kOk;
}

STUB_API int cuGetErrorString(int error, const char **text) {
    CHECK(text, kInvalidValue);
    *text = error_text(error);
    return *text ? kOk : kInvalidValue;
}

STUB_API int cuGetErrorName(int error, const char **text) {
    static const struct {
        int error;
        const char *name;
    } names[] = {
        {kOk, "CUDA_SUCCESS"},
        {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
        {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
        {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED"},
        {kNoDevice, "CUDA_ERROR_NO_DEVICE"},
        {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
        {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
        {kNoPeerAccess, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"},
        {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},
        {kNotFound, "CUDA_ERROR_NOT_FOUND"},
        {kNotReady, "CUDA_ERROR_NOT_READY"},
        {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
        {kContextIsDestroyed, "CUDA_ERROR_CONTEXT_IS_DESTROYED"},
        {kRegisteredTwice, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
        {kNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
        {kNotSupported, "CUDA_ERROR_NOT_SUPPORTED"},
        {kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
    };
    CHECK(text, kInvalidValue);
    *text = nullptr;
    for (auto &one : names)
        if (one.error == error) *text = one.name;
    return *text ? kOk : kInvalidValue;
}

// Devices.

STUB_API int cuDeviceGetCount(int *count) {
    NEEDS(Driver);
    CHECK(count, kInvalidValue);
    *count = device_count();
    return kOk;
}

STUB_API int cuDeviceGet(CUdevice *device, int ordinal) {
    NEEDS(Driver);
    CHECK(is_device(ordinal), kInvalidDevice);
    *device = ordinal;
    return kOk;
}

STUB_API int cuDeviceGetName(char *name, int length, CUdevice device) {
    NEEDS(Driver);
    CHECK(is_device(device), kInvalidDevice);
    snprintf(name, length, "stub GPU");
    return kOk;
}

STUB_API int cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    NEEDS(Driver);
    CHECK(value, kInvalidValue);
    CHECK(is_device(device), kInvalidDevice);
    int bus = 0;
    sscanf(pci_id(device).c_str(), "0000:%x", &bus);
    switch (attribute) {
        case 1: *value = 1024; break;   // threads of a block
        case 10: *value = 32; break;    // threads of a warp
        case 16: *value = 132; break;   // multiprocessors
        case 33: *value = bus; break;   // PCI bus
        case 40: *value = 3; break;     // copy engines
        case 75: *value = 9; break;     // compute capability
        case 118: *value = rdma_ordering(); break;
        case 19:                        // can map host memory
        case 41:                        // unified addresses
        case 78:                        // stream priorities
        case 91:                        // host addresses of registered memory are good on the device
        case 92: case 93: case 122:     // stream memory operations
        case 99: *value = 1; break;     // host memory can be registered
        default: *value = 0;
    }
    return kOk;
}

STUB_API int cuDeviceGetPCIBusId(char *id, int length, CUdevice device) {
    NEEDS(Driver);
    CHECK(id && length > 12, kInvalidValue);
    CHECK(is_device(device), kInvalidDevice);
    snprintf(id, length, "%s", pci_id(device).c_str());
    return kOk;
}

STUB_API int cuDeviceGetByPCIBusId(CUdevice *device, const char *id) {
    NEEDS(Driver);
    CHECK(device && id, kInvalidValue);
    int found = device_of_pci_id(id);
    CHECK(found >= 0, kInvalidDevice);
    *device = found;
    return kOk;
}

STUB_API int cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    NEEDS(Driver);
    CHECK(is_device(device) && is_device(peer), kInvalidDevice);
    *can = can_access_peer(device, peer);
    return kOk;
}

// Contexts.

STUB_API int cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    NEEDS(Driver);
    CHECK(context, kInvalidValue);
    CHECK(is_device(device), kInvalidDevice);
    return retain_context(device, context);
}

STUB_API int cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    NEEDS(Driver);
    CHECK(is_device(device), kInvalidDevice);
    return release_context(device);
}

STUB_API int cuCtxPushCurrent_v2(CUcontext context) {
    NEEDS(Driver);
    return push_context(context);
}

STUB_API int cuCtxPopCurrent_v2(CUcontext *context) {
    NEEDS(Driver);
    return pop_context(context);
}

STUB_API int cuCtxSetCurrent(CUcontext context) {
    NEEDS(Driver);
    return set_context(context);
}

STUB_API int cuCtxGetCurrent(CUcontext *context) {
    NEEDS(Driver);
    *context = current_context();
    return kOk;
}

STUB_API int cuCtxGetDevice(CUdevice *device) {
    NEEDS(Device);
    *device = current_device();
    return kOk;
}

STUB_API int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    NEEDS(Device);
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return kOk;
}

STUB_API int cuCtxSynchronize() {
    NEEDS(Device);
    return synchronize_device(current_device());
}

// Memory.

STUB_API int cuMemAlloc_v2(CUdeviceptr *address, size_t nbytes) {
    NEEDS(Device);
    uintptr_t at = 0;
    int error = allocate(&at, nbytes);
    if (!error) *address = at;
    return error;
}

STUB_API int cuMemFree_v2(CUdeviceptr address) {
    NEEDS(Device);
    return deallocate(address);
}

STUB_API int cuMemGetInfo_v2(size_t *free_nbytes, size_t *total_nbytes) {
    NEEDS(Device);
    return memory_info(free_nbytes, total_nbytes);
}

STUB_API int cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *nbytes, CUdeviceptr address) {
    NEEDS(Device);
    uintptr_t at = 0;
    int error = address_range(address, &at, nbytes);
    if (!error && base) *base = at;
    return error;
}

STUB_API int cuIpcGetMemHandle(IpcHandle *handle, CUdeviceptr address) {
    NEEDS(Device);
    return export_memory(handle, address);
}

STUB_API int cuIpcOpenMemHandle_v2(CUdeviceptr *address, IpcHandle handle, unsigned flags) {
    NEEDS(Device);
    uintptr_t at = 0;
    int error = import_memory(&at, handle, flags);
    if (!error) *address = at;
    return error;
}

STUB_API int cuIpcCloseMemHandle(CUdeviceptr address) {
    NEEDS(Device);
    return close_memory(address);
}

STUB_API int cuMemHostRegister_v2(void *at, size_t nbytes, unsigned) {
    NEEDS(Device);
    return register_host(at, nbytes);
}

STUB_API int cuMemHostUnregister(void *at) {
    NEEDS(Device);
    return unregister_host(at);
}

STUB_API int cuMemHostGetDevicePointer_v2(CUdeviceptr *address, void *at, unsigned flags) {
    NEEDS(Device);
    CHECK(address && flags == 0, kInvalidValue);
    uintptr_t found = 0;
    int error = host_device_pointer(at, &found);
    if (!error) *address = found;
    return error;
}

STUB_API int cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address) {
    NEEDS(Device);
    int type, device;
    if (int error = pointer_attributes(address, &type, &device)) return error;
    switch (attribute) {
        case 2: *static_cast<unsigned *>(value) = static_cast<unsigned>(type); return kOk;
        case 9: *static_cast<int *>(value) = device; return kOk;
        default: return kNotSupported;
    }
}

// Copies.

STUB_API int cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t nbytes, CUstream stream) {
    NEEDS(Device);
    return copy(__func__, dst, src, nbytes, stream);
}

static int copy_now(const char *function, uintptr_t dst, uintptr_t src, size_t nbytes) {
    if (int error = copy(function, dst, src, nbytes, nullptr)) return error;
    return synchronize_stream(nullptr);
}

STUB_API int cuMemcpyDtoH_v2(void *dst, CUdeviceptr src, size_t nbytes) {
    NEEDS(Device);
    return copy_now(__func__, reinterpret_cast<uintptr_t>(dst), src, nbytes);
}

STUB_API int cuMemcpyHtoD_v2(CUdeviceptr dst, const void *src, size_t nbytes) {
    NEEDS(Device);
    return copy_now(__func__, dst, reinterpret_cast<uintptr_t>(src), nbytes);
}

STUB_API int cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                                   CUmemcpyAttributes *attributes, size_t *indices, size_t attribute_count,
                                   CUstream stream) {
    NEEDS(Device);
    CHECK(dsts && srcs && sizes && count && attributes && indices, kInvalidValue);
    CHECK(attribute_count && attribute_count <= count && indices[0] == 0, kInvalidValue);
    CHECK(reinterpret_cast<uintptr_t>(stream) > 1, kInvalidValue);  // not the legacy stream
    for (size_t i = 0; i < attribute_count; ++i) {
        CHECK(attributes[i].src_access_order >= 1 && attributes[i].src_access_order <= 3, kInvalidValue);
        CHECK(i == 0 || (indices[i] > indices[i - 1] && indices[i] < count), kInvalidValue);
    }
    std::vector<uintptr_t> to(dsts, dsts + count), from(srcs, srcs + count);
    return copy_batch(__func__, to.data(), from.data(), sizes, count, stream);
}

STUB_API int cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t nbytes, CUstream stream) {
    NEEDS(Device);
    return fill(__func__, dst, value, nbytes, stream);
}

// Streams.

STUB_API int cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int) {
    NEEDS(Device);
    CHECK(stream && flags <= 1, kInvalidValue);
    return create_stream(stream);
}

STUB_API int cuStreamCreate(CUstream *stream, unsigned flags) {
    NEEDS(Device);
    CHECK(stream && flags <= 1, kInvalidValue);
    return create_stream(stream);
}

STUB_API int cuStreamDestroy_v2(CUstream stream) {
    NEEDS(Device);
    return destroy_stream(stream);
}

STUB_API int cuStreamQuery(CUstream stream) {
    NEEDS(Device);
    return query_stream(stream);
}

STUB_API int cuStreamSynchronize(CUstream stream) {
    NEEDS(Device);
    return synchronize_stream(stream);
}

STUB_API int cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
    NEEDS(Device);
    return wait_event(stream, event);
}

STUB_API int cuStreamIsCapturing(CUstream stream, int *status) {
    NEEDS(Device);
    CHECK(status, kInvalidValue);
    return is_capturing(stream, status);
}

STUB_API int cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags) {
    NEEDS(Device);
    CHECK(flags <= 1, kInvalidValue);
    return write_value(__func__, stream, address, value);
}

static const Compare kCompares[] = {Compare::GreaterOrEqualCyclic, Compare::Equal, Compare::And, Compare::Nor};

STUB_API int cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags) {
    NEEDS(Device);
    flags &= ~(1u << 30);  // flush
    CHECK(flags <= 3, kInvalidValue);
    return wait_value(__func__, stream, address, value, kCompares[flags]);
}

STUB_API int cuStreamBatchMemOp_v2(CUstream stream, unsigned count, CUstreamBatchMemOpParams *operations,
                                   unsigned flags) {
    NEEDS(Device);
    enum { kWait = 1, kWrite = 2 };
    CHECK(count && count <= 256 && operations && flags == 0, kInvalidValue);
    for (unsigned i = 0; i < count; ++i) {  // All or none.
        auto &one = operations[i].value;
        unsigned last = one.operation == kWait ? 3 : 1;
        CHECK(one.operation == kWait || one.operation == kWrite, kNotSupported);
        CHECK((one.flags & ~(1u << 30)) <= last && valid_flag(one.address), kInvalidValue);
    }
    for (unsigned i = 0; i < count; ++i) {
        auto &one = operations[i].value;
        int error = one.operation == kWait ? wait_value(__func__, stream, one.address, one.value,
                                                        kCompares[one.flags & ~(1u << 30)])
                                           : write_value(__func__, stream, one.address, one.value);
        if (error) return error;
    }
    return kOk;
}

// Events.

STUB_API int cuEventCreate(CUevent *event, unsigned) {
    NEEDS(Device);
    CHECK(event, kInvalidValue);
    return create_event(event);
}

STUB_API int cuEventDestroy_v2(CUevent event) {
    NEEDS(Device);
    return destroy_event(event);
}

STUB_API int cuEventRecord(CUevent event, CUstream stream) {
    NEEDS(Device);
    return record_event(event, stream);
}

STUB_API int cuEventQuery(CUevent event) {
    NEEDS(Device);
    return query_event(event);
}

STUB_API int cuEventSynchronize(CUevent event) {
    NEEDS(Device);
    return synchronize_event(event);
}

// Kernels.

STUB_API int cuModuleLoadData(CUmodule *module, const void *image) {
    NEEDS(Device);
    return load_module(module, image);
}

STUB_API int cuModuleUnload(CUmodule module) {
    NEEDS(Device);
    return unload_module(module);
}

STUB_API int cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    NEEDS(Device);
    return get_function(function, module, name);
}

STUB_API int cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned, CUstream stream, void **parameters,
                            void **extra) {
    NEEDS(Device);
    CHECK(!extra, kNotSupported);
    const unsigned grid[3] = {grid_x, grid_y, grid_z}, block[3] = {block_x, block_y, block_z};
    return launch(__func__, function, grid, block, stream, parameters);
}

STUB_API int cuMemGetHandleForAddressRange(void *handle, CUdeviceptr address, size_t nbytes, int type, unsigned long long flags) {
    NEEDS(Device);
    CHECK(type == 1 && flags == 0, kInvalidValue);
    return export_file(static_cast<int *>(handle), address, nbytes);
}

// NVRTC 13.5 asks the driver for tables of its own, which has none.
STUB_API int cuGetExportTable(const void **, const void *) { return kNotFound; }
