// Block quantisation, rules `amax` and `mse` of docs/FORMAT.md section 3: the body that each ISA unit includes after the
// codec. Codes and scales are bit-equal to the numpy reference in mosaic.format.e4m3, and the error sums are the same on
// every ISA: 16 lanes to a block (column mod 16), float32 within a row, float64 from row to row.
//
// A block is scaled by the power of two that takes its scale into [1, 2), so that nothing below over- or underflows
// where it matters; weights that fall under float32's range by that are 2^-100 of the largest and round to zero anyway.

// No include guard: included once per ISA unit, inside namespace mosaic::<isa>, after e4m3_kernels.inc.h.
namespace {

constexpr size_t kLanes = 16;
constexpr size_t kAbreast = 16;  // blocks side by side that are worked on together
constexpr float kMaxValue = 448.0f;
constexpr float kSmallestScale = 0x1p-126f;

inline float weight_at(const float* weights, size_t i) { return weights[i]; }
inline float weight_at(const uint16_t* weights, size_t i) { return float_of(static_cast<int32_t>(weights[i]) << 16); }

// Positive float32 to the next bfloat16 that is not smaller: its bits.
inline uint16_t bf16_rounded_up(float value) { return static_cast<uint16_t>((bits_of(value) + 0xFFFF) >> 16); }

// Sixteen lanes as vectors of this ISA's width, so that sums stay in registers.
#if defined(__AVX512F__)
constexpr size_t kRegister = 64;
#elif defined(__AVX__)
constexpr size_t kRegister = 32;
#else
constexpr size_t kRegister = 16;
#endif
constexpr size_t kWidth = kRegister / sizeof(float), kParts = kLanes / kWidth;
using Floats = float __attribute__((vector_size(kRegister)));
using Ints = int32_t __attribute__((vector_size(kRegister)));
using Doubles = double __attribute__((vector_size(2 * kRegister)));
using Halves = uint16_t __attribute__((vector_size(kRegister / 2)));
using Bytes = uint8_t __attribute__((vector_size(kRegister / 4)));

template <typename Vector, typename T> inline void load(Vector& vector, const T* source) {
    __builtin_memcpy(&vector, source, sizeof vector);
}

inline void load_bits(Ints& bits, const float* weights) { load(bits, weights); }
inline void load_bits(Ints& bits, const uint16_t* weights) {
    Halves halves;
    load(halves, weights);
    bits = __builtin_convertvector(halves, Ints) << 16;
}

inline Floats floats_of(Ints bits) { return reinterpret_cast<Floats>(bits); }
inline Ints bits_of(Floats values) { return reinterpret_cast<Ints>(values); }

// values / scale as IEEE division rounds it. With fused multiply-add: a first guess, made right by its exact remainder
// (Markstein); that needs the correctly rounded reciprocal and no underflow, which scales in [1, 2) see to for every
// quotient that does not become the code 0.
inline Floats divided(Floats values, float scale, float reciprocal) {
#if defined(__AVX512F__)
    const Floats divisor = Floats{} + scale, inverse = Floats{} + reciprocal, guess = values * inverse;
    return _mm512_fmadd_ps(_mm512_fnmadd_ps(guess, divisor, values), inverse, guess);
#elif defined(__FMA__)
    const Floats divisor = Floats{} + scale, inverse = Floats{} + reciprocal, guess = values * inverse;
    return _mm256_fmadd_ps(_mm256_fnmadd_ps(guess, divisor, values), inverse, guess);
#else
    (void)reciprocal;
    return values / scale;
#endif
}

// Codes of quotients in [0, 448], and the values they stand for.
inline Ints encode(Floats quotients, Floats& values) {
    constexpr int32_t kept = ~((1 << kDroppedBits) - 1);
    constexpr float magic = 0x1p14f;  // a float32 of this size is a whole number of 2^-9
    const Ints bits = bits_of(quotients);
    const Ints normal = (bits + ((1 << (kDroppedBits - 1)) - 1) + (bits >> kDroppedBits & 1)) & kept;
    const Floats shifted = quotients + magic;
    const Floats subnormal = shifted - magic;
    const Ints is_subnormal = bits < normal_bits(kSmallestNormalCode);
    const Ints normal_code = (normal - kRebias) >> kDroppedBits;
    const Ints subnormal_code = bits_of(shifted) - (Ints{} + 0x46800000);  // the bits of `magic`
    values = is_subnormal ? subnormal : floats_of(normal);
    return is_subnormal ? subnormal_code : normal_code;
}

// The float32 bits of the largest magnitudes of `count` blocks side by side, row by row as they lie in memory.
// Infinities and NaN are larger than any number.
inline void largest_magnitudes(const float* weights, size_t stride, size_t count, int32_t* largest) {
    int32_t lanes[kAbreast][kLanes] = {};
    for (size_t row = 0; row < kBlock; ++row, weights += stride)
        for (size_t block = 0; block < count; ++block)
            for (size_t column = 0; column < kBlock; column += kLanes)
                for (size_t lane = 0; lane < kLanes; ++lane) {
                    const int32_t bits = bits_of(weights[block * kBlock + column + lane]) & 0x7FFFFFFF;
                    lanes[block][lane] = bits > lanes[block][lane] ? bits : lanes[block][lane];
                }
    for (size_t block = 0; block < count; ++block) {
        largest[block] = 0;
        for (const int32_t bits : lanes[block]) largest[block] = bits > largest[block] ? bits : largest[block];
    }
}

inline void largest_magnitudes(const uint16_t* weights, size_t stride, size_t count, int32_t* largest) {
    uint16_t lanes[kAbreast][2 * kLanes] = {};
    for (size_t row = 0; row < kBlock; ++row, weights += stride)
        for (size_t block = 0; block < count; ++block)
            for (size_t column = 0; column < kBlock; column += 2 * kLanes)
                for (size_t lane = 0; lane < 2 * kLanes; ++lane) {
                    const uint16_t bits = weights[block * kBlock + column + lane] & 0x7FFF;
                    lanes[block][lane] = bits > lanes[block][lane] ? bits : lanes[block][lane];
                }
    for (size_t block = 0; block < count; ++block) {
        uint16_t most = 0;
        for (const uint16_t bits : lanes[block]) most = bits > most ? bits : most;
        largest[block] = static_cast<int32_t>(most) << 16;
    }
}

// A block on its way: its scale taken apart, and what its rows have come to so far.
struct Block {
    float scale, reciprocal;  // scale in [1, 2)
    float unit;               // the power of two that takes it there
    Doubles signal[kParts], noise[kParts];
    Ints largest[kParts], zeroed[kParts], seen[kParts];
};

inline void begin(Block& block, uint16_t scale_bits) {
    block = Block{};
    block.scale = float_of((scale_bits << 16 & 0x7FFFFF) | 127 << 23);
    block.reciprocal = 1.0f / block.scale;
    block.unit = block.scale / weight_at(&scale_bits, 0);
}

template <typename T> inline void quantize_row(const T* weights, uint8_t* codes, Block& block) {
    const float scale = block.scale, reciprocal = block.reciprocal, unit = block.unit;
    int32_t encoded[kBlock];
    for (size_t part = 0; part < kParts; ++part) {
        Floats signal = {}, noise = {};
        Ints largest = block.largest[part], zeroed = block.zeroed[part], seen = block.seen[part];
        for (size_t column = part * kWidth; column < kBlock; column += kLanes) {
            Ints bits;
            load_bits(bits, weights + column);
            const Ints magnitude = bits & 0x7FFFFFFF;
            const Floats value = floats_of(magnitude) * unit;
            Floats stored;
            const Ints code = encode(divided(value, scale, reciprocal), stored);
            const Floats error = stored * scale - value;
            const Ints error_bits = bits_of(error) & 0x7FFFFFFF;
            const Ints signed_code = code | (bits >> 24 & 0x80);
            __builtin_memcpy(encoded + column, &signed_code, sizeof signed_code);
            signal += value * value;
            noise += error * error;
            largest = error_bits > largest ? error_bits : largest;
            zeroed -= (magnitude != 0) & (code == 0);  // true is -1
            seen |= code;
        }
        block.signal[part] += __builtin_convertvector(signal, Doubles);
        block.noise[part] += __builtin_convertvector(noise, Doubles);
        block.largest[part] = largest;
        block.zeroed[part] = zeroed;
        block.seen[part] = seen;
    }
    for (size_t i = 0; i < kBlock; ++i) codes[i] = static_cast<uint8_t>(encoded[i]);
}

struct BlockSums {
    double signal, noise, max_abs_error;
    int32_t zeroed;
    int32_t codes;  // all of them, signs off, or-ed
};

inline BlockSums sums_of(const Block& block) {
    BlockSums sums = {};
    int32_t most = 0;
    for (size_t lane = 0; lane < kLanes; ++lane) {
        const int32_t error = block.largest[lane / kWidth][lane % kWidth];
        sums.signal += block.signal[lane / kWidth][lane % kWidth];
        sums.noise += block.noise[lane / kWidth][lane % kWidth];
        most = error > most ? error : most;
        sums.zeroed += block.zeroed[lane / kWidth][lane % kWidth];
        sums.codes |= block.seen[lane / kWidth][lane % kWidth];
    }
    const double size = 1.0 / block.unit;
    sums.signal *= size * size;
    sums.noise *= size * size;
    sums.max_abs_error = float_of(most) * size;
    return sums;
}

template <typename T> BlockSums quantize_block(const T* weights, size_t stride, uint8_t* codes, uint16_t scale_bits) {
    Block block;
    begin(block, scale_bits);
    for (size_t row = 0; row < kBlock; ++row) quantize_row(weights + row * stride, codes + row * stride, block);
    return sums_of(block);
}

// Rule mse for one block whose scale by rule amax is `best`, and has made `sums`: the scale with the smallest noise, the
// first of equals, among `candidates`, `step` bfloat16 values apart, from there upwards.
template <typename T>
void search(const T* weights, size_t stride, float limit, unsigned candidates, unsigned step, uint8_t* codes,
            uint16_t& best, BlockSums& sums) {
    const uint16_t smallest = best;
    uint16_t bits = best;
    for (unsigned candidate = 1; candidate < candidates; ++candidate) {
        const uint16_t next = static_cast<uint16_t>(smallest + candidate * step);
        if (weight_at(&next, 0) * kMaxValue > limit) break;
        bits = next;
        const BlockSums other = quantize_block(weights, stride, codes, bits);
        if (other.noise < sums.noise) {
            sums = other;
            best = bits;
        }
    }
    if (bits != best) quantize_block(weights, stride, codes, best);
}

// Weights [rows, columns], both multiples of the block, into codes and bfloat16 scales (as bits): by rule amax, or with
// more than one candidate by rule mse. Blocks that lie side by side are worked on together, row by row, since that is
// the order of the memory. Stops and returns false at a magnitude above `limit`; what was written then means nothing.
template <typename T>
bool quantize(const T* weights, size_t rows, size_t columns, float limit, unsigned candidates, unsigned step,
              uint8_t* codes, uint16_t* scales, QuantizeSums* sums) {
    for (size_t row = 0; row < rows; row += kBlock)
        for (size_t column = 0; column < columns; column += kAbreast * kBlock) {
            const size_t first = row * columns + column, left = (columns - column) / kBlock;
            const size_t count = left < kAbreast ? left : kAbreast;
            int32_t largest[kAbreast];
            uint16_t best[kAbreast];
            Block blocks[kAbreast];
            largest_magnitudes(weights + first, columns, count, largest);
            for (size_t i = 0; i < count; ++i) {
                if (largest[i] > bits_of(limit)) return false;
                const float quotient = float_of(largest[i]) / kMaxValue;
                best[i] = bf16_rounded_up(quotient > kSmallestScale ? quotient : kSmallestScale);
                begin(blocks[i], best[i]);
            }
            for (size_t inner = 0; inner < kBlock; ++inner)
                for (size_t i = 0; i < count; ++i) {
                    const size_t place = first + inner * columns + i * kBlock;
                    quantize_row(weights + place, codes + place, blocks[i]);
                }
            for (size_t i = 0; i < count; ++i) {
                const size_t place = first + i * kBlock;
                BlockSums block = sums_of(blocks[i]);
                sums->amax_noise += block.noise;
                search(weights + place, columns, limit, candidates, step, codes + place, best[i], block);
                *scales++ = block.codes == 0 ? 0x3F80 : best[i];  // nothing but zeros: scale 1
                sums->signal += block.signal;
                sums->noise += block.noise;
                sums->zeroed += block.zeroed;
                if (block.max_abs_error > sums->max_abs_error) sums->max_abs_error = block.max_abs_error;
            }
        }
    return true;
}

}  // namespace
