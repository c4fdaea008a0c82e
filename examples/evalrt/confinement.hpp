// What keeps a rehearsed command from leaving anything behind.
#ifndef EVALRT_PROGRAM_CONFINEMENT_HPP
#define EVALRT_PROGRAM_CONFINEMENT_HPP

#include <string>
#include <string_view>
#include <vector>

#include <sys/types.h>

namespace evalrt::program {

struct Confinement {
    std::string folder; ///< it runs there
    std::string root;   ///< it may write below this only (on Linux from 5.13), and to some devices
    std::string errors; ///< file for what it says; its output goes nowhere, its input is empty
    bool own_memory = false; ///< it has a /dev/shm and message queues of its own (on Linux)
};

/// The system keeps a confined command from writing elsewhere.
bool can_confine();

/// Why a command with this root can have no memory of its own. Empty: it can.
std::string why_no_own_memory(const std::string& root);

/// Made before the fork, for what needs memory. After it, only what a signal handler may do.
class Walls {
public:
    explicit Walls(const Confinement& place);
    Walls(const Walls&) = delete;
    ~Walls();

    /// Empty: they stand. Else what is wrong.
    const std::string& error() const { return error_; }

    /// In the child: goes there, and cannot leave. False: errno says why.
    bool enter() const;

    /// In the child: its own child, whatever that starts, and whatever outlives it, ends with it,
    /// or when this process gets SIGTERM. All signals have to be blocked. Returns in the grandchild
    /// only, which begins a session; -1: it cannot fork. `open`: closed here. Where the system has
    /// no way to find what outlives its parent, it returns at once, in the child.
    static int mind(int open);

private:
    struct Shown { // what is in /dev/shm already, read-only
        std::string name, target;
        bool folder = false;
    };

    const Confinement& place_;
    std::string error_, user_, group_;
    std::vector<Shown> shown_;
    int nothing_ = -1, errors_ = -1, rules_ = -1;
};

} // namespace evalrt::program

#endif
