// A decoder in one call: what lies between its products and attention costs no more than it needs, and the threads that
// share these stay awake.
#include "native_calls.h"

#include <vector>

namespace {

// y [tokens, hidden]: x through attention, and what that gives through the gated MLP, each added to what it was given.
// May be x. Queries and keys are turned by the cosines and sines [positions, head width].
void decoder_layer(const DecoderLayer* layer, const Step* step, const Heads* heads, const float* cosines,
                   const float* sines, const float* x, float* y, int threads) {
    static thread_local std::vector<float> given, attended, between;
    const int64_t tokens = step->tokens, width = heads->width, row = layer->inner->out;
    given.resize(tokens * row);
    attended.resize(tokens * layer->output->in);
    between.resize(tokens * layer->output->out);
    linear(layer->inner, x, tokens, nullptr, given.data(), threads);
    const Given query = {given.data(), row, width}, key = {query.start + heads->queries * width, row, width};
    const Given value = {key.start + heads->keys * width, row, width};
    const Turning turning = {cosines, sines, layer->query_norm, layer->key_norm, layer->eps};
    attend(step, heads, &query, &key, &value, &turning, attended.data(), threads);
    linear(layer->output, attended.data(), tokens, x, between.data(), threads);
    gated(layer->both, layer->down, between.data(), tokens, y, threads);
}

}  // namespace

extern "C" {

// Runs a step of tokens with these ids, after slots have moved in all layers. heads: of each layer; cosines, sines [positions, head width]. Writes of the
// tokens to keep what goes into the last norm: states [kept, H]; and, if there is a head, what it gives: [kept, V]. Returns
// whether there are such tokens; if not, nothing was done.
int decode(const Decoder* decoder, const Heads* heads, const Step* step, const Moves* moves, const int64_t* ids,
           const float* cosines, const float* sines, const int64_t* keep, int64_t kept, float* states, float* logits,
           int threads) {
    static thread_local std::vector<float> stream;
    const int64_t width = decoder->embeddings.width;
    stream.resize(step->tokens * width);
    float* x = stream.data();
    if (!decoder->embeddings.read(ids, step->tokens, x)) return 0;
    for (int64_t i = 0; i < decoder->count; i++) {
        if (moves->count > 0) move_slots(heads + i, moves);
        decoder_layer(decoder->layers + i, step, heads + i, cosines, sines, x, x, threads);
    }
    for (int64_t row = 0; row < kept; row++) memcpy(states + row * width, x + keep[row] * width, sizeof(float) * width);
    if (decoder->head != nullptr) linear(decoder->head, states, kept, nullptr, logits, threads);
    return 1;
}
}
