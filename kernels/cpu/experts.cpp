// The experts of a layer on a CPU, from their packed bytes (docs/format.md): a plain C interface over addresses.
//
// One source for every instruction set: body.h uses vectors of W floats and is compiled for each set below; the caller
// chooses one that `dymoe_supports` allows. No library is linked: threads are the caller's (GOMP_parallel of the OpenMP
// that torch has loaded), so they are the same that torch computes with. ONLY_PORTABLE compiles only the last one, in
// less time: `make sanitize`.
#include "layer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#if __GNUC__ >= 11 || defined(EMULATED_TILES)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#define AMX_KNOWN
#endif
#elif defined(__aarch64__) && (defined(__clang__) ? __clang_major__ >= 16 : __GNUC__ >= 10)  // older ones lack i8mm in a function
#ifndef ONLY_PORTABLE
#define NEON
#endif
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

#if defined(__x86_64__) && !defined(ONLY_PORTABLE)
#define X86
#if __GNUC__ >= 11
#define AVX_VNNI_KNOWN
#endif
#endif

#ifdef X86
static const bool INTEL = (__builtin_cpu_init(), __builtin_cpu_is("intel"));
#else
constexpr bool INTEL = false;
#endif

#define API extern "C" __attribute__((visibility("default")))
#define INLINE inline __attribute__((always_inline))

static INLINE float half_to_float(uint16_t half, i64 dtype) {
    uint32_t bits = uint32_t(half) << 16;
    if (dtype == FLOAT16) {
        uint32_t magnitude = uint32_t(half & 0x7fff) << 13, sign = uint32_t(half & 0x8000) << 16;
        float finite;
        memcpy(&finite, &magnitude, 4);
        finite *= 0x1p112f;
        memcpy(&bits, &finite, 4);
        bits = (magnitude >= 31u << 23 ? magnitude | 0x7f800000 : bits) | sign;
    }
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static INLINE uint16_t to_bfloat16(uint32_t bits) {  // to nearest, ties to even
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static INLINE uint16_t to_float16(uint32_t bits) {
    uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);
    if (magnitude < 0x38800000) {  // a denormal: the addition rounds
        float value;
        memcpy(&value, &magnitude, 4);
        value += 0.5f;
        memcpy(&magnitude, &value, 4);
        return uint16_t(sign | (magnitude - 0x3f000000));
    }
    return uint16_t(sign | (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13);
}

// 2 * level + 12 of e2m1's codes (OCP Microscaling Formats 1.0, 5.3.3): products take unsigned codes.
static const uint8_t TWICE_E2M1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

constexpr int UNCUT = 255;  // a mask of codes: see `uncut`

// Each instruction set has vectors of W floats (F) and integers (I), and operations that multiply codes by activations:
// registers Q of bytes, QS of them for STEP columns of a block; `split`, which cuts STEP columns of packed bytes into
// them, and `exact_sums` of codes times digits, whose vectors have the rows of `row_of`. Loops over registers are
// unrolled by `unroll`, before the compiler decides what is in memory.
#define LAMBDA __attribute__((always_inline))
#define VECTORS_OF(width)                                                                                   \
    constexpr int W = width;                                                                                \
    typedef float F __attribute__((vector_size(4 * width)));                                                \
    typedef int I __attribute__((vector_size(4 * width)));                                                  \
    typedef float Unaligned __attribute__((vector_size(4 * width), aligned(4), may_alias));                 \
    typedef int UnalignedInts __attribute__((vector_size(4 * width), aligned(4), may_alias));               \
    template <class Body, int... i> INLINE void unroll_over(Body body, std::integer_sequence<int, i...>) {  \
        (body(std::integral_constant<int, i>()), ...);                                                      \
    }                                                                                                       \
    template <int count, class Body> INLINE void unroll(Body body) { unroll_over(body, std::make_integer_sequence<int, count>()); }

#ifdef X86
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,bmi2")
#ifdef AMX_KNOWN
#define TILES
#endif
namespace avx512 {
#include "avx512.h"

#include "rotation.h"
#define PAIRS
#include "body.h"
#undef PAIRS
#undef TILES
#include "nearest.h"
}
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi2")
namespace avx2 {
#include "avx2.h"
#include "rotation.h"
#include "body.h"
#include "nearest.h"
}
#ifdef AVX_VNNI_KNOWN
#define VNNI
namespace avx2_vnni {  // has the bits of avx2, whose other functions serve it, too
#include "avx2.h"
#include "rotation.h"
#include "body.h"
}
#undef VNNI
#endif
#pragma GCC pop_options
#elif defined(NEON)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("arch=armv8.2-a+dotprod"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
namespace neon_dotprod {
#include "neon.h"
#include "rotation.h"
#include "body.h"
#include "nearest.h"
}
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("arch=armv8.2-a+i8mm"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+i8mm")
#endif
#define I8MM
namespace neon_i8mm {
#include "neon.h"
#include "rotation.h"
#include "body.h"
#include "nearest.h"
}
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

namespace portable {  // NEON of every ARM processor, SSE2 on x86-64
#include "portable.h"
#include "rotation.h"
#include "body.h"
#include "nearest.h"
}

enum Isa { NEON_I8MM = -2, NEON_DOTPROD, PORTABLE, AVX2, AVX2_VNNI, AVX512, AVX512_BF16, AMX };
using Body = void (*)(void*);
using Parallel = void (*)(Body, void*, unsigned, unsigned);

#ifdef EMULATED_TILES
static bool tiles_allowed() { return true; }
#elif defined(AMX_KNOWN)
static bool tiles_allowed() {  // Linux gives them to a process on request
    constexpr unsigned AMX_TILE_AND_INT8 = 3u << 24;
    constexpr int REQUEST = 0x1023, TILE_DATA = 18;
    unsigned a, b, c, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (~d & AMX_TILE_AND_INT8) == 0 && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}
#else
static bool tiles_allowed() { return false; }
#endif

API int dymoe_supports(int isa) {
#ifdef X86
    if (isa == AMX) return dymoe_supports(AVX512_BF16) && tiles_allowed();
    if (isa == AVX512_BF16) return __builtin_cpu_supports("avx512bf16") && dymoe_supports(AVX512);
    if (isa == AVX512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
#ifdef AVX_VNNI_KNOWN
    if (isa == AVX2_VNNI) return __builtin_cpu_supports("avxvnni") && dymoe_supports(AVX2);
#endif
    if (isa == AVX2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
#elif defined(NEON)  // bits that Linux will not change; the C library may not know the second
    if (isa == NEON_DOTPROD) return getauxval(AT_HWCAP) >> 20 & 1;
    if (isa == NEON_I8MM) return getauxval(AT_HWCAP2) >> 13 & 1;
#endif
    return isa == PORTABLE;
}

static Body body_of(int isa, bool sum) {
#ifdef X86
    if (isa >= AVX512) return sum ? avx512::weighted_sum : avx512::work;
#ifdef AVX_VNNI_KNOWN
    if (isa == AVX2_VNNI && !sum) return avx2_vnni::work;
#endif
    if (isa >= AVX2) return sum ? avx2::weighted_sum : avx2::work;
#elif defined(NEON)
    if (isa == NEON_I8MM) return sum ? neon_i8mm::weighted_sum : neon_i8mm::work;
    if (isa == NEON_DOTPROD) return sum ? neon_dotprod::weighted_sum : neon_dotprod::work;
#endif
    return sum ? portable::weighted_sum : portable::work;
}

static void run(Body body, void* argument, i64 threads, Parallel parallel) {
    if (parallel == nullptr || threads < 2) body(argument);
    else parallel(body, argument, unsigned(threads), 0);
}

#include "mapped.h"

// Runs the phases from layer->phase to layer->last: READ fills layer->inputs, GATE_UP layer->activations, DOWN
// layer->out; each waits for all threads. Returns 1, without doing anything, if READ finds a row that does not exist.
API int dymoe_experts(Layer* layer, int isa, Parallel parallel) {
    keep_guard();
    if (layer->phase == READ)
        for (i64 p = 0; p < layer->positions; p++)
            if (uint64_t(layer->rows[p]) >= uint64_t(layer->tokens) || uint64_t(layer->pairs[p]) >= uint64_t(layer->out_rows)) return 1;
    layer->floats = layer->floats && isa >= AVX512_BF16;
    layer->tiles = isa == AMX;
    for (; layer->phase <= layer->last; layer->phase++) {
        const i64 halves = layer->phase == READ ? layer->tokens * layer->hidden >> 14 : layer->threads;
        layer->next = 0;
        run(body_of(isa, false), layer, std::min(layer->threads, 1 + halves), parallel);
    }
    return 0;
}

// Floats in a row of layer->inputs and layer->activations.
API i64 dymoe_row_floats(i64 width) { return portable::Row::floats(width); }

API void dymoe_weighted_sum(Sum* sum, int isa, Parallel parallel) {
    sum->next = 0;
    run(body_of(isa, true), sum, sum->threads, parallel);
}

API void dymoe_round_block(Rounding* block, int isa) {
#ifdef X86
    if (isa >= AVX512) return avx512::round_block(block);
    if (isa >= AVX2) return avx2::round_block(block);
#elif defined(NEON)
    if (isa == NEON_I8MM) return neon_i8mm::round_block(block);
    if (isa == NEON_DOTPROD) return neon_dotprod::round_block(block);
#endif
    portable::round_block(block);
}

// Multiply a row of inputs with a router's weight; weight and products are rounded to the dtype.
static void scale_row(const uint16_t* x, float weight, i64 hidden, i64 dtype, uint16_t* into) {
    const auto rounded = [&](float value) {
        uint32_t bits;
        memcpy(&bits, &value, 4);
        return dtype == BFLOAT16 ? to_bfloat16(bits) : to_float16(bits);
    };
    weight = half_to_float(rounded(weight), dtype);
    for (i64 c = 0; c < hidden; c++) into[c] = rounded(half_to_float(x[c], dtype) * weight);
}

#include "cpu_queue.h"
#include "moe_layer.h"
#include "operator.h"

#ifndef SOURCES
#define SOURCES ""  // setup.py defines it
#endif
API const char* dymoe_sources() { return SOURCES; }

API i64 dymoe_sizes(int which) {
    const i64 sizes[] = {sizeof(Matrix), sizeof(Item), sizeof(Layer), sizeof(Sum), sizeof(Rounding), sizeof(QueueControl), sizeof(MoeLayer),
                         sizeof(TorchFunctions), sizeof(NativeStep)};
    return sizes[which];
}
