#include "evalrt/limiter.hpp"

#include "support/catch.hpp"

#include <functional>
#include <random>
#include <vector>

using namespace evalrt;
using namespace std::chrono_literals;

namespace {

using Point = Clock::time_point;
const Point start{1h};

// An engine with continuous batching in virtual time: each step gives every running request a
// token, and takes step(width) seconds; a prefill takes `prefill` seconds, in which nobody decodes.
struct Engine {
    std::function<double(unsigned)> step;
    double prefill = 0.02;
    unsigned places = 1000; ///< more in flight are refused

    struct Outcome {
        double seconds = 0;
        unsigned least = 1000, most = 0; // limits in the second half
        unsigned after_fifth = 0;        // the limit when a fifth was answered
        std::vector<unsigned> limits;    // at each change
    };

    Outcome run(Limiter& limiter, unsigned requests, unsigned tokens, unsigned seed = 1) const {
        std::minstd_rand random(seed);
        std::vector<unsigned> left; // tokens of those that run; cold ones have all and one more
        std::vector<bool> cold;
        unsigned waiting = requests, answered = 0;
        double time = 0, paused = 0;
        Outcome outcome;
        const auto now = [&] {
            return start +
                   std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(time));
        };
        while (answered < requests) {
            while (waiting > 0 && left.size() < limiter.limit() && time >= paused) {
                if (left.size() >= places) { // it refuses
                    limiter.overloaded(unsigned(left.size()) + 1);
                    paused = time + 0.5;
                    break;
                }
                --waiting;
                left.push_back(tokens / 2 + random() / 7 % (tokens + 1));
                cold.push_back(true);
            }
            if (left.empty()) {
                time = std::max(time, paused);
                continue;
            }
            for (std::size_t i = 0; i < left.size(); ++i) time += cold[i] ? prefill : 0;
            time += step(unsigned(left.size()));
            const bool full = waiting > 0 && left.size() >= limiter.limit();
            for (std::size_t i = 0; i < left.size(); ++i) {
                if (cold[i]) limiter.first_text(now());
                cold[i] = false;
                limiter.tokens(1, full, now());
            }
            for (std::size_t i = left.size(); i-- > 0;) {
                if (--left[i] > 0) continue;
                left.erase(left.begin() + long(i));
                cold.erase(cold.begin() + long(i));
                limiter.answered(now());
                if (++answered == requests / 5) outcome.after_fifth = limiter.limit();
            }
            if (outcome.limits.empty() || outcome.limits.back() != limiter.limit())
                outcome.limits.push_back(limiter.limit());
            if (answered > requests / 2 && waiting > 0) {
                outcome.least = std::min(outcome.least, limiter.limit());
                outcome.most = std::max(outcome.most, limiter.limit());
            }
        }
        outcome.seconds = time;
        return outcome;
    }

    double fixed(unsigned limit, unsigned requests, unsigned tokens) const {
        Limiter limiter({.start = limit});
        const auto outcome = run(limiter, requests, tokens);
        CHECK(outcome.limits == std::vector<unsigned>{limit});
        return outcome.seconds;
    }

    double best_fixed(unsigned requests, unsigned tokens) const {
        double best = 1e9;
        for (const unsigned limit : {1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256})
            if (limit <= places) best = std::min(best, fixed(limit, requests, tokens));
        return best;
    }
};

// Seconds a step: weights are read once for all, each stream adds its part.
Engine linear(double once, double each) {
    return {[=](unsigned width) { return once + each * width; }};
}

} // namespace

TEST_CASE("a limit without room to climb stays where it is") {
    auto engine = linear(0.04, 0.0066);
    Limiter limiter({.start = 16});
    CHECK(engine.run(limiter, 200, 100).limits == std::vector<unsigned>{16});
    CHECK(Limiter({.start = 0}).limit() == 1);
    CHECK(Limiter({.start = 8, .most = 4}).limit() == 8);
}

TEST_CASE("where the batch is packed anew for each answer, short ones get a narrower limit") {
    const auto limit = [](std::int64_t most, std::int64_t tokens, int answers) {
        Limiter limiter({.start = 32, .repack = 19});
        CHECK(limiter.limit() == 32); // nothing is known
        for (int i = 0; i < 100; ++i) limiter.expect(most);
        for (int i = 0; i < answers; ++i) limiter.answered({}, tokens);
        return limiter.limit();
    };
    CHECK(limit(96, 0, 0) == 25); // taken for 32 tokens
    CHECK(limit(256, 0, 0) == 32);
    CHECK(limit(1, 0, 0) == 16);     // no narrower
    CHECK(limit(2048, 32, 4) == 32); // they still count for little
    CHECK(limit(2048, 32, 10000) == 25);
    CHECK(limit(96, 96, 1000) == 32);
    Limiter fixed({.start = 32});
    fixed.expect(1);
    CHECK(fixed.limit() == 32);
    Limiter narrow({.start = 4, .repack = 19});
    narrow.expect(1);
    CHECK(narrow.limit() == 4);
}

TEST_CASE("the knee is found within a fifth of the run, and costs less than a tenth of it") {
    struct Case {
        const char* what;
        Engine engine;
        unsigned start;
    };
    auto cliff = linear(0.03, 0.0005); // beyond its batch an engine only queues: the step grows
    cliff.step = [](unsigned width) {
        return (0.03 + 0.0005 * std::min(width, 32u)) * std::max(1.0, width / 32.0);
    };
    auto dip = linear(0, 0); // two streams are slower than one
    dip.step = [](unsigned width) { return width == 1 ? 0.02 : 0.05 + 0.0002 * width; };
    for (const auto& it : {
             Case{"paged attention", linear(0.02, 0.00005), 64},
             Case{"a knee near thirty", linear(0.03, 0.001), 16},
             Case{"hardly any batching", linear(0.01, 0.01), 8},
             Case{"a cliff", cliff, 16},
             Case{"a dip at two", dip, 16},
         }) {
        CAPTURE(it.what);
        Limiter limiter({.start = it.start, .most = 256});
        const auto outcome = it.engine.run(limiter, 200, 100);
        CAPTURE(outcome.limits);
        CHECK(outcome.seconds <= 1.10 * it.engine.best_fixed(200, 100));
        const auto rate = [&](unsigned width) { return width / it.engine.step(width); };
        CHECK(rate(outcome.after_fifth) >= 0.9 * rate(outcome.limits.back()));
    }
}

TEST_CASE("a dip at two is climbed past from below") {
    auto engine = linear(0, 0);
    engine.step = [](unsigned width) { return width == 1 ? 0.02 : 0.05 + 0.0002 * width; };
    Limiter limiter({.start = 1, .most = 64});
    CHECK(engine.run(limiter, 400, 100).limits.back() >= 60);
}

TEST_CASE("what is reached only now and then is measured in these times") {
    Limiter limiter({.start = 16, .most = 64});
    auto now = start;
    const auto pass = [&](int tokens, bool full) {
        for (int i = 0; i < tokens; ++i)
            limiter.tokens(1, full, now += std::chrono::milliseconds(2));
    };
    for (int i = 0; i < 16; ++i) limiter.first_text(now);
    for (int i = 0; i < 20 && limiter.limit() == 16; ++i) pass(10, true), pass(10, false);
    CHECK(limiter.limit() == 32);
}

TEST_CASE(
    "after an overload half of what is left is taken back each round, and what fails is not") {
    Limiter limiter({.start = 192});
    limiter.overloaded(192);
    std::vector<unsigned> limits{limiter.limit()};
    const auto round = [&] {
        for (auto left = limiter.limit(); left > 0; --left) limiter.answered(start);
        limits.push_back(limiter.limit());
    };
    for (int i = 0; i < 3; ++i) round();
    CHECK(limits == std::vector<unsigned>{144, 168, 180, 186});
    limiter.overloaded(186);
    CHECK(limiter.limit() == 180);
    limits.clear();
    for (int i = 0; i < 4; ++i) round();
    CHECK(limits == std::vector<unsigned>{183, 184, 185, 185});
}

TEST_CASE("a long steady run does not wander") {
    auto engine = linear(0.03, 0.001);
    Limiter limiter({.start = 16, .most = 256});
    const auto outcome = engine.run(limiter, 4000, 100);
    CAPTURE(outcome.limits);
    CHECK(outcome.most <= outcome.least * 5 / 4 + 1);
    CHECK(outcome.seconds <= 1.05 * engine.best_fixed(4000, 100));
}

TEST_CASE("a server that takes only so many gets so many") {
    for (const unsigned places : {1u, 3u, 10u, 40u}) {
        CAPTURE(places);
        auto engine = linear(0.02, 0.0001);
        engine.places = places;
        Limiter limiter({.start = 32});
        const auto outcome = engine.run(limiter, 1500, 20);
        CAPTURE(outcome.limits);
        CHECK(outcome.least + 1 >= std::min(places, 32u));
        CHECK(outcome.most <= std::min(places + 1, 32u)); // one step over, now and then
        CHECK(outcome.seconds <= 1.15 * engine.fixed(std::min(places, 32u), 1500, 20));
    }
}

TEST_CASE("after a passing overload it comes back") {
    Limiter limiter({.start = 16});
    limiter.overloaded(16);
    CHECK(limiter.limit() == 12);
    limiter.overloaded(12); // the next ones, after the pause
    CHECK(limiter.limit() == 9);
    Point now = start;
    unsigned answers = 0;
    while (limiter.limit() < 16) {
        limiter.answered(now += 10ms);
        REQUIRE(++answers < 200);
    }
    for (int i = 0; i < 1000; ++i) limiter.answered(now += 10ms);
    CHECK(limiter.limit() == 16);
}

TEST_CASE("one more that was refused is taken back, not more") {
    Limiter limiter({.start = 8});
    limiter.overloaded(8);
    CHECK(limiter.limit() == 6);
    Point now = start;
    for (int i = 0; i < 6; ++i) limiter.answered(now);
    CHECK(limiter.limit() == 7);
    limiter.overloaded(7);
    CHECK(limiter.limit() == 6);
    for (int i = 0; i < 6 * 7; ++i) limiter.answered(now); // seven rounds
    CHECK(limiter.limit() == 6);
    for (int i = 0; i < 6; ++i) limiter.answered(now);
    CHECK(limiter.limit() == 7); // it looks again
}

TEST_CASE("a server that died gets half as many for a while") {
    Limiter limiter({.start = 16});
    limiter.lost(1);
    CHECK(limiter.limit() == 16);
    limiter.lost(16);
    CHECK(limiter.limit() == 8);
    limiter.overloaded(1);
    CHECK(limiter.limit() == 1);
}

TEST_CASE("no rate is measured while the limit is not what holds requests back") {
    Limiter limiter({.start = 4, .most = 64});
    Point now = start;
    for (int i = 0; i < 4; ++i) limiter.first_text(now);
    for (int i = 0; i < 1000; ++i) limiter.tokens(4, false, now += 10ms);
    CHECK(limiter.limit() == 4);
    for (int i = 0; i < 60; ++i) limiter.tokens(4, true, now += 10ms);
    CHECK(limiter.limit() == 8);
}
