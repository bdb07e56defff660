// The scan on a processor, and the whole mixer around it, each with its gradient.
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
// `Segment` holds these coefficients for one head, `Core` runs the equations and their gradient on it. A level fills
// segments and takes their results: `GeneralWorker` from given coefficients, `MixerWorker` from the projections of the
// block's input. A unit of work (a row and some heads of it) is computed by one thread in one order, and sums over
// units are taken in the order of the units: no result depends on the number of threads.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <new>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

constexpr int64_t kSegment = 16;

// Small pieces whose arguments are vectors: called and not inlined, each would pass them through memory.
#ifndef FORCE_INLINE
#define FORCE_INLINE __attribute__((always_inline))
#endif

#ifndef VECTOR_BYTES
#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#endif

template <typename T>
struct VectorOf;
template <>
struct VectorOf<float> {
    typedef float Type __attribute__((vector_size(VECTOR_BYTES)));
    typedef int32_t Integer __attribute__((vector_size(VECTOR_BYTES)));
};
template <>
struct VectorOf<double> {
    typedef double Type __attribute__((vector_size(VECTOR_BYTES)));
};

template <typename T>
using Vector = typename VectorOf<T>::Type;
template <typename T>
constexpr int64_t kLanes = VECTOR_BYTES / sizeof(T);

template <typename T>
int64_t padded(int64_t size) {
    return (size + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}

template <typename T>
Vector<T>& vec(T* at) {
    return *reinterpret_cast<Vector<T>*>(at);
}
template <typename T>
const Vector<T>& vec(const T* at) {
    return *reinterpret_cast<const Vector<T>*>(at);
}
template <typename T>
Vector<T> all(T x) {
    return x - Vector<T>{};
}

// Lane l of the result adds a pair of lanes, of a where bit D of l is 0 and of b where it is 1.
template <int D, typename V, size_t... l>
V fold(V a, V b, std::index_sequence<l...>) {
    constexpr size_t L = sizeof...(l);
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, (l & D ? L + (l & ~size_t(D)) : l)...) +
           __builtin_shufflevector(a, b, (l & D ? L + l : l | D)...);
#else
    V result;
    ((result[l] = l & D ? b[l & ~size_t(D)] + b[l] : a[l] + a[l | D]), ...);
    return result;
#endif
}

// Lane l of the result is lane l ^ D.
template <int D, typename V, size_t... l>
V exchange(V a, std::index_sequence<l...>) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, a, (l ^ D)...);
#else
    return V{a[l ^ D]...};
#endif
}

template <typename T>
using Lanes = std::make_index_sequence<kLanes<T>>;

template <typename T>
Vector<T> swap_pairs(Vector<T> a) {
    return exchange<1>(a, Lanes<T>());
}

template <typename T, int D = kLanes<T> / 2>
T sum_lanes(Vector<T> x) {
    if constexpr (D == 0)
        return x[0];
    else
        return sum_lanes<T, D / 2>(x + exchange<D>(x, Lanes<T>()));
}

// R sums over lanes at once, taken for as many rows as there are lanes: lane l of sums[i] belongs to row l.
template <typename T, int R>
struct Sums {
    Vector<T> of[R];
};

template <typename T, int R, int Count, typename Row>
FORCE_INLINE inline Sums<T, R> sum_rows(int64_t first, const Row& row) {
    if constexpr (Count == 1) {
        return row(first);
    } else {
        const Sums<T, R> a = sum_rows<T, R, Count / 2>(first, row);
        const Sums<T, R> b = sum_rows<T, R, Count / 2>(first + Count / 2, row);
        Sums<T, R> result;
        for (int i = 0; i < R; ++i) result.of[i] = fold<Count / 2>(a.of[i], b.of[i], Lanes<T>());
        return result;
    }
}

// The sum over the lanes of row(t) for each t below count, of which there is room for kSegment in `to`.
template <typename T, typename Row>
FORCE_INLINE inline void sum_steps(int64_t count, T* to, const Row& row) {
    for (int64_t block = 0; block < count; block += kLanes<T>)
        vec(to + block) = sum_rows<T, 1, kLanes<T>>(block, [&](int64_t t) FORCE_INLINE {
                              return t < count ? Sums<T, 1>{{row(t)}} : Sums<T, 1>{};
                          }).of[0];
}

// Elementary functions: in float by polynomials to a unit or two in the last place, in double lane by lane. What is not
// a number stays so.

template <typename F>
Vector<double> each_lane(Vector<double> x, F f) {
    for (int64_t l = 0; l < kLanes<double>; ++l) x[l] = f(x[l]);
    return x;
}

FORCE_INLINE inline Vector<float> nearest(Vector<float> x) { return (x + 12582912.0f) - 12582912.0f; }  // 1.5 * 2^23

template <typename V>
V horner(V, float c) {
    return c - V{};
}
template <typename V, typename... Rest>
V horner(V x, float c, Rest... rest) {
    return horner(x, rest...) * x + c;
}

FORCE_INLINE inline Vector<float> exponential(Vector<float> x) {
    using I = VectorOf<float>::Integer;
    x = x < -87.3f ? all(-87.3f) : x;
    x = x > 88.3f ? all(88.3f) : x;
    const Vector<float> n = nearest(x * 1.44269504f);
    const Vector<float> r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    const Vector<float> p = horner(r, 1.0f, 1.0f, 0.5f, 1.6666667e-1f, 4.1666646e-2f, 8.3333310e-3f, 1.3901937e-3f,
                                   1.9841270e-4f);
    const I scale = (__builtin_convertvector(n, I) + 127) << 23;
    return p * (Vector<float>)scale;
}
inline Vector<double> exponential(Vector<double> x) {
    return each_lane(x, [](double v) { return std::exp(v); });
}

// log(1 + y) for y between 0 and 1, by the series of 2 artanh(y / (2 + y)).
FORCE_INLINE inline Vector<float> log_one_plus(Vector<float> y) {
    const Vector<float> s = y / (y + 2.0f);
    return 2.0f * s *
           horner(s * s, 1.0f, 1.0f / 3, 1.0f / 5, 1.0f / 7, 1.0f / 9, 1.0f / 11, 1.0f / 13, 1.0f / 15, 1.0f / 17);
}
inline Vector<double> log_one_plus(Vector<double> y) {
    return each_lane(y, [](double v) { return std::log1p(v); });
}

// Tangent hyperbolic; small arguments keep their relative precision, since phases add it up over a sequence.
FORCE_INLINE inline Vector<float> hyperbolic_tangent(Vector<float> x) {
    const Vector<float> size = x < 0.0f ? -x : x, e = exponential(-2.0f * size), square = x * x;
    const Vector<float> small =
        x + x * square * horner(square, -3.33332819422e-1f, 1.33314422036e-1f, -5.37397155531e-2f, 2.06390887954e-2f,
                                -5.70498872745e-3f);
    const Vector<float> large = (1.0f - e) / (1.0f + e);
    return size < 0.625f ? small : (x < 0.0f ? -large : large);
}
inline Vector<double> hyperbolic_tangent(Vector<double> x) {
    return each_lane(x, [](double v) { return std::tanh(v); });
}

// Sine and cosine of an angle between -pi and pi.
FORCE_INLINE inline void sine_cosine(Vector<float> x, Vector<float>& sine, Vector<float>& cosine) {
    using I = VectorOf<float>::Integer;
    const Vector<float> n = nearest(x * 0.636619772f);
    const Vector<float> r = ((x - n * 1.5703125f) - n * 4.83751297e-4f) - n * 7.54978995e-8f, z = r * r;
    const Vector<float> s = r + r * z * horner(z, -1.6666654611e-1f, 8.3321608736e-3f, -1.9515295891e-4f);
    const Vector<float> c =
        1.0f - 0.5f * z + z * z * horner(z, 4.166664568298827e-2f, -1.388731625493765e-3f, 2.443315711809948e-5f);
    const I quadrant = __builtin_convertvector(n, I) & 3;
    const I odd = (quadrant & 1) != 0, sine_minus = quadrant >= 2, cosine_minus = (quadrant == 1) | (quadrant == 2);
    sine = odd ? c : s;
    sine = sine_minus ? -sine : sine;
    cosine = odd ? s : c;
    cosine = cosine_minus ? -cosine : cosine;
}
inline void sine_cosine(Vector<double> x, Vector<double>& sine, Vector<double>& cosine) {
    sine = each_lane(x, [](double v) { return std::sin(v); });
    cosine = each_lane(x, [](double v) { return std::cos(v); });
}

template <typename T>
Vector<T> sigmoid(Vector<T> x) {
    return T(1) / (T(1) + exponential(-x));
}

// As torch has it: the identity above 20.
template <typename T>
Vector<T> softplus(Vector<T> x) {
    const Vector<T> size = x < T(0) ? -x : x, positive = x < T(0) ? Vector<T>{} : x;
    return x > T(20) ? x : positive + log_one_plus(exponential(-size));
}
template <typename T>
Vector<T> softplus_slope(Vector<T> x) {
    return x > T(20) ? all(T(1)) : sigmoid<T>(x);
}

struct BFloat16 {
    uint16_t bits;
};

inline float value(BFloat16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}
inline float value(float x) { return x; }
inline double value(double x) { return x; }

inline void put(float x, BFloat16& to) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    to.bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void put(float x, float& to) { to = x; }
inline void put(double x, double& to) { to = x; }

// Copies between memory and buffers, whose padding is set to zero.
template <typename S, typename T>
FORCE_INLINE inline void load(const S* from, int64_t count, T* to) {
    const int64_t whole = std::is_same_v<S, T> ? count - count % kLanes<T> : 0;
    for (int64_t i = 0; i < whole; i += kLanes<T>) std::memcpy(to + i, from + i, VECTOR_BYTES);
    for (int64_t i = whole; i < count; ++i) to[i] = value(from[i]);
    for (int64_t i = count; i < padded<T>(count); ++i) to[i] = T(0);
}
template <typename S, typename T>
FORCE_INLINE inline void store(const T* from, int64_t count, S* to) {
    const int64_t whole = std::is_same_v<S, T> ? count - count % kLanes<T> : 0;
    for (int64_t i = 0; i < whole; i += kLanes<T>) std::memcpy(to + i, from + i, VECTOR_BYTES);
    for (int64_t i = whole; i < count; ++i) put(from[i], to[i]);
}

// Aligned memory that starts as zeros and is given out in pieces.
template <typename T>
class Buffers {
  public:
    T* take(int64_t count) {
        const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
        blocks.emplace_back(bytes / sizeof(T) + 64 / sizeof(T), T(0));
        const auto address = reinterpret_cast<uintptr_t>(blocks.back().data());
        return reinterpret_cast<T*>((address + 63) / 64 * 64);
    }

  private:
    std::vector<std::vector<T>> blocks;
};

// A size that is known at compile time if Fixed is not 0.
template <int64_t Fixed>
struct Size {
    int64_t given;
    operator int64_t() const { return Fixed ? Fixed : given; }
};

// Rows of equal, padded length.
template <typename T, int64_t Fixed = 0>
struct Rows {
    T* data;
    Size<Fixed> stride;
    Rows(Buffers<T>& buffers, int64_t count, int64_t stride) : data(buffers.take(count * stride)), stride{stride} {}
    T* operator[](int64_t row) const { return data + row * stride; }
};

// Coefficients of up to kSegment steps and, after `Core::backward`, their gradients. Vectors of `state` and `channels`
// are padded with zeros. B and u have the token before the segment in row 0, so that row t + 1 is that of step t. N and
// P are the padded sizes where they are known at compile time, else 0.
template <typename T, int64_t N, int64_t P>
struct Segment {
    Segment(Buffers<T>& memory, int64_t n, int64_t p)
        : state{padded<T>(n)},
          channels{padded<T>(p)},
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
        if (reflects) sum_steps<T>(steps, kB, [&](int64_t t) { return products(k[t], B[t]); });
        sum_steps<T>(steps, CB, [&](int64_t t) { return products(C[t], B[t + 1]); });
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

    // Of two vectors, still to be added up over the lanes.
    Vector<T> products(const T* a, const T* b) const {
        Vector<T> sum{};
        for (int64_t i = 0; i < state; i += kLanes<T>) sum += vec(a + i) * vec(b + i);
        return sum;
    }

    Size<N> state;
    Size<P> channels;
    int64_t steps = 0;
    bool reflects = false, carries = false;
    T D = 0, grad_D = 0;
    Rows<T, N> k, B, C, rk, sB;
    Rows<T, P> u, y, q;
    Rows<T, N> grad_k, grad_B, grad_C;
    Rows<T, P> grad_u, grad_y;
    alignas(64) T d[kSegment + 1] = {}, w[kSegment + 1] = {}, c[kSegment + 1] = {}, r[kSegment + 1] = {};
    alignas(64) T kB[kSegment] = {}, CB[kSegment] = {};
    T s[kSegment + 1], e[kSegment + 1], f[kSegment + 1];
    alignas(64) T grad_d[kSegment + 1], grad_w[kSegment + 1], grad_c[kSegment + 1], grad_r[kSegment + 1];
    T grad_s[kSegment + 1], grad_e[kSegment + 1], grad_f[kSegment + 1];
};

// Runs a segment on W vectors of channels at a time (a panel); a state is stored panel by panel, (panels, state, W).
template <typename T, int64_t N, int64_t P, int W, bool Reflects>
class Core {
    using V = Vector<T>;
    static constexpr int64_t L = kLanes<T>, width = W * L;

  public:
    explicit Core(Segment<T, N, P>& segment) : s(segment) {}

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

    Segment<T, N, P>& s;
};

// Calls `call(core)` with the fastest Core for the segment.
template <typename T, int64_t N, int64_t P, typename Call>
void with_core(Segment<T, N, P>& s, const Call& call) {
    const auto by_width = [&](auto reflects) {
        constexpr bool kReflects = decltype(reflects)::value;
        if constexpr (P == 0 || P % (2 * kLanes<T>) == 0)
            if (s.channels % (2 * kLanes<T>) == 0) return call(Core<T, N, P, 2, kReflects>(s));
        if constexpr (P == 0 || P % (2 * kLanes<T>) != 0) call(Core<T, N, P, 1, kReflects>(s));
    };
    s.reflects ? by_width(std::true_type()) : by_width(std::false_type());
}

}  // namespace

// Row i holds tokens bounds[2 i] to bounds[2 i + 1] of `order`, an array of token numbers, or of all tokens if it is
// null. Without bounds all rows have `equal_length` tokens.
struct Layout {
    int64_t rows, equal_length;
    const int64_t *bounds, *order;

    int64_t start(int64_t row) const { return bounds ? bounds[2 * row] : row * equal_length; }
    int64_t length(int64_t row) const { return bounds ? bounds[2 * row + 1] - bounds[2 * row] : equal_length; }
    int64_t token(int64_t row, int64_t t) const { return order ? order[start(row) + t] : start(row) + t; }
    // Where the kept state of the segment that starts at t lies; rows of any lengths never share a place.
    int64_t slot(int64_t row, int64_t t) const { return start(row) / kSegment + row + t / kSegment; }
};

namespace {

template <typename T>
int64_t panel_width(int64_t channels) {
    return channels % (2 * kLanes<T>) == 0 ? 2 * kLanes<T> : kLanes<T>;
}

// Between a state (n, p) in memory and one in panels.
template <typename T, int64_t N, int64_t P>
void load_state(const T* from, int64_t n, int64_t p, const Segment<T, N, P>& s, T* to) {
    const int64_t width = panel_width<T>(s.channels);
    std::fill_n(to, s.state * s.channels, T(0));
    for (int64_t first = 0; first < p; first += width, to += s.state * width)
        for (int64_t i = 0; i < n; ++i) load(from + i * p + first, std::min(width, p - first), to + i * width);
}
template <typename T, int64_t N, int64_t P>
void store_state(const T* from, int64_t n, int64_t p, const Segment<T, N, P>& s, T* to) {
    const int64_t width = panel_width<T>(s.channels);
    for (int64_t first = 0; first < p; first += width, from += s.state * width)
        for (int64_t i = 0; i < n; ++i) store(from + i * width, std::min(width, p - first), to + i * p + first);
}

// Runs a function on several threads at once: GOMP_parallel of the OpenMP library that torch runs on, if it is known.
// Its threads are there already, and would otherwise stand in the way of others for a while after every operator of
// torch.
using Pool = void (*)(void (*function)(void*), void* data, unsigned threads, unsigned flags);
Pool pool = nullptr;

// Runs a function that does not throw on some threads, this one among them.
template <typename Function>
void run_on_threads(Function& function, int64_t threads) {
    if (threads <= 1) return function();
    if (pool) return pool([](void* data) { (*static_cast<Function*>(data))(); }, &function, unsigned(threads), 0);
    std::vector<std::thread> others;
    others.reserve(threads);
    for (int64_t i = 1; i < threads; ++i) {
        try {
            others.emplace_back(std::ref(function));
        } catch (const std::exception&) {
            break;  // the system gives no more threads, or no memory for them; those there are do the work
        }
    }
    function();
    for (auto& thread : others) thread.join();
}

// Calls worker(i) for every i below count; each thread makes a worker of its own. To start a thread takes as long as
// some 10^5 multiplications. Throws std::bad_alloc, once all threads are done, if one of them had not memory enough: an
// exception that left a thread would end the process.
template <typename Make>
void in_parallel(int64_t count, int64_t threads, int64_t multiplications, const Make& make_worker) {
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    auto take = [&] {
        try {
            auto worker = make_worker();
            for (int64_t i; !failed && (i = next.fetch_add(1)) < count;) worker(i);
        } catch (const std::exception&) {
            failed = true;
        }
    };
    run_on_threads(take, std::min({threads, count, 1 + multiplications / (1 << 17)}));
    if (failed) throw std::bad_alloc();
}

}  // namespace

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
    Segment<T, 0, 0> s;
    int64_t pair = 0, row = 0, head = 0, length = 0;
    T *h, *states = nullptr, *grad_h = nullptr, *to_B = nullptr, *to_u = nullptr;  // to_: what later steps owe to it
};

int64_t tokens_in(const Layout& layout) {
    int64_t count = 0;
    for (int64_t row = 0; row < layout.rows; ++row) count += layout.length(row);
    return count;
}

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

// The mixer between its projections. `projected` is (tokens, width) with columns z, x, B, C, dt, A, trap, angle; k is
// (tokens, heads * state), beta (tokens, heads). S is the type of what the projections make and take, T that of all
// else. Null pointers are options: without k there is no reflection, without B_weight the write is that of the delta
// rule, without norm_weight the output is not normalised, without A_bias the gates are smooth, and without `kept` no
// gradient will be asked for. Gradients are written, not added.
template <typename S, typename T>
struct Mixer {
    Layout layout;
    int64_t tokens, width, heads, state, channels, pairs, threads, contractive, heavy_tail;
    double a_min, epsilon;
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
};

namespace {

constexpr double kPi = 3.14159265358979323846;

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
          angle(trap + a.heads) {}
    int64_t z = 0, u, B, C, dt, A, trap, angle;
};

// Heads of a unit: some, so that what they share is computed once; fewer if there would be too few units for the
// threads. It depends on the shape alone, as the order of sums does.
template <typename S, typename T>
int64_t heads_in_unit(const Mixer<S, T>& a) {
    int64_t heads = 16;
    while (heads > 1 && a.layout.rows * ((a.heads + heads - 1) / heads) < 32) heads /= 2;
    return heads;
}

template <typename S, typename T>
int64_t units_in_row(const Mixer<S, T>& a) {
    return (a.heads + heads_in_unit(a) - 1) / heads_in_unit(a);
}

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

// What the heads of a unit share in one segment: normalised B and C before the bias, and omega. Row 0 of B is that of
// the token before the segment.
template <typename S, typename T, int64_t N>
class SharedSegment {
  public:
    SharedSegment(const Mixer<S, T>& mixer, Buffers<T>& memory)
        : B(memory, kSegment + 1, padded<T>(mixer.state)),
          C(memory, kSegment, padded<T>(mixer.state)),
          omega(memory, kSegment + 1, padded<T>(mixer.pairs)),
          grad_B(memory, kSegment, B.stride),
          grad_C(memory, kSegment, B.stride),
          grad_omega(memory, kSegment, omega.stride),
          a(mixer),
          columns(mixer),
          B_weight(memory.take(B.stride)),
          C_weight(memory.take(B.stride)) {
        if (a.B_weight) load(a.B_weight, a.state, B_weight);
        load(a.C_weight, a.state, C_weight);
    }

    void fill(int64_t row, int64_t start, int64_t steps) {
        for (int64_t t = start ? -1 : 0; t < steps; ++t) {
            const S* from = a.projected + a.layout.token(row, start + t) * a.width;
            if (a.B_weight) normalise(from + columns.B, B_weight, B[t + 1]);
            if (t < 0) continue;
            normalise(from + columns.C, C_weight, C[t]);
            load(from + columns.angle, a.pairs, omega[t]);
            for (int64_t i = 0; i < a.pairs; i += kLanes<T>)
                vec(omega[t] + i) = T(kPi) * hyperbolic_tangent(vec(omega[t] + i));
        }
    }

    void clear_gradients() {
        std::fill_n(grad_B.data, kSegment * grad_B.stride, T(0));
        std::fill_n(grad_C.data, kSegment * grad_C.stride, T(0));
        std::fill_n(grad_omega.data, kSegment * grad_omega.stride, T(0));
    }

    Rows<T, N> B, C;
    Rows<T> omega;
    Rows<T, N> grad_B, grad_C;
    Rows<T> grad_omega;

  private:
    void normalise(const S* from, const T* weight, T* to) {
        load(from, a.state, to);
        Vector<T> squares{};
        for (int64_t i = 0; i < B.stride; i += kLanes<T>) squares += vec(to + i) * vec(to + i);
        const T scale = T(1) / std::sqrt(sum_lanes<T>(squares) / T(a.state) + T(a.epsilon));
        for (int64_t i = 0; i < B.stride; i += kLanes<T>) vec(to + i) *= scale * vec(weight + i);
    }

    const Mixer<S, T>& a;
    const Columns<S, T> columns;
    T *B_weight, *C_weight;
};

// Rows of a segment for each head of a unit. What a head needs of one token lies far from what it needs of the next, so
// that memory is read and written a token at a time, for all heads.
template <typename T, int64_t Fixed>
class HeadRows {
  public:
    HeadRows(Buffers<T>& memory, int64_t heads, int64_t stride)
        : stride{stride}, data(memory.take(heads * (kSegment + 1) * stride)) {}
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

  private:
    Size<Fixed> stride;
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

// Works on one row and some of its heads after another.
template <typename S, typename T, int64_t N, int64_t P>
class MixerWorker {
    using V = Vector<T>;
    static constexpr T kShortest = T(1e-12);  // of directions to normalise

  public:
    // shared_gradients: (units in a row, tokens, 2 state + pairs), of normalised B, C and omega; sums: `HeadSums` of
    // each pair.
    MixerWorker(const Mixer<S, T>& mixer, T* shared_gradients, double* sums)
        : a(mixer),
          columns(mixer),
          n{mixer.state},
          p{mixer.channels},
          m(mixer.pairs),
          shared(mixer, memory),
          s(memory, n, p),
          shared_gradients(shared_gradients),
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
        begin(index);
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
        begin(index);
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

  private:
    HeadSums<T> sums_of_segment() { return HeadSums<T>(n, p, segment_sums); }
    void add_sums(int64_t i) {
        const int64_t size = sums_of_segment().size;
        for (int64_t j = 0; j < size; ++j) sums[pair(i) * size + j] += double(segment_sums[j]);
        std::fill_n(segment_sums, size, T(0));
    }
    int64_t size() const { return s.state * s.channels; }
    int64_t pair(int64_t i) const { return row * a.heads + first + i; }
    int64_t kept_at(int64_t t, int64_t i) const { return a.layout.slot(row, t) * a.heads + first + i; }

    void begin(int64_t index) {
        row = index / units_in_row(a);
        unit = index % units_in_row(a);
        first = unit * heads_in_unit(a);
        heads = std::min(heads_in_unit(a), a.heads - first);
        length = a.layout.length(row);
    }

    int64_t begin_segment(int64_t start) {
        const int64_t steps = std::min(kSegment, length - start);
        for (int64_t t = 0; t < steps; ++t) tokens[t] = a.layout.token(row, start + t);
        if (start) load_u(a.layout.token(row, start - 1), 0);
        for (int64_t t = 0; t < steps; ++t) {
            z_rows.load_token(a.projected + tokens[t] * a.width + columns.z + first * p, heads, p, t);
            load_u(tokens[t], t + 1);
            if (a.k) k_rows.load_token(a.k + (tokens[t] * a.heads + first) * n, heads, n, t);
            if (a.grad_out) grad_y_rows.load_token(a.grad_out + (tokens[t] * a.heads + first) * p, heads, p, t);
        }
        shared.fill(row, start, steps);
        return steps;
    }
    void load_u(int64_t token, int64_t t) {
        u_rows.load_token(a.projected + token * a.width + columns.u + first * p, heads, p, t);
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

    // The coefficients of head i: see the equations in mixer_mamba3.py.
    void fill(int64_t start, int64_t steps, int64_t i) {
        choose_head(i);
        s.steps = steps;
        s.D = a.D[head];
        for (int64_t t = 0; t < steps; ++t) {
            const S* from = a.projected + tokens[t] * a.width;
            dt_raw[t] = value(from[columns.dt + head]) + a.dt_bias[head];
            A_raw[t] = value(from[columns.A + head]) + (a.A_bias ? a.A_bias[head] : T(0));
            trap_raw[t] = value(from[columns.trap + head]);
            if (a.k) beta_raw[t] = value(a.beta[tokens[t] * a.heads + head]);
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
        rate = PerStep<T>::from([&](int64_t t) { return decay_rate(A_raw.at(t)); });
        lambda = PerStep<T>::from([&](int64_t t) { return sigmoid<T>(trap_raw.at(t)); });
        beta = PerStep<T>::from([&](int64_t t) { return reflection_gate(beta_raw.at(t)); });
        for (int64_t t = 0; t < kSegment; t += kLanes<T>) {
            const V d = exponential(-rate.at(t) * dt.at(t));
            vec(s.d + t) = d;
            vec(s.r + t) = a.contractive ? beta.at(t) * d : beta.at(t);
            vec(s.w + t) = s.carries ? lambda.at(t) * dt.at(t) : beta.at(t);
            vec(s.c + t) = (T(1) - lambda.at(t)) * dt.at(t);
        }
    }

    V decay_rate(V x) const {
        const V rate = a.heavy_tail ? (x < T(0) ? T(1) / (T(1) - x) : x + T(1)) : softplus<T>(x);
        const V low = a.A_bias ? all(T(0)) : all(T(a.a_min)), shifted = a.A_bias ? rate - T(0.05) : rate;
        return shifted < low ? low : shifted;
    }
    V decay_rate_slope(V x) const {
        const V inverse = T(1) / (T(1) - x);
        const V slope = a.heavy_tail ? (x < T(0) ? inverse * inverse : all(T(1))) : softplus_slope<T>(x);
        const V rate = a.heavy_tail ? (x < T(0) ? inverse : x + T(1)) : softplus<T>(x);
        const V above = a.A_bias ? (rate - T(0.05) > T(0) ? all(T(1)) : V{}) : (rate < T(a.a_min) ? V{} : all(T(1)));
        return slope * above;
    }
    V reflection_gate(V x) const {
        const V gate = sigmoid<T>(x);
        if (!a.A_bias) return T(2) * gate;
        const V wide = T(2.2) * gate - T(0.1), low = wide < T(0) ? V{} : wide;
        return low > T(2) ? all(T(2)) : low;
    }
    V reflection_gate_slope(V x) const {
        const V gate = sigmoid<T>(x), slope = gate * (T(1) - gate);
        if (!a.A_bias) return T(2) * slope;
        const V wide = T(2.2) * gate - T(0.1);
        return wide < T(0) ? V{} : (wide > T(2) ? V{} : T(2.2) * slope);
    }

    // Angles between -pi and pi of the token before the segment and of its own; rows of cosines (c0, c0, c1, c1, ...)
    // and of sines (-s0, s0, -s1, s1, ...). The sum runs in double.
    void fill_angles(int64_t start, int64_t i) {
        if (!m) return;
        std::copy_n(a.kept_phase + kept_at(start, i) * m, m, theta.begin());
        for (int64_t t = 0; t < s.steps; ++t)
            for (int64_t j = 0; j < m; ++j)
                theta[(t + 1) * m + j] = theta[t * m + j] + double(dt[t]) * double(shared.omega[t][j]);
        for (int64_t j = 0; j < (s.steps + 1) * m; ++j) angles[j] = T(wrapped(theta[j]));
        for (int64_t j = 0; j < (s.steps + 1) * m; j += kLanes<T>)
            sine_cosine(vec(angles + j), vec(sines + j), vec(cosines + j));
        for (int64_t t = 0; t <= s.steps; ++t)
            for (int64_t j = 0; j < m; ++j) {
                cosine[t][2 * j] = cosine[t][2 * j + 1] = cosines[t * m + j];
                sine[t][2 * j] = -sines[t * m + j];
                sine[t][2 * j + 1] = sines[t * m + j];
            }
    }

    static double wrapped(double angle) {
        const double shift = 6755399441055744.0;  // 1.5 * 2^52, past which there are whole numbers only
        return angle - 2 * kPi * ((angle * (0.5 / kPi) + shift) - shift);
    }

    void fill_k() {
        sum_steps<T>(s.steps, k_length.of, [&](int64_t t) { return s.products(s.k[t], s.k[t]); });
        for (int64_t t = 0; t < s.steps; ++t) {
            k_length[t] = std::sqrt(k_length[t]);
            const T scale = T(1) / std::max(k_length[t], kShortest);
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
        sum_steps<T>(s.steps, scale.of, [&](int64_t t) {
            V squares{};
            for (int64_t i = 0; i < s.channels; i += kLanes<T>) squares += vec(s.y[t] + i) * vec(s.y[t] + i);
            return squares;
        });
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
            for (int64_t j = 0; j < m; ++j) a.kept_phase[kept_at(end, i) * m + j] = wrapped(theta[s.steps * m + j]);
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
            grad_dt[t] += T(to_theta[j]) * shared.omega[t][j];
            shared.grad_omega[t][j] += T(to_theta[j]) * dt[t];
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
        sum_steps<T>(s.steps, along.of, [&](int64_t t) { return s.products(s.k[t], s.grad_k[t]); });
        for (int64_t t = 0; t < s.steps; ++t) {
            T* grad = s.grad_k[t];
            const T part = k_length[t] > kShortest ? along[t] : T(0), scale = T(1) / std::max(k_length[t], kShortest);
            for (int64_t i = 0; i < s.state; i += kLanes<T>) vec(grad + i) -= part * vec(s.k[t] + i);
            for (int64_t i = 0; i < s.state; i += kLanes<T>) vec(grad + i) = scale * turned_back(grad, t, i);
        }
    }

    void gates_back(PerStep<T>& grad_dt, T* sum) {
        const auto dt_slope = PerStep<T>::from([&](int64_t t) { return softplus_slope<T>(dt_raw.at(t)); });
        const auto rate_slope = PerStep<T>::from([&](int64_t t) { return decay_rate_slope(A_raw.at(t)); });
        const auto beta_slope = PerStep<T>::from([&](int64_t t) { return reflection_gate_slope(beta_raw.at(t)); });
        for (int64_t t = 0; t < s.steps; ++t) {
            T to_d = s.grad_d[t], to_beta = a.contractive ? s.grad_r[t] * s.d[t] : s.grad_r[t], to_trap = 0;
            if (a.contractive) to_d += s.grad_r[t] * beta[t];
            if (s.carries) {
                grad_dt[t] += s.grad_w[t] * lambda[t] + s.grad_c[t] * (T(1) - lambda[t]);
                to_trap = (s.grad_w[t] - s.grad_c[t]) * dt[t] * lambda[t] * (T(1) - lambda[t]);
            } else {
                to_beta += s.grad_w[t];
            }
            const T to_log = to_d * s.d[t], to_A = -to_log * dt[t] * rate_slope[t];
            const T to_dt = (grad_dt[t] - to_log * rate[t]) * dt_slope[t];
            S* to = a.grad_projected + tokens[t] * a.width;
            put(to_dt, to[columns.dt + head]);
            put(to_A, to[columns.A + head]);
            put(to_trap, to[columns.trap + head]);
            if (a.k) put(to_beta * beta_slope[t], a.grad_beta[tokens[t] * a.heads + head]);
            sum[0] += to_dt;
            sum[1] += to_A;
        }
        sum[2] += s.grad_D;
    }

    void write_gradients() {
        for (int64_t t = 0; t < s.steps; ++t) {
            S* projected = a.grad_projected + tokens[t] * a.width;
            z_rows.store_token(t, heads, p, projected + columns.z + first * p);
            grad_u_rows.store_token(t + 1, heads, p, projected + columns.u + first * p);
            if (a.k) grad_k_rows.store_token(t, heads, n, a.grad_k + (tokens[t] * a.heads + first) * n);
            T* to = shared_gradients + (unit * a.tokens + tokens[t]) * (2 * n + m);
            store(shared.grad_B[t], n, to);
            store(shared.grad_C[t], n, to + n);
            store(shared.grad_omega[t], m, to + 2 * n);
        }
    }

    const Mixer<S, T>& a;
    const Columns<S, T> columns;
    const Size<N> n;
    const Size<P> p;
    const int64_t m;
    int64_t row = 0, unit = 0, first = 0, heads = 0, head = 0, length = 0;
    Buffers<T> memory;
    SharedSegment<S, T, N> shared;
    Segment<T, N, P> s;
    T* shared_gradients;
    double* sums;
    T* segment_sums;
    Rows<T, P> z;  // of the head at work, as u, k, grad_y, grad_u and grad_k of the segment are: see choose_head
    HeadRows<T, P> u_rows, z_rows;
    HeadRows<T, N> k_rows;
    HeadRows<T, P> grad_y_rows, grad_u_rows;
    HeadRows<T, N> grad_k_rows;
    Rows<T, N> cosine, sine;
    T *bias_B, *bias_C, *weight, *angles, *sines, *cosines, *turns, *h = nullptr, *states = nullptr, *of_heads[3] = {};
    std::vector<double> theta, to_theta;  // to_theta: what the steps from one on owe to its angles
    PerStep<T> dt_raw, A_raw, trap_raw, beta_raw, dt, rate, lambda, beta, k_length;
    int64_t tokens[kSegment];
};

// From the gradients of normalised B, C and omega, added over the units of a row, to those of the projections. Sums for
// the weights of the norms go to `sums`, (rows, 2 state).
template <typename S, typename T>
class SharedBackward {
  public:
    SharedBackward(const Mixer<S, T>& mixer, const T* gradients, double* sums)
        : a(mixer), columns(mixer), gradients(gradients), sums(sums), total(2 * mixer.state + mixer.pairs) {}

    void operator()(int64_t row) {
        double* sum = sums + row * 2 * a.state;
        for (int64_t t = 0; t < a.layout.length(row); ++t) {
            const int64_t token = a.layout.token(row, t), n = a.state;
            std::fill(total.begin(), total.end(), T(0));
            for (int64_t unit = 0; unit < units_in_row(a); ++unit) {
                const T* from = gradients + (unit * a.tokens + token) * int64_t(total.size());
                for (size_t i = 0; i < total.size(); ++i) total[i] += from[i];
            }
            const S* x = a.projected + token * a.width;
            S* to = a.grad_projected + token * a.width;
            norm_back(x + columns.B, a.B_weight, total.data(), to + columns.B, sum);
            norm_back(x + columns.C, a.C_weight, total.data() + n, to + columns.C, sum + n);
            for (int64_t j = 0; j < a.width - columns.angle; ++j) put(angle_back(x, j), to[columns.angle + j]);
        }
    }

  private:
    T angle_back(const S* x, int64_t j) const {
        if (j >= a.pairs) return T(0);
        const T tangent = std::tanh(T(value(x[columns.angle + j])));
        return total[2 * a.state + j] * T(kPi) * (T(1) - tangent * tangent);
    }

    void norm_back(const S* x, const T* weight, const T* grad, S* to, double* to_weight) const {
        T squares = 0, along = 0;
        for (int64_t i = 0; i < a.state; ++i) squares += value(x[i]) * value(x[i]);
        const T scale = T(1) / std::sqrt(squares / T(a.state) + T(a.epsilon));
        for (int64_t i = 0; weight && i < a.state; ++i) along += grad[i] * weight[i] * value(x[i]);
        for (int64_t i = 0; i < a.state; ++i) {
            const T unit = scale * value(x[i]), mean = scale * along / T(a.state);
            put(weight ? scale * (grad[i] * weight[i] - unit * mean) : T(0), to[i]);
            to_weight[i] += grad[i] * unit;
        }
    }

    const Mixer<S, T>& a;
    const Columns<S, T> columns;
    const T* gradients;
    double* sums;
    std::vector<T> total;
};

// Adds what the rows found to the gradients of the parameters.
template <typename S, typename T>
void add_parameter_gradients(const Mixer<S, T>& a, double* sums, const double* norm_sums) {
    const int64_t n = a.state, p = a.channels;
    const auto add = [&](T* to, const double* from, int64_t row_stride, int64_t count) {
        if (!to) return;
        std::vector<double> total(count);
        for (int64_t row = 0; row < a.layout.rows; ++row)
            for (int64_t i = 0; i < count; ++i) total[i] += from[row * row_stride + i];
        for (int64_t i = 0; i < count; ++i) to[i] = T(total[i]);
    };
    const int64_t size = HeadSums<T>(n, p).size, stride = a.heads * size;
    for (int64_t head = 0; head < a.heads; ++head) {
        const HeadSums<T, double> from(n, p, sums + head * size);
        add(a.grad_dt_bias + head, from.scalars, stride, 1);
        add(a.grad_A_bias ? a.grad_A_bias + head : nullptr, from.scalars + 1, stride, 1);
        add(a.grad_D + head, from.scalars + 2, stride, 1);
        add(a.grad_B_bias ? a.grad_B_bias + head * n : nullptr, from.B_bias, stride, n);
        add(a.grad_C_bias + head * n, from.C_bias, stride, n);
        add(a.grad_norm_weight ? a.grad_norm_weight + head * p : nullptr, from.norm_weight, stride, p);
    }
    add(a.grad_B_weight, norm_sums, 2 * n, n);
    add(a.grad_C_weight, norm_sums + n, 2 * n, n);
}

template <int64_t N, int64_t P, typename S, typename T>
void run_units(const Mixer<S, T>& a, bool forward, T* shared_gradients, double* sums) {
    const int64_t work = tokens_in(a.layout) * a.heads * a.state * a.channels;
    in_parallel(a.layout.rows * units_in_row(a), a.threads, work, [&] {
        return [worker = MixerWorker<S, T, N, P>(a, shared_gradients, sums), forward](int64_t i) mutable {
            forward ? worker.forward(i) : worker.backward(i);
        };
    });
}

template <typename S, typename T>
void run(const Mixer<S, T>& a, bool forward) {
    std::vector<T> shared_gradients;
    std::vector<double> sums, norm_sums;
    if (!forward) {
        shared_gradients.resize(units_in_row(a) * a.tokens * (2 * a.state + a.pairs));
        sums.resize(a.layout.rows * a.heads * HeadSums<T>(a.state, a.channels).size);
        norm_sums.resize(a.layout.rows * 2 * a.state);
    }
    // The paper's size has code of its own.
    constexpr int64_t kFixed = std::is_same_v<S, float> ? 16 : 0;
    if (a.state == kFixed && a.channels == kFixed)
        run_units<kFixed, kFixed>(a, forward, shared_gradients.data(), sums.data());
    else
        run_units<0, 0>(a, forward, shared_gradients.data(), sums.data());
    if (forward) return;
    in_parallel(a.layout.rows, a.threads, tokens_in(a.layout) * a.heads * a.state, [&] {
        return SharedBackward<S, T>(a, shared_gradients.data(), norm_sums.data());
    });
    add_parameter_gradients(a, sums.data(), norm_sums.data());
}

}  // namespace

// One token of each row through the whole mixer, its projections included, and what stands around it in a block: the
// norm of x (none without a weight; with `centred` its mean is taken off) and the residual connection. Sizes and state
// are those of `mixer`, whose `projected`, `k`, `beta` and `out` are made here.
template <typename T>
struct MixerStep {
    Mixer<T, T> mixer;
    int64_t hidden, centred, residual;
    double block_epsilon;
    const T *x, *in_proj, *k_proj, *beta_proj, *beta_bias, *out_proj, *block_weight, *block_bias;
    T* y;
};

namespace {

// y = W x for a matrix of `rows` times `columns`.
template <typename T>
void multiply(const T* W, const T* x, int64_t rows, int64_t columns, T* y) {
    const int64_t whole = columns - columns % kLanes<T>;
    for (int64_t block = 0; block < rows; block += kLanes<T>) {
        const auto sums = sum_rows<T, 1, kLanes<T>>(block, [&](int64_t i) FORCE_INLINE {
            Sums<T, 1> row{};
            if (i >= rows) return row;
            const T* w = W + i * columns;
            for (int64_t j = 0; j < whole; j += kLanes<T>) {
                Vector<T> a, b;
                std::memcpy(&a, w + j, VECTOR_BYTES);
                std::memcpy(&b, x + j, VECTOR_BYTES);
                row.of[0] += a * b;
            }
            for (int64_t j = whole; j < columns; ++j) row.of[0][0] += w[j] * x[j];
            return row;
        });
        for (int64_t l = 0; l < kLanes<T> && block + l < rows; ++l) y[block + l] = sums.of[0][l];
    }
}

// What the mixer takes of a token x.
template <typename T>
void block_norm(const MixerStep<T>& a, const T* x, T* to) {
    T mean = 0, squares = 0;
    for (int64_t i = 0; a.centred && i < a.hidden; ++i) mean += x[i] / T(a.hidden);
    for (int64_t i = 0; i < a.hidden; ++i) squares += (x[i] - mean) * (x[i] - mean);
    const T scale = T(1) / std::sqrt(squares / T(a.hidden) + T(a.block_epsilon));
    for (int64_t i = 0; i < a.hidden; ++i)
        to[i] = (x[i] - mean) * scale * a.block_weight[i] + (a.block_bias ? a.block_bias[i] : T(0));
}

template <typename T>
void step(const MixerStep<T>& a) {
    Mixer<T, T> mixer = a.mixer;
    const int64_t rows = mixer.layout.rows, keys = mixer.heads * mixer.state, inner = mixer.heads * mixer.channels;
    std::vector<T> projected(rows * mixer.width), k(rows * keys), beta(rows * mixer.heads), out(rows * inner);
    std::vector<T> normed(a.hidden);
    std::vector<double> kept_phase(rows * mixer.heads * mixer.pairs);
    for (int64_t row = 0; row < rows; ++row) {
        const T* x = a.x + row * a.hidden;
        if (a.block_weight) {
            block_norm(a, x, normed.data());
            x = normed.data();
        }
        multiply(a.in_proj, x, mixer.width, a.hidden, projected.data() + row * mixer.width);
        if (!a.k_proj) continue;
        multiply(a.k_proj, x, keys, a.hidden, k.data() + row * keys);
        multiply(a.beta_proj, x, mixer.heads, a.hidden, beta.data() + row * mixer.heads);
        for (int64_t head = 0; head < mixer.heads; ++head) beta[row * mixer.heads + head] += a.beta_bias[head];
    }
    mixer.projected = projected.data();
    mixer.k = a.k_proj ? k.data() : nullptr;
    mixer.beta = beta.data();
    mixer.out = out.data();
    mixer.kept_phase = kept_phase.data();
    run(mixer, true);
    for (int64_t row = 0; row < rows; ++row)
        multiply(a.out_proj, out.data() + row * inner, a.hidden, inner, a.y + row * a.hidden);
    for (int64_t i = 0; a.residual && i < rows * a.hidden; ++i) a.y[i] += a.x[i];
}

}  // namespace

// A library is for one type of what the projections make and take: three at once would take three times as long to
// compile, and most processes need one.
#ifndef ELEMENT
#define ELEMENT float
#endif
using Element = ELEMENT;
using Inside = std::conditional_t<std::is_same_v<Element, BFloat16>, float, Element>;

// What the functions return: 0, or 1 if there was not memory enough, which is all that can go wrong in them.
template <typename Function>
static int failed(const Function& function) {
    try {
        function();
        return 0;
    } catch (const std::exception&) {
        return 1;
    }
}

extern "C" {
int scan_forward(const Scan<Element, Inside>* scan) {
    return failed([&] { run(*scan, true); });
}
int scan_backward(const Scan<Element, Inside>* scan) {
    return failed([&] { run(*scan, false); });
}
int mixer_forward(const Mixer<Element, Inside>* mixer) {
    return failed([&] { run(*mixer, true); });
}
int mixer_backward(const Mixer<Element, Inside>* mixer) {
    return failed([&] { run(*mixer, false); });
}
int mixer_step(const MixerStep<Inside>* a) {
    return failed([&] {
        if constexpr (std::is_same_v<Element, Inside>) step(*a);
    });
}
int64_t scan_segment() { return kSegment; }
void use_pool(Pool given) { pool = given; }
}
