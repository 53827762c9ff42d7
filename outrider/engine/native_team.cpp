// Threads that share work piece by piece.
//
// OpenMP divides a loop before it runs, and waits at its end for every thread: where other programs take a core for
// a while, each product of a step waits for that. Here a thread takes one piece after another, and who comes late
// finds none left.
#include "native_team.h"

#include <atomic>
#include <linux/futex.h>
#include <mutex>
#include <new>
#include <pthread.h>
#include <sys/syscall.h>
#include <system_error>
#include <thread>
#include <unistd.h>

namespace {

constexpr int SPINS = 2000;  // of who waits, before it gives its core to other programs

// A number for whose change threads wait.
class alignas(64) Word {
  public:
    std::atomic<uint32_t> value{0};

    void wake() {
        if (asleep.load() > 0) syscall(SYS_futex, &value, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
    }

    void await_other_than(uint32_t seen) {
        for (int i = 0; i < SPINS; i++) {
            if (value.load(std::memory_order_acquire) != seen) return;
            __builtin_ia32_pause();
        }
        asleep++;
        syscall(SYS_futex, &value, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
        asleep--;
    }

  private:
    std::atomic<int> asleep{0};
};

class Team {
  public:
    void run(int threads, uint32_t count, Piece piece, const void* work) {
        begin(threads - 1);
        const uint32_t number = called.value.load(std::memory_order_relaxed) + 1;
        Job& job = jobs[number % 2];  // nobody takes a piece of the one before the last any more
        job.piece = piece;
        job.work = work;
        job.count = count;
        done.value = 0;
        next = uint64_t(number) << 32;
        called.value = number;
        called.wake();
        while (take(-1)) {}
        for (uint32_t found; (found = done.value) != count;) done.await_other_than(found);
    }

  private:
    struct Job {
        std::atomic<Piece> piece{nullptr};
        std::atomic<const void*> work{nullptr};
        std::atomic<uint32_t> count{0};
    };

    uint32_t helpers = 0;
    bool most = false;  // that the system gives this process
    Job jobs[2];
    Word wanted;                              // helpers of the last job
    Word called;                              // number of the last job
    Word done;                                // pieces of it
    alignas(64) std::atomic<uint64_t> next{0};  // its number, and behind that its next piece

    // Has so many helpers, or as many as the system gives, wait for work, and the others sleep.
    void begin(uint32_t count) {
        for (; helpers < count && !most; helpers++) try {
            std::thread helper(&Team::help, this, helpers);
            pthread_setname_np(helper.native_handle(), "step helper");
            helper.detach();
        } catch (const std::system_error&) {
            most = true;
            break;
        }
        if (wanted.value == count) return;
        wanted.value = count;
        wanted.wake();
    }

    void help(uint32_t helper) {
        for (;;) {
            const uint32_t heard = called.value, count = wanted.value;
            if (helper < count) {
                while (take(helper)) {}
                called.await_other_than(heard);
            } else {
                wanted.await_other_than(count);
            }
        }
    }

    // Runs a piece. Returns whether there may be another one. `helper`: -1 = who has called.
    bool take(int64_t helper) {
        uint64_t at = next;
        const Job& job = jobs[(at >> 32) % 2];
        const Piece piece = job.piece;
        const void* work = job.work;
        const uint32_t count = job.count;
        if (uint32_t(at) >= count || helper >= wanted.value) return false;
        if (!next.compare_exchange_strong(at, at + 1)) return true;  // else what was read was of that job
        piece(work, uint32_t(at));
        if (++done.value == count) done.wake();
        return true;
    }
};

Team* team = nullptr;
std::mutex in_use;

// A child has none of its parent's threads.
void forget() {
    team = nullptr;
    new (&in_use) std::mutex;
}

}  // namespace

void share_pieces(int threads, int64_t count, Piece run, const void* work) {
    std::unique_lock<std::mutex> mine(in_use, std::defer_lock);
    if (threads < 2 || count < 2 || !mine.try_lock()) {
        for (int64_t i = 0; i < count; i++) run(work, i);
        return;
    }
    if (team == nullptr) {
        static const int once = pthread_atfork(nullptr, nullptr, forget);
        (void)once;
        team = new Team;
    }
    team->run(threads, count, run, work);
}
