// Job: a coroutine that is resumed straight by the handlers of what it waits for. It belongs to one
// object on one executor, which asio::awaitable cannot know: that costs a frame and two dispatches
// more for each operation.
#ifndef EVALRT_LIB_JOB_HPP
#define EVALRT_LIB_JOB_HPP

#include <array>
#include <coroutine>
#include <cstddef>
#include <exception>
#include <new>
#include <optional>
#include <tuple>
#include <utility>

namespace evalrt::detail {

/// Memory that comes and goes with each request, in few sizes, kept for the next one on its thread.
/// With the address sanitizer it is the system's, so that nothing hides behind it.
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

    static List* list([[maybe_unused]] std::size_t size) {
#if defined(__SANITIZE_ADDRESS__)
        return nullptr;
#else
        if (size == 0 || size > largest || ended()) return nullptr;
        thread_local Lists lists;
        return &lists.of[(size - 1) / step];
#endif
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

template <class T>
class Job;

struct JobPromise {
    struct Final {
        bool await_ready() noexcept { return false; }
        template <class Promise>
        std::coroutine_handle<> await_suspend(std::coroutine_handle<Promise> ended) noexcept {
            const auto waits = ended.promise().then;
            return waits ? waits : std::noop_coroutine();
        }
        void await_resume() noexcept {}
    };

    static void* operator new(std::size_t size) { return SpareMemory::take(size); }
    static void operator delete(void* frame, std::size_t size) { SpareMemory::give(frame, size); }
    std::suspend_always initial_suspend() noexcept { return {}; }
    Final final_suspend() noexcept { return {}; }
    void unhandled_exception() {
        if (!then) throw; // out of whatever resumed it
        error = std::current_exception();
    }

    std::coroutine_handle<> then; // who waits for it
    std::exception_ptr error;
};

/// Begins when it is awaited, or with start(). Destroying it destroys its frame, wherever it is.
template <class T = void>
class [[nodiscard]] Job {
public:
    struct promise_type : JobPromise {
        Job get_return_object() {
            return Job(std::coroutine_handle<promise_type>::from_promise(*this));
        }
        void return_value(T value_) { value.emplace(std::move(value_)); }
        std::optional<T> value;
    };

    Job(Job&& other) noexcept : frame_(std::exchange(other.frame_, nullptr)) {}
    Job& operator=(Job&&) = delete;
    ~Job() {
        if (frame_) frame_.destroy();
    }

    bool await_ready() const noexcept { return false; }
    std::coroutine_handle<> await_suspend(std::coroutine_handle<> waiting) noexcept {
        frame_.promise().then = waiting;
        return frame_;
    }
    T await_resume() {
        if (frame_.promise().error) std::rethrow_exception(frame_.promise().error);
        return std::move(*frame_.promise().value);
    }

private:
    explicit Job(std::coroutine_handle<promise_type> frame) : frame_(frame) {}
    std::coroutine_handle<promise_type> frame_;
};

template <>
class [[nodiscard]] Job<void> {
public:
    struct promise_type : JobPromise {
        Job get_return_object() {
            return Job(std::coroutine_handle<promise_type>::from_promise(*this));
        }
        void return_void() {}
    };

    Job(Job&& other) noexcept : frame_(std::exchange(other.frame_, nullptr)) {}
    Job& operator=(Job&&) = delete;
    ~Job() {
        if (frame_) frame_.destroy();
    }

    void start() { frame_.resume(); }

    bool await_ready() const noexcept { return false; }
    std::coroutine_handle<> await_suspend(std::coroutine_handle<> waiting) noexcept {
        frame_.promise().then = waiting;
        return frame_;
    }
    void await_resume() {
        if (frame_.promise().error) std::rethrow_exception(frame_.promise().error);
    }

private:
    explicit Job(std::coroutine_handle<promise_type> frame) : frame_(frame) {}
    std::coroutine_handle<promise_type> frame_;
};

/// An operation of Asio's: start(handler) starts it, and its results are what co_await gives. The
/// handler holds `owner`, whose coroutine waits: should the operation be dropped without an end, it
/// is the owner's destructor that destroys the coroutine.
template <class Owner, class Start, class... Results>
class JobOperation {
public:
    JobOperation(Owner owner, Start start) : owner_(std::move(owner)), start_(std::move(start)) {}

    struct Handler {
        Owner owner;
        std::coroutine_handle<> waiting;
        std::tuple<Results...>* results;
        void operator()(Results... values) {
            *results = {std::move(values)...};
            const auto alive = std::move(owner); // until the coroutine waits again, or has ended
            waiting.resume();
        }
    };

    bool await_ready() const noexcept { return false; }
    void await_suspend(std::coroutine_handle<> waiting) {
        start_(Handler{std::move(owner_), waiting, &results_});
    }
    std::tuple<Results...> await_resume() { return std::move(results_); }

private:
    Owner owner_;
    Start start_;
    std::tuple<Results...> results_;
};

template <class... Results, class Owner, class Start>
auto operation(Owner owner, Start start) {
    return JobOperation<Owner, Start, Results...>(std::move(owner), std::move(start));
}

} // namespace evalrt::detail

#endif
