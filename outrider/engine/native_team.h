// Threads that share work piece by piece.
#pragma once

#include <cstdint>

using Piece = void (*)(const void* work, int64_t piece);

// Runs the pieces 0 to count - 1, on this thread and on up to threads - 1 others, as far as the system gives these.
// Returns when all have run. Nobody waits for a thread that another program keeps from its core, but for the piece
// that it has begun. If another thread of the process shares work at this time, all pieces run here. A piece that
// throws ends the process.
void share_pieces(int threads, int64_t count, Piece run, const void* work);

template <typename Work>
void share(int threads, int64_t count, const Work& work) {
    share_pieces(threads, count, [](const void* of, int64_t piece) { (*(const Work*)of)(piece); }, &work);
}
