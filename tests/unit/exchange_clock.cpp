#include "evalrt/detail/exchange_clock.hpp"

#include "support/catch.hpp"

#include <random>
#include <vector>

using namespace evalrt;
using namespace evalrt::detail;
using namespace std::chrono_literals;

namespace {

using Point = Clock::time_point;
using Millis = std::chrono::milliseconds;

const Point t0 = Point(1000h);

TimeLimits limits() {
    return {.connect = 10s, .first_byte = 60s, .silence = 20s, .content_silence = 45s, .whole = 0s};
}

// "10s connection": what passes next, and when, from t0.
std::string next(const ExchangeClock& clock) {
    const auto limit = clock.next();
    if (limit.at == Point::max()) return "never";
    return std::to_string(std::chrono::duration_cast<Millis>(limit.at - t0).count()) + "ms " +
           std::string(limit.what);
}

} // namespace

TEST_CASE("each phase of an exchange has its own limit") {
    ExchangeClock clock(limits(), t0);
    CHECK(next(clock) == "10000ms connection");
    clock.sent(t0 + 2s);
    CHECK(next(clock) == "62000ms first byte of an answer");
    clock.bytes(t0 + 30s);
    CHECK(next(clock) == "50000ms further byte");
    clock.bytes(t0 + 49s);
    CHECK(next(clock) == "69000ms further byte");
    CHECK(clock.next().span == 20s);
}

TEST_CASE("keep-alive comments hold off the silence, not the wait for a token") {
    ExchangeClock clock(limits(), t0);
    clock.sent(t0);
    for (auto at = 1s; at <= 40s; at += 1s) clock.bytes(t0 + at);
    // From the first byte on: before that, the server may queue and load.
    CHECK(next(clock) == "46000ms further token");
    clock.content(t0 + 40s);
    CHECK(next(clock) == "60000ms further byte");
    for (auto at = 41s; at <= 80s; at += 1s) clock.bytes(t0 + at);
    CHECK(next(clock) == "85000ms further token");
}

TEST_CASE("a token that comes with the first byte counts") {
    ExchangeClock clock(limits(), t0);
    clock.sent(t0);
    clock.bytes(t0 + 50s);
    clock.content(t0 + 50s);
    for (auto at = 51s; at <= 80s; at += 1s) clock.bytes(t0 + at);
    CHECK(next(clock) == "95000ms further token");
}

TEST_CASE("the limit on the whole holds in every phase") {
    auto with_whole = limits();
    with_whole.whole = 5s;
    ExchangeClock clock(with_whole, t0);
    CHECK(next(clock) == "5000ms complete answer");
    clock.sent(t0 + 1s);
    CHECK(next(clock) == "5000ms complete answer");
    clock.bytes(t0 + 2s);
    clock.content(t0 + 4s);
    CHECK(next(clock) == "5000ms complete answer");
    with_whole.whole = 100s;
    clock = ExchangeClock(with_whole, t0);
    CHECK(next(clock) == "10000ms connection");
    clock.sent(t0);
    clock.bytes(t0 + 95s);
    CHECK(next(clock) == "100000ms complete answer");
}

TEST_CASE("a limit of zero is none") {
    ExchangeClock clock(
        {.connect = 0s, .first_byte = 0s, .silence = 0s, .content_silence = 0s, .whole = 0s}, t0);
    CHECK(next(clock) == "never");
    clock.sent(t0);
    CHECK(next(clock) == "never");
    clock.bytes(t0);
    CHECK(next(clock) == "never");

    auto only_content = TimeLimits{
        .connect = 0s, .first_byte = 0s, .silence = 0s, .content_silence = 3s, .whole = 0s};
    clock = ExchangeClock(only_content, t0);
    clock.sent(t0);
    CHECK(next(clock) == "never");
    clock.bytes(t0 + 1s);
    CHECK(next(clock) == "4000ms further token");
}

TEST_CASE("a limit longer than time itself is none") {
    ExchangeClock clock({.connect = Millis::max(),
                         .first_byte = Millis::max(),
                         .silence = Millis::max(),
                         .content_silence = Millis::max(),
                         .whole = 10s},
                        t0);
    CHECK(next(clock) == "10000ms complete answer");
    clock.sent(t0);
    clock.bytes(t0 + 1s);
    CHECK(next(clock) == "10000ms complete answer");
    CHECK(next(ExchangeClock({.connect = Millis::max(), .whole = Millis::max()}, t0)) == "never");
}

TEST_CASE("without options, an exchange ends some day") {
    ExchangeClock clock({}, t0);
    CHECK(next(clock) == "10000ms connection");
    clock.sent(t0);
    CHECK(next(clock) == "600000ms first byte of an answer");
    clock.bytes(t0);
    CHECK(next(clock) == "120000ms further byte");
}

TEST_CASE("connections up to the backlog open at once, the others at the pace") {
    ConnectPacer pacer(3, 20ms);
    std::vector<Millis> at;
    for (int i = 0; i < 6; ++i)
        at.push_back(std::chrono::duration_cast<Millis>(pacer.reserve(t0) - t0));
    CHECK(at == std::vector<Millis>{0ms, 0ms, 0ms, 20ms, 40ms, 60ms});
    // A pause gives places back, but never more than the backlog has.
    CHECK(pacer.reserve(t0 + 100ms) == t0 + 100ms);
    CHECK(pacer.reserve(t0 + 100ms) == t0 + 100ms);
    CHECK(pacer.reserve(t0 + 100ms) == t0 + 120ms); // the last of the six is still in the queue
    CHECK(pacer.reserve(t0 + 100ms) == t0 + 140ms);
    const auto later = t0 + 1h;
    for (int i = 0; i < 3; ++i) CHECK(pacer.reserve(later) == later);
    CHECK(pacer.reserve(later) == later + 20ms);
}

TEST_CASE("a pacer without an interval, or without a burst, does not hold back the first") {
    ConnectPacer none(0, 0ms);
    for (int i = 0; i < 100; ++i) CHECK(none.reserve(t0) == t0);
    ConnectPacer single(0, 20ms);
    CHECK(single.reserve(t0) == t0);
    CHECK(single.reserve(t0) == t0 + 20ms);
    ConnectPacer one(1, 20ms);
    CHECK(one.reserve(t0) == t0);
    CHECK(one.reserve(t0 + 5ms) == t0 + 20ms);
}

TEST_CASE("whatever the arrivals, a listener that takes one each interval never overflows") {
    std::mt19937 random(5);
    for (int round = 0; round < 200; ++round) {
        const unsigned backlog = 1 + random() % 8;
        ConnectPacer pacer(backlog, 10ms);
        auto now = t0;
        std::vector<Point> opened;
        for (int i = 0; i < 200; ++i) {
            now += Millis(random() % 3 ? 0 : random() % 40);
            const auto at = pacer.reserve(now);
            REQUIRE(at >= now);
            if (!opened.empty()) REQUIRE(at >= opened.back()); // first come, first served
            opened.push_back(at);
        }
        // The queue of a server that accepts one each 10 ms.
        double waiting = 0;
        auto last = t0;
        for (const auto at : opened) {
            waiting = std::max(
                0.0, waiting - double(std::chrono::duration_cast<Millis>(at - last).count()) / 10);
            waiting += 1;
            last = at;
            REQUIRE(waiting <= backlog + 1e-6);
        }
    }
}
