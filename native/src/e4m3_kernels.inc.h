// E4M3 <-> float32, element by element: the body that each ISA unit includes into a namespace of its own.
// Written so that the compiler vectorises it for that unit's instruction set; branch-free, and integer arithmetic
// wherever something is rounded, so the bits are the same on every ISA and under every MXCSR setting (rounding mode,
// DAZ, FTZ). Not the block codec: scales belong to mosaic.format.
//
// An E4M3 code is sign, 4 exponent bits with bias 7, 3 mantissa bits. Exponent 0 holds the multiples of 2^-9 below
// 2^-6; there is no infinity; 0x7F and 0xFF are NaN; the largest finite code is 0x7E.

// No include guard: included once per ISA unit, inside namespace mosaic::<isa>.
namespace {

constexpr size_t kMagnitudes = 128;  // codes without their sign
constexpr int32_t kNanCode = 0x7F;
constexpr int32_t kMaxCode = 0x7E;
constexpr int32_t kSmallestNormalCode = 8;
constexpr int32_t kDroppedBits = 23 - 3;      // mantissa bits that float32 has and E4M3 has not
constexpr int32_t kRebias = (127 - 7) << 23;  // from E4M3's exponent bias to float32's, in float32 bits
constexpr int32_t kFloatInfinity = 0x7F800000;
constexpr int32_t kFloatNan = 0x7FC00000;

inline int32_t bits_of(float value) {
    int32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(int32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

// The float32 bits of a normal code: exponent and mantissa move as one.
constexpr int32_t normal_bits(int32_t code) { return (code << kDroppedBits) + kRebias; }

// bits / 2^dropped, to nearest, ties to even.
inline int32_t round_off(int32_t bits, int32_t dropped) {
    const int32_t odd = (bits >> dropped) & 1;
    return (bits + (1 << (dropped - 1)) - 1 + odd) >> dropped;
}

// A code in the low byte.
inline float decode_one(int32_t byte) {
    const int32_t code = byte & 0x7F;
    const int32_t sign = static_cast<int32_t>((static_cast<uint32_t>(byte) & 0x80u) << 24);
    const int32_t normal = code == kNanCode ? kFloatNan : normal_bits(code);
    const int32_t subnormal = bits_of(static_cast<float>(code) * 0x1p-9f);  // exact
    // A mask made of the sign bit, not ?: here: GCC makes that a branch, and the loop is not vectorised.
    const int32_t is_subnormal = (code - kSmallestNormalCode) >> 31;
    return float_of((subnormal & is_subnormal) | (normal & ~is_subnormal) | sign);
}

inline int32_t encode_one(float value) {
    const int32_t bits = bits_of(value);
    const int32_t magnitude = bits & 0x7FFFFFFF;
    const int32_t saturated = magnitude < normal_bits(kMaxCode) ? magnitude : normal_bits(kMaxCode);

    // A carry out of the mantissa moves into the exponent, as it should: codes are in the order of their values.
    const int32_t normal = round_off(saturated - kRebias, kDroppedBits);

    // Below 2^-6 the step between codes stays 2^-9. A float32 from 2^-10 up is a whole number of 2^-33, so the product
    // and its truncation are exact there; what lies below 2^-10 rounds to zero anyway; from 2^-6 on it plays no part.
    const int32_t small = magnitude < normal_bits(kSmallestNormalCode) ? magnitude : normal_bits(kSmallestNormalCode);
    const int32_t subnormal = round_off(static_cast<int32_t>(float_of(small) * 0x1p33f), 33 - 9);

    // The normal formula spaces codes below 2^-6 too finely and so comes out lower than the subnormal one.
    const int32_t finite = normal > subnormal ? normal : subnormal;
    const int32_t nan = magnitude > kFloatInfinity ? kNanCode : 0;
    const int32_t code = finite > nan ? finite : nan;
    return code | (bits >> 24 & 0x80);
}

void e4m3_decode(const uint8_t* __restrict codes, float* __restrict values, size_t count) {
    for (size_t i = 0; i < count; ++i) values[i] = decode_one(codes[i]);
}

void e4m3_encode(const float* __restrict values, uint8_t* __restrict codes, size_t count) {
    for (size_t i = 0; i < count; ++i) codes[i] = static_cast<uint8_t>(encode_one(values[i]));
}

// How often each magnitude occurs, two neighbours counted at a time: 14 bits, a table that all but fits the L1 cache.
// Half as many counters are added to, and seldom one whose last sum is still being stored.
void e4m3_count(const uint8_t* codes, uint64_t* counts, size_t count) {
    constexpr size_t kMost = size_t{1} << 31;  // codes after which a counter might be full
    constexpr uint64_t kEvenBytes = 0x007F007F007F007F, kOddBytes = 0x3F803F803F803F80;
    while (count > 0) {
        const size_t part = count < kMost ? count : kMost, whole = part / 8 * 8;
        uint32_t pairs[kMagnitudes * kMagnitudes] = {};  // by odd and even byte
        for (size_t i = 0; i < whole; i += 8) {
            uint64_t eight;
            __builtin_memcpy(&eight, codes + i, sizeof eight);
            const uint64_t four = (eight & kEvenBytes) | (eight >> 1 & kOddBytes);
            for (size_t pair = 0; pair < 4; ++pair) ++pairs[four >> 16 * pair & 0xFFFF];
        }
        for (size_t i = whole; i < part; ++i) ++counts[codes[i] & 0x7F];
        for (size_t odd = 0; odd < kMagnitudes; ++odd)
            for (size_t even = 0; even < kMagnitudes; ++even) {
                counts[odd] += pairs[odd * kMagnitudes + even];
                counts[even] += pairs[odd * kMagnitudes + even];
            }
        codes += part;
        count -= part;
    }
}

}  // namespace
