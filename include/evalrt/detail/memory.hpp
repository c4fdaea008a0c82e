// Memory for what comes and goes with each request: the system's allocator looks for it among all
// that a program has, and touches neighbours that are long out of the cache.
#ifndef EVALRT_DETAIL_MEMORY_HPP
#define EVALRT_DETAIL_MEMORY_HPP

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>

#if defined(__SANITIZE_ADDRESS__)
#define EVALRT_SYSTEM_MEMORY 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EVALRT_SYSTEM_MEMORY 1
#endif
#endif

namespace evalrt::detail {

/// With the address sanitizer all memory is the system's, so that nothing hides behind these.
#if defined(EVALRT_SYSTEM_MEMORY)
inline constexpr bool own_memory = false;
#undef EVALRT_SYSTEM_MEMORY
#else
inline constexpr bool own_memory = true;
#endif

/// Memory in few sizes, kept for the next request on its thread.
class SpareMemory {
public:
    static void* take(std::size_t size) {
        if (auto* const spare = list(size); spare && spare->first) {
            --spare->count;
            return std::exchange(spare->first, spare->first->next);
        }
        return ::operator new(rounded(size));
    }

    static void give(void* memory, std::size_t size) noexcept {
        auto* const spare = list(size);
        if (!spare || spare->count == most) return ::operator delete(memory);
        ++spare->count;
        spare->first = new (memory) Block{spare->first};
    }

private:
    static constexpr std::size_t step = 256, largest = 8 << 10, most = 256;

    struct Block {
        Block* next;
    };
    struct List {
        Block* first = nullptr;
        std::size_t count = 0;
    };
    struct Lists {
        std::array<List, largest / step> of;
        ~Lists() {
            ended() = true;
            for (auto& list : of)
                while (list.first) ::operator delete(std::exchange(list.first, list.first->next));
        }
    };
    // Objects that are static may outlive their thread's lists.
    static bool& ended() {
        thread_local bool it = false;
        return it;
    }

    static std::size_t rounded(std::size_t size) { return (size + step - 1) / step * step; }

    static List* list(std::size_t size) {
        if (!own_memory || size == 0 || size > largest || ended()) return nullptr;
        thread_local Lists lists;
        return &lists.of[(size - 1) / step];
    }
};

template <class T>
struct SpareAllocator {
    using value_type = T;
    SpareAllocator() = default;
    template <class U>
    SpareAllocator(const SpareAllocator<U>&) {}
    T* allocate(std::size_t n) { return static_cast<T*>(SpareMemory::take(n * sizeof(T))); }
    void deallocate(T* memory, std::size_t n) { SpareMemory::give(memory, n * sizeof(T)); }
    friend bool operator==(const SpareAllocator&, const SpareAllocator&) { return true; }
};

struct SpareDelete {
    template <class T>
    void operator()(T* object) const noexcept {
        object->~T();
        SpareMemory::give(object, sizeof(T));
    }
};

template <class T, class... Args>
std::unique_ptr<T, SpareDelete> make_spare(Args&&... args) {
    void* const memory = SpareMemory::take(sizeof(T));
    try {
        return std::unique_ptr<T, SpareDelete>(new (memory) T(std::forward<Args>(args)...));
    } catch (...) {
        SpareMemory::give(memory, sizeof(T));
        throw;
    }
}

/// Memory of one object on one thread, for any number of requests that wait: in slabs, which go
/// back to the system when nothing in them is taken any more. All must be given back before it
/// ends.
class Pool {
public:
    Pool() = default;
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;
    ~Pool() {
        for (auto& of : kinds_)
            while (of.first) drop(of, *of.first);
    }

    void* take(std::size_t size) {
        if (!fits(size)) return ::operator new(size);
        auto& of = kinds_[(size - 1) / step];
        Slab* const slab = of.first ? of.first : &add(of, (size + step - 1) / step * step);
        void* memory;
        if (slab->spare) {
            memory = std::exchange(slab->spare, slab->spare->next);
        } else {
            memory = reinterpret_cast<char*>(slab) + slab->fresh;
            slab->fresh += slab->block;
        }
        if (++slab->taken == slab->most) unlink(of, *slab);
        return memory;
    }

    void give(void* memory, std::size_t size) noexcept {
        if (!fits(size)) return ::operator delete(memory);
        auto& of = kinds_[(size - 1) / step];
        auto* const slab = reinterpret_cast<Slab*>(reinterpret_cast<std::uintptr_t>(memory) &
                                                   ~std::uintptr_t(aligned - 1));
        slab->spare = new (memory) Block{slab->spare};
        if (slab->taken-- == slab->most)
            link(of, *slab);
        else if (slab->taken == 0 && of.first->next) // one stays
            drop(of, *slab);
    }

    std::size_t slabs() const { return slabs_; }

private:
    static constexpr std::size_t step = 16, largest = 2048, aligned = 16 << 10;
    // The system's allocator keeps two words before each: without these bytes its next one fits
    // right behind, and needs no pages for what lies between.
    static constexpr std::size_t slab_size = aligned - 16;

    struct Block {
        Block* next;
    };
    struct alignas(64) Slab {
        Slab *before = nullptr, *next = nullptr; // of those with room
        Block* spare = nullptr;
        std::uint32_t fresh = sizeof(Slab); // never taken from here on
        std::uint32_t block = 0, taken = 0, most = 0;
    };
    struct Kind {
        Slab* first = nullptr; // with room
    };

    static bool fits(std::size_t size) { return own_memory && size > 0 && size <= largest; }

    Slab& add(Kind& of, std::size_t block) {
        void* memory = nullptr;
        if (::posix_memalign(&memory, aligned, slab_size) != 0) throw std::bad_alloc();
        auto& slab = *new (memory) Slab;
        slab.block = std::uint32_t(block);
        slab.most = std::uint32_t((slab_size - sizeof(Slab)) / block);
        link(of, slab);
        ++slabs_;
        return slab;
    }

    void drop(Kind& of, Slab& slab) {
        unlink(of, slab);
        --slabs_;
        std::free(&slab);
    }

    static void link(Kind& of, Slab& slab) {
        slab.before = nullptr;
        slab.next = of.first;
        if (of.first) of.first->before = &slab;
        of.first = &slab;
    }

    static void unlink(Kind& of, Slab& slab) {
        (slab.before ? slab.before->next : of.first) = slab.next;
        if (slab.next) slab.next->before = slab.before;
    }

    std::array<Kind, largest / step> kinds_;
    std::size_t slabs_ = 0;
};

/// For the nodes of containers; not for types that ask for more than the usual alignment.
template <class T>
class PoolAllocator {
public:
    using value_type = T;
    PoolAllocator(Pool& pool) : pool_(&pool) {}
    template <class U>
    PoolAllocator(const PoolAllocator<U>& other) : pool_(other.pool()) {}
    T* allocate(std::size_t n) {
        static_assert(alignof(T) <= alignof(std::max_align_t));
        return static_cast<T*>(pool_->take(n * sizeof(T)));
    }
    void deallocate(T* memory, std::size_t n) { pool_->give(memory, n * sizeof(T)); }
    Pool* pool() const { return pool_; }
    friend bool operator==(const PoolAllocator& a, const PoolAllocator& b) {
        return a.pool_ == b.pool_;
    }

private:
    Pool* pool_;
};

} // namespace evalrt::detail

#endif
