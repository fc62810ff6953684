// The parallel drivers of sequence_kernels.h: who works on what. Arguments are checked by the caller.
// No result depends on how the work is cut.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sequence_kernels.h"

namespace mosaic {

void rms_norm(const SequenceKernels& kernels, const float* x, std::size_t stride, const float* weight, float* out,
              std::size_t rows, std::size_t columns, float eps, float offset);
// total = x + y, and its norm; no gaps.
void add_rms_norm(const SequenceKernels& kernels, const float* x, const float* y, const float* weight, float* total,
                  float* out, std::size_t rows, std::size_t columns, float eps, float offset);
void gated_rms_norm(const SequenceKernels& kernels, const float* x, const float* weight, const float* gate, float* out,
                    std::size_t rows, std::size_t columns, float eps);
void causal_conv(const SequenceKernels& kernels, const Convolution& conv);
void delta_gates(const SequenceKernels& kernels, const float* a, const float* b, const float* a_log,
                 const float* dt_bias, float* log_decay, float* beta, std::size_t tokens, std::size_t heads);
void delta_rule(const SequenceKernels& kernels, const DeltaRule& rule);

// A whole Gated DeltaNet mixer between its projections; no gaps. Advances history and state.
struct GatedDelta {
    const float *qkv, *z, *b, *a;              // [tokens, 2 key_heads * key_dim + value_heads * value_dim], ...
    const float *conv, *a_log, *dt_bias, *norm;  // [channels, taps], [value_heads] twice, [value_dim]
    float *history, *state, *out;              // [taps - 1, channels], [value_heads, key_dim, value_dim], as z
    std::size_t tokens, key_heads, value_heads, key_dim, value_dim, taps;
    float eps;
};
void gated_delta(const SequenceKernels& kernels, const GatedDelta& call);

void silu_multiply(const SequenceKernels& kernels, const float* a, const float* b, float* out, std::size_t count);

// Gates lie `gate_stride` floats apart from row to row, as many as columns (`wide`) or one for all of them.
void sigmoid_gate(const SequenceKernels& kernels, const float* x, const float* gate, std::size_t gate_stride, bool wide,
                  float* out, std::size_t rows, std::size_t columns);

struct Rotation {
    const float* x;  // [tokens, heads, dim]
    const std::int64_t* positions;
    float* out;
    std::size_t tokens, heads, dim, rotary_dim;
    double theta;
};
constexpr std::size_t kMostRotaryDim = 512;
void rotate(const SequenceKernels& kernels, const Rotation& rotation);

// Queries [tokens, heads, dim] of the last `tokens` of `seen` positions.
struct Attention {
    const float* query;
    float* out;
    std::size_t tokens, heads, seen;
    PagedKV kv;
};
void attention(const SequenceKernels& kernels, const Attention& call);

}  // namespace mosaic
