// ServerProcess: a model server that we start, watch and stop.
#ifndef EVALRT_SERVER_PROCESS_HPP
#define EVALRT_SERVER_PROCESS_HPP

#include "evalrt/backend.hpp"

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace evalrt {

struct ServerCommand {
    std::vector<std::string> argv; ///< argv[0] is looked up on PATH; "{port}" is replaced
    std::vector<std::pair<std::string, std::string>> env; ///< added to ours, for the server alone
    std::uint16_t port = 0;                               ///< 0: any free one
    std::chrono::milliseconds startup_timeout{std::chrono::minutes(5)};
    std::chrono::milliseconds stop_grace{std::chrono::seconds(5)}; ///< SIGTERM to SIGKILL
    std::size_t keep_output = 64 * 1024; ///< the last bytes of its output, for error texts
};

/// Owns a child process in a process group of its own. The group is killed on every way out:
/// stop, destruction, and also when this process itself is killed.
///
/// Threads    belongs to its executor.
class ServerProcess {
public:
    using Signature = void(error_code, std::string);
    using Handler = asio::any_completion_handler<Signature>;

    ServerProcess(asio::any_io_executor executor, ServerCommand command, LogSink log = {});
    ~ServerProcess(); ///< kills what still runs; does not block longer than that takes

    /// Starts the server and drains its output from then on.
    ///
    /// Completes  when the program runs: the port is known, nothing is loaded yet.
    /// Errors     exited (cannot be executed), unreachable (the port is in use); the string says
    ///            what is wrong and what to do.
    /// Cancel     any type; what was started is killed.
    /// Lifetime   *this must outlive the operation.
    template <asio::completion_token_for<Signature> Token = asio::deferred_t>
    auto async_start(Token&& token = Token()) {
        return asio::async_initiate<Token, Signature>(
            [this](Handler handler) { start(std::move(handler)); }, token);
    }

    /// Waits until the server answers: asks `probe` (a Backend that talks to this server) for one
    /// token until it succeeds, and checks that the listener on the port is ours.
    ///
    /// Completes  at the first answer.
    /// Errors     exited (with the last lines of its output), timed_out, unreachable (a stranger
    ///            on the port), rejected and auth (it answers, but not to this request).
    /// Cancel     any type.
    /// Lifetime   *this and probe must outlive the operation.
    template <asio::completion_token_for<Signature> Token = asio::deferred_t>
    auto async_wait_ready(Backend& probe, Request one_token, Token&& token = Token()) {
        return asio::async_initiate<Token, Signature>(
            [this, &probe](Handler handler, Request one_token) {
                wait_ready(probe, std::move(one_token), std::move(handler));
            },
            token, std::move(one_token));
    }

    /// SIGTERM to the group, SIGKILL after the grace, and waits for the end.
    ///
    /// Completes  when no process of the group is left; at once if none was started.
    template <asio::completion_token_for<void(error_code)> Token = asio::deferred_t>
    auto async_stop(Token&& token = Token()) {
        return asio::async_initiate<Token, void(error_code)>(
            [this](asio::any_completion_handler<void(error_code)> handler) {
                stop(std::move(handler));
            },
            token);
    }

    /// Completes when the server ends by itself or is stopped; at once if it does not run. The
    /// string says how it ended ("exit status 3", "killed by signal 9").
    template <asio::completion_token_for<Signature> Token = asio::deferred_t>
    auto async_wait_exit(Token&& token = Token()) {
        return asio::async_initiate<Token, Signature>(
            [this](Handler handler) { wait_exit(std::move(handler)); }, token);
    }

    bool running() const;
    std::uint16_t port() const;
    int pid() const;                 ///< of the server, which leads its group; 0: not started
    std::string last_output() const; ///< the end of what it wrote to stdout and stderr

private:
    struct Impl;
    void start(Handler handler);
    void wait_ready(Backend& probe, Request one_token, Handler handler);
    void wait_exit(Handler handler);
    void stop(asio::any_completion_handler<void(error_code)> handler);

    std::shared_ptr<Impl> impl_; // shared with pending operations
};

} // namespace evalrt

#endif
