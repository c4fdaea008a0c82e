// The command of `evalrt gateway -- CMD`: it has our terminal, our signals, and an environment that
// leads it to the gateway.
#ifndef EVALRT_PROGRAM_CHILD_HPP
#define EVALRT_PROGRAM_CHILD_HPP

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/signal_set.hpp>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <sys/types.h>

namespace evalrt::program {

/// What a harness is told of the gateway.
struct GatewayAddress {
    std::string url; ///< without /v1
    std::string host;
    std::uint16_t port = 0;
    std::string token;     ///< empty: none
    std::string tokenizer; ///< folder of the model's; empty: not known
};

/// An environment that leads the harnesses we know to the gateway. Keys that are set stay, unless
/// there is a token, which clients then must send.
std::vector<std::string> harness_environment(std::vector<std::string> environment,
                                             const GatewayAddress& address);

std::vector<std::string> own_environment();

/// The signals by which we are told to stop, but for a SIGHUP that is ignored, as under nohup.
std::vector<int> stop_signals();

struct Confinement;

class Child {
public:
    /// To be made before this program opens anything: what is open then, the child gets too.
    explicit Child(const boost::asio::any_io_executor& executor);

    /// Empty: there is no such program.
    static std::string find(const std::string& name);

    /// Empty: it runs. Else what is wrong. In a terminal it is in our process group, so that it can
    /// read there and Ctrl-C, Ctrl-Z and fg reach it; elsewhere it leads one of its own.
    /// With a `place` it has no terminal, no open file and no signal of ours; stop(), or its own
    /// end, kills all that it has started (but on Linux only its process group).
    std::string start(const std::string& program, const std::vector<std::string>& arguments,
                      const std::vector<std::string>& environment,
                      const Confinement* place = nullptr);

    /// Its exit code, 128 and the signal's number if one has ended it. Until then the first of
    /// stop_signals() that we get goes on to it; one more within ten seconds is SIGTERM, a third
    /// one SIGKILL. What it leaves in its group gets SIGTERM, and SIGKILL two seconds later.
    boost::asio::awaitable<int> wait();

    /// To its group, if it leads one.
    void signal(int number);

    /// Kills it.
    void stop();

    /// A signal that we got went on to it.
    bool was_told_to_stop() const { return in_a_row_ > 0; }

private:
    void pass_on(int number);

    std::vector<bool> inherited_; // file descriptors
    boost::asio::signal_set signals_;
    pid_t pid_ = -1;
    bool confined_ = false, leads_ = false; // a process group
    unsigned in_a_row_ = 0;                 // signals that we got
    std::chrono::steady_clock::time_point last_signal_;
};

} // namespace evalrt::program

#endif
