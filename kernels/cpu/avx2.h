// AVX2: two columns of a row side by side, 32 products in one instruction, whose sums of 16 bits are widened in time.
VECTORS_OF(8)
#define APART(v) asm("" : "+x"(v))
typedef long long Q __attribute__((vector_size(32)));
constexpr int QS = 4, STEP = 2, PER_Q = 2, FEW = 1, TILE_TOKENS = 2, TILE_REGISTERS = 2, TILE_VECTORS = 2;
constexpr bool WHOLE_BYTES = false;  // products of 8 by 8 bits do not fit 16

INLINE I load_words(const uint16_t* p) { return (I)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE I bytes_at(const uint8_t* p) { return (I)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }

// Rows in the order of unpacked bytes: vector v has rows r to r + 3 and r + 16 to r + 19.
INLINE int row_of(int v) { return (v >> 2) * 32 + ((v >> 1) & 1) * 8 + (v & 1) * 4; }
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
INLINE void reorder(float* out, int64_t n) {
    alignas(32) float rows[64];
    for (; n > 0; n--, out += 64) {
        memcpy(rows, out, sizeof(rows));
        for (int v = 0; v < 8; v++) {
            memcpy(out + row_of(v), rows + 8 * v, 16);
            memcpy(out + row_of(v) + 16, rows + 8 * v + 4, 16);
        }
    }
}

template <bool LEVEL, int BITS> INLINE void split(const uint8_t* p, int shift, Q out[QS]) {
    const __m256i a = _mm256_loadu_si256((const __m256i*)p), b = _mm256_loadu_si256((const __m256i*)(p + 32));
    const __m256i mask = _mm256_set1_epi8(BITS == 2 ? 3 : 15);
    const __m256i rows[2] = {_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b)};
    for (int i = 0; i < 2; i++) {
        __m256i low = BITS == 2 ? _mm256_srl_epi16(rows[i], _mm_cvtsi32_si128(shift)) : rows[i];
        __m256i high = BITS == 2 ? _mm256_srl_epi16(rows[i], _mm_cvtsi32_si128(4 + shift)) : _mm256_srli_epi16(rows[i], 4);
        low = _mm256_and_si256(low, mask);
        high = _mm256_and_si256(high, mask);
        if (LEVEL) {
            const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)TWICE_E2M1));
            low = _mm256_shuffle_epi8(table, low);
            high = _mm256_shuffle_epi8(table, high);
        }
        out[i] = (Q)low;
        out[2 + i] = (Q)high;
    }
}

// wide[t] = sums over `width` columns of the codes in R registers from r0 on times (256 * high + low) of token t.
template <bool LEVEL, int N, int R, class Fetch>
INLINE void exact_sums(const Fetch& fetch, const int8_t* const* low, const int8_t* const* high, int64_t column, int64_t width, int r0, I (*wide)[2 * R]) {
    constexpr int SPAN = LEVEL ? 8 : 16;  // sums of products of 0..15 (or 0..24) and -128..127 stay below 2^15
    for (int t = 0; t < N; t++) for (int v = 0; v < 2 * R; v++) wide[t][v] = I{};
    for (int64_t from = column; from < column + width; from += SPAN) {
        __m256i l[N][R], h[N][R];
        for (int t = 0; t < N; t++) for (int r = 0; r < R; r++) l[t][r] = h[t][r] = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int step = 0; step < SPAN; step += STEP) {
            const int64_t c = from + step;
            Q q[QS];
            fetch(c, r0, q);
            for (int t = 0; t < N; t++) {
                short word;
                memcpy(&word, low[t] + c, 2);
                const __m256i x0 = _mm256_set1_epi16(word);
                memcpy(&word, high[t] + c, 2);
                const __m256i x1 = _mm256_set1_epi16(word);
                for (int r = 0; r < R; r++) {
                    l[t][r] = _mm256_add_epi16(l[t][r], _mm256_maddubs_epi16((__m256i)q[r], x0));
                    h[t][r] = _mm256_add_epi16(h[t][r], _mm256_maddubs_epi16((__m256i)q[r], x1));
                    APART(l[t][r]);  // or GCC makes trees of these sums, and spills what it then holds
                    APART(h[t][r]);
                }
            }
        }
        const __m256i digits = _mm256_set1_epi32(1 | 256 << 16);
        for (int t = 0; t < N; t++) for (int r = 0; r < R; r++) {
            wide[t][2 * r] += (I)_mm256_madd_epi16(_mm256_unpacklo_epi16(l[t][r], h[t][r]), digits);
            wide[t][2 * r + 1] += (I)_mm256_madd_epi16(_mm256_unpackhi_epi16(l[t][r], h[t][r]), digits);
        }
    }
}
