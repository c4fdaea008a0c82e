#include "probe.hpp"

#include "evalrt/detail/complete.hpp"

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/bind_executor.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <random>
#include <stdexcept>

namespace evalrt {
namespace detail {
namespace {

using namespace std::chrono_literals;

constexpr auto commit_wait = 5s;   // longer than oMLX takes to store a prompt
constexpr double warm_ratio = 1.6; // cold over warm, where only the time tells
constexpr double batch_ratio = 1.25;
constexpr unsigned tokens_decoded = 24;
constexpr std::int64_t own_tokens = 64; // of a prompt, after its prefix, at most

} // namespace

std::optional<ProbePlan::Step> ProbePlan::next() const {
    switch (phase_) {
    case Phase::cold:
    case Phase::after: return Step{{{1, 1}}};
    case Phase::fill: return Step{{{2, 1}}};
    case Phase::later: return Step{{{1, 1}}, false, commit_wait};
    case Phase::page: return Step{{{2, 1}}};
    case Phase::first_text: return Step{{{2, tokens_decoded}, {2, 1}}, true};
    // The first one keeps the server busy, so that the two others are taken up together.
    case Phase::at_once: return Step{{{3, 1}, {4, 1}, {4, 1}}, false, {}, 5ms};
    case Phase::alone: return Step{{{0, tokens_decoded}}};
    case Phase::together:
        return Step{{{0, tokens_decoded}, {0, tokens_decoded}, {0, tokens_decoded}}};
    case Phase::over: break;
    }
    return {};
}

// Two requests with the same prefix: has the second one found it in the cache?
bool ProbePlan::warm(const ProbeSeen& seen) {
    if (seen.usage.cached_tokens) {
        if (*seen.usage.cached_tokens > 0) page_ = std::gcd(page_, *seen.usage.cached_tokens);
        // A chat template's few tokens are not the prefix.
        return *seen.usage.cached_tokens > 200;
    }
    result_.inferred = true;
    return seen.first_text > 0 && seen.first_text * warm_ratio < cold_;
}

// What is computed anew of it is a part of a page, and what is no prefix.
void ProbePlan::stored(const ProbeSeen& seen) {
    const auto cached = seen.usage.cached_tokens.value_or(0);
    if (cached > 0) rest_ = std::max(rest_, seen.usage.prompt_tokens.value_or(0) - cached);
}

void ProbePlan::answered(const std::vector<ProbeSeen>& seen, double seconds) {
    result_.requests += unsigned(seen.size());
    if (std::any_of(seen.begin(), seen.end(), [](const auto& it) { return !it.answered; })) {
        broken_ = true;
        return finish();
    }
    for (const auto& it : seen)
        if (it.usage.cached_tokens) result_.reports_cached = true;
    switch (phase_) {
    case Phase::cold:
        cold_ = seen[0].first_text;
        phase_ = Phase::after;
        break;
    case Phase::after:
        // A count that is left out where it is 0 is no count.
        if (!result_.reports_cached) result_.reports_cached = false;
        after_ = warm(seen[0]);
        stored(seen[0]);
        phase_ = after_ ? Phase::first_text : Phase::fill;
        break;
    case Phase::fill: phase_ = Phase::later; break;
    case Phase::later:
        later_ = warm(seen[0]);
        stored(seen[0]);
        // What is not there after the end is not there before it.
        phase_ = later_ && page_ > 0 ? Phase::page : Phase::alone;
        break;
    case Phase::page: // of a prefix of another length
        warm(seen[0]);
        stored(seen[0]);
        phase_ = Phase::alone;
        break;
    case Phase::first_text:
        at_first_text_ = warm(seen[1]);
        // Only a count can tell whether one of two found what the other had just begun.
        phase_ = at_first_text_ && !result_.inferred ? Phase::at_once
                 : page_ > 0                         ? Phase::page
                                                     : Phase::alone;
        break;
    case Phase::at_once:
        at_once_ = warm(seen[1]) || warm(seen[2]);
        phase_ = Phase::alone;
        break;
    case Phase::alone:
    case Phase::together: {
        double tokens = 0;
        for (const auto& it : seen)
            tokens += double(it.usage.completion_tokens.value_or(tokens_decoded));
        const double rate = tokens / std::max(seconds, 1e-6);
        if (phase_ == Phase::alone) {
            alone_ = rate;
            phase_ = Phase::together;
        } else {
            result_.batching = rate / std::max(alone_, 1e-9);
            finish();
        }
        break;
    }
    case Phase::over: break;
    }
}

void ProbePlan::finish() {
    phase_ = Phase::over;
    const auto say = [&](std::string text) { result_.notes.push_back(std::move(text)); };
    if (at_once_) {
        result_.release = Release::at_once;
    } else if (at_first_text_) {
        result_.release = Release::first_text;
    } else if (after_ || later_) {
        result_.release = Release::done;
        if (later_) result_.commit_delay = commit_wait;
    }
    if (page_ > 0) {
        result_.page = unsigned(page_);
        std::int64_t least = 1;
        while (least < page_ && (page_ % least != 0 || least + own_tokens <= rest_)) ++least;
        result_.page_least = unsigned(least);
    }
    if (broken_) say("a request of the probe failed: what comes after it was not measured");
    if (result_.release == Release::at_once)
        say("a prefix is shared while it is filled");
    else if (result_.release == Release::first_text)
        say("a prefix is shared from the first token of the answer");
    else if (result_.release == Release::done)
        say(later_ ? "a prefix is shared some seconds after the request has ended"
                   : "a prefix is shared once the request has ended");
    else if (!broken_)
        say("no prefix was found again: there is no prefix cache, or it is switched off");
    if (result_.inferred) say("the server reports no cached tokens: this was told by time");
    if (result_.page && *result_.page > 1)
        say(result_.page == result_.page_least
                ? fmt::format("cached by pages of {} tokens", *result_.page)
                : fmt::format("cached by pages of {} tokens, at most", *result_.page));
    if (result_.batching)
        say(fmt::format("three at once bring {:.2f} times the tokens a second of one{}",
                        *result_.batching,
                        *result_.batching < batch_ratio ? ": it does not batch" : ""));
}

namespace {

// Of the server itself.
std::string own_causes(const BackendRow& row) {
    if (row.alone.empty()) return "its own limit of requests at once may be 1";
    std::string text;
    for (const auto& it : row.alone)
        text += fmt::format("{}{}{}", text.empty() ? "what makes it do so is " : ", or ", it.why,
                            it.option.empty() ? "" : " (" + it.option + ")");
    return text;
}

} // namespace

std::string why_one_by_one(const BackendRow& row, const std::optional<BackendRow::Alone>& given,
                           unsigned unusual, std::optional<double> probed) {
    constexpr std::array<std::string_view, 4> names{"", "a penalty or a logit_bias", "a seed",
                                                    "a penalty or a logit_bias, or a seed"};
    const auto has = names.at(unusual & 3);
    const bool seed = row.drop_seed_at_zero && (unusual & 2);
    const bool batches = probed && *probed >= batch_ratio;
    const auto measured =
        probed ? fmt::format("three of the probe's at once bring {:.2f} times the tokens of one",
                             *probed)
               : "";
    std::string why;
    if (given) {
        why = fmt::format("it has {} ({})", given->why, given->option);
    } else if (seed) {
        why = "requests have a seed at a temperature above 0";
        if (batches) why += "; others it batches: " + measured;
    } else if (batches) {
        why = "it is something of these requests, as " + measured;
        if (!has.empty()) why += fmt::format("; they have {}", has);
    } else {
        why = own_causes(row);
        if (probed)
            why = "so it does the probe's, and " + why;
        else if (!has.empty() && row.alone.empty())
            why += fmt::format(", or it does so for {}", has);
    }
    return fmt::format("{} answers one request at a time: {}", row.name, why);
}

std::string ProbePlan::prompt(const ProbeAsk& ask, unsigned nonce, unsigned serial) {
    static constexpr std::array words{"river", "stone",  "green", "walk",  "seven", "light",
                                      "house", "under",  "paper", "north", "bread", "clear",
                                      "table", "winter", "glass", "song"};
    std::string text;
    const auto add = [&](unsigned count, std::minstd_rand& random) {
        for (unsigned i = 0; i < count; ++i)
            text.append(text.empty() ? "" : " ").append(words[random() / 7 % words.size()]);
    };
    // Of unlike length, so that the pages in them have one common divisor: the first two, which
    // are all that some servers show, are four and three of oMLX's.
    static constexpr std::array<unsigned, 5> lengths{0, 1201, 907, 1093, 1151};
    std::minstd_rand shared(nonce * 31 + ask.prefix + 1);
    add(lengths.at(ask.prefix), shared);
    std::minstd_rand own(nonce * 131 + serial * 7919 + 1);
    add(12, own);
    return text + fmt::format(" {}. Count from one to fifty in words.", serial);
}

namespace {

struct Probing : std::enable_shared_from_this<Probing> {
    Probing(asio::any_io_executor on, BackendRow of, HttpOptions with)
        : executor(on), http(on, std::move(of), std::move(with)), timer(on) {}

    void step() {
        const auto next = plan.next();
        if (!next || cancelled)
            return end(cancelled ? asio::error::operation_aborted : first_error);
        current = *next;
        seen.assign(current.asks.size(), {});
        open = current.asks.size();
        after(current.wait_before, [this] {
            started = Clock::now();
            send(0);
            if (!current.follow) after(current.stagger, [this] { send_rest(); });
        });
    }

    template <class F>
    void after(std::chrono::milliseconds delay, F call) {
        if (delay.count() == 0) return call();
        timer.expires_after(delay);
        timer.async_wait([self = shared_from_this(), call](error_code) { call(); });
    }

    void send_rest() {
        if (std::exchange(rest_sent, true)) return;
        for (std::size_t i = 1; i < current.asks.size(); ++i) send(i);
    }

    void send(std::size_t i) {
        const auto& ask = current.asks[i];
        const boost::json::object message{{"role", "user"},
                                          {"content", ProbePlan::prompt(ask, nonce, ++serial)}};
        const boost::json::object body{{"messages", boost::json::array{message}},
                                       {"max_tokens", ask.max_tokens},
                                       {"temperature", 0}};
        Request request;
        request.body = boost::json::serialize(body);
        const auto at = Clock::now();
        const auto passed = [at] {
            return std::chrono::duration<double>(Clock::now() - at).count();
        };
        auto on_text = [self = shared_from_this(), i, passed](std::string_view) {
            auto& it = self->seen[i];
            if (it.first_text == 0) it.first_text = passed();
            if (i == 0 && self->current.follow) self->send_rest();
        };
        auto done = [self = shared_from_this(), i, passed](error_code ec, Response response) {
            auto& it = self->seen[i];
            it.total = passed();
            if (it.first_text == 0) it.first_text = it.total;
            it.answered = !ec;
            it.usage = response.usage;
            self->returned(i, ec);
        };
        http.async_complete(
            std::move(request), std::move(on_text),
            asio::bind_executor(executor, asio::bind_cancellation_slot(signals[i].slot(), done)));
    }

    void returned(std::size_t i, error_code ec) {
        if (plan.result().requests == 0 && ec) first_error = ec;
        if (i == 0 && current.follow)
            send_rest(); // it brought no text: they are asked all the same
        if (--open > 0) return;
        rest_sent = false;
        plan.answered(seen, std::chrono::duration<double>(Clock::now() - started).count());
        step();
    }

    void cancel() {
        cancelled = true;
        timer.cancel();
        for (auto& signal : signals) signal.emit(asio::cancellation_type::terminal);
    }

    void end(error_code ec) {
        if (auto call = std::exchange(on_end, nullptr)) call(ec, plan.result());
    }

    asio::any_io_executor executor;
    HttpBackend http;
    asio::steady_timer timer;
    ProbePlan plan;
    ProbePlan::Step current;
    std::vector<ProbeSeen> seen;
    std::array<asio::cancellation_signal, 4> signals;
    std::size_t open = 0;
    Clock::time_point started;
    const unsigned nonce = std::random_device()();
    unsigned serial = 0;
    bool rest_sent = false, cancelled = false;
    error_code first_error;
    std::function<void(error_code, ProbeResult)> on_end;
};

} // namespace

void start_probe(asio::any_io_executor executor, BackendRow row, HttpOptions options,
                 asio::any_completion_handler<void(error_code, ProbeResult)> handler) {
    std::shared_ptr<Probing> probing;
    try {
        probing = std::make_shared<Probing>(executor, std::move(row), std::move(options));
    } catch (const std::invalid_argument& invalid) {
        ProbeResult result;
        result.notes.push_back(invalid.what());
        return complete(executor, std::move(handler), asio::error::invalid_argument,
                        std::move(result));
    }
    on_cancel(handler, [weak = std::weak_ptr(probing)] {
        if (auto it = weak.lock()) it->cancel();
    });
    auto kept = std::make_shared<asio::any_completion_handler<void(error_code, ProbeResult)>>(
        std::move(handler));
    probing->on_end = [executor, kept](error_code ec, ProbeResult result) {
        complete(executor, std::move(*kept), ec, std::move(result));
    };
    probing->step();
}

} // namespace detail

BackendRow corrected(BackendRow row, const ProbeResult& result, std::vector<std::string>& notes) {
    const auto changed = [&](auto& claim, const auto& measured, std::string_view what) {
        if (claim == measured) return;
        claim = measured;
        notes.push_back(std::string(what));
    };
    // Of a server with slots no prefix is anybody's but the slot's.
    if (result.release && row.release != Release::slot) {
        changed(row.release, *result.release, "measured: when a prefix shows to others");
        // How long it takes was not measured, only that it is no longer than that.
        if (*result.release == Release::done && row.commit_delay.count() == 0)
            row.commit_delay = result.commit_delay;
    }
    // Who waits for too long a prefix shares none of the shorter ones.
    if (result.page_least && *result.page_least > row.shared_tokens)
        changed(row.shared_tokens, *result.page_least, "measured: the cache's page");
    if (result.reports_cached == true) row.cached_hint.clear();
    if (result.batching && *result.batching < detail::batch_ratio && row.in_flight > 1) {
        row.most_in_flight = 0;
        changed(row.in_flight, 1u,
                fmt::format("measured: the server does not batch (three at once bring {:.2f} times "
                            "the tokens of one; {}), so it is asked one at a time; --max-in-flight "
                            "sets another number",
                            *result.batching, detail::own_causes(row)));
    }
    return row;
}

namespace {

namespace json = boost::json;

std::filesystem::path probe_file(const std::string& folder, std::string_view key) {
    std::uint64_t h = 14695981039346656037u; // FNV-1a, the same on every machine
    for (const unsigned char c : key) h = (h ^ c) * 1099511628211u;
    return std::filesystem::path(folder) / fmt::format("{:016x}.json", h);
}

constexpr std::array releases{"at_once", "first_text", "done"};

template <class T>
json::value or_null(const std::optional<T>& value) {
    return value ? json::value(*value) : json::value(nullptr);
}

} // namespace

std::string probe_key(std::string_view url, std::string_view profile, std::string_view version) {
    return fmt::format("{} {} {}", url, profile, version);
}

bool store_probe(const std::string& folder, std::string_view key, const ProbeResult& result) {
    std::error_code ec;
    std::filesystem::create_directories(folder, ec);
    json::object out{{"server", key},
                     {"requests", result.requests},
                     {"reports_cached", or_null(result.reports_cached)},
                     {"inferred", result.inferred},
                     {"release", nullptr},
                     {"commit_delay_ms", result.commit_delay.count()},
                     {"page", or_null(result.page)},
                     {"page_least", or_null(result.page_least)},
                     {"batching", or_null(result.batching)}};
    if (result.release) out["release"] = releases[std::size_t(*result.release)];
    const auto path = probe_file(folder, key);
    auto draft = path;
    draft += ".new";
    {
        std::ofstream file(draft);
        file << json::serialize(out) << '\n';
        if (!file.flush()) return false;
    }
    std::filesystem::rename(draft, path, ec);
    return !ec;
}

std::optional<ProbeResult> stored_probe(const std::string& folder, std::string_view key) {
    std::ifstream file(probe_file(folder, key));
    std::string text(std::istreambuf_iterator<char>(file), {});
    json::error_code ec;
    const auto value = json::parse(text, ec);
    if (ec || !value.is_object()) return {};
    const auto& in = value.get_object();
    const auto find = [&](const char* name) {
        const auto* it = in.if_contains(name);
        return it && !it->is_null() ? it : nullptr;
    };
    const auto* server = find("server");
    if (!server || !server->is_string() || std::string_view(server->get_string()) != key) return {};
    ProbeResult result;
    const auto number = [&](const char* name) -> std::optional<double> {
        const auto* it = find(name);
        json::error_code wrong;
        if (!it || !it->is_number()) return {};
        const auto n = it->to_number<double>(wrong);
        return wrong || n < 0 ? std::nullopt : std::optional(n);
    };
    result.requests = unsigned(number("requests").value_or(0));
    if (const auto* it = find("reports_cached"); it && it->is_bool())
        result.reports_cached = it->get_bool();
    if (const auto* it = find("inferred"); it && it->is_bool()) result.inferred = it->get_bool();
    if (const auto* it = find("release"); it && it->is_string())
        for (std::size_t i = 0; i < releases.size(); ++i)
            if (it->get_string() == releases[i]) result.release = Release(i);
    result.commit_delay = std::chrono::milliseconds(long(number("commit_delay_ms").value_or(0)));
    if (const auto page = number("page"); page && *page < 1e6) result.page = unsigned(*page);
    if (const auto page = number("page_least"); page && *page < 1e6)
        result.page_least = unsigned(*page);
    result.batching = number("batching");
    return result;
}

} // namespace evalrt
