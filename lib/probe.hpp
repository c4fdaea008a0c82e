// ProbePlan: which requests, and what their answers mean. No I/O.
#ifndef EVALRT_LIB_PROBE_HPP
#define EVALRT_LIB_PROBE_HPP

#include "evalrt/probe.hpp"

#include <string>
#include <vector>

namespace evalrt::detail {

/// One short request. Two with the same `prefix` begin with the same 1,000 words or so; 0: none.
struct ProbeAsk {
    unsigned prefix = 0;
    unsigned max_tokens = 1;
};

/// What came of it.
struct ProbeSeen {
    bool answered = false;
    Usage usage;
    double first_text = 0, total = 0; ///< seconds from sending
};

class ProbePlan {
public:
    struct Step {
        std::vector<ProbeAsk> asks;
        bool follow = false;                     ///< the others are sent at the first one's text
        std::chrono::milliseconds wait_before{}; ///< the first one is sent
        std::chrono::milliseconds stagger{};     ///< from the first to the others
    };

    /// What to send now; nothing: all is known that will be.
    std::optional<Step> next() const;

    /// Of the step that next() named, in the order of its asks, `seconds` from the first one's
    /// sending to the last one's end.
    void answered(const std::vector<ProbeSeen>& seen, double seconds);

    const ProbeResult& result() const { return result_; }

    /// The prompt of an ask; `nonce` keeps what an earlier probe left in the cache out of it.
    static std::string prompt(const ProbeAsk& ask, unsigned nonce, unsigned serial);

private:
    enum class Phase { cold, after, fill, later, first_text, at_once, page, alone, together, over };

    bool warm(const ProbeSeen& seen);
    void stored(const ProbeSeen& seen);
    void finish();

    Phase phase_ = Phase::cold;
    double cold_ = 0; // seconds to the first text of a prompt that was in no cache
    bool after_ = false, later_ = false, at_first_text_ = false, at_once_ = false;
    double alone_ = 0;      // tokens a second
    std::int64_t page_ = 0; // the common divisor of all that was cached
    std::int64_t rest_ = 0; // the most that was computed anew of a prompt whose prefix was stored
    bool broken_ = false;   // a request failed: what follows is not asked
    ProbeResult result_;
};

/// Why a server answers a run's requests one at a time, as far as can be said. `given`: an option
/// that it was started with; `unusual`: see Prompt; `probed`: ProbeResult::batching.
std::string why_one_by_one(const BackendRow& row, const std::optional<BackendRow::Alone>& given,
                           unsigned unusual, std::optional<double> probed);

} // namespace evalrt::detail

#endif
