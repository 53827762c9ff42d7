// A speculator's guesses in one call: see speculator.py, which has the network, and native_speculator.py.
//
// What is guessed changes no text, so nothing here has to give the bits of what draws the target's tokens.
#include "native_calls.h"
#include "native.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

namespace {

constexpr int64_t CANDIDATES = 128;  // tokens of a row, the likeliest: others win hardly ever, and noise takes time
constexpr float SMALLEST_TEMPERATURE = 1e-30f;  // as in shaping.py
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;  // as in noise.py

struct Token {
    float score;
    int64_t place;  // in the row

    bool operator>(const Token& other) const { return score > other.score; }
};

uint64_t mixed(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
}

double gumbel(uint64_t key, int64_t id) {
    const uint64_t bits = mixed(key + (id + 1) * GOLDEN);
    return -std::log(-std::log(((bits >> 12) + 0.5) * 0x1p-52));
}

float largest_in(const float* row, int64_t count) {
    Lanes most = Lanes{} + row[0];
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) most = larger(lanes(row + i), most);
    float found = row[0];
    for (int lane = 0; lane < LANES; lane++) found = std::max(found, most[lane]);
    for (; i < count; i++) found = std::max(found, row[i]);
    return found;
}

// Sum of the exponentials of a row less its largest number; no number if the row holds some that are none.
float mass_of(const float* row, int64_t count, float most) {
    Lanes sums = {}, odd = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Lanes some = lanes(row + i);
        sums += exponential(some - most);
        odd += some - some;  // else 0
    }
    float found = 0;
    for (int lane = 0; lane < LANES; lane++) found += sums[lane] + odd[lane];
    for (; i < count; i++) found += std::exp(row[i] - most) + (row[i] - row[i]);
    return found;
}

// The tokens of a row that are not below a number.
void take_from(const float* row, int64_t count, float least, std::vector<Token>& found) {
    found.clear();
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Mask taken = lanes(row + i) >= least;
        bool any = false;
        for (int lane = 0; lane < LANES; lane++) any |= taken[lane] != 0;
        if (!any) continue;
        for (int lane = 0; lane < LANES; lane++)
            if (row[i + lane] >= least) found.push_back({row[i + lane], i + lane});
    }
    for (; i < count; i++)
        if (row[i] >= least) found.push_back({row[i], i});
}

// The likeliest tokens of a row, at least `wanted` if it has so many, likeliest first.
void likeliest(const float* row, int64_t count, int64_t wanted, std::vector<Token>& found) {
    float least = -std::numeric_limits<float>::infinity();
    if (const int64_t length = count / wanted; length > 1) {  // each of so many parts of the row holds one as likely
        least = largest_in(row, length);
        for (int64_t part = 1; part < wanted; part++) least = std::min(least, largest_in(row + part * length, length));
    }
    take_from(row, count, least, found);
    const int64_t kept = std::min<int64_t>(wanted, found.size());
    std::partial_sort(found.begin(), found.begin() + kept, found.end(), std::greater<Token>());
    found.resize(kept);
}

// Turns logits of tokens, likeliest first, into what a draw so far ahead takes the largest of, and leaves out what it
// cannot draw.
// The order of transforms is that of SamplingParams.
void shape(const Draw& draw, int64_t ahead, const int64_t* vocabulary, std::vector<Token>& tokens) {
    const float most = tokens[0].score, temperature = std::max(float(draw.temperature), SMALLEST_TEMPERATURE);
    for (Token& token : tokens)
        token.score = std::max((token.score - most) / temperature, -std::numeric_limits<float>::max());
    size_t kept = tokens.size();
    if (draw.top_k > 0 && size_t(draw.top_k) < kept)
        for (kept = draw.top_k; kept < tokens.size() && tokens[kept].score == tokens[kept - 1].score;) kept++;
    if (draw.top_p < 1) {
        double mass = 0, before = 0;
        for (size_t i = 0; i < kept; i++) mass += std::exp(tokens[i].score);
        size_t i = 0;
        for (; i < kept && before < draw.top_p * mass; i++) before += std::exp(tokens[i].score);
        kept = i;
    }
    if (draw.min_p > 0)
        while (kept > 1 && tokens[kept - 1].score < std::log(draw.min_p)) kept--;
    tokens.resize(std::max<size_t>(kept, 1));
    const uint64_t key = mixed(mixed(draw.seed) + (draw.position + ahead + 1) * GOLDEN);
    for (Token& token : tokens) token.score += gumbel(key, vocabulary[token.place]);
}

// Writes the ids of the best tokens of a row, and the share of each in the softmax of what the draw takes the largest
// of. Returns the first one's.
float rank(const float* row, const Speculator& speculator, const Draw& draw, int64_t ahead, int64_t* ids,
           float* shares) {
    static thread_local std::vector<Token> tokens;
    const int64_t count = speculator.head->out, ranked = speculator.ranked;
    float most = largest_in(row, count), mass = mass_of(row, count, most);
    if (std::isfinite(mass)) {
        likeliest(row, count, draw.temperature > 0 ? CANDIDATES : ranked, tokens);
        if (draw.temperature > 0) {
            shape(draw, ahead, speculator.vocabulary, tokens);
            const size_t first = std::min<size_t>(ranked, tokens.size());
            std::partial_sort(tokens.begin(), tokens.begin() + first, tokens.end(), std::greater<Token>());
            most = tokens[0].score, mass = 0;
            for (const Token& token : tokens) mass += std::exp(token.score - most);
        }
    } else {
        tokens.clear();  // a session's state may be no number: nothing is likely
    }
    for (int64_t i = 0; i < ranked; i++) {
        const bool there = i < int64_t(tokens.size());
        ids[i] = speculator.vocabulary[there ? tokens[i].place : 0];
        shares[i] = there ? std::exp(tokens[i].score - most) / mass : tokens.empty() ? NAN : 0;
    }
    return shares[0];
}

}  // namespace

extern "C" {

// Guesses behind each of n tokens, until no row survives with `least` or there are `most` guesses; returns how many; 0
// = there are no such tokens.
// states [n, H], draws [n] of the first guesses; ids, shares [most, n, ranked] are written.
int64_t guess(const Speculator* speculator, const float* states, const int64_t* tokens, int64_t n, const Draw* draws,
              int64_t most, double least, int64_t* ids, float* shares, int threads) {
    static thread_local std::vector<float> own, embedded, between, inner, logits;
    static thread_local std::vector<double> survival;
    static thread_local std::vector<int64_t> last;
    const Speculator& s = *speculator;
    for (std::vector<float>* each : {&own, &embedded, &between, &inner}) each->resize(n * s.state->out);
    logits.resize(n * s.head->out);
    survival.assign(n, 1);
    last.assign(tokens, tokens + n);
    linear(s.state, states, n, nullptr, own.data(), threads);
    for (int64_t made = 0; made < most;) {
        if (!s.embeddings.read(last.data(), n, embedded.data())) return 0;
        linear(s.own, own.data(), n, nullptr, between.data(), threads);
        linear(s.token, embedded.data(), n, between.data(), inner.data(), threads);
        gated(s.both, s.down, inner.data(), n, own.data(), threads);
        linear(s.head, own.data(), n, nullptr, logits.data(), threads);
        bool likely = false;
        for (int64_t r = 0; r < n; r++) {
            const int64_t place = made * n + r;
            survival[r] *= rank(logits.data() + r * s.head->out, s, draws[r], made, ids + place * s.ranked,
                                shares + place * s.ranked);
            last[r] = ids[place * s.ranked];
            likely |= survival[r] >= least;
        }
        made++;
        if (!likely || made == most) return made;
    }
    return 0;
}
}
