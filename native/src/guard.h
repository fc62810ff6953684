// What happens if a mapped file becomes shorter while it is read: the system can only send SIGBUS, and this tells why.
#pragma once

#include <cstddef>
#include <string>

namespace mosaic {

// From now on a SIGBUS within these bytes prints `message` on standard error and ends the process with exit code 2. Any
// other SIGBUS does what it did before. std::length_error if there are too many.
void guard_mapping(const void* first, std::size_t nbytes, const std::string& message);

// The mapping is about to go.
void release_mapping(const void* first);

}  // namespace mosaic
