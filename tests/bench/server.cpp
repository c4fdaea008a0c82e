// A server that thinks of nothing: every request gets the same answer. Prints its port.
//   stream EVENTS  so many events and [DONE], each written by itself
//   burst EVENTS   the same in one write
//   body BYTES     a completion whose text has so many bytes, in one write
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdio>
#include <string>
#include <vector>

namespace {

namespace asio = boost::asio;
using asio::ip::tcp;

constexpr auto token = asio::as_tuple(asio::use_awaitable);

std::string chunk(const std::string& data) {
    return fmt::format("{:x}\r\n{}\r\n", data.size(), data);
}

std::vector<std::string> answer(const std::string& what, std::size_t size) {
    if (what == "body") {
        const auto body = fmt::format(
            R"({{"id": "c1", "object": "chat.completion", "choices": [{{"index": 0, "message": )"
            R"({{"role": "assistant", "content": "{}"}}, "finish_reason": "stop"}}], "usage": )"
            R"({{"prompt_tokens": 900, "completion_tokens": 200}}}})",
            std::string(size, 'x'));
        return {fmt::format("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                            "Content-Length: {}\r\n\r\n{}",
                            body.size(), body)};
    }
    std::vector<std::string> writes{"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                                    "Transfer-Encoding: chunked\r\n\r\n"};
    for (std::size_t i = 0; i < size; ++i)
        writes.push_back(chunk(fmt::format(
            R"(data: {{"id": "chatcmpl-0123456789", "object": "chat.completion.chunk", "created": )"
            R"(1700000000, "model": "m", "choices": [{{"index": 0, "delta": {{"content": )"
            R"(" word{}"}}, "logprobs": null, "finish_reason": {}}}]}})"
            "\n\n",
            i, i + 1 < size ? "null" : "\"stop\"")));
    writes.push_back(chunk("data: [DONE]\n\n") + chunk(""));
    if (what == "burst") writes = {fmt::format("{}", fmt::join(writes, ""))};
    return writes;
}

asio::awaitable<void> serve(tcp::socket socket, const std::vector<std::string>& writes) {
    const auto executor = socket.get_executor();
    socket.set_option(tcp::no_delay(true));
    std::string in(64 << 10, '\0');
    for (std::size_t have = 0;;) {
        std::size_t whole = 0;
        for (;;) {
            const std::string_view seen(in.data(), have);
            if (const auto end = seen.find("\r\n\r\n"); end != seen.npos) {
                const auto field = seen.find("Content-Length: ");
                whole = end + 4 + (field < end ? std::stoul(in.substr(field + 16, 12)) : 0);
                if (have >= whole) break;
                if (in.size() < whole) in.resize(whole);
            }
            auto [ec, n] =
                co_await socket.async_read_some(asio::buffer(&in[have], in.size() - have), token);
            if (ec) co_return;
            have += n;
        }
        have -= whole;
        for (const auto& bytes : writes) {
            auto [ec, n] = co_await asio::async_write(socket, asio::buffer(bytes), token);
            if (ec) co_return;
            if (writes.size() > 1) co_await asio::post(executor, asio::use_awaitable); // the others
        }
    }
}

asio::awaitable<void> accept(tcp::acceptor& acceptor, const std::vector<std::string>& writes) {
    for (;;) {
        auto [ec, socket] = co_await acceptor.async_accept(token);
        if (ec) co_return;
        asio::co_spawn(acceptor.get_executor(), serve(std::move(socket), writes), asio::detached);
    }
}

} // namespace

int main(int argc, char** argv) {
    if (argc != 3) {
        std::fputs("usage: bench_server {stream|burst|body} SIZE\n", stderr);
        return 2;
    }
    const auto writes = answer(argv[1], std::stoul(argv[2]));
    asio::io_context io(1);
    tcp::acceptor acceptor(io, {asio::ip::address_v4::loopback(), 0});
    fmt::print("{}\n", acceptor.local_endpoint().port());
    std::fflush(stdout);
    asio::co_spawn(io, accept(acceptor, writes), asio::detached);
    io.run();
}
