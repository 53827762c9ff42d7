// What products and attention on a CPU share: sums that stay in registers.
//
// Compiled by native.py for the processor at hand. What a row gets follows from its own numbers alone, to the
// bit: sums of float32 are formed in one order, however many rows, threads and lanes there are.
#pragma once

#include "native_lanes.h"

#include <type_traits>

namespace {

#if defined(__AVX512F__)
constexpr int VECTORS = 4;  // of so many numbers, whose sums fit into the registers for TILE rows
#else
constexpr int VECTORS = 1;
#endif
constexpr int TILE = 6;  // rows that share what is read

inline float mean_square(const float* x, int64_t count) {
    Lanes sums = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) sums += lanes(x + i) * lanes(x + i);
    float total = 0;
    for (int lane = 0; lane < LANES; lane++) total += sums[lane];
    for (; i < count; i++) total += x[i] * x[i];
    return total / count;
}

// The sums of R rows with N vectors, in registers: an array of them a compiler may leave in memory.
template <int R, int N>
struct Sums {
    Lanes a, b, c, d;  // with one vector, a alone
    Sums<R - 1, N> others;

    void load(const float* from, int64_t stride) {
        a = lanes(from);
        if (N > 1) b = lanes(from + LANES), c = lanes(from + 2 * LANES), d = lanes(from + 3 * LANES);
        others.load(from + stride, stride);
    }
    void store(float* to, int64_t stride) const {
        put(to, a);
        if (N > 1) put(to + LANES, b), put(to + 2 * LANES, c), put(to + 3 * LANES, d);
        others.store(to + stride, stride);
    }
    // Adds each row's number times N vectors, which lie one after another.
    void add(const float* x, int64_t stride, const float* w) {
        const float* const each[] = {w, w + LANES, w + 2 * LANES, w + 3 * LANES};
        add_of(x, stride, each, 0);
    }
    // The same with vectors that lie at a place behind these pointers.
    void add_of(const float* x, int64_t stride, const float* const* each, int64_t place) {
        a += *x * lanes(each[0] + place);
        if (N > 1) {
            b += *x * lanes(each[1] + place);
            c += *x * lanes(each[2] + place);
            d += *x * lanes(each[3] + place);
        }
        others.add_of(x + stride, stride, each, place);
    }
};

template <int N>
struct Sums<0, N> {
    void load(const float*, int64_t) {}
    void store(float*, int64_t) const {}
    void add_of(const float*, int64_t, const float* const*, int64_t) {}
};

// Calls `run` with the number of rows as a constant.
template <typename Run>
void with_rows(int rows, Run run) {
    switch (rows) {
        case 1: return run(std::integral_constant<int, 1>{});
        case 2: return run(std::integral_constant<int, 2>{});
        case 3: return run(std::integral_constant<int, 3>{});
        case 4: return run(std::integral_constant<int, 4>{});
        case 5: return run(std::integral_constant<int, 5>{});
        default: return run(std::integral_constant<int, TILE>{});
    }
}

}  // namespace
