#include "json_text.hpp"

#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>

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

    std::string_view string() { // p is at the opening quote
        const char* begin = p++;
        while (p != end && *p != '"') p += *p == '\\' && p + 1 != end ? 2 : 1;
        if (p != end) ++p;
        return {begin, std::size_t(p - begin)};
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

} // namespace

std::vector<Member> members(std::string_view object) {
    std::vector<Member> found;
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
    const auto list = members(object);
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

} // namespace evalrt::detail
