// Block quantisation, rules `amax` and `mse` of docs/FORMAT.md section 3: the body that each ISA unit includes after the
// codec. Codes and scales are bit-equal to the numpy reference in mosaic.format.e4m3, and the error sums are the same on
// every ISA: 16 lanes to a block (column mod 16), float32 within four rows, float64 from there on.
//
// A block is scaled by the power of two that takes its scale into [1, 2), so that nothing below over- or underflows
// where it matters; weights that fall under float32's range by that are 2^-100 of the largest and round to zero anyway.

// No include guard: included once per ISA unit, inside namespace mosaic::<isa>, after vectors.inc.h.
namespace {

constexpr size_t kLanes = 16;
constexpr size_t kAbreast = 16;  // blocks side by side that are worked on together
constexpr size_t kTogether = 4;  // rows whose squares are added up in float32
constexpr float kMaxValue = 448.0f;
constexpr float kSmallestScale = 0x1p-126f;

// Positive float32 to the next bfloat16 that is not smaller: its bits.
inline uint16_t bf16_rounded_up(float value) { return static_cast<uint16_t>((bits_of(value) + 0xFFFF) >> 16); }

constexpr size_t kParts = kLanes / kWidth;  // vectors that hold the lanes, so that sums stay in registers

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

// Codes of quotients in [0, 448], in the lowest bytes of the result, and the values they stand for. Adding 2^(e + 20)
// to a quotient in [2^e, 2^(e + 1)) rounds it to 3 mantissa bits, ties to even, and leaves them lowest in the sum; below
// 2^-6 the step stays that of 2^-6. The exponent makes up the rest of the code. What it is off by is added with the
// power: an even number of steps, which changes no rounding.
inline Ints encode(Floats quotients, Floats& values) {
    constexpr int32_t smallest = normal_bits(kSmallestNormalCode);
    constexpr int32_t off = -(smallest >> kDroppedBits) & 0xFF;
    static_assert(off % 2 == 0, "ties would not go to even codes");
    const Ints exponents = bits_of(quotients) & kFloatInfinity;
    const Ints steps = exponents > smallest ? exponents : Ints{} + smallest;
    const Floats powers = floats_of(steps + ((kDroppedBits << 23) + off));
    const Floats sums = quotients + powers;
    values = sums - powers;
    return bits_of(sums) + (steps >> kDroppedBits);
}

// Narrow bits of the magnitude: a whole float32, or a bfloat16 as it is.
inline int32_t magnitude_of(float weight) { return bits_of(weight) & 0x7FFFFFFF; }
inline uint16_t magnitude_of(uint16_t weight) { return weight & 0x7FFF; }

// The float32 bits of the largest magnitudes of `count` blocks side by side, row by row as they lie in memory, and how
// many weights are 0. Infinities and NaN are larger than any number.
template <typename T>
int64_t survey(const T* weights, size_t stride, size_t count, int32_t* largest) {
    using Magnitude = decltype(magnitude_of(T{}));
    constexpr size_t lanes = kLanes * sizeof(float) / sizeof(T);
    Magnitude most[kAbreast][lanes] = {}, zeros[lanes] = {};  // a lane sees kAbreast * kBlock * kBlock / lanes weights
    static_assert(kAbreast * kBlock * kBlock / lanes < 65536, "the counters of zeros are too narrow");
    for (size_t row = 0; row < kBlock; ++row, weights += stride)
        for (size_t block = 0; block < count; ++block)
            for (size_t column = 0; column < kBlock; column += lanes)
                for (size_t lane = 0; lane < lanes; ++lane) {
                    const Magnitude bits = magnitude_of(weights[block * kBlock + column + lane]);
                    most[block][lane] = bits > most[block][lane] ? bits : most[block][lane];
                    zeros[lane] = static_cast<Magnitude>(zeros[lane] + (bits == 0));
                }
    int64_t zero = 0;
    for (const Magnitude lane : zeros) zero += lane;
    for (size_t block = 0; block < count; ++block) {
        int32_t bits = 0;
        for (const Magnitude lane : most[block]) bits = lane > bits ? lane : bits;
        largest[block] = sizeof(T) == sizeof(float) ? bits : bits << 16;
    }
    return zero;
}

// A block on its way: its scale taken apart, and what its rows have come to so far.
struct Block {
    float scale, reciprocal;  // scale in [1, 2)
    float unit;               // the power of two that takes it there
    Doubles signal[kParts], noise[kParts];
    Ints largest[kParts];
};

inline void begin(Block& block, uint16_t scale_bits) {
    block = Block{};
    block.scale = float_of((scale_bits << 16 & 0x7FFFFF) | 127 << 23);
    block.reciprocal = 1.0f / block.scale;
    block.unit = block.scale / weight_at(&scale_bits, 0);
}

// Where the codes of some rows of a block go: the lowest bytes of vectors, at once if an instruction does that.
#if defined(__AVX512F__)
struct CodeRows {
    uint8_t* codes;
    size_t stride;

    void put(size_t row, size_t column, Ints values) {
        _mm512_mask_cvtepi32_storeu_epi8(codes + row * stride + column, 0xFFFF, reinterpret_cast<__m512i>(values));
    }
    void finish() {}
};
#else
struct CodeRows {
    uint8_t* codes;
    size_t stride;
    int32_t wide[kTogether][kBlock];

    void put(size_t row, size_t column, Ints values) { __builtin_memcpy(wide[row] + column, &values, sizeof values); }
    void finish() {
        for (size_t row = 0; row < kTogether; ++row)
            for (size_t i = 0; i < kBlock; ++i) codes[row * stride + i] = static_cast<uint8_t>(wide[row][i]);
    }
};
#endif

template <typename T> inline void quantize_rows(const T* weights, size_t stride, uint8_t* codes, Block& block) {
    const float scale = block.scale, reciprocal = block.reciprocal, unit = block.unit;
    CodeRows out;
    out.codes = codes;
    out.stride = stride;
    for (size_t part = 0; part < kParts; ++part) {
        Floats signal = {}, noise = {};
        Ints largest = block.largest[part];
        for (size_t row = 0; row < kTogether; ++row)
            for (size_t column = part * kWidth; column < kBlock; column += kLanes) {
                Ints bits;
                load_bits(bits, weights + row * stride + column);
                const Floats value = floats_of(bits & 0x7FFFFFFF) * unit;
                Floats stored;
                const Ints code = encode(divided(value, scale, reciprocal), stored) | (bits >> 24 & 0x80);
                const Floats error = stored * scale - value;
                const Ints error_bits = bits_of(error) & 0x7FFFFFFF;
                out.put(row, column, code);
                signal += value * value;
                noise += error * error;
                largest = error_bits > largest ? error_bits : largest;
            }
        block.signal[part] += __builtin_convertvector(signal, Doubles);
        block.noise[part] += __builtin_convertvector(noise, Doubles);
        block.largest[part] = largest;
    }
    out.finish();
}

struct BlockSums {
    double signal, noise, max_abs_error;
};

inline BlockSums sums_of(const Block& block) {
    BlockSums sums = {};
    int32_t most = 0;
    for (size_t lane = 0; lane < kLanes; ++lane) {
        const int32_t error = block.largest[lane / kWidth][lane % kWidth];
        sums.signal += block.signal[lane / kWidth][lane % kWidth];
        sums.noise += block.noise[lane / kWidth][lane % kWidth];
        most = error > most ? error : most;
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
    for (size_t row = 0; row < kBlock; row += kTogether)
        quantize_rows(weights + row * stride, stride, codes + row * stride, block);
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

// Whether a block whose largest magnitude has these bits has no code but 0.
inline bool is_nothing(int32_t largest, uint16_t scale_bits) {
    Block block;
    begin(block, scale_bits);
    return encode_one(float_of(largest) * block.unit / block.scale) == 0;
}

inline void count_scale(uint16_t bits, uint64_t* exponents, QuantizeSums* sums) {
    const double scale = weight_at(&bits, 0);
    if (scale < sums->scale_min) sums->scale_min = scale;
    if (scale > sums->scale_max) sums->scale_max = scale;
    ++exponents[bits >> 7];
}

// Weights [rows, columns], both multiples of the block, into codes and bfloat16 scales (as bits): by rule amax, or with
// more than one candidate by rule mse. Blocks that lie side by side are worked on together, row by row, since that is
// the order of the memory, and the next ones fetched meanwhile. Adds to `counts` how often each magnitude occurs and to
// `exponents` the biased exponents of the scales. Stops and returns false at a magnitude above `limit`: what was written
// then means nothing, and nothing is added.
template <typename T>
bool quantize(const T* weights, size_t rows, size_t columns, float limit, unsigned candidates, unsigned step,
              uint8_t* codes, uint16_t* scales, uint64_t* counts, uint64_t* exponents, QuantizeSums* sums) {
    constexpr size_t line = 64 / sizeof(T);  // weights of a cache line
    const uint16_t* const first_scale = scales;
    int64_t zeros = 0;
    for (size_t row = 0; row < rows; row += kBlock)
        for (size_t column = 0; column < columns; column += kAbreast * kBlock) {
            const size_t first = row * columns + column, left = (columns - column) / kBlock;
            const size_t count = left < kAbreast ? left : kAbreast;
            const size_t next = left > kAbreast ? kAbreast * kBlock : kBlock * columns - column;
            int32_t largest[kAbreast];
            uint16_t best[kAbreast];
            Block blocks[kAbreast];
            zeros += survey(weights + first, columns, count, largest);
            for (size_t i = 0; i < count; ++i) {
                if (largest[i] > bits_of(limit)) return false;
                const float quotient = float_of(largest[i]) / kMaxValue;
                best[i] = bf16_rounded_up(quotient > kSmallestScale ? quotient : kSmallestScale);
                begin(blocks[i], best[i]);
            }
            for (size_t inner = 0; inner < kBlock; inner += kTogether)
                for (size_t i = 0; i < count; ++i) {
                    const size_t place = first + inner * columns + i * kBlock;
                    for (size_t together = 0; together < kTogether; ++together)
                        for (size_t ahead = 0; ahead < kBlock; ahead += line)
                            __builtin_prefetch(weights + place + next + together * columns + ahead, 0, 2);
                    quantize_rows(weights + place, columns, codes + place, blocks[i]);
                }
            for (size_t i = 0; i < count; ++i) {
                const size_t place = first + i * kBlock;
                BlockSums block = sums_of(blocks[i]);
                sums->amax_noise += block.noise;
                search(weights + place, columns, limit, candidates, step, codes + place, best[i], block);
                if (is_nothing(largest[i], best[i])) best[i] = 0x3F80;  // nothing but zeros: scale 1
                *scales++ = best[i];
                sums->signal += block.signal;
                sums->noise += block.noise;
                if (block.max_abs_error > sums->max_abs_error) sums->max_abs_error = block.max_abs_error;
            }
        }
    for (const uint16_t* scale = first_scale; scale < scales; ++scale) count_scale(*scale, exponents, sums);
    const uint64_t before = counts[0];
    e4m3_count(codes, counts, rows * columns);
    sums->zeroed = static_cast<int64_t>(counts[0] - before) - zeros;
    return true;
}

}  // namespace
