// What a server's headers say about asking again. No I/O, no clock of its own.
#ifndef EVALRT_DETAIL_RETRY_AFTER_HPP
#define EVALRT_DETAIL_RETRY_AFTER_HPP

#include <algorithm>
#include <array>
#include <chrono>
#include <optional>
#include <string_view>

namespace evalrt::detail {

using WallTime = std::chrono::sys_seconds;

/// The three forms of a date in HTTP (RFC 9110, 5.6.7). A year of two digits that seems to be more
/// than 50 years after `now` is of the century before.
inline std::optional<WallTime> http_date(std::string_view text, WallTime now) {
    using namespace std::chrono;
    constexpr std::string_view months = "JanFebMarAprMayJunJulAugSepOctNovDec";
    const auto digit = [](char c) { return c >= '0' && c <= '9'; };
    const auto letter = [](char c) { return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z'); };
    // w: a word; #: a letter of the month; other lower-case letters: a digit of that field;
    // anything else: itself.
    for (const std::string_view form :
         {"w, dd ### yyyy hh:mm:ss GMT", "w, dd-###-yy hh:mm:ss GMT", "w ### dd hh:mm:ss yyyy"}) {
        std::array<int, 128> fields{};
        std::string_view rest = text, month;
        bool good = true;
        for (std::size_t i = 0; i < form.size() && good; ++i) {
            const char c = form[i];
            if (c == 'w') {
                const auto word = std::find_if_not(rest.begin(), rest.end(), letter);
                good = word != rest.begin();
                rest.remove_prefix(std::size_t(word - rest.begin()));
                continue;
            }
            if (rest.empty()) {
                good = false;
                break;
            }
            const char got = rest.front();
            if (c == '#') {
                month = {month.empty() ? rest.data() : month.data(), month.size() + 1};
            } else if (letter(c) && c >= 'a') {
                // The third form pads the day with a space.
                const bool pad = c == 'd' && got == ' ' && form[i + 1] == 'd';
                good = digit(got) || pad;
                auto& field = fields[std::size_t(c)];
                field = field * 10 + (pad ? 0 : got - '0');
            } else {
                good = got == c;
            }
            rest.remove_prefix(1);
        }
        const auto at = months.find(month);
        if (!good || !rest.empty() || at == months.npos || at % 3 != 0) continue;
        const auto date = [&](int y) { return year(y) / int(at / 3 + 1) / fields['d']; };
        const auto time = hours(fields['h']) + minutes(fields['m']) + seconds(fields['s']);
        int y = fields['y'];
        if (form.find("yyyy") == form.npos) {
            y += 100 * (int(year_month_day(floor<days>(now)).year()) / 100);
            if (date(y).ok() && sys_days(date(y)) > now + years(50)) y -= 100;
        }
        // 60: a leap second.
        if (!date(y).ok() || fields['h'] > 23 || fields['m'] > 59 || fields['s'] > 60) return {};
        return sys_days(date(y)) + time;
    }
    return {};
}

/// How long to wait, from Retry-After (seconds, which may have a fraction, or a date) and
/// retry-after-ms, which counts more. Nothing: neither says so in a way that can be understood. A
/// date that has passed is no wait. Above 30 years it is 30 years.
inline std::optional<std::chrono::milliseconds>
retry_after(std::string_view field, std::string_view ms_field, WallTime now) {
    using std::chrono::milliseconds;
    constexpr milliseconds most = std::chrono::years(30);
    const auto number = [&](std::string_view text,
                            std::int64_t unit) -> std::optional<milliseconds> {
        std::int64_t value = 0;
        bool fraction = false, any = false;
        for (const char c : text) {
            if (c == '.' && !fraction) {
                fraction = true;
                continue;
            }
            if (c < '0' || c > '9') return {};
            any = true;
            if (fraction) {
                unit /= 10;
                value += unit * (c - '0');
            } else {
                value = std::min<std::int64_t>(value * 10 + unit * (c - '0'), most.count());
            }
        }
        if (!any) return {};
        return milliseconds(value);
    };
    if (const auto wait = number(ms_field, 1)) return wait;
    if (const auto wait = number(field, 1000)) return wait;
    if (const auto date = http_date(field, now))
        return std::clamp<milliseconds>(*date - now, milliseconds(0), most);
    return {};
}

/// x-should-retry: what the server thinks of asking again, whatever the status.
inline std::optional<bool> should_retry(std::string_view field) {
    if (field == "true") return true;
    if (field == "false") return false;
    return {};
}

} // namespace evalrt::detail

#endif
