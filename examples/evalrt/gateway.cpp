#include "gateway.hpp"

#include "child.hpp"
#include "confinement.hpp"
#include "evalrt/detail/complete.hpp"
#include "evalrt/gateway.hpp"
#include "gateway_wire.hpp"
#include "rehearsal.hpp"

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <stdexcept>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace evalrt::program {
namespace {

constexpr auto token = asio::as_tuple(asio::use_awaitable);

// Empty: fine. Otherwise what is wrong.
std::string read_listen(std::string text, GatewayOptions& options) {
    const auto digits = [](std::string_view it) {
        return !it.empty() && it.size() <= 5 &&
               std::all_of(it.begin(), it.end(), [](char c) { return c >= '0' && c <= '9'; });
    };
    std::string port;
    if (digits(text)) {
        port = std::exchange(text, "127.0.0.1");
    } else if (text.starts_with('[')) {
        const auto end = text.find(']');
        if (end != text.npos && end + 1 < text.size()) port = text.substr(end + 1);
        text = text.substr(1, end == text.npos ? end : end - 1);
        if (!port.empty() && port.front() == ':') port.erase(0, 1);
    } else if (const auto colon = text.rfind(':'); colon != text.npos && text.find(':') == colon) {
        port = text.substr(colon + 1);
        text.resize(colon);
    }
    if (!port.empty() && (!digits(port) || std::stoi(port) > 65535))
        return "--listen takes HOST:PORT, such as 127.0.0.1:8080";
    options.host = text;
    options.port = std::uint16_t(port.empty() ? 0 : std::stoi(port));
    if (!detail::is_loopback(options.host) && options.token.empty())
        return fmt::format("--listen {} is no loopback address: others could reach it, so it needs "
                           "--token-file with a token that clients must send",
                           options.host);
    return {};
}

// Behind the address that a rehearsed command gets: nothing but what is known and placeholders.
class Stage final : public Backend {
public:
    Stage(asio::any_io_executor executor, Rehearsal& rehearsal, std::function<void()> stuck)
        : executor_(std::move(executor)), rehearsal_(rehearsal), stuck_(std::move(stuck)) {}
    asio::any_io_executor get_executor() noexcept override { return executor_; }

    std::size_t asked = 0;
    Silence silence{Clock::now()};

private:
    void start_complete(Request request, TextSink, Handler handler) override {
        ++asked;
        silence.asked(Clock::now());
        auto response = rehearsal_.rehearse(request);
        if (rehearsal_.stuck()) stuck_();
        detail::complete(executor_, std::move(handler), error_code(), std::move(response));
    }

    asio::any_io_executor executor_;
    Rehearsal& rehearsal_;
    std::function<void()> stuck_;
};

// Beside it, for what is no question to a model: the server, but where it would keep a placeholder.
class Onlooker final : public Backend {
public:
    Onlooker(Backend& server, const Rehearsal& rehearsal)
        : server_(server), rehearsal_(rehearsal) {}
    asio::any_io_executor get_executor() noexcept override { return server_.get_executor(); }

private:
    static bool forgets(std::string_view endpoint) {
        const auto path = endpoint.substr(0, endpoint.find('?'));
        constexpr std::string_view known[] = {
            "/tokenize", "/detokenize", "/count_tokens", "/embeddings", "/embed",
            "/rerank",   "/score",      "/classify",     "/pooling",    "/moderations"};
        return std::any_of(std::begin(known), std::end(known),
                           [&](const auto& it) { return path.ends_with(it); });
    }

    void start_complete(Request request, TextSink on_text, Handler handler) override {
        if (!rehearsal_.from_placeholder(request) || forgets(request.endpoint))
            return server_.async_complete(std::move(request), std::move(on_text),
                                          std::move(handler));
        Response refused;
        refused.outcome = Errc::rejected;
        refused.detail = "this has a placeholder in it, which the server might keep";
        detail::complete(get_executor(), std::move(handler), make_error_code(Errc::rejected),
                         std::move(refused));
    }

    Backend& server_;
    const Rehearsal& rehearsal_;
};

// Behind the address of the run that counts: what was learned, and the server for all else.
class Rehearsed final : public Backend {
public:
    // `plain`: for what is no question to a model.
    Rehearsed(Backend& server, Backend& plain, Rehearsal& rehearsal,
              std::function<void(const Response&)> on_answer, std::function<void()> on_leak)
        : server_(server),
          plain_(plain),
          rehearsal_(rehearsal),
          on_answer_(std::move(on_answer)),
          on_leak_(std::move(on_leak)) {}
    asio::any_io_executor get_executor() noexcept override { return server_.get_executor(); }

    std::size_t known = 0, asked = 0, leaks = 0;

private:
    void start_complete(Request request, TextSink on_text, Handler handler) override {
        if (rehearsal_.from_placeholder(request)) {
            Response refused;
            refused.outcome = Errc::rejected;
            refused.detail = "this request has in it what a rehearsal left behind";
            ++leaks;
            on_answer_(refused);
            on_leak_();
            return detail::complete(get_executor(), std::move(handler),
                                    make_error_code(Errc::rejected), std::move(refused));
        }
        if (request.plain)
            return plain_.async_complete(std::move(request), std::move(on_text),
                                         std::move(handler));
        if (auto response = rehearsal_.known(request)) {
            ++known;
            return detail::complete(get_executor(), std::move(handler), error_code(),
                                    std::move(*response));
        }
        ++asked;
        const auto slot = asio::get_associated_cancellation_slot(handler);
        server_.async_complete(std::move(request), std::move(on_text),
                               asio::bind_cancellation_slot(
                                   slot, [answered = on_answer_, handler = std::move(handler)](
                                             error_code ec, Response response) mutable {
                                       answered(response);
                                       std::move(handler)(ec, std::move(response));
                                   }));
    }

    Backend& server_;
    Backend& plain_;
    Rehearsal& rehearsal_;
    std::function<void(const Response&)> on_answer_;
    std::function<void()> on_leak_;
};

// The file that one of our own outputs goes to; empty: it goes elsewhere.
std::string file_behind(int fd) {
    struct stat what {};
    if (::fstat(fd, &what) != 0 || !S_ISREG(what.st_mode)) return {};
#ifdef F_GETPATH
    char name[4096] = "";
    return ::fcntl(fd, F_GETPATH, name) == 0 ? name : "";
#else
    std::error_code ignored;
    return std::filesystem::read_symlink(fmt::format("/proc/self/fd/{}", fd), ignored).string();
#endif
}

class Service {
public:
    Service(asio::io_context& io, const GatewayCommand& command, const Common& common)
        : command_(command),
          common_(common),
          io_(io),
          child_(io.get_executor()),
          signals_(io),
          changed_(io) {
        for (const int number : stop_signals()) signals_.add(number);
    }

    asio::awaitable<int> main() {
        GatewayOptions front;
        if (auto error = settle(front); !error.empty()) {
            say(error);
            co_return exit_usage;
        }
        auto options = common_.runtime;
        options.retry.seed = common_.seed;
        options.log = [this](std::string_view line) {
            report_.note(line);
            print(line);
        };
        if (!explain_to(common_.explain, options)) co_return exit_usage;
        options.journal.suite = "gateway";
        options.journal.on_failure = [this](const Failure& failure) {
            unwritable_ = true;
            say(failure.detail + "; nothing more is answered");
        };
        try {
            runtime_ = std::make_unique<Runtime>(io_.get_executor(), options);
        } catch (const std::invalid_argument& error) {
            say(error.what());
            co_return exit_usage;
        }
        signals_.async_wait([this](error_code ec, int) {
            if (ec) return;
            interrupted_ = true;
            opening_.emit(asio::cancellation_type::terminal);
            if (rehearsing_) child_.stop();
            if (learning_) runtime_->backend().cancel();
        });
        if (options.url.empty())
            print(fmt::format("starting {} with {}", options.backend, options.model));
        auto [ec, detail] =
            co_await runtime_->async_open(asio::bind_cancellation_slot(opening_.slot(), token));
        if (interrupted_) {
            say("interrupted before the server was there");
            co_return exit_interrupted;
        }
        if (ec) {
            const bool journal = ec.category() == journal_category();
            say(journal ? detail : fmt::format("{}: {}", options.backend, detail));
            co_return journal                     ? exit_unwritable
            : ec == asio::error::invalid_argument ? exit_usage
                                                  : exit_backend;
        }
        describe(options);
        front.model = options.model.empty() ? runtime_->model() : options.model;
        front.server_models = options.model.empty();
        front.server = &runtime_->server();
        front.in_flight = [this] { return runtime_->backend().stats().in_flight; };
        front.on_answer = [this](const Response& response) { answered(response); };
        front.log = options.log;
        started_ = Clock::now();
        int code = exit_answered;
        if (command_.rehearsals > 0) {
            code = co_await rehearse(front);
            rehearsal_.begin();
            rehearsed_ = std::make_unique<Rehearsed>(
                runtime_->front(), runtime_->server(), rehearsal_,
                std::exchange(front.on_answer, {}), [this] {
                    if (!std::exchange(leaked_, true))
                        say("the command asks what it has from its rehearsal: it keeps something "
                            "outside its folder, and cannot be rehearsed; it is stopped");
                    child_.signal(SIGTERM);
                });
        }
        if (rehearsed_) front.server = rehearsed_.get();
        if (code == exit_answered) code = co_await run(front);
        co_await runtime_->async_close(token);
        co_return code;
    }

private:
    std::string settle(GatewayOptions& front) {
        if (!command_.token_file.empty()) {
            std::ifstream file(command_.token_file);
            std::getline(file, front.token);
            while (front.token.ends_with('\r') || front.token.ends_with(' '))
                front.token.pop_back();
            if (front.token.empty())
                return fmt::format("cannot read a token from {}", command_.token_file);
            if (!std::all_of(front.token.begin(), front.token.end(),
                             [](char c) { return c > ' ' && c < 0x7f; }))
                return "the token has a space or a control character in it";
        }
        if (auto error = read_listen(command_.listen, front); !error.empty()) return error;
        if (command_.child.empty()) return {};
        program_ = Child::find(command_.child.front());
        return program_.empty() ? fmt::format("there is no program '{}'; nothing was run",
                                              command_.child.front())
                                : "";
    }

    void describe(const RuntimeOptions& options) {
        report_.backend = options.backend;
        report_.model = runtime_->model();
        report_.order = options.order == Order::fifo ? "fifo" : "planned";
        report_.max_in_flight = runtime_->row().in_flight;
        report_.describe(runtime_->row());
        if (!runtime_->server_version().empty())
            report_.server_version = runtime_->server_version();
    }

    void answered(const Response& response) {
        // What its client has given up has not failed.
        if (response.outcome == Errc::cancelled)
            ++report_.not_run;
        else
            report_.add(response);
    }

    // The run that counts.
    asio::awaitable<int> run(const GatewayOptions& front) {
        auto& backend = rehearsed_ ? static_cast<Backend&>(*rehearsed_) : runtime_->front();
        Gateway gateway(io_.get_executor(), backend, front);
        if (const auto failure = gateway.open()) {
            say(failure.detail);
            co_return exit_usage;
        }
        const auto address = fmt::format(R"({{"url": "{}/v1", "anthropic_url": "{}"}})",
                                         gateway.url(), gateway.url());
        int code =
            command_.child.empty() ? co_await serve(address) : co_await run_child(gateway, front);
        const double wall = std::chrono::duration<double>(Clock::now() - started_).count();
        co_await gateway.async_close(token);
        if (rehearsed_ && !results_are_its_own() && code == exit_answered) code = exit_failed;
        summarise(wall);
        co_return code;
    }

    // Where the command is known to write beside its folder: what its arguments name, our output,
    // and files and folders of the user's own that variables name.
    std::vector<Place> other_places() const {
        namespace fs = std::filesystem;
        std::error_code ignored;
        const auto folder = fs::current_path(ignored);
        std::vector<Place> places;
        const char* home = std::getenv("HOME");
        const auto add = [&](std::string name) {
            if (home && (name == "~" || name.starts_with("~/"))) name.replace(0, 1, home);
            if (!name.empty()) places.push_back({fs::absolute(name, ignored).lexically_normal()});
        };
        for (const auto& it : command_.child) {
            const auto sign = it.find('=');
            add(sign == it.npos ? it : it.substr(sign + 1));
        }
        for (const int fd : {1, 2}) add(file_behind(fd));
        for (const auto& it : own_environment()) {
            const auto sign = it.find('=');
            const auto name = it.substr(0, sign), value = it.substr(sign + 1);
            if ((!value.starts_with('/') && !value.starts_with("~/")) || value == "/" ||
                name == "HOME" || name == "OLDPWD" || name == "TMPDIR")
                continue;
            add(value);
            struct stat what {};
            if (::stat(places.back().path.c_str(), &what) != 0 || what.st_uid != ::geteuid())
                places.pop_back();
            else
                places.back().most = 10'000; // it may be all of Python
        }
        return places;
    }

    // What was written since the rehearsals began and has a placeholder in it.
    std::vector<std::string> find_traces(const std::vector<std::string>& own) {
        std::error_code ignored;
        auto written =
            written_since(begun_, {std::filesystem::current_path(ignored)}, other_places());
        if (!written.cut.empty())
            print(fmt::format("not looked through whole for placeholders, as there are too many "
                              "files: {}",
                              listed(written.cut)));
        auto left = most_searched;
        auto files = with_traces(others(std::move(written.files), own), rehearsal_.traces(), left);
        if (left == 0)
            say(fmt::format("only the first {} GB of what was written were looked through for "
                            "placeholders",
                            most_searched / 1'000'000'000));
        return files;
    }

    static std::string listed(const std::vector<std::string>& files) {
        std::string out;
        for (std::size_t i = 0; i < std::min<std::size_t>(files.size(), 10); ++i)
            out += (i ? ", " : "") + files[i];
        return files.size() > 10 ? fmt::format("{} and {} more", out, files.size() - 10) : out;
    }

    // Of the run that counts: what it asked, and whether its results can be its own. False: no.
    bool results_are_its_own() {
        const auto asked = rehearsed_->known + rehearsed_->asked, before = rehearsal_.most_asked();
        print(fmt::format("{} of its {} requests were answered from the rehearsal",
                          rehearsed_->known, asked));
        bool good = true;
        if (rehearsed_->leaks > 0) {
            good = false;
            say(fmt::format("{} requests with a placeholder in them were refused; what the command "
                            "has written may have placeholders in it",
                            rehearsed_->leaks));
        }
        if (const auto files = find_traces(own_files()); !files.empty()) {
            good = false;
            say(fmt::format("placeholders of the rehearsal stand in {}: these are no results",
                            listed(files)));
        }
        // One whose requests are new each time (a date, a random name) asks as many; one that tries
        // again where it cannot use a placeholder asks some of the same.
        const auto words = fmt::format("the command asked {} in its rehearsal and {} now", before,
                                       asked == 0 ? "nothing" : std::to_string(asked));
        if (rehearsed_->leaks > 0 || child_.was_told_to_stop()) return good;
        if (rehearsed_->known == 0 && asked * 10 < before) {
            good = false;
            say(words + ": if it has not failed, it has answers from elsewhere, which may be "
                        "placeholders (does it keep answers outside its folder?)");
        } else if (asked * 2 < before) {
            print(words + ": if it keeps answers outside its folder, its results may have "
                          "placeholders in them");
        }
        return good;
    }

    // 0: what could be learned is known. Else the exit code.
    asio::awaitable<int> rehearse(GatewayOptions front) {
        front.on_answer = {};
        Onlooker onlooker(runtime_->server(), rehearsal_);
        front.server = &onlooker;
        begun_ = std::time(nullptr) - 600; // a file server's clock may be late
        for (unsigned round = 0; round < command_.rehearsals; ++round) {
            const auto begin = Clock::now();
            rehearsal_.begin();
            ThrowAway copy;
            std::error_code ec;
            const auto folder = std::filesystem::current_path(ec);
            const char* spelled = std::getenv("PWD");
            if (const auto error = copy.make(folder, spelled ? spelled : ""); !error.empty()) {
                say(error);
                co_return exit_usage;
            }
            // Where the system does not keep it from writing elsewhere, at least its folder tells.
            Snapshot before;
            if (!can_confine()) before = look_at(folder);
            const auto refused = why_no_own_memory(copy.root().string());
            if (!refused.empty() && round == 0)
                print(fmt::format("a rehearsed command gets no /dev/shm of its own here ({}){}",
                                  refused, can_confine() ? ", and cannot write there" : ""));
            int code = 0;
            std::size_t asked = 0;
            {
                Stage stage(io_.get_executor(), rehearsal_, [this] { child_.stop(); });
                Gateway gateway(io_.get_executor(), stage, front);
                if (const auto failure = gateway.open()) {
                    say(failure.detail);
                    co_return exit_usage;
                }
                const auto errors = (copy.root() / "stderr").string();
                const auto error = start_rehearsal(gateway, front, copy, errors, refused.empty());
                if (!error.empty()) {
                    say(fmt::format("cannot start '{}': {}", program_, error));
                    co_return exit_usage;
                }
                rehearsing_ = &stage;
                if (round == 0) listen_for_silence();
                code = co_await child_.wait();
                rehearsing_ = nullptr;
                changed_.cancel();
                co_await gateway.async_close(token);
                asked = stage.asked;
                if (asked == 0 && !interrupted_) tell_why(code, errors);
            }
            if (interrupted_) co_return interrupted();
            if (!can_confine()) {
                auto own = own_files();
                own.push_back(copy.root().string());
                auto files = others(changed(before, look_at(folder)), own);
                if (files.empty()) files = find_traces(own); // elsewhere
                if (!files.empty()) {
                    say(fmt::format("the command cannot be rehearsed: although it ran in a copy of "
                                    "its folder, {} has changed. Restore it, and leave --rehearse "
                                    "out",
                                    listed(files)));
                    co_return exit_usage;
                }
            }
            const bool stuck = rehearsal_.stuck();
            const auto wanted = rehearsal_.take_wanted();
            if (asked > 0)
                print(fmt::format("rehearsed in {:.1f} s{}: {} requests, {} of them to be asked",
                                  std::chrono::duration<double>(Clock::now() - begin).count(),
                                  stuck       ? " (until it asked nothing new)"
                                  : code != 0 ? fmt::format(" (exit code {})", code)
                                              : "",
                                  asked, wanted.size()));
            if (wanted.empty()) break;
            co_await learn(wanted);
            if (interrupted_) co_return interrupted();
        }
        co_return exit_answered;
    }

    void listen_for_silence() {
        changed_.expires_at(rehearsing_->silence.due());
        changed_.async_wait([this](error_code ec) {
            if (ec || !rehearsing_) return;
            if (!rehearsing_->silence.to_be_said(Clock::now())) return listen_for_silence();
            say("the rehearsal still runs and has asked nothing for a minute: if the command waits "
                "for what a placeholder cannot give, end it with Ctrl-C or SIGTERM, and leave "
                "--rehearse out");
        });
    }

    std::string start_rehearsal(const Gateway& gateway, const GatewayOptions& front,
                                const ThrowAway& copy, const std::string& errors, bool own_memory) {
        std::vector<std::string> arguments, environment;
        for (const auto& it : command_.child) arguments.push_back(copy.moved(it));
        for (const auto& it : harness_environment(own_environment(), address_of(gateway, front))) {
            const auto name = it.substr(0, it.find('='));
            if (name != "TMPDIR" && name != "PWD") environment.push_back(copy.moved(it));
        }
        environment.push_back("TMPDIR=" + copy.temporary().string());
        environment.push_back("PWD=" + copy.folder().string());
        environment.push_back("EVALRT_REHEARSAL=1");
        const Confinement place{copy.folder().string(), copy.root().string(), errors, own_memory};
        return child_.start(copy.moved(program_), arguments, environment, &place);
    }

    // Its last words: there was no placeholder that could stand in them.
    void tell_why(int code, const std::string& errors) const {
        std::ifstream file(errors);
        std::string last;
        for (std::string line; std::getline(file, line);)
            if (!line.empty()) last = line;
        say(fmt::format("the rehearsal asked nothing (exit code {}{}{}); this may be because a "
                        "rehearsed command has an empty input and can write to its folder only",
                        code, last.empty() ? "" : ": ", last));
    }

    int interrupted() const {
        say("interrupted in the rehearsal: the command has not run");
        return exit_interrupted;
    }

    std::vector<std::string> own_files() const {
        std::vector<std::string> files;
        std::error_code ignored;
        for (const auto& it : {common_.json, common_.runtime.journal.path})
            if (!it.empty()) files.push_back(std::filesystem::absolute(it, ignored).string());
        return files;
    }

    asio::awaitable<void> learn(const std::vector<Rehearsal::Wanted>& wanted) {
        std::size_t open = wanted.size(), failed = 0;
        learning_ = true;
        for (const auto& it : wanted)
            runtime_->front().async_complete(it.request, {}, [&](error_code, Response response) {
                // A failure is not kept: who asks for real gets its own.
                if (response.outcome)
                    ++failed;
                else
                    answered(response);
                rehearsal_.learn(it, std::move(response));
                if (--open == 0) changed_.cancel();
            });
        auto next_line = Clock::now() + std::chrono::seconds(5);
        while (open > 0) {
            changed_.expires_after(std::chrono::seconds(1));
            co_await changed_.async_wait(token);
            if (open == 0 || Clock::now() < next_line) continue;
            next_line = Clock::now() + std::chrono::seconds(5);
            print(fmt::format("{}/{} answered", wanted.size() - open, wanted.size()));
        }
        learning_ = false;
        if (failed > 0 && !interrupted_)
            print(fmt::format("{} of {} failed: the command will ask for them itself", failed,
                              wanted.size()));
    }

    GatewayAddress address_of(const Gateway& gateway, const GatewayOptions& front) const {
        GatewayAddress address;
        address.url = gateway.url();
        address.host = address.url.substr(7, address.url.rfind(':') - 7);
        address.port = gateway.port();
        address.token = front.token;
        std::error_code ignored;
        if (std::filesystem::is_directory(common_.runtime.model, ignored))
            address.tokenizer = common_.runtime.model;
        return address;
    }

    asio::awaitable<int> serve(const std::string& address) {
        fmt::print("{}\n", address);
        std::fflush(stdout);
        signals_.cancel();
        if (!interrupted_) co_await signals_.async_wait(token);
        co_return unwritable_ ? exit_unwritable : exit_answered;
    }

    asio::awaitable<int> run_child(const Gateway& gateway, const GatewayOptions& front) {
        const auto address = address_of(gateway, front);
        print(fmt::format("{}/v1 for {}", address.url, command_.child.front()));
        const auto environment = harness_environment(own_environment(), address);
        if (interrupted_) co_return exit_interrupted;
        if (const auto error = child_.start(program_, command_.child, environment);
            !error.empty()) {
            say(fmt::format("cannot start '{}': {}", program_, error));
            co_return exit_usage;
        }
        signals_.clear(); // which are the child's now
        co_return co_await child_.wait();
    }

    void print(std::string_view line) const {
        if (!common_.quiet) say(line);
    }

    void summarise(double wall) {
        for (const auto& text : complete_report(report_, *runtime_)) print(text);
        print(report_.prefix_cached());
        std::string failures;
        for (const auto& [errc, count] : report_.failures())
            failures += fmt::format("{}{} {}", failures.empty() ? " (" : ", ", count, name(errc));
        print(fmt::format(
            "{} answered{}, {} failed{}{} in {:.1f} s", report_.answered(),
            report_.from_journal() > 0
                ? fmt::format(" ({} of them from the journal)", report_.from_journal())
                : "",
            report_.failed(), failures.empty() ? "" : failures + ")",
            report_.not_run > 0 ? fmt::format(", {} given up by their clients", report_.not_run)
                                : "",
            wall));
        if (common_.json.empty()) return;
        std::ofstream file(common_.json);
        file << report_.json(runtime_->backend().stats(), wall) << '\n';
        if (!file.flush())
            say(fmt::format("the run summary cannot be written to {}", common_.json));
    }

    static constexpr std::uintmax_t most_searched = 1'000'000'000; // takes a second

    const GatewayCommand& command_;
    const Common& common_;
    asio::io_context& io_;
    Child child_;
    std::string program_; // the child's
    asio::signal_set signals_;
    asio::cancellation_signal opening_;
    asio::steady_timer changed_;
    std::unique_ptr<Runtime> runtime_;
    Rehearsal rehearsal_{Rehearsal::new_marker()};
    Stage* rehearsing_ = nullptr;          // while it runs
    std::time_t begun_ = 0;                // the first rehearsal, or a little before
    std::unique_ptr<Rehearsed> rehearsed_; // null: nothing was
    Report report_;
    Clock::time_point started_;
    bool interrupted_ = false;
    bool unwritable_ = false, learning_ = false, leaked_ = false;
};

} // namespace

int run_gateway(const GatewayCommand& command, const Common& common) {
    return run_to_end<Service>(command, common);
}

} // namespace evalrt::program
