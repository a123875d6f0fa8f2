// NEON with dotprod, or with i8mm where I8MM is defined: four columns of a row side by side, one instruction for 16 products.
VECTORS_OF(4)
#define APART(v) asm("" : "+w"(v))
typedef uint8x16_t Q;
constexpr int BLOCKS_OF_ONE = 1;
constexpr bool MULTIPLIES_UNCUT = false;
constexpr int QS = 16, STEP = 4, COPIES = 1, PER_Q = 1, MOST_TOKENS = 4, ROWS_OF_MOST = 2, TILE_VECTORS = 4;
#ifdef I8MM
constexpr int LARGEST_CODE = 255;
#else
constexpr int LARGEST_CODE = 127;  // both factors are signed
#endif

INLINE I load_words(const uint16_t* p) { return (I)vmovl_u16(vld1_u16(p)); }
INLINE int row_of(int v) { return 32 * (v & 1) + W * (v >> 1); }
INLINE I ints_of(const int* p, int v) { return *(const UnalignedInts*)(p + row_of(v)); }
INLINE I bytes_of(const uint8_t* p, int v) {
    uint32_t four;
    memcpy(&four, p + row_of(v), 4);
    return (I)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
}
INLINE void store_rows(float* out, int v, F of_rows) { *(Unaligned*)(out + row_of(v)) = of_rows; }

// Location of bytes: they are read for the wanted rows only, as those of four columns take eight registers.
struct Packed { const uint8_t* at; int shift; };
struct Merged { const uint8_t *high, *low; int second; };
INLINE Packed packed(const uint8_t* p) { return {p, 0}; }
INLINE Packed shifted(Packed p, int bits) { return {p.at, bits}; }
INLINE Merged merged(Packed high, Packed low, int second) { return {high.at, low.at, second}; }

INLINE Q moved(Q bytes, int bits) { return vshlq_u8(bytes, vdupq_n_s8(int8_t(bits))); }
INLINE Q side_by_side(const uint8_t* p, int i) {  // rows from 4 * i on, and in the upper halves of bytes 32 more
    auto two = [&](const uint8_t* at) LAMBDA {
        const Q a = vld1q_u8(at), b = vld1q_u8(at + 32);
        return vreinterpretq_u16_u8(i & 2 ? vzip2q_u8(a, b) : vzip1q_u8(a, b));
    };
    const uint16x8_t a = two(p + 16 * (i >> 2)), b = two(p + 64 + 16 * (i >> 2));
    return vreinterpretq_u8_u16(i & 1 ? vzip2q_u16(a, b) : vzip1q_u16(a, b));
}
template <int MASK> INLINE Q side_by_side(Packed p, int i) {
    return MASK == 15 ? side_by_side(p.at, i) : moved(side_by_side(p.at, i), -p.shift);
}
template <int> INLINE Q side_by_side(Merged p, int i) {  // two bits of each half of a byte, and two more below them
    const Q high = moved(side_by_side(p.high, i), 2 - 2 * p.second), low = moved(side_by_side(p.low, i), -2 * p.second);
    return vbslq_u8(vdupq_n_u8(0xcc), high, low);
}
template <int MASK, bool LEVEL, int R, class Bytes> INLINE void split(Bytes p, int first, Q* out) {
    unroll<R / 2>([&](auto i) LAMBDA {
        const Q rows = side_by_side<MASK>(p, first / 2 + i), mask = vdupq_n_u8(MASK);
        out[2 * i] = vandq_u8(rows, mask);
        out[2 * i + 1] = vandq_u8(vshrq_n_u8(rows, 4), mask);
        if (LEVEL) for (int h = 0; h < 2; h++) out[2 * i + h] = vqtbl1q_u8(vld1q_u8(TWICE_E2M1), out[2 * i + h]);
    });
}
// 4 * code + 2, or + 0 where the low bits of a point's eight codes have odd parity (kernels/lattice.py); `second` is 1 for
// the second half of columns that share bytes.
template <int R> INLINE void points(Packed p, int second, int first, Q* out) {
    split<3, false, R>(shifted(p, 2 * second), first, out);
    unroll<R / 2>([&](auto i) LAMBDA {  // four rows, and the four 32 rows later
        Q *low = out + 2 * i, *high = low + 1, parity = veorq_u8(*low, *high);
        parity = veorq_u8(parity, vextq_u8(parity, parity, 8));
        parity = veorq_u8(parity, vextq_u8(parity, parity, 4));
        parity = vbicq_u8(vdupq_n_u8(2), vshlq_n_u8(parity, 1));
        *low = vsliq_n_u8(parity, *low, 2);
        *high = vsliq_n_u8(parity, *high, 2);
    });
}
template <int R> INLINE void whole_bytes(Packed high, Packed low, int first, Q* out) {
    unroll<R / 2>([&](auto i) LAMBDA {
        const Q upper = side_by_side(high.at, first / 2 + i), lower = side_by_side(low.at, first / 2 + i);
        out[2 * i] = vsliq_n_u8(lower, upper, 4);
        out[2 * i + 1] = vsriq_n_u8(upper, lower, 4);
    });
}

// wide[t] = sums over WIDTH columns of the codes in R registers times (256 * high + low) of token t.
template <int WIDTH, int SPAN, int N, int R, int DIGITS, class Fetch, class Row>
INLINE void exact_sums(Fetch fetch, const Row* x, int64_t column, I (*wide)[R]) {
    int32x4_t low[N * R], high[N * R];
    unroll<N * R>([&](auto i) LAMBDA { low[i] = high[i] = vdupq_n_s32(0); });
#pragma GCC unroll 1
    for (int64_t from = column; from < column + WIDTH; from += 16) {
        int8x16_t of_low[N], of_high[N];
        unroll<N>([&](auto t) LAMBDA { of_low[t] = vld1q_s8(x[t].low + from), of_high[t] = vld1q_s8(x[t].high + from); });
        unroll<4>([&](auto step) LAMBDA {
            Q q[R];
            fetch(from + STEP * step, q);
            auto add = [&](const int8x16_t* digits, int32x4_t* sums) LAMBDA {
                unroll<N * R>([&](auto i) LAMBDA {
#ifdef I8MM
                    sums[i] = vusdotq_laneq_s32(sums[i], q[i % R], digits[i / R], step);
#else
                    sums[i] = vdotq_laneq_s32(sums[i], vreinterpretq_s8_u8(q[i % R]), digits[i / R], step);
#endif
                });
            };
            add(of_low, low);
            if constexpr (DIGITS == 2) add(of_high, high);
        });
    }
    unroll<N * R>([&](auto i) LAMBDA { wide[i / R][i % R] = DIGITS == 2 ? (I)low[i] + ((I)high[i] << 8) : (I)low[i]; });
}
