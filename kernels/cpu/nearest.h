// The nearest points of E8 in a cube (kernels/lattice.py), and the rounding of a block of columns to them, W points at
// a time.

constexpr int POINT = 8;   // weights of a point

// Codes of the points nearest to W vectors, coordinate by coordinate, and those points.
INLINE void nearest_points(const F wanted[POINT], I codes[POINT], F found[POINT]) {
    F best = all(3e38f);
    for (int odd = 0; odd < 2; odd++) {
        I code[POINT], other[POINT], parity = I{};
        F gap[POINT], least_gap = all(3e38f), cost = F{};
        for (int i = 0; i < POINT; i++) {
            const F left = wanted[i] + all(odd ? 1.75f : 1.25f);  // codes are their own numbers
            const I even = (left > all(1.0f)) & 2, uneven = ((left > all(2.0f)) & 2) + 1;
            const F to_even = left - to_float(even), to_uneven = left - to_float(uneven);
            const F costs[2] = {to_even * to_even, to_uneven * to_uneven};
            const I is_odd = costs[1] < costs[0];
            code[i] = (is_odd & uneven) | (~is_odd & even);
            other[i] = (is_odd & even) | (~is_odd & uneven);
            gap[i] = choose(is_odd, costs[0] - costs[1], costs[1] - costs[0]);
            least_gap = least(least_gap, gap[i]);
            cost += choose(is_odd, costs[1], costs[0]);
            parity ^= is_odd;
        }
        // If the parity is wrong, the code whose exchange costs least is replaced.
        I wrong = odd ? ~parity : parity;
        cost += as_float(wrong & (I)least_gap);
        const I better = cost < best;
        best = choose(better, cost, best);
        for (int i = 0; i < POINT; i++) {
            const I exchanged = wrong & (gap[i] <= least_gap);
            wrong &= ~exchanged;
            code[i] = (exchanged & other[i]) | (~exchanged & code[i]);
            codes[i] = (better & code[i]) | (~better & codes[i]);
            found[i] = choose(better, to_float(code[i]) - all(odd ? 1.75f : 1.25f), found[i]);
        }
    }
}

// Rounds one block of columns, see Rounding in layer.h.
static void round_block(void* argument) {
    const Rounding& k = *(Rounding*)argument;
    const i64 stride = k.streams * k.rows;
    const float share = (float)k.low_share, weight = share / (1 - share), residual = 0.25f;
    for (i64 first = 0; first < k.rows; first += POINT * W) {
        const i64 count = k.rows - first < POINT * W ? k.rows - first : POINT * W;
        for (i64 column = 0; column < k.columns; column++) {
            float* wanted[2] = {k.left + column * stride + first, k.left + column * stride + k.rows * (k.streams - 1) + first};
            alignas(64) float high[POINT * W] = {}, low[POINT * W] = {}, base[POINT * W], both[POINT * W];
            memcpy(high, wanted[0], count * 4);
            memcpy(low, wanted[1], count * 4);
            F target[POINT], point[POINT] = {}, rest[POINT];
            for (int i = 0; i < POINT; i++)
                for (int w = 0; w < W; w++) {
                    const int at = POINT * w + i;
                    target[i][w] = k.streams == 1 ? high[at] : share * low[at] + (1 - share) * high[at];
                }
            I codes[2][POINT] = {};
            nearest_points(target, codes[0], point);
            for (int i = 0; i < POINT; i++)
                for (int w = 0; w < W; w++) {
                    base[POINT * w + i] = both[POINT * w + i] = point[i][w];
                    rest[i][w] = (high[POINT * w + i] - point[i][w]) / residual;
                }
            if (k.streams == 2) {
                nearest_points(rest, codes[1], point);
                for (int i = 0; i < POINT; i++)
                    for (int w = 0; w < W; w++) both[POINT * w + i] += residual * point[i][w];
            }
            const float* made[2] = {both, base};
            for (i64 w = 0; w < count / POINT; w++) {
                bool taken = true;
                if (k.before != nullptr) {
                    float costs[2] = {0, 0};
                    for (i64 stream = 0; stream < k.streams; stream++)
                        for (i64 i = POINT * w; i < POINT * w + POINT; i++) {
                            const float at = wanted[stream][i], factor = stream ? weight : 1;
                            const float old = at - k.before[column * stride + stream * k.rows + first + i];
                            costs[0] += factor * old * old;
                            costs[1] += factor * (at - made[stream][i]) * (at - made[stream][i]);
                        }
                    taken = costs[1] < costs[0];
                }
                for (i64 stream = 0; taken && stream < k.streams; stream++)
                    for (int i = 0; i < POINT; i++)
                        (stream ? k.residual : k.base)[column * k.rows + first + POINT * w + i] = uint8_t(codes[stream][i][w]);
                for (i64 stream = 0; stream < k.streams; stream++)
                    for (i64 i = POINT * w; i < POINT * w + POINT; i++) {
                        const i64 at = column * stride + stream * k.rows + first + i;
                        k.errors[at] = k.before == nullptr ? (wanted[stream][i] - made[stream][i]) / k.divisors[column]
                                       : taken             ? made[stream][i] - k.before[at]
                                                           : 0;
                    }
            }
            for (i64 later = column + 1; later < k.columns; later++) {
                const float factor = k.factors[column * k.columns + later];
                for (i64 stream = 0; stream < k.streams; stream++) {
                    const float* error = k.errors + column * stride + stream * k.rows + first;
                    float* to = k.left + later * stride + stream * k.rows + first;
                    for (i64 i = 0; i < count; i++) to[i] -= factor * error[i];
                }
            }
        }
    }
}
