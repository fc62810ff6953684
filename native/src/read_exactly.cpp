// See read_exactly.h.
#include "read_exactly.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace mosaic {
namespace {

bool is_direct(int descriptor) {
    const int flags = fcntl(descriptor, F_GETFL);
    return flags != -1 && (flags & O_DIRECT) != 0;
}

void clear_direct(int descriptor) {
    const int flags = fcntl(descriptor, F_GETFL);
    if (flags != -1) fcntl(descriptor, F_SETFL, flags & ~O_DIRECT);
}

bool in_whole_pages(const Span& span) {
    const auto address = reinterpret_cast<std::uintptr_t>(span.out);
    return (static_cast<std::size_t>(span.offset) | address | span.nbytes) % kPage == 0;
}

std::size_t whole_pages(std::size_t nbytes) { return (nbytes + kPage - 1) / kPage * kPage; }

}  // namespace

int read_exactly(Span span, std::uint8_t* bounce, std::size_t bounce_nbytes) {
    for (bool refused = false; span.nbytes > 0;) {
        const bool straight = in_whole_pages(span) || !is_direct(span.descriptor);
        // Bytes before the span in the first page, which only the bounce buffer has room for.
        const std::size_t before = straight ? 0 : static_cast<std::size_t>(span.offset) % kPage;
        const ssize_t count =
            straight ? pread(span.descriptor, span.out, span.nbytes, span.offset)
                     : pread(span.descriptor, bounce, std::min(whole_pages(before + span.nbytes), bounce_nbytes),
                             span.offset - static_cast<std::int64_t>(before));
        if (count < 0) {
            if (errno == EINTR) continue;
            if (errno != EINVAL || refused) return errno;
            refused = true;  // another thread may have cleared the flag meanwhile; what is really invalid stays so
            clear_direct(span.descriptor);
            continue;
        }
        if (static_cast<std::size_t>(count) <= before) return kFileEnded;
        const std::size_t fresh = std::min(static_cast<std::size_t>(count) - before, span.nbytes);
        if (!straight) std::memcpy(span.out, bounce + before, fresh);
        span.offset += static_cast<std::int64_t>(fresh);
        span.out += fresh;
        span.nbytes -= fresh;
    }
    return 0;
}

}  // namespace mosaic
