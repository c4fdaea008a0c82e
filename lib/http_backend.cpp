// The only file that includes Beast.
#include "evalrt/http_backend.hpp"

#include "evalrt/detail/complete.hpp"
#include "wire.hpp"

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/connect.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ssl.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/buffer_body.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <set>
#include <stdexcept>

#include <sys/socket.h>

namespace evalrt {
namespace {

namespace http = boost::beast::http;
using Tcp = asio::ip::tcp;
using Millis = Timing::Millis;

constexpr auto token = asio::as_tuple(asio::use_awaitable);

struct Connection {
    explicit Connection(const asio::any_io_executor& executor) : socket(executor) {
        buffer.reserve(64 << 10); // else Beast reads 512 bytes at a time
    }
    Tcp::socket socket;
    std::optional<asio::ssl::stream<Tcp::socket&>> tls;
    boost::beast::flat_buffer buffer;
    Clock::time_point idle_since;

    // Nothing to read is what a kept connection must show; an end or stray bytes mean it is stale.
    bool quiet() {
        char byte;
        const auto n = ::recv(socket.native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
        return n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
    }
};

bool visible(std::string_view text) {
    return std::all_of(text.begin(), text.end(), [](char c) { return c > ' ' && c < 0x7f; });
}

// Retry-After in seconds, as a decimal; retry-after-ms beats it.
std::optional<std::chrono::milliseconds> retry_after(const http::fields& fields) {
    const auto number = [&](std::string_view name,
                            double unit) -> std::optional<std::chrono::milliseconds> {
        const auto field = fields[{name.data(), name.size()}];
        double value = 0;
        const auto [end, ec] = std::from_chars(field.data(), field.data() + field.size(), value);
        if (ec != std::errc() || end != field.data() + field.size()) return {};
        if (!(value >= 0) || value * unit > 1e9) return {};
        return std::chrono::milliseconds(std::int64_t(value * unit));
    };
    if (const auto ms = number("retry-after-ms", 1)) return ms;
    return number("retry-after", 1000);
}

} // namespace

struct HttpBackend::Impl {
    Impl(asio::any_io_executor executor_, BackendRow row_, HttpOptions options_, LogSink log_)
        : executor(std::move(executor_)),
          row(std::move(row_)),
          options(std::move(options_)),
          log(std::move(log_)),
          url(parse_url(options.url)),
          pacer(row.backlog, row.accept_interval) {
        while (!options.api_key.empty() &&
               std::isspace(static_cast<unsigned char>(options.api_key.back())))
            options.api_key.pop_back(); // the end of the line of a key file
        if (!visible(options.api_key))
            throw std::invalid_argument("the API key has a space or a control character in it");
        if (!url.tls) return;
        tls.emplace(asio::ssl::context::tls_client);
        tls->set_verify_mode(asio::ssl::verify_peer);
        error_code ec;
        if (options.ca_file.empty())
            tls->set_default_verify_paths(ec);
        else
            tls->load_verify_file(options.ca_file, ec);
        if (ec)
            throw std::invalid_argument(fmt::format("cannot use the certificates of '{}': {}",
                                                    options.ca_file, ec.message()));
    }

    std::string head(const Request& request, std::size_t body_size) const {
        std::string_view endpoint = request.endpoint;
        if (!url.base.empty() && endpoint.starts_with("/v1/")) endpoint.remove_prefix(3);
        const bool v6 = url.host.find(':') != url.host.npos;
        std::string out =
            fmt::format("{} {}{} HTTP/1.1\r\n"
                        "Host: {}{}{}:{}\r\n"
                        "User-Agent: evalrt\r\n"
                        "Accept: application/json, text/event-stream\r\n"
                        "Connection: {}\r\n",
                        body_size > 0 ? "POST" : "GET", url.base, endpoint, v6 ? "[" : "", url.host,
                        v6 ? "]" : "", url.port, row.keep_alive ? "keep-alive" : "close");
        if (body_size > 0)
            out +=
                fmt::format("Content-Type: application/json\r\nContent-Length: {}\r\n", body_size);
        if (!options.api_key.empty()) out += "Authorization: Bearer " + options.api_key + "\r\n";
        return out += "\r\n";
    }

    void say(const std::string& note) {
        if (log && said.size() < 100 && said.insert(note).second) log(note);
    }

    asio::any_io_executor executor;
    BackendRow row;
    HttpOptions options;
    LogSink log;
    Url url;
    detail::ConnectPacer pacer;
    std::optional<asio::ssl::context> tls;
    std::vector<std::unique_ptr<Connection>> idle;
    std::set<std::string> said;
    std::size_t open = 0; // connections of running exchanges
    bool closed = false;
};

namespace {

// One exchange from the first byte to the last. The watchdog and a cancellation end it by closing
// the socket: every operation of the coroutine then returns.
template <class Impl>
class Exchange : public std::enable_shared_from_this<Exchange<Impl>> {
public:
    Exchange(std::shared_ptr<Impl> impl, Request request, TextSink on_text,
             Backend::Handler handler)
        : impl_(std::move(impl)),
          request_(std::move(request)),
          on_text_(std::move(on_text)),
          handler_(std::move(handler)),
          clock_({}, started_),
          watchdog_(impl_->executor),
          pause_(impl_->executor),
          resolver_(impl_->executor) {}

    void start() {
        auto self = this->shared_from_this();
        detail::on_cancel(handler_, [weak = this->weak_from_this()] {
            if (auto it = weak.lock()) {
                it->cancelled_ = true;
                it->abort();
            }
        });
        asio::co_spawn(impl_->executor, run(), [self](std::exception_ptr error) {
            if (error)
                self->fail(Errc::malformed, "the answer could not be taken in: out of memory, or "
                                            "the receiver of its text threw");
            self->end();
            self->drop_connection();
        });
    }

private:
    void abort() {
        pause_.cancel();
        resolver_.cancel();
        if (connection_) {
            error_code ignored;
            connection_->socket.close(ignored);
        }
    }

    bool stopped() const { return cancelled_ || late_; }

    // Ends the exchange when a limit passes; the limit may have moved when the timer fires.
    void watch() {
        const auto limit = clock_.next();
        if (limit.at == Clock::time_point::max()) return;
        watchdog_.expires_at(limit.at);
        watchdog_.async_wait([weak = this->weak_from_this()](error_code ec) {
            auto self = weak.lock();
            if (ec || !self || self->ended_) return;
            const auto next = self->clock_.next();
            if (next.at > Clock::now()) return self->watch();
            self->late_ = next;
            self->abort();
        });
    }

    void fail(Errc errc, std::string detail, error_code cause = {}) {
        response_.outcome = errc;
        response_.detail = std::move(detail);
        response_.cause = cause;
    }

    void end() {
        if (std::exchange(ended_, true)) return;
        watchdog_.cancel();
        const auto now = Clock::now();
        if (cancelled_) {
            fail(Errc::cancelled, "cancelled");
        } else if (late_) {
            fail(Errc::timed_out,
                 fmt::format("no {} within {} s", late_->what, double(late_->span.count()) / 1000));
        }
        response_.attempts = 1;
        response_.timing.total = now - started_;
        response_.timing.queued = sent_ - started_;
        const auto code = response_.outcome ? make_error_code(*response_.outcome) : error_code();
        detail::complete(impl_->executor, std::move(handler_), code, std::move(response_));
    }

    void drop_connection() {
        if (connection_) --impl_->open;
        connection_.reset();
    }

    asio::awaitable<void> run() {
        detail::Prepared prepared;
        if (!request_.body.empty())
            prepared = detail::prepare_openai(request_, impl_->row, impl_->options.model,
                                              impl_->options.override_model);
        for (const auto& note : prepared.notes) impl_->say(note);
        if (!prepared.error.empty()) {
            fail(Errc::rejected, prepared.error);
            co_return;
        }
        if (!request_.endpoint.starts_with("/") || !visible(request_.endpoint)) {
            fail(Errc::rejected, "the endpoint is no path");
            co_return;
        }
        const auto head = impl_->head(request_, prepared.body.view().size());
        for (bool again = true; std::exchange(again, false);) {
            const bool kept = take_idle();
            if (!kept && !co_await connect()) co_return;
            sent_ = Clock::now();
            clock_.sent(sent_);
            watch();
            response_ = {};
            response_.stage = Stage::sent;
            const std::array<asio::const_buffer, 2> out{
                asio::buffer(head),
                asio::buffer(prepared.body.view().data(), prepared.body.view().size())};
            if (connection_->tls)
                co_await talk(*connection_->tls, out);
            else
                co_await talk(connection_->socket, out);
            // The server closed a kept connection at the moment of our writing.
            if (kept && response_.outcome == Errc::unreachable && !stopped()) {
                drop_connection();
                again = true;
            }
        }
    }

    bool take_idle() {
        auto& idle = impl_->idle;
        while (!idle.empty()) {
            connection_ = std::move(idle.back());
            idle.pop_back();
            ++impl_->open;
            if (Clock::now() - connection_->idle_since < impl_->options.idle_time &&
                connection_->quiet()) {
                clock_ = {impl_->options.limits, Clock::now()};
                return true;
            }
            drop_connection();
        }
        return false;
    }

    asio::awaitable<bool> connect() {
        if (impl_->row.accept_interval.count() > 0) {
            const auto at = impl_->pacer.reserve(Clock::now());
            if (at > Clock::now()) {
                pause_.expires_at(at);
                co_await pause_.async_wait(token);
            }
        }
        if (stopped()) co_return false;
        clock_ = {impl_->options.limits, Clock::now()};
        watch();
        const auto& url = impl_->url;
        auto [resolve_error, endpoints] =
            co_await resolver_.async_resolve(url.host, url.port, token);
        if (stopped()) co_return false;
        if (resolve_error) {
            fail(Errc::unreachable,
                 fmt::format("cannot find the host {}: {}", url.host, resolve_error.message()),
                 resolve_error);
            co_return false;
        }
        connection_ = std::make_unique<Connection>(impl_->executor);
        ++impl_->open;
        auto [error, endpoint] =
            co_await asio::async_connect(connection_->socket, endpoints, token);
        if (stopped()) co_return false;
        if (error) {
            fail(Errc::unreachable,
                 fmt::format("cannot connect to {}:{}: {}; is the server running?", url.host,
                             url.port, error.message()),
                 error);
            co_return false;
        }
        error_code ignored;
        connection_->socket.set_option(Tcp::no_delay(true), ignored);
        if (!impl_->tls) co_return true;
        auto& tls = connection_->tls.emplace(connection_->socket, *impl_->tls);
        SSL_set_tlsext_host_name(tls.native_handle(), url.host.c_str());
        tls.set_verify_callback(asio::ssl::host_name_verification(url.host));
        auto [handshake_error] =
            co_await tls.async_handshake(asio::ssl::stream_base::client, token);
        if (stopped()) co_return false;
        if (handshake_error) {
            fail(Errc::unreachable,
                 fmt::format("no trusted connection to {}:{}: {}; a private certificate is given "
                             "with --ca-file",
                             url.host, url.port, handshake_error.message()),
                 handshake_error);
            co_return false;
        }
        co_return true;
    }

    // The connection broke; what that means depends on how far the answer came.
    void broken(error_code ec, std::string_view where) {
        if (response_.stage == Stage::sent) {
            const bool end = ec == http::error::end_of_stream || ec == asio::error::eof;
            fail(Errc::unreachable,
                 end ? "the server closed the connection without an answer"
                     : fmt::format("the connection broke before an answer: {}", ec.message()),
                 end ? error_code(asio::error::eof) : ec);
        } else if (ec == http::error::header_limit) {
            fail(Errc::malformed, "the answer's headers are over the limit", ec);
        } else if (ec.category() == http::make_error_code(http::error::bad_value).category() &&
                   ec != http::error::partial_message && ec != http::error::end_of_stream) {
            fail(Errc::malformed,
                 fmt::format("the answer is not HTTP/1.1 ({} in the {})", ec.message(), where), ec);
        } else {
            fail(Errc::truncated,
                 fmt::format("the connection ended in the {}: {}", where, ec.message()), ec);
        }
    }

    template <class Stream>
    asio::awaitable<void> talk(Stream& stream, std::array<asio::const_buffer, 2> out) {
        auto [write_error, written] = co_await asio::async_write(stream, out, token);
        if (stopped()) co_return;

        // A server may answer and close before it has read everything: look for the answer first.
        auto& buffer = connection_->buffer;
        std::optional<http::response_parser<http::buffer_body>> parser;
        for (int informational = 0;; ++informational) {
            parser.emplace();
            parser->header_limit(std::uint32_t(impl_->options.header_limit));
            parser->body_limit(boost::none);
            auto [ec, n] = co_await http::async_read_header(stream, buffer, *parser, token);
            if (stopped()) co_return;
            if (ec) {
                if (n > 0 || buffer.size() > 0) response_.stage = Stage::answered;
                broken(write_error ? write_error : ec, "headers");
                co_return;
            }
            if (parser->get().result_int() / 100 != 1 || informational == 8) break;
        }
        const auto& head = parser->get();
        response_.stage = Stage::answered;
        response_.status = int(head.result_int());
        response_.retry_after = retry_after(head);
        clock_.bytes(Clock::now());
        watch();
        // Beast takes any other coding for "until the end of the stream".
        if (const auto coding = head[http::field::transfer_encoding];
            !coding.empty() && !boost::beast::iequals(coding, "chunked")) {
            fail(Errc::malformed, "the answer has a transfer coding that HTTP/1.1 does not know");
            co_return;
        }
        const bool good = response_.status / 100 == 2;
        const auto type = head[http::field::content_type];
        if (good && boost::beast::iequals(type.substr(0, 17), "text/event-stream"))
            co_await read_stream(stream, *parser);
        else
            co_await read_whole(stream, *parser, good);
        if (response_.outcome == Errc::unreachable || stopped()) co_return;
        co_await recycle(stream, *parser);
    }

    // Calls take(bytes) for the body until take says false or it ends.
    template <class Stream, class Take>
    asio::awaitable<error_code>
    read_body(Stream& stream, http::response_parser<http::buffer_body>& parser, Take take) {
        while (!parser.is_done()) {
            auto& body = parser.get().body();
            body.data = bytes_.data();
            body.size = bytes_.size();
            auto [ec, n] =
                co_await http::async_read_some(stream, connection_->buffer, parser, token);
            if (stopped()) co_return asio::error::operation_aborted;
            if (const auto got = bytes_.size() - body.size; got > 0) {
                clock_.bytes(Clock::now());
                if (!take(std::string_view(bytes_.data(), got))) break;
            }
            if (ec == http::error::need_buffer) continue;
            // Many servers end a close-delimited body without the TLS goodbye.
            if (ec == asio::ssl::error::stream_truncated && parser.need_eof()) break;
            if (ec) co_return ec;
        }
        co_return error_code();
    }

    template <class Stream>
    asio::awaitable<void> read_stream(Stream& stream,
                                      http::response_parser<http::buffer_body>& parser) {
        auto reader = make_reader();
        detail::SseParser events(impl_->options.event_limit);
        bool last = false, too_large = false;
        std::size_t total = 0;
        const auto on_event = [&](const detail::SseEvent& event) {
            if (last) return;
            const auto piece = reader->event(event);
            last = piece.last;
            if (!piece.content) return;
            const auto now = Clock::now();
            clock_.content(now);
            const bool first = response_.stage != Stage::text;
            if (first) {
                response_.stage = Stage::text;
                response_.timing.first_text = now - sent_;
            }
            response_.timing.last_text = now - sent_;
            if (on_text_ && (first || !piece.text.empty())) on_text_(piece.text);
        };
        const auto ec = co_await read_body(stream, parser, [&](std::string_view bytes) {
            total += bytes.size();
            too_large = !events.feed(bytes, on_event) || total > 4 * impl_->options.body_limit;
            return !last && !too_large;
        });
        if (stopped()) co_return;
        if (too_large) {
            fail(Errc::malformed,
                 fmt::format("an event of the stream is over the limit of {} bytes",
                             impl_->options.event_limit));
            co_return;
        }
        if (ec && !last) {
            reader->finish(response_); // for the usage
            broken(ec, "stream");
            co_return;
        }
        if (!last) events.finish(on_event);
        reader->finish(response_);
    }

    template <class Stream>
    asio::awaitable<void> read_whole(Stream& stream,
                                     http::response_parser<http::buffer_body>& parser, bool good) {
        std::string body;
        const auto limit = impl_->options.body_limit;
        const auto ec = co_await read_body(stream, parser, [&](std::string_view bytes) {
            body.append(bytes);
            return body.size() <= limit;
        });
        if (stopped()) co_return;
        if (body.size() > limit) {
            fail(Errc::malformed, fmt::format("the answer is over the limit of {} bytes", limit));
        } else if (!good) {
            detail::read_rejection(response_.status, std::move(body), response_);
            if (response_.status / 100 == 3)
                response_.detail += fmt::format(" (it redirects to {}: give that URL)",
                                                std::string(parser.get()[http::field::location]));
        } else if (ec) {
            broken(ec, fmt::format("body after {} bytes", body.size()));
        } else if (request_.body.empty()) {
            response_.body = std::move(body);
        } else {
            make_reader()->whole(std::move(body), response_);
        }
    }

    std::unique_ptr<detail::AnswerReader> make_reader() const {
        return detail::make_openai_reader(request_.endpoint.ends_with("/chat/completions"));
    }

    // Keeps the connection if its last message has ended, or ends within a moment: the caller does
    // not wait for that.
    template <class Stream>
    asio::awaitable<void> recycle(Stream& stream,
                                  http::response_parser<http::buffer_body>& parser) {
        if (!impl_->row.keep_alive || !parser.get().keep_alive()) co_return;
        if (response_.outcome == Errc::malformed) co_return;
        end();
        if (!parser.is_done()) {
            watchdog_.expires_after(std::chrono::milliseconds(100));
            watchdog_.async_wait([weak = this->weak_from_this()](error_code ec) {
                if (auto self = weak.lock(); self && !ec) {
                    self->late_.emplace();
                    self->abort();
                }
            });
            std::size_t drained = 0;
            const auto ec = co_await read_body(stream, parser, [&](std::string_view bytes) {
                return (drained += bytes.size()) < 64 << 10;
            });
            watchdog_.cancel();
            if (ec || !parser.is_done()) co_return;
        }
        if (impl_->closed || connection_->buffer.size() > 0 ||
            impl_->idle.size() >= impl_->options.idle_connections)
            co_return;
        connection_->idle_since = Clock::now();
        impl_->idle.push_back(std::move(connection_));
        --impl_->open;
    }

    std::shared_ptr<Impl> impl_;
    Request request_;
    TextSink on_text_;
    Backend::Handler handler_;
    Response response_;
    const Clock::time_point started_ = Clock::now();
    Clock::time_point sent_ = started_;
    detail::ExchangeClock clock_;
    asio::steady_timer watchdog_, pause_;
    Tcp::resolver resolver_;
    std::unique_ptr<Connection> connection_;
    std::array<char, 64 << 10> bytes_;
    std::optional<detail::ExchangeClock::Limit> late_;
    bool cancelled_ = false;
    bool ended_ = false;
};

} // namespace

HttpBackend::HttpBackend(asio::any_io_executor executor, BackendRow row, HttpOptions options,
                         LogSink log)
    : impl_(std::make_shared<Impl>(std::move(executor), std::move(row), std::move(options),
                                   std::move(log))) {}

HttpBackend::~HttpBackend() {
    impl_->closed = true;
    impl_->idle.clear();
}

asio::any_io_executor HttpBackend::get_executor() noexcept { return impl_->executor; }

std::size_t HttpBackend::connections() const { return impl_->open + impl_->idle.size(); }

void HttpBackend::start_complete(Request request, TextSink on_text, Handler handler) {
    std::make_shared<Exchange<Impl>>(impl_, std::move(request), std::move(on_text),
                                     std::move(handler))
        ->start();
}

} // namespace evalrt
