// Runtime: the whole stack behind one name: server, connections, scheduler.
#ifndef EVALRT_RUNTIME_HPP
#define EVALRT_RUNTIME_HPP

#include "evalrt/http_backend.hpp"
#include "evalrt/request_scheduler.hpp"
#include "evalrt/server_process.hpp"

namespace evalrt {

enum class Order { planned, fifo };

struct RuntimeOptions {
    std::string backend = "tinygpt";      ///< a row's name
    std::optional<BackendRow> row;        ///< instead: a row of your own
    std::string url;                      ///< use this running server, start none
    std::string model;                    ///< path or name, as the backend names models
    bool override_model = false;          ///< a body's own "model" gives way to it
    std::string executable;               ///< program to start; empty: the row's, on PATH
    std::vector<std::string> server_args; ///< more arguments for it
    std::uint16_t port = 0;               ///< 0: any free one
    unsigned max_context = 4096;          ///< tokens; only where the server can be told
    unsigned max_in_flight = 0;           ///< 0: the row's
    Order order = Order::planned;
    std::chrono::milliseconds startup_timeout{std::chrono::minutes(5)};
    TimeLimits limits;
    RetryOptions retry;
    std::string api_key;
    std::string ca_file;
    LogSink log;        ///< what the user should read, a line at a time
    LogSink server_log; ///< what the server writes
};

/// Owns the server process (if it started one), the connections and the scheduler.
///
/// Threads    belongs to its executor.
/// Throws     std::invalid_argument from the constructor: what is wrong and what to do.
class Runtime {
public:
    using Signature = void(error_code, std::string);
    using Handler = asio::any_completion_handler<Signature>;

    Runtime(asio::any_io_executor executor, RuntimeOptions options);
    ~Runtime(); ///< kills the server if it still runs

    /// Starts the server or finds the running one, and has it answer one token.
    ///
    /// Completes  when it has answered.
    /// Errors     exited, unreachable, timed_out, rejected, auth, and invalid_argument for a key
    ///            or certificate file that cannot be used; the string says what is wrong and what
    ///            to do. Nothing is left running.
    /// Cancel     any type.
    /// Lifetime   *this must outlive the operation.
    template <asio::completion_token_for<Signature> Token = asio::deferred_t>
    auto async_open(Token&& token = Token()) {
        return asio::async_initiate<Token, Signature>(
            [this](Handler handler) { open(std::move(handler)); }, token);
    }

    /// Stops the server that was started. Requests that still wait end as cancelled.
    template <asio::completion_token_for<void(error_code)> Token = asio::deferred_t>
    auto async_close(Token&& token = Token()) {
        return asio::async_initiate<Token, void(error_code)>(
            [this](asio::any_completion_handler<void(error_code)> handler) {
                close(std::move(handler));
            },
            token);
    }

    RequestScheduler& backend(); ///< once open
    const BackendRow& row() const;
    const std::string& url() const;   ///< for any OpenAI client
    const std::string& model() const; ///< for a request's "model"; may be empty: the body's own
    bool running() const;             ///< false once a server of ours has ended

private:
    struct Impl;
    void open(Handler handler);
    void close(asio::any_completion_handler<void(error_code)> handler);
    std::shared_ptr<Impl> impl_;
};

} // namespace evalrt

#endif
