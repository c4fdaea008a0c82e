// AnswerWatch: what a run's requests and answers show of its server that the user should know.
#ifndef EVALRT_LIB_ANSWER_WATCH_HPP
#define EVALRT_LIB_ANSWER_WATCH_HPP

#include "wire.hpp"

namespace evalrt::detail {

/// Says each thing as often as it sees it, in the same words: whoever tells it drops repetitions.
class AnswerWatch {
public:
    /// `max_context`: tokens that the server was told to take; 0: not known.
    AnswerWatch(const BackendRow& row, unsigned max_context)
        : name_(row.name),
          processors_mix_(row.processors_mix),
          always_stop_(row.always_stop),
          cuts_prompt_(row.cuts_prompt),
          max_context_(max_context) {}

    std::vector<std::string> sent(const Prepared& prepared);
    void ended(const Prepared& prepared); ///< one that was sent
    std::vector<std::string> answered(const Prepared& prepared, const Response& response) const;

private:
    std::string name_;
    bool processors_mix_, always_stop_, cuts_prompt_;
    unsigned max_context_;
    unsigned with_ = 0, without_ = 0; // on the way with a logits processor, and without
};

/// Whether a server that was asked for a model may call it so: "gpt-x" and "gpt-x-2025-01-31",
/// "org/model" and "/path/of/model".
bool same_model(std::string_view asked, std::string_view answered);

} // namespace evalrt::detail

#endif
