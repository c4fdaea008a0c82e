// Sends each attempt to the server that the planner has chosen, and tells it what came of that.
#ifndef EVALRT_LIB_REPLICA_BACKEND_HPP
#define EVALRT_LIB_REPLICA_BACKEND_HPP

#include "evalrt/backend.hpp"
#include "evalrt/detail/complete.hpp"
#include "evalrt/detail/replicas.hpp"
#include "evalrt/detail/retry.hpp"

#include <boost/asio/associated_cancellation_slot.hpp>
#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/bind_executor.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/steady_timer.hpp>

#include <set>
#include <vector>

namespace evalrt::detail {

class ReplicaBackend final : public Backend {
public:
    struct Count { ///< attempts
        std::uint64_t answered = 0, failed = 0, cancelled = 0;
    };

    /// What has become of a server, with this failure.
    using News = std::function<void(std::size_t server, Errc errc, const std::string& detail)>;

    /// `out`: it has gone out; `held`: it is held until others have said what they make of what it
    /// refuses. `tick`: how often servers are looked for that show no sign of life.
    ReplicaBackend(std::vector<Backend*> servers, std::shared_ptr<ReplicaPlanner> planner, News out,
                   News held, std::chrono::milliseconds tick = std::chrono::seconds(1))
        : servers_(std::move(servers)),
          state_(std::make_shared<State>(servers_.front()->get_executor())) {
        state_->planner = std::move(planner);
        state_->out = std::move(out);
        state_->held = std::move(held);
        state_->counts.resize(servers_.size());
        state_->tick = tick;
    }

    asio::any_io_executor get_executor() noexcept override {
        return servers_.front()->get_executor();
    }
    const Count& count(std::size_t server) const { return state_->counts[server]; }

private:
    struct Attempt {
        std::size_t server = 0;
        RequestId id = 0;
        bool stream = false;    // its caller wants the text
        bool delivered = false; // and has got some
        bool moved = false;     // it is cancelled, as its server is silent
        std::shared_ptr<TextFlow> flow;
        asio::cancellation_signal cancel;
    };

    struct State : std::enable_shared_from_this<State> {
        explicit State(const asio::any_io_executor& executor) : timer(executor) {}

        void begun(const std::shared_ptr<Attempt>& attempt) {
            attempts.insert(attempt);
            watch();
        }

        // Nobody is kept waiting for a timer when nothing is under way.
        void over(const std::shared_ptr<Attempt>& attempt) {
            attempts.erase(attempt);
            if (attempts.empty()) timer.cancel();
        }

        void watch() {
            if (attempts.empty() || std::exchange(watching, true)) return;
            timer.expires_after(tick);
            timer.async_wait([weak = this->weak_from_this()](error_code ec) {
                const auto self = weak.lock();
                if (!self) return;
                self->watching = false;
                if (!ec) self->look(Clock::now());
                self->watch();
            });
        }

        void look(Clock::time_point now) {
            for (const auto& it : attempts) // it is we who do not read
                if (it->flow && it->flow->held()) planner->heard(it->server, true, now);
            for (const auto server : planner->silent(now)) {
                if (planner->up(server)) {
                    planner->leave_out(server);
                    out(server, Errc::timed_out, silence);
                }
                std::vector<std::shared_ptr<Attempt>> there;
                for (const auto& it : attempts)
                    if (it->server == server && !it->delivered) there.push_back(it);
                for (const auto& it : there)
                    if (planner->move(it->id)) {
                        it->moved = true;
                        it->cancel.emit(asio::cancellation_type::terminal);
                    }
            }
        }

        void text(Attempt& attempt, std::string_view piece) {
            attempt.delivered |= attempt.stream && !piece.empty();
            planner->heard(attempt.server, true, Clock::now());
        }

        void ended(const Attempt& attempt, error_code& ec, Response& response) {
            const auto server = attempt.server;
            auto& count = counts[server];
            if (!response.outcome) {
                ++count.answered;
                return planner->alive(server);
            }
            if (attempt.moved && response.outcome == Errc::cancelled) {
                ++count.failed;
                response.outcome = Errc::timed_out;
                response.detail = silence;
                response.elsewhere = true;
                ec = make_error_code(Errc::timed_out);
                return;
            }
            const auto errc = *response.outcome;
            ++(errc == Errc::cancelled ? count.cancelled : count.failed);
            if (errc == Errc::cancelled) return;
            const auto now = Clock::now();
            if (response.stage > Stage::sent) planner->heard(server, false, now);
            // A connection that breaks in the middle of an answer is a server that dies, too. What
            // it breaks on may be the item.
            if (errc == Errc::unreachable || (errc == Errc::truncated && planner->proven(server))) {
                if (planner->unreachable(server)) out(server, errc, response.detail);
                if (response.stage > Stage::none)
                    response.elsewhere = planner->failed(server, attempt.id) && !attempt.delivered;
                return;
            }
            const auto what = remedy(errc, response.status);
            if (what == Remedy::item && response.stage == Stage::none) return; // refused by us
            if (errc == Errc::timed_out && planner->proven(server)) {
                response.elsewhere = planner->failed(server, attempt.id) && !attempt.delivered;
                return;
            }
            using Fault = ReplicaPlanner::Fault;
            const bool lasting = what == Remedy::run || response.status == 404;
            const bool refused = what == Remedy::item && !lasting;
            const auto verdict =
                what == Remedy::pause
                    ? planner->busy(server, attempt.id, now,
                                    response.retry_after.value_or(std::chrono::milliseconds(0)))
                : refused ? planner->refused(server, attempt.id)
                          : planner->failed(server, lasting ? Fault::lasting : Fault::passing,
                                            attempt.id);
            if (verdict.out) {
                std::string words = refused ? "it refuses one request after the other: " : "";
                words += response.detail;
                out(server, errc, words);
            }
            if (verdict.held) held(server, errc, response.detail);
            response.elsewhere = verdict.elsewhere && !attempt.delivered;
        }

        static constexpr const char* silence = "it shows no sign of life";

        std::shared_ptr<ReplicaPlanner> planner;
        std::vector<Count> counts;
        News out, held;
        std::set<std::shared_ptr<Attempt>> attempts; // under way
        asio::steady_timer timer;
        std::chrono::milliseconds tick{};
        bool watching = false;
    };

    void start_complete(Request request, TextSink on_text, Handler handler) override {
        const auto server = std::min<std::size_t>(request.server, servers_.size() - 1);
        if (!state_->planner->up(server)) { // all are out: none is asked until it was looked at
            Response response;
            response.outcome = Errc::unreachable;
            response.detail = "no server takes requests";
            return detail::complete(get_executor(), std::move(handler),
                                    make_error_code(Errc::unreachable), std::move(response));
        }
        const auto attempt = std::make_shared<Attempt>();
        attempt->server = server;
        attempt->id = request.id;
        attempt->stream = request.stream;
        attempt->flow = request.flow;
        state_->begun(attempt);
        detail::on_cancel(handler, [weak = std::weak_ptr(attempt)] {
            if (const auto it = weak.lock()) it->cancel.emit(asio::cancellation_type::terminal);
        });
        auto executor = asio::get_associated_executor(handler, get_executor());
        auto text = [state = state_, attempt,
                     on_text = std::move(on_text)](std::string_view piece) {
            state->text(*attempt, piece);
            if (on_text) on_text(piece);
        };
        auto done = [state = state_, attempt,
                     handler = std::move(handler)](error_code ec, Response response) mutable {
            state->over(attempt);
            state->ended(*attempt, ec, response);
            std::move(handler)(ec, std::move(response));
        };
        servers_[server]->async_complete(
            std::move(request), std::move(text),
            asio::bind_executor(
                executor, asio::bind_cancellation_slot(attempt->cancel.slot(), std::move(done))));
    }

    std::vector<Backend*> servers_;
    std::shared_ptr<State> state_; // shared with what is under way
};

} // namespace evalrt::detail

#endif
