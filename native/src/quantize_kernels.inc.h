// Block quantisation, rule `amax` of docs/FORMAT.md section 3: the body that each ISA unit includes after the codec.
// Codes and scales are bit-equal to the numpy reference in mosaic.format.e4m3. The error sums are counted on the way, in
// an order that does not depend on the ISA: in float64 (squares of large weights do not fit float32), 16 lanes to a block.

// No include guard: included once per ISA unit, inside namespace mosaic::<isa>, after e4m3_kernels.inc.h.
namespace {

constexpr size_t kLanes = 16;
constexpr float kMaxValue = 448.0f;
constexpr float kSmallestScale = 0x1p-126f;

inline float weight_at(const float* weights, size_t i) { return weights[i]; }
inline float weight_at(const uint16_t* weights, size_t i) { return float_of(static_cast<int32_t>(weights[i]) << 16); }

// Positive float32 to the next bfloat16 that is not smaller: its bits.
inline uint16_t bf16_rounded_up(float value) { return static_cast<uint16_t>((bits_of(value) + 0xFFFF) >> 16); }

// Sixteen lanes as vectors of this ISA's width: sums stay in registers, and in the same lanes on every ISA.
#if defined(__AVX512F__)
constexpr size_t kRegister = 64;
#elif defined(__AVX__)
constexpr size_t kRegister = 32;
#else
constexpr size_t kRegister = 16;
#endif
constexpr size_t kDoubles = kRegister / sizeof(double), kInts = kRegister / sizeof(int32_t);
using Floats = float __attribute__((vector_size(kDoubles * sizeof(float))));
using Doubles = double __attribute__((vector_size(kRegister)));
using Ints = int32_t __attribute__((vector_size(kRegister)));

struct BlockSums {
    double signal, noise;
    int32_t largest_error;  // float32 bits of a magnitude, which order like integers
    int32_t zeroed;
    int32_t codes;  // all of them, signs off, or-ed
};

template <typename Vector, typename T> inline void load(Vector& vector, const T* source) {
    __builtin_memcpy(&vector, source, sizeof vector);
}

// The float32 bits of the largest magnitude of a block; infinities and NaN are larger than any number.
template <typename T> int32_t largest_magnitude(const T* weights, size_t stride) {
    int32_t lanes[kLanes] = {};
    for (size_t row = 0; row < kBlock; ++row)
        for (size_t column = 0; column < kBlock; column += kLanes)
            for (size_t lane = 0; lane < kLanes; ++lane) {
                const int32_t bits = bits_of(weight_at(weights, row * stride + column + lane)) & 0x7FFFFFFF;
                lanes[lane] = bits > lanes[lane] ? bits : lanes[lane];
            }
    int32_t largest = 0;
    for (const int32_t bits : lanes) largest = bits > largest ? bits : largest;
    return largest;
}

// One block. A row goes through short loops over arrays in L1, each vectorised by itself, then into the sums.
template <typename T> BlockSums quantize_block(const T* weights, uint8_t* codes, size_t stride, float scale) {
    Doubles signal[kLanes / kDoubles] = {}, noise[kLanes / kDoubles] = {};
    Ints largest[kLanes / kInts] = {}, zeroed[kLanes / kInts] = {}, seen[kLanes / kInts] = {};
    for (size_t row = 0; row < kBlock; ++row, weights += stride, codes += stride) {
        float values[kBlock], errors[kBlock];
        int32_t encoded[kBlock];
        for (size_t i = 0; i < kBlock; ++i) values[i] = weight_at(weights, i);
        for (size_t i = 0; i < kBlock; ++i) encoded[i] = encode_one(values[i] / scale);
        for (size_t i = 0; i < kBlock; ++i) codes[i] = static_cast<uint8_t>(encoded[i]);
        for (size_t i = 0; i < kBlock; ++i) errors[i] = decode_one(encoded[i]) * scale - values[i];
        for (size_t i = 0; i < kBlock; i += kLanes)
            for (size_t lane = 0; lane < kLanes; lane += kDoubles) {
                Floats value, error;
                load(value, values + i + lane);
                load(error, errors + i + lane);
                const Doubles wide_value = __builtin_convertvector(value, Doubles);
                const Doubles wide_error = __builtin_convertvector(error, Doubles);
                signal[lane / kDoubles] += wide_value * wide_value;
                noise[lane / kDoubles] += wide_error * wide_error;
            }
        for (size_t i = 0; i < kBlock; i += kLanes)
            for (size_t lane = 0; lane < kLanes; lane += kInts) {
                Ints value, error, code;
                load(value, values + i + lane);
                load(error, errors + i + lane);
                load(code, encoded + i + lane);
                error &= 0x7FFFFFFF;
                code &= 0x7F;
                Ints& most = largest[lane / kInts];
                most = error > most ? error : most;
                zeroed[lane / kInts] -= ((value & 0x7FFFFFFF) != 0) & (code == 0);  // true is -1
                seen[lane / kInts] |= code;
            }
    }
    BlockSums sums = {};
    for (size_t lane = 0; lane < kLanes; ++lane) {
        const int32_t most = largest[lane / kInts][lane % kInts];
        sums.signal += signal[lane / kDoubles][lane % kDoubles];
        sums.noise += noise[lane / kDoubles][lane % kDoubles];
        sums.largest_error = most > sums.largest_error ? most : sums.largest_error;
        sums.zeroed += zeroed[lane / kInts][lane % kInts];
        sums.codes |= seen[lane / kInts][lane % kInts];
    }
    return sums;
}

// Weights [rows, columns], both multiples of the block, into codes and bfloat16 scales (as bits). Stops and returns
// false at the first block with a magnitude above `limit`; what was written by then means nothing.
template <typename T>
bool quantize(const T* weights, size_t rows, size_t columns, float limit, uint8_t* codes, uint16_t* scales,
              QuantizeSums* sums) {
    for (size_t row = 0; row < rows; row += kBlock)
        for (size_t column = 0; column < columns; column += kBlock) {
            const size_t first = row * columns + column;
            const int32_t largest = largest_magnitude(weights + first, columns);
            if (largest > bits_of(limit)) return false;
            const float quotient = float_of(largest) / kMaxValue;
            uint16_t bits = bf16_rounded_up(quotient > kSmallestScale ? quotient : kSmallestScale);
            const BlockSums block = quantize_block(weights + first, codes + first, columns, weight_at(&bits, 0));
            if (block.codes == 0) bits = 0x3F80;  // nothing but zeros: scale 1
            *scales++ = bits;
            const float error = float_of(block.largest_error);
            sums->signal += block.signal;
            sums->noise += block.noise;
            sums->zeroed += block.zeroed;
            sums->max_abs_error = error > sums->max_abs_error ? error : sums->max_abs_error;
        }
    return true;
}

}  // namespace
