// See measure.h.
#include "measure.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <vector>

#include "scratch.h"
#include "thread_pool.h"

namespace mosaic {
namespace {

constexpr std::size_t kTaskBytes = 1 << 20;
constexpr std::size_t kTaskRounds = 1 << 15;    // some 0.1 ms
constexpr std::size_t kTasksPerThread = 32;     // of a pass: threads that are held up leave theirs to the others

std::atomic<std::uint64_t> sink;  // where results go that nobody wants

template <typename Pass> double median_seconds(double seconds, const Pass& pass) {
    using Clock = std::chrono::steady_clock;
    const auto since = [](Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); };
    pass();  // wakes the threads, and the wide units of the cores
    std::vector<double> times;
    const auto begin = Clock::now();
    do {
        const auto start = Clock::now();
        pass();
        times.push_back(since(start));
    } while (since(begin) < seconds);
    const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
    std::nth_element(times.begin(), middle, times.end());
    return *middle;
}

double operations_per_second(float (*kernel)(std::size_t), std::size_t operations, double seconds) {
    const std::size_t tasks = kTasksPerThread * thread_count();
    const double taken = median_seconds(seconds, [&] {
        parallel_for(tasks, [&](std::size_t) { sink += static_cast<std::uint64_t>(kernel(kTaskRounds)); });
    });
    return static_cast<double>(tasks * kTaskRounds * operations) / taken;
}

}  // namespace

double read_bandwidth(const Isa& isa, const std::uint8_t* bytes, std::size_t count, double seconds) {
    const std::size_t tasks = ceil_div(count, kTaskBytes);
    const double taken = median_seconds(seconds, [&] {
        parallel_for(tasks, [&](std::size_t task) {
            const std::size_t first = task * kTaskBytes;
            sink ^= isa.measure->read(bytes + first, std::min(kTaskBytes, count - first));
        });
    });
    return static_cast<double>(count) / taken;
}

double multiply_add_peak(const Isa& isa, double seconds) {
    return operations_per_second(isa.measure->multiply_add, isa.measure->multiply_add_operations, seconds);
}

double bf16_dot_peak(const Isa& isa, double seconds) {
    if (isa.measure->bf16_dot == nullptr) return 0.0;
    return operations_per_second(isa.measure->bf16_dot, isa.measure->bf16_dot_operations, seconds);
}

}  // namespace mosaic
