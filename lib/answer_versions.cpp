#include "evalrt/detail/answer_versions.hpp"

#include "json_text.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

namespace evalrt::detail {
namespace {

constexpr std::size_t most = 100;   // that are kept
constexpr std::size_t shown = 5;    // in a note
constexpr std::size_t longest = 60; // bytes of a name in a note

// As written between the quotes; empty: it does not say. Looks at the name of the member only: a
// walk through the answer would cost more, and text in it cannot hold a quote as it is.
std::string_view fingerprint(std::string_view body) {
    constexpr std::string_view key = "\"system_fingerprint\"";
    const void* const found = ::memmem(body.data(), body.size(), key.data(), key.size());
    if (!found) return {};
    const auto skip_space = [&] {
        body.remove_prefix(std::min(body.find_first_not_of(" \t\r\n"), body.size()));
    };
    body.remove_prefix(std::size_t(static_cast<const char*>(found) - body.data()) + key.size());
    skip_space();
    if (!body.starts_with(':')) return {};
    body.remove_prefix(1);
    skip_space();
    if (!body.starts_with('"')) return {};
    body.remove_prefix(1);
    return body.substr(0, body.find('"'));
}

} // namespace

void AnswerVersions::add(std::string_view body, std::string_view where) {
    const auto name = fingerprint(body);
    if (name.empty()) return; // the other wire has no such member: it is no version
    if (first_.empty()) first_ = name;
    auto it = versions_.find(name);
    if (it == versions_.end()) {
        if (versions_.size() >= most) return;
        it = versions_.emplace(name, Version{0, std::string(where)}).first;
    }
    ++it->second.answers;
}

std::string AnswerVersions::note() const {
    if (versions_.size() < 2) return {};
    std::string text;
    std::size_t count = 0;
    for (const auto& [name, it] : versions_) {
        if (count++ == shown) break;
        text += fmt::format("{}{} by {}{}", text.empty() ? "" : ", ", it.answers,
                            json_string(repaired_utf8(name.substr(0, longest))),
                            it.where.empty() ? "" : ", the first in " + it.where);
    }
    if (versions_.size() > shown) text += ", and more";
    return fmt::format(
        "servers of different versions (system_fingerprint) have answered: {}; where "
        "answers differ, this may be why",
        text);
}

} // namespace evalrt::detail
