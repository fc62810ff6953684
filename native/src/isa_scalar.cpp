// The kernels compiled for the baseline of the target (on x86-64 that includes SSE2): runs everywhere.
// No code of its own: the bodies are in *.inc.h, the flags in CMakeLists.txt. No STL here (see there).
#include "kernels.h"
#include "matrix_kernels.h"
#include "measure_kernels.h"
#include "sequence_kernels.h"

namespace mosaic::scalar {

#include "all_kernels.inc.h"

}  // namespace mosaic::scalar
