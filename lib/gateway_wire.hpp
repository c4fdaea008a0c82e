// What a gateway decides: who may ask what, and in which words it is answered. No I/O.
#ifndef EVALRT_LIB_GATEWAY_WIRE_HPP
#define EVALRT_LIB_GATEWAY_WIRE_HPP

#include "evalrt/gateway.hpp"

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace evalrt::detail {

struct Field {
    std::string_view name, value;
};

/// The head of a request, as it came.
struct RequestHead {
    std::string_view method, target;
    bool old = false; ///< HTTP/1.0
    std::vector<Field> fields;
};

/// Who may come in.
struct Door {
    std::uint16_t port = 0;
    bool loopback = true; ///< else any Host: then there is a token
    std::string token;
    std::size_t field_limit = 100, body_limit = 64 << 20;
};

struct Refusal {
    int status = 0; ///< HTTP; 0: none
    std::string message;
    std::string code; ///< the class of a failure; or empty
};

enum class Place { chat, completions, messages, models, health, metrics, plain };

/// What a head asks for.
struct Call {
    Refusal refusal;
    bool anthropic = false; ///< whose words errors are in
    Place place = Place::chat;
    std::string endpoint;   ///< for the Backend; of what is plain, with the query
    std::string method;     ///< of what is plain
    std::string allow;      ///< with 405: the method that it has to be
    bool post = false;      ///< there is a body
    bool chunked = false;   ///< it comes in chunks
    std::size_t length = 0; ///< of one that does not
    bool keep_alive = true;
    bool expects_continue = false;
    std::string idempotency_key;
    std::uint32_t client = 0; ///< by its key, its program and the name that it gives itself
    std::chrono::milliseconds patience{0}; ///< the client's own limit for an answer; 0: not known
};
Call read_call(const RequestHead& head, const Door& door);

/// The same secret? Takes as long whatever differs.
bool same_secret(std::string_view a, std::string_view b);

/// 127.0.0.1 and the like, or localhost.
bool is_loopback(std::string_view host);

/// The body of a request to a model. "stream" is the client's affair and goes no further: how the
/// server is asked is the Backend's.
struct Asked {
    std::string error; ///< not empty: it is no JSON object, and why
    Text body;
    bool stream = false;
    bool usage_chunk = false; ///< stream_options.include_usage
    std::string model;        ///< as it says; may be empty
};
Asked read_asked(std::string body);

/// What a failed Response is to an HTTP client.
Refusal refusal_of(const Response& response);

std::string error_body(bool anthropic, const Refusal& refusal);

/// An answer's body as clients can rely on it: with usage, without an empty list of tool calls, and
/// with arguments of tool calls that are JSON text. Most often it is so: `changed` is for the
/// others.
std::string_view whole_answer(Place place, const Response& response, std::string& changed);

/// Writes an answer as the events of its wire. The text may come piece by piece; all that is not
/// there then comes with the end.
class EventWriter {
public:
    virtual ~EventWriter() = default;

    /// Events for a further piece of the first choice's text.
    virtual std::string text(std::string_view piece) = 0;

    /// The rest of an answer that is not a failure. Nothing: it does not go on where the text was.
    virtual std::optional<std::string> end(const Response& response) = 0;

    /// Events for a failure after text.
    std::string failed(const Refusal& refusal) const;

    /// Whether text may go out before the rest, where the answer has begun with something else.
    virtual bool text_first() const = 0;

protected:
    explicit EventWriter(bool anthropic) : anthropic_(anthropic) {}
    const bool anthropic_;
};

/// `id`: for an answer whose own is not known when its text comes.
std::unique_ptr<EventWriter> make_event_writer(Place place, const Asked& asked, std::string id,
                                               std::int64_t created);

/// {"object": "list", ...} for clients of both wires. Empty: no models.
std::string models_body(std::string_view model);

/// In the format of Prometheus.
std::string metrics_text(const GatewayStats& stats, std::optional<unsigned> in_flight);

/// The head of an answer. `length`: nothing: chunked, or to the end of the connection if `old`.
std::string answer_head(int status, std::string_view type, std::optional<std::size_t> length,
                        bool keep_alive, bool old, std::string_view more = {});

/// Behind such a head without a length, if it is not `old`.
void append_chunk(std::string& out, std::string_view bytes);
inline constexpr std::string_view last_chunk = "0\r\n\r\n";

} // namespace evalrt::detail

#endif
