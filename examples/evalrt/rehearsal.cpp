#include "rehearsal.hpp"

#include "json_text.hpp"
#include "temporary_folder.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <random>
#include <set>
#include <system_error>

#include <sys/stat.h>

namespace evalrt::program {
namespace {

namespace fs = std::filesystem;
using detail::elements;
using detail::from_json_string;
using detail::json_string;
using detail::Member;
using detail::member;
using detail::members;

std::string_view member_of(std::string_view object, std::string_view key) {
    if (!object.starts_with('{')) return {};
    return member(members(object), key).value_or("");
}

std::optional<double> number_in(const std::vector<Member>& schema, std::string_view key) {
    const auto text = std::string(member(schema, key).value_or(""));
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    if (text.empty() || *end || !std::isfinite(value)) return {};
    return value;
}

// The smallest that the schema permits, or nearly; 0 if it may be.
std::string sample_number(const std::vector<Member>& schema, bool whole) {
    const auto least = number_in(schema, "minimum"), most = number_in(schema, "maximum"),
               above = number_in(schema, "exclusiveMinimum"),
               below = number_in(schema, "exclusiveMaximum");
    const bool fits_none_else = member(schema, "exclusiveMinimum") == "true";
    const auto fits = [&](double it) {
        return !(least && (it < *least || (fits_none_else && it <= *least))) &&
               !(most && it > *most) && !(above && it <= *above) && !(below && it >= *below);
    };
    std::vector<double> candidates{0};
    for (const auto& it : {least, above})
        if (it) candidates.insert(candidates.end(), {std::ceil(*it), std::floor(*it) + 1});
    for (const auto& it : {most, below})
        if (it) candidates.insert(candidates.end(), {std::floor(*it), std::ceil(*it) - 1});
    if (!whole)
        for (const auto& low : {least, above})
            for (const auto& high : {most, below})
                if (low && high) candidates.insert(candidates.end(), {*low / 2 + *high / 2, *low});
    for (const double it : candidates)
        if (fits(it)) return whole ? fmt::format("{:.0f}", it) : fmt::format("{}", it);
    return "0";
}

// JSON that a schema asks for. Not what no model can be held to: patterns, formats, lengths.
class Sampler {
public:
    Sampler(std::string_view root, std::string_view marker) : root_(root), marker_(marker) {}

    std::string sample() { return of(root_).value_or(json_string(marker_)); }

private:
    // Nothing: it has itself in it, or is too large.
    std::optional<std::string> of(std::string_view schema) {
        if (left_ == 0) return {};
        --left_;
        if (!schema.starts_with('{')) return json_string(marker_);
        const auto list = members(schema);
        if (const auto name = member(list, "$ref")) return referred(*name);
        if (const auto options = member(list, "enum"); options && options->starts_with('['))
            if (const auto values = elements(*options); !values.empty())
                return std::string(values[0]);
        if (const auto only = member(list, "const")) return std::string(*only);
        const auto properties = member(list, "properties");
        if (!properties)
            for (const auto key : {"anyOf", "oneOf", "allOf"})
                if (const auto options = member(list, key); options && options->starts_with('['))
                    if (const auto all = elements(*options); !all.empty()) return first_of(all);
        auto type = member(list, "type").value_or("");
        if (type.starts_with('['))
            if (const auto types = elements(type); !types.empty()) type = types[0];
        if (type == "\"integer\"" || type == "\"number\"")
            return sample_number(list, type == "\"integer\"");
        if (type == "\"boolean\"") return "false";
        if (type == "\"null\"") return "null";
        if (type == "\"array\"") return array(list);
        if (type == "\"object\"" || properties) return object(list, properties.value_or("{}"));
        return json_string(marker_);
    }

    std::optional<std::string> referred(std::string_view name) {
        if (std::find(open_.begin(), open_.end(), name) != open_.end()) return {};
        std::string_view place = root_;
        auto path = name.substr(0, name.size() - 1); // without the quote
        if (!path.starts_with("\"#")) return json_string(marker_);
        for (path.remove_prefix(2); path.starts_with('/');) {
            path.remove_prefix(1);
            const auto step = path.substr(0, path.find('/'));
            place = member_of(place, step);
            path.remove_prefix(step.size());
        }
        open_.push_back(name);
        auto found = of(place);
        open_.pop_back();
        return found;
    }

    std::optional<std::string> first_of(const std::vector<std::string_view>& options) {
        for (const auto it : options)
            if (auto found = of(it)) return found;
        return {};
    }

    std::optional<std::string> array(const std::vector<Member>& list) {
        constexpr std::size_t most_text = 1 << 16;
        const auto items = member(list, "items"), first = member(list, "prefixItems");
        const auto firsts =
            first && first->starts_with('[') ? elements(*first) : std::vector<std::string_view>();
        const auto least = number_in(list, "minItems").value_or(0);
        const auto most = number_in(list, "maxItems").value_or(1e9);
        std::string out;
        std::optional<std::string> other;
        for (std::size_t i = 0; double(i) < most && out.size() < most_text; ++i) {
            const bool needed = double(i) < least;
            if (!needed && i >= std::max<std::size_t>(firsts.size(), items ? 1 : 0)) break;
            if (i >= firsts.size() && !other) other = of(items.value_or(""));
            const auto item = i < firsts.size() ? of(firsts[i]) : other;
            if (!item && needed) return {};
            if (!item) break;
            out += (i ? ", " : "") + *item;
        }
        return "[" + out + "]";
    }

    std::optional<std::string> object(const std::vector<Member>& list,
                                      std::string_view properties) {
        const auto names = member(list, "required").value_or("");
        const auto required =
            names.starts_with('[') ? elements(names) : std::vector<std::string_view>();
        std::string out;
        for (const auto& it : members(properties)) {
            const auto name = fmt::format("\"{}\"", it.key);
            const auto value = of(it.value);
            if (value)
                out += fmt::format("{}{}: {}", out.empty() ? "" : ", ", name, *value);
            else if (std::find(required.begin(), required.end(), name) != required.end())
                return {};
        }
        const auto others = member(list, "additionalProperties").value_or("");
        if (properties == "{}" && others != "false")
            if (const auto value = of(others)) out = "\"placeholder\": " + *value;
        return "{" + out + "}";
    }

    const std::string_view root_, marker_;
    std::vector<std::string_view> open_; // the references that lead to where we are
    unsigned left_ = 10'000;
};

std::string sample(std::string_view schema, std::string_view marker) {
    return Sampler(schema, marker).sample();
}

std::size_t count_of(std::string_view number) {
    std::size_t n = 1;
    std::from_chars(number.data(), number.data() + number.size(), n);
    return std::clamp<std::size_t>(n, 1, 1024);
}

struct Tool {
    std::string name, schema; // JSON
};

// The tool that the request insists on, if any.
std::optional<Tool> forced_tool(const std::vector<Member>& body, bool anthropic) {
    const auto choice = member(body, "tool_choice").value_or("");
    std::string_view wanted;
    if (choice.starts_with('{')) {
        const auto type = member_of(choice, "type");
        wanted = anthropic ? member_of(choice, "name")
                           : member_of(member_of(choice, "function"), "name");
        if (type != "\"any\"" && type != "\"tool\"" && type != "\"function\"") return {};
    } else if (choice != "\"required\"") {
        return {};
    }
    const auto tools = member(body, "tools").value_or("");
    if (!tools.starts_with('[')) return {};
    for (const auto it : elements(tools)) {
        const auto function = anthropic ? it : member_of(it, "function");
        const auto name = member_of(function, "name");
        if (name.empty() || (!wanted.empty() && name != wanted)) continue;
        return Tool{std::string(name),
                    std::string(member_of(function, anthropic ? "input_schema" : "parameters"))};
    }
    return {};
}

std::string chat(const std::vector<Member>& body, std::string_view marker, Response& response) {
    std::string choices, message;
    response.finish_reason = "stop";
    if (const auto tool = forced_tool(body, false)) {
        response.finish_reason = "tool_calls";
        message = fmt::format(
            R"("content": null, "tool_calls": [{{"id": {}, "type": "function", "function": )"
            R"({{"name": {}, "arguments": {}}}}}])",
            json_string(fmt::format("call_{}", marker)), tool->name,
            json_string(
                sample(tool->schema.empty() ? "{\"type\": \"object\"}" : tool->schema, marker)));
    } else {
        const auto format = member(body, "response_format").value_or("");
        const auto type = member_of(format, "type");
        response.text = marker;
        if (type == "\"json_schema\"")
            response.text = sample(member_of(member_of(format, "json_schema"), "schema"), marker);
        else if (type == "\"json_object\"")
            response.text = sample("{\"type\": \"object\"}", marker);
        message = "\"content\": " + json_string(response.text);
    }
    const auto n = count_of(member(body, "n").value_or("1"));
    for (std::size_t i = 0; i < n; ++i)
        choices += fmt::format(R"({}{{"index": {}, "message": {{"role": "assistant", {}}}, )"
                               R"("logprobs": null, "finish_reason": "{}"}})",
                               i ? ", " : "", i, message, response.finish_reason);
    return fmt::format(R"("object": "chat.completion", "choices": [{}])", choices);
}

std::string completions(const std::vector<Member>& body, std::string_view marker,
                        Response& response) {
    response.text = marker;
    response.finish_reason = "stop";
    // Text, a list of texts, a list of tokens, or a list of those.
    const auto prompt = member(body, "prompt").value_or("\"\"");
    std::vector<std::string_view> prompts{prompt};
    if (prompt.starts_with('[')) {
        const auto list = elements(prompt);
        if (!list.empty() && (list[0].starts_with('"') || list[0].starts_with('['))) prompts = list;
    }
    const auto logprobs = member(body, "logprobs").value_or("null");
    const bool wanted = logprobs != "null" && logprobs != "false";
    const auto n = count_of(member(body, "n").value_or("1"));
    std::string choices;
    std::size_t index = 0;
    for (const auto& it : prompts)
        for (std::size_t i = 0; i < n; ++i) {
            std::string scores = "null";
            if (wanted) {
                const auto word = json_string(marker);
                std::string tokens = word, numbers = "null", tops = "null", offsets = "0";
                const auto length = it.starts_with('[') ? elements(it).size() : 1;
                for (std::size_t k = 0; k < length; ++k) {
                    tokens += ", " + word;
                    numbers += ", -1.0";
                    tops += fmt::format(", {{{}: -1.0}}", word);
                    offsets += ", 0";
                }
                scores = fmt::format(R"({{"tokens": [{}], "token_logprobs": [{}], "top_logprobs": )"
                                     R"([{}], "text_offset": [{}]}})",
                                     tokens, numbers, tops, offsets);
            }
            choices += fmt::format(
                R"({}{{"index": {}, "text": {}, "logprobs": {}, "finish_reason": "stop"}})",
                index ? ", " : "", index, json_string(marker), scores);
            ++index;
        }
    return fmt::format(R"("object": "text_completion", "choices": [{}])", choices);
}

std::string message(const std::vector<Member>& body, std::string_view marker, Response& response) {
    std::string block;
    response.finish_reason = "stop";
    if (const auto tool = forced_tool(body, true)) {
        response.finish_reason = "tool_calls";
        block = fmt::format(R"({{"type": "tool_use", "id": {}, "name": {}, "input": {}}})",
                            json_string(fmt::format("toolu_{}", marker)), tool->name,
                            sample(tool->schema, marker));
    } else {
        response.text = marker;
        block = fmt::format(R"({{"type": "text", "text": {}}})", json_string(marker));
    }
    return fmt::format(
        R"("type": "message", "role": "assistant", "content": [{}], "stop_reason": "{}", )"
        R"("stop_sequence": null)",
        block, response.text.empty() ? "tool_use" : "end_turn");
}

constexpr std::string_view prefix = "evalrt-placeholder-";
constexpr std::size_t own_digits = 4;

// What stands for a character of a text; 0: spaces do not count.
constexpr auto counting = [] {
    std::array<char, 256> all{};
    for (std::size_t c = ' ' + 1; c < all.size(); ++c) all[c] = '.';
    for (int c = 'a'; c <= 'z'; ++c) all[std::size_t(c)] = all[std::size_t(c - 32)] = char(c);
    for (int c = '0'; c <= '9'; ++c) all[std::size_t(c)] = char(c);
    all['-'] = all['_'] = '-';
    all['\\'] = 0; // of a line end as JSON writes it
    return all;
}();

bool is_hex(char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); }

} // namespace

Traces::Traces(const std::string& marker) : random_(marker.substr(prefix.size())) {
    for (std::size_t i = 0; i + gram <= random_.size(); ++i) grams_.set(slot(&random_[i]));
}

std::size_t Traces::slot(const char* at) {
    std::uint64_t number;
    std::memcpy(&number, at, sizeof number);
    return std::size_t((number * 0x9e3779b97f4a7c15U) >> 54);
}

bool Traces::seen(std::string_view window, bool own) const {
    for (std::size_t at = 0; (at = window.find(prefix, at)) != window.npos;) {
        at += prefix.size();
        if (own ? window.substr(at, own_digits) == std::string_view(random_).substr(0, own_digits)
                : at < window.size() && is_hex(window[at]))
            return true;
    }
    // Any `shortest` have `gram` in them that begin at a multiple of the rest and one.
    for (std::size_t i = 0; i + gram <= window.size(); i += shortest - gram + 1) {
        if (!grams_[slot(&window[i])]) continue;
        const auto at = random_.find(window.substr(i, gram));
        if (at == random_.npos) continue;
        std::size_t before = 0, after = gram;
        while (before < std::min(i, at) && window[i - before - 1] == random_[at - before - 1])
            ++before;
        while (i + after < window.size() && at + after < random_.size() &&
               window[i + after] == random_[at + after])
            ++after;
        if (before + after >= shortest) return true;
    }
    return false;
}

bool Traces::Search::found(std::string_view piece) {
    constexpr std::size_t at_once = 64 << 10;
    while (!found_ && !piece.empty()) {
        const auto part = piece.substr(0, at_once);
        piece.remove_prefix(part.size());
        const auto kept = window_.size();
        window_.resize(kept + part.size());
        auto* end = window_.data() + kept;
        for (const char c : part) {
            if (std::exchange(escaped_, c == '\\' && !escaped_) &&
                (c == 'n' || c == 't' || c == 'r'))
                continue; // a line end as JSON writes it
            *end = counting[static_cast<unsigned char>(c)];
            end += *end != 0;
        }
        window_.resize(std::size_t(end - window_.data()));
        found_ = traces_.seen(window_, own_);
        window_.erase(0, window_.size() - std::min(window_.size(), prefix.size() + own_digits - 1));
    }
    return found_;
}

std::string Rehearsal::new_marker() {
    std::random_device random;
    return fmt::format("{}{:08x}{:08x}{:08x}{:08x}", prefix, random(), random(), random(),
                       random());
}

void Rehearsal::begin() {
    most_ = std::max(most_, std::exchange(different_, 0));
    for (auto& [key, it] : known_) it.next = 0;
    wanted_.clear();
    last_.clear();
    idle_ = 0;
}

std::optional<Response> Rehearsal::known(const Request& request) {
    const auto it = known_.find(key(request));
    if (it == known_.end()) return {};
    auto& [answers, next] = it->second;
    const auto occurrence = next++;
    if (occurrence >= answers.size()) return {};
    return answers[occurrence];
}

Response Rehearsal::rehearse(const Request& request) {
    auto name = key(request);
    const auto before = known_.find(name);
    const bool first = before == known_.end() || before->second.next == 0;
    if (auto answer = known(request)) {
        idle_ = 0;
        different_ += first;
        return std::move(*answer);
    }
    const bool derived = from_placeholder(request);
    different_ += first && !derived;
    idle_ = derived || name == last_ ? idle_ + 1 : 0;
    if (!derived) {
        auto& [answers, next] = known_[name];
        if (next == 0) next = 1; // known() has counted it if it was there
        if (idle_ < idle_limit) wanted_.push_back({request, next - 1});
    }
    last_ = std::move(name);
    return placeholder(request, marker_);
}

std::vector<Rehearsal::Wanted> Rehearsal::take_wanted() {
    // Of what it was stuck with, once is enough.
    if (stuck())
        while (wanted_.size() > 1 && key(wanted_.back().request) == last_ &&
               key(wanted_[wanted_.size() - 2].request) == last_)
            wanted_.pop_back();
    return std::exchange(wanted_, {});
}

void Rehearsal::learn(const Wanted& wanted, Response response) {
    if (response.outcome) return;
    auto& answers = known_[key(wanted.request)].answers;
    if (answers.size() <= wanted.occurrence) answers.resize(wanted.occurrence + 1);
    answers[wanted.occurrence] = std::move(response);
    ++learned_;
}

Response placeholder(const Request& request, std::string_view marker) {
    Response response;
    const auto body = members(request.body.view());
    const auto what = request.endpoint == "/v1/messages"      ? message(body, marker, response)
                      : request.endpoint == "/v1/completions" ? completions(body, marker, response)
                                                              : chat(body, marker, response);
    const bool anthropic = request.endpoint == "/v1/messages";
    response.status = 200;
    response.usage = {1, 0, 1};
    response.model = from_json_string(member(body, "model").value_or(""));
    response.body = fmt::format(
        R"({{"id": {}, "created": 0, "model": {}, {}, "usage": {}}})", json_string(marker),
        json_string(response.model), what,
        anthropic ? R"({"input_tokens": 1, "output_tokens": 1})"
                  : R"({"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2})");
    return response;
}

ThrowAway::~ThrowAway() {
    if (root_.empty()) return;
    std::error_code ignored;
    // What the command has made read-only goes too.
    for (auto it = fs::recursive_directory_iterator(root_, ignored);
         it != fs::recursive_directory_iterator(); it.increment(ignored))
        if (it->is_directory(ignored) && !it->is_symlink(ignored))
            fs::permissions(it->path(), fs::perms::owner_all, fs::perm_options::add, ignored);
    fs::remove_all(root_, ignored);
}

std::string ThrowAway::make(const fs::path& folder, const std::string& spelled) {
    std::error_code ec;
    from_ = fs::canonical(folder, ec);
    if (ec)
        return fmt::format("the current folder cannot be read: {}: change to one that is there",
                           ec.message());
    if (std::error_code none; spelled.starts_with('/') && fs::equivalent(spelled, folder, none))
        spelled_ = spelled;
    const auto too_much = fmt::format(
        "a rehearsal runs in a copy of the folder, and {} has more than {} files or {} GB: run the "
        "command from the folder that it writes its results to",
        from_.string(), most_files, most_bytes / 1'000'000'000);
    if (!from_.has_filename()) return too_much; // the system's root
    const auto name = detail::temporary_folder("evalrt-rehearsal", ec);
    if (ec)
        return fmt::format("cannot make a folder for the rehearsal: {}: set TMPDIR to one that can "
                           "be written",
                           ec.message());
    root_ = fs::canonical(name);
    folder_ = root_ / from_.filename();
    fs::create_directory(temporary(), ec);
    if (!ec) fs::create_directory(folder_, ec);
    std::size_t files = 0;
    std::uintmax_t bytes = 0;
    auto it =
        fs::recursive_directory_iterator(from_, fs::directory_options::skip_permission_denied, ec);
    for (; !ec && it != fs::recursive_directory_iterator(); it.increment(ec)) {
        const auto& path = it->path();
        if (path == root_) {
            it.disable_recursion_pending();
            continue;
        }
        const auto to = folder_ / path.lexically_relative(from_);
        const auto status = it->symlink_status(ec);
        if (ec) break;
        if (fs::is_symlink(status)) {
            auto target = fs::read_symlink(path, ec);
            if (ec) break;
            // What leads out of the folder has to lead there from the copy, too.
            const auto place = (path.parent_path() / target).lexically_normal();
            if (target.is_relative() && *place.lexically_relative(from_).begin() == "..")
                target = place;
            fs::create_symlink(target, to, ec);
        } else if (fs::is_directory(status)) {
            fs::create_directory(to, path, ec);
            fs::permissions(to, fs::perms::owner_all, fs::perm_options::add, ec);
        } else if (fs::is_regular_file(status)) {
            bytes += it->file_size(ec);
            if (++files > most_files || bytes > most_bytes) return too_much;
            if (ec) break;
            fs::copy_file(path, to, ec);
            if (ec == std::errc::permission_denied) { // it cannot be read by the command either
                ec.clear();
                continue;
            }
            if (!ec) fs::last_write_time(to, it->last_write_time(), ec);
        }
        if (ec) break;
    }
    if (ec)
        return fmt::format("cannot copy {} to {}: {}: is there room? TMPDIR names another place",
                           from_.string(), root_.string(), ec.message());
    return {};
}

std::string ThrowAway::moved(std::string text) const {
    const auto word = [](char c) {
        return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '-' || c == '.';
    };
    const auto to = folder_.string();
    const auto value = text.find('=') + 1; // 0: there is none
    for (const auto at : {std::size_t(0), value})
        if (const auto name = text.substr(at); name == ".." || name.starts_with("../")) {
            text.replace(at, name.size(), (from_ / name).lexically_normal().string());
            break;
        }
    for (const auto& from : {from_.string(), spelled_})
        for (std::size_t at = 0; !from.empty() && (at = text.find(from, at)) != text.npos;) {
            const auto end = at + from.size();
            const bool whole = (at == 0 || (!word(text[at - 1]) && text[at - 1] != '/')) &&
                               (end == text.size() || !word(text[end]));
            if (whole) text.replace(at, from.size(), to);
            at += whole ? to.size() : 1;
        }
    return text;
}

namespace {

// Files, each once by whatever name, and none of the system's own.
class Walk {
public:
    using Visit = std::function<void(const fs::path&, const struct stat&)>;

    explicit Walk(Visit visit) : visit_(std::move(visit)) {
        struct stat root {
        }, what{};
        if (::stat("/", &root) == 0) is_new(root); // nobody's place
        for (const auto name : {"/dev", "/proc", "/sys"})
            if (::stat(name, &what) == 0 && what.st_dev != root.st_dev)
                made_up_.insert(what.st_dev);
    }

    // Folders from the outside in. Links are left for later. `left`: files and folders that it may
    // come by. `again`: the first may have been seen, but not what is in it.
    void through(std::deque<fs::path>& places, std::size_t& left, std::deque<fs::path>& links,
                 bool again) {
        for (; !places.empty() && left > 0; places.pop_front()) {
            const auto& path = places.front();
            struct stat what {};
            if (::stat(path.c_str(), &what) != 0 || made_up_.contains(what.st_dev)) continue;
            const bool fresh = is_new(what);
            if (!fresh && !std::exchange(again, false)) continue;
            --left;
            if (fresh && S_ISREG(what.st_mode)) visit_(path, what);
            if (!S_ISDIR(what.st_mode)) continue;
            std::error_code gone;
            for (auto it = fs::directory_iterator(path, gone);
                 !gone && it != fs::directory_iterator(); it.increment(gone)) {
                std::error_code ignored;
                (it->is_symlink(ignored) ? links : places).push_back(it->path());
            }
        }
    }

private:
    bool is_new(const struct stat& what) { return seen_.emplace(what.st_dev, what.st_ino).second; }

    Visit visit_;
    std::set<std::pair<dev_t, ino_t>> seen_;
    std::set<dev_t> made_up_; // by the system
};

} // namespace

Snapshot look_at(const fs::path& folder) {
    Snapshot all;
    Walk walk([&](const fs::path& path, const struct stat& what) {
        std::error_code gone;
        all[path.string()] = {std::uintmax_t(what.st_size), fs::last_write_time(path, gone)};
    });
    std::deque<fs::path> places{folder}, links;
    auto left = 2 * ThrowAway::most_files;
    walk.through(places, left, links, false);
    return all;
}

Written written_since(std::time_t since, const Place& folder, const std::vector<Place>& elsewhere) {
    Written all;
    Walk walk([&](const fs::path& path, const struct stat& what) {
        // The latter is set by whoever copies an old file.
        if (std::max(what.st_mtime, what.st_ctime) >= since) all.files.push_back(path.string());
    });
    struct Root {
        fs::path path;
        std::size_t left;
        std::deque<fs::path> places{path}, links{};
    };
    std::vector<Root> roots{{folder.path, 2 * ThrowAway::most_files}};
    for (const auto& it : elsewhere) roots.push_back({it.path, it.most});
    for (auto& it : roots) walk.through(it.places, it.left, it.links, true);
    roots.front().left = folder.most;
    for (auto& it : roots) { // what has a name without a link is known by that
        while (!it.links.empty() && it.left > 0) {
            it.places.swap(it.links);
            walk.through(it.places, it.left, it.links, false);
        }
        if (!it.places.empty() || !it.links.empty()) all.cut.push_back(it.path.string());
    }
    return all;
}

std::vector<std::string> changed(const Snapshot& before, const Snapshot& after) {
    std::vector<std::string> all;
    for (const auto& [file, state] : after)
        if (const auto it = before.find(file); it == before.end() || it->second != state)
            all.push_back(file);
    for (const auto& [file, state] : before)
        if (!after.contains(file)) all.push_back(file);
    return all;
}

std::vector<std::string> others(std::vector<std::string> files,
                                const std::vector<std::string>& own) {
    std::erase_if(files, [&](const std::string& file) {
        return std::any_of(own.begin(), own.end(),
                           [&](const auto& it) { return !it.empty() && file.starts_with(it); });
    });
    return files;
}

std::vector<std::string> with_traces(const std::vector<std::string>& files, const Traces& traces,
                                     std::uintmax_t& most) {
    std::vector<std::pair<std::uintmax_t, std::string>> by_size;
    for (const auto& it : files) {
        std::error_code gone;
        // What the system makes up, as in /proc, has no size, and may never end.
        if (const auto size = fs::file_size(it, gone); !gone && size > 0)
            by_size.emplace_back(size, it);
    }
    std::sort(by_size.begin(), by_size.end());
    std::vector<std::string> all;
    std::vector<char> bytes(1 << 16);
    for (const auto& [size, name] : by_size) {
        std::ifstream file(name, std::ios::binary);
        Traces::Search search(traces, true);
        while (file && most > 0) {
            file.read(bytes.data(), std::streamsize(std::min<std::uintmax_t>(bytes.size(), most)));
            const std::string_view piece(bytes.data(), std::size_t(file.gcount()));
            most -= piece.size();
            if (!search.found(piece)) continue;
            all.push_back(name);
            break;
        }
    }
    return all;
}

} // namespace evalrt::program
