// The rotation of lattice matrices' inputs (kernels/lattice.py).

// A column's sign: a hash of its number.
static INLINE float sign_of(uint32_t column) {
    uint32_t hash = column * 0x9E3779B1u;
    hash = (hash ^ hash >> 15) * 0x85EBCA77u;
    return (hash ^ hash >> 13) & 1 ? -1.0f : 1.0f;
}

// Apply signs and a Hadamard transform to columns begin to end, a multiple of `block`; a block of 0 does nothing.
INLINE void rotate(float* x, int64_t begin, int64_t end, int64_t block) {
    if (block == 0) return;
    for (int64_t c = begin; c < end; c++) x[c] *= sign_of(uint32_t(c));
    const float size = 1 / sqrtf((float)block);
    for (int64_t first = begin; first < end; first += block) {
        float* at = x + first;
        for (int64_t half = 1; half < block; half *= 2)
            for (int64_t i = 0; i < block; i += 2 * half)
                for (int64_t j = i; j < i + half; j++) {
                    const float a = at[j], b = at[j + half];
                    at[j] = a + b;
                    at[j + half] = a - b;
                }
        for (int64_t i = 0; i < block; i++) at[i] *= size;
    }
}
