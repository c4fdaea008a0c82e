// The peer of client.cpp: the same requests by libcurl's multi interface and epoll, each answer
// parsed for its text and usage.
#include <curl/curl.h>
#include <fmt/format.h>
#include <simdjson.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include <sys/epoll.h>
#include <sys/resource.h>

namespace {

using Clock = std::chrono::steady_clock;

double cpu_seconds() {
    rusage usage;
    ::getrusage(RUSAGE_SELF, &usage);
    const auto seconds = [](timeval time) { return double(time.tv_sec) + 1e-6 * time.tv_usec; };
    return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

struct Call {
    CURL* easy = nullptr;
    std::string body, answer;
};

struct Client {
    CURLM* multi = curl_multi_init();
    int epoll = ::epoll_create1(EPOLL_CLOEXEC);
    Clock::time_point timer = Clock::time_point::max();
    simdjson::dom::parser parser;
    std::string url, words;
    curl_slist* headers = nullptr;
    std::size_t sent = 0, count = 0, done = 0, failed = 0, text_bytes = 0;

    static int on_socket(CURL*, curl_socket_t socket, int what, void* self, void* known) {
        auto& client = *static_cast<Client*>(self);
        epoll_event event{};
        event.data.fd = socket;
        if (what == CURL_POLL_REMOVE) {
            ::epoll_ctl(client.epoll, EPOLL_CTL_DEL, socket, nullptr);
            return 0;
        }
        event.events =
            (what & CURL_POLL_IN ? EPOLLIN : 0u) | (what & CURL_POLL_OUT ? EPOLLOUT : 0u);
        ::epoll_ctl(client.epoll, known ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, socket, &event);
        curl_multi_assign(client.multi, socket, self);
        return 0;
    }

    static int on_timer(CURLM*, long ms, void* self) {
        static_cast<Client*>(self)->timer =
            ms < 0 ? Clock::time_point::max() : Clock::now() + std::chrono::milliseconds(ms);
        return 0;
    }

    static std::size_t on_bytes(char* data, std::size_t size, std::size_t n, void* call) {
        static_cast<Call*>(call)->answer.append(data, size * n);
        return size * n;
    }

    void start(Call& call) {
        if (sent == count) return;
        call.body =
            fmt::format(R"({{"model": "m", "temperature": 0, "max_tokens": 256, )"
                        R"("messages": [{{"role": "user", "content": "Question {}: {}"}}]}})",
                        sent++, words);
        call.answer.clear();
        if (!call.easy) call.easy = curl_easy_init();
        curl_easy_reset(call.easy);
        curl_easy_setopt(call.easy, CURLOPT_URL, url.c_str());
        curl_easy_setopt(call.easy, CURLOPT_POSTFIELDS, call.body.data());
        curl_easy_setopt(call.easy, CURLOPT_POSTFIELDSIZE, long(call.body.size()));
        curl_easy_setopt(call.easy, CURLOPT_HTTPHEADER, headers);
        curl_easy_setopt(call.easy, CURLOPT_WRITEFUNCTION, &on_bytes);
        curl_easy_setopt(call.easy, CURLOPT_WRITEDATA, &call);
        curl_easy_setopt(call.easy, CURLOPT_PRIVATE, &call);
        curl_easy_setopt(call.easy, CURLOPT_TIMEOUT_MS, 600'000L);
        curl_multi_add_handle(multi, call.easy);
    }

    void finish(CURLMsg& message) {
        Call* call = nullptr;
        curl_easy_getinfo(message.easy_handle, CURLINFO_PRIVATE, &call);
        curl_multi_remove_handle(multi, message.easy_handle);
        ++done;
        simdjson::dom::element answer;
        std::string_view text;
        std::int64_t tokens;
        if (message.data.result != CURLE_OK || parser.parse(call->answer).get(answer) ||
            answer["choices"].at(0)["message"]["content"].get(text) ||
            answer["usage"]["completion_tokens"].get(tokens))
            ++failed;
        text_bytes += text.size();
        start(*call);
    }

    void run(std::size_t in_flight) {
        curl_multi_setopt(multi, CURLMOPT_SOCKETFUNCTION, &on_socket);
        curl_multi_setopt(multi, CURLMOPT_SOCKETDATA, this);
        curl_multi_setopt(multi, CURLMOPT_TIMERFUNCTION, &on_timer);
        curl_multi_setopt(multi, CURLMOPT_TIMERDATA, this);
        curl_multi_setopt(multi, CURLMOPT_MAXCONNECTS, long(in_flight));
        std::vector<Call> calls(in_flight);
        for (auto& call : calls) start(call);
        int running = 0;
        while (done < count) {
            int wait = -1;
            if (timer != Clock::time_point::max())
                wait = int(std::max<std::int64_t>(
                    0, std::chrono::ceil<std::chrono::milliseconds>(timer - Clock::now()).count()));
            epoll_event events[64];
            const int n = ::epoll_wait(epoll, events, 64, wait);
            for (int i = 0; i < n; ++i)
                curl_multi_socket_action(
                    multi, events[i].data.fd,
                    (events[i].events & EPOLLIN ? CURL_CSELECT_IN : 0) |
                        (events[i].events & EPOLLOUT ? CURL_CSELECT_OUT : 0) |
                        (events[i].events & (EPOLLERR | EPOLLHUP) ? CURL_CSELECT_ERR : 0),
                    &running);
            if (timer <= Clock::now()) {
                timer = Clock::time_point::max();
                curl_multi_socket_action(multi, CURL_SOCKET_TIMEOUT, 0, &running);
            }
            int left = 0;
            while (CURLMsg* message = curl_multi_info_read(multi, &left))
                if (message->msg == CURLMSG_DONE) finish(*message);
        }
    }
};

} // namespace

int main(int argc, char** argv) {
    if (argc < 4) {
        std::fputs("usage: bench_curl URL COUNT IN_FLIGHT [PROMPT_BYTES]\n", stderr);
        return 2;
    }
    curl_global_init(CURL_GLOBAL_ALL);
    Client client;
    client.url = std::string(argv[1]) + "/chat/completions";
    client.count = std::stoul(argv[2]);
    const std::size_t bytes = argc > 4 ? std::stoul(argv[4]) : 3900;
    for (int word = 0; client.words.size() + 120 < bytes; ++word)
        client.words += fmt::format("word{} ", word);
    client.headers = curl_slist_append(client.headers, "Content-Type: application/json");
    client.headers = curl_slist_append(client.headers, "Authorization: Bearer sk-bench");
    client.headers = curl_slist_append(client.headers, "Expect:");
    const auto start = Clock::now();
    const auto cpu = cpu_seconds();
    client.run(std::stoul(argv[3]));
    const std::chrono::duration<double> seconds = Clock::now() - start;
    fmt::print(R"({{"done": {}, "failed": {}, "seconds": {}, "cpu_seconds": {}, "text_bytes": {}}})"
               "\n",
               client.done, client.failed, seconds.count(), cpu_seconds() - cpu, client.text_bytes);
    return client.failed > 0;
}
