// What of this machine's memory a server of ours may use to keep prefixes.
#ifndef EVALRT_LIB_PROMPT_CACHE_HPP
#define EVALRT_LIB_PROMPT_CACHE_HPP

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace evalrt::detail {

/// Bytes that a token of a prompt takes in the memory of the model that a config.json describes (as
/// Hugging Face writes them), rounded up where layers keep less than all tokens. 0: it does not
/// say.
std::int64_t kv_bytes_per_token(std::string_view config);

struct PromptCache {
    std::int64_t bytes = 0, tokens = 0; ///< 0: leave the server's own limits
};

/// Half the memory, less what the model takes: the other half is for the batch's work and for all
/// other programs. Too little for 64 prompts of 1,024 tokens: nothing.
PromptCache prompt_cache(std::int64_t memory_bytes, std::int64_t model_bytes,
                         std::int64_t bytes_per_token);

/// Of the model in this folder, on this machine.
PromptCache prompt_cache(const std::string& model_folder);

/// The whole number given to an option in a server's arguments ("--flag N" or "--flag=N"; the last
/// counts), or -1.
std::int64_t number_given(std::span<const std::string> arguments, std::string_view flag);

} // namespace evalrt::detail

#endif
