#include "evalrt/detail/watchdog.hpp"

#include "support/catch.hpp"

using namespace evalrt;
using namespace evalrt::detail;
using namespace std::chrono_literals;
using Step = Watchdog::Step;

namespace {

const Clock::time_point start{1h};

Watchdog dog(std::chrono::milliseconds quiet = 10s) {
    return {{.quiet = quiet, .canary_limit = 1s, .canaries = 2}, start};
}

} // namespace

TEST_CASE("a server that brings tokens is left alone") {
    auto watch = dog();
    for (int i = 1; i < 100; ++i) {
        watch.progress(start + i * 9s);
        CHECK(watch.next(true, start + i * 9s + 8s) == Step::wait);
    }
}

TEST_CASE("a quiet server is asked for a token, and hangs if it brings none twice") {
    auto watch = dog();
    CHECK(watch.next(true, start + 9s) == Step::wait);
    CHECK(watch.next(true, start + 10s) == Step::ask);
    watch.canary_ended(false, start + 11s);
    CHECK(watch.next(true, start + 11s) == Step::ask);
    watch.canary_ended(false, start + 12s);
    CHECK(watch.next(true, start + 12s) == Step::hung);
}

TEST_CASE("a canary that is answered proves the server for as long as a token would") {
    auto watch = dog();
    CHECK(watch.next(true, start + 10s) == Step::ask);
    watch.canary_ended(true, start + 11s);
    CHECK(watch.next(true, start + 20s) == Step::wait);
    CHECK(watch.next(true, start + 21s) == Step::ask);
    watch.canary_ended(false, start + 22s);
    watch.canary_ended(true, start + 23s);
    CHECK(watch.next(true, start + 23s) == Step::wait);
}

TEST_CASE("a token that comes while the canary waits is a sign of life") {
    auto watch = dog();
    CHECK(watch.next(true, start + 10s) == Step::ask);
    watch.canary_ended(false, start + 11s);
    CHECK(watch.next(true, start + 11s) == Step::ask);
    watch.progress(start + 12s);
    watch.canary_ended(false, start + 12s);
    CHECK(watch.next(true, start + 13s) == Step::ask); // once more before the verdict
    watch.canary_ended(true, start + 13s);
    CHECK(watch.next(true, start + 14s) == Step::wait);
}

TEST_CASE("with nothing in flight there is nothing to be quiet about") {
    auto watch = dog();
    CHECK(watch.next(false, start + 1h) == Step::wait);
    CHECK(watch.next(true, start + 1h + 9s) == Step::wait);
    CHECK(watch.next(true, start + 1h + 10s) == Step::ask);
}

TEST_CASE("a request that timed out raises the question at once, also without streams") {
    for (const auto quiet : {10000ms, 0ms}) {
        auto watch = dog(quiet);
        watch.timed_out();
        CHECK(watch.next(false, start + 1s) == Step::ask);
        watch.canary_ended(true, start + 2s);
        CHECK(watch.next(false, start + 2s) == Step::wait);
        watch.timed_out();
        CHECK(watch.next(true, start + 3s) == Step::ask);
        watch.canary_ended(false, start + 4s);
        CHECK(watch.next(true, start + 4s) == Step::ask);
        watch.canary_ended(false, start + 5s);
        CHECK(watch.next(true, start + 5s) == Step::hung);
    }
    auto watch = dog(0ms);
    CHECK(watch.next(true, start + 24h) == Step::wait);
}
