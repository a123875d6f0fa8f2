// exact_sums of the instruction sets that add four products of bytes to 32 bits: ADD_PRODUCTS is that instruction, written
// out, because GCC copies the builtin's sum around.

// wide[t] = sums over WIDTH columns of the codes in R registers times (256 * high + low) of token t.
template <int WIDTH, int SPAN, int N, int R, int DIGITS, class Fetch, class Row>
INLINE void exact_sums(Fetch fetch, const Row* x, int64_t column, I (*wide)[R]) {
    Q low[N * R], high[N * R];
    unroll<N * R>([&](auto i) LAMBDA { low[i] = high[i] = Q{}; });
    for (int64_t c = column; c < column + WIDTH; c += STEP) {
        Q q[R];
        fetch(c, q);
        unroll<N>([&](auto t) LAMBDA {
            auto add = [&](const int8_t* digits, Q* sums) LAMBDA {
                int four;
                memcpy(&four, digits + c, 4);
                const I factor = four - I{};
                unroll<R>([&](auto r) LAMBDA { ADD_PRODUCTS(sums[t * R + r], q[r], factor); });
            };
            add(x[t].low, low);
            if constexpr (DIGITS == 2) add(x[t].high, high);
        });
    }
    unroll<N * R>([&](auto i) LAMBDA { wide[i / R][i % R] = DIGITS == 2 ? (I)low[i] + ((I)high[i] << 8) : (I)low[i]; });
}
#undef ADD_PRODUCTS
