// kernels: see kernels.h. The source of the GPU's kernels (csrc/kernels/reduce_gpu.cu) is compiled
// here for the CPU; each thread of a small grid runs by itself, one after the other.
//
// Protocol: a kernel is found by its exported name.
//
// Threading: see kernels.h.
//
// Ordering: see kernels.h.
#include "kernels.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>

namespace {

struct Indices {
    unsigned thread, block, block_size, grid_size;
};
thread_local Indices indices;

}  // namespace

#define HDMA_KERNEL_ON_HOST
#define __global__ __attribute__((visibility("default")))
#define __device__
#define __launch_bounds__(...)
#define THREAD_INDEX indices.thread
#define BLOCK_INDEX indices.block
#define BLOCK_SIZE indices.block_size
#define GRID_SIZE indices.grid_size

#include "../../csrc/kernels/reduce_gpu.cu"
static_assert(sizeof(ReduceArguments) == sizeof(stub::ReduceArguments));

namespace stub {

Kernel find_kernel(const char *name) {
    if (strncmp(name, "hdma_", 5) != 0) return nullptr;
    Dl_info self;
    if (!dladdr(reinterpret_cast<void *>(&find_kernel), &self)) return nullptr;
    void *library = dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    return library ? reinterpret_cast<Kernel>(dlsym(library, name)) : nullptr;
}

void run_kernel(Kernel kernel, const unsigned grid[3], const unsigned block[3], const ReduceArguments &arguments) {
    // Several threads where that is cheap: each one goes through all the memory.
    bool small = arguments.element_count <= 1 << 16;
    unsigned blocks = small ? std::min(grid[0], 2u) : 1, threads = small ? std::min(block[0], 3u) : 1;
    for (unsigned b = 0; b < blocks; ++b)
        for (unsigned t = 0; t < threads; ++t) {
            indices = {t, b, threads, blocks};
            kernel(arguments);
        }
}

}  // namespace stub
