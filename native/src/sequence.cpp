// See sequence.h.
#include "sequence.h"

#include <algorithm>
#include <cmath>

#include "scratch.h"
#include "thread_pool.h"

namespace mosaic {
namespace {

constexpr std::size_t kTaskFloats = 16384;  // less is done sooner than another thread could begin
constexpr std::size_t kBlockRows = 64;      // queries that share a strip of keys or values

// Calls body(first, last) for ranges of rows that are worth a task.
template <typename Body> void parallel_rows(std::size_t rows, std::size_t floats, const Body& body) {
    const std::size_t part = std::max<std::size_t>(1, kTaskFloats / std::max<std::size_t>(1, floats));
    parallel_for(ceil_div(rows, part),
                 [&](std::size_t task) { body(task * part, std::min(rows, (task + 1) * part)); });
}

// How an Attention is cut: blocks of tokens, and in each the queries of one KV head.
struct Cut {
    explicit Cut(const Attention& call)
        : group(call.heads / call.kv.kv_heads),
          block_tokens(std::max<std::size_t>(1, kBlockRows / group)),
          blocks(ceil_div(call.tokens, block_tokens)),
          quads(ceil_div(std::min(block_tokens, call.tokens) * group, kQuad)),
          rows(quads * kQuad),
          padded(rounded_up(call.kv.dim, kHeadPadding)),
          segments(ceil_div(call.seen, kSegment)) {}

    std::size_t group, block_tokens, blocks, quads, rows, padded, segments;

    std::size_t softmax_floats() const { return rows * (padded + 2); }
    Softmax softmax_at(float* memory) const {  // values first: they keep the alignment
        return {memory + rows * padded, memory + rows * (padded + 1), memory};
    }
};

Softmax from_row(const Softmax& all, std::size_t row, std::size_t padded) {
    return {all.largest + row, all.sum + row, all.values + row * padded};
}

// The queries of one block and KV head, packed and ready to attend, in memory of the calling thread.
class Block {
  public:
    Block(const Attention& call, const Cut& cut, std::size_t block, std::size_t kv_head)
        : call_(call), cut_(cut), kv_head_(kv_head), first_(block * cut.block_tokens),
          tokens_(std::min(cut.block_tokens, call.tokens - first_)) {
        thread_local Scratch<float> floats;
        thread_local Scratch<std::int64_t> integers;
        const std::size_t rows = cut.rows * cut.padded, strip = kStrip * cut.padded, scores = cut.rows * kSegment;
        float* const memory = floats.take(rows + strip + scores + 2 * cut.softmax_floats());
        std::int64_t* const limits = integers.take(cut.rows);
        room_ = memory + rows + strip + scores;
        queries_ = {cut.quads, cut.padded, memory, limits, memory + rows, memory + rows + strip};
        const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(call.kv.dim)));
        std::fill(memory, memory + rows, 0.0f);
        for (std::size_t row = 0; row < cut.rows; ++row) {
            const bool used = row < tokens_ * cut.group;
            limits[row] = used ? static_cast<std::int64_t>(call.seen - call.tokens + first_ + row / cut.group) : -1;
            if (!used) continue;
            const float* const query = call.query + place(row);
            for (std::size_t i = 0; i < call.kv.dim; ++i) memory[row * cut.padded + i] = query[i] * scale;
        }
    }

    bool sees(std::size_t segment) const {
        return segment * kSegment < call_.seen - call_.tokens + first_ + tokens_;
    }

    void attend(const SequenceKernels& kernels, std::size_t segment, const Softmax& part) const {
        kernels.attend(&call_.kv, kv_head_, &queries_, segment, &part);
    }

    void write(const Softmax& total, std::size_t first_row, std::size_t last_row) const {
        for (std::size_t row = first_row; row < std::min(last_row, tokens_ * cut_.group); ++row) {
            const float *values = total.values + row * cut_.padded, scale = 1.0f / total.sum[row];
            float* const out = call_.out + place(row);
            for (std::size_t i = 0; i < call_.kv.dim; ++i) out[i] = values[i] * scale;
        }
    }

    float* room() const { return room_; }  // for two softmaxes

  private:
    // Where the query of a row, and its result, is.
    std::size_t place(std::size_t row) const {
        return ((first_ + row / cut_.group) * call_.heads + kv_head_ * cut_.group + row % cut_.group) * call_.kv.dim;
    }

    const Attention& call_;
    const Cut& cut_;
    std::size_t kv_head_, first_, tokens_;
    QueryBlock queries_;
    float* room_;
};

// Many blocks: each is one task, segment after segment.
void attend_blocks(const SequenceKernels& kernels, const Attention& call, const Cut& cut) {
    parallel_for(cut.blocks * call.kv.kv_heads, [&](std::size_t task) {
        const std::size_t number = cut.blocks - 1 - task / call.kv.kv_heads;  // the longest first
        const Block block(call, cut, number, task % call.kv.kv_heads);
        const Softmax total = cut.softmax_at(block.room()), part = cut.softmax_at(block.room() + cut.softmax_floats());
        std::fill(total.sum, total.sum + cut.rows, 0.0f);
        for (std::size_t segment = 0; block.sees(segment); ++segment) {
            block.attend(kernels, segment, part);
            kernels.merge(&part, &total, cut.rows, cut.padded);
        }
        block.write(total, 0, cut.rows);
    });
}

// Few blocks: each segment is a task too. As many segments at a time as keep all threads busy, then they are merged.
void attend_segments(const SequenceKernels& kernels, const Attention& call, const Cut& cut, std::size_t threads) {
    const std::size_t pairs = cut.blocks * call.kv.kv_heads, size = cut.softmax_floats();
    const std::size_t wave = std::min(cut.segments, ceil_div(16 * threads, pairs));
    thread_local Scratch<float> room;
    float* const totals = room.take((pairs + pairs * wave) * size);
    float* const parts = totals + pairs * size;
    for (std::size_t pair = 0; pair < pairs; ++pair) {
        float* const sums = cut.softmax_at(totals + pair * size).sum;
        std::fill(sums, sums + cut.rows, 0.0f);
    }
    const auto part_at = [&](std::size_t pair, std::size_t i) {
        return cut.softmax_at(parts + (pair * wave + i) * size);
    };
    for (std::size_t first = 0; first < cut.segments; first += wave) {
        const std::size_t count = std::min(wave, cut.segments - first);
        parallel_for(pairs * count, [&](std::size_t task) {
            const std::size_t pair = task % pairs, i = task / pairs;
            const Block block(call, cut, pair / call.kv.kv_heads, pair % call.kv.kv_heads);
            const Softmax part = part_at(pair, i);
            if (block.sees(first + i)) {
                block.attend(kernels, first + i, part);
            } else {
                std::fill(part.sum, part.sum + cut.rows, 0.0f);
            }
        });
        parallel_for(pairs * cut.quads, [&](std::size_t task) {
            const std::size_t pair = task / cut.quads, row = task % cut.quads * kQuad;
            const Softmax total = from_row(cut.softmax_at(totals + pair * size), row, cut.padded);
            for (std::size_t i = 0; i < count; ++i) {
                const Softmax part = from_row(part_at(pair, i), row, cut.padded);
                kernels.merge(&part, &total, kQuad, cut.padded);
            }
        });
    }
    for (std::size_t pair = 0; pair < pairs; ++pair)
        Block(call, cut, pair / call.kv.kv_heads, pair % call.kv.kv_heads)
            .write(cut.softmax_at(totals + pair * size), 0, cut.rows);
}

}  // namespace

void attention(const SequenceKernels& kernels, const Attention& call) {
    const Cut cut(call);
    const std::size_t threads = thread_count();
    if (cut.blocks * call.kv.kv_heads >= 4 * threads || cut.segments == 1) {
        attend_blocks(kernels, call, cut);
    } else {
        attend_segments(kernels, call, cut, threads);
    }
}

void rms_norm(const SequenceKernels& kernels, const float* x, std::size_t stride, const float* weight, float* out,
              std::size_t rows, std::size_t columns, float eps, float offset) {
    parallel_rows(rows, columns, [&](std::size_t first, std::size_t last) {
        kernels.rms_norm(x + first * stride, stride, weight, out + first * columns, last - first, columns, eps, offset);
    });
}

void add_rms_norm(const SequenceKernels& kernels, const float* x, const float* y, const float* weight, float* total,
                  float* out, std::size_t rows, std::size_t columns, float eps, float offset) {
    parallel_rows(rows, columns, [&](std::size_t first, std::size_t last) {
        for (std::size_t i = first * columns; i < last * columns; ++i) total[i] = x[i] + y[i];
        const std::size_t start = first * columns;
        kernels.rms_norm(total + start, columns, weight, out + start, last - first, columns, eps, offset);
    });
}

void gated_rms_norm(const SequenceKernels& kernels, const float* x, const float* weight, const float* gate, float* out,
                    std::size_t rows, std::size_t columns, float eps) {
    parallel_rows(rows, columns, [&](std::size_t first, std::size_t last) {
        const std::size_t place = first * columns;
        kernels.gated_rms_norm(x + place, weight, gate + place, out + place, last - first, columns, eps);
    });
}

void sigmoid_gate(const SequenceKernels& kernels, const float* x, const float* gate, std::size_t gate_stride, bool wide,
                  float* out, std::size_t rows, std::size_t columns) {
    parallel_rows(rows, columns, [&](std::size_t first, std::size_t last) {
        for (std::size_t row = first; row < last; ++row) {
            const float *from = x + row * columns, *gates = gate + row * gate_stride;
            if (wide) {
                kernels.sigmoid_gate(from, gates, out + row * columns, columns);
            } else {
                kernels.sigmoid_scale(from, gates, out + row * columns, 1, columns);
            }
        }
    });
}

void silu_multiply(const SequenceKernels& kernels, const float* a, const float* b, float* out, std::size_t count) {
    constexpr std::size_t row = 64;
    parallel_rows(ceil_div(count, row), row, [&](std::size_t first, std::size_t last) {
        const std::size_t place = first * row;
        kernels.silu_multiply(a + place, b + place, out + place, std::min(count, last * row) - place);
    });
}

// Few channels and few tokens at a time, or every token's row would be on another page of memory than the last one's.
void causal_conv(const SequenceKernels& kernels, const Convolution& conv) {
    constexpr std::size_t channels = 256, tokens = 16;
    const std::size_t part = std::max(channels, kTaskFloats / conv.tokens / channels * channels);
    parallel_for(ceil_div(conv.channels, part), [&](std::size_t task) {
        Convolution some = conv;
        for (std::size_t done = 0; done < conv.tokens; done += tokens) {
            some.tokens = std::min(tokens, conv.tokens - done);
            some.x = conv.x + done * conv.stride;
            some.out = conv.out + done * conv.channels;
            kernels.causal_conv(&some, task * part, std::min(conv.channels, (task + 1) * part));
        }
    });
}

void delta_gates(const SequenceKernels& kernels, const float* a, const float* b, const float* a_log,
                 const float* dt_bias, float* log_decay, float* beta, std::size_t tokens, std::size_t heads) {
    parallel_rows(tokens, heads, [&](std::size_t first, std::size_t last) {
        const std::size_t place = first * heads;
        kernels.delta_gates(a + place, b + place, a_log, dt_bias, log_decay + place, beta + place, last - first, heads);
    });
}

// A head is a task; where heads are few, so are some columns of one.
void delta_rule(const SequenceKernels& kernels, const DeltaRule& rule) {
    constexpr std::size_t unit = 64;
    const bool few = rule.value_heads < 2 * thread_count();
    const std::size_t columns = few ? unit : rule.value_dim, parts = ceil_div(rule.value_dim, columns);
    parallel_for(rule.value_heads * parts, [&](std::size_t task) {
        const std::size_t first = task % parts * columns;
        kernels.delta_rule(&rule, task / parts, first, std::min(rule.value_dim, first + columns));
    });
}

// Some tokens at a time, so that what one step leaves is in the cache for the next.
void gated_delta(const SequenceKernels& kernels, const GatedDelta& call) {
    constexpr std::size_t block = 64;
    static thread_local Scratch<float> scratch;
    const std::size_t heads = call.value_heads, keys = call.key_heads * call.key_dim, values = heads * call.value_dim;
    const std::size_t channels = 2 * keys + values, most = std::min(block, call.tokens);
    float* const mixed = scratch.take(most * (channels + 2 * heads));
    float *const log_decay = mixed + most * channels, *const beta = log_decay + most * heads;
    for (std::size_t first = 0; first < call.tokens; first += block) {
        const std::size_t tokens = std::min(block, call.tokens - first);
        float* const out = call.out + first * values;
        causal_conv(kernels, {call.qkv + first * channels, call.conv, call.history, mixed, tokens, channels, call.taps,
                              channels});
        delta_gates(kernels, call.a + first * heads, call.b + first * heads, call.a_log, call.dt_bias, log_decay, beta,
                    tokens, heads);
        delta_rule(kernels, {mixed, mixed + keys, mixed + 2 * keys, log_decay, beta, call.state, out, tokens,
                             call.key_heads, heads, call.key_dim, call.value_dim, channels, channels, channels});
        gated_rms_norm(kernels, out, call.norm, call.z + first * values, out, tokens * heads, call.value_dim, call.eps);
    }
}

void rotate(const SequenceKernels& kernels, const Rotation& rotation) {
    const std::size_t half = rotation.rotary_dim / 2, row = rotation.heads * rotation.dim;
    parallel_rows(rotation.tokens, row, [&](std::size_t first, std::size_t last) {
        double frequencies[kMostRotaryDim / 2];
        float cosines[kMostRotaryDim / 2], sines[kMostRotaryDim / 2];
        for (std::size_t i = 0; i < half; ++i)
            frequencies[i] = std::pow(rotation.theta, -static_cast<double>(2 * i) / static_cast<double>(2 * half));
        for (std::size_t token = first; token < last; ++token) {
            for (std::size_t i = 0; i < half; ++i) {
                const double angle = static_cast<double>(rotation.positions[token]) * frequencies[i];
                cosines[i] = static_cast<float>(std::cos(angle));
                sines[i] = static_cast<float>(std::sin(angle));
            }
            kernels.rotate(rotation.x + token * row, rotation.out + token * row, cosines, sines, rotation.heads,
                           rotation.dim, half);
        }
    });
}

}  // namespace mosaic
