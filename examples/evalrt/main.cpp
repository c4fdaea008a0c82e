// The evalrt program: command lines to suites.
#include "backends.hpp"
#include "batch.hpp"
#include "bfcl.hpp"
#include "gateway.hpp"
#include "merge.hpp"
#include "plan.hpp"
#include "report.hpp"
#include "suite.hpp"

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <system_error>
#include <unordered_set>

#include <fcntl.h>
#include <unistd.h>

namespace evalrt::program {
namespace {

struct Options {
    Common common;
    std::string max_in_flight = "auto";
    std::string order = "planned";
    std::string journal_mode = "resume";
    std::vector<std::string> final_failures{"context_too_long", "poison"};
    std::string wire;
    std::string key_file;
    double timeout = 0;
    unsigned retries = 2;
    bool backend_given = false;
    std::optional<std::int64_t> limit, max_tokens;
    std::optional<double> temperature;
    std::vector<std::string> urls;
    std::string shard;
    std::optional<detail::ShardChoice> part; ///< of it
};

// What every command takes.
void add_common(CLI::App& command, Options& options) {
    auto& runtime = options.common.runtime;
    command.add_option("--backend", runtime.backend, "Model server: " + backend_names())
        ->capture_default_str()
        ->each([&](const std::string&) { options.backend_given = true; });
    command.add_option("--wire", options.wire, "What the server speaks (default: the backend's)")
        ->check(CLI::IsMember({"openai", "anthropic"}));
    command
        .add_option("--url", options.urls,
                    "Use the server that runs at this address (ends in /v1); start none "
                    "(repeatable: servers that are alike share the work)")
        ->expected(1)
        ->take_all()
        ->allow_extra_args(false);
    command.add_option("--model", runtime.model,
                       "Model to load (a path or name, as the backend names models), or to ask");
    command.add_option("--executable", runtime.executable, "Server program to start");
    command
        .add_option("--server-arg", runtime.server_args,
                    "One more argument for the server program (repeatable)")
        ->expected(1)
        ->take_all()
        ->allow_extra_args(false);
    command.add_option("--port", runtime.port, "Port of the server to start (default: a free one)");
    command.add_option("--max-context", runtime.max_context, "Context length, in tokens")
        ->capture_default_str();
    command
        .add_option("--max-in-flight", options.max_in_flight,
                    "Requests at once: a number, or auto for what suits the backend")
        ->capture_default_str();
    command
        .add_option("--order", options.order,
                    "planned: shared prefixes together; fifo: in the order of the input")
        ->check(CLI::IsMember({"planned", "fifo"}))
        ->capture_default_str();
    command.add_option("--timeout", options.timeout,
                       "Seconds that one attempt may take (default: as long as tokens come)");
    command.add_option("--retries", options.retries, "Further attempts after a failed one")
        ->capture_default_str();
    command.add_flag_callback(
        "--no-probe", [&runtime] { runtime.probe = false; },
        "Do not ask the server at --url what it is");
    command.add_option("--journal", runtime.journal.path,
                       "Keep every answer in this file before anything else is done with it; with "
                       "the same command ask only for the rest");
    command
        .add_option("--journal-mode", options.journal_mode,
                    "resume: go on with the run in the file; append: a new run in the same file")
        ->check(CLI::IsMember({"resume", "append"}))
        ->capture_default_str();
    command.add_flag("--journal-sampled", runtime.journal.reuse_sampled,
                     "Serve a new run the file's answers at temperatures above 0, too");
    command
        .add_option("--journal-final", options.final_failures,
                    "Failures that resuming does not try again: classes with commas, or none")
        ->delimiter(',')
        ->capture_default_str();
    command.add_option("--ca-file", runtime.ca_file, "PEM file with the certificates to trust");
    command.add_option("--api-key-file", options.key_file,
                       "File with the key (default: the variable OPENAI_API_KEY, or "
                       "ANTHROPIC_API_KEY on the anthropic wire)");
    command.add_option("--parity", options.common.parity,
                       "Ask this many answered requests again, one at a time, and compare");
    command.add_option("--seed", options.common.seed,
                       "Of our own sampling: the parity sample, the jitter of retries");
    command.add_option("--explain", options.common.explain,
                       "Write to this file, one JSON line a request, why it was sent when it was");
    command.add_option("--json", options.common.json, "Write the run summary to this file");
    command.add_flag("--quiet", options.common.quiet, "No progress, only errors");
}

void add_shard(CLI::App& command, Options& options) {
    command.add_option("--shard", options.shard,
                       "Run only the I-th of N parts of the suite: I/N (from 0), or auto[/N] under "
                       "Slurm (arrays), Kubernetes (indexed jobs) or mpirun");
}

// {shard} in a file's name is the part's number: one command for all of them. The string says what
// is wrong.
std::string name_shard(std::string_view option, std::string& path, const Options& options) {
    constexpr std::string_view word = "{shard}";
    for (auto at = path.find(word); at != path.npos; at = path.find(word)) {
        if (!options.part)
            return fmt::format("{} {}: {{shard}} is the number of a part, and needs --shard",
                               option, path);
        path.replace(at, word.size(), std::to_string(options.part->index));
    }
    return {};
}

// What is no error.
void note(const Options& options, std::string_view line) {
    if (!options.common.quiet) say(line);
}

// Nothing: fine. Otherwise what is wrong.
std::string settle(Options& options) {
    auto& runtime = options.common.runtime;
    if (!options.urls.empty()) {
        runtime.url = options.urls.front();
        runtime.replicas.assign(options.urls.begin() + 1, options.urls.end());
    }
    if (options.max_in_flight != "auto") {
        char* end = nullptr;
        const long n = std::strtol(options.max_in_flight.c_str(), &end, 10);
        if (*end || n < 1 || n > 100000)
            return fmt::format("--max-in-flight is '{}': give a number from 1, or auto",
                               options.max_in_flight);
        runtime.max_in_flight = unsigned(n);
    }
    runtime.order = options.order == "fifo" ? Order::fifo : Order::planned;
    if (!options.shard.empty()) {
        std::string error;
        options.part = detail::read_shard(
            options.shard,
            [](const char* name) -> std::optional<std::string> {
                const char* value = std::getenv(name);
                return value ? std::optional<std::string>(value) : std::nullopt;
            },
            error);
        if (!options.part) return error;
        runtime.journal.settings.emplace_back(
            "shard", fmt::format("{}/{}", options.part->index, options.part->count));
    }
    for (const auto& [option, path] : {std::pair("--journal", &runtime.journal.path),
                                       {"--json", &options.common.json},
                                       {"--explain", &options.common.explain}})
        if (auto error = name_shard(option, *path, options); !error.empty())
            return error;
        else if (*path == "-")
            return fmt::format("{} -: give a file (./- for one of that name)", option);
    if (options.timeout < 0) return "--timeout is below zero";
    if (!(options.timeout < 1e9)) return "--timeout is no number of seconds";
    if (options.temperature && !std::isfinite(*options.temperature))
        return "--temperature is no number";
    runtime.limits.whole = std::chrono::milliseconds(std::int64_t(options.timeout * 1000));
    runtime.retry.attempts = std::min(options.retries, 1'000'000u) + 1;
    runtime.override_model = !runtime.model.empty();
    auto& journal = runtime.journal;
    journal.mode = options.journal_mode == "append" ? JournalMode::append : JournalMode::resume;
    journal.final_failures.clear();
    for (const auto& word : options.final_failures) {
        if (word == "none") continue;
        const auto errc = find_errc(word);
        if (!errc) return fmt::format("--journal-final: there is no class of failures '{}'", word);
        journal.final_failures.push_back(*errc);
    }
    if (options.max_tokens)
        journal.settings.emplace_back("max_tokens", std::to_string(*options.max_tokens));
    if (options.temperature)
        journal.settings.emplace_back("temperature", fmt::format("{}", *options.temperature));
    if (!options.wire.empty()) {
        runtime.wire = options.wire == "anthropic" ? Wire::anthropic : Wire::openai;
        journal.settings.emplace_back("wire", options.wire);
    }
    const auto* row = find_backend_row(runtime.backend);
    const auto wire = runtime.wire.value_or(row ? row->wire : Wire::openai);
    const auto* variable = wire == Wire::anthropic ? "ANTHROPIC_API_KEY" : "OPENAI_API_KEY";
    if (!options.key_file.empty()) {
        std::ifstream file(options.key_file);
        if (!std::getline(file, runtime.api_key) || runtime.api_key.empty())
            return fmt::format("cannot read a key from {}", options.key_file);
    } else if (const char* key = std::getenv(variable); key && !runtime.url.empty()) {
        runtime.api_key = key;
    }
    return {};
}

std::string empty_value(std::string_view option) {
    return fmt::format("{} is given an empty value: leave it out, or give it one (is a variable "
                       "not set?)",
                       option);
}

int fail(std::string_view what) {
    say(what);
    return exit_usage;
}

// Said before the run: the default backend is slow for any other server.
void hint(const Options& options) {
    const auto& runtime = options.common.runtime;
    if (!options.urls.empty() && !options.backend_given)
        note(options,
             fmt::format("no --backend is given, so the server is taken for {}, one request "
                         "at a time; --backend openai-url finds out what it is",
                         runtime.backend));
}

bool same_file(const std::string& a, const std::string& b) {
    std::error_code none;
    return !a.empty() && !b.empty() &&
           std::filesystem::weakly_canonical(std::filesystem::absolute(a, none), none) ==
               std::filesystem::weakly_canonical(std::filesystem::absolute(b, none), none);
}

// Of each request the one whose answer it gets.
using Repeats = std::vector<std::optional<std::size_t>>;
Repeats repeats_of(const batch::Input& input, const Options& options) {
    return options.common.dedupe ? batch::repeats(input.items) : Repeats(input.items.size());
}

// Of what is asked.
Plan plan_of(const batch::Input& input, const Repeats& repeats, const Options& options) {
    return plan(
        input.items.size(),
        [&](std::size_t i) -> const Request* {
            if (i % 16384 == 16383) batch::let_go();
            const auto& item = input.items[i];
            return item.problem.empty() && !repeats[i] ? &item.request : nullptr;
        },
        options.common.runtime);
}

// By which a suite is cut at other places.
std::string cut_options(const Options& options) {
    return std::string(options.order == "fifo" ? "--order fifo " : "") +
           (options.common.dedupe ? "--dedupe " : "");
}

// Leaves the part that --shard names.
void keep_shard(batch::Input& input, Options& options) {
    const auto repeats = repeats_of(input, options);
    const auto made = plan_of(input, repeats, options);
    const detail::Shards shards(made.items, options.part->count);
    note(options, shard_line(made, shards, options.part->index));
    auto& journal = options.common.runtime.journal;
    journal.cut = cut_options(options) + cut_name(made, shards, [&](std::size_t i) {
                      return std::string_view(input.items[i].custom_id);
                  });
    journal.whole_items = std::int64_t(input.items.size());
    std::vector<bool> ours(input.items.size());
    for (const auto i : shard_places(made, shards, options.part->index)) ours[i] = true;
    for (std::size_t i = 0; i < ours.size(); ++i) {
        // An answer is where all are who get it; what is no request is reported once.
        if (repeats[i]) ours[i] = ours[*repeats[i]];
        if (!input.items[i].problem.empty()) ours[i] = options.part->index == 0;
    }
    std::size_t kept = 0;
    for (std::size_t i = 0; i < ours.size(); ++i)
        if (ours[i]) {
            if (kept != i) input.items[kept] = std::move(input.items[i]);
            ++kept;
        }
    input.items.resize(kept);
}

int dry_run(const batch::Input& input, const Options& options, Clock::time_point started) {
    const auto repeats = repeats_of(input, options);
    const auto made = plan_of(input, repeats, options);
    DryRun run;
    run.requests = input.items.size();
    for (std::size_t i = 0; i < repeats.size(); ++i) {
        if (repeats[i]) ++run.repeated;
        if (!input.items[i].problem.empty()) ++run.skipped;
    }
    run.input_bytes = input.bytes;
    run.shards = options.part ? options.part->count : 1;
    const detail::Shards shards(made.items, run.shards);
    run.seconds = std::chrono::duration<double>(Clock::now() - started).count();
    fmt::print("{}", dry_run_text(made, shards, run));
    if (options.common.json.empty()) return exit_answered;
    std::ofstream file(options.common.json);
    file << dry_run_json(made, shards, run) << '\n';
    if (file.flush()) return exit_answered;
    say(fmt::format("the plan cannot be written to {}", options.common.json));
    return exit_unwritable;
}

int run(Options& options, const std::string& path, std::string out, bool skip_invalid,
        bool only_plan) {
    const auto started = Clock::now();
    if (auto error = settle(options); !error.empty()) return fail(error);
    if (auto error = name_shard("-o", out, options); !error.empty()) return fail(error);
    if (out.starts_with('=')) return fail(fmt::format("-o{}: write -o FILE or --output=FILE", out));
    const auto& kept = options.common.runtime.journal.path;
    if (out != "-" && same_file(out, path))
        return fail(fmt::format("-o {} is the batch file itself: give another file", out));
    if (same_file(out, kept))
        return fail(fmt::format("-o and --journal are both {}: give two files", out));
    auto input = batch::read(path, skip_invalid);
    if (!input.error.empty()) return fail(input.error);
    if (options.limit) {
        if (*options.limit < 1) return fail("--limit is below 1");
        input.items.resize(std::min(input.items.size(), std::size_t(*options.limit)));
    }
    if (options.max_tokens) {
        note(options,
             fmt::format("--max-tokens: every body gets \"max_tokens\": {}", *options.max_tokens));
        batch::override_member(input, "max_tokens", std::to_string(*options.max_tokens));
    }
    if (options.temperature) {
        note(options, fmt::format("--temperature: every body gets \"temperature\": {}",
                                  *options.temperature));
        batch::override_member(input, "temperature", fmt::format("{}", *options.temperature));
    }
    if (only_plan) return dry_run(input, options, started);
    if (!kept.empty()) {
        SuiteContent content("run");
        for (std::size_t i = 0; i < input.items.size(); ++i) {
            if (i % 16384 == 16383) batch::let_go();
            content.add(input.items[i].custom_id, input.items[i].request);
        }
        options.common.runtime.journal.content = content.digest();
    }
    if (options.part) {
        keep_shard(input, options);
        if (input.items.empty() && out.empty()) return exit_answered;
        std::vector<bool> ours;
        for (const auto& item : input.items) {
            ours.resize(item.number + 1);
            ours[item.number] = true;
        }
        if (const auto id = batch::other_item(out, ours); !id.empty())
            return fail(fmt::format("-o {} has answers of another part ({}), which would be lost: "
                                    "give each part a name of its own, with {{shard}} in it",
                                    out, id));
    }
    auto& journal = options.common.runtime.journal;
    std::error_code none;
    if (!journal.path.empty())
        journal.suite =
            "run " + (path == "-" ? path : std::filesystem::absolute(path, none).string());
    // Answers are in the journal first: a run that was killed before it had made one, had none.
    const bool journalled =
        !journal.path.empty() && (std::filesystem::exists(journal.path, none) ||
                                  std::filesystem::file_size(out + ".part", none) == 0);
    std::unique_ptr<batch::Output> output;
    if (auto error = batch::Output::open(out, input.items.size(), journalled, output);
        !error.empty())
        return fail(error);

    Suite suite;
    for (const auto& item : input.items)
        suite.jobs.push_back({item.custom_id, item.request, item.problem, {}});
    const auto repeats = repeats_of(input, options);
    for (std::size_t i = 0; i < repeats.size(); ++i) suite.jobs[i].same_as = repeats[i];
    suite.kept_in = journal.path.empty() ? output->part() : journal.path;
    suite.resumes = !journal.path.empty();
    bool any = false;
    suite.on_result = [&](std::size_t index, const Response& response) {
        any = true;
        return output->add(index, batch::output_line(input.items[index], response));
    };
    suite.on_end = [&](bool whole) { return output->finish(whole); };
    const int code = run_suite(std::move(suite), options.common);
    if (!any) output->drop();
    return code;
}

struct BfclOptions {
    std::vector<std::string> categories;
    std::string mode = "prompt";
    std::string data;
    std::string result_dir = "result";
};

int run_bfcl(Options& options, BfclOptions asked) {
    if (auto error = settle(options); !error.empty()) return fail(error);
    // Two must not write one file.
    if (options.part && asked.result_dir.find("{shard}") == std::string::npos)
        asked.result_dir += "/shard-{shard}";
    if (auto error = name_shard("--result-dir", asked.result_dir, options); !error.empty())
        return fail(error);
    auto& runtime = options.common.runtime;
    const auto categories = bfcl::categories(asked.categories);
    if (!categories) return fail(categories.error().detail);
    std::filesystem::path data = asked.data;
    if (data.empty()) {
        const auto found = bfcl::find_data();
        if (!found) return fail(found.error().detail);
        data = *found;
    }
    bfcl::Options body_options;
    body_options.mode = asked.mode == "fc" ? bfcl::Mode::fc : bfcl::Mode::prompt;
    body_options.model = runtime.model;
    body_options.max_tokens = options.max_tokens;
    body_options.temperature = options.temperature;
    runtime.journal.suite = "bfcl";
    runtime.journal.settings.emplace_back("mode", asked.mode);
    const bool journalled = !runtime.journal.path.empty();

    struct File {
        std::filesystem::path path;
        std::vector<bfcl::Row> rows;
        bool fresh = false; // has rows that are not written yet
    };
    std::vector<File> files;
    struct Origin {
        bfcl::Item item;
        std::size_t file;
        bool open; // not answered yet
    };
    std::vector<Origin> origins;
    Suite suite;
    for (const auto& category : *categories) {
        auto items = bfcl::load(data, category);
        if (!items) return fail(items.error().detail);
        File file;
        file.path = bfcl::result_path(asked.result_dir, runtime.model, category);
        auto rows = bfcl::read_results(file.path);
        if (!rows) return fail(rows.error().detail);
        file.rows = std::move(*rows);
        if (options.limit)
            items->resize(
                std::min(items->size(), std::size_t(std::max<std::int64_t>(*options.limit, 0))));
        const auto all = items->size();
        // A journal knows better: it knows what was asked, and with which settings.
        auto rest = journalled ? *items : bfcl::unanswered(*items, file.rows);
        if (rest.size() < all)
            note(options, fmt::format("{}: {} of {} are answered already in {}", category,
                                      all - rest.size(), all, file.path.string()));
        // Shards are cut from the whole, whatever is answered already.
        std::unordered_set<std::string> waiting;
        for (const auto& item : rest) waiting.insert(item.id);
        for (auto& item : options.part ? *items : rest) {
            Job job;
            job.id = item.id;
            if (auto body = bfcl::body(item, body_options))
                job.request.body = Text(std::move(*body));
            else
                job.problem = body.error().detail;
            suite.jobs.push_back(std::move(job));
            const bool open = waiting.contains(item.id);
            origins.push_back({std::move(item), files.size(), open});
        }
        files.push_back(std::move(file));
    }
    if (journalled) {
        SuiteContent content("bfcl");
        for (const auto& job : suite.jobs) content.add(job.id, job.request);
        runtime.journal.content = content.digest();
    }
    if (options.part) {
        const auto made = plan(
            suite.jobs.size(),
            [&](std::size_t i) -> const Request* {
                return suite.jobs[i].problem.empty() ? &suite.jobs[i].request : nullptr;
            },
            runtime);
        const detail::Shards shards(made.items, options.part->count);
        note(options, shard_line(made, shards, options.part->index));
        runtime.journal.cut = cut_options(options) + cut_name(made, shards, [&](std::size_t i) {
                                  return std::string_view(suite.jobs[i].id);
                              });
        runtime.journal.whole_items = std::int64_t(suite.jobs.size());
        std::vector<Job> jobs;
        std::vector<Origin> kept;
        auto places = shard_places(made, shards, options.part->index);
        for (std::size_t i = 0; i < suite.jobs.size() && options.part->index == 0; ++i)
            if (!suite.jobs[i].problem.empty()) places.push_back(i); // reported once
        std::sort(places.begin(), places.end());
        for (const auto i : places) {
            if (!origins[i].open) continue;
            jobs.push_back(std::move(suite.jobs[i]));
            kept.push_back(std::move(origins[i]));
        }
        suite.jobs = std::move(jobs);
        origins = std::move(kept);
    }
    if (suite.jobs.empty()) {
        note(options, "everything is answered already");
        return exit_answered;
    }
    std::error_code made;
    for (const auto& file : files) {
        std::filesystem::create_directories(file.path.parent_path(), made);
        if (made)
            return fail(fmt::format("cannot make the folder {}: {}",
                                    file.path.parent_path().string(), made.message()));
    }
    const auto write = [&] {
        for (auto& file : files) {
            if (!file.fresh) continue;
            if (auto failure = bfcl::write_results(file.path, file.rows)) {
                say(failure.detail);
                return false;
            }
            file.fresh = false;
        }
        return true;
    };
    suite.kept_in = journalled ? runtime.journal.path : asked.result_dir;
    suite.resumes = true;
    auto last_write = Clock::now();
    suite.on_result = [&](std::size_t index, const Response& response) {
        if (response.outcome) return true;
        const auto& origin = origins[index];
        auto row =
            bfcl::result_row(origin.item, response, response.timing.total - response.timing.queued,
                             body_options.mode);
        if (!row) {
            say(row.error().detail);
            return true;
        }
        auto& file = files[origin.file];
        file.rows.push_back(std::move(*row));
        file.fresh = true;
        // A row that is only in memory would be lost with us.
        if (Clock::now() - last_write < std::chrono::seconds(10)) return true;
        last_write = Clock::now();
        return write();
    };
    suite.on_end = [&](bool) {
        if (!write()) return false;
        for (const auto& file : files)
            if (!options.common.quiet && !file.rows.empty())
                say(fmt::format("results: {}", file.path.string()));
        return true;
    };
    return run_suite(std::move(suite), options.common);
}

int main(int argc, char** argv) {
    CLI::App app{"evalrt runs LLM evaluation suites at the speed of the model server."};
    app.require_subcommand(1);
    app.set_version_flag("--version", EVALRT_VERSION);

    Options options;
    std::string file, out;
    bool skip_invalid = false;
    auto& run_command = *app.add_subcommand("run", "Run a batch file (OpenAI Batch input format)");
    run_command.add_option("FILE", file, "Batch file, - for standard input")->required();
    run_command.add_option("-o,--output", out, "Output file (default: standard output)");
    run_command.add_option("--limit", options.limit, "Only the first N requests");
    run_command.add_option("--max-tokens", options.max_tokens, "Override the bodies' max_tokens");
    run_command.add_option("--temperature", options.temperature,
                           "Override the bodies' temperature");
    run_command.add_flag("--skip-invalid", skip_invalid,
                         "Run the valid lines and report the others as failed");
    bool only_plan = false;
    run_command.add_flag("--dry-run", only_plan,
                         "Plan and print what the run would cost; ask nothing");
    add_shard(run_command, options);
    run_command.add_flag("--dedupe", options.common.dedupe,
                         "Ask equal requests at temperature 0 once, and give each the answer");
    add_common(run_command, options);

    BfclOptions asked;
    auto& bfcl_command = *app.add_subcommand(
        "bfcl", "Run single-turn BFCL categories and write bfcl_eval's result files");
    bfcl_command.add_option("CATEGORY", asked.categories, "Categories or groups, as in bfcl_eval")
        ->required();
    bfcl_command.add_option("--mode", asked.mode, "Functions in the prompt, or as tools")
        ->check(CLI::IsMember({"prompt", "fc"}))
        ->capture_default_str();
    bfcl_command.add_option("--bfcl-data", asked.data,
                            "bfcl_eval's data folder (default: of the python3 on PATH)");
    bfcl_command.add_option("--result-dir", asked.result_dir, "Folder for the result files")
        ->capture_default_str();
    bfcl_command.add_option("--limit", options.limit, "Only the first N rows of each category");
    bfcl_command.add_option("--max-tokens", options.max_tokens,
                            "Answer length (default: none is sent, as bfcl_eval does)");
    bfcl_command.add_option("--temperature", options.temperature,
                            "Default: 0.001, as bfcl_eval sends");
    add_shard(bfcl_command, options);
    add_common(bfcl_command, options);

    GatewayCommand gateway;
    auto& gateway_command = *app.add_subcommand(
        "gateway",
        "Serve harnesses that speak to OpenAI or Anthropic: gateway [options] [-- CMD...]");
    gateway_command.add_option("--listen", gateway.listen,
                               "HOST:PORT (default: 127.0.0.1 and a free port)");
    gateway_command.add_option("--token-file", gateway.token_file,
                               "File with a token that clients must send");
    std::string rehearsals;
    gateway_command.add_flag(
        "--rehearse{1}", rehearsals,
        "For a command that asks one question at a time: run it N times (default: once) against "
        "placeholders in a copy of the folder, to ask its questions together");
    add_common(gateway_command, options);

    std::vector<std::string> runs;
    bool report_json = false;
    auto& report_command = *app.add_subcommand(
        "report", "Say what runs came to, also while they go on: answered, failed, not run");
    report_command.add_option("RUN", runs, "A journal or a run summary (repeatable)")->required();
    report_command.add_flag("--json", report_json, "Print JSON");

    std::string merged, merge_suite;
    std::vector<std::string> shards;
    auto& merge_command = *app.add_subcommand(
        "merge", "Join the shards of one run: journals, outputs or BFCL result files");
    merge_command.add_option("OUT", merged, "File to write")->required();
    merge_command.add_option("SHARD", shards, "What the shards have left (repeatable)")->required();
    merge_command.add_option("--suite", merge_suite,
                             "The batch file, for outputs: tells what is missing at the end");

    auto& backends_command =
        *app.add_subcommand("backends", "List the model servers that evalrt knows");
    BackendsOptions listed;
    backends_command.add_option("--probe", listed.probe, "Say what the server at this URL is");
    backends_command
        .add_flag("--measure", listed.measure,
                  "Ask it a dozen short requests, and keep what its cache and batching do for runs")
        ->needs("--probe");
    backends_command.add_flag("--json", listed.json, "Print JSON");
    backends_command.add_option("--ca-file", listed.ca_file,
                                "PEM file with the certificates to trust");
    backends_command.add_option("--api-key-file", options.key_file,
                                "File with the key (default: the variable OPENAI_API_KEY)");

    if (argc < 2) {
        say("give a command: run, bfcl, gateway, report, merge or backends (evalrt --help says "
            "more)");
        return exit_usage;
    }
    const auto known = app.get_subcommands([&](CLI::App* it) { return it->get_name() == argv[1]; });
    if (argv[1][0] != '-' && known.empty()) {
        say(fmt::format("unknown command '{}'; known are run, bfcl, gateway, report, merge "
                        "and backends",
                        argv[1]));
        return exit_usage;
    }
    // What comes after -- is another program's, with options of its own.
    if (gateway_command.get_name() == argv[1]) {
        char** const end = argv + argc;
        char** const mark = std::find(argv, end, std::string_view("--"));
        argc = int(mark - argv);
        if (mark != end) {
            gateway.child.assign(mark + 1, end);
            if (gateway.child.empty()) return fail("there is no command behind --");
        }
    }
    for (int i = 1; i < argc; ++i) // or it would take the next word
        if (const std::string_view word = argv[i]; word.starts_with("--") && word.ends_with('=') &&
                                                   word != "--server-arg=" &&
                                                   argv[i - 1] != std::string_view("--server-arg"))
            return fail(empty_value(word.substr(0, word.size() - 1)));
    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
        if (error.get_exit_code() == 0) return app.exit(error);
        say(fmt::format("{} (evalrt {}--help lists the options)", error.what(),
                        argv[1][0] != '-' ? argv[1] + std::string(" ") : ""));
        return exit_usage;
    }
    // A variable that is not set, in most cases.
    for (const auto* command : app.get_subcommands())
        for (const auto* option : command->get_options())
            for (const auto& value : option->results())
                if (value.find_first_not_of(" \t\n") == value.npos &&
                    option->get_name() != "--server-arg")
                    return fail(empty_value(option->get_name()));
    if (merge_command.parsed()) return merge(merged, shards, merge_suite);
    if (report_command.parsed()) return report(runs, report_json);
    if (backends_command.parsed()) {
        options.common.runtime.url = listed.probe;
        if (auto error = settle(options); !error.empty()) return fail(error);
        listed.api_key = options.common.runtime.api_key;
        return backends(listed);
    }
    if (!only_plan) hint(options);
    options.common.runtime.probe_folder = probe_folder();
    if (gateway_command.parsed()) {
        if (auto error = settle(options); !error.empty()) return fail(error);
        if (options.common.parity > 0)
            return fail("--parity is for runs: a gateway does not know the requests");
        const bool digits = rehearsals.find_first_not_of("0123456789") == rehearsals.npos;
        gateway.rehearsals = digits && !rehearsals.empty() && rehearsals.size() < 4
                                 ? unsigned(std::stoi(rehearsals))
                                 : 0;
        if (!rehearsals.empty() && (gateway.rehearsals < 1 || gateway.rehearsals > 100))
            return fail("--rehearse=N: 1 to 100 times");
        if (gateway.rehearsals > 0 && gateway.child.empty())
            return fail("--rehearse is for a command: gateway --rehearse -- CMD...");
        return run_gateway(gateway, options.common);
    }
    if (bfcl_command.parsed()) return run_bfcl(options, asked);
    return run(options, file, out, skip_invalid, only_plan);
}

} // namespace
} // namespace evalrt::program

int main(int argc, char** argv) {
    using namespace evalrt::program;
    // A closed one must not be the next file that is opened; it fails when it is used.
    for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
        if (::fcntl(fd, F_GETFD) == -1)
            if (::open("/dev/null", fd == STDOUT_FILENO ? O_RDONLY : O_RDWR) != fd)
                return exit_usage;
    int code = exit_unwritable;
    bool written = false;
    try {
        code = evalrt::program::main(argc, argv);
        written = std::fflush(stdout) == 0 && !std::ferror(stdout);
    } catch (const std::system_error&) { // of a print
    }
    if (written || (code != exit_answered && code != exit_failed)) return code;
    say("standard output cannot be written");
    return exit_unwritable;
}
