// ExchangeClock: which time limit of one HTTP exchange comes next. No I/O, no clock of its own.
#ifndef EVALRT_DETAIL_EXCHANGE_CLOCK_HPP
#define EVALRT_DETAIL_EXCHANGE_CLOCK_HPP

#include "evalrt/request.hpp"

#include <algorithm>
#include <string_view>

namespace evalrt::detail {

/// Zero: no such limit.
struct TimeLimits {
    std::chrono::milliseconds connect{std::chrono::seconds(10)};    ///< until the server has it
    std::chrono::milliseconds first_byte{std::chrono::minutes(10)}; ///< it may queue and load
    std::chrono::milliseconds silence{std::chrono::minutes(2)};     ///< no byte, comments count
    std::chrono::milliseconds content_silence{std::chrono::minutes(10)}; ///< no generated token
    std::chrono::milliseconds whole{0}; ///< from the start of the attempt to its end
};

class ExchangeClock {
public:
    using Point = Clock::time_point;

    ExchangeClock(TimeLimits limits, Point now)
        : limits_(limits), start_(now), phase_(now), content_(now) {}

    void sent(Point now) { enter(Phase::waiting, now); }
    void bytes(Point now) { enter(Phase::receiving, now); }
    void content(Point now) { content_ = now; }

    struct Limit {
        Point at = Point::max();
        std::string_view what; ///< completes "no ... within N s"
        std::chrono::milliseconds span{};
    };

    /// The limit that passes first if nothing happens.
    Limit next() const {
        Limit limit;
        const auto consider = [&](Point from, std::chrono::milliseconds span,
                                  std::string_view what) {
            using Span = std::chrono::milliseconds;
            const bool endless = span >= std::chrono::duration_cast<Span>(Point::max() - from);
            if (span > Span::zero() && !endless && from + span < limit.at)
                limit = {from + span, what, span};
        };
        switch (state_) {
        case Phase::connecting: consider(phase_, limits_.connect, "connection"); break;
        case Phase::waiting: consider(phase_, limits_.first_byte, "first byte of an answer"); break;
        case Phase::receiving:
            consider(phase_, limits_.silence, "further byte");
            consider(std::max(content_, received_), limits_.content_silence, "further token");
            break;
        }
        consider(start_, limits_.whole, "complete answer");
        return limit;
    }

private:
    enum class Phase { connecting, waiting, receiving };

    void enter(Phase state, Point now) {
        if (state == Phase::receiving && state_ != state) received_ = now;
        state_ = state;
        phase_ = now;
    }

    TimeLimits limits_;
    Phase state_ = Phase::connecting;
    Point start_, phase_, content_, received_{};
};

/// Spaces out connections so that a server's listen backlog never overflows: `burst` at once, then
/// one each `interval` (the generic cell rate algorithm).
class ConnectPacer {
public:
    ConnectPacer(unsigned burst, std::chrono::milliseconds interval)
        : interval_(interval), slack_(interval * (burst ? burst - 1 : 0)) {}

    /// When the next connection may be opened; the place is taken.
    Clock::time_point reserve(Clock::time_point now) {
        full_ = std::max(full_, now);
        const auto at = std::max(now, full_ - slack_);
        full_ += interval_;
        return at;
    }

private:
    Clock::duration interval_, slack_;
    Clock::time_point full_{};
};

} // namespace evalrt::detail

#endif
