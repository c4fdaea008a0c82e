// JSON as Python's json module reads and writes it, for files and bodies that must be the same to
// the byte. Neither Boost.JSON's value nor simdjson's DOM will do: both turn numbers into 64 bits,
// and both write them in a way of their own.
#ifndef EVALRT_EXAMPLES_PYTHON_JSON_HPP
#define EVALRT_EXAMPLES_PYTHON_JSON_HPP

#include <string>
#include <string_view>
#include <vector>

namespace evalrt::bfcl {

/// A value; a number is the text that Python prints for it.
struct Json {
    enum class Kind { literal, string, array, object };
    struct Member;

    Kind kind = Kind::literal;
    std::string text = "null"; ///< of a literal or a string
    std::vector<Json> items;
    std::vector<Member> members; ///< in order

    static Json literal(std::string text);
    static Json number(double value); ///< repr(float)
    static Json string(std::string text);
    static Json array();
    static Json object();

    bool is_string() const { return kind == Kind::string; }
    bool is_array() const { return kind == Kind::array; }
    bool is_object() const { return kind == Kind::object; }

    /// As in a dict: null if there is none; a repeated key keeps its place.
    Json* find(std::string_view key);
    void set(std::string_view key, Json value);
    void erase(std::string_view key);

    /// These throw Unusable if it is not there, or something else.
    Json& at(std::string_view key);
    std::string& string_at(std::string_view key);
    Json& object_at(std::string_view key);
    std::vector<Json>& array_at(std::string_view key);
};

struct Json::Member {
    std::string key;
    Json value;
};

/// What is wrong with data that Python's side would raise an exception for. Internal to a function
/// that makes a Failure of it.
struct Unusable {
    std::string why;
};

/// Reads one object; throws Unusable.
Json parse(std::string_view text);

/// The arguments of json.dumps.
struct Style {
    bool ascii;
    std::string_view comma, colon;
    int indent = 0;
};

inline constexpr Style line_style{.ascii = true, .comma = ", ", .colon = ": "}; // json.dumps(x)
inline constexpr Style indent_style{.ascii = true, .comma = ",", .colon = ": ", .indent = 4};
inline constexpr Style wire_style{.ascii = false, .comma = ",", .colon = ":"}; // as httpx sends it

std::string dump(const Json& json, const Style& style);

} // namespace evalrt::bfcl

#endif
