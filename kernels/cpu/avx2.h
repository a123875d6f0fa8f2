// AVX2. With VNNI (its form for AVX2) four columns of a row are side by side, one instruction for 32 products; otherwise
// two columns, 32 products in one instruction, too, whose 16-bit sums are widened in time.
VECTORS_OF(8)
#define APART(v) asm("" : "+x"(v))
typedef __m256i Q;
#ifdef VNNI
constexpr int QS = 8, STEP = 4, COPIES = 1, PER_Q = 1;
constexpr int LARGEST_CODE = 255;
constexpr bool MULTIPLIES_UNCUT = true;
#else
constexpr int QS = 4, STEP = 2, COPIES = 2, PER_Q = 2;
constexpr int LARGEST_CODE = 24;  // for larger codes 16 bits are too few for a SPAN of products
constexpr bool MULTIPLIES_UNCUT = false;
#endif
constexpr int MOST_TOKENS = 2, ROWS_OF_MOST = 2, TILE_VECTORS = 2;
constexpr int BLOCKS_OF_ONE = 1;

INLINE I load_words(const uint16_t* p) { return (I)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)); }

// Rows in the order of unpacked bytes: vector v has rows r to r + 3 and r + 16 to r + 19.
INLINE int row_of(int v) {
    const int q = v / PER_Q;
    return 32 * (q & 1) + (q >> 1) * 4 * PER_Q + v % PER_Q * 4;
}
INLINE I ints_of(const int* p, int v) {
    const __m128i *low = (const __m128i*)(p + row_of(v)), *high = (const __m128i*)(p + row_of(v) + 16);
    return (I)_mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(low)), _mm_loadu_si128(high), 1);
}
INLINE I bytes_of(const uint8_t* p, int v) {
    int low, high;
    memcpy(&low, p + row_of(v), 4);
    memcpy(&high, p + row_of(v) + 16, 4);
    return (I)_mm256_cvtepu8_epi32(_mm_set_epi32(0, 0, high, low));
}
INLINE void store_rows(float* out, int v, F of_rows) {
    memcpy(out + row_of(v), &of_rows, 16);
    memcpy(out + row_of(v) + 16, (const char*)&of_rows + 16, 16);
}

struct Packed { __m256i of[STEP]; };  // one column each
struct Shifted { Packed packed; int bits; };
struct Merged { Packed high, low; int second; };
INLINE Packed packed(const uint8_t* p) {
    Packed columns;
    unroll<STEP>([&](auto c) LAMBDA { columns.of[c] = _mm256_loadu_si256((const __m256i*)(p + 32 * c)); });
    return columns;
}
INLINE Shifted shifted(Packed p, int bits) { return {p, bits}; }
INLINE Merged merged(Packed high, Packed low, int second) { return {high, low, second}; }

INLINE __m256i choose_bits(int mask, __m256i yes, __m256i no) {
    const __m256i bits = _mm256_set1_epi8((char)mask);
    return _mm256_or_si256(_mm256_and_si256(bits, yes), _mm256_andnot_si256(bits, no));
}
INLINE __m256i side_by_side(Packed p, int i) {  // rows from 4 * PER_Q * i on, and in the upper halves of bytes 32 more
    auto two = [&](int c) LAMBDA {
        return i * PER_Q & 2 ? _mm256_unpackhi_epi8(p.of[c], p.of[c + 1]) : _mm256_unpacklo_epi8(p.of[c], p.of[c + 1]);
    };
    if (STEP == 2) return two(0);
    return i & 1 ? _mm256_unpackhi_epi16(two(0), two(STEP - 2)) : _mm256_unpacklo_epi16(two(0), two(STEP - 2));
}
INLINE __m256i side_by_side(Shifted p, int i) { return _mm256_srl_epi16(side_by_side(p.packed, i), _mm_cvtsi32_si128(p.bits)); }
INLINE __m256i side_by_side(Merged p, int i) {  // two bits of each half of a byte, and two more below them
    const __m256i high = side_by_side(p.high, i), low = side_by_side(p.low, i);
    return p.second ? choose_bits(0xcc, high, _mm256_srli_epi16(low, 2)) : choose_bits(0xcc, _mm256_slli_epi16(high, 2), low);
}
template <int MASK, bool LEVEL, int R, class Bytes> INLINE void split(Bytes p, int first, Q* out) {
    for (int i = 0; i < R / 2; i++) {
        const __m256i rows = side_by_side(p, first / 2 + i), mask = _mm256_set1_epi8(MASK);
        out[2 * i] = MASK == UNCUT ? rows : _mm256_and_si256(rows, mask);
        out[2 * i + 1] = MASK == UNCUT ? _mm256_and_si256(rows, _mm256_set1_epi8((char)0xf0)) : _mm256_and_si256(_mm256_srli_epi16(rows, 4), mask);
        if (LEVEL) {
            const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)TWICE_E2M1));
            for (int h = 0; h < 2; h++) out[2 * i + h] = _mm256_shuffle_epi8(table, out[2 * i + h]);
        }
    }
}
// 4 * code + 2, or + 0 where the low bits of a point's eight codes have odd parity (kernels/lattice.py); `second` is 1 for
// the second half of columns that share bytes.
template <int R> INLINE void points(Packed p, int second, int first, Q* out) {
    split<3, false, R>(shifted(p, 2 * second), first, out);
    const __m256i words = _mm256_broadcastsi128_si256(_mm_setr_epi8(2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    for (int i = 0; i < R; i += 2) {  // four numbers of STEP bytes in a lane, and those 32 rows later
        __m256i parity = _mm256_xor_si256(out[i], out[i + 1]);
        parity = _mm256_xor_si256(parity, _mm256_shuffle_epi32(parity, STEP == 4 ? 0x4E : 0xB1));
        parity = _mm256_xor_si256(parity, STEP == 4 ? _mm256_shuffle_epi32(parity, 0xB1) : _mm256_shuffle_epi8(parity, words));
        parity = _mm256_andnot_si256(_mm256_slli_epi16(parity, 1), _mm256_set1_epi8(2));
        for (int half = i; half < i + 2; half++) out[half] = _mm256_or_si256(_mm256_slli_epi16(out[half], 2), parity);
    }
}
template <int R> INLINE void whole_bytes(Packed high, Packed low, int first, Q* out) {
    for (int i = 0; i < R / 2; i++) {
        const __m256i upper = side_by_side(high, first / 2 + i), lower = side_by_side(low, first / 2 + i);
        out[2 * i] = choose_bits(0xf0, _mm256_slli_epi16(upper, 4), lower);
        out[2 * i + 1] = choose_bits(0xf0, upper, _mm256_srli_epi16(lower, 4));
    }
}

#ifdef VNNI
#define ADD_PRODUCTS(sum, codes, factor) asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(codes), "x"(factor))
#include "vnni.h"
#else
// wide[t] = sums over WIDTH columns of the codes in R registers times (256 * high + low) of token t. No sum of SPAN
// products of 0..15 (or 8 of 0..24) and -128..127 exceeds 16 bits.
template <int WIDTH, int SPAN, int N, int R, int DIGITS, class Fetch, class Row>
INLINE void exact_sums(Fetch fetch, const Row* x, int64_t column, I (*wide)[2 * R]) {
    unroll<2 * N * R>([&](auto i) LAMBDA { wide[i / (2 * R)][i % (2 * R)] = I{}; });
#pragma GCC unroll 1
    for (int64_t from = column; from < column + WIDTH; from += SPAN) {
        __m256i low[N * R], high[N * R];
        unroll<N * R>([&](auto i) LAMBDA { low[i] = high[i] = _mm256_setzero_si256(); });
        unroll<SPAN / STEP>([&](auto step) LAMBDA {
            const int64_t c = from + STEP * step;
            Q q[R];
            fetch(c, q);
            unroll<N>([&](auto t) LAMBDA {
                auto add = [&](const int8_t* digits, __m256i* sums) LAMBDA {
                    int pair;  // twice: broadcasting 16 bits takes a shuffle
                    memcpy(&pair, digits + 2 * c, 4);
                    const __m256i factor = _mm256_set1_epi32(pair);
                    unroll<R>([&](auto r) LAMBDA {
                        sums[t * R + r] = _mm256_add_epi16(sums[t * R + r], _mm256_maddubs_epi16(q[r], factor));
                        APART(sums[t * R + r]);  // otherwise GCC makes trees of these sums, and spills registers
                    });
                };
                add(x[t].low, low);
                if constexpr (DIGITS == 2) add(x[t].high, high);
            });
        });
        const __m256i digits = _mm256_set1_epi32(1 | 256 << 16);
        unroll<N * R>([&](auto i) LAMBDA {
            I* to = wide[i / R] + 2 * (i % R);
            to[0] += (I)_mm256_madd_epi16(_mm256_unpacklo_epi16(low[i], high[i]), digits);
            to[1] += (I)_mm256_madd_epi16(_mm256_unpackhi_epi16(low[i], high[i]), digits);
        });
    }
}
#endif
