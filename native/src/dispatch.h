// Which instruction sets this CPU has, and which one is active. Not the kernels: those are behind Isa::kernels.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"
#include "sequence_kernels.h"
#include "matrix_kernels.h"
#include "measure_kernels.h"

namespace mosaic {

struct Isa {
    const char* name;
    const Kernels* kernels;
    const SequenceKernels* sequence;
    const MatrixKernels* matrix;
    const MeasureKernels* measure;
};

// Compiled in and supported by this CPU and its operating system, slowest first; never empty.
const std::vector<Isa>& supported_isas();

// The fastest supported one, or the one that the environment variable MOSAIC_ISA names, read at the first call.
// Throws std::invalid_argument if that is not a supported one.
const Isa& active_isa();

// The supported one of that name, the active one for "". Throws std::invalid_argument otherwise.
const Isa& isa_named(const std::string& name);

}  // namespace mosaic
