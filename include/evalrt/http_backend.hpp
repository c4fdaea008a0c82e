// HttpBackend: a Backend that asks a model server over HTTP/1.1.
#ifndef EVALRT_HTTP_BACKEND_HPP
#define EVALRT_HTTP_BACKEND_HPP

#include "evalrt/backend.hpp"
#include "evalrt/backend_row.hpp"
#include "evalrt/detail/exchange_clock.hpp"

#include <memory>
#include <string>

namespace evalrt {

using TimeLimits = detail::TimeLimits;

struct HttpOptions {
    std::string url;             ///< "http://127.0.0.1:8080/v1", or with https
    std::string api_key;         ///< as the row's wire wants it, never logged
    std::string ca_file;         ///< PEM; empty: the system's certificates
    std::string model;           ///< for a body's "model"
    bool override_model = false; ///< also where the body has one
    unsigned max_context = 0;    ///< tokens that the server was told to take; 0: not known
    unsigned max_tokens = 4096;  ///< for a chat body without, where Anthropic's API wants a number
    TimeLimits limits;
    std::size_t header_limit = 64 << 10;       ///< bytes, all headers of an answer
    std::size_t event_limit = 8 << 20;         ///< bytes, one event of a stream
    std::size_t body_limit = 64 << 20;         ///< bytes, one answer
    unsigned idle_connections = 64;            ///< kept open, where the row says keep-alive
    std::chrono::milliseconds idle_time{4000}; ///< shorter than servers' own limit (5 s and up)
    /// What the body of a complete answer has to end, while nobody waits for it; else its
    /// connection is not kept.
    std::chrono::milliseconds drain_time{100};
};

/// One exchange a request: no queue, no retry, but for a kept connection that turns out to be
/// closed. The text comes as a stream where the row says that the server's streams are complete,
/// and the Response's body is one whole answer all the same. A request without a body is a GET, and
/// the Response's body is then what came, unread, as it is of a plain request, also where its
/// status is a failure. Where a server gives one choice whatever "n" says, a request for more is
/// made so many times, one after another. Redirections are not followed.
///
/// Errors     see Errc; Response::detail has the server's own words.
/// Throws     std::invalid_argument from the constructor: a URL, key or file that cannot be used.
class HttpBackend final : public Backend {
public:
    HttpBackend(asio::any_io_executor executor, BackendRow row, HttpOptions options,
                LogSink log = {});
    ~HttpBackend() override;

    asio::any_io_executor get_executor() noexcept override;

    /// Connections open at this moment, idle ones included.
    std::size_t connections() const;

private:
    struct Impl;
    void start_complete(Request request, TextSink on_text, Handler handler) override;
    std::shared_ptr<Impl> impl_; // shared with running exchanges
};

/// A server's address, split.
struct Url {
    bool tls = false;
    std::string host;
    std::string port;
    std::string base; ///< path before the endpoint's: "" or "/v1", without a slash at its end
};

/// Throws std::invalid_argument that says what is wrong.
Url parse_url(std::string_view url);

} // namespace evalrt

#endif
