#include "evalrt/detail/shards.hpp"

#include "support/catch.hpp"

#include <cmath>
#include <map>
#include <numeric>
#include <random>

using namespace evalrt::detail;

namespace {

std::optional<ShardChoice> read(std::string_view text, std::map<std::string, std::string> env,
                                std::string& error) {
    error.clear();
    return read_shard(
        text,
        [&](const char* name) -> std::optional<std::string> {
            const auto it = env.find(name);
            if (it == env.end()) return {};
            return it->second;
        },
        error);
}

std::uint64_t total(const std::vector<ShardItem>& order) {
    return std::accumulate(order.begin(), order.end(), std::uint64_t(0),
                           [](auto sum, const auto& it) { return sum + it.cost; });
}

} // namespace

TEST_CASE("Equal items are cut into equal runs") {
    const std::vector<ShardItem> order(12, {10, 0});
    const Shards shards(order, 4);
    REQUIRE(shards.count() == 4);
    for (std::size_t i = 0; i < 4; ++i) {
        CHECK(shards.begin(i) == 3 * i);
        CHECK(shards.end(i) == 3 * i + 3);
        CHECK(shards.cost(i) == 30);
    }
    CHECK(shards.duplicated() == 0);
}

TEST_CASE("A cut moves to where less is shared, and what it computes twice is counted") {
    // Two groups of 51 and 49, each with a prefix of 1,000 in common.
    std::vector<ShardItem> order;
    for (const auto size : {51, 49}) {
        order.push_back({1010, 0});
        for (int i = 1; i < size; ++i) order.push_back({10, 1000});
    }
    const Shards shards(order, 2);
    CHECK(shards.end(0) == 51);
    CHECK(shards.duplicated() == 0);

    // One group: wherever it is cut, the prefix is computed twice.
    std::vector<ShardItem> one(100, {10, 1000});
    one.front().shared = 0;
    const Shards halves(one, 2);
    CHECK(halves.duplicated() == 1000);
    CHECK(halves.cost(0) == 500);
    CHECK(halves.cost(1) == 1500);
}

TEST_CASE("An order is cut where little is shared, and never through a conversation") {
    // Groups of 10, 400 bytes of 404 shared inside: a group costs 101 + 9 * 1 tokens.
    std::vector<ShardItem> order;
    for (int i = 0; i < 1000; ++i)
        order.push_back(i % 10 == 0 ? ShardItem{404, 0} : ShardItem{4, 400});
    CHECK(Shards(order, 1).end(0) == 1000);
    const Shards three(order, 3);
    for (const std::size_t i : {1, 2}) {
        CHECK(order[three.begin(i)].shared == 0);
        CHECK(std::abs(double(three.begin(i)) - 1000.0 * double(i) / 3) < 25);
    }
    for (std::size_t i = 0; i < order.size(); ++i) order[i].continues = i % 500 != 0;
    const Shards pairs(order, 3); // two conversations: whole, whatever the share
    for (const std::size_t i : {1, 2}) CHECK(pairs.begin(i) % 500 == 0);
    for (auto& it : order) it.continues = &it != &order.front();
    const Shards one(order, 2);
    CHECK(one.begin(1) == 0);
    CHECK(one.end(1) == 1000);
    const Shards none({}, 3);
    CHECK((none.begin(1) == 0 && none.begin(2) == 0));
}

TEST_CASE("More shards than items leave some empty, and no items all") {
    const Shards shards(std::vector<ShardItem>(3, {1, 0}), 7);
    std::size_t items = 0;
    for (std::size_t i = 0; i < 7; ++i) items += shards.end(i) - shards.begin(i);
    CHECK(items == 3);
    const Shards empty({}, 3);
    CHECK(empty.end(2) == 0);
    const Shards free(std::vector<ShardItem>(5, {0, 0}), 2); // nothing costs anything
    CHECK(free.end(1) == 5);
}

TEST_CASE("Any order: every item is in one shard, runs are nearly equal, no better cut is near") {
    std::mt19937_64 random(7);
    const auto number = [&](std::uint64_t most) { return random() % (most + 1); };
    for (int round = 0; round < 500; ++round) {
        std::vector<ShardItem> order(number(60));
        std::uint64_t largest = 0;
        for (auto& it : order) {
            it = {number(100), number(5) * 100};
            largest = std::max(largest, it.cost);
        }
        if (!order.empty()) order.front().shared = 0;
        const auto count = 1 + number(8);
        const Shards shards(order, count);
        REQUIRE(shards.count() == count);
        REQUIRE(shards.begin(0) == 0);
        REQUIRE(shards.end(count - 1) == order.size());
        const double share = double(total(order)) / double(count);
        std::uint64_t duplicated = 0;
        for (std::size_t i = 0; i < count; ++i) {
            const auto begin = shards.begin(i), end = shards.end(i);
            REQUIRE(begin <= end);
            if (i > 0) REQUIRE(begin == shards.end(i - 1));
            // The naive sum, and the bound of both cuts' moves.
            const std::vector<ShardItem> run(order.begin() + long(begin),
                                             order.begin() + long(end));
            const auto twice = begin > 0 && begin < end ? order[begin].shared : 0;
            REQUIRE(shards.cost(i) == total(run) + twice);
            REQUIRE(double(total(run)) <= share * 1.25 + double(largest) + 1e-6);
            if (begin > 0 && begin < order.size() && (i == 0 || begin != shards.begin(i - 1)))
                duplicated += order[begin].shared;
        }
        REQUIRE(shards.duplicated() == duplicated);
        // Naively: no place within an eighth of a run of the target shares less.
        if (count == 2 && !order.empty()) {
            const auto cut = shards.begin(1);
            const auto shared = cut < order.size() ? order[cut].shared : 0;
            std::uint64_t before = 0;
            for (const auto& it : order) {
                const auto away = std::abs(double(before) - share);
                if (away <= share / 8) REQUIRE(shared <= it.shared);
                before += it.cost;
            }
        }
    }
}

TEST_CASE("--shard I/N") {
    std::string error;
    const auto choice = read("2/8", {}, error);
    REQUIRE(choice);
    CHECK(choice->index == 2);
    CHECK(choice->count == 8);
    for (const auto* text : {"", "2", "8/8", "-1/4", "a/4", "1/0", "1/", "/4", "1/4/2", "1/x",
                             "auto/", "auto/0", "automatic", "99999999999/4"}) {
        INFO(text);
        CHECK_FALSE(read(text, {}, error));
        CHECK(error.starts_with("--shard"));
    }
    read("8/8", {}, error);
    CHECK(error == "--shard 8/8: there is no part 8 of 8, they count from 0");
}

TEST_CASE("--shard auto reads what schedulers set, Open MPI before Slurm before Kubernetes") {
    std::string error;
    const auto is = [&](std::string_view text, std::map<std::string, std::string> env,
                        std::size_t index, std::size_t count) {
        const auto choice = read(text, std::move(env), error);
        INFO(error);
        REQUIRE(choice);
        CHECK(choice->index == index);
        CHECK(choice->count == count);
    };
    is("auto", {{"SLURM_ARRAY_TASK_ID", "3"}, {"SLURM_ARRAY_TASK_COUNT", "4"}}, 3, 4);
    is("auto",
       {{"SLURM_ARRAY_TASK_ID", "3"},
        {"SLURM_ARRAY_TASK_COUNT", "3"},
        {"SLURM_ARRAY_TASK_MIN", "1"}},
       2, 3);
    is("auto/3",
       {{"SLURM_ARRAY_TASK_ID", "14"},
        {"SLURM_ARRAY_TASK_COUNT", "3"},
        {"SLURM_ARRAY_TASK_MIN", "10"},
        {"SLURM_ARRAY_TASK_STEP", "2"}},
       2, 3);
    is("auto",
       {{"OMPI_COMM_WORLD_RANK", "1"},
        {"OMPI_COMM_WORLD_SIZE", "2"},
        {"SLURM_ARRAY_TASK_ID", "3"},
        {"SLURM_ARRAY_TASK_COUNT", "4"}},
       1, 2);
    is("auto/5", {{"JOB_COMPLETION_INDEX", "4"}}, 4, 5);
    is("auto/4", {{"SLURM_ARRAY_TASK_ID", "0"}, {"SLURM_ARRAY_TASK_COUNT", "4"}}, 0, 4);
    is("auto/3",
       {{"SLURM_ARRAY_TASK_ID", "10"},
        {"SLURM_ARRAY_TASK_COUNT", "3"},
        {"SLURM_ARRAY_TASK_MIN", "2"},
        {"SLURM_ARRAY_TASK_MAX", "10"},
        {"SLURM_ARRAY_TASK_STEP", "4"}},
       2, 3);

    CHECK_FALSE(read("auto", {}, error));
    CHECK(error.find("JOB_COMPLETION_INDEX") != error.npos);
    CHECK_FALSE(read("auto", {{"JOB_COMPLETION_INDEX", "1"}}, error));
    CHECK(error.find("auto/N") != error.npos);
    CHECK_FALSE(read("auto/2", {{"JOB_COMPLETION_INDEX", "x"}}, error));
    CHECK(error.find("\"x\", no number") != error.npos);
    CHECK_FALSE(read("auto/2", {{"JOB_COMPLETION_INDEX", "2"}}, error));
}

TEST_CASE("--shard auto: a rank that is alone is no part of an array of several tasks") {
    std::string error;
    std::map<std::string, std::string> env{{"OMPI_COMM_WORLD_RANK", "0"},
                                           {"OMPI_COMM_WORLD_SIZE", "1"},
                                           {"SLURM_ARRAY_TASK_ID", "1"},
                                           {"SLURM_ARRAY_TASK_COUNT", "2"}};
    CHECK_FALSE(read("auto", env, error));
    CHECK(error.find("SLURM_ARRAY_TASK_COUNT is more") != error.npos);
    env["SLURM_ARRAY_TASK_COUNT"] = "1";
    CHECK(read("auto", env, error));
    env.erase("SLURM_ARRAY_TASK_COUNT");
    CHECK(read("auto", env, error));
    env["JOB_COMPLETION_INDEX"] = "0";
    CHECK(read("auto", env, error));
    env["JOB_COMPLETION_INDEX"] = "3";
    CHECK_FALSE(read("auto", env, error));
    CHECK(error.find("JOB_COMPLETION_INDEX is more") != error.npos);
}

TEST_CASE("--shard auto: what the scheduler says stands, and its numbers must have no gaps") {
    std::string error;
    CHECK_FALSE(
        read("auto/8", {{"SLURM_ARRAY_TASK_ID", "0"}, {"SLURM_ARRAY_TASK_COUNT", "4"}}, error));
    CHECK(error.find("SLURM_ARRAY_TASK_COUNT is 4, not 8") != error.npos);
    CHECK_FALSE(
        read("auto/3", {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "2"}}, error));
    CHECK(error.find("OMPI_COMM_WORLD_SIZE is 2, not 3") != error.npos);
    // --array=0,2,7: every task says so, also those whose number would do.
    for (const auto* task : {"0", "2", "7"}) {
        CHECK_FALSE(read("auto",
                         {{"SLURM_ARRAY_TASK_ID", task},
                          {"SLURM_ARRAY_TASK_COUNT", "3"},
                          {"SLURM_ARRAY_TASK_MIN", "0"},
                          {"SLURM_ARRAY_TASK_MAX", "7"},
                          {"SLURM_ARRAY_TASK_STEP", "1"}},
                         error));
        CHECK(error.find("gaps (3 tasks from 0 to 7)") != error.npos);
    }
    // --array=3 of an array that was larger, and --array=3-4.
    for (const auto* count : {"1", "2"}) {
        std::map<std::string, std::string> env{{"SLURM_ARRAY_TASK_ID", "3"},
                                               {"SLURM_ARRAY_TASK_COUNT", count},
                                               {"SLURM_ARRAY_TASK_MIN", "3"}};
        CHECK_FALSE(read("auto", env, error));
        CHECK(error.find("begin at 3, so they may be some of more: give auto/" +
                         std::string(count)) != error.npos);
        CHECK(read(std::string("auto/") + count, env, error));
        CHECK_FALSE(read("auto/64", env, error));
    }
}
