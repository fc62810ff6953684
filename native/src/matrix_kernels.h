// The table of matrix kernels that every ISA unit fills. Plain C types and headers only (see kernels.h).
//
// Two kinds of product: `dot` for a few vectors of activations, which decodes each weight once, in registers, and is as fast
// as the memory for one; `multiply` for many, which decodes a few rows at a time and is as fast as the arithmetic. Each
// sums an output element up in one order, however many vectors are multiplied together and whichever rows a thread has.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace mosaic {

enum Element { kE4M3 = 0, kBF16 = 1, kF32 = 2 };

constexpr size_t kGroup = 64;    // E4M3 codes that are decoded together; activations are arranged by such groups
constexpr size_t kTokens = 16;   // vectors that are multiplied come in multiples of this, the last ones empty
constexpr size_t kPanel = 64;    // rows that a thread multiplies at a time; a divisor of the block
constexpr size_t kTogether = 4;  // vectors that `dot` takes at most

// A weight [rows, columns] where it lies. E4M3 has a scale per 128x128 block, [ceil(rows/128), ceil(columns/128)].
struct MatrixView {
    const void* values;
    const void* scales;  // float32 or bfloat16; null unless E4M3
    Element element;
    bool scales_are_f32;
    size_t rows, columns;
};

// Elements in whole groups. Static: units for different ISAs may not share code.
static constexpr size_t in_groups(size_t count) { return (count + kGroup - 1) / kGroup * kGroup; }

// Values of vectors [columns] from `first` on, `count` of them: whole groups, unless they are the last.
struct Share {
    size_t columns, first, count;
};

// Vectors for `dot`, from one to kTogether: each as it was arranged, and where row 0 of its products goes.
template <typename Value> struct Vectors {
    size_t count;
    const Value* x[kTogether];
    float* y[kTogether];
};

// Bytes that a value of a vector takes, by what it was prepared for; vectors take whole groups.
struct VectorBytes {
    size_t dot, dot_bf16, multiply, multiply_bf16;
};

struct MatrixKernels {
    // One vector [columns] for `dot` with weights of this element, filled up with zeros, in an order of the ISA's own.
    void (*arrange)(const float* x, size_t columns, Element element, float* arranged);
    // The rows from `first` to `last` of each vector's products. `next` is where the caller will read on, if anywhere.
    void (*dot)(const MatrixView& matrix, const Vectors<float>& vectors, size_t first, size_t last, const void* next);

    // The same with activations in bfloat16; null where the CPU has no such instructions. E4M3 only.
    void (*arrange_bf16)(const float* x, size_t columns, uint16_t* arranged);
    void (*dot_bf16)(const MatrixView& matrix, const Vectors<uint16_t>& vectors, size_t first, size_t last,
                     const void* next);

    // `count` vectors for `multiply`, of which `x[i]` gives the start of each, into packed memory for `tokens`, a multiple
    // of kTokens, in an order of the ISA's own. `share` says which of their values.
    void (*pack)(const float* const* x, size_t count, size_t tokens, const Share& share, Element element, float* packed);
    // y [last - first][tokens], for at most kPanel rows within a block. `next` as above.
    void (*multiply)(const MatrixView& matrix, const float* packed, size_t tokens, size_t first, size_t last,
                     const void* next, float* y);

    // The same in bfloat16. Null, E4M3 only, as above.
    void (*pack_bf16)(const float* const* x, size_t count, size_t tokens, const Share& share, uint16_t* packed);
    void (*multiply_bf16)(const MatrixView& matrix, const uint16_t* packed, size_t tokens, size_t first, size_t last,
                          const void* next, float* y);

    VectorBytes bytes;
};

namespace scalar { extern const MatrixKernels matrix_kernels; }
namespace avx2 { extern const MatrixKernels matrix_kernels; }
namespace avx512 { extern const MatrixKernels matrix_kernels; }
namespace amx { extern const MatrixKernels matrix_kernels; }

}  // namespace mosaic
