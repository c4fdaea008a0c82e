// SseParser: bytes of a text/event-stream in, events out. No I/O.
#ifndef EVALRT_DETAIL_SSE_PARSER_HPP
#define EVALRT_DETAIL_SSE_PARSER_HPP

#include <cstring>
#include <string>
#include <string_view>

namespace evalrt::detail {

struct SseEvent {
    std::string_view type; ///< the event field; empty: none
    std::string_view data;
};

/// The event-stream interpretation of the WHATWG HTML standard, except that an event which the
/// end of the stream cuts off before its blank line still counts: servers exist that leave out
/// the last one. The result does not depend on how the bytes are cut.
class SseParser {
public:
    struct NoComments {
        void operator()(std::string_view) const {}
    };

    explicit SseParser(std::size_t event_limit = 8 << 20) : limit_(event_limit) {}

    /// Calls on_event(SseEvent) for each event that ends in these bytes, on_comment(text) for each
    /// comment. False: an event is over the limit and the stream is of no further use.
    template <class F, class C = NoComments>
    bool feed(std::string_view bytes, F&& on_event, C&& on_comment = C()) {
        const char* p = bytes.data();
        const char* const end = p + bytes.size();
        const char* lf = nullptr; // the first at or after p; end: none
        while (p != end) {
            if (skip_lf_) {
                skip_lf_ = false;
                if (*p == '\n' && ++p == end) break;
            }
            if (!lf || lf < p) lf = find(p, end, '\n');
            const char* const line_end = find(p, lf, '\r');
            const std::string_view piece(p, std::size_t(line_end - p));
            // What counts is the line as it came: a limit on its value would depend on the cut.
            if (data_.size() + line_.size() + piece.size() > limit_) return false;
            if (line_end == end) {
                line_.append(piece);
                break;
            }
            skip_lf_ = *line_end == '\r';
            p = line_end + 1;
            if (line_.empty()) {
                line(piece, on_event, on_comment);
            } else {
                line_.append(piece);
                line(line_, on_event, on_comment);
                line_.clear();
            }
        }
        return true;
    }

    /// The stream has ended.
    template <class F>
    void finish(F&& on_event) {
        if (!line_.empty()) {
            line(line_, on_event, NoComments());
            line_.clear();
        }
        dispatch(on_event);
    }

private:
    static const char* find(const char* p, const char* end, char c) {
        const void* found = p == end ? nullptr : std::memchr(p, c, std::size_t(end - p));
        return found ? static_cast<const char*>(found) : end;
    }

    template <class F, class C>
    void line(std::string_view text, F& on_event, C&& on_comment) {
        if (first_line_) {
            first_line_ = false;
            if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);
        }
        if (text.empty()) return dispatch(on_event);
        const auto colon = text.find(':');
        const auto field = text.substr(0, colon);
        auto value = colon == text.npos ? std::string_view() : text.substr(colon + 1);
        if (value.starts_with(' ')) value.remove_prefix(1);
        if (field == "data") {
            if (has_data_) data_ += '\n';
            data_ += value;
            has_data_ = true;
        } else if (field == "event") {
            type_ = value;
        } else if (colon == 0) {
            on_comment(value);
        } // id, retry: nothing here uses them
    }

    template <class F>
    void dispatch(F& on_event) {
        if (has_data_) on_event(SseEvent{type_, data_});
        has_data_ = false;
        data_.clear();
        type_.clear();
    }

    std::size_t limit_;
    std::string line_; // begun in an earlier feed
    std::string data_, type_;
    bool has_data_ = false;
    bool skip_lf_ = false; // the last byte was a CR that ended a line
    bool first_line_ = true;
};

} // namespace evalrt::detail

#endif
