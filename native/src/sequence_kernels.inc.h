// The kernels of sequence_kernels.h: norms, gates, convolution, the delta rule, rotary embedding, attention.
// All in float32. What a row, a head or a query comes to depends on nothing but its own inputs: sums run in a fixed
// order, so neither the number of tokens in a call nor that of threads shows in the bits. ISAs may differ.

// No include guard: included once per ISA unit, inside namespace mosaic::<isa>, after quantize_kernels.inc.h, whose
// vector types it uses.
namespace {

// --- vectors ---

inline Floats all(float value) { return value - Floats{}; }

inline Floats loaded(const float* source) {
    Floats values;
    load(values, source);
    return values;
}

inline Floats loaded(const float* source, size_t count) {
    Floats values = {};
    __builtin_memcpy(&values, source, count * sizeof(float));
    return values;
}

inline void store(float* target, Floats values) { __builtin_memcpy(target, &values, sizeof values); }
inline void store(float* target, Floats values, size_t count) {
    __builtin_memcpy(target, &values, count * sizeof(float));
}

// a * b + c, rounded once where the ISA can.
inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

inline float sum_of_lanes(Floats values) {
    float sum[kWidth];
    store(sum, values);
    for (size_t half = kWidth / 2; half > 0; half /= 2)
        for (size_t i = 0; i < half; ++i) sum[i] += sum[i + half];
    return sum[0];
}

// out[i] = f(in[i]...)
template <typename F, typename... In> inline void map(size_t count, float* out, F f, const In*... in) {
    size_t i = 0;
    for (; i + kWidth <= count; i += kWidth) store(out + i, f(loaded(in + i)...));
    if (i < count) store(out + i, f(loaded(in + i, count - i)...), count - i);
}

// --- exponentials ---
// Polynomials fitted at Chebyshev nodes; what they leave out is below a fifth of a float32's last place.

// e^x. Adding 1.5 * 2^23 rounds x / ln 2 to a whole number and leaves it in the low bits. The power of two is
// multiplied on in two halves, so that results may be subnormal; below -104 they are 0, from 88.73 on infinite.
inline Floats exp(Floats x) {
    constexpr float most = 89.0f, least = -104.5f, shift = 0x1.8p23f;
    x = x > most ? all(most) : x;
    x = x < least ? all(least) : x;
    const Floats shifted = fma(x, all(0x1.715476p0f), all(shift)), whole = shifted - shift;
    Floats r = fma(whole, all(-0x1.63p-1f), x);   // ln 2 in two parts; the first has nine bits, so this is exact
    r = fma(whole, all(0x1.bd0106p-13f), r);
    Floats p = fma(all(0x1.6d444ep-10f), r, all(0x1.120c68p-7f));
    p = fma(p, r, all(0x1.5554e8p-5f));
    p = fma(p, r, all(0x1.5554dcp-3f));
    p = fma(p, r, all(0.5f));
    p = fma(p * r, r, r) + 1.0f;
    const Ints power = bits_of(shifted) - bits_of(shift), half = power >> 1;
    return p * floats_of((half + 127) << 23) * floats_of((power - half + 127) << 23);
}

inline Floats magnitude(Floats x) { return floats_of(bits_of(x) & 0x7FFFFFFF); }

// Only e^-|x| is taken, so that nothing overflows and both ends keep their relative accuracy.
inline Floats sigmoid(Floats x) {
    const Floats e = exp(-magnitude(x));
    return (x < 0.0f ? e : all(1.0f)) / (1.0f + e);
}

inline Floats silu(Floats x) { return x * sigmoid(x); }

// log(1 + e^x) = max(x, 0) + log(1 + e^-|x|), the latter by the series of artanh(s), s = e / (2 + e) <= 1/3.
inline Floats softplus(Floats x) {
    const Floats e = exp(-magnitude(x)), s = e / (2.0f + e), z = s * s;
    Floats p = fma(all(0.13433774f), z, all(0.14116979f));
    p = fma(p, z, all(0.20003836f));
    p = fma(p, z, all(0.3333332f));
    const Floats twice = s + s, tail = fma(twice * z, p, twice);
    return (x < 0.0f ? Floats{} : x) + tail;
}

inline float exp_of(float x) { return exp(all(x))[0]; }

// --- norms and gates ---

inline float sum_of_squares(const float* x, size_t count) {
    Floats sums[4] = {};
    size_t i = 0;
    for (; i + 4 * kWidth <= count; i += 4 * kWidth)
        for (size_t j = 0; j < 4; ++j) {
            const Floats values = loaded(x + i + j * kWidth);
            sums[j] = fma(values, values, sums[j]);
        }
    for (; i < count; i += kWidth) {
        const Floats values = count - i < kWidth ? loaded(x + i, count - i) : loaded(x + i);
        sums[0] = fma(values, values, sums[0]);
    }
    return sum_of_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

inline float inverse_rms(const float* x, size_t count, float eps) {
    return 1.0f / __builtin_sqrtf(sum_of_squares(x, count) / static_cast<float>(count) + eps);
}

void rms_norm(const float* x, size_t stride, const float* weight, float* out, size_t rows, size_t columns, float eps,
              float offset) {
    for (size_t row = 0; row < rows; ++row, x += stride, out += columns) {
        const float scale = inverse_rms(x, columns, eps);
        map(columns, out, [=](Floats value, Floats w) { return value * scale * (offset + w); }, x, weight);
    }
}

void gated_rms_norm(const float* x, const float* weight, const float* gate, float* out, size_t rows, size_t columns,
                    float eps) {
    for (size_t row = 0; row < rows; ++row, x += columns, gate += columns, out += columns) {
        const float scale = inverse_rms(x, columns, eps);
        map(columns, out, [=](Floats value, Floats w, Floats g) { return value * scale * w * silu(g); }, x, weight,
            gate);
    }
}

void sigmoid_gate(const float* x, const float* gate, float* out, size_t count) {
    map(count, out, [](Floats value, Floats g) { return value * sigmoid(g); }, x, gate);
}

void sigmoid_scale(const float* x, const float* gate, float* out, size_t rows, size_t columns) {
    for (size_t row = 0; row < rows; ++row, x += columns, out += columns) {
        const float scale = sigmoid(all(gate[row]))[0];
        map(columns, out, [=](Floats value) { return value * scale; }, x);
    }
}

void silu_multiply(const float* a, const float* b, float* out, size_t count) {
    map(count, out, [](Floats x, Floats y) { return silu(x) * y; }, a, b);
}

void delta_gates(const float* a, const float* b, const float* a_log, const float* dt_bias, float* log_decay,
                 float* beta, size_t tokens, size_t heads) {
    for (size_t token = 0; token < tokens; ++token, a += heads, b += heads, log_decay += heads, beta += heads) {
        map(heads, log_decay, [](Floats x, Floats rate, Floats bias) { return -exp(rate) * softplus(x + bias); }, a,
            a_log, dt_bias);
        map(heads, beta, [](Floats x) { return sigmoid(x); }, b);
    }
}

// --- convolution ---

#if defined(__AVX512F__)
#define MOSAIC_EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define MOSAIC_ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif defined(__AVX__)
#define MOSAIC_EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define MOSAIC_ODD 1, 3, 5, 7, 9, 11, 13, 15
#else
#define MOSAIC_EVEN 0, 2, 4, 6
#define MOSAIC_ODD 1, 3, 5, 7
#endif

// Four taps of kWidth channels, from [channel][tap] to [tap][channel].
inline void transpose(const float* rows, Floats* taps) {
    const Floats a = loaded(rows), b = loaded(rows + kWidth), c = loaded(rows + 2 * kWidth);
    const Floats d = loaded(rows + 3 * kWidth);
    const Floats even_ab = __builtin_shufflevector(a, b, MOSAIC_EVEN);
    const Floats even_cd = __builtin_shufflevector(c, d, MOSAIC_EVEN);
    const Floats odd_ab = __builtin_shufflevector(a, b, MOSAIC_ODD);
    const Floats odd_cd = __builtin_shufflevector(c, d, MOSAIC_ODD);
    taps[0] = __builtin_shufflevector(even_ab, even_cd, MOSAIC_EVEN);
    taps[1] = __builtin_shufflevector(odd_ab, odd_cd, MOSAIC_EVEN);
    taps[2] = __builtin_shufflevector(even_ab, even_cd, MOSAIC_ODD);
    taps[3] = __builtin_shufflevector(odd_ab, odd_cd, MOSAIC_ODD);
}
#undef MOSAIC_EVEN
#undef MOSAIC_ODD

// `count` <= kWidth channels: the weights of each tap in a vector, then token by token. kTaps 0: as many as it says.
template <size_t kTaps> inline void convolve(const Convolution& conv, size_t channel, size_t count) {
    constexpr size_t most = 8;
    const size_t taps = kTaps > 0 ? kTaps : conv.taps, past = taps - 1, channels = conv.channels;
    Floats weights[most] = {}, window[most] = {};  // the window: `past` earlier inputs, then the current one
    const float* const rows = conv.weight + channel * taps;
    if (kTaps == 4) {
        transpose(rows, weights);
    } else {
        for (size_t i = 0; i < count * taps; ++i) weights[i % taps][i / taps] = rows[i];
    }
    for (size_t tap = 0; tap < past; ++tap) window[tap] = loaded(conv.history + tap * channels + channel, count);
    for (size_t token = 0; token < conv.tokens; ++token) {
        window[past] = loaded(conv.x + token * conv.stride + channel, count);
        Floats total = window[0] * weights[0];
        for (size_t tap = 1; tap < taps; ++tap) total = fma(window[tap], weights[tap], total);
        store(conv.out + token * channels + channel, silu(total), count);
        for (size_t tap = 0; tap < past; ++tap) window[tap] = window[tap + 1];
    }
    for (size_t tap = 0; tap < past; ++tap) store(conv.history + tap * channels + channel, window[tap], count);
}

void causal_conv(const Convolution* conv, size_t first_channel, size_t last_channel) {
    for (size_t channel = first_channel; channel < last_channel; channel += kWidth) {
        const size_t left = last_channel - channel;
        if (left < kWidth) {
            convolve<0>(*conv, channel, left);
        } else if (conv->taps == 4) {
            convolve<4>(*conv, channel, kWidth);
        } else {
            convolve<0>(*conv, channel, kWidth);
        }
    }
}

// --- gated delta rule ---

void unit_vector(const float* x, size_t count, float scale, float* out) {
    constexpr float eps = 1e-6f;  // L2_EPS in runtime/ops/reference.py
    scale /= __builtin_sqrtf(sum_of_squares(x, count) + eps);
    map(count, out, [=](Floats value) { return value * scale; }, x);
}

// One token, N vectors of columns; with `whole` false only `count` columns of one. Two walks over the rows: what the
// decayed state predicts for the key, in two sums of every other row, then the write and the read of what was written.
template <size_t N, bool whole>
inline void delta_step(float* state, size_t stride, size_t dim, const float* query, const float* key,
                       const float* value, float decay, float beta, float* out, size_t count) {
    const auto get = [=](const float* source) { return whole ? loaded(source) : loaded(source, count); };
    const auto put = [=](float* target, Floats values) {
        whole ? store(target, values) : store(target, values, count);
    };
    Floats even[N] = {}, odd[N] = {}, write[N], read[N] = {};
    size_t i = 0;
    for (; i + 2 <= dim; i += 2)
        for (size_t j = 0; j < N; ++j) {
            even[j] = fma(get(state + i * stride + j * kWidth), all(key[i]), even[j]);
            odd[j] = fma(get(state + (i + 1) * stride + j * kWidth), all(key[i + 1]), odd[j]);
        }
    if (i < dim)
        for (size_t j = 0; j < N; ++j) even[j] = fma(get(state + i * stride + j * kWidth), all(key[i]), even[j]);
    for (size_t j = 0; j < N; ++j) write[j] = beta * (get(value + j * kWidth) - decay * (even[j] + odd[j]));
    for (i = 0; i < dim; ++i, state += stride)
        for (size_t j = 0; j < N; ++j) {
            const Floats next = fma(all(key[i]), write[j], get(state + j * kWidth) * decay);
            put(state + j * kWidth, next);
            read[j] = fma(next, all(query[i]), read[j]);
        }
    for (size_t j = 0; j < N; ++j) put(out + j * kWidth, read[j]);
}

// Some columns of one head, all tokens. Many tokens work on a copy of the columns without gaps, which L1 holds: with
// gaps of a power of two they would compete for a part of its lines.
template <size_t N, bool whole>
void delta_columns(const DeltaRule& rule, size_t head, size_t column, size_t count) {
    constexpr size_t width = N * kWidth, few = 4;
    const size_t key_head = head / (rule.value_heads / rule.key_heads), dim = rule.key_dim, heads = rule.value_heads;
    const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(dim));
    float query[kMostKeyDim], key[kMostKeyDim];
    alignas(kRegister) float copy[whole ? kMostKeyDim * width : 1];
    const bool copied = whole && rule.tokens >= few;
    float* const columns = rule.state + head * dim * rule.value_dim + column;
    float* const state = copied ? copy : columns;
    const size_t stride = copied ? width : rule.value_dim;
    if (copied)
        for (size_t i = 0; i < dim; ++i)
            __builtin_memcpy(copy + i * width, columns + i * rule.value_dim, width * sizeof(float));
    for (size_t token = 0; token < rule.tokens; ++token) {
        unit_vector(rule.query + token * rule.query_stride + key_head * dim, dim, scale, query);
        unit_vector(rule.key + token * rule.key_stride + key_head * dim, dim, 1.0f, key);
        const size_t place = head * rule.value_dim + column, gate = token * heads + head;
        delta_step<N, whole>(state, stride, dim, query, key, rule.value + token * rule.value_stride + place,
                             exp_of(rule.log_decay[gate]), rule.beta[gate],
                             rule.out + token * heads * rule.value_dim + place, count);
    }
    if (copied)
        for (size_t i = 0; i < dim; ++i)
            __builtin_memcpy(columns + i * rule.value_dim, copy + i * width, width * sizeof(float));
}

void delta_rule(const DeltaRule* rule, size_t head, size_t first_column, size_t last_column) {
    constexpr size_t abreast = 4;  // vectors; with two sums of each and a write they fit the registers
    for (size_t column = first_column; column < last_column;) {
        const size_t left = last_column - column;
        if (left >= abreast * kWidth) {
            delta_columns<abreast, true>(*rule, head, column, 0);
            column += abreast * kWidth;
        } else if (left >= kWidth) {
            delta_columns<1, true>(*rule, head, column, 0);
            column += kWidth;
        } else {
            delta_columns<1, false>(*rule, head, column, left);
            column = last_column;
        }
    }
}

// --- rotary embedding ---

void rotate(const float* x, float* out, const float* cosines, const float* sines, size_t heads, size_t dim,
            size_t half) {
    for (size_t head = 0; head < heads; ++head, x += dim, out += dim) {
        for (size_t i = 0; i < half; i += kWidth) {
            const size_t count = half - i < kWidth ? half - i : kWidth;
            const Floats a = loaded(x + i, count), b = loaded(x + half + i, count);
            const Floats c = loaded(cosines + i, count), s = loaded(sines + i, count);
            store(out + i, fma(a, c, -(b * s)), count);
            store(out + half + i, fma(b, c, a * s), count);
        }
        if (out != x) __builtin_memcpy(out + 2 * half, x + 2 * half, (dim - 2 * half) * sizeof(float));
    }
}

// --- attention ---

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
    for (size_t i = 0; i < count; ++i) out[i] = decode_one(source[i]) * scale;
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
            for (size_t k = 0; k < kAbreastKeys; ++k) sums[k][q] = fma(query, key[k], sums[k][q]);
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
    Floats most = all(-INFINITY), total = {};
    const size_t end = count * kQuad;
    for (size_t i = 0; i < end; i += kWidth, position += static_cast<int32_t>(kAbreastKeys)) {
        const Floats value = loaded(scores + i), seen = position > limit ? all(-INFINITY) : value;
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
                const Floats weight = all(weights[k * kQuad + q]);
                for (size_t j = 0; j < abreast; ++j) sums[q][j] = fma(weight, value[j], sums[q][j]);
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
        map(padded, sums, [=](Floats a, Floats b) { return fma(a, all(keep), b * take); }, sums, values);
    }
}

}  // namespace
