// A request and its answer: plain values.
#ifndef EVALRT_REQUEST_HPP
#define EVALRT_REQUEST_HPP

#include "evalrt/error.hpp"

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace evalrt {

using Clock = std::chrono::steady_clock;

/// Text that is never copied: a view together with what keeps it alive (a string of its own, a
/// mapped file, a foreign buffer). Cheap to copy.
class Text {
public:
    Text() = default;
    Text(std::string text) {
        auto owned = std::make_shared<const std::string>(std::move(text));
        view_ = *owned;
        owner_ = std::move(owned);
    }
    Text(const char* text) : Text(std::string(text)) {}
    Text(std::shared_ptr<const void> owner, std::string_view view)
        : owner_(std::move(owner)), view_(view) {}

    operator std::string_view() const { return view_; }
    std::string_view view() const { return view_; }
    bool empty() const { return view_.empty(); }

private:
    std::shared_ptr<const void> owner_;
    std::string_view view_;
};

/// What a model server can be asked.
inline constexpr std::array<std::string_view, 3> request_endpoints{
    "/v1/chat/completions", "/v1/completions", "/v1/messages"};

/// Lets the receiver of a text hold it back: HttpBackend then reads no more of the answer, so that
/// its server waits, and time limits but that of the whole attempt stand still.
class TextFlow {
public:
    void hold() { held_ = true; }
    void go() {
        held_ = false;
        if (auto call = std::exchange(on_go_, nullptr)) call();
    }
    bool held() const { return held_; }
    void on_go(std::function<void()> call) { on_go_ = std::move(call); } ///< once

private:
    bool held_ = false;
    std::function<void()> on_go_;
};

/// One question to a model server. The body goes out as these bytes, but for what the backend's
/// row has to fix; fields that evalrt does not know survive. Where the server speaks only the other
/// of chat completions and messages, the body and the answer are translated: a field that cannot
/// be said there fails the request as rejected, with its name.
struct Request {
    std::string endpoint = "/v1/chat/completions"; ///< one of request_endpoints
    Text body;                                     ///< one JSON object
    std::string session;                           ///< turns of one conversation share it
    int turn = 0;
    std::chrono::milliseconds pause{0}; ///< see Prompt::pause
    std::uint32_t client = 0;           ///< whose it is: those of several go by turns
    /// Of which it is a turn, where nothing else is known of that: of several servers, the one that
    /// had the turn before gets it, if it has not much more to do than others. 0: of none.
    std::uint64_t conversation = 0;
    std::string name;                      ///< what the caller calls it: for a journal, never sent
    std::chrono::milliseconds deadline{0}; ///< from submission to completion; zero: none
    bool stream = false;                   ///< the caller wants the text piece by piece
    std::shared_ptr<TextFlow> flow;        ///< null: the text is never held back
    bool plain = false;   ///< no question to a model: HttpBackend sends and answers it as it is
    std::string method;   ///< of a plain one; empty: POST with a body, GET without
    unsigned server = 0;  ///< of several that are alike, which; set by the scheduler
    std::uint64_t id = 0; ///< its number in the scheduler; set by that
    std::size_t shared_bytes = 0; ///< of its prompt that others have, too; set by the scheduler
    /// Called when the server says that it has computed the prompt; set by the scheduler.
    std::function<void()> on_computed{};
};

/// Token counts as the server reported them. Nothing reported is nothing, never zero.
struct Usage {
    std::optional<std::int64_t> prompt_tokens; ///< all of them, the cached ones too
    std::optional<std::int64_t> cached_tokens;
    std::optional<std::int64_t> completion_tokens;
};

/// How far the last attempt came.
enum class Stage {
    none,     ///< not sent
    sent,     ///< the connection stands, the request is on its way
    answered, ///< a byte of the answer has arrived
    text,     ///< a piece of generated text, reasoning or a tool call has arrived
};

struct Timing {
    using Millis = std::chrono::duration<double, std::milli>;
    Millis queued{0};                 ///< submission to the sending of the last attempt
    std::optional<Millis> first_text; ///< TTFT: sending to first text; none: came in one piece
    std::optional<Millis> last_text;  ///< sending to last text
    Millis total{0};                  ///< submission to completion
};

/// What became of a request; also filled in as far as known when it failed.
struct Response {
    std::optional<Errc> outcome; ///< nothing: answered
    int status = 0;              ///< HTTP status, or of an error inside a stream; 0: none arrived
    std::string body;            ///< one whole JSON answer; a stream is put together
    std::string text;            ///< the first choice's text
    std::string finish_reason;   ///< the first choice's
    std::string request_id;      ///< the server's
    std::string model;           ///< that answered, by the server's word
    std::string server;          ///< of a GET: the name in the answer's Server header
    std::string content_type;    ///< of an answer to a plain request
    Usage usage;
    Timing timing;
    Stage stage = Stage::none;
    unsigned attempts = 0;
    bool from_journal = false; ///< answered earlier, not asked for this time
    bool repeated = false;     ///< the answer to an equal request, not asked for
    std::optional<std::chrono::milliseconds> retry_after; ///< as the server asked
    std::optional<bool> should_retry; ///< x-should-retry, for or against another attempt
    error_code cause;                 ///< of a broken connection: what the system said
    std::string detail;               ///< failed: the server's own words, or what to do
    /// Failed: not held against the request, which another server is asked. Set by who knows
    /// several, for the scheduler; no caller sees it.
    bool elsewhere = false;

    /// Cached tokens the plan expected, and the most that any cache could have held.
    std::optional<std::int64_t> expected_cached, maximum_cached;
};

} // namespace evalrt

#endif
