// Products of pairs of bfloat16 (AVX512_BF16), for encodings without small integers: 16 bits and FP8, whose numbers are
// exact in bfloat16. With FP8 an activation is the sum of two bfloat16; with 16 bits it is rounded to one, as between
// vLLM's layers.
INLINE void add_pairs(F& sum, __m512i a, __m512i b) { asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }

// Sums of the lanes of four vectors, pairwise: in a quarter of the instructions, and always in the same order.
INLINE __m128 sums_of_lanes(const F* v) {
    auto halves = [](F a, F b) LAMBDA { return _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b)); };
    const __m512d ab = (__m512d)halves(v[0], v[1]), cd = (__m512d)halves(v[2], v[3]);
    const __m512 lanes = _mm512_add_ps((__m512)_mm512_unpacklo_pd(ab, cd), (__m512)_mm512_unpackhi_pd(ab, cd));
    const __m256 two = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
    return _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1));
}

template <int R, int N> INLINE void dot_pairs(const uint16_t* w, i64 columns, const Row* x, float* out) {
    F sum[N * 4] = {};  // four rows of each token, or R of them
    auto step = [&](i64 c, __mmask32 there) LAMBDA {
        __m512i weights[R];
        unroll<R>([&](auto r) LAMBDA {
            weights[r] = _mm512_maskz_loadu_epi16(there, w + r * columns + c);
            if (N == 1) __builtin_prefetch(w + (r + R) * columns + c);  // for the following rows
        });
        unroll<N>([&](auto t) LAMBDA {
            const __m512i values = _mm512_loadu_si512(x[t].pair + c);
            unroll<R>([&](auto r) LAMBDA { add_pairs(sum[4 * t + r], weights[r], values); });
        });
    };
    i64 c = 0;
    for (; c + 32 <= columns; c += 32) step(c, ~0u);
    if (c < columns) step(c, (1u << (columns - c)) - 1);
    unroll<N>([&](auto t) LAMBDA {
        alignas(16) float sums[4];
        _mm_store_ps(sums, sums_of_lanes(sum + 4 * t));
        memcpy(out + BLOCK * t, sums, R * sizeof(float));
    });
}
static void plain_pairs(const Matrix& m, const uint8_t* section, i64 block, const Row* x, i64 n, float* out) {
    const uint16_t* w = (const uint16_t*)section + BLOCK * block * m.columns;
    const i64 rows = m.rows - BLOCK * block < BLOCK ? m.rows - BLOCK * block : BLOCK;
    for (i64 t = 0; t < n; t++) for (i64 r = rows; r < BLOCK; r++) out[BLOCK * t + r] = 0;
    for (i64 r = 0; r < rows;) {  // a few rows stay in the nearest cache, for all tokens
        const bool four = r + 4 <= rows;
        const uint16_t* at = w + r * m.columns;
        i64 t = 0;
        for (; t + 4 <= n; t += 4) (four ? dot_pairs<4, 4> : dot_pairs<1, 4>)(at, m.columns, x + t, out + BLOCK * t + r);
        for (; t < n; t++) (four ? dot_pairs<4, 1> : dot_pairs<1, 1>)(at, m.columns, x + t, out + BLOCK * t + r);
        r += four ? 4 : 1;
    }
}

struct E4m3Bytes {         // of bfloat16, for the seven bits below the sign
    alignas(64) uint8_t high[128], low[128];
    E4m3Bytes() {
        for (int code = 0; code < 128; code++) {
            const float value = code < 8 ? code * 0x1p-9f : ldexpf(8 + code % 8, code / 8 - 10);
            uint32_t bits;
            memcpy(&bits, &value, 4);
            high[code] = uint8_t(bits >> 24), low[code] = uint8_t(bits >> 16);
        }
    }
};
template <int N> static void fp8_pairs(const Matrix& m, const uint8_t* section, Codes at, i64 block, const Row* x, float* out) {
    static const E4m3Bytes bytes;
    const __m512i high[2] = {_mm512_load_si512(bytes.high), _mm512_load_si512(bytes.high + 64)};
    const __m512i low[2] = {_mm512_load_si512(bytes.low), _mm512_load_si512(bytes.low + 64)};
    alignas(64) float total[N * BLOCK] = {};
    for (i64 group = 0; group < m.padded_columns / m.group; group++) {
        prefetch_scales(m, section, block, group + SCALES_AHEAD);
        Scales scales;
        scales_of(m, section, block, group, scales);
        F sum[N * 8];  // of register q rows 4 j and 4 j + 1 in lanes 4 j, then 4 j + 2 and 4 j + 3: two lanes a row
        unroll<N * 8>([&](auto i) LAMBDA { sum[i] = F{}; });
        for (i64 c = group * m.group; c < (group + 1) * m.group; c += STEP) {
            Q q[QS];
            prefetch_codes<EIGHT>(at, c);
            whole_bytes<QS>(packed(at.high + 32 * c), packed(at.low + 32 * c), 0, q);
            unroll<QS>([&](auto i) LAMBDA {
                const __m512i sign = _mm512_set1_epi8((char)0x80), lower = _mm512_permutex2var_epi8(low[0], q[i], low[1]);
                const __m512i upper = _mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(high[0], q[i], high[1]), q[i], sign, 0xf8);
                const __m512i first = _mm512_unpacklo_epi8(lower, upper), second = _mm512_unpackhi_epi8(lower, upper);
                unroll<N>([&](auto t) LAMBDA {
                    auto add = [&](const uint16_t* part) LAMBDA {
                        long long four;
                        memcpy(&four, part + c, 8);
                        add_pairs(sum[8 * t + 2 * i], first, _mm512_set1_epi64(four));
                        add_pairs(sum[8 * t + 2 * i + 1], second, _mm512_set1_epi64(four));
                    };
                    add(x[t].pair);
                    add(x[t].rest);
                });
            });
        }
        unroll<N * QS>([&](auto i) LAMBDA {
            const __m512 a = (__m512)sum[2 * i], b = (__m512)sum[2 * i + 1];
            const F of_rows = (F)_mm512_shuffle_ps(a, b, 0x88) + (F)_mm512_shuffle_ps(a, b, 0xdd);
            float* to = total + W * i;
            store(to, load(to) + load(scales.scale + W * (i % QS)) * of_rows);
        });
    }
    for (int t = 0; t < N; t++) for (int v = 0; v < VECTORS; v++) store_rows(out + BLOCK * t, v, load(total + BLOCK * t + W * v));
}
