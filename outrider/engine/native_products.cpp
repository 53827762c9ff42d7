// The products of a decoder's layers: weights are read once, in the order in which they lie.
//
// Whole numbers sum the same in any order; sums of float32 go over the inputs one after the other. Rows are of
// float32 and contiguous.
#include "native.h"

#include <algorithm>
#include <cmath>
#include <omp.h>
#include <vector>

namespace {

constexpr int GROUP = 64;    // outputs whose weights lie together
constexpr int ROWS = 64;     // that share a pass over the weights
constexpr int FOUR = 4;      // bytes that one instruction multiplies and adds
constexpr int DEPTH = 1024;  // inputs of a block of weights, which the caches hold
constexpr int LINE = 64;     // bytes that the memory hands over
constexpr int SOON = 4096;   // bytes ahead

constexpr int LARGEST = 127;  // of a byte
constexpr int MIDDLE = 128;   // is added to bytes, which have no sign
constexpr int PARTS = 256;    // fine steps in a coarse one

enum Kind : int64_t { FLOATS, BYTES, PAIRS };  // of activations: each as it is, as a byte, as two

}  // namespace

// As native_layers.py has it. Groups of outputs may be filled up.
struct Linear {
    const void* weight;      // float32 [groups, depth, GROUP] or int8 [groups, depth / 4, GROUP, 4]
    const float* scales;     // [groups, GROUP], of int8
    const int32_t* sums;     // [groups, GROUP], of int8: MIDDLE x the sum of an output's weights
    const float* bias;       // [groups, GROUP], or null
    const float* norm;       // [in] weights of an RMS norm before it, or null: they are one
    const int64_t* columns;  // [groups] where the outputs of a group go
    const int64_t* counts;   // [groups] how many there are
    int64_t groups, in, depth, out, kind;  // depth: `in`, filled up to a multiple of 4
    double eps;              // of the norm; negative = there is none
};

namespace {

#if defined(__AVX512VNNI__)
// Sums of R rows of bytes with GROUP outputs.
template <int R>
struct Bytewise {
    __m512i a, b, c, d;
    Bytewise<R - 1> others;

    void load(const int32_t* from) {
        a = _mm512_loadu_si512(from);
        b = _mm512_loadu_si512(from + LANES);
        c = _mm512_loadu_si512(from + 2 * LANES);
        d = _mm512_loadu_si512(from + 3 * LANES);
        others.load(from + GROUP);
    }
    void store(int32_t* to) const {
        _mm512_storeu_si512(to, a);
        _mm512_storeu_si512(to + LANES, b);
        _mm512_storeu_si512(to + 2 * LANES, c);
        _mm512_storeu_si512(to + 3 * LANES, d);
        others.store(to + GROUP);
    }
    void add(const uint8_t* x, int64_t stride, const int8_t* w) {
        int32_t four;
        memcpy(&four, x, FOUR);
        const __m512i same = _mm512_set1_epi32(four);
        a = _mm512_dpbusd_epi32(a, same, _mm512_load_si512(w));
        b = _mm512_dpbusd_epi32(b, same, _mm512_load_si512(w + LINE));
        c = _mm512_dpbusd_epi32(c, same, _mm512_load_si512(w + 2 * LINE));
        d = _mm512_dpbusd_epi32(d, same, _mm512_load_si512(w + 3 * LINE));
        others.add(x + stride, stride, w);
    }
};

template <>
struct Bytewise<0> {
    void load(const int32_t*) {}
    void store(int32_t*) const {}
    void add(const uint8_t*, int64_t, const int8_t*) {}
};
#endif

// Where a tile begins to call up what will be read next, LINES for each 256 bytes that are read. A block's only
// tile calls up what comes soon; several share what follows the block, while they read this from the caches.
template <int LINES>
const char* next_of(const void* block, int64_t bytes, int share) {
    return (const char*)block + (LINES == 4 ? SOON : bytes + share * LINES * bytes / 4);
}

// Adds to sums [R, GROUP] the products of R rows with a block of weights.
template <int R, int LINES>
void tile(const float* rows, int64_t stride, const float* weight, int64_t inputs, float* sums, int share) {
    const char* next = next_of<LINES>(weight, inputs * GROUP * sizeof(*weight), share);
    for (int first = 0; first < GROUP; first += VECTORS * LANES) {
        Sums<R, VECTORS> found;
        found.load(sums + first, GROUP);
        for (int64_t k = 0; k < inputs; k++) {
            for (int i = 0; i < LINES; i++) __builtin_prefetch(next + (k * LINES + i) * LINE, 0, 2);
            found.add(rows + k, stride, weight + k * GROUP + first);
        }
        found.store(sums + first, GROUP);
    }
}

template <int R, int LINES>
void tile(const uint8_t* rows, int64_t stride, const int8_t* weight, int64_t inputs, int32_t* sums, int share) {
#if defined(__AVX512VNNI__)
    const char* next = next_of<LINES>(weight, inputs * GROUP, share);
    Bytewise<R> found;
    found.load(sums);
    for (int64_t k = 0; k < inputs; k += FOUR) {
        for (int i = 0; i < LINES; i++) __builtin_prefetch(next + (k / FOUR * LINES + i) * LINE, 0, 2);
        found.add(rows + k, stride, weight + k * GROUP);
    }
    found.store(sums);
#endif
}

// Computes the sums [count, GROUP] of rows with one group of outputs.
template <typename Activation, typename Weight, typename Sum>
void multiply(const Activation* rows, int count, int64_t depth, const Weight* weight, Sum* sums) {
    memset(sums, 0, sizeof(Sum) * count * GROUP);
    const int tiles = (count + TILE - 1) / TILE;
    for (int64_t first = 0; first < depth; first += DEPTH) {
        const int64_t inputs = std::min<int64_t>(DEPTH, depth - first);
        for (int i = 0; i < tiles; i++) {
            const int begin = count * i / tiles, size = count * (i + 1) / tiles - begin;
            with_rows(size, [&](auto some) {
                auto run = [&](auto lines) {
                    tile<some.value, lines.value>(rows + begin * depth + first, depth, weight + first * GROUP,
                                                  inputs, sums + begin * GROUP, i % (4 / lines.value));
                };
                if (tiles == 1) run(std::integral_constant<int, 4>{});
                else if (tiles < 4) run(std::integral_constant<int, 2>{});
                else run(std::integral_constant<int, 1>{});
            });
        }
    }
}

float mean_square(const float* x, int64_t count) {
    Lanes sums = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) sums += lanes(x + i) * lanes(x + i);
    float total = 0;
    for (int lane = 0; lane < LANES; lane++) total += sums[lane];
    for (; i < count; i++) total += x[i] * x[i];
    return total / count;
}

float largest_of(const float* x, int64_t count) {  // as a number without a sign
    Lanes found = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Lanes some = lanes(x + i), size = some < 0 ? -some : some;
        found = size > found ? size : found;
    }
    float largest = 0;
    for (int lane = 0; lane < LANES; lane++) largest = std::max(largest, found[lane]);
    for (; i < count; i++) largest = std::max(largest, std::fabs(x[i]));
    return largest;
}

// Rows as a linear layer multiplies them. Shared by the threads, each of which makes some.
struct Prepared {
    std::vector<float> floats;   // [ROWS, depth]
    std::vector<uint8_t> bytes;  // [ROWS or 2 ROWS, depth]; of pairs the fine ones come first
    std::vector<float> steps;    // [ROWS] what a whole number of a row is worth
    const float* rows;           // [n, depth] those of floats, or what was given

    void make_room(const Linear& linear) {
        if (linear.kind == FLOATS) {
            if (linear.eps >= 0) floats.resize(ROWS * linear.depth);
        } else {
            bytes.resize(linear.kind * ROWS * linear.depth);
            steps.resize(ROWS);
        }
    }

    void prepare(const Linear& linear, const float* x, int n, int thread, int threads) {
        for (int r = thread; r < n; r += threads) prepare_row(linear, x + r * linear.in, r);
    }

    void prepare_row(const Linear& linear, const float* x, int r) {
        const float scale = linear.eps < 0 ? 1 : 1 / std::sqrt(mean_square(x, linear.in) + float(linear.eps));
        if (linear.kind == FLOATS) {
            if (linear.eps < 0) return;
            float* to = floats.data() + r * linear.depth;
            for (int64_t i = 0; i < linear.in; i++) to[i] = x[i] * scale;
            if (linear.norm != nullptr)
                for (int64_t i = 0; i < linear.in; i++) to[i] *= linear.norm[i];
            return;
        }
        const bool pairs = linear.kind == PAIRS;
        const float largest = largest_of(x, linear.in), most = pairs ? LARGEST * PARTS + LARGEST : LARGEST;
        const float many = largest > 0 ? most / largest : 0;
        steps[r] = largest / most * scale;  // a norm multiplies a row, which changes none of its whole numbers
        uint8_t* fine = bytes.data() + linear.kind * r * linear.depth;
        uint8_t* coarse = pairs ? fine + linear.depth : nullptr;
        const float middle = ONES + (pairs ? MIDDLE * PARTS + MIDDLE : MIDDLE);
        int64_t i = 0;
        for (; i + LANES <= linear.in; i += LANES) {
            const Whole bits = (Whole)(lanes(x + i) * many + middle);
            const Bytes low = __builtin_convertvector(bits, Bytes), high = __builtin_convertvector(bits >> 8, Bytes);
            memcpy(fine + i, &low, sizeof(low));
            if (pairs) memcpy(coarse + i, &high, sizeof(high));
        }
        for (; i < linear.depth; i++) {
            const float whole = (i < linear.in ? x[i] * many : 0) + middle;
            uint32_t bits;
            memcpy(&bits, &whole, sizeof(bits));
            fine[i] = bits;
            if (pairs) coarse[i] = bits >> 8;
        }
    }

    // Computes what n prepared rows give with a group of outputs: found [n, GROUP].
    void outputs(const Linear& linear, int n, int64_t group, float* found) const {
        const int64_t first = group * GROUP;
        if (linear.kind == FLOATS) {
            multiply(rows, n, linear.depth, (const float*)linear.weight + first * linear.depth, found);
        } else {
            alignas(64) int32_t sums[2 * ROWS * GROUP];
            multiply(bytes.data(), linear.kind * n, linear.depth,
                     (const int8_t*)linear.weight + first * linear.depth, sums);
            for (int r = 0; r < n; r++) {
                const int32_t* fine = sums + linear.kind * r * GROUP;
                float* to = found + r * GROUP;
                for (int o = 0; o < GROUP; o++) to[o] = fine[o] - linear.sums[first + o];
                if (linear.kind == PAIRS)
                    for (int o = 0; o < GROUP; o++)
                        to[o] += float(fine[GROUP + o] - linear.sums[first + o]) * PARTS;
                for (int o = 0; o < GROUP; o++) to[o] *= linear.scales[first + o] * steps[r];
            }
        }
        if (linear.bias != nullptr)
            for (int r = 0; r < n; r++)
                for (int o = 0; o < GROUP; o++) found[r * GROUP + o] += linear.bias[first + o];
    }
};

// Lets the threads share the groups of a layer, and hands each group's outputs on.
template <typename Then>
void each_group(int64_t groups, int thread, int threads, Then then) {
    for (int64_t group = groups * thread / threads; group < groups * (thread + 1) / threads; group++) then(group);
}

void write(const Linear& linear, int n, int64_t group, const float* found, const float* added, float* y) {
    const int64_t column = linear.columns[group], count = linear.counts[group];
    for (int r = 0; r < n; r++) {
        const int64_t first = r * linear.out + column;
        if (added == nullptr)
            memcpy(y + first, found + r * GROUP, sizeof(float) * count);
        else
            for (int64_t o = 0; o < count; o++) y[first + o] = found[r * GROUP + o] + added[first + o];
    }
}

}  // namespace

extern "C" {

// Returns whether products in 8 bits can be had, too.
int knows_bytes() {
#if defined(__AVX512VNNI__)
    return 1;
#else
    return 0;
#endif
}

// y [n, out] = added + x [n, in] @ weight.T + bias, x normed first if the layer has a norm. `added` is null or
// [n, out].
void linear(const Linear* layer, const float* x, int64_t n, const float* added, float* y, int threads) {
    static thread_local Prepared prepared;
    Prepared& shared = prepared;
    shared.make_room(*layer);
#pragma omp parallel num_threads(threads)
    for (int64_t begin = 0; begin < n; begin += ROWS) {
        const int rows = std::min<int64_t>(ROWS, n - begin);
        const int thread = omp_get_thread_num(), all = omp_get_num_threads();
        const float* given = x + begin * layer->in;
        shared.prepare(*layer, given, rows, thread, all);
#pragma omp single
        shared.rows = layer->eps < 0 ? given : shared.floats.data();
        each_group(layer->groups, thread, all, [&](int64_t group) {
            alignas(64) float found[ROWS * GROUP];
            shared.outputs(*layer, rows, group, found);
            const int64_t first = begin * layer->out;
            write(*layer, rows, group, found, added == nullptr ? nullptr : added + first, y + first);
        });
#pragma omp barrier
    }
}

// y [n, out] = x + down(silu(gate(x)) * up(x)), where the first half of the groups of `both` are gate's.
void gated(const Linear* both, const Linear* down, const float* x, int64_t n, float* y, int threads) {
    static thread_local Prepared first, second;
    static thread_local std::vector<float> between;
    Prepared &outer = first, &inner = second;
    std::vector<float>& hidden = between;
    outer.make_room(*both);
    inner.make_room(*down);
    hidden.resize(ROWS * down->in);
    const int64_t half = both->groups / 2;
#pragma omp parallel num_threads(threads)
    for (int64_t begin = 0; begin < n; begin += ROWS) {
        const int rows = std::min<int64_t>(ROWS, n - begin);
        const int thread = omp_get_thread_num(), all = omp_get_num_threads();
        const float* given = x + begin * both->in;
        outer.prepare(*both, given, rows, thread, all);
#pragma omp single
        {
            outer.rows = both->eps < 0 ? given : outer.floats.data();
            inner.rows = hidden.data();
        }
        each_group(half, thread, all, [&](int64_t group) {
            alignas(64) float gate[ROWS * GROUP], up[ROWS * GROUP];
            outer.outputs(*both, rows, group, gate);
            outer.outputs(*both, rows, half + group, up);
            for (int r = 0; r < rows; r++) {
                float* row = gate + r * GROUP;
                for (int o = 0; o < GROUP; o += LANES) {
                    const Lanes g = lanes(row + o), found = g / (1 + exponential(-g)) * lanes(up + r * GROUP + o);
                    put(row + o, found);
                }
                memcpy(hidden.data() + r * down->in + both->columns[group], row, sizeof(float) * both->counts[group]);
            }
        });
#pragma omp barrier
        inner.prepare(*down, hidden.data(), rows, thread, all);
#pragma omp barrier
        each_group(down->groups, thread, all, [&](int64_t group) {
            alignas(64) float found[ROWS * GROUP];
            inner.outputs(*down, rows, group, found);
            write(*down, rows, group, found, given, y + begin * down->out);
        });
#pragma omp barrier
    }
}
}
