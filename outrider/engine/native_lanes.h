// Sixteen numbers at a time, whatever the processor's own vectors hold.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;  // numbers at a time

#if defined(__AVX512F__)
typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t Whole __attribute__((vector_size(4 * LANES)));
typedef int32_t Mask __attribute__((vector_size(4 * LANES)));

inline Lanes lanes(const float* from) {
    Lanes found;
    memcpy(&found, from, sizeof(found));
    return found;
}

inline void put(float* to, Lanes some) { memcpy(to, &some, sizeof(some)); }
inline Lanes choose(Mask which, Lanes some, Lanes others) { return which ? some : others; }
#else
// Compilers keep a vector that is wider than the processor's in memory: here are two that are as wide.
template <typename Number>
struct Halves {
    typedef Number Half __attribute__((vector_size(2 * LANES)));
    Half low, high;

    Halves() : low{}, high{} {}
    Halves(Number each) : low(each - Half{}), high(each - Half{}) {}  // plus would make a -0 another number
    Halves(Half low, Half high) : low(low), high(high) {}
    template <typename Other>
    explicit Halves(Halves<Other> bits) : low((Half)bits.low), high((Half)bits.high) {}

    Number operator[](int lane) const { return lane < LANES / 2 ? low[lane] : high[lane - LANES / 2]; }
    Halves operator-() const { return {-low, -high}; }
    Halves operator<<(int bits) const { return {low << bits, high << bits}; }
    Halves operator>>(int bits) const { return {low >> bits, high >> bits}; }
    friend Halves operator+(Halves a, Halves b) { return {a.low + b.low, a.high + b.high}; }
    friend Halves operator-(Halves a, Halves b) { return {a.low - b.low, a.high - b.high}; }
    friend Halves operator*(Halves a, Halves b) { return {a.low * b.low, a.high * b.high}; }
    friend Halves operator/(Halves a, Halves b) { return {a.low / b.low, a.high / b.high}; }
    friend Halves<int32_t> operator<(Halves a, Halves b) { return {a.low < b.low, a.high < b.high}; }
    friend Halves<int32_t> operator>(Halves a, Halves b) { return {a.low > b.low, a.high > b.high}; }
    friend Halves<int32_t> operator>=(Halves a, Halves b) { return {a.low >= b.low, a.high >= b.high}; }
    void operator+=(Halves more) { *this = *this + more; }
};

typedef Halves<float> Lanes;
typedef Halves<uint32_t> Whole;
typedef Halves<int32_t> Mask;

inline Lanes lanes(const float* from) {
    Lanes found;
    memcpy(&found.low, from, sizeof(found.low));
    memcpy(&found.high, from + LANES / 2, sizeof(found.high));
    return found;
}

inline void put(float* to, Lanes some) {
    memcpy(to, &some.low, sizeof(some.low));
    memcpy(to + LANES / 2, &some.high, sizeof(some.high));
}

inline Lanes choose(Mask which, Lanes some, Lanes others) {
    return {which.low ? some.low : others.low, which.high ? some.high : others.high};
}
#endif

inline Lanes larger(Lanes some, Lanes others) { return choose(some > others, some, others); }

// A float32 of this size counts in ones: what is added to it is rounded to a whole number, in its lower bits.
constexpr float ONES = 12582912.0f;

inline void put_lowest(uint8_t* to, Whole some) {  // byte of each
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)some));  // which compilers do not come upon
#else
    for (int lane = 0; lane < LANES; lane++) to[lane] = some[lane];
#endif
}

inline void put_lower_half(int16_t* to, Whole some) {  // of each
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)some));
#elif defined(__AVX2__)
    const __m256i low = _mm256_and_si256((__m256i)some.low, _mm256_set1_epi32(0xffff));
    const __m256i high = _mm256_and_si256((__m256i)some.high, _mm256_set1_epi32(0xffff));
    _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8));
#else
    for (int lane = 0; lane < LANES; lane++) to[lane] = some[lane];
#endif
}

// exp as a polynomial: within two units in the last place.
inline Lanes exponential(Lanes x) {
    x = choose(x > 88.0f, Lanes{} + 88.0f, choose(x < -87.0f, Lanes{} - 87.0f, x));
    const Lanes turns = x * 1.44269504f + ONES, whole = turns - ONES;
    const Lanes rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    Lanes found = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    found = found * rest + 8.3334519073e-3f;
    found = found * rest + 4.1665795894e-2f;
    found = found * rest + 1.6666665459e-1f;
    found = found * rest + 5.0000001201e-1f;
    found = found * (rest * rest) + rest + 1.0f;
    return (Lanes)((Whole)found + ((Whole)turns << 23));  // the whole number is in the lower bits
}

}  // namespace
