// Where the sequences lie, and threads that share the work on them.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <new>
#include <thread>
#include <vector>

#include "segment.h"

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

int64_t tokens_in(const Layout& layout) {
    int64_t count = 0;
    for (int64_t row = 0; row < layout.rows; ++row) count += layout.length(row);
    return count;
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
