#include "evalrt/runtime.hpp"

#include "apart_planner.hpp"
#include "evalrt/detail/complete.hpp"
#include "evalrt/detail/retry.hpp"
#include "evalrt/probe.hpp"
#include "json_text.hpp"
#include "probe.hpp"
#include "recognise.hpp"
#include "replica_backend.hpp"
#include "temporary_folder.hpp"
#include "url.hpp"
#include "wire.hpp"

#include <boost/asio/append.hpp>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <tuple>

namespace evalrt {
namespace {

constexpr auto plain = asio::as_tuple(asio::use_awaitable);

std::string replaced(std::string text, std::string_view what, std::string_view with) {
    for (auto at = text.find(what); at != text.npos; at = text.find(what, at + with.size()))
        text.replace(at, what.size(), with);
    return text;
}

// The end of the server's output says why it has ended.
std::string last_lines(std::string_view output, std::size_t limit = 600) {
    while (output.ends_with('\n')) output.remove_suffix(1);
    if (output.size() > limit) {
        output.remove_prefix(output.size() - limit);
        if (const auto line = output.find('\n'); line != output.npos)
            output.remove_prefix(line + 1);
    }
    return std::string(output);
}

// A folder that only we can read; gone with this object.
class PrivateFolder {
public:
    PrivateFolder() = default;
    PrivateFolder(const PrivateFolder&) = delete;
    PrivateFolder& operator=(const PrivateFolder&) = delete;
    ~PrivateFolder() {
        std::error_code ignored;
        if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
    }

    Failure make() {
        std::error_code ec;
        path_ = detail::temporary_folder("evalrt", ec);
        if (!ec) return {};
        return {error_code(ec), "cannot make a folder for the server in the folder for temporary "
                                "files: set TMPDIR to one that can be written"};
    }

    const std::string& path() const { return path_; }

private:
    std::string path_;
};

bool names(const BackendRow& row, std::string_view word) {
    const auto has = [&](const std::string& text) { return text.find(word) != text.npos; };
    return std::any_of(row.command.begin(), row.command.end(), has) ||
           std::any_of(row.env.begin(), row.env.end(),
                       [&](const auto& entry) { return has(entry.second); });
}

// What the arguments give to an option, "--flag VALUE" or "--flag=VALUE"; the last counts.
std::optional<std::string_view> given(std::span<const std::string> arguments,
                                      std::string_view option) {
    std::optional<std::string_view> found;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
        std::string_view it = arguments[i];
        if (!it.starts_with(option)) continue;
        it.remove_prefix(option.size());
        if (it.empty())
            found = i + 1 < arguments.size() ? std::string_view(arguments[i + 1]) : it;
        else if (it.front() == '=')
            found = it.substr(1);
    }
    return found;
}

std::optional<unsigned> as_number(std::string_view text) {
    unsigned number = 0;
    const auto end = text.data() + text.size();
    const auto [stop, ec] = std::from_chars(text.data(), end, number);
    if (ec != std::errc() || stop != end) return {};
    return number;
}

// What a constructor on the way has thrown.
Failure as_failure(std::exception_ptr error) {
    try {
        std::rethrow_exception(error);
    } catch (const std::invalid_argument& invalid) {
        return {asio::error::invalid_argument, invalid.what()};
    } catch (...) {
        return {asio::error::no_memory, "out of memory"};
    }
}

} // namespace

struct Runtime::Impl : std::enable_shared_from_this<Impl> {
    Impl(asio::any_io_executor executor_, RuntimeOptions options_)
        : executor(std::move(executor_)), options(std::move(options_)) {
        if (options.row) {
            row = *options.row;
        } else if (const auto* found = find_backend_row(options.backend)) {
            row = *found;
        } else {
            throw std::invalid_argument(fmt::format("unknown backend '{}'; known are {}",
                                                    options.backend, backend_names()));
        }
        if (options.wire) row.wire = *options.wire;
        starts = options.url.empty();
        if (starts && row.command.empty())
            throw std::invalid_argument(
                fmt::format("the backend {} needs the address of a running server: give --url "
                            "http://HOST:PORT/v1",
                            row.name));
        if (starts && options.model.empty())
            throw std::invalid_argument(
                fmt::format("no model: give --model with the model that {} should load, or --url "
                            "with the address of a server that runs",
                            row.name));
        // A name may be one that the server knows how to find; a path is ours to check.
        std::error_code ignored;
        if (starts && (options.model.starts_with('/') || options.model.starts_with('.')) &&
            !std::filesystem::exists(options.model, ignored))
            throw std::invalid_argument(
                fmt::format("there is no model at '{}': give --model with a path or name that {} "
                            "can load",
                            options.model, row.name));
        if (starts && names(row, "{model_dir}") &&
            !std::filesystem::is_directory(options.model, ignored))
            throw std::invalid_argument(
                fmt::format("'{}' is no folder: {} serves folders, give --model with the path of "
                            "the model's",
                            options.model, row.name));
        if (!starts) parse_url(options.url);
        auto others = options.replicas;
        if (!others.empty()) others.insert(others.begin(), options.url);
        for (std::size_t i = 0; i < others.size(); ++i) {
            parse_url(others[i]);
            for (std::size_t j = 0; j < i; ++j)
                if (detail::plain_address(others[i]) == detail::plain_address(others[j]))
                    throw std::invalid_argument(fmt::format(
                        "the address {} is given twice: give each server's once", others[j]));
        }
        own_in_flight = row.in_flight;
        fix_in_flight();
        // Two are for what is being put in.
        if (starts && !row.cache_flag.empty())
            if (const auto prompts =
                    as_number(given(options.server_args, row.cache_flag).value_or("")))
                row.sessions = std::max(*prompts, 3U) - 2;
        if (starts)
            for (const auto& it : row.alone)
                if (!it.option.empty() && given(options.server_args, it.option)) alone = it;
        if (alone && options.max_in_flight == 0) {
            row.in_flight = 1;
            row.most_in_flight = 0;
        }
        // The name of a folder that we have not chosen is not known.
        if (!starts && row.served_model.find('{') != std::string::npos) row.served_model.clear();
        model = row.served_model.empty() ? options.model : filled_in(row.served_model);
        if (!options.journal.path.empty())
            journal = std::make_unique<Journal>(executor, options.journal);
    }

    std::string why_alone(unsigned unusual) const {
        return detail::why_one_by_one(row, alone, unusual, probed);
    }

    // The words of a row's command.
    std::string filled_in(std::string text) const {
        const auto model_path = std::filesystem::path(options.model);
        const auto name = model_path.has_filename() ? model_path : model_path.parent_path();
        std::error_code ignored;
        for (const auto& [word, value] :
             {std::pair<std::string_view, std::string>{"{model}", options.model},
              {"{model_id}", name.filename().string()},
              {"{model_dir}", std::filesystem::absolute(name, ignored).parent_path().string()},
              {"{context}", std::to_string(options.max_context)},
              {"{folder}", folder.path()}})
            text = replaced(std::move(text), word, value);
        return text;
    }

    ServerCommand command() const {
        ServerCommand it;
        it.port = options.port;
        it.startup_timeout = options.startup_timeout;
        it.folder = folder.path();
        for (const auto& part : row.command) it.argv.push_back(filled_in(part));
        for (const auto& [key, value] : row.env) it.env.emplace_back(key, filled_in(value));
        if (!row.in_flight_flag.empty() && row.in_flight > own_in_flight) {
            it.argv.push_back(row.in_flight_flag);
            it.argv.push_back(std::to_string(row.in_flight));
        }
        if (!options.executable.empty()) it.argv.front() = options.executable;
        it.argv.insert(it.argv.end(), options.server_args.begin(), options.server_args.end());
        return it;
    }

    HttpOptions http_options() const {
        HttpOptions it;
        it.url = url;
        it.api_key = options.api_key;
        it.ca_file = options.ca_file;
        it.model = model;
        // A server that knows its model by one name only cannot do with another.
        it.override_model = options.override_model || !row.served_model.empty();
        if (starts) it.max_context = options.max_context;
        it.idle_connections = std::max({it.idle_connections, row.in_flight, row.most_in_flight});
        it.max_tokens = options.max_tokens;
        it.limits = options.limits;
        return it;
    }

    void fix_in_flight() {
        if (options.max_in_flight == 0) return;
        row.in_flight = options.max_in_flight;
        row.most_in_flight = 0;
        row.repack = 0;
        // A third of the places: a refill as large as the limit is one batch after the other.
        row.refill = std::min(row.refill, std::max(options.max_in_flight / 3, 1u));
    }

    // The two loops hold this alive until they have seen it.
    void shut() {
        closing = true;
        cancel.emit(asio::cancellation_type::terminal);
        cancel_canary.emit(asio::cancellation_type::terminal);
        for (const auto& it : looks)
            if (it) it->emit(asio::cancellation_type::terminal);
        pause.cancel();
        tick.cancel();
    }

    // Anthropic's newer models refuse a temperature.
    Request one_token() const {
        const bool messages = row.wire == Wire::anthropic;
        Request request;
        if (messages) request.endpoint = "/v1/messages";
        request.body = fmt::format(
            R"({{"messages": [{{"role": "user", "content": "Hi"}}], "max_tokens": 1{}}})",
            messages ? "" : R"(, "temperature": 0)");
        return request;
    }

    static auto token(asio::cancellation_signal& by) {
        return asio::bind_cancellation_slot(by.slot(), asio::as_tuple(asio::use_awaitable));
    }
    auto token() { return token(cancel); }

    // What its keys have in them, and what is compared when a run is resumed.
    JournalRun journal_run() {
        JournalRun run;
        std::error_code ignored;
        std::string name = starts ? options.model : model;
        if (starts && std::filesystem::exists(name, ignored))
            name = std::filesystem::weakly_canonical(name, ignored).string();
        std::string args;
        for (const auto& arg : options.server_args) args += (args.empty() ? "" : " ") + arg;
        run.identity = {{"backend", options.backend},
                        {"wire", row.wire == Wire::openai ? "openai" : "anthropic"},
                        {"model", name}};
        if (!starts) {
            run.addresses = options.replicas;
            run.addresses.insert(run.addresses.begin(), options.url);
            run.server = kind;
        } else {
            run.identity.emplace_back("model_files", model_files(options.model));
            run.identity.emplace_back("executable", options.executable);
            run.identity.emplace_back("server_args", args);
            run.identity.emplace_back("max_context", std::to_string(options.max_context));
        }
        run.server_version = version;
        run.sent = [this, given = http_options()](const Request& request) {
            const auto route = detail::route(request.endpoint, row);
            auto prepared = detail::prepare(request, row, route, given.model, given.override_model,
                                            given.max_tokens);
            return prepared.error.empty() ? prepared.body.text() : request.body;
        };
        return run;
    }

    // Of a server that cannot say what it is, the journal may know what it was: if that has all the
    // answers, nobody has to be asked.
    asio::awaitable<bool> finished_before() {
        if (!journal || !options.enough || options.journal.mode != JournalMode::resume)
            co_return false;
        const auto before = std::tuple(model, row, version, kind);
        const auto known = co_await recall();
        if (!known) co_return false;
        if (model.empty()) model = known->model;
        const auto failure = co_await begin_journal();
        if (!failure && options.enough(*journal)) co_return true;
        std::tie(model, row, version, kind) = before;
        co_return false;
    }

    // What is not known of the server is what the journal knows: requests go out as they went.
    asio::awaitable<std::optional<JournalKnown>> recall() {
        auto run = journal_run();
        auto [ec, known] = co_await journal->async_known(std::move(run), token());
        if (!known.refused.empty()) refused = {ec, std::move(known.refused)};
        if (ec) co_return std::nullopt;
        if (kind.empty()) {
            row = detail::with_profile(row, kind_of(known.server));
            fix_in_flight();
            version = known.server_version;
            kind = known.server;
        }
        co_return std::optional(std::move(known));
    }

    // "vllm", or "sglang-router vllm"; and back.
    static std::string name_of(const detail::Recognition& found) {
        return found.profile + (found.behind.empty() ? "" : " " + found.behind);
    }
    static detail::Recognition kind_of(const std::string& text) {
        detail::Recognition found;
        const auto space = text.find(' ');
        found.profile = text.substr(0, space);
        if (space != text.npos) found.behind = text.substr(space + 1);
        return found;
    }

    asio::awaitable<Failure> begin_journal() {
        auto run = journal_run();
        auto [ec, detail] = co_await journal->async_begin(std::move(run), token());
        co_return Failure{ec, detail};
    }

    // Of a server of ours: mlx_lm.server and others say it with every answer. Behind a URL there
    // may be many servers, and several versions.
    asio::awaitable<void> learn_version() {
        Request probe = one_token();
        auto [ec, response] = co_await http->async_complete(std::move(probe), {}, token());
        if (ec || response.body.empty() || detail::check_object(response.body)) co_return;
        version = detail::from_json_string(
            detail::member(detail::members(response.body), "system_fingerprint").value_or(""));
    }

    asio::awaitable<Failure> open() {
        if (journal) {
            auto [ec, detail] = co_await journal->async_open(token());
            if (ec) co_return Failure{ec, detail};
            if (starts && options.enough && options.journal.mode == JournalMode::resume) {
                if (auto failure = co_await begin_journal()) co_return failure;
                if (options.enough(*journal)) co_return without_server();
            }
        }
        if (starts) {
            if (names(row, "{folder}"))
                if (auto failure = folder.make()) co_return failure;
            if (alone && options.log)
                options.log(why_alone(0) + (options.max_in_flight > 0
                                                ? ""
                                                : ", so it is asked one at a time; --max-in-flight "
                                                  "sets another number"));
            auto failure = co_await start(options.port);
            // Another program took the free port before the server did.
            for (int i = 0; i < 3 && failure.code == Errc::unreachable && options.port == 0; ++i)
                failure = co_await start(options.port);
            if (failure) co_return failure;
        } else {
            url = options.url;
            Failure gone;
            if (options.probe && !options.row && row.command.empty()) gone = co_await recognise();
            if (gone && gone.code != Errc::unreachable) co_return gone;
            if (late && journal && options.journal.mode == JournalMode::resume) co_await recall();
            const bool wanted = model.empty() && options.ask_first;
            bool listed = true;
            if (!gone && wanted) listed = co_await find_model();
            bool finished = false;
            if (gone || !listed) finished = co_await finished_before();
            if (finished) {
                say(fmt::format("{}; every answer is in the journal",
                                gone ? gone.detail : "the server does not name its models"));
                co_return without_server();
            }
            if (gone) co_return refused ? refused : gone;
            if (!listed) { // it may be starting
                if (auto failure = co_await first_token(http_options())) co_return failure;
                co_await find_model();
            }
            http = std::make_unique<HttpBackend>(executor, row, http_options(), options.log);
            if (journal) {
                if (auto failure = co_await begin_journal()) co_return failure;
                if (options.enough && options.enough(*journal)) co_return without_server();
            }
            if (options.ask_first)
                if (auto failure = co_await first_token(http_options())) co_return failure;
            if (auto failure = co_await find_replicas()) co_return failure;
        }
        if (journal && starts) {
            if (version.empty()) co_await learn_version();
            if (auto failure = co_await begin_journal()) co_return failure;
        }
        make_scheduler();
        co_return Failure{};
    }

    // The journal answers everything: the rest of the stack is there, and is never asked.
    Failure without_server() {
        if (url.empty()) url = "http://127.0.0.1:1/v1";
        if (!http) http = std::make_unique<HttpBackend>(executor, row, http_options(), options.log);
        make_scheduler();
        return {};
    }

    void make_scheduler() {
        auto planning = planner_options(row);
        planning.in_order = options.order == Order::fifo;
        // Which of a router's servers gets a request is the router's affair. As it goes by what
        // they have got before, what is sent at one time must not all share one prefix.
        const auto one = [planning, count = row.workers]() -> std::unique_ptr<PrefixPlanner> {
            if (count > 1)
                return std::make_unique<detail::ReplicaPlanner>(
                    count, detail::ReplicaPlanner::Options{planning});
            return std::make_unique<RadixPlanner>(planning);
        };
        const bool mixes = row.processors_mix && !row.drop_seed_at_zero;
        const auto make = [one, mixes]() -> std::unique_ptr<PrefixPlanner> {
            if (mixes) return one();
            return std::make_unique<detail::ApartPlanner>(one);
        };
        if (more.empty()) {
            planner = make();
        } else {
            spread = std::make_shared<detail::ReplicaPlanner>(
                more.size() + 1, detail::ReplicaPlanner::Options{planning, make});
            for (std::size_t n = 1; n < left_out.size(); ++n)
                if (left_out[n]) spread->leave_out(n);
            std::vector<Backend*> servers{http.get()};
            for (const auto& it : more) servers.push_back(it.get());
            replicas = std::make_unique<detail::ReplicaBackend>(
                servers, spread,
                [weak = weak_from_this()](std::size_t n, Errc errc, const std::string& detail) {
                    if (auto self = weak.lock()) self->leave_out(n, errc, detail);
                },
                [weak = weak_from_this()](std::size_t n, Errc, const std::string& detail) {
                    if (auto self = weak.lock())
                        self->say(fmt::format("{}: it refuses one request after the other ({}); "
                                              "until others have answered them or refused them, "
                                              "too, it gets one now and then",
                                              self->address(n), detail));
                });
        }
        auto scheduling = scheduler_options(row, unsigned(more.size() + 1));
        scheduling.retry = options.retry;
        scheduling.stop = options.stop;
        if (starts) scheduling.hold_broken = std::chrono::milliseconds(500);
        Backend& asked = replicas ? static_cast<Backend&>(*replicas) : *http;
        PrefixPlanner& order = spread ? static_cast<PrefixPlanner&>(*spread) : *planner;
        scheduler = std::make_unique<RequestScheduler>(asked, order, row, scheduling);
        scheduler->explain(options.explain);
        if (journal) journal->connect(*scheduler);
        if (process) supervise();
        looks.resize(spread ? spread->size() : 0);
        if (spread) look_after_those_out();
    }

    asio::awaitable<Failure> recognise() {
        Failure failed;
        const auto found = co_await detail::recognise(executor, http_options(), cancel, failed);
        if (failed) co_return failed;
        row = detail::with_profile(row, found);
        version = found.version;
        kind = name_of(found);
        late = found.late;
        if (!options.probe_folder.empty())
            if (const auto measured = stored_probe(
                    options.probe_folder, probe_key(options.url, found.profile, found.version))) {
                std::vector<std::string> notes;
                row = corrected(row, *measured, notes);
                probed = measured->batching;
                for (const auto& note : notes)
                    if (options.log) options.log(note);
            }
        fix_in_flight();
        // Of the rows that name their model only mlx_lm.server's lists others, too.
        const auto* known = find_profile_row(found.profile);
        if (model.empty() && known && known->served_model.find('{') == std::string::npos)
            model = known->served_model;
        if (!options.log) co_return Failure{};
        options.log(fmt::format("the server is {}{}{} ({}); {} requests at once{}",
                                known ? known->name : "unknown", version.empty() ? "" : " ",
                                version, found.reason, row.in_flight,
                                options.max_in_flight > 0      ? ""
                                : found.in_flight_reason != "" ? ", " + found.in_flight_reason
                                                               : ""));
        if (known && known->in_flight == 1 && options.max_in_flight == 0 && !row.remark.empty())
            options.log(fmt::format("{}: {}; --max-in-flight sets another number", known->name,
                                    row.remark));
        if (row.cuts_prompt)
            options.log(fmt::format("{} cuts a prompt that does not fit its context, and does not "
                                    "say so: mind its length",
                                    row.name));
        co_return Failure{};
    }

    // That it refuses our request does not say that it refuses theirs: some models take no
    // temperature, or no max_tokens.
    static bool takes(const Response& response) {
        return !response.outcome || response.outcome == Errc::context_too_long ||
               (response.outcome == Errc::rejected &&
                (response.status == 400 || response.status == 422));
    }

    // Of a server that runs; it may be busy, or only just starting.
    asio::awaitable<Failure> first_token(HttpOptions with) {
        with.limits.whole = options.startup_timeout;
        HttpBackend to(executor, row, with);
        detail::RetryTable table(options.retry);
        detail::RetryState state;
        for (;;) {
            Request probe = one_token();
            auto [ec, response] = co_await to.async_complete(std::move(probe), {}, token());
            if (takes(response)) co_return Failure{};
            const Failure failure{ec, response.detail};
            if (!response.outcome ||
                detail::remedy(*response.outcome, response.status) != detail::Remedy::pause)
                co_return failure;
            const auto verdict = table.decide(response, false, state);
            if (!verdict.again) co_return failure;
            say(fmt::format("the server does not take requests yet ({}); it is asked again",
                            response.detail));
            pause.expires_after(verdict.delay);
            auto [stopped] = co_await pause.async_wait(token());
            if (stopped) co_return Failure{stopped, {}};
        }
    }

    // The first is there. Of the others one that serves another model is a mistake; one that is not
    // there yet, or not well, is looked at again later.
    asio::awaitable<Failure> find_replicas() {
        if (options.replicas.empty()) co_return Failure{};
        left_out.assign(1, {});
        // What mlx_lm.server lists is what it could load.
        compare = options.ask_first && (options.probe || options.model.empty()) &&
                  row.served_model.empty() && kind != "mlx-server";
        if (compare) served = co_await models_of(http_options(), cancel);
        for (const auto& it : options.replicas) {
            auto with = http_options();
            with.url = it;
            more.push_back(std::make_unique<HttpBackend>(executor, row, with, options.log));
            auto failure = co_await look(with, std::chrono::seconds(10), cancel);
            if (failure.code == asio::error::invalid_argument ||
                failure.code == asio::error::operation_aborted)
                co_return Failure{failure.code, fmt::format("{} {}", it, failure.detail)};
            if (failure)
                say(fmt::format("{}: {}; the run begins without it", it, failure.detail));
            else if (auto cancelled = co_await compare_version(with))
                co_return cancelled;
            left_out.push_back(std::move(failure));
        }
        co_return Failure{};
    }

    // Of the first it is known: that another is of another kind or version is said.
    asio::awaitable<Failure> compare_version(HttpOptions with) {
        if (version.empty()) co_return Failure{};
        Failure failed;
        const auto found = co_await detail::recognise(executor, with, cancel, failed);
        if (failed.code == asio::error::operation_aborted) co_return failed;
        const auto its = name_of(found);
        if (!failed && !found.version.empty() && (its != kind || found.version != version))
            say(fmt::format("{} is {} {}, and the first {} {}: their answers may differ", with.url,
                            its, found.version, kind, version));
        co_return Failure{};
    }

    // Whether it serves the first one's model, and answers one token. invalid_argument: another
    // model.
    asio::awaitable<Failure> look(HttpOptions with, std::chrono::seconds limit,
                                  asio::cancellation_signal& by) {
        std::vector<std::string> theirs;
        error_code failed;
        if (compare) theirs = co_await models_of(with, by, &failed);
        if (failed == asio::error::operation_aborted) co_return Failure{failed, "cancelled"};
        auto words = detail::other_models(served, theirs, model);
        if (words.empty() && options.ask_first) {
            auto asking = with;
            asking.limits.whole = limit;
            HttpBackend to(executor, row, asking);
            Request probe = one_token();
            auto [ec, response] = co_await to.async_complete(std::move(probe), {}, token(by));
            if (!takes(response) || ec == asio::error::operation_aborted)
                co_return Failure{ec, response.detail};
        }
        if (compare && theirs.empty()) { // it was starting
            theirs = co_await models_of(with, by);
            words = detail::other_models(served, theirs, model);
        }
        if (words.empty()) co_return Failure{};
        co_return Failure{asio::error::invalid_argument,
                          words + ": the servers of one run must serve one model"};
    }

    const std::string& address(std::size_t n) const {
        return n == 0 ? options.url : options.replicas[n - 1];
    }

    void leave_out(std::size_t n, Errc errc, const std::string& detail) {
        left_out[n] = {errc, detail};
        say(fmt::format("{}: {}; it is left out, and looked at again", address(n), detail));
        look_after_those_out();
    }

    void look_after_those_out() {
        for (std::size_t n = 0; n < spread->size() && !looking; ++n)
            if (!spread->up(n)) {
                looking = true;
                asio::co_spawn(executor, look_again(shared_from_this()), asio::detached);
            }
    }

    // Lets in those that are well again, until none is out.
    static asio::awaitable<void> look_again(std::shared_ptr<Impl> self) {
        auto& spread = *self->spread;
        const auto out = [&] {
            for (std::size_t n = 0; n < spread.size(); ++n)
                if (!spread.up(n)) return true;
            return false;
        };
        while (!self->closing && out()) {
            self->tick.expires_after(std::chrono::milliseconds(250));
            co_await self->tick.async_wait(plain);
            for (const auto n : spread.due(Clock::now()))
                if (!self->closing)
                    asio::co_spawn(self->executor, look_at(self, n), asio::detached);
        }
        self->looking = false;
    }

    // One that hangs keeps nobody from the others.
    static asio::awaitable<void> look_at(std::shared_ptr<Impl> self, std::size_t n) {
        auto& mine = self->looks[n];
        if (mine) mine->emit(asio::cancellation_type::terminal); // it was in meanwhile
        const auto stop = mine = std::make_shared<asio::cancellation_signal>();
        auto with = self->http_options();
        with.url = self->address(n);
        const auto failure = co_await self->look(std::move(with), std::chrono::seconds(30), *stop);
        if (self->closing || self->looks[n] != stop) co_return;
        self->looks[n].reset();
        if (!self->spread->up(n)) self->looked(n, failure);
    }

    void looked(std::size_t n, const Failure& failure) {
        const auto before = std::exchange(left_out[n], failure);
        if (!failure) {
            say(fmt::format("{}: it is well, and takes requests", address(n)));
            spread->let_in(n);
            return scheduler->server_back();
        }
        spread->stays_out(n);
        if (failure.code == asio::error::invalid_argument) spread->bar(n);
        if (before.detail != failure.detail)
            say(fmt::format("{}: {}; it stays out, and is looked at again", address(n),
                            failure.detail));
    }

    // Ours, up to its first token.
    asio::awaitable<Failure> start(std::uint16_t port) {
        auto what = command();
        what.port = port;
        process = std::make_unique<ServerProcess>(executor, std::move(what), options.server_log);
        auto [ec, detail] = co_await process->async_start(token());
        if (ec) co_return Failure{ec, detail};
        if (!http) {
            url = fmt::format("http://127.0.0.1:{}/v1", process->port());
            http = std::make_unique<HttpBackend>(executor, row, http_options(), options.log);
        }
        Request probe = one_token();
        auto [ready_ec, ready_detail] =
            co_await process->async_wait_ready(*http, std::move(probe), token());
        if (ready_ec && !scheduler) http.reset(); // its address was this port's
        if (ready_ec == Errc::rejected)
            co_return Failure{ready_ec,
                              fmt::format("the server does not answer with the model '{}': {}; "
                                          "its last words: {}",
                                          options.model, ready_detail,
                                          last_lines(process->last_output()))};
        co_return Failure{ready_ec, ready_detail};
    }

    // The server's own list. `ec`: it could not be asked.
    asio::awaitable<std::vector<std::string>>
    models_of(HttpOptions asking, asio::cancellation_signal& by, error_code* ec = nullptr) {
        asking.limits.whole = std::chrono::seconds(10);
        HttpBackend asker(executor, row, asking);
        Request request;
        request.endpoint = "/v1/models";
        auto [failed, response] = co_await asker.async_complete(std::move(request), {}, token(by));
        if (ec && failed != Errc::rejected) *ec = failed;
        std::vector<std::string> models;
        if (failed) co_return models;
        for (const auto& it : detail::elements(
                 detail::member(detail::members(response.body), "data").value_or("[]")))
            models.push_back(detail::from_json_string(
                detail::member(detail::members(it), "id").value_or("\"\"")));
        co_return models;
    }

    // A server that has no list gets bodies as they are. False: it could not be asked.
    asio::awaitable<bool> find_model() {
        error_code failed;
        auto asking = http_options();
        const auto list = co_await models_of(std::move(asking), cancel, &failed);
        if (failed) co_return false;
        if (list.empty()) co_return true;
        model = list.front();
        if (list.size() > 1 && options.log)
            options.log(fmt::format("the server lists {} models; bodies without one get '{}' "
                                    "(choose with --model)",
                                    list.size(), model));
        co_return true;
    }

    // Two loops that end with the runtime.
    void supervise() {
        asio::co_spawn(executor, keep_alive(shared_from_this()), asio::detached);
        asio::co_spawn(executor, watch(shared_from_this()), asio::detached);
    }

    // Starts a server of ours again when it has ended.
    static asio::awaitable<void> keep_alive(std::shared_ptr<Impl> self) {
        unsigned in_row = 0;
        std::uint64_t answered = 0;
        for (;;) {
            auto [ec, how] = co_await self->process->async_wait_exit(plain);
            if (ec || self->closing) co_return;
            self->output = self->process->last_output();
            auto& scheduler = *self->scheduler;
            const auto before = scheduler.stats();
            scheduler.server_lost();
            if (before.answered > answered) in_row = 0;
            answered = before.answered;
            const std::string what = std::exchange(self->hung, false)
                                         ? "the server did not answer any more"
                                         : fmt::format("the server has ended ({})", how);
            Failure failure{Errc::exited, last_lines(self->output)};
            const auto since = Clock::now();
            while (failure && in_row < self->options.restarts) {
                self->say(fmt::format("{}; it is started again, {} requests are asked again", what,
                                      before.in_flight));
                if (in_row++ > 0) {
                    self->pause.expires_after(std::chrono::seconds(1u << std::min(in_row - 2, 4u)));
                    co_await self->pause.async_wait(plain);
                }
                const auto port = self->process->port();
                if (!self->closing) failure = co_await self->start(port);
                if (self->closing) co_return;
                // Its port may be held by connections of before, for a minute.
                if (failure.code == Errc::unreachable &&
                    Clock::now() - since < std::chrono::seconds(75))
                    in_row = std::min(in_row, self->options.restarts - 1);
                if (failure) self->output = self->process->last_output();
            }
            if (failure)
                co_return self->give_up(
                    fmt::format("{} and was started {} times without an answer between; its last "
                                "words: {}",
                                what, in_row, failure.detail));
            ++self->restarts;
            scheduler.server_back();
        }
    }

    void give_up(std::string why) {
        if (options.stop.alike > 0 || options.stop.refused > 0)
            scheduler->stop(Errc::exited, std::move(why));
        else
            scheduler->close(Errc::exited, std::move(why));
    }

    // Ends a server of ours that runs but does not work: keep_alive() starts it again.
    static asio::awaitable<void> watch(std::shared_ptr<Impl> self) {
        auto limits = self->options.watchdog;
        // One that answers whole bodies, or one request at a time, says nothing for long, and its
        // canary has to wait.
        if (!self->row.streams || self->row.in_flight == 1) limits.quiet = {};
        auto http = self->http_options();
        http.limits.whole = limits.canary_limit;
        HttpBackend canary(self->executor, self->row, http);
        detail::Watchdog dog(limits, Clock::now());
        std::uint64_t timeouts = 0;
        for (;;) {
            self->tick.expires_after(std::chrono::milliseconds(250));
            co_await self->tick.async_wait(plain);
            if (self->closing) co_return;
            const auto stats = self->scheduler->stats();
            if (std::exchange(timeouts, stats.timeouts) != stats.timeouts) dog.timed_out();
            if (!self->process->running() || self->hung) {
                dog = {limits, Clock::now()};
                continue;
            }
            dog.progress(self->scheduler->last_progress());
            switch (dog.next(stats.in_flight > 0, Clock::now())) {
            case detail::Watchdog::Step::wait: break;
            case detail::Watchdog::Step::ask: {
                Request request = self->one_token();
                auto [ec, response] = co_await canary.async_complete(
                    std::move(request), {},
                    asio::bind_cancellation_slot(self->cancel_canary.slot(), plain));
                if (self->closing) co_return;
                dog.progress(self->scheduler->last_progress());
                // A refusal is an answer too.
                dog.canary_ended(!ec || ec == Errc::rejected || ec == Errc::rate_limited ||
                                     ec == Errc::overloaded || ec == Errc::auth ||
                                     ec == Errc::context_too_long,
                                 Clock::now());
                break;
            }
            case detail::Watchdog::Step::hung:
                self->hung = true;
                self->process->async_stop([self](error_code) {});
                break;
            }
        }
    }

    void say(std::string_view line) {
        if (options.log) options.log(line);
    }

    asio::any_io_executor executor;
    RuntimeOptions options;
    BackendRow row;
    bool starts = false;
    bool closing = false;
    unsigned own_in_flight = 0;             // the row's
    std::optional<BackendRow::Alone> alone; // it answers one request at a time
    std::optional<double> probed;           // see ProbeResult::batching
    std::string url, model, version;
    std::string kind;      // of the server, as recognised: its profile, and a router's servers'
    std::string output;    // of the server before it ended the last time
    unsigned restarts = 0; // of the server
    bool late = false;     // it was too busy to be recognised
    bool hung = false;     // it was found to be, and is being stopped
    PrivateFolder folder;  // outlives the server
    asio::cancellation_signal cancel; // of the step of open() or of a restart that runs
    asio::cancellation_signal cancel_canary;
    asio::steady_timer pause{executor}, tick{executor};
    std::unique_ptr<PrefixPlanner> planner;
    std::unique_ptr<ServerProcess> process;
    std::unique_ptr<HttpBackend> http;
    std::vector<std::unique_ptr<HttpBackend>> more; // of the replicas
    std::vector<Failure> left_out;                  // of each server: why; none: it is in
    std::vector<std::string> served;                // the models of the first
    bool compare = false;                           // those of the others with them
    bool looking = false;                           // look_again() runs
    std::vector<std::shared_ptr<asio::cancellation_signal>> looks; // a server's, that runs
    std::shared_ptr<detail::ReplicaPlanner> spread;
    std::unique_ptr<detail::ReplicaBackend> replicas;
    std::unique_ptr<RequestScheduler> scheduler;
    std::unique_ptr<Journal> journal;
    Failure refused; // by the journal: it is another configuration's
};

Runtime::Runtime(asio::any_io_executor executor, RuntimeOptions options)
    : impl_(std::make_shared<Impl>(std::move(executor), std::move(options))) {}

Runtime::~Runtime() {
    impl_->shut();
    impl_->process.reset();
}

void Runtime::open(Handler handler) {
    detail::on_cancel(handler, [weak = std::weak_ptr(impl_)] {
        if (auto impl = weak.lock()) impl->cancel.emit(asio::cancellation_type::terminal);
    });
    asio::co_spawn(impl_->executor, impl_->open(),
                   [impl = impl_, handler = std::move(handler)](std::exception_ptr error,
                                                                Failure failure) mutable {
                       if (error) failure = as_failure(error);
                       if (failure) impl->process.reset();
                       detail::complete(impl->executor, std::move(handler), failure.code,
                                        std::move(failure.detail));
                   });
}

void Runtime::close(asio::any_completion_handler<void(error_code)> handler) {
    impl_->shut();
    if (impl_->scheduler) impl_->scheduler->close(Errc::cancelled, "the runtime was closed");
    auto ended = [impl = impl_, handler = std::move(handler)](error_code ec) mutable {
        if (!impl->journal) return detail::complete(impl->executor, std::move(handler), ec);
        impl->journal->async_close([impl, ec, handler = std::move(handler)](
                                       error_code failed, const std::string&) mutable {
            detail::complete(impl->executor, std::move(handler), ec ? ec : failed);
        });
    };
    if (!impl_->process)
        return asio::post(impl_->executor, asio::append(std::move(ended), error_code()));
    impl_->process->async_stop(std::move(ended));
}

Backend& Runtime::front() {
    if (impl_->journal) return *impl_->journal;
    return *impl_->scheduler;
}
Journal* Runtime::journal() { return impl_->journal.get(); }

RequestScheduler& Runtime::backend() { return *impl_->scheduler; }
HttpBackend& Runtime::server() { return *impl_->http; }
const BackendRow& Runtime::row() const { return impl_->row; }
const std::string& Runtime::url() const { return impl_->url; }
std::string Runtime::one_by_one() const {
    const auto stats = impl_->scheduler->stats();
    return stats.one_by_one ? impl_->why_alone(stats.unusual) : std::string();
}

const std::string& Runtime::server_version() const { return impl_->version; }
const std::string& Runtime::model() const { return impl_->model; }
std::vector<Runtime::Replica> Runtime::replicas() const {
    std::vector<Replica> list;
    for (std::size_t i = 0; impl_->replicas && i < impl_->spread->size(); ++i) {
        const auto& count = impl_->replicas->count(i);
        const bool up = impl_->spread->up(i);
        const auto& why = impl_->left_out[i];
        const auto& planned = impl_->spread->count(i);
        list.push_back({impl_->address(i), count.answered, count.failed, count.cancelled,
                        planned.refused, planned.taken_over, up,
                        up || why.code == Errc::unreachable ? std::string() : why.detail});
    }
    return list;
}
unsigned Runtime::restarts() const { return impl_->restarts; }
const std::string& Runtime::server_output() const { return impl_->output; }
bool Runtime::running() const { return !impl_->process || impl_->process->running(); }

} // namespace evalrt
