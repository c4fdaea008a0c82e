// ReplicaPlanner: one suite over several servers that are alike.
#ifndef EVALRT_DETAIL_REPLICAS_HPP
#define EVALRT_DETAIL_REPLICAS_HPP

#include "evalrt/detail/shards.hpp"
#include "evalrt/prefix_planner.hpp"

#include <functional>
#include <memory>
#include <unordered_set>

namespace evalrt::detail {

/// Cuts the planned order into contiguous runs, one a server, each of which has a planner of its
/// own for what is about to be sent. A server whose run is done takes the second half of what the
/// slowest one has left. A conversation that has begun on a server stays there, later turns too, as
/// long as that is in.
///
/// A server is out (nothing is sent to it; somebody looks at it when it is due(), and lets it in),
/// in but not proven (it has answered nothing since: one request at a time), or proven. One goes
/// out that cannot be reached twice in a row, or only fails while another is in; its run goes to
/// the others. While all are out they are named as if they were in, and who sends refuses: so it is
/// found out that no server is there.
class ReplicaPlanner final : public PrefixPlanner {
public:
    using Make = std::function<std::unique_ptr<PrefixPlanner>()>;
    struct Options {
        RadixPlanner::Options planner; ///< of the whole order
        Make make{};                   ///< a server's; none: a RadixPlanner with these options
        /// From going out to being looked at; doubled each time that it goes out unproven.
        std::chrono::milliseconds pause{5000}, longest_pause{60000};
        std::size_t remembered = 4096; ///< conversations of which nothing waits or runs
    };
    struct Count {
        std::uint64_t sent = 0,
                      stolen = 0; ///< stolen: taken over from others, and not yet given on
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
        if (fresh && !prompt.session.empty()) {
            item.session = &sessions_[prompt.session];
            ++item.session->live;
        }
        fresh_.push_back(id);
        ++waiting_;
    }

    std::optional<Pick> next(Point now) override {
        place_fresh();
        wake_ = Point::max();
        holds_ = {};
        if (waiting_ == 0) return {};
        std::vector<std::size_t> order; // those with the fewest running first
        for (std::size_t i = 0; i < servers_.size(); ++i) order.push_back(i);
        std::stable_sort(order.begin(), order.end(), [this](std::size_t a, std::size_t b) {
            return servers_[a].running < servers_[b].running;
        });
        for (const auto i : order) {
            auto& server = servers_[i];
            if (!server.open) continue;
            if (server.out ? any_up() : !server.proven && server.running > 0) continue;
            if (own(server) == 0) steal(i, server.proven);
            feed(server);
            if (auto pick = server.planner->next(now)) return send(*pick, i);
            wake_ = std::min(wake_, server.planner->wake());
            if (holds_.empty()) holds_ = server.planner->holds();
        }
        return {};
    }

    void progressed(RequestId id, Stage stage, Point now) override {
        const auto it = items_.find(id);
        if (it == items_.end() || it->second.place != Place::running) return;
        auto& server = servers_[it->second.server];
        server.planner->progressed(id, stage, now);
        if (stage == Stage::first_text) return prove(server);
        if (stage == Stage::failed) it->second.failed_at |= bit(it->second.server);
        --server.running;
        it->second.place = Place::nowhere; // may be added again
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

    /// It has answered a request.
    void alive(std::size_t server) {
        auto& it = servers_[server];
        if (it.barred) return;
        enter(server);
        prove(it);
        it.pause = options_.pause;
    }

    /// It has said something that is no answer: that it is busy.
    void reached(std::size_t server) { servers_[server].broken = 0; }

    /// A connection to it could not be made, or broke. True: with that it has gone out.
    bool unreachable(std::size_t server) {
        auto& it = servers_[server];
        if (++it.broken < too_many || it.out) return false;
        leave_out(server);
        return true;
    }

    /// What a failure may be the fault of.
    enum class Fault {
        item,    ///< its body, its length; or nobody can tell
        passing, ///< of the server, now: 5xx, what is no answer
        server,  ///< of the server, and lasting: the key, the quota, a model that it has not
    };
    struct Verdict {
        bool elsewhere = false; ///< it is not held against the item: another server is asked
        bool out = false;       ///< with that the server has gone out
    };

    /// It has answered with a failure that is not for its load. While it is the only one that is in
    /// that is as with one server.
    Verdict failed(std::size_t server, Fault fault) {
        auto& it = servers_[server];
        it.broken = 0;
        if (it.proven && fault == Fault::item) return {};
        ++it.failed;
        Verdict verdict;
        if (!another_up(server)) return verdict;
        verdict.elsewhere = !it.proven || fault == Fault::server;
        verdict.out = !it.out && it.failed >= (verdict.elsewhere ? few : many);
        if (verdict.out) leave_out(server);
        return verdict;
    }

    /// Nothing is sent to it until it is let in.
    void leave_out(std::size_t server) {
        auto& it = servers_[server];
        it.out = true;
        it.since = Point{};
        it.look_after = it.pause;
        it.pause = std::min(2 * it.pause, options_.longest_pause);
        it.planner->cache_lost();
        hand_over(server);
    }

    /// It is not the server that it was: no answer that still comes lets it in.
    void bar(std::size_t server) { servers_[server].barred = true; }

    /// It was looked at, and is well. It proves itself with its first answer.
    void let_in(std::size_t server) {
        servers_[server].proven = servers_[server].barred = false;
        enter(server);
    }

    /// Those that are out and to be looked at now.
    std::vector<std::size_t> due(Point now) {
        std::vector<std::size_t> list;
        for (std::size_t i = 0; i < servers_.size(); ++i) {
            auto& it = servers_[i];
            if (!it.out) continue;
            if (it.since == Point{}) it.since = now;
            if (now - it.since < it.look_after) continue;
            it.since = now;
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
    static constexpr unsigned too_many = 2;      // broken connections
    static constexpr unsigned few = 3, many = 8; // failures with no answer between
    static constexpr std::size_t window = 512;   // in a server's planner at once
    static constexpr std::size_t none = ~std::size_t(0);

    enum class Place { nowhere, fresh, queued, fed, running };
    struct Session {
        std::size_t server = none;
        std::size_t live = 0;    // of its turns, those that are here
        bool begun = false;      // its server has had a turn of it
        std::uint64_t ended = 0; // when the last one left
    };
    struct Item {
        Prompt prompt;
        Session* session = nullptr;
        std::size_t server = 0;
        Place place = Place::nowhere;
        bool planned = false;        // it has been in an order: a failed one goes where it was
        std::uint64_t failed_at = 0; // a bit a server
        std::uint64_t cost = 1;
    };
    using Items = std::unordered_map<RequestId, Item>;
    struct Server {
        std::unique_ptr<PrefixPlanner> planner;
        std::deque<RequestId> queue; // planned, not in the planner yet
        std::deque<RequestId> fed;   // in it, in the order of the plan; some may have gone
        std::size_t waiting = 0;     // in the planner
        unsigned running = 0, broken = 0, failed = 0;
        bool open = true, out = false, proven = true, barred = false;
        std::chrono::milliseconds pause{}, look_after{};
        Point since{}; // of the last look while it is out
        Count count;
    };

    static std::size_t own(const Server& it) { return it.queue.size() + it.waiting; }

    bool any_up() const {
        return std::any_of(servers_.begin(), servers_.end(),
                           [](const Server& it) { return !it.out; });
    }
    bool another_up(std::size_t than) const {
        for (std::size_t i = 0; i < servers_.size(); ++i)
            if (i != than && up(i)) return true;
        return false;
    }

    static void prove(Server& it) {
        it.proven = true;
        it.failed = it.broken = 0;
    }

    void enter(std::size_t server) {
        const bool first = !any_up(); // what the others kept for want of another server goes to it
        servers_[server].out = false;
        servers_[server].failed = servers_[server].broken = 0;
        for (std::size_t i = 0; first && i < servers_.size(); ++i)
            if (i != server) hand_over(i);
    }

    static std::uint64_t bit(std::size_t server) {
        return server < 64 ? std::uint64_t(1) << server : 0;
    }

    // For one that has failed: where it has not yet, with the least to do; none: nowhere else. A
    // conversation stays.
    std::size_t elsewhere(const Item& item) const {
        if (item.failed_at == 0 || item.session) return none;
        const auto load = [this](std::size_t i) {
            const auto& it = servers_[i];
            return std::pair(!it.proven, own(it) + it.running);
        };
        std::size_t best = none;
        for (std::size_t i = 0; i < servers_.size(); ++i)
            if (up(i) && !(item.failed_at & bit(i)) && (best == none || load(i) < load(best)))
                best = i;
        return best;
    }

    void forget(Items::iterator it) {
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
    // to those that are there.
    void place_fresh() {
        if (fresh_.empty()) return;
        std::vector<RequestId> ids;
        std::vector<std::pair<std::size_t, RequestId>> known;
        for (const auto id : std::exchange(fresh_, {})) {
            const auto found = items_.find(id);
            if (found == items_.end()) continue; // removed
            const auto& item = found->second;
            const auto other = elsewhere(item);
            const auto server = other != none  ? other
                                : item.session ? item.session->server
                                : item.planned ? item.server
                                               : none;
            if (server != none && (up(server) || !any_up()))
                known.emplace_back(server, id);
            else
                ids.push_back(id);
        }
        for (auto it = known.rbegin(); it != known.rend(); ++it) {
            auto& item = items_.at(it->second);
            item.server = it->first;
            item.place = Place::queued;
            servers_[it->first].queue.push_front(it->second);
        }
        if (ids.empty()) return;
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
    }

    // Few that come late go to those with the least to do.
    void deal(const std::vector<RequestId>& order, const std::vector<ShardItem>& costs) {
        std::vector<std::size_t> to;
        for (std::size_t i = 0; i < servers_.size(); ++i)
            if (up(i) || !any_up()) to.push_back(i);
        const auto load = [this](std::size_t i) { return own(servers_[i]) + servers_[i].running; };
        std::stable_sort(to.begin(), to.end(),
                         [&](std::size_t a, std::size_t b) { return load(a) < load(b); });
        const Shards shards(costs, to.size());
        std::size_t next = 0;
        for (std::size_t i = 0; i < to.size(); ++i) {
            if (shards.begin(i) == shards.end(i)) continue;
            const auto server = to[next++];
            for (auto at = shards.begin(i); at < shards.end(i); ++at) queue(order[at], server);
        }
    }

    void queue(RequestId id, std::size_t to) {
        auto& item = items_.at(id);
        item.server = to;
        item.place = Place::queued;
        if (item.session && item.session->server != to) {
            item.session->server = to;
            item.session->begun = false;
        }
        servers_[to].queue.push_back(id);
    }

    void feed(Server& server) {
        while (!server.queue.empty() && server.waiting < window) {
            const auto id = server.queue.front();
            server.queue.pop_front();
            const auto found = items_.find(id);
            if (found == items_.end()) continue; // removed
            auto& item = found->second;
            item.place = Place::fed;
            server.planner->add(id, item.prompt);
            server.fed.push_back(id);
            ++server.waiting;
        }
    }

    void take_back(Server& server, RequestId id) {
        server.planner->remove(id);
        std::erase(server.fed, id);
        --server.waiting;
    }

    // The last ones of its run, in their order: `count` of them, or a few more, as conversations
    // are whole. Of those that have begun there none, but with `all`.
    std::vector<RequestId> last_of(Server& server, std::size_t count, bool all) {
        std::vector<RequestId> ids;
        std::unordered_set<const Session*> taken;
        const auto wanted = [&](const Item& item) {
            const auto* session = item.session;
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
            const bool takes = it.open && (it.proven || it.running == 0);
            const std::size_t least = takes ? 1 : 0;
            if (i != thief && own(servers_[i]) > least) victims.push_back(i);
        }
        std::stable_sort(victims.begin(), victims.end(), [this](std::size_t a, std::size_t b) {
            return own(servers_[a]) > own(servers_[b]);
        });
        for (const auto victim : victims) {
            const auto ids =
                last_of(servers_[victim],
                        half ? std::max<std::size_t>(own(servers_[victim]) / 2, 1) : 1, false);
            for (const auto id : ids) queue(id, thief);
            servers_[thief].count.stolen += ids.size();
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
            ++servers_[session->server].count.stolen;
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
        for (const auto id : ids) ++servers_[items_.at(id).server].count.stolen;
    }

    std::optional<Pick> send(Pick pick, std::size_t to) {
        auto& server = servers_[to];
        auto& item = items_.at(pick.id);
        item.place = Place::running;
        item.server = to;
        if (item.session) {
            item.session->server = to;
            item.session->begun = true;
        }
        std::erase(server.fed, pick.id);
        --server.waiting;
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
    std::uint64_t ends_ = 0;
    std::vector<RequestId> fresh_; // not planned
    std::size_t waiting_ = 0;
    Point wake_ = Point::max();
    std::string_view holds_;
};

} // namespace evalrt::detail

#endif
