// A wire: what a server's answers mean. One file each; here is what they share.
#ifndef EVALRT_LIB_WIRE_HPP
#define EVALRT_LIB_WIRE_HPP

#include "evalrt/backend_row.hpp"
#include "evalrt/detail/sse_parser.hpp"
#include "evalrt/prefix_planner.hpp"
#include "evalrt/request.hpp"

#include <memory>
#include <span>
#include <string>
#include <vector>

namespace evalrt::detail {

/// What one event of a stream brought.
struct Piece {
    bool content = false;  ///< generated: text, reasoning, a part of a tool call
    std::string_view text; ///< of the first choice; valid until the next event
    bool last = false;     ///< nothing more can come
};

/// Puts one answer together.
class AnswerReader {
public:
    virtual ~AnswerReader() = default;

    virtual Piece event(const SseEvent& event) = 0;

    /// The stream has ended. Fills in body, text, usage, and the outcome if it is a failure.
    virtual void finish(Response& response) = 0;

    /// The answer came in one piece, with a 2xx status.
    virtual void whole(std::string body, Response& response) = 0;
};

/// For /v1/chat/completions and /v1/completions.
std::unique_ptr<AnswerReader> make_openai_reader(bool chat);

/// For /v1/messages. `input_is_total`: see BackendRow.
std::unique_ptr<AnswerReader> make_anthropic_reader(bool input_is_total);

/// A status that is not 2xx: the class and the server's words.
void read_rejection(int status, std::string body, Response& response);

/// An error object, in whatever shape.
struct ServerError {
    std::string message;
    std::string type; ///< type and code
    int status = 0;   ///< an HTTP status, where its code is one
};
Errc classify(int status, const ServerError& error);

/// The body that goes out: the request's own, but for what the row and the options fix.
struct Prepared {
    Text body;
    bool stream = false;            ///< it asks for a stream
    std::vector<std::string> notes; ///< what was changed and why, to be said once
    std::string error;              ///< not empty: the body cannot be sent, and why

    // What the answer is held against.
    std::string model;                      ///< asked for; may be empty
    std::optional<std::int64_t> max_tokens; ///< of the body, or the server's default
    bool processors = false;                ///< it has penalties or a logit_bias
    std::size_t tools_bytes = 0;            ///< of its tools
};
Prepared prepare_openai(const Request& request, const BackendRow& row, std::string_view model,
                        bool override_model);

/// An error if this is no valid JSON object.
std::optional<std::string> check_object(std::string_view text);

/// What a planner needs to know of it; the views point into the request's body, which need not be
/// JSON: prepare_openai refuses it then, and what was planned for it does not matter.
Prompt read_prompt(const Request& request, const BackendRow& row);

} // namespace evalrt::detail

#endif
