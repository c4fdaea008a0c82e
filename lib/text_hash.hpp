// A hash of long text, as fast as it is read: std::hash takes a byte and a half for an instruction.
#ifndef EVALRT_LIB_TEXT_HASH_HPP
#define EVALRT_LIB_TEXT_HASH_HPP

#include <cstdint>
#include <cstring>
#include <string_view>

namespace evalrt::detail {

inline std::uint64_t mixed(std::uint64_t a, std::uint64_t b) {
    __extension__ typedef unsigned __int128 Wide;
    const Wide product = Wide(a) * b;
    return std::uint64_t(product) ^ std::uint64_t(product >> 64);
}

/// Of this process alone: not to be written anywhere.
inline std::uint64_t text_hash(std::string_view text) {
    constexpr std::uint64_t a = 0xa0761d6478bd642fu, b = 0xe7037ed1a0b428dbu,
                            c = 0x8ebc6af09c88c6e3u;
    const auto word = [](const char* at) {
        std::uint64_t value;
        std::memcpy(&value, at, 8);
        return value;
    };
    const char* p = text.data();
    auto left = text.size();
    std::uint64_t one = mixed(left ^ a, b), two = one ^ c;
    for (; left >= 32; p += 32, left -= 32) { // two chains that do not wait for each other
        one = mixed(word(p) ^ a, word(p + 8) ^ one);
        two = mixed(word(p + 16) ^ b, word(p + 24) ^ two);
    }
    if (left > 0) {
        char rest[32] = {};
        std::memcpy(rest, p, left);
        one = mixed(word(rest) ^ a, word(rest + 8) ^ one);
        two = mixed(word(rest + 16) ^ b, word(rest + 24) ^ two);
    }
    return mixed(one ^ c, two ^ a);
}

} // namespace evalrt::detail

#endif
