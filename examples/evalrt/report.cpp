#include "report.hpp"

#include "merge.hpp"
#include "suite.hpp"

#include "evalrt/journal.hpp"
#include "evalrt/report.hpp"
#include "json_text.hpp"

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>

namespace evalrt::program {
namespace {

namespace json = boost::json;
using detail::repaired_utf8;

std::string field(const JournalFields& fields, std::string_view name) {
    for (const auto& [key, value] : fields)
        if (key == name) return value;
    return {};
}

// What is missing, or may be where the journal does not say it; empty: nothing.
std::string what_is_missing(const JournalSummary& summary, bool incomplete) {
    if (summary.runs == 0 && summary.pid)
        return "there is no run in it yet; the process that has it is only beginning";
    if (summary.runs == 0)
        return "there is no run in it: it was killed before it had one, or is a copy without the "
               "-wal, which lies beside a journal in use and has what is latest";
    if (const auto& parts = summary.missing_parts; !parts.empty()) {
        const auto shown = std::min<std::size_t>(parts.size(), 10);
        const auto more = parts.size() - shown;
        return fmt::format("parts that were not there when the others were joined: {}{}",
                           fmt::join(parts.begin(), parts.begin() + std::ptrdiff_t(shown), ", "),
                           more > 0 ? fmt::format(" and {} more", more) : "");
    }
    if (!incomplete || summary.ended || summary.pid || summary.log) return {};
    return "its latest session did not end by itself: it was killed; or this is a copy without the "
           "-wal, which lies beside a journal in use and has what is latest";
}

// The same object as a run summary, with what only a journal knows.
Failure read(const std::string& path, json::object& out) {
    Report report;
    JournalSummary summary;
    const auto failure = read_journal(path, summary, [&](const JournalItem& item) {
        if (!item.response) {
            report.not_run += std::uint64_t(1 + item.copies);
            return;
        }
        report.add(*item.response);
        auto copy = *item.response;
        copy.repeated = true;
        copy.attempts = 0;
        for (auto left = item.copies; left > 0; --left) report.add(copy);
    });
    if (failure) return failure;
    report.not_run += std::uint64_t(summary.missing);
    Response invalid;
    invalid.outcome = Errc::rejected;
    for (auto left = summary.invalid; left > 0; --left) report.add(invalid);
    const auto answered = report.answered(), rest = report.failed() + report.not_run;
    if (const auto text = what_is_missing(summary, rest > 0 || answered == 0); !text.empty())
        report.note(text);
    report.backend = field(summary.config, "backend");
    report.model = repaired_utf8(field(summary.config, "model"));
    if (!summary.server_version.empty())
        report.server_version = repaired_utf8(summary.server_version);
    out = json::parse(report.json({}, summary.wall_seconds)).as_object();
    json::object config;
    for (const auto& [key, value] : summary.config) config[key] = repaired_utf8(value);
    out["journal"] = json::object{
        {"path", repaired_utf8(path)},
        {"suite", repaired_utf8(summary.suite)},
        {"config", config},
        {"runs", summary.runs},
        {"sessions", summary.sessions},
        {"earlier", summary.earlier},
        {"missing_parts", json::array(summary.missing_parts.begin(), summary.missing_parts.end())},
        {"pid", summary.pid ? json::value(*summary.pid) : nullptr},
    };
    return {};
}

double number(const json::object& object, std::string_view name) {
    const auto* value = object.if_contains(name);
    if (!value || !value->is_number()) return 0;
    return value->to_number<double>();
}

std::string text(const json::object& object, std::string_view name) {
    const auto* value = object.if_contains(name);
    return value && value->is_string() ? std::string(value->get_string()) : std::string();
}

const json::object* part(const json::object& object, std::string_view name) {
    const auto* value = object.if_contains(name);
    return value ? value->if_object() : nullptr;
}

std::string shown(const json::value* value, std::string_view unit = "") {
    if (!value || !value->is_number()) return "n/a";
    return fmt::format("{:.10g}{}", value->to_number<double>(), unit);
}

bool is_summary(const json::object& run) {
    return run.contains("requests") && run.contains("answered") && run.contains("not_run");
}

bool has_missing_parts(const json::object& journal) {
    const auto* parts = journal.if_contains("missing_parts");
    return parts && parts->is_array() && !parts->get_array().empty();
}

bool whole(const json::object& run) {
    const auto* journal = part(run, "journal");
    return number(run, "answered") == number(run, "requests") &&
           !(journal && (number(*journal, "runs") == 0 || has_missing_parts(*journal)));
}

// "answered 37 of 40 (92.5 %), failed 2 (1 rejected, 1 timed_out), not run 1"
std::string coverage(const json::object& run) {
    const auto requests = number(run, "requests"), answered = number(run, "answered");
    std::string classes;
    if (const auto* failures = part(run, "failures"))
        for (const auto& [name, count] : *failures)
            classes += fmt::format("{}{} {}", classes.empty() ? " (" : ", ", shown(&count),
                                   std::string_view(name));
    if (!classes.empty()) classes += ")";
    return fmt::format("answered {} of {}{}, failed {}{}, not run {}", answered, requests,
                       requests > 0 ? fmt::format(" ({:.1f} %)", 100 * answered / requests) : "",
                       number(run, "failed"), classes, number(run, "not_run"));
}

void print(std::string_view title, const json::object& run) {
    std::string who;
    for (const auto name : {"backend", "model", "server_version"})
        if (const auto value = text(run, name); !value.empty())
            who += (who.empty() ? "" : ", ") + value;
    fmt::print("{}: {}\n", title, who);
    if (const auto* journal = part(run, "journal")) {
        const auto* pid = journal->if_contains("pid");
        fmt::print("  journal: {}, {} sessions{}{}\n", text(*journal, "suite"),
                   number(*journal, "sessions"),
                   number(*journal, "runs") > 1
                       ? fmt::format("; the latest of {} runs", number(*journal, "runs"))
                       : "",
                   pid && pid->is_number()
                       ? fmt::format("; the process {} writes to it", number(*journal, "pid"))
                       : "");
    }
    if (const auto* journal = part(run, "journal"); journal && number(*journal, "earlier") > 0)
        fmt::print("  {} items of earlier versions of the suite are left out\n",
                   number(*journal, "earlier"));
    fmt::print("  {}\n", coverage(run));
    if (run.contains("journal"))
        if (const auto* notes = run.if_contains("notes"); notes && notes->is_array())
            for (const auto& it : notes->get_array())
                if (it.is_string()) fmt::print("  {}\n", std::string_view(it.get_string()));
    if (number(run, "from_journal") > 0)
        fmt::print("  from the journal: {}\n", number(run, "from_journal"));
    fmt::print("  wall time {}, {} requests/s, {} output tokens/s\n",
               shown(run.if_contains("wall_seconds"), " s"),
               shown(run.if_contains("requests_per_second")),
               shown(run.if_contains("output_tokens_per_second")));
    const auto* cached = part(run, "cached_tokens");
    fmt::print("  tokens: {} prompt, {} of them cached, {} output\n",
               shown(run.if_contains("prompt_tokens")),
               shown(cached ? cached->if_contains("actual") : nullptr),
               shown(run.if_contains("completion_tokens")));
    for (const auto& [name, label] : {std::pair("ttft_ms", "time to first token"),
                                      std::pair("inter_token_ms", "between tokens")})
        if (const auto* times = part(run, name))
            fmt::print(
                "  {}: p50 {}, p90 {}, p99 {}\n", label, shown(times->if_contains("p50"), " ms"),
                shown(times->if_contains("p90"), " ms"), shown(times->if_contains("p99"), " ms"));
}

} // namespace

int report(const std::vector<std::string>& paths, bool as_json) {
    json::array all;
    bool complete = true;
    for (const auto& path : paths) {
        if (belongs_to_another(path, paths)) continue;
        if (is_lock_alone(path)) {
            say(fmt::format("{} has no journal beside it yet", path));
            complete = false;
            continue;
        }
        std::ifstream file(path, std::ios::binary);
        std::string head(16, '\0');
        file.read(head.data(), 16);
        head.resize(std::size_t(file.gcount()));
        if (!file.is_open() || file.bad()) {
            say(fmt::format("cannot read {}: {}", path, std::strerror(errno)));
            return exit_usage;
        }
        json::object run;
        if (head.starts_with("SQLite format 3")) {
            if (const auto failure = read(path, run)) {
                say(failure.detail);
                return failure.code == JournalErrc::foreign ? exit_usage : exit_unwritable;
            }
        } else {
            file.clear();
            head.append(std::istreambuf_iterator<char>(file), {});
            error_code ec;
            const auto value = json::parse(head, ec);
            const auto* object = ec ? nullptr : value.if_object();
            if (!object || (!is_summary(*object) && !part(*object, "batched"))) {
                say(fmt::format("{} is neither a journal nor a run summary (--json FILE of a run)",
                                path));
                return exit_usage;
            }
            run = *object;
        }
        std::vector<std::pair<std::string, const json::object*>> parts;
        if (is_summary(run))
            parts.emplace_back(path, &run);
        else // the smoke run's
            for (const auto* name : {"sequential", "batched"})
                if (const auto* it = part(run, name); it && is_summary(*it))
                    parts.emplace_back(fmt::format("{} ({})", path, name), it);
        for (const auto& [title, it] : parts) {
            complete &= whole(*it);
            if (!as_json) print(title, *it);
        }
        if (const auto* score = part(run, "score"); score && !as_json)
            fmt::print("  score: {:.1f} % one at a time, {:.1f} % by evalrt, on {} of {} items\n",
                       100 * number(*score, "sequential"), 100 * number(*score, "batched"),
                       number(*score, "items"), shown(score->if_contains("of")));
        all.push_back(std::move(run));
    }
    if (as_json)
        fmt::print("{}\n", json::serialize(all.size() == 1 ? all.front() : json::value(all)));
    return complete ? exit_answered : exit_failed;
}

} // namespace evalrt::program
