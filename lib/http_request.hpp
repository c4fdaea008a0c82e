// HTTP/1.1 requests as a gateway takes them: what two readers might read in two ways is no request.
// No I/O.
#ifndef EVALRT_LIB_HTTP_REQUEST_HPP
#define EVALRT_LIB_HTTP_REQUEST_HPP

#include "gateway_wire.hpp"

#include <string>
#include <string_view>

namespace evalrt::detail {

/// Reads a whole head, with its blank line. The views of `head` point into `bytes`. Empty: it is
/// one; else what is wrong with it. What its fields mean is read_call()'s affair.
std::string read_request_head(std::string_view bytes, RequestHead& head);

/// A body that comes in chunks.
class ChunkedBody {
public:
    enum class State {
        more, ///< to come
        done,
        bad,   ///< these are no chunks
        large, ///< they are over the limit
    };

    /// Appends what `bytes` have of it to `body`; how many of them it has used. What it has not
    /// used has to be there again, with more behind it.
    std::size_t take(std::string_view bytes, std::string& body, std::size_t limit);

    State state() const { return state_; }

private:
    enum class At { size, data, data_end, trailer };

    bool line(std::string_view text, std::size_t taken, std::size_t limit);

    At at_ = At::size;
    State state_ = State::more;
    std::size_t left_ = 0; // of the chunk
    std::size_t trailers_ = 0;
};

} // namespace evalrt::detail

#endif
