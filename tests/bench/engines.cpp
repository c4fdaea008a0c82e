// Suites against engine models, in virtual time: one JSON line a suite, engine and policy.
//   engines SUITE.jsonl ENGINE POLICY...   POLICY: planned or file, and after a colon how many in
//                                          flight (file:16); planned alone: found by itself
//   engines replay SUITE.jsonl ENGINE POLICY   what each request finds in the cache
#include "support/engine_run.hpp"

#include <boost/json.hpp>

#include <fmt/format.h>

#include <charconv>
#include <chrono>
#include <fstream>

namespace {

using namespace evalrt;
using namespace evalrt::test;
namespace json = boost::json;

RunOptions policy(std::string_view text) {
    RunOptions options;
    const auto colon = text.find(':');
    const auto name = text.substr(0, colon);
    if (name != "planned" && name != "file")
        throw std::invalid_argument("no policy is called " + std::string(text));
    options.planned = name == "planned";
    if (colon != text.npos)
        std::from_chars(text.data() + colon + 1, text.data() + text.size(), options.in_flight);
    return options;
}

int run(std::vector<std::string> arguments) {
    const bool replay = arguments.front() == "replay";
    if (replay) arguments.erase(arguments.begin());
    if (arguments.size() < 3) throw std::invalid_argument("give a suite, an engine and policies");
    std::ifstream file(arguments[0]);
    if (!file) throw std::invalid_argument("cannot read " + arguments[0]);
    const auto suite = read_suite(file);
    const auto jobs = suite.jobs();
    const auto chains = suite.chains();
    // "llama:8": so many slots, and no cache beside them with "llama:8:0".
    auto engine = arguments[1];
    std::vector<std::size_t> numbers;
    for (auto at = engine.find(':'); at != engine.npos; at = engine.find(':', at + 1)) {
        std::size_t n = 0;
        std::from_chars(engine.data() + at + 1, engine.data() + engine.size(), n);
        numbers.push_back(n);
    }
    auto config = engine_config(engine.substr(0, engine.find(':')));
    if (!numbers.empty()) config.batch = unsigned(numbers[0]);
    if (numbers.size() > 1) config.cache = numbers[1];
    auto row = engine_row(config);
    // After the policy, "leaders=2" and the like: another row than the engine's own.
    std::erase_if(arguments, [&](const std::string& text) {
        const auto at = text.find('=');
        if (at == text.npos) return false;
        const auto n = unsigned(std::atoi(text.c_str() + at + 1));
        const auto name = text.substr(0, at);
        if (name == "leaders") row.leaders = n;
        if (name == "padding") row.padding_tokens = n;
        if (name == "refill") row.refill = n;
        if (name == "sessions") row.sessions = n;
        if (name == "cache") row.cache_tokens = n;
        if (name == "shared") row.shared_tokens = n;
        if (name == "start") row.in_flight = n;
        if (name == "most") row.most_in_flight = n;
        return true;
    });
    const auto least = least_prefill(jobs, config.page);
    const auto bound = least_seconds(config, jobs, chains, least);
    for (std::size_t i = 2; i < arguments.size(); ++i) {
        const auto start = std::chrono::steady_clock::now();
        const auto result = evalrt::test::run(suite, config, row, policy(arguments[i]));
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        json::object out{{"engine", engine},
                         {"policy", arguments[i]},
                         {"requests", result.answered},
                         {"seconds", result.seconds},
                         {"bound_seconds", bound},
                         {"prompt_tokens", result.prompt_tokens},
                         {"prefilled", result.totals.prefilled},
                         {"bound_prefilled", least},
                         {"padded", result.totals.padded},
                         {"preempted", result.totals.preempted},
                         {"in_flight_mean", result.in_flight_mean},
                         {"limit", result.limit},
                         {"limit_after_fifth", result.after_fifth},
                         {"limit_least", result.most > 0 ? result.least : result.limit},
                         {"limit_most", result.most > 0 ? result.most : result.limit},
                         {"real_seconds", took.count()}};
        if (replay) {
            json::array cached;
            for (const auto& [turn, tokens] : result.cached) cached.push_back(tokens);
            out["cached"] = std::move(cached);
        }
        fmt::print("{}\n", json::serialize(out));
        std::fflush(stdout);
    }
    return 0;
}

} // namespace

int main(int argc, char** argv) try {
    if (argc < 2) throw std::invalid_argument("give a suite, an engine and policies");
    return run({argv + 1, argv + argc});
} catch (const std::exception& error) {
    fmt::print(stderr, "error: {}\n", error.what());
    return 2;
}
