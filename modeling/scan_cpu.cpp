// The scan on a processor: the recurrence of scan_definition.py and its gradient, one (row, head) pair at a time.
//
//     h_t = d_t (h_{t-1} + c_t B_{t-1} u_{t-1}') - r_t k_t q_t' + w_t B_t u_t',   q_t = h_{t-1}' k_t,   y_t = C_t' h_t
//
// The forward pass keeps h every `kSegment` steps; the backward pass runs each segment again from there and keeps its
// states only while it needs them. Pairs are independent and each is computed by one thread, so that no result depends
// on the number of threads.

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

namespace {

constexpr int64_t kSegment = 16;

}  // namespace

// Tensors are contiguous. Those of tokens are (rows, length, heads, ...), those of states (rows, heads, ...). A null
// `carry` or `k` leaves out that term. Gradients are written, not added.
template <typename T>
struct Scan {
    int64_t rows, length, heads, state, channels, threads;
    const T *u, *B, *C, *log_decay, *write, *carry, *k, *reflection;
    const T *h0, *B0, *u0;
    T *y, *h, *kept;  // kept: (rows, heads, segments, state, channels)
    const T *grad_y, *grad_h;
    T *grad_u, *grad_B, *grad_C, *grad_log_decay, *grad_write, *grad_carry, *grad_k, *grad_reflection;
    T *grad_h0, *grad_B0, *grad_u0;
};

namespace {

// Sizes known at compile time where they are common, so that loops unroll and sums stay in registers; 0 is any size.
template <typename T, int N, int P>
class Pair {
    using Row = std::conditional_t<P != 0, std::array<T, P ? P : 1>, std::vector<T>>;

  public:
    Pair(const Scan<T>& scan, int64_t index)
        : s(scan), row(index / scan.heads), head(index % scan.heads), size(states() * channels()) {}

    void forward() {
        std::vector<T> h(s.h0 + pair() * size, s.h0 + (pair() + 1) * size);
        for (int64_t t = 0; t < s.length; ++t) {
            if (t % kSegment == 0) std::copy(h.begin(), h.end(), s.kept + kept_at(t));
            step(t, h.data(), h.data());
            read(t, h.data());
        }
        std::copy(h.begin(), h.end(), s.h + pair() * size);
    }

    void backward() {
        const int64_t n = states(), p = channels();
        std::vector<T> kept((kSegment + 1) * size), grad(s.grad_h + pair() * size, s.grad_h + (pair() + 1) * size);
        std::vector<T> carried_B(n, T(0)), carried_u(p, T(0));
        for (int64_t end = s.length; end > 0;) {
            const int64_t start = (end - 1) / kSegment * kSegment;
            std::copy_n(s.kept + kept_at(start), size, kept.begin());
            for (int64_t t = start; t < end; ++t) step(t, &kept[(t - start) * size], &kept[(t - start + 1) * size]);
            for (int64_t t = end - 1; t >= start; --t)
                step_back(t, &kept[(t - start) * size], &kept[(t - start + 1) * size], grad.data(), carried_B.data(),
                          carried_u.data());
            end = start;
        }
        std::copy(grad.begin(), grad.end(), s.grad_h0 + pair() * size);
        std::copy(carried_B.begin(), carried_B.end(), s.grad_B0 + pair() * n);
        std::copy(carried_u.begin(), carried_u.end(), s.grad_u0 + pair() * p);
    }

  private:
    int64_t states() const { return N ? N : s.state; }
    int64_t channels() const { return P ? P : s.channels; }
    int64_t pair() const { return row * s.heads + head; }
    int64_t token(int64_t t) const { return (row * s.length + t) * s.heads + head; }
    int64_t kept_at(int64_t t) const {
        const int64_t segments = (s.length + kSegment - 1) / kSegment;
        return (pair() * segments + t / kSegment) * size;
    }
    const T* previous_B(int64_t t) const { return t ? s.B + token(t - 1) * states() : s.B0 + pair() * states(); }
    const T* previous_u(int64_t t) const { return t ? s.u + token(t - 1) * channels() : s.u0 + pair() * channels(); }

    Row zeros() const {
        Row values;
        if constexpr (P == 0)
            values.assign(channels(), T(0));
        else
            values.fill(T(0));
        return values;
    }

    // The rows of h weighted by a direction: h' direction.
    Row project(const T* direction, const T* h) const {
        const int64_t n = states(), p = channels();
        Row sum = zeros();
        for (int64_t i = 0; i < n; ++i)
#pragma omp simd
            for (int64_t j = 0; j < p; ++j) sum[j] += direction[i] * h[i * p + j];
        return sum;
    }

    // From h before step t to h after it; the two may be the same place.
    void step(int64_t t, const T* before, T* after) const {
        const int64_t n = states(), p = channels(), at = token(t);
        const T d = std::exp(s.log_decay[at]), w = s.write[at];
        const T r = s.k ? s.reflection[at] : T(0), c = s.carry ? d * s.carry[at] : T(0);
        const T *B = s.B + at * n, *u = s.u + at * p, *k = s.k ? s.k + at * n : nullptr;
        const T *Bp = previous_B(t), *up = previous_u(t);
        const Row q = k ? project(k, before) : zeros();
        for (int64_t i = 0; i < n; ++i) {
            const T *in = before + i * p;
            T* out = after + i * p;
            const T wB = w * B[i], cB = c * Bp[i], rk = k ? r * k[i] : T(0);
#pragma omp simd
            for (int64_t j = 0; j < p; ++j) out[j] = d * in[j] + wB * u[j] + cB * up[j] - rk * q[j];
        }
    }

    void read(int64_t t, const T* h) const {
        const Row y = project(s.C + token(t) * states(), h);
        std::copy(y.begin(), y.end(), s.y + token(t) * channels());
    }

    // grad: of h after step t on entry, of h before it on return. carried_B and carried_u: what step t + 1 owes to B_t
    // and u_t on entry, what step t owes to those before it on return.
    void step_back(int64_t t, const T* before, const T* after, T* grad, T* carried_B, T* carried_u) const {
        const int64_t n = states(), p = channels(), at = token(t);
        const T d = std::exp(s.log_decay[at]), w = s.write[at], c = s.carry ? s.carry[at] : T(0);
        const T *B = s.B + at * n, *C = s.C + at * n, *u = s.u + at * p, *dy = s.grad_y + at * p;
        const T *k = s.k ? s.k + at * n : nullptr, *Bp = previous_B(t), *up = previous_u(t);
        T *dB = s.grad_B + at * n, *dC = s.grad_C + at * n;
        Row to_u = zeros(), to_previous_u = zeros(), along_k = zeros();
        T dw = 0, dc = 0, dd = 0;
        for (int64_t i = 0; i < n; ++i) {
            T* g = grad + i * p;
            const T *hb = before + i * p, *ha = after + i * p;
            const T Ci = C[i], wB = w * B[i], cB = d * c * Bp[i], ki = k ? k[i] : T(0);
            T to_C = 0, with_u = 0, with_up = 0, with_h = 0;
#pragma omp simd reduction(+ : to_C, with_u, with_up, with_h)
            for (int64_t j = 0; j < p; ++j) {
                const T gj = g[j] + Ci * dy[j];
                g[j] = gj;
                to_C += ha[j] * dy[j];
                with_u += gj * u[j];
                with_up += gj * up[j];
                with_h += gj * hb[j];
                to_u[j] += wB * gj;
                to_previous_u[j] += cB * gj;
                along_k[j] += ki * gj;
            }
            dC[i] = to_C;
            dB[i] = carried_B[i] + w * with_u;
            carried_B[i] = d * c * with_up;
            dw += B[i] * with_u;
            dc += Bp[i] * with_up;
            dd += with_h;
        }
        T* du = s.grad_u + at * p;
        for (int64_t j = 0; j < p; ++j) du[j] = carried_u[j] + to_u[j];
        std::copy(to_previous_u.begin(), to_previous_u.end(), carried_u);
        s.grad_write[at] = dw;
        if (s.carry) s.grad_carry[at] = d * dc;
        s.grad_log_decay[at] = d * (dd + c * dc);
        k ? reflect_back(at, d, along_k, before, grad) : decay_back(d, grad);
    }

    void decay_back(T d, T* grad) const {
        for (int64_t i = 0; i < size; ++i) grad[i] *= d;
    }

    // The part of step_back that belongs to the reflection; along_k is grad' k.
    void reflect_back(int64_t at, T d, const Row& along_k, const T* before, T* grad) const {
        const int64_t n = states(), p = channels();
        const T r = s.reflection[at], *k = s.k + at * n;
        const Row q = project(k, before);
        T dr = 0;
        for (int64_t j = 0; j < p; ++j) dr -= along_k[j] * q[j];
        s.grad_reflection[at] = dr;
        T* dk = s.grad_k + at * n;
        for (int64_t i = 0; i < n; ++i) {
            T* g = grad + i * p;
            const T *hb = before + i * p, rk = r * k[i];
            T sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t j = 0; j < p; ++j) {
                sum += g[j] * q[j] + hb[j] * along_k[j];
                g[j] = d * g[j] - rk * along_k[j];
            }
            dk[i] = -r * sum;
        }
    }

    const Scan<T>& s;
    const int64_t row, head, size;
};

template <typename T, int N, int P>
void run_pair(const Scan<T>& scan, int64_t index, bool forward) {
    Pair<T, N, P> pair(scan, index);
    forward ? pair.forward() : pair.backward();
}

template <typename T>
using Runner = void (*)(const Scan<T>&, int64_t, bool);

template <typename T>
Runner<T> choose(const Scan<T>& scan) {
    const auto is = [&](int64_t n, int64_t p) { return scan.state == n && scan.channels == p; };
    if (is(16, 16)) return run_pair<T, 16, 16>;
    if (is(32, 32)) return run_pair<T, 32, 32>;
    if (is(32, 64)) return run_pair<T, 32, 64>;
    if (is(64, 64)) return run_pair<T, 64, 64>;
    if (is(128, 64)) return run_pair<T, 128, 64>;
    if (is(128, 128)) return run_pair<T, 128, 128>;
    return run_pair<T, 0, 0>;
}

// To start a thread takes as long as some 10^5 multiplications.
template <typename T>
int64_t useful_threads(const Scan<T>& scan) {
    const int64_t pairs = scan.rows * scan.heads, work = pairs * scan.length * scan.state * scan.channels;
    return std::min({scan.threads, pairs, 1 + work / (1 << 17)});
}

template <typename T>
void run(const Scan<T>& scan, bool forward) {
    const int64_t pairs = scan.rows * scan.heads;
    const Runner<T> one = choose(scan);
    std::atomic<int64_t> next{0};
    const auto work = [&] {
        for (int64_t index; (index = next.fetch_add(1)) < pairs;) one(scan, index, forward);
    };
    std::vector<std::thread> others;
    for (int64_t i = 1; i < useful_threads(scan); ++i) {
        try {
            others.emplace_back(work);
        } catch (const std::system_error&) {
            break;  // the system gives no more threads; those there are do the work
        }
    }
    work();
    for (auto& thread : others) thread.join();
}

}  // namespace

extern "C" {
void scan_forward_float(const Scan<float>* scan) { run(*scan, true); }
void scan_forward_double(const Scan<double>* scan) { run(*scan, true); }
void scan_backward_float(const Scan<float>* scan) { run(*scan, false); }
void scan_backward_double(const Scan<double>* scan) { run(*scan, false); }
int64_t scan_segment() { return kSegment; }
}
