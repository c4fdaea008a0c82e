// ReplicaPlanner: one suite over several servers that are alike.
#ifndef EVALRT_DETAIL_REPLICAS_HPP
#define EVALRT_DETAIL_REPLICAS_HPP

#include "evalrt/detail/shards.hpp"
#include "evalrt/prefix_planner.hpp"

#include <functional>
#include <memory>

namespace evalrt::detail {

/// Cuts the planned order into contiguous runs, one a server, each of which has a planner of its
/// own for what is about to be sent. A server whose run is done takes the second half of what the
/// slowest one has left. One that cannot be reached twice in a row loses its run to the others, and
/// is tried with one request every few seconds.
class ReplicaPlanner final : public PrefixPlanner {
public:
    struct Options {
        RadixPlanner::Options planner;
        unsigned most = 0; ///< running on one server at once; 0: any number
        std::chrono::milliseconds pause{5000};
    };
    struct Count {
        std::uint64_t sent = 0,
                      stolen = 0; ///< stolen: taken over from others, and not yet given on
    };

    ReplicaPlanner(std::size_t servers, Options options)
        : options_(options), servers_(std::max<std::size_t>(servers, 1)) {
        for (auto& it : servers_) it.planner = make();
    }

    void add(RequestId id, const Prompt& prompt) override {
        auto& item = items_[id];
        item.prompt = prompt;
        item.place = Place::fresh;
        fresh_.push_back(id);
        ++waiting_;
    }

    std::optional<Pick> next(Point now) override {
        place_fresh();
        wake_ = Point::max();
        if (waiting_ == 0) return {};
        std::vector<std::size_t> order; // those with the fewest running first
        for (std::size_t i = 0; i < servers_.size(); ++i) order.push_back(i);
        std::stable_sort(order.begin(), order.end(), [this](std::size_t a, std::size_t b) {
            return servers_[a].running < servers_[b].running;
        });
        for (const auto i : order) {
            auto& server = servers_[i];
            if (options_.most > 0 && server.running >= options_.most) continue;
            if (server.failures >= too_many && any_up()) {
                // One at a time, to see whether it is back.
                const auto until = server.since == Point{} ? now : server.since + options_.pause;
                if (server.since == Point{}) server.since = now;
                if (server.running > 0 || now < until || server.since == now) {
                    wake_ = std::min(wake_, server.since + options_.pause);
                    continue;
                }
                server.since = now;
            }
            if (own(server) == 0) steal(i, server.failures < too_many);
            feed(server);
            if (auto pick = server.planner->next(now)) return send(*pick, i);
            wake_ = std::min(wake_, server.planner->wake());
        }
        return {};
    }

    void progressed(RequestId id, Stage stage, Point now) override {
        const auto it = items_.find(id);
        if (it == items_.end() || it->second.place != Place::running) return;
        auto& server = servers_[it->second.server];
        server.planner->progressed(id, stage, now);
        if (stage == Stage::first_text) return;
        --server.running;
        it->second.place = Place::nowhere; // may be added again
        if (stage == Stage::done) items_.erase(it);
    }

    void answered(RequestId id, std::int64_t output_tokens) override {
        const auto it = items_.find(id);
        if (it != items_.end() && it->second.place == Place::running)
            servers_[it->second.server].planner->answered(id, output_tokens);
    }

    void remove(RequestId id) override {
        const auto it = items_.find(id);
        if (it == items_.end()) return;
        auto& item = it->second;
        if (item.place == Place::running) return;
        if (item.place == Place::fed) take_back(servers_[item.server], id);
        if (item.place != Place::nowhere) --waiting_;
        items_.erase(it);
    }

    void cache_lost() override {
        for (auto& it : servers_) it.planner->cache_lost();
    }

    Point wake() const override { return wake_; }
    std::string_view holds() const override { return servers_.front().planner->holds(); }

    /// It has answered something, whatever that was.
    void alive(std::size_t server) {
        servers_[server].failures = 0;
        servers_[server].since = Point{};
    }

    /// A connection to it could not be made, or broke.
    void unreachable(std::size_t server) {
        auto& it = servers_[server];
        if (++it.failures != too_many) return;
        it.planner->cache_lost();
        hand_over(server);
    }

    bool up(std::size_t server) const { return servers_[server].failures < too_many; }
    std::size_t size() const { return servers_.size(); }
    const Count& count(std::size_t server) const { return servers_[server].count; }
    unsigned running(std::size_t server) const { return servers_[server].running; }

private:
    static constexpr unsigned too_many = 2;
    static constexpr std::size_t window = 512; // in a server's planner at once

    enum class Place { nowhere, fresh, queued, fed, running };
    struct Item {
        Prompt prompt;
        std::size_t server = 0;
        Place place = Place::nowhere;
        bool planned = false; // it has been in an order: a failed one goes where it was
        std::uint64_t cost = 1;
    };
    struct Server {
        std::unique_ptr<PrefixPlanner> planner;
        std::deque<RequestId> queue; // planned, not in the planner yet
        std::deque<RequestId> fed;   // in it, in the order of the plan; some may have gone
        std::size_t waiting = 0;     // in the planner
        unsigned running = 0, failures = 0;
        Point since{}; // of the last try while it is down
        Count count;
    };

    std::unique_ptr<PrefixPlanner> make() const {
        return std::make_unique<RadixPlanner>(options_.planner);
    }

    static std::size_t own(const Server& it) { return it.queue.size() + it.waiting; }

    bool any_up() const {
        return std::any_of(servers_.begin(), servers_.end(),
                           [](const Server& it) { return it.failures < too_many; });
    }

    // What has come since: in order, cut, to those that are there.
    void place_fresh() {
        if (fresh_.empty()) return;
        std::vector<RequestId> ids;
        for (const auto id : std::exchange(fresh_, {})) {
            const auto found = items_.find(id);
            if (found == items_.end()) continue; // removed
            auto& item = found->second;
            if (item.planned && servers_[item.server].failures < too_many)
                queue_front(item.server, id);
            else
                ids.push_back(id);
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

    void deal(const std::vector<RequestId>& order, const std::vector<ShardItem>& costs) {
        std::vector<std::size_t> up;
        for (std::size_t i = 0; i < servers_.size(); ++i)
            if (servers_[i].failures < too_many || !any_up()) up.push_back(i);
        const Shards shards(costs, up.size());
        for (std::size_t i = 0; i < up.size(); ++i)
            for (auto at = shards.begin(i); at < shards.end(i); ++at) {
                auto& item = items_.at(order[at]);
                item.server = up[i];
                item.place = Place::queued;
                servers_[up[i]].queue.push_back(order[at]);
            }
    }

    void queue_front(std::size_t server, RequestId id) {
        items_.at(id).place = Place::queued;
        servers_[server].queue.push_front(id);
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

    // The last ones of its run, in their order.
    std::vector<RequestId> last_of(Server& server, std::size_t count) {
        std::vector<RequestId> ids;
        while (ids.size() < count && !server.queue.empty()) {
            if (items_.contains(server.queue.back())) ids.push_back(server.queue.back());
            server.queue.pop_back();
        }
        while (ids.size() < count && !server.fed.empty()) {
            const auto id = server.fed.back();
            server.planner->remove(id);
            server.fed.pop_back();
            --server.waiting;
            ids.push_back(id);
        }
        std::reverse(ids.begin(), ids.end());
        return ids;
    }

    // One that is only tried takes one.
    void steal(std::size_t thief, bool half) {
        std::size_t victim = thief, most = 1; // a single one is the victim's own
        for (std::size_t i = 0; i < servers_.size(); ++i)
            if (i != thief && own(servers_[i]) > most) {
                victim = i;
                most = own(servers_[i]);
            }
        if (victim == thief) return;
        for (const auto id : last_of(servers_[victim], half ? most / 2 : 1)) give(id, thief);
    }

    void give(RequestId id, std::size_t to) {
        auto& item = items_.at(id);
        item.server = to;
        item.place = Place::queued;
        servers_[to].queue.push_back(id);
        ++servers_[to].count.stolen;
    }

    // All that waits there goes to the others, in contiguous runs.
    void hand_over(std::size_t from) {
        if (!any_up()) return;
        const auto ids = last_of(servers_[from], own(servers_[from]));
        std::vector<ShardItem> costs;
        for (const auto id : ids) costs.push_back({items_.at(id).cost, 0});
        deal(ids, costs);
        for (const auto id : ids) ++servers_[items_.at(id).server].count.stolen;
    }

    std::optional<Pick> send(Pick pick, std::size_t to) {
        auto& server = servers_[to];
        auto& item = items_.at(pick.id);
        item.place = Place::running;
        item.server = to;
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
    std::unordered_map<RequestId, Item> items_;
    std::vector<RequestId> fresh_; // not planned
    std::size_t waiting_ = 0;
    Point wake_ = Point::max();
};

} // namespace evalrt::detail

#endif
