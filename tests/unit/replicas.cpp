#include "evalrt/detail/replicas.hpp"

#include "support/catch.hpp"

#include <map>
#include <random>

using namespace evalrt;
using detail::ReplicaPlanner;
using Step = PrefixPlanner::Stage;

namespace {

// Servers that answer one request a second each, in virtual time.
struct World {
    explicit World(std::size_t servers, unsigned most = 4, Release release = Release::at_once)
        : planner(servers, options(most, release)) {}

    static ReplicaPlanner::Options options(unsigned most, Release release) {
        ReplicaPlanner::Options it;
        it.planner.release = release;
        it.most = most;
        return it;
    }

    void add(RequestId id, int group) {
        auto& text = texts[id];
        text = std::to_string(group) + std::string(600, char('a' + group)) + std::to_string(id);
        Prompt prompt;
        prompt.segments = {text};
        prompt.output_tokens = 10;
        planner.add(id, prompt);
    }

    std::optional<Pick> next() {
        auto pick = planner.next(now);
        if (pick) running[pick->id] = pick->server;
        return pick;
    }

    void end(RequestId id, Step stage = Step::done) {
        if (stage == Step::done) {
            planner.progressed(id, Step::first_text, now);
            planner.alive(running[id]);
            asked[running[id]].push_back(id);
        }
        planner.progressed(id, stage, now);
        running.erase(id);
    }

    ReplicaPlanner planner;
    PrefixPlanner::Point now{std::chrono::seconds(1000)};
    std::map<RequestId, std::string> texts;
    std::map<RequestId, unsigned> running;
    std::map<unsigned, std::vector<RequestId>> asked;
};

} // namespace

TEST_CASE("Each server gets the groups of its own run") {
    World world(2, 1);
    for (RequestId id = 1; id <= 40; ++id) world.add(id, int(id % 4));
    std::map<unsigned, std::map<int, int>> groups;
    for (int i = 0; i < 40; ++i) {
        const auto pick = world.next();
        REQUIRE(pick);
        ++groups[pick->server][int(pick->id % 4)];
        world.end(pick->id);
    }
    CHECK_FALSE(world.next());
    // What is stolen at the end may be of one more.
    CHECK(groups[0].size() + groups[1].size() <= 5);
    CHECK(world.asked[0].size() + world.asked[1].size() == 40);
}

TEST_CASE("A server that is done takes half of what the slowest has left, but not its last one") {
    World world(2, 1);
    for (RequestId id = 1; id <= 20; ++id) world.add(id, 0);
    auto slow = world.next(), fast = world.next();
    REQUIRE((slow && fast && slow->server != fast->server));
    // The slow one never ends its first.
    std::size_t done = 0;
    while (true) {
        world.end(fast->id);
        ++done;
        fast = world.next();
        if (!fast) break;
        CHECK(fast->server != slow->server);
    }
    CHECK(done == 18); // the other one's next stays its own
    CHECK(world.planner.count(fast ? fast->server : 1 - slow->server).stolen > 4);
    world.end(slow->id);
    REQUIRE(world.next());
}

TEST_CASE("A server that cannot be reached loses its run to the others, and is tried again") {
    World world(3, 2);
    for (RequestId id = 1; id <= 60; ++id) world.add(id, int(id % 3));
    std::vector<Pick> picks;
    while (const auto pick = world.next()) picks.push_back(*pick);
    REQUIRE(picks.size() == 6);
    for (const auto& it : picks)
        if (it.server == 1) {
            world.planner.unreachable(1);
            world.end(it.id, Step::failed);
            world.add(it.id, int(it.id % 3));
        }
    CHECK_FALSE(world.planner.up(1));
    // All but it go on.
    for (int i = 0; i < 20; ++i) {
        for (const auto& [id, server] : std::map(world.running))
            if (server != 1) world.end(id);
        while (const auto pick = world.next()) CHECK(pick->server != 1);
    }
    CHECK(world.planner.wake() > world.now);
    // After the pause one request tries it; it answers, and it gets its share again.
    World again(2, 2);
    for (RequestId id = 1; id <= 60; ++id) again.add(id, 0);
    again.planner.unreachable(0);
    again.planner.unreachable(0);
    while (const auto pick = again.next()) CHECK(pick->server == 1);
    again.now += std::chrono::seconds(5);
    const auto probe = again.next();
    REQUIRE(probe);
    CHECK(probe->server == 0);
    CHECK_FALSE(again.next());
    again.end(probe->id);
    CHECK(again.planner.up(0));
    const auto more = again.next();
    REQUIRE(more);
    CHECK(more->server == 0);
}

TEST_CASE(
    "Any course of events: everything is asked, nothing twice at once, somebody always runs") {
    std::mt19937_64 random(11);
    for (int round = 0; round < 300; ++round) {
        const auto servers = 1 + random() % 4;
        World world(servers, unsigned(1 + random() % 4),
                    random() % 2 ? Release::at_once : Release::first_text);
        const RequestId count = random() % 80;
        for (RequestId id = 1; id <= count; ++id) world.add(id, int(random() % 5));
        std::size_t done = 0;
        std::vector<bool> dead(servers), gone(count + 1);
        for (int step = 0; step < 20000 && done < count; ++step) {
            while (true) {
                const auto before = world.running;
                const auto pick = world.planner.next(world.now);
                if (!pick) break;
                REQUIRE_FALSE(before.contains(pick->id));
                REQUIRE_FALSE(gone[pick->id]);
                REQUIRE(pick->server < servers);
                world.running[pick->id] = pick->server;
            }
            if (world.running.empty()) { // only those wait that are tried later
                REQUIRE(world.planner.wake() < PrefixPlanner::Point::max());
                world.now = std::max(world.now, world.planner.wake());
                continue;
            }
            world.now += std::chrono::milliseconds(random() % 700);
            auto it = world.running.begin();
            std::advance(it, long(random() % world.running.size()));
            const auto [id, server] = *it;
            if (random() % 50 == 0) dead[random() % servers] = random() % 2 == 0;
            if (random() % 60 == 0) { // one that waits is given up, or one that does not is not
                const RequestId other = 1 + random() % count;
                if (!gone[other] && !world.running.contains(other)) {
                    world.planner.remove(other);
                    gone[other] = true;
                    ++done;
                }
            }
            if (dead[server]) {
                world.planner.unreachable(server);
                world.end(id, Step::failed);
                world.add(id, int(id % 5));
            } else {
                world.end(id);
                gone[id] = true;
                ++done;
            }
        }
        REQUIRE(done == count);
        REQUIRE_FALSE(world.planner.next(world.now));
    }
}
