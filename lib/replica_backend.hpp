// Sends each attempt to the server that the planner has chosen for it.
#ifndef EVALRT_LIB_REPLICA_BACKEND_HPP
#define EVALRT_LIB_REPLICA_BACKEND_HPP

#include "evalrt/backend.hpp"
#include "evalrt/detail/replicas.hpp"

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

    ReplicaBackend(std::vector<Backend*> servers, std::shared_ptr<ReplicaPlanner> planner)
        : servers_(std::move(servers)), state_(std::make_shared<State>()) {
        state_->planner = std::move(planner);
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
    };
    void start_complete(Request request, TextSink on_text, Handler handler) override {
        const auto server = std::min<std::size_t>(request.server, servers_.size() - 1);
        auto slot = asio::get_associated_cancellation_slot(handler);
        auto executor = asio::get_associated_executor(handler, get_executor());
        auto done = [state = state_, server,
                     handler = std::move(handler)](error_code ec, Response response) mutable {
            auto& count = state->counts[server];
            ++(response.outcome ? count.failed : count.answered);
            // A connection that breaks in the middle of an answer is a server that dies, too.
            if (response.outcome == Errc::unreachable || response.outcome == Errc::truncated)
                state->planner->unreachable(server);
            else if (response.outcome != Errc::cancelled && response.outcome != Errc::timed_out)
                state->planner->alive(server);
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
