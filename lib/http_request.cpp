#include "http_request.hpp"

#include <algorithm>
#include <array>
#include <charconv>

namespace evalrt::detail {
namespace {

enum Kind : unsigned char { token = 1, target = 2, value = 4 };

// RFC 9110, 5.6.2 and 5.5; a target is what can be seen.
constexpr auto kinds = [] {
    std::array<unsigned char, 256> of{};
    for (unsigned c = 0; c < 256; ++c) {
        const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'),
                   digit = c >= '0' && c <= '9';
        if (letter || digit ||
            std::string_view("!#$%&'*+-.^_`|~").find(char(c)) != std::string_view::npos)
            of[c] |= token;
        if (c > ' ' && c < 0x7f) of[c] |= target;
        if (c == '\t' || (c >= ' ' && c != 0x7f)) of[c] |= value;
    }
    return of;
}();

bool all(std::string_view text, Kind kind) {
    return std::all_of(text.begin(), text.end(),
                       [&](char c) { return kinds[static_cast<unsigned char>(c)] & kind; });
}

std::string_view trimmed(std::string_view text) {
    while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
    while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
    return text;
}

// Takes a line off the front. False: there is no whole one.
bool take_line(std::string_view& bytes, std::string_view& line) {
    const auto end = bytes.find('\n');
    if (end == bytes.npos || end == 0 || bytes[end - 1] != '\r') return false;
    line = bytes.substr(0, end - 1);
    bytes.remove_prefix(end + 1);
    return true;
}

// Neither continued on the next line, nor with a space before its colon.
bool read_field(std::string_view line, Field& field) {
    const auto colon = line.find(':');
    if (colon == line.npos || colon == 0) return false;
    field = {line.substr(0, colon), trimmed(line.substr(colon + 1))};
    return all(field.name, token) && all(field.value, value);
}

} // namespace

std::string read_request_head(std::string_view bytes, RequestHead& head) {
    std::string_view line;
    if (!take_line(bytes, line)) return "its first line has no end";
    const auto first = line.find(' '), last = line.rfind(' ');
    if (first == line.npos || first == 0 || first == last)
        return "its first line is no method, target and version";
    head.method = line.substr(0, first);
    head.target = line.substr(first + 1, last - first - 1);
    const auto version = line.substr(last + 1);
    if (version != "HTTP/1.1" && version != "HTTP/1.0") return "its version is another one";
    head.old = version == "HTTP/1.0";
    if (!all(head.method, token)) return "its method is none";
    if (head.target.empty() || !all(head.target, target)) return "its target is none";
    head.fields.clear();
    while (take_line(bytes, line)) {
        if (line.empty()) return bytes.empty() ? "" : "its head does not end where it should";
        if (!read_field(line, head.fields.emplace_back())) return "a header of it is none";
    }
    return "its headers have no end";
}

std::size_t ChunkedBody::take(std::string_view bytes, std::string& body, std::size_t limit) {
    const auto all_of_it = bytes.size();
    while (state_ == State::more && !bytes.empty()) {
        if (at_ == At::data) {
            const auto size = std::min(left_, bytes.size());
            body.append(bytes, 0, size);
            bytes.remove_prefix(size);
            left_ -= size;
            if (left_ == 0) at_ = At::data_end;
            continue;
        }
        constexpr std::size_t longest = 4096; // a line, and all trailers
        std::string_view text;
        if (!take_line(bytes, text)) {
            if (bytes.find('\n') != bytes.npos || bytes.size() > longest) state_ = State::bad;
            break;
        }
        const bool good = text.size() <= longest && line(text, body.size(), limit);
        if (!good && state_ == State::more) state_ = State::bad;
    }
    return all_of_it - bytes.size();
}

bool ChunkedBody::line(std::string_view text, std::size_t taken, std::size_t limit) {
    if (at_ == At::data_end) {
        at_ = At::size;
        return text.empty();
    }
    if (at_ == At::trailer) {
        if (text.empty()) state_ = State::done;
        Field ignored;
        return text.empty() || ((trailers_ += text.size()) <= 4096 && read_field(text, ignored));
    }
    const auto digits = std::min(text.find_first_not_of("0123456789abcdefABCDEF"), text.size());
    const auto rest = text.substr(digits);
    if (digits == 0 || digits > 15 || !all(rest, value)) return false;
    if (!rest.empty() && !trimmed(rest).starts_with(';')) return false;
    std::from_chars(text.data(), text.data() + digits, left_, 16);
    at_ = left_ > 0 ? At::data : At::trailer;
    if (left_ > limit - std::min(limit, taken)) state_ = State::large;
    return state_ != State::large;
}

} // namespace evalrt::detail
