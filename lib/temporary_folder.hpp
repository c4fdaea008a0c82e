// temporary_folder: a new folder that only we can read.
#ifndef EVALRT_LIB_TEMPORARY_FOLDER_HPP
#define EVALRT_LIB_TEMPORARY_FOLDER_HPP

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

#include <unistd.h>

namespace evalrt::detail {

/// NAME-XXXXXX in TMPDIR, or in /tmp if that is not set, or empty. Empty: why is in `ec`.
inline std::string temporary_folder(const char* name, std::error_code& ec) {
    const char* set = std::getenv("TMPDIR");
    const std::filesystem::path parent = set && *set ? set : "/tmp";
    auto path = (parent / name).string() + "-XXXXXX";
    ec.clear();
    if (::mkdtemp(path.data())) return path;
    ec.assign(errno, std::generic_category());
    return {};
}

} // namespace evalrt::detail

#endif
