#include "evalrt/detail/sse_parser.hpp"

#include "support/catch.hpp"
#include "support/every_cut.hpp"

#include <ostream>
#include <random>

using evalrt::detail::SseEvent;
using evalrt::detail::SseParser;
using evalrt::test::every_cut;
using evalrt::test::Pieces;

namespace {

struct Seen {
    std::string type, data;
    friend bool operator==(const Seen&, const Seen&) = default;
    friend std::ostream& operator<<(std::ostream& out, const Seen& it) {
        return out << '[' << it.type << '|' << it.data << ']';
    }
};

struct Run {
    std::vector<Seen> events;
    bool good = true; // no event was over the limit
    friend bool operator==(const Run&, const Run&) = default;
    friend std::ostream& operator<<(std::ostream& out, const Run& it) {
        for (const auto& event : it.events) out << event;
        return out << (it.good ? "" : " over the limit");
    }
};

Run run(const Pieces& pieces, std::size_t limit = 8 << 20) {
    Run seen;
    SseParser parser(limit);
    const auto on_event = [&](const SseEvent& event) {
        seen.events.push_back({std::string(event.type), std::string(event.data)});
    };
    for (const auto piece : pieces)
        if (!parser.feed(piece, on_event)) {
            seen.good = false;
            return seen;
        }
    parser.finish(on_event);
    return seen;
}

// What the stream gives, the same at every cut.
Run run_all(std::string_view bytes, std::size_t limit = 8 << 20) {
    const Run whole = run({bytes}, limit);
    every_cut(bytes, [&](const Pieces& pieces) { REQUIRE(run(pieces, limit) == whole); });
    return whole;
}

std::vector<Seen> events(std::string_view bytes) {
    const Run whole = run_all(bytes);
    CHECK(whole.good);
    return whole.events;
}

using Events = std::vector<Seen>;

// The standard's text, word for word, on the whole stream at once.
Events by_the_book(std::string text) {
    if (text.starts_with("\xEF\xBB\xBF")) text.erase(0, 3);
    std::vector<std::string> lines(1);
    for (std::size_t i = 0; i < text.size(); ++i) {
        if (text[i] == '\r' && i + 1 < text.size() && text[i + 1] == '\n') ++i;
        if (text[i] == '\r' || text[i] == '\n')
            lines.emplace_back();
        else
            lines.back() += text[i];
    }
    lines.emplace_back(); // the end counts as a blank line
    Events found;
    std::string type, data;
    for (const auto& line : lines) {
        if (line.empty()) {
            if (!data.empty()) found.push_back({type, data.substr(0, data.size() - 1)});
            type.clear(), data.clear();
            continue;
        }
        const auto colon = line.find(':');
        const auto field = line.substr(0, colon);
        auto value = colon == line.npos ? "" : line.substr(colon + 1);
        if (value.starts_with(' ')) value.erase(0, 1);
        if (field == "data") data += value + '\n';
        if (field == "event") type = value;
    }
    return found;
}

} // namespace

TEST_CASE("an event ends at a blank line, whatever ends a line") {
    for (const std::string end : {"\n", "\r\n", "\r"}) {
        INFO(int(end[0]) << " " << end.size());
        CHECK(events("data: a" + end + end + "data: b" + end + "data: c" + end + end) ==
              Events{{"", "a"}, {"", "b\nc"}});
    }
    CHECK(events("data: a\r\n\ndata: b\n\rdata: c\r\rdata: d\n\r\n") ==
          Events{{"", "a"}, {"", "b"}, {"", "c"}, {"", "d"}});
}

TEST_CASE("a CR LF cut in two is one line end") {
    CHECK(run({"data: a\r", "\ndata: b\r\n\r\n"}).events == Events{{"", "a\nb"}});
    CHECK(run({"data: a\r", "", "\n", "\r", "\n", "data: b\r\n\r\n"}).events ==
          Events{{"", "a"}, {"", "b"}});
}

TEST_CASE("a byte order mark counts at the very beginning only") {
    CHECK(events("\xEF\xBB\xBF"
                 "data: a\n\n") == Events{{"", "a"}});
    CHECK(events("data: a\n\n\xEF\xBB\xBF"
                 "data: b\n\n") == Events{{"", "a"}});
    CHECK(events("\xEF\xBB\xBF\xEF\xBB\xBF"
                 "data: a\n\n") == Events{});
    CHECK(events("\xEF\xBB\xBF") == Events{});
    CHECK(events("\xEF\xBB\xBF\n\xEF\xBB\xBF"
                 "data: a\n\n") == Events{});
    CHECK(events("\xEF\xBB"
                 "data: a\n\n") == Events{});
}

TEST_CASE("comments are handed on, but for one that the end cuts off") {
    every_cut(": keepalive 0/37\n\ndata: a\n:b\r\n: keepalive 37/37\ndata: b\n\n: no end",
              [](const Pieces& pieces) {
                  SseParser parser;
                  std::string comments;
                  for (const auto piece : pieces)
                      parser.feed(
                          piece, [](const SseEvent&) {},
                          [&](std::string_view text) { comments += std::string(text) + '|'; });
                  REQUIRE(comments == "keepalive 0/37|b|keepalive 37/37|");
              });
}

TEST_CASE("comments are no events and part none") {
    CHECK(events(":\n\n") == Events{});
    CHECK(events(": ping\n\n:\r\n\r\n") == Events{});
    CHECK(events(": keepalive 0/37\n\ndata: a\n: keepalive 37/37\ndata: b\n\n: keep-alive\n\n") ==
          Events{{"", "a\nb"}});
    CHECK(events("data: a\n\n: no end") == Events{{"", "a"}});
    CHECK(events(":data: a\n\n") == Events{});
}

TEST_CASE("an empty data line is data, a block without one is no event") {
    CHECK(events("data\n\n") == Events{{"", ""}});
    CHECK(events("data:\n\n") == Events{{"", ""}});
    CHECK(events("data: \n\n") == Events{{"", ""}});
    CHECK(events("data\ndata\n\n") == Events{{"", "\n"}});
    CHECK(events("data:\ndata: a\ndata\n\n") == Events{{"", "\na\n"}});
    CHECK(events("event: ping\n\n") == Events{});
    CHECK(events("\n\n\n") == Events{});
    CHECK(events("") == Events{});
}

TEST_CASE("one space after the colon goes, all else of the value stays") {
    CHECK(events("data:a\n\n") == Events{{"", "a"}});
    CHECK(events("data:  a \n\n") == Events{{"", " a "}});
    CHECK(events("data:\ta\n\n") == Events{{"", "\ta"}});
    CHECK(events("data: a: b:\n\n") == Events{{"", "a: b:"}});
    CHECK(events("data::\n\n") == Events{{"", ":"}});
    CHECK(events(std::string_view("data: a\0b\n\n", 11)) == Events{{"", std::string("a\0b", 3)}});
}

TEST_CASE("an event's type holds for that event") {
    CHECK(events("event: error\ndata: a\n\ndata: b\n\n") == Events{{"error", "a"}, {"", "b"}});
    CHECK(events("data: a\nevent: error\n\n") == Events{{"error", "a"}});
    CHECK(events("event: x\nevent: y\ndata: a\n\n") == Events{{"y", "a"}});
    CHECK(events("event: x\nevent\ndata: a\n\n") == Events{{"", "a"}});
    CHECK(events("event: ping\n\ndata: a\n\n") == Events{{"", "a"}});
}

TEST_CASE("other fields do no harm") {
    CHECK(events(std::string_view("id: 1\0002\nretry: 10\nretry: x\ndata: a\nfoo: b\nfoo\n\n",
                                  47)) == Events{{"", "a"}});
    CHECK(events("Data: a\n data: b\ndata : c\ndataa: d\n\n") == Events{});
    CHECK(events("id\nid:\ndata: a\nid: 7\n\n") == Events{{"", "a"}});
}

TEST_CASE("an event that the end of the stream cuts off counts") {
    CHECK(events("data: [DONE]") == Events{{"", "[DONE]"}});
    CHECK(events("data: [DONE]\n") == Events{{"", "[DONE]"}});
    CHECK(events("data: [DONE]\r") == Events{{"", "[DONE]"}});
    CHECK(events("data: [DONE]\r\n") == Events{{"", "[DONE]"}});
    CHECK(events("data: a\n\nevent: x\ndata: b\ndata: c") == Events{{"", "a"}, {"x", "b\nc"}});
    CHECK(events("data: a\ndat") == Events{{"", "a"}});
    CHECK(events("data") == Events{{"", ""}});
}

TEST_CASE("characters of several bytes survive every cut") {
    const std::string text = "\xE4\xBD\xA0\xE5\xA5\xBD\xF0\x9F\x98\x80\xC3\xA9";
    CHECK(events("data: " + text + "\n\n") == Events{{"", text}});
    CHECK(events("data: \xff\xED\xA0\x80\n\n") == Events{{"", "\xff\xED\xA0\x80"}});
}

TEST_CASE("what is over the limit is refused, at every cut") {
    // The limit counts an event's bytes up to and with its last line.
    CHECK(run_all("data: 12345678901234\n\n", 20).good);
    CHECK_FALSE(run_all("data: 123456789012345\n\n", 20).good);
    CHECK(run_all("data: 1\ndata: 1\ndata: 1\ndata: 1\n\n", 20).good);
    CHECK_FALSE(run_all("data: 12345\ndata: 12345\ndata: 12345\n\n", 20).good);
    CHECK_FALSE(run_all(": a comment of more than 20 bytes\n\n", 20).good);
    CHECK_FALSE(run_all("event: a type of more than 20 bytes\n\n", 20).good);
    CHECK_FALSE(run_all("no line end in more than 20 bytes", 20).good);
    // Events before it are delivered all the same; one after another they do not add up.
    CHECK(run_all("data: 1234567890\n\ndata: 1234567890\n\ndata: 1234567890\n\n", 20).good);
    const auto part = run_all("data: a\n\ndata: 12345678901234567890\n\ndata: b\n\n", 20);
    CHECK_FALSE(part.good);
    CHECK(part.events == Events{{"", "a"}});
}

TEST_CASE("a stream without line ends is given up at the limit") {
    SseParser parser(1 << 20);
    const std::string piece(64 << 10, 'x');
    std::size_t fed = 0;
    while (parser.feed(piece, [](const SseEvent&) {})) REQUIRE((fed += piece.size()) <= 1 << 20);
    CHECK(fed == 1 << 20);
}

TEST_CASE("a line of megabytes arrives") {
    for (const std::size_t size : {(1 << 20) - 1, 1 << 20, (1 << 20) + 1, 5 << 20}) {
        const std::string data(size, 'x');
        const std::string stream = "data: " + data + "\n\n";
        Pieces pieces;
        for (std::size_t i = 0; i < stream.size(); i += 65521)
            pieces.push_back(std::string_view(stream).substr(i, 65521));
        CHECK((run({stream}) == Run{{{"", data}}}));
        CHECK((run(pieces) == Run{{{"", data}}}));
    }
    const std::string stream = "data: " + std::string(1 << 20, 'x') + "\n\n";
    Pieces single;
    for (std::size_t i = 0; i < stream.size(); ++i)
        single.push_back(std::string_view(stream).substr(i, 1));
    CHECK(run(single) == run({stream}));
}

TEST_CASE("random streams give what the standard says, at every cut") {
    std::mt19937 random(7);
    const std::string_view words[] = {"data",         ":",       " ",        "\n",
                                      "\r",           "\n\n",    "\r\n",     "event",
                                      "data:",        "data: x", "\r\n\r\n", "x",
                                      "\xEF\xBB\xBF", "id",      "\n\r",     "data\n",
                                      "event: y\n"};
    for (int i = 0; i < 1500; ++i) {
        std::string stream;
        for (auto n = random() % 14; n > 0; --n) stream += words[random() % std::size(words)];
        CAPTURE(stream);
        REQUIRE(run_all(stream).events == by_the_book(stream));
    }
}
