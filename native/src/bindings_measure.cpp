// Python's view of measure.h: checks arguments, picks the instruction set, releases the GIL. No arithmetic here.
// Keep ../_native.pyi in step.
#include <pybind11/pybind11.h>

#include "buffers.h"
#include "dispatch.h"
#include "measure.h"

namespace py = pybind11;

namespace mosaic {
namespace {

void require_duration(double seconds) {
    if (!(seconds > 0.0 && seconds <= 60.0))  // nothing ends it early
        throw py::value_error("seconds is " + std::to_string(seconds) + ", expected more than 0 and at most 60");
}

double bound_read_bandwidth(const py::buffer& buffer, double seconds, const std::string& isa) {
    const Isa& chosen = isa_named(isa);
    const Buffer<const std::uint8_t> bytes("buffer", buffer);
    require_duration(seconds);
    if (bytes.count() == 0) throw py::value_error("buffer is empty, expected bytes to read");
    const py::gil_scoped_release release;
    return read_bandwidth(chosen, bytes.data(), bytes.count(), seconds);
}

double bound_multiply_add_peak(double seconds, const std::string& isa) {
    const Isa& chosen = isa_named(isa);
    require_duration(seconds);
    const py::gil_scoped_release release;
    return multiply_add_peak(chosen, seconds);
}

double bound_bf16_dot_peak(double seconds, const std::string& isa) {
    const Isa& chosen = isa_named(isa);
    require_duration(seconds);
    const py::gil_scoped_release release;
    return bf16_dot_peak(chosen, seconds);
}

}  // namespace

void bind_measure(py::module_& module) {
    using py::arg;
    module.def("read_bandwidth", bound_read_bandwidth, arg("buffer"), arg("seconds"), arg("isa") = "",
               "Bytes per second at which all threads read a buffer (uint8, much larger than the caches) once through: the "
               "median of the passes in so many seconds.");
    module.def("multiply_add_peak", bound_multiply_add_peak, arg("seconds"), arg("isa") = "",
               "Float32 operations per second of multiply-adds in registers on all threads; a multiply-add is two.");
    module.def("bf16_dot_peak", bound_bf16_dot_peak, arg("seconds"), arg("isa") = "",
               "The same of dot products of bfloat16 pairs; 0 if the instruction set has none.");
}

}  // namespace mosaic
