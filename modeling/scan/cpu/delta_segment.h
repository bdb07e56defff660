// The delta rule over a few tokens of one head, and its gradient.
//
// A step writes along its key what the state lacks there; a token is read once, after the last of its steps:
//
//     h'_t = d_t h_{t-1}          e_t = v_t - h'_t' k_t          h_t = h'_t + k_t (b_t e_t)'          y_s = h_t' r_s
//
// d_t is 1 but at the first step of a token. The backward pass runs the segment again and then the like of it from its
// end, for g_t, the gradient of h_t. What a step lacks and what a token reads follow from projections of the state on a
// vector l_x, a key or a query; z_x is the gradient of such a projection, -b_t g_t' k_t or that of y_s:
//
//     g'_t = g_t + k_t z_t'       g_{t-1} = d_t g'_t, and + r_s z_s' if a token ends there
//
// No state inside the segment is kept. With w_j = b_j e_j, the state that x projects is f_x h_0 + sum_j F_xj k_j w_j',
// where F_xj is the decay from step j to x, and 0 for steps that come later; g has the like. So with M_xj = F_xj
// (z_x . w_j), and c_j for the decay from j to the end of the segment, h_0 and g_end are multiplied once for all steps:
//
//     gradient of l_x   = f_x h_0 z_x + sum_j M_xj k_j
//     gradient of k_j  += c_j g_end w_j + sum_x M_xj l_x
//
// and the gradient of log d_t is all that passes through this decay: (l_x . k_j) M_xj of every x from t on and every j
// before it, with the like of h_0 and g_end.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "matrices.h"
#include "memory.h"
#include "vectors.h"

namespace {

// Coefficients of some tokens and, after `DeltaCore::backward`, their gradients. Vectors are padded with zeros. Those
// of tokens follow those of steps in `l`, `z` and `grad_l`.
template <typename T>
struct DeltaSegment {
    DeltaSegment(Buffers<T>& memory, int64_t most_tokens, int64_t steps, int64_t n, int64_t p, bool decays)
        : n(padded<T>(n)),
          p(padded<T>(p)),
          used_rows(n + n % 2),
          steps(steps),
          across(padded<T>(most_tokens * steps)),
          decays(decays),
          l(memory, across + most_tokens, this->n),
          grad_l(memory, across + most_tokens, this->n),
          e(memory, across, this->p),
          w(memory, across, this->p),
          z(memory, across + most_tokens, this->p),
          y(memory, most_tokens, this->p),
          b(memory.take(across)),
          grad_b(memory.take(across)),
          d(memory.take(padded<T>(most_tokens))),
          grad_log_d(memory.take(padded<T>(most_tokens))) {}

    int64_t writes() const { return tokens * steps; }
    int64_t projections() const { return writes() + tokens; }
    T* key(int64_t t) const { return l[t]; }
    T* query(int64_t s) const { return l[writes() + s]; }
    T* grad_y(int64_t s) const { return z[writes() + s]; }
    T* grad_query(int64_t s) const { return grad_l[writes() + s]; }
    int64_t state_size() const { return n * p; }

    const int64_t n, p, used_rows;  // used_rows: of a state, all that are not padding, and an even number
    const int64_t steps, across;    // of a token; of the longest segment, padded
    const bool decays;
    int64_t tokens = 0;
    Rows<T> l, grad_l;
    Rows<T> e, w, z, y;  // e is v before `DeltaCore::forward`; z at a step is minus the gradient of v
    T *b, *grad_b, *d, *grad_log_d;
};

template <typename T>
class DeltaCore {
    using V = Vector<T>;
    static constexpr int64_t L = kLanes<T>;
    static constexpr int kWidest = VECTOR_BYTES >= 64 ? 4 : 2;  // vectors of channels that there are registers for

  public:
    DeltaCore(Buffers<T>& memory, DeltaSegment<T>& segment, bool has_backward) : s(segment) {
        if (!has_backward) return;
        const int64_t most = s.across + s.across / s.steps;
        for (T** x : {&h_across, &g_across}) *x = memory.take(s.state_size());
        for (T** x : {&F, &M}) *x = memory.take(most * s.across);
        grad_k = memory.take(s.across * s.n);
        w_across = memory.take(s.across * s.p);
        k_across = memory.take(s.across * s.n);
        nothing = memory.take(std::max(s.n, s.p));
        for (T** x : {&to_end, &through_g}) *x = memory.take(s.across);
        for (T** x : {&from_start, &through_h}) *x = memory.take(most);
    }

    // From h before the segment to h after it, and to y.
    void forward(T* h) {
        in_panels([&](auto width, int64_t first) { forward_panel<width>(h + first, first); });
    }

    // Before `forward` runs the segment again: takes what the gradient needs of h before it and of g after it.
    void begin_backward(const T* h, const T* g) {
        transpose(h, s.n, s.p, h_across);
        transpose(g, s.n, s.p, g_across);
        V sum{};
        for (int64_t i = 0; s.decays && i < s.state_size(); i += L) sum += vec(h + i) * vec(g + i);
        h_times_g = sum_lanes<T>(sum);
    }

    // From g after the segment to g before it, and to all gradients, once grad_y is there.
    void backward(T* g) {
        in_panels([&](auto width, int64_t first) { backward_panel<width>(g + first, first); });
        // Until here z is the gradient of w.
        sum_each(s.writes(), s.grad_b, [&](int64_t t) { return products(s.z[t], s.e[t], s.p); });
        for (int64_t t = 0; t < s.writes(); ++t)
            for (int64_t i = 0; i < s.p; i += L) vec(s.z[t] + i) *= -s.b[t];
        find_decays();
        find_M();
        vectors_back();
        if (s.decays) decays_back();
    }

  private:
    template <typename Call>
    void in_panels(const Call& call) {
        int64_t first = 0;
        const auto panels_of = [&](auto width) {
            for (; first + width * L <= s.p; first += width * L) call(width, first);
        };
        panels_of(std::integral_constant<int, kWidest>());
        panels_of(std::integral_constant<int, 2>());
        panels_of(std::integral_constant<int, 1>());
    }

    template <int W>
    struct Panel {
        V of[W];
        Panel() : of{} {}
        explicit Panel(const T* from) {
            for (int v = 0; v < W; ++v) of[v] = vec(from + v * L);
        }
        void store(T* to) const {
            for (int v = 0; v < W; ++v) vec(to + v * L) = of[v];
        }
        void add(const Panel& other) {
            for (int v = 0; v < W; ++v) of[v] += other.of[v];
        }
    };

    // Lets change(x, i, v, odd) change the vectors x of a state, i its row, and returns k' x, of which every other row
    // is added up by itself: an addition has to wait for the one before.
    template <int W, typename Change>
    FORCE_INLINE Panel<W> pass(T* h, const T* k, const Change& change) const {
        Panel<W> sum[2];
        for (int64_t i = 0; i < s.used_rows; i += 2)
            for (int odd = 0; odd < 2; ++odd)
                for (int v = 0; v < W; ++v) {
                    V& at = vec(h + (i + odd) * s.p + v * L);
                    V x = at;
                    change(x, i + odd, v, odd);
                    at = x;
                    sum[odd].of[v] += k[i + odd] * x;
                }
        sum[0].add(sum[1]);
        return sum[0];
    }

    template <int W>
    void forward_panel(T* h, int64_t first) {
        const T start = s.decays ? s.d[0] : T(1);
        Panel<W> q = pass<W>(h, s.key(0), [&](V& x, int64_t, int, int) FORCE_INLINE { x *= start; });
        for (int64_t token = 0, t = 0; token < s.tokens; ++token)
            for (int64_t step = 1; step <= s.steps; ++step, ++t) {
                const T *k = s.key(t), *next = s.key(std::min(t + 1, s.writes() - 1));
                const Panel<W> write = lacking<W>(t, first, q);
                if (step < s.steps) {
                    q = pass<W>(h, next, [&](V& x, int64_t i, int v, int) FORCE_INLINE { x += k[i] * write.of[v]; });
                    continue;
                }
                const T *r = s.query(token), decay = s.decays && token + 1 < s.tokens ? s.d[token + 1] : T(1);
                Panel<W> y[2];
                q = pass<W>(h, next, [&](V& x, int64_t i, int v, int odd) FORCE_INLINE {
                    x += k[i] * write.of[v];
                    y[odd].of[v] += r[i] * x;
                    x *= decay;
                });
                y[0].add(y[1]);
                y[0].store(s.y[token] + first);
            }
    }

    // From v to e and w, which is returned.
    template <int W>
    Panel<W> lacking(int64_t t, int64_t first, const Panel<W>& q) {
        Panel<W> x(s.e[t] + first);
        for (int v = 0; v < W; ++v) x.of[v] -= q.of[v];
        x.store(s.e[t] + first);
        for (int v = 0; v < W; ++v) x.of[v] *= s.b[t];
        x.store(s.w[t] + first);
        return x;
    }

    template <int W>
    void backward_panel(T* g, int64_t first) {
        const Panel<W> last(s.grad_y(s.tokens - 1) + first);
        const T* r = s.query(s.tokens - 1);
        Panel<W> to_w = pass<W>(g, s.key(s.writes() - 1), [&](V& x, int64_t i, int v, int) FORCE_INLINE {
            x += r[i] * last.of[v];
        });
        for (int64_t token = s.tokens - 1, t = s.writes() - 1; token >= 0; --token)
            for (int64_t step = s.steps; step >= 1; --step, --t) {
                const T *k = s.key(t), *next = s.key(std::max<int64_t>(t - 1, 0));
                to_w.store(s.z[t] + first);
                Panel<W> z = to_w;
                for (int v = 0; v < W; ++v) z.of[v] *= -s.b[t];
                if (step > 1) {
                    to_w = pass<W>(g, next, [&](V& x, int64_t i, int v, int) FORCE_INLINE { x += k[i] * z.of[v]; });
                    continue;
                }
                const T *read = token ? s.query(token - 1) : nothing, decay = s.decays ? s.d[token] : T(1);
                const Panel<W> to_y(token ? s.grad_y(token - 1) + first : nothing);
                to_w = pass<W>(g, next, [&](V& x, int64_t i, int v, int) FORCE_INLINE {
                    x = decay * (x + k[i] * z.of[v]) + read[i] * to_y.of[v];
                });
            }
    }

    // F, f and c.
    void find_decays() {
        std::fill_n(to_end, s.across, T(0));
        T decay = 1;
        const auto project = [&](int64_t x) {
            std::copy_n(to_end, s.across, F + x * s.across);
            from_start[x] = decay;
        };
        for (int64_t token = 0, t = 0; token < s.tokens; ++token) {
            const T now = s.decays ? s.d[token] : T(1);
            decay *= now;
            for (int64_t i = 0; i < s.across; i += L) vec(to_end + i) *= now;
            for (int64_t step = 0; step < s.steps; ++step, ++t) {
                project(t);
                to_end[t] = T(1);
            }
            project(s.writes() + token);
        }
    }

    void find_M() {
        transpose(s.w.data, s.across, s.p, w_across);
        multiply_matrices<false>({s.z.data, s.p, 1}, s.projections(), s.p, w_across, s.across, M);
        for (int64_t i = 0; i < s.projections() * s.across; i += L) {
            const V f = vec(F + i);  // where it is 0, whatever lies there need not be finite
            vec(M + i) = f == T(0) ? V{} : f * vec(M + i);
        }
    }

    void vectors_back() {
        multiply_matrices<false>({s.z.data, s.p, 1}, s.projections(), s.p, h_across, s.n, s.grad_l.data);
        multiply_matrices<false>({s.w.data, s.p, 1}, s.writes(), s.p, g_across, s.n, grad_k);
        for (int64_t x = 0; s.decays && x < s.projections(); ++x)
            through_h[x] = decayed(s.grad_l[x], from_start[x], s.l[x]);
        for (int64_t t = 0; s.decays && t < s.writes(); ++t)
            through_g[t] = decayed(grad_k + t * s.n, to_end[t], s.key(t));
        multiply_matrices<true>({M, s.across, 1}, s.projections(), s.writes(), s.l.data, s.n, s.grad_l.data);
        multiply_matrices<true>({M, 1, s.across}, s.writes(), s.projections(), s.l.data, s.n, grad_k);
        for (int64_t i = 0; i < s.writes() * s.n; i += L) vec(s.grad_l.data + i) += vec(grad_k + i);
    }

    // Multiplies a vector by a decay, and returns its product with another.
    T decayed(T* x, T decay, const T* other) const {
        for (int64_t i = 0; i < s.n; i += L) vec(x + i) *= decay;
        return sum_lanes<T>(products(x, other, s.n));
    }

    void decays_back() {
        T* l_times_k = F;  // which is of no more use
        transpose(s.l.data, s.across, s.n, k_across);
        multiply_matrices<false>({s.l.data, s.n, 1}, s.projections(), s.n, k_across, s.across, l_times_k);
        T* from_step = through_g;  // what goes from each step to later projections, and to the end
        T outside = from_start[s.projections() - 1] * h_times_g;
        const auto add = [&](int64_t x) {
            outside += through_h[x];
            for (int64_t i = x * s.across, j = 0; j < s.across; i += L, j += L)
                vec(from_step + j) += vec(M + i) == T(0) ? V{} : vec(M + i) * vec(l_times_k + i);
        };
        for (int64_t token = s.tokens - 1; token >= 0; --token) {
            add(s.writes() + token);
            for (int64_t t = token * s.steps; t < (token + 1) * s.steps; ++t) add(t);
            s.grad_log_d[token] = outside;
            for (int64_t t = 0; t < token * s.steps; ++t) s.grad_log_d[token] += from_step[t];
        }
    }

    DeltaSegment<T>& s;
    T *h_across = nullptr, *g_across = nullptr, *w_across = nullptr, *k_across = nullptr;  // transposes
    T *F = nullptr, *M = nullptr, *grad_k = nullptr, *nothing = nullptr;
    T *from_start = nullptr, *to_end = nullptr;  // f and c
    T *through_h = nullptr, *through_g = nullptr, h_times_g = 0;  // terms of h_0 and g_end in the gradient of log d
};

}  // namespace
