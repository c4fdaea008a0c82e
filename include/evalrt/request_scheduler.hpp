// RequestScheduler: a Backend in front of a Backend, with a bounded and ordered queue.
#ifndef EVALRT_REQUEST_SCHEDULER_HPP
#define EVALRT_REQUEST_SCHEDULER_HPP

#include "evalrt/backend.hpp"
#include "evalrt/backend_row.hpp"
#include "evalrt/detail/scheduler_core.hpp"

#include <memory>

namespace evalrt {

/// What a row says about scheduling; `servers`: that are alike, behind one queue.
SchedulerOptions scheduler_options(const BackendRow& row, unsigned servers = 1);
RadixPlanner::Options planner_options(const BackendRow& row);

/// Keeps at most max_in_flight requests on the way to each server, in the order that the planner
/// names them, and makes failed attempts again by the retry table. A suite submits all its requests
/// at once: that is cheap, and the planner then orders all of them.
///
/// Text       a failed attempt whose text has reached on_text is not made again: the caller, who
///            set request.stream, could not take it back.
/// Deadline   Request::deadline runs from here; then the request ends with timed_out.
/// Cancel     any type, waiting or running.
/// Lifetime   inner and planner must outlive this; this must outlive its operations.
class RequestScheduler final : public Backend {
public:
    RequestScheduler(Backend& inner, PrefixPlanner& planner, BackendRow row,
                     SchedulerOptions options);
    ~RequestScheduler() override;

    asio::any_io_executor get_executor() noexcept override;

    /// Ends all that waits, and all that will be submitted, with this outcome; what runs ends by
    /// itself. For a server that has ended, or an interrupted run.
    void close(Errc outcome, std::string detail);

    /// Gives up a run: what was not asked, and will be, ends as cancelled, and what runs is
    /// cancelled.
    void stop(Errc cause, std::string why);

    /// Cancels all operations, as each one's own cancellation would.
    void cancel();

    /// The server has died, or is about to be killed: what runs on it is asked again once it is
    /// back, what waits goes on waiting. A request under which it dies twice fails as poison.
    void server_lost();
    void server_back();

    struct Stopped {
        Errc cause; ///< what the items failed with; unreachable, exited: the server is gone
        std::string why;
    };

    /// Set once the run was stopped: by stop(), or by the rules of SchedulerOptions::stop, with
    /// which it also stops when the server stays away, or turns everything away.
    const std::optional<Stopped>& stopped() const;

    /// When something of an answer arrived last, or a request ended otherwise than by a time
    /// limit.
    Clock::time_point last_progress() const;

    SchedulerStats stats() const;

    /// Called with one line of JSON for each request that is sent: why this one, why now.
    void explain(std::function<void(std::string_view)> sink);

private:
    struct Impl;
    void start_complete(Request request, TextSink on_text, Handler handler) override;
    std::shared_ptr<Impl> impl_; // shared with running requests and the timer
};

} // namespace evalrt

#endif
