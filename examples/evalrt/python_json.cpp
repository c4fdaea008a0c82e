#include "python_json.hpp"

#include <fmt/format.h>
#include <simdjson.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace evalrt::bfcl {
namespace {

void check(simdjson::error_code error) {
    if (error) throw Unusable{fmt::format("not valid JSON ({})", simdjson::error_message(error))};
}

std::string python_number(simdjson::ondemand::value value, std::string_view token) {
    auto digits = token.substr(token.starts_with('-'));
    if (!digits.empty() && digits.find_first_not_of("0123456789") == digits.npos) {
        if (digits == "0") return "0"; // also for -0
        if (digits.starts_with('0')) throw Unusable{"not valid JSON (a number starts with 0)"};
        return std::string(token); // of any length
    }
    double number = 0;
    if (value.get_double().get(number))
        throw Unusable{fmt::format("not valid JSON ({} is no number, or too large)", token)};
    return Json::number(number).text;
}

Json read(simdjson::ondemand::value value) {
    simdjson::ondemand::json_type type{};
    check(value.type().get(type));
    switch (type) {
    case simdjson::ondemand::json_type::array: {
        auto json = Json::array();
        simdjson::ondemand::array array;
        check(value.get_array().get(array));
        for (auto element : array) {
            simdjson::ondemand::value item;
            check(element.get(item));
            json.items.push_back(read(item));
        }
        return json;
    }
    case simdjson::ondemand::json_type::object: {
        auto json = Json::object();
        simdjson::ondemand::object object;
        check(value.get_object().get(object));
        for (auto field : object) {
            std::string_view key;
            check(field.unescaped_key().get(key));
            simdjson::ondemand::value item;
            check(field.value().get(item));
            json.set(key, read(item));
        }
        return json;
    }
    case simdjson::ondemand::json_type::string: {
        std::string_view text;
        check(value.get_string().get(text));
        return Json::string(std::string(text));
    }
    default: {
        std::string_view token = value.raw_json_token();
        token = token.substr(0, token.find_last_not_of(" \t\r\n") + 1);
        if (token == "true" || token == "false" || token == "null")
            return Json::literal(std::string(token));
        return Json::literal(python_number(value, token));
    }
    }
}

// The code point that starts at text[i]; i moves past it. simdjson has checked the UTF-8.
char32_t next_code_point(std::string_view text, std::size_t& i) {
    auto lead = static_cast<unsigned char>(text[i++]);
    int more = lead < 0xc0 ? 0 : lead < 0xe0 ? 1 : lead < 0xf0 ? 2 : 3;
    char32_t point = more == 0 ? lead : lead & (0x3f >> more);
    for (; more > 0 && i < text.size(); --more)
        point = point << 6 | (static_cast<unsigned char>(text[i++]) & 0x3f);
    return point;
}

void write_string(std::string& out, std::string_view text, bool ascii) {
    auto escape = [&](char32_t unit) {
        fmt::format_to(std::back_inserter(out), "\\u{:04x}", static_cast<unsigned>(unit));
    };
    out += '"';
    for (std::size_t i = 0; i < text.size();) {
        auto c = static_cast<unsigned char>(text[i]);
        if (c >= 0x80 && ascii) {
            auto point = next_code_point(text, i);
            if (point >= 0x10000) escape(0xd800 + ((point - 0x10000) >> 10));
            escape(point < 0x10000 ? point : 0xdc00 + (point & 0x3ff));
            continue;
        }
        ++i;
        switch (c) {
        case '"': out += "\\\""; break;
        case '\\': out += "\\\\"; break;
        case '\b': out += "\\b"; break;
        case '\f': out += "\\f"; break;
        case '\n': out += "\\n"; break;
        case '\r': out += "\\r"; break;
        case '\t': out += "\\t"; break;
        default:
            if (c < 0x20 || (c == 0x7f && ascii))
                escape(c);
            else
                out += static_cast<char>(c);
        }
    }
    out += '"';
}

void write(std::string& out, const Json& json, const Style& style, int depth) {
    auto new_line = [&](int indents) {
        if (style.indent == 0) return;
        out += '\n';
        out.append(static_cast<std::size_t>(style.indent * indents), ' ');
    };
    auto list = [&](char open, char close, const auto& elements, auto write_element) {
        out += open;
        bool first = true;
        for (const auto& element : elements) {
            if (!std::exchange(first, false)) out += style.comma;
            new_line(depth + 1);
            write_element(element);
        }
        if (!first) new_line(depth);
        out += close;
    };
    switch (json.kind) {
    case Json::Kind::literal: out += json.text; break;
    case Json::Kind::string: write_string(out, json.text, style.ascii); break;
    case Json::Kind::array:
        list('[', ']', json.items, [&](const Json& item) { write(out, item, style, depth + 1); });
        break;
    case Json::Kind::object:
        list('{', '}', json.members, [&](const auto& member) {
            write_string(out, member.key, style.ascii);
            out += style.colon;
            write(out, member.value, style, depth + 1);
        });
        break;
    }
}

} // namespace

Json Json::literal(std::string text) { return {Kind::literal, std::move(text), {}, {}}; }

Json Json::number(double value) {
    // fmt's default is repr's rule: the shortest digits that read back, and an exponent outside
    // [1e-4, 1e16). A whole number lacks its ".0".
    auto text = fmt::format("{}", value);
    if (text.find_first_of(".en") == text.npos) text += ".0";
    return literal(std::move(text));
}

Json Json::string(std::string text) { return {Kind::string, std::move(text), {}, {}}; }

Json Json::array() { return {Kind::array, {}, {}, {}}; }

Json Json::object() { return {Kind::object, {}, {}, {}}; }

Json* Json::find(std::string_view key) {
    auto found = std::find_if(members.begin(), members.end(),
                              [&](const auto& member) { return member.key == key; });
    return found == members.end() ? nullptr : &found->value;
}

void Json::set(std::string_view key, Json value) {
    if (auto* old = find(key))
        *old = std::move(value);
    else
        members.push_back({std::string(key), std::move(value)});
}

void Json::erase(std::string_view key) {
    std::erase_if(members, [&](const auto& member) { return member.key == key; });
}

Json& Json::at(std::string_view key) {
    auto* value = find(key);
    if (!value) throw Unusable{fmt::format("there is no \"{}\" where one must be", key)};
    return *value;
}

std::string& Json::string_at(std::string_view key) {
    auto& value = at(key);
    if (!value.is_string()) throw Unusable{fmt::format("\"{}\" is not a string", key)};
    return value.text;
}

Json& Json::object_at(std::string_view key) {
    auto& value = at(key);
    if (!value.is_object()) throw Unusable{fmt::format("\"{}\" is not an object", key)};
    return value;
}

std::vector<Json>& Json::array_at(std::string_view key) {
    auto& value = at(key);
    if (!value.is_array()) throw Unusable{fmt::format("\"{}\" is not an array", key)};
    return value.items;
}

Json parse(std::string_view text) {
    simdjson::padded_string padded(text);
    simdjson::ondemand::parser parser;
    simdjson::ondemand::document document;
    simdjson::ondemand::value root;
    check(parser.iterate(padded).get(document));
    if (document.get_value().get(root)) throw Unusable{"not a JSON object"};
    auto json = read(root);
    if (!json.is_object()) throw Unusable{"not a JSON object"};
    const char* rest = nullptr;
    if (document.current_location().get(rest) != simdjson::OUT_OF_BOUNDS)
        throw Unusable{"not valid JSON (something follows the object)"};
    return json;
}

std::string dump(const Json& json, const Style& style) {
    std::string out;
    write(out, json, style, 0);
    return out;
}

} // namespace evalrt::bfcl
