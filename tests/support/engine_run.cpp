#include "support/engine_run.hpp"

#include "evalrt/request_scheduler.hpp"
#include "recognise.hpp"
#include "wire.hpp"

#include <boost/json.hpp>

#include <queue>
#include <stdexcept>

namespace evalrt::test {
namespace {

namespace json = boost::json;
using Point = Clock::time_point;

Point point(double seconds) {
    return Point{std::chrono::hours(1)} +
           std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}
double seconds(Point at) {
    return std::chrono::duration<double>(at - Point{std::chrono::hours(1)}).count();
}

std::string text_of(const json::value& content) {
    if (content.is_string()) return std::string(content.get_string());
    std::string out;
    if (content.is_array())
        for (const auto& part : content.get_array())
            if (const auto* text = part.as_object().if_contains("text")) out += text_of(*text);
    return out;
}

std::string_view string_at(const json::object& object, std::string_view name) {
    const auto* found = object.if_contains(name);
    return found && found->is_string() ? std::string_view(found->get_string()) : std::string_view();
}

} // namespace

std::vector<const Job*> Suite::jobs() const {
    std::vector<const Job*> list;
    for (const auto& turn : turns) list.push_back(&turn.job);
    return list;
}

std::vector<std::vector<std::size_t>> Suite::chains() const {
    std::vector<std::vector<std::size_t>> list;
    for (std::size_t i = 0; i < turns.size(); ++i) {
        if (!turns[i].first) continue;
        auto& chain = list.emplace_back();
        for (auto at = i;; at = turns[at].next) {
            chain.push_back(at);
            if (turns[at].next == 0) break;
        }
    }
    return list;
}

Job render(std::string_view body, std::string_view answer) {
    Job job;
    const auto parsed = json::parse({body.data(), body.size()});
    const auto& object = parsed.as_object();
    const auto say = [&](std::string_view text) { tokenize(text, job.tokens); };
    const auto* tools = object.if_contains("tools");
    const auto* list = object.if_contains("messages");
    const json::array none;
    const auto& messages = list && list->is_array() ? list->get_array() : none;
    if (!list) say(string_at(object, "prompt"));
    bool in_system = true, system = false;
    const auto end_system = [&] {
        if (!in_system) return;
        in_system = false;
        if (tools && tools->is_array() && !tools->get_array().empty()) {
            say("\n\n# Tools\n\nYou may call one or more functions.\n<tools>");
            for (const auto& tool : tools->get_array()) {
                say("\n");
                say(json::serialize(tool));
            }
            say("\n</tools>");
        }
        say("<|im_end|>\n");
    };
    if (list) say("<|im_start|>system\n");
    for (const auto& it : messages) {
        const auto& message = it.as_object();
        const auto role = string_at(message, "role");
        const auto* content = message.if_contains("content");
        job.user_last = role == "user";
        if (role == "system") {
            system = true;
            if (content) say(text_of(*content));
            continue;
        }
        const bool first = in_system;
        end_system();
        say("<|im_start|>");
        say(role);
        say("\n");
        // Two prompts are the same up to where the first one speaks; that is what is looked for.
        if (first && system) job.system = job.tokens.size();
        if (content) say(text_of(*content));
        say("<|im_end|>\n");
    }
    if (list) {
        end_system();
        say("<|im_start|>assistant\n");
    }
    if (!list) job.user_last = false;
    if (!job.user_last) job.system = 0;
    job.prompt = std::max<std::size_t>(job.tokens.size(), 1);
    job.tokens.resize(job.prompt);
    job.calls_tools = tools && answer.starts_with("[{\"name\"");
    say(answer);
    if (job.output() == 0) job.tokens.push_back(0);
    return job;
}

Suite read_suite(std::istream& in) {
    Suite suite;
    std::map<std::string, std::size_t, std::less<>> last; // turn of a session
    std::uint32_t fresh = 1;
    for (std::string line; std::getline(in, line);) {
        if (line.empty()) continue;
        const auto parsed = json::parse(line);
        const auto& row = parsed.as_object();
        Turn turn;
        turn.request.body = json::serialize(row.at("body"));
        if (const auto* tokens = row.if_contains("tokens")) {
            for (const auto& token : tokens->as_array())
                turn.job.tokens.push_back(token.to_number<std::uint32_t>());
            turn.job.prompt = turn.job.tokens.size();
            if (const auto* system = row.if_contains("system_tokens"))
                turn.job.system = system->to_number<std::size_t>();
        } else {
            turn.job = render(turn.request.body, string_at(row, "answer"));
        }
        if (const auto* count = row.if_contains("output_tokens")) {
            turn.job.tokens.resize(turn.job.prompt);
            const auto n = std::max<std::size_t>(count->to_number<std::size_t>(), 1);
            for (std::size_t i = 0; i < n; ++i) turn.job.tokens.push_back(0x80000000u + fresh++);
        }
        if (const auto session = string_at(row, "session"); !session.empty()) {
            turn.request.session = session;
            if (const auto* n = row.if_contains("turn")) turn.request.turn = n->to_number<int>();
            const auto found = last.find(session);
            if (found != last.end()) {
                turn.first = false;
                suite.turns[found->second].next = suite.turns.size();
            }
            last[std::string(session)] = suite.turns.size();
        }
        suite.turns.push_back(std::move(turn));
    }
    return suite;
}

BackendRow engine_row(const EngineConfig& config) {
    const auto name = config.kind == "mlx"     ? "mlx-server"
                      : config.kind == "llama" ? "llama-server"
                                               : config.kind;
    auto row = *find_profile_row(name);
    row.tools_before_system = false; // as render() has it
    if (config.kind == "llama") row.in_flight = config.batch;
    if (config.kind == "vllm" || config.kind == "sglang") { // as they tell
        row.block_tokens = unsigned(config.page);
        detail::has_cache(row, std::int64_t(config.cache));
    }
    return row;
}

RunResult run(const Suite& suite, const EngineConfig& config, const BackendRow& given,
              const RunOptions& options) {
    auto row = given;
    if (options.in_flight > 0) {
        row.in_flight = options.in_flight;
        row.most_in_flight = 0;
        row.refill = std::min(row.refill, std::max(row.in_flight / 3, 1u)); // as Runtime has it
    }
    FifoPlanner fifo;
    RadixPlanner radix(planner_options(row));
    auto scheduling = scheduler_options(row);
    if (!options.planned) { // whoever takes the file's order sends as soon as there is a place
        scheduling.refill = 1;
    }
    PrefixPlanner& planner = options.planned ? static_cast<PrefixPlanner&>(radix) : fifo;
    detail::SchedulerCore core(planner, scheduling);
    const auto engine = make_engine(config);
    const auto& turns = suite.turns;
    RunResult result;
    double now = 0;

    using Arrival = std::pair<double, std::size_t>;
    std::priority_queue<Arrival, std::vector<Arrival>, std::greater<>> arrivals;
    std::size_t root = 0, open = 0;
    const auto submit = [&](std::size_t i) {
        core.submit(i + 1, detail::read_prompt(turns[i].request, row), Point::max());
    };
    const auto more_roots = [&] {
        for (; root < turns.size(); ++root) {
            if (!turns[root].first) continue;
            if (!options.planned && open >= core.stats(point(now)).limit) return;
            ++open;
            submit(root);
        }
    };
    const auto pump = [&] {
        more_roots();
        unsigned sent = 0;
        while (const auto pick = core.next(point(now))) {
            const auto paced = ++sent > row.backlog ? (sent - row.backlog) *
                                                          double(row.accept_interval.count()) / 1e3
                                                    : 0;
            arrivals.emplace(now + options.arrival + paced, std::size_t(pick->id) - 1);
        }
    };
    std::vector<EngineEvent> events;
    pump();
    while (result.answered < turns.size()) {
        for (; !arrivals.empty() && arrivals.top().first <= now; arrivals.pop())
            engine->submit(arrivals.top().second + 1, turns[arrivals.top().second].job);
        if (engine->idle()) {
            const auto wake = core.wake(point(now));
            double at = wake == Point::max() ? 1e300 : std::max(seconds(wake), now + 1e-6);
            if (!arrivals.empty()) at = std::min(at, arrivals.top().first);
            if (at > 1e200) throw std::logic_error("nothing runs, and nothing is sent");
            now = at;
            pump();
            continue;
        }
        events.clear();
        now += engine->step(now, events);
        for (const auto& event : events) {
            const auto i = std::size_t(event.id) - 1;
            if (event.what == EngineEvent::computed) core.computed(event.id, point(now));
            if (event.what == EngineEvent::token && !event.hidden) core.text(event.id, point(now));
            if (event.what != EngineEvent::done) continue;
            const auto& turn = turns[i];
            if (turn.job.calls_tools && config.kind == "mlx") core.text(event.id, point(now));
            Response response;
            response.body = "{}";
            response.usage = {std::int64_t(turn.job.prompt), std::int64_t(engine->cached(event.id)),
                              std::int64_t(turn.job.output())};
            result.cached[i] = engine->cached(event.id);
            if (turn.next > 0) submit(turn.next); // before its end: the conversation goes on
            core.ended(event.id, response, false, point(now));
            result.prompt_tokens += turn.job.prompt;
            if (++result.answered == turns.size() / 5)
                result.after_fifth = core.stats(point(now)).limit;
            open -= turn.next == 0;
        }
        pump();
        if (result.answered > turns.size() / 2 && core.waiting() > 0) {
            const auto limit = core.stats(point(now)).limit;
            result.least = std::min(result.least, limit);
            result.most = std::max(result.most, limit);
        }
    }
    const auto stats = core.stats(point(now));
    result.seconds = now;
    result.totals = engine->totals();
    result.limit = stats.limit;
    result.in_flight_mean = stats.in_flight_seconds / std::max(stats.busy_seconds, 1e-9);
    return result;
}

} // namespace evalrt::test
