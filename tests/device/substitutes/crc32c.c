/* CRC-32C (Castagnoli), continued. By the CPU's instruction where it is x86-64 that has one (all that run Mosaic's
   fast kernels do), else by a table. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define POLYNOMIAL 0x82f63b78u

static uint32_t table[256];

__attribute__((constructor)) static void fill(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
        table[byte] = crc;
    }
}

static uint32_t by_table(uint32_t crc, const uint8_t *data, size_t count) {
    while (count--) crc = table[(crc ^ *data++) & 0xff] ^ crc >> 8;
    return crc;
}

#ifdef __x86_64__
__attribute__((target("sse4.2"))) static uint32_t by_instruction(uint32_t crc, const uint8_t *data, size_t count) {
    uint64_t sum = crc, word;
    for (; count >= 8; data += 8, count -= 8) {
        memcpy(&word, data, 8);
        sum = __builtin_ia32_crc32di(sum, word);
    }
    return by_table((uint32_t)sum, data, count);
}
#endif

uint32_t extend(uint32_t crc, const uint8_t *data, size_t count) {
#ifdef __x86_64__
    if (__builtin_cpu_supports("sse4.2")) return ~by_instruction(~crc, data, count);
#endif
    return ~by_table(~crc, data, count);
}
