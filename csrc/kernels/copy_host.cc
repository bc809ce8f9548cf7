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

#if defined(__x86_64__)
__attribute__((target("avx2"))) void stream(char *dst, const char *src, size_t nbytes) {
    size_t head = -reinterpret_cast<uintptr_t>(dst) & 31;
    std::memcpy(dst, src, head);
    dst += head, src += head, nbytes -= head;
    for (; nbytes >= 128; nbytes -= 128, src += 128, dst += 128) {
        auto from = reinterpret_cast<const __m256i *>(src);
        auto to = reinterpret_cast<__m256i *>(dst);
        __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1);
        __m256i c = _mm256_loadu_si256(from + 2), d = _mm256_loadu_si256(from + 3);
        _mm256_stream_si256(to, a);
        _mm256_stream_si256(to + 1, b);
        _mm256_stream_si256(to + 2, c);
        _mm256_stream_si256(to + 3, d);
    }
    std::memcpy(dst, src, nbytes);
}
const bool can_stream = __builtin_cpu_supports("avx2");
#else
void stream(char *, const char *, size_t) {}
constexpr bool can_stream = false;
#endif

}  // namespace

void copy_streaming(void *dst, const void *src, size_t nbytes) {
    if (can_stream && nbytes >= kWorthwhileNbytes) {
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
