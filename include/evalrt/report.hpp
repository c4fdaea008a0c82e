// Report: the figures of a run.
#ifndef EVALRT_REPORT_HPP
#define EVALRT_REPORT_HPP

#include "evalrt/backend_row.hpp"
#include "evalrt/detail/answer_versions.hpp"
#include "evalrt/detail/scheduler_core.hpp"
#include "evalrt/request.hpp"

#include <array>
#include <map>
#include <string>
#include <vector>

namespace evalrt {

namespace detail {

/// Quantiles of a stream of positive numbers in constant memory, within 1 %.
class Quantiles {
public:
    void add(double value);
    std::optional<double> at(double share) const; ///< nothing: no number yet

private:
    static constexpr double lowest = 0.001, growth = 1.02;
    std::array<std::uint32_t, 1300> buckets_{};
    std::uint64_t count_ = 0;
};

} // namespace detail

/// What a re-run of a sample, one at a time, gave.
struct Parity {
    std::uint64_t checked = 0, identical = 0;
    std::vector<std::string> different; ///< ids

    void add(std::string_view id, bool same);
};

/// What of an answer the other must have, too: text, tool calls, reasoning; not ids and times.
std::string parity_text(const Response& response);

/// Collects Responses; memory does not grow with their number. A figure that was not measured is
/// null in the JSON, never 0.
class Report {
public:
    std::string backend, model, order;
    std::optional<std::string> server_version; ///< nothing: what the first answer says of it
    unsigned max_in_flight = 0;
    std::uint64_t not_run = 0;
    std::uint64_t server_restarts = 0;
    std::string server_output; ///< the end of what the server wrote before it ended or hung
    std::optional<Parity> parity;

    /// What the server's answers leave out, and so cannot be reported.
    void describe(const BackendRow& row);

    void add(const Response& response);
    void note(std::string_view text); ///< the same text twice is one note

    std::uint64_t answered() const { return answered_; }
    std::uint64_t failed() const { return failed_; }
    std::uint64_t from_journal() const { return from_journal_; } ///< of the answered
    std::uint64_t repeated() const { return repeated_; }         ///< of the answered
    const std::map<Errc, std::uint64_t>& failures() const { return failures_; }

    /// That servers of several versions have answered, which the summary notes; empty: they have
    /// not.
    std::string versions() const { return versions_.note(); }

    /// "prefix cached: 1234 tokens (...)", or n/a and why.
    std::string prefix_cached() const;

    /// How long the run would have taken at least: what has to be prefilled (each shared prefix
    /// once) and what was decoded, at the best rates that this run has shown (detail::Rates:
    /// decoding at the length of context that the answers had);
    /// or the longest answer at the speed of the fastest one. Prefill and decoding count one after
    /// the other, as where they take the same resource; a run that took less than both has shown
    /// that they overlap there, and the longer one counts. What was not streamed shows no rates.
    struct Bound {
        double seconds;
        double prefill_rate, decode_rate; ///< tokens a second
        double token_seconds;             ///< of the fastest answer, for one token
        std::int64_t prefill_tokens, output_tokens, longest;
    };
    std::optional<Bound> bound(const SchedulerStats& stats, double wall_seconds) const;

    /// The run summary: one JSON object, in which "prefix_cached" is that line.
    std::string json(const SchedulerStats& stats, double wall_seconds) const;

private:
    struct Sum {
        std::int64_t value = 0;
        bool all = true; // every answer had it
        void add(std::optional<std::int64_t> number) {
            if (number)
                value += *number;
            else
                all = false;
        }
    };

    std::uint64_t answered_ = 0, failed_ = 0, from_journal_ = 0, repeated_ = 0, attempts_ = 0;
    std::int64_t served_tokens_ = 0; // completion tokens that took no time of this run
    std::map<Errc, std::uint64_t> failures_;
    Sum prompt_, cached_, completion_, expected_, maximum_;
    Sum uncached_, asked_output_; // of what was asked: what no cache could give; answers
    std::int64_t longest_ = 0;
    double token_ms_ = 0; // 0: none known
    bool token_chunks_ = true, absent_cached_zero_ = false;
    std::string cached_hint_ = "the server does not report cached tokens";

    // Once there was a number, its absence is one too.
    bool cached_known() const { return cached_.all || (absent_cached_zero_ && cached_.value > 0); }
    detail::Quantiles ttft_, inter_token_;
    detail::AnswerVersions versions_;
    std::vector<std::string> notes_;
};

} // namespace evalrt

#endif
