// FakeServer: a peer on loopback that plays a script for each connection.
#ifndef EVALRT_TESTS_FAKE_SERVER_HPP
#define EVALRT_TESTS_FAKE_SERVER_HPP

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace evalrt::tests {

/// One thing that a connection does. The end of the script closes it.
struct Step {
    enum class Kind {
        expect,
        reply,
        pause,
        gate,
        barrier,
        hang,
        half_close,
        reset,
        cut,
        again,
        over
    };
    Kind kind;
    std::string bytes = {};            // reply
    std::size_t piece = 0;             // reply: bytes of one write; 0: all
    std::chrono::milliseconds time{0}; // pause; reply: between two writes
    unsigned count = 0;                // barrier, over
};
using Script = std::vector<Step>;

/// Reads one request, which requests() then shows.
inline Step expect() { return {Step::Kind::expect}; }
inline Step reply(std::string bytes) { return {Step::Kind::reply, std::move(bytes)}; }
inline Step slowly(std::string bytes, std::size_t piece, std::chrono::milliseconds gap = {}) {
    return {Step::Kind::reply, std::move(bytes), piece, gap};
}
inline Step pause(std::chrono::milliseconds time) { return {Step::Kind::pause, {}, 0, time}; }
/// Waits for one call of FakeServer::go(), reading nothing.
inline Step gate() { return {Step::Kind::gate}; }
/// Waits until so many connections have come to a barrier.
inline Step barrier(unsigned count) { return {Step::Kind::barrier, {}, 0, {}, count}; }
/// Says nothing and waits until the peer closes.
inline Step hang() { return {Step::Kind::hang}; }
inline Step half_close() { return {Step::Kind::half_close}; }
/// Closes with RST.
inline Step reset() { return {Step::Kind::reset}; }
/// Closes without TLS's goodbye.
inline Step cut() { return {Step::Kind::cut}; }
/// From the beginning, until the peer closes: a connection kept alive.
inline Step again() { return {Step::Kind::again}; }

/// The last so many steps over again, until the peer closes.
inline Step over(unsigned steps) { return {Step::Kind::over, {}, 0, {}, steps}; }

struct Certificate {
    std::string certificate, key; ///< PEM
};

/// Signed by itself, for a subjectAltName such as "IP:127.0.0.1,DNS:localhost".
Certificate make_certificate(const std::string& names, std::chrono::hours valid);

/// A request as it came.
struct Received {
    std::string head; ///< with the blank line
    std::string body;
    unsigned connection = 0; ///< counted from 0
    std::string server_name; ///< as TLS has it
    /// Of the first field of that name, in any case; nothing: it has none.
    std::optional<std::string> field(std::string_view name) const;
};

/// Runs on a thread of its own. Connection n plays script n.
class FakeServer {
public:
    struct Options {
        std::string address = "127.0.0.1";
        int backlog = 128;
        bool repeat = false; ///< connections without a script play the last one; else: a fault
        bool accept = true;  ///< false: none, and the backlog is full from the start
        std::chrono::milliseconds accept_pause{0}; ///< after each
        std::optional<Certificate> tls = {};
    };

    explicit FakeServer(std::vector<Script> scripts) : FakeServer(std::move(scripts), Options()) {}
    FakeServer(std::vector<Script> scripts, Options options);
    ~FakeServer();

    unsigned short port() const;
    std::string url(std::string_view base = "/v1") const;

    void go(unsigned times = 1);

    unsigned connections() const; ///< accepted so far
    std::vector<Received> requests() const;

    /// Waits until no connection is open. False: one still is after tests::patience.
    bool quiet() const;

    /// Waits for quiet(). Empty: every script was played to its end; else what was not.
    std::string unused() const;

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

} // namespace evalrt::tests

#endif
