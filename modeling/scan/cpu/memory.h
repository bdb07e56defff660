// Elements of tensors, and the buffers that they are worked on in.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace {

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

// One vector, of which the first `count` lanes, or all, are in memory. Whole ones by themselves: loops over them would
// become calls of memmove, which take longer than the copies.
template <typename T, typename S>
FORCE_INLINE inline Vector<T> read_vector(const S* from, int64_t count = kLanes<T>) {
    Vector<T> result{};
    if (std::is_same_v<S, T> && count >= kLanes<T>)
        std::memcpy(&result, from, VECTOR_BYTES);
    else
        for (int64_t l = 0; l < kLanes<T> && l < count; ++l) result[l] = value(from[l]);
    return result;
}
template <typename T, typename S>
FORCE_INLINE inline void write_vector(Vector<T> x, S* to, int64_t count = kLanes<T>) {
    if (std::is_same_v<S, T> && count >= kLanes<T>)
        std::memcpy(to, &x, VECTOR_BYTES);
    else
        for (int64_t l = 0; l < kLanes<T> && l < count; ++l) put(x[l], to[l]);
}

// From (lanes, count) in memory, one row after another, to `count` vectors of lanes, and the other way.
template <typename T, typename S>
inline void read_lanes(const S* from, int64_t count, Vector<T>* to) {
    for (int64_t block = 0; block < count; block += kLanes<T>) {
        Vector<T> rows[kLanes<T>];
        for (int64_t l = 0; l < kLanes<T>; ++l) rows[l] = read_vector<T>(from + l * count + block, count - block);
        transpose<T>(rows);
        for (int64_t l = 0; l < kLanes<T> && block + l < count; ++l) to[block + l] = rows[l];
    }
}
template <typename T, typename Write>
FORCE_INLINE inline void write_lanes(const Vector<T>* from, int64_t count, const Write& write) {
    for (int64_t block = 0; block < count; block += kLanes<T>) {
        Vector<T> rows[kLanes<T>];
        for (int64_t l = 0; l < kLanes<T>; ++l) rows[l] = block + l < count ? from[block + l] : Vector<T>{};
        transpose<T>(rows);
        for (int64_t l = 0; l < kLanes<T>; ++l) write(rows[l], l * count + block, count - block);
    }
}

template <typename T>
FORCE_INLINE inline void add(const T* from, int64_t count, T* to) {
    const int64_t whole = count - count % kLanes<T>;
    for (int64_t i = 0; i < whole; i += kLanes<T>) {
        Vector<T> a, b;
        std::memcpy(&a, from + i, VECTOR_BYTES);
        std::memcpy(&b, to + i, VECTOR_BYTES);
        a += b;
        std::memcpy(to + i, &a, VECTOR_BYTES);
    }
    for (int64_t i = whole; i < count; ++i) to[i] += from[i];
}

// Adds the lanes of a vector, or the first of them, to numbers in double.
template <typename T>
FORCE_INLINE inline void add_doubles(Vector<T> x, double* to, int64_t count = kLanes<T>) {
    T lanes[kLanes<T>];
    std::memcpy(lanes, &x, VECTOR_BYTES);
    if (count >= kLanes<T>) {
#pragma omp simd
        for (int64_t l = 0; l < kLanes<T>; ++l) to[l] += double(lanes[l]);
    } else {
        for (int64_t l = 0; l < count; ++l) to[l] += double(lanes[l]);
    }
}

// Asks for line i of memory that will be read or written. One at a time between other work: the processor has so many
// lines on their way at once, and whoever asks for more waits. Inline, since a function that does nothing else counts as
// one without effect, and is not called.
template <bool Write>
FORCE_INLINE inline void fetch_line(const void* at, int64_t i) {
    __builtin_prefetch(static_cast<const char*>(at) + i * 64, Write, 2);
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
template <typename T>
struct Rows {
    T* data;
    int64_t stride;
    Rows(Buffers<T>& buffers, int64_t count, int64_t stride) : data(buffers.take(count * stride)), stride(stride) {}
    T* operator[](int64_t row) const { return data + row * stride; }
};

}  // namespace
