// evalrt merge: the shards of one run become what the whole run would have left.
#ifndef EVALRT_PROGRAM_MERGE_HPP
#define EVALRT_PROGRAM_MERGE_HPP

#include <string>
#include <vector>

namespace evalrt::program {

/// Journals become a journal, outputs of run an output, result files of bfcl a result file.
/// `suite`: the batch file, if it is known: what is missing is told from it. Returns the exit code:
/// 0 if all is there and answered, 1 if not, 2 for files that do not fit together, 4 if the result
/// cannot be written. Then nothing is written.
int merge(const std::string& out, const std::vector<std::string>& shards, const std::string& suite);

} // namespace evalrt::program

#endif
