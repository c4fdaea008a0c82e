#include "merge.hpp"

#include "batch.hpp"
#include "bfcl.hpp"
#include "suite.hpp"

#include "evalrt/journal.hpp"
#include "json_text.hpp"
#include "wire.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>


namespace evalrt::program {
namespace {

using detail::from_json_string;
using detail::member;
using detail::members;

enum class Kind { unreadable, journal, output, results, other };

Kind kind_of(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::string head(16, '\0');
    file.read(head.data(), 16);
    if (!file.is_open() || file.bad()) return Kind::unreadable;
    head.resize(std::size_t(file.gcount()));
    if (head.starts_with("SQLite format 3")) return Kind::journal;
    if (head.empty()) return Kind::output;
    file.clear();
    file.seekg(0);
    std::string line;
    std::getline(file, line);
    if (detail::check_object(line)) return Kind::other;
    const auto list = members(line);
    if (member(list, "custom_id")) return Kind::output;
    return member(list, "id") && member(list, "result") ? Kind::results : Kind::other;
}

int fail(std::string_view what) {
    say(what);
    return exit_usage;
}

int unwritable(const std::string& path) {
    say(fmt::format("cannot write {}: {}", path, std::strerror(errno)));
    return exit_unwritable;
}

// "2, 5-7 and 12 more"
std::string ranges(const std::vector<std::size_t>& numbers) {
    std::string text;
    std::size_t shown = 0, i = 0;
    for (; i < numbers.size() && shown < 10; ++shown) {
        auto last = i;
        while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
        text += fmt::format("{}{}{}", text.empty() ? "" : ", ", numbers[i],
                            last > i ? fmt::format("-{}", numbers[last]) : "");
        i = last + 1;
    }
    if (i < numbers.size()) text += fmt::format(" and {} more", numbers.size() - i);
    return text;
}

int merge_journal_files(const std::string& out, const std::vector<std::string>& shards) {
    JournalMerge result;
    if (const auto failure = merge_journals(out, shards, result)) {
        say(failure.detail);
        return failure.code == JournalErrc::changed || failure.code == JournalErrc::foreign
                   ? exit_usage
                   : exit_unwritable;
    }
    say(fmt::format("{}: {} items, {} answered, {} failed, {} not run", out, result.items,
                    result.answered, result.failed, result.not_run));
    std::string missing;
    for (const auto& it : result.missing) missing += (missing.empty() ? "" : ", ") + it;
    if (!missing.empty()) say("missing shards: " + missing);
    return result.answered == result.items && missing.empty() ? exit_answered : exit_failed;
}

struct Line {
    std::string text, custom_id;
    bool answered = false;
};

std::string answer_of(const std::string& line) {
    const auto list = members(line);
    const auto response = member(list, "response");
    if (!response || !response->starts_with('{')) return {};
    const auto inner = members(*response);
    const auto body = member(inner, "body");
    if (!body || !body->starts_with('{')) return {};
    const auto parts = members(*body);
    for (const auto* name : {"choices", "content"})
        if (const auto value = member(parts, name)) return std::string(*value);
    return std::string(*body);
}

int merge_outputs(const std::string& out, const std::vector<std::string>& shards,
                  const std::string& suite) {
    std::map<std::size_t, Line> lines; // by number in the suite
    for (const auto& path : shards) {
        std::ifstream file(path, std::ios::binary);
        std::string text;
        for (std::size_t row = 1; std::getline(file, text); ++row) {
            const bool cut_off = file.eof();
            if (text.empty()) continue;
            const auto bad = [&](std::string_view why) {
                return fail(fmt::format("{}, line {}: {}", path, row, why));
            };
            if (detail::check_object(text)) {
                if (cut_off) { // the end of a process that was killed
                    say(fmt::format("{}: its last line is cut off and left out", path));
                    continue;
                }
                return bad("is no JSON object");
            }
            const auto list = members(text);
            const auto id = from_json_string(member(list, "id").value_or("\"\""));
            Line line;
            line.custom_id = from_json_string(member(list, "custom_id").value_or("\"\""));
            line.answered = member(list, "error") == "null";
            char* end = nullptr;
            const auto number =
                id.starts_with("evalrt-") ? std::strtoul(id.c_str() + 7, &end, 10) : 0;
            if (number == 0 || *end) return bad("is no output line of evalrt run");
            line.text = std::move(text);
            const auto [it, fresh] = lines.try_emplace(number);
            auto& held = it->second;
            if (!fresh && held.custom_id != line.custom_id)
                return bad(fmt::format("the item {} is \"{}\" here and \"{}\" in a file before: "
                                       "they are not of one suite",
                                       number, line.custom_id, held.custom_id));
            if (!fresh && held.answered && line.answered &&
                answer_of(held.text) != answer_of(line.text))
                return bad(fmt::format("\"{}\" is answered otherwise than in a file before",
                                       line.custom_id));
            if (fresh || (line.answered && !held.answered)) held = std::move(line);
        }
        if (file.bad()) return fail(fmt::format("cannot read {}", path));
    }
    std::vector<std::size_t> missing;
    std::size_t count = lines.empty() ? 0 : lines.rbegin()->first, answered = 0;
    if (!suite.empty()) {
        const auto input = batch::read(suite, true);
        if (!input.error.empty()) return fail(input.error);
        if (count > input.items.size())
            return fail(fmt::format("{} has {} items, there is an answer to number {}", suite,
                                    input.items.size(), count));
        for (const auto& [number, line] : lines)
            if (input.items[number - 1].custom_id != line.custom_id)
                return fail(fmt::format("the item {} of {} is \"{}\", the answer is to \"{}\"",
                                        number, suite, input.items[number - 1].custom_id,
                                        line.custom_id));
        count = input.items.size();
    }
    for (std::size_t i = 1; i <= count; ++i)
        if (!lines.contains(i)) missing.push_back(i);
    const auto part = out + ".tmp";
    std::ofstream file(part, std::ios::binary | std::ios::trunc);
    for (const auto& [number, line] : lines) {
        file << line.text << '\n';
        answered += line.answered;
    }
    file.close();
    if (!file) return unwritable(part);
    if (std::rename(part.c_str(), out.c_str()) != 0) return unwritable(out);
    say(fmt::format("{}: {} items, {} answered, {} failed, {} missing{}", out, count, answered,
                    lines.size() - answered, missing.size(),
                    suite.empty() ? " as far as the numbers say (--suite FILE knows the end)"
                                  : ""));
    if (!missing.empty()) say("missing are the numbers " + ranges(missing));
    return answered == count ? exit_answered : exit_failed;
}

int merge_results(const std::string& out, const std::vector<std::string>& shards) {
    std::vector<bfcl::Row> all;
    std::map<std::string, std::string> results;
    for (const auto& path : shards) {
        auto rows = bfcl::read_results(path);
        if (!rows) return fail(rows.error().detail);
        for (auto& row : *rows) {
            const auto result = std::string(member(members(row.text), "result").value_or(""));
            const auto [it, fresh] = results.emplace(row.id, result);
            if (!fresh && it->second != result)
                return fail(
                    fmt::format("{} answers {} otherwise than a file before it", path, row.id));
            if (fresh) all.push_back(std::move(row));
        }
    }
    const auto count = all.size();
    if (const auto failure = bfcl::write_results(out, std::move(all))) {
        say(failure.detail);
        return exit_unwritable;
    }
    say(fmt::format("{}: {} rows", out, count));
    return exit_answered;
}

} // namespace

int merge(const std::string& out, const std::vector<std::string>& shards,
          const std::string& suite) {
    std::optional<Kind> kind;
    std::error_code none;
    for (const auto& path : shards) {
        if (std::filesystem::equivalent(path, out, none))
            return fail(
                fmt::format("{} is to be joined, and to be written: give a new file", path));
        const auto it = kind_of(path);
        if (it == Kind::unreadable)
            return fail(fmt::format("cannot read {}: {}", path, std::strerror(errno)));
        if (it == Kind::other)
            return fail(fmt::format("{} is no journal, no output of evalrt run and no result file "
                                    "of evalrt bfcl",
                                    path));
        if (kind && *kind != it)
            return fail("give journals, or outputs, or result files: one kind");
        kind = it;
    }
    if (kind == Kind::journal) return merge_journal_files(out, shards);
    return kind == Kind::results ? merge_results(out, shards) : merge_outputs(out, shards, suite);
}

} // namespace evalrt::program
