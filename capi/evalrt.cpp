// The C interface: copies in, guards, posts. What it promises stands in evalrt.h.
#include "evalrt.h"

#include "evalrt/evalrt.hpp"
#include "evalrt/gateway.hpp"
#include "json_text.hpp"
#include "wire.hpp"

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <future>
#include <iterator>
#include <mutex>
#include <new>
#include <random>
#include <stdexcept>
#include <thread>
#include <unordered_map>

#define EVALRT_EXPORT extern "C" __attribute__((visibility("default")))

struct evalrt_error {
    evalrt_code code;
    std::string message;
};

namespace {

using namespace evalrt;

// A field that goes where old callers' structs have padding would read what they left there.
static_assert(sizeof(evalrt_config) == offsetof(evalrt_config, gateway_token) + sizeof(char*));
static_assert(sizeof(evalrt_request) == offsetof(evalrt_request, name) + sizeof(char*));
static_assert(sizeof(evalrt_event) == offsetof(evalrt_event, attempts) + sizeof(std::uint64_t));
static_assert(sizeof(evalrt_code) == 4 && sizeof(evalrt_kind) == 4);

evalrt_code code_of(Errc errc) {
    switch (errc) {
    case Errc::unreachable: return EVALRT_UNREACHABLE;
    case Errc::exited: return EVALRT_EXITED;
    case Errc::rejected: return EVALRT_REJECTED;
    case Errc::rate_limited: return EVALRT_RATE_LIMITED;
    case Errc::overloaded: return EVALRT_OVERLOADED;
    case Errc::auth: return EVALRT_AUTH;
    case Errc::context_too_long: return EVALRT_CONTEXT_TOO_LONG;
    case Errc::malformed: return EVALRT_MALFORMED;
    case Errc::truncated: return EVALRT_TRUNCATED;
    case Errc::timed_out: return EVALRT_TIMED_OUT;
    case Errc::cancelled: return EVALRT_CANCELLED;
    case Errc::poison: return EVALRT_POISON;
    }
    return EVALRT_INTERNAL;
}

evalrt_code code_of(error_code code) {
    if (code == asio::error::operation_aborted) return EVALRT_CANCELLED;
    if (code == asio::error::invalid_argument) return EVALRT_INVALID;
    if (code.category() == journal_category()) return EVALRT_JOURNAL;
    return code.category() == category() ? code_of(Errc(code.value())) : EVALRT_INTERNAL;
}

struct Failed : std::runtime_error {
    Failed(evalrt_code c, const std::string& message) : std::runtime_error(message), code(c) {}
    evalrt_code code;
};

template <class... Args>
[[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) {
    throw Failed(EVALRT_INVALID, fmt::format(format, std::forward<Args>(args)...));
}

evalrt_error* no_memory() {
    static evalrt_error error{EVALRT_INTERNAL, "out of memory"};
    return &error;
}

evalrt_error* make_error(evalrt_code code, const char* message) noexcept {
    try {
        return new evalrt_error{code, message};
    } catch (...) {
        return no_memory();
    }
}

template <class F>
evalrt_error* guarded(F&& run) noexcept {
    try {
        run();
        return nullptr;
    } catch (const Failed& error) {
        return make_error(error.code, error.what());
    } catch (const std::invalid_argument& error) { // the library's word for bad options
        return make_error(EVALRT_INVALID, error.what());
    } catch (const std::bad_alloc&) {
        return no_memory();
    } catch (const std::exception& error) {
        return make_error(EVALRT_INTERNAL, error.what());
    } catch (...) {
        return make_error(EVALRT_INTERNAL, "unknown exception");
    }
}

/// The caller's struct as far as the caller knows it, zero beyond.
template <class T>
T take(const T* given, const char* name) {
    if (!given) refuse("the {} is NULL", name);
    std::size_t size = 0;
    std::memcpy(&size, given, sizeof size);
    if (size == 0) refuse("{}.struct_size is 0: set it to sizeof({})", name, name);
    if (size > sizeof(T))
        refuse("{}.struct_size is {}, and this library knows {} bytes: it is older than the "
               "evalrt.h that you compile with; install both from one version",
               name, size, sizeof(T));
    if (size % alignof(T) != 0)
        refuse("{}.struct_size is {}, which no version has: set it to sizeof({})", name, size,
               name);
    T copy{};
    std::memcpy(&copy, given, size);
    return copy;
}

std::string string_of(const char* text) { return text ? text : ""; }

Order order_of(const char* name) {
    const std::string_view order = name ? name : "planned";
    if (order == "planned") return Order::planned;
    if (order == "fifo") return Order::fifo;
    refuse("the order is \"{}\"; known are planned and fifo", order);
}

Wire wire_of(std::string_view name) {
    if (name == "openai") return Wire::openai;
    if (name == "anthropic") return Wire::anthropic;
    refuse("the wire is \"{}\"; known are openai and anthropic", name);
}

std::uint16_t port_of(std::uint32_t port, const char* whose) {
    if (port > 65535) refuse("the {} is {}: it ends at 65535", whose, port);
    return std::uint16_t(port);
}

RuntimeOptions options_of(const evalrt_config& config) {
    RuntimeOptions options;
    if (config.backend) options.backend = config.backend;
    options.url = string_of(config.url);
    options.model = string_of(config.model);
    options.executable = string_of(config.executable);
    for (auto* arg = config.server_args; arg && *arg; ++arg) options.server_args.push_back(*arg);
    options.port = port_of(config.port, "port");
    if (config.max_context > 0) options.max_context = config.max_context;
    options.max_in_flight = config.max_in_flight;
    options.order = order_of(config.order);
    if (config.startup_timeout_ms > 0)
        options.startup_timeout = std::chrono::milliseconds(config.startup_timeout_ms);
    options.api_key = string_of(config.api_key);
    options.ca_file = string_of(config.ca_file);
    options.journal.path = string_of(config.journal);
    if (config.wire) options.wire = wire_of(config.wire);
    options.override_model = config.gateway && !options.model.empty();
    options.probe = options.ask_first = !config.no_probe;
    return options;
}

/// Nothing: none is asked for.
std::optional<GatewayOptions> gateway_of(const evalrt_config& config) {
    GatewayOptions options;
    options.port = port_of(config.gateway_port, "gateway_port");
    options.token = string_of(config.gateway_token);
    options.model = string_of(config.model);
    if (config.gateway_token && options.token.empty())
        refuse("the gateway_token is empty: NULL asks for none");
    if (std::any_of(options.token.begin(), options.token.end(),
                    [](char c) { return c <= ' ' || c >= 0x7f; }))
        refuse("the gateway_token has a space, a control character or no ASCII in it");
    if (config.gateway) return options;
    if (options.port > 0 || !options.token.empty())
        refuse("gateway_port and gateway_token go with gateway: set it to true");
    return {};
}

/// {key: content, "temperature", "max_tokens"}.
std::string body_of(const evalrt_request& given, std::string_view key, std::string_view content) {
    if (!std::isfinite(given.temperature)) refuse("the temperature is no number");
    std::string body;
    body.reserve(content.size() + 100);
    body.append("{\"").append(key).append("\": ").append(content);
    fmt::format_to(std::back_inserter(body), ", \"temperature\": {}", given.temperature);
    if (given.max_tokens > 0)
        fmt::format_to(std::back_inserter(body), ", \"max_tokens\": {}", given.max_tokens);
    return body += '}';
}

std::string with_extra(const evalrt_request& given, std::string_view key, std::string body) {
    if (!given.extra_json) return body;
    if (const auto error = detail::object_error(given.extra_json))
        refuse("extra_json is {}", *error);
    std::vector<detail::Change> changes;
    for (const auto& it : detail::members(given.extra_json)) {
        if (it.key == key) refuse("extra_json has \"{}\" once more", key);
        changes.push_back({it.key, std::string(it.value)});
    }
    return detail::with_changes(body, changes);
}

std::string prompt_body(const evalrt_request& given) {
    auto body = body_of(given, "prompt", detail::json_string(given.prompt));
    if (detail::object_error(body)) refuse("the prompt is not UTF-8");
    return with_extra(given, "prompt", std::move(body));
}

std::string chat_body(const evalrt_request& given) {
    auto body = body_of(given, "messages", given.messages_json);
    std::vector<detail::Member> list;
    if (const auto error = detail::object_error(body, &list, std::strlen(R"({"messages": )")))
        refuse("messages_json is {}", *error);
    const std::size_t own = given.max_tokens > 0 ? 3 : 2;
    if (list.size() != own || !list.front().value.starts_with('['))
        refuse("messages_json is not a JSON array");
    return with_extra(given, "messages", std::move(body));
}

std::string whole_body(const evalrt_request& given) {
    if (given.extra_json || given.temperature != 0 || given.max_tokens > 0)
        refuse("extra_json, temperature and max_tokens go with a prompt or messages_json: write "
               "them into body_json");
    if (const auto error = detail::object_error(given.body_json)) refuse("body_json is {}", *error);
    return given.body_json;
}

Request request_of(const evalrt_request& given) {
    const int bodies = !!given.prompt + !!given.messages_json + !!given.body_json;
    if (bodies != 1)
        refuse("the request has {} of prompt, messages_json and body_json: set exactly one",
               bodies == 0 ? "none" : "more than one");
    if (given.endpoint && !given.body_json) refuse("the endpoint goes with body_json only");
    Request request;
    if (given.prompt) request.endpoint = "/v1/completions";
    if (given.endpoint) request.endpoint = given.endpoint;
    if (const auto error = detail::check_endpoint(request.endpoint))
        refuse("the endpoint is {}", *error);
    if (given.turn > INT_MAX) refuse("the turn is {}", given.turn);
    request.body = given.prompt          ? prompt_body(given)
                   : given.messages_json ? chat_body(given)
                                         : whole_body(given);
    request.session = string_of(given.session);
    request.name = string_of(given.name);
    request.turn = int(given.turn);
    request.deadline = std::chrono::milliseconds(given.timeout_ms);
    request.stream = given.stream;
    return request;
}

struct Call {
    Call(Request r, evalrt_event_fn f, void* u) : request(std::move(r)), on_event(f), user(u) {}

    Request request;
    evalrt_event_fn on_event;
    void* user;
    evalrt_id id = 0;
    asio::cancellation_signal cancel;
};

evalrt_event event_of(const Call& call, evalrt_kind kind, const std::string& text) {
    evalrt_event event{};
    event.struct_size = sizeof event;
    event.id = call.id;
    event.kind = kind;
    event.text = text.c_str();
    event.text_size = text.size();
    event.prompt_tokens = event.cached_tokens = event.completion_tokens = -1;
    event.first_text_ms = -1;
    return event;
}

/// An answer that a check of parity may ask for again.
struct Sampled {
    evalrt_id id;
    Request request;
    std::string text;

    std::string name() const { return request.name.empty() ? std::to_string(id) : request.name; }
};

struct ParityCheck {
    std::vector<Sampled> sample;
    std::size_t next = 0;
    Parity parity;
    std::promise<Failure> done;
};

/// What EVALRT_DONE has and EVALRT_TEXT has not.
void fill(evalrt_event& event, const Response& response) {
    event.http_status = response.status;
    if (!response.body.empty()) event.response_json = response.body.c_str();
    event.response_json_size = response.body.size();
    event.prompt_tokens = response.usage.prompt_tokens.value_or(-1);
    event.cached_tokens = response.usage.cached_tokens.value_or(-1);
    event.completion_tokens = response.usage.completion_tokens.value_or(-1);
    event.queued_ms = response.timing.queued.count();
    event.first_text_ms = response.timing.first_text.value_or(Timing::Millis(-1)).count();
    event.total_ms = response.timing.total.count();
    event.attempts = response.attempts;
}

} // namespace

// Fields without a remark belong to the loop's thread.
struct evalrt_runtime {
    explicit evalrt_runtime(const evalrt_config& config);

    void open();
    void submit(std::unique_ptr<Call> call, evalrt_id* id);
    void cancel(evalrt_id id);
    void close();
    void release();
    void check_parity();
    bool running() const;
    std::string summary() const;

    std::string url, model; // do not change once it is open

private:
    bool on_loop() { return io_.get_executor().running_in_this_thread(); }
    Failure on_open();
    Failure open_gateway();
    void loop();
    void log(std::string_view line);
    void admit();
    void start(std::unique_ptr<Call> call);
    void ended(evalrt_id id, Response response);
    void record(const Response& response, bool given_up);
    void sample(const Call& call, const Response& response);
    void begin_check(std::unique_ptr<ParityCheck> check);
    void ask_again();
    void end_check(Failure failure);
    void look();
    void watch();
    void end_all();
    void stop_if_idle();

    asio::io_context io_{1};
    asio::executor_work_guard<asio::io_context::executor_type> work_ = make_work_guard(io_);
    asio::steady_timer watch_{io_};
    std::unique_ptr<Runtime> runtime_;
    std::optional<GatewayOptions> gateway_options_;
    std::unique_ptr<Gateway> gateway_; // until it has ended
    std::unordered_map<evalrt_id, std::unique_ptr<Call>> calls_;
    std::vector<Sampled> sample_; // of what was answered, each as likely as the others
    std::size_t sample_size_;
    std::uint64_t sampled_from_ = 0;
    std::mt19937_64 random_;
    std::unique_ptr<ParityCheck> check_; // while it runs
    void (*on_log_)(void*, const char*);
    void* log_user_;
    bool starts_server_;
    bool ending_ = false;
    bool released_ = false; // from a callback: the loop frees all when it ends
    Failure journal_failure_;

    mutable std::mutex mutex_; // of these:
    std::vector<std::unique_ptr<Call>> inbox_;
    evalrt_id last_id_ = 0;
    bool closed_ = false;
    bool running_ = true;
    Report report_;
    SchedulerStats stats_;
    std::string one_by_one_; // as it is now: Report's notes stay
    std::optional<Clock::time_point> first_, last_;

    std::mutex joining_; // of this, once it is open:
    std::thread thread_;
};

evalrt_runtime::evalrt_runtime(const evalrt_config& config)
    : gateway_options_(gateway_of(config)),
      sample_size_(config.parity),
      on_log_(config.on_log),
      log_user_(config.log_user) {
    auto options = options_of(config);
    starts_server_ = options.url.empty();
    options.log = [this](std::string_view line) { log(line); };
    options.journal.on_failure = [this](Failure failure) {
        journal_failure_ = std::move(failure);
        log(journal_failure_.detail);
    };
    report_.backend = options.backend;
    report_.order = options.order == Order::fifo ? "fifo" : "planned";
    runtime_ = std::make_unique<Runtime>(io_.get_executor(), std::move(options));
}

void evalrt_runtime::open() {
    std::promise<Failure> opened;
    auto outcome = opened.get_future();
    runtime_->async_open(
        [this, opened = std::move(opened)](error_code code, std::string why) mutable {
            Failure failure{code, std::move(why)};
            if (!failure) failure = on_open();
            if (code) {
                runtime_.reset();
                work_.reset();
            } else if (failure) {
                end_all();
            }
            opened.set_value(std::move(failure));
        });
    thread_ = std::thread([this] { loop(); });
    const auto failure = outcome.get();
    if (!failure) return;
    thread_.join();
    throw Failed(code_of(failure.code), failure.detail);
}

Failure evalrt_runtime::on_open() {
    url = runtime_->url();
    model = runtime_->model();
    {
        const std::lock_guard lock(mutex_);
        report_.model = model;
        report_.max_in_flight = runtime_->row().in_flight;
        if (!runtime_->server_version().empty())
            report_.server_version = runtime_->server_version();
        report_.describe(runtime_->row());
    }
    if (gateway_options_)
        if (auto failure = open_gateway()) return failure;
    if (starts_server_) watch();
    return {};
}

Failure evalrt_runtime::open_gateway() {
    auto& options = *gateway_options_;
    options.server_models = options.model.empty();
    if (options.model.empty()) options.model = model;
    options.server = &runtime_->server();
    options.in_flight = [this] { return runtime_->backend().stats().in_flight; };
    options.on_answer = [this](const Response& response) {
        record(response, response.outcome == Errc::cancelled);
    };
    options.log = [this](std::string_view line) { log(line); };
    auto gateway =
        std::make_unique<Gateway>(io_.get_executor(), runtime_->front(), std::move(options));
    if (auto failure = gateway->open())
        return {asio::error::invalid_argument, "the gateway: " + failure.detail};
    gateway_ = std::move(gateway);
    url = gateway_->url() + "/v1";
    return {};
}

void evalrt_runtime::loop() {
    while (auto* error = guarded([this] { io_.run(); })) {
        log("internal error: " + error->message);
        evalrt_error_free(error);
    }
    if (released_) delete this;
}

void evalrt_runtime::log(std::string_view line) {
    {
        const std::lock_guard lock(mutex_);
        report_.note(line);
    }
    if (on_log_ && !released_) on_log_(log_user_, std::string(line).c_str());
}

// What was submitted goes through the inbox, and whoever names an id empties the inbox first: what
// is posted by a callback and by another thread comes in no certain order.
void evalrt_runtime::submit(std::unique_ptr<Call> call, evalrt_id* id) {
    const std::lock_guard lock(mutex_);
    if (closed_) throw Failed(EVALRT_CANCELLED, "the runtime is closed");
    if (inbox_.empty()) asio::post(io_, [this] { admit(); });
    call->id = last_id_ + 1;
    inbox_.push_back(std::move(call));
    ++last_id_;
    if (id) *id = last_id_;
    if (!first_) first_ = Clock::now();
}

void evalrt_runtime::cancel(evalrt_id id) {
    const std::lock_guard lock(mutex_);
    if (id > last_id_ || closed_) return; // it must not hit one that is submitted later
    asio::post(io_, [this, id] {
        admit();
        if (const auto it = calls_.find(id); it != calls_.end())
            it->second->cancel.emit(asio::cancellation_type::terminal);
    });
}

void evalrt_runtime::admit() {
    std::vector<std::unique_ptr<Call>> calls;
    {
        const std::lock_guard lock(mutex_);
        calls.swap(inbox_);
    }
    for (auto& call : calls) start(std::move(call));
}

void evalrt_runtime::start(std::unique_ptr<Call> owned) {
    auto& call = *(calls_[owned->id] = std::move(owned));
    TextSink on_text = [&call](std::string_view piece) {
        if (piece.empty()) return;
        const std::string text(piece);
        const auto event = event_of(call, EVALRT_TEXT, text);
        call.on_event(call.user, &event);
    };
    auto done = [this, id = call.id](error_code, Response response) {
        ended(id, std::move(response));
    };
    runtime_->front().async_complete(
        sample_size_ > 0 ? call.request : std::exchange(call.request, {}), std::move(on_text),
        asio::bind_cancellation_slot(call.cancel.slot(), std::move(done)));
}

void evalrt_runtime::ended(evalrt_id id, Response response) {
    const auto call = std::move(calls_.extract(id).mapped());
    // What closing ended has not failed: it was not run.
    record(response, ending_ && response.outcome == Errc::cancelled);
    if (sample_size_ > 0 && !response.outcome) sample(*call, response);
    auto event = event_of(*call, EVALRT_DONE, response.text);
    evalrt_error error{};
    if (response.outcome) {
        error = {code_of(*response.outcome), std::move(response.detail)};
        if (journal_failure_ && response.outcome == Errc::cancelled)
            error = {EVALRT_JOURNAL, journal_failure_.detail};
        if (error.message.empty()) error.message = make_error_code(*response.outcome).message();
        event.error = &error;
    }
    fill(event, response);
    call->on_event(call->user, &event);
    stop_if_idle();
}

void evalrt_runtime::record(const Response& response, bool given_up) {
    const std::lock_guard lock(mutex_);
    if (given_up)
        ++report_.not_run;
    else
        report_.add(response);
    look();
    stats_ = runtime_->backend().stats(); // not after a check of parity, which is no part of a run
    one_by_one_ = runtime_->one_by_one();
    last_ = Clock::now();
    const auto begun = *last_ - std::chrono::duration_cast<Clock::duration>(response.timing.total);
    first_ = std::min(first_.value_or(begun), begun); // the gateway's are not submitted
}

void evalrt_runtime::sample(const Call& call, const Response& response) {
    const auto place = std::uniform_int_distribution(std::uint64_t(0), sampled_from_++)(random_);
    if (sample_.size() >= sample_size_ && place >= sample_size_) return;
    Sampled it{call.id, call.request, parity_text(response)};
    if (sample_.size() < sample_size_)
        sample_.push_back(std::move(it));
    else
        sample_[place] = std::move(it);
}

void evalrt_runtime::check_parity() {
    if (on_loop()) refuse("evalrt_check_parity waits for answers: call it outside of callbacks");
    if (sample_size_ == 0) refuse("evalrt_config.parity is 0: set it to how many answers to check");
    auto check = std::make_unique<ParityCheck>();
    auto done = check->done.get_future();
    {
        const std::lock_guard lock(mutex_);
        if (closed_) throw Failed(EVALRT_CANCELLED, "the runtime is closed");
        asio::post(io_, [this, check = std::move(check)]() mutable {
            admit();
            begin_check(std::move(check));
        });
    }
    if (const auto failure = done.get()) throw Failed(code_of(failure.code), failure.detail);
}

void evalrt_runtime::begin_check(std::unique_ptr<ParityCheck> check) {
    if (check_ || !calls_.empty() || (gateway_ && gateway_->stats().open > 0))
        return check->done.set_value(
            {asio::error::invalid_argument,
             check_ ? "another check of parity runs"
                    : "requests still run: wait for their EVALRT_DONE, then check parity"});
    check_ = std::move(check);
    check_->sample = sample_;
    std::sort(check_->sample.begin(), check_->sample.end(),
              [](const Sampled& a, const Sampled& b) { return a.id < b.id; });
    ask_again();
}

void evalrt_runtime::ask_again() {
    if (ending_) return end_check({asio::error::operation_aborted, "the runtime was closed"});
    if (check_->next == check_->sample.size()) return end_check({});
    auto request = check_->sample[check_->next].request;
    runtime_->backend().async_complete(
        std::move(request), {}, [this](error_code code, const Response& response) {
            const auto& asked = check_->sample[check_->next++];
            if (!code) check_->parity.add(asked.name(), parity_text(response) == asked.text);
            ask_again();
        });
}

void evalrt_runtime::end_check(Failure failure) {
    if (!failure) {
        const std::lock_guard lock(mutex_);
        report_.parity = std::move(check_->parity);
    }
    std::exchange(check_, nullptr)->done.set_value(std::move(failure));
    stop_if_idle();
}

// What the summary says of the server; holds the mutex.
void evalrt_runtime::look() {
    running_ = runtime_->running();
    report_.max_in_flight = std::max(report_.max_in_flight, stats_.most_limit);
    report_.server_restarts = runtime_->restarts();
    if (report_.server_output != runtime_->server_output())
        report_.server_output = runtime_->server_output();
}

// The library does not tell when the server ends or is there again, and evalrt_running() must not
// wait for the loop.
void evalrt_runtime::watch() {
    if (!runtime_) return;
    {
        const std::lock_guard lock(mutex_);
        look();
    }
    watch_.expires_after(std::chrono::milliseconds(100));
    watch_.async_wait([this](error_code code) {
        if (!code) watch();
    });
}

void evalrt_runtime::close() {
    {
        const std::lock_guard lock(mutex_);
        if (!closed_) asio::post(io_, [this] { end_all(); });
        closed_ = true;
    }
    if (on_loop()) return;
    const std::lock_guard lock(joining_);
    if (thread_.joinable()) thread_.join();
}

void evalrt_runtime::end_all() {
    admit();
    ending_ = true;
    runtime_->backend().close(Errc::cancelled, "the runtime was closed");
    runtime_->backend().cancel();
    if (gateway_)
        gateway_->async_close([this](error_code) {
            gateway_.reset();
            stop_if_idle();
        });
    stop_if_idle();
}

void evalrt_runtime::stop_if_idle() {
    if (!ending_ || !calls_.empty() || check_ || gateway_) return;
    runtime_->async_close([this](error_code) {
        runtime_.reset();
        watch_.cancel();
        work_.reset();
    });
}

void evalrt_runtime::release() {
    close();
    if (!on_loop()) return delete this;
    released_ = true;
    thread_.detach();
}

bool evalrt_runtime::running() const {
    const std::lock_guard lock(mutex_);
    return running_ && !closed_;
}

std::string evalrt_runtime::summary() const {
    const std::lock_guard lock(mutex_);
    const auto wall = last_ ? *last_ - *first_ : Clock::duration();
    auto report = report_;
    if (!one_by_one_.empty()) report.note(one_by_one_);
    return report.json(stats_, std::chrono::duration<double>(wall).count());
}

EVALRT_EXPORT uint32_t evalrt_abi(void) { return EVALRT_ABI; }

EVALRT_EXPORT evalrt_code evalrt_error_code(const evalrt_error* error) {
    return error ? error->code : EVALRT_OK;
}

EVALRT_EXPORT const char* evalrt_error_message(const evalrt_error* error) {
    return error ? error->message.c_str() : "no error";
}

EVALRT_EXPORT void evalrt_error_free(evalrt_error* error) {
    if (error != no_memory()) delete error;
}

EVALRT_EXPORT void evalrt_string_free(char* string) { std::free(string); }

EVALRT_EXPORT evalrt_error* evalrt_open(const evalrt_config* given, evalrt_runtime** out) {
    if (out) *out = nullptr;
    return guarded([&] {
        if (!out) refuse("evalrt_open has nowhere to put the runtime: out is NULL");
        auto runtime = std::make_unique<evalrt_runtime>(take(given, "evalrt_config"));
        runtime->open();
        *out = runtime.release();
    });
}

EVALRT_EXPORT void evalrt_close(evalrt_runtime* runtime) {
    if (runtime) evalrt_error_free(guarded([&] { runtime->close(); }));
}

EVALRT_EXPORT void evalrt_release(evalrt_runtime* runtime) {
    if (runtime) evalrt_error_free(guarded([&] { runtime->release(); }));
}

EVALRT_EXPORT const char* evalrt_url(const evalrt_runtime* runtime) {
    return runtime ? runtime->url.c_str() : "";
}

EVALRT_EXPORT const char* evalrt_model(const evalrt_runtime* runtime) {
    return runtime ? runtime->model.c_str() : "";
}

EVALRT_EXPORT bool evalrt_running(const evalrt_runtime* runtime) {
    return runtime && runtime->running();
}

EVALRT_EXPORT evalrt_error* evalrt_submit(evalrt_runtime* runtime, const evalrt_request* given,
                                          evalrt_event_fn on_event, void* user, evalrt_id* id) {
    if (id) *id = 0;
    return guarded([&] {
        if (!runtime) refuse("the runtime is NULL");
        if (!on_event) refuse("on_event is NULL: nobody would see the answer");
        auto request = request_of(take(given, "evalrt_request"));
        runtime->submit(std::make_unique<Call>(std::move(request), on_event, user), id);
    });
}

EVALRT_EXPORT void evalrt_cancel(evalrt_runtime* runtime, evalrt_id id) {
    if (runtime) evalrt_error_free(guarded([&] { runtime->cancel(id); }));
}

EVALRT_EXPORT evalrt_error* evalrt_check_parity(evalrt_runtime* runtime) {
    return guarded([&] {
        if (!runtime) refuse("the runtime is NULL");
        runtime->check_parity();
    });
}

EVALRT_EXPORT evalrt_error* evalrt_summary(const evalrt_runtime* runtime, char** out) {
    if (out) *out = nullptr;
    return guarded([&] {
        if (!runtime) refuse("the runtime is NULL");
        if (!out) refuse("evalrt_summary has nowhere to put the text: out is NULL");
        *out = ::strdup(runtime->summary().c_str());
        if (!*out) throw std::bad_alloc();
    });
}
