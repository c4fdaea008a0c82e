// evalrt merge: the shards of one run become what the whole run would have left.
#ifndef EVALRT_PROGRAM_MERGE_HPP
#define EVALRT_PROGRAM_MERGE_HPP

#include <string>
#include <string_view>
#include <vector>

namespace evalrt::program {

/// Journals become a journal, outputs of run an output, result files of bfcl a result file.
/// `suite`: the batch file, if it is known: what is missing is told from it. `out`: a new file; or,
/// but for journals, - for standard output, or a pipe or device, which is written to. Returns the
/// exit code: 0 if all is there and answered, 1 if not, 2 for files that do not fit together or an
/// `out` that is there already, 4 if the result cannot be written. Then nothing is written.
int merge(const std::string& out, const std::vector<std::string>& shards, const std::string& suite);

/// What lies beside one of these journals while it is in use, and after a kill: a pattern takes it
/// in.
bool belongs_to_another(std::string_view path, const std::vector<std::string>& all);

/// A process has locked a journal that it has not made yet: a pattern takes the lock in.
bool is_lock_alone(std::string_view path);

} // namespace evalrt::program

#endif
