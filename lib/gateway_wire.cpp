#include "gateway_wire.hpp"

#include "json_text.hpp"
#include "text_hash.hpp"
#include "wire.hpp"

#include <boost/asio/ip/address.hpp>

#include <fmt/format.h>
#include <openssl/crypto.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>

namespace evalrt::detail {
namespace {

// ASCII's own: the C library's asks the locale, and is called for each character.
char lower(char c) { return c >= 'A' && c <= 'Z' ? char(c | 0x20) : c; }

bool same_nocase(std::string_view a, std::string_view b) {
    return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(),
                                              [](char x, char y) { return lower(x) == lower(y); });
}

std::string_view trimmed(std::string_view text) {
    while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
    while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
    return text;
}

// The headers that mean something here, all found in one pass.
enum class Name {
    host,
    origin,
    fetch_site,
    content_length,
    transfer_encoding,
    content_type,
    content_encoding,
    authorization,
    x_api_key,
    user_agent,
    connection,
    expect,
    anthropic_version,
    idempotency_key,
    read_timeout,
    client_name
};
constexpr std::size_t names = std::size_t(Name::client_name) + 1;
constexpr std::string_view name_of[names] = {"host",
                                             "origin",
                                             "sec-fetch-site",
                                             "content-length",
                                             "transfer-encoding",
                                             "content-type",
                                             "content-encoding",
                                             "authorization",
                                             "x-api-key",
                                             "user-agent",
                                             "connection",
                                             "expect",
                                             "anthropic-version",
                                             "idempotency-key",
                                             "x-stainless-read-timeout",
                                             "x-evalrt-client"};

class Fields {
public:
    explicit Fields(const std::vector<Field>& list) : list_(list) {
        for (const auto& it : list)
            for (std::size_t i = 0; i < names; ++i)
                if (same_nocase(it.name, name_of[i]) && count_[i]++ == 0) value_[i] = it.value;
    }

    unsigned count(Name name) const { return count_[std::size_t(name)]; }
    // The first of that name; empty: there is none.
    std::string_view operator[](Name name) const { return value_[std::size_t(name)]; }
    template <class Good>
    bool each(Name name, Good good) const {
        return count(name) == 0 || std::all_of(list_.begin(), list_.end(), [&](const Field& it) {
                   return !same_nocase(it.name, name_of[std::size_t(name)]) || good(it.value);
               });
    }
    // Whether a list of words has this one.
    bool has_word(Name name, std::string_view word) const {
        if (count(name) == 0) return false;
        for (const auto& it : list_) {
            if (!same_nocase(it.name, name_of[std::size_t(name)])) continue;
            for (auto rest = it.value; !rest.empty();) {
                const auto comma = std::min(rest.find(','), rest.size());
                if (same_nocase(trimmed(rest.substr(0, comma)), word)) return true;
                rest.remove_prefix(std::min(comma + 1, rest.size()));
            }
        }
        return false;
    }

private:
    const std::vector<Field>& list_;
    std::array<std::string_view, names> value_;
    std::array<unsigned, names> count_{};
};

// A name of this machine for itself, with this port.
bool names_us(std::string_view host, std::uint16_t port) {
    const auto colon = host.starts_with('[') ? host.find(':', std::min(host.find(']'), host.size()))
                                             : host.find(':');
    const auto name = host.substr(0, colon);
    if (name != "127.0.0.1" && name != "[::1]" && !same_nocase(name, "localhost")) return false;
    const auto number = colon == host.npos ? std::string_view("80") : host.substr(colon + 1);
    return number == std::to_string(port);
}

Refusal check_framing(const RequestHead& head, const Fields& fields, const Door& door, Call& call) {
    using enum Name;
    const auto lengths = fields.count(content_length);
    const auto codings = fields.count(transfer_encoding);
    if (lengths > 1) return {400, "the request has more than one Content-Length", {}};
    if (codings > 1 || (codings > 0 && lengths > 0))
        return {400, "the request says twice how long it is", {}};
    if (codings > 0 && head.old) return {400, "HTTP/1.0 has no Transfer-Encoding", {}};
    call.chunked = codings > 0;
    if (codings > 0 && !same_nocase(fields[transfer_encoding], "chunked"))
        return {501, "the only known Transfer-Encoding is chunked", {}};
    if (lengths == 0) return {};
    const auto text = fields[content_length];
    const auto [end, ec] = std::from_chars(text.data(), text.data() + text.size(), call.length);
    if (text.empty() || end != text.data() + text.size() ||
        (ec != std::errc() && ec != std::errc::result_out_of_range))
        return {400, "the Content-Length is no number", {}};
    if (ec != std::errc() || call.length > door.body_limit)
        return {413, fmt::format("the body is over the limit of {} bytes", door.body_limit), {}};
    return {};
}

struct Served {
    std::string_view path, method, endpoint;
    Place place;
};
constexpr Served served[] = {
    {"/chat/completions", "POST", "/v1/chat/completions", Place::chat},
    {"/completions", "POST", "/v1/completions", Place::completions},
    {"/messages", "POST", "/v1/messages", Place::messages},
    {"/models", "GET", "/v1/models", Place::models},
    {"/health", "GET", "/health", Place::health},
    {"/metrics", "GET", "/metrics", Place::metrics},
    // Which servers have beside /v1, or below it, wherever a client looks for them.
    {"/tokenize", "POST", "/tokenize", Place::plain},
    {"/detokenize", "POST", "/detokenize", Place::plain},
    {"/tokenizer_info", "GET", "/tokenizer_info", Place::plain},
    {"/messages/count_tokens", "POST", "/v1/messages/count_tokens", Place::plain},
};

constexpr std::string_view passed_on[] = {"GET", "POST", "PUT", "PATCH", "DELETE"};

// A path that a server might take for one outside of where it is to look.
bool climbs(std::string_view path) {
    std::string plain;
    for (std::size_t i = 0; i < path.size(); ++i) {
        if (path.substr(i, 3) == "%2e" || path.substr(i, 3) == "%2E") {
            plain += '.';
            i += 2;
        } else if (path.substr(i, 3) == "%2f" || path.substr(i, 3) == "%2F" || path[i] == '\\' ||
                   path.substr(i, 3) == "%5c" || path.substr(i, 3) == "%5C") {
            plain += '/';
            i += path[i] == '\\' ? 0 : 2;
        } else {
            plain += path[i];
        }
    }
    plain += '/';
    return plain.find("/../") != plain.npos || plain.find("//") != plain.npos ||
           plain.find("/./") != plain.npos;
}

std::string error_type(bool anthropic, int status) {
    switch (status) {
    case 401: return "authentication_error";
    case 403: return "permission_error";
    case 404: return "not_found_error";
    case 429: return "rate_limit_error";
    default: break;
    }
    if (!anthropic) return status >= 500 ? "server_error" : "invalid_request_error";
    if (status == 413) return "request_too_large";
    if (status == 503 || status == 529) return "overloaded_error";
    if (status == 504) return "timeout_error";
    return status >= 500 ? "api_error" : "invalid_request_error";
}

std::string_view reason_of(int status) {
    static constexpr std::pair<int, std::string_view> reasons[] = {
        {200, "OK"},
        {400, "Bad Request"},
        {401, "Unauthorized"},
        {403, "Forbidden"},
        {404, "Not Found"},
        {405, "Method Not Allowed"},
        {408, "Request Timeout"},
        {411, "Length Required"},
        {413, "Content Too Large"},
        {415, "Unsupported Media Type"},
        {417, "Expectation Failed"},
        {421, "Misdirected Request"},
        {429, "Too Many Requests"},
        {431, "Request Header Fields Too Large"},
        {500, "Internal Server Error"},
        {501, "Not Implemented"},
        {502, "Bad Gateway"},
        {503, "Service Unavailable"},
        {504, "Gateway Timeout"},
    };
    for (const auto& [number, words] : reasons)
        if (number == status) return words;
    return "Error";
}

// JSON that stands on several lines would end an event.
std::string event(std::string_view type, std::string_view data) {
    std::string out;
    out.reserve(type.size() + data.size() + 20);
    if (!type.empty()) out.append("event: ").append(type).append("\n");
    const auto begin = out.append("data: ").size();
    out += data;
    for (const char end : {'\n', '\r'})
        for (auto at = out.find(end, begin); at != out.npos; at = out.find(end, at)) out[at] = ' ';
    out += "\n\n";
    return out;
}

bool is_string(std::string_view json) { return json.starts_with('"'); }

// Nothing: it has it.
std::optional<std::string> with_usage(Place place, std::string_view body, const Usage& usage) {
    thread_local std::vector<Member> list, has; // their memory serves all answers
    members(body, list);
    const auto told = member(list, "usage");
    const auto given = told && told->starts_with('{') ? *told : std::string_view("{}");
    members(given, has);
    std::vector<Change> counts;
    const auto add = [&](std::string_view key, std::int64_t number) {
        const auto value = member(has, key);
        if (!value || *value == "null") counts.push_back({key, std::to_string(number)});
    };
    const auto prompt = usage.prompt_tokens.value_or(0), made = usage.completion_tokens.value_or(0);
    if (place == Place::messages) {
        add("input_tokens", prompt - usage.cached_tokens.value_or(0));
        add("output_tokens", made);
    } else {
        add("prompt_tokens", prompt);
        add("completion_tokens", made);
        add("total_tokens", prompt + made);
    }
    if (counts.empty()) return {};
    const Change change{"usage", with_changes(given, has, counts)};
    return with_changes(body, list, {&change, 1});
}

// Arguments that are text; a call without any has none of their bytes, or the object itself.
std::string with_text_arguments(std::string_view call) {
    const auto list = members(call);
    const auto function = member(list, "function");
    if (!function || !function->starts_with('{')) return std::string(call);
    const auto given = member(members(*function), "arguments");
    std::string text = "\"{}\"";
    if (given && is_string(*given)) {
        if (*given != "\"\"") return std::string(call);
    } else if (given && *given != "null") {
        text = json_string(*given);
    }
    const Change arguments{"arguments", text};
    const Change change{"function", with_changes(*function, {&arguments, 1})};
    return with_changes(call, {&change, 1});
}

// Nothing: it has none.
std::optional<std::string> with_whole_calls(std::string_view body) {
    if (body.find("\"tool_calls\"") == body.npos) return {};
    std::string choices;
    for (const auto choice : elements(member(members(body), "choices").value_or("[]"))) {
        choices += choices.empty() ? "[" : ", ";
        const auto message = member(members(choice), "message");
        const auto calls = message && message->starts_with('{')
                               ? member(members(*message), "tool_calls")
                               : std::nullopt;
        if (!calls || !calls->starts_with('[')) {
            choices += choice;
            continue;
        }
        std::string all;
        for (const auto call : elements(*calls))
            all += (all.empty() ? "[" : ", ") + with_text_arguments(call);
        Change change{"tool_calls", {}};
        if (!all.empty()) change.value = all + "]";
        const Change whole{"message", with_changes(*message, {&change, 1})};
        choices += with_changes(choice, {&whole, 1});
    }
    const Change change{"choices", choices.empty() ? "[]" : choices + "]"};
    return with_changes(body, {&change, 1});
}

class OpenAiWriter final : public EventWriter {
public:
    OpenAiWriter(bool chat, const Asked& asked, std::string id, std::int64_t created)
        : EventWriter(false),
          chat_(chat),
          usage_chunk_(asked.usage_chunk),
          id_(json_string((chat ? "chatcmpl-" : "cmpl-") + id)),
          created_(std::to_string(created)),
          model_(json_string(asked.model)) {}

    bool text_first() const override { return true; }

    std::string text(std::string_view piece) override {
        std::string out;
        if (!std::exchange(begun_, true) && chat_)
            out = chunk("0", R"("delta": {"role": "assistant", "content": ""})");
        sent_ += piece;
        return out + piece_chunk("0", json_string(piece));
    }

    std::optional<std::string> end(const Response& response) override {
        if (!response.text.starts_with(sent_)) return {};
        std::string changed;
        const auto body = whole_answer(chat_ ? Place::chat : Place::completions, response, changed);
        const auto list = members(body);
        std::string more; // what else is said of the answer as a whole
        for (const auto& it : list) {
            if (it.key == "choices" || it.key == "usage" || it.key == "object") continue;
            auto* own = it.key == "id"        ? &id_
                        : it.key == "created" ? &created_
                        : it.key == "model"   ? &model_
                                              : nullptr;
            if (!own)
                more.append(", ").append(it.text);
            else if (!begun_ && it.value != "null")
                *own = it.value;
        }
        std::string out;
        std::size_t place = 0;
        for (const auto choice : elements(member(list, "choices").value_or("[]"))) {
            const bool goes_on = begun_ && place == 0;
            const auto rest = std::string_view(response.text).substr(sent_.size());
            out += whole_choice(members(choice), place++, goes_on, rest, more);
        }
        if (usage_chunk_)
            out += event({}, head() + R"("choices": [], "usage": )" +
                                 std::string(member(list, "usage").value_or("{}")) + "}");
        return out + "data: [DONE]\n\n";
    }

private:
    std::string whole_choice(const std::vector<Member>& choice, std::size_t place, bool goes_on,
                             std::string_view rest, std::string_view more) const {
        const std::string index(member(choice, "index").value_or(std::to_string(place)));
        std::string out, last; // members of the choice that are no text
        for (const auto& it : choice)
            if (it.key != "index" && it.key != "finish_reason" && it.key != "message" &&
                it.key != "text")
                last.append(it.text).append(", ");
        if (!chat_) {
            const auto text = member(choice, "text").value_or("\"\"");
            if (goes_on && !rest.empty()) out += piece_chunk(index, json_string(rest));
            if (!goes_on && text != "\"\"") out += piece_chunk(index, text);
            last = R"("text": "", )" + last;
        } else {
            std::string delta, calls;
            const auto add = [&](std::string_view text) {
                delta.append(delta.empty() ? "" : ", ").append(text);
            };
            for (const auto& it : members(member(choice, "message").value_or("{}"))) {
                if (it.key == "tool_calls" && it.value.starts_with('['))
                    calls = it.value;
                else if (!goes_on || (it.key != "content" && it.key != "role"))
                    add(it.text);
                else if (it.key == "content" && !rest.empty())
                    add("\"content\": " + json_string(rest));
            }
            if (!delta.empty()) out += chunk(index, "\"delta\": {" + delta + "}");
            std::size_t number = 0;
            for (const auto call : elements(calls)) {
                const Change change{"index", std::to_string(number++)};
                out += chunk(index, "\"delta\": {\"tool_calls\": [" +
                                        with_changes(call, {&change, 1}) + "]}");
            }
            last = R"("delta": {}, )" + last;
        }
        last.resize(last.size() - 2);
        return out + chunk(index, last, member(choice, "finish_reason").value_or("null"), more);
    }

    std::string head() const {
        return fmt::format(R"({{"id": {}, "object": "{}", "created": {}, "model": {}, )", id_,
                           chat_ ? "chat.completion.chunk" : "text_completion", created_, model_);
    }

    std::string chunk(std::string_view index, std::string_view what,
                      std::string_view finish_reason = "null", std::string_view more = {}) const {
        return event({},
                     fmt::format(R"({}"choices": [{{"index": {}, {}, "finish_reason": {}}}]{}}})",
                                 head(), index, what, finish_reason, more));
    }

    std::string piece_chunk(std::string_view index, std::string_view text) const {
        return chunk(index, chat_ ? fmt::format(R"("delta": {{"content": {}}})", text)
                                  : fmt::format("\"text\": {}", text));
    }

    const bool chat_, usage_chunk_;
    std::string id_, created_, model_; // JSON text
    std::string sent_;
    bool begun_ = false;
};

class AnthropicWriter final : public EventWriter {
public:
    AnthropicWriter(const Asked& asked, std::string id)
        : EventWriter(true), id_("msg_" + std::move(id)), model_(asked.model) {}

    // Blocks have an order, and nobody knows yet what is to stand before the text.
    bool text_first() const override { return false; }

    std::string text(std::string_view piece) override {
        std::string out;
        if (sent_.empty()) {
            out = start(fmt::format(
                R"({{"id": {}, "type": "message", "role": "assistant", "model": {}, "content": [], )"
                R"("stop_reason": null, "stop_sequence": null, )"
                R"("usage": {{"input_tokens": 0, "output_tokens": 0}}}})",
                json_string(id_), json_string(model_)));
            out += open(text_block);
        }
        sent_ += piece;
        return out + text_delta(piece);
    }

    std::optional<std::string> end(const Response& response) override {
        if (!response.text.starts_with(sent_)) return {};
        std::string changed;
        const auto body = whole_answer(Place::messages, response, changed);
        const auto list = members(body);
        const std::string usage(member(list, "usage").value_or("{}"));
        std::string out;
        if (sent_.empty()) {
            const Change none{"output_tokens", "0"};
            const Change changes[] = {{"content", "[]"},
                                      {"stop_reason", "null"},
                                      {"stop_sequence", "null"},
                                      {"usage", with_changes(usage, {&none, 1})}};
            out = start(with_changes(body, changes));
        }
        std::string_view left = sent_; // of which the blocks are still to come
        for (const auto block : elements(member(list, "content").value_or("[]")))
            out += whole_block(block, left);
        out += shut();
        std::string delta = "\"stop_reason\": ";
        delta += member(list, "stop_reason").value_or("null");
        delta.append(", \"stop_sequence\": ")
            .append(member(list, "stop_sequence").value_or("null"));
        out += event("message_delta",
                     fmt::format(R"({{"type": "message_delta", "delta": {{{}}}, "usage": {}}})",
                                 delta, usage));
        return out + event("message_stop", R"({"type": "message_stop"})");
    }

private:
    static constexpr std::string_view text_block = R"({"type": "text", "text": ""})";

    static std::string start(std::string_view message) {
        return event("message_start",
                     fmt::format(R"({{"type": "message_start", "message": {}}})", message));
    }
    std::string open(std::string_view block) {
        auto out = shut();
        open_ = true;
        return out + event("content_block_start",
                           fmt::format(R"({{"type": "content_block_start", "index": {}, )"
                                       R"("content_block": {}}})",
                                       index_, block));
    }
    std::string shut() {
        if (!std::exchange(open_, false)) return {};
        return event("content_block_stop",
                     fmt::format(R"({{"type": "content_block_stop", "index": {}}})", index_++));
    }
    std::string delta(std::string_view type, std::string_view key, std::string_view json) const {
        return event("content_block_delta",
                     fmt::format(R"({{"type": "content_block_delta", "index": {}, )"
                                 R"("delta": {{"type": "{}", "{}": {}}}}})",
                                 index_, type, key, json));
    }
    std::string text_delta(std::string_view text) const {
        return delta("text_delta", "text", json_string(text));
    }

    std::string whole_block(std::string_view block, std::string_view& left) {
        const auto list = members(block);
        const auto type = from_json_string(member(list, "type").value_or(""));
        std::string out;
        if (type == "text") {
            const auto text = from_json_string(member(list, "text").value_or("\"\""));
            const auto sent = std::min(left.size(), text.size());
            left.remove_prefix(sent);
            const auto citations = elements(member(list, "citations").value_or("null"));
            if (sent == 0 || (!open_ && (sent < text.size() || !citations.empty())))
                out += open(text_block);
            for (const auto it : citations) out += delta("citations_delta", "citation", it);
            if (sent < text.size()) out += text_delta(std::string_view(text).substr(sent));
            return out;
        }
        if (type == "tool_use") {
            const Change empty{"input", "{}"};
            out += open(with_changes(block, {&empty, 1}));
            return out + delta("input_json_delta", "partial_json",
                               json_string(member(list, "input").value_or("{}")));
        }
        if (type == "thinking") {
            const Change changes[] = {{"thinking", "\"\""}, {"signature", "\"\""}};
            out += open(with_changes(block, changes));
            const auto signature = member(list, "signature").value_or("\"\"");
            out += delta("thinking_delta", "thinking", member(list, "thinking").value_or("\"\""));
            return out + delta("signature_delta", "signature", signature);
        }
        return open(block);
    }

    const std::string id_, model_;
    std::string sent_;
    unsigned index_ = 0;
    bool open_ = false;
};

} // namespace

bool is_loopback(std::string_view host) {
    if (same_nocase(host, "localhost")) return true;
    error_code ec;
    const auto address = asio::ip::make_address(std::string(host), ec);
    return !ec && address.is_loopback();
}

bool same_secret(std::string_view a, std::string_view b) {
    return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

Call read_call(const RequestHead& head, const Door& door) {
    using enum Name;
    Call call;
    const Fields fields(head.fields);
    const auto path = head.target.substr(0, head.target.find('?'));
    call.anthropic = path.find("/messages") != path.npos || fields.count(anthropic_version) > 0;
    const auto refuse = [&](int status, std::string message) {
        call.refusal = {status, std::move(message), {}};
        call.keep_alive = false;
        return call;
    };

    constexpr auto web_page = "requests of web pages are not taken";
    // A page of another site may reach us by a name of its own that leads to this address.
    if (fields.count(host) != 1) return refuse(400, "the request needs exactly one Host header");
    if (door.loopback && !names_us(fields[host], door.port))
        return refuse(421, fmt::format("the Host header names another server than this one: use "
                                       "127.0.0.1:{}",
                                       door.port));
    if (const auto count = fields.count(origin); count > 0) {
        auto page = fields[origin];
        const bool plain = page.starts_with("http://");
        if (plain) page.remove_prefix(7);
        const bool own =
            door.loopback ? names_us(page, door.port) : same_nocase(page, fields[host]);
        if (count > 1 || !plain || !own) return refuse(403, web_page);
    }
    // Which browsers send where they leave Origin out, as for an image.
    if (const auto site = fields[fetch_site];
        fields.count(fetch_site) > 1 || site == "cross-site" || site == "same-site")
        return refuse(403, web_page);
    if (!head.target.starts_with('/'))
        return refuse(400, "the request's target is no path of this server");
    if (head.fields.size() > door.field_limit)
        return refuse(431, fmt::format("the request has more than {} headers", door.field_limit));
    if (auto framing = check_framing(head, fields, door, call); framing.status)
        return refuse(framing.status, std::move(framing.message));
    for (const auto field : {authorization, x_api_key})
        if (fields.count(field) > 1)
            return refuse(400, fmt::format("the request has more than one {} header",
                                           name_of[std::size_t(field)]));
    if (!door.token.empty()) {
        auto given = fields[authorization];
        const bool scheme = same_nocase(given.substr(0, 7), "bearer ");
        given = scheme ? trimmed(given.substr(7)) : std::string_view();
        const bool bearer = same_secret(given, door.token);
        const bool key = same_secret(fields[x_api_key], door.token);
        if (!bearer && !key)
            return refuse(401, "this server wants its token, as a bearer token or as x-api-key");
    }

    // A HEAD is a GET whose answer's body is not sent.
    const auto method = head.method == "HEAD" ? std::string_view("GET") : head.method;
    auto name = path;
    if (name.starts_with("/v1/")) name.remove_prefix(3);
    const auto* known = std::find_if(std::begin(served), std::end(served),
                                     [&](const Served& it) { return it.path == name; });
    const bool has_body = call.chunked || call.length > 0;
    if (known == std::end(served)) {
        if (std::find(std::begin(passed_on), std::end(passed_on), method) == std::end(passed_on)) {
            call.allow = "GET, HEAD, POST, PUT, PATCH, DELETE";
            return refuse(405, "this method is not passed on");
        }
        if (climbs(path.substr(0, path.size() - path.ends_with('/'))))
            return refuse(400, "a path with . or .. or an empty name in it is not passed on");
        call.place = Place::plain;
        call.endpoint = path;
    } else {
        if (method != known->method) {
            call.allow = known->method;
            return refuse(405, fmt::format("{} takes {}", known->path, known->method));
        }
        call.place = known->place;
        call.endpoint = known->endpoint;
    }
    if (call.place == Place::plain) {
        call.endpoint += head.target.substr(path.size());
        call.method = method;
    }
    call.post = method != "GET" && (method != "DELETE" || has_body);
    if (!call.post && has_body) return refuse(400, "a GET has no body");
    if (call.post) {
        const auto json = [](std::string_view type) {
            return same_nocase(trimmed(type.substr(0, type.find(';'))), "application/json");
        };
        if (fields.count(content_type) == 0 || !fields.each(content_type, json))
            return refuse(415, "the Content-Type has to be application/json");
        const auto plain = [](std::string_view coding) {
            return coding.empty() || same_nocase(coding, "identity");
        };
        if (!fields.each(content_encoding, plain))
            return refuse(415, "a compressed body is not taken");
        if (fields.count(content_length) + fields.count(transfer_encoding) == 0)
            return refuse(411, "the request does not say how long its body is");
    }
    if (fields.count(expect) > 0) {
        if (!same_nocase(fields[expect], "100-continue"))
            return refuse(417, "the only known Expect is 100-continue");
        call.expects_continue = has_body && !head.old;
    }
    call.keep_alive = !head.old && !fields.has_word(connection, "close");
    call.idempotency_key = fields[idempotency_key];
    for (const auto field : {authorization, x_api_key, user_agent, client_name})
        call.client = std::uint32_t(call.client * 31 + text_hash(fields[field]));
    const auto seconds = fields[read_timeout];
    const double limit = seconds.empty() ? 0 : std::strtod(std::string(seconds).c_str(), nullptr);
    if (limit > 0 && limit < 1e6)
        call.patience = std::chrono::milliseconds(std::int64_t(limit * 1e3));
    return call;
}

Asked read_asked(std::string body) {
    Asked asked;
    thread_local std::vector<Member> list; // its memory serves all requests
    if (body.starts_with("\xEF\xBB\xBF")) {
        asked.error = "the request's body begins with a byte order mark, which no JSON does";
        return asked;
    }
    if (auto error = object_error(body, &list)) {
        asked.error = "the request's body is " + *error;
        return asked;
    }
    std::vector<Change> changes;
    if (const auto stream = member(list, "stream");
        stream && (*stream == "true" || *stream == "false" || *stream == "null")) {
        asked.stream = *stream == "true";
        changes.push_back({"stream", {}});
    }
    if (const auto options = member(list, "stream_options")) {
        if (options->starts_with('{'))
            asked.usage_chunk = member(members(*options), "include_usage") == "true";
        changes.push_back({"stream_options", {}});
    }
    asked.model = from_json_string(member(list, "model").value_or(""));
    asked.body = changes.empty() ? std::move(body) : with_changes(body, list, changes);
    return asked;
}

Refusal refusal_of(const Response& response) {
    const auto errc = response.outcome.value_or(Errc::malformed);
    Refusal refusal;
    refusal.code = errc == Errc::context_too_long ? "context_length_exceeded" : name(errc);
    refusal.message =
        response.detail.empty() ? make_error_code(errc).message() : repaired_utf8(response.detail);
    refusal.status = response.status;
    if (refusal.status >= 400 && refusal.status < 600) return refusal;
    switch (errc) {
    case Errc::rejected: refusal.status = response.status == 0 ? 400 : 502; break;
    case Errc::context_too_long: refusal.status = 400; break;
    case Errc::auth: refusal.status = 401; break;
    case Errc::rate_limited: refusal.status = 429; break;
    case Errc::overloaded:
    case Errc::cancelled: refusal.status = 503; break;
    case Errc::timed_out: refusal.status = 504; break;
    case Errc::poison: refusal.status = 500; break;
    default: refusal.status = 502;
    }
    return refusal;
}

std::string error_body(bool anthropic, const Refusal& refusal) {
    const auto type = error_type(anthropic, refusal.status);
    const auto message = json_string(refusal.message);
    if (anthropic)
        return fmt::format(R"({{"type": "error", "error": {{"type": "{}", "message": {}}}}})", type,
                           message);
    return fmt::format(R"({{"error": {{"message": {}, "type": "{}", "param": null, "code": {}}}}})",
                       message, type, refusal.code.empty() ? "null" : json_string(refusal.code));
}

std::string_view whole_answer(Place place, const Response& response, std::string& changed) {
    std::string_view body = response.body;
    const auto take = [&](std::optional<std::string> other) {
        if (other) body = changed = std::move(*other);
    };
    take(with_usage(place, body, response.usage));
    if (place == Place::chat) take(with_whole_calls(body));
    return body;
}

std::string EventWriter::failed(const Refusal& refusal) const {
    return event(anthropic_ ? "error" : "", error_body(anthropic_, refusal));
}

std::unique_ptr<EventWriter> make_event_writer(Place place, const Asked& asked, std::string id,
                                               std::int64_t created) {
    if (place == Place::messages) return std::make_unique<AnthropicWriter>(asked, std::move(id));
    return std::make_unique<OpenAiWriter>(place == Place::chat, asked, std::move(id), created);
}

std::string models_body(std::string_view model) {
    const auto id = json_string(model);
    const auto entry = fmt::format(
        R"({{"id": {}, "object": "model", "created": 0, "owned_by": "evalrt", "type": "model", )"
        R"("display_name": {}, "created_at": "1970-01-01T00:00:00Z"}})",
        id, id);
    return fmt::format(
        R"({{"object": "list", "data": [{}], "has_more": false, "first_id": {}, "last_id": {}}})",
        model.empty() ? "" : entry, model.empty() ? "null" : id, model.empty() ? "null" : id);
}

std::string metrics_text(const GatewayStats& stats, std::optional<unsigned> in_flight) {
    std::string out;
    const auto add = [&](std::string_view name, std::string_view type, auto value,
                         std::string_view help) {
        out += fmt::format("# HELP evalrt_{} {}\n# TYPE evalrt_{} {}\nevalrt_{} {}\n", name, help,
                           name, type, name, value);
    };
    add("requests_total", "counter", stats.requests, "Requests to the model.");
    add("answered_total", "counter", stats.answered, "Requests that were answered.");
    out += "# HELP evalrt_failed_total Requests that failed, by class.\n"
           "# TYPE evalrt_failed_total counter\n";
    for (std::size_t i = 0; i < all_errc.size(); ++i)
        out += fmt::format("evalrt_failed_total{{class=\"{}\"}} {}\n", name(all_errc[i]),
                           stats.failed[i]);
    add("joined_total", "counter", stats.joined,
        "Requests that came again while the same one ran, and got its answer.");
    add("continued_total", "counter", stats.continued,
        "Requests that go on with the conversation of an earlier one.");
    add("refused_total", "counter", stats.refused,
        "HTTP requests that were refused before the model was asked.");
    add("connections", "gauge", stats.connections, "Open connections of clients.");
    if (in_flight) {
        add("in_flight", "gauge", *in_flight, "Requests at the model server.");
        add("queued", "gauge", stats.open - std::min(stats.open, *in_flight),
            "Requests that wait for their turn.");
    } else {
        add("open", "gauge", stats.open, "Requests that have not ended.");
    }
    add("prompt_tokens_total", "counter", stats.prompt_tokens, "As the server counts them.");
    add("cached_tokens_total", "counter", stats.cached_tokens,
        "Of the prompt tokens, those from the server's prefix cache.");
    add("completion_tokens_total", "counter", stats.completion_tokens,
        "As the server counts them.");
    return out;
}

std::string answer_head(int status, std::string_view type, std::optional<std::size_t> length,
                        bool keep_alive, bool old, std::string_view more) {
    std::string out;
    out.reserve(160 + type.size() + more.size());
    out.append("HTTP/1.1 ").append(std::to_string(status)).append(" ").append(reason_of(status));
    out.append("\r\nContent-Type: ").append(type).append("\r\n");
    if (length)
        out.append("Content-Length: ").append(std::to_string(*length)).append("\r\n");
    else if (!old)
        out += "Transfer-Encoding: chunked\r\nCache-Control: no-cache\r\n";
    if (status >= 400) out += "x-should-retry: false\r\n";
    if (!keep_alive) out += "Connection: close\r\n";
    out.append(more).append("\r\n");
    return out;
}

void append_chunk(std::string& out, std::string_view bytes) {
    char size[16];
    const auto end = std::to_chars(size, size + sizeof size, bytes.size(), 16).ptr;
    out.append(size, end).append("\r\n").append(bytes).append("\r\n");
}

} // namespace evalrt::detail
