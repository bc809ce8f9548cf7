// reduce_host: see reduce_host.h.
//
// A few sources of the common types are combined in one loop. Otherwise each block of elements is widened into an
// accumulator that stays in the first-level cache, then rounded to the destination. The loops are compiled for the
// baseline, for AVX2 with F16C and for AVX-512; the CPU found at run time decides, so one build serves every machine.
#include "reduce_host.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../base.h"
#include "copy_host.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hdma {

namespace {

constexpr size_t kBlock = 2048, kOps = 5, kMostFused = 4;

struct Loops {
    void (*start)(void *acc, const char *src, size_t n);
    void (*accumulate[kOps])(void *acc, const char *src, size_t n);
    void (*finish)(char *dst, const void *acc, size_t n, int divisor);
    // Sums; may be null.
    void (*fused[kMostFused + 1])(char *dst, const char *const *srcs, size_t n, int divisor, bool streaming);
};

#define HDMA_ISA baseline
#define HDMA_REGISTER_NBYTES 16
#include "reduce_loops.inc"
#undef HDMA_REGISTER_NBYTES
#undef HDMA_ISA

#if defined(__x86_64__)
// gcc 12 takes the undefined lanes in its own intrinsics for variables that were forgotten.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#define HDMA_ISA avx2
#define HDMA_REGISTER_NBYTES 32
#define HDMA_F16C
#include "reduce_loops.inc"
#undef HDMA_REGISTER_NBYTES
#undef HDMA_ISA
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#define HDMA_ISA avx512
#define HDMA_REGISTER_NBYTES 64
#include "reduce_loops.inc"
#undef HDMA_REGISTER_NBYTES
#undef HDMA_ISA
#undef HDMA_F16C
#pragma GCC pop_options
#endif

const Loops &loops_of(Dtype dtype) {
#if defined(__x86_64__)
    static const bool has_avx512 = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("f16c");
    if (has_avx512) return avx512::loops_of(dtype);
    static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    if (has_avx2) return avx2::loops_of(dtype);
#endif
    return baseline::loops_of(dtype);
}

}  // namespace

void reduce_host(Op op, int divisor, void *dst, Dtype dst_type, const void *const *srcs, size_t source_count,
                 Dtype src_type, size_t element_count, bool streaming) {
    const Loops &in = loops_of(src_type), &out = loops_of(dst_type);
    auto *to = static_cast<char *>(dst);
    auto *from = reinterpret_cast<const char *const *>(srcs);
    bool sums = op == Op::Sum || op == Op::Avg;
    if (sums && src_type == dst_type && source_count <= kMostFused && in.fused[source_count])
        return in.fused[source_count](to, from, element_count, divisor, streaming);
    size_t in_nbytes = dtype_nbytes(src_type), out_nbytes = dtype_nbytes(dst_type);
    alignas(64) char acc[kBlock * 8];
    for (size_t at = 0; at < element_count; at += kBlock) {
        size_t n = std::min(kBlock, element_count - at);
        in.start(acc, from[0] + at * in_nbytes, n);
        for (size_t s = 1; s < source_count; ++s)
            in.accumulate[static_cast<int>(op)](acc, from[s] + at * in_nbytes, n);
        out.finish(to + at * out_nbytes, acc, n, divisor);
    }
}

}  // namespace hdma
