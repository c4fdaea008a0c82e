#include "evalrt/detail/retry_after.hpp"

#include "support/catch.hpp"

#include <string>

using namespace evalrt::detail;
using namespace std::chrono_literals;
using std::chrono::milliseconds;
using std::chrono::sys_days;

namespace {

// RFC 9110's own example, and half a century later.
constexpr WallTime example = sys_days(std::chrono::year(1994) / 11 / 6) + 8h + 49min + 37s;
constexpr WallTime now = sys_days(std::chrono::year(2026) / 11 / 30) + 12h;
constexpr milliseconds most = std::chrono::years(30);

using Wait = std::optional<milliseconds>;

} // namespace

TEST_CASE("a date comes in three forms") {
    for (const auto text : {"Sun, 06 Nov 1994 08:49:37 GMT", "Sunday, 06-Nov-94 08:49:37 GMT",
                            "Sun Nov  6 08:49:37 1994", "Sun Nov 06 08:49:37 1994"}) {
        INFO(text);
        CHECK(http_date(text, now) == example);
    }
    CHECK(http_date("Sat, 29 Feb 2020 00:00:00 GMT", now) ==
          sys_days(std::chrono::year(2020) / 2 / 29));
    CHECK(http_date("Sat, 31 Dec 2016 23:59:60 GMT", now) ==
          sys_days(std::chrono::year(2017) / 1 / 1));
    // Two digits: at most fifty years ahead.
    CHECK(http_date("Saturday, 28-Nov-76 00:00:00 GMT", now) ==
          sys_days(std::chrono::year(2076) / 11 / 28));
    CHECK(http_date("Tuesday, 02-Dec-76 00:00:00 GMT", now) ==
          sys_days(std::chrono::year(1976) / 12 / 2));
}

TEST_CASE("what is no date is none") {
    const std::string good = "Sun, 06 Nov 1994 08:49:37 GMT";
    for (std::size_t n = 0; n < good.size(); ++n) {
        CHECK(!http_date(good.substr(0, n), now));
        for (const char c : {'x', '\0', ' ', '7', '\xFF'}) {
            auto changed = good;
            changed[n] = c;
            INFO(changed);
            // Another digit or name of a day, or a day of one digit.
            const bool same = changed == good || (c == 'x' && n < 3) || (c == ' ' && n == 5);
            if (http_date(changed, now)) CHECK((same || (c == '7' && good[n] <= '9')));
        }
    }
    for (const auto text : {"Sun, 06 Nov 1994 08:49:37 GMT ", "Sun, 06 Nov 1994 08:49:37 UTC",
                            "Sun, 06 Nov 1994 08:49:37 +0000", "Sun, 06 anF 1994 08:49:37 GMT",
                            "Sun, 31 Feb 1994 08:49:37 GMT", "Sun, 00 Nov 1994 08:49:37 GMT",
                            "Sun, 06 Nov 1994 24:00:00 GMT", "Sun, 06 Nov 1994 08:60:00 GMT",
                            "Sun, 06 Nov 1994 08:49:61 GMT", "Sun, 06 Nov 99999 08:49:37 GMT",
                            "Sun, 6 Nov 1994 08:49:37 GMT", ", 06 Nov 1994 08:49:37 GMT",
                            "1994-11-06T08:49:37Z", "Sun, 29 Feb 2023 00:00:00 GMT"}) {
        INFO(text);
        CHECK(!http_date(text, now));
    }
}

TEST_CASE("Retry-After in every form that servers send, and in those that none should") {
    struct Row {
        std::string field, ms;
        Wait wait;
    };
    for (const auto& [field, ms, wait] : {
             Row{"", "", {}},
             Row{"0", "", 0ms},
             Row{"2", "", 2s},
             Row{"120", "", 2min},
             Row{"007", "", 7s},
             Row{"1.5", "", 1500ms},
             Row{".25", "", 250ms},
             Row{"3.", "", 3s},
             Row{"0.0009", "", 0ms},
             Row{"1.23456789", "", 1234ms},
             Row{"-5", "", {}},
             Row{"+5", "", {}},
             Row{"abc", "", {}},
             Row{"5s", "", {}},
             Row{"1,5", "", {}},
             Row{"1.2.3", "", {}},
             Row{".", "", {}},
             Row{" 5", "", {}},
             Row{"0x10", "", {}},
             Row{"nan", "", {}},
             Row{"1e9", "", {}}, // HTTP has no exponents
             Row{"1e999", "", {}},
             // Long, and therefore not taken for nothing: nobody should ask again soon.
             Row{"1000000000", "", most},
             Row{"99999999999999999999999999999999", "", most},
             Row{"", "150", 150ms},
             Row{"", "150.9", 150ms},
             Row{"", "0", 0ms},
             Row{"9", "150", 150ms},
             Row{"9", "soon", 9s},
             Row{"9", "-1", 9s},
             Row{"9", "99999999999999999999999999999999", most},
             Row{"Mon, 30 Nov 2026 12:02:00 GMT", "", 2min},
             Row{"Monday, 30-Nov-26 12:02:00 GMT", "", 2min},
             Row{"Mon Nov 30 12:02:00 2026", "", 2min},
             Row{"Mon, 30 Nov 2026 12:00:00 GMT", "", 0ms},
             Row{"Fri, 31 Dec 1999 23:59:59 GMT", "", 0ms},
             Row{"Fri, 31 Dec 9999 23:59:59 GMT", "", most},
             Row{"Fri, 31 Dec 99999 23:59:59 GMT", "", {}},
             Row{"Mon, 30 Nov 2026 12:02:00 GMT", "70", 70ms},
         }) {
        INFO(field << " and ms " << ms);
        CHECK(retry_after(field, ms, now) == wait);
    }
}

TEST_CASE("x-should-retry is true, false or nothing") {
    CHECK(should_retry("true") == true);
    CHECK(should_retry("false") == false);
    for (const auto field : {"", "TRUE", "1", "0", "yes", "true,false"})
        CHECK(!should_retry(field));
}
