#include "fake_server.hpp"

#include "patience.hpp"

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ip/v6_only.hpp>
#include <boost/asio/ssl.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace evalrt::tests {
namespace {

namespace asio = boost::asio;
using Tcp = asio::ip::tcp;
using boost::system::error_code;

constexpr auto token = asio::as_tuple(asio::use_awaitable);

bool same(std::string_view a, std::string_view b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](char x, char y) {
        return std::tolower(static_cast<unsigned char>(x)) ==
               std::tolower(static_cast<unsigned char>(y));
    });
}

template <class Write>
std::string pem(Write write) {
    const std::unique_ptr<BIO, decltype(&BIO_free_all)> bio(BIO_new(BIO_s_mem()), BIO_free_all);
    write(bio.get());
    char* data = nullptr;
    const auto size = BIO_get_mem_data(bio.get(), &data);
    return {data, std::size_t(size)};
}

} // namespace

Certificate make_certificate(const std::string& names, std::chrono::hours valid) {
    const std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)> key(EVP_EC_gen("P-256"),
                                                                  EVP_PKEY_free);
    const std::unique_ptr<X509, decltype(&X509_free)> x509(X509_new(), X509_free);
    const long seconds = long(std::chrono::seconds(valid).count());
    X509_set_version(x509.get(), 2);
    ASN1_INTEGER_set(X509_get_serialNumber(x509.get()), 1);
    X509_gmtime_adj(X509_getm_notBefore(x509.get()), std::min(seconds, 0L) - 86400);
    X509_gmtime_adj(X509_getm_notAfter(x509.get()), seconds);
    X509_set_pubkey(x509.get(), key.get());
    auto* const name = X509_get_subject_name(x509.get());
    X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC,
                               reinterpret_cast<const unsigned char*>("evalrt test"), -1, -1, 0);
    X509_set_issuer_name(x509.get(), name);
    auto* const extension =
        X509V3_EXT_conf_nid(nullptr, nullptr, NID_subject_alt_name, names.c_str());
    X509_add_ext(x509.get(), extension, -1);
    X509_EXTENSION_free(extension);
    if (X509_sign(x509.get(), key.get(), EVP_sha256()) == 0)
        throw std::runtime_error("no certificate for " + names);
    return {pem([&](BIO* bio) { PEM_write_bio_X509(bio, x509.get()); }), pem([&](BIO* bio) {
                PEM_write_bio_PrivateKey(bio, key.get(), nullptr, nullptr, 0, nullptr, nullptr);
            })};
}

std::optional<std::string> Received::field(std::string_view name) const {
    std::string_view rest = head;
    while (!rest.empty()) {
        const auto line = rest.substr(0, rest.find("\r\n"));
        rest.remove_prefix(std::min(rest.size(), line.size() + 2));
        const auto colon = line.find(':');
        if (colon == line.npos || !same(line.substr(0, colon), name)) continue;
        const auto begin = line.find_first_not_of(' ', colon + 1);
        return begin == line.npos ? std::string() : std::string(line.substr(begin));
    }
    return {};
}

struct FakeServer::Impl {
    Impl(std::vector<Script> scripts_, Options options_)
        : scripts(std::move(scripts_)), options(std::move(options_)), acceptor(io), changed(io) {
        changed.expires_at(std::chrono::steady_clock::time_point::max());
        const Tcp::endpoint endpoint(asio::ip::make_address(options.address), 0);
        acceptor.open(endpoint.protocol());
        if (endpoint.protocol() == Tcp::v6()) acceptor.set_option(asio::ip::v6_only(true));
        acceptor.set_option(Tcp::acceptor::reuse_address(true));
        acceptor.bind(endpoint);
        acceptor.listen(options.backlog);
        if (options.tls) {
            tls.emplace(asio::ssl::context::tls_server);
            tls->use_certificate_chain(asio::buffer(options.tls->certificate));
            tls->use_private_key(asio::buffer(options.tls->key), asio::ssl::context::pem);
        }
        if (options.accept)
            asio::co_spawn(io, accept(), asio::detached);
        else
            fill_backlog();
        thread = std::thread([this] {
            const auto work = asio::make_work_guard(io);
            io.run();
        });
    }

    ~Impl() {
        io.stop();
        thread.join();
    }

    // Connections that nobody takes, until one more does not even come to stand.
    void fill_backlog() {
        for (bool stands = true; stands;) {
            stands = false;
            auto& socket = blockers.emplace_back(io);
            socket.async_connect(acceptor.local_endpoint(),
                                 [&stands](error_code ec) { stands = !ec; });
            io.restart();
            io.run_for(std::chrono::milliseconds(500));
            io.restart();
            io.poll(); // what a busy machine has not got to
        }
    }

    asio::awaitable<void> accept() {
        for (;;) {
            auto [ec, socket] = co_await acceptor.async_accept(token);
            if (ec) co_return;
            unsigned number;
            {
                const std::lock_guard lock(mutex);
                number = accepted++;
                ++open;
                if (number >= scripts.size() && !options.repeat)
                    faults += "connection " + std::to_string(number) + " has no script; ";
            }
            if (number < scripts.size() || options.repeat)
                asio::co_spawn(io, serve(std::move(socket), number), asio::detached);
            else
                closed();
            if (options.accept_pause.count() > 0) {
                asio::steady_timer timer(io, options.accept_pause);
                co_await timer.async_wait(token);
            }
        }
    }

    void closed() {
        const std::lock_guard lock(mutex);
        --open;
        all_closed.notify_all();
    }

    asio::awaitable<void> serve(Tcp::socket socket, unsigned number) {
        const Script& script = scripts[std::min<std::size_t>(number, scripts.size() - 1)];
        error_code ignored;
        socket.set_option(Tcp::no_delay(true), ignored);
        std::size_t played = 0;
        if (tls) {
            asio::ssl::stream<Tcp::socket&> stream(socket, *tls);
            auto [ec] = co_await stream.async_handshake(asio::ssl::stream_base::server, token);
            if (!ec) played = co_await play(stream, socket, script, number);
            if (played == script.size() && script.back().kind != Step::Kind::cut)
                co_await stream.async_shutdown(token);
        } else {
            played = co_await play(socket, socket, script, number);
        }
        if (played < script.size()) {
            const std::lock_guard lock(mutex);
            faults += "connection " + std::to_string(number) + " ended at step " +
                      std::to_string(played) + " of " + std::to_string(script.size()) + "; ";
        }
        socket.close(ignored);
        closed();
    }

    // How many steps were played.
    template <class Stream>
    asio::awaitable<std::size_t> play(Stream& stream, Tcp::socket& socket, const Script& script,
                                      unsigned number) {
        std::string in;
        bool first = true;
        for (std::size_t i = 0; i < script.size(); ++i) {
            const Step& step = script[i];
            bool good = true;
            error_code ignored;
            switch (step.kind) {
            case Step::Kind::expect: {
                good = co_await request(stream, in, number);
                // A connection that is kept may end between two requests.
                if (!good && !first && i == 0 && in.empty()) co_return script.size();
                break;
            }
            case Step::Kind::reply: good = co_await write(stream, step); break;
            case Step::Kind::pause: {
                asio::steady_timer timer(io, step.time);
                co_await timer.async_wait(token);
                break;
            }
            case Step::Kind::gate:
                while (tickets == 0) co_await changed.async_wait(token);
                --tickets;
                break;
            case Step::Kind::barrier:
                ++arrived;
                changed.cancel();
                while (arrived < step.count) co_await changed.async_wait(token);
                break;
            case Step::Kind::hang: {
                char bytes[4096];
                for (error_code ec; !ec;)
                    std::tie(ec, std::ignore) =
                        co_await stream.async_read_some(asio::buffer(bytes), token);
                break;
            }
            case Step::Kind::half_close:
                socket.shutdown(Tcp::socket::shutdown_send, ignored);
                break;
            case Step::Kind::reset:
                socket.set_option(asio::socket_base::linger(true, 0), ignored);
                socket.close(ignored);
                break;
            case Step::Kind::cut: break;
            case Step::Kind::again:
                first = false;
                i = std::size_t(-1); // the loop makes it 0
                break;
            case Step::Kind::over: i -= step.count + 1; break;
            }
            if (!good) co_return i;
        }
        co_return script.size();
    }

    template <class Stream>
    asio::awaitable<bool> request(Stream& stream, std::string& in, unsigned number) {
        std::size_t head = 0, body = 0;
        for (;;) {
            if (head == 0)
                if (const auto end = in.find("\r\n\r\n"); end != in.npos) {
                    head = end + 4;
                    const Received parsed{in.substr(0, head), {}};
                    body = std::size_t(std::stoul(parsed.field("content-length").value_or("0")));
                }
            if (head > 0 && in.size() >= head + body) break;
            char bytes[16384];
            auto [ec, n] = co_await stream.async_read_some(asio::buffer(bytes), token);
            if (ec) co_return false;
            in.append(bytes, n);
        }
        std::string name;
        if constexpr (!std::is_same_v<Stream, Tcp::socket>)
            if (const char* const it =
                    SSL_get_servername(stream.native_handle(), TLSEXT_NAMETYPE_host_name))
                name = it;
        const std::lock_guard lock(mutex);
        requests.push_back({in.substr(0, head), in.substr(head, body), number, name});
        in.erase(0, head + body);
        co_return true;
    }

    template <class Stream>
    asio::awaitable<bool> write(Stream& stream, const Step& step) {
        std::string_view rest = step.bytes;
        while (!rest.empty()) {
            const auto piece = rest.substr(0, step.piece ? step.piece : rest.npos);
            rest.remove_prefix(piece.size());
            auto [ec, n] =
                co_await asio::async_write(stream, asio::buffer(piece.data(), piece.size()), token);
            if (ec) co_return false;
            if (rest.empty() || step.time.count() == 0) continue;
            asio::steady_timer timer(io, step.time);
            co_await timer.async_wait(token);
        }
        co_return true;
    }

    const std::vector<Script> scripts;
    const Options options;
    asio::io_context io;
    Tcp::acceptor acceptor;
    std::optional<asio::ssl::context> tls;
    asio::steady_timer changed; // cancelled when a gate or a barrier may have opened
    unsigned tickets = 0, arrived = 0;
    std::vector<Tcp::socket> blockers;

    mutable std::mutex mutex; // for what follows
    mutable std::condition_variable all_closed;
    unsigned accepted = 0, open = 0;
    std::vector<Received> requests;
    std::string faults;

    std::thread thread;
};

FakeServer::FakeServer(std::vector<Script> scripts, Options options)
    : impl_(std::make_unique<Impl>(std::move(scripts), std::move(options))) {}

FakeServer::~FakeServer() = default;

unsigned short FakeServer::port() const { return impl_->acceptor.local_endpoint().port(); }

std::string FakeServer::url(std::string_view base) const {
    const bool v6 = impl_->options.address.find(':') != std::string::npos;
    return (impl_->options.tls ? "https://" : "http://") +
           (v6 ? "[" + impl_->options.address + "]" : impl_->options.address) + ":" +
           std::to_string(port()) + std::string(base);
}

void FakeServer::go(unsigned times) {
    asio::post(impl_->io, [impl = impl_.get(), times] {
        impl->tickets += times;
        impl->changed.cancel();
    });
}

unsigned FakeServer::connections() const {
    const std::lock_guard lock(impl_->mutex);
    return impl_->accepted;
}

std::vector<Received> FakeServer::requests() const {
    const std::lock_guard lock(impl_->mutex);
    return impl_->requests;
}

bool FakeServer::quiet() const {
    std::unique_lock lock(impl_->mutex);
    return impl_->all_closed.wait_for(lock, patience, [&] { return impl_->open == 0; });
}

std::string FakeServer::unused() const {
    const bool is_quiet = quiet();
    const std::lock_guard lock(impl_->mutex);
    std::string out = impl_->faults;
    if (!is_quiet) out += std::to_string(impl_->open) + " connections are open; ";
    if (impl_->accepted < impl_->scripts.size())
        out += "only " + std::to_string(impl_->accepted) + " connections came; ";
    return out;
}

} // namespace evalrt::tests
