// What a rehearsal is made of: a harness that asks one question at a time is run against
// placeholders first, so that its questions are known and can be asked together.
#ifndef EVALRT_PROGRAM_REHEARSAL_HPP
#define EVALRT_PROGRAM_REHEARSAL_HPP

#include "evalrt/request.hpp"

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace evalrt::program {

/// Which request is known, and by which answer. No I/O. A request is its endpoint and the bytes of
/// its body; the k-th time that it is asked, it gets the k-th answer, never the same one twice.
class Rehearsal {
public:
    /// `marker`: stands in every placeholder, and nowhere else.
    explicit Rehearsal(std::string marker) : marker_(std::move(marker)) {}

    /// A marker that nobody can guess.
    static std::string new_marker();

    /// The command starts once more, and with it the count of what is asked.
    void begin();

    /// The answer that was learned. Nothing: it has to be asked.
    std::optional<Response> known(const Request& request);

    /// The same, with a placeholder where nothing was learned: then the request is wanted, but for
    /// what was made from a placeholder.
    Response rehearse(const Request& request);

    struct Wanted {
        Request request;
        std::size_t occurrence = 0;
    };
    /// What this round has asked and nobody knows, in its order.
    std::vector<Wanted> take_wanted();

    /// Failures are not kept: such a request is asked again when it counts.
    void learn(const Wanted& wanted, Response response);

    /// It asks the same again and again, as who waits for an answer that suits him, or only what is
    /// made from placeholders: no more can be learned.
    bool stuck() const { return idle_ >= idle_limit; }

    bool from_placeholder(const Request& request) const {
        return request.body.view().find(marker_) != std::string_view::npos ||
               request.endpoint.find(marker_) != std::string::npos;
    }

    std::size_t learned() const { return learned_; }

    static constexpr unsigned idle_limit = 1000; ///< requests in a row

private:
    struct Known {
        std::vector<std::optional<Response>> answers; // by occurrence
        std::size_t next = 0;
    };
    static std::string key(const Request& request) {
        return request.endpoint + '\n' + std::string(request.body.view());
    }

    const std::string marker_;
    std::unordered_map<std::string, Known> known_;
    std::vector<Wanted> wanted_;
    std::string last_; // key of the last request
    unsigned idle_ = 0;
    std::size_t learned_ = 0;
};

/// An answer of the shape that `request` asks for (choices, tool calls that it insists on, JSON of
/// its schema, log probabilities), every text of which is `marker`.
Response placeholder(const Request& request, std::string_view marker);

/// A copy of a folder that goes away with this object, and a folder for temporary files.
class ThrowAway {
public:
    ThrowAway() = default;
    ThrowAway(const ThrowAway&) = delete;
    ~ThrowAway();

    /// Empty: it is there. Else what is wrong.
    std::string make(const std::filesystem::path& folder);

    const std::filesystem::path& root() const { return root_; }     ///< of both
    const std::filesystem::path& folder() const { return folder_; } ///< the copy
    std::filesystem::path temporary() const { return root_ / "tmp"; }

    /// The text with the copy where it names the folder.
    std::string moved(std::string text) const;

    static constexpr std::size_t most_files = 100'000;
    static constexpr std::uintmax_t most_bytes = 4'000'000'000;

private:
    std::filesystem::path root_, folder_, from_;
};

/// What a folder has in it: enough to see that it has changed.
using Snapshot = std::map<std::string, std::pair<std::uintmax_t, std::filesystem::file_time_type>>;
Snapshot look_at(const std::filesystem::path& folder);
/// A file that is not as it was, none of which is in `own`; empty: none.
std::string changed(const Snapshot& before, const Snapshot& after,
                    const std::vector<std::string>& own);

} // namespace evalrt::program

#endif
