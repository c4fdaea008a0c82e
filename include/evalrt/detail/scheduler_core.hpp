// SchedulerCore: who runs next, who runs again and who is late. No I/O, no clock of its own.
#ifndef EVALRT_DETAIL_SCHEDULER_CORE_HPP
#define EVALRT_DETAIL_SCHEDULER_CORE_HPP

#include "evalrt/detail/breaker.hpp"
#include "evalrt/detail/memory.hpp"
#include "evalrt/detail/rates.hpp"
#include "evalrt/detail/retry.hpp"
#include "evalrt/limiter.hpp"
#include "evalrt/prefix_planner.hpp"

#include <deque>
#include <map>
#include <unordered_map>

namespace evalrt {

struct SchedulerOptions {
    unsigned servers = 1;        ///< that are alike; what follows is of each of them
    unsigned max_in_flight = 16; ///< to start with
    unsigned most_in_flight = 0; ///< to climb to where that pays; up to max_in_flight: no climbing
    double repack = 0;           ///< see BackendRow::repack
    unsigned refill = 1;         ///< free places to wait for before more is admitted; 1: a flow
    std::chrono::milliseconds commit_delay{}; ///< end of a leader to its prefix being visible
    RetryOptions retry;
    BreakerOptions breaker;
    StopOptions stop;
    /// A broken connection is held for so long before it counts: the server may turn out to have
    /// died. Only where somebody calls server_lost(). Zero: not held.
    std::chrono::milliseconds hold_broken{};
};

struct SchedulerStats {
    unsigned in_flight = 0;
    unsigned most_in_flight = 0;
    double in_flight_seconds = 0; ///< the integral of in_flight over time
    double busy_seconds = 0;      ///< time with something in flight
    std::uint64_t resends = 0;    ///< connections that broke before any byte of an answer
    std::uint64_t answered = 0;
    std::uint64_t timeouts = 0; ///< attempts that ran into a time limit of theirs
    std::uint64_t reruns = 0;   ///< attempts made again because the server had died under them
    unsigned limit = 0;         ///< of those in flight, at present
    unsigned most_limit = 0;    ///< the highest so far
    double prefill_rate = 0;    ///< tokens a second, the best seen; 0: not seen
    double decode_rate = 0;     ///< pieces of text a second, the best seen; 0: not seen
    std::uint64_t pieces = 0;   ///< of text
    /// With several on the way a server's texts came one after the other: it does not batch.
    bool one_by_one = false;
    unsigned unusual = 0; ///< all bits of Prompt::unusual that there were
};

namespace detail {

class SchedulerCore {
public:
    using Point = Clock::time_point;

    SchedulerCore(PrefixPlanner& planner, SchedulerOptions options)
        : planner_(planner),
          options_(options),
          retry_(options.retry),
          stop_(options.stop),
          servers_(std::max(options.servers, 1u), Server(options)) {}

    /// What the prompt's views point at must stay until the request has ended for good.
    /// `deadline`: Point::max() for none.
    void submit(RequestId id, Prompt prompt, Point deadline) {
        Item& item = items_[id];
        item.prompt = std::move(prompt);
        item.deadline = deadline;
        stats_.unusual |= item.prompt.unusual;
        if (deadline != Point::max()) deadlines_.emplace(deadline, id);
        if (item.prompt.output_tokens)
            for (auto& it : servers_) it.limiter.expect(*item.prompt.output_tokens);
        planner_.add(id, item.prompt);
        ++waiting_;
    }

    /// The next one to send, as long as there is one.
    std::optional<Pick> next(Point now) {
        auto pick = choose(now);
        if (pick)
            pick->gate = std::exchange(gate_, {});
        else if (waiting_ == 0)
            gate_ = {};
        return pick;
    }

    /// The server says that it has computed a running request's prompt. Its text may not come
    /// before its end, as that of a call of a tool.
    void computed(RequestId id, Point now) {
        const auto it = items_.find(id);
        if (it == items_.end() || it->second.state != State::running) return;
        it->second.told = true;
        prompt_computed(id, it->second, now);
    }

    /// A piece of a running request's answer, about a token, has arrived.
    void text(RequestId id, Point now) {
        const auto it = items_.find(id);
        if (it == items_.end() || it->second.state != State::running) return;
        turned_away_ = Point{};
        auto& server = servers_[it->second.server];
        server.limiter.tokens(1, full(server), now);
        ++server.pieces;
        ++it->second.pieces;
        server.together += server.with_text > 1;
        if (it->second.has_text) return rates_.text(now);
        account(now);
        prompt_computed(id, it->second, now);
        rates_.first_text(prompt_tokens(it->second), now);
        server.breaker.alive();
        it->second.has_text = true;
        ++server.with_text;
    }

    /// A running request has ended. False: not for good, next() will name it again.
    /// `delivered`: the caller has seen text of it. Puts right what only the core can know: that
    /// the server died under it, or of it.
    bool ended(RequestId id, Response& response, bool delivered, Point now) {
        Item& item = items_.at(id);
        auto& server = servers_[item.server];
        account(now);
        --running_;
        --server.running;
        server.refilling = false;
        const bool had_text = std::exchange(item.has_text, false);
        if (had_text) --server.with_text;
        const bool told = std::exchange(item.told, false);
        const auto pieces = std::exchange(item.pieces, 0);
        const auto held = prompt_tokens(item) + double(pieces);
        rates_.ended(item.burst, std::exchange(item.computed, false),
                     had_text ? std::optional(held) : std::nullopt, cold_tokens(item, response),
                     now);
        if (told && response.usage.completion_tokens.value_or(0) > 2 * pieces + 8) rates_.hides();
        const bool alone = std::exchange(item.alone, false);
        alone_ = alone_ && !alone;
        const bool lost = std::exchange(item.lost, false);
        if (!response.outcome) {
            server.breaker.alive();
            turned_away_ = Point{};
            ++stats_.answered;
            server.refusals = 0;
            if (had_text && server.running + 1 >= several && shows_its_pace(response))
                ++server.beside;
            if (!had_text) // it came in one piece
                server.limiter.tokens(double(response.usage.completion_tokens.value_or(1)),
                                      full(server), now);
            server.limiter.answered(now, response.usage.completion_tokens);
            stats_.most_limit = std::max(stats_.most_limit, limit());
            retry_.succeeded(item.retry);
            item.deaths = 0;
            if (response.usage.completion_tokens)
                planner_.answered(id, *response.usage.completion_tokens,
                                  response.usage.prompt_tokens.value_or(0));
            // The place is free at once; what the others wait for comes a little later.
            if (options_.commit_delay.count() > 0) {
                committing_.emplace_back(now + options_.commit_delay, id);
                item.state = State::committing;
                judge(response);
            } else {
                planner_.progressed(id, PrefixPlanner::Stage::done, now);
                settle(id, response);
            }
            return true;
        }
        planner_.progressed(id, PrefixPlanner::Stage::failed, now);
        const auto errc = *response.outcome;
        if (errc == Errc::timed_out) ++stats_.timeouts;
        if (errc == Errc::cancelled || item.deadline <= now) {
            ++item.retry.attempts;
            settle(id, response);
            return true;
        }
        if (lost && broken(response)) {
            // The server died while this ran, and this may be why: it is asked again, but alone.
            // A second death names it for certain.
            if (item.deaths < 2 && !delivered) {
                item.state = State::suspect;
                suspects_.push_back(id);
                ++stats_.reruns;
                return false;
            }
            ++item.retry.attempts;
            if (item.deaths >= 2) {
                response.outcome = Errc::poison;
                response.detail = "the server died twice while it ran this request, the second "
                                  "time with no other beside it";
            } else if (errc != Errc::exited) {
                response.outcome = Errc::exited;
                response.detail = "the server died in the middle of the answer";
            }
            settle(id, response);
            return true;
        }
        if (remedy(errc, response.status) != Remedy::pause) {
            if (errc != Errc::unreachable) turned_away_ = Point{}; // it works, or is waited for
        } else if (turned_away_ == Point{}) {
            turned_away_ = now;
        }
        if (response.elsewhere && !delivered) {
            if (response.stage > Stage::sent) server.breaker.alive();
            if (response.retry_after) // whatever else it still answers
                server.paused_until =
                    std::max(server.paused_until,
                             now + std::min<Clock::duration>(*response.retry_after,
                                                             options_.retry.longest_wait));
            item.state = State::delayed;
            delayed_.emplace(now, id);
            return false;
        }
        const bool refused = errc == Errc::unreachable && response.stage == Stage::none;
        if (errc != Errc::unreachable || response.stage > Stage::sent)
            server.breaker.alive();
        else if (server.with_text == 0) // else it is only short of places for connections
            server.breaker.dead(now);
        const auto before = item.retry.resends;
        RetryVerdict verdict;
        if (refused && !delivered && worth_waiting(now))
            verdict = {true, std::chrono::milliseconds(100), false}; // nothing was sent
        else
            verdict = retry_.decide(response, delivered, item.retry);
        stats_.resends += item.retry.resends - before;
        if (!verdict.again) {
            settle(id, response);
            return true;
        }
        item.state = State::delayed;
        if (remedy(errc, response.status) == Remedy::pause && servers_.size() > 1) {
            // It is this server that has to wait.
            item.retry.waited -= verdict.delay;
            item.turned_away = now;
            delayed_.emplace(now, id);
        } else {
            delayed_.emplace(now + verdict.delay, id);
        }
        if (verdict.pause_server) {
            auto pause = response.retry_after ? verdict.delay : std::chrono::milliseconds(0);
            if (server.paused_until <= now) { // once for all that are turned away together
                server.limiter.overloaded(server.running + 1);
                ++server.refusals;
                if (!response.retry_after) pause = retry_.pause(server.refusals);
            }
            server.paused_until = std::max(server.paused_until, now + pause);
        }
        return false;
    }

    /// The server has died, or was killed because it hung. What runs will break, and is asked
    /// again; nothing is sent until server_back().
    void server_lost() {
        down_ = true;
        for (auto& it : servers_) it.limiter.lost(it.running); // the load may have been it
        for (auto& [id, item] : items_) {
            if (item.state != State::running || item.lost) continue;
            item.lost = true;
            ++item.deaths;
        }
        planner_.cache_lost();
    }

    void server_back() {
        down_ = false;
        for (auto& it : servers_) it.breaker.alive();
    }

    using Reason = std::optional<std::pair<Errc, std::string>>;

    /// Why the rest of the run is not worth asking for.
    const Reason& stop_reason() const { return stop_reason_; }

    /// No server has answered for longer than the breaker's patience.
    bool server_gone(Point now) const {
        return !down_ && std::all_of(servers_.begin(), servers_.end(),
                                     [now](const Server& it) { return it.breaker.gone(now); });
    }

    /// For longer than the patience for that, all that was asked of any server was turned away for
    /// its load. Said once: then that time begins anew.
    bool turned_away(Point now) {
        if (turned_away_ == Point{} || running_ > 0 || waiting() == 0 ||
            now - turned_away_ < options_.breaker.busy_patience)
            return false;
        turned_away_ = Point{};
        return true;
    }

    bool ended(RequestId id, Response&& response, bool delivered, Point now) {
        return ended(id, response, delivered, now);
    }

    /// Attempts so far that counted.
    unsigned attempts(RequestId id) const {
        const auto it = items_.find(id);
        return it == items_.end() ? 0 : it->second.retry.attempts;
    }

    /// What retries have left of their common budget.
    unsigned retry_budget() const { return retry_.budget().tokens(); }

    enum class Place { unknown, waiting, running };

    /// Gives up a request that waits. One that runs has to be ended by whoever runs it.
    Place cancel(RequestId id) {
        const auto it = items_.find(id);
        if (it == items_.end() || it->second.state == State::committing) return Place::unknown;
        if (it->second.state == State::running) return Place::running;
        if (it->second.state == State::waiting) {
            planner_.remove(id);
            --waiting_;
        } else if (it->second.state == State::suspect) {
            std::erase(suspects_, id);
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
        if (down_) return at;
        const bool may_wait = waiting_ > 0 || !suspects_.empty();
        Point opens = Point::max(); // the first one that has a place
        for (const auto& it : servers_) {
            const auto& breaker = it.breaker;
            if (breaker.open() && (may_wait || !delayed_.empty()) && breaker.wake() > now)
                at = std::min(at, breaker.wake());
            if (it.running >= allowed(it, now)) continue;
            opens = std::min(opens, it.paused_until);
            if (may_wait && it.paused_until > now) at = std::min(at, it.paused_until);
        }
        if (opens == Point::max()) return at;
        if (!delayed_.empty()) at = std::min(at, std::max(delayed_.begin()->first, opens));
        if (may_wait) at = std::min(at, held_until_);
        return at;
    }

    SchedulerStats stats(Point now) {
        account(now);
        stats_.in_flight = running_;
        stats_.limit = limit();
        stats_.prefill_rate = rates_.prefill();
        stats_.decode_rate = rates_.decode();
        stats_.pieces = rates_.pieces();
        stats_.one_by_one = std::any_of(servers_.begin(), servers_.end(), [](const Server& it) {
            return it.beside >= enough_beside && it.together * 20 < it.pieces &&
                   it.texting * 4 >= it.busy;
        });
        stats_.most_limit = std::max(stats_.most_limit, stats_.limit);
        return stats_;
    }

    std::size_t waiting() const { return waiting_ + delayed_.size() + suspects_.size(); }
    unsigned running() const { return running_; }

private:
    enum class State { waiting, running, delayed, suspect, committing };

    struct Item {
        State state = State::waiting;
        Prompt prompt;         // to wait once more after a failure
        double cold_share = 1; // of its prompt
        Rates::Burst burst = 0;
        std::int64_t pieces = 0; // of the text that the attempt has brought
        bool computed = false;   // its prompt
        bool told = false;       // by the server
        bool has_text = false;
        unsigned server = 0; // that it runs on
        bool lost = false;   // the server has died under the attempt that runs
        bool alone = false;  // nothing else may run meanwhile
        unsigned deaths = 0; // of the server while this ran, and no answer since
        RetryState retry;
        Point turned_away{}; // by one of several servers, and not sent since
        Point deadline = Point::max();
    };

    struct Server {
        explicit Server(const SchedulerOptions& of)
            : limiter({of.max_in_flight, of.most_in_flight, of.repack}), breaker(of.breaker) {}

        Limiter limiter;
        Breaker breaker;
        unsigned running = 0, with_text = 0; // with_text: of those
        bool refilling = true;
        bool bound = false; // more would run if it might
        Point paused_until{};
        unsigned refusals = 0;                  // for its load, with no answer between
        std::uint64_t pieces = 0, together = 0; // of text; while another one had text, too
        unsigned beside = 0;                    // answers that ended with several on the way
        Clock::duration busy{}, texting{};      // something ran; something had text
    };

    // What has to be seen of a server to say that it answers one request at a time.
    static constexpr unsigned several = 4, enough_beside = 8;
    // Of some length, and with time between its texts: what holds them back until the end, as a
    // proxy may, hides whether they were made beside others'. Nor is then much of the time any
    // text's, while one that answers one at a time has little else.
    static bool shows_its_pace(const Response& response) {
        const auto& timing = response.timing;
        return response.usage.completion_tokens.value_or(0) >= several && timing.first_text &&
               timing.last_text && (*timing.last_text - *timing.first_text) * 64 >= timing.total;
    }

    // About.
    static double prompt_tokens(const Item& item) { return double(item.prompt.bytes()) / 4; }

    void prompt_computed(RequestId id, Item& item, Point now) {
        if (std::exchange(item.computed, true)) return;
        rates_.computed(now);
        servers_[item.server].limiter.first_text(now);
        planner_.progressed(id, PrefixPlanner::Stage::first_text, now);
    }

    static unsigned allowed(const Server& it, Point now) {
        return it.breaker.allowed(it.limiter.limit(), now);
    }

    unsigned limit() const {
        unsigned sum = 0;
        for (const auto& it : servers_) sum += it.limiter.limit();
        return sum;
    }

    // A request that could not be sent waits for a server to come back.
    bool worth_waiting(Point now) const {
        return std::any_of(servers_.begin(), servers_.end(),
                           [now](const Server& it) { return it.breaker.waits(now); });
    }

    // Why it gets no request now; empty: it may.
    std::string_view shut(const Server& it, Point now) const {
        if (now < it.paused_until) return "pause";
        const auto most = allowed(it, now);
        if (it.running >= most) return "limit";
        if (it.running == 0 || !suspects_.empty() || alone_) return {};
        // Nearly all places are taken: wait until several are free, and fill them together.
        if (!it.refilling && most - it.running < std::min<std::size_t>(options_.refill, waiting_))
            return "refill";
        return {};
    }

    std::optional<Pick> choose(Point now) {
        release(now);
        held_until_ = Point::max();
        const auto closed = [this](std::string_view gate) {
            gate_ = gate;
            return std::optional<Pick>();
        };
        if (down_) return closed("server");
        std::string_view gate;
        bool open = false;
        for (std::size_t i = 0; i < servers_.size(); ++i) {
            const auto why = shut(servers_[i], now);
            open |= why.empty();
            servers_[i].bound |= why == "limit";
            if (gate.empty()) gate = why;
            if (servers_.size() > 1) planner_.admit(unsigned(i), why.empty());
        }
        if (!open) return closed(gate);
        if (!suspects_.empty()) return running_ == 0 ? next_suspect(now) : closed("suspects");
        if (waiting_ == 0 || alone_) return closed("suspects");
        if (servers_.size() == 1) planner_.room(allowed(servers_[0], now) - servers_[0].running);
        auto pick = planner_.next(now);
        if (!pick && looks_with_others()) { // they may all wait for one that has failed
            release(now, true);
            pick = planner_.next(now);
        }
        if (!pick) {
            held_until_ = planner_.wake();
            for (auto& it : servers_) it.bound &= !shut(it, now).empty();
            return closed(planner_.holds());
        }
        --waiting_;
        run(*pick, now);
        auto& server = servers_[items_.at(pick->id).server];
        server.refilling = server.running < allowed(server, now);
        return pick;
    }

    void run(const Pick& pick, Point now) {
        account(now);
        ++running_;
        stats_.most_in_flight = std::max(stats_.most_in_flight, running_);
        Item& item = items_.at(pick.id);
        item.state = State::running;
        item.server = std::min(pick.server, unsigned(servers_.size() - 1));
        ++servers_[item.server].running;
        const auto cold = pick.prompt_bytes - pick.expected_bytes.value_or(0);
        if (item.turned_away != Point{})
            item.retry.waited += std::chrono::duration_cast<std::chrono::milliseconds>(
                now - std::exchange(item.turned_away, Point{}));
        item.cold_share = pick.prompt_bytes > 0 ? double(cold) / double(pick.prompt_bytes) : 0;
        item.burst = rates_.sent(now);
    }

    std::optional<Pick> next_suspect(Point now) {
        Pick pick;
        pick.id = suspects_.front();
        suspects_.pop_front();
        Item& item = items_.at(pick.id);
        pick.prompt_bytes = item.prompt.bytes();
        pick.why = "suspect";
        item.alone = alone_ = true;
        run(pick, now);
        return pick;
    }

    // What a dying server leaves of an answer.
    static bool broken(const Response& response) {
        return response.outcome == Errc::unreachable || response.outcome == Errc::truncated ||
               response.outcome == Errc::malformed || response.outcome == Errc::timed_out ||
               response.outcome == Errc::exited;
    }

    // As the server says, or as the plan has it.
    static std::optional<std::int64_t> cold_tokens(const Item& item, const Response& response) {
        const auto& usage = response.usage;
        if (response.outcome || !usage.prompt_tokens) return {};
        if (usage.cached_tokens) return *usage.prompt_tokens - *usage.cached_tokens;
        return std::int64_t(item.cold_share * double(*usage.prompt_tokens));
    }

    void settle(RequestId id, const Response& response) {
        if (response.outcome) planner_.remove(id); // it is not added again
        forget(id);
        judge(response);
    }

    void judge(const Response& response) {
        auto why = stop_.ended(response);
        if (!stop_reason_ && !why.empty() && waiting() > 0)
            stop_reason_ = {*response.outcome, std::move(why)};
    }

    void release(Point now, bool all = false) {
        while (!committing_.empty() && committing_.front().first <= now) {
            planner_.progressed(committing_.front().second, PrefixPlanner::Stage::done, now);
            forget(committing_.front().second);
            committing_.pop_front();
        }
        while ((all || !looks_with_others()) && !delayed_.empty() &&
               delayed_.begin()->first <= now) {
            const RequestId id = delayed_.begin()->second;
            delayed_.erase(delayed_.begin());
            Item& item = items_.at(id);
            item.state = State::waiting;
            planner_.add(id, item.prompt);
            ++waiting_;
        }
    }

    // A server that answers nobody is looked at with one request at a time: first with those that
    // were not sent yet, as what it did not answer may be to blame itself.
    bool looks_with_others() const {
        return servers_.size() == 1 && servers_[0].breaker.open() && waiting_ > 0;
    }

    void forget(RequestId id) {
        const auto it = items_.find(id);
        if (it->second.deadline != Point::max()) deadlines_.erase({it->second.deadline, id});
        items_.erase(it);
    }

    // Between answers' ends and the next ones' start places are free for a moment.
    bool full(const Server& server) const { return server.bound && waiting_ > 0; }

    void account(Point now) {
        if (since_ != Point{})
            for (auto& it : servers_) {
                if (it.running > 0) it.busy += now - since_;
                if (it.with_text > 0) it.texting += now - since_;
            }
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
    StopRule stop_;
    std::vector<Server> servers_;
    Rates rates_;
    std::string_view gate_; // why next() has named none
    Reason stop_reason_;
    Pool pool_; // of the items
    std::unordered_map<RequestId, Item, std::hash<RequestId>, std::equal_to<RequestId>,
                       PoolAllocator<std::pair<const RequestId, Item>>>
        items_{pool_};
    std::set<std::pair<Point, RequestId>> deadlines_, delayed_;
    std::deque<std::pair<Point, RequestId>> committing_;
    std::deque<RequestId> suspects_; // run one at a time, before all others
    Point turned_away_{};            // since then, and nothing else has come
    bool down_ = false, alone_ = false;
    std::size_t waiting_ = 0; // in the planner
    unsigned running_ = 0;
    Point since_{};
    Point held_until_ = Point::max(); // by the planner, when it was last asked
    SchedulerStats stats_;
};

} // namespace detail
} // namespace evalrt

#endif
