// One layer's step for one instruction set; experts.cpp includes this file once for each, in a namespace of its own.
//
// Activations are integers of 16 bits with a power of two for each UNIT of them, in two digits of 8 bits, so that sums of
// codes times activations are exact. Floats are added unit by unit and group by group, for each row and token by itself:
// bits depend neither on other rows and tokens nor on threads, and the loops differ only in what they hold in registers.
// FP8 and 16 bits, whose codes are no small integers, are multiplied as float32 in the same order.

constexpr int BLOCK = 64;             // rows that are interleaved
constexpr int VECTORS = BLOCK / W;    // of floats in one column of a block
constexpr int UNIT = 32;              // activations that share a power of two
constexpr int CHUNK = 64;             // columns that are unpacked at a time, where many tokens share them
constexpr int BATCH = 32;             // tokens that share what is unpacked
constexpr i64 AHEAD = 3072;            // bytes that are prefetched ahead
constexpr int SCALES_AHEAD = 2;       // groups whose scales are

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

INLINE F exponential(F x) {  // Cephes' expf: 1 ulp or so
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

template <class Function> INLINE F each(F v, Function function) {
    for (int i = 0; i < W; i++) v[i] = function(v[i]);
    return v;
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
    int8_t *low, *high;    // digits: x = scale * (256 * high + low)
    float *scale, *sum;    // of each UNIT; scaled sum of each 16
    INLINE Row() {}
    INLINE Row(float* memory, i64 width)
        : x(memory), low((int8_t*)(memory + width)), high(low + width), scale((float*)(high + width)), sum(scale + width / UNIT) {}
    static i64 floats(i64 width) { return width + width / 2 + width / UNIT + width / 16; }

    INLINE void digits(i64 column) const {  // of UNIT columns, from x
        const float* v = x + column;
        float largest = 0;
        bool finite = true;
        for (int i = 0; i < UNIT; i++) {
            float size = fabsf(v[i]);
            largest = size > largest ? size : largest;
            finite &= size < INFINITY;
        }
        int power = 0;
        if (largest > 0) frexpf(largest, &power);
        if (power < -100) power = -100;
        if (ldexpf(largest, 15 - power) > 32639.0f) power++;  // whose high digit would not fit
        const float inverse = ldexpf(1.0f, 15 - power), factor = finite ? ldexpf(1.0f, power - 15) : NAN;
        int sums[2] = {0, 0};
        for (int i = 0; i < UNIT; i++) {
            int q = finite ? (int)(v[i] * inverse + 0x1.8p23f - 0x1.8p23f) : 0, digit = (int8_t)q;
            sums[i / 16] += q;
            low[column + i] = (int8_t)digit;
            high[column + i] = (int8_t)((q - digit) >> 8);
        }
        scale[column / UNIT] = factor;
        sum[column / 16] = factor * sums[0];
        sum[column / 16 + 1] = factor * sums[1];
    }
    INLINE float group_sum(i64 begin, i64 columns) const {
        float total = 0;
        for (i64 c = begin; c < begin + columns; c += 16) total += sum[c / 16];
        return total;
    }
};

// ---- codes -------------------------------------------------------------------------------------------------------------

struct Codes {             // where the codes of a block begin
    const uint8_t* high;   // whole codes, upper halves, or the plane of the high four bits
    const uint8_t* low;    // lower halves, or the plane of the low four bits
};
enum Kind { FOUR, LEVELS, TWO, TWO_AND_TWO, EIGHT };
constexpr bool in_planes(Kind kind) { return kind == EIGHT && !WHOLE_BYTES; }  // high and low halves are multiplied apart

// STEP columns of a block as bytes, row by row: QS registers in the order of `wide` below.
template <Kind kind> INLINE void codes(Codes at, i64 column, i64 fold, Q out[QS]) {
    if constexpr (kind == FOUR || kind == LEVELS || in_planes(kind)) {
        split<kind == LEVELS, 0>(at.high + 32 * column, 0, out);
    } else if constexpr (kind == EIGHT) {
        Q fine[QS];
        split<false, 0>(at.high + 32 * column, 0, out);
        split<false, 0>(at.low + 32 * column, 0, fine);
        for (int i = 0; i < QS; i++) out[i] = out[i] << 4 | fine[i];
    } else {
        const i64 half = fold / 2, second = (column & half) != 0;  // fold is a power of two
        const i64 place = 16 * (column & -fold) + 32 * (column & (half - 1));
        split<false, 2>(at.high + place, 2 * (int)second, out);
        if constexpr (kind == TWO_AND_TWO) {
            Q fine[QS];
            split<false, 2>(at.low + place, 2 * (int)second, fine);
            for (int i = 0; i < QS; i++) out[i] = out[i] << 2 | fine[i];
        }
    }
}

// Scale and offset of a group for the rows of a vector: weight = number * scale + offset.
INLINE void scale_of(const Matrix& m, const uint8_t* section, i64 block, i64 group, int number, F* scale, F* offset) {
    const i64 at = (block * (m.padded_columns / m.group) + group) * BLOCK;
    const uint8_t* scales = section + m.scales;
    const F step = all((float)m.step), center = all((float)m.center);
    if (m.scale == SCALE_AND_ZERO) {
        I pair = ints_of((const int*)scales + group * m.padded_rows + BLOCK * block, number);
        const i64 dtype = m.zeros & 2 ? FLOAT16 : BFLOAT16;
        F s = widen(pair & 0xffff, dtype), z = widen((pair >> 16) & 0xffff, dtype);
        *offset = m.zeros & 1 ? (z - center) * s : z - center * s;
        *scale = s * step;
        return;
    }
    F s;
    if (m.scale == E8M0) {
        I power = bytes_of(scales + at, number);  // 2^(power - 127), of which the smallest is a denormal float
        s = choose(power == 0, all(0x1p-127f), as_float(power << 23));
    } else if (m.scale == SCALE_E4M3) {
        s = e4m3(bytes_of(scales + at, number));
    } else {
        s = as_float(ints_of((const int*)scales + at, number));
    }
    *scale = s * step;
    *offset = -center * *scale;
}

// A group's scales lie far from those of the next one, so that no processor finds them by itself.
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

// total [n, 64] += scale * sums + offset * the group's sum, for each row; the last thing that happens to a group.
INLINE void end_group(const Matrix& m, const uint8_t* section, i64 block, i64 group, const Row* x, i64 n, const float* sums, float* total) {
    float of_group[BATCH];
    for (i64 t = 0; t < n; t++) of_group[t] = m.code == E4M3 ? 0 : x[t].group_sum(group * m.group, m.group);
    for (int v = 0; v < VECTORS; v++) {
        F scale, offset;
        scale_of(m, section, block, group, v, &scale, &offset);
        for (i64 t = 0; t < n; t++) {
            F sum = load(total + BLOCK * t + W * v);
            sum += scale * load(sums + BLOCK * t + W * v);
            sum += offset * all(of_group[t]);
            store(total + BLOCK * t + W * v, sum);
        }
    }
}

// sums [N, 64] += scale * the exact sums over `columns` columns of codes times activations, unit by unit.
template <bool LEVEL, int N, int R, bool PLANES, class Fetch, class Low>
INLINE void add_columns(const Fetch& high_plane, const Low& low_plane, const Row* x, i64 begin, i64 columns, float* sums) {
    for (i64 column = begin; column < begin + columns; column += UNIT) {
        const i64 width = columns < UNIT ? columns : UNIT;
        const int8_t *low[N], *high[N];
        for (int t = 0; t < N; t++) low[t] = x[t].low, high[t] = x[t].high;
        for (int r0 = 0; r0 < QS; r0 += R) {
            I wide[N][PER_Q * R], fine[N][PER_Q * R];
            exact_sums<LEVEL, N, R>(high_plane, low, high, column, width, r0, wide);
            if constexpr (PLANES) exact_sums<LEVEL, N, R>(low_plane, low, high, column, width, r0, fine);
            for (int t = 0; t < N; t++) {
                const F scale = all(x[t].scale[column / UNIT]);
                for (int v = 0; v < PER_Q * R; v++) {
                    float* to = sums + BLOCK * t + W * (PER_Q * r0 + v);
                    const I sum = PLANES ? (wide[t][v] << 4) + fine[t][v] : wide[t][v];
                    store(to, load(to) + to_float(sum) * scale);
                }
            }
        }
    }
}

template <Kind kind> INLINE void prefetch_codes(Codes at, i64 column) {
    constexpr int bytes_of_column = kind == TWO || kind == TWO_AND_TWO ? 16 : 32;
    for (int i = 0; i < STEP * bytes_of_column; i += 64) {
        __builtin_prefetch(at.high + bytes_of_column * column + AHEAD + i);
        if (kind == TWO_AND_TWO || kind == EIGHT) __builtin_prefetch(at.low + bytes_of_column * column + AHEAD + i);
    }
}

// Codes of 8 bits are 16 times the high plane plus the low one, put together as exact sums of a unit.
template <Kind kind, int N>
INLINE void few(const Matrix& m, const uint8_t* section, Codes at, i64 block, const Row* x, float* total) {
    alignas(64) float sums[N * BLOCK];
    constexpr bool planes = in_planes(kind);
    for (int i = 0; i < N * BLOCK; i++) total[i] = 0;
    for (int group = 0; group < SCALES_AHEAD; group++) prefetch_scales(m, section, block, group);
    for (i64 group = 0; group < m.padded_columns / m.group; group++) {
        prefetch_scales(m, section, block, group + SCALES_AHEAD);
        for (int i = 0; i < N * BLOCK; i++) sums[i] = 0;
        auto high = [&](i64 column, int, Q* out) {
            prefetch_codes<kind>(at, column);
            codes<kind>(at, column, m.fold, out);
        };
        auto low = [&](i64 column, int, Q* out) { codes<kind>({at.low, nullptr}, column, m.fold, out); };
        add_columns<kind == LEVELS, N, QS, planes>(high, low, x, group * m.group, m.group, sums);
        end_group(m, section, block, group, x, N, sums, total);
    }
}

template <Kind kind>
INLINE void many(const Matrix& m, const uint8_t* section, Codes at, i64 block, const Row* x, i64 n, float* total) {
    alignas(64) Q tiles[1 + in_planes(kind)][CHUNK / STEP * QS];
    alignas(64) float sums[BATCH * BLOCK];
    constexpr bool planes = in_planes(kind);
    memset(total, 0, n * BLOCK * sizeof(float));
    for (int group = 0; group < SCALES_AHEAD; group++) prefetch_scales(m, section, block, group);
    for (i64 group = 0; group < m.padded_columns / m.group; group++) {
        const i64 begin = group * m.group, end = begin + m.group;
        prefetch_scales(m, section, block, group + SCALES_AHEAD);
        memset(sums, 0, n * BLOCK * sizeof(float));
        for (i64 from = begin; from < end; from += CHUNK) {
            const i64 columns = end - from < CHUNK ? end - from : CHUNK;
            for (i64 c = 0; c < columns; c += STEP) {
                prefetch_codes<kind>(at, from + c);
                codes<kind>(at, from + c, m.fold, tiles[0] + c / STEP * QS);
                if (planes) codes<kind>({at.low, nullptr}, from + c, m.fold, tiles[planes] + c / STEP * QS);
            }
            auto fetch = [&](i64 column, int r, Q* out) {
                const Q* at_column = tiles[0] + uint64_t(column - from) / STEP * QS + r;
                for (int i = 0; i < TILE_REGISTERS; i++) out[i] = at_column[i];
            };
            auto low = [&](i64 column, int r, Q* out) {
                const Q* at_column = tiles[planes] + uint64_t(column - from) / STEP * QS + r;
                for (int i = 0; i < TILE_REGISTERS; i++) out[i] = at_column[i];
            };
            i64 t = 0;
            auto add = [&](auto number) {
                constexpr int N = decltype(number)::value;
                for (; t + N <= n; t += N)
                    add_columns<kind == LEVELS, N, TILE_REGISTERS, planes>(fetch, low, x + t, from, columns, sums + BLOCK * t);
            };
            add(std::integral_constant<int, TILE_TOKENS>());
            add(std::integral_constant<int, 1>());
        }
        end_group(m, section, block, group, x, n, sums, total);
    }
}

template <Kind kind>
static void quantized(const Matrix& m, const uint8_t* section, Codes at, i64 block, const Row* x, i64 n, float* total) {
    if (n == 1) few<kind, 1>(m, section, at, block, x, total);
    else if (n == 2 && FEW >= 2) few<kind, 2>(m, section, at, block, x, total);
    else many<kind>(m, section, at, block, x, n, total);
    reorder(total, n);
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

static void floats(const Matrix& m, const uint8_t* section, Codes at, i64 block, const Row* x, i64 n, float* total) {
    constexpr i64 COLUMNS = 16;
    alignas(64) float tile[COLUMNS * BLOCK], sums[BATCH * BLOCK];
    memset(total, 0, n * BLOCK * sizeof(float));
    for (i64 group = 0; group < m.padded_columns / m.group; group++) {
        const i64 end = (group + 1) * m.group;
        memset(sums, 0, n * BLOCK * sizeof(float));
        for (i64 from = group * m.group; from < end; from += COLUMNS) {
            for (i64 c = 0; c < COLUMNS; c++) {
                __builtin_prefetch(at.high + 32 * (from + c) + AHEAD);
                __builtin_prefetch(at.low + 32 * (from + c) + AHEAD);
                for (int v = 0; v < VECTORS / 2; v++) {
                    I above = bytes_of(at.high + 32 * (from + c), v), below = bytes_of(at.low + 32 * (from + c), v);
                    store(tile + BLOCK * c + W * v, e4m3((above & 15) << 4 | (below & 15)));
                    store(tile + BLOCK * c + W * (v + VECTORS / 2), e4m3((above & 0xf0) | below >> 4));
                }
            }
            for (int v0 = 0; v0 < VECTORS; v0 += TILE_VECTORS) {
                i64 t = 0;
                for (; t + 4 <= n; t += 4) multiply<4>(tile, COLUMNS, x + t, from, sums + BLOCK * t, v0);
                for (; t < n; t++) multiply<1>(tile, COLUMNS, x + t, from, sums + BLOCK * t, v0);
            }
        }
        end_group(m, section, block, group, x, n, sums, total);
    }
    reorder(total, n);
}

// 16 bits: rows [rows, columns] as they are; a sum is W partial sums over the columns, added in order.
template <int R, int N> INLINE void dot(const uint16_t* w, i64 columns, i64 dtype, const Row* x, float* out) {
    F sum[R][N];
    for (int r = 0; r < R; r++) for (int t = 0; t < N; t++) sum[r][t] = F{};
    i64 c = 0;
    for (; c + W <= columns; c += W) {
        F weights[R];
        for (int r = 0; r < R; r++) {
            weights[r] = halves(w + r * columns + c, dtype);
            if (N == 1) __builtin_prefetch(w + (r + R) * columns + c);  // of the rows that follow
        }
        for (int t = 0; t < N; t++) {
            F values = load(x[t].x + c);
            for (int r = 0; r < R; r++) sum[r][t] += weights[r] * values;
        }
    }
    for (int r = 0; r < R; r++) for (int t = 0; t < N; t++) {
        float total = 0;
        for (int i = 0; i < W; i++) total += sum[r][t][i];
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

// out [n, 64] = x [n, columns] times rows 64 * block and so on of a matrix, plus the bias; n is at most BATCH.
static void product(const Matrix& m, const Item& item, int which, i64 block, const Row* x, i64 n, i64 dtype, float* out) {
    const uint8_t *section = (const uint8_t*)item.sections[which], *fine = (const uint8_t*)item.fine[which];
    const i64 plane = BLOCK / 2 * m.padded_columns * block, half = plane / 2;
    const Codes planes = m.nested ? Codes{section + plane, fine + plane}
                                  : Codes{section + 2 * plane, section + 2 * plane + BLOCK / 2 * m.padded_columns};
    if (m.code == PLAIN) plain(m, section, block, x, n, dtype, out);
    else if (m.code == E4M3) floats(m, section, planes, block, x, n, out);
    else if (m.code == E2M1) quantized<LEVELS>(m, section, {section + plane, nullptr}, block, x, n, out);
    else if (m.bits == 8) quantized<EIGHT>(m, section, planes, block, x, n, out);
    else if (m.bits == 2) quantized<TWO>(m, section, {section + half, nullptr}, block, x, n, out);
    else if (m.nested) quantized<TWO_AND_TWO>(m, section, {section + half, fine + half}, block, x, n, out);
    else quantized<FOUR>(m, section, {section + plane, nullptr}, block, x, n, out);
    if (m.factor >= 0) {
        const float *pair = (const float*)(section + m.factor), factor = pair[0] / pair[1];
        for (i64 i = 0; i < n * BLOCK; i++) out[i] *= factor;
    }
    if (m.bias >= 0) {
        const uint16_t* bias = (const uint16_t*)(section + m.bias) + BLOCK * block;
        const i64 rows = m.rows - BLOCK * block < BLOCK ? m.rows - BLOCK * block : BLOCK;
        for (i64 t = 0; t < n; t++) for (i64 r = 0; r < rows; r++) out[BLOCK * t + r] += half_to_float(bias[r], dtype);
    }
}

// ---- a layer -----------------------------------------------------------------------------------------------------------

// The rows that a matrix reads: where they are, or gathered into `memory` in the order of its columns.
INLINE void in_order(const Matrix& m, const uint8_t* section, Row* rows, i64 n, float* memory, i64 width) {
    if (m.order < 0) return;
    const uint16_t* order = (const uint16_t*)(section + m.order);
    for (i64 t = 0; t < n; t++) {
        Row to(memory + t * Row::floats(width), width);
        for (i64 c = 0; c < m.columns; c++) to.x[c] = rows[t].x[order[c]];
        for (i64 c = m.columns; c < m.padded_columns; c++) to.x[c] = 0;
        for (i64 c = 0; c < m.padded_columns; c += UNIT) to.digits(c);
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
    for (c = 0; c < k.width; c += UNIT) row.digits(c);
}

static void gate_up(const Layer& k, const Item& item, i64 block, float* memory) {
    const Matrix* matrices = k.matrices + 3 * item.form;
    const i64 size = Row::floats(k.width);
    alignas(64) float g[BATCH * BLOCK], u[BATCH * BLOCK];
    for (i64 from = 0; from < item.count; from += BATCH) {
        const i64 n = item.count - from < BATCH ? item.count - from : BATCH;
        for (int which = k.has_gate ? 0 : 1; which < 2; which++) {
            Row rows[BATCH];
            for (i64 t = 0; t < n; t++) rows[t] = Row(k.inputs + k.rows[item.first + from + t] * size, k.width);
            in_order(matrices[which], (const uint8_t*)item.sections[which], rows, n, memory, k.width);
            product(matrices[which], item, which, block, rows, n, k.dtype, which ? u : g);
        }
        const i64 begin = BLOCK * block, rest = k.inter - begin < BLOCK ? k.inter - begin : BLOCK;
        const i64 end = begin + BLOCK >= k.inter ? k.width : begin + BLOCK;  // the last block clears what pads the row
        for (i64 t = 0; t < n; t++) {
            Row to(k.activations + (item.first + from + t) * size, k.width);
            for (i64 r = 0; r < BLOCK; r += W) {
                F up = load(u + BLOCK * t + r);
                store(to.x + begin + r, k.has_gate ? activate(k, load(g + BLOCK * t + r), up) : activate(k, up, all(1.0f)));
            }
            for (i64 c = begin + rest; c < end; c++) to.x[c] = 0;
            for (i64 c = begin; c < end; c += UNIT) to.digits(c);
        }
    }
}

static void down(const Layer& k, const Item& item, i64 block, float* memory) {
    const Matrix& m = k.matrices[3 * item.form + 2];
    alignas(64) float sums[BATCH * BLOCK];
    const i64 rows_left = k.hidden - BLOCK * block < BLOCK ? k.hidden - BLOCK * block : BLOCK;
    for (i64 from = 0; from < item.count; from += BATCH) {
        const i64 n = item.count - from < BATCH ? item.count - from : BATCH;
        Row rows[BATCH];
        for (i64 t = 0; t < n; t++) rows[t] = Row(k.activations + (item.first + from + t) * Row::floats(k.width), k.width);
        in_order(m, (const uint8_t*)item.sections[2], rows, n, memory, k.width);
        product(m, item, 2, block, rows, n, k.dtype, sums);
        for (i64 t = 0; t < n; t++)
            narrow(sums + BLOCK * t, k.out + k.pairs[item.first + from + t] * k.hidden + BLOCK * block, rows_left, k.dtype);
    }
}

// What each thread of a team runs: pieces of one phase, until there are no more.
static void work(void* layer) {
    Layer& k = *(Layer*)layer;
    auto next = [&] { return __atomic_fetch_add(&k.next, 1, __ATOMIC_RELAXED); };
    if (k.phase == READ) {
        for (i64 token; (token = next()) < k.tokens;) read_inputs(k, token);
        return;
    }
    thread_local std::vector<float> memory;
    if ((i64)memory.size() < BATCH * Row::floats(k.width)) memory.resize(BATCH * Row::floats(k.width));
    const i64 blocks = ((k.phase == GATE_UP ? k.inter : k.hidden) + BLOCK - 1) / BLOCK, at_once = k.phase == GATE_UP ? 1 : 2;
    const i64 parts = (blocks + at_once - 1) / at_once;
    for (i64 piece; (piece = next()) < k.items * parts;) {
        const Item& item = k.item[piece / parts];
        for (i64 block = piece % parts * at_once; block < blocks && block < (piece % parts + 1) * at_once; block++)
            (k.phase == GATE_UP ? gate_up : down)(k, item, block, memory.data());
    }
}

// into [tokens, hidden] = the sum over k of weights[t, k] * rows[t * top_k + k]: products and sums are rounded to float32.
static void weighted_sum(void* argument) {
    Sum& s = *(Sum*)argument;
    std::vector<float> total(s.hidden + W);
    for (i64 t; (t = __atomic_fetch_add(&s.next, 1, __ATOMIC_RELAXED)) < s.tokens;) {
        for (i64 c = 0; c < s.hidden; c++) total[c] = 0;
        for (i64 j = 0; j < s.top_k; j++) {
            const uint16_t* row = s.rows + (t * s.top_k + j) * s.hidden;
            const F weight = all(s.weights[t * s.top_k + j]);
            i64 c = 0;
            for (; c + W <= s.hidden; c += W) {
                F product = halves(row + c, s.dtype) * weight;
                APART(product);  // or the compiler adds it without rounding it first
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
