#include "evalrt/backend_row.hpp"

#include <array>

namespace evalrt {
namespace {

using namespace std::chrono_literals;

// What stands here without a source was read in the server's own code or measured.
const std::array rows{
    // tinygpt serve: one serial queue, so one in flight. No usage in its stream, and a failure
    // there is only finish_reason "error": it is asked for one body. listen(fd, 16). It has its own
    // ChatML in place of the model's template, which leaves tools out.
    BackendRow{
        .name = "tinygpt",
        .command = {"tinygpt", "serve", "{model}", "--host", "127.0.0.1", "--port", "{port}",
                    "--max-context", "{context}"},
        .served_model = "tinygpt",
        .streams = false,
        .stream_usage = false,
        .max_tokens_only = true,
        .text_only = true,
        .ignored = {"n", "top_p", "tools", "response_format"},
        .default_max_tokens = 128,
        .always_stop = true,
        .cuts_prompt = true,
        .cached_hint = "tinygpt does not report cached tokens",
        .keep_alive = false,
        .backlog = 16,
        .in_flight = 1,
        .release = Release::at_once,
        .tools_before_system = false,
        .remark = "answers one request at a time",
    },
    // oMLX: batches 8. Its cache has whole blocks of 256 tokens, which a background worker stores
    // once a request has ended: a sibling sent right then found 0 to 512 of 1,280 tokens, four
    // seconds later all. It writes its options into its base folder, so that is a private one.
    // Its fork 0.4.5.dev1 takes the folder from the environment only.
    BackendRow{
        .name = "omlx",
        .messages_endpoint = true,
        .cache_marks = true, // it then reports what it had cached
        .command = {"omlx", "serve", "--model-dir", "{model_dir}", "--base-path", "{folder}",
                    "--host", "127.0.0.1", "--port", "{port}"},
        .env = {{"OMLX_BASE_PATH", "{folder}"}},
        .in_flight_flag = "--max-concurrent-requests",
        .served_model = "{model_id}",
        .max_tokens_only = true,
        .ignored = {"n", "logprobs"},
        .default_temperature = 1.0,
        .token_chunks = false,
        .absent_cached_zero = true,
        .backlog = 2048, // uvicorn's
        .in_flight = 8,
        .release = Release::done,
        .commit_delay = 4s,
        .shared_tokens = 256,
        .block_tokens = 256,
        .remark = "--model is the model's folder; its name is the model's name",
    },
    // mlx_lm.server: Python's http.server, so HTTP/1.0 and a listen backlog of 5. It batches up to
    // 32 sequences, but not one with a seed; null for a number closes the connection unanswered.
    // Any model name but the one it was started with makes it drain its batch and load that. A
    // batch of requests with and without a logits processor can end its generation thread for good
    // (mlx-lm's issues 1472 and 1505).
    BackendRow{
        .name = "mlx-server",
        .command = {"mlx_lm.server", "--model", "{model}", "--host", "127.0.0.1", "--port",
                    "{port}"},
        .in_flight_flag = "--decode-concurrency",
        .cache_flag = "--prompt-cache-size",
        .served_model = "default_model",
        .drop_seed_at_zero = true,
        .drop_nulls = true,
        .logprobs_bool = true,
        .processors_mix = false,
        .ignored = {"n", "response_format", "tool_choice"},
        .default_max_tokens = 512,
        .keep_alive = false,
        .backlog = 5,
        .accept_interval = 20ms,
        .alone = {{"--draft-model", "a draft model"},
                  {"--kv-bits", "a quantised cache"},
                  {"", "a model with layers whose caches cannot be put together"}},
        .in_flight = 32, // its --decode-concurrency; answers of unlike length keep the batch full
        .release = Release::first_text,
        .shared_tokens = 128,
        .padding_tokens = 200,
        .leaders = 1, // of two, the followers of one would push out what the other has filled
        // Its cache has ten entries, and forgets the oldest. An entry keeps the memory of the whole
        // batch that it was in: more of them are the user's to ask for.
        .sessions = 8,
        .repack = 19, // measured: 24 at once is best with 32-token answers, 32 with 170 and more
        .refill = 8,  // each arrival makes it pack its whole batch anew
        .remark = "a seed at temperature 0 is dropped: with one it does not batch",
    },
    BackendRow{
        .name = "openai-url",
        .most_in_flight = 64,
        .remark = "any OpenAI-compatible address; what is behind it is looked up (see below)",
    },
    // Anthropic's API and servers compatible with it. An entry of its cache can be read when its
    // first answer begins to stream. What is too short for its cache depends on the model: 512 to
    // 4,096 tokens, by its documentation of 2026.
    BackendRow{
        .name = "anthropic-url",
        .wire = Wire::anthropic,
        .cache_marks = true,
        .release = Release::first_text,
        .shared_tokens = 1024,
        .remark = "Anthropic's API, or a server compatible with it",
    },
};

// Recognised behind a URL.
const std::array profiles{
    // Blocks (of 16 tokens on a GPU; its /metrics tells) are registered when they are allocated,
    // so requests share a prefix that is being filled. 64: on two cores without a GPU it was still
    // the fastest width tried.
    BackendRow{
        .name = "vllm",
        .messages_endpoint = true,
        .cached_hint = "vLLM reports cached tokens if it is started with "
                       "--enable-prompt-tokens-details",
        .backlog = 2048,
        .in_flight = 64,
        .most_in_flight = 256,
        .release = Release::at_once,
        .shared_tokens = 16,
        .block_tokens = 16,
        .remark = "shares a prefix while it is filled",
    },
    BackendRow{
        .name = "sglang",
        .cached_hint = "SGLang reports cached tokens if it is started with --enable-cache-report",
        .backlog = 2048,
        .in_flight = 64,
        .most_in_flight = 256,
        .release = Release::first_text,
        .shared_tokens = 32,
        .leaders = 8, // more of them fill its cache with prefixes that nobody follows for long
        .remark = "max_running_requests, if it tells a lower number",
    },
    // A prefix belongs to a slot: each slot fills it once, whoever waits for whom.
    BackendRow{
        .name = "llama-server",
        .messages_endpoint = true,
        .default_temperature = 0.8,
        .in_flight = 4,
        .release = Release::slot,
        .remark = "as many at once as it has slots",
    },
    BackendRow{
        .name = "lm-studio",
        .messages_endpoint = true,
        .cached_hint = "LM Studio does not report cached tokens",
        .in_flight = 4,
        .release = Release::first_text,
        .remark = "as many at once as the loaded model's \"parallel\"",
    },
    BackendRow{
        .name = "ollama",
        .messages_endpoint = true,
        .ignored = {"n", "tool_choice", "logit_bias"},
        .cuts_prompt = true,
        .cached_hint = "Ollama does not report cached tokens",
        .in_flight = 1,
        .release = Release::at_once,
        .remark = "more only with OLLAMA_NUM_PARALLEL, which it does not tell",
    },
    // sglang-router 0.3.2 over other servers: what is said of those is theirs. It reads a body and
    // writes it anew, so that a member that it does not know is lost, and asks up to five times for
    // what failed. Its policy "manual" goes by the header.
    BackendRow{
        .name = "sglang-router",
        .routing_key = true,
        .ignored = {"cache_prompt", "id_slot"},
        .backlog = 1024, // axum's
        .remark = "the row of its servers, for all of them; several are filled side by side",
    },
    // https://platform.openai.com/docs/guides/prompt-caching: prompts of 1,024 tokens and more.
    // Which
    // of its machines answers depends on the first 256 tokens or so and on the prompt_cache_key.
    BackendRow{
        .name = "openai",
        .cache_key = true,
        .backlog = 2048,
        .in_flight = 16,
        .most_in_flight = 100,
        .release = Release::first_text,
        .shared_tokens = 1024,
        .remark = "api.openai.com",
    },
    BackendRow{
        .name = "cloud",
        .backlog = 2048,
        .in_flight = 16,
        .most_in_flight = 100,
        .release = Release::first_text,
        .shared_tokens = 1024,
        .remark = "other hosted services, by their host names",
    },
};

} // namespace

std::span<const BackendRow> backend_rows() { return rows; }

const BackendRow* find_backend_row(std::string_view name) {
    for (const auto& row : rows)
        if (row.name == name) return &row;
    return nullptr;
}

std::span<const BackendRow> profile_rows() { return profiles; }

const BackendRow* find_profile_row(std::string_view name) {
    for (const auto& row : profiles)
        if (row.name == name) return &row;
    return find_backend_row(name);
}

std::string backend_names() {
    std::string names;
    for (const auto& row : rows) {
        if (!names.empty()) names += ", ";
        names += row.name;
    }
    return names;
}

} // namespace evalrt
