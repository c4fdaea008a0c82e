#include "http_request.hpp"

#include "support/catch.hpp"

#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>

#include <fmt/format.h>

#include <random>
#include <string>

using namespace evalrt::detail;
namespace http = boost::beast::http;

namespace {

std::string wrong(const std::string& bytes) {
    RequestHead head;
    return read_request_head(bytes, head);
}

std::string with(std::string_view line) {
    return fmt::format("POST /a HTTP/1.1\r\nHost: x\r\n{}\r\n\r\n", line);
}

struct Taken {
    std::string body, left;
    ChunkedBody::State state = ChunkedBody::State::more;
    bool operator==(const Taken&) const = default;
};

// As a connection does it: what is left comes again, with so many bytes more.
Taken take(std::string_view bytes, std::size_t step, std::size_t limit = 1000) {
    Taken out;
    ChunkedBody chunks;
    for (std::size_t at = 0; at < bytes.size() && chunks.state() == ChunkedBody::State::more;
         at += step) {
        out.left += bytes.substr(at, step);
        out.left.erase(0, chunks.take(out.left, out.body, limit));
    }
    out.state = chunks.state();
    return out;
}

} // namespace

TEST_CASE("a head is its method, target, version and fields") {
    RequestHead head;
    const std::string bytes =
        "POST /v1/x?a=%20b HTTP/1.0\r\nHost: a:1\r\nx-EMPTY:\r\nT: \t a b\xc3\xa9 \r\n\r\n";
    REQUIRE(read_request_head(bytes, head) == "");
    CHECK(head.method == "POST");
    CHECK(head.target == "/v1/x?a=%20b");
    CHECK(head.old);
    REQUIRE(head.fields.size() == 3);
    CHECK(head.fields[0].name == "Host");
    CHECK(head.fields[0].value == "a:1");
    CHECK(head.fields[1].name == "x-EMPTY");
    CHECK(head.fields[1].value == "");
    CHECK(head.fields[2].value == "a b\xc3\xa9");
    REQUIRE(read_request_head("GET / HTTP/1.1\r\n\r\n", head) == "");
    CHECK(!head.old);
    CHECK(head.fields.empty());
}

TEST_CASE("what could be read in two ways is no head") {
    CHECK(wrong(with("A: b")) == "");
    for (const auto line : {"A : b",      " A: b",      "\tA: b",   "A\t: b",      "A",
                            ": b",        "",           "A b: c",   "A: b\r\n  c", "A: b\r\n\tc",
                            "A: b\nC: d", "A: b\rC: d", "A: b\r\r", "A(b): c",     "A\x80: b",
                            "A: b\x7f",   "A: \x01",    "A: \x1f",  "\"A\": b",    "A\r: b"}) {
        CAPTURE(line);
        CHECK(wrong(with(line)) != "");
    }
    CHECK(wrong(with(std::string_view("A: \0", 4))) != "");
    CHECK(wrong(with(std::string_view("A\0: b", 5))) != "");
    for (const auto first :
         {"", "POST", "POST /a", "POST  /a HTTP/1.1", "POST /a  HTTP/1.1", " POST /a HTTP/1.1",
          "POST /a HTTP/1.1 ", "POST /a b HTTP/1.1", "POST /a HTTP/1.2", "POST /a HTTP/2.0",
          "POST /a http/1.1", "POST /a HTTP/1.10", "POST\t/a\tHTTP/1.1", "P(ST /a HTTP/1.1",
          "POST /\x7f HTTP/1.1", "POST /\xc3\xa9 HTTP/1.1", "POST /a\tb HTTP/1.1", "/a HTTP/1.1"}) {
        CAPTURE(first);
        CHECK(wrong(fmt::format("{}\r\nHost: x\r\n\r\n", first)) != "");
    }
    CHECK(wrong("GET / HTTP/1.1\r\n") != "");
    CHECK(wrong("GET / HTTP/1.1\r\nA: b\r\n") != "");
    CHECK(wrong("GET / HTTP/1.1\r\n\r\nx") != "");
    CHECK(wrong("") != "");
}

TEST_CASE("a head that is taken is taken by Beast, too, and says the same there") {
    std::mt19937 random(7);
    const std::string good = "POST /v1/a HTTP/1.1\r\nHost: 127.0.0.1:1\r\nA-b: c d\r\nE:\r\n\r\n";
    constexpr char odd[] = "\r\n\t\0 :aH/1.\x7f\xc3,;\"";
    const std::string_view spice(odd, sizeof odd - 1);
    int taken = 0;
    for (int i = 0; i < 20'000; ++i) {
        auto bytes = good;
        for (int n = int(random() % 3); n > 0; --n) {
            const auto at = random() % bytes.size();
            const char c = spice[random() % spice.size()];
            switch (random() % 3) {
            case 0: bytes[at] = c; break;
            case 1: bytes.insert(at, 1, c); break;
            default: bytes.erase(at, 1);
            }
        }
        RequestHead head;
        if (!read_request_head(bytes, head).empty()) continue;
        ++taken;
        CAPTURE(bytes);
        http::request_parser<http::string_body> beast;
        boost::system::error_code ec;
        const auto used = beast.put(boost::asio::const_buffer(bytes.data(), bytes.size()), ec);
        REQUIRE(!ec);
        CHECK(used == bytes.size());
        const auto view = [](auto text) { return std::string_view(text.data(), text.size()); };
        CHECK(view(beast.get().method_string()) == head.method);
        CHECK(view(beast.get().target()) == head.target);
        CHECK((beast.get().version() < 11) == head.old);
        std::size_t n = 0;
        for (const auto& it : beast.get()) {
            REQUIRE(n < head.fields.size());
            CHECK(view(it.name_string()) == head.fields[n].name);
            CHECK(view(it.value()) == head.fields[n++].value);
        }
        CHECK(n == head.fields.size());
    }
    CHECK(taken > 5000);
}

TEST_CASE("chunks are the same body, wherever they are cut") {
    const std::string bytes =
        "3\r\n{\"a\r\n0A;x=\"y\"\r\n0123456789\r\n1 ;z\r\n}\r\n000\r\nT: x\r\nU:\r\n\r\nnext";
    for (std::size_t step = 1; step <= bytes.size(); ++step) {
        const auto it = take(bytes, step);
        CHECK(it.body == "{\"a0123456789}");
        CHECK(it.state == ChunkedBody::State::done);
        CHECK(std::string_view("next").starts_with(it.left));
    }
    CHECK(take(bytes, bytes.size()).left == "next");
    CHECK(take("0\r\n\r\n", 1).state == ChunkedBody::State::done);
    CHECK(take("5\r\nab", 1).state == ChunkedBody::State::more);
}

TEST_CASE("what are no chunks ends, wherever it is cut") {
    for (const auto bytes :
         {"\r\n", "x\r\n", "-1\r\n", "+1\r\n", "0x1\r\n", " 1\r\na\r\n", "1 \r\na\r\n",
          "1,\r\na\r\n", "1\na\r\n", "1\r\nab\r\n", "1\r\na\n0\r\n\r\n", "1\r\na0\r\n\r\n",
          "1\r;x\r\na\r\n", "0\r\nA\r\n\r\n", "0\r\nA : b\r\n\r\n", "0\r\nA: b\n\r\n",
          "1;\x01\r\na\r\n", ";x\r\n", "10000000000000000\r\n"}) {
        CAPTURE(bytes);
        for (std::size_t step = 1; step < 20; ++step)
            CHECK(take(bytes, step).state == ChunkedBody::State::bad);
    }
    // Lines without an end, and trailers without an end.
    CHECK(take("1;" + std::string(5000, 'x'), 100).state == ChunkedBody::State::bad);
    CHECK(take(std::string(5000, '0'), 100).state == ChunkedBody::State::bad);
    std::string trailers = "0\r\n";
    for (int i = 0; i < 1000; ++i) trailers += "A: bcdef\r\n";
    CHECK(take(trailers, 100).state == ChunkedBody::State::bad);
}

TEST_CASE("chunks over the limit end before they have come") {
    CHECK(take("3e9\r\n", 1).state == ChunkedBody::State::large);
    CHECK(take("3e8\r\n", 1).state == ChunkedBody::State::more);
    CHECK(take("1\r\na\r\n3e8\r\n", 1).state == ChunkedBody::State::large);
    CHECK(take("fffffffffffffff\r\n", 1).state == ChunkedBody::State::large);
    CHECK(take("1\r\na\r\nfffffffffffffff\r\n", 1).state == ChunkedBody::State::large);
}
