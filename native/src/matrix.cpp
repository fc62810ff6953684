// See matrix.h.
#include "matrix.h"

#include <algorithm>
#include <cmath>

#include "scratch.h"
#include "thread_pool.h"

namespace mosaic {
namespace {

constexpr std::size_t kTaskBytes = 64 << 10;  // weights that are worth a task of their own
constexpr std::size_t kTasksPerThread = 8;    // long runs through memory are fast, but the last task should not be long
constexpr std::size_t kTokenBlock = 96;      // tokens multiplied at a time, so that they stay in the cache

std::size_t padded(std::size_t tokens) { return rounded_up(tokens, kTokens); }

std::size_t bytes_of(Element element) { return element == kE4M3 ? 1 : element == kBF16 ? 2 : 4; }

// How activations are to lie: as weights of an Element want them, or rounded to bfloat16 for E4M3.
enum Form { kForE4M3 = kE4M3, kForBF16 = kBF16, kForF32 = kF32, kRounded, kForms };

Form form_for(const Isa& isa, const MatrixView& matrix, bool bf16) {
    if (bf16 && matrix.element == kE4M3 && isa.matrix->dot_bf16 != nullptr) return kRounded;
    return static_cast<Form>(matrix.element);
}

// One vector in the forms that were asked for.
class Vector {
  public:
    void reserve(const Isa& isa, Form form, std::size_t columns) { forms_[form].take(size(isa, form, in_groups(columns))); }

    void fill(const Isa& isa, const float* x, std::size_t columns, Form form) {
        reserve(isa, form, columns);
        fill_part(isa, x, 0, columns, form);
    }

    // `count` values from place `first` on, both whole groups but at the end.
    void fill_part(const Isa& isa, const float* x, std::size_t first, std::size_t count, Form form) {
        float* const place = forms_[form].take(0) + size(isa, form, first);
        if (form == kRounded)
            isa.matrix->arrange_bf16(x, count, reinterpret_cast<std::uint16_t*>(place));
        else
            isa.matrix->arrange(x, count, static_cast<Element>(form), place);
    }

    void dot(const Isa& isa, const MatrixView& matrix, Form form, std::size_t first, std::size_t last, const void* next,
             float* y) {
        const float* const x = forms_[form].take(0);
        if (form == kRounded)
            isa.matrix->dot_bf16(matrix, reinterpret_cast<const std::uint16_t*>(x), first, last, next, y);
        else
            isa.matrix->dot(matrix, x, first, last, next, y);
    }

  private:
    // Floats that so many values take.
    static std::size_t size(const Isa& isa, Form form, std::size_t values) {
        return values * (form == kRounded ? isa.matrix->bytes.dot_bf16 : isa.matrix->bytes.dot) / sizeof(float);
    }

    Scratch<float> forms_[kForms];
};

// Floats that vectors packed for `multiply` take.
std::size_t packed_size(const Isa& isa, std::size_t columns, std::size_t tokens, Form form) {
    const std::size_t bytes = form == kRounded ? isa.matrix->bytes.multiply_bf16 : isa.matrix->bytes.multiply;
    return in_groups(columns) * tokens * bytes / sizeof(float);
}

void pack(const Isa& isa, const float* const* x, std::size_t count, std::size_t tokens, const Share& share, Form form,
          float* packed) {
    if (form == kRounded)
        isa.matrix->pack_bf16(x, count, tokens, share, reinterpret_cast<std::uint16_t*>(packed));
    else
        isa.matrix->pack(x, count, tokens, share, static_cast<Element>(form), packed);
}

void multiply(const Isa& isa, const MatrixView& matrix, const float* packed, std::size_t tokens, Form form,
              std::size_t first, std::size_t last, const void* next, float* y) {
    if (form == kRounded)
        isa.matrix->multiply_bf16(matrix, reinterpret_cast<const std::uint16_t*>(packed), tokens, first, last, next, y);
    else
        isa.matrix->multiply(matrix, packed, tokens, first, last, next, y);
}

// Rows of a matrix, of which there are `matrices`, that make a task. Whole panels, unless that is all.
std::size_t rows_per_task(const MatrixView& matrix, std::size_t matrices = 1) {
    const std::size_t row = std::max<std::size_t>(matrix.columns * bytes_of(matrix.element), 1);
    const std::size_t parts = ceil_div(kTasksPerThread * thread_count(), matrices);
    return rounded_up(std::max({ceil_div(matrix.rows, parts), ceil_div(kTaskBytes, row), std::size_t{1}}), kPanel);
}

const void* row_of(const MatrixView& matrix, std::size_t row) {
    return static_cast<const char*>(matrix.values) + std::min(row, matrix.rows) * matrix.columns * bytes_of(matrix.element);
}

thread_local Vector caller_vector;        // of the thread that calls, read by all
thread_local Scratch<float> own_scratch;  // of the thread that works

// Columns of part [rows][width] as rows: column i goes to out(i), of which there are `count`.
template <typename Out>
void turn(const float* part, std::size_t rows, std::size_t width, std::size_t count, const Out& out) {
    using Four = float __attribute__((vector_size(16)));
    using Places = int __attribute__((vector_size(16)));
    const auto load = [](const float* place) {
        Four values;
        __builtin_memcpy(&values, place, sizeof values);
        return values;
    };
    std::size_t i = 0;
    for (; i + 4 <= count; i += 4) {
        float* const to[4] = {out(i), out(i + 1), out(i + 2), out(i + 3)};
        std::size_t row = 0;
        for (; row + 4 <= rows; row += 4) {
            const float* const from = part + row * width + i;
            const Four a = load(from), b = load(from + width), c = load(from + 2 * width), d = load(from + 3 * width);
            const Four ab = __builtin_shuffle(a, b, Places{0, 4, 1, 5}), ab2 = __builtin_shuffle(a, b, Places{2, 6, 3, 7});
            const Four cd = __builtin_shuffle(c, d, Places{0, 4, 1, 5}), cd2 = __builtin_shuffle(c, d, Places{2, 6, 3, 7});
            const Four turned[4] = {
                __builtin_shuffle(ab, cd, Places{0, 1, 4, 5}), __builtin_shuffle(ab, cd, Places{2, 3, 6, 7}),
                __builtin_shuffle(ab2, cd2, Places{0, 1, 4, 5}), __builtin_shuffle(ab2, cd2, Places{2, 3, 6, 7})};
            for (std::size_t k = 0; k < 4; ++k) __builtin_memcpy(to[k] + row, &turned[k], sizeof turned[k]);
        }
        for (; row < rows; ++row)
            for (std::size_t k = 0; k < 4; ++k) to[k][row] = part[row * width + i + k];
    }
    for (; i < count; ++i) {
        float* const to = out(i);
        for (std::size_t row = 0; row < rows; ++row) to[row] = part[row * width + i];
    }
}

void linear_one(const Isa& isa, const MatrixView& matrix, const float* x, bool bf16, float* y) {
    const Form form = form_for(isa, matrix, bf16);
    Vector& vector = caller_vector;
    vector.fill(isa, x, matrix.columns, form);
    const std::size_t step = rows_per_task(matrix), threads = thread_count();
    parallel_for(ceil_div(matrix.rows, step), [&](std::size_t task) {
        const std::size_t last = std::min((task + 1) * step, matrix.rows);
        vector.dot(isa, matrix, form, task * step, last, row_of(matrix, (task + threads) * step), y);
    });
}

void linear_many(const Isa& isa, const MatrixView& matrix, const float* x, std::size_t tokens, bool bf16, float* y) {
    static thread_local Scratch<float> packed_scratch;
    const Form form = form_for(isa, matrix, bf16);
    const std::size_t blocks = ceil_div(tokens, kTokenBlock), panels = ceil_div(matrix.rows, kPanel);
    const std::size_t threads = thread_count();
    const std::size_t size = packed_size(isa, matrix.columns, kTokenBlock, form);
    float* const packed = packed_scratch.take(blocks * size);
    const auto count_of = [&](std::size_t block) { return std::min(kTokenBlock, tokens - block * kTokenBlock); };
    parallel_for(blocks, [&](std::size_t block) {
        const float* rows[kTokenBlock];
        const std::size_t count = count_of(block);
        for (std::size_t i = 0; i < count; ++i) rows[i] = x + (block * kTokenBlock + i) * matrix.columns;
        pack(isa, rows, count, padded(count), {matrix.columns, 0, matrix.columns}, form, packed + block * size);
    });
    parallel_for(blocks * panels, [&](std::size_t task) {
        const std::size_t block = task / panels, first = task % panels * kPanel;
        const std::size_t last = std::min(first + kPanel, matrix.rows), count = count_of(block), width = padded(count);
        float* const part = own_scratch.take(kPanel * kTokenBlock);
        const void* const next = row_of(matrix, (task + threads) % panels * kPanel);
        multiply(isa, matrix, packed + block * size, width, form, first, last, next, part);
        turn(part, last - first, width, count, [&](std::size_t token) {
            return y + (block * kTokenBlock + token) * matrix.rows + first;
        });
    });
}

// y = the sum over ranks, in order, of weights[rank] * outputs[rank].
void add_up(const float* outputs, const float* weights, std::size_t ranks, std::size_t rows, float* y) {
    for (std::size_t rank = 0; rank < ranks; ++rank, outputs += rows)
        for (std::size_t row = 0; row < rows; ++row) y[row] = (rank == 0 ? 0.0f : y[row]) + weights[rank] * outputs[row];
}

void mix_for_one(const Isa& isa, const std::vector<ExpertView>& experts, const std::int32_t* slots, const float* weights,
                 std::size_t ranks, const float* x, bool bf16, float* y) {
    static thread_local std::vector<Vector> hidden_vectors;
    if (hidden_vectors.size() < ranks) hidden_vectors.resize(ranks);
    std::vector<Vector>& hidden = hidden_vectors;  // a thread_local of this thread, used by the others too
    Vector& input = caller_vector;
    const std::size_t columns = experts[0].gate.columns, inner = experts[0].gate.rows, rows = experts[0].down.rows;
    bool filled[kForms] = {};
    for (std::size_t rank = 0; rank < ranks; ++rank) {
        const ExpertView& expert = experts[slots[rank]];
        for (const MatrixView* matrix : {&expert.gate, &expert.up}) {
            const Form form = form_for(isa, *matrix, bf16);
            if (!filled[form]) input.fill(isa, x, columns, form);
            filled[form] = true;
        }
        hidden[rank].reserve(isa, form_for(isa, expert.down, bf16), inner);
    }
    const std::size_t threads = thread_count();  // task + threads is probably the next one of the same thread
    const std::size_t step = rows_per_task(experts[0].gate, ranks), parts = ceil_div(inner, step);
    parallel_for(ranks * parts, [&](std::size_t task) {
        const std::size_t rank = task / parts, first = task % parts * step, last = std::min(first + step, inner);
        const std::size_t later = std::min(task + threads, ranks * parts - 1);
        const ExpertView& expert = experts[slots[rank]];
        const void* const next = row_of(experts[slots[later / parts]].gate, later % parts * step);
        float* const gate = own_scratch.take(2 * step);
        float* const up = gate + step;
        input.dot(isa, expert.gate, form_for(isa, expert.gate, bf16), first, last, row_of(expert.up, first), gate - first);
        input.dot(isa, expert.up, form_for(isa, expert.up, bf16), first, last, next, up - first);
        isa.sequence->silu_multiply(gate, up, gate, last - first);
        hidden[rank].fill_part(isa, gate, first, last - first, form_for(isa, expert.down, bf16));
    });
    static thread_local Scratch<float> output_scratch;
    float* const outputs = output_scratch.take(ranks * rows);
    const std::size_t out_step = rows_per_task(experts[0].down, ranks), out_parts = ceil_div(rows, out_step);
    parallel_for(ranks * out_parts, [&](std::size_t task) {
        const std::size_t rank = task / out_parts, first = task % out_parts * out_step;
        const std::size_t later = std::min(task + threads, ranks * out_parts - 1);
        const MatrixView& down = experts[slots[rank]].down;
        const void* const next = row_of(experts[slots[later / out_parts]].down, later % out_parts * out_step);
        hidden[rank].dot(isa, down, form_for(isa, down, bf16), first, std::min(first + out_step, rows), next,
                         outputs + rank * rows);
    });
    add_up(outputs, weights, ranks, rows, y);
}

// A share of the tokens of one expert.
struct Group {
    const ExpertView* expert;
    std::size_t first, count, width;  // places in the list of all, tokens, and in whole kTokens
    std::size_t input, hidden;        // where its packed vectors begin
};

void mix_for_many(const Isa& isa, const std::vector<ExpertView>& experts, const std::int32_t* slots, const float* weights,
                  std::size_t ranks, const float* x, std::size_t tokens, bool bf16, float* y) {
    static thread_local Scratch<float> input_scratch, hidden_scratch, output_scratch;
    const std::size_t columns = experts[0].gate.columns, inner = experts[0].gate.rows, rows = experts[0].down.rows;
    std::vector<std::vector<std::size_t>> uses(experts.size());  // token * ranks + rank
    for (std::size_t use = 0; use < tokens * ranks; ++use) uses[slots[use]].push_back(use);
    std::vector<std::size_t> list;
    std::vector<Group> groups;
    std::size_t input_size = 0, hidden_size = 0;
    for (std::size_t slot = 0; slot < experts.size(); ++slot)
        for (std::size_t done = 0; done < uses[slot].size(); done += kTokenBlock) {
            const std::size_t count = std::min(kTokenBlock, uses[slot].size() - done), width = padded(count);
            groups.push_back({&experts[slot], list.size(), count, width, input_size, hidden_size});
            list.insert(list.end(), uses[slot].begin() + done, uses[slot].begin() + done + count);
            const ExpertView& expert = experts[slot];
            const Form gate = form_for(isa, expert.gate, bf16), up = form_for(isa, expert.up, bf16);
            input_size += packed_size(isa, columns, width, gate) + (gate == up ? 0 : packed_size(isa, columns, width, up));
            hidden_size += packed_size(isa, inner, width, form_for(isa, expert.down, bf16));
        }
    float* const inputs = input_scratch.take(input_size);
    float* const hidden = hidden_scratch.take(hidden_size);
    float* const outputs = output_scratch.take(list.size() * rows);  // by use
    const auto up_input = [&](const Group& group) {
        const Form gate = form_for(isa, group.expert->gate, bf16), up = form_for(isa, group.expert->up, bf16);
        return inputs + group.input + (gate == up ? 0 : packed_size(isa, columns, group.width, gate));
    };
    parallel_for(groups.size(), [&](std::size_t number) {
        const Group& group = groups[number];
        const float* vectors[kTokenBlock];
        for (std::size_t i = 0; i < group.count; ++i) vectors[i] = x + list[group.first + i] / ranks * columns;
        const Form gate = form_for(isa, group.expert->gate, bf16), up = form_for(isa, group.expert->up, bf16);
        const Share all = {columns, 0, columns};
        pack(isa, vectors, group.count, group.width, all, gate, inputs + group.input);
        if (gate != up) pack(isa, vectors, group.count, group.width, all, up, up_input(group));
    });
    const std::size_t inner_panels = ceil_div(inner, kPanel), threads = thread_count();
    parallel_for(groups.size() * inner_panels, [&](std::size_t task) {
        const Group& group = groups[task / inner_panels];
        const std::size_t first = task % inner_panels * kPanel, last = std::min(first + kPanel, inner);
        const std::size_t size = kPanel * kTokenBlock, width = group.width;
        float* const gate = own_scratch.take(3 * size);
        float *const up = gate + size, *const turned = up + size;
        const std::size_t later = std::min(task + threads, groups.size() * inner_panels - 1);
        const void* const next = row_of(groups[later / inner_panels].expert->gate, later % inner_panels * kPanel);
        multiply(isa, group.expert->gate, inputs + group.input, width, form_for(isa, group.expert->gate, bf16), first,
                 last, row_of(group.expert->up, first), gate);
        multiply(isa, group.expert->up, up_input(group), width, form_for(isa, group.expert->up, bf16), first, last, next,
                 up);
        isa.sequence->silu_multiply(gate, up, gate, (last - first) * width);
        const float* vectors[kTokenBlock];
        for (std::size_t token = 0; token < group.count; ++token) vectors[token] = turned + token * kPanel;
        turn(gate, last - first, width, group.count, [&](std::size_t token) { return turned + token * kPanel; });
        const Form form = form_for(isa, group.expert->down, bf16);
        pack(isa, vectors, group.count, width, {inner, first, last - first}, form, hidden + group.hidden);
    });
    const std::size_t panels = ceil_div(rows, kPanel);
    parallel_for(groups.size() * panels, [&](std::size_t task) {
        const Group& group = groups[task / panels];
        const std::size_t first = task % panels * kPanel, last = std::min(first + kPanel, rows);
        float* const part = own_scratch.take(kPanel * kTokenBlock);
        const std::size_t later = std::min(task + threads, groups.size() * panels - 1);
        const void* const next = row_of(groups[later / panels].expert->down, later % panels * kPanel);
        multiply(isa, group.expert->down, hidden + group.hidden, group.width, form_for(isa, group.expert->down, bf16),
                 first, last, next, part);
        turn(part, last - first, group.width, group.count, [&](std::size_t i) {
            return outputs + list[group.first + i] * rows + first;
        });
    });
    parallel_for(tokens, [&](std::size_t token) {
        add_up(outputs + token * ranks * rows, weights + token * ranks, ranks, rows, y + token * rows);
    });
}

}  // namespace

void linear(const Isa& isa, const MatrixView& matrix, const float* x, std::size_t tokens, bool bf16, float* y) {
    if (tokens == 1)
        linear_one(isa, matrix, x, bf16, y);
    else if (tokens > 1)
        linear_many(isa, matrix, x, tokens, bf16, y);
}

void mix_experts(const Isa& isa, const std::vector<ExpertView>& experts, const std::int32_t* slots, const float* weights,
                 std::size_t ranks, const float* x, std::size_t tokens, bool bf16, float* y) {
    if (tokens == 1)
        mix_for_one(isa, experts, slots, weights, ranks, x, bf16, y);
    else if (tokens > 1)
        mix_for_many(isa, experts, slots, weights, ranks, x, tokens, bf16, y);
}

void route(const float* logits, std::size_t tokens, std::size_t count, std::size_t top_k, bool normalize,
           std::int64_t* experts, float* weights) {
    std::vector<bool> taken(count);
    for (std::size_t token = 0; token < tokens; ++token, logits += count, experts += top_k, weights += top_k) {
        std::fill(taken.begin(), taken.end(), false);
        for (std::size_t rank = 0; rank < top_k; ++rank) {
            std::size_t best = count;
            for (std::size_t i = 0; i < count; ++i)
                if (!taken[i] && (best == count || logits[i] > logits[best])) best = i;
            taken[best] = true;
            experts[rank] = static_cast<std::int64_t>(best);
            weights[rank] = logits[best];
        }
        const float most = weights[0];
        double total = 0.0;
        for (std::size_t rank = 0; rank < top_k; ++rank) weights[rank] = std::exp(weights[rank] - most);
        if (normalize)
            for (std::size_t rank = 0; rank < top_k; ++rank) total += weights[rank];
        else
            for (std::size_t i = 0; i < count; ++i) total += std::exp(logits[i] - most);
        for (std::size_t rank = 0; rank < top_k; ++rank) weights[rank] = static_cast<float>(weights[rank] / total);
    }
}

}  // namespace mosaic
