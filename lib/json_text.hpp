// Looks into JSON text, and changes it, without touching a byte that need not change.
// The text must be valid where nothing else is said: parse it first.
#ifndef EVALRT_LIB_JSON_TEXT_HPP
#define EVALRT_LIB_JSON_TEXT_HPP

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace evalrt::detail {

struct Member {
    std::string_view key;   ///< between the quotes, as written
    std::string_view value; ///< as written
    std::string_view text;  ///< "key": value
};

std::vector<Member> members(std::string_view object);
std::vector<std::string_view> elements(std::string_view array);

/// The value of a member of `object`; nothing: it has none.
std::optional<std::string_view> member(std::span<const Member> object, std::string_view key);

/// One change to an object's top level.
struct Change {
    std::string_view key;
    std::optional<std::string> value; ///< JSON text; nothing: drop the member
};

/// The object with these changes; all else byte for byte as it was. A new member goes to the end.
std::string with_changes(std::string_view object, std::span<const Change> changes);
/// `list`: its members, where they are known.
std::string with_changes(std::string_view object, std::span<const Member> list,
                         std::span<const Change> changes);

/// A JSON string, quotes included.
std::string json_string(std::string_view text);

/// A JSON string, quotes included, as plain text; empty where it is something else.
std::string from_json_string(std::string_view text);

/// The text with U+FFFD for what is no UTF-8.
std::string repaired_utf8(std::string_view text);

/// For text that does not parse: U+FFFD for lone surrogates and for what is no UTF-8, null for
/// numbers that JSON does not have (NaN, -Infinity, 1e999), an exponent for integers of more than
/// 64 bits, escapes for control characters in strings. All else stays as it is.
std::string repaired_json(std::string_view text);

/// Text that was cut short: what is whole of it, with its brackets closed. It may be anything.
std::string closed_json(std::string_view text);

} // namespace evalrt::detail

#endif
