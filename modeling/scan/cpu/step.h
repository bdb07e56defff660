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

// What the mixer takes of a token x.
template <typename T>
void block_norm(const MixerStep<T>& a, const T* x, T* to) {
    T mean = 0, squares = 0;
    for (int64_t i = 0; a.centred && i < a.hidden; ++i) mean += x[i] / T(a.hidden);
    for (int64_t i = 0; i < a.hidden; ++i) squares += (x[i] - mean) * (x[i] - mean);
    const T scale = T(1) / std::sqrt(squares / T(a.hidden) + T(a.block_epsilon));
    for (int64_t i = 0; i < a.hidden; ++i)
        to[i] = (x[i] - mean) * scale * a.block_weight[i] + (a.block_bias ? a.block_bias[i] : T(0));
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
            block_norm(a, x, normed.data());
            x = normed.data();
        }
        multiply(a.in_proj, x, mixer.width, a.hidden, projected.data() + row * mixer.width);
        if (!a.k_proj) continue;
        multiply(a.k_proj, x, keys, a.hidden, k.data() + row * keys);
        multiply(a.beta_proj, x, mixer.heads, a.hidden, beta.data() + row * mixer.heads);
        for (int64_t head = 0; head < mixer.heads; ++head) beta[row * mixer.heads + head] += a.beta_bias[head];
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

}  // namespace
