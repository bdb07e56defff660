// The activation and the product of a SwiGLU network, between its projections.

#pragma once

#include <algorithm>
#include <cstdint>

#include "functions.h"
#include "memory.h"
#include "vectors.h"
#include "work.h"

// `projected` is (tokens, 2 size), a gate before what it opens; `out` is (tokens, size). Of the layout nothing is used.
template <typename S, typename T>
struct SwiGLU {
    Layout layout;
    int64_t tokens, size, threads;
    const S* projected;
    S* out;
    const S* grad_out;
    S* grad_projected;
};

namespace {

template <typename T, typename S>
FORCE_INLINE inline Vector<T> load_vector(const S* from, int64_t count) {
    alignas(VECTOR_BYTES) T to[kLanes<T>];
    load(from, count, to);
    return vec(to);
}
template <typename T, typename S>
FORCE_INLINE inline void store_vector(Vector<T> x, int64_t count, S* to) {
    alignas(VECTOR_BYTES) T from[kLanes<T>];
    vec(from) = x;
    store(from, count, to);
}

// `count` numbers of a token, at most one vector of them.
template <typename S, typename T>
FORCE_INLINE inline void swiglu(const SwiGLU<S, T>& a, int64_t token, int64_t i, int64_t count, bool forward) {
    const int64_t at = 2 * token * a.size + i;
    const Vector<T> gate = load_vector<T>(a.projected + at, count), open = sigmoid<T>(gate);
    const Vector<T> up = load_vector<T>(a.projected + at + a.size, count);
    if (forward) return store_vector<T>(gate * open * up, count, a.out + token * a.size + i);
    const Vector<T> grad = load_vector<T>(a.grad_out + token * a.size + i, count);
    store_vector<T>(grad * up * open * (T(1) + gate * (T(1) - open)), count, a.grad_projected + at);
    store_vector<T>(grad * gate * open, count, a.grad_projected + at + a.size);
}

template <typename S, typename T>
void run(const SwiGLU<S, T>& a, bool forward) {
    constexpr int64_t kTokens = 32;  // for a thread at a time
    const int64_t whole = a.size - a.size % kLanes<T>;
    in_parallel((a.tokens + kTokens - 1) / kTokens, a.threads, 32 * a.tokens * a.size, [&] {
        return [&a, whole, forward](int64_t unit) {
            for (int64_t token = unit * kTokens; token < std::min((unit + 1) * kTokens, a.tokens); ++token) {
                for (int64_t i = 0; i < whole; i += kLanes<T>) swiglu(a, token, i, kLanes<T>, forward);
                if (whole < a.size) swiglu(a, token, whole, a.size - whole, forward);
            }
        };
    });
}

}  // namespace
