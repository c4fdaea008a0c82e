#include "answer_watch.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

namespace evalrt::detail {

std::vector<std::string> AnswerWatch::sent(const Prepared& prepared) {
    if (processors_mix_) return {};
    ++(prepared.processors ? with_ : without_);
    if (with_ == 0 || without_ == 0) return {};
    return {fmt::format("WARNING: a request with a penalty or logit_bias and one without are on "
                        "their way at once; a batch of both can stop {} for good. Give them all "
                        "one, or run them apart",
                        name_)};
}

void AnswerWatch::ended(const Prepared& prepared) {
    if (!processors_mix_) --(prepared.processors ? with_ : without_);
}

std::vector<std::string> AnswerWatch::answered(const Prepared& prepared,
                                               const Response& response) const {
    std::vector<std::string> notes;
    if (response.outcome) return notes;
    if (!same_model(prepared.model, response.model))
        notes.push_back(fmt::format("WARNING: requests ask for the model '{}', but '{}' answers",
                                    prepared.model, response.model));
    const auto& usage = response.usage;
    if (cuts_prompt_ && max_context_ > 0 && usage.prompt_tokens > std::int64_t(max_context_))
        notes.push_back(fmt::format("WARNING: a prompt is longer than --max-context {}; {} cuts "
                                    "off its beginning and answers the rest",
                                    max_context_, name_));
    // JSON has three to four bytes a token.
    if (prepared.tools_bytes >= 500 && usage.prompt_tokens &&
        *usage.prompt_tokens < std::int64_t(prepared.tools_bytes / 10))
        notes.push_back("WARNING: a prompt has fewer tokens than its tools would need: the model's "
                        "chat template seems to leave tools out");
    if (always_stop_ && prepared.max_tokens && usage.completion_tokens >= *prepared.max_tokens)
        notes.push_back(
            fmt::format("an answer has all the tokens that max_tokens allows: it is cut "
                        "short, though {} gives it the finish_reason \"stop\"",
                        name_));
    return notes;
}

bool same_model(std::string_view asked, std::string_view answered) {
    if (asked.empty() || answered.empty() || asked == answered) return true;
    const auto last = [](std::string_view path) {
        while (path.ends_with('/')) path.remove_suffix(1);
        std::string name(path.substr(path.rfind('/') + 1));
        for (char& c : name) c = char(std::tolower(static_cast<unsigned char>(c)));
        return name;
    };
    const auto a = last(asked), b = last(answered);
    // mlx_lm.server calls what it was started with by this name.
    if (a == "default_model") return true;
    return a.find(b) != a.npos || b.find(a) != b.npos;
}

} // namespace evalrt::detail
