// Answers in words, for the tests of the wires.
#ifndef EVALRT_TESTS_ANSWERS_HPP
#define EVALRT_TESTS_ANSWERS_HPP

#include "support/every_cut.hpp"
#include "wire.hpp"

#include "support/catch.hpp"

#include <fmt/format.h>

namespace evalrt::test {

inline std::string outcome(const Response& response) {
    return std::string(response.outcome ? evalrt::name(*response.outcome) : "answered");
}

// "prompt/cached/completion", with - for what was not reported.
inline std::string counts(const Usage& usage) {
    const auto text = [](std::optional<std::int64_t> number) {
        return number ? std::to_string(*number) : "-";
    };
    return fmt::format("{}/{}/{}", text(usage.prompt_tokens), text(usage.cached_tokens),
                       text(usage.completion_tokens));
}

struct Answer {
    Response response;
    std::string heard; // what a listener gets, piece by piece
    bool last = false; // the stream said that it is over
    int pieces = 0;    // events with content

    std::string summary() const {
        return fmt::format("{}|{}|{}|{}|{}|{}|{}|{}|{}|{}|{}", outcome(response), response.status,
                           response.detail, response.body, response.text, response.finish_reason,
                           response.request_id, counts(response.usage), heard, last, pieces);
    }
};

inline Answer read_pieces(detail::AnswerReader& reader, const Pieces& stream) {
    Answer answer;
    answer.response.status = 200;
    detail::SseParser events;
    const auto on_event = [&](const detail::SseEvent& event) {
        if (answer.last) return;
        const auto piece = reader.event(event);
        answer.last = piece.last;
        answer.pieces += piece.content;
        answer.heard += piece.text;
    };
    for (const auto piece : stream) REQUIRE(events.feed(piece, on_event));
    if (!answer.last) events.finish(on_event);
    reader.finish(answer.response);
    return answer;
}

inline Response read_whole(detail::AnswerReader& reader, std::string_view body) {
    Response response;
    response.status = 200;
    reader.whole(std::string(body), response);
    return response;
}

} // namespace evalrt::test

#endif
