// Beast is included here, and nowhere else.
#include "evalrt/http_backend.hpp"

#include "answer_watch.hpp"
#include "choices.hpp"
#include "evalrt/detail/complete.hpp"
#include "evalrt/detail/retry_after.hpp"
#include "job.hpp"
#include "wire.hpp"

#include <boost/asio/connect.hpp>
#include <boost/asio/dispatch.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ssl.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/read_size.hpp>
#include <boost/beast/http/parser.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <list>
#include <set>
#include <stdexcept>
#include <type_traits>

#include <sys/socket.h>

namespace evalrt {
namespace {

namespace http = boost::beast::http;
using Tcp = asio::ip::tcp;
using Millis = Timing::Millis;

// A body that is handed on piece by piece, without a copy, until the taker has enough.
struct TakenBody {
    struct value_type {
        void* taker = nullptr;
        bool (*take)(void* taker, std::string_view bytes) = nullptr;
        bool enough = false;
    };
    class reader {
    public:
        template <class Header>
        reader(Header&, value_type& body) : body_(body) {}
        void init(const boost::optional<std::uint64_t>&, error_code& ec) { ec = {}; }
        std::size_t put(asio::const_buffer bytes, error_code& ec) {
            ec = {};
            const std::string_view piece(static_cast<const char*>(bytes.data()), bytes.size());
            if (!body_.enough) body_.enough = !body_.take(body_.taker, piece);
            return piece.size();
        }
        void finish(error_code& ec) { ec = {}; }

    private:
        value_type& body_;
    };
};

using Parser = http::response_parser<TakenBody, detail::SpareAllocator<char>>;
using Fields = http::basic_fields<detail::SpareAllocator<char>>;
using detail::Job;
using detail::Patched;

// Whether a read that is begun takes at once what is there.
#if defined(BOOST_ASIO_HAS_IO_URING_AS_DEFAULT)
constexpr bool reads_at_once = false;
#else
constexpr bool reads_at_once = true;
#endif

struct Connection {
    // Beast bounds neither a chunk's head nor a trailer: the buffer does.
    Connection(const asio::any_io_executor& executor, std::size_t header_limit)
        : socket(executor), buffer(header_limit + (64 << 10)) {
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

// A request in its parts, for one gathering write.
class Buffers {
public:
    using value_type = asio::const_buffer;
    using const_iterator = const value_type*;
    static constexpr std::size_t most = 8;

    void push(std::string_view part) { parts_[count_++] = {part.data(), part.size()}; }
    void skip(std::size_t bytes) {
        for (auto& part : parts_) {
            const auto done = std::min(bytes, part.size());
            part += done;
            bytes -= done;
        }
    }
    const_iterator begin() const { return parts_.data(); }
    const_iterator end() const { return parts_.data() + count_; }

private:
    std::array<value_type, most> parts_;
    std::size_t count_ = 0;
};

// As far as it can be shown.
std::string first_line(std::string_view text) {
    std::string line(text.substr(0, std::min<std::size_t>(text.find_first_of("\r\n"), 80)));
    for (char& c : line)
        if (c < ' ' || c >= 0x7f) c = '.';
    return line;
}

bool visible(std::string_view text) {
    return std::all_of(text.begin(), text.end(), [](char c) { return c > ' ' && c < 0x7f; });
}

std::string_view field(const Fields& fields, std::string_view name) {
    const auto value = fields[{name.data(), name.size()}];
    return {value.data(), value.size()};
}

std::optional<std::chrono::milliseconds> wait_asked_for(const Fields& fields) {
    const auto wait = field(fields, "retry-after"), ms = field(fields, "retry-after-ms");
    if (wait.empty() && ms.empty()) return {};
    // A date is meant by the server's own clock.
    const auto here = std::chrono::floor<std::chrono::seconds>(std::chrono::system_clock::now());
    return detail::retry_after(wait, ms,
                               detail::http_date(field(fields, "date"), here).value_or(here));
}

// Empty: the host must be looked up. Not localhost: that is both loopbacks, whatever the system's
// list of hosts says.
std::vector<Tcp::endpoint> known_endpoints(const Url& url) {
    const auto port = static_cast<std::uint16_t>(std::stoi(url.port));
    if (url.host == "localhost")
        return {{asio::ip::address_v4::loopback(), port}, {asio::ip::address_v6::loopback(), port}};
    error_code ec;
    const auto address = asio::ip::make_address(url.host, ec);
    if (ec) return {};
    return {{address, port}};
}

// An exchange as the one who minds the clock sees it.
struct Limited {
    // When to look again; where a limit has passed, the exchange now ends.
    virtual Clock::time_point limit(Clock::time_point now) = 0;
    std::size_t place = 0; // among those that run

protected:
    ~Limited() = default;
};

} // namespace

struct HttpBackend::Impl : std::enable_shared_from_this<Impl> {
    Impl(asio::any_io_executor executor_, BackendRow row_, HttpOptions options_, LogSink log_)
        : home(std::move(executor_)),
          executor(home.executor),
          io(executor.target<asio::io_context::executor_type>()),
          row(std::move(row_)),
          options(std::move(options_)),
          log(std::move(log_)),
          url(parse_url(options.url)),
          known(known_endpoints(url)),
          pacer(row.backlog, row.accept_interval),
          watch(row, options.max_context),
          timer(executor) {
        while (!options.api_key.empty() &&
               std::isspace(static_cast<unsigned char>(options.api_key.back())))
            options.api_key.pop_back(); // the end of the line of a key file
        if (!visible(options.api_key))
            throw std::invalid_argument("the API key has a space or a control character in it");
        fields = make_fields();
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

    // What every request says after its first line.
    std::string make_fields() const {
        const bool v6 = url.host.find(':') != url.host.npos;
        auto out = fmt::format(" HTTP/1.1\r\n"
                               "Host: {}{}{}:{}\r\n"
                               "User-Agent: evalrt\r\n"
                               "Accept: application/json, text/event-stream\r\n"
                               "Connection: {}\r\n",
                               v6 ? "[" : "", url.host, v6 ? "]" : "", url.port,
                               row.keep_alive ? "keep-alive" : "close");
        const bool anthropic = row.wire == Wire::anthropic;
        if (anthropic) out += "anthropic-version: 2023-06-01\r\n";
        if (!options.api_key.empty())
            out +=
                (anthropic ? "x-api-key: " : "Authorization: Bearer ") + options.api_key + "\r\n";
        return out;
    }

    // The first line and the fields, to where the length of the body stands: nearly all requests
    // have the same.
    std::shared_ptr<const std::string> head(std::string_view endpoint, std::string_view method,
                                            bool body) {
        for (const auto& it : heads)
            if (it.endpoint == endpoint && it.method == method && it.body == body) return it.text;
        Head made{std::string(endpoint), std::string(method), body, nullptr};
        std::string_view base = url.base;
        if (base.ends_with("/v1"))
            base.remove_suffix(3); // the endpoint has it, or is beside it, as /health
        else if (!base.empty() && endpoint.starts_with("/v1/"))
            endpoint.remove_prefix(3);
        made.text = std::make_shared<const std::string>(
            fmt::format("{} {}{}{}{}", method, base, endpoint, fields,
                        body ? "Content-Type: application/json\r\nContent-Length: " : ""));
        if (heads.size() >= 8) heads.erase(heads.begin());
        heads.push_back(std::move(made));
        return heads.back().text;
    }

    // Servers repeat a key that they refuse.
    void hide_key(std::string& text) const {
        const auto& key = options.api_key;
        if (key.size() < 8) return; // a word such as "none"
        for (auto at = text.find(key); at != text.npos; at = text.find(key, at))
            text.replace(at, key.size(), "[key]");
        if (!text.ends_with("...")) return;
        for (auto n = key.size() - 1; n >= 4; --n) // cut in its middle
            if (const auto at = text.size() - 3 - std::min(n, text.size() - 3);
                text.compare(at, n, key, 0, n) == 0)
                return void(text.replace(at, n, "[key]"));
    }

    void say(const std::string& note) {
        if (log && said.size() < 100 && said.insert(note).second) log(note);
    }

    void begun(Limited& exchange) {
        exchange.place = running.size();
        running.push_back(&exchange);
    }

    void ended(const Limited& exchange) {
        running[exchange.place] = running.back();
        running[exchange.place]->place = exchange.place;
        running.pop_back();
        if (!running.empty()) return;
        timer.cancel(); // nothing of ours may keep the context from its end
        looks_at = Clock::time_point::max();
    }

    // One timer for all of them: most limits are far away, and move before they are reached.
    void look(Clock::time_point at) {
        if (at >= looks_at) return;
        looks_at = at;
        timer.expires_at(at);
        timer.async_wait([weak = weak_from_this()](error_code ec) {
            auto self = weak.lock();
            if (ec || !self) return;
            const auto now = Clock::now();
            auto next = Clock::time_point::max();
            for (auto* const exchange : self->running) next = std::min(next, exchange->limit(now));
            self->looks_at = Clock::time_point::max();
            self->look(next);
        });
    }

    detail::Home home;
    const asio::any_io_executor& executor;
    const asio::io_context::executor_type* const io; // the same, if it is that
    BackendRow row;
    HttpOptions options;
    LogSink log;
    Url url;
    std::vector<Tcp::endpoint> known; // empty: look it up
    std::string fields;
    struct Head {
        std::string endpoint, method;
        bool body;
        std::shared_ptr<const std::string> text;
    };
    std::vector<Head> heads; // the last ones
    detail::ConnectPacer pacer;
    detail::AnswerWatch watch;
    std::list<asio::steady_timer*> turns; // of those who wait for their time to connect
    std::optional<asio::ssl::context> tls;
    std::vector<std::unique_ptr<Connection>> idle;
    std::set<std::string> said;
    std::size_t open = 0; // connections of running exchanges
    bool closed = false;
    std::vector<Limited*> running;
    asio::steady_timer timer; // for their time limits
    Clock::time_point looks_at = Clock::time_point::max();
};

namespace {

// One exchange from the first byte to the last. A time limit and a cancellation end it by closing
// the socket: every operation of the coroutine then returns. Alive as long as one of them runs.
template <class Impl>
class Exchange final : public Limited, public std::enable_shared_from_this<Exchange<Impl>> {
public:
    Exchange(const std::shared_ptr<Impl>& impl, Request&& request, TextSink&& on_text,
             Backend::Handler&& handler)
        : impl_(impl),
          request_(std::move(request)),
          on_text_(std::move(on_text)),
          handler_(std::move(handler)),
          clock_({}, started_) {
        impl_->begun(*this);
    }
    Exchange(const Exchange&) = delete;
    Exchange& operator=(const Exchange&) = delete;
    ~Exchange() {
        job_.reset();
        if (!ended_) impl_->ended(*this); // its context has
    }

    void start() {
        detail::on_cancel(handler_, [weak = this->weak_from_this()] {
            if (auto it = weak.lock()) {
                it->cancelled_ = true;
                it->abort();
            }
        });
        const auto begin = [self = this->shared_from_this()] {
            self->starting_ = true;
            self->job_.emplace(self->whole());
            self->job_->start();
            self->starting_ = false;
        };
        if (impl_->io && impl_->io->running_in_this_thread())
            begin(); // as dispatch() does, which takes longer to find out
        else
            asio::dispatch(impl_->executor, begin);
    }

private:
    void abort() {
        if (pause_) pause_->cancel();
        // A look-up cannot be stopped, and may last for many seconds: nobody waits for it.
        if (resolving_)
            asio::post(impl_->executor, [self = this->shared_from_this()] { self->end(); });
        if (connection_) {
            error_code ignored;
            connection_->socket.close(ignored);
        }
    }

    bool stopped() const { return cancelled_ || late_; }
    bool as_it_is() const { return request_.plain || request_.body.empty(); }

    // By the receiver of the text, for whose time the server is not to blame.
    bool held() const { return request_.flow && request_.flow->held(); }
    void still(Clock::time_point now) {
        clock_.bytes(now);
        clock_.content(now);
    }

    void watch() {
        if (!ended_) impl_->look(clock_.next().at);
    }

    Clock::time_point limit(Clock::time_point now) override {
        if (stopped()) return Clock::time_point::max(); // it is ending
        if (held()) still(now);
        const auto next = clock_.next();
        if (next.at > now) return next.at;
        late_ = next;
        abort();
        return Clock::time_point::max();
    }

    template <class... Results, class Start>
    auto wait_for(Start start) {
        return detail::operation<Results...>(this->shared_from_this(), std::move(start));
    }

    auto elapsed(asio::steady_timer& timer) {
        return wait_for<error_code>([&](auto handler) { timer.async_wait(std::move(handler)); });
    }

    void fail(Errc errc, std::string detail, error_code cause = {}) {
        response_.outcome = errc;
        response_.detail = std::move(detail);
        response_.cause = cause;
    }

    // `turn`: the caller's handler may run at once.
    void end(bool turn = false) {
        if (std::exchange(ended_, true)) return;
        impl_->ended(*this);
        if (watched_) impl_->watch.ended(prepared_);
        if (cancelled_) {
            fail(Errc::cancelled, "cancelled");
        } else if (late_) {
            fail(Errc::timed_out,
                 fmt::format("no {} within {} s", late_->what, double(late_->span.count()) / 1000));
        }
        if (response_.outcome || request_.plain)
            for (auto* text : {&response_.detail, &response_.body, &response_.text,
                               &response_.finish_reason, &response_.request_id})
                impl_->hide_key(*text);
        for (const auto& note : impl_->watch.answered(prepared_, response_)) impl_->say(note);
        response_.attempts = 1;
        if (response_.outcome) now_ = Clock::now();
        response_.timing.total = now_ - started_;
        response_.timing.queued = sent_ - started_;
        const auto code = response_.outcome ? make_error_code(*response_.outcome) : error_code();
        if (turn)
            detail::complete_now(impl_->home, std::move(handler_), code, std::move(response_));
        else
            detail::complete(impl_->executor, std::move(handler_), code, std::move(response_));
    }

    void drop_connection() {
        if (connection_) --impl_->open;
        connection_.reset();
    }

    Job<> whole() {
        try {
            co_await run();
        } catch (...) {
            fail(Errc::malformed, "the answer could not be taken in: out of memory, or the "
                                  "receiver of its text threw");
        }
        drop_connection();
        end(!starting_);
    }

    Job<> run() {
        if (stopped()) co_return;
        auto& prepared = prepared_;
        if (as_it_is()) {
            route_.endpoint = request_.endpoint;
            prepared.body = request_.body;
        } else {
            const auto& options = impl_->options;
            route_ = detail::route(request_.endpoint, impl_->row);
            prepared = detail::prepare(request_, impl_->row, route_, options.model,
                                       options.override_model, options.max_tokens);
        }
        for (const auto& note : prepared.notes) impl_->say(note);
        if (!prepared.error.empty()) {
            fail(Errc::rejected, prepared.error);
            co_return;
        }
        if (!request_.endpoint.starts_with("/") || !visible(request_.endpoint)) {
            fail(Errc::rejected, "the endpoint is no path");
            co_return;
        }
        if (!as_it_is()) {
            watched_ = true;
            for (const auto& note : impl_->watch.sent(prepared)) impl_->say(note);
        }
        const auto key = as_it_is() ? "" : detail::routing_key(request_, impl_->row);
        const auto size = prepared.body.size();
        std::string_view method = size > 0 ? "POST" : "GET";
        if (request_.plain && !request_.method.empty()) method = request_.method;
        const bool with_body = size > 0 || method != "GET";
        const auto head = impl_->head(route_.endpoint, method, with_body);
        std::array<char, 128> rest;
        auto* rest_end = rest.data();
        if (with_body) {
            rest_end = std::to_chars(rest_end, rest_end + 20, size).ptr;
            rest_end = std::copy_n("\r\n", 2, rest_end);
        }
        if (!key.empty()) rest_end = fmt::format_to(rest_end, "X-SMG-Routing-Key: {:.60}\r\n", key);
        rest_end = std::copy_n("\r\n", 2, rest_end);
        if (prepared.body.parts() + 2 > Buffers::most)
            prepared.body = Patched(prepared.body.text());
        for (bool first = true, again = true; std::exchange(again, false); first = false) {
            // What goes out at once can have its answer waited for before: see talk().
            const bool early = reads_at_once && impl_->io && !impl_->tls && size <= 16 << 10;
            const bool kept = first && take_idle(!early);
            if (!kept && !co_await connect()) co_return;
            now_ = sent_ = Clock::now();
            clock_.sent(sent_);
            watch();
            if (!first) response_ = {};
            response_.stage = Stage::sent;
            Buffers out;
            out.push(*head);
            out.push({rest.data(), std::size_t(rest_end - rest.data())});
            for (std::size_t i = 0; i < prepared.body.parts(); ++i) out.push(prepared.body.part(i));
            if (connection_->tls)
                co_await talk(*connection_->tls, out, false);
            else
                co_await talk(connection_->socket, out, kept && early);
            // The server closed a kept connection at the moment of our writing.
            if (kept && response_.outcome == Errc::unreachable && !stopped()) {
                drop_connection();
                again = true;
            }
        }
    }

    bool take_idle(bool check) {
        auto& idle = impl_->idle;
        const auto now = started_;
        std::erase_if(
            idle, [&](const auto& it) { return now - it->idle_since >= impl_->options.idle_time; });
        while (!idle.empty()) {
            connection_ = std::move(idle.back());
            idle.pop_back();
            ++impl_->open;
            if (!check || connection_->quiet()) {
                clock_ = {impl_->options.limits, now};
                return true;
            }
            drop_connection();
        }
        return false;
    }

    // First come, first served; who is cancelled while waiting leaves no gap.
    Job<> take_turn() {
        auto& turns = impl_->turns;
        pause_.emplace(impl_->executor);
        const auto turn = turns.insert(turns.end(), &*pause_);
        while (!stopped()) {
            auto at = Clock::time_point::max();
            if (turn == turns.begin()) {
                auto pacer = impl_->pacer;
                const auto now = Clock::now();
                at = pacer.reserve(now);
                if (at <= now) {
                    impl_->pacer = pacer;
                    break;
                }
            }
            pause_->expires_at(at);
            co_await elapsed(*pause_);
        }
        turns.erase(turn);
        if (!turns.empty()) turns.front()->cancel();
    }

    Job<bool> connect() {
        if (impl_->row.accept_interval.count() > 0) co_await take_turn();
        if (stopped()) co_return false;
        clock_ = {impl_->options.limits, Clock::now()};
        watch();
        const auto& url = impl_->url;
        auto endpoints = impl_->known;
        if (endpoints.empty()) {
            resolving_ = true;
            Tcp::resolver resolver(impl_->executor);
            auto [resolve_error, found] =
                co_await wait_for<error_code, Tcp::resolver::results_type>([&](auto handler) {
                    resolver.async_resolve(url.host, url.port, std::move(handler));
                });
            resolving_ = false;
            if (stopped()) co_return false;
            if (resolve_error) {
                fail(Errc::unreachable,
                     fmt::format("cannot find the host {}: {}", url.host, resolve_error.message()),
                     resolve_error);
                co_return false;
            }
            endpoints.assign(found.begin(), found.end());
        }
        connection_ = std::make_unique<Connection>(impl_->executor, impl_->options.header_limit);
        ++impl_->open;
        auto [error, endpoint] = co_await wait_for<error_code, Tcp::endpoint>([&](auto handler) {
            asio::async_connect(connection_->socket, endpoints, std::move(handler));
        });
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
        connection_->socket.non_blocking(true, ignored);
        if (!impl_->tls) co_return true;
        auto& tls = connection_->tls.emplace(connection_->socket, *impl_->tls);
        error_code no_address; // which is no server name
        asio::ip::make_address(url.host, no_address);
        if (no_address) SSL_set_tlsext_host_name(tls.native_handle(), url.host.c_str());
        tls.set_verify_callback(asio::ssl::host_name_verification(url.host));
        auto [handshake_error] = co_await wait_for<error_code>([&](auto handler) {
            tls.async_handshake(asio::ssl::stream_base::client, std::move(handler));
        });
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
            fail(Errc::unreachable,
                 ec == asio::error::eof
                     ? "the server closed the connection without an answer"
                     : fmt::format("the connection broke before an answer: {}", ec.message()),
                 ec);
        } else if (ec == http::error::header_limit || ec == http::error::buffer_overflow) {
            fail(Errc::malformed, "the answer's headers are over the limit", ec);
        } else if (ec.category() == http::make_error_code(http::error::bad_value).category() &&
                   ec != http::error::partial_message) {
            fail(Errc::malformed,
                 fmt::format("the answer is not HTTP/1.1 ({} in the {})", ec.message(), where), ec);
        } else {
            fail(Errc::truncated,
                 fmt::format("the connection ended in the {}: {}", where, ec.message()), ec);
        }
    }

    template <class Stream>
    Job<> talk(Stream& stream, Buffers out, bool early) {
        error_code write_error;
        std::size_t written = 0;
        if constexpr (std::is_same_v<Stream, Tcp::socket>) { // nearly always it has room for all
            if (early) {
                // A read looks at once whether there is something, so begun before the request
                // goes out it tells like quiet(), at no cost, that a kept connection is stale.
                const auto space = connection_->buffer.prepare(64 << 10);
                bool stale = false;
                auto [error, n] = co_await wait_for<error_code, std::size_t>([&](auto handler) {
                    auto* const begin = static_cast<char*>(space.data());
                    *begin = 0;
                    stream.async_read_some(space, std::move(handler));
                    stale = *begin != 0;
                    if (stale) return;
                    written = stream.write_some(out, write_error);
                    stale = written < asio::buffer_size(out);
                    if (stale) stream.close(write_error);
                });
                now_ = Clock::now();
                if (stopped()) co_return;
                if (stale) error = asio::error::connection_reset;
                if (error) {
                    broken(error, "headers");
                    co_return;
                }
                connection_->buffer.commit(n);
            } else {
                written = stream.write_some(out, write_error);
                if (write_error == asio::error::would_block) write_error = {};
            }
        }
        if (!write_error && written < asio::buffer_size(out)) {
            out.skip(written);
            auto [error, n] = co_await wait_for<error_code, std::size_t>(
                [&](auto handler) { asio::async_write(stream, out, std::move(handler)); });
            if (stopped()) co_return;
            write_error = error;
        }

        // A server may answer and close before it has read everything: look for the answer first.
        std::optional<Parser> parser;
        for (int informational = 0;; ++informational) {
            parser.emplace();
            parser->header_limit(std::uint32_t(impl_->options.header_limit));
            parser->body_limit(boost::none);
            if (!co_await read_header(stream, *parser, write_error)) co_return;
            if (parser->get().result_int() / 100 != 1) break;
            if (informational == 8) {
                fail(Errc::malformed, "the answer does not get past informational ones");
                co_return;
            }
        }
        const auto& head = parser->get();
        response_.status = int(head.result_int());
        response_.retry_after = wait_asked_for(head);
        response_.should_retry = detail::should_retry(field(head, "x-should-retry"));
        if (request_.body.empty()) response_.server = std::string(head[http::field::server]);
        if (request_.plain) response_.content_type = field(head, "content-type");
        clock_.bytes(now_);
        watch();
        // Beast takes any other coding for "until the end of the stream".
        if (const auto coding = head.find(http::field::transfer_encoding);
            coding != head.end() && !boost::beast::iequals(coding->value(), "chunked")) {
            fail(Errc::malformed, "the answer has a transfer coding that HTTP/1.1 does not know");
            co_return;
        }
        const bool good = response_.status / 100 == 2;
        const auto type = head[http::field::content_type];
        if (good && !as_it_is() && boost::beast::iequals(type.substr(0, 17), "text/event-stream"))
            co_await read_stream(stream, *parser);
        else
            co_await read_whole(stream, *parser, good);
        if (write_error || stopped() || !reusable(*parser)) co_return;
        if (!parser->is_done()) co_await drain(stream, *parser);
        if (parser->is_done()) keep();
    }

    template <class Stream>
    auto read(Stream& stream, asio::mutable_buffer space) {
        return wait_for<error_code, std::size_t>(
            [&stream, space](auto handler) { stream.async_read_some(space, std::move(handler)); });
    }

    // False: it failed. Beast's own operation holds what one read brings to the limit, but not the
    // sum, and waits for more of what can never become HTTP.
    template <class Stream>
    Job<bool> read_header(Stream& stream, Parser& parser, error_code write_error) {
        auto& buffer = connection_->buffer;
        const auto limit = impl_->options.header_limit;
        for (std::size_t parsed = 0;;) {
            error_code ec = http::error::need_more;
            if (buffer.size() > 0) {
                response_.stage = Stage::answered;
                const std::string_view seen(static_cast<const char*>(buffer.data().data()),
                                            buffer.size());
                if (parsed == 0 && !std::string_view("HTTP/1.").starts_with(seen.substr(0, 7))) {
                    fail(Errc::malformed,
                         fmt::format("what answers at {}:{} does not speak HTTP/1: {}",
                                     impl_->url.host, impl_->url.port, first_line(seen)));
                    co_return false;
                }
                const auto used = parser.put(buffer.data(), ec);
                buffer.consume(used);
                parsed += used;
                if (parsed + (ec ? buffer.size() : 0) > limit) ec = http::error::header_limit;
                if (!ec) co_return true;
            }
            if (ec == http::error::need_more) {
                const auto space = buffer.prepare(boost::beast::read_size(buffer, 64 << 10));
                auto [error, n] = co_await read(stream, space);
                now_ = Clock::now();
                if (stopped()) co_return false;
                buffer.commit(n);
                if (!error) continue;
                ec = write_error ? write_error : error;
            }
            broken(ec, "headers");
            co_return false;
        }
    }

    Job<> wait_for_receiver() {
        pause_.emplace(impl_->executor);
        pause_->expires_at(Clock::time_point::max());
        request_.flow->on_go([weak = this->weak_from_this()] {
            if (auto self = weak.lock()) self->pause_->cancel();
        });
        co_await elapsed(*pause_);
        still(Clock::now());
    }

    // Calls take(bytes) for the body until take says false or it ends.
    template <class Stream, class Take>
    Job<error_code> read_body(Stream& stream, Parser& parser, Take take) {
        auto& buffer = connection_->buffer;
        auto& body = parser.get().body();
        body = {&take, [](void* taker, std::string_view bytes) {
                    return (*static_cast<Take*>(taker))(bytes);
                }};
        parser.eager(true); // all that the buffer has
        while (!parser.is_done()) {
            error_code ec = http::error::need_more;
            if (buffer.size() > 0) {
                buffer.consume(parser.put(buffer.data(), ec));
                if (stopped()) co_return asio::error::operation_aborted;
                if (body.enough) break;
            }
            if (ec == http::error::need_more) {
                while (held()) {
                    co_await wait_for_receiver();
                    if (stopped()) co_return asio::error::operation_aborted;
                }
                const auto size = boost::beast::read_size(buffer, 64 << 10);
                if (size == 0) co_return http::error::buffer_overflow;
                auto [error, n] = co_await read(stream, buffer.prepare(size));
                now_ = Clock::now();
                if (stopped()) co_return asio::error::operation_aborted;
                buffer.commit(n);
                ec = error;
                if (ec == asio::error::eof) {
                    ec = {};
                    parser.put_eof(ec);
                }
                // Many servers end a close-delimited body without the TLS goodbye.
                if (ec == asio::ssl::error::stream_truncated && parser.need_eof()) break;
                clock_.bytes(now_);
            }
            if (ec) co_return ec;
        }
        co_return error_code();
    }

    template <class Stream>
    Job<> read_stream(Stream& stream, Parser& parser) {
        auto reader = detail::make_reader(route_, impl_->row);
        detail::SseParser events(impl_->options.event_limit);
        bool last = false;
        std::string too_large;
        std::size_t total = 0;
        const auto on_event = [&](const detail::SseEvent& event) {
            if (last || stopped()) return;
            const auto piece = reader->event(event);
            last = piece.last;
            if (!piece.content) return;
            const auto now = now_;
            clock_.content(now);
            const bool first = response_.stage != Stage::text;
            if (first) {
                response_.stage = Stage::text;
                response_.timing.first_text = now - sent_;
            }
            response_.timing.last_text = now - sent_;
            if (on_text_ && (first || !piece.text.empty())) on_text_(piece.text);
        };
        const auto on_comment = [&](std::string_view comment) {
            if (!request_.on_computed || last || stopped()) return;
            if (detail::prompt_computed(comment)) std::exchange(request_.on_computed, nullptr)();
        };
        const auto ec = co_await read_body(stream, parser, [&](std::string_view bytes) {
            const auto& limits = impl_->options;
            total += bytes.size();
            if (!events.feed(bytes, on_event, on_comment))
                too_large = fmt::format("an event of the stream is over the limit of {} bytes",
                                        limits.event_limit);
            else if (total > 4 * limits.body_limit) // of which most is not text
                too_large =
                    fmt::format("the answer is over the limit of {} bytes", limits.body_limit);
            return !last && too_large.empty();
        });
        if (stopped()) co_return;
        if (!too_large.empty()) {
            fail(Errc::malformed, too_large);
            co_return;
        }
        if (ec && !last) {
            reader->finish(response_); // for the usage, and an error that the server named
            if (!response_.outcome || response_.outcome == Errc::truncated) broken(ec, "stream");
            co_return;
        }
        // The last event may lack its blank line; where it is not whole, it is none.
        if (!last)
            events.finish([&](const detail::SseEvent& event) {
                if (!detail::check_object(event.data)) on_event(event);
            });
        reader->finish(response_);
    }

    template <class Stream>
    Job<> read_whole(Stream& stream, Parser& parser, bool good) {
        std::string body;
        const auto limit = impl_->options.body_limit;
        if (const auto length = parser.content_length(); length && *length < 1 << 20)
            body.reserve(std::size_t(*length) + 64); // its parser reads ahead
        const auto ec = co_await read_body(stream, parser, [&](std::string_view bytes) {
            body.append(bytes);
            return body.size() <= limit;
        });
        if (stopped()) co_return;
        if (body.size() > limit) {
            fail(Errc::malformed, fmt::format("the answer is over the limit of {} bytes", limit));
        } else if (!good) {
            impl_->hide_key(body);
            detail::read_rejection(response_.status, body, response_);
            if (request_.plain) response_.body = std::move(body);
            if (response_.status / 100 == 3)
                response_.detail += fmt::format(" (it redirects to {}: give that URL)",
                                                std::string(parser.get()[http::field::location]));
        } else if (ec) {
            broken(ec, fmt::format("body after {} bytes", body.size()));
        } else if (as_it_is()) {
            response_.body = std::move(body);
        } else {
            detail::make_reader(route_, impl_->row)->whole(std::move(body), response_);
        }
    }

    bool reusable(const Parser& parser) const {
        if (!impl_->row.keep_alive || !parser.keep_alive()) return false;
        return !response_.outcome || (parser.is_done() && response_.outcome != Errc::malformed);
    }

    // The answer is complete, but its message is not: it may end within a moment, for which the
    // caller does not wait.
    template <class Stream>
    Job<> drain(Stream& stream, Parser& parser) {
        end();
        asio::steady_timer patience(impl_->executor, impl_->options.drain_time);
        patience.async_wait([weak = this->weak_from_this()](error_code ec) {
            if (auto self = weak.lock(); self && !ec) {
                self->late_.emplace();
                self->abort();
            }
        });
        std::size_t drained = 0;
        co_await read_body(stream, parser, [&](std::string_view bytes) {
            return (drained += bytes.size()) < 64 << 10;
        });
    }

    void keep() {
        if (impl_->closed || connection_->buffer.size() > 0 ||
            impl_->idle.size() >= impl_->options.idle_connections)
            return;
        connection_->idle_since = now_;
        impl_->idle.push_back(std::move(connection_));
        --impl_->open;
    }

    std::shared_ptr<Impl> impl_;
    Request request_;
    detail::Prepared prepared_;
    TextSink on_text_;
    Backend::Handler handler_;
    Response response_;
    detail::Route route_;
    const Clock::time_point started_ = Clock::now();
    Clock::time_point sent_ = started_;
    Clock::time_point now_ = started_; // of the last read
    detail::ExchangeClock clock_;
    std::optional<asio::steady_timer> pause_; // before connecting, where that is paced
    std::unique_ptr<Connection> connection_;
    std::optional<detail::ExchangeClock::Limit> late_;
    bool starting_ = false; // whoever asks is still on the stack
    bool resolving_ = false;
    bool cancelled_ = false;
    bool ended_ = false;
    bool watched_ = false;     // by the one who warns of what must not be on the way at once
    std::optional<Job<>> job_; // the last one: its frames look at all the others
};

template <class Impl>
void ask(const std::shared_ptr<Impl>& impl, Request&& request, TextSink&& on_text,
         Backend::Handler&& handler) {
    std::allocate_shared<Exchange<Impl>>(detail::SpareAllocator<Exchange<Impl>>(), impl,
                                         std::move(request), std::move(on_text), std::move(handler))
        ->start();
}

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
    const auto n = request.plain ? 1 : detail::repetitions(request, impl_->row);
    if (n == 1) return ask(impl_, std::move(request), std::move(on_text), std::move(handler));
    impl_->say(fmt::format("\"n\" is {}: {} gives one choice, so it is asked {} times", n,
                           impl_->row.name, n));
    detail::ask_repeatedly(
        impl_->executor,
        [impl = impl_](Request one, TextSink sink, Handler done) {
            ask(impl, std::move(one), std::move(sink), std::move(done));
        },
        std::move(request), n, std::move(on_text), std::move(handler));
}

} // namespace evalrt
