// Layers with a recurrent state: that of a head is carried on over all tokens while the nearest cache holds it.
#include "native.h"
#include "native_calls.h"
#include "native_team.h"

namespace {

float sum_of(Lanes some) {
    float found = 0;
    for (int lane = 0; lane < LANES; lane++) found += some[lane];
    return found;
}

// A head of Mamba-2 over one token: `state` [rows, depth].
void mamba2(float* state, float kept, const float* written, const float* place, const float* look, const float* own,
            float* out, int64_t rows, int64_t depth) {
    for (int64_t row = 0; row < rows; row++, state += depth) {
        Lanes read{};
        for (int64_t at = 0; at < depth; at += LANES) {
            const Lanes now = lanes(state + at) * kept + lanes(place + at) * written[row];
            put(state + at, now);
            read += now * lanes(look + at);
        }
        out[row] = sum_of(read) + own[row];
    }
}

// N vectors of columns of a head of the gated delta rule over one token: `state` [keys, width].
template <int N>
void gated_delta(float* state, const float* key, const float* query, const float* values, const float* kept,
                 int64_t decays, float strength, float own, float* out, int64_t keys, int64_t width) {
    Lanes of_key[N]{}, of_query[N]{};
    for (int64_t row = 0; row < keys; row++) {
        const float share = kept[decays == 1 ? 0 : row];
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) {
            const Lanes now = lanes(state + row * width + i * LANES) * share;
            put(state + row * width + i * LANES, now);
            of_key[i] += now * key[row];
            of_query[i] += now * query[row];
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
        of_key[i] = (lanes(values + i * LANES) - of_key[i]) * strength;  // what is written
        put(out + i * LANES, of_query[i] + of_key[i] * own);
    }
    for (int64_t row = 0; row < keys; row++)
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) {
            float* const from = state + row * width + i * LANES;
            put(from, lanes(from) + of_key[i] * key[row]);
        }
}

}  // namespace

extern "C" {

// Each of `tokens` keeps its share [tokens, heads] of the state [heads, rows, depth], adds `written` [tokens, heads,
// rows] times `place` [tokens, heads, depth], and reads by `look`, as long: out [tokens, heads, rows], with `own`.
void carry_mamba2(float* state, const float* kept, const float* written, const float* place, const float* look,
                  const float* own, float* out, int64_t tokens, int64_t heads, int64_t rows, int64_t depth, int threads) {
    share(threads, heads, [=](int64_t head) {
        for (int64_t at = head; at < tokens * heads; at += heads)
            mamba2(state + head * rows * depth, kept[at], written + at * rows, place + at * depth, look + at * depth,
                   own + at * rows, out + at * rows, rows, depth);
    });
}

// The gated delta rule. state [heads, keys, width]; looking [tokens, heads, 2, keys]: key and query; values and out
// [tokens, heads, width]; kept [tokens, heads, decays], one or one a key; strength, own [tokens, heads].
void carry_gated_delta(float* state, const float* looking, const float* values, const float* kept,
                       const float* strength, const float* own, float* out, int64_t tokens, int64_t heads,
                       int64_t keys, int64_t width, int64_t decays, int threads) {
    share(threads, heads, [=](int64_t head) {
        for (int64_t at = head; at < tokens * heads; at += heads) {
            const float* const key = looking + at * 2 * keys;
            const auto some = [&](auto count, int64_t i) {
                gated_delta<count.value>(state + head * keys * width + i, key, key + keys, values + at * width + i,
                                         kept + at * decays, decays, strength[at], own[at], out + at * width + i, keys,
                                         width);
            };
            int64_t i = 0;
            for (; VECTORS > 1 && i + VECTORS * LANES <= width; i += VECTORS * LANES)
                some(std::integral_constant<int, VECTORS>{}, i);
            for (; i < width; i += LANES) some(std::integral_constant<int, 1>{}, i);
        }
    });
}
}
