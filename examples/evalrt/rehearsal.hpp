// What a rehearsal is made of: a harness that asks one question at a time is run against
// placeholders first, so that its questions are known and can be asked together.
#ifndef EVALRT_PROGRAM_REHEARSAL_HPP
#define EVALRT_PROGRAM_REHEARSAL_HPP

#include "evalrt/request.hpp"

#include <algorithm>
#include <bitset>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace evalrt::program {

/// Finds what was made from a placeholder, although it was cut, put in capitals, or has spaces,
/// line ends or underscores in it. To be known, a piece needs the placeholder's first 20 characters
/// (or those of another rehearsal's) or any 12 of its random ones. No I/O.
class Traces {
public:
    /// `marker`: one that Rehearsal::new_marker() has made.
    explicit Traces(const std::string& marker);

    bool in(std::string_view text) const { return Search(*this).found(text); }

    /// The same for a text that comes in pieces.
    class Search {
    public:
        /// `own`: not for another rehearsal's, by the first 23 characters.
        explicit Search(const Traces& traces, bool own = false) : traces_(traces), own_(own) {}
        /// In what has come until now, this piece included.
        bool found(std::string_view piece);

    private:
        const Traces& traces_;
        const bool own_;
        std::string window_; // the end of what came, as far as it counts
        bool escaped_ = false, found_ = false;
    };

private:
    static constexpr std::size_t gram = 8, shortest = 12;
    static std::size_t slot(const char* at);
    bool seen(std::string_view window, bool own) const;

    std::string random_;
    std::bitset<1024> grams_; // which eight characters stand somewhere in random_
};

/// Which request is known, and by which answer. No I/O. A request is its endpoint and the bytes of
/// its body; the k-th time that it is asked, it gets the k-th answer, never the same one twice.
class Rehearsal {
public:
    /// `marker`: stands in every placeholder, and nowhere else.
    explicit Rehearsal(std::string marker) : marker_(std::move(marker)), traces_(marker_) {}

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
        return traces_.in(request.body.view()) || traces_.in(request.endpoint);
    }

    const Traces& traces() const { return traces_; }

    std::size_t learned() const { return learned_; }

    /// How many different requests a round has made, but for those that were made from
    /// placeholders: of the round that made the most.
    std::size_t most_asked() const { return std::max(most_, different_); }

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
    const Traces traces_;
    std::unordered_map<std::string, Known> known_;
    std::vector<Wanted> wanted_;
    std::string last_; // key of the last request
    unsigned idle_ = 0;
    std::size_t learned_ = 0;
    std::size_t different_ = 0, most_ = 0; // requests of this round, and of the rounds before
};

/// When to say that a rehearsed command asks nothing. No I/O.
class Silence {
public:
    using Time = std::chrono::steady_clock::time_point;
    explicit Silence(Time now) : last_(now) {}
    void asked(Time now) { last_ = now; }
    /// When to ask again whether it is to be said.
    Time due() const { return last_ + std::chrono::minutes(1); }
    bool to_be_said(Time now) const { return now >= due(); }

private:
    Time last_;
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

    /// `spelled`: another name for the folder, if it is one. Empty: it is there. Else what is
    /// wrong.
    std::string make(const std::filesystem::path& folder, const std::string& spelled = {});

    const std::filesystem::path& root() const { return root_; }     ///< of both
    const std::filesystem::path& folder() const { return folder_; } ///< the copy
    std::filesystem::path temporary() const { return root_ / "tmp"; }

    /// The text with the copy where it names the folder; ../FILE, alone or behind the first =, by
    /// its whole name.
    std::string moved(std::string text) const;

    static constexpr std::size_t most_files = 100'000;
    static constexpr std::uintmax_t most_bytes = 4'000'000'000;

private:
    std::filesystem::path root_, folder_, from_;
    std::string spelled_;
};

/// What a folder has in it, but behind links: enough to see that it has changed.
using Snapshot = std::map<std::string, std::pair<std::uintmax_t, std::filesystem::file_time_type>>;
Snapshot look_at(const std::filesystem::path& folder);
/// The files that are not as they were, or are gone.
std::vector<std::string> changed(const Snapshot& before, const Snapshot& after);

struct Written {
    std::vector<std::string> files;
    std::vector<std::string> cut; ///< places that have more than is looked at
};
struct Place {
    std::filesystem::path path; ///< a folder or a file
    std::size_t most = 100'000; ///< files and folders that are looked at, the outer ones first
};
/// What was written then or later: in the folder and in other places, and in what links in any of
/// them lead to; each file once, none of the system's own. Of the folder itself all is looked at;
/// `most` is for what is behind its links.
Written written_since(std::time_t since, const Place& folder,
                      const std::vector<Place>& elsewhere = {});

/// Those whose names do not begin with one of `own`.
std::vector<std::string> others(std::vector<std::string> files,
                                const std::vector<std::string>& own);
/// Those with something of this rehearsal's placeholders in them. Looks through not more than
/// `most` bytes of all together, the smallest files first, and takes those off it. Not in what is
/// compressed.
std::vector<std::string> with_traces(const std::vector<std::string>& files, const Traces& traces,
                                     std::uintmax_t& most);

} // namespace evalrt::program

#endif
