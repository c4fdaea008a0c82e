// RequestScheduler: a Backend in front of a Backend, with a bounded and ordered queue.
#ifndef EVALRT_REQUEST_SCHEDULER_HPP
#define EVALRT_REQUEST_SCHEDULER_HPP

#include "evalrt/backend.hpp"
#include "evalrt/backend_row.hpp"
#include "evalrt/detail/scheduler_core.hpp"

#include <memory>

namespace evalrt {

/// What a row says about scheduling.
SchedulerOptions scheduler_options(const BackendRow& row);
RadixPlanner::Options planner_options(const BackendRow& row);

/// Keeps at most max_in_flight requests on the way, in the order that the planner names them, and
/// makes failed attempts again by the retry table. A suite submits all its requests at once:
/// that is cheap, and the planner then orders all of them.
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

    /// Cancels all operations, as each one's own cancellation would.
    void cancel();

    SchedulerStats stats() const;

private:
    struct Impl;
    void start_complete(Request request, TextSink on_text, Handler handler) override;
    std::shared_ptr<Impl> impl_; // shared with running requests and the timer
};

} // namespace evalrt

#endif
