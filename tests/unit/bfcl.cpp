#include "examples/evalrt/bfcl.hpp"
#include "examples/evalrt/python_json.hpp"

#include "support/catch.hpp"

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <limits>
#include <unistd.h>

namespace bfcl = evalrt::bfcl;
using bfcl::Mode;

namespace {

struct TempDir {
    std::filesystem::path path;
    TempDir() {
        auto name = (std::filesystem::temp_directory_path() / "evalrt-bfcl-XXXXXX").string();
        path = mkdtemp(name.data());
    }
    ~TempDir() { std::filesystem::remove_all(path); }
};

void put(const std::filesystem::path& path, const std::string& text) {
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << text;
}

std::string get(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

bfcl::Item item(const std::string& id, const std::string& functions,
                const std::string& messages = R"([{"role":"user","content":"q"}])") {
    return {id, R"({"id": ")" + id + R"(", "question": [)" + messages + R"(], "function": )" +
                    functions + "}"};
}

// One function f with these properties.
std::string function(const std::string& properties) {
    return R"([{"name": "f", "description": "D.", "parameters": {"type": "dict", "properties": )" +
           properties + R"(, "required": []}}])";
}

// What the properties of f become in "tools".
std::string tool_properties(const std::string& id, const std::string& properties) {
    auto body = bfcl::body(item(id, function(properties)), {.mode = Mode::fc, .model = "m"});
    REQUIRE(body.has_value());
    auto start = body->find("\"properties\":") + 13;
    return body->substr(start, body->rfind(",\"required\"") - start);
}

// As Python prints the value in an answer's "arguments".
std::string reprinted(const std::string& value) {
    return bfcl::dump(bfcl::parse("{\"v\":" + value + "}").at("v"), bfcl::line_style);
}

evalrt::Response answer(const std::string& message) {
    evalrt::Response response;
    response.body = R"({"choices":[{"index":0,"message":)" + message + "}]}";
    response.usage.prompt_tokens = 17;
    response.usage.completion_tokens = 4;
    return response;
}

std::string result(const std::string& message, Mode mode) {
    auto row = bfcl::result_row({"multiple_3", {}}, answer(message),
                                std::chrono::duration<double>(0.25), mode);
    REQUIRE(row.has_value());
    CHECK(row->id == "multiple_3");
    return row->text;
}

template <class T>
std::string detail(const bfcl::Result<T>& result) {
    REQUIRE(result.has_error());
    CHECK(result.error().code);
    CHECK(result.error().detail.find('\n') == std::string::npos);
    return result.error().detail;
}

bool contains(const std::string& text, std::string_view part) {
    return text.find(part) != std::string::npos;
}

} // namespace

TEST_CASE("a body in FC mode has the functions as tools, in the order of the openai package") {
    auto body = bfcl::body(item("multiple_0", R"([{"name": "a.b.c", "description": "Adds.",
                                "parameters": {"type": "dict", "properties": {}}}])"),
                           {.mode = Mode::fc, .model = "org/m"});
    REQUIRE(body.has_value());
    CHECK(*body ==
          R"({"messages":[{"role":"user","content":"q"}],"model":"org/m","store":false,)"
          R"("temperature":0.001,"tools":[{"type":"function","function":{"name":"a_b_c",)"
          R"("description":"Adds. Note that the provided function is in Python 3 syntax.",)"
          R"("parameters":{"type":"object","properties":{}}}}]})");
}

TEST_CASE("without functions there are no tools") {
    auto body = bfcl::body(item("live_irrelevance_0-0-0", "[]"), {.mode = Mode::fc, .model = "m"});
    REQUIRE(body.has_value());
    CHECK(*body == R"({"messages":[{"role":"user","content":"q"}],"model":"m","store":false,)"
                   R"("temperature":0.001})");
}

TEST_CASE("a token limit and a temperature stand where the openai package puts them") {
    auto body = bfcl::body(item("multiple_0", "[]"), {Mode::fc, "m", 256, 0.0});
    REQUIRE(body.has_value());
    CHECK(contains(*body, R"("model":"m","max_tokens":256,"store":false,"temperature":0.0})"));
}

TEST_CASE("a body in prompting mode has the functions in the system prompt, indented, in ASCII") {
    auto body = bfcl::body(item("multiple_0", R"([{"name": "a.b", "description": "D\u00e9.",
                                "parameters": {"type": "dict", "properties": {}, "required": [],
                                "x": [1, "\ud83c\udf56"]}}])"),
                           {.mode = Mode::prompt, .model = "m"});
    REQUIRE(body.has_value());
    CHECK(body->starts_with(R"({"messages":[{"role":"system","content":"You are an expert in )"
                            R"(composing functions.You are given a question)"));
    CHECK(contains(*body, R"(func_name2(params)].  You SHOULD NOT)"));
    auto functions = body->substr(body->find(R"(can invoke.\n)") + 13);
    CHECK(functions ==
          R"([\n    {\n        \"name\": \"a.b\",\n        \"description\": \"D\\u00e9. Note that )"
          R"(the provided function is in Python 3 syntax.\",\n        \"parameters\": {\n)"
          R"(            \"type\": \"dict\",\n            \"properties\": {},\n)"
          R"(            \"required\": [],\n            \"x\": [\n                1,\n)"
          R"(                \"\\ud83c\\udf56\"\n            ]\n        }\n    }\n]\n"},)"
          R"({"role":"user","content":"q"}],"model":"m","store":false,"temperature":0.001})");
}

TEST_CASE("a row's own system prompt follows ours") {
    auto body = bfcl::body(item("live_simple_0-0-0", "[]",
                                R"([{"role":"system","content":"Be brief."},
                                    {"content":"q","role":"user"}])"),
                           {.mode = Mode::prompt, .model = "m"});
    REQUIRE(body.has_value());
    CHECK(contains(*body, R"(can invoke.\n[]\n\n\nBe brief."},{"content":"q","role":"user"}])"));
}

TEST_CASE("only the first turn is asked") {
    auto body = bfcl::body({"multiple_0", R"({"id":"multiple_0","function":[],"question":
                            [[{"role":"user","content":"1"}],[{"role":"user","content":"2"}]]})"},
                           {.mode = Mode::fc, .model = "m"});
    REQUIRE(body.has_value());
    CHECK(contains(*body, R"("messages":[{"role":"user","content":"1"}],)"));
}

TEST_CASE("types become those of JSON schema") {
    auto mapped = [](const std::string& type) {
        return tool_properties("multiple_0", R"({"p":{"type":")" + type + R"("}})");
    };
    for (auto type : {"integer", "byte", "short", "long", "Bigint"})
        CHECK(mapped(type) == R"({"p":{"type":"integer"}})");
    for (auto type : {"number", "double"}) CHECK(mapped(type) == R"({"p":{"type":"number"}})");
    for (auto type : {"boolean", "bool"}) CHECK(mapped(type) == R"({"p":{"type":"boolean"}})");
    for (auto type : {"array", "list", "tuple", "ArrayList", "Array", "Queue", "Stack"})
        CHECK(mapped(type) == R"({"p":{"type":"array"}})");
    for (auto type : {"dict", "object", "HashMap", "Hashtable"})
        CHECK(mapped(type) == R"({"p":{"type":"object"}})");
    for (auto type : {"string", "any", "Any", "String", "char", "unheard of"})
        CHECK(mapped(type) == R"({"p":{"type":"string"}})");
}

TEST_CASE("a missing type is a string, at the end") {
    CHECK(tool_properties("multiple_0", R"({"p":{"description":"d"}})") ==
          R"({"p":{"description":"d","type":"string"}})");
}

TEST_CASE("a float says so in its format and its description") {
    CHECK(
        tool_properties("multiple_0", R"({"p":{"description":"d.","type":"float","default":1}})") ==
        R"({"p":{"description":"d. This is a float type value.","type":"number","default":1,)"
        R"("format":"float"}})");
}

TEST_CASE("nested types are mapped as deep as bfcl_eval goes") {
    CHECK(
        tool_properties("multiple_0", R"({"p":{"type":"dict","properties":{
              "q":{"type":"tuple","items":{"type":"list","items":{"type":"float",
                  "items":{"type":"dict"}}}},
              "r":{"type":"list","items":{"type":"dict","properties":{"s":{"type":"any"}}}}}}})") ==
        R"({"p":{"type":"object","properties":{)"
        R"("q":{"type":"array","items":{"type":"array","items":{"type":"number",)"
        R"("items":{"type":"dict"}}}},)"
        R"("r":{"type":"array","items":{"type":"object","properties":{"s":{"type":"string"}}}}}}})");
}

TEST_CASE("a Java parameter is a string whose description names the type") {
    CHECK(
        tool_properties("simple_java_0", R"({"a":{"type":"ArrayList","description":"A.",
              "items":{"type":"String"}},"b":{"description":"B.","type":"any"},
              "c":{"type":"HashMap","description":"C.","properties":{}}})") ==
        R"({"a":{"type":"string","description":"A. This is Java ArrayList type parameter in string )"
        R"(representation. The list elements are of type String; they are not in string )"
        R"(representation."},"b":{"description":"B. This parameter can be of any type of Java )"
        R"(object in string representation.","type":"string"},"c":{"type":"string","description":)"
        R"("C. This is Java HashMap type parameter in string representation.","properties":{}}})");
}

TEST_CASE("a JavaScript parameter is a string whose description has the schema") {
    CHECK(tool_properties("simple_javascript_0", R"({"a":{"type":"array","description":"A.",
              "items":{"type":"integer"}},"b":{"description":"B.","type":"any"},
              "c":{"type":"dict","description":"C.","properties":{"d":{"type":"float"}}}})") ==
          R"({"a":{"type":"string","description":"A. This is JavaScript array type parameter in )"
          R"(string representation. The list elements are of type integer; they are not in string )"
          R"(representation."},"b":{"description":"B. This parameter can be of any type of )"
          R"(JavaScript object in string representation.","type":"string"},"c":{"type":"string",)"
          R"("description":"C. This is JavaScript dict type parameter in string representation. )"
          R"(The dictionary entries have the following schema; they are not in string )"
          R"(representation. {\"d\": {\"type\": \"float\"}}"}})");
}

TEST_CASE("the hint names the language of the id") {
    auto hint = [](const std::string& id) {
        return *bfcl::body(item(id, function("{}")), {.mode = Mode::fc, .model = "m"});
    };
    CHECK(contains(hint("simple_java_0"), "D. Note that the provided function is in Java 8 SDK"));
    CHECK(
        contains(hint("simple_javascript_0"), "D. Note that the provided function is in JavaScr"));
    CHECK(contains(hint("live_simple_0-0-0"), "D. Note that the provided function is in Python 3"));
}

TEST_CASE("a row that bfcl_eval cannot use has no body and says why") {
    auto why = [](const std::string& functions) {
        return detail(bfcl::body(item("multiple_7", functions), {.mode = Mode::fc, .model = "m"}));
    };
    CHECK(why("[{}]") == R"(multiple_7: there is no "description" where one must be)");
    CHECK(contains(why(function(R"({"p":{"type":"float"}})")), R"(no "description")"));
    CHECK(contains(why(function(R"({"p":{"type":"array","items":{"type":"x"}}})")), "type x"));
    CHECK(contains(why(function(R"({"p":1})")), R"("p" is not an object)"));
    CHECK(contains(detail(bfcl::body(item("multiple_7", "[]", "[]"), {.model = "m"})), "message"));
}

TEST_CASE("numbers are printed as Python prints them") {
    using Pair = std::pair<const char*, const char*>;
    for (auto [written, printed] :
         {Pair{"0", "0"}, Pair{"-0", "0"}, Pair{"-7", "-7"}, Pair{"1.0", "1.0"},
          Pair{"-0.0", "-0.0"}, Pair{"1.50", "1.5"}, Pair{"1e5", "100000.0"},
          Pair{"1E+15", "1000000000000000.0"}, Pair{"1e16", "1e+16"}, Pair{"1.5e300", "1.5e+300"},
          Pair{"0.0001", "0.0001"}, Pair{"0.00001", "1e-05"}, Pair{"1.25e-7", "1.25e-07"},
          Pair{"5e-324", "5e-324"}, Pair{"0.30000000000000004", "0.30000000000000004"},
          Pair{"3.14159265358979323846", "3.141592653589793"},
          Pair{"18446744073709551617", "18446744073709551617"},
          Pair{"-123456789012345678901234567890", "-123456789012345678901234567890"}})
        CHECK(reprinted(written) == printed);
    CHECK(bfcl::Json::number(0.001).text == "0.001");
    CHECK(bfcl::Json::number(std::numeric_limits<double>::max()).text == "1.7976931348623157e+308");
}

TEST_CASE("strings are escaped as Python escapes them, in ASCII and as they are") {
    auto text = bfcl::parse("{\"v\":\"\\\"\\\\/\\b\\f\\n\\r\\t\\u0000\\u001F\x7f\\u00e9\u65e5"
                            "\\ud83c\\udf56\\u2028\"}")
                    .at("v");
    CHECK(bfcl::dump(text, bfcl::line_style) ==
          R"("\"\\/\b\f\n\r\t\u0000\u001f\u007f\u00e9\u65e5\ud83c\udf56\u2028")");
    CHECK(bfcl::dump(text, bfcl::wire_style) ==
          "\"\\\"\\\\/\\b\\f\\n\\r\\t\\u0000\\u001f\x7f\u00e9\u65e5\U0001f356\u2028\"");
}

TEST_CASE("a repeated key keeps its first place and its last value") {
    CHECK(reprinted(R"({"a":1,"b":2,"a":[true,false,null]})") ==
          R"({"a": [true, false, null], "b": 2})");
}

TEST_CASE("what is no JSON object is refused") {
    for (auto text : {"", "1", "[]", "{", "{}}", "{} {}", R"({"a":01})", R"({"a":1e999})",
                      R"({"a":tru})", R"({"a":-})", R"({"a":"\ud83c"})", "{\"a\":\"\xff\"}",
                      R"({"a":[1 2]})", R"({"a":NaN})"}) {
        CAPTURE(text);
        CHECK_THROWS_AS(bfcl::parse(text), bfcl::Unusable);
    }
}

TEST_CASE("categories and groups are expanded, sorted, each once") {
    using List = std::vector<std::string>;
    auto expand = [](List names) { return *bfcl::categories(names); };
    CHECK(expand({"simple_python", "multiple", "simple_python"}) ==
          List{"multiple", "simple_python"});
    CHECK(expand({"non_python"}) == List{"simple_java", "simple_javascript"});
    CHECK(expand({"live"}) == List{"live_irrelevance", "live_multiple", "live_parallel",
                                   "live_parallel_multiple", "live_relevance", "live_simple"});
    CHECK(expand({"non_live"}).size() == 7);
    CHECK(expand({"single_turn"}).size() == 13);
    CHECK(expand({"python"}).size() == 11);
    CHECK(expand({"python", "non_python"}) == expand({"live", "non_live"}));
}

TEST_CASE("unknown categories and those of many turns are refused with what to do") {
    auto why = [](const std::string& name) {
        return detail(bfcl::categories(std::vector{std::string("multiple"), name}));
    };
    CHECK(contains(why("simple"), "simple is no BFCL category; known are simple_python, "));
    CHECK(contains(why("simple"), "groups non_live, live, single_turn"));
    for (auto name : {"multi_turn_base", "memory_kv", "web_search", "agentic", "all"})
        CHECK(contains(why(name), std::string("gateway -- bfcl generate --test-category ") + name));
}

TEST_CASE("rows are loaded in the file's order, the last line with or without its end") {
    TempDir dir;
    auto row = [](const std::string& id) { return item(id, "[]").row; };
    put(dir.path / "BFCL_v4_multiple.json", row("multiple_1") + "\r\n\n" + row("multiple_0"));
    auto items = bfcl::load(dir.path, "multiple");
    REQUIRE(items.has_value());
    REQUIRE(items->size() == 2);
    CHECK((*items)[0].id == "multiple_1");
    CHECK((*items)[0].row == row("multiple_1"));
    CHECK((*items)[1].id == "multiple_0");
}

TEST_CASE("what cannot be loaded is named with file and line") {
    TempDir dir;
    auto why = [&](const std::string& text) {
        put(dir.path / "BFCL_v4_multiple.json", item("multiple_0", "[]").row + "\n" + text);
        return detail(bfcl::load(dir.path, "multiple"));
    };
    CHECK(contains(why("{"), "BFCL_v4_multiple.json:2: not valid JSON"));
    CHECK(contains(why("{}"), R"(:2: there is no "id")"));
    CHECK(contains(why(item("multiple", "[]").row), "multiple does not end in a number"));
    CHECK(contains(why(item("multiple_1-2", "[]").row), "multiple_1-2 does not end in a number"));
    CHECK(contains(why(R"({"id":"multiple_1","question":[]})"), R"(no "function")"));
    CHECK(contains(detail(bfcl::load(dir.path, "parallel")), "--bfcl-data must be"));
    CHECK(contains(detail(bfcl::load(dir.path, "multi_turn_base")), "single-turn"));
    std::filesystem::create_directory(dir.path / "BFCL_v4_parallel.json");
    CHECK(contains(detail(bfcl::load(dir.path, "parallel")), "BFCL_v4_parallel.json"));
}

TEST_CASE("the package's data is found by asking a python") {
    TempDir dir;
    CHECK(contains(detail(bfcl::find_data("/nowhere/it's python")), "pip install"));
    auto python = dir.path / "it's python";
    put(python, "#!/bin/sh\necho '" + dir.path.string() + "'\n");
    std::filesystem::permissions(python, std::filesystem::perms::owner_all);
    CHECK(contains(detail(bfcl::find_data(python.string())), "--bfcl-data"));
    std::filesystem::create_directory(dir.path / "data");
    CHECK(*bfcl::find_data(python.string()) == dir.path / "data");
}

TEST_CASE("a prompting answer is its text") {
    CHECK(result(R"({"role":"assistant","content":"[f(a='\u00e9')]"})", Mode::prompt) ==
          R"({"id": "multiple_3", "result": "[f(a='\u00e9')]", "input_token_count": 17, )"
          R"("output_token_count": 4, "latency": 0.25})");
    CHECK(contains(result(R"({"content":null})", Mode::prompt), R"("result": null, )"));
    CHECK(contains(result(R"({"content":"x","tool_calls":[]})", Mode::prompt), R"("result": "x")"));
}

TEST_CASE("an FC answer is a list of calls, or its text") {
    auto call = R"({"id":"1","type":"function","function":{"name":"f","arguments":"{\"a\": 1}"}})";
    CHECK(result(std::string(R"({"content":null,"tool_calls":[)") + call + "," + call + "]}",
                 Mode::fc) ==
          R"({"id": "multiple_3", "result": [{"f": "{\"a\": 1}"}, {"f": "{\"a\": 1}"}], )"
          R"("input_token_count": 17, "output_token_count": 4, "latency": 0.25})");
    CHECK(contains(result(R"({"content":"x"})", Mode::fc), R"("result": "x", )"));
    CHECK(contains(result(R"({"content":"x","tool_calls":null})", Mode::fc), R"("result": "x", )"));
    CHECK(contains(result(R"({"content":"x","tool_calls":[]})", Mode::fc), R"("result": [], )"));
}

TEST_CASE("reasoning comes last, if there is any") {
    CHECK(result(R"({"content":"x","reasoning_content":"hm\u00e9"})", Mode::fc)
              .ends_with(R"("latency": 0.25, "reasoning_content": "hm\u00e9"})"));
    CHECK(result(R"({"content":"x","reasoning_content":""})", Mode::fc).ends_with("0.25}"));
}

TEST_CASE("tokens that were not reported are null, never zero") {
    auto response = answer(R"({"content":"x"})");
    response.usage = {};
    auto row = bfcl::result_row({"multiple_3", {}}, response, {}, Mode::prompt);
    REQUIRE(row.has_value());
    CHECK(contains(row->text, R"("input_token_count": null, "output_token_count": null, )"));
}

TEST_CASE("a failed response never becomes a row") {
    auto response = answer(R"({"content":"x"})");
    response.outcome = evalrt::Errc::overloaded;
    response.detail = "too busy";
    auto row = bfcl::result_row({"multiple_3", {}}, response, {}, Mode::prompt);
    CHECK(detail(row) == "multiple_3: too busy");
    CHECK(row.error().code == evalrt::Errc::overloaded);

    for (auto body : {"", "{}", R"({"choices":[]})", R"({"choices":[{"text":"x"}]})"}) {
        response = {};
        response.body = body;
        row = bfcl::result_row({"multiple_3", {}}, response, {}, Mode::fc);
        CHECK(contains(detail(row), "multiple_3: "));
        CHECK(row.error().code == evalrt::Errc::malformed);
    }
}

TEST_CASE("result files stand where bfcl_eval puts them") {
    CHECK(bfcl::result_path("r", "org/m-7b-FC", "live_simple") ==
          "r/org_m-7b-FC/live/BFCL_v4_live_simple_result.json");
    CHECK(bfcl::result_path("r", "m", "simple_java") ==
          "r/m/non_live/BFCL_v4_simple_java_result.json");
}

TEST_CASE("rows are sorted by the number in the id, and of one id the last counts") {
    TempDir dir;
    auto path = dir.path / "a" / "b" / "r.json";
    REQUIRE_FALSE(bfcl::write_results(path, {{"live_simple_10-0-0", "ten"},
                                             {"live_simple_9-12-3", "old"},
                                             {"live_simple_100-0-0", "hundred"},
                                             {"live_multiple_200-0-0", "another"},
                                             {"live_simple_9-12-3", "nine"}}));
    CHECK(get(path) == "another\nnine\nten\nhundred\n");
    CHECK(std::distance(std::filesystem::directory_iterator(path.parent_path()), {}) == 1);

    REQUIRE_FALSE(bfcl::write_results(path, {{"live_simple_1-0-0", "one"}}));
    CHECK(get(path) == "one\n");
}

TEST_CASE("a result file that cannot be written leaves the old one") {
    TempDir dir;
    put(dir.path / "file", "old");
    auto failure = bfcl::write_results(dir.path / "file" / "r.json", {{"multiple_0", "x"}});
    CHECK(failure);
    CHECK(contains(failure.detail, "cannot write"));
    CHECK(get(dir.path / "file") == "old");
}

TEST_CASE("what a result file has is not asked again, and stays as it is") {
    TempDir dir;
    auto path = dir.path / "r.json";
    CHECK(bfcl::read_results(path)->empty());
    std::string kept = R"({"result": "é  ", "id": "multiple_1", "latency": 1.50})";
    put(path,
        kept + "\n" +
            R"({"id": "multiple_2", "result": "Error during inference: x", "traceback": "t"})" +
            "\n" + R"({"id": "multiple_3", "res)");
    std::string cut;
    auto rows = bfcl::read_results(path, &cut);
    REQUIRE(rows.has_value());
    REQUIRE(rows->size() == 1);
    CHECK(cut == path.string() + ":3");

    std::vector<bfcl::Item> items{
        {"multiple_0", {}}, {"multiple_1", {}}, {"multiple_2", {}}, {"multiple_3", {}}};
    std::string ids;
    for (const auto& left : bfcl::unanswered(items, *rows)) ids += left.id + " ";
    CHECK(ids == "multiple_0 multiple_2 multiple_3 ");

    rows->push_back({"multiple_0", "{}"});
    REQUIRE_FALSE(bfcl::write_results(path, *rows));
    CHECK(get(path) == "{}\n" + kept + "\n");
}

TEST_CASE("a broken line inside a result file is not silently dropped") {
    TempDir dir;
    auto path = dir.path / "r.json";
    put(path, "{\"id\": \"multi\n{\"id\": \"multiple_1\", \"result\": \"\"}\n");
    CHECK(contains(detail(bfcl::read_results(path)), "r.json:1: not valid JSON"));
    put(path, "{\"result\": \"\"}\n");
    CHECK(contains(detail(bfcl::read_results(path)), "r.json:1: there is no \"id\""));
}
