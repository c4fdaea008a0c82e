#include "recognise.hpp"

#include <boost/json/parse.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <stdexcept>

namespace evalrt::detail {
namespace {

namespace json = boost::json;

// A member of members, or null.
template <class... Keys>
const json::value* find(const json::value& value, Keys... keys) {
    const json::value* at = &value;
    for (const std::string_view key : {std::string_view(keys)...}) {
        const auto* object = at->if_object();
        at = object ? object->if_contains({key.data(), key.size()}) : nullptr;
        if (!at) return nullptr;
    }
    return at;
}

template <class... Keys>
std::string text(const json::value& value, Keys... keys) {
    const auto* found = find(value, keys...);
    return found && found->is_string() ? std::string(found->get_string()) : std::string();
}

template <class... Keys>
std::optional<unsigned> number(const json::value& value, Keys... keys) {
    const json::value* found = find(value, keys...);
    json::error_code ec;
    const std::int64_t n = found ? found->to_number<std::int64_t>(ec) : 0;
    if (!found || ec || n < 1 || n > 100000) return {};
    return unsigned(n);
}

json::value parse(std::string_view body) {
    json::error_code ec;
    auto value = json::parse({body.data(), body.size()}, ec);
    return ec ? json::value() : value;
}

std::string owner(const json::value& models) {
    const auto* data = find(models, "data");
    if (!data || !data->is_array() || data->get_array().empty()) return {};
    return text(data->get_array().front(), "owned_by");
}

// The number of a label in the line of a metric (Prometheus text); 0: none.
std::int64_t label(std::string_view metrics, std::string_view metric, std::string_view name) {
    auto line =
        metrics.substr(std::min(metrics.find("\n" + std::string(metric) + "{"), metrics.size()));
    line = line.substr(0, line.find('\n', 1));
    for (const char before : {'{', ','}) {
        const auto key = before + std::string(name) + "=\"";
        const auto at = line.find(key);
        if (at == line.npos) continue;
        std::int64_t n = 0;
        std::from_chars(line.data() + at + key.size(), line.data() + line.size(), n);
        return n;
    }
    return 0;
}

// A sign by which a server gives itself away: an answer to a path.
struct Sign {
    std::string_view path, profile;
    bool (*matches)(const Seen& seen, const json::value& body);
    std::string_view words;
};

template <std::size_t n>
struct Word {
    constexpr Word(const char (&text)[n]) { std::copy_n(text, n, value); }
    char value[n];
};

template <Word name>
bool owned_by(const Seen&, const json::value& body) {
    return owner(body) == name.value;
}

constexpr std::string_view router = "sglang-router";

bool is_router(const Seen&, const json::value& body) { return bool(number(body, "total_workers")); }

// In this order, so that the commonest server is known after two questions, and nobody is asked
// for /health who could be SGLang, which generates a token to answer.
constexpr std::array signs{
    Sign{"/v1/models", "vllm", owned_by<"vllm">, "its models are owned_by \"vllm\""},
    Sign{"/v1/models", "sglang", owned_by<"sglang">, "its models are owned_by \"sglang\""},
    Sign{"/v1/models", "llama-server", owned_by<"llamacpp">,
         "its models are owned_by \"llamacpp\""},
    Sign{"/v1/models", "ollama", owned_by<"library">, "its models are owned_by \"library\""},
    Sign{"/v1/models", "lm-studio", owned_by<"organization_owner">,
         "its models are owned_by \"organization_owner\""},
    Sign{"/v1/models", "omlx", owned_by<"omlx">, "its models are owned_by \"omlx\""},
    Sign{"/v1/models", "tinygpt", owned_by<"tinygpt">, "its models are owned_by \"tinygpt\""},
    Sign{"/readiness", router, is_router, "/readiness tells of its servers"},
    Sign{"/props", "llama-server",
         [](const Seen&, const json::value& body) { return bool(number(body, "total_slots")); },
         "/props tells total_slots"},
    Sign{"/get_model_info", "sglang",
         [](const Seen&, const json::value& body) { return bool(find(body, "model_path")); },
         "/get_model_info tells model_path"},
    Sign{"/api/version", "tinygpt",
         [](const Seen&, const json::value& body) {
             return text(body, "version").ends_with("-tinygpt");
         },
         "/api/version ends in -tinygpt"},
    Sign{"/api/version", "ollama",
         [](const Seen&, const json::value& body) { return !text(body, "version").empty(); },
         "/api/version answers"},
    Sign{"/api/v1/models", "lm-studio",
         [](const Seen&, const json::value& body) {
             const auto* models = find(body, "models");
             return models && models->is_array() && !models->get_array().empty() &&
                    find(models->get_array().front(), "loaded_instances");
         },
         "/api/v1/models tells loaded_instances"},
    Sign{"/api/v0/models", "lm-studio",
         [](const Seen&, const json::value& body) {
             const auto* data = find(body, "data");
             return data && data->is_array() && !data->get_array().empty() &&
                    find(data->get_array().front(), "compatibility_type");
         },
         "/api/v0/models tells compatibility_type"},
    Sign{"/api/status", "omlx",
         [](const Seen&, const json::value& body) {
             return bool(find(body, "total_cached_tokens"));
         },
         "/api/status tells total_cached_tokens"},
    Sign{"/metrics", "vllm",
         [](const Seen& seen, const json::value&) {
             return seen.body.find("vllm:") != std::string::npos;
         },
         "/metrics has figures that begin with vllm:"},
    Sign{"/metrics", "sglang",
         [](const Seen& seen, const json::value&) {
             return seen.body.find("sglang:") != std::string::npos;
         },
         "/metrics has figures that begin with sglang:"},
    Sign{"/health", "omlx",
         [](const Seen&, const json::value& body) { return bool(find(body, "engine_pool")); },
         "/health tells of its engine_pool"},
    Sign{"/health", "mlx-server",
         [](const Seen& seen, const json::value& body) {
             return text(body, "status") == "ok" && seen.server.starts_with("BaseHTTP");
         },
         "/health is that of Python's http.server"},
};

// What else tells how many requests it takes, or its version.
struct Detail {
    std::string_view profile, path;
};
constexpr std::array more{
    Detail{"vllm", "/version"},        Detail{"sglang", "/get_server_info"},
    Detail{"llama-server", "/props"},  Detail{"lm-studio", "/api/v1/models"},
    Detail{"ollama", "/api/version"},  Detail{"omlx", "/api/status"},
    Detail{"tinygpt", "/api/version"}, Detail{"vllm", "/metrics"},
    Detail{router, "/workers"},        Detail{router, "/get_server_info"},
};

// Hosted services, by the end of the host's name: nothing there is worth a question.
struct Host {
    std::string_view end, profile;
};
constexpr std::array hosts{
    Host{"api.openai.com", "openai"},
    Host{"openai.azure.com", "cloud"},
    Host{"api.anthropic.com", "anthropic-url"},
    Host{"openrouter.ai", "cloud"},
    Host{"together.xyz", "cloud"},
    Host{"together.ai", "cloud"},
    Host{"groq.com", "cloud"},
    Host{"mistral.ai", "cloud"},
    Host{"deepseek.com", "cloud"},
    Host{"fireworks.ai", "cloud"},
    Host{"cerebras.ai", "cloud"},
    Host{"deepinfra.com", "cloud"},
    Host{"googleapis.com", "cloud"},
    Host{"x.ai", "cloud"},
    Host{"huggingface.co", "cloud"},
    Host{"perplexity.ai", "cloud"},
    Host{"nvidia.com", "cloud"},
    Host{"amazonaws.com", "cloud"},
};

std::string lower(std::string text) {
    for (char& c : text) c = char(std::tolower(static_cast<unsigned char>(c)));
    return text;
}

// The first of a router's servers that is on the router's own host: others are not asked, as nobody
// has named them, and "127.0.0.1" means another machine there.
std::string worker_of(const json::value& body, const std::string& host) {
    const auto loopback = [](const std::string& it) {
        return it == "127.0.0.1" || it == "localhost" || it == "::1";
    };
    const auto* workers = find(body, "workers");
    for (const auto& worker : workers && workers->is_array() ? workers->get_array() : json::array())
        try {
            auto url = text(worker, "url");
            const auto at = lower(parse_url(url).host);
            if (at == host || (loopback(at) && loopback(host))) return url;
        } catch (const std::invalid_argument&) { // "grpc://..."
        }
    return {};
}

std::string visible(std::string text) { // it comes from a stranger and goes to a terminal
    text.resize(std::min<std::size_t>(text.size(), 60));
    for (char& c : text)
        if (c < ' ' || c >= 0x7f) c = '.';
    return text;
}

} // namespace

static std::string servers_of(const Recognition& it) {
    return fmt::format("{} server{}", it.workers, it.workers == 1 ? "" : "s");
}

Recognition with_worker(Recognition found, const Recognition& worker) {
    if (worker.profile.empty() || worker.profile == router) return found;
    found.behind = worker.profile;
    found.version = worker.version;
    found.block = worker.block;
    found.cache_tokens = worker.cache_tokens;
    found.reason = fmt::format("/readiness tells of {}; {}, as {}", servers_of(found),
                               worker.profile, worker.reason);
    if (!worker.in_flight) return found;
    found.in_flight = worker.in_flight;
    found.in_flight_reason = fmt::format("{}, for {}", worker.in_flight_reason, servers_of(found));
    return found;
}

Recogniser::Recogniser(const Url& url, std::string model) : model_(std::move(model)) {
    host_ = lower(url.host);
    for (const auto& it : hosts)
        if (host_ == it.end ||
            (host_.ends_with(it.end) && host_[host_.size() - it.end.size() - 1] == '.')) {
            result_.profile = it.profile;
            result_.reason = "by its host name";
            given_up_ = true;
            return;
        }
    result_.reason = "none of its answers is that of a server that is known";
}

std::optional<std::string> Recogniser::next() const {
    if (given_up_) return {};
    if (result_.profile.empty()) {
        for (const auto& sign : signs)
            if (!asked_.count(sign.path)) return std::string(sign.path);
    } else {
        // A router hands the question for models on to one of its servers.
        if (asked_.size() == 1 && asked_.count("/v1/models")) return "/readiness";
        for (const auto& it : more)
            if (it.profile == result_.profile && !asked_.count(it.path))
                return std::string(it.path);
    }
    return {};
}

void Recogniser::answered(const Seen& seen) {
    asked_.insert(seen.path);
    if (seen.late) {
        // It may be busy with something long; more questions would only take more time.
        given_up_ = result_.late = true;
        if (result_.profile.empty()) result_.reason = seen.path + " was not answered in time";
        return;
    }
    if (seen.status / 100 != 2) return;
    const auto body = parse(seen.body);
    if (seen.path == "/readiness" && is_router(seen, body)) {
        result_.behind = std::exchange(result_.profile, router);
        result_.workers = number(body, "total_workers").value_or(1);
        result_.in_flight_reason = "for " + servers_of(result_);
        result_.reason =
            fmt::format("/readiness tells of {}; {}", servers_of(result_),
                        result_.behind.empty() ? "what they are does not show"
                                               : result_.behind + ", as " + result_.reason);
    }
    if (result_.profile.empty())
        for (const auto& sign : signs)
            if (sign.path == seen.path && sign.matches(seen, body)) {
                result_.profile = sign.profile;
                result_.reason = sign.words;
                break;
            }
    if (!result_.profile.empty()) details(seen);
}

void Recogniser::details(const Seen& seen) {
    const auto body = parse(seen.body);
    const auto tell = [&](std::optional<unsigned> n, std::string_view why) {
        if (!n) return;
        result_.in_flight = n;
        result_.in_flight_reason = why;
    };
    const auto& profile = result_.profile;
    std::string version;
    if (profile == "llama-server" && seen.path == "/props") {
        tell(number(body, "total_slots"), "its total_slots");
        version = text(body, "build_info");
    } else if (profile == router && seen.path == "/workers") {
        result_.worker = worker_of(body, host_);
    } else if (profile == router && seen.path == "/get_server_info") {
        result_.in_flight = number(body, "max_running_requests"); // of one of them
    } else if (profile == "sglang" && seen.path == "/get_server_info") {
        tell(number(body, "max_running_requests"), "its max_running_requests");
        if (const auto tokens = number(body, "max_total_num_tokens"))
            result_.cache_tokens = *tokens;
        version = text(body, "version");
    } else if (profile == "lm-studio" && seen.path == "/api/v1/models") {
        const auto* models = find(body, "models");
        for (const auto& model : models && models->is_array() ? models->get_array() : json::array())
            if (const auto* instances = find(model, "loaded_instances");
                instances && instances->is_array())
                for (const auto& instance : instances->get_array())
                    if (!result_.in_flight || text(instance, "id") == model_ ||
                        text(model, "key") == model_)
                        tell(number(instance, "config", "parallel"), "its \"parallel\"");
    } else if (profile == "vllm" && seen.path == "/metrics") {
        // Its block is 16 tokens on a GPU and 128 on a CPU, unless --block-size says otherwise.
        const auto info = [&](std::string_view name) {
            const auto n = label(seen.body, "vllm:cache_config_info", name);
            return n > 0 && n < 1'000'000'000 ? n : 0;
        };
        const auto block = std::min<std::int64_t>(info("block_size"), 65536);
        if (block > 0) result_.block = unsigned(block);
        const auto tokens = std::max(info("kv_cache_size_tokens"), info("num_gpu_blocks") * block);
        if (tokens > 0) result_.cache_tokens = tokens;
    } else if (seen.path == "/version" || seen.path == "/api/version" ||
               seen.path == "/api/status") {
        version = text(body, "version");
    }
    if (!version.empty()) result_.version = visible(std::move(version));
}

namespace {

BackendRow of_router(const BackendRow& row, const Recognition& recognition) {
    auto one = recognition;
    one.profile = std::exchange(one.behind, {});
    auto it = with_profile(row, one);
    const auto& profile = *find_profile_row(router);
    it.name = profile.name;
    it.messages_endpoint = false;
    it.routing_key = true;
    it.ignored.insert(it.ignored.end(), profile.ignored.begin(), profile.ignored.end());
    it.keep_alive = true;
    it.backlog = profile.backlog;
    it.accept_interval = {};
    it.remark = profile.remark;
    it.workers = recognition.workers;
    // How many slots its servers have may not be known.
    if (it.release == Release::slot && !recognition.in_flight) it.most_in_flight = 4 * it.in_flight;
    it.in_flight *= it.workers;
    it.most_in_flight *= it.workers;
    it.repack *= double(it.workers) * it.workers; // under a root
    return it;
}

} // namespace

// The planner keeps what runs below what the cache holds, so that only the engine's batch is left
// to be found out: on the models of vLLM and SGLang 192 was as fast as 64 and 128 with every suite,
// and up to a sixth faster.
void has_cache(BackendRow& row, std::int64_t tokens) {
    row.cache_tokens = tokens;
    row.in_flight = std::max(row.in_flight, row.most_in_flight / 4 * 3);
}

BackendRow with_profile(const BackendRow& row, const Recognition& recognition) {
    if (recognition.profile == router) return of_router(row, recognition);
    const auto* profile = find_profile_row(recognition.profile);
    if (!profile) return row;
    BackendRow it = row.wire == profile->wire ? *profile : row;
    it.wire = row.wire;
    it.name = profile->name;
    it.cached_hint = profile->cached_hint;
    it.cuts_prompt = profile->cuts_prompt;
    it.token_chunks = profile->token_chunks;
    it.keep_alive = profile->keep_alive;
    it.backlog = profile->backlog;
    it.accept_interval = profile->accept_interval;
    it.alone = profile->alone;
    it.in_flight = profile->in_flight;
    it.most_in_flight = profile->most_in_flight;
    it.release = profile->release;
    it.commit_delay = profile->commit_delay;
    it.shared_tokens = profile->shared_tokens;
    it.block_tokens = profile->block_tokens;
    if (recognition.block) {
        it.block_tokens = *recognition.block;
        it.shared_tokens = std::max(it.shared_tokens, *recognition.block);
    }
    it.cache_tokens = profile->cache_tokens;
    if (recognition.cache_tokens) has_cache(it, *recognition.cache_tokens);
    it.sessions = profile->sessions;
    it.padding_tokens = profile->padding_tokens;
    it.leaders = profile->leaders;
    it.repack = profile->repack;
    it.refill = profile->refill;
    it.remark = profile->remark;
    // It runs already, with a model of its own; a body that names one means it.
    it.command.clear();
    it.env.clear();
    it.served_model = row.served_model;
    if (recognition.in_flight) {
        const auto told = *recognition.in_flight;
        // Slots are what a server takes; SGLang's 2,048 are far more than is good for it: a limit.
        it.in_flight = it.most_in_flight > 0 ? std::min(it.in_flight, told) : told;
        it.most_in_flight = std::min(it.most_in_flight, told);
    }
    return it;
}

std::string other_models(const std::vector<std::string>& first,
                         const std::vector<std::string>& others, const std::string& model) {
    if (first.empty() || others.empty()) return {};
    const auto plain = [](std::string_view name) {
        return name.starts_with('/') ? name.substr(name.rfind('/') + 1) : name;
    };
    const auto has = [&](const std::vector<std::string>& list, std::string_view name) {
        return std::any_of(list.begin(), list.end(),
                           [&](const std::string& it) { return plain(it) == plain(name); });
    };
    // A name that the first one does not list either is one that any of its kind takes.
    const bool named = !model.empty() && has(first, model);
    const auto& wanted = named ? model : first.front();
    if (has(others, wanted)) return {};
    return fmt::format("serves \"{}\", and not the \"{}\" of the first", others.front(), wanted);
}

} // namespace evalrt::detail
