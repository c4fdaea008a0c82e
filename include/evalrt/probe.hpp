// Probe: what a server's prefix cache and its batching do, measured by a few short requests.
#ifndef EVALRT_PROBE_HPP
#define EVALRT_PROBE_HPP

#include "evalrt/http_backend.hpp"

namespace evalrt {

/// What was seen. Nothing: it could not be told.
struct ProbeResult {
    unsigned requests = 0; ///< that were sent, 12 at most
    std::optional<bool> reports_cached;
    bool inferred = false;                    ///< what is cached was told by time to first token
    std::optional<Release> release;           ///< when a prompt's prefix shows to others
    std::chrono::milliseconds commit_delay{}; ///< with Release::done
    std::optional<unsigned> page;             ///< tokens that are cached together, at most
    std::optional<unsigned> page_least;       ///< the same, at least
    std::optional<double> batching; ///< tokens a second of three at once, over those of one
    std::vector<std::string> notes; ///< in words, a line each
};

/// The row, with what was measured in place of what it claims. `notes`: what is different.
BackendRow corrected(BackendRow row, const ProbeResult& result, std::vector<std::string>& notes);

/// What a result is kept for.
std::string probe_key(std::string_view url, std::string_view profile, std::string_view version);

/// Results kept in a folder, one file a server: nothing if there is none, or it cannot be read.
std::optional<ProbeResult> stored_probe(const std::string& folder, std::string_view key);

/// False: it could not be written.
bool store_probe(const std::string& folder, std::string_view key, const ProbeResult& result);

namespace detail {
void start_probe(asio::any_io_executor executor, BackendRow row, HttpOptions options,
                 asio::any_completion_handler<void(error_code, ProbeResult)> handler);
}

/// Asks the server at options.url 12 times at most, some 12,000 prompt and 120 output tokens in
/// all. It should have nothing else to do meanwhile.
///
/// Completes  when all has been asked, or the first request has failed.
/// Errors     of that request; invalid_argument for a URL, key or file that cannot be used.
/// Cancel     any type.
template <asio::completion_token_for<void(error_code, ProbeResult)> Token = asio::deferred_t>
auto async_probe(asio::any_io_executor executor, BackendRow row, HttpOptions options,
                 Token&& token = Token()) {
    return asio::async_initiate<Token, void(error_code, ProbeResult)>(
        [](asio::any_completion_handler<void(error_code, ProbeResult)> handler,
           asio::any_io_executor on, BackendRow of, HttpOptions with) {
            detail::start_probe(std::move(on), std::move(of), std::move(with), std::move(handler));
        },
        token, std::move(executor), std::move(row), std::move(options));
}

} // namespace evalrt

#endif
