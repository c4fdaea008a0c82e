// Conversations: which requests are turns of one, told by the history that each brings along.
#ifndef EVALRT_LIB_CONVERSATIONS_HPP
#define EVALRT_LIB_CONVERSATIONS_HPP

#include "evalrt/request.hpp"
#include "json_text.hpp"
#include "text_hash.hpp"

#include <algorithm>
#include <deque>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace evalrt::detail {

/// A request goes on with an earlier one if its messages are those of the earlier one, a message of
/// the assistant, and more. Each request is gone on with once: the second one that does so is a
/// branch, and a conversation of its own. Where several have asked the same, the one whose answer
/// that message is. No I/O; time is passed in.
class Conversations {
public:
    using Point = Clock::time_point;

    struct Turn {
        std::uint64_t conversation = 0;     ///< its number; 0: the request has no messages
        int turn = 0;                       ///< 0: it begins one, as far as is known
        std::chrono::milliseconds pause{0}; ///< from its answer to the next turn, at most, usually
        std::uint64_t number = 0, before = 0; ///< of the request and of the one it goes on with
    };

    /// `remembered`: the last requests that may be gone on with.
    explicit Conversations(std::size_t remembered = 4096) : remembered_(remembered) {}

    /// A request comes. `body` is valid JSON, an object.
    Turn asked(std::string_view endpoint, std::string_view body, Point now) {
        Turn turn;
        members(body, members_);
        const auto messages = member(members_, "messages").value_or("");
        if (!messages.starts_with('[')) return turn;
        std::uint64_t history =
            mixed(hash(endpoint), content(member(members_, "system").value_or("null")));
        struct Said {
            std::uint64_t before; // of all messages before it
            std::string_view message;
        };
        std::vector<Said> said; // by the assistant
        std::size_t count = 0;
        for (const auto message : elements(messages)) {
            members(message.starts_with('{') ? message : "{}", members_);
            if (count++ > 0 && member(members_, "role") == "\"assistant\"")
                said.push_back({history, message});
            history = mixed(history, of_message(message, members_));
        }
        if (count == 0) return turn;
        for (auto it = said.rbegin(); it != said.rend(); ++it)
            if (auto* earlier = gone_on_with(it->before, it->message)) {
                earlier->open = false;
                turn.conversation = earlier->conversation;
                turn.turn = earlier->turn + 1;
                turn.before = earlier->number;
                const auto gap = std::min<Clock::duration>(now - earlier->answered, most_pause);
                gap_ = gap_ ? *gap_ + (gap - *gap_) / 8 : gap;
                break;
            }
        if (turn.turn == 0) turn.conversation = ++last_;
        turn.pause = std::clamp(std::chrono::duration_cast<std::chrono::milliseconds>(
                                    2 * gap_.value_or(Clock::duration())),
                                least_pause, most_pause);
        turn.number = ++last_number_;
        seen_.push_back({turn.number, history, turn.conversation, turn.turn, {}, 0, 0, true});
        auto& chain = chains_[history];
        if (chain.first == 0)
            chain.first = turn.number;
        else
            find(chain.last)->next = turn.number;
        chain.last = turn.number;
        if (seen_.size() > remembered_) forget_first();
        return turn;
    }

    /// It has been answered with this text.
    void answered(const Turn& turn, std::string_view text, Point now) {
        if (auto* it = find(turn.number)) {
            it->answered = now;
            it->text = text_hash(text);
        }
    }

    /// It has ended otherwise: the turn before may be gone on with once more.
    void failed(const Turn& turn) {
        if (auto* it = find(turn.number)) it->open = false;
        if (auto* it = find(turn.before)) it->open = true;
    }

private:
    static constexpr std::chrono::milliseconds least_pause{100}, most_pause{10'000};

    struct Seen {
        std::uint64_t number, history, conversation;
        int turn;
        Point answered; // none: not yet
        std::uint64_t text;
        std::uint64_t next; // that asked the same; 0: none so far
        bool open;          // may be gone on with
    };
    struct Chain { // of those that asked the same, in their order: there may be thousands
        std::uint64_t first = 0, last = 0;
    };

    static std::uint64_t hash(std::string_view text) { return text_hash(text); }

    static std::vector<Member> fields(std::string_view value) {
        return value.starts_with('{') ? members(value) : std::vector<Member>();
    }

    // Marks for a cache move from turn to turn, and make a text a list of one.
    static std::uint64_t of_message(std::string_view whole, const std::vector<Member>& parts) {
        if (parts.empty()) return hash(whole);
        std::uint64_t sum = 0; // in any order
        for (const auto& it : parts)
            if (it.key != "cache_control")
                sum +=
                    mixed(hash(it.key), it.key == "content" ? content(it.value) : hash(it.value));
        return sum;
    }
    static std::uint64_t content(std::string_view value) {
        if (!value.starts_with('[')) return mixed(1, hash(value));
        std::uint64_t sum = 1;
        for (const auto part : elements(value)) {
            const auto list = fields(part);
            const bool text = member(list, "type") == "\"text\"";
            sum =
                mixed(sum, text ? hash(member(list, "text").value_or("")) : of_message(part, list));
        }
        return sum;
    }

    static std::string text_of(std::string_view message) {
        const auto value = member(fields(message), "content").value_or("");
        if (!value.starts_with('[')) return from_json_string(value);
        std::string text;
        for (const auto part : elements(value))
            text += from_json_string(member(fields(part), "text").value_or(""));
        return text;
    }

    Seen* gone_on_with(std::uint64_t history, std::string_view message) {
        const auto chain = chains_.find(history);
        if (chain == chains_.end()) return nullptr;
        const auto text = hash(text_of(message));
        Seen* found = nullptr;
        for (auto* seen = find(chain->second.first); seen; seen = find(seen->next)) {
            if (!seen->open || seen->answered == Point{}) continue;
            if (seen->text == text) return seen;
            if (!found) found = seen; // clients cut answers, and leave reasoning out
        }
        return found;
    }

    Seen* find(std::uint64_t number) {
        if (seen_.empty() || number < seen_.front().number) return nullptr;
        return &seen_[std::size_t(number - seen_.front().number)];
    }

    void forget_first() { // which is the first of its chain, too
        const auto& it = seen_.front();
        const auto chain = chains_.find(it.history);
        if (it.next == 0)
            chains_.erase(chain);
        else
            chain->second.first = it.next;
        seen_.pop_front();
    }

    const std::size_t remembered_;
    std::vector<Member> members_; // of what is looked at: its memory serves all requests
    std::deque<Seen> seen_;       // one number after the other
    std::unordered_map<std::uint64_t, Chain> chains_; // by their history
    std::optional<Clock::duration> gap_;              // between an answer and the next turn
    std::uint64_t last_ = 0, last_number_ = 0;
};

} // namespace evalrt::detail

#endif
