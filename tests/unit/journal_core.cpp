#include "evalrt/detail/journal_core.hpp"

#include "support/catch.hpp"

#include <map>
#include <set>

using evalrt::Errc;
using evalrt::detail::journal_difference;
using evalrt::detail::journal_key;
using evalrt::detail::JournalIndex;
using evalrt::detail::JournalKey;

TEST_CASE("a key changes with each part, and parts do not run into each other") {
    const std::string parts[] = {"", "a", "b", "ab", std::string("a\0b", 3)};
    std::set<std::pair<std::uint64_t, std::uint64_t>> keys;
    for (const auto& identity : parts)
        for (const auto& endpoint : parts)
            for (const auto& body : parts) {
                const auto key = journal_key(identity, endpoint, body);
                CHECK(key == journal_key(identity, endpoint, body));
                keys.insert({key.high, key.low});
            }
    CHECK(keys.size() == 125);
}

TEST_CASE("the n-th equal request is the n-th item") {
    JournalIndex index;
    const JournalKey key{1, 2}, other{1, 3};
    auto& first = index.entry(key, 0);
    first.item = 7;
    first.outcome = 70;
    auto& third = index.entry(key, 2);
    third.item = 9;
    third.outcome = 90;

    auto decision = index.next(key);
    CHECK(decision.occurrence == 0);
    CHECK(decision.item == 7);
    CHECK(decision.outcome == 70);
    decision = index.next(key);
    CHECK(decision.occurrence == 1);
    CHECK(decision.item == 0);
    CHECK(decision.outcome == 0);
    CHECK(index.next(other).outcome == 0);
    CHECK(index.next(key).outcome == 90);
    CHECK(index.next(key).outcome == 0);

    index.rewind();
    CHECK(index.next(key).outcome == 70);
    CHECK(index.next(other).occurrence == 0);
}

TEST_CASE("every key is counted for itself, however many there are") {
    evalrt::detail::JournalCounts counts;
    std::map<std::uint64_t, std::uint32_t> expected;
    std::uint64_t random = 1;
    for (int i = 0; i < 20000; ++i) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        const auto name = random >> 40 & 0x1FFF;
        const JournalKey key{name & 7, (name >> 3) * 0x10000}; // they meet in the table
        CHECK(counts.next(key) == expected[name]++);
    }
}

TEST_CASE("what was counted elsewhere is known as if it had been counted here") {
    JournalIndex index;
    for (std::uint32_t i = 0; i < 3; ++i) index.count({1, 2}, i, true).outcome = 10 + i;
    CHECK(index.next({1, 2}).occurrence == 3);
    index.rewind();
    index.count({1, 2}, 3, false).outcome = 13;
    for (std::int64_t i = 0; i < 4; ++i) CHECK(index.next({1, 2}).outcome == 10 + i);
}

TEST_CASE("where items go by their names, equal requests have places of their own") {
    JournalIndex index;
    const JournalKey key{1, 2}, other{3, 4};
    CHECK(index.place(key, "a") == key);
    index.by_name(false, {JournalIndex::named(key, "a"), JournalIndex::named(key, "b"),
                          JournalIndex::named(other, "c")});
    CHECK_FALSE(index.place(key, "a") == key);
    CHECK_FALSE(index.place(key, "a") == index.place(key, "b"));
    CHECK(index.place(key, "a") == index.place(key, "a"));
    CHECK(index.place(key, "") == key); // it has none
    CHECK(index.place(key, "new") == key);
    CHECK(index.place(other, "a") == other);
    CHECK_FALSE(index.place(other, "c") == other);
    CHECK(index.place(key, "c") == key);
}

TEST_CASE("a failure is tried again, unless its class is a final one") {
    for (int i = 1; i <= int(Errc::poison); ++i) {
        const auto errc = Errc(i);
        JournalIndex index({Errc::context_too_long, Errc::poison});
        auto& entry = index.entry({1, 2}, 0);
        entry.item = 1;
        entry.outcome = 5;
        entry.failure = errc;
        const bool final = errc == Errc::context_too_long || errc == Errc::poison;
        CAPTURE(std::string(name(errc)));
        const auto decision = index.next({1, 2});
        CHECK(decision.item == 1);
        CHECK(decision.outcome == (final ? 5 : 0));
    }
}

TEST_CASE("another run's answer is served where this run has none") {
    JournalIndex index;
    auto& entry = index.entry({1, 2}, 0);
    entry.shared = 4;
    CHECK(index.decide({1, 2}, 0).outcome == 4);
    CHECK(index.decide({1, 2}, 0).item == 0);
    entry.item = 2;
    entry.outcome = 6;
    entry.failure = Errc::timed_out;
    CHECK(index.decide({1, 2}, 0).outcome == 4);
    entry.failure.reset();
    CHECK(index.decide({1, 2}, 0).outcome == 6);
}

TEST_CASE("a difference names what has changed, what is new and what is gone") {
    CHECK(journal_difference({{"a", "1"}, {"b", "2"}}, {{"b", "2"}, {"a", "1"}}) == "");
    CHECK(
        journal_difference({{"model", "A"}, {"old", "x"}}, {{"model", "B"}, {"new", ""}}) ==
        "model was \"A\" and is \"B\"; new was not set and is \"\"; old was \"x\" and is not set");
}
