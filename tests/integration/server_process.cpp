#include "evalrt/server_process.hpp"

#include "support/catch.hpp"
#include "support/patience.hpp"
#include "support/scripted_backend.hpp"

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

using namespace evalrt;
using namespace std::chrono_literals;
using asio::ip::tcp;
using tests::patience;
using tests::ScriptedBackend;

namespace {

struct Result {
    int times = 0;
    error_code code;
    std::string text;
};

/// A completion handler that notes what it gets.
auto note(Result& result) {
    return [&result](error_code code, std::string text = {}) {
        ++result.times;
        result.code = code;
        result.text = std::move(text);
    };
}

bool run_until(asio::io_context& io, const std::function<bool()>& done) {
    const auto end = Clock::now() + patience;
    io.restart();
    while (!done() && Clock::now() < end) {
        io.run_one_for(10ms);
        io.restart();
    }
    return done();
}

template <class Operation>
Result wait(asio::io_context& io, Operation&& operation) {
    Result result;
    std::forward<Operation>(operation)(note(result));
    REQUIRE(run_until(io, [&] { return result.times > 0; }));
    return result;
}

/// Runs what is ready, so that a second completion would be seen.
void settle(asio::io_context& io) {
    io.restart();
    io.poll();
}

ServerCommand shell(std::string script) {
    ServerCommand command;
    command.argv = {"sh", "-c", std::move(script)};
    command.stop_grace = 2 * patience; // whoever waits for its end waits in vain
    return command;
}

ServerCommand listening() {
    ServerCommand command;
    command.argv = {"python3", "-c",
                    "import socket, sys, time\n"
                    "s = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n"
                    "time.sleep(1000)",
                    "{port}"};
    return command;
}

struct Process {
    pid_t pid, parent, group;
    char state;
};

/// Zombies too.
std::vector<Process> processes() {
    std::vector<Process> found;
    FILE* ps = ::popen("ps -A -o pid=,ppid=,pgid=,stat=", "r");
    REQUIRE(ps);
    Process process{};
    char state[32];
    while (std::fscanf(ps, "%d %d %d %31s", &process.pid, &process.parent, &process.group, state) ==
           4) {
        process.state = state[0];
        found.push_back(process);
    }
    ::pclose(ps);
    return found;
}

int alive_in_group(pid_t group) {
    const auto all = processes();
    return int(std::count_if(all.begin(), all.end(), [&](const Process& process) {
        return process.group == group && process.state != 'Z';
    }));
}

pid_t parent_of(pid_t pid) {
    for (const auto& process : processes())
        if (process.pid == pid) return process.parent;
    return 0;
}

bool gone(pid_t pid) {
    for (const auto& process : processes())
        if (process.pid == pid && process.state != 'Z') return false;
    return true;
}

bool soon(const std::function<bool()>& done) {
    const auto end = Clock::now() + patience;
    while (!done() && Clock::now() < end) std::this_thread::sleep_for(10ms);
    return done();
}

bool no_children() { return ::waitpid(-1, nullptr, WNOHANG) == -1 && errno == ECHILD; }

/// A probe that succeeds when somebody listens on the port.
struct ConnectProbe {
    ConnectProbe(asio::io_context& io, const ServerProcess& server) : backend(io.get_executor()) {
        backend.on_call = [this, &io, &server](int call) {
            tcp::socket socket(io);
            error_code error;
            socket.connect({asio::ip::address_v4::loopback(), server.port()}, error);
            if (error)
                backend.fail(call, Errc::unreachable);
            else if (outcome)
                end(call);
            else
                backend.end(call);
        };
    }

    void end(int call) {
        Response response;
        response.outcome = outcome;
        response.status = status;
        response.detail = "so says the server";
        backend.end(call, std::move(response));
    }

    ScriptedBackend backend;
    std::optional<Errc> outcome;
    int status = 0;
};

} // namespace

TEST_CASE("a server gets its port, its environment, an empty stdin and clean signals") {
    // The server and its guardian inherit nothing of this.
    sigset_t blocked, before;
    ::sigemptyset(&blocked);
    ::sigaddset(&blocked, SIGUSR1);
    ::pthread_sigmask(SIG_BLOCK, &blocked, &before);
    const auto old_pipe = ::signal(SIGPIPE, SIG_IGN);
    const auto old_child = ::signal(SIGCHLD, SIG_IGN);
    int pipe_ends[2];
    REQUIRE(::pipe(pipe_ends) == 0);

    asio::io_context io;
    auto command = shell("cat; echo $URL {port}; trap 'exit 7' TERM; "
                         "grep -E 'SigBlk|SigIgn' /proc/self/status; ls -m /proc/$$/fd; "
                         "echo ready; while :; do sleep 0.05; done");
    command.env = {{"URL", "http://127.0.0.1:{port}/v1"}};
    std::vector<std::string> lines;
    ServerProcess server(io.get_executor(), command,
                         [&](std::string_view line) { lines.emplace_back(line); });
    CHECK_FALSE(server.running());
    CHECK(server.pid() == 0);
    REQUIRE_FALSE(wait(io, server.async_start()).code);
    CHECK(server.running());
    REQUIRE(server.port() != 0);
    CHECK(parent_of(server.pid()) != ::getpid());
    REQUIRE(run_until(io, [&] { return !lines.empty() && lines.back() == "ready"; }));
    CHECK(server.port() < 32768); // no one that Linux gives away meanwhile
    const auto port = std::to_string(server.port());
    CHECK(lines.front() == "http://127.0.0.1:" + port + "/v1 " + port);
#ifdef __linux__
    REQUIRE(lines.size() == 5);
    CHECK(lines[1] == "SigBlk:\t0000000000000000");
    CHECK(lines[2] == "SigIgn:\t0000000000000000");
    CHECK(lines[3] == "0, 1, 2");
#endif
    ::close(pipe_ends[1]);
    ::fcntl(pipe_ends[0], F_SETFL, O_NONBLOCK);
    char byte;
    CHECK(::read(pipe_ends[0], &byte, 1) == 0); // nobody else holds the other end
    ::close(pipe_ends[0]);

    Result exit;
    server.async_wait_exit()(note(exit));
    CHECK_FALSE(wait(io, server.async_stop()).code);
    CHECK(exit.text == "exit status 7");
    CHECK_FALSE(server.running());

    ::signal(SIGPIPE, old_pipe);
    ::signal(SIGCHLD, old_child);
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    CHECK(no_children());
}

TEST_CASE("the output is drained all the time and reaches the log whole") {
    asio::io_context io;
    auto command = shell("yes 123456789012345678901234567890123456789 | head -c 10000000; "
                         "printf 'not a\\r\\nwhole line' >&2");
    command.keep_output = 1000;
    std::size_t bytes = 0, lines = 0;
    std::string last;
    ServerProcess server(io.get_executor(), command, [&](std::string_view line) {
        ++lines;
        bytes += line.size() + 1;
        last = line;
    });
    REQUIRE_FALSE(wait(io, server.async_start()).code);
    CHECK(wait(io, server.async_wait_exit()).text == "exit status 0");
    CHECK(lines == 250'002);
    CHECK(bytes == 10'000'000 + 6 + 11);
    CHECK(last == "whole line");
    CHECK(server.last_output().size() == 1000);
    CHECK(server.last_output().ends_with("\nnot a\r\nwhole line"));
    CHECK(no_children());
}

TEST_CASE("a line without end reaches the log in pieces") {
    asio::io_context io;
    std::size_t bytes = 0, longest = 0;
    ServerProcess server(io.get_executor(), shell("head -c 1000000 /dev/zero"),
                         [&](std::string_view line) {
                             bytes += line.size();
                             longest = std::max(longest, line.size());
                         });
    REQUIRE_FALSE(wait(io, server.async_start()).code);
    wait(io, server.async_wait_exit());
    CHECK(bytes == 1'000'000);
    CHECK(longest < 100'000);
}

TEST_CASE("the way in which a server ended is told") {
    asio::io_context io;
    const auto [script, how] = GENERATE(table<const char*, const char*>({
        {"exit 0", "exit status 0"},
        {"exit 3", "exit status 3"},
        {"kill -9 $$", "killed by signal 9"},
        {"kill -TERM $$", "killed by signal 15"},
    }));
    ServerProcess server(io.get_executor(), shell(script));
    CHECK(wait(io, server.async_wait_exit()).text == "not started");
    REQUIRE_FALSE(wait(io, server.async_start()).code);
    const auto exit = wait(io, server.async_wait_exit());
    CHECK_FALSE(exit.code);
    CHECK(exit.text == how);
    CHECK(wait(io, server.async_wait_exit()).text == how); // again, after the end
    CHECK(no_children());
}

TEST_CASE("a program that cannot be executed is an error that says what to do") {
    asio::io_context io;
    ServerCommand command;
    SECTION("not on PATH") {
        command.argv = {"no-such-program-anywhere"};
        ServerProcess server(io.get_executor(), command);
        const auto start = wait(io, server.async_start());
        CHECK(start.code == Errc::exited);
        CHECK(start.text == "cannot start 'no-such-program-anywhere': not found on PATH; "
                            "install it or give --executable");
        CHECK_FALSE(server.running());
        CHECK(server.pid() == 0);
        CHECK(wait(io, server.async_wait_exit()).text == "not started");
    }
    SECTION("no such file") {
        command.argv = {"/no/such/program"};
        ServerProcess server(io.get_executor(), command);
        const auto start = wait(io, server.async_start());
        CHECK(start.code == Errc::exited);
        CHECK(start.text == "cannot start '/no/such/program': No such file or directory; "
                            "install it or give --executable");
        CHECK(server.pid() == 0);
        CHECK(wait(io, server.async_wait_exit()).text == "not started");
    }
    SECTION("not a program") {
        command.argv = {"/dev/null"};
        ServerProcess server(io.get_executor(), command);
        CHECK(wait(io, server.async_start()).code == Errc::exited);
        // The object can be used again, with the same result.
        CHECK(wait(io, server.async_start()).text == "cannot start '/dev/null': Permission denied; "
                                                     "install it or give --executable");
        CHECK_FALSE(wait(io, server.async_stop()).code);
    }
    SECTION("nothing") {
        CHECK_THROWS_AS(ServerProcess(io.get_executor(), {}), std::invalid_argument);
    }
    CHECK(no_children());
}

TEST_CASE("PATH of the server's own environment counts") {
    asio::io_context io;
    ServerCommand command;
    command.argv = {"sh", "-c", "exit 0"};
    command.env = {{"PATH", "/nowhere"}};
    ServerProcess server(io.get_executor(), command);
    CHECK(wait(io, server.async_start()).code == Errc::exited);
}

TEST_CASE("a given port that is in use is refused before anything starts") {
    asio::io_context io;
    tcp::acceptor stranger(io, {asio::ip::address_v4::loopback(), 0});
    auto command = shell("exit 0");
    command.port = stranger.local_endpoint().port();
    ServerProcess server(io.get_executor(), command);
    const auto start = wait(io, server.async_start());
    CHECK(start.code == Errc::unreachable);
    CHECK(start.text == "port " + std::to_string(command.port) +
                            " is in use by another program: "
                            "stop it or choose another with --port");
    CHECK(server.pid() == 0);
    stranger.close();
    CHECK_FALSE(wait(io, server.async_start()).code);
    CHECK(server.port() == command.port);
    wait(io, server.async_stop());
}

TEST_CASE("ready is a server that answers and listens on its port") {
    asio::io_context io;
    auto command = listening();
    SECTION("itself") {}
    SECTION("through a shell that waits for it") {
        command.argv = {"sh", "-c", "python3 -c \"$0\" {port}; exit 0", command.argv[2]};
    }
    ServerProcess server(io.get_executor(), command);
    ConnectProbe probe(io, server);
    REQUIRE_FALSE(wait(io, server.async_start()).code);
    const auto ready = wait(io, server.async_wait_ready(probe.backend, {}));
    INFO(ready.text);
    CHECK_FALSE(ready.code);
    CHECK(probe.backend.calls > 1);
    CHECK_FALSE(wait(io, server.async_wait_ready(probe.backend, {})).code);
    CHECK_FALSE(wait(io, server.async_stop()).code);
    CHECK(alive_in_group(server.pid()) == 0);
    const auto ended = wait(io, server.async_wait_ready(probe.backend, {}));
    CHECK(ended.code == Errc::exited);

    // The object starts it again.
    REQUIRE_FALSE(wait(io, server.async_start()).code);
    CHECK_FALSE(wait(io, server.async_wait_ready(probe.backend, {})).code);
}

TEST_CASE("an exit before ready ends the waiting with the last words") {
    asio::io_context io;
    ServerProcess server(io.get_executor(),
                         shell("for i in 1 2 3 4 5 6 7 8 9 10 11 12; do echo line $i; done; "
                               "echo 'model not found' >&2; exit 3"));
    ScriptedBackend probe(io.get_executor());
    probe.on_call = [&](int call) { probe.fail(call, Errc::unreachable); };
    REQUIRE_FALSE(wait(io, server.async_start()).code);
    const auto ready = wait(io, server.async_wait_ready(probe, {}));
    CHECK(ready.code == Errc::exited);
    CHECK(ready.text == "the server ended before it was ready: exit status 3; its last output:\n"
                        "line 4\nline 5\nline 6\nline 7\nline 8\nline 9\nline 10\nline 11\n"
                        "line 12\nmodel not found");
}

TEST_CASE("a server that finds its port taken is told apart") {
    asio::io_context io;
    auto command = shell("while [ ! -e \"$0\" ]; do sleep 0.02; done; exit 1");
    const auto file =
        std::filesystem::temp_directory_path() / ("evalrt-test-" + std::to_string(::getpid()));
    command.argv.push_back(file.string());
    bool shown = false;
    SECTION("by its words") { command.argv[2] = "echo 'OSError: Address already in use'; exit 1"; }
    SECTION("by who listens there") { shown = true; }
    ServerProcess server(io.get_executor(), command);
    ScriptedBackend probe(io.get_executor());
    probe.on_call = [&](int call) { probe.fail(call, Errc::unreachable); };
    REQUIRE_FALSE(wait(io, server.async_start()).code);
    tcp::acceptor stranger(io);
    if (shown) stranger = {io, {asio::ip::address_v4::loopback(), server.port()}};
    std::ofstream{file};
    const auto ready = wait(io, server.async_wait_ready(probe, {}));
    std::filesystem::remove(file);
    CHECK(ready.code == Errc::unreachable);
    CHECK(ready.text.find("port " + std::to_string(server.port()) +
                          " is in use by another program: start again") != std::string::npos);
}

#ifdef __linux__
TEST_CASE("a stranger on the port is not our server") {
    asio::io_context io;
    ServerProcess server(io.get_executor(), shell("sleep 1000"));
    REQUIRE_FALSE(wait(io, server.async_start()).code);
    ConnectProbe probe(io, server);
    SECTION("it answers") {}
    SECTION("it wants a key") { probe.outcome = Errc::auth; }
    tcp::acceptor stranger(io, {asio::ip::address_v4::loopback(), server.port()});
    const auto ready = wait(io, server.async_wait_ready(probe.backend, {}));
    CHECK(ready.code == Errc::unreachable);
    CHECK(ready.text == "port " + std::to_string(server.port()) +
                            " is answered by another program, not by the server that was started: "
                            "stop it or choose another with --port");
}

TEST_CASE("an answer from elsewhere does not make a server ready") {
    asio::io_context io;
    ServerProcess server(io.get_executor(), shell("sleep 1000"));
    REQUIRE_FALSE(wait(io, server.async_start()).code);
    ScriptedBackend probe(io.get_executor());
    probe.on_call = [&](int call) { probe.end(call); };
    const auto ready = wait(io, server.async_wait_ready(probe, {}));
    CHECK(ready.code == Errc::unreachable);
    CHECK(ready.text.find("nobody listens there") != std::string::npos);
}
#endif

TEST_CASE("a server that refuses the request again and again is not waited for") {
    asio::io_context io;
    ServerProcess server(io.get_executor(), listening());
    ConnectProbe probe(io, server);
    REQUIRE_FALSE(wait(io, server.async_start()).code);
    SECTION("a 4xx, after a few tries") {
        probe.outcome = Errc::rejected;
        probe.status = 404;
        const auto ready = wait(io, server.async_wait_ready(probe.backend, {}));
        CHECK(ready.code == Errc::rejected);
        CHECK(ready.text == "so says the server");
        CHECK(probe.backend.calls >= 3);
    }
    SECTION("a wrong key, at once") {
        probe.outcome = Errc::auth;
        probe.status = 401;
        CHECK(wait(io, server.async_wait_ready(probe.backend, {})).code == Errc::auth);
    }
    SECTION("not so a 5xx and a 503") {
        int answers = 0;
        auto connect = probe.backend.on_call;
        probe.backend.on_call = [&](int call) {
            probe.outcome = ++answers % 2 ? Errc::overloaded : Errc::rejected;
            probe.status = answers % 2 ? 503 : 500;
            if (answers == 8) probe.outcome = {};
            connect(call);
        };
        CHECK_FALSE(wait(io, server.async_wait_ready(probe.backend, {})).code);
    }
}

TEST_CASE("the startup timeout ends a probe that hangs, and a server that never answers") {
    asio::io_context io;
    auto command = shell("echo loading; sleep 1000");
    command.startup_timeout = 300ms;
    ServerProcess server(io.get_executor(), command);
    REQUIRE_FALSE(wait(io, server.async_start()).code);
    REQUIRE(run_until(io, [&] { return server.last_output() == "loading\n"; }));
    ScriptedBackend probe(io.get_executor());
    const bool hangs = GENERATE(true, false);
    if (!hangs) probe.on_call = [&](int call) { probe.fail(call, Errc::overloaded); };
    const auto ready = wait(io, server.async_wait_ready(probe, {}));
    CHECK(ready.code == Errc::timed_out);
    CHECK(ready.text == std::string("the server was not ready within 300 ms") +
                            (hangs ? "" : "; the last answer: the server is overloaded") +
                            "; its last output:\nloading");
    CHECK(probe.cancelled == (hangs ? 1 : 0));
    CHECK(probe.pending.empty());
    CHECK(server.running());
}

TEST_CASE("an exit ends the waiting even while the probe hangs") {
    asio::io_context io;
    ServerProcess server(io.get_executor(), shell("exit 4"));
    ScriptedBackend probe(io.get_executor());
    REQUIRE_FALSE(wait(io, server.async_start()).code);
    CHECK(wait(io, server.async_wait_ready(probe, {})).code == Errc::exited);
    CHECK(probe.cancelled == 1);
}

TEST_CASE("stop kills a server that ignores SIGTERM, and its grandchildren") {
    asio::io_context io;
    auto command = shell("trap '' TERM; (trap '' TERM; while :; do sleep 1; done) & "
                         "echo ready; while :; do sleep 1; done");
    command.stop_grace = 100ms;
    bool ready = false;
    ServerProcess server(io.get_executor(), command, [&](std::string_view) { ready = true; });
    REQUIRE_FALSE(wait(io, server.async_start()).code);
    REQUIRE(run_until(io, [&] { return ready; }));
    CHECK(alive_in_group(server.pid()) >= 2);
    Result exit, stop;
    server.async_wait_exit()(note(exit));
    server.async_stop()(note(stop)); // twice, side by side
    CHECK_FALSE(wait(io, server.async_stop()).code);
    settle(io);
    CHECK(stop.times == 1);
    CHECK(exit.text == "killed by signal 9");
    CHECK(alive_in_group(server.pid()) == 0);
    CHECK(no_children());
    CHECK_FALSE(wait(io, server.async_stop()).code); // again, after the end
}

TEST_CASE("stop leaves grandchildren their time, also when the leader ends at once") {
    asio::io_context io;
    std::vector<std::string> lines;
    ServerProcess server(io.get_executor(),
                         shell("(trap 'sleep 0.3; echo saved; exit' TERM; echo ready; "
                               "while :; do sleep 0.05; done) & wait"),
                         [&](std::string_view line) { lines.emplace_back(line); });
    REQUIRE_FALSE(wait(io, server.async_start()).code);
    REQUIRE(run_until(io, [&] { return !lines.empty(); }));
    CHECK_FALSE(wait(io, server.async_stop()).code);
    CHECK(lines.back() == "saved");
    CHECK(alive_in_group(server.pid()) == 0);
}

TEST_CASE("grandchildren do not outlive a server that ends by itself") {
    asio::io_context io;
    ServerProcess server(io.get_executor(), shell("sleep 1000 & sleep 1000 & exit 5"));
    REQUIRE_FALSE(wait(io, server.async_start()).code);
    CHECK(wait(io, server.async_wait_exit()).text == "exit status 5");
    CHECK(alive_in_group(server.pid()) == 0);
    CHECK(no_children());
}

TEST_CASE("destruction kills at once and leaves no zombie") {
    asio::io_context io;
    pid_t group = 0, guardian = 0;
    Result exit, ready, stop;
    ScriptedBackend probe(io.get_executor());
    const auto begin = Clock::now();
    {
        ServerProcess server(io.get_executor(),
                             shell("trap '' TERM; sleep 1000 & wait; sleep 1000"));
        REQUIRE_FALSE(wait(io, server.async_start()).code);
        group = server.pid();
        guardian = parent_of(group);
        server.async_wait_exit()(note(exit));
        server.async_wait_ready(probe, {})(note(ready));
        if (GENERATE(false, true)) server.async_stop()(note(stop));
    }
    CHECK(Clock::now() - begin < patience); // not its grace
    CHECK(no_children());
    CHECK(alive_in_group(group) == 0);
    CHECK(gone(guardian));
    CHECK(run_until(io, [&] { return ready.times > 0; }));
    settle(io);
    CHECK(exit.code == asio::error::operation_aborted);
    CHECK(ready.code == asio::error::operation_aborted);
    CHECK(exit.times + ready.times == 2);
    CHECK(stop.times <= 1);
    CHECK(io.poll() == 0); // nothing is left that could run
}

TEST_CASE("stop and destruction while the server starts") {
    Result start, stop;
    {
        asio::io_context io;
        auto server = std::make_unique<ServerProcess>(io.get_executor(), shell("sleep 1000"));
        server->async_start()(note(start));
        SECTION("stop") {
            CHECK_FALSE(wait(io, server->async_stop()).code);
            CHECK_FALSE(server->running());
            settle(io);
            CHECK(start.times == 1);
        }
        SECTION("destruction") {
            server.reset();
            CHECK(no_children());
            CHECK(start.times == 0);
            settle(io);
            CHECK(start.code == asio::error::operation_aborted);
            CHECK(start.times == 1);
        }
        SECTION("destruction, and nobody runs the executor after it") {
            server->async_stop()(note(stop));
            server.reset();
        }
    }
    CHECK(no_children());
}

TEST_CASE("a server that writes without end does not hold up a timer") {
    asio::io_context io;
    ServerProcess server(io.get_executor(), shell("exec yes"));
    REQUIRE_FALSE(wait(io, server.async_start()).code);
    asio::steady_timer timer(io);
    for (int tick = 0; tick < 10; ++tick) {
        timer.expires_after(10ms);
        wait(io, timer.async_wait(asio::deferred));
    }
    CHECK_FALSE(server.last_output().empty());
}

TEST_CASE("a log sink may destroy the server") {
    asio::io_context io;
    std::unique_ptr<ServerProcess> server;
    int lines = 0;
    server =
        std::make_unique<ServerProcess>(io.get_executor(), shell("yes"), [&](std::string_view) {
            ++lines;
            server.reset();
        });
    Result start;
    server->async_start()(note(start));
    REQUIRE(run_until(io, [&] { return lines > 0; }));
    settle(io);
    CHECK(lines == 1);
    CHECK(no_children());
}

TEST_CASE("kill -9 of the host leaves no process of the group") {
    // The helper is the host: it starts a server from a thread that ends, tells its pid, and waits.
    int pipe_ends[2];
    REQUIRE(::pipe(pipe_ends) == 0);
    const pid_t host = ::fork();
    if (host == 0) {
        ::close(pipe_ends[0]);
        asio::io_context io;
        for (int fd : {0, 1, 2}) ::close(fd); // a daemon may be like that
        ServerProcess server(io.get_executor(),
                             shell("trap '' TERM HUP; sleep 1000 & echo; sleep 1000"));
        Result start;
        std::thread([&] {
            server.async_start()(note(start));
            run_until(io, [&] { return start.times && !server.last_output().empty(); });
        }).join();
        std::this_thread::sleep_for(100ms); // it would die with the thread, if it did
        const pid_t pid = server.running() ? server.pid() : 0;
        if (::write(pipe_ends[1], &pid, sizeof pid) < 0) ::_exit(1);
        for (;;) ::pause();
    }
    ::close(pipe_ends[1]);
    auto kill_host = [](const pid_t* pid) {
        ::kill(*pid, SIGKILL);
        ::waitpid(*pid, nullptr, 0);
    };
    std::unique_ptr<const pid_t, void (*)(const pid_t*)> killer(&host, kill_host);
    pid_t group = 0;
    REQUIRE(::read(pipe_ends[0], &group, sizeof group) == sizeof group);
    REQUIRE(group > 0);
    CHECK(alive_in_group(group) >= 2);
    const pid_t guardian = parent_of(group);
    CHECK(parent_of(guardian) == host);
    killer.reset();
    CHECK(soon([&] { return alive_in_group(group) == 0 && gone(guardian); }));
    // Nor does the guardian keep what the host had open.
    char byte;
    CHECK(::read(pipe_ends[0], &byte, 1) == 0);
    ::close(pipe_ends[0]);
}

TEST_CASE("a server's folder goes when the host closes the link without a word, and only then") {
    std::string folder = (std::filesystem::temp_directory_path() / "evalrt-XXXXXX").string();
    REQUIRE(::mkdtemp(folder.data()));
    auto command = shell("sleep 1000");
    command.folder = folder;
    {
        asio::io_context io;
        ServerProcess server(io.get_executor(), command);
        REQUIRE_FALSE(wait(io, server.async_start()).code);
    }
    CHECK(std::filesystem::exists(folder));
    // What a host is for a moment that has been killed: without its files, but still there.
    const pid_t host = ::fork();
    if (host == 0) {
        asio::io_context io;
        ServerProcess server(io.get_executor(), command);
        Result start;
        server.async_start()(note(start));
        run_until(io, [&] { return start.times > 0; });
        for (int fd = 3; fd < 1000; ++fd) ::close(fd);
        for (;;) ::pause();
    }
    CHECK(soon([&] { return !std::filesystem::exists(folder); }));
    ::kill(host, SIGKILL);
    ::waitpid(host, nullptr, 0);
}

TEST_CASE("a guardian ignores what a terminal sends, and its own death is noticed") {
    asio::io_context io;
    ServerProcess server(io.get_executor(), shell("sleep 1000 & sleep 1000"));
    REQUIRE_FALSE(wait(io, server.async_start()).code);
    const pid_t guardian = parent_of(server.pid());
    for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGPIPE})
        ::kill(guardian, signal);
    for (const auto& process : processes()) {
        if (process.pid == guardian) CHECK(process.group != ::getpgrp());
        if (process.pid == server.pid()) CHECK(process.group == server.pid());
    }
    CHECK_FALSE(gone(guardian));
    CHECK(alive_in_group(server.pid()) >= 1);
    ::kill(guardian, SIGKILL);
    CHECK(wait(io, server.async_wait_exit()).text == "its guardian process was killed");
    CHECK(soon([&] { return alive_in_group(server.pid()) == 0; }));
    CHECK(no_children());
}

TEST_CASE("of fifty servers that end in random order each end is seen while the others run") {
    asio::io_context io;
    std::mt19937 random(7);
    std::vector<std::size_t> order(50);
    for (std::size_t i = 0; i < 50; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    std::string folder = (std::filesystem::temp_directory_path() / "evalrt-XXXXXX").string();
    REQUIRE(::mkdtemp(folder.data()));
    std::vector<std::unique_ptr<ServerProcess>> servers;
    std::vector<Result> exits(50);
    const auto pipe = [&](std::size_t i) { return folder + "/" + std::to_string(i); };
    for (std::size_t i = 0; i < 50; ++i) {
        REQUIRE(::mkfifo(pipe(i).c_str(), 0600) == 0);
        auto command = shell("read line < \"$0\"; exit " + std::to_string(i));
        command.argv.push_back(pipe(i));
        servers.push_back(std::make_unique<ServerProcess>(io.get_executor(), command));
        CHECK_FALSE(wait(io, servers.back()->async_start()).code);
        servers.back()->async_wait_exit()(note(exits[i]));
    }
    int ended = 0;
    for (const auto i : order) {
        const int end = ::open(pipe(i).c_str(), O_RDWR);
        REQUIRE(::write(end, "\n", 1) == 1);
        REQUIRE(run_until(io, [&] { return exits[i].times > 0; }));
        ::close(end);
        ++ended;
        CHECK(std::count_if(exits.begin(), exits.end(),
                            [](const auto& exit) { return exit.times > 0; }) == ended);
    }
    settle(io);
    for (std::size_t i = 0; i < 50; ++i) {
        CHECK(exits[i].times == 1);
        CHECK(exits[i].text == "exit status " + std::to_string(i));
    }
    std::filesystem::remove_all(folder);
    CHECK(no_children());
}

TEST_CASE("every operation can be cancelled, and a late signal is harmless") {
    asio::io_context io;
    asio::cancellation_signal signal;
    const auto type = GENERATE(asio::cancellation_type::terminal, asio::cancellation_type::partial,
                               asio::cancellation_type::total);
    auto with_slot = [&](Result& result) {
        return asio::bind_cancellation_slot(signal.slot(), note(result));
    };
    Result result;
    auto cancelled = [&] {
        signal.emit(type);
        CHECK(result.times == 0); // never from within the signal
        CHECK(run_until(io, [&] { return result.times > 0; }));
        signal.emit(type);
        settle(io);
        CHECK(result.times == 1);
        return result.code == asio::error::operation_aborted;
    };
    {
        ServerProcess server(io.get_executor(), shell("sleep 1000"));
        SECTION("start") {
            server.async_start()(with_slot(result));
            CHECK(cancelled());
            CHECK_FALSE(server.running());
            CHECK(no_children());
            CHECK_FALSE(wait(io, server.async_start()).code); // and once more
            CHECK(server.running());
        }
        SECTION("wait_ready while it asks, and between two questions") {
            REQUIRE_FALSE(wait(io, server.async_start()).code);
            ScriptedBackend probe(io.get_executor());
            const bool asking = GENERATE(true, false);
            if (!asking) probe.on_call = [&](int call) { probe.fail(call, Errc::unreachable); };
            server.async_wait_ready(probe, {})(with_slot(result));
            settle(io);
            CHECK(cancelled());
            CHECK(probe.pending.empty());
            CHECK(probe.cancelled == (asking ? 1 : 0));
            CHECK(server.running());
        }
        SECTION("wait_exit, one of two") {
            REQUIRE_FALSE(wait(io, server.async_start()).code);
            Result other;
            server.async_wait_exit()(with_slot(result));
            server.async_wait_exit()(note(other));
            CHECK(cancelled());
            CHECK(other.times == 0);
            wait(io, server.async_stop());
            CHECK(other.times == 1);
        }
        SECTION("stop, which goes on") {
            REQUIRE_FALSE(wait(io, server.async_start()).code);
            server.async_stop()(with_slot(result));
            CHECK(cancelled());
            wait(io, server.async_wait_exit());
            CHECK_FALSE(server.running());
        }
        SECTION("completed before the signal") {
            server.async_start()(with_slot(result));
            CHECK(run_until(io, [&] { return result.times > 0; }));
            signal.emit(type);
            CHECK_FALSE(result.code);
            CHECK(server.running());
        }
    }
    signal.emit(type); // nothing of it is left
    settle(io);
    CHECK(result.times == 1);
    CHECK(no_children());
}

TEST_CASE("running out of file descriptors is an error at each step") {
    asio::io_context io;
    rlimit before{}, tight{};
    ::getrlimit(RLIMIT_NOFILE, &before);
    tight = before;
    const int next = ::dup(2);
    ::close(next);
    int failures = 0;
    for (int more = 0;; ++more) {
        ServerProcess server(io.get_executor(), shell("sleep 1000"));
        tight.rlim_cur = rlim_t(next + more);
        ::setrlimit(RLIMIT_NOFILE, &tight);
        Result start;
        server.async_start()(note(start));
        const bool completed = run_until(io, [&] { return start.times > 0; });
        settle(io);
        ::setrlimit(RLIMIT_NOFILE, &before);
        REQUIRE(completed);
        CHECK(start.times == 1);
        if (!start.code) break;
        ++failures;
        CHECK_FALSE(start.text.empty());
        CHECK(no_children());
        CHECK(server.pid() == 0);
    }
    CHECK(failures >= 3);
}

TEST_CASE("a second start of a running server is an error") {
    asio::io_context io;
    ServerProcess server(io.get_executor(), shell("sleep 1000"));
    REQUIRE_FALSE(wait(io, server.async_start()).code);
    CHECK(wait(io, server.async_start()).code == asio::error::already_started);
    CHECK(server.running());
}

TEST_CASE("start, ready and stop from a thread of its own, beside others that fork") {
    std::vector<std::thread> threads;
    std::atomic<int> good = 0;
    for (int i = 0; i < 4; ++i)
        threads.emplace_back([&good] {
            for (int round = 0; round < 5; ++round) {
                asio::io_context io;
                ServerProcess server(io.get_executor(), shell("echo up; sleep 1000"));
                Result start, stop;
                server.async_start()(note(start));
                if (!run_until(io, [&] { return server.last_output() == "up\n"; })) continue;
                server.async_stop()(note(stop));
                if (run_until(io, [&] { return stop.times == 1; }) && !stop.code) ++good;
            }
        });
    for (auto& thread : threads) thread.join();
    CHECK(good == 20);
    CHECK(no_children());
}
