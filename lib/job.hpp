// Job: a coroutine that is resumed straight by the handlers of what it waits for. It belongs to one
// object on one executor, which asio::awaitable cannot know: that costs a frame and two dispatches
// more for each operation.
#ifndef EVALRT_LIB_JOB_HPP
#define EVALRT_LIB_JOB_HPP

#include "evalrt/detail/memory.hpp"

#include <coroutine>
#include <cstddef>
#include <exception>
#include <optional>
#include <tuple>
#include <utility>

namespace evalrt::detail {

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
        using allocator_type = SpareAllocator<void>;
        allocator_type get_allocator() const noexcept { return {}; }

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
