#include "answer_watch.hpp"

#include "support/catch.hpp"

using namespace evalrt;
using namespace evalrt::detail;

namespace {

Prepared asked(std::string model, std::optional<std::int64_t> max_tokens = {},
               bool processors = false) {
    Prepared it;
    it.model = std::move(model);
    it.max_tokens = max_tokens;
    it.processors = processors;
    return it;
}

Response answer(std::string model, std::int64_t prompt = 1, std::int64_t completion = 1) {
    Response it;
    it.model = std::move(model);
    it.usage.prompt_tokens = prompt;
    it.usage.completion_tokens = completion;
    return it;
}

const BackendRow& row_of(std::string_view name) { return *find_backend_row(name); }

std::string only(const std::vector<std::string>& notes) {
    REQUIRE(notes.size() == 1);
    return notes.front();
}

} // namespace

TEST_CASE("another model than the one asked for is told") {
    const AnswerWatch watch(row_of("openai-url"), 0);
    CHECK(only(watch.answered(asked("llama-70b"), answer("qwen-4b"))) ==
          "WARNING: requests ask for the model 'llama-70b', but 'qwen-4b' answers");
    CHECK(watch.answered(asked("llama-70b"), answer("llama-70b")).empty());
    Response failed = answer("qwen-4b");
    failed.outcome = Errc::rejected;
    CHECK(watch.answered(asked("llama-70b"), failed).empty());

    CHECK(same_model("gpt-x", "gpt-x-2025-01-31"));
    CHECK(same_model("org/Model", "/models/org/model/"));
    CHECK(same_model("default_model", "/models/qwen"));
    CHECK(same_model("", "qwen"));
    CHECK(same_model("qwen", ""));
    CHECK_FALSE(same_model("org/a", "org/b"));
}

TEST_CASE("a prompt that was cut is told where the server does not") {
    const AnswerWatch watch(row_of("tinygpt"), 4096);
    CHECK(watch.answered(asked(""), answer("", 4096)).empty());
    CHECK(only(watch.answered(asked(""), answer("", 4097))).find("--max-context 4096") !=
          std::string::npos);
    CHECK(AnswerWatch(row_of("tinygpt"), 0).answered(asked(""), answer("", 9000)).empty());
    CHECK(AnswerWatch(row_of("omlx"), 4096).answered(asked(""), answer("", 9000)).empty());
}

TEST_CASE("an answer that its limit has ended is told where the finish reason does not") {
    const AnswerWatch watch(row_of("tinygpt"), 4096);
    CHECK(only(watch.answered(asked("", 128), answer("", 1, 128))).find("cut short") !=
          std::string::npos);
    CHECK(watch.answered(asked("", 128), answer("", 1, 127)).empty());
    CHECK(watch.answered(asked(""), answer("", 1, 128)).empty());
    CHECK(AnswerWatch(row_of("omlx"), 0).answered(asked("", 8), answer("", 1, 8)).empty());
}

TEST_CASE("penalties in some of the requests on the way are told of a server that they can stop") {
    AnswerWatch watch(row_of("mlx-server"), 0);
    const auto without = asked(""), with = asked("", {}, true);
    CHECK(watch.sent(without).empty());
    CHECK(watch.sent(without).empty());
    watch.ended(without);
    CHECK(only(watch.sent(with)).find("can stop mlx-server for good") != std::string::npos);
    watch.ended(without);
    CHECK(watch.sent(with).empty());
    watch.ended(with);
    CHECK(only(watch.sent(without)).find("at once") != std::string::npos);
    AnswerWatch other(row_of("openai-url"), 0);
    CHECK(other.sent(without).empty());
    CHECK(other.sent(with).empty());
}

TEST_CASE("tools that the chat template leaves out are told") {
    const AnswerWatch watch(row_of("mlx-server"), 0);
    auto prepared = asked("");
    prepared.tools_bytes = 1000;
    CHECK(only(watch.answered(prepared, answer("", 40))).find("tools") != std::string::npos);
    CHECK(watch.answered(prepared, answer("", 250)).empty());
    CHECK(watch.answered(prepared, Response()).empty());
    prepared.tools_bytes = 200; // too few to tell
    CHECK(watch.answered(prepared, answer("", 10)).empty());
}
