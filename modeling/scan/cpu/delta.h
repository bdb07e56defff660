// The mixer of the delta family between its projections: see the equations in mixers/delta.py.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "delta_parts.h"
#include "delta_segment.h"
#include "functions.h"
#include "matrices.h"
#include "memory.h"
#include "vectors.h"
#include "work.h"

namespace {

// Works on one unit after another.
template <typename S, typename T>
class DeltaWorker {
    using V = Vector<T>;
    static constexpr int64_t L = kLanes<T>;

  public:
    // For the backward pass, with its sums; for the forward pass these are null.
    DeltaWorker(const Delta<S, T>& delta, DeltaSums<S, T>* sums)
        : a(delta),
          units(delta),
          columns(delta),
          n(delta.state),
          p(delta.channels),
          most_tokens(delta_segment_tokens(delta.steps)),
          read_scale(T(1) / std::sqrt(T(delta.state))),
          sums(sums),
          s(memory, most_tokens, delta.steps, n, p, delta.A_log),
          core(memory, s, sums),
          q(delta, memory, units.heads, sums, columns.q, 1, n),
          k(delta, memory, units.heads, sums, columns.k, delta.steps, n),
          v(delta, memory, units.heads, sums, columns.v, delta.steps, p),
          gate(memory.take(units.heads * most_tokens * s.p)),
          grad_out(memory.take(sums ? units.heads * most_tokens * s.p : 0)),
          h(memory.take(units.heads * s.state_size())),
          again(memory.take(sums ? s.state_size() : 0)),
          weight(memory.take(s.p)),
          weight_sums(memory.take(s.p)),
          scale(memory.take(s.across + s.across / s.steps + L)),
          along(memory.take(s.across + s.across / s.steps + L)),
          rate_raw(memory.take(padded<T>(most_tokens))),
          y_scale(memory.take(padded<T>(most_tokens))),
          tokens(most_tokens),
          sources(most_tokens) {
        load(a.norm_weight, p, weight);
    }

    int64_t sums_size() const { return s.p + 2 + q.sums_size() + k.sums_size() + v.sums_size(); }

    void operator()(int64_t unit, bool forward_pass) {
        first = unit % units.groups() * units.heads;
        heads = std::min(units.heads, a.heads - first);
        const int64_t block = unit / units.groups(), start = block * units.rows_in_block;
        if (sums) unit_sums = sums->weights.data() + unit * units.heads * sums_size();
        T* letter_sums = sums && a.letters ? sums->letters.data() + block * a.letters * a.width : nullptr;
        grad_projected = {a.grad_projected, letter_sums, a.width};
        for (Stream<S, T>* x : {&q, &k, &v}) x->choose_heads(first, heads);
        for (row = start; row < std::min(start + units.rows_in_block, units.rows); ++row) {
            length = a.layout.length(row);
            forward_pass ? forward() : backward();
        }
    }

    // Adds the sums of a unit to those of all weights.
    void add_sums(int64_t unit, std::vector<double>& norm, std::vector<double>& A_log, std::vector<double>& dt_bias,
                  std::vector<double>& conv) const {
        const int64_t first = unit % units.groups() * units.heads;
        for (int64_t i = 0; i < std::min(units.heads, a.heads - first); ++i) {
            const double* from = sums->weights.data() + (unit * units.heads + i) * sums_size();
            for (int64_t l = 0; l < p; ++l) norm[l] += from[l];
            A_log[first + i] += from[s.p];
            dt_bias[first + i] += from[s.p + 1];
            from += s.p + 2;
            for (const Stream<S, T>* x : {&q, &k, &v}) {
                x->add_sums(first, i, from, conv);
                from += x->sums_size();
            }
        }
    }

  private:
    int64_t pair(int64_t i) const { return row * a.heads + first + i; }
    T* kept_at(int64_t start, int64_t i) const {
        const int64_t slot = a.layout.start(row) / most_tokens + row + start / most_tokens;
        return a.kept + (slot * a.heads + first + i) * n * p;
    }
    T* h_of(int64_t i) const { return h + i * s.state_size(); }
    T* gate_of(int64_t i, int64_t t) const { return gate + (i * most_tokens + t) * s.p; }
    T* grad_out_of(int64_t i, int64_t t) const { return grad_out + (i * most_tokens + t) * s.p; }
    int64_t last_size() const { return q.before * columns.g; }

    void load_state(const T* from, T* to) const {
        for (int64_t i = 0; i < n; ++i) load(from + i * p, p, to + i * s.p);
        // Another sequence may have left there what is not a number.
        for (int64_t i = n; i < s.used_rows; ++i) std::fill_n(to + i * s.p, s.p, T(0));
    }
    void store_state(const T* from, T* to) const {
        for (int64_t i = 0; i < n; ++i) store(from + i * s.p, p, to + i * p);
    }

    void forward() {
        for (int64_t i = 0; i < heads; ++i) load_state(a.h0 + pair(i) * n * p, h_of(i));
        for (int64_t start = 0; start < length; start += most_tokens) {
            begin_segment(start);
            expect_segment(start + most_tokens);
            for (int64_t i = 0; i < heads; ++i) {
                store_state(h_of(i), kept_at(start, i));
                fill(i);
                core.forward(h_of(i));
                gate_output(i);
            }
            for (int64_t t = 0; t < s.tokens; ++t)
                for (int64_t i = 0; i < heads; ++i)
                    store(gate_of(i, t), p, a.out + (tokens[t] * a.heads + first + i) * p);
        }
        for (int64_t i = 0; i < heads; ++i) store_state(h_of(i), a.h + pair(i) * n * p);
        // The last tokens are those before a segment that would follow.
        load_before(length);
        T* last = a.last + row * last_size();
        for (Stream<S, T>* x : {&q, &k, &v})
            for (int64_t t = 0; t < x->before; ++t) x->store_token(heads, t, last + t * columns.g);
    }

    void backward() {
        const int64_t before = q.before, rest = length ? (length - 1) % most_tokens + 1 : 0;
        for (int64_t i = 0; i < heads; ++i) load_state(a.grad_h + pair(i) * n * p, h_of(i));
        const T* grad_last = a.grad_last + row * last_size();
        for (Stream<S, T>* x : {&q, &k, &v}) {
            for (int64_t t = 0; t < before; ++t) x->load_gradient(grad_last + t * columns.g, heads, t);
            x->pass_gradients_on(heads, rest);
        }
        for (int64_t start = length - rest; length && start >= 0; start -= most_tokens) {
            begin_segment(start);
            expect_segment(start - most_tokens);
            for (int64_t i = 0; i < heads; ++i) {
                double* head_sums = unit_sums + i * sums_size();
                load_state(kept_at(start, i), again);
                fill(i);
                core.begin_backward(again, h_of(i));
                core.forward(again);
                output_back(i, head_sums);
                core.backward(h_of(i));
                coefficients_back(i, head_sums);
            }
            for (int64_t t = 0; t < s.tokens; ++t) write_gradients(t);
            if (start)
                for (Stream<S, T>* x : {&q, &k, &v}) x->pass_gradients_on(heads, most_tokens);
        }
        for (int64_t i = 0; i < heads; ++i) store_state(h_of(i), a.grad_h0 + pair(i) * n * p);
        const GradientRows<T, T> grad_last0{a.grad_last0 + row * last_size(), nullptr, columns.g};
        for (Stream<S, T>* x : {&q, &k, &v})
            for (int64_t t = 0; t < before; ++t) x->give_gradient(heads, t, grad_last0, t);
    }

    // Reads what is projected of the tokens from `start` on, for all heads.
    void begin_segment(int64_t start) {
        s.tokens = std::min(most_tokens, length - start);
        load_before(start);
        for (int64_t t = 0; t < s.tokens; ++t) {
            tokens[t] = a.layout.token(row, start + t);
            sources[t] = a.source(tokens[t]);
            const S* from = a.projected + sources[t] * a.width;
            for (Stream<S, T>* x : {&q, &k, &v}) x->load_token(from, heads, x->before + t);
            for (int64_t i = 0; i < heads; ++i) {
                if (a.gated) load(from + columns.g + (first + i) * p, p, gate_of(i, t));
                if (sums) load(a.grad_out + (tokens[t] * a.heads + first + i) * p, p, grad_out_of(i, t));
            }
        }
    }

    // Has the memory of the segment after this one fetched, and what this one will write.
    FORCE_INLINE void expect_segment(int64_t start) const {
        const int64_t end = std::min(start + most_tokens, length);
        const bool of_tokens = !a.letters;  // letters are there already
        for (int64_t t = 0; of_tokens && sums && t < s.tokens; ++t)
            expect<true>(a.grad_projected + tokens[t] * a.width, a.width);
        if (start < 0 || start >= length) return;
        for (int64_t t = start; of_tokens && t < end; ++t)
            expect<false>(a.projected + a.layout.token(row, t) * a.width, a.width);
        sums ? expect<false>(kept_at(start, 0), heads * n * p) : expect<true>(kept_at(start, 0), heads * n * p);
    }

    // The tokens before `start` that the convolution reaches, some of which are of the state before the sequence.
    void load_before(int64_t start) {
        for (Stream<S, T>* x : {&q, &k, &v})
            for (int64_t t = 0; t < x->before; ++t) {
                const int64_t back = start + t - x->before;
                if (back < 0)
                    x->load_token(a.last0 + row * last_size() + (start + t) * columns.g, heads, t);
                else
                    x->load_token(a.projected + a.source(a.layout.token(row, back)) * a.width, heads, t);
            }
    }

    // The coefficients of head i.
    void fill(int64_t i) {
        const int64_t head = first + i;
        for (int64_t t = 0; t < s.tokens; ++t) {
            q.activate(i, t, 0, s.query(t));
            const S* from = a.projected + sources[t] * a.width;
            for (int64_t c = 0; c < s.steps; ++c) {
                k.activate(i, t, c, s.key(t * s.steps + c));
                v.activate(i, t, c, s.e[t * s.steps + c]);
                s.b[t * s.steps + c] = value(from[columns.b + c * a.heads + head]);
            }
            if (s.decays) rate_raw[t] = value(from[columns.a + head]) + a.dt_bias[head];
        }
        sum_each(s.projections(), scale, [&](int64_t x) { return products(s.l[x], s.l[x], s.n); });
        for (int64_t x = 0; x < s.projections(); ++x) {
            scale[x] = T(1) / std::sqrt(scale[x] + T(a.key_epsilon));
            for (int64_t l = 0; l < s.n; l += L) vec(s.l[x] + l) *= scale[x];
        }
        for (int64_t t = 0; t < s.writes(); t += L) vec(s.b + t) = T(a.beta_max) * sigmoid<T>(vec(s.b + t));
        for (int64_t t = 0; s.decays && t < s.tokens; t += L)
            vec(s.d + t) = exponential(-rate(head) * softplus<T>(vec(rate_raw + t)));
    }
    T rate(int64_t head) const { return std::exp(a.A_log[head]); }

    // 1 / RMS of what is read, times its scale.
    void find_y_scale() {
        sum_each(s.tokens, y_scale, [&](int64_t t) { return products(s.y[t], s.y[t], s.p); });
        for (int64_t t = 0; t < s.tokens; ++t) {
            const T mean = y_scale[t] * read_scale * read_scale / T(p);
            y_scale[t] = read_scale / std::sqrt(mean + T(a.epsilon));
        }
    }

    // In place of the gate.
    void gate_output(int64_t i) {
        find_y_scale();
        for (int64_t t = 0; t < s.tokens; ++t)
            for (int64_t l = 0; l < s.p; l += L) {
                V& at = vec(gate_of(i, t) + l);
                const V normed = y_scale[t] * vec(s.y[t] + l) * vec(weight + l);
                at = a.gated ? normed * at * sigmoid<T>(at) : normed;
            }
    }

    // From the gradient of the output to those of what is read, of the gate, in its place, and of the norm's weight.
    void output_back(int64_t i, double* head_sums) {
        find_y_scale();
        std::fill_n(weight_sums, s.p, T(0));
        for (int64_t t = 0; t < s.tokens; ++t) {
            T *grad = grad_out_of(i, t), *to = s.grad_y(t);
            V with_y{};
            for (int64_t l = 0; l < s.p; l += L) {
                const V normed = y_scale[t] * vec(s.y[t] + l);
                V to_normed = vec(grad + l);
                if (a.gated) {
                    V& x = vec(gate_of(i, t) + l);
                    const V open = sigmoid<T>(x), to_gate = to_normed * normed * vec(weight + l);
                    to_normed *= x * open;
                    x = to_gate * open * (T(1) + x * (T(1) - open));
                }
                vec(weight_sums + l) += to_normed * normed;
                vec(to + l) = to_normed * vec(weight + l);
                with_y += vec(to + l) * normed;
            }
            const T mean = sum_lanes<T>(with_y) / T(p) * y_scale[t];
            for (int64_t l = 0; l < s.p; l += L) vec(to + l) = y_scale[t] * (vec(to + l) - mean * vec(s.y[t] + l));
        }
        for (int64_t l = 0; l < s.p; ++l) head_sums[l] += weight_sums[l];
    }

    // From the gradients of coefficients to those of what is projected.
    void coefficients_back(int64_t i, double* head_sums) {
        sum_each(s.projections(), along, [&](int64_t x) { return products(s.l[x], s.grad_l[x], s.n); });
        const auto unnormalised = [&](int64_t x) {
            return [this, x](int64_t l) { return scale[x] * (vec(s.grad_l[x] + l) - along[x] * vec(s.l[x] + l)); };
        };
        for (int64_t token = 0; token < s.tokens; ++token) {
            q.activate_back(i, token, 0, unnormalised(s.writes() + token));
            for (int64_t c = 0; c < s.steps; ++c) {
                const int64_t t = token * s.steps + c;
                k.activate_back(i, token, c, unnormalised(t));
                v.activate_back(i, token, c, [&](int64_t l) { return -vec(s.z[t] + l); });
            }
        }
        double* stream_sums = head_sums + s.p + 2;
        for (Stream<S, T>* x : {&q, &k, &v}) {
            x->convolve_back(i, s.tokens, stream_sums);
            stream_sums += x->sums_size();
        }
        gates_back(first + i, head_sums + s.p);
    }

    // head_sums: of A_log and dt_bias.
    void gates_back(int64_t head, double* head_sums) {
        for (int64_t t = 0; t < s.tokens; ++t) {
            for (int64_t c = 0; c < s.steps; ++c) {
                const T b = s.b[t * s.steps + c], slope = b * (T(1) - b / T(a.beta_max));
                grad_projected.give(s.grad_b[t * s.steps + c] * slope, sources[t], columns.b + c * a.heads + head);
            }
        }
        if (!s.decays) return;
        const T rate = this->rate(head);
        for (int64_t t = 0; t < s.tokens; t += L) {
            // By lanes past the last token nothing is read.
            const V raw = vec(rate_raw + t), to_log = vec(s.grad_log_d + t);
            vec(y_scale + t) = -rate * to_log * softplus_slope<T>(raw);
            vec(rate_raw + t) = -rate * to_log * softplus<T>(raw);
        }
        T to_A_log = 0, to_bias = 0;
        for (int64_t t = 0; t < s.tokens; ++t) {
            grad_projected.give(y_scale[t], sources[t], columns.a + head);
            to_A_log += rate_raw[t];
            to_bias += y_scale[t];
        }
        head_sums[0] += to_A_log;
        head_sums[1] += to_bias;
    }

    void write_gradients(int64_t t) {
        for (Stream<S, T>* x : {&q, &k, &v}) x->give_gradient(heads, x->before + t, grad_projected, sources[t]);
        for (int64_t i = 0; a.gated && i < heads; ++i)
            grad_projected.give(gate_of(i, t), p, sources[t], columns.g + (first + i) * p);
        if (first || a.letters) return;
        std::fill_n(a.grad_projected + sources[t] * a.width + columns.used, a.width - columns.used, S{});
    }

    const Delta<S, T>& a;
    const DeltaUnits<S, T> units;
    const DeltaColumns<S, T> columns;
    const int64_t n, p, most_tokens;
    const T read_scale;
    DeltaSums<S, T>* sums;
    double* unit_sums = nullptr;
    GradientRows<S, T> grad_projected{};
    int64_t row = 0, first = 0, heads = 0, length = 0;
    Buffers<T> memory;
    DeltaSegment<T> s;
    DeltaCore<T> core;
    Stream<S, T> q, k, v;
    T *gate, *grad_out, *h, *again;  // h: in the backward pass, its gradient; again: h, as the segment is run again
    T *weight, *weight_sums, *scale, *along, *rate_raw, *y_scale;
    std::vector<int64_t> tokens, sources;
};

// Adds what the units found to the gradients of the weights.
template <typename S, typename T>
void write_weight_gradients(const Delta<S, T>& a, const DeltaWorker<S, T>& worker) {
    const int64_t channels = DeltaColumns<S, T>(a).g;
    std::vector<double> norm(a.channels), A_log(a.heads), dt_bias(a.heads), conv(channels * a.conv_width);
    for (int64_t unit = 0; unit < DeltaUnits<S, T>(a).count(); ++unit)
        worker.add_sums(unit, norm, A_log, dt_bias, conv);
    const auto write = [](const std::vector<double>& from, T* to) {
        if (to) std::copy(from.begin(), from.end(), to);
    };
    write(norm, a.grad_norm_weight);
    write(A_log, a.grad_A_log);
    write(dt_bias, a.grad_dt_bias);
    write(conv, a.grad_conv_weight);
}

template <typename S, typename T>
void write_letter_gradients(const Delta<S, T>& a, const std::vector<T>& sums) {
    const int64_t size = a.letters * a.width;
    for (int64_t i = 0; i < size; ++i) {
        double total = 0;
        for (int64_t block = 0; block < DeltaUnits<S, T>(a).blocks(); ++block) total += sums[block * size + i];
        put(T(total), a.grad_projected[i]);
    }
}

template <typename S, typename T>
void run(const Delta<S, T>& a, bool forward) {
    DeltaSums<S, T> sums(a, forward ? 0 : DeltaWorker<S, T>(a, nullptr).sums_size());
    const int64_t work = tokens_in(a.layout) * a.steps * a.heads * a.state * a.channels;
    in_parallel(DeltaUnits<S, T>(a).count(), a.threads, work, [&] {
        return [worker = DeltaWorker<S, T>(a, forward ? nullptr : &sums), forward](int64_t unit) mutable {
            worker(unit, forward);
        };
    });
    if (forward) return;
    write_weight_gradients(a, DeltaWorker<S, T>(a, &sums));
    if (a.letters) write_letter_gradients(a, sums.letters);
}

}  // namespace
