// Products of small matrices, and their transposes.

#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "vectors.h"

namespace {

// To (columns, rows) from (rows, columns), both in whole vectors.
template <typename T>
void transpose(const T* from, int64_t rows, int64_t columns, T* to) {
    for (int64_t i = 0; i < rows; i += kLanes<T>)
        for (int64_t j = 0; j < columns; j += kLanes<T>) {
            Vector<T> block[kLanes<T>];
            for (int64_t l = 0; l < kLanes<T>; ++l) block[l] = vec(from + (i + l) * columns + j);
            transpose<T>(block);
            for (int64_t l = 0; l < kLanes<T>; ++l) vec(to + (j + l) * rows + i) = block[l];
        }
}

// A matrix whose element (i, j) lies at i * row + j * column.
template <typename T>
struct Matrix {
    const T* data;
    int64_t row, column;
};

// R rows and W vectors of columns of `multiply_matrices`.
template <int R, int W, bool Add, typename T>
FORCE_INLINE inline void multiply_block(Matrix<T> a, int64_t count, const T* b, int64_t columns, T* to) {
    constexpr int64_t L = kLanes<T>;
    Vector<T> sum[R][W] = {};
    for (int64_t j = 0; j < count; ++j)
        for (int r = 0; r < R; ++r)
            for (int w = 0; w < W; ++w) sum[r][w] += a.data[r * a.row + j * a.column] * vec(b + j * columns + w * L);
    for (int r = 0; r < R; ++r)
        for (int w = 0; w < W; ++w) {
            Vector<T>& at = vec(to + r * columns + w * L);
            at = Add ? at + sum[r][w] : sum[r][w];
        }
}

template <int W, bool Add, typename T>
void multiply_columns(Matrix<T> a, int64_t rows, int64_t count, const T* b, int64_t columns, T* to) {
    int64_t i = 0;
    const auto blocks_of = [&](auto size) {
        for (; i + size <= rows; i += size)
            multiply_block<size, W, Add, T>({a.data + i * a.row, a.row, a.column}, count, b, columns, to + i * columns);
    };
    blocks_of(std::integral_constant<int, VECTOR_BYTES >= 64 ? 8 : 4>());  // as many sums as there are registers for
    blocks_of(std::integral_constant<int, 4>());
    blocks_of(std::integral_constant<int, 1>());
}

// to (rows, columns) = a (rows, count) b (count, columns), or added to what is there; columns are whole vectors.
template <bool Add, typename T>
void multiply_matrices(Matrix<T> a, int64_t rows, int64_t count, const T* b, int64_t columns, T* to) {
    int64_t j = 0;
    for (; j + 2 * kLanes<T> <= columns; j += 2 * kLanes<T>)
        multiply_columns<2, Add>(a, rows, count, b + j, columns, to + j);
    if (j < columns) multiply_columns<1, Add>(a, rows, count, b + j, columns, to + j);
}

}  // namespace
