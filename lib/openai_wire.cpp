// The OpenAI wire: /v1/chat/completions and /v1/completions, streamed and not, as real servers
// speak it.
#include "json_text.hpp"
#include "wire.hpp"

#include <fmt/format.h>
#include <simdjson.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <map>

namespace evalrt::detail {
namespace {

namespace dom = simdjson::dom;

std::string_view string_of(simdjson::simdjson_result<dom::element> value) {
    std::string_view text;
    return value.get(text) ? std::string_view() : text;
}

std::optional<std::int64_t> integer_of(simdjson::simdjson_result<dom::element> value) {
    double number; // some servers write 12.0
    if (value.get(number) || !(number >= 0 && number < 1e15) || number != std::floor(number))
        return {};
    return std::int64_t(number);
}

// The places where servers say how much of the prompt they had cached: OpenAI and most others;
// the responses API; old oMLX; llama-server's timings and SGLang's meta_info, outside of usage.
std::optional<std::int64_t> cached_of(dom::element usage) {
    for (const auto& value : {usage["prompt_tokens_details"]["cached_tokens"],
                              usage["input_tokens_details"]["cached_tokens"],
                              usage["cached_tokens"], usage["cache_read_input_tokens"]})
        if (auto number = integer_of(value)) return number;
    return {};
}

void read_usage(dom::element answer, Usage& usage) {
    dom::element reported;
    if (!answer["usage"].get(reported) && reported.is_object()) {
        if (auto n = integer_of(reported["prompt_tokens"])) usage.prompt_tokens = n;
        if (auto n = integer_of(reported["completion_tokens"])) usage.completion_tokens = n;
        if (auto n = cached_of(reported)) usage.cached_tokens = n;
    }
    for (const auto& value : {answer["timings"]["cache_n"], answer["meta_info"]["cached_tokens"]})
        if (!usage.cached_tokens) usage.cached_tokens = integer_of(value);
}

std::string text_or_json(simdjson::simdjson_result<dom::element> value) {
    dom::element element;
    if (value.get(element) || element.is_null()) return {};
    std::string_view text;
    return element.get(text) ? simdjson::minify(element) : std::string(text);
}

ServerError read_error(dom::element object) {
    ServerError found;
    found.message = text_or_json(object["message"]);
    if (found.message.empty()) found.message = text_or_json(object["detail"]);
    if (found.message.empty()) found.message = simdjson::minify(object);
    const auto code = text_or_json(object["code"]);
    found.type = text_or_json(object["type"]) + " " + code;
    int status = 0;
    std::from_chars(code.data(), code.data() + code.size(), status);
    if (status >= 400 && status < 600) found.status = status;
    return found;
}

// {"error": {"message", "type", "code"}}, {"error": "words"}, SGLang's {"object": "error",
// "message"}, FastAPI's {"detail"}.
std::optional<ServerError> error_of(dom::element answer) {
    dom::element error;
    if (!answer["error"].get(error) && !error.is_null()) {
        if (error.is_object()) return read_error(error);
        return ServerError{text_or_json(answer["error"]), {}};
    }
    if (string_of(answer["object"]) == "error") return read_error(answer);
    if (!answer["detail"].get(error) && !error.is_null() && answer["choices"].error())
        return read_error(answer);
    return {};
}

bool contains_nocase(std::string_view text, std::string_view word) {
    return std::search(text.begin(), text.end(), word.begin(), word.end(), [](char a, char b) {
               return std::tolower(static_cast<unsigned char>(a)) == b;
           }) != text.end();
}

std::string shortened(std::string_view text, std::size_t limit = 400) {
    while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front())))
        text.remove_prefix(1);
    while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back())))
        text.remove_suffix(1);
    const bool whole = text.size() <= limit;
    if (whole) limit = text.size();
    while (!whole && limit > 0 && (text[limit] & 0xC0) == 0x80) --limit; // not through a character
    std::string out = repaired_utf8(text.substr(0, limit));
    for (char& c : out)
        if (static_cast<unsigned char>(c) < ' ') c = ' ';
    return whole ? out : out + "...";
}

std::string words_of(const ServerError& error) {
    return error.message.empty() ? "(no words)" : shortened(error.message, 1000);
}

bool looks_like_html(std::string_view body) {
    const auto begin = body.find_first_not_of(" \t\r\n");
    return begin != body.npos && body[begin] == '<';
}

std::string_view trimmed_json(std::string_view body) {
    if (body.starts_with("\xEF\xBB\xBF")) body.remove_prefix(3);
    const auto begin = body.find_first_not_of(" \t\r\n"); // oMLX sends spaces to keep us waiting
    return begin == body.npos ? std::string_view() : body.substr(begin);
}

// Parses an object. Text that does not parse is repaired first, if that helps: one character that
// a model put out of place must not lose its answer. `text` is then what was parsed.
class ObjectParser {
public:
    bool parse(std::string_view& text, dom::element& object) {
        if (text.empty()) return false; // simdjson would hand its null pointer to memcpy
        if (parser_.parse(text.data(), text.size()).get(object)) {
            repaired_ = repaired_json(text);
            text = repaired_;
            if (parser_.parse(repaired_).get(object)) return false;
        }
        return object.is_object();
    }

private:
    dom::parser parser_;
    std::string repaired_;
};

void fail(Response& response, Errc errc, std::string detail) {
    response.outcome = errc;
    response.detail = std::move(detail);
}

// A finish reason that is none: tinygpt and SGLang report a failure in mid-stream so.
bool failed_finish(std::string_view reason) { return reason == "error" || reason == "abort"; }

// Members of one kind that come in pieces, in the order of their first piece.
using Parts = std::vector<std::pair<std::string, std::string>>;

std::string& part(Parts& parts, std::string_view key) {
    for (auto& [name, value] : parts)
        if (name == key) return value;
    return parts.emplace_back(key, std::string()).second;
}

// JSON of a kind that is not known here: arrays come in pieces, of all else the last one counts.
void merge(Parts& parts, std::string_view key, dom::element value) {
    auto& text = part(parts, key);
    const auto piece = simdjson::minify(value);
    if (!value.is_array() || !text.starts_with('[') || text == "[]") {
        text = piece;
    } else if (piece != "[]") {
        text.back() = ',';
        text.append(piece, 1);
    }
}

struct ToolCall {
    std::int64_t index = -1;
    std::string id, type, name, arguments;
};

struct Choice {
    std::string role;
    Parts texts;                                 // content, reasoning, ...: joined
    Parts others;                                // unknown members of the delta (JSON text)
    Parts members;                               // unknown members of the choice (JSON text)
    std::map<std::string, std::string> logprobs; // arrays joined (JSON text without brackets)
    std::vector<ToolCall> calls;
    std::string finish_reason;
};

class OpenAiReader final : public AnswerReader {
public:
    explicit OpenAiReader(bool chat) : chat_(chat) {}

    Piece event(const SseEvent& event) override {
        Piece piece;
        auto data = trimmed_json(event.data);
        if (data.starts_with("[DONE]")) {
            piece.last = true;
            return piece;
        }
        if (data.empty() || error_ || broken_) return piece;
        dom::element chunk;
        const bool object = parser_.parse(data, chunk);
        if (object) error_ = error_of(chunk);
        if (event.type == "error" && !error_)
            error_ = object ? read_error(chunk) : ServerError{shortened(data), {}};
        if (!object && !error_) broken_ = shortened(data);
        if (error_ || broken_) return piece;
        if (string_of(chunk["model"]) == "keepalive") return piece; // oMLX: no answer yet
        read_head(chunk);
        if (event_usage(chunk)) usage_text_ = usage_member(data);
        dom::array choices;
        if (chunk["choices"].get(choices)) return piece;
        text_.clear();
        for (dom::element choice : choices) piece.content |= read_choice(choice);
        piece.text = text_;
        return piece;
    }

    void finish(Response& response) override {
        response.usage = usage_;
        response.request_id = id_;
        if (error_) return fail(response, classify(response.status, *error_), words_of(*error_));
        if (broken_)
            return fail(response, Errc::malformed,
                        fmt::format("the stream has an event that is not JSON: {}", *broken_));
        if (choices_.empty())
            return fail(response, Errc::truncated, "the stream ended before any answer");
        for (auto& [index, choice] : choices_) {
            if (failed_finish(choice.finish_reason))
                return fail(response, Errc::rejected,
                            fmt::format("the server gave up in the middle of the answer "
                                        "(finish_reason \"{}\")",
                                        choice.finish_reason));
            if (choice.finish_reason.empty())
                return fail(response, Errc::truncated,
                            "the stream ended before the answer's finish_reason");
        }
        const auto& first = choices_.begin()->second;
        for (const auto& [name, value] : first.texts)
            if (name == (chat_ ? "content" : "text")) response.text = value;
        response.finish_reason = first.finish_reason;
        response.body = body();
    }

    void whole(std::string body, Response& response) override {
        auto json = trimmed_json(body);
        if (json.empty()) return fail(response, Errc::malformed, "the server sent an empty answer");
        dom::element answer;
        if (!parser_.parse(json, answer))
            return fail(response, Errc::malformed,
                        looks_like_html(json)
                            ? fmt::format("this is a web page, not an answer; does the URL point "
                                          "at a model server? {}",
                                          shortened(json, 120))
                            : fmt::format("the answer is not JSON: {}", shortened(json)));
        read_usage(answer, response.usage);
        if (const auto error = error_of(answer))
            return fail(response, classify(response.status, *error), words_of(*error));
        response.request_id = string_of(answer["id"]);
        dom::array choices;
        if (answer["choices"].get(choices) || choices.size() == 0)
            return fail(response, Errc::malformed,
                        fmt::format("the answer has no choices: {}", shortened(json)));
        for (dom::element choice : choices)
            if (const auto reason = string_of(choice["finish_reason"]); failed_finish(reason))
                return fail(response, Errc::rejected,
                            fmt::format("the server gave up (finish_reason \"{}\")", reason));
        const auto first = choices.at(0);
        response.text = string_of(chat_ ? first["message"]["content"] : first["text"]);
        response.finish_reason = string_of(first["finish_reason"]);
        if (json.data() != body.data()) body = std::string(json);
        while (!body.empty() && (body.back() == '\n' || body.back() == '\r')) body.pop_back();
        response.body = std::move(body);
    }

private:
    bool event_usage(dom::element chunk) {
        read_usage(chunk, usage_);
        dom::element usage;
        return !chunk["usage"].get(usage) && usage.is_object();
    }

    static std::string usage_member(std::string_view chunk) {
        return std::string(member(members(chunk), "usage").value_or(""));
    }

    // What chunks say of the whole answer. The first to say it counts (oMLX gives each chunk of a
    // completion an id), but of objects, which measure (llama-server's timings), the last.
    void read_head(dom::element chunk) {
        if (id_.empty()) id_ = string_of(chunk["id"]);
        for (const auto [key, value] : dom::object(chunk)) {
            if (key == "choices" || key == "usage" || key == "obfuscation") continue;
            auto& text = part(head_, key);
            if (text.empty() || text == "null" || value.is_object()) text = simdjson::minify(value);
        }
    }

    bool read_choice(dom::element element) {
        dom::object object;
        if (element.get(object)) return false;
        const auto index = integer_of(element["index"]).value_or(0);
        auto& choice = choices_[index];
        const bool first = index == 0;
        bool content = false;
        for (const auto [key, value] : object) {
            if (key == "index") continue;
            if (key == "delta" || key == "message") {
                // Some servers send the message as a whole; but what is there is not sent again.
                if (key == "message" && (!choice.texts.empty() || !choice.calls.empty())) continue;
                dom::object delta;
                if (!value.get(delta)) content |= read_delta(choice, delta, first);
            } else if (key == "text") {
                content |= append_text(choice, key, value, first);
            } else if (key == "finish_reason") {
                if (std::string_view reason; !value.get(reason)) choice.finish_reason = reason;
            } else if (key == "logprobs") {
                dom::object logprobs;
                if (!value.get(logprobs)) read_logprobs(choice, logprobs);
            } else if (!value.is_null()) {
                merge(choice.members, key, value);
            }
        }
        return content;
    }

    bool read_delta(Choice& choice, dom::object delta, bool first) {
        bool content = false;
        for (const auto [key, value] : delta) {
            if (key == "role") {
                if (std::string_view role; !value.get(role)) choice.role = role;
            } else if (key == "tool_calls") {
                dom::array calls;
                if (value.get(calls)) continue;
                for (dom::element call : calls) {
                    read_call(choice, call);
                    content = true;
                }
            } else if (value.is_string()) {
                content |= append_text(choice, key, value, first);
            } else if (!value.is_null()) {
                merge(choice.others, key, value);
            }
        }
        return content;
    }

    bool append_text(Choice& choice, std::string_view key, dom::element value, bool first) {
        std::string_view piece;
        if (value.get(piece)) return false;
        part(choice.texts, key) += piece;
        if (first && key == (chat_ ? "content" : "text")) text_ += piece;
        return !piece.empty() && key != "obfuscation";
    }

    // A fragment belongs to the call of its index. But some servers give every call the same
    // index, or none, and others give each fragment a new id. Only the first fragment has a name:
    // a name with a new id, or without an index, begins a new call.
    static void read_call(Choice& choice, dom::element fragment) {
        if (!fragment.is_object()) return;
        const auto index = integer_of(fragment["index"]);
        const auto id = string_of(fragment["id"]);
        const auto name = string_of(fragment["function"]["name"]);
        ToolCall* call = nullptr;
        for (auto& it : choice.calls)
            if (!index || it.index == *index) call = &it; // the last of that index
        if (call && !name.empty() && !call->name.empty() &&
            (id.empty() ? !index : !call->id.empty() && call->id != id))
            call = nullptr;
        for (auto& it : choice.calls)
            if (!id.empty() && it.id == id && (!index || it.index == *index)) call = &it;
        if (!call) {
            call = &choice.calls.emplace_back();
            call->index = index.value_or(std::int64_t(choice.calls.size()) - 1);
        }
        if (call->id.empty()) call->id = id;
        if (const auto type = string_of(fragment["type"]); !type.empty()) call->type = type;
        if (call->name != name) call->name += name; // some repeat it
        dom::element arguments;
        if (fragment["function"]["arguments"].get(arguments) || arguments.is_null()) return;
        std::string_view text;
        call->arguments += arguments.get(text) ? simdjson::minify(arguments) : std::string(text);
    }

    static void read_logprobs(Choice& choice, dom::object logprobs) {
        for (const auto [key, value] : logprobs) {
            dom::array array;
            if (value.get(array)) continue;
            auto& all = choice.logprobs[std::string(key)];
            for (dom::element entry : array) {
                if (!all.empty()) all += ", ";
                all += simdjson::minify(entry);
            }
        }
    }

    std::string body() {
        std::string out = "{";
        for (const auto& [key, value] : head_)
            out += fmt::format("{}: {}, ", json_string(key),
                               key != "object" ? std::string_view(value)
                               : chat_         ? R"("chat.completion")"
                                               : R"("text_completion")");
        out += "\"choices\": [";
        bool comma = false;
        for (auto& [index, choice] : choices_) {
            if (std::exchange(comma, true)) out += ", ";
            out += fmt::format("{{\"index\": {}, ", index);
            if (chat_) {
                out += "\"message\": " + message(choice) + ", ";
            } else {
                out += "\"text\": " + json_string(part(choice.texts, "text")) + ", ";
            }
            if (!choice.logprobs.empty()) {
                out += "\"logprobs\": {";
                bool inner = false;
                for (const auto& [key, entries] : choice.logprobs)
                    out += fmt::format("{}{}: [{}]", std::exchange(inner, true) ? ", " : "",
                                       json_string(key), entries);
                out += "}, ";
            }
            for (const auto& [key, value] : choice.members)
                out += json_string(key) + ": " + value + ", ";
            out += "\"finish_reason\": " + json_string(choice.finish_reason) + "}";
        }
        out += "]";
        if (!usage_text_.empty()) out += ", \"usage\": " + usage_text_;
        return out + "}";
    }

    static std::string message(Choice& choice) {
        std::string out =
            "{\"role\": " + json_string(choice.role.empty() ? "assistant" : choice.role);
        const auto content = part(choice.texts, "content");
        auto& parts = part(choice.others, "content"); // content may be an array instead
        if (!content.empty() || parts.empty())
            parts = content.empty() && !choice.calls.empty() ? "null" : json_string(content);
        for (const auto& [key, value] : choice.texts)
            if (key != "content" && !value.empty())
                out += ", " + json_string(key) + ": " + json_string(value);
        for (const auto& [key, value] : choice.others)
            out += ", " + json_string(key) + ": " + value;
        std::stable_sort(choice.calls.begin(), choice.calls.end(),
                         [](const ToolCall& a, const ToolCall& b) { return a.index < b.index; });
        bool comma = false;
        for (const auto& call : choice.calls) {
            out += std::exchange(comma, true) ? ", " : ", \"tool_calls\": [";
            // A call without arguments has none of their bytes; readers expect an object.
            out += fmt::format(R"({{"id": {}, "type": {}, "function": {{"name": {}, )"
                               R"("arguments": {}}}}})",
                               json_string(call.id),
                               json_string(call.type.empty() ? "function" : call.type),
                               json_string(call.name),
                               json_string(call.arguments.empty() ? "{}" : call.arguments));
        }
        if (comma) out += "]";
        return out + "}";
    }

    const bool chat_;
    ObjectParser parser_;
    Parts head_; // members of the answer itself (JSON text)
    std::string id_, usage_text_, text_;
    std::map<std::int64_t, Choice> choices_;
    Usage usage_;
    std::optional<ServerError> error_;
    std::optional<std::string> broken_;
};

} // namespace

std::unique_ptr<AnswerReader> make_openai_reader(bool chat) {
    return std::make_unique<OpenAiReader>(chat);
}

Errc classify(int status, const ServerError& error) {
    // llama-server, vLLM, OpenAI, oMLX, mlx_lm, LM Studio
    static constexpr std::array too_long{
        std::string_view("exceed_context_size"),    std::string_view("context_length_exceeded"),
        std::string_view("maximum context length"), std::string_view("context size"),
        std::string_view("prompt too long"),        std::string_view("max context window"),
        std::string_view("context window"),         std::string_view("prompt is too long")};
    for (const auto words : too_long)
        if (contains_nocase(error.message, words) || contains_nocase(error.type, words))
            return Errc::context_too_long;
    const bool late = status < 300; // an error object after the status line had said 200
    if (late && error.status) status = error.status;
    for (const auto words : {"insufficient_quota", "spend_limit"}) // a 429 that no waiting ends
        if (contains_nocase(error.type, words)) return Errc::rejected;
    if (status == 401 || status == 403) return Errc::auth;
    if (status == 429) return Errc::rate_limited;
    if (status == 503 || status == 529) return Errc::overloaded;
    if (late) {
        if (contains_nocase(error.type, "rate_limit")) return Errc::rate_limited;
        for (const auto word : {"overloaded", "unavailable", "queue is full", "server busy"})
            if (contains_nocase(error.type, word) || contains_nocase(error.message, word))
                return Errc::overloaded;
    }
    return Errc::rejected;
}

void read_rejection(int status, std::string body, Response& response) {
    ObjectParser parser;
    dom::element answer;
    auto json = trimmed_json(body);
    const bool object = parser.parse(json, answer);
    ServerError error;
    if (object)
        error = error_of(answer).value_or(ServerError{shortened(json), {}});
    else
        error.message = looks_like_html(json) ? "a web page" : shortened(json);
    fail(response, classify(status, error), fmt::format("HTTP {}: {}", status, words_of(error)));
    if (object) response.body = std::string(json);
}

std::optional<std::string> check_object(std::string_view text) {
    if (text.empty()) return "not JSON (it is empty)";
    thread_local dom::parser parser;
    dom::element element;
    if (const auto error = parser.parse(text.data(), text.size()).get(element))
        return fmt::format("not JSON ({})", simdjson::error_message(error));
    if (!element.is_object()) return "not a JSON object";
    return {};
}

Prepared prepare_openai(const Request& request, const BackendRow& row, std::string_view model,
                        bool override_model) {
    Prepared prepared;
    if (auto error = check_object(request.body)) {
        prepared.error = "the request's body is " + *error;
        return prepared;
    }
    const auto list = members(request.body);
    const auto has = [&](std::string_view key) {
        const auto value = member(list, key);
        return value && *value != "null";
    };
    std::vector<Change> changes;

    if (!model.empty() && (override_model || !has("model")))
        changes.push_back({"model", json_string(model)});

    if (row.drop_nulls)
        for (const auto& it : list)
            if (it.value == "null" && (it.key != "model" || model.empty())) {
                changes.push_back({it.key, {}});
                prepared.notes.push_back(fmt::format(
                    "dropped \"{}\": null, which {} does not accept", it.key, row.name));
            }

    if (row.drop_seed_at_zero && has("seed")) {
        // The servers with this trait decode greedily when no temperature is given.
        double temperature = 0;
        if (const auto value = member(list, "temperature"))
            temperature = std::strtod(std::string(*value).c_str(), nullptr);
        if (temperature == 0) {
            changes.push_back({"seed", {}});
            prepared.notes.push_back(fmt::format(
                "dropped \"seed\": it has no effect at temperature 0, and {} does not batch "
                "requests that have one",
                row.name));
        } else {
            prepared.notes.push_back(fmt::format(
                "requests have a \"seed\" and a temperature above 0: {} answers those one at a "
                "time",
                row.name));
        }
    }

    // Streaming shows when the first token comes, that the server still works, and lets a
    // cancelled request go. But the caller's own choice stands, and some servers leave log
    // probabilities out of a stream.
    const auto wants = member(list, "stream");
    const bool logprobs = has("logprobs") && member(list, "logprobs") != "false";
    prepared.stream = wants == "true" || (row.streams && !has("stream") && !logprobs);
    if (prepared.stream && wants != "true") changes.push_back({"stream", "true"});
    if (prepared.stream && row.stream_usage && !has("stream_options"))
        changes.push_back({"stream_options", R"({"include_usage": true})"});

    prepared.body = changes.empty() ? request.body : Text(with_changes(request.body, changes));
    return prepared;
}

Prompt read_prompt(const Request& request, const BackendRow& row) {
    Prompt parts;
    parts.domain = request.endpoint;
    if (check_object(request.body)) return parts;
    const auto list = members(request.body);
    if (const auto model = member(list, "model")) parts.domain.append(*model);
    for (const auto key : {"max_tokens", "max_completion_tokens"})
        if (const auto value = member(list, key); value && *value != "null")
            parts.output_tokens = std::strtoll(std::string(*value).c_str(), nullptr, 10);
    const auto tools = member(list, "tools");
    const auto add = [&](std::optional<std::string_view> text) {
        if (text && *text != "null") parts.segments.push_back(*text);
    };
    if (row.tools_before_system) add(tools);
    add(member(list, "system")); // Anthropic
    add(member(list, "prompt"));
    bool before_tools = !row.tools_before_system;
    for (const auto message : elements(member(list, "messages").value_or("[]"))) {
        if (std::exchange(before_tools, false)) {
            const auto role = from_json_string(member(members(message), "role").value_or("\"\""));
            if (role != "system" && role != "developer") {
                add(tools);
                add(message);
            } else {
                add(message);
                add(tools);
            }
        } else {
            add(message);
        }
    }
    return parts;
}

} // namespace evalrt::detail
