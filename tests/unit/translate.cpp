#include "translate.hpp"

#include "json_text.hpp"
#include "wire.hpp"

#include "support/catch.hpp"

#include <boost/json.hpp>

#include <fmt/format.h>

namespace json = boost::json;
using namespace evalrt;
using namespace evalrt::detail;

namespace {

constexpr unsigned most = 4096;

const std::string turn = R"("messages": [{"role": "user", "content": "hi"}])";

json::value parsed(const Translated& it) {
    INFO(it.error);
    REQUIRE(it.error.empty());
    INFO(it.body);
    CHECK_FALSE(check_object(it.body));
    const auto value = json::parse(it.body);
    CHECK(value.as_object().size() == members(it.body).size()); // no name twice
    return value;
}

json::value to_messages(std::string_view body) { return parsed(chat_to_messages(body, most)); }
json::value to_chat(std::string_view body) { return parsed(messages_to_chat(body)); }

// A body with the turn and more members, to the other side, without what is always there.
json::value more_to_messages(std::string_view members) {
    auto value = to_messages(fmt::format("{{{}, \"max_tokens\": 5, {}}}", turn, members));
    CHECK(value.as_object().erase("messages") == 1);
    CHECK(value.as_object().erase("max_tokens") == 1);
    return value;
}

json::value more_to_chat(std::string_view members) {
    auto value = to_chat(fmt::format("{{{}, {}}}", turn, members));
    CHECK(value.as_object().erase("messages") == 1);
    return value;
}

std::string refused_by_messages(std::string_view members) {
    return chat_to_messages(fmt::format("{{{}, \"max_tokens\": 5, {}}}", turn, members), most)
        .error;
}

std::string refused_by_chat(std::string_view members) {
    return messages_to_chat(fmt::format("{{{}, {}}}", turn, members)).error;
}

json::value turns(std::string_view messages) {
    return to_messages(fmt::format(R"({{"messages": {}}})", messages)).at("messages");
}

json::value chat_turns(std::string_view messages) {
    return to_chat(fmt::format(R"({{"messages": {}}})", messages)).at("messages");
}

Response answered(std::string_view body, std::string_view text, std::string_view reason,
                  Usage usage = {12, 8, 5}) {
    Response response;
    response.status = 200;
    response.body = body;
    response.text = text;
    response.finish_reason = reason;
    response.usage = usage;
    return response;
}

Response read(std::unique_ptr<AnswerReader> reader, std::string_view body) {
    Response response;
    response.status = 200;
    reader->whole(std::string(body), response);
    return response;
}

std::string message(std::string_view content, std::string_view reason = "end_turn",
                    std::string_view sequence = "null") {
    return fmt::format(R"({{"id":"msg_1","type":"message","role":"assistant","model":"m",)"
                       R"("content":{},"stop_reason":"{}","stop_sequence":{},)"
                       R"("usage":{{"input_tokens":4,"cache_read_input_tokens":8,)"
                       R"("output_tokens":5}}}})",
                       content, reason, sequence);
}

std::string completion(std::string_view message, std::string_view reason = "stop",
                       std::string_view more = "") {
    return fmt::format(R"({{"id":"c-1","object":"chat.completion","created":7,"model":"m",)"
                       R"("choices":[{{"index":0,"message":{},"finish_reason":"{}"{}}}],)"
                       R"("usage":{{"prompt_tokens":12,"completion_tokens":5,"total_tokens":17,)"
                       R"("prompt_tokens_details":{{"cached_tokens":8}}}}}})",
                       message, reason, more);
}

Response as_chat(std::string_view body) {
    auto response = read(make_anthropic_reader(false), body);
    REQUIRE_FALSE(response.outcome);
    answer_to_chat(response, 77);
    INFO(response.body);
    CHECK_FALSE(check_object(response.body));
    return response;
}

Response as_message(std::string_view body) {
    auto response = read(make_openai_reader(true), body);
    REQUIRE_FALSE(response.outcome);
    answer_to_messages(response);
    INFO(response.body);
    CHECK_FALSE(check_object(response.body));
    return response;
}

} // namespace

// Requests: chat to messages

TEST_CASE("a plain chat body becomes a messages body") {
    CHECK(to_messages(R"({"model": "m", "messages": [{"role": "system", "content": "S"},
                          {"role": "user", "content": "U", "name": "x"},
                          {"role": "assistant", "content": "A"},
                          {"role": "user", "content": "V"}],
                          "max_tokens": 9, "temperature": 0, "top_p": 0.5, "stream": true,
                          "stream_options": {"include_usage": true}, "stop": ["X", "\n"],
                          "seed": null})") == json::parse(R"({"model": "m", "system": "S",
                          "messages": [{"role": "user", "content": "U"},
                                       {"role": "assistant", "content": "A"},
                                       {"role": "user", "content": "V"}],
                          "max_tokens": 9, "temperature": 0, "top_p": 0.5, "stream": true,
                          "stop_sequences": ["X"]})"));
}

TEST_CASE("each chat field that has words there is said in them") {
    for (const auto& [chat, anthropic] : std::initializer_list<std::pair<const char*, const char*>>{
             {R"("stop": "X")", R"({"stop_sequences": ["X"]})"},
             {R"("stop": " \n")", "{}"},
             {R"("stop": [])", "{}"},
             {R"("user": "u1")", R"({"metadata": {"user_id": "u1"}})"},
             {R"("temperature": 1.0)", R"({"temperature": 1.0})"},
             // without meaning, or of none
             {R"("n": 1, "logprobs": false, "top_logprobs": 0, "logit_bias": {})", "{}"},
             {R"("frequency_penalty": 0.0, "presence_penalty": 0, "functions": [])", "{}"},
             {R"("response_format": {"type": "text"}, "modalities": ["text"])", "{}"},
             {R"("response_format": null, "n": null, "reasoning_effort": null)", "{}"},
             {R"("seed": 1, "store": true, "metadata": {"a": "b"}, "service_tier": "flex")", "{}"},
             // not of chat: carried
             {R"("top_k": 5, "thinking": {"type": "disabled"})",
              R"({"top_k": 5, "thinking": {"type": "disabled"}})"},
             {R"("new_field": [1, {"a": 2}])", R"({"new_field": [1, {"a": 2}]})"},
             {R"("parallel_tool_calls": false, "tools": [])", "{}"}}) {
        INFO(chat);
        CHECK(more_to_messages(chat) == json::parse(anthropic));
    }
}

TEST_CASE("each chat field that changes the answer and has no words there is an error by name") {
    for (const auto& [field, body] : std::initializer_list<std::pair<const char*, const char*>>{
             {"temperature", R"("temperature": 1.5)"},
             {"temperature", R"("temperature": -1)"},
             {"n", R"("n": 2)"},
             {"logprobs", R"("logprobs": true)"},
             {"top_logprobs", R"("top_logprobs": 3)"},
             {"logit_bias", R"("logit_bias": {"5": 1})"},
             {"frequency_penalty", R"("frequency_penalty": 0.1)"},
             {"presence_penalty", R"("presence_penalty": -1)"},
             {"response_format", R"("response_format": {"type": "json_object"})"},
             {"response_format", R"("response_format": {"type": "json_schema"})"},
             {"functions", R"("functions": [{"name": "f"}])"},
             {"function_call", R"("function_call": "auto")"},
             {"reasoning_effort", R"("reasoning_effort": "low")"},
             {"verbosity", R"("verbosity": "low")"},
             {"modalities", R"("modalities": ["text", "audio"])"},
             {"audio", R"("audio": {})"},
             {"prediction", R"("prediction": {})"},
             {"web_search_options", R"("web_search_options": {})"},
             {"tools[1].type", R"("tools": [{"type": "function", "function": {"name": "f"}},
                                            {"type": "custom"}])"},
             {"tools[0].function.name", R"("tools": [{"type": "function"}])"},
             {"tool_choice", R"("tool_choice": {"type": "allowed_tools"},
                                "tools": [{"type": "function", "function": {"name": "f"}}])"}}) {
        INFO(body);
        const auto error = refused_by_messages(body);
        CHECK(error.starts_with(fmt::format("\"{}\" ", field)));
        CHECK(error.size() > std::string_view(field).size() + 10);
    }
}

TEST_CASE("what is left out is said, and so is the number of tokens that is filled in") {
    const auto notes = chat_to_messages("{" + turn + R"(, "seed": 3, "store": true})", most).notes;
    REQUIRE(notes.size() == 3);
    CHECK(notes[0].find("\"seed\"") != std::string::npos);
    CHECK(notes[1].find("\"store\"") != std::string::npos);
    CHECK(notes[2].find("4096") != std::string::npos);
    CHECK(chat_to_messages("{" + turn + R"(, "max_tokens": 3})", most).notes.empty());
}

TEST_CASE("max_tokens is the body's own, or the default") {
    const auto tokens = [](std::string_view more) {
        return to_messages(fmt::format("{{{}{}}}", turn, more)).at("max_tokens");
    };
    CHECK(tokens("") == 4096);
    CHECK(tokens(R"(, "max_tokens": null)") == 4096);
    CHECK(tokens(R"(, "max_tokens": 7)") == 7);
    CHECK(tokens(R"(, "max_completion_tokens": 8)") == 8);
    CHECK(tokens(R"(, "max_tokens": 7, "max_completion_tokens": 8)") == 8);
}

TEST_CASE("system and developer messages go to the front, as one text or as blocks") {
    const auto system = [](std::string_view messages) {
        return to_messages(
                   fmt::format(R"({{"messages": [{}, {{"role": "user", "content": "u"}}]}})",
                               messages))
            .at("system");
    };
    CHECK(system(R"({"role": "developer", "content": "D"})") == "D");
    CHECK(system(R"({"role": "system", "content": "A"}, {"role": "developer", "content": "B"})") ==
          json::parse(R"([{"type": "text", "text": "A"}, {"type": "text", "text": "B"}])"));
    CHECK(
        system(R"({"role": "system", "content": [{"type": "text", "text": "A",
                     "cache_control": {"type": "ephemeral"}}]})") ==
        json::parse(R"([{"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}}])"));
    const auto late = chat_to_messages(R"({"messages": [{"role": "user", "content": "u"},
        {"role": "system", "content": "S"}, {"role": "user", "content": "v"}]})",
                                       most);
    CHECK(parsed(late).at("system") == "S");
    CHECK(parsed(late).at("messages") ==
          json::parse(R"([{"role": "user", "content": [{"type": "text", "text": "u"},
                                                       {"type": "text", "text": "v"}]}])"));
    CHECK(late.notes.size() == 2);
}

TEST_CASE("calls and results: one turn each, arguments as objects, byte for byte") {
    const auto body = chat_to_messages(R"({"max_tokens": 1, "messages": [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1.00, \"y\":12345678901234567}"}},
            {"id": "b", "type": "function", "function": {"name": "g", "arguments": ""}},
            {"id": "c", "type": "function", "function": {"name": "g", "arguments": {"z": 1}}}]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "2"}]},
        {"role": "tool", "tool_call_id": "c"},
        {"role": "user", "content": "next"},
        {"role": "assistant", "content": "A", "tool_calls": []}]})",
                                       most);
    REQUIRE(body.error.empty());
    const auto list = elements(*member(members(body.body), "messages"));
    REQUIRE(list.size() == 4);
    CHECK(list[1].find(R"("input": {"x": 1.00, "y":12345678901234567}})") != list[1].npos);
    CHECK(json::parse(*member(members(list[1]), "content")).as_array().size() == 3);
    CHECK(list[1].find(R"({"type": "tool_use", "id": "b", "name": "g", "input": {}})") !=
          list[1].npos);
    CHECK(json::parse(list[2]) == json::parse(R"({"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "a", "content": "1"},
        {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "2"}]},
        {"type": "tool_result", "tool_use_id": "c"},
        {"type": "text", "text": "next"}]})"));
    CHECK(json::parse(list[3]) == json::parse(R"({"role": "assistant", "content": "A"})"));
}

TEST_CASE("neighbours of one role are merged, empty texts are not sent") {
    CHECK(turns(R"([{"role": "user", "content": "a"}, {"role": "user", "content": ""},
                    {"role": "user", "content": [{"type": "text", "text": "b"},
                                                 {"type": "text", "text": ""}]},
                    {"role": "assistant", "content": ""},
                    {"role": "assistant", "content": "c"}])") ==
          json::parse(R"([{"role": "user", "content": [{"type": "text", "text": "a"},
                                                       {"type": "text", "text": "b"}]},
                          {"role": "assistant", "content": [{"type": "text", "text": "c"}]}])"));
}

TEST_CASE("images and other parts") {
    CHECK(turns(R"([{"role": "user", "content": [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO/+==", "detail": "low"}},
        {"type": "image_url", "image_url": "https://a.test/b.jpg?c=d"}]}])") ==
          json::parse(R"([{"role": "user", "content": [
        {"type": "text", "text": "look"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO/+=="}},
        {"type": "image", "source": {"type": "url", "url": "https://a.test/b.jpg?c=d"}}]}])"));
    CHECK(turns(R"([{"role": "user", "content": "u"}, {"role": "assistant", "refusal": "no"}])")
              .at(1) ==
          json::parse(R"({"role": "assistant", "content": [{"type": "text", "text": "no"}]})"));
}

TEST_CASE("a message that cannot be said there is an error that names its place") {
    for (const auto& [field, messages] : std::initializer_list<std::pair<const char*, const char*>>{
             {"messages", "[]"},
             {"messages", R"([{"role": "system", "content": "s"}])"},
             {"messages", R"([{"role": "assistant", "content": "a"}])"},
             {"messages[0].role", R"([{"role": "function", "content": "a"}])"},
             {"messages[0].content[1].type",
              R"([{"role": "user", "content": [{"type": "text", "text": "a"},
                                               {"type": "input_audio"}]}])"},
             {"messages[0].content[0].type",
              R"([{"role": "system", "content": [{"type": "image_url"}]}])"},
             {"messages[0].content[0].image_url",
              R"([{"role": "user", "content": [{"type": "image_url", "image_url":
                                                {"url": "data:image/svg+xml,<svg/>"}}]}])"},
             {"messages[0].content[0].image_url",
              R"([{"role": "user", "content": [{"type": "image_url", "image_url":
                                                {"url": "ftp://x"}}]}])"},
             {"messages[0].tool_call_id", R"([{"role": "tool", "content": "a"}])"},
             {"messages[1].function_call",
              R"([{"role": "user", "content": "a"}, {"role": "assistant", "function_call": {}}])"},
             {"messages[1].tool_calls[0].function.arguments",
              R"([{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [
                  {"id": "a", "function": {"name": "f", "arguments": "{bad"}}]}])"},
             {"messages[1].tool_calls[0].id",
              R"([{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [
                  {"function": {"name": "f", "arguments": "{}"}}]}])"}}) {
        INFO(messages);
        const auto error =
            chat_to_messages(fmt::format(R"({{"messages": {}}})", messages), most).error;
        CHECK(error.starts_with(fmt::format("\"{}\" ", field)));
    }
    CHECK(chat_to_messages("{}", most).error == "\"messages\" is missing");
}

TEST_CASE("half a surrogate pair stays in arguments, which are JSON with it") {
    const auto body = chat_to_messages(R"({"messages": [{"role": "user", "content": "a\ud83d"},
        {"role": "assistant", "tool_calls": [{"id": "a", "function":
            {"name": "f", "arguments": "{\"x\": \"\\ud83d\", \"y\": 1e999}"}}]}], "stop": ["\ude00"]})",
                                       most);
    CHECK(body.error == "");
    CHECK(body.body.find(R"("content": "a\ud83d")") != body.body.npos);
    CHECK(body.body.find(R"("input": {"x": "\ud83d", "y": 1e999})") != body.body.npos);
    CHECK(body.body.find(R"("stop_sequences": ["\ude00"])") != body.body.npos);
}

TEST_CASE("tools and the choice among them") {
    CHECK(more_to_messages(R"("tools": [
        {"type": "function", "function": {"name": "f", "description": "d", "strict": true,
            "parameters": {"type": "object", "properties": {"x": {"type": "number"}}}}},
        {"type": "function", "function": {"name": "g"}, "cache_control": {"type": "ephemeral"}}])") ==
          json::parse(R"({"tools": [
        {"name": "f", "description": "d", "strict": true,
            "input_schema": {"type": "object", "properties": {"x": {"type": "number"}}}},
        {"name": "g", "input_schema": {"type": "object", "properties": {}},
            "cache_control": {"type": "ephemeral"}}]})"));
    const std::string tools = R"("tools": [{"type": "function", "function": {"name": "f"}}])";
    const auto choice = [&](std::string_view more) {
        auto value = more_to_messages(fmt::format("{}, {}", tools, more));
        const auto* it = value.as_object().if_contains("tool_choice");
        return it ? *it : json::value();
    };
    CHECK(choice(R"("tool_choice": "auto")") == json::parse(R"({"type": "auto"})"));
    CHECK(choice(R"("tool_choice": "required")") == json::parse(R"({"type": "any"})"));
    CHECK(choice(R"("tool_choice": "none", "parallel_tool_calls": false)") ==
          json::parse(R"({"type": "none"})"));
    CHECK(choice(R"("tool_choice": {"type": "function", "function": {"name": "f"}})") ==
          json::parse(R"({"type": "tool", "name": "f"})"));
    CHECK(choice(R"("parallel_tool_calls": false)") ==
          json::parse(R"({"type": "auto", "disable_parallel_tool_use": true})"));
    CHECK(choice(R"("tool_choice": "required", "parallel_tool_calls": false)") ==
          json::parse(R"({"type": "any", "disable_parallel_tool_use": true})"));
    CHECK(choice(R"("parallel_tool_calls": true)") == json::value());
}

// Requests: messages to chat

TEST_CASE("a messages body becomes a chat body") {
    CHECK(to_chat(R"({"model": "m", "max_tokens": 9, "system": "S", "temperature": 0.5,
                      "messages": [{"role": "user", "content": "U"},
                                   {"role": "assistant", "content": [{"type": "text", "text": "A"}]},
                                   {"role": "user", "content": [{"type": "text", "text": "V",
                                        "cache_control": {"type": "ephemeral"}}]}],
                      "stop_sequences": ["X"], "stream": true, "metadata": {"user_id": "u"}})") ==
          json::parse(R"({"model": "m", "max_tokens": 9, "temperature": 0.5,
                          "messages": [{"role": "system", "content": "S"},
                                       {"role": "user", "content": "U"},
                                       {"role": "assistant", "content": "A"},
                                       {"role": "user", "content": "V"}],
                          "stop": ["X"], "stream": true, "user": "u"})"));
}

TEST_CASE("each field of messages that has words in chat is said in them") {
    for (const auto& [anthropic, chat] : std::initializer_list<std::pair<const char*, const char*>>{
             {R"("thinking": {"type": "disabled"}, "cache_control": {"type": "ephemeral"})", "{}"},
             {R"("service_tier": "auto", "metadata": {}, "stop_sequences": [])", "{}"},
             {R"("top_k": 3, "new_field": {"a": 1})", R"({"top_k": 3, "new_field": {"a": 1}})"},
             {R"("tools": [{"name": "f", "input_schema": {"type": "object"}},
                           {"type": "custom", "name": "g", "description": "d", "strict": true}])",
              R"({"tools": [{"type": "function", "function": {"name": "f",
                                                              "parameters": {"type": "object"}}},
                            {"type": "function", "function": {"name": "g", "description": "d",
                                                              "strict": true}}]})"},
             {R"("tool_choice": {"type": "auto"})", R"({"tool_choice": "auto"})"},
             {R"("tool_choice": {"type": "none"})", R"({"tool_choice": "none"})"},
             {R"("tool_choice": {"type": "any", "disable_parallel_tool_use": true})",
              R"({"tool_choice": "required", "parallel_tool_calls": false})"},
             {R"("tool_choice": {"type": "tool", "name": "f"})",
              R"({"tool_choice": {"type": "function", "function": {"name": "f"}}})"}}) {
        INFO(anthropic);
        CHECK(more_to_chat(anthropic) == json::parse(chat));
    }
    for (const auto& [field, body] : std::initializer_list<std::pair<const char*, const char*>>{
             {"thinking", R"("thinking": {"type": "enabled", "budget_tokens": 1024})"},
             {"output_config", R"("output_config": {})"},
             {"mcp_servers", R"("mcp_servers": [])"},
             {"container", R"("container": "c")"},
             {"tools[0].type", R"("tools": [{"type": "bash_20250124", "name": "bash"}])"},
             {"tool_choice", R"("tool_choice": {"type": "new"})"}}) {
        INFO(body);
        CHECK(refused_by_chat(body).starts_with(fmt::format("\"{}\" ", field)));
    }
    CHECK(messages_to_chat("{}").error == "\"messages\" is missing");
}

TEST_CASE("blocks become chat messages: results first, calls with arguments as text") {
    CHECK(chat_turns(R"([
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t", "signature": "s"},
            {"type": "text", "text": "A"},
            {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1.00}},
            {"type": "tool_use", "id": "b", "name": "g", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": "1"},
            {"type": "tool_result", "tool_use_id": "b", "is_error": true,
                "content": [{"type": "text", "text": "2"}]},
            {"type": "text", "text": "next"},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QQ=="}},
            {"type": "image", "source": {"type": "url", "url": "https://a.test/b"}}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "g", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]}])") ==
          json::parse(R"([
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "A", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1.00}"}},
            {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "user", "content": [
            {"type": "text", "text": "next"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,QQ=="}},
            {"type": "image_url", "image_url": {"url": "https://a.test/b"}}]},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "g", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": ""}])"));
}

TEST_CASE("a block that chat does not have is an error that names its place") {
    for (const auto& [field, messages] : std::initializer_list<std::pair<const char*, const char*>>{
             {"messages[0].role", R"([{"role": "system", "content": "s"}])"},
             {"messages[0].content[0].type",
              R"([{"role": "user", "content": [{"type": "document", "source": {}}]}])"},
             {"messages[0].content[0].type",
              R"([{"role": "user", "content": [{"type": "tool_use", "id": "a"}]}])"},
             {"messages[0].content[0].source.type",
              R"([{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}])"},
             {"messages[0].content[0].type",
              R"([{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a",
                   "content": [{"type": "image"}]}]}])"}}) {
        INFO(messages);
        const auto error = messages_to_chat(fmt::format(R"({{"messages": {}}})", messages)).error;
        CHECK(error.starts_with(fmt::format("\"{}\" ", field)));
    }
}

// Round trips

TEST_CASE("what both wires have comes back as it was") {
    const std::string chat = R"({"model": "m", "max_tokens": 5, "temperature": 0.25, "stop": ["a"],
        "messages": [{"role": "system", "content": "S \u00e9 \"q\""},
                     {"role": "user", "content": [{"type": "text", "text": "x"},
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,QQ=="}}]},
                     {"role": "assistant", "content": null, "tool_calls": [{"id": "a",
                        "type": "function", "function": {"name": "f",
                        "arguments": "{\"n\": 1e2, \"s\": \"\\u00e9\\n\"}"}}]},
                     {"role": "tool", "tool_call_id": "a", "content": "r"},
                     {"role": "user", "content": "go on"}],
        "tools": [{"type": "function", "function": {"name": "f", "description": "d",
                   "parameters": {"type": "object", "properties": {"n": {"minimum": 1.0}}}}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": false, "user": "u"})";
    const auto there = chat_to_messages(chat, most);
    CHECK(there.error.empty());
    CHECK(to_chat(there.body) == json::parse(chat));
    const auto again = chat_to_messages(messages_to_chat(there.body).body, most);
    CHECK(json::parse(again.body) == json::parse(there.body));
}

// Answers

TEST_CASE("a message becomes a chat completion") {
    const auto response = as_chat(message(R"([{"type":"text","text":"Hi"}])"));
    CHECK(response.finish_reason == "stop");
    CHECK(json::parse(response.body) == json::parse(R"({
        "id": "msg_1", "object": "chat.completion", "created": 77, "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"},
                     "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 12, "completion_tokens": 5, "total_tokens": 17,
                  "prompt_tokens_details": {"cached_tokens": 8}}})"));
    const auto rich = as_chat(message(R"([{"type":"thinking","thinking":"t","signature":"s"},
        {"type":"redacted_thinking","data":"d"},
        {"type":"tool_use","id":"a","name":"f","input":{"x": 1.00}},
        {"type":"tool_use","id":"b","name":"g","input":{}}])",
                                      "tool_use"));
    CHECK(rich.finish_reason == "tool_calls");
    CHECK(json::parse(rich.body).at("choices").at(0).at("message") == json::parse(R"({
        "role": "assistant", "content": null, "reasoning_content": "t",
        "thinking_blocks": [{"type":"thinking","thinking":"t","signature":"s"},
                            {"type":"redacted_thinking","data":"d"}],
        "tool_calls": [{"id": "a", "type": "function",
                        "function": {"name": "f", "arguments": "{\"x\": 1.00}"}},
                       {"id": "b", "type": "function",
                        "function": {"name": "g", "arguments": "{}"}}]})"));
    // The message goes back with the reasoning in front, signatures and all.
    const auto history = turns(fmt::format(
        R"([{{"role": "user", "content": "u"}}, {}])",
        *member(members(elements(*member(members(rich.body), "choices")).front()), "message")));
    CHECK(history.at(1).at("content").as_array().size() == 4);
    CHECK(history.at(1).at("content").at(0).at("signature") == "s");
    // Read as a chat completion it says the same.
    const auto back = read(make_openai_reader(true), response.body);
    CHECK(back.text == "Hi");
    CHECK(back.usage.prompt_tokens == 12);
    CHECK(back.usage.cached_tokens == 8);
    CHECK(as_chat(R"({"content": [], "stop_reason": "end_turn", "usage": {"output_tokens": 1}})")
              .body.find("usage") == std::string::npos); // not known, not made up
    CHECK(json::parse(as_chat(message("[]", "stop_sequence", "\"X\"")).body)
              .at("choices")
              .at(0)
              .at("stop_reason") == "X");
}

TEST_CASE("a chat completion becomes a message") {
    const auto response = as_message(completion(R"({"role":"assistant","content":"Hi"})"));
    CHECK(response.finish_reason == "end_turn");
    CHECK(json::parse(response.body) == json::parse(R"({
        "id": "c-1", "type": "message", "role": "assistant", "model": "m",
        "content": [{"type": "text", "text": "Hi"}],
        "stop_reason": "end_turn", "stop_sequence": null,
        "usage": {"input_tokens": 4, "cache_read_input_tokens": 8, "output_tokens": 5}})"));
    const auto rich = as_message(completion(R"({"role":"assistant","content":"A","reasoning":"t",
        "tool_calls":[{"id":"a","type":"function","function":{"name":"f","arguments":"{\"x\": 1.00}"}},
                      {"id":"b","type":"function","function":{"name":"g","arguments":""}}]})",
                                            "stop"));
    CHECK(rich.finish_reason == "tool_use"); // from the calls, not from the server's word
    CHECK(std::string(*member(members(rich.body), "content")) ==
          R"([{"type": "thinking", "thinking": "t", "signature": ""}, )"
          R"({"type": "text", "text": "A"}, )"
          R"({"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1.00}}, )"
          R"({"type": "tool_use", "id": "b", "name": "g", "input": {}}])");
    const auto back = read(make_anthropic_reader(false), response.body);
    CHECK(back.text == "Hi");
    CHECK(back.usage.prompt_tokens == 12);
    CHECK(back.usage.cached_tokens == 8);
    const auto stopped = as_message(
        completion(R"({"role":"assistant","content":"A"})", "stop", R"(,"stop_reason":"X")"));
    CHECK(stopped.finish_reason == "stop_sequence");
    CHECK(json::parse(stopped.body).at("stop_sequence") == "X");
    auto unknown = answered(R"({"choices":[{"message":{"content":"a"}}]})", "a", "stop", {});
    answer_to_messages(unknown);
    CHECK(json::parse(unknown.body).at("usage").as_object().empty());
}

TEST_CASE("reasons, both ways") {
    for (const auto& [anthropic, chat] : std::initializer_list<std::pair<const char*, const char*>>{
             {"end_turn", "stop"},
             {"stop_sequence", "stop"},
             {"max_tokens", "length"},
             {"model_context_window_exceeded", "length"},
             {"refusal", "content_filter"},
             {"pause_turn", "pause_turn"},
             {"new_reason", "new_reason"}})
        CHECK(as_chat(message("[]", anthropic)).finish_reason == chat);
    for (const auto& [chat, anthropic] : std::initializer_list<std::pair<const char*, const char*>>{
             {"stop", "end_turn"},
             {"length", "max_tokens"},
             {"content_filter", "refusal"},
             {"tool_calls", "end_turn"}, // with no call
             {"new_reason", "new_reason"}})
        CHECK(as_message(completion(R"({"content":"a"})", chat)).finish_reason == anthropic);
    const std::string call = R"({"tool_calls":[{"id":"a","function":{"name":"f"}}]})";
    CHECK(as_message(completion(call, "tool_calls")).finish_reason == "tool_use");
    CHECK(as_message(completion(call, "length")).finish_reason == "max_tokens");
}

TEST_CASE("arguments that are not an object are no message, unless the limit has cut them") {
    const auto call = [](std::string_view arguments, std::string_view reason) {
        return as_message(completion(
            fmt::format(
                R"({{"tool_calls":[{{"id":"a","function":{{"name":"f","arguments":{}}}}}]}})",
                json_string(arguments)),
            reason));
    };
    const auto bad = call("{\"x\": ", "tool_calls");
    CHECK(bad.outcome == Errc::malformed);
    CHECK(bad.detail.find(" f ") != std::string::npos);
    const auto cut = call("{\"x\": 1, \"y\": \"ab", "length");
    CHECK_FALSE(cut.outcome);
    CHECK(json::parse(cut.body).at("content").at(0).at("input") == json::parse(R"({"x": 1})"));
    CHECK(call("[1]", "length").outcome == Errc::malformed);
    const auto odd = call("{\"x\": NaN}", "tool_calls"); // as Python writes it
    CHECK_FALSE(odd.outcome);
    CHECK(json::parse(odd.body).at("content").at(0).at("input") == json::parse(R"({"x": null})"));
}
