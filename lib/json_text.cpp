#include "json_text.hpp"

#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>

#include <fmt/format.h>
#include <simdjson.h>

#include <algorithm>
#include <bit>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

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
        for (const char* from = p;;) {
            const char* const quote = find(from, '"', end);
            const char* slash = quote; // the first of those right before it
            while (slash != p && slash[-1] == '\\') --slash;
            from = quote == end ? end : quote + 1;
            if (quote != end && (quote - slash) % 2 != 0) continue;
            p = from;
            return {begin, std::size_t(p - begin)};
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

#if defined(__SSE2__)
// Texts are long. From p to within 64 bytes of the first quote, backslash or control character, or
// of the end; `ascii` becomes false where something else comes before.
__attribute__((target("avx2"))) const char* skip_plain(const char* p, const char* end,
                                                       bool& ascii) {
    const auto quote = _mm256_set1_epi8('"'), slash = _mm256_set1_epi8('\\'),
               control = _mm256_set1_epi8(0x1f);
    auto high = _mm256_setzero_si256();
    for (; end - p >= 64; p += 64) {
        const auto a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
                   b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32));
        const auto marks = _mm256_or_si256(
            _mm256_or_si256(_mm256_cmpeq_epi8(a, quote), _mm256_cmpeq_epi8(b, quote)),
            _mm256_or_si256(_mm256_cmpeq_epi8(a, slash), _mm256_cmpeq_epi8(b, slash)));
        const auto least = _mm256_min_epu8(a, b);
        const auto found =
            _mm256_or_si256(marks, _mm256_cmpeq_epi8(_mm256_min_epu8(least, control), least));
        if (!_mm256_testz_si256(found, found)) break;
        high = _mm256_or_si256(high, _mm256_or_si256(a, b));
    }
    if (_mm256_movemask_epi8(high) != 0) ascii = false;
    return p;
}

bool has_avx2() {
    static const bool it = __builtin_cpu_supports("avx2");
    return it;
}
#endif

// Calls take(member) until it says false. The elements of the array of that name go to `into`.
template <class Take>
void walk_members(std::string_view object, Take take, std::string_view array = {},
                  std::vector<std::string_view>* into = nullptr) {
    Walker walk{object.data(), object.data() + object.size()};
    if (!walk.enter('{')) return;
    while (walk.next()) {
        const char* begin = walk.p;
        if (*begin != '"') break;
        auto key = walk.string();
        key = key.substr(1, key.size() - 2);
        walk.skip_space();
        if (walk.p == walk.end) break;
        ++walk.p; // the colon
        walk.skip_space();
        const char* const from = walk.p;
        auto* const elements = key == array ? std::exchange(into, nullptr) : nullptr;
        if (elements && walk.enter('[')) {
            while (walk.next()) elements->push_back(walk.value());
            if (walk.p != walk.end) ++walk.p;
        } else {
            walk.value();
        }
        const std::string_view value(from, std::size_t(walk.p - from));
        if (!take(Member{key, value, {begin, std::size_t(walk.p - begin)}})) return;
    }
}

// Reads JSON as RFC 8259 has it. Where it stops, `p` is the place and `wrong` the reason.
struct Reader {
    const char* p;
    const char* end;
    std::vector<Member>* list = nullptr; // for the members of the outermost object
    unsigned depth = 0;
    bool ascii = true;
    std::string_view wrong = {};

    bool no(std::string_view why) {
        wrong = why;
        return false;
    }
    bool cut() { // more has to come
        p = end;
        return no("it ends too early");
    }

    void skip_space() {
        while (p != end && space(*p)) ++p;
    }

    // To the first quote, backslash or control character.
    void skip_text() {
#if defined(__SSE2__)
        const auto quote = _mm_set1_epi8('"'), slash = _mm_set1_epi8('\\'),
                   control = _mm_set1_epi8(0x1f);
        for (const char* const begin = p; end - p >= 16; p += 16) {
            if (p - begin == 32 && has_avx2()) {
                p = skip_plain(p, end, ascii);
                if (end - p < 16) break;
            }
            const auto text = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
            const auto found =
                _mm_or_si128(_mm_or_si128(_mm_cmpeq_epi8(text, quote), _mm_cmpeq_epi8(text, slash)),
                             _mm_cmpeq_epi8(_mm_min_epu8(text, control), text));
            if (_mm_movemask_epi8(text) != 0) ascii = false; // what is behind the place counts too
            if (const auto mask = unsigned(_mm_movemask_epi8(found)); mask != 0) {
                p += std::countr_zero(mask);
                return;
            }
        }
#endif
        for (; p != end; ++p) {
            const auto c = static_cast<unsigned char>(*p);
            if (c == '"' || c == '\\' || c < ' ') return;
            if (c >= 0x80) ascii = false;
        }
    }

    // What an escape stands for is not looked at: half a surrogate pair is JSON.
    bool string() {
        if (p == end) return cut();
        if (*p != '"') return no("there has to be a string in double quotes");
        for (++p;;) {
            skip_text();
            if (p == end) return cut();
            if (*p == '"') return ++p, true;
            if (*p != '\\') return no("a control character in a string");
            if (end - p < 2) return cut();
            constexpr std::string_view none = "an escape that JSON does not have";
            if (p[1] == 0 || !std::strchr("\"\\/bfnrtu", p[1])) return no(none);
            const int size = p[1] == 'u' ? 6 : 2;
            for (int i = 2; i < size; ++i) {
                if (p + i == end) return cut();
                if (!std::isxdigit(static_cast<unsigned char>(p[i]))) return no(none);
            }
            p += size;
        }
    }

    bool digits() {
        const char* const begin = p;
        while (p != end && *p >= '0' && *p <= '9') ++p;
        return p != begin || no("a number that JSON does not have");
    }

    bool number() { // of any size
        if (*p == '-') ++p;
        if (p != end && *p == '0')
            ++p;
        else if (!digits())
            return false;
        if (p != end && *p == '.') {
            ++p;
            if (!digits()) return false;
        }
        if (p == end || (*p != 'e' && *p != 'E')) return true;
        ++p;
        if (p != end && (*p == '+' || *p == '-')) ++p;
        return digits();
    }

    bool word(std::string_view text) {
        if (!std::string_view(p, std::size_t(end - p)).starts_with(text))
            return no("a word that JSON does not have");
        p += text.size();
        return true;
    }

    bool value() {
        if (p == end) return cut();
        switch (*p) {
        case '"': return string();
        case '{': return object();
        case '[': return array();
        case 't': return word("true");
        case 'f': return word("false");
        case 'n': return word("null");
        default: break;
        }
        if (*p == '-' || (*p >= '0' && *p <= '9')) return number();
        return no(std::isalpha(static_cast<unsigned char>(*p)) ? "a word that JSON does not have"
                                                               : "there has to be a value");
    }

    // To the next item, or past the closing bracket: that ends the loop, `more` being false.
    bool separator(char close, bool& more) {
        skip_space();
        if (p == end) return cut();
        if (*p != ',' && *p != close) return no("there has to be a comma or a closing bracket");
        more = *p++ == ',';
        if (more) skip_space();
        return true;
    }

    bool empty(char close) {
        ++p;
        skip_space();
        if (p == end || *p != close) return false;
        ++p;
        return true;
    }

    bool deeper(const char* bracket) { // as deep as the parsers of answers go
        if (++depth <= 255) return true;
        p = bracket;
        return no("more than 255 levels");
    }

    bool object() {
        auto* const members = std::exchange(list, nullptr);
        const char* const bracket = p;
        if (empty('}')) return true;
        if (!deeper(bracket)) return false;
        for (bool more = true; more;) {
            const char* const begin = p;
            if (!string()) return false;
            const std::string_view key(begin + 1, std::size_t(p - begin - 2));
            skip_space();
            if (p == end) return cut();
            if (*p != ':') return no("there has to be a colon");
            ++p;
            skip_space();
            const char* const from = p;
            if (!value()) return false;
            if (members)
                members->push_back(
                    {key, {from, std::size_t(p - from)}, {begin, std::size_t(p - begin)}});
            if (!separator('}', more)) return false;
        }
        --depth;
        return true;
    }

    bool array() {
        const char* const bracket = p;
        if (empty(']')) return true;
        if (!deeper(bracket)) return false;
        for (bool more = true; more;)
            if (!value() || !separator(']', more)) return false;
        --depth;
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

// How many bytes come before the first that is no UTF-8.
std::size_t valid_utf8(std::string_view text) {
    const char* p = text.data();
    const char* const end = p + text.size();
    for (std::string out; p != end; out.clear()) {
        const char* const next = take_character(p, end, out);
        if (out != std::string_view(p, std::size_t(next - p))) break;
        p = next;
    }
    return std::size_t(p - text.data());
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
    members(object, found);
    return found;
}

void members(std::string_view object, std::vector<Member>& found, std::string_view array,
             std::vector<std::string_view>* into) {
    found.clear();
    found.reserve(16);
    walk_members(
        object,
        [&](const Member& it) {
            found.push_back(it);
            return true;
        },
        array, into);
}

std::optional<std::string_view> first_member(std::string_view object, std::string_view key) {
    std::optional<std::string_view> found;
    walk_members(object, [&](const Member& it) {
        if (it.key == key) found = it.value;
        return !found;
    });
    return found;
}

std::optional<std::string> object_error(std::string_view text, std::vector<Member>* list,
                                        std::size_t before) {
    if (list) {
        list->clear();
        list->reserve(16);
    }
    Reader it{text.data(), text.data() + text.size(), list};
    it.skip_space();
    if (it.p == it.end) return "not JSON (it is empty)";
    const bool object = *it.p == '{';
    if (it.value()) {
        if (!object) return "not a JSON object";
        it.skip_space();
        if (it.p != it.end) it.no("something behind its end");
    }
    if (!it.ascii && !simdjson::validate_utf8(text.data(), text.size()))
        if (const char* const at = text.data() + valid_utf8(text); it.wrong.empty() || at < it.p) {
            it.wrong = "bytes that are no UTF-8";
            it.p = at;
        }
    if (it.wrong.empty()) return {};
    const auto at = std::size_t(it.p - text.data()) + 1;
    return fmt::format("not JSON: {}, at byte {}", it.wrong, at - std::min(at - 1, before));
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

namespace {

// Out: keep() what is the object's own, add() the rest.
template <class Out>
void write_changes(std::string_view object, std::span<const Member> list,
                   std::span<const Change> changes, Out& out) {
    const char* const open = object.data() + object.find('{') + 1;
    const char* behind = open; // the end of the member before
    bool any = false;
    const auto keep = [&](const char* from, const char* to) {
        if (from != to) out.keep({from, std::size_t(to - from)});
    };
    keep(object.data(), open);
    for (const auto& it : list) {
        const Change* change = nullptr;
        for (const auto& one : changes)
            if (one.key == it.key) change = &one;
        if (!change || change->value) {
            // The bytes between two members as they were; a comma only where one goes before.
            if (any == (behind != open))
                keep(behind, it.text.data());
            else if (any)
                out.add(", ");
            keep(it.text.data(), change ? it.value.data() : it.text.data() + it.text.size());
            if (change) out.add(*change->value);
            any = true;
        }
        behind = it.text.data() + it.text.size();
    }
    for (const auto& change : changes) {
        if (!change.value || member(list, change.key)) continue;
        out.add(any ? ", \"" : "\"", change.key, "\": ", *change.value);
        any = true;
    }
    keep(behind, object.data() + object.size());
}

struct ToString {
    std::string text;
    void keep(std::string_view part) { text += part; }
    template <class... Parts>
    void add(const Parts&... parts) {
        (text.append(parts), ...);
    }
};

} // namespace

std::string with_changes(std::string_view object, std::span<const Change> changes) {
    return with_changes(object, members(object), changes);
}

std::string with_changes(std::string_view object, std::span<const Member> list,
                         std::span<const Change> changes) {
    ToString out;
    out.text.reserve(object.size() + 128);
    write_changes(object, list, changes, out);
    return std::move(out.text);
}

Patched::Patched(Text object, std::span<const Member> list, std::span<const Change> changes)
    : original_(std::move(object)) {
    parts_.reserve(4);
    added_.reserve(80);
    write_changes(original_, list, changes, *this);
}

void Patched::keep(std::string_view text) {
    const auto at = std::size_t(text.data() - original_.view().data());
    if (!parts_.empty() && !parts_.back().added && parts_.back().at + parts_.back().size == at)
        parts_.back().size += text.size();
    else
        parts_.push_back({false, at, text.size()});
}

template <class... Texts>
void Patched::add(const Texts&... texts) {
    const auto at = added_.size();
    (added_.append(texts), ...);
    if (!parts_.empty() && parts_.back().added)
        parts_.back().size += added_.size() - at;
    else
        parts_.push_back({true, at, added_.size() - at});
}

Text Patched::text() const {
    if (parts_.empty()) return {};
    if (parts_.size() == 1 && part(0).data() == original_.view().data() &&
        part(0).size() == original_.view().size())
        return original_;
    std::string whole;
    whole.reserve(size());
    for (std::size_t i = 0; i < parts_.size(); ++i) whole += part(i);
    return Text(std::move(whole));
}

std::string json_string(std::string_view text) {
    return boost::json::serialize(boost::json::string_view(text.data(), text.size()));
}

std::string from_json_string(std::string_view text) {
    if (text.size() >= 2 && text.front() == '"' && text.back() == '"') {
        const auto plain = text.substr(1, text.size() - 2);
        if (std::all_of(plain.begin(), plain.end(),
                        [](char c) { return c >= ' ' && c < 0x7f && c != '"' && c != '\\'; }))
            return std::string(plain);
    }
    boost::system::error_code ec;
    auto value = boost::json::parse({text.data(), text.size()}, ec);
    if (ec) { // half a surrogate pair
        const auto repaired = repaired_json(text);
        value = boost::json::parse({repaired.data(), repaired.size()}, ec);
    }
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
