// BackendRow: all that distinguishes one model server from another. A new server is a new row.
#ifndef EVALRT_BACKEND_ROW_HPP
#define EVALRT_BACKEND_ROW_HPP

#include "evalrt/request.hpp"

#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace evalrt {

enum class Wire { openai, anthropic };

/// When the server's prefix cache shows a prompt to the requests that come after.
enum class Release {
    at_once,    ///< when it is scheduled (vLLM): nobody has to wait for a leader
    first_text, ///< with its first token
    done,       ///< when it has ended, and commit_delay later
    slot, ///< only to its own slot (llama-server): nobody waits, but one prefix keeps one slot
};

struct BackendRow {
    std::string name; ///< as in --backend, or what a URL is recognised as
    Wire wire = Wire::openai;
    bool messages_endpoint = false; ///< on the openai wire: it has /v1/messages as well
    bool input_is_total = false;    ///< its Anthropic input_tokens count the cached ones, too
    bool cache_marks = false;       ///< its cache keeps only what cache_control marks (Anthropic)

    bool cache_key =
        false; ///< "prompt_cache_key" sends what shares a prefix to one machine (OpenAI)
    bool routing_key = false; ///< x-smg-routing-key sends a conversation, and what shares a prefix,
                              ///< to one of its servers (SGLang's router)
    unsigned workers = 1; ///< servers behind its address. in_flight, most_in_flight and repack are
                          ///< for all of them, what is said of a cache is of each

    /// Starts it: argv in which {model}, {port}, {context}, {model_dir} and {model_id} (the folder
    /// that the model's folder is in, and its name) and {folder} (a private one, made for the
    /// server and removed with it) are replaced. Empty: it runs already.
    std::vector<std::string> command;
    /// More of its environment; the same words are replaced.
    std::vector<std::pair<std::string, std::string>> env;
    std::string in_flight_flag; ///< its option for more requests at once than it takes by itself
    /// Its option for how many prompts its cache holds: one that the user gives to a server of ours
    /// sets `sessions`.
    std::string cache_flag;
    /// What "model" must say in a body ({model_id} is replaced); empty: the configured name, or the
    /// first that it serves.
    std::string served_model;

    // What its request parser trips over.
    bool streams = true;            ///< false: its stream lacks what we need; ask for one body
    bool stream_usage = true;       ///< understands stream_options.include_usage
    bool drop_seed_at_zero = false; ///< a seed makes it serve the request alone; at T=0 it is void
    bool drop_nulls = false;        ///< a null member breaks it; it means the same as none
    bool max_tokens_only = false;   ///< does not read max_completion_tokens
    bool text_only = false;         ///< content must be a string: arrays of parts become nothing
    bool logprobs_bool = false;     ///< "logprobs": 5 breaks it
    bool processors_mix = true;     ///< penalties or logit_bias in some requests only: no harm
    std::vector<std::string> ignored;          ///< members that it does not read
    unsigned default_max_tokens = 0;           ///< where a body has none; 0: no fixed limit
    std::optional<double> default_temperature; ///< where a body has none, if that is not 0

    // What its answers leave out.
    bool always_stop = false;        ///< finish_reason "stop" also where max_tokens has ended it
    bool cuts_prompt = false;        ///< cuts a prompt that is too long, and does not say so
    bool token_chunks = true;        ///< false: a chunk of its stream may hold several tokens
    bool absent_cached_zero = false; ///< leaves the number of cached tokens out where it is 0
    std::string cached_hint;         ///< where it reports no cached tokens: why, or how it would

    bool keep_alive = true;                      ///< false: a connection per request
    unsigned backlog = 128;                      ///< of its listening socket
    std::chrono::milliseconds accept_interval{}; ///< pace of connections past the backlog

    /// What makes it answer one request at a time, whatever is asked, in words, and the option of
    /// its command line that does; no option: something of the model.
    struct Alone {
        std::string option, why;
    };
    std::vector<Alone> alone;

    unsigned in_flight = 16;     ///< requests at once, to start with
    unsigned most_in_flight = 0; ///< to climb to where that pays; 0: it is known, no climbing
    Release release = Release::first_text;
    std::chrono::milliseconds commit_delay{}; ///< with Release::done
    unsigned shared_tokens = 64; ///< a shared prefix shorter than this is not worth a leader
    /// Not 0: it pads the prompts that it prefills together to the longest of them, first the
    /// system blocks and then the rest: those of like length go together. What is added to those
    /// without text yet may come to 1/10 of their cold tokens and this many.
    unsigned padding_tokens = 0;
    unsigned leaders = 0;          ///< shared prefixes being filled at once; 0: any number
    unsigned sessions = 0;         ///< conversations that its cache holds at once; 0: any number
    std::int64_t cache_tokens = 0; ///< that its cache holds, the running ones too; 0: not known
    unsigned block_tokens = 1;     ///< its cache has whole blocks of so many
    /// Not 0: each arrival and departure makes it copy its whole batch, so that short answers want
    /// a narrower one. The number in flight is at most sqrt(repack * mean tokens of an answer), but
    /// no less than 16: decoding an answer costs tokens * weights / width, and packing it in and
    /// out width * copy.
    double repack = 0;
    unsigned refill = 1;             ///< free places to wait for before more is admitted; 1: a flow
    bool tools_before_system = true; ///< where the model's template puts the tools

    std::string remark; ///< for whoever reads the table
};

/// The servers evalrt knows by name.
std::span<const BackendRow> backend_rows();

/// Null: unknown.
const BackendRow* find_backend_row(std::string_view name);

/// What a server behind a URL may be recognised as, beside the rows above: never started by us.
std::span<const BackendRow> profile_rows();
const BackendRow* find_profile_row(std::string_view name); ///< a row above, too

/// "tinygpt, omlx, mlx-server, openai-url, anthropic-url", for messages.
std::string backend_names();

} // namespace evalrt

#endif
