// OpenAI chat completions in the words of Anthropic's messages, and back. Pure functions; what is
// written in both is carried byte for byte: texts, tool arguments, schemas.
#ifndef EVALRT_LIB_TRANSLATE_HPP
#define EVALRT_LIB_TRANSLATE_HPP

#include "evalrt/request.hpp"

#include <string>
#include <string_view>
#include <vector>

namespace evalrt::detail {

/// A request's body in the words of the other wire. A field that changes the answer and has no
/// words there is an error that names it; one that does not is left out, with a note; one that is
/// not known is carried as it is, for the server to judge.
struct Translated {
    std::string body;
    std::vector<std::string> notes; ///< to be said once
    std::string error;              ///< not empty: it cannot be said there
};

/// Both take a JSON object. `max_tokens` is for a body that has none, which Anthropic's must have.
Translated chat_to_messages(std::string_view body, unsigned max_tokens);
Translated messages_to_chat(std::string_view body);

/// The body and finish_reason of an answered Response in the words of the other wire; it becomes
/// malformed where that cannot be. `created`: seconds since 1970.
void answer_to_chat(Response& response, std::int64_t created);
void answer_to_messages(Response& response);

} // namespace evalrt::detail

#endif
