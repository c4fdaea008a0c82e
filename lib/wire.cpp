// What the wires share: error objects, and what a planner needs to know of a body.
#include "dom.hpp"
#include "translate.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cmath>

namespace evalrt::detail {
namespace {

std::string text_or_json(simdjson::simdjson_result<dom::element> value) {
    dom::element element;
    if (value.get(element) || element.is_null()) return {};
    std::string_view text;
    return element.get(text) ? simdjson::minify(element) : std::string(text);
}

bool contains_nocase(std::string_view text, std::string_view word) {
    return std::search(text.begin(), text.end(), word.begin(), word.end(), [](char a, char b) {
               return std::tolower(static_cast<unsigned char>(a)) == b;
           }) != text.end();
}

} // namespace

std::string routing_key(const Request& request, const BackendRow& row) {
    if (!row.routing_key) return {};
    if (!request.session.empty())
        return fmt::format("evalrt-{:016x}", std::hash<std::string_view>()(request.session));
    if (request.shared_bytes < row.shared_tokens * std::size_t(4)) return {};
    for (const auto& end : prefix_ends(request.body))
        if (end.bytes == request.shared_bytes)
            return fmt::format("evalrt-{:016x}-{}", end.hash, request.server);
    return {};
}

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

// The statuses that Anthropic's API gives its types of error, for those inside a stream.
static int status_of(std::string_view type) {
    static constexpr std::pair<std::string_view, int> statuses[] = {
        {"invalid_request_error", 400}, {"authentication_error", 401},
        {"billing_error", 402},         {"permission_error", 403},
        {"not_found_error", 404},       {"request_too_large", 413},
        {"rate_limit_error", 429},      {"api_error", 500},
        {"timeout_error", 504},         {"overloaded_error", 529}};
    for (const auto& [name, status] : statuses)
        if (type == name) return status;
    return 0;
}

ServerError read_error(dom::element object) {
    ServerError found;
    found.message = text_or_json(object["message"]);
    if (found.message.empty()) found.message = text_or_json(object["detail"]);
    if (found.message.empty()) found.message = simdjson::minify(object);
    const auto code = text_or_json(object["code"]);
    const auto type = text_or_json(object["type"]);
    found.type = type + " " + code;
    // Where Anthropic says that a spending limit is reached, which no waiting ends.
    if (const auto more = text_or_json(object["details"]["error_code"]); !more.empty())
        found.type += " " + more;
    int status = status_of(type);
    std::from_chars(code.data(), code.data() + code.size(), status);
    if (status >= 400 && status < 600) found.status = status;
    return found;
}

// {"error": {"message", "type", "code"}}, {"error": "words"}, SGLang's {"object": "error",
// "message"}, FastAPI's {"detail"}.
std::optional<ServerError> error_of(dom::element answer) {
    const auto [found, object, detail] = pick(answer, {"error", "object", "detail"});
    dom::element error;
    if (!found.get(error) && !error.is_null()) {
        if (error.is_object()) return read_error(error);
        return ServerError{text_or_json(found), {}};
    }
    if (string_of(object) == "error") return read_error(answer);
    if (!detail.get(error) && !error.is_null() && answer["choices"].error())
        return read_error(answer);
    return {};
}

std::string shortened(std::string_view text, std::size_t limit) {
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

static std::string words_of(const ServerError& error) {
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

std::string not_json(std::string_view body) {
    return looks_like_html(body)
               ? fmt::format("this is a web page, not an answer; does the URL point at a model "
                             "server? {}",
                             shortened(body, 120))
               : fmt::format("the answer is not JSON: {}", shortened(body));
}

void fail(Response& response, Errc errc, std::string detail) {
    response.outcome = errc;
    response.detail = std::move(detail);
}

void fail(Response& response, const ServerError& error) {
    fail(response, classify(response.status, error), words_of(error));
    // The status line had said 200; what came later decides whether it is worth another attempt.
    if (error.status) response.status = error.status;
}

Errc classify(int status, const ServerError& error) {
    // llama-server, OpenAI and vLLM, SGLang and LM Studio, oMLX, Anthropic; Gemini and Together;
    // OpenAI's 429 for a request above the limit of a whole minute, which no waiting ends
    static constexpr std::array too_long{std::string_view("exceed_context_size"),
                                         std::string_view("context_length_exceeded"),
                                         std::string_view("context length"),
                                         std::string_view("context size"),
                                         std::string_view("prompt too long"),
                                         std::string_view("prompt is too long"),
                                         std::string_view("context window"),
                                         std::string_view("maximum allowed length"),
                                         std::string_view("maximum number of tokens allowed"),
                                         std::string_view("request too large for")};
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
    if (!object) return;
    response.request_id = string_of(answer["request_id"]);
    response.body = std::string(json);
}

std::optional<std::string> check_object(std::string_view text) {
    if (text.empty()) return "not JSON (it is empty)";
    thread_local const auto parser = make_parser();
    dom::element element;
    if (const auto error = parser->parse(text.data(), text.size()).get(element))
        return fmt::format("not JSON ({})", simdjson::error_message(error));
    if (!element.is_object()) return "not a JSON object";
    return {};
}

Route route(std::string_view endpoint, const BackendRow& row) {
    const bool chat = endpoint.ends_with("/chat/completions");
    const bool messages = endpoint.ends_with("/messages");
    Route it{endpoint, row.wire, false, {}};
    if (messages && row.messages_endpoint) {
        it.wire = Wire::anthropic;
    } else if (messages && row.wire == Wire::openai) {
        it.endpoint = "/v1/chat/completions";
        it.translated = true;
    } else if (chat && row.wire == Wire::anthropic) {
        it.endpoint = "/v1/messages";
        it.translated = true;
    } else if (!messages && row.wire == Wire::anthropic) {
        it.error = fmt::format("{} does not exist on the anthropic wire: ask /v1/messages or "
                               "/v1/chat/completions",
                               shortened(endpoint, 80));
    }
    return it;
}

Prepared prepare(const Request& request, const BackendRow& row, const Route& route,
                 std::string_view model, bool override_model, unsigned max_tokens) {
    Prepared prepared;
    prepared.error = route.error;
    if (!prepared.error.empty()) return prepared;
    const bool marks = route.wire == Wire::anthropic && row.cache_marks && request.shared_bytes > 0;
    if (!marks && !route.translated) return prepare_openai(request, row, model, override_model);
    if (auto error = object_error(request.body)) prepared.error = "the request's body is " + *error;
    if (!prepared.error.empty()) return prepared;
    Request out = request;
    if (marks)
        out.body = with_cache_marks(request.body, request.shared_bytes,
                                    row.shared_tokens * std::size_t(4));
    Translated translated;
    if (route.translated) {
        translated = route.wire == Wire::anthropic ? chat_to_messages(out.body, max_tokens)
                                                   : messages_to_chat(out.body);
        if (!translated.error.empty()) {
            prepared.error = fmt::format("{} (translated for {}): {}", request.endpoint,
                                         route.endpoint, translated.error);
            return prepared;
        }
        out.endpoint = route.endpoint;
        out.body = Text(std::move(translated.body));
    }
    prepared = prepare_openai(out, row, model, override_model);
    prepared.notes.insert(prepared.notes.begin(), translated.notes.begin(), translated.notes.end());
    return prepared;
}

namespace {

// What it has read, in the words of the other wire.
class TranslatingReader final : public AnswerReader {
public:
    TranslatingReader(std::unique_ptr<AnswerReader> inner, Wire wire)
        : inner_(std::move(inner)), wire_(wire) {}

    Piece event(const SseEvent& event) override { return inner_->event(event); }
    void finish(Response& response) override {
        inner_->finish(response);
        translate(response);
    }
    void whole(std::string body, Response& response) override {
        inner_->whole(std::move(body), response);
        translate(response);
    }

private:
    void translate(Response& response) const {
        if (response.outcome) return;
        if (wire_ == Wire::openai) return answer_to_messages(response);
        const auto now = std::chrono::system_clock::now().time_since_epoch();
        answer_to_chat(response, std::chrono::duration_cast<std::chrono::seconds>(now).count());
    }

    std::unique_ptr<AnswerReader> inner_;
    const Wire wire_;
};

} // namespace

std::unique_ptr<AnswerReader> make_reader(const Route& route, const BackendRow& row) {
    auto reader = route.wire == Wire::anthropic
                      ? make_anthropic_reader(row.input_is_total)
                      : make_openai_reader(route.endpoint.ends_with("/chat/completions"));
    if (!route.translated) return reader;
    return std::make_unique<TranslatingReader>(std::move(reader), route.wire);
}

std::optional<std::string> check_endpoint(std::string_view endpoint) {
    if (std::find(request_endpoints.begin(), request_endpoints.end(), endpoint) !=
        request_endpoints.end())
        return {};
    return fmt::format("\"{}\"; known are {}", endpoint, fmt::join(request_endpoints, ", "));
}

bool streamed(std::span<const Member> body, const BackendRow& row) {
    const auto stream = member(body, "stream").value_or("null");
    if (stream != "null") return stream == "true";
    const auto logprobs = member(body, "logprobs").value_or("null");
    return row.streams && (logprobs == "null" || logprobs == "false");
}

Prompt read_prompt(const Request& request, const BackendRow& row) {
    Prompt parts;
    parts.session = request.session;
    parts.turn = request.turn;
    parts.pause = request.pause;
    parts.client = request.client;
    parts.conversation = request.conversation;
    thread_local std::vector<Member> list; // its memory serves all requests
    thread_local std::vector<std::string_view> messages;
    messages.clear();
    members(request.body, list, "messages", &messages);
    const auto model = member(list, "model").value_or("");
    parts.domain.reserve(request.endpoint.size() + model.size());
    parts.domain.append(request.endpoint).append(model);
    for (const auto key : {"max_tokens", "max_completion_tokens"})
        if (const auto value = member(list, key); value && *value != "null")
            parts.output_tokens = std::strtoll(std::string(*value).c_str(), nullptr, 10);
    if (has_processors(list)) parts.unusual |= 1;
    if (const auto seed = member(list, "seed"); seed && *seed != "null") {
        const auto temperature = member(list, "temperature");
        if (!row.drop_seed_at_zero ||
            (temperature && std::strtod(std::string(*temperature).c_str(), nullptr) != 0))
            parts.unusual |= 2;
    }
    if (!row.processors_mix) parts.kind |= parts.unusual & 1;
    if (row.drop_seed_at_zero) parts.kind |= parts.unusual & 2; // each is served alone
    parts.streamed = streamed(list, row);
    const auto tools = member(list, "tools");
    const auto add = [&](std::optional<std::string_view> text) {
        if (text && *text != "null") parts.segments.push_back(*text);
    };
    if (row.tools_before_system) add(tools);
    add(member(list, "system")); // Anthropic
    add(member(list, "prompt"));
    // The first message has to be looked at where something is to come after a system prompt.
    bool first = !row.tools_before_system || row.padding_tokens > 0;
    parts.segments.reserve(parts.segments.size() + messages.size() + 1);
    for (const auto message : messages) {
        if (std::exchange(first, false)) {
            const auto role = from_json_string(first_member(message, "role").value_or(""));
            const bool system = role == "system" || role == "developer";
            if (system) add(message);
            if (!row.tools_before_system) add(tools);
            if (role == "system") parts.front = parts.bytes();
            if (!system) add(message);
        } else {
            add(message);
        }
    }
    // mlx_lm.server looks for the end of the system prompt only where a user has spoken last.
    if (parts.front > 0 && row.padding_tokens > 0 &&
        from_json_string(first_member(messages.back(), "role").value_or("")) != "user")
        parts.front = 0;
    return parts;
}

} // namespace evalrt::detail
