#include "evalrt/error.hpp"

namespace evalrt {
namespace {

struct Entry {
    std::string_view name;
    const char* message;
};

constexpr Entry table[] = {
    {"", "no error"},
    {"unreachable", "the server cannot be reached"},
    {"exited", "the server has ended"},
    {"rejected", "the server rejected the request"},
    {"rate_limited", "the server limits the rate of requests"},
    {"overloaded", "the server is overloaded"},
    {"auth", "the server does not accept the key"},
    {"context_too_long", "the prompt does not fit the model's context"},
    {"malformed", "the server's answer cannot be understood"},
    {"truncated", "the answer stopped before its end"},
    {"timed_out", "a time limit passed"},
    {"cancelled", "cancelled"},
    {"poison", "the server died each time this request ran"},
};

class Category final : public boost::system::error_category {
public:
    const char* name() const noexcept override { return "evalrt"; }
    std::string message(int value) const override {
        return value >= 0 && value < int(std::size(table)) ? table[value].message : "unknown error";
    }
};

} // namespace

std::string_view name(Errc errc) noexcept { return table[int(errc)].name; }

std::optional<Errc> find_errc(std::string_view name) noexcept {
    for (std::size_t i = 1; i < std::size(table); ++i)
        if (table[i].name == name) return Errc(i);
    return {};
}

const boost::system::error_category& category() noexcept {
    static const Category instance;
    return instance;
}

error_code make_error_code(Errc errc) noexcept {
    if (errc == Errc::cancelled) return asio::error::operation_aborted;
    return {int(errc), category()};
}

} // namespace evalrt
