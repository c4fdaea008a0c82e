#include "evalrt/detail/replicas.hpp"

#include "support/catch.hpp"

#include <algorithm>
#include <map>
#include <random>
#include <set>

using namespace evalrt;
using detail::ReplicaPlanner;
using Step = PrefixPlanner::Stage;

namespace {

// Servers that answer one request a second each, in virtual time.
struct World {
    explicit World(std::size_t servers, unsigned most_ = 4, Release release = Release::at_once)
        : planner(servers, options(release)), most(most_) {}

    static ReplicaPlanner::Options options(Release release) {
        ReplicaPlanner::Options it;
        it.planner.release = release;
        it.silence = std::chrono::seconds(20);
        return it;
    }

    // All have answered something.
    World& known() {
        for (std::size_t i = 0; i < planner.size(); ++i) planner.alive(i);
        return *this;
    }

    void add(RequestId id, int group, std::string session = {}, int turn = 0,
             std::uint64_t conversation = 0) {
        auto& text = texts[id];
        text = std::to_string(group) + std::string(600, char('a' + group)) + session +
               std::to_string(id);
        Prompt prompt;
        prompt.segments = {text};
        prompt.output_tokens = 10;
        sessions[id] = session;
        prompt.session = std::move(session);
        prompt.turn = turn;
        prompt.conversation = conversation;
        planner.add(id, prompt);
    }

    // As the scheduler does it: a server with `most` running, or that is shut, takes no more.
    std::optional<Pick> next() {
        for (unsigned i = 0; i < planner.size(); ++i)
            planner.admit(i, planner.running(i) < most && !shut.contains(i));
        auto pick = planner.next(now);
        if (pick) running[pick->id] = pick->server;
        return pick;
    }

    // Sends this one, wherever it goes; what else is sent meanwhile is answered.
    unsigned server_of(RequestId id) {
        for (int i = 0; i < 1000 && !running.contains(id); ++i) {
            const auto pick = next();
            REQUIRE(pick);
            if (pick->id != id) end(pick->id);
        }
        REQUIRE(running.contains(id));
        return running[id];
    }

    // The time for which some wait. False: nobody does.
    bool pass() {
        if (planner.wake() == PrefixPlanner::Point::max()) return false;
        now = std::max(now, planner.wake());
        return true;
    }

    void again(RequestId id) {
        end(id, Step::failed);
        Prompt prompt;
        prompt.segments = {texts[id]};
        prompt.output_tokens = 10;
        prompt.session = sessions[id];
        planner.add(id, prompt);
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
    unsigned most;
    std::set<unsigned> shut;
    PrefixPlanner::Point now{std::chrono::seconds(1000)};
    std::map<RequestId, std::string> texts, sessions;
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

TEST_CASE("A server that is done takes half of what the slowest has left") {
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
    CHECK(done == 19);
    CHECK(world.planner.count(1 - slow->server).taken_over > 4);

    // But not the last one of a server that has a place for it.
    World two(2, 4);
    for (RequestId id = 1; id <= 4; ++id) two.add(id, int(id)); // two each
    REQUIRE(two.next());
    for (int i = 0; i < 2; ++i) {
        const auto pick = two.next();
        REQUIRE(pick);
        CHECK(pick->server == 1);
        two.end(pick->id);
    }
    const auto last = two.next(); // it has the fewest running, and nothing left
    REQUIRE(last);
    CHECK(last->server == 0);
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
    // It is looked at after the pause, and not each time that somebody asks.
    CHECK(world.planner.due(world.now).empty());
    CHECK(world.planner.due(world.now + std::chrono::seconds(4)).empty());
    CHECK(world.planner.due(world.now + std::chrono::seconds(5)) == std::vector<std::size_t>{1});
    CHECK(world.planner.due(world.now + std::chrono::seconds(6)).empty());

    // Let in, it gets one request; that it answers gives it its share again.
    World again(2, 2);
    for (RequestId id = 1; id <= 60; ++id) again.add(id, 0);
    CHECK_FALSE(again.planner.unreachable(0));
    CHECK(again.planner.unreachable(0));
    CHECK_FALSE(again.planner.unreachable(0));
    while (const auto pick = again.next()) CHECK(pick->server == 1);
    again.now += std::chrono::minutes(5); // nothing but a look lets it in
    CHECK_FALSE(again.next());
    again.planner.let_in(0);
    const auto probe = again.next();
    REQUIRE(probe);
    CHECK(probe->server == 0);
    CHECK(again.planner.count(0).taken_over == 1);
    CHECK_FALSE(again.next());
    again.end(probe->id);
    CHECK(again.planner.proven(0));
    const auto more = again.next();
    REQUIRE(more);
    CHECK(more->server == 0);
    CHECK(again.planner.count(0).taken_over > 10);
}

using Fault = ReplicaPlanner::Fault;

TEST_CASE("A server that has answered nothing proves itself with one request, by its first text") {
    World world(2, 4);
    world.planner.let_in(1);
    for (RequestId id = 1; id <= 40; ++id) world.add(id, int(id % 2));
    std::map<unsigned, int> sent;
    Pick first;
    while (const auto pick = world.next())
        if (++sent[pick->server]; pick->server == 1) first = *pick;
    CHECK(sent == std::map<unsigned, int>{{0, 4}, {1, 1}});
    world.planner.progressed(first.id, Step::first_text, world.now);
    while (const auto pick = world.next()) ++sent[pick->server];
    CHECK(sent == std::map<unsigned, int>{{0, 4}, {1, 4}});
}

TEST_CASE("A first text does not prove a server that breaks what it began") {
    for (const bool breaks : {false, true}) {
        World world(2, 4);
        auto& planner = world.known().planner;
        for (RequestId id = 1; id <= 200; ++id) world.add(id, int(id % 2));
        const auto fails = [&] { // until it goes out; how often
            for (int count = 1; count < 100; ++count) {
                RequestId id = 0;
                while (id == 0) {
                    while (world.next()) {}
                    for (const auto& [it, server] : world.running)
                        if (server == 0) id = it;
                    if (id == 0) world.end(world.running.begin()->first);
                }
                planner.progressed(id, Step::first_text, world.now);
                const bool out = breaks ? planner.failed(0, id) && planner.unreachable(0)
                                        : planner.failed(0, Fault::passing, id).out;
                world.again(id);
                if (out) return count;
                // One at a time, until its first answer.
                if (!planner.proven(0)) CHECK(planner.running(0) == 0);
            }
            return 100;
        };
        CHECK(fails() == (breaks ? 2 : 8));
        while (!world.running.empty()) world.end(world.running.begin()->first);
        planner.leave_out(0); // no answer that was on its way
        planner.let_in(0);
        CHECK(fails() == (breaks ? 2 : 3));
    }
}

TEST_CASE("What a server fails is free to ask of each that has not failed it, once") {
    World world(3, 1);
    world.known();
    world.add(1, 0);
    std::set<unsigned> servers;
    for (int i = 0; i < 6; ++i) {
        const auto server = world.server_of(1);
        servers.insert(server);
        const bool free = i % 2 ? world.planner.failed(server, Fault::passing, 1).elsewhere
                                : world.planner.failed(server, 1);
        CHECK(free == (i < 2));
        world.again(1);
    }
    CHECK(servers.size() == 3);
}

TEST_CASE("What the last one that is in fails waits until the others were looked at") {
    using std::chrono::milliseconds;
    using std::chrono::seconds;
    for (const bool refuses : {false, true}) {
        World world(2, 1);
        auto& planner = world.known().planner;
        planner.leave_out(0);
        CHECK(planner.due(world.now).empty());
        world.add(1, 0), world.add(2, 0);
        const auto fail = [&](RequestId id) {
            REQUIRE(world.server_of(id) == 1);
            const bool waits = refuses ? planner.refused(1, id).elsewhere
                                       : planner.failed(1, Fault::passing, id).elsewhere;
            world.again(id);
            return waits;
        };
        CHECK(fail(1));
        // Others go on, and it comes again, or when the other one is in.
        CHECK(world.server_of(2) == 1);
        world.end(2);
        CHECK_FALSE(world.next());
        CHECK(planner.wake() == world.now + milliseconds(250));
        CHECK(planner.due(world.now + milliseconds(999)).empty());
        CHECK(planner.due(world.now += seconds(1)) == std::vector<std::size_t>{0});
        CHECK(planner.due(world.now += seconds(3)).empty()); // it is being looked at
        CHECK_FALSE(world.next());
        planner.stays_out(0);
        CHECK(planner.due(world.now += seconds(1)).empty()); // somebody has to wait for it
        CHECK(fail(1));
        CHECK_FALSE(world.next());
        CHECK(planner.due(world.now) == std::vector<std::size_t>{0});
        planner.let_in(0);
        CHECK(world.server_of(1) == 0);
        world.again(1);
        planner.leave_out(0);
        CHECK_FALSE(fail(1)); // that is held against it, but first others are looked at
        CHECK_FALSE(world.next());
        CHECK(planner.due(world.now).empty());
        CHECK(planner.due(world.now += seconds(1)) == std::vector<std::size_t>{0});
        planner.stays_out(0);
        CHECK(world.server_of(1) == 1);
        world.end(1);
        // What waits can be given up.
        world.add(3, 0);
        CHECK(fail(3));
        CHECK_FALSE(world.next());
        planner.remove(3);
        CHECK(world.pass());
        CHECK_FALSE(world.next());
        CHECK(planner.wake() == PrefixPlanner::Point::max());
    }
}

TEST_CASE("A server that only fails swallows nothing and is left out") {
    World world(2, 2);
    world.planner.let_in(1);
    for (RequestId id = 1; id <= 40; ++id) world.add(id, int(id % 2));
    std::vector<RequestId> failed;
    for (int i = 0; i < 60; ++i) {
        while (world.next()) {}
        if (world.running.empty()) break;
        const auto [id, server] = *world.running.begin();
        if (server == 0) {
            world.end(id);
            continue;
        }
        // What it was asked first it is not asked again, while the other can be.
        CHECK(std::find(failed.begin(), failed.end(), id) == failed.end());
        failed.push_back(id);
        const auto verdict = failed.size() % 2 ? world.planner.refused(1, id)
                                               : world.planner.failed(1, Fault::passing, id);
        CHECK(verdict.elsewhere);
        CHECK(verdict.out == (failed.size() == 3));
        world.end(id, Step::failed);
        world.add(id, int(id % 2));
    }
    CHECK(failed.size() == 3);
    CHECK_FALSE(world.planner.up(1));
    CHECK(world.asked[0].size() == 40);

    // It is looked at later each time, until it answers.
    auto& planner = world.planner;
    const auto waits = [&](std::chrono::seconds time) {
        CHECK(planner.due(world.now).empty());
        CHECK(planner.due(world.now += time - std::chrono::seconds(1)).empty());
        CHECK(planner.due(world.now += std::chrono::seconds(1)).size() == 1);
    };
    waits(std::chrono::seconds(5));
    for (const int seconds : {10, 20, 40, 60, 60}) {
        planner.let_in(1);
        for (int i = 0; i < 3; ++i) CHECK(planner.failed(1, Fault::passing, 0).elsewhere);
        waits(std::chrono::seconds(seconds));
    }
    planner.let_in(1);
    planner.alive(1);
    planner.unreachable(1);
    planner.unreachable(1);
    waits(std::chrono::seconds(5));
}

TEST_CASE("What a server that has answered fails is the item's, but for key, quota and model") {
    World world(2);
    auto& planner = world.known().planner;
    for (int i = 0; i < 20; ++i) { // some fail, some do not
        CHECK_FALSE(planner.failed(0, Fault::passing, 0).elsewhere);
        if (i % 5 == 0) planner.alive(0);
    }
    planner.alive(0);
    CHECK(planner.failed(0, Fault::lasting, 0).elsewhere);
    CHECK_FALSE(planner.failed(0, Fault::lasting, 0).out);
    CHECK(planner.failed(0, Fault::lasting, 0).out);
    CHECK_FALSE(planner.up(0));
    const auto late = planner.failed(0, Fault::lasting, 0); // what was on its way there
    CHECK((late.elsewhere && !late.out));
    // The last one that is in stays, and its failures count.
    world.add(1, 0);
    for (int i = 0; i < 20; ++i) {
        const auto verdict = planner.failed(1, Fault::lasting, 0);
        CHECK_FALSE((verdict.elsewhere || verdict.out));
        CHECK(planner.refused(1, 1).elsewhere == (i < 2)); // it waits for the other one, twice
    }
    CHECK(planner.up(1));

    World steady(2);
    auto& other = steady.known().planner;
    for (int i = 1; i <= 8; ++i) CHECK(other.failed(0, Fault::passing, 0).out == (i == 8));
}

TEST_CASE("What one server refuses another is asked; refused by two it has failed, at one request "
          "more") {
    World world(3);
    world.known();
    for (RequestId id = 1; id <= 30; ++id) world.add(id, int(id % 3));
    // Ten that nobody takes: 3, 6, ... And one that only the first refuses: 10.
    std::map<RequestId, std::vector<unsigned>> refused;
    std::set<RequestId> failed;
    while (const auto pick = world.next()) {
        const auto id = pick->id;
        if (id % 3 != 0 && !(id == 10 && refused[10].empty())) {
            world.end(id);
            continue;
        }
        CHECK_FALSE(failed.contains(id));
        refused[id].push_back(pick->server);
        if (world.planner.refused(pick->server, id).elsewhere) {
            world.again(id);
        } else {
            world.end(id, Step::failed);
            failed.insert(id);
        }
    }
    CHECK(failed == std::set<RequestId>{3, 6, 9, 12, 15, 18, 21, 24, 27, 30});
    for (const auto& [id, servers] : refused) {
        CHECK(servers.size() <= 2);
        CHECK(std::set(servers.begin(), servers.end()).size() == servers.size());
    }
    CHECK(refused[10].size() == 1);
    for (unsigned i = 0; i < 3; ++i) {
        CHECK(world.planner.up(i));
        CHECK(world.planner.count(i).refused == (i == refused[10].front()));
    }
}

namespace {

// A suite on servers of which some refuse some. Returns how often they were asked.
int run(World& world, RequestId count, const std::function<bool(unsigned, RequestId)>& refuses,
        std::set<RequestId>& failed) {
    for (RequestId id = 1; id <= count; ++id) world.add(id, int(id * 5 / (count + 1)));
    std::size_t ended = 0;
    int asked = 0;
    while (ended < count) {
        while (world.next()) ++asked;
        for (const auto i : world.planner.due(world.now)) world.planner.stays_out(i);
        if (world.running.empty() && world.pass()) continue;
        REQUIRE_FALSE(world.running.empty());
        // Refusals come at once, answers only when there is nothing else.
        auto it = std::find_if(world.running.begin(), world.running.end(),
                               [&](const auto& run) { return refuses(run.second, run.first); });
        if (it == world.running.end()) {
            world.end(world.running.begin()->first);
            ++ended;
            continue;
        }
        const auto [id, server] = *it;
        if (world.planner.refused(server, id).elsewhere) {
            world.again(id);
        } else {
            world.end(id, Step::failed);
            REQUIRE(failed.insert(id).second);
            ++ended;
        }
    }
    return asked;
}

} // namespace

TEST_CASE("A server that refuses what others answer is left out, and costs no item") {
    for (const bool answered : {false, true})
        for (const unsigned bad : {0u, 1u, 2u}) {
            World world(3);
            if (answered) world.known();
            std::set<RequestId> failed;
            const int asked = run(
                world, 300, [&](unsigned server, RequestId) { return server == bad; }, failed);
            CHECK(failed.empty());
            CHECK_FALSE(world.planner.up(bad));
            CHECK((world.planner.up((bad + 1) % 3) && world.planner.up((bad + 2) % 3)));
            CHECK(asked <= 300 + 20); // some were on their way
        }
}

TEST_CASE("Where everything is refused by everybody all of it fails, each asked thrice at most") {
    for (const bool answered : {false, true}) {
        World world(2);
        if (answered) world.known();
        std::set<RequestId> failed;
        const int asked = run(
            world, 40, [](unsigned, RequestId) { return true; }, failed);
        CHECK(failed.size() == 40);
        CHECK(asked <= 120);
        CHECK((world.planner.up(0) || world.planner.up(1)));
    }
}

TEST_CASE("Of many bad items each is shown to one other server, and nobody is left out for it") {
    // In a row, and one here and there.
    for (const bool row : {false, true}) {
        World world(2);
        world.known();
        std::set<RequestId> failed;
        const auto bad = [&](RequestId id) { return row ? id <= 400 : id % 3 == 0; };
        const int asked = run(
            world, 1200, [&](unsigned, RequestId id) { return bad(id); }, failed);
        CHECK(failed.size() == 400);
        for (const auto id : failed) CHECK(bad(id));
        CHECK(asked <= 1200 + 400);
        CHECK((world.planner.up(0) && world.planner.up(1)));
    }
}

TEST_CASE("A server that was right in what it refused, and turns bad, costs no item") {
    World world(2);
    world.known();
    std::set<RequestId> failed;
    bool sick = false;
    int refusals = 0;
    run(
        world, 1000,
        [&](unsigned server, RequestId id) {
            const bool bad = id % 5 == 0;
            sick |= bad && ++refusals > 200; // asked of those that run: more often than it happens
            return bad || (sick && server == 0);
        },
        failed);
    CHECK(sick);
    CHECK(failed.size() == 200);
    for (const auto id : failed) CHECK(id % 5 == 0);
    CHECK_FALSE(world.planner.up(0));
}

TEST_CASE("A server that was wrong in what it refused is no judge when it is alone") {
    World world(2, 1);
    world.planner.let_in(0);
    for (RequestId id = 1; id <= 20; ++id) world.add(id, 0);
    for (int wrong = 0; wrong < 3;) {
        const auto pick = world.next();
        REQUIRE(pick);
        if (pick->server == 1) {
            world.end(pick->id);
            wrong += world.planner.count(0).refused > unsigned(wrong);
        } else {
            CHECK(world.planner.refused(0, pick->id).elsewhere);
            world.again(pick->id);
        }
    }
    world.planner.leave_out(1);
    world.planner.let_in(0);
    const auto pick = world.next();
    REQUIRE((pick && pick->server == 0));
    const auto verdict = world.planner.refused(0, pick->id);
    CHECK((verdict.elsewhere && verdict.out));
    CHECK_FALSE(world.planner.up(0));
    world.again(pick->id);
    // The other one has come back.
    world.planner.let_in(1);
    CHECK(world.server_of(pick->id) == 1);
}

TEST_CASE("What a server has refused or failed it does not steal back, while another one is in") {
    for (const bool refuses : {true, false}) {
        World world(2, 1);
        world.known();
        for (RequestId id = 1; id <= 2; ++id) world.add(id, 0);
        const auto a = world.next(), b = world.next();
        REQUIRE((a && b && a->server != b->server));
        if (refuses)
            CHECK(world.planner.refused(a->server, a->id).elsewhere);
        else
            CHECK(world.planner.failed(a->server, Fault::passing, a->id).elsewhere);
        world.again(a->id);
        CHECK_FALSE(world.next()); // it waits for the one that runs on the other
        world.end(b->id);
        const auto then = world.next();
        REQUIRE(then);
        CHECK(then->id == a->id);
        CHECK(then->server == b->server);
        if (refuses) continue;
        // That one is left out: nobody else can be asked.
        world.planner.leave_out(b->server);
        world.again(a->id);
        CHECK(world.server_of(a->id) == a->server);
    }
    // It was only busy.
    World world(2, 1);
    world.known();
    for (RequestId id = 1; id <= 2; ++id) world.add(id, 0);
    const auto a = world.next();
    REQUIRE((a && world.next()));
    CHECK_FALSE(world.planner.busy(a->server, a->id, world.now).elsewhere);
    world.again(a->id);
    world.add(3, 0), world.add(4, 0); // the other one has more than its last
    for (int i = 0; i < 2; ++i) {
        const auto pick = world.next();
        REQUIRE(pick);
        CHECK(pick->server == a->server);
        world.end(pick->id);
    }
    // Both have failed it: the one that did so last leaves it to the other.
    World both(2, 1);
    both.known();
    both.add(1, 0);
    const auto first = both.server_of(1);
    CHECK(both.planner.failed(first, Fault::passing, 1).elsewhere);
    both.again(1);
    CHECK(both.server_of(1) == 1 - first);
    both.add(2, 0);
    CHECK(both.server_of(2) == first);
    CHECK_FALSE(both.planner.failed(1 - first, Fault::passing, 1).elsewhere);
    both.again(1);
    CHECK_FALSE(both.next());
    both.end(2);
    CHECK(both.server_of(1) == first);
}

TEST_CASE("The last one that is in rests after eight failures, each time") {
    World world(2, 9);
    auto& planner = world.known().planner;
    planner.leave_out(0);
    for (RequestId id = 1; id <= 40; ++id) world.add(id, 0);
    const auto fail_eight = [&] {
        while (world.next()) {}
        REQUIRE(world.running.size() == 9);
        for (int i = 0; i < 8; ++i) {
            const auto id = world.running.begin()->first;
            planner.failed(1, Fault::passing, id);
            world.end(id, Step::failed);
        }
    };
    for (int i = 0; i < 3; ++i) {
        fail_eight();
        CHECK_FALSE(world.next()); // until the other one was looked at, or it answers
        planner.due(world.now);
        CHECK(planner.due(world.now += std::chrono::seconds(1)).size() == 1);
        CHECK_FALSE(world.next());
        if (i % 2) planner.stays_out(0);
        world.end(world.running.begin()->first);
        if (i % 2 == 0) planner.stays_out(0);
    }
}

TEST_CASE("What one server has failed goes to one that has not, when a third goes out") {
    for (const bool talk : {false, true}) {
        World world(3, 1);
        world.known();
        const auto name = [&](RequestId id) { return talk && id < 10 ? "talk" : std::string(); };
        for (RequestId id = 1; id <= 30; ++id) world.add(id, 0, name(id), int(id));
        const auto first = world.server_of(1);
        world.planner.failed(first, Fault::passing, 1);
        world.again(1);
        const auto second = world.server_of(1);
        CHECK(second != first);
        world.planner.leave_out(second);
        world.again(1);
        // What else is under way is answered; the one that failed it has the least to do.
        for (const auto& [id, server] : std::map(world.running))
            if (server == first) world.end(id);
        const auto third = world.server_of(1);
        CHECK(third == 3 - first - second);
        world.end(1);
        for (RequestId id = 2; talk && id < 10; ++id) {
            CHECK(world.server_of(id) == third);
            world.end(id);
        }
    }
}

TEST_CASE("What another server is to judge goes before all else that it has") {
    for (const bool talk : {false, true}) {
        World world(2, 2);
        world.known();
        for (RequestId id = 1; id <= 60; ++id)
            world.add(id, int(id % 3), talk ? "s" + std::to_string(id / 2) : "", int(id % 2));
        std::vector<Pick> picks;
        while (const auto pick = world.next()) picks.push_back(*pick);
        REQUIRE(picks.size() == 4);
        const auto judged = picks.front();
        // One that has failed comes after it, also if it comes back later.
        CHECK(world.planner.refused(judged.server, judged.id).elsewhere);
        world.again(judged.id);
        while (world.next()) {}
        for (const auto& [id, server] : std::map(world.running))
            if (server == judged.server) {
                world.planner.failed(server, Fault::passing, id);
                world.again(id);
                break;
            }
        world.shut = {judged.server};
        CHECK_FALSE(world.next());
        for (const auto& it : picks)
            if (it.server != judged.server) {
                world.end(it.id);
                break;
            }
        const auto then = world.next();
        REQUIRE(then);
        CHECK(then->id == judged.id);
        CHECK(then->server != judged.server);
        CHECK(then->why == "refused");
        CHECK(then->prompt_bytes == world.texts[then->id].size());
    }
}

TEST_CASE("Kinds of requests that a server cannot mix are not mixed for what it is to judge") {
    // Its own planner keeps them apart.
    World world(2, 4);
    world.known();
    for (RequestId id = 1; id <= 20; ++id) world.add(id, 0);
    Prompt prompt;
    prompt.segments = {world.texts[1]};
    prompt.kind = 1;
    world.planner.add(99, prompt);
    const auto pick = world.next();
    REQUIRE(pick);
    CHECK(world.planner.refused(pick->server, pick->id).elsewhere);
    world.again(pick->id);
    world.shut = {pick->server};
    std::set<std::string_view> why;
    for (int i = 0; i < 20; ++i) {
        const auto next = world.next();
        REQUIRE(next);
        why.insert(next->why);
        world.end(next->id);
    }
    CHECK_FALSE(why.contains("refused"));
    CHECK(world.asked[1 - pick->server].size() == 20);
}

TEST_CASE(
    "A server that begins to refuse is held until others have judged, and looked at meanwhile") {
    using std::chrono::milliseconds;
    World world(2, 10);
    auto& planner = world.known().planner;
    for (RequestId id = 1; id <= 200; ++id) world.add(id, 0);
    while (world.next()) {}
    const auto refuse = [&](RequestId id) {
        const auto verdict = planner.refused(0, id);
        CHECK(verdict.elsewhere);
        world.again(id);
        return verdict;
    };
    const auto of = [&](unsigned server) {
        std::vector<RequestId> ids;
        for (const auto& [id, at] : world.running)
            if (at == server) ids.push_back(id);
        return ids;
    };
    std::size_t refused = 0;
    for (const auto id : of(0)) {
        const auto verdict = refuse(id);
        CHECK_FALSE(verdict.out);
        CHECK(verdict.held == (++refused == 8)); // it is said once
    }
    REQUIRE(refused == 10);
    while (world.next()) {}
    CHECK(of(0).empty());
    world.now += milliseconds(999);
    CHECK_FALSE(world.next());
    CHECK(planner.wake() == world.now + milliseconds(1));
    world.now += milliseconds(1);
    auto look = world.next();
    REQUIRE((look && look->server == 0));
    CHECK_FALSE(world.next()); // one
    CHECK_FALSE(refuse(look->id).held);
    while (world.next()) {}
    CHECK(of(0).empty());
    // It is well again, before anything is judged.
    world.now += milliseconds(1000);
    look = world.next();
    REQUIRE((look && look->server == 0));
    world.end(look->id);
    while (world.next()) {}
    CHECK(of(0).size() == 10);
    // It begins again, and the other one answers what it is shown.
    for (const auto id : of(0)) CHECK_FALSE(refuse(id).out);
    while (world.next()) {}
    CHECK(of(0).empty());
    while (of(0).empty()) {
        REQUIRE_FALSE(of(1).empty());
        world.end(of(1).front());
        while (world.next()) {}
    }
    CHECK(planner.refused(0, of(0).front()).out);
    CHECK(planner.up(1));

    // Nobody is waited for who takes nothing and has nothing.
    World alone(2, 10);
    alone.known();
    for (RequestId id = 1; id <= 200; ++id) alone.add(id, 0);
    alone.shut = {1};
    for (int i = 0; i < 20; ++i) {
        const auto pick = alone.next();
        REQUIRE((pick && pick->server == 0));
        CHECK(alone.planner.refused(0, pick->id).elsewhere);
        alone.again(pick->id);
    }
}

TEST_CASE("What is taken over is counted by items, wherever they have been meanwhile") {
    World world(3, 1);
    world.known();
    for (RequestId id = 1; id <= 30; ++id) world.add(id, 0);
    world.again(world.next()->id);
    world.shut = {0, 1, 2};
    CHECK_FALSE(world.next());
    auto& planner = world.planner;
    // It goes to others, and from those to the third, and back.
    for (const unsigned out : {0u, 1u, 2u}) {
        planner.leave_out(out);
        planner.let_in(out);
        planner.alive(out);
    }
    // All of it at one is all but its own.
    std::uint64_t sum = 0;
    for (const unsigned one : {0u, 1u, 2u}) {
        for (unsigned i = 0; i < 3; ++i)
            if (i != one) planner.leave_out(i);
        for (unsigned i = 0; i < 3; ++i)
            if (i != one) CHECK(planner.count(i).taken_over <= 1); // what runs there
        CHECK((planner.count(one).taken_over > 0 && planner.count(one).taken_over < 30));
        sum += planner.count(one).taken_over;
        for (unsigned i = 0; i < 3; ++i) planner.alive(i);
    }
    CHECK(sum == 60);
}

TEST_CASE("A conversation leaves a server that refuses or fails it, as a whole") {
    for (const bool refuses : {true, false}) {
        World world(2, 1);
        world.known();
        for (RequestId id = 1; id <= 6; ++id) world.add(id, 0, "talk", int(id));
        const auto first = world.server_of(1);
        world.end(1);
        CHECK(world.server_of(2) == first);
        if (refuses)
            CHECK(world.planner.refused(first, 2).elsewhere);
        else
            CHECK(world.planner.failed(first, Fault::passing, 2).elsewhere);
        world.again(2);
        for (RequestId id = 2; id <= 6; ++id) {
            CHECK(world.server_of(id) == 1 - first);
            world.end(id);
        }
    }
}

TEST_CASE("A conversation does not wait for ever for a server that turns all away") {
    World world(2, 2);
    world.known();
    for (RequestId id = 1; id <= 20; ++id)
        world.add(id, 0, std::string(1, char('p' + id % 4)), int(id));
    for (int i = 0; i < 4; ++i) {
        const auto pick = world.next();
        REQUIRE(pick);
        world.end(pick->id);
    }
    // From now on the first one is busy.
    std::set<RequestId> done;
    int turned_away = 0;
    bool out = false;
    for (int step = 0; step < 200 && done.size() < 16; ++step) {
        while (world.next()) {}
        for (const auto& [id, server] : std::map(world.running)) {
            if (server == 1) {
                world.end(id);
                done.insert(id);
                continue;
            }
            ++turned_away;
            const auto verdict = world.planner.busy(0, id, world.now);
            out |= verdict.out;
            CHECK(verdict.elsewhere == out);
            world.again(id);
        }
        world.now += std::chrono::seconds(2);
    }
    CHECK(out);
    CHECK(done.size() == 16);
    CHECK((turned_away > 8 && turned_away < 60));
    CHECK_FALSE(world.planner.up(0));

    // Not one that answers now and then, nor the last one.
    World some(2);
    some.known();
    for (int i = 0; i < 100; ++i) {
        some.now += std::chrono::seconds(4);
        CHECK_FALSE(some.planner.busy(0, 0, some.now).out);
        if (i % 7 == 6) some.planner.heard(0, true, some.now);
    }
    some.planner.leave_out(1);
    for (int i = 0; i < 100; ++i)
        CHECK_FALSE(some.planner.busy(0, 0, some.now += std::chrono::seconds(4)).elsewhere);
}

TEST_CASE("A server that asks for a longer pause than is waited for is left out at once") {
    using std::chrono::seconds;
    for (const bool proven : {true, false}) {
        World world(2, 2);
        auto& planner = world.known().planner;
        if (!proven) planner.let_in(0);
        for (RequestId id = 1; id <= 20; ++id)
            world.add(id, 0, std::string(1, char('p' + id % 4)), int(id));
        std::vector<RequestId> there;
        while (const auto pick = world.next())
            if (pick->server == 0) there.push_back(pick->id);
        REQUIRE_FALSE(there.empty());
        CHECK_FALSE(planner.busy(0, there.front(), world.now, seconds(10)).elsewhere);
        bool first = true;
        for (const auto id : there) {
            const auto verdict = planner.busy(0, id, world.now, seconds(11));
            CHECK(verdict.elsewhere);
            CHECK(verdict.out == std::exchange(first, false));
            world.again(id);
        }
        // All of it goes to the other one.
        while (!world.running.empty()) {
            world.end(world.running.begin()->first);
            while (world.next()) {}
        }
        CHECK(world.asked[1].size() == 20);
        // It is looked at when it said that it would be well.
        CHECK(planner.due(world.now).empty());
        CHECK(planner.due(world.now + seconds(10)).empty());
        CHECK(planner.due(world.now + seconds(11)).size() == 1);
        // The last one is waited for.
        CHECK_FALSE(planner.busy(1, 1, world.now, seconds(60)).elsewhere);
    }
}

TEST_CASE("What runs on a silent server is asked of another, each once") {
    using std::chrono::seconds;
    World world(2, 4);
    world.known();
    auto& planner = world.planner;
    for (RequestId id = 1; id <= 40; ++id) world.add(id, int(id % 2));
    // Somebody looks each second; these show that they are alive.
    const auto later = [&](int time, std::set<std::size_t> alive) {
        std::vector<std::size_t> silent;
        for (int i = 0; i < time && silent.empty(); ++i) {
            world.now += seconds(1);
            for (const auto it : alive) planner.heard(it, true, world.now);
            silent = planner.silent(world.now);
        }
        return silent;
    };
    while (world.next()) {}
    REQUIRE(world.running.size() == 8);
    CHECK(later(10, {}).empty());
    for (const auto& [id, server] : std::map(world.running))
        if (server == 0) world.end(id);
    while (world.next()) {}
    // Answers take ten seconds: silent is who is so for forty.
    CHECK(later(29, {0}).empty());
    CHECK(later(600, {1}) == std::vector<std::size_t>{0}); // it was heard 29 seconds later
    CHECK(world.now - PrefixPlanner::Point(seconds(1000)) == seconds(10 + 29 + 40));
    CHECK(later(1000, {0, 1}).empty()); // a long answer that comes bit by bit
    CHECK(later(30, {0}).empty());
    world.now += seconds(1000); // we were stopped
    CHECK(later(30, {0}).empty());
    REQUIRE(later(100, {0}) == std::vector<std::size_t>{1});
    planner.leave_out(1);
    std::set<RequestId> moved;
    for (const auto& [id, server] : std::map(world.running))
        if (server == 1) {
            CHECK(planner.move(id));
            CHECK_FALSE(planner.move(id));
            moved.insert(id);
            world.again(id);
        }
    CHECK(moved.size() == 4);
    std::vector<RequestId> done = world.asked[0];
    while (done.size() < 40) {
        while (const auto pick = world.next()) CHECK(pick->server == 0);
        const auto id = world.running.begin()->first;
        CHECK(planner.move(id) != moved.contains(id)); // it is moved once
        world.end(id);
        done.push_back(id);
    }
    CHECK(std::set(done.begin(), done.end()).size() == 40);
}

TEST_CASE("A server is not silent because of what silenced another, nor where nobody is well") {
    World world(2, 1);
    auto& planner = world.known().planner;
    const auto silent = [&] {
        std::vector<std::size_t> list;
        for (int i = 0; i < 500 && list.empty(); ++i)
            list = planner.silent(world.now += std::chrono::seconds(1));
        return list;
    };
    RequestId id = 0;
    const auto ask = [&] {
        world.add(++id, 0);
        const auto pick = world.next();
        REQUIRE(pick);
        return pick->server;
    };
    ask();
    CHECK(silent().empty()); // it is not known how long an answer takes
    world.end(1);
    for (int i = 0; i < 128; ++i) {
        ask();
        world.end(id);
    }
    const auto slow = ask();
    CHECK(silent() == std::vector<std::size_t>{slow});
    planner.leave_out(slow);
    CHECK(planner.move(id));
    world.again(id);
    CHECK(world.server_of(id) == 1 - slow);
    planner.alive(slow);
    CHECK(silent().empty()); // it is a long one
    CHECK(ask() == slow);
    CHECK(silent().empty()); // both
}

TEST_CASE("An answer that is still on its way lets a server in, but not one of another model") {
    World world(2);
    world.planner.leave_out(0);
    world.planner.alive(0);
    CHECK(world.planner.up(0));
    world.planner.leave_out(0);
    world.planner.bar(0);
    world.planner.alive(0);
    CHECK_FALSE(world.planner.up(0));
    world.planner.let_in(0);
    CHECK(world.planner.up(0));
    CHECK_FALSE(world.planner.proven(0));
}

TEST_CASE(
    "A request that was turned away is asked of another server, a conversation's of its own") {
    World world(3, 4);
    world.add(1, 0);
    std::set<unsigned> servers;
    for (int i = 0; i < 3; ++i) {
        const auto pick = world.next();
        REQUIRE(pick);
        servers.insert(pick->server);
        world.planner.alive(pick->server);
        world.end(pick->id, Step::failed);
        world.add(1, 0);
    }
    CHECK(servers.size() == 3);
    const auto last = world.next(); // all have failed it: somewhere
    REQUIRE(last);
    world.end(last->id);

    servers.clear();
    world.add(2, 0, "talk", 1);
    for (int i = 0; i < 3; ++i) {
        const auto pick = world.next();
        REQUIRE(pick);
        servers.insert(pick->server);
        world.end(pick->id, Step::failed);
        world.add(2, 0, "talk", 1);
    }
    CHECK(servers.size() == 1);
}

TEST_CASE("Of several servers the one that is shut is sent nothing, and the others go on") {
    World world(2, 2);
    for (RequestId id = 1; id <= 40; ++id) world.add(id, int(id % 2));
    world.shut = {0};
    for (int i = 0; i < 10; ++i) {
        std::vector<RequestId> sent;
        while (const auto pick = world.next()) {
            CHECK(pick->server == 1);
            sent.push_back(pick->id);
        }
        CHECK(sent.size() == 2);
        for (const auto id : sent) world.end(id);
    }
    world.shut = {};
    const auto pick = world.next();
    REQUIRE(pick);
    CHECK(pick->server == 0);
}

TEST_CASE("What comes late and alone goes to the server with the least to do") {
    World world(3, 10);
    std::map<unsigned, int> sent;
    for (RequestId id = 1; id <= 9; ++id) {
        world.add(id, int(id));
        const auto pick = world.next();
        REQUIRE(pick);
        ++sent[pick->server];
    }
    CHECK(sent == std::map<unsigned, int>{{0, 3}, {1, 3}, {2, 3}});
}

TEST_CASE("A conversation stays on its server, turns that come later too") {
    World world(2, 2);
    // Four conversations of five turns each, and single questions.
    std::map<RequestId, std::string> session;
    for (RequestId id = 1; id <= 20; ++id) {
        session[id] = std::string(1, char('p' + id % 4));
        world.add(id, int(id % 4), session[id], int(id / 4));
    }
    for (RequestId id = 100; id < 130; ++id) world.add(id, int(id % 4));
    std::map<std::string, std::set<unsigned>> of;
    const auto run_out = [&] {
        while (const auto pick = world.next()) {
            if (session.contains(pick->id)) of[session[pick->id]].insert(pick->server);
            if (world.running.size() == 4) world.end(world.running.begin()->first);
        }
        while (!world.running.empty()) world.end(world.running.begin()->first);
    };
    run_out();
    for (int turn = 5; turn < 9; ++turn) { // one after the other, each known when the last is over
        for (const char name : {'p', 'q', 'r', 's'}) {
            const RequestId id = 1000 + RequestId(turn * 10 + name);
            session[id] = std::string(1, name);
            world.add(id, name % 4, session[id], turn);
        }
        run_out();
    }
    REQUIRE(of.size() == 4);
    for (const auto& [name, servers] : of) CHECK(servers.size() == 1);
    CHECK((world.asked[0].size() > 10 && world.asked[1].size() > 10));

    // Its server dies: what is left of it goes to another one, together.
    World dying(3, 1);
    for (RequestId id = 1; id <= 5; ++id) dying.add(id, 0, "talk", int(id));
    const auto first = dying.next();
    REQUIRE(first);
    dying.planner.unreachable(first->server);
    dying.planner.unreachable(first->server);
    dying.end(first->id, Step::failed);
    dying.add(first->id, 0, "talk", 1);
    std::set<unsigned> then;
    while (const auto pick = dying.next()) {
        then.insert(pick->server);
        dying.end(pick->id);
    }
    CHECK(then.size() == 1);
    CHECK_FALSE(then.contains(first->server));
    CHECK(dying.asked[*then.begin()].size() == 5);
}

TEST_CASE("Conversations are stolen whole, and not once they have begun") {
    World world(2, 1);
    for (RequestId id = 1; id <= 30; ++id) // three conversations of ten turns
        world.add(id, 0, std::string(1, char('a' + (id - 1) / 10)), int(id % 10));
    std::map<RequestId, unsigned> of;
    const auto slow = world.next();
    REQUIRE(slow);
    for (auto pick = world.next(); pick; pick = world.next()) { // the slow one never ends its first
        of[pick->id] = pick->server;
        CHECK(pick->server != slow->server);
        world.end(pick->id);
    }
    const auto mine = (slow->id - 1) / 10;
    for (RequestId id = 1; id <= 30; ++id) CHECK(of.contains(id) == ((id - 1) / 10 != mine));
}

TEST_CASE(
    "Any course of events: everything is asked, nothing twice at once, somebody always runs") {
    std::mt19937_64 random(11);
    for (int round = 0; round < 400; ++round) {
        const auto servers = 1 + random() % 4;
        World world(servers, unsigned(1 + random() % 4),
                    random() % 2 ? Release::at_once : Release::first_text);
        for (unsigned i = 1; i < servers; ++i) // as a run begins
            if (random() % 4 == 0)
                world.planner.leave_out(i);
            else if (random() % 2)
                world.planner.let_in(i);
        const RequestId count = random() % 80;
        std::vector<std::string> session(count + 1);
        std::vector<int> group(count + 1);
        const auto add = [&](RequestId id) { world.add(id, group[id], session[id], int(id)); };
        const bool sessions = round % 2 == 0;
        RequestId added = 0;
        for (RequestId id = 1; id <= count; ++id) {
            if (sessions && random() % 2) session[id] = "s" + std::to_string(random() % 6);
            group[id] = int(random() % 5);
            if (added + 1 == id && random() % 20) add(added = id);
        }
        std::size_t done = 0;
        std::vector<bool> dead(servers), gone(count + 1);
        std::map<std::string, std::pair<unsigned, unsigned>> at; // a session's server, since when
        std::vector<unsigned> deaths(servers, 1);
        for (int step = 0; step < 20000 && done < count; ++step) {
            if (added < count && random() % 3 == 0) add(++added);
            if (random() % 9 == 0) {
                world.shut.clear();
                if (servers > 1 && random() % 2) world.shut.insert(unsigned(random() % servers));
            }
            while (true) {
                const auto before = world.running;
                const auto pick = world.next();
                if (!pick) break;
                REQUIRE_FALSE(before.contains(pick->id));
                REQUIRE_FALSE(gone[pick->id]);
                REQUIRE(pick->server < servers);
                REQUIRE_FALSE(world.shut.contains(pick->server));
                if (const auto& name = session[pick->id]; !name.empty()) {
                    const auto now = std::pair(pick->server, deaths[pick->server] -
                                                                 !world.planner.up(pick->server));
                    const auto [last, fresh] = at.emplace(name, now);
                    // Elsewhere only if its server has failed since, or was only tried with it.
                    if (!fresh && last->second.first != pick->server)
                        REQUIRE(deaths[last->second.first] > last->second.second);
                    last->second = now;
                }
            }
            for (const auto i : world.planner.due(world.now)) {
                REQUIRE_FALSE(world.planner.up(i));
                if (dead[i])
                    world.planner.stays_out(i);
                else
                    world.planner.let_in(i);
            }
            if (world.running.empty()) {
                if (added < count) continue;
                if (world.pass()) continue;
                REQUIRE_FALSE(world.shut.empty());
                world.shut.clear();
                continue;
            }
            world.now += std::chrono::milliseconds(random() % 700);
            for (const auto i : world.planner.silent(world.now)) {
                ++deaths[i];
                if (world.planner.up(i)) world.planner.leave_out(i);
                for (const auto& [id, server] : std::map(world.running))
                    if (server == i && world.planner.move(id)) {
                        world.end(id, Step::failed);
                        add(id);
                    }
            }
            if (world.running.empty()) continue;
            auto it = world.running.begin();
            std::advance(it, long(random() % world.running.size()));
            const auto [id, server] = *it;
            if (random() % 50 == 0) dead[random() % servers] = random() % 2 == 0;
            if (random() % 60 == 0) { // one that waits is given up, or one that does not is not
                const RequestId other = 1 + random() % count;
                if (other <= added && !gone[other] && !world.running.contains(other)) {
                    world.planner.remove(other);
                    gone[other] = true;
                    ++done;
                }
            }
            if (!world.planner.up(server) && random() % 4) { // as if it had not been sent
                ++deaths[server];
                world.end(id, Step::failed);
                add(id);
            } else if (dead[server]) {
                ++deaths[server];
                switch (random() % 5) {
                case 0: world.planner.unreachable(server); break;
                case 1: world.planner.refused(server, id); break;
                case 2:
                    world.planner.busy(server, id, world.now, std::chrono::seconds(random() % 60));
                    break;
                default: world.planner.failed(server, Fault(random() % 2), id);
                }
                world.end(id, Step::failed);
                add(id);
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

TEST_CASE("Any course of sickness: while one server is well no item fails that is not bad itself") {
    std::mt19937_64 random(105);
    for (int round = 0; round < 300; ++round) {
        CAPTURE(round);
        const auto servers = unsigned(2 + random() % 2);
        World world(servers, unsigned(1 + random() % 4),
                    random() % 2 ? Release::at_once : Release::first_text);
        const auto well = unsigned(random() % servers), refuser = unsigned(random() % servers);
        world.planner.alive(well);
        if (random() % 2) world.known();
        for (unsigned i = 0; i < servers; ++i) // as a run begins
            if (i != well && random() % 3 == 0) world.planner.let_in(i);
        const RequestId count = 1 + random() % 120;
        const bool talks = round % 2;
        std::vector<std::string> session(count + 1);
        std::vector<int> group(count + 1);
        for (RequestId id = 1; id <= count; ++id) {
            if (talks && random() % 2) session[id] = "s" + std::to_string(random() % 6);
            group[id] = int(random() % 5);
            world.add(id, group[id], session[id], int(id));
        }
        const auto bad = [&](RequestId id) { return id % 17 == 3; };
        // Each but one fails some items, and one refuses for some time, or what it does not like.
        std::vector<RequestId> fails(servers), refuses(servers);
        for (unsigned i = 0; i < servers; ++i) {
            if (i == well) continue;
            if (random() % 3) fails[i] = 1 + random() % 10; // 1: all
            if (i == refuser && random() % 4) refuses[i] = 1 + random() % 6;
        }
        auto until = world.now + std::chrono::milliseconds(random() % 3000);
        std::map<RequestId, unsigned> attempts;
        std::map<RequestId, std::set<unsigned>> failed_at;
        std::set<RequestId> ended;
        for (int step = 0; ended.size() < count; ++step) {
            REQUIRE(step < 20000);
            while (const auto pick = world.next()) {
                CAPTURE(pick->id, pick->server);
                REQUIRE_FALSE(ended.contains(pick->id));
                // Not where it has failed, while others are in where it has not.
                bool others = false;
                for (unsigned i = 0; i < servers; ++i)
                    others |= world.planner.up(i) && !failed_at[pick->id].contains(i);
                REQUIRE_FALSE((others && failed_at[pick->id].contains(pick->server)));
            }
            for (const auto i : world.planner.due(world.now)) world.planner.let_in(i);
            if (world.running.empty() && world.pass()) continue;
            REQUIRE_FALSE(world.running.empty());
            world.now += std::chrono::milliseconds(random() % 100);
            if (world.now > until) {
                std::fill(refuses.begin(), refuses.end(), 0);
                if (random() % 2) std::fill(fails.begin(), fails.end(), 0);
                until = world.now + std::chrono::hours(1000);
            }
            // What a server says is often there before what takes it time.
            auto it = world.running.begin();
            std::advance(it, long(random() % world.running.size()));
            if (random() % 2) {
                const auto sick =
                    std::find_if(world.running.begin(), world.running.end(), [&](const auto& run) {
                        return fails[run.second] || refuses[run.second];
                    });
                if (sick != world.running.end()) it = sick;
            }
            const auto [id, server] = *it;
            CAPTURE(id, server, well);
            ReplicaPlanner::Verdict verdict;
            if (bad(id) || (refuses[server] && id % refuses[server] == 0)) {
                verdict = world.planner.refused(server, id);
                if (!verdict.elsewhere) attempts[id] = 1;
            } else if (fails[server] && id % fails[server] == 0) {
                if (random() % 2) world.planner.progressed(id, Step::first_text, world.now);
                if (random() % 2) {
                    verdict = world.planner.failed(server, Fault::passing, id);
                } else { // its connection breaks
                    world.planner.unreachable(server);
                    verdict.elsewhere = world.planner.failed(server, id);
                }
                attempts[id] += !verdict.elsewhere;
            } else {
                world.end(id);
                REQUIRE(ended.insert(id).second);
                continue;
            }
            failed_at[id].insert(server);
            if (attempts[id] == 0) {
                world.again(id);
            } else {
                REQUIRE(bad(id));
                world.end(id, Step::failed);
                REQUIRE(ended.insert(id).second);
            }
        }
        REQUIRE(world.planner.up(well));
        REQUIRE_FALSE(world.next());
    }
}

TEST_CASE("Servers that are sick in turn, one at a time, cost no item") {
    std::mt19937_64 random(109);
    using std::chrono::milliseconds;
    for (int round = 0; round < 200; ++round) {
        CAPTURE(round);
        const auto servers = unsigned(2 + random() % 2);
        World world(servers, unsigned(1 + random() % 8));
        if (random() % 2) world.known();
        const RequestId count = 100 + random() % 400;
        const auto turn = milliseconds(3000 + random() % 20000);
        const bool refuses = random() % 2;
        const auto start = world.now;
        const auto well = [&](unsigned server) {
            return unsigned((world.now - start) / turn) % servers != server;
        };
        const auto bad = [](RequestId id) { return id % 31 == 7; };
        for (RequestId id = 1; id <= count; ++id) world.add(id, int(id % 5));
        std::map<RequestId, PrefixPlanner::Point> ends, tries; // of what runs; of what failed
        std::map<unsigned, PrefixPlanner::Point> looks;
        std::map<RequestId, int> failures;
        std::size_t ended = 0;
        for (int step = 0; ended < count; ++step) {
            REQUIRE(step < 100000);
            while (const auto pick = world.next())
                ends[pick->id] = world.now + milliseconds(well(pick->server) ? 20 + random() % 200
                                                                             : random() % 20);
            for (const auto i : world.planner.due(world.now))
                looks[unsigned(i)] = world.now + milliseconds(50);
            world.now += milliseconds(5);
            for (const auto& [server, at] : std::map(looks)) {
                if (at > world.now) continue;
                looks.erase(server);
                if (world.planner.up(server)) continue;
                if (well(server))
                    world.planner.let_in(server);
                else
                    world.planner.stays_out(server);
            }
            for (const auto& [id, at] : std::map(ends)) {
                if (at > world.now) continue;
                ends.erase(id);
                const auto server = world.running[id];
                if (well(server) && !bad(id)) {
                    world.end(id);
                    ++ended;
                    continue;
                }
                const bool at_once = bad(id) || refuses;
                const bool elsewhere = (at_once ? world.planner.refused(server, id)
                                                : world.planner.failed(server, Fault::passing, id))
                                           .elsewhere;
                if (!elsewhere && (at_once || ++failures[id] == 3)) {
                    CAPTURE(id, server, refuses, turn.count());
                    REQUIRE(bad(id));
                    world.end(id, Step::failed);
                    ++ended;
                } else if (elsewhere) {
                    world.again(id);
                } else {
                    world.end(id, Step::failed);
                    tries[id] = world.now + milliseconds(500) * failures[id];
                }
            }
            for (const auto& [id, at] : std::map(tries)) {
                if (at > world.now) continue;
                tries.erase(id);
                world.add(id, int(id % 5));
            }
        }
        // Nobody waits for long for what is really bad.
        CHECK(world.now - start < turn * 4 + milliseconds(150) * count);
    }
}

TEST_CASE(
    "The next turn of a conversation goes where the last one was, unless that has much to do") {
    World world(2, 8);
    auto& planner = world.known().planner;
    std::map<std::uint64_t, unsigned> home;
    RequestId id = 0;
    for (std::uint64_t talk = 1; talk <= 8; ++talk) {
        world.add(++id, int(talk), {}, 0, talk);
        home[talk] = world.server_of(id);
    }
    CHECK(std::count_if(home.begin(), home.end(), [](auto& it) { return it.second == 0; }) == 4);
    while (!world.running.empty()) world.end(world.running.begin()->first);
    for (const std::uint64_t talk : {3, 1, 2, 8, 5, 7, 4, 6, 6, 2}) { // whoever is idler
        world.add(++id, int(talk), {}, 1, talk);
        CHECK(world.server_of(id) == home[talk]);
        world.end(id);
    }
    // One has five to do, the other nothing.
    const auto busy = home[1];
    for (std::uint64_t talk = 1; talk <= 8; ++talk)
        if (home[talk] == busy) {
            world.add(++id, int(talk), {}, 2, talk);
            CHECK(world.server_of(id) == busy);
        }
    world.add(++id, 1, {}, 2, 1);
    CHECK(world.server_of(id) == busy);
    world.add(++id, 1, {}, 2, 1);
    CHECK(world.server_of(id) != busy);
    while (!world.running.empty()) world.end(world.running.begin()->first);
    world.add(++id, 1, {}, 3, 1);
    CHECK(world.server_of(id) != busy); // it is at home there now
    world.end(id);
    // One that is out has none.
    planner.leave_out(1 - busy);
    world.add(++id, 1, {}, 4, 1);
    CHECK(world.server_of(id) == busy);
    world.end(id);
    planner.let_in(1 - busy);
    // Nor one that has failed it.
    world.add(++id, 1, {}, 5, 1);
    CHECK(world.server_of(id) == busy);
    CHECK(planner.failed(busy, id));
    world.again(id);
    CHECK(world.server_of(id) != busy);
    world.end(id);
}

TEST_CASE("Who asks little waits for one turn a server of who has thousands waiting there") {
    World world(2, 1);
    world.known();
    const auto add = [&](RequestId id, std::uint32_t client) {
        auto& text = world.texts[id]; // it must stay
        text = std::string(600, char('a' + id % 50)) + std::to_string(client) + std::to_string(id);
        Prompt prompt{"d", {text}, 10};
        prompt.client = client;
        world.planner.add(id, prompt);
    };
    for (RequestId id = 1; id <= 5000; ++id) add(id, 1);
    for (int i = 0; i < 100; ++i) world.end(world.next()->id);
    for (RequestId id = 10001; id <= 10060; ++id) add(id, 2);
    unsigned passed = 0, most = 0, seen = 0;
    std::vector<RequestId> sent;
    for (std::size_t ended = 0; seen < 60; world.end(sent.at(ended++)))
        while (const auto pick = world.next()) { // each server has one
            sent.push_back(pick->id);
            passed = pick->id > 10000 ? 0 : passed + 1;
            seen += pick->id > 10000;
            most = std::max(most, passed);
        }
    CHECK(most <= 2 * 2 * 8); // two servers; a turn, and one until it is seen there
}
