// reduce_host: see reduce_host.h.
//
// Each block of elements is widened into an accumulator that stays in the first-level cache, then rounded to the
// destination. The loops are plain C++ that the compiler vectorises, once for each instruction set that is worth it;
// the loader picks one by the CPU it finds (function multi-versioning), so one build serves every machine.
#include "reduce_host.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../base.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define HDMA_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define HDMA_CLONES
#endif

namespace hdma {

namespace {

constexpr size_t kBlock = 2048;

uint32_t bits(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return u;
}

float from_bits(uint32_t u) {
    float x;
    std::memcpy(&x, &u, 4);
    return x;
}

// The caller's arrays may be misaligned: memcpy is how C++ says so, and compiles to plain loads.
template <class T>
T load(const char *p, size_t i) {
    T x;
    std::memcpy(&x, p + i * sizeof(T), sizeof(T));
    return x;
}

template <class T>
void store(char *p, size_t i, T x) {
    std::memcpy(p + i * sizeof(T), &x, sizeof(T));
}

inline float widen_bf16(uint16_t h) { return from_bits(static_cast<uint32_t>(h) << 16); }

inline uint16_t narrow_bf16(float x) {
    uint32_t u = bits(x);
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;  // nearest, ties to even
    uint32_t quiet = (u >> 16) | 0x40u;                         // a NaN must not round to infinity
    return static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

inline float widen_f16(uint16_t h) {
    uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, rest = h & 0x7fffu;
    // Normal numbers: shift and move the bias. Infinity and NaN move it once more. Denormals: an exact subtraction.
    uint32_t normal = (rest << 13) + (112u << 23);
    uint32_t special = normal + (112u << 23);
    uint32_t denormal = bits(from_bits((rest << 13) + (113u << 23)) - from_bits(113u << 23));
    uint32_t value = rest >= 0x7c00u ? special : rest < 0x0400u ? denormal : normal;
    return from_bits(sign | value);
}

inline uint16_t narrow_f16(float x) {
    uint32_t u = bits(x), sign = (u >> 16) & 0x8000u, rest = u & 0x7fffffffu;
    uint32_t normal = (rest - (112u << 23) + 0xfffu + ((rest >> 13) & 1u)) >> 13;  // nearest, ties to even
    // Below the normal range an addition to 0.5 rounds at the right bit.
    uint32_t denormal = bits(from_bits(rest) + 0.5f) - bits(0.5f);
    uint32_t value = rest > 0x7f800000u ? 0x7e00u : rest >= 0x47800000u ? 0x7c00u : rest < 0x38800000u ? denormal : normal;
    return static_cast<uint16_t>(sign | value);
}

HDMA_CLONES void start_f32(float *acc, const char *src, size_t n) {
    for (size_t i = 0; i < n; ++i) acc[i] = load<float>(src, i);
}
HDMA_CLONES void add_f32(float *acc, const char *src, size_t n) {
    for (size_t i = 0; i < n; ++i) acc[i] += load<float>(src, i);
}
HDMA_CLONES void sum2_f32(char *dst, const char *a, const char *b, size_t n) {
    for (size_t i = 0; i < n; ++i) store(dst, i, load<float>(a, i) + load<float>(b, i));
}
HDMA_CLONES void end_f32(char *dst, const float *acc, size_t n) {
    for (size_t i = 0; i < n; ++i) store(dst, i, acc[i]);
}
HDMA_CLONES void start_bf16(float *acc, const char *src, size_t n) {
    for (size_t i = 0; i < n; ++i) acc[i] = widen_bf16(load<uint16_t>(src, i));
}
HDMA_CLONES void add_bf16(float *acc, const char *src, size_t n) {
    for (size_t i = 0; i < n; ++i) acc[i] += widen_bf16(load<uint16_t>(src, i));
}
HDMA_CLONES void end_bf16(char *dst, const float *acc, size_t n) {
    for (size_t i = 0; i < n; ++i) store(dst, i, narrow_bf16(acc[i]));
}
HDMA_CLONES void start_f16(float *acc, const char *src, size_t n) {
    for (size_t i = 0; i < n; ++i) acc[i] = widen_f16(load<uint16_t>(src, i));
}
HDMA_CLONES void add_f16(float *acc, const char *src, size_t n) {
    for (size_t i = 0; i < n; ++i) acc[i] += widen_f16(load<uint16_t>(src, i));
}
HDMA_CLONES void end_f16(char *dst, const float *acc, size_t n) {
    for (size_t i = 0; i < n; ++i) store(dst, i, narrow_f16(acc[i]));
}

struct Row {
    size_t nbytes;
    void (*start)(float *, const char *, size_t);
    void (*add)(float *, const char *, size_t);
    void (*end)(char *, const float *, size_t);
};

const Row *row(Dtype dtype) {
    static const Row f32{4, start_f32, add_f32, end_f32}, bf16{2, start_bf16, add_bf16, end_bf16},
        f16{2, start_f16, add_f16, end_f16};
    switch (dtype) {
        case Dtype::Float32: return &f32;
        case Dtype::Bfloat16: return &bf16;
        case Dtype::Float16: return &f16;
        default: throw Error(Kind::Usage, "bytes cannot be summed: give a floating-point dtype");
    }
}

}  // namespace

void reduce_host(void *dst, Dtype dst_type, const void *const *srcs, size_t source_count, Dtype src_type,
                 size_t element_count) {
    const Row *in = row(src_type), *out = row(dst_type);
    alignas(64) float acc[kBlock];
    bool plain = source_count == 2 && in == out && src_type == Dtype::Float32;
    for (size_t at = 0; at < element_count; at += kBlock) {
        size_t n = std::min(kBlock, element_count - at);
        char *to = static_cast<char *>(dst) + at * out->nbytes;
        auto from = [&](size_t s) { return static_cast<const char *>(srcs[s]) + at * in->nbytes; };
        if (plain) {
            sum2_f32(to, from(0), from(1), n);
            continue;
        }
        in->start(acc, from(0), n);
        for (size_t s = 1; s < source_count; ++s) in->add(acc, from(s), n);
        out->end(to, acc, n);
    }
}

}  // namespace hdma
