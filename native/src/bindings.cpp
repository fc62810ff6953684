// The Python module mosaic._native: checks buffers, picks the instruction set, releases the GIL, calls the kernel.
// No arithmetic here. Keep ../_native.pyi in step.
#include <pybind11/pybind11.h>

#include "buffers.h"
#include "dispatch.h"
#include "guard.h"

namespace py = pybind11;

namespace mosaic {

void bind_matrix(py::module_& module);    // bindings_matrix.cpp
void bind_measure(py::module_& module);   // bindings_measure.cpp
void bind_reader(py::module_& module);    // bindings_reader.cpp
void bind_sequence(py::module_& module);  // bindings_sequence.cpp

namespace {

// A kernel that maps `count` elements to as many others: every codec is of this kind.
template <typename In, typename Out>
void map_elements(const Buffer<const In>& in, const Buffer<Out>& out, void (*kernel)(const In*, Out*, std::size_t)) {
    out.require_count_of(in);
    out.require_apart_from(in);
    const py::gil_scoped_release release;
    kernel(in.data(), out.data(), in.count());
}

void e4m3_decode(const py::buffer& codes, const py::buffer& out, const std::string& isa) {
    const Kernels& kernels = *isa_named(isa).kernels;
    map_elements(Buffer<const std::uint8_t>("codes", codes), Buffer<float>("out", out), kernels.e4m3_decode);
}

void e4m3_encode(const py::buffer& values, const py::buffer& out, const std::string& isa) {
    const Kernels& kernels = *isa_named(isa).kernels;
    map_elements(Buffer<const float>("values", values), Buffer<std::uint8_t>("out", out), kernels.e4m3_encode);
}

void e4m3_count(const py::buffer& codes, const py::buffer& counts, const std::string& isa) {
    const Kernels& kernels = *isa_named(isa).kernels;
    const Buffer<const std::uint8_t> in("codes", codes);
    const Buffer<std::uint64_t> out("counts", counts);
    out.require_count(128);
    out.require_apart_from(in);
    const py::gil_scoped_release release;
    kernels.e4m3_count(in.data(), out.data(), in.count());
}

// The kernel for the element type at hand, between checks and the GIL.
template <typename T, typename Kernel>
py::object quantize(const py::buffer& weights, const py::buffer& codes, const py::buffer& scales,
                    const py::buffer& counts, const py::buffer& exponents, float limit, unsigned candidates,
                    unsigned step, Kernel kernel) {
    const Buffer<const T> in("weights", weights);
    const Buffer<std::uint8_t> out("codes", codes);
    const Buffer<std::uint16_t> out_scales("scales", scales);
    const Buffer<std::uint64_t> out_counts("counts", counts);
    const Buffer<std::uint64_t> out_exponents("exponents", exponents);
    in.require_matrix_of(kBlock);
    out.require_count_of(in);
    out_scales.require_count(in.count() / (kBlock * kBlock));
    out.require_apart_from(in);
    out_scales.require_apart_from(in);
    out_scales.require_apart_from(out);
    out_counts.require_count(128);
    out_exponents.require_count(256);
    QuantizeSums sums;
    bool within;
    {
        const py::gil_scoped_release release;
        within = kernel(in.data(), in.rows(), in.columns(), limit, candidates, step, out.data(), out_scales.data(),
                        out_counts.data(), out_exponents.data(), &sums);
    }
    if (!within) return py::none();
    return py::make_tuple(sums.signal, sums.noise, sums.max_abs_error, sums.zeroed, sums.amax_noise, sums.scale_min,
                          sums.scale_max);
}

py::object e4m3_quantize(const py::buffer& weights, const py::buffer& codes, const py::buffer& scales,
                         const py::buffer& counts, const py::buffer& exponents, float limit, unsigned candidates,
                         unsigned step, const std::string& isa) {
    if (candidates < 1 || candidates > 128 || step < 1 || step > 128)
        throw std::invalid_argument("candidates and step must be from 1 to 128");
    const Kernels& kernels = *isa_named(isa).kernels;
    if (weights.request().format == ElementType<std::uint16_t>::format)
        return quantize<std::uint16_t>(weights, codes, scales, counts, exponents, limit, candidates, step,
                                       kernels.quantize_bf16);
    return quantize<float>(weights, codes, scales, counts, exponents, limit, candidates, step, kernels.quantize_f32);
}

void guard(const py::buffer& mapping, const std::string& message) {
    const Buffer<const std::uint8_t> bytes("mapping", mapping);
    guard_mapping(bytes.data(), bytes.count(), message);
}

void release(const py::buffer& mapping) { release_mapping(Buffer<const std::uint8_t>("mapping", mapping).data()); }

py::tuple isa_names() {
    py::list names;
    for (const Isa& isa : supported_isas()) names.append(isa.name);
    return py::tuple(names);
}

}  // namespace
}  // namespace mosaic

PYBIND11_MODULE(_native, module) {
    using py::arg;
    module.doc() = "Mosaic's CPU kernels, one copy per instruction set.";
    module.def("isas", mosaic::isa_names,
               "The instruction sets compiled in and supported by this CPU, slowest first.");
    module.def("isa", [] { return mosaic::active_isa().name; },
               "The active instruction set: the fastest supported one, or the one that MOSAIC_ISA names.");
    module.def("e4m3_decode", mosaic::e4m3_decode, arg("codes"), arg("out"), arg("isa") = "",
               "Decode E4M3 codes (uint8) into float32, exactly; 0x7F and 0xFF become NaN.");
    module.def("e4m3_encode", mosaic::e4m3_encode, arg("values"), arg("out"), arg("isa") = "",
               "Encode float32 into E4M3 codes (uint8): nearest, ties to even, saturating; NaN becomes 0x7F or 0xFF.");
    module.def("e4m3_count", mosaic::e4m3_count, arg("codes"), arg("counts"), arg("isa") = "",
               "Add to counts (128 times uint64) how often each magnitude of E4M3 codes (uint8), the sign off, occurs.");
    module.def("e4m3_quantize", mosaic::e4m3_quantize, arg("weights"), arg("codes"), arg("scales"), arg("counts"),
               arg("exponents"), arg("limit"), arg("candidates") = 1, arg("step") = 1, arg("isa") = "",
               "Quantise weights [N, K] (float32, or bfloat16 as uint16; whole 128x128 blocks) into codes (uint8) and "
               "scales (bfloat16 as uint16): rule amax, or the least noise of `candidates` scales from that of rule amax "
               "upwards, `step` bfloat16 values apart. Adds to counts (128 times uint64) how often each magnitude occurs, and "
               "to exponents (256 times uint64) how often each biased exponent of a scale does. Returns (sum of squares, "
               "sum of squared errors, largest error, "
               "weights that became 0, sum of squared errors by rule amax, least scale, largest scale), or None if a "
               "magnitude is above `limit` or not a number.");
    module.def("guard_mapping", mosaic::guard, arg("mapping"), arg("message"),
               "A SIGBUS within these bytes prints the message on standard error and ends the process with exit code 2.");
    module.def("release_mapping", mosaic::release, arg("mapping"), "The mapping is about to go.");
    mosaic::bind_matrix(module);
    mosaic::bind_measure(module);
    mosaic::bind_reader(module);
    mosaic::bind_sequence(module);
}
