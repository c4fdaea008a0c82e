// EngineModel: what a model server's prefix cache holds and how long its steps take, in virtual
// time. Which rules a server follows was read in its source; each model names them.
#ifndef EVALRT_TESTS_ENGINE_MODEL_HPP
#define EVALRT_TESTS_ENGINE_MODEL_HPP

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace evalrt::test {

using Tokens = std::vector<std::uint32_t>;

/// About the tokens that a BPE makes: runs of letters, digits and signs with the blank before them.
/// Appends.
void tokenize(std::string_view text, Tokens& out);

/// What is asked, and what will be answered.
struct Job {
    Tokens tokens;            ///< the prompt and then the answer, which has one at least
    std::size_t prompt = 0;   ///< how many of them are the prompt's
    std::size_t system = 0;   ///< and the system block's, in front, if a server finds its end
    bool user_last = true;    ///< the last message is a user's
    bool calls_tools = false; ///< the answer

    std::size_t output() const { return tokens.size() - prompt; }
};

/// A step with `tokens` computed for `streams` decoding ones over `context` cached tokens takes
/// overhead + max(weights, tokens * token) + streams * stream + context * kv seconds.
struct Hardware {
    double overhead = 1e-3, weights = 3.6e-3, token = 1.0 / 30000, stream = 0, kv = 131072 / 4.0e12;

    double step(std::size_t tokens, std::size_t streams, std::size_t context) const {
        const double compute = double(tokens) * token;
        return overhead + (compute > weights ? compute : weights) + double(streams) * stream +
               double(context) * kv;
    }
};

struct EngineConfig {
    std::string kind; ///< vllm, sglang, mlx, omlx, llama
    Hardware hardware;
    std::size_t cache = 100'000; ///< tokens; mlx: entries; llama: of the host's cache
    std::size_t page = 1;        ///< tokens that are cached together
    unsigned batch = 256;        ///< decoding at once; llama: slots
    unsigned prompts = 8;        ///< mlx: in a prefill batch
    std::size_t budget = 8192;   ///< tokens of a step; mlx: of each prompt
    double commit = 0;           ///< omlx: from the end of a request to its blocks being visible
    double slice = 0.5;          ///< mlx: seconds between two looks at its queue
};

/// vllm and sglang on an H200 with a model of 8B, 100,000 tokens of cache; mlx, omlx and llama on
/// an M4 Max with one of 4B in 4 bits (mlx-lm's BENCHMARKS.md: 1,622 prompt tokens/s, 134.5
/// decoded); mlx-cpu: SmolLM2-135M on two cores, measured.
EngineConfig engine_config(std::string_view name);

struct EngineEvent {
    enum What { token, done, computed };
    std::uint64_t id = 0;
    What what = token;   ///< computed: the server says so of the prompt
    bool hidden = false; ///< the token is not shown before the end
};

class EngineModel {
public:
    virtual ~EngineModel() = default;

    /// `job` must stay until it is done or cancelled.
    virtual void submit(std::uint64_t id, const Job& job) = 0;

    virtual void cancel(std::uint64_t id) = 0;

    /// One step that begins at `now`: its seconds. The events happen at its end.
    virtual double step(double now, std::vector<EngineEvent>& events) = 0;

    virtual bool idle() const = 0;

    /// Of the prompt of a job that has its first token.
    virtual std::size_t cached(std::uint64_t id) const = 0;

    struct Totals {
        std::size_t prefilled = 0; ///< prompt tokens computed
        std::size_t cached = 0;    ///< prompt tokens not computed
        std::size_t padded = 0;    ///< computed, with the padding
        std::size_t preempted = 0, steps = 0;
    };
    const Totals& totals() const { return totals_; }

protected:
    Totals totals_;
};

std::unique_ptr<EngineModel> make_engine(const EngineConfig& config);

/// Prompt tokens that must be computed whatever the order, each shared page once (turns of a
/// session after one another, so that an answer is cached for the next); and none of them is
/// computed for less than one token.
std::size_t least_prefill(std::span<const Job* const> jobs, std::size_t page);

/// Seconds below which no order can bring it; `chains`: turns that must follow one another, by
/// index. prefix.md's T_LB: the larger of the work and the longest chain.
double least_seconds(const EngineConfig& config, std::span<const Job* const> jobs,
                     std::span<const std::vector<std::size_t>> chains, std::size_t prefill);

} // namespace evalrt::test

#endif
