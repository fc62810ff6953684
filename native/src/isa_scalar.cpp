// The kernels compiled for the baseline of the target (on x86-64 that includes SSE2): runs everywhere.
// No code of its own: the bodies are in *_kernels.inc.h, the flags in CMakeLists.txt. No STL here (see there).
#include "kernels.h"

namespace mosaic::scalar {

#include "e4m3_kernels.inc.h"
#include "quantize_kernels.inc.h"

constexpr Kernels kernels = {e4m3_decode, e4m3_encode, e4m3_count, quantize<float>, quantize<uint16_t>};

}  // namespace mosaic::scalar
