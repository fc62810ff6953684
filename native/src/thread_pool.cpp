// See thread_pool.h.
#include "thread_pool.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#ifdef MOSAIC_X86
#include <immintrin.h>
#endif

namespace mosaic {
namespace {

constexpr auto kSpinning = std::chrono::microseconds(500);  // longer than Python takes between two operations

inline void pause() {
#ifdef MOSAIC_X86
    _mm_pause();
#endif
}

// Subnormal numbers as they are and rounding to nearest, whatever this thread has set: kernels count on it.
class PlainArithmetic {
  public:
#ifdef MOSAIC_X86
    PlainArithmetic() : before_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
    ~PlainArithmetic() { _mm_setcsr(before_); }

  private:
    unsigned before_;
#else
    PlainArithmetic() {}
#endif
};

class Pool {
  public:
    explicit Pool(unsigned count) : count_(count) {
        try {
            for (unsigned i = 1; i < count; ++i) threads_.emplace_back([this] { serve(); });
        } catch (...) {  // the machine gives no more
            end();
            throw;
        }
    }

    ~Pool() { end(); }

    unsigned count() const { return count_; }

    void run(std::size_t tasks, void (*body)(void*, std::size_t), void* context) {
        body_ = body;
        context_ = context;
        tasks_ = tasks;
        next_ = 0;
        open_ = true;
        ++generation_;
        if (sleepers_ > 0) {
            const std::lock_guard<std::mutex> lock(sleep_);
            wake_.notify_all();
        }
        work();
        open_ = false;  // who comes now finds nothing to do
        while (inside_ > 0) pause();
        if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    }

  private:
    void end() {
        {
            const std::lock_guard<std::mutex> lock(sleep_);
            ending_ = true;
            ++generation_;
        }
        wake_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }

    // The first exception of a task ends the piece: what has not begun is not begun, and the caller gets it.
    void work() {
        try {
            for (std::size_t task; (task = next_.fetch_add(1)) < tasks_;) body_(context_, task);
        } catch (...) {
            const std::lock_guard<std::mutex> lock(sleep_);
            if (!failure_) failure_ = std::current_exception();
            next_ = tasks_.load();
        }
    }

    void serve() {
        const PlainArithmetic plain;
        for (std::uint64_t seen = 0;;) {
            seen = await(seen);
            if (ending_) return;
            ++inside_;
            if (open_) work();
            --inside_;
        }
    }

    // The generation after `seen`, as soon as there is one.
    std::uint64_t await(std::uint64_t seen) {
        const auto start = std::chrono::steady_clock::now();
        do {
            for (int i = 0; i < 64; ++i) {
                if (generation_ != seen) return generation_;
                pause();
            }
        } while (std::chrono::steady_clock::now() - start < kSpinning);
        std::unique_lock<std::mutex> lock(sleep_);
        ++sleepers_;
        wake_.wait(lock, [&] { return generation_ != seen; });
        --sleepers_;
        return generation_;
    }

    const unsigned count_;
    std::vector<std::thread> threads_;

    void (*body_)(void*, std::size_t) = nullptr;
    void* context_ = nullptr;
    std::atomic<std::size_t> tasks_{0};
    alignas(64) std::atomic<std::size_t> next_{0};
    alignas(64) std::atomic<std::uint64_t> generation_{0};
    std::atomic<bool> open_{false}, ending_{false};
    std::atomic<unsigned> inside_{0}, sleepers_{0};
    std::exception_ptr failure_;  // written under sleep_, read when nobody is inside
    std::mutex sleep_;
    std::condition_variable wake_;
};

unsigned default_count() {
    if (const char* asked = std::getenv("MOSAIC_THREADS")) {
        const long count = std::strtol(asked, nullptr, 10);
        if (count >= 1 && count <= 1024) return static_cast<unsigned>(count);
    }
    const unsigned cores = std::thread::hardware_concurrency();
    return cores > 0 ? cores : 1;
}

std::mutex running;
Pool* pool = nullptr;  // never destroyed at exit: its threads may still be spinning then

// A forked child has none of its parent's threads and must not wait for them.
void forget_pool() {
    pool = nullptr;
    new (&running) std::mutex;
}

Pool& the_pool() {
    if (pool == nullptr) {
        static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
        (void)registered;
        pool = new Pool(default_count());
    }
    return *pool;
}

}  // namespace

unsigned thread_count() {
    const std::lock_guard<std::mutex> lock(running);
    return the_pool().count();
}

void set_thread_count(unsigned count) {
    const std::lock_guard<std::mutex> lock(running);
    if (the_pool().count() == count) return;
    delete std::exchange(pool, nullptr);
    pool = new Pool(count > 0 ? count : 1);
}

void run_tasks(std::size_t tasks, void (*body)(void* context, std::size_t task), void* context) {
    const std::lock_guard<std::mutex> lock(running);
    Pool& workers = the_pool();
    const PlainArithmetic plain;
    if (tasks <= 1 || workers.count() == 1) {
        for (std::size_t task = 0; task < tasks; ++task) body(context, task);
        return;
    }
    workers.run(tasks, body, context);
}

}  // namespace mosaic
