#include "evalrt/backend_row.hpp"

#include <array>

namespace evalrt {
namespace {

using namespace std::chrono_literals;

const std::array rows{
    // tinygpt serve: one serial queue, so one in flight. No usage in its stream, and a failure
    // there is only finish_reason "error": it is asked for one body. listen(fd, 16).
    BackendRow{
        .name = "tinygpt",
        .command = {"tinygpt", "serve", "{model}", "--host", "127.0.0.1", "--port", "{port}",
                    "--max-context", "{context}"},
        .served_model = "tinygpt",
        .streams = false,
        .stream_usage = false,
        .keep_alive = false,
        .backlog = 16,
        .in_flight = 1,
        .release = Release::at_once,
        .tools_before_system = false,
    },
    // mlx_lm.server: Python's http.server, so HTTP/1.0 and a listen backlog of 5. It batches up to
    // 32 sequences, but not one with a seed; null for a number closes the connection unanswered.
    // Any model name but the one it was started with makes it drain its batch and load that.
    BackendRow{
        .name = "mlx-server",
        .command = {"mlx_lm.server", "--model", "{model}", "--host", "127.0.0.1", "--port",
                    "{port}"},
        .served_model = "default_model",
        .drop_seed_at_zero = true,
        .drop_nulls = true,
        .keep_alive = false,
        .backlog = 5,
        .accept_interval = 20ms,
        .in_flight = 32, // its --decode-concurrency; answers of unlike length keep the batch full
        .release = Release::first_text,
        .match_length = true,
    },
    BackendRow{
        .name = "openai-url",
    },
};

} // namespace

std::span<const BackendRow> backend_rows() { return rows; }

const BackendRow* find_backend_row(std::string_view name) {
    for (const auto& row : rows)
        if (row.name == name) return &row;
    return nullptr;
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
