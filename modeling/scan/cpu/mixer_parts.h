// The arguments of the mixer, and what its work is put together from.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "functions.h"
#include "memory.h"
#include "segment.h"
#include "vectors.h"
#include "work.h"

// The mixer between its projections. `projected` is (tokens, width) with columns z, x, B, C, dt, A, trap, angle; k is
// (tokens, heads * state), beta (tokens, heads). S is the type of what the projections make and take, T that of all
// else. Null pointers are options: without k there is no reflection, without B_weight the write is along k,
// without norm_weight the output is not normalised, without A_bias the gates are smooth, and without `kept` no gradient
// will be asked for. Gradients are written, not added. Where `letters` is not 0 the projections are those of so many
// letters, and token i is letter index[i].
template <typename S, typename T>
struct Mixer {
    Layout layout;
    int64_t tokens, letters, width, heads, state, channels, pairs, threads, contractive, overwrites, heavy_tail;
    double a_min, epsilon;
    double beta_max, beta_stretch, beta_shift, rate_shift, angle_shift, shortest_k;  // see mixers/mamba3_numbers.py
    const int64_t* index;
    const S *projected, *k, *beta;
    const T *dt_bias, *A_bias, *B_weight, *B_bias, *C_weight, *C_bias, *D, *norm_weight, *h0, *B0, *u0, *phase0;
    S* out;
    T *h, *B, *u, *phase, *kept;
    double* kept_phase;
    const S* grad_out;
    const T *grad_h, *grad_B, *grad_u, *grad_phase;
    S *grad_projected, *grad_k, *grad_beta;
    T *grad_dt_bias, *grad_A_bias, *grad_B_weight, *grad_B_bias, *grad_C_weight, *grad_C_bias, *grad_D;
    T *grad_norm_weight, *grad_h0, *grad_B0, *grad_u0, *grad_phase0;

    // The row of a token in the projections.
    int64_t source(int64_t token) const { return letters ? index[token] : token; }
    int64_t sources() const { return letters ? letters : tokens; }
};

namespace {

constexpr double kPi = 3.14159265358979323846;

// The same angle between -pi and pi.
inline double wrapped_angle(double angle) {
    const double shift = 6755399441055744.0;  // 1.5 * 2^52, past which there are whole numbers only
    return angle - 2 * kPi * ((angle * (0.5 / kPi) + shift) - shift);
}

// `count` numbers over their RMS, times a weight; the rest of the last vector is 0.
template <typename S, typename T>
void normalise(const S* from, int64_t count, const T* weight, double epsilon, T* to) {
    Vector<T> squares{};
    for (int64_t i = 0; i < count; i += kLanes<T>) {
        vec(to + i) = read_vector<T>(from + i, count - i);
        squares += vec(to + i) * vec(to + i);
    }
    const T scale = T(1) / std::sqrt(sum_lanes<T>(squares) / T(count) + T(epsilon));
    for (int64_t i = 0; i < count; i += kLanes<T>) vec(to + i) *= scale * vec(weight + i);
}

// Columns of `projected`.
template <typename S, typename T>
struct Columns {
    explicit Columns(const Mixer<S, T>& a)
        : u(a.heads * a.channels),
          B(2 * u),
          C(B + a.state),
          dt(C + a.state),
          A(dt + a.heads),
          trap(A + a.heads),
          angle(trap + a.heads),
          speeds_of_head(a.pairs && a.width - angle > a.pairs ? a.pairs : 0),
          speeds(speeds_of_head ? a.heads * a.pairs : a.pairs) {}
    int64_t z = 0, u, B, C, dt, A, trap, angle;
    int64_t speeds_of_head;  // how many angular speeds each head has of its own: all its pairs, or none
    int64_t speeds;          // how many there are that turn pairs
};

// The functions behind the gates, and their slopes.
template <typename S, typename T>
class Gates {
    using V = Vector<T>;

  public:
    explicit Gates(const Mixer<S, T>& mixer) : a(mixer) {}

    FORCE_INLINE inline WithSlope<T> decay_rate(V x) const {
        const WithSlope<T> rate = a.heavy_tail ? heavy_tail(x) : softplus_and_slope<T>(x);
        if (!a.A_bias) {
            const V low = all(T(a.a_min));
            return {rate.value < low ? low : rate.value, rate.slope * (rate.value < low ? V{} : all(T(1)))};
        }
        const V shifted = rate.value - T(a.rate_shift);
        return {shifted < T(0) ? V{} : shifted, rate.slope * (shifted > T(0) ? all(T(1)) : V{})};
    }
    FORCE_INLINE inline WithSlope<T> reflection(V x) const {
        const V gate = sigmoid<T>(x), slope = gate * (T(1) - gate);
        const T most = T(a.beta_max), stretch = T(a.beta_stretch);
        if (!a.A_bias) return {most * gate, most * slope};
        const V wide = stretch * gate - T(a.beta_shift), low = wide < T(0) ? V{} : wide;
        return {low > most ? all(most) : low, wide < T(0) ? V{} : (wide > most ? V{} : stretch * slope)};
    }
    // The weight of a write along k: beta, or beta (2 - beta), which leaves out what full mirrors would write.
    template <typename X>
    FORCE_INLINE inline X write_along_k(X beta) const {
        return a.overwrites ? beta * (T(a.beta_max) - beta) : beta;
    }
    template <typename X>
    FORCE_INLINE inline X write_slope(X beta) const {
        return a.overwrites ? T(a.beta_max) - T(2) * beta : X{} + T(1);
    }
    FORCE_INLINE inline WithSlope<T> angular_speed(V x) const {
        const V tangent = hyperbolic_tangent(x), slope = T(kPi) * (T(1) - tangent * tangent);
        if (!a.A_bias) return {T(kPi) * tangent, slope};
        const T shift = T(a.angle_shift), scale = T(kPi / (1 - a.angle_shift));
        // The slope at rest is not 0: else a plane at rest could never begin to turn.
        return {scale * (tangent > shift ? tangent - shift : (tangent < -shift ? tangent + shift : V{})),
                slope / T(1 - a.angle_shift)};
    }

  private:
    FORCE_INLINE inline static WithSlope<T> heavy_tail(V x) {
        const V inverse = T(1) / (T(1) - x);
        return {x < T(0) ? inverse : x + T(1), x < T(0) ? inverse * inverse : all(T(1))};
    }

    const Mixer<S, T>& a;
};

// Whether heads lie in the lanes of vectors: if they fill them, and the states of so many heads are small.
template <typename S, typename T>
bool heads_in_lanes(const Mixer<S, T>& a) {
    return a.heads % kLanes<T> == 0 && a.state * a.channels <= 1024;
}

// Heads of a unit: some, so that what they share is computed once; fewer if there would be too few units for the
// threads. It depends on the shape alone, as the order of sums does.
template <typename S, typename T>
int64_t heads_in_unit(const Mixer<S, T>& a) {
    if (heads_in_lanes(a)) return kLanes<T>;
    int64_t heads = 16;
    while (heads > 1 && a.layout.rows * ((a.heads + heads - 1) / heads) < 32) heads /= 2;
    return heads;
}

template <typename S, typename T>
int64_t units_in_row(const Mixer<S, T>& a) {
    return (a.heads + heads_in_unit(a) - 1) / heads_in_unit(a);
}

// Whether what heads share can be passed on where it is found, since no other unit adds to it.
template <typename S, typename T>
bool one_unit_has_all(const Mixer<S, T>& a) {
    return heads_in_lanes(a) && units_in_row(a) == 1 && !a.letters;
}

// Rows that one thread takes together. The gradients of letters are added up for each such group by itself, so that
// threads do not meet and sums do not depend on them; all groups need no more memory than the gradients of tokens would.
template <typename S, typename T>
int64_t rows_in_group(const Mixer<S, T>& a) {
    if (!a.letters || !a.tokens) return 1;
    return std::min(a.layout.rows, (a.layout.rows * a.letters + a.tokens - 1) / a.tokens);
}

template <typename S, typename T>
int64_t groups(const Mixer<S, T>& a) {
    return (a.layout.rows + rows_in_group(a) - 1) / std::max(int64_t(1), rows_in_group(a));
}

// Gradients of the rows of a tensor: stored, or, where rows are letters, added to sums.
template <typename S, typename T>
struct GradientRows {
    S* stored;
    T* sums;
    int64_t stride;

    void give(const T* from, int64_t count, int64_t row, int64_t column) const {
        sums ? add(from, count, sums + row * stride + column) : store(from, count, stored + row * stride + column);
    }
    void give_vector(Vector<T> x, int64_t count, int64_t row, int64_t column) const {
        if (!sums) return write_vector<T>(x, stored + row * stride + column, count);
        T* to = sums + row * stride + column;
        write_vector<T>(read_vector<T>(to, count) + x, to, count);
    }
    void give(T x, int64_t row, int64_t column) const {
        if (sums)
            sums[row * stride + column] += x;
        else
            put(x, stored[row * stride + column]);
    }
};

// Where the gradients of projections go; `shared` is for those of what heads share: normalised B and C, and omega if no
// head has its own.
template <typename S, typename T>
struct MixerGradients {
    GradientRows<S, T> projected, k, beta;
    GradientRows<T, T> shared;
};

// Sums over tokens that the backward pass makes for each row and head: of a segment in X = T, of a row in double.
template <typename T, typename X = T>
struct HeadSums {
    HeadSums(int64_t n, int64_t p, X* at = nullptr)
        : size(padded<T>(3) + 2 * padded<T>(n) + padded<T>(p)),
          scalars(at),
          B_bias(at + padded<T>(3)),
          C_bias(B_bias + padded<T>(n)),
          norm_weight(C_bias + padded<T>(n)) {}
    int64_t size;
    X *scalars, *B_bias, *C_bias, *norm_weight;  // scalars: dt_bias, A_bias, D
};

// What the backward pass adds up beside its results.
template <typename S, typename T>
struct BackwardSums {
    explicit BackwardSums(const Mixer<S, T>& a)
        : shared_size(2 * a.state + (Columns<S, T>(a).speeds_of_head ? 0 : a.pairs)),
          shared(one_unit_has_all(a) ? 0 : (a.letters ? groups(a) : 1) * units_in_row(a) * a.sources() * shared_size),
          heads(a.layout.rows * a.heads * HeadSums<T>(a.state, a.channels).size),
          norms((a.letters ? a.letters : a.layout.rows) * 2 * a.state) {
        if (!a.letters) return;
        projected.resize(groups(a) * a.letters * a.width);
        if (!a.k) return;
        k.resize(groups(a) * a.letters * a.heads * a.state);
        beta.resize(groups(a) * a.letters * a.heads);
    }

    int64_t shared_size;
    std::vector<T> shared;      // (parts, sources, shared_size), of what heads share
    std::vector<double> heads;  // `HeadSums` of each row and head
    std::vector<double> norms;  // (rows or letters, 2 state), of the weights of the norms of B and C
    std::vector<T> projected, k, beta;  // of letters, for each group

    // Units work on different parts of `shared`, and so do groups, which share letters but no tokens.
    MixerGradients<S, T> of_group(const Mixer<S, T>& a, int64_t group, int64_t unit) {
        const int64_t part = (a.letters ? group * units_in_row(a) : 0) + unit;
        T* shared_part = shared.data() + part * a.sources() * shared_size;
        const auto rows_of = [&](S* stored, std::vector<T>& added, int64_t stride) {
            return GradientRows<S, T>{stored, a.letters ? added.data() + group * a.letters * stride : nullptr, stride};
        };
        return {rows_of(a.grad_projected, projected, a.width), rows_of(a.grad_k, k, a.heads * a.state),
                rows_of(a.grad_beta, beta, a.heads), {shared_part, a.letters ? shared_part : nullptr, shared_size}};
    }
};

// What is read once for the heads of a unit in one segment: normalised B and C before the bias, and omega, of all heads
// if each has its own. Row 0 of B is that of the token before the segment.
template <typename S, typename T>
class SharedSegment {
  public:
    SharedSegment(const Mixer<S, T>& mixer, Buffers<T>& memory)
        : B(memory, kSegment + 1, padded<T>(mixer.state)),
          C(memory, kSegment, padded<T>(mixer.state)),
          omega(memory, kSegment + 1, padded<T>(Columns<S, T>(mixer).speeds)),
          grad_B(memory, kSegment, B.stride),
          grad_C(memory, kSegment, B.stride),
          grad_omega(memory, kSegment, omega.stride),
          a(mixer),
          columns(mixer),
          gates(mixer),
          B_weight(memory.take(B.stride)),
          C_weight(memory.take(B.stride)) {
        if (a.B_weight) load(a.B_weight, a.state, B_weight);
        load(a.C_weight, a.state, C_weight);
    }

    void fill(int64_t row, int64_t start, int64_t steps) {
        for (int64_t t = start ? -1 : 0; t < steps; ++t) {
            const S* from = a.projected + a.source(a.layout.token(row, start + t)) * a.width;
            if (a.B_weight) normalise(from + columns.B, a.state, B_weight, a.epsilon, B[t + 1]);
            if (t < 0) continue;
            normalise(from + columns.C, a.state, C_weight, a.epsilon, C[t]);
            load(from + columns.angle, columns.speeds, omega[t]);
            for (int64_t i = 0; i < columns.speeds; i += kLanes<T>)
                vec(omega[t] + i) = gates.angular_speed(vec(omega[t] + i)).value;
        }
    }

    void clear_gradients() {
        std::fill_n(grad_B.data, kSegment * grad_B.stride, T(0));
        std::fill_n(grad_C.data, kSegment * grad_C.stride, T(0));
        std::fill_n(grad_omega.data, kSegment * grad_omega.stride, T(0));
    }

    Rows<T> B, C, omega, grad_B, grad_C, grad_omega;

  private:
    const Mixer<S, T>& a;
    const Columns<S, T> columns;
    const Gates<S, T> gates;
    T *B_weight, *C_weight;
};

// Rows of a segment for each head of a unit. What a head needs of one token lies far from what it needs of the next, so
// that memory is read and written a token at a time, for all heads.
template <typename T>
class HeadRows {
  public:
    HeadRows(Buffers<T>& memory, int64_t heads, int64_t stride)
        : stride(stride), data(memory.take(heads * (kSegment + 1) * stride)) {}
    T* of_head(int64_t i) const { return data + i * (kSegment + 1) * stride; }
    // From row `t` of each head, and to it, `count` numbers each.
    template <typename S>
    void load_token(const S* from, int64_t heads, int64_t count, int64_t t) {
        for (int64_t i = 0; i < heads; ++i) load(from + i * count, count, of_head(i) + t * stride);
    }
    template <typename S>
    void store_token(int64_t t, int64_t heads, int64_t count, S* to) const {
        for (int64_t i = 0; i < heads; ++i) store(of_head(i) + t * stride, count, to + i * count);
    }
    template <typename S>
    void give_token(int64_t t, int64_t heads, int64_t count, const GradientRows<S, T>& to, int64_t row,
                    int64_t column) const {
        for (int64_t i = 0; i < heads; ++i) to.give(of_head(i) + t * stride, count, row, column + i * count);
    }

  private:
    int64_t stride;
    T* data;
};

// One number for each step of a segment, in whole vectors.
template <typename T>
struct PerStep {
    alignas(64) T of[kSegment] = {};
    T& operator[](int64_t t) { return of[t]; }
    T operator[](int64_t t) const { return of[t]; }
    template <typename F>
    static PerStep from(F f) {
        PerStep result;
        for (int64_t t = 0; t < kSegment; t += kLanes<T>) vec(result.of + t) = f(t);
        return result;
    }
    Vector<T> at(int64_t t) const { return vec(of + t); }
};

}  // namespace
