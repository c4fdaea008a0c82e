// Journal: a Backend that keeps every answer in a file, and asks only for what is not there.
#ifndef EVALRT_JOURNAL_HPP
#define EVALRT_JOURNAL_HPP

#include "evalrt/backend.hpp"

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace evalrt {

/// Why a journal is not used, or not any more.
enum class JournalErrc {
    in_use = 1, ///< another process writes to it
    foreign,    ///< the file is something else, or of a later version
    corrupt,    ///< the file is damaged
    changed,    ///< it belongs to a run with another configuration
    unwritable, ///< disk full, read-only, I/O error
};
const boost::system::error_category& journal_category() noexcept;
error_code make_error_code(JournalErrc errc) noexcept;

/// Names and values, in an order that stays the same.
using JournalFields = std::vector<std::pair<std::string, std::string>>;

enum class JournalMode {
    resume, ///< goes on with the run that the file holds; refused if the configuration has changed
    append, ///< a new run in the same file
};

struct JournalOptions {
    std::string path; ///< empty: no journal
    JournalMode mode = JournalMode::resume;
    /// A later run is served answers that were sampled too, not only those at temperature 0.
    bool reuse_sampled = false;
    /// What resuming does not try again: the item would fail in the same way.
    std::vector<Errc> final_failures{Errc::context_too_long, Errc::poison};
    /// What is run, by name; another suite is another run. From its first '/' on it may be a path,
    /// in any spelling.
    std::string suite;
    /// A digest of what is in it; empty: not known. A suite of another name with the same content
    /// is the same one; joining parts compares it. A run goes on when that of its suite changes.
    std::string content;
    JournalFields settings; ///< compared when a run is resumed, beside what Runtime adds
    /// What the report of the run counts: requests in all, 0: not known; of these, those that
    /// cannot be asked and count as rejected; and items whose answers others get, too, by their
    /// names and how many do.
    std::int64_t items = 0, invalid = 0;
    JournalFields copies;
    /// Whether the suite has an item of this name; empty: not known. Called by the journal's own
    /// thread. Of what was joined from parts, an item that has another name now is told by it.
    std::function<bool(std::string_view)> named;
    /// Of a run that is a part of a suite; joining parts compares them. The parts' requests in all
    /// (0: not known), and what is another one when the suite is cut at other places; words before
    /// its last one say why.
    std::int64_t whole_items = 0;
    std::string cut;

    std::size_t group = 256;                 ///< answers in one commit, at most
    std::size_t group_bytes = 4 << 20;       ///< of answers, likewise
    std::chrono::milliseconds group_age{20}; ///< the first answer of a group waits no longer
    std::function<void(Failure)> on_failure; ///< it cannot be written any more; called once
};

/// Who is asked, and by whom.
struct JournalRun {
    JournalFields identity; ///< of model and server: a part of every key, and compared
    /// Of servers that run already and are one service: replicas of one model. No part of a key. A
    /// run goes on with any of the addresses that it was begun with.
    std::vector<std::string> addresses;
    std::string server;         ///< what kind it is; empty: not known
    std::string server_version; ///< empty: not known
    /// The body as it goes out; empty: as it is. Called by the journal's own thread, too.
    std::function<Text(const Request&)> sent;
};

/// What a journal says of the server of a run that could be gone on with.
struct JournalKnown {
    std::string model, server, server_version; ///< empty: it was not known
    std::string refused; ///< no such run, and async_begin() would refuse to begin one: its words
};

/// Stands between the callers and another Backend. An item is a request and its occurrence: the
/// n-th equal request is an item of its own. Its key is a hash of the identity, the endpoint and
/// the body as sent. It is answered, failed (and with which class) or not run.
///
/// What the file keeps: the items' keys and names, and of each outcome the answer's body, usage,
/// times, attempts and the server's words on failure. The requests themselves are not kept.
///
/// Served     what the resumed run has been answered already; of other runs in the file with the
///            same identity and server version, answers at temperature 0 that were not cut off by
///            a content filter. A failure is tried again, unless its class is a final one.
/// Commit     an answer reaches the caller after it is on the disk: groups are committed by a
///            thread of the journal's own, at once if nothing else is under way, otherwise after
///            at most group_age.
/// Failure    when the file cannot be written any more, or is not found where it was, on_failure
///            is called, and every request that has not completed, and each that comes later,
///            completes as cancelled.
/// Cancel     any type; a request whose answer is being committed completes with it.
/// Threads    belongs to its executor.
class Journal final : public Backend {
public:
    using OpenSignature = void(error_code, std::string);
    using OpenHandler = asio::any_completion_handler<OpenSignature>;

    Journal(asio::any_io_executor executor, JournalOptions options);
    ~Journal() override; ///< commits what it has and closes the file, which may take a moment

    asio::any_io_executor get_executor() noexcept override;

    /// Opens or makes the file and checks it. Nobody else can write to it then.
    ///
    /// Completes  when it is open.
    /// Errors     in_use, foreign, corrupt, unwritable; the string says what to do. The file
    ///            stays as it was.
    /// Lifetime   *this must outlive the operation.
    template <asio::completion_token_for<OpenSignature> Token = asio::deferred_t>
    auto async_open(Token&& token = Token()) {
        return asio::async_initiate<Token, OpenSignature>(
            [this](OpenHandler handler) { open(std::move(handler)); }, token);
    }

    /// Finds the run to go on with, or begins one. When it is open, and again before the first
    /// request if the server version was not known.
    ///
    /// Completes  when requests may come.
    /// Errors     changed (the string lists the differences), corrupt, unwritable.
    /// Lifetime   *this must outlive the operation.
    template <asio::completion_token_for<OpenSignature> Token = asio::deferred_t>
    auto async_begin(JournalRun run, Token&& token = Token()) {
        return asio::async_initiate<Token, OpenSignature>(
            [this](OpenHandler handler, JournalRun moved) {
                begin(std::move(moved), std::move(handler));
            },
            token, std::move(run));
    }

    using KnownSignature = void(error_code, JournalKnown);
    using KnownHandler = asio::any_completion_handler<KnownSignature>;

    /// What the file knows of the server, of which `run` says what is known otherwise: an empty
    /// model is any. When it is open.
    ///
    /// Completes  with what the run has that async_begin() would go on with.
    /// Errors     changed: there is no such run; corrupt, unwritable.
    /// Lifetime   *this must outlive the operation.
    template <asio::completion_token_for<KnownSignature> Token = asio::deferred_t>
    auto async_known(JournalRun run, Token&& token = Token()) {
        return asio::async_initiate<Token, KnownSignature>(
            [this](KnownHandler handler, JournalRun moved) {
                known(std::move(moved), std::move(handler));
            },
            token, std::move(run));
    }

    /// Whom to ask for what is not in the file; must outlive the operations.
    void connect(Backend& inner);

    /// Whether all of these, asked in this order, would be served.
    bool holds(const std::vector<const Request*>& requests) const;

    /// The whole suite has been asked: what the resumed run has besides is of an earlier version of
    /// it, and no item of the run any more. It stays in the file, should it come back.
    void suite_asked();

    /// Counts occurrences from the beginning again: a caller that asks for the second time what it
    /// has asked already is served.
    void rewind();

    bool resumed() const; ///< the file has answers or failures of this run
    bool failed() const;  ///< it cannot be written any more

    /// Commits what it has and closes the file.
    template <asio::completion_token_for<OpenSignature> Token = asio::deferred_t>
    auto async_close(Token&& token = Token()) {
        return asio::async_initiate<Token, OpenSignature>(
            [this](OpenHandler handler) { close(std::move(handler)); }, token);
    }

private:
    struct Impl;
    void start_complete(Request request, TextSink on_text, Handler handler) override;
    void open(OpenHandler handler);
    void begin(JournalRun run, OpenHandler handler);
    void known(JournalRun run, KnownHandler handler);
    void close(OpenHandler handler);
    std::shared_ptr<Impl> impl_; // shared with running requests and the thread's results
};

/// What a journal says of its latest run.
struct JournalSummary {
    JournalFields config; ///< identity and settings
    std::string suite, server_version;
    std::int64_t runs = 0, sessions = 0; ///< runs in the file; starts of the latest one
    double wall_seconds = 0;  ///< of all sessions, to the last outcome; joined: the longest part
    bool ended = false;       ///< the latest session did, by itself: it was not killed
    bool log = false;         ///< there was a -wal beside the file, where what is latest may be
    std::int64_t earlier = 0; ///< items of earlier versions of the suite, which are left out
    std::int64_t missing = 0; ///< items not written yet, or of parts that were not joined
    std::vector<std::string> missing_parts; ///< which were not: "2/4"
    std::int64_t invalid = 0; ///< requests of the suite that could not be asked, and are no items
    std::optional<std::int64_t> pid; ///< of the process that writes to it at this moment
};
struct JournalItem {
    std::string name;
    std::optional<Response> response; ///< without body and text; nothing: not run
    std::int64_t copies = 0;          ///< other requests that get its answer
};

/// Reads the latest run of a journal, also while somebody writes to it. Calls on_item for each
/// item, in the order in which they were first asked.
Failure read_journal(const std::string& path, JournalSummary& summary,
                     const std::function<void(const JournalItem&)>& on_item);

/// What joining journals came to. Counted are requests: items, those that get an item's answer,
/// too, and those that could not be asked.
struct JournalMerge {
    std::int64_t items = 0, answered = 0, failed = 0, not_run = 0;
    std::vector<std::string> missing; ///< shards of the run that are in none of them: "2/4"
    std::vector<std::string> empty;   ///< journals without a run or an item, which are left out
    bool counted = true;              ///< not_run has the items of missing shards, too
    std::string versions; ///< not empty: servers of several versions have answered, and which
};

/// Joins the latest runs of several journals, the shards of one run, in a new file. An item that is
/// in several of them is answered where one has it answered. While somebody writes to one of them,
/// what it has so far is taken. The whole run goes on with the new file, at any of the addresses
/// that the shards asked; an answer stays with its item's name there: with that of equal requests,
/// and with every one while items are missing. Until that run has asked for these, missing shards
/// can be joined to the new file.
///
/// Errors     changed: they are not of one run, or answer an item differently; unwritable: the
///            file is there already, or cannot be written; in_use: somebody else joins to it;
///            foreign: also if none of them has a run in it; corrupt. Nothing is left then.
Failure merge_journals(const std::string& path, const std::vector<std::string>& shards,
                       JournalMerge& out);

/// What changes when a model in a local folder or file does: a hash of the names, sizes and times
/// of its files. Empty: `model` is no path.
std::string model_files(const std::string& model);

} // namespace evalrt

template <>
struct boost::system::is_error_code_enum<evalrt::JournalErrc> : std::true_type {};

#endif
