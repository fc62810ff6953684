// See reader.h.
#include "reader.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <exception>
#include <new>
#include <string>
#include <system_error>

namespace mosaic {
namespace {

// What one thread reads at a time: whole pages. With 16 threads a disk gave one expert of 3 MiB at 2.6 GB/s and eight
// at 2.5; unparted at 2.2 and 2.0, and less the more threads there were. Parts of 1 MiB: at 2.4 and 2.5.
constexpr std::size_t kPart = 512u << 10;

std::size_t bytes_into_page(const Span& span) { return static_cast<std::size_t>(span.offset) % kPage; }

// The bytes of the first part: up to the end of a page, so that all others begin on one.
std::size_t first_part(const Span& span) { return std::min(span.nbytes, kPart - bytes_into_page(span)); }

std::size_t count_parts(const Span& span) { return (bytes_into_page(span) + span.nbytes + kPart - 1) / kPart; }

std::string words(const Span& span, int error) {
    return "reading " + std::to_string(span.nbytes) + " bytes at offset " + std::to_string(span.offset) + ": " +
           (error == kFileEnded ? "the file ends before" : std::generic_category().message(error));
}

}  // namespace

ReadFailure::ReadFailure(Ticket ticket, const Span& span, int error)
    : std::runtime_error(words(span, error)), ticket(ticket), code(error == kFileEnded ? EIO : error) {}

Reader::Reader(unsigned depth)
    : depth_(depth), bounce_(static_cast<std::uint8_t*>(std::aligned_alloc(kPage, depth * kPart)), std::free) {
    if (bounce_ == nullptr) throw std::bad_alloc();
    threads_.reserve(depth);
    try {
        for (unsigned i = 0; i < depth; ++i) threads_.emplace_back([this, i] { serve(bounce_.get() + i * kPart); });
    } catch (const std::exception&) {
        const std::size_t given = threads_.size();
        close();
        throw std::runtime_error("the machine gives " + std::to_string(given) + " threads to read with, not " +
                                 std::to_string(depth));
    }
}

void Reader::close() {
    const std::lock_guard<std::mutex> closing(closing_);
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        closed_ = true;
        needed_.clear();
        speculative_.clear();
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    const std::lock_guard<std::mutex> lock(mutex_);
    reads_.clear();
    completion_.notify_all();
}

void Reader::submit(Ticket ticket, const Span& span, bool speculative) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (closed_) throw std::invalid_argument("the reader is closed");
        Read& read = reads_[ticket];
        read.ticket = ticket;
        read.span = read.rest = span;
        read.speculative = speculative;
        queue_of(read).push_back(&read);
    }
    for (std::size_t i = std::min<std::size_t>(count_parts(span), depth_); i > 0; --i) work_.notify_one();
}

std::vector<Ticket> Reader::collect(const std::vector<Ticket>& tickets, std::chrono::milliseconds patience) {
    std::unique_lock<std::mutex> lock(mutex_);
    std::vector<const Read*> done;
    const auto any_done = [&] {
        done.clear();
        for (const Ticket ticket : tickets)
            if (const Read& read = find(ticket); read.completed > 0) done.push_back(&read);
        return !done.empty();
    };
    completion_.wait_for(lock, patience, any_done);
    std::sort(done.begin(), done.end(), [](const Read* a, const Read* b) { return a->completed < b->completed; });
    done.erase(std::unique(done.begin(), done.end()), done.end());
    for (const Read* read : done)
        if (read->error != 0) {
            const ReadFailure failure(read->ticket, read->span, read->error);
            reads_.erase(read->ticket);
            throw failure;
        }
    std::vector<Ticket> found;
    for (const Read* read : done) found.push_back(read->ticket);
    for (const Ticket ticket : found) reads_.erase(ticket);
    return found;
}

void Reader::need(Ticket ticket) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Read& read = find(ticket);
    if (!read.speculative || read.rest.nbytes == 0) return;
    leave_queue(read);
    read.speculative = false;
    needed_.push_back(&read);
}

bool Reader::cancel(Ticket ticket) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Read& read = find(ticket);
    if (read.rest.nbytes < read.span.nbytes) return false;
    leave_queue(read);
    reads_.erase(ticket);
    return true;
}

std::size_t Reader::pending() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<std::size_t>(
        std::count_if(reads_.begin(), reads_.end(), [](const auto& item) { return item.second.completed == 0; }));
}

std::size_t Reader::idle() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return 0;
    std::size_t parts = running_;
    for (const auto* queue : {&needed_, &speculative_})
        for (const Read* read : *queue) parts += count_parts(read->rest);
    return depth_ - std::min<std::size_t>(parts, depth_);
}

std::uint64_t Reader::nbytes() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return nbytes_;
}

double Reader::busy_seconds() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Clock::duration now = running_ > 0 ? Clock::now() - busy_since_ : Clock::duration(0);
    return std::chrono::duration<double>(busy_ + now).count();
}

Reader::Read& Reader::find(Ticket ticket) {
    const auto found = reads_.find(ticket);
    if (found == reads_.end()) throw std::invalid_argument("there is no read with ticket " + std::to_string(ticket));
    return found->second;
}

void Reader::leave_queue(Read& read) {
    std::deque<Read*>& queue = queue_of(read);
    queue.erase(std::find(queue.begin(), queue.end(), &read));
}

void Reader::serve(std::uint8_t* bounce) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        work_.wait(lock, [this] { return closed_ || !needed_.empty() || !speculative_.empty(); });
        if (closed_) return;
        Read& read = *(needed_.empty() ? speculative_ : needed_).front();
        const Span part = begin_part(read);
        lock.unlock();
        const int error = read_exactly(part, bounce, kPart);
        lock.lock();
        end_part(read, part, error);
    }
}

Span Reader::begin_part(Read& read) {
    if (running_++ == 0) busy_since_ = Clock::now();
    ++read.running;
    Span part = read.rest;
    part.nbytes = first_part(part);
    read.rest.offset += static_cast<std::int64_t>(part.nbytes);
    read.rest.out += part.nbytes;
    read.rest.nbytes -= part.nbytes;
    if (read.rest.nbytes == 0) queue_of(read).pop_front();
    return part;
}

void Reader::end_part(Read& read, const Span& part, int error) {
    if (--running_ == 0) busy_ += Clock::now() - busy_since_;
    --read.running;
    if (error == 0) {
        nbytes_ += part.nbytes;
    } else if (read.error == 0) {
        read.error = error;
        if (read.rest.nbytes > 0 && !closed_) leave_queue(read);
        read.rest.nbytes = 0;
    }
    if (read.running > 0 || read.rest.nbytes > 0) return;
    read.completed = ++completed_;
    completion_.notify_all();
}

}  // namespace mosaic
