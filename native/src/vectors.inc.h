// Vectors of the width of an ISA's registers, and what all kernels do with them: the body that each ISA unit includes after
// the codec and before the kernels.

// No include guard: included once per ISA unit, inside namespace mosaic::<isa>, after e4m3_kernels.inc.h.
namespace {

#if defined(__AVX512F__)
constexpr size_t kRegister = 64;
#elif defined(__AVX__)
constexpr size_t kRegister = 32;
#else
constexpr size_t kRegister = 16;
#endif
constexpr size_t kWidth = kRegister / sizeof(float);
using Floats = float __attribute__((vector_size(kRegister)));
using Ints = int32_t __attribute__((vector_size(kRegister)));
using Doubles = double __attribute__((vector_size(2 * kRegister)));
using Halves = uint16_t __attribute__((vector_size(kRegister / 2)));

template <typename Vector, typename T> inline void load(Vector& vector, const T* source) {
    __builtin_memcpy(&vector, source, sizeof vector);
}

inline void load_bits(Ints& bits, const float* weights) { load(bits, weights); }
inline void load_bits(Ints& bits, const uint16_t* weights) {
    Halves halves;
    load(halves, weights);
#if defined(__AVX512F__)  // GCC 12 makes five instructions of the conversion below
    bits = reinterpret_cast<Ints>(_mm512_maskz_cvtepu16_epi32(0xFFFF, reinterpret_cast<__m256i>(halves))) << 16;
#else
    bits = __builtin_convertvector(halves, Ints) << 16;
#endif
}

inline Floats floats_of(Ints bits) { return reinterpret_cast<Floats>(bits); }
inline Ints bits_of(Floats values) { return reinterpret_cast<Ints>(values); }

inline float weight_at(const float* weights, size_t i) { return weights[i]; }
inline float weight_at(const uint16_t* weights, size_t i) { return float_of(static_cast<int32_t>(weights[i]) << 16); }

// a * b + c, rounded once where the ISA can.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

inline Floats splat(float value) {
#if defined(__AVX512F__)
    return _mm512_set1_ps(value);
#elif defined(__AVX__)
    return _mm256_set1_ps(value);
#else
    return Floats{value, value, value, value};
#endif
}

inline Floats loaded(const float* source) {
    Floats values;
    load(values, source);
    return values;
}

inline void store(float* target, Floats values) { __builtin_memcpy(target, &values, sizeof values); }

// The lanes added up by halves.
inline float sum_of(Floats values) {
    float lanes[kWidth];
    store(lanes, values);
#if defined(__AVX512F__)
    const __m256 eight = _mm256_add_ps(_mm256_loadu_ps(lanes), _mm256_loadu_ps(lanes + 8));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
#elif defined(__AVX__)
    const __m128 four = _mm_add_ps(_mm_loadu_ps(lanes), _mm_loadu_ps(lanes + 4));
#endif
#if defined(__AVX__)
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
#endif
}

}  // namespace
