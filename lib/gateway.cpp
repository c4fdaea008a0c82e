#include "evalrt/gateway.hpp"

#include "conversations.hpp"
#include "evalrt/detail/complete.hpp"
#include "evalrt/http_backend.hpp"
#include "gateway_wire.hpp"
#include "wire.hpp"

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/bind_executor.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <new>
#include <set>
#include <stdexcept>
#include <unordered_map>

namespace evalrt {
namespace {

namespace http = boost::beast::http;
using Tcp = asio::ip::tcp;
using detail::Asked;
using detail::Call;
using detail::Place;
using detail::Refusal;

constexpr auto token = asio::as_tuple(asio::use_awaitable);
constexpr std::string_view json_type = "application/json";
constexpr std::size_t long_conversation = 16 << 10; // bytes: less is soon prefilled again

class Session;
struct Core;

// A request at the Backend, and what has come of it. It outlives the connection that asked for it,
// but not for long.
struct Job {
    explicit Job(const asio::any_io_executor& executor) : linger(executor) {}

    std::string endpoint, idempotency_key;
    Text body;
    detail::Conversations::Turn turn;
    asio::cancellation_signal cancel;
    asio::steady_timer linger;
    std::shared_ptr<TextFlow> flow = std::make_shared<TextFlow>();
    Session* listener = nullptr; // who is told of news; null: its client has gone
    std::string text;            // so far
    bool text_first = true;      // the answer began with text
    bool done = false;
    Response response;
};

// What all connections share.
struct Core : std::enable_shared_from_this<Core> {
    Core(asio::any_io_executor executor_, Backend& backend_, GatewayOptions options_)
        : executor(std::move(executor_)),
          backend(backend_),
          options(std::move(options_)),
          acceptor(executor),
          pause(executor) {
        door.loopback = detail::is_loopback(options.host);
        door.token = options.token;
        door.field_limit = options.field_limit;
        door.body_limit = options.body_limit;
        error_code ec;
        const auto address = options.host == "localhost" ? asio::ip::make_address("127.0.0.1")
                                                         : asio::ip::make_address(options.host, ec);
        if (ec)
            throw std::invalid_argument(
                fmt::format("cannot listen at '{}': it is no address", options.host));
        if (!door.loopback && options.token.empty())
            throw std::invalid_argument(
                fmt::format("{} can be reached from other machines: listening there needs a token",
                            options.host));
        place = {address, options.port};
    }

    Failure open();
    asio::awaitable<void> accept();
    std::shared_ptr<Job> start(const Call& call, const Asked& asked);
    std::shared_ptr<Job> running(const Call& call, const Text& body);
    void leave(const std::shared_ptr<Job>& job, bool delivered, bool asks_again);
    void forget(const Job& job);
    void ended(const std::shared_ptr<Job>& job, Response response);
    void count(const Response& response);
    void close();
    void check_closed();

    static std::size_t key(std::string_view endpoint, std::string_view body) {
        const std::hash<std::string_view> hash;
        return hash(body) * 31 + hash(endpoint);
    }

    asio::any_io_executor executor;
    Backend& backend;
    GatewayOptions options;
    detail::Door door;
    Tcp::endpoint place;
    Tcp::acceptor acceptor;
    asio::steady_timer pause;
    std::set<Session*> sessions;
    std::unordered_multimap<std::size_t, std::shared_ptr<Job>> jobs; // that can be joined
    GatewayStats stats;
    detail::Conversations conversations;
    std::uint64_t last_id = 0;
    bool closing = false, said_no_usage = false;
    std::vector<asio::any_completion_handler<void(error_code)>> closers;
};

// One connection. A read is always on its way, so that its end is seen at any time; all else waits
// on one timer that every event cancels.
class Session : public std::enable_shared_from_this<Session> {
public:
    Session(std::shared_ptr<Core> impl, Tcp::socket socket);
    ~Session();

    void start();
    void close();
    void wake() { wake_.cancel(); }
    // A piece of text has come. Too much that the client has not taken, and no more is read.
    void hear(Job& job) {
        if (live(job) && job.text.size() - sent_ > options().unread_limit) job.flow->hold();
        wake();
    }

private:
    using Parser = http::request_parser<http::string_body>;

    const GatewayOptions& options() const { return impl_->options; }

    void fill() {
        if (reading_ || gone_ || in_.size() >= read_ahead) return;
        reading_ = true;
        socket_.async_read_some(asio::buffer(chunk_),
                                [self = shared_from_this()](error_code ec, std::size_t n) {
                                    self->reading_ = false;
                                    self->in_.append(self->chunk_.data(), n);
                                    if (ec)
                                        self->close();
                                    else
                                        self->wake();
                                });
    }

    // False: the time has passed, and nothing has happened.
    asio::awaitable<bool> wait(Clock::time_point until) {
        wake_.expires_at(until);
        auto [ec] = co_await wake_.async_wait(token);
        co_return bool(ec);
    }

    // False: there is nothing more, or not in time.
    asio::awaitable<bool> more(Clock::time_point until) {
        const auto before = in_.size();
        fill();
        while (!gone_ && in_.size() == before)
            if (!co_await wait(until) && in_.size() == before) break;
        co_return !gone_ && in_.size() > before;
    }

    // True: the client has it all, whatever it does then.
    asio::awaitable<bool> write(std::string_view head, std::string_view rest = {}) {
        if (gone_) co_return false;
        stuck_.expires_after(options().write_time);
        stuck_.async_wait([weak = weak_from_this()](error_code ec) {
            if (auto self = weak.lock(); self && !ec) self->close();
        });
        const std::array<asio::const_buffer, 2> out{asio::buffer(head), asio::buffer(rest)};
        auto [ec, n] = co_await asio::async_write(socket_, out, token);
        stuck_.cancel();
        if (ec) close();
        co_return !ec;
    }

    asio::awaitable<bool> answer(int status, std::string_view type, std::string_view body,
                                 std::string_view more_fields = {}) {
        const auto head =
            detail::answer_head(status, type, body.size(), call_.keep_alive,
                                parser_ && parser_->get().version() < 11, more_fields);
        co_return co_await write(head, head_only_ ? std::string_view() : body);
    }

    asio::awaitable<bool> refuse(const Refusal& refusal) {
        std::string fields;
        if (!call_.allow.empty()) fields += "Allow: " + call_.allow + "\r\n";
        if (refusal.status == 401) fields += "WWW-Authenticate: Bearer\r\n";
        const auto body = detail::error_body(call_.anthropic, refusal);
        co_return co_await answer(refusal.status, json_type, body, fields);
    }

    // For what is wrong before a request to the model.
    asio::awaitable<bool> turn_away(int status, std::string message) {
        ++impl_->stats.refused;
        call_.keep_alive = false;
        const Refusal refusal{status, std::move(message), {}};
        co_return co_await refuse(refusal);
    }

    asio::awaitable<void> run();
    asio::awaitable<bool> read_head(bool first);
    asio::awaitable<bool> read_body();
    asio::awaitable<void> serve();
    asio::awaitable<void> ask_model();
    asio::awaitable<void> ask_server();
    asio::awaitable<bool> whole(const std::shared_ptr<Job>& job);
    asio::awaitable<bool> stream(const std::shared_ptr<Job>& job, const Asked& asked);
    void leave(const std::shared_ptr<Job>& job, bool delivered);
    // Whether text goes out as it comes.
    bool live(const Job& job) const { return writer_ && (job.text_first || writer_->text_first()); }
    bool mine(const Job& job) const { return !gone_ && job.listener == this; }

    static constexpr std::size_t read_ahead = 64 << 10; // of what comes while a request runs

    std::shared_ptr<Core> impl_;
    Tcp::socket socket_;
    asio::steady_timer wake_, stuck_;
    std::array<char, 16 << 10> chunk_;
    std::string in_; // read, not parsed
    std::optional<Parser> parser_;
    Call call_;
    std::uint32_t from_ = 0; // the client's address
    Clock::time_point asked_at_;
    std::unique_ptr<detail::EventWriter> writer_; // of the stream that is answered
    std::size_t sent_ = 0;                        // of its text
    bool reading_ = false, gone_ = false, head_only_ = false;
};

Session::Session(std::shared_ptr<Core> impl, Tcp::socket socket)
    : impl_(std::move(impl)),
      socket_(std::move(socket)),
      wake_(impl_->executor),
      stuck_(impl_->executor) {
    error_code unknown;
    if (const auto peer = socket_.remote_endpoint(unknown); !unknown)
        from_ = std::uint32_t(std::hash<std::string>()(peer.address().to_string()));
    impl_->sessions.insert(this);
}

Session::~Session() {
    impl_->sessions.erase(this);
    impl_->check_closed();
}

void Session::start() {
    asio::co_spawn(impl_->executor, run(),
                   [self = shared_from_this()](std::exception_ptr) { self->close(); });
}

void Session::close() {
    gone_ = true;
    error_code ignored;
    socket_.close(ignored);
    wake();
}

asio::awaitable<void> Session::run() {
    for (bool first = true; co_await read_head(first); first = false) {
        co_await serve();
        if (gone_ || !call_.keep_alive) break;
    }
    // A close with something unread would reach the client as a reset, before our answer.
    if (gone_) co_return;
    error_code ignored;
    socket_.shutdown(Tcp::socket::shutdown_send, ignored);
    const auto until = Clock::now() + std::chrono::seconds(5);
    do in_.clear();
    while (co_await more(until));
}

// False: there is no further request.
asio::awaitable<bool> Session::read_head(bool first) {
    call_ = {};
    head_only_ = false;
    parser_.reset();
    const auto& limits = options();
    auto until = Clock::now() + (first ? limits.header_time : limits.idle_time);
    bool begun = false;
    for (std::size_t seen = 0;;) {
        while (in_.starts_with("\r\n")) in_.erase(0, 2); // some send one too many after a body
        const auto end = in_.find("\r\n\r\n", seen - std::min<std::size_t>(seen, 3));
        // A line end without its first half is how two readers come to see two different requests.
        for (auto at = in_.find('\n', seen); at < std::min(end, in_.size());
             at = in_.find('\n', at + 1))
            if (at == 0 || in_[at - 1] != '\r') {
                co_await turn_away(400, "the request has a line end without a carriage return");
                co_return false;
            }
        if (std::min(end, in_.size()) > limits.header_limit) {
            co_await turn_away(431, fmt::format("the headers are over the limit of {} bytes",
                                                limits.header_limit));
            co_return false;
        }
        if (end != in_.npos) break;
        seen = in_.size();
        if (!begun && seen > 0) {
            begun = true;
            if (!first) until = Clock::now() + limits.header_time;
        }
        if (!co_await more(until)) {
            if (!gone_ && begun) co_await turn_away(408, "the headers took too long to come");
            co_return false;
        }
    }
    parser_.emplace();
    parser_->header_limit(std::uint32_t(limits.header_limit) + 1024);
    parser_->body_limit(boost::none); // checked when it is known who asks
    error_code ec;
    in_.erase(0, parser_->put(asio::const_buffer(in_.data(), in_.size()), ec));
    if (ec == http::error::need_more) ec = http::error::bad_value;
    if (!ec && !parser_->is_header_done()) ec = http::error::bad_value;
    if (ec) {
        co_await turn_away(400, fmt::format("the request is not HTTP/1.1 ({})", ec.message()));
        co_return false;
    }
    detail::RequestHead head;
    const auto& message = parser_->get();
    const auto view = [](auto text) { return std::string_view(text.data(), text.size()); };
    head.method = view(message.method_string());
    head.target = view(message.target());
    head.old = message.version() < 11;
    for (const auto& it : message)
        head.fields.push_back({view(it.name_string()), view(it.value())});
    head_only_ = head.method == "HEAD";
    call_ = detail::read_call(head, impl_->door);
    call_.client += from_;
    co_return true;
}

asio::awaitable<bool> Session::read_body() {
    parser_->body_limit(options().body_limit);
    parser_->eager(true);
    if (call_.expects_continue && in_.empty() && !parser_->is_done())
        if (!co_await write("HTTP/1.1 100 Continue\r\n\r\n")) co_return false;
    while (!parser_->is_done()) {
        error_code ec = http::error::need_more;
        if (!in_.empty())
            in_.erase(0, parser_->put(asio::const_buffer(in_.data(), in_.size()), ec));
        if (parser_->is_done()) break;
        if (ec == http::error::body_limit) {
            co_await turn_away(
                413, fmt::format("the body is over the limit of {} bytes", options().body_limit));
            co_return false;
        }
        // What Beast cannot go on with is the head of a chunk, which is short.
        if ((ec && ec != http::error::need_more) || in_.size() >= read_ahead) {
            co_await turn_away(400, "the chunks of the body are not HTTP/1.1");
            co_return false;
        }
        if (!co_await more(Clock::now() + options().body_time)) {
            if (!gone_) co_await turn_away(408, "the body does not come on");
            co_return false;
        }
    }
    co_return true;
}

asio::awaitable<void> Session::serve() {
    if (call_.refusal.status) {
        ++impl_->stats.refused;
        co_await refuse(call_.refusal);
        co_return;
    }
    if (call_.post && !co_await read_body()) {
        call_.keep_alive = false;
        co_return;
    }
    asked_at_ = Clock::now();
    if (call_.place == Place::health) {
        co_await answer(200, json_type, R"({"status": "ok"})");
    } else if (call_.place == Place::metrics) {
        std::optional<unsigned> in_flight;
        if (options().in_flight) in_flight = options().in_flight();
        impl_->stats.connections = unsigned(impl_->sessions.size());
        const auto text = detail::metrics_text(impl_->stats, in_flight);
        co_await answer(200, "text/plain; version=0.0.4", text);
    } else if (call_.place == Place::models && !(options().server_models && options().server)) {
        const auto list = detail::models_body(options().model);
        co_await answer(200, json_type, list);
    } else if (call_.place == Place::models || call_.place == Place::plain) {
        co_await ask_server();
    } else {
        co_await ask_model();
    }
}

// What is no question to a model goes to the server as it is, past the queue.
asio::awaitable<void> Session::ask_server() {
    if (!options().server) {
        const Refusal refusal{404,
                              "there is nothing here but /v1/chat/completions, /v1/completions, "
                              "/v1/messages and /v1/models",
                              {}};
        co_await refuse(refusal);
        co_return;
    }
    auto job = std::make_shared<Job>(impl_->executor);
    Request request;
    request.endpoint = call_.endpoint;
    request.method = call_.method;
    request.body = std::move(parser_->get().body());
    request.plain = true;
    ++impl_->stats.open;
    options().server->async_complete(
        std::move(request), {},
        asio::bind_executor(impl_->executor,
                            asio::bind_cancellation_slot(
                                job->cancel.slot(), [impl = impl_, job](error_code, Response it) {
                                    --impl->stats.open;
                                    job->done = true;
                                    job->response = std::move(it);
                                    if (job->listener) job->listener->wake();
                                    impl->check_closed();
                                })));
    fill();
    job->listener = this;
    while (!job->done && !gone_) co_await wait(Clock::time_point::max());
    job->listener = nullptr;
    if (!job->done) job->cancel.emit(asio::cancellation_type::terminal);
    if (gone_) co_return;
    const auto& response = job->response;
    // mlx_lm.server ends its list before it has begun where it finds no folder of models.
    if (call_.place == Place::models && (response.outcome || detail::check_object(response.body))) {
        const auto list = detail::models_body(options().model);
        co_await answer(200, json_type, list);
    } else if (response.outcome && (response.status < 400 || response.body.empty())) {
        const auto refusal = detail::refusal_of(response); // it is not there, or leads elsewhere
        co_await refuse(refusal);
    } else {
        const auto& type = response.content_type;
        co_await answer(response.status, type.empty() ? json_type : type, response.body);
    }
}

asio::awaitable<void> Session::ask_model() {
    auto asked = detail::read_asked(std::move(parser_->get().body()));
    if (!asked.error.empty()) {
        ++impl_->stats.refused;
        const Refusal refusal{400, asked.error, {}};
        co_await refuse(refusal);
        co_return;
    }
    if (asked.model.empty()) asked.model = options().model;
    auto job = impl_->running(call_, asked.body);
    if (!job) job = impl_->start(call_, asked);
    if (auto* before = std::exchange(job->listener, this)) before->wake();
    writer_.reset();
    job->flow->go();
    job->linger.cancel();
    fill();
    bool delivered = false;
    try {
        if (asked.stream)
            delivered = co_await stream(job, asked);
        else
            delivered = co_await whole(job);
    } catch (...) { // out of memory: the job must not tell us any more
        leave(job, false);
        throw;
    }
    leave(job, delivered);
}

void Session::leave(const std::shared_ptr<Job>& job, bool delivered) {
    if (job->listener != this) return close(); // the client has asked again elsewhere
    const auto waited = Clock::now() - asked_at_ + std::chrono::milliseconds(100);
    impl_->leave(job, delivered, call_.patience.count() > 0 && waited >= call_.patience);
}

asio::awaitable<bool> Session::whole(const std::shared_ptr<Job>& job) {
    while (!job->done && mine(*job)) co_await wait(Clock::time_point::max());
    if (!mine(*job)) co_return false;
    if (job->response.outcome) {
        const auto refusal = detail::refusal_of(job->response);
        co_return co_await refuse(refusal);
    }
    const auto body = detail::whole_answer(call_.place, job->response);
    co_return co_await answer(200, json_type, body);
}

// What has come since the last write goes out as one event: a client that reads slowly gets fewer.
asio::awaitable<bool> Session::stream(const std::shared_ptr<Job>& job, const Asked& asked) {
    const bool old = parser_->get().version() < 11;
    writer_ =
        detail::make_event_writer(call_.place, asked, fmt::format("evalrt-{}", ++impl_->last_id),
                                  std::chrono::duration_cast<std::chrono::seconds>(
                                      std::chrono::system_clock::now().time_since_epoch())
                                      .count());
    std::string out; // not written
    bool begun = false;
    const auto add = [&](std::string_view events) {
        if (!std::exchange(begun, true))
            out = detail::answer_head(200, "text/event-stream", {}, call_.keep_alive, old);
        if (old)
            out += events;
        else
            out += fmt::format("{:x}\r\n{}\r\n", events.size(), events);
    };
    sent_ = 0;
    while (mine(*job)) {
        const auto& text = job->text;
        if (!job->done && text.size() > sent_ && live(*job)) {
            add(writer_->text(std::string_view(text).substr(sent_)));
            sent_ = text.size();
            if (!co_await write(out)) co_return false;
            out.clear();
            job->flow->go();
        } else if (job->done) {
            break;
        } else {
            co_await wait(Clock::time_point::max());
        }
    }
    if (!mine(*job)) co_return false;
    Refusal refusal;
    if (!job->response.outcome) {
        if (const auto rest = writer_->end(job->response)) {
            add(*rest);
            if (!old) out += "0\r\n\r\n";
            if (old) call_.keep_alive = false;
            co_return co_await write(out);
        }
        refusal = {502, "the server's answer does not go on where its text was", "malformed"};
    } else {
        refusal = detail::refusal_of(job->response);
    }
    if (!begun) co_return co_await refuse(refusal);
    // Without the last chunk: nobody can take this for an answer.
    call_.keep_alive = false;
    add(writer_->failed(refusal));
    co_return co_await write(out);
}

Failure Core::open() {
    error_code ec;
    acceptor.open(place.protocol(), ec);
    if (!ec) acceptor.set_option(Tcp::acceptor::reuse_address(true), ec);
    if (!ec) acceptor.bind(place, ec);
    if (!ec) acceptor.listen(asio::socket_base::max_listen_connections, ec);
    if (!ec) place = acceptor.local_endpoint(ec);
    if (ec)
        return {ec, fmt::format("cannot listen at {} port {}: {}", options.host, options.port,
                                ec.message())};
    door.port = place.port();
    asio::co_spawn(executor, accept(), [self = shared_from_this()](std::exception_ptr) {});
    return {};
}

asio::awaitable<void> Core::accept() {
    while (!closing) {
        if (sessions.size() < options.connections) {
            auto [ec, socket] = co_await acceptor.async_accept(token);
            if (closing) co_return;
            if (!ec) {
                error_code ignored;
                socket.set_option(Tcp::no_delay(true), ignored);
                try {
                    std::make_shared<Session>(shared_from_this(), std::move(socket))->start();
                } catch (const std::bad_alloc&) {
                    // It is closed, and the others go on.
                }
                continue;
            }
        }
        // Too many, by our own limit or the system's: they wait in the backlog.
        pause.expires_after(std::chrono::milliseconds(50));
        co_await pause.async_wait(token);
    }
}

// The same request, if it may be shared: its client has gone, or says that it is the same. Two
// clients that ask the same are otherwise two samples.
std::shared_ptr<Job> Core::running(const Call& call, const Text& body) {
    const auto [begin, end] = jobs.equal_range(key(call.endpoint, body));
    for (auto it = begin; it != end; ++it) {
        const auto& job = it->second;
        const bool same =
            !call.idempotency_key.empty() && call.idempotency_key == job->idempotency_key;
        if ((job->listener && !same) || job->endpoint != call.endpoint ||
            job->body.view() != body.view())
            continue;
        ++stats.joined;
        return job;
    }
    return nullptr;
}

std::shared_ptr<Job> Core::start(const Call& call, const Asked& asked) {
    auto job = std::make_shared<Job>(executor);
    job->endpoint = call.endpoint;
    job->idempotency_key = call.idempotency_key;
    job->body = asked.body;
    jobs.emplace(key(job->endpoint, job->body), job);
    ++stats.requests;
    ++stats.open;
    job->turn = conversations.asked(job->endpoint, job->body, Clock::now());
    Request request;
    request.endpoint = job->endpoint;
    request.body = job->body;
    request.client = call.client;
    if (job->turn.turn > 0) {
        ++stats.continued;
        if (job->body.view().size() >= long_conversation) {
            request.session = fmt::format("evalrt-{}", job->turn.conversation);
            request.turn = job->turn.turn;
            request.pause = job->turn.pause;
        }
    }
    request.stream = asked.stream;
    request.flow = job->flow;
    TextSink on_text;
    if (asked.stream)
        on_text = [weak = std::weak_ptr(job)](std::string_view piece) {
            const auto it = weak.lock();
            if (!it) return;
            if (it->text.empty() && piece.empty()) it->text_first = false;
            it->text += piece;
            if (it->listener) it->listener->hear(*it);
        };
    backend.async_complete(
        std::move(request), std::move(on_text),
        asio::bind_executor(executor, asio::bind_cancellation_slot(
                                          job->cancel.slot(), [self = shared_from_this(),
                                                               job](error_code, Response response) {
                                              self->ended(job, std::move(response));
                                          })));
    return job;
}

void Core::ended(const std::shared_ptr<Job>& job, Response response) {
    --stats.open;
    count(response);
    if (response.outcome)
        conversations.failed(job->turn);
    else
        conversations.answered(job->turn, response.text, Clock::now());
    job->done = true;
    job->response = std::move(response);
    if (job->listener)
        job->listener->wake();
    else if (job->response.outcome || closing)
        forget(*job); // nobody comes back for that
    check_closed();
}

void Core::count(const Response& response) {
    if (response.outcome)
        ++stats.failed[std::size_t(*response.outcome) - 1];
    else
        ++stats.answered;
    const auto& usage = response.usage;
    stats.prompt_tokens += usage.prompt_tokens.value_or(0);
    stats.cached_tokens += usage.cached_tokens.value_or(0);
    stats.completion_tokens += usage.completion_tokens.value_or(0);
    if (!response.outcome && !(usage.prompt_tokens && usage.completion_tokens) &&
        !std::exchange(said_no_usage, true) && options.log)
        options.log("the server does not say how many tokens it has read or written: clients, "
                    "which rely on it, are told 0");
    if (options.on_answer) options.on_answer(response);
}

void Core::leave(const std::shared_ptr<Job>& job, bool delivered, bool asks_again) {
    job->listener = nullptr;
    if (asks_again) job->flow->go(); // else what was not read stays held back until it is cancelled
    if (delivered) return forget(*job); // nobody else may get the same answer
    if (closing) return job->cancel.emit(asio::cancellation_type::terminal);
    job->linger.expires_after(asks_again ? options.retry_linger : options.linger);
    job->linger.async_wait([self = shared_from_this(), job](error_code ec) {
        if (ec || job->listener) return;
        self->forget(*job);
        job->cancel.emit(asio::cancellation_type::terminal);
    });
}

void Core::forget(const Job& job) {
    const auto [begin, end] = jobs.equal_range(key(job.endpoint, job.body));
    for (auto it = begin; it != end; ++it)
        if (it->second.get() == &job) return void(jobs.erase(it));
}

void Core::close() {
    if (std::exchange(closing, true)) return;
    error_code ignored;
    acceptor.close(ignored);
    pause.cancel();
    for (auto* session : sessions) session->close();
    const auto running = std::exchange(jobs, {});
    for (const auto& [key, job] : running) {
        job->linger.cancel();
        job->cancel.emit(asio::cancellation_type::terminal);
    }
}

void Core::check_closed() {
    if (!closing || stats.open > 0 || !sessions.empty()) return;
    for (auto& handler : std::exchange(closers, {}))
        detail::complete(executor, std::move(handler), error_code());
}

} // namespace

struct Gateway::Impl final : Core {
    using Core::Core;
};

Gateway::Gateway(asio::any_io_executor executor, Backend& backend, GatewayOptions options)
    : impl_(std::make_shared<Impl>(std::move(executor), backend, std::move(options))) {}

Gateway::~Gateway() {
    impl_->close();
    impl_->options.on_answer = {};
    impl_->options.log = {};
}

Failure Gateway::open() { return impl_->open(); }

std::uint16_t Gateway::port() const { return impl_->place.port(); }

std::string Gateway::url() const {
    auto address = impl_->place.address();
    if (address.is_unspecified()) address = asio::ip::address_v4::loopback();
    const auto host = address.to_string();
    return address.is_v6() ? fmt::format("http://[{}]:{}", host, port())
                           : fmt::format("http://{}:{}", host, port());
}

GatewayStats Gateway::stats() const {
    auto stats = impl_->stats;
    stats.connections = unsigned(impl_->sessions.size());
    return stats;
}

void Gateway::close(asio::any_completion_handler<void(error_code)> handler) {
    impl_->closers.push_back(std::move(handler));
    impl_->close();
    impl_->check_closed();
}

} // namespace evalrt
