#include "evalrt/http_backend.hpp"

#include "url.hpp"

#include "support/catch.hpp"

#include <stdexcept>

using evalrt::parse_url;
using evalrt::detail::addresses_in;
using evalrt::detail::joined_addresses;
using evalrt::detail::plain_address;

namespace {

// "scheme host port base"
std::string parts(std::string_view text) {
    const auto url = parse_url(text);
    return std::string(url.tls ? "https " : "http ") + url.host + " " + url.port + " " + url.base;
}

// Why it is refused; empty: it is not.
std::string refusal(std::string_view text) {
    try {
        parse_url(text);
        return {};
    } catch (const std::invalid_argument& error) {
        return error.what();
    }
}

} // namespace

TEST_CASE("a URL falls into its parts") {
    CHECK(parts("http://127.0.0.1:8080/v1") == "http 127.0.0.1 8080 /v1");
    CHECK(parts("http://localhost") == "http localhost 80 ");
    CHECK(parts("https://api.example.com") == "https api.example.com 443 ");
    CHECK(parts("https://api.example.com:8443") == "https api.example.com 8443 ");
    CHECK(parts("http://host:1") == "http host 1 ");
    CHECK(parts("http://host:65535") == "http host 65535 ");
    CHECK(parts("http://a-b_c.d:80/x/y") == "http a-b_c.d 80 /x/y");
}

TEST_CASE("slashes at the end of a URL go") {
    CHECK(parts("http://host/") == "http host 80 ");
    CHECK(parts("http://host:8080/v1/") == "http host 8080 /v1");
    CHECK(parts("http://host//") == "http host 80 ");
    CHECK(parts("http://host/a//b/") == "http host 80 /a//b");
}

TEST_CASE("an IPv6 address stands in brackets") {
    CHECK(parts("http://[::1]:8080/v1") == "http ::1 8080 /v1");
    CHECK(parts("http://[::1]") == "http ::1 80 ");
    CHECK(parts("https://[2001:db8::1]/") == "https 2001:db8::1 443 ");
    for (const auto* text :
         {"http://[::1", "http://[]", "http://[]:80", "http://::1", "http://::1:80",
          "http://[::1]8080", "http://[::1]x:80", "http://2001:db8::1/"})
        CHECK_FALSE(refusal(text).empty());
}

TEST_CASE("what is no URL of a server is refused, with a reason and an example") {
    struct Row {
        const char* text;
        const char* reason;
    };
    for (const auto& row : {
             Row{"", "http://"},
             Row{"127.0.0.1:8080", "http://"},
             Row{"localhost", "http://"},
             Row{"//host", "http://"},
             Row{"ftp://host", "http://"},
             Row{"file:///etc", "http://"},
             Row{"http:/host", "http://"},
             Row{"http://", "no host"},
             Row{"http:///v1", "no host"},
             Row{"http://:8080", "no host"},
             Row{"http://host:", "port"},
             Row{"http://host:/v1", "port"},
             Row{"http://host:0", "port"},
             Row{"http://host:65536", "port"},
             Row{"http://host:99999999999999999999", "port"},
             Row{"http://host:+80", "port"},
             Row{"http://host:-1", "port"},
             Row{"http://host:8a", "port"},
             Row{"http://host:80:90", "port"},
             Row{"http://host/v1?key=1", "query"},
             Row{"http://host/v1#x", "query"},
             Row{"http://host?key=1", "query"},
             Row{"http://host:80?key=1", "query"},
             Row{"http://host#x", "query"},
             Row{"http://user@host", "user name"},
             Row{"http://user:word@host:80/v1", "user name"},
             Row{"http://ho st", "space"},
             Row{"http://host/a b", "space"},
             Row{" http://host", "http://"},
             Row{"http://host ", "space"},
             Row{"http://host\n", "space"},
             Row{"http://host/\r\nX-Injected: yes", "space"},
             Row{"http://host/\x7f", "space"},
             Row{"http://h\xC3\xB6st", "ASCII"},
             Row{"http://host/\xFF", "ASCII"},
         }) {
        CAPTURE(row.text);
        const auto said = refusal(row.text);
        CHECK(said.find(row.reason) != std::string::npos);
        CHECK(said.find("looks like http://127.0.0.1:8080/v1") != std::string::npos);
    }
    CHECK_FALSE(refusal(std::string_view("http://ho\0st", 12)).empty());
}

TEST_CASE("a refusal does not repeat the URL, which may hold a key") {
    for (const auto* text :
         {"http://canary@host", "http://user:canary@host", "http://host/?k=canary",
          "http://host?canary", "http://host/ canary", "http://host:canary", "canary",
          "http://[canary", "ftp://canary", "http://host#canary"})
        CHECK(refusal(text).find("canary") == std::string::npos);
}

TEST_CASE("one address is one, however it is written") {
    CHECK(plain_address("http://Host/v1/") == plain_address("http://host:80/v1"));
    CHECK(plain_address("https://host/v1") != plain_address("http://host/v1"));
    CHECK(plain_address("http://host/v1") != plain_address("http://host/v2"));
    for (const auto* it : {"http://localhost:8/v1", "http://LOCALHOST:8/v1", "http://[::1]:8/v1/"})
        CHECK(plain_address(it) == plain_address("http://127.0.0.1:8/v1"));
    CHECK(plain_address("http://localhost:8/v1") != plain_address("http://localhost:9/v1"));
    CHECK(plain_address("no URL") == "no URL");
    CHECK(addresses_in("http://a/v1 http://b/v1", "http://c/v1 http://B:80/v1/ http://a/v1"));
    CHECK(!addresses_in("http://a/v1 http://b/v1", "http://c/v1 http://a/v1"));
    CHECK(!addresses_in("", "http://a/v1"));
    CHECK(joined_addresses("", "http://a/v1") == "http://a/v1");
    CHECK(joined_addresses("http://a/v1 http://b/v1", "http://c/v1 http://a:80/v1") ==
          "http://a/v1 http://b/v1 http://c/v1");
}
