// Memory for many arrays that come and go, on few large pages.
//
// A decode step reads a few cache lines of hundreds of small arrays. On ordinary pages, finding the pages takes as long
// as reading the lines: with plain `malloc` a step takes 5 to 30 % longer. So arrays are cut from slabs on huge pages.
//
// Invariants: an array begins on a cache line; memory that was given back is used again for arrays of the same size
// only (all arrays here double, so there are few sizes); one caller at a time.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <map>
#include <memory>
#include <new>
#include <vector>

#include <sys/mman.h>

namespace drafting {

class Slabs {
public:
    // Return memory of `bytes`, with any content.
    std::byte* take(std::size_t bytes) {
        bytes = rounded(bytes, LINE);
        taken_ += bytes;
        auto& free = free_[bytes];
        if (!free.empty()) {
            std::byte* found = free.back();
            free.pop_back();
            return found;
        }
        // A large array has a slab of its own.
        if (bytes > SLAB / 2) return make_slab(bytes);
        if (bytes > SLAB - used_) {
            current_ = make_slab(SLAB);
            used_ = 0;
        }
        used_ += bytes;
        return current_ + used_ - bytes;
    }

    // Give back memory that `take` returned for `bytes`.
    void give(std::byte* array, std::size_t bytes) {
        bytes = rounded(bytes, LINE);
        taken_ -= bytes;
        free_[bytes].push_back(array);
    }

    // Bytes that were taken and not given back.
    std::size_t taken() const { return taken_; }

private:
    static constexpr std::size_t LINE = 64, HUGE_PAGE = std::size_t{2} << 20, SLAB = 4 * HUGE_PAGE;

    struct Free {
        void operator()(std::byte* slab) const { std::free(slab); }
    };

    static std::size_t rounded(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

    std::byte* make_slab(std::size_t bytes) {
        auto* slab = static_cast<std::byte*>(std::aligned_alloc(HUGE_PAGE, rounded(bytes, HUGE_PAGE)));
        if (slab == nullptr) throw std::bad_alloc();
        slabs_.emplace_back(slab);
#ifdef MADV_HUGEPAGE
        // A refusal costs time only.
        madvise(slab, rounded(bytes, HUGE_PAGE), MADV_HUGEPAGE);
#endif
        return slab;
    }

    std::vector<std::unique_ptr<std::byte, Free>> slabs_;
    std::map<std::size_t, std::vector<std::byte*>> free_;
    // The slab that arrays are cut from, and how much of it is cut.
    std::byte* current_ = nullptr;
    std::size_t used_ = SLAB;
    std::size_t taken_ = 0;
};

// Lets a vector live in slabs. A vector without slabs stays empty.
template <typename T>
struct SlabAllocator {
    using value_type = T;
    using propagate_on_container_move_assignment = std::true_type;

    Slabs* slabs = nullptr;

    T* allocate(std::size_t count) { return reinterpret_cast<T*>(slabs->take(count * sizeof(T))); }
    void deallocate(T* array, std::size_t count) {
        slabs->give(reinterpret_cast<std::byte*>(array), count * sizeof(T));
    }
    bool operator==(const SlabAllocator&) const = default;
};

template <typename T>
using Array = std::vector<T, SlabAllocator<T>>;

template <typename T>
Array<T> make_array(Slabs& slabs, std::size_t size) {
    return Array<T>(size, T{}, SlabAllocator<T>{&slabs});
}

}  // namespace drafting
