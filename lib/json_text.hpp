// Looks into JSON text, and changes it, without touching a byte that need not change.
// The text must be valid where nothing else is said: parse it first.
#ifndef EVALRT_LIB_JSON_TEXT_HPP
#define EVALRT_LIB_JSON_TEXT_HPP

#include "evalrt/request.hpp"

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
/// With the elements of the member `array`, where they are asked for.
void members(std::string_view object, std::vector<Member>& list, std::string_view array = {},
             std::vector<std::string_view>* into = nullptr);

/// The value of the first member of that name; nothing: it has none.
std::optional<std::string_view> first_member(std::string_view object, std::string_view key);

/// Text of which nothing is known. Nothing: it is a JSON object, and those are its members. Else
/// what is wrong with it and where: the first byte behind `before`, which its sender has not
/// written, is 1. As RFC 8259 has it: half a surrogate pair in an escape and numbers of any size
/// are JSON, and whether they are understood is for the server to say.
std::optional<std::string> object_error(std::string_view text, std::vector<Member>* list = nullptr,
                                        std::size_t before = 0);

std::vector<std::string_view> elements(std::string_view array);

/// The value of a member of `object`; nothing: it has none.
std::optional<std::string_view> member(std::span<const Member> object, std::string_view key);

/// One change to an object's top level.
struct Change {
    std::string_view key;
    std::optional<std::string> value; ///< JSON text; nothing: drop the member
};

/// Text in parts: of the text that it was made from, which is not copied, and new ones.
class Patched {
public:
    Patched() = default;
    Patched(Text original) : original_(std::move(original)) {
        if (!original_.empty()) parts_.push_back({false, 0, original_.view().size()});
    }
    /// An object with changes to its top level: see with_changes.
    Patched(Text object, std::span<const Member> list, std::span<const Change> changes);

    std::size_t parts() const { return parts_.size(); }
    std::string_view part(std::size_t i) const {
        const auto& it = parts_[i];
        return (it.added ? std::string_view(added_) : original_.view()).substr(it.at, it.size);
    }
    std::size_t size() const {
        std::size_t sum = 0;
        for (const auto& it : parts_) sum += it.size;
        return sum;
    }
    /// In one piece.
    Text text() const;

    // What with_changes() writes to; `text` of keep() is a part of the original.
    void keep(std::string_view text);
    template <class... Texts>
    void add(const Texts&... texts);

private:
    struct Part {
        bool added;
        std::size_t at, size;
    };
    Text original_;
    std::string added_;
    std::vector<Part> parts_;
};

/// The object with these changes; all else byte for byte as it was. A new member goes to the end.
std::string with_changes(std::string_view object, std::span<const Change> changes);
/// `list`: its members, where they are known.
std::string with_changes(std::string_view object, std::span<const Member> list,
                         std::span<const Change> changes);

/// A JSON string, quotes included.
std::string json_string(std::string_view text);

/// A JSON string, quotes included, as plain text, with U+FFFD for lone surrogates; empty where it
/// is something else.
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
