// kernels: hdma's kernels, run by a stream's thread in place of a GPU.
//
// Protocol: a kernel is a grid-stride loop over elements, so that fewer blocks and threads do the same work.
//
// Threading: thread and block indices are those of the calling thread.
//
// Ordering: none of its own.
#pragma once

namespace stub {

// The one parameter, by value, of every kernel (csrc/kernels/reduce_gpu.cu).
struct ReduceArguments {
    void *dst, *also;
    const void *srcs[64];
    unsigned source_count;
    unsigned op;
    int divisor;
    unsigned unused;
    long long element_count;
};

using Kernel = void (*)(ReduceArguments);

Kernel find_kernel(const char *name);  // null: none
void run_kernel(Kernel kernel, const unsigned grid[3], const unsigned block[3], const ReduceArguments &arguments);

}  // namespace stub
