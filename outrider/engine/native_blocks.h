// Sums of rows with weights of 4 or 8 bits, of which BLOCK have a scale of their own, as their activations have.
//
// Activations have 16 bits. A block's products are whole numbers, whose sum is the same in any order; what blocks come
// to is added up in float32, one block after the other. So a row's bits do not depend on the rows beside it.
#pragma once

#include "native_sums.h"

namespace {

constexpr int BLOCK = 32;        // inputs that share a scale
constexpr int EIGHT = 8;         // outputs whose sums are a vector
constexpr int NIBBLE = 15;       // largest whole weight of 4 bits
constexpr int BROADEST = 32767;  // largest whole activation

// The weights of sixteen outputs for BLOCK inputs: a whole one times a step, plus the least. A word has those of an
// output for EACH inputs; those of two inputs lie in its halves at the same place.
struct Nibbles {
    static constexpr int EACH = 8;
    uint32_t words[2][BLOCK / EACH][EIGHT];
    uint16_t steps[LANES], least[LANES];  // float16
};

// As Nibbles, but from -127 to 127, and nothing to add.
struct Octets {
    static constexpr int EACH = 4;
    uint32_t words[2][BLOCK / EACH][EIGHT];
    uint16_t steps[LANES];
};

static_assert(sizeof(Nibbles) == 320 && sizeof(Octets) == 544, "as native_layers.py lays them out");

// The whole activations of n rows, what one is worth, and what a block comes to: its step times its sum. A block's rows
// lie one after another.
struct Blocks {
    const int16_t* whole;       // [blocks, n, BLOCK]
    const float *steps, *sums;  // [blocks, n]
    int64_t n;

    Blocks from(int64_t row, int64_t block) const {
        const int64_t at = block * n + row;
        return {whole + at * BLOCK, steps + at, sums + at, n};
    }
};

#if defined(__AVX2__)
inline __m256 eight(const uint16_t* halves) { return _mm256_cvtph_ps(_mm_load_si128((const __m128i*)halves)); }

// Returns the weights of words for the first pair of inputs, in 16 bits each, and moves the next one there.
INLINE __m256i next_pair(const Nibbles&, __m256i& words) {
    const __m256i found = _mm256_and_si256(words, _mm256_set1_epi16(NIBBLE));
    words = _mm256_srli_epi16(words, 4);
    return found;
}

INLINE __m256i next_pair(const Octets&, __m256i& words) {
    const __m256i found = _mm256_srai_epi16(_mm256_slli_epi16(words, 8), 8);
    words = _mm256_srli_epi16(words, 8);
    return found;
}

// Adds to the sums of eight outputs what a block comes to.
INLINE void settle(float* sums, const Nibbles& weights, int at, __m256 step, __m256 sum, __m256 found) {
    const __m256 all = _mm256_fmadd_ps(_mm256_mul_ps(eight(weights.steps + at), step), found, _mm256_loadu_ps(sums));
    _mm256_storeu_ps(sums, _mm256_fmadd_ps(eight(weights.least + at), sum, all));
}

INLINE void settle(float* sums, const Octets& weights, int at, __m256 step, __m256, __m256 found) {
    const __m256 all = _mm256_fmadd_ps(_mm256_mul_ps(eight(weights.steps + at), step), found, _mm256_loadu_ps(sums));
    _mm256_storeu_ps(sums, all);
}

// Sums of a block of R rows with V vectors of outputs, one or two.
template <int R, int V>
struct Blockwise {
    __m256i first = {}, second = {};
    Blockwise<R - 1, V> others;

    INLINE void add(const int16_t* x, __m256i some, __m256i more) {
        int32_t pair;
        memcpy(&pair, x, sizeof(pair));
        const __m256i same = _mm256_set1_epi32(pair);
        first = added(first, same, some);
        if (V == 2) second = added(second, same, more);
        others.add(x + BLOCK, some, more);
    }
    INLINE void keep() {  // as Pairwise does
        __asm__("" : "+x"(first), "+x"(second));
        others.keep();
    }
    template <typename Weights>
    INLINE void store(const Weights& of, int at, const float* steps, const float* sums, float* to) const {
        const __m256 step = _mm256_set1_ps(*steps), sum = _mm256_set1_ps(*sums);
        settle(to + at, of, at, step, sum, _mm256_cvtepi32_ps(first));
        if (V == 2) settle(to + at + EIGHT, of, at + EIGHT, step, sum, _mm256_cvtepi32_ps(second));
        others.store(of, at, steps + 1, sums + 1, to + GROUP);
    }
};

template <int V>
struct Blockwise<0, V> {
    INLINE void add(const int16_t*, __m256i, __m256i) {}
    INLINE void keep() {}
    template <typename Weights>
    INLINE void store(const Weights&, int, const float*, const float*, float*) const {}
};

// Adds to sums [R, GROUP] the products of R rows of so many blocks with the count weights of sixteen outputs. `calls`:
// whether it calls up what is read next.
template <int R, typename Weights>
void block_tile(const Blocks& rows, const Weights* weights, int64_t count, float* sums, bool calls) {
    constexpr int LINES = (sizeof(Weights) + LINE - 1) / LINE, EACH = Weights::EACH;
    constexpr int V = R < 5 ? 2 : 1;  // what the registers hold
    for (int64_t block = 0; block < count; block++) {
        const Weights& w = weights[block];
        if (calls)
            for (int i = 0; i < LINES; i++) __builtin_prefetch((const char*)&w + SOON + i * LINE, 0, 2);
        const Blocks given = rows.from(0, block);
        for (int v = 0; v < 2; v += V) {
            Blockwise<R, V> found;
            const int16_t* x = given.whole;
#pragma GCC unroll 1
            for (int j = 0; j < BLOCK / EACH; j++) {
                __m256i one = _mm256_load_si256((const __m256i*)w.words[v][j]);
                __m256i two = _mm256_load_si256((const __m256i*)w.words[v + V - 1][j]);
#pragma GCC unroll 4
                for (int pair = 0; pair < EACH / 2; pair++, x += 2) {
                    const __m256i some = next_pair(w, one), more = V == 2 ? next_pair(w, two) : some;
                    found.add(x, some, more);
                    found.keep();
                }
            }
            found.store(w, v * EIGHT, given.steps, given.sums, sums);
        }
    }
}

// Makes whole numbers of a block of a row. Returns what one is worth, times what weights are.
inline float put_block(const float* x, float worth, int16_t* whole, float* sum) {
    const Lanes low = lanes(x), high = lanes(x + LANES), tops = larger(larger(low, -low), larger(high, -high));
    float largest = 0;
    for (int lane = 0; lane < LANES; lane++) largest = tops[lane] > largest ? tops[lane] : largest;
    const float many = largest > 0 ? BROADEST / largest : 0, step = largest / BROADEST * worth;
    put_lower_half(whole, (Whole)(low * many + ONES));
    put_lower_half(whole + LANES, (Whole)(high * many + ONES));
    int total = 0;
    for (int i = 0; i < BLOCK; i++) total += whole[i];
    *sum = step * total;
    return step;
}
#endif

// Computes the sums [n, GROUP] of rows with one group of outputs, whose weights lie by sixteen outputs.
template <typename Weights>
void multiply(const Blocks& rows, int64_t blocks, const Weights* weights, float* sums) {
#if defined(__AVX2__)
    constexpr int64_t DEEP = DEPTH / BLOCK;
    memset(sums, 0, sizeof(*sums) * rows.n * GROUP);
    const int tiles = (rows.n + TILE - 1) / TILE;
    for (int set = 0; set < GROUP / LANES; set++, weights += blocks)
        for (int64_t first = 0; first < blocks; first += DEEP)
            for (int i = 0; i < tiles; i++) {
                const int begin = rows.n * i / tiles, size = rows.n * (i + 1) / tiles - begin;
                with_rows(size, [&](auto some) {
                    block_tile<some.value>(rows.from(begin, first), weights + first, std::min(DEEP, blocks - first),
                                           sums + begin * GROUP + set * LANES, i == 0);
                });
            }
#endif
}

}  // namespace
