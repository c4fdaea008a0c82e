#include "translate.hpp"

#include "json_text.hpp"
#include "wire.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

namespace evalrt::detail {
namespace {

using Members = std::vector<Member>;

// A JSON object that is being written.
class Writer {
public:
    // No value: nothing is written.
    Writer& add(std::string_view key, const std::optional<std::string_view>& value) {
        if (!value) return *this;
        text_ += text_.size() > 1 ? ", \"" : "\"";
        text_.append(key).append("\": ").append(*value);
        return *this;
    }
    std::string done() { return text_ + "}"; }

private:
    std::string text_ = "{";
};

std::string array(const std::vector<std::string>& items) {
    std::string out = "[";
    for (const auto& it : items) (out += out.size() > 1 ? ", " : "") += it;
    return out + "]";
}

// Null means the same as nothing.
std::optional<std::string_view> given(const Members& list, std::string_view key) {
    const auto value = member(list, key);
    return value && *value != "null" ? value : std::nullopt;
}

std::string word(const Members& list, std::string_view key) {
    return from_json_string(given(list, key).value_or("\"\""));
}

bool is_string(std::string_view value) { return value.starts_with('"'); }

double number(std::string_view value) { return std::strtod(std::string(value).c_str(), nullptr); }

std::string text_part(std::string_view json) {
    return Writer().add("type", "\"text\"").add("text", json).done();
}

bool one_of(std::string_view key, std::initializer_list<std::string_view> keys) {
    return std::find(keys.begin(), keys.end(), key) != keys.end();
}

bool blank(std::string_view text) { return text.find_first_not_of(" \t\r\n") == text.npos; }

class Translator {
protected:
    void refuse(std::string_view field, std::string_view why) {
        if (out_.error.empty()) out_.error = fmt::format("\"{}\" {}", field, why);
    }
    void left_out(std::string_view field, std::string_view why) {
        out_.notes.push_back(fmt::format("left out \"{}\": {}", field, why));
    }

    Translated out_;
    Writer body_;
};

// Requests: chat to messages

class ToMessages : public Translator {
public:
    Translated run(std::string_view body, unsigned max_tokens) {
        const auto list = members(body);
        auto most = given(list, "max_completion_tokens");
        if (!most) most = given(list, "max_tokens");
        for (const auto& it : list)
            if (it.value != "null") top(it.key, it.value, list);
        if (!most)
            out_.notes.push_back(
                fmt::format("bodies without \"max_tokens\" get {}: Anthropic's API wants a number",
                            max_tokens));
        body_.add("max_tokens", most ? std::string(*most) : std::to_string(max_tokens));
        if (!given(list, "messages")) refuse("messages", "is missing");
        if (given(list, "tools") && !elements(*given(list, "tools")).empty()) choose_tool(list);
        out_.body = body_.done();
        return std::move(out_);
    }

private:
    struct Turn {
        bool assistant = false;
        std::string plain; // its content as one JSON string; empty: it is in blocks
        std::vector<std::string> blocks;
    };

    void top(std::string_view key, std::string_view value, const Members& list) {
        static constexpr std::string_view none = "has no counterpart in Anthropic's API";
        if (one_of(key, {"max_tokens", "max_completion_tokens", "tool_choice",
                         "parallel_tool_calls", "stream_options"}))
            return;
        if (key == "messages") return messages(value);
        if (key == "tools") return tools(value);
        if (key == "stop") return stop(value);
        if (key == "user") {
            body_.add("metadata", Writer().add("user_id", value).done());
        } else if (key == "temperature" && !(number(value) >= 0 && number(value) <= 1)) {
            refuse(key, fmt::format("is {}: Anthropic's goes from 0 to 1", value));
        } else if (one_of(key, {"frequency_penalty", "presence_penalty", "top_logprobs"})) {
            if (number(value) != 0) refuse(key, none);
        } else if (key == "n") {
            if (number(value) != 1) refuse(key, none);
        } else if (key == "logprobs") {
            if (value != "false") refuse(key, none);
        } else if (one_of(key, {"logit_bias", "functions"})) {
            if (!members(value).empty() || !elements(value).empty()) refuse(key, none);
        } else if (key == "response_format") {
            if (word(members(value), "type") != "text") refuse(key, none);
        } else if (key == "modalities") {
            const auto modes = elements(value);
            if (modes.size() != 1 || modes.front() != "\"text\"") refuse(key, none);
        } else if (one_of(key, {"audio", "function_call", "prediction", "reasoning_effort",
                                "verbosity", "web_search_options"})) {
            refuse(key, none);
        } else if (one_of(key, {"metadata", "prompt_cache_key", "prompt_cache_retention",
                                "safety_identifier", "seed", "service_tier", "store"})) {
            left_out(key, "Anthropic's API has none");
        } else if (member(list, key)->data() == value.data()) { // the first of that name
            body_.add(key, value);
        }
    }

    void stop(std::string_view value) {
        std::vector<std::string> kept;
        const auto add = [&](std::string_view text) {
            if (blank(from_json_string(text)))
                out_.notes.push_back("left out a stop sequence of nothing but white space, which "
                                     "Anthropic's API refuses");
            else
                kept.emplace_back(text);
        };
        if (is_string(value)) add(value);
        for (const auto it : elements(value)) add(it);
        if (!kept.empty()) body_.add("stop_sequences", array(kept));
    }

    void tools(std::string_view value) {
        std::vector<std::string> all;
        for (const auto item : elements(value)) {
            const auto where = fmt::format("tools[{}]", all.size());
            const auto tool = members(item);
            if (word(tool, "type") != "function")
                return refuse(where + ".type", "is not \"function\"");
            const auto function = members(given(tool, "function").value_or("{}"));
            if (word(function, "name").empty())
                return refuse(where + ".function.name", "is missing");
            all.push_back(
                Writer()
                    .add("name", *given(function, "name"))
                    .add("description", given(function, "description"))
                    .add("input_schema", given(function, "parameters")
                                             .value_or(R"({"type": "object", "properties": {}})"))
                    .add("strict", given(function, "strict"))
                    .add("cache_control", given(tool, "cache_control"))
                    .done());
        }
        if (!all.empty()) body_.add("tools", array(all));
    }

    void choose_tool(const Members& list) {
        const auto value = given(list, "tool_choice");
        const bool one = given(list, "parallel_tool_calls") == "false";
        if (!value && !one) return;
        Writer choice;
        const auto choice_word = value ? from_json_string(*value) : "auto";
        if (choice_word == "none") {
            body_.add("tool_choice", choice.add("type", "\"none\"").done());
            return;
        }
        if (choice_word == "auto") {
            choice.add("type", "\"auto\"");
        } else if (choice_word == "required") {
            choice.add("type", "\"any\"");
        } else if (const auto function = members(given(members(*value), "function").value_or("{}"));
                   !word(function, "name").empty()) {
            choice.add("type", "\"tool\"").add("name", *given(function, "name"));
        } else {
            return refuse("tool_choice", fmt::format("is {}, for which Anthropic's API has no "
                                                     "words",
                                                     *value));
        }
        if (one) choice.add("disable_parallel_tool_use", "true");
        body_.add("tool_choice", choice.done());
    }

    void messages(std::string_view value) {
        const auto list = elements(value);
        for (std::size_t i = 0; i < list.size() && out_.error.empty(); ++i)
            message(members(list[i]), fmt::format("messages[{}]", i));
        if (!out_.error.empty()) return;
        if (turns_.empty()) return refuse("messages", "has no message but the system's");
        if (turns_.front().assistant)
            return refuse("messages", "begins with the assistant's, and Anthropic's begin with "
                                      "the user's");
        if (system_.size() == 1 && system_plain_)
            body_.add("system", *given(members(system_.front()), "text"));
        else if (!system_.empty())
            body_.add("system", array(system_));
        std::vector<std::string> all;
        for (const auto& turn : turns_)
            all.push_back(Writer()
                              .add("role", turn.assistant ? "\"assistant\"" : "\"user\"")
                              .add("content", turn.plain.empty() ? array(turn.blocks) : turn.plain)
                              .done());
        body_.add("messages", array(all));
    }

    void message(const Members& it, const std::string& where) {
        const auto role = word(it, "role");
        const auto content = given(it, "content");
        if (role == "system" || role == "developer") {
            if (!turns_.empty())
                out_.notes.push_back("a system message in the middle of the conversation went to "
                                     "its beginning, where Anthropic's API has it");
            system_plain_ = content && is_string(*content);
            return parts(content, where, system_, false);
        }
        if (role == "user") {
            if (content && is_string(*content)) return add_plain(false, *content);
            std::vector<std::string> blocks;
            parts(content, where, blocks, true);
            return add(false, std::move(blocks));
        }
        if (role == "assistant") return assistant(it, content, where);
        if (role == "tool") {
            Writer result;
            result.add("type", "\"tool_result\"");
            const auto id = given(it, "tool_call_id");
            if (!id) return refuse(where + ".tool_call_id", "is missing");
            result.add("tool_use_id", *id);
            if (content && is_string(*content)) {
                result.add("content", *content);
            } else if (content) {
                std::vector<std::string> blocks;
                parts(content, where, blocks, true);
                result.add("content", array(blocks));
            }
            return add(false, {result.add("cache_control", given(it, "cache_control")).done()});
        }
        refuse(where + ".role",
               fmt::format("is \"{}\", which Anthropic's API does not know", role));
    }

    void assistant(const Members& it, std::optional<std::string_view> content,
                   const std::string& where) {
        if (given(it, "function_call"))
            return refuse(where + ".function_call", "is of the old form: use tool_calls");
        const auto calls = elements(given(it, "tool_calls").value_or("[]"));
        // The reasoning with its signatures, as answer_to_chat() hands it out.
        const auto thinking = elements(given(it, "thinking_blocks").value_or("[]"));
        if (calls.empty() && thinking.empty() && content && is_string(*content))
            return add_plain(true, *content);
        std::vector<std::string> blocks(thinking.begin(), thinking.end());
        if (thinking.empty() && (given(it, "reasoning_content") || given(it, "reasoning")))
            left_out("reasoning_content",
                     "Anthropic's API takes reasoning with its signature only");
        parts(content, where, blocks, false);
        if (!content)
            if (const auto refusal = given(it, "refusal"); refusal && is_string(*refusal))
                blocks.push_back(text_part(*refusal));
        for (std::size_t i = 0; i < calls.size(); ++i) {
            const auto call_where = fmt::format("{}.tool_calls[{}]", where, i);
            const auto call = members(calls[i]);
            const auto function = members(given(call, "function").value_or("{}"));
            if (!given(call, "id")) return refuse(call_where + ".id", "is missing");
            if (!given(function, "name"))
                return refuse(call_where + ".function.name", "is missing");
            // Some write the object itself.
            const auto value = given(function, "arguments").value_or("\"\"");
            auto input = is_string(value) ? from_json_string(value) : std::string(value);
            if (blank(input)) input = "{}";
            if (const auto error = object_error(input))
                return refuse(call_where + ".function.arguments", "is " + *error);
            blocks.push_back(Writer()
                                 .add("type", "\"tool_use\"")
                                 .add("id", *given(call, "id"))
                                 .add("name", *given(function, "name"))
                                 .add("input", input)
                                 .add("cache_control", given(call, "cache_control"))
                                 .done());
        }
        add(true, std::move(blocks));
    }

    // Content, a string or parts, as blocks. The API refuses empty texts.
    void parts(std::optional<std::string_view> content, const std::string& where,
               std::vector<std::string>& out, bool images) {
        if (!content) return;
        if (is_string(*content)) {
            if (*content != "\"\"") out.push_back(text_part(*content));
            return;
        }
        std::size_t i = 0;
        for (const auto item : elements(*content)) {
            const auto at = fmt::format("{}.content[{}]", where, i++);
            const auto it = members(item);
            const auto type = word(it, "type");
            if (type == "text") {
                if (given(it, "text").value_or("\"\"") != "\"\"") out.emplace_back(item);
            } else if (type == "refusal") {
                out.push_back(text_part(given(it, "refusal").value_or("\"\"")));
            } else if (type == "image_url" && images) {
                image(it, at, out);
            } else {
                return refuse(at + ".type", fmt::format("is \"{}\", which cannot be said to "
                                                        "Anthropic's API there",
                                                        type));
            }
        }
    }

    void image(const Members& it, const std::string& at, std::vector<std::string>& out) {
        const auto value = given(it, "image_url").value_or("\"\"");
        const auto url = is_string(value) ? from_json_string(value) : word(members(value), "url");
        Writer source;
        if (url.starts_with("data:")) {
            const auto comma = url.find(',');
            const auto head = std::string_view(url).substr(5, comma == url.npos ? 0 : comma - 5);
            if (!head.ends_with(";base64"))
                return refuse(at + ".image_url", "is a data URL that is not base64");
            source.add("type", "\"base64\"")
                .add("media_type", json_string(head.substr(0, head.find(';'))))
                .add("data", json_string(std::string_view(url).substr(comma + 1)));
        } else if (url.starts_with("https://") || url.starts_with("http://")) {
            source.add("type", "\"url\"").add("url", json_string(url));
        } else {
            return refuse(at + ".image_url", "is neither a data URL nor one of http");
        }
        out.push_back(Writer()
                          .add("type", "\"image\"")
                          .add("source", source.done())
                          .add("cache_control", given(it, "cache_control"))
                          .done());
    }

    Turn& turn(bool assistant) {
        if (turns_.empty() || turns_.back().assistant != assistant)
            turns_.push_back({assistant, {}, {}});
        return turns_.back();
    }

    void add_plain(bool assistant, std::string_view text) {
        if (!turns_.empty() && turns_.back().assistant == assistant) {
            std::vector<std::string> blocks;
            if (text != "\"\"") blocks.push_back(text_part(text));
            return add(assistant, std::move(blocks));
        }
        turn(assistant).plain = text;
    }

    void add(bool assistant, std::vector<std::string> blocks) {
        auto& it = turn(assistant);
        if (!it.plain.empty()) {
            if (it.plain != "\"\"") it.blocks.push_back(text_part(it.plain));
            it.plain.clear();
        }
        it.blocks.insert(it.blocks.end(), blocks.begin(), blocks.end());
    }

    std::vector<std::string> system_;
    bool system_plain_ = false;
    std::vector<Turn> turns_;
};

// Requests: messages to chat

class ToChat : public Translator {
public:
    Translated run(std::string_view body) {
        const auto list = members(body);
        std::vector<std::string> all;
        if (const auto system = given(list, "system")) {
            if (!is_string(*system) || *system != "\"\"")
                all.push_back(Writer()
                                  .add("role", "\"system\"")
                                  .add("content", content(*system, "system"))
                                  .done());
        }
        if (!given(list, "messages")) refuse("messages", "is missing");
        const auto turns = elements(given(list, "messages").value_or("[]"));
        for (std::size_t i = 0; i < turns.size() && out_.error.empty(); ++i)
            message(members(turns[i]), fmt::format("messages[{}]", i), all);
        for (const auto& it : list)
            if (it.value != "null") top(it.key, it.value, list, all);
        out_.body = body_.done();
        return std::move(out_);
    }

private:
    void top(std::string_view key, std::string_view value, const Members& list,
             const std::vector<std::string>& messages) {
        if (key == "system" || key == "cache_control") return; // of the latter: here it is implied
        if (key == "messages") {
            body_.add("messages", array(messages));
        } else if (key == "stop_sequences") {
            if (!elements(value).empty()) body_.add("stop", value);
        } else if (key == "tools") {
            tools(value);
        } else if (key == "tool_choice") {
            choose_tool(members(value));
        } else if (key == "metadata") {
            if (const auto user = given(members(value), "user_id")) body_.add("user", *user);
        } else if (key == "thinking") {
            if (word(members(value), "type") != "disabled") refuse(key, none);
        } else if (one_of(key,
                          {"container", "context_management", "mcp_servers", "output_config"})) {
            refuse(key, none);
        } else if (one_of(key, {"inference_geo", "service_tier", "speed"})) {
            left_out(key, "chat completions have none");
        } else if (member(list, key)->data() == value.data()) {
            body_.add(key, value);
        }
    }

    void tools(std::string_view value) {
        std::vector<std::string> all;
        for (const auto item : elements(value)) {
            const auto where = fmt::format("tools[{}]", all.size());
            const auto tool = members(item);
            if (const auto type = word(tool, "type"); !type.empty() && type != "custom")
                return refuse(where + ".type",
                              fmt::format("is \"{}\", which only Anthropic's servers run", type));
            if (!given(tool, "name")) return refuse(where + ".name", "is missing");
            all.push_back(Writer()
                              .add("type", "\"function\"")
                              .add("function", Writer()
                                                   .add("name", *given(tool, "name"))
                                                   .add("description", given(tool, "description"))
                                                   .add("parameters", given(tool, "input_schema"))
                                                   .add("strict", given(tool, "strict"))
                                                   .done())
                              .done());
        }
        if (!all.empty()) body_.add("tools", array(all));
    }

    void choose_tool(const Members& choice) {
        const auto type = word(choice, "type");
        if (type == "auto" || type == "none") {
            body_.add("tool_choice", json_string(type));
        } else if (type == "any") {
            body_.add("tool_choice", "\"required\"");
        } else if (type == "tool" && given(choice, "name")) {
            body_.add("tool_choice",
                      Writer()
                          .add("type", "\"function\"")
                          .add("function", Writer().add("name", *given(choice, "name")).done())
                          .done());
        } else {
            return refuse("tool_choice", none);
        }
        if (given(choice, "disable_parallel_tool_use") == "true")
            body_.add("parallel_tool_calls", "false");
    }

    void message(const Members& it, const std::string& where, std::vector<std::string>& out) {
        const auto role = word(it, "role");
        const auto value = given(it, "content").value_or("\"\"");
        if (role != "user" && role != "assistant")
            return refuse(where + ".role", "is neither \"user\" nor \"assistant\"");
        Writer message;
        message.add("role", json_string(role));
        if (is_string(value)) {
            out.push_back(message.add("content", value).done());
            return;
        }
        std::vector<std::string> rest, calls; // what is not a tool's result
        const auto blocks = elements(value);
        for (std::size_t i = 0; i < blocks.size(); ++i) {
            const auto at = fmt::format("{}.content[{}]", where, i);
            const auto block = members(blocks[i]);
            const auto type = word(block, "type");
            if (type == "tool_result" && role == "user") {
                if (given(block, "is_error") == "true")
                    left_out("is_error", "chat completions have none; the result's text is there");
                out.push_back(
                    Writer()
                        .add("role", "\"tool\"")
                        .add("tool_call_id", given(block, "tool_use_id").value_or("\"\""))
                        .add("content", content(given(block, "content").value_or("\"\""), at))
                        .done());
            } else if (type == "tool_use" && role == "assistant") {
                calls.push_back(
                    Writer()
                        .add("id", given(block, "id").value_or("\"\""))
                        .add("type", "\"function\"")
                        .add("function", Writer()
                                             .add("name", given(block, "name").value_or("\"\""))
                                             .add("arguments",
                                                  json_string(given(block, "input").value_or("{}")))
                                             .done())
                        .done());
            } else if (one_of(type, {"thinking", "redacted_thinking"}) && role == "assistant") {
                left_out(type, "chat completions do not take reasoning back");
            } else if (type == "image" && role == "user") {
                image(block, at, rest);
            } else if (type == "text") {
                rest.push_back(text_part(given(block, "text").value_or("\"\"")));
            } else {
                return refuse(at + ".type", fmt::format("is \"{}\", which has no counterpart in "
                                                        "chat completions there",
                                                        type));
            }
        }
        if (rest.empty() && calls.empty() && !blocks.empty() && role == "user") return; // results
        message.add("content", rest.empty() && !calls.empty() ? "null" : joined(rest));
        if (!calls.empty()) message.add("tool_calls", array(calls));
        out.push_back(message.done());
    }

    // One text is a string: not every server takes parts.
    static std::string joined(const std::vector<std::string>& parts) {
        if (parts.empty()) return "\"\"";
        const auto first = members(parts.front());
        if (parts.size() == 1 && word(first, "type") == "text") return std::string(first[1].value);
        return array(parts);
    }

    // A string, or blocks of text.
    std::string content(std::string_view value, const std::string& where) {
        if (is_string(value)) return std::string(value);
        std::vector<std::string> parts;
        for (const auto item : elements(value)) {
            const auto block = members(item);
            if (const auto type = word(block, "type"); type != "text")
                refuse(where + ".type",
                       fmt::format("has a \"{}\", and chat completions only text there", type));
            parts.push_back(text_part(given(block, "text").value_or("\"\"")));
        }
        return joined(parts);
    }

    void image(const Members& block, const std::string& at, std::vector<std::string>& out) {
        const auto source = members(given(block, "source").value_or("{}"));
        const auto type = word(source, "type");
        std::string url;
        if (type == "base64")
            url = "data:" + word(source, "media_type") + ";base64," + word(source, "data");
        else if (type == "url")
            url = word(source, "url");
        else
            return refuse(at + ".source.type",
                          fmt::format("is \"{}\", which chat completions do not have", type));
        out.push_back(Writer()
                          .add("type", "\"image_url\"")
                          .add("image_url", Writer().add("url", json_string(url)).done())
                          .done());
    }

    static constexpr std::string_view none = "has no counterpart in chat completions";
};

// Answers

constexpr std::pair<std::string_view, std::string_view> reasons[] = {
    // Anthropic's, OpenAI's; the first of a kind is taken on the way back
    {"end_turn", "stop"},         {"stop_sequence", "stop"},
    {"max_tokens", "length"},     {"model_context_window_exceeded", "length"},
    {"tool_use", "tool_calls"},   {"tool_use", "function_call"},
    {"refusal", "content_filter"}};

std::string to_finish_reason(std::string_view stop_reason) {
    for (const auto& [theirs, ours] : reasons)
        if (theirs == stop_reason) return std::string(ours);
    return std::string(stop_reason); // pause_turn, and what is new
}

std::string to_stop_reason(std::string_view finish_reason) {
    for (const auto& [theirs, ours] : reasons)
        if (ours == finish_reason) return std::string(theirs);
    return std::string(finish_reason);
}

} // namespace

Translated chat_to_messages(std::string_view body, unsigned max_tokens) {
    return ToMessages().run(body, max_tokens);
}

Translated messages_to_chat(std::string_view body) { return ToChat().run(body); }

void answer_to_chat(Response& response, std::int64_t created) {
    const auto answer = members(response.body);
    std::string reasoning;
    std::vector<std::string> thinking, calls;
    for (const auto item : elements(given(answer, "content").value_or("[]"))) {
        const auto block = members(item);
        const auto type = word(block, "type");
        if (type == "thinking" || type == "redacted_thinking") {
            reasoning += word(block, "thinking");
            thinking.emplace_back(item);
        } else if (type == "tool_use") {
            calls.push_back(
                Writer()
                    .add("id", given(block, "id").value_or("\"\""))
                    .add("type", "\"function\"")
                    .add("function",
                         Writer()
                             .add("name", given(block, "name").value_or("\"\""))
                             .add("arguments", json_string(given(block, "input").value_or("{}")))
                             .done())
                    .done());
        }
    }
    response.finish_reason = to_finish_reason(response.finish_reason);

    Writer message;
    message.add("role", "\"assistant\"")
        .add("content",
             response.text.empty() && !calls.empty() ? "null" : json_string(response.text));
    if (!reasoning.empty()) message.add("reasoning_content", json_string(reasoning));
    if (!thinking.empty()) message.add("thinking_blocks", array(thinking));
    if (!calls.empty()) message.add("tool_calls", array(calls));
    Writer choice;
    choice.add("index", "0").add("message", message.done());
    choice.add("finish_reason", json_string(response.finish_reason));
    choice.add("stop_reason", given(answer, "stop_sequence")); // as vLLM names it

    Writer body;
    body.add("id", given(answer, "id").value_or("\"\""))
        .add("object", "\"chat.completion\"")
        .add("created", std::to_string(created))
        .add("model", given(answer, "model").value_or("\"\""))
        .add("choices", "[" + choice.done() + "]");
    const auto& usage = response.usage;
    if (usage.prompt_tokens && usage.completion_tokens) {
        Writer counts;
        counts.add("prompt_tokens", std::to_string(*usage.prompt_tokens))
            .add("completion_tokens", std::to_string(*usage.completion_tokens))
            .add("total_tokens", std::to_string(*usage.prompt_tokens + *usage.completion_tokens));
        if (usage.cached_tokens)
            counts.add("prompt_tokens_details",
                       fmt::format("{{\"cached_tokens\": {}}}", *usage.cached_tokens));
        body.add("usage", counts.done());
    }
    response.body = body.done();
}

void answer_to_messages(Response& response) {
    const auto answer = members(response.body);
    const auto choices = elements(given(answer, "choices").value_or("[]"));
    const auto choice = members(choices.empty() ? "{}" : choices.front());
    const auto message = members(given(choice, "message").value_or("{}"));

    std::vector<std::string> content;
    for (const auto it : elements(given(message, "thinking_blocks").value_or("[]")))
        content.emplace_back(it);
    auto reasoning = given(message, "reasoning_content");
    if (!reasoning) reasoning = given(message, "reasoning");
    if (content.empty() && reasoning && is_string(*reasoning) && *reasoning != "\"\"")
        content.push_back(Writer()
                              .add("type", "\"thinking\"")
                              .add("thinking", *reasoning)
                              .add("signature", "\"\"")
                              .done());
    if (!response.text.empty()) content.push_back(text_part(json_string(response.text)));
    const auto calls = elements(given(message, "tool_calls").value_or("[]"));
    for (const auto item : calls) {
        const auto call = members(item);
        const auto function = members(given(call, "function").value_or("{}"));
        const auto value = given(function, "arguments").value_or("\"\"");
        auto input = is_string(value) ? from_json_string(value) : std::string(value);
        if (blank(input)) input = "{}";
        if (check_object(input)) input = repaired_json(input);
        if (check_object(input) && response.finish_reason == "length") input = closed_json(input);
        if (check_object(input)) {
            response.outcome = Errc::malformed;
            response.detail = fmt::format("the model called {} with arguments that are not a JSON "
                                          "object",
                                          word(function, "name"));
            return;
        }
        content.push_back(Writer()
                              .add("type", "\"tool_use\"")
                              .add("id", given(call, "id").value_or("\"\""))
                              .add("name", given(function, "name").value_or("\"\""))
                              .add("input", input)
                              .done());
    }

    // Servers say "stop" with calls and "tool_calls" with none: the calls decide.
    auto reason = to_stop_reason(response.finish_reason);
    if (!calls.empty() && reason == "end_turn") reason = "tool_use";
    if (calls.empty() && reason == "tool_use") reason = "end_turn";
    auto sequence = given(choice, "stop_reason"); // vLLM's: what it stopped at
    if (reason != "end_turn" || !sequence || !is_string(*sequence)) sequence = {};
    if (sequence) reason = "stop_sequence";
    response.finish_reason = reason;

    const auto& usage = response.usage;
    Writer counts;
    if (usage.prompt_tokens)
        counts.add("input_tokens",
                   std::to_string(*usage.prompt_tokens - usage.cached_tokens.value_or(0)));
    if (usage.cached_tokens)
        counts.add("cache_read_input_tokens", std::to_string(*usage.cached_tokens));
    if (usage.completion_tokens)
        counts.add("output_tokens", std::to_string(*usage.completion_tokens));
    response.body = Writer()
                        .add("id", given(answer, "id").value_or("\"\""))
                        .add("type", "\"message\"")
                        .add("role", "\"assistant\"")
                        .add("model", given(answer, "model").value_or("\"\""))
                        .add("content", array(content))
                        .add("stop_reason", json_string(reason))
                        .add("stop_sequence", sequence.value_or("null"))
                        .add("usage", counts.done())
                        .done();
}

} // namespace evalrt::detail
