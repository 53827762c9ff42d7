// Attention to a paged pool: a token's keys are read where they lie, position after position.
//
// Keys lie by blocks of sixteen tokens, so that sixteen scores are computed side by side. A score is a sum over
// the width, a head's output one over the positions, whatever else is in the step.
#include "native.h"
#include "native_calls.h"
#include "native_team.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace {

constexpr int64_t WORTH_SHARING = 32;  // tokens to store: for fewer, other threads begin too late

int64_t filled(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

// Writes a head, scaled; turned by its position before that, as Llama does, and normed before, if it is to be.
void turn(const float* x, const Turning* turning, bool key, int64_t position, int64_t width, float scale, float* to) {
    if (turning == nullptr) {
        for (int64_t i = 0; i < width; i++) to[i] = x[i] * scale;
        return;
    }
    if (const float* norm = key ? turning->key_norm : turning->query_norm; norm != nullptr) {
        static thread_local std::vector<float> normed;
        normed.resize(width);
        const float length = 1 / std::sqrt(mean_square(x, width) + float(turning->eps));
        for (int64_t i = 0; i < width; i++) normed[i] = x[i] * length * norm[i];
        x = normed.data();
    }
    const float *cosines = turning->cosines + position * width, *sines = turning->sines + position * width;
    const int64_t half = width / 2;
    for (int64_t i = 0; i < width; i++)
        to[i] = (x[i] * cosines[i] + (i < half ? x[i + half] : x[i - half]) * sines[i]) * scale;
}

// Up to TILE rows that share a head of keys: heads of queries of consecutive tokens of one session.
struct Task {
    int64_t token, head;  // of the first row; rows go through a token's query heads, then to the next
    int rows;
};

struct Scratch {  // of a task
    std::vector<float> queries, weights, found;  // [R, D], [R, positions], [R, wide]
};

class Attention {
  public:
    Attention(const Step& step, const Heads& heads, Given query, const Turning* turning, float* out)
        : step(step), heads(heads), query(query), turning(turning), out(out), sharing(heads.queries / heads.keys), wide(filled(heads.value_width)) {}

    void store(int64_t t, Given key, Given value) const {
        const int64_t block = step.slots[t] / LANES, lane = step.slots[t] % LANES;
        std::vector<float> turned(heads.width);
        for (int64_t h = 0; h < heads.keys; h++) {
            turn(key.of(t, h), turning, true, step.positions[t], heads.width, 1, turned.data());
            float* column = key_block(h, block) + lane;
            for (int64_t i = 0; i < heads.width; i++) column[i * LANES] = turned[i];
            memcpy(value_of(h, step.slots[t]), value.of(t, h), sizeof(float) * heads.value_width);
        }
    }

    std::vector<Task> tasks() const {
        std::vector<Task> found;
        for (int64_t begin = 0, end; begin < step.tokens; begin = end) {
            for (end = begin + 1; end < step.tokens && !branched(begin) && !branched(end) &&
                                  step.first[end] == step.first[begin];)
                end++;
            const int64_t rows = (end - begin) * sharing;
            for (int64_t head = 0; head < heads.keys; head++)
                for (int64_t row = 0; row < rows; row += TILE)
                    found.push_back({begin + row / sharing, head * sharing + row % sharing,
                                     int(std::min<int64_t>(TILE, rows - row))});
        }
        return found;
    }

    void run(const Task& task) const {
        static thread_local Scratch kept;
        Attention mine = *this;
        mine.scratch = &kept;
        with_rows(task.rows, [&](auto rows) { mine.attend<rows.value>(task); });
    }

  private:
    const Step& step;
    const Heads& heads;
    Given query;
    const Turning* turning;  // null = queries and keys are as they are
    float* out;
    int64_t sharing, wide;
    Scratch* scratch = nullptr;  // of the thread

    bool branched(int64_t t) const { return step.branches[t + 1] > step.branches[t]; }
    float* key_block(int64_t h, int64_t block) const {
        return heads.key_pool + (h * heads.blocks + block) * heads.width * LANES;
    }
    float* value_of(int64_t h, int64_t slot) const { return heads.value_pool + (h * heads.blocks * LANES + slot) * wide; }

    int64_t seen_from(int64_t position) const {
        int64_t from = 0;
        if (heads.window > 0) from = std::max<int64_t>(from, position + 1 - heads.window);
        if (heads.chunk > 0) from = std::max<int64_t>(from, position / heads.chunk * heads.chunk);
        return from;
    }

    template <int R>
    void attend(const Task& task) {
        const int64_t h = task.head / sharing, width = heads.width;
        int64_t token[R], head[R], from[R], to[R];
        scratch->queries.resize(R * width);
        int64_t low = std::numeric_limits<int64_t>::max(), high = 0, least = low, most = 0;
        for (int r = 0; r < R; r++) {
            const int64_t row = task.head % sharing + r;
            token[r] = task.token + row / sharing, head[r] = h * sharing + row % sharing;
            turn(query.of(token[r], head[r]), turning, false, step.positions[token[r]], width, heads.scale,
                 &scratch->queries[r * width]);
            from[r] = seen_from(step.positions[token[r]]), to[r] = step.ends[token[r]];
            low = std::min(low, from[r]), most = std::max(most, from[r]);
            high = std::max(high, to[r]), least = std::min(least, to[r]);
        }
        const int64_t begin = std::min(low, high) / LANES * LANES;
        const int64_t* seen = step.seen + step.branches[token[0]];
        const int64_t own = step.branches[token[0] + 1] - step.branches[token[0]];
        const int64_t stride = filled(high + own - begin) + VECTORS * LANES;  // where there is room to write behind
        scratch->weights.resize(R * stride);
        const int64_t* blocks = step.blocks + step.first[token[0]];
        int64_t key = begin;
        for (; VECTORS > 1 && key + VECTORS * LANES <= high; key += VECTORS * LANES)
            score<R, VECTORS>(h, blocks + key / LANES, stride, key - begin);
        for (; key < high; key += LANES) score<R, 1>(h, blocks + key / LANES, stride, key - begin);
        for (int64_t i = 0; i < own; i++) score_one<R>(h, seen[i], stride, high - begin + i);

        scratch->found.assign(R * wide, 0);
        float sums[R];
        for (int r = 0; r < R; r++)
            sums[r] = softmax(&scratch->weights[r * stride], std::max<int64_t>(from[r] - begin, 0), to[r] + own - begin, stride, head[r]);
        // What all see is weighed together, the rest by those that see it: what others left there may be no number.
        most = std::min(std::max(most, begin), least);
        for (int r = 0; r < R; r++) weigh<1>(h, blocks, from[r], most, stride, begin, r);
        weigh<R>(h, blocks, most, least, stride, begin, 0);
        for (int r = 0; r < R; r++) weigh<1>(h, blocks, std::max(from[r], least), to[r], stride, begin, r);
        for (int64_t i = 0; i < own; i++)
            if (high + i >= low) weigh_one<R>(value_of(h, seen[i]), 1, stride, high - begin + i, 0);
        for (int r = 0; r < R; r++) {
            float* to_row = out + (token[r] * heads.queries + head[r]) * heads.value_width;
            for (int64_t i = 0; i < heads.value_width; i++) to_row[i] = scratch->found[r * wide + i] / sums[r];
        }
    }

    // Scores with N blocks of keys.
    template <int R, int N>
    void score(int64_t h, const int64_t* blocks, int64_t stride, int64_t at) {
        const float* keys[N];
        for (int n = 0; n < N; n++) keys[n] = key_block(h, blocks[n]);
        Sums<R, N> scores{};
        for (int64_t i = 0; i < heads.width; i++) scores.add_of(&scratch->queries[i], heads.width, keys, i * LANES);
        scores.store(&scratch->weights[at], stride);
    }

    template <int R>
    void score_one(int64_t h, int64_t slot, int64_t stride, int64_t at) {
        const float* key = key_block(h, slot / LANES) + slot % LANES;
        for (int r = 0; r < R; r++) {
            float score = 0;
            for (int64_t i = 0; i < heads.width; i++) score = std::fma(scratch->queries[r * heads.width + i], key[i * LANES], score);
            scratch->weights[r * stride + at] = score;
        }
    }

    // Turns scores into weights, and those outside [from, to) into zeros. Returns the sum.
    float softmax(float* row, int64_t from, int64_t to, int64_t stride, int64_t head) const {
        constexpr float LEAST = -std::numeric_limits<float>::infinity();
        const int64_t end = filled(to);
        std::fill(row, row + from, LEAST);
        std::fill(row + to, row + end, LEAST);
        const float cap = heads.softcap;
        Lanes tops = Lanes{} + LEAST;
        for (int64_t i = 0; i < end; i += LANES) {
            Lanes some = lanes(row + i);
            if (cap > 0) {
                some = cap - 2 * cap / (1 + exponential(some * (2 / cap)));  // cap * tanh(score / cap)
                put(row + i, some);
            }
            tops = larger(some, tops);
        }
        if (cap > 0) {
            std::fill(row, row + from, LEAST);
            std::fill(row + to, row + end, LEAST);
        }
        float top = heads.sinks == nullptr ? LEAST : heads.sinks[head];
        for (int lane = 0; lane < LANES; lane++) top = std::max(top, tops[lane]);
        Lanes totals = {};
        for (int64_t i = 0; i < end; i += LANES) {
            const Lanes apart = lanes(row + i) - top, weight = choose(apart < -87.0f, Lanes{}, exponential(apart));
            put(row + i, weight);
            totals += weight;
        }
        float total = 0;
        for (int lane = 0; lane < LANES; lane++) total += totals[lane];
        if (heads.sinks != nullptr) total += exponential(Lanes{} + (heads.sinks[head] - top))[0];
        return total;
    }

    // Adds the values of positions [from, to), weighed, to R rows from the `row`-th on.
    template <int R>
    void weigh(int64_t h, const int64_t* blocks, int64_t from, int64_t to, int64_t stride, int64_t begin, int row) {
        while (from < to) {
            const int64_t count = std::min(to - from, LANES - from % LANES);
            weigh_one<R>(value_of(h, blocks[from / LANES] * LANES + from % LANES), count, stride, from - begin, row);
            from += count;
        }
    }

    // The same of `count` values that lie one after another.
    template <int R>
    void weigh_one(const float* values, int64_t count, int64_t stride, int64_t at, int row) {
        int64_t i = 0;
        for (; VECTORS > 1 && i + VECTORS * LANES <= wide; i += VECTORS * LANES)
            weigh_some<R, VECTORS>(values + i, count, stride, at, row, i);
        for (; i < wide; i += LANES) weigh_some<R, 1>(values + i, count, stride, at, row, i);
    }

    template <int R, int N>
    void weigh_some(const float* values, int64_t count, int64_t stride, int64_t at, int row, int64_t i) {
        Sums<R, N> sums;
        sums.load(&scratch->found[row * wide + i], wide);
        for (int64_t j = 0; j < count; j++) sums.add(&scratch->weights[row * stride + at + j], stride, values + j * wide);
        sums.store(&scratch->found[row * wide + i], wide);
    }
};

}  // namespace

extern "C" {

// Copies what slots hold to others, all at once: one may be from where another goes.
void move_slots(const Heads* heads, const Moves* moves) {
    static thread_local std::vector<float> held;
    const int64_t width = heads->width, wide = filled(heads->value_width), slots = heads->blocks * LANES;
    held.resize(moves->count * (width + wide));
    for (int64_t h = 0; h < heads->keys; h++) {
        float* keys = heads->key_pool + h * slots * width;
        float* values = heads->value_pool + h * slots * wide;
        for (int64_t i = 0; i < moves->count; i++) {
            float* to = held.data() + i * (width + wide);
            const float* key = keys + moves->from[i] / LANES * LANES * width + moves->from[i] % LANES;
            for (int64_t k = 0; k < width; k++) to[k] = key[k * LANES];
            memcpy(to + width, values + moves->from[i] * wide, sizeof(float) * wide);
        }
        for (int64_t i = 0; i < moves->count; i++) {
            const float* from = held.data() + i * (width + wide);
            float* key = keys + moves->to[i] / LANES * LANES * width + moves->to[i] % LANES;
            for (int64_t k = 0; k < width; k++) key[k * LANES] = from[k];
            memcpy(values + moves->to[i] * wide, from + width, sizeof(float) * wide);
        }
    }
}

// Stores the step's keys and values, then lets each token see its session's: out [T, queries, value_width].
// `turning`: null = queries and keys are as they are.
void attend(const Step* step, const Heads* heads, const Given* query, const Given* key, const Given* value,
            const Turning* turning, float* out, int threads) {
    const Attention all(*step, *heads, *query, turning, out);
    const std::vector<Task> tasks = all.tasks();
    share(step->tokens < WORTH_SHARING ? 1 : threads, step->tokens, [&](int64_t t) { all.store(t, *key, *value); });
    share(threads, tasks.size(), [&](int64_t i) { all.run(tasks[i]); });
}
}
