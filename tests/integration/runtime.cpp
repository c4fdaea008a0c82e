// The whole stack over a server process of its own: what becomes of a run when the server hangs,
// dies or stays away. The server is tests/support/fake_openai.py.
#include "evalrt/runtime.hpp"

#include "support/catch.hpp"
#include "support/patience.hpp"

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <unistd.h>

using namespace evalrt;
using namespace std::chrono_literals;

namespace {

struct Stack {
    std::filesystem::path folder;
    asio::io_context io{1};
    std::vector<std::string> said;
    RuntimeOptions options;
    std::unique_ptr<Runtime> runtime;
    std::vector<Response> answers;

    Stack() {
        std::string name = (std::filesystem::temp_directory_path() / "evalrt-XXXXXX").string();
        folder = ::mkdtemp(name.data());
        ::setenv("FAKE_OPENAI_LOG", (folder / "asked").c_str(), 1);
        options.backend = "mlx-server";
        options.executable = FAKE_OPENAI;
        options.model = "some-model";
        options.log = [this](std::string_view line) { said.emplace_back(line); };
    }
    ~Stack() {
        runtime.reset();
        io.restart();
        io.poll();
        std::filesystem::remove_all(folder);
    }

    void open() {
        runtime = std::make_unique<Runtime>(io.get_executor(), options);
        bool opened = false;
        runtime->async_open([&](error_code ec, std::string detail) {
            INFO(detail);
            CHECK(!ec);
            opened = true;
        });
        run_until([&] { return opened; });
    }

    template <class Done>
    void run_until(Done done) {
        const auto limit = Clock::now() + tests::patience;
        io.restart();
        while (!done() && Clock::now() < limit) io.run_one_for(100ms);
        REQUIRE(done());
    }

    static Request ask(std::string question) {
        Request request;
        request.body = R"({"messages": [{"role": "user", "content": ")" + question + R"("}]})";
        return request;
    }

    // All of them, in any order of their ends.
    void ask_all(const std::vector<std::string>& questions) {
        answers.assign(questions.size(), {});
        std::size_t ended = 0;
        for (std::size_t i = 0; i < questions.size(); ++i)
            runtime->backend().async_complete(ask(questions[i]), {},
                                              [&, i](error_code, Response response) {
                                                  answers[i] = std::move(response);
                                                  ++ended;
                                              });
        run_until([&] { return ended == questions.size(); });
    }

    bool all_answered() const {
        return std::none_of(answers.begin(), answers.end(),
                            [](const Response& it) { return it.outcome.has_value(); });
    }
};

} // namespace

TEST_CASE("a server that calls itself healthy but brings no token is started again") {
    CHECK(tests::with_longer_limits([](int times) {
        Stack stack;
        stack.options.watchdog = {
            .quiet = 500ms * times, .canary_limit = 500ms * times, .canaries = 2};
        stack.open();
        const auto url = stack.runtime->url();
        stack.ask_all({"one", "hang once", "two", "three"});
        CHECK(stack.runtime->restarts() >= 1);
        CHECK(stack.runtime->url() == url);
        REQUIRE(stack.said.size() >= 1);
        CHECK(stack.said.back().find("did not answer any more") != std::string::npos);
        return stack.all_answered() && stack.runtime->restarts() == 1;
    }));
}

TEST_CASE("a larger prefix cache that the user gives our server lets more conversations begin") {
    const std::vector<std::vector<std::string>> given{
        {"--prompt-cache-size", "14"}, {"--prompt-cache-size=5", "--prompt-cache-size=14"}};
    for (const auto& arguments : given) {
        Stack stack;
        stack.options.server_args = arguments;
        stack.open();
        unsigned ended = 0;
        for (int i = 0; i < 12; ++i) { // none ends before all are there
            auto request = Stack::ask("meet 12");
            request.session = std::to_string(i);
            stack.runtime->backend().async_complete(std::move(request), {},
                                                    [&](error_code, Response response) {
                                                        CHECK(!response.outcome);
                                                        ++ended;
                                                    });
        }
        stack.run_until([&] { return ended == 12; });
    }
}

TEST_CASE("a server of ours with an option that keeps it from batching is asked one at a time") {
    for (const std::string argument : {"--kv-bits=4", "--prompt-cache-size=10"}) {
        CAPTURE(argument);
        const bool alone = argument == "--kv-bits=4";
        Stack stack;
        stack.options.server_args = {argument};
        stack.open();
        CHECK(stack.runtime->row().in_flight == (alone ? 1 : 32));
        CHECK(stack.said.size() == (alone ? 1 : 0));
        if (alone)
            CHECK(stack.said.at(0) ==
                  "mlx-server answers one request at a time: it has a quantised "
                  "cache (--kv-bits), so it is asked one at a time; "
                  "--max-in-flight sets another number");
        CHECK(stack.runtime->one_by_one().empty()); // nothing was asked
    }
    Stack stack; // who gives a number knows why
    stack.options.server_args = {"--kv-bits", "8"};
    stack.options.max_in_flight = 3;
    stack.open();
    CHECK(stack.runtime->row().in_flight == 3);
    CHECK(stack.said.size() == 1);
}

TEST_CASE("a request that times out raises the question whether the server works") {
    CHECK(tests::with_longer_limits([](int times) {
        Stack stack;
        stack.options.watchdog = {.quiet = 0ms, .canary_limit = 300ms * times, .canaries = 1};
        stack.options.limits.first_byte = 700ms * times;
        stack.open();
        stack.ask_all({"hang once"});
        return stack.all_answered() && stack.runtime->restarts() == 1;
    }));
}

TEST_CASE("a slow answer from a server that works is waited for") {
    Stack stack;
    stack.options.watchdog = {.quiet = 300ms, .canary_limit = 60s, .canaries = 1};
    stack.open();
    stack.ask_all({"sleep 2"});
    CHECK_FALSE(stack.answers[0].outcome);
    CHECK(stack.runtime->restarts() == 0);
}

TEST_CASE("a server that ends while nothing is asked is there for the next question") {
    Stack stack;
    stack.open();
    stack.ask_all({"die once"});
    CHECK_FALSE(stack.answers[0].outcome);
    CHECK(stack.runtime->restarts() == 1);
    CHECK(stack.runtime->server_output().find("Segmentation fault") != std::string::npos);
    stack.ask_all({"more", "and more"});
    for (const auto& answer : stack.answers) CHECK_FALSE(answer.outcome);
}

TEST_CASE("a server whose port is taken before it is there gets another one") {
    Stack stack;
    stack.options.model = "finds-its-port-taken";
    stack.open();
    stack.ask_all({"one"});
    CHECK_FALSE(stack.answers[0].outcome);
    CHECK(stack.runtime->restarts() == 0);
}

TEST_CASE("without restarts what waits ends when the server has ended") {
    Stack stack;
    stack.options.restarts = 0;
    stack.options.max_in_flight = 1;
    stack.options.order = Order::fifo;
    stack.open();
    stack.ask_all({"one", "die", "two"});
    CHECK_FALSE(stack.answers[0].outcome);
    CHECK(stack.answers[1].outcome == Errc::exited);
    CHECK(stack.answers[2].outcome == Errc::exited);
    CHECK(stack.answers[2].detail.find("exit status 9") != std::string::npos);
    CHECK_FALSE(stack.runtime->running());
}

TEST_CASE("a runtime may be closed or destroyed while its server is started again") {
    for (const bool close : {true, false}) {
        Stack stack;
        stack.open();
        int ended = 0;
        for (int i = 0; i < 3; ++i)
            stack.runtime->backend().async_complete(Stack::ask("die"), {},
                                                    [&](error_code, Response) { ++ended; });
        stack.run_until([&] { return !stack.runtime->running(); });
        if (!close) continue; // destroys it
        bool closed = false;
        stack.runtime->async_close([&](error_code) { closed = true; });
        stack.run_until([&] { return closed && ended == 3; });
    }
}

TEST_CASE(
    "a server at a URL that takes connections and never answers ends at the startup timeout") {
    Stack stack;
    asio::ip::tcp::acceptor deaf(stack.io, {asio::ip::address_v4::loopback(), 0});
    stack.options.url = "http://127.0.0.1:" + std::to_string(deaf.local_endpoint().port()) + "/v1";
    stack.options.probe = false; // that has a limit of its own
    stack.options.startup_timeout = 300ms;
    stack.runtime = std::make_unique<Runtime>(stack.io.get_executor(), stack.options);
    std::optional<error_code> opened;
    stack.runtime->async_open([&](error_code ec, std::string) { opened = ec; });
    stack.run_until([&] { return opened.has_value(); });
    CHECK(*opened == Errc::timed_out);
}

TEST_CASE("a server at a URL that is busy at first is waited for") {
    Stack server;
    server.open();
    Stack stack;
    stack.options.url = server.runtime->url();
    const auto busy = server.folder / "asked.busy";
    std::ofstream(busy) << "xx";
    const auto open = [&](unsigned attempts) {
        stack.options.retry.attempts = attempts;
        stack.runtime = std::make_unique<Runtime>(server.io.get_executor(), stack.options);
        std::optional<error_code> opened;
        stack.runtime->async_open([&](error_code ec, std::string) { opened = ec; });
        server.run_until([&] { return opened.has_value(); });
        stack.runtime.reset();
        return *opened;
    };
    CHECK_FALSE(open(3));
    CHECK(stack.said.size() >= 2);
    std::ofstream(busy) << "x";
    CHECK(open(1) == Errc::overloaded); // no retries, no patience
}

// Takes a minute: the kernel holds the port of connections that the server has closed.
TEST_CASE("a server whose port is still held is started again when it is free", "[.minute]") {
    Stack stack;
    stack.options.model = "holds-its-port";
    stack.open();
    stack.ask_all({"one", "die once"});
    for (const auto& answer : stack.answers) CHECK_FALSE(answer.outcome);
    CHECK(stack.runtime->restarts() == 1);
}
