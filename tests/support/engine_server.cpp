// An engine model behind the OpenAI wire, in scaled real time. Prints its port.
//   engine_server ENGINE [--scale X] [--batch N] [--no-cached-tokens] [--version V]
// X: real seconds for one of the model's; 0.01 by itself. An answer has as many tokens as
// max_tokens allows, at most a number made from the prompt.
#include "support/engine_model.hpp"
#include "support/engine_run.hpp"

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/read_until.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/json.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <map>

namespace {

namespace asio = boost::asio;
namespace json = boost::json;
using asio::ip::tcp;
using namespace evalrt::test;
using Clock = std::chrono::steady_clock;

constexpr auto token = asio::as_tuple(asio::use_awaitable);

struct Options {
    std::string engine, version = "0.11.0";
    double scale = 0.01;
    unsigned batch = 0;
    bool report = true;
};

// Plays the model's steps when their time has come.
class Player {
public:
    struct Asked {
        Asked(asio::any_io_executor executor, std::uint64_t named) : id(named), changed(executor) {}
        std::uint64_t id;
        Job job;
        std::size_t tokens = 0, shown = 0; // shown: a call of a tool only when it is whole
        bool done = false, computed = false;
        asio::steady_timer changed;
    };

    Player(asio::io_context& io, const EngineConfig& config, double scale)
        : engine_(make_engine(config)), timer_(io), scale_(scale) {}

    std::shared_ptr<Asked> ask(std::uint64_t id, Job job) {
        auto asked = std::make_shared<Asked>(timer_.get_executor(), id);
        asked->job = std::move(job);
        asked_[id] = asked;
        if (engine_->idle() && !stepping_) now_ += seconds_since(last_) / scale_;
        engine_->submit(id, asked->job);
        if (!stepping_) step();
        return asked;
    }

    void give_up(std::uint64_t id) {
        // A step that runs goes on, and the job stays until the engine has let go of it.
        if (auto node = asked_.extract(id)) left_.push_back(std::move(node.mapped()));
    }

    std::size_t cached(std::uint64_t id) const { return engine_->cached(id); }

private:
    static double seconds_since(Clock::time_point at) {
        return std::chrono::duration<double>(Clock::now() - at).count();
    }

    void step() {
        stepping_ = true;
        auto events = std::make_shared<std::vector<EngineEvent>>();
        const double seconds = engine_->step(now_, *events);
        now_ += seconds;
        due_ = std::max(due_, Clock::now() - std::chrono::milliseconds(20));
        due_ += std::chrono::duration_cast<Clock::duration>(
            std::chrono::duration<double>(seconds * scale_));
        timer_.expires_at(due_);
        timer_.async_wait([this, events](boost::system::error_code) {
            for (const auto& event : *events) {
                const auto it = asked_.find(event.id);
                if (it == asked_.end()) continue;
                auto& asked = *it->second;
                asked.computed |= event.what == EngineEvent::computed;
                asked.done = event.what == EngineEvent::done;
                asked.tokens += event.what == EngineEvent::token;
                if (asked.done || !event.hidden) asked.shown = asked.tokens;
                asked.changed.cancel();
                if (asked.done) asked_.erase(it);
            }
            for (const auto& asked : std::exchange(left_, {})) engine_->cancel(asked->id);
            last_ = Clock::now();
            if (engine_->idle())
                stepping_ = false;
            else
                step();
        });
    }

    std::unique_ptr<EngineModel> engine_;
    asio::steady_timer timer_;
    double scale_, now_ = 0;
    bool stepping_ = false;
    Clock::time_point last_ = Clock::now(), due_{};
    std::map<std::uint64_t, std::shared_ptr<Asked>> asked_;
    std::vector<std::shared_ptr<Asked>> left_;
};

struct Server {
    Options options;
    EngineConfig config;
    Player player;
    std::uint64_t last_id = 0;

    bool keeps() const { return config.kind != "mlx"; } // Python's http.server speaks HTTP/1.0

    std::string answer(std::string_view status, std::string_view body) const {
        return fmt::format(
            "HTTP/1.{} {}\r\nContent-Type: application/json\r\n"
            "Content-Length: {}\r\n{}\r\n{}",
            keeps() ? 1 : 0, status, body.size(),
            keeps() ? "" : "Connection: close\r\nServer: BaseHTTP/0.6 Python/3.11\r\n", body);
    }

    std::string get(std::string_view path) const {
        if (path == "/v1/models") {
            const auto owner = config.kind == "mlx"     ? ""
                               : config.kind == "llama" ? "llamacpp"
                                                        : config.kind;
            json::object model{{"id", "model"}, {"object", "model"}};
            if (!owner.empty()) model["owned_by"] = owner;
            return answer("200 OK", json::serialize(json::object{{"object", "list"},
                                                                 {"data", json::array{model}}}));
        }
        if (path == "/version" && config.kind == "vllm")
            return answer("200 OK", json::serialize(json::object{{"version", options.version}}));
        if (path == "/props" && config.kind == "llama")
            return answer("200 OK", json::serialize(json::object{{"total_slots", config.batch}}));
        if (path == "/health") return answer("200 OK", R"({"status": "ok"})");
        return answer("404 Not Found", R"({"error": {"message": "not found"}})");
    }

    json::object usage(const Job& job, std::uint64_t id) const {
        json::object out{{"prompt_tokens", job.prompt},
                         {"completion_tokens", job.output()},
                         {"total_tokens", job.tokens.size()}};
        if (options.report)
            out["prompt_tokens_details"] = json::object{{"cached_tokens", player.cached(id)}};
        return out;
    }

    // Until it fails or is answered whole.
    asio::awaitable<bool> complete(tcp::socket& socket, const json::object& body) {
        const auto number = [&](const char* name, std::size_t otherwise) {
            const auto* it = body.if_contains(name);
            return it && it->is_int64() && it->as_int64() > 0 ? std::size_t(it->as_int64())
                                                              : otherwise;
        };
        auto job = render(json::serialize(body), "");
        std::uint32_t h = 2166136261u;
        for (const auto it : job.tokens) h = (h ^ it) * 16777619u;
        const auto length = std::min(number("max_tokens", 128), std::size_t(24 + h % 128));
        job.tokens.resize(job.prompt);
        for (std::size_t i = 0; i < length; ++i)
            job.tokens.push_back(h + std::uint32_t(i) * 2654435761u);
        if (const auto* tools = body.if_contains("tools"))
            job.calls_tools = tools->is_array() && !tools->as_array().empty();
        const auto id = ++last_id;
        const auto asked = player.ask(id, std::move(job));
        const auto* streamed = body.if_contains("stream");
        const bool stream = streamed && streamed->is_bool() && streamed->as_bool();
        const auto chunk = [&](const json::value& delta, const json::value& finish) {
            return json::object{
                {"id", "chatcmpl-1"},
                {"object", "chat.completion.chunk"},
                {"created", 1},
                {"model", "model"},
                {"choices", json::array{json::object{
                                {"index", 0}, {"delta", delta}, {"finish_reason", finish}}}}};
        };
        const auto event = [](const std::string& data) { return "data: " + data + "\n\n"; };
        const auto framed = [&](const std::string& text) {
            return keeps() ? fmt::format("{:x}\r\n{}\r\n", text.size(), text) : text;
        };
        std::string text;
        std::size_t told = 0;
        bool head = false, told_computed = false;
        while (true) {
            std::string out;
            const bool computed = stream && asked->computed && !told_computed;
            if (stream && (computed || told < asked->shown) && !std::exchange(head, true))
                out = fmt::format("HTTP/1.{} 200 OK\r\nContent-Type: text/event-stream\r\n{}\r\n",
                                  keeps() ? 1 : 0,
                                  keeps() ? "Transfer-Encoding: chunked\r\n"
                                          : "Connection: close\r\n");
            if (computed) {
                told_computed = true;
                out += framed(fmt::format(": keepalive {0}/{0}\n\n", asked->job.prompt));
            }
            for (; told < asked->shown; ++told) {
                const auto word = fmt::format("w{} ", told);
                if (stream)
                    out += framed(
                        event(json::serialize(chunk(json::object{{"content", word}}, nullptr))));
                else
                    text += word;
            }
            if (asked->done && stream) {
                auto last = chunk(json::object(), "length");
                last["usage"] = usage(asked->job, id);
                out += framed(event(json::serialize(last)) + event("[DONE]"));
                if (keeps()) out += "0\r\n\r\n";
            } else if (asked->done) {
                out = answer(
                    "200 OK",
                    json::serialize(json::object{
                        {"id", "chatcmpl-1"},
                        {"object", "chat.completion"},
                        {"model", "model"},
                        {"choices",
                         json::array{json::object{
                             {"index", 0},
                             {"message", json::object{{"role", "assistant"}, {"content", text}}},
                             {"finish_reason", "length"}}}},
                        {"usage", usage(asked->job, id)}}));
            }
            if (!out.empty()) {
                const auto [ec, n] = co_await asio::async_write(socket, asio::buffer(out), token);
                if (ec) {
                    player.give_up(id);
                    co_return false;
                }
                if (told < asked->shown || (stream && asked->computed && !told_computed))
                    continue; // more came meanwhile
            }
            if (asked->done && told == asked->shown && !out.empty()) co_return true;
            if (asked->done) continue;
            asked->changed.expires_at(Clock::time_point::max());
            co_await asked->changed.async_wait(token);
        }
    }

    asio::awaitable<void> serve(tcp::socket socket) {
        socket.set_option(tcp::no_delay(true));
        std::string in;
        do {
            const auto [ec, size] = co_await asio::async_read_until(
                socket, asio::dynamic_buffer(in), "\r\n\r\n", token);
            if (ec) co_return;
            std::string head = in.substr(0, size);
            in.erase(0, size);
            const auto path = head.substr(head.find(' ') + 1,
                                          head.find(' ', head.find(' ') + 1) - head.find(' ') - 1);
            std::transform(head.begin(), head.end(), head.begin(),
                           [](unsigned char c) { return char(std::tolower(c)); });
            std::size_t length = 0;
            if (const auto at = head.find("content-length:"); at != head.npos)
                length = std::strtoul(head.c_str() + at + 15, nullptr, 10);
            if (in.size() < length) {
                const auto [failed, n] =
                    co_await asio::async_read(socket, asio::dynamic_buffer(in),
                                              asio::transfer_exactly(length - in.size()), token);
                if (failed) co_return;
            }
            const auto body = in.substr(0, length);
            in.erase(0, length);
            std::string out;
            if (head.starts_with("get ")) {
                out = get(path);
            } else {
                json::error_code wrong;
                const auto parsed = json::parse(body, wrong);
                if (!wrong && parsed.is_object() && path == "/v1/chat/completions") {
                    if (!co_await complete(socket, parsed.get_object())) co_return;
                } else {
                    out = answer("400 Bad Request", R"({"error": {"message": "no chat body"}})");
                }
            }
            if (!out.empty()) {
                const auto [failed, n] =
                    co_await asio::async_write(socket, asio::buffer(out), token);
                if (failed) co_return;
            }
        } while (keeps());
    }

    asio::awaitable<void> listen(tcp::acceptor& acceptor) {
        for (;;) {
            auto [ec, socket] = co_await acceptor.async_accept(token);
            if (!ec)
                asio::co_spawn(acceptor.get_executor(), serve(std::move(socket)), asio::detached);
        }
    }
};

} // namespace

int main(int argc, char** argv) try {
    Options options;
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        const auto value = [&] { return i + 1 < argc ? argv[++i] : ""; };
        if (argument == "--scale")
            options.scale = std::atof(value());
        else if (argument == "--batch")
            options.batch = unsigned(std::atoi(value()));
        else if (argument == "--version")
            options.version = value();
        else if (argument == "--no-cached-tokens")
            options.report = false;
        else
            options.engine = argument;
    }
    auto config = engine_config(options.engine);
    if (options.batch > 0) config.batch = options.batch;
    asio::io_context io(1);
    tcp::acceptor acceptor(io);
    acceptor.open(tcp::v4());
    acceptor.bind({asio::ip::address_v4::loopback(), 0});
    acceptor.listen(config.kind == "mlx" ? 5 : 2048); // as Python's socketserver, and uvicorn
    fmt::print("{}\n", acceptor.local_endpoint().port());
    std::fflush(stdout);
    Server server{options, config, Player(io, config, options.scale)};
    asio::co_spawn(io, server.listen(acceptor), asio::detached);
    io.run();
} catch (const std::exception& error) {
    fmt::print(stderr, "error: {}\n", error.what());
    return 2;
}
