#include "evalrt/journal.hpp"

#include "support/catch.hpp"
#include "support/scripted_backend.hpp"

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/use_future.hpp>

#include <sqlite3.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <list>
#include <random>
#include <set>

#include <unistd.h>

namespace fs = std::filesystem;
namespace asio = boost::asio;
using evalrt::Errc;
using evalrt::error_code;
using evalrt::Failure;
using evalrt::Journal;
using evalrt::JournalErrc;
using evalrt::JournalItem;
using evalrt::JournalMode;
using evalrt::JournalOptions;
using evalrt::JournalRun;
using evalrt::JournalSummary;
using evalrt::Request;
using evalrt::Response;
using evalrt::tests::ScriptedBackend;

namespace {

struct Folder {
    Folder() {
        char name[] = "/tmp/evalrt-journal-XXXXXX";
        path = ::mkdtemp(name);
    }
    ~Folder() {
        std::error_code ignored;
        fs::remove_all(path, ignored);
    }
    std::string operator/(const char* name) const { return path + "/" + name; }
    std::string path;
};

Request question(const std::string& text, const char* temperature = "0") {
    Request request;
    request.body = R"({"model": "m", "temperature": )" + std::string(temperature) +
                   R"(, "messages": [{"role": "user", "content": ")" + text + R"("}]})";
    request.name = "name of " + text;
    return request;
}

Response answer_to(const Request& request) {
    const std::string body(request.body.view());
    Response response;
    response.status = 200;
    response.text = "answer \"to\" \xC3\xA9 " + std::to_string(std::hash<std::string>()(body));
    response.finish_reason = "stop";
    response.request_id = "id-1";
    response.body = R"({"id": "id-1", "choices": [{"finish_reason": "stop", "text": ")"
                    "answer \\\"to\\\" \xC3\xA9 " +
                    std::to_string(std::hash<std::string>()(body)) + R"("}]})";
    response.usage = {10, 5, 3};
    response.timing.queued = evalrt::Timing::Millis(1.5);
    response.timing.first_text = evalrt::Timing::Millis(2.25);
    response.timing.last_text = evalrt::Timing::Millis(4.125);
    response.timing.total = evalrt::Timing::Millis(5);
    response.attempts = 2;
    response.expected_cached = 4;
    response.maximum_cached = 6;
    return response;
}

struct Asked {
    asio::cancellation_signal cancel;
    std::string text;
    int completions = 0;
    error_code code;
    Response response;
};

JournalRun run_of(std::string model = "m", std::string version = "1.0") {
    JournalRun run;
    run.identity = {{"backend", "mlx-server"}, {"model", std::move(model)}};
    run.server_version = std::move(version);
    return run;
}

// A process with a journal: opened, begun, in front of a scripted backend that answers at once.
struct Session {
    explicit Session(JournalOptions options_, JournalRun run = run_of()) : options(options_) {
        options.on_failure = [this](Failure failure) { broken.push_back(failure.detail); };
        journal = std::make_unique<Journal>(io.get_executor(), options);
        server.on_call = [this](int call) {
            if (!hold) server.end(call, reply(server.pending.at(call).request));
        };
        if (step(journal->async_open(asio::use_future)))
            step(journal->async_begin(std::move(run), asio::use_future));
        journal->connect(server);
    }
    explicit Session(const std::string& path, JournalRun run = run_of())
        : Session(at(path), std::move(run)) {}

    static JournalOptions at(const std::string& path) {
        JournalOptions it;
        it.path = path;
        return it;
    }

    bool step(std::future<std::string> done) {
        io.restart();
        io.run();
        try {
            done.get();
        } catch (const boost::system::system_error& error) {
            code = error.code();
        }
        return !code;
    }

    // Its words too, which a future leaves out.
    std::string words_of_begin(JournalRun run) {
        std::string text;
        journal->async_begin(std::move(run), [&](error_code ec, std::string words) {
            code = ec;
            text = std::move(words);
        });
        go();
        return text;
    }

    Asked& ask(Request request) {
        auto& asked = all.emplace_back();
        journal->async_complete(
            std::move(request), [&](std::string_view piece) { asked.text += piece; },
            asio::bind_cancellation_slot(asked.cancel.slot(),
                                         [&](error_code ec, Response response) {
                                             ++asked.completions;
                                             asked.code = ec;
                                             asked.response = std::move(response);
                                         }));
        CHECK(asked.completions == 0); // never inside the call
        return asked;
    }
    Response get(const Request& request) {
        auto& asked = ask(request);
        go();
        REQUIRE(asked.completions == 1);
        CHECK(bool(asked.code) == bool(asked.response.outcome));
        return asked.response;
    }
    void go() {
        io.restart();
        io.run();
    }
    /// Runs what is ready.
    void poll() {
        io.restart();
        io.poll();
    }

    asio::io_context io;
    ScriptedBackend server{io.get_executor()};
    std::function<Response(const Request&)> reply = answer_to;
    bool hold = false;
    JournalOptions options;
    std::vector<std::string> broken;
    error_code code;
    std::list<Asked> all;
    std::unique_ptr<Journal> journal;
};

Response failure(Errc errc) {
    Response response;
    response.outcome = errc;
    response.status = errc == Errc::rejected ? 400 : 0;
    response.detail = "in the server's words";
    if (errc == Errc::rejected) response.body = R"({"error": "no"})";
    response.attempts = 3;
    return response;
}

void check_same(const Response& a, const Response& b) {
    CHECK(a.outcome == b.outcome);
    CHECK(a.status == b.status);
    CHECK(a.body == b.body);
    CHECK(a.text == b.text);
    CHECK(a.finish_reason == b.finish_reason);
    CHECK(a.request_id == b.request_id);
    CHECK(a.detail == b.detail);
    CHECK(a.attempts == b.attempts);
    CHECK(a.usage.prompt_tokens == b.usage.prompt_tokens);
    CHECK(a.usage.cached_tokens == b.usage.cached_tokens);
    CHECK(a.usage.completion_tokens == b.usage.completion_tokens);
    CHECK(a.expected_cached == b.expected_cached);
    CHECK(a.maximum_cached == b.maximum_cached);
    CHECK(a.timing.queued == b.timing.queued);
    CHECK(a.timing.first_text == b.timing.first_text);
    CHECK(a.timing.last_text == b.timing.last_text);
    CHECK(a.timing.total == b.timing.total);
}

std::vector<JournalItem> items_of(const std::string& path, JournalSummary& summary) {
    std::vector<JournalItem> items;
    const auto failed = evalrt::read_journal(
        path, summary, [&](const JournalItem& item) { items.push_back(item); });
    INFO(failed.detail);
    REQUIRE(!failed);
    return items;
}

// One statement, and the first number that it gives.
std::int64_t sql(const std::string& path, const char* text) {
    sqlite3* db = nullptr;
    REQUIRE(sqlite3_open(path.c_str(), &db) == SQLITE_OK);
    sqlite3_stmt* statement = nullptr;
    REQUIRE(sqlite3_prepare_v2(db, text, -1, &statement, nullptr) == SQLITE_OK);
    std::int64_t number = -1;
    if (sqlite3_step(statement) == SQLITE_ROW) number = sqlite3_column_int64(statement, 0);
    sqlite3_finalize(statement);
    sqlite3_close(db);
    return number;
}

std::string slurp(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}
void spew(const std::string& path, std::string_view bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
}

} // namespace

TEST_CASE("what was answered is not asked again, and comes back as it was") {
    Folder folder;
    const auto path = folder / "j";
    Response first;
    {
        Session session(path);
        REQUIRE(!session.code);
        CHECK(!session.journal->resumed());
        first = session.get(question("a"));
        CHECK(!first.from_journal);
        check_same(first, answer_to(question("a")));
    }
    Session session(path);
    REQUIRE(!session.code);
    CHECK(session.journal->resumed());
    const auto again = session.get(question("a"));
    CHECK(session.server.calls == 0);
    CHECK(again.from_journal);
    check_same(again, first);
    CHECK(!session.get(question("b")).from_journal);
    CHECK(session.server.calls == 1);
}

TEST_CASE("bodies of any length come back byte for byte, also where the text is not in them") {
    Folder folder;
    const auto path = folder / "j";
    const auto reply = [](const Request& request) {
        auto response = answer_to(request);
        const auto size = std::stoul(request.name.substr(8));
        response.body = std::string(size, 'x');
        for (std::size_t i = 0; i < size; ++i) response.body[i] = char('a' + i % 23);
        return response;
    };
    const auto sizes = {1, 1999, 2000, 2001, 4000, 15000, 300000, 5000000};
    {
        Session session(path);
        session.reply = reply;
        for (const auto size : sizes) session.get(question(std::to_string(size)));
    }
    Session session(path);
    for (const auto size : sizes) {
        const auto request = question(std::to_string(size));
        check_same(session.get(request), reply(request));
    }
    CHECK(session.server.calls == 0);
}

TEST_CASE("each occurrence of an equal request is an item of its own") {
    Folder folder;
    const auto path = folder / "j";
    int n = 0;
    const auto counted = [&](const Request& request) {
        auto response = answer_to(request);
        response.text = std::to_string(++n);
        return response;
    };
    {
        Session session(path);
        session.reply = counted;
        for (int i = 1; i <= 3; ++i) CHECK(session.get(question("a")).text == std::to_string(i));
    }
    Session session(path);
    session.reply = counted;
    for (int i = 1; i <= 4; ++i) CHECK(session.get(question("a")).text == std::to_string(i));
    CHECK(session.server.calls == 1);
    session.journal->rewind();
    for (int i = 1; i <= 4; ++i) CHECK(session.get(question("a")).text == std::to_string(i));
    CHECK(session.server.calls == 1);
}

TEST_CASE("a failure is kept with its class and tried again by the next session") {
    Folder folder;
    const auto path = folder / "j";
    const auto classes = {Errc::unreachable,      Errc::exited,     Errc::rejected,
                          Errc::rate_limited,     Errc::overloaded, Errc::auth,
                          Errc::context_too_long, Errc::malformed,  Errc::truncated,
                          Errc::timed_out,        Errc::poison};
    {
        Session session(path);
        for (const auto errc : classes) {
            session.reply = [&](const Request&) { return failure(errc); };
            check_same(session.get(question(std::string(name(errc)))), failure(errc));
        }
    }
    JournalSummary summary;
    auto items = items_of(path, summary);
    REQUIRE(items.size() == classes.size());
    std::size_t i = 0;
    for (const auto errc : classes) CHECK(items[i++].response.value().outcome == errc);

    Session session(path);
    for (const auto errc : classes) {
        CAPTURE(std::string(name(errc)));
        const auto response = session.get(question(std::string(name(errc))));
        const bool final = errc == Errc::context_too_long || errc == Errc::poison;
        CHECK(response.from_journal == final);
        if (final)
            check_same(response, failure(errc));
        else
            CHECK(!response.outcome);
    }
    CHECK(session.server.calls == int(classes.size()) - 2);
    items = items_of(path, summary);
    CHECK(items.size() == classes.size());
    CHECK(summary.sessions == 2);
    CHECK(std::count_if(items.begin(), items.end(), [](const auto& item) {
              return item.response && !item.response->outcome;
          }) == int(classes.size()) - 2);
}

TEST_CASE("what was cancelled was not run") {
    Folder folder;
    const auto path = folder / "j";
    {
        Session session(path);
        session.hold = true;
        for (const auto type : {asio::cancellation_type::terminal, asio::cancellation_type::partial,
                                asio::cancellation_type::total}) {
            auto& asked = session.ask(question("a"));
            session.poll();
            asked.cancel.emit(type);
            session.go();
            CHECK(asked.completions == 1);
            CHECK(asked.code == asio::error::operation_aborted);
            asked.cancel.emit(type); // a late signal finds nobody
        }
        CHECK(session.server.cancelled == 3);
    }
    JournalSummary summary;
    const auto items = items_of(path, summary);
    REQUIRE(items.size() == 3);
    CHECK(!items[0].response);
    CHECK(items[0].name == "name of a");
    Session session(path);
    session.get(question("a"));
    CHECK(session.server.calls == 1);
}

TEST_CASE("a cancellation slot may stay longer than the journal that never answered") {
    Folder folder;
    std::list<Asked> all;
    {
        Session session(folder / "j");
        session.hold = true;
        for (int i = 0; i < 3; ++i) session.ask(question("a"));
        session.poll();
        all.swap(session.all);
    }
    for (auto& asked : all) {
        asked.cancel.emit(asio::cancellation_type::terminal);
        CHECK(asked.completions == 0);
    }
}

TEST_CASE("one who waits for the journal can be cancelled") {
    Folder folder;
    const auto path = folder / "j";
    { Session(path).get(question("a")); }
    Session session(path);
    auto& first = session.ask(question("a"));  // being read
    auto& second = session.ask(question("a")); // asked
    session.hold = true;
    second.cancel.emit(asio::cancellation_type::terminal);
    first.cancel.emit(asio::cancellation_type::terminal);
    session.go();
    CHECK(first.completions == 1);
    CHECK(second.completions == 1);
}

TEST_CASE("an answer is on the disk before it is delivered") {
    Folder folder;
    const auto path = folder / "j";
    Session session(path);
    for (int i = 0; i < 20; ++i) {
        session.journal->async_complete(
            question(std::to_string(i)), {}, [&, i](error_code, Response) {
                const auto name = "name of " + std::to_string(i);
                const auto text = "SELECT count(*) FROM outcomes o JOIN items i ON i.id = o.item "
                                  "WHERE i.name = '" +
                                  name + "'";
                CHECK(sql(path, text.c_str()) == 1);
            });
    }
    session.go();
}

TEST_CASE("groups are as large as they may be, and no larger") {
    Folder folder;
    auto options = Session::at(folder / "j");
    options.group = 10;
    options.group_age =
        std::chrono::hours(1); // nobody waits that long: the last one ends the group
    Session session(options);
    session.hold = true;
    for (int i = 0; i < 25; ++i) session.ask(question(std::to_string(i)));
    session.poll();
    const auto done = [&] {
        return std::count_if(session.all.begin(), session.all.end(),
                             [](const auto& it) { return it.completions == 1; });
    };
    const auto end = [&](int from, int to) {
        for (int i = from; i < to; ++i) session.server.end(i, answer_to(question("x")));
    };
    end(0, 10); // full
    session.go();
    CHECK(done() == 10);
    end(10, 19);
    session.poll();
    CHECK(done() == 10);
    end(19, 25); // ten, and five who have nobody to wait for
    session.go();
    CHECK(done() == 25);
}

TEST_CASE("requests go on while a group is being committed") {
    Folder folder;
    const auto path = folder / "j";
    auto options = Session::at(path);
    options.group = 1;
    Session session(options);
    session.get(question("a"));
    sqlite3* other = nullptr; // holds up what the journal's thread does
    REQUIRE(sqlite3_open(path.c_str(), &other) == SQLITE_OK);
    REQUIRE(sqlite3_exec(other, "BEGIN IMMEDIATE", nullptr, nullptr, nullptr) == SQLITE_OK);
    session.hold = true;
    session.ask(question("b"));
    session.poll();
    session.server.end(1, answer_to(question("b")));
    session.poll();
    session.ask(question("c"));
    session.poll();
    CHECK(session.server.calls == 3);
    CHECK(session.all.front().completions == 1);
    CHECK(std::next(session.all.begin())->completions == 0); // it is not on the disk
    REQUIRE(sqlite3_exec(other, "ROLLBACK", nullptr, nullptr, nullptr) == SQLITE_OK);
    sqlite3_close(other);
    session.server.end(2, answer_to(question("c")));
    session.go();
    for (const auto& it : session.all) CHECK((it.completions == 1 && !it.code));
    CHECK(session.broken.empty());
}

TEST_CASE("a changed configuration is refused, in words, and the file stays") {
    Folder folder;
    const auto path = folder / "j";
    auto options = Session::at(path);
    options.settings = {{"max_tokens", "5"}};
    { Session(options).get(question("a")); }
    const auto before = slurp(path);
    {
        options.settings = {{"max_tokens", "6"}};
        Session session(options, run_of("other"));
        CHECK(session.code == JournalErrc::changed);
        const auto words = session.words_of_begin(run_of("other"));
        CHECK(session.code == JournalErrc::changed);
        CHECK_THAT(words, Catch::Contains(R"(model was "m" and is "other")") &&
                              Catch::Contains(R"(max_tokens was "5" and is "6")") &&
                              Catch::Contains("--journal-mode append"));
    }
    CHECK(slurp(path) == before);
    {
        options.settings = {{"max_tokens", "5"}};
        Session session(options, run_of("m", "2.0"));
        CHECK(session.code == JournalErrc::changed);
        CHECK_THAT(session.words_of_begin(run_of("m", "2.0")),
                   Catch::Contains(R"(server_version was "1.0" and is "2.0")"));
    }
    options.settings = {{"max_tokens", "6"}};
    options.mode = JournalMode::append;
    {
        Session session(options, run_of("other"));
        REQUIRE(!session.code);
        CHECK(!session.get(question("a")).from_journal); // of another model
    }
    // Both can be gone on with.
    options.mode = JournalMode::resume;
    CHECK(Session(options, run_of("other")).get(question("a")).from_journal);
    options.settings = {{"max_tokens", "5"}};
    CHECK(Session(options).get(question("a")).from_journal);
}

TEST_CASE("servers that are alike are one: a run goes on with any of their addresses") {
    Folder folder;
    const auto path = folder / "j";
    const auto at = [](std::vector<std::string> addresses, std::string kind = "") {
        auto run = run_of();
        run.addresses = std::move(addresses);
        run.server = std::move(kind);
        return run;
    };
    const std::string a = "http://a:1/v1", b = "http://b:1/v1", c = "http://c:1/v1";
    CHECK(!Session(path, at({a, b})).get(question("a")).from_journal);
    const auto refused = [&](const JournalRun& run) {
        Session session(path, run);
        CHECK(session.code == JournalErrc::changed);
        return session.words_of_begin(run);
    };
    // Nobody has said that c is like them.
    for (const auto& urls : {std::vector{c}, {a, c}})
        CHECK_THAT(refused(at(urls)),
                   Catch::Contains(R"(url was "http://a:1/v1 http://b:1/v1" and is "http://)"));
    CHECK_THAT(refused(run_of()), Catch::Contains(R"(b:1/v1" and is not set)"));
    CHECK(Session(path, at({b, "http://A:1/v1/"})).get(question("a")).from_journal);
    CHECK(Session(path, at({b})).get(question("a")).from_journal);
    // Another kind of server, or model, is another one at any address.
    CHECK(Session(path, at({a}, "vllm")).get(question("a")).from_journal);
    CHECK(Session(path, at({a})).get(question("a")).from_journal);
    CHECK_THAT(refused(at({a}, "llama-server")),
               Catch::Contains(R"(server was "vllm" and is "llama-server")"));
    // A new run is served what servers like its own have answered.
    auto options = Session::at(path);
    options.mode = JournalMode::append;
    CHECK(!Session(options, at({c})).get(question("a")).from_journal);
    CHECK(Session(options, at({b}, "vllm")).get(question("a")).from_journal);
}

TEST_CASE("a journal knows the server of the run that would be gone on with") {
    Folder folder;
    const auto path = folder / "j";
    auto run = run_of();
    run.addresses = {"http://a/v1"};
    run.server = "vllm";
    { Session(path, run).get(question("a")); }
    const auto ask = [&](JournalRun asked, evalrt::JournalKnown& out) {
        asio::io_context io;
        Journal opened(io.get_executor(), Session::at(path));
        error_code code;
        opened.async_open([&](error_code ec, const std::string&) {
            code = ec;
            if (!ec)
                opened.async_known(std::move(asked),
                                   [&](error_code ended, evalrt::JournalKnown it) {
                                       code = ended;
                                       out = std::move(it);
                                   });
        });
        io.run();
        return code;
    };
    auto unknown = run;
    unknown.server = unknown.server_version = "";
    unknown.identity = {{"backend", "mlx-server"}, {"model", ""}};
    evalrt::JournalKnown known;
    CHECK(!ask(unknown, known));
    CHECK(known.model == "m");
    CHECK(known.server == "vllm");
    CHECK(known.server_version == "1.0");
    unknown.addresses = {"http://b/v1"};
    CHECK(ask(unknown, known) == JournalErrc::changed);
    unknown.addresses = run.addresses;
    unknown.identity = {{"backend", "mlx-server"}, {"model", "other"}};
    CHECK(ask(unknown, known) == JournalErrc::changed);
}

TEST_CASE("a journal whose keys have the address in them is gone on with at that address") {
    Folder folder;
    const auto path = folder / "j";
    auto before = run_of();
    before.identity.insert(before.identity.begin() + 1, {"url", "http://a/v1"});
    { Session(path, before).get(question("a")); }
    auto now = run_of();
    now.addresses = {"http://a/v1"};
    CHECK(Session(path, now).get(question("a")).from_journal);
    now.addresses = {"http://b/v1"};
    CHECK(Session(path, now).code == JournalErrc::changed);
}

TEST_CASE("a later run is served at temperature 0, and otherwise only if it asks for that") {
    Folder folder;
    const auto path = folder / "j";
    const auto filtered = [](const Request& request) {
        auto response = answer_to(request);
        if (request.name == "name of refused") response.finish_reason = "content_filter";
        return response;
    };
    const auto unset = [] {
        Request request;
        request.body = R"({"messages": [{"content": "\"temperature\": 0"}]})";
        return request;
    };
    {
        Session session(path);
        session.reply = filtered;
        session.get(question("zero"));
        session.get(question("zero too", "0.0"));
        session.get(question("warm", "0.001"));
        session.get(question("refused"));
        session.get(unset());
        session.reply = [](const Request&) { return failure(Errc::context_too_long); };
        session.get(question("failed"));
    }
    auto options = Session::at(path);
    options.mode = JournalMode::append;
    Response served;
    {
        Session session(options);
        served = session.get(question("zero"));
        CHECK(served.from_journal);
        check_same(served, answer_to(question("zero")));
        CHECK(session.get(question("zero too", "0.0")).from_journal);
        CHECK(!session.get(question("zero")).from_journal); // a second occurrence
        CHECK(!session.get(question("warm", "0.001")).from_journal);
        CHECK(!session.get(question("refused")).from_journal);
        CHECK(!session.get(unset()).from_journal);
        CHECK(!session.get(question("failed")).from_journal);
    }
    JournalSummary summary;
    auto items = items_of(path, summary);
    CHECK(summary.runs == 2);
    REQUIRE(items.size() == 7);
    CHECK(items[0].response.value().from_journal);
    CHECK(!items[2].response.value().from_journal);
    { // the one that was served goes on being served, now as this run's own
        Session session(path);
        check_same(session.get(question("zero")), served);
        CHECK(session.server.calls == 0);
    }
    options.reuse_sampled = true;
    {
        Session session(options);
        CHECK(session.get(question("warm", "0.001")).from_journal);
        CHECK(session.get(unset()).from_journal);
    }
    // Never of another model or another version of the server.
    for (const auto& run : {run_of("other"), run_of("m", "2.0"), run_of("m", "")}) {
        Session session(options, run);
        CHECK(!session.get(question("zero")).from_journal);
    }
}

TEST_CASE("another suite is another run of the same file") {
    Folder folder;
    auto options = Session::at(folder / "j");
    options.suite = "one";
    {
        Session session(options);
        session.get(question("zero"));
        session.get(question("warm", "1"));
    }
    options.suite = "two";
    {
        Session session(options);
        REQUIRE(!session.code);
        CHECK(!session.journal->resumed());
        CHECK(session.get(question("zero")).from_journal);
        CHECK(!session.get(question("warm", "1")).from_journal);
    }
    options.suite = "one";
    Session session(options);
    CHECK(session.get(question("warm", "1")).from_journal);
    CHECK(!session.get(question("new")).from_journal);
}

TEST_CASE("a suite is the same by its path in any spelling, or by what is in it") {
    Folder folder;
    auto options = Session::at(folder / "j");
    options.suite = "run " + (folder / "s.jsonl");
    options.content = "one";
    std::ofstream(folder / "s.jsonl") << "x";
    fs::create_directory(folder / "a");
    fs::create_symlink("s.jsonl", folder / "link");
    { Session(options).get(question("warm", "1")); }
    struct Row {
        std::string suite, content;
        bool same;
    };
    // In this order: what was run last is what the path's content is compared with.
    for (const auto& row :
         {Row{"run " + (folder / "a/../s.jsonl"), "", true},
          Row{"run " + (folder / "link"), "", true},
          Row{"run " + (folder / "s.jsonl"), "one", true},
          Row{"run /elsewhere/s.jsonl", "one", true}, Row{"run -", "one", true},
          Row{"run /elsewhere/s.jsonl", "", false}, Row{"run /elsewhere/t.jsonl", "two", false},
          Row{"bfcl " + (folder / "s.jsonl"), "", false},
          Row{"run " + (folder / "s.jsonl"), "edited", true}}) {
        INFO(row.suite << " with " << row.content);
        options.suite = row.suite;
        options.content = row.content;
        Session session(options);
        REQUIRE(!session.code);
        CHECK(session.journal->resumed() == row.same);
        if (row.same) CHECK(session.get(question("warm", "1")).from_journal);
    }
    // A path's own run goes before another one's with the same content.
    options.mode = JournalMode::append;
    options.suite = "run /other";
    options.content = "edited";
    { Session(options).get(question("another", "1")); }
    options.mode = JournalMode::resume;
    options.suite = "run " + (folder / "s.jsonl");
    Session session(options);
    CHECK(session.journal->resumed());
    CHECK(session.get(question("warm", "1")).from_journal);
}

namespace {

// A part of a suite: these of its items, all one request, each with an answer that names it.
std::string part(const Folder& folder, const std::string& name, std::vector<int> items,
                 int whole = 6, const std::string& content = "c", const std::string& suite = "s") {
    auto options = Session::at(folder.path + "/" + name);
    options.suite = suite;
    options.content = content;
    options.whole_items = whole;
    options.settings = {{"shard", name}};
    std::replace(options.path.begin() + std::ptrdiff_t(folder.path.size()) + 1, options.path.end(),
                 '/', '-');
    Session session(options);
    REQUIRE(!session.code);
    for (const int item : items) {
        auto request = question("the same", "1");
        request.name = "item-" + std::to_string(item);
        session.reply = [](const Request& it) {
            auto response = answer_to(it);
            response.body = R"({"choices": [")" + it.name + "\"]}";
            return response;
        };
        session.get(request);
    }
    return options.path;
}

// The whole suite over a joined journal; what was asked, and every answer is its item's.
std::vector<std::string> asked_over(const std::string& path, std::vector<std::string> names) {
    auto options = Session::at(path);
    options.suite = "s";
    options.content = "c";
    options.named = [names](std::string_view name) {
        return std::find(names.begin(), names.end(), name) != names.end();
    };
    Session session(options);
    REQUIRE(!session.code);
    std::vector<Request> requests;
    std::vector<const Request*> pointers;
    for (const auto& name : names) {
        requests.push_back(question("the same", "1"));
        requests.back().name = name;
    }
    for (const auto& it : requests) pointers.push_back(&it);
    const bool holds = session.journal->holds(pointers);
    std::vector<std::string> asked;
    session.reply = [&](const Request& it) {
        asked.push_back(it.name);
        auto response = answer_to(it);
        response.body = R"({"choices": [")" + it.name + "\"]}";
        return response;
    };
    for (const auto& it : requests) {
        INFO(it.name);
        const auto body = session.get(it).body;
        if (it.name.starts_with("item-"))
            CHECK(body == R"({"choices": [")" + it.name + "\"]}");
        else // one that was renamed
            CHECK(body.find(it.name) == body.npos);
    }
    session.journal->suite_asked();
    session.go();
    CHECK(holds == asked.empty());
    return asked;
}

using Names = std::vector<std::string>;
const Names six{"item-0", "item-1", "item-2", "item-3", "item-4", "item-5"};

} // namespace

TEST_CASE("an answer stays with its item's name where parts were joined, also among equal ones") {
    Folder folder;
    const auto first = part(folder, "0/3", {0, 1}), middle = part(folder, "1/3", {2, 3}),
               last = part(folder, "2/3", {4, 5});
    evalrt::JournalMerge result;
    // In another order than the suite's.
    REQUIRE(!evalrt::merge_journals(folder / "all", {last, first, middle}, result));
    CHECK(asked_over(folder / "all", six) == Names{});
    CHECK(asked_over(folder / "all", six) == Names{});
    // Without the middle, and without the beginning: a single one is no other's, either.
    REQUIRE(!evalrt::merge_journals(folder / "some", {first, last}, result));
    CHECK(result.missing == Names{"1/3"});
    CHECK(asked_over(folder / "some", six) == Names{"item-2", "item-3"});
    CHECK(asked_over(folder / "some", six) == Names{});
    const auto one = part(folder, "1/2", {5});
    REQUIRE(!evalrt::merge_journals(folder / "one", {one}, result));
    CHECK(asked_over(folder / "one", six) == Names(six.begin(), six.end() - 1));
    // Once it has all been asked, names may change again where requests are not equal.
    const auto alone = part(folder, "0/1", {0}, 1);
    REQUIRE(!evalrt::merge_journals(folder / "alone", {alone}, result));
    auto options = Session::at(folder / "alone");
    options.suite = "s";
    Session session(options);
    auto renamed = question("the same", "1");
    renamed.name = "of another name";
    CHECK(session.get(renamed).from_journal);
}

TEST_CASE("where parts were joined, one of equal requests that has another name keeps its answer") {
    Folder folder;
    const auto a = part(folder, "0/2", {0, 1, 2}), b = part(folder, "1/2", {3, 4, 5});
    evalrt::JournalMerge result;
    // Each of the others keeps its own, wherever the renamed ones stand.
    for (const std::set<int>& renamed : {std::set<int>{2}, {0, 5}, {0, 1, 2, 3, 4, 5}}) {
        fs::remove(folder / "all");
        REQUIRE(!evalrt::merge_journals(folder / "all", {b, a}, result));
        auto names = six;
        for (const int i : renamed) names[std::size_t(i)] = "other-" + std::to_string(i);
        for (int twice = 0; twice < 2; ++twice) CHECK(asked_over(folder / "all", names) == Names{});
    }
    // One more is one more.
    REQUIRE(!evalrt::merge_journals(folder / "more", {b, a}, result));
    auto names = six;
    names[3] = "other";
    names.push_back("item-6");
    CHECK(asked_over(folder / "more", names) == Names{"item-6"});
    CHECK(asked_over(folder / "more", names) == Names{});
}

TEST_CASE("an item has the name that its request came by the last time") {
    Folder folder;
    auto request = question("a");
    { Session(folder / "j").get(request); }
    JournalSummary summary;
    request.name = "renamed";
    for (int twice = 0; twice < 2; ++twice) {
        Session session(folder / "j");
        CHECK(session.get(request).from_journal);
    }
    CHECK(items_of(folder / "j", summary).at(0).name == "renamed");
    request.name.clear(); // which is none
    { CHECK(Session(folder / "j").get(request).from_journal); }
    CHECK(items_of(folder / "j", summary).at(0).name == "renamed");
}

TEST_CASE("names of any length are kept, all of a group at once, in a first session and a later") {
    Folder folder;
    std::vector<std::string> names;
    const auto add = [&names](std::size_t length) {
        auto name = std::to_string(names.size()) + ' ';
        name.resize(std::max(length, name.size()), char('a' + names.size() % 26));
        names.push_back(std::move(name));
    };
    for (int n = 0; n < 2; ++n) {
        Session session(folder / "j");
        for (int burst = 0; burst < 3; ++burst) {
            auto i = names.size();
            for (std::size_t length = 0; length < 700; length += 7) add(length);
            for (const std::size_t length : {16383, 16384, 16385, 50000, 3}) add(length);
            for (; i < names.size(); ++i) {
                auto request = question(std::to_string(i));
                request.name = names[i];
                session.ask(request);
            }
            session.go();
        }
        for (const auto& it : session.all) CHECK(it.completions == 1);
    }
    JournalSummary summary;
    const auto items = items_of(folder / "j", summary);
    REQUIRE(items.size() == names.size());
    for (std::size_t i = 0; i < items.size(); ++i) CHECK(items[i].name == names[i]);
}

TEST_CASE(
    "a report counts what shares an answer, what cannot be asked, and what is not written yet") {
    Folder folder;
    auto options = Session::at(folder / "j");
    options.items = 9;
    options.invalid = 2;
    options.copies = {{"name of a", "3"}, {"name of b", "1"}};
    {
        Session session(options);
        session.get(question("a"));
        session.reply = [](const Request&) { return failure(Errc::timed_out); };
        session.get(question("b"));
    }
    JournalSummary summary;
    const auto items = items_of(folder / "j", summary);
    REQUIRE(items.size() == 2);
    CHECK(items[0].copies == 3);
    CHECK(items[1].copies == 1);
    CHECK(summary.invalid == 2);
    CHECK(summary.missing == 1); // 9, and 2 + 4 + 2 are known
    CHECK(summary.ended);
    CHECK_FALSE(summary.log);
    // The next session says it anew.
    options.items = options.invalid = 0;
    options.copies = {};
    { Session session(options); }
    CHECK(items_of(folder / "j", summary).at(0).copies == 0);
    CHECK(summary.invalid + summary.missing == 0);
}

TEST_CASE("what a session leaves behind that did not end is not taken for all") {
    Folder folder;
    Session session(folder / "j");
    session.get(question("a"));
    // As a copy: with its log, and without; a copied lock is nobody's. By another process: one that
    // closes the file loses all its locks.
    REQUIRE(std::system(("cd " + folder.path +
                         " && cp j c && cp j-wal c-wal && cp j bare && "
                         "cp j.lock bare.lock")
                            .c_str()) == 0);
    JournalSummary summary;
    CHECK(items_of(folder / "j", summary).size() == 1);
    CHECK(summary.pid == ::getpid());
    CHECK(items_of(folder / "c", summary).size() == 1);
    CHECK_FALSE(summary.ended);
    CHECK(summary.log);
    CHECK_FALSE(summary.pid);
    CHECK(items_of(folder / "bare", summary).empty());
    CHECK(summary.runs == 0);
    CHECK_FALSE(summary.log);
    CHECK_FALSE(summary.pid);
    evalrt::JournalMerge result;
    CHECK(evalrt::merge_journals(folder / "none", {folder / "bare"}, result).code ==
          JournalErrc::foreign);
    CHECK(result.empty == std::vector<std::string>{folder / "bare"});
    CHECK_FALSE(fs::exists(folder / "none"));
}

TEST_CASE("what is joined stands at its place when it is whole") {
    Folder folder;
    const auto a = part(folder, "0/2", {0, 1, 2}), b = part(folder, "1/2", {3, 4, 5});
    evalrt::JournalMerge result;
    // What one that was killed has left.
    spew(folder / "all.merging", "half");
    spew(folder / "all.merging-wal", "half");
    spew(folder / "all.merging.lock", "1\n");
    REQUIRE(!evalrt::merge_journals(folder / "all", {a, b}, result));
    CHECK(result.answered == 6);
    std::set<std::string> files;
    for (const auto& it : fs::directory_iterator(folder.path)) files.insert(it.path().filename());
    CHECK(files == std::set<std::string>{"0-2", "1-2", "all"});
    // Somebody else does the same.
    {
        Session other(folder / "more.merging");
        CHECK(evalrt::merge_journals(folder / "more", {a, b}, result).code == JournalErrc::in_use);
        CHECK_FALSE(other.get(question("x")).outcome);
    }
    CHECK_FALSE(fs::exists(folder / "more"));
}

TEST_CASE("parts that were missing are joined to what was joined before") {
    Folder folder;
    const auto a = part(folder, "0/3", {0, 1}), b = part(folder, "1/3", {2, 3}),
               c = part(folder, "2/3", {4, 5});
    evalrt::JournalMerge result;
    REQUIRE(!evalrt::merge_journals(folder / "ac", {a, c}, result));
    REQUIRE(!evalrt::merge_journals(folder / "abc", {folder / "ac", b}, result));
    CHECK(result.missing == Names{});
    CHECK(result.answered == 6);
    CHECK(asked_over(folder / "abc", six) == Names{});
    REQUIRE(!evalrt::merge_journals(folder / "cab", {b, folder / "ac"}, result));
    CHECK(asked_over(folder / "cab", six) == Names{});
    // A run that could not be gone on with leaves it as it was.
    {
        auto options = Session::at(folder / "ac");
        options.suite = "s";
        options.content = "c";
        Session session(options);
    }
    JournalSummary summary;
    REQUIRE(!evalrt::read_journal(folder / "ac", summary, [](const JournalItem&) {}));
    CHECK(summary.missing == 2);
    REQUIRE(!evalrt::merge_journals(folder / "again", {folder / "ac", b}, result));
    // Since then it is a whole of its own.
    asked_over(folder / "ac", six);
    const auto failed = evalrt::merge_journals(folder / "no", {a, folder / "ac"}, result);
    CHECK(failed.code == JournalErrc::changed);
    CHECK(failed.detail.find("join all of them anew") != failed.detail.npos);
}

TEST_CASE("parts are of one suite by what is in it, not by its path") {
    Folder folder;
    const auto a = part(folder, "0/2", {0, 1, 2}),
               b = part(folder, "1/2", {3, 4, 5}, 6, "c", "other");
    evalrt::JournalMerge result;
    CHECK(!evalrt::merge_journals(folder / "ab", {a, b}, result));
    fs::remove(b);
    const auto edited = part(folder, "1/2", {3, 4, 5}, 6, "d");
    auto failed = evalrt::merge_journals(folder / "no", {a, edited}, result);
    CHECK(failed.code == JournalErrc::changed);
    CHECK(failed.detail.find("the suite was changed between them") != failed.detail.npos);
    CHECK(!fs::exists(folder / "no"));
    fs::remove(edited);
    // Of a file that does not say it, the path counts.
    const auto before = part(folder, "1/2", {3, 4, 5}, 6, "");
    CHECK(!evalrt::merge_journals(folder / "mixed", {a, before}, result));
    fs::remove(before);
    const auto other = part(folder, "1/2", {3, 4, 5}, 6, "", "other");
    failed = evalrt::merge_journals(folder / "no", {a, other}, result);
    CHECK(failed.detail.find("the suite is \"other\", not \"s\"") != failed.detail.npos);
}

TEST_CASE("the body counts as it is sent, with the endpoint") {
    Folder folder;
    const auto path = folder / "j";
    auto run = run_of();
    run.sent = [](const Request&) { return evalrt::Text("the same"); };
    { Session(Session::at(path), run).get(question("a")); }
    {
        Session session(Session::at(path), run);
        auto other = question("b");
        CHECK(session.get(other).from_journal);
    }
    run.sent = {};
    Session session(Session::at(path), run);
    CHECK(!session.get(question("a")).from_journal);
    auto completion = question("a");
    completion.endpoint = "/v1/completions";
    CHECK(!session.get(completion).from_journal);
}

TEST_CASE("a request without a body goes past the journal") {
    Folder folder;
    Session session(folder / "j");
    for (int i = 0; i < 2; ++i) CHECK(!session.get(Request()).from_journal);
    CHECK(session.server.calls == 2);
    session.journal.reset();
    CHECK(sql(folder / "j", "SELECT count(*) FROM items") == 0);
}

TEST_CASE("whether all is there is known before anything is asked") {
    Folder folder;
    const auto a = question("a"), b = question("b");
    Session session(folder / "j");
    CHECK(!session.journal->holds({&a}));
    session.get(a);
    session.get(a);
    session.get(b);
    CHECK(session.journal->holds({&a, &b}));
    CHECK(session.journal->holds({&a, &b, &a}));
    CHECK(!session.journal->holds({&a, &b, &b}));
    CHECK(!session.journal->holds({&a, &b, &a, &a}));
}

TEST_CASE("served text reaches a caller who asked for a stream, once") {
    Folder folder;
    auto request = question("a");
    Session session(folder / "j");
    session.get(request);
    session.journal->rewind();
    request.stream = true;
    auto& asked = session.ask(request);
    session.go();
    CHECK(asked.response.from_journal);
    CHECK(asked.text == asked.response.text);
}

TEST_CASE("counting from the beginning while requests are under way loses none of them") {
    Folder folder;
    Session session(folder / "j");
    session.hold = true;
    for (int i = 0; i < 6; ++i) session.ask(question(i % 2 ? "a" : "b"));
    session.poll();
    for (int i = 0; i < 3; ++i) session.server.end(i, answer_to(question(i % 2 ? "a" : "b")));
    session.journal->rewind();
    for (int i = 3; i < 6; ++i) session.server.end(i, answer_to(question(i % 2 ? "a" : "b")));
    session.go();
    for (const auto& it : session.all) CHECK(it.completions == 1);
    session.hold = false;
    for (int i = 0; i < 6; ++i) CHECK(session.get(question(i % 2 ? "a" : "b")).from_journal);
    CHECK(session.server.calls == 6);
}

TEST_CASE("many are served a few at a time, each once") {
    Folder folder;
    const auto path = folder / "j";
    {
        Session session(path);
        for (int i = 0; i < 1500; ++i) session.ask(question(std::to_string(i)));
        session.go();
    }
    Session session(path);
    for (int i = 0; i < 1500; ++i) session.ask(question(std::to_string(i)));
    session.go();
    int i = 0;
    for (const auto& it : session.all) {
        REQUIRE(it.completions == 1);
        REQUIRE(it.response.text == answer_to(question(std::to_string(i++))).text);
    }
    CHECK(session.server.calls == 0);
}

// The file

TEST_CASE("a second writer is refused with the number of the process that has it") {
    Folder folder;
    const auto path = folder / "j";
    Session first(path);
    Journal second(first.io.get_executor(), Session::at(path));
    error_code code;
    std::string words;
    second.async_open([&](error_code ec, std::string text) {
        code = ec;
        words = std::move(text);
    });
    first.go();
    CHECK(code == JournalErrc::in_use);
    CHECK_THAT(words, Catch::Contains(std::to_string(::getpid())));
    first.get(question("a"));
    JournalSummary summary;
    CHECK(items_of(path, summary).size() == 1); // a reader is welcome
    CHECK(summary.pid == ::getpid());
    first.journal.reset();
    CHECK(!Session(path).code);
    items_of(path, summary);
    CHECK(!summary.pid);
    CHECK(!fs::exists(path + ".lock"));
}

TEST_CASE("the lock of a process that is gone keeps nobody out") {
    Folder folder;
    spew(folder / "j.lock", "999999999\n");
    Session session(folder / "j");
    CHECK(!session.code);
    CHECK(!session.get(question("a")).outcome);
}

TEST_CASE("a file that is no journal is refused and kept") {
    Folder folder;
    const auto path = folder / "j";
    const auto refused = [&](const std::string& bytes) {
        spew(path, bytes);
        Session session(path);
        CHECK(session.code == JournalErrc::foreign);
        CHECK(slurp(path) == bytes);
        CHECK(!fs::exists(path + "-wal"));
        JournalSummary summary;
        CHECK(evalrt::read_journal(path, summary, {}).code == JournalErrc::foreign);
        fs::remove(path);
    };
    refused("{\"custom_id\": \"a\"}\n");
    refused("SQLite format 3");
    refused(std::string(5000, '\0'));
    sql(path, "CREATE TABLE mine(a)");
    refused(slurp(path));
    { Session(path).get(question("a")); }
    sql(path, "PRAGMA user_version = 99");
    refused(slurp(path));

    fs::create_directory(path);
    CHECK(Session(path).code == JournalErrc::foreign);
    JournalSummary summary;
    CHECK(evalrt::read_journal(folder / "nowhere", summary, {}).code == JournalErrc::foreign);
    CHECK(Session(folder / "no/folder").code == JournalErrc::unwritable);
}

TEST_CASE("an empty file becomes a journal") {
    Folder folder;
    spew(folder / "j", "");
    Session session(folder / "j");
    CHECK(!session.code);
    CHECK(!session.get(question("a")).outcome);
}

TEST_CASE("a damaged journal is refused and kept, or gives true answers") {
    Folder folder;
    const auto path = folder / "j";
    {
        Session session(path);
        for (int i = 0; i < 200; ++i) session.ask(question(std::to_string(i)));
        session.go();
    }
    const auto whole = slurp(path);
    REQUIRE(whole.size() > 65536);
    std::minstd_rand random(1);
    int refused = 0;
    for (std::size_t page = 1; page < whole.size() / 16384; ++page) {
        auto bytes = whole;
        for (std::size_t i = 0; i < 64; ++i) bytes[page * 16384 + i] = char(random() >> 8);
        spew(path, bytes);
        Session session(path);
        if (!session.code) continue;
        ++refused;
        CHECK(session.code == JournalErrc::corrupt);
        session.journal.reset();
        CHECK(slurp(path) == bytes);
    }
    CHECK(refused > 0);
    spew(path, whole.substr(0, whole.size() / 2));
    CHECK(Session(path).code == JournalErrc::corrupt);
}

TEST_CASE("a torn tail of the log costs only what stood in it") {
    Folder folder;
    const auto path = folder / "j", copy = folder / "copy";
    Session session(path);
    for (int i = 0; i < 40; ++i) session.get(question(std::to_string(i))); // a commit each
    const auto base = slurp(path), log = slurp(path + "-wal");
    REQUIRE(log.size() > 40 * 16384);
    std::minstd_rand random(2);
    std::size_t least = 40, most = 0;
    for (int round = 0; round < 60; ++round) {
        const auto size = round == 0 ? 0 : round == 1 ? log.size() : random() % log.size();
        CAPTURE(size);
        auto torn = log.substr(0, size);
        if (round % 3 == 2 && size > 100) // a half-written page, not a missing one
            for (int i = 0; i < 50; ++i) torn[torn.size() - 1 - std::size_t(i)] ^= 0x55;
        fs::remove(copy + "-shm");
        spew(copy, base);
        spew(copy + "-wal", torn);
        std::size_t known = 0;
        {
            Session after(copy);
            REQUIRE(!after.code);
            for (int i = 0; i < 40; ++i) {
                const auto response = after.get(question(std::to_string(i)));
                CHECK(response.text == answer_to(question(std::to_string(i))).text);
                // A prefix: what came later than a lost one is lost too.
                if (response.from_journal) CHECK(known++ == std::size_t(i));
            }
        }
        least = std::min(least, known);
        most = std::max(most, known);
        JournalSummary summary;
        CHECK(items_of(copy, summary).size() == 40);
        fs::remove(copy);
    }
    CHECK(least == 0);
    CHECK(most == 40);
}

TEST_CASE("a journal that cannot be written ends what waits, once, and keeps what was delivered") {
    Folder folder;
    const auto path = folder / "j";
    Session session(path);
    session.get(question("a"));
    sql(path, "CREATE TRIGGER no BEFORE INSERT ON outcomes WHEN NEW.id > 2 BEGIN SELECT "
              "RAISE(ABORT, 'told to fail'); END");
    session.get(question("b"));
    session.hold = true;
    auto& running = session.ask(question("c"));
    auto& ended = session.ask(question("d"));
    session.poll();
    session.server.end(session.server.calls - 1, answer_to(question("d")));
    session.go();
    REQUIRE(session.broken.size() == 1);
    CHECK_THAT(session.broken[0], Catch::Contains(path));
    CHECK(session.journal->failed());
    for (auto* it : {&running, &ended}) {
        CHECK(it->completions == 1);
        CHECK(it->code == asio::error::operation_aborted);
        CHECK(it->response.detail == session.broken[0]);
    }
    CHECK(session.server.cancelled == 1);
    auto& late = session.ask(question("e"));
    session.go();
    CHECK(late.code == asio::error::operation_aborted);
    session.journal.reset();
    sql(path, "DROP TRIGGER no");
    Session after(path);
    CHECK(after.get(question("a")).from_journal);
    CHECK(after.get(question("b")).from_journal);
    CHECK(!after.get(question("d")).from_journal);
}

TEST_CASE("a journal that is taken away while it is in use ends the run, in words") {
    Folder folder;
    const auto path = folder / "j";
    const auto ends = [&](const std::function<void()>& take_away) {
        Session session(path);
        REQUIRE(!session.code);
        session.get(question("a"));
        take_away();
        CHECK(session.get(question("new")).outcome == Errc::cancelled);
        REQUIRE(session.broken.size() == 1);
        CHECK_THAT(session.broken[0], Catch::Contains(path) && Catch::Contains("moved, deleted"));
    };
    const auto away = folder / "away";
    SECTION("moved") {
        ends([&] { fs::rename(path, away); });
        fs::rename(away, path);
        CHECK(Session(path).get(question("a")).from_journal);
    }
    SECTION("another one in its place") {
        ends([&] {
            fs::rename(path, away);
            spew(path, slurp(away));
        });
    }
    SECTION("deleted") {
        ends([&] { fs::remove(path); });
    }
    SECTION("its log deleted") {
        ends([&] { fs::remove(path + "-wal"); });
    }
    SECTION("cut short") {
        { Session(path).get(question("a")); }
        ends([&] { fs::resize_file(path, 100); });
    }
}

TEST_CASE("a caller whose handler throws takes no other one's answer with it") {
    Folder folder;
    Session session(folder / "j");
    int done = 0;
    for (int i = 0; i < 40; ++i)
        session.journal->async_complete(question(std::to_string(i)), {},
                                        [&, i](error_code, Response) {
                                            ++done;
                                            if (i % 10 == 0)
                                                throw std::runtime_error("the caller's own");
                                        });
    int thrown = 0;
    session.io.restart();
    for (bool more = true; more;) {
        more = false;
        try {
            session.io.run();
        } catch (const std::runtime_error&) {
            ++thrown;
            more = true;
        }
    }
    CHECK(done == 40);
    CHECK(thrown == 4);
    CHECK(!session.get(question("later")).outcome);
}

TEST_CASE("closing commits, and later requests are refused") {
    Folder folder;
    const auto path = folder / "j";
    auto options = Session::at(path);
    options.group_age = std::chrono::hours(1);
    Session session(options);
    session.hold = true;
    auto& asked = session.ask(question("a"));
    auto& running = session.ask(question("c"));
    session.server.end(0, answer_to(question("a")));
    session.poll(); // it waits for the other one
    CHECK(asked.completions == 0);
    CHECK(session.step(session.journal->async_close(asio::use_future)));
    CHECK(asked.completions == 1);
    CHECK(!asked.response.outcome);
    session.server.end(1, answer_to(question("c")));
    session.go();
    CHECK(running.response.outcome == Errc::cancelled);
    CHECK(session.broken.empty());
    CHECK(session.get(question("b")).outcome == Errc::cancelled);
    CHECK(!fs::exists(path + "-wal"));
    CHECK(Session(path).get(question("a")).from_journal);
}

TEST_CASE("a journal that is destroyed at any moment loses nothing delivered") {
    Folder folder;
    const auto path = folder / "j";
    std::set<std::string> delivered;
    for (int round = 0; round < 30; ++round) {
        Session session(path);
        REQUIRE(!session.code);
        for (int i = 0; i < 40; ++i) {
            const auto text = std::to_string(i);
            session.journal->async_complete(question(text), {}, [&, text](error_code, Response r) {
                if (r.outcome) return;
                if (delivered.count(text)) CHECK(r.from_journal);
                delivered.insert(text);
            });
        }
        session.io.restart();
        if (round == 29) session.io.run();
        for (int steps = round * 7; steps > 0; --steps) session.io.poll_one();
        session.journal.reset();
    }
    CHECK(delivered.size() == 40);
}

TEST_CASE("a model's files have an identity that changes with them") {
    Folder folder;
    CHECK(evalrt::model_files("mlx-community/some-model") == "");
    spew(folder / "config.json", "{}");
    spew(folder / "weights.safetensors", "123");
    const auto before = evalrt::model_files(folder.path);
    CHECK(before.size() == 32);
    CHECK(evalrt::model_files(folder.path) == before);
    spew(folder / ".DS_Store", "the desktop's");
    CHECK(evalrt::model_files(folder.path) == before);
    spew(folder / "weights.safetensors", "1234");
    const auto larger = evalrt::model_files(folder.path);
    CHECK(larger != before);
    fs::last_write_time(folder / "config.json",
                        fs::file_time_type::clock::now() + std::chrono::hours(1));
    CHECK(evalrt::model_files(folder.path) != larger);
    CHECK(evalrt::model_files(folder / "config.json") != "");
}
