// Runs a list of requests through a Runtime, with progress, interruption and a summary.
#ifndef EVALRT_PROGRAM_SUITE_HPP
#define EVALRT_PROGRAM_SUITE_HPP

#include "evalrt/report.hpp"
#include "evalrt/runtime.hpp"

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>

#include <csignal>
#include <functional>
#include <string>
#include <vector>

namespace evalrt::program {

enum Exit {
    exit_answered = 0,
    exit_failed = 1,
    exit_usage = 2,
    exit_backend = 3,
    exit_unwritable = 4,
    exit_stopped = 5,
    exit_interrupted = 130,
};

/// What every command takes.
struct Common {
    RuntimeOptions runtime;
    unsigned parity = 0;    ///< answers to ask again one at a time
    std::uint64_t seed = 0; ///< of the parity sample and the jitter
    std::string json;       ///< file for the run summary
    std::string explain;    ///< file for why each request was sent when it was
    bool dedupe = false;    ///< equal requests at temperature 0 are asked once
    bool quiet = false;
};

struct Job {
    std::string id;
    Request request;
    std::string problem;                ///< not empty: it cannot be asked, and counts as failed
    std::optional<std::size_t> same_as; ///< an earlier job, whose answer is this one's, too
};

struct Suite {
    std::vector<Job> jobs;
    /// Called once for each job that has ended, in the order of completion. False: the result
    /// cannot be kept, and the run ends.
    std::function<bool(std::size_t index, const Response&)> on_result;
    /// Called at the end; `whole`: every job has ended by itself. False: cannot be written.
    std::function<bool(bool whole)> on_end;
    std::string kept_in;  ///< where the answers of an interrupted run are; a journal, if any
    bool resumes = false; ///< a second run asks only for what is missing there
};

/// Opens the runtime, runs all jobs, closes it, prints, and returns the exit code.
int run_suite(Suite suite, const Common& common);

/// Has every sent request explained in this file; empty: nowhere. False: it cannot be written,
/// which was said.
bool explain_to(const std::string& path, RuntimeOptions& options);

/// A line on stderr.
void say(std::string_view line);

/// Puts into a run's report what is known of the server at the end. Its notes, to be said.
std::vector<std::string> complete_report(Report& report, Runtime& runtime);

/// Makes a Program(io, args...) and runs its main() to the end; the exit code that it gives.
template <class Program, class... Args>
int run_to_end(Args&... args) {
    std::signal(SIGPIPE, SIG_IGN); // a reader of our output that leaves is an error like others
    asio::io_context io(1);
    int code = exit_backend;
    {
        Program program(io, args...);
        asio::co_spawn(io, program.main(), [&](std::exception_ptr error, int result) {
            code = result;
            if (error) {
                say("out of memory");
                code = exit_backend;
            }
            io.stop();
        });
        io.run();
    }
    return code;
}

} // namespace evalrt::program

#endif
