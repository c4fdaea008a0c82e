#include "json_text.hpp"
#include "wire.hpp"

#include "support/answers.hpp"

#include <boost/json.hpp>

#include <fmt/format.h>

#include <fstream>
#include <iterator>

namespace json = boost::json;
using namespace evalrt;
using namespace evalrt::detail;
using test::Answer;
using test::counts;
using test::every_cut;
using test::outcome;
using test::Pieces;

namespace {

Answer read_pieces(const Pieces& stream, bool input_is_total = false) {
    return test::read_pieces(*make_anthropic_reader(input_is_total), stream);
}

Response read_whole(std::string_view body, bool input_is_total = false) {
    return test::read_whole(*make_anthropic_reader(input_is_total), body);
}

// The same at every cut; the body put together reads as the stream did.
Answer read_stream(std::string_view stream) {
    const auto answer = read_pieces({stream});
    const auto summary = answer.summary();
    every_cut(stream,
              [&](const Pieces& pieces) { REQUIRE(read_pieces(pieces).summary() == summary); });
    if (answer.response.outcome) {
        CHECK_FALSE(answer.response.detail.empty());
        CHECK(answer.response.body.empty());
        return answer;
    }
    CAPTURE(answer.response.body);
    CHECK(answer.heard == answer.response.text);
    const auto object = json::parse(answer.response.body).as_object();
    CHECK(object.size() == members(answer.response.body).size()); // no name twice
    const auto whole = read_whole(answer.response.body);
    CHECK(outcome(whole) == "answered");
    CHECK(whole.text == answer.response.text);
    CHECK(whole.finish_reason == answer.response.finish_reason);
    CHECK(whole.request_id == answer.response.request_id);
    CHECK(counts(whole.usage) == counts(answer.response.usage));
    return answer;
}

std::string event(std::string_view type, std::string_view more = "") {
    return fmt::format("event: {0}\ndata: {{\"type\":\"{0}\"{1}}}\n\n", type, more);
}

std::string start(std::string_view usage = R"({"input_tokens":10,"output_tokens":1})") {
    return event("message_start",
                 fmt::format(R"(,"message":{{"id":"msg_1","type":"message","role":"assistant",)"
                             R"("model":"m","content":[],"stop_reason":null,)"
                             R"("stop_sequence":null,"usage":{}}})",
                             usage));
}

std::string block(int index, std::string_view content) {
    return event("content_block_start",
                 fmt::format(R"(,"index":{},"content_block":{})", index, content));
}

std::string delta(int index, std::string_view what) {
    return event("content_block_delta", fmt::format(R"(,"index":{},"delta":{})", index, what));
}

std::string stop(int index) {
    return event("content_block_stop", fmt::format(R"(,"index":{})", index));
}

std::string text(int index, std::string_view what) {
    return delta(index, fmt::format(R"({{"type":"text_delta","text":{}}})", json_string(what)));
}

std::string input(int index, std::string_view piece) {
    return delta(index, fmt::format(R"({{"type":"input_json_delta","partial_json":{}}})",
                                    json_string(piece)));
}

std::string tool(int index, std::string_view id = "toolu_1", std::string_view name = "f") {
    return block(index, fmt::format(R"({{"type":"tool_use","id":"{}","name":"{}","input":{{}}}})",
                                    id, name));
}

std::string end(std::string_view reason = "end_turn",
                std::string_view usage = R"({"output_tokens":7})") {
    return event("message_delta",
                 fmt::format(R"(,"delta":{{"stop_reason":"{}","stop_sequence":null}},"usage":{})",
                             reason, usage));
}

std::string message(std::string_view content, std::string_view reason, std::string_view usage) {
    return fmt::format(R"({{"id":"msg_1","type":"message","role":"assistant","model":"m",)"
                       R"("content":{},"stop_reason":"{}","stop_sequence":null,"usage":{}}})",
                       content, reason, usage);
}

const std::string text_block = R"({"type":"text","text":""})";
const std::string message_stop = event("message_stop");
const std::string hello = start() + block(0, text_block) + text(0, "Hel") + text(0, "lo") + stop(0);

std::string recorded(const std::string& name) {
    std::ifstream file("data/omlx/" + name, std::ios::binary);
    REQUIRE(file);
    return {std::istreambuf_iterator<char>(file), {}};
}

json::value content_of(const Response& response) {
    auto content = json::parse(response.body).at("content");
    for (auto& it : content.as_array()) {
        it.as_object().erase("id"); // differs from one run to the next
        if (const auto* mark = it.as_object().if_contains("cache_control"); mark && mark->is_null())
            it.as_object().erase("cache_control"); // oMLX writes it where it comes in one piece
    }
    return content;
}

} // namespace

// Streams that end well

TEST_CASE("a stream is put together to the message that comes in one piece") {
    const auto answer = read_stream(
        start(R"({"input_tokens":10,"cache_creation_input_tokens":3,"cache_read_input_tokens":4,)"
              R"("output_tokens":1})") +
        event("ping") + block(0, text_block) + text(0, "Hel") + event("ping") +
        text(0, "lo \"\\\n\xC3\xA9") + stop(0) + end() + message_stop);
    CHECK(outcome(answer.response) == "answered");
    CHECK(answer.response.text == "Hello \"\\\n\xC3\xA9");
    CHECK(answer.response.finish_reason == "end_turn");
    CHECK(answer.response.request_id == "msg_1");
    CHECK(counts(answer.response.usage) == "17/4/7");
    CHECK(answer.last);
    CHECK(answer.pieces == 2);
    CHECK(json::parse(answer.response.body) ==
          json::parse(message(R"([{"type":"text","text":"Hello \"\\\n\u00e9"}])", "end_turn",
                              R"({"input_tokens":10,"cache_creation_input_tokens":3,)"
                              R"("cache_read_input_tokens":4,"output_tokens":7})")));
}

TEST_CASE("recorded streams are put together to what the server answers in one piece") {
    for (const std::string name : {"a-messages", "a-messages-cached", "a-messages-tools"}) {
        INFO(name);
        const auto stream = read_stream(recorded(name + "-stream.sse"));
        const auto whole = read_whole(recorded(name + ".json"));
        CHECK(outcome(stream.response) == "answered");
        CHECK(outcome(whole) == "answered");
        CHECK(stream.response.text == whole.text);
        CHECK(stream.response.finish_reason == whole.finish_reason);
        CHECK(content_of(stream.response) == content_of(whole));
        CHECK(stream.response.usage.prompt_tokens == whole.usage.prompt_tokens);
        CHECK(stream.response.usage.completion_tokens == whole.usage.completion_tokens);
        CHECK(stream.pieces > 0);
    }
    CHECK(counts(read_stream(recorded("a-messages-cached-stream.sse")).response.usage) ==
          "1501/1280/7");
    CHECK(counts(read_whole(recorded("a-messages-cached.json")).usage) == "1501/1280/7");
    CHECK(counts(read_stream(recorded("a-messages-unmarked-stream.sse")).response.usage) ==
          "1501/-/7"); // it does not say
    // Its stream has an empty block of text before the call, its answer in one piece has not.
    const auto b = read_stream(recorded("b-messages-tools-stream.sse"));
    CHECK(counts(b.response.usage) == "211/0/30");
    CHECK(content_of(b.response).at(1) ==
          content_of(read_whole(recorded("b-messages-tools.json"))).at(0));
}

TEST_CASE("all kinds of blocks are put together, in their order") {
    const auto answer = read_stream(
        start() + block(0, R"({"type":"thinking","thinking":"","signature":""})") +
        delta(0, R"({"type":"thinking_delta","thinking":"Let me "})") +
        delta(0, R"({"type":"thinking_delta","thinking":"see"})") +
        delta(0, R"({"type":"signature_delta","signature":"c2ln"})") + stop(0) +
        block(1, R"({"type":"redacted_thinking","data":"ZGF0YQ=="})") + stop(1) +
        block(2, R"({"citations":[],"type":"text","text":""})") +
        delta(2, R"({"type":"citations_delta","citation":{"type":"char_location","n":1.50}})") +
        text(2, "One.") + stop(2) + tool(3) + input(3, "") + input(3, "{\"city\": \"Par") +
        input(3, "is\", \"n\": 1.0}") + stop(3) + tool(4, "toolu_2", "g") + stop(4) +
        block(5, text_block) + text(5, " Two.") + stop(5) + end("tool_use") + message_stop);
    CHECK(outcome(answer.response) == "answered");
    CHECK(answer.response.text == "One. Two."); // reasoning stays apart
    CHECK(answer.pieces == 2 + 1 + 1 + 1 + 3 + 1 + 1);
    CHECK(std::string(*member(members(answer.response.body), "content")) ==
          R"([{"type":"thinking","thinking":"Let me see","signature":"c2ln"}, )"
          R"({"type":"redacted_thinking","data":"ZGF0YQ=="}, )"
          R"({"citations":[{"type":"char_location","n":1.50}],"type":"text","text":"One."}, )"
          R"({"type":"tool_use","id":"toolu_1","name":"f","input":{"city": "Paris", "n": 1.0}}, )"
          R"({"type":"tool_use","id":"toolu_2","name":"g","input":{}}, )"
          R"({"type":"text","text":" Two."}])");
}

TEST_CASE("what is not known is ignored, and what the end says of the message is kept") {
    const auto answer = read_stream(
        ": comment\n\n" + start() + event("content_block_warm_up", R"(,"index":0)") +
        block(0, text_block) + delta(0, R"({"type":"new_delta","text":"x"})") + text(0, "a") +
        event("message_delta", R"(,"delta":{"stop_reason":"stop_sequence","stop_sequence":"\n\n",)"
                               R"("container":{"id":"c"}},"usage":{"output_tokens":2})") +
        message_stop);
    CHECK(outcome(answer.response) == "answered");
    CHECK(answer.response.text == "a");
    const auto body = json::parse(answer.response.body);
    CHECK(body.at("stop_sequence") == "\n\n");
    CHECK(body.at("container") == json::parse(R"({"id":"c"})"));
}

TEST_CASE("a stop_reason and the end of the stream are an end, without message_stop") {
    const auto answer = read_stream(hello + end());
    CHECK(outcome(answer.response) == "answered");
    CHECK_FALSE(answer.last);
    CHECK(answer.response.text == "Hello");
}

TEST_CASE("servers may leave out what the official API has") {
    const auto answer =
        read_stream(start("null") +
                    event("content_block_delta", R"(,"delta":{"type":"text_delta","text":"Hi"})") +
                    end() + "data: [DONE]\n\n");
    CHECK(outcome(answer.response) == "answered");
    CHECK(answer.response.text == "Hi");
    CHECK(counts(answer.response.usage) == "-/-/7");
    // The type only in the event's field or only in its data.
    const auto bare = read_stream("data: {\"type\":\"message_start\",\"message\":{}}\n\n"
                                  "event: message_delta\n"
                                  "data: {\"delta\":{\"stop_reason\":\"end_turn\"}}\n\n");
    CHECK(outcome(bare.response) == "answered");
}

TEST_CASE("counts are totals: the last one counts, null and nothing change none") {
    const std::string first =
        R"({"input_tokens":20,"cache_read_input_tokens":5,"output_tokens":1})";
    const auto usage = [&](std::string_view last) {
        return counts(read_stream(start(first) + block(0, text_block) + text(0, "a") +
                                  end("end_turn", last) + message_stop)
                          .response.usage);
    };
    CHECK(usage(R"({"output_tokens":9})") == "25/5/9");
    CHECK(usage(R"({"output_tokens":9,"cache_read_input_tokens":null})") == "25/5/9");
    CHECK(usage(R"({"output_tokens":9,"cache_read_input_tokens":0})") == "20/0/9");
    CHECK(usage(R"({"output_tokens":9,"input_tokens":0,"cache_creation_input_tokens":7})") ==
          "12/5/9");
    CHECK(usage("{}") == "25/5/1");
}

TEST_CASE("cached tokens are a number, zero or not known") {
    const auto usage = [](std::string_view members, bool total = false) {
        return counts(read_whole(message("[]", "end_turn", members), total).usage);
    };
    CHECK(usage(R"({"input_tokens":5,"output_tokens":2})") == "5/-/2");
    CHECK(usage(R"({"input_tokens":5,"cache_read_input_tokens":null,"output_tokens":2})") ==
          "5/-/2");
    CHECK(usage(R"({"input_tokens":5,"cache_read_input_tokens":0,"output_tokens":2})") == "5/0/2");
    CHECK(usage(R"({"input_tokens":5,"cache_read_input_tokens":3,)"
                R"("cache_creation_input_tokens":2,"output_tokens":2})") == "10/3/2");
    CHECK(usage(R"({"input_tokens":5,"cache_read_input_tokens":3,"output_tokens":2})", true) ==
          "5/3/2");
    CHECK(usage("{}") == "-/-/-");
}

TEST_CASE("a tool's input that the token limit has cut is kept as far as it is whole") {
    const auto cut = read_stream(start() + tool(0) + input(0, R"({"a": [1, {"b": "x"}, "y)") +
                                 end("max_tokens") + message_stop);
    CHECK(outcome(cut.response) == "answered");
    CHECK(json::parse(cut.response.body).at("content").at(0).at("input") ==
          json::parse(R"({"a": [1, {"b": "x"}]})"));
    const auto bad =
        read_stream(start() + tool(0) + input(0, "{\"a\": tru}") + end("tool_use") + message_stop);
    CHECK(outcome(bad.response) == "malformed");
    CHECK(bad.response.detail.find("{\"a\": tru}") != std::string::npos);
}

// Streams that do not

TEST_CASE("a stream that ends before its stop_reason is truncated") {
    for (const auto& stream :
         {hello, hello + message_stop, start(), start() + message_stop,
          hello + event("message_delta", R"(,"delta":{"stop_reason":null},"usage":{})"),
          std::string("event: ping\ndata: {\"type\":\"ping\"}\n\n"), std::string()}) {
        INFO(stream);
        CHECK(outcome(read_stream(stream).response) == "truncated");
    }
    CHECK(counts(read_stream(hello).response.usage) == "10/-/1");
}

TEST_CASE("an error inside a stream is what became of the request") {
    struct {
        const char *type, *outcome;
        int status;
    } const table[] = {{"overloaded_error", "overloaded", 529},
                       {"rate_limit_error", "rate_limited", 429},
                       {"invalid_request_error", "rejected", 400},
                       {"authentication_error", "auth", 401},
                       {"permission_error", "auth", 403},
                       {"request_too_large", "rejected", 413},
                       {"api_error", "rejected", 500},
                       {"new_error", "rejected", 200}};
    for (const auto& [type, expected, status] : table) {
        INFO(type);
        const auto error =
            event("error", fmt::format(R"(,"error":{{"type":"{}","message":"Some words"}})", type));
        for (const auto& stream : {hello + error, hello + error + message_stop, error}) {
            const auto answer = read_stream(stream);
            CHECK(outcome(answer.response) == expected);
            CHECK(answer.response.status == status); // whether another attempt is worth it
            CHECK(answer.response.detail == "Some words");
        }
    }
    const auto bare = read_stream(hello + "event: error\ndata: overloaded\n\n");
    CHECK(outcome(bare.response) == "overloaded");
    const auto limit =
        read_stream(event("error", R"(,"error":{"type":"rate_limit_error","message":"m",)"
                                   R"("details":{"error_code":"enforced_spend_limit_reached"}})"));
    CHECK(outcome(limit.response) == "rejected"); // no waiting ends it
}

TEST_CASE("a stream that is not the protocol is malformed") {
    for (const auto& [stream, words] :
         {std::pair{hello + "data: {oops\n\n" + end() + message_stop, "{oops"},
          std::pair{start() + input(3, "{}") + end() + message_stop, "block 3"}}) {
        const auto answer = read_stream(stream);
        CHECK(outcome(answer.response) == "malformed");
        CHECK(answer.response.detail.find(words) != std::string::npos);
    }
}

// Marks for the cache

TEST_CASE("the end of what others share is marked, and the end of the system prompt") {
    const std::string mark = R"(, "cache_control": {"type": "ephemeral"})";
    const std::string tools = R"([{"name": "f"}, {"name": "g"}])";
    const std::string system = R"("You are terse.")";
    const std::string first =
        R"({"role": "user", "content": [{"type": "text", "text": "document"}, )"
        R"({"type": "text", "text": "question"}]})";
    const std::string second = R"({"content": "answer", "role": "assistant"})";
    const auto body = fmt::format(R"({{"tools": {}, "system": {}, "messages": [{}, {}]}})", tools,
                                  system, first, second);
    const auto marked = [&](std::size_t shared, std::size_t least = 0) {
        return with_cache_marks(body, shared, least);
    };
    const auto expected = [](std::string text, std::string_view what, std::string_view with) {
        const auto at = text.find(what);
        REQUIRE(at != text.npos);
        return text.replace(at, what.size(), with);
    };
    const auto in_tools = expected(body, R"("g"})", R"("g")" + mark + "}");
    const auto in_system =
        expected(body, system, R"([{"type": "text", "text": )" + system + mark + "}]");
    const auto in_document = expected(in_system, R"("document"})", R"("document")" + mark + "}");
    const auto in_question = expected(in_system, R"("question"})", R"("question")" + mark + "}");
    const auto in_answer =
        expected(in_system, R"("answer")", R"([{"type": "text", "text": "answer")" + mark + "}]");
    const auto to_document = tools.size() + system.size() + first.find("document") + 10;
    for (const auto& result : {in_tools, in_system, in_document, in_question, in_answer})
        CHECK_FALSE(check_object(result));
    CHECK(marked(0) == body);
    CHECK(marked(5) == body);
    CHECK(marked(tools.size() - 1) == in_tools);
    CHECK(marked(tools.size() + system.size() - 1) == in_tools); // not within a block
    CHECK(marked(tools.size() + system.size()) == in_system);
    CHECK(marked(to_document - 1) == in_system);
    CHECK(marked(to_document) == in_document);
    CHECK(marked(tools.size() + system.size() + first.size()) == in_question);
    CHECK(marked(1000) == in_answer);
    // Below the least it is not worth it; the tools alone may be, or not.
    CHECK(marked(1000, tools.size() + system.size()) == in_answer);
    CHECK(marked(1000, tools.size() + system.size() + 1) !=
          in_answer); // only the end of what is shared
    CHECK(marked(1000, 1001) == body);
    CHECK(marked(to_document, to_document + 1) == body);
    // A caller's own marks are left alone; a text may speak of them.
    const auto own = expected(body, R"("g"})", R"("g", "cache_control": {"type": "ephemeral"}})");
    CHECK(with_cache_marks(own, 1000, 0) == own);
    const auto talk = expected(body, "document", "the \\\"cache_control\\\" field");
    CHECK(with_cache_marks(talk, 1000, 0) != talk);
}

TEST_CASE("what requests have in common is known to the end of a block, to the byte") {
    const auto body = [](std::string_view system, std::string_view first, std::string_view second) {
        return fmt::format(
            R"({{"system": "{}", "messages": [{{"role": "user", "content": )"
            R"([{{"type": "text", "text": "{}"}}, {{"type": "text", "text": "{}"}}]}}]}})",
            system, first, second);
    };
    const auto all = prefix_ends(body("sys", "doc", "one"));
    REQUIRE(all.size() == 3);
    CHECK(all[0].bytes == 5); // with its quotes
    CHECK(all[2].bytes == read_prompt({"/v1/messages", body("sys", "doc", "one")}, {}).bytes() - 2);
    SharedPrefixes shared;
    const auto add = [&](std::string_view domain, const std::string& text) {
        shared.add(domain, prefix_ends(text));
    };
    const auto bytes = [&](const std::string& text, std::string_view domain = "m") {
        return shared.bytes(domain, prefix_ends(text));
    };
    add("m", body("sys", "doc", "one"));
    CHECK(bytes(body("sys", "doc", "one")) == 0); // it is alone
    add("m", body("sys", "doc", "two"));
    add("m", body("sys", "dog", "two"));
    add("m", body("syt", "doc", "two"));
    CHECK(bytes(body("sys", "doc", "one")) == all[1].bytes);
    CHECK(bytes(body("sys", "dog", "two")) == all[0].bytes);
    CHECK(bytes(body("syt", "doc", "two")) == 0);
    CHECK(bytes(body("sys", "doc", "one"), "another model") == 0);
    add("m", body("sys", "doc", "one")); // the same once more
    CHECK(bytes(body("sys", "doc", "one")) == all[2].bytes);
    CHECK(prefix_ends("no JSON").empty());
    CHECK(prefix_ends("{}").empty());
}

TEST_CASE("what takes no mark is passed over") {
    const auto marks = [](std::string_view messages) {
        const auto out = with_cache_marks(fmt::format(R"({{"messages": {}}})", messages), 1000, 0);
        CHECK_FALSE(check_object(out));
        std::size_t count = 0;
        for (auto at = out.find("cache_control"); at != out.npos;
             at = out.find("cache_control", at + 1))
            ++count;
        return count;
    };
    CHECK(marks(R"([{"role": "user", "content": ""}])") == 0);
    CHECK(marks(R"([{"role": "user", "content": []}])") == 0);
    CHECK(marks(R"([{"role": "assistant", "content": [{"type": "thinking", "thinking": "t"},
                    {"type": "text", "text": ""}]}])") == 0);
    CHECK(marks(R"([{"role": "user", "content": "a"}, {"role": "assistant", "content": null}])") ==
          1);
    // Of chat completions: a system message, a call, a result.
    CHECK(marks(R"([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])") == 2);
    CHECK(marks(R"([{"role": "assistant", "content": null, "tool_calls": [{"id": "a"}]}])") == 1);
    CHECK(marks(R"([{"role": "tool", "tool_call_id": "a", "content": "r"}])") == 1);
}

// Answers in one piece

TEST_CASE("an answer in one piece is passed on as it came") {
    const auto body = message(R"([{"type":"thinking","thinking":"t","signature":"s"},)"
                              R"({"type":"text","text":"a"},{"type":"text","text":"b"}])",
                              "max_tokens", R"({"input_tokens":5,"output_tokens":2})");
    const auto response = read_whole(" \n " + body + "\n");
    CHECK(outcome(response) == "answered");
    CHECK(response.body == body);
    CHECK(response.text == "ab");
    CHECK(response.finish_reason == "max_tokens");
    CHECK(response.request_id == "msg_1");
    CHECK(outcome(read_whole("")) == "malformed");
    CHECK(outcome(read_whole("<html>")) == "malformed");
    CHECK(outcome(read_whole(R"({"choices": []})")) == "malformed");
    CHECK(outcome(read_whole(
              R"({"type":"error","error":{"type":"overloaded_error","message":"m"}})")) ==
          "overloaded");
}

TEST_CASE("a status that is no success is told by its words") {
    const auto read = [](int status, std::string_view type, std::string_view words = "m",
                         std::string_view more = "") {
        Response response;
        response.status = status;
        read_rejection(status,
                       fmt::format(R"({{"type":"error","error":{{"type":"{}","message":"{}"{}}},)"
                                   R"("request_id":"req_1"}})",
                                   type, words, more),
                       response);
        CHECK(response.request_id == "req_1");
        CHECK(response.status == status);
        return outcome(response);
    };
    CHECK(read(400, "invalid_request_error") == "rejected");
    CHECK(read(400, "invalid_request_error", "prompt is too long: 9 tokens > 8 maximum") ==
          "context_too_long");
    CHECK(read(401, "authentication_error") == "auth");
    CHECK(read(403, "permission_error") == "auth");
    CHECK(read(404, "not_found_error") == "rejected");
    CHECK(read(413, "request_too_large") == "rejected");
    CHECK(read(429, "rate_limit_error") == "rate_limited");
    CHECK(read(429, "rate_limit_error", "m",
               R"(,"details":{"error_code":"enforced_spend_limit_reached"})") == "rejected");
    CHECK(read(500, "api_error") == "rejected");
    CHECK(read(529, "overloaded_error") == "overloaded");
    Response response;
    response.status = 400;
    read_rejection(400, recorded("a-messages-too-long.json"), response);
    CHECK(outcome(response) == "context_too_long");
}
