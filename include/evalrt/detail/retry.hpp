// Whether a failed attempt is made again, and when: one table. No I/O, no clock.
#ifndef EVALRT_DETAIL_RETRY_HPP
#define EVALRT_DETAIL_RETRY_HPP

#include "evalrt/request.hpp"

#include <algorithm>
#include <cmath>
#include <random>

namespace evalrt {

struct RetryOptions {
    unsigned attempts = 3; ///< in all; 1: no retry
    /// What an item waits in all while the server turns it away for its load, however often.
    std::chrono::seconds overload_patience{120};
    std::chrono::milliseconds base{500}, most{8000}; ///< back-off: doubled each time, with jitter
    std::chrono::seconds longest_wait{120};          ///< a Retry-After above this is not waited for
    unsigned free_resends = 8; ///< connections broken before any byte of an answer, an item
    unsigned budget = 500;     ///< tokens that retries of all items share; 0: no bound
    std::uint64_t seed = 0;    ///< of the jitter
};

namespace detail {

/// What is done about a failure: the one place where that is decided for each class.
enum class Remedy {
    item,   ///< nothing helps: this item fails, the others go on
    later,  ///< the same again after a pause
    pause,  ///< the same, and no request goes to this server meanwhile
    server, ///< the server is gone: it is started again, or waited for
    run,    ///< every other request will fail in the same way: key, quota
};

constexpr Remedy remedy(Errc errc, int status) {
    switch (errc) {
    case Errc::rate_limited:
    case Errc::overloaded: return Remedy::pause;
    case Errc::malformed:
    case Errc::truncated:
    case Errc::timed_out: return Remedy::later;
    case Errc::rejected:
        if (status == 402 || status == 429) return Remedy::run; // no quota left
        // 501 and 505 say that it never will, 507 that the model is too large; a failure inside a
        // stream has status 200.
        return status == 408 || status == 409 || status == 200 ||
                       (status >= 500 && status != 501 && status != 505 && status != 507)
                   ? Remedy::later
                   : Remedy::item;
    case Errc::unreachable:
    case Errc::exited: return Remedy::server;
    case Errc::auth: return Remedy::run;
    case Errc::context_too_long:
    case Errc::cancelled:
    case Errc::poison: return Remedy::item;
    }
    return Remedy::item;
}

/// Retries of all items of one server draw on this, so that a server in trouble does not get three
/// times its load: the AWS SDKs' retry quota, with their numbers (500 tokens, 5 a retry, 10 after a
/// time-out; a retry that succeeds gives its price back, any other success 1: smithy-rs,
/// token_bucket.rs). An overload, and a wait that the server asked for, are free: the pause bounds
/// the load.
class RetryBudget {
public:
    explicit RetryBudget(unsigned size) : size_(size), tokens_(size) {}

    bool take(unsigned price) {
        if (size_ == 0) return true;
        if (tokens_ < price) return false;
        tokens_ -= price;
        return true;
    }
    void give(unsigned tokens) { tokens_ = std::min(size_, tokens_ + tokens); }
    unsigned tokens() const { return tokens_; }

private:
    unsigned size_, tokens_;
};

/// What the table knows of one item.
struct RetryState {
    unsigned attempts = 0;               ///< that counted
    unsigned resends = 0;                ///< that did not
    unsigned paid = 0;                   ///< for the attempt that runs, to the budget
    std::chrono::milliseconds waited{0}; ///< because the server turned it away for its load
    bool empty_close = false;            ///< the last attempt ended in a close without a byte
};

struct RetryVerdict {
    bool again = false;
    std::chrono::milliseconds delay{0};
    bool pause_server = false; ///< no request goes to this server for a while
};

class RetryTable {
public:
    explicit RetryTable(RetryOptions options)
        : options_(options), budget_(options.budget), random_(options.seed) {}

    void succeeded(RetryState& state) {
        ++state.attempts;
        budget_.give(state.paid > 0 ? state.paid : 1);
        state.paid = 0;
    }

    /// `delivered`: text of this attempt has reached the caller, who cannot take it back.
    RetryVerdict decide(const Response& response, bool delivered, RetryState& state) {
        const auto errc = *response.outcome;
        const bool no_byte = errc == Errc::unreachable && response.stage == Stage::sent;
        const bool empty_close = no_byte && response.cause == asio::error::eof;

        // The server had not taken it in: a full listen backlog, a restart. But mlx_lm also closes
        // so on parameters that it does not understand, so the second time in a row counts.
        if (no_byte && !(empty_close && state.empty_close) &&
            state.resends < options_.free_resends && !delivered) {
            state.empty_close = empty_close;
            ++state.resends;
            return {true, jittered(std::min(50u << std::min(state.resends, 5u), 1000u)), false};
        }
        state.empty_close = empty_close;
        ++state.attempts;
        state.paid = 0;
        if (delivered) return {};
        const auto what = remedy(errc, response.status);
        const bool asked = response.retry_after.has_value();
        // The server's own word on its own answer goes before ours on its class.
        bool worth = what == Remedy::later || what == Remedy::pause || errc == Errc::unreachable;
        if (errc != Errc::cancelled) worth = response.should_retry.value_or(worth);
        const bool patient = what == Remedy::pause && options_.attempts > 1 &&
                             state.waited < options_.overload_patience;
        if (!worth || (state.attempts >= options_.attempts && !patient)) return {};
        if (asked && *response.retry_after > options_.longest_wait) return {};
        const unsigned price = asked || what == Remedy::pause ? 0
                               : errc == Errc::timed_out      ? 10
                                                              : 5;
        if (!budget_.take(price)) return {};
        state.paid = price;

        RetryVerdict verdict{true, backoff(state.attempts), what == Remedy::pause};
        if (asked) {
            verdict.delay = *response.retry_after + jittered(100) / 2;
            verdict.pause_server = true;
        }
        if (what == Remedy::pause) state.waited += verdict.delay;
        return verdict;
    }

    /// How long no request goes to a server that did not say, after this many refusals without an
    /// answer between. An item's own delay may be longer: then others go before it.
    std::chrono::milliseconds pause(unsigned refusals) { return backoff(refusals); }

    const RetryBudget& budget() const { return budget_; }

private:
    // Between three quarters and all of it.
    std::chrono::milliseconds jittered(unsigned ms) {
        return std::chrono::milliseconds(ms - random_() % (ms / 4 + 1));
    }

    std::chrono::milliseconds backoff(unsigned attempts) {
        const auto doubled = options_.base * (1u << std::min(attempts - 1, 16u));
        return jittered(unsigned(std::min(doubled, options_.most).count()));
    }

    RetryOptions options_;
    RetryBudget budget_;
    std::minstd_rand random_;
};

} // namespace detail
} // namespace evalrt

#endif
