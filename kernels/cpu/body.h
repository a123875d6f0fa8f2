// One layer's step for one instruction set; experts.cpp includes this file once for each, in its own namespace.
//
// Activations are integers of 16 bits with a power of two for each UNIT of them, in two digits of 8 bits, so that sums
// of codes times activations are exact. Floats are added unit by unit and group by group, for each row and token
// separately: bits depend neither on other rows and tokens nor on threads, and the loops differ only in what they hold
// in registers. FP8 and 16 bits, whose codes are no small integers, are multiplied as float32 in the same order.

constexpr int BLOCK = 64;             // rows that are interleaved
constexpr int VECTORS = BLOCK / W;    // float vectors in one column of a block
constexpr int UNIT = 32;              // activations that share a power of two
constexpr int CHUNK = 64;             // columns that are unpacked at a time, if many tokens share them
constexpr int BATCH = 32;             // most tokens that share unpacked codes
constexpr int MOST_BLOCKS = 2;        // most blocks in a piece of work
// Distance of prefetching, in bytes: into the first cache, and on Intel's processors into the second.
constexpr i64 AHEAD = 768, FAR_AHEAD = 4096;
constexpr int SCALES_AHEAD = 4;       // groups whose scales are prefetched

INLINE F load(const float* p) { return *(const Unaligned*)p; }
INLINE void store(float* p, F v) { *(Unaligned*)p = v; }
INLINE F all(float v) { return v - F{}; }
INLINE I all_bits(int v) { return v - I{}; }
INLINE F as_float(I v) { return (F)v; }
INLINE F to_float(I v) { return __builtin_convertvector(v, F); }
INLINE F choose(I mask, F yes, F no) { return as_float((mask & (I)yes) | (~mask & (I)no)); }

INLINE F widen(I half, i64 dtype) {
    if (dtype == BFLOAT16) return as_float(half << 16);
    I magnitude = (half & 0x7fff) << 13, sign = (half & 0x8000) << 16;
    F finite = as_float(magnitude) * all(0x1p112f);
    return choose(magnitude >= all_bits(31 << 23), as_float(magnitude | 0x7f800000 | sign),
                  as_float((I)finite | sign));
}
INLINE F halves(const uint16_t* p, i64 dtype) { return widen(load_words(p), dtype); }

INLINE F e4m3(I code) {
    I low = code & 0x7f, sign = (code & 0x80) << 24;
    F normal = as_float((low << 20) + (120 << 23)), small = to_float(low & 7) * all(0x1p-9f);
    return as_float((I)choose(low < all_bits(8), small, normal) | sign);
}

INLINE F exponential(F x) {  // Cephes' expf, accurate to about 1 ulp
    x = choose(x < all(-87.0f), all(-87.0f), choose(x > all(88.0f), all(88.0f), x));
    F shifted = x * all(1.44269504088896341f) + all(0x1.8p23f), n = shifted - all(0x1.8p23f);
    F r = x - n * all(0.693359375f) + n * all(2.12194440e-4f), p = all(1.9875691500e-4f);
    for (float term : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = p * r + all(term);
    p = p * (r * r) + (r + all(1.0f));
    return p * as_float((__builtin_convertvector(n, I) + 127) << 23);
}
INLINE F least(F a, F b) { return choose(b < a, b, a); }   // NaN in a stays
INLINE F most(F a, F b) { return choose(b > a, b, a); }

INLINE float sum_of_lanes(F v) {  // from a copy, or the compiler keeps sums in memory for their lanes
    float lanes[W];
    memcpy(lanes, &v, sizeof(lanes));
    for (int half = W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}
template <class Function> INLINE F each(F v, Function function) {
    for (int i = 0; i < W; i++) v[i] = function(v[i]);
    return v;
}
INLINE float power_of_two(int power) {  // -126 to 127
    const int bits = (power + 127) << 23;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
INLINE F sigmoid(F x) { return all(1.0f) / (all(1.0f) + exponential(-x)); }

// The curve of a gate g and an up projection u: activation.py has the formulas.
INLINE F activate(const Layer& k, F g, F u) {
    const F limit = all((float)k.limit), alpha = all((float)k.alpha), beta = all((float)k.beta);
    const bool bounded = k.limit < 3e38;
    switch (k.curve) {
        case SWIGLU:
            if (bounded) { g = least(g, limit); u = most(least(u, limit), -limit); }
            return g * sigmoid(g * alpha) * (u + beta);
        case SWIGLU_STEP: return least(g * sigmoid(g), limit) * most(least(u, limit), -limit);
        case SITU: {
            auto tanh_of = [](float v) { return tanhf(v); };
            if (bounded) u = each(u / limit, tanh_of) * limit;
            return each(g / beta, tanh_of) * beta * sigmoid(g) * u;
        }
        case GELU: return each(g, [](float v) { return 0.5f * v * (1.0f + erff(v * 0.70710678f)); }) * u;
        case GELU_TANH:
            return each(g, [](float v) { return 0.5f * v * (1 + tanhf(0.79788456f * (v + 0.044715f * v * v * v))); }) * u;
        default: { F positive = most(g, F{}); return positive * positive * u; }
    }
}

INLINE void narrow(const float* from, uint16_t* to, i64 count, i64 dtype) {
    for (i64 i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, from + i, 4);
        to[i] = dtype == BFLOAT16 ? to_bfloat16(bits) : to_float16(bits);
    }
}

// ---- activations -------------------------------------------------------------------------------------------------------

struct Row {               // one token's activations, padded with zeros
    float* x;
    // Digits: x = scale * (256 * high + low); STEP of them COPIES times, in the order of the products.
    int8_t *low, *high;
    float *scale, *sum;    // per UNIT; scaled sums of each 16, then of each 32, then of each 64
    uint16_t *pair, *rest; // bfloat16, and the remainder, if products are of pairs of these
    i64 width;
    INLINE Row() {}
    INLINE Row(float* memory, i64 width)
        : x(memory), low((int8_t*)(memory + width)), high(low + 2 * width), scale((float*)(high + 2 * width)), sum(scale + width / UNIT),
          pair((uint16_t*)(sum + 7 * width / 64)), rest(pair + width), width(width) {}
    static i64 floats(i64 width) { return width + width + width / UNIT + 7 * width / 64 + width; }

    INLINE void pairs(i64 column) const {  // of BLOCK columns, from x
        for (i64 c = column; c < column + BLOCK; c++) {
            uint32_t bits, left;
            memcpy(&bits, x + c, 4);
            pair[c] = to_bfloat16(bits);
            const float difference = x[c] - half_to_float(pair[c], BFLOAT16);
            memcpy(&left, &difference, 4);
            rest[c] = to_bfloat16(left);
        }
    }
    INLINE void integers(i64 column, i64 digits) const {  // of BLOCK columns, from x
        for (i64 c = column; c < column + BLOCK; c += UNIT) {
            const float* v = x + c;
            int bits[UNIT], q[UNIT] = {}, largest_bits = 0, sums[2] = {0, 0};
            memcpy(bits, v, sizeof(bits));
            for (int i = 0; i < UNIT; i++) largest_bits = std::max(largest_bits, bits[i] & 0x7fffffff);  // floats without sign sort as integers
            const bool finite = largest_bits < 0x7f800000;
            float largest, factor, inverse;
            memcpy(&largest, &largest_bits, 4);
            if (digits == 2) {
                int power = largest_bits ? std::max((largest_bits >> 23) - 126, -100) : 0;
                if (largest * power_of_two(15 - power) > 32639.0f) power++;  // its high digit would not fit
                inverse = power_of_two(15 - power), factor = power_of_two(power - 15);
            } else {
                factor = largest / 127, inverse = largest > 1e-30f ? 127 / largest : 0;
            }
            if (finite) for (int i = 0; i < UNIT; i++) q[i] = (int)(v[i] * inverse + 0x1.8p23f - 0x1.8p23f);
            else factor = NAN;
            for (int i = 0; i < 16; i++) sums[0] += q[i];
            for (int i = 16; i < UNIT; i++) sums[1] += q[i];
            int8_t lows[UNIT], highs[UNIT];
            for (int i = 0; i < UNIT; i++) lows[i] = (int8_t)q[i];
            for (int i = 0; i < UNIT; i++) highs[i] = (int8_t)((q[i] - lows[i]) >> 8);
            constexpr int PIECE = COPIES == 1 ? UNIT : STEP;
            for (int i = 0; i < UNIT; i += PIECE) {
                for (int copy = 0; copy < COPIES; copy++) {
                    memcpy(low + COPIES * (c + i) + STEP * copy, lows + i, PIECE);
                    memcpy(high + COPIES * (c + i) + STEP * copy, highs + i, PIECE);
                }
            }
            scale[c / UNIT] = factor;
            sum[c / 16] = factor * sums[0];
            sum[c / 16 + 1] = factor * sums[1];
            sum[width / 16 + c / 32] = factor * (sums[0] + sums[1]);
        }
        const float* halves = sum + width / 16 + column / 32;
        sum[width / 16 + width / 32 + column / 64] = halves[0] + halves[1];
    }
    INLINE float group_sum(uint64_t begin, uint64_t columns) const {
        if (columns == 16) return sum[begin / 16];
        if (columns == 32) return sum[width / 16 + begin / 32];
        float total = 0;
        for (uint64_t c = begin; c < begin + columns; c += 64) total += sum[width / 16 + width / 32 + c / 64];
        return total;
    }
};

// ---- codes -------------------------------------------------------------------------------------------------------------

struct Codes {             // where the codes of a block begin
    const uint8_t* high;   // whole codes, upper halves, or the plane of the high four bits
    const uint8_t* low;    // lower halves, or the plane of the low four bits
};
enum Kind { FOUR, LEVELS, TWO, TWO_AND_TWO, EIGHT, POINTS, TWO_POINTS };
// Number of low bits that are multiplied separately from the high ones, or 0.
constexpr int in_planes(Kind kind) { return kind == EIGHT && LARGEST_CODE < 255 ? 4 : kind == TWO_POINTS && LARGEST_CODE < 70 ? 2 : 0; }

// Whether bytes of two rows' codes are multiplied whole, and beside them 16 times the upper code. The lower row's exact
// sum is the difference, so that one mask replaces two and a shift.
constexpr bool uncut(Kind kind) { return MULTIPLIES_UNCUT && (kind == FOUR || kind == TWO_AND_TWO); }

// STEP columns of a block, as bytes in R registers Q from `first` on. With MASK = UNCUT they are as `uncut` says.
template <Kind kind, int R, int MASK = 15> INLINE void codes(Codes at, i64 column, i64 fold, int first, Q* out) {
    if constexpr (kind == FOUR || (kind == EIGHT && in_planes(kind))) {
        split<MASK, false, R>(packed(at.high + 32 * column), first, out);
    } else if constexpr (kind == LEVELS) {
        split<15, true, R>(packed(at.high + 32 * column), first, out);
    } else if constexpr (kind == EIGHT) {
        whole_bytes<R>(packed(at.high + 32 * column), packed(at.low + 32 * column), first, out);
    } else {  // byte j of a fold has columns j and j + fold / 2; fold is a power of two
        const i64 half = fold / 2, place = 16 * (column & -fold) + 32 * (column & (half - 1));
        const int second = (column & half) != 0;
        if constexpr (kind == POINTS || kind == TWO_POINTS) {
            points<R>(packed(at.high + place), second, first, out);
            if constexpr (kind == TWO_POINTS && !in_planes(kind)) {
                Q residual[R];
                points<R>(packed(at.low + place), second, first, residual);
                for (int i = 0; i < R; i++) out[i] = (out[i] << 2) + residual[i];
            }
        } else if constexpr (kind == TWO) split<3, false, R>(shifted(packed(at.high + place), 2 * second), first, out);
        else split<MASK, false, R>(merged(packed(at.high + place), packed(at.low + place), second), first, out);
    }
}

struct Scales { alignas(64) float scale[BLOCK], offset[BLOCK]; };  // by vector: weight = number * scale + offset

// As `steps`: zeros count steps of their scale.
template <bool HALF, bool STEPS> INLINE void pairs_of(const int* pairs, F step, F center, Scales& to) {
    unroll<VECTORS>([&](auto v) LAMBDA {
        const I pair = ints_of(pairs, v);
        const F s = HALF ? widen(pair & 0xffff, FLOAT16) : as_float(pair << 16);
        const F z = HALF ? widen((pair >> 16) & 0xffff, FLOAT16) : as_float(pair & (int)0xffff0000);
        store(to.offset + W * v, STEPS ? (z - center) * s : z - center * s);
        store(to.scale + W * v, s * step);
    });
}
static __attribute__((noinline)) void scales_of(const Matrix& m, const uint8_t* section, i64 block, i64 group, Scales& to) {
    const i64 at = (block * (m.padded_columns / m.group) + group) * BLOCK;
    const uint8_t* scales = section + m.scales;
    const F step = all((float)m.step), center = all((float)m.center);
    if (m.scale == SCALE_AND_ZERO) {
        const int* pairs = (const int*)scales + group * m.padded_rows + BLOCK * block;
        if (m.zeros == 0) return pairs_of<false, false>(pairs, step, center, to);
        if (m.zeros == 1) return pairs_of<false, true>(pairs, step, center, to);
        if (m.zeros == 2) return pairs_of<true, false>(pairs, step, center, to);
        return pairs_of<true, true>(pairs, step, center, to);
    }
    if (m.scale >= LOW_SCALE) {
        for (int v = 0; v < VECTORS; v++) {
            const I pair = ints_of((const int*)scales + BLOCK * block, v);
            const F s = widen((m.scale == LOW_SCALE ? pair : pair >> 16) & 0xffff, m.zeros & 2 ? FLOAT16 : BFLOAT16);
            store(to.scale + W * v, s * step);
            store(to.offset + W * v, -center * s);
        }
        return;
    }
    const i64 kind = m.scale;
    for (int v = 0; v < VECTORS; v++) {
        F s;
        if (kind == E8M0) {
            I power = bytes_of(scales + at, v);  // 2^(power - 127), of which the smallest is a denormal float
            s = choose(power == 0, all(0x1p-127f), as_float(power << 23));
        } else if (kind == SCALE_E4M3) {
            s = e4m3(bytes_of(scales + at, v));
        } else {
            s = as_float(ints_of((const int*)scales + at, v));
        }
        store(to.scale + W * v, s * step);
        store(to.offset + W * v, -center * (s * step));
    }
}

// A group's scales are far from those of the next one, so hardware prefetchers do not find them.
INLINE void prefetch_scales(const Matrix& m, const uint8_t* section, i64 block, i64 group) {
    if (group >= m.padded_columns / m.group) return;
    const uint8_t* at = section + m.scales;
    if (m.scale == SCALE_AND_ZERO) {
        at += 4 * (group * m.padded_rows + BLOCK * block);
        for (int i = 0; i < 4 * BLOCK; i += 64) __builtin_prefetch(at + i);
    } else {
        __builtin_prefetch(at + (block * (m.padded_columns / m.group) + group) * BLOCK * (m.scale == FLOAT32 ? 4 : 1));
    }
}

// ---- a block of 64 rows times some tokens ------------------------------------------------------------------------------

// total [N][V] += scale * sums + offset * of_group, the group's sum, for vectors from `first` on; a group's last step.
template <int N, int V> INLINE void end_group(const Scales& scales, const float* of_group, int first, F (*sums)[V], float* total) {
    unroll<N * V>([&](auto i) LAMBDA {
        constexpr int t = i / V, v = i % V;
        float* to = total + BLOCK * t + W * (first + v);
        F sum = load(to);
        sum += load(scales.scale + W * (first + v)) * sums[t][v];
        sum += load(scales.offset + W * (first + v)) * all(of_group[t]);
        store(to, sum);
    });
}

// Intel's own prefetchers stop at a page's end: with codes from further ahead one token takes three quarters of the time
// (Xeon with AMX). On an EPYC 9004 AVX2 loses a fifth without prefetching, and AVX-512 a tenth with it.
template <Kind kind> INLINE void prefetch_codes(Codes at, i64 column) {
    constexpr bool two = kind == TWO || kind == TWO_AND_TWO || kind == POINTS || kind == TWO_POINTS;
    constexpr bool low = kind == TWO_AND_TWO || kind == EIGHT || kind == TWO_POINTS;
    constexpr int bytes_of_column = two ? 16 : 32;
    for (int i = 0; i < STEP * bytes_of_column; i += 64) {
        const i64 from = bytes_of_column * column + i;
        if (INTEL) {
            __builtin_prefetch(at.high + from + FAR_AHEAD, 0, 2);
            if (low) __builtin_prefetch(at.low + from + FAR_AHEAD, 0, 2);
        } else if (W < 16) {
            __builtin_prefetch(at.high + from + AHEAD);
            if (low) __builtin_prefetch(at.low + from + AHEAD);
        }
    }
}

// N tokens, R registers of rows at a time; codes are unpacked where they are multiplied. 8-bit codes in planes are 16
// times the high plane plus the low one, combined as exact sums of a unit. B adjacent blocks, `stride` bytes apart, are
// multiplied together; out is [B][N][BLOCK].
template <Kind kind, int N, int R, int DIGITS, int WIDTH, int B = 1>
static void strip(const Matrix& m, const uint8_t* section, Codes at, i64 stride, i64 block, const Row* x, float* out) {
    constexpr int V = PER_Q * R;
    static_assert(B == 1 || (R == QS && !in_planes(kind)), "blocks have all their rows in registers");
    alignas(64) float total[B * N * BLOCK] = {};
    for (int b = 0; b < B; b++) for (int group = 0; group < SCALES_AHEAD; group++) prefetch_scales(m, section, block + b, group);
    const i64 groups = m.padded_columns / m.group;
    for (i64 group = 0; group < groups; group++) {
        const i64 begin = group * m.group, end = begin + m.group;
        Scales scales[B];
        for (int b = 0; b < B; b++) {
            prefetch_scales(m, section, block + b, group + SCALES_AHEAD);
            scales_of(m, section, block + b, group, scales[b]);
        }
        float of_group[N];
        for (int t = 0; t < N; t++) of_group[t] = x[t].group_sum(begin, m.group);
        unroll<QS / R>([&](auto part) LAMBDA {
            constexpr int first = decltype(part)::value * R;
            F sums[B][N][V];
            unroll<B * N * V>([&](auto i) LAMBDA { sums[i / (N * V)][i / V % N][i % V] = F{}; });
            asm volatile("" ::: "memory");  // or GCC keeps totals in the registers that a group's sums need
            for (i64 column = begin; column < end; column += WIDTH) {
                I wide[N][B * V];
                exact_sums<WIDTH, kind == LEVELS ? 8 : 16, N, B * R, DIGITS>([&](i64 c, Q* q) LAMBDA {
                    unroll<B>([&](auto b) LAMBDA {
                        const Codes of_block = {at.high + b * stride, at.low + b * stride};
                        if (first == 0) prefetch_codes<kind>(of_block, c);
                        codes<kind, R, uncut(kind) ? UNCUT : 15>(of_block, c, m.fold, first, q + R * b);
                    });
                }, x, column, wide);
                if constexpr (uncut(kind))
                    unroll<N * B * V / 2>([&](auto i) LAMBDA {
                        I *lower = wide[i / (B * V / 2)] + 2 * (i % (B * V / 2)), *upper = lower + 1;
                        *lower -= *upper;
                        *upper >>= 4;
                    });
                if constexpr (in_planes(kind)) {
                    I residual[N][V];
                    exact_sums<WIDTH, 16, N, R, DIGITS>([&](i64 c, Q* q) LAMBDA { codes<kind, R>({at.low, nullptr}, c, m.fold, first, q); }, x, column, residual);
                    unroll<N * V>([&](auto i) LAMBDA { wide[i / V][i % V] = (wide[i / V][i % V] << in_planes(kind)) + residual[i / V][i % V]; });
                }
                unroll<N>([&](auto t) LAMBDA {
                    const F scale = all(x[t].scale[uint64_t(column) / UNIT]);
                    unroll<B * V>([&](auto v) LAMBDA { sums[v / V][t][v % V] += to_float(wide[t][v]) * scale; });
                });
            }
            unroll<B>([&](auto b) LAMBDA { end_group<N, V>(scales[b], of_group, PER_Q * first, sums[b], total + b * N * BLOCK); });
        });
    }
    for (int t = 0; t < B * N; t++) for (int v = 0; v < VECTORS; v++) store_rows(out + BLOCK * t, v, load(total + BLOCK * t + W * v));
}

#ifdef TILES
#include "amx.h"
#endif

constexpr int ROWS_OF_ONE = std::min(QS, MOST_TOKENS * ROWS_OF_MOST);  // no more sums than with the most tokens
template <Kind kind, int DIGITS, int WIDTH>
static void strips(const Matrix& m, const uint8_t* section, Codes at, i64 stride, i64 block, i64 blocks, const Row* x, i64 n, const Layer& k, float* out) {
    if constexpr (BLOCKS_OF_ONE == 2)
        if (n == 1 && blocks == 2) return strip<kind, 1, QS, DIGITS, WIDTH, 2>(m, section, at, stride, block, x, out);
    for (i64 last = block + blocks; block < last; block++, at.high += stride, at.low += stride) {
        const Row* from = x;
        i64 left = n;
#ifdef TILES
        if (k.tiles && n >= FEWEST) tiled<kind, DIGITS, WIDTH>(m, section, at, block, x, n, out), left = 0, out += n * BLOCK;
#endif
        for (; left >= MOST_TOKENS; left -= MOST_TOKENS, from += MOST_TOKENS, out += MOST_TOKENS * BLOCK)
            strip<kind, MOST_TOKENS, ROWS_OF_MOST, DIGITS, WIDTH>(m, section, at, stride, block, from, out);
        if constexpr (MOST_TOKENS > 2 && DIGITS == 2)
            for (; left >= 2; left -= 2, from += 2, out += 2 * BLOCK) strip<kind, 2, ROWS_OF_MOST, DIGITS, WIDTH>(m, section, at, stride, block, from, out);
        for (; left > 0; left--, from++, out += BLOCK) strip<kind, 1, ROWS_OF_ONE, DIGITS, WIDTH>(m, section, at, stride, block, from, out);
    }
}
template <Kind kind>
static void quantized(const Matrix& m, const uint8_t* section, Codes at, i64 stride, i64 block, i64 blocks, const Row* x, i64 n, const Layer& k, float* out) {
    if constexpr (kind == LEVELS)
        if (m.group < UNIT) return (k.digits == 2 ? strips<kind, 2, 16> : strips<kind, 1, 16>)(m, section, at, stride, block, blocks, x, n, k, out);
    (k.digits == 2 ? strips<kind, 2, UNIT> : strips<kind, 1, UNIT>)(m, section, at, stride, block, blocks, x, n, k, out);
}

// FP8: codes become float32 before they are multiplied.
template <int N> INLINE void multiply(const float* tile, i64 columns, const Row* x, i64 from, float* sums, int v0) {
    constexpr int V = TILE_VECTORS;
    F sum[N][V];
    for (int t = 0; t < N; t++) for (int v = 0; v < V; v++) sum[t][v] = load(sums + BLOCK * t + W * (v0 + v));
    for (i64 c = 0; c < columns; c++) {
        F w[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) w[v] = load(tile + BLOCK * c + W * (v0 + v));
#pragma GCC unroll 8
        for (int t = 0; t < N; t++) {
            F factor = all(x[t].x[from + c]);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) sum[t][v] += w[v] * factor;
        }
    }
    for (int t = 0; t < N; t++) for (int v = 0; v < V; v++) store(sums + BLOCK * t + W * (v0 + v), sum[t][v]);
}

static void floats(const Matrix& m, const uint8_t* section, Codes at, i64 block, const Row* x, i64 n, float* out) {
    constexpr i64 COLUMNS = 16;
    alignas(64) float tile[COLUMNS * BLOCK], sums[BATCH * BLOCK], total[BATCH * BLOCK];
    memset(total, 0, n * BLOCK * sizeof(float));
    for (i64 group = 0; group < m.padded_columns / m.group; group++) {
        const i64 end = (group + 1) * m.group;
        memset(sums, 0, n * BLOCK * sizeof(float));
        for (i64 from = group * m.group; from < end; from += COLUMNS) {
            for (i64 c = 0; c < COLUMNS; c++) {
                __builtin_prefetch(at.high + 32 * (from + c) + AHEAD);
                __builtin_prefetch(at.low + 32 * (from + c) + AHEAD);
                const uint8_t *high = at.high + 32 * (from + c), *low = at.low + 32 * (from + c);
                uint8_t code[BLOCK];
                for (int i = 0; i < 32; i++) code[i] = uint8_t(high[i] << 4 | (low[i] & 15)), code[32 + i] = uint8_t((high[i] & 0xf0) | low[i] >> 4);
                for (int v = 0; v < VECTORS; v++) store(tile + BLOCK * c + W * v, e4m3(bytes_of(code, v)));
            }
            for (int v0 = 0; v0 < VECTORS; v0 += TILE_VECTORS) {
                i64 t = 0;
                for (; t + 4 <= n; t += 4) multiply<4>(tile, COLUMNS, x + t, from, sums + BLOCK * t, v0);
                for (; t < n; t++) multiply<1>(tile, COLUMNS, x + t, from, sums + BLOCK * t, v0);
            }
        }
        const float nothing = 0;  // levels have no offset
        Scales scales;
        scales_of(m, section, block, group, scales);
        for (i64 t = 0; t < n; t++) {
            F of_rows[1][VECTORS];
            for (int v = 0; v < VECTORS; v++) of_rows[0][v] = load(sums + BLOCK * t + W * v);
            end_group<1, VECTORS>(scales, &nothing, 0, of_rows, total + BLOCK * t);
        }
    }
    for (i64 t = 0; t < n; t++) for (int v = 0; v < VECTORS; v++) store_rows(out + BLOCK * t, v, load(total + BLOCK * t + W * v));
}

// 16 bits: rows [rows, columns] as stored; a sum is W partial sums over the columns, added in order.
template <int R, int N> INLINE void dot(const uint16_t* w, i64 columns, i64 dtype, const Row* x, float* out) {
    F sum[R][N];
    for (int r = 0; r < R; r++) for (int t = 0; t < N; t++) sum[r][t] = F{};
    i64 c = 0;
    for (; c + W <= columns; c += W) {
        F weights[R];
        for (int r = 0; r < R; r++) {
            weights[r] = halves(w + r * columns + c, dtype);
            if (N == 1) __builtin_prefetch(w + (r + R) * columns + c);  // for the following rows
        }
        for (int t = 0; t < N; t++) {
            F values = load(x[t].x + c);
            for (int r = 0; r < R; r++) sum[r][t] += weights[r] * values;
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int t = 0; t < N; t++) {
        float total = sum_of_lanes(sum[r][t]);
        for (i64 d = c; d < columns; d++) total += half_to_float(w[r * columns + d], dtype) * x[t].x[d];
        out[BLOCK * t + r] = total;
    }
}

static void plain(const Matrix& m, const uint8_t* section, i64 block, const Row* x, i64 n, i64 dtype, float* out) {
    const uint16_t* w = (const uint16_t*)section + BLOCK * block * m.columns;
    const i64 rows = m.rows - BLOCK * block < BLOCK ? m.rows - BLOCK * block : BLOCK;
    i64 t = 0;
    for (; t + 4 <= n; t += 4) {
        i64 r = 0;
        for (; r + TILE_VECTORS <= rows; r += TILE_VECTORS) dot<TILE_VECTORS, 4>(w + r * m.columns, m.columns, dtype, x + t, out + BLOCK * t + r);
        for (; r < rows; r++) dot<1, 4>(w + r * m.columns, m.columns, dtype, x + t, out + BLOCK * t + r);
    }
    for (; t < n; t++) {
        i64 r = 0;
        for (; r + 4 <= rows; r += 4) dot<4, 1>(w + r * m.columns, m.columns, dtype, x + t, out + BLOCK * t + r);
        for (; r < rows; r++) dot<1, 1>(w + r * m.columns, m.columns, dtype, x + t, out + BLOCK * t + r);
    }
    for (t = 0; t < n; t++) for (i64 r = rows; r < BLOCK; r++) out[BLOCK * t + r] = 0;
}

#ifdef PAIRS
#include "bf16.h"
#endif

// out [blocks, n, 64] = x [n, columns] times rows from 64 * block on of a matrix, plus the bias; n is at most BATCH.
static void product(const Matrix& m, const Item& item, int which, i64 block, i64 blocks, const Row* x, i64 n, const Layer& k, float* out) {
    const i64 dtype = k.dtype;
    const uint8_t *section = (const uint8_t*)item.sections[which], *residual = (const uint8_t*)item.residual[which];
    // Bytes of a block's codes: of a plane of four bits, and of one of two.
    const i64 four = BLOCK / 2 * m.padded_columns, two = four / 2;
    auto quantize = [&](auto kind, const uint8_t* high, const uint8_t* low, i64 stride) {
        quantized<decltype(kind)::value>(m, section, {high + stride * block, low + stride * block}, stride, block, blocks, x, n, k, out);
    };
#define OF(kind) std::integral_constant<Kind, kind>()
    if (m.code == PLAIN || m.code == E4M3) {
        for (i64 b = 0; b < blocks; b++) {
            float* to = out + b * n * BLOCK;
            const i64 plane = four * (block + b);
            const Codes planes = m.nested ? Codes{section + plane, residual + plane} : Codes{section + 2 * plane, section + 2 * plane + four};
#ifdef PAIRS
            if (k.floats && m.code == PLAIN && dtype == BFLOAT16) plain_pairs(m, section, block + b, x, n, to);
            else if (k.floats && m.code == E4M3) {
                i64 t = 0;
                for (; t + 2 <= n; t += 2) fp8_pairs<2>(m, section, planes, block + b, x + t, to + BLOCK * t);
                if (t < n) fp8_pairs<1>(m, section, planes, block + b, x + t, to + BLOCK * t);
            } else
#endif
            if (m.code == PLAIN) plain(m, section, block + b, x, n, dtype, to);
            else floats(m, section, planes, block + b, x, n, to);
        }
    }
    else if (m.code == LATTICE && m.nested) quantize(OF(TWO_POINTS), section, residual, two);
    else if (m.code == LATTICE) quantize(OF(POINTS), section, section, two);
    else if (m.code == E2M1) quantize(OF(LEVELS), section, section, four);
    else if (m.bits == 8 && m.nested) quantize(OF(EIGHT), section, residual, four);
    else if (m.bits == 8) quantize(OF(EIGHT), section, section + four, 2 * four);
    else if (m.bits == 2) quantize(OF(TWO), section, section, two);
    else if (m.nested) quantize(OF(TWO_AND_TWO), section, residual, two);
    else quantize(OF(FOUR), section, section, four);
#undef OF
    if (m.factor >= 0) {
        const float *pair = (const float*)(section + m.factor), factor = pair[0] / pair[1];
        for (i64 i = 0; i < blocks * n * BLOCK; i++) out[i] *= factor;
    }
    if (m.bias >= 0) {
        for (i64 b = 0; b < blocks; b++) {
            const uint16_t* bias = (const uint16_t*)(section + m.bias) + BLOCK * (block + b);
            const i64 rows = std::min(m.rows - BLOCK * (block + b), i64(BLOCK));
            for (i64 t = 0; t < n; t++) for (i64 r = 0; r < rows; r++) out[(b * n + t) * BLOCK + r] += half_to_float(bias[r], dtype);
        }
    }
}

// ---- a layer -----------------------------------------------------------------------------------------------------------

// Convert columns of a row of x into the form of the layer's products.
INLINE void prepare(const Layer& k, const Row& row, i64 column) {
    if (k.digits) row.integers(column, k.digits);
    if (k.floats) row.pairs(column);
}

// The rows that a matrix reads: in place, or gathered into `memory` in the order of its columns.
INLINE void in_order(const Matrix& m, const uint8_t* section, Row* rows, i64 n, float* memory, const Layer& k) {
    if (m.order < 0) return;
    const uint16_t* order = (const uint16_t*)(section + m.order);
    for (i64 t = 0; t < n; t++) {
        Row to(memory + t * Row::floats(k.width), k.width);
        for (i64 c = 0; c < m.columns; c++) to.x[c] = rows[t].x[order[c]];
        for (i64 c = m.columns; c < k.width; c++) to.x[c] = 0;
        for (i64 c = 0; c < m.padded_columns; c += BLOCK) prepare(k, to, c);
        rows[t] = to;
    }
}

static void read_inputs(const Layer& k, i64 token) {
    Row row(k.inputs + token * Row::floats(k.width), k.width);
    const uint16_t* x = k.x + token * k.hidden;
    i64 c = 0;
    for (; c + W <= k.hidden; c += W) store(row.x + c, halves(x + c, k.dtype));
    for (; c < k.hidden; c++) row.x[c] = half_to_float(x[c], k.dtype);
    for (; c < k.width; c++) row.x[c] = 0;
    rotate(row.x, 0, k.hidden, k.outer);
    for (c = 0; c < k.width; c += BLOCK) prepare(k, row, c);
}

static void gate_up(const Layer& k, const Item& item, i64 block, i64 blocks, float* memory) {
    const Matrix* matrices = k.matrices + 3 * item.form;
    const i64 size = Row::floats(k.width);
    alignas(64) float g[MOST_BLOCKS * BATCH * BLOCK], u[MOST_BLOCKS * BATCH * BLOCK];
    for (i64 from = 0; from < item.count; from += BATCH) {
        const i64 n = item.count - from < BATCH ? item.count - from : BATCH;
        for (int which = k.has_gate ? 0 : 1; which < 2; which++) {
            Row rows[BATCH];
            for (i64 t = 0; t < n; t++) rows[t] = Row(k.inputs + k.rows[item.first + from + t] * size, k.width);
            in_order(matrices[which], (const uint8_t*)item.sections[which], rows, n, memory, k);
            product(matrices[which], item, which, block, blocks, rows, n, k, which ? u : g);
        }
        for (i64 i = 0; i < blocks * n; i++) {
            const i64 begin = BLOCK * (block + i / n), rest = std::min(k.inter - begin, i64(BLOCK));
            const i64 end = begin + BLOCK >= k.inter ? k.width : begin + BLOCK;  // the last block clears the row's padding
            Row to(k.activations + (item.first + from + i % n) * size, k.width);
            for (i64 r = 0; r < BLOCK; r += W) {
                F up = load(u + BLOCK * i + r);
                store(to.x + begin + r, k.has_gate ? activate(k, load(g + BLOCK * i + r), up) : activate(k, up, all(1.0f)));
            }
            rotate(to.x, begin, begin + rest, k.inner);
            for (i64 c = begin + rest; c < end; c++) to.x[c] = 0;
            for (i64 c = begin; c < end; c += BLOCK) prepare(k, to, c);
        }
    }
}

static void down(const Layer& k, const Item& item, i64 block, i64 blocks, float* memory) {
    const Matrix& m = k.matrices[3 * item.form + 2];
    alignas(64) float sums[MOST_BLOCKS * BATCH * BLOCK];
    for (i64 from = 0; from < item.count; from += BATCH) {
        const i64 n = item.count - from < BATCH ? item.count - from : BATCH;
        Row rows[BATCH];
        for (i64 t = 0; t < n; t++) rows[t] = Row(k.activations + (item.first + from + t) * Row::floats(k.width), k.width);
        in_order(m, (const uint8_t*)item.sections[2], rows, n, memory, k);
        product(m, item, 2, block, blocks, rows, n, k, sums);
        for (i64 i = 0; i < blocks * n; i++) {
            const i64 begin = BLOCK * (block + i / n);
            narrow(sums + BLOCK * i, k.out + k.pairs[item.first + from + i % n] * k.hidden + begin, std::min(k.hidden - begin, i64(BLOCK)), k.dtype);
        }
    }
}

// Each thread of a team runs pieces of one phase, until there are no more.
static void work(void* layer) {
    Layer& k = *(Layer*)layer;
    auto next = [&] { return __atomic_fetch_add(&k.next, 1, __ATOMIC_RELAXED); };
    if (k.phase == READ) {
        for (i64 token; (token = next()) < k.tokens;) read_inputs(k, token);
        return;
    }
    thread_local std::vector<float> memory;
    if ((i64)memory.size() < BATCH * Row::floats(k.width)) memory.resize(BATCH * Row::floats(k.width));
    const i64 blocks = ((k.phase == GATE_UP ? k.inter : k.hidden) + BLOCK - 1) / BLOCK;
    // One block of gate and up where two would leave threads with nothing to do.
    const i64 at_once = k.phase == DOWN || k.items * blocks >= 8 * k.threads ? MOST_BLOCKS : 1, parts = (blocks + at_once - 1) / at_once;
    for (i64 piece; (piece = next()) < k.items * parts;) {
        const Item& item = k.item[piece / parts];
        const i64 block = piece % parts * at_once;
        (k.phase == GATE_UP ? gate_up : down)(k, item, block, std::min(at_once, blocks - block), memory.data());
    }
}

// into [tokens, hidden] = the sum over k of weights[t, k] * rows[t * top_k + k]: products and sums are rounded to float32.
static void weighted_sum(void* argument) {
    Sum& s = *(Sum*)argument;
    std::vector<float> total(s.hidden + W);
    for (i64 t; (t = __atomic_fetch_add(&s.next, 1, __ATOMIC_RELAXED)) < s.tokens;) {
        for (i64 c = 0; c < s.hidden; c++) total[c] = 0;
        for (i64 j = 0; j < s.top_k; j++) {
            if (s.present != nullptr && !s.present[t * s.top_k + j]) continue;  // its row is undefined
            const uint16_t* row = s.rows + (t * s.top_k + j) * s.hidden;
            const F weight = all(s.weights[t * s.top_k + j]);
            i64 c = 0;
            for (; c + W <= s.hidden; c += W) {
                F product = halves(row + c, s.dtype) * weight;
                APART(product);  // otherwise the compiler adds it without rounding it first
                store(&total[c], load(&total[c]) + product);
            }
            for (; c < s.hidden; c++) {
                volatile float product = half_to_float(row[c], s.dtype) * s.weights[t * s.top_k + j];
                total[c] += product;
            }
        }
        narrow(total.data(), s.into + t * s.hidden, s.hidden, s.dtype);
    }
}
#undef APART
