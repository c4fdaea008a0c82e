// The I/O of recognising a server, and what the program and the runtime call for it.
#include "evalrt/runtime.hpp"

#include "evalrt/detail/complete.hpp"
#include "recognise.hpp"

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/use_awaitable.hpp>

#include <stdexcept>

namespace evalrt {
namespace detail {
namespace {

asio::awaitable<Recognition> ask(asio::any_io_executor executor, HttpOptions options,
                                 asio::cancellation_signal& cancel, Failure& failed) {
    Recogniser recogniser(parse_url(options.url), options.model);
    if (!recogniser.next()) co_return recogniser.result();
    options.limits = {};
    options.limits.connect = options.limits.whole = std::chrono::seconds(3);
    options.body_limit = 1 << 20;
    BackendRow row;
    row.name = "server";
    row.keep_alive = false; // it may be one that does not
    HttpBackend asker(executor, row, options);
    for (bool first = true; const auto path = recogniser.next(); first = false) {
        Request request;
        request.endpoint = *path;
        auto [ec, response] = co_await asker.async_complete(
            std::move(request), {},
            asio::bind_cancellation_slot(cancel.slot(), asio::as_tuple(asio::use_awaitable)));
        if (ec == asio::error::operation_aborted || (first && ec == Errc::unreachable)) {
            failed = {ec, response.detail};
            break;
        }
        Seen seen{*path, response.status, std::move(response.body), std::move(response.server)};
        seen.late = ec == Errc::timed_out;
        recogniser.answered(seen);
    }
    co_return recogniser.result();
}

} // namespace

asio::awaitable<Recognition> recognise(asio::any_io_executor executor, HttpOptions options,
                                       asio::cancellation_signal& cancel, Failure& failed) {
    auto found = co_await ask(executor, options, cancel, failed);
    if (failed || found.worker.empty()) co_return found;
    options.url = found.worker;
    options.api_key.clear(); // which is the router's
    Failure away;
    const auto worker = co_await ask(executor, options, cancel, away);
    if (away.code == asio::error::operation_aborted) failed = away;
    co_return with_worker(std::move(found), worker);
}

} // namespace detail

namespace {

struct Recognising : std::enable_shared_from_this<Recognising> {
    asio::cancellation_signal cancel;
    Failure failed;

    asio::awaitable<ServerKind> run(asio::any_io_executor executor, BackendRow row,
                                    HttpOptions options) {
        const auto found = co_await detail::recognise(executor, std::move(options), cancel, failed);
        ServerKind kind;
        kind.row = detail::with_profile(row, found);
        kind.profile = found.profile;
        kind.reason = failed ? failed.detail : found.reason;
        kind.version = found.version;
        kind.in_flight_reason = found.in_flight_reason;
        co_return kind;
    }
};

} // namespace

void detail::start_recognising(asio::any_io_executor executor, BackendRow row, HttpOptions options,
                               asio::any_completion_handler<void(error_code, ServerKind)> handler) {
    auto self = std::make_shared<Recognising>();
    detail::on_cancel(handler, [weak = std::weak_ptr(self)] {
        if (auto it = weak.lock()) it->cancel.emit(asio::cancellation_type::terminal);
    });
    asio::co_spawn(executor, self->run(executor, std::move(row), std::move(options)),
                   [executor, self, handler = std::move(handler)](std::exception_ptr error,
                                                                  ServerKind kind) mutable {
                       try {
                           if (error) std::rethrow_exception(error);
                       } catch (const std::invalid_argument& invalid) {
                           self->failed.code = asio::error::invalid_argument;
                           kind.reason = invalid.what();
                       } catch (...) {
                           self->failed.code = asio::error::no_memory;
                           kind.reason = "out of memory";
                       }
                       detail::complete(executor, std::move(handler), self->failed.code,
                                        std::move(kind));
                   });
}

} // namespace evalrt
