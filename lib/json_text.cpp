#include "json_text.hpp"

#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>

namespace evalrt::detail {
namespace {

bool space(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

// Walks over valid JSON text.
struct Walker {
    const char* p;
    const char* end;

    void skip_space() {
        while (p != end && space(*p)) ++p;
    }

    // The first c in [from, to); `to`: none. Texts are long: a byte at a time costs more than all
    // else that is done with a body.
    static const char* find(const char* from, char c, const char* to) {
        const void* found = from == to ? nullptr : std::memchr(from, c, std::size_t(to - from));
        return found ? static_cast<const char*>(found) : to;
    }

    std::string_view string() { // p is at the opening quote
        const char* const begin = p++;
        for (const char* quote = p;;) {
            if (quote <= p) quote = find(p, '"', end);
            const char* const slash = find(p, '\\', quote);
            if (slash == quote) {
                p = quote == end ? end : quote + 1;
                return {begin, std::size_t(p - begin)};
            }
            p = end - slash > 2 ? slash + 2 : end;
        }
    }

    std::string_view value() {
        const char* begin = p;
        if (p == end) return {};
        if (*p == '"') return string();
        if (*p != '{' && *p != '[') {
            while (p != end && !space(*p) && *p != ',' && *p != '}' && *p != ']') ++p;
            return {begin, std::size_t(p - begin)};
        }
        std::size_t depth = 0;
        while (p != end) {
            if (*p == '"') {
                string();
                continue;
            }
            if (*p == '{' || *p == '[') ++depth;
            if (*p == '}' || *p == ']') --depth;
            ++p;
            if (depth == 0) break;
        }
        return {begin, std::size_t(p - begin)};
    }

    // To the next item of an object or array whose opening bracket is behind p; false: none.
    bool next() {
        skip_space();
        if (p != end && *p == ',') ++p;
        skip_space();
        return p != end && *p != '}' && *p != ']';
    }

    bool enter(char bracket) {
        skip_space();
        if (p == end || *p != bracket) return false;
        ++p;
        return true;
    }
};

// The takers below write one item to `out`, repaired, and return the place behind it.

const char* take_character(const char* p, const char* end, std::string& out) {
    const auto byte = [](const char* at) { return static_cast<unsigned char>(*at); };
    const unsigned lead = byte(p);
    unsigned low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    unsigned high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    bool good = lead < 0x80 || (lead >= 0xC2 && lead <= 0xF4);
    const char* const begin = p++;
    for (int more = !good || lead < 0x80 ? 0
                    : lead < 0xE0        ? 1
                    : lead < 0xF0        ? 2
                                         : 3;
         more > 0; --more, ++p) {
        good = p != end && byte(p) >= low && byte(p) <= high;
        if (!good) break;
        low = 0x80, high = 0xBF;
    }
    good ? out.append(begin, p) : out.append("\xEF\xBF\xBD");
    return p;
}

const char* take_escape(const char* p, const char* end, std::string& out) {
    const auto unit = [&](const char* at) { // 0: no \uXXXX stands there
        unsigned value = 0;
        if (end - at >= 6 && at[0] == '\\' && at[1] == 'u' &&
            std::from_chars(at + 2, at + 6, value, 16).ptr == at + 6)
            return value;
        return 0u;
    };
    const auto first = unit(p);
    if (first < 0xD800 || first > 0xDFFF) {
        const std::size_t size = p + 1 != end && p[1] >= ' ' && p[1] < 0x7f ? 2 : 1;
        out.append(p, size);
        return p + size;
    }
    const auto second = first < 0xDC00 ? unit(p + 6) : 0;
    if (second >= 0xDC00 && second <= 0xDFFF) {
        out.append(p, 12);
        return p + 12;
    }
    out += "\\ufffd";
    return p + 6;
}

bool of_number(char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '+' ||
           c == '-' || c == '.';
}

const char* take_number(const char* p, const char* end, std::string& out) {
    const char* const begin = p;
    while (p != end && of_number(*p)) ++p;
    const std::string word(begin, p);
    char* stop;
    const double value = std::strtod(word.c_str(), &stop); // knows NaN and Infinity, too
    if (*stop == 0 && !std::isfinite(value)) {
        out += "null";
    } else {
        out += word;
        const bool integer = word.find_first_not_of("-0123456789") == word.npos;
        if (integer && std::abs(value) > 9.2e18) out += "e0"; // simdjson takes no such integers
    }
    return p;
}

} // namespace

std::vector<Member> members(std::string_view object) {
    std::vector<Member> found;
    found.reserve(16);
    Walker walk{object.data(), object.data() + object.size()};
    if (!walk.enter('{')) return found;
    while (walk.next()) {
        const char* begin = walk.p;
        if (*begin != '"') break;
        auto key = walk.string();
        key = key.substr(1, key.size() - 2);
        walk.skip_space();
        if (walk.p == walk.end) break;
        ++walk.p; // the colon
        walk.skip_space();
        const auto value = walk.value();
        found.push_back({key, value, {begin, std::size_t(walk.p - begin)}});
    }
    return found;
}

std::vector<std::string_view> elements(std::string_view array) {
    std::vector<std::string_view> found;
    Walker walk{array.data(), array.data() + array.size()};
    if (!walk.enter('[')) return found;
    while (walk.next()) found.push_back(walk.value());
    return found;
}

std::optional<std::string_view> member(std::span<const Member> object, std::string_view key) {
    for (const auto& it : object)
        if (it.key == key) return it.value;
    return {};
}

std::string with_changes(std::string_view object, std::span<const Change> changes) {
    return with_changes(object, members(object), changes);
}

std::string with_changes(std::string_view object, std::span<const Member> list,
                         std::span<const Change> changes) {
    std::vector<bool> done(changes.size());
    std::string out;
    out.reserve(object.size() + 128);
    const char* const open = object.data() + object.find('{') + 1;
    const char* behind = open; // the end of the member before
    bool any = false;
    const auto separator = [&](const char* begin) {
        // The bytes between two members as they were; a comma only where one goes before.
        if (any == (behind != open)) return out.append(behind, begin);
        return any ? out.append(", ") : out;
    };
    out.append(object.data(), open);
    for (const auto& it : list) {
        const Change* change = nullptr;
        for (std::size_t i = 0; i < changes.size(); ++i)
            if (changes[i].key == it.key) change = &changes[i], done[i] = true;
        if (!change || change->value) {
            separator(it.text.data());
            if (change) {
                out.append(it.text.data(), it.value.data()).append(*change->value);
            } else {
                out.append(it.text);
            }
            any = true;
        }
        behind = it.text.data() + it.text.size();
    }
    for (std::size_t i = 0; i < changes.size(); ++i) {
        if (done[i] || !changes[i].value) continue;
        if (any) out += ", ";
        out.append(1, '"').append(changes[i].key).append("\": ").append(*changes[i].value);
        any = true;
    }
    return out.append(behind, object.data() + object.size());
}

std::string json_string(std::string_view text) {
    return boost::json::serialize(boost::json::string_view(text.data(), text.size()));
}

std::string from_json_string(std::string_view text) {
    boost::system::error_code ec;
    const auto value = boost::json::parse({text.data(), text.size()}, ec);
    return !ec && value.is_string() ? std::string(value.get_string()) : std::string();
}

std::string repaired_utf8(std::string_view text) {
    std::string out;
    out.reserve(text.size());
    const char* p = text.data();
    const char* const end = p + text.size();
    while (p != end) p = take_character(p, end, out);
    return out;
}

std::string repaired_json(std::string_view text) {
    std::string out;
    out.reserve(text.size() + 64);
    const char* p = text.data();
    const char* const end = p + text.size();
    bool in_string = false;
    while (p != end) {
        if (*p == '"') in_string = !in_string;
        if (in_string && *p == '\\')
            p = take_escape(p, end, out);
        else if (in_string && static_cast<unsigned char>(*p) < ' ')
            out += fmt::format("\\u{:04x}", unsigned(*p++));
        else if (!in_string && of_number(*p))
            p = take_number(p, end, out);
        else
            p = take_character(p, end, out);
    }
    return out;
}

std::string closed_json(std::string_view text) {
    std::string open, closers; // brackets to close: where we are, and at the end of what is whole
    std::size_t whole = 0;
    bool key = false; // a string here is the key of a member
    const auto keep = [&](std::size_t at) { whole = at, closers = open; };
    for (std::size_t i = 0; i < text.size();) {
        const char c = text[i];
        if (c == '{' || c == '[') {
            key = c == '{';
            open += key ? '}' : ']';
            keep(++i);
        } else if (c == '}' || c == ']') {
            if (open.empty()) break;
            open.pop_back();
            keep(++i);
        } else if (c == '"') {
            ++i;
            while (i < text.size() && text[i] != '"') i += text[i] == '\\' ? 2 : 1;
            if (i >= text.size()) break;
            ++i;
            if (!key) keep(i);
        } else if (of_number(c)) { // or true, false, null
            while (i < text.size() && of_number(text[i])) ++i;
            if (i < text.size()) keep(i); // else more of it may be missing
        } else {
            if (c == ':') key = false;
            if (c == ',') key = open.ends_with('}');
            ++i;
        }
    }
    std::string out(text.substr(0, whole));
    return out.append(closers.rbegin(), closers.rend());
}

} // namespace evalrt::detail
