// Memory for what kernels need in between, and the arithmetic of cutting work into pieces. Not for the ISA units.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace mosaic {

inline std::size_t ceil_div(std::size_t count, std::size_t part) { return (count + part - 1) / part; }
inline std::size_t rounded_up(std::size_t count, std::size_t unit) { return ceil_div(count, unit) * unit; }

// Memory that is kept from call to call, on cache lines; what was in it is lost when it grows.
template <typename T> class Scratch {
  public:
    T* take(std::size_t count) {
        if (count > size_) {
            T* const larger = static_cast<T*>(std::aligned_alloc(64, rounded_up(count * sizeof(T), 64)));
            if (larger == nullptr) throw std::bad_alloc();
            memory_.reset(larger);
            size_ = count;
        }
        return memory_.get();
    }

  private:
    struct Free {
        void operator()(T* memory) const { std::free(memory); }
    };
    std::unique_ptr<T, Free> memory_;
    std::size_t size_ = 0;
};

}  // namespace mosaic
