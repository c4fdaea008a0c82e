#include "plan.hpp"

#include "batch.hpp"
#include "choices.hpp"
#include "wire.hpp"

#include <fmt/format.h>

#include <algorithm>

#include <sys/resource.h>

namespace evalrt::program {
namespace {

constexpr double bytes_per_token = 4;      // for English text and JSON; the servers' own differ
constexpr std::uint64_t some_tokens = 256; // of an answer that has no bound

// What an output token costs, in prompt tokens: decoding is bound by memory, prefilling is not.
constexpr std::uint64_t decode_weight = 4;

// An answer's JSON beside its text, and the text of a token.
constexpr double answer_bytes = 700, answer_bytes_per_token = 4.5, journal_overhead = 1.3;

std::string grouped(std::uint64_t value) {
    auto text = std::to_string(value);
    for (auto at = long(text.size()) - 3; at > 0; at -= 3) text.insert(std::size_t(at), 1, ',');
    return text;
}

std::uint64_t tokens(std::uint64_t bytes) { return std::uint64_t(double(bytes) / bytes_per_token); }

double percent(std::uint64_t part, std::uint64_t whole) {
    return whole > 0 ? 100 * double(part) / double(whole) : 0;
}

std::string short_percent(std::uint64_t part, std::uint64_t whole) {
    const auto value = percent(part, whole);
    return value < 99.5 ? fmt::format("{:.2g}", value) : grouped(std::uint64_t(value + 0.5));
}

double journal_bytes(const Plan& plan) {
    return journal_overhead * (answer_bytes * double(plan.order.size()) +
                               answer_bytes_per_token * double(plan.output_tokens));
}

struct Spread {
    std::size_t fewest = 0, most = 0;
    double largest = 0; // cost of the dearest shard, by the mean one's
};

Spread spread(const detail::Shards& shards) {
    Spread it;
    std::uint64_t total = 0, largest = 0;
    for (std::size_t i = 0; i < shards.count(); ++i) {
        const auto size = shards.end(i) - shards.begin(i);
        it.fewest = i == 0 ? size : std::min(it.fewest, size);
        it.most = std::max(it.most, size);
        total += shards.cost(i);
        largest = std::max(largest, shards.cost(i));
    }
    if (total > 0) it.largest = double(largest) * double(shards.count()) / double(total);
    return it;
}

} // namespace

Plan plan(std::size_t count, const std::function<const Request*(std::size_t)>& request,
          const RuntimeOptions& options) {
    Plan plan;
    const auto* found = find_backend_row(options.backend);
    auto row = options.row ? *options.row : found ? *found : BackendRow();
    if (options.wire) row.wire = *options.wire;
    auto how = planner_options(row);
    how.in_order = options.order == Order::fifo;
    RadixPlanner planner(how);
    std::vector<std::uint32_t> outputs(count);
    for (std::size_t i = 0; i < count; ++i) {
        const auto* it = request(i);
        if (!it) continue;
        const auto prompt = detail::read_prompt(*it, row);
        plan.unbounded += !prompt.output_tokens;
        outputs[i] = std::uint32_t(
            std::clamp<std::int64_t>(prompt.output_tokens.value_or(some_tokens), 0, 1'000'000));
        outputs[i] *= detail::choices_asked(*it); // the prompt is theirs together
        plan.output_tokens += outputs[i];
        planner.add(i + 1, prompt);
    }
    for (const auto& it : planner.order()) {
        const auto place = std::uint32_t(it.id - 1);
        const auto cold = it.prompt_bytes - it.shared_bytes;
        plan.order.push_back(place);
        plan.items.push_back(
            {cold + std::uint64_t(bytes_per_token) * decode_weight * outputs[place],
             it.shared_bytes, it.continues});
        plan.prompt_bytes += it.prompt_bytes;
        plan.cold_bytes += cold;
    }
    return plan;
}

std::vector<std::size_t> shard_places(const Plan& plan, const detail::Shards& shards,
                                      std::size_t shard) {
    std::vector<std::size_t> places(plan.order.begin() + long(shards.begin(shard)),
                                    plan.order.begin() + long(shards.end(shard)));
    std::sort(places.begin(), places.end());
    return places;
}

std::string cut_name(const Plan& plan, const detail::Shards& shards,
                     const std::function<std::string_view(std::size_t)>& id) {
    std::uint64_t hash = 14695981039346656037u; // FNV-1a
    const auto add = [&](std::string_view bytes) {
        for (const unsigned char c : bytes) hash = (hash ^ c) * 1099511628211u;
    };
    const auto count = [&](std::uint64_t n) { add(std::to_string(n) + " "); };
    for (std::size_t i = 0; i < shards.count(); ++i) count(shards.begin(i));
    for (const auto i : plan.order) {
        count(i);
        count(id(i).size());
        add(id(i));
    }
    return fmt::format("{:016x}", hash);
}

SuiteContent::SuiteContent(std::string_view kind) : key_(detail::journal_key(kind, "", "")) {}

void SuiteContent::add(std::string_view id, const Request& request) {
    const std::string_view before(reinterpret_cast<const char*>(&key_), sizeof key_);
    const auto name = fmt::format("{} {}{}", id.size(), id, request.endpoint);
    key_ = detail::journal_key(before, name, request.body);
}

std::string SuiteContent::digest() const {
    return fmt::format("{:016x}{:016x}", key_.high, key_.low);
}

std::string shard_line(const Plan& plan, const detail::Shards& shards, std::size_t shard) {
    return fmt::format("shard {} of {} (from 0): {} of {} requests; for the cuts about {} prompt "
                       "tokens are computed again in all shards, beside {} that one run computes",
                       shard, shards.count(), grouped(shards.end(shard) - shards.begin(shard)),
                       grouped(plan.order.size()), grouped(tokens(shards.duplicated())),
                       grouped(tokens(plan.cold_bytes)));
}

std::string dry_run_text(const Plan& plan, const detail::Shards& shards, const DryRun& run) {
    std::string text = fmt::format(
        "{} requests in {:.0f} MB{}{}\n", grouped(run.requests), double(run.input_bytes) / 1e6,
        run.skipped > 0 ? fmt::format(", {} lines of which are none", run.skipped) : "",
        run.repeated > 0
            ? fmt::format(", {} are there already and not asked", grouped(run.repeated))
            : "");
    text += fmt::format(
        "prompt: about {} tokens (of 4 bytes), {} of them shared with what is asked "
        "before ({:.1f} %); {} to compute\n",
        grouped(tokens(plan.prompt_bytes)), grouped(tokens(plan.prompt_bytes - plan.cold_bytes)),
        percent(plan.prompt_bytes - plan.cold_bytes, plan.prompt_bytes),
        grouped(tokens(plan.cold_bytes)));
    text += fmt::format(
        "answers: {} tokens at most{}\n", grouped(plan.output_tokens),
        plan.unbounded > 0
            ? fmt::format(", {} of them taken for 256 that have no bound", grouped(plan.unbounded))
            : "");
    const auto sizes = spread(shards);
    if (shards.count() > 1)
        text +=
            fmt::format("shards: {} of {} to {} requests, the dearest {:.3f} of the mean; about "
                        "{} prompt tokens computed again for the cuts ({} % more)\n",
                        shards.count(), grouped(sizes.fewest), grouped(sizes.most), sizes.largest,
                        grouped(tokens(shards.duplicated())),
                        short_percent(shards.duplicated(), plan.cold_bytes));
    const auto count = double(std::max<std::size_t>(shards.count(), 1));
    text += fmt::format("disk: about {:.0f} MB for all journals, if all answers are that long\n",
                        journal_bytes(plan) / 1e6);
    const auto work = double(tokens(plan.cold_bytes + shards.duplicated())) / 1e4 +
                      double(plan.output_tokens) / 1e3;
    text += fmt::format("time: {:.0f} s{}, for servers that prefill 10,000 and decode 1,000 "
                        "tokens a second in all (measure yours: evalrt run --limit N)\n",
                        work / count * (sizes.largest > 0 ? sizes.largest : 1),
                        shards.count() > 1 ? " each" : " on one server");
    text += fmt::format("planned in {:.1f} s with {:.0f} MB; nothing was asked\n", run.seconds,
                        megabytes_used());
    return text;
}

std::string dry_run_json(const Plan& plan, const detail::Shards& shards, const DryRun& run) {
    const auto sizes = spread(shards);
    return fmt::format(
        R"({{"requests": {}, "skipped": {}, "repeated": {}, "input_bytes": {}, "prompt_tokens": {}, )"
        R"("cold_tokens": {}, "output_tokens": {}, "shards": {}, "fewest": {}, "most": {}, )"
        R"("dearest": {:.4f}, "duplicated_tokens": {}, "journal_bytes": {:.0f}, )"
        R"("plan_seconds": {:.2f}, "megabytes": {:.0f}}})",
        run.requests, run.skipped, run.repeated, run.input_bytes, tokens(plan.prompt_bytes),
        tokens(plan.cold_bytes), plan.output_tokens, shards.count(), sizes.fewest, sizes.most,
        sizes.largest, tokens(shards.duplicated()), journal_bytes(plan), run.seconds,
        megabytes_used());
}

double megabytes_used() {
    rusage used{};
    ::getrusage(RUSAGE_SELF, &used);
#ifdef __APPLE__
    return double(used.ru_maxrss) / 1e6; // bytes there
#else
    return double(used.ru_maxrss) / 1e3; // kilobytes here
#endif
}

} // namespace evalrt::program
