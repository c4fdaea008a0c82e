// ApartPlanner: keeps apart what a server cannot do well beside one another.
#ifndef EVALRT_LIB_APART_PLANNER_HPP
#define EVALRT_LIB_APART_PLANNER_HPP

#include "evalrt/prefix_planner.hpp"

#include <functional>
#include <map>
#include <memory>

namespace evalrt::detail {

/// One planner for each kind of prompt: what runs at one time is all of one kind. A kind goes on
/// until nothing of it waits, or another one has waited for `patience`, or while so many of other
/// clients were sent as make a turn, and four times what runs at once: the wait for the end of what
/// runs costs a fifth of that. Then what runs is waited for.
class ApartPlanner final : public PrefixPlanner {
public:
    using Make = std::function<std::unique_ptr<PrefixPlanner>()>;

    explicit ApartPlanner(Make make, std::chrono::seconds patience = std::chrono::seconds(60),
                          unsigned turn = RadixPlanner::Options().turn)
        : make_(std::move(make)), patience_(patience), turn_(turn) {}

    void add(RequestId id, const Prompt& prompt) override {
        auto& kind = kinds_[prompt.kind];
        if (!kind.planner) kind.planner = make_();
        kind.planner->add(id, prompt);
        ++kind.waiting;
        ++kind.clients[prompt.client];
        requests_[id] = {&kind, prompt.client, false};
    }

    std::optional<Pick> next(Point now) override {
        Kind* other = nullptr; // that has waited longest
        for (auto& [key, kind] : kinds_) {
            if (&kind == current_ || kind.waiting == 0) continue;
            if (kind.since == Point{}) kind.since = now;
            if (!other || kind.since < other->since) other = &kind;
        }
        const bool over = !current_ || current_->waiting == 0 ||
                          (other && (now - other->since >= patience_ ||
                                     other->passed >= std::max<std::size_t>(turn_, 4 * running_)));
        if (over) {
            drains_ = other && running_ > 0;
            if (!other || running_ > 0) return {};
            current_ = other;
            current_->since = {};
            current_->passed = 0;
        }
        if (room_) current_->planner->room(*room_);
        auto pick = current_->planner->next(now);
        if (!pick) return {};
        auto& request = requests_.at(pick->id);
        request.running = true;
        ++running_;
        leave(request);
        for (auto& [key, kind] : kinds_) {
            if (&kind == current_ || kind.waiting == 0) continue;
            kind.passed += kind.clients.size() > 1 || !kind.clients.contains(request.client);
        }
        return pick;
    }

    void progressed(RequestId id, Stage stage, Point now) override {
        const auto it = requests_.find(id);
        if (it == requests_.end() || !it->second.running) return;
        it->second.kind->planner->progressed(id, stage, now);
        if (stage == Stage::first_text) return;
        --running_;
        requests_.erase(it);
    }

    void answered(RequestId id, std::int64_t output_tokens,
                  std::int64_t prompt_tokens = 0) override {
        const auto it = requests_.find(id);
        if (it != requests_.end())
            it->second.kind->planner->answered(id, output_tokens, prompt_tokens);
    }

    void remove(RequestId id) override {
        const auto it = requests_.find(id);
        if (it == requests_.end() || it->second.running) return;
        it->second.kind->planner->remove(id);
        leave(it->second);
        requests_.erase(it);
    }

    void cache_lost() override {
        for (auto& [key, kind] : kinds_) kind.planner->cache_lost();
    }

    void room(unsigned places) override { room_ = places; }

    std::string_view holds() const override {
        if (drains_) return "kinds";
        return current_ ? current_->planner->holds() : std::string_view();
    }

    Point wake() const override { return current_ ? current_->planner->wake() : Point::max(); }

private:
    struct Kind {
        std::unique_ptr<PrefixPlanner> planner;
        std::size_t waiting = 0;
        std::map<std::uint32_t, std::size_t> clients{}; // whose these are
        Point since{};                                  // it is passed over
        std::size_t passed = 0;                         // by requests of others than some of these
    };
    struct Request {
        Kind* kind;
        std::uint32_t client;
        bool running;
    };

    static void leave(const Request& request) {
        auto& kind = *request.kind;
        const auto client = kind.clients.find(request.client);
        if (--client->second == 0) kind.clients.erase(client);
        if (--kind.waiting > 0) return;
        kind.since = {};
        kind.passed = 0;
    }

    Make make_;
    std::chrono::seconds patience_;
    unsigned turn_;
    std::map<unsigned, Kind> kinds_; // never moves them
    std::unordered_map<RequestId, Request> requests_;
    Kind* current_ = nullptr;
    std::optional<unsigned> room_; // as last told
    std::size_t running_ = 0;
    bool drains_ = false; // another kind waits for the end of what runs
};

} // namespace evalrt::detail

#endif
