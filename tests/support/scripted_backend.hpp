// ScriptedBackend: a Backend in memory; the test says when and how each request ends.
#ifndef EVALRT_TESTS_SCRIPTED_BACKEND_HPP
#define EVALRT_TESTS_SCRIPTED_BACKEND_HPP

#include "evalrt/backend.hpp"
#include "evalrt/detail/complete.hpp"

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
        const auto on_text = pending.at(call).on_text; // which may end the call
        if (on_text) on_text(piece);
    }

    void end(int call, Response response = {}) {
        auto handler = std::move(pending.at(call).handler);
        pending.erase(call);
        const auto code = response.outcome ? make_error_code(*response.outcome) : error_code();
        detail::complete(executor_, std::move(handler), code, std::move(response));
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
        detail::on_cancel(handler, [this, call] {
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
