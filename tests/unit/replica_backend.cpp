#include "replica_backend.hpp"

#include "evalrt/request_scheduler.hpp"
#include "support/catch.hpp"
#include "support/patience.hpp"
#include "support/scripted_backend.hpp"

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/io_context.hpp>

#include <list>
#include <random>

using namespace std::chrono_literals;
using namespace evalrt;
using detail::ReplicaBackend;
using detail::ReplicaPlanner;
using tests::ScriptedBackend;

namespace {

struct Asked {
    asio::cancellation_signal cancel;
    int completions = 0;
    error_code code;
    Response response;
};

Response failure(Errc errc, int status, std::string words, Stage stage = Stage::answered) {
    Response response;
    response.outcome = errc;
    response.status = status;
    response.detail = std::move(words);
    response.stage = stage;
    return response;
}

// A run on several servers that a test plays.
struct Setup {
    explicit Setup(std::size_t servers = 2, ReplicaPlanner::Options planning = {},
                   SchedulerOptions scheduling = {})
        : planner(std::make_shared<ReplicaPlanner>(servers, planning)) {
        std::vector<Backend*> list;
        for (std::size_t i = 0; i < servers; ++i)
            list.push_back(&server.emplace_back(io.get_executor()));
        replicas.emplace(
            list, planner,
            [this](std::size_t n, Errc, const std::string& words) {
                out.push_back(std::to_string(n) + " " + words);
            },
            [this](std::size_t n, Errc, const std::string& words) {
                held.push_back(std::to_string(n) + " " + words);
            },
            1ms);
        scheduling.servers = unsigned(servers);
        scheduling.retry.base = 0ms;
        scheduler.emplace(*replicas, *planner, BackendRow(), scheduling);
    }

    Asked& ask(bool stream = false, const std::string& session = {}) {
        Request request;
        request.body = R"({"messages": [{"role": "user", "content": ")" +
                       std::to_string(all.size()) + R"("}]})";
        request.stream = stream;
        request.session = session;
        auto& asked = all.emplace_back();
        scheduler->async_complete(
            std::move(request), [](std::string_view) {},
            asio::bind_cancellation_slot(asked.cancel.slot(),
                                         [&asked](error_code code, Response response) {
                                             ++asked.completions;
                                             asked.code = code;
                                             asked.response = std::move(response);
                                         }));
        run();
        return asked;
    }

    void run() {
        io.restart();
        io.poll();
    }

    template <class What>
    void until(What what) {
        const auto deadline = Clock::now() + tests::patience;
        while (!what()) {
            REQUIRE(Clock::now() < deadline);
            io.restart();
            io.run_one_for(10ms);
        }
    }

    /// The only server that is asked just now.
    std::size_t busy() {
        std::size_t found = server.size(), count = 0;
        for (std::size_t i = 0; i < server.size(); ++i)
            if (!at(i).pending.empty()) found = i, ++count;
        REQUIRE(count == 1);
        return found;
    }

    ScriptedBackend& at(std::size_t n) { return *std::next(server.begin(), long(n)); }

    void end(std::size_t n, Response response = {}) {
        at(n).end(at(n).pending.begin()->first, std::move(response));
        run();
    }

    /// So that it is known how long answers take, and both servers are well.
    void answer_some() {
        for (int i = 0; i < 3; ++i) {
            ask();
            end(busy());
        }
        planner->alive(0), planner->alive(1);
    }

    asio::io_context io;
    std::list<ScriptedBackend> server;
    std::shared_ptr<ReplicaPlanner> planner;
    std::vector<std::string> out, held;
    std::optional<ReplicaBackend> replicas;
    std::optional<RequestScheduler> scheduler;
    std::list<Asked> all;
};

} // namespace

TEST_CASE("what one server refuses another one answers, and nobody knows") {
    for (const int status : {400, 422, 413, 0}) {
        Setup setup;
        auto& asked = setup.ask();
        const auto first = setup.busy();
        setup.end(first, status ? failure(Errc::rejected, status, "not for me")
                                : failure(Errc::context_too_long, 400, "too long for me"));
        CHECK(asked.completions == 0);
        REQUIRE(setup.busy() == 1 - first);
        setup.end(1 - first);
        CHECK(asked.completions == 1);
        CHECK_FALSE(asked.response.outcome);
        CHECK(asked.response.attempts == 1);
        CHECK(setup.replicas->count(first).failed == 1);
        CHECK(setup.replicas->count(1 - first).answered == 1);
        CHECK(setup.planner->count(first).refused == 1);
    }
}

TEST_CASE("what two servers refuse has failed once, in a server's own words") {
    Setup setup(3);
    setup.planner->alive(0), setup.planner->alive(1), setup.planner->alive(2);
    auto& asked = setup.ask();
    const auto first = setup.busy();
    setup.end(first, failure(Errc::rejected, 400, "no"));
    const auto second = setup.busy();
    CHECK(second != first);
    setup.end(second, failure(Errc::rejected, 400, "no, indeed"));
    CHECK(asked.completions == 1);
    CHECK(asked.response.outcome == Errc::rejected);
    CHECK(asked.response.detail == "no, indeed");
    CHECK(asked.response.attempts == 1);
    CHECK(setup.out.empty());
}

TEST_CASE("what is refused before it is sent is no server's word") {
    Setup setup;
    for (int i = 0; i < 10; ++i) {
        auto& asked = setup.ask();
        setup.end(setup.busy(), failure(Errc::rejected, 0, "no images", Stage::none));
        CHECK(asked.response.detail == "no images");
    }
    CHECK(setup.at(0).calls + setup.at(1).calls == 10);
    CHECK(setup.out.empty());
}

TEST_CASE("the first server that refuses everything is left out, and is said to do so") {
    SchedulerOptions scheduling;
    scheduling.max_in_flight = 2;
    scheduling.stop = {3, 20};
    Setup setup(2, {}, scheduling);
    for (int i = 0; i < 60; ++i) setup.ask();
    while (!setup.at(0).pending.empty() || !setup.at(1).pending.empty())
        if (setup.at(0).pending.empty())
            setup.end(1);
        else
            setup.end(0, failure(Errc::rejected, 422, "HTTP 422: no such model here"));
    for (const auto& it : setup.all) {
        CHECK(it.completions == 1);
        CHECK_FALSE(it.response.outcome);
    }
    CHECK(setup.out ==
          std::vector<std::string>{
              "0 it refuses one request after the other: HTTP 422: no such model here"});
    CHECK(setup.at(0).calls <= 4);
    CHECK_FALSE(setup.scheduler->stopped());
}

TEST_CASE("a server that begins to refuse is said to be held, once, and it costs nothing") {
    SchedulerOptions scheduling;
    scheduling.max_in_flight = 20;
    Setup setup(2, {}, scheduling);
    setup.planner->alive(0), setup.planner->alive(1);
    for (int i = 0; i < 60; ++i) setup.ask();
    for (int i = 0; i < 15; ++i) setup.end(0, failure(Errc::rejected, 400, "HTTP 400: no"));
    CHECK(setup.held == std::vector<std::string>{"0 HTTP 400: no"});
    CHECK(setup.out.empty());
    const auto before = setup.at(0).calls;
    while (!setup.at(1).pending.empty() && setup.at(0).calls == before) setup.end(1);
    CHECK(setup.at(0).calls > before); // what it refused has been judged
    while (!setup.at(0).pending.empty() || !setup.at(1).pending.empty())
        setup.end(setup.at(0).pending.empty());
    CHECK(setup.held.size() == 1);
    CHECK(setup.planner->count(0).refused == 15);
    for (const auto& it : setup.all) CHECK((it.completions == 1 && !it.response.outcome));
}

TEST_CASE("what a server fails, also a conversation's, is asked of another one") {
    for (const bool talk : {false, true})
        for (const auto& words :
             {failure(Errc::timed_out, 0, "late"),
              failure(Errc::unreachable, 0, "closed", Stage::sent),
              failure(Errc::truncated, 200, "cut short", Stage::text),
              failure(Errc::malformed, 200, "no JSON"), failure(Errc::rejected, 500, "oh")}) {
            CAPTURE(words.detail, talk);
            SchedulerOptions scheduling;
            scheduling.retry.attempts = 1;
            Setup setup(2, {}, scheduling);
            setup.planner->alive(0), setup.planner->alive(1);
            auto& asked = setup.ask(false, talk ? "talk" : "");
            const auto first = setup.busy();
            setup.end(first, words);
            REQUIRE(setup.busy() == 1 - first);
            setup.end(1 - first);
            CHECK(asked.completions == 1);
            CHECK_FALSE(asked.response.outcome);
            CHECK(asked.response.attempts == 1);
        }
}

TEST_CASE("what two servers fail has failed, and so has what a caller has seen a part of") {
    SchedulerOptions scheduling;
    scheduling.retry.attempts = 1;
    for (const auto& words : {failure(Errc::timed_out, 0, "late"),
                              failure(Errc::truncated, 200, "cut short", Stage::text),
                              failure(Errc::malformed, 200, "no JSON", Stage::text),
                              failure(Errc::rejected, 200, "oh", Stage::text)}) {
        CAPTURE(words.detail);
        Setup setup(2, {}, scheduling);
        setup.planner->alive(0), setup.planner->alive(1);
        auto& asked = setup.ask();
        const auto first = setup.busy();
        setup.end(first, words);
        setup.end(1 - first, words);
        CHECK(asked.completions == 1);
        CHECK(asked.response.outcome == words.outcome);

        auto& seen = setup.ask(true);
        const auto server = setup.busy();
        setup.at(server).text(setup.at(server).pending.begin()->first, "To be");
        setup.end(server, words);
        CHECK(seen.completions == 1);
        CHECK(seen.response.outcome == words.outcome);
    }
}

TEST_CASE("a pause that is longer than one waits for is not waited for where another server is") {
    for (const bool talk : {false, true})
        for (const bool proven : {false, true}) {
            Setup setup;
            setup.planner->alive(0), setup.planner->alive(1);
            auto& asked = setup.ask(false, talk ? "talk" : "");
            const auto first = setup.busy();
            if (!proven) setup.planner->let_in(first);
            auto busy = failure(Errc::rate_limited, 429, "in a minute");
            busy.retry_after = 60s;
            setup.end(first, std::move(busy));
            REQUIRE(setup.busy() == 1 - first);
            CHECK(setup.out == std::vector<std::string>{std::to_string(first) + " in a minute"});
            setup.end(1 - first);
            CHECK(asked.completions == 1);
            CHECK_FALSE(asked.response.outcome);
        }
}

TEST_CASE("a request is cancelled at the server that has it, and counted so") {
    Setup setup;
    auto& asked = setup.ask();
    const auto server = setup.busy();
    asked.cancel.emit(asio::cancellation_type::total);
    setup.run();
    CHECK(asked.completions == 1);
    CHECK(asked.response.outcome == Errc::cancelled);
    CHECK(setup.at(server).cancelled == 1);
    CHECK(setup.replicas->count(server).cancelled == 1);
    CHECK(setup.replicas->count(server).failed == 0);
    setup.io.restart();
    setup.io.run(); // nothing is left to happen
}

TEST_CASE("what a silent server has is taken from it and asked of another") {
    ReplicaPlanner::Options planning;
    planning.silence = 1ms;
    Setup setup(2, planning);
    setup.answer_some();
    auto& asked = setup.ask();
    const auto hung = setup.busy();
    setup.until([&] { return setup.at(hung).cancelled == 1; });
    setup.run();
    CHECK(asked.completions == 0);
    REQUIRE(setup.busy() == 1 - hung);
    CHECK(setup.out ==
          std::vector<std::string>{std::to_string(hung) + " it shows no sign of life"});
    CHECK_FALSE(setup.planner->up(hung));
    setup.end(1 - hung);
    CHECK(asked.completions == 1);
    CHECK_FALSE(asked.response.outcome);
    CHECK(asked.response.attempts == 1);
    setup.io.restart();
    setup.io.run();
}

TEST_CASE("what a caller has seen a part of stays on a silent server") {
    ReplicaPlanner::Options planning;
    planning.silence = 1ms;
    Setup setup(2, planning);
    setup.answer_some();
    auto& asked = setup.ask(true);
    const auto hung = setup.busy();
    setup.at(hung).text(setup.at(hung).pending.begin()->first, "To be");
    setup.until([&] { return !setup.planner->up(hung); });
    setup.run();
    CHECK(setup.at(hung).cancelled == 0);
    setup.end(hung);
    CHECK(asked.completions == 1);
    CHECK_FALSE(asked.response.outcome);
    CHECK(setup.planner->up(hung)); // it has come to life
}

namespace {

enum class Health {
    well,
    refuses,
    turns_away,
    fails,
    cuts, // after a text
    hangs_up_on_half,
    wrong_key,
    dead,
    hung,
    count
};

// What a server says to one of those that it has, `bad` being the item's own fault.
std::optional<Response> said(Health health, bool bad, std::size_t item, unsigned salt) {
    switch (health) {
    case Health::hung: return {};
    case Health::turns_away: {
        auto busy = failure(Errc::overloaded, 503, "busy");
        if (salt % 4 == 0) busy.retry_after = 3ms; // longer than one waits for
        return busy;
    }
    case Health::fails:
        return salt % 2 ? failure(Errc::rejected, 500, "oh") : failure(Errc::malformed, 200, "eh");
    case Health::cuts:
        return salt % 2 ? failure(Errc::truncated, 200, "cut", Stage::text)
                        : failure(Errc::rejected, 200, "oh", Stage::text);
    case Health::hangs_up_on_half:
        if (item % 2) return failure(Errc::unreachable, 0, "closed", Stage::sent);
        break;
    case Health::wrong_key: return failure(Errc::auth, 401, "who are you");
    case Health::dead:
        return failure(Errc::unreachable, 0, "gone", salt % 2 ? Stage::none : Stage::sent);
    case Health::refuses:
        return salt % 2 ? failure(Errc::rejected, 400, "not so")
                        : failure(Errc::context_too_long, 400, "too long");
    default: break;
    }
    if (bad) return failure(Errc::rejected, 422, "bad");
    Response response;
    response.stage = Stage::text;
    response.status = 200;
    return response;
}

} // namespace

TEST_CASE("any course of sickness: each request ends once, and well where one server is well") {
    std::mt19937 random(5);
    for (int round = 0; round < 40; ++round) {
        CAPTURE(round);
        const std::size_t servers = 2 + random() % 3;
        ReplicaPlanner::Options planning;
        planning.silence = planning.busy = 20ms;
        planning.pause = planning.longest_pause = planning.wait = planning.asked = 1ms;
        SchedulerOptions scheduling;
        scheduling.max_in_flight = 1 + unsigned(random() % 6);
        scheduling.retry.attempts = 2; // 1: no patience with those that are busy
        scheduling.retry.budget = 1;   // no other retry
        scheduling.retry.most = 1ms;
        scheduling.breaker.first_pause = scheduling.breaker.longest_pause = 1ms;
        Setup setup(servers, planning, scheduling);
        for (std::size_t i = 1; i < servers; ++i) setup.planner->let_in(i);
        std::vector<Health> health(servers, Health::well);
        const auto always = random() % servers;  // well
        const auto refuser = random() % servers; // what two refuse has failed
        std::vector<bool> bad;
        const auto ask = [&] {
            // So few that no server is trusted in what it refuses.
            bad.push_back(std::count(bad.begin(), bad.end(), true) < 7 && random() % 10 == 0);
            setup.ask(false, random() % 2 ? "s" + std::to_string(random() % 5) : std::string());
        };
        const std::size_t count = 40 + random() % 60;
        for (std::size_t i = 0; i < count / 2; ++i) ask();
        // What is said by a server is that of the moment when it was asked, or of a later one.
        const auto deadline = Clock::now() + tests::patience;
        std::size_t ended = 0;
        while (ended < count) {
            REQUIRE(Clock::now() < deadline);
            if (bad.size() < count && random() % 4 == 0) ask();
            if (random() % 20 == 0) {
                const auto i = random() % servers;
                const auto to = Health(random() % unsigned(Health::count));
                if (i != always && (to != Health::refuses || i == refuser)) health[i] = to;
            }
            for (const auto n : setup.planner->due(Clock::now()))
                if (health[n] != Health::dead && health[n] != Health::hung) {
                    setup.planner->let_in(n);
                    setup.scheduler->server_back();
                } else {
                    setup.planner->stays_out(n);
                }
            const auto n = random() % servers;
            auto& server = setup.at(n);
            if (!server.pending.empty()) {
                auto it = server.pending.begin();
                std::advance(it, long(random() % server.pending.size()));
                const auto& body = it->second.request.body.view();
                const auto from = body.find("content\": \"") + 11;
                const auto item = std::stoul(std::string(body.substr(from, 5)));
                if (auto response = said(health[n], bad[item], item, unsigned(random()))) {
                    const int call = it->first;
                    if (response->stage == Stage::text && random() % 2) server.text(call, "text");
                    if (server.pending.contains(call)) server.end(call, std::move(*response));
                }
            }
            setup.io.restart();
            if (random() % 4 == 0)
                setup.io.run_one_for(1ms);
            else
                setup.io.poll();
            ended = std::size_t(std::count_if(setup.all.begin(), setup.all.end(),
                                              [](const Asked& it) { return it.completions > 0; }));
        }
        std::size_t i = 0;
        for (const auto& it : setup.all) {
            CAPTURE(i, it.response.detail);
            CHECK(it.completions == 1);
            // Unless the one that is well was out, for no sign of life in so short a time.
            if (std::none_of(setup.out.begin(), setup.out.end(), [&](const std::string& out) {
                    return out.starts_with(std::to_string(always) + " ");
                }))
                CHECK(it.response.outcome.has_value() == bad[i]);
            ++i;
        }
        setup.until([&] {
            return std::all_of(setup.server.begin(), setup.server.end(),
                               [](const ScriptedBackend& it) { return it.pending.empty(); });
        });
    }
}
