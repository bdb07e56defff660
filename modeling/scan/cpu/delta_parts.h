// The arguments of the delta family's mixer, and what its work is put together from.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "functions.h"
#include "memory.h"
#include "mixer_parts.h"
#include "segment.h"
#include "vectors.h"
#include "work.h"

// `projected` is (tokens, width) with columns q (heads, state), k (steps, heads, state), v (steps, heads, channels),
// with a gate g (heads, channels), b (steps, heads), with a decay a (heads), and some that are not used. The
// convolution and the last tokens of the state are of q, k and v. S is the type of what the projections make and take,
// T that of all else. Without conv_weight there is no convolution, without A_log no decay. Gradients are written, not
// added. Where `letters` is not 0, `projected` is (letters, width), and token i is letter index[i].
template <typename S, typename T>
struct Delta {
    Layout layout;
    int64_t tokens, letters, width, heads, state, channels, threads, steps, conv_width, gated;
    double beta_max, key_epsilon, epsilon;
    const int64_t* index;
    const S* projected;
    const T *conv_weight, *A_log, *dt_bias, *norm_weight, *h0, *last0;
    S* out;
    T *h, *last, *kept;
    const S* grad_out;
    const T *grad_h, *grad_last;
    S* grad_projected;
    T *grad_conv_weight, *grad_A_log, *grad_dt_bias, *grad_norm_weight, *grad_h0, *grad_last0;

    // The row of a token in `projected`.
    int64_t source(int64_t token) const { return letters ? index[token] : token; }
};

namespace {

// Asks for memory that will be read or written after some other work. The compiler would leave out a call of it, since
// it changes nothing.
template <bool Write, typename X>
FORCE_INLINE inline void expect(const X* at, int64_t count) {
    for (int64_t i = 0; i < count * int64_t(sizeof(X)); i += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(at) + i, Write, 2);
}

// Tokens of a segment, whose delta steps are about as many as the steps of other segments.
inline int64_t delta_segment_tokens(int64_t steps) { return std::max<int64_t>(1, kSegment / steps); }

// How the work is divided: a unit is a block of rows and a group of heads. It depends on the shape alone, as the order
// of sums does. Each block has sums of its own, so that there are not many; those for letters need no more memory than
// the gradients of tokens would.
template <typename S, typename T>
struct DeltaUnits {
    explicit DeltaUnits(const Delta<S, T>& a) : rows(a.layout.rows), all_heads(a.heads) {
        while (heads > 1 && rows * groups() < 32) heads /= 2;
        rows_in_block = std::max<int64_t>(1, rows * groups() / 256);
        if (a.tokens) rows_in_block = std::max(rows_in_block, (rows * a.letters + a.tokens - 1) / a.tokens);
    }
    int64_t groups() const { return (all_heads + heads - 1) / heads; }
    int64_t blocks() const { return (rows + rows_in_block - 1) / rows_in_block; }
    int64_t count() const { return blocks() * groups(); }

    int64_t rows, all_heads, heads = 16, rows_in_block = 1;
};

// What the backward pass adds up: for each unit and head of it `of_head` sums for weights, and for each block the
// gradients of letters.
template <typename S, typename T>
struct DeltaSums {
    DeltaSums(const Delta<S, T>& a, int64_t of_head)
        : weights(DeltaUnits<S, T>(a).count() * DeltaUnits<S, T>(a).heads * of_head),
          letters(DeltaUnits<S, T>(a).blocks() * a.letters * a.width) {}
    std::vector<double> weights;
    std::vector<T> letters;
};

// Where the columns of `projected` lie. Those before g are convolved.
template <typename S, typename T>
struct DeltaColumns {
    explicit DeltaColumns(const Delta<S, T>& a)
        : k(a.heads * a.state),
          v(k + a.steps * a.heads * a.state),
          g(v + a.steps * a.heads * a.channels),
          b(g + (a.gated ? a.heads * a.channels : 0)),
          a(b + a.steps * a.heads),
          used(this->a + (a.A_log ? a.heads : 0)) {}
    int64_t q = 0, k, v, g, b, a, used;
};

// Queries, keys or values of the heads of a unit in one segment: as they were projected, with the tokens before it that
// the convolution reaches; and the gradients of these. Of each token and head there are `count` vectors.
template <typename S, typename T>
class Stream {
    using V = Vector<T>;
    static constexpr int64_t L = kLanes<T>;

  public:
    Stream(const Delta<S, T>& a, Buffers<T>& memory, int64_t heads, bool has_backward, int64_t column, int64_t count,
           int64_t size)
        : a(a),
          column(column),
          count(count),
          size(size),
          stride(padded<T>(size)),
          width(a.conv_weight ? a.conv_width : 0),
          before(std::max<int64_t>(width - 1, 0)),
          rows((before + delta_segment_tokens(a.steps)) * count),
          x(memory.take(heads * rows * stride)),
          slope(memory.take(rows * stride)),
          weight(memory.take(heads * count * width * stride)) {
        if (!has_backward) return;
        grad_x = memory.take(heads * rows * stride);
        if (width) grad_mixed = memory.take(rows * stride);
    }

    int64_t sums_size() const { return count * width * stride; }

    void choose_heads(int64_t first, int64_t heads) {
        if (first == chosen_first) return;
        chosen_first = first;
        for (int64_t i = 0; i < heads * count; ++i)
            for (int64_t j = 0; j < width; ++j)
                for (int64_t l = 0; l < size; ++l)
                    weight[(i * width + j) * stride + l] = a.conv_weight[(at(i / count, i % count) + l) * width + j];
    }

    // From a token of `projected`, or of the state before the sequence, to row t.
    template <typename X>
    void load_token(const X* from, int64_t heads, int64_t t) {
        for (int64_t i = 0; i < heads; ++i)
            for (int64_t c = 0; c < count; ++c) load(from + at(i, c), size, x + row(i, t, c));
    }
    template <typename X>
    void store_token(int64_t heads, int64_t t, X* to) const {
        for (int64_t i = 0; i < heads; ++i)
            for (int64_t c = 0; c < count; ++c) store(x + row(i, t, c), size, to + at(i, c));
    }
    template <typename X>
    void give_gradient(int64_t heads, int64_t t, const GradientRows<X, T>& to, int64_t source) const {
        for (int64_t i = 0; i < heads; ++i)
            for (int64_t c = 0; c < count; ++c) to.give(grad_x + row(i, t, c), size, source, at(i, c));
    }
    template <typename X>
    void load_gradient(const X* from, int64_t heads, int64_t t) {
        for (int64_t i = 0; i < heads; ++i)
            for (int64_t c = 0; c < count; ++c) load(from + at(i, c), size, grad_x + row(i, t, c));
    }

    // Vector c of token t of head i, through the convolution and silu.
    void activate(int64_t i, int64_t t, int64_t c, T* to) {
        for (int64_t l = 0; l < stride; l += L) {
            V sum{};
            if (!width) sum = vec(x + row(i, t, c) + l);
            for (int64_t j = 0; j < width; ++j)
                sum += vec(weight_of(i, c, j) + l) * vec(x + row(i, t + j, c) + l);
            const V open = sigmoid<T>(sum);
            vec(to + l) = sum * open;
            vec(slope + (t * count + c) * stride + l) = open * (T(1) + sum * (T(1) - open));
        }
    }

    // grad(l): the vectors of the gradient of what `activate` made.
    template <typename Gradient>
    void activate_back(int64_t i, int64_t t, int64_t c, const Gradient& grad) {
        T* to = width ? grad_mixed + (t * count + c) * stride : grad_x + row(i, t, c);
        const T* with = slope + (t * count + c) * stride;
        for (int64_t l = 0; l < stride; l += L) vec(to + l) = grad(l) * vec(with + l);
    }

    // After `activate_back` for all of a segment: the convolution, whose weights have their gradients added to `sums`.
    void convolve_back(int64_t i, int64_t tokens, double* sums) {
        for (int64_t c = 0; width && c < count; ++c)
            for (int64_t j = 0; j < width; ++j, sums += stride)
                for (int64_t l = 0; l < stride; l += L) {
                    const V w = vec(weight_of(i, c, j) + l);
                    V sum{};
                    for (int64_t t = 0; t < tokens; ++t) {
                        const V grad = vec(grad_mixed + (t * count + c) * stride + l);
                        const int64_t at = row(i, t + j, c) + l;
                        vec(grad_x + at) += w * grad;
                        sum += grad * vec(x + at);
                    }
                    for (int64_t lane = 0; lane < L; ++lane) sums[l + lane] += sum[lane];
                }
    }

    // Of the gradients, those of tokens before the segment become those of the last tokens of the one before it.
    void pass_gradients_on(int64_t heads, int64_t tokens) {
        for (int64_t i = 0; width && i < heads; ++i) {
            T* of_head = grad_x + row(i, 0, 0);
            const int64_t token = count * stride;
            std::copy_backward(of_head, of_head + before * token, of_head + (tokens + before) * token);
            std::fill_n(of_head, tokens * token, T(0));
        }
    }

    // Adds the sums of a head to the gradient of the convolution.
    void add_sums(int64_t first, int64_t i, const double* sums, std::vector<double>& to) const {
        for (int64_t c = 0; c < count; ++c)
            for (int64_t j = 0; j < width; ++j, sums += stride)
                for (int64_t l = 0; l < size; ++l)
                    to[(column + (c * a.heads + first + i) * size + l) * width + j] += sums[l];
    }

  private:
    int64_t at(int64_t i, int64_t c) const { return column + (c * a.heads + chosen_first + i) * size; }
    int64_t row(int64_t i, int64_t t, int64_t c) const { return (i * rows + t * count + c) * stride; }
    const T* weight_of(int64_t i, int64_t c, int64_t j) const {
        return weight + ((i * count + c) * width + j) * stride;
    }

    const Delta<S, T>& a;
    const int64_t column, count, size, stride;
    int64_t chosen_first = -1;

  public:
    const int64_t width, before;

  private:
    const int64_t rows;
    T *x, *slope, *weight, *grad_x = nullptr, *grad_mixed = nullptr;  // grad_mixed: after the convolution
};

}  // namespace
