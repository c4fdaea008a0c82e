#include "prompt_cache.hpp"

#include <boost/json/parse.hpp>

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>

namespace evalrt::detail {
namespace {

namespace json = boost::json;
namespace fs = std::filesystem;

constexpr std::int64_t prompts = 64, tokens_each = 1024;

// 0: there is none, or it is no such number.
std::int64_t whole(const json::object& from, std::string_view key) {
    const auto* value = from.if_contains(key);
    return value && value->is_int64() ? std::max<std::int64_t>(value->get_int64(), 0) : 0;
}

std::string_view text(const json::object& from, std::string_view key) {
    const auto* value = from.if_contains(key);
    return value && value->is_string() ? std::string_view(value->get_string()) : std::string_view();
}

// A container may have less than the machine.
std::int64_t memory_bytes() {
    const auto pages = ::sysconf(_SC_PHYS_PAGES), size = ::sysconf(_SC_PAGESIZE);
    if (pages <= 0 || size <= 0) return 0;
    auto bytes = std::int64_t(pages) * size;
    std::int64_t limit = 0;
    if (std::ifstream file("/sys/fs/cgroup/memory.max"); file >> limit)
        bytes = std::min(bytes, limit);
    return bytes;
}

} // namespace

std::int64_t kv_bytes_per_token(std::string_view config) {
    boost::system::error_code ec;
    const auto value = json::parse(json::string_view(config.data(), config.size()), ec);
    const auto* const outer = ec ? nullptr : value.if_object();
    if (!outer) return 0;
    // A model that also sees has its language model's sizes in here.
    const auto* const inner = outer->if_contains("text_config");
    const auto& model = inner && inner->is_object() ? inner->get_object() : *outer;

    const auto layers = whole(model, "num_hidden_layers");
    const auto queries = whole(model, "num_attention_heads");
    auto heads = whole(model, "num_key_value_heads"), size = whole(model, "head_dim");
    if (heads == 0) heads = queries;
    if (size == 0 && queries > 0) size = whole(model, "hidden_size") / queries;
    auto type = text(model, "torch_dtype");
    if (type.empty()) type = text(model, "dtype");
    if (type.empty()) type = text(*outer, "torch_dtype");
    const std::int64_t width = type == "float32" ? 4 : 2;
    // What no model has, and would overflow.
    if (std::max({layers, heads, size}) > 1 << 16) return 0;
    return 2 * layers * heads * size * width; // keys and values
}

PromptCache prompt_cache(std::int64_t memory, std::int64_t model, std::int64_t bytes_per_token) {
    if (bytes_per_token <= 0) return {};
    const auto bytes = memory / 2 - model;
    const auto tokens = bytes / bytes_per_token;
    return tokens < prompts * tokens_each ? PromptCache{} : PromptCache{bytes, tokens};
}

PromptCache prompt_cache(const std::string& model_folder) {
    std::ifstream file(fs::path(model_folder) / "config.json", std::ios::binary);
    const std::string config{std::istreambuf_iterator<char>(file), {}};
    std::int64_t model = 0;
    std::error_code ec;
    for (fs::directory_iterator it(model_folder, ec), end; !ec && it != end; it.increment(ec)) {
        std::error_code gone;
        const auto size = it->file_size(gone);
        if (!gone && size < std::numeric_limits<std::int64_t>::max() / 2)
            model += std::int64_t(size);
    }
    return prompt_cache(memory_bytes(), model, kv_bytes_per_token(config));
}

std::int64_t number_given(std::span<const std::string> arguments, std::string_view flag) {
    std::int64_t found = -1;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
        std::string_view it = arguments[i];
        if (!it.starts_with(flag)) continue;
        it.remove_prefix(flag.size());
        if (it.empty() && i + 1 < arguments.size())
            it = arguments[i + 1];
        else if (it.starts_with('='))
            it.remove_prefix(1);
        else
            continue;
        std::int64_t number = 0;
        const auto [end, ec] = std::from_chars(it.data(), it.data() + it.size(), number);
        if (ec == std::errc() && end == it.data() + it.size() && number >= 0) found = number;
    }
    return found;
}

} // namespace evalrt::detail
