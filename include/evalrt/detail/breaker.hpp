// Breaker and StopRule: what the failures of many items say of the server and of the run. No I/O,
// no clock of their own.
#ifndef EVALRT_DETAIL_BREAKER_HPP
#define EVALRT_DETAIL_BREAKER_HPP

#include "evalrt/detail/retry.hpp"

#include <algorithm>
#include <string>

namespace evalrt {

struct BreakerOptions {
    unsigned failures = 5; ///< connections in a row that came to nothing; 0: never opens
    std::chrono::milliseconds first_pause{500}, longest_pause{8000};
    std::chrono::milliseconds patience{std::chrono::minutes(1)}; ///< then the server counts as gone
    /// Nothing but refusals for its load: that long, as it may take to start.
    std::chrono::milliseconds busy_patience{std::chrono::minutes(5)};
};

struct StopOptions {
    unsigned refused = 0; ///< items in a row that failed for the key or the quota; 0: any number
    unsigned alike = 0;   ///< items that all failed the same way, with none answered; 0: any number
};

namespace detail {

/// For one server. Open, it lets one request through at a time, to see whether the server is back.
class Breaker {
public:
    using Point = Clock::time_point;

    explicit Breaker(BreakerOptions options) : options_(options) {}

    /// A sign of life: an answer, whatever it says.
    void alive() {
        in_row_ = 0;
        since_ = Point{};
        pause_ = options_.first_pause;
    }

    /// A connection could not be made, or broke before any byte.
    void dead(Point now) {
        if (options_.failures == 0 || ++in_row_ < options_.failures) return;
        if (!open())
            since_ = now;
        else
            pause_ = std::min(2 * pause_, options_.longest_pause);
        until_ = now + pause_;
    }

    bool open() const { return since_ != Point{}; }

    /// How many may run now, if `most` may when all is well.
    unsigned allowed(unsigned most, Point now) const {
        return !open() ? most : now < until_ ? 0 : 1;
    }

    Point wake() const { return open() ? until_ : Point::max(); }

    /// Whether a request that could not be sent should wait for the server to come back.
    bool waits(Point now) const { return options_.failures > 0 && !gone(now); }

    /// The server has been away for longer than anybody wants to wait.
    bool gone(Point now) const { return open() && now - since_ >= options_.patience; }

private:
    BreakerOptions options_;
    unsigned in_row_ = 0;
    std::chrono::milliseconds pause_ = options_.first_pause;
    Point since_{}, until_{};
};

/// Whether the rest of a run would only fail as all did so far: a wrong key, a wrong model, a
/// context that is too short for every item.
class StopRule {
public:
    explicit StopRule(StopOptions options) : options_(options) {}

    /// An item has ended for good. Not empty: the run should end, and why.
    std::string ended(const Response& response) {
        if (!response.outcome) {
            refused_ = gone_ = 0;
            answered_ = true;
            return {};
        }
        const auto errc = *response.outcome;
        if (errc == Errc::cancelled) return {};
        refused_ = remedy(errc, response.status) == Remedy::run ? refused_ + 1 : 0;
        if (alike_ == 0) first_ = {errc, response.status};
        same_ = same_ && first_ == std::pair(errc, response.status);
        ++alike_;
        // A model that was unloaded or renamed in the middle of a run: the same words each time.
        const bool gone =
            response.status == 404 && response.detail.find("model") != std::string::npos;
        gone_ = !gone ? 0 : response.detail == words_ ? gone_ + 1 : 1;
        if (gone) words_ = response.detail;
        if (options_.refused > 0 && refused_ >= options_.refused)
            return "the server refuses the key or the quota is used up: " + response.detail;
        if (options_.alike > 0 && alike_ >= options_.alike && same_ && !answered_)
            return "everything fails the same way (" + std::string(name(errc)) +
                   "): " + response.detail;
        if (options_.alike > 0 && gone_ >= options_.alike && answered_)
            return "the server does not have the model any more: " + response.detail;
        return {};
    }

private:
    StopOptions options_;
    unsigned refused_ = 0, alike_ = 0, gone_ = 0;
    std::string words_; // of the last 404
    bool answered_ = false, same_ = true;
    std::pair<Errc, int> first_{};
};

} // namespace detail
} // namespace evalrt

#endif
