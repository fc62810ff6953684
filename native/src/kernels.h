// The table of kernels that every ISA unit fills: the one interface between them and the rest.
// Plain C types and headers only, because units compiled for different instruction sets include it (CMakeLists.txt).
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>

namespace mosaic {

// Rows and columns of a block; the format's, as in mosaic.format.e4m3.
constexpr size_t kBlock = 128;

// What quantisation cost: sums over the weights of squares, and the worst of them.
struct QuantizeSums {
    double signal = 0.0;         // of the weights
    double noise = 0.0;          // of stored minus weight
    double amax_noise = 0.0;     // what the noise would be with the scales of rule amax
    double max_abs_error = 0.0;
    int64_t zeroed = 0;          // weights that are not 0 and became 0
    double scale_min = INFINITY, scale_max = 0.0;
};

// Inputs and outputs of a kernel never overlap; the bindings see to it.
struct Kernels {
    void (*e4m3_decode)(const uint8_t* codes, float* values, size_t count);
    void (*e4m3_encode)(const float* values, uint8_t* codes, size_t count);
    // How often each of the 128 magnitudes (codes without sign) occurs, added to `counts`.
    void (*e4m3_count)(const uint8_t* codes, uint64_t* counts, size_t count);
    // Weights [rows, columns] in float32 or bfloat16 (as bits), whole 128x128 blocks; false: one is above `limit`.
    // Adds to `counts` (128) how often each magnitude occurs, to `exponents` (256) the biased exponents of the scales.
    bool (*quantize_f32)(const float* weights, size_t rows, size_t columns, float limit, unsigned candidates,
                         unsigned step, uint8_t* codes, uint16_t* scales, uint64_t* counts, uint64_t* exponents,
                         QuantizeSums* sums);
    bool (*quantize_bf16)(const uint16_t* weights, size_t rows, size_t columns, float limit, unsigned candidates,
                          unsigned step, uint8_t* codes, uint16_t* scales, uint64_t* counts, uint64_t* exponents,
                          QuantizeSums* sums);
};

namespace scalar { extern const Kernels kernels; }
namespace avx2 { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }

}  // namespace mosaic
