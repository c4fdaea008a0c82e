#include "probe.hpp"

#include "support/catch.hpp"
#include "support/engine_run.hpp"

#include <boost/json.hpp>

#include <array>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <set>

using namespace evalrt;
using namespace evalrt::test;
using evalrt::detail::ProbePlan;
using evalrt::detail::ProbeSeen;

namespace {

namespace json = boost::json;

// The plan against an engine model, in virtual time.
ProbeResult probe(const EngineConfig& config, bool reports = true) {
    const auto engine = make_engine(config);
    ProbePlan plan;
    std::map<std::uint64_t, Job> jobs;
    unsigned serial = 0;
    double now = 0;
    while (const auto step = plan.next()) {
        std::vector<ProbeSeen> seen(step->asks.size());
        std::vector<double> sent(step->asks.size(), 1e300); // when
        std::vector<std::uint64_t> ids(step->asks.size(), 0);
        std::size_t done = 0;
        now += double(step->wait_before.count()) / 1e3;
        const double begin = now;
        for (std::size_t i = 0; i < sent.size(); ++i)
            if (i == 0 || !step->follow)
                sent[i] = begin + (i > 0 ? double(step->stagger.count()) / 1e3 : 0);
        std::vector<EngineEvent> events;
        while (done < seen.size()) {
            for (std::size_t i = 0; i < sent.size(); ++i) {
                if (ids[i] > 0 || sent[i] > now) continue;
                const auto text = ProbePlan::prompt(step->asks[i], 7, ++serial);
                const json::object message{{"role", "user"}, {"content", text}};
                auto job =
                    render(json::serialize(json::object{{"messages", json::array{message}}}), "");
                job.tokens.resize(job.prompt);
                for (unsigned t = 0; t < step->asks[i].max_tokens; ++t)
                    job.tokens.push_back(1000 * serial + t);
                ids[i] = serial;
                engine->submit(serial, jobs[serial] = std::move(job));
            }
            if (engine->idle()) {
                now += 1e-3;
                continue;
            }
            events.clear();
            now += engine->step(now, events);
            for (const auto& event : events) {
                if (event.what == EngineEvent::computed) continue;
                const auto i =
                    std::size_t(std::find(ids.begin(), ids.end(), event.id) - ids.begin());
                auto& it = seen.at(i);
                if (it.first_text == 0) it.first_text = now - sent[i];
                if (step->follow)
                    for (auto& at : sent) at = std::min(at, now);
                if (event.what != EngineEvent::done) continue;
                ++done;
                it.answered = true;
                it.total = now - sent[i];
                it.usage.completion_tokens = std::int64_t(jobs[event.id].output());
                it.usage.prompt_tokens = std::int64_t(jobs[event.id].prompt);
                if (reports) it.usage.cached_tokens = std::int64_t(engine->cached(event.id));
            }
        }
        plan.answered(seen, now - begin);
    }
    CHECK(plan.result().requests <= 12);
    CHECK(plan.result().requests == serial);
    return plan.result();
}

} // namespace

TEST_CASE("each engine is seen as what it is") {
    const std::map<std::string, Release> releases{{"vllm", Release::at_once},
                                                  {"sglang", Release::first_text},
                                                  {"mlx", Release::first_text},
                                                  {"mlx-cpu", Release::first_text},
                                                  {"omlx", Release::done}};
    for (const auto& [name, release] : releases) {
        CAPTURE(name);
        const auto config = engine_config(name);
        const auto result = probe(config);
        CAPTURE(result.notes);
        REQUIRE(result.release);
        CHECK(*result.release == release);
        CHECK(result.reports_cached == true);
        CHECK_FALSE(result.inferred);
        REQUIRE(result.page);
        CHECK(*result.page % config.page == 0);
        REQUIRE(result.page_least);
        CHECK(*result.page_least <= config.page);
        if (name == "omlx") {
            CHECK(result.page == 256u);
            CHECK(result.page_least == 256u);
        }
        REQUIRE(result.batching);
        CHECK(*result.batching > 1.25);
        if (name == "omlx") CHECK(result.commit_delay > std::chrono::seconds(3));
    }
}

TEST_CASE("a server that does not tell what it had cached is judged by time") {
    const auto result = probe(engine_config("sglang"), false);
    CHECK(result.inferred);
    CHECK(result.reports_cached == false);
    REQUIRE(result.release);
    CHECK(*result.release == Release::first_text);
    CHECK_FALSE(result.page);
}

TEST_CASE("a server that takes one at a time is found out, and asked one at a time") {
    auto config = engine_config("vllm");
    config.batch = 1;
    const auto result = probe(config);
    REQUIRE(result.batching);
    CHECK(*result.batching < 1.25);
    std::vector<std::string> notes;
    const auto row = corrected(*find_profile_row("vllm"), result, notes);
    CHECK(row.in_flight == 1);
    CHECK(row.most_in_flight == 0);
    REQUIRE_FALSE(notes.empty());
    CHECK(notes.back().find("does not batch") != std::string::npos);
    CHECK(notes.back().find("its own limit of requests at once may be 1") != std::string::npos);
}

TEST_CASE(
    "why a server answers one request at a time: by its options, the requests and the probe") {
    using evalrt::detail::why_one_by_one;
    const auto why = [](std::string_view name, unsigned unusual, std::optional<double> probed,
                        std::optional<BackendRow::Alone> given = {}) {
        const auto text = why_one_by_one(*find_profile_row(name), given, unusual, probed);
        const auto start = std::string(name) + " answers one request at a time: ";
        REQUIRE(text.starts_with(start));
        return text.substr(start.size());
    };
    const std::string mlx = "what makes it do so is a draft model (--draft-model), or a quantised "
                            "cache (--kv-bits), or a model with layers whose caches cannot be put "
                            "together",
                      limit = "its own limit of requests at once may be 1",
                      batched = "three of the probe's at once bring 2.60 times the tokens of one";
    CHECK(why("mlx-server", 3, 2.6, BackendRow::Alone{"--kv-bits", "a quantised cache"}) ==
          "it has a quantised cache (--kv-bits)");
    CHECK(why("mlx-server", 0, {}) == mlx); // a seed is not named: they have none
    CHECK(why("mlx-server", 1, {}) == mlx);
    CHECK(why("mlx-server", 2, {}) == "requests have a seed at a temperature above 0");
    CHECK(why("mlx-server", 2, 2.6) ==
          "requests have a seed at a temperature above 0; others it batches: " + batched);
    CHECK(why("mlx-server", 0, 1.02) == "so it does the probe's, and " + mlx);
    CHECK(why("vllm", 0, {}) == limit);
    CHECK(why("vllm", 2, {}) == limit + ", or it does so for a seed");
    CHECK(why("vllm", 2, 1.02) == "so it does the probe's, and " + limit);
    CHECK(why("vllm", 0, 2.6) == "it is something of these requests, as " + batched);
    CHECK(why("vllm", 2, 2.6) ==
          "it is something of these requests, as " + batched + "; they have a seed");
    CHECK(why("vllm", 3, 2.6) == "it is something of these requests, as " + batched +
                                     "; they have a penalty or a logit_bias, or a seed");
}

TEST_CASE("what a row claims gives way to what was measured, and the rest stays") {
    std::vector<std::string> notes;
    const auto& claim = *find_profile_row("vllm");
    ProbeResult result;
    CHECK(corrected(claim, result, notes).release == claim.release);
    CHECK(notes.empty()); // nothing was measured
    result.release = Release::first_text;
    result.page = 1024;
    result.page_least = 256;
    result.reports_cached = true;
    result.batching = 2.9;
    const auto row = corrected(claim, result, notes);
    CHECK(row.release == Release::first_text);
    CHECK(row.shared_tokens == 256);
    CHECK(row.cached_hint.empty());
    CHECK(row.in_flight == claim.in_flight);
    CHECK(notes.size() == 2);
    notes.clear();
    CHECK(corrected(row, result, notes).release == Release::first_text);
    CHECK(notes.empty()); // it is so already
    result.release = Release::done;
    CHECK(corrected(*find_profile_row("llama-server"), result, notes).release ==
          find_profile_row("llama-server")->release);
}

TEST_CASE("a page is never taken for longer than it is, whatever template and tokeniser add") {
    std::mt19937 random(1);
    unsigned found = 0, rounds = 0;
    for (const unsigned page : {1, 16, 64, 128, 256, 512, 1024})
        for (const auto release : {Release::first_text, Release::done})
            for (int i = 0; i < 100; ++i) {
                const bool commits = release == Release::done && i % 2;
                const double each = 1 + double(random() % 40) / 100; // tokens a word
                const unsigned front = random() % 200, own = 20 + random() % 44;
                const std::array<unsigned, 5> words{0, 1201, 907, 1093, 1151};
                std::set<unsigned> shown, sent;
                ProbePlan plan;
                while (const auto step = plan.next()) {
                    if (step->wait_before.count() > 0) shown = sent;
                    std::vector<ProbeSeen> seen;
                    for (const auto& ask : step->asks) {
                        auto& it = seen.emplace_back();
                        it.answered = true;
                        const auto prefix = front + unsigned(each * words.at(ask.prefix));
                        const bool warm = ask.prefix > 0 && shown.contains(ask.prefix);
                        it.usage.prompt_tokens = prefix + own;
                        it.usage.cached_tokens = warm ? prefix / page * page : 0;
                        sent.insert(ask.prefix);
                        if (release == Release::first_text) shown.insert(ask.prefix);
                    }
                    if (!commits) shown = sent;
                    plan.answered(seen, 1);
                }
                const auto& result = plan.result();
                CAPTURE(page, each, front, own, commits);
                REQUIRE(result.page);
                CHECK(*result.page % page == 0);
                CHECK(*result.page_least <= page);
                CHECK(result.requests <= 12);
                found += page == 256 && *result.page_least == page;
                rounds += page == 256;
            }
    CHECK(found > rounds / 2);
}

TEST_CASE("what the probe cannot tell stays as the row has it") {
    std::vector<std::string> notes;
    const auto& claim = *find_profile_row("omlx");
    ProbeResult result;
    result.release = Release::done;
    result.commit_delay = std::chrono::seconds(5); // it was there by then
    result.page = 1024;                            // of a multiple of it
    const auto row = corrected(claim, result, notes);
    CHECK(row.shared_tokens == claim.shared_tokens);
    CHECK(row.commit_delay == claim.commit_delay);
    CHECK(notes.empty());
}

TEST_CASE("a request that fails ends the probe, and what was seen before it stays") {
    ProbePlan plan;
    ProbeSeen good;
    good.answered = true;
    good.usage.cached_tokens = 0;
    plan.answered({good}, 1);
    good.usage.cached_tokens = 1200;
    plan.answered({good}, 1);
    plan.answered({good, {}}, 1);
    CHECK_FALSE(plan.next());
    CHECK(plan.result().release == Release::done); // it was there after the end, at least
    CHECK(plan.result().requests == 4);
    CHECK_FALSE(plan.result().batching);
}

TEST_CASE("a result is kept for the server it was measured on, and a broken file is none") {
    const auto folder = std::filesystem::temp_directory_path() /
                        ("probe-" + std::to_string(std::random_device()()));
    ProbeResult result;
    result.requests = 12;
    result.release = Release::done;
    result.commit_delay = std::chrono::seconds(5);
    result.page = 512;
    result.page_least = 256;
    result.reports_cached = true;
    result.batching = 2.5;
    CHECK_FALSE(stored_probe(folder, "omlx 0.4"));
    REQUIRE(store_probe(folder, "omlx 0.4", result));
    const auto read = stored_probe(folder, "omlx 0.4");
    REQUIRE(read);
    CHECK(read->requests == 12);
    CHECK(read->release == Release::done);
    CHECK(read->commit_delay == std::chrono::seconds(5));
    CHECK(read->page == 512u);
    CHECK(read->page_least == 256u);
    CHECK(read->reports_cached == true);
    CHECK(read->batching == 2.5);
    CHECK_FALSE(stored_probe(folder, "omlx 0.5"));
    for (const auto& file : std::filesystem::directory_iterator(folder))
        std::ofstream(file.path()) << R"({"server": "omlx 0.4", "page": -1e99, "release": 7)";
    CHECK_FALSE(stored_probe(folder, "omlx 0.4"));
    for (const auto& file : std::filesystem::directory_iterator(folder))
        std::ofstream(file.path()) << R"({"server": "omlx 0.4", "page": -1e99, "release": 7})";
    CHECK_FALSE(stored_probe(folder, "omlx 0.4")->page);
    std::filesystem::remove_all(folder);
    CHECK_FALSE(store_probe("/proc/nowhere", "x", result));
}
