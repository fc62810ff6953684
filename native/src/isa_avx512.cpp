// The kernels compiled for AVX-512 F, BW, VL, VBMI and BF16.
// No code of its own: the bodies are in *_kernels.inc.h, the flags in CMakeLists.txt. No STL here (see there).
#include <immintrin.h>

#include "kernels.h"
#include "sequence_kernels.h"
#include "matrix_kernels.h"
#include "measure_kernels.h"

namespace mosaic::avx512 {

#include "e4m3_kernels.inc.h"
#include "quantize_kernels.inc.h"
#include "sequence_kernels.inc.h"
#include "matrix_kernels.inc.h"
#include "measure_kernels.inc.h"

constexpr Kernels kernels = {e4m3_decode, e4m3_encode, e4m3_count, quantize<float>, quantize<uint16_t>};
constexpr SequenceKernels sequence_kernels = {
    rms_norm,     gated_rms_norm, causal_conv,   delta_gates, delta_rule, rotate,
    sigmoid_gate, sigmoid_scale,  silu_multiply, attend,      merge};
constexpr MatrixKernels matrix_kernels = {arrange,      dot,      arrange_bf16, dot_bf16,
                                          pack,         multiply, pack_bf16,    multiply_bf16};
constexpr MeasureKernels measure_kernels = {read, chained_multiply_add, kMultiplyAddOperations, bf16_dot,
                                            kBf16DotOperations};

}  // namespace mosaic::avx512
