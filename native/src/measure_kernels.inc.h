// What the machine can do at most, reading and multiplying: the body that each ISA unit includes after vectors.inc.h.
// What the functions do: measure_kernels.h.

// No include guard: included once per ISA unit, inside namespace mosaic::<isa>.
namespace {

constexpr size_t kLine = 64;           // bytes of a cache line
constexpr size_t kStreams = 4;         // read side by side: a tenth faster than one
constexpr size_t kLinesAhead = 16;     // prefetched before use, in each stream
constexpr size_t kRegistersOfLine = kLine / kRegister;
constexpr size_t kChains = 12;         // latency times throughput of a multiply-add is 8 to 10; AVX2 has 16 registers

inline void add_line(const uint8_t* line, Ints* sums) {
    for (size_t part = 0; part < kRegistersOfLine; ++part) {
        Ints values;
        load(values, line + part * kRegister);
        sums[part] ^= values;
    }
}

uint64_t read(const uint8_t* bytes, size_t count) {
    Ints sums[kStreams][kRegistersOfLine] = {};
    const size_t lines = count / kLine, each = lines / kStreams;
    for (size_t line = 0; line < each; ++line)
        for (size_t stream = 0; stream < kStreams; ++stream) {
            const uint8_t* const source = bytes + (stream * each + line) * kLine;
            __builtin_prefetch(source + kLinesAhead * kLine);
            add_line(source, sums[stream]);
        }
    for (size_t line = kStreams * each; line < lines; ++line) add_line(bytes + line * kLine, sums[0]);
    Ints all_of = {};
    for (size_t stream = 0; stream < kStreams; ++stream)
        for (size_t part = 0; part < kRegistersOfLine; ++part) all_of ^= sums[stream][part];
    uint64_t words[kRegister / sizeof(uint64_t)];
    __builtin_memcpy(words, &all_of, sizeof words);
    uint64_t sum = 0;
    for (const uint64_t word : words) sum ^= word;
    return sum;
}

// Every chain starts elsewhere, or the compiler would see that they are all one. Their sum, lane 0.
template <typename Step> inline float run_chains(size_t rounds, const Step& step) {
    Floats chains[kChains];
    for (size_t i = 0; i < kChains; ++i) chains[i] = splat(static_cast<float>(i));
    for (size_t round = 0; round < rounds; ++round)
        for (size_t i = 0; i < kChains; ++i) chains[i] = step(chains[i]);
    for (size_t i = 1; i < kChains; ++i) chains[0] += chains[i];
    return chains[0][0];
}

float chained_multiply_add(size_t rounds) {
    const Floats factor = splat(0.75f), term = splat(0.5f);  // the chains stay within 0 and kChains
    return run_chains(rounds, [=](Floats chain) { return multiply_add(chain, factor, term); });
}

constexpr size_t kMultiplyAddOperations = kChains * kWidth * 2;

#if defined(__AVX512BF16__)
float chained_bf16_dot(size_t rounds) {
    const __m512bh ones = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3F80));
    return run_chains(rounds, [=](Floats chain) -> Floats { return _mm512_dpbf16_ps(chain, ones, ones); });
}

constexpr float (*bf16_dot)(size_t) = chained_bf16_dot;
#else
constexpr float (*bf16_dot)(size_t) = nullptr;
#endif
constexpr size_t kBf16DotOperations = 2 * kMultiplyAddOperations;

}  // namespace
