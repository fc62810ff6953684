// The matrix kernels in AMX tiles, compiled for what isa_avx512.cpp is and AMX TILE and BF16; all else is that unit's.
// No code of its own: the bodies are in *.inc.h, the flags in CMakeLists.txt. No STL here (see there).
#include <immintrin.h>

#include "kernels.h"
#include "matrix_kernels.h"

#pragma GCC diagnostic ignored "-Wunused-function"      // tiles take the place of some
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // operands of intrinsics that GCC 12 says itself do not matter

namespace mosaic::amx {

#include "e4m3_kernels.inc.h"
#include "vectors.inc.h"
#include "matrix_decode.inc.h"
#include "matrix_kernels.inc.h"
#include "matrix_amx.inc.h"

constexpr MatrixKernels matrix_kernels = {arrange,  dot,          arrange_bf16,  dot_bf16,
                                          pack_amx, multiply_amx, pack_amx_bf16, multiply_amx_bf16,
                                          {4, 2, 2 * kParts, 2}};

}  // namespace mosaic::amx
