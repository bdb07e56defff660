// The mixer between its projections.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "functions.h"
#include "head_lanes.h"
#include "memory.h"
#include "mixer_parts.h"
#include "segment.h"
#include "vectors.h"
#include "work.h"

namespace {

// Works on one row and some of its heads after another.
template <typename S, typename T>
class MixerWorker {
    using V = Vector<T>;

  public:
    // The sums may be null in the forward pass.
    MixerWorker(const Mixer<S, T>& mixer, BackwardSums<S, T>* sums)
        : a(mixer),
          columns(mixer),
          gates(mixer),
          n(mixer.state),
          p(mixer.channels),
          m(mixer.pairs),
          shared(mixer, memory),
          s(memory, n, p),
          sums(sums),
          segment_sums(memory.take(HeadSums<T>(n, p).size)),
          z(s.y),
          u_rows(memory, heads_in_unit(mixer), s.channels),
          z_rows(memory, heads_in_unit(mixer), s.channels),
          k_rows(memory, heads_in_unit(mixer), s.state),
          grad_y_rows(memory, mixer.grad_out ? heads_in_unit(mixer) : 0, s.channels),
          grad_u_rows(memory, mixer.grad_out ? heads_in_unit(mixer) : 0, s.channels),
          grad_k_rows(memory, mixer.grad_out ? heads_in_unit(mixer) : 0, s.state),
          cosine(memory, kSegment + 1, s.state),
          sine(memory, kSegment + 1, s.state),
          bias_B(memory.take(s.state)),
          bias_C(memory.take(s.state)),
          weight(memory.take(s.channels)),
          angles(memory.take(padded<T>((kSegment + 1) * m))),
          sines(memory.take(padded<T>((kSegment + 1) * m))),
          cosines(memory.take(padded<T>((kSegment + 1) * m))),
          turns(memory.take(s.state)),
          theta((kSegment + 1) * m) {
        std::fill_n(cosine.data, (kSegment + 1) * s.state, T(1));
        s.reflects = a.k;
        s.carries = a.B_weight;
    }

    void forward(int64_t index) {
        begin(index / units_in_row(a), index % units_in_row(a));
        T* h = heads_buffer(0);
        for (int64_t i = 0; i < heads; ++i) load_state(a.h0 + pair(i) * n * p, n, p, s, h + i * size());
        for (int64_t start = 0; start < length; start += kSegment) {
            const int64_t steps = begin_segment(start);
            for (int64_t i = 0; i < heads; ++i) {
                if (a.kept) store_state(h + i * size(), n, p, s, a.kept + kept_at(start, i) * n * p);
                if (!start) std::copy_n(a.phase0 + pair(i) * m, m, a.kept_phase + kept_at(start, i) * m);
                fill(start, steps, i);
                with_core(s, [&](auto core) { core.forward(h + i * size(), nullptr); });
                gate_output();
                finish(start, i);
            }
            for (int64_t t = 0; t < steps; ++t)
                z_rows.store_token(t, heads, p, a.out + (tokens[t] * a.heads + first) * p);
        }
        for (int64_t i = 0; i < heads; ++i) {
            store_state(h + i * size(), n, p, s, a.h + pair(i) * n * p);
            if (!length) pass_state_on(i);
        }
    }

    void backward(int64_t index) {
        const int64_t group = index / units_in_row(a), first_row = group * rows_in_group(a);
        for (int64_t i = first_row; i < std::min(a.layout.rows, first_row + rows_in_group(a)); ++i) {
            begin(i, index % units_in_row(a));
            gradients = sums->of_group(a, group, unit);
            backward_row();
        }
    }

  private:
    void backward_row() {
        T *grad_h = heads_buffer(0), *to_B = heads_buffer(1), *to_u = heads_buffer(2);
        to_theta.assign(heads_in_unit(a) * m, 0.0);
        if (!states) states = memory.take((kSegment + 1) * size()), h = memory.take(size());
        for (int64_t i = 0; i < heads; ++i) {
            load_state(a.grad_h + pair(i) * n * p, n, p, s, grad_h + i * size());
            std::fill_n(to_B + i * s.state, s.state, T(0));
            std::fill_n(to_u + i * s.channels, s.channels, T(0));
            if (s.carries) load(a.grad_B + pair(i) * n, n, to_B + i * s.state);
            if (s.carries) load(a.grad_u + pair(i) * p, p, to_u + i * s.channels);
            std::copy_n(a.grad_phase + pair(i) * m, m, to_theta.begin() + i * m);
        }
        for (int64_t start = (length - 1) / kSegment * kSegment; length && start >= 0; start -= kSegment) {
            const int64_t steps = begin_segment(start);
            shared.clear_gradients();
            for (int64_t i = 0; i < heads; ++i) {
                load_state(a.kept + kept_at(start, i) * n * p, n, p, s, h);
                fill(start, steps, i);
                s.clear_gradients();
                std::copy_n(to_B + i * s.state, s.state, s.grad_B[steps]);
                std::copy_n(to_u + i * s.channels, s.channels, s.grad_u[steps]);
                with_core(s, [&](auto core) {
                    core.forward(h, states);
                    output_back();
                    core.backward(states, grad_h + i * size());
                });
                s.prepare_back();
                std::copy_n(s.grad_B[0], s.state, to_B + i * s.state);
                std::copy_n(s.grad_u[0], s.channels, to_u + i * s.channels);
                coefficients_back(to_theta.data() + i * m);
                add_sums(i);
            }
            write_gradients();
        }
        for (int64_t i = 0; i < heads; ++i) {
            store_state(grad_h + i * size(), n, p, s, a.grad_h0 + pair(i) * n * p);
            if (s.carries) store(to_B + i * s.state, n, a.grad_B0 + pair(i) * n);
            if (s.carries) store(to_u + i * s.channels, p, a.grad_u0 + pair(i) * p);
            std::copy_n(to_theta.begin() + i * m, m, a.grad_phase0 + pair(i) * m);
        }
    }

    HeadSums<T> sums_of_segment() { return HeadSums<T>(n, p, segment_sums); }
    void add_sums(int64_t i) {
        const int64_t size = sums_of_segment().size;
        for (int64_t j = 0; j < size; ++j) sums->heads[pair(i) * size + j] += double(segment_sums[j]);
        std::fill_n(segment_sums, size, T(0));
    }
    int64_t size() const { return s.state * s.channels; }
    int64_t pair(int64_t i) const { return row * a.heads + first + i; }
    int64_t kept_at(int64_t t, int64_t i) const { return a.layout.slot(row, t) * a.heads + first + i; }

    void begin(int64_t given_row, int64_t given_unit) {
        row = given_row;
        unit = given_unit;
        first = unit * heads_in_unit(a);
        heads = std::min(heads_in_unit(a), a.heads - first);
        length = a.layout.length(row);
    }

    int64_t begin_segment(int64_t start) {
        const int64_t steps = std::min(kSegment, length - start);
        for (int64_t t = 0; t < steps; ++t) {
            tokens[t] = a.layout.token(row, start + t);
            sources[t] = a.source(tokens[t]);
        }
        if (start) load_u(a.source(a.layout.token(row, start - 1)), 0);
        for (int64_t t = 0; t < steps; ++t) {
            z_rows.load_token(a.projected + sources[t] * a.width + columns.z + first * p, heads, p, t);
            load_u(sources[t], t + 1);
            if (a.k) k_rows.load_token(a.k + (sources[t] * a.heads + first) * n, heads, n, t);
            if (a.grad_out) grad_y_rows.load_token(a.grad_out + (tokens[t] * a.heads + first) * p, heads, p, t);
        }
        shared.fill(row, start, steps);
        return steps;
    }
    void load_u(int64_t source, int64_t t) {
        u_rows.load_token(a.projected + source * a.width + columns.u + first * p, heads, p, t);
    }

    // Lets the segment work on the rows of head i where they lie.
    void choose_head(int64_t i) {
        head = first + i;
        s.u.data = u_rows.of_head(i);
        s.k.data = k_rows.of_head(i);
        z.data = z_rows.of_head(i);
        if (!a.grad_out) return;
        s.grad_y.data = grad_y_rows.of_head(i);
        s.grad_u.data = grad_u_rows.of_head(i);
        s.grad_k.data = grad_k_rows.of_head(i);
    }

    // Memory for all heads of a unit, made when it is first asked for.
    T* heads_buffer(int which) {
        const int64_t sizes[3] = {size(), s.state, s.channels};
        if (!of_heads[which]) of_heads[which] = memory.take(heads_in_unit(a) * sizes[which]);
        return of_heads[which];
    }

    // The coefficients of head i: see the equations in mixers/mamba3.py.
    void fill(int64_t start, int64_t steps, int64_t i) {
        choose_head(i);
        s.steps = steps;
        s.D = a.D[head];
        for (int64_t t = 0; t < steps; ++t) {
            const S* from = a.projected + sources[t] * a.width;
            dt_raw[t] = value(from[columns.dt + head]) + a.dt_bias[head];
            A_raw[t] = value(from[columns.A + head]) + (a.A_bias ? a.A_bias[head] : T(0));
            trap_raw[t] = value(from[columns.trap + head]);
            if (a.k) beta_raw[t] = value(a.beta[sources[t] * a.heads + head]);
        }
        fill_gates();
        fill_angles(start, i);
        load(a.C_bias + head * n, n, bias_C);
        for (int64_t t = 0; t < steps; ++t) rotate(shared.C[t], bias_C, t + 1, s.C[t]);
        if (a.k) fill_k();
        s.carries ? fill_B(start, i) : use_k_as_B();
        s.prepare();
    }

    void fill_gates() {
        dt = PerStep<T>::from([&](int64_t t) { return softplus<T>(dt_raw.at(t)); });
        rate = PerStep<T>::from([&](int64_t t) { return gates.decay_rate(A_raw.at(t)).value; });
        lambda = PerStep<T>::from([&](int64_t t) { return sigmoid<T>(trap_raw.at(t)); });
        beta = PerStep<T>::from([&](int64_t t) { return gates.reflection(beta_raw.at(t)).value; });
        for (int64_t t = 0; t < kSegment; t += kLanes<T>) {
            const V d = exponential(-rate.at(t) * dt.at(t));
            vec(s.d + t) = d;
            vec(s.r + t) = a.contractive ? beta.at(t) * d : beta.at(t);
            vec(s.w + t) = s.carries ? lambda.at(t) * dt.at(t) : gates.write_along_k(beta.at(t));
            vec(s.c + t) = (T(1) - lambda.at(t)) * dt.at(t);
        }
    }

    // The angular speeds of the head at work, and their gradients.
    T* omega(int64_t t) const { return shared.omega[t] + head * columns.speeds_of_head; }
    T* grad_omega(int64_t t) const { return shared.grad_omega[t] + head * columns.speeds_of_head; }

    // Angles between -pi and pi of the token before the segment and of its own; rows of cosines (c0, c0, c1, c1, ...)
    // and of sines (-s0, s0, -s1, s1, ...). The sum runs in double.
    void fill_angles(int64_t start, int64_t i) {
        if (!m) return;
        std::copy_n(a.kept_phase + kept_at(start, i) * m, m, theta.begin());
        for (int64_t t = 0; t < s.steps; ++t)
            for (int64_t j = 0; j < m; ++j)
                theta[(t + 1) * m + j] = theta[t * m + j] + double(dt[t]) * double(omega(t)[j]);
        for (int64_t j = 0; j < (s.steps + 1) * m; ++j) angles[j] = T(wrapped_angle(theta[j]));
        for (int64_t j = 0; j < (s.steps + 1) * m; j += kLanes<T>)
            sine_cosine(vec(angles + j), vec(sines + j), vec(cosines + j));
        for (int64_t t = 0; t <= s.steps; ++t)
            for (int64_t j = 0; j < m; ++j) {
                cosine[t][2 * j] = cosine[t][2 * j + 1] = cosines[t * m + j];
                sine[t][2 * j] = -sines[t * m + j];
                sine[t][2 * j + 1] = sines[t * m + j];
            }
    }

    void fill_k() {
        sum_each(s.steps, k_length.of, [&](int64_t t) { return products(s.k[t], s.k[t], s.state); });
        const T shortest = T(a.shortest_k);
        for (int64_t t = 0; t < s.steps; ++t) {
            k_length[t] = std::sqrt(k_length[t]);
            const T scale = T(1) / std::max(k_length[t], shortest);
            for (int64_t i = 0; i < s.state; i += kLanes<T>) vec(s.k[t] + i) *= scale;
            rotate(s.k[t], nullptr, t + 1, s.k[t]);
        }
    }

    void fill_B(int64_t start, int64_t i) {
        load(a.B_bias + head * n, n, bias_B);
        for (int64_t t = start ? -1 : 0; t < s.steps; ++t) rotate(shared.B[t + 1], bias_B, t + 1, s.B[t + 1]);
        if (start) return;
        load(a.B0 + pair(i) * n, n, s.B[0]);
        load(a.u0 + pair(i) * p, p, s.u[0]);
    }

    void use_k_as_B() {
        for (int64_t t = 0; t < s.steps; ++t) std::copy_n(s.k[t], s.state, s.B[t + 1]);
    }

    // Turns x + bias by the angles in row t.
    void rotate(const T* x, const T* bias, int64_t t, T* to) const {
        for (int64_t i = 0; i < s.state; i += kLanes<T>) {
            const V sum = bias ? vec(x + i) + vec(bias + i) : vec(x + i);
            vec(to + i) = sum * vec(cosine[t] + i) + swap_pairs<T>(sum) * vec(sine[t] + i);
        }
    }

    void load_output_weight() {
        if (a.norm_weight) load(a.norm_weight + head * p, p, weight);
    }

    // 1 / RMS of y at each step, or 1 without the norm.
    PerStep<T> output_scale() const {
        if (!a.norm_weight) return PerStep<T>::from([](int64_t) { return all(T(1)); });
        PerStep<T> scale;
        sum_each(s.steps, scale.of, [&](int64_t t) { return products(s.y[t], s.y[t], s.channels); });
        for (int64_t t = 0; t < s.steps; ++t) scale[t] = T(1) / std::sqrt(scale[t] / T(p) + T(a.epsilon));
        return scale;
    }

    // In place of the gate.
    void gate_output() {
        load_output_weight();
        const PerStep<T> scale = output_scale();
        for (int64_t t = 0; t < s.steps; ++t)
            for (int64_t i = 0; i < s.channels; i += kLanes<T>) {
                const V gate = vec(z[t] + i), y = vec(s.y[t] + i) * scale[t];
                const V normed = a.norm_weight ? y * vec(weight + i) : y;
                vec(z[t] + i) = normed * gate * sigmoid<T>(gate);
            }
    }

    // The state after the segment, for the next one or, after the last one, for the caller.
    void finish(int64_t start, int64_t i) {
        const int64_t end = start + s.steps;
        if (end < length) {
            for (int64_t j = 0; j < m; ++j) a.kept_phase[kept_at(end, i) * m + j] = wrapped_angle(theta[s.steps * m + j]);
            return;
        }
        for (int64_t j = 0; j < m; ++j) a.phase[pair(i) * m + j] = angles[s.steps * m + j];
        if (s.carries) store(s.B[s.steps], n, a.B + pair(i) * n);
        if (s.carries) store(s.u[s.steps], p, a.u + pair(i) * p);
    }

    void pass_state_on(int64_t i) {
        std::copy_n(a.phase0 + pair(i) * m, m, a.phase + pair(i) * m);
        if (s.carries) std::copy_n(a.B0 + pair(i) * n, n, a.B + pair(i) * n);
        if (s.carries) std::copy_n(a.u0 + pair(i) * p, p, a.u + pair(i) * p);
    }

    // From the gradient of the output to that of y, of the gate and of the norm's weight; the first two in place.
    void output_back() {
        load_output_weight();
        const PerStep<T> scale = output_scale();
        T* weight_sum = sums_of_segment().norm_weight;
        for (int64_t t = 0; t < s.steps; ++t) {
            T *grad = s.grad_y[t], *gate = z[t];
            V with_y{};
            for (int64_t i = 0; i < s.channels; i += kLanes<T>) {
                const V g = vec(grad + i), x = vec(gate + i), open = sigmoid<T>(x), y = vec(s.y[t] + i) * scale[t];
                const V wt = a.norm_weight ? vec(weight + i) : all(T(1));
                vec(gate + i) = g * y * wt * open * (T(1) + x * (T(1) - open));
                const V to_normed = g * x * open;
                vec(grad + i) = to_normed * wt;
                with_y += to_normed * wt * y;
                vec(weight_sum + i) += to_normed * y;
            }
            if (!a.norm_weight) continue;
            const T mean = sum_lanes<T>(with_y) / T(p);
            for (int64_t i = 0; i < s.channels; i += kLanes<T>)
                vec(grad + i) = scale[t] * (vec(grad + i) - vec(s.y[t] + i) * (scale[t] * mean));
        }
    }

    void coefficients_back(double* to_theta) {
        if (!s.carries)
            for (int64_t t = 0; t < s.steps; ++t)
                for (int64_t i = 0; i < s.state; i += kLanes<T>) vec(s.grad_k[t] + i) += vec(s.grad_B[t + 1] + i);
        const HeadSums<T> sum = sums_of_segment();
        PerStep<T> grad_dt;
        for (int64_t t = s.steps - 1; t >= 0; --t) {
            if (m) angles_back(t, to_theta, grad_dt);
            turn_back(s.grad_C[t], t, shared.grad_C[t], sum.C_bias);
            if (s.carries) turn_back(s.grad_B[t + 1], t, shared.grad_B[t], sum.B_bias);
        }
        if (a.k) k_back();
        gates_back(grad_dt, sum.scalars);
    }

    // Adds what step t owes to the angles, and passes on what all steps from t on owe to its increment dt omega.
    void angles_back(int64_t t, double* to_theta, PerStep<T>& grad_dt) {
        for (int64_t i = 0; i < 2 * m; i += kLanes<T>) {
            V sum = vec(s.grad_C[t] + i) * swap_pairs<T>(vec(s.C[t] + i));
            if (s.carries) sum += vec(s.grad_B[t + 1] + i) * swap_pairs<T>(vec(s.B[t + 1] + i));
            if (a.k) sum += vec(s.grad_k[t] + i) * swap_pairs<T>(vec(s.k[t] + i));
            vec(turns + i) = sum;
        }
        for (int64_t j = 0; j < m; ++j) {
            to_theta[j] += turns[2 * j + 1] - turns[2 * j];
            grad_dt[t] += T(to_theta[j]) * omega(t)[j];
            grad_omega(t)[j] += T(to_theta[j]) * dt[t];
        }
    }

    void turn_back(const T* grad, int64_t t, T* to_shared, T* to_bias) {
        for (int64_t i = 0; i < s.state; i += kLanes<T>) {
            const V g = turned_back(grad, t, i);
            vec(to_shared + i) += g;
            vec(to_bias + i) += g;
        }
    }
    V turned_back(const T* grad, int64_t t, int64_t i) const {
        const V g = vec(grad + i);
        return g * vec(cosine[t + 1] + i) - swap_pairs<T>(g) * vec(sine[t + 1] + i);
    }

    void k_back() {
        PerStep<T> along;
        sum_each(s.steps, along.of, [&](int64_t t) { return products(s.k[t], s.grad_k[t], s.state); });
        const T shortest = T(a.shortest_k);
        for (int64_t t = 0; t < s.steps; ++t) {
            T* grad = s.grad_k[t];
            const T part = k_length[t] > shortest ? along[t] : T(0), scale = T(1) / std::max(k_length[t], shortest);
            for (int64_t i = 0; i < s.state; i += kLanes<T>) vec(grad + i) -= part * vec(s.k[t] + i);
            for (int64_t i = 0; i < s.state; i += kLanes<T>) vec(grad + i) = scale * turned_back(grad, t, i);
        }
    }

    void gates_back(PerStep<T>& grad_dt, T* sum) {
        const auto dt_slope = PerStep<T>::from([&](int64_t t) { return softplus_slope<T>(dt_raw.at(t)); });
        const auto rate_slope = PerStep<T>::from([&](int64_t t) { return gates.decay_rate(A_raw.at(t)).slope; });
        const auto beta_slope = PerStep<T>::from([&](int64_t t) { return gates.reflection(beta_raw.at(t)).slope; });
        for (int64_t t = 0; t < s.steps; ++t) {
            T to_d = s.grad_d[t], to_beta = a.contractive ? s.grad_r[t] * s.d[t] : s.grad_r[t], to_trap = 0;
            if (a.contractive) to_d += s.grad_r[t] * beta[t];
            if (s.carries) {
                grad_dt[t] += s.grad_w[t] * lambda[t] + s.grad_c[t] * (T(1) - lambda[t]);
                to_trap = (s.grad_w[t] - s.grad_c[t]) * dt[t] * lambda[t] * (T(1) - lambda[t]);
            } else {
                to_beta += s.grad_w[t] * gates.write_slope(beta[t]);
            }
            const T to_log = to_d * s.d[t], to_A = -to_log * dt[t] * rate_slope[t];
            const T to_dt = (grad_dt[t] - to_log * rate[t]) * dt_slope[t];
            gradients.projected.give(to_dt, sources[t], columns.dt + head);
            gradients.projected.give(to_A, sources[t], columns.A + head);
            gradients.projected.give(to_trap, sources[t], columns.trap + head);
            if (a.k) gradients.beta.give(to_beta * beta_slope[t], sources[t], head);
            sum[0] += to_dt;
            sum[1] += to_A;
        }
        sum[2] += s.grad_D;
    }

    void write_gradients() {
        for (int64_t t = 0; t < s.steps; ++t) {
            z_rows.give_token(t, heads, p, gradients.projected, sources[t], columns.z + first * p);
            grad_u_rows.give_token(t + 1, heads, p, gradients.projected, sources[t], columns.u + first * p);
            if (a.k) grad_k_rows.give_token(t, heads, n, gradients.k, sources[t], first * n);
            gradients.shared.give(shared.grad_B[t], n, sources[t], 0);
            gradients.shared.give(shared.grad_C[t], n, sources[t], n);
            if (columns.speeds_of_head)
                give_speeds(t);
            else
                gradients.shared.give(shared.grad_omega[t], m, sources[t], 2 * n);
        }
    }

    // Those of the heads of the unit: others have theirs in other units.
    void give_speeds(int64_t t) {
        const S* x = a.projected + sources[t] * a.width + columns.angle;
        for (int64_t j = first * m; j < (first + heads) * m; j += kLanes<T>) {
            const int64_t left = (first + heads) * m - j;
            const V slope = gates.angular_speed(read_vector<T>(x + j, left)).slope;
            const V grad = read_vector<T>(shared.grad_omega[t] + j, left);
            gradients.projected.give_vector(slope * grad, left, sources[t], columns.angle + j);
        }
    }

    const Mixer<S, T>& a;
    const Columns<S, T> columns;
    const Gates<S, T> gates;
    const int64_t n, p, m;
    int64_t row = 0, unit = 0, first = 0, heads = 0, head = 0, length = 0;
    Buffers<T> memory;
    SharedSegment<S, T> shared;
    Segment<T> s;
    BackwardSums<S, T>* sums;
    T* segment_sums;
    MixerGradients<S, T> gradients{};
    Rows<T> z;  // of the head at work, as u, k, grad_y, grad_u and grad_k of the segment are: see choose_head
    HeadRows<T> u_rows, z_rows, k_rows, grad_y_rows, grad_u_rows, grad_k_rows;
    Rows<T> cosine, sine;
    T *bias_B, *bias_C, *weight, *angles, *sines, *cosines, *turns, *h = nullptr, *states = nullptr, *of_heads[3] = {};
    std::vector<double> theta, to_theta;  // to_theta: what the steps from one on owe to its angles
    PerStep<T> dt_raw, A_raw, trap_raw, beta_raw, dt, rate, lambda, beta, k_length;
    int64_t tokens[kSegment], sources[kSegment];
};

// From the gradients of what heads share, added over the parts that hold some, to those of the projections. A
// call is for the tokens of a row, or for one letter.
template <typename S, typename T>
class SharedBackward {
  public:
    SharedBackward(const Mixer<S, T>& mixer, BackwardSums<S, T>& sums)
        : a(mixer), maps_back(mixer), sums(sums), total(sums.shared_size) {}

    void operator()(int64_t call) {
        double* sum = sums.norms.data() + call * 2 * a.state;
        if (a.letters) return source_back(call, sum);
        for (int64_t t = 0; t < a.layout.length(call); ++t) source_back(a.layout.token(call, t), sum);
    }

  private:
    void source_back(int64_t source, double* sum) {
        std::fill(total.begin(), total.end(), T(0));
        const int64_t size = int64_t(total.size()), parts = int64_t(sums.shared.size()) / (a.sources() * size);
        for (int64_t part = 0; part < parts; ++part) {
            const T* from = sums.shared.data() + (part * a.sources() + source) * size;
            for (int64_t i = 0; i < size; ++i) total[i] += from[i];
        }
        maps_back(source, total.data(), sum);
    }

    const Mixer<S, T>& a;
    const SharedMapsBack<S, T> maps_back;
    BackwardSums<S, T>& sums;
    std::vector<T> total;
};

// The sum over some rows, in their order, of `count` numbers each.
template <typename S, typename X>
void add_rows(const X* from, int64_t rows, int64_t stride, int64_t count, S* to) {
    if (!to) return;
    std::vector<double> total(count);
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < count; ++i) total[i] += double(from[row * stride + i]);
    for (int64_t i = 0; i < count; ++i) put(std::conditional_t<std::is_same_v<S, double>, double, float>(total[i]), to[i]);
}

// Adds what the groups found to the gradients of the letters; SharedBackward overwrites the columns that are its own.
template <typename S, typename T>
void add_letter_gradients(const Mixer<S, T>& a, const BackwardSums<S, T>& sums) {
    const auto add = [&](const std::vector<T>& from, int64_t size, S* to) {
        add_rows(from.data(), groups(a), size, size, to);
    };
    add(sums.projected, a.letters * a.width, a.grad_projected);
    add(sums.k, a.letters * a.heads * a.state, a.grad_k);
    add(sums.beta, a.letters * a.heads, a.grad_beta);
}

// Adds what the rows found to the gradients of the parameters.
template <typename S, typename T>
void add_parameter_gradients(const Mixer<S, T>& a, BackwardSums<S, T>& sums) {
    const int64_t n = a.state, p = a.channels;
    const auto add = [&](T* to, const double* from, int64_t row_stride, int64_t count) {
        add_rows(from, a.layout.rows, row_stride, count, to);
    };
    const int64_t size = HeadSums<T>(n, p).size, stride = a.heads * size;
    for (int64_t head = 0; head < a.heads; ++head) {
        const HeadSums<T, double> from(n, p, sums.heads.data() + head * size);
        add(a.grad_dt_bias + head, from.scalars, stride, 1);
        add(a.grad_A_bias ? a.grad_A_bias + head : nullptr, from.scalars + 1, stride, 1);
        add(a.grad_D + head, from.scalars + 2, stride, 1);
        add(a.grad_B_bias ? a.grad_B_bias + head * n : nullptr, from.B_bias, stride, n);
        add(a.grad_C_bias + head * n, from.C_bias, stride, n);
        add(a.grad_norm_weight ? a.grad_norm_weight + head * p : nullptr, from.norm_weight, stride, p);
    }
    const int64_t rows = int64_t(sums.norms.size()) / (2 * n);
    add_rows(sums.norms.data(), rows, 2 * n, n, a.grad_B_weight);
    add_rows(sums.norms.data() + n, rows, 2 * n, n, a.grad_C_weight);
}

template <typename Worker, typename S, typename T>
void run_units(const Mixer<S, T>& a, BackwardSums<S, T>* sums) {
    const int64_t work = tokens_in(a.layout) * a.heads * a.state * a.channels;
    in_parallel((sums ? groups(a) : a.layout.rows) * units_in_row(a), a.threads, work, [&] {
        return [worker = std::make_unique<Worker>(a, sums), forward = !sums](int64_t i) {
            forward ? worker->forward(i) : worker->backward(i);
        };
    });
}

template <int64_t N, int64_t P, typename S, typename T>
void run_units_of_size(const Mixer<S, T>& a, BackwardSums<S, T>* sums) {
    if (heads_in_lanes(a))
        run_units<LanesWorker<S, T, N, P>>(a, sums);
    else
        run_units<MixerWorker<S, T>>(a, sums);
}

template <typename S, typename T>
void run_all_units(const Mixer<S, T>& a, BackwardSums<S, T>* sums) {
    // The paper's size has code of its own.
    constexpr int64_t kFixed = std::is_same_v<S, float> ? 16 : 0;
    if (a.state == kFixed && a.channels == kFixed)
        run_units_of_size<kFixed, kFixed>(a, sums);
    else
        run_units_of_size<0, 0>(a, sums);
}

template <typename S, typename T>
void run(const Mixer<S, T>& a, bool forward) {
    if (forward) return run_all_units<S, T>(a, nullptr);
    BackwardSums<S, T> sums(a);
    run_all_units<S, T>(a, &sums);
    if (a.letters) add_letter_gradients(a, sums);
    if (!one_unit_has_all(a))
        in_parallel(a.letters ? a.letters : a.layout.rows, a.threads, tokens_in(a.layout) * a.heads * a.state,
                    [&] { return SharedBackward<S, T>(a, sums); });
    add_parameter_gradients(a, sums);
}

}  // namespace
