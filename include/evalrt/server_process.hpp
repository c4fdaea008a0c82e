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
    std::chrono::milliseconds startup_timeout{std::chrono::minutes(5)}; ///< of async_wait_ready
    std::chrono::milliseconds stop_grace{std::chrono::seconds(5)};      ///< SIGTERM to SIGKILL
    std::string folder; ///< removed after the server if this process is killed; empty: none
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

    /// Throws std::invalid_argument if there is no argv[0].
    ServerProcess(asio::any_io_executor executor, ServerCommand command, LogSink log = {});
    ServerProcess(const ServerProcess&) = delete;
    ServerProcess& operator=(const ServerProcess&) = delete;

    /// Kills what still runs, which does not take longer than that; pending operations are aborted.
    ~ServerProcess();

    /// Starts the server, also again after it has ended, and drains its output from then on.
    ///
    /// Completes  when the program runs: the port is known, nothing is loaded yet.
    /// Errors     exited (cannot be executed), unreachable (the port is in use), already_started;
    ///            the string says what is wrong and what to do.
    /// Cancel     any type; what was started is killed.
    /// Lifetime   *this must outlive the operation.
    template <asio::completion_token_for<Signature> Token = asio::deferred_t>
    auto async_start(Token&& token = Token()) {
        return asio::async_initiate<Token, Signature>(
            [this](Handler handler) { start(std::move(handler)); }, token);
    }

    /// Waits until the server answers: asks `probe` (a Backend that talks to this server) for one
    /// token until it succeeds, and checks that the listener on the port is in its process group.
    ///
    /// Completes  at the first answer; after an error or cancellation when the probe has ended.
    /// Errors     exited (with the last lines of its output), timed_out, unreachable (another
    ///            program has the port), rejected (a 4xx again and again) and auth.
    /// Cancel     any type.
    /// Lifetime   *this and probe must outlive the operation.
    template <asio::completion_token_for<Signature> Token = asio::deferred_t>
    auto async_wait_ready(Backend& probe, Request one_token, Token&& token = Token()) {
        return asio::async_initiate<Token, Signature>(
            [this, &probe](Handler handler, Request request) {
                wait_ready(probe, std::move(request), std::move(handler));
            },
            token, std::move(one_token));
    }

    /// SIGTERM to the group, SIGKILL after the grace, and waits for the end.
    ///
    /// Completes  when no process of the group is left; at once if none was started.
    /// Cancel     any type; the server is stopped all the same.
    /// Lifetime   *this must outlive the operation.
    template <asio::completion_token_for<void(error_code)> Token = asio::deferred_t>
    auto async_stop(Token&& token = Token()) {
        return asio::async_initiate<Token, void(error_code)>(
            [this](asio::any_completion_handler<void(error_code)> handler) {
                stop(std::move(handler));
            },
            token);
    }

    /// Waits for the end of the server, after which no process of its group is left.
    ///
    /// Completes  when it has ended by itself or was stopped; at once if it does not run. The
    ///            string says how it ended ("exit status 3", "killed by signal 9").
    /// Cancel     any type; the server runs on.
    /// Lifetime   *this must outlive the operation.
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
