#include "evalrt/request_scheduler.hpp"

#include "support/catch.hpp"
#include "support/scripted_backend.hpp"

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/bind_executor.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/use_future.hpp>

#include <list>
#include <random>
#include <set>

using namespace std::chrono_literals;
namespace asio = boost::asio;
using evalrt::BackendRow;
using evalrt::Errc;
using evalrt::error_code;
using evalrt::FifoPlanner;
using evalrt::RadixPlanner;
using evalrt::Request;
using evalrt::RequestScheduler;
using evalrt::Response;
using evalrt::SchedulerOptions;
using evalrt::Stage;
using evalrt::tests::ScriptedBackend;

namespace {

// A request under way, and what became of it.
struct Asked {
    asio::cancellation_signal cancel;
    std::string text;
    int completions = 0;
    error_code code;
    Response response;
};

Request chat(const std::string& content, const std::string& system = "") {
    Request request;
    std::string messages;
    if (!system.empty()) messages = R"({"role": "system", "content": ")" + system + R"("}, )";
    request.body = R"({"model": "m", "messages": [)" + messages +
                   R"({"role": "user", "content": ")" + content + R"("}], "max_tokens": 50})";
    return request;
}

Response answer(const std::string& text) {
    Response response;
    response.status = 200;
    response.text = text;
    return response;
}

Response failure(Errc errc, int status = 0) {
    Response response;
    response.outcome = errc;
    response.status = status;
    response.detail = "in the server's words";
    return response;
}

SchedulerOptions in_flight(unsigned max) {
    SchedulerOptions options;
    options.max_in_flight = max;
    options.retry.base = 0ms; // no test waits
    return options;
}

struct Setup {
    asio::io_context io;
    ScriptedBackend server{io.get_executor()};
    std::unique_ptr<evalrt::PrefixPlanner> planner;
    RequestScheduler scheduler;
    std::list<Asked> all;

    explicit Setup(
        SchedulerOptions options = in_flight(2),
        std::unique_ptr<evalrt::PrefixPlanner> planner_ = std::make_unique<FifoPlanner>(),
        const BackendRow& row = {})
        : planner(std::move(planner_)), scheduler(server, *planner, row, options) {}

    Asked& ask(Request request) {
        auto& asked = all.emplace_back();
        scheduler.async_complete(
            std::move(request), [&](std::string_view piece) { asked.text += piece; },
            asio::bind_cancellation_slot(asked.cancel.slot(),
                                         [&](error_code code, Response response) {
                                             ++asked.completions;
                                             asked.code = code;
                                             asked.response = std::move(response);
                                         }));
        CHECK(asked.completions == 0); // never inside the call
        return asked;
    }

    Asked& ask(const std::string& content = "Hi") { return ask(chat(content)); }

    /// Runs what is ready.
    void run() {
        io.restart();
        io.poll();
    }

    /// Runs until nothing is left to happen, timers included.
    void run_out() {
        io.restart();
        io.run();
    }

    /// The number of the last call to the server, which has to be pending.
    int last() {
        REQUIRE(server.pending.count(server.calls - 1));
        return server.calls - 1;
    }
};

void cancel(Asked& asked, asio::cancellation_type type = asio::cancellation_type::total) {
    asked.cancel.emit(type);
}

} // namespace

TEST_CASE("a handler may ask again, throw, and end the scheduler") {
    asio::io_context io;
    ScriptedBackend server(io.get_executor());
    FifoPlanner planner;
    auto scheduler =
        std::make_unique<RequestScheduler>(server, planner, BackendRow(), in_flight(1));
    const auto run = [&] {
        io.restart();
        io.poll();
    };
    int answered = 0;
    const auto count = [&](error_code code, const Response&) { answered += !code; };
    scheduler->async_complete(chat("a"), {}, [&](error_code, const Response&) {
        scheduler->async_complete(chat("b"), {}, count);
        CHECK(answered == 0);
        throw std::runtime_error("out");
    });
    scheduler->async_complete(chat("c"), {}, count);
    run();
    server.end(0, answer("a"));
    io.restart();
    CHECK_THROWS_WITH(io.poll(), "out");
    for (int call : {1, 2}) {
        run();
        REQUIRE(server.pending.count(call));
        server.end(call, answer("x"));
    }
    run();
    CHECK(answered == 2);
    scheduler->async_complete(chat("d"), {}, [&](error_code, const Response&) {
        scheduler.reset();
        ++answered;
    });
    run();
    server.end(3, answer("d"));
    run();
    CHECK(answered == 3);
    CHECK(!scheduler);
}

TEST_CASE("two hundred requests end once each, whatever becomes of them") {
    for (unsigned seed = 1; seed <= 40; ++seed) {
        CAPTURE(seed);
        std::minstd_rand random(seed);
        const auto below = [&](unsigned n) { return unsigned(random() / 7 % n); };
        auto options = in_flight(1 + below(9));
        options.refill = 1 + below(3);
        std::unique_ptr<evalrt::PrefixPlanner> planner = std::make_unique<FifoPlanner>();
        if (below(2)) planner = std::make_unique<RadixPlanner>();
        Setup setup(options, std::move(planner));
        std::vector<Asked*> asked;
        int answered = 0, cancelled = 0;
        for (int i = 0; i < 200; ++i) {
            auto request = chat("question " + std::to_string(i),
                                std::string(below(2) * 400, char('a' + below(3))));
            request.stream = below(2);
            asked.push_back(&setup.ask(std::move(request)));
        }
        const auto done = [&] {
            return std::all_of(asked.begin(), asked.end(),
                               [](const auto* it) { return it->completions > 0; });
        };
        for (int step = 0; !done(); ++step) {
            REQUIRE(step < 5000);
            setup.run();
            REQUIRE(setup.server.pending.size() <= options.max_in_flight);
            if (below(12) == 0) cancel(*asked[below(200)]); // waiting, running or long gone
            if (setup.server.pending.empty()) continue;
            auto it = setup.server.pending.begin();
            std::advance(it, below(unsigned(setup.server.pending.size())));
            switch (below(8)) {
            case 0: setup.server.end(it->first, failure(Errc::truncated)); break;
            case 1: setup.server.end(it->first, failure(Errc::rejected, 400)); break;
            case 2: setup.server.end(it->first, failure(Errc::overloaded, 503)); break;
            case 3: setup.server.text(it->first, "a piece"); break;
            default: setup.server.end(it->first, answer("fine"));
            }
        }
        setup.run_out();
        for (const auto* it : asked) {
            REQUIRE(it->completions == 1);
            REQUIRE(bool(it->code) == it->response.outcome.has_value());
            if (it->response.outcome) REQUIRE(it->code == make_error_code(*it->response.outcome));
            answered += !it->code;
            cancelled += it->code == asio::error::operation_aborted;
        }
        REQUIRE(answered > 80);
        REQUIRE(cancelled > 0);
        REQUIRE(setup.server.most_in_flight <= options.max_in_flight);
        const auto stats = setup.scheduler.stats();
        REQUIRE(stats.in_flight == 0);
        REQUIRE(stats.most_in_flight <= options.max_in_flight);
    }
}

TEST_CASE("an answer that is there at once still comes after the call") {
    Setup setup;
    setup.server.on_call = [&](int call) { setup.server.end(call, answer("yes")); };
    const auto& asked = setup.ask();
    setup.run();
    CHECK(asked.completions == 1);
    CHECK_FALSE(asked.code);
    CHECK(asked.response.text == "yes");
    CHECK(asked.response.attempts == 1);
}

TEST_CASE("a request knows what it shares with others, where its server wants to be told") {
    for (const auto* name : {"openai", "anthropic-url", "cloud"}) {
        Setup setup(in_flight(4), std::make_unique<FifoPlanner>(), *evalrt::find_profile_row(name));
        const std::string system(5000, 's');
        for (const auto& request : {chat("one", system), chat("two", system), chat("alone", "x")})
            setup.ask(request);
        setup.run();
        REQUIRE(setup.server.pending.size() == 3);
        std::multiset<std::size_t> shared;
        for (const auto& [id, call] : setup.server.pending)
            shared.insert(call.request.shared_bytes);
        if (std::string_view(name) == "cloud")
            CHECK(shared == std::multiset<std::size_t>{0, 0, 0});
        else
            CHECK((*shared.begin() == 0 && *std::next(shared.begin()) > 5000));
    }
}

TEST_CASE("no handler runs inside a call that is made on the executor itself") {
    Setup setup;
    asio::post(setup.io, [&] {
        auto& asked = setup.ask();
        cancel(asked);
        CHECK(asked.completions == 0);
        setup.ask();
        setup.scheduler.close(Errc::exited, "gone");
        CHECK(setup.all.back().completions == 0);
        setup.ask(); // checks it too
    });
    setup.run();
    for (const auto& asked : setup.all) CHECK(asked.completions == 1);
}

TEST_CASE("a request that waits is cancelled without being sent") {
    Setup setup(in_flight(1));
    auto& running = setup.ask();
    auto& waiting = setup.ask();
    setup.run();
    cancel(waiting);
    CHECK(waiting.completions == 0);
    setup.run();
    CHECK(waiting.completions == 1);
    CHECK(waiting.code == asio::error::operation_aborted);
    CHECK(waiting.response.outcome == Errc::cancelled);
    CHECK(waiting.response.attempts == 0);
    CHECK(setup.server.calls == 1);
    setup.server.end(0);
    setup.run();
    CHECK(running.completions == 1);
    CHECK(setup.server.calls == 1);
}

TEST_CASE("a request that runs is cancelled at the server, by any type of cancellation") {
    for (const auto type : {asio::cancellation_type::terminal, asio::cancellation_type::partial,
                            asio::cancellation_type::total}) {
        Setup setup(in_flight(1));
        auto& first = setup.ask();
        auto& second = setup.ask();
        setup.run();
        cancel(first, type);
        cancel(first, type); // says nothing new
        CHECK(setup.server.cancelled == 1);
        setup.run();
        CHECK(first.completions == 1);
        CHECK(first.code == asio::error::operation_aborted);
        CHECK(first.response.attempts == 1);
        CHECK(setup.server.calls == 2); // its place is free
        setup.server.end(1);
        setup.run();
        CHECK(second.completions == 1);
        CHECK_FALSE(second.code);
    }
}

TEST_CASE("an answer that was on its way when it was cancelled is an answer") {
    Setup setup;
    auto& asked = setup.ask();
    setup.run();
    setup.server.end(0, answer("in time"));
    cancel(asked);
    setup.run();
    CHECK_FALSE(asked.code);
    CHECK(asked.response.text == "in time");
}

TEST_CASE("a failure that was on its way when it was cancelled is not made again") {
    Setup setup;
    auto& asked = setup.ask();
    setup.run();
    setup.server.end(0, failure(Errc::truncated));
    cancel(asked);
    setup.run();
    CHECK(asked.code == asio::error::operation_aborted);
    CHECK(setup.server.calls == 1);
}

TEST_CASE("a request is cancelled between two attempts, and keeps what it knows") {
    auto options = in_flight(1);
    options.retry.base = 1h;
    options.retry.most = 1h;
    Setup setup(options);
    auto& asked = setup.ask();
    setup.run();
    setup.server.end(0, failure(Errc::truncated, 200));
    setup.run();
    CHECK(asked.completions == 0);
    cancel(asked);
    setup.run();
    CHECK(setup.io.stopped()); // no timer is left
    CHECK(asked.completions == 1);
    CHECK(asked.code == asio::error::operation_aborted);
    CHECK(asked.response.attempts == 1);
    CHECK(asked.response.status == 200);
    CHECK(asked.response.detail.find("in the server's words") != std::string::npos);
}

TEST_CASE("a signal after the end does nothing") {
    Setup setup;
    auto& asked = setup.ask();
    setup.run();
    setup.server.end(0);
    setup.run();
    REQUIRE(asked.completions == 1);
    cancel(asked);
    setup.run();
    CHECK(asked.completions == 1);

    auto& waiting = setup.ask();
    cancel(waiting);
    cancel(waiting); // its end is decided, its handler has not run
    setup.run();
    cancel(waiting);
    CHECK(waiting.completions == 1);
}

TEST_CASE("a signal after the end reaches nobody, even before the handler has run") {
    asio::io_context io;
    asio::cancellation_signal signal;
    int cancels = 0, completions = 0;
    evalrt::Backend::Handler handler(
        asio::bind_cancellation_slot(signal.slot(), [&](error_code, Response) { ++completions; }));
    evalrt::detail::on_cancel(handler, [&] { ++cancels; });
    signal.emit(asio::cancellation_type::none);
    CHECK(cancels == 0);
    signal.emit(asio::cancellation_type::total);
    CHECK(cancels == 1);
    evalrt::detail::complete(io.get_executor(), std::move(handler), error_code(), Response());
    signal.emit(asio::cancellation_type::total);
    CHECK(completions == 0);
    io.poll();
    signal.emit(asio::cancellation_type::total);
    CHECK(cancels == 1);
    CHECK(completions == 1);
}

TEST_CASE("a caller may cancel while it is given text") {
    Setup setup;
    auto request = chat("Hi");
    request.stream = true;
    asio::cancellation_signal signal;
    int pieces = 0, completions = 0;
    setup.scheduler.async_complete(
        request,
        [&](std::string_view) {
            ++pieces;
            signal.emit(asio::cancellation_type::terminal);
        },
        asio::bind_cancellation_slot(signal.slot(), [&](error_code code, Response) {
            CHECK(code == asio::error::operation_aborted);
            ++completions;
        }));
    setup.run();
    setup.server.text(0, "that is enough");
    setup.run();
    CHECK(pieces == 1);
    CHECK(completions == 1);
}

TEST_CASE("a failed attempt is made again, and the answer says how often") {
    Setup setup;
    auto& asked = setup.ask();
    setup.run();
    setup.server.end(0, failure(Errc::truncated));
    setup.run();
    CHECK(asked.completions == 0);
    setup.run();
    setup.server.end(setup.last(), failure(Errc::overloaded, 503));
    setup.run();
    setup.run();
    setup.server.end(setup.last(), answer("third time lucky"));
    setup.run();
    CHECK_FALSE(asked.code);
    CHECK(asked.response.attempts == 3);
    CHECK(asked.response.text == "third time lucky");
    CHECK(setup.server.calls == 3);
}

TEST_CASE("the last failure is the one that is told") {
    Setup setup;
    auto& asked = setup.ask();
    for (int i = 0; i < 3; ++i) {
        setup.run();
        setup.run();
        setup.server.end(setup.last(), failure(i < 2 ? Errc::truncated : Errc::malformed, 200));
    }
    setup.run();
    CHECK(asked.code == make_error_code(Errc::malformed));
    CHECK(asked.response.detail == "in the server's words");
    CHECK(asked.response.status == 200);
    CHECK(asked.response.attempts == 3);
}

TEST_CASE("what a caller has seen is not made again behind its back") {
    for (const bool stream : {true, false}) {
        for (const std::string piece : {"once upon", ""}) {
            Setup setup;
            auto request = chat("Hi");
            request.stream = stream;
            auto& asked = setup.ask(request);
            setup.run();
            setup.server.text(0, piece);
            setup.server.end(0, failure(Errc::truncated));
            setup.run();
            setup.run();
            if (stream && !piece.empty()) {
                CHECK(asked.code == make_error_code(Errc::truncated));
                CHECK(asked.text == "once upon");
                CHECK(setup.server.calls == 1);
                continue;
            }
            CHECK(asked.text.empty());
            CHECK(asked.completions == 0);
            setup.server.end(setup.last(), answer("all of it"));
            setup.run();
            CHECK_FALSE(asked.code);
            CHECK(asked.response.attempts == 2);
        }
    }
}

TEST_CASE("text of an earlier attempt does not count against a later one") {
    Setup setup;
    auto request = chat("Hi");
    request.stream = true;
    auto& asked = setup.ask(request);
    setup.run();
    setup.server.end(0, failure(Errc::truncated)); // without text
    setup.run();
    setup.run();
    setup.server.text(setup.last(), "a");
    setup.server.end(setup.last(), answer("a"));
    setup.run();
    CHECK_FALSE(asked.code);
    CHECK(asked.text == "a");
}

TEST_CASE("text wakes up those who wait for their leader") {
    Setup setup(in_flight(3), std::make_unique<RadixPlanner>());
    for (const auto* content : {"one", "two", "three"})
        setup.ask(chat(content, std::string(400, 's')));
    setup.run();
    CHECK(setup.server.calls == 1);
    setup.server.text(0, "");
    setup.run();
    CHECK(setup.server.calls == 3);
    for (int call = 0; call < 3; ++call) setup.server.end(call);
    setup.run_out();
}

TEST_CASE("so does the server's word that the leader's prompt is computed") {
    Setup setup(in_flight(3), std::make_unique<RadixPlanner>());
    for (const auto* content : {"one", "two", "three"})
        setup.ask(chat(content, std::string(400, 's')));
    setup.run();
    REQUIRE(setup.server.calls == 1);
    setup.server.pending.at(0).request.on_computed();
    setup.run();
    CHECK(setup.server.calls == 3);
    for (int call = 0; call < 3; ++call) setup.server.end(call);
    setup.run_out();
}

TEST_CASE("close ends what waits and what comes, with its reason; what runs ends by itself") {
    Setup setup(in_flight(1));
    auto& running = setup.ask();
    auto request = chat("Hi");
    request.deadline = 1h;
    auto& waiting = setup.ask(request);
    setup.run();
    setup.scheduler.close(Errc::exited, "the server has ended");
    CHECK(waiting.completions == 0);
    setup.run();
    CHECK(waiting.code == make_error_code(Errc::exited));
    CHECK(waiting.response.detail == "the server has ended");
    CHECK(waiting.response.attempts == 0);
    auto& later = setup.ask();
    setup.run();
    CHECK(later.code == make_error_code(Errc::exited));
    CHECK(later.response.detail == "the server has ended");
    CHECK(running.completions == 0);
    SECTION("an answer is an answer") {
        setup.server.end(0, answer("just in time"));
        setup.run_out();
        CHECK_FALSE(running.code);
    }
    SECTION("a failure has the same reason") {
        setup.server.end(0, failure(Errc::unreachable));
        setup.run_out();
        CHECK(running.code == make_error_code(Errc::exited));
        CHECK(running.response.detail == "the server has ended");
        CHECK(setup.server.calls == 1);
    }
    SECTION("unless it was cancelled") {
        cancel(running);
        setup.run_out();
        CHECK(running.code == asio::error::operation_aborted);
    }
}

TEST_CASE("after close nothing is made again, whatever the reason") {
    Setup setup;
    auto& asked = setup.ask();
    setup.run();
    setup.scheduler.close(Errc::unreachable, "somebody pulled the plug");
    setup.server.end(0, failure(Errc::truncated));
    setup.run_out();
    CHECK(asked.completions == 1);
    CHECK(asked.code == make_error_code(Errc::unreachable));
    CHECK(setup.server.calls == 1);
}

TEST_CASE("close leaves no timer behind") {
    Setup setup(in_flight(1));
    auto request = chat("Hi");
    request.deadline = 1h;
    auto& asked = setup.ask(request);
    setup.run();
    auto busy = failure(Errc::overloaded, 503);
    busy.retry_after = 100s;
    setup.server.end(0, busy);
    setup.run();
    CHECK_FALSE(setup.io.stopped());
    setup.scheduler.close(Errc::exited, "gone");
    setup.run();
    CHECK(asked.code == make_error_code(Errc::exited));
    CHECK(asked.response.attempts == 1);
    CHECK(setup.io.stopped());
}

TEST_CASE("cancel ends all of it") {
    Setup setup(in_flight(2));
    for (int i = 0; i < 10; ++i) setup.ask();
    setup.run();
    setup.scheduler.cancel();
    setup.run_out();
    for (const auto& asked : setup.all) {
        CHECK(asked.completions == 1);
        CHECK(asked.code == asio::error::operation_aborted);
    }
    CHECK(setup.server.calls == 2);
    CHECK(setup.server.cancelled == 2);
    auto& later = setup.ask(); // it is not closed
    setup.run();
    setup.server.end(2);
    setup.run();
    CHECK_FALSE(later.code);
}

TEST_CASE("a server that turns everything away for too long ends the run, or what waits") {
    for (const bool run : {true, false}) {
        auto options = in_flight(1);
        options.retry.base = 1h;
        options.breaker.busy_patience = 0ms;
        if (run) options.stop = {3, 20};
        Setup setup(options);
        auto& a = setup.ask("a");
        auto& b = setup.ask("b");
        setup.run();
        setup.server.end(setup.last(), failure(Errc::rate_limited, 429));
        setup.run();
        CHECK(a.completions + b.completions == 2);
        CHECK(setup.server.calls == 1);
        CHECK(a.response.detail.find("in the server's words") != std::string::npos);
        CHECK(b.response.outcome == (run ? Errc::cancelled : Errc::overloaded));
        CHECK(setup.scheduler.stopped().has_value() == run);
        if (!run) continue;
        CHECK(setup.scheduler.stopped()->cause == Errc::overloaded);
        CHECK(setup.scheduler.stopped()->why ==
              "the server turns everything away: in the server's words");
    }
}

TEST_CASE("a request that hangs ends at its deadline, with timed_out") {
    Setup setup(in_flight(1));
    auto request = chat("Hi");
    request.deadline = 3ms;
    auto& running = setup.ask(request);
    auto& waiting = setup.ask(request);
    setup.run_out();
    CHECK(running.completions == 1);
    CHECK(running.code == make_error_code(Errc::timed_out));
    CHECK(running.response.detail == "not answered before its deadline");
    CHECK(running.response.attempts == 1);
    CHECK(setup.server.cancelled == 1);
    CHECK(waiting.completions == 1);
    CHECK(waiting.code == make_error_code(Errc::timed_out));
    CHECK(waiting.response.detail == "not sent before its deadline");
    CHECK(waiting.response.attempts == 0);
    CHECK(setup.server.calls == 1);
}

TEST_CASE("a deadline between two attempts tells what the last one ended with") {
    auto options = in_flight(1);
    options.retry.base = 1h;
    options.retry.most = 1h;
    Setup setup(options);
    auto request = chat("Hi");
    request.deadline = 3ms;
    setup.server.on_call = [&](int call) { setup.server.end(call, failure(Errc::truncated, 200)); };
    auto& asked = setup.ask(request);
    setup.run_out();
    CHECK(asked.code == make_error_code(Errc::timed_out));
    CHECK(asked.response.outcome == Errc::timed_out);
    CHECK(asked.response.attempts == 1);
    CHECK(asked.response.status == 200);
    CHECK(asked.response.detail ==
          "not answered before its deadline; its last attempt: in the server's words");
}

TEST_CASE("a deadline that is not reached leaves nothing behind") {
    Setup setup;
    auto request = chat("Hi");
    request.deadline = 1h;
    auto& asked = setup.ask(request);
    setup.server.on_call = [&](int call) { setup.server.end(call, answer("yes")); };
    setup.run();
    CHECK_FALSE(asked.code);
    CHECK(setup.io.stopped());
}

TEST_CASE("a handler may ask again") {
    Setup setup(in_flight(1));
    setup.server.on_call = [&](int call) { setup.server.end(call, answer("yes")); };
    int answers = 0;
    std::function<void(error_code, Response)> again = [&](error_code code, Response) {
        CHECK_FALSE(code);
        if (++answers < 100) setup.scheduler.async_complete(chat("Hi"), {}, again);
    };
    setup.scheduler.async_complete(chat("Hi"), {}, again);
    setup.run_out();
    CHECK(answers == 100);
}

TEST_CASE("a handler may ask again although it was cancelled or came too late to be sent") {
    Setup setup(in_flight(1));
    int ends = 0;
    for (int i = 0; i < 3; ++i)
        setup.scheduler.async_complete(chat("Hi"), {}, [&](error_code, Response) {
            ++ends;
            setup.ask("again");
        });
    setup.run();
    setup.scheduler.cancel();
    setup.run();
    CHECK(ends == 3);
    setup.scheduler.close(Errc::exited, "gone");
    setup.run();
    setup.server.end(setup.last());
    setup.run_out();
    CHECK(setup.all.size() == 3);
    for (const auto& asked : setup.all) CHECK(asked.completions == 1);
}

TEST_CASE("a handler runs on its own executor") {
    asio::io_context elsewhere;
    Setup setup;
    int completions = 0;
    const auto ask = [&] {
        setup.scheduler.async_complete(
            chat("Hi"), {},
            asio::bind_executor(elsewhere, [&](error_code, Response) { ++completions; }));
    };
    ask();
    setup.run();
    setup.server.end(0);
    setup.run();
    CHECK(completions == 0);
    elsewhere.poll();
    CHECK(completions == 1);

    ask(); // the ways past the server
    setup.scheduler.cancel();
    setup.scheduler.close(Errc::exited, "gone");
    ask();
    setup.run();
    CHECK(completions == 1);
    elsewhere.restart();
    elsewhere.poll();
    CHECK(completions == 3);
}

TEST_CASE("the times of an answer count from submission and from sending") {
    using Millis = evalrt::Timing::Millis;
    Setup setup(in_flight(1));
    const auto before = evalrt::Clock::now();
    setup.ask();
    auto& second = setup.ask();
    setup.run();
    const auto asked = evalrt::Clock::now();
    while (evalrt::Clock::now() - asked < 2ms) {}
    setup.server.end(0);
    setup.run();
    auto response = answer("yes");
    response.timing.queued = Millis(1000); // in front of the server
    response.timing.first_text = Millis(7);
    response.timing.last_text = Millis(9);
    response.timing.total = Millis(1000000); // of the attempt: not what is told
    setup.server.end(1, response);
    setup.run();
    const Millis elapsed = evalrt::Clock::now() - before;
    const auto& timing = second.response.timing;
    CHECK(timing.queued >= Millis(1001));
    CHECK(timing.queued <= Millis(1000) + elapsed);
    CHECK(timing.first_text == Millis(7));
    CHECK(timing.last_text == Millis(9));
    CHECK(timing.total >= Millis(1));
    CHECK(timing.total <= elapsed);
}

TEST_CASE("one that was never sent was queued all its time") {
    Setup setup(in_flight(1));
    setup.ask();
    auto& waiting = setup.ask();
    setup.run();
    cancel(waiting);
    setup.run();
    CHECK(waiting.response.timing.queued == waiting.response.timing.total);
    setup.scheduler.cancel();
    setup.run();
}

TEST_CASE("the stack of two schedulers completes once") {
    Setup setup(in_flight(3));
    FifoPlanner fifo;
    RequestScheduler outer(setup.scheduler, fifo, BackendRow(), in_flight(2));
    setup.server.on_call = [&](int call) { setup.server.end(call, answer("yes")); };
    int answers = 0;
    for (int i = 0; i < 20; ++i)
        outer.async_complete(chat("Hi"), {}, [&](error_code code, Response) { answers += !code; });
    setup.run_out();
    CHECK(answers == 20);
    CHECK(outer.stats().most_in_flight == 2);
}

TEST_CASE("the planner puts together what shares its beginning, the baseline does not") {
    const auto order = [](std::unique_ptr<evalrt::PrefixPlanner> planner) {
        Setup setup(in_flight(1), std::move(planner));
        std::string seen;
        setup.server.on_call = [&](int call) {
            const auto body = setup.server.pending.at(call).request.body.view();
            seen += body.at(body.find("content\": \"") + 11);
            setup.server.end(call, answer("yes"));
        };
        for (int i = 0; i < 9; ++i)
            setup.ask(chat("question " + std::to_string(i), std::string(400, char('A' + i % 3))));
        setup.run_out();
        return seen;
    };
    CHECK(order(std::make_unique<FifoPlanner>()) == "ABCABCABC");
    CHECK(order(std::make_unique<RadixPlanner>()) == "AAABBBCCC");
}

TEST_CASE("the answer says how much of the prompt the plan expected in the cache") {
    Setup setup(in_flight(1), std::make_unique<RadixPlanner>());
    setup.server.on_call = [&](int call) {
        auto response = answer("yes");
        response.usage.prompt_tokens = 100;
        setup.server.end(call, response);
    };
    auto& first = setup.ask(chat("one", std::string(1000, 's')));
    auto& second = setup.ask(chat("two", std::string(1000, 's')));
    auto& same = setup.ask(chat("two", std::string(1000, 's')));
    setup.run_out();
    CHECK(first.response.expected_cached == 0);
    CHECK(first.response.maximum_cached == 0);
    CHECK(*second.response.expected_cached > 85);
    CHECK(second.response.expected_cached <= second.response.maximum_cached);
    CHECK(*second.response.maximum_cached < 100);
    CHECK(same.response.expected_cached == 99); // the last one is always computed
    CHECK(same.response.maximum_cached == 99);
}

TEST_CASE("turns of a session go one after the other, and each sending is explained") {
    RadixPlanner::Options plan;
    plan.release = evalrt::Release::at_once;
    Setup setup(in_flight(8), std::make_unique<RadixPlanner>(plan));
    std::vector<std::string> lines;
    setup.scheduler.explain([&](std::string_view line) { lines.emplace_back(line); });
    for (const int turn : {1, 0}) {
        auto request = chat("turn " + std::to_string(turn), std::string(1000, 's'));
        request.session = "one \"talk\"";
        request.name = "q\"" + std::to_string(turn);
        request.turn = turn;
        setup.ask(request);
    }
    setup.run();
    REQUIRE(setup.server.pending.size() == 1);
    CHECK(setup.server.pending.at(0).request.turn == 0);
    REQUIRE(lines.size() == 1);
    CHECK(lines[0].find(R"("n": 2, "id": "q\"0", "attempt": 1, "why": "alone", "node": ")") !=
          std::string::npos);
    CHECK(lines[0].find(R"("waited_for": null, "gate": null, )") != std::string::npos);
    CHECK(lines[0].ends_with(R"("in_flight": 1, "limit": 8})"));
    setup.server.end(0, answer("yes"));
    setup.run();
    REQUIRE(lines.size() == 2);
    CHECK(lines[1].find(R"("why": "follower")") != std::string::npos);
    CHECK(lines[1].find("sss") == std::string::npos); // no prompt in it
}

TEST_CASE("a body that is not JSON is somebody else's to refuse") {
    Setup setup(in_flight(1), std::make_unique<RadixPlanner>());
    Request request;
    request.body = "{";
    auto& asked = setup.ask(request);
    setup.run();
    CHECK(setup.server.pending.at(0).request.body.view() == "{");
    setup.server.end(0, failure(Errc::rejected, 400));
    setup.run();
    CHECK(asked.code == make_error_code(Errc::rejected));
    CHECK(asked.response.attempts == 1);
}

TEST_CASE("every style of completion token works") {
    Setup setup;
    setup.server.on_call = [&](int call) { setup.server.end(call, answer("yes")); };
    evalrt::Backend& backend = setup.scheduler;
    int answers = 0;

    backend.async_complete(chat("callback"), {}, [&](error_code, Response response) {
        answers += response.text == "yes";
    });

    auto deferred = backend.async_complete(chat("deferred"));
    setup.run();
    CHECK(setup.server.calls == 1); // nothing has begun
    std::move(deferred)([&](error_code, Response response) { answers += response.text == "yes"; });

    auto future = backend.async_complete(chat("future"), {}, asio::use_future);

    const auto coroutine = [&]() -> asio::awaitable<void> {
        auto [code, response] =
            co_await backend.async_complete(chat("tuple"), {}, asio::as_tuple(asio::use_awaitable));
        answers += !code && response.text == "yes";
        response = co_await backend.async_complete(chat("throwing"), {}, asio::use_awaitable);
        answers += response.text == "yes";
        auto [none, last] =
            co_await backend.async_complete(chat("deferred"), {}, asio::as_tuple(asio::deferred));
        answers += !none && last.text == "yes";
    };
    asio::co_spawn(setup.io, coroutine(), asio::detached);

    setup.run_out();
    CHECK(future.get().text == "yes");
    CHECK(answers == 5);

    setup.scheduler.close(Errc::exited, "gone");
    auto failing = backend.async_complete(chat("future"), {}, asio::use_future);
    setup.run_out();
    CHECK_THROWS_AS(failing.get(), boost::system::system_error);
}

TEST_CASE("a row says how its server is to be asked") {
    BackendRow row;
    row.in_flight = 7;
    row.repack = 19;
    row.refill = 3;
    row.commit_delay = 30ms;
    row.shared_tokens = 100;
    row.padding_tokens = 50;
    row.leaders = 4;
    row.release = evalrt::Release::first_text;
    const auto options = evalrt::scheduler_options(row);
    CHECK(options.max_in_flight == 7);
    CHECK(options.repack == 19);
    CHECK(options.refill == 3);
    CHECK(options.commit_delay == 0ms); // only after the end
    row.most_in_flight = 9;
    const auto three = evalrt::scheduler_options(row, 3); // servers that are alike
    CHECK(three.servers == 3);
    CHECK(three.max_in_flight == 7); // each of them
    CHECK(three.most_in_flight == 9);
    CHECK(three.repack == row.repack);
    const auto plan = evalrt::planner_options(row);
    CHECK(plan.release == evalrt::Release::first_text);
    CHECK(plan.shared_bytes == 400);
    CHECK(plan.match_length);
    CHECK(plan.padding_bytes == 200);
    CHECK(plan.leaders == 4);
    row.release = evalrt::Release::done;
    CHECK(evalrt::scheduler_options(row).commit_delay == 30ms);
    CHECK(evalrt::planner_options(row).release == evalrt::Release::done);
}
