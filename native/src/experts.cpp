// Routed experts: see matrix.h.
#include <cmath>

#include "products.h"

namespace mosaic {
namespace {

// y = the sum over ranks, in order, of weights[rank] * outputs[rank].
void add_up(const float* outputs, const float* weights, std::size_t ranks, std::size_t rows, float* y) {
    for (std::size_t rank = 0; rank < ranks; ++rank, outputs += rows)
        for (std::size_t row = 0; row < rows; ++row) y[row] = (rank == 0 ? 0.0f : y[row]) + weights[rank] * outputs[row];
}

void apply_to_one(const Isa& isa, const std::vector<ExpertView>& experts, const std::int32_t* slots, std::size_t all_ranks,
                  const float* x, bool bf16, float* outputs) {
    static thread_local Vector input_of_thread;
    static thread_local std::vector<Vector> hidden_of_thread;
    static thread_local Pieces pieces_of_thread;
    Vector& input = input_of_thread;  // the other threads read those of this one
    std::vector<Vector>& hidden = hidden_of_thread;
    Pieces& pieces = pieces_of_thread;
    if (hidden.size() < all_ranks) hidden.resize(all_ranks);
    const std::size_t columns = experts[0].gate.columns, rows = experts[0].down.rows;
    static thread_local std::vector<std::size_t> ranks;
    ranks.clear();
    for (std::size_t rank = 0; rank < all_ranks; ++rank)
        if (slots[rank] != kNotNow) ranks.push_back(rank);
    bool filled[kForms] = {};
    std::size_t bytes = 0, down_bytes = 0;
    for (const std::size_t rank : ranks) {
        const ExpertView& expert = experts[slots[rank]];
        for (const MatrixView* matrix : {&expert.gate, &expert.up}) {
            const Form form = form_for(isa, *matrix, bf16);
            if (!filled[form]) input.fill(isa, x, columns, form);
            filled[form] = true;
            bytes += matrix->rows * row_bytes(*matrix);
        }
        hidden[rank].reserve(isa, form_for(isa, expert.down, bf16), expert.gate.rows);
        down_bytes += rows * row_bytes(expert.down);
    }
    pieces.begin(bytes);
    for (const std::size_t rank : ranks) {
        const ExpertView& expert = experts[slots[rank]];
        pieces.cut(expert.gate, rank, row_bytes(expert.gate) + row_bytes(expert.up));
    }
    parallel_for(pieces.count(), [&](std::size_t task) {
        static thread_local Scratch<float> part_scratch;
        const auto [matrix, rank, first, last] = pieces[task];
        const ExpertView& expert = experts[slots[rank]];
        float* const gate = part_scratch.take(2 * (last - first));
        float* const up = gate + (last - first);
        input.dot(isa, expert.gate, form_for(isa, expert.gate, bf16), first, last, row_of(expert.up, first), gate - first);
        input.dot(isa, expert.up, form_for(isa, expert.up, bf16), first, last, pieces.after(task), up - first);
        isa.sequence->silu_multiply(gate, up, gate, last - first);
        hidden[rank].fill_part(isa, gate, first, last - first, form_for(isa, expert.down, bf16));
    });
    pieces.begin(down_bytes);
    for (const std::size_t rank : ranks) {
        const MatrixView& down = experts[slots[rank]].down;
        pieces.cut(down, rank, row_bytes(down));
    }
    parallel_for(pieces.count(), [&](std::size_t task) {
        const auto [down, rank, first, last] = pieces[task];
        hidden[rank].dot(isa, *down, form_for(isa, *down, bf16), first, last, pieces.after(task), outputs + rank * rows);
    });
}

// A share of the tokens of one expert.
struct Group {
    const ExpertView* expert;
    std::size_t first, count, width;  // places in the list of all, tokens, and in whole kTokens
    std::size_t input, hidden;        // where its packed vectors begin
};

void apply_to_many(const Isa& isa, const std::vector<ExpertView>& experts, const std::int32_t* slots, std::size_t ranks,
                   const float* x, std::size_t tokens, bool bf16, float* outputs) {
    static thread_local Scratch<float> input_scratch, hidden_scratch;
    static thread_local Pieces pieces_of_thread;
    Pieces& pieces = pieces_of_thread;
    const std::size_t columns = experts[0].gate.columns, rows = experts[0].down.rows;
    std::vector<std::vector<std::size_t>> uses(experts.size());  // token * ranks + rank
    for (std::size_t use = 0; use < tokens * ranks; ++use)
        if (slots[use] != kNotNow) uses[slots[use]].push_back(use);
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
            hidden_size += packed_size(isa, expert.gate.rows, width, form_for(isa, expert.down, bf16));
        }
    float* const inputs = input_scratch.take(input_size);
    float* const hidden = hidden_scratch.take(hidden_size);
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
    pieces.begin();
    for (std::size_t number = 0; number < groups.size(); ++number) pieces.cut_panels(groups[number].expert->gate, number);
    parallel_for(pieces.count(), [&](std::size_t task) {
        static thread_local Scratch<float> part_scratch;
        const std::size_t first = pieces[task].first, last = pieces[task].last;
        const Group& group = groups[pieces[task].owner];
        const ExpertView& expert = *group.expert;
        const std::size_t size = kPanel * kTokenBlock, width = group.width;
        float* const gate = part_scratch.take(3 * size);
        float *const up = gate + size, *const turned = up + size;
        multiply(isa, expert.gate, inputs + group.input, width, form_for(isa, expert.gate, bf16), first, last,
                 row_of(expert.up, first), gate);
        multiply(isa, expert.up, up_input(group), width, form_for(isa, expert.up, bf16), first, last, pieces.after(task), up);
        isa.sequence->silu_multiply(gate, up, gate, (last - first) * width);
        const float* vectors[kTokenBlock];
        for (std::size_t token = 0; token < group.count; ++token) vectors[token] = turned + token * kPanel;
        turn(gate, last - first, width, group.count, [&](std::size_t token) { return turned + token * kPanel; });
        const Form form = form_for(isa, expert.down, bf16);
        pack(isa, vectors, group.count, width, {expert.gate.rows, first, last - first}, form, hidden + group.hidden);
    });
    pieces.begin();
    for (std::size_t number = 0; number < groups.size(); ++number) pieces.cut_panels(groups[number].expert->down, number);
    parallel_for(pieces.count(), [&](std::size_t task) {
        static thread_local Scratch<float> part_scratch;
        const std::size_t first = pieces[task].first, last = pieces[task].last;
        const Group& group = groups[pieces[task].owner];
        const MatrixView& down = group.expert->down;
        float* const part = part_scratch.take(kPanel * kTokenBlock);
        multiply(isa, down, hidden + group.hidden, group.width, form_for(isa, down, bf16), first, last, pieces.after(task),
                 part);
        turn(part, last - first, group.width, group.count, [&](std::size_t i) {
            return outputs + list[group.first + i] * rows + first;
        });
    });
}

}  // namespace

void apply_experts(const Isa& isa, const std::vector<ExpertView>& experts, const std::int32_t* slots, std::size_t ranks,
                   const float* x, std::size_t tokens, bool bf16, float* outputs) {
    if (tokens == 1)
        apply_to_one(isa, experts, slots, ranks, x, bf16, outputs);
    else if (tokens > 1)
        apply_to_many(isa, experts, slots, ranks, x, tokens, bf16, outputs);
}

void add_outputs(const float* outputs, const float* weights, std::size_t tokens, std::size_t ranks, std::size_t rows,
                 float* y) {
    parallel_for(tokens, [&](std::size_t token) {
        add_up(outputs + token * ranks * rows, weights + token * ranks, ranks, rows, y + token * rows);
    });
}

void mix_experts(const Isa& isa, const std::vector<ExpertView>& experts, const std::int32_t* slots, const float* weights,
                 std::size_t ranks, const float* x, std::size_t tokens, bool bf16, float* y) {
    static thread_local Scratch<float> output_scratch;
    const std::size_t rows = experts[0].down.rows;
    float* const outputs = output_scratch.take(tokens * ranks * rows);
    apply_experts(isa, experts, slots, ranks, x, tokens, bf16, outputs);
    add_outputs(outputs, weights, tokens, ranks, rows, y);
}

}  // namespace mosaic
