// The types that both sides of a call share; kernels/native.py has their twins. All fields are 8 bytes.
#pragma once
#include <cstdint>

using i64 = int64_t;

// How the codes of a matrix become numbers: weight = (step * code - center) * scale + zero, or level[code] * scale.
enum Code : i64 { AFFINE = 0, E2M1 = 1, E4M3 = 2, PLAIN = 3, LATTICE = 4 };
// Storage format of a scale.
enum Scale : i64 { SCALE_AND_ZERO = 0, E8M0 = 1, SCALE_E4M3 = 2, FLOAT32 = 3, LOW_SCALE = 4, HIGH_SCALE = 5 };
enum Dtype : i64 { BFLOAT16 = 0, FLOAT16 = 1 };
enum Curve : i64 { SWIGLU = 0, SWIGLU_STEP = 1, SITU = 2, GELU = 3, GELU_TANH = 4, RELU2 = 5 };
enum Phase : i64 { READ = 0, GATE_UP = 1, DOWN = 2 };

// One projection of a version (docs/format.md). Offsets are bytes from the section's beginning, -1 for missing parts.
struct Matrix {
    i64 rows, columns, padded_rows, padded_columns;
    i64 code, bits;        // bits of a whole code: 16, 8, 4 or 2
    i64 nested;            // lower halves are in a section of their own
    i64 group, fold;       // columns that share a scale; columns whose 2-bit codes share bytes
    i64 scale, zeros;       // Scale; 1: zeros count steps of their scale, 2: both are float16
    i64 scales, factor, bias, order;
    double step, center;
};

struct Item {              // one expert's part of a layer's step
    i64 sections[3];       // addresses of gate, up and down
    i64 residual[3];           // addresses of residual sections, if nested
    i64 form;              // its matrices begin at Layer::matrices[3 * form]
    i64 first, count;      // its positions
};

struct Layer {
    i64 tokens, items, positions, out_rows, hidden, inter, dtype;
    const uint16_t* x;     // [tokens, hidden]
    uint16_t* out;         // [tokens * top_k, hidden], out_rows of them; those in pairs are overwritten
    const Item* item;
    const Matrix* matrices;
    const i64 *rows, *pairs; // for each position: row of x, row of out
    float *inputs, *activations;  // rows of `dymoe_row_floats(width)`: for each token, and for each position
    i64 width;             // columns of such a row, a multiple of 256 that no matrix exceeds
    i64 phase, last;       // first and last phase of a call
    i64 has_gate, curve;
    i64 digits;            // 8-bit digits of an activation: 2, 1, or 0 if all experts have floats
    i64 outer, inner;      // adjacent inputs of gate and up, and of down, that are rotated together, or 0
    i64 floats;            // whether experts have floats, and the processor multiplies pairs of bfloat16
    i64 tiles;             // whether the processor multiplies tiles
    double limit, alpha, beta;
    i64 threads, next;     // the next piece of work
};

struct Sum {               // see weighted_sum
    i64 tokens, top_k, hidden, dtype;
    const uint16_t* rows;
    const float* weights;
    uint16_t* into;
    const char* present;   // [tokens * top_k], which rows exist; null if all
    i64 threads, next;
};

// A block of columns that are rounded to points, each [streams, rows] (quantize/lattice.py): the high version, then the
// low one if there are two. The errors of a column, times its factors, are subtracted from the later ones.
struct Rounding {
    i64 rows, columns, streams;
    float* left;           // wanted values, overwritten
    float* errors;         // of each column, written
    uint8_t *base, *residual;  // codes [columns, rows], overwritten
    const float *factors, *divisors, *before;  // [columns, columns]; [columns]; inputs so far, or null
    double low_share;
};
