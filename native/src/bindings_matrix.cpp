// Python's view of matrix.h: weights as objects made once, over memory that Python owns and keeps.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

#include "buffers.h"
#include "matrix.h"

namespace py = pybind11;

namespace mosaic {
namespace {

// A weight [rows, columns] over the buffers it was made of, which it keeps alive.
class Matrix {
  public:
    Matrix(const py::buffer& values, const std::optional<py::buffer>& scales) : values_(values.request()) {
        if (values_.ndim != 2 || values_.size == 0 || !PyBuffer_IsContiguous(values_.view(), 'C'))
            throw std::invalid_argument("values: expected a C-contiguous matrix that is not empty");
        view_.values = values_.ptr;
        view_.rows = static_cast<std::size_t>(values_.shape[0]);
        view_.columns = static_cast<std::size_t>(values_.shape[1]);
        if (values_.format == ElementType<std::uint8_t>::format)
            view_.element = kE4M3;
        else if (values_.format == ElementType<std::uint16_t>::format)
            view_.element = kBF16;
        else if (values_.format == ElementType<float>::format)
            view_.element = kF32;
        else
            throw std::invalid_argument("values have elements of format '" + values_.format +
                                        "', expected uint8 (E4M3 codes), uint16 (bfloat16) or float32");
        view_.scales = nullptr;
        view_.scales_are_f32 = false;
        if (scales.has_value() != (view_.element == kE4M3))
            throw std::invalid_argument("scales belong to E4M3 codes and to nothing else");
        if (scales) take_scales(scales->request());
    }

    const MatrixView& view() const { return view_; }

  private:
    void take_scales(py::buffer_info&& scales) {
        const auto blocks = [](std::size_t size) { return static_cast<py::ssize_t>((size + kBlock - 1) / kBlock); };
        scales_ = std::move(scales);
        view_.scales_are_f32 = scales_.format == ElementType<float>::format;
        if (!view_.scales_are_f32 && scales_.format != ElementType<std::uint16_t>::format)
            throw std::invalid_argument("scales have elements of format '" + scales_.format +
                                        "', expected float32 or uint16 (bfloat16)");
        if (!PyBuffer_IsContiguous(scales_.view(), 'C') || scales_.ndim != 2 ||
            scales_.shape[0] != blocks(view_.rows) || scales_.shape[1] != blocks(view_.columns))
            throw std::invalid_argument("scales: expected a C-contiguous matrix with one for each 128x128 block");
        view_.scales = scales_.ptr;
    }

    py::buffer_info values_, scales_;
    MatrixView view_;
};

class Expert {
  public:
    Expert(const Matrix& gate, const Matrix& up, const Matrix& down) : view_{gate.view(), up.view(), down.view()} {
        const auto shape_is = [](const MatrixView& matrix, std::size_t rows, std::size_t columns) {
            return matrix.rows == rows && matrix.columns == columns;
        };
        if (!shape_is(view_.up, view_.gate.rows, view_.gate.columns) ||
            !shape_is(view_.down, view_.down.rows, view_.gate.rows))
            throw std::invalid_argument("gate and up [I, H] and down [H, I] do not fit together");
    }

    const ExpertView& view() const { return view_; }

  private:
    ExpertView view_;
};

// Of one sequence [T, K], or of several [B, T, K].
Activations activations_of(const Buffer<const float>& x) {
    const Shape shape = x.shape();
    if (shape.size() != 2 && shape.size() != 3) throw std::invalid_argument("x: expected two or three dimensions");
    return {x.data(), shape.size() == 3 ? shape[0] : 1, shape[shape.size() - 2]};
}

void bound_linear(const std::vector<const Matrix*>& matrices, const py::buffer& x, const std::vector<py::buffer>& y,
                  bool bf16, const std::string& isa) {
    const Isa& chosen = isa_named(isa);
    const Buffer<const float> in("x", x);
    const Activations activations = activations_of(in);
    if (matrices.empty() || matrices.size() != y.size())
        throw std::invalid_argument("y: expected as many as matrices, at least one");
    std::vector<MatrixView> views;
    std::vector<Buffer<float>> outputs;
    std::vector<float*> out;
    for (std::size_t i = 0; i < matrices.size(); ++i) {
        if (matrices[i] == nullptr) throw std::invalid_argument("matrices: one is None");
        views.push_back(matrices[i]->view());
        in.require_shape(ending_in(in.shape(), views[i].columns));
        outputs.emplace_back("y", y[i]);
        outputs[i].require_shape(ending_in(in.shape(), views[i].rows));
        outputs[i].require_apart_from(in);
        for (std::size_t other = 0; other < i; ++other) outputs[i].require_apart_from(outputs[other]);
        out.push_back(outputs[i].data());
    }
    const py::gil_scoped_release release;
    linear(chosen, views, activations, bf16, out);
}

std::vector<ExpertView> views_of(const std::vector<const Expert*>& experts) {
    if (experts.empty()) throw std::invalid_argument("experts: expected at least one");
    std::vector<ExpertView> views;
    for (const Expert* expert : experts) {
        if (expert == nullptr) throw std::invalid_argument("experts: one is None");
        views.push_back(expert->view());
    }
    for (const ExpertView& view : views)
        if (view.gate.columns != views[0].gate.columns || view.down.rows != views[0].down.rows)
            throw std::invalid_argument("experts: expected the same size of inputs, and of outputs");
    return views;
}

// The size of the last axis.
template <typename T> std::size_t last_of(const Buffer<T>& buffer) {
    const Shape shape = buffer.shape();
    if (shape.empty()) throw std::invalid_argument(buffer.argument() + ": expected at least one dimension");
    return shape.back();
}

// x [.., columns] and slots [.., ranks], at least one rank, numbers of experts from `least` on. How many ranks there are.
std::size_t require_slots(const Buffer<const std::int32_t>& slots, const Buffer<const float>& x,
                          const std::vector<ExpertView>& experts, std::int32_t least) {
    const std::size_t ranks = last_of(slots);
    x.require_shape(ending_in(x.shape(), experts[0].gate.columns));
    slots.require_shape(ending_in(x.shape(), ranks));
    if (ranks == 0) throw std::invalid_argument("slots: expected at least one expert for a token");
    for (std::size_t i = 0; i < slots.count(); ++i)
        if (slots.data()[i] < least || slots.data()[i] >= static_cast<std::int64_t>(experts.size()))
            throw std::invalid_argument("slots: expected numbers of experts");
    return ranks;
}

void bound_mix_experts(const std::vector<const Expert*>& experts, const py::buffer& slots, const py::buffer& weights,
                       const py::buffer& x, const py::buffer& y, bool bf16, const std::string& isa) {
    const Isa& chosen = isa_named(isa);
    const Buffer<const std::int32_t> places("slots", slots);
    const Buffer<const float> shares("weights", weights), in("x", x);
    const Buffer<float> out("y", y);
    const std::vector<ExpertView> views = views_of(experts);
    const Activations activations = activations_of(in);
    const std::size_t ranks = require_slots(places, in, views, 0);
    out.require_shape(ending_in(in.shape(), views[0].down.rows));
    shares.require_shape(places.shape());
    out.require_apart_from(in);
    out.require_apart_from(places);
    out.require_apart_from(shares);
    const py::gil_scoped_release release;
    mix_experts(chosen, views, places.data(), shares.data(), ranks, activations, bf16, out.data());
}

void bound_apply_experts(const std::vector<const Expert*>& experts, const py::buffer& slots, const py::buffer& x,
                         const py::buffer& outputs, bool bf16, const std::string& isa) {
    const Isa& chosen = isa_named(isa);
    const Buffer<const std::int32_t> places("slots", slots);
    const Buffer<const float> in("x", x);
    const Buffer<float> out("outputs", outputs);
    const std::vector<ExpertView> views = views_of(experts);
    const Activations activations = activations_of(in);
    const std::size_t ranks = require_slots(places, in, views, kNotNow);
    Shape expected = places.shape();
    expected.push_back(views[0].down.rows);
    out.require_shape(expected);
    out.require_apart_from(in);
    out.require_apart_from(places);
    const py::gil_scoped_release release;
    apply_experts(chosen, views, places.data(), ranks, activations, bf16, out.data());
}

void bound_add_outputs(const py::buffer& outputs, const py::buffer& weights, const py::buffer& y) {
    const Buffer<const float> in("outputs", outputs), shares("weights", weights);
    const Buffer<float> out("y", y);
    const std::size_t rows = last_of(in), ranks = last_of(shares);
    Shape expected = shares.shape();
    out.require_shape(ending_in(expected, rows));
    expected.push_back(rows);
    in.require_shape(expected);
    if (ranks == 0) throw std::invalid_argument("outputs: expected at least one expert for a token");
    out.require_apart_from(in);
    out.require_apart_from(shares);
    const py::gil_scoped_release release;
    add_outputs(in.data(), shares.data(), shares.count() / ranks, ranks, rows, out.data());
}

void bound_route(const py::buffer& logits, const std::optional<py::buffer>& shared, bool normalize,
                 const py::buffer& experts, const py::buffer& weights) {
    const Buffer<const float> in("logits", logits);
    const Buffer<std::int64_t> chosen("experts", experts);
    const Buffer<float> shares("weights", weights);
    const std::size_t count = last_of(in), ranks = last_of(chosen), top_k = ranks - (shared && ranks > 0 ? 1 : 0);
    chosen.require_shape(ending_in(in.shape(), ranks));
    shares.require_shape(chosen.shape());
    if (top_k < 1 || top_k > count) throw std::invalid_argument("experts: expected from one to as many as logits");
    std::optional<Buffer<const float>> gate;
    if (shared) {
        gate.emplace("shared", *shared);
        gate->require_shape(ending_in(in.shape(), 1));
    }
    const py::gil_scoped_release release;
    route(in.data(), in.count() / count, count, top_k, normalize, gate ? gate->data() : nullptr, chosen.data(), shares.data());
}

}  // namespace

void bind_matrix(py::module_& module) {
    using py::arg;
    py::class_<Matrix>(module, "Matrix",
                       "A weight [N, K] where it lies: E4M3 codes (uint8) with scales [ceil(N/128), ceil(K/128)] in "
                       "bfloat16 (uint16) or float32, bfloat16 (uint16), or float32. Keeps its buffers alive.")
        .def(py::init<const py::buffer&, const std::optional<py::buffer>&>(), arg("values"), arg("scales") = py::none())
        .def_property_readonly("shape", [](const Matrix& matrix) {
            return py::make_tuple(matrix.view().rows, matrix.view().columns);
        });
    py::class_<Expert>(module, "Expert", "down(silu(gate(x)) * up(x)) of three Matrix; keeps them alive.")
        .def(py::init<const Matrix&, const Matrix&, const Matrix&>(), arg("gate"), arg("up"), arg("down"),
             py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::keep_alive<1, 4>());
    module.def("linear", bound_linear, arg("matrices"), arg("x"), arg("y"), arg("bf16") = false, arg("isa") = "",
               "For each of the matrices, its y [.., N] = x [.., K] times it transposed, float32. x is of one sequence, "
               "[T, K], or of several, [B, T, K]: each gets the bits that it has alone. bf16: round x to bfloat16 where the "
               "CPU has instructions for that and the weights are E4M3.");
    module.def("mix_experts", bound_mix_experts, arg("experts"), arg("slots"), arg("weights"), arg("x"), arg("y"),
               arg("bf16") = false, arg("isa") = "",
               "y [.., H] = the sum over ranks r, in order, of weights[.., r] * experts[slots[.., r]](x[..]); slots int32. "
               "x [T, H] or [B, T, H] as in linear.");
    module.def("apply_experts", bound_apply_experts, arg("experts"), arg("slots"), arg("x"), arg("outputs"),
               arg("bf16") = false, arg("isa") = "",
               "outputs [.., R, H] = experts[slots[.., r]](x[..]); where a slot (int32) is -1 nothing is written. x as in "
               "linear.");
    module.def("add_outputs", bound_add_outputs, arg("outputs"), arg("weights"), arg("y"),
               "y [.., H] = the sum over ranks r, in order, of weights[.., r] * outputs[.., r].");
    module.def("route", bound_route, arg("logits"), arg("shared"), arg("normalize"), arg("experts"), arg("weights"),
               "The largest of logits [.., E] into experts (int64) and weights [.., top_k], best first, of equals the lower "
               "number first; softmax over the chosen if `normalize`, else over all. With shared [.., 1] the last column "
               "is expert E and sigmoid(shared).");
}

}  // namespace mosaic
