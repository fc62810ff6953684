// Stands before the C library's pread in a test's process: holds reads, lets them fail, cuts them short, lists them.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <unistd.h>

volatile int hold;            // reads wait until it is 0 again
volatile int failure, times;  // the errno of the next so many reads
volatile long most = 1 << 30; // bytes one read may return
long offsets[1000];           // where reads began, in order
int begun;

static ssize_t read_at(int descriptor, void* out, size_t nbytes, off_t offset) {
    static ssize_t (*next)(int, void*, size_t, off_t);
    if (next == 0) next = (ssize_t(*)(int, void*, size_t, off_t))dlsym(RTLD_NEXT, "pread");
    offsets[__atomic_fetch_add(&begun, 1, __ATOMIC_SEQ_CST) % 1000] = offset;
    while (hold) usleep(1000);
    if (times > 0) {
        --times;
        errno = failure;
        return -1;
    }
    return next(descriptor, out, nbytes < (size_t)most ? nbytes : (size_t)most, offset);
}

ssize_t pread(int descriptor, void* out, size_t nbytes, off_t offset) {
    return read_at(descriptor, out, nbytes, offset);
}

ssize_t pread64(int descriptor, void* out, size_t nbytes, off64_t offset) {
    return read_at(descriptor, out, nbytes, offset);
}
