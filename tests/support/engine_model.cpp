#include "support/engine_model.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <deque>
#include <list>
#include <map>
#include <set>
#include <stdexcept>
#include <unordered_map>

namespace evalrt::test {
namespace {

std::size_t common(std::span<const std::uint32_t> a, std::span<const std::uint32_t> b) {
    const auto n = std::min(a.size(), b.size());
    return std::size_t(std::mismatch(a.begin(), a.begin() + long(n), b.begin()).first - a.begin());
}

/// The radix tree of what is cached, in whole pages; the leaf that was used the longest ago goes
/// first. What is locked stays.
class PrefixTree {
public:
    struct Node {
        Node* parent = nullptr;
        Tokens edge;
        std::unordered_map<std::uint64_t, std::unique_ptr<Node>> children; // by the first page
        unsigned locks = 0;
        std::uint64_t used = 0;
        bool listed = false;
    };

    explicit PrefixTree(std::size_t page) : page_(page) { root_.locks = 1; }

    std::size_t size() const { return size_; }

    /// The longest cached prefix, and the node where it ends.
    std::pair<std::size_t, Node*> match(std::span<const std::uint32_t> tokens) {
        ++clock_;
        Node* node = &root_;
        std::size_t at = 0;
        while (at + page_ <= tokens.size()) {
            const auto found = node->children.find(key(tokens.subspan(at)));
            if (found == node->children.end()) break;
            Node* child = found->second.get();
            auto same = common(child->edge, tokens.subspan(at));
            same -= same % page_;
            if (same == 0) break;
            if (same < child->edge.size()) child = split(*child, same);
            touch(*child);
            at += same;
            node = child;
        }
        return {at, node};
    }

    /// Whole pages only. The node at their end, and how many tokens are new.
    std::pair<Node*, std::size_t> insert(std::span<const std::uint32_t> tokens) {
        tokens = tokens.first(tokens.size() - tokens.size() % page_);
        auto [at, node] = match(tokens);
        const auto added = tokens.size() - at;
        if (added == 0) return {node, 0};
        auto child = std::make_unique<Node>();
        child->parent = node;
        child->edge.assign(tokens.begin() + long(at), tokens.end());
        Node* made = child.get();
        const auto first = key(child->edge);
        unlist(*node);
        node->children[first] = std::move(child);
        touch(*made);
        size_ += added;
        return {made, added};
    }

    void lock(Node* node, int by) {
        for (; node; node = node->parent) {
            node->locks = unsigned(int(node->locks) + by);
            list(*node);
        }
    }

    /// Gives up to `tokens` free; how many it were.
    std::size_t evict(std::size_t tokens) {
        std::size_t freed = 0;
        while (freed < tokens && !leaves_.empty()) {
            Node* node = leaves_.begin()->second;
            Node* parent = node->parent;
            freed += node->edge.size();
            size_ -= node->edge.size();
            unlist(*node);
            parent->children.erase(key(node->edge));
            list(*parent);
        }
        return freed;
    }

private:
    std::uint64_t key(std::span<const std::uint32_t> tokens) const {
        std::uint64_t h = 14695981039346656037u;
        for (std::size_t i = 0; i < page_; ++i) h = (h ^ tokens[i]) * 1099511628211u;
        return h;
    }

    Node* split(Node& lower, std::size_t at) {
        auto& place = lower.parent->children.at(key(lower.edge));
        auto upper = std::make_unique<Node>();
        Node* made = upper.get();
        upper->parent = lower.parent;
        upper->edge.assign(lower.edge.begin(), lower.edge.begin() + long(at));
        upper->locks = lower.locks;
        upper->used = lower.used;
        auto rest = std::move(place);
        place = std::move(upper);
        lower.edge.erase(lower.edge.begin(), lower.edge.begin() + long(at));
        lower.parent = made;
        made->children[key(lower.edge)] = std::move(rest);
        return made;
    }

    void touch(Node& node) {
        unlist(node);
        node.used = clock_;
        list(node);
    }

    void list(Node& node) {
        const bool leaf = node.children.empty() && node.locks == 0 && &node != &root_;
        if (leaf == node.listed) return;
        if (!leaf) return unlist(node);
        leaves_.insert({node.used, &node});
        node.listed = true;
    }

    void unlist(Node& node) {
        if (node.listed) leaves_.erase({node.used, &node});
        node.listed = false;
    }

    std::size_t page_, size_ = 0;
    std::uint64_t clock_ = 0;
    Node root_;
    std::set<std::pair<std::uint64_t, Node*>> leaves_;
};

struct Run {
    std::uint64_t id;
    const Job* job;
    std::size_t computed = 0, generated = 0, cached = 0;
    PrefixTree::Node* held = nullptr; // locked
    std::size_t own = 0;              // tokens of memory beside the tree's
    std::deque<std::size_t> ends;     // mlx: of the segments that are left

    std::span<const std::uint32_t> first(std::size_t n) const {
        return std::span(job->tokens).first(n);
    }
    std::size_t context() const { return job->prompt + generated; }
    bool ended() const { return generated >= job->output(); }
};

/// vLLM V1: pages of 16, visible when they are scheduled (kv_cache_manager.allocate_slots caches
/// blocks that are about to be computed); prefill and decoding in one step; the last one admitted
/// is preempted where memory ends. SGLang: any length, visible after the forward pass, prefill
/// before decoding, memory reserved. oMLX: pages of 256, stored by a worker once a request has
/// ended.
class Paged final : public EngineModel {
public:
    explicit Paged(const EngineConfig& config)
        : config_(config), tree_(config.page), mixed_(config.kind == "vllm") {}

    void submit(std::uint64_t id, const Job& job) override { waiting_.push_back({id, &job}); }

    void cancel(std::uint64_t id) override {
        std::erase_if(waiting_, [&](const Run& run) { return run.id == id; });
        for (auto it = running_.begin(); it != running_.end(); ++it) {
            if (it->id != id) continue;
            release(*it);
            running_.erase(it);
            return;
        }
    }

    bool idle() const override { return waiting_.empty() && running_.empty(); }

    std::size_t cached(std::uint64_t id) const override {
        const auto it = cached_.find(id);
        return it == cached_.end() ? 0 : it->second;
    }

    double step(double now, std::vector<EngineEvent>& events) override {
        while (!stored_.empty() && stored_.front().first <= now) {
            tree_.insert(stored_.front().second);
            make(0);
            stored_.pop_front();
        }
        std::size_t budget = config_.budget, tokens = 0, context = 0, streams = 0;
        std::vector<std::pair<Run*, std::size_t>> batch;
        const auto take = [&](Run& run, std::size_t n) {
            batch.emplace_back(&run, n);
            budget -= n;
            tokens += n;
            if (mixed_) publish(run, run.computed + n);
        };
        for (auto it = running_.begin(); it != running_.end(); ++it) {
            const bool decodes = it->generated > 0 && it->computed + 1 == it->context();
            if (decodes && !mixed_) continue;
            const auto n = std::min(it->context() - it->computed, budget);
            if (n == 0) continue;
            if (mixed_ && !reserve(it, n)) break;
            if (decodes) {
                ++streams;
                context += it->context();
            }
            take(*it, n);
        }
        while (!waiting_.empty() && budget > 0 && running_.size() < config_.batch) {
            Run& next = waiting_.front();
            const auto total = next.context();
            auto [hit, node] = tree_.match(next.first(total));
            hit = std::min(hit, (total - 1) / config_.page * config_.page);
            tree_.lock(node, 1);
            const auto need = total - hit + (mixed_ ? 0 : next.job->output());
            if (!make(need)) {
                tree_.lock(node, -1);
                if (running_.empty()) throw std::logic_error("a request larger than the cache");
                break;
            }
            next.held = node;
            next.computed = hit;
            if (next.generated == 0) {
                cached_[next.id] = hit;
                totals_.cached += hit;
            }
            const auto n = std::min(total - hit, budget);
            next.own = mixed_ ? n : need;
            own_ += next.own;
            running_.push_back(std::move(next));
            waiting_.pop_front();
            take(running_.back(), n);
        }
        if (!mixed_ && batch.empty())
            for (auto& run : running_) {
                ++streams;
                context += run.context();
                take(run, 1);
            }
        if (batch.empty()) return 1e-3;
        ++totals_.steps;
        for (auto [run, n] : batch) {
            run->computed += n;
            if (run->generated == 0 || n > 1) totals_.prefilled += n;
            if (!mixed_ && run->generated == 0) publish(*run, run->computed);
            if (run->computed < run->context()) continue;
            ++run->generated;
            events.push_back({run->id});
        }
        totals_.padded = totals_.prefilled;
        const double seconds = config_.hardware.step(tokens, streams, context);
        for (auto it = running_.begin(); it != running_.end();) {
            if (!it->ended()) {
                ++it;
                continue;
            }
            events.push_back({it->id, EngineEvent::done});
            const auto all = it->first(it->job->tokens.size() - 1);
            if (config_.commit > 0)
                stored_.emplace_back(now + seconds + config_.commit,
                                     Tokens(all.begin(), all.end()));
            else
                tree_.insert(all);
            release(*it);
            it = running_.erase(it);
        }
        return seconds;
    }

private:
    // What is computed becomes visible: out of the request's own memory into the tree's.
    void publish(Run& run, std::size_t upto) {
        if (config_.commit > 0) return;
        auto [node, added] = tree_.insert(run.first(upto));
        tree_.lock(node, 1);
        tree_.lock(run.held, -1);
        run.held = node;
        const auto moved = std::min(added, run.own);
        run.own -= moved;
        own_ -= moved;
    }

    bool make(std::size_t tokens) {
        const auto used = tree_.size() + own_ + tokens;
        return used <= config_.cache || tree_.evict(used - config_.cache) >= used - config_.cache;
    }

    bool reserve(std::list<Run>::iterator it, std::size_t tokens) {
        while (!make(tokens)) {
            const auto last = std::prev(running_.end());
            const bool itself = last == it;
            if (itself && running_.size() == 1)
                throw std::logic_error("a request larger than the cache");
            release(*last);
            last->computed = 0;
            waiting_.push_front(std::move(*last));
            running_.erase(last);
            ++totals_.preempted;
            if (itself) return false;
        }
        it->own += tokens;
        own_ += tokens;
        return true;
    }

    void release(Run& run) {
        tree_.lock(run.held, -1);
        run.held = nullptr;
        own_ -= run.own;
        run.own = 0;
    }

    EngineConfig config_;
    PrefixTree tree_;
    bool mixed_;
    std::deque<Run> waiting_;
    std::list<Run> running_;
    std::size_t own_ = 0;
    std::deque<std::pair<double, Tokens>> stored_;
    std::unordered_map<std::uint64_t, std::size_t> cached_;
};

/// mlx_lm.server (mlx-lm 0.32, server.py, generate.py, models/cache.py): ten whole token strings,
/// of which the oldest of a kind goes (a hit does not refresh it) and the prefixes of a longer one
/// go with its insertion; looked up when a request leaves the queue, which is looked at every half
/// second; stored at the end of the system block (if a user has spoken last), before the last
/// token, and at the end. Prompts are computed eight at a time, padded to the longest; comments in
/// the stream say when. Text shows token by token, but for that of a call of a tool.
class Mlx final : public EngineModel {
public:
    explicit Mlx(const EngineConfig& config) : config_(config) {}

    void submit(std::uint64_t id, const Job& job) override { queue_.push_back({id, &job}); }

    void cancel(std::uint64_t id) override {
        const auto gone = [&](const Run& run) { return run.id == id; };
        std::erase_if(queue_, gone);
        std::erase_if(unprocessed_, gone);
        std::erase_if(prompts_, gone);
        std::erase_if(decoding_, gone);
    }

    bool idle() const override {
        return queue_.empty() && unprocessed_.empty() && prompts_.empty() && decoding_.empty();
    }

    std::size_t cached(std::uint64_t id) const override {
        const auto it = cached_.find(id);
        return it == cached_.end() ? 0 : it->second;
    }

    double step(double now, std::vector<EngineEvent>& events) override {
        if (now >= slice_end_ || (unprocessed_.empty() && prompts_.empty() && decoding_.empty())) {
            for (; !queue_.empty(); queue_.pop_front()) accept(std::move(queue_.front()));
            slice_end_ = now + config_.slice;
        }
        double seconds = 0;
        if (!decoding_.empty()) {
            seconds += pass(decoding_.size(), decoding_);
            for (auto& run : decoding_) {
                ++run.generated;
                events.push_back(token(run));
            }
            finish(events);
        }
        if (decoding_.size() < config_.batch) {
            while (!unprocessed_.empty() && prompts_.size() < config_.prompts &&
                   prompts_.size() + decoding_.size() < config_.batch) {
                prompts_.push_back(std::move(unprocessed_.front()));
                unprocessed_.pop_front();
            }
            std::vector<Run> ready;
            for (auto it = prompts_.begin(); it != prompts_.end();) {
                if (it->computed + 1 < it->job->prompt) {
                    ++it;
                    continue;
                }
                ready.push_back(std::move(*it));
                it = prompts_.erase(it);
            }
            if (!ready.empty()) {
                seconds += pass(ready.size(), ready);
                totals_.prefilled += ready.size();
                totals_.padded += ready.size();
                for (auto& run : ready) {
                    run.computed = run.job->prompt;
                    run.generated = 1;
                    events.push_back({run.id, EngineEvent::computed});
                    events.push_back(token(run));
                    decoding_.push_back(std::move(run));
                }
                finish(events);
            }
            if (!prompts_.empty()) seconds += prefill(events);
        }
        return seconds > 0 ? seconds : 1e-3;
    }

private:
    enum Kind { assistant, user, system };

    double pass(std::size_t tokens, const auto& runs) {
        std::size_t context = 0;
        for (const auto& run : runs) context += run.context();
        ++totals_.steps;
        return config_.hardware.step(tokens, tokens, context);
    }

    void accept(Run run) {
        const auto n = run.job->prompt;
        for (const auto& [tokens, kind] : entries_)
            run.cached = std::max(run.cached, common(tokens, run.first(n)));
        run.cached = std::min(run.cached, n - 1);
        run.computed = run.cached;
        cached_[run.id] = run.cached;
        totals_.cached += run.cached;
        for (const auto end : {run.job->system, n - 1})
            if (end > run.computed && end < n && (run.ends.empty() || end > run.ends.back()))
                run.ends.push_back(end);
        unprocessed_.push_back(std::move(run));
    }

    // A call of a tool is shown when it is whole.
    static EngineEvent token(const Run& run) {
        return {run.id, EngineEvent::token, run.job->calls_tools};
    }

    double prefill(std::vector<EngineEvent>& events) {
        std::size_t longest = 0;
        const auto part = [&](const Run& run) {
            return std::min(run.ends.front() - run.computed, config_.budget);
        };
        for (const auto& run : prompts_) longest = std::max(longest, part(run));
        const auto padded = longest * prompts_.size();
        totals_.padded += padded;
        ++totals_.steps;
        for (auto& run : prompts_) {
            const auto n = part(run);
            totals_.prefilled += n;
            run.computed += n;
            if (run.computed < run.ends.front()) continue;
            run.ends.pop_front();
            const bool whole = run.computed + 1 == run.job->prompt;
            insert(run.first(run.computed), !whole               ? system
                                            : run.job->user_last ? user
                                                                 : assistant);
            if (whole) events.push_back({run.id, EngineEvent::computed});
        }
        return config_.hardware.step(padded, 0, 0);
    }

    void finish(std::vector<EngineEvent>& events) {
        for (auto it = decoding_.begin(); it != decoding_.end();) {
            if (!it->ended()) {
                ++it;
                continue;
            }
            events.push_back({it->id, EngineEvent::done});
            insert(it->first(it->job->tokens.size() - 1), assistant);
            it = decoding_.erase(it);
        }
    }

    void insert(std::span<const std::uint32_t> view, Kind kind) {
        Tokens tokens(view.begin(), view.end());
        std::erase_if(entries_, [&](const auto& entry) {
            return entry.first.size() <= tokens.size() &&
                   std::equal(entry.first.begin(), entry.first.end(), tokens.begin());
        });
        entries_.emplace_back(std::move(tokens), kind);
        if (entries_.size() <= config_.cache) return;
        std::array<std::size_t, 3> count{};
        for (const auto& entry : entries_) ++count[entry.second];
        const Kind out = count[assistant] > 0 && count[assistant] >= count[user] ? assistant
                         : count[user] > 0 && count[user] >= count[system]       ? user
                                                                                 : system;
        entries_.erase(std::find_if(entries_.begin(), entries_.end(),
                                    [&](const auto& entry) { return entry.second == out; }));
    }

    EngineConfig config_;
    std::deque<Run> queue_, unprocessed_;
    std::vector<Run> prompts_, decoding_;
    std::deque<std::pair<Tokens, Kind>> entries_; // the oldest first
    double slice_end_ = 0;
    std::unordered_map<std::uint64_t, std::size_t> cached_;
};

/// llama-server (server-context.cpp): a request takes the idle slot that has most of its prompt,
/// if that is more than a tenth of it, else the one that was used the longest ago. A slot of which
/// less than half would stay goes to the host's cache, out of which the best one is moved in.
class Llama final : public EngineModel {
public:
    explicit Llama(const EngineConfig& config) : config_(config), slots_(config.batch) {}

    void submit(std::uint64_t id, const Job& job) override { waiting_.push_back({id, &job}); }

    void cancel(std::uint64_t id) override {
        std::erase_if(waiting_, [&](const Run& run) { return run.id == id; });
        for (auto& slot : slots_)
            if (slot.run && slot.run->id == id) {
                const auto had = slot.run->first(slot.run->computed);
                slot.tokens.assign(had.begin(), had.end());
                slot.run.reset();
            }
    }

    bool idle() const override {
        return waiting_.empty() &&
               std::none_of(slots_.begin(), slots_.end(), [](const auto& it) { return !!it.run; });
    }

    std::size_t cached(std::uint64_t id) const override {
        const auto it = cached_.find(id);
        return it == cached_.end() ? 0 : it->second;
    }

    double step(double, std::vector<EngineEvent>& events) override {
        while (!waiting_.empty() && place(waiting_.front())) waiting_.pop_front();
        std::size_t streams = 0, context = 0;
        for (const auto& slot : slots_)
            if (slot.run && slot.run->generated > 0) {
                ++streams;
                context += slot.run->context();
            }
        std::size_t budget = config_.budget - streams, prefilled = 0;
        for (auto& slot : slots_) {
            if (!slot.run) continue;
            Run& run = *slot.run;
            if (run.generated == 0) {
                const auto n = std::min(run.job->prompt - run.computed, budget);
                run.computed += n;
                budget -= n;
                prefilled += n;
                if (run.computed < run.job->prompt) continue;
            }
            ++run.generated;
            events.push_back({run.id});
            if (!run.ended()) continue;
            events.push_back({run.id, EngineEvent::done});
            const auto all = run.first(run.job->tokens.size() - 1);
            slot.tokens.assign(all.begin(), all.end());
            slot.used = ++clock_;
            slot.run.reset();
        }
        if (streams + prefilled == 0) return 1e-3;
        totals_.prefilled += prefilled;
        totals_.padded = totals_.prefilled;
        ++totals_.steps;
        return config_.hardware.step(streams + prefilled, streams, context);
    }

private:
    struct Slot {
        Tokens tokens;
        std::unique_ptr<Run> run;
        std::uint64_t used = 0;
    };

    bool place(Run& run) {
        const auto prompt = run.first(run.job->prompt);
        const double n = double(prompt.size());
        Slot* chosen = nullptr;
        double best = 0;
        for (auto& slot : slots_) {
            if (slot.run || slot.tokens.empty()) continue;
            const double share = double(common(slot.tokens, prompt)) / n;
            if (share > best && share > 0.1) {
                best = share;
                chosen = &slot;
            }
        }
        bool look = false;
        if (chosen) {
            look = best * n < 0.5 * double(chosen->tokens.size());
        } else {
            for (auto& slot : slots_)
                if (!slot.run && (!chosen || slot.used < chosen->used)) chosen = &slot;
            look = true;
        }
        if (!chosen) return false;
        if (look && config_.cache > 0) exchange(*chosen, prompt);
        run.cached = std::min(common(chosen->tokens, prompt), prompt.size() - 1);
        run.computed = run.cached;
        cached_[run.id] = run.cached;
        totals_.cached += run.cached;
        chosen->run = std::make_unique<Run>(std::move(run));
        return true;
    }

    static bool begins(const Tokens& with, const Tokens& text) {
        return with.size() <= text.size() && std::equal(with.begin(), with.end(), text.begin());
    }

    void exchange(Slot& slot, std::span<const std::uint32_t> prompt) {
        if (!slot.tokens.empty() && std::none_of(host_.begin(), host_.end(), [&](const auto& it) {
                return begins(slot.tokens, it);
            })) {
            std::erase_if(host_, [&](const auto& it) { return begins(it, slot.tokens); });
            host_.push_back(slot.tokens);
        }
        const auto measure = [&](const Tokens& state) {
            const double same = double(common(state, prompt));
            return std::pair(state.empty() ? -1.0 : same / double(state.size()),
                             same / double(prompt.size()));
        };
        auto [kept, share] = measure(slot.tokens);
        auto found = host_.end();
        for (auto it = host_.begin(); it != host_.end(); ++it) {
            const auto [k, s] = measure(*it);
            if (k < 0.25 || k <= kept || s <= share) continue;
            kept = k;
            share = s;
            found = it;
        }
        if (found != host_.end()) {
            slot.tokens = std::move(*found);
            host_.erase(found);
        }
        std::size_t size = 0;
        for (const auto& it : host_) size += it.size();
        for (; size > config_.cache; host_.pop_front()) size -= host_.front().size();
    }

    EngineConfig config_;
    std::vector<Slot> slots_;
    std::deque<Run> waiting_;
    std::deque<Tokens> host_;
    std::uint64_t clock_ = 0;
    std::unordered_map<std::uint64_t, std::size_t> cached_;
};

} // namespace

void tokenize(std::string_view text, Tokens& out) {
    const auto kind = [](unsigned char c) {
        return std::isalpha(c) || c >= 0x80 ? 0 : std::isdigit(c) ? 1 : std::isspace(c) ? 3 : 2;
    };
    constexpr std::array<std::size_t, 4> most{9, 3, 3, 1000};
    for (std::size_t i = 0; i < text.size();) {
        std::size_t end = i;
        if (text[i] == ' ' && i + 1 < text.size() &&
            kind(static_cast<unsigned char>(text[i + 1])) < 3)
            ++end;
        const int what = kind(static_cast<unsigned char>(text[end]));
        const auto from = end;
        while (end < text.size() && end - from < most[std::size_t(what)] &&
               kind(static_cast<unsigned char>(text[end])) == what)
            ++end;
        std::uint32_t h = 2166136261u;
        for (; i < end; ++i) h = (h ^ static_cast<unsigned char>(text[i])) * 16777619u;
        out.push_back(h);
    }
}

EngineConfig engine_config(std::string_view name) {
    const Hardware m4{0.5e-3, 6.9e-3, 1 / 1622.0, 0, 147456 / 450e9};
    if (name == "vllm") return {.kind = "vllm", .hardware = {}, .page = 16};
    if (name == "sglang") return {.kind = "sglang", .hardware = {}};
    if (name == "mlx")
        return {.kind = "mlx", .hardware = m4, .cache = 10, .batch = 32, .budget = 2048};
    if (name == "mlx-cpu") {
        auto config = engine_config("mlx");
        config.hardware = {1e-3, 0.04, 1 / 340.0, 0.001, 3.5e-6};
        return config;
    }
    if (name == "omlx")
        return {.kind = "omlx",
                .hardware = m4,
                .cache = 200'000,
                .page = 256,
                .batch = 8,
                .budget = 2048,
                .commit = 3};
    if (name == "llama")
        return {.kind = "llama", .hardware = m4, .cache = 58'000, .batch = 4, .budget = 2048};
    throw std::invalid_argument("no engine is called " + std::string(name));
}

std::unique_ptr<EngineModel> make_engine(const EngineConfig& config) {
    if (config.kind == "mlx") return std::make_unique<Mlx>(config);
    if (config.kind == "llama") return std::make_unique<Llama>(config);
    return std::make_unique<Paged>(config);
}

std::size_t least_prefill(std::span<const Job* const> jobs, std::size_t page) {
    PrefixTree tree(page);
    std::size_t sum = 0;
    for (const Job* job : jobs) {
        const auto n = job->prompt;
        const auto hit = tree.match(std::span(job->tokens).first(n)).first;
        sum += n - std::min(hit, (n - 1) / page * page);
        tree.insert(std::span(job->tokens).first(job->tokens.size() - 1));
    }
    return sum;
}

double least_seconds(const EngineConfig& config, std::span<const Job* const> jobs,
                     std::span<const std::vector<std::size_t>> chains, std::size_t prefill) {
    const auto& hw = config.hardware;
    const double once = hw.overhead + hw.weights;
    double outputs = 0, kv = 0, longest = 0;
    for (const Job* job : jobs) {
        const double n = double(job->prompt), o = double(job->output());
        outputs += o;
        kv += o * n + o * (o + 1) / 2;
        longest = std::max(longest, o);
    }
    const double steps = std::max(std::ceil(outputs / config.batch), longest);
    double critical = longest * once;
    for (const auto& chain : chains) {
        double sum = 0;
        for (const auto i : chain) sum += double(jobs[i]->output());
        critical = std::max(critical, sum * once);
    }
    const double compute = (double(prefill) + outputs) * hw.token + steps * hw.overhead;
    const double work = std::max(steps * once, compute) + kv * hw.kv + outputs * hw.stream;
    return std::max(work, critical);
}

} // namespace evalrt::test
