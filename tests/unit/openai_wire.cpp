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

Answer read_pieces(const Pieces& stream, bool chat) {
    return test::read_pieces(*make_openai_reader(chat), stream);
}

Response read_whole(std::string_view body, bool chat = true) {
    return test::read_whole(*make_openai_reader(chat), body);
}

// What a stream gives, the same at every cut. The body put together from it is an answer that
// reads as the stream did.
Answer read_stream(std::string_view stream, bool chat = true) {
    const auto answer = read_pieces({stream}, chat);
    const auto summary = answer.summary();
    every_cut(stream, [&](const Pieces& pieces) {
        REQUIRE(read_pieces(pieces, chat).summary() == summary);
    });
    if (answer.response.outcome) {
        CHECK_FALSE(answer.response.detail.empty());
        return answer;
    }
    CAPTURE(answer.response.body);
    CHECK(answer.heard == answer.response.text);
    const auto object = json::parse(answer.response.body).as_object();
    CHECK(object.size() == members(answer.response.body).size()); // no name twice
    for (const auto& choice : object.at("choices").as_array())
        CHECK(choice.as_object().at("finish_reason").is_string());
    const auto whole = read_whole(answer.response.body, chat);
    CHECK(outcome(whole) == "answered");
    CHECK(whole.text == answer.response.text);
    CHECK(whole.finish_reason == answer.response.finish_reason);
    CHECK(whole.request_id == answer.response.request_id);
    CHECK(whole.model == answer.response.model);
    CHECK(counts(whole.usage) == counts(answer.response.usage));
    return answer;
}

const std::string done = "data: [DONE]\n\n";

std::string event(std::string_view data) { return fmt::format("data: {}\n\n", data); }

std::string chunk(std::string_view choices, std::string_view more = "") {
    return event(fmt::format(R"({{"id":"c-1","object":"chat.completion.chunk","created":7,)"
                             R"("model":"m","choices":[{}]{}}})",
                             choices, more));
}

std::string delta(std::string_view members, std::string_view finish = "null") {
    return chunk(
        fmt::format(R"({{"index":0,"delta":{{{}}},"finish_reason":{}}})", members, finish));
}

std::string content(std::string_view text) { return delta("\"content\":" + json_string(text)); }

std::string finish(std::string_view reason = "stop") { return delta("", json_string(reason)); }

std::string call(std::string_view fragments) {
    return delta(fmt::format("\"tool_calls\":[{}]", fragments));
}

json::object first_message(const Response& response) {
    return json::parse(response.body).at("choices").at(0).at("message").as_object();
}

// "name(arguments)#id ..." of the first choice.
std::string calls(const Response& response) {
    std::string out;
    const auto message = first_message(response);
    if (const auto* list = message.if_contains("tool_calls"))
        for (const auto& it : list->as_array()) {
            CHECK(it.at("type") == "function");
            const auto& function = it.at("function");
            out += fmt::format("{}{}({})#{}", out.empty() ? "" : " ",
                               std::string(function.at("name").as_string()),
                               std::string(function.at("arguments").as_string()),
                               std::string(it.at("id").as_string()));
        }
    return out;
}

std::string calls_of(std::string_view fragments_and_more) {
    const auto answer = read_stream(std::string(fragments_and_more) + finish("tool_calls") + done);
    CHECK(outcome(answer.response) == "answered");
    CHECK(answer.pieces > 0);
    const auto message = first_message(answer.response);
    for (const auto& it : message.at("tool_calls").as_array())
        json::parse(it.at("function").at("arguments").as_string());
    return calls(answer.response);
}

std::string recorded(const std::string& name) {
    std::ifstream file("data/omlx/" + name, std::ios::binary);
    REQUIRE(file);
    return {std::istreambuf_iterator<char>(file), {}};
}

// The choices without what differs from one run to the next: nulls and ids of calls.
json::value comparable(json::value value) {
    if (auto* array = value.if_array())
        for (auto& it : *array) it = comparable(it);
    if (auto* object = value.if_object()) {
        json::object kept;
        for (auto& [key, it] : *object)
            if (!it.is_null() && key != "id") kept[key] = comparable(it);
        return kept;
    }
    return value;
}

json::value choices_of(const Response& response) {
    return comparable(json::parse(response.body).at("choices"));
}

} // namespace

// Streams that end well

TEST_CASE("a stream is put together to the answer that comes in one piece") {
    const auto answer =
        read_stream(delta(R"("role":"assistant","content":"","refusal":"")") + content("Hel") +
                    content("lo \"\\\n") + content("\xC3\xA9") + finish() +
                    chunk("", R"(,"usage":{"prompt_tokens":5,"completion_tokens":3,)"
                              R"("prompt_tokens_details":{"cached_tokens":4}})") +
                    done);
    CHECK(outcome(answer.response) == "answered");
    CHECK(answer.response.text == "Hello \"\\\n\xC3\xA9");
    CHECK(answer.response.finish_reason == "stop");
    CHECK(answer.response.request_id == "c-1");
    CHECK(answer.response.model == "m");
    CHECK(counts(answer.response.usage) == "5/4/3");
    CHECK(answer.last);
    CHECK(answer.pieces == 3);
    CHECK(json::parse(answer.response.body) == json::parse(R"({
        "id": "c-1", "object": "chat.completion", "created": 7, "model": "m",
        "choices": [{"index": 0, "finish_reason": "stop",
                     "message": {"role": "assistant", "content": "Hello \"\\\n\u00e9"}}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 3,
                  "prompt_tokens_details": {"cached_tokens": 4}}})"));
}

TEST_CASE("recorded streams of oMLX read as its answers do") {
    const auto a = read_stream(recorded("a-chat-stream.sse"));
    CHECK(outcome(a.response) == "answered");
    CHECK(a.response.text == "The number 12 is a special case of the number 11.");
    CHECK(a.response.finish_reason == "stop");
    CHECK(a.response.request_id == "chatcmpl-71908243");
    CHECK(counts(a.response.usage) == "36/0/16");
    CHECK(a.pieces == 7);

    const auto b = read_stream(recorded("b-chat-stream.sse"));
    CHECK(b.response.request_id == "chatcmpl-07df8ea5"); // not the keep-alive's
    CHECK(json::parse(b.response.body).at("model") == "smol");
    CHECK(choices_of(b.response) == choices_of(a.response));

    const auto cold = read_stream(recorded("b-cold-stream.sse"));
    CHECK(counts(cold.response.usage) == "-/-/-");
    for (const auto* file : {"a-chat.json", "b-chat.json"}) {
        const auto whole = read_whole(recorded(file));
        CHECK(outcome(whole) == "answered");
        CHECK(whole.text == "The capital of France is Paris.");
        CHECK(counts(whole.usage) == "37/0/7");
        CHECK(whole.body.starts_with("{\"id\""));
        CHECK(choices_of(whole) == choices_of(cold.response));
    }

    CHECK(counts(read_stream(recorded("b-warm-stream.sse")).response.usage) == "1501/1280/7");
}

TEST_CASE("recorded tool calls of oMLX are the same streamed and not") {
    for (const std::string fork : {"a", "b"}) {
        const auto stream = read_stream(recorded(fork + "-tools-stream.sse"));
        const auto whole = read_whole(recorded(fork + "-tools.json"));
        CHECK(outcome(whole) == "answered");
        CHECK(whole.finish_reason == "tool_calls");
        CHECK(whole.text.empty());
        CHECK(stream.pieces > 0);
        CHECK(calls(stream.response).starts_with(R"(get_weather({"city": "Paris"})#call_)"));
        CHECK(choices_of(stream.response) == choices_of(whole));
    }
}

TEST_CASE("recorded completions of oMLX, with an id in each chunk, read as its answer does") {
    const auto stream = read_stream(recorded("a-completions-stream.sse"), false);
    const auto whole = read_whole(recorded("a-completions.json"), false);
    CHECK(stream.response.text == "Paris.\n\nThe answer is:");
    CHECK(stream.response.finish_reason == "length");
    CHECK(stream.response.request_id == "cmpl-0e220f97");
    CHECK(json::parse(stream.response.body).at("object") == "text_completion");
    CHECK(choices_of(stream.response) == choices_of(whole));
    CHECK(counts(whole.usage) == "5/0/8");
}

TEST_CASE("mlx_lm.server's stream: comments, a role in each delta, a usage chunk of its own kind") {
    const auto text = [](std::string_view members, std::string_view finish = "null") {
        return event(fmt::format(
            R"({{"id": "chatcmpl-5", "system_fingerprint": "0.31", "object": "chat.completion.chunk", )"
            R"("model": "default_model", "created": 9, "choices": [{{"index": 0, "finish_reason": {}, )"
            R"("delta": {{"role": "assistant", {}}}}}]}})",
            finish, members));
    };
    const std::string usage = event(
        R"({"id": "chatcmpl-5", "system_fingerprint": "0.31", "object": "chat.completion", )"
        R"("model": "default_model", "created": 9, "choices": [], "usage": {"prompt_tokens": 37, )"
        R"("completion_tokens": 4, "total_tokens": 41, "prompt_tokens_details": {"cached_tokens": 30}}})");
    const auto answer = read_stream(
        ": keepalive 0/37\n\n: keepalive 37/37\n\n" + text(R"("content": "", "reasoning": "Hm")") +
        text(R"("content": "", "reasoning": "m.")") + text(R"("content": "Par")") +
        text(R"("content": "is")", "\"stop\"") + usage + done);
    CHECK(outcome(answer.response) == "answered");
    CHECK(answer.response.text == "Paris");
    CHECK(answer.pieces == 4);
    CHECK(counts(answer.response.usage) == "37/30/4");
    CHECK(json::parse(answer.response.body) == json::parse(R"({
        "id": "chatcmpl-5", "system_fingerprint": "0.31", "object": "chat.completion",
        "model": "default_model", "created": 9,
        "choices": [{"index": 0, "finish_reason": "stop", "message":
            {"role": "assistant", "content": "Paris", "reasoning": "Hmm."}}],
        "usage": {"prompt_tokens": 37, "completion_tokens": 4, "total_tokens": 41,
                  "prompt_tokens_details": {"cached_tokens": 30}}})"));

    const auto tool = read_stream(
        ": keepalive 211/211\n\n" +
        text(R"("content": "", "tool_calls": [{"function": {"name": "get_weather", "arguments": )"
             R"("{\"city\": \"Paris\"}"}, "type": "function", "index": 0, "id": "8c1e"}])") +
        text(R"("content": "")", "\"tool_calls\"") + usage + done);
    CHECK(tool.response.finish_reason == "tool_calls");
    CHECK(calls(tool.response) == R"(get_weather({"city": "Paris"})#8c1e)");
    CHECK(first_message(tool.response).at("content").is_null());
}

TEST_CASE("a stream may end without [DONE] once it has its finish_reason") {
    CHECK(outcome(read_stream(content("a") + finish()).response) == "answered");
    const auto cut_off = read_stream(content("a") + finish() + "data: [DONE]");
    CHECK(outcome(cut_off.response) == "answered");
    CHECK(cut_off.last);
    auto no_blank_line = content("a") + finish();
    no_blank_line.pop_back();
    no_blank_line.pop_back();
    CHECK(outcome(read_stream(no_blank_line).response) == "answered");
}

TEST_CASE("events that differ in their text alone read as those that differ in more") {
    // Each of the second stream's events has something of its own.
    const auto pair = [](const std::vector<std::string>& texts, bool chat, std::string_view more) {
        std::array<std::string, 2> streams;
        for (std::size_t own = 0; own < 2; ++own)
            for (std::size_t i = 0; i < texts.size(); ++i)
                streams[own] += event(fmt::format(
                    R"({{"id":"c","model":"m",{}"choices":[{{"index":0,{}:{}{}{}}}]}})",
                    own ? fmt::format("\"n{}\":{},", i, i) : "",
                    chat ? "\"delta\":{\"role\":\"assistant\",\"content\"" : "\"text\"", texts[i],
                    chat ? "}" : "", i + 1 < texts.size() ? more : ",\"finish_reason\":\"stop\""));
        return streams;
    };
    const std::vector<std::vector<std::string>> rows{
        {R"("a")", R"("b")", R"("")", R"("c")", R"("")"},
        {R"("a")", R"("\n")", R"("\u00e9\ud83d\ude00")", "\"\xc3\xa9\"", R"("\"")", R"("\\")"},
        {R"("a")", R"("b")", R"("c\ud800")", R"("d")"},                // half a pair
        {R"("a")", R"("b")", "\"\xff\"", R"("d")"},                    // no UTF-8
        {R"("a")", R"("b")", "\"\t\"", R"("d")"},                      // not escaped
        {R"("a")", R"("b")", "null", R"("c")", "[]", R"("d")"},        // no text
        {R"("a")", R"("b")", R"("x","index":0,"more":"y")", R"("c")"}, // more than a text
        {R"("a")", R"("b")", R"("\")", R"("c")"},                      // no string
        {R"("a")", R"("a")", R"("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa")", R"("")", R"("b")"}};
    const auto text = [](const Answer& it) {
        return fmt::format("{}|{}|{}|{}|{}", outcome(it.response), it.response.text, it.heard,
                           it.pieces, it.response.finish_reason);
    };
    for (const auto& texts : rows)
        for (const bool chat : {true, false})
            for (const auto more :
                 {",\"finish_reason\":null", ",\"logprobs\":null,\"finish_reason\":null",
                  ",\"finish_reason\":\"\"", ",\"logprobs\":{\"content\":[1]}", ",\"x\":[1]"}) {
                const auto streams = pair(texts, chat, more);
                CAPTURE(streams[0]);
                const auto alike = read_pieces({streams[0]}, chat),
                           other = read_pieces({streams[1]}, chat);
                CHECK(text(alike) == text(other));
                if (alike.response.outcome) continue;
                const auto choices = [](const Answer& it) {
                    return json::parse(it.response.body).at("choices");
                };
                CHECK(choices(alike) == choices(other)); // log probabilities and the rest as often
            }
}

TEST_CASE("choices by turns, and events with a name that is written otherwise, are told apart") {
    const auto of = [](int index, std::string_view text, std::string_view finish = "null") {
        return chunk(fmt::format(R"({{"index":{},"delta":{{"content":"{}"}},"finish_reason":{}}})",
                                 index, text, finish));
    };
    const auto answer = read_stream(of(0, "a") + of(0, "b") + of(1, "x") + of(1, "y") + of(0, "c") +
                                    of(1, "z") + of(0, "", "\"stop\"") + of(1, "", "\"stop\""));
    CHECK(answer.response.text == "abc");
    CHECK(json::parse(answer.response.body).at("choices").at(1).at("message").at("content") ==
          "xyz");
    std::string hidden;
    for (const auto word : {"a", "b"})
        hidden += event(fmt::format(R"({{"choic\u0065s":[{{"delta":{{"content":"1"}}}}],)"
                                    R"("choices":[{{"delta":{{"content":"{}"}}}}]}})",
                                    word));
    CHECK(read_pieces({hidden + finish()}, true).response.text == "11"); // the first of a name
}

TEST_CASE("what comes after [DONE] is not read") {
    const auto answer = read_stream(content("a") + finish() + done + content("b") + event("{"));
    CHECK(answer.response.text == "a");
    CHECK(read_stream("data:[DONE]\n\n" + content("b")).last);
    CHECK(read_stream("data:  [DONE] \n\n" + content("b")).last);
}

TEST_CASE("a chunk without choices may come anywhere") {
    const std::string usage =
        chunk("", R"(,"usage":{"prompt_tokens":5,"completion_tokens":3,"total_tokens":8})");
    for (const auto& stream :
         {usage + content("a") + content("b") + finish() + done,
          content("a") + usage + content("b") + finish() + done,
          content("a") + content("b") + finish() + usage + done,
          chunk("") + content("a") + chunk("", R"(,"sglext":{"x":1})") + content("b") + finish() +
              usage + chunk("") + done,
          event(R"({"id":"c-1","object":"chat.completion.chunk","usage":{"prompt_tokens":5,)"
                R"("completion_tokens":3}})") +
              content("a") + content("b") + finish() + event("{\"choices\":null}") + done}) {
        const auto answer = read_stream(stream);
        CHECK(outcome(answer.response) == "answered");
        CHECK(answer.response.text == "ab");
        CHECK(counts(answer.response.usage) == "5/-/3");
    }
}

TEST_CASE("usage that is null, or grows, leaves the last figures") {
    const auto answer = read_stream(
        chunk(R"({"index":0,"delta":{"content":"a"}})", R"(,"usage":null)") +
        chunk(R"({"index":0,"delta":{"content":"b"}})",
              R"(,"usage":{"prompt_tokens":5,"completion_tokens":1,"total_tokens":6})") +
        chunk(R"({"index":0,"delta":{},"finish_reason":"stop"})",
              R"(,"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7})") +
        chunk("", R"(,"usage":null)") + done);
    CHECK(counts(answer.response.usage) == "5/-/2");
    CHECK(json::parse(answer.response.body).at("usage").at("total_tokens") == 7);

    const auto none = read_stream(
        chunk(R"({"index":0,"delta":{"content":"a"}})", R"(,"usage":null)") + finish() + done);
    CHECK(counts(none.response.usage) == "-/-/-");
}

TEST_CASE("every place where cached tokens are reported is found, streamed and not") {
    struct Row {
        const char* members;
        const char* counts;
    };
    for (
        const auto& row : {
            Row{R"("usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":8}})",
                "9/8/-"},
            Row{R"("usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":0}})",
                "9/0/-"},
            Row{R"("usage":{"prompt_tokens":9,"prompt_tokens_details":null})", "9/-/-"},
            Row{R"("usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":null}})",
                "9/-/-"},
            Row{R"("usage":{"prompt_tokens":9,"input_tokens_details":{"cached_tokens":8}})",
                "9/8/-"},
            Row{R"("usage":{"prompt_tokens":9,"cached_tokens":8})", "9/8/-"},
            Row{R"("usage":{"prompt_tokens":9,"cache_read_input_tokens":8})", "9/8/-"},
            Row{R"("usage":{"prompt_tokens":9},"timings":{"cache_n":8,"prompt_n":1})", "9/8/-"},
            Row{R"("timings":{"cache_n":0})", "-/0/-"},
            Row{R"("usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":8}},"timings":{"cache_n":7})",
                "9/8/-"},
            Row{R"("usage":{"prompt_tokens":9},"meta_info":{"cached_tokens":8})", "9/8/-"},
            // Numbers as some servers write them, and what is no number of tokens.
            Row{R"("usage":{"prompt_tokens":9.0,"completion_tokens":1e2,"cached_tokens":8.0})",
                "9/8/100"},
            Row{R"("usage":{"prompt_tokens":9.5,"completion_tokens":"3","cached_tokens":-1})",
                "-/-/-"},
            Row{R"("usage":{"prompt_tokens":1e300,"completion_tokens":true})", "-/-/-"},
            Row{R"("usage":[])", "-/-/-"},
            Row{R"("usage":{})", "-/-/-"},
        }) {
        CAPTURE(row.members);
        const auto last = read_stream(content("a") + finish() +
                                      chunk("", fmt::format(",{}", row.members)) + done);
        CHECK(counts(last.response.usage) == row.counts);
        CHECK(
            counts(
                read_whole(
                    fmt::format(
                        R"({{"choices":[{{"message":{{"content":"a"}},"finish_reason":"stop"}}],{}}})",
                        row.members))
                    .usage) == row.counts);
    }
}

TEST_CASE("several choices are kept apart, the listener gets the first") {
    const auto choice = [](int index, std::string_view members, std::string_view finish = "null") {
        return chunk(fmt::format(R"({{"index":{},"delta":{{{}}},"finish_reason":{}}})", index,
                                 members, finish));
    };
    // The second begins, and ends, before the first.
    const auto answer =
        read_stream(choice(1, R"("content":"x")") + choice(0, R"("content":"a")") +
                    choice(1, R"("content":"y")") + choice(1, "", "\"length\"") +
                    choice(0, R"("content":"b")") + choice(0, "", "\"stop\"") + done);
    CHECK(answer.response.text == "ab");
    CHECK(answer.heard == "ab");
    CHECK(answer.pieces == 4);
    CHECK(answer.response.finish_reason == "stop");
    const auto list = json::parse(answer.response.body).at("choices").as_array();
    REQUIRE(list.size() == 2);
    CHECK(list[0].at("index") == 0);
    CHECK(list[1].at("index") == 1);
    CHECK(list[1].at("message").at("content") == "xy");
    CHECK(list[1].at("finish_reason") == "length");

    const auto together = read_stream(
        chunk(R"({"index":0,"delta":{"content":"a"}},{"index":1,"delta":{"content":"x"}})") +
        chunk(
            R"({"index":1,"delta":{},"finish_reason":"stop"},{"index":0,"delta":{},"finish_reason":"stop"})") +
        done);
    CHECK(together.response.text == "a");

    CHECK(outcome(read_stream(choice(0, R"("content":"a")", "\"stop\"") +
                              choice(1, R"("content":"x")") + done)
                      .response) == "truncated");
}

TEST_CASE("a completions stream joins texts and log probabilities") {
    const auto text = [](std::string_view members) {
        return event(fmt::format(R"({{"id":"cmpl-1","object":"text_completion","created":7,)"
                                 R"("model":"m","choices":[{{"index":0,{}}}]}})",
                                 members));
    };
    const auto answer = read_stream(
        text(
            R"("text":"Par","finish_reason":null,"logprobs":{"tokens":["Par"],)"
            R"("token_logprobs":[-0.5],"top_logprobs":[{"Par":-0.5,"Lon":-1.5}],"text_offset":[0]})") +
            text(R"("text":"is","finish_reason":null,"logprobs":{"tokens":["is"],)"
                 R"("token_logprobs":[null],"top_logprobs":[null],"text_offset":[3]})") +
            text(R"("text":"","finish_reason":"length","logprobs":null)") + done,
        false);
    CHECK(answer.response.text == "Paris");
    CHECK(answer.response.finish_reason == "length");
    CHECK(json::parse(answer.response.body) == json::parse(R"({
        "id": "cmpl-1", "object": "text_completion", "created": 7, "model": "m",
        "choices": [{"index": 0, "text": "Paris", "finish_reason": "length", "logprobs": {
            "tokens": ["Par", "is"], "token_logprobs": [-0.5, null],
            "top_logprobs": [{"Par": -0.5, "Lon": -1.5}, null], "text_offset": [0, 3]}}]})"));
}

TEST_CASE("log probabilities of a chat stream are joined") {
    const auto token = [](std::string_view text, double logprob) {
        return chunk(fmt::format(
            R"({{"index":0,"delta":{{"content":"{0}"}},"logprobs":{{"content":[{{"token":"{0}",)"
            R"("logprob":{1},"bytes":null,"top_logprobs":[]}}],"refusal":null}},"finish_reason":null}})",
            text, logprob));
    };
    const auto answer = read_stream(token("a", -0.25) + token("b", -1e-7) + finish() + done);
    CHECK(json::parse(answer.response.body).at("choices").at(0).at("logprobs") ==
          json::parse(R"({"content": [
              {"token": "a", "logprob": -0.25, "bytes": null, "top_logprobs": []},
              {"token": "b", "logprob": -1e-7, "bytes": null, "top_logprobs": []}]})"));
}

TEST_CASE("reasoning and members that evalrt does not know survive in the body") {
    const auto answer = read_stream(
        chunk(R"({"index":0,"delta":{"role":"assistant","content":null,"refusal":null,)"
              R"("reasoning_content":"Let ","annotations":[]}})",
              R"(,"service_tier":null,"obfuscation":"aX3")") +
        delta(R"("reasoning_content":"me see","annotations":[{"a":1}])") +
        delta(R"("content":"4","reasoning_content":null,"annotations":[{"a":2}])") +
        delta(R"("annotations":[],"audio":{"id":"x"})") +
        chunk(R"({"index":0,"delta":{"content":""},"finish_reason":"stop","matched_stop":151645,)"
              R"("token_ids":[1,2]},{"index":0,"delta":{},"token_ids":[3]})",
              R"(,"timings":{"predicted_n":3},"service_tier":"x","obfuscation":"b")") +
        chunk("", R"(,"timings":{"predicted_n":4},"service_tier":"y")") + done);
    CHECK(answer.response.text == "4");
    CHECK(answer.pieces == 3);
    CHECK(json::parse(answer.response.body) == json::parse(R"({
        "id": "c-1", "object": "chat.completion", "created": 7, "model": "m",
        "timings": {"predicted_n": 4}, "service_tier": "x",
        "choices": [{"index": 0, "finish_reason": "stop", "matched_stop": 151645,
            "token_ids": [1, 2, 3],
            "message": {"role": "assistant", "content": "4", "reasoning_content": "Let me see",
                        "annotations": [{"a": 1}, {"a": 2}], "audio": {"id": "x"}}}]})"));
}

TEST_CASE("an answer that is reasoning only is an answer without text") {
    const auto answer =
        read_stream(delta(R"("role":"assistant","reasoning":"Hm")") + finish("length") + done);
    CHECK(outcome(answer.response) == "answered");
    CHECK(answer.response.text.empty());
    CHECK(answer.pieces > 0);
    CHECK(first_message(answer.response).at("reasoning") == "Hm");
    CHECK(first_message(answer.response).at("content") == "");

    const auto whole =
        read_whole(R"({"id":"1","choices":[{"index":0,"message":{"role":"assistant",)"
                   R"("content":null,"reasoning":"Hm"},"finish_reason":"length"}]})");
    CHECK(outcome(whole) == "answered");
    CHECK(whole.text.empty());
    CHECK(first_message(whole).at("reasoning") == "Hm");
}

TEST_CASE("an empty answer is an answer") {
    const auto answer = read_stream(delta(R"("role":"assistant","content":"")") + finish() + done);
    CHECK(outcome(answer.response) == "answered");
    CHECK(answer.pieces == 0);
    CHECK(first_message(answer.response).at("content") == "");
}

TEST_CASE("content that comes as parts stays in the body, once") {
    const auto answer = read_stream(
        delta(R"("role":"assistant","content":[{"type":"text","text":"a"}])") + finish() + done);
    CHECK(outcome(answer.response) == "answered");
    CHECK(members(
              member(
                  members(elements(member(members(answer.response.body), "choices").value()).at(0)),
                  "message")
                  .value())
              .size() == 2);
    CHECK(first_message(answer.response).at("content") ==
          json::parse(R"([{"type":"text","text":"a"}])"));
}

TEST_CASE("a whole answer within a stream is an answer") {
    const auto answer = read_stream(
        event(R"({"id":"1","object":"chat.completion","choices":[{"index":0,"message":{"role":)"
              R"("assistant","content":"a","tool_calls":[{"id":"x","type":"function","function":)"
              R"({"name":"f","arguments":"{}"}}]},"finish_reason":"stop"}]})") +
        done);
    CHECK(outcome(answer.response) == "answered");
    CHECK(answer.response.text == "a");
    CHECK(calls(answer.response) == "f({})#x");
    // But not where pieces of it had come before.
    CHECK(read_stream(content("a") + chunk(R"({"index":0,"delta":{},"message":{"content":"a"},)"
                                           R"("finish_reason":"stop"})"))
              .response.text == "a");
}

// Tool calls

TEST_CASE("a tool call that comes in pieces is joined") {
    CHECK(
        calls_of(
            delta(R"("role":"assistant","content":null)") +
            call(
                R"({"index":0,"id":"a","type":"function","function":{"name":"f","arguments":""}})") +
            call(R"({"index":0,"function":{"arguments":"{\"ci"}})") +
            call(R"({"index":0,"function":{"arguments":"ty\":\"P\\\""}})") +
            call(R"({"index":0,"function":{"arguments":"\"}"}})")) == R"(f({"city":"P\""})#a)");
    // A name and an id in each piece, an id that comes late, a null where nothing is new.
    CHECK(
        calls_of(
            call(R"({"index":0,"function":{"name":"f","arguments":"{\"x\""}})") +
            call(
                R"({"index":0,"id":"a","type":"function","function":{"name":"f","arguments":":1"}})") +
            call(R"({"index":0,"id":"a","function":{"name":null,"arguments":"}"}})") +
            call(R"({"index":0,"id":null,"type":null,"function":{"arguments":null}})")) ==
        R"(f({"x":1})#a)");
    CHECK(calls_of(call(R"({"index":0,"id":"a","function":{"name":"get_"}})") +
                   call(R"({"index":0,"function":{"name":"time"}})")) == "get_time({})#a");
}

TEST_CASE("parallel and interleaved tool calls are kept apart") {
    const std::string expected = R"(f({"x":1})#a g({"y":2})#b)";
    const std::string
        a = R"({"index":0,"id":"a","type":"function","function":{"name":"f","arguments":"{\"x\""}})",
        b = R"({"index":1,"id":"b","type":"function","function":{"name":"g","arguments":"{\"y\""}})",
        a2 = R"({"index":0,"function":{"arguments":":1}"}})",
        b2 = R"({"index":1,"function":{"arguments":":2}"}})";
    CHECK(calls_of(call(a) + call(a2) + call(b) + call(b2)) == expected);
    CHECK(calls_of(call(a) + call(b) + call(a2) + call(b2)) == expected);
    CHECK(calls_of(call(a) + call(b) + call(b2) + call(a2)) == expected);
    CHECK(calls_of(call(a + "," + b) + call(b2 + "," + a2)) == expected);
    CHECK(calls_of(call(b) + call(a) + call(b2) + call(a2)) == expected);
    // One id for all calls of an answer.
    CHECK(calls_of(call(R"({"index":0,"id":"x","function":{"name":"f","arguments":"{\"x\""}})") +
                   call(R"({"index":1,"id":"x","function":{"name":"f","arguments":"{\"y\""}})") +
                   call(a2) + call(b2)) == R"(f({"x":1})#x f({"y":2})#x)");
}

TEST_CASE("a new id on a used index is a new call") {
    // Ollama gives every call the index 0.
    const auto whole = [](std::string_view id, std::string_view name, int x) {
        return call(
            fmt::format(R"({{"index":0,"id":"{}","type":"function","function":{{"name":"{}",)"
                        R"("arguments":"{{\"x\":{}}}"}}}})",
                        id, name, x));
    };
    CHECK(calls_of(whole("a", "f", 1) + whole("b", "g", 2) + whole("c", "f", 3)) ==
          R"(f({"x":1})#a g({"x":2})#b f({"x":3})#c)");
    // In pieces, and going back and forth.
    CHECK(calls_of(call(R"({"index":0,"id":"a","function":{"name":"f","arguments":"{\"x\""}})") +
                   call(R"({"index":0,"function":{"arguments":":1"}})") +
                   call(R"({"index":0,"id":"b","function":{"name":"g","arguments":"{\"y\""}})") +
                   call(R"({"index":0,"function":{"arguments":":2}"}})") +
                   call(R"({"index":0,"id":"a","function":{"arguments":"}"}})")) ==
          R"(f({"x":1})#a g({"y":2})#b)");
    // An opening and its first piece under one index, in one chunk.
    CHECK(
        calls_of(
            call(R"({"index":0,"id":"functions.ls:0","type":"function","function":{"name":"ls"}},)"
                 R"({"index":0,"function":{"arguments":" {\""}})") +
            call(R"({"index":0,"function":{"arguments":"path\": \".\"}"}})")) ==
        R"(ls( {"path": "."})#functions.ls:0)");
    // A server that makes up a new id for each piece of one call.
    CHECK(calls_of(call(R"({"index":0,"id":"a","function":{"name":"f","arguments":"{\"x\""}})") +
                   call(R"({"index":0,"id":"b","function":{"arguments":":1}"}})")) ==
          R"(f({"x":1})#a)");
}

TEST_CASE("tool calls without an index are told apart by id, or by name") {
    CHECK(calls_of(
              call(R"({"id":"a","type":"function","function":{"name":"f","arguments":"{\"x\""}})") +
              call(R"({"function":{"arguments":":1}"}})") +
              call(R"({"id":"b","type":"function","function":{"name":"g","arguments":"{\"y\""}})") +
              call(R"({"function":{"arguments":":2}"}})")) == R"(f({"x":1})#a g({"y":2})#b)");
    CHECK(calls_of(call(R"({"id":"a","function":{"name":"f","arguments":"{\"x\""}},)"
                        R"({"id":"b","function":{"name":"g","arguments":"{}"}})") +
                   call(R"({"id":"a","function":{"arguments":":1}"}})")) ==
          R"(f({"x":1})#a g({})#b)");
    CHECK(calls_of(call(R"({"function":{"name":"f","arguments":"{}"}})") +
                   call(R"({"function":{"name":"f","arguments":"{\"x\":1}"}})")) ==
          R"(f({})# f({"x":1})#)");
    CHECK(calls_of(call(R"({"id":"a","type":"function"})") +
                   call(R"({"function":{"name":"f","arguments":"{}"}})")) == "f({})#a");
    CHECK(calls_of(call(R"({"index":null,"id":"a","function":{"name":"f","arguments":"{}"}})") +
                   call(R"({"index":null,"id":"b","function":{"name":"f","arguments":"{}"}})")) ==
          "f({})#a f({})#b");
}

TEST_CASE("a tool call without arguments has an empty object") {
    CHECK(calls_of(call(R"({"index":0,"id":"a","function":{"name":"f","arguments":""}})")) ==
          "f({})#a");
    CHECK(calls_of(call(R"({"index":0,"id":"a","function":{"name":"f"}})")) == "f({})#a");
    CHECK(calls_of(call(R"({"index":0,"id":"a","function":{"name":"f","arguments":null}})")) ==
          "f({})#a");
    CHECK(calls_of(call(R"({"index":0,"id":"a","function":{"name":"f","arguments":{}}})")) ==
          "f({})#a");
}

TEST_CASE("arguments that come as an object become text") {
    CHECK(calls_of(call(
              R"({"index":0,"id":"a","function":{"name":"f","arguments":{"x": [1, "y"]}}})")) ==
          R"(f({"x":[1,"y"]})#a)");
}

TEST_CASE("text and a tool call may come in one delta, and in one-byte pieces") {
    std::string stream =
        delta(R"("role":"assistant","content":"I look ","tool_calls":[{"index":0,)"
              R"("id":"a","type":"function","function":{"name":"f","arguments":""}}])");
    for (const char c : std::string(R"({"q":"{\"}"})"))
        stream += call(fmt::format(R"({{"index":0,"function":{{"arguments":{}}}}})",
                                   json_string(std::string(1, c))));
    const auto answer = read_stream(stream + content("it up.") + finish("stop") + done);
    CHECK(answer.response.text == "I look it up.");
    CHECK(first_message(answer.response).at("content") == "I look it up.");
    CHECK(calls(answer.response) == R"(f({"q":"{\"}"})#a)");
    CHECK(answer.response.finish_reason == "stop");
}

TEST_CASE("no tool calls, no member") {
    const auto answer = read_stream(delta(R"("content":"a","tool_calls":[])") +
                                    delta(R"("tool_calls":null)") + finish() + done);
    CHECK(outcome(answer.response) == "answered");
    CHECK_FALSE(first_message(answer.response).contains("tool_calls"));
    CHECK(answer.pieces == 1);
}

TEST_CASE("calls are what there is of them, whatever the finish_reason says") {
    // vLLM says "stop" after a call that tool_choice named.
    const auto named =
        read_stream(call(R"({"index":0,"id":"1","function":{"name":"f","arguments":"{}"}})") +
                    finish("stop") + done);
    CHECK(outcome(named.response) == "answered");
    CHECK(calls(named.response) == "f({})#1");
    CHECK(named.response.finish_reason == "stop");
    // mlx_lm.server says "tool_calls" after one that it could not parse and dropped.
    const auto dropped = read_stream(content("<tool") + finish("tool_calls") + done);
    CHECK(outcome(dropped.response) == "answered");
    CHECK(calls(dropped.response) == "");
    CHECK(dropped.response.text == "<tool");
}

// Streams that end badly

TEST_CASE("a stream that stops before a finish_reason is truncated") {
    for (const auto& stream :
         {std::string(), done, std::string(": keep-alive\n\n"), chunk(""), content("a"),
          content("a") + done, delta(R"("role":"assistant")") + done,
          chunk(R"({"index":0,"delta":{"content":"a"}})") + done,
          content("a") + chunk("", R"(,"usage":{"prompt_tokens":5,"completion_tokens":3})") + done,
          delta(R"("content":"a")", "\"\"") + done,
          content("a") + content("")}) { // an error of Ollama's
        CAPTURE(stream);
        const auto answer = read_stream(stream);
        CHECK(outcome(answer.response) == "truncated");
        CHECK(answer.response.body.empty());
        CHECK(answer.response.text.empty());
    }
    CHECK(counts(read_stream(content("a") + chunk("", R"(,"usage":{"prompt_tokens":5})"))
                     .response.usage) == "5/-/-");
}

TEST_CASE("an error within a stream is an error, with the server's words") {
    struct Row {
        std::string event;
        const char* outcome;
        const char* words;
    };
    for (
        const auto& row : {
            Row{event(R"({"error":{"message":"boom","type":"server_error","code":null}})"),
                "rejected", "boom"},
            Row{event(R"({"error":{"message":"boom","type":"overloaded_error"}})"), "overloaded",
                "boom"},
            Row{event(R"({"error":{"message":"slow down","type":"rate_limit_error"}})"),
                "rate_limited", "slow down"},
            Row{event(R"({"error":""})"), "rejected", "(no words)"},
            Row{event(R"({"error":"boom"})"), "rejected", "boom"},
            Row{event(R"({"error":{"code":"x"}})"), "rejected", R"({"code":"x"})"},
            Row{event(R"({"error":{"message":{"a":1}}})"), "rejected", R"({"a":1})"},
            Row{event(R"({"error":["boom"]})"), "rejected", R"(["boom"])"},
            Row{event(R"({"object":"error","message":"boom","type":"BadRequestError","code":400})"),
                "rejected", "boom"},
            Row{event(
                    R"({"object":"error","message":"The request queue is full.","type":"x","code":503})"),
                "overloaded", "The request queue is full."},
            Row{event(R"({"detail":"boom"})"), "rejected", "boom"},
            Row{event(R"({"detail":[{"loc":["body"],"msg":"bad"}]})"), "rejected",
                R"([{"loc":["body"],"msg":"bad"}])"},
            // A status that did not make it into the status line.
            Row{event(R"({"error":{"message":"boom","code":429}})"), "rate_limited", "boom"},
            Row{event(R"({"error":{"message":"boom","code":503,"type":"unavailable_error"}})"),
                "overloaded", "boom"},
            Row{event(R"({"error":{"message":"boom","code":"401"}})"), "auth", "boom"},
            Row{event(
                    R"({"error":{"message":"request (9 tokens) exceeds the available context size (8 tokens).",)"
                    R"("code":400,"type":"exceed_context_size_error"}})"),
                "context_too_long",
                "request (9 tokens) exceeds the available context size (8 tokens)."},
            // Named as an error by its type.
            Row{"event: error\n" + event(R"({"message":"boom","type":"overloaded_error"})"),
                "overloaded", "boom"},
            Row{"event: error\n" + event(R"({"error":{"message":"boom"}})"), "rejected", "boom"},
            Row{"event: error\n" + event("boom"), "rejected", "boom"},
            Row{"event: error\n" + event(R"({"type":"x"})"), "rejected", R"({"type":"x"})"},
        }) {
        CAPTURE(row.event);
        for (const auto& stream :
             {row.event, row.event + done, content("Partial") + row.event,
              content("Partial") + row.event + done,
              content("Partial") + row.event + content("more") + finish() + done}) {
            const auto answer = read_stream(stream);
            CHECK(outcome(answer.response) == row.outcome);
            CHECK(answer.response.detail == row.words);
            CHECK(answer.response.body.empty());
            CHECK(answer.response.text.empty());
        }
    }
}

TEST_CASE("a null error is none") {
    CHECK(outcome(read_stream(chunk(R"({"index":0,"delta":{"content":"a"},"finish_reason":"stop"})",
                                    R"(,"error":null,"detail":null)") +
                              done)
                      .response) == "answered");
    CHECK(outcome(read_whole(
              R"({"error":null,"detail":null,"choices":[{"message":{"content":"a"}}]})")) ==
          "answered");
    CHECK(outcome(read_whole(R"({"detail":"high","choices":[{"message":{"content":"a"}}]})")) ==
          "answered");
}

TEST_CASE("a finish_reason that says failure is one") {
    for (const auto* reason : {"error", "abort"}) {
        const auto answer = read_stream(content("a") + finish(reason) + done);
        CHECK(outcome(answer.response) == "rejected");
        CHECK(answer.response.detail.find(reason) != std::string::npos);
        for (const auto* body :
             {R"({{"choices":[{{"message":{{"content":"a"}},"finish_reason":"{}"}}]}})",
              R"({{"choices":[{{"message":{{"content":"a"}},"finish_reason":"stop"}},{{"index":1,)"
              R"("message":{{"content":"a"}},"finish_reason":"{}"}}]}})"})
            CHECK(outcome(read_whole(fmt::format(fmt::runtime(body), reason))) == "rejected");
    }
    for (const auto* reason : {"stop", "length", "tool_calls", "content_filter", "eos"})
        CHECK(read_stream(content("a") + finish(reason) + done).response.finish_reason == reason);
}

TEST_CASE("an event that is no JSON object makes the stream malformed") {
    for (const auto* data :
         {"{", "[]", "12", "\"a\"", "null", "<html>", "{\"a\":1}{\"b\":2}", "{\"a\":tru}"}) {
        CAPTURE(data);
        const auto answer =
            read_stream(content("a") + event(data) + content("b") + finish() + done);
        CHECK(outcome(answer.response) == "malformed");
        CHECK(answer.response.detail.find(data) != std::string::npos);
        CHECK(answer.response.body.empty());
    }
    // Nothing is not something bad.
    CHECK(outcome(
              read_stream("data:\n\n" + content("a") + "data: \n\n" + finish() + done).response) ==
          "answered");
}

TEST_CASE("members of the wrong kind are not taken for something") {
    const auto answer = read_stream(
        chunk(
            R"({"index":0,"delta":{"content":"a","tool_calls":{},"role":7},"finish_reason":false})") +
        chunk(R"({"index":0,"delta":"b"},{"index":0,"delta":null},7,null)") +
        chunk(R"({"index":0,"delta":{"tool_calls":[7,null]},"logprobs":[]})") +
        event(R"({"choices":{}})") + event(R"({"choices":[[]]})") + finish() + done);
    CHECK(outcome(answer.response) == "answered");
    CHECK(answer.response.text == "a");
}

// What is nearly JSON

TEST_CASE("a lone surrogate, broken UTF-8 or a bare NaN does not lose a stream") {
    const std::string replacement = "\xEF\xBF\xBD";
    const auto odd = [](std::string_view members) { return delta(members); };
    struct Row {
        std::string members, text;
    };
    for (const auto& row :
         {Row{R"("content":"x\ud800y")", "x" + replacement + "y"},
          Row{R"("content":"\ude00\ud83d")", replacement + replacement},
          Row{"\"content\":\"x\xffy\"", "x" + replacement + "y"},
          Row{"\"content\":\"\xED\xA0\x80\"", replacement + replacement + replacement},
          Row{R"("content":"x","score":NaN)", "x"},
          Row{R"("content":"x","score":[-Infinity,Infinity,1e999])", "x"},
          Row{R"("content":"x","n":123456789012345678901234567890)", "x"},
          Row{"\"content\":\"x\ty\"", "x\ty"}}) {
        CAPTURE(row.members);
        const auto answer =
            read_stream(content("a") + odd(row.members) + content("b") + finish() + done);
        CHECK(outcome(answer.response) == "answered");
        CHECK(answer.response.text == "a" + row.text + "b");
        CHECK(repaired_utf8(answer.response.body) == answer.response.body);
        // The same in the first chunk, which also says what the whole answer is called.
        CHECK(read_stream(odd(row.members) + finish() + done).response.text == row.text);
    }
    const auto first = read_stream(
        event(R"({"id":"\ud800","x":NaN,"choices":[{"index":0,"delta":{"content":"a"},)"
              R"("finish_reason":"stop"}],"usage":{"prompt_tokens":5,"rate":Infinity}})") +
        done);
    CHECK(outcome(first.response) == "answered");
    CHECK(first.response.request_id == replacement);
    CHECK(counts(first.response.usage) == "5/-/-");
    const auto logprobs = read_stream(
        chunk(
            R"({"index":0,"delta":{"content":"a"},"logprobs":{"content":[{"logprob":-Infinity}]},)"
            R"("finish_reason":"stop"})") +
        done);
    CHECK(json::parse(logprobs.response.body).at("choices").at(0).at("logprobs") ==
          json::parse(R"({"content": [{"logprob": null}]})"));
}

TEST_CASE("a lone surrogate, broken UTF-8 or a bare NaN does not lose a whole answer") {
    const std::string replacement = "\xEF\xBF\xBD";
    const auto body = [](std::string_view content, std::string_view more = "null") {
        return fmt::format(R"({{"id":"1","choices":[{{"index":0,"message":{{"role":"assistant",)"
                           R"("content":"{}"}},"logprobs":{},"finish_reason":"stop"}}]}})",
                           content, more);
    };
    struct Row {
        std::string body, text;
    };
    for (const auto& row :
         {Row{body(R"(x\ud800y)"), "x" + replacement + "y"},
          Row{body("x\xff\xED\xA0\x80"),
              "x" + replacement + replacement + replacement + replacement},
          Row{body("x", "[NaN,-Infinity]"), "x"}, Row{" \n" + body("x", "1e999") + "\n", "x"},
          Row{"\xEF\xBB\xBF" + body("x\ny"), "x\ny"}}) {
        CAPTURE(row.body);
        const auto answer = read_whole(row.body);
        CHECK(outcome(answer) == "answered");
        CHECK(answer.text == row.text);
        CHECK(answer.finish_reason == "stop");
        // What is handed on is JSON.
        CHECK(first_message(answer).at("content") == json::value(row.text));
    }
    // A surrogate pair is none of it, nor is text that looks like NaN.
    const auto good = body(R"(\ud83d\ude00 NaN \\ud800)");
    CHECK(read_whole(good).body == good);
    CHECK(read_whole(good).text == "\xF0\x9F\x98\x80 NaN \\ud800");
}

// Whole bodies

TEST_CASE("a whole answer is handed on as it came") {
    const std::string body =
        R"({ "id" : "x-1", "object":"chat.completion", "created": 1.5e9, "model":"m","extra":[1, 2.50],)"
        R"("choices":[{"index":0,"message":{"role":"assistant","content":"Hi \u00e9"},"finish_reason":"stop"}],)"
        R"("usage":{"prompt_tokens":5,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}})";
    const auto answer = read_whole(body);
    CHECK(outcome(answer) == "answered");
    CHECK(answer.body == body);
    CHECK(answer.text == "Hi \xC3\xA9");
    CHECK(answer.finish_reason == "stop");
    CHECK(answer.request_id == "x-1");
    CHECK(counts(answer.usage) == "5/4/3");
    // But for what is around it: a byte order mark, spaces to keep us waiting, line ends.
    CHECK(read_whole("   \n " + body + "\r\n").body == body);
    CHECK(read_whole("\xEF\xBB\xBF" + body).body == body);
    CHECK(read_whole("\xEF\xBB\xBF  " + body + "\n").body == body);
}

TEST_CASE("a whole answer to a completion has its text in the choice") {
    const auto answer = read_whole(
        R"({"choices":[{"text":" Paris","index":0,"logprobs":{"tokens":[" Paris"]},"finish_reason":"length"}]})",
        false);
    CHECK(outcome(answer) == "answered");
    CHECK(answer.text == " Paris");
    CHECK(answer.finish_reason == "length");
}

TEST_CASE("tool calls with null content are an answer without text") {
    const auto answer = read_whole(
        R"({"choices":[{"index":0,"message":{"role":"assistant","content":null,"tool_calls":[{"id":"a",)"
        R"("type":"function","function":{"name":"f","arguments":"{}"}}]},"finish_reason":"tool_calls"}]})");
    CHECK(outcome(answer) == "answered");
    CHECK(answer.text.empty());
    CHECK(calls(answer) == "f({})#a");
}

TEST_CASE("a 200 that is no answer is a failure of its class") {
    struct Row {
        std::string body;
        const char* outcome;
        const char* words;
    };
    for (const auto& row : {
             Row{"", "malformed", "empty"},
             Row{"   \n ", "malformed", "empty"},
             Row{"\xEF\xBB\xBF", "malformed", "empty"},
             Row{"<!DOCTYPE html><html>login</html>", "malformed", "web page"},
             Row{"\n <html>", "malformed", "web page"},
             Row{"OK", "malformed", "OK"},
             Row{"null", "malformed", "not JSON"},
             Row{"[{}]", "malformed", "not JSON"},
             Row{R"({"choices":[{"message":{"content":"a")", "malformed", "not JSON"},
             Row{R"({"choices":[]})", "malformed", "no choices"},
             Row{R"({"choices":null})", "malformed", "no choices"},
             Row{R"({"id":"x"})", "malformed", "no choices"},
             Row{R"({"choices":[{"index":0,"finish_reason":"stop"}]})", "malformed", "no message"},
             Row{R"({"choices":[{"text":"x","finish_reason":"stop"}]})", "malformed", "no message"},
             Row{R"({"error":{"message":"boom","type":"server_error"}})", "rejected", "boom"},
             Row{R"(   {"error":"boom"})", "rejected", "boom"},
             Row{R"({"error":{"message":"boom","type":"overloaded_error"}})", "overloaded", "boom"},
             Row{R"({"object":"error","message":"boom","code":429})", "rate_limited", "boom"},
             Row{R"({"detail":"boom"})", "rejected", "boom"},
             Row{R"({"error":{"message":"boom"},"choices":[]})", "rejected", "boom"},
         }) {
        CAPTURE(row.body);
        const auto answer = read_whole(row.body);
        CHECK(outcome(answer) == row.outcome);
        CHECK(answer.detail.find(row.words) != std::string::npos);
        CHECK(answer.text.empty());
        CHECK(answer.body.empty());
    }
}

TEST_CASE("the words of a failure are short and valid UTF-8") {
    for (const std::string text : {"\xff\xfe", "\xC3", "a\x80\nb"}) {
        CHECK(repaired_utf8(read_whole(text).detail) == read_whole(text).detail);
        const auto stream = read_stream(event("{" + text)).response.detail;
        CHECK(repaired_utf8(stream) == stream);
    }
    // A cut never goes through a character.
    for (int pad = 0; pad < 4; ++pad) {
        std::string text(pad, 'x');
        for (int i = 0; i < 1000; ++i) text += "\xF0\x9F\x98\x80";
        Response response;
        read_rejection(500, text, response);
        CHECK(response.detail.size() < 1100);
        CHECK(response.detail.find("\xEF\xBF\xBD") == std::string::npos);
        CHECK(repaired_utf8(response.detail) == response.detail);
        CHECK(response.detail.ends_with("\xF0\x9F\x98\x80..."));
    }
}

// Rejections

TEST_CASE("a status and the server's words make the class") {
    struct Row {
        int status;
        const char* body;
        const char* outcome;
        const char* detail;
    };
    for (
        const auto& row : {
            // tinygpt: plain text
            Row{400, "json must be object", "rejected", "HTTP 400: json must be object"},
            Row{404, "not found: POST /v1/x", "rejected", "HTTP 404: not found: POST /v1/x"},
            Row{500, "error: boom\n", "rejected", "HTTP 500: error: boom"},
            Row{500, "", "rejected", "HTTP 500: (no words)"},
            Row{404, "Not Found", "rejected", "HTTP 404: Not Found"},
            Row{502, "<html><body>Bad Gateway</body></html>", "rejected", "HTTP 502: a web page"},
            // mlx_lm.server: a string
            Row{404, R"({"error": "list index out of range"})", "rejected",
                "HTTP 404: list index out of range"},
            // FastAPI
            Row{404, R"({"detail":"Not Found"})", "rejected", "HTTP 404: Not Found"},
            Row{422, R"({"detail":[{"loc":["body","messages"],"msg":"field required"}]})",
                "rejected", R"(HTTP 422: [{"loc":["body","messages"],"msg":"field required"}])"},
            // SGLang: not nested
            Row{503,
                R"({"object":"error","message":"The request queue is full.","type":"x","code":503})",
                "overloaded", "HTTP 503: The request queue is full."},
            Row{400,
                R"({"object":"error","message":"bad","type":"BadRequestError","param":null,"code":400})",
                "rejected", "HTTP 400: bad"},
            // llama-server
            Row{503,
                R"({"error":{"code":503,"message":"Loading model","type":"unavailable_error"}})",
                "overloaded", "HTTP 503: Loading model"},
            Row{400,
                R"({"error":{"code":400,"type":"exceed_context_size_error","message":"request (9 tokens) exceeds"}})",
                "context_too_long", "HTTP 400: request (9 tokens) exceeds"},
            // vLLM, OpenAI
            Row{400,
                R"({"error":{"message":"This model's maximum context length is 8 tokens. However","code":400}})",
                "context_too_long",
                "HTTP 400: This model's maximum context length is 8 tokens. However"},
            Row{400,
                R"({"error":{"message":"too many","type":"invalid_request_error","code":"context_length_exceeded"}})",
                "context_too_long", "HTTP 400: too many"},
            // SGLang, LM Studio, Gemini, Anthropic
            Row{400,
                R"({"object":"error","message":"The input (9 tokens) is longer than the model's context length (8 tokens)."})",
                "context_too_long",
                "HTTP 400: The input (9 tokens) is longer than the model's context length (8 "
                "tokens)."},
            Row{400,
                R"({"error":{"message":"Input length (9 tokens) exceeds the maximum allowed length (8 tokens)."}})",
                "context_too_long",
                "HTTP 400: Input length (9 tokens) exceeds the maximum allowed length (8 tokens)."},
            Row{400,
                R"({"error":"Trying to keep the first 9 tokens when context the overflows. Context length is 8"})",
                "context_too_long",
                "HTTP 400: Trying to keep the first 9 tokens when context the overflows. Context "
                "length is 8"},
            Row{400,
                R"({"error":{"message":"The input token count exceeds the maximum number of tokens allowed (8)."}})",
                "context_too_long",
                "HTTP 400: The input token count exceeds the maximum number of tokens allowed "
                "(8)."},
            Row{400,
                R"({"type":"error","error":{"type":"invalid_request_error","message":"prompt is too long: 9 tokens > 8 maximum"}})",
                "context_too_long", "HTTP 400: prompt is too long: 9 tokens > 8 maximum"},
            Row{401, R"({"error":{"message":"Incorrect API key","code":"invalid_api_key"}})",
                "auth", "HTTP 401: Incorrect API key"},
            Row{403, "", "auth", "HTTP 403: (no words)"},
            Row{429,
                R"({"error":{"message":"Request too large for gpt-4o on tokens per min (TPM): Limit 8, Requested 9.","type":"tokens","code":"rate_limit_exceeded"}})",
                "context_too_long",
                "HTTP 429: Request too large for gpt-4o on tokens per min (TPM): Limit 8, "
                "Requested 9."},
            Row{429, R"({"error":{"message":"Rate limit reached","type":"requests"}})",
                "rate_limited", "HTTP 429: Rate limit reached"},
            Row{429, "slow down", "rate_limited", "HTTP 429: slow down"},
            // Waiting does not bring money.
            Row{429,
                R"({"error":{"message":"You exceeded your current quota","type":"insufficient_quota",)"
                R"("code":"insufficient_quota"}})",
                "rejected", "HTTP 429: You exceeded your current quota"},
            Row{529,
                R"({"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}})",
                "overloaded", "HTTP 529: Overloaded"},
            Row{413, R"({"error":{}})", "rejected", "HTTP 413: {}"},
            Row{500, R"({"something":"else"})", "rejected", R"(HTTP 500: {"something":"else"})"},
            Row{500, "[1]", "rejected", "HTTP 500: [1]"},
            Row{500, R"({"error":"\ud800"})", "rejected", "HTTP 500: \xEF\xBF\xBD"},
            // A status line is worth more than a code in the body, or words.
            Row{500, R"({"error":{"message":"server busy"}})", "rejected", "HTTP 500: server busy"},
            Row{400, R"({"error":{"message":"boom","code":503}})", "rejected", "HTTP 400: boom"},
        }) {
        CAPTURE(row.status, row.body);
        Response response;
        response.status = row.status;
        read_rejection(row.status, row.body, response);
        CHECK(outcome(response) == row.outcome);
        CHECK(response.detail == row.detail);
    }
}

TEST_CASE("recorded rejections of oMLX have their class and words") {
    const auto rejection = [](int status, const std::string& file) {
        Response response;
        read_rejection(status, recorded(file), response);
        CHECK(response.body == recorded(file));
        return outcome(response) + " " + response.detail;
    };
    CHECK(rejection(400, "a-too-long.json") ==
          "context_too_long HTTP 400: Prompt too long: 9031 tokens exceeds max context window of "
          "8192 tokens");
    CHECK(rejection(404, "a-not-found.json") == "rejected HTTP 404: Not Found");
    CHECK(rejection(422, "a-not-json.json") == "rejected HTTP 422: body -> 1: JSON decode error");
}

TEST_CASE("a rejection that is a JSON object is kept as the body") {
    Response response;
    read_rejection(400, "  {\"error\": \"boom\"}", response);
    CHECK(response.body == "{\"error\": \"boom\"}");
    Response text;
    read_rejection(400, "boom", text);
    CHECK(text.body.empty());
}

// Requests

namespace {

const BackendRow& row_of(std::string_view name) {
    const auto* row = find_backend_row(name);
    REQUIRE(row);
    return *row;
}

Request request_of(std::string body) {
    Request request;
    request.body = std::move(body);
    return request;
}

struct Sent {
    std::string body;
    bool stream;
    std::string notes;
};

Sent prepared(const BackendRow& row, std::string body, std::string_view model = "",
              bool override_model = false) {
    const auto it = prepare_openai(request_of(std::move(body)), row, model, override_model);
    REQUIRE(it.error.empty());
    Sent sent{std::string(it.body.text().view()), it.stream, ""};
    REQUIRE_FALSE(check_object(sent.body));
    for (const auto& note : it.notes) sent.notes += note + "\n";
    return sent;
}

const std::string options = R"("stream": true, "stream_options": {"include_usage": true}})";

} // namespace

TEST_CASE("a body that needs no fixing goes out as the same bytes") {
    for (const auto* name : {"tinygpt", "omlx", "mlx-server", "openai-url"})
        for (
            const std::string body :
            {R"(  {"model" : "m", "stream":false,"x":{"y":[1.50, "\u00e9"]},"max_tokens":9,"temperature":1 }  )",
             R"({"model":"m","stream":true,"stream_options":{"include_usage":true},"temperature":0,"max_tokens":9})"}) {
            const auto request = request_of(body);
            const auto it = prepare_openai(request, row_of(name), "other", false);
            CHECK(it.body.text().view().data() == request.body.view().data());
            CHECK(it.body.text().view() == body);
            CHECK(it.notes.empty());
            CHECK(it.error.empty());
        }
}

TEST_CASE("the model is set where there is none, and overridden where that is asked for") {
    const auto& row = row_of("tinygpt");
    CHECK(prepared(row, R"({"a":1})", "m").body == R"({"a":1, "model": "m"})");
    CHECK(prepared(row, R"({"model":null})", "m").body == R"({"model":"m"})");
    CHECK(prepared(row, R"({"model":"x"})", "m").body == R"({"model":"x"})");
    CHECK(prepared(row, R"({"model": "x","a":1})", "m", true).body == R"({"model": "m","a":1})");
    CHECK(prepared(row, R"({"model":"x"})", "", true).body == R"({"model":"x"})");
    CHECK(prepared(row, "{}", R"(a"b\)").body == R"({"model": "a\"b\\"})");
    CHECK(prepared(row_of("mlx-server"), R"({"stream":false,"model":null})", "m").body ==
          R"({"stream":false,"model":"m"})");
}

TEST_CASE("nulls are dropped, and that is said, for a server that they break") {
    const auto sent = prepared(
        row_of("mlx-server"), R"({"stream":false,"max_tokens":null,"n":{"x":null},"stop" : null})");
    CHECK(sent.body == R"({"stream":false,"n":{"x":null}})");
    CHECK(sent.notes.find("\"max_tokens\": null") != std::string::npos);
    CHECK(sent.notes.find("\"stop\": null") != std::string::npos);
    CHECK(sent.notes.find("mlx-server") != std::string::npos);
    CHECK(prepared(row_of("mlx-server"), R"({"stream":false,"model":null})").body ==
          R"({"stream":false})");

    const std::string nulls = R"({"stream":false,"max_tokens":null,"stop":null})";
    CHECK(prepared(row_of("openai-url"), nulls).body == nulls);
    CHECK(prepared(row_of("openai-url"), nulls).notes.empty());
}

TEST_CASE("a seed is dropped where it has no effect but to cost time, and that is said") {
    const auto& row = row_of("mlx-server");
    for (const std::string temperature :
         {"", R"("temperature":0,)", R"("temperature":0.0,)", R"("temperature": 0e5,)"}) {
        CAPTURE(temperature);
        const auto sent = prepared(row, "{" + temperature + R"("seed":1,"stream":false})");
        CHECK(sent.body == "{" + temperature + R"("stream":false})");
        CHECK(sent.notes.starts_with("dropped \"seed\""));
    }
    CHECK(prepared(row, R"({"temperature":null,"seed":1,"stream":false})").body ==
          R"({"stream":false})");

    const std::string warm = R"({"temperature":0.7,"seed":1,"stream":false})";
    CHECK(prepared(row, warm).body == warm);
    CHECK(prepared(row, warm).notes.find("one at a time") != std::string::npos);
    CHECK(prepared(row, R"({"temperature":1e-3,"seed":1,"stream":false})").body ==
          R"({"temperature":1e-3,"seed":1,"stream":false})");

    const std::string cold = R"({"temperature":0,"seed":1,"stream":false,"max_tokens":1})";
    for (const auto* other : {"tinygpt", "openai-url"}) {
        CHECK(prepared(row_of(other), cold).body == cold);
        CHECK(prepared(row_of(other), cold).notes.empty());
    }
}

TEST_CASE("a stream with usage is asked for where the server's streams are complete") {
    const auto& row = row_of("openai-url");
    auto sent = prepared(row, R"({"a":1})");
    CHECK(sent.body == R"({"a":1, )" + options);
    CHECK(sent.stream);
    CHECK(sent.notes.empty());
    CHECK(prepared(row, R"({"stream":null})").body ==
          R"({"stream":true, "stream_options": {"include_usage": true}})");
    CHECK(prepared(row_of("mlx-server"), R"({"a":1,"stream":null})").stream);
    CHECK(prepared(row, R"({"stream":true})").body ==
          R"({"stream":true, "stream_options": {"include_usage": true}})");
    CHECK(prepared(row, R"({"stream":true,"stream_options":null})").body ==
          R"({"stream":true,"stream_options":{"include_usage": true}})");
    const std::string own = R"({"stream":true,"stream_options":{"include_usage":false}})";
    CHECK(prepared(row, own).body == own);

    sent = prepared(row, R"({"stream":false})");
    CHECK(sent.body == R"({"stream":false})");
    CHECK_FALSE(sent.stream);

    sent = prepared(row_of("tinygpt"), R"({"a":1})");
    CHECK(sent.body == R"({"a":1})");
    CHECK_FALSE(sent.stream);
    sent = prepared(row_of("tinygpt"), R"({"stream":true})");
    CHECK(sent.body == R"({"stream":true})");
    CHECK(sent.stream);
}

TEST_CASE("log probabilities are asked for in one body") {
    const auto& row = row_of("openai-url");
    for (const std::string body :
         {R"({"logprobs":true})", R"({"logprobs":5})", R"({"logprobs":0})"}) {
        CHECK(prepared(row, body).body == body);
        CHECK_FALSE(prepared(row, body).stream);
    }
    CHECK(prepared(row, R"({"logprobs":true,"stream":true})").stream);
    CHECK(prepared(row, R"({"logprobs":false})").body == R"({"logprobs":false, )" + options);
    CHECK(prepared(row, R"({"logprobs":null})").stream);
}

TEST_CASE("a body that is no JSON object cannot be sent, and why is said") {
    for (const std::string body :
         {"", " ", "[]", "null", "{", "{\"a\":1} x", "{\"a\":1}{}", "{\"a\":NaN}",
          "{\"a\":\"\xff\"}", "{\"a\":\"\\u800\"}", "{'a':1}"}) {
        CAPTURE(body);
        const auto it = prepare_openai(request_of(body), row_of("openai-url"), "m", true);
        CHECK(it.error.find("not ") != std::string::npos);
        CHECK(it.body.size() == 0);
    }
}

TEST_CASE("where a prefix is shared, OpenAI is told by a key of its own") {
    const auto& row = *find_profile_row("openai");
    const auto body = [](char word, std::string_view question, std::string_view more = "") {
        return fmt::format(R"({{"model":"m","messages":[{{"role":"system","content":"{}"}},)"
                           R"({{"role":"user","content":"{}"}}]{}}})",
                           std::string(5000, word), question, more);
    };
    const auto key = [&](const std::string& text, bool shared = true,
                         std::string_view name = "openai") {
        auto request = request_of(text);
        const auto ends = prefix_ends(text);
        REQUIRE(ends.size() == 2);
        if (shared) request.shared_bytes = ends[0].bytes;
        const auto it = prepare_openai(request, *find_profile_row(name), "", false);
        const auto sent = it.body.text();
        return from_json_string(member(members(sent), "prompt_cache_key").value_or(""));
    };
    const auto first = key(body('a', "one"));
    CHECK(first.starts_with("evalrt-"));
    CHECK(key(body('a', "two")) == first);
    CHECK(key(body('b', "one")) != first);
    CHECK(key(body('a', "one"), false).empty());
    CHECK(key(body('a', "one", R"(,"prompt_cache_key":"mine")")) == "mine");
    CHECK(key(body('a', "one"), true, "cloud").empty());
    auto brief = request_of(R"({"messages":[{"role":"user","content":"hi"}]})");
    brief.shared_bytes = prefix_ends(brief.body)[0].bytes; // not worth it
    CHECK(prepare_openai(brief, row, "", false).body.text().view().find("cache_key") ==
          std::string::npos);
}

TEST_CASE("a router is told what has to come to one server") {
    BackendRow row;
    const auto body = [](char word, std::string_view question) {
        return fmt::format(R"({{"messages":[{{"role":"system","content":"{}"}},)"
                           R"({{"role":"user","content":"{}"}}]}})",
                           std::string(500, word), question);
    };
    const auto key = [&](const std::string& text, bool shared = true, unsigned server = 0,
                         std::string session = {}) {
        auto request = request_of(text);
        if (shared) request.shared_bytes = prefix_ends(text).at(0).bytes;
        request.server = server;
        request.session = std::move(session);
        return routing_key(request, row);
    };
    CHECK(key(body('a', "one")).empty());
    row.routing_key = true;
    const auto first = key(body('a', "one"));
    CHECK(first.starts_with("evalrt-"));
    CHECK(key(body('a', "two")) == first);
    CHECK(key(body('b', "one")) != first);
    CHECK(key(body('a', "one"), true, 1) != first); // another part of what shares it
    CHECK(key(body('a', "one"), false).empty());
    // A conversation keeps its key whatever it shares, and its name is nobody's affair.
    const auto talk = key(body('a', "one"), true, 0, "Jane Doe\r\nx: y");
    CHECK(talk.starts_with("evalrt-"));
    CHECK(talk.find_first_not_of("evalrt-0123456789abcdef") == std::string::npos);
    CHECK(key(body('b', "two"), false, 2, "Jane Doe\r\nx: y") == talk);
    CHECK(key(body('a', "one"), true, 0, "other") != talk);
    row.shared_tokens = 1024; // not worth it
    CHECK(key(body('a', "one")).empty());
}

TEST_CASE("random bodies keep every member that the row does not fix") {
    // Laws for all rows: it stays an object; unknown members stay as written, in their order.
    for (const auto& row : backend_rows())
        for (unsigned bits = 0; bits < 256; ++bits) {
            std::string body = "{ \"first\" : [1.0,{}]";
            const char* known[] = {R"(,"seed":3)",         R"(, "temperature":0)",
                                   R"(,"logprobs" :true)", R"(,"stream":true)",
                                   R"(,"stream":false)",   R"(,"model":null)",
                                   R"(,"stop":null)",      R"(,"stream_options":null)"};
            for (unsigned i = 0; i < std::size(known); ++i)
                if (bits >> i & 1) body += known[i];
            body += ", \"last\":\"}\" }";
            CAPTURE(row.name, body);
            const auto sent = prepared(row, body, "m");
            REQUIRE(sent.body.starts_with("{ \"first\" : [1.0,{}],"));
            const auto list = members(sent.body);
            REQUIRE(member(list, "last") == "\"}\"");
            REQUIRE(member(list, "model"));
            REQUIRE(member(list, "model") != "null");
            REQUIRE(sent.stream == (member(list, "stream") == "true"));
            if (row.drop_nulls) REQUIRE(sent.body.find("null") == std::string::npos);
        }
}

TEST_CASE("what the present harness sends to tinygpt goes out as the same bytes") {
    const std::string body =
        R"({"max_tokens":128,"model":"tinygpt","prompt":"Once","temperature":0})";
    const auto sent = prepared(row_of("tinygpt"), body, "tinygpt", true);
    CHECK(sent.body == body);
    CHECK_FALSE(sent.stream);
    CHECK(sent.notes.empty());
}

TEST_CASE("max_completion_tokens is renamed for a server that does not read it") {
    const auto sent = prepared(row_of("tinygpt"), R"({"max_completion_tokens": 7,"a":1})");
    CHECK(sent.body == R"({"a":1, "max_tokens": 7})");
    CHECK(sent.notes.find("is sent as \"max_tokens\"") != std::string::npos);
    CHECK(prepared(row_of("omlx"),
                   R"({"max_tokens":9,"max_completion_tokens":7,"stream":false,"temperature":0})")
              .body == R"({"max_tokens":7,"stream":false,"temperature":0})");
    for (const std::string body : {R"({"max_completion_tokens":7,"stream":false})",
                                   R"({"max_completion_tokens":null,"stream":false})"})
        CHECK(prepared(row_of("openai-url"), body).body == body);
    const std::string null = R"({"max_completion_tokens":null,"max_tokens":3})";
    CHECK(prepared(row_of("tinygpt"), null).body == null);
}

TEST_CASE("a limit or temperature that a server puts in by itself is said, not changed") {
    auto sent = prepared(row_of("tinygpt"), R"({"a":1})");
    CHECK(sent.body == R"({"a":1})");
    CHECK(sent.notes.find("tinygpt ends answers after 128 tokens") != std::string::npos);
    CHECK(prepared(row_of("tinygpt"), R"({"max_tokens":1})").notes.empty());
    sent = prepared(row_of("mlx-server"), R"({"stream":false})");
    CHECK(sent.body == R"({"stream":false})");
    CHECK(sent.notes.find("after 512 tokens") != std::string::npos);
    sent = prepared(row_of("omlx"), R"({"stream":false})");
    CHECK(sent.body == R"({"stream":false})");
    CHECK(sent.notes ==
          "requests have no \"temperature\": omlx then takes 1; send one to choose\n");
    CHECK(prepared(row_of("omlx"), R"({"stream":false,"temperature":0})").notes.empty());
    CHECK(prepared(row_of("omlx"), R"({"stream":false,"temperature":null})").notes.size() > 0);
    CHECK(prepared(row_of("openai-url"), R"({"stream":false})").notes.empty());
}

TEST_CASE("content in parts becomes one string for a server that reads strings only") {
    const auto& row = row_of("tinygpt");
    const auto sent = prepared(
        row,
        R"({"max_tokens":1,"messages":[{"role":"system","content":"s"}, {"role":"user",)"
        R"("content":[{"type":"text","text":"a\n\u00e9"},{"type":"text","text":" b"}],"name":"x"}]})");
    CHECK(sent.body == R"({"max_tokens":1,"messages":[{"role":"system","content":"s"}, )"
                       R"({"role":"user","content":"a\n\u00e9 b","name":"x"}]})");
    CHECK(sent.notes.find("as one string") != std::string::npos);
    const auto odd = prepare_openai(
        request_of(R"({"max_tokens":1,"messages":[{"content":[{"text":"a\ud83d"},"b",7,)"
                   R"({"text":null}]}]})"),
        row, "", false);
    CHECK(odd.body.text().view() == R"({"max_tokens":1,"messages":[{"content":"a\ud83db"}]})");
    for (const std::string body :
         {R"({"max_tokens":1,"messages":[{"role":"user","content":"[a]"}]})",
          R"({"max_tokens":1,"messages":[{"role":"assistant","content":null}]})",
          R"({"max_tokens":1,"messages":[]})", R"({"max_tokens":1,"messages":"x"})",
          R"({"max_tokens":1,"messages":[1,"content"]})"}) {
        CAPTURE(body);
        CHECK(prepared(row, body).body == body);
        CHECK(prepared(row, body).notes.empty());
    }
    const std::string image =
        R"({"messages":[{"role":"user","content":[{"type":"text","text":"what is this?"},)"
        R"({"type":"image_url","image_url":{"url":"data:"}}]}],"stream":false})";
    const auto refused = prepare_openai(request_of(image), row, "", false);
    CHECK(refused.error.find("\"image_url\"") != std::string::npos);
    CHECK(refused.error.find("tinygpt") != std::string::npos);
    CHECK(refused.body.size() == 0);
    CHECK(prepared(row_of("openai-url"), image).body == image);
}

TEST_CASE("more choices than a server gives are refused, not answered with one") {
    for (const auto* name : {"tinygpt", "omlx", "mlx-server"}) {
        const auto it = prepare_openai(request_of(R"({"n":3})"), row_of(name), "", false);
        CHECK(it.error.find("ask 3 times") != std::string::npos);
        CHECK(it.error.find(name) != std::string::npos);
        for (const std::string body :
             {R"({"n":1,"stream":false,"max_tokens":1,"temperature":0})",
              R"({"n": 1.0,"stream":false,"max_tokens":1,"temperature":0})"}) {
            CHECK(prepared(row_of(name), body).body == body);
            CHECK(prepared(row_of(name), body).notes.empty());
        }
    }
    CHECK(prepared(row_of("openai-url"), R"({"n":3,"stream":false})").body ==
          R"({"n":3,"stream":false})");
}

TEST_CASE("members that a server does not read are named, unless they change nothing") {
    const auto notes = [](std::string_view row, std::string body) {
        return prepared(row_of(row),
                        R"({"stream":false,"max_tokens":1,"temperature":0,)" + body + "}")
            .notes;
    };
    CHECK(notes("mlx-server", R"("response_format":{"type":"json_object"})") ==
          "requests have \"response_format\": mlx-server does not read it\n");
    CHECK(notes("mlx-server", R"("tool_choice":"required")").find("tool_choice") !=
          std::string::npos);
    CHECK(notes("tinygpt", R"("tools":[{"type":"function"}],"top_p":0.9)") ==
          "requests have \"top_p\": tinygpt does not read it\n"
          "requests have \"tools\": tinygpt does not read it\n");
    CHECK(notes("mlx-server", R"("response_format":{"type":"text"},"tool_choice":"auto")") == "");
    CHECK(notes("mlx-server", R"("response_format":"text")") != "");
    CHECK(notes("tinygpt", R"("tools":[],"top_p":1)") == "");
    CHECK(notes("openai-url", R"("response_format":{"type":"json_object"},"n":2)") == "");
}

TEST_CASE("a number for logprobs is refused where it would only close the connection") {
    for (const std::string body :
         {R"({"logprobs":5})", R"({"logprobs":0})", R"({"logprobs":"1"})"}) {
        const auto it = prepare_openai(request_of(body), row_of("mlx-server"), "", false);
        CHECK(it.error.find("true or false") != std::string::npos);
    }
    for (const std::string body :
         {R"({"logprobs":true,"top_logprobs":5,"max_tokens":1})", R"({"logprobs":false})"})
        CHECK(prepare_openai(request_of(body), row_of("mlx-server"), "", false).error.empty());
}

TEST_CASE("what an answer is held against is read from the body") {
    const auto asked = [](std::string body, std::string_view model = "",
                          bool override_model = false, std::string_view row = "mlx-server") {
        const auto it =
            prepare_openai(request_of(std::move(body)), row_of(row), model, override_model);
        return fmt::format("{} {} {}", it.model, it.max_tokens.value_or(-1), it.processors);
    };
    CHECK(asked(R"({"model":"a\u0062","max_tokens":5})") == "ab 5 false");
    CHECK(asked(R"({"model":"a"})", "m", true) == "m 512 false");
    CHECK(asked(R"({"max_completion_tokens":6})", "m") == "m 6 false");
    CHECK(asked("{}", "", false, "openai-url") == " -1 false");
    CHECK(asked(R"({"presence_penalty":0.5})") == " 512 true");
    CHECK(asked(R"({"frequency_penalty":-1})") == " 512 true");
    CHECK(asked(R"({"repetition_penalty":1.1})") == " 512 true");
    CHECK(asked(R"({"logit_bias":{"5":1}})") == " 512 true");
    CHECK(asked(R"({"logit_bias":{},"presence_penalty":0,"frequency_penalty":0.0})") ==
          " 512 false");
    CHECK(asked(R"({"logit_bias":null,"repetition_penalty":null})") == " 512 false");
}

// Prompts

namespace {

std::string segments(std::string_view row, std::string body,
                     std::string endpoint = "/v1/chat/completions") {
    auto request = request_of(std::move(body));
    request.endpoint = std::move(endpoint);
    std::string out;
    for (const auto segment : read_prompt(request, row_of(row)).segments) {
        // They are views of the body.
        CHECK(segment.data() >= request.body.view().data());
        CHECK(segment.data() + segment.size() <=
              request.body.view().data() + request.body.view().size());
        out += fmt::format("{}{}", out.empty() ? "" : " | ", segment);
    }
    return out;
}

} // namespace

TEST_CASE("a prompt's segments come in the order in which the template renders them") {
    const std::string body =
        R"({"messages":[{"role":"system","content":"s"},{"role":"user","content":"u"}],)"
        R"("tools":[{"f":1}],"temperature":0})";
    const std::string s = R"({"role":"system","content":"s"})",
                      u = R"({"role":"user","content":"u"})", t = R"([{"f":1}])";
    CHECK(segments("mlx-server", body) == t + " | " + s + " | " + u);
    CHECK(segments("tinygpt", body) == s + " | " + t + " | " + u);
    CHECK(
        segments("tinygpt", R"({"tools":[{"f":1}],"messages":[{"role":"user","content":"u"}]})") ==
        t + " | " + u);
    CHECK(
        segments(
            "tinygpt",
            R"({"tools":[{"f":1}],"messages":[{"role":"d\u0065veloper"},{"role":"user","content":"u"}]})") ==
        R"({"role":"d\u0065veloper"} | )" + t + " | " + u);
    CHECK(segments("mlx-server", R"({"messages":[{"role":"user","content":"u"}],"tools":null})") ==
          u);
    CHECK(segments("mlx-server", R"({"system":"s","messages":[{"role":"user","content":"u"}]})") ==
          "\"s\" | " + u);
    CHECK(segments("mlx-server", R"({"prompt":"Once"})", "/v1/completions") == "\"Once\"");
    CHECK(segments("mlx-server", R"({"prompt":[1, 2]})", "/v1/completions") == "[1, 2]");
    CHECK(segments("mlx-server", R"({"messages":null})") == "");
    CHECK(segments("mlx-server", R"({"messages":[]})") == "");
    CHECK(segments("mlx-server", "{") == "");
    CHECK(segments("mlx-server", "") == "");
    CHECK(read_prompt(Request(), row_of("mlx-server")).segments.empty());
}

TEST_CASE(
    "the system prompt and the tools are a prompt's front, if they come first and a user last") {
    const std::string s = R"({"role":"system","content":"s"})",
                      u = R"({"role":"user","content":"u"})", t = R"([{"f":1}])";
    const auto front = [](std::string_view row, const std::string& messages,
                          const std::string& tools) {
        return read_prompt(
                   request_of(R"({"messages":[)" + messages + R"(],"tools":)" + tools + "}"),
                   row_of(row))
            .front;
    };
    for (const char* row : {"mlx-server", "tinygpt"}) {
        CAPTURE(row);
        CHECK(front(row, s + "," + u, t) == s.size() + t.size());
        CHECK(front(row, u + "," + s, t) == 0);
        CHECK(front(row, u, t) == 0);
        CHECK(front(row, s + "," + u, "null") == s.size());
        CHECK(front(row, u, "null") == 0);
        CHECK(front(row, "", "null") == 0);
    }
    const std::string called = s + "," + u + R"(,{"role":"tool","content":"1"})";
    CHECK(front("mlx-server", called, t) == 0);
}

TEST_CASE(
    "what may keep a server from batching is noted of a prompt, and kept apart where it must be") {
    const auto prompt = [](std::string_view row, const std::string& members) {
        return read_prompt(request_of("{\"messages\":[]" + members + "}"), row_of(row));
    };
    const std::string penalty = R"(,"frequency_penalty":0.5)", seed = R"(,"seed":1)",
                      warm = R"(,"temperature":0.7)";
    for (const char* row : {"mlx-server", "openai-url"}) {
        const bool mlx = std::string_view(row) == "mlx-server";
        CHECK(prompt(row, "").unusual == 0);
        CHECK(prompt(row, penalty).unusual == 1);
        CHECK(prompt(row, seed).unusual == (mlx ? 0 : 2)); // void at temperature 0, and dropped
        CHECK(prompt(row, seed + warm).unusual == 2);
        CHECK(prompt(row, penalty + seed + warm).unusual == 3);
        CHECK(prompt(row, penalty + seed + warm).kind == (mlx ? 3 : 0));
        CHECK(prompt(row, R"(,"seed":null,"logit_bias":{})" + warm).unusual == 0);
    }
}

TEST_CASE("mlx_lm.server says in comments how much of a prompt is computed") {
    for (const auto* all : {"keepalive 37/37", "keepalive 36/37", "keepalive 0/1"})
        CHECK(prompt_computed(all));
    for (const auto* other :
         {"", "keepalive", "keepalive 35/37", "keepalive 38/37", "keepalive 37/", "keepalive /37",
          "keepalive 37/37 ", "ping 37/37", "keep-alive", "keepalive -1/0", "keepalive 37"}) {
        CAPTURE(other);
        CHECK_FALSE(prompt_computed(other));
    }
}

TEST_CASE("whether a prompt's first text will be seen is whether its body goes out streamed") {
    for (const auto* body : {"{}", R"({"stream":true})", R"({"stream":false})",
                             R"({"stream":null})", R"({"logprobs":true})", R"({"logprobs":false})",
                             R"({"logprobs":null})", R"({"logprobs":true,"stream":true})"}) {
        CAPTURE(body);
        const auto request = request_of(body);
        for (const auto* name : {"mlx-server", "openai-url", "tinygpt"}) {
            const auto row = row_of(name);
            CHECK(read_prompt(request, row).streamed ==
                  prepare_openai(request, row, "m", false).stream);
        }
    }
    CHECK(read_prompt(request_of("{}"), row_of("mlx-server")).streamed);
    CHECK_FALSE(read_prompt(request_of(R"({"logprobs":true})"), row_of("mlx-server")).streamed);
}

TEST_CASE("a prompt's domain is its endpoint and model, its output the most it asks for") {
    const auto prompt = [](std::string body) {
        return read_prompt(request_of(std::move(body)), row_of("openai-url"));
    };
    CHECK(prompt(R"({"model":"a"})").domain != prompt(R"({"model":"b"})").domain);
    CHECK(prompt(R"({"model":"a","x":1})").domain == prompt(R"({"y":2,"model":"a"})").domain);
    auto other = request_of(R"({"model":"a"})");
    other.endpoint = "/v1/completions";
    CHECK(read_prompt(other, row_of("openai-url")).domain != prompt(R"({"model":"a"})").domain);
    CHECK_FALSE(prompt("{}").output_tokens);
    CHECK_FALSE(prompt(R"({"max_tokens":null})").output_tokens);
    CHECK(prompt(R"({"max_tokens":12})").output_tokens == 12);
    CHECK(prompt(R"({"max_tokens":12.0})").output_tokens == 12);
    CHECK(prompt(R"({"max_completion_tokens":7,"max_tokens":null})").output_tokens == 7);
    CHECK_FALSE(prompt("{").output_tokens);
}
