// A Gateway over real sockets, in front of a Backend that does what the test says.
#include "evalrt/gateway.hpp"

#include "evalrt/http_backend.hpp"
#include "support/catch.hpp"
#include "support/patience.hpp"
#include "support/scripted_backend.hpp"

#include <boost/asio/io_context.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <list>
#include <stdexcept>

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

using namespace evalrt;
using namespace std::chrono_literals;
using tests::patience;

namespace {

// Whose clients may be slow.
GatewayOptions unhurried() {
    GatewayOptions options;
    options.header_time = options.body_time = options.idle_time = options.write_time = 2 * patience;
    return options;
}

// A client that is told each byte, and sees each byte.
class Client {
public:
    explicit Client(std::uint16_t port, int receive_buffer = 0)
        : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
        if (receive_buffer > 0)
            ::setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof receive_buffer);
        sockaddr_in to{};
        to.sin_family = AF_INET;
        to.sin_port = htons(port);
        to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        if (::connect(fd_, reinterpret_cast<sockaddr*>(&to), sizeof to) != 0)
            throw std::runtime_error("cannot connect");
        ::fcntl(fd_, F_SETFL, O_NONBLOCK);
    }
    Client(const Client&) = delete;
    ~Client() { close(); }

    void close() {
        if (fd_ >= 0) ::close(fd_);
        fd_ = -1;
    }
    void send(std::string_view bytes) {
        while (!bytes.empty()) {
            const auto n = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
            if (n <= 0) return; // the peer has closed, or reads no more
            bytes.remove_prefix(std::size_t(n));
        }
    }
    void end_sending() { ::shutdown(fd_, SHUT_WR); }
    void receive() {
        char bytes[65536];
        for (;;) {
            const auto n = ::recv(fd_, bytes, sizeof bytes, 0);
            if (n > 0) {
                in.append(bytes, std::size_t(n));
                continue;
            }
            ended = ended || n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
            return;
        }
    }

    std::string in;
    bool ended = false; // the peer has closed

private:
    int fd_;
};

struct Rig {
    explicit Rig(GatewayOptions options = unhurried())
        : gateway(io.get_executor(), backend, options) {
        const auto failure = gateway.open();
        if (failure) throw std::runtime_error(failure.detail);
    }
    ~Rig() {
        // Every end is orderly: no connection and no request is left.
        bool closed = false;
        gateway.async_close([&](error_code) { closed = true; });
        until([&] { return closed; });
        CHECK(closed);
        CHECK(backend.pending.empty());
    }

    Client& connect(int receive_buffer = 0) {
        return clients.emplace_back(gateway.port(), receive_buffer);
    }

    // False: it did not come true.
    bool until(const std::function<bool()>& condition) {
        const auto end = Clock::now() + patience;
        while (!condition()) {
            if (Clock::now() > end) return false;
            io.restart();
            io.run_for(1ms);
            for (auto& it : clients) it.receive();
        }
        return true;
    }
    // Lets happen what would.
    void settle(std::chrono::milliseconds time = 50ms) {
        const auto end = Clock::now() + time;
        until([&] { return Clock::now() > end; });
    }

    std::string request(std::string_view body, std::string_view fields = {},
                        std::string_view path = "/v1/chat/completions") const {
        return fmt::format("POST {} HTTP/1.1\r\nHost: 127.0.0.1:{}\r\nContent-Type: "
                           "application/json\r\nContent-Length: {}\r\n{}\r\n{}",
                           path, gateway.port(), body.size(), fields, body);
    }
    std::string get(std::string_view path) const {
        return fmt::format("GET {} HTTP/1.1\r\nHost: 127.0.0.1:{}\r\n\r\n", path, gateway.port());
    }

    static Response answer(std::string text = "hello") {
        Response response;
        response.body = fmt::format(
            R"({{"id": "c1", "object": "chat.completion", "created": 1, "model": "m", "choices": )"
            R"([{{"index": 0, "message": {{"role": "assistant", "content": "{}"}}, )"
            R"("finish_reason": "stop"}}], "usage": {{"prompt_tokens": 3, "completion_tokens": 1, )"
            R"("total_tokens": 4}}}})",
            text);
        response.text = std::move(text);
        response.usage = {3, 2, 1};
        return response;
    }

    asio::io_context io{1};
    tests::ScriptedBackend backend{io.get_executor()};
    Gateway gateway;
    std::list<Client> clients;
};

// A whole answer whose length is told.
bool whole(const Client& client) {
    const auto end = client.in.find("\r\n\r\n");
    const auto length = client.in.find("Content-Length: ");
    if (end == client.in.npos || length > end) return false;
    return client.in.size() >= end + 4 + std::stoul(client.in.substr(length + 16));
}

int status(const Client& client) {
    return client.in.size() < 12 ? 0 : std::stoi(client.in.substr(9, 3));
}

std::string unchunked(std::string_view answer) {
    std::string out;
    auto rest = answer.substr(answer.find("\r\n\r\n") + 4);
    while (!rest.empty()) {
        const auto size = std::stoul(std::string(rest), nullptr, 16);
        rest.remove_prefix(rest.find("\r\n") + 2);
        out += rest.substr(0, size);
        rest.remove_prefix(std::min(rest.size(), size + 2));
        if (size == 0) break;
    }
    return out;
}

} // namespace

TEST_CASE("a request is answered, and the connection kept for the next") {
    Rig rig;
    auto& client = rig.connect();
    for (int i = 0; i < 3; ++i) {
        client.in.clear();
        client.send(rig.request(R"({"messages": [], "x": 1})"));
        REQUIRE(rig.until([&] { return rig.backend.calls == i + 1; }));
        const auto& request = rig.backend.pending.at(i).request;
        CHECK(request.endpoint == "/v1/chat/completions");
        CHECK(request.body.view() == R"({"messages": [], "x": 1})");
        CHECK(!request.stream);
        rig.backend.end(i, Rig::answer());
        REQUIRE(rig.until([&] { return whole(client); }));
        CHECK(status(client) == 200);
        CHECK(client.in.find(R"("content": "hello")") != std::string::npos);
    }
    const auto stats = rig.gateway.stats();
    CHECK(stats.connections == 1);
    CHECK(stats.answered == 3);
    CHECK(stats.open == 0);
    CHECK(stats.cached_tokens == 6);
}

TEST_CASE("a request may come byte by byte, in chunks, and with another behind it") {
    Rig rig;
    auto& client = rig.connect();
    for (const char c : rig.request("{}")) {
        client.send({&c, 1});
        rig.settle(1ms);
    }
    REQUIRE(rig.until([&] { return rig.backend.calls == 1; }));
    rig.backend.end(0, Rig::answer());
    REQUIRE(rig.until([&] { return whole(client); }));
    client.in.clear();
    const auto head =
        fmt::format("POST /chat/completions HTTP/1.1\r\nHost: localhost:{}\r\n"
                    "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n",
                    rig.gateway.port());
    client.send(head + "1\r\n{\r\n3;x=y\r\n}  \r\n0\r\n\r\n" + rig.request(R"({"second": 1})"));
    REQUIRE(rig.until([&] { return rig.backend.calls == 2; }));
    CHECK(rig.backend.pending.at(1).request.body.view() == "{}  ");
    rig.backend.end(1, Rig::answer());
    REQUIRE(rig.until([&] { return rig.backend.calls == 3; }));
    CHECK(rig.backend.pending.at(2).request.body.view() == R"({"second": 1})");
    rig.backend.end(2, Rig::answer());
    CHECK(rig.until([&] {
        return client.in.find("\"id\": \"c1\"", client.in.find("c1") + 2) != std::string::npos;
    }));
}

TEST_CASE("Expect: 100-continue is answered before the body") {
    Rig rig;
    auto& client = rig.connect();
    const auto request = rig.request(R"({"a": 1})", "Expect: 100-continue\r\n");
    const auto head = request.find("\r\n\r\n") + 4;
    client.send(request.substr(0, head));
    REQUIRE(rig.until([&] { return client.in == "HTTP/1.1 100 Continue\r\n\r\n"; }));
    client.in.clear();
    client.send(request.substr(head));
    REQUIRE(rig.until([&] { return rig.backend.calls == 1; }));
    rig.backend.end(0, Rig::answer());
    CHECK(rig.until([&] { return whole(client); }));
}

TEST_CASE("text goes out as it comes, and what comes together as one event") {
    Rig rig;
    auto& client = rig.connect();
    client.send(rig.request(R"({"stream": true, "messages": []})"));
    REQUIRE(rig.until([&] { return rig.backend.calls == 1; }));
    CHECK(rig.backend.pending.at(0).request.stream);
    CHECK(rig.backend.pending.at(0).request.body.view() == R"({"messages": []})");
    rig.settle();
    CHECK(client.in == ""); // so that a failure can still have its status
    rig.backend.text(0, "he");
    REQUIRE(rig.until([&] { return client.in.find(R"({"content": "he"})") != std::string::npos; }));
    CHECK(client.in.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"));
    rig.backend.text(0, "l");
    rig.backend.text(0, "l");
    REQUIRE(rig.until([&] { return client.in.find(R"({"content": "ll"})") != std::string::npos; }));
    rig.backend.end(0, Rig::answer());
    REQUIRE(rig.until([&] { return client.in.ends_with("0\r\n\r\n"); }));
    const auto events = unchunked(client.in);
    CHECK(events.find(R"({"content": "o"})") != std::string::npos);
    CHECK(events.ends_with("data: [DONE]\n\n"));
    // The connection is still good.
    client.in.clear();
    client.send(rig.get("/health"));
    CHECK(rig.until([&] { return whole(client); }));
}

TEST_CASE("a stream for a backend that gives none, and for HTTP/1.0") {
    Rig rig;
    auto& client = rig.connect();
    auto request = rig.request(R"({"stream": true})");
    request.replace(request.find("HTTP/1.1"), 8, "HTTP/1.0");
    client.send(request);
    REQUIRE(rig.until([&] { return rig.backend.calls == 1; }));
    rig.backend.end(0, Rig::answer());
    REQUIRE(rig.until([&] { return client.ended; }));
    CHECK(client.in.find("chunked") == std::string::npos);
    CHECK(client.in.find(R"("content": "hello")") != std::string::npos);
    CHECK(client.in.ends_with("data: [DONE]\n\n"));
}

TEST_CASE("a failure before text has its status, one after it an event and no end") {
    Rig rig;
    for (const bool text : {false, true}) {
        auto& client = rig.connect();
        client.send(rig.request(R"({"stream": true})"));
        const int call = rig.backend.calls;
        REQUIRE(rig.until([&] { return rig.backend.calls > call; }));
        if (text) {
            rig.backend.text(call, "half");
            REQUIRE(rig.until([&] { return client.in.find("half") != std::string::npos; }));
        }
        Response failed;
        failed.outcome = Errc::overloaded;
        failed.detail = "too much to do";
        rig.backend.end(call, failed);
        REQUIRE(rig.until([&] { return text ? client.ended : whole(client); }));
        CHECK(status(client) == (text ? 200 : 503));
        CHECK((client.in.find("x-should-retry: false") != std::string::npos) == !text);
        CHECK(client.in.find("too much to do") != std::string::npos);
        CHECK(client.in.find("[DONE]") == std::string::npos);
        CHECK(!client.in.ends_with("0\r\n\r\n"));
    }
}

TEST_CASE("errors of the messages endpoint are Anthropic's") {
    Rig rig;
    auto& client = rig.connect();
    client.send(rig.request("{}", {}, "/v1/messages"));
    REQUIRE(rig.until([&] { return rig.backend.calls == 1; }));
    CHECK(rig.backend.pending.at(0).request.endpoint == "/v1/messages");
    rig.backend.fail(0, Errc::rate_limited);
    REQUIRE(rig.until([&] { return whole(client); }));
    CHECK(status(client) == 429);
    CHECK(client.in.find(R"({"type": "error", "error": {"type": "rate_limit_error")") !=
          std::string::npos);
}

TEST_CASE("a body that is no JSON hurts only itself") {
    Rig rig;
    auto& client = rig.connect();
    client.send(rig.request("{\"a\": }"));
    REQUIRE(rig.until([&] { return whole(client); }));
    CHECK(status(client) == 400);
    CHECK(rig.backend.calls == 0);
    client.in.clear();
    client.send(rig.request("{}"));
    REQUIRE(rig.until([&] { return rig.backend.calls == 1; }));
    rig.backend.end(0, Rig::answer());
    REQUIRE(rig.until([&] { return whole(client); }));
    CHECK(status(client) == 200);
    CHECK(rig.gateway.stats().refused == 1);
}

TEST_CASE("a client that goes away cancels its request, at every stage") {
    auto options = unhurried();
    options.linger = 100ms;
    Rig rig(options);
    for (const std::string_view stage : {"before the first byte", "not streamed", "in the stream",
                                         "after more", "having ended its sending", "HTTP/1.0"}) {
        CAPTURE(stage);
        const bool streamed = stage != "not streamed";
        auto& client = rig.connect();
        // Python's urllib says so of each.
        auto request =
            rig.request(fmt::format(R"({{"stream": {}}})", streamed), "Connection: close\r\n");
        if (stage == "HTTP/1.0") request.replace(request.find("HTTP/1.1"), 8, "HTTP/1.0");
        client.send(request);
        const int call = rig.backend.calls, cancelled = rig.backend.cancelled;
        REQUIRE(rig.until([&] { return rig.backend.calls > call; }));
        if (stage == "having ended its sending") {
            client.end_sending();
            REQUIRE(rig.until([&] { return client.in.size() > 50; }));
        }
        if (stage == "in the stream") {
            rig.backend.text(call, "a");
            REQUIRE(rig.until([&] { return !client.in.empty(); }));
        }
        if (stage == "after more") {
            client.send("\r\n");
            rig.settle(50ms);
            client.send("GET /health HTTP/1.1\r\n");
            rig.settle(50ms);
        }
        if (stage == "HTTP/1.0")
            client.end_sending(); // which is all that can be seen of a client that leaves
        else
            client.close();
        CHECK(rig.until([&] { return rig.backend.cancelled > cancelled; }));
        CHECK(rig.until([&] { return rig.gateway.stats().connections == 0; }));
    }
    CHECK(rig.until([&] { return rig.gateway.stats().open == 0; }));
    CHECK(rig.gateway.stats().failed[std::size_t(Errc::cancelled) - 1] == 6);
}

TEST_CASE("a client that only ends its sending gets its answers") {
    const std::string go_on = "HTTP/1.1 100 Continue\r\n\r\n";
    auto options = unhurried();
    options.linger = 1ms;
    Rig rig(options);
    for (const std::string_view way : {"whole", "streamed", "at once", "with another behind it"}) {
        CAPTURE(way);
        auto& client = rig.connect();
        const int call = rig.backend.calls;
        client.send(rig.request(way == "streamed" ? R"({"stream": true})" : "{}"));
        if (way == "with another behind it") client.send(rig.get("/health"));
        client.end_sending();
        REQUIRE(rig.until([&] { return rig.backend.calls > call; }));
        // Until there is an answer it is asked more than once whether it reads.
        if (way != "at once")
            REQUIRE(rig.until([&] { return client.in.size() >= 3 * go_on.size(); }));
        if (way == "streamed") {
            rig.backend.text(call, "hel");
            REQUIRE(rig.until([&] { return client.in.find("hel") != client.in.npos; }));
            rig.settle(500ms); // and then no more
            CHECK(rig.backend.cancelled == 0);
        }
        rig.backend.end(call, Rig::answer());
        REQUIRE(rig.until([&] { return client.ended; }));
        while (client.in.starts_with(go_on)) client.in.erase(0, go_on.size());
        CHECK(client.in.starts_with("HTTP/1.1 200 OK\r\n"));
        CHECK(client.in.find("100 Continue") == client.in.npos);
        if (way == "streamed")
            CHECK(unchunked(client.in).ends_with("data: [DONE]\n\n"));
        else
            CHECK(client.in.find(R"("content": "hello")") != client.in.npos);
        if (way == "with another behind it")
            CHECK(client.in.find(R"({"status": "ok"})") != client.in.npos);
    }
    CHECK(rig.backend.cancelled == 0);
}

TEST_CASE("the default leaves a request without its client for less than a second") {
    CHECK(GatewayOptions().linger < 1s);
}

TEST_CASE("a client that comes back gets the request that still runs") {
    CHECK(tests::with_longer_limits([](int times) {
        auto options = unhurried();
        options.linger = 300ms * times;
        Rig rig(options);
        auto& first = rig.connect();
        first.send(rig.request(R"({"a": 1})", "x-stainless-retry-count: 0\r\n"));
        REQUIRE(rig.until([&] { return rig.backend.calls == 1; }));
        first.close();
        REQUIRE(rig.until([&] { return rig.gateway.stats().connections == 0; }));
        auto& second = rig.connect();
        second.send(rig.request(R"({"a": 1})", "x-stainless-retry-count: 1\r\n"));
        REQUIRE(
            rig.until([&] { return rig.gateway.stats().joined == 1 || rig.backend.calls == 2; }));
        if (rig.gateway.stats().joined == 0) return false; // came back too late
        rig.settle(2 * options.linger); // after which it would have been cancelled
        CHECK(rig.backend.calls == 1);
        CHECK(rig.backend.cancelled == 0);
        rig.backend.end(0, Rig::answer());
        REQUIRE(rig.until([&] { return whole(second); }));
        CHECK(status(second) == 200);
        CHECK(rig.gateway.stats().requests == 1);
        return true;
    }));
}

TEST_CASE("an answer that came while its client was away is given to who comes back, once") {
    auto options = unhurried();
    options.linger = 2 * patience;
    Rig rig(options);
    auto& first = rig.connect();
    first.send(rig.request(R"({"a": 1, "stream": true})"));
    REQUIRE(rig.until([&] { return rig.backend.calls == 1; }));
    rig.backend.text(0, "he");
    REQUIRE(rig.until([&] { return !first.in.empty(); }));
    first.close();
    REQUIRE(rig.until([&] { return rig.gateway.stats().connections == 0; }));
    rig.backend.end(0, Rig::answer());
    rig.settle();
    auto& second = rig.connect();
    second.send(rig.request(R"({"a": 1})"));
    REQUIRE(rig.until([&] { return whole(second); }));
    CHECK(second.in.find(R"("content": "hello")") != std::string::npos);
    CHECK(rig.backend.calls == 1);
    auto& third = rig.connect();
    third.send(rig.request(R"({"a": 1})"));
    REQUIRE(rig.until([&] { return rig.backend.calls == 2; }));
    rig.backend.end(1, Rig::answer());
    CHECK(rig.until([&] { return whole(third); }));
}

TEST_CASE("equal requests of clients that are there are as many requests") {
    Rig rig;
    auto& first = rig.connect();
    auto& second = rig.connect();
    first.send(rig.request(R"({"a": 1})"));
    REQUIRE(rig.until([&] { return rig.backend.calls == 1; }));
    second.send(rig.request(R"({"a": 1})", "x-stainless-retry-count: 1\r\n"));
    REQUIRE(rig.until([&] { return rig.backend.calls == 2; }));
    rig.backend.end(1, Rig::answer("second"));
    REQUIRE(rig.until([&] { return whole(second); }));
    rig.backend.end(0, Rig::answer("first"));
    REQUIRE(rig.until([&] { return whole(first); }));
    CHECK(first.in.find("first") != std::string::npos);
    CHECK(second.in.find("second") != std::string::npos);
    // An answer that was delivered is not delivered again, however soon its client goes and asks.
    first.close();
    auto& third = rig.connect();
    third.send(rig.request(R"({"a": 1})"));
    REQUIRE(rig.until([&] { return rig.backend.calls == 3; }));
    rig.backend.end(2, Rig::answer("third"));
    CHECK(rig.until([&] { return whole(third); }));
    CHECK(rig.gateway.stats().joined == 0);
}

TEST_CASE("a long conversation that goes on is a session, and whose it is is told") {
    Rig rig;
    auto& client = rig.connect();
    auto& other = rig.connect();
    const std::string rules(20'000, 'r');
    const auto ask = [&](Client& from, std::string_view messages, std::string_view fields = {}) {
        from.in.clear();
        const auto call = rig.backend.calls;
        from.send(rig.request(fmt::format(R"({{"messages": [{}]}})", messages), fields));
        REQUIRE(rig.until([&] { return rig.backend.calls == call + 1; }));
        const auto request = rig.backend.pending.at(call).request;
        rig.backend.end(call, Rig::answer("hello"));
        REQUIRE(rig.until([&] { return whole(from); }));
        return request;
    };
    const auto hi = R"({"role": "user", "content": "hi"})";
    const auto first = fmt::format(R"({{"role": "system", "content": "{}"}}, {})", rules, hi);
    const auto answer =
        R"(, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "so"})";
    const auto begun = ask(client, first);
    CHECK(begun.session.empty());
    const auto second = ask(client, first + answer);
    CHECK_FALSE(second.session.empty());
    CHECK(second.turn == 1);
    CHECK(second.pause >= 100ms);
    const auto third = ask(other, first + answer + answer); // over another connection
    CHECK(third.session == second.session);
    CHECK(third.turn == 2);
    // A short one is not worth keeping others back.
    ask(client, hi);
    CHECK(ask(client, std::string(hi) + answer).session.empty());
    CHECK(rig.gateway.stats().continued == 3);
    CHECK(begun.client == third.client);
    CHECK(ask(other, hi, "Authorization: Bearer another\r\n").client != begun.client);
}

TEST_CASE("the same Idempotency-Key is the same request, while its client is there, too") {
    Rig rig;
    auto& first = rig.connect();
    auto& second = rig.connect();
    auto& other = rig.connect();
    first.send(rig.request(R"({"a": 1})", "Idempotency-Key: k\r\n"));
    REQUIRE(rig.until([&] { return rig.backend.calls == 1; }));
    second.send(rig.request(R"({"a": 1})", "idempotency-key: k\r\n"));
    REQUIRE(rig.until([&] { return rig.gateway.stats().joined == 1; }));
    CHECK(rig.until([&] { return first.ended; })); // nobody waits there any more
    other.send(rig.request(R"({"a": 2})", "Idempotency-Key: k\r\n"));
    REQUIRE(rig.until([&] { return rig.backend.calls == 2; }));
    rig.backend.end(0, Rig::answer());
    rig.backend.end(1, Rig::answer());
    CHECK(rig.until([&] { return whole(second) && whole(other); }));
}

TEST_CASE("another client does not get the request of one that has gone") {
    auto options = unhurried();
    options.linger = 2 * patience;
    Rig rig(options);
    auto& first = rig.connect();
    first.send(rig.request(R"({"a": 1})", "Authorization: Bearer one\r\n"));
    REQUIRE(rig.until([&] { return rig.backend.calls == 1; }));
    first.close();
    REQUIRE(rig.until([&] { return rig.gateway.stats().connections == 0; }));
    auto& other = rig.connect();
    other.send(rig.request(R"({"a": 1})", "Authorization: Bearer two\r\n"));
    REQUIRE(rig.until([&] { return rig.backend.calls == 2; }));
    auto& back = rig.connect();
    back.send(rig.request(R"({"a": 1})", "Authorization: Bearer one\r\n"));
    REQUIRE(rig.until([&] { return rig.gateway.stats().joined == 1; }));
    rig.backend.end(0, Rig::answer("first"));
    rig.backend.end(1, Rig::answer("second"));
    REQUIRE(rig.until([&] { return whole(back) && whole(other); }));
    CHECK(back.in.find("first") != std::string::npos);
    CHECK(other.in.find("second") != std::string::npos);
}

TEST_CASE("a client that had said how long it waits is expected back") {
    auto options = unhurried();
    options.linger = 1ms;
    options.retry_linger = 2 * patience;
    Rig rig(options);
    auto& first = rig.connect();
    first.send(rig.request(R"({"a": 1})", "x-stainless-read-timeout: 0.05\r\n"));
    REQUIRE(rig.until([&] { return rig.backend.calls == 1; }));
    rig.settle(60ms);
    first.close();
    rig.settle(100ms);
    CHECK(rig.backend.cancelled == 0);
    auto& second = rig.connect();
    second.send(rig.request(R"({"a": 1})"));
    REQUIRE(rig.until([&] { return rig.gateway.stats().joined == 1; }));
    rig.backend.end(0, Rig::answer());
    CHECK(rig.until([&] { return whole(second); }));
    // One that goes before its time does so for good.
    auto& third = rig.connect();
    third.send(rig.request(R"({"a": 2})", "x-stainless-read-timeout: 600\r\n"));
    REQUIRE(rig.until([&] { return rig.backend.calls == 2; }));
    third.close();
    CHECK(rig.until([&] { return rig.backend.cancelled == 1; }));
}

TEST_CASE("a client that does not read costs its answer, and then its connection") {
    auto options = unhurried();
    options.write_time = 300ms;
    options.linger = 1ms;
    Rig rig(options);
    Client client(rig.gateway.port(), 4096);
    client.send(rig.request(R"({"stream": true})"));
    REQUIRE(rig.until([&] { return rig.backend.calls == 1; }));
    const std::string piece(1 << 20, 'x');
    for (int i = 0; i < 16 && !rig.backend.pending.empty(); ++i) {
        rig.backend.text(0, piece);
        rig.settle(10ms);
    }
    CHECK(rig.until([&] { return rig.backend.cancelled == 1; }));
    CHECK(rig.until([&] { return rig.gateway.stats().connections == 0; }));
}

TEST_CASE("a client that reads slowly holds its text back, and then gets all of it") {
    Rig rig;
    Client client(rig.gateway.port(), 4096);
    client.send(rig.request(R"({"stream": true})"));
    REQUIRE(rig.until([&] { return rig.backend.calls == 1; }));
    const auto flow = rig.backend.pending.at(0).request.flow;
    REQUIRE(flow);
    std::string text;
    const std::string piece(50'000, 'x');
    // The system's buffers take the first few megabytes.
    for (int i = 0; i < 1000 && !flow->held(); ++i) {
        rig.backend.text(0, piece);
        text += piece;
        rig.settle(1ms);
    }
    REQUIRE(flow->held());
    REQUIRE(rig.until([&] {
        client.receive();
        return !flow->held();
    }));
    rig.backend.text(0, "y");
    text += "y";
    rig.backend.end(0, Rig::answer(text));
    REQUIRE(rig.until([&] {
        client.receive();
        return client.in.ends_with("0\r\n\r\n");
    }));
    CHECK(std::size_t(std::count(client.in.begin(), client.in.end(), 'x')) > text.size() - 1);
    CHECK(unchunked(client.in).ends_with("data: [DONE]\n\n"));
}

TEST_CASE("what is not streamed is never held back, nor what no client waits for") {
    auto options = unhurried();
    options.unread_limit = 10;
    options.linger = 2 * patience;
    Rig rig(options);
    // Anthropic's text that has to wait for what stands before it; a client that has gone.
    Client client(rig.gateway.port(), 4096);
    client.send(rig.request(R"({"stream": true})", {}, "/v1/messages"));
    REQUIRE(rig.until([&] { return rig.backend.calls == 1; }));
    rig.backend.text(0, "");
    rig.backend.text(0, std::string(100, 'x'));
    rig.settle();
    CHECK(!rig.backend.pending.at(0).request.flow->held());
    client.close();
    REQUIRE(rig.until([&] { return rig.gateway.stats().connections == 0; }));
    rig.backend.text(0, std::string(100, 'x'));
    CHECK(!rig.backend.pending.at(0).request.flow->held());
}

TEST_CASE("a head at its limit is taken, one over it refused, in whatever pieces it comes") {
    Rig rig(unhurried());
    const auto begin =
        fmt::format("GET /health HTTP/1.1\r\nHost: 127.0.0.1:{}\r\nX-A: ", rig.gateway.port());
    for (const std::size_t size : {65530, 65533, 65535, 65536, 65537, 65600, 70000, 200000}) {
        CAPTURE(size);
        auto& client = rig.connect();
        client.send(begin + std::string(size - begin.size(), 'a') + "\r\n\r\n");
        REQUIRE(rig.until([&] { return whole(client); }));
        CHECK(status(client) == (size <= 65536 ? 200 : 431));
    }
}

TEST_CASE("what is refused is refused before its body is read, and the backend never asked") {
    struct Row {
        std::string head;
        int status;
    };
    auto options = unhurried();
    options.body_limit = 1000;
    options.header_limit = 4000;
    Rig rig(options);
    const auto us = fmt::format("Host: 127.0.0.1:{}\r\n", rig.gateway.port());
    const std::string post = "POST /v1/chat/completions HTTP/1.1\r\n";
    const std::string json = "Content-Type: application/json\r\n";
    const Row rows[] = {
        {post + "Host: evil.example\r\n" + json + "Content-Length: 2\r\n\r\n", 421},
        {post + us + us + json + "Content-Length: 2\r\n\r\n", 400},
        {post + json + "Content-Length: 2\r\n\r\n", 400},
        {post + us + "Origin: http://evil.example\r\n" + json + "Content-Length: 2\r\n\r\n", 403},
        {"OPTIONS /v1/chat/completions HTTP/1.1\r\n" + us + "Origin: http://evil.example\r\n\r\n",
         403},
        {"OPTIONS /v1/chat/completions HTTP/1.1\r\n" + us + "\r\n", 405},
        {"GET /v1/../nothing HTTP/1.1\r\n" + us + "\r\n", 400},
        {"POST http://evil/v1/chat/completions HTTP/1.1\r\n" + us + json +
             "Content-Length: 2\r\n\r\n",
         400},
        {post + us + json + "Content-Length: 2\r\nContent-Length: 2\r\n\r\n", 400},
        {post + us + json + "Content-Length: 2, 2\r\n\r\n", 400},
        {post + us + json + "Content-Length: 2\r\nContent-Length: 3\r\n\r\n", 400},
        {post + us + json + "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n", 400},
        {post + us + json + "Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n", 400},
        {post + us + json + "Transfer-Encoding: xchunked\r\n\r\n", 501},
        {post + us + json + "Transfer-Encoding: chunked, identity\r\n\r\n", 501},
        {post + us + json + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
         400},
        {post + us + json + "Content-Length: +2\r\n\r\n", 400},
        {post + us + json + "Content-Length : 2\r\n\r\n", 400},
        {post + us + json + "Content-Length: 2\r\nX: a\nY: b\r\n\r\n", 400},
        {post + us + json + "Content-Length: 2\n\n{}", 400},
        {"POST /v1/chat/completions HTTP/1.1\nHost: x\n\n", 400},
        {post + us + json + "Content-Length: 2\r\nX: a\rb\r\n\r\n", 400},
        {post + us + json + std::string("Content-Length: 2\r\nX: a\0b\r\n\r\n", 29), 400},
        {"POST /v1/chat/completions HTTP/2.0\r\n" + us + "\r\n", 400},
        {"POST /v1/chat completions HTTP/1.1\r\n" + us + "\r\n", 400},
        {"nonsense\r\n\r\n", 400},
        {"\x16\x03\x01\x02\r\n\r\n", 400},
        {post + us + "Content-Type: text/plain\r\nContent-Length: 2\r\n\r\n", 415},
        {post + us + json + "\r\n", 411},
        {post + us + json + "Content-Length: 1001\r\n\r\n", 413},
        {post + us + json + "Content-Length: 99999999999999999999999999\r\n\r\n", 413},
        {post + us + json + "X: " + std::string(4000, 'a') + "\r\n\r\n", 431},
        {post + us + json + "X: " + std::string(9000, 'a'), 431},
        {post + us + json + "Transfer-Encoding: chunked\r\n\r\n3e9\r\n", 413},
        {post + us + json + "Transfer-Encoding: chunked\r\n\r\nxyz\r\n", 400},
        {post + us + json + "Transfer-Encoding: chunked\r\n\r\n2\r\n{}abc\r\n", 400},
        {post + us + json + "Expect: something\r\nContent-Length: 2\r\n\r\n", 417},
    };
    for (const auto& row : rows) {
        CAPTURE(row.head);
        auto& client = rig.connect();
        client.send(row.head);
        REQUIRE(rig.until([&] { return whole(client); }));
        CHECK(status(client) == row.status);
        CHECK(client.in.find("Connection: close\r\n") != std::string::npos);
        CHECK(client.in.find("Access-Control") == std::string::npos);
        CHECK(client.in.find("x-should-retry: false\r\n") != std::string::npos);
        CHECK(rig.until([&] { return client.ended; }));
        rig.clients.pop_back();
    }
    CHECK(rig.backend.calls == 0);
    CHECK(rig.gateway.stats().refused == std::size(rows));
}

TEST_CASE("a body over the limit is sent to its end, so that its client reads why") {
    auto options = unhurried();
    options.body_limit = 100'000;
    Rig rig(options);
    auto& client = rig.connect();
    const auto request = rig.request(std::string(8 << 20, ' '));
    std::string_view rest = request;
    REQUIRE(rig.until([&] {
        client.send(rest.substr(0, 60'000));
        rest.remove_prefix(std::min<std::size_t>(rest.size(), 60'000));
        return whole(client) && rest.empty();
    }));
    CHECK(status(client) == 413);
    CHECK(client.in.find("100000 bytes") != std::string::npos);
}

TEST_CASE("slow headers, a body that stops and an idle connection end") {
    SECTION("headers") {
        CHECK(tests::with_longer_limits([](int times) {
            auto options = unhurried();
            options.header_time = 100ms * times;
            Rig rig(options);
            auto& silent = rig.connect();
            auto& slow = rig.connect();
            slow.send("POST /v1/chat/comp");
            REQUIRE(rig.until([&] { return silent.ended && slow.ended; }));
            CHECK(silent.in == "");
            if (slow.in == "") return false; // what it sent was not seen in time
            CHECK(status(slow) == 408);
            return true;
        }));
    }
    SECTION("a body") {
        auto options = unhurried();
        options.body_time = 100ms;
        Rig rig(options);
        auto& stopped = rig.connect();
        const auto request = rig.request("{      }");
        stopped.send(request.substr(0, request.size() - 3));
        REQUIRE(rig.until([&] { return stopped.ended; }));
        CHECK(status(stopped) == 408);
        CHECK(rig.backend.calls == 0);
    }
    SECTION("a body that comes byte by byte") {
        auto options = unhurried();
        options.body_time = 200ms;
        options.body_rate = 1 << 20;
        Rig rig(options);
        for (const bool chunked : {false, true}) {
            auto& slow = rig.connect();
            slow.send(
                fmt::format("POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{}\r\n"
                            "Content-Type: application/json\r\n{}\r\n\r\n",
                            rig.gateway.port(),
                            chunked ? "Transfer-Encoding: chunked" : "Content-Length: 9999999"));
            CHECK(rig.until([&] {
                slow.send(chunked ? "1\r\n \r\n" : " "); // never still for so long
                return slow.ended;
            }));
            CHECK(status(slow) == 408);
        }
        // As fast as that it may last: each byte gives it another second.
        options.body_rate = 1;
        options.body_time = 2 * patience;
        Rig other(options);
        auto& steady = other.connect();
        const auto request = other.request(std::string(300, ' ') + "{}");
        for (std::size_t i = 0; i < request.size(); i += 100) {
            steady.send(request.substr(i, 100));
            other.settle(1ms);
        }
        CHECK(other.until([&] { return other.backend.calls == 1; }));
        other.backend.end(0, Rig::answer());
        CHECK(other.until([&] { return whole(steady); }));
    }
    SECTION("between two requests") {
        auto options = unhurried();
        options.idle_time = 100ms;
        Rig rig(options);
        auto& idle = rig.connect();
        idle.send(rig.get("/health"));
        REQUIRE(rig.until([&] { return idle.ended; }));
        CHECK(status(idle) == 200);
    }
}

TEST_CASE("connections over the limit wait until another has ended, or is idle longest") {
    auto options = unhurried();
    options.connections = 2;
    Rig rig(options);
    auto& first = rig.connect();
    auto& second = rig.connect();
    for (auto* it : {&first, &second}) it->send(rig.request("{}"));
    REQUIRE(rig.until([&] { return rig.backend.calls == 2; }));
    auto& third = rig.connect();
    third.send(rig.get("/health"));
    rig.settle(100ms);
    CHECK(third.in == "");
    rig.backend.end(1, Rig::answer());
    CHECK(rig.until([&] { return whole(third) && second.ended; }));
    CHECK(whole(second)); // it had its answer
    rig.backend.end(0, Rig::answer());
    REQUIRE(rig.until([&] { return whole(first); }));
    auto& fourth = rig.connect();
    fourth.send(rig.get("/health"));
    CHECK(rig.until([&] { return whole(fourth) && third.ended; }));
    CHECK(!first.ended);
}

TEST_CASE("a token is asked for, and a server that others reach needs one") {
    auto options = unhurried();
    options.token = "s3cret";
    Rig rig(options);
    auto& client = rig.connect();
    client.send(rig.request("{}", "Authorization: Bearer wrong-k3y\r\n"));
    REQUIRE(rig.until([&] { return whole(client); }));
    CHECK(status(client) == 401);
    CHECK(client.in.find("k3y") == std::string::npos);
    CHECK(client.in.find("s3cret") == std::string::npos);
    auto& good = rig.connect();
    good.send(rig.request("{}", "Authorization: Bearer s3cret\r\n"));
    REQUIRE(rig.until([&] { return rig.backend.calls == 1; }));
    rig.backend.end(0, Rig::answer());
    CHECK(rig.until([&] { return whole(good); }));

    for (const auto host : {"0.0.0.0", "::", "192.0.2.1", "example.org", ""}) {
        auto open = unhurried();
        open.host = host;
        CHECK_THROWS_AS(Gateway(rig.io.get_executor(), rig.backend, open), std::invalid_argument);
    }
    auto open = unhurried();
    open.host = "0.0.0.0";
    open.token = "t";
    CHECK_NOTHROW(Gateway(rig.io.get_executor(), rig.backend, open));
}

TEST_CASE("a port that is taken is an error with words") {
    Rig rig;
    auto options = unhurried();
    options.port = rig.gateway.port();
    Gateway second(rig.io.get_executor(), rig.backend, options);
    const auto failure = second.open();
    CHECK(failure.code == asio::error::address_in_use);
    CHECK(failure.detail.find(std::to_string(options.port)) != std::string::npos);
}

TEST_CASE("health, metrics and models are answered without the backend") {
    auto options = unhurried();
    options.model = "the-model";
    options.in_flight = [] { return 0u; };
    Rig rig(options);
    auto& client = rig.connect();
    const auto ask = [&](std::string_view path) {
        client.in.clear();
        client.send(rig.get(path));
        CHECK(rig.until([&] { return whole(client); }));
        return client.in;
    };
    CHECK(ask("/health").find(R"({"status": "ok"})") != std::string::npos);
    CHECK(ask("/v1/models").find("the-model") != std::string::npos);
    CHECK(ask("/models").find("the-model") != std::string::npos);
    CHECK(ask("/metrics").find("evalrt_connections 1\n") != std::string::npos);
    client.in.clear();
    client.send(rig.request(R"({"prompt": "a"})", {}, "/tokenize"));
    REQUIRE(rig.until([&] { return whole(client); }));
    CHECK(status(client) == 404); // nobody is there who could
    CHECK(rig.backend.calls == 0);
    client.in.clear();
    auto head = rig.get("/health");
    client.send(head.replace(0, 3, "HEAD") + rig.get("/metrics"));
    REQUIRE(
        rig.until([&] { return client.in.find("evalrt_requests_total 0\n") != client.in.npos; }));
    CHECK(client.in.starts_with("HTTP/1.1 200 OK\r\n"));
    const auto end = client.in.find("\r\n\r\n") + 4;
    CHECK(client.in.find("Content-Length: 16\r\n") < end);
    CHECK(client.in.substr(end).starts_with("HTTP/1.1 200 OK\r\n"));
}

TEST_CASE("closing ends connections and requests, and completes when none is left") {
    Rig rig;
    auto& waiting = rig.connect();
    waiting.send(rig.request("{}"));
    auto& away = rig.connect();
    away.send(rig.request(R"({"a": 1})"));
    rig.connect();
    REQUIRE(rig.until([&] { return rig.backend.calls == 2; }));
    away.close();
    rig.settle();
    bool closed = false;
    rig.gateway.async_close([&](error_code) { closed = true; });
    CHECK(rig.until([&] { return closed; }));
    CHECK(rig.backend.cancelled == 2);
    CHECK(rig.gateway.stats().connections == 0);
    CHECK(rig.gateway.stats().open == 0);
}

TEST_CASE("a gateway may be gone before what it has begun") {
    asio::io_context io{1};
    tests::ScriptedBackend backend(io.get_executor());
    auto options = unhurried();
    int answers = 0;
    options.on_answer = [&](const Response&) { ++answers; };
    {
        Gateway gateway(io.get_executor(), backend, options);
        REQUIRE(!gateway.open());
        Client client(gateway.port());
        client.send(fmt::format("POST /completions HTTP/1.1\r\nHost: localhost:{}\r\nContent-Type: "
                                "application/json\r\nContent-Length: 2\r\n\r\n{{}}",
                                gateway.port()));
        const auto end = Clock::now() + patience;
        while (backend.calls == 0 && Clock::now() < end) io.run_for(1ms);
    }
    REQUIRE(backend.calls == 1);
    io.restart();
    io.run_for(patience); // ends when nothing is left
    CHECK(io.stopped());
    CHECK(backend.cancelled == 1);
    CHECK(answers == 0);
}
