#include "evalrt/report.hpp"

#include "support/catch.hpp"

#include <boost/json.hpp>

#include <algorithm>
#include <cmath>
#include <random>

namespace json = boost::json;
using namespace evalrt;
using detail::Quantiles;

namespace {

Response answer(std::optional<std::int64_t> prompt = {}, std::optional<std::int64_t> cached = {},
                std::optional<std::int64_t> completion = {}) {
    Response response;
    response.usage = {prompt, cached, completion};
    response.attempts = 1;
    return response;
}

Response with_times(Response response, double first, double last) {
    response.timing.first_text = Timing::Millis(first);
    response.timing.last_text = Timing::Millis(last);
    return response;
}

// Of 100 tokens, 40 of them cached, and 20 of an answer, so many milliseconds apart.
Response streamed(double apart) {
    auto response = with_times(answer(100, 40, 20), 10, 10 + 19 * apart);
    response.maximum_cached = 60;
    return response;
}

Response failure(Errc errc, unsigned attempts = 1) {
    Response response;
    response.outcome = errc;
    response.attempts = attempts;
    return response;
}

json::object summary(const Report& report, SchedulerStats stats = {}, double seconds = 2) {
    return json::parse(report.json(stats, seconds)).as_object();
}

bool near(const json::value& value, double expected, double share = 0.01) {
    return value.is_number() && std::abs(value.to_number<double>() - expected) <= expected * share;
}

} // namespace

TEST_CASE("quantiles of nothing are nothing") {
    CHECK_FALSE(Quantiles().at(0.5));
    CHECK_FALSE(Quantiles().at(0));
}

TEST_CASE("quantiles are those of the sorted numbers, within one percent") {
    std::mt19937 random(3);
    for (int round = 0; round < 60; ++round) {
        Quantiles quantiles;
        std::vector<double> all;
        const auto count = 1 + random() % (round % 3 ? 2000 : 5);
        std::lognormal_distribution<double> spread(double(random() % 12) - 3, 1 + round % 3);
        for (std::size_t i = 0; i < count; ++i) {
            all.push_back(std::clamp(spread(random), 0.002, 1e8));
            quantiles.add(all.back());
        }
        std::sort(all.begin(), all.end());
        for (const double share : {0.0, 0.1, 0.5, 0.9, 0.99, 1.0}) {
            const double exact = all[std::size_t(share * double(count - 1))];
            CAPTURE(count, share, exact);
            REQUIRE(std::abs(*quantiles.at(share) - exact) <= 0.01 * exact);
        }
    }
}

TEST_CASE("quantiles take any number without harm") {
    Quantiles quantiles;
    for (const double value : {0.0, -1.0, 1e-300}) quantiles.add(value);
    CHECK(*quantiles.at(1) < 0.002);
    quantiles.add(1e300);
    quantiles.add(INFINITY);
    CHECK(*quantiles.at(1) > 1e8);
    quantiles.add(NAN);
    CHECK(*quantiles.at(0) < 0.002);
}

TEST_CASE("that servers of several versions have answered is noted") {
    Report report;
    const auto add = [&](const char* body) {
        auto one = answer();
        one.body = body;
        report.add(one);
    };
    add(R"({"choices": ["\"system_fingerprint\": \"no\""], "system_fingerprint":"v1"})");
    add(R"({"system_fingerprint" : "v1", "choices": []})");
    CHECK(report.versions() == "");
    CHECK(summary(report).at("server_version") == "v1");
    CHECK(summary(report).at("notes") == json::array());
    add(R"({"choices": [], "system_fingerprint": "v2"})");
    CHECK(report.versions().find("2 by \"v1\", 1 by \"v2\"") != std::string::npos);
    const auto before = report.versions();
    add(R"({"choices": [], "system_fingerprint": null})");
    add(R"({"type": "message", "content": []})");
    CHECK(report.versions() == before);
    const auto notes = summary(report).at("notes").as_array();
    REQUIRE(notes.size() == 1);
    CHECK(notes[0] == json::value(report.versions()));
    report.server_version = "0.9"; // known otherwise
    CHECK(summary(report).at("server_version") == "0.9");

    // One wire has it, the other one not.
    Report both;
    auto told = answer();
    for (const auto* body : {R"({"type": "message"})", R"({"system_fingerprint": "v1"})"}) {
        told.body = body;
        both.add(told);
    }
    CHECK(both.versions() == "");
    CHECK(summary(both).at("server_version") == "v1");

    // None of them tells it: nothing to note. A failure is nobody's answer.
    Report silent;
    silent.add(answer());
    auto failed = answer();
    failed.outcome = Errc::rejected;
    failed.body = R"({"system_fingerprint": "v1"})";
    silent.add(failed);
    CHECK(silent.versions() == "");
    // There is a bound to what is kept and said.
    Report many;
    for (int i = 0; i < 1000; ++i) {
        auto one = answer();
        one.body =
            R"({"system_fingerprint": ")" + std::string(500, 'v') + std::to_string(i) + "\"}";
        many.add(one);
    }
    CHECK(many.versions().size() < 1000);
    CHECK(many.versions().find("and more") != std::string::npos);
}

TEST_CASE("what was not measured is null") {
    const auto nothing = summary(Report(), {}, 0);
    for (const auto* key :
         {"server_version", "requests_per_second", "output_tokens_per_second", "in_flight_mean",
          "prompt_tokens", "completion_tokens", "bound_seconds", "ratio_to_bound", "parity"})
        CHECK(nothing.at(key).is_null());
    for (const auto* key : {"actual", "expected", "maximum"})
        CHECK(nothing.at("cached_tokens").at(key).is_null());
    for (const auto* key : {"p50", "p90", "p99"}) {
        CHECK(nothing.at("ttft_ms").at(key).is_null());
        CHECK(nothing.at("inter_token_ms").at(key).is_null());
    }
    for (const auto* key : {"requests", "answered", "failed", "not_run", "attempts"})
        CHECK(nothing.at(key) == 0);
    CHECK(nothing.at("failures") == json::object());
    CHECK(nothing.at("notes") == json::array());

    // An answer that reported nothing does not make it zero.
    Report report;
    report.add(answer());
    const auto one = summary(report);
    CHECK(one.at("answered") == 1);
    CHECK(one.at("prompt_tokens").is_null());
    CHECK(one.at("completion_tokens").is_null());
    CHECK(one.at("output_tokens_per_second").is_null());
    CHECK(one.at("cached_tokens").at("actual").is_null());
    CHECK(one.at("ttft_ms").at("p50").is_null());
    CHECK(one.at("requests_per_second") == 0.5);
}

TEST_CASE("a sum that not every answer reported is null, a zero that each did is zero") {
    Report report;
    report.add(answer(100, 0, 10));
    CHECK(summary(report).at("cached_tokens").at("actual") == 0);
    report.add(answer(50, 40, 5));
    auto both = summary(report);
    CHECK(both.at("prompt_tokens") == 150);
    CHECK(both.at("cached_tokens").at("actual") == 40);
    CHECK(both.at("completion_tokens") == 15);
    CHECK(both.at("output_tokens_per_second") == 7.5);
    report.add(answer(50, {}, 5));
    auto part = summary(report);
    CHECK(part.at("prompt_tokens") == 200);
    CHECK(part.at("cached_tokens").at("actual").is_null());
    CHECK(part.at("completion_tokens") == 20);
}

TEST_CASE("failures are counted by class and enter no figure of the answers") {
    Report report;
    report.add(answer(100, 90, 10));
    auto failed = with_times(failure(Errc::timed_out, 3), 50, 80);
    failed.usage.prompt_tokens = 7;
    report.add(failed);
    report.add(failure(Errc::timed_out, 2));
    report.add(failure(Errc::context_too_long));
    report.not_run = 4;
    const auto out = summary(report);
    CHECK(out.at("requests") == 8);
    CHECK(out.at("answered") == 1);
    CHECK(out.at("failed") == 3);
    CHECK(out.at("not_run") == 4);
    CHECK(out.at("attempts") == 7);
    CHECK(out.at("failures") == json::parse(R"({"timed_out": 2, "context_too_long": 1})"));
    CHECK(out.at("prompt_tokens") == 100);
    CHECK(out.at("cached_tokens").at("actual") == 90);
    CHECK(out.at("ttft_ms").at("p50").is_null());
    CHECK(report.answered() == 1);
    CHECK(report.failed() == 3);
    CHECK(report.failures().at(Errc::timed_out) == 2);
}

TEST_CASE("times to the first token and between tokens come from the answers that show them") {
    Report report;
    for (int i = 1; i <= 100; ++i) report.add(with_times(answer(10, 0, 11), i, i + 100));
    auto out = summary(report);
    CHECK(near(out.at("ttft_ms").at("p50"), 50));
    CHECK(near(out.at("ttft_ms").at("p90"), 90));
    CHECK(near(out.at("ttft_ms").at("p99"), 99));
    CHECK(near(out.at("inter_token_ms").at("p50"), 10));

    // One token, an unknown number of them, or one piece with all of them show no time between.
    Report single;
    single.add(with_times(answer(10, 0, 1), 30, 30));
    single.add(with_times(answer(10, 0, 1), 30, 40));
    single.add(with_times(answer(10, 0), 30, 90));
    single.add(with_times(answer(10, 0, 40), 30, 30));
    out = summary(single);
    CHECK(near(out.at("ttft_ms").at("p50"), 30));
    CHECK(out.at("inter_token_ms").at("p50").is_null());
}

TEST_CASE("the line on the prefix cache says what is known") {
    Report report;
    CHECK(report.prefix_cached() == "prefix cached: n/a (nothing was answered)");
    report.add(failure(Errc::timed_out));
    CHECK(report.prefix_cached() == "prefix cached: n/a (nothing was answered)");

    Report silent;
    silent.add(answer(100, 10));
    silent.add(answer(100));
    CHECK(silent.prefix_cached() ==
          "prefix cached: n/a (the server does not report cached tokens)");

    Report only_cached;
    only_cached.add(answer({}, 1234));
    CHECK(only_cached.prefix_cached() == "prefix cached: 1234 tokens");
    Report no_prompt;
    no_prompt.add(answer(0, 0));
    CHECK(no_prompt.prefix_cached() == "prefix cached: 0 tokens");

    Report shares;
    shares.add(answer(3000, 1234));
    CHECK(shares.prefix_cached() == "prefix cached: 1234 tokens (41.1 % of 3000 prompt tokens)");
    Report none;
    none.add(answer(3000, 0));
    CHECK(none.prefix_cached() == "prefix cached: 0 tokens (0.0 % of 3000 prompt tokens)");

    Report planned;
    auto response = answer(1000, 500);
    response.expected_cached = 480;
    response.maximum_cached = 600;
    planned.add(response);
    planned.add(response);
    CHECK(planned.prefix_cached() == "prefix cached: 1000 tokens (50.0 % of 2000 prompt tokens; "
                                     "expected 960, at most 1200)");
    CHECK(summary(planned).at("cached_tokens") ==
          json::parse(R"({"actual": 1000, "expected": 960, "maximum": 1200})"));
    response.expected_cached = {};
    planned.add(response);
    CHECK(planned.prefix_cached() == "prefix cached: 1500 tokens (50.0 % of 3000 prompt tokens)");
}

TEST_CASE("why the server reports no cached tokens is said as its row knows it") {
    Report report;
    BackendRow row;
    row.cached_hint = "start it with --count";
    report.describe(row);
    report.add(answer(100));
    CHECK(report.prefix_cached() == "prefix cached: n/a (start it with --count)");
}

TEST_CASE("a number left out is zero only where the server leaves out zeros and has shown others") {
    const auto figures = [](bool absent_is_zero, std::vector<std::optional<std::int64_t>> cached) {
        Report report;
        BackendRow row;
        row.absent_cached_zero = absent_is_zero;
        report.describe(row);
        for (const auto n : cached) report.add(answer(100, n));
        return std::pair(report.prefix_cached(), summary(report).at("cached_tokens").at("actual"));
    };
    CHECK(figures(true, {{}, 60, {}}).second == json::value(60));
    CHECK(figures(true, {{}, 60, {}}).first.starts_with("prefix cached: 60 tokens (20.0 %"));
    CHECK(figures(true, {{}, {}}).second.is_null());
    CHECK(figures(true, {{}, 0}).second.is_null());
    CHECK(figures(false, {{}, 60, {}}).second.is_null());
    CHECK(figures(false, {{}, 60}).first.starts_with("prefix cached: n/a"));
}

TEST_CASE("times between tokens are not reported where a chunk may hold several") {
    Report report;
    BackendRow row;
    row.token_chunks = false;
    report.describe(row);
    report.add(with_times(answer({}, {}, 11), 100, 200));
    const auto out = summary(report);
    CHECK_FALSE(out.at("ttft_ms").at("p50").is_null());
    CHECK(out.at("inter_token_ms").at("p50").is_null());
}

TEST_CASE("what was run stands in the summary") {
    Report report;
    report.backend = "mlx-server";
    report.model = "a \"b\"";
    report.order = "prefix";
    report.server_version = "0.31";
    report.max_in_flight = 16;
    report.server_restarts = 2;
    report.note("one");
    report.note("two");
    report.note("one");
    SchedulerStats stats;
    stats.in_flight_seconds = 30;
    stats.busy_seconds = 4;
    const auto out = summary(report, stats, 12.3456);
    CHECK(out.at("backend") == "mlx-server");
    CHECK(out.at("model") == "a \"b\"");
    CHECK(out.at("order") == "prefix");
    CHECK(out.at("server_version") == "0.31");
    CHECK(out.at("max_in_flight") == 16);
    CHECK(out.at("in_flight_mean") == 7.5);
    CHECK(out.at("server_restarts") == 2);
    CHECK(near(out.at("wall_seconds"), 12.346, 1e-9));
    CHECK(out.at("notes") == json::parse(R"(["one", "two"])"));
}

TEST_CASE("notes are few, however many there are") {
    Report report;
    for (int i = 0; i < 1000; ++i) report.note(std::to_string(i));
    CHECK(summary(report).at("notes").as_array().size() == 100);
}

TEST_CASE("parity compares what was answered, not ids, times and counts") {
    Response first, second;
    first.body = R"({"id": "1", "created": 1, "choices": [{"message": {"content": "a"}}], )"
                 R"("usage": {"prompt_tokens": 1}})";
    second.body = R"({"id": "2", "created": 2, "choices": [{"message": {"content": "a"}}], )"
                  R"("usage": {"prompt_tokens": 1, "cached": 1}})";
    CHECK(parity_text(first) == parity_text(second));
    second.body.replace(second.body.find("\"a\""), 3, "\"b\"");
    CHECK(parity_text(first) != parity_text(second));
    first = {}, second = {};
    first.text = "one", second.text = "two";
    CHECK(parity_text(first) != parity_text(second));
}

TEST_CASE("a check of parity stands in the summary when it was made") {
    Report report;
    report.parity = Parity{5, 3, {"a", "b\""}};
    CHECK(summary(report).at("parity") ==
          json::parse(R"({"checked": 5, "identical": 3, "equal_score": null, "different": 2,
                          "ids": ["a", "b\""]})"));
    Parity parity;
    parity.add("a", true);
    parity.add("b", false);
    report.parity = parity;
    CHECK(summary(report).at("parity").at("checked") == 2);
    CHECK(summary(report).at("parity").at("identical") == 1);
    CHECK(summary(report).at("parity").at("ids") == boost::json::array{"b"});
    report.parity = Parity{};
    CHECK(summary(report).at("parity").at("checked") == 0);
}

TEST_CASE("a token's time has three digits that say something") {
    Report report;
    SchedulerStats stats;
    stats.prefill_rate = 100'000;
    stats.decode_rate = 50'000;
    stats.pieces = 20;
    report.add(streamed(0.12345));
    const auto token = summary(report, stats, 4)["calibration"].at("seconds_per_token");
    CHECK(near(token, 0.000123, 1e-6));
}

TEST_CASE("the bound is what had to be done at the best rates seen") {
    Report report;
    SchedulerStats stats;
    stats.prefill_rate = 100;
    stats.decode_rate = 50;
    stats.pieces = 40;
    CHECK(summary(report, stats)["bound_seconds"].is_null());
    auto response = streamed(20);
    report.add(response);
    report.add(response);
    auto repeated = response;
    repeated.repeated = true;
    report.add(repeated); // costs nothing
    auto out = summary(report, stats, 4);
    CHECK(near(out["bound_seconds"], 80 / 100.0 + 40 / 50.0));
    CHECK(near(out["ratio_to_bound"], 4 / 1.6));
    CHECK(out["answered"] == 3);
    CHECK(out["repeated"] == 1);
    CHECK(out["prompt_tokens"] == 200);
    CHECK(near(out["output_tokens_per_second"], 10));
    CHECK(near(out["calibration"].at("prefill_tokens_per_second"), 100));
    CHECK(near(out["calibration"].at("seconds_per_token"), 0.02));
    CHECK(out["calibration"].at("prefill_tokens") == 80);
    stats.pieces = 20; // two tokens each
    CHECK(near(summary(report, stats, 4)["bound_seconds"], 80 / 100.0 + 40 / 100.0));
    // A run that took less shows that both go on at the same time.
    CHECK(near(summary(report, stats, 1)["bound_seconds"], 80 / 100.0));
    stats.prefill_rate = stats.decode_rate = 1e9; // then it is the longest answer
    CHECK(near(summary(report, stats, 4)["bound_seconds"], 20 * 0.02));
    response.maximum_cached.reset();
    report.add(response);
    CHECK(summary(report, stats)["bound_seconds"].is_null());
}
