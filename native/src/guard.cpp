// See guard.h. The handler runs between any two instructions of any thread: it takes no lock and no memory.
#include "guard.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <stdexcept>

namespace mosaic {
namespace {

constexpr std::size_t kMostMappings = 4096;
constexpr int kBadInput = 2;  // the exit code, as EXIT_BAD_INPUT in format/errors.py

struct Mapping {
    std::atomic<std::uintptr_t> first{0}, end{0};  // end is set last, and cleared first
    const char* message = nullptr;                 // never freed: a handler may be reading it
};

Mapping mappings[kMostMappings];
std::atomic<std::size_t> used{0};
std::mutex mutex;  // of those who add and remove
struct sigaction before;

void handle(int signal, siginfo_t* info, void* context) {
    const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
    for (std::size_t i = 0; i < used.load(std::memory_order_acquire); ++i) {
        const std::uintptr_t end = mappings[i].end.load(std::memory_order_acquire);
        if (address < mappings[i].first.load(std::memory_order_relaxed) || address >= end) continue;
        static std::atomic_flag told = ATOMIC_FLAG_INIT;
        while (told.test_and_set()) pause();  // another thread is about to end the process
        const char* const message = mappings[i].message;
        const ssize_t written = write(STDERR_FILENO, message, std::strlen(message));
        static_cast<void>(written);
        _exit(kBadInput);
    }
    if (before.sa_flags & SA_SIGINFO) {
        before.sa_sigaction(signal, info, context);
    } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
        before.sa_handler(signal);
    } else {
        sigaction(SIGBUS, &before, nullptr);  // the instruction is tried again, and now it ends the process
    }
}

}  // namespace

void guard_mapping(const void* first, std::size_t nbytes, const std::string& message) {
    const std::lock_guard<std::mutex> lock(mutex);
    static const bool installed = [] {
        struct sigaction action = {};
        action.sa_sigaction = handle;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        return sigaction(SIGBUS, &action, &before) == 0;
    }();
    static_cast<void>(installed);
    std::size_t place = 0;
    while (place < used && mappings[place].end != 0) ++place;
    if (place == kMostMappings) throw std::length_error("too many mapped files");
    char* const copy = new char[message.size() + 1];
    std::memcpy(copy, message.c_str(), message.size() + 1);
    mappings[place].message = copy;
    mappings[place].first = reinterpret_cast<std::uintptr_t>(first);
    mappings[place].end.store(reinterpret_cast<std::uintptr_t>(first) + nbytes, std::memory_order_release);
    if (place == used) used.store(place + 1, std::memory_order_release);
}

void release_mapping(const void* first) {
    const std::lock_guard<std::mutex> lock(mutex);
    for (std::size_t i = 0; i < used; ++i)
        if (mappings[i].first == reinterpret_cast<std::uintptr_t>(first)) mappings[i].end = 0;
}

}  // namespace mosaic
