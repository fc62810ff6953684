// Checks what Python hands over, once, before a kernel sees a pointer: element type, C order, writability, counts and
// overlap. Copies and converts nothing: a wrong buffer is a ValueError that names what was found and expected.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

namespace mosaic {

template <typename T> struct ElementType;
template <> struct ElementType<std::uint8_t> { static constexpr const char *name = "uint8", *format = "B"; };
template <> struct ElementType<std::uint16_t> { static constexpr const char *name = "uint16", *format = "H"; };
template <> struct ElementType<std::int32_t> { static constexpr const char *name = "int32", *format = "i"; };
template <> struct ElementType<std::int64_t> { static constexpr const char *name = "int64", *format = "l"; };
template <> struct ElementType<std::uint64_t> { static constexpr const char *name = "uint64", *format = "L"; };
template <> struct ElementType<float> { static constexpr const char *name = "float32", *format = "f"; };

using Shape = std::vector<std::size_t>;

// The same but for the last axis.
inline Shape ending_in(Shape shape, std::size_t last) {
    shape.back() = last;
    return shape;
}

// Whether all of a buffer lies in C order without gaps, or only each of its rows: what one index of the first axis has.
enum class Layout { contiguous, rows };

// A C-contiguous buffer of T (in rows, if asked for), held (and kept from being resized) while this object lives. T const:
// read; else: written.
template <typename T> class Buffer {
    using Element = ElementType<std::remove_const_t<T>>;

  public:
    Buffer(const char* argument, const pybind11::buffer& source, Layout layout = Layout::contiguous)
        : argument_(argument), info_(source.request()) {
        if (info_.format != Element::format)
            refuse("has elements of format '" + info_.format + "'",
                   std::string(Element::name) + " (format '" + Element::format + "')");
        if (layout == Layout::rows) {
            require_contiguous_rows();
        } else if (!PyBuffer_IsContiguous(info_.view(), 'C')) {
            refuse("is not C-contiguous", "a C-contiguous buffer");
        }
        if (!std::is_const_v<T> && info_.readonly) refuse("is read-only", "a writable buffer");
    }

    T* data() const { return static_cast<T*>(info_.ptr); }
    std::size_t count() const { return static_cast<std::size_t>(info_.size); }
    std::size_t rows() const { return static_cast<std::size_t>(info_.shape[0]); }
    std::size_t columns() const { return static_cast<std::size_t>(info_.shape[1]); }
    std::size_t size(std::size_t axis) const { return static_cast<std::size_t>(info_.shape[axis]); }
    Shape shape() const { return Shape(info_.shape.begin(), info_.shape.end()); }
    // Elements from one row to the next; where there are not two, those of a row.
    std::size_t row_stride() const {
        return rows() > 1 ? static_cast<std::size_t>(info_.strides[0]) / sizeof(T) : row_size();
    }

    void require_dimensions(pybind11::ssize_t expected) const {
        if (info_.ndim != expected)
            refuse("has " + std::to_string(info_.ndim) + " dimensions", std::to_string(expected));
    }

    void require_shape(const Shape& expected) const {
        if (shape() == expected) return;
        std::string sizes;
        for (const std::size_t size : expected) sizes += (sizes.empty() ? "" : ", ") + std::to_string(size);
        throw std::invalid_argument(std::string(argument_) + ": expected shape (" + sizes + ")");
    }

    void require_shape(std::size_t rows, std::size_t columns) const { require_shape({rows, columns}); }

    void require_matrix_of(std::size_t block) const {
        if (info_.ndim != 2 || rows() % block != 0 || columns() % block != 0)
            refuse("is not a matrix of whole blocks", "two dimensions, both multiples of " + std::to_string(block));
    }

    void require_count(std::size_t expected) const {
        if (count() != expected)
            refuse("has " + std::to_string(count()) + " elements", std::to_string(expected));
    }

    template <typename U> void require_count_of(const Buffer<U>& other) const {
        if (count() != other.count())
            refuse("has " + std::to_string(count()) + " elements",
                   std::to_string(other.count()) + ", as many as " + other.argument());
    }

    template <typename U> void require_apart_from(const Buffer<U>& other) const {
        if (begin() < other.end() && other.begin() < end())
            refuse("overlaps " + other.argument() + " in memory", "a buffer of its own");
    }

    // For kernels that may write where they have read, element by element.
    template <typename U> void require_same_or_apart_from(const Buffer<U>& other) const {
        if (begin() != other.begin() || end() != other.end()) require_apart_from(other);
    }

    std::string argument() const { return argument_; }
    std::uintptr_t begin() const { return reinterpret_cast<std::uintptr_t>(info_.ptr); }
    std::uintptr_t end() const {
        if (count() == 0 || info_.ndim == 0) return begin() + count() * sizeof(T);
        return begin() + ((rows() - 1) * row_stride() + row_size()) * sizeof(T);
    }

  private:
    std::size_t row_size() const { return rows() > 0 ? count() / rows() : 0; }

    void require_contiguous_rows() const {
        auto bytes = static_cast<pybind11::ssize_t>(sizeof(T));
        bool fits = info_.ndim > 0;
        for (pybind11::ssize_t axis = info_.ndim - 1; axis > 0; --axis) {
            fits = fits && (info_.shape[axis] <= 1 || info_.strides[axis] == bytes);
            bytes *= info_.shape[axis];
        }
        if (fits && info_.shape[0] > 1)
            fits = info_.strides[0] >= bytes && info_.strides[0] % static_cast<pybind11::ssize_t>(sizeof(T)) == 0;
        if (!fits) refuse("has rows that are not C-contiguous or that overlap", "contiguous rows");
    }

    [[noreturn]] void refuse(const std::string& found, const std::string& expected) const {
        throw pybind11::value_error(argument() + " " + found + ", expected " + expected);
    }

    const char* argument_;
    pybind11::buffer_info info_;
};

}  // namespace mosaic
