// What Python calls, and what it hands over.
#pragma once

#include <cstdint>
#include <cstring>

// A linear layer, as native_layers.py has it. Groups of outputs may be filled up.
struct Linear {
    const void* weight;      // float32 [groups, depth, GROUP], int8 [groups, depth / 4, GROUP, 4], or blocks (native_blocks.h)
    const float* scales;     // [groups, GROUP], of int8
    const int32_t* sums;     // [groups, GROUP], of int8: MIDDLE x the sum of an output's weights
    const float* bias;       // [groups, GROUP], or null
    const float* norm;       // [in] weights of an RMS norm before it, or null: they are one, or there is none
    const int64_t* columns;  // [groups] where the outputs of a group go
    const int64_t* counts;   // [groups] how many there are
    int64_t groups, in, depth, out, kind;  // depth: `in`, of int8 filled up to a multiple of LINE, of 4 bits of BLOCK
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

// Slots whose keys and values go to others, [count] from and to, before a step stores its own.
struct Moves {
    const int64_t *from, *to;
    int64_t count;
};

// What is done to heads of queries and keys before they meet.
struct Turning {
    const float *cosines, *sines;         // [positions, width]; a sine has the sign of its half
    const float *query_norm, *key_norm;   // [width] weights of an RMS norm of each head before that, or null
    double eps;                           // of these norms
};

// What is given of each token's heads; the numbers of one lie side by side.
struct Given {
    const float* start;
    int64_t token, head;  // strides

    const float* of(int64_t t, int64_t h) const { return start + t * token + h * head; }
};

// A model's input embeddings.
struct Embeddings {
    const void* rows;  // [count, width] float32, or bfloat16 if `halves`
    int64_t count, width, halves;

    // Writes those of n tokens: [n, width]. Returns whether there are such tokens.
    bool read(const int64_t* tokens, int64_t n, float* to) const {
        for (int64_t t = 0; t < n; t++, to += width) {
            if (tokens[t] < 0 || tokens[t] >= count) return false;
            const int64_t first = tokens[t] * width;
            if (!halves) {
                memcpy(to, (const float*)rows + first, sizeof(float) * width);
                continue;
            }
            for (int64_t i = 0; i < width; i++) {
                const uint32_t bits = uint32_t(((const uint16_t*)rows)[first + i]) << 16;
                memcpy(to + i, &bits, sizeof(bits));
            }
        }
        return true;
    }
};

// The linear layers of a decoder's layer.
struct DecoderLayer {
    const Linear *inner, *output, *both, *down;  // queries, keys and values; attention's; gate and up; the MLP's
    const float *query_norm, *key_norm;          // as in Turning
    double eps;
};

// A decoder, as native_decoder.py has it.
struct Decoder {
    Embeddings embeddings;
    const DecoderLayer* layers;
    int64_t count;       // of layers
    const Linear* head;  // behind the last norm; null = the states before that are all that is told
};

// A speculator, as native_speculator.py has it. All of its layers but the first have a norm before them.
struct Speculator {
    const Linear *state, *own, *token, *both, *down, *head;
    Embeddings embeddings;      // the target's
    const int64_t* vocabulary;  // [K] the ids that it guesses
    int64_t ranked;             // tokens of each row that are told, at most K
};

// How a row's token is drawn: see SamplingParams and noise.py.
struct Draw {
    double temperature, top_p, min_p;  // temperature: 0 = greedy
    int64_t top_k;                     // 0 = none
    uint64_t seed;
    int64_t position;
};

extern "C" {
int group_size();
int use_tiles();
void linear(const Linear* layer, const float* x, int64_t n, const float* added, float* y, int threads);
void gated(const Linear* both, const Linear* down, const float* x, int64_t n, float* y, int threads);
void attend(const Step* step, const Heads* heads, const Given* query, const Given* key, const Given* value,
            const Turning* turning, float* out, int threads);
void move_slots(const Heads* heads, const Moves* moves);
int decode(const Decoder* decoder, const Heads* heads, const Step* step, const Moves* moves, const int64_t* ids,
           const float* cosines, const float* sines, const int64_t* keep, int64_t kept, float* states, float* logits,
           int threads);
int64_t guess(const Speculator* speculator, const float* states, const int64_t* tokens, int64_t n, const Draw* draws,
              int64_t most, double least, int64_t* ids, float* shares, int threads);
void carry_mamba2(float* state, const float* kept, const float* written, const float* place, const float* look,
                  const float* own, float* out, int64_t tokens, int64_t heads, int64_t rows, int64_t depth, int threads);
void carry_gated_delta(float* state, const float* looking, const float* values, const float* kept,
                       const float* strength, const float* own, float* out, int64_t tokens, int64_t heads,
                       int64_t keys, int64_t width, int64_t decays, int threads);
}
