// copy_host: see copy_host.h.
#include "copy_host.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hdma {

namespace {

// Shorter copies do not earn the fence.
constexpr size_t kWorthwhileNbytes = 16 << 10;

using Stream = void (*)(char *dst, const char *src, size_t nbytes);

#if defined(__x86_64__)
// Aligns the destination, streams blocks, leaves the rest to memcpy.
template <size_t block, size_t alignment, class Block>
inline __attribute__((always_inline)) void stream_blocks(char *dst, const char *src, size_t nbytes, Block copy_block) {
    size_t head = -reinterpret_cast<uintptr_t>(dst) & (alignment - 1);
    std::memcpy(dst, src, head);
    dst += head, src += head, nbytes -= head;
    for (; nbytes >= block; nbytes -= block, src += block, dst += block) copy_block(dst, src);
    std::memcpy(dst, src, nbytes);
}

__attribute__((target("avx2"))) void stream_avx2(char *dst, const char *src, size_t nbytes) {
    stream_blocks<128, 32>(dst, src, nbytes, [](char *to, const char *from) __attribute__((target("avx2"))) {
        auto in = reinterpret_cast<const __m256i *>(from);
        auto out = reinterpret_cast<__m256i *>(to);
        __m256i a = _mm256_loadu_si256(in), b = _mm256_loadu_si256(in + 1);
        __m256i c = _mm256_loadu_si256(in + 2), d = _mm256_loadu_si256(in + 3);
        _mm256_stream_si256(out, a);
        _mm256_stream_si256(out + 1, b);
        _mm256_stream_si256(out + 2, c);
        _mm256_stream_si256(out + 3, d);
    });
}

// A store fills a whole line, which is a tenth quicker again.
__attribute__((target("avx512f"))) void stream_avx512(char *dst, const char *src, size_t nbytes) {
    stream_blocks<256, 64>(dst, src, nbytes, [](char *to, const char *from) __attribute__((target("avx512f"))) {
        __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + 64);
        __m512i c = _mm512_loadu_si512(from + 128), d = _mm512_loadu_si512(from + 192);
        auto out = reinterpret_cast<__m512i *>(to);
        _mm512_stream_si512(out, a);
        _mm512_stream_si512(out + 1, b);
        _mm512_stream_si512(out + 2, c);
        _mm512_stream_si512(out + 3, d);
    });
}

const Stream stream = __builtin_cpu_supports("avx512f") ? stream_avx512
                      : __builtin_cpu_supports("avx2")  ? stream_avx2
                                                        : nullptr;
#else
constexpr Stream stream = nullptr;
#endif

}  // namespace

void copy_streaming(void *dst, const void *src, size_t nbytes) {
    if (stream && nbytes >= kWorthwhileNbytes) {
        stream(static_cast<char *>(dst), static_cast<const char *>(src), nbytes);
        end_stream();
    } else {
        std::memcpy(dst, src, nbytes);
    }
}

void end_stream() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

}  // namespace hdma
