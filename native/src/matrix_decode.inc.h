// Weights decoded as they are read, in steps of four vectors: the body that each ISA unit includes before the products.
//
// The order in which a step's values come out is the ISA's own (kOrder): activations are brought into the same order once,
// and nothing is shuffled per weight.

// No include guard: included once per ISA unit, inside namespace mosaic::<isa>, after vectors.inc.h.
namespace {

constexpr size_t kStep = 4 * kWidth;  // codes decoded together
static_assert(kGroup % kStep == 0, "a group is whole steps");

// AVX2 makes a float32 of a code by shifts alone, which makes it 2^-120 of its value: in `dot` activations are larger by
// 2^64 and sums by 2^-56, so that nothing leaves float32's range between, for activations below 2^64. Codes whose
// float32 would be subnormal, where many CPUs are slow, and NaN are rare: they are taken for 0 there and seen to one by
// one.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr float kCodeUnit = 0x1p-120f, kActivationUnit = 0x1p64f, kSumUnit = 0x1p56f;
#else
constexpr float kCodeUnit = 1.0f, kActivationUnit = 1.0f, kSumUnit = 1.0f;
#endif

// Where the value at each place of a decoded step comes from.
struct Order {
    uint8_t source[kStep];
};

constexpr Order make_order() {
    Order order = {};
    for (size_t place = 0; place < kStep; ++place) {
        size_t source = place;
        if (kWidth == 16) {  // interleaved bytes of each 128-bit lane, then even and odd places apart
            const size_t pair = place / 32 * 16 + place % 16, odd = place / 16 % 2, half = pair / 16;
            source = pair % 16 / 4 * 16 + half * 8 + pair % 4 * 2 + odd;
        } else if (kWidth == 8) {  // the first bytes of all 32-bit words, then the second ones, ...
            source = place % 8 * 4 + place / 8;
        }
        order.source[place] = static_cast<uint8_t>(source);
    }
    return order;
}

constexpr Order kOrder = make_order();

#if defined(__AVX512F__)
struct CodeTable {
    uint8_t low[kMagnitudes], high[kMagnitudes];
};

// The bfloat16 of every magnitude, as two bytes.
constexpr CodeTable make_code_table() {
    CodeTable table = {};
    for (unsigned code = 0; code < kMagnitudes; ++code) {
        unsigned bits = (code << 4) + (120 << 7);  // 3 mantissa bits of 7; exponent bias 127 for 7
        if (code < static_cast<unsigned>(kSmallestNormalCode)) {
            bits = 0;
            for (unsigned lead = 0; lead < 3; ++lead)
                if (code >> lead == 1) bits = ((127 - 9 + lead) << 7) | ((code << (7 - lead)) & 0x7F);
        }
        if (code == static_cast<unsigned>(kNanCode)) bits = 0x7FC0;
        table.low[code] = static_cast<uint8_t>(bits & 0xFF);
        table.high[code] = static_cast<uint8_t>(bits >> 8);
    }
    return table;
}

alignas(64) constexpr CodeTable kCodeTable = make_code_table();

// The place at which a decoded step has the value of each code.
constexpr Order make_place_of() {
    Order places = {};
    for (size_t place = 0; place < kStep; ++place) places.source[kOrder.source[place]] = static_cast<uint8_t>(place);
    return places;
}

alignas(64) constexpr Order kPlaceOf = make_place_of();

struct Decoder {
    const __m512i low0 = _mm512_load_si512(kCodeTable.low), low1 = _mm512_load_si512(kCodeTable.low + 64);
    const __m512i high0 = _mm512_load_si512(kCodeTable.high), high1 = _mm512_load_si512(kCodeTable.high + 64);
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));

    // 64 codes as 2 vectors of 32 bfloat16.
    void pairs(const uint8_t* codes, __m512i* out) const {
        __m512i step = _mm512_loadu_si512(codes);
        __asm__ volatile("" : "+v"(step));  // or GCC loads the codes anew for each use
        pairs(step, out);
    }

    void pairs(__m512i step, __m512i* out) const {
        const __m512i low = _mm512_permutex2var_epi8(low0, step, low1);
        const __m512i unsigned_high = _mm512_permutex2var_epi8(high0, step, high1);
        const __m512i high = _mm512_ternarylogic_epi32(unsigned_high, step, sign, 0xF8);  // a | (b & c)
        out[0] = _mm512_unpacklo_epi8(low, high);
        out[1] = _mm512_unpackhi_epi8(low, high);
    }

    uint32_t operator()(const uint8_t* codes, Floats* out) const {
        __m512i halves[2];
        pairs(codes, halves);
        widen(halves, out);
        return 0;
    }

    // In the order of the codes.
    void in_order(const uint8_t* codes, Floats* out) const {
        __m512i halves[2];
        const __m512i places = _mm512_load_si512(kPlaceOf.source), step = _mm512_loadu_si512(codes);
        pairs(_mm512_maskz_permutexvar_epi8(~__mmask64{0}, places, step), halves);  // GCC 12 warns without a mask
        widen(halves, out);
    }

  private:
    static void widen(const __m512i* halves, Floats* out) {
        for (size_t half = 0; half < 2; ++half) {
            const Ints bits = reinterpret_cast<Ints>(halves[half]);
            out[2 * half] = floats_of(bits << 16);
            out[2 * half + 1] = floats_of(bits & static_cast<int32_t>(0xFFFF0000));
        }
    }
};
#elif defined(__AVX2__)
struct Decoder {
    // The rare ones among the codes, a bit for each.
    uint32_t operator()(const uint8_t* codes, Floats* out) const {
        __m256i step = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
        const __m256i less = _mm256_sub_epi8(_mm256_and_si256(step, _mm256_set1_epi8(0x7F)), _mm256_set1_epi8(1));
        const __m256i subnormal = _mm256_cmpeq_epi8(_mm256_min_epu8(less, _mm256_set1_epi8(kSmallestNormalCode - 2)), less);
        const __m256i nan = _mm256_cmpeq_epi8(less, _mm256_set1_epi8(kNanCode - 1)), rare = _mm256_or_si256(subnormal, nan);
        const uint32_t mask = static_cast<uint32_t>(_mm256_movemask_epi8(rare));
        if (__builtin_expect(mask != 0, 0)) step = _mm256_andnot_si256(rare, step);
        const __m256i kept = _mm256_set1_epi32(static_cast<int>(0x87F00000));
        const __m256i words[4] = {_mm256_slli_epi32(step, 24), _mm256_slli_epi32(step, 16), _mm256_slli_epi32(step, 8),
                                  step};
        for (size_t i = 0; i < 4; ++i)
            out[i] = reinterpret_cast<Floats>(_mm256_and_si256(_mm256_srai_epi32(words[i], 4), kept));
        return mask;
    }
};
#else
struct Decoder {
    float values[256];

    Decoder() { e4m3_decode(all().codes, values, 256); }
    uint32_t operator()(const uint8_t* codes, Floats* out) const {
        float decoded[kStep];
        for (size_t place = 0; place < kStep; ++place) decoded[place] = values[codes[place]];
        __builtin_memcpy(out, decoded, sizeof decoded);
        return 0;
    }

  private:
    struct All {
        uint8_t codes[256];
    };
    static constexpr All all() {
        All result = {};
        for (unsigned code = 0; code < 256; ++code) result.codes[code] = static_cast<uint8_t>(code);
        return result;
    }
};
#endif

// Whole steps of weights as float32, whatever they are stored in, in units of kUnit. Return the rare ones, which became 0.
struct E4M3Weights {
    using Stored = uint8_t;
    static constexpr float kUnit = kCodeUnit;
    const Decoder decode{};
    uint32_t load(const uint8_t* weights, Floats* out) const { return decode(weights, out); }
};

struct BF16Weights {
    using Stored = uint16_t;
    static constexpr float kUnit = 1.0f;
    uint32_t load(const uint16_t* weights, Floats* out) const {
        for (size_t i = 0; i < 4; ++i) {
            Ints bits;
            load_bits(bits, weights + i * kWidth);
            out[i] = floats_of(bits);
        }
        return 0;
    }
};

struct F32Weights {
    using Stored = float;
    static constexpr float kUnit = 1.0f;
    uint32_t load(const float* weights, Floats* out) const {
        for (size_t i = 0; i < 4; ++i) out[i] = loaded(weights + i * kWidth);
        return 0;
    }
};

// The last step of a row is filled up with zeros.
template <typename Weights>
inline uint32_t load_step(const Weights& weights, const typename Weights::Stored* row, size_t left, Floats* out) {
    if (left >= kStep) return weights.load(row, out);
    typename Weights::Stored padded[kStep] = {};
    __builtin_memcpy(padded, row, left * sizeof padded[0]);
    return weights.load(padded, out);
}

// What the rare codes of a step contribute to a sum; x lies as `arrange` leaves it.
template <typename Stored> float rare_products(const Stored* codes, uint32_t rare, const float* x) {
    float sum = 0.0f;
    for (size_t place = 0; place < kStep; ++place) {
        const size_t source = kOrder.source[place];
        if (rare >> source & 1)
            sum += decode_one(static_cast<int32_t>(codes[source])) / kSumUnit * (x[place] / kActivationUnit);
    }
    return sum;
}

}  // namespace
