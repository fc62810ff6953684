// The table of kernels for everything in a layer that is not a matrix product, filled by every ISA unit.
// Plain C types only, for the same reason as kernels.h. Every kernel is single-threaded; sequence.cpp spreads the work.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace mosaic {

constexpr size_t kPageTokens = 64;   // as PAGE_TOKENS in runtime/state.py
constexpr size_t kSegment = 512;     // positions whose softmax is taken as one; cut by absolute position
constexpr size_t kStrip = 16;        // positions whose keys or values are in float32 at a time
constexpr size_t kQuad = 4;          // queries that are worked on together
constexpr size_t kHeadPadding = 64;  // packed rows of a head are zero up to a multiple of this
constexpr size_t kMostKeyDim = 512;  // of the delta rule
static_assert(kSegment % kPageTokens == 0 && kPageTokens % kStrip == 0, "strips must not straddle pages or segments");

enum class KVKind { f32, bf16, e4m3 };

// Pages as in runtime/state.py: [2 (key, value), 64, kv_heads, dim]; scales [2, 64, kv_heads] for E4M3 only.
struct PagedKV {
    KVKind kind;
    const int64_t* pages;   // addresses
    const int64_t* scales;  // addresses
    size_t kv_heads, dim;
};

// Packed queries of one KV head, and room to work: `quads` * kQuad rows of `padded` floats.
struct QueryBlock {
    size_t quads, padded;
    const float* rows;      // scaled by dim^-0.5
    const int64_t* limits;  // the last position that each query sees, -1 for rows that only fill up the quad
    float* strip;           // kStrip * padded
    float* scores;          // quads * kSegment * kQuad
};

// A softmax so far: of each query the largest score, the sum of exp(score - largest), and the values weighted so.
struct Softmax {
    float *largest, *sum, *values;  // quads * kQuad; the same; the same times padded
};

// Token strides are in floats; within a token all is contiguous. value head h reads key head h / (value / key heads).
struct DeltaRule {
    const float *query, *key, *value;  // [tokens, heads, dim]
    const float *log_decay, *beta;     // [tokens, value_heads]
    float *state, *out;                // [value_heads, key_dim, value_dim], [tokens, value_heads, value_dim]
    size_t tokens, key_heads, value_heads, key_dim, value_dim;
    size_t query_stride, key_stride, value_stride;
};

struct Convolution {
    const float *x, *weight;  // [tokens, channels] with a stride, [channels, taps]
    float *history, *out;     // [taps - 1, channels], changed in place; [tokens, channels]
    size_t tokens, channels, taps, stride;
};

// `out` may be an input where nothing else is said. Strides are in floats, from row to row.
struct SequenceKernels {
    void (*rms_norm)(const float* x, size_t stride, const float* weight, float* out, size_t rows, size_t columns,
                     float eps, float offset);
    void (*gated_rms_norm)(const float* x, const float* weight, const float* gate, float* out, size_t rows,
                           size_t columns, float eps);
    void (*causal_conv)(const Convolution* conv, size_t first_channel, size_t last_channel);  // out apart from x
    void (*delta_gates)(const float* a, const float* b, const float* a_log, const float* dt_bias, float* log_decay,
                        float* beta, size_t tokens, size_t heads);
    // One value head, some columns of its state; columns do not depend on each other. out apart from the inputs.
    void (*delta_rule)(const DeltaRule* rule, size_t head, size_t first_column, size_t last_column);
    // `heads` rows of one token: the first 2 * half dims, halves paired, by angles of these cosines and sines.
    void (*rotate)(const float* x, float* out, const float* cosines, const float* sines, size_t heads, size_t dim,
                   size_t half);
    void (*sigmoid_gate)(const float* x, const float* gate, float* out, size_t count);
    void (*sigmoid_scale)(const float* x, const float* gate, float* out, size_t rows, size_t columns);  // a gate a row
    void (*silu_multiply)(const float* a, const float* b, float* out, size_t count);
    // The softmax over one segment, of which at least one query sees something. A query that sees nothing gets sum 0.
    void (*attend)(const PagedKV* kv, size_t kv_head, const QueryBlock* queries, size_t segment, const Softmax* part);
    // Adds that of the next segment to `total`, for `rows` queries. A total begins with sums of 0.
    void (*merge)(const Softmax* part, const Softmax* total, size_t rows, size_t padded);
};

namespace scalar { extern const SequenceKernels sequence_kernels; }
namespace avx2 { extern const SequenceKernels sequence_kernels; }
namespace avx512 { extern const SequenceKernels sequence_kernels; }

}  // namespace mosaic
