// Matrix products: the body that each ISA unit includes after matrix_decode.inc.h. What the functions do and how
// activations lie: matrix_kernels.h.

// No include guard: included once per ISA unit, inside namespace mosaic::<isa>.
namespace {

// Bytes ahead of the weights in use; hardware alone fetches too late. Measured: of E4M3 anything from 1 to 12 KiB does, but
// of wider weights 4 KiB and more loses a quarter on Intel, where hardware follows a run through its page only.
template <typename Stored> constexpr size_t kPrefetched = sizeof(Stored) == 1 ? 4096 : 2560;
constexpr size_t kParallel = kWidth == 16 ? 8 : kWidth == 8 ? 4 : 2;  // rows multiplied at a time
constexpr size_t kVectors = kTokens / kWidth;                         // of kTokens values
constexpr size_t kTileRows = 32;          // rows decoded at a time: with a tile of tokens they fit the L1 cache

// The scale of an E4M3 block, by any place in it.
inline float scale_of(const MatrixView& matrix, size_t row, size_t column) {
    const size_t place = row / kBlock * ((matrix.columns + kBlock - 1) / kBlock) + column / kBlock;
    return matrix.scales_are_f32 ? static_cast<const float*>(matrix.scales)[place]
                                 : weight_at(static_cast<const uint16_t*>(matrix.scales), place);
}

void arrange(const float* x, size_t columns, Element element, float* arranged) {
    const size_t whole = in_groups(columns);
    for (size_t step = 0; step < whole; step += kStep)
        for (size_t place = 0; place < kStep; ++place) {
            const size_t source = step + (element == kE4M3 ? kOrder.source[place] : place);
            const float unit = element == kE4M3 ? kActivationUnit : 1.0f;
            arranged[step + place] = source < columns ? x[source] * unit : 0.0f;
        }
}

// At this place among the instructions: GCC would move all of a loop's to its beginning, and the CPU waits when it has too
// many to keep track of.
inline void fetch(const void* place) {
#if defined(__AVX__)
    __asm__ volatile("prefetcht0 %0" ::"m"(*static_cast<const char*>(place)));
#else
    __builtin_prefetch(place);
#endif
}

// Where what will be read kPrefetched<Stored> bytes after a row's beginning lies: further on, or where the caller goes on after
// `end`. Asked once for a row: a little beside the point at the end, and nothing to compute for each line.
struct Ahead {
    const char *end, *next;

    Ahead(const void* last, const void* beyond)
        : end(static_cast<const char*>(last)), next(beyond == nullptr ? end : static_cast<const char*>(beyond)) {}

    template <typename Stored> const Stored* of(const Stored* row) const {
        const char* const later = reinterpret_cast<const char*>(row) + kPrefetched<Stored>;
        return reinterpret_cast<const Stored*>(later < end ? later : next + (later - end));
    }
};

// What `dot` adds up is N vectors side by side: a step of weights is decoded once, and each vector has sums of its own, in
// the order that it would have alone.

// The sums of a block's share of one row, from `place` of the vectors on: `count` weights, all of a block unless they are
// the row's last.
template <size_t N, typename Weights>
inline void dot_block(const Weights& weights, const typename Weights::Stored* row, const float* const* vectors, size_t place,
                      size_t count, const typename Weights::Stored* later, Floats* sums) {
    constexpr size_t line = 64 / sizeof row[0];
    const float* x[N];
    for (size_t i = 0; i < N; ++i) x[i] = vectors[i] + place;
    Floats even[N] = {}, odd[N] = {};
    float rest[N] = {};
    for (size_t k = 0; k < count; k += kStep) {
        if (k % line == 0)
            for (size_t ahead = 0; ahead < kStep; ahead += line) fetch(later + k + ahead);
        Floats values[4];
        const uint32_t rare = load_step(weights, row + k, count - k, values);
        if (__builtin_expect(rare != 0, 0))
            for (size_t i = 0; i < N; ++i) rest[i] += rare_products(row + k, rare, x[i] + k);
        for (size_t i = 0; i < N; ++i) {
            even[i] = multiply_add(values[0], loaded(x[i] + k), even[i]);
            odd[i] = multiply_add(values[1], loaded(x[i] + k + kWidth), odd[i]);
            even[i] = multiply_add(values[2], loaded(x[i] + k + 2 * kWidth), even[i]);
            odd[i] = multiply_add(values[3], loaded(x[i] + k + 3 * kWidth), odd[i]);
        }
    }
    for (size_t i = 0; i < N; ++i) {
        if (__builtin_expect(rest[i] != 0.0f, 0)) even[i][0] += rest[i];  // NaN too
        sums[i] = even[i] + odd[i];
    }
}

template <size_t N, typename Weights>
void dot_rows(const MatrixView& matrix, const Vectors<float>& vectors, size_t first, size_t last, const void* next) {
    using Stored = typename Weights::Stored;
    const Weights weights{};
    const Stored* row = static_cast<const Stored*>(matrix.values) + first * matrix.columns;
    const size_t whole = matrix.columns / kBlock * kBlock;
    const Ahead ahead(row + (last - first) * matrix.columns, next);
    for (size_t number = first; number < last; ++number, row += matrix.columns) {
        Floats totals[N] = {};
        const Stored* const later = ahead.of(row);
        const auto add = [&](size_t block, size_t count) {
            Floats sums[N];
            dot_block<N>(weights, row + block, vectors.x, block, count, later + block, sums);
            const Floats scale = splat(sizeof(Stored) == 1 ? scale_of(matrix, number, block) * kSumUnit : 1.0f);
            for (size_t i = 0; i < N; ++i)
                totals[i] = sizeof(Stored) == 1 ? multiply_add(sums[i], scale, totals[i]) : totals[i] + sums[i];
        };
        for (size_t block = 0; block < whole; block += kBlock) add(block, kBlock);
        if (whole < matrix.columns) add(whole, matrix.columns - whole);
        for (size_t i = 0; i < N; ++i) vectors.y[i][number] = sum_of(totals[i]);
    }
}

#if defined(__AVX512F__)
constexpr size_t kScaledColumns = 8192;  // of activations on the stack

// For E4M3 where decoding is nearly as slow as memory: activations are multiplied with the scales of their blocks once for
// 128 rows, and nothing but decoding and multiply-adds is left to do for a row.
template <size_t N>
void dot_scaled(const MatrixView& matrix, const Vectors<float>& vectors, size_t first, size_t last, const void* next) {
    const Decoder decode{};
    alignas(64) float scaled[N][kScaledColumns];
    const size_t columns = matrix.columns, whole = columns / kStep * kStep;
    const uint8_t* row = static_cast<const uint8_t*>(matrix.values) + first * columns;
    const Ahead ahead(row + (last - first) * columns, next);
    for (size_t number = first; number < last; ++number, row += columns) {
        if (number == first || number % kBlock == 0)
            for (size_t k = 0; k < in_groups(columns); k += kWidth) {
                const Floats scale = splat(scale_of(matrix, number, k));
                for (size_t i = 0; i < N; ++i) store(scaled[i] + k, loaded(vectors.x[i] + k) * scale);
            }
        Floats sums[N][4] = {}, values[4];
        const auto add = [&](size_t k) {
            for (size_t i = 0; i < N; ++i)
                for (size_t j = 0; j < 4; ++j)
                    sums[i][j] = multiply_add(values[j], loaded(scaled[i] + k + j * kWidth), sums[i][j]);
        };
        const uint8_t* const later = ahead.of(row);
        for (size_t k = 0; k < whole; k += kStep) {
            fetch(later + k);
            decode(row + k, values);
            add(k);
        }
        if (whole < columns) {
            load_step(E4M3Weights{}, row + whole, columns - whole, values);
            add(whole);
        }
        for (size_t i = 0; i < N; ++i)
            vectors.y[i][number] = sum_of((sums[i][0] + sums[i][1]) + (sums[i][2] + sums[i][3]));
    }
}
#endif

template <size_t N>
void dot_few(const MatrixView& matrix, const Vectors<float>& vectors, size_t first, size_t last, const void* next) {
#if defined(__AVX512F__)
    if (matrix.element == kE4M3 && matrix.columns <= kScaledColumns)
        return dot_scaled<N>(matrix, vectors, first, last, next);
#endif
    if (matrix.element == kE4M3) return dot_rows<N, E4M3Weights>(matrix, vectors, first, last, next);
    if (matrix.element == kBF16) return dot_rows<N, BF16Weights>(matrix, vectors, first, last, next);
    dot_rows<N, F32Weights>(matrix, vectors, first, last, next);
}

void dot(const MatrixView& matrix, const Vectors<float>& vectors, size_t first, size_t last, const void* next) {
    static_assert(kTogether == 4, "a case for each count");
    if (vectors.count == 1) return dot_few<1>(matrix, vectors, first, last, next);
    if (vectors.count == 2) return dot_few<2>(matrix, vectors, first, last, next);
    if (vectors.count == 3) return dot_few<3>(matrix, vectors, first, last, next);
    dot_few<4>(matrix, vectors, first, last, next);
}

// Packed vectors lie in tiles of as many tokens as a tile of `multiply` has, each [columns][width]: how many the next tile
// has when so many are left.
inline size_t tile_width(size_t left) {
    if (kWidth < 16) return kTokens;
    return left >= 3 * kTokens && left != 4 * kTokens ? 3 * kTokens : left >= 2 * kTokens ? 2 * kTokens : kTokens;
}

void pack(const float* const* x, size_t count, size_t tokens, const Share& share, Element element, float* packed) {
    const size_t whole = in_groups(share.columns);
    for (size_t first = 0, width; first < tokens; first += width) {
        width = tile_width(tokens - first);
        float* row = packed + first * whole + share.first * width;
        for (size_t place = 0; place < in_groups(share.count); ++place, row += width) {
            const size_t source = element == kE4M3 ? place / kStep * kStep + kOrder.source[place % kStep] : place;
            for (size_t token = 0; token < width; ++token)
                row[token] = first + token < count && source < share.count ? x[first + token][source] : 0.0f;
        }
    }
}

// Adds scale * (weights times activations) over `depth` places to y, or sets it: Rows rows, N vectors of tokens.
template <size_t Rows, size_t N>
inline void multiply_tile(const float* weights, const float* packed, size_t depth, size_t tokens, float scale, bool set,
                          float* y) {
    Floats sums[Rows][N] = {};
    for (size_t k = 0; k < depth; ++k) {
        Floats inputs[N];
        for (size_t i = 0; i < N; ++i) inputs[i] = loaded(packed + (k * N + i) * kWidth);
        for (size_t row = 0; row < Rows; ++row) {
            const Floats weight = splat(weights[row * kBlock + k]);
            for (size_t i = 0; i < N; ++i) sums[row][i] = multiply_add(weight, inputs[i], sums[row][i]);
        }
    }
    for (size_t row = 0; row < Rows; ++row)
        for (size_t i = 0; i < N; ++i) {
            float* const place = y + row * tokens + i * kWidth;
            const Floats before = set ? Floats{} : loaded(place);
            store(place, multiply_add(sums[row][i], splat(scale), before));
        }
}

// Fetches what decode() will want two blocks later: of the same row, or of that which takes its place in the next tile.
template <typename Stored> inline void fetch_ahead(const Stored* place, size_t left, size_t stride) {
    constexpr size_t ahead = 2 * kBlock;
    __builtin_prefetch(left > ahead ? place + ahead : place + ahead + (kTileRows - 1) * stride);
}

// Products with float32 activations: a tile of decoded weights [rows][block].
template <typename Weights> struct Products {
    using Stored = typename Weights::Stored;
    using Packed = float;

    const Weights weights{};
    alignas(64) float tile[kTileRows * kBlock];

    // `depth` places of rows of the matrix, each `row` with `left` weights left; where they end, zeros.
    void decode(const Stored* row, size_t stride, size_t rows, size_t left, size_t depth) {
        for (size_t number = 0; number < rows; ++number, row += stride)
            for (size_t k = 0; k < depth; k += kStep) {
                Floats values[4];
                const size_t here = k < left ? left - k : 0;
                fetch_ahead(row + k, here, stride);
                const uint32_t rare = load_step(weights, row + k, here, values);
                float* const decoded = tile + number * kBlock + k;
                for (size_t i = 0; i < 4; ++i) store(decoded + i * kWidth, values[i] * (1.0f / Weights::kUnit));
                if (__builtin_expect(rare != 0, 0))
                    for (size_t i = 0; i < kStep; ++i)
                        if (rare >> kOrder.source[i] & 1)
                            decoded[i] = decode_one(static_cast<int32_t>(row[k + kOrder.source[i]]));
            }
    }

    template <size_t Rows>
    void multiply(size_t row, const float* packed, size_t width, size_t depth, size_t tokens, float scale, bool set,
                  float* y) const {
        const float* const rows = tile + row * kBlock;
        if (kWidth == 16 && width == 3 * kTokens)
            return multiply_tile<Rows, kWidth == 16 ? 3 : 1>(rows, packed, depth, tokens, scale, set, y);
        if (kWidth == 16 && width == 2 * kTokens)
            return multiply_tile<Rows, kWidth == 16 ? 2 : 1>(rows, packed, depth, tokens, scale, set, y);
        multiply_tile<Rows, kVectors>(rows, packed, depth, tokens, scale, set, y);
    }
};

// A few rows at a time are decoded, a block of each, and multiplied with all tokens, tile by tile.
template <typename Kernel>
void multiply_rows(const MatrixView& matrix, const typename Kernel::Packed* packed, size_t tokens, size_t first,
                   size_t last, float* y) {
    using Stored = typename Kernel::Stored;
    Kernel kernel;
    const size_t whole = in_groups(matrix.columns);
    for (size_t start = first; start < last; start += kTileRows) {
        const size_t rows = last - start < kTileRows ? last - start : kTileRows;
        const Stored* const stored = static_cast<const Stored*>(matrix.values) + start * matrix.columns;
        float* const out = y + (start - first) * tokens;
        for (size_t block = 0; block < matrix.columns; block += kBlock) {
            const size_t left = matrix.columns - block, depth = left < kBlock ? in_groups(left) : kBlock;
            const bool set = block == 0;
            kernel.decode(stored + block, matrix.columns, rows, left, depth);
            const float scale = sizeof(Stored) == 1 ? scale_of(matrix, start, block) : 1.0f;
            for (size_t token = 0, width; token < tokens; token += width) {
                width = tile_width(tokens - token);
                const typename Kernel::Packed* const inputs = packed + token * whole + block * width;
                size_t row = 0;
                for (; row + kParallel <= rows; row += kParallel)
                    kernel.template multiply<kParallel>(row, inputs, width, depth, tokens, scale, set,
                                                        out + row * tokens + token);
                for (; row < rows; ++row)
                    kernel.template multiply<1>(row, inputs, width, depth, tokens, scale, set, out + row * tokens + token);
            }
        }
    }
}

void multiply(const MatrixView& matrix, const float* packed, size_t tokens, size_t first, size_t last, const void*,
              float* y) {
    if (matrix.element == kE4M3) return multiply_rows<Products<E4M3Weights>>(matrix, packed, tokens, first, last, y);
    if (matrix.element == kBF16) return multiply_rows<Products<BF16Weights>>(matrix, packed, tokens, first, last, y);
    multiply_rows<Products<F32Weights>>(matrix, packed, tokens, first, last, y);
}

#if defined(__AVX512F__)
// The place of each pair of neighbours in a decoded group of bfloat16.
struct PairOrder {
    int32_t place[kGroup / 2];
};

constexpr PairOrder make_pair_order() {
    PairOrder order = {};
    for (size_t place = 0; place < kGroup / 2; ++place) {
        const size_t source = place % 16 / 4 * 16 + place / 16 * 8 + place % 4 * 2;
        order.place[source / 2] = static_cast<int32_t>(place);
    }
    return order;
}

alignas(64) constexpr PairOrder kPairOrder = make_pair_order();

// Sixteen pairs of a group, from value 32 * half on; zeros after `left` values.
inline __m512i round_pairs(const float* x, size_t left) {
    const __mmask32 there = left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
    const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(there), x);
    const __m512 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(there >> 16), x + 16);
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

// Into every `stride`-th word from `out` on, in decoded order.
inline void place_pairs(const float* x, size_t columns, size_t stride, int32_t* out) {
    const __m512i strides = _mm512_set1_epi32(static_cast<int>(stride));
    for (size_t k = 0; k < columns; k += 32) {
        const size_t half = k % kGroup / 32;
        const __m512i places = _mm512_load_si512(kPairOrder.place + 16 * half);
        int32_t* const group = out + k / kGroup * (kGroup / 2) * stride;
        _mm512_i32scatter_epi32(group, _mm512_mullo_epi32(places, strides), round_pairs(x + k, columns - k), 4);
    }
}

void arrange_bf16(const float* x, size_t columns, uint16_t* arranged) {
    for (size_t k = columns / kGroup * kGroup; k < in_groups(columns); ++k) arranged[k] = 0;
    place_pairs(x, columns, 1, reinterpret_cast<int32_t*>(arranged));
}

// The codes of a group, fewer at the end of a row, as pairs of bfloat16.
inline void load_pairs(const Decoder& decode, const uint8_t* codes, size_t left, __m512i* out) {
    if (left >= kGroup) return decode.pairs(codes, out);
    uint8_t padded[kGroup] = {};
    __builtin_memcpy(padded, codes, left);
    decode.pairs(padded, out);
}

template <size_t N>
inline void dot_block_bf16(const Decoder& decode, const uint8_t* row, const uint16_t* const* vectors, size_t place,
                           size_t count, const uint8_t* later, __m512* sums) {
    const uint16_t* x[N];
    __m512 even[N], odd[N];
    for (size_t i = 0; i < N; ++i) x[i] = vectors[i] + place, even[i] = odd[i] = _mm512_setzero_ps();
    for (size_t k = 0; k < count; k += kGroup) {
        fetch(later + k);
        __m512i pairs[2];
        load_pairs(decode, row + k, count - k, pairs);
        for (size_t i = 0; i < N; ++i) {
            even[i] = _mm512_dpbf16_ps(even[i], reinterpret_cast<__m512bh>(pairs[0]),
                                       reinterpret_cast<__m512bh>(_mm512_loadu_si512(x[i] + k)));
            odd[i] = _mm512_dpbf16_ps(odd[i], reinterpret_cast<__m512bh>(pairs[1]),
                                      reinterpret_cast<__m512bh>(_mm512_loadu_si512(x[i] + k + 32)));
        }
    }
    for (size_t i = 0; i < N; ++i) sums[i] = _mm512_add_ps(even[i], odd[i]);
}

template <size_t N>
void dot_few_bf16(const MatrixView& matrix, const Vectors<uint16_t>& vectors, size_t first, size_t last, const void* next) {
    const Decoder decode{};
    const uint8_t* row = static_cast<const uint8_t*>(matrix.values) + first * matrix.columns;
    const size_t whole = matrix.columns / kBlock * kBlock;
    const Ahead ahead(row + (last - first) * matrix.columns, next);
    for (size_t number = first; number < last; ++number, row += matrix.columns) {
        __m512 totals[N];
        for (size_t i = 0; i < N; ++i) totals[i] = _mm512_setzero_ps();
        const uint8_t* const later = ahead.of(row);
        const auto add = [&](size_t block, size_t count) {
            __m512 sums[N];
            dot_block_bf16<N>(decode, row + block, vectors.x, block, count, later + block, sums);
            const __m512 scale = _mm512_set1_ps(scale_of(matrix, number, block));
            for (size_t i = 0; i < N; ++i) totals[i] = _mm512_fmadd_ps(sums[i], scale, totals[i]);
        };
        for (size_t block = 0; block < whole; block += kBlock) add(block, kBlock);
        if (whole < matrix.columns) add(whole, matrix.columns - whole);
        for (size_t i = 0; i < N; ++i) vectors.y[i][number] = sum_of(reinterpret_cast<Floats>(totals[i]));
    }
}

void dot_bf16(const MatrixView& matrix, const Vectors<uint16_t>& vectors, size_t first, size_t last, const void* next) {
    static_assert(kTogether == 4, "a case for each count");
    if (vectors.count == 1) return dot_few_bf16<1>(matrix, vectors, first, last, next);
    if (vectors.count == 2) return dot_few_bf16<2>(matrix, vectors, first, last, next);
    if (vectors.count == 3) return dot_few_bf16<3>(matrix, vectors, first, last, next);
    dot_few_bf16<4>(matrix, vectors, first, last, next);
}

void pack_bf16(const float* const* x, size_t count, size_t tokens, const Share& share, uint16_t* packed) {
    const size_t whole = in_groups(share.columns) / 2, size = in_groups(share.count) / 2;
    for (size_t first = 0, width; first < tokens; first += width) {
        width = tile_width(tokens - first);
        int32_t* const words = reinterpret_cast<int32_t*>(packed) + first * whole + share.first / 2 * width;
        if (first + width > count || share.count % kGroup != 0) __builtin_memset(words, 0, size * width * sizeof *words);
        for (size_t token = 0; token < width && first + token < count; ++token)
            place_pairs(x[first + token], share.count, width, words + token);
    }
}

// Products with bfloat16 activations, in pairs of neighbours.
struct PairProducts {
    using Stored = uint8_t;
    using Packed = uint16_t;

    const Decoder decoder{};
    alignas(64) int32_t tile[kTileRows * kBlock / 2];

    void decode(const uint8_t* row, size_t stride, size_t rows, size_t left, size_t depth) {
        for (size_t number = 0; number < rows; ++number, row += stride)
            for (size_t k = 0; k < depth; k += kGroup) {
                __m512i pairs[2];
                fetch_ahead(row + k, left - k, stride);
                load_pairs(decoder, row + k, left - k, pairs);
                _mm512_store_si512(tile + (number * kBlock + k) / 2, pairs[0]);
                _mm512_store_si512(tile + (number * kBlock + k) / 2 + 16, pairs[1]);
            }
    }

    template <size_t Rows>
    void multiply(size_t row, const uint16_t* packed, size_t width, size_t depth, size_t tokens, float scale, bool set,
                  float* y) const {
        const int32_t *const rows = tile + row * (kBlock / 2), *const words = reinterpret_cast<const int32_t*>(packed);
        if (width == 3 * kTokens) return tile_of<Rows, 3>(rows, words, depth / 2, tokens, scale, set, y);
        if (width == 2 * kTokens) return tile_of<Rows, 2>(rows, words, depth / 2, tokens, scale, set, y);
        tile_of<Rows, 1>(rows, words, depth / 2, tokens, scale, set, y);
    }

    template <size_t Rows, size_t N>
    static void tile_of(const int32_t* weights, const int32_t* packed, size_t depth, size_t tokens, float scale, bool set,
                        float* y) {
        __m512 sums[Rows][N];
        for (size_t row = 0; row < Rows; ++row)
            for (size_t i = 0; i < N; ++i) sums[row][i] = _mm512_setzero_ps();
        for (size_t k = 0; k < depth; ++k) {
            __m512bh inputs[N];
            for (size_t i = 0; i < N; ++i)
                inputs[i] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(packed + (k * N + i) * 16));
            for (size_t row = 0; row < Rows; ++row) {
                const __m512bh weight = reinterpret_cast<__m512bh>(_mm512_set1_epi32(weights[row * (kBlock / 2) + k]));
                for (size_t i = 0; i < N; ++i) sums[row][i] = _mm512_dpbf16_ps(sums[row][i], weight, inputs[i]);
            }
        }
        for (size_t row = 0; row < Rows; ++row)
            for (size_t i = 0; i < N; ++i) {
                float* const place = y + row * tokens + i * 16;
                const __m512 before = set ? _mm512_setzero_ps() : _mm512_loadu_ps(place);
                _mm512_storeu_ps(place, _mm512_fmadd_ps(sums[row][i], _mm512_set1_ps(scale), before));
            }
    }
};

void multiply_bf16(const MatrixView& matrix, const uint16_t* packed, size_t tokens, size_t first, size_t last,
                   const void*, float* y) {
    multiply_rows<PairProducts>(matrix, packed, tokens, first, last, y);
}
#else
constexpr auto arrange_bf16 = nullptr;
constexpr auto dot_bf16 = nullptr;
constexpr auto pack_bf16 = nullptr;
constexpr auto multiply_bf16 = nullptr;
#endif

}  // namespace
