// Watchdog: whether a server that runs still works. No I/O, no clock of its own.
#ifndef EVALRT_DETAIL_WATCHDOG_HPP
#define EVALRT_DETAIL_WATCHDOG_HPP

#include "evalrt/request.hpp"

#include <algorithm>

namespace evalrt {

/// A server whose engine has died may still accept connections and call itself healthy
/// (mlx_lm.server does both): only a token proves that it works.
struct WatchdogOptions {
    /// Without a token for any request in flight until the canary is asked, a request for one
    /// token. Zero: never for that; a long prompt needs its time.
    std::chrono::milliseconds quiet{std::chrono::minutes(2)};
    std::chrono::milliseconds canary_limit{std::chrono::minutes(2)}; ///< it has to queue, too
    unsigned canaries = 2; ///< unanswered in a row until the server counts as hung
};

namespace detail {

class Watchdog {
public:
    using Point = Clock::time_point;
    enum class Step { wait, ask, hung };

    Watchdog(WatchdogOptions options, Point now) : options_(options), since_(now) {}

    /// A token arrived or a request ended.
    void progress(Point at) {
        since_ = std::max(since_, at);
        if (at >= asked_) unanswered_ = 0;
    }

    /// A request ran into one of its time limits: is it the request, or the server?
    void timed_out() { suspicious_ = true; }

    void canary_ended(bool answered, Point now) {
        suspicious_ = false;
        if (answered)
            progress(now);
        else
            ++unanswered_;
    }

    /// `busy`: something is in flight. Ask: send the canary, and tell how it ended before the next
    /// call.
    Step next(bool busy, Point now) {
        if (unanswered_ >= std::max(options_.canaries, 1u)) return Step::hung;
        const bool quiet = busy && options_.quiet.count() > 0 && now - since_ >= options_.quiet;
        if (!busy && !suspicious_ && unanswered_ == 0) since_ = std::max(since_, now);
        if (!quiet && !suspicious_ && unanswered_ == 0) return Step::wait;
        asked_ = now;
        return Step::ask;
    }

private:
    WatchdogOptions options_;
    Point since_, asked_{};
    unsigned unanswered_ = 0;
    bool suspicious_ = false;
};

} // namespace detail
} // namespace evalrt

#endif
