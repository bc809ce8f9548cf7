// driver: a GPU driver that is none: memory files as device memory, one thread a stream. cuda.cc and hip.cc put the
// names of libcuda.so.1 and libamdhip64.so over it, so that hdma's GPU path runs in several processes without a GPU.
//
// Protocol: every function returns an error number, which CUDA and HIP share. What is not as on a GPU is marked "stub:".
// A device address cannot be dereferenced by the CPU: its bytes lie elsewhere in this process (Region::memory).
// Environment:
//   STUB_GPUS=2                devices of the machine, before CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES
//   STUB_NO_GPU=1              no device: initialisation returns 100
//   STUB_NO_PEER=1             no device reaches another one
//   STUB_MEMORY_NBYTES=n       memory of a device, for each process
//   STUB_FAIL=name:code[@n],.. the function fails with the code, from its n-th call of this process on (default: 1st)
//   STUB_RDMA_ORDERING=200     any device sees in order what a NIC writes (default 0: none does)
//   STUB_DELAY_US=n            each operation is delayed by 0..n us
//   CUDA_DEVICE_MAX_CONNECTIONS=8, GPU_MAX_HW_QUEUES=4   streams that may wait for values, less one (see Gate)
//   STUB_LOG=prefix            one line a call in <prefix>.<pid>: "what key=value ..."
//
// Threading: any function from any thread; a stream's operations run on its own thread, started with its first one.
// Nothing is ever destroyed at exit, and no thread joined: a process may end while streams are held. A fork()ed child
// may end, but not use the driver.
//
// Ordering: operations of one stream run in order. A write is a release store after all that the stream did before; a
// wait acquires. Nothing else is ordered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#define STUB_API extern "C" __attribute__((visibility("default")))

namespace stub {

enum Error : int {
    kOk = 0,
    kInvalidValue = 1,
    kOutOfMemory = 2,
    kNotInitialized = 3,
    kBadDirection = 21,
    kNoDevice = 100,
    kInvalidDevice = 101,
    kInvalidContext = 201,
    kNoPeerAccess = 217,
    kInvalidHandle = 400,
    kNotFound = 500,
    kNotReady = 600,
    kIllegalAddress = 700,
    kPeerAccessTwice = 704,
    kContextIsDestroyed = 709,
    kRegisteredTwice = 712,
    kNotRegistered = 713,
    kNotSupported = 801,
    kCaptureUnsupported = 900,
};

const char *error_text(int error);  // null if unknown

// Starts the driver once; `hip` is fixed by the first call.
int initialize(bool hip);

// To be called first in every function. What it needs: a started driver; a current device as well.
enum class Needs { Driver, Device };
int enter(const char *function, Needs needs);

// Devices, by ordinal among the visible ones.
int device_count();
int current_device();  // of this thread; -1: none
int physical(int device);
std::string pci_id(int device);
int device_of_pci_id(const char *id);  // -1: none
bool can_access_peer(int device, int peer);
int enable_peer(int peer);  // for the current device; HIP alone asks for it
int synchronize_device(int device);

// CUDA's contexts: the primary one of each device, and each thread's stack of them. 0: none.
using Context = void *;
int retain_context(int device, Context *context);
int release_context(int device);
int push_context(Context context);
int pop_context(Context *context);
int set_context(Context context);
Context current_context();
// HIP has none: a thread has a device, the first one at the start.
int set_device(int device);

// Memory.
enum class Sync { Pending, Done };  // stub: whether a copy from or to ordinary host memory has to be waited for
int allocate(uintptr_t *address, size_t nbytes);
int deallocate(uintptr_t address);  // waits for all streams of the current device
int memory_info(size_t *free_nbytes, size_t *total_nbytes);
int address_range(uintptr_t address, uintptr_t *base, size_t *nbytes);
// Type: 1 host, 2 device; device: an ordinal.
int pointer_attributes(uintptr_t address, int *type, int *device);
int register_host(void *at, size_t nbytes);
int unregister_host(void *at);
int host_device_pointer(void *at, uintptr_t *address);
int allocate_host(void **at, size_t nbytes);
int free_host(void *at);

struct IpcHandle {
    char bytes[64];
};
int export_memory(IpcHandle *handle, uintptr_t address);
// stub: a file in the place of a dma-buf; of the start of an allocation, whole pages.
int export_file(int *fd, uintptr_t address, size_t nbytes);
int rdma_ordering();
int import_memory(uintptr_t *address, const IpcHandle &handle, unsigned flags);
int close_memory(uintptr_t address);  // waits for all streams of the current device

// Streams. Handles 0, 1 and 2 are the null stream of the current device; stub: it is one like any other.
using StreamHandle = void *;
int create_stream(StreamHandle *handle);
int destroy_stream(StreamHandle handle);
int query_stream(StreamHandle handle);
int synchronize_stream(StreamHandle handle);
int is_capturing(StreamHandle handle, int *status);

// What a copy is, by the memory at its ends, is logged; `detail` is added to the line.
int copy(const char *function, uintptr_t dst, uintptr_t src, size_t nbytes, StreamHandle stream,
         const std::string &detail = "");
int copy_batch(const char *function, const uintptr_t *dsts, const uintptr_t *srcs, const size_t *sizes, size_t count,
               StreamHandle stream);
int fill(const char *function, uintptr_t dst, unsigned char value, size_t nbytes, StreamHandle stream);
int write_value(const char *function, StreamHandle stream, uintptr_t address, uint32_t value);
// CUDA's comparison is cyclic, HIP's is not.
enum class Compare { GreaterOrEqualCyclic, GreaterOrEqual, Equal, And, Nor };
int wait_value(const char *function, StreamHandle stream, uintptr_t address, uint32_t value, Compare compare,
               uint32_t mask = ~0u);
bool valid_flag(uintptr_t address);  // whether write_value and wait_value accept it

// Events: a wait is for the record that is the latest one when the wait is called, and passes at once if there is none.
using EventHandle = void *;
int create_event(EventHandle *handle);
int destroy_event(EventHandle handle);
int record_event(EventHandle event, StreamHandle stream);
int query_event(EventHandle event);
int synchronize_event(EventHandle event);
int wait_event(StreamHandle stream, EventHandle event);

// Kernels: found by name in this library (kernels.cc), whatever the module's image holds.
int load_module(void **module, const void *image);
int unload_module(void *module);
int get_function(void **function, void *module, const char *name);
int launch(const char *call, void *function, const unsigned grid[3], const unsigned block[3], StreamHandle stream,
           void **parameters);

}  // namespace stub
