// evalrt gateway: the runtime behind an address, for harnesses that speak HTTP.
#ifndef EVALRT_PROGRAM_GATEWAY_HPP
#define EVALRT_PROGRAM_GATEWAY_HPP

#include "suite.hpp"

#include <string>
#include <vector>

namespace evalrt::program {

struct GatewayCommand {
    std::string listen = "127.0.0.1"; ///< HOST:PORT, HOST or PORT
    std::string token_file;
    unsigned rehearsals = 0;        ///< before the child runs for real
    std::vector<std::string> child; ///< program and arguments; empty: none
};

/// Serves until the child has ended, whose exit code it returns, or until it is told to stop.
int run_gateway(const GatewayCommand& command, const Common& common);

} // namespace evalrt::program

#endif
