// A wire: what a server's answers mean. One file each; here is what they share.
#ifndef EVALRT_LIB_WIRE_HPP
#define EVALRT_LIB_WIRE_HPP

#include "evalrt/backend_row.hpp"
#include "evalrt/detail/memory.hpp"
#include "evalrt/detail/sse_parser.hpp"
#include "evalrt/prefix_planner.hpp"
#include "evalrt/request.hpp"
#include "json_text.hpp"

#include <memory>
#include <span>
#include <string>
#include <unordered_map>
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

    // One comes and goes with each request.
    static void* operator new(std::size_t size) { return SpareMemory::take(size); }
    static void operator delete(void* memory, std::size_t size) { SpareMemory::give(memory, size); }

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

/// Whether a comment in a stream says that the whole prompt is computed: mlx_lm.server counts its
/// tokens, ": keepalive 2048/2049", of which the last one is the first step of decoding.
bool prompt_computed(std::string_view comment);

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
    Patched body;
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

/// Whether the body makes the server change the probabilities of tokens: penalties, logit_bias.
bool has_processors(std::span<const Member> body);

/// Where a request goes, and in whose words.
struct Route {
    std::string_view endpoint; ///< a part of the request's, or a constant
    Wire wire = Wire::openai;
    bool translated = false; ///< the request's words are the other ones
    std::string error;       ///< not empty: it cannot go to this server, and why
};
Route route(std::string_view endpoint, const BackendRow& row);

/// The same for either wire: marks, translates, fixes. `max_tokens`: see HttpOptions.
Prepared prepare(const Request& request, const BackendRow& row, const Route& route,
                 std::string_view model, bool override_model, unsigned max_tokens);

/// Reads the answer in the words in which it comes, and puts it into those of the request.
std::unique_ptr<AnswerReader> make_reader(const Route& route, const BackendRow& row);

/// Names what of a request has to come to the same server: its conversation, or the prefix that it
/// shares with others (and, where several servers share those, which part). Empty: nothing.
std::string routing_key(const Request& request, const BackendRow& row);

/// Where a mark for Anthropic's cache may stand: the end of a block (a tool, a part of the system
/// prompt or of a message).
struct PrefixEnd {
    std::size_t bytes;  ///< of the prompt as read_prompt() has it
    std::uint64_t hash; ///< of all of these
};
std::vector<PrefixEnd> prefix_ends(std::string_view body);

/// What the requests of one server have in common, to the end of a block.
class SharedPrefixes {
public:
    void add(std::string_view domain, const std::vector<PrefixEnd>& ends) {
        if (counts_.size() > 1'000'000) counts_.clear(); // begins anew, and stays small
        for (const auto& it : ends) ++counts_[key(domain, it)];
    }

    /// Bytes of the longest prefix that was added more than once.
    std::size_t bytes(std::string_view domain, const std::vector<PrefixEnd>& ends) const {
        for (auto it = ends.rbegin(); it != ends.rend(); ++it)
            if (const auto found = counts_.find(key(domain, *it));
                found != counts_.end() && found->second > 1)
                return it->bytes;
        return 0;
    }

private:
    static std::uint64_t key(std::string_view domain, const PrefixEnd& end) {
        return end.hash + std::hash<std::string_view>()(domain);
    }
    std::unordered_map<std::uint64_t, unsigned> counts_;
};

/// The body with marks of Anthropic's kind (cache_control) where the prefix that others share ends,
/// and at the end of its tools and system prompt, each at the end of the last whole block. As it
/// is, if it has marks of its own or what is shared is below `least` bytes. The body may be of chat
/// completions: the translation carries the marks on.
std::string with_cache_marks(std::string_view body, std::size_t shared_bytes, std::size_t least);

/// Nothing: known. Otherwise what is wrong with it.
std::optional<std::string> check_endpoint(std::string_view endpoint);

/// An error if this is no valid JSON object, or one that strict parsers do not take: for what
/// others are given. What comes from others is judged by object_error().
std::optional<std::string> check_object(std::string_view text);

/// What a planner needs to know of it; the views point into the request's body, which need not be
/// JSON: prepare_openai refuses it then, and what was planned for it does not matter.
Prompt read_prompt(const Request& request, const BackendRow& row);

/// Whether the server is asked to stream its answer to that body. Streaming shows when the first
/// token comes, that the server still works, and lets a cancelled request go. But the caller's own
/// choice stands, and some servers leave log probabilities out of a stream.
bool streamed(std::span<const Member> body, const BackendRow& row);

} // namespace evalrt::detail

#endif
