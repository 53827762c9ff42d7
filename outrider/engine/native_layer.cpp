// A decoder's layer in one call: what lies between its products and attention costs no more than they need.
#include "native_calls.h"

#include <vector>

extern "C" {

// y [tokens, hidden]: x through attention, and what that gives through the gated MLP, each added to what it was given.
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
    attend(step, heads, &query, &key, &value, cosines, sines, attended.data(), threads);
    linear(layer->output, attended.data(), tokens, x, between.data(), threads);
    gated(layer->both, layer->down, between.data(), tokens, y, threads);
}
}
