// Checks what Python hands over, once, before a kernel sees a pointer: element type, C order, writability, counts and
// overlap. Copies and converts nothing: a wrong buffer is a ValueError that names what was found and expected.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <type_traits>

namespace mosaic {

template <typename T> struct ElementType;
template <> struct ElementType<std::uint8_t> { static constexpr const char *name = "uint8", *format = "B"; };
template <> struct ElementType<std::uint16_t> { static constexpr const char *name = "uint16", *format = "H"; };
template <> struct ElementType<std::uint64_t> { static constexpr const char *name = "uint64", *format = "L"; };
template <> struct ElementType<float> { static constexpr const char *name = "float32", *format = "f"; };

// A C-contiguous buffer of T, held (and kept from being resized) while this object lives. T const: read; else: written.
template <typename T> class Buffer {
    using Element = ElementType<std::remove_const_t<T>>;

  public:
    Buffer(const char* argument, const pybind11::buffer& source) : argument_(argument), info_(source.request()) {
        if (info_.format != Element::format)
            refuse("has elements of format '" + info_.format + "'",
                   std::string(Element::name) + " (format '" + Element::format + "')");
        if (!PyBuffer_IsContiguous(info_.view(), 'C')) refuse("is not C-contiguous", "a C-contiguous buffer");
        if (!std::is_const_v<T> && info_.readonly) refuse("is read-only", "a writable buffer");
    }

    T* data() const { return static_cast<T*>(info_.ptr); }
    std::size_t count() const { return static_cast<std::size_t>(info_.size); }
    std::size_t rows() const { return static_cast<std::size_t>(info_.shape[0]); }
    std::size_t columns() const { return static_cast<std::size_t>(info_.shape[1]); }

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

    std::string argument() const { return argument_; }
    std::uintptr_t begin() const { return reinterpret_cast<std::uintptr_t>(info_.ptr); }
    std::uintptr_t end() const { return begin() + count() * sizeof(T); }

  private:
    [[noreturn]] void refuse(const std::string& found, const std::string& expected) const {
        throw pybind11::value_error(argument() + " " + found + ", expected " + expected);
    }

    const char* argument_;
    pybind11::buffer_info info_;
};

}  // namespace mosaic
