// Reads spans of files into memory in the background, needed ones before speculative ones. No Python here.
//
// Its threads are not those of thread_pool.h: they block in pread or sleep and never spin, so that the pool has the
// cores while the disk works. A span is read in parts, by as many threads as are free: so a few large spans keep a disk
// as busy as many.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <unordered_map>
#include <vector>

#include "read_exactly.h"

namespace mosaic {

using Ticket = std::int64_t;

// A read that failed, and is forgotten.
struct ReadFailure : std::runtime_error {
    ReadFailure(Ticket ticket, const Span& span, int error);
    Ticket ticket;
    int code;  // errno; EIO where the file ended
};

// All methods may be called from any thread. A ticket that is not known (any more) is a std::invalid_argument.
class Reader {
  public:
    // std::runtime_error if the machine does not give so many threads.
    explicit Reader(unsigned depth);
    ~Reader() { close(); }

    // Queues a read under a ticket that was not used before. Memory and descriptor have to stay until it is collected,
    // cancelled, or the reader closed.
    void submit(Ticket ticket, const Span& span, bool speculative);

    // Those of the tickets that are done, in order of completion, and forgets them; waits so long for the first. Throws
    // a ReadFailure for the first that failed, if any, and then forgets that one only.
    std::vector<Ticket> collect(const std::vector<Ticket>& tickets, std::chrono::milliseconds patience);

    // A speculative read that has not begun all of its parts queues up behind the needed ones.
    void need(Ticket ticket);

    // Forgets a read that has not begun; false if it has.
    bool cancel(Ticket ticket);

    // Forgets all reads; returns when none touches its memory any more.
    void close();

    std::size_t pending() const;  // reads that are not done
    std::size_t idle() const;     // threads that are left with nothing to do
    std::uint64_t nbytes() const;  // read so far
    double busy_seconds() const;  // how long at least one thread was reading, so far

  private:
    using Clock = std::chrono::steady_clock;

    struct Read {
        Ticket ticket;
        Span span, rest;  // all of it; what no thread has begun
        bool speculative;
        unsigned running = 0;         // parts
        int error = 0;                // of read_exactly, the first
        std::uint64_t completed = 0;  // the how-manieth read to be done; 0: not yet
    };

    std::deque<Read*>& queue_of(const Read& read) { return read.speculative ? speculative_ : needed_; }
    Read& find(Ticket ticket);
    void leave_queue(Read& read);
    void serve(std::uint8_t* bounce);
    Span begin_part(Read& read);
    void end_part(Read& read, const Span& part, int error);

    const unsigned depth_;
    std::unique_ptr<std::uint8_t, void (*)(void*)> bounce_;  // a part for each thread
    std::vector<std::thread> threads_;
    std::mutex closing_;

    mutable std::mutex mutex_;  // of all that follows
    std::condition_variable work_, completion_;
    std::unordered_map<Ticket, Read> reads_;     // known
    std::deque<Read*> needed_, speculative_;  // those with parts that have not begun
    std::uint64_t completed_ = 0, nbytes_ = 0;
    unsigned running_ = 0;  // parts
    Clock::time_point busy_since_;
    Clock::duration busy_{0};
    bool closed_ = false;
};

}  // namespace mosaic
