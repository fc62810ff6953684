// Linear maps: see matrix.h.
#include "products.h"

namespace mosaic {
namespace {

void linear_step(const Isa& isa, const std::vector<MatrixView>& matrices, const float* x, std::size_t sequences, bool bf16,
                 const std::vector<float*>& y) {
    static thread_local std::vector<Vector> vectors_of_thread;
    static thread_local Pieces pieces_of_thread;
    std::vector<Vector>& vectors = vectors_of_thread;  // the other threads read those of this one
    Pieces& pieces = pieces_of_thread;
    if (vectors.size() < sequences) vectors.resize(sequences);
    const std::size_t columns = matrices[0].columns;
    bool needed[kForms] = {};
    std::size_t bytes = 0;
    for (const MatrixView& matrix : matrices) {
        needed[form_for(isa, matrix, bf16)] = true;
        bytes += matrix.rows * row_bytes(matrix);
    }
    parallel_for(sequences, [&](std::size_t i) { vectors[i].fill(isa, x + i * columns, columns, needed); });
    pieces.begin(bytes);
    for (std::size_t i = 0; i < matrices.size(); ++i) pieces.cut(matrices[i], i, row_bytes(matrices[i]));
    parallel_for(pieces.count(), [&](std::size_t task) {
        const Piece& piece = pieces[task];
        dot(isa, *piece.matrix, form_for(isa, *piece.matrix, bf16), sequences,
            [&](std::size_t i) -> Vector& { return vectors[i]; },
            [&](std::size_t i) { return y[piece.owner] + i * piece.matrix->rows; }, piece.first, piece.last,
            pieces.after(task));
    });
}

void linear_prompt(const Isa& isa, const std::vector<MatrixView>& matrices, const float* x, std::size_t tokens, bool bf16,
                   const std::vector<float*>& y) {
    static thread_local Scratch<float> packed_scratch[kForms];
    const std::size_t blocks = ceil_div(tokens, kTokenBlock), columns = matrices[0].columns, threads = thread_count();
    const auto count_of = [&](std::size_t block) { return std::min(kTokenBlock, tokens - block * kTokenBlock); };
    float* packed[kForms] = {};
    for (const MatrixView& matrix : matrices) {
        const Form form = form_for(isa, matrix, bf16);
        if (packed[form] != nullptr) continue;
        const std::size_t size = packed_size(isa, columns, kTokenBlock, form);
        packed[form] = packed_scratch[form].take(blocks * size);
        parallel_for(blocks, [&](std::size_t block) {
            const float* rows[kTokenBlock];
            const std::size_t count = count_of(block);
            for (std::size_t i = 0; i < count; ++i) rows[i] = x + (block * kTokenBlock + i) * columns;
            pack(isa, rows, count, padded(count), {columns, 0, columns}, form, packed[form] + block * size);
        });
    }
    for (std::size_t i = 0; i < matrices.size(); ++i) {
        const MatrixView& matrix = matrices[i];
        const Form form = form_for(isa, matrix, bf16);
        const std::size_t panels = ceil_div(matrix.rows, kPanel), size = packed_size(isa, columns, kTokenBlock, form);
        parallel_for(blocks * panels, [&](std::size_t task) {
            static thread_local Scratch<float> part_scratch;
            const std::size_t block = task / panels, first = task % panels * kPanel;
            const std::size_t last = std::min(first + kPanel, matrix.rows), count = count_of(block), width = padded(count);
            float* const part = part_scratch.take(kPanel * kTokenBlock);
            const void* const next = row_of(matrix, (task + threads) % panels * kPanel);
            multiply(isa, matrix, packed[form] + block * size, width, form, first, last, next, part);
            turn(part, last - first, width, count, [&](std::size_t token) {
                return y[i] + (block * kTokenBlock + token) * matrix.rows + first;
            });
        });
    }
}

}  // namespace

void linear(const Isa& isa, const std::vector<MatrixView>& matrices, const Activations& x, bool bf16,
            const std::vector<float*>& y) {
    if (x.rows() == 0) return;
    if (x.is_step())
        linear_step(isa, matrices, x.values, x.sequences, bf16, y);
    else
        linear_prompt(isa, matrices, x.values, x.rows(), bf16, y);
}

}  // namespace mosaic
