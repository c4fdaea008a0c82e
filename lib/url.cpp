#include "url.hpp"

#include "evalrt/http_backend.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <stdexcept>
#include <vector>

namespace evalrt {

Url parse_url(std::string_view text) {
    const auto refuse = [&](std::string_view why) {
        // A URL may carry a key: it is not repeated here.
        throw std::invalid_argument(
            fmt::format("the URL cannot be used: {}; it looks like http://127.0.0.1:8080/v1", why));
    };
    Url url;
    std::string_view rest = text;
    if (rest.starts_with("http://")) {
        rest.remove_prefix(7);
    } else if (rest.starts_with("https://")) {
        rest.remove_prefix(8);
        url.tls = true;
    } else {
        refuse("it does not begin with http:// or https://");
    }
    for (const unsigned char c : rest) {
        if (c <= ' ' || c == 0x7f) refuse("it has a space or a control character");
        if (c > 0x7f) refuse("it has a character that is not ASCII");
    }
    if (rest.find_first_of("?#") != rest.npos) refuse("it has a query");
    const auto slash = rest.find('/');
    auto authority = rest.substr(0, slash);
    if (slash != rest.npos) url.base = rest.substr(slash);
    while (url.base.ends_with('/')) url.base.pop_back();
    if (authority.find('@') != authority.npos)
        refuse("it has a user name; a key belongs into the environment or --api-key-file");
    if (authority.starts_with('[')) {
        const auto close = authority.find(']');
        if (close == authority.npos) refuse("a bracket is missing");
        url.host = authority.substr(1, close - 1);
        authority.remove_prefix(close + 1);
    } else {
        url.host = authority.substr(0, authority.find(':'));
        authority.remove_prefix(url.host.size());
    }
    if (url.host.empty()) refuse("it names no host");
    url.port = authority.empty() ? (url.tls ? "443" : "80") : std::string(authority.substr(1));
    if ((!authority.empty() && authority.front() != ':') || url.port.empty() ||
        url.port.size() > 5 ||
        !std::all_of(url.port.begin(), url.port.end(),
                     [](char c) { return c >= '0' && c <= '9'; }) ||
        std::stoi(url.port) == 0 || std::stoi(url.port) > 65535)
        refuse("the port is no number between 1 and 65535");
    return url;
}

namespace detail {
namespace {

std::vector<std::string_view> words(std::string_view text) {
    std::vector<std::string_view> list;
    while (!text.empty()) {
        const auto end = std::min(text.find(' '), text.size());
        if (end > 0) list.push_back(text.substr(0, end));
        text.remove_prefix(std::min(end + 1, text.size()));
    }
    return list;
}

} // namespace

std::string plain_address(std::string_view text) {
    try {
        auto url = parse_url(text);
        for (char& c : url.host) c = char(std::tolower(static_cast<unsigned char>(c)));
        if (url.host == "localhost" || url.host == "::1") url.host = "127.0.0.1";
        return fmt::format("{}://{}:{}{}", url.tls ? "https" : "http", url.host, url.port,
                           url.base);
    } catch (const std::invalid_argument&) {
        return std::string(text);
    }
}

bool addresses_in(std::string_view some, std::string_view others) {
    const auto list = words(some), all = words(others);
    return !list.empty() && std::all_of(list.begin(), list.end(), [&](std::string_view it) {
        return std::any_of(all.begin(), all.end(), [&](std::string_view other) {
            return plain_address(it) == plain_address(other);
        });
    });
}

std::string joined_addresses(std::string_view some, std::string_view others) {
    std::string all(some);
    for (const auto it : words(others))
        if (!addresses_in(it, all)) all.append(all.empty() ? "" : " ").append(it);
    return all;
}

} // namespace detail
} // namespace evalrt
