// The only file that includes SQLite.
//
// An item is written when it is asked for, an outcome when it ends; no row is changed afterwards
// but for an item's name, where its request comes by another one. Bodies are a table of their own,
// so that resuming and reporting do not read through them, and in pieces, so that pages are full
// whatever their length.
#include "journal_file.hpp"

#include "json_text.hpp"
#include "temporary_folder.hpp"
#include "url.hpp"

#include <boost/json/object.hpp>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>

#include <fmt/format.h>
#include <sqlite3.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <thread>
#include <unordered_map>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

namespace evalrt::detail {
namespace {

namespace json = boost::json;

constexpr int application_id = 0x45765274; // "EvRt"
// In version 1 keys had the address in them; a run's own identity says what its keys have.
constexpr int format_version = 2;
constexpr std::size_t piece_size = 2000;

// Ids of an outcome's pieces: bodies are at most 64 MB.
constexpr int piece_bits = 16;

constexpr const char* schema = R"(
CREATE TABLE runs(id INTEGER PRIMARY KEY, suite TEXT, identity TEXT, config TEXT, server_version TEXT);
CREATE TABLE sessions(id INTEGER PRIMARY KEY, run INTEGER, pid INTEGER, started INTEGER, ended INTEGER);
CREATE TABLE items(id INTEGER PRIMARY KEY, run INTEGER, key BLOB, occurrence INTEGER, name TEXT);
CREATE TABLE outcomes(id INTEGER PRIMARY KEY, item INTEGER, session INTEGER, at INTEGER, failure TEXT,
    shared INTEGER, source INTEGER, status INTEGER, attempts INTEGER, prompt_tokens INTEGER,
    cached_tokens INTEGER, completion_tokens INTEGER, expected_cached INTEGER, maximum_cached INTEGER,
    queued_us INTEGER, first_text_us INTEGER, last_text_us INTEGER, total_us INTEGER, detail TEXT,
    size INTEGER, text, finish_reason, request_id);
CREATE TABLE bodies(id INTEGER PRIMARY KEY, piece BLOB);
)";

constexpr const char* outcome_columns =
    "o.failure, o.source, o.status, o.attempts, o.prompt_tokens, o.cached_tokens, "
    "o.completion_tokens, o.expected_cached, o.maximum_cached, o.queued_us, o.first_text_us, "
    "o.last_text_us, o.total_us, o.detail";

std::int64_t unix_ms() {
    return std::chrono::duration_cast<std::chrono::milliseconds>(
               std::chrono::system_clock::now().time_since_epoch())
        .count();
}

std::string to_json(const JournalFields& fields) {
    json::object object;
    for (const auto& [key, value] : fields) object[key] = value;
    return json::serialize(object);
}

JournalFields from_json(std::string_view text) {
    JournalFields fields;
    error_code ec;
    json::parse_options options;
    options.allow_invalid_utf8 = true; // a path's bytes
    const auto value = json::parse(text, ec, {}, options);
    if (ec || !value.is_object()) return fields;
    for (const auto& [key, it] : value.get_object())
        if (it.is_string()) fields.emplace_back(key, it.get_string());
    return fields;
}

// A JSON string of these bytes is they in quotes.
bool plain(std::string_view text) {
    unsigned char other = 0; // no early end: the loop is one for vectors
    for (const unsigned char c : text)
        other |= static_cast<unsigned char>((c < ' ') | (c == '"') | (c == '\\'));
    return other == 0;
}

// Where `text` stands in the body, as a JSON string: it is not kept a second time.
std::optional<std::int64_t> place_of(const std::string& text, const std::string& body) {
    // A short one takes no more room than its place.
    if (text.size() >= body.size() || text.size() <= sizeof(std::int64_t)) return {};
    std::string escaped;
    std::string_view inner = text; // what stands between the quotes
    if (!plain(text)) {
        escaped = json_string(text);
        inner = std::string_view(escaped).substr(1, escaped.size() - 2);
    }
    // By its beginning: looking for a long text costs more than comparing it.
    char begin[48] = {'"'};
    const auto begin_size = 1 + inner.copy(begin + 1, sizeof begin - 1);
    const char *at = body.data(), *const end = at + body.size();
    while (
        (at = static_cast<const char*>(::memmem(at, std::size_t(end - at), begin, begin_size)))) {
        const std::string_view rest(at + 1, std::size_t(end - at) - 1);
        if (rest.size() > inner.size() && rest[inner.size()] == '"' && rest.starts_with(inner))
            break;
        ++at;
    }
    if (!at) return {};
    return (std::int64_t(at - body.data()) << 32) | std::int64_t(inner.size() + 2);
}

std::string one_line(std::string_view text) {
    std::string line;
    for (const char c : text)
        line += c == '\n' || c == '\r' ? std::string("; ") : std::string(1, c);
    return line;
}

// What was answered, without ids and times of the server's.
std::string answer_part(const Response& response) {
    const auto list = members(response.body);
    for (const auto* name : {"choices", "content"})
        if (const auto value = member(list, name)) return std::string(*value);
    return response.body;
}

std::string field(const JournalFields& fields, std::string_view name) {
    for (const auto& [key, value] : fields)
        if (key == name) return value;
    return {};
}

void set_field(JournalFields& fields, std::string_view name, std::string value) {
    for (auto& [key, it] : fields)
        if (key == name) it = value;
}

JournalFields without(JournalFields fields, std::string_view name) {
    std::erase_if(fields, [&](const auto& it) { return it.first == name; });
    return fields;
}

std::string addresses(const JournalRun& run) {
    std::string text;
    for (const auto& it : run.addresses) text = joined_addresses(text, it);
    return text;
}

JournalFields config_of(const JournalOptions& options, const JournalRun& run) {
    auto config = run.identity;
    if (!run.addresses.empty()) config.emplace_back("url", addresses(run));
    config.insert(config.end(), options.settings.begin(), options.settings.end());
    return config;
}

std::string number_fact(std::int64_t value) { return value > 0 ? std::to_string(value) : ""; }

// By name, or by the name of its file.
bool one_suite(std::string_view a, std::string_view b) {
    if (a == b) return true;
    const auto at = a.find('/');
    if (at == a.npos || b.substr(0, b.find('/')) != a.substr(0, at)) return false;
    const auto file = [at](std::string_view name) {
        std::error_code none;
        return std::filesystem::weakly_canonical(name.substr(at), none);
    };
    return !file(a).empty() && file(a) == file(b);
}

std::vector<std::string> words_of(std::string_view text) {
    std::vector<std::string> words;
    for (std::size_t at = 0; at < text.size();) {
        const auto end = std::min(text.find(' ', at), text.size());
        if (end > at) words.emplace_back(text.substr(at, end - at));
        at = end + 1;
    }
    return words;
}

// Of "0/3" and "2/3": "1/3". Of a whole: none.
std::vector<std::string> missing_parts(const std::vector<std::string>& parts) {
    std::vector<std::string> missing;
    if (parts.empty() || parts.front().empty()) return missing;
    const std::set<std::string, std::less<>> there(parts.begin(), parts.end());
    const auto of = parts.front().substr(std::min(parts.front().find('/'), parts.front().size()));
    for (long i = 0, count = std::atol(of.substr(std::min<std::size_t>(1, of.size())).c_str());
         i < count; ++i)
        if (auto part = std::to_string(i) + of; !there.contains(part))
            missing.push_back(std::move(part));
    return missing;
}

// One of them is said to be all of the other's.
bool alike(std::string_view some, std::string_view others) {
    return (some.empty() && others.empty()) || addresses_in(some, others) ||
           addresses_in(others, some);
}

std::int64_t micros(Timing::Millis value) { return std::llround(value.count() * 1000); }
Timing::Millis millis(std::int64_t value) { return Timing::Millis(double(value) / 1000); }

} // namespace

struct JournalFile::Trouble {
    Failure failure;
};

class JournalFile::Statement {
public:
    Statement(JournalFile& file, const char* sql) : file_(file) {
        const int code = ::sqlite3_prepare_v3(file.db_, sql, -1, SQLITE_PREPARE_PERSISTENT,
                                              &statement_, nullptr);
        if (code != SQLITE_OK) file.trouble(code, "read");
    }
    Statement(const Statement&) = delete;
    Statement& operator=(const Statement&) = delete;
    ~Statement() { ::sqlite3_finalize(statement_); }

    Statement& reset() {
        ::sqlite3_reset(statement_);
        next_ = 1;
        return *this;
    }
    Statement& null() {
        ::sqlite3_bind_null(statement_, next_++);
        return *this;
    }
    Statement& add(std::int64_t value) {
        ::sqlite3_bind_int64(statement_, next_++, value);
        return *this;
    }
    Statement& add(const std::optional<std::int64_t>& value) {
        return value ? add(*value) : null();
    }
    Statement& add(const std::optional<Timing::Millis>& value) {
        return value ? add(micros(*value)) : null();
    }
    /// The text must stay until the step.
    Statement& add(std::string_view text) {
        if (text.empty()) return null();
        ::sqlite3_bind_text64(statement_, next_++, text.data(), text.size(), SQLITE_STATIC,
                              SQLITE_UTF8);
        return *this;
    }
    Statement& blob(const void* data, std::size_t size) {
        ::sqlite3_bind_blob64(statement_, next_++, data, size, SQLITE_STATIC);
        return *this;
    }
    /// A string of the body as its place there.
    Statement& add_part(const std::string& text, const std::string& body) {
        if (text.empty()) return null();
        if (const auto place = place_of(text, body)) return add(*place);
        return add(std::string_view(text));
    }

    /// Whether there is a row.
    bool step(const char* doing) {
        const int code = ::sqlite3_step(statement_);
        if (code == SQLITE_ROW) return true;
        if (code != SQLITE_DONE) {
            ::sqlite3_reset(statement_);
            file_.trouble(code, doing);
        }
        return false;
    }

    bool is_null(int column) const {
        return ::sqlite3_column_type(statement_, column) == SQLITE_NULL;
    }
    std::int64_t integer(int column) const { return ::sqlite3_column_int64(statement_, column); }
    std::optional<std::int64_t> maybe(int column) const {
        if (is_null(column)) return {};
        return integer(column);
    }
    std::string_view text(int column) const {
        const auto* data = ::sqlite3_column_blob(statement_, column);
        if (!data) return {};
        return {static_cast<const char*>(data),
                std::size_t(::sqlite3_column_bytes(statement_, column))};
    }
    std::string part(int column, const std::string& body) const {
        if (::sqlite3_column_type(statement_, column) != SQLITE_INTEGER)
            return std::string(text(column));
        const auto place = integer(column);
        const auto at = std::size_t(place >> 32), size = std::size_t(place & 0xFFFFFFFF);
        if (at + size > body.size()) return {};
        return from_json_string(std::string_view(body).substr(at, size));
    }

private:
    JournalFile& file_;
    sqlite3_stmt* statement_ = nullptr;
    int next_ = 1;
};

void JournalFile::trouble(int code, const char* doing) {
    const int primary = code & 0xFF;
    std::string why = one_line(db_ ? ::sqlite3_errmsg(db_) : ::sqlite3_errstr(code));
    if (primary == SQLITE_IOERR)
        if (const int number = db_ ? ::sqlite3_system_errno(db_) : 0)
            why += fmt::format(" ({})", std::strerror(number));
    auto errc = JournalErrc::unwritable;
    if (primary == SQLITE_CORRUPT || primary == SQLITE_NOTADB)
        errc = JournalErrc::corrupt;
    else if (primary == SQLITE_FULL)
        why = "the disk is full";
    else if (primary == SQLITE_READONLY)
        why = "it is read-only";
    if (errc == JournalErrc::corrupt)
        throw Trouble{{errc, fmt::format("the journal {} is damaged ({}), or a copy without its "
                                         "-wal; it is left as it is: move it away, or restore a "
                                         "copy",
                                         path_, why)}};
    throw Trouble{{errc, fmt::format("cannot {} the journal {}: {}", doing, path_, why)}};
}

template <class F>
Failure JournalFile::guarded(const char* doing, F f) {
    try {
        f();
        return {};
    } catch (const Trouble& trouble) {
        return trouble.failure;
    } catch (const std::bad_alloc&) {
        return {JournalErrc::unwritable,
                fmt::format("cannot {} the journal {}: out of memory", doing, path_)};
    }
}

// A lock of our own: SQLite's would keep readers out too, and does not know who has it. The kernel
// drops it with the process; the file may stay behind.
void JournalFile::lock() {
    const auto lock_path = path_ + ".lock";
    const auto fail = [&](const char* doing) {
        throw Trouble{{JournalErrc::unwritable,
                       fmt::format("cannot {} {}: {}", doing, lock_path, std::strerror(errno))}};
    };
    for (int attempt = 0;; ++attempt) {
        const int fd = ::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
        if (fd < 0) fail("write");
        if (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
            const int number = errno;
            char text[32] = {};
            [[maybe_unused]] const auto got = ::pread(fd, text, sizeof text - 1, 0);
            ::close(fd);
            if (number != EWOULDBLOCK) {
                errno = number;
                fail("lock");
            }
            const long pid = std::atol(text);
            // It has not written it yet; or a reader looks whether there is anybody.
            if (attempt < (pid == 0 ? 50 : 3)) {
                std::this_thread::sleep_for(std::chrono::milliseconds(10));
                continue;
            }
            throw Trouble{{JournalErrc::in_use,
                           fmt::format("the journal {} is in use by the process {}: wait for it, "
                                       "or use another file",
                                       path_, pid)}};
        }
        // The one before us may have deleted the file between our opening and our locking.
        struct stat ours, there;
        if (::fstat(fd, &ours) != 0 || ::stat(lock_path.c_str(), &there) != 0 ||
            ours.st_ino != there.st_ino) {
            ::close(fd);
            continue;
        }
        lock_ = fd;
        const auto pid = std::to_string(::getpid()) + "\n";
        if (::ftruncate(fd, 0) != 0 || ::pwrite(fd, pid.data(), pid.size(), 0) < 0) {
            const int number = errno;
            unlock();
            errno = number;
            fail("write");
        }
        return;
    }
}

void JournalFile::unlock() {
    if (lock_ < 0) return;
    ::unlink((path_ + ".lock").c_str());
    ::close(lock_);
    lock_ = -1;
}

// SQLite goes on with files that were moved, deleted or cut short: what it writes would be lost.
void JournalFile::check_place() {
    const char* const path = ::sqlite3_db_filename(db_, "main");
    Place now;
    struct stat file = {}, log = {};
    if (::stat(path, &file) == 0 && ::stat(::sqlite3_filename_wal(path), &log) == 0)
        now = {{std::uint64_t(file.st_dev), file.st_ino, std::uint64_t(log.st_dev), log.st_ino}};
    if (!place_) place_ = now;
    if (now != *place_ || now == Place() || file.st_size < size_)
        throw Trouble{
            {JournalErrc::unwritable,
             fmt::format("cannot write the journal {}: another program has moved, deleted "
                         "or cut short the file or its -wal",
                         path_)}};
    size_ = file.st_size;
}

void JournalFile::execute(const char* sql) {
    const int code = ::sqlite3_exec(db_, sql, nullptr, nullptr, nullptr);
    if (code != SQLITE_OK) trouble(code, "write");
}

JournalFile::Statement& JournalFile::prepare(std::unique_ptr<Statement>& slot, const char* sql) {
    if (!slot) slot = std::make_unique<Statement>(*this, sql);
    return slot->reset();
}

void JournalFile::connect(int flags, const std::string& uri) {
    const int code = ::sqlite3_open_v2(uri.empty() ? path_.c_str() : uri.c_str(), &db_,
                                       flags | SQLITE_OPEN_NOMUTEX, nullptr);
    if (code != SQLITE_OK) trouble(code, "open");
    ::sqlite3_extended_result_codes(db_, 1);
    ::sqlite3_busy_timeout(db_, 10000);
    execute("PRAGMA mmap_size = 0"); // a mapped file that is cut short would end the program
}

// Whole or not at all: made beside its place, then moved there.
void JournalFile::create() {
    const auto made = path_ + ".new";
    const auto clear = [&made] {
        for (const auto* end : {"", "-journal", "-wal", "-shm"}) ::unlink((made + end).c_str());
    };
    clear();
    try {
        connect(SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, made);
        execute("PRAGMA page_size = 16384");
        execute(
            fmt::format("PRAGMA application_id = {}; PRAGMA user_version = {}; BEGIN; {} COMMIT",
                        application_id, format_version, schema)
                .c_str());
        execute("PRAGMA journal_mode = WAL");
        ::sqlite3_close(db_);
        db_ = nullptr;
        move_into_place(made, path_);
    } catch (...) {
        ::sqlite3_close(std::exchange(db_, nullptr));
        clear();
        throw;
    }
}

void JournalFile::move_into_place(const std::string& from, const std::string& to) {
    if (::rename(from.c_str(), to.c_str()) != 0)
        throw Trouble{{JournalErrc::unwritable,
                       fmt::format("cannot write the journal {}: {}", to, std::strerror(errno))}};
    auto folder = std::filesystem::path(to).parent_path();
    if (folder.empty()) folder = ".";
    if (const int fd = ::open(folder.c_str(), O_RDONLY | O_CLOEXEC); fd >= 0) {
        ::fsync(fd);
        ::close(fd);
    }
}

// Before SQLite sees it: it would begin to repair what is not ours.
void JournalFile::check_header() {
    std::ifstream file(path_, std::ios::binary);
    unsigned char head[100] = {};
    file.read(reinterpret_cast<char*>(head), sizeof head);
    const auto number = [&](int at) {
        return int(unsigned(head[at]) << 24 | unsigned(head[at + 1]) << 16 |
                   unsigned(head[at + 2]) << 8 | head[at + 3]);
    };
    if (!file || std::memcmp(head, "SQLite format 3", 16) != 0 || number(68) != application_id)
        throw Trouble{{JournalErrc::foreign,
                       fmt::format("{} is not a journal of evalrt; it is left as it is: give "
                                   "--journal another file",
                                   path_)}};
    if (number(60) > format_version)
        throw Trouble{{JournalErrc::foreign,
                       fmt::format("the journal {} was written by a later version of evalrt (its "
                                   "format is {}, this one knows {})",
                                   path_, number(60), format_version)}};
}

void JournalFile::check_pages() {
    Statement check(*this, "PRAGMA quick_check(1)");
    if (!check.step("read") || check.text(0) != "ok")
        throw Trouble{{JournalErrc::corrupt,
                       fmt::format("the journal {} is damaged ({}); it is left as it is: move it "
                                   "away, or restore a copy",
                                   path_, one_line(check.text(0)))}};
}

Failure JournalFile::open(const std::string& path, std::unique_ptr<JournalFile>& out, bool anew) {
    out.reset(new JournalFile);
    auto& file = *out;
    file.path_ = path;
    auto failure = file.guarded("open", [&] {
        struct stat info;
        if (::stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode))
            throw Trouble{{JournalErrc::foreign, fmt::format("{} is not a file", path)}};
        file.lock();
        if (anew)
            for (const auto* end : {"", "-wal", "-shm"}) ::unlink((path + end).c_str());
        if (::stat(path.c_str(), &info) != 0 || info.st_size == 0) file.create();
        file.check_header();
        file.connect(SQLITE_OPEN_READWRITE);
        if (::sqlite3_db_readonly(file.db_, "main") == 1) file.trouble(SQLITE_READONLY, "write");
        // An fsync for each group: an answer that was delivered survives a power cut too.
        file.execute("PRAGMA synchronous = FULL");
        file.execute("PRAGMA checkpoint_fullfsync = 1"); // of macOS, whose fsync is none
        file.check_pages();
    });
    if (failure) out.reset();
    return failure;
}

Failure JournalFile::open_to_read(const std::string& path, std::unique_ptr<JournalFile>& out) {
    out.reset(new JournalFile);
    auto& file = *out;
    file.path_ = path;
    auto failure = file.guarded("open", [&] {
        if (::access(path.c_str(), R_OK) != 0)
            throw Trouble{{JournalErrc::foreign,
                           fmt::format("cannot open {}: {}", path, std::strerror(errno))}};
        file.check_header();
        file.connect_to_read();
        file.check_pages();
    });
    if (failure) out.reset();
    return failure;
}

JournalFile::~JournalFile() {
    close();
    unlock();
}

void JournalFile::close() {
    for (auto* slot :
         {&insert_item_, &insert_outcome_, &insert_body_, &select_outcome_, &select_body_})
        slot->reset();
    ::sqlite3_close_v2(std::exchange(db_, nullptr));
}

struct JournalFile::Found {
    std::int64_t run = 0;   // 0: none to go on with
    bool same = false;      // one of another suite has the same configuration
    std::string difference; // to the one that is likest
    JournalFields config;
    std::string identity, server_version;
    Facts facts;
};

// The latest run of this suite with this configuration, by its name or else by its content; once
// begun, the one that was.
JournalFile::Found JournalFile::find_run(const JournalOptions& options, const JournalRun& run,
                                         bool any_model) {
    Found found;
    const auto config = config_of(options, run);
    bool same_suite = false, named = false;
    Statement runs(*this, "SELECT id, suite, config, server_version, identity FROM runs "
                          "ORDER BY id DESC");
    while ((options.mode == JournalMode::resume || run_ > 0) && !named && runs.step("read")) {
        if (run_ > 0 && runs.integer(0) != run_) continue;
        const auto stored = from_json(runs.text(2));
        auto before = stored, now = config;
        // Servers that are alike are one: whoever was asked before.
        if (addresses_in(field(now, "url"), field(before, "url")))
            set_field(now, "url", field(before, "url"));
        if (any_model) set_field(now, "model", field(before, "model"));
        auto facts_of = facts(runs.integer(0));
        // What is not known yet is no difference.
        const auto compare = [&](const char* name, std::string_view was, const std::string& is) {
            if (was.empty() || is.empty()) return;
            before.emplace_back(name, was);
            now.emplace_back(name, is);
        };
        compare("server", facts_of["server"], run.server);
        compare("server_version", runs.text(3), run.server_version);
        const auto text = journal_difference(before, now);
        const bool name = one_suite(runs.text(1), options.suite);
        const bool suite =
            name || (!options.content.empty() && facts_of["content"] == options.content);
        found.same |= text.empty();
        if (text.empty() && suite && (name || found.run == 0)) {
            named = name;
            found.run = runs.integer(0);
            found.config = stored;
            found.server_version = std::string(runs.text(3));
            found.identity = std::string(runs.text(4));
            found.facts = std::move(facts_of);
        }
        if (found.difference.empty() || (suite && !same_suite)) found.difference = text;
        same_suite |= suite;
    }
    return found;
}

void JournalFile::refuse_changed(const Found& found) const {
    if (found.run == 0 && !found.same && !found.difference.empty())
        throw Trouble{{JournalErrc::changed,
                       fmt::format("the journal {} belongs to another configuration: {}; give "
                                   "--journal another file, or --journal-mode append to add a run "
                                   "to this one",
                                   path_, found.difference)}};
}

Failure JournalFile::known(const JournalOptions& options, const JournalRun& run,
                           JournalKnown& out) {
    return guarded("read", [&] {
        auto found = find_run(options, run, field(run.identity, "model").empty());
        if (found.run == 0) {
            refuse_changed(found);
            throw Trouble{{JournalErrc::changed, {}}}; // it would be a new one
        }
        out.model = field(found.config, "model");
        out.server = found.facts["server"];
        out.server_version = found.server_version;
    });
}

Failure JournalFile::begin(const JournalOptions& options, const JournalRun& run, Begun& out) {
    return guarded("write", [&] {
        // Begun already: a second time with a version that was not known the first time.
        auto found = find_run(options, run, false);
        refuse_changed(found);
        auto run_id = found.run;
        execute("BEGIN IMMEDIATE");
        if (run_id == 0) {
            found.identity = to_json(run.identity);
            const auto config = to_json(config_of(options, run));
            Statement insert(*this, "INSERT INTO runs(suite, identity, config, server_version) "
                                    "VALUES(?, ?, ?, ?)");
            insert.add(std::string_view(options.suite)).add(std::string_view(found.identity));
            insert.add(std::string_view(config)).add(std::string_view(run.server_version));
            insert.step("write");
            run_id = ::sqlite3_last_insert_rowid(db_);
            execute(fmt::format("PRAGMA user_version = {}", format_version).c_str());
        } else if (!run.server_version.empty()) {
            Statement update(*this, "UPDATE runs SET server_version = ? WHERE id = ?");
            update.add(std::string_view(run.server_version)).add(run_id).step("write");
        }
        if (!run.server.empty()) set_fact(run_id, "server", run.server);
        // What was joined knows better, until the whole has been asked.
        if (options.whole_items > 0 || found.facts["by_name"] != "all") {
            set_fact(run_id, "items", number_fact(options.whole_items));
            set_fact(run_id, "cut", options.cut);
        }
        set_fact(run_id, "content", options.content);
        set_fact(run_id, "own_items", number_fact(options.items));
        set_fact(run_id, "invalid", number_fact(options.invalid));
        set_fact(run_id, "copies", options.copies.empty() ? "" : to_json(options.copies));
        if (session_ == 0) {
            started_ = unix_ms();
            Statement insert(*this, "INSERT INTO sessions(run, pid, started) VALUES(?, ?, ?)");
            insert.add(run_id).add(std::int64_t(::getpid())).add(started_).step("write");
            session_ = ::sqlite3_last_insert_rowid(db_);
        }
        execute("COMMIT");
        check_place();
        run_ = run_id;
        out.identity =
            found.identity == to_json(run.identity) ? run.identity : from_json(found.identity);
        read_index(options, run, run_id, out);
    });
}

// What else is known of a run. A table that files of before have not.
JournalFile::Facts JournalFile::facts(std::int64_t run) {
    Facts list;
    Statement there(*this, "SELECT 1 FROM sqlite_master WHERE name = 'facts'");
    if (!there.step("read")) return list;
    Statement rows(*this, "SELECT name, value FROM facts WHERE run = ?");
    rows.add(run);
    while (rows.step("read")) list[std::string(rows.text(0))] = std::string(rows.text(1));
    return list;
}

// Inside a transaction; an empty value is none.
void JournalFile::set_fact(std::int64_t run, std::string_view name, std::string_view value) {
    const auto known = facts(run);
    const auto it = known.find(name);
    if (value == (it == known.end() ? std::string_view() : std::string_view(it->second))) return;
    execute("CREATE TABLE IF NOT EXISTS facts(run INTEGER, name TEXT, value TEXT, "
            "PRIMARY KEY(run, name)) WITHOUT ROWID");
    Statement write(*this, value.empty()
                               ? "DELETE FROM facts WHERE run = ? AND name = ?"
                               : "INSERT OR REPLACE INTO facts(run, name, value) VALUES(?, ?, ?)");
    write.add(run).add(name);
    if (!value.empty()) write.add(value);
    write.step("write");
}

void JournalFile::read_index(const JournalOptions& options, const JournalRun& run,
                             std::int64_t run_id, Begun& out) {
    out.index = JournalIndex(options.final_failures);
    std::vector<JournalEntry*> entries; // by item
    struct Foreign {
        JournalEntry* entry = nullptr;
    };
    std::vector<Foreign> foreign;
    Statement last(*this, "SELECT (SELECT max(id) FROM items), (SELECT max(id) FROM outcomes)");
    last.step("read");
    out.last_item = last.integer(0);
    out.last_outcome = last.integer(1);
    // Ids are dense: they are counted up, and no row is deleted.
    out.index.reserve(std::size_t(out.last_item));
    entries.resize(std::size_t(out.last_item) + 1);
    foreign.resize(std::size_t(out.last_item) + 1);

    // Runs whose answers may be served to this one.
    std::vector<std::int64_t> related;
    const auto identity = to_json(out.identity), urls = addresses(run);
    Statement runs(*this, "SELECT id, identity, server_version, config FROM runs");
    while (runs.step("read"))
        if (runs.integer(0) != run_id && runs.text(1) == identity &&
            runs.text(2) == run.server_version &&
            alike(urls, field(from_json(runs.text(3)), "url")))
            related.push_back(runs.integer(0));

    const auto key_of = [this](const Statement& row, int column) {
        JournalKey key;
        const auto bytes = row.text(column);
        if (bytes.size() != sizeof key) trouble(SQLITE_CORRUPT, "read");
        std::memcpy(&key, bytes.data(), sizeof key);
        return key;
    };
    const auto how = facts(run_id)["by_name"];
    if (!how.empty()) {
        JournalCounts times;
        JournalKeys repeated, names;
        Statement keys(*this, "SELECT key FROM items WHERE run = ?");
        keys.add(run_id);
        while (keys.step("read"))
            if (const auto key = key_of(keys, 0); times.next(key) == 1) repeated.insert(key);
        Statement named(*this, "SELECT key, name FROM items WHERE run = ?");
        named.add(run_id);
        while (named.step("read")) {
            const auto key = key_of(named, 0);
            const auto name = named.text(1);
            // Who has another name now takes what goes by none.
            if ((how == "all" || repeated.contains(key)) && !name.empty() &&
                (!options.named || options.named(name)))
                names.insert(JournalIndex::named(key, name));
        }
        out.index.by_name(how == "all", std::move(names));
    }
    JournalCounts counts;
    Statement items(*this, "SELECT id, run, key, occurrence, name FROM items");
    while (items.step("read")) {
        const auto id = items.integer(0), of = items.integer(1);
        const bool own = of == run_id;
        if (!own && std::find(related.begin(), related.end(), of) == related.end()) continue;
        auto key = key_of(items, 2);
        auto occurrence = std::uint32_t(items.integer(3));
        if (!how.empty()) {
            const auto place = out.index.place(key, items.text(4));
            if (own)
                occurrence = counts.next(place);
            else if (place != key)
                occurrence = 0;
            key = place;
        }
        auto& entry = out.index.entry(key, occurrence);
        if (own) {
            entry.item = id;
            entry.name = journal_name(items.text(4));
        }
        (own ? entries[std::size_t(id)] : foreign[std::size_t(id)].entry) = &entry;
    }
    Statement outcomes(*this, "SELECT id, item, failure, shared FROM outcomes");
    while (outcomes.step("read")) {
        const auto id = outcomes.integer(0);
        const auto item = outcomes.integer(1);
        if (item < 1 || item > out.last_item) trouble(SQLITE_CORRUPT, "read");
        std::optional<Errc> failure;
        if (!outcomes.is_null(2)) failure = find_errc(outcomes.text(2)).value_or(Errc::malformed);
        if (auto* entry = entries[std::size_t(item)]) {
            ++out.resumed;
            if (entry->outcome > 0 && !entry->failure) continue; // an answer stands
            entry->outcome = id;
            entry->failure = failure;
        } else if (auto* other = foreign[std::size_t(item)].entry) {
            if (!failure && (outcomes.integer(3) != 0 || options.reuse_sampled)) other->shared = id;
        }
    }
}

Failure JournalFile::write(std::span<const JournalRow> rows, std::span<const JournalName> names,
                           std::span<const JournalOutcome> outcomes) {
    auto failure = guarded("write", [&] {
        // Questions alone need not be safe at once: who loses them asks them again.
        const bool safe = !outcomes.empty();
        if (!safe) execute("PRAGMA synchronous = NORMAL");
        execute("BEGIN IMMEDIATE");
        for (const auto& row : rows) {
            auto& insert = prepare(insert_item_, "INSERT INTO items VALUES(?, ?, ?, ?, ?)");
            insert.add(row.item).add(run_).blob(&row.key, sizeof row.key);
            insert.add(std::int64_t(row.occurrence)).add(std::string_view(row.name));
            insert.step("write");
        }
        for (const auto& it : names) {
            Statement update(*this, "UPDATE items SET name = ? WHERE id = ?");
            update.add(std::string_view(it.name)).add(it.item).step("write");
        }
        const auto at = unix_ms() - started_;
        for (const auto& it : outcomes) write_outcome(it, at);
        execute("COMMIT");
        if (!safe) execute("PRAGMA synchronous = FULL");
        check_place();
    });
    if (failure && db_ && !::sqlite3_get_autocommit(db_))
        ::sqlite3_exec(db_, "ROLLBACK", nullptr, nullptr, nullptr);
    return failure;
}

void JournalFile::write_outcome(const JournalOutcome& it, std::int64_t at) {
    const auto& response = *it.response;
    const auto& timing = response.timing;
    const auto& body = response.body;
    auto& insert =
        prepare(insert_outcome_, "INSERT INTO outcomes VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, "
                                 "?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)");
    insert.add(it.outcome).add(it.item).add(session_).add(at);
    insert.add(response.outcome ? name(*response.outcome) : std::string_view());
    insert.add(std::int64_t(it.shared));
    insert.add(it.source > 0 ? std::optional(it.source) : std::nullopt);
    insert.add(std::int64_t(response.status)).add(std::int64_t(response.attempts));
    insert.add(response.usage.prompt_tokens).add(response.usage.cached_tokens);
    insert.add(response.usage.completion_tokens);
    insert.add(response.expected_cached).add(response.maximum_cached);
    insert.add(micros(timing.queued)).add(timing.first_text).add(timing.last_text);
    insert.add(micros(timing.total)).add(std::string_view(response.detail));
    if (it.source > 0)
        insert.null().null().null().null();
    else
        insert.add(std::int64_t(body.size()))
            .add_part(response.text, body)
            .add_part(response.finish_reason, body)
            .add_part(response.request_id, body);
    insert.step("write");
    if (it.source > 0) return;
    for (std::size_t at_byte = 0, n = 0; at_byte < body.size(); at_byte += piece_size, ++n) {
        auto& piece = prepare(insert_body_, "INSERT INTO bodies VALUES(?, ?)");
        piece.add((it.outcome << piece_bits) + std::int64_t(n));
        piece.blob(body.data() + at_byte, std::min(piece_size, body.size() - at_byte));
        piece.step("write");
    }
}

std::string JournalFile::body_of(std::int64_t outcome, std::int64_t size) {
    std::string body;
    body.reserve(std::size_t(size));
    auto& pieces = prepare(select_body_, "SELECT piece FROM bodies WHERE id BETWEEN ? AND ?");
    pieces.add(outcome << piece_bits).add((outcome << piece_bits) + (1 << piece_bits) - 1);
    while (pieces.step("read")) body += pieces.text(0);
    pieces.reset();
    if (body.size() != std::size_t(size)) trouble(SQLITE_CORRUPT, "read");
    return body;
}

// What a row of outcome_columns says.
void JournalFile::fill(const Statement& row, Response& response) {
    if (!row.is_null(0)) response.outcome = find_errc(row.text(0)).value_or(Errc::malformed);
    response.from_journal = !row.is_null(1);
    response.status = int(row.integer(2));
    response.attempts = unsigned(row.integer(3));
    response.usage = {row.maybe(4), row.maybe(5), row.maybe(6)};
    response.expected_cached = row.maybe(7);
    response.maximum_cached = row.maybe(8);
    const auto time = [&](int column) -> std::optional<Timing::Millis> {
        if (row.is_null(column)) return {};
        return millis(row.integer(column));
    };
    response.timing.queued = time(9).value_or(Timing::Millis(0));
    response.timing.first_text = time(10);
    response.timing.last_text = time(11);
    response.timing.total = time(12).value_or(Timing::Millis(0));
    response.detail = std::string(row.text(13));
}

Failure JournalFile::read(std::int64_t outcome, Response& response, std::int64_t& holder) {
    return guarded("read", [&] {
        static const auto sql = fmt::format("SELECT {}, o.size, o.text, o.finish_reason, "
                                            "o.request_id, o.id FROM outcomes o WHERE o.id = ?",
                                            outcome_columns);
        auto& row = prepare(select_outcome_, sql.c_str());
        if (!row.add(outcome).step("read")) trouble(SQLITE_CORRUPT, "read");
        fill(row, response);
        if (const auto source = row.maybe(1))
            if (!row.reset().add(*source).step("read")) trouble(SQLITE_CORRUPT, "read");
        holder = row.integer(18);
        response.body = body_of(holder, row.integer(14));
        response.text = row.part(15, response.body);
        response.finish_reason = row.part(16, response.body);
        response.request_id = row.part(17, response.body);
        row.reset();
    });
}

Failure JournalFile::summary(JournalSummary& summary,
                             const std::function<void(const JournalItem&)>& on_item) {
    summary = {};
    return guarded("read", [&] {
        const auto run = read_summary(summary);
        if (run == 0) return;
        const auto gone = retired(run);
        auto known = facts(run);
        const auto copies = copies_in(known["copies"]);
        summary.invalid = std::atoll(known["invalid"].c_str());
        std::unordered_map<std::int64_t, std::pair<std::int64_t, bool>> latest; // by item
        Statement outcomes(*this, "SELECT id, item, failure FROM outcomes");
        while (outcomes.step("read")) {
            auto& [outcome, answered] = latest[outcomes.integer(1)];
            if (answered) continue;
            outcome = outcomes.integer(0);
            answered = outcomes.is_null(2);
        }
        const auto sql = fmt::format("SELECT {} FROM outcomes o WHERE o.id = ?", outcome_columns);
        Statement outcome(*this, sql.c_str());
        Statement items(*this, "SELECT id, name FROM items WHERE run = ?");
        items.add(run);
        auto count = summary.invalid;
        while (items.step("read")) {
            const auto id = std::size_t(items.integer(0));
            if (id < gone.size() && gone[id]) {
                ++summary.earlier;
                continue;
            }
            JournalItem item;
            item.name = std::string(items.text(1));
            if (const auto it = copies.find(item.name); it != copies.end())
                item.copies = it->second;
            count += 1 + item.copies;
            if (const auto it = latest.find(items.integer(0)); it != latest.end()) {
                if (!outcome.reset().add(it->second.first).step("read"))
                    trouble(SQLITE_CORRUPT, "read");
                fill(outcome, item.response.emplace());
            }
            on_item(item);
        }
        summary.missing_parts = missing_parts(words_of(known["parts"]));
        const bool whole = field(summary.config, "shard").empty();
        for (const auto* name : {"own_items", "items"})
            if (whole || name != std::string_view("items"))
                summary.missing = std::max<std::int64_t>(summary.missing,
                                                         std::atoll(known[name].c_str()) - count);
    });
}

// The latest run's id; 0: there is none.
std::int64_t JournalFile::read_summary(JournalSummary& summary) {
    summary.pid = writer();
    summary.log = log_;
    Statement runs(*this, "SELECT id, suite, config, server_version, (SELECT count(*) FROM runs) "
                          "FROM runs ORDER BY id DESC LIMIT 1");
    if (!runs.step("read")) return 0;
    const auto run = runs.integer(0);
    summary.suite = std::string(runs.text(1));
    summary.config = from_json(runs.text(2));
    summary.server_version = std::string(runs.text(3));
    summary.runs = runs.integer(4);
    Statement sessions(*this, "SELECT ended, id FROM sessions WHERE run = ? ORDER BY id");
    sessions.add(run);
    std::int64_t first = 0;
    for (; sessions.step("read"); ++summary.sessions) {
        summary.ended = !sessions.is_null(0);
        if (first == 0) first = sessions.integer(1);
    }
    // One that was joined has a session for what it was joined from, each part of which may have
    // had several: they ran beside each other, as long as the longest.
    auto known = facts(run);
    if (const auto& starts = known["starts"]; !starts.empty())
        summary.sessions += std::atoll(starts.c_str()) - 1;
    const auto& longest = known["longest_ms"];
    // The time of a session's last outcome, after its start.
    Statement walls(*this, "SELECT sum(last) FROM (SELECT max(o.at) AS last FROM outcomes o JOIN "
                           "sessions s ON s.id = o.session WHERE s.run = ? AND s.id > ? "
                           "GROUP BY o.session)");
    walls.add(run).add(longest.empty() ? 0 : first).step("read");
    summary.wall_seconds = double(std::atoll(longest.c_str()) + walls.integer(0)) / 1000;
    return run;
}

// Who holds the lock; a lock's file alone is what a process has left, or a copy.
std::optional<std::int64_t> JournalFile::writer() const {
    const int fd = ::open((path_ + ".lock").c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return {};
    char text[32] = {};
    std::optional<std::int64_t> pid;
    if (::flock(fd, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK &&
        ::pread(fd, text, sizeof text - 1, 0) > 0)
        pid = std::atoll(text);
    ::close(fd);
    return pid;
}

JournalFile::Copies JournalFile::copies_in(const std::string& fact) {
    Copies copies;
    for (const auto& [name, count] : from_json(fact)) copies[name] = std::atoll(count.c_str());
    return copies;
}

// A session's mark is the item 0.
Failure JournalFile::retire(const std::vector<std::int64_t>& items) {
    auto failure = guarded("write", [&] {
        Statement there(*this, "SELECT 1 FROM sqlite_master WHERE name = 'retired'");
        const bool made = there.step("read");
        there.reset();
        if (facts(run_)["by_name"] == "all") { // the items are the suite's now, not the parts'
            execute("BEGIN IMMEDIATE");
            for (const auto* name : {"items", "cut", "parts"}) set_fact(run_, name, "");
            if (items.empty()) set_fact(run_, "by_name", "repeats");
            execute("COMMIT");
        }
        if (items.empty() && !made) return;
        execute("BEGIN IMMEDIATE");
        execute("CREATE TABLE IF NOT EXISTS retired(session INTEGER, item INTEGER)");
        Statement insert(*this, "INSERT INTO retired VALUES(?, ?)");
        insert.add(session_).add(std::int64_t(0)).step("write");
        for (const auto item : items) insert.reset().add(session_).add(item).step("write");
        execute("COMMIT");
    });
    if (failure && db_ && !::sqlite3_get_autocommit(db_))
        ::sqlite3_exec(db_, "ROLLBACK", nullptr, nullptr, nullptr);
    return failure;
}

std::vector<bool> JournalFile::retired(std::int64_t run) {
    std::vector<bool> list;
    Statement there(*this, "SELECT 1 FROM sqlite_master WHERE name = 'retired'");
    if (!there.step("read")) return list;
    Statement items(*this,
                    "SELECT item FROM retired WHERE item > 0 AND session = (SELECT "
                    "max(session) FROM retired JOIN sessions ON id = session WHERE run = ?)");
    items.add(run);
    while (items.step("read")) {
        const auto item = std::size_t(items.integer(0));
        if (list.size() <= item) list.resize(item + 1);
        list[item] = true;
    }
    return list;
}

// Where nothing can be written beside the file, SQLite cannot make what it reads a WAL with.
void JournalFile::connect_to_read() {
    const auto begin = [this] {
        execute("BEGIN"); // all reads see one moment
        Statement(*this, "SELECT count(*) FROM runs").step("read");
    };
    std::error_code none;
    const auto wal = std::filesystem::file_size(path_ + "-wal", none);
    log_ = !none;
    const bool pending = log_ && wal > 0;
    auto folder = std::filesystem::path(path_).parent_path();
    if (folder.empty()) folder = ".";
    if (::access(folder.c_str(), W_OK) == 0 || ::access((path_ + "-shm").c_str(), F_OK) == 0) {
        try {
            // Not READONLY: the last one who closes it could not clear away its -wal then.
            connect(SQLITE_OPEN_READWRITE);
            execute("PRAGMA query_only = 1");
            return begin();
        } catch (const Trouble& trouble) {
            if (trouble.failure.code != JournalErrc::unwritable) throw;
            ::sqlite3_close(db_);
            db_ = nullptr;
        }
    }
    auto target = path_;
    std::string copied;
    if (pending) { // somebody's last answers are there: with them, in a place of our own
        copied = temporary_folder("evalrt", none);
        if (!none) {
            target = copied + "/journal";
            for (const auto* end : {"", "-wal"})
                if (!none) std::filesystem::copy_file(path_ + end, target + end, none);
        }
        if (none) {
            std::error_code ignored;
            if (target != path_) std::filesystem::remove_all(copied, ignored);
            throw Trouble{{JournalErrc::unwritable,
                           fmt::format("the journal {} is in a folder that cannot be written, and "
                                       "cannot be copied ({}): copy it and its -wal to another one",
                                       path_, none.message())}};
        }
    }
    std::string uri = "file:";
    for (const char c : target)
        uri +=
            c == '?' || c == '#' || c == '%' ? fmt::format("%{:02x}", int(c)) : std::string(1, c);
    const auto away = [&] {
        std::error_code ignored;
        if (!copied.empty()) std::filesystem::remove_all(copied, ignored); // stays open
    };
    try {
        if (pending)
            connect(SQLITE_OPEN_READWRITE, target);
        else
            connect(SQLITE_OPEN_READONLY | SQLITE_OPEN_URI, uri + "?immutable=1");
        begin();
    } catch (...) {
        away();
        throw;
    }
    away();
}

// Shards of one run differ in what part they are, and perhaps in whom they asked.
Failure JournalFile::add(JournalFile& shard, JournalMerge& result) {
    const auto refuse = [&](const std::string& why) {
        throw Trouble{{JournalErrc::changed,
                       fmt::format("{} and the journals before it are not of one run: {}",
                                   shard.path_, why)}};
    };
    auto failure = guarded("write", [&] {
        JournalSummary summary;
        const auto run = shard.read_summary(summary);
        Statement any(shard, "SELECT 1 FROM items WHERE run = ? LIMIT 1");
        // It was killed before it had one; a part without an item ends well.
        if (run == 0 || (!summary.ended && !any.add(run).step("read")))
            return result.empty.push_back(shard.path_);
        const auto config = without(without(summary.config, "shard"), "url");
        const auto url = field(summary.config, "url"), part = field(summary.config, "shard");
        const auto known = shard.facts(run);
        const auto fact = [&](std::string_view name) {
            const auto it = known.find(name);
            return it == known.end() ? std::string() : it->second;
        };
        Statement who(shard, "SELECT identity FROM runs WHERE id = ?");
        who.add(run).step("read");
        const auto of = [](const std::string& text) {
            return text.substr(std::min(text.find('/'), text.size()));
        };
        const auto named = [](const std::string& text) {
            return text.empty() ? "a whole" : fmt::format("the part \"{}\"", text);
        };
        // One that was joined has several.
        auto parts = part.empty() ? words_of(fact("parts")) : std::vector{part};
        if (parts.empty()) parts.emplace_back();
        const auto whole = [&] {
            auto all = config;
            if (!urls_.empty()) all.emplace_back("url", urls_);
            return to_json(all);
        };
        // Known now, or not known before.
        const auto compare = [&](const char* name, std::string& was, const std::string& is) {
            if (!was.empty() && !is.empty() && was != is)
                refuse(journal_difference({{name, was}}, {{name, is}}));
            if (was.empty()) was = is;
        };
        if (run_ == 0) {
            suite_ = summary.suite;
            config_ = config;
            urls_ = url;
            identity_ = std::string(who.text(0));
            version_ = summary.server_version;
            facts_ = known;
            execute("BEGIN IMMEDIATE");
            Statement insert(*this, "INSERT INTO runs(suite, identity, config, server_version) "
                                    "VALUES(?, ?, ?, ?)");
            const auto all = whole();
            insert.add(std::string_view(suite_)).add(std::string_view(identity_));
            insert.add(std::string_view(all)).add(std::string_view(version_)).step("write");
            run_ = ::sqlite3_last_insert_rowid(db_);
            Statement session(*this, "INSERT INTO sessions(run, pid, started) VALUES(?, 0, ?)");
            session.add(run_).add(unix_ms()).step("write");
            session_ = ::sqlite3_last_insert_rowid(db_);
            execute("COMMIT");
        } else {
            const auto content = fact("content");
            const bool both_known = !content.empty() && !facts_["content"].empty();
            const bool same_content = both_known && content == facts_["content"];
            if (!same_content && !one_suite(summary.suite, suite_))
                refuse(fmt::format("the suite is \"{}\", not \"{}\"{}", summary.suite, suite_,
                                   both_known ? ", and has other items" : ""));
            if (const auto text = journal_difference(config_, config); !text.empty()) refuse(text);
            if (of(parts.front()) != of(shards_.front())) {
                const auto& whole_one = parts.front().empty() ? parts : shards_;
                refuse(fmt::format(
                    "it is {}, the first one {}{}", named(parts.front()), named(shards_.front()),
                    whole_one.front().empty()
                        ? " (if the whole was joined from parts: join all of them anew)"
                        : ""));
            }
            compare("server", facts_["server"], fact("server"));
            compare("server_version", version_, summary.server_version);
            compare("items of the suite", facts_["items"], fact("items"));
            if (!facts_["cut"].empty() && !fact("cut").empty() && facts_["cut"] != fact("cut")) {
                const auto why = [](const std::string& cut) {
                    const auto end = cut.rfind(' ');
                    return end == cut.npos ? "no option that changes it" : cut.substr(0, end);
                };
                const auto was = why(facts_["cut"]), is = why(fact("cut"));
                refuse(was == is
                           ? "the suite was cut at other places: it, or an option, was changed "
                             "between them"
                           : fmt::format("the suite was cut with {}, and here with {}", was, is));
            }
            if (both_known && !same_content)
                refuse("the suite was changed between them: run the parts again that were run "
                       "before it (the same command asks only for what is new)");
            for (const auto* name : {"cut", "content", "invalid"}) // one part has the invalid ones
                if (facts_[name].empty()) facts_[name] = fact(name);
            if (identity_ != who.text(0))
                refuse("an earlier version of evalrt wrote one of them, with the address in its "
                       "keys; join the outputs");
            urls_ = joined_addresses(urls_, url);
            const auto all = whole();
            Statement update(*this, "UPDATE runs SET config = ?, server_version = ?");
            update.add(std::string_view(all)).add(std::string_view(version_)).step("write");
        }
        shards_.insert(shards_.end(), parts.begin(), parts.end());
        starts_ += summary.sessions;
        longest_ms_ =
            std::max<std::int64_t>(longest_ms_, std::llround(1000 * summary.wall_seconds));

        std::unordered_map<std::int64_t, std::pair<std::int64_t, bool>> latest; // by item
        Statement outcomes(shard, "SELECT id, item, failure FROM outcomes");
        while (outcomes.step("read")) {
            auto& [outcome, answered] = latest[outcomes.integer(1)];
            if (answered) continue;
            outcome = outcomes.integer(0);
            answered = outcomes.is_null(2);
        }
        const auto gone = shard.retired(run);
        const auto copies = copies_in(fact("copies"));
        copies_.insert(copies.begin(), copies.end());
        execute("BEGIN IMMEDIATE");
        Statement items(shard, "SELECT id, key, occurrence, name FROM items WHERE run = ?");
        Statement how(shard, "SELECT at, shared FROM outcomes WHERE id = ?");
        items.add(run);
        while (items.step("read")) {
            const auto id = items.integer(0);
            if (std::size_t(id) < gone.size() && gone[std::size_t(id)]) continue;
            JournalKey key;
            const auto bytes = items.text(1);
            if (bytes.size() != sizeof key) shard.trouble(SQLITE_CORRUPT, "read");
            std::memcpy(&key, bytes.data(), sizeof key);
            const auto found = latest.find(id);
            const std::string name(items.text(3));
            const auto label = name.empty() ? fmt::format("{:x}{:x}", key.high, key.low) : name;
            auto& ours = merged_[label];
            if (ours.item > 0 && ours.key != key)
                refuse(fmt::format("the item {} is another request there", label));
            if (ours.item == 0) {
                ours.item = ++last_item_;
                ours.key = key;
                if (const auto it = copies.find(name); it != copies.end()) ours.count += it->second;
                result.items += ours.count;
                result.not_run += ours.count;
                // Equal requests of two shards are two occurrences.
                const auto occurrence = occurrences_[{key.high, key.low}]++;
                auto& insert = prepare(insert_item_, "INSERT INTO items VALUES(?, ?, ?, ?, ?)");
                insert.add(ours.item).add(run_).blob(&key, sizeof key);
                insert.add(std::int64_t(occurrence)).add(std::string_view(name)).step("write");
            }
            if (found == latest.end()) continue;
            const bool answered = found->second.second;
            Response response;
            std::int64_t holder = 0;
            if (const auto trouble = shard.read(found->second.first, response, holder))
                throw Trouble{trouble};
            if (ours.answered && answered) {
                Response first;
                if (const auto trouble = read(ours.outcome, first, holder)) throw Trouble{trouble};
                if (answer_part(first) != answer_part(response))
                    throw Trouble{{JournalErrc::changed,
                                   fmt::format("{} answers the item {} otherwise than a journal "
                                               "before it",
                                               shard.path_, label)}};
                continue;
            }
            if (ours.answered || (ours.outcome > 0 && !answered)) continue;
            // An answer after a failure stands in its place.
            (ours.outcome > 0 ? result.failed : result.not_run) -= ours.count;
            (answered ? result.answered : result.failed) += ours.count;
            if (answered) versions_.add(response.body, shard.path_);
            ours.answered = answered;
            ours.outcome = ++last_outcome_;
            how.reset().add(found->second.first).step("read");
            write_outcome({ours.outcome, ours.item, &response, how.integer(1) != 0, 0},
                          how.integer(0));
        }
        execute("COMMIT");
    });
    if (failure && db_ && !::sqlite3_get_autocommit(db_))
        ::sqlite3_exec(db_, "ROLLBACK", nullptr, nullptr, nullptr);
    return failure;
}

Failure JournalFile::added(JournalMerge& result) {
    return guarded("write", [&] {
        if (shards_.empty())
            throw Trouble{{JournalErrc::foreign, "none of these journals has a run in it: no shard "
                                                 "has come as far as its first request"}};
        std::string parts;
        for (const auto& part : std::set<std::string>(shards_.begin(), shards_.end())) {
            if (!parts.empty()) parts += ' ';
            parts += part;
        }
        result.missing = missing_parts(shards_);
        const auto invalid = std::atoll(facts_["invalid"].c_str());
        result.items += invalid;
        result.failed += invalid;
        result.versions = versions_.note();
        // A shard's first session writes all of its items, one that is missing none.
        const auto whole = std::atoll(facts_["items"].c_str());
        const auto more = parts.empty() ? 0 : whole - result.items;
        const bool repeats = std::any_of(occurrences_.begin(), occurrences_.end(),
                                         [](const auto& it) { return it.second > 1; });
        JournalFields copies;
        for (const auto& [name, count] : copies_) copies.emplace_back(name, std::to_string(count));
        facts_["copies"] = copies.empty() ? "" : to_json(copies);
        facts_["parts"] = parts;
        facts_["starts"] = std::to_string(starts_);
        facts_["longest_ms"] = std::to_string(longest_ms_);
        facts_["by_name"] = more > 0 || !result.missing.empty() ? "all" : repeats ? "repeats" : "";
        execute("BEGIN IMMEDIATE");
        for (const auto* name : {"server", "items", "cut", "content", "invalid", "copies", "parts",
                                 "by_name", "starts", "longest_ms"})
            set_fact(run_, name, facts_[name]);
        execute("COMMIT");
        if (parts.empty()) return;
        result.counted = result.missing.empty() || whole > 0;
        if (more > 0) {
            result.items += more;
            result.not_run += more;
        }
    });
}

Failure JournalFile::publish(const std::string& path) {
    if (auto failure = end()) return failure;
    return guarded("write", [&] {
        {
            Statement log(*this, "PRAGMA wal_checkpoint(TRUNCATE)");
            if (!log.step("write") || log.integer(0) != 0) trouble(SQLITE_BUSY, "write");
        }
        close();
        move_into_place(path_, path);
    });
}

Failure JournalFile::end() {
    return guarded("write", [&] {
        Statement update(*this, "UPDATE sessions SET ended = ? WHERE id = ?");
        update.add(unix_ms() - started_).add(session_).step("write");
    });
}

} // namespace evalrt::detail

namespace evalrt {

Failure read_journal(const std::string& path, JournalSummary& summary,
                     const std::function<void(const JournalItem&)>& on_item) {
    std::unique_ptr<detail::JournalFile> file;
    if (auto failure = detail::JournalFile::open_to_read(path, file)) return failure;
    return file->summary(summary, on_item);
}

Failure merge_journals(const std::string& path, const std::vector<std::string>& shards,
                       JournalMerge& out) {
    out = {};
    std::error_code none;
    const auto is_new = [&]() -> Failure {
        if (!std::filesystem::exists(path, none) || (std::filesystem::is_regular_file(path, none) &&
                                                     std::filesystem::file_size(path, none) == 0))
            return {};
        return {JournalErrc::unwritable,
                fmt::format("{} is there already: give a new file, or move it away", path)};
    };
    if (auto failure = is_new()) return failure;
    // Beside its place until it is whole: half of it would look like a run.
    const auto made = path + ".merging";
    std::unique_ptr<detail::JournalFile> file;
    auto failure = detail::JournalFile::open(made, file, true);
    if (failure) return failure;
    for (const auto& shard : shards) {
        std::unique_ptr<detail::JournalFile> one;
        failure = detail::JournalFile::open_to_read(shard, one);
        if (!failure) failure = file->add(*one, out);
        if (failure) break;
    }
    if (!failure) failure = file->added(out);
    if (!failure) failure = is_new(); // another merge may have been faster
    if (!failure) failure = file->publish(path);
    file.reset();
    if (failure)
        for (const auto* end : {"", "-wal", "-shm"}) std::filesystem::remove(made + end, none);
    return failure;
}

} // namespace evalrt
