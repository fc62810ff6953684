// The table of kernels that every ISA unit fills: the one interface between them and the rest.
// Plain C types and headers only, because units compiled for different instruction sets include it (CMakeLists.txt).
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace mosaic {

// Inputs and outputs of a kernel never overlap; the bindings see to it.
struct Kernels {
    void (*e4m3_decode)(const uint8_t* codes, float* values, size_t count);
    void (*e4m3_encode)(const float* values, uint8_t* codes, size_t count);
};

namespace scalar { extern const Kernels kernels; }
namespace avx2 { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }

}  // namespace mosaic
