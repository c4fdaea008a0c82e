#include "evalrt/detail/breaker.hpp"

#include "support/catch.hpp"

using namespace evalrt;
using namespace evalrt::detail;
using namespace std::chrono_literals;

namespace {

const Clock::time_point start{1h};

Response failed(Errc errc, int status = 0, std::string detail = "") {
    Response response;
    response.outcome = errc;
    response.status = status;
    response.detail = std::move(detail);
    return response;
}

} // namespace

TEST_CASE("a breaker opens at the failures in a row, and any answer closes it") {
    Breaker breaker({.failures = 3, .first_pause = 1s, .longest_pause = 3s});
    breaker.dead(start);
    breaker.dead(start);
    breaker.alive();
    breaker.dead(start);
    breaker.dead(start);
    CHECK_FALSE(breaker.open());
    CHECK(breaker.allowed(16, start) == 16);
    CHECK(breaker.wake() == Clock::time_point::max());
    breaker.dead(start);
    CHECK(breaker.open());
    CHECK(breaker.allowed(16, start) == 0);
    CHECK(breaker.wake() == start + 1s);
    CHECK(breaker.allowed(16, start + 1s) == 1);
    breaker.alive();
    CHECK(breaker.allowed(16, start + 1s) == 16);
}

TEST_CASE("an open breaker lets one through after pauses that double up to a bound") {
    Breaker breaker({.failures = 1, .first_pause = 1s, .longest_pause = 3s});
    auto now = start;
    for (const auto pause : {1s, 2s, 3s, 3s}) {
        breaker.dead(now);
        CHECK(breaker.wake() == now + pause);
        now = breaker.wake();
        CHECK(breaker.allowed(8, now) == 1);
    }
    breaker.alive();
    breaker.dead(now);
    CHECK(breaker.wake() == now + 1s);
}

TEST_CASE("a server that stays away is gone after the breaker's patience") {
    Breaker breaker({.failures = 2, .patience = 60s});
    breaker.dead(start);
    CHECK_FALSE(breaker.gone(start + 1h));
    breaker.dead(start);
    CHECK_FALSE(breaker.gone(start + 59s));
    CHECK(breaker.waits(start + 59s));
    breaker.dead(start + 59s); // does not begin anew
    CHECK(breaker.gone(start + 60s));
    CHECK_FALSE(breaker.waits(start + 60s));
    breaker.alive();
    CHECK_FALSE(breaker.gone(start + 60s));
}

TEST_CASE("a breaker of no failures never opens") {
    Breaker breaker({.failures = 0});
    for (int i = 0; i < 100; ++i) breaker.dead(start);
    CHECK_FALSE(breaker.open());
    CHECK_FALSE(breaker.waits(start));
}

TEST_CASE("a refused key stops the run, also in its middle") {
    for (const auto& refusal :
         {failed(Errc::auth, 401, "bad key"), failed(Errc::rejected, 429, "no quota"),
          failed(Errc::rejected, 402, "pay first")}) {
        StopRule rule({.refused = 3, .alike = 20});
        CHECK(rule.ended({}).empty());
        CHECK(rule.ended(refusal).empty());
        CHECK(rule.ended(refusal).empty());
        CHECK(rule.ended({}).empty()); // one was answered: it was not the key
        CHECK(rule.ended(refusal).empty());
        CHECK(rule.ended(refusal).empty());
        const auto why = rule.ended(refusal);
        CHECK(why.find(refusal.detail) != why.npos);
    }
}

TEST_CASE("a run in which everything fails the same way is stopped") {
    StopRule rule({.refused = 3, .alike = 4});
    for (int i = 0; i < 3; ++i) CHECK(rule.ended(failed(Errc::context_too_long, 400)).empty());
    CHECK(rule.ended(failed(Errc::cancelled)).empty()); // says nothing
    CHECK(rule.ended(failed(Errc::context_too_long, 400, "4096 tokens")) ==
          "everything fails the same way (context_too_long): 4096 tokens");
}

TEST_CASE("one answer, or one other failure, and the run goes on") {
    for (const auto& other : {Response(), failed(Errc::rejected, 404), failed(Errc::malformed)}) {
        StopRule rule({.refused = 3, .alike = 4});
        CHECK(rule.ended(other).empty());
        for (int i = 0; i < 100; ++i) CHECK(rule.ended(failed(Errc::rejected, 400)).empty());
    }
}

TEST_CASE("a model that is gone in the middle of a run ends it") {
    const auto gone = failed(Errc::rejected, 404, "HTTP 404: The model `m` does not exist");
    StopRule rule({.refused = 3, .alike = 4});
    CHECK(rule.ended({}).empty());
    for (int i = 0; i < 3; ++i) CHECK(rule.ended(gone).empty());
    CHECK(rule.ended({}).empty()); // it is there again
    for (int i = 0; i < 3; ++i) CHECK(rule.ended(gone).empty());
    CHECK(rule.ended(failed(Errc::rejected, 404, "HTTP 404: no such model: x")).empty());
    for (int i = 0; i < 3; ++i) CHECK(rule.ended(gone).empty());
    CHECK(rule.ended(gone).find("any more: HTTP 404: The model `m`") != std::string::npos);
    StopRule items({.refused = 3, .alike = 4}); // the template of some, and other reasons of theirs
    CHECK(items.ended({}).empty());
    for (int i = 0; i < 100; ++i) CHECK(items.ended(failed(Errc::rejected, 404, "roles")).empty());
}

TEST_CASE("without rules nothing stops") {
    StopRule rule({});
    for (int i = 0; i < 100; ++i) CHECK(rule.ended(failed(Errc::auth, 401)).empty());
}
