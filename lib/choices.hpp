// Several choices from servers that give one: the request is made so often.
#ifndef EVALRT_LIB_CHOICES_HPP
#define EVALRT_LIB_CHOICES_HPP

#include "evalrt/backend.hpp"
#include "evalrt/backend_row.hpp"

#include <vector>

namespace evalrt::detail {

/// How many choices a request asks for.
unsigned choices_asked(const Request& request);

/// How often a request has to be made for all its choices; 1 where the server reads "n".
unsigned repetitions(const Request& request, const BackendRow& row);

/// Answers of one choice each as one answer. Of the prompt, which they share, the first one's
/// tokens count; times are the first one's, but for the total.
Response merged(std::vector<Response> answers);

using Ask = std::function<void(Request, TextSink, Backend::Handler)>;

/// Makes it one time after another, each without its "n", until one fails: that is the answer then.
/// The text is the first choice's.
void ask_repeatedly(asio::any_io_executor executor, Ask ask, Request request, unsigned times,
                    TextSink on_text, Backend::Handler handler);

} // namespace evalrt::detail

#endif
