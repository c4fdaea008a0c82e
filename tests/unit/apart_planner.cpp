#include "apart_planner.hpp"

#include "support/catch.hpp"

#include <algorithm>
#include <random>
#include <set>

using namespace std::chrono_literals;
using namespace evalrt;
using detail::ApartPlanner;
using Point = PrefixPlanner::Point;
using Step = PrefixPlanner::Stage;

namespace {

const Point start{1h};

ApartPlanner fifo() {
    return ApartPlanner([] { return std::make_unique<FifoPlanner>(); });
}

void add(PrefixPlanner& planner, RequestId id, unsigned kind) {
    Prompt prompt;
    prompt.segments = {"text"};
    prompt.kind = kind;
    planner.add(id, prompt);
}

std::vector<RequestId> burst(PrefixPlanner& planner, Point now = start) {
    std::vector<RequestId> order;
    while (const auto pick = planner.next(now)) order.push_back(pick->id);
    return order;
}

using Ids = std::vector<RequestId>;

} // namespace

TEST_CASE("one kind runs to its end before the next begins") {
    auto planner = fifo();
    for (RequestId id = 1; id <= 6; ++id) add(planner, id, id % 2);
    CHECK(burst(planner) == Ids{2, 4, 6});
    planner.progressed(2, Step::first_text, start);
    planner.progressed(2, Step::done, start);
    planner.progressed(4, Step::failed, start);
    CHECK(burst(planner).empty());
    CHECK(planner.holds() == "kinds");
    add(planner, 8, 0); // of the kind that runs
    CHECK(burst(planner) == Ids{8});
    planner.progressed(6, Step::done, start);
    CHECK(burst(planner).empty());
    planner.progressed(8, Step::done, start);
    CHECK(burst(planner) == Ids{1, 3, 5});
    add(planner, 4, 0); // it had failed
    for (const RequestId id : {1, 3, 5}) planner.progressed(id, Step::done, start);
    CHECK(burst(planner) == Ids{4});
}

TEST_CASE("the kind that runs is told how many places are free") {
    RadixPlanner::Options options;
    options.leaders = 1;
    options.shared_bytes = 64;
    ApartPlanner planner([&] { return std::make_unique<RadixPlanner>(options); });
    for (RequestId id = 1; id <= 4; ++id) {
        const std::string text =
            id > 2 ? std::string(100, char('0' + id)) : std::string(200, 'a') + char('0' + id);
        planner.add(id, {"d", {text}, id > 2 ? 1 : 2});
    }
    planner.room(2);
    CHECK(planner.next(start)->id == 1);
    planner.room(1);
    CHECK_FALSE(planner.next(start)); // it is for who waits for 1
    planner.room(2);
    CHECK(planner.next(start)->id == 3);
}

TEST_CASE("what is removed is not waited for, and what runs is not removed") {
    auto planner = fifo();
    add(planner, 1, 0);
    add(planner, 2, 1);
    add(planner, 3, 1);
    CHECK(burst(planner) == Ids{1});
    planner.remove(1);
    planner.remove(2);
    planner.remove(99);
    CHECK(burst(planner).empty());
    planner.progressed(1, Step::done, start);
    CHECK(burst(planner) == Ids{3});
}

TEST_CASE("a kind that goes on for ever gives way to one that has waited long") {
    auto planner = fifo();
    add(planner, 1, 0);
    add(planner, 2, 1);
    RequestId last = 1, next = 10;
    CHECK(burst(planner) == Ids{1});
    auto now = start;
    for (; now < start + 59s; now += 1s) {
        add(planner, ++next, 0);
        CHECK(burst(planner, now) == Ids{next});
        planner.progressed(last, Step::done, now);
        last = next;
    }
    now = start + 60s;
    add(planner, ++next, 0);
    CHECK(burst(planner, now).empty());
    planner.progressed(last, Step::done, now);
    CHECK(burst(planner, now) == Ids{2});
    planner.progressed(2, Step::done, now);
    CHECK(burst(planner, now) == Ids{next});
}

TEST_CASE("another client's kind gives way after a turn, its own does not") {
    for (const std::uint32_t other : {1, 2}) {
        auto planner = fifo();
        Prompt prompt{"d", {"text"}};
        prompt.client = 1;
        for (RequestId id = 1; id <= 100; ++id) planner.add(id, prompt);
        prompt.client = other;
        prompt.kind = 1;
        CHECK(planner.next(start)->id == 1);
        planner.add(1000, prompt);
        std::size_t passed = 0;
        for (RequestId id = 1;; ++id, ++passed) { // two at a time
            const auto pick = planner.next(start);
            if (!pick) break;
            planner.progressed(id, Step::done, start);
            if (pick->id == 1000) break;
        }
        CHECK(passed == (other == 1 ? 99 : 8));
        if (other == 1) continue;
        CHECK(planner.holds() == "kinds");
        planner.progressed(9, Step::done, start);
        CHECK(planner.next(start)->id == 1000);
    }
}

TEST_CASE("a kind that nothing waits of has not been passed over") {
    auto planner = fifo();
    for (RequestId id = 1; id <= 3; ++id) add(planner, id, 0);
    add(planner, 10, 1);
    CHECK(planner.next(start)->id == 1);
    planner.remove(10);
    add(planner, 11, 1);
    CHECK(planner.next(start + 59s)->id == 2);
    CHECK(planner.next(start + 61s)->id == 3);
}

TEST_CASE("at random: no two kinds at once, and never nothing while something waits") {
    std::mt19937 random(5);
    for (int round = 0; round < 200; ++round) {
        auto planner = ApartPlanner([] { return std::make_unique<RadixPlanner>(); }, 3s);
        std::map<RequestId, unsigned> kinds, waiting, running;
        auto now = start;
        RequestId last = 0;
        std::size_t ended = 0;
        for (int step = 0; step < 100; ++step, now += std::chrono::milliseconds(random() % 500)) {
            switch (random() % 4) {
            case 0:
            case 1:
                ++last;
                kinds[last] = waiting[last] = random() % 3;
                add(planner, last, kinds[last]);
                break;
            case 2:
                if (waiting.empty()) break;
                planner.remove(waiting.begin()->first);
                waiting.erase(waiting.begin());
                break;
            default:
                if (running.empty()) break;
                const auto id = running.begin()->first;
                planner.progressed(id, random() % 5 ? Step::done : Step::failed, now);
                running.erase(id);
                ++ended;
            }
            if (random() % 2)
                while (const auto pick = planner.next(now)) {
                    REQUIRE(waiting.erase(pick->id) == 1);
                    running[pick->id] = kinds[pick->id];
                    if (running.size() > 3) break;
                }
            std::set<unsigned> at_once;
            for (const auto& [id, kind] : running) at_once.insert(kind);
            CHECK(at_once.size() <= 1);
            if (running.empty() && !waiting.empty()) {
                const auto pick = planner.next(now);
                REQUIRE(pick);
                waiting.erase(pick->id);
                running[pick->id] = kinds[pick->id];
            }
        }
        CHECK(ended > 0);
    }
}
