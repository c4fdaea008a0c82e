#include "prompt_cache.hpp"

#include "support/catch.hpp"

#include <string>
#include <vector>

using namespace evalrt::detail;

TEST_CASE("a model's config says what a token takes") {
    // SmolLM2-135M; Qwen3-4B, whose heads are wider than its hidden size says; one without
    // grouping.
    CHECK(kv_bytes_per_token(R"({"hidden_size": 576, "num_attention_heads": 9,
        "num_hidden_layers": 30, "num_key_value_heads": 3, "torch_dtype": "float32"})") ==
          2 * 30 * 3 * 64 * 4);
    CHECK(kv_bytes_per_token(R"({"hidden_size": 2560, "num_attention_heads": 32, "head_dim": 128,
        "num_hidden_layers": 36, "num_key_value_heads": 8, "dtype": "bfloat16"})") ==
          2 * 36 * 8 * 128 * 2);
    CHECK(kv_bytes_per_token(R"({"hidden_size": 128, "num_attention_heads": 4,
        "num_hidden_layers": 2})") == 2 * 2 * 4 * 32 * 2);
    CHECK(kv_bytes_per_token(R"({"torch_dtype": "float32", "hidden_size": 1, "text_config":
        {"num_hidden_layers": 2, "num_attention_heads": 3, "head_dim": 8}})") == 2 * 2 * 3 * 8 * 4);
    for (const auto* none :
         {"", "{", "[]", "{}", R"({"text_config": 1})",
          R"({"num_hidden_layers": "2", "num_attention_heads": 2, "head_dim": 2})",
          R"({"num_hidden_layers": -2, "num_attention_heads": 2, "head_dim": 2})",
          R"({"num_hidden_layers": 4000000000, "num_attention_heads": 4000000000,
                                 "head_dim": 4000000000})",
          R"({"num_hidden_layers": 2, "num_attention_heads": 0, "hidden_size": 9})"})
        CHECK(kv_bytes_per_token(none) == 0);
}

TEST_CASE("a prefix cache gets half the memory less the model, or is left alone") {
    const std::int64_t gb = 1 << 30;
    const auto cache = prompt_cache(32 * gb, 4 * gb, 128 << 10);
    CHECK(cache.bytes == 12 * gb);
    CHECK(cache.tokens == 12 * gb / (128 << 10));
    CHECK(prompt_cache(16 * gb, 5 * gb, 128 << 10).bytes == 0); // 24,576 tokens
    CHECK(prompt_cache(8 * gb, 5 * gb, 128 << 10).bytes == 0);  // less than nothing
    CHECK(prompt_cache(32 * gb, 4 * gb, 0).bytes == 0);
    CHECK(prompt_cache("/no/such/folder").bytes == 0);
}

TEST_CASE("what a user gives a server is found among its arguments") {
    const auto number = [](std::vector<std::string> arguments) {
        return number_given(arguments, "--size");
    };
    CHECK(number({"--size", "5"}) == 5);
    CHECK(number({"--size=5"}) == 5);
    CHECK(number({"--size", "5", "--x", "--size=0"}) == 0);
    CHECK(number({"--sizes", "5"}) == -1);
    CHECK(number({"--size"}) == -1);
    CHECK(number({"--size", "5k"}) == -1);
    CHECK(number({"--size=-5"}) == -1);
    CHECK(number({}) == -1);
}
