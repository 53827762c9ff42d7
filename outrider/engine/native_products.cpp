// The products of a decoder's layers: weights are read once, in the order in which they lie.
//
// Whole numbers sum the same in any order; sums of float32 go over the inputs one after the other. Rows are of
// float32 and contiguous.
#include "native_calls.h"
#include "native_blocks.h"
#include "native_team.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

namespace {

constexpr int ROWS = 64;  // that share a pass over the weights
constexpr int WORTH_SHARING = 16384;  // numbers of rows to prepare: for fewer, other threads begin too late
constexpr int PIECES = 8;  // of a layer, for each thread

constexpr int LARGEST = 127;  // of a byte
constexpr int MIDDLE = 128;   // is added to bytes, which have no sign
constexpr int PARTS = 256;    // fine steps in a coarse one

// Of activations: each as it is, as a byte, as two, or as two with a scale for each block, where weights have 4 bits or 8.
enum Kind : int64_t { FLOATS, BYTES, PAIRS, NIBBLES, OCTETS };

inline bool in_blocks(const Linear& linear) { return linear.kind >= NIBBLES; }

#if defined(__AVX512VNNI__)
constexpr bool APART = true;  // the two bytes are rows of their own
#else
constexpr bool APART = false;  // a number has 16 bits, in either case
#endif

bool tiles_are_used = false;  // for bytes

float largest_of(const float* x, int64_t count) {  // as a number without a sign
    Lanes found = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Lanes some = lanes(x + i);
        found = larger(larger(some, -some), found);
    }
    float largest = 0;
    for (int lane = 0; lane < LANES; lane++) largest = std::max(largest, found[lane]);
    for (; i < count; i++) largest = std::max(largest, std::fabs(x[i]));
    return largest;
}

// Writes the numbers of a row as whole ones, with zeros behind them.
void put_whole(const float* x, int64_t count, int64_t depth, float many, int16_t* to) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) put_lower_half(to + i, (Whole)(lanes(x + i) * many + ONES));
    for (; i < depth; i++) {
        const float whole = (i < count ? x[i] * many : 0) + ONES;
        uint32_t bits;
        memcpy(&bits, &whole, sizeof(bits));
        to[i] = bits;
    }
}

// A few rows read the weights faster in other instructions.
bool runs_in_tiles(const Linear& linear, int n) {
    return tiles_are_used && !in_blocks(linear) && linear.kind * n > TILE;
}

// Rows as a linear layer multiplies them. Shared by the threads, each of which makes some.
struct Prepared {
    std::vector<float> floats;   // [ROWS, depth] as they are, or normed
    std::vector<uint8_t> bytes;  // [ROWS or 2 ROWS, depth]; of pairs the fine ones come first
    std::vector<int16_t> whole;  // [ROWS, depth], or [depth / BLOCK, n, BLOCK]; these or those
    std::vector<float> steps;    // [ROWS] what a whole number of a row is worth; or [depth / BLOCK, n]
    std::vector<float> sums;     // [depth / BLOCK, n] what a block's come to
    const float* rows;           // [n, depth] those of floats, or what was given

    void make_room(const Linear& linear) {
        if (linear.eps >= 0 || in_blocks(linear)) floats.resize(ROWS * linear.depth);
        if (in_blocks(linear)) {
            whole.resize(ROWS * linear.depth);
            steps.resize(ROWS * linear.depth / BLOCK);
            sums.resize(ROWS * linear.depth / BLOCK);
        } else if (linear.kind != FLOATS) {
            if (APART) bytes.resize(linear.kind * ROWS * linear.depth);
            else whole.resize(ROWS * linear.depth);
            steps.resize(ROWS);
        }
    }

    void prepare(const Linear& linear, const float* x, int n, int threads) {
        if (linear.kind == FLOATS && linear.eps < 0) rows = x;
        else share(n * linear.in < WORTH_SHARING ? 1 : threads, n, [&](int64_t r) { prepare_row(linear, x + r * linear.in, r, n); });
        if (linear.kind == FLOATS && linear.eps >= 0) rows = floats.data();
    }

    void prepare_row(const Linear& linear, const float* x, int r, int n) {
        float scale = linear.eps < 0 ? 1 : 1 / std::sqrt(mean_square(x, linear.in) + float(linear.eps));
        if (linear.kind == FLOATS || in_blocks(linear) || linear.norm != nullptr) {
            float* to = floats.data() + r * linear.depth;
            for (int64_t i = 0; i < linear.in; i++) to[i] = x[i] * scale;
            if (linear.norm != nullptr)
                for (int64_t i = 0; i < linear.in; i++) to[i] *= linear.norm[i];
            if (linear.kind == FLOATS) return;
            if (in_blocks(linear)) return prepare_blocks(linear, to, r, n);
            x = to, scale = 1;
        }
        const bool pairs = linear.kind == PAIRS;
        const float largest = largest_of(x, linear.in), most = pairs ? LARGEST * PARTS + LARGEST : LARGEST;
        const float many = largest > 0 ? most / largest : 0;
        steps[r] = largest / most * scale;  // a norm multiplies a row, which changes none of its whole numbers
        if (!APART) return put_whole(x, linear.in, linear.depth, many, whole.data() + r * linear.depth);
        uint8_t* fine = bytes.data() + linear.kind * r * linear.depth;
        uint8_t* coarse = pairs ? fine + linear.depth : nullptr;
        const float middle = ONES + (pairs ? MIDDLE * PARTS + MIDDLE : MIDDLE);
        int64_t i = 0;
        for (; i + LANES <= linear.in; i += LANES) {
            const Whole bits = (Whole)(lanes(x + i) * many + middle);
            put_lowest(fine + i, bits);
            if (pairs) put_lowest(coarse + i, bits >> 8);
        }
        for (; i < linear.depth; i++) {
            const float whole = (i < linear.in ? x[i] * many : 0) + middle;
            uint32_t bits;
            memcpy(&bits, &whole, sizeof(bits));
            fine[i] = bits;
            if (pairs) coarse[i] = bits >> 8;
        }
    }

    void prepare_blocks(const Linear& linear, float* x, int64_t r, int n) {
        std::fill(x + linear.in, x + linear.depth, 0.0f);
#if defined(__AVX2__)
        for (int64_t at = r, i = 0; i < linear.depth; at += n, i += BLOCK)
            steps[at] = put_block(x + i, *linear.scales, whole.data() + at * BLOCK, &sums[at]);
#endif
    }

    // Computes what n prepared rows give with a group of outputs: found [n, GROUP].
    void outputs(const Linear& linear, int n, int64_t group, float* found) const {
        const int64_t first = group * GROUP;
        if (linear.kind == FLOATS) {
            multiply(rows, n, linear.depth, (const float*)linear.weight + first * linear.depth, found);
        } else if (in_blocks(linear)) {
            const int64_t blocks = linear.depth / BLOCK, at = first / LANES * blocks;
            const Blocks given = {whole.data(), steps.data(), sums.data(), n};
            if (linear.kind == NIBBLES) multiply(given, blocks, (const Nibbles*)linear.weight + at, found);
            else multiply(given, blocks, (const Octets*)linear.weight + at, found);
        } else if (!APART) {
            alignas(64) double sums[ROWS * GROUP];
            multiply(whole.data(), n, linear.depth, (const int8_t*)linear.weight + first * linear.depth, sums);
            for (int r = 0; r < n; r++)
                for (int o = 0; o < GROUP; o++)
                    found[r * GROUP + o] = float(sums[r * GROUP + o]) * (linear.scales[first + o] * steps[r]);
        } else {
            alignas(64) int32_t sums[2 * ROWS * GROUP];
            const int8_t* weight = (const int8_t*)linear.weight + first * linear.depth;
            if (runs_in_tiles(linear, n)) multiply_in_tiles(bytes.data(), linear.kind * n, linear.depth, weight, sums);
            else multiply(bytes.data(), linear.kind * n, linear.depth, weight, sums);
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

// Lets the threads share the groups of a layer, and hands on each group that n rows are to be multiplied with.
template <typename Then>
void each_group(const Linear& linear, int n, int64_t groups, int threads, Then then) {
    const int64_t pieces = std::min<int64_t>(groups, threads * PIECES);
    share(threads, pieces, [&](int64_t piece) {
        std::optional<Shapes> shapes;
        if (runs_in_tiles(linear, n)) shapes.emplace(linear.kind * n);
        for (int64_t group = groups * piece / pieces; group < groups * (piece + 1) / pieces; group++) then(group);
    });
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

// Returns how many outputs' weights are to lie together.
int group_size() { return GROUP; }

// Lets products in 8 bits run by the processor's tiles, where it has some and they give the same sums. Returns whether.
int use_tiles() {
    constexpr int COUNT = SIXTEEN + 1, WIDTH = DEPTH + LINE;
    alignas(LINE) static uint8_t rows[2 * COUNT * WIDTH];
    alignas(LINE) static int8_t weight[WIDTH * GROUP];
    static int32_t sums[COUNT * GROUP], others[2 * COUNT * GROUP];
    for (size_t i = 0; i < sizeof(rows); i++) rows[i] = i * i % PARTS;
    for (size_t i = 0; i < sizeof(weight); i++) weight[i] = int(i * i % (2 * LARGEST + 1)) - LARGEST;
    if (!may_use_tiles()) return 0;
    const Shapes shapes(COUNT);
    multiply_in_tiles(rows, COUNT, WIDTH, weight, others);
    multiply(rows, COUNT, WIDTH, weight, sums);
    return tiles_are_used = memcmp(sums, others, sizeof(sums)) == 0;
}

// y [n, out] = added + x [n, in] @ weight.T + bias, x normed first if the layer has a norm. `added` is null or
// [n, out].
void linear(const Linear* layer, const float* x, int64_t n, const float* added, float* y, int threads) {
    static thread_local Prepared prepared;
    Prepared& shared = prepared;  // by the threads
    shared.make_room(*layer);
    for (int64_t begin = 0; begin < n; begin += ROWS) {
        const int rows = std::min<int64_t>(ROWS, n - begin);
        shared.prepare(*layer, x + begin * layer->in, rows, threads);
        each_group(*layer, rows, layer->groups, threads, [&](int64_t group) {
            alignas(64) float found[ROWS * GROUP];
            shared.outputs(*layer, rows, group, found);
            const int64_t first = begin * layer->out;
            write(*layer, rows, group, found, added == nullptr ? nullptr : added + first, y + first);
        });
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
    for (int64_t begin = 0; begin < n; begin += ROWS) {
        const int rows = std::min<int64_t>(ROWS, n - begin);
        const float* given = x + begin * both->in;
        outer.prepare(*both, given, rows, threads);
        each_group(*both, rows, half, threads, [&](int64_t group) {
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
        inner.prepare(*down, hidden.data(), rows, threads);
        each_group(*down, rows, down->groups, threads, [&](int64_t group) {
            alignas(64) float found[ROWS * GROUP];
            inner.outputs(*down, rows, group, found);
            write(*down, rows, group, found, given, y + begin * down->out);
        });
    }
}
}
