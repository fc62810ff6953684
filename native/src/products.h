// What linear maps and experts share: activations in the forms that kernels want, and work cut into tasks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "matrix.h"
#include "scratch.h"
#include "thread_pool.h"

namespace mosaic {

constexpr std::size_t kTaskBytes = 64 << 10;  // weights that are worth a task of their own
constexpr std::size_t kTasksPerThread = 8;    // long runs through memory are fast, but the last task should not be long
constexpr std::size_t kTokenBlock = 96;       // tokens multiplied at a time, so that they stay in the cache
constexpr std::size_t kCached = 64 << 10;     // weights that stay in a core's cache until the next vectors meet them

inline std::size_t padded(std::size_t tokens) { return rounded_up(tokens, kTokens); }

inline std::size_t bytes_of(Element element) { return element == kE4M3 ? 1 : element == kBF16 ? 2 : 4; }

// How activations are to lie: as weights of an Element want them, or rounded to bfloat16 for E4M3.
enum Form { kForE4M3 = kE4M3, kForBF16 = kBF16, kForF32 = kF32, kRounded, kForms };

inline Form form_for(const Isa& isa, const MatrixView& matrix, bool bf16) {
    if (bf16 && matrix.element == kE4M3 && isa.matrix->dot_bf16 != nullptr) return kRounded;
    return static_cast<Form>(matrix.element);
}

// One vector in the forms that were asked for.
class Vector {
  public:
    void reserve(const Isa& isa, Form form, std::size_t columns) { forms_[form].take(size(isa, form, in_groups(columns))); }

    void fill(const Isa& isa, const float* x, std::size_t columns, const bool (&needed)[kForms]) {
        for (int form = 0; form < kForms; ++form) {
            if (!needed[form]) continue;
            reserve(isa, static_cast<Form>(form), columns);
            fill_part(isa, x, 0, columns, static_cast<Form>(form));
        }
    }

    // `count` values from place `first` on, both whole groups but at the end.
    void fill_part(const Isa& isa, const float* x, std::size_t first, std::size_t count, Form form) {
        float* const place = forms_[form].take(0) + size(isa, form, first);
        if (form == kRounded)
            isa.matrix->arrange_bf16(x, count, reinterpret_cast<std::uint16_t*>(place));
        else
            isa.matrix->arrange(x, count, static_cast<Element>(form), place);
    }

    template <typename Value> const Value* in(Form form) { return reinterpret_cast<const Value*>(forms_[form].take(0)); }

  private:
    // Floats that so many values take.
    static std::size_t size(const Isa& isa, Form form, std::size_t values) {
        return values * (form == kRounded ? isa.matrix->bytes.dot_bf16 : isa.matrix->bytes.dot) / sizeof(float);
    }

    Scratch<float> forms_[kForms];
};

inline std::size_t row_bytes(const MatrixView& matrix) { return matrix.columns * bytes_of(matrix.element); }

inline const void* row_of(const MatrixView& matrix, std::size_t row) {
    return static_cast<const char*>(matrix.values) + std::min(row, matrix.rows) * row_bytes(matrix);
}

// Rows of a matrix times `count` vectors: x(i) is the Vector, y(i) where row 0 of its products goes. Of more vectors than
// kernels take, the first ones bring a few rows into the cache for the others.
template <typename X, typename Y>
void dot(const Isa& isa, const MatrixView& matrix, Form form, std::size_t count, const X& x, const Y& y, std::size_t first,
         std::size_t last, const void* next) {
    const std::size_t rows = count <= kTogether ? last - first : std::max<std::size_t>(kCached / row_bytes(matrix), 1);
    for (std::size_t start = first, end; start < last; start = end) {
        end = std::min(start + rows, last);
        for (std::size_t done = 0, together; done < count; done += together) {
            together = std::min(kTogether, count - done);
            const auto vectors = [&](auto value) {
                Vectors<decltype(value)> few = {together, {}, {}};
                for (std::size_t i = 0; i < together; ++i) {
                    few.x[i] = x(done + i).template in<decltype(value)>(form);
                    few.y[i] = y(done + i);
                }
                return few;
            };
            const void* const then = done + together < count ? row_of(matrix, start) : end < last ? row_of(matrix, end) : next;
            if (form == kRounded)
                isa.matrix->dot_bf16(matrix, vectors(std::uint16_t{}), start, end, then);
            else
                isa.matrix->dot(matrix, vectors(float{}), start, end, then);
        }
    }
}

// Floats that vectors packed for `multiply` take.
inline std::size_t packed_size(const Isa& isa, std::size_t columns, std::size_t tokens, Form form) {
    const std::size_t bytes = form == kRounded ? isa.matrix->bytes.multiply_bf16 : isa.matrix->bytes.multiply;
    return in_groups(columns) * tokens * bytes / sizeof(float);
}

inline void pack(const Isa& isa, const float* const* x, std::size_t count, std::size_t tokens, const Share& share,
                 Form form, float* packed) {
    if (form == kRounded)
        isa.matrix->pack_bf16(x, count, tokens, share, reinterpret_cast<std::uint16_t*>(packed));
    else
        isa.matrix->pack(x, count, tokens, share, static_cast<Element>(form), packed);
}

inline void multiply(const Isa& isa, const MatrixView& matrix, const float* packed, std::size_t tokens,
                     Form form, std::size_t first, std::size_t last, const void* next, float* y) {
    if (form == kRounded)
        isa.matrix->multiply_bf16(matrix, reinterpret_cast<const std::uint16_t*>(packed), tokens, first, last, next, y);
    else
        isa.matrix->multiply(matrix, packed, tokens, first, last, next, y);
}

// Rows of a matrix that are a task.
struct Piece {
    const MatrixView* matrix;
    std::size_t owner, first, last;
};

// The tasks of reading some matrices once. Memory is kept from call to call.
class Pieces {
  public:
    // For matrices of so many bytes in all, if they are not cut into panels.
    void begin(std::size_t bytes = 0) {
        pieces_.clear();
        threads_ = thread_count();
        bytes_ = std::max(kTaskBytes, bytes / (kTasksPerThread * threads_));
    }

    // Whole panels, unless that is all. `together`: bytes that are read with each row.
    void cut(const MatrixView& matrix, std::size_t owner, std::size_t together) {
        const std::size_t rows = rounded_up(std::max<std::size_t>(bytes_ / std::max<std::size_t>(together, 1), 1), kPanel);
        for (std::size_t first = 0; first < matrix.rows; first += rows)
            pieces_.push_back({&matrix, owner, first, std::min(first + rows, matrix.rows)});
    }

    // Panel by panel, as many vectors are multiplied.
    void cut_panels(const MatrixView& matrix, std::size_t owner) {
        for (std::size_t first = 0; first < matrix.rows; first += kPanel)
            pieces_.push_back({&matrix, owner, first, std::min(first + kPanel, matrix.rows)});
    }

    std::size_t count() const { return pieces_.size(); }
    const Piece& operator[](std::size_t task) const { return pieces_[task]; }

    // Where a thread probably reads on after a task.
    const void* after(std::size_t task) const {
        const Piece& piece = pieces_[std::min(task + threads_, pieces_.size() - 1)];
        return row_of(*piece.matrix, piece.first);
    }

  private:
    std::vector<Piece> pieces_;
    std::size_t threads_ = 1, bytes_ = 0;
};

// Columns of part [rows][width] as rows: column i goes to out(i), of which there are `count`.
template <typename Out>
void turn(const float* part, std::size_t rows, std::size_t width, std::size_t count, const Out& out) {
    using Four = float __attribute__((vector_size(16)));
    using Places = int __attribute__((vector_size(16)));
    const auto load = [](const float* place) {
        Four values;
        __builtin_memcpy(&values, place, sizeof values);
        return values;
    };
    std::size_t i = 0;
    for (; i + 4 <= count; i += 4) {
        float* const to[4] = {out(i), out(i + 1), out(i + 2), out(i + 3)};
        std::size_t row = 0;
        for (; row + 4 <= rows; row += 4) {
            const float* const from = part + row * width + i;
            const Four a = load(from), b = load(from + width), c = load(from + 2 * width), d = load(from + 3 * width);
            const Four ab = __builtin_shuffle(a, b, Places{0, 4, 1, 5}), ab2 = __builtin_shuffle(a, b, Places{2, 6, 3, 7});
            const Four cd = __builtin_shuffle(c, d, Places{0, 4, 1, 5}), cd2 = __builtin_shuffle(c, d, Places{2, 6, 3, 7});
            const Four turned[4] = {
                __builtin_shuffle(ab, cd, Places{0, 1, 4, 5}), __builtin_shuffle(ab, cd, Places{2, 3, 6, 7}),
                __builtin_shuffle(ab2, cd2, Places{0, 1, 4, 5}), __builtin_shuffle(ab2, cd2, Places{2, 3, 6, 7})};
            for (std::size_t k = 0; k < 4; ++k) __builtin_memcpy(to[k] + row, &turned[k], sizeof turned[k]);
        }
        for (; row < rows; ++row)
            for (std::size_t k = 0; k < 4; ++k) to[k][row] = part[row * width + i + k];
    }
    for (; i < count; ++i) {
        float* const to = out(i);
        for (std::size_t row = 0; row < rows; ++row) to[row] = part[row * width + i];
    }
}

}  // namespace mosaic
