#include "merge.hpp"

#include "batch.hpp"
#include "bfcl.hpp"
#include "suite.hpp"

#include "evalrt/detail/answer_versions.hpp"
#include "evalrt/journal.hpp"
#include "json_text.hpp"
#include "wire.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <sstream>
#include <unordered_set>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

namespace evalrt::program {
namespace {

using detail::from_json_string;
using detail::member;
using detail::members;

enum class Kind { unreadable, nothing, journal, output, results, other };

Kind kind_of(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::string head(16, '\0');
    file.read(head.data(), 16);
    if (!file.is_open() || file.bad()) return Kind::unreadable;
    head.resize(std::size_t(file.gcount()));
    if (head.starts_with("SQLite format 3")) return Kind::journal;
    if (head.empty()) return Kind::nothing;
    file.clear();
    file.seekg(0);
    std::string line;
    std::getline(file, line);
    if (detail::check_object(line)) return Kind::other;
    const auto list = members(line);
    if (member(list, "custom_id")) return Kind::output;
    return member(list, "id") && member(list, "result") ? Kind::results : Kind::other;
}

bool is_part(Kind it) { return it == Kind::journal || it == Kind::output || it == Kind::results; }

int fail(std::string_view what) {
    say(what);
    return exit_usage;
}

// What is joined goes to a new file, or through what is no file: standard output, a pipe, a device.
class Target {
public:
    // Nothing: it can be written. Otherwise why not.
    std::string open(const std::string& path) {
        path_ = path;
        if ((stdout_ = batch::is_standard_output(path))) return {};
        struct stat info;
        if (::stat(path.c_str(), &info) != 0) {
            // A link to nothing yet: what it names is written, the link stays.
            std::error_code none;
            if (const auto to = std::filesystem::read_symlink(path, none); !none)
                path_ = (std::filesystem::path(path).parent_path() / to).string();
            return {};
        }
        if (S_ISDIR(info.st_mode)) return fmt::format("{} is a folder: give a file", path);
        through_ = !S_ISREG(info.st_mode);
        std::error_code none;
        if (const auto real = std::filesystem::canonical(path, none); !none && !through_)
            path_ = real.string(); // behind a link
        if (through_ || info.st_size == 0) return {};
        return fmt::format("{} is there already, and is left as it is: give a new file, or move it "
                           "away (the file to write comes first: evalrt merge OUT SHARD...)",
                           path);
    }

    bool is_file() const { return !stdout_ && !through_; }
    const std::string& path() const { return path_; }
    const char* name() const { return stdout_ ? "standard output" : path_.c_str(); }

    // An exit code; 0: it is written.
    int write(const std::function<void(std::ostream&)>& fill) const {
        std::string text;
        if (stdout_) {
            std::ostringstream all;
            fill(all);
            text = std::move(all).str();
            if (std::fwrite(text.data(), 1, text.size(), stdout) == text.size() &&
                std::fflush(stdout) == 0)
                return exit_answered;
            return unwritable(name());
        }
        const auto to = through_ ? path_ : path_ + ".merging";
        if (!through_) std::remove(to.c_str()); // it may be a link
        std::ofstream file(to, std::ios::binary | std::ios::trunc);
        if (file) fill(file);
        file.close();
        if (file && (through_ || std::rename(to.c_str(), path_.c_str()) == 0)) return exit_answered;
        const int code = unwritable(file ? path_ : to);
        if (!through_) std::remove(to.c_str());
        return code;
    }

private:
    static int unwritable(const std::string& path) {
        say(fmt::format("cannot write {}: {}", path, std::strerror(errno)));
        return exit_unwritable;
    }

    std::string path_;
    bool stdout_ = false, through_ = false;
};

// One merge at a time writes to a folder: the second one finds what the first has made. Where a
// file system has no locks, there is none.
class FolderLock {
public:
    explicit FolderLock(const std::string& file) {
        std::error_code none;
        const auto whole = std::filesystem::absolute(file, none);
        const auto folder = std::filesystem::weakly_canonical(whole, none).parent_path();
        fd_ = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd_ >= 0) ::flock(fd_, LOCK_EX);
    }
    FolderLock(const FolderLock&) = delete;
    FolderLock& operator=(const FolderLock&) = delete;
    ~FolderLock() {
        if (fd_ >= 0) ::close(fd_);
    }

private:
    int fd_;
};

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

int merge_journal_files(const Target& out, const std::vector<std::string>& shards) {
    if (!out.is_file()) return fail("journals become a journal: give a file to write it to");
    JournalMerge result;
    if (const auto failure = merge_journals(out.path(), shards, result)) {
        say(failure.detail);
        return failure.code == JournalErrc::changed || failure.code == JournalErrc::foreign
                   ? exit_usage
                   : exit_unwritable;
    }
    for (const auto& it : result.empty)
        say(fmt::format("{} has no run in it that has asked for anything (if it is a copy: is its "
                        "-wal with it?), and is left out",
                        it));
    std::string missing;
    for (const auto& it : result.missing) missing += (missing.empty() ? "" : ", ") + it;
    if (!missing.empty()) say("missing shards: " + missing);
    if (!result.versions.empty()) say(result.versions);
    say(fmt::format("{}: {} items{}, {} answered, {} failed, {} not run", out.name(), result.items,
                    result.counted ? "" : " without those of the missing shards", result.answered,
                    result.failed, result.not_run));
    return result.answered == result.items && missing.empty() ? exit_answered : exit_failed;
}

struct Line {
    std::string text, custom_id;
    std::string request; // its hash; empty: not known
    bool answered = false;
};

std::string_view body_of(std::string_view line) {
    const auto list = members(line);
    const auto response = member(list, "response");
    if (!response || !response->starts_with('{')) return {};
    const auto inner = members(*response);
    const auto body = member(inner, "body");
    return body && body->starts_with('{') ? *body : std::string_view();
}

std::string answer_of(std::string_view line) {
    const auto body = body_of(line);
    const auto parts = members(body);
    for (const auto* name : {"choices", "content"})
        if (const auto value = member(parts, name)) return std::string(*value);
    return std::string(body);
}

// "2 items are changed (\"a\", \"b\"), ..."; empty: there are none that answers show.
std::string differences(const std::vector<batch::Item>& items,
                        const std::map<std::size_t, Line>& lines) {
    std::unordered_set<std::string_view> known;
    for (const auto& it : items) known.insert(it.custom_id);
    std::vector<std::string_view> changed, gone, moved, fresh;
    std::unordered_set<std::string_view> answered;
    for (const auto& [number, line] : lines) {
        answered.insert(line.custom_id);
        const auto* item = number <= items.size() ? &items[number - 1] : nullptr;
        if (!known.contains(line.custom_id))
            gone.push_back(line.custom_id);
        else if (!item || item->custom_id != line.custom_id)
            moved.push_back(line.custom_id);
        else if (const auto hash = batch::hash_text(*item);
                 !line.request.empty() && !hash.empty() && hash != line.request)
            changed.push_back(line.custom_id);
    }
    // Among those with an answer; others may only be missing.
    for (const auto& it : items)
        if (lines.contains(it.number + 1) && !answered.contains(it.custom_id))
            fresh.push_back(it.custom_id);
    std::string text;
    const auto say_of = [&](const std::vector<std::string_view>& ids, std::string_view what) {
        if (ids.empty()) return;
        text += fmt::format("{}{} {} (", text.empty() ? "" : ", ", ids.size(), what);
        for (std::size_t i = 0; i < ids.size() && i < 5; ++i)
            text += (i ? ", \"" : "\"") + std::string(ids[i]) + "\"";
        text += ids.size() > 5 ? ", ...)" : ")";
    };
    say_of(changed, "of its items are other requests now");
    say_of(gone, "that were asked are not in it");
    say_of(fresh, "in their places were not asked");
    say_of(moved, "have another place in it");
    return text;
}

int merge_outputs(const Target& out, const std::vector<std::string>& shards,
                  const std::string& suite) {
    std::map<std::size_t, Line> lines;                       // by number in the suite
    std::map<std::string, std::size_t, std::less<>> numbers; // by custom_id
    std::string model, of; // that has answered the files before, and the first of them
    std::size_t repeated = 0;
    detail::AnswerVersions versions;
    for (const auto& path : shards) {
        std::set<std::string> models;
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
            if (line.answered && models.size() < 2)
                models.insert(
                    from_json_string(member(members(body_of(text)), "model").value_or("\"\"")));
            // What was never asked may have the name of another.
            const auto ours = members(member(list, "evalrt").value_or("{}"));
            const bool asked = line.answered || member(list, "response") != "null" ||
                               member(ours, "attempts") != "0";
            line.request = from_json_string(member(ours, "request").value_or("\"\""));
            line.text = std::move(text);
            const auto known =
                asked ? numbers.emplace(line.custom_id, number).first->second : number;
            if (known != number)
                return bad(fmt::format("\"{}\" is the item {} here and {} in a line before: they "
                                       "are not of one suite",
                                       line.custom_id, number, known));
            const auto [it, fresh] = lines.try_emplace(number);
            auto& held = it->second;
            if (!fresh && held.custom_id != line.custom_id)
                return bad(fmt::format("the item {} is \"{}\" here and \"{}\" in a file before: "
                                       "they are not of one suite",
                                       number, line.custom_id, held.custom_id));
            if (held.answered && line.answered && !held.request.empty() && !line.request.empty() &&
                held.request != line.request)
                return bad(fmt::format("\"{}\" is another request than in a file before: the suite "
                                       "was changed between them",
                                       line.custom_id));
            repeated += !fresh;
            if (!fresh && held.answered && line.answered &&
                answer_of(held.text) != answer_of(line.text))
                return bad(fmt::format("\"{}\" is answered otherwise than in a file before",
                                       line.custom_id));
            if (!fresh && (held.answered || !line.answered)) continue;
            if (line.answered) versions.add(body_of(line.text), path);
            held = std::move(line);
        }
        if (file.bad()) return fail(fmt::format("cannot read {}", path));
        // A suite may name several models; then each part may have each of them.
        if (models.size() != 1 || models.begin()->empty()) continue;
        if (!model.empty() && model != *models.begin())
            return fail(fmt::format("{} was answered by the model \"{}\", {} by \"{}\": they are "
                                    "not of one run",
                                    path, *models.begin(), of, model));
        model = *models.begin();
        if (of.empty()) of = path;
    }
    std::vector<std::size_t> missing;
    std::size_t count = lines.empty() ? 0 : lines.rbegin()->first, answered = 0;
    if (!suite.empty()) {
        const auto input = batch::read(suite, true);
        if (!input.error.empty()) return fail(input.error);
        if (const auto why = differences(input.items, lines); !why.empty())
            return fail(
                fmt::format("{} is not the suite that these were asked of: {}", suite, why));
        count = input.items.size();
    }
    for (std::size_t i = 1; i <= count; ++i)
        if (!lines.contains(i)) missing.push_back(i);
    if (count == 0) return fail("there is no item in any of these files");
    if (const int code = out.write([&](std::ostream& file) {
            for (const auto& [number, line] : lines) {
                file << line.text << '\n';
                answered += line.answered;
            }
        }))
        return code;
    if (repeated > 0)
        say(fmt::format("{} lines are of items that are in a file before: these are parts of more "
                        "than one cut, or of one that was run again",
                        repeated));
    if (const auto text = versions.note(); !text.empty()) say(text);
    say(fmt::format("{}: {} items, {} answered, {} failed, {} missing{}", out.name(), count,
                    answered, lines.size() - answered, missing.size(),
                    suite.empty() ? " as far as the numbers say (--suite FILE knows the end)"
                                  : ""));
    if (!missing.empty()) say("missing are the numbers " + ranges(missing));
    return answered == count ? exit_answered : exit_failed;
}

int merge_results(const Target& out, const std::vector<std::string>& shards) {
    std::vector<bfcl::Row> all;
    std::map<std::string, std::string> results;
    std::string category;
    std::set<std::size_t> numbers;
    bool whole = true;
    for (const auto& path : shards) {
        std::string cut;
        auto rows = bfcl::read_results(path, &cut);
        if (!rows) return fail(rows.error().detail);
        if (!cut.empty()) {
            whole = false;
            say(cut + " is cut off, and left out");
        }
        for (auto& row : *rows) {
            const auto [of, number] = bfcl::place(row.id);
            if (category.empty()) category = of;
            if (category != of)
                return fail(fmt::format("{} has rows of {}, and what is before of {}: join one "
                                        "category at a time",
                                        path, of, category));
            numbers.insert(number);
            const auto result = std::string(member(members(row.text), "result").value_or(""));
            const auto [it, fresh] = results.emplace(row.id, result);
            if (!fresh && it->second != result)
                return fail(
                    fmt::format("{} answers {} otherwise than a file before it", path, row.id));
            if (fresh) all.push_back(std::move(row));
        }
    }
    const auto count = all.size();
    if (count == 0) return fail("there is no row in any of these files");
    const auto text = bfcl::results_text(std::move(all));
    if (const int code = out.write([&](std::ostream& file) { file << text; })) return code;
    // The numbers of a category have no gaps; where they end is not known here.
    std::vector<std::size_t> missing;
    for (std::size_t i = 0; i < *numbers.rbegin(); ++i)
        if (!numbers.contains(i)) missing.push_back(i);
    say(fmt::format("{}: {} rows of {}, {} missing as far as the numbers say", out.name(), count,
                    category, missing.size()));
    if (!missing.empty()) say("missing are the numbers " + ranges(missing));
    return missing.empty() && whole ? exit_answered : exit_failed;
}

} // namespace

bool is_lock_alone(std::string_view path) {
    if (!path.ends_with(".lock")) return false;
    std::ifstream file{std::string(path)};
    long pid = 0;
    std::error_code none;
    return file >> pid && file.get() == '\n' && file.peek() == EOF &&
           !std::filesystem::exists(path.substr(0, path.size() - 5), none);
}

bool belongs_to_another(std::string_view path, const std::vector<std::string>& all) {
    // One may be another's: all.merging-wal.
    for (const std::string_view end : {"-wal", "-shm", "-journal", ".lock", ".new", ".merging"})
        if (path.ends_with(end)) {
            path.remove_suffix(end.size());
            return std::find(all.begin(), all.end(), path) != all.end() ||
                   belongs_to_another(path, all);
        }
    return false;
}

int merge(const std::string& to, const std::vector<std::string>& shards, const std::string& suite) {
    std::error_code none;
    for (const auto& path : shards)
        if (std::filesystem::equivalent(path, to, none))
            return fail(
                fmt::format("{} is to be joined, and to be written: give a new file (the file to "
                            "write comes first: evalrt merge OUT SHARD...)",
                            path));
    const FolderLock alone(to);
    Target out;
    if (const auto why = out.open(to); !why.empty()) return fail(why);
    std::optional<Kind> kind;
    std::vector<std::string> parts;
    auto named = shards;
    named.push_back(to); // what a merge that was killed has left of it
    for (const auto& path : shards) {
        if (out.is_file() && path == to + ".merging" && is_part(kind_of(path)))
            return fail(fmt::format("{} is where {} would be made: move it away, or give another "
                                    "file to write to",
                                    path, to));
        if (belongs_to_another(path, named)) continue;
        if (std::filesystem::exists(path, none) && !std::filesystem::is_directory(path, none) &&
            !std::filesystem::is_regular_file(path, none))
            return fail(fmt::format("{} is no file: it could be read only once", path));
        if (is_lock_alone(path)) {
            say(fmt::format("{} has no journal beside it yet, and is left out", path));
            continue;
        }
        const auto it = kind_of(path);
        if (it == Kind::unreadable)
            return fail(fmt::format("cannot read {}: {}", path, std::strerror(errno)));
        if (it == Kind::other)
            return fail(fmt::format("{} is no journal, no output of evalrt run and no result file "
                                    "of evalrt bfcl",
                                    path));
        if (it == Kind::nothing) {
            say(fmt::format("{} has nothing in it", path));
            continue;
        }
        if (kind && *kind != it)
            return fail("give journals, or outputs, or result files: one kind");
        kind = it;
        parts.push_back(path);
    }
    if (!suite.empty() && kind && *kind != Kind::output)
        return fail("--suite is for outputs: journals and result files know what is missing "
                    "without it");
    if (kind == Kind::journal) return merge_journal_files(out, parts);
    return kind == Kind::results ? merge_results(out, parts) : merge_outputs(out, parts, suite);
}

} // namespace evalrt::program
