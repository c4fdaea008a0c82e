#include "support/engine_run.hpp"

#include "support/catch.hpp"

#include <deque>
#include <numeric>
#include <random>
#include <sstream>

using namespace evalrt;
using namespace evalrt::test;

namespace {

// `groups` prefixes of `shared` tokens, `each` prompts of `own` more on each, going round them.
Suite groups(unsigned groups, unsigned each, unsigned shared, unsigned own, unsigned output,
             unsigned turns = 1) {
    std::ostringstream lines;
    const auto words = [](unsigned n, unsigned seed) {
        std::string text;
        for (unsigned i = 0; i < n; ++i)
            text +=
                " w" + std::to_string(seed % 1000) + std::string(1, char('a' + (seed + i) % 26));
        return text;
    };
    unsigned seed = 1;
    for (unsigned i = 0; i < each; ++i)
        for (unsigned g = 0; g < groups; ++g) {
            std::string history = R"({"role":"system","content":")" + words(shared / 3, 500 + g) +
                                  R"("},{"role":"user","content":")" + words(own / 3, ++seed) +
                                  R"("})";
            for (unsigned t = 0; t < turns; ++t) {
                const auto answer = words(output / 3, ++seed);
                lines << R"({"body":{"messages":[)" << history << R"(]},"answer":")" << answer
                      << R"(","session":")"
                      << (turns > 1 ? "s" + std::to_string(i * groups + g) : "") << R"(","turn":)"
                      << t << "}\n";
                history += R"(,{"role":"assistant","content":")" + answer +
                           R"("},{"role":"user","content":")" + words(20, ++seed) + R"("})";
            }
        }
    std::istringstream in(lines.str());
    return read_suite(in);
}

Job job(Tokens prompt, std::size_t output, std::size_t system = 0) {
    static std::uint32_t fresh = 1'000'000;
    Job it;
    it.prompt = prompt.size();
    it.system = system;
    it.tokens = std::move(prompt);
    for (std::size_t i = 0; i < output; ++i) it.tokens.push_back(fresh++);
    return it;
}

Tokens sequence(std::uint32_t from, std::size_t n) {
    Tokens tokens(n);
    std::iota(tokens.begin(), tokens.end(), from);
    return tokens;
}

Tokens joined(Tokens a, const Tokens& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

// Until it has nothing to do, or that one has its first token.
double work(EngineModel& engine, double now = 0, std::uint64_t until = 0) {
    std::vector<EngineEvent> events;
    while (!engine.idle()) {
        now += engine.step(now, events);
        for (const auto& event : std::exchange(events, {}))
            if (event.id == until) return now;
    }
    return now;
}

const std::vector<std::string> engines{"vllm", "sglang", "mlx", "mlx-cpu", "omlx", "llama"};

} // namespace

TEST_CASE(
    "tokens: runs of letters, digits and signs, and pieces of a text are those of the whole") {
    const auto count = [](std::string_view text) {
        Tokens tokens;
        tokenize(text, tokens);
        return tokens.size();
    };
    CHECK(count("") == 0);
    CHECK(count("The capital of France is Paris.") == 7);
    CHECK(count("1234567") == 3);
    CHECK(count("internationalisation") == 3);
    Tokens whole, parts;
    tokenize("system\nyou are", whole);
    tokenize("system\n", parts);
    tokenize("you are", parts);
    CHECK(whole == parts);
}

TEST_CASE("whatever the order, prefilled and cached tokens are the prompts'") {
    const auto suite = groups(8, 6, 300, 60, 30);
    const auto jobs = suite.jobs();
    for (const auto& name : engines)
        for (const bool planned : {false, true})
            for (const unsigned in_flight : {1u, 7u, 0u}) {
                CAPTURE(name, planned, in_flight);
                const auto config = engine_config(name);
                const auto result = run(suite, config, engine_row(config), {planned, in_flight});
                CHECK(result.answered == 48);
                CHECK(result.totals.prefilled + result.totals.cached == result.prompt_tokens);
                CHECK(result.totals.prefilled >= least_prefill(jobs, 1));
                CHECK(result.seconds >= least_seconds(config, jobs, suite.chains(),
                                                      least_prefill(jobs, config.page)));
            }
}

TEST_CASE("depth first, one at a time, a cache of one request: each shared prefix once") {
    const auto suite = groups(20, 10, 600, 90, 30);
    for (const auto* name : {"vllm", "sglang"}) {
        CAPTURE(name);
        auto config = engine_config(name);
        config.cache = 900;
        auto row = engine_row(config);
        const auto planned = run(suite, config, row, {true, 1});
        CHECK(double(planned.totals.prefilled) <=
              1.01 * double(least_prefill(suite.jobs(), config.page)));
        const auto file = run(suite, config, row, {false, 1});
        CHECK(file.totals.prefilled > 3 * planned.totals.prefilled);
    }
}

TEST_CASE("when a prefix is visible to others") {
    const auto shared = sequence(1, 1024);
    const auto a = job(joined(shared, sequence(10'000, 40)), 8),
               b = job(joined(shared, sequence(20'000, 40)), 8);
    const auto cached = [&](std::string_view name, auto&& between) {
        const auto engine = make_engine(engine_config(name));
        engine->submit(1, a);
        const double now = between(*engine);
        engine->submit(2, b);
        work(*engine, now);
        return engine->cached(2);
    };
    const auto at_once = [](EngineModel&) { return 0.0; };
    const auto first_token = [](EngineModel& engine) { return work(engine, 0, 1); };
    const auto ended = [](EngineModel& engine) { return work(engine); };
    const auto later = [](EngineModel& engine) { return work(engine) + 5; };
    CHECK(cached("vllm", at_once) == 1024);
    CHECK(cached("sglang", at_once) == 0);
    CHECK(cached("sglang", first_token) == 1024);
    CHECK(cached("mlx", at_once) == 0);
    CHECK(cached("mlx", first_token) == 1024);
    CHECK(cached("omlx", first_token) == 0);
    CHECK(cached("omlx", ended) == 0);
    CHECK(cached("omlx", later) == 1024);
    CHECK(cached("llama", first_token) == 0); // it belongs to a slot, and that is busy
    CHECK(cached("llama", ended) == 1024);
}

TEST_CASE("pages: what is not a whole one is computed again") {
    const auto shared = sequence(1, 300);
    const auto a = job(joined(shared, sequence(10'000, 40)), 8),
               b = job(joined(shared, sequence(20'000, 40)), 8);
    for (const auto& [name, expected] : std::initializer_list<std::pair<const char*, std::size_t>>{
             {"vllm", 288}, {"sglang", 300}, {"omlx", 256}, {"mlx", 300}}) {
        CAPTURE(name);
        const auto engine = make_engine(engine_config(name));
        engine->submit(1, a);
        const double now = work(*engine) + 5;
        engine->submit(2, b);
        work(*engine, now);
        CHECK(engine->cached(2) == expected);
    }
}

TEST_CASE("mlx_lm.server keeps ten prompts, and a hit keeps none the longer") {
    const auto engine = make_engine(engine_config("mlx"));
    std::vector<Job> jobs;
    for (std::uint32_t i = 0; i < 12; ++i) jobs.push_back(job(sequence(i * 5000, 200), 4));
    const auto again = [&](std::size_t i) {
        static std::deque<Job> kept;
        kept.push_back(
            job(joined(sequence(std::uint32_t(i) * 5000, 200), sequence(900'000, 10)), 4));
        engine->submit(100 + kept.size(), kept.back());
        work(*engine, 1e3);
        return engine->cached(100 + kept.size());
    };
    for (std::size_t i = 0; i < 10; ++i) {
        engine->submit(i + 1, jobs[i]);
        work(*engine, double(i) * 10);
    }
    engine->submit(11, jobs[10]);
    work(*engine, 200);
    CHECK(again(10) == 200);
    CHECK(again(0) == 0); // the eleventh has put it out
}

TEST_CASE(
    "mlx_lm.server says when a prompt is computed, and shows no call of a tool before its end") {
    for (const bool calls : {false, true}) {
        const auto engine = make_engine(engine_config("mlx"));
        auto a = job(sequence(1, 200), 4);
        a.calls_tools = calls;
        engine->submit(1, a);
        std::vector<EngineEvent> events;
        for (double now = 0; !engine->idle();) now += engine->step(now, events);
        REQUIRE(events.front().what == EngineEvent::computed);
        REQUIRE(events.back().what == EngineEvent::done);
        std::size_t tokens = 0;
        for (const auto& event : events) {
            if (event.what != EngineEvent::token) continue;
            ++tokens;
            CHECK(event.hidden == calls);
        }
        CHECK(tokens == 4);
    }
}

TEST_CASE(
    "a prompt as the models have it: where its system block ends, who spoke last, tools called") {
    const auto prompt = [](const std::string& messages, const std::string& answer = "ok") {
        return render(R"({"messages": [)" + messages + R"(], "tools": [{"name": "f"}]})", answer);
    };
    const std::string system = R"({"role": "system", "content": "be brief"})",
                      user = R"({"role": "user", "content": "hi"})",
                      tool = R"({"role": "tool", "content": "1"})";
    CHECK(prompt(system + "," + user).system > 0);
    CHECK(prompt(system + "," + user).user_last);
    CHECK(prompt(user).system == 0);
    CHECK(prompt(system + "," + user + "," + tool).system == 0);
    CHECK_FALSE(prompt(system + "," + user + "," + tool).user_last);
    CHECK_FALSE(prompt(user).calls_tools);
    CHECK(prompt(user, R"([{"name": "f", "arguments": {}}])").calls_tools);
    // To where the user's own words begin.
    const auto one = prompt(system + R"(,{"role": "user", "content": "one"})"),
               two = prompt(system + R"(,{"role": "user", "content": "two"})");
    CHECK(std::mismatch(one.tokens.begin(), one.tokens.end(), two.tokens.begin()).first -
              one.tokens.begin() ==
          std::ptrdiff_t(one.system));
}

TEST_CASE("a cancelled request leaves memory and place to the others") {
    for (const auto& name : engines) {
        CAPTURE(name);
        auto config = engine_config(name);
        if (config.kind == "vllm" || config.kind == "sglang") config.cache = 700;
        const auto engine = make_engine(config);
        const auto a = job(sequence(1, 500), 50), b = job(sequence(9000, 500), 50);
        engine->submit(1, a);
        work(*engine, 0, 1);
        engine->cancel(1);
        CHECK(engine->idle());
        engine->submit(2, b);
        work(*engine, 10);
        CHECK(engine->idle());
    }
}

TEST_CASE("where memory ends, the last one admitted is computed anew") {
    auto config = engine_config("vllm");
    config.cache = 2048;
    const auto engine = make_engine(config);
    std::vector<Job> jobs;
    for (std::uint32_t i = 0; i < 4; ++i) jobs.push_back(job(sequence(i * 5000, 400), 300));
    for (std::size_t i = 0; i < 4; ++i) engine->submit(i + 1, jobs[i]);
    work(*engine);
    CHECK(engine->totals().preempted > 0);
}

TEST_CASE("2,000 requests in virtual time: near the bound, and not slower than file order") {
    const auto suite = groups(100, 20, 900, 90, 30);
    const auto jobs = suite.jobs();
    for (const auto* name : {"vllm", "sglang"}) {
        CAPTURE(name);
        const auto config = engine_config(name);
        const auto row = engine_row(config);
        const auto planned = run(suite, config, row, {true, 64});
        const auto file = run(suite, config, row, {false, 64});
        const auto least = least_prefill(jobs, config.page);
        CHECK(double(planned.totals.prefilled) <= 1.05 * double(least));
        CHECK(file.seconds >= 1.3 * planned.seconds);
    }
}

TEST_CASE("a conversation's turns follow one another, and find what was said before") {
    const auto suite = groups(4, 3, 300, 60, 30, 5);
    REQUIRE(suite.turns.size() == 60);
    CHECK(suite.chains().size() == 12);
    for (const auto& name : engines) {
        CAPTURE(name);
        const auto config = engine_config(name);
        const auto result = run(suite, config, engine_row(config));
        CHECK(result.answered == 60);
        if (name == "vllm" || name == "sglang")
            CHECK(double(result.totals.prefilled) <=
                  1.05 * double(least_prefill(suite.jobs(), config.page)));
    }
}

TEST_CASE("whatever the length of the answers, the number in flight is found by itself") {
    double sum = 0;
    int count = 0;
    for (const unsigned output : {3, 30, 90, 300}) { // some 1, 10, 30 and 100 tokens
        const auto suite = groups(20, 15, 300, 60, output);
        for (const auto* name : {"vllm", "sglang"})
            for (const auto& [start, most] : {std::pair(16u, 64u), std::pair(64u, 256u)}) {
                CAPTURE(name, output, start, most);
                const auto config = engine_config(name);
                auto row = engine_row(config);
                row.in_flight = start; // as behind an address of which nothing is known
                row.most_in_flight = most;
                double best = 1e9;
                for (const unsigned width : {most / 4, most / 2, most})
                    best = std::min(best, run(suite, config, row, {true, width}).seconds);
                const auto found = run(suite, config, row);
                CAPTURE(found.limit, found.after_fifth);
                CHECK(found.seconds <= 1.4 * best); // of two seconds in all
                sum += found.seconds / best;
                ++count;
            }
    }
    CHECK(sum <= 1.1 * count);
}
