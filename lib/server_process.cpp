// Each server has a guardian between us and it: a fork of ours that never execs, is the server's
// parent and holds one end of a socket pair, the link, whose other end only we hold. However we
// end, the link closes, and the guardian kills the server's process group. It is the guardian that
// sends all signals to the group, since it alone knows whether the server's pid is still its own.
#include "evalrt/server_process.hpp"

#include "evalrt/detail/complete.hpp"

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/bind_executor.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/steady_timer.hpp>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <list>
#include <random>
#include <set>
#include <sstream>
#include <stdexcept>
#include <type_traits>

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef __linux__
#include <sys/prctl.h>
#include <sys/syscall.h>
#endif
#ifdef __APPLE__
#include <crt_externs.h>
#else
extern char** environ; // not declared by every libc
#endif

namespace evalrt {
namespace {

using namespace std::chrono_literals;
using asio::ip::tcp;

constexpr std::size_t longest_line = 64 * 1024; // a longer one reaches the log in pieces

// The guardian's part. After a fork from a process with threads only async-signal-safe functions
// may be called, so nothing here allocates.

/// Everything the guardian needs, made before the fork.
struct Plan {
    std::string program;
    std::vector<std::string> args, env;
    std::vector<char*> argv, envp;
    std::vector<std::string> remove_args; // of the program that removes the folder; none: no folder
    std::vector<char*> remove_argv;
    int link, output;
};

/// What the guardian says on the link. We say 't' for SIGTERM and 'k' for SIGKILL.
struct Report {
    enum What : int { started, ended } what;
    pid_t pid;
    int value; // started: errno; ended: status as from waitpid
};

[[noreturn]] void run_server(const Plan& plan, int errors, [[maybe_unused]] pid_t guardian) {
    ::setpgid(0, 0);
#ifdef __linux__
    // For the case that the guardian itself is killed. It does not reach grandchildren.
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != guardian) ::_exit(127);
#endif
    ::close(0);
    if (::open("/dev/null", O_RDONLY) == 0) {
        struct sigaction standard {};
        standard.sa_handler = SIG_DFL;
        for (int signal = 1; signal < NSIG; ++signal) ::sigaction(signal, &standard, nullptr);
        sigset_t none;
        ::sigemptyset(&none);
        ::sigprocmask(SIG_SETMASK, &none, nullptr);
        ::execve(plan.program.c_str(), plan.argv.data(), plan.envp.data());
    }
    const int error = errno;
    [[maybe_unused]] auto written = ::write(errors, &error, sizeof error);
    ::_exit(127);
}

void close_from(int first) {
#ifdef SYS_close_range
    if (::syscall(SYS_close_range, first, ~0U, 0) == 0) return;
#endif
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    const int end = int(std::min<rlim_t>(limit.rlim_cur, 1 << 20));
    for (int fd = first; fd < end; ++fd) ::close(fd);
}

/// Runs with all signals blocked, as they are since before the fork: a Ctrl-C at the terminal is
/// none of its business, and no handler of the host may run in it.
[[noreturn]] void guard(const Plan& plan) {
    const pid_t host = ::getppid();
    ::setsid();
#ifdef __linux__
    ::prctl(PR_SET_NAME, "evalrt-guard"); // a killall of the host's name does not hit it
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);   // reaps grandchildren where the init process does not
#endif
    const int link = plan.link < 3 ? ::fcntl(plan.link, F_DUPFD, 3) : plan.link;
    const int output = plan.output < 3 ? ::fcntl(plan.output, F_DUPFD, 3) : plan.output;
    ::dup2(link, 0);
    ::dup2(output, 1);
    ::dup2(output, 2);
    close_from(3);
    // Only to interrupt pselect; and if the host ignores SIGCHLD, waitpid would find nothing.
    struct sigaction wake {};
    wake.sa_handler = [](int) {};
    ::sigaction(SIGCHLD, &wake, nullptr);
    sigset_t all_but_child;
    ::sigfillset(&all_but_child);
    ::sigdelset(&all_but_child, SIGCHLD);

    Report report{Report::started, -1, 0};
    int errors[2];
    if (::pipe(errors) == 0 && ::fcntl(errors[1], F_SETFD, FD_CLOEXEC) == 0) {
        const pid_t self = ::getpid();
        report.pid = ::fork();
        if (report.pid == 0) {
            ::close(errors[0]);
            run_server(plan, errors[1], self);
        }
    }
    if (report.pid < 0) report.value = errno;
    const pid_t server = report.pid;
    ::close(1);
    ::close(2);
    if (server > 0) {
        ::setpgid(server, server); // here too: the group must exist before a signal to it
        ::close(errors[1]);
        // Nothing comes if exec works. While it blocks (on a network disk) no signal would help.
        if (::read(errors[0], &report.value, sizeof report.value) < 0) report.value = errno;
        ::close(errors[0]);
    }
    // SIGPIPE is blocked; if nobody listens any more there is nobody to tell.
    [[maybe_unused]] auto written = ::write(0, &report, sizeof report);
    if (server < 0) ::_exit(1);

    bool ended = false, terminating = false, killing = false, told = false;
    for (int patience = 1000;;) {
        int status = 0;
        for (pid_t pid; (pid = ::waitpid(-1, &status, WNOHANG)) > 0;)
            if (pid == server) {
                ended = true;
                report = {Report::ended, server, status};
            }
        // The group goes with its leader, unless it was told to end and has time left to do so.
        if (ended && !terminating) killing = true;
        if (killing) ::kill(-server, SIGKILL);
        // A zombie whose parent has left the group and never reaps must not keep us for ever.
        if (ended && (::kill(-server, 0) != 0 || (killing && --patience == 0))) break;

        fd_set readable;
        FD_ZERO(&readable);
        if (!killing) FD_SET(0, &readable);
        const timespec pause = ended || killing ? timespec{0, 10'000'000} : timespec{1, 0};
        if (::pselect(1, &readable, nullptr, nullptr, &pause, &all_but_child) > 0) {
            char order = 0;
            if (::read(0, &order, 1) != 1) killing = true;
            if (order == 'k') killing = told = true;
            if (order == 't') {
                terminating = true;
                ::kill(-server, SIGTERM);
            }
        }
        // A child of the host that it has forked without exec may hold its end of the link open.
        if (::getppid() != host) killing = true;
    }
    written = ::write(0, &report, sizeof report);
    for (char order; ::recv(0, &order, 1, MSG_DONTWAIT) == 1;) told = told || order == 'k';
    // A host that was killed has left it behind: it closed the link without a word, and may not yet
    // have been replaced as our parent.
    if (!plan.remove_args.empty() && ((written < 0 && !told) || ::getppid() != host))
        ::execve("/bin/rm", plan.remove_argv.data(), plan.envp.data());
    ::_exit(0);
}

// Our part.

struct Fd {
    int value = -1;
    ~Fd() {
        if (value >= 0) ::close(value);
    }
};

/// Two connected ends that no other program inherits. Sockets where we write: writing to a pipe
/// without a reader raises SIGPIPE.
int make_pair(bool sockets, Fd (&ends)[2]) {
    int fds[2];
#ifdef __linux__
    const int result = sockets ? ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds)
                               : ::pipe2(fds, O_CLOEXEC);
#else
    const int result = sockets ? ::socketpair(AF_UNIX, SOCK_STREAM, 0, fds) : ::pipe(fds);
    for (int i = 0; i < 2 && result == 0; ++i) ::fcntl(fds[i], F_SETFD, FD_CLOEXEC);
#endif
    if (result != 0) return errno;
#ifdef SO_NOSIGPIPE
    const int on = 1;
    if (sockets) ::setsockopt(fds[0], SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof on);
#endif
    ends[0].value = fds[0];
    ends[1].value = fds[1];
    return 0;
}

char** environment() {
#ifdef __APPLE__
    return *::_NSGetEnviron(); // a shared library has no environ there
#else
    return environ;
#endif
}

std::string with_port(std::string text, std::uint16_t port) {
    constexpr std::string_view mark = "{port}";
    for (std::size_t at = 0; (at = text.find(mark, at)) != text.npos;)
        text.replace(at, mark.size(), std::to_string(port));
    return text;
}

std::vector<std::string> make_env(const ServerCommand& command, std::uint16_t port) {
    std::vector<std::string> env;
    for (char** entry = environment(); entry && *entry; ++entry) env.emplace_back(*entry);
    for (const auto& [key, value] : command.env) {
        const auto start = key + "=";
        std::erase_if(env, [&](const auto& entry) { return entry.starts_with(start); });
        env.push_back(start + with_port(value, port));
    }
    return env;
}

/// Empty: there is no such program.
std::string find_program(const std::string& name, const std::vector<std::string>& env) {
    if (name.find('/') != name.npos) return name;
    std::string path = "/usr/bin:/bin";
    for (const auto& entry : env)
        if (entry.starts_with("PATH=")) path = entry.substr(5);
    for (std::size_t begin = 0; begin <= path.size();) {
        const auto end = std::min(path.find(':', begin), path.size());
        const auto folder = end == begin ? "." : path.substr(begin, end - begin);
        const auto file = folder + "/" + name;
        std::error_code ignored;
        if (::access(file.c_str(), X_OK) == 0 && !std::filesystem::is_directory(file, ignored))
            return file;
        begin = end + 1;
    }
    return {};
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
    std::vector<char*> result;
    for (auto& string : strings) result.push_back(string.data());
    result.push_back(nullptr);
    return result;
}

std::string how_it_ended(int status) {
    if (WIFSIGNALED(status)) return "killed by signal " + std::to_string(WTERMSIG(status));
    return "exit status " + std::to_string(WEXITSTATUS(status));
}

/// With `reuse` it fails if somebody listens, but does not mind connections in TIME_WAIT.
error_code try_to_bind(const asio::any_io_executor& executor, tcp::endpoint& place, bool reuse) {
    tcp::acceptor socket(executor);
    error_code error;
    socket.open(place.protocol(), error);
    if (!error) socket.set_option(tcp::acceptor::reuse_address(reuse), error);
    if (!error) socket.bind(place, error);
    if (!error) place = socket.local_endpoint(error);
    return error;
}

/// Not one of those that the system gives to who wants any: until the server has loaded it is
/// nobody's, and whoever was given it meanwhile would get our questions.
error_code find_free_port(const asio::any_io_executor& executor, tcp::endpoint& place) {
    std::minstd_rand random(unsigned(Clock::now().time_since_epoch().count()) ^
                            unsigned(::getpid()));
    std::uniform_int_distribution<unsigned short> port(20000, 31999);
    for (int tries = 0; tries < 100; ++tries) {
        place.port(port(random));
        if (!try_to_bind(executor, place, false)) return {};
    }
    place.port(0);
    return try_to_bind(executor, place, false);
}

bool port_in_use(const asio::any_io_executor& executor, std::uint16_t port) {
    std::vector<tcp::endpoint> places{{asio::ip::address_v4::loopback(), port}};
#ifndef __linux__ // elsewhere a wildcard listener does not keep others from a specific address
    places.emplace_back(tcp::v4(), port);
    places.emplace_back(tcp::v6(), port);
#endif
    return std::any_of(places.begin(), places.end(), [&](auto& place) {
        return try_to_bind(executor, place, true) == asio::error::address_in_use;
    });
}

enum class Listener { ours, stranger, nobody, unknown };

#ifdef __linux__

/// Inodes of the listening sockets that a connection to 127.0.0.1:port can reach: those bound to
/// exactly this address if there are any, else the wildcards, else any on the port.
std::set<std::string> listening_inodes(std::uint16_t port) {
    char loopback[9], port_text[6];
    std::snprintf(loopback, sizeof loopback, "%08X", htonl(INADDR_LOOPBACK));
    std::snprintf(port_text, sizeof port_text, ":%04X", unsigned(port));
    std::set<std::string> found[3];
    for (const char* file : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
        std::ifstream table(file);
        for (std::string line; std::getline(table, line);) {
            std::istringstream fields(line);
            std::vector<std::string> field(std::istream_iterator<std::string>(fields), {});
            // sl local remote state tx:rx tr:when retransmit uid timeout inode
            if (field.size() < 10 || field[3] != "0A" || !field[1].ends_with(port_text)) continue;
            const auto address = field[1].substr(0, field[1].size() - 5);
            const bool any = address.find_first_not_of('0') == address.npos;
            found[address.ends_with(loopback) ? 0 : any ? 1 : 2].insert(field[9]);
        }
    }
    for (auto& inodes : found)
        if (!inodes.empty()) return inodes;
    return {};
}

Listener find_listener(std::uint16_t port, pid_t group) {
    namespace fs = std::filesystem;
    if (::access("/proc/self/net/tcp", R_OK) != 0) return Listener::unknown;
    const auto inodes = listening_inodes(port);
    if (inodes.empty()) return Listener::nobody;
    bool all_seen = true;
    std::error_code error;
    for (fs::directory_iterator process("/proc", error), end; process != end;
         process.increment(error)) {
        if (error ||
            !std::isdigit(static_cast<unsigned char>(process->path().filename().c_str()[0])))
            continue;
        std::ifstream file(process->path() / "stat");
        std::string stat;
        std::getline(file, stat, '\0');
        const auto name_end = stat.rfind(')'); // a name may hold anything
        if (name_end == stat.npos) continue;
        std::istringstream rest(stat.substr(name_end + 1));
        std::string state;
        pid_t parent = 0, its_group = 0;
        if (!(rest >> state >> parent >> its_group) || its_group != group) continue;
        std::error_code fd_error;
        for (fs::directory_iterator fd(process->path() / "fd", fd_error), fd_end; fd != fd_end;
             fd.increment(fd_error)) {
            std::error_code ignored;
            const auto target = fs::read_symlink(fd->path(), ignored).string();
            if (target.starts_with("socket:[") && inodes.count(target.substr(8, target.size() - 9)))
                return Listener::ours;
        }
        if (fd_error == std::errc::permission_denied) all_seen = false;
    }
    return all_seen ? Listener::stranger : Listener::unknown;
}

#else

// Nobody listened there before the server was started, and it is alive: that has to do.
Listener find_listener(std::uint16_t, pid_t) { return Listener::unknown; }

#endif

} // namespace

struct ServerProcess::Impl : std::enable_shared_from_this<Impl> {
    struct Ready;
    using StopHandler = asio::any_completion_handler<void(error_code)>;

    Impl(asio::any_io_executor ex, ServerCommand what, LogSink sink)
        : executor(std::move(ex)), command(std::move(what)), log(std::move(sink)) {}

    asio::any_io_executor executor;
    ServerCommand command;
    LogSink log;
    asio::local::stream_protocol::socket link{executor};
    asio::posix::stream_descriptor output{executor};
    asio::steady_timer grace{executor};
    std::uint16_t port = command.port;
    enum class State { idle, starting, running, ended } state = State::idle;
    pid_t guardian = 0, pid = 0;
    Report report{};
    std::string tail, line; // of the output: its end; a line that is not yet whole
    std::string how = "not started";
    bool terminating = false, abandoned = false;

    Handler starting;
    Failure not_started; // why starting has to fail, known before the guardian has ended
    std::list<Handler> exits;
    std::list<StopHandler> stops;
    std::vector<std::weak_ptr<Ready>> readies;

    template <class... Results>
    void complete(asio::any_completion_handler<void(error_code, Results...)> handler,
                  error_code code, std::type_identity_t<Results>... results) {
        detail::complete(executor, std::move(handler), code, std::move(results)...);
    }

    template <class... Results>
    void wait(std::list<asio::any_completion_handler<void(error_code, Results...)>>& list,
              asio::any_completion_handler<void(error_code, Results...)> handler) {
        const auto at = list.insert(list.end(), std::move(handler));
        detail::on_cancel(*at, [weak = weak_from_this(), &list, at] {
            auto self = weak.lock();
            if (!self) return;
            auto cancelled = std::move(*at);
            list.erase(at);
            // Clears the slot and so destroys this lambda: nothing captured is used after it.
            self->complete(std::move(cancelled), asio::error::operation_aborted, Results()...);
        });
    }

    void start(Handler handler) {
        if (state != State::idle)
            return complete(std::move(handler), asio::error::already_started, "already started");
        if (auto failure = launch()) {
            error_code ignored;
            link.close(ignored);
            output.close(ignored);
            return complete(std::move(handler), failure.code, failure.detail);
        }
        state = State::starting;
        how = "its guardian process was killed"; // unless the guardian says something else
        starting.swap(handler); // its move assignment calls itself for ever in Boost 1.81
        detail::on_cancel(starting, [weak = weak_from_this()] {
            auto self = weak.lock();
            if (!self) return;
            self->not_started.code = asio::error::operation_aborted;
            self->order('k');
        });
        watch_link();
        watch_output();
    }

    Failure launch() {
        error_code error;
        if (command.port != 0) {
            if (port_in_use(executor, port)) return {Errc::unreachable, port_taken()};
        } else {
            tcp::endpoint place(asio::ip::address_v4::loopback(), 0);
            error = find_free_port(executor, place);
            if (error) return {Errc::unreachable, "no port is free: " + error.message()};
            port = place.port();
        }

        Plan plan{};
        plan.env = make_env(command, port);
        for (const auto& argument : command.argv) plan.args.push_back(with_port(argument, port));
        plan.program = find_program(plan.args[0], plan.env);
        if (plan.program.empty()) return cannot_start(ENOENT);
        plan.argv = pointers(plan.args);
        plan.envp = pointers(plan.env);
        if (!command.folder.empty()) plan.remove_args = {"rm", "-rf", "--", command.folder};
        plan.remove_argv = pointers(plan.remove_args);

        Fd links[2], outputs[2];
        if (int failed = make_pair(true, links)) return cannot_start(failed);
        if (int failed = make_pair(false, outputs)) return cannot_start(failed);
        plan.link = links[1].value;
        plan.output = outputs[1].value;
        link.assign(asio::local::stream_protocol(), links[0].value, error);
        if (error) return cannot_start(error.value());
        links[0].value = -1;
        output.assign(outputs[0].value, error);
        if (error) return cannot_start(error.value());
        outputs[0].value = -1;
        output.native_non_blocking(true, error);

        sigset_t all, before;
        ::sigfillset(&all);
        ::pthread_sigmask(SIG_SETMASK, &all, &before);
        guardian = ::fork();
        if (guardian == 0) guard(plan);
        const int failed = errno;
        ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
        if (guardian > 0) return {};
        guardian = 0;
        return cannot_start(failed);
    }

    void order(char signal) {
        error_code ignored; // a guardian that is gone has already done it
        link.send(asio::buffer(&signal, 1), 0, ignored);
    }

    void watch_link() {
        asio::async_read(link, asio::buffer(&report, sizeof report),
                         [self = shared_from_this()](error_code error, std::size_t) {
                             if (self->abandoned) return;
                             if (error) return self->reap();
                             self->take(self->report);
                             self->watch_link();
                         });
    }

    void take(const Report& news) {
        if (news.what == Report::ended) {
            how = how_it_ended(news.value);
            return;
        }
        if (news.value == 0) pid = news.pid;
        if (news.value != 0 && !not_started) not_started = cannot_start(news.value);
        if (not_started) return; // completes when the guardian has ended
        state = State::running;
        complete(std::move(starting), {}, {});
    }

    /// The link is closed, so the guardian is about to be a zombie; on a busy machine not at once.
    void reap() {
        int status = 0;
        const pid_t ended = ::waitpid(guardian, &status, WNOHANG);
        if (ended != 0) return end(status, {});
        grace.expires_after(1ms);
        grace.async_wait([self = shared_from_this()](error_code) {
            if (!self->abandoned) self->reap();
        });
    }

    void end(int guardian_status, error_code code) {
        if (WIFSIGNALED(guardian_status) && pid > 0) ::kill(-pid, SIGKILL);
        guardian = 0;
        error_code ignored;
        link.close(ignored);
        drain(1024); // its last words
        if (!line.empty()) end_line();
        output.close(ignored);
        grace.cancel();
        state = State::ended;

        if (starting) {
            if (!not_started) not_started = {code ? code : Errc::exited, "the server " + how};
            complete(std::move(starting), not_started.code, not_started.detail);
            how = "not started";
        }
        for (auto& handler : std::exchange(exits, {})) complete(std::move(handler), code, how);
        for (auto& handler : std::exchange(stops, {})) complete(std::move(handler), code);
        end_readies(code);
    }

    void end_readies(error_code code);

    void watch_output() {
        output.async_wait(asio::posix::descriptor_base::wait_read,
                          [self = shared_from_this()](error_code error) {
                              if (error) return;
                              self->drain(16);
                              if (self->output.is_open()) self->watch_output();
                          });
    }

    /// In rounds: a server that writes without end must not keep the executor for itself.
    void drain(int rounds) {
        char buffer[16384];
        while (output.is_open() && rounds-- > 0) {
            const auto size = ::read(output.native_handle(), buffer, sizeof buffer);
            error_code ignored;
            if (size > 0)
                take({buffer, std::size_t(size)});
            else if (size == 0)
                output.close(ignored);
            else if (errno != EINTR)
                return;
        }
    }

    void take(std::string_view text) {
        tail += text;
        if (tail.size() > 2 * command.keep_output) tail.erase(0, tail.size() - command.keep_output);
        if (!log) return;
        for (std::size_t end; (end = text.find('\n')) != text.npos; text.remove_prefix(end + 1)) {
            line += text.substr(0, end);
            end_line();
        }
        line += text;
        if (line.size() > longest_line) end_line();
    }

    void end_line() {
        if (line.ends_with('\r')) line.pop_back();
        if (!abandoned) log(line);
        line.clear();
    }

    std::string last_output() const {
        return tail.substr(tail.size() - std::min(tail.size(), command.keep_output));
    }

    std::string last_lines() const {
        std::string_view text = tail;
        while (text.ends_with('\n')) text.remove_suffix(1);
        std::size_t begin = text.size();
        for (int lines = 0; begin > 0 && text.size() - begin < 2000; --begin)
            if (text[begin - 1] == '\n' && ++lines == 10) break;
        if (text.empty()) return "; it wrote nothing";
        return "; its last output:\n" + std::string(text.substr(begin));
    }

    std::string port_taken() const {
        return "port " + std::to_string(port) + " is in use by another program: " +
               (command.port ? "stop it or choose another with --port" : "start again");
    }

    Failure cannot_start(int error) const {
        const auto& program = command.argv[0];
        const bool on_path = error == ENOENT && program.find('/') == program.npos;
        auto text = "cannot start '" + program + "': ";
        text += on_path ? "not found on PATH"
                        : error_code(error, boost::system::system_category()).message();
        if (error == ENOENT || error == EACCES) text += "; install it or give --executable";
        return {Errc::exited, std::move(text)};
    }
};

/// One async_wait_ready.
struct ServerProcess::Impl::Ready : std::enable_shared_from_this<Ready> {
    Ready(std::shared_ptr<Impl> r, Backend& p, Request q, Handler h)
        : run(std::move(r)), probe(p), request(std::move(q)), handler(std::move(h)) {}

    std::shared_ptr<Impl> run;
    Backend& probe;
    Request request;
    Handler handler;
    asio::steady_timer limit{run->executor}, pause{run->executor};
    asio::cancellation_signal stop_probe;
    bool asking = false;
    std::optional<Failure> result;
    std::chrono::milliseconds step = 50ms;
    int refusals = 0; // in a row
    Clock::time_point first_refusal;
    std::string last_answer;

    void begin() {
        detail::on_cancel(handler, [weak = weak_from_this()] {
            if (auto self = weak.lock()) self->finish({asio::error::operation_aborted, {}});
        });
        limit.expires_after(run->command.startup_timeout);
        limit.async_wait([self = shared_from_this()](error_code error) {
            if (!error) self->finish({Errc::timed_out, self->too_late()});
        });
        ask();
    }

    void ask() {
        asking = true;
        auto answered = [self = shared_from_this()](error_code code, const Response& response) {
            self->asking = false;
            self->take(code, response);
        };
        probe.async_complete(
            request, {},
            asio::bind_cancellation_slot(stop_probe.slot(),
                                         asio::bind_executor(run->executor, std::move(answered))));
    }

    void take(error_code code, const Response& response) {
        if (result) return settle();
        if (!code) return finish(proven({}));
        last_answer = response.detail.empty() ? code.message() : response.detail;
        if (code == Errc::auth) return finish(proven({code, last_answer}));
        // A wrong model name stays wrong, but right after the start any answer may be a passing
        // one. 408, 409, 425 and 429 ask to come again (oMLX says 409 while it loads).
        const int status = response.status;
        if (code == Errc::rejected && status / 100 == 4 && status != 408 && status != 409 &&
            status != 425 && status != 429) {
            if (refusals++ == 0) first_refusal = Clock::now();
            if (refusals >= 3 && Clock::now() - first_refusal >= 1s)
                return finish(proven({code, last_answer}));
        } else {
            refusals = 0;
        }
        pause.expires_after(step);
        step = std::min(2 * step, 500ms);
        pause.async_wait([self = shared_from_this()](error_code) {
            if (!self->result) self->ask();
        });
    }

    /// The verdict if the answer came from our server: another one on the port answers as well.
    Failure proven(Failure verdict) const {
        const auto place = "port " + std::to_string(run->port);
        switch (find_listener(run->port, run->pid)) {
        case Listener::stranger:
            return {Errc::unreachable, place + " is answered by another program, not by the server "
                                               "that was started: stop it or choose another with "
                                               "--port"};
        case Listener::nobody:
            return {Errc::unreachable, "the answer did not come from " + place +
                                           ": nobody listens there; let the server listen on it"};
        case Listener::ours:
        case Listener::unknown: break;
        }
        return verdict;
    }

    /// Completes when the probe has returned, since the caller may then destroy it.
    void finish(Failure failure) {
        if (result) return;
        result = std::move(failure);
        limit.cancel();
        pause.cancel();
        if (!asking) return settle();
        stop_probe.emit(asio::cancellation_type::all);
    }

    void settle() { run->complete(std::move(handler), result->code, result->detail); }

    std::string too_late() const {
        auto text = "the server was not ready within " +
                    std::to_string(run->command.startup_timeout.count()) + " ms";
        if (!last_answer.empty()) text += "; the last answer: " + last_answer;
        return text + run->last_lines();
    }
};

void ServerProcess::Impl::end_readies(error_code code) {
    if (readies.empty()) return;
    auto text = "the server ended before it was ready: " + how;
    auto words = last_output();
    std::transform(words.begin(), words.end(), words.begin(),
                   [](unsigned char c) { return char(std::tolower(c)); });
    const bool taken = port_in_use(executor, port) ||
                       words.find("address already in use") != words.npos ||
                       words.find("eaddrinuse") != words.npos;
    if (taken) text += "; " + port_taken();
    text += last_lines();
    if (!code) code = taken ? Errc::unreachable : Errc::exited;
    for (auto& weak : std::exchange(readies, {}))
        if (auto ready = weak.lock()) ready->finish({code, text});
}

ServerProcess::ServerProcess(asio::any_io_executor executor, ServerCommand command, LogSink log) {
    if (command.argv.empty()) throw std::invalid_argument("evalrt: a server needs a command");
    impl_ = std::make_shared<Impl>(std::move(executor), std::move(command), std::move(log));
}

ServerProcess::~ServerProcess() {
    impl_->abandoned = true;
    if (impl_->guardian == 0) return;
    impl_->order('k'); // not closed without a word: the folder is still ours
    error_code ignored;
    impl_->link.close(ignored);
    int status = 0;
    while (::waitpid(impl_->guardian, &status, 0) < 0 && errno == EINTR) {}
    impl_->end(status, asio::error::operation_aborted);
}

void ServerProcess::start(Handler handler) {
    if (impl_->state == Impl::State::ended)
        impl_ = std::make_shared<Impl>(impl_->executor, impl_->command, impl_->log);
    impl_->start(std::move(handler));
}

void ServerProcess::wait_ready(Backend& probe, Request one_token, Handler handler) {
    if (impl_->guardian == 0)
        return impl_->complete(std::move(handler), Errc::exited,
                               "the server does not run: " + impl_->how + impl_->last_lines());
    auto ready =
        std::make_shared<Impl::Ready>(impl_, probe, std::move(one_token), std::move(handler));
    impl_->readies.push_back(ready);
    ready->begin();
}

void ServerProcess::wait_exit(Handler handler) {
    if (impl_->guardian == 0) return impl_->complete(std::move(handler), {}, impl_->how);
    impl_->wait(impl_->exits, std::move(handler));
}

void ServerProcess::stop(Impl::StopHandler handler) {
    if (impl_->guardian == 0) return impl_->complete(std::move(handler), {});
    if (!std::exchange(impl_->terminating, true)) {
        impl_->order('t');
        impl_->grace.expires_after(impl_->command.stop_grace);
        impl_->grace.async_wait([impl = impl_](error_code error) {
            if (!error) impl->order('k');
        });
    }
    impl_->wait(impl_->stops, std::move(handler));
}

bool ServerProcess::running() const { return impl_->state == Impl::State::running; }
std::uint16_t ServerProcess::port() const { return impl_->port; }
int ServerProcess::pid() const { return impl_->pid; }
std::string ServerProcess::last_output() const { return impl_->last_output(); }

} // namespace evalrt
