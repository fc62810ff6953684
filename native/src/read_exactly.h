// One read of a file into memory, wherever either lies. No threads and no Python here.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mosaic {

constexpr std::size_t kPage = 4096;  // what O_DIRECT wants offset, length and address to be multiples of

// Bytes of a file and where in memory they belong.
struct Span {
    int descriptor;
    std::int64_t offset;
    std::uint8_t* out;
    std::size_t nbytes;
};

constexpr int kFileEnded = -1;

// Fills all of the span. 0, or why not: an errno, or kFileEnded.
//
// A descriptor with O_DIRECT is read straight into `out` if offset, address and size are whole pages, and otherwise
// through `bounce`: page-aligned memory of `bounce_nbytes`, whole pages too. Where the file system refuses direct reads
// after all, the descriptor loses O_DIRECT (as in format/direct.py) and is read plainly.
int read_exactly(Span span, std::uint8_t* bounce, std::size_t bounce_nbytes);

}  // namespace mosaic
