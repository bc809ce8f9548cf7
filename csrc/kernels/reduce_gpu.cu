// reduce_gpu: what a GPU computes: the sum, product, maximum or minimum of several arrays in fixed order, and copies.
//
// One source for CUDA (NVRTC), HIP (hipRTC or clang, without headers) and, with HDMA_KERNEL_ON_HOST, a host compiler.
// Its includer then defines __global__, __device__, __launch_bounds__, and THREAD_INDEX, BLOCK_INDEX, BLOCK_SIZE and
// GRID_SIZE (of the thread that it plays). Threads share nothing and never wait, so that each can run by itself.
//
// Protocol: kernels hdma_reduce_FROM_TO(ReduceArguments) and hdma_copy(ReduceArguments), in any grid of blocks of at
// most 512 threads. The same numbers as reduce_host, to the bit (but any NaN for another): 16- and 8-bit floats are
// accumulated in fp32, all else in its own type, in the order of the sources, divided, rounded once. Any alignment;
// fast where all arrays have the same one modulo 16. Compiled without contraction to fma, flushing of subnormals to
// zero and inexact division.
//
// Threading: few blocks must fill the memory's pipeline, so that each thread keeps several 16-byte loads in flight:
// those of a source, and of the next one while it is combined. dst may be one of the sources, element for element:
// each thread reads all of an element before it writes it, and none reads another's.
//
// Ordering: plain loads and stores; the stream orders kernels.

#if !defined(HDMA_KERNEL_ON_HOST)
#if defined(__HIP__)
// Where the compiler was given no headers.
#if !defined(__global__)
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#endif
#undef __launch_bounds__
#define __launch_bounds__(threads, blocks) \
    __attribute__((amdgpu_flat_work_group_size(1, threads), amdgpu_waves_per_eu(4)))
#define THREAD_INDEX __builtin_amdgcn_workitem_id_x()
#define BLOCK_INDEX __builtin_amdgcn_workgroup_id_x()
#define BLOCK_SIZE __builtin_amdgcn_workgroup_size_x()
#define GRID_SIZE (__builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x())
#else
#define THREAD_INDEX threadIdx.x
#define BLOCK_INDEX blockIdx.x
#define BLOCK_SIZE blockDim.x
#define GRID_SIZE gridDim.x
#endif
#endif

// GLOBAL: in the GPU's memory, not a thread's or a block's, which no load has to find out then.
#if defined(HDMA_KERNEL_ON_HOST)
#define UNROLL
#define NO_UNROLL
#define GLOBAL
#define IN_PLACE
#elif defined(__HIP__)
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")
#define GLOBAL __attribute__((address_space(1)))
#define IN_PLACE
#else
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")
#define GLOBAL
#define IN_PLACE __grid_constant__  // Sources are indexed where the arguments lie, not in a copy on the stack.
#endif
#if defined(__HIP__)
#define BYTE_UNROLL 1
#else
#define BYTE_UNROLL 2
#endif
#define INLINE __device__ inline __attribute__((always_inline))

// As the host lays it out. `op` is Op of plan.h; `divisor` is 1 unless the average is wanted. `also`: a second place to
// copy to, or null; of sums there is none.
struct ReduceArguments {
    void *dst;
    void *also;
    const void *srcs[64];
    unsigned source_count;
    unsigned op;
    int divisor;
    unsigned unused;
    long long element_count;
};

namespace hdma_kernels {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

enum Op : u32 { kSum, kAvg, kMax, kMin, kProd };

#if defined(HDMA_KERNEL_ON_HOST) || defined(__HIP__)
typedef u32 Vector __attribute__((vector_size(16), may_alias));
#else
struct __align__(16) Vector {
    u32 words[4];
    INLINE u32 operator[](int i) const { return words[i]; }
    INLINE u32 &operator[](int i) { return words[i]; }
};
#endif

template <class To, class From>
INLINE To cast_bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "of the same size");
    union {
        From from;
        To to;
    } both;
    both.from = x;
    return both.to;
}

template <int nbytes> struct UnsignedOf;
template <> struct UnsignedOf<1> { using type = u8; };
template <> struct UnsignedOf<2> { using type = u16; };
template <> struct UnsignedOf<4> { using type = u32; };
template <> struct UnsignedOf<8> { using type = u64; };

// Element types: their bits in memory, as what they are accumulated, and the conversions, rounding to nearest even.
// pair() narrows two at once, where the hardware does that.
template <class T>
struct Plain {
    using Acc = T;
    using Bits = typename UnsignedOf<sizeof(T)>::type;
    static INLINE Acc widen(Bits x) { return cast_bits<T>(x); }
    static INLINE Bits narrow(Acc x) { return cast_bits<Bits>(x); }
};

template <class T>
INLINE u32 pair_of(typename T::Acc low, typename T::Acc high) {
    return T::narrow(low) | static_cast<u32>(T::narrow(high)) << 16;
}

struct Bool {
    using Acc = u8;
    using Bits = u8;
    static INLINE Acc widen(Bits x) { return x != 0; }
    static INLINE Bits narrow(Acc x) { return x; }
};

struct Bfloat16 {
    using Acc = float;
    using Bits = u16;
    static INLINE Acc widen(Bits x) { return cast_bits<float>(static_cast<u32>(x) << 16); }
    static INLINE Bits narrow(Acc x) {
#if defined(__gfx950__)
        return cast_bits<u16>(static_cast<__bf16>(x));
#else
        u32 u = cast_bits<u32>(x);
        u32 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
        u32 quiet = (u >> 16) | 0x40u;  // a NaN must not round to infinity
        return static_cast<u16>((u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
#endif
    }
};

struct Float16 {
    using Acc = float;
    using Bits = u16;
#if defined(__CUDA_ARCH__)
    static INLINE Acc widen(Bits x) {
        float y;
        asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
        return y;
    }
    static INLINE Bits narrow(Acc x) {
        u16 y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
        return y;
    }
#elif defined(__HIP__)
    static INLINE Acc widen(Bits x) { return cast_bits<_Float16>(x); }
    static INLINE Bits narrow(Acc x) { return cast_bits<u16>(static_cast<_Float16>(x)); }
#else
    static INLINE Acc widen(Bits x) {
        u32 sign = static_cast<u32>(x & 0x8000u) << 16, rest = static_cast<u32>(x & 0x7fffu) << 13;
        // The multiplication moves the bias, and is exact for subnormals as well.
        u32 finite = cast_bits<u32>(cast_bits<float>(rest) * 0x1p112f);
        return cast_bits<float>(sign | (rest >= 0x0f800000u ? rest + (224u << 23) : finite));
    }
    static INLINE Bits narrow(Acc x) {
        u32 u = cast_bits<u32>(x), sign = (u >> 16) & 0x8000u, rest = u & 0x7fffffffu;
        u32 normal = (rest - (112u << 23) + 0xfffu + ((rest >> 13) & 1u)) >> 13;
        // Below the normal range an addition to 0.5 rounds at the right bit.
        u32 subnormal = cast_bits<u32>(cast_bits<float>(rest) + 0.5f) - cast_bits<u32>(0.5f);
        u32 finite = rest < 0x38800000u ? subnormal : normal;
        return static_cast<u16>(sign | (rest > 0x7f800000u ? 0x7e00u : rest >= 0x47800000u ? 0x7c00u : finite));
    }
#endif
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <>
INLINE u32 pair_of<Bfloat16>(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
template <>
INLINE u32 pair_of<Float16>(float low, float high) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
#endif

// e4m3 ("fn") has no infinity, so that what overflows becomes NaN.
struct Float8E4m3 {
    using Acc = float;
    using Bits = u8;
    static INLINE Acc widen(Bits x) {
        u32 sign = static_cast<u32>(x & 0x80u) << 24, rest = x & 0x7fu;
        u32 finite = cast_bits<u32>(cast_bits<float>(rest << 20) * 0x1p120f);
        return cast_bits<float>(sign | (rest == 0x7fu ? 0x7fc00000u : finite));
    }
    static INLINE Bits narrow(Acc x) {
        u32 u = cast_bits<u32>(x), sign = (u >> 24) & 0x80u, rest = u & 0x7fffffffu;
        u32 normal = (rest - (120u << 23) + 0x7ffffu + ((rest >> 20) & 1u)) >> 20;
        u32 subnormal = cast_bits<u32>(cast_bits<float>(rest) + 0x1p14f) - cast_bits<u32>(0x1p14f);
        u32 large = rest >= 0x44000000u || normal > 0x7eu ? 0x7fu : normal;
        return static_cast<u8>(sign | (rest < (121u << 23) ? subnormal : large));
    }
};

struct Float8E5m2 {
    using Acc = float;
    using Bits = u8;
    static INLINE Acc widen(Bits x) { return Float16::widen(static_cast<u16>(x << 8)); }
    static INLINE Bits narrow(Acc x) {
        u32 u = cast_bits<u32>(x), sign = (u >> 24) & 0x80u, rest = u & 0x7fffffffu;
        u32 normal = (rest - (112u << 23) + 0xfffffu + ((rest >> 21) & 1u)) >> 21;
        u32 subnormal = cast_bits<u32>(cast_bits<float>(rest) + 0x1p7f) - cast_bits<u32>(0x1p7f);
        u32 large = rest >= 0x48000000u || normal > 0x7bu ? 0x7cu : normal;
        return static_cast<u8>(sign | (rest > 0x7f800000u ? 0x7eu : rest < (113u << 23) ? subnormal : large));
    }
};

template <class A> struct Arithmetic { using type = u64; };  // Integers wrap around, as in numpy and torch.
template <> struct Arithmetic<float> { using type = float; };
template <> struct Arithmetic<double> { using type = double; };

template <class A>
constexpr bool is_floating = static_cast<A>(0.5f) != static_cast<A>(0);

template <class T>
INLINE typename T::Acc plus(typename T::Acc a, typename T::Acc b) {
    using Wide = typename Arithmetic<typename T::Acc>::type;
    return static_cast<typename T::Acc>(static_cast<Wide>(a) + static_cast<Wide>(b));
}

template <>
INLINE u8 plus<Bool>(u8 a, u8 b) {
    return a | b;
}

template <class T>
INLINE typename T::Acc times(typename T::Acc a, typename T::Acc b) {
    using Wide = typename Arithmetic<typename T::Acc>::type;
    return static_cast<typename T::Acc>(static_cast<Wide>(a) * static_cast<Wide>(b));
}

// NaN wins on either side.
template <class A>
INLINE A larger(A a, A b) {
    return a > b || a != a ? a : b;
}

template <class A>
INLINE A smaller(A a, A b) {
    return a < b || a != a ? a : b;
}

// What a thread takes at once: `count` elements in aligned vectors.
template <class T, int count>
struct Vectors {
    using Element = T;
    using Bits = typename T::Bits;
    static constexpr int kCount = count, kVectors = count * sizeof(Bits) / 16, kInWord = 4 / sizeof(Bits);
    Vector vectors[kVectors];

    INLINE void load(const void *array, i64 at) {
        auto *from = (const GLOBAL Vector *)((const GLOBAL char *)array + at * sizeof(Bits));
        UNROLL
        for (int i = 0; i < kVectors; ++i) vectors[i] = from[i];
    }
    INLINE void store(void *array, i64 at) const {
        auto *to = (GLOBAL Vector *)((GLOBAL char *)array + at * sizeof(Bits));
        UNROLL
        for (int i = 0; i < kVectors; ++i) to[i] = vectors[i];
    }
    INLINE u32 word(int i) const { return vectors[i / 4][i % 4]; }
    INLINE typename T::Acc get(int i) const {
        if constexpr (sizeof(Bits) == 8)
            return T::widen(word(2 * i) | static_cast<u64>(word(2 * i + 1)) << 32);
        else
            return T::widen(static_cast<Bits>(word(i / kInWord) >> (i % kInWord * 8 * sizeof(Bits))));
    }
    INLINE void set(const typename T::Acc *values) {
        UNROLL
        for (int i = 0; i < 4 * kVectors; ++i) {
            u32 word = 0;
            if constexpr (sizeof(Bits) == 8) {
                word = static_cast<u32>(T::narrow(values[i / 2]) >> (i % 2 * 32));
            } else if constexpr (sizeof(Bits) == 2) {
                word = pair_of<T>(values[2 * i], values[2 * i + 1]);
            } else {
                UNROLL
                for (int j = 0; j < kInWord; ++j)
                    word |= static_cast<u32>(T::narrow(values[i * kInWord + j])) << (j * 8 * sizeof(Bits));
            }
            vectors[i / 4][i % 4] = word;
        }
    }
};

// One element, aligned to its size or not. A GPU has no misaligned loads: such an element is put together from bytes.
template <class T, bool aligned>
struct Single {
    using Element = T;
    using Bits = typename T::Bits;
    static constexpr int kCount = 1, kBytes = sizeof(Bits);
    Bits bits;

    INLINE void load(const void *array, i64 at) {
        auto *from = (const GLOBAL u8 *)array + at * kBytes;
        if constexpr (aligned) {
            bits = *(const GLOBAL Bits *)from;
        } else {
            u64 all = 0;
            NO_UNROLL
            for (int i = kBytes; i-- > 0;) all = all << 8 | from[i];
            bits = static_cast<Bits>(all);
        }
    }
    INLINE void store(void *array, i64 at) const {
        auto *to = (GLOBAL u8 *)array + at * kBytes;
        if constexpr (aligned) {
            *(GLOBAL Bits *)to = bits;
        } else {
            u64 all = bits;
            NO_UNROLL
            for (int i = 0; i < kBytes; ++i, all >>= 8) to[i] = static_cast<u8>(all);
        }
    }
    INLINE typename T::Acc get(int) const { return T::widen(bits); }
    INLINE void set(const typename T::Acc *values) { bits = T::narrow(values[0]); }
};

INLINE i64 thread() { return static_cast<i64>(BLOCK_INDEX) * BLOCK_SIZE + THREAD_INDEX; }
INLINE i64 threads() { return static_cast<i64>(GRID_SIZE) * BLOCK_SIZE; }

template <int unroll, class In>
INLINE void load_all(In *groups, const void *array, const i64 *at) {
    UNROLL
    for (int u = 0; u < unroll; ++u) groups[u].load(array, at[u]);
}

// acc = acc op groups. The branch is the same for all threads, and taken once for many elements: a loop for each op
// would be no faster, and take the compiler three times as long.
template <int unroll, class In>
INLINE void combine(u32 op, typename In::Element::Acc *acc, const In *groups) {
    constexpr int count = In::kCount;
    using T = typename In::Element;
    if (op == kMax) {
        UNROLL
        for (int i = 0; i < unroll * count; ++i) acc[i] = larger(acc[i], groups[i / count].get(i % count));
    } else if (op == kMin) {
        UNROLL
        for (int i = 0; i < unroll * count; ++i) acc[i] = smaller(acc[i], groups[i / count].get(i % count));
    } else if (op == kProd) {
        UNROLL
        for (int i = 0; i < unroll * count; ++i) acc[i] = times<T>(acc[i], groups[i / count].get(i % count));
    } else {
        UNROLL
        for (int i = 0; i < unroll * count; ++i) acc[i] = plus<T>(acc[i], groups[i / count].get(i % count));
    }
}

// `groups` times In::kCount elements, without the `gap_length` elements from element `gap` on.
template <int unroll, class In, class Out>
INLINE void reduce_groups(const ReduceArguments &a, i64 groups, i64 gap, i64 gap_length) {
    using Acc = typename In::Element::Acc;
    constexpr int count = In::kCount;
    const i64 step = threads();
    for (i64 group = thread(); group < groups; group += unroll * step) {
        // Past the end the first one is read once more, rather than to branch around loads.
        i64 at[unroll];
        UNROLL
        for (int u = 0; u < unroll; ++u) {
            at[u] = (group + u * step < groups ? group + u * step : group) * count;
            at[u] += at[u] < gap ? 0 : gap_length;
        }
        In now[unroll], next[unroll];
        load_all<unroll>(now, a.srcs[0], at);
        if (a.source_count > 1) load_all<unroll>(next, a.srcs[1], at);
        Acc acc[unroll * count];
        UNROLL
        for (int i = 0; i < unroll * count; ++i) acc[i] = now[i / count].get(i % count);
        for (u32 s = 1; s < a.source_count; ++s) {
            UNROLL
            for (int u = 0; u < unroll; ++u) now[u] = next[u];
            if (s + 1 < a.source_count) load_all<unroll>(next, a.srcs[s + 1], at);
            combine<unroll>(a.op, acc, now);
        }
        if constexpr (is_floating<Acc>) {
            if (a.divisor != 1) {
                UNROLL
                for (int i = 0; i < unroll * count; ++i) acc[i] = acc[i] / static_cast<Acc>(a.divisor);
            }
        }
        UNROLL
        for (int u = 0; u < unroll; ++u) {
            Out out;
            out.set(acc + u * count);
            if (group + u * step < groups) out.store(a.dst, at[u]);
        }
    }
}

INLINE u64 address(const void *p, i64 offset = 0) { return (u64)p + static_cast<u64>(offset); }

template <class From, class To>
INLINE void reduce(const ReduceArguments &a) {
    constexpr int from = sizeof(typename From::Bits), to = sizeof(typename To::Bits);
    constexpr int smaller = from < to ? from : to, count = 16 / smaller;
    // 64 bytes of each source in flight, while registers last: every element takes one as it is accumulated.
    constexpr bool shorts = smaller == 2 && !is_floating<typename From::Acc>;
    constexpr int unroll = smaller == 1 ? BYTE_UNROLL : from > to || shorts ? 2 : 4;
    // The elements before the first vector: all arrays must be aligned behind them.
    i64 head = static_cast<i64>(-address(from < to ? a.srcs[0] : a.dst) & 15) / smaller;
    u64 vectors = address(a.dst, head * to), misaligned = address(a.dst) & (to - 1);
    for (u32 s = 0; s < a.source_count; ++s) {
        vectors |= address(a.srcs[s], head * from);
        misaligned |= address(a.srcs[s]) & (from - 1);
    }
    if (misaligned) {
        reduce_groups<1, Single<From, false>, Single<To, false>>(a, a.element_count, 0, 0);
        return;
    }
    i64 groups = a.element_count < head || (vectors & 15) != 0 ? 0 : (a.element_count - head) / count;
    reduce_groups<unroll, Vectors<From, count>, Vectors<To, count>>(a, groups, 0, head);
    i64 done = groups * count;
    reduce_groups<4, Single<From, true>, Single<To, true>>(a, a.element_count - done, head, done);
}

template <class Unit>
INLINE void copy_units(void *dst, void *also, const void *src, i64 units) {
    constexpr int unroll = 8;
    auto *to = (GLOBAL Unit *)dst;
    auto *second = (GLOBAL Unit *)also;
    auto *from = (const GLOBAL Unit *)src;
    const i64 step = threads();
    for (i64 unit = thread(); unit < units; unit += unroll * step) {
        Unit x[unroll];
        UNROLL
        for (int u = 0; u < unroll; ++u) x[u] = from[unit + u * step < units ? unit + u * step : unit];
        UNROLL
        for (int u = 0; u < unroll; ++u)
            if (unit + u * step < units) {
                to[unit + u * step] = x[u];
                if (second) second[unit + u * step] = x[u];
            }
    }
}

// By the widest unit that all arrays can be aligned to.
template <class Unit>
INLINE bool copy_by(char *dst, char *also, const char *src, i64 nbytes) {
    u64 apart = (address(dst) ^ address(src)) | (also ? address(also) ^ address(src) : 0);
    if (apart & (sizeof(Unit) - 1)) return false;
    i64 head = static_cast<i64>(-address(dst) & (sizeof(Unit) - 1));
    if (head > nbytes) head = nbytes;
    i64 units = (nbytes - head) / static_cast<i64>(sizeof(Unit)), done = units * static_cast<i64>(sizeof(Unit));
    copy_units<Unit>(dst + head, also ? also + head : nullptr, src + head, units);
    for (i64 i = thread(); i < nbytes - done; i += threads()) {
        i64 at = i < head ? i : i + done;
        ((GLOBAL char *)dst)[at] = ((const GLOBAL char *)src)[at];
        if (also) ((GLOBAL char *)also)[at] = ((const GLOBAL char *)src)[at];
    }
    return true;
}

INLINE void copy(const ReduceArguments &a) {
    auto *dst = static_cast<char *>(a.dst), *also = static_cast<char *>(a.also);
    auto *src = static_cast<const char *>(a.srcs[0]);
    i64 nbytes = a.element_count;
    (void)(copy_by<Vector>(dst, also, src, nbytes) || copy_by<u64>(dst, also, src, nbytes) ||
           copy_by<u32>(dst, also, src, nbytes) || copy_by<u16>(dst, also, src, nbytes) ||
           copy_by<u8>(dst, also, src, nbytes));
}

// By the names of the dtypes.
using Type_float32 = Plain<float>;
using Type_bfloat16 = Bfloat16;
using Type_float16 = Float16;
using Type_float64 = Plain<double>;
using Type_int8 = Plain<signed char>;
using Type_int16 = Plain<short>;
using Type_int32 = Plain<int>;
using Type_int64 = Plain<long long>;
using Type_uint8 = Plain<unsigned char>;
using Type_bool = Bool;
using Type_float8_e4m3fn = Float8E4m3;
using Type_float8_e5m2 = Float8E5m2;

}  // namespace hdma_kernels

#define KERNEL extern "C" __global__ void __launch_bounds__(512, 1)
#define REDUCE(from, to)                                                                \
    KERNEL hdma_reduce_##from##_##to(const IN_PLACE ReduceArguments arguments) {         \
        hdma_kernels::reduce<hdma_kernels::Type_##from, hdma_kernels::Type_##to>(arguments); \
    }

REDUCE(float32, float32)
REDUCE(bfloat16, bfloat16)
REDUCE(float16, float16)
REDUCE(float64, float64)
REDUCE(int8, int8)
REDUCE(int16, int16)
REDUCE(int32, int32)
REDUCE(int64, int64)
REDUCE(uint8, uint8)
REDUCE(bool, bool)
REDUCE(float8_e4m3fn, float8_e4m3fn)
REDUCE(float8_e5m2, float8_e5m2)
REDUCE(bfloat16, float32)
REDUCE(float16, float32)
REDUCE(float32, bfloat16)
REDUCE(float32, float16)

KERNEL hdma_copy(const IN_PLACE ReduceArguments arguments) { hdma_kernels::copy(arguments); }
