// The kernels of sequence_kernels.h: norms, gates, convolution, the delta rule, rotary embedding.
// All in float32. What a row, a head or a query comes to depends on nothing but its own inputs: sums run in a fixed
// order, so neither the number of tokens in a call nor that of threads shows in the bits. ISAs may differ.

// No include guard: included once per ISA unit, inside namespace mosaic::<isa>, after vectors.inc.h.
namespace {

// --- vectors ---

inline Floats loaded(const float* source, size_t count) {
    Floats values = {};
    __builtin_memcpy(&values, source, count * sizeof(float));
    return values;
}

inline void store(float* target, Floats values, size_t count) {
    __builtin_memcpy(target, &values, count * sizeof(float));
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
    x = x > most ? splat(most) : x;
    x = x < least ? splat(least) : x;
    const Floats shifted = multiply_add(x, splat(0x1.715476p0f), splat(shift)), whole = shifted - shift;
    Floats r = multiply_add(whole, splat(-0x1.63p-1f), x);   // ln 2 in two parts; the first has nine bits, so this is exact
    r = multiply_add(whole, splat(0x1.bd0106p-13f), r);
    Floats p = multiply_add(splat(0x1.6d444ep-10f), r, splat(0x1.120c68p-7f));
    p = multiply_add(p, r, splat(0x1.5554e8p-5f));
    p = multiply_add(p, r, splat(0x1.5554dcp-3f));
    p = multiply_add(p, r, splat(0.5f));
    p = multiply_add(p * r, r, r) + 1.0f;
    const Ints power = bits_of(shifted) - bits_of(shift), half = power >> 1;
    return p * floats_of((half + 127) << 23) * floats_of((power - half + 127) << 23);
}

inline Floats magnitude(Floats x) { return floats_of(bits_of(x) & 0x7FFFFFFF); }

// Only e^-|x| is taken, so that nothing overflows and both ends keep their relative accuracy.
inline Floats sigmoid(Floats x) {
    const Floats e = exp(-magnitude(x));
    return (x < 0.0f ? e : splat(1.0f)) / (1.0f + e);
}

inline Floats silu(Floats x) { return x * sigmoid(x); }

// log(1 + e^x) = max(x, 0) + log(1 + e^-|x|), the latter by the series of artanh(s), s = e / (2 + e) <= 1/3.
inline Floats softplus(Floats x) {
    const Floats e = exp(-magnitude(x)), s = e / (2.0f + e), z = s * s;
    Floats p = multiply_add(splat(0.13433774f), z, splat(0.14116979f));
    p = multiply_add(p, z, splat(0.20003836f));
    p = multiply_add(p, z, splat(0.3333332f));
    const Floats twice = s + s, tail = multiply_add(twice * z, p, twice);
    return (x < 0.0f ? Floats{} : x) + tail;
}

inline float exp_of(float x) { return exp(splat(x))[0]; }

// --- norms and gates ---

inline float sum_of_squares(const float* x, size_t count) {
    Floats sums[4] = {};
    size_t i = 0;
    for (; i + 4 * kWidth <= count; i += 4 * kWidth)
        for (size_t j = 0; j < 4; ++j) {
            const Floats values = loaded(x + i + j * kWidth);
            sums[j] = multiply_add(values, values, sums[j]);
        }
    for (; i < count; i += kWidth) {
        const Floats values = count - i < kWidth ? loaded(x + i, count - i) : loaded(x + i);
        sums[0] = multiply_add(values, values, sums[0]);
    }
    return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
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
        const float scale = sigmoid(splat(gate[row]))[0];
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
        for (size_t tap = 1; tap < taps; ++tap) total = multiply_add(window[tap], weights[tap], total);
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
            even[j] = multiply_add(get(state + i * stride + j * kWidth), splat(key[i]), even[j]);
            odd[j] = multiply_add(get(state + (i + 1) * stride + j * kWidth), splat(key[i + 1]), odd[j]);
        }
    if (i < dim)
        for (size_t j = 0; j < N; ++j) even[j] = multiply_add(get(state + i * stride + j * kWidth), splat(key[i]), even[j]);
    for (size_t j = 0; j < N; ++j) write[j] = beta * (get(value + j * kWidth) - decay * (even[j] + odd[j]));
    for (i = 0; i < dim; ++i, state += stride)
        for (size_t j = 0; j < N; ++j) {
            const Floats next = multiply_add(splat(key[i]), write[j], get(state + j * kWidth) * decay);
            put(state + j * kWidth, next);
            read[j] = multiply_add(next, splat(query[i]), read[j]);
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
            store(out + i, multiply_add(a, c, -(b * s)), count);
            store(out + half + i, multiply_add(b, c, a * s), count);
        }
        if (out != x) __builtin_memcpy(out + 2 * half, x + 2 * half, (dim - 2 * half) * sizeof(float));
    }
}

}  // namespace
