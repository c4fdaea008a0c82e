#include "evalrt/journal.hpp"

#include "evalrt/detail/complete.hpp"
#include "journal_file.hpp"
#include "json_text.hpp"

#include <boost/asio/bind_executor.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/prefer.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/intrusive/list.hpp>

#include <fmt/format.h>
#include <openssl/evp.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <filesystem>
#include <mutex>
#include <span>
#include <thread>
#include <unordered_map>

namespace evalrt {
namespace intrusive = boost::intrusive;
namespace {

class Category final : public boost::system::error_category {
public:
    const char* name() const noexcept override { return "evalrt.journal"; }
    std::string message(int value) const override {
        switch (JournalErrc(value)) {
        case JournalErrc::in_use: return "the journal is in use";
        case JournalErrc::foreign: return "the file is not a journal";
        case JournalErrc::corrupt: return "the journal is damaged";
        case JournalErrc::changed: return "the journal belongs to another configuration";
        case JournalErrc::unwritable: return "the journal cannot be written";
        }
        return "unknown error";
    }
};

// Does jobs one after the other.
class Worker {
public:
    Worker() : thread_([this] { run(); }) {}
    ~Worker() { stop(); }

    void post(std::function<void()> job) {
        {
            const std::lock_guard lock(mutex_);
            jobs_.push_back(std::move(job));
        }
        ready_.notify_one();
    }

    /// When all jobs are done.
    void stop() {
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        ready_.notify_one();
        if (thread_.joinable()) thread_.join();
    }

private:
    void run() {
        std::unique_lock lock(mutex_);
        while (true) {
            ready_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
            if (jobs_.empty()) return;
            auto job = std::move(jobs_.front());
            jobs_.pop_front();
            lock.unlock();
            job();
            job = nullptr;
            lock.lock();
        }
    }

    std::mutex mutex_;
    std::condition_variable ready_;
    std::deque<std::function<void()>> jobs_;
    bool stopping_ = false;
    std::thread thread_;
};

// A temperature that is not given is the server's own.
bool at_temperature_zero(std::string_view body) {
    constexpr std::string_view key = "\"temperature\"";
    if (!::memmem(body.data(), body.size(), key.data(), key.size())) return false;
    const auto value = detail::first_member(body, "temperature");
    return value && value->find_first_of("0123456789") != value->npos &&
           std::strtod(std::string(*value).c_str(), nullptr) == 0;
}

// What another run might get a real answer to.
bool filtered(const Response& response) {
    return response.finish_reason == "content_filter" || response.finish_reason == "refusal";
}

std::string identity_text(const JournalFields& fields) {
    std::string text;
    for (const auto& [name, value] : fields)
        text += fmt::format("{}:{}{}:{}", name.size(), name, value.size(), value);
    return text;
}

// Copies of texts, one behind the other: a string for each would lie between the requests' bodies,
// and the hole that it leaves there is cold memory for whoever is given it next.
class Texts {
public:
    std::string_view keep(std::string_view text) {
        if (blocks_.empty() || blocks_.back().capacity() - blocks_.back().size() < text.size())
            blocks_.emplace_back().reserve(std::max(block, text.size()));
        auto& to = blocks_.back();
        to += text;
        return std::string_view(to).substr(to.size() - text.size());
    }

    void clear() {
        blocks_.resize(std::min<std::size_t>(blocks_.size(), 1));
        if (!blocks_.empty()) blocks_.front().clear();
    }

private:
    static constexpr std::size_t block = 16 << 10; // far more than a string has in itself
    std::vector<std::string> blocks_;
};

constexpr std::size_t read_ahead = 256;
constexpr std::size_t delivered_at_once = 16;

} // namespace

const boost::system::error_category& journal_category() noexcept {
    static const Category instance;
    return instance;
}

error_code make_error_code(JournalErrc errc) noexcept { return {int(errc), journal_category()}; }

namespace detail {

JournalKey journal_key(std::string_view identity, std::string_view endpoint,
                       std::string_view body) {
    static EVP_MD* const sha256 = ::EVP_MD_fetch(nullptr, "SHA256", nullptr);
    thread_local const std::unique_ptr<EVP_MD_CTX, void (*)(EVP_MD_CTX*)> context{
        ::EVP_MD_CTX_new(), ::EVP_MD_CTX_free};
    ::EVP_DigestInit_ex(context.get(), sha256, nullptr);
    const std::uint64_t sizes[] = {identity.size(), endpoint.size(), body.size()};
    ::EVP_DigestUpdate(context.get(), sizes, sizeof sizes);
    for (const auto part : {identity, endpoint, body})
        ::EVP_DigestUpdate(context.get(), part.data(), part.size());
    unsigned char digest[EVP_MAX_MD_SIZE];
    ::EVP_DigestFinal_ex(context.get(), digest, nullptr);
    JournalKey key;
    static_assert(sizeof key == 16);
    std::memcpy(&key, digest, sizeof key);
    return key;
}

} // namespace detail

struct Journal::Impl : std::enable_shared_from_this<Impl> {
    // Linked while it can be cancelled: not while its answer is read or committed.
    using Link = intrusive::list_base_hook<intrusive::link_mode<intrusive::auto_unlink>>;
    struct Live : Link, std::enable_shared_from_this<Live> {
        Live(bool stream_, TextSink on_text_, Handler handler_)
            : stream(stream_), on_text(std::move(on_text_)), handler(std::move(handler_)) {}

        bool stream;
        TextSink on_text;
        Handler handler;
        asio::cancellation_signal cancel; // of the request to the inner backend
        detail::JournalEntry* entry = nullptr;
        std::int64_t item = 0, outcome = 0; // that is served
        bool own = false;                   // of this run
        bool repeatable = false;            // at temperature 0
        bool asked = false;
    };
    struct Ended {
        Ended(std::shared_ptr<Live>&& live_, Response&& response_)
            : live(std::move(live_)), response(std::move(response_)) {}

        std::shared_ptr<Live> live;
        Response response;
        detail::JournalOutcome row;
    };
    class Group {
    public:
        std::vector<Ended> ended;
        std::vector<detail::JournalName> names;
        Texts texts;               // of the rows
        std::size_t delivered = 0; // of those
        std::size_t bytes = 0;

        bool empty() const { return count_ == 0 && ended.empty() && names.empty(); }
        std::size_t most() const { return std::max({count_, ended.size(), names.size()}); }
        bool begun() const { return count_ + ended.size() + names.size() == 1; }
        std::span<detail::JournalRow> rows() { return {rows_.data(), count_}; }
        detail::JournalRow& row() { // a new one
            if (count_ == rows_.size()) rows_.emplace_back();
            return rows_[count_++];
        }

        // For the next answers: new memory would come page by page, new strings one by one.
        void clear() {
            for (auto& it : rows()) it.body = {};
            count_ = 0;
            ended.clear();
            names.clear();
            texts.clear();
            delivered = bytes = 0;
        }

    private:
        std::vector<detail::JournalRow> rows_;
        std::size_t count_ = 0; // of those
    };
    struct Counted { // of a fresh run, what the thread has counted
        std::int64_t item = 0, outcome = 0;
        detail::JournalKey key;
        std::uint32_t occurrence = 0;
        std::optional<Errc> failure;
    };

    Impl(asio::any_io_executor executor_, JournalOptions options_)
        : home(std::move(executor_)),
          executor(home.executor),
          options(std::move(options_)),
          timer(executor),
          group(std::make_shared<Group>()),
          worker(std::make_unique<Worker>()) {}

    // Runs job(file) on the thread, then done(its failure) on the executor, which stays busy.
    template <class Job, class Done>
    void work(Job job, Done done) {
        struct Parts {
            Job job;
            Done done;
        };
        auto parts = std::make_shared<Parts>(Parts{std::move(job), std::move(done)});
        auto busy = asio::prefer(executor, asio::execution::outstanding_work.tracked);
        worker->post([self = shared_from_this(), parts, busy]() mutable {
            auto failure = parts->job(self->file);
            // Nothing of it stays here: what callers gave is let go of on their thread.
            asio::post(busy, [self = std::move(self), parts = std::move(parts),
                              failure = std::move(failure)]() mutable {
                parts->done(std::move(failure));
            });
        });
    }

    void answer(OpenHandler handler, Failure failure) {
        detail::complete(executor, std::move(handler), failure.code, std::move(failure.detail));
    }

    void open(OpenHandler handler) {
        work(
            [path = options.path](std::unique_ptr<detail::JournalFile>& out) {
                return detail::JournalFile::open(path, out);
            },
            [this, handler = std::move(handler)](Failure failure) mutable {
                answer(std::move(handler), std::move(failure));
            });
    }

    void begin(JournalRun run_, OpenHandler handler) {
        run = std::move(run_);
        auto begun = std::make_shared<detail::JournalFile::Begun>();
        work(
            [this, begun](std::unique_ptr<detail::JournalFile>& it) {
                return it->begin(options, run, *begun);
            },
            [this, begun, handler = std::move(handler)](Failure failure) mutable {
                if (!failure) {
                    identity = identity_text(begun->identity);
                    index = std::move(begun->index);
                    last_item = begun->last_item;
                    last_outcome = begun->last_outcome;
                    resumed = begun->resumed > 0;
                    fresh = index.size() == 0 && !index.all_by_name();
                }
                answer(std::move(handler), std::move(failure));
            });
    }

    void find_known(JournalRun asked_for, KnownHandler handler) {
        auto found = std::make_shared<JournalKnown>();
        work(
            [this, found, asked_for = std::move(asked_for)](
                std::unique_ptr<detail::JournalFile>& it) -> Failure {
                if (!it) return {JournalErrc::unwritable, "the journal is closed"};
                return it->known(options, asked_for, *found);
            },
            [this, found, handler = std::move(handler)](Failure failure) mutable {
                if (failure.code == JournalErrc::changed)
                    found->refused = std::move(failure.detail);
                detail::complete(executor, std::move(handler), failure.code, std::move(*found));
            });
    }

    void close(OpenHandler handler) {
        flush();
        closed = true;
        work(
            [](std::unique_ptr<detail::JournalFile>& it) {
                Failure failure;
                if (it) failure = it->end();
                it.reset();
                return failure;
            },
            [this, handler = std::move(handler)](Failure failure) mutable {
                answer(std::move(handler), broken ? Failure() : std::move(failure));
            });
    }

    Text sent(const Request& request) const { return run.sent ? run.sent(request) : request.body; }

    void submit(Request request, TextSink on_text, Handler handler) {
        if (request.body.empty() && inner) // a GET
            return inner->async_complete(std::move(request), std::move(on_text),
                                         std::move(handler));
        if (broken || closed) return refuse(std::move(handler));
        auto one = std::make_shared<Live>(request.stream, std::move(on_text), std::move(handler));
        auto& live = *one;
        waiting.push_back(live);
        detail::JournalDecision decision;
        if (fresh) {
            // The file has nothing to serve: the hashing, which costs most, is the thread's.
            live.item = ++last_item;
            auto& row = group->row();
            row.item = live.item;
            row.name = group->texts.keep(request.name);
            row.endpoint = group->texts.keep(request.endpoint);
            row.body = request.body;
            grown();
        } else {
            const auto body = sent(request);
            const auto key = detail::journal_key(identity, request.endpoint, body);
            decision = index.next(index.place(key, request.name));
            live.entry = decision.entry;
            live.repeatable = at_temperature_zero(body);
            live.item = decision.item;
            if (live.item == 0) {
                live.item = live.entry->item = ++last_item;
                auto& row = group->row();
                row.item = live.item;
                row.key = key;
                row.occurrence = decision.occurrence;
                row.name = group->texts.keep(request.name);
                live.entry->name = detail::journal_name(request.name);
                grown();
            } else if (const auto name = detail::journal_name(request.name);
                       live.entry->name != 0 && live.entry->name != name && !request.name.empty()) {
                live.entry->name = name;
                group->names.push_back({live.item, request.name});
                grown();
            }
        }
        detail::on_cancel(live.handler, [weak = weak_from_this(), its = live.weak_from_this()] {
            const auto self = weak.lock();
            const auto waits = its.lock();
            if (self && waits) self->cancel(*waits);
        });
        if (decision.outcome > 0) {
            live.outcome = decision.outcome;
            live.own = decision.outcome == live.entry->outcome;
            served.push_back(std::move(one));
            return read();
        }
        live.asked = true;
        ++asked;
        if (!inner) {
            Response response;
            response.outcome = Errc::cancelled;
            response.detail = "the journal has nobody to ask";
            return ended(std::move(one), std::move(response));
        }
        const auto slot = live.cancel.slot();
        Asked done{shared_from_this(), std::move(one), slot};
        if (inner_is_here)
            inner->async_complete(std::move(request), TextSink(live.on_text), std::move(done));
        else
            inner->async_complete(std::move(request), TextSink(live.on_text),
                                  asio::bind_executor(executor, std::move(done)));
    }

    // The end of what the inner backend was asked.
    struct Asked {
        using cancellation_slot_type = asio::cancellation_slot;

        std::shared_ptr<Impl> self;
        std::shared_ptr<Live> live;
        asio::cancellation_slot slot;

        cancellation_slot_type get_cancellation_slot() const noexcept { return slot; }
        void operator()(error_code, Response&& response) {
            self->ended(std::move(live), std::move(response));
        }
    };

    void refuse(Handler handler) {
        Response response;
        response.outcome = Errc::cancelled;
        response.detail = broken ? broken.detail : "the journal is closed";
        finish(std::move(handler), std::move(response));
    }

    void finish(Handler handler, Response&& response) {
        const auto code = response.outcome ? make_error_code(*response.outcome) : error_code();
        detail::complete(executor, std::move(handler), code, std::move(response));
    }

    void ended(std::shared_ptr<Live> live, Response&& response) {
        --asked;
        live->unlink();
        if (broken || closed) return refuse(std::move(live->handler));
        if (response.outcome == Errc::cancelled) { // not run
            finish(std::move(live->handler), std::move(response));
            return flush_if_last();
        }
        record(std::move(live), std::move(response), 0);
    }

    void record(std::shared_ptr<Live> live, Response&& response, std::int64_t source) {
        auto& it = group->ended.emplace_back(std::move(live), std::move(response));
        it.row.outcome = ++last_outcome;
        it.row.item = it.live->item;
        // With no entry yet the thread will know whether it was repeatable.
        it.row.shared = (it.live->repeatable || !it.live->entry) && !it.response.outcome &&
                        !filtered(it.response);
        it.row.source = source;
        group->bytes += it.response.body.size();
        grown();
    }

    void grown() {
        if (group->most() >= options.group || group->bytes >= options.group_bytes) return flush();
        if (group->begun()) {
            timer.expires_after(options.group_age);
            timer.async_wait([weak = weak_from_this()](error_code ec) {
                auto self = weak.lock();
                if (!ec && self) self->flush();
            });
        }
        flush_if_last();
    }

    // Nobody is under way who could join the group.
    void flush_if_last() {
        if (asked == 0 && !reading && served.empty() && !group->ended.empty()) flush();
    }

    void flush() {
        timer.cancel();
        if (group->empty() || broken) return;
        auto full =
            std::exchange(group, spare ? std::exchange(spare, nullptr) : std::make_shared<Group>());
        for (auto& it : full->ended) it.row.response = &it.response;
        work(
            [this, full](std::unique_ptr<detail::JournalFile>& it) -> Failure {
                if (!it) return {JournalErrc::unwritable, "the journal is closed"};
                for (auto& row : full->rows())
                    if (!row.body.empty()) count(row);
                std::vector<detail::JournalOutcome> outcomes;
                outcomes.reserve(full->ended.size());
                for (auto& one : full->ended) {
                    if (!one.live->entry && !repeatable.at(std::size_t(one.row.item)))
                        one.row.shared = false;
                    outcomes.push_back(one.row);
                }
                return it->write(full->rows(), full->names, outcomes);
            },
            [this, full](Failure failure) {
                if (failure) fail(std::move(failure));
                for (const auto& row : full->rows())
                    if (!row.body.empty()) counted(row);
                if (broken) {
                    for (auto& it : full->ended) refuse(std::move(it.live->handler));
                    return;
                }
                deliver(full);
            });
    }

    // A few at a time, among the executor's other work: what a whole group lets go of at once, the
    // allocator puts away and takes out again at several times the price.
    void deliver(const std::shared_ptr<Group>& full) {
        const auto count = full->ended.size();
        if (full->delivered == count) {
            full->clear();
            spare = full;
            return;
        }
        // Before the callers' handlers, which may throw.
        asio::post(executor, [self = shared_from_this(), full] { self->deliver(full); });
        const auto end = closed ? count : std::min(count, full->delivered + delivered_at_once);
        while (full->delivered < end) deliver(full->ended[full->delivered++]);
    }

    // On the thread.
    void count(detail::JournalRow& row) {
        asks.endpoint = row.endpoint;
        asks.body = row.body;
        const auto body = sent(asks);
        row.key = detail::journal_key(identity, row.endpoint, body);
        row.occurrence = counts.next(row.key);
        const auto item = std::size_t(row.item);
        if (repeatable.size() <= item) repeatable.resize(item + 1);
        repeatable[item] = at_temperature_zero(body);
        asks.body = {};
    }

    // Afterwards. A fresh run looks nothing up: its index is made when that changes.
    void counted(const detail::JournalRow& row) {
        if (fresh) return known.push_back({row.item, 0, row.key, row.occurrence, {}});
        auto& entry = index.count(row.key, row.occurrence, false);
        entry.item = row.item;
        entries[row.item] = &entry;
    }

    // Now: it is as if it had counted.
    void settle() {
        index.reserve(index.size() + known.size());
        for (const auto& it : known) {
            auto& entry = index.count(it.key, it.occurrence, true);
            entry.item = it.item;
            entry.outcome = it.outcome;
            entry.failure = it.failure;
            if (it.outcome == 0) entries[it.item] = &entry;
        }
        known.clear();
    }

    void deliver(Ended& it) {
        const auto live = std::move(it.live);
        if (live->entry) {
            keep(*live->entry, it);
        } else if (!known.empty() && it.row.item >= known.front().item) { // they have no gaps
            keep(known[std::size_t(it.row.item - known.front().item)], it);
        } else {
            keep(*entries.at(it.row.item), it);
            entries.erase(it.row.item);
        }
        show(*live, it.response);
        const auto code =
            it.response.outcome ? make_error_code(*it.response.outcome) : error_code();
        detail::complete_now(home, std::move(live->handler), code, std::move(it.response));
    }

    template <class Entry>
    static void keep(Entry& entry, const Ended& it) {
        entry.outcome = it.row.outcome;
        entry.failure = it.response.outcome;
    }

    // To a caller who wants the text as it comes.
    static void show(const Live& live, const Response& response) {
        if (!live.asked && live.stream && live.on_text && !response.text.empty())
            live.on_text(response.text);
    }

    void give(Live& live, Response&& response) {
        show(live, response);
        finish(std::move(live.handler), std::move(response));
    }

    // A few at a time: all that is served must not be in memory at once.
    void read() {
        if (reading || broken) return;
        struct One {
            std::shared_ptr<Live> live;
            Response response;
            std::int64_t source = 0;
        };
        auto batch = std::make_shared<std::vector<One>>();
        while (!served.empty() && batch->size() < read_ahead) {
            auto live = std::move(served.front());
            served.pop_front();
            if (!live->is_linked()) continue; // cancelled
            live->unlink();
            batch->push_back({std::move(live), {}, 0});
        }
        if (batch->empty()) return flush_if_last();
        reading = true;
        work(
            [batch](std::unique_ptr<detail::JournalFile>& it) -> Failure {
                if (!it) return {JournalErrc::unwritable, "the journal is closed"};
                for (auto& one : *batch)
                    if (auto failure = it->read(one.live->outcome, one.response, one.source))
                        return failure;
                return {};
            },
            [this, batch](Failure failure) {
                reading = false;
                if (failure) fail(std::move(failure));
                for (auto& one : *batch) {
                    one.response.from_journal = true;
                    if (broken || (closed && !one.live->own))
                        refuse(std::move(one.live->handler));
                    else if (one.live->own)
                        give(*one.live, std::move(one.response));
                    else
                        record(std::move(one.live), std::move(one.response), one.source);
                }
                // After the handlers, which are posted: they let go of what they were given.
                asio::post(executor, [weak = weak_from_this()] {
                    if (auto self = weak.lock()) self->read();
                });
            });
    }

    void suite_asked() {
        if (!resumed || fresh || broken || closed) return;
        if (index.all_by_name())
            flush(); // the file knows the suite's items before it knows the end
        work(
            [items = index.unasked()](std::unique_ptr<detail::JournalFile>& it) {
                return it ? it->retire(items) : Failure();
            },
            [this](Failure failure) {
                if (failure) fail(std::move(failure));
            });
    }

    void cancel(Live& live) {
        if (!live.is_linked()) return;
        if (live.asked) return live.cancel.emit(asio::cancellation_type::terminal);
        Response response;
        response.outcome = Errc::cancelled;
        response.detail = "cancelled";
        live.unlink();
        finish(std::move(live.handler), std::move(response));
    }

    void fail(Failure failure) {
        if (broken) return;
        broken = std::move(failure);
        if (options.on_failure) options.on_failure(broken);
        std::vector<std::shared_ptr<Live>> all;
        for (auto& live : waiting) all.push_back(live.shared_from_this());
        for (const auto& live : all) cancel(*live);
        for (auto& it : group->ended) refuse(std::move(it.live->handler));
        group = std::make_shared<Group>();
        timer.cancel();
    }

    detail::Home home;
    const asio::any_io_executor& executor;
    JournalOptions options;
    JournalRun run;
    std::string identity;
    Backend* inner = nullptr;
    bool inner_is_here = false; // on the same executor
    detail::JournalIndex index;
    asio::steady_timer timer; // of the group
    std::shared_ptr<Group> group, spare;
    intrusive::list<Live, intrusive::constant_time_size<false>> waiting;
    std::deque<std::shared_ptr<Live>> served; // not read yet
    std::int64_t last_item = 0, last_outcome = 0;
    std::size_t asked = 0; // of the inner backend, not ended
    bool reading = false, resumed = false, closed = false;
    Failure broken;
    bool fresh = false;         // nothing in the file can be served to this run
    std::vector<Counted> known; // of a fresh run, by item; not in the index yet
    std::unordered_map<std::int64_t, detail::JournalEntry*> entries; // they are, not delivered yet
    // The worker's:
    std::unique_ptr<detail::JournalFile> file;
    detail::JournalCounts counts;
    std::vector<bool> repeatable; // of items that it counted: at temperature 0
    Request asks;
    std::unique_ptr<Worker> worker;
};

Journal::Journal(asio::any_io_executor executor, JournalOptions options)
    : impl_(std::make_shared<Impl>(std::move(executor), std::move(options))) {}

Journal::~Journal() {
    impl_->flush();
    impl_->worker->post([impl = impl_.get()] {
        if (impl->file) impl->file->end();
        impl->file.reset();
    });
    impl_->worker->stop();
}

asio::any_io_executor Journal::get_executor() noexcept { return impl_->executor; }
void Journal::connect(Backend& inner) {
    impl_->inner = &inner;
    impl_->inner_is_here = inner.get_executor() == impl_->executor;
}
void Journal::suite_asked() { impl_->suite_asked(); }
void Journal::rewind() {
    impl_->settle();
    impl_->index.rewind();
    impl_->fresh = false;
}
bool Journal::resumed() const { return impl_->resumed; }
bool Journal::failed() const { return bool(impl_->broken); }
void Journal::open(OpenHandler handler) { impl_->open(std::move(handler)); }
void Journal::begin(JournalRun run, OpenHandler handler) {
    impl_->begin(std::move(run), std::move(handler));
}
void Journal::known(JournalRun run, KnownHandler handler) {
    impl_->find_known(std::move(run), std::move(handler));
}
void Journal::close(OpenHandler handler) { impl_->close(std::move(handler)); }

bool Journal::holds(const std::vector<const Request*>& requests) const {
    impl_->settle();
    if (impl_->index.size() < requests.size()) return false;
    detail::JournalCounts counts;
    for (const auto* request : requests) {
        const auto key =
            detail::journal_key(impl_->identity, request->endpoint, impl_->sent(*request));
        const auto place = impl_->index.place(key, request->name);
        if (impl_->index.decide(place, counts.next(place)).outcome == 0) return false;
    }
    return true;
}

void Journal::start_complete(Request request, TextSink on_text, Handler handler) {
    impl_->submit(std::move(request), std::move(on_text), std::move(handler));
}

std::string model_files(const std::string& model) {
    namespace fs = std::filesystem;
    std::error_code ec;
    if (model.empty() || !fs::exists(model, ec)) return {};
    std::vector<std::string> files;
    const auto add = [&](const fs::path& path) {
        const auto size = fs::file_size(path, ec);
        const auto time = fs::last_write_time(path, ec).time_since_epoch().count();
        files.push_back(
            fmt::format("{} {} {}\n", fs::relative(path, model, ec).string(), size, time));
    };
    if (fs::is_directory(model, ec)) {
        constexpr std::size_t enough = 10000;
        for (auto it =
                 fs::recursive_directory_iterator(model,
                                                  fs::directory_options::follow_directory_symlink |
                                                      fs::directory_options::skip_permission_denied,
                                                  ec);
             !ec && it != fs::recursive_directory_iterator() && files.size() < enough;
             it.increment(ec)) {
            if (it->path().filename().string().starts_with('.')) continue; // the desktop's
            if (it->is_regular_file(ec)) add(it->path());
        }
    } else {
        add(model);
    }
    std::sort(files.begin(), files.end());
    std::string all;
    for (const auto& it : files) all += it;
    const auto key = detail::journal_key("model", "", all);
    return fmt::format("{:016x}{:016x}", key.high, key.low);
}

} // namespace evalrt
