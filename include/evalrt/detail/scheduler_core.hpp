// SchedulerCore: who runs next, who runs again and who is late. No I/O, no clock of its own.
#ifndef EVALRT_DETAIL_SCHEDULER_CORE_HPP
#define EVALRT_DETAIL_SCHEDULER_CORE_HPP

#include "evalrt/detail/retry.hpp"
#include "evalrt/prefix_planner.hpp"

#include <map>
#include <unordered_map>

namespace evalrt {

struct SchedulerOptions {
    unsigned max_in_flight = 16;
    unsigned refill = 1;         ///< free places to wait for before more is admitted; 1: a flow
    unsigned prefill_tokens = 0; ///< cold prompt tokens admitted before their first text; 0: any
    std::chrono::milliseconds commit_delay{}; ///< end of a leader to its prefix being visible
    RetryOptions retry;
};

struct SchedulerStats {
    unsigned in_flight = 0;
    unsigned most_in_flight = 0;
    double in_flight_seconds = 0; ///< the integral of in_flight over time
    double busy_seconds = 0;      ///< time with something in flight
    std::uint64_t resends = 0;    ///< connections that broke before any byte of an answer
};

namespace detail {

class SchedulerCore {
public:
    using Point = Clock::time_point;

    SchedulerCore(PrefixPlanner& planner, SchedulerOptions options)
        : planner_(planner), options_(options), retry_(options.retry) {
        options_.max_in_flight = std::max(options_.max_in_flight, 1u);
    }

    /// What the prompt's views point at must stay until the request has ended for good.
    /// `deadline`: Point::max() for none.
    void submit(RequestId id, Prompt prompt, Point deadline) {
        Item& item = items_[id];
        item.prompt = std::move(prompt);
        item.deadline = deadline;
        if (deadline != Point::max()) deadlines_.emplace(deadline, id);
        planner_.add(id, item.prompt);
        ++waiting_;
    }

    /// The next one to send, as long as there is one.
    std::optional<Pick> next(Point now) {
        release(now);
        held_until_ = Point::max();
        if (now < paused_until_ || waiting_ == 0 || running_ >= options_.max_in_flight) return {};
        if (running_ > 0) {
            // Nearly all places are taken: wait until several are free, and fill them together.
            const auto free = options_.max_in_flight - running_;
            if (!refilling_ && free < std::min<std::size_t>(options_.refill, waiting_)) return {};
            if (options_.prefill_tokens > 0 &&
                prefilling_ >= options_.prefill_tokens * bytes_per_token)
                return {};
        }
        auto pick = planner_.next(now);
        if (!pick) {
            held_until_ = planner_.wake();
            return {};
        }
        account(now);
        --waiting_;
        ++running_;
        refilling_ = running_ < options_.max_in_flight;
        stats_.most_in_flight = std::max(stats_.most_in_flight, running_);
        Item& item = items_.at(pick->id);
        item.state = State::running;
        item.cold = pick->prompt_bytes - pick->expected_bytes.value_or(0);
        prefilling_ += item.cold;
        return pick;
    }

    void first_text(RequestId id, Point now) {
        const auto it = items_.find(id);
        if (it == items_.end() || it->second.state != State::running || it->second.has_text) return;
        it->second.has_text = true;
        prefilling_ -= it->second.cold;
        planner_.progressed(id, PrefixPlanner::Stage::first_text, now);
    }

    /// A running request has ended. False: not for good, next() will name it again.
    /// `delivered`: the caller has seen text of it.
    bool ended(RequestId id, const Response& response, bool delivered, Point now) {
        Item& item = items_.at(id);
        account(now);
        --running_;
        refilling_ = false;
        if (!item.has_text) prefilling_ -= item.cold;
        item.has_text = false;
        if (!response.outcome) {
            ++item.retry.attempts;
            // The place is free at once; what the others wait for comes a little later.
            if (options_.commit_delay.count() > 0) {
                committing_.emplace_back(now + options_.commit_delay, id);
                item.state = State::committing;
            } else {
                planner_.progressed(id, PrefixPlanner::Stage::done, now);
                forget(id);
            }
            return true;
        }
        planner_.progressed(id, PrefixPlanner::Stage::failed, now);
        if (*response.outcome != Errc::cancelled && !(item.deadline <= now)) {
            const auto before = item.retry.resends;
            const auto verdict = retry_.decide(response, delivered, item.retry);
            stats_.resends += item.retry.resends - before;
            if (verdict.again) {
                item.state = State::delayed;
                delayed_.emplace(now + verdict.delay, id);
                if (verdict.pause_server)
                    paused_until_ = std::max(paused_until_, now + verdict.delay);
                return false;
            }
        } else {
            ++item.retry.attempts;
        }
        forget(id);
        return true;
    }

    /// Attempts so far that counted.
    unsigned attempts(RequestId id) const {
        const auto it = items_.find(id);
        return it == items_.end() ? 0 : it->second.retry.attempts;
    }

    enum class Place { unknown, waiting, running };

    /// Gives up a request that waits. One that runs has to be ended by whoever runs it.
    Place cancel(RequestId id) {
        const auto it = items_.find(id);
        if (it == items_.end() || it->second.state == State::committing) return Place::unknown;
        if (it->second.state == State::running) return Place::running;
        if (it->second.state == State::waiting) {
            planner_.remove(id);
            --waiting_;
        } else {
            std::erase_if(delayed_, [&](const auto& entry) { return entry.second == id; });
        }
        forget(id);
        return Place::waiting;
    }

    /// Those whose deadline has passed; each is named once.
    std::vector<RequestId> late(Point now) {
        std::vector<RequestId> found;
        while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
            found.push_back(deadlines_.begin()->second);
            deadlines_.erase(deadlines_.begin());
        }
        return found;
    }

    /// When next() or late() may say something new without anything having happened.
    Point wake(Point now) const {
        Point at = Point::max();
        if (!deadlines_.empty()) at = deadlines_.begin()->first;
        if (!committing_.empty()) at = std::min(at, committing_.front().first);
        if (running_ < options_.max_in_flight) {
            if (!delayed_.empty())
                at = std::min(at, std::max(delayed_.begin()->first, paused_until_));
            if (waiting_ > 0) {
                if (paused_until_ > now) at = std::min(at, paused_until_);
                at = std::min(at, held_until_);
            }
        }
        return at;
    }

    SchedulerStats stats(Point now) {
        account(now);
        stats_.in_flight = running_;
        return stats_;
    }

    std::size_t waiting() const { return waiting_ + delayed_.size(); }
    unsigned running() const { return running_; }

private:
    // Only thresholds depend on it; 4 is the usual figure for English text and JSON.
    static constexpr std::size_t bytes_per_token = 4;

    enum class State { waiting, running, delayed, committing };

    struct Item {
        State state = State::waiting;
        Prompt prompt;        // to wait once more after a failure
        std::size_t cold = 0; // prompt bytes that the server has to prefill
        bool has_text = false;
        RetryState retry;
        Point deadline = Point::max();
    };

    void release(Point now) {
        while (!committing_.empty() && committing_.front().first <= now) {
            planner_.progressed(committing_.front().second, PrefixPlanner::Stage::done, now);
            forget(committing_.front().second);
            committing_.pop_front();
        }
        while (!delayed_.empty() && delayed_.begin()->first <= now) {
            const RequestId id = delayed_.begin()->second;
            delayed_.erase(delayed_.begin());
            Item& item = items_.at(id);
            item.state = State::waiting;
            planner_.add(id, item.prompt);
            ++waiting_;
        }
    }

    void forget(RequestId id) {
        const auto it = items_.find(id);
        if (it->second.deadline != Point::max()) deadlines_.erase({it->second.deadline, id});
        items_.erase(it);
    }

    void account(Point now) {
        if (since_ != Point{} && running_ > 0) {
            const double seconds = std::chrono::duration<double>(now - since_).count();
            stats_.in_flight_seconds += seconds * running_;
            stats_.busy_seconds += seconds;
        }
        since_ = now;
    }

    PrefixPlanner& planner_;
    SchedulerOptions options_;
    RetryTable retry_;
    std::unordered_map<RequestId, Item> items_;
    std::set<std::pair<Point, RequestId>> deadlines_, delayed_;
    std::deque<std::pair<Point, RequestId>> committing_;
    std::size_t waiting_ = 0; // in the planner
    unsigned running_ = 0;
    std::size_t prefilling_ = 0; // cold bytes of those without text
    bool refilling_ = true;
    Point paused_until_{}, since_{};
    Point held_until_ = Point::max(); // by the planner, when it was last asked
    SchedulerStats stats_;
};

} // namespace detail
} // namespace evalrt

#endif
