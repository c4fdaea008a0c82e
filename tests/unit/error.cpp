#include "evalrt/error.hpp"

#include "support/catch.hpp"

#include <set>

using namespace evalrt;

TEST_CASE("every class has the name that output files use") {
    // In the order of the values: a file written once must read the same for ever.
    const char* names[] = {"unreachable", "exited",    "rejected",         "rate_limited",
                           "overloaded",  "auth",      "context_too_long", "malformed",
                           "truncated",   "timed_out", "cancelled",        "poison"};
    REQUIRE(all_errc.size() == std::size(names));
    for (std::size_t i = 0; i < all_errc.size(); ++i) {
        CHECK(int(all_errc[i]) == int(i) + 1);
        CHECK(name(all_errc[i]) == names[i]);
    }
}

TEST_CASE("a class becomes an error code with a message of its own") {
    std::set<std::string> messages;
    for (const auto errc : all_errc) {
        const error_code code = errc;
        CHECK(code);
        CHECK(code == make_error_code(errc));
        CHECK_FALSE(code.message().empty());
        CHECK(messages.insert(code.message()).second);
        if (errc == Errc::cancelled) continue;
        CHECK(code.category() == category());
        CHECK(code.value() == int(errc));
        CHECK(code == errc);
    }
    CHECK(std::string_view(category().name()) == "evalrt");
}

TEST_CASE("a class is found by its name") {
    for (int i = 1; i <= int(Errc::poison); ++i) CHECK(evalrt::find_errc(name(Errc(i))) == Errc(i));
    CHECK(!evalrt::find_errc(""));
    CHECK(!evalrt::find_errc("Poison"));
}

TEST_CASE("cancelled is what Asio calls it") {
    CHECK(make_error_code(Errc::cancelled) == asio::error::operation_aborted);
    CHECK(error_code(Errc::cancelled) == Errc::cancelled);
    CHECK(error_code(Errc::cancelled) != Errc::timed_out);
}

TEST_CASE("a value that is no class has a message all the same") {
    for (const int value : {-1, 13, 1000000}) CHECK(category().message(value) == "unknown error");
    CHECK_FALSE(error_code(0, category()));
}

TEST_CASE("a failure without a code is none") {
    CHECK_FALSE(Failure{});
    CHECK(Failure{Errc::exited, "it ended"});
}
