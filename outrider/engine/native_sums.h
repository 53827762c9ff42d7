// Sums of rows with a group of outputs, whose weights are read once and lie in the order in which they are read.
#pragma once

#include "native.h"

#include <algorithm>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int GROUP = VECTORS * LANES;  // outputs whose weights lie together
constexpr int FOUR = 4;      // bytes that one instruction multiplies and adds
constexpr int SIXTEEN = 16;  // rows of LINE bytes that are a tile of the processor's
constexpr int DEPTH = 1024;  // inputs of a block of weights, which the caches hold
constexpr int LINE = 64;     // bytes that the memory hands over
constexpr int SOON = 4096;   // bytes ahead

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

#if defined(__AVX2__)
#define INLINE inline __attribute__((always_inline))  // else sums would lie in memory all the time

inline __m256i sixteen(const int8_t* from) { return _mm256_cvtepi8_epi16(_mm_load_si128((const __m128i*)from)); }

// Returns sums to which products of pairs are added.
INLINE __m256i added(__m256i sums, __m256i some, __m256i others) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return _mm256_dpwssd_epi32(sums, some, others);
#else
    return _mm256_add_epi32(sums, _mm256_madd_epi16(some, others));
#endif
}

// Adds the sums of four outputs, those of even and of odd pairs side by side.
inline void add_to(double* sums, __m256i pairs) {
    const __m256d low = _mm256_cvtepi32_pd(_mm256_castsi256_si128(pairs));
    const __m256d high = _mm256_cvtepi32_pd(_mm256_extracti128_si256(pairs, 1));
    const __m256d four = _mm256_permute4x64_pd(_mm256_hadd_pd(low, high), 0xd8);
    _mm256_storeu_pd(sums, _mm256_add_pd(_mm256_loadu_pd(sums), four));
}

// Sums of R rows of whole numbers of 16 bits with V x 4 outputs.
template <int R, int V>
struct Pairwise {
    __m256i a = {}, b = {}, c = {}, d = {};  // with two vectors, a and b alone
    Pairwise<R - 1, V> others;

    INLINE void add(const int16_t* x, int64_t stride, __m256i first, __m256i second, __m256i third, __m256i fourth) {
        int64_t four;
        memcpy(&four, x, sizeof(four));
        const __m256i same = _mm256_set1_epi64x(four);
        a = added(a, same, first);
        b = added(b, same, second);
        if (V > 2) {
            c = added(c, same, third);
            d = added(d, same, fourth);
        }
        others.add(x + stride, stride, first, second, third, fourth);
    }
    // Has the sums formed by now. Else the compiler forms products of later weights first, which wait in memory.
    INLINE void keep() {
        if (V > 2) __asm__("" : "+x"(a), "+x"(b), "+x"(c), "+x"(d));
        else __asm__("" : "+x"(a), "+x"(b));
        others.keep();
    }
    INLINE void store(double* sums) const {
        add_to(sums, a);
        add_to(sums + 4, b);
        if (V > 2) add_to(sums + 8, c), add_to(sums + 12, d);
        others.store(sums + GROUP);
    }
};

template <int V>
struct Pairwise<0, V> {
    INLINE void add(const int16_t*, int64_t, __m256i, __m256i, __m256i, __m256i) {}
    INLINE void keep() {}
    INLINE void store(double*) const {}
};
#endif

// Where a tile begins to call up what will be read next, LINES for each 256 bytes that are read. A block's only
// tile calls up what comes soon; several share what follows the block, while they read this from the caches.
template <int LINES>
const char* next_of(const void* block, int64_t bytes, int share) {
    return (const char*)block + (LINES == 4 ? SOON : bytes + share * LINES * bytes / 4);
}

// Does so while a tile's `step`-th line of each group is read.
template <int LINES>
inline void call_up(const char* next, int64_t step) {
    constexpr int READ = GROUP * FOUR / LINE;  // lines of a step
    if (READ == 4) for (int i = 0; i < LINES; i++) __builtin_prefetch(next + (step * LINES + i) * LINE, 0, 2);
    else __builtin_prefetch(next + step * LINES / 4 * LINE, 0, 2);
}

// Calls `run` with how many lines each of so many tiles calls up.
template <typename Run>
void with_lines(int tiles, Run run) {
    if (tiles == 1) run(std::integral_constant<int, 4>{});
    else if (tiles < 4) run(std::integral_constant<int, 2>{});
    else run(std::integral_constant<int, 1>{});
}

// Adds to sums [R, GROUP] the products of R rows with a block of weights.
template <int R, int LINES>
void tile(const float* rows, int64_t stride, const float* weight, int64_t inputs, float* sums, int share) {
    const char* next = next_of<LINES>(weight, inputs * GROUP * sizeof(*weight), share);
    Sums<R, VECTORS> found;
    found.load(sums, GROUP);
    for (int64_t k = 0; k < inputs; k++) {
        call_up<LINES>(next, k);
        found.add(rows + k, stride, weight + k * GROUP);
    }
    found.store(sums, GROUP);
}

template <int R, int LINES>
void tile(const uint8_t* rows, int64_t stride, const int8_t* weight, int64_t inputs, int32_t* sums, int share) {
#if defined(__AVX512VNNI__)
    const char* next = next_of<LINES>(weight, inputs * GROUP, share);
    Bytewise<R> found;
    found.load(sums);
    for (int64_t k = 0; k < inputs; k += FOUR) {
        call_up<LINES>(next, k / FOUR);
        found.add(rows + k, stride, weight + k * GROUP);
    }
    found.store(sums);
#endif
}

// Of numbers up to 32,639 and weights up to 127: sums of DEPTH inputs, halved, just fit into 32 bits.
template <int R, int LINES>
void tile(const int16_t* rows, int64_t stride, const int8_t* weight, int64_t inputs, double* sums, int share) {
#if defined(__AVX2__)
    constexpr int V = R < 4 ? 4 : 2;  // what the registers hold
    const char* next = next_of<LINES>(weight, inputs * GROUP, share);
    for (int first = 0; first < GROUP; first += 4 * V) {
        Pairwise<R, V> found;
        for (int64_t k = 0; k < inputs; k += FOUR) {
            if (first == 0) call_up<LINES>(next, k / FOUR);
            const int8_t* w = weight + k * GROUP + FOUR * first;
            const __m256i one = sixteen(w), two = sixteen(w + LANES);
            if (V > 2) found.add(rows + k, stride, one, two, sixteen(w + 2 * LANES), sixteen(w + 3 * LANES));
            else found.add(rows + k, stride, one, two, one, two);
            found.keep();
        }
        found.store(sums + first);
    }
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
                with_lines(tiles, [&](auto lines) {
                    tile<some.value, lines.value>(rows + begin * depth + first, depth, weight + first * GROUP,
                                                  inputs, sums + begin * GROUP, i % (4 / lines.value));
                });
            });
        }
    }
}

#if defined(__AMX_INT8__)
// Of count rows, how many are a tile. The last tile has room for as many, whatever stands there.
int rows_of_a_tile(int count) {
    const int tiles = (count + SIXTEEN - 1) / SIXTEEN;
    return (count + tiles - 1) / tiles;
}

// Lets what was written be in memory: the compiler is not told all that instructions on tiles read.
inline void written() { __asm__ volatile("" ::: "memory"); }

// The shapes of a thread's tiles while count rows are multiplied: four of sums, one of rows, three of weights. Those
// that were there before come back, as oneDNN has shapes of its own.
class Shapes {
  public:
    explicit Shapes(int count) {
        _tile_storeconfig(&before);
        Shape shape = {};
        shape.palette = 1;
        for (int i = 0; i < 8; i++) shape.bytes[i] = LINE, shape.rows[i] = i < 5 ? rows_of_a_tile(count) : SIXTEEN;
        written();
        _tile_loadconfig(&shape);
    }
    ~Shapes() {
        if (before.palette) _tile_loadconfig(&before);
        else _tile_release();
    }

  private:
    struct Shape {
        uint8_t palette, reserved[15];
        uint16_t bytes[16];
        uint8_t rows[16];
    } before;
};

// As `tile`, of as many rows as the shapes have.
template <int LINES>
void wide_tile(const uint8_t* rows, int64_t stride, const int8_t* weight, int64_t inputs, int32_t* sums, int share) {
    constexpr int ROW = GROUP * FOUR, CALLED = SIXTEEN * LINES;
    const char* next = next_of<LINES>(weight, inputs * GROUP, share);
    _tile_loadd(0, sums, ROW);
    _tile_loadd(1, sums + LANES, ROW);
    _tile_loadd(2, sums + 2 * LANES, ROW);
    _tile_loadd(3, sums + 3 * LANES, ROW);
    for (int64_t k = 0; k < inputs; k += LINE, rows += LINE, weight += LINE * GROUP, next += CALLED * LINE) {
        for (int i = 0; i < CALLED; i++) __builtin_prefetch(next + i * LINE, 0, 2);
        _tile_loadd(4, rows, stride);
        _tile_loadd(5, weight, ROW);
        _tile_dpbusd(0, 4, 5);
        _tile_loadd(6, weight + LINE, ROW);
        _tile_dpbusd(1, 4, 6);
        _tile_loadd(7, weight + 2 * LINE, ROW);
        _tile_dpbusd(2, 4, 7);
        _tile_loadd(5, weight + 3 * LINE, ROW);
        _tile_dpbusd(3, 4, 5);
    }
    _tile_stored(0, sums, ROW);
    _tile_stored(1, sums + LANES, ROW);
    _tile_stored(2, sums + 2 * LANES, ROW);
    _tile_stored(3, sums + 3 * LANES, ROW);
}

// As `multiply`, while the shapes are those for count rows. There is room for what fills the last tile up.
void multiply_in_tiles(const uint8_t* rows, int count, int64_t depth, const int8_t* weight, int32_t* sums) {
    const int size = rows_of_a_tile(count), tiles = (count + size - 1) / size;
    memset(sums, 0, sizeof(*sums) * tiles * size * GROUP);
    written();
    for (int64_t first = 0; first < depth; first += DEPTH)
        for (int i = 0; i < tiles; i++)
            with_lines(tiles, [&](auto lines) {
                wide_tile<lines.value>(rows + i * size * depth + first, depth, weight + first * GROUP,
                                       std::min<int64_t>(DEPTH, depth - first), sums + i * size * GROUP,
                                       i % (4 / lines.value));
            });
}

// Returns whether the system lets this process use tiles (ARCH_REQ_XCOMP_PERM of their data).
bool may_use_tiles() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }
#else
struct Shapes {
    explicit Shapes(int) {}
};

void multiply_in_tiles(const uint8_t*, int, int64_t, const int8_t*, int32_t*) {}
bool may_use_tiles() { return false; }
#endif

}  // namespace
