// The OpenAI wire: /v1/chat/completions and /v1/completions, streamed and not, as real servers
// speak it.
#include "dom.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>

namespace evalrt::detail {
namespace {

// The places where servers say how much of the prompt they had cached: OpenAI and most others;
// the responses API; old oMLX; llama-server's timings and SGLang's meta_info, outside of usage.
void read_usage(dom::element answer, Usage& usage) {
    const auto [found, timings, meta_info] = pick(answer, {"usage", "timings", "meta_info"});
    dom::element reported;
    if (!found.get(reported) && reported.is_object()) {
        const auto [prompt, completion, prompt_details, input_details, cached, cache_read] =
            pick(reported, {"prompt_tokens", "completion_tokens", "prompt_tokens_details",
                            "input_tokens_details", "cached_tokens", "cache_read_input_tokens"});
        if (auto n = integer_of(prompt)) usage.prompt_tokens = n;
        if (auto n = integer_of(completion)) usage.completion_tokens = n;
        std::optional<std::int64_t> n;
        for (const auto& value :
             {prompt_details["cached_tokens"], input_details["cached_tokens"], cached, cache_read})
            if (!n) n = integer_of(value);
        if (n) usage.cached_tokens = n;
    }
    for (const auto& value : {timings["cache_n"], meta_info["cached_tokens"]})
        if (!usage.cached_tokens) usage.cached_tokens = integer_of(value);
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

// Most events of a stream differ in a piece of text and in nothing else: that is seen faster than
// they are parsed.
class TextEvents {
public:
    explicit TextEvents(bool chat) : chat_(chat) {}

    /// The text of an event that is otherwise like the last one that was learned, byte for byte.
    /// Nothing: it has to be parsed. Good until the next one.
    std::optional<std::string_view> text_of(std::string_view data) {
        const auto around = before_.size() + behind_.size();
        if (before_.empty() || data.size() < around || !data.starts_with(before_) ||
            !data.ends_with(behind_))
            return {};
        auto text = data.substr(before_.size(), data.size() - around);
        bool ascii = true, plain = true;
        for (const char c : text) {
            ascii &= static_cast<unsigned char>(c) < 0x80;
            plain &= c != '"' && c != '\\' && static_cast<unsigned char>(c) >= ' ';
        }
        if (!plain) {
            text_ = from_json_string(data.substr(before_.size() - 1, text.size() + 2));
            if (text_.empty()) return {};
            text = text_;
        } else if (!ascii && !simdjson::validate_utf8(text.data(), text.size())) {
            return {};
        }
        unlike_ = 0;
        return text;
    }

    /// Another event is parsed.
    void forget() { before_.clear(); }

    /// That event, if it was what it came as: whether all of it but its text may be said again, and
    /// changes nothing.
    bool learn(std::string_view data) {
        if (unlike_ == 16) return false; // each has something of its own
        ++unlike_;
        const auto top = members(data);
        if (std::count_if(top.begin(), top.end(),
                          [](const Member& it) { return it.key == "choices"; }) != 1)
            return false;
        const auto choices = elements(*member(top, "choices"));
        if (choices.size() != 1 || !choices[0].starts_with('{')) return false;
        auto text = only(choices[0], chat_ ? "delta" : "text", "index");
        if (chat_ && text.starts_with('{')) text = only(text, "content", "role");
        if (!text.starts_with('"')) return false;
        const auto at = std::size_t(text.data() - data.data());
        const auto before = data.substr(0, at + 1), behind = data.substr(at + text.size() - 1);
        for (const auto part : {before, behind})
            if (part.find('\\') != part.npos) return false; // a name might be another one's
        before_ = before;
        behind_ = behind;
        return true;
    }

private:
    // The member of this name, if the others say nothing. Empty: it is not so.
    static std::string_view only(std::string_view object, std::string_view name,
                                 std::string_view beside) {
        std::string_view found;
        for (const auto& it : members(object)) {
            if (it.key == name && found.empty())
                found = it.value;
            else if (it.key == name || (it.value != "null" && it.key != beside))
                return {};
        }
        return found;
    }

    const bool chat_;
    std::string before_, behind_; // with the text's quotes
    std::string text_;
    unsigned unlike_ = 0; // since the last one that was like another
};

class OpenAiReader final : public AnswerReader {
public:
    explicit OpenAiReader(bool chat) : chat_(chat), alike_(chat) {}

    Piece event(const SseEvent& event) override {
        Piece piece;
        auto data = trimmed_json(event.data);
        if (data.starts_with("[DONE]")) {
            piece.last = true;
            return piece;
        }
        if (data.empty() || error_ || broken_) return piece;
        if (event.type.empty())
            if (const auto text = alike_.text_of(data)) {
                part(choices_[alike_index_].texts, chat_ ? "content" : "text") += *text;
                piece.content = !text->empty();
                if (alike_index_ == 0) piece.text = *text;
                return piece;
            }
        alike_.forget();
        const auto as_it_came = data;
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
        if (piece.content && data.data() == as_it_came.data() && alike_.learn(data))
            alike_index_ = integer_of(choices.at(0)["index"]).value_or(0);
        piece.text = text_;
        return piece;
    }

    void finish(Response& response) override {
        response.usage = usage_;
        response.request_id = id_;
        if (error_) return fail(response, *error_);
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
        for (const auto& [name, value] : head_)
            if (name == "model") response.model = from_json_string(value);
        response.body = body();
    }

    void whole(std::string body, Response& response) override {
        body.reserve(body.size() + simdjson::SIMDJSON_PADDING);
        auto json = trimmed_json(body);
        if (json.empty()) return fail(response, Errc::malformed, "the server sent an empty answer");
        dom::element answer;
        if (!parser_.parse(json, answer, true))
            return fail(response, Errc::malformed, not_json(json));
        read_usage(answer, response.usage);
        if (const auto error = error_of(answer)) return fail(response, *error);
        const auto [id, model, list] = pick(answer, {"id", "model", "choices"});
        response.request_id = string_of(id);
        response.model = string_of(model);
        dom::array choices;
        if (list.get(choices) || choices.size() == 0)
            return fail(response, Errc::malformed,
                        fmt::format("the answer has no choices: {}", shortened(json)));
        for (dom::element choice : choices)
            if (const auto reason = string_of(choice["finish_reason"]); failed_finish(reason))
                return fail(response, Errc::rejected,
                            fmt::format("the server gave up (finish_reason \"{}\")", reason));
        const auto [message, text, reason] =
            pick(*choices.begin(), {"message", "text", "finish_reason"});
        if (chat_ ? !message.is_object() : bool(text.error()))
            return fail(response, Errc::malformed,
                        fmt::format("the answer's choice has no {}: {}", chat_ ? "message" : "text",
                                    shortened(json)));
        response.text = string_of(chat_ ? message["content"] : text);
        response.finish_reason = string_of(reason);
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
    TextEvents alike_;
    std::int64_t alike_index_ = 0; // of their choice
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

namespace {

// Whether a member says what the server does anyway.
bool says_nothing(std::string_view key, std::string_view value) {
    if (value == "null" || value == "false" || value == "[]" || value == "{}") return true;
    if (key == "response_format") // {"type": "text"}
        return value.starts_with('{') &&
               from_json_string(member(members(value), "type").value_or("")) == "text";
    if (key == "tool_choice") return value == "\"auto\"";
    return (key == "n" || key == "top_p") && std::strtod(std::string(value).c_str(), nullptr) == 1;
}

// The messages with plain strings for contents. Nothing: they are so already.
std::optional<std::string> flattened(std::string_view messages, const BackendRow& row,
                                     std::string& error) {
    std::string out;
    bool changed = false;
    for (const auto message : elements(messages)) {
        std::optional<std::string_view> content;
        if (message.starts_with('{')) content = member(members(message), "content");
        out += out.empty() ? "[" : ", ";
        if (!content || !content->starts_with('[')) {
            out += message;
            continue;
        }
        std::string text = "\"";
        const auto add = [&](std::string_view string) { // byte for byte
            if (string.starts_with('"')) text += string.substr(1, string.size() - 2);
        };
        for (const auto part : elements(*content)) {
            if (!part.starts_with('{')) {
                add(part);
                continue;
            }
            const auto list = members(part);
            const auto kind = from_json_string(member(list, "type").value_or("\"text\""));
            const auto value = member(list, "text");
            if (!value) {
                error = fmt::format("a message has a part of type \"{}\", and {} reads nothing but "
                                    "text",
                                    shortened(kind, 40), row.name);
                return {};
            }
            add(*value);
        }
        const Change change{"content", text + '"'};
        out += with_changes(message, {&change, 1});
        changed = true;
    }
    if (!changed) return {};
    return out + "]";
}

// What the row's server would trip over, or would read otherwise than it is meant.
void fix_for(const BackendRow& row, std::span<const Member> list, std::vector<Change>& changes,
             Prepared& prepared) {
    const auto given = [&](std::string_view key) {
        const auto value = member(list, key);
        return value && *value != "null" ? value : std::nullopt;
    };
    const auto note = [&]<class... Args>(fmt::format_string<Args...> format, Args&&... args) {
        prepared.notes.push_back(fmt::format(format, std::forward<Args>(args)...));
    };
    for (const auto& key : row.ignored) {
        const auto value = given(key);
        if (!value || says_nothing(key, *value)) continue;
        if (key == "n" && std::strtod(std::string(*value).c_str(), nullptr) > 1) {
            prepared.error =
                fmt::format("\"n\" is {}, but {} gives one choice whatever \"n\" says: "
                            "ask {} times instead",
                            *value, row.name, *value);
            return;
        }
        note("requests have \"{}\": {} does not read it", key, row.name);
    }
    if (row.logprobs_bool)
        if (const auto value = given("logprobs"); value && *value != "true" && *value != "false") {
            prepared.error = fmt::format("\"logprobs\" is {}, but {} takes true or false, and the "
                                         "number as \"top_logprobs\"",
                                         shortened(*value, 40), row.name);
            return;
        }
    if (row.text_only)
        if (const auto messages = given("messages"); messages && messages->starts_with('[')) {
            if (auto text = flattened(*messages, row, prepared.error)) {
                changes.push_back({"messages", std::move(text)});
                note("content that came in parts is sent as one string: {} reads no parts",
                     row.name);
            }
            if (!prepared.error.empty()) return;
        }
    auto limit = given("max_completion_tokens");
    if (row.max_tokens_only && limit) {
        changes.push_back({"max_completion_tokens", {}});
        changes.push_back({"max_tokens", std::string(*limit)});
        note("\"max_completion_tokens\" is sent as \"max_tokens\": {} reads only that", row.name);
    }
    if (!limit) limit = given("max_tokens");
    if (limit) {
        prepared.max_tokens = std::strtoll(std::string(*limit).c_str(), nullptr, 10);
    } else if (row.default_max_tokens > 0) {
        prepared.max_tokens = row.default_max_tokens;
        note("requests have no \"max_tokens\": {} ends answers after {} tokens if it was not told "
             "otherwise",
             row.name, row.default_max_tokens);
    }
    if (row.default_temperature && !given("temperature"))
        note("requests have no \"temperature\": {} then takes {}; send one to choose", row.name,
             *row.default_temperature);
    prepared.tools_bytes = given("tools").value_or("").size();
    prepared.processors = has_processors(list);
}

} // namespace

bool prompt_computed(std::string_view comment) {
    constexpr std::string_view name = "keepalive ";
    if (!comment.starts_with(name)) return false;
    const char* const end = comment.data() + comment.size();
    std::uint64_t done = 0, all = 0;
    const auto first = std::from_chars(comment.data() + name.size(), end, done);
    if (first.ec != std::errc() || first.ptr == end || *first.ptr != '/') return false;
    const auto second = std::from_chars(first.ptr + 1, end, all);
    return second.ec == std::errc() && second.ptr == end && done <= all && all - done <= 1;
}

// As mlx_lm makes its processors: none for what is empty or 0.
bool has_processors(std::span<const Member> body) {
    for (const auto key :
         {"logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty"})
        if (const auto value = member(body, key); value && !says_nothing(key, *value))
            if (value->starts_with('{') || std::strtod(std::string(*value).c_str(), nullptr) != 0)
                return true;
    return false;
}

Prepared prepare_openai(const Request& request, const BackendRow& row, std::string_view model,
                        bool override_model) {
    Prepared prepared;
    thread_local std::vector<Member> list; // its memory serves all requests
    if (auto error = object_error(request.body, &list)) {
        prepared.error = "the request's body is " + *error;
        return prepared;
    }
    const auto has = [&](std::string_view key) {
        const auto value = member(list, key);
        return value && *value != "null";
    };
    std::vector<Change> changes;
    changes.reserve(4);

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

    fix_for(row, list, changes, prepared);
    if (!prepared.error.empty()) return prepared;

    prepared.stream = streamed(list, row);
    if (prepared.stream && member(list, "stream") != "true") changes.push_back({"stream", "true"});
    const bool messages = request.endpoint.ends_with("/messages"); // always has the usage
    if (prepared.stream && row.stream_usage && !messages && !has("stream_options"))
        changes.push_back({"stream_options", R"({"include_usage": true})"});

    if (row.cache_key && !messages && !has("prompt_cache_key") &&
        request.shared_bytes >= row.shared_tokens * std::size_t(4))
        for (const auto& end : prefix_ends(request.body))
            if (end.bytes == request.shared_bytes)
                changes.push_back(
                    {"prompt_cache_key", fmt::format("\"evalrt-{:016x}\"", end.hash)});

    const auto change = std::find_if(changes.begin(), changes.end(),
                                     [](const Change& it) { return it.key == "model"; });
    if (change != changes.end())
        prepared.model = model;
    else if (has("model"))
        prepared.model = from_json_string(*member(list, "model"));
    prepared.body = changes.empty() ? Patched(request.body) : Patched(request.body, list, changes);
    return prepared;
}

} // namespace evalrt::detail
