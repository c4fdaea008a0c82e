#include "gateway.hpp"

#include "child.hpp"
#include "evalrt/gateway.hpp"
#include "gateway_wire.hpp"

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/use_awaitable.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <stdexcept>

namespace evalrt::program {
namespace {

constexpr auto token = asio::as_tuple(asio::use_awaitable);

// Empty: fine. Otherwise what is wrong.
std::string read_listen(std::string text, GatewayOptions& options) {
    const auto digits = [](std::string_view it) {
        return !it.empty() && it.size() <= 5 &&
               std::all_of(it.begin(), it.end(), [](char c) { return c >= '0' && c <= '9'; });
    };
    std::string port;
    if (digits(text)) {
        port = std::exchange(text, "127.0.0.1");
    } else if (text.starts_with('[')) {
        const auto end = text.find(']');
        if (end != text.npos && end + 1 < text.size()) port = text.substr(end + 1);
        text = text.substr(1, end == text.npos ? end : end - 1);
        if (!port.empty() && port.front() == ':') port.erase(0, 1);
    } else if (const auto colon = text.rfind(':'); colon != text.npos && text.find(':') == colon) {
        port = text.substr(colon + 1);
        text.resize(colon);
    }
    if (!port.empty() && (!digits(port) || std::stoi(port) > 65535))
        return "--listen takes HOST:PORT, such as 127.0.0.1:8080";
    options.host = text;
    options.port = std::uint16_t(port.empty() ? 0 : std::stoi(port));
    if (!detail::is_loopback(options.host) && options.token.empty())
        return fmt::format("--listen {} is no loopback address: others could reach it, so it needs "
                           "--token-file with a token that clients must send",
                           options.host);
    return {};
}

class Service {
public:
    Service(asio::io_context& io, const GatewayCommand& command, const Common& common)
        : command_(command),
          common_(common),
          io_(io),
          child_(io.get_executor()),
          signals_(io, SIGINT, SIGTERM) {}

    asio::awaitable<int> main() {
        GatewayOptions front;
        if (auto error = settle(front); !error.empty()) {
            say(error);
            co_return exit_usage;
        }
        auto options = common_.runtime;
        options.retry.seed = common_.seed;
        options.log = [this](std::string_view line) {
            report_.note(line);
            print(line);
        };
        options.journal.suite = "gateway";
        options.journal.on_failure = [this](const Failure& failure) {
            unwritable_ = true;
            say(failure.detail + "; nothing more is answered");
        };
        try {
            runtime_ = std::make_unique<Runtime>(io_.get_executor(), options);
        } catch (const std::invalid_argument& error) {
            say(error.what());
            co_return exit_usage;
        }
        signals_.async_wait([this](error_code ec, int) {
            if (ec) return;
            interrupted_ = true;
            opening_.emit(asio::cancellation_type::terminal);
        });
        if (options.url.empty())
            print(fmt::format("starting {} with {}", options.backend, options.model));
        auto [ec, detail] =
            co_await runtime_->async_open(asio::bind_cancellation_slot(opening_.slot(), token));
        if (interrupted_) {
            say("interrupted before the server was there");
            co_return exit_interrupted;
        }
        if (ec) {
            const bool journal = ec.category() == journal_category();
            say(journal ? detail : fmt::format("{}: {}", options.backend, detail));
            co_return journal                     ? exit_unwritable
            : ec == asio::error::invalid_argument ? exit_usage
                                                  : exit_backend;
        }
        describe(options);
        front.model = options.model.empty() ? runtime_->model() : options.model;
        front.server_models = options.model.empty();
        front.server = &runtime_->server();
        front.in_flight = [this] { return runtime_->backend().stats().in_flight; };
        front.on_answer = [this](const Response& response) { answered(response); };
        front.log = options.log;
        Gateway gateway(io_.get_executor(), runtime_->front(), front);
        int code = exit_usage;
        if (const auto failure = gateway.open()) {
            say(failure.detail);
        } else {
            started_ = Clock::now();
            const auto address = fmt::format(R"({{"url": "{}/v1", "anthropic_url": "{}"}})",
                                             gateway.url(), gateway.url());
            code = command_.child.empty() ? co_await serve(address)
                                          : co_await run_child(gateway, front);
            const double wall = std::chrono::duration<double>(Clock::now() - started_).count();
            co_await gateway.async_close(token);
            summarise(wall);
        }
        co_await runtime_->async_close(token);
        co_return code;
    }

private:
    std::string settle(GatewayOptions& front) {
        if (!command_.token_file.empty()) {
            std::ifstream file(command_.token_file);
            std::getline(file, front.token);
            while (front.token.ends_with('\r') || front.token.ends_with(' '))
                front.token.pop_back();
            if (front.token.empty())
                return fmt::format("cannot read a token from {}", command_.token_file);
            if (!std::all_of(front.token.begin(), front.token.end(),
                             [](char c) { return c > ' ' && c < 0x7f; }))
                return "the token has a space or a control character in it";
        }
        if (auto error = read_listen(command_.listen, front); !error.empty()) return error;
        if (command_.child.empty()) return {};
        program_ = Child::find(command_.child.front());
        return program_.empty() ? fmt::format("there is no program '{}'; nothing was run",
                                              command_.child.front())
                                : "";
    }

    void describe(const RuntimeOptions& options) {
        report_.backend = options.backend;
        report_.model = runtime_->model();
        report_.order = options.order == Order::fifo ? "fifo" : "planned";
        report_.max_in_flight = runtime_->row().in_flight;
        report_.describe(runtime_->row());
        if (!runtime_->server_version().empty())
            report_.server_version = runtime_->server_version();
    }

    void answered(const Response& response) {
        // What its client has given up has not failed.
        if (response.outcome == Errc::cancelled)
            ++report_.not_run;
        else
            report_.add(response);
    }

    asio::awaitable<int> serve(const std::string& address) {
        fmt::print("{}\n", address);
        std::fflush(stdout);
        signals_.cancel();
        if (!interrupted_) co_await signals_.async_wait(token);
        co_return unwritable_ ? exit_unwritable : exit_answered;
    }

    asio::awaitable<int> run_child(const Gateway& gateway, const GatewayOptions& front) {
        GatewayAddress address;
        address.url = gateway.url();
        address.host = address.url.substr(7, address.url.rfind(':') - 7);
        address.port = gateway.port();
        address.token = front.token;
        std::error_code ignored;
        if (std::filesystem::is_directory(common_.runtime.model, ignored))
            address.tokenizer = common_.runtime.model;
        print(fmt::format("{}/v1 for {}", address.url, command_.child.front()));
        const auto environment = harness_environment(own_environment(), address);
        if (interrupted_) co_return exit_interrupted;
        if (const auto error = child_.start(program_, command_.child, environment);
            !error.empty()) {
            say(fmt::format("cannot start '{}': {}", program_, error));
            co_return exit_usage;
        }
        signals_.clear(); // which are the child's now
        co_return co_await child_.wait();
    }

    void print(std::string_view line) const {
        if (!common_.quiet) say(line);
    }

    void summarise(double wall) {
        report_.server_restarts = runtime_->restarts();
        report_.server_output = runtime_->server_output();
        print(report_.prefix_cached());
        std::string failures;
        for (const auto& [errc, count] : report_.failures())
            failures += fmt::format("{}{} {}", failures.empty() ? " (" : ", ", count, name(errc));
        print(fmt::format(
            "{} answered{}, {} failed{}{} in {:.1f} s", report_.answered(),
            report_.from_journal() > 0
                ? fmt::format(" ({} of them from the journal)", report_.from_journal())
                : "",
            report_.failed(), failures.empty() ? "" : failures + ")",
            report_.not_run > 0 ? fmt::format(", {} given up by their clients", report_.not_run)
                                : "",
            wall));
        if (common_.json.empty()) return;
        std::ofstream file(common_.json);
        file << report_.json(runtime_->backend().stats(), wall) << '\n';
        if (!file.flush())
            say(fmt::format("the run summary cannot be written to {}", common_.json));
    }

    const GatewayCommand& command_;
    const Common& common_;
    asio::io_context& io_;
    Child child_;
    std::string program_; // the child's
    asio::signal_set signals_;
    asio::cancellation_signal opening_;
    std::unique_ptr<Runtime> runtime_;
    Report report_;
    Clock::time_point started_;
    bool interrupted_ = false, unwritable_ = false;
};

} // namespace

int run_gateway(const GatewayCommand& command, const Common& common) {
    return run_to_end<Service>(command, common);
}

} // namespace evalrt::program
