// Whether a failed attempt is made again, and when: one table. No I/O, no clock.
#ifndef EVALRT_DETAIL_RETRY_HPP
#define EVALRT_DETAIL_RETRY_HPP

#include "evalrt/request.hpp"

#include <algorithm>
#include <cmath>
#include <random>

namespace evalrt {

struct RetryOptions {
    unsigned attempts = 3;                           ///< in all; 1: no retry
    std::chrono::milliseconds base{500}, most{8000}; ///< back-off: doubled each time, with jitter
    std::chrono::seconds longest_wait{120};          ///< a Retry-After above this is not waited for
    unsigned free_resends = 8; ///< connections broken before any byte of an answer, an item
    std::uint64_t seed = 0;    ///< of the jitter
};

namespace detail {

/// What the table knows of one item.
struct RetryState {
    unsigned attempts = 0;    ///< that counted
    unsigned resends = 0;     ///< that did not
    bool empty_close = false; ///< the last attempt ended in a close without a byte
};

struct RetryVerdict {
    bool again = false;
    std::chrono::milliseconds delay{0};
    bool pause_server = false; ///< the delay holds for every request to this server
};

class RetryTable {
public:
    explicit RetryTable(RetryOptions options) : options_(options), random_(options.seed) {}

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
        if (delivered || state.attempts >= options_.attempts) return {};
        if (!worth_retrying(errc, response.status)) return {};

        RetryVerdict verdict{true, backoff(state.attempts), false};
        verdict.pause_server = errc == Errc::rate_limited || errc == Errc::overloaded;
        if (response.retry_after) {
            if (*response.retry_after > options_.longest_wait) return {};
            verdict.delay = *response.retry_after + jittered(100) / 2;
            verdict.pause_server = true;
        }
        return verdict;
    }

private:
    static bool worth_retrying(Errc errc, int status) {
        switch (errc) {
        case Errc::unreachable:
        case Errc::rate_limited:
        case Errc::overloaded:
        case Errc::malformed:
        case Errc::truncated:
        case Errc::timed_out: return true;
        case Errc::rejected:
            // 501 and 505 say that it never will; a failure inside a stream has status 200.
            return status == 408 || status == 409 || status == 200 ||
                   (status >= 500 && status != 501 && status != 505 && status != 507);
        case Errc::exited:
        case Errc::auth:
        case Errc::context_too_long:
        case Errc::cancelled:
        case Errc::poison: return false;
        }
        return false;
    }

    // Between three quarters and all of it.
    std::chrono::milliseconds jittered(unsigned ms) {
        return std::chrono::milliseconds(ms - random_() % (ms / 4 + 1));
    }

    std::chrono::milliseconds backoff(unsigned attempts) {
        const auto doubled = options_.base * (1u << std::min(attempts - 1, 16u));
        return jittered(unsigned(std::min(doubled, options_.most).count()));
    }

    RetryOptions options_;
    std::minstd_rand random_;
};

} // namespace detail
} // namespace evalrt

#endif
