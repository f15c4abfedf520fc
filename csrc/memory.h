// Memory of many arrays that come and go, on few large pages.
//
// A decode step touches a few lines of hundreds of small arrays. With each on a page of its own, finding the pages
// takes as long as reading the lines; so arrays are cut from slabs that the kernel is asked to put on huge pages. The
// first write to a huge page makes the kernel find and zero one, which was seen to take 5 ms in a virtual machine: so a
// slab is written to before it is needed, by a thread of its own.
//
// Invariants: an array is whole cache lines; what was given back is cut again for the same size only (there are few
// sizes, because all arrays here double). One caller at a time.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <sys/mman.h>

namespace drafting {

class Slabs {
public:
    static constexpr std::size_t LINE = 64;

    Slabs() = default;
    Slabs(const Slabs&) = delete;
    Slabs& operator=(const Slabs&) = delete;

    // `bytes` of memory, all zero.
    std::byte* take(std::size_t bytes) {
        auto& free = free_[bytes];
        std::byte* found;
        if (!free.empty()) {
            found = free.back();
            free.pop_back();
            std::memset(found, 0, bytes);
        } else if (bytes > SLAB / 2) {
            all_.push_back(Slab::make(bytes));
            found = all_.back().begin.get();
        } else {
            found = cut(bytes);
        }
        taken_ += bytes;
        return found;
    }

    // Back what `take` gave.
    void give(std::byte* array, std::size_t bytes) {
        taken_ -= bytes;
        free_[bytes].push_back(array);
    }

    // Bytes that were taken and not given back.
    std::size_t taken() const { return taken_; }

private:
    static constexpr std::size_t HUGE = std::size_t{2} << 20;
    static constexpr std::size_t PAGE = 4096;
    // Four huge pages. What is larger than half of it gets memory of its own.
    static constexpr std::size_t SLAB = 4 * HUGE;

    struct Free {
        void operator()(std::byte* begin) const { std::free(begin); }
    };
    struct Slab {
        std::unique_ptr<std::byte, Free> begin;
        std::size_t size;

        static Slab make(std::size_t bytes) {
            const std::size_t size = (bytes + HUGE - 1) / HUGE * HUGE;
            auto* begin = static_cast<std::byte*>(std::aligned_alloc(HUGE, size));
            if (begin == nullptr) throw std::bad_alloc();
            // Whether the kernel does as it is asked says nothing but how long steps take.
            madvise(begin, size, MADV_HUGEPAGE);
            std::memset(begin, 0, bytes);
            return {std::unique_ptr<std::byte, Free>(begin), size};
        }
    };

    std::byte* cut(std::size_t bytes) {
        if (bytes > SLAB - used_) {
            if (warming_.joinable()) {
                warming_.join();
                all_.push_back(std::move(next_));
            } else {
                all_.push_back(Slab::make(SLAB));
            }
            current_ = all_.back().begin.get();
            used_ = 0;
        }
        std::byte* found = current_ + used_;
        used_ += bytes;
        if (used_ > SLAB / 2 && !warming_.joinable()) warming_ = std::jthread([this] { next_ = Slab::make(SLAB); });
        return found;
    }

    std::map<std::size_t, std::vector<std::byte*>> free_;
    std::vector<Slab> all_;
    // Of the slab that is cut: where it begins, and how much of it is cut.
    std::byte* current_ = nullptr;
    std::size_t used_ = SLAB;
    std::size_t taken_ = 0;
    // The slab after that one. Only its thread touches it until that is joined.
    Slab next_{};
    std::jthread warming_;
};

// An array of trivial elements that lives in slabs: whole cache lines, zero at first.
template <typename T>
class Array {
public:
    Array() = default;
    Array(Slabs& slabs, std::size_t size)
        : slabs_(&slabs), elements_(reinterpret_cast<T*>(slabs.take(bytes(size))), size) {}
    Array(Array&& other) noexcept { swap(other); }
    Array& operator=(Array&& other) noexcept {
        swap(other);
        return *this;
    }
    ~Array() {
        if (slabs_ != nullptr) slabs_->give(reinterpret_cast<std::byte*>(elements_.data()), bytes(elements_.size()));
    }

    std::span<T> all() const { return elements_; }
    std::size_t size() const { return elements_.size(); }
    T& operator[](std::size_t place) const { return elements_[place]; }

private:
    static std::size_t bytes(std::size_t size) {
        return (size * sizeof(T) + Slabs::LINE - 1) / Slabs::LINE * Slabs::LINE;
    }
    void swap(Array& other) noexcept {
        std::swap(slabs_, other.slabs_);
        std::swap(elements_, other.elements_);
    }

    Slabs* slabs_ = nullptr;
    std::span<T> elements_;
};

}  // namespace drafting
