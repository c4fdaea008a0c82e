#include "evalrt/backend_row.hpp"
#include "evalrt/request_scheduler.hpp"

#include "support/catch.hpp"

#include <algorithm>
#include <set>

using namespace evalrt;

namespace {

std::vector<BackendRow> all_rows() {
    std::vector<BackendRow> rows(backend_rows().begin(), backend_rows().end());
    rows.insert(rows.end(), profile_rows().begin(), profile_rows().end());
    return rows;
}

} // namespace

TEST_CASE("rows and profiles have names of their own and are found by them") {
    std::set<std::string> names;
    for (const auto& row : all_rows()) {
        CHECK(names.insert(row.name).second);
        REQUIRE(find_profile_row(row.name));
        CHECK(find_profile_row(row.name)->name == row.name);
    }
    CHECK(find_backend_row("tinygpt"));
    CHECK_FALSE(find_backend_row("vllm")); // not for --backend
    CHECK_FALSE(find_profile_row("nonsense"));
    CHECK(backend_names().starts_with("tinygpt, omlx, mlx-server, openai-url"));
}

TEST_CASE("every row can be run") {
    for (const auto& row : all_rows()) {
        CAPTURE(row.name);
        CHECK(row.in_flight >= 1);
        CHECK(row.backlog >= 1);
        CHECK_FALSE(row.remark.empty());
        CHECK((row.release == Release::done) == (row.commit_delay.count() > 0));
        // A burst over the listen backlog loses connections unless they are paced.
        CHECK((row.backlog >= row.in_flight || row.accept_interval.count() > 0));
        if (row.command.empty()) continue;
        const auto has = [&](std::string_view word) {
            return std::find(row.command.begin(), row.command.end(), word) != row.command.end();
        };
        CHECK(has("{port}"));
        CHECK((has("{model}") || has("{model_dir}")));
        // An IPv4 literal: tinygpt does not look names up.
        CHECK(has("127.0.0.1"));
    }
}

TEST_CASE("what a row says of its cache reaches the scheduler and the planner") {
    const auto& row = *find_backend_row("omlx");
    CHECK(scheduler_options(row).commit_delay == row.commit_delay);
    CHECK(scheduler_options(row).max_in_flight == 8);
    CHECK(planner_options(row).release == Release::done);
    CHECK(planner_options(row).shared_bytes >= 256 * 4);
    CHECK(planner_options(*find_profile_row("vllm")).release == Release::at_once);
}
