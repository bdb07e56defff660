// The recurrence over a few steps of one head, and its gradient.
//
//     h_t = d_t (h_{t-1} + c_t B_{t-1} u_{t-1}') - r_t k_t (k_t' h_{t-1}) + w_t B_t u_t'
//     y_t = C_t' h_t + D u_t
//
// A sequence is walked in segments of `kSegment` steps. The forward pass keeps h at the start of each; the backward
// pass runs a segment again from there. Inside a segment each write waits for the step after it, G_t = h_t -
// w_t B_t u_t', and is done there together with the carry, which leaves two rank-one updates a step instead of three:
//
//     q_t = k_t' G_{t-1} + e_t u_{t-1}              e_t = w_{t-1} (k_t . B_{t-1})
//     G_t = d_t G_{t-1} - r_t k_t q_t' + s_t B_{t-1} u_{t-1}'         s_t = d_t (w_{t-1} + c_t)
//     y_t = C_t' G_t + (D + f_t) u_t                f_t = w_t (C_t . B_t)
//
// A segment starts from G = h, with nothing to write, and the write of its last step is done at its end. To do the carry
// a step early, with the write before it, would take as many updates; but then what is read at a step would depend, if
// only by rounding, on the step after it.
//
// `Segment` holds these coefficients, `Core` runs the equations and their gradient on it.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "memory.h"
#include "vectors.h"

namespace {

constexpr int64_t kSegment = 16;

// Coefficients of up to kSegment steps and, after `Core::backward`, their gradients. Vectors of `state` and `channels`
// are padded with zeros. B and u have the token before the segment in row 0, so that row t + 1 is that of step t.
template <typename T>
struct Segment {
    Segment(Buffers<T>& memory, int64_t n, int64_t p)
        : state(padded<T>(n)),
          channels(padded<T>(p)),
          k(memory, kSegment + 1, state),
          B(memory, kSegment + 1, state),
          C(memory, kSegment, state),
          rk(memory, kSegment, state),
          sB(memory, kSegment, state),
          u(memory, kSegment + 1, channels),
          y(memory, kSegment, channels),
          q(memory, kSegment, channels),
          grad_k(memory, kSegment, state),
          grad_B(memory, kSegment + 1, state),
          grad_C(memory, kSegment, state),
          grad_u(memory, kSegment + 1, channels),
          grad_y(memory, kSegment, channels) {}

    // What follows from d, w, c, r and the vectors.
    void prepare() {
        if (!carries) forget_token_before();
        if (reflects) sum_each(steps, kB, [&](int64_t t) { return products(k[t], B[t], state); });
        sum_each(steps, CB, [&](int64_t t) { return products(C[t], B[t + 1], state); });
        for (int64_t t = 0; t < steps; ++t) {
            s[t] = d[t] * written_before(t);
            e[t] = t && reflects ? w[t - 1] * kB[t] : T(0);
            f[t] = w[t] * CB[t];
            for (int64_t i = 0; i < state; i += kLanes<T>) {
                vec(sB[t] + i) = s[t] * vec(B[t] + i);
                vec(rk[t] + i) = r[t] * vec(k[t] + i);
            }
        }
    }

    void clear_gradients() {
        std::fill_n(grad_k.data, kSegment * state, T(0));
        std::fill_n(grad_B.data, (kSegment + 1) * state, T(0));
        std::fill_n(grad_C.data, kSegment * state, T(0));
        std::fill_n(grad_u.data, (kSegment + 1) * channels, T(0));
        for (T* x : {grad_d, grad_w, grad_c, grad_r, grad_s, grad_e, grad_f}) std::fill_n(x, kSegment + 1, T(0));
        grad_D = 0;
    }

    // From the gradients of s, e, f to those of d, w, c and the vectors.
    void prepare_back() {
        for (int64_t t = 0; t < steps; ++t) {
            const T to_s = grad_s[t] * d[t];
            grad_d[t] += grad_s[t] * written_before(t);
            if (carries) grad_c[t] += to_s;
            if (t) grad_w[t - 1] += to_s;
            grad_w[t] += grad_f[t] * CB[t];
            const T to_f = grad_f[t] * w[t];
            for (int64_t i = 0; i < state; i += kLanes<T>) {
                vec(grad_C[t] + i) += to_f * vec(B[t + 1] + i);
                vec(grad_B[t + 1] + i) += to_f * vec(C[t] + i);
            }
            if (!t || !reflects) continue;
            grad_w[t - 1] += grad_e[t] * kB[t];
            const T to_e = grad_e[t] * w[t - 1];
            for (int64_t i = 0; i < state; i += kLanes<T>) {
                vec(grad_k[t] + i) += to_e * vec(B[t] + i);
                vec(grad_B[t] + i) += to_e * vec(k[t] + i);
            }
        }
    }

    // The weight, before the decay, with which step t writes the token before it: the write that waited, and the carry.
    T written_before(int64_t t) const { return (t ? w[t - 1] : T(0)) + (carries ? c[t] : T(0)); }

    // Without a carry the first step has nothing to write, whatever stands there.
    void forget_token_before() {
        std::fill_n(B[0], int64_t(state), T(0));
        std::fill_n(u[0], int64_t(channels), T(0));
    }

    int64_t state, channels;
    int64_t steps = 0;
    bool reflects = false, carries = false;
    T D = 0, grad_D = 0;
    Rows<T> k, B, C, rk, sB, u, y, q;
    Rows<T> grad_k, grad_B, grad_C, grad_u, grad_y;
    alignas(64) T d[kSegment + 1] = {}, w[kSegment + 1] = {}, c[kSegment + 1] = {}, r[kSegment + 1] = {};
    alignas(64) T kB[kSegment] = {}, CB[kSegment] = {};
    T s[kSegment + 1], e[kSegment + 1], f[kSegment + 1];
    alignas(64) T grad_d[kSegment + 1], grad_w[kSegment + 1], grad_c[kSegment + 1], grad_r[kSegment + 1];
    T grad_s[kSegment + 1], grad_e[kSegment + 1], grad_f[kSegment + 1];
};

// Runs a segment on W vectors of channels at a time (a panel); a state is stored panel by panel, (panels, state, W).
template <typename T, int W, bool Reflects>
class Core {
    using V = Vector<T>;
    static constexpr int64_t L = kLanes<T>, width = W * L;

  public:
    explicit Core(Segment<T>& segment) : s(segment) {}

    // From h before the segment to h after it. If `states` is given, h stays, and `states` receives G before each step
    // and after the last.
    void forward(T* h, T* states) {
        for (int64_t first = 0; first < s.channels; first += width, h += panel_size()) {
            forward_panel(h, first, states);
            if (states)
                states += (kSegment + 1) * panel_size();
            else
                add_last_write(h, first);
        }
    }

    // grad: of h after the segment on entry, of h before it on return. Adds to the gradients in the segment.
    void backward(const T* states, T* grad) {
        for (int64_t first = 0; first < s.channels; first += width, grad += panel_size()) {
            add_last_write_back(grad, first);
            backward_panel(states, first, grad);
            states += (kSegment + 1) * panel_size();
        }
    }

  private:
    int64_t n() const { return s.state; }
    int64_t panel_size() const { return n() * width; }

    struct Panel {
        V of[W];
        Panel() : of{} {}
        explicit Panel(const T* from) {
            for (int w = 0; w < W; ++w) of[w] = vec(from + w * L);
        }
        void store(T* to) const {
            for (int w = 0; w < W; ++w) vec(to + w * L) = of[w];
        }
    };

    void add_last_write(T* h, int64_t first) {
        const Panel u(s.u[s.steps] + first);
        const T *B = s.B[s.steps], write = s.w[s.steps - 1];
        for (int64_t i = 0; i < n(); ++i)
            for (int w = 0; w < W; ++w) vec(h + i * width + w * L) += (write * B[i]) * u.of[w];
    }

    void add_last_write_back(const T* grad, int64_t first) {
        const Panel u(s.u[s.steps] + first);
        const T *B = s.B[s.steps], write = s.w[s.steps - 1];
        Panel to_u;
        V to_write{};
        for (int64_t block = 0; block < n(); block += L) {
            const auto sums = sum_rows<T, 1, L>(block, [&](int64_t i) FORCE_INLINE {
                Sums<T, 1> row{};
                for (int w = 0; w < W; ++w) {
                    const V g = vec(grad + i * width + w * L);
                    row.of[0] += g * u.of[w];
                    to_u.of[w] += B[i] * g;
                }
                return row;
            });
            vec(s.grad_B[s.steps] + block) += write * sums.of[0];
            to_write += vec(B + block) * sums.of[0];
        }
        s.grad_w[s.steps - 1] += sum_lanes<T>(to_write);
        for (int w = 0; w < W; ++w) vec(s.grad_u[s.steps] + first + w * L) += write * to_u.of[w];
    }

    Panel project(const T* k, const T* h) const {
        Panel even, odd;
        for (int64_t i = 0; i < n(); i += 2)
            for (int w = 0; w < W; ++w) {
                even.of[w] += k[i] * vec(h + i * width + w * L);
                odd.of[w] += k[i + 1] * vec(h + (i + 1) * width + w * L);
            }
        for (int w = 0; w < W; ++w) even.of[w] += odd.of[w];
        return even;
    }

    void forward_panel(T* h, int64_t first, T* states) {
        Panel q = Reflects ? project(s.k[0], h) : Panel();
        if (states) std::copy_n(h, panel_size(), states);
        for (int64_t t = 0; t < s.steps; ++t) {
            if (Reflects && states) q.store(s.q[t] + first);
            if (states)
                q = step(t, first, q, states + t * panel_size(), states + (t + 1) * panel_size());
            else
                q = step(t, first, q, h, h);
        }
    }

    // One step; returns the q of the next one.
    Panel step(int64_t t, int64_t first, const Panel& q, const T* before, T* after) {
        const T d = s.d[t], *sB = s.sB[t], *rk = s.rk[t], *C = s.C[t], *k = s.k[t + 1];
        const Panel u(s.u[t + 1] + first), up(s.u[t] + first);
        Panel y, next;
        for (int64_t i = 0; i < n(); ++i)
            for (int w = 0; w < W; ++w) {
                const int64_t at = i * width + w * L;
                V g = d * vec(before + at) + sB[i] * up.of[w];
                if (Reflects) g -= rk[i] * q.of[w];
                vec(after + at) = g;
                y.of[w] += C[i] * g;
                if (Reflects) next.of[w] += k[i] * g;
            }
        const T skip = s.D + s.f[t], e = t + 1 < s.steps ? s.e[t + 1] : T(0);
        Panel result;
        for (int w = 0; w < W; ++w) {
            vec(s.y[t] + first + w * L) = y.of[w] + skip * u.of[w];
            result.of[w] = next.of[w] + e * u.of[w];
        }
        return result;
    }

    void backward_panel(const T* states, int64_t first, T* grad) {
        alignas(64) T parts[4][kSegment * kLanes<T>] = {};
        for (int64_t t = s.steps - 1; t >= 0; --t)
            step_back(t, first, states + t * panel_size(), states + (t + 1) * panel_size(), grad, parts);
        for (int64_t block = 0; block < s.steps; block += L) {
            const auto sums = sum_rows<T, 4, L>(block, [&](int64_t t) FORCE_INLINE {
                Sums<T, 4> row;
                for (int i = 0; i < 4; ++i) row.of[i] = t < kSegment ? vec(parts[i] + t * L) : V{};
                return row;
            });
            for (int64_t l = 0; l < L && block + l < s.steps; ++l) {
                const int64_t t = block + l;
                s.grad_d[t] += sums.of[0][l];
                s.grad_r[t] -= sums.of[1][l];
                s.grad_e[t] -= s.r[t] * sums.of[2][l];
                s.grad_f[t] += sums.of[3][l];
                s.grad_D += sums.of[3][l];
            }
        }
    }

    // parts: for each step, vectors whose lanes are still to be added up: g.G, (g'k).q, (g'k).u_{t-1} and u.dy.
    void step_back(int64_t t, int64_t first, const T* before, const T* after, T* grad,
                   T (&parts)[4][kSegment * kLanes<T>]) {
        const T *k = s.k[t], *B = s.B[t], *C = s.C[t];
        const Panel up(s.u[t] + first), dy(s.grad_y[t] + first);
        Panel along_k, to_up, with_h;
        V to_s{};
        for (int64_t block = 0; block < n(); block += L) {
            const auto sums = sum_rows<T, 2, L>(block, [&](int64_t i) FORCE_INLINE {
                Sums<T, 2> row{};
                for (int w = 0; w < W; ++w) {
                    const int64_t at = i * width + w * L;
                    const V g = vec(grad + at) + C[i] * dy.of[w];
                    vec(grad + at) = g;
                    row.of[0] += vec(after + at) * dy.of[w];
                    row.of[1] += g * up.of[w];
                    to_up.of[w] += B[i] * g;
                    with_h.of[w] += vec(before + at) * g;
                    if (Reflects) along_k.of[w] += k[i] * g;
                }
                return row;
            });
            vec(s.grad_C[t] + block) += sums.of[0];
            vec(s.grad_B[t] + block) += s.s[t] * sums.of[1];
            to_s += vec(B + block) * sums.of[1];
        }
        s.grad_s[t] += sum_lanes<T>(to_s);
        const T skip = s.D + s.f[t];
        for (int w = 0; w < W; ++w) {
            vec(parts[0] + t * L) += with_h.of[w];
            vec(parts[3] + t * L) += vec(s.u[t + 1] + first + w * L) * dy.of[w];
            vec(s.grad_u[t + 1] + first + w * L) += skip * dy.of[w];
            vec(s.grad_u[t] + first + w * L) += s.s[t] * to_up.of[w];
        }
        Reflects ? reflect_back(t, first, along_k, before, grad, parts) : decay_back(t, grad);
    }

    void decay_back(int64_t t, T* grad) {
        for (int64_t i = 0; i < panel_size(); i += L) vec(grad + i) *= s.d[t];
    }

    // The part of step_back that belongs to the reflection; along_k is grad' k.
    void reflect_back(int64_t t, int64_t first, const Panel& along_k, const T* before, T* grad,
                      T (&parts)[4][kSegment * kLanes<T>]) {
        const Panel q(s.q[t] + first), up(s.u[t] + first);
        const T d = s.d[t], r = s.r[t], *rk = s.rk[t];
        for (int64_t block = 0; block < n(); block += L) {
            const auto sums = sum_rows<T, 1, L>(block, [&](int64_t i) FORCE_INLINE {
                Sums<T, 1> row{};
                for (int w = 0; w < W; ++w) {
                    const int64_t at = i * width + w * L;
                    const V g = vec(grad + at);
                    row.of[0] += g * q.of[w] + vec(before + at) * along_k.of[w];
                    vec(grad + at) = d * g - rk[i] * along_k.of[w];
                }
                return row;
            });
            vec(s.grad_k[t] + block) -= r * sums.of[0];
        }
        const T er = s.e[t] * r;
        for (int w = 0; w < W; ++w) {
            vec(parts[1] + t * L) += along_k.of[w] * q.of[w];
            vec(parts[2] + t * L) += along_k.of[w] * up.of[w];
            vec(s.grad_u[t] + first + w * L) -= er * along_k.of[w];
        }
    }

    Segment<T>& s;
};

// Calls `call(core)` with the fastest Core for the segment.
template <typename T, typename Call>
void with_core(Segment<T>& s, const Call& call) {
    const auto by_width = [&](auto reflects) {
        constexpr bool kReflects = decltype(reflects)::value;
        s.channels % (2 * kLanes<T>) == 0 ? call(Core<T, 2, kReflects>(s)) : call(Core<T, 1, kReflects>(s));
    };
    s.reflects ? by_width(std::true_type()) : by_width(std::false_type());
}

template <typename T>
int64_t panel_width(int64_t channels) {
    return channels % (2 * kLanes<T>) == 0 ? 2 * kLanes<T> : kLanes<T>;
}

// Between a state (n, p) in memory and one in panels.
template <typename T>
void load_state(const T* from, int64_t n, int64_t p, const Segment<T>& s, T* to) {
    const int64_t width = panel_width<T>(s.channels);
    std::fill_n(to, s.state * s.channels, T(0));
    for (int64_t first = 0; first < p; first += width, to += s.state * width)
        for (int64_t i = 0; i < n; ++i) load(from + i * p + first, std::min(width, p - first), to + i * width);
}
template <typename T>
void store_state(const T* from, int64_t n, int64_t p, const Segment<T>& s, T* to) {
    const int64_t width = panel_width<T>(s.channels);
    for (int64_t first = 0; first < p; first += width, from += s.state * width)
        for (int64_t i = 0; i < n; ++i) store(from + i * width, std::min(width, p - first), to + i * p + first);
}

}  // namespace
