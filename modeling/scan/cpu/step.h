// Single steps, each in one call: between calls of torch for its parts more time would pass than in them.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "mixer.h"
#include "mixer_parts.h"
#include "vectors.h"

// One token of each row through the whole mixer, its projections included, and what stands around it in a block: the
// norm of x (none without a weight; with `centred` its mean is taken off) and the residual connection. Sizes and state
// are those of `mixer`, whose `projected`, `k`, `beta` and `out` are made here.
template <typename T>
struct MixerStep {
    Mixer<T, T> mixer;
    int64_t hidden, centred, residual;
    double block_epsilon;
    const T *x, *in_proj, *k_proj, *beta_proj, *beta_bias, *out_proj, *block_weight, *block_bias;
    T* y;
};

// A whole policy at one observation of each row: the map of observations, all blocks, the last norm (as in a block) and
// the first rows of the map to actions. Biases may be null.
template <typename T>
struct PolicyStep {
    int64_t rows, layers, inputs, hidden, actions, centred;
    double epsilon;
    const MixerStep<T>* blocks;
    const T *in_weight, *in_bias, *norm_weight, *norm_bias, *head_weight, *head_bias;
};

namespace {

// y = W x for a matrix of `rows` times `columns`.
template <typename T>
void multiply(const T* W, const T* x, int64_t rows, int64_t columns, T* y) {
    const int64_t whole = columns - columns % kLanes<T>;
    for (int64_t block = 0; block < rows; block += kLanes<T>) {
        const auto sums = sum_rows<T, 1, kLanes<T>>(block, [&](int64_t i) FORCE_INLINE {
            Sums<T, 1> row{};
            if (i >= rows) return row;
            const T* w = W + i * columns;
            for (int64_t j = 0; j < whole; j += kLanes<T>) {
                Vector<T> a, b;
                std::memcpy(&a, w + j, VECTOR_BYTES);
                std::memcpy(&b, x + j, VECTOR_BYTES);
                row.of[0] += a * b;
            }
            for (int64_t j = whole; j < columns; ++j) row.of[0][0] += w[j] * x[j];
            return row;
        });
        for (int64_t l = 0; l < kLanes<T> && block + l < rows; ++l) y[block + l] = sums.of[0][l];
    }
}

// y = W x + bias, if there is one.
template <typename T>
void affine(const T* W, const T* bias, const T* x, int64_t rows, int64_t columns, T* y) {
    multiply(W, x, rows, columns, y);
    for (int64_t i = 0; bias && i < rows; ++i) y[i] += bias[i];
}

// The norm of a token x; with `centred` its mean is taken off. Returns whether the sum of squares is finite.
template <typename T>
bool norm(const T* x, int64_t size, bool centred, double epsilon, const T* weight, const T* bias, T* to) {
    T mean = 0, squares = 0;
    for (int64_t i = 0; centred && i < size; ++i) mean += x[i] / T(size);
    for (int64_t i = 0; i < size; ++i) squares += (x[i] - mean) * (x[i] - mean);
    const T scale = T(1) / std::sqrt(squares / T(size) + T(epsilon));
    for (int64_t i = 0; i < size; ++i) to[i] = (x[i] - mean) * scale * weight[i] + (bias ? bias[i] : T(0));
    return std::isfinite(squares);
}

template <typename T>
void step(const MixerStep<T>& a) {
    Mixer<T, T> mixer = a.mixer;
    const int64_t rows = mixer.layout.rows, keys = mixer.heads * mixer.state, inner = mixer.heads * mixer.channels;
    std::vector<T> projected(rows * mixer.width), k(rows * keys), beta(rows * mixer.heads), out(rows * inner);
    std::vector<T> normed(a.hidden);
    std::vector<double> kept_phase(rows * mixer.heads * mixer.pairs);
    for (int64_t row = 0; row < rows; ++row) {
        const T* x = a.x + row * a.hidden;
        if (a.block_weight) {
            norm(x, a.hidden, a.centred, a.block_epsilon, a.block_weight, a.block_bias, normed.data());
            x = normed.data();
        }
        multiply(a.in_proj, x, mixer.width, a.hidden, projected.data() + row * mixer.width);
        if (!a.k_proj) continue;
        multiply(a.k_proj, x, keys, a.hidden, k.data() + row * keys);
        affine(a.beta_proj, a.beta_bias, x, mixer.heads, a.hidden, beta.data() + row * mixer.heads);
    }
    mixer.projected = projected.data();
    mixer.k = a.k_proj ? k.data() : nullptr;
    mixer.beta = beta.data();
    mixer.out = out.data();
    mixer.kept_phase = kept_phase.data();
    run(mixer, true);
    for (int64_t row = 0; row < rows; ++row)
        multiply(a.out_proj, out.data() + row * inner, a.hidden, inner, a.y + row * a.hidden);
    for (int64_t i = 0; a.residual && i < rows * a.hidden; ++i) a.y[i] += a.x[i];
}

template <typename T>
bool are_finite(const T* x, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
        if (!std::isfinite(x[i])) return false;
    return true;
}

// Actions (rows, actions) for observations (rows, inputs). `states` holds the addresses of h, B, u and phase of every
// block before the step, and then after it. Returns whether all numbers are finite; otherwise the results are not to be
// used.
template <typename T>
bool step(const PolicyStep<T>& a, const T* observations, T* const* states, T* actions) {
    if (!are_finite(observations, a.rows * a.inputs)) return false;
    std::vector<T> x(a.rows * a.hidden), y(a.rows * a.hidden);
    for (int64_t row = 0; row < a.rows; ++row)
        affine(a.in_weight, a.in_bias, observations + row * a.inputs, a.hidden, a.inputs, x.data() + row * a.hidden);
    for (int64_t layer = 0; layer < a.layers; ++layer) {
        MixerStep<T> block = a.blocks[layer];
        T *const *before = states + 4 * layer, *const *after = before + 4 * a.layers;
        block.mixer.layout.rows = block.mixer.tokens = a.rows;
        block.mixer.h0 = before[0], block.mixer.B0 = before[1], block.mixer.u0 = before[2];
        block.mixer.phase0 = before[3];
        block.mixer.h = after[0], block.mixer.B = after[1], block.mixer.u = after[2], block.mixer.phase = after[3];
        block.x = x.data();
        block.y = y.data();
        step(block);
        x.swap(y);
    }
    for (int64_t row = 0; row < a.rows; ++row) {
        const T* read = x.data() + row * a.hidden;
        if (a.norm_weight) {
            if (!norm(read, a.hidden, a.centred, a.epsilon, a.norm_weight, a.norm_bias, y.data())) return false;
            read = y.data();
        }
        affine(a.head_weight, a.head_bias, read, a.actions, a.hidden, actions + row * a.actions);
    }
    return are_finite(actions, a.rows * a.actions);
}

}  // namespace
