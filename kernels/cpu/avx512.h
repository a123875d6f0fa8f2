// AVX-512 with VNNI and VBMI: four columns of a row side by side, one instruction for 64 products.
VECTORS_OF(16)
#define APART(v) asm("" : "+v"(v))
typedef __m512i Q;
constexpr int QS = 4, STEP = 4, COPIES = 1, PER_Q = 1, MOST_TOKENS = 4, ROWS_OF_MOST = 2, TILE_VECTORS = 4;
constexpr int LARGEST_CODE = 255;
constexpr int BLOCKS_OF_ONE = 2;
constexpr bool MULTIPLIES_UNCUT = true;

INLINE I load_words(const uint16_t* p) { return (I)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }
INLINE int row_of(int v) { return 32 * (v & 1) + 16 * (v >> 1); }
INLINE I bytes_of(const uint8_t* p, int v) { return (I)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(p + row_of(v)))); }
INLINE I ints_of(const int* p, int v) { return *(const UnalignedInts*)(p + row_of(v)); }
INLINE void store_rows(float* out, int v, F of_rows) { *(Unaligned*)(out + row_of(v)) = of_rows; }

struct Packed { __m512i a, b; };  // two columns each
INLINE Packed packed(const uint8_t* p) { return {_mm512_loadu_si512(p), _mm512_loadu_si512(p + 64)}; }
INLINE Packed shifted(Packed p, int bits) {
    const __m128i count = _mm_cvtsi32_si128(bits);
    return {_mm512_srl_epi16(p.a, count), _mm512_srl_epi16(p.b, count)};
}
INLINE __m512i choose_bits(int mask, __m512i yes, __m512i no) { return _mm512_ternarylogic_epi32(_mm512_set1_epi8((char)mask), yes, no, 0xca); }
// Two bits of each half of a byte, and two more below them.
INLINE Packed merged(Packed high, Packed low, int second) {
    auto both = [&](__m512i h, __m512i l) LAMBDA {
        return second ? choose_bits(0xcc, h, _mm512_srli_epi16(l, 2)) : choose_bits(0xcc, _mm512_slli_epi16(h, 2), l);
    };
    return {both(high.a, low.a), both(high.b, low.b)};
}
INLINE __m512i side_by_side(Packed p, int i) {  // rows from 16 * i on, and in the upper halves of bytes 32 more
    alignas(64) static const uint8_t FIRST[64] = {
        0, 32, 64, 96,  1, 33, 65, 97,  2, 34, 66, 98,  3, 35, 67, 99,  4, 36, 68, 100, 5, 37, 69, 101,
        6, 38, 70, 102, 7, 39, 71, 103, 8, 40, 72, 104, 9, 41, 73, 105, 10, 42, 74, 106, 11, 43, 75, 107,
        12, 44, 76, 108, 13, 45, 77, 109, 14, 46, 78, 110, 15, 47, 79, 111};
    return _mm512_permutex2var_epi8(p.a, _mm512_add_epi8(_mm512_load_si512(FIRST), _mm512_set1_epi8((char)(16 * i))), p.b);
}
template <int MASK, bool LEVEL, int R> INLINE void split(Packed p, int first, Q* out) {
    for (int i = 0; i < R / 2; i++) {
        const __m512i rows = side_by_side(p, first / 2 + i), mask = _mm512_set1_epi8(MASK);
        out[2 * i] = MASK == UNCUT ? rows : _mm512_and_si512(rows, mask);
        out[2 * i + 1] = MASK == UNCUT ? _mm512_and_si512(rows, _mm512_set1_epi8((char)0xf0)) : _mm512_and_si512(_mm512_srli_epi16(rows, 4), mask);
        if (LEVEL) {
            const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)TWICE_E2M1));
            for (int h = 0; h < 2; h++) out[2 * i + h] = _mm512_shuffle_epi8(table, out[2 * i + h]);
        }
    }
}
// 4 * code + 2, or + 0 where the low bits of a point's eight codes have odd parity (kernels/lattice.py); `second` is 1 for
// the second half of columns that share bytes.
template <int R> INLINE void points(Packed p, int second, int first, Q* out) {
    split<3, false, R>(shifted(p, 2 * second), first, out);
    for (int i = 0; i < R; i += 2) {  // four dwords of a lane, and those 32 rows later
        __m512i parity = _mm512_xor_si512(out[i], out[i + 1]);
        parity = _mm512_xor_si512(parity, _mm512_shuffle_epi32(parity, _MM_PERM_BADC));
        parity = _mm512_slli_epi16(_mm512_xor_si512(parity, _mm512_shuffle_epi32(parity, _MM_PERM_CDAB)), 1);
        for (int half = i; half < i + 2; half++)  // 4 * code | (2 & ~parity)
            out[half] = _mm512_ternarylogic_epi64(_mm512_slli_epi16(out[half], 2), parity, _mm512_set1_epi8(2), 0xF2);
    }
}
template <int R> INLINE void whole_bytes(Packed high, Packed low, int first, Q* out) {
    const Packed lower = {choose_bits(0xf0, _mm512_slli_epi16(high.a, 4), low.a), choose_bits(0xf0, _mm512_slli_epi16(high.b, 4), low.b)};
    const Packed upper = {choose_bits(0xf0, high.a, _mm512_srli_epi16(low.a, 4)), choose_bits(0xf0, high.b, _mm512_srli_epi16(low.b, 4))};
    for (int i = 0; i < R / 2; i++) {
        out[2 * i] = side_by_side(lower, first / 2 + i);
        out[2 * i + 1] = side_by_side(upper, first / 2 + i);
    }
}

#define ADD_PRODUCTS(sum, codes, factor) asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(factor))
#include "vnni.h"
