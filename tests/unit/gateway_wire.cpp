#include "gateway_wire.hpp"

#include "evalrt/detail/sse_parser.hpp"
#include "json_text.hpp"
#include "support/catch.hpp"
#include "wire.hpp"

#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <boost/json/value.hpp>

#include <fmt/format.h>

using namespace evalrt;
using namespace evalrt::detail;
namespace json = boost::json;

namespace {

const std::vector<Field> plain_fields{
    {"Host", "127.0.0.1:8080"}, {"Content-Type", "application/json"}, {"Content-Length", "2"}};

RequestHead post(std::vector<Field> more = {}, std::string_view target = "/v1/chat/completions") {
    RequestHead head{"POST", target, false, plain_fields};
    head.fields.insert(head.fields.end(), more.begin(), more.end());
    return head;
}

RequestHead with(std::string_view name, std::string_view value) {
    auto head = post();
    for (auto& it : head.fields)
        if (it.name == name) it.value = value;
    return head;
}

RequestHead without(std::string_view name) {
    auto head = post();
    std::erase_if(head.fields, [&](const Field& it) { return it.name == name; });
    return head;
}

RequestHead get(std::string_view target) {
    return {"GET", target, false, {{"Host", "127.0.0.1:8080"}}};
}

Door door() {
    Door it;
    it.port = 8080;
    return it;
}

int status(const RequestHead& head, const Door& at = door()) {
    return read_call(head, at).refusal.status;
}

// The data of the events, and their types.
struct Events {
    std::vector<std::string> types;
    std::vector<json::value> data;
    bool done = false;
};

Events events_of(std::string_view bytes) {
    Events out;
    SseParser parser;
    parser.feed(bytes, [&](const SseEvent& event) {
        if (event.data == "[DONE]") return void(out.done = true);
        out.types.emplace_back(event.type);
        out.data.push_back(json::parse({event.data.data(), event.data.size()}));
    });
    return out;
}

Response answer(std::string body, std::string text = {}) {
    Response response;
    response.body = std::move(body);
    response.text = std::move(text);
    return response;
}

Asked asked(std::string body) { return read_asked(std::move(body)); }

std::string whole(Place place, const Response& response) {
    std::string changed;
    return std::string(whole_answer(place, response, changed));
}

// What a client puts together from the chunks of a chat: one object a choice.
json::object put_together(const Events& events, std::size_t choice) {
    json::object out{{"content", ""}, {"tool_calls", json::array()}};
    for (const auto& it : events.data)
        for (const auto& entry : it.at("choices").as_array()) {
            if (entry.at("index").to_number<std::size_t>() != choice) continue;
            if (!entry.at("finish_reason").is_null())
                out["finish_reason"] = entry.at("finish_reason");
            for (const auto& [key, value] : entry.at("delta").as_object()) {
                if (key == "content" && value.is_string())
                    out["content"] =
                        std::string(out["content"].as_string()) + std::string(value.as_string());
                else if (key == "tool_calls")
                    for (const auto& call : value.as_array())
                        out["tool_calls"].as_array().push_back(call);
                else
                    out[key] = value;
            }
        }
    return out;
}

constexpr auto chat_answer = R"({"id": "chatcmpl-7", "object": "chat.completion", "created": 5,
 "model": "m", "system_fingerprint": "f",
 "choices": [{"index": 0, "message": {"role": "assistant", "reasoning_content": "hm",
  "content": "I \"look\".\n", "tool_calls": [
   {"id": "c1", "type": "function", "function": {"name": "a", "arguments": "{\"x\": 1}"}},
   {"id": "c2", "type": "function", "function": {"name": "b", "arguments": ""}}]},
  "logprobs": {"content": [{"token": "I", "logprob": -0.5}]}, "finish_reason": "tool_calls"},
  {"index": 1, "message": {"role": "assistant", "content": "two"}, "finish_reason": "stop"}],
 "usage": {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}})";
constexpr auto chat_text = "I \"look\".\n";

constexpr auto message_answer = R"({"id": "msg_7", "type": "message", "role": "assistant",
 "model": "m", "content": [{"type": "text", "text": "I look."},
  {"type": "tool_use", "id": "t1", "name": "a", "input": {"x": [1, {"y": "é"}]}},
  {"type": "tool_use", "id": "t2", "name": "b", "input": {}}],
 "stop_reason": "tool_use", "stop_sequence": null,
 "usage": {"input_tokens": 9, "cache_read_input_tokens": 3, "output_tokens": 4}})";

} // namespace

TEST_CASE("a request that names this server gets in") {
    for (const auto host : {"127.0.0.1:8080", "localhost:8080", "LocalHost:8080", "[::1]:8080"})
        CHECK(status(with("Host", host)) == 0);
    auto at = door();
    at.port = 80;
    CHECK(status(with("Host", "localhost"), at) == 0);
    CHECK(status(with("Host", "[::1]"), at) == 0);
}

TEST_CASE("a Host that is missing, there twice, or another server's does not get in") {
    CHECK(status(without("Host")) == 400);
    CHECK(status(post({{"host", "127.0.0.1:8080"}})) == 400);
    CHECK(status(post({{"Host", "evil.example"}})) == 400);
    for (const auto host :
         {"", "evil.example", "evil.example:8080", "127.0.0.1", "127.0.0.1:8081", "localhost:80",
          "127.0.0.1.evil.example:8080", "localhost.evil.example:8080", "127.0.0.1:8080@evil",
          "127.0.0.2:8080", "[::1]", "[::1", "::1:8080", "0.0.0.0:8080", "localhost:08080",
          "127.0.0.1:8080 ", "127.0.0.1:8080, evil"})
        CHECK(status(with("Host", host)) == 421);
    // On all paths, before all else.
    auto head = get("/nothing");
    head.fields[0].value = "evil.example";
    head.method = "OPTIONS";
    head.fields.push_back({"Content-Length", "99999999999"});
    CHECK(status(head) == 421);
}

TEST_CASE("an Origin is this server's or absent") {
    for (const auto good : {"http://127.0.0.1:8080", "http://localhost:8080", "http://[::1]:8080"})
        CHECK(status(post({{"Origin", good}})) == 0);
    for (const auto bad :
         {"", "null", "http://evil.example", "https://127.0.0.1:8080", "http://127.0.0.1:8081",
          "http://127.0.0.1", "file://", "http://127.0.0.1:8080.evil.example"})
        CHECK(status(post({{"Origin", bad}})) == 403);
    CHECK(status(post({{"Origin", "http://127.0.0.1:8080"}, {"Origin", "http://evil"}})) == 403);
    // Without it browsers tell by this where a request is from.
    for (const auto good : {"none", "same-origin"})
        CHECK(status(post({{"Sec-Fetch-Site", good}})) == 0);
    for (const auto bad : {"cross-site", "same-site"})
        CHECK(status(post({{"Sec-Fetch-Site", bad}})) == 403);
    CHECK(status(post({{"Sec-Fetch-Site", "none"}, {"Sec-Fetch-Site", "cross-site"}})) == 403);
    auto head = get("/v1/models");
    head.method = "OPTIONS"; // a preflight
    head.fields.push_back({"Origin", "http://evil.example"});
    CHECK(status(head) == 403);
}

TEST_CASE("a server that others can reach takes any Host, and only pages of its own") {
    auto at = door();
    at.loopback = false;
    at.token = "secret";
    CHECK(status(with("Host", "gpu-box:8080"), at) == 401);
    auto head = with("Host", "gpu-box:8080");
    head.fields.push_back({"Authorization", "Bearer secret"});
    CHECK(status(head, at) == 0);
    head.fields.push_back({"Origin", "http://evil.example"});
    CHECK(status(head, at) == 403);
    head.fields.back().value = "http://gpu-box:8080";
    CHECK(status(head, at) == 0);
}

TEST_CASE("a token may come in either wire's header, and is not echoed") {
    auto at = door();
    at.token = "s3cret";
    CHECK(status(post(), at) == 401);
    CHECK(status(get("/health"), at) == 401);
    CHECK(status(post({{"Authorization", "Bearer s3cret"}}), at) == 0);
    CHECK(status(post({{"authorization", "bearer  s3cret"}}), at) == 0);
    CHECK(status(post({{"X-Api-Key", "s3cret"}}), at) == 0);
    CHECK(status(post({{"Authorization", "Bearer other"}, {"x-api-key", "s3cret"}}), at) == 0);
    for (const auto wrong :
         {"", "Bearer ", "Bearer s3cre", "Bearer s3crets", "Basic s3cret", "Bearer", "s3cret",
          "Bearers3cret", "s3cret Bearer", "Bearer Bearer s3cret"}) {
        const auto call = read_call(post({{"Authorization", wrong}}), at);
        CHECK(call.refusal.status == 401);
        CHECK(call.refusal.message.find("cre") == std::string::npos);
    }
    for (const auto wrong : {"Bearer s3cret", "bearer s3cret"}) // the other header's words
        CHECK(status(post({{"x-api-key", wrong}}), at) == 401);
}

TEST_CASE("a key that is there twice could be read as either") {
    auto at = door();
    for (const auto token : {"", "s3cret"}) {
        at.token = token;
        for (const auto name : {"Authorization", "x-api-key"}) {
            const auto call =
                read_call(post({{name, "Bearer s3cret"}, {name, "Bearer s3cret"}}), at);
            CHECK(call.refusal.status == 400);
            CHECK(call.refusal.message.find("more than one") != std::string::npos);
        }
        CHECK(status(post({{"Authorization", "Bearer s3cret"}, {"x-api-key", "s3cret"}}), at) == 0);
    }
}

TEST_CASE("shapes that two readers take for two requests are refused") {
    CHECK(status(post({{"Content-Length", "2"}})) == 400);
    CHECK(status(post({{"content-length", "3"}})) == 400);
    CHECK(status(post({{"Transfer-Encoding", "chunked"}})) == 400);
    auto head = without("Content-Length");
    head.fields.push_back({"Transfer-Encoding", "chunked"});
    CHECK(status(head) == 0);
    for (const auto coding : {"", "identity", "xchunked", "chunked, identity", "gzip, chunked",
                              "chunked, chunked", "chunked;a"}) {
        head.fields.back().value = coding;
        CHECK(status(head) == 501);
    }
    head.fields.back().value = "chunked";
    head.old = true;
    CHECK(status(head) == 400);
    head.old = false;
    head.fields.push_back({"Transfer-Encoding", "chunked"});
    CHECK(status(head) == 400);
    for (const auto length : {"", "+3", "-1", "3, 3", "0x3", "3 "})
        CHECK(status(with("Content-Length", length)) == 400);
    CHECK(status(without("Content-Length")) == 411);
    for (const auto target : {"http://evil/v1/chat/completions", "http://127.0.0.1:8080/v1/models",
                              "*", "", "evil:443"})
        CHECK(status(post({}, target)) == 400);
    auto body = get("/v1/models");
    body.fields.push_back({"Content-Length", "5"});
    CHECK(status(body) == 400);
    body.fields.back().value = "0";
    CHECK(status(body) == 0);
}

TEST_CASE("a refused request ends its connection") {
    CHECK(!read_call(with("Host", "evil"), door()).keep_alive);
    CHECK(!read_call(get("/../nothing"), door()).keep_alive);
    CHECK(read_call(post(), door()).keep_alive);
    CHECK(!read_call(post({{"Connection", "foo, Close"}}), door()).keep_alive);
    auto old = post();
    old.old = true;
    CHECK(!read_call(old, door()).keep_alive);
}

TEST_CASE("limits are named") {
    auto at = door();
    at.body_limit = 1000;
    const auto call = read_call(with("Content-Length", "1001"), at);
    CHECK(call.refusal.status == 413);
    CHECK(call.refusal.message.find("1000 bytes") != std::string::npos);
    CHECK(status(with("Content-Length", "1000"), at) == 0);
    CHECK(status(with("Content-Length", "99999999999999999999999"), at) == 413);
    auto head = post();
    while (head.fields.size() < 100) head.fields.push_back({"x-a", "b"});
    CHECK(status(head) == 0);
    head.fields.push_back({"x-a", "b"});
    CHECK(status(head) == 431);
}

TEST_CASE("a POST is JSON, as a page of another site cannot send it unasked") {
    for (const auto type : {"", "text/plain", "application/x-www-form-urlencoded",
                            "multipart/form-data; boundary=x", "application/jsonx"})
        CHECK(status(with("Content-Type", type)) == 415);
    CHECK(status(without("Content-Type")) == 415);
    CHECK(status(with("Content-Type", "Application/JSON; charset=utf-8")) == 0);
    CHECK(status(post({{"Content-Encoding", "gzip"}})) == 415);
    // Said twice, both have to be so.
    CHECK(status(post({{"content-type", "application/json; charset=utf-8"}})) == 0);
    CHECK(status(post({{"content-type", "text/plain"}})) == 415);
    auto head = with("Content-Type", "text/plain");
    head.fields.push_back({"Content-Type", "application/json"});
    CHECK(status(head) == 415);
    CHECK(status(post({{"Content-Encoding", "identity"}, {"Content-Encoding", "gzip"}})) == 415);
}

TEST_CASE("paths lead to endpoints with and without /v1, and with a query") {
    const auto place = [](std::string_view target) { return read_call(post({}, target), door()); };
    for (const auto target : {"/v1/chat/completions", "/chat/completions"}) {
        CHECK(place(target).place == Place::chat);
        CHECK(place(target).endpoint == "/v1/chat/completions");
    }
    CHECK(place("/completions").place == Place::completions);
    CHECK(place("/v1/messages?beta=true").place == Place::messages);
    CHECK(place("/v1/messages?beta=true").endpoint == "/v1/messages");
    CHECK(place("/v1/messages").anthropic);
    CHECK(!place("/v1/completions").anthropic);
    CHECK(place("/tokenize").endpoint == "/tokenize");
    CHECK(place("/v1/messages/count_tokens").endpoint == "/v1/messages/count_tokens");
    CHECK(read_call(get("/models"), door()).place == Place::models);
    CHECK(read_call(get("/health"), door()).place == Place::health);
    CHECK(read_call(get("/metrics"), door()).place == Place::metrics);
    auto head = get("/health");
    head.method = "HEAD"; // as wget --spider and load balancers ask
    CHECK(read_call(head, door()).refusal.status == 0);
    CHECK(read_call(head, door()).place == Place::health);
    CHECK(!read_call(head, door()).post);
    head.target = "/v1/files/f1";
    CHECK(read_call(head, door()).method == "GET");
    head.target = "/v1/chat/completions";
    CHECK(status(head) == 405);
    const auto wrong = read_call(get("/v1/chat/completions"), door());
    CHECK(wrong.refusal.status == 405);
    CHECK(wrong.allow == "POST");
}

TEST_CASE("other paths are the server's, with method, query and body") {
    const auto call = read_call(get("/v1/responses/r1?include=a%20b"), door());
    CHECK(call.refusal.status == 0);
    CHECK(call.place == Place::plain);
    CHECK(call.endpoint == "/v1/responses/r1?include=a%20b");
    CHECK(call.method == "GET");
    CHECK(!call.post);
    CHECK(read_call(get("/tokenizer_info?x=1"), door()).endpoint == "/tokenizer_info?x=1");
    CHECK(read_call(get("/v1/models?x=1"), door()).endpoint == "/v1/models");
    auto head = post({}, "/v1/embeddings");
    CHECK(read_call(head, door()).endpoint == "/v1/embeddings");
    CHECK(read_call(head, door()).post);
    for (const auto method : {"PUT", "PATCH", "DELETE"}) {
        head.method = method;
        CHECK(read_call(head, door()).method == method);
        CHECK(read_call(head, door()).post);
    }
    auto gone = get("/v1/files/f1");
    gone.method = "DELETE";
    CHECK(read_call(gone, door()).refusal.status == 0);
    CHECK(!read_call(gone, door()).post);
    for (const auto method : {"OPTIONS", "TRACE", "CONNECT", "get", "X"}) {
        head.method = method;
        CHECK(status(head) == 405);
    }
    // What protects a question to the model protects this, too.
    CHECK(status(post({{"Origin", "http://evil.example"}}, "/v1/embeddings")) == 403);
    head = with("Content-Type", "text/plain");
    head.target = "/v1/embeddings";
    CHECK(status(head) == 415);
    for (const auto path : {"/v1/../admin", "/..", "/v1/%2e%2E/x", "/v1/.%2e", "/v1/..%2Fx",
                            "/v1//x", "//evil.example/x", "/v1/./x", "/v1/..\\x", "/v1/..?a"})
        CHECK(status(get(path)) == 400);
    for (const auto path : {"/", "/v1", "/v1/models/", "/v1/..x", "/v1/x?to=/../"})
        CHECK(status(get(path)) == 0);
}

TEST_CASE("Expect, retries and the client's patience are read") {
    const auto call = read_call(post({{"Expect", "100-Continue"},
                                      {"idempotency-key", "k1"},
                                      {"x-stainless-read-timeout", "2.5"}}),
                                door());
    CHECK(call.expects_continue);
    CHECK(call.idempotency_key == "k1");
    CHECK(call.patience == std::chrono::milliseconds(2500));
    CHECK(read_call(post({{"x-stainless-read-timeout", "NOT_GIVEN"}}), door()).patience.count() ==
          0);
    CHECK(status(post({{"Expect", "something"}})) == 417);
}

TEST_CASE("clients are told apart by key, program and the name that they give themselves") {
    const auto client = [](std::vector<Field> fields) {
        return read_call(post(std::move(fields)), door()).client;
    };
    const auto nobody = client({});
    CHECK(client({}) == nobody);
    for (const auto name : {"Authorization", "x-api-key", "User-Agent", "X-Evalrt-Client"}) {
        CHECK(client({{name, "a"}}) != nobody);
        CHECK(client({{name, "a"}}) != client({{name, "b"}}));
        CHECK(client({{name, "a"}, {"Idempotency-Key", "1"}}) == client({{name, "a"}}));
    }
    CHECK(client({{"Authorization", "a"}}) != client({{"x-api-key", "a"}}));
}

TEST_CASE("the body goes on as it came, but for the stream") {
    const std::string same = R"({ "messages":[{"role":"user","content":"\u00e9"}],"x":{"y":1.0}})";
    CHECK(asked(same).body.view() == same);
    CHECK(!asked(same).stream);
    const auto streamed = asked(
        R"({"stream": true, "model": "m", "stream_options": {"include_usage": true}, "a": 1})");
    CHECK(streamed.stream);
    CHECK(streamed.usage_chunk);
    CHECK(streamed.model == "m");
    CHECK(json::parse(std::string(streamed.body.view())) ==
          json::parse(R"({"model": "m", "a": 1})"));
    // Streamed or not, it is the same request.
    CHECK(asked(R"({"a": 1, "stream": false})").body.view() == asked(R"({"a": 1})").body.view());
    // What is not understood is the server's to judge.
    for (const std::string odd :
         {R"({"stream": 1})", R"({"messages": [{"content": "\ud83d"}], "temperature": 1e999})",
          R"({"seed": 123456789012345678901234567890, "model": "\ud83d"})"}) {
        CHECK(asked(odd).error == "");
        CHECK(asked(odd).body.view() == odd);
    }
    for (const auto bad : {"", "[]", "\"a\"", "{", "{} {}", "{\"a\": \xff}"})
        CHECK(asked(bad).error != "");
    CHECK(asked(R"({"temperature": NaN})").error ==
          "the request's body is not JSON: a word that JSON does not have, at byte 17");
    CHECK(asked("\xEF\xBB\xBF{}").error ==
          "the request's body begins with a byte order mark, which no JSON does");
}

TEST_CASE("a failure has the status of its class, or the server's own") {
    const auto refusal = [](Errc errc, int http = 0) {
        Response response;
        response.outcome = errc;
        response.status = http;
        response.detail = "why";
        return refusal_of(response);
    };
    CHECK(refusal(Errc::rejected).status == 400);
    CHECK(refusal(Errc::rejected, 404).status == 404);
    CHECK(refusal(Errc::rejected, 200).status == 502);
    CHECK(refusal(Errc::rejected, 307).status == 502);
    CHECK(refusal(Errc::context_too_long, 200).status == 400);
    CHECK(refusal(Errc::context_too_long).code == "context_length_exceeded");
    CHECK(refusal(Errc::overloaded, 529).status == 529);
    CHECK(refusal(Errc::rate_limited).status == 429);
    CHECK(refusal(Errc::timed_out).status == 504);
    CHECK(refusal(Errc::unreachable).status == 502);
    CHECK(refusal(Errc::truncated, 200).status == 502);
    CHECK(refusal(Errc::timed_out).code == "timed_out");
    CHECK(refusal(Errc::timed_out).message == "why");
    for (const auto errc : all_errc) CHECK(refusal(errc).status >= 400);
}

TEST_CASE("errors have the shape of the client's wire") {
    CHECK(json::parse(error_body(false, {404, "no \"x\"", {}})) ==
          json::parse(R"({"error": {"message": "no \"x\"", "type": "not_found_error",
                          "param": null, "code": null}})"));
    CHECK(json::parse(error_body(false, {502, "w", "truncated"})).at("error").at("code") ==
          "truncated");
    CHECK(json::parse(error_body(true, {413, "w", {}})) ==
          json::parse(R"({"type": "error", "error": {"type": "request_too_large",
                          "message": "w"}})"));
    const auto head = answer_head(404, "application/json", 7, true, false);
    CHECK(head.find("x-should-retry: false\r\n") != head.npos);
    CHECK(head.find("Connection: close") == head.npos);
    CHECK(answer_head(200, "a", 7, true, false).find("x-should-retry") == std::string::npos);
}

TEST_CASE("usage is always there, and a server's own is not touched") {
    auto response = answer(R"({"choices": []})");
    response.usage = {10, 4, 3};
    CHECK(json::parse(whole(Place::chat, response)).at("usage") ==
          json::parse(R"({"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13})"));
    response.body = R"({"choices": [], "usage": null})";
    response.usage = {};
    CHECK(json::parse(whole(Place::completions, response)).at("usage") ==
          json::parse(R"({"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0})"));
    response.body = R"({"content": [], "usage": {}})";
    response.usage = {10, 4, 3};
    CHECK(json::parse(whole(Place::messages, response)).at("usage") ==
          json::parse(R"({"input_tokens": 6, "output_tokens": 3})"));
    response.body =
        R"({"choices": [],  "usage": {"prompt_tokens":1,"completion_tokens":2,"total_tokens":3,"x":[]}})";
    std::string changed;
    CHECK(whole_answer(Place::chat, response, changed).data() == response.body.data()); // no copy
}

TEST_CASE("there is no empty list of tool calls, and arguments are text") {
    const auto message = [](const char* of) {
        const auto body = fmt::format(R"({{"choices": [{{"index": 0, "message": {}}}]}})", of);
        return json::parse(whole(Place::chat, answer(body)))
            .at("choices")
            .at(0)
            .at("message");
    };
    CHECK(message(R"({"content": "a", "tool_calls": []})") == json::parse(R"({"content": "a"})"));
    CHECK(message(R"({"content": "a", "tool_calls": [ ]})") == json::parse(R"({"content": "a"})"));
    CHECK(message(R"({"content": "a", "tool_calls": null})") ==
          json::parse(R"({"content": "a", "tool_calls": null})"));
    const auto calls = message(R"({"content": null, "tool_calls": [
        {"id": "1", "function": {"name": "a", "arguments": ""}},
        {"id": "2", "function": {"name": "b", "arguments": {"x": 1}}},
        {"id": "3", "function": {"name": "c"}},
        {"id": "4", "extra": true, "function": {"name": "d", "arguments": "{\"y\": 2}"}}]})");
    const auto arguments = [&](std::size_t i) {
        return calls.at("tool_calls").at(i).at("function").at("arguments");
    };
    CHECK(arguments(0) == "{}");
    CHECK(json::parse(arguments(1).as_string()) == json::parse(R"({"x": 1})"));
    CHECK(arguments(2) == "{}");
    CHECK(arguments(3) == R"({"y": 2})");
    CHECK(calls.at("tool_calls").at(3).at("extra") == true);
    CHECK(calls.at("content").is_null());
}

TEST_CASE("a chat as a stream is the same answer, wherever its text was cut") {
    const std::string text = chat_text;
    for (std::size_t cut = 0; cut <= text.size(); ++cut) {
        auto writer = make_event_writer(Place::chat, asked(R"({"model": "asked"})"), "1", 8);
        std::string bytes;
        if (cut > 0) bytes += writer->text(text.substr(0, cut));
        const auto rest = writer->end(answer(chat_answer, text));
        REQUIRE(rest);
        const auto events = events_of(bytes + *rest);
        CHECK(events.done);
        const auto choice = put_together(events, 0);
        CHECK(choice.at("role") == "assistant");
        CHECK(choice.at("content").as_string() == text);
        CHECK(choice.at("reasoning_content") == "hm");
        CHECK(choice.at("finish_reason") == "tool_calls");
        const auto& calls = choice.at("tool_calls").as_array();
        REQUIRE(calls.size() == 2);
        CHECK(calls[0] == json::parse(R"({"index": 0, "id": "c1", "type": "function",
            "function": {"name": "a", "arguments": "{\"x\": 1}"}})"));
        CHECK(calls[1].at("index") == 1);
        CHECK(calls[1].at("function").at("arguments") == "{}");
        CHECK(put_together(events, 1).at("content") == "two");
        CHECK(put_together(events, 1).at("finish_reason") == "stop");
        // One id for all; the server's, where it was known in time.
        for (const auto& it : events.data) {
            CHECK(it.at("object") == "chat.completion.chunk");
            CHECK(it.at("id") == (cut > 0 ? "chatcmpl-1" : "chatcmpl-7"));
            CHECK(it.at("model") == (cut > 0 ? "asked" : "m"));
        }
        const auto& last = events.data.back();
        CHECK(last.at("system_fingerprint") == "f");
        bool logprobs = false;
        for (const auto& it : events.data)
            for (const auto& entry : it.at("choices").as_array())
                logprobs |= entry.as_object().contains("logprobs");
        CHECK(logprobs);
    }
}

TEST_CASE("a chat's usage has a chunk of its own, if it was asked for") {
    const auto usage = [](const char* body) {
        auto writer = make_event_writer(Place::chat, asked(body), "1", 8);
        return events_of(*writer->end(answer(chat_answer, chat_text))).data.back();
    };
    const auto last = usage(R"({"stream_options": {"include_usage": true}})");
    CHECK(last.at("choices").as_array().empty());
    CHECK(last.at("usage").at("total_tokens") == 13);
    CHECK(!usage("{}").as_object().contains("usage"));
}

TEST_CASE("content that is null or in parts stays so in a stream") {
    for (const auto content : {"null", R"([{"type": "text", "text": "a"}])"}) {
        const auto body = fmt::format(
            R"({{"id": "i", "choices": [{{"index": 0, "message": {{"role": "assistant", "content": {}}},
                "finish_reason": "stop"}}]}})",
            content);
        auto writer = make_event_writer(Place::chat, asked("{}"), "1", 8);
        const auto events = events_of(*writer->end(answer(body)));
        CHECK(events.data.front().at("choices").at(0).at("delta").at("content") ==
              json::parse(content));
    }
}

TEST_CASE("a completion as a stream has its text, log probabilities and reason") {
    const auto body = R"({"id": "cmpl-7", "object": "text_completion", "choices": [
        {"index": 0, "text": "abc", "logprobs": {"tokens": ["abc"]}, "finish_reason": "length"}]})";
    for (std::size_t cut = 0; cut <= 3; ++cut) {
        auto writer = make_event_writer(Place::completions, asked("{}"), "1", 8);
        std::string bytes;
        if (cut > 0) bytes += writer->text(std::string("abc").substr(0, cut));
        const auto events = events_of(bytes + *writer->end(answer(body, "abc")));
        std::string text;
        for (const auto& it : events.data) text += it.at("choices").at(0).at("text").as_string();
        CHECK(text == "abc");
        const auto& last = events.data.back().at("choices").at(0);
        CHECK(last.at("finish_reason") == "length");
        CHECK(last.at("logprobs") == json::parse(R"({"tokens": ["abc"]})"));
        CHECK(events.done);
    }
}

TEST_CASE("a message as a stream is the same message, wherever its text was cut") {
    const std::string text = "I look.";
    for (std::size_t cut = 0; cut <= text.size(); ++cut) {
        auto writer = make_event_writer(Place::messages, asked(R"({"model": "asked"})"), "1", 8);
        std::string bytes;
        if (cut > 0) bytes += writer->text(text.substr(0, cut));
        bytes += writer->end(answer(message_answer, text)).value();
        // Our own reader of the wire puts it together again.
        auto reader = make_anthropic_reader(false);
        SseParser parser;
        std::size_t starts = 0, stops = 0;
        parser.feed(bytes, [&](const SseEvent& event) {
            starts += event.type == "content_block_start";
            stops += event.type == "content_block_stop";
            reader->event(event);
        });
        CHECK(starts == 3);
        CHECK(stops == 3);
        Response response;
        reader->finish(response);
        REQUIRE(!response.outcome);
        const auto whole = json::parse(response.body), original = json::parse(message_answer);
        for (const auto key : {"content", "stop_reason", "stop_sequence", "usage", "role", "type"})
            CHECK(whole.at(key) == original.at(key));
        CHECK(whole.at("id") == (cut > 0 ? "msg_1" : "msg_7"));
        CHECK(response.text == text);
        CHECK(bytes.find("event: message_stop\n") != bytes.npos);
    }
}

TEST_CASE("a message's blocks keep their kinds and order") {
    const auto body =
        R"({"id": "m", "type": "message", "role": "assistant", "model": "m", "content": [
      {"type": "thinking", "thinking": "hm", "signature": "c2ln"},
      {"type": "redacted_thinking", "data": "ZGF0YQ=="},
      {"type": "text", "text": "a", "citations": [{"type": "char_location", "cited_text": "g"}]},
      {"type": "text", "text": ""},
      {"type": "text", "text": "b"}], "stop_reason": "end_turn", "stop_sequence": null,
      "usage": {"input_tokens": 1, "output_tokens": 2}})";
    auto writer = make_event_writer(Place::messages, asked("{}"), "1", 8);
    CHECK(!writer->text_first());
    auto reader = make_anthropic_reader(false);
    SseParser parser;
    parser.feed(*writer->end(answer(body, "ab")),
                [&](const SseEvent& event) { reader->event(event); });
    Response response;
    reader->finish(response);
    CHECK(json::parse(response.body).at("content") == json::parse(body).at("content"));
}

TEST_CASE("text of several blocks that was sent as one is not sent again") {
    const auto body = R"({"content": [{"type": "text", "text": "ab"},
        {"type": "tool_use", "id": "t", "name": "n", "input": {}}, {"type": "text", "text": "cd"}],
        "stop_reason": "end_turn"})";
    for (std::size_t cut = 1; cut <= 4; ++cut) {
        auto writer = make_event_writer(Place::messages, asked("{}"), "1", 8);
        auto bytes = writer->text(std::string("abcd").substr(0, cut));
        bytes += *writer->end(answer(body, "abcd"));
        auto reader = make_anthropic_reader(false);
        SseParser parser;
        parser.feed(bytes, [&](const SseEvent& event) { reader->event(event); });
        Response response;
        reader->finish(response);
        CHECK(response.text == "abcd");
        CHECK(response.body.find("tool_use") != std::string::npos);
    }
}

TEST_CASE("an answer that does not go on where its text was is none") {
    for (const auto place : {Place::chat, Place::completions, Place::messages}) {
        auto writer = make_event_writer(place, asked("{}"), "1", 8);
        writer->text("other");
        CHECK(!writer->end(answer(chat_answer, chat_text)));
    }
}

TEST_CASE("a failure inside a stream is an event of the wire, without its end") {
    const auto chat =
        make_event_writer(Place::chat, asked("{}"), "1", 8)->failed({503, "full", "overloaded"});
    CHECK(chat.starts_with("data: {\"error\""));
    CHECK(chat.ends_with("\n\n"));
    CHECK(chat.find("[DONE]") == chat.npos);
    const auto message =
        make_event_writer(Place::messages, asked("{}"), "1", 8)->failed({503, "full", {}});
    CHECK(message.starts_with("event: error\ndata: {\"type\": \"error\""));
    CHECK(message.find("overloaded_error") != message.npos);
}

TEST_CASE("the list of models serves clients of both wires") {
    const auto list = json::parse(models_body("a\"b"));
    CHECK(list.at("object") == "list");
    CHECK(list.at("data").at(0).at("id") == "a\"b");
    CHECK(list.at("data").at(0).at("object") == "model");
    CHECK(list.at("data").at(0).at("type") == "model");
    CHECK(list.at("has_more") == false);
    CHECK(json::parse(models_body("")).at("data").as_array().empty());
}

TEST_CASE("the metrics are one line each, with what they mean") {
    GatewayStats stats;
    stats.requests = 7;
    stats.open = 5;
    stats.continued = 4;
    stats.failed[std::size_t(Errc::timed_out) - 1] = 2;
    const auto text = metrics_text(stats, 3);
    for (const auto line :
         {"\nevalrt_requests_total 7\n", "\nevalrt_in_flight 3\n", "\nevalrt_continued_total 4\n",
          "\nevalrt_queued 2\n", "\nevalrt_failed_total{class=\"timed_out\"} 2\n",
          "\n# TYPE evalrt_cached_tokens_total counter\n"})
        CHECK(text.find(line) != text.npos);
    CHECK(metrics_text(stats, {}).find("evalrt_open 5\n") != std::string::npos);
    CHECK(metrics_text(stats, 9).find("evalrt_queued 0\n") != std::string::npos);
}
