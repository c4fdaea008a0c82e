#include "conversations.hpp"

#include "support/catch.hpp"

#include <string>
#include <vector>

using evalrt::Clock;
using evalrt::detail::Conversations;
using namespace std::chrono_literals;

namespace {

const Clock::time_point start{1h};

std::string say(std::string_view role, std::string_view text) {
    return R"({"role": ")" + std::string(role) + R"(", "content": ")" + std::string(text) + R"("})";
}

std::string body(const std::string& messages, const std::string& more = {}) {
    return R"({"model": "m", "messages": [)" + messages + "]" + more + "}";
}

const std::string hi = say("user", "hi"), hello = say("assistant", "hello"),
                  more = say("user", "more");

struct Rig {
    Conversations conversations;
    Clock::time_point now = start;

    Conversations::Turn ask(const std::string& messages, const std::string& rest = {},
                            std::string_view endpoint = "/v1/chat/completions") {
        return conversations.asked(endpoint, body(messages, rest), now);
    }
    Conversations::Turn answer(const std::string& messages, std::string_view text,
                               const std::string& rest = {}) {
        const auto turn = ask(messages, rest);
        conversations.answered(turn, text, now);
        return turn;
    }
};

} // namespace

TEST_CASE("messages that go on where an answer was are the conversation's next turn") {
    Rig rig;
    const auto first = rig.answer(hi, "hello");
    CHECK(first.turn == 0);
    const auto second = rig.answer(hi + "," + hello + "," + more, "yes");
    CHECK(second.conversation == first.conversation);
    CHECK(second.turn == 1);
    const auto third = rig.ask(hi + "," + hello + "," + more + "," + say("assistant", "yes") + "," +
                               say("tool", "1") + "," + say("tool", "2"));
    CHECK(third.conversation == first.conversation);
    CHECK(third.turn == 2);
    const auto other = rig.ask(more);
    CHECK(other.conversation != first.conversation);
    CHECK(other.turn == 0);
}

TEST_CASE("what only begins alike is no conversation's next turn") {
    Rig rig;
    rig.answer(hi, "hello");
    CHECK(rig.ask(hi + "," + more).turn == 0);                              // no answer between
    CHECK(rig.ask(say("user", "ho") + "," + hello + "," + more).turn == 0); // another question
    CHECK(rig.ask(hi + "," + hello + "," + more, {}, "/v1/messages").turn == 0);
    CHECK(rig.ask(hi + "," + hello + "," + more, R"(, "system": "s")").turn == 0);
    CHECK(rig.ask(hi).turn == 0); // the same once more
    CHECK(rig.ask(hi + "," + hello + "," + more).turn == 1);
}

TEST_CASE("a request that has not been answered is not gone on with") {
    Rig rig;
    const auto first = rig.ask(hi);
    CHECK(rig.ask(hi + "," + hello).turn == 0);
    rig.conversations.answered(first, "hello", rig.now);
    CHECK(rig.ask(hi + "," + hello + "," + more).turn == 1);
}

TEST_CASE("of several that have asked the same, the one that was answered so goes on") {
    Rig rig;
    const auto a = rig.answer(hi, "one"), b = rig.answer(hi, "two"), c = rig.answer(hi, "three");
    const auto go_on = [&](std::string_view text) {
        return rig.ask(hi + "," + say("assistant", text) + "," + more).conversation;
    };
    CHECK(go_on("two") == b.conversation);
    CHECK(go_on("three") == c.conversation);
    CHECK(go_on("something of its own") == a.conversation); // cut, perhaps
    const auto branch = rig.ask(hi + "," + say("assistant", "two") + "," + more);
    CHECK(branch.turn == 0); // each goes on once
    CHECK(branch.conversation > c.conversation);
}

TEST_CASE("thousands that have asked the same go on each by itself, the last ones remembered") {
    Rig rig{Conversations(3000)};
    std::vector<Conversations::Turn> turns;
    for (int i = 0; i < 5000; ++i) {
        turns.push_back(rig.ask(hi));
        if (i % 7 == 3)
            rig.conversations.failed(turns.back());
        else
            rig.conversations.answered(turns.back(), std::to_string(i), rig.now);
    }
    for (const int i : {4999, 2010, 3000, 4001}) {
        const auto next = rig.ask(hi + "," + say("assistant", std::to_string(i)) + "," + more);
        CHECK(next.conversation == turns[std::size_t(i)].conversation);
        CHECK(next.turn == 1);
    }
    // Of those that have failed or are forgotten, another one's: somebody's answer was cut.
    for (const int i : {2012, 100}) {
        const auto next = rig.ask(hi + "," + say("assistant", std::to_string(i)) + "," + more);
        CHECK(next.turn == 1);
        CHECK(next.conversation != turns[std::size_t(i)].conversation);
    }
    rig.conversations.failed(turns[100]); // whom nobody knows any more
    rig.conversations.answered(turns[100], "x", rig.now);
    for (int i = 0; i < 3000; ++i) rig.answer(say("user", std::to_string(i)), "hello");
    CHECK(rig.ask(hi + "," + say("assistant", "4998") + "," + more).turn == 0);
}

TEST_CASE("a turn that failed may be asked again") {
    Rig rig;
    const auto first = rig.answer(hi, "hello");
    const auto messages = hi + "," + hello + "," + more;
    rig.conversations.failed(rig.ask(messages));
    const auto again = rig.ask(messages);
    CHECK(again.conversation == first.conversation);
    CHECK(again.turn == 1);
}

TEST_CASE("marks for a cache that move on, and a text as a list of one, change nothing") {
    Rig rig;
    const std::string rest = R"(, "system": [{"type": "text", "text": "s", "cache_control": {}}])";
    const auto first = rig.answer(
        R"({"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]})",
        "hello", rest);
    const auto second = rig.ask(
        R"({"content": [{"text": "hi", "type": "text"}], "role": "user"}, )"
        R"({"role": "assistant", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}, )" +
            more,
        R"(, "system": [{"type": "text", "text": "s"}])");
    CHECK(second.conversation == first.conversation);
    CHECK(second.turn == 1);
    const auto tools = rig.answer(
        R"({"role": "user", "content": [{"type": "image", "source": {"data": "x"}}]})", "");
    CHECK(rig.ask(R"({"role": "user", "content": [{"type": "image", "source": {"data": "y"}}]}, )" +
                  hello + "," + more)
              .turn == 0);
    CHECK(rig.ask(R"({"role": "user", "content": [{"type": "image", "source": {"data": "x"}}]}, )"
                  R"({"role": "assistant", "content": null, "tool_calls": []}, )" +
                  more)
              .conversation == tools.conversation);
}

TEST_CASE("the pause to the next turn is twice what it was, between a tenth and ten seconds") {
    Rig rig;
    CHECK(rig.answer(hi, "hello").pause == 100ms);
    rig.now += 2s;
    CHECK(rig.ask(hi + "," + hello + "," + more).pause == 4s);
    rig.answer(more, "x");
    rig.now += 1h; // somebody has had lunch
    CHECK(rig.ask(more + "," + say("assistant", "x") + "," + hi).pause == 6s); // 2 s + 8 s / 8
    for (int i = 0; i < 100; ++i) {
        const auto text = say("user", std::to_string(i));
        rig.answer(text, "x");
        CHECK(rig.ask(text + "," + say("assistant", "x") + "," + hi).pause <= 6s);
    }
    CHECK(rig.answer(hi, "x").pause == 100ms);
}

TEST_CASE("only so many are remembered, and what is no chat is none") {
    Rig rig{Conversations(3)};
    for (const auto text : {"1", "2", "3", "4"}) rig.answer(say("user", text), "hello");
    CHECK(rig.ask(say("user", "1") + "," + hello + "," + more).turn == 0);
    CHECK(rig.ask(say("user", "4") + "," + hello + "," + more).turn == 1);
    for (const auto text : {R"({"prompt": "x"})", R"({"messages": 5})", R"({"messages": []})",
                            R"({"messages": null})"})
        CHECK(rig.conversations.asked("/v1/completions", text, start).conversation == 0);
    rig.ask("\"no message\", [], 5, {\"role\": \"assistant\", \"content\": 5}");
    rig.ask(R"({"role": "user", "content": ["a", 5]}, {"role": "assistant", "content": ["a"]}, 1)");
}
