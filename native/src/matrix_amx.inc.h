// Products with many vectors in AMX tiles: the body that isa_amx.cpp includes after matrix_kernels.inc.h. For one vector
// loading tiles would be most of the work: it took a third longer than `dot` does.
//
// Both kinds of weight are bfloat16 exactly, and a float32 is the sum of three of them: its leading 8 bits, the next, and
// the rest. So tiles multiply with float32 activations in three passes and lose nothing but what summing in float32 loses.

// No include guard: included once per ISA unit, inside namespace mosaic::<isa>.
namespace {

constexpr size_t kTile = 16;                  // rows of a tile, and float32 or pairs of bfloat16 in one
constexpr size_t kDepth = 2 * kTile;          // weights of a row that a tile holds
constexpr size_t kParts = 3;                  // bfloat16 that add up to a float32
constexpr size_t kTileSize = kTile * kDepth;  // bfloat16 in a full tile
constexpr size_t kBlockTiles = kBlock / kDepth;

// GCC does not know that loading a tile reads all of its memory.
inline void written() { __asm__ volatile("" ::: "memory"); }

// The tiles of this thread while it lives, all full. 0 to 3: sums; 4, 5: weights; 6, 7: activations.
class Tiles {
  public:
    Tiles() {
        struct {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } shape;
        for (size_t tile = 0; tile < 8; ++tile) {
            shape.row_bytes[tile] = static_cast<uint16_t>(kTile * sizeof(float));
            shape.rows[tile] = kTile;
        }
        __asm__ volatile("" ::"r"(&shape) : "memory");
        _tile_loadconfig(&shape);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// Where to fetch the next lines to: from `place` to `end`, then from `next` on, if there is such a thing.
class Run {
  public:
    Run(const void* place, const void* end, const void* next)
        : place_(static_cast<const char*>(place)), end_(static_cast<const char*>(end)),
          next_(next == nullptr ? end_ : static_cast<const char*>(next)) {}

    const char* take(size_t bytes) {
        const char* const now = place_ < end_ ? place_ : next_ + (place_ - end_);
        place_ += bytes;
        return now;
    }

  private:
    const char *place_, *const end_, *const next_;
};

// Into the L2 cache, at this place among the instructions: GCC would move all of a loop's to its beginning, and the CPU
// waits if it has too many to keep track of.
inline void fetch_line(const char* place) { __asm__ volatile("prefetcht1 %0" ::"m"(*place)); }

// 32 values from x on, of which `left` exist, as Parts vectors of sixteen pairs: rounded to nearest, or all that there is.
template <size_t Parts> inline void split_pairs(const float* x, size_t left, __m512i* parts) {
    if (Parts == 1) {
        parts[0] = round_pairs(x, left);
        return;
    }
    const __mmask32 there = left >= kDepth ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
    __m512 rest[2] = {_mm512_maskz_loadu_ps(static_cast<__mmask16>(there), x),
                      _mm512_maskz_loadu_ps(static_cast<__mmask16>(there >> kTile), x + kTile)};
    const __m512i leading = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
    for (size_t part = 0; part < Parts; ++part) {
        __m512 top[2];
        for (size_t half = 0; half < 2; ++half) {
            top[half] = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(rest[half]), leading));
            const __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(top[half]), _mm512_set1_ps(INFINITY), _CMP_LT_OQ);
            rest[half] = _mm512_maskz_sub_ps(finite, rest[half], top[half]);
        }
        parts[part] = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(top[1], top[0]));
    }
}

// A group of values, of which `left` exist, as pairs for the two tiles of weights they meet, in the order of those.
template <size_t Parts>
inline void group_pairs(const float* x, size_t left, Element element, __m512i (&pairs)[2][Parts]) {
    split_pairs<Parts>(x, left, pairs[0]);
    split_pairs<Parts>(x + kDepth, left > kDepth ? left - kDepth : 0, pairs[1]);
    if (element != kE4M3) return;
    for (size_t part = 0; part < Parts; ++part) {  // as Decoder::pairs: lanes of four pairs, even and odd ones apart
        const __m512i first = pairs[0][part], second = pairs[1][part];
        pairs[0][part] = _mm512_shuffle_i32x4(first, second, 0x88);
        pairs[1][part] = _mm512_shuffle_i32x4(first, second, 0xDD);
    }
}

// 16 vectors of 16 as 16 others.
inline void transpose(__m512i* rows) {
    __m512i fours[kTile];
    for (size_t i = 0; i < kTile; i += 4) {  // 4 x 4 within each lane
        const __m512i a = _mm512_unpacklo_epi32(rows[i], rows[i + 1]), b = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
        const __m512i c = _mm512_unpacklo_epi32(rows[i + 2], rows[i + 3]), d = _mm512_unpackhi_epi32(rows[i + 2], rows[i + 3]);
        fours[i] = _mm512_unpacklo_epi64(a, c);
        fours[i + 1] = _mm512_unpackhi_epi64(a, c);
        fours[i + 2] = _mm512_unpacklo_epi64(b, d);
        fours[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
    for (size_t i = 0; i < 4; ++i) {  // then the lanes
        const __m512i a = _mm512_shuffle_i32x4(fours[i], fours[i + 4], 0x88), b = _mm512_shuffle_i32x4(fours[i], fours[i + 4], 0xDD);
        const __m512i c = _mm512_shuffle_i32x4(fours[i + 8], fours[i + 12], 0x88);
        const __m512i d = _mm512_shuffle_i32x4(fours[i + 8], fours[i + 12], 0xDD);
        rows[i] = _mm512_shuffle_i32x4(a, c, 0x88);
        rows[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(a, c, 0xDD);
        rows[i + 12] = _mm512_shuffle_i32x4(b, d, 0xDD);
    }
}

// For `multiply`: per 16 tokens, tiles [16 pairs][16 tokens], the parts of the same values one after the other.
template <size_t Parts>
void pack_tiles(const float* const* x, size_t count, size_t tokens, const Share& share, Element element, uint16_t* packed) {
    const size_t whole = in_groups(share.columns), size = in_groups(share.count);
    for (size_t first = 0; first < tokens; first += kTile) {
        uint16_t* out = packed + (first * whole + share.first * kTile) * Parts;
        for (size_t k = 0; k < size; k += kGroup) {
            __m512i rows[2][Parts][kTile];
            for (size_t token = 0; token < kTile; ++token) {
                __m512i pairs[2][Parts] = {};
                if (first + token < count) group_pairs<Parts>(x[first + token] + k, share.count - k, element, pairs);
                for (size_t half = 0; half < 2; ++half)
                    for (size_t part = 0; part < Parts; ++part) rows[half][part][token] = pairs[half][part];
            }
            for (size_t half = 0; half < 2; ++half)
                for (size_t part = 0; part < Parts; ++part) {
                    transpose(rows[half][part]);
                    for (size_t pair = 0; pair < kTile; ++pair, out += kDepth) _mm512_storeu_si512(out, rows[half][part][pair]);
                }
        }
    }
}

// A group of weights as bfloat16, half of it for one tile, half for another.
struct E4M3Tiles {
    using Stored = uint8_t;
    const Decoder decoder{};

    void load(const uint8_t* weights, __m512i* out) const { decoder.pairs(weights, out); }
};

struct BF16Tiles {
    using Stored = uint16_t;

    void load(const uint16_t* weights, __m512i* out) const {
        out[0] = _mm512_loadu_si512(weights);
        out[1] = _mm512_loadu_si512(weights + kDepth);
    }
};

// Sums over a block of two tiles of rows and N of tokens, from `packed` on, which are `stride` apart.
template <size_t N, size_t Parts>
inline void multiply_block(const uint16_t (*tiles)[2][kTileSize], const uint16_t* packed, size_t stride, size_t depth,
                           float (*sums)[2][kTile * kTile]) {
    _tile_zero(0);
    _tile_zero(1);
    if (N == 2) _tile_zero(2);
    if (N == 2) _tile_zero(3);
    for (size_t tile = 0; tile < depth / kDepth; ++tile) {
        _tile_loadd(4, tiles[tile][0], 64);
        _tile_loadd(5, tiles[tile][1], 64);
        for (size_t part = 0; part < Parts; ++part, packed += kTileSize) {
            _tile_loadd(6, packed, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 5, 6);
            if (N == 1) continue;
            _tile_loadd(7, packed + stride, 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0][0], 64);
    _tile_stored(1, sums[0][1], 64);
    if (N == 2) _tile_stored(2, sums[1][0], 64);
    if (N == 2) _tile_stored(3, sums[1][1], 64);
}

// Panels of two tiles of rows, block by block. A block is decoded before the one before it is multiplied: what tiles load
// must have come to rest in the cache. What is fetched ahead is the next panel, in one run.
template <typename Weights, size_t Parts>
void multiply_tiles(const MatrixView& matrix, const uint16_t* packed, size_t tokens, size_t first, size_t last,
                    const void* next, float* y) {
    using Stored = typename Weights::Stored;
    struct Step {
        size_t start, rows, block, depth;
    };
    const Tiles shapes;
    const Weights weights{};
    alignas(64) uint16_t tiles[2][kBlockTiles][2][kTileSize] = {};
    alignas(64) float sums[2][2][kTile * kTile];
    const size_t columns = matrix.columns, stride = in_groups(columns) * kTile * Parts;
    const Stored* const values = static_cast<const Stored*>(matrix.values);
    Run fetch{values + (first + kTileRows) * columns, values + last * columns, next};

    const auto decode = [&](const Step& step, size_t turn) {
        for (size_t k = 0; k < step.depth; k += kGroup) {
            const Stored* place = values + step.start * columns + step.block + k;
            const char* fetched = fetch.take(kTileRows * kGroup * sizeof(Stored));
            const size_t left = columns - step.block - k;
            for (size_t row = 0; row < step.rows; ++row, place += columns) {
                for (size_t line = 0; line < sizeof(Stored); ++line, fetched += 64) fetch_line(fetched);
                __m512i pairs[2];
                if (left >= kGroup) {
                    weights.load(place, pairs);
                } else {
                    Stored padded[kGroup] = {};
                    __builtin_memcpy(padded, place, left * sizeof(Stored));
                    weights.load(padded, pairs);
                }
                uint16_t* const to = tiles[turn][k / kDepth][row / kTile] + row % kTile * kDepth;
                _mm512_store_si512(to, pairs[0]);
                _mm512_store_si512(to + 2 * kTileSize, pairs[1]);
            }
        }
        written();
    };
    const auto multiply = [&](const Step& step, size_t turn) {
        const __m512 scale = _mm512_set1_ps(sizeof(Stored) == 1 ? scale_of(matrix, step.start, step.block) : 1.0f);
        for (size_t token = 0; token < tokens;) {
            const uint16_t* const inputs = packed + token / kTile * stride + step.block * kTile * Parts;
            const size_t many = tokens - token >= 2 * kTile ? 2 : 1;
            if (many == 2)
                multiply_block<2, Parts>(tiles[turn], inputs, stride, step.depth, sums);
            else
                multiply_block<1, Parts>(tiles[turn], inputs, stride, step.depth, sums);
            for (size_t i = 0; i < many; ++i, token += kTile)
                for (size_t row = 0; row < step.rows; ++row) {
                    float* const place = y + (step.start - first + row) * tokens + token;
                    const __m512 before = step.block == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(place);
                    const __m512 sum = _mm512_load_ps(sums[i][row / kTile] + row % kTile * kTile);
                    _mm512_storeu_ps(place, _mm512_fmadd_ps(sum, scale, before));
                }
        }
    };

    Step before = {};
    size_t turn = 0;
    for (size_t start = first; start < last; start += kTileRows)
        for (size_t block = 0; block < columns; block += kBlock, turn = 1 - turn) {
            const size_t rows = last - start, left = columns - block;
            const Step step = {start, rows < kTileRows ? rows : kTileRows, block, left < kBlock ? in_groups(left) : kBlock};
            decode(step, turn);
            if (before.rows > 0) multiply(before, 1 - turn);
            before = step;
        }
    if (before.rows > 0) multiply(before, 1 - turn);
}

uint16_t* halves(float* memory) { return reinterpret_cast<uint16_t*>(memory); }
const uint16_t* halves(const float* memory) { return reinterpret_cast<const uint16_t*>(memory); }

void pack_amx(const float* const* x, size_t count, size_t tokens, const Share& share, Element element, float* packed) {
    if (element == kF32) return pack(x, count, tokens, share, element, packed);
    pack_tiles<kParts>(x, count, tokens, share, element, halves(packed));
}

void multiply_amx(const MatrixView& matrix, const float* packed, size_t tokens, size_t first, size_t last,
                  const void* next, float* y) {
    if (matrix.element == kE4M3)
        return multiply_tiles<E4M3Tiles, kParts>(matrix, halves(packed), tokens, first, last, next, y);
    if (matrix.element == kBF16)
        return multiply_tiles<BF16Tiles, kParts>(matrix, halves(packed), tokens, first, last, next, y);
    multiply(matrix, packed, tokens, first, last, next, y);
}

void pack_amx_bf16(const float* const* x, size_t count, size_t tokens, const Share& share, uint16_t* packed) {
    pack_tiles<1>(x, count, tokens, share, kE4M3, packed);
}

void multiply_amx_bf16(const MatrixView& matrix, const uint16_t* packed, size_t tokens, size_t first, size_t last,
                       const void* next, float* y) {
    multiply_tiles<E4M3Tiles, 1>(matrix, packed, tokens, first, last, next, y);
}

}  // namespace
