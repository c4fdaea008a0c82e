// Reading servers' answers with simdjson: for the wires alone.
#ifndef EVALRT_LIB_DOM_HPP
#define EVALRT_LIB_DOM_HPP

#include "json_text.hpp"
#include "wire.hpp"

#include <simdjson.h>

#include <array>
#include <memory>
#include <new>
#include <vector>

namespace evalrt::detail {

namespace dom = simdjson::dom;

/// Empty where it is something else.
std::string_view string_of(simdjson::simdjson_result<dom::element> value);
/// A whole number from 0; some servers write 12.0.
std::optional<std::int64_t> integer_of(simdjson::simdjson_result<dom::element> value);

using Found = simdjson::simdjson_result<dom::element>;

/// The first member of each of these names, in one pass: each operator[] is one.
template <std::size_t N>
std::array<Found, N> pick(dom::element of, const std::string_view (&names)[N]) {
    std::array<Found, N> found;
    dom::object object;
    found.fill(Found(of.get(object) ? simdjson::INCORRECT_TYPE : simdjson::NO_SUCH_FIELD));
    if (!of.is_object()) return found;
    for (const auto [key, value] : object)
        for (std::size_t i = 0; i < N; ++i)
            if (key == names[i]) {
                if (found[i].error()) found[i] = Found(dom::element(value));
                break;
            }
    return found;
}

ServerError read_error(dom::element object);
/// The error that an answer is, if it is one.
std::optional<ServerError> error_of(dom::element answer);

/// Fit to be shown on one line.
std::string shortened(std::string_view text, std::size_t limit = 400);
/// Behind what may stand before the JSON.
std::string_view trimmed_json(std::string_view body);
bool looks_like_html(std::string_view body);
/// What to say of an answer that does not parse.
std::string not_json(std::string_view body);

void fail(Response& response, Errc errc, std::string detail);
/// Of an answer with a 2xx status that is an error all the same.
void fail(Response& response, const ServerError& error);

/// A parser that takes no more than 256 levels: the limit for all JSON, asked for or answered.
inline std::unique_ptr<dom::parser> make_parser() {
    auto parser = std::make_unique<dom::parser>();
    if (parser->allocate(4096, 256)) throw std::bad_alloc();
    return parser;
}

/// Parses an object. Text that does not parse is repaired first, if that helps: one character that
/// a model put out of place must not lose its answer. `text` is then what was parsed.
class ObjectParser {
public:
    /// `padded`: behind the text there is memory for as much as simdjson reads ahead.
    bool parse(std::string_view& text, dom::element& object, bool padded = false) {
        if (text.empty()) return false; // simdjson would hand its null pointer to memcpy
        if (parser_->parse(text.data(), text.size(), !padded).get(object)) {
            repaired_ = repaired_json(text);
            text = repaired_;
            if (parser_->parse(repaired_).get(object)) return false;
        }
        return object.is_object();
    }

    ObjectParser() : parser_(take()) {}
    ObjectParser(const ObjectParser&) = delete;
    ObjectParser& operator=(const ObjectParser&) = delete;
    ~ObjectParser() {
        auto* const list = spare();
        if (list && list->size() < 64 && parser_->capacity() <= 64 << 10)
            list->push_back(std::move(parser_));
    }

private:
    using Owned = std::unique_ptr<dom::parser>;

    // What a parser allocates costs as much as the parsing of a short answer. Parsers may outlive
    // their thread's list, in a static object.
    struct Spare {
        std::vector<Owned> parsers;
        ~Spare() { ended() = true; }
        static bool& ended() {
            thread_local bool it = false;
            return it;
        }
    };
    static std::vector<Owned>* spare() {
        if (Spare::ended()) return nullptr;
        thread_local Spare it;
        return &it.parsers;
    }
    static Owned take() {
        auto* const list = spare();
        if (!list || list->empty()) return make_parser();
        auto parser = std::move(list->back());
        list->pop_back();
        return parser;
    }

    Owned parser_;
    std::string repaired_;
};

} // namespace evalrt::detail

#endif
