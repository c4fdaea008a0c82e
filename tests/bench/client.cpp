// Asks a server COUNT times with IN_FLIGHT requests on the way, and prints what that cost.
//   scheduler  all that a user gets: RequestScheduler with a RadixPlanner, in front of HttpBackend;
//              suite by suite
//   http       HttpBackend alone
//   bytes      sends the same request and reads to the end of the body, without a look inside: what
//              the packets alone cost
#include "evalrt/http_backend.hpp"
#include "evalrt/request_scheduler.hpp"

#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>

#include <fmt/format.h>

#include <cstdio>
#include <fstream>
#include <sstream>

#include <sys/resource.h>

using namespace evalrt;
using asio::ip::tcp;

namespace {

struct Arguments {
    std::string what, url;
    std::size_t count = 0, in_flight = 0, prompt_bytes = 3900;
};

double cpu_seconds() {
    rusage usage;
    ::getrusage(RUSAGE_SELF, &usage);
    const auto seconds = [](timeval time) { return double(time.tv_sec) + 1e-6 * time.tv_usec; };
    return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// Linux; elsewhere 0.
double resident_megabytes() {
    std::ifstream file("/proc/self/statm");
    double size = 0, resident = 0;
    file >> size >> resident;
    return resident * 4096 / 1e6;
}

std::string body(std::size_t i, std::size_t bytes) {
    static const std::string words = [] {
        std::string text;
        for (int word = 0; text.size() < 1 << 20; ++word) text += fmt::format("word{} ", word);
        return text;
    }();
    std::string text;
    text.reserve(bytes + 100);
    text.append(R"({"model": "m", "temperature": 0, "max_tokens": 256, "messages": )"
                R"([{"role": "user", "content": "Question )")
        .append(std::to_string(i))
        .append(": ");
    return text.append(words, 0, bytes - std::min(bytes, text.size() + 4)).append("\"}]}");
}

struct Totals {
    std::size_t done = 0, failed = 0, text_bytes = 0;
    std::string error;
    double first_megabytes = 0, most_megabytes = 0;

    void add(const Response& response) {
        ++done;
        text_bytes += response.text.size();
        if (response.outcome) {
            ++failed;
            error = response.detail;
        }
        if (done % 1000 == 0) {
            most_megabytes = std::max(most_megabytes, resident_megabytes());
            if (done == 1000) first_megabytes = most_megabytes;
        }
    }
};

// In suites of this many requests, each submitted at once; the size of BFCL's single-turn part.
constexpr std::size_t suite = 2000;

void ask_scheduler(asio::io_context& io, const Arguments& arguments, Totals& totals) {
    auto row = *find_backend_row("openai-url");
    row.in_flight = unsigned(arguments.in_flight);
    HttpOptions options;
    options.url = arguments.url;
    options.api_key = "sk-bench";
    HttpBackend backend(io.get_executor(), row, options);
    RadixPlanner planner(planner_options(row));
    RequestScheduler scheduler(backend, planner, row, scheduler_options(row));
    for (std::size_t i = 0; i < arguments.count;) {
        const auto end = std::min(i + suite, arguments.count);
        for (; i < end; ++i) {
            Request request;
            request.body = body(i, arguments.prompt_bytes);
            scheduler.async_complete(
                std::move(request), {},
                [&](error_code, const Response& response) { totals.add(response); });
        }
        io.restart();
        io.run();
    }
}

void ask_http(asio::io_context& io, const Arguments& arguments, Totals& totals) {
    HttpOptions options;
    options.url = arguments.url;
    options.api_key = "sk-bench";
    options.idle_connections = unsigned(arguments.in_flight);
    HttpBackend backend(io.get_executor(), *find_backend_row("openai-url"), options);
    std::size_t sent = 0;
    std::function<void()> next = [&] {
        if (sent == arguments.count) return;
        Request request;
        request.body = body(sent++, arguments.prompt_bytes);
        backend.async_complete(std::move(request), {}, [&](error_code, const Response& response) {
            totals.add(response);
            next();
        });
    };
    for (std::size_t i = 0; i < arguments.in_flight; ++i) next();
    io.run();
}

asio::awaitable<void> read_bytes(const Arguments& arguments, std::size_t& left, Totals& totals) {
    const auto url = parse_url(arguments.url);
    tcp::socket socket(co_await asio::this_coro::executor);
    co_await socket.async_connect(
        {asio::ip::make_address(url.host), std::uint16_t(std::stoi(url.port))},
        asio::use_awaitable);
    socket.set_option(tcp::no_delay(true));
    const auto text = body(0, arguments.prompt_bytes);
    const auto request =
        fmt::format("POST {}/chat/completions HTTP/1.1\r\nHost: {}:{}\r\n"
                    "Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{}",
                    url.base, url.host, url.port, text.size(), text);
    std::array<char, 64 << 10> bytes;
    while (left > 0) {
        --left;
        co_await asio::async_write(socket, asio::buffer(request), asio::use_awaitable);
        for (std::string_view end; !end.ends_with("\r\n0\r\n\r\n");)
            end = {bytes.data(),
                   co_await socket.async_read_some(asio::buffer(bytes), asio::use_awaitable)};
        totals.add({});
    }
}

} // namespace

int main(int argc, char** argv) {
    if (argc < 5) {
        std::fputs(
            "usage: bench_client {scheduler|http|bytes} URL COUNT IN_FLIGHT [PROMPT_BYTES]\n",
            stderr);
        return 2;
    }
    Arguments arguments{argv[1], argv[2], std::stoul(argv[3]), std::stoul(argv[4])};
    if (argc > 5) arguments.prompt_bytes = std::stoul(argv[5]);
    Totals totals;
    asio::io_context io(1);
    const auto start = Clock::now();
    const auto cpu = cpu_seconds();
    std::size_t left = arguments.count;
    if (arguments.what == "scheduler") {
        ask_scheduler(io, arguments, totals);
    } else if (arguments.what == "http") {
        ask_http(io, arguments, totals);
    } else {
        for (std::size_t i = 0; i < arguments.in_flight; ++i)
            asio::co_spawn(io, read_bytes(arguments, left, totals), [](std::exception_ptr error) {
                if (error) std::rethrow_exception(error);
            });
        io.run();
    }
    const std::chrono::duration<double> seconds = Clock::now() - start;
    fmt::print(R"({{"done": {}, "failed": {}, "seconds": {}, "cpu_seconds": {}, "text_bytes": {}, )"
               R"("first_megabytes": {}, "most_megabytes": {}}})"
               "\n",
               totals.done, totals.failed, seconds.count(), cpu_seconds() - cpu, totals.text_bytes,
               totals.first_megabytes, totals.most_megabytes);
    if (totals.failed > 0) fmt::print(stderr, "{}\n", totals.error);
    return totals.failed > 0 || totals.done != arguments.count;
}
