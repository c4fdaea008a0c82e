#include "bfcl.hpp"

#include "python_json.hpp"

#include <boost/system/errc.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <memory>
#include <set>
#include <unordered_set>
#include <utility>

namespace evalrt::bfcl {
namespace {

namespace errc = boost::system::errc;

// "live_simple_19-3-15" to ("live_simple", 19).
std::optional<std::pair<std::string, std::uint64_t>> split(std::string_view id) {
    auto underscore = id.rfind('_');
    if (underscore == id.npos) return {};
    auto index = id.substr(underscore + 1);
    auto dashes = std::count(index.begin(), index.end(), '-');
    if (dashes != 0 && dashes != 2) return {};
    index = index.substr(0, index.find('-'));
    if (index.empty() || index.size() > 18) return {};
    std::uint64_t number = 0;
    for (char c : index) {
        if (c < '0' || c > '9') return {};
        number = number * 10 + static_cast<unsigned>(c - '0');
    }
    return std::pair(std::string(id.substr(0, underscore)), number);
}

enum class Language { python, java, javascript };

Language language_of(std::string_view id) {
    auto category = id.substr(0, id.rfind('_'));
    if (category.find("javascript") != category.npos) return Language::javascript;
    return category.find("java") != category.npos ? Language::java : Language::python;
}

// Java and JavaScript values come as strings: the type moves into the description.
void spell_parameter(Json& parameter, Language language) {
    bool java = language == Language::java;
    auto name = java ? "Java" : "JavaScript";
    auto type = parameter.string_at("type");
    auto& description = parameter.string_at("description");
    if (type == "any")
        description += fmt::format(
            " This parameter can be of any type of {} object in string representation.", name);
    else
        description +=
            fmt::format(" This is {} {} type parameter in string representation.", name, type);

    if (java ? type == "ArrayList" || type == "Array" : type == "array") {
        description +=
            fmt::format(" The list elements are of type {}; they are not in string representation.",
                        parameter.object_at("items").string_at("type"));
        parameter.erase("items");
    }
    if (auto* properties = parameter.find("properties"); properties && !java && type == "dict") {
        description += " The dictionary entries have the following schema; they are not in string "
                       "representation. " +
                       dump(*properties, line_style);
        parameter.erase("properties");
    }
    parameter.set("type", Json::string("string"));
}

void add_language_hint(Json& function, Language language) {
    constexpr std::array hints{" Note that the provided function is in Python 3 syntax.",
                               " Note that the provided function is in Java 8 SDK syntax.",
                               " Note that the provided function is in JavaScript syntax."};
    function.string_at("description") += hints[static_cast<std::size_t>(language)];
    auto& properties = function.object_at("parameters").object_at("properties");
    if (language == Language::python) return;
    for (auto& [key, parameter] : properties.members) spell_parameter(parameter, language);
}

// bfcl_eval's GORILLA_TO_OPENAPI.
std::optional<std::string_view> openai_type(std::string_view type) {
    constexpr std::array<std::pair<std::string_view, std::string_view>, 26> types{{
        {"integer", "integer"},  {"number", "number"},   {"float", "number"}, {"string", "string"},
        {"boolean", "boolean"},  {"bool", "boolean"},    {"array", "array"},  {"list", "array"},
        {"dict", "object"},      {"object", "object"},   {"tuple", "array"},  {"any", "string"},
        {"byte", "integer"},     {"short", "integer"},   {"long", "integer"}, {"double", "number"},
        {"char", "string"},      {"ArrayList", "array"}, {"Array", "array"},  {"HashMap", "object"},
        {"Hashtable", "object"}, {"Queue", "array"},     {"Stack", "array"},  {"Any", "string"},
        {"String", "string"},    {"Bigint", "integer"},
    }};
    for (auto [ours, openai] : types)
        if (ours == type) return openai;
    return {};
}

// What holds the elements of a list must have a type that is known.
std::string map_item_type(Json& items) {
    auto& type = items.string_at("type");
    auto mapped = openai_type(type);
    if (!mapped) throw Unusable{fmt::format("\"items\" have the unknown type {}", type)};
    return type = *mapped;
}

// Goes exactly as deep as bfcl_eval goes: lists in lists are done once, objects in them to the end.
void cast_types(Json& properties) {
    for (auto& [key, property] : properties.members) {
        if (!property.is_object()) throw Unusable{fmt::format("\"{}\" is not an object", key)};
        std::string type = "string";
        if (property.find("type")) {
            type = property.string_at("type");
            if (type == "float") {
                property.set("format", Json::string("float"));
                property.string_at("description") += " This is a float type value.";
            }
            type = openai_type(type).value_or("string");
        }
        property.set("type", Json::string(type));
        if (type != "array" && type != "object") continue;

        if (property.find("properties")) {
            cast_types(property.object_at("properties"));
        } else if (property.find("items")) {
            auto& items = property.object_at("items");
            auto of = map_item_type(items);
            if (of == "array" && items.find("items"))
                map_item_type(items.object_at("items"));
            else if (of == "object" && items.find("properties"))
                cast_types(items.object_at("properties"));
        }
    }
}

Json tool(Json function) {
    auto& name = function.string_at("name");
    std::replace(name.begin(), name.end(), '.', '_');
    auto& parameters = function.object_at("parameters");
    parameters.set("type", Json::string("object"));
    cast_types(parameters.object_at("properties"));

    auto tool = Json::object();
    tool.set("type", Json::string("function"));
    tool.set("function", std::move(function));
    return tool;
}

// The template and its text are bfcl_eval's (Apache 2.0), "plaintext" and "classic".
constexpr std::string_view system_prompt =
    "You are an expert in composing functions.You are given a question and a set of possible "
    "functions. Based on the question, you will need to make one or more function/tool calls to "
    "achieve the purpose. If none of the functions can be used, point it out. If the given "
    "question lacks the parameters required by the function, also point it out.\n\n"
    "You should only return the function calls in your response.\n\n"
    "If you decide to invoke any of the function(s), you MUST put it in the format of "
    "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]. "
    " You SHOULD NOT include any other text in the response.\n\n"
    "At each turn, you should try your best to complete the tasks requested by the user within "
    "the current turn. Continue to output functions to call until you have fulfilled the user's "
    "request to the best of your ability. Once you have no more functions to call, the system "
    "will consider the current turn complete and proceed to the next turn or task.\n\n"
    "Here is a list of functions in json format that you can invoke.\n";

void add_system_prompt(std::vector<Json>& messages, const Json& functions) {
    auto prompt = std::string(system_prompt) + dump(functions, indent_style) + '\n';
    if (messages.front().string_at("role") == "system") {
        auto& content = messages.front().string_at("content");
        content = prompt + "\n\n" + content;
        return;
    }
    auto message = Json::object();
    message.set("role", Json::string("system"));
    message.set("content", Json::string(std::move(prompt)));
    messages.insert(messages.begin(), std::move(message));
}

constexpr std::array non_live{"simple_python", "simple_java",       "simple_javascript", "multiple",
                              "parallel",      "parallel_multiple", "irrelevance"};
constexpr std::array live{"live_simple",      "live_multiple",
                          "live_parallel",    "live_parallel_multiple",
                          "live_irrelevance", "live_relevance"};
constexpr std::array groups{"non_live", "live", "single_turn", "python", "non_python"};

bool is_live(std::string_view category) { return category.starts_with("live_"); }

bool is_in_group(std::string_view category, std::string_view group) {
    bool python = category != "simple_java" && category != "simple_javascript";
    return group == "single_turn" || (group == "live" && is_live(category)) ||
           (group == "non_live" && !is_live(category)) || (group == "python" && python) ||
           (group == "non_python" && !python);
}

// Names that bfcl_eval knows and that are, or contain, more than single turns.
bool needs_harness(std::string_view name) {
    for (auto start : {"multi_turn", "memory", "web_search", "agentic", "format_sensitivity"})
        if (name.starts_with(start)) return true;
    return name == "all" || name == "all_scoring";
}

std::vector<std::string> single_turn() {
    std::vector<std::string> names(non_live.begin(), non_live.end());
    names.insert(names.end(), live.begin(), live.end());
    return names;
}

Failure bad_input(std::string detail) {
    return {errc::make_error_code(errc::invalid_argument), std::move(detail)};
}

Failure bad_file(std::string_view what, const std::filesystem::path& path, int number) {
    error_code code(number ? number : EIO, boost::system::system_category());
    return {code, fmt::format("cannot {} {}: {}", what, path.string(), code.message())};
}

// Calls take(line, number) for each line that is not blank.
template <class Take>
void each_line(std::string_view text, Take take) {
    for (int number = 1; !text.empty(); ++number) {
        auto line = text.substr(0, text.find('\n'));
        text.remove_prefix(std::min(text.size(), line.size() + 1));
        if (line.ends_with('\r')) line.remove_suffix(1);
        if (line.find_first_not_of(" \t") != line.npos) take(line, number);
    }
}

Result<std::string> slurp(const std::filesystem::path& path) {
    errno = 0;
    std::string text;
    std::unique_ptr<FILE, int (*)(FILE*)> file{std::fopen(path.c_str(), "rb"), std::fclose};
    if (!file) return bad_file("read", path, errno);
    std::array<char, 65536> buffer;
    while (auto n = std::fread(buffer.data(), 1, buffer.size(), file.get()))
        text.append(buffer.data(), n);
    if (std::ferror(file.get())) return bad_file("read", path, errno);
    return text;
}

} // namespace

Result<std::vector<std::string>> categories(std::span<const std::string> names) {
    std::set<std::string> wanted;
    auto known = single_turn();
    for (const auto& name : names) {
        if (needs_harness(name))
            return bad_input(fmt::format(
                "{}: only single-turn categories run natively yet; run the harness itself through "
                "the gateway: evalrt gateway -- bfcl generate --test-category {} ...",
                name, name));
        bool found = false;
        for (const auto& category : known)
            if (category == name || is_in_group(category, name)) {
                wanted.insert(category);
                found = true;
            }
        if (!found)
            return bad_input(fmt::format("{} is no BFCL category; known are {}; and the groups {}",
                                         name, fmt::join(known, ", "), fmt::join(groups, ", ")));
    }
    return std::vector(wanted.begin(), wanted.end());
}

Result<std::filesystem::path> find_data(const std::string& python) {
    std::string quoted = "'";
    for (char c : python) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
    auto command = quoted +
                   "' -c 'import importlib.util as u; "
                   "print(u.find_spec(\"bfcl_eval\").submodule_search_locations[0])' 2>/dev/null";
    std::string output;
    if (std::unique_ptr<FILE, int (*)(FILE*)> pipe{popen(command.c_str(), "r"), pclose}) {
        std::array<char, 4096> buffer;
        while (auto n = std::fread(buffer.data(), 1, buffer.size(), pipe.get()))
            output.append(buffer.data(), n);
    }
    while (output.ends_with('\n') || output.ends_with('\r')) output.pop_back();
    std::error_code ignored;
    auto data = std::filesystem::path(output) / "data";
    if (output.empty() || !std::filesystem::is_directory(data, ignored))
        return Failure{errc::make_error_code(errc::no_such_file_or_directory),
                       fmt::format("{} has no bfcl_eval: pip install --no-deps bfcl-eval, or say "
                                   "where its data is with --bfcl-data DIR",
                                   python)};
    return data;
}

Result<std::vector<Item>> load(const std::filesystem::path& data, const std::string& category) {
    auto known = single_turn();
    if (std::find(known.begin(), known.end(), category) == known.end())
        return categories(std::array{category}).error();

    auto path = data / fmt::format("BFCL_v4_{}.json", category);
    auto text = slurp(path);
    if (!text) {
        auto failure = text.error();
        failure.detail += "; --bfcl-data must be the data folder of bfcl_eval (BFCL v4)";
        return failure;
    }
    std::vector<Item> items;
    std::optional<Failure> failure;
    each_line(*text, [&](std::string_view line, int number) {
        if (failure) return;
        try {
            auto row = parse(line);
            auto& id = row.string_at("id");
            if (!split(id)) throw Unusable{fmt::format("the id {} does not end in a number", id)};
            row.array_at("question");
            row.array_at("function");
            items.push_back({std::move(id), std::string(line)});
        } catch (const Unusable& unusable) {
            failure = bad_input(fmt::format("{}:{}: {}", path.string(), number, unusable.why));
        }
    });
    if (failure) return *failure;
    return items;
}

Result<std::string> body(const Item& item, const Options& options) {
    try {
        auto row = parse(item.row);
        auto language = language_of(item.id);
        auto& functions = row.at("function");
        for (auto& function : functions.items) add_language_hint(function, language);

        auto& turns = row.array_at("question");
        if (turns.empty() || turns.front().items.empty())
            throw Unusable{"\"question\" has no message"};
        auto& messages = turns.front();
        if (options.mode == Mode::prompt) add_system_prompt(messages.items, functions);

        // The keys stand in the order of the openai package, not in that of the call.
        auto body = Json::object();
        body.set("messages", std::move(messages));
        body.set("model", Json::string(options.model));
        if (options.max_tokens)
            body.set("max_tokens", Json::literal(fmt::to_string(*options.max_tokens)));
        body.set("store", Json::literal("false"));
        body.set("temperature", Json::number(options.temperature.value_or(0.001)));
        if (options.mode == Mode::fc && !functions.items.empty()) {
            auto tools = Json::array();
            for (auto& function : functions.items) tools.items.push_back(tool(std::move(function)));
            body.set("tools", std::move(tools));
        }
        return dump(body, wire_style);
    } catch (const Unusable& unusable) {
        return bad_input(fmt::format("{}: {}", item.id, unusable.why));
    }
}

Result<Row> result_row(const Item& item, const Response& response,
                       std::chrono::duration<double> latency, Mode mode) {
    if (response.outcome)
        return Failure{*response.outcome, fmt::format("{}: {}", item.id, response.detail)};
    try {
        auto answer = parse(response.body);
        auto& choices = answer.array_at("choices");
        if (choices.empty()) throw Unusable{"\"choices\" is empty"};
        auto& message = choices.front().object_at("message");

        Json result;
        if (auto* content = message.find("content")) result = *content;
        // An empty list of calls is an answer of its own: it hides the text, as in bfcl_eval.
        if (auto* calls = message.find("tool_calls");
            mode == Mode::fc && calls && calls->is_array()) {
            result = Json::array();
            for (auto& call : calls->items) {
                auto& function = call.object_at("function");
                auto entry = Json::object();
                auto* arguments = function.find("arguments");
                entry.set(function.string_at("name"), arguments ? *arguments : Json{});
                result.items.push_back(std::move(entry));
            }
        }
        auto count = [](std::optional<std::int64_t> tokens) {
            return tokens ? Json::literal(fmt::to_string(*tokens)) : Json{};
        };
        auto row = Json::object();
        row.set("id", Json::string(item.id));
        row.set("result", std::move(result));
        row.set("input_token_count", count(response.usage.prompt_tokens));
        row.set("output_token_count", count(response.usage.completion_tokens));
        row.set("latency", Json::number(latency.count()));
        if (auto* reasoning = message.find("reasoning_content");
            reasoning && reasoning->is_string() && !reasoning->text.empty())
            row.set("reasoning_content", *reasoning);
        return Row{item.id, dump(row, line_style)};
    } catch (const Unusable& unusable) {
        return Failure{Errc::malformed,
                       fmt::format("{}: the answer cannot be used: {}", item.id, unusable.why)};
    }
}

std::filesystem::path result_path(const std::filesystem::path& result_dir, std::string model,
                                  const std::string& category) {
    std::replace(model.begin(), model.end(), '/', '_');
    return result_dir / model / (is_live(category) ? "live" : "non_live") /
           fmt::format("BFCL_v4_{}_result.json", category);
}

Result<std::vector<Row>> read_results(const std::filesystem::path& path, std::string* cut) {
    std::error_code ignored;
    if (!std::filesystem::exists(path, ignored)) return std::vector<Row>{};
    auto text = slurp(path);
    if (!text) return text.error();

    std::vector<Row> rows;
    std::optional<Failure> failure;
    each_line(*text, [&](std::string_view line, int number) {
        try {
            auto row = parse(line);
            auto& id = row.string_at("id");
            if (!row.find("traceback")) rows.push_back({id, std::string(line)});
        } catch (const Unusable& unusable) {
            const auto place = fmt::format("{}:{}", path.string(), number);
            const bool cut_off = line.data() + line.size() == text->data() + text->size();
            if (cut_off && cut) *cut = place;
            if (!cut_off && !failure)
                failure = bad_input(
                    fmt::format("{}: {}; remove the line or the file", place, unusable.why));
        }
    });
    if (failure) return *failure;
    return rows;
}

std::vector<Item> unanswered(std::vector<Item> items, const std::vector<Row>& rows) {
    std::unordered_set<std::string_view> ids;
    for (const auto& row : rows) ids.insert(row.id);
    std::erase_if(items, [&](const Item& item) { return ids.contains(item.id); });
    return items;
}

std::pair<std::string, std::size_t> place(const std::string& id) {
    return split(id).value_or(std::pair(id, 0));
}

std::string results_text(std::vector<Row> rows) {
    // Equal keys keep the order that they come in, as in Python: addresses of one vector grow.
    std::vector<std::pair<std::pair<std::string, std::uint64_t>, const Row*>> order;
    std::unordered_set<std::string_view> seen;
    for (auto row = rows.rbegin(); row != rows.rend(); ++row)
        if (seen.insert(row->id).second)
            order.emplace_back(split(row->id).value_or(std::pair(row->id, 0)), &*row);
    std::sort(order.begin(), order.end());
    std::string text;
    for (const auto& [key, row] : order) text.append(row->text).append("\n");
    return text;
}

Failure write_results(const std::filesystem::path& path, std::vector<Row> rows) {
    const auto text = results_text(std::move(rows));
    std::error_code error;
    if (path.has_parent_path()) std::filesystem::create_directories(path.parent_path(), error);
    if (error) return bad_file("write", path, error.value());
    auto part = path;
    part += ".part";
    errno = 0;
    std::ofstream file(part, std::ios::binary | std::ios::trunc);
    file << text;
    file.close();
    if (!file) return bad_file("write", part, errno);
    std::filesystem::rename(part, path, error);
    if (error) return bad_file("write", path, error.value());
    return {};
}

} // namespace evalrt::bfcl
