// Rates: how fast the server was seen to prefill and to decode. No I/O, no clock of its own.
#ifndef EVALRT_DETAIL_RATES_HPP
#define EVALRT_DETAIL_RATES_HPP

#include "evalrt/request.hpp"

#include <algorithm>
#include <map>

namespace evalrt::detail {

/// The best that a run itself has shown, to compute from it how fast the whole could have been.
/// Prefill: the tokens that were not cached of those requests that were computed together, over the
/// time from the first one's sending to where the last one is computed. Decoding: pieces of text
/// over a second in which nothing waited for its first. Other programs on the machine slow down
/// both, and with them the bound.
class Rates {
public:
    using Point = Clock::time_point;
    using Burst = std::uint64_t; ///< those that wait together

    Burst sent(Point now) {
        flow(now);
        if (waiting_++ == 0) bursts_[++last_].begin = now;
        ++bursts_[last_].members;
        return last_;
    }

    /// The prompt, as the server says, or as its first text shows.
    void computed(Point now) {
        flow(now);
        ++hidden_;
        if (--waiting_ == 0) bursts_[last_].end = now;
    }

    /// Of one whose prompt is computed.
    void first_text(Point now) {
        flow(now);
        --hidden_;
        ++decoding_;
        text(now);
    }

    void text(Point now) {
        flow(now);
        if (all_decode()) ++window_pieces_;
        ++pieces_;
    }

    /// `cold`: its prompt tokens that were not cached; nothing: it failed, or that is not known.
    void ended(Burst burst, bool was_computed, bool had_text, std::optional<std::int64_t> cold,
               Point now) {
        if (!was_computed) computed(now);
        flow(now);
        --(had_text ? decoding_ : hidden_);
        const auto it = bursts_.find(burst);
        if (it == bursts_.end()) return;
        auto& of = it->second;
        of.good &= was_computed && cold;
        of.tokens += cold.value_or(0);
        if (--of.members > 0) return;
        const std::chrono::duration<double> passed = of.end - of.begin;
        if (of.good && of.tokens >= enough_tokens && passed.count() > 0)
            prefill_ = std::max(prefill_, double(of.tokens) / passed.count());
        bursts_.erase(it);
    }

    double prefill() const { return prefill_; } ///< tokens a second; 0: not seen
    double decode() const {                     ///< pieces a second; 0: not seen
        if (hides_) return 0;
        if (decode_ > 0 || window_pieces_ < enough_pieces || window_.count() <= 0) return decode_;
        return double(window_pieces_) / window_.count();
    }
    std::uint64_t pieces() const { return pieces_; }

    /// Text is not shown as it is decoded, such as a call of a tool: pieces do not tell a rate.
    void hides() { hides_ = true; }

private:
    static constexpr std::int64_t enough_tokens = 200;
    static constexpr std::uint64_t enough_pieces = 16;
    static constexpr std::chrono::duration<double> whole{1};

    struct Group {
        Point begin{}, end{};
        unsigned members = 0; // that have not ended
        std::int64_t tokens = 0;
        bool good = true;
    };

    bool all_decode() const { return waiting_ == 0 && hidden_ == 0 && decoding_ > 0; }

    // Time in which all that runs was decoding.
    void flow(Point now) {
        if (all_decode()) {
            window_ += now - since_;
            if (window_ >= whole && window_pieces_ >= enough_pieces) {
                decode_ = std::max(decode_, double(window_pieces_) / window_.count());
                window_ = {};
                window_pieces_ = 0;
            }
        }
        since_ = now;
    }

    unsigned waiting_ = 0, hidden_ = 0, decoding_ = 0; // not computed; no text yet; with text
    Burst last_ = 0;
    std::map<Burst, Group> bursts_;
    Point since_{};
    std::chrono::duration<double> window_{};
    std::uint64_t window_pieces_ = 0, pieces_ = 0;
    double prefill_ = 0, decode_ = 0;
    bool hides_ = false;
};

} // namespace evalrt::detail

#endif
