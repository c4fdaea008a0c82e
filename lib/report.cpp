#include "evalrt/report.hpp"

#include "json_text.hpp"

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace evalrt {
namespace json = boost::json;
namespace detail {

void Quantiles::add(double value) {
    const double steps = value > lowest ? std::log(value / lowest) / std::log(growth) : 0;
    ++buckets_[std::size_t(std::min(steps, double(buckets_.size() - 1)))];
    ++count_;
}

std::optional<double> Quantiles::at(double share) const {
    if (count_ == 0) return {};
    const auto rank = std::uint64_t(share * double(count_ - 1)) + 1;
    std::uint64_t seen = 0;
    std::size_t i = 0;
    while ((seen += buckets_[i]) < rank) ++i;
    return lowest * std::pow(growth, double(i) + 0.5);
}

} // namespace detail

namespace {

json::value rounded(double value) { return std::round(value * 1000) / 1000; }

// Three digits that say something, of what may be far below one.
json::value significant(double value) {
    if (value <= 0) return 0.0;
    const auto unit = std::pow(10, 2 - std::floor(std::log10(value)));
    return std::round(value * unit) / unit;
}

template <class T>
json::value or_null(const std::optional<T>& value) {
    if (!value) return nullptr;
    if constexpr (std::is_same_v<T, double>)
        return rounded(*value);
    else
        return json::value(*value);
}

json::object percentiles(const detail::Quantiles& values) {
    return {{"p50", or_null(values.at(0.5))},
            {"p90", or_null(values.at(0.9))},
            {"p99", or_null(values.at(0.99))}};
}

} // namespace

void Parity::add(std::string_view id, bool same) {
    ++checked;
    if (same)
        ++identical;
    else
        different.emplace_back(id);
}

std::string parity_text(const Response& response) {
    const auto at = response.body.find("\"choices\"");
    auto end = response.body.rfind(", \"usage\"");
    if (end == std::string::npos || end < at) end = response.body.size();
    return at == std::string::npos ? response.text : response.body.substr(at, end - at);
}

void Report::describe(const BackendRow& row) {
    token_chunks_ = row.token_chunks;
    absent_cached_zero_ = row.absent_cached_zero;
    if (!row.cached_hint.empty()) cached_hint_ = row.cached_hint;
}

void Report::add(const Response& response) {
    attempts_ += response.attempts;
    if (response.outcome) {
        ++failed_;
        ++failures_[*response.outcome];
        return;
    }
    ++answered_;
    if (response.repeated) { // its tokens and times are the other's
        ++repeated_;
        return;
    }
    versions_.add(response.body);
    if (response.from_journal) {
        ++from_journal_;
        served_tokens_ += response.usage.completion_tokens.value_or(0);
    } else {
        const auto& usage = response.usage;
        asked_output_.add(usage.completion_tokens);
        longest_ = std::max(longest_, usage.completion_tokens.value_or(0));
        if (usage.prompt_tokens && response.maximum_cached)
            uncached_.add(*usage.prompt_tokens - *response.maximum_cached);
        else
            uncached_.add({});
    }
    prompt_.add(response.usage.prompt_tokens);
    cached_.add(response.usage.cached_tokens);
    completion_.add(response.usage.completion_tokens);
    expected_.add(response.expected_cached);
    maximum_.add(response.maximum_cached);
    const auto& timing = response.timing;
    if (!timing.first_text) return;
    // As a journal keeps them: what is read from it falls between the same bounds.
    const auto whole = [](Timing::Millis value) { return std::round(value.count() * 1000) / 1000; };
    const auto first = whole(*timing.first_text);
    ttft_.add(first);
    if (!token_chunks_) return; // how many were in the first is not known
    // By the server's count: it may send several tokens at once. But all at once show no time.
    const auto tokens = response.usage.completion_tokens.value_or(0);
    const auto last = timing.last_text ? whole(*timing.last_text) : first;
    if (tokens > 1 && last > first) {
        const double each = (last - first) / double(tokens - 1);
        inter_token_.add(each);
        if (tokens >= 8) token_ms_ = token_ms_ > 0 ? std::min(token_ms_, each) : each;
    }
}

std::optional<Report::Bound> Report::bound(const SchedulerStats& stats, double wall_seconds) const {
    if (stats.prefill_rate <= 0 || stats.decode_rate <= 0 || stats.pieces == 0) return {};
    if (!uncached_.all || !asked_output_.all || asked_output_.value <= 0) return {};
    Bound it{};
    it.prefill_tokens = uncached_.value;
    it.output_tokens = asked_output_.value;
    it.longest = longest_;
    it.prefill_rate = stats.prefill_rate;
    // A piece of text may hold several tokens.
    it.decode_rate =
        stats.decode_rate * std::max(1.0, double(it.output_tokens) / double(stats.pieces));
    it.token_seconds = token_ms_ / 1000;
    const double prefill = double(it.prefill_tokens) / it.prefill_rate,
                 decode = double(it.output_tokens) / it.decode_rate;
    const bool overlap = prefill + decode > wall_seconds;
    it.seconds = std::max(overlap ? std::max(prefill, decode) : prefill + decode,
                          double(longest_) * it.token_seconds);
    return it;
}

void Report::note(std::string_view words) {
    auto text = detail::repaired_utf8(words);
    if (std::find(notes_.begin(), notes_.end(), text) == notes_.end() && notes_.size() < 100)
        notes_.push_back(std::move(text));
}

std::string Report::prefix_cached() const {
    if (answered_ == 0) return "prefix cached: n/a (nothing was answered)";
    if (!cached_known()) return fmt::format("prefix cached: n/a ({})", cached_hint_);
    std::string line = fmt::format("prefix cached: {} tokens", cached_.value);
    if (prompt_.all && prompt_.value > 0) {
        line += fmt::format(" ({:.1f} % of {} prompt tokens",
                            100.0 * double(cached_.value) / double(prompt_.value), prompt_.value);
        if (expected_.all && maximum_.all)
            line += fmt::format("; expected {}, at most {}", expected_.value, maximum_.value);
        line += ")";
    }
    return line;
}

std::string Report::json(const SchedulerStats& stats, double wall_seconds) const {
    auto notes = notes_;
    if (auto text = versions(); !text.empty()) notes.push_back(std::move(text));
    auto version = server_version;
    if (!version && !versions_.first().empty()) version = versions_.first();
    const auto sum = [&](const Sum& it) -> json::value {
        if (answered_ == 0 || !it.all) return nullptr;
        return it.value;
    };
    const auto rate = [&](double count) -> json::value {
        if (wall_seconds <= 0 || answered_ == from_journal_ + repeated_) return nullptr;
        return rounded(count / wall_seconds);
    };
    const auto best = bound(stats, wall_seconds);
    json::object failures;
    for (const auto& [errc, count] : failures_) failures[name(errc)] = count;
    json::object out{
        {"backend", backend},
        {"model", detail::repaired_utf8(model)},
        {"server_version", or_null(version)},
        {"requests", answered_ + failed_ + not_run},
        {"answered", answered_},
        {"failed", failed_},
        {"not_run", not_run},
        {"failures", failures},
        {"from_journal", from_journal_},
        {"repeated", repeated_},
        {"attempts", attempts_},
        {"wall_seconds", rounded(wall_seconds)},
        {"requests_per_second", rate(double(answered_ - from_journal_ - repeated_))},
        {"output_tokens_per_second", completion_.all && answered_ > 0
                                         ? rate(double(completion_.value - served_tokens_))
                                         : nullptr},
        {"max_in_flight", max_in_flight > 0 ? json::value(max_in_flight) : nullptr},
        {"in_flight_mean", stats.busy_seconds > 0
                               ? rounded(stats.in_flight_seconds / stats.busy_seconds)
                               : json::value(nullptr)},
        {"prompt_tokens", sum(prompt_)},
        {"cached_tokens",
         json::object{{"actual", answered_ > 0 && cached_known() ? json::value(cached_.value)
                                                                 : json::value(nullptr)},
                      {"expected", sum(expected_)},
                      {"maximum", sum(maximum_)}}},
        {"prefix_cached", prefix_cached()},
        {"completion_tokens", sum(completion_)},
        {"ttft_ms", percentiles(ttft_)},
        {"inter_token_ms", percentiles(inter_token_)},
        {"bound_seconds", best ? rounded(best->seconds) : json::value()},
        {"ratio_to_bound",
         best && wall_seconds > 0 ? rounded(wall_seconds / best->seconds) : json::value()},
        {"calibration",
         best ? json::value(json::object{{"prefill_tokens_per_second", rounded(best->prefill_rate)},
                                         {"decode_tokens_per_second", rounded(best->decode_rate)},
                                         {"seconds_per_token", significant(best->token_seconds)},
                                         {"prefill_tokens", best->prefill_tokens},
                                         {"output_tokens", best->output_tokens},
                                         {"longest_output", best->longest}})
              : json::value()},
        {"order", order},
        {"parity", nullptr},
        {"server_restarts", server_restarts},
        {"server_output",
         server_output.empty() ? json::value() : json::value(detail::repaired_utf8(server_output))},
        {"notes", json::array(notes.begin(), notes.end())},
    };
    if (parity)
        out["parity"] =
            json::object{{"checked", parity->checked},
                         {"identical", parity->identical},
                         {"equal_score", nullptr},
                         {"different", parity->different.size()},
                         {"ids", json::array(parity->different.begin(), parity->different.end())}};
    return json::serialize(out);
}

} // namespace evalrt
