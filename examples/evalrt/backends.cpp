#include "backends.hpp"

#include "suite.hpp"

#include "evalrt/probe.hpp"

#include <boost/asio/io_context.hpp>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>

#include <fmt/format.h>

#include <cstdlib>
#include <stdexcept>

namespace evalrt::program {
namespace {

namespace json = boost::json;

std::string joined(const std::vector<std::string>& words) {
    std::string out;
    for (const auto& word : words) out += (out.empty() ? "" : " ") + word;
    return out;
}

// When the requests that share a prefix may follow the first of them.
std::string release(const BackendRow& row) {
    switch (row.release) {
    case Release::at_once: return "at once";
    case Release::slot: return "in its slot";
    case Release::first_text: return "first text";
    case Release::done: break;
    }
    return fmt::format("end + {:g} s", double(row.commit_delay.count()) / 1000);
}

std::string connection(const BackendRow& row) {
    if (row.keep_alive) return "kept";
    return row.accept_interval.count() > 0 ? "one each, paced" : "one each";
}

// What is done to a body, or to the answers, for this server.
std::string care(const BackendRow& row) {
    std::string out;
    const auto add = [&](bool applies, std::string_view what) {
        if (applies) out += fmt::format("{}{}", out.empty() ? "" : ", ", what);
    };
    add(!row.streams, "not streamed");
    add(row.drop_seed_at_zero, "no seed at T=0");
    add(row.drop_nulls, "no nulls");
    add(row.max_tokens_only, "max_tokens");
    add(row.text_only, "text only");
    add(row.cache_marks, "cache marks");
    add(row.routing_key, "routing key");
    add(!row.processors_mix, "no mix of penalties");
    add(row.default_temperature.has_value(),
        fmt::format("T={:g} by itself", row.default_temperature.value_or(0)));
    return out.empty() ? "-" : out;
}

std::string cached(const BackendRow& row) {
    if (row.cached_hint.empty()) return "yes";
    return row.cached_hint.find("--") == std::string::npos ? "no" : "if told to";
}

std::string in_flight(const BackendRow& row) {
    return row.most_in_flight > row.in_flight
               ? fmt::format("{}-{}", row.in_flight, row.most_in_flight)
               : std::to_string(row.in_flight);
}

void table(std::span<const BackendRow> rows) {
    fmt::print("{:<13} {:<9} {:>9}  {:<11} {:>12}  {:<15} {:<10}  {}\n", "name", "wire",
               "in flight", "siblings", "from tokens", "connection", "cached", "care taken");
    for (const auto& row : rows) {
        fmt::print("{:<13} {:<9} {:>9}  {:<11} {:>12}  {:<15} {:<10}  {}\n", row.name,
                   row.wire == Wire::openai ? "openai" : "anthropic", in_flight(row), release(row),
                   row.release == Release::at_once && row.in_flight == 1
                       ? "-"
                       : std::to_string(row.shared_tokens),
                   connection(row), cached(row), care(row));
    }
}

json::object as_json(const BackendRow& row) {
    json::object out{{"name", row.name},
                     {"wire", row.wire == Wire::openai ? "openai" : "anthropic"},
                     {"messages_endpoint", row.messages_endpoint || row.wire == Wire::anthropic},
                     {"input_is_total", row.input_is_total},
                     {"cache_marks", row.cache_marks},
                     {"routing_key", row.routing_key},
                     {"workers", row.workers},
                     {"command", json::array(row.command.begin(), row.command.end())},
                     {"in_flight", row.in_flight},
                     {"most_in_flight", std::max(row.in_flight, row.most_in_flight)},
                     {"release", row.release == Release::at_once      ? "at_once"
                                 : row.release == Release::slot       ? "slot"
                                 : row.release == Release::first_text ? "first_text"
                                                                      : "done"},
                     {"commit_delay_ms", row.commit_delay.count()},
                     {"shared_tokens", row.shared_tokens},
                     {"streams", row.streams},
                     {"keep_alive", row.keep_alive},
                     {"backlog", row.backlog},
                     {"drop_seed_at_zero", row.drop_seed_at_zero},
                     {"drop_nulls", row.drop_nulls},
                     {"max_tokens_only", row.max_tokens_only},
                     {"text_only", row.text_only},
                     {"processors_mix", row.processors_mix},
                     {"ignored", json::array(row.ignored.begin(), row.ignored.end())},
                     {"default_max_tokens", nullptr},
                     {"default_temperature", nullptr},
                     {"reports_cached_tokens", row.cached_hint.empty()},
                     {"remark", row.remark}};
    if (row.default_max_tokens > 0) out["default_max_tokens"] = row.default_max_tokens;
    if (row.default_temperature) out["default_temperature"] = *row.default_temperature;
    return out;
}

int list(bool as_json_text) {
    if (as_json_text) {
        json::array known, profiles;
        for (const auto& row : backend_rows()) known.push_back(as_json(row));
        for (const auto& row : profile_rows()) profiles.push_back(as_json(row));
        fmt::print("{}\n", json::serialize(json::object{{"backends", std::move(known)},
                                                        {"profiles", std::move(profiles)}}));
        return exit_answered;
    }
    fmt::print("--backend takes one of these:\n");
    table(backend_rows());
    fmt::print("\nBehind a --url these are recognised too:\n");
    table(profile_rows());
    fmt::print("\nStarted as, and to know:\n");
    for (const auto rows : {backend_rows(), profile_rows()})
        for (const auto& row : rows)
            fmt::print("{:<13} {}{}{}\n", row.name,
                       row.command.empty() ? "" : joined(row.command) + "; ", row.remark,
                       row.ignored.empty() ? "" : "; does not read " + joined(row.ignored));
    return exit_answered;
}

} // namespace

std::string probe_folder() {
    const auto variable = [](const char* name) {
        const char* value = std::getenv(name);
        return std::string(value ? value : "");
    };
    if (const auto folder = variable("EVALRT_CACHE"); !folder.empty()) return folder + "/probes";
    const auto home = variable("HOME");
#ifndef __APPLE__
    if (const auto folder = variable("XDG_CACHE_HOME"); !folder.empty())
        return folder + "/evalrt/probes";
    return home.empty() ? "" : home + "/.cache/evalrt/probes";
#else
    return home.empty() ? "" : home + "/Library/Caches/evalrt/probes";
#endif
}

namespace {

// A few short requests. What they show is kept, and said.
int measure(asio::io_context& io, const BackendsOptions& options, HttpOptions http,
            ServerKind& kind, json::object& out) {
    int code = exit_backend;
    http.model = "";
    async_probe(io.get_executor(), kind.row, http, [&](error_code ec, ProbeResult result) {
        std::vector<std::string> notes = result.notes;
        if (ec) {
            say(fmt::format("the server could not be measured: {}", ec.message()));
            for (const auto& note : notes) say(note);
            return;
        }
        code = exit_answered;
        kind.row = corrected(kind.row, result, notes);
        out = {{"requests", result.requests},
               {"reports_cached", nullptr},
               {"inferred", result.inferred},
               {"page", nullptr},
               {"page_least", nullptr},
               {"batching", nullptr},
               {"notes", json::array(notes.begin(), notes.end())}};
        if (result.reports_cached) out["reports_cached"] = *result.reports_cached;
        if (result.page) out["page"] = *result.page;
        if (result.page_least) out["page_least"] = *result.page_least;
        if (result.batching) out["batching"] = *result.batching;
        if (!options.json)
            for (const auto& note : notes) fmt::print("{}\n", note);
        const auto folder = probe_folder();
        if (folder.empty() ||
            !store_probe(folder, probe_key(options.probe, kind.profile, kind.version), result))
            say("what was measured could not be kept: set EVALRT_CACHE");
    });
    io.restart();
    io.run();
    return code;
}

} // namespace

int backends(const BackendsOptions& options) {
    if (options.probe.empty()) return list(options.json);
    asio::io_context io(1);
    HttpOptions http;
    http.url = options.probe;
    http.api_key = options.api_key;
    http.ca_file = options.ca_file;
    int code = exit_backend;
    const auto base = *find_backend_row("openai-url");
    ServerKind kind;
    async_recognise(io.get_executor(), base, http, [&](error_code ec, ServerKind found) {
        kind = std::move(found);
        if (!ec) code = exit_answered;
        if (ec == asio::error::invalid_argument) code = exit_usage;
    });
    io.run();
    if (code != exit_answered) {
        say(kind.reason);
        return code;
    }
    {
        json::object measured;
        if (options.measure) code = measure(io, options, http, kind, measured);
        const bool known = !kind.profile.empty();
        if (options.json) {
            json::object out{{"url", options.probe},
                             {"server", nullptr},
                             {"version", nullptr},
                             {"reason", kind.reason},
                             {"row", as_json(kind.row)}};
            if (!measured.empty()) out["measured"] = std::move(measured);
            if (known) out["server"] = kind.profile;
            if (!kind.version.empty()) out["version"] = kind.version;
            fmt::print("{}\n", json::serialize(out));
            return code;
        }
        fmt::print("{} {}({})\n", known ? kind.profile : "not recognised",
                   kind.version.empty() ? "" : kind.version + " ", kind.reason);
        if (!known) fmt::print("it is used as any OpenAI-compatible server:\n");
        if (!kind.in_flight_reason.empty())
            fmt::print("requests at once: {}, {}\n", kind.row.in_flight, kind.in_flight_reason);
        if (!kind.row.cached_hint.empty()) fmt::print("{}\n", kind.row.cached_hint);
        table({&kind.row, 1});
    }
    return code;
}

} // namespace evalrt::program
