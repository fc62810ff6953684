// Python's view of sequence.h: checks shapes, picks the instruction set, releases the GIL. No arithmetic here.
// Keep ../_native.pyi in step.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "buffers.h"
#include "dispatch.h"
#include "sequence.h"
#include "thread_pool.h"

namespace py = pybind11;

namespace mosaic {
namespace {

using In = Buffer<const float>;
using Out = Buffer<float>;
using Release = py::gil_scoped_release;

void require(bool condition, const std::string& otherwise) {
    if (!condition) throw py::value_error(otherwise);
}

const SequenceKernels& kernels_of(const std::string& isa) { return *isa_named(isa).sequence; }

// The rows of x [.., columns], of which there must be whole ones.
std::size_t rows_of(const In& x, std::size_t columns) {
    require(columns > 0 && x.count() % columns == 0,
            x.argument() + " has " + std::to_string(x.count()) + " elements, expected whole rows of " +
                std::to_string(columns));
    return x.count() / columns;
}

void py_rms_norm(const py::buffer& x, const py::buffer& weight, const py::buffer& out, float eps, float offset,
                 const std::string& isa) {
    const SequenceKernels& kernels = kernels_of(isa);
    const In in("x", x, Layout::rows), weights("weight", weight);
    const Out result("out", out);
    const std::size_t columns = weights.count(), rows = rows_of(in, columns);
    const bool gaps = in.row_stride() * in.rows() != in.count();
    require(!gaps || in.rows() == rows, "x has gaps between its rows, expected rows as long as weight");
    result.require_count_of(in);
    result.require_same_or_apart_from(in);
    result.require_apart_from(weights);
    const Release release;
    rms_norm(kernels, in.data(), gaps ? in.row_stride() : columns, weights.data(), result.data(), rows, columns, eps,
             offset);
}

void py_add_rms_norm(const py::buffer& x, const py::buffer& y, const py::buffer& weight, const py::buffer& total,
                     const py::buffer& out, float eps, float offset, const std::string& isa) {
    const SequenceKernels& kernels = kernels_of(isa);
    const In in("x", x), addend("y", y), weights("weight", weight);
    const Out sum("total", total), result("out", out);
    const std::size_t columns = weights.count(), rows = rows_of(in, columns);
    addend.require_count_of(in);
    for (const Out* output : {&sum, &result}) {
        output->require_count_of(in);
        output->require_apart_from(in);
        output->require_apart_from(addend);
        output->require_apart_from(weights);
    }
    result.require_apart_from(sum);
    const Release release;
    add_rms_norm(kernels, in.data(), addend.data(), weights.data(), sum.data(), result.data(), rows, columns, eps, offset);
}

void py_gated_rms_norm(const py::buffer& x, const py::buffer& weight, const py::buffer& gate, const py::buffer& out,
                       float eps, const std::string& isa) {
    const SequenceKernels& kernels = kernels_of(isa);
    const In in("x", x), weights("weight", weight), gates("gate", gate);
    const Out result("out", out);
    const std::size_t columns = weights.count(), rows = rows_of(in, columns);
    gates.require_count_of(in);
    result.require_count_of(in);
    result.require_same_or_apart_from(in);
    result.require_same_or_apart_from(gates);
    result.require_apart_from(weights);
    const Release release;
    gated_rms_norm(kernels, in.data(), weights.data(), gates.data(), result.data(), rows, columns, eps);
}

void py_causal_conv(const py::buffer& x, const py::buffer& history, const py::buffer& weight, const py::buffer& out,
                    const std::string& isa) {
    const SequenceKernels& kernels = kernels_of(isa);
    const In in("x", x, Layout::rows), weights("weight", weight);
    const Out past("history", history), result("out", out);
    in.require_dimensions(2);
    weights.require_dimensions(2);
    const std::size_t taps = weights.columns();
    require(taps >= 2 && taps <= 8, "weight has " + std::to_string(taps) + " taps, expected 2 to 8");
    require(weights.rows() == in.columns(), "weight and x differ in their channels");
    past.require_count((taps - 1) * in.columns());
    result.require_count_of(in);
    result.require_apart_from(in);
    result.require_apart_from(past);
    result.require_apart_from(weights);
    past.require_apart_from(in);
    past.require_apart_from(weights);
    const Convolution conv = {in.data(), weights.data(), past.data(), result.data(),
                              in.rows(), in.columns(),   taps,        in.row_stride()};
    if (in.count() == 0) return;
    const Release release;
    causal_conv(kernels, conv);
}

void py_delta_gates(const py::buffer& a, const py::buffer& b, const py::buffer& a_log, const py::buffer& dt_bias,
                    const py::buffer& log_decay, const py::buffer& beta, const std::string& isa) {
    const SequenceKernels& kernels = kernels_of(isa);
    const In as("a", a), bs("b", b), a_logs("a_log", a_log), biases("dt_bias", dt_bias);
    const Out decays("log_decay", log_decay), betas("beta", beta);
    const std::size_t heads = a_logs.count(), tokens = rows_of(as, heads);
    biases.require_count_of(a_logs);
    bs.require_count_of(as);
    decays.require_count_of(as);
    betas.require_count_of(as);
    for (const In* in : {&as, &bs, &a_logs, &biases}) {
        decays.require_apart_from(*in);
        betas.require_apart_from(*in);
    }
    decays.require_apart_from(betas);
    const Release release;
    delta_gates(kernels, as.data(), bs.data(), a_logs.data(), biases.data(), decays.data(), betas.data(), tokens,
                heads);
}

void py_delta_rule(const py::buffer& query, const py::buffer& key, const py::buffer& value, const py::buffer& log_decay,
                   const py::buffer& beta, const py::buffer& state, const py::buffer& out, const std::string& isa) {
    const SequenceKernels& kernels = kernels_of(isa);
    const In queries("query", query, Layout::rows), keys("key", key, Layout::rows);
    const In values("value", value, Layout::rows);
    const In decays("log_decay", log_decay), betas("beta", beta);
    const Out states("state", state), result("out", out);
    for (const In* in : {&queries, &keys, &values}) in->require_dimensions(3);
    const std::size_t tokens = values.rows(), heads = values.size(1), key_heads = keys.size(1), dim = keys.size(2);
    require(keys.rows() == tokens && queries.rows() == tokens && queries.size(1) == key_heads && queries.size(2) == dim,
            "query, key and value differ in their shapes");
    require(key_heads > 0 && heads % key_heads == 0, "the value heads are no multiple of the key heads");
    require(dim > 0 && dim <= kMostKeyDim, "keys have " + std::to_string(dim) + " dims, expected 1 to " +
                                               std::to_string(kMostKeyDim));
    decays.require_count(tokens * heads);
    betas.require_count(tokens * heads);
    states.require_count(heads * dim * values.size(2));
    result.require_count_of(values);
    for (const In* in : {&queries, &keys, &values, &decays, &betas}) {
        states.require_apart_from(*in);
        result.require_apart_from(*in);
    }
    result.require_apart_from(states);
    const DeltaRule rule = {queries.data(),
                            keys.data(),
                            values.data(),
                            decays.data(),
                            betas.data(),
                            states.data(),
                            result.data(),
                            tokens,
                            key_heads,
                            heads,
                            dim,
                            values.size(2),
                            queries.row_stride(),
                            keys.row_stride(),
                            values.row_stride()};
    if (result.count() == 0) return;
    const Release release;
    delta_rule(kernels, rule);
}

void py_gated_delta(const py::buffer& qkv, const py::buffer& z, const py::buffer& b, const py::buffer& a,
                    const py::buffer& conv, const py::buffer& a_log, const py::buffer& dt_bias, const py::buffer& norm,
                    const py::buffer& history, const py::buffer& state, const py::buffer& out, float eps,
                    const std::string& isa) {
    const SequenceKernels& kernels = kernels_of(isa);
    const In inputs("qkv", qkv), gates("z", z), bs("b", b), as("a", a);
    const In weights("conv", conv), a_logs("a_log", a_log), biases("dt_bias", dt_bias), norms("norm", norm);
    const Out past("history", history), states("state", state), result("out", out);
    states.require_dimensions(3);
    weights.require_dimensions(2);
    const std::size_t heads = states.size(0), dim = states.size(1), value_dim = states.size(2);
    const std::size_t channels = weights.rows(), taps = weights.columns(), values = heads * value_dim;
    require(taps >= 2 && taps <= 8, "conv has " + std::to_string(taps) + " taps, expected 2 to 8");
    require(dim > 0 && dim <= kMostKeyDim, "keys have " + std::to_string(dim) + " dims, expected 1 to " +
                                               std::to_string(kMostKeyDim));
    const std::size_t key_heads = channels > values ? (channels - values) / (2 * dim) : 0;
    require(key_heads > 0 && heads % key_heads == 0 && channels == 2 * key_heads * dim + values,
            "conv's channels are not those of queries, keys and values of this state");
    const std::size_t tokens = rows_of(inputs, channels);
    past.require_count((taps - 1) * channels);
    norms.require_count(value_dim);
    gates.require_count(tokens * values);
    result.require_count_of(gates);
    for (const In* in : {&bs, &as}) in->require_count(tokens * heads);
    for (const In* in : {&a_logs, &biases}) in->require_count(heads);
    for (const In* in : {&inputs, &gates, &bs, &as, &weights, &a_logs, &biases, &norms})
        for (const Out* changed : {&past, &states, &result}) changed->require_apart_from(*in);
    past.require_apart_from(states);
    result.require_apart_from(past);
    result.require_apart_from(states);
    const GatedDelta call = {inputs.data(),  gates.data(),  bs.data(),    as.data(),    weights.data(), a_logs.data(),
                             biases.data(),  norms.data(),  past.data(),  states.data(), result.data(), tokens,
                             key_heads,      heads,         dim,          value_dim,     taps,          eps};
    if (result.count() == 0) return;
    const Release release;
    gated_delta(kernels, call);
}

void py_rotate(const py::buffer& x, const py::buffer& positions, const py::buffer& out, std::size_t rotary_dim,
               double theta, const std::string& isa) {
    const SequenceKernels& kernels = kernels_of(isa);
    const In in("x", x);
    const Buffer<const std::int64_t> places("positions", positions);
    const Out result("out", out);
    in.require_dimensions(3);
    require(rotary_dim % 2 == 0 && rotary_dim <= in.size(2) && rotary_dim <= kMostRotaryDim,
            "rotary_dim must be even, and no larger than a head or " + std::to_string(kMostRotaryDim));
    places.require_count(in.rows());
    result.require_count_of(in);
    result.require_same_or_apart_from(in);
    const Rotation rotation = {in.data(),  places.data(), result.data(), in.rows(),
                               in.size(1), in.size(2),    rotary_dim,    theta};
    const Release release;
    rotate(kernels, rotation);
}

void py_sigmoid_gate(const py::buffer& x, const py::buffer& gate, const py::buffer& out, const std::string& isa) {
    const SequenceKernels& kernels = kernels_of(isa);
    const In in("x", x), gates("gate", gate, Layout::rows);
    const Out result("out", out);
    result.require_count_of(in);
    result.require_same_or_apart_from(in);
    if (in.count() == 0) return;
    const bool wide = gates.count() == in.count();
    const std::size_t rows = gates.rows(), columns = in.count() / std::max<std::size_t>(rows, 1);
    require(wide || (gates.count() == rows && rows > 0 && in.count() % rows == 0),
            "gate has " + std::to_string(gates.count()) + " elements, expected as many as x, or one for each row");
    if (wide) {
        result.require_same_or_apart_from(gates);
    } else {
        result.require_apart_from(gates);
    }
    const Release release;
    sigmoid_gate(kernels, in.data(), gates.data(), gates.row_stride(), wide, result.data(), rows, columns);
}

void py_silu_multiply(const py::buffer& a, const py::buffer& b, const py::buffer& out, const std::string& isa) {
    const SequenceKernels& kernels = kernels_of(isa);
    const In left("a", a), right("b", b);
    const Out result("out", out);
    right.require_count_of(left);
    result.require_count_of(left);
    result.require_same_or_apart_from(left);
    result.require_same_or_apart_from(right);
    const Release release;
    silu_multiply(kernels, left.data(), right.data(), result.data(), left.count());
}

KVKind kind_named(const std::string& kv) {
    if (kv == "f32") return KVKind::f32;
    if (kv == "bf16") return KVKind::bf16;
    require(kv == "e4m3", "kv is '" + kv + "', expected f32, bf16 or e4m3");
    return KVKind::e4m3;
}

void py_attention(const py::buffer& query, const py::buffer& pages, const std::optional<py::buffer>& scales,
                  const py::buffer& out, std::size_t seen, std::size_t kv_heads, const std::string& kv,
                  const std::string& isa) {
    const SequenceKernels& kernels = kernels_of(isa);
    const KVKind kind = kind_named(kv);
    const In queries("query", query);
    const Buffer<const std::int64_t> addresses("pages", pages);
    const Out result("out", out);
    std::optional<Buffer<const std::int64_t>> scale_addresses;
    if (scales) scale_addresses.emplace("scales", *scales);
    queries.require_dimensions(3);
    require(kv_heads > 0 && queries.size(1) % kv_heads == 0, "the heads are no multiple of the KV heads");
    require(queries.rows() <= seen, "fewer tokens were seen than there are queries");
    const std::size_t needed = (seen + kPageTokens - 1) / kPageTokens;
    require(seen <= std::numeric_limits<std::size_t>::max() / 2 && addresses.count() >= needed,
            "pages has " + std::to_string(addresses.count()) + " elements, expected " + std::to_string(needed));
    require(scales.has_value() == (kind == KVKind::e4m3), "scales belong to e4m3 and to nothing else");
    if (scales) scale_addresses->require_count_of(addresses);
    result.require_count_of(queries);
    result.require_apart_from(queries);
    const Attention call = {queries.data(),
                            result.data(),
                            queries.rows(),
                            queries.size(1),
                            seen,
                            {kind, addresses.data(), scales ? scale_addresses->data() : nullptr, kv_heads,
                             queries.size(2)}};
    if (queries.count() == 0) return;
    const Release release;
    attention(kernels, call);
}

void py_set_threads(int count) {
    require(count >= 1 && count <= 1024, std::to_string(count) + " threads, expected 1 to 1024");
    const Release release;
    set_thread_count(static_cast<unsigned>(count));
}

}  // namespace

void bind_sequence(py::module_& module) {
    using py::arg;
    module.def("threads", thread_count, py::call_guard<Release>(), "How many threads kernels run on.");
    module.def("set_threads", py_set_threads, arg("count"), "Set how many threads kernels run on, from 1 to 1024.");
    module.def("rms_norm", py_rms_norm, arg("x"), arg("weight"), arg("out"), arg("eps"), arg("offset"), arg("isa") = "",
               "x / rms(x) * (offset + weight) over rows as long as weight. Rows of x may have gaps; out may be x.");
    module.def("add_rms_norm", py_add_rms_norm, arg("x"), arg("y"), arg("weight"), arg("total"), arg("out"), arg("eps"),
               arg("offset"), arg("isa") = "", "total = x + y, and out its rms_norm.");
    module.def("gated_rms_norm", py_gated_rms_norm, arg("x"), arg("weight"), arg("gate"), arg("out"), arg("eps"),
               arg("isa") = "", "x / rms(x) * weight * silu(gate) over rows as long as weight. out may be x or gate.");
    module.def("causal_conv", py_causal_conv, arg("x"), arg("history"), arg("weight"), arg("out"), arg("isa") = "",
               "Silu of the depthwise causal convolution of x [T, C] (rows may have gaps) with weight [C, taps]. "
               "Advances history [taps - 1, C] in place.");
    module.def("delta_gates", py_delta_gates, arg("a"), arg("b"), arg("a_log"), arg("dt_bias"), arg("log_decay"),
               arg("beta"), arg("isa") = "", "log_decay = -exp(a_log) * softplus(a + dt_bias), beta = sigmoid(b).");
    module.def("delta_rule", py_delta_rule, arg("query"), arg("key"), arg("value"), arg("log_decay"), arg("beta"),
               arg("state"), arg("out"), arg("isa") = "",
               "The gated delta rule, token by token: query, key [T, key heads, d_k] and value [T, value heads, d_v], "
               "whose rows may have gaps; advances state [value heads, d_k, d_v] in place.");
    module.def("gated_delta", py_gated_delta, arg("qkv"), arg("z"), arg("b"), arg("a"), arg("conv"), arg("a_log"),
               arg("dt_bias"), arg("norm"), arg("history"), arg("state"), arg("out"), arg("eps"), arg("isa") = "",
               "causal_conv, delta_gates, delta_rule and gated_rms_norm in one: qkv [T, C], z [T, value heads * d_v], "
               "a and b [T, value heads]. Advances history and state in place.");
    module.def("rotate", py_rotate, arg("x"), arg("positions"), arg("out"), arg("rotary_dim"), arg("theta"),
               arg("isa") = "",
               "Rotary embedding of the first rotary_dim dims of x [T, h, d], halves paired; positions int64. "
               "out may be x.");
    module.def("sigmoid_gate", py_sigmoid_gate, arg("x"), arg("gate"), arg("out"), arg("isa") = "",
               "x * sigmoid(gate), with as many gates as x (rows may have gaps) or one for each row. out may be x.");
    module.def("silu_multiply", py_silu_multiply, arg("a"), arg("b"), arg("out"), arg("isa") = "",
               "silu(a) * b. out may be a or b.");
    module.def("attention", py_attention, arg("query"), arg("pages"), arg("scales"), arg("out"), arg("seen"),
               arg("kv_heads"), arg("kv"), arg("isa") = "",
               "Causal attention of query [T, heads, d], the last T of `seen` tokens, over pages [2, 64, kv_heads, d] "
               "of type kv (f32, bf16 or e4m3) at the addresses `pages` (int64), with float32 scales [2, 64, kv_heads] "
               "at the addresses `scales` for e4m3, else None. What lies at an address is not checked.");
}

}  // namespace mosaic
