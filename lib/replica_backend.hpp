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

#include <vector>

namespace evalrt::detail {

class ReplicaBackend final : public Backend {
public:
    struct Count {
        std::uint64_t answered = 0, failed = 0; ///< attempts
    };

    /// A server has gone out, with this failure.
    using Out = std::function<void(std::size_t server, Errc errc, const std::string& detail)>;

    ReplicaBackend(std::vector<Backend*> servers, std::shared_ptr<ReplicaPlanner> planner, Out out)
        : servers_(std::move(servers)), state_(std::make_shared<State>()) {
        state_->planner = std::move(planner);
        state_->out = std::move(out);
        state_->counts.resize(servers_.size());
    }

    asio::any_io_executor get_executor() noexcept override {
        return servers_.front()->get_executor();
    }
    const Count& count(std::size_t server) const { return state_->counts[server]; }

private:
    struct State {
        std::shared_ptr<ReplicaPlanner> planner;
        std::vector<Count> counts;
        Out out;

        void ended(std::size_t server, error_code& ec, Response& response) {
            auto& count = counts[server];
            ++(response.outcome ? count.failed : count.answered);
            if (!response.outcome) return planner->alive(server);
            const auto errc = *response.outcome;
            if (errc == Errc::cancelled) return;
            // A connection that breaks in the middle of an answer is a server that dies, too.
            if (errc == Errc::unreachable || (errc == Errc::truncated && planner->proven(server))) {
                if (planner->unreachable(server)) out(server, errc, response.detail);
                return;
            }
            const auto what = remedy(errc, response.status);
            if (planner->proven(server)) {
                if (errc == Errc::timed_out) return;
                if (what == Remedy::pause) return planner->reached(server);
            }
            using Fault = ReplicaPlanner::Fault;
            const auto fault = what == Remedy::run || response.status == 404 ? Fault::server
                               : what == Remedy::later                       ? Fault::passing
                                                                             : Fault::item;
            const auto verdict = planner->failed(server, fault);
            if (verdict.out) out(server, errc, response.detail);
            if (!verdict.elsewhere || what == Remedy::pause || response.stage == Stage::text)
                return;
            // As if it had not been sent: it costs the item no attempt.
            response.outcome = Errc::unreachable;
            response.stage = Stage::none;
            response.retry_after.reset();
            response.should_retry.reset();
            ec = make_error_code(Errc::unreachable);
        }
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
        auto slot = asio::get_associated_cancellation_slot(handler);
        auto executor = asio::get_associated_executor(handler, get_executor());
        auto done = [state = state_, server,
                     handler = std::move(handler)](error_code ec, Response response) mutable {
            state->ended(server, ec, response);
            std::move(handler)(ec, std::move(response));
        };
        servers_[server]->async_complete(
            std::move(request), std::move(on_text),
            asio::bind_executor(executor, asio::bind_cancellation_slot(slot, std::move(done))));
    }

    std::vector<Backend*> servers_;
    std::shared_ptr<State> state_; // shared with what is under way
};

} // namespace evalrt::detail

#endif
