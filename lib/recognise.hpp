// Recogniser: what a server behind a URL is, from what it answers to a few GETs.
#ifndef EVALRT_LIB_RECOGNISE_HPP
#define EVALRT_LIB_RECOGNISE_HPP

#include "evalrt/backend_row.hpp"
#include "evalrt/http_backend.hpp"

#include <boost/asio/awaitable.hpp>
#include <boost/asio/cancellation_signal.hpp>

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace evalrt::detail {

/// One GET's answer.
struct Seen {
    std::string path;
    int status = 0; ///< 0: none came
    std::string body = {};
    std::string server = {}; ///< its Server header
    bool late = false;       ///< none came in time
};

struct Recognition {
    std::string profile;               ///< a profile's or row's name; empty: not recognised
    std::string behind;                ///< a router: the profile of its servers, as far as known
    unsigned workers = 1;              ///< a router: how many they are
    std::string worker;                ///< a router: where one of them is, if on the same host
    std::string reason;                ///< in words
    std::string version;               ///< empty: it does not tell
    bool late = false;                 ///< it did not answer in time: it may be busy
    std::optional<unsigned> in_flight; ///< requests at once, as the server (each of them) tells
    std::string in_flight_reason;
    std::optional<unsigned> block;            ///< tokens that its cache has together
    std::optional<std::int64_t> cache_tokens; ///< that its cache holds
};

/// Which GETs, and what their answers mean. No I/O.
class Recogniser {
public:
    /// `model`: the one that will be asked for; empty: any.
    explicit Recogniser(const Url& url, std::string model = {});

    /// The path to GET next; nothing: all is known that will be.
    std::optional<std::string> next() const;

    void answered(const Seen& seen);

    const Recognition& result() const { return result_; }

private:
    void details(const Seen& seen);

    std::string model_, host_;
    Recognition result_;
    std::set<std::string, std::less<>> asked_;
    bool given_up_ = false;
};

/// What is known of a router, with what one of its servers says of itself.
Recognition with_worker(Recognition router, const Recognition& worker);

/// Asks the server. Nothing that goes wrong here is an error: an unknown server is one, too.
/// `failed`: why it cannot be reached at all.
asio::awaitable<Recognition> recognise(asio::any_io_executor executor, HttpOptions options,
                                       asio::cancellation_signal& cancel, Failure& failed);

/// So many tokens: what they bound needs no low start.
void has_cache(BackendRow& row, std::int64_t tokens);

/// The row with what is known of its server now. The wire stays, and on another wire than the
/// profile's so does what concerns the bodies.
BackendRow with_profile(const BackendRow& row, const Recognition& recognition);

/// What tells the models that a server lists from those of the first one, where `model` is asked
/// for (empty: its first), in words; empty: nothing does. A list that is not there says nothing,
/// and of models that are files only the names count.
std::string other_models(const std::vector<std::string>& first,
                         const std::vector<std::string>& others, const std::string& model);

} // namespace evalrt::detail

#endif
