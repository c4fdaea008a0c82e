// evalrt backends: the table of servers, and what one of them is.
#ifndef EVALRT_PROGRAM_BACKENDS_HPP
#define EVALRT_PROGRAM_BACKENDS_HPP

#include <string>

namespace evalrt::program {

struct BackendsOptions {
    std::string probe; ///< URL of a server; empty: print the table
    std::string api_key, ca_file;
    bool json = false;
    bool measure = false; ///< what its cache and its batching do; kept for later runs
};

/// Where that is kept: in the folder of EVALRT_CACHE, or the user's cache folder.
std::string probe_folder();

/// Prints to stdout, and returns the exit code.
int backends(const BackendsOptions& options);

} // namespace evalrt::program

#endif
