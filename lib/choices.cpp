#include "choices.hpp"

#include "evalrt/detail/complete.hpp"
#include "json_text.hpp"
#include "wire.hpp"

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/bind_executor.hpp>
#include <boost/asio/cancellation_signal.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

namespace evalrt::detail {

unsigned choices_asked(const Request& request) {
    constexpr double most = 128; // as OpenAI's own limit
    if (request.body.view().find("\"n\"") == std::string_view::npos) return 1;
    std::vector<Member> list;
    if (object_error(request.body, &list)) return 1;
    const auto value = member(list, "n");
    const double n = value ? std::strtod(std::string(*value).c_str(), nullptr) : 1;
    return n > 1 && n <= most && n == double(unsigned(n)) ? unsigned(n) : 1;
}

unsigned repetitions(const Request& request, const BackendRow& row) {
    const auto& unread = row.ignored;
    const bool read = std::find(unread.begin(), unread.end(), "n") == unread.end();
    return read ? 1 : choices_asked(request);
}

Response merged(std::vector<Response> answers) {
    std::string choices;
    std::int64_t index = 0, tokens = 0;
    bool counted = true;
    Timing::Millis total{0};
    for (const auto& answer : answers) {
        for (const auto choice : elements(member(members(answer.body), "choices").value_or("[]"))) {
            const Change number{"index", std::to_string(index++)};
            choices += choices.empty() ? "[" : ", ";
            choices += with_changes(choice, {&number, 1});
        }
        counted &= answer.usage.completion_tokens.has_value();
        tokens += answer.usage.completion_tokens.value_or(0);
        total += answer.timing.total;
    }
    auto whole = std::move(answers.front());
    std::vector<Change> changes{{"choices", choices + "]"}};
    if (const auto usage = member(members(whole.body), "usage");
        counted && usage && usage->starts_with('{')) {
        std::vector<Change> sums{{"completion_tokens", std::to_string(tokens)}};
        if (whole.usage.prompt_tokens)
            sums.push_back({"total_tokens", std::to_string(*whole.usage.prompt_tokens + tokens)});
        changes.push_back({"usage", with_changes(*usage, sums)});
    }
    whole.body = with_changes(whole.body, changes);
    whole.usage.completion_tokens = counted ? std::optional(tokens) : std::nullopt;
    whole.timing.total = total;
    whole.timing.last_text.reset(); // of the first choice, and tokens of all
    return whole;
}

namespace {

struct Asking : std::enable_shared_from_this<Asking> {
    Asking(asio::any_io_executor executor_, Ask start_, Request request_, unsigned times_,
           TextSink on_text_, Backend::Handler handler_)
        : executor(std::move(executor_)),
          start(std::move(start_)),
          request(std::move(request_)),
          times(times_),
          on_text(std::move(on_text_)),
          handler(std::move(handler_)) {}

    void ask() {
        auto done = [self = shared_from_this()](error_code ec, Response response) {
            self->take(ec, std::move(response));
        };
        start(request, answers.empty() ? on_text : TextSink(),
              asio::bind_executor(executor,
                                  asio::bind_cancellation_slot(cancel.slot(), std::move(done))));
    }

    void take(error_code ec, Response response) {
        const bool failed = bool(ec);
        if (!failed) answers.push_back(std::move(response));
        if (!failed && answers.size() < times) return ask();
        complete(executor, std::move(handler), ec,
                 failed ? std::move(response) : merged(std::move(answers)));
    }

    asio::any_io_executor executor;
    Ask start;
    Request request;
    unsigned times;
    TextSink on_text;
    Backend::Handler handler;
    asio::cancellation_signal cancel;
    std::vector<Response> answers;
};

} // namespace

void ask_repeatedly(asio::any_io_executor executor, Ask ask, Request request, unsigned times,
                    TextSink on_text, Backend::Handler handler) {
    const Change dropped{"n", {}};
    request.body = Text(with_changes(request.body, {&dropped, 1}));
    auto asking = std::make_shared<Asking>(std::move(executor), std::move(ask), std::move(request),
                                           times, std::move(on_text), std::move(handler));
    on_cancel(asking->handler, [weak = std::weak_ptr(asking)] {
        if (auto self = weak.lock()) self->cancel.emit(asio::cancellation_type::terminal);
    });
    asking->ask();
}

} // namespace evalrt::detail
