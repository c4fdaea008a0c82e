// Limiter: how many requests are in flight.
#ifndef EVALRT_LIMITER_HPP
#define EVALRT_LIMITER_HPP

#include "evalrt/request.hpp"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

namespace evalrt {

struct LimiterOptions {
    unsigned start = 16;
    unsigned most = 0; ///< to climb to where that pays; up to start: the limit stays at start
    double repack = 0; ///< see BackendRow::repack
};

/// Finds the knee: the number in flight from where on more of them bring no more tokens a second.
/// It doubles as long as that pays, keeps what pays a little, takes back what does not, and looks
/// again now and then. Latency says nothing here: it grows with the batch by design, and local
/// servers queue instead of refusing. A server that refuses gets three quarters, and then each
/// round half of what is left up to what it refused; where that is refused again, what it had
/// before. Where each arrival and departure costs a copy of the batch (repack), short answers get a
/// narrower one: sqrt(repack * tokens of a mean answer), down to 16.
///
/// Deterministic given its calls. No clock: time is passed in and never goes backwards.
class Limiter {
public:
    using Point = Clock::time_point;

    explicit Limiter(LimiterOptions options)
        : start_(std::max(options.start, 1u)),
          most_(std::max(options.most, start_)),
          limit_(start_),
          ceiling_(most_),
          repack_(options.repack) {
        settle(limit_);
    }

    unsigned limit() const {
        if (repack_ <= 0 || answers_ == 0) return limit_;
        const auto width = std::lround(std::sqrt(repack_ * answer_tokens_ / answers_));
        return std::min(limit_, std::max(unsigned(width), narrowest));
    }

    /// A request waits whose answer has at most so many tokens. Until answers are seen, a third of
    /// that is what they are taken for.
    void expect(std::int64_t most_tokens) {
        if (seen_) return;
        answer_tokens_ += double(std::max<std::int64_t>(most_tokens, 3)) / 3;
        ++answers_;
    }

    /// A request has its first token.
    void first_text(Point now) { arrived(now); }

    /// Output tokens have arrived. `full`: the limit is reached and more is waiting; only such
    /// times say what the limit is worth.
    void tokens(double count, bool full, Point now) {
        if (most_ == start_ || recovering_ || phase_ == Phase::settling) return;
        if (full && last_ != Point{}) {
            count_ += count;
            passed_ += now - last_;
        }
        last_ = full ? now : Point{};
        if (count_ >= window() && passed_ >= shortest) decide(count_ / passed_.count(), now);
    }

    /// A request was answered, with so many tokens where that is known.
    void answered(Point now, std::optional<std::int64_t> tokens = {}) {
        arrived(now);
        if (tokens) saw(double(*tokens));
        if (++good_ < limit_) return;
        good_ = 0; // a round
        if (recovering_) {
            if (limit_ < target()) raise((limit_ + target() + 1) / 2);
            if (limit_ >= target()) recover();
        } else if (limit_ == ceiling_ && ceiling_ < most_ && ++quiet_ >= patience) {
            quiet_ = 0;
            ceiling_ = limit_ + 1; // it may take more by now
            raise(ceiling_);
        }
    }

    /// The server has refused a request for its load, `running` being in flight, that one
    /// included. To be told once for all that are refused together.
    void overloaded(unsigned running) {
        if (raised_) {
            ceiling_ = std::max(limit_ - 1, 1u); // the last ones were too many
            reduce(limit_ - raised_);
        } else {
            reduce(std::min(limit_, running) * 3 / 4);
        }
    }

    /// The server has died under this many.
    void lost(unsigned running) {
        if (running > 1) reduce(std::min(limit_, running) / 2);
    }

private:
    static constexpr std::chrono::duration<double> shortest{0.1};
    static constexpr unsigned patience = 8; // rounds, windows
    static constexpr double elastic = 0.1;  // d ln(rate) / d ln(limit) that is worth doubling for
    static constexpr double worthwhile = 1.03;
    static constexpr double sure = 3; // windows, to take a limit back
    static constexpr double prior = 4;
    // Measured on mlx_lm.server, answers of 9 tokens: 8 at once 55 s, 13 46 s, 16 41 s.
    static constexpr unsigned narrowest = 16;

    enum class Phase { settling, measuring };

    // What was expected counts like `prior` answers.
    void saw(double tokens) {
        if (!std::exchange(seen_, true) && answers_ > prior) {
            answer_tokens_ *= prior / answers_;
            answers_ = prior;
        }
        answer_tokens_ += tokens;
        ++answers_;
    }

    // Tokens: six of each stream; where answers are short, so that they are prefilled and decoded
    // together, a round and a half.
    double window() const {
        const double mean = seen_ ? answer_tokens_ / answers_ : 100;
        return limit_ * (mean <= 16 ? std::max(1.5 * mean, 2.0) : 6);
    }

    // Those that a new limit lets in have to be past their prefill first.
    void settle(unsigned arrivals) {
        phase_ = arrivals > 0 ? Phase::settling : Phase::measuring;
        awaited_ = arrivals;
        begin(Point{});
    }

    void arrived(Point now) {
        if (phase_ != Phase::settling || --awaited_ > 0) return;
        phase_ = Phase::measuring;
        begin(now);
    }

    void begin(Point now) {
        last_ = now;
        count_ = 0;
        passed_ = {};
    }

    void decide(double rate, Point now) {
        const bool known = best_ == 0 || limit_ == best_;
        const bool pays = known || rate > worthwhile * best_rate_;
        // Those that come together are prefilled together: one look may fall on that.
        if (!pays && count_ < sure * window()) return;
        begin(now);
        if (known) {
            // At what is known to be good.
            best_rate_ = best_ == 0 ? rate : (3 * best_rate_ + rate) / 4;
            best_ = limit_;
            if (climbing_)
                grow(std::max(2 * limit_, 4u)); // two at once may be slower than one (MLX)
            else if (++held_ >= patience)
                grow(limit_ + std::max(1u, limit_ / 4));
            return;
        }
        if (!pays) {
            climbing_ = false;
            limit_ = best_;
            return settle(0);
        }
        const double step = std::log(double(limit_) / best_);
        climbing_ = climbing_ && std::log(rate / best_rate_) >= elastic * step;
        best_ = limit_;
        best_rate_ = rate;
        held_ = 0;
        if (climbing_) grow(2 * limit_);
    }

    void grow(unsigned to) {
        held_ = 0;
        to = std::min(to, ceiling_);
        if (to <= limit_) {
            climbing_ = false;
            return;
        }
        settle(to - limit_);
        limit_ = to;
    }

    void reduce(unsigned to) {
        if (!recovering_) before_ = limit_;
        limit_ = std::max(to, 1u);
        recovering_ = limit_ < target();
        climbing_ = false;
        raised_ = 0;
        good_ = quiet_ = 0;
        best_ = 0;
        if (!recovering_) settle(0);
    }

    void raise(unsigned to) {
        raised_ = to - limit_;
        limit_ = to;
        best_ = 0;
    }

    void recover() {
        recovering_ = false;
        settle(0);
    }

    unsigned target() const { return std::min(ceiling_, before_); }

    unsigned start_, most_, limit_;
    unsigned ceiling_;    // what the server was seen to take
    unsigned before_ = 0; // the limit before it was reduced
    Phase phase_ = Phase::measuring;
    unsigned awaited_ = 0; // first tokens until the new limit is in force
    Point last_{};         // the last tokens, if the limit was reached
    double count_ = 0;     // tokens of the window
    std::chrono::duration<double> passed_{};
    unsigned best_ = 0; // the best limit so far, and its rate
    double best_rate_ = 0;
    unsigned held_ = 0;             // windows since the last look further up
    unsigned good_ = 0, quiet_ = 0; // answers of the round; rounds without a refusal
    bool climbing_ = true, recovering_ = false;
    unsigned raised_ = 0; // by so many, the last time since it was reduced
    double repack_, answer_tokens_ = 0, answers_ = 0; // expected or seen
    bool seen_ = false;
};

} // namespace evalrt

#endif
