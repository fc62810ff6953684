// The kernels compiled for AVX2, FMA and F16C.
// No code of its own: the bodies are in *.inc.h, the flags in CMakeLists.txt. No STL here (see there).
#include <immintrin.h>

#include "kernels.h"
#include "matrix_kernels.h"
#include "measure_kernels.h"
#include "sequence_kernels.h"

namespace mosaic::avx2 {

#include "all_kernels.inc.h"

}  // namespace mosaic::avx2
