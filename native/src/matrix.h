// Matrix products over the thread pool: linear maps and routed experts. Chooses kernels and cuts work into tasks; the
// arithmetic is in matrix_kernels.inc.h. Results do not depend on the number of threads, nor an output row on the others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dispatch.h"

namespace mosaic {

// Activations [sequences, tokens, columns]. What is computed of a sequence does not depend on the others. One token of each is
// a step of decoding, which `dot` is for; of more, all are multiplied as one prompt is. Below, rows are those of all sequences.
struct Activations {
    const float* values;
    std::size_t sequences, tokens;

    std::size_t rows() const { return sequences * tokens; }
    bool is_step() const { return tokens == 1; }
};

struct ExpertView {
    MatrixView gate, up, down;  // down(silu(gate(x)) * up(x))
};

// For every matrix, y [x.rows, rows] = x times the matrix transposed; all have the same columns. `bf16`: activations are
// rounded to bfloat16 where the CPU multiplies those, and the weights are E4M3.
void linear(const Isa& isa, const std::vector<MatrixView>& matrices, const Activations& x, bool bf16,
            const std::vector<float*>& y);

// outputs [x.rows, ranks, H] = experts[slots[row, rank]](x[row]). Where a slot is kNotNow nothing is written: its expert may be
// elsewhere still. An output does not depend on what is computed with it. Experts may differ in their inner size.
constexpr std::int32_t kNotNow = -1;
void apply_experts(const Isa& isa, const std::vector<ExpertView>& experts, const std::int32_t* slots, std::size_t ranks,
                   const Activations& x, bool bf16, float* outputs);

// y [tokens, rows] = the sum over ranks of weights[token, rank] * outputs[token, rank], in order of rank.
void add_outputs(const float* outputs, const float* weights, std::size_t tokens, std::size_t ranks, std::size_t rows,
                 float* y);

// Both in one: y [x.rows, H] = the sum over ranks of weights[row, rank] * experts[slots[row, rank]](x[row]), in order of rank.
void mix_experts(const Isa& isa, const std::vector<ExpertView>& experts, const std::int32_t* slots, const float* weights,
                 std::size_t ranks, const Activations& x, bool bf16, float* y);

// The `top_k` largest of logits [tokens, count], the lower number first among equals, and their softmax: over themselves if
// `normalize`, else over all. `shared` [tokens], unless null, adds a last choice to each token: number `count`, with the
// sigmoid of it as weight.
void route(const float* logits, std::size_t tokens, std::size_t count, std::size_t top_k, bool normalize,
           const float* shared, std::int64_t* experts, float* weights);

}  // namespace mosaic
