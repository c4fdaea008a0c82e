#include "evalrt/request_scheduler.hpp"

#include "evalrt/detail/complete.hpp"
#include "evalrt/detail/memory.hpp"
#include "json_text.hpp"
#include "wire.hpp"

#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/steady_timer.hpp>

#include <fmt/format.h>

namespace evalrt {

SchedulerOptions scheduler_options(const BackendRow& row, unsigned servers) {
    SchedulerOptions options;
    options.servers = servers;
    options.max_in_flight = row.in_flight;
    options.most_in_flight = row.most_in_flight;
    options.repack = row.repack;
    options.refill = row.refill;
    if (row.release == Release::done) options.commit_delay = row.commit_delay;
    return options;
}

RadixPlanner::Options planner_options(const BackendRow& row) {
    RadixPlanner::Options options;
    options.release = row.release;
    options.shared_bytes = row.shared_tokens * 4;
    options.match_length = row.padding_tokens > 0;
    options.padding_bytes = row.padding_tokens * std::size_t(4);
    options.leaders = row.leaders;
    options.sessions = row.sessions;
    // Of the prompts that its cache holds, one is put in at the end of a system prompt, of the
    // prompt and of the answer.
    if (row.padding_tokens > 0 && row.sessions > 0) options.kept = (row.sessions + 2) / 3;
    options.cache_bytes = std::size_t(row.cache_tokens) * 4;
    return options;
}

struct RequestScheduler::Impl : std::enable_shared_from_this<Impl> {
    struct Item {
        // Boost 1.81 recurses without end when an any_completion_handler is assigned to: it is
        // only ever constructed and moved from.
        Item(Request&& request_, TextSink&& on_text_, Handler&& handler_, Clock::time_point now)
            : request(std::move(request_)),
              on_text(std::move(on_text_)),
              handler(std::move(handler_)),
              submitted(now) {}

        Request request;
        TextSink on_text;
        Handler handler;
        asio::cancellation_signal cancel; // of the attempt that runs
        Clock::time_point submitted, sent;
        Pick pick;
        std::unique_ptr<Response> last; // of an attempt that was not the last one
        bool delivered = false;         // text of the running attempt has reached the caller
        bool cancelled = false;
        bool late = false;
        std::string domain; // of its prompt, and its blocks' ends, where the row wants marks
        std::vector<detail::PrefixEnd> ends;
    };

    Impl(Backend& inner_, PrefixPlanner& planner, BackendRow row_, SchedulerOptions scheduling)
        : inner(inner_),
          home(inner_.get_executor()),
          executor(home.executor),
          row(std::move(row_)),
          options(scheduling),
          core(planner, scheduling),
          timer(executor),
          hold_timer(executor) {}

    void submit(Request&& request, TextSink&& on_text, Handler&& handler) {
        const auto now = Clock::now();
        if (closed) {
            Response response;
            response.outcome = closed;
            response.detail = closed_detail;
            return detail::complete(executor, std::move(handler), make_error_code(*closed),
                                    std::move(response));
        }
        const RequestId id = ++last_id;
        auto& item =
            items.try_emplace(id, std::move(request), std::move(on_text), std::move(handler), now)
                .first->second;
        detail::on_cancel(item.handler, [weak = weak_from_this(), id] {
            if (auto self = weak.lock()) self->cancel(id, false);
        });
        const auto deadline = item.request.deadline.count() > 0 ? now + item.request.deadline
                                                                : Clock::time_point::max();
        auto prompt = detail::read_prompt(item.request, row);
        if (row.cache_marks || row.cache_key || row.routing_key) {
            item.domain = prompt.domain;
            item.ends = detail::prefix_ends(item.request.body);
            shared.add(item.domain, item.ends);
        }
        core.submit(id, std::move(prompt), deadline);
        pump_soon();
    }

    // A burst of submissions is planned as a whole.
    void pump_soon() {
        if (std::exchange(pump_posted, true)) return;
        asio::post(executor, [weak = weak_from_this()] {
            if (auto self = weak.lock()) {
                self->pump_posted = false;
                self->pump();
            }
        });
    }

    void pump() {
        const auto now = Clock::now();
        for (const auto id : core.late(now)) cancel(id, true);
        while (auto pick = core.next(now)) launch(*pick, now);
        if (const auto& reason = core.stop_reason()) stop(reason->first, reason->second);
        if (core.server_gone(now))
            server_gone(Errc::unreachable, "the server does not answer any more");
        if (core.turned_away(now))
            server_gone(Errc::overloaded, "the server turns everything away");
        arm(now);
    }

    // The rest is not asked, and what runs is not waited for.
    void stop(Errc cause, std::string why) {
        if (stopped) return;
        close(Errc::cancelled, "not run: " + why);
        stopped = {cause, std::move(why)};
        for (const auto id : all()) cancel(id, false);
    }

    void server_gone(Errc outcome, std::string why) {
        if (options.stop.alike > 0 || options.stop.refused > 0) {
            for (const auto id : all())
                if (const auto& last = items.at(id).last;
                    last && last->outcome &&
                    detail::remedy(*last->outcome, last->status) == detail::Remedy::pause)
                    return stop(outcome, why + ": " + last->detail);
            return stop(outcome, std::move(why));
        }
        for (const auto id : all())
            if (core.cancel(id) == detail::SchedulerCore::Place::waiting) give_up(id, outcome, why);
    }

    void arm(Clock::time_point now) {
        const auto at = core.wake(now);
        if (at == armed) return;
        armed = at;
        if (at == Clock::time_point::max()) {
            timer.cancel();
            return;
        }
        timer.expires_at(at);
        timer.async_wait([weak = weak_from_this()](error_code ec) {
            auto self = weak.lock();
            if (ec || !self) return;
            self->armed = Clock::time_point::max();
            self->pump();
        });
    }

    void launch(const Pick& pick, Clock::time_point now) {
        auto& item = items.at(pick.id);
        item.sent = now;
        item.pick = pick;
        item.delivered = false;
        if (explain) explain(explained(item, now));
        // No text comes after the end of the attempt, whose handler keeps *this.
        auto on_text = [this, id = pick.id](std::string_view piece) { text(id, piece); };
        Request request = item.request;
        request.server = pick.server;
        request.id = pick.id;
        request.shared_bytes = shared.bytes(item.domain, item.ends);
        request.on_computed = [this, id = pick.id] { computed(id); };
        inner.async_complete(std::move(request), std::move(on_text),
                             Returned{shared_from_this(), pick.id, item.cancel.slot()});
    }

    // Of one attempt. It has no executor of its own: that of the inner backend is ours.
    struct Returned {
        using allocator_type = detail::SpareAllocator<void>;
        using cancellation_slot_type = asio::cancellation_slot;

        std::shared_ptr<Impl> self;
        RequestId id;
        asio::cancellation_slot slot;

        allocator_type get_allocator() const noexcept { return {}; }
        cancellation_slot_type get_cancellation_slot() const noexcept { return slot; }
        void operator()(error_code, Response&& response) {
            self->returned(id, std::move(response));
        }
    };

    std::string explained(const Item& item, Clock::time_point now) {
        const auto& pick = item.pick;
        const auto ms = [](Clock::duration time) { return Timing::Millis(time).count(); };
        const auto word = [](std::string_view text) {
            return text.empty() ? "null" : detail::json_string(text);
        };
        const auto number = [](auto value) { return value ? fmt::to_string(*value) : "null"; };
        const auto stats = core.stats(now);
        return fmt::format(
            R"({{"at_ms": {:.3f}, "n": {}, "id": {}, "attempt": {}, "why": {}, "node": {}, )"
            R"("node_bytes": {}, "prompt_bytes": {}, "expected_bytes": {}, "maximum_bytes": {}, )"
            R"("waited_for": {}, "gate": {}, "waited_ms": {:.3f}, "in_flight": {}, "limit": {}}})",
            ms(now - made), pick.id, word(item.request.name), core.attempts(pick.id) + 1,
            word(pick.why), pick.node ? fmt::format("\"{:08x}\"", pick.node) : "null",
            pick.node_bytes, pick.prompt_bytes, number(pick.expected_bytes),
            number(pick.maximum_bytes), pick.waited_for ? fmt::to_string(pick.waited_for) : "null",
            word(pick.gate), ms(now - item.submitted), stats.in_flight, stats.limit);
    }

    void text(RequestId id, std::string_view piece) {
        const auto it = items.find(id);
        if (it == items.end()) return;
        last_progress = Clock::now();
        core.text(id, last_progress);
        auto& item = it->second;
        if (item.on_text && item.request.stream && !item.cancelled && !item.late) {
            item.delivered |= !piece.empty();
            item.on_text(piece);
        }
        pump_soon();
    }

    void computed(RequestId id) {
        last_progress = Clock::now();
        core.computed(id, last_progress);
        pump_soon();
    }

    // A connection that breaks may be the first sign of the server's death.
    void returned(RequestId id, Response&& response) {
        const auto now = Clock::now();
        if (response.outcome != Errc::timed_out) last_progress = now;
        const bool broke = response.outcome == Errc::unreachable ||
                           response.outcome == Errc::truncated ||
                           response.outcome == Errc::malformed;
        if (!broke || down || options.hold_broken.count() == 0)
            return ended(id, std::move(response), now, true);
        held.emplace_back(id, std::move(response));
        if (held.size() > 1) return;
        hold_timer.expires_after(options.hold_broken);
        hold_timer.async_wait([weak = weak_from_this()](error_code ec) {
            auto self = weak.lock();
            if (!ec && self) self->let_go();
        });
    }

    void let_go() {
        const auto now = Clock::now();
        for (auto& [id, response] : std::exchange(held, {}))
            ended(id, std::move(response), now, false);
    }

    // `turn`: nobody has called us, so that the caller's handler may run at once.
    void ended(RequestId id, Response&& response, Clock::time_point now, bool turn) {
        auto& item = items.at(id);
        if (response.outcome) {
            // Cancelled by us: for the reason that we had.
            if (item.late) {
                response.outcome = Errc::timed_out;
                response.detail = "not answered before its deadline";
            } else if (item.cancelled) {
                response.outcome = Errc::cancelled;
                response.detail = "cancelled";
            } else if (closed && *response.outcome != Errc::cancelled) {
                response.outcome = closed; // the server has ended: that is why it broke
                response.detail = closed_detail;
            }
        }
        response.attempts = core.attempts(id) + 1;
        pump_soon();
        // After close() nothing is made again.
        if (core.ended(id, response, item.delivered || closed, now)) {
            finish(id, std::move(response), now, turn);
        } else {
            response.attempts = core.attempts(id);
            item.last = std::make_unique<Response>(std::move(response));
        }
    }

    void finish(RequestId id, Response&& response, Clock::time_point now, bool turn = false) {
        const auto it = items.find(id);
        auto& item = it->second;
        if (item.sent == Clock::time_point{}) {
            response.timing.queued = now - item.submitted;
        } else {
            response.timing.queued += item.sent - item.submitted;
        }
        response.timing.total = now - item.submitted;
        response.elsewhere = false;
        const auto& usage = response.usage;
        if (usage.prompt_tokens && item.pick.prompt_bytes > 0) {
            // The share of the prompt's bytes, as tokens; the last token is always computed.
            const auto tokens =
                [&](std::optional<std::size_t> bytes) -> std::optional<std::int64_t> {
                if (!bytes) return {};
                const auto share = double(*bytes) / double(item.pick.prompt_bytes);
                const auto most = std::min(std::int64_t(share * double(*usage.prompt_tokens) + 0.5),
                                           std::max<std::int64_t>(*usage.prompt_tokens - 1, 0));
                return most - most % row.block_tokens;
            };
            response.expected_cached = tokens(item.pick.expected_bytes);
            response.maximum_cached = tokens(item.pick.maximum_bytes);
            // The share of the bytes is an estimate; what the server had is a fact.
            if (response.maximum_cached && usage.cached_tokens)
                response.maximum_cached = std::max(*response.maximum_cached, *usage.cached_tokens);
        }
        const auto code = response.outcome ? make_error_code(*response.outcome) : error_code();
        auto handler = std::move(item.handler);
        items.erase(it); // the handler may submit the next one
        if (turn)
            detail::complete_now(home, std::move(handler), code, std::move(response));
        else
            detail::complete(executor, std::move(handler), code, std::move(response));
    }

    void cancel(RequestId id, bool late) {
        const auto it = items.find(id);
        if (it == items.end()) return;
        auto& item = it->second;
        (late ? item.late : item.cancelled) = true;
        switch (core.cancel(id)) {
        case detail::SchedulerCore::Place::running:
            item.cancel.emit(asio::cancellation_type::terminal);
            break;
        case detail::SchedulerCore::Place::waiting:
            if (!late)
                give_up(id, Errc::cancelled, "cancelled");
            else if (item.sent == Clock::time_point{})
                give_up(id, Errc::timed_out, "not sent before its deadline");
            else
                give_up(id, Errc::timed_out, "not answered before its deadline");
            break;
        case detail::SchedulerCore::Place::unknown: break;
        }
    }

    // One that does not run ends here, with what is known of its last attempt.
    void give_up(RequestId id, Errc outcome, std::string why) {
        Response response;
        if (const auto& last = items.at(id).last) response = std::move(*last);
        response.outcome = outcome;
        if (!response.detail.empty()) why += "; its last attempt: " + response.detail;
        response.detail = std::move(why);
        finish(id, std::move(response), Clock::now());
        pump_soon();
    }

    std::vector<RequestId> all() const {
        std::vector<RequestId> ids;
        for (const auto& [id, item] : items) ids.push_back(id);
        std::sort(ids.begin(), ids.end());
        return ids;
    }

    void close(Errc outcome, std::string detail_text) {
        closed = outcome;
        closed_detail = std::move(detail_text);
        for (const auto id : all())
            if (core.cancel(id) == detail::SchedulerCore::Place::waiting)
                give_up(id, outcome, closed_detail);
    }

    Backend& inner;
    detail::Home home;
    asio::any_io_executor& executor;
    BackendRow row;
    SchedulerOptions options;
    detail::SchedulerCore core;
    detail::SharedPrefixes shared;
    asio::steady_timer timer, hold_timer;
    std::vector<std::pair<RequestId, Response>> held; // broken, until it is known why
    Clock::time_point armed = Clock::time_point::max();
    detail::Pool pool; // of the items
    std::unordered_map<RequestId, Item, std::hash<RequestId>, std::equal_to<RequestId>,
                       detail::PoolAllocator<std::pair<const RequestId, Item>>>
        items{pool};
    RequestId last_id = 0;
    bool pump_posted = false;
    std::optional<Errc> closed;
    std::string closed_detail;
    std::optional<Stopped> stopped;
    bool down = false; // the server has died and is not back
    Clock::time_point last_progress = Clock::now();
    const Clock::time_point made = Clock::now();
    std::function<void(std::string_view)> explain;
};

RequestScheduler::RequestScheduler(Backend& inner, PrefixPlanner& planner, BackendRow row,
                                   SchedulerOptions options)
    : impl_(std::make_shared<Impl>(inner, planner, std::move(row), options)) {}

RequestScheduler::~RequestScheduler() {
    impl_->timer.cancel();
    impl_->hold_timer.cancel();
}

asio::any_io_executor RequestScheduler::get_executor() noexcept { return impl_->executor; }

void RequestScheduler::close(Errc outcome, std::string detail) {
    impl_->close(outcome, std::move(detail));
}

void RequestScheduler::cancel() {
    for (const auto id : impl_->all()) impl_->cancel(id, false);
}

void RequestScheduler::server_lost() {
    impl_->down = true;
    impl_->core.server_lost();
    impl_->hold_timer.cancel();
    impl_->let_go();
}

void RequestScheduler::server_back() {
    impl_->down = false;
    impl_->core.server_back();
    impl_->pump_soon();
}

void RequestScheduler::stop(Errc cause, std::string why) { impl_->stop(cause, std::move(why)); }

const std::optional<RequestScheduler::Stopped>& RequestScheduler::stopped() const {
    return impl_->stopped;
}

Clock::time_point RequestScheduler::last_progress() const { return impl_->last_progress; }

SchedulerStats RequestScheduler::stats() const { return impl_->core.stats(Clock::now()); }

void RequestScheduler::explain(std::function<void(std::string_view)> sink) {
    impl_->explain = std::move(sink);
}

void RequestScheduler::start_complete(Request request, TextSink on_text, Handler handler) {
    impl_->submit(std::move(request), std::move(on_text), std::move(handler));
}

} // namespace evalrt
