// ReplicaPlanner: one suite over several servers that are alike.
#ifndef EVALRT_DETAIL_REPLICAS_HPP
#define EVALRT_DETAIL_REPLICAS_HPP

#include "evalrt/detail/shards.hpp"
#include "evalrt/prefix_planner.hpp"

#include <functional>
#include <memory>
#include <tuple>
#include <unordered_set>

namespace evalrt::detail {

/// Cuts the planned order into contiguous runs, one a server, each of which has a planner of its
/// own for what is about to be sent. A server whose run is done takes the second half of what the
/// slowest one has left. A conversation that has begun on a server stays there, later turns too, as
/// long as that is in and fails none of them.
///
/// What a server has failed is kept from it while another one is in that has not, and that one is
/// asked whatever retries may still cost: each server has one attempt of an item so.
///
/// A server is out (nothing is sent to it; somebody looks at it when it is due(), and lets it in),
/// in but not proven (it has answered nothing since: one request at a time), or proven. One goes
/// out that cannot be reached twice in a row, or only fails, only turns away or shows no sign of
/// life while another is in; its run goes to the others. While all are out they are named as if
/// they were in, and who sends refuses: so it is found out that no server is there.
///
/// What one server refuses (its body, its length) another one is asked next: it may be the server.
/// If others have answered what it refused, and it goes out, what else it has refused is not held
/// against the items.
/// One that refuses many in a row is held until others have said what they make of some of these:
/// it gets one request now and then. The last one that is in, and refuses or fails many in a row,
/// rests until the others were looked at; then it gets twice as many, and so on.
class ReplicaPlanner final : public PrefixPlanner {
public:
    using Make = std::function<std::unique_ptr<PrefixPlanner>()>;
    struct Options {
        RadixPlanner::Options planner; ///< of the whole order
        Make make{};                   ///< a server's; none: a RadixPlanner with these options
        /// From going out to being looked at; doubled each time that it goes out unproven.
        std::chrono::milliseconds pause{5000}, longest_pause{60000};
        std::size_t remembered = 4096; ///< conversations of which nothing waits or runs
        /// A server with more to do than this and twice what the idlest one has gets no more of the
        /// conversations (Request::conversation) whose last turns it had.
        std::size_t busier = 4;
        std::chrono::milliseconds busy{30000};  ///< of turning all away, until one goes out
        std::chrono::milliseconds asked{10000}; ///< the longest Retry-After that is waited for
        /// Without a sign of life, at least; and four times what the longest answer took.
        std::chrono::milliseconds silence{60000};
        std::chrono::milliseconds held{1000}; ///< from a failure of a held server to its next one
        /// An item that all have failed that are in waits until those that are out were looked at,
        /// at most so long; and so does the last one that is in and only fails. Meanwhile a look
        /// comes after so long.
        std::chrono::milliseconds wait{15000}, soon{1000};
    };
    struct Count {
        std::uint64_t sent = 0;
        std::uint64_t taken_over = 0; ///< items that were another one's first, and are its now
        std::uint64_t refused = 0;    ///< that others have answered
    };

    ReplicaPlanner(std::size_t servers, Options options)
        : options_(std::move(options)), servers_(std::max<std::size_t>(servers, 1)) {
        for (auto& it : servers_)
            it.planner =
                options_.make ? options_.make() : std::make_unique<RadixPlanner>(options_.planner);
        for (auto& it : servers_) it.pause = options_.pause;
    }

    void add(RequestId id, const Prompt& prompt) override {
        const auto [found, fresh] = items_.try_emplace(id);
        auto& item = found->second;
        item.prompt = prompt;
        item.place = Place::fresh;
        if (kind_ && *kind_ != prompt.kind) kinds_ = true;
        kind_ = prompt.kind;
        if (client_ && *client_ != prompt.client) clients_ = true;
        client_ = prompt.client;
        if (fresh && !prompt.session.empty()) {
            item.session = &sessions_[prompt.session];
            ++item.session->live;
        }
        fresh_.push_back(id);
        ++waiting_;
    }

    std::optional<Pick> next(Point now) override {
        wake_ = place_fresh(now);
        holds_ = {};
        if (waiting_ == 0) return {};
        const bool any_free = std::any_of(servers_.begin(), servers_.end(), [](const Server& it) {
            return !it.out && !held(it) && (it.open || it.running > 0);
        });
        std::vector<std::size_t> order; // those with the fewest running first
        for (std::size_t i = 0; i < servers_.size(); ++i) order.push_back(i);
        std::stable_sort(order.begin(), order.end(), [this](std::size_t a, std::size_t b) {
            return servers_[a].running < servers_[b].running;
        });
        for (const auto i : order) {
            auto& server = servers_[i];
            if (!server.open) continue;
            if (server.out ? any_up() : !server.proven && server.running > 0) continue;
            if (auto pick = to_judge(i)) return send(*pick, i, now);
            if (any_free && held(server)) {
                if (server.running > 0) continue;
                const auto at = server.failed_last + options_.held;
                if (now < at) {
                    wake_ = std::min(wake_, at);
                    continue;
                }
            }
            if (!another_up(i) && rests(server, now)) {
                wake_ = std::min(wake_, now + recheck);
                continue;
            }
            if (own(server) == 0) steal(i, server.proven);
            feed(server);
            if (auto pick = server.planner->next(now)) return send(*pick, i, now);
            wake_ = std::min(wake_, server.planner->wake());
            if (holds_.empty()) holds_ = server.planner->holds();
        }
        return {};
    }

    void progressed(RequestId id, Stage stage, Point now) override {
        const auto it = items_.find(id);
        if (it == items_.end() || it->second.place != Place::running) return;
        auto& item = it->second;
        auto& server = servers_[item.server];
        server.planner->progressed(id, stage, now);
        if (stage != Stage::failed) {
            server.heard = std::max(server.heard, now);
            // Those that have refused it were wrong.
            if (item.session) item.session->failed_at |= item.checking & ~bit(item.server);
            each(item.checking & ~bit(item.server), [](Server& of) {
                of.failed += of.answered;
                ++of.wrong;
                ++of.count.refused;
            });
            checked(item);
        }
        if (stage == Stage::first_text) {
            // Good for more at once, until something breaks: only an answer has an end.
            server.proven |= server.failed + server.broken == 0 && server.pause == options_.pause;
            return;
        }
        if (stage == Stage::failed) {
            item.tried_at |= bit(item.server);
            server.failed_last = now;
            if (!(item.checking & bit(item.server))) checked(item); // it has not come to that
        } else {
            took_.push_back(now - item.sent);
            if (took_.size() > 128) took_.pop_front();
        }
        --server.running;
        server.moved -= item.moved;
        item.place = Place::nowhere; // may be added again
        if (stage == Stage::done) forget(it);
    }

    void answered(RequestId id, std::int64_t output_tokens,
                  std::int64_t prompt_tokens = 0) override {
        const auto it = items_.find(id);
        if (it != items_.end() && it->second.place == Place::running)
            servers_[it->second.server].planner->answered(id, output_tokens, prompt_tokens);
    }

    void remove(RequestId id) override {
        const auto it = items_.find(id);
        if (it == items_.end()) return;
        auto& item = it->second;
        if (item.place == Place::running) return;
        if (item.place == Place::fed) take_back(servers_[item.server], id);
        if (item.place != Place::nowhere) --waiting_;
        forget(it);
    }

    void cache_lost() override {
        for (auto& it : servers_) it.planner->cache_lost();
    }

    void admit(unsigned server, bool open) override { servers_[server].open = open; }

    Point wake() const override { return wake_; }
    std::string_view holds() const override { return holds_; }

    /// It has answered a request, to the end.
    void alive(std::size_t server) {
        auto& it = servers_[server];
        if (it.barred) return;
        enter(server);
        prove(it);
        it.pause = options_.pause;
    }

    /// A sign of life; `text`: of an answer.
    void heard(std::size_t server, bool text, Point now) {
        servers_[server].heard = now;
        if (text) servers_[server].busy_since = Point{};
    }

    /// Those with something running that have shown no sign of life for much longer than any
    /// answer has taken, while another one is well. To be asked every second or so.
    std::vector<std::size_t> silent(Point now) {
        std::vector<std::size_t> list;
        if (now - looked_ > std::chrono::seconds(10)) // it may have been us who stood still
            for (auto& it : servers_) it.heard = std::max(it.heard, now);
        looked_ = now;
        if (took_.size() < few) return list;
        const auto limit = std::max<Clock::duration>(
            options_.silence, 4 * *std::max_element(took_.begin(), took_.end()));
        const auto quiet = [&](const Server& it) {
            return it.running > 0 && now - it.heard >= limit;
        };
        const bool well = std::any_of(servers_.begin(), servers_.end(), [&](const Server& it) {
            return !it.out && it.answered && !quiet(it);
        });
        for (std::size_t i = 0; well && i < servers_.size(); ++i)
            if (quiet(servers_[i]) && servers_[i].running > servers_[i].moved) list.push_back(i);
        return list;
    }

    /// One that runs on a silent server is about to be taken from it. False: it stays, as it was
    /// moved before, and may be what silences servers.
    bool move(RequestId id) {
        const auto it = items_.find(id);
        if (it == items_.end() || it->second.place != Place::running || it->second.moved)
            return false;
        ++servers_[it->second.server].moved;
        failed_at(it->second, it->second.server);
        return it->second.moved = true;
    }

    /// What a failure of a server is.
    enum class Fault {
        passing, ///< 5xx, what is no answer
        lasting, ///< the key, the quota, a model that it has not
    };

    /// It has failed this one, which may be for its load: the answer is late, or cut short. True:
    /// another one is in that has not, or may be soon: that is not held against the item.
    bool failed(std::size_t server, RequestId id, Fault fault = Fault::passing) {
        const auto it = items_.find(id);
        if (it == items_.end() || bit(server) == 0) return false;
        failed_at(it->second, server);
        return best(it->second.failed_at) != none ||
               (fault == Fault::passing && waits(it->second)); // a key does not mend itself
    }

    /// A connection to it could not be made, or broke. True: with that it has gone out.
    bool unreachable(std::size_t server) {
        auto& it = servers_[server];
        if (++it.broken < too_many || it.out) return false;
        leave_out(server);
        return true;
    }

    struct Verdict {
        bool elsewhere = false; ///< it is not held against the item: another server is asked
        bool out = false;       ///< with that the server has gone out
        bool held = false;      ///< with that it is held; said once until it answers again
    };

    /// It has answered with a failure that is neither for its load nor the item's. While it is the
    /// only one that is in that is as with one server.
    Verdict failed(std::size_t server, Fault fault, RequestId id) {
        auto& it = servers_[server];
        const bool others = failed(server, id, fault);
        it.broken = 0;
        ++it.failed;
        ++it.streak;
        if (!another_up(server)) return {others};
        const bool its_own = !it.answered || fault == Fault::lasting;
        return {its_own || others, too_often(server, its_own ? few : many)};
    }

    /// It has turned this one away for its load, for so long as it says. One that has gone out for
    /// that is not waited for.
    Verdict busy(std::size_t server, RequestId id, Point now,
                 std::chrono::milliseconds asked = {}) {
        auto& it = servers_[server];
        it.broken = 0;
        if (!it.proven && asked <= options_.asked) {
            const bool gone = failed(server, Fault::passing, id).out;
            return {it.out && another_up(server), gone};
        }
        if (it.busy_since == Point{}) it.busy_since = now;
        if (!another_up(server)) return {};
        if (it.out) return {true};
        if (asked <= options_.asked && now - it.busy_since < options_.busy) return {};
        leave_out(server);
        it.look_after = std::clamp(asked, it.look_after, options_.longest_pause);
        return {true, true};
    }

    /// It has refused this one: its body, its length.
    Verdict refused(std::size_t server, RequestId id) {
        auto& it = servers_[server];
        it.broken = 0;
        ++it.streak;
        const auto found = items_.find(id);
        if (found == items_.end() || bit(server) == 0) return {};
        auto& item = found->second;
        for (std::size_t i = 0; i < servers_.size(); ++i)
            if (servers_[i].wrong >= few) item.refused_at &= ~bit(i); // no judge of anything now
        const auto others = item.refused_at & ~bit(server);
        item.refused_at |= bit(server);
        item.failed_at |= bit(server);
        bool known = it.answered; // one of those that refuse it does answer others
        each(others, [&](const Server& of) { known |= of.answered; });
        const bool left = item.shown < many && best(item.refused_at) != none;
        if (others && (known || !left)) {
            each(item.checking & ~bit(server), [](Server& of) {
                if (!of.answered && of.failed > 0) --of.failed;
            });
            checked(item);
            return {};
        }
        if (!left && it.wrong >= few && item.shown < many) { // alone as it is, it is no judge
            ++item.shown;
            if (it.out) return {true, false};
            leave_out(server);
            return {true, true};
        }
        if (!left && !waits(item)) return {};
        ++it.in_a_row;
        it.checks += !(item.checking & bit(server));
        item.checking |= bit(server);
        if (!left) return {true};
        ++item.shown;
        it.failed += !it.answered; // of one that answers, what others take counts
        const bool gone = too_often(server, few);
        return {true, gone, !gone && up(server) && held(it) && !std::exchange(it.said, true)};
    }

    /// Nothing is sent to it until it is let in.
    void leave_out(std::size_t server) {
        auto& it = servers_[server];
        it.out = true;
        it.soon = it.looking = false;
        it.since = it.busy_since = Point{};
        it.look_after = it.pause;
        it.pause = std::min(2 * it.pause, options_.longest_pause);
        it.planner->cache_lost();
        if (it.wrong > 0)
            for (auto& [id, item] : items_) item.refused_at &= ~bit(server);
        hand_over(server);
    }

    /// It is not the server that it was: no answer that still comes lets it in.
    void bar(std::size_t server) { servers_[server].barred = true; }

    /// It was looked at, and is well. It proves itself with its first answer.
    void let_in(std::size_t server) {
        auto& it = servers_[server];
        it.proven = it.answered = it.barred = false;
        enter(server);
    }

    /// It was looked at, and is not.
    void stays_out(std::size_t server) {
        servers_[server].looking = false;
        servers_[server].looked = servers_[server].look;
    }

    /// Those that are out and to be looked at now; what comes of it is let_in() or stays_out().
    std::vector<std::size_t> due(Point now) {
        std::vector<std::size_t> list;
        for (std::size_t i = 0; i < servers_.size(); ++i) {
            auto& it = servers_[i];
            if (!it.out || it.looking) continue;
            if (it.since == Point{}) it.since = now;
            const auto after = it.soon ? std::min(options_.soon, it.look_after) : it.look_after;
            if (now - it.since < after) continue;
            it.since = now;
            it.soon = false;
            it.looking = true;
            it.look = ++looks_;
            list.push_back(i);
        }
        return list;
    }

    bool up(std::size_t server) const { return !servers_[server].out; }
    bool proven(std::size_t server) const { return servers_[server].proven; }
    std::size_t size() const { return servers_.size(); }
    const Count& count(std::size_t server) const { return servers_[server].count; }
    unsigned running(std::size_t server) const { return servers_[server].running; }

private:
    static constexpr unsigned too_many = 2;                  // broken connections
    static constexpr unsigned few = 3, many = 8;             // failures with no answer between
    static constexpr unsigned most_waits = 2;                // failures that cost an item only that
    static constexpr std::chrono::milliseconds recheck{250}; // of those that wait so
    static constexpr std::size_t window = 512;               // in a server's planner at once
    static constexpr std::size_t none = ~std::size_t(0);

    enum class Place { nowhere, fresh, queued, fed, running };
    struct Session {
        std::size_t server = none;
        std::size_t live = 0;        // of its turns, those that are here
        bool begun = false;          // its server has had a turn of it
        std::uint64_t failed_at = 0; // a turn, or refused wrongly: a bit a server
        std::uint64_t ended = 0;     // when the last one left
    };
    // Until each server that is out was looked at, after it began.
    struct Wait {
        bool on = false;
        std::uint64_t since = 0; // the last look then
        Point until{};           // at the latest; none: nobody has waited yet
    };
    struct Item {
        Prompt prompt;
        Session* session = nullptr;
        std::size_t server = 0;
        std::size_t first = none; // that it was given to
        Place place = Place::nowhere;
        bool planned = false; // it has been in an order: a failed one goes where it was
        bool moved = false;   // from a silent server
        // A bit a server. It has come back from these without an answer:
        std::uint64_t tried_at = 0;
        std::uint64_t failed_at = 0;  // of these: not as they were busy, or could not be reached
        std::uint64_t refused_at = 0; // of these
        std::uint64_t checking = 0;   // what these refused is being asked elsewhere
        unsigned waits = 0;           // failures that it has only waited for
        Wait wait;
        unsigned shown = 0; // times that another one was asked so
        Point sent{};
        std::uint64_t cost = 1;
    };
    using Items = std::unordered_map<RequestId, Item>;
    struct Server {
        std::unique_ptr<PrefixPlanner> planner;
        std::deque<RequestId> queue; // planned, not in the planner yet
        std::deque<RequestId> fed;   // in it, in the order of the plan; some may have gone
        std::size_t waiting = 0;     // in the planner
        unsigned running = 0, broken = 0, failed = 0;
        unsigned moved = 0;       // of those that run
        unsigned checks = 0;      // what it refused, and others are asked now
        unsigned in_a_row = 0;    // refusals since its last answer, that others were asked for
        unsigned wrong = 0;       // others answered what it refused, since its last answer
        unsigned streak = 0;      // of refusals and failures since its last answer
        unsigned rests_at = many; // such a one
        Wait rest;
        bool said = false; // that it is held, since its last answer
        bool open = true, out = false, proven = true, barred = false;
        bool answered = false; // since it is in
        std::chrono::milliseconds pause{}, look_after{};
        Point since{};       // of the last look while it is out
        Point heard{};       // its last sign of life; with nothing running it needs none
        Point busy_since{};  // it turns all away
        Point failed_last{}; // an attempt there
        bool soon = false;   // it is out, and somebody waits for it
        bool looking = false;
        std::uint64_t look = 0, looked = 0; // the last one, and the last that is over
        Count count;
        std::uint64_t fed_all = 0; // what it will have sent when each client is given places again
    };

    static std::size_t own(const Server& it) { return it.queue.size() + it.waiting; }
    std::size_t load(std::size_t server) const {
        return own(servers_[server]) + servers_[server].running;
    }

    // What others say to what it has refused is waited for, where there are others that go on.
    static bool held(const Server& it) {
        return it.answered && it.checks >= many && it.in_a_row >= many;
    }

    bool any_up() const {
        return std::any_of(servers_.begin(), servers_.end(),
                           [](const Server& it) { return !it.out; });
    }
    bool any_out() const {
        return std::any_of(servers_.begin(), servers_.end(),
                           [](const Server& it) { return it.out; });
    }
    bool another_up(std::size_t than) const {
        for (std::size_t i = 0; i < servers_.size(); ++i)
            if (i != than && up(i)) return true;
        return false;
    }

    static void prove(Server& it) {
        it.proven = it.answered = true;
        it.failed = it.broken = it.wrong = it.in_a_row = it.streak = 0;
        it.rests_at = many;
        it.rest.on = false;
        it.said = false;
        it.busy_since = Point{};
    }

    // True: with that it has gone out.
    bool too_often(std::size_t server, unsigned most) {
        if (up(server) && servers_[server].failed >= most) {
            leave_out(server);
            return true;
        }
        return false;
    }

    template <class F>
    void each(std::uint64_t bits, F visit) {
        for (std::size_t i = 0; i < servers_.size(); ++i)
            if (bits & bit(i)) visit(servers_[i]);
    }

    // Nobody waits any more for what others say to it.
    void checked(Item& item) {
        each(std::exchange(item.checking, 0), [](Server& of) { --of.checks; });
    }

    void enter(std::size_t server) {
        const bool first = !any_up(); // what the others kept for want of another server goes to it
        servers_[server].out = false;
        parked_until_ = Point::min();
        servers_[server].failed = servers_[server].broken = 0;
        for (std::size_t i = 0; first && i < servers_.size(); ++i)
            if (i != server) hand_over(i);
    }

    static std::uint64_t bit(std::size_t server) {
        return server < 64 ? std::uint64_t(1) << server : 0;
    }

    // Of those that are in, without these: the one with the least to do.
    std::size_t best(std::uint64_t without) const {
        const auto rank = [this](std::size_t i) {
            return std::tuple(!servers_[i].proven, !servers_[i].answered, load(i));
        };
        std::size_t found = none;
        for (std::size_t i = 0; i < servers_.size(); ++i)
            if (up(i) && !(without & bit(i)) && (found == none || rank(i) < rank(found))) found = i;
        return found;
    }

    static void failed_at(Item& item, std::size_t server) {
        item.failed_at |= bit(server);
        if (item.session) item.session->failed_at |= bit(server);
    }

    // Those that it is for are looked at soon.
    bool goes_on(Wait& wait, Point now) {
        if (!wait.on) return false;
        if (wait.until == Point{}) wait.until = now + options_.wait;
        wait.on = false;
        if (now >= wait.until) return false;
        for (auto& it : servers_) {
            if (!it.out || it.looked > wait.since) continue;
            wait.on = true;
            it.soon |= !it.looking;
        }
        return wait.on;
    }

    // Others may be well again, before all is spent on this one.
    bool rests(Server& server, Point now) {
        if (!server.answered || server.streak < server.rests_at || !any_out()) return false;
        if (!server.rest.on) server.rest = {true, looks_, {}};
        if (goes_on(server.rest, now)) return true;
        server.rests_at *= 2;
        return false;
    }

    // All that are in have failed it, but others may be well again: those are looked at before it
    // is asked again. True: that failure is not held against it.
    bool waits(Item& item) {
        if (!any_out()) return false;
        item.wait = {true, looks_, {}};
        if (item.waits == most_waits) return false;
        ++item.waits;
        return true;
    }

    bool still_waits(Item& item, Point now) {
        item.wait.on = goes_on(item.wait, now) && best(item.failed_at) == none;
        return item.wait.on;
    }

    // The servers that it is kept from: those that have failed it, or its conversation, while
    // another one is in; else those that have refused it.
    std::uint64_t kept_from(const Item& item) const {
        for (const auto at : {all_failed_at(item), item.failed_at})
            if (at == 0 || best(at) != none) return at;
        return item.refused_at;
    }
    static std::uint64_t all_failed_at(const Item& item) {
        return item.failed_at | (item.session ? item.session->failed_at : 0);
    }

    // For one that comes back: where it has not been yet; where it has not failed; another one.
    // None: nowhere else. A conversation stays but for a failure.
    std::size_t elsewhere(const Item& item) const {
        if ((item.tried_at | item.failed_at) == 0) return none;
        if (item.session && !(item.failed_at & bit(item.session->server))) return none;
        const auto at = all_failed_at(item);
        for (const auto without :
             {item.tried_at | at, at, item.failed_at, item.refused_at | bit(item.server)})
            if (const auto found = best(without); found != none) return found;
        return none;
    }

    // All that waits of a conversation goes there.
    void relocate(Session& session, std::size_t to) {
        if (session.server != none && session.server != to) {
            auto& from = servers_[session.server];
            std::vector<RequestId> ids;
            const auto goes = [&](RequestId id) {
                const auto found = items_.find(id);
                if (found == items_.end() || found->second.session != &session) return false;
                if (found->second.place == Place::fed) {
                    from.planner->remove(id);
                    --from.waiting;
                }
                ids.push_back(id);
                return true;
            };
            std::erase_if(from.fed, goes);
            std::erase_if(from.queue, goes);
            for (const auto id : ids) queue(id, to);
        }
        session.server = to;
        session.begun = true; // there it stays
    }

    void forget(Items::iterator it) {
        checked(it->second);
        Session* session = it->second.session;
        std::string name = session ? it->second.prompt.session : std::string();
        items_.erase(it);
        if (!session || --session->live > 0) return;
        session->ended = ++ends_;
        quiet_.emplace_back(session->ended, std::move(name));
        while (quiet_.size() > options_.remembered) {
            const auto old = sessions_.find(quiet_.front().second);
            if (old != sessions_.end() && old->second.live == 0 &&
                old->second.ended == quiet_.front().first)
                sessions_.erase(old);
            quiet_.pop_front();
        }
    }

    // What has come since: what goes on with something, where that is; of the rest an order, cut,
    // to those that are there. Returns when those are placed that wait.
    Point place_fresh(Point now) {
        if (now >= parked_until_) { // or somebody has come in
            parked_until_ = Point::max();
            fresh_.insert(fresh_.begin(), parked_.begin(), parked_.end());
            parked_.clear();
        }
        if (fresh_.empty()) return parked_until_;
        std::erase_if(fresh_, [&](RequestId id) {
            const auto found = items_.find(id);
            if (found == items_.end() || !still_waits(found->second, now)) return false;
            parked_until_ = now + recheck;
            parked_.push_back(id);
            return true;
        });
        std::vector<RequestId> ids;
        std::vector<std::pair<std::size_t, RequestId>> known;
        for (const auto id : fresh_) {
            const auto found = items_.find(id);
            if (found == items_.end() || !found->second.session) continue;
            if (const auto other = elsewhere(found->second); other != none)
                relocate(*found->second.session, other);
        }
        for (const auto id : std::exchange(fresh_, {})) {
            const auto found = items_.find(id);
            if (found == items_.end()) continue; // removed
            const auto& item = found->second;
            const auto other = item.session ? none : elsewhere(item);
            const auto server = other != none  ? other
                                : item.session ? item.session->server
                                : item.planned ? item.server
                                               : none;
            if (server != none && (up(server) || !any_up()))
                known.emplace_back(server, id);
            else if (const auto last = last_turn_at(item); last != none)
                queue(id, last);
            else
                ids.push_back(id);
        }
        for (auto it = known.rbegin(); it != known.rend(); ++it) {
            const auto [server, id] = *it;
            auto& item = items_.at(id);
            assign(item, server);
            item.place = Place::queued;
            auto& queue = servers_[server].queue;
            auto at = queue.begin();
            if (!is_judge(server, item))
                while (at != queue.end() && to_be_judged(server, *at)) ++at;
            queue.insert(at, id);
        }
        if (ids.empty()) return parked_until_;
        RadixPlanner planner(options_.planner);
        for (const auto id : ids) planner.add(id, items_.at(id).prompt);
        std::vector<RequestId> order;
        std::vector<ShardItem> costs;
        for (const auto& it : planner.order()) {
            auto& item = items_.at(it.id);
            item.cost = 1 + std::uint64_t(4 * std::max(it.cost(), 0.0));
            item.planned = true;
            order.push_back(it.id);
            costs.push_back({item.cost, it.shared_bytes, it.continues});
        }
        deal(order, costs);
        return parked_until_;
    }

    // None: nobody knows, it is out, or it has much more to do than others.
    std::size_t last_turn_at(const Item& item) const {
        const auto found = talks_.find(item.prompt.conversation);
        if (found == talks_.end()) return none;
        const auto server = found->second;
        if (!up(server) || (kept_from(item) & bit(server))) return none;
        auto least = load(server);
        for (std::size_t i = 0; i < servers_.size(); ++i)
            if (up(i)) least = std::min(least, load(i));
        return load(server) > 2 * least + options_.busier ? none : server;
    }

    void had_a_turn(std::uint64_t conversation, std::size_t server) {
        if (conversation == 0) return;
        if (talks_.insert_or_assign(conversation, server).second)
            last_talks_.push_back(conversation);
        if (last_talks_.size() <= options_.remembered) return;
        talks_.erase(last_talks_.front());
        last_talks_.pop_front();
    }

    // Few that come late go to those with the least to do.
    void deal(const std::vector<RequestId>& order, const std::vector<ShardItem>& costs) {
        std::vector<std::size_t> to;
        for (std::size_t i = 0; i < servers_.size(); ++i)
            if (up(i) || !any_up()) to.push_back(i);
        std::stable_sort(to.begin(), to.end(),
                         [&](std::size_t a, std::size_t b) { return load(a) < load(b); });
        const Shards shards(costs, to.size());
        const Session* last = nullptr; // whose turns stay together
        std::size_t next = 0, at_last = none;
        for (std::size_t i = 0; i < to.size(); ++i) {
            if (shards.begin(i) == shards.end(i)) continue;
            const auto server = to[next++];
            for (auto at = shards.begin(i); at < shards.end(i); ++at) {
                const auto& item = items_.at(order[at]);
                auto where = server;
                if (item.session && item.session == last)
                    where = at_last;
                else if (const auto kept = kept_from(item); kept & bit(server))
                    if (const auto other = best(kept); other != none) where = other;
                last = item.session;
                queue(order[at], at_last = where);
            }
        }
    }

    void queue(RequestId id, std::size_t to) {
        auto& item = items_.at(id);
        assign(item, to);
        item.place = Place::queued;
        if (item.session && item.session->server != to) {
            item.session->server = to;
            item.session->begun = false;
        }
        auto& queue = servers_[to].queue;
        queue.insert(is_judge(to, item) ? queue.begin() : queue.end(), id);
    }

    void assign(Item& item, std::size_t to) {
        if (item.first == none) item.first = item.server = to;
        servers_[item.server].count.taken_over -= item.server != item.first;
        item.server = to;
        servers_[to].count.taken_over += to != item.first;
    }

    // Whether it is asked what it makes of what another one has refused.
    static bool is_judge(std::size_t server, const Item& item) {
        return (item.checking & ~bit(server)) != 0;
    }
    bool to_be_judged(std::size_t server, RequestId id) const {
        const auto found = items_.find(id);
        return found != items_.end() && is_judge(server, found->second);
    }

    // Such go first, and past its planner: who has refused them may wait for it.
    std::optional<Pick> to_judge(std::size_t server) {
        auto& queue = servers_[server].queue;
        if (queue.empty() || kinds_ || !to_be_judged(server, queue.front())) return {};
        Pick pick;
        pick.id = queue.front();
        pick.prompt_bytes = items_.at(pick.id).prompt.bytes();
        pick.why = "refused";
        queue.pop_front();
        return pick;
    }

    void feed(Server& server) {
        while (!server.queue.empty() && server.waiting < window) {
            const auto id = server.queue.front();
            server.queue.pop_front();
            const auto found = items_.find(id);
            if (found != items_.end()) feed(server, id, found->second); // else removed
        }
        if (clients_ && !server.queue.empty() && server.count.sent >= server.fed_all)
            feed_each_client(server);
    }

    void feed(Server& server, RequestId id, Item& item) {
        item.place = Place::fed;
        server.planner->add(id, item.prompt);
        server.fed.push_back(id);
        ++server.waiting;
    }

    // Its planner can give turns only to those of whom it has something: until this is done again
    // nobody needs more.
    void feed_each_client(Server& server) {
        const auto turn = std::max(options_.planner.turn, 1u);
        server.fed_all = server.count.sent + turn;
        std::unordered_map<std::uint32_t, unsigned> fed;
        for (const auto id : server.fed)
            if (const auto it = items_.find(id); it != items_.end())
                ++fed[it->second.prompt.client];
        std::erase_if(server.queue, [&](RequestId id) {
            const auto it = items_.find(id);
            if (it == items_.end()) return true;
            if (it->second.checking || fed[it->second.prompt.client] >= turn) return false;
            ++fed[it->second.prompt.client];
            feed(server, id, it->second);
            return true;
        });
    }

    void take_back(Server& server, RequestId id) {
        server.planner->remove(id);
        std::erase(server.fed, id);
        --server.waiting;
    }

    // The last ones of its run, in their order: `count` of them, or a few more, as conversations
    // are whole. Of those that have begun there none, but with `all`; nor what is kept from
    // `thief`.
    std::vector<RequestId> last_of(Server& server, std::size_t count, bool all,
                                   std::size_t thief = none) {
        std::vector<RequestId> ids;
        std::unordered_set<const Session*> taken;
        const auto wanted = [&](const Item& item) {
            const auto* session = item.session;
            if (thief != none && ((kept_from(item) | item.failed_at) & bit(thief))) return false;
            if (all || !session) return all || ids.size() < count;
            if (session->begun) return false;
            if (!taken.contains(session) && ids.size() >= count) return false;
            taken.insert(session);
            return true;
        };
        const auto more = [&] { return ids.size() < count || !taken.empty(); };
        std::vector<RequestId> kept;
        for (; more() && !server.queue.empty(); server.queue.pop_back()) {
            const auto id = server.queue.back();
            const auto found = items_.find(id);
            if (found != items_.end()) (wanted(found->second) ? ids : kept).push_back(id);
        }
        server.queue.insert(server.queue.end(), kept.rbegin(), kept.rend());
        for (kept.clear(); more() && !server.fed.empty(); server.fed.pop_back()) {
            const auto id = server.fed.back();
            const bool goes = wanted(items_.at(id));
            (goes ? ids : kept).push_back(id);
            if (!goes) continue;
            server.planner->remove(id);
            --server.waiting;
        }
        server.fed.insert(server.fed.end(), kept.rbegin(), kept.rend());
        std::reverse(ids.begin(), ids.end());
        return ids;
    }

    // From the one that has most left. One that is not proven takes one.
    void steal(std::size_t thief, bool half) {
        std::vector<std::size_t> victims;
        for (std::size_t i = 0; i < servers_.size(); ++i) {
            // Its last one it will send itself.
            const auto& it = servers_[i];
            const bool takes = it.open && !held(it) && (it.proven || it.running == 0);
            const std::size_t least = takes ? 1 : 0;
            if (i != thief && own(servers_[i]) > least) victims.push_back(i);
        }
        std::stable_sort(victims.begin(), victims.end(), [this](std::size_t a, std::size_t b) {
            return own(servers_[a]) > own(servers_[b]);
        });
        for (const auto victim : victims) {
            const auto ids = last_of(servers_[victim],
                                     half ? std::max<std::size_t>(own(servers_[victim]) / 2, 1) : 1,
                                     false, thief);
            for (const auto id : ids) queue(id, thief);
            if (!ids.empty()) return;
        }
    }

    // All that waits there goes to the others, in contiguous runs.
    void hand_over(std::size_t from) {
        if (!any_up()) return;
        auto ids = last_of(servers_[from], own(servers_[from]), true);
        std::erase_if(ids, [&](RequestId id) { // what goes on elsewhere goes there
            const auto* session = items_.at(id).session;
            if (!session || session->server == from || session->server == none ||
                !up(session->server))
                return false;
            queue(id, session->server);
            return true;
        });
        // Turns that came later stand apart from those before: a conversation is not cut.
        std::unordered_map<const Session*, std::size_t> first;
        std::vector<std::pair<std::size_t, RequestId>> places;
        for (std::size_t i = 0; i < ids.size(); ++i) {
            const auto* session = items_.at(ids[i]).session;
            places.emplace_back(session ? first.try_emplace(session, i).first->second : i, ids[i]);
        }
        std::stable_sort(places.begin(), places.end(),
                         [](const auto& a, const auto& b) { return a.first < b.first; });
        std::transform(places.begin(), places.end(), ids.begin(),
                       [](const auto& it) { return it.second; });
        std::vector<ShardItem> costs;
        const Session* last = nullptr;
        for (const auto id : ids) {
            const auto& item = items_.at(id);
            costs.push_back({item.cost, 0, item.session && item.session == last});
            last = item.session;
        }
        deal(ids, costs);
    }

    std::optional<Pick> send(Pick pick, std::size_t to, Point now) {
        auto& server = servers_[to];
        auto& item = items_.at(pick.id);
        if (item.place == Place::fed) {
            std::erase(server.fed, pick.id);
            --server.waiting;
        }
        item.place = Place::running;
        item.sent = now;
        if (server.running == 0) server.heard = std::max(server.heard, now);
        server.moved += item.moved;
        if (item.session) {
            item.session->server = to;
            item.session->begun = true;
        }
        had_a_turn(item.prompt.conversation, to);
        --waiting_;
        ++server.running;
        ++server.count.sent;
        pick.server = unsigned(to);
        return pick;
    }

    Options options_;
    std::vector<Server> servers_;
    Items items_;
    std::unordered_map<std::string, Session> sessions_;       // never moves them
    std::deque<std::pair<std::uint64_t, std::string>> quiet_; // of which nothing is here
    std::unordered_map<std::uint64_t, std::size_t> talks_;    // who had the last turn
    std::deque<std::uint64_t> last_talks_;                    // of these, as they began
    std::uint64_t ends_ = 0, looks_ = 0;
    std::vector<RequestId> fresh_;  // not planned
    std::vector<RequestId> parked_; // nor to be, until one that is out is in, or then:
    Point parked_until_ = Point::max();
    std::size_t waiting_ = 0;
    std::optional<unsigned> kind_;
    std::optional<std::uint32_t> client_;
    bool kinds_ = false, clients_ = false; // there are several
    std::deque<Clock::duration> took_;     // the last answers
    Point looked_{};                       // when silent() was asked last
    Point wake_ = Point::max();
    std::string_view holds_;
};

} // namespace evalrt::detail

#endif
