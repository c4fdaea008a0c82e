#include "evalrt/prefix_planner.hpp"

#include "support/catch.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <set>

using namespace std::chrono_literals;
using evalrt::FifoPlanner;
using evalrt::Pick;
using evalrt::PrefixPlanner;
using evalrt::Prompt;
using evalrt::RadixPlanner;
using evalrt::Release;
using evalrt::RequestId;
using Options = RadixPlanner::Options;
using Point = PrefixPlanner::Point;
using Step = PrefixPlanner::Stage;

namespace {

constexpr std::size_t block = 64; // bytes in which prompts are compared
const Point start{1h};
const std::string header(300, 'h');

struct Question {
    std::string domain, text;
    std::optional<std::int64_t> output;
    std::size_t front = 0;
};

void add(PrefixPlanner& planner, RequestId id, const std::string& text,
         std::optional<std::int64_t> output = {}, const std::string& domain = "d",
         std::size_t front = 0) {
    Prompt prompt{domain, {text}, output};
    prompt.front = front;
    planner.add(id, prompt);
}

// "ABc": a block of each capital letter, and one byte of each small one.
std::string spell(std::string_view word) {
    std::string text;
    for (const char c : word) text += std::string(c >= 'A' && c <= 'Z' ? block : 1, c);
    return text;
}

// Everything, one at a time.
std::vector<RequestId> drain(PrefixPlanner& planner) {
    std::vector<RequestId> order;
    while (const auto pick = planner.next(start)) {
        order.push_back(pick->id);
        planner.progressed(pick->id, Step::done, start);
    }
    return order;
}

// Everything that goes without anything having ended.
std::vector<RequestId> burst(PrefixPlanner& planner, Point now = start) {
    std::vector<RequestId> order;
    while (const auto pick = planner.next(now)) order.push_back(pick->id);
    return order;
}

using Ids = std::vector<RequestId>;

// What RadixPlanner has to do, written to be read: each prefix for itself, each time from scratch.
class Model {
public:
    explicit Model(Options options) : options_(options) {}

    void add(RequestId id, const Question& question) {
        Item item{name(question.domain + ":"), question.text.size(), question.output.value_or(0),
                  ++arrivals_};
        item.front = question.front;
        std::string_view rest = question.text;
        for (; rest.size() >= block; rest.remove_prefix(block))
            item.path += name(rest.substr(0, block));
        item.path += name(std::string(rest) + "$");
        if (options_.match_length) item.rank = std::int64_t(item.bytes);
        for (auto* mark : marks(item)) {
            mark->rank = std::max(mark->rank, item.rank);
            mark->arrival = std::min(mark->arrival, item.arrival);
        }
        items_[id] = std::move(item);
    }

    std::optional<Pick> next(Point now) {
        RequestId best = 0;
        for (auto& [id, item] : items_)
            if (!item.running && may_go(item, now) && !pads(item) &&
                (!best || before(item, items_[best])))
                best = id;
        if (!best) return {};
        auto& item = items_[best];
        Pick pick{best, item.bytes, 0, 0};
        const auto path = marks(item);
        for (std::size_t depth = 1; depth <= path.size(); ++depth) {
            const auto bytes = std::min((depth - 1) * block, item.bytes);
            if (path[depth - 1]->warm) pick.expected_bytes = bytes;
            if (path[depth - 1]->sent) pick.maximum_bytes = std::min(bytes + block - 1, item.bytes);
        }
        item.leads = begins(item);
        item.running = item.filling = true;
        item.warm = *pick.expected_bytes;
        item.sent = now;
        for (auto* mark : path) {
            mark->sent = true;
            if (options_.release == Release::at_once) mark->warm = true;
            if (!mark->warm && !mark->leader) mark->leader = best;
        }
        return pick;
    }

    void progressed(RequestId id, Step step) {
        auto& item = items_.at(id);
        const bool visible =
            step == Step::done || (step == Step::first_text && options_.release != Release::done);
        for (auto* mark : marks(item)) {
            mark->warm |= visible;
            if (mark->leader == id && step == Step::failed) mark->leader = 0;
        }
        if (visible) item.leads = false;
        item.filling = false;
        if (step != Step::first_text) items_.erase(id);
    }

    void remove(RequestId id) { items_.erase(id); }

    bool has_running() const {
        return std::any_of(items_.begin(), items_.end(),
                           [](const auto& it) { return it.second.running; });
    }
    bool has_waiting() const {
        return std::any_of(items_.begin(), items_.end(),
                           [](const auto& it) { return !it.second.running; });
    }
    bool something_may_go(Point now) {
        return std::any_of(items_.begin(), items_.end(), [&](const auto& it) {
            return !it.second.running && may_go(it.second, now);
        });
    }

private:
    struct Mark {
        std::int64_t rank = std::numeric_limits<std::int64_t>::min();
        std::uint64_t arrival = std::numeric_limits<std::uint64_t>::max();
        RequestId leader = 0;
        bool warm = false, sent = false;
    };
    struct Item {
        std::string path; // a letter for each of: domain, whole blocks, the rest
        std::size_t bytes = 0;
        std::int64_t rank = 0;
        std::uint64_t arrival = 0;
        bool running = false, leads = false, filling = false;
        std::size_t front = 0, warm = 0; // bytes; warm: when it was sent
        Point sent{};
    };

    std::string name(std::string_view part) {
        const char next = char('a' + names_.size());
        return {names_.emplace(part, next).first->second};
    }

    std::vector<Mark*> marks(const Item& item) {
        std::vector<Mark*> list;
        for (std::size_t depth = 1; depth <= item.path.size(); ++depth)
            list.push_back(&marks_[item.path.substr(0, depth)]);
        return list;
    }

    std::size_t waiting(std::size_t depth, const Item& item) const {
        return std::size_t(std::count_if(items_.begin(), items_.end(), [&](const auto& it) {
            return !it.second.running && it.second.path.compare(0, depth, item.path, 0, depth) == 0;
        }));
    }

    // Of the prefixes of an item, by depth: is it long enough to wait for?
    std::vector<bool> worth(const Item& item) {
        std::vector<bool> list;
        std::size_t known = 0, depth = 0;
        for (const auto* mark : marks(item)) {
            const auto bytes = std::min(depth++ * block, item.bytes);
            if (mark->warm) known = bytes;
            list.push_back(options_.release != Release::at_once && bytes > known &&
                           (bytes - known) / block >= options_.shared_bytes / block);
        }
        return list;
    }

    bool begins(const Item& item) {
        const auto path = marks(item);
        const auto long_enough = worth(item);
        for (std::size_t i = 0; i < path.size(); ++i)
            if (long_enough[i] && !path[i]->leader && waiting(i + 1, item) > 1) return true;
        return false;
    }

    bool may_go(const Item& item, Point now) {
        const auto path = marks(item);
        const auto long_enough = worth(item);
        const auto patient = [&](const Item& leader) {
            return now < leader.sent + options_.patience;
        };
        for (std::size_t i = 0; i < path.size(); ++i)
            if (long_enough[i] && path[i]->leader && patient(items_.at(path[i]->leader)))
                return false;
        const auto leaders = std::count_if(items_.begin(), items_.end(), [&](const auto& it) {
            return it.second.leads && patient(it.second);
        });
        return options_.leaders == 0 || leaders < long(options_.leaders) || !begins(item);
    }

    // Those being filled and this one, each as long as the longest of them: the fronts, beside them
    // the rest of those whose front is there, and then the rest of the others.
    bool pads(const Item& item) {
        Item mine = item;
        std::size_t depth = 0;
        for (const auto* mark : marks(item))
            if (++depth; mark->warm) mine.warm = std::min((depth - 1) * block, item.bytes);
        std::size_t count = 0, second = 0, sum = 0, longest[2] = {0, 0};
        const auto take = [&](const Item& it) {
            const bool twice = it.front > it.warm;
            const auto cold = it.bytes - it.warm;
            const auto first = twice ? it.front - it.warm : cold;
            ++count;
            second += twice && cold > first;
            sum += cold;
            longest[0] = std::max(longest[0], first);
            longest[1] = std::max(longest[1], cold - first);
        };
        for (const auto& [id, other] : items_)
            if (other.running && other.filling) take(other);
        if (options_.padding_bytes == 0 || count == 0) return false;
        take(mine);
        return count * longest[0] + second * longest[1] > sum + sum / 10 + options_.padding_bytes;
    }

    bool before(const Item& a, const Item& b) {
        const auto x = marks(a), y = marks(b);
        for (std::size_t i = 0; i < x.size() && i < y.size(); ++i)
            if (x[i] != y[i])
                return std::tuple(!x[i]->sent, -x[i]->rank, x[i]->arrival) <
                       std::tuple(!y[i]->sent, -y[i]->rank, y[i]->arrival);
        return std::tuple(-a.rank, a.arrival) < std::tuple(-b.rank, b.arrival);
    }

    Options options_;
    std::map<RequestId, Item> items_;
    std::map<std::string, char> names_;
    std::map<std::string, Mark> marks_;
    std::uint64_t arrivals_ = 0;
};

using Random = std::minstd_rand;

unsigned below(Random& random, unsigned n) { return unsigned(random() / 7 % n); }

Options random_options(Random& random) {
    Options options;
    options.release = std::array{Release::at_once, Release::first_text, Release::first_text,
                                 Release::done}[below(random, 4)];
    options.shared_bytes = std::array{0u, 64u, 128u, 192u}[below(random, 4)];
    options.match_length = below(random, 3) == 0;
    options.padding_bytes = std::array{0u, 0u, 1u, 100u}[below(random, 4)];
    options.leaders = std::array{0u, 0u, 1u, 2u}[below(random, 4)];
    options.patience = std::chrono::seconds(std::array{3, 20, 100000}[below(random, 3)]);
    return options;
}

// Words over a small alphabet: prefixes are shared, prompts come twice, some continue others.
Question random_question(Random& random, std::string_view letters = "AB") {
    std::string word;
    for (auto n = below(random, 5); n > 0; --n) word += letters[below(random, 2)];
    const std::array rests{"", "", "x", "xy"};
    Question question{below(random, 6) ? "d" : "e", spell(word + rests[below(random, 4)]), {}};
    if (below(random, 2)) question.output = std::array{1, 100, 100, 500}[below(random, 4)];
    question.front = below(random, unsigned(question.text.size()) + 1);
    return question;
}

struct Event {
    enum Kind { added, asked, removed, progressed, later } kind;
    RequestId id = 0;
    std::optional<Pick> pick;
};

// A random life of a planner. `check` sees each call after it was made.
template <class Check>
void live(PrefixPlanner& planner, Random& random, std::string_view letters, Check check) {
    Point now = start;
    std::vector<RequestId> waiting, running;
    RequestId last = 0;
    const auto any_of = [&](auto& ids) { return ids[below(random, unsigned(ids.size()))]; };
    for (int step = 0; step < 60 || !waiting.empty() || !running.empty(); ++step) {
        REQUIRE(step < 1000);
        const bool closing = step >= 60;
        const unsigned dice = below(random, 100);
        if (dice < 30 && !closing) {
            const auto question = random_question(random, letters);
            add(planner, ++last, question.text, question.output, question.domain, question.front);
            waiting.push_back(last);
            check(Event{Event::added, last, {}}, question, Step{}, now);
        } else if (dice < 60) {
            const auto pick = planner.next(now);
            check(Event{Event::asked, 0, pick}, Question(), Step{}, now);
            if (!pick) continue;
            REQUIRE(std::erase(waiting, pick->id) == 1); // it waited: nothing comes out twice
            running.push_back(pick->id);
        } else if (dice < 68) {
            if (last == 0) continue;
            const RequestId id = 1 + below(random, unsigned(last) + 1); // also unknown and running
            planner.remove(id);
            if (std::erase(waiting, id))
                check(Event{Event::removed, id, {}}, Question(), Step{}, now);
        } else if (dice < 90) {
            if (running.empty()) continue;
            const auto id = any_of(running);
            const auto step_made =
                std::array{Step::first_text, Step::done, Step::failed}[below(random, 3)];
            planner.progressed(id, step_made, now);
            check(Event{Event::progressed, id, {}}, Question(), step_made, now);
            if (step_made != Step::first_text) std::erase(running, id);
        } else {
            now += std::chrono::seconds(below(random, 5));
            check(Event{Event::later, 0, {}}, Question(), Step{}, now);
        }
    }
}

std::size_t common(std::string_view a, std::string_view b) {
    return std::size_t(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

} // namespace

TEST_CASE("a random life of a planner goes as the naive model says") {
    std::size_t held = 0, picked = 0, promoted = 0;
    for (unsigned seed = 1; seed <= 2000; ++seed) {
        CAPTURE(seed);
        Random random(seed);
        const auto options = random_options(random);
        RadixPlanner planner(options);
        Model model(options);
        live(planner, random, "AB",
             [&](const Event& event, const Question& question, Step step, Point now) {
                 switch (event.kind) {
                 case Event::added: model.add(event.id, question); break;
                 case Event::removed: model.remove(event.id); break;
                 case Event::progressed:
                     model.progressed(event.id, step);
                     promoted += step == Step::failed;
                     break;
                 case Event::later: break;
                 case Event::asked: {
                     const bool idle = !model.has_running();
                     const bool waits = model.has_waiting();
                     const auto expected = model.next(now);
                     REQUIRE(event.pick.has_value() == expected.has_value());
                     if (idle && waits) REQUIRE(event.pick);
                     if (!expected) {
                         held += waits;
                         // The planner knows when it may have changed its mind, and not too late.
                         const auto wake = planner.wake();
                         REQUIRE(wake > now);
                         if (planner.holds() != "padding")
                             REQUIRE_FALSE(
                                 model.something_may_go(std::min(wake, now + 1000h) - 1ns));
                         if (!waits) REQUIRE(wake == Point::max());
                         break;
                     }
                     ++picked;
                     REQUIRE(event.pick->id == expected->id);
                     REQUIRE(event.pick->prompt_bytes == expected->prompt_bytes);
                     REQUIRE(event.pick->expected_bytes == expected->expected_bytes);
                     REQUIRE(event.pick->maximum_bytes == expected->maximum_bytes);
                     REQUIRE(*event.pick->expected_bytes <= *event.pick->maximum_bytes);
                     REQUIRE(*event.pick->maximum_bytes <= event.pick->prompt_bytes);
                 }
                 }
             });
    }
    CHECK(held > 2000); // the sequences reach what they are to test
    CHECK(picked > 10000);
    CHECK(promoted > 2000);
}

TEST_CASE("who shares a prefix worth waiting for does not go before the leader's release") {
    std::size_t shared = 0;
    for (unsigned seed = 1; seed <= 2000; ++seed) {
        CAPTURE(seed);
        Random random(seed);
        auto options = random_options(random);
        options.patience = 100000s;
        options.shared_bytes = std::max<std::size_t>(options.shared_bytes, block);
        RadixPlanner planner(options);
        struct Seen {
            Question question;
            bool running = false, visible = false;
        };
        std::map<RequestId, Seen> all;
        live(planner, random, "AB",
             [&](const Event& event, const Question& question, Step step, Point) {
                 if (event.kind == Event::added) all[event.id].question = question;
                 if (event.kind == Event::progressed) {
                     auto& seen = all.at(event.id);
                     seen.visible |= step == Step::done ||
                                     (step == Step::first_text && options.release != Release::done);
                     if (step != Step::first_text) seen.running = false;
                 }
                 if (event.kind != Event::asked || !event.pick) return;
                 auto& mine = all.at(event.pick->id);
                 std::size_t known = 0, unknown = 0;
                 for (const auto& [id, other] : all) {
                     if (other.question.domain != mine.question.domain) continue;
                     const auto same = common(other.question.text, mine.question.text);
                     if (other.visible)
                         known = std::max(known, same / block);
                     else if (other.running)
                         unknown = std::max(unknown, same / block);
                 }
                 shared += unknown > 0;
                 mine.running = true;
                 if (options.release == Release::at_once) return;
                 REQUIRE(unknown < known + options.shared_bytes / block);
             });
    }
    CHECK(shared > 1000);
}

TEST_CASE("the same calls give the same order, whatever the bytes hash to") {
    for (unsigned seed = 1; seed <= 1000; ++seed) {
        CAPTURE(seed);
        std::vector<Ids> orders;
        for (const auto letters : {"AB", "AB", "QZ", "KC"}) {
            Random random(seed);
            RadixPlanner planner(random_options(random));
            Ids order;
            live(planner, random, letters, [&](const Event& event, const Question&, Step, Point) {
                if (event.kind == Event::asked) order.push_back(event.pick ? event.pick->id : 0);
            });
            orders.push_back(order);
        }
        REQUIRE(orders[0] == orders[1]);
        REQUIRE(orders[0] == orders[2]);
        REQUIRE(orders[0] == orders[3]);
    }
}

TEST_CASE("the baseline names what waits in the order of arrival") {
    FifoPlanner planner;
    for (RequestId id = 1; id <= 5; ++id) add(planner, id, spell("AB"));
    planner.remove(2);
    planner.remove(9);
    const auto pick = planner.next(start);
    CHECK(pick->id == 1);
    CHECK(pick->prompt_bytes == 2 * block);
    CHECK_FALSE(pick->expected_bytes);
    planner.remove(1); // it runs: left alone
    planner.progressed(1, Step::failed, start);
    add(planner, 1, spell("AB"));
    CHECK(drain(planner) == Ids{3, 4, 5, 1});
    CHECK(planner.wake() == Point::max());
}

TEST_CASE("prompts that share a prefix go out together, in the order of arrival") {
    RadixPlanner planner;
    const std::vector<std::string> words{"AAAAp", "BBBBp", "AAAAq", "BBBBq", "AAACp", "BBBBr"};
    for (RequestId id = 1; id <= words.size(); ++id) add(planner, id, spell(words[id - 1]));
    CHECK(drain(planner) == Ids{1, 3, 5, 2, 4, 6});
}

TEST_CASE("what is predicted to be long goes first, its group with it") {
    RadixPlanner planner;
    add(planner, 1, spell("AAAAp"), 10);
    add(planner, 2, spell("BBBBp"), 20);
    add(planner, 3, spell("AAAAq"), 30);
    add(planner, 4, spell("CCCCp"));
    CHECK(drain(planner) == Ids{3, 1, 2, 4});
}

TEST_CASE("a group that has begun goes before any that has not, however long that is") {
    for (const bool match_length : {false, true}) {
        Options options;
        options.match_length = match_length;
        RadixPlanner planner(options);
        add(planner, 1, spell("AAAAp"), 10);
        add(planner, 2, spell("AAAAq"), 10);
        REQUIRE(planner.next(start)->id == 1);
        planner.progressed(1, Step::first_text, start);
        add(planner, 3, spell("BBBBBBp"), 500);
        // The next turn of a conversation: the cache still holds the one before.
        planner.progressed(1, Step::done, start);
        add(planner, 4, spell("AAAApr"), 10);
        const auto order = drain(planner);
        CHECK(order.back() == 3);
    }
}

TEST_CASE("with match_length the longest prompt goes first, the longest of each group") {
    Options options;
    options.match_length = true;
    RadixPlanner planner(options);
    add(planner, 1, spell("AAAAx"), 900);
    add(planner, 2, spell("BBBBBBx"));
    add(planner, 3, spell("AAAAxyz"));
    add(planner, 4, spell("BBBBBBxyz"));
    add(planner, 5, spell("AAAABBB"));
    CHECK(drain(planner) == Ids{5, 3, 1, 4, 2});
}

TEST_CASE("followers wait for the leader's first text, or its end, as the server needs it") {
    for (const auto release : {Release::at_once, Release::first_text, Release::done}) {
        Options options;
        options.release = release;
        RadixPlanner planner(options);
        for (RequestId id = 1; id <= 3; ++id) add(planner, id, spell("AAAA") + std::to_string(id));
        if (release == Release::at_once) {
            CHECK(burst(planner) == Ids{1, 2, 3});
            continue;
        }
        CHECK(burst(planner) == Ids{1});
        planner.progressed(1, Step::first_text, start);
        if (release == Release::first_text) {
            CHECK(burst(planner) == Ids{2, 3});
            continue;
        }
        CHECK(burst(planner).empty());
        planner.progressed(1, Step::done, start);
        CHECK(burst(planner) == Ids{2, 3});
    }
}

TEST_CASE("a prefix is waited for from the threshold on") {
    Options options;
    options.shared_bytes = 256;
    const auto held = [&](const std::string& a, const std::string& b) {
        RadixPlanner planner(options);
        add(planner, 1, a);
        add(planner, 2, b);
        return burst(planner).size() == 1;
    };
    const std::string text(4000, 's');
    for (const std::size_t bytes : {0u, 1u, 63u, 64u, 192u, 255u, 256u, 257u, 320u, 3999u}) {
        CAPTURE(bytes);
        const auto shared = text.substr(0, bytes);
        CHECK(held(shared + "a" + text, shared + "b" + text) == (bytes >= 256)); // branch
        CHECK(held(shared, shared) == (bytes >= 256));                           // the same
        CHECK(held(shared, shared + "continued") == (bytes >= 256));             // continuation
        CHECK(held(shared + "continued", shared) == (bytes >= 256));
    }
}

TEST_CASE("a threshold of nothing makes nobody wait for what is not shared") {
    Options options;
    options.shared_bytes = 0;
    RadixPlanner planner(options);
    add(planner, 1, spell("AA"));
    add(planner, 2, spell("BB"));
    add(planner, 3, spell("AA"), {}, "another");
    add(planner, 4, "");
    add(planner, 5, "");
    CHECK(burst(planner) == Ids{1, 2, 4, 5, 3});
}

TEST_CASE("only what the server does not show yet counts towards the threshold") {
    Options options;
    options.shared_bytes = 256;
    RadixPlanner planner(options);
    add(planner, 1, spell("AAAAp"));
    REQUIRE(planner.next(start)->id == 1);
    planner.progressed(1, Step::first_text, start);
    // 192 bytes more than the server shows, then 256.
    add(planner, 2, spell("AAAABBBp"));
    add(planner, 3, spell("AAAABBBq"));
    CHECK(burst(planner) == Ids{2, 3});
    add(planner, 4, spell("AAAACCCCp"));
    add(planner, 5, spell("AAAACCCCq"));
    CHECK(burst(planner) == Ids{4});
}

TEST_CASE("a failed leader makes one other the leader, and may come again itself") {
    RadixPlanner planner;
    for (RequestId id = 1; id <= 4; ++id) add(planner, id, spell("AAAA") + std::to_string(id));
    CHECK(burst(planner) == Ids{1});
    planner.progressed(1, Step::failed, start);
    CHECK(burst(planner) == Ids{2});
    add(planner, 1, spell("AAAA") + "1");
    CHECK(burst(planner).empty());
    planner.progressed(2, Step::failed, start);
    CHECK(burst(planner).size() == 1);
}

TEST_CASE("a request that came alone leads those that come while it runs") {
    RadixPlanner planner;
    add(planner, 1, spell("AAAAAp"));
    CHECK(burst(planner) == Ids{1});
    add(planner, 2, spell("AAAAq")); // cuts the one edge there is
    CHECK(burst(planner).empty());
    planner.progressed(1, Step::first_text, start);
    CHECK(burst(planner) == Ids{2});
}

TEST_CASE("another group goes while one waits for its leader") {
    RadixPlanner planner;
    add(planner, 1, spell("AAAAp"));
    add(planner, 2, spell("AAAAq"));
    add(planner, 3, spell("BBBBp"));
    add(planner, 4, spell("BBBBq"));
    CHECK(burst(planner) == Ids{1, 3});
    planner.progressed(3, Step::first_text, start);
    CHECK(burst(planner) == Ids{4});
    planner.progressed(1, Step::done, start);
    CHECK(burst(planner) == Ids{2});
}

TEST_CASE("nobody waits longer for one leader than patience allows") {
    Options options;
    options.patience = 10s;
    RadixPlanner planner(options);
    for (RequestId id = 1; id <= 3; ++id) add(planner, id, spell("AAAA") + std::to_string(id));
    CHECK(burst(planner) == Ids{1});
    CHECK(planner.wake() == start + 10s);
    CHECK(burst(planner, start + 10s - 1ns).empty());
    CHECK(burst(planner, start + 10s) == Ids{2, 3});
    CHECK(planner.wake() == Point::max());
}

TEST_CASE("only so many shared prefixes are begun at once, for as long as patience lasts") {
    Options options;
    options.leaders = 2;
    options.patience = 10s;
    const std::vector<std::string> words{"AAAAp", "AAAAq", "BBBBp", "BBBBq", "CCCCp",
                                         "CCCCq", "DDDDp", "EEEEp", "BBBBr"};
    RadixPlanner planner(options);
    for (RequestId id = 1; id <= words.size(); ++id) add(planner, id, spell(words[id - 1]));
    CHECK(burst(planner) == Ids{1, 3, 7, 8}); // those alone in their group hold nobody up
    SECTION("until one is there") {
        planner.progressed(3, Step::first_text, start);
        CHECK(burst(planner) == Ids{4, 9, 5});
    }
    SECTION("until one has failed: its group is begun once more") {
        planner.progressed(3, Step::failed, start);
        CHECK(burst(planner) == Ids{4});
    }
    SECTION("until one hangs") {
        CHECK(planner.wake() == start + 10s);
        CHECK(burst(planner, start + 9s).empty());
        CHECK(burst(planner, start + 10s) == Ids{2, 4, 9, 5});
    }
}

TEST_CASE("behind a few hundred groups that may not begin, nothing is looked for") {
    Options options;
    options.leaders = 1;
    for (const RequestId groups : {200u, 400u}) {
        RadixPlanner planner(options);
        RequestId id = 0;
        for (RequestId group = 1; group <= groups; ++group)
            for (const char end : {'p', 'q'})
                add(planner, ++id, std::to_string(group + 1000) + header + end);
        add(planner, ++id, "alone");
        const auto order = burst(planner);
        CHECK(order == (groups < 256 ? Ids{1, id} : Ids{1}));
        for (const auto sent : order) planner.progressed(sent, Step::done, start);
        CHECK(order.size() + drain(planner).size() == id);
    }
}

TEST_CASE("a removed request does not come out, a running one cannot be removed") {
    RadixPlanner planner;
    for (RequestId id = 1; id <= 4; ++id) add(planner, id, spell("AAAA") + std::to_string(id));
    REQUIRE(planner.next(start)->id == 1);
    planner.remove(1);
    planner.remove(3);
    planner.remove(77);
    CHECK(burst(planner).empty()); // 1 still leads
    planner.progressed(1, Step::first_text, start);
    CHECK(burst(planner) == Ids{2, 4});
    planner.remove(2);
    for (const RequestId id : {1u, 2u, 4u}) planner.progressed(id, Step::done, start);
    planner.progressed(1, Step::failed, start); // it has ended: nobody is meant
    CHECK(burst(planner).empty());
}

TEST_CASE("a prompt is its bytes, wherever the segments are cut") {
    const std::string text = spell("ABCDxyz");
    for (std::size_t cut = 0; cut <= text.size(); cut += 7) {
        for (std::size_t second = cut; second <= text.size(); second += 31) {
            RadixPlanner planner;
            add(planner, 1, text);
            REQUIRE(planner.next(start));
            planner.progressed(1, Step::done, start);
            const std::string_view all = text;
            planner.add(
                2, {"d",
                    {all.substr(0, cut), "", all.substr(cut, second - cut), all.substr(second)},
                    {}});
            const auto pick = planner.next(start);
            REQUIRE(pick->prompt_bytes == text.size());
            REQUIRE(pick->expected_bytes == text.size());
            REQUIRE(pick->maximum_bytes == text.size());
        }
    }
}

TEST_CASE("of a long prompt all is compared, wherever its segments are cut") {
    Random random(1);
    std::string text(20000, ' ');
    for (char& c : text) c = char('a' + below(random, 26));
    for (const std::size_t shared : {63, 64, 2047, 2048, 2049, 2112, 4096, 6143, 12345, 19999}) {
        std::string other = text;
        other[shared] = '-';
        for (const std::size_t cut : {0, 1, 64, 2048, 2049, 2113, 5000, 20000}) {
            CAPTURE(shared, cut);
            RadixPlanner planner;
            add(planner, 1, text);
            REQUIRE(planner.next(start));
            planner.progressed(1, Step::done, start);
            const std::string_view all = other;
            planner.add(2, {"d", {all.substr(0, cut), all.substr(cut)}, {}});
            CHECK(planner.next(start)->expected_bytes == shared / block * block);
        }
    }
}

TEST_CASE("ids may be any") {
    RadixPlanner planner;
    std::set<RequestId> ids;
    for (RequestId i = 1; i <= 1000; ++i)
        for (const RequestId id : {i, i << 20, i << 40, i << 54, ~i}) {
            if (!ids.insert(id).second) continue;
            add(planner, id, std::to_string(i % 10) + std::string(100, 'p') + std::to_string(id));
        }
    for (RequestId i = 1; i <= 1000; i += 2) {
        planner.remove(i << 40);
        ids.erase(i << 40);
    }
    while (const auto pick = planner.next(start)) {
        REQUIRE(ids.erase(pick->id) == 1);
        planner.progressed(pick->id, pick->id % 3 ? Step::done : Step::failed, start);
        planner.remove(pick->id); // it is gone
    }
    CHECK(ids.empty());
}

TEST_CASE("prefixes that end inside a segment are counted to the block") {
    RadixPlanner planner;
    const std::string text(300, 't');
    add(planner, 1, text);
    REQUIRE(planner.next(start)->maximum_bytes == 0u);
    planner.add(2, {"d", {std::string_view(text).substr(0, 150), "other"}, {}});
    auto pick = planner.next(start);
    CHECK(pick->expected_bytes == 0u); // 1 is on its way: nothing can be seen of it
    CHECK(pick->maximum_bytes == 155u);
    planner.progressed(1, Step::done, start);
    const std::string longer = text.substr(0, 200) + std::string(100, 'u');
    add(planner, 3, longer);
    pick = planner.next(start);
    CHECK(pick->expected_bytes == 192u);
    CHECK(pick->maximum_bytes == 255u); // of truly 200
}

TEST_CASE("another domain shares nothing") {
    RadixPlanner planner;
    add(planner, 1, spell("AAAAp"), {}, "chat");
    add(planner, 2, spell("AAAAp"), {}, "completions");
    CHECK(burst(planner) == Ids{1, 2});
    planner.progressed(1, Step::done, start);
    planner.progressed(2, Step::failed, start);
    add(planner, 3, spell("AAAAp"), {}, "chat");
    add(planner, 4, spell("AAAAp"), {}, "completions");
    CHECK(planner.next(start)->expected_bytes == 257u);
    CHECK(planner.next(start)->expected_bytes == 0u);
}

TEST_CASE("a hundred thousand prompts in a thousand groups come out group by group") {
    RadixPlanner planner;
    std::vector<std::string> headers, tails;
    for (int i = 0; i < 1000; ++i) headers.push_back(std::to_string(i) + std::string(500, 'h'));
    for (int i = 0; i < 100; ++i) tails.push_back(std::to_string(i) + std::string(100, 't'));
    constexpr RequestId n = 100000;
    for (RequestId id = 0; id < n; ++id)
        planner.add(id + 1, {"d", {headers[id % 1000], tails[id / 1000]}, 100});
    std::vector<bool> seen(n);
    std::set<RequestId> begun;
    RequestId group = 0;
    std::size_t changes = 0, count = 0;
    while (const auto pick = planner.next(start)) {
        const auto id = pick->id - 1;
        REQUIRE_FALSE(seen.at(id));
        seen[id] = true;
        ++count;
        changes += std::exchange(group, id % 1000) != id % 1000;
        planner.progressed(pick->id, Step::done, start);
    }
    CHECK(count == n);
    CHECK(changes == 999);
}

TEST_CASE("what has ended is forgotten, but for the last ones") {
    Options options;
    options.remembered = 10;
    RadixPlanner planner(options);
    for (RequestId id = 1; id <= 2000; ++id) {
        // Each parts from the first one elsewhere: what is left of a prefix is no chain of nodes.
        add(planner, id, std::string(id % 40 * block, 'c') + std::to_string(id) + header);
        if (id % 3 == 0) planner.remove(id);
        while (const auto pick = planner.next(start))
            planner.progressed(pick->id, id % 5 ? Step::done : Step::failed, start);
        REQUIRE(planner.nodes() <= 25);
    }
    add(planner, 3000, std::string(2000 % 40 * block, 'c') + "2000" + header);
    CHECK(planner.next(start)->maximum_bytes > 300u); // of the last ones it knows
}

TEST_CASE("with a short memory nothing is lost, held for ever or counted as more than it is") {
    for (unsigned seed = 1; seed <= 1000; ++seed) {
        CAPTURE(seed);
        std::vector<Ids> orders;
        for (const auto letters : {"AB", "QZ"}) {
            Random random(seed);
            auto options = random_options(random);
            options.remembered = below(random, 4);
            RadixPlanner planner(options);
            std::size_t waiting = 0, running = 0;
            Ids order;
            live(planner, random, letters,
                 [&](const Event& event, const Question&, Step step, Point) {
                     waiting += event.kind == Event::added;
                     waiting -= event.kind == Event::removed;
                     running -= event.kind == Event::progressed && step != Step::first_text;
                     REQUIRE(planner.nodes() <= 3 * (waiting + running + options.remembered + 1));
                     if (event.kind != Event::asked) return;
                     if (running == 0 && waiting > 0) REQUIRE(event.pick);
                     order.push_back(event.pick ? event.pick->id : 0);
                     if (!event.pick) return;
                     --waiting;
                     ++running;
                     REQUIRE(*event.pick->expected_bytes <= *event.pick->maximum_bytes);
                     REQUIRE(*event.pick->maximum_bytes <= event.pick->prompt_bytes);
                 });
            orders.push_back(order);
        }
        REQUIRE(orders[0] == orders[1]);
    }
}

namespace {

void add_turn(PrefixPlanner& planner, RequestId id, const std::string& session, int turn,
              const std::string& text) {
    planner.add(id, {"d", {text}, 10, session, turn});
}

} // namespace

TEST_CASE("the turns of a session go one after the other, each session to its end") {
    for (const auto release : {Release::at_once, Release::first_text}) {
        Options options;
        options.release = release;
        RadixPlanner planner(options);
        add_turn(planner, 1, "a", 3, spell("AAAACCCCDDDDp"));
        add_turn(planner, 2, "a", 1, spell("AAAAp"));
        add_turn(planner, 3, "b", 1, spell("BBBBp"));
        add_turn(planner, 4, "b", 2, spell("BBBBCCCCp"));
        add_turn(planner, 5, "a", 2, spell("AAAACCCCp"));
        REQUIRE(burst(planner) == Ids{2, 3});
        planner.progressed(2, Step::first_text, start);
        CHECK(burst(planner).empty());
        planner.progressed(2, Step::done, start);
        CHECK(burst(planner) == Ids{5});
        planner.progressed(5, Step::failed, start); // the next need not wait for it
        planner.progressed(3, Step::done, start);
        CHECK(burst(planner) == Ids{1, 4});
        add_turn(planner, 5, "a", 2, spell("AAAACCCCp"));
        CHECK(burst(planner).empty());
        planner.progressed(1, Step::done, start);
        CHECK(burst(planner) == Ids{5});
    }
}

TEST_CASE("no more sessions are open at once than the server's cache holds, and all end") {
    std::size_t most = 0;
    for (unsigned seed = 1; seed <= 300; ++seed) {
        CAPTURE(seed);
        Random random(seed);
        auto options = random_options(random);
        options.sessions = 1 + below(random, 3);
        RadixPlanner planner(options);
        std::map<RequestId, std::pair<std::string, int>> turns;
        RequestId last = 0;
        for (char name = 'a'; name < 'a' + 8; ++name) {
            std::string text = spell(std::string(1, name == 'c' ? 'B' : 'A')) + name;
            const int count = 1 + int(below(random, 4));
            for (int turn = 0; turn < count; ++turn) {
                turns[++last] = {std::string(1, name), turn};
                add_turn(planner, last, turns[last].first, turn, text += spell("BC"));
            }
        }
        if (below(random, 2)) { // one is given up
            planner.remove(2);
            turns.erase(2);
        }
        std::map<std::string, int> open; // and the turn that was sent last
        std::map<std::string, int> left;
        for (const auto& [id, turn] : turns) ++left[turn.first];
        std::vector<RequestId> running;
        Point now = start;
        while (!turns.empty() || !running.empty()) {
            now += 1s;
            const auto pick = running.size() < 6 ? planner.next(now) : std::optional<Pick>();
            if (pick) {
                const auto [name, turn] = turns.at(pick->id);
                for (const auto id : running) REQUIRE(id != pick->id);
                const auto [before, fresh] = open.emplace(name, -1);
                REQUIRE(before->second < turn);
                before->second = turn;
                running.push_back(pick->id);
                REQUIRE(open.size() <= options.sessions);
                most = std::max(most, open.size());
            } else {
                REQUIRE_FALSE(running.empty());
                const auto id = running[below(random, unsigned(running.size()))];
                planner.progressed(id, Step::done, now);
                std::erase(running, id);
                const auto name = turns.at(id).first;
                turns.erase(id);
                if (--left[name] == 0) open.erase(name);
            }
        }
        REQUIRE_FALSE(planner.next(now));
    }
    CHECK(most == 3);
}

TEST_CASE("what runs fits into the server's cache, what is shared counted once") {
    Options options;
    options.release = Release::at_once;
    options.cache_bytes = 4 * block + 3 * (block + 40);
    RadixPlanner planner(options);
    for (RequestId id = 1; id <= 5; ++id)
        add(planner, id, spell("AAAA") + std::string(block, char('a' + id)), 10);
    add(planner, 6, spell("BBBBBBBBBBBBBBBBBB"), 5); // more than it holds: alone
    CHECK(burst(planner) == Ids{1, 2, 3});
    CHECK(planner.holds() == "memory");
    planner.progressed(2, Step::done, start);
    CHECK(burst(planner) == Ids{4});
    for (const RequestId id : {1, 3, 4}) planner.progressed(id, Step::done, start);
    CHECK(burst(planner) == Ids{5});
    planner.progressed(5, Step::done, start);
    CHECK(burst(planner) == Ids{6});
}

TEST_CASE("what is prefilled together is of like length, as far as the server has to compute it") {
    Options options;
    options.padding_bytes = 200;
    RadixPlanner planner(options);
    add(planner, 1, std::string(3000, 'A'));
    add(planner, 2, std::string(2900, 'B'));
    add(planner, 3, std::string(200, 'C'));
    add(planner, 4, std::string(100, 'D'));
    CHECK(burst(planner) == Ids{1, 2}); // 3 x 3,000 bytes would be computed for 6,100
    CHECK(planner.holds() == "padding");
    add(planner, 5, std::string(2800, 'E'));
    CHECK(burst(planner) == Ids{5}); // behind those that do not fit
    planner.progressed(1, Step::first_text, start);
    CHECK(burst(planner).empty());
    planner.progressed(2, Step::failed, start);
    planner.progressed(5, Step::first_text, start);
    CHECK(burst(planner) == Ids{3, 4});
    // A long prompt that is in the cache is a short one.
    add(planner, 7, std::string(3000, 'A') + std::string(60, 'm'));
    CHECK(burst(planner) == Ids{7});
}

TEST_CASE("prompts are alike in what comes first and in what comes after it") {
    Options options;
    options.padding_bytes = 100;
    RadixPlanner planner(options);
    add(planner, 1, std::string(1000, 'A'), {}, "d", 900);
    add(planner, 2, std::string(1000, 'B'), {}, "d", 300);
    add(planner, 3, std::string(1000, 'C'), {}, "d", 880);
    CHECK(burst(planner) == Ids{1, 3}); // with 2 it were 2 x 900 and 2 x 700 for 2,000
    for (const RequestId id : {1, 3}) planner.progressed(id, Step::first_text, start);
    CHECK(burst(planner) == Ids{2});
    planner.progressed(2, Step::first_text, start);
    // What has its front in the cache is computed beside the fronts of others.
    add(planner, 4, std::string(960, 'A') + std::string(600, 'D'), {}, "d", 900);
    add(planner, 5, std::string(700, 'E'), {}, "d", 600);
    CHECK(burst(planner) == Ids{4, 5});
}

TEST_CASE("who goes on with a session joins what is being prefilled, if it is as long") {
    Options options;
    options.padding_bytes = 100;
    RadixPlanner planner(options);
    for (const RequestId id : {1, 2}) {
        const std::string name(1, char('a' + id)), text(1000, name[0]);
        add_turn(planner, id, name, 0, text);
        add_turn(planner, 10 + id, name, 1, text + "more");
    }
    CHECK(burst(planner) == Ids{1, 2});
    planner.progressed(1, Step::done, start);
    CHECK(burst(planner).empty()); // beside 2 it would be padded to 1,000
    planner.progressed(2, Step::first_text, start);
    add(planner, 21, std::string(150, 'B'));
    CHECK(burst(planner) == Ids{11, 21});
    planner.progressed(2, Step::done, start);
    CHECK(burst(planner) == Ids{12});
}

TEST_CASE("a leader keeps places for its followers") {
    Options options;
    options.leaders = 1;
    options.shared_bytes = block;
    RadixPlanner planner(options);
    for (RequestId id = 1; id <= 4; ++id) add(planner, id, spell("AAA") + char('0' + id), 9);
    for (RequestId id = 5; id <= 12; ++id)
        add(planner, id, std::string(300, char('B' + id)) + char('0' + id));
    const auto fill = [&](unsigned free) {
        Ids order;
        for (;; --free) {
            planner.room(free);
            const auto pick = free > 0 ? planner.next(start) : std::optional<Pick>();
            if (!pick) return order;
            order.push_back(pick->id);
        }
    };
    CHECK(fill(6) == Ids{1, 5, 6}); // and three places for 2, 3 and 4
    CHECK(planner.holds() == "leader");
    planner.progressed(1, Step::first_text, start);
    CHECK(fill(3) == Ids{2, 3, 4});
    // Who has many followers does not begin before a quarter of all places is free.
    for (const RequestId id : {1, 2, 3, 4}) planner.progressed(id, Step::done, start);
    CHECK(fill(5) == Ids{7, 8, 9, 10, 11});
    for (RequestId id = 21; id <= 30; ++id)
        add(planner, id, spell("ZZZZ") + char('0' + id - 20), 9);
    add(planner, 40, std::string(300, 'Y'));
    CHECK(fill(1) == Ids{12}); // of eight
    for (const RequestId id : {5, 6, 7}) planner.progressed(id, Step::done, start);
    CHECK(fill(3) == Ids{21});
}

TEST_CASE(
    "who goes on with a session goes before all who begin, and who has waited longest first") {
    Options options;
    options.release = Release::at_once;
    RadixPlanner planner(options);
    const auto turn = [&](RequestId id, const std::string& name, int n, const std::string& text,
                          std::int64_t output) {
        Prompt prompt{"d", {text}, output};
        prompt.session = name;
        prompt.turn = n;
        planner.add(id, prompt);
    };
    for (RequestId id = 1; id <= 3; ++id) {
        const std::string name(1, char('a' + id));
        turn(10 * id, name, 0, spell("A" + name), 100 - int(id));
        turn(10 * id + 1, name, 1, spell("A" + name + "BB"), int(id));
    }
    CHECK(planner.next(start)->id == 10);
    CHECK(planner.next(start)->id == 20);
    add(planner, 40, spell("AC"), 5000);
    planner.progressed(20, Step::done, start);
    planner.progressed(10, Step::done, start);
    CHECK(burst(planner) == Ids{21, 11, 40, 30});
}

TEST_CASE("who goes on with a session overtakes nobody") {
    Options options;
    options.overtaking = 5;
    RadixPlanner planner(options);
    add_turn(planner, 1, "a", 0, spell("A"));
    add(planner, 2, spell("BBBBp"));
    CHECK(planner.next(start)->id == 1);
    for (RequestId id = 10; id < 40; ++id) {
        add_turn(planner, id, "a", int(id), spell("A") + std::string(id, 'a'));
        planner.progressed(id == 10 ? 1 : id - 1, Step::done, start);
        CHECK(planner.next(start)->id == id);
    }
    CHECK(planner.next(start)->why == "alone");
}

TEST_CASE("a free slot gets what shares most with it, whatever else is running") {
    Options options;
    options.release = Release::slot;
    RadixPlanner planner(options);
    const auto text = [](char group, int n) {
        return std::string(20 * block, group) + std::to_string(n);
    };
    for (int n = 0; n < 4; ++n) add(planner, RequestId(n + 1), text('a', n), 2000);
    for (int n = 0; n < 4; ++n) add(planner, RequestId(n + 11), text('b', n), 1000);
    CHECK(planner.next(start)->id == 1);
    CHECK(planner.next(start)->id == 11);
    CHECK(planner.next(start)->id == 2); // no other group is left, and much of a
    planner.progressed(11, Step::done, start);
    CHECK(planner.next(start)->id == 12); // although a is longer, and runs nowhere else
    planner.cache_lost();
    planner.progressed(1, Step::done, start);
    planner.progressed(12, Step::done, start);
    CHECK(burst(planner) == Ids{13, 3, 4, 14});
}

TEST_CASE("no other slot is filled with a prefix for the little that is left of it") {
    Options options;
    options.release = Release::slot;
    RadixPlanner planner(options);
    for (int n = 0; n < 4; ++n)
        add(planner, RequestId(n + 1), std::string(100 * block, 'a') + std::to_string(n), 300);
    CHECK(planner.next(start)->id == 1); // 1,600 tokens, and 1,200 for each answer
    CHECK(planner.next(start)->id == 2);
    CHECK_FALSE(planner.next(start)); // two run, and what is left is less than to fill it twice
    CHECK(planner.holds() == "slot");
    planner.progressed(1, Step::done, start);
    CHECK(planner.next(start)->id == 3);
    planner.progressed(2, Step::done, start);
    planner.progressed(3, Step::done, start);
    CHECK(planner.next(start)->id == 4);
}

TEST_CASE("what fits into the cache is told by the tokens of the prompts that were answered") {
    Options options;
    options.release = Release::at_once;
    options.cache_bytes = 4 * 1000; // 1,000 tokens
    RadixPlanner planner(options);
    for (RequestId id = 1; id <= 9; ++id) add(planner, id, std::string(1600, char('a' + id)), 100);
    CHECK(burst(planner) == Ids{1, 2});
    planner.answered(1, 10, 200); // eight bytes each
    planner.progressed(1, Step::done, start);
    CHECK(burst(planner) == Ids{3, 4, 5}); // and answers of 10 tokens
    CHECK(planner.holds() == "memory");
}

TEST_CASE("who is not streamed says nothing of its prefill, and nobody waits for it") {
    Options options;
    options.padding_bytes = 100;
    options.leaders = 1;
    options.shared_bytes = 2 * block;
    RadixPlanner planner(options);
    const auto unstreamed = [&](RequestId id, const std::string& text) {
        evalrt::Prompt prompt{"d", {text}, {}};
        prompt.streamed = false;
        planner.add(id, prompt);
    };
    for (const RequestId id : {1, 2}) unstreamed(id, spell("AAA") + std::to_string(id));
    for (const RequestId id : {3, 4}) unstreamed(id, spell("BBB") + std::to_string(id));
    unstreamed(5, std::string(5000, 'C'));
    CHECK(burst(planner) == Ids{1, 3, 5}); // their followers wait, as ever
}

TEST_CASE("what shares a prefix is not held back until others have pushed that out of the cache") {
    for (const unsigned kept : {0u, 3u}) {
        Options options;
        options.padding_bytes = 100;
        options.shared_bytes = 2 * block;
        options.kept = kept;
        RadixPlanner planner(options);
        const std::string shared(1000, 'S');
        add(planner, 1, shared + "1", 9);
        CHECK(burst(planner) == Ids{1});
        planner.progressed(1, Step::first_text, start);
        add(planner, 2, shared + std::string(2000, '2'), 9);
        for (RequestId id = 10; id < 20; ++id)
            add(planner, id, std::string(100, char('a' + id)), 9);
        add(planner, 30, std::string(100, 'B'), 10); // before the others
        add(planner, 31, std::string(100, 'C'), 10);
        CHECK(planner.next(start)->id == 2);
        planner.progressed(2, Step::first_text, start);
        add(planner, 3, shared + std::string(2000, '3'), 9);
        CHECK(planner.next(start)->id == 3);
        CHECK_FALSE(planner.next(start));
        planner.progressed(3, Step::first_text, start);
        CHECK(planner.next(start)->id == 30);
        add(planner, 4, shared + std::string(2000, '4'), 9); // too long beside the others
        CHECK(burst(planner).size() == (kept ? 1 : 11));
        CHECK(planner.holds() == "padding");
        for (RequestId id = 10; id < 32; ++id) planner.progressed(id, Step::first_text, start);
        CHECK(planner.next(start)->id == 4); // once they are computed
    }
}

TEST_CASE("nobody is overtaken for ever by those who come later and share more") {
    Options options;
    options.overtaking = 5;
    RadixPlanner planner(options);
    add(planner, 1, spell("AAAAp"));
    planner.progressed(planner.next(start)->id, Step::done, start);
    add(planner, 2, spell("BBBBp"));
    for (RequestId id = 10; id < 40; ++id) {
        add(planner, id, spell("AAAA") + std::to_string(id));
        const auto pick = planner.next(start);
        planner.progressed(pick->id, Step::done, start);
        if (pick->id != 2) continue;
        CHECK(pick->why == "overtaken");
        CHECK(id == 10 + 9); // 5, and twice the 2 that waited at once
        return;
    }
    FAIL("it was never sent");
}

TEST_CASE("a prefix keeps to one slot as long as there are others to begin") {
    Options options;
    options.release = Release::slot;
    RadixPlanner planner(options);
    const auto text = [](char group, RequestId id) {
        return spell("S") + std::string(4 * block, group) + std::to_string(id);
    };
    for (RequestId id = 0; id < 9; ++id) add(planner, id + 1, text("abc"[id % 3], id));
    CHECK(planner.next(start)->id == 1);
    CHECK(planner.next(start)->id == 2);
    planner.progressed(1, Step::done, start);
    CHECK(planner.next(start)->id == 4); // the slot that is free has its prefix
    CHECK(planner.next(start)->id == 3);
    CHECK(planner.next(start)->id == 7); // no other group is left: nothing waits for a slot
}

TEST_CASE("the length of answers is predicted by those of its own group") {
    RadixPlanner planner;
    const auto answer = [&](RequestId id, const std::string& text, std::int64_t tokens) {
        add(planner, id, text, 500);
        REQUIRE(planner.next(start)->id == id);
        planner.answered(id, tokens);
        planner.progressed(id, Step::done, start);
    };
    answer(1, spell("SAp"), 20);
    answer(2, spell("SBp"), 100);
    answer(3, spell("SBq"), 300);
    add(planner, 10, spell("SAr"), 500);
    add(planner, 11, spell("SBr"), 500);
    add(planner, 12, spell("SCr"), 500); // as all
    add(planner, 13, spell("SBs"), 50);  // cannot be longer
    std::map<RequestId, std::int64_t> output;
    for (const auto& it : planner.order()) output[it.id] = it.output_tokens;
    CHECK(output == std::map<RequestId, std::int64_t>{{10, 20}, {11, 200}, {12, 140}, {13, 50}});
}

TEST_CASE("in the order of arrival only the figures are the tree's") {
    Options options;
    options.in_order = true;
    RadixPlanner planner(options);
    const std::vector<std::string> words{"AAAAp", "BBBBp", "AAAAq", "BBBBq"};
    for (RequestId id = 1; id <= words.size(); ++id) add(planner, id, spell(words[id - 1]));
    planner.remove(2);
    add(planner, 5, spell("AAAAp"));
    CHECK(planner.order().size() == 4);
    CHECK(planner.next(start)->maximum_bytes == 0u);
    auto pick = planner.next(start);
    CHECK(pick->id == 3); // nobody is waited for
    CHECK(pick->why == "arrival");
    CHECK(pick->expected_bytes == 0u);
    CHECK(pick->maximum_bytes == 4 * block + 1);
    CHECK(burst(planner) == Ids{4, 5});
}

TEST_CASE("a pick says why, of which prefix, and whom it waited for") {
    RadixPlanner planner;
    for (RequestId id = 1; id <= 3; ++id) add(planner, id, spell("AAAA") + std::to_string(id));
    add(planner, 4, spell("BBBBp"));
    auto pick = planner.next(start);
    CHECK(pick->why == "leader");
    CHECK(pick->node_bytes == 4 * block);
    const auto node = pick->node;
    CHECK(node != 0);
    pick = planner.next(start);
    CHECK(pick->id == 4);
    CHECK(pick->why == "alone");
    CHECK(pick->node == 0);
    CHECK_FALSE(planner.next(start));
    CHECK(planner.holds() == "leader");
    planner.progressed(1, Step::first_text, start);
    pick = planner.next(start);
    CHECK(pick->why == "follower");
    CHECK(pick->node == node);
    CHECK(pick->waited_for == 1);
    CHECK(planner.holds().empty());
}

TEST_CASE("the order of what waits is the order in which it goes, with what each one costs") {
    for (unsigned seed = 1; seed <= 300; ++seed) {
        CAPTURE(seed);
        Random random(seed);
        auto options = random_options(random);
        options.leaders = 0;
        RadixPlanner planner(options);
        std::map<RequestId, Question> all;
        for (RequestId id = 1; id <= 12; ++id) {
            const auto question = all[id] = random_question(random);
            add(planner, id, question.text, question.output, question.domain);
        }
        const auto order = planner.order();
        Ids ids;
        for (const auto& it : order) ids.push_back(it.id);
        for (std::size_t i = 1; i < order.size(); ++i) {
            const auto &a = all[ids[i - 1]], &b = all[ids[i]];
            const auto same = a.domain == b.domain ? common(a.text, b.text) : 0;
            REQUIRE(order[i].shared_bytes <= same);
            REQUIRE(order[i].shared_bytes + block > same);
            REQUIRE(order[i].prompt_bytes == b.text.size());
        }
        REQUIRE(ids == drain(planner));
    }
}

TEST_CASE("a session's growth has its place in the server's cache before it begins") {
    Options options;
    options.release = Release::at_once;
    options.cache_bytes = 2 * (6000 + block + 100) * 10 / 11 + 10; // they do not grow all at once
    RadixPlanner planner(options);
    for (RequestId id = 1; id <= 3; ++id) {
        const std::string name(1, char('a' + id));
        std::string text = spell(std::string(1, char('A' + id)));
        add_turn(planner, 10 * id, name, 0, text);
        add_turn(planner, 10 * id + 1, name, 1, text + std::string(3000, 'x'));
    }
    CHECK(burst(planner) == Ids{10, 20});
    CHECK(planner.holds() == "memory");
    planner.progressed(10, Step::done, start);
    CHECK(burst(planner) == Ids{11}); // who goes on may
    planner.progressed(20, Step::done, start);
    planner.progressed(11, Step::done, start);
    CHECK(burst(planner) == Ids{21, 30});
}

namespace {

void add_for(PrefixPlanner& planner, std::uint32_t client, RequestId id, const std::string& text) {
    Prompt prompt{"d", {text}, 10};
    prompt.client = client;
    planner.add(id, prompt);
}

// Whose requests go, one at a time.
std::string drain_clients(PrefixPlanner& planner, const std::map<RequestId, std::uint32_t>& whose) {
    std::string order;
    for (const auto id : drain(planner)) order += char('0' + whose.at(id));
    return order;
}

} // namespace

TEST_CASE("who has one request waits for one turn of who has a thousand") {
    RadixPlanner planner;
    for (RequestId id = 1; id <= 1000; ++id)
        add_for(planner, 1, id, spell("AAAA") + std::to_string(id));
    for (int i = 0; i < 100; ++i) planner.progressed(planner.next(start)->id, Step::done, start);
    add_for(planner, 2, 2000, spell("B"));
    add_for(planner, 3, 3000, spell("C"));
    const auto order = drain(planner);
    const auto place = [&](RequestId id) {
        return std::find(order.begin(), order.end(), id) - order.begin();
    };
    CHECK(place(2000) <= 9);
    CHECK(place(3000) <= 9);
    CHECK(order.size() == 902);
}

TEST_CASE("clients go by turns, each in the order of its prefixes") {
    RadixPlanner planner;
    std::map<RequestId, std::uint32_t> whose;
    // Of both, ten of each of four prefixes, mixed; one prefix they share.
    RequestId last = 0;
    for (int i = 0; i < 10; ++i)
        for (const char group : {'A', 'B', 'C', 'D'})
            for (const std::uint32_t client : {1, 2}) {
                const char whose_own = group == 'D' ? 'x' : char('0' + client);
                whose[++last] = client;
                add_for(planner, client, last,
                        std::string(300, group) + whose_own + std::string(300, group) +
                            std::to_string(last));
            }
    const auto order = drain(planner);
    REQUIRE(order.size() == 80);
    std::array<int, 3> served{}, changes{};
    std::array<char, 3> group{};
    for (const auto id : order) {
        const auto client = whose.at(id);
        ++served[client];
        CHECK(std::abs(served[1] - served[2]) <= 8); // while both have something: to the end
        const char now = "ABCD"[(id - 1) / 2 % 4];
        changes[client] += std::exchange(group[client], now) != now;
    }
    CHECK(changes[1] <= 5); // four groups; the last may come in two parts
    CHECK(changes[2] <= 5);
}

TEST_CASE("a client that comes back has not saved up turns, and one alone has no turns") {
    RadixPlanner planner;
    std::map<RequestId, std::uint32_t> whose;
    const auto add_some = [&](std::uint32_t client, RequestId from, int count) {
        for (int i = 0; i < count; ++i) {
            whose[from + RequestId(i)] = client;
            add_for(planner, client, from + RequestId(i), spell("AAAA") + char('a' + client));
        }
    };
    add_some(1, 1, 50);
    CHECK(drain_clients(planner, whose) == std::string(50, '1'));
    add_some(2, 100, 30);
    add_some(1, 200, 30);
    const auto order = drain_clients(planner, whose);
    CHECK(std::count(order.begin(), order.begin() + 32, '1') >= 12);
    CHECK(std::count(order.begin(), order.begin() + 32, '1') <= 20);
}

TEST_CASE("clients that have one request at a time and come back do not pass one that waits") {
    RadixPlanner planner;
    std::map<RequestId, std::uint32_t> whose;
    RequestId last = 0;
    const auto come = [&](std::uint32_t client) {
        whose[++last] = client;
        add_for(planner, client, last, spell("AAAA") + std::to_string(last));
    };
    for (std::uint32_t client = 0; client < 5; ++client) come(client);
    whose[1000] = 9;
    add_for(planner, 9, 1000, spell("B"));
    for (int passed = 0; passed <= 5; ++passed) {
        const auto pick = planner.next(start);
        planner.progressed(pick->id, Step::done, start);
        if (pick->id == 1000) return;
        come(whose.at(pick->id));
    }
    FAIL("they all passed it twice");
}

TEST_CASE("what waited at once long ago lets nobody be overtaken more today") {
    RadixPlanner planner;
    RequestId last = 0;
    const auto come = [&](const char* group) {
        ++last;
        add_for(planner, 1, last, spell(group) + std::to_string(last));
    };
    for (int i = 0; i < 3000; ++i) come("AAAA");
    const auto go = [&] {
        const auto pick = planner.next(start);
        planner.progressed(pick->id, Step::done, start);
        return pick->id;
    };
    for (int i = 0; i < 2995; ++i) go();
    for (int i = 0; i < 20; ++i, come("AAAA")) go(); // never is there nothing that waits
    come("B");
    const auto waits = last;
    int passed = 0;
    for (; go() != waits; ++passed) come("AAAA");
    CHECK(passed >= 100);
    CHECK(passed <= 100 + 2 * 7);
}

// For a request that nothing holds back: between two of its client's own, turn * (C - 1) of others
// at most, C of the clients that waited at the first; and of its own client's, that came later and
// go on with no session, overtaking + 2 * W, W the most of them that waited at once.
TEST_CASE("nobody is overtaken more than the turns of others and its own client's plan need") {
    struct Waits {
        std::uint32_t client;
        bool goes_on;
        unsigned passed = 0; // by its client's own that came later
    };
    struct Client {
        std::size_t waiting = 0, most = 0;
        std::size_t others = 0, bound = 0; // since its last one
        bool plain = true;                 // nothing holds its requests back
    };
    for (unsigned seed = 0; seed < 100; ++seed) {
        std::vector<RequestId> orders[2];
        for (auto& order : orders) {
            std::mt19937 random(seed);
            const auto upto = [&](unsigned n) { return unsigned(random() % n); };
            Options options;
            options.release = Release(upto(4));
            const bool at_once = options.release == Release::at_once;
            options.leaders = upto(3);
            options.sessions = upto(2) * 3;
            options.overtaking = 1 + upto(20);
            options.turn = 1 + upto(8);
            const unsigned places = 1 + upto(12), names = 1 + upto(10), busy = 1 + upto(30);
            RadixPlanner planner(options);
            std::map<std::uint32_t, Client> clients;
            std::map<RequestId, Waits> waiting;
            std::vector<RequestId> running;
            std::map<std::string, int> turns;
            std::set<std::string> begun;
            std::map<RequestId, std::string> session_of;
            RequestId last = 0;
            const auto clients_waiting = [&] {
                return std::count_if(clients.begin(), clients.end(),
                                     [](const auto& it) { return it.second.waiting > 0; });
            };
            const auto come = [&](std::uint32_t name) {
                auto& client = clients[name];
                client.plain = client.plain && (name % 2 || (at_once && options.leaders == 0));
                const auto id = ++last;
                Prompt prompt{"d", {}, upto(100)};
                prompt.client = name;
                prompt.streamed = upto(4) > 0;
                std::string text = client.plain && !at_once
                                       ? std::to_string(name) + " " + std::to_string(id)
                                       : std::string(400, char('a' + upto(3)));
                text += std::to_string(upto(30));
                if (name % 2 == 0 && upto(2)) {
                    prompt.session = std::to_string(name) + "s" + std::to_string(upto(3));
                    prompt.turn = turns[prompt.session]++;
                    session_of[id] = prompt.session;
                    client.plain = false;
                }
                prompt.segments = {text};
                planner.add(id, prompt);
                if (client.waiting++ == 0) {
                    client.others = 0;
                    client.bound = options.turn * std::size_t(clients_waiting() - 1);
                }
                client.most = std::max(client.most, client.waiting);
                waiting[id] = {name, !prompt.session.empty()};
            };
            for (int step = 0; step < 600; ++step) {
                // Some always have one, some come in bursts.
                if (waiting.size() < busy) {
                    const auto name = upto(names);
                    const auto count = name % 3 ? 1 : 1 + upto(20);
                    for (unsigned i = 0; i < count; ++i) come(name);
                }
                if (upto(40) == 0 && !waiting.empty()) {
                    const auto id = waiting.begin()->first;
                    --clients[waiting.at(id).client].waiting;
                    planner.remove(id);
                    waiting.erase(id);
                }
                while (running.size() < places) {
                    planner.room(places - unsigned(running.size()));
                    const auto pick = planner.next(start + std::chrono::seconds(step));
                    if (!pick) break;
                    order.push_back(pick->id);
                    running.push_back(pick->id);
                    const auto sent = waiting.at(pick->id);
                    waiting.erase(pick->id);
                    const bool goes_on = sent.goes_on && !begun.insert(session_of[pick->id]).second;
                    for (auto& [id, it] : waiting) {
                        if (id > pick->id || it.client != sent.client || goes_on) continue;
                        ++it.passed;
                        const auto& of = clients[it.client];
                        INFO("seed " << seed << " request " << id);
                        if (of.plain) REQUIRE(it.passed <= options.overtaking + 2 * of.most);
                    }
                    for (auto& [name, of] : clients) {
                        if (of.waiting == 0) continue;
                        if (name == sent.client) continue;
                        INFO("seed " << seed << " client " << name);
                        ++of.others;
                        if (of.plain) REQUIRE(of.others <= of.bound);
                    }
                    auto& own = clients[sent.client];
                    --own.waiting;
                    own.others = 0;
                    own.bound = options.turn * std::size_t(std::max(clients_waiting() - 1, 0l));
                }
                if (running.empty()) continue;
                const auto at = running.begin() + upto(unsigned(running.size()));
                const auto how = upto(8) == 0   ? Step::failed
                                 : upto(3) == 0 ? Step::first_text
                                                : Step::done;
                planner.progressed(*at, how, start + std::chrono::seconds(step));
                if (how != Step::first_text) running.erase(at);
            }
        }
        CHECK(orders[0] == orders[1]);
    }
}

TEST_CASE("a turn whose requests wait for a leader is not waited for") {
    RadixPlanner planner;
    add_for(planner, 2, 1, spell("AAAAAAAA") + "1");
    add_for(planner, 2, 2, spell("AAAAAAAA") + "2");
    for (RequestId id = 10; id < 13; ++id) add_for(planner, 1, id, spell("B") + std::to_string(id));
    CHECK(burst(planner).size() == 4);
    CHECK(planner.holds() == "leader");
}

namespace {

void add_open(PrefixPlanner& planner, RequestId id, const std::string& session, int turn,
              const std::string& text, std::chrono::milliseconds pause = 2s) {
    Prompt prompt{"d", {text}, 10, session, turn};
    prompt.pause = pause;
    planner.add(id, prompt);
}

} // namespace

TEST_CASE("a session whose end is not known keeps its place between its turns") {
    Options options;
    options.sessions = 2;
    options.release = Release::at_once;
    RadixPlanner planner(options);
    add_open(planner, 1, "a", 1, spell("Aa"));
    add_open(planner, 2, "b", 1, spell("Bb"));
    add_open(planner, 3, "c", 1, spell("Cc"));
    CHECK(burst(planner) == Ids{1, 2});
    CHECK(planner.holds() == "sessions");
    planner.progressed(1, Step::done, start);
    CHECK(burst(planner, start + 1s).empty()); // a is expected back
    CHECK(planner.holds() == "sessions");
    CHECK(planner.wake() == start + 2s);
    add_open(planner, 4, "a", 2, spell("AaDd"));
    CHECK(burst(planner, start + 1s) == Ids{4});
    planner.progressed(4, Step::done, start + 3s);
    CHECK(burst(planner, start + 4s).empty());
    CHECK(burst(planner, start + 5s) == Ids{3}); // a has not come
    add_open(planner, 5, "a", 3, spell("AaDdEe"));
    CHECK(burst(planner, start + 6s).empty());       // now it waits for a place itself
    planner.progressed(3, Step::failed, start + 7s); // which a failure leaves at once
    CHECK(burst(planner, start + 7s) == Ids{5});
}

TEST_CASE("sessions that are all silent give their places to those that wait") {
    Options options;
    options.sessions = 2;
    RadixPlanner planner(options);
    add_open(planner, 1, "a", 1, spell("Aa"));
    add_open(planner, 2, "b", 1, spell("Bb"));
    CHECK(burst(planner) == Ids{1, 2});
    add_open(planner, 3, "of a's user", 1, spell("Cc"));
    add_open(planner, 4, "of b's user", 1, spell("Dd"));
    planner.progressed(1, Step::done, start);
    CHECK(burst(planner).empty());
    planner.progressed(2, Step::done, start);
    CHECK(burst(planner) == Ids{3, 4});
    add_open(planner, 5, "a", 2, spell("AaDd")); // as any other
    CHECK(burst(planner).empty());
    planner.progressed(3, Step::done, start);
    CHECK(burst(planner, start + 2s) == Ids{5});
}

TEST_CASE("between its turns such a session has its place in the server's cache") {
    Options options;
    options.release = Release::at_once;
    options.cache_bytes = 11000;
    RadixPlanner planner(options);
    add_open(planner, 1, "a", 1, std::string(4000, 'a'));
    add(planner, 2, std::string(500, 'b'), 1);
    CHECK(burst(planner) == Ids{1, 2});
    planner.progressed(1, Step::done, start);
    add(planner, 3, std::string(4000, 'c'), 1);
    CHECK(burst(planner, start + 1s).empty()); // with what a has, and will have, it is too much
    CHECK(planner.holds() == "memory");
    CHECK(planner.wake() == start + 2s);
    CHECK(burst(planner, start + 2s) == Ids{3});
}
