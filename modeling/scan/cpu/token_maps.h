// What a token is before it enters a sequence: everything of it that depends on no other token, for as many heads as a
// vector has lanes. Where tokens are letters it is made once for each of them, and its gradients are added up before
// they are passed on.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "functions.h"
#include "memory.h"
#include "mixer_parts.h"
#include "vectors.h"

namespace {

// Numbers of a token and head, a vector of heads each.
enum TokenGate { kDt, kRate, kLambda, kBeta, kDecay, kWrite, kCarry, kReflection, kInverseLength, kLong, kDtSlope,
                 kRateSlope, kBetaSlope, kTokenGates };
// Those that a sequence has gradients for; that of the decay is with respect to its logarithm.
enum GradientGate { kToDt, kToLogDecay, kToWrite, kToCarry, kToReflection, kGradientGates };

// The parts of a token, or their gradients, in a block of memory. Vectors are of heads; B and C, which heads share, are
// numbers in a token and vectors in its gradients. The gradient of z is that of z sigmoid(z) at first.
template <typename T>
struct TokenRow {
    using V = Vector<T>;
    TokenRow() = default;
    TokenRow(T* at, int64_t n, int64_t p, int64_t m, bool gradients) {
        const int64_t shared = gradients ? kLanes<T> : 1;
        const auto take = [&](int64_t count) { return std::exchange(at, at + padded<T>(count)); };
        u = reinterpret_cast<V*>(take(p * kLanes<T>));
        z = reinterpret_cast<V*>(take(p * kLanes<T>));
        open = gradients ? nullptr : reinterpret_cast<V*>(take(p * kLanes<T>));
        k = reinterpret_cast<V*>(take(n * kLanes<T>));
        gates = reinterpret_cast<V*>(take((gradients ? int64_t(kGradientGates) : int64_t(kTokenGates)) * kLanes<T>));
        B = take(padded<T>(n) * shared);
        C = take(padded<T>(n) * shared);
        omega = reinterpret_cast<V*>(take(m * kLanes<T>));
        end = at;
    }
    static int64_t size(int64_t n, int64_t p, int64_t m, bool gradients) {
        return TokenRow(nullptr, n, p, m, gradients).end - static_cast<T*>(nullptr);
    }

    V *u = nullptr, *z = nullptr, *open = nullptr, *k = nullptr, *gates = nullptr, *omega = nullptr;
    T *B = nullptr, *C = nullptr, *end = nullptr;  // open: sigmoid of z
    V& B_of(int64_t i) const { return reinterpret_cast<V*>(B)[i]; }
    V& C_of(int64_t i) const { return reinterpret_cast<V*>(C)[i]; }
};

// From the gradients of what heads share of a token or letter to those of its projections. Adds to the sums for the
// weights of the norms, (2, state).
template <typename S, typename T>
class SharedMapsBack {
  public:
    explicit SharedMapsBack(const Mixer<S, T>& mixer) : a(mixer), columns(mixer), gates(mixer) {}

    void operator()(int64_t source, const T* grad, double* norm_sums) const {
        const S* x = a.projected + source * a.width;
        S* to = a.grad_projected + source * a.width;
        norm_back(x + columns.B, a.B_weight, grad, to + columns.B, norm_sums);
        norm_back(x + columns.C, a.C_weight, grad + a.state, to + columns.C, norm_sums + a.state);
        if (!columns.speeds_of_head) angles_back(x + columns.angle, grad + 2 * a.state, to + columns.angle);
    }

  private:
    void angles_back(const S* x, const T* grad, S* to) const {
        const int64_t angles = a.width - columns.angle;  // there even if none is turned by them
        for (int64_t j = 0; j < angles; j += kLanes<T>) {
            const Vector<T> slope = gates.angular_speed(read_vector<T>(x + j, angles - j)).slope;
            const Vector<T> owed = j < a.pairs ? read_vector<T>(grad + j, a.pairs - j) : Vector<T>{};
            write_vector<T>(slope * owed, to + j, angles - j);
        }
    }

    void norm_back(const S* x, const T* weight, const T* grad, S* to, double* to_weight) const {
        Vector<T> squares{}, along{};
        const auto weighted = [&](int64_t i, int64_t left) {
            return weight ? read_vector<T>(grad + i, left) * read_vector<T>(weight + i, left) : Vector<T>{};
        };
        for (int64_t i = 0; i < a.state; i += kLanes<T>) {
            const Vector<T> value = read_vector<T>(x + i, a.state - i);
            squares += value * value;
            along += weighted(i, a.state - i) * value;
        }
        const T scale = T(1) / std::sqrt(sum_lanes<T>(squares) / T(a.state) + T(a.epsilon));
        const T mean = scale * sum_lanes<T>(along) / T(a.state);
        for (int64_t i = 0; i < a.state; i += kLanes<T>) {
            const int64_t left = a.state - i;
            const Vector<T> unit = scale * read_vector<T>(x + i, left);
            write_vector<T>(weight ? scale * (weighted(i, left) - unit * mean) : Vector<T>{}, to + i, left);
            add_doubles<T>(read_vector<T>(grad + i, left) * unit, to_weight + i, left);
        }
    }

    const Mixer<S, T>& a;
    const Columns<S, T> columns;
    const Gates<S, T> gates;
};

template <typename S, typename T, int64_t N, int64_t P>
class TokenMaps {
    using V = Vector<T>;
    static constexpr int64_t L = kLanes<T>;

  public:
    TokenMaps(const Mixer<S, T>& mixer, Buffers<T>& memory)
        : a(mixer),
          columns(mixer),
          gates(mixer),
          n{mixer.state},
          p{mixer.channels},
          m(mixer.pairs),
          B_weight(memory.take(padded<T>(n))),
          C_weight(memory.take(padded<T>(n))),
          shared_gradient(memory.take(padded<T>(2 * n + m))),
          speeds(reinterpret_cast<V*>(memory.take(m * L))),
          shared_back(mixer) {
        if (a.B_weight) load(a.B_weight, a.state, B_weight);
        load(a.C_weight, a.state, C_weight);
    }

    // The token whose projections are in row `source`, for the heads from `first` on.
    void fill(int64_t source, int64_t first, const TokenRow<T>& to) const {
        const S* from = a.projected + source * a.width;
        read_lanes<T>(from + columns.u + first * p, p, to.u);
        read_lanes<T>(from + columns.z + first * p, p, to.z);
        for (int64_t i = 0; i < p; ++i) to.open[i] = sigmoid<T>(to.z[i]);
        fill_gates(from, source, first, to.gates);
        if (a.k) fill_k(a.k + (source * a.heads + first) * n, to);
        if (a.B_weight) normalise(from + columns.B, n, B_weight, a.epsilon, to.B);
        normalise(from + columns.C, n, C_weight, a.epsilon, to.C);
        read_speeds(from, first, to.omega);
        for (int64_t j = 0; j < m; ++j) to.omega[j] = gates.angular_speed(to.omega[j]).value;
    }

    // Where the four pieces of a token lie that `fill` reads, and those that `backward` writes.
    const void* piece(int64_t source, int64_t first, int64_t number) const {
        return piece_of(a.projected, a.k, source, first, number);
    }
    const void* gradient_piece(int64_t source, int64_t first, int64_t number) const {
        return piece_of(a.grad_projected, a.grad_k, source, first, number);
    }

    // What the token after it needs.
    void fill_before(int64_t source, int64_t first, const TokenRow<T>& to) const {
        const S* from = a.projected + source * a.width;
        read_lanes<T>(from + columns.u + first * p, p, to.u);
        if (a.B_weight) normalise(from + columns.B, n, B_weight, a.epsilon, to.B);
    }

    // Passes the gradients of a token on to those of its projections, and adds to the sums for the biases and, if this
    // unit has all heads, for the weights of norms.
    void backward(int64_t source, int64_t first, const TokenRow<T>& x, const TokenRow<T>& grad,
                  const MixerGradients<S, T>& to, V& dt_bias, V& A_bias, double* norm_sums) const {
        give_heads(grad.u, p, to.projected, source, columns.u + first * p);
        for (int64_t i = 0; i < p; ++i) grad.z[i] *= x.open[i] * (T(1) + x.z[i] * (T(1) - x.open[i]));
        give_heads(grad.z, p, to.projected, source, columns.z + first * p);
        gates_back(source, first, x, grad, to, dt_bias, A_bias);
        if (a.k) k_back(source, first, x, grad, to);
        const bool all_heads = one_unit_has_all(a);
        const auto shared = all_heads ? GradientRows<T, T>{shared_gradient, nullptr, 0} : to.shared;
        add_lanes(&grad.B_of(0), n, shared, source, 0);
        add_lanes(&grad.C_of(0), n, shared, source, n);
        columns.speeds_of_head ? speeds_back(source, first, grad, to) : add_lanes(grad.omega, m, shared, source, 2 * n);
        if (all_heads) shared_back(source, shared_gradient, norm_sums);
    }

  private:
    const void* piece_of(const S* projected, const S* of_k, int64_t source, int64_t first, int64_t number) const {
        const S* row = projected + source * a.width;
        if (number == 0) return row + columns.u + first * p;
        if (number == 1) return row + columns.z + first * p;
        return number == 2 && a.k ? of_k + (source * a.heads + first) * n : row + columns.B;
    }

    void give_heads(const V* from, int64_t count, const GradientRows<S, T>& to, int64_t row, int64_t column) const {
        write_lanes<T>(from, count, [&](V x, int64_t at, int64_t left) FORCE_INLINE {
            to.give_vector(x, left, row, column + at);
        });
    }

    // What angular speeds are functions of.
    void read_speeds(const S* from, int64_t first, V* to) const {
        if (columns.speeds_of_head) return read_lanes<T>(from + columns.angle + first * m, m, to);
        for (int64_t j = 0; j < m; ++j) to[j] = all(T(value(from[columns.angle + j])));
    }

    // Where each head has its own.
    void speeds_back(int64_t source, int64_t first, const TokenRow<T>& grad, const MixerGradients<S, T>& to) const {
        read_speeds(a.projected + source * a.width, first, speeds);
        for (int64_t j = 0; j < m; ++j) grad.omega[j] *= gates.angular_speed(speeds[j]).slope;
        give_heads(grad.omega, m, to.projected, source, columns.angle + first * m);
    }

    static V heads_of(const T* parameter, int64_t first) { return parameter ? read_vector<T>(parameter + first) : V{}; }

    void fill_gates(const S* from, int64_t source, int64_t first, V* to) const {
        const auto dt = softplus_and_slope<T>(read_vector<T>(from + columns.dt + first) + heads_of(a.dt_bias, first));
        const auto rate = gates.decay_rate(read_vector<T>(from + columns.A + first) + heads_of(a.A_bias, first));
        to[kDt] = dt.value;
        to[kRate] = rate.value;
        to[kDecay] = exponential(-rate.value * dt.value);
        to[kReflection] = to[kBeta] = V{};
        if (a.grad_projected) {
            to[kDtSlope] = dt.slope;
            to[kRateSlope] = rate.slope;
        }
        if (a.k) {
            const auto beta = gates.reflection(read_vector<T>(a.beta + source * a.heads + first));
            to[kBeta] = beta.value;
            to[kReflection] = a.contractive ? to[kBeta] * to[kDecay] : to[kBeta];
            to[kBetaSlope] = beta.slope;
        }
        if (!a.B_weight) {
            to[kWrite] = gates.write_along_k(to[kBeta]);
            to[kCarry] = V{};
            return;
        }
        to[kLambda] = sigmoid<T>(read_vector<T>(from + columns.trap + first));
        to[kWrite] = to[kLambda] * to[kDt];
        to[kCarry] = (T(1) - to[kLambda]) * to[kDt];
    }

    void gates_back(int64_t source, int64_t first, const TokenRow<T>& x, const TokenRow<T>& grad,
                    const MixerGradients<S, T>& to, V& dt_bias, V& A_bias) const {
        const V *g = grad.gates, *of = x.gates;
        V to_beta = a.contractive ? g[kToReflection] * of[kDecay] : g[kToReflection], to_trap{}, to_dt = g[kToDt];
        V to_log = g[kToLogDecay];
        if (a.contractive) to_log += g[kToReflection] * of[kReflection];
        if (a.B_weight) {
            const V lambda = of[kLambda];
            to_dt += g[kToWrite] * lambda + g[kToCarry] * (T(1) - lambda);
            to_trap = (g[kToWrite] - g[kToCarry]) * of[kDt] * lambda * (T(1) - lambda);
        } else {
            to_beta += g[kToWrite] * gates.write_slope(of[kBeta]);
        }
        const V to_A = -to_log * of[kDt] * of[kRateSlope];
        to_dt = (to_dt - to_log * of[kRate]) * of[kDtSlope];
        to.projected.give_vector(to_dt, L, source, columns.dt + first);
        to.projected.give_vector(to_A, L, source, columns.A + first);
        to.projected.give_vector(to_trap, L, source, columns.trap + first);
        if (a.k) to.beta.give_vector(to_beta * of[kBetaSlope], L, source, first);
        dt_bias += to_dt;
        A_bias += to_A;
    }

    // k of length one, not turned yet.
    void fill_k(const S* from, const TokenRow<T>& to) const {
        read_lanes<T>(from, n, to.k);
        V squares{};
        for (int64_t i = 0; i < n; ++i) squares += to.k[i] * to.k[i];
        const V length = root(squares), shortest = all(T(a.shortest_k));
        to.gates[kLong] = length > shortest ? all(T(1)) : V{};
        const V inverse = T(1) / (length < shortest ? shortest : length);
        to.gates[kInverseLength] = inverse;
        for (int64_t i = 0; i < n; ++i) to.k[i] *= inverse;
    }

    void k_back(int64_t source, int64_t first, const TokenRow<T>& x, const TokenRow<T>& grad,
                const MixerGradients<S, T>& to) const {
        V along{};
        for (int64_t i = 0; i < n; ++i) along += x.k[i] * grad.k[i];
        along *= x.gates[kLong];
        for (int64_t i = 0; i < n; ++i) grad.k[i] = x.gates[kInverseLength] * (grad.k[i] - along * x.k[i]);
        give_heads(grad.k, n, to.k, source, first * n);
    }

    // Of `count` vectors the sums over heads.
    void add_lanes(const V* x, int64_t count, const GradientRows<T, T>& to, int64_t row, int64_t column) const {
        for (int64_t block = 0; block < count; block += L) {
            const V sums = sum_rows<T, 1, L>(block, [&](int64_t i) FORCE_INLINE {
                               return Sums<T, 1>{{i < count ? x[i] : V{}}};
                           }).of[0];
            to.give_vector(sums, count - block, row, column + block);
        }
    }

    const Mixer<S, T>& a;
    const Columns<S, T> columns;
    const Gates<S, T> gates;
    const Size<N> n;
    const Size<P> p;
    const int64_t m;
    T *B_weight, *C_weight, *shared_gradient;
    V* speeds;
    const SharedMapsBack<S, T> shared_back;
};

}  // namespace
