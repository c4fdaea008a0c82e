#include "batch.hpp"

#include "json_text.hpp"
#include "text_hash.hpp"
#include "wire.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <unordered_map>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace evalrt::batch {
namespace {

using detail::from_json_string;
using detail::json_string;
using detail::member;
using detail::members;

std::string error_text() { return std::strerror(errno); }

Text read_all(std::FILE* file) {
    std::string all;
    char buffer[1 << 16];
    while (const auto n = std::fread(buffer, 1, sizeof buffer, file)) all.append(buffer, n);
    return Text(std::move(all));
}

// What is mapped, so that the fault of a file that is cut short meanwhile is told from others.
constexpr std::size_t read_limit = 256 << 20; // below, a file is read
const char* mapped_begin = nullptr;
const char* mapped_end = nullptr;

void cut_short(int, siginfo_t* info, void*) {
    const auto* at = static_cast<const char*>(info->si_addr);
    if (at < mapped_begin || at >= mapped_end) {
        std::signal(SIGBUS, SIG_DFL); // the instruction is tried again
        return;
    }
    constexpr std::string_view words = "evalrt: the batch file was cut short while it was being "
                                       "run; with --journal what was answered is kept\n";
    [[maybe_unused]] const auto n = ::write(STDERR_FILENO, words.data(), words.size());
    ::_exit(2);
}

// The whole input; a large file is mapped, not read.
std::string load(const std::string& path, Text& text) {
    if (path == "-") {
        text = read_all(stdin);
        return {};
    }
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return fmt::format("cannot open {}: {}", path, error_text());
    struct stat info;
    std::string error;
    if (::fstat(fd, &info) != 0) {
        error = fmt::format("cannot read {}: {}", path, error_text());
    } else if (S_ISDIR(info.st_mode)) {
        error = fmt::format("{} is a folder; give a file with one request a line", path);
    } else if (!S_ISREG(info.st_mode)) { // a pipe: <(command)
        if (std::FILE* file = ::fdopen(fd, "r")) {
            text = read_all(file);
            std::fclose(file);
            return {};
        }
        error = fmt::format("cannot read {}: {}", path, error_text());
    } else if (info.st_size > 0) {
        const auto size = std::size_t(info.st_size);
        if (size < read_limit) {
            std::string all(size, '\0');
            std::size_t have = 0;
            for (ssize_t n; have < size; have += std::size_t(n))
                if ((n = ::pread(fd, all.data() + have, size - have, off_t(have))) <= 0) break;
            all.resize(have);
            text = Text(std::move(all));
            ::close(fd);
            return {};
        }
        void* mapped = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (mapped == MAP_FAILED)
            error = fmt::format("cannot read {}: {}", path, error_text());
        else {
            mapped_begin = static_cast<const char*>(mapped);
            mapped_end = mapped_begin + size;
            struct sigaction action = {};
            action.sa_sigaction = cut_short;
            action.sa_flags = SA_SIGINFO;
            ::sigaction(SIGBUS, &action, nullptr);
            text =
                Text(std::shared_ptr<const void>(
                         mapped, [size](const void* p) { ::munmap(const_cast<void*>(p), size); }),
                     {static_cast<const char*>(mapped), size});
        }
    }
    ::close(fd);
    return error;
}

// The text of a member; the owner of the line keeps it alive.
Text shared(const Text& owner, std::string_view view) {
    return Text(std::make_shared<Text>(owner), view);
}

Item parse(const Text& input, std::string_view line, std::size_t number) {
    Item item;
    item.custom_id = std::to_string(number);
    std::vector<detail::Member> list;
    if (const auto error = detail::object_error(line, &list)) {
        item.problem = *error;
        return item;
    }
    const auto body = member(list, "body");
    if (const auto id = member(list, "custom_id")) {
        item.custom_id = from_json_string(*id);
        if (item.custom_id.empty()) item.problem = "\"custom_id\" is empty or no string";
        if (id->find("\\u") != id->npos && detail::check_object(fmt::format(R"({{"": {}}})", *id)))
            item.problem = "\"custom_id\" has half a surrogate pair in it";
    }
    if (!body) { // a line that is only a body
        if (member(list, "custom_id") || member(list, "url") || member(list, "method"))
            item.problem = "no \"body\"";
        else if (member(list, "messages"))
            item.request.endpoint = "/v1/chat/completions";
        else if (member(list, "prompt"))
            item.request.endpoint = "/v1/completions";
        else
            item.problem = "neither \"body\" nor \"messages\" nor \"prompt\"";
        item.request.body = shared(input, line);
        return item;
    }
    if (!body->starts_with('{')) item.problem = "\"body\" is not an object";
    item.request.body = shared(input, *body);
    if (const auto method = member(list, "method"); method && *method != "\"POST\"")
        item.problem = fmt::format("\"method\" is {}, only POST is known", *method);
    if (const auto url = member(list, "url")) item.request.endpoint = from_json_string(*url);
    if (const auto error = detail::check_endpoint(item.request.endpoint))
        item.problem = "\"url\" is " + *error;
    if (const auto ours = member(list, "evalrt")) {
        const auto hints = members(*ours);
        if (const auto session = member(hints, "session"))
            item.request.session = from_json_string(*session);
        if (const auto turn = member(hints, "turn"))
            item.request.turn = std::atoi(std::string(*turn).c_str());
    }
    return item;
}

template <class T>
std::string number_or_null(const std::optional<T>& value) {
    return value ? fmt::format("{}", *value) : "null";
}

std::string ms(Timing::Millis value) { return fmt::format("{:.1f}", value.count()); }

} // namespace

Input read(const std::string& path, bool skip_invalid) {
    Input input;
    Text text;
    input.error = load(path, text);
    if (!input.error.empty()) return input;
    const auto name = path == "-" ? std::string("standard input") : path;
    std::unordered_map<std::string, std::size_t> lines; // by custom_id
    std::string_view rest = text;
    input.bytes = rest.size();
    if (rest.starts_with("\xEF\xBB\xBF")) rest.remove_prefix(3);
    for (std::size_t number = 1; !rest.empty(); ++number) {
        const auto end = rest.find('\n');
        auto line = rest.substr(0, end);
        rest.remove_prefix(end == rest.npos ? rest.size() : end + 1);
        if (line.ends_with('\r')) line.remove_suffix(1);
        if (line.find_first_not_of(" \t") == line.npos) continue;
        Item item = parse(text, line, number);
        const auto [first, fresh] = lines.emplace(item.custom_id, number);
        if (!fresh && item.problem.empty())
            item.problem = fmt::format("the custom_id \"{}\" stands in line {} already",
                                       item.custom_id, first->second);
        if (!item.problem.empty()) {
            ++input.problems;
            item.problem = fmt::format("line {}: {}", number, item.problem);
            if (!skip_invalid && input.error.empty())
                input.error = fmt::format("{}, {}", name, item.problem);
        }
        if (item.problem.empty())
            item.hash = detail::mixed(detail::text_hash(item.request.endpoint),
                                      detail::text_hash(item.request.body));
        item.number = input.items.size();
        if (item.number % 16384 == 16383) let_go();
        input.items.push_back(std::move(item));
    }
    if (!input.error.empty()) {
        if (input.problems > 1)
            input.error += fmt::format(" (and {} more such lines)", input.problems - 1);
        input.error += "; nothing was run (--skip-invalid runs the rest)";
    } else if (input.items.empty()) {
        input.error = fmt::format("{} has no requests in it; each line is one, such as "
                                  R"({{"custom_id": "a", "url": "/v1/chat/completions", )"
                                  R"("body": {{...}}}})",
                                  name);
    }
    return input;
}

void let_go() {
    if (mapped_begin)
        ::madvise(const_cast<char*>(mapped_begin), std::size_t(mapped_end - mapped_begin),
                  MADV_DONTNEED);
}

void override_member(Input& input, std::string_view key, const std::string& value) {
    const detail::Change change[] = {{key, value}};
    for (auto& item : input.items)
        if (item.problem.empty())
            item.request.body = Text(detail::with_changes(item.request.body, change));
}

std::vector<std::optional<std::size_t>> repeats(const std::vector<Item>& items) {
    std::vector<std::optional<std::size_t>> list(items.size());
    std::map<std::pair<std::string_view, std::string_view>, std::size_t> first;
    for (std::size_t i = 0; i < items.size(); ++i) {
        if (!items[i].problem.empty()) continue;
        const auto& request = items[i].request;
        const auto value = member(members(request.body), "temperature");
        if (!value || value->find_first_of("0123456789") == value->npos ||
            std::strtod(std::string(*value).c_str(), nullptr) != 0)
            continue;
        const auto [it, fresh] = first.try_emplace({request.endpoint, request.body.view()}, i);
        if (!fresh) list[i] = it->second;
    }
    return list;
}

std::string hash_text(const Item& item) {
    return item.hash ? fmt::format("{:016x}", item.hash) : std::string();
}

std::string output_line(const Item& item, const Response& response) {
    std::string out = fmt::format(R"({{"id": "evalrt-{}", "custom_id": {}, )", item.number + 1,
                                  json_string(item.custom_id));
    if (response.status > 0) {
        out += fmt::format(R"("response": {{"status_code": {}, "request_id": {}, "body": {}}}, )",
                           response.status, json_string(response.request_id),
                           response.body.empty() ? "null" : response.body);
    } else {
        out += R"("response": null, )";
    }
    if (response.outcome) {
        out += fmt::format(R"("error": {{"code": "{}", "message": {}}}, )", name(*response.outcome),
                           json_string(response.detail));
    } else {
        out += R"("error": null, )";
    }
    const auto& timing = response.timing;
    out += fmt::format(
        R"("evalrt": {{"attempts": {}, "queued_ms": {}, "first_text_ms": {}, "total_ms": {}, )"
        R"("prompt_tokens": {}, "cached_tokens": {}, "completion_tokens": {}, )"
        R"("from_journal": {}, "request": "{}"}}}})",
        response.attempts, ms(timing.queued), timing.first_text ? ms(*timing.first_text) : "null",
        ms(timing.total), number_or_null(response.usage.prompt_tokens),
        number_or_null(response.usage.cached_tokens),
        number_or_null(response.usage.completion_tokens), response.from_journal, hash_text(item));
    // A body may be spread over several lines; an output line is one.
    for (char& c : out)
        if (c == '\n' || c == '\r') c = ' ';
    return out;
}

bool is_standard_output(std::string_view path) {
    for (const std::string_view name : {"-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"})
        if (path == name) return true;
    return false;
}

std::string other_item(const std::string& path, const std::vector<bool>& ours) {
    std::error_code none;
    if (!std::filesystem::is_regular_file(path, none)) return {};
    std::ifstream file(path, std::ios::binary);
    for (std::string line; std::getline(file, line);) {
        if (detail::check_object(line)) continue;
        const auto list = members(line);
        const auto id = from_json_string(member(list, "id").value_or("\"\""));
        const auto number =
            id.starts_with("evalrt-") ? std::strtoul(id.c_str() + 7, nullptr, 10) : 0;
        if (number > 0 && (number > ours.size() || !ours[number - 1]))
            return from_json_string(member(list, "custom_id").value_or("\"\""));
    }
    return {};
}

std::string Output::open(const std::string& path, std::size_t count, bool journalled,
                         std::unique_ptr<Output>& out) {
    out.reset(new Output);
    out->places_.resize(count);
    if (path.empty() || is_standard_output(path)) {
        if ((::fcntl(STDOUT_FILENO, F_GETFL) & O_ACCMODE) == O_RDONLY)
            return "standard output is closed; give -o a file";
        out->file_ = std::tmpfile();
        if (!out->file_) return fmt::format("cannot make a temporary file: {}", error_text());
        return {};
    }
    struct stat info;
    const bool there = ::stat(path.c_str(), &info) == 0;
    if (there && S_ISDIR(info.st_mode)) return fmt::format("{} is a folder; give -o a file", path);
    out->path_ = path;
    if (there && !S_ISREG(info.st_mode)) { // /dev/null, a pipe: written to, never replaced
        out->replaces_ = false;
        out->file_ = std::tmpfile();
        if (!out->file_) return fmt::format("cannot make a temporary file: {}", error_text());
        return {};
    }
    std::error_code none;
    if (there) // behind a link
        if (const auto real = std::filesystem::canonical(path, none); !none)
            out->path_ = real.string();
    out->part_ = path + ".part";
    // Answers of an earlier run are not thrown away.
    if (journalled && std::filesystem::exists(out->part_, none)) return out->hold();
    return out->make(false);
}

// Two runs that write one OUT would write over each other. Where a file system has no locks, there
// is none.
std::string Output::in_use(int fd) const {
    if (::flock(fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return {};
    ::close(fd);
    return fmt::format("{} is being written by another run: give -o another file", part_);
}

std::string Output::hold() {
    held_ = ::open(part_.c_str(), O_RDWR | O_CLOEXEC);
    if (held_ < 0) return fmt::format("cannot write {}: {}", part_, error_text());
    auto error = in_use(held_);
    if (!error.empty()) held_ = -1;
    return error;
}

std::string Output::make(bool replace) {
    int fd = std::exchange(held_, -1);
    if (fd >= 0) {
        if (::ftruncate(fd, 0) != 0) {
            ::close(fd);
            return fmt::format("cannot write {}: {}", part_, error_text());
        }
        file_ = ::fdopen(fd, "w+");
        return {};
    }
    fd = ::open(part_.c_str(), O_RDWR | O_CREAT | (replace ? O_TRUNC : O_EXCL) | O_CLOEXEC, 0666);
    if (fd < 0 && errno == EEXIST)
        return fmt::format("{} is there already, with the answers of a run that did not end: move "
                           "or delete it first",
                           part_);
    if (fd < 0) return fmt::format("cannot write {}: {}", part_, error_text());
    if (auto error = in_use(fd); !error.empty()) return error;
    file_ = ::fdopen(fd, "w+");
    return {};
}

void Output::drop() {
    if (file_ && !part_.empty()) std::remove(part_.c_str());
}

Output::~Output() {
    if (file_) std::fclose(file_);
    if (held_ >= 0) ::close(held_);
}

bool Output::add(std::size_t index, std::string_view line) {
    if (!file_ && !make(true).empty()) return false;
    places_[index] = {end_, std::uint32_t(line.size())};
    end_ += line.size() + 1;
    return std::fwrite(line.data(), 1, line.size(), file_) == line.size() &&
           std::fputc('\n', file_) != EOF && std::fflush(file_) == 0;
}

bool Output::copy_to(std::FILE* target) {
    std::string line;
    for (const auto& place : places_) {
        if (place.size == 0) continue;
        line.resize(place.size);
        if (::pread(::fileno(file_), line.data(), line.size(), off_t(place.offset)) !=
            ssize_t(line.size()))
            return false;
        line += '\n';
        if (std::fwrite(line.data(), 1, line.size(), target) != line.size()) return false;
    }
    return std::fflush(target) == 0;
}

bool Output::finish(bool whole) {
    if (path_.empty()) return copy_to(stdout);
    if (!whole) return true;
    if (!file_ && !make(true).empty()) return false;
    const auto temporary = replaces_ ? path_ + ".tmp" : path_;
    std::FILE* target = std::fopen(temporary.c_str(), "w");
    if (!target) return false;
    const bool good = copy_to(target) && (!replaces_ || ::fsync(::fileno(target)) == 0);
    if (std::fclose(target) != 0 || !good) return false;
    if (!replaces_) return true;
    if (std::rename(temporary.c_str(), path_.c_str()) != 0) return false;
    return std::remove(part_.c_str()) == 0;
}

} // namespace evalrt::batch
