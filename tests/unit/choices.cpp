#include "choices.hpp"

#include "support/catch.hpp"
#include "support/scripted_backend.hpp"

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/json.hpp>

#include <fmt/format.h>

namespace json = boost::json;
using namespace evalrt;
using namespace evalrt::detail;

namespace {

unsigned times(std::string_view row, std::string body) {
    Request request;
    request.body = Text(std::move(body));
    return repetitions(request, *find_profile_row(row));
}

Response answer(std::string text, std::int64_t tokens) {
    Response it;
    it.text = text;
    it.body = fmt::format(
        R"({{"id": "x", "choices": [{{"index": 0, "message": {{"content": "{}"}}}}], )"
        R"("usage": {{"prompt_tokens": 10, "completion_tokens": {}, "total_tokens": 1}}}})",
        text, tokens);
    it.usage = {10, 4, tokens};
    it.timing.total = Timing::Millis(5);
    it.timing.first_text = Timing::Millis(2);
    it.timing.last_text = Timing::Millis(4);
    return it;
}

struct Asked {
    asio::io_context io;
    tests::ScriptedBackend server{io.get_executor()};
    asio::cancellation_signal cancel;
    std::optional<error_code> code;
    Response response;
    std::string heard;

    explicit Asked(unsigned n) {
        Request request;
        request.body = Text(fmt::format(R"({{"a":1,"n":{}}})", n));
        const auto ask = [this](Request it, TextSink on_text, Backend::Handler handler) {
            server.async_complete(std::move(it), std::move(on_text), std::move(handler));
        };
        ask_repeatedly(
            io.get_executor(), ask, request, n, [this](std::string_view piece) { heard += piece; },
            asio::bind_cancellation_slot(cancel.slot(), [this](error_code ec, Response it) {
                REQUIRE_FALSE(code);
                code = ec;
                response = std::move(it);
            }));
        run();
    }

    void run() {
        io.restart();
        io.run();
    }
};

} // namespace

TEST_CASE("a request is repeated where the server gives one choice") {
    CHECK(times("mlx-server", R"({"n":3})") == 3);
    CHECK(times("tinygpt", R"({"n": 2.0})") == 2);
    CHECK(times("ollama", R"({"n":2})") == 2);
    for (const std::string body : {R"({"n":1})", R"({"n":null})", R"({"n":0})", R"({"n":-2})",
                                   R"({"n":2.5})", R"({"n":1000})", R"({"n":"3"})", R"({"n":[3]})",
                                   R"({"m":{"n":3}})", R"({"n":3)", "{}", ""}) {
        CAPTURE(body);
        CHECK(times("mlx-server", body) == 1);
    }
    CHECK(times("openai-url", R"({"n":3})") == 1);
    CHECK(times("vllm", R"({"n":3})") == 1);
}

TEST_CASE("answers of one choice become one answer") {
    const auto whole = merged({answer("a", 3), answer("b", 4), answer("c", 5)});
    CHECK(json::parse(whole.body) == json::parse(R"({"id": "x", "choices": [
        {"index": 0, "message": {"content": "a"}}, {"index": 1, "message": {"content": "b"}},
        {"index": 2, "message": {"content": "c"}}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 12, "total_tokens": 22}})"));
    CHECK(whole.text == "a");
    CHECK(whole.usage.prompt_tokens == 10);
    CHECK(whole.usage.cached_tokens == 4);
    CHECK(whole.usage.completion_tokens == 12);
    CHECK(whole.timing.total.count() == 15);
    CHECK(whole.timing.first_text->count() == 2);
    CHECK_FALSE(whole.timing.last_text);

    auto silent = answer("b", 4);
    silent.usage.completion_tokens = {};
    CHECK_FALSE(merged({answer("a", 3), silent}).usage.completion_tokens);
}

TEST_CASE("it is asked one time after another, without n") {
    Asked asked(3);
    for (int call = 0; call < 3; ++call) {
        REQUIRE(asked.server.pending.size() == 1);
        CHECK(asked.server.pending.at(call).request.body.view() == R"({"a":1})");
        asked.server.text(call, std::to_string(call));
        asked.server.end(call, answer(std::to_string(call), 1));
        asked.run();
    }
    REQUIRE(asked.code);
    CHECK_FALSE(*asked.code);
    CHECK(json::parse(asked.response.body).at("choices").as_array().size() == 3);
    CHECK(asked.heard == "0");
}

TEST_CASE("one that fails is the answer, and the rest is not asked") {
    Asked asked(3);
    asked.server.end(0, answer("a", 1));
    asked.run();
    asked.server.fail(1, Errc::overloaded);
    asked.run();
    REQUIRE(asked.code);
    CHECK(*asked.code == Errc::overloaded);
    CHECK(asked.response.outcome == Errc::overloaded);
    CHECK(asked.server.calls == 2);
}

TEST_CASE("cancelling ends the one that runs") {
    Asked asked(3);
    asked.server.end(0, answer("a", 1));
    asked.run();
    asked.cancel.emit(asio::cancellation_type::terminal);
    asked.run();
    REQUIRE(asked.code);
    CHECK(*asked.code == asio::error::operation_aborted);
    CHECK(asked.server.calls == 2);
    CHECK(asked.server.cancelled == 1);
}
