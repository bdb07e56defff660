// The scan over given coefficients.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "memory.h"
#include "segment.h"
#include "work.h"

// Tensors are contiguous. Those of tokens are (tokens, heads, ...), those of states (rows, heads, ...), `kept` is
// (slots, heads, state, channels). S is the type of u, B, C, k and y, T that of all else. A null `carry`, `k` or `D`
// leaves out that term. Gradients are written, not added; grad_D is (rows, heads).
template <typename S, typename T>
struct Scan {
    Layout layout;
    int64_t heads, state, channels, threads;
    const S *u, *B, *C;
    const T *log_decay, *write, *carry;
    const S* k;
    const T *reflection, *D, *h0, *B0, *u0;
    S* y;
    T *h, *kept;
    const S* grad_y;
    const T* grad_h;
    S *grad_u, *grad_B, *grad_C;
    T *grad_log_decay, *grad_write, *grad_carry;
    S* grad_k;
    T *grad_reflection, *grad_D, *grad_h0, *grad_B0, *grad_u0;
};

namespace {

// Works on one row and head after another.
template <typename S, typename T>
class GeneralWorker {
  public:
    explicit GeneralWorker(const Scan<S, T>& scan)
        : a(scan), n(scan.state), p(scan.channels), s(memory, n, p), h(memory.take(s.state * s.channels)) {
        s.reflects = a.k;
        s.carries = a.carry;
    }

    void forward(int64_t index) {
        begin(index);
        load_state(a.h0 + pair * n * p, n, p, s, h);
        for (int64_t start = 0; start < length; start += kSegment) {
            store_state(h, n, p, s, a.kept + kept_at(start));
            fill(start);
            with_core(s, [&](auto core) { core.forward(h, nullptr); });
            for (int64_t t = 0; t < s.steps; ++t) store(s.y[t], p, a.y + at(start + t) * p);
        }
        store_state(h, n, p, s, a.h + pair * n * p);
    }

    void backward(int64_t index) {
        begin(index);
        if (!states) make_backward_buffers();
        load_state(a.grad_h + pair * n * p, n, p, s, grad_h);
        std::fill_n(to_B, s.state, T(0));
        std::fill_n(to_u, s.channels, T(0));
        T grad_D = 0;
        for (int64_t start = (length - 1) / kSegment * kSegment; length && start >= 0; start -= kSegment) {
            load_state(a.kept + kept_at(start), n, p, s, h);
            fill(start);
            s.clear_gradients();
            std::copy_n(to_B, s.state, s.grad_B[s.steps]);
            std::copy_n(to_u, s.channels, s.grad_u[s.steps]);
            for (int64_t t = 0; t < s.steps; ++t) load(a.grad_y + at(start + t) * p, p, s.grad_y[t]);
            with_core(s, [&](auto core) {
                core.forward(h, states);
                core.backward(states, grad_h);
            });
            s.prepare_back();
            write_gradients(start);
            std::copy_n(s.grad_B[0], s.state, to_B);
            std::copy_n(s.grad_u[0], s.channels, to_u);
            grad_D += s.grad_D;
        }
        store_state(grad_h, n, p, s, a.grad_h0 + pair * n * p);
        store(to_B, n, a.grad_B0 + pair * n);
        store(to_u, p, a.grad_u0 + pair * p);
        if (a.D) a.grad_D[pair] = grad_D;
    }

  private:
    void begin(int64_t index) {
        pair = index;
        row = index / a.heads;
        head = index % a.heads;
        length = a.layout.length(row);
        s.D = a.D ? a.D[head] : T(0);
    }
    void make_backward_buffers() {
        states = memory.take((kSegment + 1) * s.state * s.channels);
        grad_h = memory.take(s.state * s.channels);
        to_B = memory.take(s.state);
        to_u = memory.take(s.channels);
    }

    int64_t at(int64_t t) const { return a.layout.token(row, t) * a.heads + head; }
    int64_t kept_at(int64_t t) const { return (a.layout.slot(row, t) * a.heads + head) * n * p; }

    void fill(int64_t start) {
        s.steps = std::min(kSegment, length - start);
        start ? load(a.B + at(start - 1) * n, n, s.B[0]) : load(a.B0 + pair * n, n, s.B[0]);
        start ? load(a.u + at(start - 1) * p, p, s.u[0]) : load(a.u0 + pair * p, p, s.u[0]);
        for (int64_t t = 0; t < s.steps; ++t) {
            const int64_t i = at(start + t);
            load(a.B + i * n, n, s.B[t + 1]);
            load(a.u + i * p, p, s.u[t + 1]);
            load(a.C + i * n, n, s.C[t]);
            s.d[t] = std::exp(a.log_decay[i]);
            s.w[t] = a.write[i];
            if (a.carry) s.c[t] = a.carry[i];
            if (a.k) load(a.k + i * n, n, s.k[t]);
            if (a.k) s.r[t] = a.reflection[i];
        }
        s.prepare();
    }

    void write_gradients(int64_t start) {
        for (int64_t t = 0; t < s.steps; ++t) {
            const int64_t i = at(start + t);
            store(s.grad_B[t + 1], n, a.grad_B + i * n);
            store(s.grad_u[t + 1], p, a.grad_u + i * p);
            store(s.grad_C[t], n, a.grad_C + i * n);
            a.grad_log_decay[i] = s.d[t] * s.grad_d[t];
            a.grad_write[i] = s.grad_w[t];
            if (a.carry) a.grad_carry[i] = s.grad_c[t];
            if (a.k) store(s.grad_k[t], n, a.grad_k + i * n);
            if (a.k) a.grad_reflection[i] = s.grad_r[t];
        }
    }

    const Scan<S, T>& a;
    const int64_t n, p;
    Buffers<T> memory;
    Segment<T> s;
    int64_t pair = 0, row = 0, head = 0, length = 0;
    T *h, *states = nullptr, *grad_h = nullptr, *to_B = nullptr, *to_u = nullptr;  // to_: what later steps owe to it
};

template <typename S, typename T>
void run(const Scan<S, T>& scan, bool forward) {
    const int64_t work = tokens_in(scan.layout) * scan.heads * scan.state * scan.channels;
    in_parallel(scan.layout.rows * scan.heads, scan.threads, work, [&] {
        return [worker = GeneralWorker<S, T>(scan), forward](int64_t i) mutable {
            forward ? worker.forward(i) : worker.backward(i);
        };
    });
}

}  // namespace
