// What can go wrong, as values.
#ifndef EVALRT_ERROR_HPP
#define EVALRT_ERROR_HPP

#include <boost/asio/error.hpp>
#include <boost/system/error_code.hpp>

#include <array>
#include <optional>
#include <string>
#include <string_view>

namespace boost::asio {}

namespace evalrt {

namespace asio = boost::asio;
using boost::system::error_code;

/// Why a request has no answer. One value for each thing a caller would do differently.
enum class Errc {
    unreachable = 1,  ///< nothing answers there, or the connection broke before any byte came
    exited,           ///< the server that we started has ended
    rejected,         ///< it said no: HTTP 4xx (fix the request) or 5xx (the server), or an error
    rate_limited,     ///< HTTP 429
    overloaded,       ///< HTTP 503 or 529: the server has too much to do
    auth,             ///< HTTP 401 or 403: fix the key
    context_too_long, ///< the prompt does not fit the model's context
    malformed,        ///< not the protocol, or over a limit of ours: unusable
    truncated,        ///< the answer stopped before its finish reason
    timed_out,        ///< one of the time limits passed
    cancelled,        ///< the caller asked for it
    poison,           ///< the server died each time this request ran
};

inline constexpr std::array all_errc{Errc::unreachable,      Errc::exited,     Errc::rejected,
                                     Errc::rate_limited,     Errc::overloaded, Errc::auth,
                                     Errc::context_too_long, Errc::malformed,  Errc::truncated,
                                     Errc::timed_out,        Errc::cancelled,  Errc::poison};

/// The class as it stands in output files: "unreachable", "rate_limited", ...
std::string_view name(Errc errc) noexcept;
/// Nothing: there is no class of this name.
std::optional<Errc> find_errc(std::string_view name) noexcept;

const boost::system::error_category& category() noexcept;

/// Errc::cancelled becomes asio::error::operation_aborted, as everywhere in Asio.
error_code make_error_code(Errc errc) noexcept;

/// A failure of something that is not a request: what is wrong and what to do, in one line.
struct Failure {
    error_code code;
    std::string detail;
    explicit operator bool() const { return bool(code); }
};

} // namespace evalrt

template <>
struct boost::system::is_error_code_enum<evalrt::Errc> : std::true_type {};

#endif
