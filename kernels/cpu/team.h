// Threads that run a body together, as GOMP_parallel does, and spin between two calls as long as calls follow soon.
//
// OpenMP's threads sleep between two layers of a step: on an H200 an answer took 102 us there and back, most of it for
// waking them. A call here is a number: workers spin until it changes, run the body, and count down. Who has waited for
// `spin_ns` sleeps until a call wakes it.
#include <condition_variable>
#include <mutex>
#include <thread>

static void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

struct Team {
    Team(i64 workers, i64 spin_ns) : spin_ns(spin_ns) {
        for (i64 w = 0; w < workers; w++) threads.emplace_back([this, w] { work(w); });
    }

    ~Team() {
        __atomic_store_n(&stop, true, __ATOMIC_RELAXED);
        call(0);
        for (auto& thread : threads) thread.join();
    }

    // The body runs on this thread and on others, `count` in all; returns when all are done.
    void run(Body some, void* given, i64 count) {
        body = some, argument = given;
        call(std::min(count - 1, i64(threads.size())));
        some(given);
        while (__atomic_load_n(&left.value, __ATOMIC_ACQUIRE)) pause_briefly();
    }

  private:
    static constexpr i64 MOST = 1 << 16;  // workers

    // The first `count` workers run what was written before. The count is a part of the number: a worker that is not
    // among them may look only when the next call has begun. A sleeper either sees the new number or is seen here.
    void call(i64 count) {
        __atomic_store_n(&left.value, count, __ATOMIC_RELAXED);
        __atomic_store_n(&number.value, ((number.value / MOST + 1) * MOST) | count, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&sleepers.value, __ATOMIC_SEQ_CST)) {
            { std::lock_guard<std::mutex> held(mutex); }
            woken.notify_all();
        }
    }

    void work(i64 worker) {
        for (i64 seen = 0;;) {
            seen = wait(seen);
            if (__atomic_load_n(&stop, __ATOMIC_RELAXED)) return;
            if (worker >= seen % MOST) continue;
            body(argument);
            __atomic_sub_fetch(&left.value, 1, __ATOMIC_RELEASE);
        }
    }

    // The next number after one that was seen.
    i64 wait(i64 seen) {
        i64 found;
        const i64 until = nanoseconds() + spin_ns;
        do {
            for (int times = 0; times < 64; times++) {
                if ((found = __atomic_load_n(&number.value, __ATOMIC_ACQUIRE)) != seen) return found;
                pause_briefly();
            }
        } while (nanoseconds() < until);
        __atomic_add_fetch(&sleepers.value, 1, __ATOMIC_SEQ_CST);
        std::unique_lock<std::mutex> held(mutex);
        woken.wait(held, [&] { return (found = __atomic_load_n(&number.value, __ATOMIC_SEQ_CST)) != seen; });
        __atomic_sub_fetch(&sleepers.value, 1, __ATOMIC_SEQ_CST);
        return found;
    }

    Word number = {0}, left = {0}, sleepers = {0};
    Body body = nullptr;
    void* argument = nullptr;
    i64 spin_ns;
    bool stop = false;
    std::mutex mutex;
    std::condition_variable woken;
    std::vector<std::thread> threads;  // last: they use everything above
};

static thread_local Team* team_of_thread = nullptr;

// A `Parallel` for the thread that has a team.
static void run_team(Body body, void* argument, unsigned count, unsigned) { team_of_thread->run(body, argument, count); }
