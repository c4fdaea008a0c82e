// BackendRow: all that distinguishes one model server from another. A new server is a new row.
#ifndef EVALRT_BACKEND_ROW_HPP
#define EVALRT_BACKEND_ROW_HPP

#include "evalrt/request.hpp"

#include <span>
#include <string>
#include <vector>

namespace evalrt {

enum class Wire { openai, anthropic };

/// When the server's prefix cache shows a prompt to the requests that come after.
enum class Release {
    at_once,    ///< when it is scheduled (vLLM): nobody has to wait for a leader
    first_text, ///< with its first token
    done,       ///< when it has ended, and commit_delay later
};

struct BackendRow {
    std::string name; ///< as in --backend
    Wire wire = Wire::openai;

    /// Starts it: argv in which {model}, {port} and {context} are replaced. Empty: it runs already.
    std::vector<std::string> command;
    /// What "model" must say in a body; empty: the configured name, or the first that it serves.
    std::string served_model;

    bool streams = true;            ///< false: its stream lacks what we need; ask for one body
    bool stream_usage = true;       ///< understands stream_options.include_usage
    bool drop_seed_at_zero = false; ///< a seed makes it serve the request alone; at T=0 it is void
    bool drop_nulls = false;        ///< a null member breaks it; it means the same as none

    bool keep_alive = true;                      ///< false: a connection per request
    unsigned backlog = 128;                      ///< of its listening socket
    std::chrono::milliseconds accept_interval{}; ///< pace of connections past the backlog

    unsigned in_flight = 16; ///< requests at once, to start with
    Release release = Release::first_text;
    std::chrono::milliseconds commit_delay{}; ///< with Release::done
    unsigned shared_tokens = 64; ///< a shared prefix shorter than this is not worth a leader
    bool match_length = false;   ///< it pads its prefill batch: prompts of like length together
    unsigned leaders = 0;        ///< shared prefixes being filled at once; 0: any number
    unsigned refill = 1;         ///< free places to wait for before more is admitted; 1: a flow
    unsigned prefill_tokens = 0; ///< cold prompt tokens admitted before their first text; 0: any
    bool tools_before_system = true; ///< where the model's template puts the tools
};

/// The servers evalrt knows by name.
std::span<const BackendRow> backend_rows();

/// Null: unknown.
const BackendRow* find_backend_row(std::string_view name);

/// "tinygpt, mlx-server, openai-url", for messages.
std::string backend_names();

} // namespace evalrt

#endif
