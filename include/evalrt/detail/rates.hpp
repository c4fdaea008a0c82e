// Rates: how fast the server was seen to prefill and to decode. No I/O, no clock of its own.
#ifndef EVALRT_DETAIL_RATES_HPP
#define EVALRT_DETAIL_RATES_HPP

#include "evalrt/request.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <vector>

namespace evalrt::detail {

/// The best that a run itself has shown, to compute from it how fast the whole could have been.
/// Prefill: the tokens that were not cached of those requests that were computed together, over the
/// time from the first one's sending to where the last one is computed. Decoding: pieces of text
/// over a second, in which nothing waited for its first if there was such a one, at the context
/// that the run's pieces had on average: attention reads the context for each token, and where that
/// is most of a step (short prompts' rates are out of reach of long ones) the best second of all
/// would promise too much.
/// Other programs on the machine slow down both, and with them the bound.
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

    /// Of one whose prompt, of about `tokens`, is computed.
    void first_text(double tokens, Point now) {
        flow(now);
        --hidden_;
        ++decoding_;
        held_ += tokens;
        text(now);
    }

    void text(Point now) {
        flow(now);
        const double context = held_ / decoding_;
        if (all_decode()) pure_.add(context);
        mixed_.add(context);
        ++pieces_;
        contexts_ += context;
        held_ += 1;
    }

    /// `held`: the tokens of its prompt and the pieces of its text; nothing: it had no text.
    /// `cold`: its prompt tokens that were not cached; nothing: it failed, or that is not known.
    void ended(Burst burst, bool was_computed, std::optional<double> held,
               std::optional<std::int64_t> cold, Point now) {
        if (!was_computed) computed(now);
        flow(now);
        --(held ? decoding_ : hidden_);
        held_ -= held.value_or(0);
        const auto it = bursts_.find(burst);
        if (it == bursts_.end()) return;
        auto& of = it->second;
        of.good &= was_computed && cold;
        of.tokens += cold.value_or(0);
        if (--of.members > 0) return;
        const std::chrono::duration<double> passed = of.end - of.begin;
        if (of.good && of.tokens >= enough_tokens && passed >= shortest)
            prefill_ = std::max(prefill_, double(of.tokens) / passed.count());
        bursts_.erase(it);
    }

    double prefill() const { return prefill_; } ///< tokens a second; 0: not seen
    /// Pieces a second; 0: not seen.
    double decode() const {
        if (hides_) return 0;
        if (seconds_.empty()) return pure_.rate();
        return 1 / piece_seconds(contexts_ / double(pieces_));
    }
    std::uint64_t pieces() const { return pieces_; }

    /// Text is not shown as it is decoded, such as a call of a tool: pieces do not tell a rate.
    void hides() { hides_ = true; }

private:
    static constexpr std::int64_t enough_tokens = 200;
    static constexpr std::uint64_t enough_pieces = 16;
    static constexpr std::chrono::duration<double> whole{1}, shortest{0.01};

    struct Group {
        Point begin{}, end{};
        unsigned members = 0; // that have not ended
        std::int64_t tokens = 0;
        bool good = true;
    };

    bool all_decode() const { return waiting_ == 0 && hidden_ == 0 && decoding_ > 0; }

    struct Window {
        std::chrono::duration<double> time{};
        std::uint64_t pieces = 0;
        double contexts = 0; // summed up over them

        void add(double context) {
            ++pieces;
            contexts += context;
        }
        double rate() const { // 0: too short to tell
            return pieces < enough_pieces || time < shortest ? 0 : double(pieces) / time.count();
        }
    };

    void flow(Point now) {
        if (decoding_ > 0) pass(mixed_, now);
        if (all_decode()) pass(pure_, now);
        since_ = now;
    }

    void pass(Window& window, Point now) {
        window.time += now - since_;
        if (window.time < whole || window.pieces < enough_pieces) return;
        const Second it{window.contexts / double(window.pieces), 1 / window.rate()};
        auto& best = seconds_.try_emplace(std::int64_t(it.context) / 32, it).first->second;
        if (it.each < best.each) best = it;
        window = {};
    }

    // The least time of a piece at that context: what a longer one took is enough for a shorter
    // one, too, and as the time grows in proportion to the context, so is what lies between two.
    double piece_seconds(double context) const {
        std::vector<Second> hull; // the lower one, longest context first
        for (auto it = seconds_.rbegin(); it != seconds_.rend(); ++it) {
            auto next = it->second;
            if (!hull.empty()) next.each = std::min(next.each, hull.back().each);
            while (hull.size() > 1 && at(next, hull[hull.size() - 2], hull.back().context) <=
                                          hull.back().each)
                hull.pop_back();
            hull.push_back(next);
        }
        for (std::size_t i = 1; i < hull.size(); ++i)
            if (hull[i].context <= context)
                return at(hull[i], hull[i - 1], std::min(context, hull[i - 1].context));
        return hull.back().each;
    }

    struct Second {
        double context; // of a piece, in tokens
        double each;    // seconds a piece
    };

    // On the line through both.
    static double at(const Second& a, const Second& b, double context) {
        return a.each + (b.each - a.each) * (context - a.context) / (b.context - a.context);
    }

    unsigned waiting_ = 0, hidden_ = 0, decoding_ = 0; // not computed; no text yet; with text
    Burst last_ = 0;
    std::map<Burst, Group> bursts_;
    Point since_{};
    Window pure_, mixed_; // of decoding alone; of all time in which something decodes
    std::uint64_t pieces_ = 0;
    double held_ = 0;           // tokens of those with text
    double contexts_ = 0;       // over all pieces
    std::map<std::int64_t, Second> seconds_; // the fastest, by context
    double prefill_ = 0;
    bool hides_ = false;
};

} // namespace evalrt::detail

#endif
