// Vectors of four, in GCC's and Clang's vector extensions.
VECTORS_OF(4)
#if defined(__x86_64__)
#define APART(v) asm("" : "+x"(v))
#else
#define APART(v) asm("" : "+w"(v))
#endif
typedef I Q;
constexpr int QS = 16, STEP = 1, COPIES = 1, PER_Q = 1, MOST_TOKENS = 1, ROWS_OF_MOST = 16, TILE_VECTORS = 2;
constexpr int LARGEST_CODE = 255;
constexpr int BLOCKS_OF_ONE = 1;
constexpr bool MULTIPLIES_UNCUT = false;

INLINE I load_words(const uint16_t* p) { return I{p[0], p[1], p[2], p[3]}; }
INLINE int row_of(int v) { return W * v; }
INLINE I bytes_of(const uint8_t* p, int v) { return I{p[W * v], p[W * v + 1], p[W * v + 2], p[W * v + 3]}; }
INLINE I nibbles_of(const uint8_t* p, int v) { return (bytes_of(p, v % 8) >> (v < 8 ? 0 : 4)) & 15; }
INLINE I ints_of(const int* p, int v) { return *(const UnalignedInts*)(p + W * v); }
INLINE void store_rows(float* out, int v, F of_rows) { *(Unaligned*)(out + W * v) = of_rows; }

struct Packed { const uint8_t *high, *low; int shift; };
INLINE Packed packed(const uint8_t* p) { return {p, nullptr, 0}; }
INLINE Packed shifted(Packed p, int bits) { return {p.high, nullptr, bits}; }
INLINE Packed merged(Packed high, Packed low, int second) { return {high.high, low.high, 2 * second}; }
template <int MASK, bool LEVEL, int R> INLINE void split(Packed p, int first, Q* out) {
    for (int i = 0; i < R; i++) {
        const int v = first + i;
        if (p.low) out[i] = (nibbles_of(p.high, v) >> p.shift & 3) << 2 | (nibbles_of(p.low, v) >> p.shift & 3);
        else out[i] = nibbles_of(p.high, v) >> p.shift & MASK;
        if (LEVEL) for (int j = 0; j < W; j++) out[i][j] = TWICE_E2M1[out[i][j]];
    }
}
// 4 * code + 2, or + 0 where the low bits of a point's eight codes have odd parity (kernels/lattice.py); `second` is 1 for
// the second half of columns that share bytes.
template <int R> INLINE void points(Packed p, int second, int first, Q* out) {
    split<3, false, R>(shifted(p, 2 * second), first, out);
    for (int word = 0; word < 8; word++) {  // a register, and the one 32 rows later
        int parity = 0;
        for (int i = 0; i < W; i++) parity ^= out[word][i] ^ out[word + 8][i];
        for (int half = 0; half < 2; half++) out[word + 8 * half] = 4 * out[word + 8 * half] + 2 * (~parity & 1);
    }
}
template <int R> INLINE void whole_bytes(Packed high, Packed low, int first, Q* out) {
    for (int i = 0; i < R; i++) out[i] = nibbles_of(high.high, first + i) << 4 | nibbles_of(low.high, first + i);
}

// wide[t] = sums over WIDTH columns of the codes in R registers times (256 * high + low) of token t.
template <int WIDTH, int SPAN, int N, int R, int DIGITS, class Fetch, class Row>
INLINE void exact_sums(Fetch fetch, const Row* x, int64_t column, I (*wide)[R]) {
    for (int t = 0; t < N; t++) for (int r = 0; r < R; r++) wide[t][r] = I{};
    for (int64_t c = column; c < column + WIDTH; c++) {
        Q q[R];
        fetch(c, q);
        for (int t = 0; t < N; t++) for (int r = 0; r < R; r++) wide[t][r] += q[r] * (I{} + ((DIGITS == 2 ? 256 * x[t].high[c] : 0) + x[t].low[c]));
    }
}
