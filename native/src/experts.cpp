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

// What is to be computed now, expert by expert: numbers row * ranks + rank, each expert's in ascending order.
class Uses {
  public:
    void sort(const std::int32_t* slots, std::size_t count, std::size_t experts) {
        ends_.assign(experts + 1, 0);  // where an expert's uses begin, until they are filled in
        for (std::size_t use = 0; use < count; ++use)
            if (slots[use] != kNotNow) ++ends_[slots[use] + 1];
        for (std::size_t slot = 0; slot < experts; ++slot) ends_[slot + 1] += ends_[slot];
        uses_.resize(ends_[experts]);
        for (std::size_t use = 0; use < count; ++use)
            if (slots[use] != kNotNow) uses_[ends_[slots[use]]++] = use;
    }

    std::size_t operator[](std::size_t place) const { return uses_[place]; }
    std::size_t size() const { return uses_.size(); }
    std::size_t first(std::size_t slot) const { return slot == 0 ? 0 : ends_[slot - 1]; }
    std::size_t last(std::size_t slot) const { return ends_[slot]; }

  private:
    std::vector<std::size_t> uses_, ends_;
};

void apply_in_step(const Isa& isa, const std::vector<ExpertView>& experts, const std::int32_t* slots, std::size_t ranks,
                   const float* x, std::size_t sequences, bool bf16, float* outputs) {
    static thread_local std::vector<Vector> inputs_of_thread, hidden_of_thread;
    static thread_local Uses uses_of_thread;
    static thread_local Pieces pieces_of_thread;
    std::vector<Vector>& inputs = inputs_of_thread;  // the other threads read those of this one
    std::vector<Vector>& hidden = hidden_of_thread;  // of each use, in their order
    Uses& uses = uses_of_thread;
    Pieces& pieces = pieces_of_thread;
    const std::size_t columns = experts[0].gate.columns, rows = experts[0].down.rows;
    uses.sort(slots, sequences * ranks, experts.size());
    if (inputs.size() < sequences) inputs.resize(sequences);
    if (hidden.size() < uses.size()) hidden.resize(uses.size());
    bool needed[kForms] = {};
    std::size_t bytes = 0, down_bytes = 0;
    for (std::size_t slot = 0; slot < experts.size(); ++slot) {
        if (uses.first(slot) == uses.last(slot)) continue;
        const ExpertView& expert = experts[slot];
        for (const MatrixView* matrix : {&expert.gate, &expert.up}) {
            needed[form_for(isa, *matrix, bf16)] = true;
            bytes += matrix->rows * row_bytes(*matrix);
        }
        for (std::size_t place = uses.first(slot); place < uses.last(slot); ++place)
            hidden[place].reserve(isa, form_for(isa, expert.down, bf16), expert.gate.rows);
        down_bytes += rows * row_bytes(expert.down);
    }
    parallel_for(sequences, [&](std::size_t i) { inputs[i].fill(isa, x + i * columns, columns, needed); });
    pieces.begin(bytes);
    for (std::size_t slot = 0; slot < experts.size(); ++slot) {
        const ExpertView& expert = experts[slot];
        if (uses.first(slot) < uses.last(slot)) pieces.cut(expert.gate, slot, row_bytes(expert.gate) + row_bytes(expert.up));
    }
    parallel_for(pieces.count(), [&](std::size_t task) {
        static thread_local Scratch<float> part_scratch;
        const Piece& piece = pieces[task];
        const ExpertView& expert = experts[piece.owner];
        const std::size_t first = piece.first, last = piece.last, size = last - first;
        const std::size_t place = uses.first(piece.owner), count = uses.last(piece.owner) - place;
        float* const gate = part_scratch.take(2 * count * size);
        float* const up = gate + count * size;
        const auto input = [&](std::size_t i) -> Vector& { return inputs[uses[place + i] / ranks]; };
        const auto part_of = [&](float* parts) { return [=](std::size_t i) { return parts + i * size - first; }; };
        dot(isa, expert.gate, form_for(isa, expert.gate, bf16), count, input, part_of(gate), first, last,
            row_of(expert.up, first));
        dot(isa, expert.up, form_for(isa, expert.up, bf16), count, input, part_of(up), first, last, pieces.after(task));
        for (std::size_t i = 0; i < count; ++i) {
            float* const part = gate + i * size;
            isa.sequence->silu_multiply(part, up + i * size, part, size);
            hidden[place + i].fill_part(isa, part, first, size, form_for(isa, expert.down, bf16));
        }
    });
    pieces.begin(down_bytes);
    for (std::size_t slot = 0; slot < experts.size(); ++slot) {
        const MatrixView& down = experts[slot].down;
        if (uses.first(slot) < uses.last(slot)) pieces.cut(down, slot, row_bytes(down));
    }
    parallel_for(pieces.count(), [&](std::size_t task) {
        const Piece& piece = pieces[task];
        const std::size_t place = uses.first(piece.owner), count = uses.last(piece.owner) - place;
        dot(isa, *piece.matrix, form_for(isa, *piece.matrix, bf16), count,
            [&](std::size_t i) -> Vector& { return hidden[place + i]; },
            [&](std::size_t i) { return outputs + uses[place + i] * rows; }, piece.first, piece.last, pieces.after(task));
    });
}

// A share of the tokens of one expert.
struct Group {
    const ExpertView* expert;
    std::size_t first, count, width;  // place among the uses, tokens, and these in whole kTokens
    std::size_t input, hidden;        // where its packed vectors begin
};

void apply_in_prompt(const Isa& isa, const std::vector<ExpertView>& experts, const std::int32_t* slots, std::size_t ranks,
                     const float* x, std::size_t tokens, bool bf16, float* outputs) {
    static thread_local Scratch<float> input_scratch, hidden_scratch;
    static thread_local Uses uses_of_thread;
    static thread_local Pieces pieces_of_thread;
    Uses& uses = uses_of_thread;  // the other threads read those of this one
    Pieces& pieces = pieces_of_thread;
    const std::size_t columns = experts[0].gate.columns, rows = experts[0].down.rows;
    uses.sort(slots, tokens * ranks, experts.size());
    std::vector<Group> groups;
    std::size_t input_size = 0, hidden_size = 0;
    for (std::size_t slot = 0; slot < experts.size(); ++slot)
        for (std::size_t first = uses.first(slot); first < uses.last(slot); first += kTokenBlock) {
            const std::size_t count = std::min(kTokenBlock, uses.last(slot) - first), width = padded(count);
            groups.push_back({&experts[slot], first, count, width, input_size, hidden_size});
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
        for (std::size_t i = 0; i < group.count; ++i) vectors[i] = x + uses[group.first + i] / ranks * columns;
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
            return outputs + uses[group.first + i] * rows + first;
        });
    });
}

}  // namespace

void apply_experts(const Isa& isa, const std::vector<ExpertView>& experts, const std::int32_t* slots, std::size_t ranks,
                   const Activations& x, bool bf16, float* outputs) {
    if (x.rows() == 0) return;
    if (x.is_step())
        apply_in_step(isa, experts, slots, ranks, x.values, x.sequences, bf16, outputs);
    else
        apply_in_prompt(isa, experts, slots, ranks, x.values, x.rows(), bf16, outputs);
}

void add_outputs(const float* outputs, const float* weights, std::size_t tokens, std::size_t ranks, std::size_t rows,
                 float* y) {
    parallel_for(tokens, [&](std::size_t token) {
        add_up(outputs + token * ranks * rows, weights + token * ranks, ranks, rows, y + token * rows);
    });
}

void mix_experts(const Isa& isa, const std::vector<ExpertView>& experts, const std::int32_t* slots, const float* weights,
                 std::size_t ranks, const Activations& x, bool bf16, float* y) {
    static thread_local Scratch<float> output_scratch;
    const std::size_t rows = experts[0].down.rows;
    float* const outputs = output_scratch.take(x.rows() * ranks * rows);
    apply_experts(isa, experts, slots, ranks, x, bf16, outputs);
    add_outputs(outputs, weights, x.rows(), ranks, rows, y);
}

}  // namespace mosaic
