// Python's view of reader.h: keeps the memory of every read alive, lets signals through, raises what failed as OSError.
// Keep ../_native.pyi in step.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "buffers.h"
#include "reader.h"

namespace py = pybind11;

namespace mosaic {
namespace {

constexpr auto kSignalsSeen = std::chrono::milliseconds(50);  // how often a wait looks whether Ctrl-C was pressed
constexpr unsigned kMostThreads = 1024;

unsigned checked_depth(unsigned depth) {
    if (depth < 1 || depth > kMostThreads)
        throw py::value_error("depth is " + std::to_string(depth) + ", expected 1 to " + std::to_string(kMostThreads));
    return depth;
}

class PyReader {
  public:
    explicit PyReader(unsigned depth) : reader_(std::make_unique<Reader>(checked_depth(depth))) {}
    ~PyReader() { close(); }

    Ticket submit(int descriptor, std::int64_t offset, const py::buffer& out, bool speculative) {
        Reader& reader = own();
        Buffer<std::uint8_t> memory("out", out);
        if (memory.count() == 0) throw py::value_error("out is empty, expected bytes to fill");
        const Span span{descriptor, offset, memory.data(), memory.count()};
        if (offset < 0 || static_cast<std::uint64_t>(offset) > kLastByte - span.nbytes)
            throw py::value_error("offset is " + std::to_string(offset) + ", expected a place in a file");
        const Ticket ticket = ++last_ticket_;
        memory_.emplace(ticket, std::move(memory));  // before a thread can write there
        try {
            reader.submit(ticket, span, speculative);
        } catch (...) {
            memory_.erase(ticket);
            throw;
        }
        return ticket;
    }

    std::vector<Ticket> wait(const std::vector<Ticket>& tickets) {
        if (tickets.empty()) throw py::value_error("tickets: expected at least one to wait for");
        for (;;) {
            std::vector<Ticket> found = collect(tickets, kSignalsSeen);
            if (!found.empty()) return found;
            if (PyErr_CheckSignals() != 0) throw py::error_already_set();
        }
    }

    std::vector<Ticket> done(const std::vector<Ticket>& tickets) { return collect(tickets, {}); }

    void need(Ticket ticket) { own().need(ticket); }

    bool cancel(Ticket ticket) {
        const bool forgotten = own().cancel(ticket);
        if (forgotten) memory_.erase(ticket);
        return forgotten;
    }

    void close() {
        if (getpid() != process_) {
            reader_.release();  // a fork has no threads of it to end, and its locks may be held by nobody
        } else {
            const py::gil_scoped_release release;
            reader_->close();
        }
        memory_.clear();
    }

    std::size_t pending() { return own().pending(); }
    std::size_t idle() { return own().idle(); }
    std::uint64_t nbytes() { return own().nbytes(); }
    double busy_seconds() { return own().busy_seconds(); }

  private:
    static constexpr std::uint64_t kLastByte = std::numeric_limits<std::int64_t>::max();

    Reader& own() {
        if (getpid() != process_) throw std::runtime_error("a fork cannot use its parent's reader, only make one");
        return *reader_;
    }

    std::vector<Ticket> collect(const std::vector<Ticket>& tickets, std::chrono::milliseconds patience) {
        Reader& reader = own();
        try {
            std::vector<Ticket> found;
            {
                const py::gil_scoped_release release;
                found = reader.collect(tickets, patience);
            }
            for (const Ticket ticket : found) memory_.erase(ticket);
            return found;
        } catch (const ReadFailure& failure) {
            memory_.erase(failure.ticket);
            const py::object error = py::handle(PyExc_OSError)(failure.code, failure.what());
            error.attr("ticket") = failure.ticket;
            PyErr_SetObject(py::type::handle_of(error).ptr(), error.ptr());  // a subclass, by its code
            throw py::error_already_set();
        }
    }

    const pid_t process_ = getpid();
    Ticket last_ticket_ = 0;
    std::unordered_map<Ticket, Buffer<std::uint8_t>> memory_;  // of the reads that are known
    std::unique_ptr<Reader> reader_;
};

}  // namespace

void bind_reader(py::module_& module) {
    using py::arg;
    py::class_<PyReader>(module, "Reader",
                         "Reads spans of files into memory in the background, by `depth` threads that block or sleep.")
        .def(py::init<unsigned>(), arg("depth"))
        .def("submit", &PyReader::submit, arg("descriptor"), arg("offset"), arg("out"), arg("speculative") = false,
             "Queue a read that fills `out` (uint8) from `offset` on; a ticket. A speculative read begins only when no "
             "other waits. The descriptor, direct or not, must stay open and `out` be left alone until the read is "
             "collected or cancelled; the reader keeps `out` alive.")
        .def("wait", &PyReader::wait, arg("tickets"),
             "Those of the tickets that are done, at least one, in order of completion; they are forgotten. OSError "
             "for the first that failed, and only that one is forgotten. Ctrl-C forgets none.")
        .def("done", &PyReader::done, arg("tickets"), "The same without waiting: there may be none.")
        .def("need", &PyReader::need, arg("ticket"),
             "Move what has not begun of a speculative read to the needed ones.")
        .def("cancel", &PyReader::cancel, arg("ticket"),
             "Forget a read that has not begun; False if it has and so must be collected.")
        .def("close", &PyReader::close,
             "Forget all reads, end the threads; returns when no memory is written any more.")
        .def_property_readonly("pending", &PyReader::pending, "Reads that are not done.")
        .def_property_readonly("idle", &PyReader::idle, "Threads that nothing running or waiting will occupy.")
        .def_property_readonly("nbytes", &PyReader::nbytes, "Bytes read since the start.")
        .def_property_readonly("busy_seconds", &PyReader::busy_seconds,
                               "Seconds since the start in which at least one thread was reading.");
}

}  // namespace mosaic
