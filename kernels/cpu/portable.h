// Vectors of four, as every compiler knows them.
VECTORS_OF(4)
#if defined(__x86_64__)
#define APART(v) asm("" : "+x"(v))
#else
#define APART(v) asm("" : "+w"(v))
#endif
typedef I Q;
constexpr int QS = 16, STEP = 1, PER_Q = 1, FEW = 1, TILE_TOKENS = 2, TILE_REGISTERS = 4, TILE_VECTORS = 2;
constexpr bool WHOLE_BYTES = false;  // products of 8 by 8 bits do not fit 16

INLINE I load_words(const uint16_t* p) { return I{p[0], p[1], p[2], p[3]}; }
INLINE I bytes_at(const uint8_t* p) { return I{p[0], p[1], p[2], p[3]}; }
INLINE I bytes_of(const uint8_t* p, int v) { return bytes_at(p + W * v); }
INLINE I ints_of(const int* p, int v) { return *(const UnalignedInts*)(p + W * v); }
INLINE void reorder(float*, int64_t) {}

template <bool LEVEL, int BITS> INLINE void split(const uint8_t* p, int shift, Q out[QS]) {
    for (int i = 0; i < 8; i++) {
        out[i] = bytes_at(p + W * i) >> shift & (BITS == 2 ? 3 : 15);
        out[8 + i] = bytes_at(p + W * i) >> (4 + shift) & (BITS == 2 ? 3 : 15);
    }
    if (LEVEL) for (int i = 0; i < QS; i++) for (int j = 0; j < W; j++) out[i][j] = TWICE_E2M1[out[i][j]];
}

// wide[t] = sums over `width` columns of the codes in R registers from r0 on times (256 * high + low) of token t.
template <bool LEVEL, int N, int R, class Fetch>
INLINE void exact_sums(const Fetch& fetch, const int8_t* const* low, const int8_t* const* high, int64_t column, int64_t width, int r0, I (*wide)[R]) {
    for (int t = 0; t < N; t++) for (int r = 0; r < R; r++) wide[t][r] = I{};
    for (int64_t c = column; c < column + width; c++) {
        Q q[QS];
        fetch(c, r0, q);
        for (int t = 0; t < N; t++) for (int r = 0; r < R; r++) wide[t][r] += q[r] * (I{} + (256 * high[t][c] + low[t][c]));
    }
}
