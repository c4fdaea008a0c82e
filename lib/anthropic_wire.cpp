// The Anthropic wire: /v1/messages, streamed and not, of the API itself and of servers that say
// they are compatible with it.
#include "dom.hpp"

#include <fmt/format.h>

#include <map>

namespace evalrt::detail {
namespace {

void read_usage(dom::element answer, bool input_is_total, Usage& usage) {
    const auto reported = answer["usage"];
    const auto input = integer_of(reported["input_tokens"]);
    const auto read = integer_of(reported["cache_read_input_tokens"]);
    const auto written = integer_of(reported["cache_creation_input_tokens"]);
    usage.prompt_tokens = input;
    if (input && !input_is_total)
        usage.prompt_tokens = *input + read.value_or(0) + written.value_or(0);
    usage.cached_tokens = read;
    usage.completion_tokens = integer_of(reported["output_tokens"]);
}

// A block of the answer; what comes in pieces is put together.
struct Block {
    std::string start; // as content_block_start had it (JSON text)
    std::string type;
    std::string text, thinking, signature, input;
    std::vector<std::string> citations; // JSON text
};

class AnthropicReader final : public AnswerReader {
public:
    explicit AnthropicReader(bool input_is_total) : input_is_total_(input_is_total) {}

    Piece event(const SseEvent& event) override {
        Piece piece;
        auto data = trimmed_json(event.data);
        if (data.starts_with("[DONE]")) { // some servers cannot do without it
            piece.last = true;
            return piece;
        }
        if (data.empty() || error_ || broken_) return piece;
        dom::element object;
        if (!parser_.parse(data, object)) {
            if (event.type == "error")
                error_ = ServerError{shortened(data), {}};
            else
                broken_ = fmt::format("has an event that is not JSON: {}", shortened(data));
            return piece;
        }
        auto type = string_of(object["type"]);
        if (type.empty()) type = event.type;
        if (type == "error" || event.type == "error") {
            error_ = error_of(object);
            if (!error_) error_ = read_error(object);
        } else if (type == "message_start") {
            message_ = member(members(data), "message").value_or("{}");
            usage_ = member(members(message_), "usage").value_or("");
        } else if (type == "content_block_start") {
            start_block(object, data, piece);
        } else if (type == "content_block_delta") {
            read_delta(object, data, piece);
        } else if (type == "message_delta") {
            end_message(data);
        } else if (type == "message_stop") {
            piece.last = true;
        } // ping, content_block_stop, and what is not known
        return piece;
    }

    void finish(Response& response) override {
        dom::element message;
        std::string body = put_together();
        std::string_view json = body;
        if (!message_.empty() && parser_.parse(json, message)) {
            read_usage(message, input_is_total_, response.usage);
            response.request_id = string_of(message["id"]);
            response.model = string_of(message["model"]);
        }
        if (error_) return fail(response, *error_);
        if (broken_) return fail(response, Errc::malformed, fmt::format("the stream {}", *broken_));
        if (message_.empty())
            return fail(response, Errc::truncated, "the stream ended before any answer");
        response.finish_reason = string_of(message["stop_reason"]);
        if (response.finish_reason.empty())
            return fail(response, Errc::truncated,
                        "the stream ended before the answer's stop_reason");
        response.text = std::move(all_text_);
        response.body = std::move(body);
    }

    void whole(std::string body, Response& response) override {
        auto json = trimmed_json(body);
        if (json.empty()) return fail(response, Errc::malformed, "the server sent an empty answer");
        dom::element answer;
        if (!parser_.parse(json, answer)) return fail(response, Errc::malformed, not_json(json));
        read_usage(answer, input_is_total_, response.usage);
        if (const auto error = error_of(answer)) return fail(response, *error);
        response.request_id = string_of(answer["id"]);
        response.model = string_of(answer["model"]);
        dom::array content;
        if (answer["content"].get(content))
            return fail(response, Errc::malformed,
                        fmt::format("the answer has no content: {}", shortened(json)));
        for (dom::element block : content)
            if (string_of(block["type"]) == "text") response.text += string_of(block["text"]);
        response.finish_reason = string_of(answer["stop_reason"]);
        if (json.data() != body.data()) body = std::string(json);
        while (!body.empty() && (body.back() == '\n' || body.back() == '\r')) body.pop_back();
        response.body = std::move(body);
    }

private:
    // Where a server gives no index, its blocks come one after the other.
    std::int64_t index_of(dom::element event) const {
        const auto last = blocks_.empty() ? 0 : blocks_.rbegin()->first;
        return integer_of(event["index"]).value_or(last);
    }

    void start_block(dom::element event, std::string_view data, Piece& piece) {
        const auto next = blocks_.empty() ? 0 : blocks_.rbegin()->first + 1;
        auto& block = blocks_[integer_of(event["index"]).value_or(next)];
        const auto start = event["content_block"];
        block = {};
        block.start = member(members(data), "content_block").value_or("{}");
        block.type = string_of(start["type"]);
        block.text = string_of(start["text"]);
        block.thinking = string_of(start["thinking"]);
        if (block.type == "text") hear(block.text, piece);
        piece.content |= (block.type != "text" && block.type != "thinking") ||
                         !block.text.empty() || !block.thinking.empty();
    }

    void hear(std::string_view text, Piece& piece) {
        piece_ = text;
        all_text_ += text;
        piece.text = piece_;
        piece.content |= !text.empty();
    }

    void read_delta(dom::element event, std::string_view data, Piece& piece) {
        const auto delta = event["delta"];
        const auto type = string_of(delta["type"]);
        const auto index = index_of(event);
        if (!blocks_.count(index)) {
            if (type == "text_delta" || type == "thinking_delta") { // it says what it belongs to
                blocks_[index].type = type.substr(0, type.find('_'));
            } else {
                broken_ = fmt::format("goes on with a block {} that has not begun", index);
                return;
            }
        }
        auto& block = blocks_[index];
        if (type == "text_delta") {
            const auto text = string_of(delta["text"]);
            block.text += text;
            hear(text, piece);
        } else if (type == "thinking_delta") {
            const auto text = string_of(delta["thinking"]);
            block.thinking += text;
            piece.content |= !text.empty();
        } else if (type == "signature_delta") {
            block.signature = string_of(delta["signature"]);
        } else if (type == "input_json_delta") {
            block.input += string_of(delta["partial_json"]);
            piece.content = true;
        } else if (type == "citations_delta") {
            const auto text = member(members(data), "delta").value_or("{}");
            block.citations.emplace_back(member(members(text), "citation").value_or("null"));
        }
    }

    // Its counts are totals: what it has replaces what message_start had.
    void end_message(std::string_view data) {
        const auto list = members(data);
        for (const auto& it : members(member(list, "delta").value_or("{}")))
            if (it.value != "null" || !set_.count(std::string(it.key)))
                set_[std::string(it.key)] = it.value;
        std::vector<Change> counts;
        for (const auto& it : members(member(list, "usage").value_or("{}")))
            if (it.value != "null") counts.push_back({it.key, std::string(it.value)});
        if (!counts.empty()) usage_ = with_changes(usage_.starts_with('{') ? usage_ : "{}", counts);
    }

    std::string put_together() {
        if (message_.empty()) return {};
        std::string content = "[";
        for (auto& [index, block] : blocks_) {
            if (content.size() > 1) content += ", ";
            content += whole_block(block);
        }
        std::vector<Change> changes{{"content", content + "]"}};
        for (const auto& [key, value] : set_) changes.push_back({key, value});
        if (!usage_.empty()) changes.push_back({"usage", usage_});
        return with_changes(message_, changes);
    }

    std::string whole_block(Block& block) {
        std::vector<Change> changes;
        std::string start = block.start;
        if (start.empty()) start = fmt::format(R"({{"type": "{}"}})", block.type);
        if (block.type == "text") changes.push_back({"text", json_string(block.text)});
        if (block.type == "thinking") changes.push_back({"thinking", json_string(block.thinking)});
        if (!block.signature.empty())
            changes.push_back({"signature", json_string(block.signature)});
        if (!block.input.empty()) changes.push_back({"input", whole_input(block.input)});
        if (!block.citations.empty()) {
            std::string all = "[";
            for (const auto& it : block.citations) all += (all.size() > 1 ? ", " : "") + it;
            changes.push_back({"citations", all + "]"});
        }
        return changes.empty() ? start : with_changes(start, changes);
    }

    // The answer may have come to its limit within it; then what is whole counts.
    std::string whole_input(std::string input) {
        if (check_object(input)) input = repaired_json(input);
        if (!check_object(input)) return input;
        const auto reason = set_.find("stop_reason");
        if (reason != set_.end() && reason->second != "\"tool_use\"")
            if (auto closed = closed_json(input); !check_object(closed)) return closed;
        if (!broken_)
            broken_ =
                fmt::format("has a tool's input that is not a JSON object: {}", shortened(input));
        return "{}";
    }

    const bool input_is_total_;
    ObjectParser parser_;
    std::string message_;                    // of message_start (JSON text)
    std::string usage_;                      // the totals so far (JSON text)
    std::map<std::string, std::string> set_; // members that message_delta has set (JSON text)
    std::map<std::int64_t, Block> blocks_;
    std::string piece_, all_text_;
    std::optional<ServerError> error_;
    std::optional<std::string> broken_;
};

} // namespace

namespace {

// A block whose end may be marked.
struct Place {
    PrefixEnd end;
    std::string_view text; // a JSON object, or a string that is the whole content
    bool preamble;         // of the tools or the system prompt
};

// In the order in which the API renders them, which is that of read_prompt().
class Places {
public:
    explicit Places(std::string_view body) {
        const auto parts = members(body);
        if (const auto tools = member(parts, "tools"); tools && *tools != "null") {
            for (const auto tool : elements(*tools)) add(*tools, tool, true);
            close(*tools);
        }
        if (const auto system = member(parts, "system"); system && *system != "null") {
            content(*system, *system, true);
            close(*system);
        }
        for (const auto message : elements(member(parts, "messages").value_or("[]"))) {
            const auto it = members(message);
            const auto role = from_json_string(member(it, "role").value_or("\"\""));
            if (role == "tool") { // becomes one block
                add(message, message, false);
            } else {
                content(message, member(it, "content").value_or("null"),
                        role == "system" || role == "developer");
                for (const auto call : elements(member(it, "tool_calls").value_or("[]")))
                    add(message, call, false);
            }
            close(message);
        }
    }

    std::vector<Place> list;

private:
    void content(std::string_view segment, std::string_view value, bool preamble) {
        if (value.starts_with('"') && value != "\"\"") add(segment, value, preamble);
        for (const auto block : elements(value)) {
            const auto it = members(block);
            const auto type = from_json_string(member(it, "type").value_or("\"\""));
            if (type == "thinking" || type == "redacted_thinking" || it.empty() ||
                member(it, "text") == "\"\"")
                continue; // the API takes no mark there
            add(segment, block, preamble);
        }
    }

    void add(std::string_view segment, std::string_view text, bool preamble) {
        const auto end = std::size_t(text.data() + text.size() - segment.data());
        if (end <= done_) return; // the members stand in no usual order
        advance(segment, end);
        list.push_back({{before_ + end, hash_}, text, preamble});
    }

    void close(std::string_view segment) {
        advance(segment, segment.size());
        before_ += segment.size();
        done_ = 0;
    }

    void advance(std::string_view segment, std::size_t to) {
        const auto part = std::hash<std::string_view>()(segment.substr(done_, to - done_));
        hash_ = (hash_ ^ part) * 0x9e3779b97f4a7c15u;
        hash_ ^= hash_ >> 32;
        done_ = to;
    }

    std::size_t before_ = 0; // bytes of the segments before
    std::size_t done_ = 0;   // of this one that are in the hash
    std::uint64_t hash_ = 1;
};

} // namespace

std::vector<PrefixEnd> prefix_ends(std::string_view body) {
    std::vector<PrefixEnd> ends;
    if (object_error(body)) return ends;
    for (const auto& it : Places(body).list) ends.push_back(it.end);
    return ends;
}

std::string with_cache_marks(std::string_view body, std::size_t shared_bytes, std::size_t least) {
    // In a string its quotes would be escaped.
    if (shared_bytes < least || body.find("\"cache_control\"") != body.npos)
        return std::string(body);
    const Places places(body);
    const Place *last = nullptr, *preamble = nullptr;
    for (const auto& it : places.list) {
        if (it.end.bytes < least || it.end.bytes > shared_bytes) continue;
        last = &it;
        if (it.preamble) preamble = &it;
    }
    std::string out;
    const char* done = body.data();
    for (const Place* it : {preamble, last}) {
        if (!it || (it == last && last == preamble && done != body.data())) continue;
        const auto text = it->text;
        constexpr std::string_view mark = R"("cache_control": {"type": "ephemeral"}})";
        if (text.starts_with('"')) {
            out.append(done, text.data());
            out.append(R"([{"type": "text", "text": )").append(text).append(", ");
            out.append(mark).append("]");
        } else {
            out.append(done, text.data() + text.size() - 1).append(", ").append(mark);
        }
        done = text.data() + text.size();
    }
    return out.append(done, body.data() + body.size());
}

std::unique_ptr<AnswerReader> make_anthropic_reader(bool input_is_total) {
    return std::make_unique<AnthropicReader>(input_is_total);
}

} // namespace evalrt::detail
