// What a journal costs.
//   memory COUNT          COUNT answers from memory, with and without a journal: CPU of a sample,
//                         size of the file, time to open it again and to decide on all of them
//   plain|journal URL COUNT IN_FLIGHT
//                         the same requests to a server, through RequestScheduler and HttpBackend:
//                         requests a second, CPU of a request
#include "evalrt/journal.hpp"
#include "evalrt/http_backend.hpp"
#include "evalrt/request_scheduler.hpp"
#include "wire.hpp"

#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>

#include <fmt/format.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>

#include <sys/resource.h>
#include <time.h>

using namespace evalrt;

namespace {

constexpr std::size_t prompt_bytes = 3900;

double cpu_seconds() {
    rusage usage;
    ::getrusage(RUSAGE_SELF, &usage);
    const auto seconds = [](timeval time) { return double(time.tv_sec) + 1e-6 * time.tv_usec; };
    return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

Request request_of(std::size_t i) {
    Request request;
    auto text = fmt::format(R"({{"model": "m", "temperature": 0, "max_tokens": 256, "messages": )"
                            R"([{{"role": "user", "content": "Question {}: )",
                            i);
    while (text.size() < prompt_bytes) text += "word ";
    request.body = text + "\"}]}";
    request.name = fmt::format("simple_python_{}", i);
    return request;
}

// An answer of a thousand bytes, at once.
class Memory final : public Backend {
public:
    explicit Memory(asio::any_io_executor executor) : executor_(std::move(executor)) {
        answer_.status = 200;
        for (int i = 0; i < 170; ++i) answer_.text += "word ";
        answer_.body = R"({"id": "chatcmpl-0123456789", "object": "chat.completion", "created": )"
                       R"(1700000000, "model": "m", "choices": [{"index": 0, "message": {"role": )"
                       R"("assistant", "content": ")" +
                       answer_.text +
                       R"("}, "logprobs": null, "finish_reason": "stop"}], "usage": )"
                       R"({"prompt_tokens": 900, "completion_tokens": 170, "total_tokens": 1070}})";
        answer_.finish_reason = "stop";
        answer_.request_id = "chatcmpl-0123456789";
        answer_.usage = {900, 0, 170};
        answer_.attempts = 1;
    }
    asio::any_io_executor get_executor() noexcept override { return executor_; }
    std::size_t answer_bytes() const { return answer_.body.size(); }

private:
    void start_complete(Request, TextSink, Handler handler) override {
        asio::post(executor_, [this, handler = std::move(handler)]() mutable {
            std::move(handler)(error_code(), answer_);
        });
    }
    asio::any_io_executor executor_;
    Response answer_;
};

JournalRun run_of() {
    JournalRun run;
    run.identity = {{"backend", "openai-url"}, {"model", "m"}};
    run.addresses = {"http://127.0.0.1:8000/v1"};
    run.sent = [row = *find_backend_row("openai-url")](const Request& request) {
        return detail::prepare_openai(request, row, "m", false).body.text();
    };
    return run;
}

void must(error_code code, const std::string& words) {
    if (!code) return;
    fmt::print(stderr, "{}\n", words);
    std::exit(1);
}

std::unique_ptr<Journal> open_journal(asio::io_context& io, const std::string& path) {
    JournalOptions options;
    options.path = path;
    options.on_failure = [](const Failure& failure) { must(failure.code, failure.detail); };
    auto journal = std::make_unique<Journal>(io.get_executor(), options);
    journal->async_open(must);
    io.restart();
    io.run();
    journal->async_begin(run_of(), must);
    io.restart();
    io.run();
    return journal;
}

// Of the thread that asks.
double thread_seconds() {
    timespec time;
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

struct Cost {
    double seconds = 0, cpu = 0, thread = 0;
    std::size_t done = 0, served = 0;
};

// Suite by suite: all of one at once, those in flight are the scheduler's business.
Cost ask(asio::io_context& io, Backend& backend, std::size_t count, std::size_t suite = 2000) {
    Cost cost;
    const auto start = Clock::now();
    const auto cpu = cpu_seconds(), thread = thread_seconds();
    for (std::size_t i = 0; i < count;) {
        for (const auto end = std::min(i + suite, count); i < end; ++i)
            backend.async_complete(request_of(i), {}, [&](error_code code, const Response& it) {
                must(code, it.detail);
                ++cost.done;
                cost.served += it.from_journal;
            });
        io.restart();
        io.run();
    }
    cost.cpu = cpu_seconds() - cpu;
    cost.thread = thread_seconds() - thread;
    cost.seconds = std::chrono::duration<double>(Clock::now() - start).count();
    if (cost.done != count) std::exit(1);
    return cost;
}

void remove(const std::string& path) {
    for (const auto* end : {"", "-wal", "-shm", ".lock"}) std::filesystem::remove(path + end);
}

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

void from_memory(const std::string& path, std::size_t count) {
    remove(path);
    asio::io_context io(1);
    Memory memory(io.get_executor());
    const auto plain = ask(io, memory, count);
    auto journal = open_journal(io, path);
    journal->connect(memory);
    const auto kept = ask(io, *journal, count);
    journal.reset();
    const auto size = double(std::filesystem::file_size(path));

    std::vector<Request> requests;
    std::vector<const Request*> pointers;
    for (std::size_t i = 0; i < count; ++i) requests.push_back(request_of(i));
    for (const auto& it : requests) pointers.push_back(&it);
    auto start = Clock::now();
    journal = open_journal(io, path);
    const auto open = seconds_since(start);
    start = Clock::now();
    if (!journal->holds(pointers)) std::exit(1);
    const auto decide = seconds_since(start);
    requests.clear();
    const auto served = ask(io, *journal, count);
    if (served.served != count) std::exit(1);
    journal.reset();
    remove(path);
    fmt::print(R"({{"count": {}, "cpu_us": {:.2f}, "answer_bytes": {}, "file_ratio": {:.3f}, )"
               R"("open_seconds": {:.3f}, "decide_seconds": {:.3f}, "serve_us": {:.2f}}})"
               "\n",
               count, (kept.cpu - plain.cpu) / double(count) * 1e6, memory.answer_bytes(),
               size / double(count * memory.answer_bytes()), open, decide,
               served.cpu / double(count) * 1e6);
}

void from_server(const std::string& path, const char* url, std::size_t count, unsigned in_flight,
                 bool with_journal) {
    remove(path);
    asio::io_context io(1);
    auto row = *find_backend_row("openai-url");
    row.in_flight = in_flight;
    HttpOptions options;
    options.url = url;
    HttpBackend http(io.get_executor(), row, options);
    RadixPlanner planner(planner_options(row));
    RequestScheduler scheduler(http, planner, row, scheduler_options(row));
    std::unique_ptr<Journal> journal;
    if (with_journal) {
        journal = open_journal(io, path);
        journal->connect(scheduler);
    }
    Backend& front = journal ? static_cast<Backend&>(*journal) : scheduler;
    const auto cost = ask(io, front, count, count);
    journal.reset();
    remove(path);
    fmt::print(R"({{"journal": {}, "rate": {:.0f}, "cpu_us": {:.2f}, "of_the_client_us": {:.2f}}})"
               "\n",
               with_journal, double(count) / cost.seconds, cost.cpu / double(count) * 1e6,
               cost.thread / double(count) * 1e6);
}

} // namespace

int main(int argc, char** argv) {
    const std::string path =
        (std::filesystem::current_path() / fmt::format("bench-journal-{}", ::getpid())).string();
    if (argc == 3 && std::strcmp(argv[1], "memory") == 0) {
        from_memory(path, std::stoul(argv[2]));
    } else if (argc == 5) {
        from_server(path, argv[2], std::stoul(argv[3]), unsigned(std::stoul(argv[4])),
                    std::strcmp(argv[1], "journal") == 0);
    } else {
        std::fputs("usage: bench_journal memory COUNT\n"
                   "       bench_journal plain|journal URL COUNT IN_FLIGHT\n",
                   stderr);
        return 2;
    }
    return 0;
}
