// ScriptedBackend: a Backend in memory; the test says when and how each request ends.
#ifndef EVALRT_TESTS_SCRIPTED_BACKEND_HPP
#define EVALRT_TESTS_SCRIPTED_BACKEND_HPP

#include "evalrt/backend.hpp"

#include <boost/asio/associated_cancellation_slot.hpp>
#include <boost/asio/post.hpp>

#include <map>

namespace evalrt::tests {

class ScriptedBackend final : public Backend {
public:
    struct Call {
        Request request;
        TextSink on_text;
        Handler handler;
    };

    explicit ScriptedBackend(asio::any_io_executor executor) : executor_(std::move(executor)) {}

    asio::any_io_executor get_executor() noexcept override { return executor_; }

    /// Called for each request; may call end() at once.
    std::function<void(int call)> on_call;

    /// The requests that wait for their end, in the order of their arrival.
    std::map<int, Call> pending;
    int calls = 0;     ///< so far
    int cancelled = 0; ///< so far
    std::size_t most_in_flight = 0;

    void text(int call, std::string_view piece) {
        auto& it = pending.at(call);
        if (it.on_text) it.on_text(piece);
    }

    void end(int call, Response response = {}) {
        auto node = pending.extract(call);
        auto handler = std::move(node.mapped().handler);
        if (auto slot = asio::get_associated_cancellation_slot(handler); slot.is_connected())
            slot.clear();
        auto code = response.outcome ? make_error_code(*response.outcome) : error_code();
        asio::post(executor_, [handler = std::move(handler), code,
                               response = std::move(response)]() mutable {
            std::move(handler)(code, std::move(response));
        });
    }

    void fail(int call, Errc errc, Stage stage = Stage::none) {
        Response response;
        response.outcome = errc;
        response.stage = stage;
        end(call, std::move(response));
    }

private:
    void start_complete(Request request, TextSink on_text, Handler handler) override {
        const int call = calls++;
        if (auto slot = asio::get_associated_cancellation_slot(handler); slot.is_connected())
            slot.assign([this, call](asio::cancellation_type) {
                if (!pending.count(call)) return;
                ++cancelled;
                fail(call, Errc::cancelled);
            });
        pending.emplace(call, Call{std::move(request), std::move(on_text), std::move(handler)});
        most_in_flight = std::max(most_in_flight, pending.size());
        if (on_call) on_call(call);
    }

    asio::any_io_executor executor_;
};

} // namespace evalrt::tests

#endif
