// The journal's file: SQLite behind it, rows in front. Belongs to one thread at a time.
#ifndef EVALRT_LIB_JOURNAL_FILE_HPP
#define EVALRT_LIB_JOURNAL_FILE_HPP

#include "evalrt/detail/answer_versions.hpp"
#include "evalrt/detail/journal_core.hpp"
#include "evalrt/journal.hpp"

#include <map>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

struct sqlite3;
struct sqlite3_stmt;

namespace evalrt::detail {

struct JournalRow { // of an item that this run had not asked before
    std::int64_t item = 0;
    JournalKey key;
    std::uint32_t occurrence = 0;
    std::string_view name;
    std::string_view endpoint; // until the key and the occurrence are counted
    Text body;                 // likewise
};

struct JournalName { // that an item of the run has now
    std::int64_t item = 0;
    std::string name;
};

struct JournalOutcome {
    std::int64_t outcome = 0, item = 0;
    const Response* response = nullptr;
    bool shared = false;     // later runs may be served it
    std::int64_t source = 0; // the outcome that it was served from; the body is there
};

class JournalFile {
public:
    /// Makes the file if there is none, checks it if there is one, and keeps others from writing.
    /// `anew`: one that is there is what somebody has left, and is thrown away.
    static Failure open(const std::string& path, std::unique_ptr<JournalFile>& out,
                        bool anew = false);
    static Failure open_to_read(const std::string& path, std::unique_ptr<JournalFile>& out);
    ~JournalFile();

    struct Begun {
        JournalIndex index;
        std::int64_t last_item = 0, last_outcome = 0;
        std::size_t resumed = 0; // outcomes of the run
        JournalFields identity;  // in its keys
    };
    /// Finds or adds the run, starts a session of it, and reads what is there.
    Failure begin(const JournalOptions& options, const JournalRun& run, Begun& out);

    /// What the run has that begin() would go on with, if its model were given.
    Failure known(const JournalOptions& options, const JournalRun& run, JournalKnown& out);

    /// One transaction.
    Failure write(std::span<const JournalRow> rows, std::span<const JournalName> names,
                  std::span<const JournalOutcome> outcomes);

    /// From now on these are of an earlier version of the suite, and no others.
    Failure retire(const std::vector<std::int64_t>& items);

    /// Adds another file's latest run to the only one of this file, which is new.
    Failure add(JournalFile& shard, JournalMerge& result);
    Failure added(JournalMerge& result); ///< all have been; shards that were not are counted

    /// An outcome with its body and text; holder: whose body it is.
    Failure read(std::int64_t outcome, Response& response, std::int64_t& holder);

    Failure summary(JournalSummary& summary,
                    const std::function<void(const JournalItem&)>& on_item);

    /// The session has ended.
    Failure end();

    /// It is whole, closed, and stands at `path` from now on.
    Failure publish(const std::string& path);

private:
    class Statement;
    struct Trouble;
    JournalFile() = default;

    void lock();
    void unlock();
    void close();
    static void move_into_place(const std::string& from, const std::string& to);
    void create();
    void check_header();
    void check_pages();
    void connect(int flags, const std::string& uri = {});
    void connect_to_read();
    void write_outcome(const JournalOutcome& it, std::int64_t at);
    std::int64_t read_summary(JournalSummary& summary);
    std::optional<std::int64_t> writer() const;
    std::vector<bool> retired(std::int64_t run);
    using Facts = std::map<std::string, std::string, std::less<>>;
    Facts facts(std::int64_t run);
    using Copies = std::map<std::string, std::int64_t, std::less<>>; // by the item's name
    static Copies copies_in(const std::string& fact);
    void set_fact(std::int64_t run, std::string_view name, std::string_view value);
    struct Found;
    Found find_run(const JournalOptions& options, const JournalRun& run, bool any_model);
    void refuse_changed(const Found& found) const;
    void check_place();
    void execute(const char* sql);
    Statement& prepare(std::unique_ptr<Statement>& slot, const char* sql);
    void read_index(const JournalOptions& options, const JournalRun& run, std::int64_t run_id,
                    Begun& out);
    static void fill(const Statement& row, Response& response);
    std::string body_of(std::int64_t outcome, std::int64_t size);
    [[noreturn]] void trouble(int code, const char* doing);
    template <class F>
    Failure guarded(const char* doing, F f);

    std::string path_;
    sqlite3* db_ = nullptr;
    int lock_ = -1;
    bool log_ = false; // there was a -wal when it was opened to be read
    struct Place {     // the file and its log, by device and number
        std::uint64_t of[4] = {};
        bool operator==(const Place&) const = default;
    };
    std::optional<Place> place_;
    std::int64_t size_ = 0;              // of the file
    std::int64_t run_ = 0, session_ = 0; // 0: not begun
    std::int64_t started_ = 0;           // of the session, ms since 1970
    std::string suite_, urls_;           // of the run, when shards are added
    std::int64_t starts_ = 0;            // of theirs
    std::int64_t longest_ms_ = 0;        // that one of them took
    std::string identity_, version_;     // likewise
    JournalFields config_;
    Facts facts_;
    std::vector<std::string> shards_; // their "I/N"
    struct Merged {
        std::int64_t item = 0, outcome = 0;
        std::int64_t count = 1; // with those that get its answer, too
        bool answered = false;
        JournalKey key;
    };
    std::int64_t last_item_ = 0, last_outcome_ = 0;
    Copies copies_;
    AnswerVersions versions_;
    std::unordered_map<std::string, Merged> merged_; // by name
    std::map<std::pair<std::uint64_t, std::uint64_t>, std::uint32_t> occurrences_;
    std::unique_ptr<Statement> insert_item_, insert_outcome_, insert_body_, select_outcome_,
        select_body_;
};

} // namespace evalrt::detail

#endif
