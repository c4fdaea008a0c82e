// What a journal decides: who is served, who is asked. No file, no clock.
#ifndef EVALRT_DETAIL_JOURNAL_CORE_HPP
#define EVALRT_DETAIL_JOURNAL_CORE_HPP

#include "evalrt/error.hpp"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace evalrt::detail {

/// The first half of SHA-256, over each part behind its length: parts cannot run into each other.
struct JournalKey {
    std::uint64_t high = 0, low = 0;
    bool operator==(const JournalKey&) const = default;
};
JournalKey journal_key(std::string_view identity, std::string_view endpoint, std::string_view body);

struct JournalKeyHash {
    std::size_t operator()(const JournalKey& key) const { return std::size_t(key.low); }
};
using JournalKeys = std::unordered_set<JournalKey, JournalKeyHash>;

/// How often each key has come. One table without nodes: in a first run every key is new.
class JournalCounts {
public:
    std::uint32_t next(JournalKey key) { // so often before
        if (2 * ++count_ > slots_.size()) grow();
        Slot& slot = slots_[place(key)];
        if (slot.times > 0) --count_;
        slot.key = key;
        return slot.times++;
    }

private:
    struct Slot {
        JournalKey key;
        std::uint32_t times = 0; // 0: free
    };

    std::size_t place(JournalKey key) const { // where it is, or would be
        std::size_t i = key.low;              // of a hash: any bits do
        for (;; ++i) {
            const Slot& slot = slots_[i &= slots_.size() - 1];
            if (slot.times == 0 || slot.key == key) return i;
        }
    }

    void grow() {
        const auto old = std::exchange(slots_, std::vector<Slot>(2 * slots_.size()));
        for (const Slot& slot : old)
            if (slot.times > 0) slots_[place(slot.key)] = slot;
    }

    std::vector<Slot> slots_ = std::vector<Slot>(64); // a power of two
    std::size_t count_ = 0;
};

/// What the file knows of an item. Rows of the file have ids from 1.
struct JournalEntry {
    std::int64_t item = 0;       ///< of this run; 0: this run has not asked it
    std::int64_t outcome = 0;    ///< of this run, the latest; 0: none
    std::optional<Errc> failure; ///< of that outcome
    std::uint32_t name = 0;      ///< a hash of the item's name; 0: not known
    std::int64_t shared = 0; ///< an answer of another run that may be served to this one; 0: none
};

inline std::uint32_t journal_name(std::string_view name) {
    return std::uint32_t(std::hash<std::string_view>()(name)) | 1;
}

struct JournalDecision {
    std::uint32_t occurrence = 0;
    std::int64_t item = 0;         ///< 0: new to this run
    std::int64_t outcome = 0;      ///< serve this one; 0: ask
    JournalEntry* entry = nullptr; ///< of next(); stays where it is
};

class JournalIndex {
public:
    explicit JournalIndex(std::vector<Errc> final_failures = {})
        : final_failures_(std::move(final_failures)) {}

    void reserve(std::size_t items) { entries_.reserve(items); }
    std::size_t size() const { return entries_.size(); }

    /// An item that goes by its name: where a run was joined from parts, the n-th equal request
    /// need not be the n-th item.
    static JournalKey named(JournalKey key, std::string_view name) {
        return journal_key("name", name, {reinterpret_cast<const char*>(&key), sizeof key});
    }
    /// `names`: of those that do. Other requests are counted as ever. `all`: some items are
    /// missing.
    void by_name(bool all, JournalKeys names) {
        all_by_name_ = all;
        names_ = std::move(names);
    }
    bool all_by_name() const { return all_by_name_; }

    /// What stands for a request's key in the calls below.
    JournalKey place(JournalKey key, std::string_view name) const {
        if (names_.empty() || name.empty()) return key;
        const auto its = named(key, name);
        return names_.contains(its) ? its : key;
    }

    JournalEntry& entry(JournalKey key, std::uint32_t occurrence) {
        return entries_[{key, occurrence}].entry;
    }

    /// The next occurrence of this request.
    JournalDecision next(JournalKey key) {
        auto* slot = &entries_[{key, 0}];
        const auto occurrence = slot->asked++;
        if (occurrence > 0) slot = &entries_[{key, occurrence}];
        auto decision = judge(slot->entry, occurrence);
        decision.entry = &slot->entry;
        return decision;
    }

    /// Takes over what was counted elsewhere; `asked`: it counts for next() as well.
    JournalEntry& count(JournalKey key, std::uint32_t occurrence, bool asked) {
        if (asked) ++entries_[{key, 0}].asked;
        return entries_[{key, occurrence}].entry;
    }

    /// What next() would say for this occurrence.
    JournalDecision decide(JournalKey key, std::uint32_t occurrence) const {
        const auto it = entries_.find({key, occurrence});
        return judge(it == entries_.end() ? JournalEntry() : it->second.entry, occurrence);
    }

    /// Items of this run that nobody has asked for this time.
    std::vector<std::int64_t> unasked() const {
        std::vector<std::int64_t> items;
        for (const auto& [id, slot] : entries_) {
            const auto first = entries_.find({id.key, 0});
            const auto asked = first == entries_.end() ? 0 : first->second.asked;
            if (slot.entry.item > 0 && id.occurrence >= asked) items.push_back(slot.entry.item);
        }
        std::sort(items.begin(), items.end());
        return items;
    }

    void rewind() {
        for (auto& [id, slot] : entries_) slot.asked = 0;
    }

private:
    JournalDecision judge(const JournalEntry& entry, std::uint32_t occurrence) const {
        JournalDecision decision;
        decision.occurrence = occurrence;
        decision.item = entry.item;
        const bool final =
            !entry.failure || std::find(final_failures_.begin(), final_failures_.end(),
                                        *entry.failure) != final_failures_.end();
        decision.outcome = entry.outcome > 0 && final ? entry.outcome : entry.shared;
        return decision;
    }

    struct Id {
        JournalKey key;
        std::uint32_t occurrence;
        bool operator==(const Id&) const = default;
    };
    struct Hash {
        std::size_t operator()(const Id& id) const {
            return std::size_t(id.key.low ^ (id.occurrence * 0x9E3779B97F4A7C15u));
        }
    };
    struct Slot {
        JournalEntry entry;
        std::uint32_t asked = 0; // of occurrence 0: how often the request has come
    };
    std::unordered_map<Id, Slot, Hash> entries_;
    std::vector<Errc> final_failures_;
    bool all_by_name_ = false;
    JournalKeys names_;
};

/// "model: it was \"a\", it is \"b\"; ..."; empty: the same.
inline std::string
journal_difference(const std::vector<std::pair<std::string, std::string>>& before,
                   const std::vector<std::pair<std::string, std::string>>& now) {
    std::string text;
    const auto value = [](const auto& fields, std::string_view name) -> const std::string* {
        for (const auto& [key, it] : fields)
            if (key == name) return &it;
        return nullptr;
    };
    const auto show = [](const std::string* it) { return it ? "\"" + *it + "\"" : "not set"; };
    const auto compare = [&](std::string_view name) {
        const auto *was = value(before, name), *is = value(now, name);
        if (was && is && *was == *is) return;
        if (!text.empty()) text += "; ";
        text.append(name).append(" was ").append(show(was)).append(" and is ").append(show(is));
    };
    for (const auto& [name, it] : now) compare(name);
    for (const auto& [name, it] : before)
        if (!value(now, name)) compare(name);
    return text;
}

} // namespace evalrt::detail

#endif
