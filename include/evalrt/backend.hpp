// Backend: everything that can answer a request.
#ifndef EVALRT_BACKEND_HPP
#define EVALRT_BACKEND_HPP

#include "evalrt/request.hpp"

#include <boost/asio/any_completion_handler.hpp>
#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/async_result.hpp>
#include <boost/asio/deferred.hpp>

#include <functional>

namespace evalrt {

/// Receives generated text. An empty piece means that the server has begun to answer with
/// something else than text (a tool call, reasoning).
using TextSink = std::function<void(std::string_view)>;

/// Receives one line at a time, without its end.
using LogSink = std::function<void(std::string_view)>;

/// A model server, a queue in front of one, a journal, a test double.
///
/// Threads    an object belongs to one executor and is used from there only.
class Backend {
public:
    using Signature = void(error_code, Response);
    using Handler = asio::any_completion_handler<Signature>;

    Backend() = default;
    Backend(const Backend&) = delete;
    Backend& operator=(const Backend&) = delete;
    virtual ~Backend() = default;

    virtual asio::any_io_executor get_executor() noexcept = 0;

    /// Runs one request to its end.
    ///
    /// Completes  exactly once: when the whole answer has arrived, or at the first error that is
    ///            final. The Response is filled in as far as known in both cases.
    /// Text       reaches on_text piece by piece as it arrives, on get_executor().
    /// Errors     Errc, one value for each class; operation_aborted when cancelled.
    /// Cancel     any type; the handler still runs.
    /// Lifetime   *this must outlive the operation; arguments are taken by value.
    template <asio::completion_token_for<Signature> Token = asio::deferred_t>
    auto async_complete(Request request, TextSink on_text = {}, Token&& token = Token()) {
        return asio::async_initiate<Token, Signature>(
            [this](Handler handler, Request moved, TextSink sink) {
                start_complete(std::move(moved), std::move(sink), std::move(handler));
            },
            token, std::move(request), std::move(on_text));
    }

private:
    virtual void start_complete(Request request, TextSink on_text, Handler handler) = 0;
};

} // namespace evalrt

#endif
