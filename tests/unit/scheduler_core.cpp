#include "evalrt/detail/scheduler_core.hpp"

#include "evalrt/detail/replicas.hpp"

#include "support/catch.hpp"

#include <map>
#include <random>

using namespace std::chrono_literals;
using evalrt::Errc;
using evalrt::FifoPlanner;
using evalrt::PrefixPlanner;
using evalrt::Prompt;
using evalrt::RadixPlanner;
using evalrt::Release;
using evalrt::RequestId;
using evalrt::Response;
using evalrt::SchedulerOptions;
using evalrt::detail::RetryState;
using evalrt::detail::RetryTable;
using evalrt::detail::SchedulerCore;
using Place = SchedulerCore::Place;
using Point = SchedulerCore::Point;
using Ids = std::vector<RequestId>;

namespace {

const Point start{1h};
constexpr Point never = Point::max();

Response failed(Errc errc, evalrt::Stage stage = evalrt::Stage::none) {
    Response response;
    response.outcome = errc;
    response.stage = stage;
    return response;
}

Response asked_to_wait(Errc errc, std::chrono::milliseconds time) {
    auto response = failed(errc);
    response.retry_after = time;
    return response;
}

// A core, and what a test says to it in few words.
struct Queue {
    std::unique_ptr<PrefixPlanner> planner;
    SchedulerCore core;
    std::map<RequestId, std::string> texts;

    explicit Queue(SchedulerOptions options,
                   std::unique_ptr<PrefixPlanner> planner_ = std::make_unique<FifoPlanner>())
        : planner(std::move(planner_)), core(*planner, options) {}

    void submit(RequestId id, std::string text = "?", Point deadline = never) {
        const auto& kept = texts[id] = std::move(text);
        core.submit(id, {"d", {kept}, {}}, deadline);
    }

    void submit(RequestId first, RequestId last) {
        for (auto id = first; id <= last; ++id) submit(id);
    }

    Ids next(Point now = start) {
        Ids ids;
        while (const auto pick = core.next(now)) ids.push_back(pick->id);
        return ids;
    }

    bool answer(RequestId id, Point now = start) { return core.ended(id, {}, false, now); }
    bool fail(RequestId id, Response response, Point now = start) {
        return core.ended(id, response, false, now);
    }
};

SchedulerOptions in_flight(unsigned max) {
    SchedulerOptions options;
    options.max_in_flight = max;
    return options;
}

std::unique_ptr<PrefixPlanner> radix(Release release) {
    RadixPlanner::Options options;
    options.release = release;
    return std::make_unique<RadixPlanner>(options);
}

const std::string header(300, 'h');

// What the core has to do in front of a FifoPlanner, written to be read.
struct Model {
    enum State { waiting, running, delayed, over };
    struct Item {
        State state = waiting;
        std::size_t bytes = 0;
        Point deadline = never, until = never;
        RetryState retry;
    };

    SchedulerOptions options;
    RetryTable table{options.retry};
    std::map<RequestId, Item> items;
    Ids queue;
    Point paused{};
    unsigned refusals = 0;
    bool refilling = true;
    evalrt::Limiter limiter{{options.max_in_flight, 0}};

    unsigned count(State state) const {
        return unsigned(std::count_if(items.begin(), items.end(),
                                      [&](const auto& it) { return it.second.state == state; }));
    }

    RequestId next(Point now) {
        std::vector<std::pair<Point, RequestId>> due;
        for (const auto& [id, item] : items)
            if (item.state == delayed && item.until <= now) due.emplace_back(item.until, id);
        std::sort(due.begin(), due.end());
        for (const auto& [at, id] : due) {
            items[id].state = waiting;
            queue.push_back(id);
        }
        const unsigned busy = count(running);
        const auto allowed = limiter.limit();
        if (queue.empty() || now < paused || busy >= allowed) return 0;
        if (busy > 0) {
            const auto free = allowed - busy;
            if (!refilling && free < options.refill && free < queue.size()) return 0;
        }
        const auto id = queue.front();
        queue.erase(queue.begin());
        items[id].state = running;
        refilling = busy + 1 < allowed;
        return id;
    }

    bool ended(RequestId id, const Response& response, bool delivered, Point now) {
        auto& item = items.at(id);
        if (!response.outcome) {
            table.succeeded(item.retry);
            limiter.answered(now);
            refusals = 0;
        }
        item.state = over;
        refilling = false;
        if (!response.outcome || response.outcome == Errc::cancelled || item.deadline <= now)
            return true;
        const auto verdict = table.decide(response, delivered, item.retry);
        if (!verdict.again) return true;
        item.state = delayed;
        item.until = now + verdict.delay;
        if (verdict.pause_server) {
            auto pause = response.retry_after ? verdict.delay : std::chrono::milliseconds(0);
            if (paused <= now) {
                limiter.overloaded(count(running) + 1);
                ++refusals;
                if (!response.retry_after) pause = table.pause(refusals);
            }
            paused = std::max(paused, now + pause);
        }
        return false;
    }

    void cancel(RequestId id) {
        std::erase(queue, id);
        items.at(id).state = over;
    }
};

using Random = std::minstd_rand;
unsigned below(Random& random, unsigned n) { return unsigned(random() / 7 % n); }

Response random_end(Random& random) {
    switch (below(random, 16)) {
    case 0: return failed(Errc::unreachable);
    case 1: {
        auto response = failed(Errc::unreachable, evalrt::Stage::sent);
        if (below(random, 2)) response.cause = evalrt::asio::error::eof;
        return response;
    }
    case 2: return failed(Errc::rate_limited);
    case 3: return asked_to_wait(Errc::overloaded, std::chrono::seconds(below(random, 150)));
    case 4: return failed(Errc::truncated);
    case 5: return failed(Errc::rejected);
    case 6: return failed(Errc::cancelled);
    case 7: return failed(Errc::exited);
    default: return {};
    }
}

SchedulerOptions random_scheduler(Random& random) {
    auto options = in_flight(1 + below(random, 6));
    options.refill = 1 + below(random, 5);
    options.retry.attempts = 1 + below(random, 4);
    options.retry.seed = below(random, 1000);
    options.breaker.failures = 0;
    return options;
}

// A random life of a core to the last request. `hear` is told of each thing that happened.
struct Life {
    Queue& queue;
    Random& random;
    Point now = start;
    Ids running;
    std::map<RequestId, int> ends; // of each that was submitted
    RequestId last = 0;
    double in_flight_seconds = 0, busy_seconds = 0;
    unsigned most = 0;
    Model* model = nullptr;
    bool deaths = false; // of the server, now and then
    bool down = false;

    RequestId any(const Ids& ids) { return ids[below(random, unsigned(ids.size()))]; }

    void pass(Point::duration time) {
        const double seconds = std::chrono::duration<double>(time).count();
        in_flight_seconds += seconds * double(running.size());
        busy_seconds += running.empty() ? 0 : seconds;
        now += time;
    }

    void submit() {
        ++last;
        ends[last] = 0;
        const auto deadline =
            below(random, 5) == 0 ? now + std::chrono::seconds(below(random, 30)) : never;
        std::string text(std::array{0u, 100u, 300u}[below(random, 3)], char('a' + last % 2));
        text += std::string(below(random, 100), char('c' + last));
        if (model) model->items[last] = {Model::waiting, text.size(), deadline, never, {}};
        if (model) model->queue.push_back(last);
        queue.submit(last, std::move(text), deadline);
    }

    void end(RequestId id, const Response& response, bool delivered = false) {
        std::erase(running, id);
        const auto attempts = queue.core.attempts(id);
        const bool over = queue.core.ended(id, Response(response), delivered, now);
        if (model) {
            REQUIRE(attempts == model->items.at(id).retry.attempts);
            REQUIRE(over == model->ended(id, response, delivered, now));
        }
        ends[id] += over;
    }

    void cancel(RequestId id) {
        switch (queue.core.cancel(id)) {
        case Place::waiting:
            REQUIRE(ends.at(id)++ == 0);
            if (model) model->cancel(id);
            break;
        case Place::running:
            REQUIRE(std::count(running.begin(), running.end(), id) == 1);
            end(id, failed(Errc::cancelled));
            break;
        case Place::unknown: REQUIRE((id > last || ends.at(id) == 1)); break;
        }
    }

    void pump(unsigned limit) {
        for (const auto id : queue.core.late(now)) cancel(id);
        for (bool more = true; more;) {
            const auto pick = queue.core.next(now);
            more = pick.has_value();
            if (model) REQUIRE((pick ? pick->id : 0) == model->next(now));
            if (!pick) break;
            REQUIRE(ends.at(pick->id) == 0);
            running.push_back(pick->id);
            REQUIRE(running.size() <= limit);
            REQUIRE(queue.core.running() == running.size());
            most = std::max(most, unsigned(running.size()));
        }
        check_wake();
    }

    // All that runs breaks, some of it noticed before the death, some after.
    void die() {
        const auto broken = [&] {
            return failed(below(random, 2) ? Errc::truncated : Errc::unreachable,
                          evalrt::Stage::sent);
        };
        queue.core.server_lost();
        for (const auto id : Ids(running)) end(id, broken(), below(random, 4) == 0);
        down = true;
    }

    // There is no need to ask again before wake(), and it is not in the past.
    void check_wake() {
        const auto wake = queue.core.wake(now);
        REQUIRE(wake > now);
        const bool open =
            std::any_of(ends.begin(), ends.end(), [](const auto& it) { return it.second == 0; });
        if (running.empty() && open && !down) REQUIRE(wake < never);
        if (!model) return;
        const auto before = std::min(wake, now + 1000h) - 1ns;
        REQUIRE(Model(*model).next(before) == 0);
        for (const auto& [id, item] : model->items)
            if (item.state != Model::over && item.deadline > now) REQUIRE(item.deadline > before);
    }

    void live(SchedulerOptions options) {
        for (int step = 0;; ++step) {
            REQUIRE(step < 3000);
            const bool closing = step > 80;
            const auto dice = below(random, 100);
            if (dice < 25) {
                if (!closing) submit();
            } else if (dice < 40) {
                if (running.empty()) continue;
                const auto id = any(running);
                queue.core.text(id, now);
            } else if (dice < 65) {
                if (running.empty()) continue;
                const auto id = any(running);
                end(id, random_end(random), below(random, 4) == 0);
            } else if (dice < 72) {
                if (last > 0) cancel(1 + below(random, unsigned(last) + 1));
            } else if (dice < 90) {
                pass(std::chrono::milliseconds(below(random, 3000)));
            } else if (down) {
                queue.core.server_back();
                down = false;
            } else if (deaths && dice < 92) {
                die();
            } else if (running.empty()) {
                const auto wake = queue.core.wake(now);
                if (wake > now && wake < never) pass(wake - now);
            }
            pump(std::max(options.max_in_flight, options.most_in_flight));
            if (closing && running.empty() && !down && queue.core.wake(now) == never) break;
        }
        for (const auto& [id, count] : ends) REQUIRE(count == 1);
        REQUIRE(queue.core.waiting() == 0);
        const auto stats = queue.core.stats(now);
        REQUIRE(stats.in_flight == 0);
        REQUIRE(stats.most_in_flight == most);
        REQUIRE(std::abs(stats.in_flight_seconds - in_flight_seconds) < 1e-6);
        REQUIRE(std::abs(stats.busy_seconds - busy_seconds) < 1e-6);
    }
};

} // namespace

TEST_CASE("a random life of a core goes as the naive model says") {
    for (unsigned seed = 1; seed <= 3000; ++seed) {
        CAPTURE(seed);
        Random random(seed);
        const auto options = random_scheduler(random);
        Queue queue(options);
        Model model{.options = options};
        Life life{.queue = queue, .random = random, .model = &model};
        life.live(options);
    }
}

TEST_CASE("with any planner each request ends once, within the limit, and nothing gets stuck") {
    for (unsigned seed = 1; seed <= 3000; ++seed) {
        CAPTURE(seed);
        Random random(seed);
        auto options = random_scheduler(random);
        RadixPlanner::Options plan;
        plan.release =
            std::array{Release::at_once, Release::first_text, Release::done}[below(random, 3)];
        plan.shared_bytes = 64;
        plan.leaders = below(random, 3);
        plan.patience = std::chrono::seconds(std::array{1, 5, 1000}[below(random, 3)]);
        if (plan.release == Release::done)
            options.commit_delay = std::chrono::milliseconds(below(random, 2) * 700);
        options.breaker.failures = below(random, 4);
        options.most_in_flight = below(random, 12);
        options.breaker.patience = std::chrono::seconds(below(random, 100));
        Queue queue(options, std::make_unique<RadixPlanner>(plan));
        Life{.queue = queue, .random = random, .deaths = seed % 2 == 0}.live(options);
    }
}

TEST_CASE("no more than max_in_flight are on the way") {
    Queue queue(in_flight(3));
    queue.submit(1, 5);
    CHECK(queue.next() == Ids{1, 2, 3});
    CHECK(queue.answer(2));
    CHECK(queue.next() == Ids{4});
    CHECK(queue.core.running() == 3);
    CHECK(queue.core.waiting() == 1);
    CHECK(queue.core.wake(start) == never);
}

TEST_CASE("a limit of nothing is a limit of one") {
    Queue queue(in_flight(0));
    queue.submit(1, 2);
    CHECK(queue.next() == Ids{1});
    CHECK(queue.answer(1));
    CHECK(queue.next() == Ids{2});
}

TEST_CASE("refill waits until that many places are free, and then fills all of them") {
    auto options = in_flight(4);
    options.refill = 3;
    Queue queue(options);
    queue.submit(1, 12);
    CHECK(queue.next() == Ids{1, 2, 3, 4});
    queue.answer(1);
    CHECK(queue.next().empty());
    queue.answer(2);
    CHECK(queue.next().empty());
    queue.answer(3);
    CHECK(queue.next() == Ids{5, 6, 7});
    queue.answer(5);
    CHECK(queue.next().empty());
}

TEST_CASE("the last few are sent although they do not fill a batch") {
    auto options = in_flight(4);
    options.refill = 3;
    Queue queue(options);
    queue.submit(1, 6);
    CHECK(queue.next() == Ids{1, 2, 3, 4});
    queue.answer(1);
    CHECK(queue.next().empty()); // two wait, one place is free
    queue.answer(2);
    CHECK(queue.next() == Ids{5, 6});
}

TEST_CASE("a refill larger than the limit means one batch after the other") {
    auto options = in_flight(2);
    options.refill = 100;
    Queue queue(options);
    queue.submit(1, 5);
    CHECK(queue.next() == Ids{1, 2});
    queue.answer(1);
    CHECK(queue.next().empty());
    queue.answer(2);
    CHECK(queue.next() == Ids{3, 4});
}

TEST_CASE("a batch that the planner held back is completed when it lets go") {
    auto options = in_flight(4);
    options.refill = 4;
    Queue queue(options, radix(Release::first_text));
    for (RequestId id = 1; id <= 5; ++id) queue.submit(id, header + std::to_string(id));
    CHECK(queue.next() == Ids{1});
    queue.core.text(1, start);
    CHECK(queue.next() == Ids{2, 3, 4});
}

TEST_CASE("a prompt that is said to be computed needs no text for others to follow") {
    Queue queue(in_flight(3), radix(Release::first_text));
    for (const RequestId id : {1, 2, 3}) queue.submit(id, header + std::to_string(id));
    CHECK(queue.next() == Ids{1});
    queue.core.computed(1, start);
    CHECK(queue.next() == Ids{2, 3});
    CHECK(queue.core.stats(start).pieces == 0);
    queue.core.computed(1, start); // once more, as a retried one of several choices is
    queue.core.text(1, start);
    CHECK(queue.core.stats(start).pieces == 1);
    queue.core.computed(99, start); // nobody's
    for (const RequestId id : {1, 2, 3}) queue.answer(id);
    queue.core.computed(1, start); // too late
    CHECK(queue.core.running() == 0);
}

TEST_CASE(
    "where a call of a tool is shown only when it is whole, pieces tell no rate of decoding") {
    for (const bool calls : {false, true}) {
        Queue queue(in_flight(2));
        queue.submit(1, 1);
        CHECK(queue.next() == Ids{1});
        Point now = start;
        queue.core.computed(1, now += 1s);
        for (int i = 0; i < 40; ++i) queue.core.text(1, now += 100ms);
        Response response;
        response.usage = {100, 0, calls ? 300 : 40};
        queue.core.ended(1, response, false, now);
        CHECK((queue.core.stats(now).decode_rate > 0) == !calls);
    }
}

TEST_CASE("a server whose texts come one after the other does not batch") {
    using Millis = evalrt::Timing::Millis;
    const auto run = [](unsigned limit, int together, std::int64_t tokens,
                        Millis last = Millis(100)) {
        Queue queue(in_flight(limit));
        queue.submit(1, 40);
        std::deque<RequestId> running;
        while (true) {
            for (const auto id : queue.next()) running.push_back(id);
            if (running.empty()) break;
            std::vector<RequestId> now;
            for (int i = 0; i < together && !running.empty(); ++i) {
                now.push_back(running.front());
                running.pop_front();
            }
            for (std::int64_t n = 0; n < tokens; ++n)
                for (const auto id : now) queue.core.text(id, start);
            Response response;
            response.usage.completion_tokens = tokens;
            response.timing = {Millis(0), Millis(1), last, Millis(800)};
            for (const auto id : now) queue.core.ended(id, response, false, start);
        }
        return queue.core.stats(start).one_by_one;
    };
    CHECK(run(8, 1, 20));
    CHECK_FALSE(run(8, 2, 20));
    CHECK_FALSE(run(3, 1, 20));            // too few were asked to say
    CHECK_FALSE(run(8, 1, 20, Millis(2))); // held back until its end
    CHECK_FALSE(run(8, 1, 2)); // an answer as short has ended before the next one begins
}

TEST_CASE("a planner is told how many places are free") {
    RadixPlanner::Options of;
    of.leaders = 1;
    Queue queue(in_flight(4), std::make_unique<RadixPlanner>(of));
    for (const RequestId id : {1, 2, 3}) queue.submit(id, header + std::to_string(id));
    for (const RequestId id : {4, 5}) queue.submit(id, std::string(50, char('0' + id)));
    CHECK(queue.next() == Ids{1, 4}); // two places are for those who wait for 1
    queue.core.text(1, start);
    CHECK(queue.next() == Ids{2, 3});
}

TEST_CASE("a failed attempt is made again after the table's delay, behind those that wait") {
    Queue queue(in_flight(1));
    queue.submit(1, 3);
    CHECK(queue.next() == Ids{1});
    CHECK_FALSE(queue.fail(1, failed(Errc::truncated)));
    CHECK(queue.core.attempts(1) == 1);
    CHECK(queue.core.waiting() == 3);
    CHECK(queue.next() == Ids{2});
    queue.answer(2);
    const auto wake = queue.core.wake(start);
    CHECK(wake >= start + 375ms);
    CHECK(wake <= start + 500ms);
    CHECK(queue.next() == Ids{3});
    queue.answer(3);
    CHECK(queue.next(wake - 1ns).empty());
    CHECK(queue.next(wake) == Ids{1});
    CHECK_FALSE(queue.fail(1, failed(Errc::truncated), wake));
    const auto second = queue.core.wake(wake);
    CHECK(second >= wake + 750ms);
    CHECK(queue.next(second) == Ids{1});
    CHECK(queue.core.attempts(1) == 2);
    CHECK(queue.fail(1, failed(Errc::truncated), second)); // the third was the last
    CHECK(queue.core.wake(second) == never);
}

TEST_CASE("what the table does not make again has ended") {
    for (const auto errc : {Errc::rejected, Errc::auth, Errc::context_too_long, Errc::exited,
                            Errc::cancelled, Errc::poison}) {
        Queue queue(in_flight(1));
        queue.submit(1);
        queue.next();
        CHECK(queue.fail(1, failed(errc)));
        CHECK(queue.core.wake(start) == never);
    }
    Queue queue(in_flight(1));
    queue.submit(1);
    queue.next();
    CHECK(queue.core.ended(1, failed(Errc::truncated), true, start)); // seen by the caller
}

TEST_CASE("a server that has too much to do is left alone as long as it asks") {
    Queue queue(in_flight(2));
    queue.submit(1, 4);
    CHECK(queue.next() == Ids{1, 2});
    CHECK_FALSE(queue.fail(1, asked_to_wait(Errc::rate_limited, 10s)));
    queue.answer(2, start + 1s);
    CHECK(queue.next(start + 1s).empty()); // nothing runs, and still
    const auto wake = queue.core.wake(start + 1s);
    CHECK(wake >= start + 10s);
    CHECK(wake < start + 11s);
    CHECK(queue.next(wake - 1ns).empty());
    CHECK(queue.next(wake) == Ids{3, 4});
}

TEST_CASE("a connection that broke before any byte is made again without counting") {
    auto options = in_flight(1);
    options.breaker.failures = 0;
    Queue queue(options);
    queue.submit(1);
    Point now = start;
    for (int i = 0; i < 8; ++i) {
        CHECK(queue.next(now) == Ids{1});
        CHECK_FALSE(queue.fail(1, failed(Errc::unreachable, evalrt::Stage::sent), now));
        CHECK(queue.core.attempts(1) == 0);
        now = queue.core.wake(now);
    }
    CHECK(queue.core.stats(now).resends == 8);
}

TEST_CASE("a deadline is named once, whatever its request does") {
    Queue queue(in_flight(2));
    queue.submit(1, "?", start + 10s); // will run
    queue.submit(2, "?", start + 10s); // will be delayed
    queue.submit(3, "?", start + 10s); // will wait
    queue.submit(4, "?", start + 10s); // will have ended
    queue.submit(5, "?", start + 99s); // has time
    CHECK(queue.next() == Ids{1, 2});
    queue.fail(2, asked_to_wait(Errc::overloaded, 60s));
    CHECK(queue.core.cancel(4) == Place::waiting);
    CHECK(queue.core.wake(start) == start + 10s);
    CHECK(queue.core.late(start + 10s - 1ns).empty());
    CHECK(queue.core.late(start + 10s) == Ids{1, 2, 3});
    CHECK(queue.core.late(start + 11s).empty());
    CHECK(queue.core.cancel(2) == Place::waiting);
    CHECK(queue.core.cancel(3) == Place::waiting);
    CHECK(queue.core.cancel(1) == Place::running);
    // Too late for another attempt, whatever it ended with.
    CHECK(queue.fail(1, failed(Errc::truncated), start + 11s));
    CHECK(queue.next(start + 70s) == Ids{5});
}

TEST_CASE("cancel gives up what waits, leaves alone what runs, and knows what has ended") {
    auto options = in_flight(2);
    options.commit_delay = 1s;
    Queue queue(options);
    queue.submit(1, 5);
    CHECK(queue.next() == Ids{1, 2});
    CHECK(queue.core.cancel(3) == Place::waiting);
    CHECK(queue.core.cancel(3) == Place::unknown);
    CHECK(queue.core.cancel(2) == Place::running);
    queue.fail(2, failed(Errc::truncated));
    CHECK(queue.core.cancel(2) == Place::waiting); // between two attempts
    CHECK(queue.core.cancel(2) == Place::unknown);
    queue.answer(1);
    CHECK(queue.core.cancel(1) == Place::unknown); // answered, though the planner has not heard
    CHECK(queue.next() == Ids{4, 5});
    CHECK(queue.core.cancel(99) == Place::unknown);
    CHECK(queue.core.waiting() == 0);
}

TEST_CASE("commit_delay holds the followers back while the leader's place is free at once") {
    auto options = in_flight(1);
    options.commit_delay = 200ms;
    Queue queue(options, radix(Release::done));
    queue.submit(1, header + "1", start + 100ms);
    queue.submit(2, header + "2");
    queue.submit(3, "short");
    CHECK(queue.next() == Ids{1});
    CHECK(queue.answer(1));
    CHECK(queue.next() == Ids{3});
    queue.answer(3);
    CHECK(queue.next().empty());
    CHECK(queue.core.late(start + 150ms) == Ids{1}); // of one that has ended: cancel knows
    CHECK(queue.core.cancel(1) == Place::unknown);
    CHECK(queue.core.wake(start + 150ms) == start + 200ms);
    CHECK(queue.next(start + 200ms - 1ns).empty());
    CHECK(queue.next(start + 200ms) == Ids{2});
}

TEST_CASE("a failed leader makes a follower the leader at once and comes back itself") {
    Queue queue(in_flight(4), radix(Release::first_text));
    for (RequestId id = 1; id <= 3; ++id) queue.submit(id, header + std::to_string(id));
    CHECK(queue.next() == Ids{1});
    CHECK_FALSE(queue.fail(1, failed(Errc::truncated)));
    CHECK(queue.next() == Ids{2});
    CHECK(queue.next(start + 1s).empty());
    queue.core.text(2, start + 1s);
    CHECK(queue.next(start + 1s).size() == 2);
}

TEST_CASE("there is nothing to wake up for while the server is left alone or the places are full") {
    RadixPlanner::Options plan;
    plan.patience = 5s;
    auto options = in_flight(3);
    options.refill = 2;
    Queue queue(options, std::make_unique<RadixPlanner>(plan));
    for (RequestId id = 1; id <= 4; ++id) queue.submit(id, header + std::to_string(id));
    queue.submit(5, "a");
    queue.submit(6, "b");
    CHECK(queue.next() == Ids{1, 5, 6});
    queue.answer(5);
    CHECK(queue.next().empty()); // one place, refill wants two
    CHECK(queue.core.wake(start) == never);
    queue.fail(6, asked_to_wait(Errc::overloaded, 60s));
    CHECK(queue.next().empty());
    CHECK(queue.core.wake(start) > start + 59s); // not when the planner loses its patience
    CHECK(queue.core.wake(start + 10s) > start + 59s);
}

TEST_CASE("the time in flight is added up over those in flight") {
    Queue queue(in_flight(2));
    CHECK(queue.core.stats(start).in_flight_seconds == 0);
    queue.submit(1, 3);
    queue.next(start + 1s); // two from here
    queue.answer(1, start + 3s);
    CHECK(queue.core.stats(start + 4s).in_flight_seconds == 5);
    queue.answer(2, start + 4s);
    queue.next(start + 10s);
    const auto stats = queue.core.stats(start + 11s);
    CHECK(stats.in_flight == 1);
    CHECK(stats.most_in_flight == 2);
    CHECK(stats.in_flight_seconds == 6);
    CHECK(stats.busy_seconds == 4);
}

// Deaths of the server

namespace {

Response broken() { return failed(Errc::truncated, evalrt::Stage::text); }

} // namespace

TEST_CASE("what ran when the server died is asked again, one at a time and before all others") {
    Queue queue(in_flight(3));
    queue.submit(1, 5);
    CHECK(queue.next() == Ids{1, 2, 3});
    queue.core.server_lost();
    for (const RequestId id : {1, 2, 3}) CHECK_FALSE(queue.fail(id, broken()));
    CHECK(queue.next().empty());
    CHECK(queue.core.wake(start) == never);
    queue.core.server_back();
    CHECK(queue.next() == Ids{1});
    CHECK(queue.answer(1));
    CHECK(queue.next() == Ids{2});
    CHECK(queue.answer(2));
    CHECK(queue.next() == Ids{3});
    CHECK(queue.answer(3));
    CHECK(queue.core.stats(start).reruns == 3);
    CHECK(queue.next() == Ids{4, 5});
}

TEST_CASE("the request of which the server dies twice fails, the others are answered") {
    Queue queue(in_flight(3));
    queue.submit(1, 3);
    CHECK(queue.next() == Ids{1, 2, 3});
    queue.core.server_lost();
    for (const RequestId id : {1, 2, 3}) queue.fail(id, broken());
    queue.core.server_back();
    CHECK(queue.next() == Ids{1});
    queue.core.server_lost();
    auto response = broken();
    CHECK(queue.core.ended(1, response, false, start));
    CHECK(response.outcome == Errc::poison);
    CHECK(response.detail.find("twice") != response.detail.npos);
    queue.core.server_back();
    CHECK(queue.next() == Ids{2});
    CHECK(queue.answer(2));
    CHECK(queue.next() == Ids{3});
    CHECK(queue.answer(3));
}

TEST_CASE("a death does not count as an attempt, and an answer clears the suspicion") {
    auto options = in_flight(1);
    options.retry.attempts = 1;
    Queue queue(options);
    queue.submit(1, 1);
    queue.next();
    queue.core.server_lost();
    CHECK_FALSE(queue.fail(1, broken()));
    CHECK(queue.core.attempts(1) == 0);
    queue.core.server_back();
    CHECK(queue.next() == Ids{1});
    // What the server itself said is no death.
    queue.core.server_lost();
    auto response = failed(Errc::context_too_long, evalrt::Stage::answered);
    CHECK(queue.core.ended(1, response, false, start));
    CHECK(response.outcome == Errc::context_too_long);
}

TEST_CASE("an answer whose text was seen is not asked again after a death") {
    Queue queue(in_flight(1));
    queue.submit(1, 1);
    queue.next();
    queue.core.server_lost();
    auto response = broken();
    CHECK(queue.core.ended(1, response, true, start));
    CHECK(response.outcome == Errc::exited);
}

TEST_CASE("a suspect is cancelled, and has its deadline, like any other") {
    Queue queue(in_flight(2));
    queue.submit(1, "?", start + 5s);
    queue.submit(2, 2);
    queue.next();
    queue.core.server_lost();
    queue.fail(1, broken());
    queue.fail(2, broken());
    CHECK(queue.core.late(start + 5s) == Ids{1});
    CHECK(queue.core.cancel(1) == Place::waiting);
    CHECK(queue.core.cancel(2) == Place::waiting);
    queue.core.server_back();
    CHECK(queue.next().empty());
    CHECK(queue.core.waiting() == 0);
}

TEST_CASE("a new server has an empty cache") {
    Queue queue(in_flight(4), radix(Release::first_text));
    const std::string shared(1000, 's');
    for (RequestId id = 1; id <= 3; ++id) queue.submit(id, shared + char('a' + id));
    CHECK(queue.next() == Ids{1});
    queue.core.text(1, start);
    CHECK(queue.answer(1));
    queue.core.server_lost();
    queue.core.server_back();
    CHECK(queue.next() == Ids{2}); // a leader again
    queue.core.text(2, start);
    CHECK(queue.next() == Ids{3});
}

// A server that is away

TEST_CASE("requests that could not be sent wait for the server, and only one of them looks") {
    auto options = in_flight(4);
    options.breaker = {.failures = 3, .first_pause = 1s, .longest_pause = 4s, .patience = 30s};
    Queue queue(options);
    queue.submit(1, 4);
    CHECK(queue.next().size() == 4);
    for (const RequestId id : {1, 2, 3, 4}) CHECK_FALSE(queue.fail(id, failed(Errc::unreachable)));
    auto now = start;
    for (int i = 0; i < 6; ++i) {
        now = queue.core.wake(now);
        CHECK(now < start + 30s);
        const auto sent = queue.next(now);
        REQUIRE(sent.size() <= 1);
        if (!sent.empty()) CHECK_FALSE(queue.fail(sent.front(), failed(Errc::unreachable), now));
    }
    CHECK(queue.core.attempts(1) == 0);
    CHECK_FALSE(queue.core.server_gone(now));
    now += 4s;
    const auto sent = queue.next(now);
    REQUIRE(sent.size() == 1);
    CHECK(queue.answer(sent.front(), now));
    CHECK(queue.next(now).size() == 3);
}

TEST_CASE("a server that answers nobody is looked at with those that were not sent yet") {
    auto options = in_flight(4);
    options.breaker = {.failures = 4, .first_pause = 1s, .longest_pause = 4s, .patience = 60s};
    Queue queue(options);
    queue.submit(1, 6);
    CHECK(queue.next() == Ids{1, 2, 3, 4});
    // The server closes on these bodies.
    for (const RequestId id : {1, 2, 3, 4})
        CHECK_FALSE(queue.fail(id, failed(Errc::unreachable, evalrt::Stage::sent)));
    CHECK(queue.next(start + 999ms).empty());
    CHECK(queue.core.wake(start + 999ms) == start + 1s);
    const auto now = start + 1s;
    CHECK(queue.next(now) == Ids{5});
    CHECK(queue.answer(5, now));
    CHECK(queue.next(now).size() == 4); // 6, and three of the others
}

TEST_CASE("what waits for a failed one does not keep it from being sent again") {
    // The least id first, and the others only when it has ended.
    struct InLine final : PrefixPlanner {
        std::set<RequestId> there;
        bool busy = false;
        void add(RequestId id, const evalrt::Prompt&) override { there.insert(id); }
        std::optional<evalrt::Pick> next(Point) override {
            if (busy || !there.contains(1)) return {};
            busy = true;
            there.erase(1);
            return evalrt::Pick{1, 1, 0, 0};
        }
        void progressed(RequestId, Stage stage, Point) override {
            if (stage != Stage::first_text) busy = false;
        }
        void remove(RequestId id) override { there.erase(id); }
    };
    auto options = in_flight(4);
    options.breaker = {.failures = 1, .first_pause = 1s, .longest_pause = 4s, .patience = 60s};
    Queue queue(options, std::make_unique<InLine>());
    queue.submit(1, 2);
    CHECK(queue.next() == Ids{1});
    CHECK_FALSE(queue.fail(1, failed(Errc::unreachable)));
    auto now = start;
    Ids sent;
    for (int i = 0; i < 8 && sent.empty(); ++i) {
        const auto wake = queue.core.wake(now);
        REQUIRE(wake > now); // it does not ask again and again
        REQUIRE(wake < start + 10s);
        sent = queue.next(now = wake);
    }
    CHECK(sent == Ids{1});
}

TEST_CASE("a server that stays away is gone") {
    auto options = in_flight(1);
    options.breaker = {.failures = 1, .patience = 30s};
    Queue queue(options);
    queue.submit(1, 1);
    queue.next();
    queue.fail(1, failed(Errc::unreachable));
    CHECK_FALSE(queue.core.server_gone(start + 29s));
    CHECK(queue.core.server_gone(start + 30s));
}

TEST_CASE("a server that still sends text is only short of connections") {
    auto options = in_flight(3);
    options.breaker.failures = 1;
    Queue queue(options);
    queue.submit(1, 3);
    queue.next();
    queue.core.text(1, start);
    queue.fail(2, failed(Errc::unreachable, evalrt::Stage::sent));
    CHECK(queue.next(start + 1s) == Ids{2});
}

TEST_CASE("what is not held against a request is asked again at once, and costs it nothing") {
    auto options = in_flight(1);
    options.retry.attempts = 1;
    Queue queue(options);
    queue.submit(1);
    for (int i = 0; i < 20; ++i) {
        REQUIRE(queue.next() == Ids{1});
        auto response = failed(Errc::rejected, evalrt::Stage::answered);
        response.elsewhere = true;
        CHECK_FALSE(queue.fail(1, response));
    }
    CHECK(queue.core.attempts(1) == 0);
    CHECK(queue.core.retry_budget() == options.retry.budget);
    REQUIRE(queue.next() == Ids{1});
    auto seen = failed(Errc::rejected, evalrt::Stage::text); // the caller cannot take it back
    seen.elsewhere = true;
    CHECK(queue.core.ended(1, seen, true, start));
}

TEST_CASE("a run does not wait for ever for a server that turns everything away") {
    for (const auto wait : {0s, 60s, 120s}) {
        Queue queue(in_flight(4));
        queue.submit(1, 200);
        Point now = start;
        Point answered = start;
        std::size_t ended = 0;
        int asked = 0;
        while (!queue.core.turned_away(now)) {
            const auto sent = queue.next(now);
            for (const auto id : sent) {
                if (++asked <= 20) {
                    ended += queue.answer(id, answered = now);
                    continue;
                }
                auto response = failed(asked % 2 ? Errc::overloaded : Errc::rate_limited);
                if (wait > 0s) response.retry_after = wait;
                ended += queue.fail(id, response, now);
            }
            if (!sent.empty()) continue;
            REQUIRE(queue.core.wake(now) > now);
            REQUIRE(queue.core.wake(now) != never);
            now = queue.core.wake(now);
            REQUIRE(now < start + 1h);
        }
        CHECK(now >= answered + 5min);
        CHECK(now <= answered + 5min + 2 * 121s);
        CHECK(ended < 200);
        CHECK_FALSE(queue.core.turned_away(now)); // said once
    }
    // Not while something is answered now and then, nor while something runs.
    Queue queue(in_flight(1));
    queue.submit(1, 30);
    Point now = start;
    for (int i = 0; i < 150 && queue.core.waiting() > 0; ++i) {
        auto sent = queue.next(now);
        while (sent.empty()) sent = queue.next(now = queue.core.wake(now));
        CHECK_FALSE(queue.core.turned_away(now + 1h));
        if (i % 8 == 0)
            queue.answer(sent.front(), now);
        else
            queue.fail(sent.front(), asked_to_wait(Errc::overloaded, 30s), now);
        CHECK_FALSE(queue.core.turned_away(now));
    }
}

TEST_CASE("an overloaded server gets fewer, and then one more a round") {
    Queue queue(in_flight(8));
    queue.submit(1, 60);
    CHECK(queue.next().size() == 8);
    for (RequestId id = 1; id <= 8; ++id)
        CHECK_FALSE(queue.fail(id, asked_to_wait(Errc::overloaded, 1s)));
    CHECK(queue.next().empty());
    auto now = start + 2s;
    auto sent = queue.next(now);
    CHECK(sent.size() == 6); // once for all that were turned away together
    for (unsigned round = 7; round <= 8; ++round) {
        for (const auto id : sent) CHECK(queue.answer(id, now));
        sent = queue.next(now);
        CHECK(sent.size() == round);
    }
    for (const auto id : sent) CHECK(queue.answer(id, now));
    CHECK(queue.next(now).size() == 8);
}

TEST_CASE("a request that is always turned away does not hold up the others") {
    Queue queue(in_flight(1));
    queue.submit(1, 40);
    Point now = start;
    unsigned answered = 0;
    bool failed_for_good = false;
    for (int i = 0; i < 1000 && answered < 39; ++i) {
        const auto sent = queue.next(now);
        if (sent.empty()) {
            now = queue.core.wake(now);
            continue;
        }
        now += 10ms;
        if (sent.front() == 1)
            failed_for_good |= queue.fail(1, failed(Errc::rate_limited), now);
        else
            answered += queue.answer(sent.front(), now);
    }
    CHECK(answered == 39);
    CHECK(now - start < 10s);
    CHECK_FALSE(failed_for_good);
}

TEST_CASE("more are let in while that brings more tokens a second") {
    auto options = in_flight(2);
    options.most_in_flight = 16;
    Queue queue(options);
    queue.submit(1, 1000);
    Point now = start;
    std::vector<RequestId> running = queue.next(now);
    for (int step = 0; step < 100; ++step) { // a step gives each a token and takes 50 ms
        now += 50ms;
        for (const auto id : running) queue.core.text(id, now);
        for (const auto id : queue.next(now)) running.push_back(id);
    }
    CHECK(running.size() == 16);
    CHECK(queue.core.stats(now).limit == 16);
}

TEST_CASE("answers that come in one piece show what the limit is worth, too") {
    auto options = in_flight(2);
    options.most_in_flight = 16;
    Queue queue(options);
    queue.submit(1, 4000);
    Point now = start;
    std::vector<RequestId> running = queue.next(now);
    for (int step = 0; step < 100; ++step) {
        now += 100ms;
        for (const auto id : std::exchange(running, {})) {
            Response response;
            response.usage.completion_tokens = 10;
            CHECK(queue.core.ended(id, response, false, now));
            for (const auto next : queue.next(now)) running.push_back(next);
        }
    }
    CHECK(queue.core.stats(now).limit == 16);
}

// Two servers that are alike, and who runs where.
struct Pair {
    explicit Pair(SchedulerOptions options) : core(planner, (options.servers = 2, options)) {}

    void submit(RequestId first, RequestId last) {
        for (auto id = first; id <= last; ++id) {
            texts[id] = std::to_string(id);
            core.submit(id, {"d", {texts[id]}, {}}, never);
        }
    }
    std::array<Ids, 2> next(Point now = start) { // what is sent now, to each
        std::array<Ids, 2> sent;
        while (const auto pick = core.next(now)) {
            sent.at(pick->server).push_back(pick->id);
            running.at(pick->server).push_back(pick->id);
        }
        return sent;
    }
    RequestId first(unsigned server) {
        const auto id = running.at(server).front();
        running.at(server).erase(running.at(server).begin());
        return id;
    }
    void answer(unsigned server, Point now = start) { core.ended(first(server), {}, false, now); }
    void fail(unsigned server, Response response, Point now = start) {
        core.ended(first(server), response, false, now);
    }

    evalrt::detail::ReplicaPlanner planner{2, {}};
    SchedulerCore core;
    std::map<RequestId, std::string> texts;
    std::array<Ids, 2> running;
};

TEST_CASE("each of several servers has the limit, and one that refuses does not hold the others") {
    Pair pair(in_flight(4));
    pair.submit(1, 100);
    auto sent = pair.next();
    CHECK(sent[0].size() == 4);
    CHECK(sent[1].size() == 4);
    CHECK(pair.core.stats(start).limit == 8);
    pair.fail(0, asked_to_wait(Errc::rate_limited, 10s));
    pair.answer(1);
    sent = pair.next();
    CHECK(sent[0].empty()); // it has asked for a pause
    CHECK(sent[1].size() == 1);
    CHECK(pair.core.stats(start).limit == 3 + 4);
    pair.answer(0); // its others come through, and it gets no more
    pair.answer(0);
    CHECK(pair.next()[0].empty());
    CHECK(pair.core.wake(start) <= start + 11s);
    Point now = start + 11s;
    sent = pair.next(now);
    CHECK(sent[0].size() == 2); // three at once
    CHECK(sent[1].empty());
    for (int i = 0; i < 20; ++i) { // it takes its answers for a sign
        pair.answer(0, now);
        pair.next(now);
    }
    CHECK(pair.core.stats(now).limit == 8);
}

TEST_CASE(
    "what one of several servers turns away does not wait for it, and it gets nothing so long") {
    Pair pair(in_flight(1));
    pair.submit(1, 2);
    pair.next();
    const auto away = pair.running[0].front();
    pair.fail(0, asked_to_wait(Errc::rate_limited, 25s));
    pair.answer(1, start + 1s);
    auto sent = pair.next(start + 1s);
    CHECK(sent[1] == Ids{away});
    // Moved by who knows the servers: the pause is the server's all the same.
    auto moved = asked_to_wait(Errc::rate_limited, 30s);
    moved.elsewhere = true;
    pair.fail(1, moved, start + 2s);
    CHECK(pair.next(start + 20s) == std::array<Ids, 2>{});
    sent = pair.next(start + 26s);
    CHECK((sent[0] == Ids{away} && sent[1].empty()));
    // Only the time counts in which nobody took it.
    for (Point now = start + 27s; now < start + 140s; now += 1s) {
        const unsigned server = pair.running[0].empty();
        auto busy = asked_to_wait(Errc::rate_limited, 2s);
        CHECK_FALSE(pair.core.ended(pair.first(server), busy, false, now));
        while (pair.running[0].empty() && pair.running[1].empty()) pair.next(now += 1s);
    }
}

TEST_CASE("each of several servers climbs by what it brings itself") {
    auto options = in_flight(2);
    options.most_in_flight = 16;
    Pair pair(options);
    pair.submit(1, 4000);
    Point now = start;
    pair.next(now);
    // The first brings a token a step to each, however many; the second four in all.
    for (int step = 0; step < 400; ++step) {
        now += 50ms;
        for (const auto id : pair.running[0]) pair.core.text(id, now);
        for (std::size_t i = 0; i < 4; ++i)
            if (const auto& of = pair.running[1]; !of.empty())
                pair.core.text(of[(std::size_t(step) * 4 + i) % of.size()], now);
        pair.next(now);
    }
    CHECK(pair.running[0].size() == 16);
    CHECK(pair.running[1].size() < 12);
}

TEST_CASE("a server that is away is asked one at a time, and the others as ever") {
    auto options = in_flight(3);
    options.breaker.failures = 2;
    options.breaker.patience = 60s;
    Pair pair(options);
    pair.submit(1, 60);
    pair.next();
    for (int i = 0; i < 2; ++i) {
        pair.planner.unreachable(0);
        pair.fail(0, failed(Errc::unreachable));
    }
    pair.answer(1);
    CHECK(pair.next()[1].size() == 1);
    CHECK_FALSE(pair.core.server_gone(start));
    Point now = start + 1h; // nobody is gone as long as one answers
    CHECK_FALSE(pair.core.server_gone(now));
    for (int i = 0; i < 3; ++i) pair.fail(1, failed(Errc::unreachable), now);
    CHECK_FALSE(pair.core.server_gone(now));
    CHECK(pair.core.server_gone(now + 61s));
}

TEST_CASE("a run that is not worth going on with says so, while something waits") {
    auto options = in_flight(1);
    options.stop = {.refused = 2, .alike = 20};
    Queue queue(options);
    queue.submit(1, 3);
    for (const RequestId id : {1, 2}) {
        CHECK_FALSE(queue.core.stop_reason());
        CHECK(queue.next() == Ids{id});
        CHECK(queue.fail(id, failed(Errc::auth)));
    }
    REQUIRE(queue.core.stop_reason());
    CHECK(queue.core.stop_reason()->first == Errc::auth);

    Queue last(options);
    last.submit(1, 2);
    for (const RequestId id : {1, 2}) {
        last.next();
        last.fail(id, failed(Errc::auth));
    }
    CHECK_FALSE(last.core.stop_reason()); // nothing is left
}

TEST_CASE("a pick says what held the queue back before") {
    auto options = in_flight(2);
    evalrt::RadixPlanner planner;
    evalrt::detail::SchedulerCore core(planner, options);
    const std::string text(400, 't');
    const auto submit = [&](RequestId id, std::string_view prompt) {
        core.submit(id, {"d", {prompt}, {}}, Point::max());
    };
    const Point now{1h};
    for (RequestId id = 1; id <= 4; ++id) submit(id, text);
    auto pick = core.next(now);
    REQUIRE(pick);
    CHECK(pick->gate.empty());
    CHECK_FALSE(core.next(now));
    core.text(1, now);
    pick = core.next(now);
    REQUIRE(pick);
    CHECK(pick->gate == "leader");
    CHECK_FALSE(core.next(now));
    core.ended(1, evalrt::Response(), false, now);
    pick = core.next(now);
    REQUIRE(pick);
    CHECK(pick->gate == "limit");
}

TEST_CASE("the best rates of a run are those of a burst and of a second without prefill") {
    evalrt::detail::Rates rates;
    Point now{1h};
    CHECK(rates.prefill() == 0);
    CHECK(rates.decode() == 0);
    const auto a = rates.sent(now);
    const auto b = rates.sent(now += 100ms);
    CHECK(a == b);
    const auto first_text = [](evalrt::detail::Rates& of, Point at) {
        of.computed(at);
        of.first_text(100, at);
    };
    first_text(rates, now += 400ms);
    first_text(rates, now += 500ms); // 1 s after the first was sent
    for (int i = 0; i < 60; ++i) rates.text(now += 50ms);
    CHECK(std::abs(rates.decode() - 20) < 1.5);
    rates.ended(a, true, 161, 300, now);
    CHECK(rates.prefill() == 0); // the other one's tokens are not known yet
    rates.ended(b, true, 101, 700, now);
    CHECK(rates.prefill() == 1000);
    const auto c = rates.sent(now);
    first_text(rates, now += 1ms);
    rates.ended(c, true, 101, 10, now); // too short to tell
    const auto d = rates.sent(now);
    rates.ended(d, false, {}, {}, now += 1ms); // failed
    const auto e = rates.sent(now);
    first_text(rates, now += 1s);
    rates.ended(e, true, 101, 500, now);
    CHECK(rates.prefill() == 1000);
    CHECK(rates.pieces() == 64);
    // A call of a tool: computed after a second, its one text comes at its end.
    const auto f = rates.sent(now);
    rates.computed(now += 1s);
    rates.first_text(100, now += 9s);
    rates.ended(f, true, 101, 2000, now);
    CHECK(rates.prefill() == 2000);
    CHECK(std::abs(rates.decode() - 20) < 1.5);
    for (int i = 0; i < 5; ++i) rates.text(now += 3s); // slow: nothing better than before
    CHECK(std::abs(rates.decode() - 20) < 1.5);
    evalrt::detail::Rates slow;
    slow.sent(now);
    first_text(slow, now);
    for (int i = 0; i < 20; ++i) slow.text(now += 500ms);
    CHECK(std::abs(slow.decode() - 2) < 0.2);
}

TEST_CASE("the best rate of decoding is that at the context that the answers had") {
    using evalrt::detail::Rates;
    // One answer at a time.
    struct Server {
        Rates& rates;
        Point now{1h};
        void answer(double context, int pieces, std::chrono::milliseconds each) {
            const auto burst = rates.sent(now);
            rates.computed(now);
            rates.first_text(context, now);
            for (int i = 1; i < pieces; ++i) rates.text(now += each);
            rates.ended(burst, true, context + pieces, {}, now);
        }
    };
    const auto near = [](double a, double b) { return std::abs(a / b - 1) < 0.05; };
    Rates rates;
    Server server{rates};
    server.answer(1000, 300, 10ms);
    CHECK(near(rates.decode(), 100));
    server.answer(9000, 300, 90ms); // on average 5150 tokens, 51 ms each
    CHECK(near(rates.decode(), 1000 / 50.0));
    server.answer(9000, 20, 500ms); // slower than need be: no matter
    CHECK(rates.decode() < 1000 / 50.0);
    CHECK(rates.decode() > 1000 / 54.0);
    server.answer(3000, 3000, 10ms); // nor need the one at 1000 tokens be slower than this
    CHECK(rates.decode() > 1000 / 30.0);
    // Where no second is as long, what the longest showed.
    Rates many;
    Server longer{many};
    longer.answer(1000, 205, 10ms);
    longer.answer(100'000, 14, 10ms);
    CHECK(near(many.decode(), 100));
}

TEST_CASE("decoding beside prompts shows a rate, too, and a moment none") {
    evalrt::detail::Rates rates;
    Point now{1h};
    const auto first = rates.sent(now);
    rates.computed(now);
    rates.first_text(100, now);
    rates.sent(now); // its prompt takes all the time
    for (int i = 0; i < 100; ++i) rates.text(now += 20ms);
    CHECK(std::abs(rates.decode() / 50 - 1) < 0.05);
    CHECK(rates.prefill() == 0);
    rates.ended(first, true, 201, 1000, now);
    evalrt::detail::Rates quick;
    const auto burst = quick.sent(now);
    quick.computed(now += 1ms);
    quick.first_text(100, now);
    for (int i = 0; i < 100; ++i) quick.text(now += std::chrono::microseconds(1));
    quick.ended(burst, true, 201, 1000, now);
    CHECK(quick.decode() == 0); // a buffer that was emptied, for all we know
    CHECK(quick.prefill() == 0);
}

TEST_CASE("answers that end all the time do not keep the limit down") {
    auto options = in_flight(16);
    options.most_in_flight = 64;
    Queue queue(options);
    queue.submit(1, 4000);
    Point now = start;
    std::deque<RequestId> running;
    const auto fill = [&] {
        while (const auto pick = queue.core.next(now)) running.push_back(pick->id);
    };
    // Ten tokens each, one after the other; when one ends, another one speaks before the place is
    // taken again.
    std::map<RequestId, int> tokens;
    unsigned most = 0;
    for (fill(); !running.empty(); fill()) {
        most = std::max(most, queue.core.stats(now).limit);
        now += 10ms;
        std::vector<RequestId> ended;
        for (const auto id : running) {
            queue.core.text(id, now);
            if (++tokens[id] < 10 + int(id % 7)) continue;
            queue.core.ended(id, Response(), false, now);
            ended.push_back(id);
            break;
        }
        for (const auto id : running)
            if (ended.empty() || id != ended.front()) queue.core.text(id, now);
        for (const auto id : ended) std::erase(running, id);
    }
    CHECK(most == 64);
}

TEST_CASE("texts that were held back to come at once are not one after the other") {
    using Millis = evalrt::Timing::Millis;
    const auto run = [](std::chrono::milliseconds text) {
        Queue queue(in_flight(8));
        queue.submit(1, 80);
        Point now = start;
        for (auto ids = queue.next(now); !ids.empty(); ids = queue.next(now))
            for (const auto id : ids) {
                now += 100ms - text;
                for (int i = 0; i < 10; ++i) queue.core.text(id, now += text / 10);
                Response response;
                response.usage.completion_tokens = 10;
                response.timing = {Millis(0), Millis(700), Millis(720), Millis(800)};
                queue.core.ended(id, response, false, now);
            }
        return queue.core.stats(now).one_by_one;
    };
    CHECK(run(90ms)); // of 100
    CHECK_FALSE(run(10ms));
}
