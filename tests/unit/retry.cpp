#include "evalrt/detail/retry.hpp"

#include "support/catch.hpp"

#include <optional>

using namespace evalrt;
using namespace evalrt::detail;
using namespace std::chrono_literals;

namespace {

using Millis = std::chrono::milliseconds;

Response failed(Errc errc, int status = 0, Stage stage = Stage::answered) {
    Response response;
    response.outcome = errc;
    response.status = status;
    response.stage = stage;
    return response;
}

// The connection broke before any byte.
Response broken(error_code cause) {
    auto response = failed(Errc::unreachable, 0, Stage::sent);
    response.cause = cause;
    return response;
}

const error_code eof = asio::error::eof, reset = asio::error::connection_reset;

RetryVerdict first(const Response& response, bool delivered = false) {
    RetryTable table({});
    RetryState state;
    return table.decide(response, delivered, state);
}

bool between(Millis value, Millis low, Millis high) { return low <= value && value <= high; }

} // namespace

TEST_CASE("each class of failure is retried, or not, as the table says") {
    struct Row {
        Errc errc;
        int status;
        bool again;
        bool pause_server;
    };
    for (const auto& row : {
             Row{Errc::unreachable, 0, true, false},
             Row{Errc::exited, 0, false, false},
             Row{Errc::rate_limited, 429, true, true},
             Row{Errc::overloaded, 503, true, true},
             Row{Errc::overloaded, 529, true, true},
             Row{Errc::overloaded, 200, true, true},
             Row{Errc::auth, 401, false, false},
             Row{Errc::auth, 403, false, false},
             Row{Errc::context_too_long, 400, false, false},
             Row{Errc::context_too_long, 500, false, false},
             Row{Errc::malformed, 200, true, false},
             Row{Errc::truncated, 200, true, false},
             Row{Errc::timed_out, 0, true, false},
             Row{Errc::cancelled, 0, false, false},
             Row{Errc::poison, 0, false, false},
             Row{Errc::rejected, 0, false, false},  // we could not send it
             Row{Errc::rejected, 200, true, false}, // in mid-stream
             Row{Errc::rejected, 301, false, false},
             Row{Errc::rejected, 400, false, false},
             Row{Errc::rejected, 404, false, false},
             Row{Errc::rejected, 405, false, false},
             Row{Errc::rejected, 408, true, false},
             Row{Errc::rejected, 409, true, false}, // oMLX loads a model
             Row{Errc::rejected, 410, false, false},
             Row{Errc::rejected, 413, false, false},
             Row{Errc::rejected, 422, false, false},
             Row{Errc::rejected, 402, false, false}, // no money left
             Row{Errc::rejected, 429, false, false}, // no quota left
             Row{Errc::rejected, 500, true, false},
             Row{Errc::rejected, 501, false, false},
             Row{Errc::rejected, 502, true, false},
             Row{Errc::rejected, 504, true, false},
             Row{Errc::rejected, 505, false, false},
             Row{Errc::rejected, 507, false, false}, // the model is too large
             Row{Errc::rejected, 599, true, false},
         }) {
        CAPTURE(name(row.errc), row.status);
        const auto verdict = first(failed(row.errc, row.status));
        CHECK(verdict.again == row.again);
        CHECK(verdict.pause_server == row.pause_server);
        CHECK((verdict.delay > 0ms) == row.again);
        // What the caller has seen cannot be taken back.
        CHECK_FALSE(first(failed(row.errc, row.status), true).again);
    }
}

TEST_CASE("every class has a row") {
    for (const auto errc : all_errc) {
        RetryTable table({});
        RetryState state;
        table.decide(failed(errc, 500), false, state);
        CHECK(state.attempts == 1);
    }
}

TEST_CASE("attempts are counted, and end") {
    RetryTable table({.attempts = 3});
    RetryState state;
    CHECK(table.decide(failed(Errc::timed_out), false, state).again);
    CHECK(table.decide(failed(Errc::truncated, 200), false, state).again);
    CHECK_FALSE(table.decide(failed(Errc::timed_out), false, state).again);
    CHECK(state.attempts == 3);

    RetryTable once({.attempts = 1});
    RetryState fresh;
    CHECK_FALSE(once.decide(failed(Errc::timed_out), false, fresh).again);
    RetryTable never({.attempts = 0});
    RetryState other;
    CHECK_FALSE(never.decide(failed(Errc::timed_out), false, other).again);
}

TEST_CASE("the back-off doubles, has jitter, and has an end") {
    for (std::uint64_t seed = 0; seed < 50; ++seed) {
        RetryTable table(
            {.attempts = 100, .base = 500ms, .most = 8000ms, .budget = 0, .seed = seed});
        RetryState state;
        for (const auto whole : {500ms, 1000ms, 2000ms, 4000ms, 8000ms, 8000ms, 8000ms}) {
            const auto verdict = table.decide(failed(Errc::timed_out), false, state);
            REQUIRE(verdict.again);
            REQUIRE(between(verdict.delay, whole * 3 / 4, whole));
        }
        while (state.attempts < 99)
            REQUIRE(table.decide(failed(Errc::timed_out), false, state).delay <= 8000ms);
    }
    // Two of them do not march in step, one of them does always the same.
    const auto delay = [](std::uint64_t seed) {
        RetryTable table({.seed = seed});
        RetryState state;
        return table.decide(failed(Errc::timed_out), false, state).delay;
    };
    CHECK(delay(1) == delay(1));
    CHECK((delay(1) != delay(2) || delay(1) != delay(3)));
}

TEST_CASE("a wait that the server asks for is kept, for all requests to it") {
    struct Row {
        Errc errc;
        int status;
        Millis asked;
        bool again;
    };
    for (const auto& row : {
             Row{Errc::rate_limited, 429, 0ms, true},
             Row{Errc::rate_limited, 429, 1500ms, true},
             Row{Errc::overloaded, 503, 60s, true},
             Row{Errc::overloaded, 503, 120s, true},
             Row{Errc::overloaded, 503, 120001ms, false},
             Row{Errc::rate_limited, 429, 1000000s, false},
             Row{Errc::rejected, 500, 2s, true},
             Row{Errc::rejected, 409, 2s, true},
             Row{Errc::rejected, 400, 2s, false}, // no wait makes it right
             Row{Errc::auth, 403, 2s, false},
         }) {
        CAPTURE(name(row.errc), row.status, row.asked.count());
        auto response = failed(row.errc, row.status);
        response.retry_after = row.asked;
        const auto verdict = first(response);
        CHECK(verdict.again == row.again);
        CHECK(verdict.pause_server == row.again);
        if (row.again) CHECK(between(verdict.delay, row.asked, row.asked + 50ms));
    }
    auto response = failed(Errc::rate_limited, 429);
    response.retry_after = 10s;
    RetryTable patient({.longest_wait = 10s});
    RetryTable hurried({.longest_wait = 9s});
    RetryState a, b;
    CHECK(patient.decide(response, false, a).again);
    CHECK_FALSE(hurried.decide(response, false, b).again);
}

TEST_CASE("connections that break before a byte are made again, eight times, without counting") {
    RetryTable table({});
    RetryState state;
    Millis longest = 0ms;
    for (unsigned i = 1; i <= 8; ++i) {
        const auto verdict = table.decide(broken(reset), false, state);
        REQUIRE(verdict.again);
        CHECK_FALSE(verdict.pause_server);
        CHECK(between(verdict.delay, 75ms, 1000ms));
        longest = std::max(longest, verdict.delay);
        CHECK(state.resends == i);
        CHECK(state.attempts == 0);
    }
    CHECK(longest >= 750ms);
    // From there on they count.
    CHECK(table.decide(broken(reset), false, state).again);
    CHECK(table.decide(broken(reset), false, state).again);
    CHECK_FALSE(table.decide(broken(reset), false, state).again);
    CHECK(state.attempts == 3);
    CHECK(state.resends == 8);
}

TEST_CASE("the free resends are one item's, whatever comes between") {
    RetryTable table({.attempts = 100, .free_resends = 2});
    RetryState state;
    table.decide(broken(reset), false, state);
    table.decide(failed(Errc::timed_out), false, state);
    table.decide(broken(reset), false, state);
    CHECK(state.attempts == 1);
    table.decide(broken(reset), false, state);
    CHECK(state.attempts == 2);
    RetryTable none({.free_resends = 0});
    RetryState fresh;
    none.decide(broken(reset), false, fresh);
    CHECK(fresh.attempts == 1);
}

TEST_CASE("any number of free resends keeps the pause in its bounds") {
    RetryTable table({.free_resends = 100});
    RetryState state;
    for (int i = 0; i < 100; ++i) {
        const auto verdict = table.decide(broken(reset), false, state);
        REQUIRE(verdict.again);
        REQUIRE(between(verdict.delay, 75ms, 1000ms));
    }
    CHECK(state.attempts == 0);
}

TEST_CASE("a connection refused is no resend: it was not sent") {
    RetryTable table({});
    RetryState state;
    auto response = failed(Errc::unreachable, 0, Stage::none);
    response.cause = asio::error::connection_refused;
    CHECK(table.decide(response, false, state).again);
    CHECK(state.attempts == 1);
    CHECK(state.resends == 0);
}

TEST_CASE("a close without a byte counts from the second in a row on") {
    RetryTable table({});
    RetryState state;
    CHECK(table.decide(broken(eof), false, state).again);
    CHECK(state.attempts == 0);
    CHECK(state.empty_close);
    CHECK(table.decide(broken(eof), false, state).again);
    CHECK(state.attempts == 1);
    CHECK(table.decide(broken(eof), false, state).again);
    CHECK(state.attempts == 2);
    CHECK_FALSE(table.decide(broken(eof), false, state).again);
    CHECK(state.attempts == 3);
    CHECK(state.resends == 1);

    // A reset is no close, and something else in between begins a new row.
    RetryState other;
    table.decide(broken(eof), false, other);
    table.decide(broken(reset), false, other);
    CHECK_FALSE(other.empty_close);
    table.decide(broken(eof), false, other);
    CHECK(other.resends == 3);
    CHECK(other.attempts == 0);
    table.decide(failed(Errc::timed_out), false, other);
    table.decide(broken(eof), false, other);
    CHECK(other.resends == 4);
    CHECK(other.attempts == 1);
}

TEST_CASE("a server that is overloaded is asked for as long as there is patience") {
    for (const auto errc : {Errc::rate_limited, Errc::overloaded}) {
        RetryTable table({.attempts = 3, .overload_patience = 60s});
        RetryState state;
        auto asked = failed(errc, 429);
        asked.retry_after = 2s;
        unsigned attempts = 1;
        while (table.decide(asked, false, state).again) ++attempts;
        CHECK(attempts >= 29); // a minute of waits of two seconds
        CHECK(attempts <= 31);
        CHECK(between(state.waited, 60s, 62s));
        RetryTable once({.attempts = 1, .overload_patience = 60s});
        RetryState fresh;
        CHECK_FALSE(once.decide(failed(errc, 429), false, fresh).again);
    }
    // Other failures of the same item still have their number.
    RetryTable table({.attempts = 2});
    RetryState state;
    CHECK(table.decide(failed(Errc::overloaded, 503), false, state).again);
    CHECK(table.decide(failed(Errc::overloaded, 503), false, state).again);
    CHECK_FALSE(table.decide(failed(Errc::rejected, 500), false, state).again);
}

TEST_CASE("what the server says of a retry goes before what its class says") {
    struct Row {
        Errc errc;
        int status;
        bool should, again;
    };
    for (const auto& row : {
             Row{Errc::rejected, 400, true, true},
             Row{Errc::rejected, 500, false, false},
             Row{Errc::rate_limited, 429, false, false},
             Row{Errc::overloaded, 503, false, false},
             Row{Errc::auth, 403, true, true},
             Row{Errc::cancelled, 0, true, false},
         }) {
        CAPTURE(name(row.errc), row.status);
        auto response = failed(row.errc, row.status);
        response.should_retry = row.should;
        CHECK(first(response).again == row.again);
    }
}

TEST_CASE("retries of all items draw on one budget, which successes fill again") {
    RetryTable table({.attempts = 1000, .budget = 20});
    RetryState a, b;
    CHECK(table.decide(failed(Errc::truncated, 200), false, a).again); // 5
    CHECK(table.decide(failed(Errc::timed_out), false, b).again);      // 10
    CHECK(table.budget().tokens() == 5);
    CHECK_FALSE(table.decide(failed(Errc::timed_out), false, b).again);
    CHECK(table.budget().tokens() == 5);
    CHECK(table.decide(failed(Errc::rejected, 500), false, b).again); // 5
    CHECK_FALSE(table.decide(failed(Errc::rejected, 500), false, b).again);

    // An overload, and a wait that the server asked for, are free.
    CHECK(table.decide(failed(Errc::overloaded, 503), false, b).again);
    auto asked = failed(Errc::rejected, 500);
    asked.retry_after = 1s;
    CHECK(table.decide(asked, false, b).again);
    CHECK(table.budget().tokens() == 0);

    // A retry that succeeds gives its price back, any other success 1.
    table.succeeded(a);
    CHECK(table.budget().tokens() == 5);
    table.succeeded(a);
    CHECK(table.budget().tokens() == 6);
    for (int i = 0; i < 100; ++i) table.succeeded(a);
    CHECK(table.budget().tokens() == 20);
}
