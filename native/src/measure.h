// What this machine can do at most, on the thread pool: the ceilings that measured speeds are compared with.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dispatch.h"

namespace mosaic {

// Bytes per second at which all threads together read `bytes`, much larger than the caches, once through: the median of
// as many passes as fit into `seconds`, at least one, after one that is not counted.
double read_bandwidth(const Isa& isa, const std::uint8_t* bytes, std::size_t count, double seconds);

// Float32 operations per second (a multiply-add is two) of multiply-adds in registers on all threads; a median as above.
double multiply_add_peak(const Isa& isa, double seconds);

// The same of dot products of bfloat16 pairs; 0 if the instruction set has none.
double bf16_dot_peak(const Isa& isa, double seconds);

}  // namespace mosaic
