// Both endpoints against servers of both wires.
#include "evalrt/http_backend.hpp"
#include "evalrt/prefix_planner.hpp"
#include "evalrt/request_scheduler.hpp"

#include "support/catch.hpp"
#include "support/fake_server.hpp"
#include "support/patience.hpp"

#include <boost/asio/io_context.hpp>
#include <boost/json.hpp>

#include <fmt/format.h>

namespace json = boost::json;
using namespace evalrt;
using namespace evalrt::tests;

namespace {

const std::string canary = "sk-ant-canary-0123456789";

BackendRow row(Wire wire) {
    BackendRow it = *find_backend_row(wire == Wire::openai ? "openai-url" : "anthropic-url");
    it.keep_alive = false;
    return it;
}

Request request(std::string endpoint, std::string body) {
    Request it;
    it.endpoint = std::move(endpoint);
    it.body = std::move(body);
    return it;
}

Request chat() {
    return request("/v1/chat/completions",
                   R"({"model": "m", "messages": [{"role": "system", "content": "S"}, )"
                   R"({"role": "user", "content": "hi"}], "max_tokens": 9})");
}

Request messages() {
    return request("/v1/messages", R"({"model": "m", "system": "S", "max_tokens": 9, )"
                                   R"("messages": [{"role": "user", "content": "hi"}]})");
}

std::string answer(const std::string& type, const std::string& body,
                   const std::string& status = "200 OK") {
    return fmt::format("HTTP/1.1 {}\r\nContent-Type: {}\r\nContent-Length: {}\r\n\r\n{}", status,
                       type, body.size(), body);
}

std::string event(const std::string& type, const std::string& more = "") {
    return fmt::format("event: {0}\ndata: {{\"type\":\"{0}\"{1}}}\n\n", type, more);
}

const std::string anthropic_stream = answer(
    "text/event-stream",
    event("message_start", R"(,"message":{"id":"msg_1","type":"message","role":"assistant",)"
                           R"("model":"m","content":[],"stop_reason":null,"stop_sequence":null,)"
                           R"("usage":{"input_tokens":3,"cache_read_input_tokens":4,)"
                           R"("cache_creation_input_tokens":0,"output_tokens":1}})") +
        event("ping") +
        event("content_block_start", R"(,"index":0,"content_block":{"type":"text","text":""})") +
        event("content_block_delta", R"(,"index":0,"delta":{"type":"text_delta","text":"Hel"})") +
        event("content_block_delta", R"(,"index":0,"delta":{"type":"text_delta","text":"lo"})") +
        event("content_block_stop", R"(,"index":0)") +
        event("message_delta", R"(,"delta":{"stop_reason":"end_turn","stop_sequence":null},)"
                               R"("usage":{"output_tokens":2})") +
        event("message_stop"));

const std::string openai_stream =
    answer("text/event-stream",
           R"(data: {"id":"c-1","object":"chat.completion.chunk","created":7,"model":"m",)"
           R"("choices":[{"index":0,"delta":{"role":"assistant","content":"Hel"}}]})"
           "\n\n"
           R"(data: {"choices":[{"index":0,"delta":{"content":"lo"},"finish_reason":"stop"}]})"
           "\n\n"
           R"(data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2,)"
           R"("prompt_tokens_details":{"cached_tokens":4}}})"
           "\n\ndata: [DONE]\n\n");

struct Asked {
    Response response;
    std::string heard, log;
    Received received;
};

// One exchange with a server that answers `reply_with`.
Asked ask(BackendRow backend_row, Request asked, const std::string& reply_with,
          std::string key = canary) {
    FakeServer server({{expect(), reply(reply_with)}});
    asio::io_context io;
    Asked result;
    HttpOptions options;
    options.url = server.url();
    options.api_key = std::move(key);
    HttpBackend backend(io.get_executor(), std::move(backend_row), options,
                        [&](std::string_view line) { result.log += std::string(line) + "\n"; });
    int times = 0;
    backend.async_complete(
        std::move(asked), [&](std::string_view text) { result.heard += text; },
        [&](error_code, Response response) {
            ++times;
            result.response = std::move(response);
        });
    io.run_for(patience);
    REQUIRE(times == 1);
    if (!server.requests().empty()) result.received = server.requests().front();
    return result;
}

json::value body_of(const Asked& asked) { return json::parse(asked.received.body); }

bool goes_to(const Asked& asked, std::string_view path) {
    return asked.received.head.starts_with(fmt::format("POST {} HTTP/1.1\r\n", path));
}

void check_hello(const Asked& asked) {
    INFO(asked.response.detail);
    REQUIRE_FALSE(asked.response.outcome);
    CHECK(asked.response.text == "Hello");
    CHECK(asked.heard == "Hello");
    CHECK(asked.response.usage.prompt_tokens == 7);
    CHECK(asked.response.usage.cached_tokens == 4);
    CHECK(asked.response.usage.completion_tokens == 2);
}

} // namespace

TEST_CASE("messages to an Anthropic server: its own words, its own headers") {
    const auto asked = ask(row(Wire::anthropic), messages(), anthropic_stream);
    check_hello(asked);
    CHECK(goes_to(asked, "/v1/messages"));
    CHECK(asked.received.field("x-api-key") == canary);
    CHECK(asked.received.field("anthropic-version") == "2023-06-01");
    CHECK_FALSE(asked.received.field("authorization"));
    CHECK(asked.received.body == R"({"model": "m", "system": "S", "max_tokens": 9, "messages": )"
                                 R"([{"role": "user", "content": "hi"}], "stream": true})");
    CHECK(asked.response.finish_reason == "end_turn");
    CHECK(json::parse(asked.response.body).at("type") == "message");
    CHECK(asked.log == "");
    const auto keyless = ask(row(Wire::anthropic), messages(), anthropic_stream, "");
    CHECK_FALSE(keyless.received.field("x-api-key"));
    // A body that says how it wants its answer goes out byte for byte.
    const auto own =
        request("/v1/messages", "{ \"stream\":true , \"x\": 1.50e+01,\"model\":\"m\"}");
    CHECK(ask(row(Wire::anthropic), own, anthropic_stream).received.body == own.body.view());
}

TEST_CASE("chat completions to an Anthropic server are translated, and so is the answer") {
    const auto asked = ask(row(Wire::anthropic), chat(), anthropic_stream);
    check_hello(asked);
    CHECK(goes_to(asked, "/v1/messages"));
    CHECK(body_of(asked) == json::parse(R"({"model": "m", "system": "S", "max_tokens": 9,
        "messages": [{"role": "user", "content": "hi"}], "stream": true})"));
    CHECK(asked.response.finish_reason == "stop");
    const auto body = json::parse(asked.response.body);
    CHECK(body.at("object") == "chat.completion");
    CHECK(body.at("choices").at(0).at("message").at("content") == "Hello");
    CHECK(body.at("created").to_number<std::int64_t>() > 1700000000);
    // In one piece, too; and what had to be filled in is said.
    const auto whole =
        ask(row(Wire::anthropic),
            request("/v1/chat/completions",
                    R"({"messages": [{"role": "user", "content": "hi"}], "stream": false})"),
            answer("application/json",
                   R"({"id":"msg_1","type":"message","role":"assistant","model":"m",)"
                   R"("content":[{"type":"text","text":"Hello"}],"stop_reason":"max_tokens",)"
                   R"("stop_sequence":null,"usage":{"input_tokens":3,"output_tokens":2}})"));
    CHECK(body_of(whole).at("max_tokens") == 4096);
    CHECK(whole.log.find("max_tokens") != std::string::npos);
    CHECK(whole.response.finish_reason == "length");
    CHECK(json::parse(whole.response.body).at("choices").at(0).at("finish_reason") == "length");
}

TEST_CASE("messages to an OpenAI server are translated, unless it has the endpoint") {
    const auto asked = ask(row(Wire::openai), messages(), openai_stream);
    check_hello(asked);
    CHECK(goes_to(asked, "/v1/chat/completions"));
    CHECK(asked.received.field("authorization") == "Bearer " + canary);
    CHECK_FALSE(asked.received.field("anthropic-version"));
    CHECK(body_of(asked) == json::parse(R"({"model": "m", "max_tokens": 9,
        "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}],
        "stream": true, "stream_options": {"include_usage": true}})"));
    CHECK(asked.response.finish_reason == "end_turn");
    CHECK(json::parse(asked.response.body) == json::parse(R"({"id": "c-1", "type": "message",
        "role": "assistant", "model": "m", "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn", "stop_sequence": null,
        "usage": {"input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": 2}})"));

    auto both = row(Wire::openai);
    both.messages_endpoint = true;
    const auto direct = ask(both, messages(), anthropic_stream);
    check_hello(direct);
    CHECK(goes_to(direct, "/v1/messages"));
    CHECK(direct.received.field("authorization") == "Bearer " + canary);
    CHECK(body_of(direct).as_object().count("stream_options") == 0);
    both.input_is_total = true;
    CHECK(ask(both, messages(), anthropic_stream).response.usage.prompt_tokens == 3);
}

TEST_CASE("what cannot be said to the server is rejected before it is asked, with its name") {
    FakeServer server({{expect()}});
    const auto detail = [&](Wire wire, std::string endpoint, std::string body) {
        asio::io_context io;
        HttpOptions options;
        options.url = server.url();
        HttpBackend backend(io.get_executor(), row(wire), options);
        Response got;
        backend.async_complete(request(std::move(endpoint), std::move(body)), {},
                               [&](error_code, Response response) { got = std::move(response); });
        io.run_for(patience);
        CHECK(got.outcome == Errc::rejected);
        CHECK(got.stage == Stage::none);
        return got.detail;
    };
    const auto has = [](const std::string& text, std::string_view part) {
        INFO(text);
        return text.find(part) != text.npos;
    };
    CHECK(has(detail(Wire::anthropic, "/v1/completions", R"({"prompt": "a"})"), "/v1/completions"));
    CHECK(has(detail(Wire::anthropic, "/v1/chat/completions",
                     R"({"messages": [{"role": "user", "content": "a"}], "n": 2})"),
              "\"n\""));
    CHECK(has(detail(Wire::openai, "/v1/messages",
                     R"({"messages": [{"role": "user", "content": "a"}], "container": "c"})"),
              "\"container\""));
    CHECK(has(detail(Wire::anthropic, "/v1/chat/completions", "no JSON"), "not JSON"));
    CHECK(server.connections() == 0);
}

TEST_CASE("errors have their class on either side of a translation") {
    const std::string overloaded =
        R"({"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}})";
    for (const auto& asked_for : {chat(), messages()}) {
        const auto status = ask(row(Wire::anthropic), asked_for,
                                answer("application/json", overloaded, "529 Overloaded"));
        CHECK(status.response.outcome == Errc::overloaded);
        CHECK(status.response.status == 529);
        // After 200, behind text: evidence, no answer.
        auto stream = anthropic_stream.substr(anthropic_stream.find("event: message_start"));
        stream = stream.substr(0, stream.find("event: content_block_stop")) +
                 "event: error\ndata: " + overloaded + "\n\n";
        const auto late = ask(row(Wire::anthropic), asked_for, answer("text/event-stream", stream));
        CHECK(late.response.outcome == Errc::overloaded);
        CHECK(late.response.status == 529);
        CHECK(late.response.body == "");
        CHECK(late.response.detail == "Overloaded");
    }
    const auto key = ask(row(Wire::anthropic), messages(),
                         answer("application/json",
                                fmt::format(R"({{"type":"error","error":{{"type":)"
                                            R"("authentication_error","message":"bad {}"}}}})",
                                            canary),
                                "401 Unauthorized"));
    CHECK(key.response.outcome == Errc::auth);
    CHECK(key.response.detail.find(canary) == std::string::npos);
    const auto cut = ask(row(Wire::anthropic), chat(),
                         answer("text/event-stream", event("message_start", R"(,"message":{})")));
    CHECK(cut.response.outcome == Errc::truncated);
}

TEST_CASE("what requests share is marked for the cache of an Anthropic server") {
    // Both shapes, a caller's own mark, and a server whose cache needs none.
    const std::string document(6000, 'd');
    const auto bodies = [&](bool marks, bool chat_shape, std::string_view own = "") {
        FakeServer::Options repeat;
        repeat.repeat = true;
        FakeServer server({{expect(), reply(anthropic_stream)}}, repeat);
        asio::io_context io;
        HttpOptions options;
        options.url = server.url();
        auto backend_row = row(Wire::anthropic);
        backend_row.cache_marks = marks;
        HttpBackend http(io.get_executor(), backend_row, options);
        RadixPlanner planner(planner_options(backend_row));
        RequestScheduler scheduler(http, planner, backend_row, scheduler_options(backend_row));
        int answered = 0;
        for (const auto question : {"one", "two"}) {
            const auto turn = fmt::format(R"({{"role": "user", "content": "{}"}})", question);
            auto it =
                chat_shape
                    ? request("/v1/chat/completions",
                              fmt::format(R"({{"max_tokens": 9, "messages": [{{"role": )"
                                          R"("system", "content": "{}"}}, {}]{}}})",
                                          document, turn, own))
                    : request("/v1/messages", fmt::format(R"({{"max_tokens": 9, "system": "{}", )"
                                                          R"("messages": [{}]{}}})",
                                                          document, turn, own));
            scheduler.async_complete(std::move(it), {},
                                     [&](error_code ec, Response) { answered += !ec; });
        }
        io.run_for(patience);
        CHECK(answered == 2);
        std::vector<json::value> got;
        for (const auto& received : server.requests()) got.push_back(json::parse(received.body));
        REQUIRE(got.size() == 2);
        return got;
    };
    for (const bool chat_shape : {false, true}) {
        const json::value block = json::object{
            {"type", "text"}, {"text", document}, {"cache_control", {{"type", "ephemeral"}}}};
        for (const auto& body : bodies(true, chat_shape)) {
            CHECK(body.at("system") == json::array{block});
            CHECK(body.at("messages").at(0).at("content").is_string());
        }
        CHECK(bodies(false, chat_shape).at(0).at("system") == json::value(document));
    }
    CHECK(bodies(true, false, R"(, "cache_control": {"type": "ephemeral"})").at(0).at("system") ==
          json::value(document));
}
