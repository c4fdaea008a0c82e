#include "json_text.hpp"
#include "wire.hpp"

#include "support/catch.hpp"

#include <boost/json.hpp>

#include <fmt/format.h>

#include <random>

namespace json = boost::json;
using namespace evalrt::detail;

namespace {

std::string changed(std::string_view object, std::vector<Change> changes) {
    return with_changes(object, changes);
}

Change set(std::string_view key, std::string value) { return {key, std::move(value)}; }
Change drop(std::string_view key) { return {key, {}}; }

// Random JSON, written with random white space.
struct Author {
    std::mt19937 random;

    std::size_t below(std::size_t n) { return random() % n; }

    std::string space() {
        static constexpr const char* spaces[] = {"", "", "", " ", "\n", "\t ", "\r\n  "};
        return spaces[below(std::size(spaces))];
    }
    std::string string() {
        static constexpr const char* parts[] = {
            "a",   "{",       "}",    "[",        "]",     ",", ":", "\\\"",    "\\\\",
            "\\n", "\\u00e9", "null", "\xC3\xA9", "model", " ", "/", "\\\\\\\""};
        std::string out = "\"";
        for (auto n = below(5); n > 0; --n) out += parts[below(std::size(parts))];
        return out + '"';
    }
    std::string value(int depth = 0) {
        static constexpr const char* scalars[] = {"null", "true", "false", "0",    "-12.5e+3",
                                                  "1.0",  "[]",   "{}",    "1e-7", "{ }"};
        switch (below(depth > 3 ? 2 : 4)) {
        case 0: return scalars[below(std::size(scalars))];
        case 1: return string();
        case 2: {
            std::string out = "[" + space();
            for (auto n = below(4), i = n; i > 0; --i)
                out += value(depth + 1) + space() + (i > 1 ? "," + space() : "");
            return out + "]";
        }
        default: return object(depth + 1);
        }
    }
    std::string object(int depth) {
        std::string out = "{" + space();
        const auto n = below(5);
        for (std::size_t i = 0; i < n; ++i) {
            const auto name = string();
            // Keys differ, so that what Boost.JSON makes of them is beyond doubt.
            out += name.substr(0, name.size() - 1) + char('0' + i) + '"' + space() + ":" + space() +
                   value(depth) + space() + (i + 1 < n ? "," + space() : "");
        }
        return out + "}";
    }
};

} // namespace

TEST_CASE("members are found as they are written") {
    const auto list = members(R"(  { "a" : 1.50, "b\"}":"x, \\", "c":{"a":[{}, "]"]},"d":[ ] } )");
    REQUIRE(list.size() == 4);
    CHECK(list[0].key == "a");
    CHECK(list[0].value == "1.50");
    CHECK(list[0].text == R"("a" : 1.50)");
    CHECK(list[1].key == R"(b\"})");
    CHECK(list[1].value == R"("x, \\")");
    CHECK(list[2].value == R"({"a":[{}, "]"]})");
    CHECK(list[3].value == "[ ]");
    CHECK(members("{}").empty());
    CHECK(members(" { } ").empty());
    CHECK(members("[1]").empty());
    CHECK(members("null").empty());
    CHECK(members("").empty());
}

TEST_CASE("elements are found as they are written") {
    const auto list = elements(R"([1 , "a,]", [2,[3]],{"b":[]} , null])");
    REQUIRE(list.size() == 5);
    CHECK(list[0] == "1");
    CHECK(list[1] == R"("a,]")");
    CHECK(list[2] == "[2,[3]]");
    CHECK(list[3] == R"({"b":[]})");
    CHECK(list[4] == "null");
    CHECK(elements("[ ]").empty());
    CHECK(elements(R"("[1]")").empty());
    CHECK(elements("").empty());
}

TEST_CASE("the first member of a name is found without a look at what follows") {
    CHECK(first_member(R"({"a": {"b": 1}, "b": [2], "b": 3, what follows)", "b") == "[2]");
    CHECK(first_member(R"({"a": 1})", "b") == std::nullopt);
    CHECK(first_member("[]", "b") == std::nullopt);
}

TEST_CASE("a long string is certain up to any byte, and no further than its first odd one") {
    for (std::size_t size : {0u, 1u, 15u, 31u, 32u, 33u, 95u, 96u, 97u, 200u, 300u}) {
        const auto text = [&](std::string_view odd, std::size_t at) {
            auto inner = std::string(size, 'x');
            inner.insert(at, odd);
            return "{\"a\": \"" + inner + "\", \"b\": 1}";
        };
        std::vector<Member> list;
        for (std::size_t at = 0; at <= size; ++at) {
            CAPTURE(size, at);
            for (const auto good : {"", "\\n", "\\\"", "é"}) {
                const auto object = text(good, at);
                REQUIRE_FALSE(object_error(object, &list));
                REQUIRE(list.size() == 2);
                CHECK(list[0].value == std::string_view(object).substr(6, object.size() - 15));
            }
            for (const auto bad : {"\n", "\x1f", "\xff", "\xc3", "\\x", "\""}) {
                const auto place = fmt::format("at byte {}", 8 + at + (*bad == '"'));
                CHECK(object_error(text(bad, at), &list).value_or("").ends_with(place));
            }
        }
    }
}

TEST_CASE("a member of an object within is none of the object") {
    const auto list = members(R"({"x": {"seed": 1}, "y": "\"seed\": 2"})");
    CHECK_FALSE(member(list, "seed"));
    CHECK(member(list, "x") == R"({"seed": 1})");
}

TEST_CASE("a change leaves the other bytes as they were") {
    const std::string_view object = R"({ "a":1 ,"b" :{"a":2},  "c": "}" })";
    CHECK(changed(object, {}) == object);
    CHECK(changed(object, {set("a", "9")}) == R"({ "a":9 ,"b" :{"a":2},  "c": "}" })");
    CHECK(changed(object, {set("b", "[]")}) == R"({ "a":1 ,"b" :[],  "c": "}" })");
    CHECK(changed(object, {set("c", "null")}) == R"({ "a":1 ,"b" :{"a":2},  "c": null })");
    CHECK(changed(object, {set("d", "4")}) == R"({ "a":1 ,"b" :{"a":2},  "c": "}", "d": 4 })");
    CHECK(changed(object, {drop("d")}) == object);
}

TEST_CASE("a member can be dropped wherever it stands") {
    const std::string_view object = R"({"a":1,"b":2, "c":3})";
    CHECK(changed(object, {drop("a")}) == R"({"b":2, "c":3})");
    CHECK(changed(object, {drop("b")}) == R"({"a":1, "c":3})");
    CHECK(changed(object, {drop("c")}) == R"({"a":1,"b":2})");
    CHECK(changed(object, {drop("a"), drop("b")}) == R"({"c":3})");
    CHECK(changed(object, {drop("b"), drop("c")}) == R"({"a":1})");
    CHECK(changed(object, {drop("a"), drop("c")}) == R"({"b":2})");
    CHECK(changed(object, {drop("a"), drop("b"), drop("c")}) == "{}");
    CHECK(changed(object, {drop("c"), set("d", "4")}) == R"({"a":1,"b":2, "d": 4})");
    CHECK(changed(object, {drop("a"), drop("b"), drop("c"), set("d", "4")}) == R"({"d": 4})");
    CHECK(changed("{}", {set("a", "1"), set("b", "2")}) == R"({"a": 1, "b": 2})");
    CHECK(changed(" { } ", {set("a", "1")}) == R"( {"a": 1 } )");
    CHECK(changed(R"({"a" : 1})", {drop("a")}) == "{}");
}

TEST_CASE("every member of a name is changed, the last change of a name counts") {
    CHECK(changed(R"({"a":1,"b":2,"a":3})", {set("a", "0")}) == R"({"a":0,"b":2,"a":0})");
    CHECK(changed(R"({"a":1,"b":2,"a":3})", {drop("a")}) == R"({"b":2})");
    CHECK(changed(R"({"a":null})", {drop("a"), set("a", "1")}) == R"({"a":1})");
}

TEST_CASE("random objects with random changes are what Boost.JSON makes of them") {
    Author author{std::mt19937(11)};
    for (int i = 0; i < 3000; ++i) {
        const std::string text = author.space() + author.object(0) + author.space();
        CAPTURE(text);
        auto expected = json::parse(text).as_object();
        const auto list = members(text);
        REQUIRE(list.size() == expected.size());
        for (const auto& it : list) {
            REQUIRE(it.text.starts_with("\"" + std::string(it.key) + "\""));
            REQUIRE(it.text.ends_with(it.value));
            REQUIRE(expected.at(from_json_string("\"" + std::string(it.key) + "\"")) ==
                    json::parse({it.value.data(), it.value.size()}));
        }
        std::vector<Change> changes;
        for (const auto& it : list)
            if (author.below(3) == 0)
                changes.push_back(
                    {it.key, author.below(2) ? std::optional(author.value()) : std::nullopt});
        if (author.below(2)) changes.push_back(set("new", author.value()));
        if (author.below(4) == 0) changes.push_back(drop("absent"));
        for (const auto& it : changes) {
            const auto key = from_json_string("\"" + std::string(it.key) + "\"");
            if (it.value)
                expected[key] = json::parse(*it.value);
            else
                expected.erase(key);
        }
        const auto result = changed(text, changes);
        CAPTURE(result);
        REQUIRE(json::parse(result) == json::value(expected));
        // Whoever was not changed stands there byte for byte, in the old order.
        std::vector<std::string_view> before, after;
        const auto unchanged = [&](const Member& it) {
            return std::none_of(changes.begin(), changes.end(),
                                [&](const Change& change) { return change.key == it.key; });
        };
        for (const auto& it : list)
            if (unchanged(it)) before.push_back(it.text);
        const auto list_after = members(result);
        for (const auto& it : list_after)
            if (unchanged(it)) after.push_back(it.text);
        REQUIRE(before == after);
        if (changes.empty()) REQUIRE(result == text);
    }
}

TEST_CASE("random arrays fall into the elements that Boost.JSON finds") {
    Author author{std::mt19937(12)};
    for (int i = 0; i < 1000; ++i) {
        std::string text = "[";
        for (auto n = author.below(5), k = n; k > 0; --k)
            text += author.space() + author.value() + author.space() + (k > 1 ? "," : "");
        text += "]";
        CAPTURE(text);
        json::array found;
        for (const auto it : elements(text)) found.push_back(json::parse({it.data(), it.size()}));
        REQUIRE(json::value(found) == json::parse(text));
    }
}

TEST_CASE("strings end at the first quote that is not escaped, however many are") {
    for (const std::string inner :
         {"", R"(\")", R"(\\)", R"(\\\")", R"(a\"b\"c)", R"(\\\\)", R"(\u0041\\)"}) {
        const auto object =
            R"({"a": ")" + inner + R"(", "b\"": [")" + inner + R"(", "x"], "c": 1})";
        INFO(object);
        const auto list = members(object);
        REQUIRE(list.size() == 3);
        CHECK(list[0].value == '"' + inner + '"');
        CHECK(list[2].value == "1");
        const auto items = elements(list[1].value);
        REQUIRE(items.size() == 2);
        CHECK(items[0] == '"' + inner + '"');
        CHECK(items[1] == "\"x\"");
    }
}

TEST_CASE("a look into what is no JSON ends, within the text") {
    const std::string text = R"( {"a\"\\": [1, {"b": "\u0041"}, "x"], "c": {}, "d": "e"} )";
    for (std::size_t n = 0; n <= text.size(); ++n) {
        const std::vector<char> part(text.begin(), text.begin() + long(n)); // no byte behind it
        for (const std::size_t at : {std::size_t(0), n / 2})
            for (const char c : std::string_view("\"\\{}[],: x"))
                for (const bool change : {false, true}) {
                    auto bytes = part;
                    if (change && at < n) bytes[at] = c;
                    const std::string_view view(bytes.data(), bytes.size());
                    std::size_t sum = 0;
                    for (const auto& it : members(view)) {
                        sum += it.text.size();
                        elements(it.value);
                    }
                    elements(view);
                    CHECK(sum <= view.size());
                }
    }
}

TEST_CASE("text becomes a JSON string and comes back") {
    const std::string text =
        std::string("a\"\\/\b\f\n\r\t\x01\x1f\0z", 14) + "\xC3\xA9\xF0\x9F\x98\x80";
    CHECK(from_json_string(json_string(text)) == text);
    CHECK(json::parse(json_string(text)) == json::value(text));
    CHECK(json_string("") == R"("")");
    CHECK(from_json_string(R"("\u00e9\ud83d\ude00")") == "\xC3\xA9\xF0\x9F\x98\x80");
    CHECK(from_json_string(R"("a\ud83db")") == "a\xEF\xBF\xBD"
                                               "b");
    CHECK(from_json_string("12").empty());
    CHECK(from_json_string("\"").empty());
    CHECK(from_json_string("").empty());
}

TEST_CASE("bytes that are no UTF-8 become U+FFFD") {
    const std::string r = "\xEF\xBF\xBD";
    const std::string good =
        "a\x7f\xC3\xA9\xE4\xBD\xA0\xED\x9F\xBF\xF0\x9F\x98\x80\xF4\x8F\xBF\xBF";
    CHECK(repaired_utf8("") == "");
    CHECK(repaired_utf8(good) == good);
    CHECK(repaired_utf8("a\xff"
                        "b") == "a" + r + "b");
    CHECK(repaired_utf8("\x80") == r);
    CHECK(repaired_utf8("\xC0\x80") == r + r);
    CHECK(repaired_utf8("\xED\xA0\x80") == r + r + r);         // a surrogate
    CHECK(repaired_utf8("\xF4\x90\x80\x80") == r + r + r + r); // above U+10FFFF
    CHECK(repaired_utf8("\xE0\x9F\xBF") == r + r + r);         // too long a form
    CHECK(repaired_utf8("\xE4\xBD"
                        "a") == r + "a"); // cut off: one for all
    CHECK(repaired_utf8("\xF0\x9F\x98") == r);
    CHECK(repaired_utf8("\xE4\xE4\xBD\xA0") == r + "\xE4\xBD\xA0");
}

TEST_CASE("what servers write though it is no JSON is repaired") {
    // Lone surrogates, in whatever company.
    CHECK(repaired_json(R"({"a":"x\ud800y"})") == R"({"a":"x\ufffdy"})");
    CHECK(repaired_json(R"(["\ude00\ud83d","\uD83D"])") == R"(["\ufffd\ufffd","\ufffd"])");
    CHECK(repaired_json(R"(["\ud83d\ud83d\ude00","\ud83dA"])") ==
          R"(["\ufffd\ud83d\ude00","\ufffdA"])");
    CHECK(repaired_json(R"(["\ude00\ude00","\udbff\udfff"])") ==
          R"(["\ufffd\ufffd","\udbff\udfff"])");
    CHECK(repaired_json("[\"\xff\"]") == "[\"\xEF\xBF\xBD\"]");
    // Numbers that are none.
    CHECK(repaired_json(R"([NaN, -Infinity,Infinity ,"NaN"])") == R"([null, null,null ,"NaN"])");
    CHECK(repaired_json(R"({"NaN":nan,"b":-inf})") == R"({"NaN":null,"b":null})");
    CHECK(repaired_json("[1e999,-1e999]") == "[null,null]");
    CHECK(repaired_json("NaN") == "null");
    CHECK(repaired_json("[123456789012345678901,-123456789012345678901,9000000000000000000]") ==
          "[123456789012345678901e0,-123456789012345678901e0,9000000000000000000]");
    // Control characters within a string.
    CHECK(repaired_json("{\"a\":\t\"b\tc\n\"}\n") == "{\"a\":\t\"b\\u0009c\\u000a\"}\n");
    // An escape decides how far a string goes.
    CHECK(repaired_json(R"(["\\", NaN, "\"NaN", "\\ud800"])") ==
          R"(["\\", null, "\"NaN", "\\ud800"])");
}

TEST_CASE("what is JSON, or past repair, stays as it is") {
    Author author{std::mt19937(13)};
    for (int i = 0; i < 1000; ++i) {
        const auto text = author.object(0);
        REQUIRE(repaired_json(text) == text);
    }
    for (const std::string_view text :
         {"", "{", "[\"", "[\"\\", "[\"\\u", "[\"\\ud8", "[\"\\ud83d\\", "[\"\\ud83d\\u12",
          "<html>", "tru", "\"\\x\"", "[-]", "[--1]", "{\"a\":nil}", "[1e]", "[NaNa]", "\\ud800"})
        CHECK(repaired_json(text) == (text == "[\"\\ud83d\\"      ? "[\"\\ufffd\\"
                                      : text == "[\"\\ud83d\\u12" ? "[\"\\ufffd\\u12"
                                                                  : text));
}

TEST_CASE("a repair of random damage is valid UTF-8 and never longer than six times the text") {
    Author author{std::mt19937(14)};
    for (int i = 0; i < 3000; ++i) {
        auto text = author.object(0);
        for (auto n = author.below(4); n > 0; --n)
            text.insert(author.below(text.size() + 1), 1, char(author.random()));
        const auto repaired = repaired_json(text);
        REQUIRE(repaired_utf8(repaired) == repaired);
        REQUIRE(repaired.size() <= 6 * text.size());
        REQUIRE(repaired_json(repaired) == repaired);
    }
}

TEST_CASE("text that was cut short is closed behind what is whole of it") {
    for (const auto& [cut, closed] : std::initializer_list<std::pair<const char*, const char*>>{
             {"", ""},
             {"{", "{}"},
             {"{\"a", "{}"},
             {"{\"a\"", "{}"},
             {"{\"a\":", "{}"},
             {"{\"a\": {", "{\"a\": {}}"},
             {"{\"a\": \"x\\\"", "{}"},
             {"{\"a\": \"x\\", "{}"},
             {"{\"a\": \"}\", \"b", "{\"a\": \"}\"}"},
             {"{\"a\": 12", "{}"},
             {"{\"a\": 12, \"b\": [true, 3", "{\"a\": 12, \"b\": [true]}"},
             {"{\"a\": [1, {\"b\": \"c\"}, ", "{\"a\": [1, {\"b\": \"c\"}]}"},
             {"{\"a\": [[]], \"b\": nul", "{\"a\": [[]]}"},
             {"{\"a\": 1}", "{\"a\": 1}"}})
        CHECK(closed_json(cut) == closed);
}

TEST_CASE("what is read as an object is what a parser takes for one, with the same members") {
    Author author{std::mt19937(7)};
    std::vector<Member> found;
    const auto check = [&](const std::string& text) {
        const bool strict = !check_object(text), good = !object_error(text, &found);
        CAPTURE(text);
        // Half a surrogate pair is the one thing of these that a parser may refuse.
        REQUIRE((good == strict || (good && text.find("\\ud") != text.npos)));
        if (!good) return false;
        const auto list = members(text);
        REQUIRE(found.size() == list.size());
        for (std::size_t i = 0; i < list.size(); ++i) {
            CHECK(found[i].key == list[i].key);
            CHECK(found[i].value == list[i].value);
            CHECK(found[i].text == list[i].text);
        }
        return true;
    };
    static constexpr const char* bytes[] = {
        "\"",   "\\", "{",    "}",    "[", "]", ",", ":",  "0",       "-",     ".",    "e",
        "\x1f", "\0", "\xC3", "\xff", "u", "n", " ", "\n", "\\ud83d", "\\u00", "true", "01"};
    std::size_t whole = 0, harmed = 0;
    for (int i = 0; i < 20'000; ++i) {
        auto text = author.space() + author.object(0) + author.space();
        whole += check(text);
        for (int change = 0; change < 3; ++change) { // each on top of the ones before
            const auto at = author.below(text.size());
            const std::string_view bit = bytes[author.below(std::size(bytes))];
            text.replace(at, author.below(3), bit.empty() ? std::string_view("\0", 1) : bit);
            harmed += check(text);
        }
    }
    CHECK(whole == 20'000);
    CHECK(harmed > 1'000);
}

TEST_CASE("what is JSON is an object, whatever parsers with limits make of it") {
    for (const std::string_view value :
         {R"("\ud83d")", R"("\ude00\ud83d")", R"("\uDBFF x")", "1e999", "-1E+999", "0.1e-999",
          "18446744073709551616", "-123456789012345678901234567890", "1.0000000000000000000000001",
          "\"\x7f\"", R"("\u0000")"}) {
        CAPTURE(value);
        const auto text = fmt::format(R"({{"a": {}, "b": [{}]}})", value, value);
        std::vector<Member> list;
        CHECK_FALSE(object_error(text, &list));
        REQUIRE(list.size() == 2);
        CHECK(list[0].value == value);
    }
    const auto nested = [](std::size_t levels) {
        return "{\"a\":" + std::string(levels - 1, '[') + "1" + std::string(levels - 1, ']') + "}";
    };
    CHECK_FALSE(object_error(nested(255)));
    CHECK_FALSE(check_object(nested(255)));
    CHECK(object_error(nested(256)) == "not JSON: more than 255 levels, at byte 260");
    CHECK(check_object(nested(256)));
}

TEST_CASE("what is no object is told with its place") {
    struct Row {
        std::string_view text, error;
    };
    for (const auto& [text, error] : std::initializer_list<Row>{
             {"", "not JSON (it is empty)"},
             {" \n", "not JSON (it is empty)"},
             {"[]", "not a JSON object"},
             {"-7", "not a JSON object"},
             {"\"a\"", "not a JSON object"},
             {"<html>", "not JSON: there has to be a value, at byte 1"},
             {"nope", "not JSON: a word that JSON does not have, at byte 1"},
             {R"({"a": 1)", "not JSON: it ends too early, at byte 8"},
             {R"({"a": )", "not JSON: it ends too early, at byte 7"},
             {R"({"a)", "not JSON: it ends too early, at byte 4"},
             {R"({"a\)", "not JSON: it ends too early, at byte 5"},
             {R"({"a\u00)", "not JSON: it ends too early, at byte 8"},
             {R"({"a": NaN})", "not JSON: a word that JSON does not have, at byte 7"},
             {R"({"a": -Infinity})", "not JSON: a number that JSON does not have, at byte 8"},
             {R"({"a": tru})", "not JSON: a word that JSON does not have, at byte 7"},
             {R"({"a": 1.})", "not JSON: a number that JSON does not have, at byte 9"},
             {R"({"a": 1e+})", "not JSON: a number that JSON does not have, at byte 10"},
             {R"({"a": 01})", "not JSON: there has to be a comma or a closing bracket, at byte 8"},
             {R"({"a": +1})", "not JSON: there has to be a value, at byte 7"},
             {R"({"a": 1,})", "not JSON: there has to be a string in double quotes, at byte 9"},
             {R"({'a': 1})", "not JSON: there has to be a string in double quotes, at byte 2"},
             {R"({"a" 1})", "not JSON: there has to be a colon, at byte 6"},
             {R"({"a": [1 2]})",
              "not JSON: there has to be a comma or a closing bracket, at byte 10"},
             {R"({"a": "\x"})", "not JSON: an escape that JSON does not have, at byte 8"},
             {R"({"a": "\u12g4"})", "not JSON: an escape that JSON does not have, at byte 8"},
             {"{\"a\": \"x\ty\"}", "not JSON: a control character in a string, at byte 9"},
             {R"({"a": 1} x)", "not JSON: something behind its end, at byte 10"},
             {"{\"a\": \"\xC3\xA9 \xff\", b}", "not JSON: bytes that are no UTF-8, at byte 11"},
             {"{\"a\": b, \"\xff\"}", "not JSON: a word that JSON does not have, at byte 7"},
             {"\xEF\xBB\xBF{}", "not JSON: there has to be a value, at byte 1"}}) {
        CAPTURE(text);
        CHECK(object_error(text) == error);
    }
    CHECK(object_error(R"({"messages": [{]})", nullptr, 13) ==
          "not JSON: there has to be a string in double quotes, at byte 3");
}

TEST_CASE("a patched text is the changed one, and copies nothing of the original") {
    Author author{std::mt19937(11)};
    for (int i = 0; i < 2000; ++i) {
        const evalrt::Text original(author.space() + author.object(0) + author.space());
        const auto list = members(original);
        std::vector<Change> changes{set("new", "[1, 2]")};
        for (const auto& it : list)
            if (const auto choice = author.below(3); choice > 0)
                changes.push_back({it.key, choice == 1 ? std::optional<std::string>() : "\"x\""});
        const Patched patched(original, list, changes);
        CHECK(patched.text().view() == with_changes(original, list, changes));
        CHECK(patched.size() == patched.text().view().size());
    }
    const evalrt::Text body(R"({"messages": [{"role": "user", "content": "long"}]})");
    const Patched patched(body, members(body), std::vector<Change>{set("stream", "true")});
    REQUIRE(patched.parts() == 3);
    CHECK(patched.part(0).data() == body.view().data());
    CHECK(patched.part(1) == R"(, "stream": true)");
    CHECK(patched.part(2) == "}");
    CHECK(Patched(body).text().view().data() == body.view().data());
    CHECK(Patched(evalrt::Text()).parts() == 0);
}
