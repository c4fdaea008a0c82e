// Which versions of its server a run's answers are of, by what they say themselves.
#ifndef EVALRT_DETAIL_ANSWER_VERSIONS_HPP
#define EVALRT_DETAIL_ANSWER_VERSIONS_HPP

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace evalrt::detail {

/// Collects the system_fingerprint of answers that have one.
class AnswerVersions {
public:
    /// An answer's body. `where` it is from, such as a file; may be empty.
    void add(std::string_view body, std::string_view where = {});

    /// The first one's; empty: none has told it.
    const std::string& first() const { return first_; }

    /// That there are several, and which; empty: there are not.
    std::string note() const;

private:
    struct Version {
        std::uint64_t answers = 0;
        std::string where; // the first of them
    };
    std::map<std::string, Version, std::less<>> versions_;
    std::string first_;
};

} // namespace evalrt::detail

#endif
