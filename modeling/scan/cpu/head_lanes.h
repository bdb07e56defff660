// The mixer for small states, with heads in the lanes of vectors: a state is a matrix of vectors, every sum over its rows
// or columns is one of whole vectors, and no lane meets another but where heads share B, C and omega. The equations are
// those of segment.h and mixers/mamba3.py.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "functions.h"
#include "memory.h"
#include "mixer_parts.h"
#include "segment.h"
#include "token_maps.h"
#include "vectors.h"
#include "work.h"

namespace {

// Letters that a thread keeps as tokens; with more they would no longer be near.
constexpr int64_t kLettersKept = 64;

// A number for each of some things and each head, in double.
template <typename T>
class HeadDoubles {
    static constexpr int64_t L = kLanes<T>;

  public:
    explicit HeadDoubles(int64_t count) : values(count * L) {}
    double* operator[](int64_t i) { return values.data() + i * L; }
    void add(int64_t i, Vector<T> x) { add_doubles<T>(x, values.data() + i * L); }
    void clear() { std::fill(values.begin(), values.end(), 0.0); }

  private:
    std::vector<double> values;
};

// Works on one row and as many of its heads as there are lanes after another.
template <typename S, typename T, int64_t N, int64_t P>
class LanesWorker {
    using V = Vector<T>;
    static constexpr int64_t L = kLanes<T>;

  public:
    LanesWorker(const Mixer<S, T>& mixer, BackwardSums<S, T>* sums)
        : a(mixer),
          sums(sums),
          keeps_letters(a.letters && a.letters <= kLettersKept),
          maps(mixer, memory),
          n{mixer.state},
          p{mixer.channels},
          m(mixer.pairs),
          C(vectors(kSegment * n)),
          B(vectors((kSegment + 1) * n)),
          k(vectors((kSegment + 1) * n)),
          cosine(vectors((kSegment + 1) * m)),
          sine(vectors((kSegment + 1) * m)),
          y(vectors(kSegment * p)),
          q(vectors((kSegment + 1) * p)),
          bias_B(vectors(n)),
          bias_C(vectors(n)),
          weight(vectors(p)),
          h(vectors(n * p)),
          angles((kSegment + 1) * m * L),
          to_theta(m),
          row_sums(kRowSums + 2 * n + p) {
        make_rows();
        if (sums) make_backward_buffers();
    }

    void forward(int64_t index) {
        begin(index / units_in_row(a), index % units_in_row(a));
        after_row = place_after(index);
        read_state(a.h0, n * p, h);
        load_phase(a.phase0);
        for (int64_t start = 0; start < length; start += kSegment) {
            if (a.kept) std::memcpy(kept_state(start), h, n * p * sizeof(V));
            store_kept_phase(start);
            begin_segment(start);
            begin_reading(h);
            next = start + kSegment < length ? Place{row, start + kSegment, first} : after_row;
            for (int64_t t = 0; t < steps; ++t) {
                a.k ? run_step<true>(t, h, h) : run_step<false>(t, h, h);
                store_output(t);
            }
            add_last_write();
            std::copy_n(theta(steps), m * L, theta(0));
        }
        finish();
    }

    void backward(int64_t index) {
        const int64_t group = index / units_in_row(a), first_row = group * rows_in_group(a);
        const int64_t last_row = std::min(a.layout.rows, first_row + rows_in_group(a)) - 1;
        unit = index % units_in_row(a);
        gradients = sums->of_group(a, group, unit);
        if (keeps_letters) std::fill(letter_gradients.begin(), letter_gradients.end(), T(0));
        for (int64_t i = first_row; i <= last_row; ++i) {
            begin(i, unit);
            after_row = i < last_row ? place_in(i + 1, unit) : place_after(index);
            backward_row();
            if (i == last_row && keeps_letters) pass_letters_on();
            store_sums();
        }
    }

  private:
    static constexpr int64_t kRowSums = 3;  // dt_bias, A_bias, D; then B_bias, C_bias and the weight of the norm

    // Of each pair and head before step t of the segment.
    double* theta(int64_t t) { return angles.data() + t * m * L; }
    V* vectors(int64_t count) { return reinterpret_cast<V*>(memory.take(count * L)); }

    void make_rows() {
        const int64_t size = TokenRow<T>::size(n, p, m, false);
        for (int64_t t = 0; t <= kSegment; ++t) own[t] = TokenRow<T>(memory.take(size), n, p, m, false);
        if (!keeps_letters) return;
        letter_rows.resize(a.letters);
        for (auto& row : letter_rows) row = TokenRow<T>(memory.take(size), n, p, m, false);
    }

    void make_backward_buffers() {
        states = vectors((kSegment + 1) * n * p);
        grad_y = vectors((kSegment + 1) * p);
        grad_z = vectors(kSegment * p);
        segment_sums = vectors(kRowSums + 2 * n + p);
        grad_C = vectors((kSegment + 1) * n);
        grad_k = vectors(n);
        grad_B = vectors(n);
        to_B = vectors(n);
        to_u = vectors(p);
        grad_h = vectors(n * p);
        const int64_t size = TokenRow<T>::size(n, p, m, true);
        own_gradient = TokenRow<T>(memory.take(size), n, p, m, true);
        if (!keeps_letters) return;
        letter_gradients.resize(a.letters * size + 64 / sizeof(T));
        const auto address = reinterpret_cast<uintptr_t>(letter_gradients.data());
        T* at = reinterpret_cast<T*>((address + 63) / 64 * 64);
        for (int64_t i = 0; i < a.letters; ++i) letter_gradient_rows.emplace_back(at + i * size, n, p, m, true);
    }

    double* norm_sums() const { return sums->norms.data() + (a.letters ? 0 : row * 2 * n); }
    int64_t pair(int64_t l) const { return row * a.heads + first + l; }
    int64_t slot(int64_t t) const { return a.layout.slot(row, t) * a.heads + first; }
    T* kept_state(int64_t t) const { return a.kept + slot(t) * n * p; }

    void begin(int64_t given_row, int64_t given_unit) {
        row = given_row;
        unit = given_unit;
        length = a.layout.length(row);
        if (filled_for == unit) return;
        filled_for = unit;
        first = unit * L;
        read_lanes<T>(a.C_bias + first * n, n, bias_C);
        if (a.B_weight) read_lanes<T>(a.B_bias + first * n, n, bias_B);
        if (a.norm_weight) read_lanes<T>(a.norm_weight + first * p, p, weight);
        D = read_vector<T>(a.D + first);
        for (int64_t i = 0; keeps_letters && i < a.letters; ++i) maps.fill(i, first, letter_rows[i]);
    }

    // Of each head of the row, `count` numbers of a state.
    void read_state(const T* from, int64_t count, V* to) const { read_lanes<T>(from + pair(0) * count, count, to); }
    void write_state(const V* from, int64_t count, T* to) const {
        to += pair(0) * count;
        write_lanes<T>(from, count, [&](V x, int64_t at, int64_t left) FORCE_INLINE {
            write_vector<T>(x, to + at, left);
        });
    }

    void load_phase(const T* from) {
        for (int64_t j = 0; j < m; ++j)
            for (int64_t l = 0; l < L; ++l) theta(0)[j * L + l] = from[pair(l) * m + j];
    }
    void store_kept_phase(int64_t start) {
        double* to = a.kept_phase + slot(start) * m;
        for (int64_t i = 0; i < m * L; ++i) to[i] = theta(0)[i] = start ? wrapped_angle(theta(0)[i]) : theta(0)[i];
    }

    // A segment: its row, the first of its tokens there and the first of its heads.
    struct Place {
        int64_t row, start, first;
    };
    // The segment of a row that is worked on first; where there is no such row, one without tokens.
    Place place_in(int64_t given_row, int64_t given_unit) const {
        if (given_row >= a.layout.rows) return {row, length, first};
        const int64_t last = std::max(int64_t(0), a.layout.length(given_row) - 1) / kSegment * kSegment;
        return {given_row, sums ? last : 0, given_unit * L};
    }
    // Where this thread will probably go on after unit `index` of the work: threads take units in turns.
    Place place_after(int64_t index) const {
        const int64_t later = index + a.threads, rows_each = sums ? rows_in_group(a) : 1;
        return place_in(later / units_in_row(a) * rows_each, later % units_in_row(a));
    }

    // What will be needed while some columns of step t are worked on: of the token of that step in the next segment a
    // piece, and of other memory the output or its gradient, and a part of the state that is kept for that segment.
    bool is_ahead(int64_t t) const { return next.start + t < a.layout.length(next.row); }
    const void* token_ahead(int64_t t, int64_t at) const {
        if (keeps_letters || !is_ahead(t)) return h;
        return maps.piece(a.source(a.layout.token(next.row, next.start + t)), next.first, at / 4 % 4);
    }
    const void* other_ahead(int64_t t, int64_t at) const {
        if (at / 4 % 4 == 0) return (sums ? a.grad_out : a.out) + (tokens[t] * a.heads + first) * p;
        if (at / 4 % 4 != 1 || !a.kept || !is_ahead(t)) return h;
        const int64_t slot = a.layout.slot(next.row, next.start) * a.heads + next.first;
        return a.kept + slot * n * p + t * (n * p * L / kSegment);
    }

    // Tokens and coefficients of the segment, from the phase before it in theta[0].
    void begin_segment(int64_t start) {
        steps = std::min(kSegment, length - start);
        for (int64_t t = 0; t < steps; ++t) {
            tokens[t] = a.layout.token(row, start + t);
            sources[t] = a.source(tokens[t]);
            rows[t + 1] = keeps_letters ? letter_rows[sources[t]] : own[t + 1];
            if (!keeps_letters) maps.fill(sources[t], first, rows[t + 1]);
        }
        begin_before(start);
        for (int64_t t = 0; t < steps; ++t) fill_step(t);
    }

    // The token before the segment.
    void begin_before(int64_t start) {
        rows[0] = own[0];
        if (!a.B_weight) {
            std::fill_n(rows[0].u, int64_t(p), V{});
            std::fill_n(B, int64_t(n), V{});
        } else if (!start) {
            read_state(a.u0, p, rows[0].u);
            read_state(a.B0, n, B);
        } else {
            const int64_t source = a.source(a.layout.token(row, start - 1));
            if (keeps_letters)
                rows[0] = letter_rows[source];
            else
                maps.fill_before(source, first, rows[0]);
            fill_angles(0);
            turn_shared(rows[0].B, bias_B, 0, B);
        }
    }

    void fill_step(int64_t t) {
        const TokenRow<T>& x = rows[t + 1];
        const V dt = x.gates[kDt], d = x.gates[kDecay];
        for (int64_t j = 0; j < m; ++j)
            for (int64_t l = 0; l < L; ++l)
                theta(t + 1)[j * L + l] = theta(t)[j * L + l] + double(dt[l]) * double(x.omega[j][l]);
        fill_angles(t + 1);
        turn_shared(x.C, bias_C, t + 1, C + t * n);
        V *kt = k + t * n, *Bt = B + t * n, *next_B = Bt + n, kB{}, CB{};
        if (a.k) turn(x.k, t + 1, kt);
        a.B_weight ? turn_shared(x.B, bias_B, t + 1, next_B) : (void)std::copy_n(kt, int64_t(n), next_B);
        const V before = t ? rows[t].gates[kWrite] : V{}, write = x.gates[kWrite];
        weights[t].s = d * (before + x.gates[kCarry]);
        for (int64_t i = 0; i < n; ++i) {
            CB += C[t * n + i] * next_B[i];
            if (a.k) kB += kt[i] * Bt[i];
        }
        weights[t].kB = kB;
        weights[t].CB = CB;
        weights[t].e = before * kB;
        weights[t].f = write * CB;
    }

    void fill_angles(int64_t t) {
        for (int64_t j = 0; j < m; ++j) {
            V angle;
            for (int64_t l = 0; l < L; ++l) angle[l] = T(wrapped_angle(theta(t)[j * L + l]));
            sine_cosine(angle, sine[t * m + j], cosine[t * m + j]);
        }
    }

    // Turns x, or x + bias, by the angles of row t.
    void turn(const V* x, int64_t t, V* to) const {
        turn_each([&](int64_t i) { return x[i]; }, t, to);
    }
    void turn_shared(const T* x, const V* bias, int64_t t, V* to) const {
        turn_each([&](int64_t i) { return x[i] + bias[i]; }, t, to);
    }
    template <typename Get>
    FORCE_INLINE inline void turn_each(const Get& x, int64_t t, V* to) const {
        for (int64_t j = 0; j < m; ++j) {
            const V c = cosine[t * m + j], s = sine[t * m + j], even = x(2 * j), odd = x(2 * j + 1);
            to[2 * j] = even * c - odd * s;
            to[2 * j + 1] = even * s + odd * c;
        }
        for (int64_t i = 2 * m; i < n; ++i) to[i] = x(i);
    }

    // The q of the first step.
    void begin_reading(const V* state) {
        for (int64_t i = 0; a.k && i < p; ++i) {
            V sum{};
            for (int64_t j = 0; j < n; ++j) sum += k[j] * state[j * p + i];
            q[i] = sum;
        }
    }

    // Calls f(width, at) for columns at, at + 1, ... of a state, so many at once that their sums fit into registers.
    template <int W, typename F>
    void in_columns(const F& f) const {
        const int64_t whole = p / W * W;
        for (int64_t at = 0; at < whole; at += W) f(std::integral_constant<int, W>(), at);
        if constexpr (P == 0 || P % W)
            for (int64_t at = whole; at < p; ++at) f(std::integral_constant<int, 1>(), at);
    }

    template <bool Reflects>
    void run_step(int64_t t, const V* before, V* after) {
        in_columns<4>([&](auto width, int64_t at) { run_columns<Reflects, width>(t, at, before, after); });
    }

    template <bool Reflects, int W>
    void run_columns(int64_t t, int64_t at, const V* before, V* after) {
        const bool goes_on = t + 1 < steps;
        const V *Ct = C + t * n, *Bt = B + t * n, *kt = k + t * n, *next_k = goes_on ? kt + n : kt;
        const V d = rows[t + 1].gates[kDecay], r = rows[t + 1].gates[kReflection], s = weights[t].s;
        const void *token = token_ahead(t, at), *other = other_ahead(t, at);
        V su[W], rq[W], read[W] = {}, next[W] = {};
        for (int w = 0; w < W; ++w) {
            su[w] = s * rows[t].u[at + w];
            rq[w] = Reflects ? r * q[t * p + at + w] : V{};
        }
        for (int64_t i = 0; i < n; ++i) {
            fetch_line<false>(token, i);
            fetch_line<true>(other, i);
            const V c = Ct[i], b = Bt[i], ki = Reflects ? kt[i] : V{}, kn = Reflects ? next_k[i] : V{};
            for (int w = 0; w < W; ++w) {
                V g = d * before[i * p + at + w] + b * su[w];
                if (Reflects) g -= ki * rq[w];
                after[i * p + at + w] = g;
                read[w] += c * g;
                if (Reflects) next[w] += kn * g;
            }
        }
        const V skip = D + weights[t].f, e = goes_on ? weights[t + 1].e : V{};
        for (int w = 0; w < W; ++w) {
            const V u = rows[t + 1].u[at + w];
            y[t * p + at + w] = read[w] + skip * u;
            if (Reflects) q[(t + 1) * p + at + w] = next[w] + e * u;
        }
    }

    void add_last_write() {
        const V write = rows[steps].gates[kWrite];
        for (int64_t i = 0; i < n; ++i) {
            const V wB = write * B[steps * n + i];
            for (int64_t j = 0; j < p; ++j) h[i * p + j] += wB * rows[steps].u[j];
        }
    }

    // 1 / RMS of the channels of each head at step t, or 1 without the norm.
    V output_scale(int64_t t) const {
        if (!a.norm_weight) return all(T(1));
        V squares{};
        for (int64_t i = 0; i < p; ++i) squares += y[t * p + i] * y[t * p + i];
        return T(1) / root(squares / T(p) + T(a.epsilon));
    }

    // In place of y.
    void store_output(int64_t t) {
        const V scale = output_scale(t);
        const TokenRow<T>& x = rows[t + 1];
        V* out = y + t * p;
        for (int64_t i = 0; i < p; ++i) {
            const V normed = out[i] * scale;
            out[i] = (a.norm_weight ? normed * weight[i] : normed) * (x.z[i] * x.open[i]);
        }
        S* to = a.out + (tokens[t] * a.heads + first) * p;
        write_lanes<T>(out, p, [&](V x, int64_t at, int64_t left) FORCE_INLINE { write_vector<T>(x, to + at, left); });
    }

    // The state after the row, for the caller.
    void finish() {
        write_state(h, n * p, a.h);
        for (int64_t j = 0; j < m; ++j)
            for (int64_t l = 0; l < L; ++l)
                a.phase[pair(l) * m + j] = length ? T(wrapped_angle(theta(0)[j * L + l])) : a.phase0[pair(l) * m + j];
        if (!a.B_weight) return;
        if (!length) begin_before(0);
        const int64_t last = length ? steps : 0;
        write_state(B + last * n, n, a.B);
        write_state(rows[last].u, p, a.u);
    }

    void backward_row() {
        read_state(a.grad_h, n * p, grad_h);
        std::fill_n(to_B, int64_t(n), V{});
        std::fill_n(to_u, int64_t(p), V{});
        if (a.B_weight) read_state(a.grad_B, n, to_B);
        if (a.B_weight) read_state(a.grad_u, p, to_u);
        for (int64_t j = 0; j < m; ++j)
            for (int64_t l = 0; l < L; ++l) to_theta[j][l] = a.grad_phase[pair(l) * m + j];
        for (int64_t start = (length - 1) / kSegment * kSegment; length && start >= 0; start -= kSegment)
            backward_segment(start);
        write_state(grad_h, n * p, a.grad_h0);
        if (a.B_weight) write_state(to_B, n, a.grad_B0);
        if (a.B_weight) write_state(to_u, p, a.grad_u0);
        for (int64_t j = 0; j < m; ++j)
            for (int64_t l = 0; l < L; ++l) a.grad_phase0[pair(l) * m + j] = T(to_theta[j][l]);
    }

    void backward_segment(int64_t start) {
        std::copy_n(a.kept_phase + slot(start) * m, m * L, theta(0));
        begin_segment(start);
        next = start ? Place{row, start - kSegment, first} : after_row;
        std::memcpy(states, kept_state(start), n * p * sizeof(V));
        begin_reading(states);
        for (int64_t t = 0; t < steps; ++t) {
            V* before = states + t * n * p;
            a.k ? run_step<true>(t, before, before + n * p) : run_step<false>(t, before, before + n * p);
            output_back(t);
        }
        to_write = add_last_write_back();
        V with_state = read_back();
        for (int64_t t = steps - 1; t >= 0; --t)
            with_state = a.k ? step_back<true>(t, with_state) : step_back<false>(t, with_state);
        for (int64_t i = 0; i < kRowSums + 2 * n + p; ++i) row_sums.add(i, std::exchange(segment_sums[i], V{}));
    }

    // From the gradient of the output to those of y and of the gate.
    void output_back(int64_t t) {
        V* grad = grad_y + (t + 1) * p;
        read_lanes<T>(a.grad_out + (tokens[t] * a.heads + first) * p, p, grad);
        const V scale = output_scale(t), *z = rows[t + 1].z, *open = rows[t + 1].open;
        V with_y{};
        for (int64_t i = 0; i < p; ++i) {
            const V g = grad[i], normed = y[t * p + i] * scale, wt = a.norm_weight ? weight[i] : all(T(1));
            const V to_normed = g * (z[i] * open[i]);
            grad_z[t * p + i] = g * normed * wt;
            grad[i] = to_normed * wt;
            if (!a.norm_weight) continue;
            with_y += grad[i] * normed;
            segment_sums[kRowSums + 2 * n + i] += to_normed * normed;
        }
        if (!a.norm_weight) return;
        const V mean = with_y / T(p);
        for (int64_t i = 0; i < p; ++i) grad[i] = scale * (grad[i] - y[t * p + i] * (scale * mean));
    }

    // From reading the last state, the gradient of C; those of other steps come with the step after them. Returns the sum
    // over all elements of G times its gradient, from which follow the gradients of the decays.
    V read_back() {
        const V *state = states + steps * n * p, *dy = grad_y + steps * p;
        V with_state{};
        for (int64_t i = 0; i < n; ++i) {
            V along_y{}, along_grad{};
            for (int64_t j = 0; j < p; ++j) {
                along_y += state[i * p + j] * dy[j];
                along_grad += state[i * p + j] * grad_h[i * p + j];
            }
            grad_C[steps * n + i] = along_y;
            with_state += along_grad;
        }
        return with_state;
    }

    // Returns the gradient of the weight of the last write.
    V add_last_write_back() {
        const V write = rows[steps].gates[kWrite], *u = rows[steps].u;
        V to_last{};
        for (int64_t i = 0; i < n; ++i) {
            V along_u{};
            const V Bi = B[steps * n + i], wB = write * Bi;
            for (int64_t j = 0; j < p; ++j) {
                along_u += grad_h[i * p + j] * u[j];
                to_u[j] += wB * grad_h[i * p + j];
            }
            to_B[i] += write * along_u;
            to_last += Bi * along_u;
        }
        return to_last;
    }

    // Sums over the columns of a state at one step: of u_{t-1} with B' g, and of k' g with q_t and u_{t-1}.
    struct ColumnSums {
        V written{}, along_q{}, along_u{};
    };

    // One step, given the sum of G_t times its gradient without that of y_t; returns the same of the step before.
    template <bool Reflects>
    V step_back(int64_t t, V with_state) {
        for (V* sum : {grad_B, grad_k, grad_C + t * n}) std::fill_n(sum, int64_t(n), V{});
        const TokenRow<T>& to = gradient_row(t);
        ColumnSums columns;
        in_columns<4>([&](auto width, int64_t at) { columns_back<Reflects, width>(t, at, to, columns); });
        V to_f{};
        for (int64_t i = 0; i < p; ++i) {
            to_f += rows[t + 1].u[i] * grad_y[(t + 1) * p + i];
            give(to.z[i], grad_z[t * p + i]);
        }
        segment_sums[2] += to_f;
        for (int64_t i = 0; i < n; ++i) with_state += C[t * n + i] * grad_C[(t + 1) * n + i];
        vectors_back(t, to_f, columns);
        gates_back(t, to_f, columns, with_state, to);
        turns_back(t, to);
        if (!keeps_letters) {
            maps.backward(sources[t], first, rows[t + 1], to, gradients, segment_sums[0], segment_sums[1], norm_sums());
        }
        const V reflected = rows[t + 1].gates[kReflection] * weights[t].e * columns.along_u;
        return with_state - weights[t].s * columns.written + reflected;
    }

    template <bool Reflects, int W>
    void columns_back(int64_t t, int64_t at, const TokenRow<T>& to, ColumnSums& columns) {
        const V *Ct = C + t * n, *Bt = B + t * n, *kt = k + t * n, *before = states + t * n * p;
        const V d = rows[t + 1].gates[kDecay], r = rows[t + 1].gates[kReflection];
        const void* written = keeps_letters ? h : maps.gradient_piece(sources[t], first, at / 4 % 4);
        V dy[W], dy_before[W], up[W], to_up[W] = {}, along_k[W] = {};
        for (int w = 0; w < W; ++w) {
            dy[w] = grad_y[(t + 1) * p + at + w];
            dy_before[w] = grad_y[t * p + at + w];
            up[w] = rows[t].u[at + w];
        }
        for (int64_t i = 0; i < n; ++i) {
            fetch_line<true>(written, i);
            const V c = Ct[i], b = Bt[i], ki = Reflects ? kt[i] : V{};
            V along_u{}, along_y{};
            for (int w = 0; w < W; ++w) {
                const V g = grad_h[i * p + at + w] + c * dy[w];
                grad_h[i * p + at + w] = Reflects ? g : d * g;
                to_up[w] += b * g;
                along_u += g * up[w];
                if (Reflects) along_k[w] += ki * g;
                if (!Reflects) along_y += before[i * p + at + w] * dy_before[w];
            }
            grad_B[i] += along_u;
            if (!Reflects) grad_C[t * n + i] += along_y;
        }
        if (Reflects) reflect_back<W>(t, at, along_k, dy_before);
        const V skip = D + weights[t].f, s = weights[t].s, er = weights[t].e * r;
        for (int w = 0; w < W; ++w) {
            columns.written += to_up[w] * up[w];
            if (Reflects) columns.along_q += along_k[w] * q[t * p + at + w];
            if (Reflects) columns.along_u += along_k[w] * up[w];
            give(to.u[at + w], to_u[at + w] + skip * dy[w]);
            to_u[at + w] = s * to_up[w] - er * along_k[w];
        }
    }

    template <int W>
    FORCE_INLINE inline void reflect_back(int64_t t, int64_t at, const V (&along_k)[W], const V (&dy_before)[W]) {
        const V *kt = k + t * n, *before = states + t * n * p;
        const V d = rows[t + 1].gates[kDecay], r = rows[t + 1].gates[kReflection];
        V qt[W], r_along[W];
        for (int w = 0; w < W; ++w) {
            qt[w] = q[t * p + at + w];
            r_along[w] = r * along_k[w];
        }
        for (int64_t i = 0; i < n; ++i) {
            const V ki = kt[i];
            V to_k{}, along_y{};
            for (int w = 0; w < W; ++w) {
                const V g = grad_h[i * p + at + w], state = before[i * p + at + w];
                to_k += g * qt[w] + state * along_k[w];
                along_y += state * dy_before[w];
                grad_h[i * p + at + w] = d * g - ki * r_along[w];
            }
            grad_k[i] += to_k;
            grad_C[t * n + i] += along_y;
        }
    }

    // Completes the gradients of C, B and k of step t, and begins that of the B before it.
    void vectors_back(int64_t t, V to_f, const ColumnSums& columns) {
        const V write = rows[t + 1].gates[kWrite], r = rows[t + 1].gates[kReflection], to_CB = to_f * write;
        const V to_kB = t ? -r * columns.along_u * rows[t].gates[kWrite] : V{};
        for (int64_t i = 0; i < n; ++i) {
            const V Ci = C[t * n + i], ki = k[t * n + i];
            const V of_B = to_B[i] + to_CB * Ci;
            to_B[i] = weights[t].s * grad_B[i];
            grad_C[(t + 1) * n + i] += to_CB * B[(t + 1) * n + i];
            grad_B[i] = of_B;
            if (!a.k) continue;
            to_B[i] += to_kB * ki;
            grad_k[i] = to_kB * B[t * n + i] - r * grad_k[i];
            if (!a.B_weight) grad_k[i] += of_B;
        }
    }

    void gates_back(int64_t t, V to_f, const ColumnSums& columns, V with_state, const TokenRow<T>& to) {
        const V d = rows[t + 1].gates[kDecay], r = rows[t + 1].gates[kReflection];
        const V to_s = columns.written * d;  // of the write before and the carry
        give(to.gates[kToLogDecay], with_state + r * columns.along_q);
        give(to.gates[kToWrite], to_write + to_f * weights[t].CB);
        give(to.gates[kToCarry], to_s);
        give(to.gates[kToReflection], -columns.along_q);
        to_write = to_s - r * columns.along_u * weights[t].kB;  // of the step before, if it is in this segment
    }

    // From the gradients of the turned vectors to those of the angles and of the vectors themselves.
    void turns_back(int64_t t, const TokenRow<T>& to) {
        V to_dt{};
        const V dt = rows[t + 1].gates[kDt];
        for (int64_t j = 0; j < m; ++j) {
            V turned = turn_of(C + t * n, grad_C + (t + 1) * n, j);
            if (a.B_weight) turned += turn_of(B + (t + 1) * n, grad_B, j);
            if (a.k) turned += turn_of(k + t * n, grad_k, j);
            to_theta.add(j, turned);
            V owed;
            for (int64_t l = 0; l < L; ++l) owed[l] = T(to_theta[j][l]);
            to_dt += owed * rows[t + 1].omega[j];
            give(to.omega[j], owed * dt);
        }
        give(to.gates[kToDt], to_dt);
        turn_back(grad_C + (t + 1) * n, t + 1, [&](int64_t i, V g) FORCE_INLINE {
            give(to.C_of(i), g);
            segment_sums[kRowSums + n + i] += g;
        });
        if (a.B_weight) turn_back(grad_B, t + 1, [&](int64_t i, V g) FORCE_INLINE {
            give(to.B_of(i), g);
            segment_sums[kRowSums + i] += g;
        });
        if (a.k) turn_back(grad_k, t + 1, [&](int64_t i, V g) FORCE_INLINE { give(to.k[i], g); });
    }

    static V turn_of(const V* x, const V* grad, int64_t j) {
        return grad[2 * j + 1] * x[2 * j] - grad[2 * j] * x[2 * j + 1];
    }
    template <typename Give>
    FORCE_INLINE inline void turn_back(const V* grad, int64_t t, const Give& give_to) const {
        for (int64_t j = 0; j < m; ++j) {
            const V c = cosine[t * m + j], s = sine[t * m + j], even = grad[2 * j], odd = grad[2 * j + 1];
            give_to(2 * j, even * c + odd * s);
            give_to(2 * j + 1, odd * c - even * s);
        }
        for (int64_t i = 2 * m; i < n; ++i) give_to(i, grad[i]);
    }

    // Gradients of a letter are added up, those of a token are passed on at once.
    const TokenRow<T>& gradient_row(int64_t t) const {
        return keeps_letters ? letter_gradient_rows[sources[t]] : own_gradient;
    }
    void give(V& to, V x) const { to = keeps_letters ? to + x : x; }

    void pass_letters_on() {
        for (int64_t i = 0; i < a.letters; ++i) {
            V dt_bias{}, A_bias{};
            maps.backward(i, first, letter_rows[i], letter_gradient_rows[i], gradients, dt_bias, A_bias, norm_sums());
            row_sums.add(0, dt_bias);
            row_sums.add(1, A_bias);
        }
    }

    void store_sums() {
        const int64_t size = HeadSums<T>(n, p).size;
        for (int64_t l = 0; l < L; ++l) {
            const HeadSums<T, double> to(n, p, sums->heads.data() + pair(l) * size);
            for (int64_t i = 0; i < kRowSums; ++i) to.scalars[i] = row_sums[i][l];
            for (int64_t i = 0; i < n; ++i) to.B_bias[i] = row_sums[kRowSums + i][l];
            for (int64_t i = 0; i < n; ++i) to.C_bias[i] = row_sums[kRowSums + n + i][l];
            for (int64_t i = 0; i < p; ++i) to.norm_weight[i] = row_sums[kRowSums + 2 * n + i][l];
        }
        row_sums.clear();
    }

    // What follows from the gates and the vectors of a step: see segment.h.
    struct StepWeights {
        V s, e, f, kB, CB;
    };

    const Mixer<S, T>& a;
    BackwardSums<S, T>* sums;
    const bool keeps_letters;
    Buffers<T> memory;
    const TokenMaps<S, T, N, P> maps;
    const Size<N> n;
    const Size<P> p;
    const int64_t m;
    int64_t row = 0, unit = 0, first = 0, length = 0, steps = 0, filled_for = -1;
    Place next{}, after_row{};  // `next`: the segment that will probably be worked on after this one
    TokenRow<T> own[kSegment + 1], rows[kSegment + 1], own_gradient;
    std::vector<TokenRow<T>> letter_rows, letter_gradient_rows;
    std::vector<T> letter_gradients;
    MixerGradients<S, T> gradients{};
    StepWeights weights[kSegment];
    V *C, *B, *k, *cosine, *sine, *y, *q, *bias_B, *bias_C, *weight, *h;
    // Rows of grad_y and grad_C are those of the step before, the first that of none.
    V *states = nullptr, *grad_y = nullptr, *grad_z = nullptr, *grad_C = nullptr, *grad_B = nullptr, *grad_k = nullptr;
    V *grad_h = nullptr, *to_B = nullptr, *to_u = nullptr, *segment_sums = nullptr;
    V D{}, to_write{};
    std::vector<double> angles;
    HeadDoubles<T> to_theta, row_sums;  // to_theta: what the steps from one on owe to its angles
    int64_t tokens[kSegment], sources[kSegment];
};

}  // namespace
