// The one pool of threads that every parallel kernel runs on. No arithmetic and no Python here.
//
// Its threads spin for a moment after each piece of work, because the next one follows within microseconds while tokens
// are decoded, and sleep when nothing comes. The calling thread works along, so a pool of n has n - 1 threads of its own.
#pragma once

#include <cstddef>

namespace mosaic {

// Threads that work on one piece, the caller among them; at least 1. From MOSAIC_THREADS or the machine's cores until set.
unsigned thread_count();
void set_thread_count(unsigned count);

// Calls body(context, task) for every task from 0 to `tasks` - 1, each once, in any order, and returns when all are done.
// Tasks must write apart from each other; of those that throw, the first one's exception is thrown here. One call runs at
// a time; others wait.
void run_tasks(std::size_t tasks, void (*body)(void* context, std::size_t task), void* context);

// The same for a callable.
template <typename Body> void parallel_for(std::size_t tasks, const Body& body) {
    run_tasks(tasks, [](void* context, std::size_t task) { (*static_cast<const Body*>(context))(task); },
              const_cast<Body*>(&body));
}

}  // namespace mosaic
