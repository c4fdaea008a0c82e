#include "evalrt/http_backend.hpp"

#include "support/catch.hpp"
#include "support/fake_server.hpp"
#include "support/patience.hpp"

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/bind_executor.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include <dlfcn.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

using namespace evalrt;
using namespace evalrt::tests;
using namespace std::chrono_literals;
using asio::ip::tcp;
using Ms = std::chrono::milliseconds;

// What this thread asks of the system: counted, slowed down, cut. The server has a thread of its
// own and is not touched.
namespace {

thread_local int sends = 0;
thread_local std::deque<std::size_t> read_sizes; // of the next reads; the last one stays
thread_local std::vector<Clock::time_point> connects;
thread_local int last_socket = -1;           // that was connected
thread_local std::function<void()> on_bytes; // were read
std::atomic<int> running = 0;                // requests

template <class F>
F* original(F*, const char* name) {
    return reinterpret_cast<F*>(::dlsym(RTLD_NEXT, name));
}

std::size_t at_most(std::size_t size) {
    if (read_sizes.empty()) return size;
    size = std::min(size, read_sizes.front());
    if (read_sizes.size() > 1) read_sizes.pop_front();
    return size;
}

} // namespace

extern "C" {

ssize_t send(int fd, const void* data, size_t size, int flags) {
    ++sends;
    return original(&::send, "send")(fd, data, size, flags);
}

ssize_t sendmsg(int fd, const msghdr* message, int flags) {
    ++sends;
    return original(&::sendmsg, "sendmsg")(fd, message, flags);
}

ssize_t recv(int fd, void* data, size_t size, int flags) {
    const auto n =
        original(&::recv, "recv")(fd, data, flags & MSG_PEEK ? size : at_most(size), flags);
    if (n > 0 && !(flags & MSG_PEEK) && on_bytes) on_bytes();
    return n;
}

int connect(int fd, const sockaddr* address, socklen_t size) {
    connects.push_back(Clock::now());
    last_socket = fd;
    return original(&::connect, "connect")(fd, address, size);
}

int getaddrinfo(const char* host, const char* service, const addrinfo* hints, addrinfo** list) {
    if (host && std::string_view(host) == "slow.test") { // not while somebody could wait for it
        for (const auto end = Clock::now() + 2 * patience; running > 0 && Clock::now() < end;)
            std::this_thread::sleep_for(1ms);
        return EAI_NONAME;
    }
    return original(&::getaddrinfo, "getaddrinfo")(host, service, hints, list);
}

} // extern "C"

namespace {

// Of what is over at once, on a slow machine; far from what it must not wait for.
constexpr Ms soon = 60s;

// With kept connections that do not expire, and no limit that a slow machine could come to.
HttpOptions unhurried() {
    HttpOptions options;
    options.limits = {2 * patience, 2 * patience, 2 * patience, 2 * patience, Ms(0)};
    options.idle_time = 2 * patience;
    return options;
}

const std::string canary = "sk-canary-0123456789";

// A server that takes every body as it is.
BackendRow plain() {
    BackendRow row;
    row.name = "fake";
    row.streams = false;
    row.stream_usage = false;
    return row;
}

BackendRow single_use() {
    auto row = plain();
    row.keep_alive = false;
    return row;
}

Request chat(bool stream = false) {
    Request request;
    request.body =
        std::string(R"({"model": "m", "messages": [{"role": "user", "content": "hi"}])") +
        (stream ? R"(, "stream": true})" : "}");
    return request;
}

Request completion(bool stream = false) {
    Request request;
    request.endpoint = "/v1/completions";
    request.body =
        std::string(R"({"model": "m", "prompt": "hi")") + (stream ? R"(, "stream": true})" : "}");
    return request;
}

struct Result {
    int times = 0;
    error_code code;
    Response response;
    std::vector<std::string> pieces;
    Clock::time_point started;
    Clock::duration took{};
};

class Client {
public:
    explicit Client(std::string url, BackendRow row = plain(), HttpOptions options = unhurried()) {
        options.url = std::move(url);
        backend.emplace(io.get_executor(), std::move(row), std::move(options),
                        [this](std::string_view line) { log += std::string(line) + "\n"; });
    }

    void start(Result& result, Request request = chat(), asio::cancellation_slot slot = {},
               TextSink on_text = {}) {
        result.started = Clock::now();
        ++running;
        backend->async_complete(
            std::move(request),
            [&result, on_text](std::string_view piece) {
                result.pieces.emplace_back(piece);
                if (on_text) on_text(piece);
            },
            asio::bind_cancellation_slot(slot, [&result](error_code code, Response response) {
                --running;
                ++result.times;
                result.code = code;
                result.response = std::move(response);
                result.took = Clock::now() - result.started;
            }));
    }

    // Until nothing is left to do: a second completion would be seen, a forgotten timer too.
    void run() {
        io.restart();
        io.run_for(patience);
        REQUIRE(io.stopped());
    }

    Result ask(Request request = chat(), TextSink on_text = {}) {
        Result result;
        start(result, std::move(request), {}, std::move(on_text));
        run();
        REQUIRE(result.times == 1);
        REQUIRE(bool(result.code) == result.response.outcome.has_value());
        if (result.response.outcome) {
            CHECK(result.code == make_error_code(*result.response.outcome));
            CHECK(!result.response.detail.empty());
        }
        return result;
    }

    asio::io_context io;
    std::string log;
    std::optional<HttpBackend> backend;
};

std::string answer_head(std::string_view fields, std::string_view status = "200 OK",
                        std::string_view version = "1.1") {
    return "HTTP/" + std::string(version) + " " + std::string(status) + "\r\n" +
           std::string(fields) + "\r\n";
}

const std::string json_type = "Content-Type: application/json\r\n";
const std::string stream_type = "Content-Type: text/event-stream; charset=utf-8\r\n";

std::string with_length(std::string_view body, std::string fields = json_type,
                        std::string_view status = "200 OK") {
    fields += "Content-Length: " + std::to_string(body.size()) + "\r\n";
    return answer_head(fields, status) + std::string(body);
}

std::string chunk(std::string_view data) {
    char size[20];
    std::snprintf(size, sizeof size, "%zx\r\n", data.size());
    return size + std::string(data) + "\r\n";
}

std::string chunked(std::string_view body, std::string fields = json_type) {
    std::string out = answer_head(fields + "Transfer-Encoding: chunked\r\n");
    for (; !body.empty(); body.remove_prefix(std::min<std::size_t>(body.size(), 7)))
        out += chunk(body.substr(0, 7));
    return out + chunk("");
}

std::string until_close(std::string_view body, const std::string& fields = json_type,
                        std::string_view version = "1.1") {
    return answer_head(fields, "200 OK", version) + std::string(body);
}

const std::string chat_answer =
    R"({"id": "c1", "object": "chat.completion", "choices": [{"index": 0, "message": )"
    R"({"role": "assistant", "content": "Grüße"}, "finish_reason": "stop"}], )"
    R"("usage": {"prompt_tokens": 7, "completion_tokens": 2}})";

const std::string completion_answer =
    R"({"id": "c1", "object": "text_completion", "choices": [{"index": 0, "text": "Grüße", )"
    R"("finish_reason": "stop"}], "usage": {"prompt_tokens": 7, "completion_tokens": 2}})";

std::string event(std::string_view data) { return "data: " + std::string(data) + "\n\n"; }
std::string delta(std::string_view text) {
    return event(R"({"id": "c1", "choices": [{"index": 0, "delta": {"content": ")" +
                 std::string(text) + R"("}}]})");
}
const std::string finish =
    event(R"({"id": "c1", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})");
const std::string usage =
    event(R"({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}})");
const std::string done = event("[DONE]");

const std::string chat_stream =
    ": keepalive 1/2\n\n" + delta("Gr") + delta("üße") + finish + usage + done;
const std::string completion_stream =
    event(R"({"id": "c1", "choices": [{"index": 0, "text": "Gr"}]})") +
    event(R"({"id": "c1", "choices": [{"index": 0, "text": "üße", "finish_reason": "stop"}]})") +
    usage + done;

// The head of a chunked stream and what follows, each piece a chunk; the body does not end.
std::string open_stream(const std::vector<std::string>& pieces) {
    std::string out = answer_head(stream_type + "Transfer-Encoding: chunked\r\n");
    for (const auto& piece : pieces) out += chunk(piece);
    return out;
}

void check_answered(const Result& result) {
    INFO(result.response.detail);
    CHECK(!result.code);
    CHECK(!result.response.outcome);
    CHECK(result.response.status == 200);
    CHECK(result.response.text == "Grüße");
    CHECK(result.response.finish_reason == "stop");
    CHECK(result.response.usage.prompt_tokens == 7);
    CHECK(result.response.usage.completion_tokens == 2);
    CHECK(result.response.body.find("Grüße") != std::string::npos);
}

Errc outcome(const Result& result) {
    INFO(result.response.text);
    REQUIRE(result.response.outcome);
    return *result.response.outcome;
}

bool contains(std::string_view text, std::string_view part) { return text.find(part) != text.npos; }

bool eventually(const std::function<bool()>& holds) {
    for (const auto end = Clock::now() + patience; Clock::now() < end;) {
        if (holds()) return true;
        std::this_thread::sleep_for(1ms);
    }
    return holds();
}

std::ptrdiff_t open_files() {
    return std::distance(std::filesystem::directory_iterator("/dev/fd"), {});
}

// A loopback port where nobody else can listen, and nobody does.
struct ClosedPort {
    ClosedPort() {
        acceptor.open(tcp::v4());
        acceptor.bind({asio::ip::address_v4::loopback(), 0});
    }
    asio::io_context io;
    tcp::acceptor acceptor{io};
};

FakeServer::Options repeating() {
    FakeServer::Options options;
    options.repeat = true;
    return options;
}

} // namespace

// --- What goes out ---

TEST_CASE("a request goes out in one write, its head and its body") {
    FakeServer server({{expect(), reply(with_length(chat_answer))}});
    auto options = unhurried();
    options.api_key = canary;
    Client client(server.url(), plain(), options);
    sends = 0;
    check_answered(client.ask());
    CHECK(sends == 1);
    REQUIRE(server.requests().size() == 1);
    const auto got = server.requests()[0];
    CHECK(got.head == fmt::format("POST /v1/chat/completions HTTP/1.1\r\n"
                                  "Host: 127.0.0.1:{}\r\n"
                                  "User-Agent: evalrt\r\n"
                                  "Accept: application/json, text/event-stream\r\n"
                                  "Connection: keep-alive\r\n"
                                  "Authorization: Bearer {}\r\n"
                                  "Content-Type: application/json\r\n"
                                  "Content-Length: {}\r\n\r\n",
                                  server.port(), canary, chat().body.view().size()));
    CHECK(got.body == chat().body.view());
    CHECK(server.unused() == "");
}

TEST_CASE("without a key there is no Authorization") {
    FakeServer server({{expect(), reply(with_length(chat_answer))}});
    Client client(server.url(), single_use());
    check_answered(client.ask());
    CHECK(!server.requests().at(0).field("authorization"));
    CHECK(server.requests().at(0).field("connection") == "close");
}

TEST_CASE("a body that the row need not fix goes out byte for byte") {
    std::string large = R"({"messages": [{"role": "user", "content": ")";
    for (int i = 0; large.size() < 3 << 20; ++i) large += std::to_string(i) + " ";
    for (const auto& body :
         {std::string("{ \"model\":\"m\" ,\n\t\"x\": 1.50e+01, \"x\": null, \"\\u0041\": \"\xC3\xA4"
                      "\\ud83d\\ude00\", \"stream\" :false }\n"),
          large + "\"}]}"}) {
        FakeServer server({{expect(), reply(with_length(chat_answer))}});
        Client client(server.url());
        Request request;
        request.body = body;
        check_answered(client.ask(request));
        CHECK((server.requests().at(0).body == body)); // not to be printed
        CHECK(client.log == "");
    }
}

TEST_CASE("the endpoint joins the path of the URL") {
    struct Row {
        const char *base, *endpoint, *target;
    };
    for (const auto& [base, endpoint, target] :
         {Row{"", "/v1/chat/completions", "/v1/chat/completions"},
          Row{"/", "/v1/chat/completions", "/v1/chat/completions"},
          Row{"/v1", "/v1/chat/completions", "/v1/chat/completions"},
          Row{"/v1/", "/v1/completions", "/v1/completions"},
          Row{"/proxy/v1", "/v1/chat/completions", "/proxy/v1/chat/completions"},
          Row{"/openai", "/v1/chat/completions", "/openai/chat/completions"},
          Row{"", "/health", "/health"}, Row{"/v1", "/health", "/health"},
          Row{"/proxy/v1", "/tokenize", "/proxy/tokenize"},
          Row{"/openai", "/health", "/openai/health"}}) {
        INFO(base << " and " << endpoint);
        FakeServer server({{expect(), reply(with_length(chat_answer))}});
        Client client(server.url(base));
        auto request = chat();
        request.endpoint = endpoint;
        client.ask(request);
        REQUIRE(server.requests().size() == 1);
        CHECK(server.requests()[0].head.starts_with("POST " + std::string(target) + " HTTP/1.1\r"));
    }
}

TEST_CASE("a request that cannot be sent is rejected without a connection") {
    FakeServer server({{expect()}});
    Client client(server.url());
    for (const auto endpoint :
         {"", "v1/models", "/v1/a b", "/v1/\r\nX-Injected: yes", "/v1/\xC3"}) {
        auto request = chat();
        request.endpoint = endpoint;
        CHECK(outcome(client.ask(request)) == Errc::rejected);
    }
    for (const auto body : {"no JSON", "[1]", "{\"a\": }", "{} {}"}) {
        Request request;
        request.body = body;
        const auto result = client.ask(request);
        CHECK(outcome(result) == Errc::rejected);
        CHECK(contains(result.response.detail, "body"));
        CHECK(result.response.stage == Stage::none);
    }
    CHECK(server.connections() == 0);
}

TEST_CASE("a request without a body is a GET, and what comes is not read") {
    FakeServer server({{expect(), reply(with_length("\n raw, not JSON \n", "")), again()}});
    Client client(server.url());
    Request request;
    request.endpoint = "/v1/models";
    const auto result = client.ask(request);
    CHECK(!result.code);
    CHECK(result.response.body == "\n raw, not JSON \n");
    const auto got = server.requests().at(0);
    CHECK(got.head.starts_with("GET /v1/models HTTP/1.1\r\n"));
    CHECK(!got.field("content-length"));
    CHECK(!got.field("content-type"));
}

TEST_CASE("a plain request goes out as it is, and what comes is not read") {
    FakeServer server(
        {{expect(), reply(with_length("{\"tokens\": [1]}\n", stream_type)), again()}});
    auto row = plain();
    row.streams = true;
    row.ignored = {"n"};
    auto options = unhurried();
    options.model = "configured";
    options.override_model = true;
    Client client(server.url(), row, options);
    Request request;
    request.endpoint = "/tokenize";
    request.body = R"({"prompt": "hi", "n": 3, "model": "m"})";
    request.plain = true;
    const auto result = client.ask(request);
    CHECK(!result.code);
    CHECK(result.response.body == "{\"tokens\": [1]}\n");
    const auto got = server.requests().at(0);
    CHECK(got.head.starts_with("POST /tokenize HTTP/1.1\r\n"));
    CHECK(got.body == request.body.view());
    CHECK(server.requests().size() == 1);
}

TEST_CASE("a text that is held back is not read, costs no time limit, and goes on") {
    std::string stream;
    std::size_t events = 0;
    for (; stream.size() < 24 << 20; ++events) // more than the system's buffers take
        stream += R"(data: {"choices": [{"index": 0, "delta": {"content": ")" +
                  std::string(1000, 'x') + "\"}}]}\n\n";
    stream += R"(data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})"
              "\n\ndata: [DONE]\n\n";
    for (const bool cancelled : {false, true})
        CHECK(with_longer_limits([&](int times) {
            FakeServer server({{expect(), reply(until_close(stream, stream_type))}});
            auto options = unhurried();
            const auto span = options.limits.silence = options.limits.content_silence =
                200ms * times;
            Client client(server.url(), single_use(), options);
            auto request = chat(true);
            request.flow = std::make_shared<TextFlow>();
            const auto flow = request.flow;
            asio::cancellation_signal cancel;
            Result result;
            client.start(result, std::move(request), cancel.slot(), [&](std::string_view) {
                if (result.pieces.size() == 1) flow->hold();
            });
            while (result.pieces.empty() && result.times == 0) client.io.run_one();
            if (result.times > 0) return false; // the silence before the text was too long
            const auto pieces = result.pieces.size();
            CHECK(pieces < 1000);
            client.io.run_for(3 * span);
            CHECK(result.pieces.size() == pieces);
            REQUIRE(result.times == 0);
            if (cancelled)
                cancel.emit(asio::cancellation_type::terminal);
            else
                flow->go();
            client.run();
            CHECK(result.times == 1);
            if (result.response.outcome == Errc::timed_out) return false; // or the one in it
            CHECK(result.response.outcome.value_or(Errc::poison) ==
                  (cancelled ? Errc::cancelled : Errc::poison));
            if (!cancelled) CHECK(result.pieces.size() == events);
            return true;
        }));
}

// --- What comes back ---

TEST_CASE("chat and completions come whole in every framing of HTTP") {
    struct Row {
        Request request;
        std::string type, body;
    };
    for (const auto& [request, type, body] :
         {Row{chat(), json_type, chat_answer}, Row{completion(), json_type, completion_answer},
          Row{chat(true), stream_type, chat_stream},
          Row{completion(true), stream_type, completion_stream}})
        for (const auto& bytes :
             {with_length(body, type), chunked(body, type), until_close(body, type),
              until_close(body, type, "1.0"),
              until_close(body, type + "Connection: close\r\n", "1.0"),
              answer_head(type + "Content-Length: " + std::to_string(body.size()) + "\r\n",
                          "200 OK", "1.0") +
                  body,
              // What real servers add.
              "HTTP/1.1 100 Continue\r\n\r\n" + with_length(body, type),
              "HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" +
                  chunked(body, type),
              with_length(body, type + "Content-Length: " + std::to_string(body.size()) + "\r\n"),
              answer_head(type + "Transfer-Encoding: Chunked\r\n") + "00" +
                  chunk(body).insert(chunk(body).find('\r'), ";name=\"value\"") +
                  "0\r\nTrailer: x\r\n\r\n"}) {
            INFO(bytes);
            FakeServer server({{expect(), reply(bytes)}});
            Client client(server.url());
            const auto result = client.ask(request);
            check_answered(result);
            const bool streamed = type == stream_type;
            CHECK(result.pieces ==
                  (streamed ? std::vector<std::string>{"Gr", "üße"} : std::vector<std::string>{}));
            CHECK(result.response.timing.first_text.has_value() == streamed);
            CHECK(result.response.attempts == 1);
            if (!streamed) CHECK(result.response.body == body);
            CHECK(server.unused() == "");
        }
}

TEST_CASE("a stream that was not asked for, and a body in place of a stream, are understood") {
    FakeServer server({{expect(), reply(chunked(chat_stream, stream_type)), expect(),
                        reply(with_length(chat_answer))}});
    Client client(server.url());
    check_answered(client.ask(chat(false)));
    check_answered(client.ask(chat(true)));
}

TEST_CASE("an answer is the same wherever its bytes are cut") {
    for (const auto& bytes :
         {"HTTP/1.1 100 Continue\r\n\r\n" + chunked(chat_answer), with_length(chat_answer),
          chunked(chat_stream, stream_type), with_length(chat_stream, stream_type)}) {
        FakeServer server({{expect(), reply(bytes), again()}});
        auto options = unhurried();
        options.drain_time = patience;
        Client client(server.url(), plain(), options);
        for (std::size_t cut = 1; cut < bytes.size(); ++cut) {
            INFO("cut at " << cut);
            read_sizes = {cut, 1 << 20};
            const auto result = client.ask();
            read_sizes.clear();
            check_answered(result);
        }
        for (const std::size_t size : {1, 2, 3}) {
            INFO("reads of " << size);
            read_sizes = {size};
            const auto result = client.ask();
            read_sizes.clear();
            check_answered(result);
        }
        CHECK(server.connections() == 1);
    }
    for (const auto& bytes : {chunked(chat_answer), chunked(chat_stream, stream_type)}) {
        FakeServer server({{expect(), slowly(bytes, 1)}});
        Client client(server.url());
        check_answered(client.ask());
        CHECK(server.unused() == "");
    }
}

TEST_CASE("a stream's word that the prompt is computed is handed on, once") {
    const auto told = [](const std::string& comments) {
        FakeServer server(
            {{expect(),
              reply(open_stream({comments, delta("Grüße"), finish, usage, done}) + chunk(""))}});
        Client client(server.url());
        auto request = chat(true);
        std::string seen;
        request.on_computed = [&] { seen += '!'; };
        const auto result = client.ask(request, [&](std::string_view piece) { seen += piece; });
        check_answered(result);
        CHECK(result.pieces == std::vector<std::string>{"Grüße"});
        return seen;
    };
    CHECK(told(": keepalive 200/1001\n\n: keepalive 1000/1001\n\n: keepalive 1001/1001\n\n") ==
          "!Grüße");
    CHECK(told(": keepalive 200/1001\n\n: ping\n\n") == "Grüße");
}

TEST_CASE("pieces of text reach on_text as they come, in order and once") {
    Script script{expect(), reply(open_stream({delta("p0")}))};
    std::vector<std::string> expected{"p0"};
    for (int i = 1; i < 20; ++i) {
        expected.push_back("p" + std::to_string(i));
        script.push_back(gate());
        script.push_back(reply(chunk(delta(expected.back()))));
    }
    script.push_back(reply(chunk(finish + done) + chunk("")));
    FakeServer server({script});
    Client client(server.url());
    const auto result = client.ask(chat(true), [&](std::string_view) { server.go(); });
    CHECK(!result.code);
    CHECK(result.pieces == expected);
    std::string all;
    for (const auto& piece : expected) all += piece;
    CHECK(result.response.text == all);
    CHECK(result.response.timing.last_text >= result.response.timing.first_text);
}

TEST_CASE("what is not text begins with one empty piece") {
    const std::string call = event(
        R"({"choices": [{"index": 0, "delta": {"role": "assistant", "tool_calls": )"
        R"([{"index": 0, "id": "t1", "function": {"name": "f", "arguments": "{\"a\""}}]}}]})");
    const std::string rest = event(R"({"choices": [{"index": 0, "delta": {"tool_calls": )"
                                   R"([{"index": 0, "function": {"arguments": ":1}"}}]}, )"
                                   R"("finish_reason": "tool_calls"}]})");
    const std::string role =
        event(R"({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})");
    const std::string thought =
        event(R"({"choices": [{"index": 0, "delta": {"reasoning": "hm"}}]})");
    FakeServer server({{expect(), reply(chunked(role + call + rest + done, stream_type)), expect(),
                        reply(chunked(thought + thought + delta("a") + finish, stream_type))}});
    Client client(server.url());
    auto result = client.ask(chat(true));
    CHECK(!result.code);
    CHECK(result.pieces == std::vector<std::string>{""});
    CHECK(contains(result.response.body, R"("arguments": "{\"a\":1}")"));
    CHECK(result.response.stage == Stage::text);
    result = client.ask(chat(true));
    CHECK(result.pieces == std::vector<std::string>{"", "a"});
}

TEST_CASE("a receiver of text that throws ends its own request only") {
    FakeServer server({{expect(), reply(chunked(chat_stream, stream_type))}}, repeating());
    Client client(server.url());
    const auto result = client.ask(chat(true), [](std::string_view) { throw 1; });
    CHECK(outcome(result) == Errc::malformed);
    CHECK(client.backend->connections() == 0);
    check_answered(client.ask(chat(true)));
}

TEST_CASE("[DONE] ends the answer at once, though the body never ends") {
    for (const auto& fields : {"Transfer-Encoding: chunked\r\n", ""})
        for (const bool keep : {false, true}) {
            std::string bytes = answer_head(stream_type + fields);
            bytes += *fields ? chunk(chat_stream) : chat_stream;
            FakeServer server({{expect(), reply(bytes), hang()}});
            Client client(server.url(), keep ? plain() : single_use());
            const auto result = client.ask(chat(true));
            check_answered(result);
            CHECK(result.took < soon);
            CHECK(client.backend->connections() == 0); // it was not worth keeping
            CHECK(server.unused() == "");
        }
}

TEST_CASE("a finish reason and the end of the body are a complete stream") {
    const auto body = delta("Gr") + delta("üße") + finish;
    const auto tail = body.substr(0, body.size() - 1); // without its last blank line
    for (const auto& bytes : {chunked(body, stream_type), until_close(body, stream_type),
                              with_length(body, stream_type), until_close(tail, stream_type)}) {
        FakeServer server({{expect(), reply(bytes)}});
        Client client(server.url());
        const auto result = client.ask(chat(true));
        CHECK(!result.code);
        CHECK(result.response.text == "Grüße");
    }
}

TEST_CASE("a stream that ends without a finish reason is truncated") {
    for (const auto& body :
         {delta("Gr") + done, delta("Gr"), done, std::string(": hello\n\n"), std::string()}) {
        INFO(body);
        FakeServer server({{expect(), reply(chunked(body, stream_type))}});
        Client client(server.url());
        CHECK(outcome(client.ask(chat(true))) == Errc::truncated);
    }
    // The connection is cut where the body would have ended: it may have said more.
    FakeServer server({{expect(), reply(open_stream({delta("Gr"), finish}))}});
    Client client(server.url());
    CHECK(outcome(client.ask(chat(true))) == Errc::truncated);
}

TEST_CASE("an error in the middle of a stream keeps the server's words, however it ends") {
    const auto error = event(R"({"error": {"message": "out of memory", "type": "server_error"}})");
    for (const auto& bytes :
         {chunked(delta("Gr") + error, stream_type),
          chunked(delta("Gr") + error + done, stream_type), open_stream({delta("Gr"), error}),
          until_close(delta("Gr") + error, stream_type)}) {
        INFO(bytes);
        FakeServer server({{expect(), reply(bytes)}});
        Client client(server.url());
        const auto result = client.ask(chat(true));
        CHECK(outcome(result) == Errc::rejected);
        CHECK(contains(result.response.detail, "out of memory"));
        CHECK(result.response.stage == Stage::text);
    }
}

TEST_CASE("a status that is no success is classed, with the server's own words") {
    struct Row {
        const char *status, *fields, *body;
        Errc errc;
        const char* words;
        int retry_ms = -1;
        std::optional<bool> should_retry = {};
    };
    const char* const object =
        R"({"error": {"message": "bad thing", "type": "invalid_request_error", "code": null}})";
    const Row rows[] = {
        {"400 Bad Request", "", object, Errc::rejected, "HTTP 400: bad thing"},
        {"400 Bad Request", "",
         R"({"error": {"message": "This model's maximum context length is 8 tokens", "code": 400}})",
         Errc::context_too_long, "maximum context length"},
        {"401 Unauthorized", "", R"({"error": {"message": "no such key"}})", Errc::auth,
         "no such key"},
        {"403 Forbidden", "", R"({"detail": "not for you"})", Errc::auth, "not for you"},
        {"404 Not Found", "", R"({"error": "no model 'x'"})", Errc::rejected, "no model 'x'"},
        {"404 Not Found", "", "Not Found", Errc::rejected, "HTTP 404: Not Found"},
        {"404 Not Found", "", R"({"object": "error", "message": "gone", "code": 404})",
         Errc::rejected, "gone"},
        {"408 Request Timeout", "", "", Errc::rejected, "HTTP 408"},
        {"413 Payload Too Large", "", "<html><body>too large</body></html>", Errc::rejected,
         "HTTP 413: a web page"},
        {"422 Unprocessable Entity", "",
         R"({"detail": [{"loc": ["body"], "msg": "field required"}]})", Errc::rejected,
         "field required"},
        {"429 Too Many Requests", "Retry-After: 2\r\n", object, Errc::rate_limited, "bad thing",
         2000},
        {"429 Too Many Requests", "Retry-After: 9\r\nretry-after-ms: 150.5\r\n", object,
         Errc::rate_limited, "bad thing", 150},
        // Two minutes by the server's clock, which is off.
        {"429 Too Many Requests",
         "Date: Fri, 31 Dec 1999 23:58:00 GMT\r\nRetry-After: Sat, 01 Jan 2000 00:00:00 GMT\r\n",
         object, Errc::rate_limited, "", 120'000},
        {"429 Too Many Requests", "Retry-After: Fri, 31 Dec 1999 23:59:59 GMT\r\n", object,
         Errc::rate_limited, "", 0},
        {"429 Too Many Requests", "retry-after:  -5 \r\nX-Should-Retry: false\r\n", object,
         Errc::rate_limited, "", -1, false},
        {"409 Conflict", "x-should-retry: true\r\n", object, Errc::rejected, "bad thing", -1, true},
        {"500 Internal Server Error", "", "Traceback: boom\n", Errc::rejected,
         "HTTP 500: Traceback: boom"},
        {"503 Service Unavailable", "Retry-After: 1\r\n",
         R"({"error": {"message": "Loading model"}})", Errc::overloaded, "Loading model", 1000},
        {"529 Overloaded", "", R"({"type": "error", "error": {"message": "Overloaded"}})",
         Errc::overloaded, "Overloaded"},
        {"500 Internal Server Error", "", "", Errc::rejected, "HTTP 500: (no words)"},
    };
    for (const auto& row : rows)
        for (const int framing : {0, 1, 2}) {
            INFO(row.status << ", " << row.fields << row.body << ", framing " << framing);
            const std::string fields = json_type + row.fields;
            const std::string body = row.body;
            FakeServer server(
                {{expect(),
                  reply(framing == 0 ? with_length(body, fields, row.status)
                        : framing == 1
                            ? answer_head(fields + "Transfer-Encoding: chunked\r\n", row.status) +
                                  (body.empty() ? "" : chunk(body)) + chunk("")
                            : answer_head(fields, row.status) + body)}});
            Client client(server.url());
            const auto result = client.ask(chat(true));
            CHECK(outcome(result) == row.errc);
            CHECK(result.response.status == std::stoi(row.status));
            CHECK(contains(result.response.detail, row.words));
            CHECK(result.response.retry_after ==
                  (row.retry_ms < 0 ? std::optional<Ms>() : Ms(row.retry_ms)));
            CHECK(result.response.should_retry == row.should_retry);
            CHECK(result.response.stage == Stage::answered);
            CHECK(result.pieces.empty());
        }
}

TEST_CASE("a redirect is not followed, and named") {
    for (const auto status : {"301 Moved Permanently", "302 Found", "307 Temporary Redirect",
                              "308 Permanent Redirect"}) {
        FakeServer elsewhere({{expect(), reply(with_length(chat_answer))}});
        const auto target = elsewhere.url("/v1/chat/completions");
        FakeServer server(
            {{expect(), reply(with_length("", "Location: " + target + "\r\n", status))}});
        auto options = unhurried();
        options.api_key = canary;
        Client client(server.url(), plain(), options);
        const auto result = client.ask();
        CHECK(outcome(result) == Errc::rejected);
        CHECK(contains(result.response.detail, target));
        CHECK(elsewhere.connections() == 0);
        CHECK(server.requests().size() == 1);
    }
}

// --- Every fault, with and without a stream, on a fresh connection and on a kept one ---

namespace {

struct Fault {
    std::string name;
    Script script;               // from the request on
    std::optional<Errc> outcome; // nothing: the answer is taken all the same
    Stage stage = Stage::answered;
};

std::vector<Fault> faults() {
    std::vector<Fault> all;
    const auto add = [&](std::string name, Script script, std::optional<Errc> errc,
                         Stage stage = Stage::answered) {
        all.push_back({std::move(name), std::move(script), errc, stage});
    };
    const auto coded = [](std::string_view fields, const std::string& text) {
        return answer_head(json_type + std::string(fields)) + text;
    };
    const std::string chunks = "Transfer-Encoding: chunked\r\n";
    const std::string body = chunk(chat_answer) + chunk("");
    const auto whole = with_length(chat_answer);
    const auto half = whole.substr(0, whole.size() / 2);
    const auto begun = open_stream({delta("Gr")});
    const Script comments{reply(begun), reply(chunk(": keepalive\n\n")), pause(5ms), over(2)};
    const Script endless{reply("HTTP/1.1 200 OK\r\n"), reply("X: y\r\n"), pause(5ms), over(2)};
    std::string many;
    for (int i = 0; i < 5; ++i) many += "HTTP/1.1 102 Processing\r\n\r\n";
    std::string flood;
    for (int i = 0; i < 1000; ++i) flood += "HTTP/1.1 102 Processing\r\n\r\n";

    add("never an answer", {hang()}, Errc::timed_out, Stage::sent);
    add("closed", {}, Errc::unreachable, Stage::sent);
    add("reset", {reset()}, Errc::unreachable, Stage::sent);
    add("byte by byte", {slowly(whole, 1)}, {});
    add("headers that never end", endless, Errc::timed_out);
    add("closed in the headers", {reply("HTTP/1.1 200 OK\r\nConte")}, Errc::truncated);
    add("closed in the body", {reply(half)}, Errc::truncated);
    add("reset in the body", {reply(half), gate(), reset()}, Errc::truncated);
    add("silent in the body", {reply(half), hang()}, Errc::timed_out);
    add("closed in a stream", {reply(begun)}, Errc::truncated, Stage::text);
    add("reset in a stream", {reply(begun), gate(), reset()}, Errc::truncated, Stage::text);
    add("silent in a stream", {reply(begun), hang()}, Errc::timed_out, Stage::text);
    add("comments for ever", comments, Errc::timed_out, Stage::text);
    add("[DONE], and no end", {reply(open_stream({chat_stream})), hang()}, {}, Stage::text);
    add("an error in a stream",
        {reply(begun + chunk(event(R"({"error": {"message": "boom"}})")) + chunk(""))},
        Errc::rejected, Stage::text);

    add("a length too long, then closed", {reply(coded("Content-Length: 9999\r\n", chat_answer))},
        Errc::truncated);
    add("a length too long, then silent",
        {reply(coded("Content-Length: 9999\r\n", chat_answer)), hang()}, Errc::timed_out);
    add("a length too short", {reply(coded("Content-Length: 99\r\n", chat_answer)), hang()},
        Errc::malformed);
    add("two answers in one", {reply(whole + whole), hang()}, {});
    add("one answer of information", {reply("HTTP/1.1 100 Continue\r\n\r\n" + whole)}, {});
    add("some answers of information", {reply(many + whole)}, {});
    add("only answers of information", {reply(flood), hang()}, Errc::malformed);
    add("headers over the limit",
        {reply(coded("X: " + std::string(70 << 10, 'x') + "\r\nContent-Length: 2\r\n", "{}")),
         hang()},
        Errc::malformed);
    add("chunks whose lines end in LF", {reply(coded(chunks, "2\n{}\n0\n\n")), hang()},
        Errc::timed_out);
    add("a chunk's size that never ends", {reply(coded(chunks, std::string(1 << 20, '0'))), hang()},
        Errc::malformed);
    add("a chunk of 2^64-1 bytes, then closed",
        {reply(coded(chunks, "FFFFFFFFFFFFFFFF\r\n{} \r\n0\r\n\r\n"))}, Errc::truncated);

    const auto malformed = [&](std::string name, std::string bytes) {
        add(std::move(name), {reply(std::move(bytes)), half_close(), hang()}, Errc::malformed);
    };
    // What the body is cannot be known.
    malformed("coding xchunked", coded("Transfer-Encoding: xchunked\r\n", chat_answer));
    malformed("coding gzip", coded("Transfer-Encoding: gzip\r\n", chat_answer));
    malformed("coding identity", coded("Transfer-Encoding: identity\r\n", chat_answer));
    malformed("coding gzip, chunked", coded("Transfer-Encoding: gzip, chunked\r\n", body));
    malformed("coding chunked, identity", coded("Transfer-Encoding: chunked, identity\r\n", body));
    malformed("codings chunked and identity",
              coded(chunks + "Transfer-Encoding: identity\r\n", body));
    malformed("codings gzip and chunked", coded("Transfer-Encoding: gzip\r\n" + chunks, body));
    malformed("an empty coding", coded("Transfer-Encoding: \r\n", chat_answer));
    malformed("length and coding", coded("Content-Length: 10\r\n" + chunks, body));
    malformed("coding and length", coded(chunks + "Content-Length: 10\r\n", body));
    malformed("two lengths", coded("Content-Length: 3\r\nContent-Length: 4\r\n", chat_answer));
    malformed("length +3", coded("Content-Length: +3\r\n", "{} "));
    malformed("length -1", coded("Content-Length: -1\r\n", "{}"));
    malformed("length over 2^64", coded("Content-Length: 99999999999999999999\r\n", "{}"));
    for (const auto size : {"0x3", "+3", " 3", "3\v", "11111111111111111", "2", "", "-1", "g"})
        malformed("chunk size '" + std::string(size) + "'",
                  coded(chunks, size + std::string("\r\n{} \r\n0\r\n\r\n")));
    for (const auto bytes :
         {"HTTP/2.0 200 OK\r\n\r\n{}", "HTTP/1.1 2000 OK\r\n\r\n{}", "HTTP/1.1 OK\r\n\r\n{}",
          "\r\nHTTP/1.1 200 OK\r\n\r\n{}", "HTTP/1.1 200 OK\nContent-Length: 2\n\n{}",
          "HTTP/1.1 200\r\n\r\n{}", "ICY 200 OK\r\n\r\n", "HTTP/1.1 200 OK\r\nBad Name: x\r\n\r\n",
          // Other protocols, by mistake; HTTP/0.9 is one of them.
          "SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n", "-ERR unknown\r\n",
          "<html><body>hello</body></html>\n", "{\"error\": \"HTTP/0.9\"}"})
        malformed(bytes, bytes);
    malformed("a TLS alert", std::string("\x15\x03\x01\x00\x02\x02\x46", 7));
    malformed("a zero byte in a field",
              coded(std::string("X: a\0b\r\n", 8) + "Content-Length: 2\r\n", "{}"));

    for (int status = 300; status < 600; ++status)
        add("status " + std::to_string(status),
            {reply(with_length(R"({"error": {"message": "no"}})",
                               json_type + "Location: http://127.0.0.1:1/\r\n",
                               std::to_string(status) + " No"))},
            status == 401 || status == 403   ? Errc::auth
            : status == 429                  ? Errc::rate_limited
            : status == 503 || status == 529 ? Errc::overloaded
                                             : Errc::rejected);
    return all;
}

} // namespace

TEST_CASE("every fault ends its request once, in its class, in its time, and leaves nothing") {
    const auto before = open_files();
    const auto play = [](const Fault& fault, bool stream, bool kept, int times) {
        auto options = unhurried();
        const bool late = fault.outcome == Errc::timed_out;
        const Ms span = 150ms * times;
        if (late) options.limits = {span, span, span, 2 * span, Ms(0)};
        Script script{expect()}, first{expect(), reply(with_length(chat_answer))};
        script.insert(script.end(), fault.script.begin(), fault.script.end());
        first.insert(first.end(), script.begin(), script.end());
        FakeServer server({kept ? first : script, script}, repeating());
        Client client(server.url(), plain(), options);
        if (kept) {
            const auto warm = client.ask(chat(stream));
            if (late && warm.response.outcome == Errc::timed_out) return false;
            check_answered(warm);
        }
        on_bytes = [&] { server.go(); };
        const auto result = client.ask(chat(stream));
        on_bytes = {};
        // The limit was reached before what comes in front of the fault was there.
        if (late && result.response.outcome == Errc::timed_out &&
            result.response.stage < fault.stage)
            return false;
        CHECK(result.response.outcome == fault.outcome);
        CHECK(result.response.stage == fault.stage);
        CHECK(result.response.attempts == 1);
        if (!fault.outcome) check_answered(result);
        if (late) CHECK(result.took >= span);
        CHECK(result.took < (late ? 2 * span : Ms(0)) + soon);
        // An error as an answer is a whole answer: only then may its connection stay.
        CHECK(client.backend->connections() <= 1);
        if (fault.outcome && !fault.name.starts_with("status ") &&
            fault.name != "an error in a stream")
            CHECK(client.backend->connections() == 0);
        // A kept connection that closes without a byte is tried once more, afresh.
        const bool again = kept && fault.outcome == Errc::unreachable;
        CHECK(server.connections() == (again ? 2 : 1));
        client.backend.reset();
        CHECK(server.quiet());
        return true;
    };
    for (const auto& fault : faults())
        for (const bool stream : {false, true})
            for (const bool kept : {false, true}) {
                // Each of 300 statuses in every combination would say little more.
                if (fault.name.starts_with("status ") && stream != kept) continue;
                INFO(fault.name << ", stream " << stream << ", kept connection " << kept);
                CHECK(with_longer_limits(
                    [&](int times) { return play(fault, stream, kept, times); }));
            }
    CHECK(eventually([&] { return open_files() == before; }));
}

TEST_CASE("JSON that is made to break its reader does not") {
    // "part" becomes "message", or in a stream "delta".
    const auto answer = [](std::string_view more, std::string_view text = "a") {
        return R"({"choices": [{"index": 0, "part": {"content": ")" + std::string(text) +
               R"("}, "finish_reason": "stop"}])" + std::string(more) + "}";
    };
    const auto deep = [](std::size_t depth) {
        return std::string(depth, '[') + std::string(depth, ']');
    };
    struct Row {
        std::string name, json;
        std::optional<Errc> errc;
        std::string text;
    };
    for (const auto& [name, json, errc, text] :
         {Row{"200 deep", answer(R"(, "x": )" + deep(200)), {}, "a"},
          Row{"300 deep", answer(R"(, "x": )" + deep(300)), Errc::malformed, ""},
          Row{"2,000,000 deep", answer(R"(, "x": )" + deep(2'000'000)), Errc::malformed, ""},
          Row{"5,000,000 open", answer(R"(, "x": )" + std::string(5'000'000, '[')), Errc::malformed,
              ""},
          Row{"2,000,000 objects deep",
              [] {
                  std::string open;
                  for (int i = 0; i < 2'000'000; ++i) open += R"({"a":)";
                  return open;
              }(),
              Errc::malformed, ""},
          Row{"a name twice: the first counts, as in the body",
              answer(R"(, "choices": [{"index": 0, "part": {"content": "b"}}])"),
              {},
              "a"},
          Row{"a lone surrogate", answer("", "x\\ud800y"), {}, "x\uFFFDy"},
          Row{"a surrogate pair the wrong way round",
              answer("", "\\ude00\\ud83d"),
              {},
              "\uFFFD\uFFFD"},
          Row{"no UTF-8", answer("", "x\xFF\xED\xA0\x80y"), {}, "x\uFFFD\uFFFD\uFFFD\uFFFDy"},
          Row{"NaN and infinity", answer(R"(, "x": [NaN, -Infinity, 1e999])"), {}, "a"},
          Row{"a wrong number in what nobody reads", answer(R"(, "x": 01)"), Errc::malformed, ""},
          Row{"a wrong word in what nobody reads", answer(R"(, "x": tru)"), Errc::malformed, ""},
          Row{"a second document", answer("") + answer("", "b"), Errc::malformed, ""},
          Row{"a byte order mark", "\xEF\xBB\xBF" + answer(""), {}, "a"}})
        for (const bool stream : {false, true}) {
            INFO(name << ", stream " << stream);
            auto body = json;
            if (const auto at = body.find("part"); at != body.npos)
                body.replace(at, 4, stream ? "delta" : "message");
            FakeServer server({{expect(), reply(stream ? chunked(event(body), stream_type)
                                                       : with_length(body))}});
            Client client(server.url());
            const auto result = client.ask(chat(stream));
            CHECK(result.response.outcome == errc);
            if (!errc) CHECK(result.response.text == text);
            CHECK(result.took < soon);
        }
    // What goes out is held to the same.
    FakeServer server({{expect(), reply(with_length(chat_answer))}}, repeating());
    Client client(server.url());
    Request request;
    request.body = R"({"prompt": )" + deep(300) + "}";
    CHECK(outcome(client.ask(request)) == Errc::rejected);
    request.body = R"({"prompt": )" + deep(2'000'000) + "}";
    CHECK(outcome(client.ask(request)) == Errc::rejected);
    CHECK(server.connections() == 0);
}

TEST_CASE("no name of a model becomes a header") {
    FakeServer server({{expect(), reply(with_length(chat_answer))}});
    auto options = unhurried();
    options.model = "m\r\nX-Injected: yes\r\n\r\n\"}";
    options.override_model = true;
    Client client(server.url(), plain(), options);
    check_answered(client.ask());
    CHECK(!server.requests().at(0).field("x-injected"));
    CHECK(contains(server.requests().at(0).body, R"("m\r\nX-Injected: yes\r\n\r\n\"}")"));
}

TEST_CASE("words of another protocol are shown") {
    FakeServer server({{expect(), reply("SSH-2.0-OpenSSH_9.2p1\r\n\x01"), hang()}});
    Client client(server.url());
    const auto result = client.ask();
    CHECK(result.response.detail.ends_with(": SSH-2.0-OpenSSH_9.2p1"));
    CHECK(result.took < soon); // at once, though nothing more comes
}

TEST_CASE("a body that is no answer is malformed") {
    for (const std::string body :
         {"", "  \n", "<html></html>", "not JSON", "[]", "{}", R"({"choices": []})",
          R"({"choices": [{"message": {"content": "a"}}]} x)", R"({"choices": )"}) {
        INFO(body);
        FakeServer server({{expect(), reply(with_length(body))}});
        Client client(server.url());
        CHECK(outcome(client.ask()) == Errc::malformed);
    }
    FakeServer server(
        {{expect(), reply(chunked(delta("a") + event("{oops") + done, stream_type))}});
    Client client(server.url());
    const auto result = client.ask(chat(true));
    CHECK(outcome(result) == Errc::malformed);
    CHECK(contains(result.response.detail, "oops"));
}

// --- Limits ---

TEST_CASE("headers up to the limit are read, above it they are malformed") {
    for (const std::size_t size : {1000, 60 << 10, 66 << 10, 130 << 10, 10 << 20}) {
        std::string fields = json_type;
        while (fields.size() < size)
            fields +=
                "X-Trace-" + std::to_string(fields.size()) + ": " + std::string(100, 'x') + "\r\n";
        fields.resize(fields.find("\r\n", size - 120) + 2);
        INFO(fields.size() << " bytes");
        FakeServer server({{expect(), reply(with_length(chat_answer, fields)), hang()}});
        Client client(server.url(), single_use());
        const auto result = client.ask();
        if (size < 64 << 10) {
            check_answered(result);
        } else {
            CHECK(outcome(result) == Errc::malformed);
            CHECK(contains(result.response.detail, "headers are over the limit"));
        }
    }
}

TEST_CASE("an event of 5 MB is delivered, in linear time") {
    // Of this thread, which others do not lengthen.
    const auto processor_time = [] {
        timespec now{};
        ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
        return double(now.tv_sec) + double(now.tv_nsec) / 1e9;
    };
    const auto deliver = [&](std::size_t size, std::size_t read) {
        const std::string text(size, 'x');
        double best = 1e9;
        for (int i = 0; i < 3; ++i) {
            FakeServer server(
                {{expect(), reply(open_stream({delta(text) + finish + done}) + chunk(""))}});
            Client client(server.url());
            read_sizes = {read};
            const auto begin = processor_time();
            const auto result = client.ask(chat(true));
            best = std::min(best, processor_time() - begin);
            read_sizes.clear();
            CHECK(!result.code);
            CHECK((result.response.text == text));
            CHECK(result.pieces.size() == 1);
        }
        return best;
    };
    for (const std::size_t read : {std::size_t(500), std::size_t(1) << 20}) {
        const auto small = deliver(5 << 17, read), large = deliver(5 << 20, read);
        CHECK(large < 30 * std::max(small, 0.02)); // 8 times where it is linear, else 64
    }
}

TEST_CASE("an event over the limit ends a stream early") {
    auto options = unhurried();
    options.event_limit = 1 << 20;
    const std::string text((1 << 20) - 200, 'x');
    for (const bool over : {false, true}) {
        FakeServer server(
            {{expect(),
              reply(until_close(delta(text + (over ? std::string(300, 'y') : "")) + finish + done,
                                stream_type))}});
        Client client(server.url(), plain(), options);
        const auto result = client.ask(chat(true));
        CHECK(result.response.outcome == (over ? std::optional(Errc::malformed) : std::nullopt));
        if (over) CHECK(contains(result.response.detail, "event"));
    }
    // Without any line end, and with lines but no end of the event: most of it is never taken.
    for (const auto& endless : {std::string(64 << 20, 'x'), [] {
                                    std::string lines;
                                    while (lines.size() < 64 << 20)
                                        lines += "data: " + std::string(1000, 'x') + "\n";
                                    return lines;
                                }()}) {
        FakeServer server({{expect(), reply(until_close(endless, stream_type)), hang()}});
        Client client(server.url(), plain(), options);
        const auto result = client.ask(chat(true));
        CHECK(outcome(result) == Errc::malformed);
        CHECK(contains(result.response.detail, "event"));
        CHECK(client.backend->connections() == 0);
        CHECK(contains(server.unused(), "ended at step 1")); // in the middle of its reply
    }
}

TEST_CASE("a body over the limit is malformed and not read to its end") {
    auto options = unhurried();
    options.body_limit = 1 << 20;
    const std::string large = R"({"choices": [")" + std::string(64 << 20, 'x') + "\"]}";
    for (const auto& bytes :
         {with_length(large), until_close(large),
          answer_head(json_type + "Transfer-Encoding: chunked\r\n") + chunk(large) + chunk("")}) {
        FakeServer server({{expect(), reply(bytes), hang()}});
        Client client(server.url(), plain(), options);
        const auto result = client.ask();
        CHECK(outcome(result) == Errc::malformed);
        CHECK(contains(result.response.detail, "limit of 1048576 bytes"));
        CHECK(contains(server.unused(), "ended at step 1"));
    }
    // A stream of small events.
    std::string events;
    while (events.size() < 64 << 20) events += delta(std::string(1000, 'x'));
    FakeServer server({{expect(), reply(until_close(events, stream_type)), hang()}});
    Client client(server.url(), plain(), options);
    const auto result = client.ask(chat(true));
    CHECK(outcome(result) == Errc::malformed);
    CHECK(contains(result.response.detail, "answer is over the limit"));
    CHECK(contains(server.unused(), "ended at step 1"));
}

TEST_CASE("a chunk's head and a trailer have an end") {
    const auto head = answer_head(json_type + "Transfer-Encoding: chunked\r\n");
    for (const auto& bytes :
         {head + std::string(64 << 20, '0'), head + "5;" + std::string(64 << 20, 'x'),
          head + chunk(chat_answer) + "0\r\nX: " + std::string(64 << 20, 'x')}) {
        FakeServer server({{expect(), reply(bytes), hang()}});
        Client client(server.url());
        const auto result = client.ask();
        CHECK(outcome(result) == Errc::malformed);
        CHECK(result.took < soon);
        CHECK(contains(server.unused(), "ended at step 1"));
    }
}

// --- What breaks ---

TEST_CASE("nothing listens: unreachable, with what to do") {
    const ClosedPort closed;
    const auto port = std::to_string(closed.acceptor.local_endpoint().port());
    for (const auto host : {"127.0.0.1", "localhost"}) {
        Client client("http://" + std::string(host) + ":" + port + "/v1");
        const auto result = client.ask();
        CHECK(outcome(result) == Errc::unreachable);
        CHECK(result.response.stage == Stage::none);
        if (host == std::string_view("127.0.0.1"))
            CHECK(result.response.cause == asio::error::connection_refused);
        CHECK(contains(result.response.detail, host + (":" + port)));
        CHECK(client.backend->connections() == 0);
    }
    Client client("http://no-such-host.invalid/v1");
    const auto result = client.ask();
    CHECK(outcome(result) == Errc::unreachable);
    CHECK(contains(result.response.detail, "no-such-host.invalid"));
}

TEST_CASE("a close or a reset before any byte of an answer is unreachable") {
    struct Row {
        Script script;
        bool empty_close;
    };
    for (const auto& [script, empty_close] :
         {Row{{expect()}, true}, Row{{expect(), half_close(), hang()}, true},
          Row{{expect(), reset()}, false}}) {
        for (const auto& row : {plain(), single_use()}) {
            FakeServer server({script}, repeating());
            Client client(server.url(), row);
            const auto result = client.ask();
            CHECK(outcome(result) == Errc::unreachable);
            CHECK(result.response.stage == Stage::sent);
            if (empty_close)
                CHECK(result.response.cause == asio::error::eof);
            else
                CHECK(result.response.cause != error_code());
            CHECK(client.backend->connections() == 0);
            CHECK(server.connections() == 1);
        }
    }
}

TEST_CASE("wherever the answer is cut, the request fails exactly once") {
    struct Row {
        std::string bytes;
        bool stream;
        std::size_t enough; // bytes after which nothing is missing
    };
    const auto whole = with_length(chat_answer), pieces = chunked(chat_answer);
    const auto events = chunked(chat_stream, stream_type);
    const auto open_end = until_close(chat_stream, stream_type);
    for (const auto& [bytes, stream, enough] :
         {Row{whole, false, whole.size()}, Row{pieces, false, pieces.size()},
          // All but the last chunk's line end and the end of the body.
          Row{events, true, events.size() - 7},
          // All but the blank line after the finish reason.
          Row{open_end, true, open_end.find(finish) + finish.size() - 2}})
        for (const auto& [abort, kept] :
             {std::pair(false, false), {true, false}, {false, true}, {true, true}}) {
            std::size_t n = kept ? 1 : 0; // without a byte it is tried again
            const std::string where = kept ? " on a kept connection" : "";
            for (; n <= bytes.size(); ++n) {
                INFO("after " << n << " of " << bytes.size() << " bytes, reset " << abort << where);
                Script script{expect(), reply(bytes.substr(0, n))};
                if (kept) script.insert(script.begin(), {expect(), reply(whole)});
                if (abort) script.push_back(reset());
                FakeServer server({script, {expect()}});
                Client client(server.url());
                if (kept) check_answered(client.ask());
                const auto result = client.ask(chat(stream));
                if (!result.code) break;
                const auto errc = outcome(result);
                if (n == 0)
                    CHECK(errc == Errc::unreachable);
                else if (!abort)
                    CHECK(errc == Errc::truncated);
                else // what has come may be lost with the connection
                    CHECK((errc == Errc::truncated || errc == Errc::unreachable));
                CHECK(client.backend->connections() == 0);
                CHECK(result.took < soon);
            }
            if (!abort)
                CHECK(n == enough);
            else // a reset is no end of a body
                CHECK((n >= enough && n <= bytes.size()));
        }
}

TEST_CASE("after an informational answer a close is no empty close") {
    FakeServer server({{expect(), reply("HTTP/1.1 100 Continue\r\n\r\n")}});
    Client client(server.url());
    const auto result = client.ask();
    CHECK(outcome(result) == Errc::truncated);
    CHECK(result.response.stage == Stage::answered);
}

TEST_CASE("an answer that comes before the request is read, and a close, are understood") {
    // The body is larger than all buffers: it cannot be written, yet there is an answer.
    FakeServer server(
        {{reply(with_length(R"({"error": "too large"})", json_type, "413 Payload Too Large")),
          pause(50ms)}});
    Client client(server.url());
    Request request;
    request.body = R"({"prompt": ")" + std::string(32 << 20, 'x') + "\"}";
    const auto result = client.ask(request);
    CHECK(outcome(result) == Errc::rejected);
    CHECK(result.response.status == 413);
    CHECK(contains(result.response.detail, "too large"));
    CHECK(client.backend->connections() == 0);
}

// --- Time ---

TEST_CASE("every phase of an exchange has its limit") {
    constexpr Ms span = 80ms;
    struct Row {
        std::string name;
        Ms TimeLimits::*limit;
        Script script;
        std::string words;
    };
    const Script comments{reply(chunk(": keepalive\n\n")), pause(5ms), over(2)};
    const Script drip{reply(chunk(delta("x"))), pause(5ms), over(2)};
    const auto after = [](Script script, const Script& more) {
        script.insert(script.end(), more.begin(), more.end());
        return script;
    };
    const auto begun = open_stream({delta("Gr")});
    for (const auto& [name, limit, script, words] :
         {Row{"first byte", &TimeLimits::first_byte, {expect(), hang()}, "no first byte"},
          Row{"write", &TimeLimits::first_byte, {gate()}, "no first byte"},
          Row{"headers",
              &TimeLimits::first_byte,
              {expect(), reply("HTTP/1.1 200 OK\r\nConte"), hang()},
              "no first byte"},
          Row{"chunks whose lines end in LF only",
              &TimeLimits::silence,
              {expect(),
               reply(answer_head(json_type + "Transfer-Encoding: chunked\r\n") + "2\n{}\n0\n\n"),
               hang()},
              "no further byte"},
          Row{"silence in a body",
              &TimeLimits::silence,
              {expect(), reply(with_length(chat_answer).substr(0, 150)), hang()},
              "no further byte"},
          Row{"silence before a body",
              &TimeLimits::silence,
              {expect(), reply(answer_head(json_type + "Content-Length: 9\r\n")), hang()},
              "no further byte"},
          Row{"silence in a stream",
              &TimeLimits::silence,
              {expect(), reply(begun), hang()},
              "no further byte"},
          Row{"comments only", &TimeLimits::content_silence,
              after({expect(), reply(begun)}, comments), "no further token"},
          Row{"comments from the start", &TimeLimits::content_silence,
              after({expect(), reply(open_stream({}))}, comments), "no further token"},
          Row{"whole, in a stream that goes on", &TimeLimits::whole,
              after({expect(), reply(begun)}, drip), "no complete answer"},
          Row{"whole, before the first byte",
              &TimeLimits::whole,
              {expect(), hang()},
              "no complete answer"}}) {
        INFO(name);
        FakeServer server({script});
        auto options = unhurried();
        options.limits.*limit = span;
        Client client(server.url(), plain(), options);
        auto request = chat(true);
        if (name == "write")
            request.body = R"({"stream": true, "prompt": ")" + std::string(32 << 20, 'x') + "\"}";
        const auto result = client.ask(request);
        CHECK(outcome(result) == Errc::timed_out);
        CHECK(contains(result.response.detail, words));
        CHECK(contains(result.response.detail, "within 0.08 s"));
        CHECK(result.took >= span);
        CHECK(result.took < span + soon);
        CHECK(client.backend->connections() == 0);
        if (script.back().kind == Step::Kind::hang) CHECK(server.unused() == "");
        server.go();
        CHECK(server.quiet());
    }
}

TEST_CASE("connecting has its limit: backlog, handshake, name look-up") {
    FakeServer::Options deaf;
    deaf.accept = false;
    deaf.backlog = 0;
    FakeServer full({}, deaf);
    FakeServer silent({{hang()}});
    for (const auto& url :
         {full.url(), "https" + silent.url().substr(4), std::string("http://slow.test:1/v1")}) {
        INFO(url);
        auto options = unhurried();
        options.limits.connect = 80ms;
        Client client(url, plain(), options);
        const auto result = client.ask();
        CHECK(outcome(result) == Errc::timed_out);
        CHECK(contains(result.response.detail, "no connection within 0.08 s"));
        CHECK(result.response.stage == Stage::none);
        CHECK(result.took >= 80ms);
        CHECK(result.took < soon);
        CHECK(client.backend->connections() == 0);
    }
    CHECK(silent.quiet());
    CHECK(full.connections() == 0);
}

TEST_CASE("time limits do not pass while the answer comes") {
    CHECK(with_longer_limits([](int times) {
        Script script{expect(), reply(open_stream({}))};
        for (int i = 0; i < 30; ++i) {
            script.push_back(pause(10ms * times));
            script.push_back(reply(chunk(delta("x"))));
        }
        script.push_back(reply(chunk(finish)));
        script.push_back(reply(chunk("")));
        FakeServer server({script});
        auto options = unhurried();
        const Ms span = 150ms * times;
        options.limits = {span, span, span, span, 2 * patience};
        Client client(server.url(), plain(), options);
        const auto result = client.ask(chat(true));
        if (result.response.outcome == Errc::timed_out) return false;
        CHECK(!result.code);
        CHECK(result.took >= 2 * span);
        return true;
    }));
}

TEST_CASE("a request can be cancelled in any phase, with any type") {
    FakeServer::Options deaf;
    deaf.accept = false;
    deaf.backlog = 0;
    FakeServer full({}, deaf);
    auto paced = single_use();
    paced.backlog = 1;
    paced.accept_interval = 2 * patience;
    const std::string large = R"({"prompt": ")" + std::string(32 << 20, 'x') + "\"}";
    struct Row {
        std::string name;
        Script script;
    };
    const auto once = with_length(chat_answer);
    for (const auto type : {asio::cancellation_type::terminal, asio::cancellation_type::partial,
                            asio::cancellation_type::total, asio::cancellation_type::all})
        for (const auto& [name, script] :
             {Row{"at once", {expect(), hang()}}, Row{"connect", {hang()}},
              Row{"handshake", {hang()}}, Row{"look-up", {hang()}}, Row{"pace", {expect(), hang()}},
              Row{"write", {gate()}}, Row{"first byte", {expect(), hang()}},
              Row{"headers", {expect(), reply("HTTP/1.1 200"), hang()}},
              Row{"body", {expect(), reply(once.substr(0, once.size() - 9)), hang()}},
              Row{"stream", {expect(), reply(open_stream({delta("a")})), hang()}},
              Row{"second on a kept connection", {expect(), reply(once), expect(), hang()}}}) {
            INFO(name << ", type " << int(type));
            FakeServer server({script});
            Client client(name == "connect"     ? full.url()
                          : name == "handshake" ? "https" + server.url().substr(4)
                          : name == "look-up"   ? "http://slow.test:1/v1"
                                                : server.url(),
                          name == "pace" ? paced : plain());
            if (name.starts_with("second")) check_answered(client.ask());
            Result first;
            if (name == "pace") client.start(first); // takes the only place
            Request request = chat();
            if (name == "write") request.body = large;
            Result result;
            asio::cancellation_signal signal, first_signal;
            client.start(result, request, signal.slot());
            asio::steady_timer timer(client.io, name == "at once" ? 0ms : 30ms);
            if (name == "at once")
                signal.emit(type);
            else
                timer.async_wait([&](error_code) { signal.emit(type); });
            if (name == "pace") {
                while (result.times == 0) client.io.run_one();
                client.backend.reset();
                server.go();
            } else {
                client.run();
                CHECK(client.backend->connections() == 0);
            }
            CHECK(result.times == 1);
            CHECK(result.code == asio::error::operation_aborted);
            CHECK(result.response.outcome == Errc::cancelled);
            CHECK(result.took < soon);
            if (name == "pace") { // the first one still runs
                running = 0;
                continue;
            }
            server.go();
            CHECK(server.quiet());
        }
}

TEST_CASE("a request that is cancelled before it has begun is not sent") {
    FakeServer server({{expect(), reply(with_length(chat_answer)), again()}}, repeating());
    auto paced = single_use();
    paced.backlog = 1;
    paced.accept_interval = 2 * patience;
    for (const auto& row : {plain(), paced}) {
        Client client(server.url(), row);
        check_answered(client.ask()); // there is a kept connection, or a pause to come
        const auto before = server.requests().size();
        Result result;
        asio::cancellation_signal signal;
        client.start(result, chat(), signal.slot());
        signal.emit(asio::cancellation_type::total);
        client.run();
        CHECK(result.times == 1);
        CHECK(result.response.outcome == Errc::cancelled);
        CHECK(result.took < soon);
        CHECK(server.requests().size() == before);
    }
}

TEST_CASE("a signal after the completion reaches nothing") {
    FakeServer server(
        {{expect(), reply(open_stream({delta("Gr"), delta("üße"), finish, usage, done})), gate(),
          reply(chunk("")), again()}},
        repeating());
    auto options = unhurried();
    options.drain_time = patience;
    Client client(server.url(), plain(), options);
    asio::cancellation_signal signal;
    for (int i = 0; i < 5; ++i) {
        Result result;
        client.start(result, chat(true), signal.slot());
        client.io.restart();
        while (result.times == 0 && client.io.run_one() > 0) {}
        signal.emit(asio::cancellation_type::all); // the connection still waits for its end
        server.go();
        client.run();
        check_answered(result);
        CHECK(result.times == 1);
        signal.emit(asio::cancellation_type::all);
    }
    CHECK(server.connections() == 1);
}

TEST_CASE("text may cancel its own request, and an answer ask the next one") {
    FakeServer server({{expect(), reply(with_length(chat_stream, stream_type)), again()}},
                      repeating());
    auto options = unhurried();
    options.drain_time = patience;
    Client client(server.url(), plain(), options);
    Result result;
    asio::cancellation_signal signal;
    client.start(result, chat(true), signal.slot(),
                 [&](std::string_view) { signal.emit(asio::cancellation_type::terminal); });
    client.run();
    CHECK(result.times == 1);
    CHECK(result.response.outcome == Errc::cancelled);
    CHECK(result.pieces.size() == 1);

    int left = 20;
    std::function<void()> next = [&] {
        client.backend->async_complete(chat(true), {}, [&](error_code ec, Response) {
            CHECK(!ec);
            if (--left > 0) next();
        });
    };
    next();
    client.run();
    CHECK(left == 0);
    CHECK(server.connections() <= 3);
}

TEST_CASE("a handler runs on its own executor, and never inside the call that asks") {
    FakeServer server({{expect(), reply(with_length(chat_answer)), again()}}, repeating());
    Client client(server.url());
    check_answered(client.ask()); // there is a kept connection
    asio::io_context other;
    int here = 0, there = 0;
    asio::post(client.io, [&] {
        for (const auto* const endpoint : {"/v1/chat/completions", "no path"}) {
            auto request = chat();
            request.endpoint = endpoint;
            client.backend->async_complete(request, {},
                                           [&](error_code, const Response&) { ++here; });
            client.backend->async_complete(
                request, {},
                asio::bind_executor(other.get_executor(),
                                    [&](error_code, const Response&) { ++there; }));
        }
        CHECK(here == 0);
    });
    client.run();
    CHECK(here == 2);
    CHECK(there == 0);
    other.run();
    CHECK(there == 2);
}

TEST_CASE("a handler that throws, or ends the backend, leaves nothing behind") {
    FakeServer server({{expect(), reply(with_length(chat_answer)), again()}}, repeating());
    for (const auto& row : {plain(), single_use()}) {
        Client client(server.url(), row);
        check_answered(client.ask());
        const auto kept = client.backend->connections();
        CHECK(kept == (row.keep_alive ? 1 : 0));
        client.backend->async_complete(
            chat(), {}, [](error_code, const Response&) { throw std::runtime_error("out"); });
        client.io.restart();
        CHECK_THROWS_WITH(client.io.run_for(patience), "out");
        CHECK(client.backend->connections() == kept);
        check_answered(client.ask());
        bool ended = false;
        client.backend->async_complete(chat(), {}, [&](error_code ec, const Response&) {
            CHECK(!ec);
            client.backend.reset();
            ended = true;
        });
        client.run();
        CHECK(ended);
        CHECK(server.quiet());
    }
}

// --- Connections ---

TEST_CASE("a connection is kept where the row says so") {
    const auto body = with_length(chat_answer);
    for (const bool keep : {true, false}) {
        FakeServer server({{expect(), reply(body), again()}}, repeating());
        Client client(server.url(), keep ? plain() : single_use());
        for (int i = 0; i < 10; ++i) {
            check_answered(client.ask(chat(i % 2)));
            CHECK(client.backend->connections() == (keep ? 1 : 0));
        }
        CHECK(server.connections() == (keep ? 1 : 10));
        client.backend.reset();
        CHECK(server.unused() == "");
    }
}

TEST_CASE("failures and streams leave a connection as good as it was") {
    FakeServer server(
        {{expect(), reply(with_length("no", json_type, "500 Oops")), expect(),
          reply(chunked(chat_stream, stream_type)), expect(),
          // The stream's end comes after the answer has been given.
          reply(open_stream({chat_stream})), gate(), reply(chunk("")), expect(),
          reply(chunked(delta("a"), stream_type)), expect(), reply(with_length(chat_answer))}});
    auto options = unhurried();
    options.drain_time = patience;
    Client client(server.url(), plain(), options);
    CHECK(outcome(client.ask()) == Errc::rejected);
    check_answered(client.ask(chat(true)));
    Result early;
    client.start(early, chat(true));
    client.io.restart();
    while (early.times == 0 && client.io.run_one() > 0) {}
    check_answered(early);
    server.go();
    client.run();
    CHECK(outcome(client.ask(chat(true))) == Errc::truncated);
    check_answered(client.ask());
    CHECK(server.connections() == 1);
    CHECK(server.unused() == "");
}

TEST_CASE("a connection that cannot serve again is not kept") {
    const auto length = std::to_string(chat_answer.size());
    for (const auto& bytes :
         {with_length(chat_answer, json_type + "Connection: close\r\n"),
          answer_head(json_type + "Content-Length: " + length + "\r\n", "200 OK", "1.0") +
              chat_answer,
          with_length(chat_answer) + "HTTP/1.1 200 OK\r\n\r\n", // more than was asked for
          with_length("{", json_type), with_length("x", "Transfer-Encoding: gzip\r\n")}) {
        INFO(bytes);
        FakeServer server({{expect(), reply(bytes), hang()}}, repeating());
        Client client(server.url());
        client.ask();
        CHECK(client.backend->connections() == 0);
        client.ask();
        CHECK(server.connections() == 2);
        CHECK(server.unused() == "");
    }
}

TEST_CASE("a kept connection that has gone stale is replaced without a word") {
    for (const auto& tail : {Script{}, Script{reset()}, Script{reply("stray"), hang()}}) {
        Script script{expect(), reply(with_length(chat_answer)), gate()};
        script.insert(script.end(), tail.begin(), tail.end());
        FakeServer server({script, {expect(), reply(with_length(chat_answer))}});
        Client client(server.url());
        check_answered(client.ask());
        server.go();
        pollfd stale{.fd = last_socket, .events = POLLIN, .revents = 0};
        REQUIRE(::poll(&stale, 1, int(Ms(patience).count())) == 1);
        check_answered(client.ask());
        CHECK(server.connections() == 2);
        CHECK(server.requests().size() == 2);
    }
}

TEST_CASE("a kept connection that closes on the request gets it re-sent once, on a fresh one") {
    const auto good = with_length(chat_answer);
    for (const auto& end : {Script{}, Script{reset()}}) {
        // Three are kept; each closes as the next request arrives.
        Script kept{expect(), barrier(3), reply(good), expect()};
        kept.insert(kept.end(), end.begin(), end.end());
        FakeServer server({kept, kept, kept, {expect(), reply(good)}});
        Client client(server.url());
        std::array<Result, 3> results;
        for (auto& result : results) client.start(result);
        client.run();
        for (auto& result : results) check_answered(result);
        CHECK(client.backend->connections() == 3);
        check_answered(client.ask());
        CHECK(server.connections() == 4);
        CHECK(server.requests().size() == 5);
    }
    // A fresh one that closes too, and a byte of an answer, are final.
    for (const auto& [bytes, connections] :
         {std::pair(std::string(), 2u), std::pair(std::string("HTTP/1.1 2"), 1u)}) {
        FakeServer server({{expect(), reply(good), expect(), reply(bytes)}, {expect()}});
        Client client(server.url());
        check_answered(client.ask());
        const auto result = client.ask();
        CHECK(outcome(result) == (bytes.empty() ? Errc::unreachable : Errc::truncated));
        CHECK(server.connections() == connections);
        CHECK(server.requests().size() == 1 + connections);
    }
}

TEST_CASE("a server that closes idle connections at once makes no request fail") {
    FakeServer server({{expect(), reply(with_length(chat_answer)), pause(3ms)}}, repeating());
    Client client(server.url());
    std::mt19937 random(1);
    constexpr int count = 300;
    for (int i = 0; i < count; ++i) {
        check_answered(client.ask());
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 6000));
    }
    CHECK(server.requests().size() == count); // each was read once
}

TEST_CASE("idle connections expire, those that are not the next to be used too") {
    FakeServer server({{expect(), reply(with_length(chat_answer)), again()}}, repeating());
    auto options = unhurried();
    options.idle_time = 300ms;
    Client client(server.url(), plain(), options);
    std::array<Result, 8> results;
    for (auto& result : results) client.start(result);
    client.run();
    CHECK(client.backend->connections() == 8);
    for (int i = 0; i < 2; ++i) {
        std::this_thread::sleep_for(200ms);
        check_answered(client.ask());
    }
    CHECK(client.backend->connections() == 1);
    std::this_thread::sleep_for(300ms);
    const auto before = server.connections();
    check_answered(client.ask());
    CHECK(server.connections() == before + 1);
}

TEST_CASE("no more connections are kept than the options say") {
    FakeServer server({{expect(), barrier(6), reply(with_length(chat_answer)), again()}},
                      repeating());
    auto options = unhurried();
    options.idle_connections = 2;
    Client client(server.url(), plain(), options);
    std::array<Result, 6> results;
    for (auto& result : results) client.start(result);
    client.run();
    CHECK(client.backend->connections() == 2);
}

TEST_CASE("a request over a kept connection does not wait for acknowledgements") {
    FakeServer server({{expect(), reply(with_length(chat_answer)), again()}});
    Client client(server.url());
    for (const std::size_t size : {1, 1460, 4097, 65537}) {
        Request request;
        request.body = R"({"prompt": ")" + std::string(size, 'x') + "\"}";
        for (int i = 0; i < 5; ++i) check_answered(client.ask(request));
    }
    CHECK(server.connections() == 1);
    int at_once = 0;
    socklen_t length = sizeof at_once;
    REQUIRE(::getsockopt(last_socket, IPPROTO_TCP, TCP_NODELAY, &at_once, &length) == 0);
    CHECK(at_once != 0);
}

TEST_CASE("connections are paced so that a small backlog does not overflow") {
    FakeServer::Options options = repeating();
    options.backlog = 5;
    options.accept_pause = 15ms;
    FakeServer server({{expect(), reply(with_length(chat_answer))}}, options);
    auto row = single_use();
    row.backlog = 5;
    row.accept_interval = 20ms;
    Client client(server.url(), row);
    std::array<Result, 40> results;
    connects.clear();
    const auto start = Clock::now();
    for (auto& result : results) client.start(result);
    client.run();
    for (auto& result : results) check_answered(result);
    CHECK(server.connections() == 40);
    REQUIRE(connects.size() == 40);
    for (std::size_t i = 0; i < connects.size(); ++i)
        CHECK(connects[i] - start >= (i < 5 ? 0 : i - 4) * 20ms);
}

TEST_CASE("requests cancelled while they wait to connect do not hold up the next one") {
    FakeServer server({{expect(), gate(), reply(with_length(chat_answer))}}, repeating());
    auto row = single_use();
    row.backlog = 1;
    row.accept_interval = 300ms;
    Client client(server.url(), row);
    server.go();
    check_answered(client.ask());
    constexpr std::size_t count = 1000; // if each of them had its time, it would be five minutes
    std::vector<Result> results(count);
    std::vector<asio::cancellation_signal> signals(count);
    for (std::size_t i = 0; i < count; ++i) client.start(results[i], chat(), signals[i].slot());
    asio::steady_timer timer(client.io, 10ms);
    timer.async_wait([&](error_code) {
        for (auto& signal : signals) signal.emit(asio::cancellation_type::all);
    });
    client.run();
    for (auto& result : results) CHECK(result.response.outcome == Errc::cancelled);
    server.go(2 * count); // also for those that a slow machine has connected in time
    const auto result = client.ask();
    check_answered(result);
    CHECK(result.took < soon);
}

TEST_CASE("256 requests are in flight at once") {
    FakeServer::Options options = repeating();
    options.backlog = 512;
    FakeServer server({{expect(), barrier(256), reply(chunked(chat_stream, stream_type)), again()}},
                      options);
    auto keeping = unhurried();
    keeping.drain_time = patience;
    Client client(server.url(), plain(), keeping);
    std::vector<Result> results(256);
    for (auto& result : results) client.start(result, chat(true));
    client.run();
    for (auto& result : results) check_answered(result);
    CHECK(server.connections() == 256);
    CHECK(client.backend->connections() == 64); // as many as are kept
    client.backend.reset();
    CHECK(server.unused() == "");
}

TEST_CASE("cancelled at random, 2,000 requests end once each and leave nothing behind") {
    for (const auto& row : {plain(), single_use()}) {
        FakeServer server(
            {{expect(), reply(open_stream({delta("Gr")})), pause(5ms), reply(chunk(delta("üße"))),
              pause(5ms), reply(chunk(finish + usage + done)), pause(5ms), reply(chunk("")),
              again()}},
            repeating());
        Client client(server.url(), row);
        check_answered(client.ask(chat(true)));
        client.backend.reset();
        REQUIRE(server.quiet());
        const auto baseline = open_files();

        auto options = unhurried();
        options.url = server.url();
        client.backend.emplace(client.io.get_executor(), row, options);
        constexpr int count = 2000, at_once = 32;
        struct One {
            explicit One(asio::io_context& io) : timer(io) {}
            int times = 0;
            asio::cancellation_signal signal;
            asio::steady_timer timer;
        };
        std::deque<One> all;
        std::mt19937 random(7);
        int answered = 0, cancelled = 0, other = 0;
        std::function<void()> next = [&] {
            if (all.size() == count) return;
            auto& one = all.emplace_back(client.io);
            client.backend->async_complete(
                chat(true), {},
                asio::bind_cancellation_slot(one.signal.slot(), [&](error_code ec,
                                                                    const Response& response) {
                    ++one.times;
                    ++(!ec ? answered : response.outcome == Errc::cancelled ? cancelled : other);
                    next();
                }));
            if (random() % 4 == 0) return;
            one.timer.expires_after(std::chrono::microseconds(random() % 24000));
            one.timer.async_wait(
                [&](error_code) { one.signal.emit(asio::cancellation_type::all); });
        };
        for (int i = 0; i < at_once; ++i) next();
        client.run();
        for (auto& one : all) CHECK(one.times == 1);
        CHECK(answered + cancelled == count);
        CHECK(other == 0);
        CHECK(answered > 0);
        CHECK(cancelled > 0);
        check_answered(client.ask(chat(true)));
        CHECK(client.backend->connections() <= (row.keep_alive ? 64 : 0));
        client.backend.reset();
        CHECK(server.quiet());
        CHECK(eventually([&] { return open_files() == baseline; }));
    }
}

TEST_CASE("the end of a backend closes what it kept, and waits for nobody") {
    FakeServer server({{expect(), barrier(4), reply(with_length(chat_answer)), again()}},
                      repeating());
    const auto before = open_files();
    {
        Client client(server.url());
        std::array<Result, 4> results;
        for (auto& result : results) client.start(result);
        client.run();
        CHECK(client.backend->connections() == 4);
        CHECK(open_files() > before);
    }
    CHECK(server.quiet());
    CHECK(eventually([&] { return open_files() == before; }));

    // The context may go away under a running request: its handler is then destroyed.
    FakeServer silent({{expect(), hang()}});
    const auto held = std::make_shared<int>();
    {
        Client client(silent.url());
        client.backend->async_complete(chat(), {}, [held](error_code, Response) { FAIL(); });
        client.io.run_for(30ms);
    }
    CHECK(held.use_count() == 1);
    CHECK(silent.quiet());
}

// --- TLS ---

namespace {

class File {
public:
    explicit File(const std::string& text)
        : path(std::filesystem::temp_directory_path() /
               ("evalrt-test-" + std::to_string(::getpid()) + ".pem")) {
        std::ofstream(path) << text;
    }
    ~File() { std::filesystem::remove(path); }
    std::filesystem::path path;
};

} // namespace

TEST_CASE("TLS: a trusted certificate of the right name, and no other") {
    struct Row {
        const char* names;
        std::chrono::hours valid;
        bool trusted;
        const char* host;
        bool good;
    };
    for (const auto& [names, valid, trusted, host, good] :
         {Row{"IP:127.0.0.1", 24h, true, "127.0.0.1", true},
          Row{"DNS:localhost", 24h, true, "localhost", true},
          Row{"IP:127.0.0.1", 24h, false, "127.0.0.1", false},  // signed by itself
          Row{"DNS:other.test", 24h, true, "127.0.0.1", false}, // another name
          Row{"DNS:other.test", 24h, true, "localhost", false},
          Row{"DNS:127.0.0.1", 24h, true, "127.0.0.1", false}, // an address is no name
          Row{"IP:127.0.0.2", 24h, true, "127.0.0.1", false},
          Row{"IP:127.0.0.1", -1h, true, "127.0.0.1", false}}) { // expired
        INFO(names << " at " << host << ", trusted " << trusted << ", hours " << valid.count());
        FakeServer::Options tls = repeating();
        tls.tls = make_certificate(names, valid);
        FakeServer server({{expect(), reply(with_length(chat_answer)), again()}}, tls);
        const File file(tls.tls->certificate);
        auto options = unhurried();
        options.api_key = canary;
        if (trusted) options.ca_file = file.path;
        Client client("https://" + std::string(host) + ":" + std::to_string(server.port()) + "/v1",
                      plain(), options);
        const auto result = client.ask();
        if (good) {
            check_answered(result);
            check_answered(client.ask());
            CHECK(server.connections() == 1); // kept
            CHECK(server.requests().at(1).field("authorization") == "Bearer " + canary);
            // An address is no server name: some servers refuse it.
            CHECK(server.requests().at(0).server_name ==
                  (host == std::string_view("localhost") ? "localhost" : ""));
        } else {
            CHECK(outcome(result) == Errc::unreachable);
            CHECK(contains(result.response.detail, "certificate"));
            CHECK(result.response.stage == Stage::none);
            CHECK(server.requests().empty());
            CHECK(client.backend->connections() == 0);
        }
    }
}

TEST_CASE("TLS: without a file of certificates the system's count") {
    FakeServer::Options tls = repeating();
    tls.tls = make_certificate("IP:127.0.0.1", 24h);
    FakeServer server({{expect(), reply(with_length(chat_answer)), again()}}, tls);
    const File file(tls.tls->certificate);
    auto options = unhurried();
    options.api_key = canary;
    {
        Client client(server.url(), plain(), options);
        CHECK(outcome(client.ask()) == Errc::unreachable); // nobody vouches for it
        CHECK(server.requests().empty());
    }
    ::setenv("SSL_CERT_FILE", file.path.c_str(), 1); // where OpenSSL looks for the system's
    Client client(server.url(), plain(), options);
    ::unsetenv("SSL_CERT_FILE");
    check_answered(client.ask());
}

TEST_CASE("TLS: bodies of every framing, large ones, cuts and truncation") {
    FakeServer::Options tls = repeating();
    tls.tls = make_certificate("IP:127.0.0.1", 24h);
    const File file(tls.tls->certificate);
    auto options = unhurried();
    options.ca_file = file.path;
    struct Row {
        Script script;
        std::optional<Errc> errc;
    };
    const auto length = with_length(chat_answer);
    for (const auto& [script, errc] :
         {Row{{expect(), reply(length)}, {}}, Row{{expect(), slowly(length, 1)}, {}},
          Row{{expect(), reply(chunked(chat_stream, stream_type))}, {}},
          Row{{expect(), reply(until_close(chat_stream, stream_type))}, {}},
          Row{{expect(), reply(until_close(chat_answer))}, {}},
          // Without the goodbye: common at the end of such a body, and the answer is complete.
          Row{{expect(), reply(until_close(chat_answer)), cut()}, {}},
          Row{{expect(), reply(until_close(chat_stream, stream_type)), cut()}, {}},
          Row{{expect(), reply(until_close(chat_answer.substr(0, 90))), cut()}, Errc::malformed},
          Row{{expect(), reply(until_close(delta("Gr"), stream_type)), cut()}, Errc::truncated},
          Row{{expect(), reply(length.substr(0, length.size() - 5)), cut()}, Errc::truncated},
          Row{{expect(), reply(length.substr(0, length.size() - 5))}, Errc::truncated},
          Row{{expect(), reply(length.substr(0, 30)), cut()}, Errc::truncated},
          Row{{expect(), reply(length.substr(0, 30))}, Errc::truncated},
          Row{{expect(), reply(open_stream({delta("Gr")})), cut()}, Errc::truncated},
          Row{{expect(), cut()}, Errc::unreachable}, Row{{expect()}, Errc::unreachable},
          Row{{expect(), reset()}, Errc::unreachable}}) {
        FakeServer server({script}, tls);
        Client client(server.url(), plain(), options);
        Request request;
        request.body = R"({"prompt": ")" + std::string(100 << 10, 'x') + "\"}";
        request.endpoint = "/v1/chat/completions";
        const auto result = client.ask(request);
        INFO("of " << script.size() << " steps: " << result.response.detail);
        if (!errc)
            check_answered(result);
        else
            CHECK(outcome(result) == *errc);
        CHECK(server.requests().at(0).body == request.body.view());
    }
    // A plain server, and a wrong URL.
    FakeServer plain_server({{reply(with_length("", json_type, "400 Bad Request")), hang()}});
    Client client("https" + plain_server.url().substr(4), plain(), options);
    CHECK(outcome(client.ask()) == Errc::unreachable);
}

// --- Names and keys ---

TEST_CASE("localhost means 127.0.0.1 and ::1") {
    for (const std::string address : {"127.0.0.1", "::1"}) {
        FakeServer::Options options;
        options.address = address;
        std::optional<FakeServer> server;
        try {
            server.emplace(std::vector<Script>{{expect(), reply(with_length(chat_answer))},
                                               {expect(), reply(with_length(chat_answer))}},
                           options);
        } catch (const std::exception&) {
            WARN("no IPv6 here: ::1 is not tested");
            continue;
        }
        Client client("http://localhost:" + std::to_string(server->port()) + "/v1");
        const auto result = client.ask();
        check_answered(result);
        CHECK(result.took < soon);
        CHECK(server->requests().at(0).field("host") ==
              "localhost:" + std::to_string(server->port()));
        // By its own address, too.
        Client direct(server->url());
        check_answered(direct.ask());
        CHECK(server->requests().at(1).field("host") ==
              server->url("").substr(std::string_view("http://").size()));
        CHECK(server->unused() == "");
    }
}

TEST_CASE("the end of a key file's line is trimmed; a key with control characters is refused") {
    for (const std::string end : {"\n", "\r\n", "\r", " \t\n"}) {
        FakeServer server({{expect(), reply(with_length(chat_answer))}});
        auto options = unhurried();
        options.api_key = canary + end;
        Client client(server.url(), plain(), options);
        check_answered(client.ask());
        CHECK(server.requests().at(0).field("authorization") == "Bearer " + canary);
    }
    for (const auto& key : {canary + "\r\nX-Injected: yes", "\n" + canary, canary + " x",
                            canary + std::string(1, '\0') + "x", canary + "\xC3\xA4"}) {
        auto options = unhurried();
        options.api_key = key;
        try {
            Client client("http://127.0.0.1:1/v1", plain(), options);
            FAIL("taken");
        } catch (const std::invalid_argument& error) {
            CHECK(!contains(error.what(), "canary"));
            CHECK(contains(error.what(), "key"));
        }
    }
}

TEST_CASE("bad options are refused at once") {
    const auto refused = [](const std::string& url, HttpOptions options = {}) {
        try {
            Client client(url, plain(), options);
            return std::string();
        } catch (const std::invalid_argument& error) {
            return std::string(error.what());
        }
    };
    for (const auto url : {"", "127.0.0.1:80", "ftp://host", "http://", "http://h:0", "http://h:x",
                           "http://h:70000", "http://h/v1?key=canary", "http://canary@h/v1",
                           "http://h/a b", "http://[::1", "http://h\r\nX: y"}) {
        INFO(url);
        const auto what = refused(url);
        CHECK(contains(what, "URL"));
        CHECK(!contains(what, "canary"));
    }
    auto options = unhurried();
    options.ca_file = "/no/such/file.pem";
    CHECK(contains(refused("https://h/v1", options), "/no/such/file.pem"));
}

TEST_CASE("the key never comes out again, even from a server that repeats it") {
    const auto echo = [](std::string_view status, const std::string& body) {
        return with_length(body, json_type, status);
    };
    for (const auto& bytes :
         {echo("200 OK", std::string(390, 'x') + canary), // where what is shown is cut
          echo("401 Unauthorized",
               R"({"error": {"message": "Incorrect API key: )" + canary + "\"}}"),
          echo("500 Oops", "Authorization: Bearer " + canary), echo("200 OK", "? " + canary),
          echo("200 OK", R"({"error": ")" + canary + "\"}"),
          with_length("", "Location: http://x/?key=" + canary + "\r\n", "302 Found"),
          chunked(event(R"({"error": ")" + canary + "\"}"), stream_type),
          chunked(event("{" + canary), stream_type), canary + "\r\n\r\n",
          answer_head("X: " + canary + "\r\nTransfer-Encoding: gzip\r\n"), std::string(),
          "HTTP/1.1 " + canary + "\r\n\r\n", answer_head(canary + ": x\r\nBad Name: x\r\n"),
          with_length(R"({"request_id": ")" + canary + R"(", "error": "no"})", json_type,
                      "400 Bad Request"),
          chunked(event(R"({"id": ")" + canary + R"(", "error": {"message": "no"}})"), stream_type),
          chunked(event(R"({"id": ")" + canary +
                        R"(", "choices": [{"index": 0, "delta": )"
                        R"({"content": "a"}, "finish_reason": "error"}]})"),
                  stream_type)}) {
        INFO(bytes);
        FakeServer server({{expect(), reply(bytes)}});
        auto options = unhurried();
        options.api_key = canary + "\n";
        auto row = plain();
        row.drop_seed_at_zero = true; // which is said
        Client client(server.url(), row, options);
        Request request;
        request.body = R"({"prompt": "x", "seed": 1})";
        const auto result = client.ask(request);
        outcome(result);
        const auto& said = result.response;
        for (const auto& text :
             {said.detail, said.body, said.text, said.finish_reason, said.request_id,
              said.cause.message(), result.code.message(), client.log})
            CHECK(!contains(text, "canary"));
        CHECK(contains(client.log, "seed"));
    }
}
