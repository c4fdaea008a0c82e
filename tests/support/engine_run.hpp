// A suite against an EngineModel through the core that runs in production (SchedulerCore, planner,
// Limiter), in virtual time and without sockets.
#ifndef EVALRT_TESTS_ENGINE_RUN_HPP
#define EVALRT_TESTS_ENGINE_RUN_HPP

#include "evalrt/backend_row.hpp"
#include "evalrt/request.hpp"
#include "support/engine_model.hpp"

#include <istream>
#include <map>

namespace evalrt::test {

struct Turn {
    Request request;
    Job job;
    std::size_t next = 0; ///< the turn that follows; 0: none
    bool first = true;
};

struct Suite {
    std::vector<Turn> turns; ///< in the order of the file

    std::vector<const Job*> jobs() const;
    std::vector<std::vector<std::size_t>> chains() const;
};

/// A chat body as a Qwen-like template renders it: the system prompt, then the tools in the system
/// block, then the messages.
Job render(std::string_view body, std::string_view answer);

/// JSON lines: {"body": {...}, "answer": "...", "session": "...", "turn": n}; session and turn may
/// be missing. In place of the answer "output_tokens"; "tokens": the prompt's, as a model has them.
/// An answer that begins with [{"name" calls tools, if there are some.
Suite read_suite(std::istream& in);

/// What production knows of that engine.
BackendRow engine_row(const EngineConfig& config);

struct RunOptions {
    bool planned = true;    ///< else in the order of the file, a thread a conversation
    unsigned in_flight = 0; ///< 0: what the row says, found by itself
    double arrival = 1e-3;  ///< from the client to the server's queue
};

struct RunResult {
    double seconds = 0;
    EngineModel::Totals totals;
    std::size_t answered = 0, prompt_tokens = 0;
    double in_flight_mean = 0;
    unsigned limit = 0;             ///< at the end
    unsigned after_fifth = 0;       ///< when a fifth was answered
    unsigned least = ~0u, most = 0; ///< limits while something waited, in the second half
    std::map<std::size_t, std::size_t> cached; ///< by turn
};

/// Throws std::logic_error where the core neither runs nor waits for anything.
RunResult run(const Suite& suite, const EngineConfig& config, const BackendRow& row,
              const RunOptions& options = {});

} // namespace evalrt::test

#endif
