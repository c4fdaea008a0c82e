// PrefixPlanner: which of the waiting requests goes next.
#ifndef EVALRT_PREFIX_PLANNER_HPP
#define EVALRT_PREFIX_PLANNER_HPP

#include "evalrt/backend_row.hpp"
#include "evalrt/detail/memory.hpp"
#include "evalrt/request.hpp"

#include <boost/intrusive/list.hpp>
#include <boost/intrusive/set.hpp>

#include <algorithm>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace evalrt {

using RequestId = std::uint64_t; // never 0

/// What a planner is told of a request. The views are only read during the call.
struct Prompt {
    std::string domain; ///< prefixes are shared only inside one: endpoint, model
    std::vector<std::string_view> segments;    ///< in the order in which the template renders them
    std::optional<std::int64_t> output_tokens; ///< the most there can be
    std::string session{};                     ///< turns of one conversation share it; empty: none
    int turn = 0;
    bool streamed = true; ///< its first text will be seen before its end
    unsigned kind = 0;    ///< where kinds do not go together: which; a RadixPlanner does not ask
    /// What it has that keeps some servers from batching: 1 a penalty or logit_bias, 2 a seed. No
    /// planner asks.
    unsigned unusual = 0;
    std::uint32_t client = 0;       ///< whose it is: those of several go by turns
    std::uint64_t conversation = 0; ///< see Request::conversation; a RadixPlanner does not ask
    /// Of the bytes, those of the system prompt and the tools, if they come first. A server that
    /// pads computes them in a step of their own.
    std::size_t front = 0;
    /// Not zero: nobody knows whether the session goes on; its next turn is expected so soon after
    /// this one's answer.
    std::chrono::milliseconds pause{0};

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
    /// Why this one now: "arrival", "leader" (others wait for what it fills the cache with),
    /// "follower" (of what is there), "alone", "overtaken" (too often), "idle" (it was held back,
    /// but nothing runs), "suspect" (it may have killed the server), "refused" (by another server:
    /// this one is asked what it makes of it).
    std::string_view why = "arrival";
    std::uint32_t node = 0;     ///< names the longest prefix that it has in common with others
    std::size_t node_bytes = 0; ///< the length of that
    RequestId waited_for = 0;   ///< which request showed the server that prefix; 0: none
    /// What next() named none for before: "leader", "leaders", "sessions", "memory", "padding",
    /// "slot", or of the scheduler "limit", "pause", "server", "suspects", "refill". Empty:
    /// nothing.
    std::string_view gate{};
    unsigned server = 0; ///< of several, which; from 0
};

/// Of what waits, in the order in which it would go if nothing came between.
struct Planned {
    RequestId id = 0;
    std::size_t prompt_bytes = 0;
    std::size_t shared_bytes = 0;   ///< of the prompt, with the one before
    std::int64_t output_tokens = 0; ///< predicted
    bool continues = false;         ///< the session of the one before

    /// In tokens to prefill; a decoded one costs some four of them.
    double cost() const {
        return double(prompt_bytes - shared_bytes) / 4 + 4 * double(output_tokens);
    }
};

/// How long answers are, by those seen: of all with one prefix.
class OutputLength {
public:
    void add(std::int64_t tokens) {
        count_ = std::min(count_ + 1, 10u); // then the older ones fade
        mean_ += (float(tokens) - mean_) / float(count_);
    }
    bool known() const { return count_ > 0; }
    std::int64_t mean() const { return std::int64_t(mean_ + 0.5f); }

private:
    unsigned count_ = 0;
    float mean_ = 0;
};

/// Names the next request. It may hold requests back while a leader fills the server's cache with
/// what they share, under one law: while nothing runs and something waits, next() names one.
/// The same calls in the same order give the same answers. No clock, no executor: time is passed
/// in and never goes backwards.
class PrefixPlanner {
public:
    enum class Stage {
        first_text, ///< its first token is there, or known to come next
        done,       ///< it has ended, and the server has had time to store its prefix
        failed,     ///< it has ended otherwise; it may be added again
    };
    using Point = Clock::time_point;

    virtual ~PrefixPlanner() = default;

    virtual void add(RequestId id, const Prompt& prompt) = 0;

    /// The named request is taken for sent: it runs until progressed(id, done or failed).
    virtual std::optional<Pick> next(Point now) = 0;

    virtual void progressed(RequestId id, Stage stage, Point now) = 0;

    /// A running request was answered with so many tokens; progressed(id, done) follows.
    /// `prompt_tokens`: of its prompt; 0: not known.
    virtual void answered(RequestId, std::int64_t /*output_tokens*/,
                          std::int64_t /*prompt_tokens*/ = 0) {}

    /// A request that waits is given up. One that does not wait is left alone.
    virtual void remove(RequestId id) = 0;

    /// The server has started anew: its cache is empty.
    virtual void cache_lost() {}

    /// So many more may run: told before next(), by who knows. Else it is any number.
    virtual void room(unsigned /*places*/) {}

    /// Of several servers: whether this one takes requests now. Until it is said, it does.
    virtual void admit(unsigned /*server*/, bool /*open*/) {}

    /// When next() may name another without anything having happened.
    virtual Point wake() const { return Point::max(); }

    /// Why next() named none though something waits: "leader", "leaders", "sessions", "memory",
    /// "padding", "slot", "kinds".
    virtual std::string_view holds() const { return {}; }
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
/// 2312.07104), and what continues a prompt that was sent before anything that shares less; of the
/// rest what is predicted to take longest, so that it does not run alone at the end. One leader for
/// each shared prefix until the server shows it to the others. The turns of a session one after
/// the other, and who goes on with one before all who begin.
///
/// Clients go by turns, each in that order: between two requests of one of C clients that wait, at
/// most turn * (C - 1) of others are sent. A client's own requests pass one of its own at most
/// overtaking + 2 * W times, W being the most of them that waited at once; those that go on with a
/// session do not count. What must wait for a leader or for a session's end is not in these bounds;
/// who is held back for others' sake (padding, slots, a leader's places) is for overtaking more.
///
/// A session whose end nobody tells counts as open until its pause is over; but if all that are
/// open are silent while others wait for their places, these get them.
///
/// Memory: some 550 bytes a request that waits or runs, 1/16 of what its prompt shares with no
/// other, and as much for the `remembered` last ones.
class RadixPlanner final : public PrefixPlanner {
public:
    struct Options {
        Release release = Release::first_text;
        std::size_t shared_bytes = 256;    ///< a shared prefix below this is not worth waiting for
        bool match_length = false;         ///< long prompts first, so that neighbours are alike
        std::size_t padding_bytes = 0;     ///< see BackendRow::padding_tokens; 0: it does not pad
        unsigned leaders = 0;              ///< shared prefixes being filled at once; 0: any number
        std::chrono::seconds patience{60}; ///< nobody waits longer for one leader, or its place
        bool in_order = false;             ///< as they arrive: only the figures are the tree's
        unsigned sessions = 0;             ///< begun and not ended, at most; 0: any number
        /// Requests after which what is held back so as not to be padded finds the prefix no more
        /// that it shares with an earlier one; 0: any number.
        unsigned kept = 0;
        std::size_t cache_bytes = 0;   ///< prompts and answers that the server holds; 0: not known
        std::size_t remembered = 4096; ///< prompts that have ended, to say what may be cached
        /// Requests of a client that may go before one of its own that came earlier, and twice as
        /// many as waited at once: in a suite that is all there nobody counts as overtaken.
        unsigned overtaking = 100;
        unsigned turn = 8; ///< requests of a client, then it is another's turn that waits, too
    };

    RadixPlanner() : RadixPlanner(Options()) {}
    explicit RadixPlanner(Options options) : options_(options) {}
    RadixPlanner(const RadixPlanner&) = delete;
    RadixPlanner& operator=(const RadixPlanner&) = delete;

    void add(RequestId id, const Prompt& prompt) override {
        expect_text(prompt); // it comes while the entry is made
        Entry& entry = entries_.make(id, prompt.bytes());
        entry.most = prompt.output_tokens.value_or(0);
        entry.arrival = ++arrivals_;
        entry.streamed = prompt.streamed;
        entry.client = prompt.client;
        entry.front = std::min(prompt.front, entry.bytes);
        entry.node = &insert(prompt, entry.bytes);
        entries_.insert(entry);
        entry.output = predicted(*entry.node, entry.most);
        for (Node* it = entry.node; it; it = it->parent) {
            ++it->live;
            if (it->idle) unlist(*it);
        }
        if (prompt.session.empty() || options_.in_order) return enqueue(entry);
        entry.turn = prompt.turn;
        entry.session = &sessions_[prompt.session];
        if (entry.session->name.empty()) entry.session->name = prompt.session;
        entry.session->pause = prompt.pause;
        expected_.erase({std::exchange(entry.session->until, Point{}), entry.session});
        entry.session->turns.insert({entry.turn, entry.arrival, id});
        promote(*entry.session);
    }

    std::optional<Pick> next(Point now) override {
        wake_ = Point::max();
        holds_ = {};
        fading_ = false;
        while (!expected_.empty() && expected_.begin()->first <= now) end_silent();
        if (root_.waiting == 0) return {};
        std::string_view why;
        auto found = by_turns(now, why);
        if (!found.node && holds_ == "sessions" && expected_.size() == open_.size()) {
            // All that are open are silent: they may wait for one that is held back.
            while (!expected_.empty()) end_silent();
            found = by_turns(now, why);
        }
        if (found.node && running_ > 0 && too_much(found)) {
            holds_ = "memory";
            wake_for_sessions();
            return {};
        }
        if (found.node && pads(*found.node, *found.entry)) { // it was overtaken too often
            holds_ = "padding";
            return {};
        }
        if (!found.node && holds_ == "sessions") wake_for_sessions();
        if (!found.node && running_ == 0) {
            why = "idle";
            found = find(root_, now, true, turns_.front()->name);
        }
        if (!found.node) return {};
        holds_ = {};
        return send(*found.entry, *found.node, now, why);
    }

    void progressed(RequestId id, Stage stage, Point now) override {
        Entry* const known = entry_of(id);
        if (!known || known->state != State::running) return;
        Entry& entry = *known;
        const bool ended = stage != Stage::first_text;
        const bool visible = stage == Stage::done ||
                             (stage == Stage::first_text && options_.release != Release::done);
        for (Node* node = entry.node; node; node = node->parent) {
            if (node->leader == id && (ended || visible)) node->leader = 0;
            if (!visible) continue;
            if (!node->warm) node->shown_by = id;
            node->warm = true;
        }
        if ((ended || visible) && leading_.erase({entry.sent, id})) followers_ -= entry.followers;
        if (entry.filling) {
            entry.filling = false;
            filling_.erase(std::find(filling_.begin(), filling_.end(), entry.cold));
        }
        if (!ended) return;
        --running_;
        if (options_.release == Release::slot) slots_.push_back(entry.node);
        std::size_t own = answer_bytes(entry.output);
        for (Node* node = entry.node; node; node = node->parent)
            if (--node->running == 0) own += own_bytes(*node);
        resident_ -= own;
        if (entry.session) {
            entry.session->running = 0;
            entry.session->own = own;
            if (stage == Stage::done && entry.session->turns.empty() &&
                entry.session->pause.count() > 0) {
                entry.session->until = now + entry.session->pause;
                expected_.insert({entry.session->until, entry.session});
            } else {
                promote(*entry.session);
            }
        }
        forget(entry);
    }

    void answered(RequestId id, std::int64_t output_tokens,
                  std::int64_t prompt_tokens = 0) override {
        const Entry* const entry = entry_of(id);
        if (!entry) return;
        for (Node* node = entry->node; node; node = node->parent) node->output.add(output_tokens);
        if (prompt_tokens <= 0) return;
        seen_bytes_ += double(entry->bytes);
        seen_tokens_ += double(prompt_tokens);
    }

    void remove(RequestId id) override {
        Entry* const known = entry_of(id);
        if (!known || known->state == State::running) return;
        Entry& entry = *known;
        if (entry.state == State::waiting) dequeue(entry, false);
        if (entry.session) {
            auto& session = *entry.session;
            session.turns.erase({entry.turn, entry.arrival, id});
            if (session.first == id) session.first = 0;
            promote(session);
        }
        forget(entry);
    }

    void cache_lost() override {
        nodes_.each([](Node& node) { node.warm = false; });
        root_.warm = false;
        slots_.clear();
    }

    void room(unsigned places) override { room_ = places; }

    Point wake() const override { return wake_; }
    std::string_view holds() const override { return holds_; }

    /// What waits, in the order in which it would go, one at a time.
    std::vector<Planned> order() const {
        std::vector<Planned> list;
        const Node* last = nullptr;
        if (options_.in_order) {
            for (const Entry* it : as_they_came()) plan(list, *it, last);
        } else {
            plan(list, root_, last);
        }
        return list;
    }

    /// Prefixes and ends of prompts that are kept in memory.
    std::size_t nodes() const { return nodes_.size(); }

private:
    // Prompts are compared by blocks of this many bytes, some 16 tokens.
    static constexpr std::size_t block = 64;

    // Groups that may not begin yet and are passed by in search of something else; more change
    // little and cost time.
    static constexpr unsigned look_ahead = 256;

    // A block's name: of a hash of all bytes from the prompt's begin to the block's end. Compared
    // only in one place of the tree, so that these 32 bits tell blocks apart.
    using Block = std::uint32_t;

    using Edge = std::vector<Block, detail::PoolAllocator<Block>>;

    // What is in a set has its links in itself: it is found and left without a search.
    using Link =
        boost::intrusive::set_base_hook<boost::intrusive::link_mode<boost::intrusive::normal_link>,
                                        boost::intrusive::optimize_size<true>>;
    template <class T, class Less>
    using Set =
        boost::intrusive::set<T, boost::intrusive::base_hook<Link>, boost::intrusive::compare<Less>,
                              boost::intrusive::constant_time_size<false>>;

    using ByArrival = boost::intrusive::list_base_hook<
        boost::intrusive::link_mode<boost::intrusive::normal_link>>;

    struct Node;
    struct Entry;
    struct Before {
        bool operator()(const Node& a, const Node& b) const {
            if (a.sent != b.sent) return a.sent;
            return a.rank != b.rank ? a.rank > b.rank : a.arrival < b.arrival;
        }
        bool operator()(const Entry& a, const Entry& b) const {
            return a.rank != b.rank ? a.rank > b.rank : a.arrival < b.arrival;
        }
    };

    // Inner nodes are prefixes, leaves whole prompts.
    struct Node : Link {
        explicit Node(detail::Pool& pool) : edge(pool) {}

        std::uint64_t key() const { return key_of(parent, first); }

        Node* parent = nullptr;
        std::int64_t rank = std::numeric_limits<std::int64_t>::min();      // the highest ever below
        std::uint64_t arrival = std::numeric_limits<std::uint64_t>::max(); // the first ever
        bool sent = false;        // some request through here was sent
        bool warm = false;        // the server shows it
        bool idle = false;        // nothing lives here or below, and it has no kids
        bool several = false;     // clients' requests wait below
        std::uint32_t client = 0; // if not several: whose
        std::uint32_t waiting = 0, running = 0, live = 0; // here and below; live: all, held too
        std::uint32_t kids = 0;                           // all there are
        Set<Node, Before> children;                       // those with something waiting below
        Set<Entry, Before> own;                           // waiting, ending here
        Edge edge;
        Block first = 0;             // of it
        std::size_t bytes = 0;       // of a prompt, from its begin to the end of the edge
        RequestId leader = 0;        // who is filling the cache with it
        RequestId shown_by = 0;      // who has
        std::uint64_t last_sent = 0; // sends_ at the last one through here
        std::uintptr_t kids_xor = 0; // of their addresses: the last one's
        OutputLength output;
        Node *older = nullptr, *newer = nullptr; // among the idle
    };

    // All of one kind that there are, by their key(), whose upper half says where to look. Owns
    // them.
    template <class T>
    class Table {
    public:
        explicit Table(detail::Pool& pool) : pool_(pool) {}
        Table(const Table&) = delete;
        Table& operator=(const Table&) = delete;
        ~Table() {
            each([this](T& it) { end(&it); });
        }

        /// To be inserted when its key is known.
        template <class... Args>
        T& make(Args&&... args) {
            return *new (pool_.take(sizeof(T))) T(std::forward<Args>(args)...);
        }
        void end(T* it) {
            it->~T();
            pool_.give(it, sizeof(T));
        }

        std::size_t size() const { return count_; }

        template <class Is>
        T* find(std::uint64_t key, Is is) const {
            for (std::size_t i = home(key);; i = after(i)) {
                const auto& [other, it] = slots_[i];
                if (!it || (other == key && is(*it))) return it;
            }
        }

        /// It will be asked for or taken soon.
        void expect(std::uint64_t key) const { ahead(&slots_[home(key)]); }

        void insert(T& it) {
            if (3 * ++count_ > 2 * slots_.size()) resize(2 * slots_.size());
            put({it.key(), &it});
        }

        // To be called before its key changes; does not delete it.
        void take(const T& it) {
            std::size_t hole = home(it.key());
            while (slots_[hole].it != &it) hole = after(hole);
            for (std::size_t i = after(hole); slots_[i].it; i = after(i)) {
                const auto from_home = (i - home(slots_[i].key)) & (slots_.size() - 1);
                if (from_home < ((i - hole) & (slots_.size() - 1)))
                    continue; // it would come to lie before its home
                slots_[hole] = slots_[i];
                hole = i;
            }
            slots_[hole] = {};
            if (--count_ * 16 < slots_.size() && slots_.size() > least) resize(slots_.size() / 4);
        }

        template <class F>
        void each(F what) {
            for (const Slot& slot : slots_)
                if (slot.it) what(*slot.it);
        }

    private:
        static constexpr std::size_t least = 64;

        struct Slot {
            std::uint64_t key = 0; // most others are told apart by it, unseen
            T* it = nullptr;
        };

        std::size_t after(std::size_t i) const { return (i + 1) & (slots_.size() - 1); }

        std::size_t home(std::uint64_t key) const {
            return std::size_t(key >> 32) & (slots_.size() - 1);
        }

        void put(Slot slot) {
            std::size_t i = home(slot.key);
            while (slots_[i].it) i = after(i);
            slots_[i] = slot;
        }

        void resize(std::size_t size) {
            const auto old = std::exchange(slots_, std::vector<Slot>(std::max(size, least)));
            for (const Slot& slot : old)
                if (slot.it) put(slot);
        }

        detail::Pool& pool_;
        std::vector<Slot> slots_ = std::vector<Slot>(least); // a power of two
        std::size_t count_ = 0;
    };

    static std::uint64_t key_of(const Node* parent, Block first) {
        const auto key = (reinterpret_cast<std::uintptr_t>(parent) >> 4) * multiplier ^ first;
        return key * multiplier;
    }

    // Ids that follow each other lie side by side.
    static std::uint64_t key_of(RequestId id) { return id / 8 * multiplier ^ id % 8 << 32; }

    struct Session {
        std::string name;
        std::set<std::tuple<int, std::uint64_t, RequestId>> turns; // those that do not run
        RequestId first = 0; // of these: the one that waits in the tree
        RequestId running = 0;
        bool open = false;
        std::size_t first_bytes = 0;        // of its first prompt
        std::size_t bytes = 0;              // of what it has now, with the answer
        std::size_t own = 0;                // of these not shared with what runs; 0: it runs itself
        std::chrono::milliseconds pause{0}; // after its last turn, if its end is not known
        Point until{};                      // its next turn is expected; none: it has one here
    };

    // behind: another turn comes first
    enum class State : std::uint8_t { behind, waiting, running };

    // Bytes that a server that pads computes in its first step with others, and in its second.
    struct Cold {
        std::size_t first = 0, second = 0;
        bool operator==(const Cold&) const = default;
    };

    struct Entry : Link, ByArrival {
        Entry(RequestId name, std::size_t prompt_bytes) : id(name), bytes(prompt_bytes) {}

        std::uint64_t key() const { return key_of(id); }

        std::int64_t rank = 0; // those with more go first
        std::uint64_t arrival = 0;
        RequestId id;
        Node* node = nullptr;
        std::size_t bytes;
        std::int64_t output = 0, most = 0; // tokens of the answer: predicted, and at most
        Point sent{};
        std::uint64_t sends = 0;   // of its client, when it came
        std::uint64_t goes_on = 0; // its place among the turns of open sessions; 0: it is none
        Session* session = nullptr;
        std::size_t front = 0; // of the bytes, which are computed first
        Cold cold;             // that the server did not have
        int turn = 0;
        std::uint32_t followers = 0; // that wait for it, as a leader
        std::uint32_t client = 0;
        State state = State::behind;
        bool streamed = true;
        bool filling = false; // it runs, and what is cold is being prefilled
    };
    // That has something waiting.
    struct Client {
        std::uint32_t name = 0;
        unsigned left = 0; // of its turn
        std::size_t waiting = 0;
        // The most that waited at once, since all had gone that waited at the mark before, and
        // until then: together no less than since the oldest one came.
        std::size_t most = 0, most_before = 0;
        std::uint64_t mark = 0;  // in sends
        std::uint64_t sends = 0; // of its requests that went on with nothing
        std::uint64_t last = 0;  // all_sends_ when it had one, or came
        boost::intrusive::list<Entry, boost::intrusive::base_hook<ByArrival>,
                               boost::intrusive::constant_time_size<false>>
            arrived; // in this order
    };

    struct Found {
        Node* node = nullptr;
        Entry* entry = nullptr;
    };

    static constexpr std::uint64_t multiplier = 0x9e3779b97f4a7c15u;

    __extension__ typedef unsigned __int128 Wide;

    static std::uint64_t folded(Wide it) { return std::uint64_t(it) ^ std::uint64_t(it >> 64); }
    static std::uint64_t mixed(std::uint64_t a, std::uint64_t b) { return folded(Wide(a) * b); }

    static std::uint64_t word(const char* text) {
        std::uint64_t it;
        std::memcpy(&it, text, sizeof(it));
        return it;
    }

    // Four multiplications that do not wait for each other, folded once: as fast as memory is read.
    static std::uint64_t hash(const char* text) {
        const auto product = [text](std::size_t at, std::uint64_t a, std::uint64_t b) {
            return Wide(word(text + at) ^ a) * (word(text + at + 8) ^ b);
        };
        return folded(product(0, 0xa0761d6478bd642fu, 0xe7037ed1a0b428dbu) ^
                      product(16, 0x8ebc6af09c88c6e3u, 0x589965cc75374cc3u) ^
                      product(32, 0x1d8e4e27c47d124fu, 0xeb44accab455d165u) ^
                      product(48, 0x2f9be6cc39a1d7d1u, 0x9f8d0f3b5a6c7e43u));
    }

    template <int caches = 3> // all of them; 2: not the first
    static void ahead([[maybe_unused]] const void* memory) {
#if defined(__GNUC__)
        __builtin_prefetch(memory, 0, caches);
#endif
    }
    static void ahead(const void* memory, std::size_t size, std::size_t step = 64) {
        for (std::size_t i = 0; i < size; i += step) ahead(static_cast<const char*>(memory) + i);
    }

    /// It will be needed soon.
    template <class T>
    static void expect(const T& it) {
        ahead(&it, sizeof(T));
        ahead(reinterpret_cast<const char*>(&it + 1) - 1);
    }

    // Long prompts are read from memory, whose own looking ahead begins late and ends at each page:
    // so many bytes ahead, too many for the first cache, and where their pages are at once.
    static constexpr std::size_t reach = 2048, page = 4096, pages = 64;
    static void expect_text(const Prompt& prompt) {
        for (const auto segment : prompt.segments) {
            ahead(segment.data(), std::min(segment.size(), pages * page), page);
            ahead(segment.data(), std::min(segment.size(), reach));
            if (segment.size() >= reach) break; // it makes time for the rest
        }
    }

    // Names the whole blocks of the text, up to `most` of them; takes them off.
    static std::uint64_t name(std::string_view& text, std::size_t most, std::uint64_t chain,
                              Block*& out) {
        Block* to = out;
        const char* at = text.data();
        const char* const end = at + std::min(text.size() / block, most) * block;
        for (auto left = text.size(); at != end; at += block, left -= block) {
            if (left > reach) ahead<2>(at + reach);
            chain = mixed(chain ^ hash(at), multiplier);
            *to++ = Block(chain >> 32);
        }
        text.remove_prefix(std::size_t(at - text.data()));
        out = to;
        return chain;
    }

    // The leaf of the prompt. Its blocks are followed through the tree while it is read, so that
    // what is there of it comes from memory meanwhile.
    Node& insert(const Prompt& prompt, std::size_t bytes) {
        const auto most = (prompt.domain.size() + bytes) / block + 3;
        if (path_.size() < most) path_.resize(most);
        Block* out = path_.data();
        std::uint64_t chain = 1;
        char rest[block]; // of the segments before, less than a block
        std::size_t held = 0;

        Node* node = &root_;
        const Block *at = nullptr, *end = nullptr; // of its edge: what comes next
        const Block* seen = path_.data();          // followed up to here
        bool parted = false;                       // what comes now is in no edge
        const auto follow = [&] {
            while (!parted && seen != out) {
                if (at == end) {
                    Node* const next = kid_of(*node, *seen);
                    if (!next) {
                        parted = true;
                        // They will be neighbours.
                        if (!node->children.empty()) expect(*node->children.rbegin());
                        break;
                    }
                    node = next;
                    at = node->edge.data();
                    end = at + node->edge.size();
                }
                const auto both = std::min(end - at, out - seen);
                if (std::equal(at, at + both, seen)) { // the usual case, many at once
                    at += both;
                    seen += both;
                } else {
                    std::tie(at, seen) = std::mismatch(at, at + both, seen);
                }
                parted = at != end && seen != out;
            }
        };
        const auto link = [&](std::uint64_t it) {
            chain = mixed(chain ^ it, multiplier);
            *out++ = Block(chain >> 32);
        };
        // The domain is a block of its own, and so is the end: a prompt and its continuation are
        // two leaves.
        const auto close = [&](std::uint64_t kind) {
            std::memset(rest + held, 0, block - held);
            link(hash(rest) ^ mixed(held + kind, multiplier));
            held = 0;
        };
        const auto take = [&](std::string_view text, const auto& meanwhile) {
            if (text.empty()) return;
            if (held > 0) {
                const auto part = std::min(text.size(), block - held);
                std::memcpy(rest + held, text.data(), part);
                held += part;
                text.remove_prefix(part);
                if (held < block) return;
                link(hash(rest));
                held = 0;
            }
            while (text.size() >= block) {
                chain = name(text, reach / block, chain, out);
                meanwhile();
            }
            if (!text.empty()) std::memcpy(rest, text.data(), held = text.size());
        };
        take(prompt.domain, [] {});
        close(block);
        path_.front() = out[-1];
        out = path_.data() + 1;
        for (const auto segment : prompt.segments) take(segment, follow);
        close(2 * block);
        follow();
        if (at != end) node = &split(*node, at - node->edge.data());
        return parted ? child(*node, edge_of(seen, out), bytes) : *node;
    }

    Node* kid_of(const Node& parent, Block first) const {
        return nodes_.find(key_of(&parent, first), [&](const Node& it) {
            return it.parent == &parent && it.first == first;
        });
    }

    Entry* entry_of(RequestId id) const {
        return entries_.find(key_of(id), [id](const Entry& it) { return it.id == id; });
    }

    Edge edge_of(const Block* from, const Block* to) { return Edge(from, to, pool_); }

    Node& child(Node& parent, Edge edge, std::size_t bytes) {
        Node& node = nodes_.make(pool_);
        node.bytes = bytes;
        adopt(parent, node, std::move(edge));
        return node;
    }

    void adopt(Node& parent, Node& kid, Edge edge) {
        kid.parent = &parent;
        kid.first = edge.front();
        kid.edge = std::move(edge);
        nodes_.insert(kid);
        ++parent.kids;
        parent.kids_xor ^= reinterpret_cast<std::uintptr_t>(&kid);
    }

    // It keeps its edge.
    void disown(Node& kid) {
        nodes_.take(kid);
        Node& parent = *kid.parent;
        --parent.kids;
        parent.kids_xor ^= reinterpret_cast<std::uintptr_t>(&kid);
    }

    static void unlink(Node& node) {
        auto& children = node.parent->children;
        children.erase(children.iterator_to(node));
    }

    // Cuts the edge to `lower` in two; the new node above has all that is true of the whole.
    Node& split(Node& lower, std::ptrdiff_t at) {
        Node& parent = *lower.parent;
        if (lower.waiting > 0) unlink(lower);
        disown(lower);
        // The first block of all is the domain's, which is no part of the prompt.
        const Block *const edge = lower.edge.data(), *const cut = edge + at;
        Node& upper = child(parent, edge_of(edge, cut),
                            parent.bytes + std::size_t(parent.parent ? at : at - 1) * block);
        adopt(upper, lower, edge_of(cut, edge + lower.edge.size()));
        upper.waiting = lower.waiting;
        upper.running = lower.running;
        upper.live = lower.live;
        upper.rank = lower.rank;
        upper.arrival = lower.arrival;
        upper.warm = lower.warm;
        upper.sent = lower.sent;
        upper.several = lower.several;
        upper.client = lower.client;
        upper.leader = lower.leader; // who fills the longer prefix fills this one
        upper.last_sent = lower.last_sent;
        upper.shown_by = lower.shown_by;
        upper.output = lower.output;
        if (lower.waiting > 0) {
            parent.children.insert(upper);
            upper.children.insert(lower);
        }
        return upper;
    }

    // A prefix that only one other continues, with nothing to tell them apart, is no node.
    void join(Node& upper) {
        if (upper.kids != 1 || !upper.parent) return;
        Node& lower = *reinterpret_cast<Node*>(upper.kids_xor);
        if (upper.warm != lower.warm || upper.sent != lower.sent || upper.leader != lower.leader ||
            upper.live != lower.live)
            return;
        Node& parent = *upper.parent;
        if (upper.waiting > 0) {
            unlink(upper);
            unlink(lower);
        }
        disown(upper);
        disown(lower);
        upper.edge.insert(upper.edge.end(), lower.edge.begin(), lower.edge.end());
        upper.edge.shrink_to_fit();
        lower.rank = upper.rank;
        lower.arrival = upper.arrival;
        if (!lower.output.known()) lower.output = upper.output;
        adopt(parent, lower, std::move(upper.edge));
        if (lower.waiting > 0) parent.children.insert(lower);
        nodes_.end(&upper);
    }

    void enqueue(Entry& entry) {
        entry.state = State::waiting;
        entry.rank = options_.match_length ? std::int64_t(entry.bytes) : entry.output;
        auto& own = entry.node->own; // of many alike the last one comes last
        own.insert(own.end(), entry);
        come(entry);
        if (entry.session && entry.session->open) {
            entry.goes_on = ++continued_;
            continuing_.emplace(entry.goes_on, &entry);
        }
        for (Node* it = entry.node; it; it = it->parent) {
            if (it->waiting == 0) {
                it->client = entry.client;
                it->several = false;
            } else {
                it->several |= it->client != entry.client;
            }
            const bool moves =
                it->waiting == 0 || entry.rank > it->rank || entry.arrival < it->arrival;
            if (moves && it->waiting > 0 && it->parent) unlink(*it);
            ++it->waiting;
            it->rank = std::max(it->rank, entry.rank);
            it->arrival = std::min(it->arrival, entry.arrival);
            if (moves && it->parent) it->parent->children.insert(it->parent->children.end(), *it);
        }
    }

    void dequeue(Entry& entry, bool sent) {
        entry.node->own.erase(entry.node->own.iterator_to(entry));
        leave(entry, sent);
        if (entry.goes_on) continuing_.erase({std::exchange(entry.goes_on, 0), &entry});
        for (Node* it = entry.node; it; it = it->parent) {
            const bool moves = it->waiting == 1 || (sent && !it->sent);
            if (moves && it->parent) unlink(*it);
            --it->waiting;
            it->sent |= sent;
            if (moves && it->waiting > 0 && it->parent) it->parent->children.insert(*it);
        }
    }

    void come(Entry& entry) {
        Client& client = clients_[entry.client];
        if (client.waiting == 0) {
            client.name = entry.client;
            client.left = options_.turn;
            client.last = all_sends_;
            turns_.push_back(&client);
        }
        entry.sends = client.sends;
        client.arrived.push_back(entry);
        client.most = std::max(client.most, ++client.waiting);
    }

    void leave(Entry& entry, bool sent) {
        const auto it = clients_.find(entry.client);
        Client& client = it->second;
        client.arrived.erase(client.arrived.iterator_to(entry));
        const bool gone = --client.waiting == 0;
        if (sent) {
            client.last = ++all_sends_;
            client.sends += entry.goes_on == 0; // who goes on overtakes nobody
        }
        if (gone || (sent && client.left <= 1)) {
            turns_.erase(std::find(turns_.begin(), turns_.end(), &client));
            client.left = options_.turn;
            if (!gone) turns_.push_back(&client);
        } else {
            client.left -= sent;
        }
        if (gone) {
            clients_.erase(it);
        } else if (client.arrived.front().sends > client.mark) {
            client.mark = client.sends;
            client.most_before = std::exchange(client.most, client.waiting);
        }
    }

    // Of the first client in turn that has one that may go: its oldest, if that was overtaken too
    // often, else its first. A turn is several requests long, so that prefixes stay together.
    Found by_turns(Point now, std::string_view& why) {
        if (options_.in_order) {
            why = "arrival";
            Entry* oldest = nullptr;
            for (Client* it : turns_)
                if (Entry& entry = it->arrived.front(); !oldest || entry.arrival < oldest->arrival)
                    oldest = &entry;
            return {oldest->node, oldest};
        }
        for (Client* it : turns_) {
            if (const auto found = overtaken(*it, now); found.node) {
                why = "overtaken";
                return found;
            }
            const auto found = turns_.size() > 1 ? first(now, it->name) : first(now);
            if (found.node || fading_) return found;
        }
        return {};
    }

    std::vector<const Entry*> as_they_came() const {
        std::vector<const Entry*> list;
        for (const Client* client : turns_)
            for (const Entry& entry : client->arrived) list.push_back(&entry);
        std::sort(list.begin(), list.end(),
                  [](const Entry* a, const Entry* b) { return a->arrival < b->arrival; });
        return list;
    }

    // The session's first turn waits in the tree, if none runs; a session without turns ends.
    void promote(Session& session) {
        if (session.running) return;
        if (session.turns.empty()) return end(session);
        const auto first = std::get<2>(*session.turns.begin());
        if (session.first == first) return;
        if (session.first) {
            Entry& late = *entry_of(session.first);
            dequeue(late, false);
            late.state = State::behind;
        }
        session.first = first;
        enqueue(*entry_of(first));
    }

    void end_silent() {
        Session& session = *expected_.begin()->second;
        expected_.erase(expected_.begin());
        end(session);
    }

    void end(Session& session) {
        if (session.open) {
            open_.erase(&session);
            growth_ = (9 * growth_ + session.bytes - session.first_bytes) / 10;
        }
        sessions_.erase(std::string(session.name));
    }

    // What sessions hold is free when those that are silent have ended.
    void wake_for_sessions() {
        if (!expected_.empty()) wake_ = std::min(wake_, expected_.begin()->first);
    }

    // No more is wanted of the request: what is known of its prompt is kept for a while.
    void forget(Entry& entry) {
        Node& leaf = *entry.node;
        if (const auto& others = leaf.parent->children; !others.empty())
            if (const auto& own = others.begin()->own; !own.empty())
                expect(*own.begin()); // is likely to be next
        entries_.take(entry);
        entries_.end(&entry);
        for (Node* it = &leaf; it; it = it->parent) --it->live;
        for (Node* it = leaf.parent; it;) {
            Node* const above = it->parent;
            join(*it);
            it = above;
        }
        if (leaf.live == 0 && leaf.kids == 0) list(leaf);
        while (idle_ > options_.remembered) drop(*oldest_);
        if (idle_ < options_.remembered || !oldest_) return;
        nodes_.expect(oldest_->key()); // is the next one to be dropped
        if (oldest_->newer) expect(*oldest_->newer);
    }

    void drop(Node& node) {
        Node& parent = *node.parent;
        unlist(node);
        std::erase(slots_, &node);
        disown(node);
        nodes_.end(&node);
        if (!parent.parent) return;
        if (parent.kids == 0 && parent.live == 0)
            list(parent);
        else
            join(parent);
    }

    void list(Node& node) {
        node.idle = true;
        node.older = newest_;
        (newest_ ? newest_->newer : oldest_) = &node;
        newest_ = &node;
        ++idle_;
    }

    void unlist(Node& node) {
        (node.older ? node.older->newer : oldest_) = node.newer;
        (node.newer ? node.newer->older : newest_) = node.older;
        node.older = node.newer = nullptr;
        node.idle = false;
        --idle_;
    }

    static std::int64_t predicted(const Node& leaf, std::int64_t most) {
        for (const Node* it = &leaf; it; it = it->parent)
            if (it->output.known())
                return most > 0 ? std::min(it->output.mean(), most) : it->output.mean();
        return most;
    }

    // The one that has waited longest of those that may go, if too many others have gone.
    Found overtaken(Client& client, Point now) {
        const auto others = options_.overtaking + options_.turn * (turns_.size() - 1);
        const bool held_back = all_sends_ - client.last >= others;
        const auto own = options_.overtaking + 2 * std::max(client.most, client.most_before);
        unsigned looked = 0;
        for (Entry& entry : client.arrived) {
            if (!held_back && client.sends - entry.sends < own) return {};
            bool waits = !may_begin(entry);
            for (const Node* it = entry.node; it && !waits; it = it->parent)
                waits = now < held(*it);
            if (!waits) return {entry.node, &entry};
            if (++looked >= look_ahead) return {};
        }
        return {};
    }

    bool may_begin(const Entry& entry) const {
        return !entry.session || entry.session->open || options_.sessions == 0 ||
               open_.size() < options_.sessions;
    }

    // Who goes on with a session, the one that has waited longest, as its cached prompt is the next
    // to be forgotten; where prefixes belong to slots, what shares one with a free slot; and else
    // the first in depth-first order.
    Found first(Point now, std::optional<std::uint32_t> client = {}) {
        passed_ = 0;
        for (const auto& [place, entry] : continuing_) {
            if (client && entry->client != *client) continue;
            bool waits = pads(*entry->node, *entry);
            if (waits) holds_ = "padding";
            for (const Node* it = entry->node; it && !waits; it = it->parent)
                waits = now < held(*it);
            if (!waits) return {entry->node, entry};
            if (++passed_ >= look_ahead) break;
        }
        passed_ = 0;
        Node* kin = nullptr;
        for (Node* it : slots_) {
            while (it && it->waiting == 0) it = it->parent;
            if (it && it->bytes >= std::max(options_.shared_bytes, block) &&
                (!kin || it->bytes >= kin->bytes))
                kin = it;
        }
        if (kin)
            if (const auto found = find(*kin, now, false, client); found.node) return found;
        return find(root_, now, false, client);
    }

    // The first in depth-first order that may go.
    Found find(Node& node, Point now, bool any, std::optional<std::uint32_t> client = {}) {
        if (node.waiting == 0 || (client && !node.several && node.client != *client)) return {};
        if (const auto until = held(node); !any && now < until) {
            wake_ = std::min(wake_, until);
            passed_ += !node.leader;
            if (holds_.empty()) holds_ = node.leader ? "leader" : "leaders";
            return {};
        }
        bool held_back = false;
        for (Entry& entry : node.own) {
            if (client && entry.client != *client) continue;
            const std::string_view why = any                    ? ""
                                         : !may_begin(entry)    ? "sessions"
                                         : pads(node, entry)    ? "padding"
                                         : spreads(node, entry) ? "slot"
                                         : crowds(node)         ? "leader"
                                                                : "";
            if (why.empty()) return {&node, &entry};
            if (holds_ != "sessions") holds_ = why;
            held_back = true;
        }
        passed_ += held_back;
        if (!node.own.empty()) return {};
        // A slot keeps its prefix: what shares it with a running one would fill another slot.
        const bool slots = options_.release == Release::slot;
        for (const bool busy : {false, true}) {
            for (Node& it : node.children) {
                if (slots && (it.running > 0) != busy) continue;
                if (const Found found = find(it, now, any, client); found.node) return found;
                if (passed_ >= look_ahead) return {};
            }
            if (!slots) break;
        }
        if (!any && fades(node)) {
            fading_ = true;
            passed_ = look_ahead;
        }
        return {};
    }

    // The server has it, what waits below is held back so as not to be padded, and soon others will
    // have pushed it out.
    bool fades(const Node& node) const {
        return options_.kept > 0 && holds_ == "padding" && node.warm && node.waiting > 0 &&
               node.parent && own_bytes(node) >= options_.shared_bytes &&
               sends_ - node.last_sent >= options_.kept;
    }

    // Until when what waits below is held back, if nothing happens before.
    Point held(const Node& node) const {
        if (node.leader && worth_sharing(node))
            return entry_of(node.leader)->sent + options_.patience;
        const auto places = options_.leaders;
        if (places > 0 && leading_.size() >= places && begins(node))
            return std::prev(leading_.end(), places)->first + options_.patience;
        return Point::min();
    }

    bool shown_at_once() const {
        return options_.release == Release::at_once || options_.release == Release::slot;
    }

    // Long, and not in the server's cache.
    bool worth_sharing(const Node& node) const {
        if (shown_at_once() || node.warm) return false;
        const Node* above = node.parent;
        while (above && above->parent && !above->warm) above = above->parent;
        const auto bytes = node.bytes - (above ? above->bytes : 0);
        return bytes > 0 && bytes / block >= options_.shared_bytes / block;
    }

    // A request through here would make the others below wait for it.
    bool begins(const Node& node) const {
        return !node.leader && node.waiting > 1 && worth_sharing(node);
    }

    static std::size_t own_bytes(const Node& node) {
        return node.bytes - (node.parent ? node.parent->bytes : 0);
    }

    static std::size_t answer_bytes(std::int64_t tokens) { return 4 * std::size_t(tokens); }

    // The options count four bytes a token.
    std::size_t cache_bytes() const {
        if (seen_tokens_ == 0) return options_.cache_bytes;
        const double each = std::clamp(seen_bytes_ / seen_tokens_, 1.0, 8.0);
        return std::size_t(double(options_.cache_bytes) * each / 4);
    }

    // The server's cache could not hold it beside what runs; who goes on with a session may.
    bool too_much(const Found& found) const {
        if (options_.cache_bytes == 0) return false;
        const Entry& entry = *found.entry;
        if (entry.session && entry.session->open) return false;
        std::size_t more =
            answer_bytes(predicted(*entry.node, entry.most)) + (entry.session ? growth_ : 0);
        for (const Node* it = found.node; it && it->running == 0; it = it->parent)
            more += own_bytes(*it);
        // Between their turns sessions hold what they have, and they will grow.
        for (const Session* it : open_) {
            const auto grown = it->bytes - it->first_bytes;
            more += it->own + (growth_ > grown ? growth_ - grown : 0);
        }
        // Sessions do not all reach their full length at one time.
        const auto most = entry.session ? cache_bytes() / 10 * 11 : cache_bytes();
        return resident_ + more > most;
    }

    // To fill one more slot with what others have costs more than they will take for all of it.
    bool spreads(const Node& leaf, const Entry& entry) const {
        if (options_.release != Release::slot || options_.in_order || entry.session) return false;
        const Node* it = &leaf;
        while (it && it->running == 0) it = it->parent;
        if (!it || it->bytes < std::max(options_.shared_bytes, block)) return false;
        for (const Node* slot : slots_)
            for (const Node* up = slot; up; up = up->parent)
                if (up == it) return false; // a free one has it, too
        const auto output = predicted(*entry.node, entry.most);
        const auto each = double(entry.bytes - std::min(it->bytes, entry.bytes)) / 4 +
                          4 * double(output > 0 ? output : 100);
        return each * it->waiting < double(it->running) * double(it->bytes) / 2;
    }

    static Cold cold(const Node& leaf, const Entry& entry) {
        const Node* it = &leaf;
        while (it->parent && !it->warm) it = it->parent;
        const auto warm = it->warm ? it->bytes : 0;
        if (warm >= entry.front) return {entry.bytes - warm, 0};
        return {entry.front - warm, entry.bytes - entry.front};
    }

    // A prefill batch takes as long as if each of its prompts were its longest: those of like
    // length go together.
    bool pads(const Node& leaf, const Entry& entry) const {
        if (options_.padding_bytes == 0 || options_.in_order || filling_.empty()) return false;
        auto most = cold(leaf, entry);
        auto sum = most.first + most.second;
        std::size_t twice = most.second > 0;
        for (const auto& it : filling_) {
            most = {std::max(most.first, it.first), std::max(most.second, it.second)};
            sum += it.first + it.second;
            twice += it.second > 0;
        }
        const auto padded = most.first * (filling_.size() + 1) + most.second * twice;
        // What goes on is short, and its prompt leaves the cache before long.
        return padded > sum + sum / 10 + (entry.goes_on ? 2 : 1) * options_.padding_bytes;
    }
    // Those who wait for a leader need places when it has filled the cache: soon others push it
    // out.
    bool crowds(const Node& leaf) const {
        if (options_.leaders == 0 || options_.in_order) return false;
        if (!leading_.empty()) return room_ <= followers_;
        std::size_t followers = 0;
        for (const Node* it = &leaf; it; it = it->parent)
            if (begins(*it)) followers = it->waiting - 1;
        return room_ <= std::min(followers, (room_ + running_) / 4);
    }

    Pick send(Entry& entry, Node& leaf, Point now, std::string_view why) {
        const auto id = entry.id;
        entries_.expect(entry.key()); // its progress comes next
        Pick pick{id, entry.bytes, 0, 0};
        if (leaf.parent->bytes > 0) {
            pick.node = leaf.parent->edge.back();
            pick.node_bytes = leaf.parent->bytes;
        }
        for (Node* it = &leaf; it && it->parent; it = it->parent)
            if (it->sent) {
                pick.maximum_bytes = std::min(it->bytes + block - 1, entry.bytes);
                break;
            }
        for (Node* it = &leaf; it; it = it->parent)
            if (it->warm) {
                pick.expected_bytes = it->bytes;
                if (it->bytes > 0) pick.waited_for = it->shown_by;
                break;
            }
        entry.cold = cold(leaf, entry);
        bool leads = false; // others wait for what it fills the cache with
        for (Node* it = &leaf; it; it = it->parent)
            if (begins(*it)) {
                leads = true;
                entry.followers = it->waiting - 1;
            }
        if (leads && entry.streamed) {
            leading_.emplace(now, id);
            followers_ += entry.followers;
        }
        pick.why = !why.empty()                                                     ? why
                   : leads                                                          ? "leader"
                   : *pick.expected_bytes >= std::max(options_.shared_bytes, block) ? "follower"
                                                                                    : "alone";
        for (Node* it = &leaf; it; it = it->parent) {
            it->last_sent = sends_;
            if (shown_at_once()) it->warm = true;
            if (it->warm || it->leader) continue;
            it->leader = id;
        }
        sends_ += entry.goes_on == 0;
        dequeue(entry, true);
        if (const auto& others = leaf.parent->children; !others.empty())
            expect(*others.begin()); // is likely to be next
        entry.state = State::running;
        entry.sent = now;
        entry.output = predicted(leaf, entry.most);
        if (!slots_.empty()) slots_.erase(slot_of(leaf));
        if (entry.streamed && options_.padding_bytes > 0) {
            entry.filling = true;
            filling_.push_back(entry.cold);
        }
        resident_ += answer_bytes(entry.output);
        for (Node* it = &leaf; it; it = it->parent)
            if (it->running++ == 0) resident_ += own_bytes(*it);
        if (entry.session) {
            auto& session = *entry.session;
            session.turns.erase({entry.turn, entry.arrival, id});
            session.first = 0;
            session.running = id;
            session.own = 0;
            session.bytes = entry.bytes + answer_bytes(entry.output);
            if (!std::exchange(session.open, true)) {
                open_.insert(&session);
                session.first_bytes = entry.bytes;
            }
            session.bytes = std::max(session.bytes, session.first_bytes);
        }
        ++running_;
        return pick;
    }

    // The free slot that it gets: that has most of it, else the one that was used the longest ago.
    std::vector<Node*>::iterator slot_of(const Node& leaf) {
        for (const Node* it = &leaf; it->bytes > 0; it = it->parent)
            for (auto slot = slots_.begin(); slot != slots_.end(); ++slot)
                for (const Node* up = *slot; up && up->bytes >= it->bytes; up = up->parent)
                    if (up == it) return slot;
        return slots_.begin();
    }

    void plan(std::vector<Planned>& list, const Node& node, const Node*& last) const {
        for (const Entry& entry : node.own) {
            plan(list, entry, last);
            if (!entry.session) continue;
            for (const auto& [turn, came, next] : entry.session->turns)
                if (next != entry.id) {
                    plan(list, *entry_of(next), last);
                    list.back().continues = true;
                }
        }
        for (const Node& it : node.children) plan(list, it, last);
    }

    static void plan(std::vector<Planned>& list, const Entry& entry, const Node*& last) {
        const auto depth = [](const Node* it) {
            unsigned count = 0;
            for (; it; it = it->parent) ++count;
            return count;
        };
        const Node* a = entry.node;
        const Node* b = last;
        auto below = depth(a), above = depth(b);
        for (; below > above; --below) a = a->parent;
        for (; above > below; --above) b = b->parent;
        for (; a != b; b = b->parent) a = a->parent;
        list.push_back(
            {entry.id, entry.bytes, b ? std::min(b->bytes, entry.bytes) : 0, entry.output});
        last = entry.node;
    }

    Options options_;
    detail::Pool pool_; // of all that follows
    Node root_{pool_};
    Table<Node> nodes_{pool_};
    Node *oldest_ = nullptr, *newest_ = nullptr; // of the idle nodes
    std::size_t idle_ = 0;
    Table<Entry> entries_{pool_};
    std::unordered_map<std::string, Session> sessions_;            // that have not ended
    std::vector<Cold> filling_;                                    // of those without text
    std::size_t room_ = std::numeric_limits<std::uint32_t>::max(); // places that are free
    std::set<std::pair<std::uint64_t, Entry*>> continuing_;        // waiting turns of open sessions
    std::vector<Node*> slots_;                // what free ones hold, the oldest first
    double seen_bytes_ = 0, seen_tokens_ = 0; // of the prompts that were answered
    std::set<const Session*> open_;
    std::set<std::pair<Point, Session*>> expected_; // open ones that have nothing here
    std::map<std::uint32_t, Client> clients_;
    std::vector<Client*> turns_; // whose it is, and then
    std::size_t growth_ = 6000;  // bytes by which a session grows: some 1,500 tokens, then as seen
    std::vector<Block> path_;    // of the prompt that is read
    std::uint64_t arrivals_ = 0, continued_ = 0, all_sends_ = 0;
    std::uint64_t sends_ = 0; // of those that went on with nothing
    std::size_t running_ = 0;
    std::size_t resident_ = 0;                      // bytes of what runs, shared ones once
    std::size_t followers_ = 0;                     // of those
    std::set<std::pair<Point, RequestId>> leading_; // who fills a shared prefix, since when
    Point wake_ = Point::max();
    std::string_view holds_;
    unsigned passed_ = 0; // by the last search
    bool fading_ = false; // nobody is to push out what the server has
};

} // namespace evalrt

#endif
