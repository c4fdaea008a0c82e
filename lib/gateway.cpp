#include "evalrt/gateway.hpp"

#include "conversations.hpp"
#include "evalrt/detail/complete.hpp"
#include "evalrt/http_backend.hpp"
#include "gateway_wire.hpp"
#include "http_request.hpp"
#include "job.hpp"
#include "text_hash.hpp"
#include "wire.hpp"

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/bind_executor.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <set>
#include <stdexcept>
#include <unordered_map>

namespace evalrt {
namespace {

using Tcp = asio::ip::tcp;
using detail::Asked;
using detail::Call;
using detail::Place;
using detail::Refusal;

template <class T = void>
using Task = detail::Job<T>;

constexpr auto token = asio::as_tuple(asio::use_awaitable);
constexpr std::string_view json_type = "application/json";
constexpr std::string_view go_on = "HTTP/1.1 100 Continue\r\n\r\n";
constexpr std::size_t long_conversation = 16 << 10; // bytes: less is soon prefilled again

class Session;
struct Core;

// A request at the Backend, and what has come of it. It outlives the connection that asked for it,
// but not for long.
struct Job {
    std::string endpoint, idempotency_key;
    Text body;
    std::uint64_t key = 0; // of both
    std::uint32_t client = 0;
    detail::Conversations::Turn turn;
    asio::cancellation_signal cancel;
    std::optional<asio::steady_timer> linger; // since its client has gone
    std::shared_ptr<TextFlow> flow;           // null: it is not streamed
    Session* listener = nullptr;              // who is told of news; null: its client has gone
    std::string text;                         // so far
    bool text_first = true;                   // the answer began with text
    bool done = false;
    Response response;
};

// What has been read and not yet been used. Where a read is on its way, its place stays.
class Inbox {
public:
    std::string_view view() const { return {memory_.get() + begin_, end_ - begin_}; }
    std::size_t size() const { return end_ - begin_; }
    void use(std::size_t bytes) { begin_ += bytes; }

    // For the next read; none may be on its way.
    asio::mutable_buffer room(std::size_t wanted) {
        const auto have = size();
        if (begin_ == end_) begin_ = end_ = 0;
        if (capacity_ - end_ < wanted) {
            if (capacity_ < have + wanted) {
                auto larger = std::make_unique_for_overwrite<char[]>(have + wanted);
                if (have > 0) std::memcpy(larger.get(), memory_.get() + begin_, have);
                memory_ = std::move(larger);
                capacity_ = have + wanted;
            } else {
                std::memmove(memory_.get(), memory_.get() + begin_, have);
            }
            begin_ = 0;
            end_ = have;
        }
        return {memory_.get() + end_, capacity_ - end_};
    }
    void came(std::size_t bytes) { end_ += bytes; }

private:
    std::unique_ptr<char[]> memory_;
    std::size_t capacity_ = 0, begin_ = 0, end_ = 0;
};

// What all connections share.
struct Core : std::enable_shared_from_this<Core> {
    Core(asio::any_io_executor executor_, Backend& backend_, GatewayOptions options_)
        : executor(std::move(executor_)),
          backend(backend_),
          options(std::move(options_)),
          acceptor(executor),
          pause(executor),
          timer(executor) {
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
    Session* longest_idle() const;
    std::shared_ptr<Job> start(const Call& call, const Asked& asked, std::uint64_t key);
    std::shared_ptr<Job> running(const Call& call, const Text& body, std::uint64_t key);
    void leave(const std::shared_ptr<Job>& job, bool delivered, bool asks_again);
    void forget(const Job& job);
    void ended(const std::shared_ptr<Job>& job, Response response);
    void count(const Response& response);
    void close();
    void check_closed();
    void look(Clock::time_point at);

    static std::uint64_t key(std::string_view endpoint, std::string_view body) {
        return detail::text_hash(body) * 31 + detail::text_hash(endpoint);
    }

    asio::any_io_executor executor;
    Backend& backend;
    GatewayOptions options;
    detail::Door door;
    Tcp::endpoint place;
    Tcp::acceptor acceptor;
    asio::steady_timer pause;
    asio::steady_timer timer; // for the time limits of all connections, which are far away
    Clock::time_point looks_at = Clock::time_point::max();
    std::set<Session*> sessions;
    std::unordered_multimap<std::uint64_t, std::shared_ptr<Job>> jobs; // that can be joined
    GatewayStats stats;
    detail::Conversations conversations;
    std::uint64_t last_id = 0;
    bool closing = false, said_no_usage = false;
    std::vector<asio::any_completion_handler<void(error_code)>> closers;
};

// One connection. A read is always on its way, so that its end is seen at any time. Its coroutine
// waits for one event at a time: something read, news of its request, the end, the time.
class Session : public std::enable_shared_from_this<Session> {
public:
    Session(std::shared_ptr<Core> impl, Tcp::socket socket);
    ~Session();

    void start();
    void close();
    void wake() {
        if (!waiting_) return;
        const auto alive = std::move(self_);
        std::exchange(waiting_, nullptr).resume();
    }
    // A piece of text has come. Too much that the client has not taken, and no more is read.
    void hear(Job& job) {
        if (!live(job)) return;
        if (job.text.size() - sent_ > options().unread_limit) job.flow->hold();
        if (std::exchange(told_, true)) return; // pieces that come together go out together
        asio::post(impl_->executor, [self = shared_from_this()] {
            self->told_ = false;
            self->wake();
        });
    }

    // When its time is over; max: never.
    Clock::time_point until() const { return until_; }
    // Its last request is answered, and nothing of another one is there.
    bool idle() const { return idle_; }
    void late() {
        if (waiting_ && probe_at_ != Clock::time_point::max()) return probe();
        late_ = true;
        if (waiting_)
            wake();
        else
            close(); // it writes, and nobody reads
    }

private:
    const GatewayOptions& options() const { return impl_->options; }

    void fill(std::size_t room = 16 << 10) {
        if (reading_ || gone_ || said_all_ || in_.size() >= options().header_limit + read_ahead)
            return;
        reading_ = true;
        socket_.async_read_some(in_.room(room),
                                [self = shared_from_this()](error_code ec, std::size_t n) {
                                    self->reading_ = false;
                                    self->in_.came(n);
                                    if (ec) return self->input_ended(ec);
                                    // Its end is to be seen behind whatever it sends.
                                    if (self->asking_) self->fill();
                                    self->wake();
                                });
    }

    // An answer is on its way: the client's end is to be seen meanwhile.
    void watch() {
        asking_ = true;
        probe_pause_ = std::chrono::milliseconds(100);
        if (said_all_)
            probe();
        else
            fill();
    }

    // The client has gone, or only sends no more, as `nc -N` does. Both look the same until
    // something is written. An answer may have any number of 100s before it, but not in HTTP/1.0.
    void input_ended(error_code ec) {
        const bool may_read = asking_ && !head_.old && !(begun_ && writer_);
        if (ec != asio::error::eof || !may_read) return close();
        said_all_ = true;
        if (!begun_) probe();
    }

    // Whoever has gone answers the first write with a reset, and the next one fails.
    void probe() {
        error_code ec;
        socket_.write_some(asio::buffer(go_on), ec);
        if (ec && ec != asio::error::would_block) return close();
        limit(probe_at_ = Clock::now() + probe_pause_);
        probe_pause_ *= 2;
    }

    struct Event {
        Session& session;
        bool await_ready() const noexcept { return false; }
        void await_suspend(std::coroutine_handle<> waiting) {
            session.self_ = session.shared_from_this();
            session.waiting_ = waiting;
        }
        bool await_resume() const noexcept {
            session.until_ = Clock::time_point::max();
            return !session.late_;
        }
    };
    // False: the time has passed, and nothing has happened.
    Event wait(Clock::time_point until) {
        late_ = false;
        limit(std::min(until, probe_at_));
        return {*this};
    }
    void limit(Clock::time_point until) {
        until_ = until;
        impl_->look(until);
    }

    // False: there is nothing more, or not in time.
    Task<bool> more(Clock::time_point until, std::size_t room = 16 << 10) {
        const auto before = in_.size();
        fill(room);
        while (!gone_ && !said_all_ && in_.size() == before)
            if (!co_await wait(until) && in_.size() == before) break;
        co_return !gone_ && in_.size() > before;
    }

    // True: the client has it all, whatever it does then. Nearly always the socket has room for it.
    Task<bool> write(std::string_view head, std::string_view rest = {}) {
        if (gone_) co_return false;
        begun_ = true;
        probe_at_ = Clock::time_point::max();
        std::array<asio::const_buffer, 2> out{asio::buffer(head), asio::buffer(rest)};
        error_code ec;
        const auto written = socket_.write_some(out, ec);
        if (ec == asio::error::would_block) ec = {};
        if (!ec && written < head.size() + rest.size()) {
            const auto of_head = std::min(written, head.size());
            out[0] += of_head;
            out[1] += written - of_head;
            late_ = false;
            limit(Clock::now() + options().write_time);
            auto [error, n] = co_await detail::operation<error_code, std::size_t>(
                shared_from_this(),
                [&](auto handler) { asio::async_write(socket_, out, std::move(handler)); });
            until_ = Clock::time_point::max();
            ec = error;
        }
        if (ec) close();
        co_return !ec;
    }

    Task<bool> answer(int status, std::string_view type, std::string_view body,
                      std::string_view more_fields = {}) {
        const auto head = detail::answer_head(status, type, body.size(), call_.keep_alive,
                                              head_.old, more_fields);
        co_return co_await write(head, head_only_ ? std::string_view() : body);
    }

    Task<bool> refuse(const Refusal& refusal) {
        std::string fields;
        if (!call_.allow.empty()) fields.append("Allow: ").append(call_.allow).append("\r\n");
        if (refusal.status == 401) fields += "WWW-Authenticate: Bearer\r\n";
        const auto body = detail::error_body(call_.anthropic, refusal);
        co_return co_await answer(refusal.status, json_type, body, fields);
    }

    // For what is wrong before a request to the model.
    Task<bool> turn_away(int status, std::string message) {
        ++impl_->stats.refused;
        call_.keep_alive = false;
        const Refusal refusal{status, std::move(message), {}};
        co_return co_await refuse(refusal);
    }

    Task<> whole_life();
    Task<> run();
    Task<bool> read_head(bool first);
    Task<bool> read_body(std::string& body);
    Task<> serve();
    Task<> ask_model(std::string body);
    Task<> ask_server(std::string body);
    Task<bool> whole(const std::shared_ptr<Job>& job);
    Task<bool> stream(const std::shared_ptr<Job>& job, const Asked& asked);
    void leave(const std::shared_ptr<Job>& job, bool delivered);
    // Whether text goes out as it comes.
    bool live(const Job& job) const { return writer_ && (job.text_first || writer_->text_first()); }
    bool mine(const Job& job) const { return !gone_ && job.listener == this; }

    static constexpr std::size_t read_ahead = 16 << 10; // of what comes behind a head

    std::shared_ptr<Core> impl_;
    Tcp::socket socket_;
    Inbox in_;
    detail::RequestHead head_; // its views are good until more is read
    Call call_;
    std::uint32_t from_ = 0; // the client's address
    Clock::time_point asked_at_;
    std::unique_ptr<detail::EventWriter> writer_; // of the stream that is answered
    std::size_t sent_ = 0;                        // of its text
    bool reading_ = false, gone_ = false, head_only_ = false, told_ = false;
    bool idle_ = false;
    bool begun_ = false;    // something of the answer is written
    bool said_all_ = false; // the client sends no more
    Clock::time_point probe_at_ = Clock::time_point::max();
    std::chrono::milliseconds probe_pause_{0};

    Clock::time_point until_ = Clock::time_point::max();
    bool late_ = false;
    bool asking_ = false;             // an answer is on its way
    std::coroutine_handle<> waiting_; // for an event; null: it runs, or writes
    std::shared_ptr<Session> self_;   // meanwhile
    std::optional<Task<>> job_;       // the last one: its frames look at all the others
};

Session::Session(std::shared_ptr<Core> impl, Tcp::socket socket)
    : impl_(std::move(impl)), socket_(std::move(socket)) {
    error_code unknown;
    if (const auto peer = socket_.remote_endpoint(unknown); !unknown)
        from_ = std::uint32_t(std::hash<std::string>()(peer.address().to_string()));
    socket_.non_blocking(true, unknown);
    impl_->sessions.insert(this);
}

Session::~Session() {
    job_.reset();
    impl_->sessions.erase(this);
    if (impl_->sessions.empty()) { // nothing of ours may keep the context from its end
        impl_->timer.cancel();
        impl_->looks_at = Clock::time_point::max();
    }
    impl_->check_closed();
}

void Session::start() {
    job_.emplace(whole_life());
    job_->start();
}

void Session::close() {
    gone_ = true;
    error_code ignored;
    socket_.close(ignored);
    wake();
}

Task<> Session::whole_life() {
    try {
        co_await run();
    } catch (...) { // out of memory: the others go on
    }
    close();
}

Task<> Session::run() {
    for (bool first = true; co_await read_head(first); first = false) {
        co_await serve();
        if (gone_ || !call_.keep_alive) break;
    }
    // A close with something unread would reach the client as a reset, before our answer.
    if (gone_) co_return;
    error_code ignored;
    socket_.shutdown(Tcp::socket::shutdown_send, ignored);
    const auto until = Clock::now() + std::chrono::seconds(5);
    do in_.use(in_.size());
    while (co_await more(until));
}

// False: there is no further request.
Task<bool> Session::read_head(bool first) {
    call_ = {};
    head_.old = head_only_ = false;
    const auto& limits = options();
    auto until = Clock::now() + (first ? limits.header_time : limits.idle_time);
    bool begun = false;
    std::size_t end = 0;
    for (std::size_t seen = 0;;) {
        while (in_.view().starts_with("\r\n")) in_.use(2); // some send one too many after a body
        const auto bytes = in_.view();
        end = bytes.find("\r\n\r\n", seen - std::min<std::size_t>(seen, 3));
        // A line end without its first half is how two readers come to see two different requests.
        for (auto at = bytes.find('\n', seen); at < std::min(end, bytes.size());
             at = bytes.find('\n', at + 1))
            if (at == 0 || bytes[at - 1] != '\r') {
                co_await turn_away(400, "the request has a line end without a carriage return");
                co_return false;
            }
        if (std::min(end, bytes.size()) > limits.header_limit) {
            co_await turn_away(431, fmt::format("the headers are over the limit of {} bytes",
                                                limits.header_limit));
            co_return false;
        }
        if (end != bytes.npos) break;
        seen = bytes.size();
        if (!begun && seen > 0) {
            begun = true;
            if (!first) until = Clock::now() + limits.header_time;
        }
        idle_ = !first && !begun;
        const bool came = co_await more(until);
        idle_ = false;
        if (!came) {
            if (!gone_ && begun) co_await turn_away(408, "the headers took too long to come");
            co_return false;
        }
    }
    const auto bytes = in_.view().substr(0, end + 4);
    in_.use(bytes.size());
    if (const auto wrong = detail::read_request_head(bytes, head_); !wrong.empty()) {
        head_.old = false;
        co_await turn_away(400, "the request is not HTTP/1.1: " + wrong);
        co_return false;
    }
    head_only_ = head_.method == "HEAD";
    call_ = detail::read_call(head_, impl_->door);
    call_.client += from_;
    co_return true;
}

Task<bool> Session::read_body(std::string& body) {
    const auto limit = options().body_limit;
    if (call_.expects_continue && in_.size() == 0)
        if (!co_await write(go_on)) co_return false;
    if (!call_.chunked) body.reserve(std::min<std::size_t>(call_.length, 1 << 20));
    const auto begun = Clock::now();
    detail::ChunkedBody chunks;
    using State = detail::ChunkedBody::State;
    for (;;) {
        if (call_.chunked) {
            in_.use(chunks.take(in_.view(), body, limit));
            if (chunks.state() == State::done) co_return true;
            if (chunks.state() == State::large)
                co_await turn_away(413,
                                   fmt::format("the body is over the limit of {} bytes", limit));
            if (chunks.state() == State::bad)
                co_await turn_away(400, "the chunks of the body are not HTTP/1.1");
            if (chunks.state() != State::more) co_return false;
        } else {
            const auto piece = in_.view().substr(0, call_.length - body.size());
            body.append(piece);
            in_.use(piece.size());
            if (body.size() == call_.length) co_return true;
        }
        const std::size_t room = body.size() + (16 << 10) < call_.length ? 64 << 10 : 16 << 10;
        // Nor may it come for ever, a byte at a time.
        const auto credit = std::chrono::milliseconds(
            body.size() * 1000 / std::max<std::size_t>(options().body_rate, 1));
        const auto until = std::min(Clock::now(), begun + credit) + options().body_time;
        if (!co_await more(until, room)) {
            if (!gone_) co_await turn_away(408, "the body does not come on");
            co_return false;
        }
    }
}

Task<> Session::serve() {
    if (call_.refusal.status) {
        ++impl_->stats.refused;
        co_await refuse(call_.refusal);
        co_return;
    }
    std::string body;
    if (call_.post && !co_await read_body(body)) {
        call_.keep_alive = false;
        co_return;
    }
    begun_ = false;
    writer_.reset();
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
        co_await ask_server(std::move(body));
    } else {
        co_await ask_model(std::move(body));
    }
}

// What is no question to a model goes to the server as it is, past the queue.
Task<> Session::ask_server(std::string body) {
    if (!options().server) {
        const Refusal refusal{404,
                              "there is nothing here but /v1/chat/completions, /v1/completions, "
                              "/v1/messages and /v1/models",
                              {}};
        co_await refuse(refusal);
        co_return;
    }
    auto job = std::make_shared<Job>();
    Request request;
    request.endpoint = call_.endpoint;
    request.method = call_.method;
    request.body = std::move(body);
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
    job->listener = this;
    watch();
    while (!job->done && !gone_) co_await wait(Clock::time_point::max());
    job->listener = nullptr;
    asking_ = false;
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

Task<> Session::ask_model(std::string body) {
    auto asked = detail::read_asked(std::move(body));
    if (!asked.error.empty()) {
        ++impl_->stats.refused;
        const Refusal refusal{400, asked.error, {}};
        co_await refuse(refusal);
        co_return;
    }
    if (asked.model.empty()) asked.model = options().model;
    const auto key = Core::key(call_.endpoint, asked.body);
    auto job = impl_->running(call_, asked.body, key);
    if (!job) job = impl_->start(call_, asked, key);
    if (auto* before = std::exchange(job->listener, this)) before->wake();
    if (job->flow) job->flow->go();
    job->linger.reset();
    watch();
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
    asking_ = false;
    if (job->listener != this) return close(); // the client has asked again elsewhere
    const auto waited = Clock::now() - asked_at_ + std::chrono::milliseconds(100);
    impl_->leave(job, delivered, call_.patience.count() > 0 && waited >= call_.patience);
}

Task<bool> Session::whole(const std::shared_ptr<Job>& job) {
    while (!job->done && mine(*job)) co_await wait(Clock::time_point::max());
    if (!mine(*job)) co_return false;
    if (job->response.outcome) {
        const auto refusal = detail::refusal_of(job->response);
        co_return co_await refuse(refusal);
    }
    std::string changed;
    const auto body = detail::whole_answer(call_.place, job->response, changed);
    co_return co_await answer(200, json_type, body);
}

// What has come since the last write goes out as one event: a client that reads slowly gets fewer.
Task<bool> Session::stream(const std::shared_ptr<Job>& job, const Asked& asked) {
    const bool old = head_.old;
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
            detail::append_chunk(out, events);
    };
    sent_ = 0;
    while (mine(*job)) {
        const auto& text = job->text;
        if (!job->done && text.size() > sent_ && live(*job)) {
            add(writer_->text(std::string_view(text).substr(sent_)));
            sent_ = text.size();
            if (!co_await write(out)) co_return false;
            out.clear();
            if (job->flow) job->flow->go();
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
            if (!old) out += detail::last_chunk;
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
        if (sessions.size() < options.connections || longest_idle()) {
            auto [ec, socket] = co_await acceptor.async_accept(token);
            if (closing) co_return;
            if (ec || sessions.size() >= options.connections)
                if (auto* idle = longest_idle()) idle->close();
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

// Whose client has been silent longest since its last answer; null: all have something to do.
Session* Core::longest_idle() const {
    Session* oldest = nullptr;
    for (auto* it : sessions)
        if (it->idle() && (!oldest || it->until() < oldest->until())) oldest = it;
    return oldest;
}

// The same request, if it may be shared: its client had gone and is back, or says that it is the
// same. Two clients that ask the same are two samples.
std::shared_ptr<Job> Core::running(const Call& call, const Text& body, std::uint64_t key) {
    const auto [begin, end] = jobs.equal_range(key);
    for (auto it = begin; it != end; ++it) {
        const auto& job = it->second;
        const bool same =
            !call.idempotency_key.empty() && call.idempotency_key == job->idempotency_key;
        if ((job->listener && !same) || job->client != call.client ||
            job->endpoint != call.endpoint || job->body.view() != body.view())
            continue;
        ++stats.joined;
        return job;
    }
    return nullptr;
}

std::shared_ptr<Job> Core::start(const Call& call, const Asked& asked, std::uint64_t key) {
    auto job = std::allocate_shared<Job>(detail::SpareAllocator<Job>());
    job->endpoint = call.endpoint;
    job->idempotency_key = call.idempotency_key;
    job->body = asked.body;
    job->key = key;
    job->client = call.client;
    if (asked.stream) job->flow = std::make_shared<TextFlow>();
    jobs.emplace(key, job);
    ++stats.requests;
    ++stats.open;
    job->turn = conversations.asked(job->endpoint, job->body, Clock::now());
    Request request;
    request.endpoint = job->endpoint;
    request.body = job->body;
    request.client = call.client;
    request.conversation = job->turn.conversation;
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
    if (asks_again && job->flow)
        job->flow->go(); // else what was not read stays held back until it is cancelled
    if (delivered) return forget(*job); // nobody else may get the same answer
    if (closing) return job->cancel.emit(asio::cancellation_type::terminal);
    job->linger.emplace(executor, asks_again ? options.retry_linger : options.linger);
    job->linger->async_wait([self = shared_from_this(), job](error_code ec) {
        if (ec || job->listener) return;
        self->forget(*job);
        job->cancel.emit(asio::cancellation_type::terminal);
    });
}

void Core::forget(const Job& job) {
    const auto [begin, end] = jobs.equal_range(job.key);
    for (auto it = begin; it != end; ++it)
        if (it->second.get() == &job) return void(jobs.erase(it));
}

void Core::close() {
    if (std::exchange(closing, true)) return;
    error_code ignored;
    acceptor.close(ignored);
    pause.cancel();
    std::vector<std::shared_ptr<Session>> all; // which take themselves out
    for (auto* session : sessions) all.push_back(session->shared_from_this());
    for (const auto& session : all) session->close();
    const auto running = std::exchange(jobs, {});
    for (const auto& [key, job] : running) {
        job->linger.reset();
        job->cancel.emit(asio::cancellation_type::terminal);
    }
}

// One timer for all of them.
void Core::look(Clock::time_point at) {
    if (at >= looks_at) return;
    looks_at = at;
    timer.expires_at(at);
    timer.async_wait([weak = weak_from_this()](error_code ec) {
        const auto self = weak.lock();
        if (ec || !self) return;
        const auto now = Clock::now();
        auto next = Clock::time_point::max();
        std::vector<std::shared_ptr<Session>> over;
        for (auto* session : self->sessions)
            if (session->until() <= now)
                over.push_back(session->shared_from_this());
            else
                next = std::min(next, session->until());
        self->looks_at = Clock::time_point::max();
        self->look(next);
        for (const auto& session : over) session->late();
    });
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
