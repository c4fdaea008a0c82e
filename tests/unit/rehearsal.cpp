#include "examples/evalrt/rehearsal.hpp"

#include "support/catch.hpp"
#include "temporary_folder.hpp"

#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <boost/json/value.hpp>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <fstream>

#include <unistd.h>

using namespace evalrt;
using namespace evalrt::program;
namespace json = boost::json;
namespace fs = std::filesystem;

namespace {

Request request(std::string body, std::string endpoint = "/v1/chat/completions") {
    Request it;
    it.endpoint = std::move(endpoint);
    it.body = std::move(body);
    return it;
}

Response answer(std::string text) {
    Response it;
    it.text = text;
    it.body = std::move(text);
    return it;
}

json::value parsed(const Response& response) {
    return json::parse(json::string_view(response.body.data(), response.body.size()));
}

void learn(Rehearsal& rehearsal, const std::string& text) {
    int i = 0;
    for (const auto& it : rehearsal.take_wanted())
        rehearsal.learn(it, answer(text + std::to_string(++i)));
}

struct Folder {
    Folder() {
        auto name = (fs::temp_directory_path() / "rehearsal-XXXXXX").string();
        if (!::mkdtemp(name.data())) throw std::runtime_error("no folder");
        path = fs::canonical(name);
    }
    ~Folder() { fs::remove_all(path); }
    fs::path write(const std::string& name, const std::string& text) const {
        fs::create_directories((path / name).parent_path());
        std::ofstream(path / name) << text;
        return path / name;
    }
    fs::path path;
};

const std::string marker = "evalrt-placeholder-0123456789abcdef13579bdf02468ace";

std::string read(const fs::path& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
}

} // namespace

TEST_CASE("what a round asked is answered in the next, by endpoint and body") {
    Rehearsal rehearsal(marker);
    rehearsal.begin();
    CHECK(rehearsal.rehearse(request("{\"a\": 1}")).text == marker);
    rehearsal.rehearse(request("{\"a\": 1}", "/v1/messages"));
    const auto wanted = rehearsal.take_wanted();
    REQUIRE(wanted.size() == 2);
    CHECK(wanted[0].request.body.view() == "{\"a\": 1}");
    CHECK(wanted[1].request.endpoint == "/v1/messages");
    rehearsal.learn(wanted[0], answer("chat"));
    rehearsal.learn(wanted[1], answer("message"));
    CHECK(rehearsal.learned() == 2);
    rehearsal.begin();
    CHECK(rehearsal.known(request("{\"a\": 1}", "/v1/messages"))->text == "message");
    CHECK(rehearsal.known(request("{\"a\": 1}"))->text == "chat");
    CHECK(!rehearsal.known(request("{\"a\":1}")));
    CHECK(!rehearsal.known(request("{\"a\": 1}"))); // it was asked once
}

TEST_CASE("repeated requests get their answers in the order of occurrence, each once") {
    Rehearsal rehearsal(marker);
    rehearsal.begin();
    for (const auto body : {"{}", "{\"b\": 1}", "{}", "{}"}) rehearsal.rehearse(request(body));
    learn(rehearsal, "t");
    for (int round = 0; round < 2; ++round) {
        rehearsal.begin();
        CHECK(rehearsal.known(request("{}"))->text == "t1");
        CHECK(rehearsal.known(request("{}"))->text == "t3");
        CHECK(rehearsal.known(request("{\"b\": 1}"))->text == "t2");
        CHECK(rehearsal.known(request("{}"))->text == "t4");
        CHECK(!rehearsal.known(request("{}")));
    }
}

TEST_CASE("a second rehearsal wants what the first could not know, and not what it made up") {
    Rehearsal rehearsal(marker);
    rehearsal.begin();
    const auto made_up = rehearsal.rehearse(request("{\"turn\": 1}")).text;
    rehearsal.rehearse(request("{\"turn\": \"" + made_up + "\"}"));
    CHECK(rehearsal.from_placeholder(request("{\"turn\": \"so: " + made_up + "\"}")));
    learn(rehearsal, "t");
    CHECK(rehearsal.learned() == 1);
    rehearsal.begin();
    CHECK(rehearsal.rehearse(request("{\"turn\": 1}")).text == "t1");
    CHECK(rehearsal.rehearse(request("{\"turn\": \"t1\"}")).text == marker);
    const auto wanted = rehearsal.take_wanted();
    REQUIRE(wanted.size() == 1);
    CHECK(wanted[0].request.body.view() == "{\"turn\": \"t1\"}");
}

TEST_CASE("a failure is not learned, and the answers around it keep their places") {
    Rehearsal rehearsal(marker);
    rehearsal.begin();
    for (int i = 0; i < 3; ++i) rehearsal.rehearse(request("{}"));
    auto wanted = rehearsal.take_wanted();
    rehearsal.learn(wanted[2], answer("third"));
    Response failed;
    failed.outcome = Errc::overloaded;
    rehearsal.learn(wanted[1], failed);
    rehearsal.learn(wanted[0], answer("first"));
    rehearsal.begin();
    CHECK(rehearsal.known(request("{}"))->text == "first");
    CHECK(!rehearsal.known(request("{}")));
    CHECK(rehearsal.known(request("{}"))->text == "third");
    rehearsal.begin();
    for (int i = 0; i < 3; ++i) rehearsal.rehearse(request("{}"));
    wanted = rehearsal.take_wanted();
    REQUIRE(wanted.size() == 1);
    CHECK(wanted[0].occurrence == 1);
}

TEST_CASE("who asks the same for ever is stopped, and asks it once") {
    Rehearsal rehearsal(marker);
    rehearsal.begin();
    rehearsal.rehearse(request("{\"a\": 1}"));
    unsigned asked = 0;
    while (!rehearsal.stuck()) {
        rehearsal.rehearse(request("{}"));
        REQUIRE(++asked <= Rehearsal::idle_limit + 1);
    }
    CHECK(asked > 500); // so many samples of one question may be meant
    CHECK(rehearsal.take_wanted().size() == 2);
    rehearsal.begin();
    CHECK(!rehearsal.stuck());
    for (asked = 0; !rehearsal.stuck(); ++asked) {
        REQUIRE(asked <= Rehearsal::idle_limit);
        rehearsal.rehearse(
            request("{\"n\": \"" + marker + "\", \"i\": " + std::to_string(asked) + "}"));
    }
    CHECK(rehearsal.take_wanted().empty());
}

TEST_CASE("a piece of a placeholder is recognised, and what is not one is not") {
    const Traces traces(marker);
    const auto random = marker.substr(19);
    for (const auto& it :
         {marker, marker.substr(0, 20), random, random.substr(0, 12), random.substr(20),
          random.substr(7, 12), "EVALRT-PLACEHOLDER-" + std::string("01"),
          std::string("evalrt_placeholder_f"), std::string("e v a l r t - place holder - 0"),
          std::string("012345\\n6789ab"), std::string("0123 4567\n89AB")})
        for (std::size_t before = 0; before < 12; ++before) {
            INFO(it << ' ' << before);
            CHECK(traces.in(std::string(before, 'x') + it + "x"));
            CHECK(traces.in(std::string(65530 + before, '0') +
                            it)); // across the pieces it is read in
            Traces::Search search(traces);
            bool found = false;
            for (const char c : std::string(before, '.') + it)
                found = search.found(std::string_view(&c, 1));
            CHECK(found);
        }
    for (const auto it :
         {"", "evalrt-placeholder-", "the evalrt placeholder code", "evalrt-placeholder-{:08x}",
          "0123456789a", "123456789ab-", "3b2f0123456789a8", "evalrt-placeholder"})
        CHECK(!traces.in(it));
    std::string hex;
    for (unsigned i = 0, x = 1; i < 300'000; ++i)
        hex += "0123456789abcdef"[(x = x * 1103515245 + 12345) >> 28];
    CHECK(!traces.in(hex));
}

TEST_CASE("another rehearsal's placeholder is one, but not of our own") {
    const Traces traces(marker);
    const auto own = [&](const std::string& text) {
        return Traces::Search(traces, true).found(text);
    };
    CHECK(traces.in("evalrt-placeholder-fedcba98765432100000000000000000"));
    CHECK(!own("evalrt-placeholder-fedcba98765432100000000000000000"));
    CHECK(!own("evalrt-placeholder-012fedcba9876543"));
    CHECK(own(marker.substr(0, 23)));
    CHECK(own(marker.substr(25, 12)));
}

TEST_CASE("how much was asked is counted without repetitions and what was made up") {
    Rehearsal rehearsal(marker);
    rehearsal.begin();
    CHECK(rehearsal.most_asked() == 0);
    for (const auto body : {"{}", "{\"b\": 1}", "{}"}) rehearsal.rehearse(request(body));
    rehearsal.rehearse(request("{\"c\": \"" + marker + "\"}"));
    CHECK(rehearsal.most_asked() == 2);
    learn(rehearsal, "t");
    rehearsal.begin();
    for (const auto body : {"{}", "{}", "{}", "{\"c\": 1}", "{\"d\": 1}"})
        rehearsal.rehearse(request(body));
    CHECK(rehearsal.most_asked() == 3);
    rehearsal.begin();
    rehearsal.rehearse(request("{}"));
    CHECK(rehearsal.most_asked() == 3);
}

TEST_CASE("no two markers are the same") {
    const auto one = Rehearsal::new_marker(), two = Rehearsal::new_marker();
    CHECK(one != two);
    CHECK(one.size() > 40);
}

TEST_CASE("a placeholder has the shape that is asked for, and the marker in every text") {
    const auto chat = parsed(placeholder(request(R"({"model": "m", "n": 2})"), "MARK"));
    CHECK(chat.at("object").as_string() == "chat.completion");
    CHECK(chat.at("model").as_string() == "m");
    REQUIRE(chat.at("choices").as_array().size() == 2);
    CHECK(chat.at_pointer("/choices/1/message/content").as_string() == "MARK");
    CHECK(chat.at_pointer("/choices/1/index").as_int64() == 1);

    const auto format = placeholder(request(R"({"response_format": {"type": "json_schema",
        "json_schema": {"schema": {"type": "object", "properties": {"a": {"type": "string"},
        "b": {"type": "array", "items": {"type": "integer"}}, "c": {"enum": ["x", "y"]},
        "d": {"anyOf": [{"type": "null"}]}}}}}})"),
                                    "MARK");
    CHECK(json::serialize(json::parse(format.text)) == R"({"a":"MARK","b":[0],"c":"x","d":null})");
    CHECK(parsed(format).at_pointer("/choices/0/message/content").as_string() ==
          json::string_view(format.text));

    const auto call = parsed(placeholder(request(R"({"tools": [
        {"type": "function", "function": {"name": "a"}},
        {"type": "function", "function": {"name": "b", "parameters": {"properties":
            {"q": {"type": "string"}}}}}],
        "tool_choice": {"type": "function", "function": {"name": "b"}}})"),
                                         "MARK"));
    CHECK(call.at_pointer("/choices/0/finish_reason").as_string() == "tool_calls");
    const auto& function = call.at_pointer("/choices/0/message/tool_calls/0/function");
    CHECK(function.at("name").as_string() == "b");
    CHECK(function.at("arguments").as_string() == R"({"q": "MARK"})");

    const auto message =
        parsed(placeholder(request(R"({"messages": []})", "/v1/messages"), "MARK"));
    CHECK(message.at_pointer("/content/0/text").as_string() == "MARK");
    CHECK(message.at("stop_reason").as_string() == "end_turn");
    const auto use =
        parsed(placeholder(request(R"({"tools": [{"name": "a", "input_schema": {"type": "object"}}],
                    "tool_choice": {"type": "any"}})",
                                   "/v1/messages"),
                           "MARK"));
    CHECK(use.at_pointer("/content/0/name").as_string() == "a");
    CHECK(use.at("stop_reason").as_string() == "tool_use");
}

TEST_CASE("a placeholder keeps to a schema's numbers, counts and references") {
    const auto sample = [](const std::string& schema) {
        const auto body =
            R"({"response_format": {"type": "json_schema", "json_schema": {"schema": )";
        const auto answer = placeholder(request(body + schema + "}}}"), "M");
        INFO(schema << ' ' << answer.text);
        return json::serialize(json::parse(answer.text));
    };
    for (
        const auto& [schema, wanted] : std::vector<std::pair<std::string, std::string>>{
            {R"({"type": "integer"})", "0"},
            {R"({"type": "integer", "minimum": 1, "maximum": 10})", "1"},
            {R"({"type": "integer", "minimum": 1.5})", "2"},
            {R"({"type": "integer", "exclusiveMinimum": 5})", "6"},
            {R"({"type": "integer", "minimum": 5, "exclusiveMinimum": true})", "6"},
            {R"({"type": "integer", "maximum": -2.5})", "-3"},
            {R"({"type": "integer", "exclusiveMaximum": 0})", "-1"},
            {R"({"type": "integer", "minimum": -5, "maximum": 5})", "0"},
            {R"({"type": "array", "items": {"type": "integer"}})", "[0]"},
            {R"({"type": "array", "items": {"type": "string"}, "minItems": 3})",
             R"(["M","M","M"])"},
            {R"({"type": "array", "minItems": 2})", R"(["M","M"])"},
            {R"({"type": "array", "items": {"type": "integer"}, "maxItems": 0})", "[]"},
            {R"({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]})",
             R"([0,"M"])"},
            {R"({"type": "object", "additionalProperties": {"type": "integer"}})",
             R"({"placeholder":0})"},
            {R"({"type": "object", "additionalProperties": false})", "{}"},
            {R"({"type": "object"})", R"({"placeholder":"M"})"},
            {R"({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {
                 "next": {"$ref": "#/$defs/a"}, "v": {"type": "number"}}, "required": ["v"]}}})",
             R"({"v":0})"},
            {R"({"properties": {"v": {"type": "null"}, "more": {"type": "array", "items":
                 {"$ref": "#"}}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}})",
             R"({"v":null,"more":[{"v":null,"more":[],"next":null}],"next":{"v":null,"more":[],"next":null}})"},
            {R"({"$ref": "#"})", R"("M")"},
            {R"({"$ref": "elsewhere.json"})", R"("M")"},
            {R"({"properties": {"a": {"type": "boolean"}}, "anyOf": [{"required": ["a"]}]})",
             R"({"a":false})"}})
        CHECK(sample(schema) == wanted);
    const auto between =
        json::parse(sample(R"({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1})"));
    CHECK((between.to_number<double>() > 0 && between.to_number<double>() < 1));
    std::string twice = R"({"type": "null"})"; // too large to be written out
    for (int i = 0; i < 12; ++i)
        twice = R"({"type": "array", "minItems": 1000, "items": )" + twice + "}";
    CHECK(sample(twice).size() < (1 << 20));
}

TEST_CASE("that nothing is asked for a minute is said when it is so") {
    const Silence::Time start;
    Silence silence(start);
    CHECK(!silence.to_be_said(start + std::chrono::seconds(59)));
    silence.asked(start + std::chrono::seconds(59));
    CHECK(!silence.to_be_said(start + std::chrono::seconds(118)));
    CHECK(silence.due() == start + std::chrono::seconds(119));
    CHECK(silence.to_be_said(silence.due()));
}

TEST_CASE("placeholders of completions: one for each prompt, one score for each token") {
    const auto texts = parsed(
        placeholder(request(R"({"prompt": ["a", "b"], "n": 2})", "/v1/completions"), "MARK"));
    REQUIRE(texts.at("choices").as_array().size() == 4);
    CHECK(texts.at_pointer("/choices/3/text").as_string() == "MARK");
    const auto scores = parsed(placeholder(
        request(R"({"prompt": [[1, 2, 3]], "echo": true, "logprobs": 1})", "/v1/completions"),
        "MARK"));
    REQUIRE(scores.at("choices").as_array().size() == 1);
    const auto& list = scores.at_pointer("/choices/0/logprobs/token_logprobs").as_array();
    REQUIRE(list.size() == 4); // and one that is generated
    CHECK(list[0].is_null());
    CHECK(scores.at_pointer("/choices/0/logprobs/top_logprobs").as_array().size() == 4);
    const auto tokens =
        parsed(placeholder(request(R"({"prompt": [1, 2]})", "/v1/completions"), "MARK"));
    CHECK(tokens.at("choices").as_array().size() == 1);
}

TEST_CASE("a copy has what the folder has, and goes away") {
    Folder folder, outside;
    folder.write("a/b.txt", "text");
    outside.write("data", "far");
    fs::create_symlink("a/b.txt", folder.path / "near");
    fs::create_symlink(fs::path("..") / outside.path.filename() / "data", folder.path / "far");
    fs::permissions(folder.write("run.sh", "x"), fs::perms::owner_all);
    fs::path copied;
    {
        ThrowAway copy;
        REQUIRE(copy.make(folder.path) == "");
        copied = copy.folder();
        CHECK(copied.filename() == folder.path.filename());
        CHECK(read(copied / "a/b.txt") == "text");
        CHECK(fs::last_write_time(copied / "a/b.txt") ==
              fs::last_write_time(folder.path / "a/b.txt"));
        CHECK(fs::status(copied / "run.sh").permissions() == fs::perms::owner_all);
        std::ofstream(copied / "near") << "changed";
        CHECK(read(folder.path / "a/b.txt") == "text");
        CHECK(read(copied / "far") == "far");
        CHECK(fs::is_directory(copy.temporary()));
        fs::permissions(copied / "a", fs::perms::owner_read | fs::perms::owner_exec);
    }
    CHECK(!fs::exists(copied));
}

TEST_CASE("what cannot be copied is said with what to do") {
    ThrowAway root, gone;
    CHECK(
        root.make("/").ends_with("run the command from the folder that it writes its results to"));
    CHECK(gone.make("").ends_with("change to one that is there"));
}

TEST_CASE("temporary folders are made where TMPDIR says, or in /tmp") {
    const char* set = std::getenv("TMPDIR");
    const std::string before = set ? set : "";
    Folder folder;
    std::error_code ec;
    const auto made = [&](const std::string& where) {
        ::setenv("TMPDIR", where.c_str(), 1);
        const auto path = detail::temporary_folder("evalrt-test", ec);
        std::error_code ignored;
        if (!path.empty()) fs::remove(path, ignored);
        return path.substr(0, path.rfind('-'));
    };
    CHECK(made(folder.path.string()) == folder.path.string() + "/evalrt-test");
    CHECK(made("") == "/tmp/evalrt-test");
    CHECK(!ec);
    CHECK(made(folder.path.string() + "/none").empty());
    CHECK(ec == std::errc::no_such_file_or_directory);
    if (set)
        ::setenv("TMPDIR", before.c_str(), 1);
    else
        ::unsetenv("TMPDIR");
}

TEST_CASE("what names the folder names the copy, and nothing else does") {
    Folder folder;
    ThrowAway copy;
    REQUIRE(copy.make(folder.path) == "");
    const auto from = folder.path.string(), to = copy.folder().string();
    CHECK(copy.moved(from) == to);
    CHECK(copy.moved("--out=" + from + "/x:" + from) == "--out=" + to + "/x:" + to);
    CHECK(copy.moved(from + "2") == from + "2");
    CHECK(copy.moved("/other" + from) == "/other" + from);
    const auto parent = folder.path.parent_path().string();
    CHECK(copy.moved("../x/y") == parent + "/x/y");
    CHECK(copy.moved("--in=../x") == "--in=" + parent + "/x");
    CHECK(copy.moved("../" + folder.path.filename().string() + "/a") == to + "/a");
    CHECK(copy.moved("..x=a/../b") == "..x=a/../b");
    // A link to the folder is a name of it, if it is given as one.
    Folder other;
    const auto link = (other.path / "link").string();
    fs::create_symlink(folder.path, link);
    ThrowAway by_link, by_none;
    REQUIRE(by_link.make(folder.path, link) == "");
    CHECK(by_link.moved("--out=" + link + "/x") == "--out=" + by_link.folder().string() + "/x");
    CHECK(by_link.moved(from) == by_link.folder().string());
    CHECK(by_link.moved(link + "2") == link + "2");
    REQUIRE(by_none.make(folder.path, other.path) == "");
    CHECK(by_none.moved(other.path) == other.path);
}

TEST_CASE("a folder that has changed is seen to, but for our own files") {
    using Files = std::vector<std::string>;
    Folder folder;
    const auto file = folder.write("a", "1").string();
    folder.write("journal", "1");
    const auto before = look_at(folder.path);
    const auto found = [&](const Files& own) {
        return others(changed(before, look_at(folder.path)), own);
    };
    CHECK(found({}).empty());
    folder.write("journal-wal", "1");
    CHECK(found({folder.path / "journal"}).empty());
    CHECK(found({}) == Files{folder.path / "journal-wal"});
    folder.write("a", "22");
    CHECK(found({folder.path / "journal"}) == Files{file});
    fs::remove(file);
    CHECK(found({folder.path / "journal", ""}) == Files{file});
    CHECK(look_at(folder.path / "none").empty());
    CHECK(look_at(folder.path / "journal").size() == 1);
}

TEST_CASE("what was written is found behind links and in other places, each file once") {
    Folder folder, outside;
    const auto here = folder.path.string(), there = outside.path.string();
    using Files = std::vector<std::string>;
    const auto found = [&](const Files& names = {}, std::size_t most = 1000) {
        std::vector<Place> places;
        for (const auto& it : names) places.push_back({it, most});
        auto written = written_since(0, {folder.path, most}, places);
        std::sort(written.files.begin(), written.files.end());
        return written;
    };
    folder.write("sub/a", "1");
    outside.write("deep/b", "1");
    outside.write("f", "1");
    fs::create_symlink(folder.path, outside.path / "back");
    fs::create_symlink(".", folder.path / "loop");
    fs::create_symlink("sub", folder.path / "latest");
    fs::create_symlink("/", folder.path / "all");
    fs::create_symlink("/proc/self", folder.path / "self");
    fs::create_symlink("none", folder.path / "dangling");
    CHECK(look_at(folder.path).size() == 1);
    CHECK(found().files == Files{here + "/sub/a"});
    fs::create_symlink(outside.path / "f", folder.path / "one");
    CHECK(found().files == Files{here + "/one", here + "/sub/a"});
    fs::create_symlink(outside.path, folder.path / "out");
    CHECK(found().files.size() == 3);
    CHECK(found().cut.empty());
    fs::remove(folder.path / "one");
    CHECK(found().files == Files{here + "/out/deep/b", here + "/out/f", here + "/sub/a"});
    // Behind a link that another place has in it, and by the name without a link.
    Folder third;
    third.write("c", "1");
    fs::create_symlink(third.path, outside.path / "far");
    Files all{here + "/sub/a", there + "/deep/b", there + "/f", there + "/far/c"};
    std::sort(all.begin(), all.end());
    CHECK(found({there}).files == all);

    // Each place has its own share, and where that ends is told.
    for (int i = 0; i < 50; ++i) third.write("many/" + std::to_string(i), "1");
    fs::remove(outside.path / "far");
    const auto cut = found({third.path, there}, 20);
    CHECK(cut.cut == Files{third.path});
    CHECK(std::count(cut.files.begin(), cut.files.end(), there + "/deep/b") == 1);
    // Also one that is in another.
    for (int i = 0; i < 50; ++i) third.write("deep/er/" + std::to_string(i), "1");
    const auto nested = found({third.path, third.path / "deep"}, 20).files;
    CHECK(std::count_if(nested.begin(), nested.end(),
                        [](const auto& it) { return it.find("/deep/er/") != it.npos; }) >= 18);
    // Of the folder itself all is looked at, not all behind its links.
    fs::create_symlink(third.path, folder.path / "third");
    for (int i = 0; i < 50; ++i) folder.write("own/" + std::to_string(i), "1");
    const auto own = found({}, 20);
    CHECK(own.cut == Files{here});
    CHECK(std::count(own.files.begin(), own.files.end(), here + "/own/49") == 1);

    // What is older is left alone, but for a copy of something old.
    const auto later = std::time(nullptr) + 3600;
    CHECK(written_since(later, {folder.path}).files.empty());
    const auto old = fs::file_time_type::clock::now() - std::chrono::hours(1000);
    fs::last_write_time(outside.path / "f", old);
    const auto since = std::time(nullptr) - 600;
    const auto recent = written_since(since, {folder.path}, {{outside.path / "f"}}).files;
    CHECK(std::count(recent.begin(), recent.end(), there + "/f") == 1);
}

TEST_CASE("files with something of a placeholder in them are found") {
    Folder folder;
    const Traces traces(marker);
    const auto before = Rehearsal::new_marker() + "\n"; // left by another one
    const auto clean =
        folder.write("clean", before + std::string(200'000 - before.size(), 'x')).string();
    const auto bad = folder.write("bad", std::string(100'000, 'x') + marker.substr(0, 30)).string();
    std::uintmax_t most = 1'000'000;
    CHECK(with_traces({clean, folder.path / "gone", bad}, traces, most) ==
          std::vector<std::string>{bad});
    CHECK(most == 1'000'000 - 200'000 - 100'030);
    CHECK(with_traces({clean, bad}, traces, most = 100'100).size() == 1); // the smaller one
    CHECK(with_traces({bad, clean}, traces, most = 1000).empty());
    CHECK(most == 0);
    CHECK(with_traces({"/proc/self/status"}, traces, most = 1000).empty());
    CHECK(most == 1000);
}
