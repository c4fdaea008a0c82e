#include "recognise.hpp"

#include "support/catch.hpp"

#include <fmt/format.h>

#include <functional>
#include <map>

using namespace evalrt;
using namespace evalrt::detail;

namespace {

// A server's answers to GETs; 404 to all else.
using Answers = std::map<std::string, std::string>;

struct Outcome {
    Recognition found;
    std::vector<std::string> asked;
};

Outcome ask(const Answers& answers, std::string server = "", std::string model = "") {
    Outcome out;
    Recogniser recogniser(parse_url("http://127.0.0.1:8000/v1"), model);
    while (const auto path = recogniser.next()) {
        out.asked.push_back(*path);
        REQUIRE(out.asked.size() < 30);
        Seen seen{*path, 404, "Not Found", server};
        if (const auto it = answers.find(*path); it != answers.end())
            seen = {*path, 200, it->second, server};
        recogniser.answered(seen);
    }
    out.found = recogniser.result();
    return out;
}

std::string kind(const Answers& answers, std::string server = "", std::string model = "") {
    const auto found = ask(answers, std::move(server), std::move(model)).found;
    return fmt::format("{} {} {}", found.profile.empty() ? "unknown" : found.profile,
                       found.version.empty() ? "-" : found.version,
                       found.in_flight ? std::to_string(*found.in_flight) : "-");
}

std::string models(std::string_view owner) {
    return fmt::format(
        R"({{"object":"list","data":[{{"id":"m","object":"model","owned_by":"{}"}}]}})", owner);
}

} // namespace

TEST_CASE("each server is recognised by the owner of its models") {
    CHECK(kind({{"/v1/models", models("vllm")}, {"/version", R"({"version":"0.11.0"})"}}) ==
          "vllm 0.11.0 -");
    CHECK(kind({{"/v1/models", models("sglang")},
                {"/get_server_info", R"({"max_running_requests":12,"version":"0.5"})"}}) ==
          "sglang 0.5 12");
    // Its cache bounds what runs: there is no need to begin low.
    const auto told = [](const char* info) {
        return with_profile(
            *find_backend_row("openai-url"),
            ask({{"/v1/models", models("sglang")}, {"/get_server_info", info}}).found);
    };
    CHECK(told(R"({"max_total_num_tokens":98304})").cache_tokens == 98304);
    CHECK(told(R"({"max_total_num_tokens":98304})").in_flight == 192);
    CHECK(told(R"({"max_total_num_tokens":98304,"max_running_requests":100})").in_flight == 100);
    CHECK(told(R"({"max_total_num_tokens":0})").in_flight == 64);
    CHECK(told("{}").cache_tokens == 0);
    CHECK(kind({{"/v1/models", models("llamacpp")},
                {"/props", R"({"total_slots":6,"build_info":"b7000-abc"})"}}) ==
          "llama-server b7000-abc 6");
    CHECK(kind({{"/v1/models", models("library")}, {"/api/version", R"({"version":"0.13"})"}}) ==
          "ollama 0.13 -");
    CHECK(kind({{"/v1/models", models("organization_owner")}}) == "lm-studio - -");
    CHECK(kind({{"/v1/models", models("omlx")},
                {"/api/status", R"({"version":"0.4.5.dev1","total_cached_tokens":0})"}}) ==
          "omlx 0.4.5.dev1 -");
    CHECK(kind({{"/v1/models", models("tinygpt")},
                {"/api/version", R"({"version":"0.5.0-tinygpt"})"}}) == "tinygpt 0.5.0-tinygpt -");
}

TEST_CASE("each server is recognised by what only it answers") {
    CHECK(kind({{"/props", R"({"total_slots":8})"}}) == "llama-server - 8");
    CHECK(kind({{"/get_model_info", R"({"model_path":"/m"})"}}) == "sglang - -");
    CHECK(kind({{"/api/version", R"({"version":"0.5.0-tinygpt"})"}}) == "tinygpt 0.5.0-tinygpt -");
    CHECK(kind({{"/api/version", R"({"version":"0.13"})"}}) == "ollama 0.13 -");
    CHECK(kind({{"/api/v0/models", R"({"data":[{"id":"m","compatibility_type":"gguf"}]})"}}) ==
          "lm-studio - -");
    CHECK(kind({{"/metrics", "# HELP vllm:num_requests_running x\nvllm:num_requests_running 0\n"},
                {"/version", R"({"version":"0.9"})"}}) == "vllm 0.9 -");
    CHECK(kind({{"/metrics", "sglang:num_running_reqs 0\n"}}) == "sglang - -");
    CHECK(kind({{"/api/status", R"({"version":"0.6","total_cached_tokens":5})"}}) == "omlx 0.6 -");
    CHECK(kind({{"/health", R"({"status":"healthy","engine_pool":{"loaded_count":0}})"}}) ==
          "omlx - -");
    // A health that many have needs Python's http.server before it.
    CHECK(kind({{"/health", R"({"status": "ok"})"}}, "BaseHTTP/0.6 Python/3.11.2") ==
          "mlx-server - -");
    CHECK(kind({{"/health", R"({"status": "ok"})"}}, "uvicorn") == "unknown - -");
}

TEST_CASE("vLLM's blocks and the size of its cache are those that it tells") {
    const std::string before = "# TYPE vllm:cache_config_info gauge\n"
                               "vllm:num_requests_running{block_size=\"7\"} 0.0\n";
    const auto row = [&](const std::string& labels) {
        const auto found = ask({{"/v1/models", models("vllm")},
                                {"/metrics", before + "vllm:cache_config_info{" + labels +
                                                 "} 1.0\nvllm:x{num_gpu_blocks=\"3\"} 1\n"}})
                               .found;
        return with_profile(*find_backend_row("openai-url"), found);
    };
    // Of 0.32 on a CPU, and of one that does not tell the tokens.
    auto it = row(R"(_block_size_resolved="True",block_size="128",cache_dtype="auto",)"
                  R"(effective_attention_block_size="64",kv_cache_size_tokens="93184",)"
                  R"(num_gpu_blocks="728")");
    CHECK(it.block_tokens == 128);
    CHECK(it.shared_tokens == 128); // a shorter prefix is not shared
    CHECK(it.cache_tokens == 93184);
    it = row(R"(block_size="8",num_gpu_blocks="100")");
    CHECK(it.block_tokens == 8);
    CHECK(it.shared_tokens == 16);
    CHECK(it.cache_tokens == 800);
    for (const auto* nonsense :
         {"", R"(block_size="None",num_gpu_blocks="None")", R"(block_size="-5",num_gpu_blocks="7")",
          R"(block_size="16",num_gpu_blocks="99999999999999999999")", R"(block_size=")"}) {
        it = row(nonsense);
        CHECK(it.block_tokens == 16);
        CHECK(it.cache_tokens == 0);
    }
    CHECK(with_profile(*find_backend_row("openai-url"), ask({{"/v1/models", models("vllm")}}).found)
              .cache_tokens == 0);
}

TEST_CASE("a router is recognised though its servers answer for it") {
    const std::string ready = R"({"status":"ready","healthy_workers":2,"total_workers":2})";
    const auto over = [&](Answers answers) {
        answers.emplace("/readiness", ready);
        return ask(answers);
    };
    const auto llama = over({{"/v1/models", models("llamacpp")}});
    CHECK(llama.asked ==
          std::vector<std::string>{"/v1/models", "/readiness", "/workers", "/get_server_info"});
    CHECK(llama.found.profile == "sglang-router");
    CHECK(llama.found.behind == "llama-server");
    CHECK(llama.found.workers == 2);
    CHECK(llama.found.reason == "/readiness tells of 2 servers; llama-server, as its models are "
                                "owned_by \"llamacpp\"");
    CHECK(llama.found.in_flight_reason == "for 2 servers");
    const auto sglang = over(
        {{"/v1/models", models("sglang")}, {"/get_server_info", R"({"max_running_requests":12})"}});
    CHECK(sglang.found.behind == "sglang");
    CHECK(sglang.found.in_flight == 12);
    const auto unknown = over({{"/v1/models", R"({"data":[{"id":"m"}]})"}});
    CHECK(unknown.found.profile == "sglang-router");
    CHECK(unknown.found.behind == "");
    CHECK(unknown.found.worker == "");
    // Others have a /readiness, too.
    for (const char* other : {R"({"status":"ready"})", R"({"total_workers":0})", "OK", "[2]"}) {
        CAPTURE(other);
        const auto found = ask({{"/v1/models", models("vllm")}, {"/readiness", other}}).found;
        CHECK(found.profile == "vllm");
        CHECK(found.workers == 1);
    }
}

TEST_CASE("one of a router's servers is asked what it is, if it is on the router's host") {
    const auto worker = [&](std::string_view host, const std::string& urls) {
        Recogniser recogniser(parse_url(fmt::format("http://{}:8000/v1", host)));
        recogniser.answered(
            {"/v1/models", 200, R"({"data":[{"id":"unknown","owned_by":"local"}]})"});
        recogniser.answered({"/readiness", 200, R"({"healthy_workers":1,"total_workers":1})"});
        recogniser.answered({"/workers", 200, urls});
        return recogniser.result().worker;
    };
    const std::string here = R"({"workers":[{"url":"grpc://x"},{"url":"http://gpu-1:1"},)"
                             R"({"url":"http://127.0.0.1:30000"}]})";
    CHECK(worker("127.0.0.1", here) == "http://127.0.0.1:30000");
    CHECK(worker("localhost", here) == "http://127.0.0.1:30000");
    CHECK(worker("GPU-1", here) == "http://gpu-1:1");
    CHECK(worker("gpu-2", here) == ""); // its 127.0.0.1 is not ours
    for (const char* none : {"{}", R"({"workers":{}})", R"({"workers":[1,{"url":2}]})", "no"})
        CHECK(worker("127.0.0.1", none) == "");

    Recognition found;
    found.profile = "sglang-router";
    found.workers = 2;
    found.in_flight_reason = "for 2 servers";
    Recognition llama;
    llama.profile = "llama-server";
    llama.version = "b7";
    llama.reason = "/props tells total_slots";
    llama.in_flight = 3;
    llama.in_flight_reason = "its total_slots";
    llama.block = 32;
    llama.cache_tokens = 5000;
    const auto both = with_worker(found, llama);
    CHECK(both.profile == "sglang-router");
    CHECK(both.behind == "llama-server");
    CHECK(both.version == "b7");
    CHECK(both.reason ==
          "/readiness tells of 2 servers; llama-server, as /props tells total_slots");
    CHECK(both.in_flight_reason == "its total_slots, for 2 servers");
    const auto row = with_profile(*find_backend_row("openai-url"), both);
    CHECK(row.in_flight == 6);
    CHECK(row.most_in_flight == 0); // its slots are known
    CHECK(row.block_tokens == 32);
    CHECK(row.cache_tokens == 5000); // of each
    CHECK(with_worker(found, {}).behind == "");
    CHECK(with_worker(found, found).behind == ""); // a router behind a router
}

TEST_CASE("a router's row is that of its servers, for all of them") {
    Recognition found;
    found.profile = "sglang-router";
    found.workers = 3;
    const auto row = [&](std::string behind, std::optional<unsigned> in_flight = {}) {
        found.behind = std::move(behind);
        found.in_flight = in_flight;
        return with_profile(*find_backend_row("openai-url"), found);
    };
    const auto llama = row("llama-server");
    CHECK(llama.name == "sglang-router");
    CHECK(llama.workers == 3);
    CHECK(llama.routing_key);
    CHECK_FALSE(llama.messages_endpoint); // it has none, whatever they have
    CHECK(llama.release == Release::slot);
    CHECK(llama.default_temperature == 0.8);
    CHECK(llama.in_flight == 12);
    CHECK(llama.most_in_flight == 48);  // their slots are not known
    CHECK(row("sglang").leaders == 8); // of each
    CHECK(row("sglang", 10).in_flight == 30);
    CHECK(row("sglang", 2048).in_flight == 192);
    const auto mlx = row("mlx-server");
    CHECK(mlx.drop_seed_at_zero);
    CHECK(mlx.keep_alive); // the router's
    CHECK(mlx.accept_interval.count() == 0);
    CHECK(mlx.in_flight == 96);
    CHECK(mlx.most_in_flight == 0);
    CHECK(mlx.repack == 9 * find_backend_row("mlx-server")->repack); // under a root
    CHECK(row("").in_flight == 48);
    CHECK(row("").release == Release::first_text);
    found.workers = 1;
    CHECK(row("vllm").in_flight == 64);
}

TEST_CASE("LM Studio takes as many as the model that will be asked for") {
    const std::string body =
        R"({"models":[{"key":"idle","loaded_instances":[]},)"
        R"({"key":"a","loaded_instances":[{"id":"a","config":{"parallel":4}}]},)"
        R"({"key":"b","loaded_instances":[{"id":"b:2","config":{"parallel":7}}]}]})";
    CHECK(kind({{"/api/v1/models", body}}) == "lm-studio - 4");
    CHECK(kind({{"/api/v1/models", body}}, "", "b:2") == "lm-studio - 7");
    CHECK(kind({{"/api/v1/models", body}}, "", "b") == "lm-studio - 7");
    CHECK(kind({{"/v1/models", models("organization_owner")}, {"/api/v1/models", body}}) ==
          "lm-studio - 4");
}

TEST_CASE("nobody who may be SGLang is asked for /health") {
    // It generates a token and sleeps a second for each.
    for (const Answers& answers :
         {Answers{{"/v1/models", models("sglang")}, {"/health", ""}},
          Answers{{"/get_model_info", R"({"model_path":"m"})"}, {"/health", ""}},
          Answers{{"/metrics", "sglang:x 1"}, {"/health", ""}}})
        for (const auto& path : ask(answers).asked) CHECK(path != "/health");
}

TEST_CASE("a proxy, a web page and nonsense are not recognised") {
    for (const std::string& body :
         {models("openai"), models(""), std::string(R"({"data":[]})"), std::string("<html>"),
          std::string("{"), std::string("[1]"), std::string("null"), std::string(""),
          std::string(R"({"data":[1]})"), std::string(R"({"data":{"owned_by":"vllm"}})"),
          std::string(200, '[')}) {
        Answers all;
        for (const auto& path : ask({}).asked) all[path] = body;
        CAPTURE(body);
        CHECK(ask(all).found.profile == "");
        CHECK(ask(all).found.reason.size() > 0);
    }
    CHECK(kind({{"/props", R"({"total_slots":"many"})"}}) == "unknown - -");
    CHECK(kind({{"/props", R"({"total_slots":0})"}}) == "unknown - -");
    CHECK(kind({{"/props", R"({"total_slots":-1})"}}) == "unknown - -");
    CHECK(kind({{"/props", R"({"total_slots":1e9})"}}) == "unknown - -");
    // What it says of itself goes to a terminal.
    CHECK(kind({{"/v1/models", models("vllm")}, {"/version", R"({"version":"1\u001b[2J"})"}}) ==
          "vllm 1.[2J -");
}

TEST_CASE("a server that does not answer in time is left alone") {
    Recogniser recogniser(parse_url("http://127.0.0.1:1/v1"));
    Seen seen{*recogniser.next()};
    seen.late = true;
    recogniser.answered(seen);
    CHECK_FALSE(recogniser.next());
    CHECK(recogniser.result().profile == "");
    CHECK(recogniser.result().reason == "/v1/models was not answered in time");

    Recogniser known(parse_url("http://127.0.0.1:1/v1"));
    known.answered({"/v1/models", 200, models("vllm")});
    seen.path = *known.next();
    known.answered(seen);
    CHECK_FALSE(known.next());
    CHECK(known.result().profile == "vllm");
}

TEST_CASE("hosted services are known by their names and asked nothing") {
    const auto of = [](std::string url) {
        Recogniser recogniser(parse_url(url));
        CHECK(bool(recogniser.next()) == recogniser.result().profile.empty());
        return recogniser.result().profile;
    };
    CHECK(of("https://api.openai.com/v1") == "openai");
    CHECK(of("https://API.OpenAI.com/v1") == "openai");
    CHECK(of("https://mine.openai.azure.com/openai/v1") == "cloud");
    CHECK(of("https://openrouter.ai/api/v1") == "cloud");
    CHECK(of("https://api.groq.com/openai/v1") == "cloud");
    CHECK(of("http://127.0.0.1:8000/v1") == "");
    CHECK(of("http://api.openai.com.example.org/v1") == "");
    CHECK(of("http://notgroq.com/v1") == "");
}

TEST_CASE("a row takes over what is known of its server, and keeps its wire") {
    const auto& base = *find_backend_row("openai-url");
    const auto row = [&](std::string profile, std::optional<unsigned> in_flight = {},
                         Wire wire = Wire::openai) {
        Recognition found;
        found.profile = std::move(profile);
        found.in_flight = in_flight;
        auto from = base;
        from.wire = wire;
        return with_profile(from, found);
    };
    CHECK(row("").name == "openai-url");
    CHECK(row("vllm").in_flight == 64);
    CHECK(row("vllm").release == Release::at_once);
    CHECK(row("vllm").shared_tokens == 16);
    CHECK(row("llama-server", 9).in_flight == 9);
    CHECK(row("lm-studio").in_flight == 4);
    CHECK(row("lm-studio", 2).in_flight == 2);
    CHECK(row("ollama").in_flight == 1);
    CHECK(row("openai").shared_tokens == 1024);
    // A limit, not an advice.
    CHECK(row("sglang", 2048).in_flight == 64);
    CHECK(row("sglang", 10).in_flight == 10);

    const auto mlx = row("mlx-server");
    CHECK(mlx.drop_seed_at_zero);
    CHECK_FALSE(mlx.keep_alive);
    CHECK(mlx.command.empty());
    CHECK(mlx.served_model.empty());
    CHECK(row("omlx").release == Release::done);

    const auto anthropic = row("omlx", {}, Wire::anthropic);
    CHECK(anthropic.wire == Wire::anthropic);
    CHECK(anthropic.release == Release::done);
    CHECK(anthropic.in_flight == 8);
    CHECK_FALSE(anthropic.max_tokens_only);
}

TEST_CASE("Servers of one run serve one model") {
    using evalrt::detail::other_models;
    CHECK(other_models({"m"}, {"m"}, "") == "");
    CHECK(other_models({"m", "x"}, {"y", "m"}, "m") == "");
    CHECK(other_models({"m"}, {"n"}, "") == R"(serves "n", and not the "m" of the first)");
    CHECK(other_models({"m", "x"}, {"n", "x"}, "m") ==
          R"(serves "n", and not the "m" of the first)");
    CHECK(other_models({"m", "x"}, {"n", "x"}, "x") == "");
    // A name that is in no list: each of them takes any.
    CHECK(other_models({"m"}, {"m"}, "gpt") == "");
    CHECK(other_models({"m"}, {"n"}, "gpt") != "");
    // One file in two places; a list that is not there.
    CHECK(other_models({"/data/m.gguf"}, {"/mnt/m.gguf"}, "") == "");
    CHECK(other_models({"/data/m.gguf"}, {"/mnt/n.gguf"}, "") != "");
    CHECK(other_models({}, {"n"}, "") == "");
    CHECK(other_models({"m"}, {}, "") == "");
}
