// The table of measuring kernels that every ISA unit fills. Plain C types and headers only (see kernels.h).
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace mosaic {

struct MeasureKernels {
    // Reads every whole line of 64 bytes once. The XOR of all of them, folded, is returned so that none can be left out.
    uint64_t (*read)(const uint8_t* bytes, size_t count);

    // `rounds` rounds of independent chains of dependent multiply-adds in registers; what they come to means nothing.
    float (*multiply_add)(size_t rounds);
    size_t multiply_add_operations;  // of a round, in float32 operations: a multiply-add is two for each lane

    // The same with the dot product of pairs of bfloat16 added to float32; null where the CPU has none.
    float (*bf16_dot)(size_t rounds);
    size_t bf16_dot_operations;
};

namespace scalar { extern const MeasureKernels measure_kernels; }
namespace avx2 { extern const MeasureKernels measure_kernels; }
namespace avx512 { extern const MeasureKernels measure_kernels; }

}  // namespace mosaic
