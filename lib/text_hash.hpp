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

/// Outputs of evalrt run have it: it stays as it is. Of little-endian machines, all that we know.
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
    std::uint64_t one = mixed(left ^ a, b), two = one ^ a, three = one ^ b, four = one ^ c;
    const auto take = [&](const char* at) { // four chains that do not wait for each other
        one = mixed(word(at) ^ a, word(at + 8) ^ one);
        two = mixed(word(at + 16) ^ b, word(at + 24) ^ two);
        three = mixed(word(at + 32) ^ c, word(at + 40) ^ three);
        four = mixed(word(at + 48) ^ a, word(at + 56) ^ four);
    };
    for (; left >= 64; p += 64, left -= 64) take(p);
    if (left > 0) {
        char rest[64] = {};
        std::memcpy(rest, p, left);
        take(rest);
    }
    return mixed(mixed(one ^ c, two ^ a), mixed(three ^ a, four ^ b) ^ c);
}

} // namespace evalrt::detail

#endif
