// How every operation of this library ends.
#ifndef EVALRT_DETAIL_COMPLETE_HPP
#define EVALRT_DETAIL_COMPLETE_HPP

#include "evalrt/detail/memory.hpp"
#include "evalrt/error.hpp"

#include <boost/asio/any_completion_executor.hpp>
#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/associated_cancellation_slot.hpp>
#include <boost/asio/associated_executor.hpp>
#include <boost/asio/bind_executor.hpp>
#include <boost/asio/post.hpp>

#include <tuple>
#include <type_traits>
#include <utility>

namespace evalrt::detail {

/// Runs `handler` on its own executor, never before this returns. The slot is cleared first: it
/// outlives the operation, and a late signal must not reach what is gone.
template <class Handler, class... Args>
void complete(const asio::any_io_executor& executor, Handler handler, Args&&... args) {
    if (auto slot = asio::get_associated_cancellation_slot(handler); slot.is_connected())
        slot.clear();
    const auto target = asio::get_associated_executor(handler, executor);
    // On its way it is moved many times: as one pointer.
    using Call = std::pair<Handler, std::tuple<std::decay_t<Args>...>>;
    auto call =
        make_spare<Call>(std::piecewise_construct, std::forward_as_tuple(std::move(handler)),
                         std::forward_as_tuple(std::forward<Args>(args)...));
    auto run = [call = std::move(call)]() mutable {
        const auto last = std::move(call);
        std::apply(std::move(last->first), std::move(last->second));
    };
    // Most often it is the same one, and then bound to it once is enough.
    if (target == decltype(target)(executor))
        asio::post(executor, std::move(run));
    else
        asio::post(executor, asio::bind_executor(target, std::move(run)));
}

/// An executor as its owner's completions need it.
struct Home {
    explicit Home(asio::any_io_executor of) : executor(of), completions(std::move(of)) {}
    asio::any_io_executor executor;
    asio::any_completion_executor completions; // the same, converted once
};

/// The same in a turn of the executor's own, with nobody on the stack who does not expect a handler
/// to run: where the handler has the same executor, at once. What `handler` throws comes out.
template <class Handler, class... Args>
void complete_now(const Home& home, Handler handler, Args&&... args) {
    if (asio::get_associated_executor(handler, home.completions) != home.completions)
        return complete(home.executor, std::move(handler), std::forward<Args>(args)...);
    if (auto slot = asio::get_associated_cancellation_slot(handler); slot.is_connected())
        slot.clear();
    std::move(handler)(std::forward<Args>(args)...);
}

/// Calls `cancel` when the operation behind `handler` is cancelled, whatever the type.
template <class Handler, class F>
void on_cancel(Handler& handler, F cancel) {
    if (auto slot = asio::get_associated_cancellation_slot(handler); slot.is_connected())
        slot.assign([cancel = std::move(cancel)](asio::cancellation_type type) {
            if (type != asio::cancellation_type::none) cancel();
        });
}

} // namespace evalrt::detail

#endif
