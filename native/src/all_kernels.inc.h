// All kernels and their tables: what each ISA unit is made of. Included once per unit, inside namespace mosaic::<isa>.

#include "e4m3_kernels.inc.h"
#include "vectors.inc.h"
#include "quantize_kernels.inc.h"
#include "sequence_kernels.inc.h"
#include "matrix_decode.inc.h"
#include "attention_kernels.inc.h"
#include "matrix_kernels.inc.h"
#include "measure_kernels.inc.h"

constexpr Kernels kernels = {e4m3_decode, e4m3_encode, e4m3_count, quantize<float>, quantize<uint16_t>};
constexpr SequenceKernels sequence_kernels = {
    rms_norm,     gated_rms_norm, causal_conv,   delta_gates, delta_rule, rotate,
    sigmoid_gate, sigmoid_scale,  silu_multiply, attend,      merge};
constexpr MatrixKernels matrix_kernels = {arrange,      dot,      arrange_bf16, dot_bf16,
                                          pack,         multiply, pack_bf16,    multiply_bf16,
                                          {4, 2, 4, 2}};
constexpr MeasureKernels measure_kernels = {read, chained_multiply_add, kMultiplyAddOperations, bf16_dot,
                                            kBf16DotOperations};
