// Runtime: the whole stack behind one name: server, connections, scheduler.
#ifndef EVALRT_RUNTIME_HPP
#define EVALRT_RUNTIME_HPP

#include "evalrt/detail/watchdog.hpp"
#include "evalrt/http_backend.hpp"
#include "evalrt/journal.hpp"
#include "evalrt/request_scheduler.hpp"
#include "evalrt/server_process.hpp"

namespace evalrt {

enum class Order { planned, fifo };

struct RuntimeOptions {
    std::string backend = "tinygpt";      ///< a row's name
    std::optional<BackendRow> row;        ///< instead: a row of your own
    std::optional<Wire> wire;             ///< what it speaks, if not what the row says
    std::string url;                      ///< use this running server, start none
    std::vector<std::string> replicas;    ///< more running servers, like the one at url
    std::string model;                    ///< path or name, as the backend names models
    bool override_model = false;          ///< a body's own "model" gives way to it
    std::string executable;               ///< program to start; empty: the row's, on PATH
    std::vector<std::string> server_args; ///< more arguments for it
    std::uint16_t port = 0;               ///< 0: any free one
    unsigned max_context = 4096;          ///< tokens; only where the server can be told
    unsigned max_in_flight = 0;           ///< 0: the row's, or what the server at url tells
    bool probe = true;                    ///< ask a server at url who it is: a few GETs
    std::string probe_folder;             ///< where store_probe() keeps what async_probe() measured
    bool ask_first = true; ///< have it name its models and answer one token, before it is open
    Order order = Order::planned;
    std::chrono::milliseconds startup_timeout{std::chrono::minutes(5)}; ///< to its first token
    TimeLimits limits;
    RetryOptions retry;
    StopOptions stop;         ///< when the rest of a run is not worth asking for; default: never
    unsigned restarts = 5;    ///< of a server of ours that ends or hangs, without an answer between
    WatchdogOptions watchdog; ///< for a server of ours
    JournalOptions journal;   ///< with a path: what is answered is kept there
    /// Asked once the journal is open and before a server is: whether it answers all that will
    /// come. Then no server is started, and none is asked.
    std::function<bool(const Journal&)> enough;
    unsigned max_tokens = 4096; ///< for a chat body without, where Anthropic's API wants a number
    std::string api_key;
    std::string ca_file;
    LogSink log;        ///< what the user should read, a line at a time
    LogSink server_log; ///< what the server writes
    LogSink explain;    ///< one line of JSON for each request that is sent: why this one, why now
};

/// Owns the server process (if it started one), the connections and the scheduler. A server of ours
/// that ends, or hangs, is started again; what it was answering is asked again.
///
/// Threads    belongs to its executor.
/// Throws     std::invalid_argument from the constructor: what is wrong and what to do.
class Runtime {
public:
    using Signature = void(error_code, std::string);
    using Handler = asio::any_completion_handler<Signature>;

    Runtime(asio::any_io_executor executor, RuntimeOptions options);
    ~Runtime(); ///< kills the server if it still runs

    /// Starts the server or finds the running one, and has it answer one token. A row that takes
    /// any server (no command, as openai-url) is completed by what is recognised behind the URL.
    ///
    /// Completes  when it has answered. A server at url that turns us away for its load is asked
    ///            again, as RetryOptions say; one that refuses this one request (400, 422) is
    ///            there.
    /// Errors     exited, unreachable, timed_out, rejected, auth, and invalid_argument for a key
    ///            or certificate file that cannot be used; JournalErrc; the string says what is
    ///            wrong and what to do. Nothing is left running.
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

    Backend& front();               ///< what to ask, once open: the journal, if any
    Journal* journal();             ///< null: none
    RequestScheduler& backend();    ///< once open; past the journal
    HttpBackend& server();          ///< once open; past the queue
    const BackendRow& row() const;  ///< once open: completed
    const std::string& url() const; ///< for any client of its wire
    /// That a server was seen to answer one request at a time, and what may be why; else empty.
    std::string one_by_one() const;
    const std::string& server_version() const; ///< as it tells when it is recognised; or empty
    const std::string& model() const; ///< for a request's "model"; may be empty: the body's own
    /// What came of each server, if there are several.
    struct Replica {
        std::string url;
        std::uint64_t answered = 0, failed = 0, cancelled = 0; ///< attempts
        std::uint64_t refused = 0;    ///< requests that another one has answered then
        std::uint64_t taken_over = 0; ///< requests that were planned for another one
        bool up = true;
        std::string why{}; ///< not up: what is wrong with it; empty: it cannot be reached
    };
    std::vector<Replica> replicas() const;
    bool running() const;      ///< false while a server of ours has ended
    unsigned restarts() const; ///< so far
    /// The end of what a server of ours wrote (64 KB) before it ended or hung the last time.
    const std::string& server_output() const;

private:
    struct Impl;
    void open(Handler handler);
    void close(asio::any_completion_handler<void(error_code)> handler);
    std::shared_ptr<Impl> impl_;
};

/// What answers at a URL.
struct ServerKind {
    BackendRow row;               ///< completed by what was recognised
    std::string profile;          ///< the row or profile that it is; empty: not recognised
    std::string reason;           ///< in words; after an error what is wrong
    std::string version;          ///< empty: it does not tell
    std::string in_flight_reason; ///< what told the row's in_flight; empty: the profile
};

namespace detail {
void start_recognising(asio::any_io_executor executor, BackendRow row, HttpOptions options,
                       asio::any_completion_handler<void(error_code, ServerKind)> handler);
}

/// Asks the server at options.url who it is: some GETs one after the other, three seconds at most
/// for one, and no further one when one of them took that long. Hosted services, known by their
/// host names, are not asked.
///
/// Completes  when it is recognised, or all has been asked in vain (which is no error).
/// Errors     unreachable; invalid_argument for a URL, key or file that cannot be used.
/// Cancel     any type.
template <asio::completion_token_for<void(error_code, ServerKind)> Token = asio::deferred_t>
auto async_recognise(asio::any_io_executor executor, BackendRow row, HttpOptions options,
                     Token&& token = Token()) {
    return asio::async_initiate<Token, void(error_code, ServerKind)>(
        [](asio::any_completion_handler<void(error_code, ServerKind)> handler,
           asio::any_io_executor on, BackendRow of, HttpOptions with) {
            detail::start_recognising(std::move(on), std::move(of), std::move(with),
                                      std::move(handler));
        },
        token, std::move(executor), std::move(row), std::move(options));
}

} // namespace evalrt

#endif
