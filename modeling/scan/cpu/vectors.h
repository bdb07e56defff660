// Vectors of the processor's width, and sums over their lanes.

#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace {

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

// Between two vectors: where bit D of a lane is 1 in a, and 0 in b, they change places.
template <int D, typename V, size_t... l>
FORCE_INLINE inline void swap_across(V& a, V& b, std::index_sequence<l...>) {
    constexpr size_t L = sizeof...(l);
#if defined(__clang__) || __GNUC__ >= 12
    const V first = __builtin_shufflevector(a, b, (l & D ? L + (l & ~size_t(D)) : l)...);
    b = __builtin_shufflevector(a, b, (l & D ? L + l : l | D)...);
    a = first;
#else
    const V first = a, second = b;
    ((a[l] = l & D ? second[l & ~size_t(D)] : first[l], b[l] = l & D ? second[l] : first[l | D]), ...);
#endif
}

template <typename T>
using Lanes = std::make_index_sequence<kLanes<T>>;

// As many vectors as each has lanes: lane j of vector i becomes lane i of vector j.
template <typename T, int D = 1>
FORCE_INLINE inline void transpose(Vector<T>* x) {
    if constexpr (D < kLanes<T>) {
        for (int64_t i = 0; i < kLanes<T>; ++i)
            if (!(i & D)) swap_across<D>(x[i], x[i | D], Lanes<T>());
        transpose<T, 2 * D>(x);
    }
}

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

// The sum over the lanes of row(i) for each i below count; there is room for whole vectors in `to`.
template <typename T, typename Row>
FORCE_INLINE inline void sum_each(int64_t count, T* to, const Row& row) {
    for (int64_t block = 0; block < count; block += kLanes<T>)
        vec(to + block) = sum_rows<T, 1, kLanes<T>>(block, [&](int64_t i) FORCE_INLINE {
                              return i < count ? Sums<T, 1>{{row(i)}} : Sums<T, 1>{};
                          }).of[0];
}

// Of two vectors, still to be added up over the lanes.
template <typename T>
FORCE_INLINE inline Vector<T> products(const T* a, const T* b, int64_t size) {
    Vector<T> sum{};
    for (int64_t i = 0; i < size; i += kLanes<T>) sum += vec(a + i) * vec(b + i);
    return sum;
}

}  // namespace
