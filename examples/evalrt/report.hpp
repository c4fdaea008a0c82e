// evalrt report: what runs came to, from their journals or run summaries.
#ifndef EVALRT_PROGRAM_REPORT_HPP
#define EVALRT_PROGRAM_REPORT_HPP

#include <string>
#include <vector>

namespace evalrt::program {

/// Prints to stdout: text, or JSON (an object, of several runs an array). Returns the exit code:
/// 0 if all items of all runs are answered, 1 if not, 2 for a file that is neither, 4 for a
/// journal that is damaged.
int report(const std::vector<std::string>& paths, bool as_json);

} // namespace evalrt::program

#endif
