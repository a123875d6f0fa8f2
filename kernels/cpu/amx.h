// Products of tiles (AMX), for tokens that share unpacked codes. A unit's sums are exact integers, and floats are added
// in the order of `strip`, so a token has the same bits either way.
constexpr int TILE = 16;    // tokens, and rows of a matrix, of one product
constexpr i64 FEWEST = 8;   // fewest tokens that gain: a product takes as long for one as for TILE

// Tiles 0 to 3 are sums [TILE, TILE] of int32, 4 and 5 digits [TILE, UNIT], 6 and 7 codes [UNIT / STEP, TILE, STEP].
#ifdef EMULATED_TILES       // the tests' twin, for processors without tiles
static thread_local uint8_t tile[8][TILE][64];
INLINE void configure_tiles() { memset(tile, 0xa5, sizeof(tile)); }
INLINE void release_tiles() {}
template <int to> INLINE void clear_tile() { memset(tile[to], 0, sizeof(tile[to])); }
template <int to> INLINE void load_tile(const void* from) {
    constexpr int rows = to < 6 ? TILE : UNIT / STEP, bytes = to < 6 ? UNIT : 64;
    for (int r = 0; r < rows; r++) memcpy(tile[to][r], (const uint8_t*)from + bytes * r, bytes);
}
template <int from> INLINE void store_tile(void* to) { memcpy(to, tile[from], sizeof(tile[from])); }
template <int to, int digits, int codes> static void multiply_tiles() {
    for (int t = 0; t < TILE; t++)
        for (int r = 0; r < TILE; r++)
            for (int c = 0; c < UNIT; c++)
                ((int*)tile[to][t])[r] += (int8_t)tile[digits][t][c] * tile[codes][c / STEP][STEP * r + c % STEP];
}
#else                       // written out: GCC's builtins take no numbers from templates
INLINE void configure_tiles() {
    struct { uint8_t palette, start, nothing[14]; uint16_t bytes[16]; uint8_t rows[16]; } of = {1, 0, {}, {}, {}};
    for (int i = 0; i < 8; i++) of.bytes[i] = i / 2 == 2 ? UNIT : 64, of.rows[i] = i < 6 ? TILE : UNIT / STEP;
    asm volatile("ldtilecfg %0" ::"m"(of));
}
INLINE void release_tiles() { asm volatile("tilerelease"); }
template <int to> INLINE void clear_tile() { asm volatile("tilezero %%tmm%c0" ::"i"(to)); }
template <int to> INLINE void load_tile(const void* from) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(i64(to / 2 == 2 ? UNIT : 64)), "i"(to) : "memory");
}
template <int from> INLINE void store_tile(void* to) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(i64(64)), "i"(from) : "memory");
}
template <int to, int digits, int codes> INLINE void multiply_tiles() {  // signed digits, unsigned codes
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(to), "i"(digits), "i"(codes));
}
#endif

// Like `strip`, for up to BATCH tokens and all rows of a block.
template <Kind kind, int DIGITS, int WIDTH>
static void tiled(const Matrix& m, const uint8_t* section, Codes at, i64 block, const Row* x, i64 n, float* out) {
    static_assert(PER_Q == 1 && W == TILE && BLOCK == QS * TILE && !in_planes(kind), "a register is a row of a tile");
    constexpr int PAIRS_OF_ROWS = QS / 2;
    alignas(64) float total[BATCH * BLOCK] = {};
    alignas(64) uint8_t numbers[CHUNK / WIDTH][QS][UNIT / STEP][64];
    alignas(64) int8_t digits[CHUNK / WIDTH][2][BATCH][UNIT] = {};  // zeros after WIDTH
    // Low and high digits with one register of codes, then with the next: finished products are added up while the next
    // ones run.
    alignas(64) int products[2][4][TILE][TILE];
    F sums[BATCH][QS];
    memset(numbers, 0, sizeof(numbers));
    configure_tiles();
    auto multiply = [&](int unit, i64 from, int pair, int (*to)[TILE][TILE]) LAMBDA {
        if (pair == 0) {
            load_tile<4>(digits[unit][0][from]);
            if (DIGITS == 2) load_tile<5>(digits[unit][1][from]);
        }
        load_tile<6>(numbers[unit][2 * pair]);
        load_tile<7>(numbers[unit][2 * pair + 1]);
        clear_tile<0>(), multiply_tiles<0, 4, 6>();
        if (DIGITS == 2) clear_tile<1>(), multiply_tiles<1, 5, 6>();
        clear_tile<2>(), multiply_tiles<2, 4, 7>();
        if (DIGITS == 2) clear_tile<3>(), multiply_tiles<3, 5, 7>();
        store_tile<0>(to[0]);
        if (DIGITS == 2) store_tile<1>(to[1]);
        store_tile<2>(to[2]);
        if (DIGITS == 2) store_tile<3>(to[3]);
    };
    for (i64 group = 0; group < m.padded_columns / m.group; group++) {
        const i64 begin = group * m.group, end = begin + m.group;
        memset(sums, 0, n * sizeof(sums[0]));
        for (i64 chunk = begin; chunk < end; chunk += CHUNK) {
            const int units = int((end - chunk < CHUNK ? end - chunk : CHUNK) / WIDTH);
            for (int unit = 0; unit < units; unit++) {
                const i64 column = chunk + unit * WIDTH;
                for (i64 c = 0; c < WIDTH; c += STEP) {
                    Q q[QS];
                    codes<kind, QS>(at, column + c, m.fold, 0, q);
                    unroll<QS>([&](auto r) LAMBDA { _mm512_store_si512(numbers[unit][r][c / STEP], q[r]); });
                }
                for (i64 t = 0; t < n; t++) {
                    memcpy(digits[unit][0][t], x[t].low + column, WIDTH);
                    if (DIGITS == 2) memcpy(digits[unit][1][t], x[t].high + column, WIDTH);
                }
            }
            const int tiles = int((n + TILE - 1) / TILE), steps = units * tiles * PAIRS_OF_ROWS;
            auto place = [&](int step, int& unit, i64& from, int& pair) LAMBDA {
                pair = step % PAIRS_OF_ROWS, from = step / PAIRS_OF_ROWS % tiles * TILE, unit = step / PAIRS_OF_ROWS / tiles;
            };
            multiply(0, 0, 0, products[0]);
            for (int step = 0; step < steps; step++) {
                int unit, pair;
                i64 from;
                if (step + 1 < steps) {
                    place(step + 1, unit, from, pair);
                    multiply(unit, from, pair, products[(step + 1) % 2]);
                }
                place(step, unit, from, pair);
                const i64 some = n - from < TILE ? n - from : TILE, of_scale = uint64_t(chunk + unit * WIDTH) / UNIT;
                const auto& product = products[step % 2];
                for (i64 t = 0; t < some; t++) {
                    const F scale = all(x[from + t].scale[of_scale]);
                    unroll<2>([&](auto i) LAMBDA {
                        I wide = *(const UnalignedInts*)product[2 * i][t];
                        if (DIGITS == 2) wide += *(const UnalignedInts*)product[2 * i + 1][t] << 8;
                        sums[from + t][2 * pair + i] += to_float(wide) * scale;
                    });
                }
            }
        }
        Scales scales;
        scales_of(m, section, block, group, scales);
        for (i64 t = 0; t < n; t++) {
            const float of_group = x[t].group_sum(begin, m.group);
            end_group<1, QS>(scales, &of_group, 0, &sums[t], total + BLOCK * t);
        }
    }
    release_tiles();
    for (i64 t = 0; t < n; t++) for (int v = 0; v < VECTORS; v++) store_rows(out + BLOCK * t, v, load(total + BLOCK * t + W * v));
}
