// AVX-512 with VNNI and VBMI: four columns of a row side by side, one instruction for 64 products.
VECTORS_OF(16)
#define APART(v) asm("" : "+v"(v))
typedef long long Q __attribute__((vector_size(64)));
constexpr int QS = 4, STEP = 4, PER_Q = 1, FEW = 2, TILE_TOKENS = 2, TILE_REGISTERS = 4, TILE_VECTORS = 4;
constexpr bool WHOLE_BYTES = true;  // products of 8 by 8 bits are added exactly

INLINE I load_words(const uint16_t* p) { return (I)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }
INLINE I bytes_at(const uint8_t* p) { return (I)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE I bytes_of(const uint8_t* p, int v) { return bytes_at(p + W * v); }
INLINE I ints_of(const int* p, int v) { return *(const UnalignedInts*)(p + W * v); }
INLINE void reorder(float*, int64_t) {}

template <bool LEVEL, int BITS> INLINE void split(const uint8_t* p, int shift, Q out[QS]) {
    alignas(64) static const uint8_t FIRST[64] = {
        0, 32, 64, 96,  1, 33, 65, 97,  2, 34, 66, 98,  3, 35, 67, 99,  4, 36, 68, 100, 5, 37, 69, 101,
        6, 38, 70, 102, 7, 39, 71, 103, 8, 40, 72, 104, 9, 41, 73, 105, 10, 42, 74, 106, 11, 43, 75, 107,
        12, 44, 76, 108, 13, 45, 77, 109, 14, 46, 78, 110, 15, 47, 79, 111};
    const __m512i first = _mm512_load_si512(FIRST), second = _mm512_add_epi8(first, _mm512_set1_epi8(16));
    const __m512i a = _mm512_loadu_si512(p), b = _mm512_loadu_si512(p + 64), mask = _mm512_set1_epi8(BITS == 2 ? 3 : 15);
    const __m512i rows[2] = {_mm512_permutex2var_epi8(a, first, b), _mm512_permutex2var_epi8(a, second, b)};
    for (int i = 0; i < 2; i++) {
        __m512i low = BITS == 2 ? _mm512_srl_epi16(rows[i], _mm_cvtsi32_si128(shift)) : rows[i];
        __m512i high = BITS == 2 ? _mm512_srl_epi16(rows[i], _mm_cvtsi32_si128(4 + shift)) : _mm512_srli_epi16(rows[i], 4);
        low = _mm512_and_si512(low, mask);
        high = _mm512_and_si512(high, mask);
        if (LEVEL) {
            const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)TWICE_E2M1));
            low = _mm512_shuffle_epi8(table, low);
            high = _mm512_shuffle_epi8(table, high);
        }
        out[i] = (Q)low;
        out[2 + i] = (Q)high;
    }
}

// wide[t] = sums over `width` columns of the codes in R registers from r0 on times (256 * high + low) of token t. Sums are
// variables with names, and products written out: GCC keeps arrays of them in memory, and copies them around its builtin.
template <bool LEVEL, int N, int R, class Fetch>
INLINE void exact_sums(const Fetch& fetch, const int8_t* const* low, const int8_t* const* high, int64_t column, int64_t width, int r0, I (*wide)[R]) {
    static_assert(N <= 2 && R == 4, "one sum for each of two tokens, two digits and four registers of rows");
#define SUMS(r) __m512i l0_##r = _mm512_setzero_si512(), h0_##r = l0_##r, l1_##r = l0_##r, h1_##r = l0_##r;
#define PRODUCT(sum, r, x) asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(q[r]), "v"(x));
#define TOKEN(t)                                                                                              \
    {                                                                                                         \
        int digits;                                                                                           \
        memcpy(&digits, low[t] + c, 4);                                                                       \
        const __m512i x0 = _mm512_set1_epi32(digits);                                                         \
        memcpy(&digits, high[t] + c, 4);                                                                      \
        const __m512i x1 = _mm512_set1_epi32(digits);                                                         \
        PRODUCT(l##t##_0, 0, x0) PRODUCT(l##t##_1, 1, x0) PRODUCT(l##t##_2, 2, x0) PRODUCT(l##t##_3, 3, x0)     \
        PRODUCT(h##t##_0, 0, x1) PRODUCT(h##t##_1, 1, x1) PRODUCT(h##t##_2, 2, x1) PRODUCT(h##t##_3, 3, x1)     \
    }
#define WIDE(t, r) wide[t][r] = (I)l##t##_##r + ((I)h##t##_##r << 8);
    SUMS(0) SUMS(1) SUMS(2) SUMS(3)
    for (int64_t c = column; c < column + width; c += STEP) {
        Q q[QS];
        fetch(c, r0, q);
        TOKEN(0)
        if constexpr (N == 2) TOKEN(1)
    }
    WIDE(0, 0) WIDE(0, 1) WIDE(0, 2) WIDE(0, 3)
    if constexpr (N == 2) { WIDE(1, 0) WIDE(1, 1) WIDE(1, 2) WIDE(1, 3) }
#undef SUMS
#undef PRODUCT
#undef TOKEN
#undef WIDE
}
