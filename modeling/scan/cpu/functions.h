// Elementary functions: in float by polynomials to a unit or two in the last place, in double lane by lane. What is not
// a number stays so.

#pragma once

#include <cmath>
#include <cstdint>

#include "vectors.h"

namespace {

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

template <typename V>
V root(V x) {
    V result;
    for (size_t l = 0; l < sizeof(V) / sizeof(x[0]); ++l) result[l] = std::sqrt(x[l]);
    return result;
}

template <typename T>
Vector<T> sigmoid(Vector<T> x) {
    return T(1) / (T(1) + exponential(-x));
}

// The value of a function and its slope; what only one of them takes is left out where the other is not used.
template <typename T>
struct WithSlope {
    Vector<T> value, slope;
};

// As torch has it: the identity above 20.
template <typename T>
FORCE_INLINE inline WithSlope<T> softplus_and_slope(Vector<T> x) {
    const Vector<T> e = exponential(x < T(0) ? x : -x), positive = x < T(0) ? Vector<T>{} : x;
    const Vector<T> slope = (x < T(0) ? e : all(T(1))) / (T(1) + e);
    return {x > T(20) ? x : positive + log_one_plus(e), x > T(20) ? all(T(1)) : slope};
}
// Each alone, and not as parts of the former: where those are inlined into the mixer of the delta family, GCC 12 breaks
// off with an internal error.
template <typename T>
Vector<T> softplus(Vector<T> x) {
    const Vector<T> size = x < T(0) ? -x : x, positive = x < T(0) ? Vector<T>{} : x;
    return x > T(20) ? x : positive + log_one_plus(exponential(-size));
}
template <typename T>
Vector<T> softplus_slope(Vector<T> x) {
    return x > T(20) ? all(T(1)) : sigmoid<T>(x);
}

}  // namespace
