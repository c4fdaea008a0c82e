// Gateway: an HTTP server in front of a Backend, for clients that speak to OpenAI or Anthropic.
#ifndef EVALRT_GATEWAY_HPP
#define EVALRT_GATEWAY_HPP

#include "evalrt/backend.hpp"

#include <array>
#include <memory>
#include <string>

namespace evalrt {

struct GatewayOptions {
    std::string host = "127.0.0.1"; ///< an address, or localhost; if no loopback one, with a token
    std::uint16_t port = 0;         ///< 0: any free one
    std::string token;              ///< clients must send it (Bearer, or x-api-key); empty: none
    std::string model;              ///< what /v1/models names
    /// Asked past the Backend for what is no question to a model, such as /tokenize: whatever has
    /// no other place here. Null: all that is not there.
    Backend* server = nullptr;
    bool server_models = false;          ///< /v1/models is the server's list, where it gives one
    std::function<unsigned()> in_flight; ///< at the server, for /metrics
    std::function<void(const Response&)> on_answer; ///< each request that has ended
    LogSink log;

    /// One more takes the place of the one that has been idle longest, or waits to be accepted.
    unsigned connections = 1024;
    std::size_t header_limit = 64 << 10; ///< bytes, all headers of a request
    std::size_t field_limit = 100;       ///< headers of a request
    std::size_t body_limit = 64 << 20;   ///< bytes, of a request
    std::size_t unread_limit = 64 << 10; ///< bytes of a stream's text that wait for its client
    std::chrono::milliseconds header_time{10'000}; ///< for all headers to come
    std::chrono::milliseconds body_time{30'000};   ///< without a byte of the body
    std::size_t body_rate = 4 << 10;               ///< bytes a second, of a body that takes longer
    std::chrono::milliseconds idle_time{75'000};   ///< between two requests of a connection
    std::chrono::milliseconds write_time{60'000};  ///< for a client to take what is written
    std::chrono::milliseconds linger{700};         ///< a request whose client has gone
    /// The same, of a client that had said how long it waits (x-stainless-read-timeout) and has
    /// waited so long: it will ask again.
    std::chrono::milliseconds retry_linger{10'000};
};

struct GatewayStats {
    unsigned connections = 0;   ///< open
    unsigned open = 0;          ///< requests that have not ended
    std::uint64_t requests = 0; ///< to the model
    std::uint64_t answered = 0;
    std::array<std::uint64_t, all_errc.size()> failed{}; ///< by class, in the order of all_errc
    std::uint64_t joined = 0;    ///< came again while the same request ran, and got its answer
    std::uint64_t continued = 0; ///< went on with the conversation of an earlier one
    std::uint64_t refused = 0;   ///< never became a request to the model
    std::int64_t prompt_tokens = 0, cached_tokens = 0, completion_tokens = 0; ///< as far as told
};

/// Serves, with and without /v1 before them: POST chat/completions, completions and messages
/// (Anthropic), GET models; and GET /health and /metrics (Prometheus). Any other path goes to the
/// server as it is, with method, query and body, and its answer comes back with its status. Whether
/// a client wants a stream and whether the server gives one are independent. Errors come in the
/// words of the client's wire, with x-should-retry: false: what could be tried again has been.
///
/// Streams    text goes out as it comes, the rest (tool calls, reasoning, log probabilities) with
///            the end. A client that does not read holds its answer back (see TextFlow), until
///            write_time ends its connection.
/// Gone       a client that closes its connection cancels its request after GatewayOptions::linger.
///            The same body that comes meanwhile takes the request over, as does, at any time, the
///            same body with the same Idempotency-Key; two requests that run are two otherwise.
///            One that only ends its sending (a half-close) looks the same until something is
///            written: before its answer it gets a "100 Continue" at once and at growing intervals,
///            the second of which fails where nobody reads. HTTP/1.0 has none, and it is gone.
/// Turns      a request whose messages are those of an earlier one, the assistant's answer and
///            more goes on with its conversation; long ones (16 KB) are told to the Backend as a
///            session (Request::session), so that it need not begin more of them than its server's
///            cache holds. Of each Request::client, who is told apart by address, key, User-Agent
///            and the header x-evalrt-client, some requests go before another one's.
/// Security   one Host header that names this server, Origin absent or this server's; a token if
///            set. POST takes application/json alone. No CORS headers.
/// Threads    belongs to its executor, as the Backend does.
/// Lifetime   the Backend and the server must outlive the operations that this has begun on them:
///            see async_close().
/// Throws     std::invalid_argument from the constructor: an address that is none, or may not be
///            listened at without a token.
class Gateway {
public:
    Gateway(asio::any_io_executor executor, Backend& backend, GatewayOptions options);
    ~Gateway(); ///< as async_close(), which it does not wait for

    /// Listens. Errors are the system's; the text says what is wrong.
    Failure open();

    std::uint16_t port() const; ///< once open
    std::string url() const;    ///< "http://127.0.0.1:PORT", without /v1

    GatewayStats stats() const;

    /// Closes all connections and cancels their requests.
    ///
    /// Completes  when none is left.
    template <asio::completion_token_for<void(error_code)> Token = asio::deferred_t>
    auto async_close(Token&& token = Token()) {
        return asio::async_initiate<Token, void(error_code)>(
            [this](asio::any_completion_handler<void(error_code)> handler) {
                close(std::move(handler));
            },
            token);
    }

private:
    struct Impl;
    void close(asio::any_completion_handler<void(error_code)> handler);
    std::shared_ptr<Impl> impl_; // shared with connections and requests
};

} // namespace evalrt

#endif
