// Sums of rows with weights of 4 bits, of which BLOCK have a scale of their own, as their activations have.
//
// A block's products are whole numbers, whose sum is the same in any order; what blocks come to is added up in float32,
// one block after the other. So a row's bits do not depend on the rows beside it.
#pragma once

#include "native_sums.h"

namespace {

constexpr int BLOCK = 32;     // inputs that share a scale
constexpr int EIGHT = 8;      // outputs whose sums are a vector
constexpr int NIBBLE = 15;    // largest whole weight

// The weights of sixteen outputs for BLOCK inputs: a whole one times a step, plus the least.
struct Quads {
    uint8_t pairs[2][4][EIGHT * FOUR];  // of eight outputs each: for four inputs, and above them for those BLOCK / 2 on
    uint16_t steps[LANES], least[LANES];  // float16
};

static_assert(sizeof(Quads) == 5 * LINE, "as native_layers.py lays them out");

// Rows of bytes, their blocks' steps, and what a block's bytes come to: steps times their sum.
struct Octets {
    const int8_t* bytes;  // [n, depth]
    const float *steps, *sums;  // [n, depth / BLOCK]

    Octets from(int64_t row, int64_t block, int64_t blocks) const {
        const int64_t at = row * blocks + block;
        return {bytes + at * BLOCK, steps + at, sums + at};
    }
};

#if defined(__AVX2__)
inline __m256 eight(const uint16_t* halves) { return _mm256_cvtph_ps(_mm_load_si128((const __m128i*)halves)); }

// Eight outputs' products of whole numbers.
struct Products {
    __m256i found = {};

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    INLINE void add(__m256i weights, __m256i bytes) { found = _mm256_dpbusd_epi32(found, weights, bytes); }
    INLINE __m256 sums() const { return _mm256_cvtepi32_ps(found); }
#else
    // Those of a block, 16 pairs of at most 2 x 15 x 127 for each output in two numbers, just fit into 16 bits.
    INLINE void add(__m256i weights, __m256i bytes) {
        found = _mm256_add_epi16(found, _mm256_maddubs_epi16(weights, bytes));
    }
    INLINE __m256 sums() const { return _mm256_cvtepi32_ps(_mm256_madd_epi16(found, _mm256_set1_epi16(1))); }
#endif
};

// Sums of R rows with sixteen outputs.
template <int R>
struct Nibblewise {
    __m256 a, b;
    Products first, second;  // of the block at hand
    Nibblewise<R - 1> others;

    INLINE void load(const float* from) {
        a = _mm256_loadu_ps(from);
        b = _mm256_loadu_ps(from + EIGHT);
        others.load(from + GROUP);
    }
    INLINE void store(float* to) const {
        _mm256_storeu_ps(to, a);
        _mm256_storeu_ps(to + EIGHT, b);
        others.store(to + GROUP);
    }
    INLINE void add(const int8_t* x, int64_t stride, __m256i some, __m256i more) {
        int32_t four;
        memcpy(&four, x, FOUR);
        const __m256i same = _mm256_set1_epi32(four);
        first.add(some, same);
        second.add(more, same);
        others.add(x + stride, stride, some, more);
    }
    INLINE void settle(const float* steps, const float* sums, int64_t stride, const Quads& of) {
        const __m256 step = _mm256_set1_ps(*steps), sum = _mm256_set1_ps(*sums);
        a = _mm256_fmadd_ps(_mm256_mul_ps(eight(of.steps), step), first.sums(), a);
        b = _mm256_fmadd_ps(_mm256_mul_ps(eight(of.steps + EIGHT), step), second.sums(), b);
        a = _mm256_fmadd_ps(eight(of.least), sum, a);
        b = _mm256_fmadd_ps(eight(of.least + EIGHT), sum, b);
        first = second = {};
        others.settle(steps + stride, sums + stride, stride, of);
    }
};

template <>
struct Nibblewise<0> {
    INLINE void load(const float*) {}
    INLINE void store(float*) const {}
    INLINE void add(const int8_t*, int64_t, __m256i, __m256i) {}
    INLINE void settle(const float*, const float*, int64_t, const Quads&) {}
};

// Adds to sums [R, GROUP] the products of R rows of so many blocks with the count weights of sixteen outputs. `calls`:
// whether it calls up what is read next.
template <int R>
void nibble_tile(const Octets& rows, int64_t blocks, const Quads* weights, int64_t count, float* sums, bool calls) {
    const __m256i low = _mm256_set1_epi8(NIBBLE);
    Nibblewise<R> found;
    found.load(sums);
    for (int64_t block = 0; block < count; block++) {
        const Quads& w = weights[block];
        if (calls)
            for (int i = 0; i < 5; i++) __builtin_prefetch((const char*)&w + SOON + i * LINE, 0, 2);
        const int8_t* x = rows.bytes + block * BLOCK;
#pragma GCC unroll 1  // else sums of all products are formed in the end, and these lie in memory until then
        for (int j = 0; j < 4; j++) {
            const __m256i one = _mm256_load_si256((const __m256i*)w.pairs[0][j]);
            const __m256i two = _mm256_load_si256((const __m256i*)w.pairs[1][j]);
            found.add(x + FOUR * j, blocks * BLOCK, _mm256_and_si256(one, low), _mm256_and_si256(two, low));
            found.add(x + BLOCK / 2 + FOUR * j, blocks * BLOCK, _mm256_and_si256(_mm256_srli_epi16(one, 4), low),
                      _mm256_and_si256(_mm256_srli_epi16(two, 4), low));
        }
        found.settle(rows.steps + block, rows.sums + block, blocks, w);
    }
    found.store(sums);
}

// Makes bytes of a block of a row. Returns what one of them is worth.
inline float put_octets(const float* x, int8_t* bytes, float* sum) {
    const Lanes low = lanes(x), high = lanes(x + LANES), tops = larger(larger(low, -low), larger(high, -high));
    float largest = 0;
    for (int lane = 0; lane < LANES; lane++) largest = tops[lane] > largest ? tops[lane] : largest;
    const float many = largest > 0 ? 127 / largest : 0, step = largest / 127;
    alignas(32) int16_t whole[BLOCK];
    put_lower_half(whole, (Whole)(low * many + ONES));
    put_lower_half(whole + LANES, (Whole)(high * many + ONES));
    const __m256i some = _mm256_load_si256((const __m256i*)whole);
    const __m256i more = _mm256_load_si256((const __m256i*)(whole + LANES));
    _mm256_storeu_si256((__m256i*)bytes, _mm256_permute4x64_epi64(_mm256_packs_epi16(some, more), 0xd8));
    int total = 0;
    for (int i = 0; i < BLOCK; i++) total += bytes[i];
    *sum = step * total;
    return step;
}
#endif

// Computes the sums [count, GROUP] of rows with one group of outputs, whose weights lie by sixteen outputs.
inline void multiply(const Octets& rows, int count, int64_t blocks, const Quads* weights, float* sums) {
#if defined(__AVX2__)
    constexpr int64_t DEEP = DEPTH / BLOCK;
    memset(sums, 0, sizeof(*sums) * count * GROUP);
    const int tiles = (count + TILE - 1) / TILE;
    for (int set = 0; set < GROUP / LANES; set++, weights += blocks)
        for (int64_t first = 0; first < blocks; first += DEEP)
            for (int i = 0; i < tiles; i++) {
                const int begin = count * i / tiles, size = count * (i + 1) / tiles - begin;
                with_rows(size, [&](auto some) {
                    nibble_tile<some.value>(rows.from(begin, first, blocks), blocks, weights + first,
                                            std::min(DEEP, blocks - first), sums + begin * GROUP + set * LANES, i == 0);
                });
            }
#endif
}

}  // namespace
