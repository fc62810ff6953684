// Attention over a paged KV cache, a segment of positions at a time: `attend` and `merge` of sequence_kernels.h.
// What a query comes to depends on nothing but itself and what it sees.

// No include guard: included once per ISA unit, inside namespace mosaic::<isa>, after sequence_kernels.inc.h and matrix_decode.inc.h.
namespace {

constexpr size_t kAbreastKeys = kWidth / kQuad;  // a quad's scores for so many positions fill one vector

inline void widen(const float* source, float, float* out, size_t count) {
    __builtin_memcpy(out, source, count * sizeof(float));
}

inline void widen(const uint16_t* source, float, float* out, size_t count) {
    size_t i = 0;
    for (; i + kWidth <= count; i += kWidth) {
        Ints bits;
        load_bits(bits, source + i);
        store(out + i, floats_of(bits));
    }
    for (; i < count; ++i) out[i] = weight_at(source, i);
}

inline void widen(const uint8_t* source, float scale, float* out, size_t count) {
    size_t i = 0;
#if defined(__AVX512F__)
    const Decoder decode;
    for (; i + kStep <= count; i += kStep) {
        Floats values[kStep / kWidth];
        decode.in_order(source + i, values);
        for (size_t j = 0; j < kStep / kWidth; ++j) store(out + i + j * kWidth, values[j] * scale);
    }
#endif
    for (; i < count; ++i) out[i] = decode_one(source[i]) * scale;
}

// Where keys (part 0) or values (part 1) of one head lie, from a position on, up to the end of its page.
struct Rows {
    const char* first;
    const float* scales;  // of the first row, and so on
    size_t stride, bytes, scale_stride;
};

inline Rows rows_at(const PagedKV& kv, size_t part, size_t kv_head, size_t position) {
    const size_t element = kv.kind == KVKind::f32 ? 4 : kv.kind == KVKind::bf16 ? 2 : 1, page = position / kPageTokens;
    const size_t row = (part * kPageTokens + position % kPageTokens) * kv.kv_heads + kv_head, bytes = kv.dim * element;
    return {reinterpret_cast<const char*>(kv.pages[page]) + row * bytes,
            kv.kind == KVKind::e4m3 ? reinterpret_cast<const float*>(kv.scales[page]) + row : nullptr,
            kv.kv_heads * bytes, bytes, kv.kv_heads};
}

template <typename T> void widen_rows(const Rows& rows, size_t count, size_t padded, float* out) {
    for (size_t i = 0; i < count; ++i) {
        const float scale = rows.scales ? rows.scales[i * rows.scale_stride] : 1.0f;
        const T* const row = reinterpret_cast<const T*>(rows.first + i * rows.stride);
        widen(row, scale, out + i * padded, rows.bytes / sizeof(T));
    }
}

inline void widen_rows(KVKind kind, const Rows& rows, size_t count, size_t padded, float* out) {
    switch (kind) {
        case KVKind::f32: return widen_rows<float>(rows, count, padded, out);
        case KVKind::bf16: return widen_rows<uint16_t>(rows, count, padded, out);
        case KVKind::e4m3: return widen_rows<uint8_t>(rows, count, padded, out);
    }
}

// Fetches the next strip while this one is worked on, in even steps: all at once it would only wait for the memory, and
// rows of one head lie too far apart for the hardware to see a stream in them.
class Fetch {
  public:
    Fetch() = default;
    Fetch(const Rows& rows, size_t count, size_t steps)
        : rows_(rows), left_(count * lines()), step_((left_ + steps - 1) / steps) {}

    void step() {
        for (size_t i = 0; i < step_ && left_ > 0; ++i, --left_) {
            __builtin_prefetch(rows_.first + at_);
            at_ += line;
            if (at_ < rows_.bytes) continue;
            at_ = 0;
            rows_.first += rows_.stride;
        }
    }

  private:
    static constexpr size_t line = 64;
    size_t lines() const { return (rows_.bytes + line - 1) / line; }

    Rows rows_ = {};
    size_t left_ = 0, step_ = 0, at_ = 0;
};

// Lane i of the result: the sum of the lanes of vector i, added in the same order for every i.
inline Floats sums_of_four(Floats a, Floats b, Floats c, Floats d) {
#if defined(__AVX512F__)
#define MOSAIC_EVEN 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30
#define MOSAIC_ODD 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31
#elif defined(__AVX__)
#define MOSAIC_EVEN 0, 2, 8, 10, 4, 6, 12, 14
#define MOSAIC_ODD 1, 3, 9, 11, 5, 7, 13, 15
#else
#define MOSAIC_EVEN 0, 2, 4, 6
#define MOSAIC_ODD 1, 3, 5, 7
#endif
    const Floats ab = __builtin_shufflevector(a, b, MOSAIC_EVEN) + __builtin_shufflevector(a, b, MOSAIC_ODD);
    const Floats cd = __builtin_shufflevector(c, d, MOSAIC_EVEN) + __builtin_shufflevector(c, d, MOSAIC_ODD);
    return __builtin_shufflevector(ab, cd, MOSAIC_EVEN) + __builtin_shufflevector(ab, cd, MOSAIC_ODD);
#undef MOSAIC_EVEN
#undef MOSAIC_ODD
}

inline Floats sums_of_each(const Floats (&v)[kAbreastKeys][kQuad]) {
    Floats four[kAbreastKeys];  // each 128 bits wide part of these: parts of the sums of a quad
    for (size_t i = 0; i < kAbreastKeys; ++i) four[i] = sums_of_four(v[i][0], v[i][1], v[i][2], v[i][3]);
#if defined(__AVX512F__)
    const auto fold = [](Floats a, Floats b) {
        return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    };
    return fold(fold(four[0], four[1]), fold(four[2], four[3]));
#elif defined(__AVX__)
    return __builtin_shufflevector(four[0], four[1], 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(four[0], four[1], 4, 5, 6, 7, 12, 13, 14, 15);
#else
    return four[0];
#endif
}

// Scores of a quad for kAbreastKeys positions: [position][query].
inline void score(const float* queries, const float* keys, size_t padded, float* scores) {
    Floats sums[kAbreastKeys][kQuad] = {};
    for (size_t i = 0; i < padded; i += kWidth) {
        Floats key[kAbreastKeys];
        for (size_t k = 0; k < kAbreastKeys; ++k) key[k] = loaded(keys + k * padded + i);
        for (size_t q = 0; q < kQuad; ++q) {
            const Floats query = loaded(queries + q * padded + i);
            for (size_t k = 0; k < kAbreastKeys; ++k) sums[k][q] = multiply_add(query, key[k], sums[k][q]);
        }
    }
    store(scores, sums_of_each(sums));
}

// Scores of a quad to exp(score - largest), 0 beyond a query's limit (counted from the start of the segment).
inline void weigh(float* scores, size_t count, const int32_t (&limits)[kQuad], float* largest, float* sum) {
    Ints limit, position;
    for (size_t lane = 0; lane < kWidth; ++lane) {
        limit[lane] = limits[lane % kQuad];
        position[lane] = static_cast<int32_t>(lane / kQuad);
    }
    Floats most = splat(-INFINITY), total = {};
    const size_t end = count * kQuad;
    for (size_t i = 0; i < end; i += kWidth, position += static_cast<int32_t>(kAbreastKeys)) {
        const Floats value = loaded(scores + i), seen = position > limit ? splat(-INFINITY) : value;
        store(scores + i, seen);
        most = seen > most ? seen : most;
    }
    for (size_t lane = kQuad; lane < kWidth; ++lane)
        if (most[lane] > most[lane % kQuad]) most[lane % kQuad] = most[lane];
    for (size_t lane = 0; lane < kWidth; ++lane) most[lane] = most[lane % kQuad];
    const Floats level = most == -INFINITY ? Floats{} : most;  // nothing seen: all weights become 0
    for (size_t i = 0; i < end; i += kWidth) {
        const Floats weights = exp(loaded(scores + i) - level);
        store(scores + i, weights);
        total += weights;
    }
    for (size_t q = 0; q < kQuad; ++q) {
        largest[q] = most[q];
        sum[q] = 0.0f;
        for (size_t lane = q; lane < kWidth; lane += kQuad) sum[q] += total[lane];
    }
}

// Adds the values of `count` positions, weighted, for a quad.
inline void add_values(const float* weights, const float* values, size_t count, size_t padded, float* total,
                       Fetch& fetch) {
    constexpr size_t abreast = kRegister == 64 ? 4 : 2;  // vectors; four times as many sums have registers
    for (size_t i = 0; i < padded; i += abreast * kWidth) {
        if (i % kHeadPadding == 0) fetch.step();
        Floats sums[kQuad][abreast];
        for (size_t q = 0; q < kQuad; ++q)
            for (size_t j = 0; j < abreast; ++j) sums[q][j] = loaded(total + q * padded + i + j * kWidth);
        for (size_t k = 0; k < count; ++k) {
            Floats value[abreast];
            for (size_t j = 0; j < abreast; ++j) value[j] = loaded(values + k * padded + i + j * kWidth);
            for (size_t q = 0; q < kQuad; ++q) {
                const Floats weight = splat(weights[k * kQuad + q]);
                for (size_t j = 0; j < abreast; ++j) sums[q][j] = multiply_add(weight, value[j], sums[q][j]);
            }
        }
        for (size_t q = 0; q < kQuad; ++q)
            for (size_t j = 0; j < abreast; ++j) store(total + q * padded + i + j * kWidth, sums[q][j]);
    }
}

void attend(const PagedKV* kv, size_t kv_head, const QueryBlock* queries, size_t segment, const Softmax* part) {
    const size_t quads = queries->quads, padded = queries->padded, first = segment * kSegment;
    const int64_t start = static_cast<int64_t>(first);
    int64_t last = start;
    for (size_t i = 0; i < quads * kQuad; ++i) last = queries->limits[i] > last ? queries->limits[i] : last;
    const size_t seen = static_cast<size_t>(last - start) + 1, count = seen < kSegment ? seen : kSegment;
    // Strip by strip of the keys (part 0) or the values (1): widened, then used by every quad.
    const auto strips = [&](size_t kind, size_t steps, const auto& use) {
        for (size_t done = 0; done < count; done += kStrip) {
            const size_t left = count - done, here = left < kStrip ? left : kStrip, beyond = left - here;
            const Rows rows = rows_at(*kv, kind, kv_head, first + done);
            Fetch fetch;  // values follow on keys
            if (beyond > 0)
                fetch = Fetch(rows_at(*kv, kind, kv_head, first + done + kStrip),
                              beyond < kStrip ? beyond : kStrip, quads * steps);
            else if (kind == 0)
                fetch = Fetch(rows_at(*kv, 1, kv_head, first), count < kStrip ? count : kStrip, quads * steps);
            widen_rows(kv->kind, rows, here, padded, queries->strip);
            for (size_t quad = 0; quad < quads; ++quad)
                use(quad, here, queries->scores + (quad * kSegment + done) * kQuad, fetch);
        }
    };
    __builtin_memset(queries->strip, 0, kStrip * padded * sizeof(float));
    __builtin_memset(part->values, 0, quads * kQuad * padded * sizeof(float));
    strips(0, kStrip / kAbreastKeys, [&](size_t quad, size_t here, float* scores, Fetch& fetch) {
        for (size_t k = 0; k < here; k += kAbreastKeys) {
            fetch.step();
            score(queries->rows + quad * kQuad * padded, queries->strip + k * padded, padded, scores + k * kQuad);
        }
    });
    for (size_t quad = 0; quad < quads; ++quad) {
        int32_t limits[kQuad];
        for (size_t q = 0; q < kQuad; ++q) {
            const int64_t limit = queries->limits[quad * kQuad + q] - start;
            const int64_t most = kSegment;
            limits[q] = static_cast<int32_t>(limit < 0 ? -1 : limit < most ? limit : most);
        }
        weigh(queries->scores + quad * kSegment * kQuad, count, limits, part->largest + quad * kQuad,
              part->sum + quad * kQuad);
    }
    strips(1, padded / kHeadPadding, [&](size_t quad, size_t here, const float* weights, Fetch& fetch) {
        add_values(weights, queries->strip, here, padded, part->values + quad * kQuad * padded, fetch);
    });
}

void merge(const Softmax* part, const Softmax* total, size_t rows, size_t padded) {
    for (size_t row = 0; row < rows; ++row) {
        if (part->sum[row] == 0.0f) continue;  // sees nothing of this segment
        const float *values = part->values + row * padded, old = total->sum[row], m = part->largest[row];
        float* const sums = total->values + row * padded;
        if (old == 0.0f) {
            total->largest[row] = m;
            total->sum[row] = part->sum[row];
            __builtin_memcpy(sums, values, padded * sizeof(float));
            continue;
        }
        const float level = m > total->largest[row] ? m : total->largest[row];
        const float keep = exp_of(total->largest[row] - level), take = exp_of(m - level);
        total->largest[row] = level;
        total->sum[row] = old * keep + part->sum[row] * take;
        map(padded, sums, [=](Floats a, Floats b) { return multiply_add(a, splat(keep), b * take); }, sums, values);
    }
}

}  // namespace
