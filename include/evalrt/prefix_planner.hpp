// PrefixPlanner: which of the waiting requests goes next.
#ifndef EVALRT_PREFIX_PLANNER_HPP
#define EVALRT_PREFIX_PLANNER_HPP

#include "evalrt/backend_row.hpp"
#include "evalrt/request.hpp"

#include <cstring>
#include <deque>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace evalrt {

using RequestId = std::uint64_t; // never 0

/// What a planner is told of a request. The views are only read during the call.
struct Prompt {
    std::string domain; ///< prefixes are shared only inside one: endpoint, model
    std::vector<std::string_view> segments;    ///< in the order in which the template renders them
    std::optional<std::int64_t> output_tokens; ///< predicted, or the most there can be

    std::size_t bytes() const {
        std::size_t sum = 0;
        for (const auto segment : segments) sum += segment.size();
        return sum;
    }
};

/// The next request to send.
struct Pick {
    RequestId id = 0;
    std::size_t prompt_bytes = 0;
    std::optional<std::size_t> expected_bytes; ///< of its prompt that the server's cache can show
    std::optional<std::size_t> maximum_bytes;  ///< that any cache could, however large
};

/// Names the next request. It may hold requests back while a leader fills the server's cache with
/// what they share, under one law: while nothing runs and something waits, next() names one.
/// The same calls in the same order give the same answers. No clock, no executor: time is passed
/// in and never goes backwards.
class PrefixPlanner {
public:
    enum class Stage {
        first_text, ///< its first token is there
        done,       ///< it has ended, and the server has had time to store its prefix
        failed,     ///< it has ended otherwise; it may be added again
    };
    using Point = Clock::time_point;

    virtual ~PrefixPlanner() = default;

    virtual void add(RequestId id, const Prompt& prompt) = 0;

    /// The named request is taken for sent: it runs until progressed(id, done or failed).
    virtual std::optional<Pick> next(Point now) = 0;

    virtual void progressed(RequestId id, Stage stage, Point now) = 0;

    /// A request that waits is given up. One that does not wait is left alone.
    virtual void remove(RequestId id) = 0;

    /// The server has started anew: its cache is empty.
    virtual void cache_lost() {}

    /// When next() may name another without anything having happened.
    virtual Point wake() const { return Point::max(); }
};

/// In the order of arrival: the baseline of every claim.
class FifoPlanner final : public PrefixPlanner {
public:
    void add(RequestId id, const Prompt& prompt) override {
        queue_.push_back({id, prompt.bytes()});
    }

    std::optional<Pick> next(Point) override {
        if (queue_.empty()) return {};
        Pick pick;
        pick.id = queue_.front().first;
        pick.prompt_bytes = queue_.front().second;
        queue_.pop_front();
        return pick;
    }

    void progressed(RequestId, Stage, Point) override {}

    void remove(RequestId id) override {
        std::erase_if(queue_, [&](const auto& it) { return it.first == id; });
    }

private:
    std::deque<std::pair<RequestId, std::size_t>> queue_;
};

/// Depth first over the radix tree of all prompts, so that what shares a prefix goes out together
/// (optimal for any cache that holds at least one request: Theorem 3.1 of the SGLang paper, arXiv
/// 2312.07104), and what continues a prompt that was sent before anything that shares less; one
/// leader for each shared prefix until the server shows it to the others.
class RadixPlanner final : public PrefixPlanner {
public:
    struct Options {
        Release release = Release::first_text;
        std::size_t shared_bytes = 256;    ///< a shared prefix below this is not worth waiting for
        bool match_length = false;         ///< long prompts first, so that neighbours are alike
        unsigned leaders = 0;              ///< shared prefixes being filled at once; 0: any number
        std::chrono::seconds patience{60}; ///< nobody waits longer for one leader, or its place
    };

    RadixPlanner() : RadixPlanner(Options()) {}
    explicit RadixPlanner(Options options) : options_(options) { nodes_.emplace_back(); }

    void add(RequestId id, const Prompt& prompt) override {
        Node* node = insert(blocks(prompt), prompt.bytes());
        Entry& entry = entries_[id];
        entry = {node, prompt.bytes(), prompt.output_tokens.value_or(0), ++arrivals_};
        const auto rank = options_.match_length ? std::int64_t(entry.bytes) : entry.output;
        node->own.insert({-rank, entry.arrival, id});
        for (Node* it = node; it; it = it->parent)
            change(*it, [&](Node& changed) {
                ++changed.waiting;
                changed.rank = std::max(changed.rank, rank);
                changed.arrival = std::min(changed.arrival, entry.arrival);
            });
    }

    std::optional<Pick> next(Point now) override {
        wake_ = Point::max();
        passed_ = 0;
        if (root().waiting == 0) return {};
        Node* node = find(root(), now, false);
        if (!node && running_ == 0) node = find(root(), now, true);
        if (!node) return {};
        const RequestId id = std::get<2>(*node->own.begin());
        return send(id, *node, now);
    }

    void progressed(RequestId id, Stage stage, Point) override {
        const auto it = entries_.find(id);
        if (it == entries_.end() || !it->second.running) return;
        const bool ended = stage != Stage::first_text;
        const bool visible = stage == Stage::done ||
                             (stage == Stage::first_text && options_.release != Release::done);
        for (Node* node = it->second.node; node; node = node->parent) {
            if (node->leader == id && (ended || visible)) node->leader = 0;
            if (visible) node->warm = true;
        }
        if (ended || visible) leading_.erase({it->second.sent, id});
        if (!ended) return;
        --running_;
        entries_.erase(it);
    }

    void remove(RequestId id) override {
        const auto it = entries_.find(id);
        if (it == entries_.end() || it->second.running) return;
        take(id, it->second, false);
        entries_.erase(it);
    }

    void cache_lost() override {
        for (auto& node : nodes_) node.warm = false;
    }

    Point wake() const override { return wake_; }

private:
    // Prompts are compared by blocks of this many bytes, some 16 tokens.
    static constexpr std::size_t block = 64;

    // Groups that may not begin yet and are passed by in search of something else; more change
    // little and cost time.
    static constexpr unsigned look_ahead = 256;

    // A block's name: a hash of all bytes from the prompt's begin to the block's end.
    using Block = std::uint64_t;

    struct Node;
    struct Before {
        bool operator()(const Node* a, const Node* b) const {
            if (a->sent != b->sent) return a->sent;
            return a->rank != b->rank ? a->rank > b->rank : a->arrival < b->arrival;
        }
    };

    struct Node {
        Node* parent = nullptr;
        std::vector<Block> edge;
        std::size_t bytes = 0;            // of a prompt, from its begin to the end of the edge
        std::set<Node*, Before> children; // those with something waiting below
        std::set<std::tuple<std::int64_t, std::uint64_t, RequestId>> own;  // waiting, ending here
        std::size_t waiting = 0;                                           // here and below
        std::int64_t rank = std::numeric_limits<std::int64_t>::min();      // the highest ever below
        std::uint64_t arrival = std::numeric_limits<std::uint64_t>::max(); // the first ever
        RequestId leader = 0; // who is filling the cache with it
        Point since{};        // of the leader's sending
        bool warm = false;    // the server shows it
        bool sent = false;    // some request through here was sent
    };

    struct Entry {
        Node* node;
        std::size_t bytes;
        std::int64_t output;
        std::uint64_t arrival;
        bool running = false;
        Point sent{};
    };

    Node& root() { return nodes_.front(); }

    static Block mix(Block h) { // the finaliser of MurmurHash3
        h ^= h >> 33;
        h *= 0xff51afd7ed558ccdu;
        h ^= h >> 33;
        h *= 0xc4ceb9fe1a85ec53u;
        return h ^ (h >> 33);
    }

    // Eight bytes at a time: most of what it costs to submit a request.
    static Block hash(std::string_view text) {
        Block h = text.size();
        const auto add = [&h](Block word) {
            h = (h ^ word) * 0x9e3779b97f4a7c15u;
            h ^= h >> 32;
        };
        Block word;
        for (; text.size() >= sizeof word; text.remove_prefix(sizeof word)) {
            std::memcpy(&word, text.data(), sizeof word);
            add(word);
        }
        if (!text.empty()) {
            word = 0;
            std::memcpy(&word, text.data(), text.size());
            add(word);
        }
        return h;
    }

    static std::vector<Block> blocks(const Prompt& prompt) {
        std::vector<Block> list;
        list.reserve(prompt.bytes() / block + 2);
        Block chain = mix(hash(prompt.domain) + 1);
        list.push_back(chain); // the domain is a block of its own
        std::string rest;      // of the segments before, less than a block
        for (auto segment : prompt.segments) {
            if (!rest.empty()) {
                const auto part = segment.substr(0, block - rest.size());
                rest.append(part);
                segment.remove_prefix(part.size());
                if (rest.size() < block) continue;
                list.push_back(chain = mix(chain ^ mix(hash(rest))));
                rest.clear();
            }
            for (; segment.size() >= block; segment.remove_prefix(block))
                list.push_back(chain = mix(chain ^ mix(hash(segment.substr(0, block)))));
            rest = segment;
        }
        // The end is a block too: a prompt and its continuation are two nodes.
        list.push_back(mix(chain ^ mix(hash(rest)) ^ 0x9e3779b97f4a7c15u));
        return list;
    }

    Node* insert(const std::vector<Block>& path, std::size_t bytes) {
        Node* node = &root();
        std::size_t i = 0;
        while (i < path.size()) {
            const auto found = by_first_.find(path[i]);
            if (found == by_first_.end())
                return child(*node, {path.begin() + long(i), path.end()}, bytes);
            Node* next = found->second;
            std::size_t same = 1;
            while (same < next->edge.size() && i + same < path.size() &&
                   next->edge[same] == path[i + same])
                ++same;
            if (same < next->edge.size()) next = split(*next, same);
            node = next;
            i += same;
        }
        return node;
    }

    Node* child(Node& parent, std::vector<Block> edge, std::size_t bytes) {
        Node& node = nodes_.emplace_back();
        node.parent = &parent;
        node.bytes = bytes;
        by_first_[edge.front()] = &node;
        node.edge = std::move(edge);
        return &node;
    }

    // Cuts the edge to `lower` in two; the new node above has all that is true of the whole.
    Node* split(Node& lower, std::size_t at) {
        Node& parent = *lower.parent;
        const bool listed = parent.children.erase(&lower) > 0;
        // The first block of all is the domain's, which is no part of the prompt.
        Node* upper = child(parent, {lower.edge.begin(), lower.edge.begin() + long(at)},
                            parent.bytes + (parent.parent ? at : at - 1) * block);
        lower.edge.erase(lower.edge.begin(), lower.edge.begin() + long(at));
        by_first_[lower.edge.front()] = &lower;
        lower.parent = upper;
        upper->waiting = lower.waiting;
        upper->rank = lower.rank;
        upper->arrival = lower.arrival;
        upper->warm = lower.warm;
        upper->sent = lower.sent;
        upper->leader = lower.leader; // who fills the longer prefix fills this one
        upper->since = lower.since;
        if (listed) {
            parent.children.insert(upper);
            upper->children.insert(&lower);
        }
        return upper;
    }

    // Changes what the node's place among its siblings depends on.
    template <class F>
    void change(Node& node, F how) {
        Node* parent = node.parent;
        if (parent && node.waiting > 0) parent->children.erase(&node);
        how(node);
        if (parent && node.waiting > 0) parent->children.insert(&node);
    }

    void take(RequestId id, const Entry& entry, bool sent) {
        const auto rank = options_.match_length ? std::int64_t(entry.bytes) : entry.output;
        entry.node->own.erase({-rank, entry.arrival, id});
        for (Node* it = entry.node; it; it = it->parent)
            change(*it, [&](Node& changed) {
                --changed.waiting;
                changed.sent |= sent;
            });
    }

    // The first node in depth-first order with a request that may go.
    Node* find(Node& node, Point now, bool any) {
        if (node.waiting == 0) return nullptr;
        if (const auto until = held(node); !any && now < until) {
            wake_ = std::min(wake_, until);
            passed_ += !node.leader;
            return nullptr;
        }
        if (!node.own.empty()) return &node;
        for (Node* it : node.children) {
            if (Node* found = find(*it, now, any)) return found;
            if (passed_ == look_ahead) break;
        }
        return nullptr;
    }

    // Until when what waits below is held back, if nothing happens before.
    Point held(const Node& node) const {
        if (node.leader && worth_sharing(node)) return node.since + options_.patience;
        const auto places = options_.leaders;
        if (places > 0 && leading_.size() >= places && begins(node))
            return std::prev(leading_.end(), places)->first + options_.patience;
        return Point::min();
    }

    // Long, and not in the server's cache.
    bool worth_sharing(const Node& node) const {
        if (options_.release == Release::at_once || node.warm) return false;
        const Node* above = node.parent;
        while (above && above->parent && !above->warm) above = above->parent;
        const auto bytes = node.bytes - (above ? above->bytes : 0);
        return bytes > 0 && bytes / block >= options_.shared_bytes / block;
    }

    // A request through here would make the others below wait for it.
    bool begins(const Node& node) const {
        return !node.leader && node.waiting > 1 && worth_sharing(node);
    }

    std::optional<Pick> send(RequestId id, Node& leaf, Point now) {
        Entry& entry = entries_.at(id);
        Pick pick{id, entry.bytes, 0, 0};
        for (Node* it = &leaf; it && it->parent; it = it->parent)
            if (it->sent) {
                pick.maximum_bytes = std::min(it->bytes + block - 1, entry.bytes);
                break;
            }
        for (Node* it = &leaf; it; it = it->parent)
            if (it->warm) {
                pick.expected_bytes = it->bytes;
                break;
            }
        bool leads = false; // others wait for what it fills the cache with
        for (Node* it = &leaf; it; it = it->parent) leads |= begins(*it);
        if (leads) leading_.emplace(now, id);
        for (Node* it = &leaf; it; it = it->parent) {
            if (options_.release == Release::at_once) it->warm = true;
            if (it->warm || it->leader) continue;
            it->leader = id;
            it->since = now;
        }
        take(id, entry, true);
        entry.running = true;
        entry.sent = now;
        ++running_;
        return pick;
    }

    Options options_;
    std::deque<Node> nodes_;                    // never moves them; the first is the root
    std::unordered_map<Block, Node*> by_first_; // by the first block of the edge
    std::unordered_map<RequestId, Entry> entries_;
    std::uint64_t arrivals_ = 0;
    std::size_t running_ = 0;
    std::set<std::pair<Point, RequestId>> leading_; // who fills a shared prefix, since when
    Point wake_ = Point::max();
    unsigned passed_ = 0; // by the last next()
};

} // namespace evalrt

#endif
