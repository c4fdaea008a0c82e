#include "child.hpp"

#include "confinement.hpp"
#include "suite.hpp"

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef __linux__
#include <sys/prctl.h>
#endif
#ifdef __APPLE__
#include <crt_externs.h>
#else
extern char** environ; // not declared by every libc
#endif

namespace evalrt::program {
namespace {

int most_descriptors() {
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    return int(std::min<rlim_t>(limit.rlim_cur, 1 << 16));
}

std::vector<char*> pointers(const std::vector<std::string>& strings) {
    std::vector<char*> result;
    for (const auto& it : strings) result.push_back(const_cast<char*>(it.c_str()));
    result.push_back(nullptr);
    return result;
}

// A Ctrl-C at the terminal reaches the child without us: it is in the same group.
bool in_foreground() {
    const int terminal = ::open("/dev/tty", O_RDONLY | O_NOCTTY | O_CLOEXEC);
    if (terminal < 0) return false;
    const bool ours = ::tcgetpgrp(terminal) == ::getpgrp();
    ::close(terminal);
    return ours;
}

std::string with_exception(const std::string& list, const std::string& host) {
    if (list == "*" || list.find(host) != list.npos) return list;
    return (list.empty() ? "" : list + ",") + host + ",localhost";
}

std::string word(int error) { return std::strerror(error); }

} // namespace

std::vector<int> stop_signals() {
    std::vector<int> all{SIGINT, SIGQUIT, SIGTERM};
    struct sigaction hangup {};
    ::sigaction(SIGHUP, nullptr, &hangup);
    if (hangup.sa_handler != SIG_IGN) all.push_back(SIGHUP);
    return all;
}

std::vector<std::string> own_environment() {
#ifdef __APPLE__
    char** entry = *::_NSGetEnviron();
#else
    char** entry = environ;
#endif
    std::vector<std::string> all;
    for (; entry && *entry; ++entry) all.emplace_back(*entry);
    return all;
}

std::vector<std::string> harness_environment(std::vector<std::string> environment,
                                             const GatewayAddress& address) {
    const auto find = [&](const std::string& key) {
        return std::find_if(environment.begin(), environment.end(),
                            [&](const auto& it) { return it.starts_with(key + "="); });
    };
    const auto given = [&](const std::string& key) {
        const auto it = find(key);
        return it == environment.end() ? std::string() : it->substr(key.size() + 1);
    };
    const auto set = [&](const std::string& key, const std::string& value) {
        if (const auto it = find(key); it != environment.end())
            *it = key + "=" + value;
        else
            environment.push_back(key + "=" + value);
    };
    const auto v1 = address.url + "/v1";
    for (const auto key : {"OPENAI_BASE_URL", "OPENAI_API_BASE", "REMOTE_OPENAI_BASE_URL"})
        set(key, v1);
    set("ANTHROPIC_BASE_URL", address.url); // its clients add /v1 themselves
    // bfcl_eval, for the models that it takes for local ones.
    set("LOCAL_SERVER_ENDPOINT", address.host);
    set("LOCAL_SERVER_PORT", std::to_string(address.port));
    if (!address.tokenizer.empty() && given("REMOTE_OPENAI_TOKENIZER_PATH").empty())
        set("REMOTE_OPENAI_TOKENIZER_PATH", address.tokenizer);
    for (const auto key : {"OPENAI_API_KEY", "ANTHROPIC_API_KEY", "REMOTE_OPENAI_API_KEY"})
        if (!address.token.empty() || given(key).empty())
            set(key, address.token.empty() ? "evalrt" : address.token);
    // A proxy for the world outside must not get what is for this machine.
    const std::string lower = given("no_proxy"), upper = given("NO_PROXY");
    for (const auto key : {"http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"}) {
        if (given(key).empty()) continue;
        set("no_proxy", with_exception(lower.empty() ? upper : lower, address.host));
        set("NO_PROXY", with_exception(upper.empty() ? lower : upper, address.host));
    }
    return environment;
}

Child::Child(const boost::asio::any_io_executor& executor) : signals_(executor) {
    const int end = most_descriptors();
    for (int fd = 0; fd < end; ++fd) inherited_.push_back(::fcntl(fd, F_GETFD) != -1);
}

std::string Child::find(const std::string& name) {
    const auto usable = [](const std::string& file) {
        std::error_code ignored;
        return ::access(file.c_str(), X_OK) == 0 && !std::filesystem::is_directory(file, ignored);
    };
    if (name.find('/') != name.npos) return usable(name) ? name : "";
    const char* set = std::getenv("PATH");
    const std::string path = set ? set : "/usr/bin:/bin";
    for (std::size_t begin = 0; begin <= path.size();) {
        const auto end = std::min(path.find(':', begin), path.size());
        const auto file = (end == begin ? "." : path.substr(begin, end - begin)) + "/" + name;
        if (usable(file)) return file;
        begin = end + 1;
    }
    return {};
}

std::string Child::start(const std::string& program, const std::vector<std::string>& arguments,
                         const std::vector<std::string>& environment, const Confinement* place) {
    confined_ = place != nullptr;
    leads_ = confined_ || !(in_foreground() || ::isatty(0));
    signals_.add(SIGCHLD);
    if (!confined_)
        for (const int number : stop_signals()) signals_.add(number);
    const auto argv = pointers(arguments), envp = pointers(environment);
    const int end = most_descriptors();
    std::optional<Walls> walls;
    if (place) walls.emplace(*place);
    if (walls && !walls->error().empty()) return walls->error();
    int errors[2];
    if (::pipe(errors) != 0) return "cannot make a pipe: " + word(errno);
    ::fcntl(errors[1], F_SETFD, FD_CLOEXEC);
    // No handler of ours may run in the child.
    sigset_t all, before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    [[maybe_unused]] const pid_t parent = ::getpid();
    pid_ = ::fork();
    if (pid_ == 0) {
        // Only what a signal handler may do: there may be other threads.
#ifdef __linux__
        ::prctl(PR_SET_PDEATHSIG, SIGTERM);
        if (::getppid() != parent) ::_exit(127);
#endif
        const auto give_up = [&] {
            const int error = errno;
            [[maybe_unused]] const auto written = ::write(errors[1], &error, sizeof error);
            ::_exit(127);
        };
        if (leads_ && !place) ::setpgid(0, 0);
        if (walls && !walls->enter()) give_up();
        // What a rehearsal would read from or write to an open file is lost to the real run.
        for (int fd = 3; fd < end; ++fd)
            if (fd != errors[1] &&
                (walls || std::size_t(fd) >= inherited_.size() || !inherited_[std::size_t(fd)]))
                ::close(fd);
        if (walls && Walls::mind(errors[1]) != 0) give_up();
        struct sigaction standard {};
        standard.sa_handler = SIG_DFL;
        for (const int number : {SIGINT, SIGQUIT, SIGTERM, SIGCHLD, SIGPIPE})
            ::sigaction(number, &standard, nullptr);
        ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
        ::execve(program.c_str(), argv.data(), envp.data());
        give_up();
    }
    int error = pid_ < 0 ? errno : 0;
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    ::close(errors[1]);
    // Nothing comes if it has started.
    if (pid_ > 0)
        while (::read(errors[0], &error, sizeof error) < 0 && errno == EINTR) {}
    ::close(errors[0]);
    if (error == 0) return {};
    if (pid_ > 0) ::waitpid(pid_, nullptr, 0);
    return word(error);
}

boost::asio::awaitable<int> Child::wait() {
    constexpr auto token = boost::asio::as_tuple(boost::asio::use_awaitable);
    int status = 0;
    while (::waitpid(pid_, &status, WNOHANG) != pid_) {
        auto [ec, number] = co_await signals_.async_wait(token);
        if (ec || number == SIGCHLD) continue;
        pass_on(number);
    }
    const pid_t group = -std::exchange(pid_, -1);
    if (leads_ && !confined_ && ::kill(group, SIGTERM) == 0) {
        boost::asio::steady_timer pause(signals_.get_executor());
        for (int i = 0; i < 40 && ::kill(group, 0) == 0; ++i) {
            pause.expires_after(std::chrono::milliseconds(50));
            co_await pause.async_wait(token);
        }
    }
    if (leads_) ::kill(group, SIGKILL);
    if (confined_) {
        signals_.clear();
    } else { // whoever goes on pressing Ctrl-C does not cut our own end short
        sigset_t late;
        ::sigemptyset(&late);
        for (const int number : {SIGINT, SIGQUIT, SIGTERM, SIGHUP}) ::sigaddset(&late, number);
        ::pthread_sigmask(SIG_BLOCK, &late, nullptr);
    }
    co_return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

void Child::pass_on(int number) {
    const auto now = std::chrono::steady_clock::now();
    if (now - std::exchange(last_signal_, now) > std::chrono::seconds(10)) in_a_row_ = 0;
    if (++in_a_row_ == 1) {
        // Ctrl-C and Ctrl-\ have reached it in our group.
        const bool typed = number == SIGINT || number == SIGQUIT;
        if (leads_ || !typed || !in_foreground()) signal(number);
    } else if (in_a_row_ == 2) {
        say("the command gets SIGTERM; once more, and it is killed");
        signal(SIGTERM);
    } else {
        signal(SIGKILL);
    }
}

void Child::signal(int number) {
    if (pid_ > 0) ::kill(leads_ ? -pid_ : pid_, number);
}

void Child::stop() {
#ifdef __linux__
    if (confined_) return signal(SIGTERM); // to who minds it
#endif
    signal(SIGKILL);
}

} // namespace evalrt::program
