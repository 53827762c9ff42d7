// What Python calls, and what it hands over.
#pragma once

#include <cstdint>

// A linear layer, as native_layers.py has it. Groups of outputs may be filled up.
struct Linear {
    const void* weight;      // float32 [groups, depth, GROUP] or int8 [groups, depth / 4, GROUP, 4]
    const float* scales;     // [groups, GROUP], of int8
    const int32_t* sums;     // [groups, GROUP], of int8: MIDDLE x the sum of an output's weights
    const float* bias;       // [groups, GROUP], or null
    const float* norm;       // [in] weights of an RMS norm before it, or null: they are one
    const int64_t* columns;  // [groups] where the outputs of a group go
    const int64_t* counts;   // [groups] how many there are
    int64_t groups, in, depth, out, kind;  // depth: `in`, of int8 filled up to a multiple of LINE
    double eps;              // of the norm; negative = there is none
};

// Who sees what in a step, as native_attention.py has it. Slots are counted over the pool's blocks.
struct Step {
    const int64_t* blocks;     // of all sessions, one session's after another's
    const int64_t* first;      // [T] where those of a token's session begin
    const int64_t* slots;      // [T] where its key and value go
    const int64_t* positions;  // [T]
    const int64_t* ends;       // [T] it sees what stands at positions before this one in their order, and then
    const int64_t* branches;   // [T + 1] from where to where in
    const int64_t* seen;       // these slots the rest of what is before it, and itself
    int64_t tokens;
};

// How a layer attends, and its pool.
struct Heads {
    int64_t queries, keys, width, value_width, window, chunk;  // window, chunk: 0 = none
    double scale, softcap;                                      // of scores; softcap: 0 = none
    const float* sinks;                                         // [queries], or null
    float* key_pool;    // [keys, blocks, width, LANES]
    float* value_pool;  // [keys, blocks, LANES, filled value_width]
    int64_t blocks;
};

// What is given of each token's heads; the numbers of one lie side by side.
struct Given {
    const float* start;
    int64_t token, head;  // strides

    const float* of(int64_t t, int64_t h) const { return start + t * token + h * head; }
};

// The linear layers of a decoder's layer.
struct DecoderLayer {
    const Linear *inner, *output, *both, *down;  // queries, keys and values; attention's; gate and up; the MLP's
};

extern "C" {
int knows_bytes();
int use_tiles();
void linear(const Linear* layer, const float* x, int64_t n, const float* added, float* y, int threads);
void gated(const Linear* both, const Linear* down, const float* x, int64_t n, float* y, int threads);
void attend(const Step* step, const Heads* heads, const Given* query, const Given* key, const Given* value,
            const float* cosines, const float* sines, float* out, int threads);
void decoder_layer(const DecoderLayer* layer, const Step* step, const Heads* heads, const float* cosines,
                   const float* sines, const float* x, float* y, int threads);
void carry_mamba2(float* state, const float* kept, const float* written, const float* place, const float* look,
                  const float* own, float* out, int64_t tokens, int64_t heads, int64_t rows, int64_t depth, int threads);
void carry_gated_delta(float* state, const float* looking, const float* values, const float* kept,
                       const float* strength, const float* own, float* out, int64_t tokens, int64_t heads,
                       int64_t keys, int64_t width, int64_t decays, int threads);
}
