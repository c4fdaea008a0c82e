#include "suite.hpp"

#include "plan.hpp"

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <map>
#include <random>
#include <stdexcept>
#include <unordered_set>

#include <sys/resource.h>
#include <unistd.h>

namespace evalrt::program {
namespace {

constexpr auto token = asio::as_tuple(asio::use_awaitable);

std::string seconds(double value) {
    if (value < 120) return fmt::format("{:.0f} s", value);
    return fmt::format("{:.0f} min", value / 60);
}

std::string counts(const std::map<Errc, std::uint64_t>& failures) {
    std::string text;
    for (const auto& [errc, count] : failures)
        text += fmt::format("{}{} {}", text.empty() ? "" : ", ", count, name(errc));
    return text;
}

class Run {
public:
    Run(asio::io_context& io, Suite& suite, const Common& common)
        : suite_(suite),
          common_(common),
          io_(io),
          changed_(io),
          signals_(io, SIGINT, SIGTERM),
          terminal_(::isatty(STDERR_FILENO) == 1) {}

    asio::awaitable<int> main() {
        auto options = common_.runtime;
        if (!options.journal.path.empty()) describe_suite(options.journal);
        options.retry.seed = common_.seed;
        options.stop = {.refused = 3, .alike = 20};
        options.log = [this](std::string_view line) {
            report_.note(line);
            print(line);
        };
        options.journal.on_failure = [this](Failure failure) {
            unwritable_ = true;
            clear_line();
            say(failure.detail + "; the run ends" + (report_.answered() > 0 ? kept() : ""));
            stop();
        };
        if (!explain_to(common_.explain, options)) co_return exit_usage;
        // A run that has been answered needs no server; a second look at its answers does.
        if (common_.parity == 0)
            options.enough = [this](const Journal& journal) { return all_held(journal); };
        try {
            runtime_ = std::make_unique<Runtime>(io_.get_executor(), options);
        } catch (const std::invalid_argument& error) {
            say(error.what());
            co_return exit_usage;
        }
        watch_signals();
        const bool starts = options.url.empty();
        if (starts && !common_.quiet)
            print(fmt::format("starting {} with {}", options.backend, options.model));
        auto [ec, detail] =
            co_await runtime_->async_open(asio::bind_cancellation_slot(opening_.slot(), token));
        if (interrupted_) co_return abandon(0);
        if (ec) {
            if (ec.category() == journal_category()) {
                say(detail);
                co_return exit_unwritable;
            }
            say(fmt::format("{}: {}", options.backend, detail));
            co_return ec == asio::error::invalid_argument ? exit_usage : exit_backend;
        }
        report_.backend = options.backend;
        report_.model = runtime_->model();
        report_.order = options.order == Order::fifo ? "fifo" : "planned";
        report_.max_in_flight = runtime_->row().in_flight;
        report_.describe(runtime_->row());
        if (!runtime_->server_version().empty())
            report_.server_version = runtime_->server_version();

        const int code = co_await run_jobs();
        if (interrupted_) co_return code; // the server is killed, not waited for
        if (common_.parity > 0) co_await check_parity();
        summarise();
        signals_.cancel();
        co_await runtime_->async_close(token);
        co_return unwritable_ ? exit_unwritable : code;
    }

private:
    // What a journal has to know of the suite, which it is asked for item by item.
    void describe_suite(JournalOptions& journal) {
        journal.items = std::int64_t(suite_.jobs.size());
        std::map<std::string_view, std::int64_t> copies;
        for (auto& job : suite_.jobs) {
            job.request.name = job.id;
            if (!job.problem.empty()) ++journal.invalid;
            if (job.same_as) ++copies[suite_.jobs[*job.same_as].id];
        }
        for (const auto& [name, count] : copies)
            journal.copies.emplace_back(name, std::to_string(count));
        journal.named = [this](std::string_view name) {
            if (names_.empty())
                for (const auto& job : suite_.jobs)
                    if (job.problem.empty() && !job.same_as) names_.insert(job.id);
            return names_.contains(name);
        };
    }

    void watch_signals() {
        signals_.async_wait([this](error_code ec, int) {
            if (ec) return;
            interrupted_ = true;
            opening_.emit(asio::cancellation_type::terminal);
            stop();
            // The second time there is nothing more to write out.
            signals_.async_wait([](error_code again, int) {
                if (!again) std::_Exit(exit_interrupted);
            });
        });
    }

    bool all_held(const Journal& journal) const {
        std::vector<const Request*> requests;
        for (const auto& job : suite_.jobs)
            if (job.problem.empty() && !job.same_as) requests.push_back(&job.request);
        return journal.holds(requests);
    }

    void stop() {
        stopping_ = true;
        changed_.cancel();
    }

    asio::awaitable<int> run_jobs() {
        auto& backend = runtime_->backend();
        auto& front = runtime_->front();
        started_ = Clock::now();
        if (suite_.jobs.size() > 1 && !common_.quiet)
            print(fmt::format("{} requests, {}{} at once, order {}", suite_.jobs.size(),
                              report_.max_in_flight,
                              runtime_->row().most_in_flight > report_.max_in_flight
                                  ? fmt::format(" to {}", runtime_->row().most_in_flight)
                                  : "",
                              report_.order));
        std::map<std::size_t, std::vector<std::size_t>> repeats;
        for (std::size_t i = 0; i < suite_.jobs.size(); ++i)
            if (const auto first = suite_.jobs[i].same_as) repeats[*first].push_back(i);
        for (std::size_t i = 0; i < suite_.jobs.size(); ++i) {
            auto& job = suite_.jobs[i];
            if (job.same_as) continue;
            if (!job.problem.empty()) {
                Response response;
                response.outcome = Errc::rejected;
                response.detail = job.problem;
                ended(i, response);
                continue;
            }
            Request request = job.request;
            request.name = job.id;
            ++open_;
            const auto at = repeats.find(i);
            auto also = at == repeats.end() ? std::vector<std::size_t>() : std::move(at->second);
            const auto take = [this](std::size_t index, const Response& response) {
                // What an interruption ended has not failed: it was not run.
                if (response.outcome == Errc::cancelled)
                    ++report_.not_run;
                else
                    ended(index, response);
            };
            front.async_complete(
                std::move(request), {},
                [this, i, take, also = std::move(also)](error_code, Response response) {
                    --open_;
                    take(i, response);
                    response.repeated = true;
                    response.attempts = 0;
                    for (const auto index : also) take(index, response);
                    if (open_ == 0 || stopping_) changed_.cancel();
                });
        }
        if (auto* journal = runtime_->journal()) journal->suite_asked();
        auto next_line = Clock::now() + std::chrono::seconds(terminal_ ? 0 : 5);
        while (open_ > 0 && !stopping_) {
            changed_.expires_after(std::chrono::milliseconds(terminal_ ? 200 : 1000));
            co_await changed_.async_wait(token);
            if (!common_.quiet && (terminal_ || Clock::now() >= next_line)) {
                next_line = Clock::now() + std::chrono::seconds(5);
                progress();
            }
        }
        backend.cancel();
        while (open_ > 0) {
            changed_.expires_after(std::chrono::hours(1));
            co_await changed_.async_wait(token);
        }
        wall_ = std::chrono::duration<double>(Clock::now() - started_).count();
        clear_line();
        const bool whole = report_.not_run == 0;
        if (!suite_.on_end(whole) && !unwritable_) {
            unwritable_ = true;
            say("the results cannot be written; " + kept_or_lost());
        }
        if (interrupted_) {
            summarise();
            co_return abandon(report_.answered());
        }
        if (unwritable_) co_return exit_unwritable;
        if (const auto& stopped = backend.stopped()) {
            const bool gone = stopped->cause == Errc::unreachable || stopped->cause == Errc::exited;
            say(fmt::format("stopped early: {}; {} of {} answered{}", stopped->why,
                            report_.answered(), suite_.jobs.size(),
                            report_.answered() > 0 ? ", kept" + kept() : ""));
            co_return gone ? exit_backend : exit_stopped;
        }
        if (report_.failed() > 0) {
            say(fmt::format("{} of {} failed ({}); the first: {}", report_.failed(),
                            suite_.jobs.size(), counts(report_.failures()), first_failure_));
            co_return exit_failed;
        }
        co_return exit_answered;
    }

    std::string kept() const {
        return suite_.kept_in.empty() ? "" : fmt::format(" in {}", suite_.kept_in);
    }

    std::string kept_or_lost() const {
        return suite_.kept_in.empty()
                   ? "what was answered is lost: give -o or --journal a file to keep it in"
                   : "what was answered is kept" + kept();
    }

    int abandon(std::uint64_t answered) {
        clear_line();
        say(fmt::format("interrupted: {} of {} answered{}; {}", answered, suite_.jobs.size(),
                        answered > 0 ? kept() : "",
                        suite_.resumes ? "the same command asks for the rest"
                        : answered > 0 && !suite_.kept_in.empty()
                            ? "the same command starts again from the first, once that is moved "
                              "away (with --journal FILE it would ask for the rest)"
                            : "the same command starts again from the first"));
        return exit_interrupted;
    }

    void ended(std::size_t index, const Response& response) {
        report_.add(response);
        if (!response.repeated) tokens_ += response.usage.completion_tokens.value_or(0);
        if (response.outcome && first_failure_.empty())
            first_failure_ = fmt::format("{}: {}: {}", suite_.jobs[index].id,
                                         name(*response.outcome), response.detail);
        if (common_.parity > 0 && !response.outcome) texts_[index] = parity_text(response);
        if (!unwritable_ && !suite_.on_result(index, response)) {
            unwritable_ = true;
            say("the results cannot be written (is the disk full?); the run ends, " +
                kept_or_lost());
            stop();
        }
    }

    asio::awaitable<void> check_parity() {
        std::vector<std::size_t> sample;
        for (const auto& [index, text] : texts_) sample.push_back(index);
        std::mt19937_64 random(common_.seed);
        std::shuffle(sample.begin(), sample.end(), random);
        sample.resize(std::min<std::size_t>(sample.size(), common_.parity));
        std::sort(sample.begin(), sample.end());
        Parity parity;
        for (const auto index : sample) {
            Request request = suite_.jobs[index].request;
            auto [ec, response] =
                co_await runtime_->backend().async_complete(std::move(request), {}, token);
            if (!ec) parity.add(suite_.jobs[index].id, parity_text(response) == texts_[index]);
        }
        print(fmt::format("parity: {} of {} answers are the same one at a time", parity.identical,
                          parity.checked));
        report_.parity = std::move(parity);
    }

    void progress() {
        const auto done = report_.answered() + report_.failed();
        const double passed = std::chrono::duration<double>(Clock::now() - started_).count();
        const auto stats = runtime_->backend().stats();
        std::string line = fmt::format("{}/{} done, {} in flight, {} passed", done,
                                       suite_.jobs.size(), stats.in_flight, seconds(passed));
        if (tokens_ > 0) line += fmt::format(", {:.0f} tokens/s", double(tokens_) / passed);
        if (report_.failed() > 0) line += fmt::format(", {} failed", report_.failed());
        if (done > 0 && done < suite_.jobs.size())
            line += fmt::format(", {} left",
                                seconds(passed / double(done) * double(suite_.jobs.size() - done)));
        if (!terminal_) return say(line);
        constexpr std::size_t width = 24;
        const auto full = width * done / std::max<std::size_t>(suite_.jobs.size(), 1);
        fmt::print(stderr, "\r\033[K[{:#<{}}{:.<{}}] {}", "", full, "", width - full, line);
        std::fflush(stderr);
        line_open_ = true;
    }

    void clear_line() {
        if (std::exchange(line_open_, false)) fmt::print(stderr, "\r\033[K");
    }

    void print(std::string_view line) {
        clear_line();
        if (!common_.quiet) say(line);
    }

    void summarise() {
        const auto stats = runtime_->backend().stats();
        for (const auto& text : complete_report(report_, *runtime_)) print(text);
        if (!common_.quiet) {
            print(report_.prefix_cached());
            print(fmt::format(
                "{} answered{}, {} failed, {} not run in {:.1f} s", report_.answered(),
                report_.from_journal() > 0
                    ? fmt::format(" ({} of them from the journal)", report_.from_journal())
                    : "",
                report_.failed(), report_.not_run, wall_));
            if (report_.repeated() > 0)
                print(fmt::format("{} of them are answers to requests that are there twice",
                                  report_.repeated()));
            if (const auto best = report_.bound(stats, wall_))
                print(fmt::format("at least {:.1f} s: {} tokens to prefill at {:.0f}/s, {} to "
                                  "decode at {:.0f}/s; this run took {:.2f} times that",
                                  best->seconds, best->prefill_tokens, best->prefill_rate,
                                  best->output_tokens, best->decode_rate, wall_ / best->seconds));
            print(client_cost());
        }
        if (common_.json.empty()) return;
        std::ofstream file(common_.json);
        file << report_.json(stats, wall_) << '\n';
        if (!file.flush()) {
            say(fmt::format("the run summary cannot be written to {}", common_.json));
            unwritable_ = true;
        }
    }

    // What we ourselves cost, the server not counted.
    static std::string client_cost() {
        rusage used{};
        ::getrusage(RUSAGE_SELF, &used);
        const double megabytes = megabytes_used();
        const auto cpu = [](const timeval& t) {
            return double(t.tv_sec) + double(t.tv_usec) / 1e6;
        };
        return fmt::format("the client used {:.2f} s of CPU and {:.0f} MB",
                           cpu(used.ru_utime) + cpu(used.ru_stime), megabytes);
    }

    Suite& suite_;
    const Common& common_;
    asio::io_context& io_;
    asio::steady_timer changed_;
    asio::signal_set signals_;
    asio::cancellation_signal opening_;
    const bool terminal_;
    std::unordered_set<std::string_view> names_; // of what is asked; the journal's thread's
    std::unique_ptr<Runtime> runtime_;
    Report report_;
    Clock::time_point started_;
    double wall_ = 0;
    std::int64_t tokens_ = 0;
    std::size_t open_ = 0;                     // jobs that have not ended
    std::map<std::size_t, std::string> texts_; // for the parity check
    std::string first_failure_;
    bool interrupted_ = false, stopping_ = false, unwritable_ = false, line_open_ = false;
};

} // namespace

void say(std::string_view line) {
    // A terminal that is gone does not end us.
    const auto text = fmt::format("evalrt: {}\n", line);
    std::fwrite(text.data(), 1, text.size(), stderr);
}

std::vector<std::string> complete_report(Report& report, Runtime& runtime) {
    report.max_in_flight = std::max(report.max_in_flight, runtime.backend().stats().most_limit);
    report.server_restarts = runtime.restarts();
    report.server_output = runtime.server_output();
    std::vector<std::string> notes;
    for (const auto& it : runtime.replicas()) {
        auto text =
            it.answered + it.failed + it.cancelled == 0
                ? fmt::format("{}: nothing was asked of it", it.url)
                : fmt::format("{}: {} answered, {} attempts failed, {} taken over from others",
                              it.url, it.answered, it.failed, it.taken_over);
        if (it.cancelled > 0) text += fmt::format(", {} cancelled", it.cancelled);
        if (it.refused > 0)
            text += fmt::format("; it refused {} that another one answered", it.refused);
        if (!it.up) text += it.why.empty() ? "; it is gone" : "; it is left out: " + it.why;
        notes.push_back(std::move(text));
    }
    if (auto text = runtime.one_by_one(); !text.empty()) notes.push_back(std::move(text));
    for (const auto& text : notes) report.note(text);
    if (auto text = report.versions(); !text.empty()) notes.push_back(std::move(text)); // noted
    return notes;
}

bool explain_to(const std::string& path, RuntimeOptions& options) {
    if (path.empty()) return true;
    auto file = std::make_shared<std::ofstream>(path);
    if (!*file) {
        say(fmt::format("--explain: {} cannot be written", path));
        return false;
    }
    options.explain = [file](std::string_view line) { *file << line << '\n'; };
    return true;
}

int run_suite(Suite suite, const Common& common) { return run_to_end<Run>(suite, common); }

} // namespace evalrt::program
