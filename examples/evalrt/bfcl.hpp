// The single-turn categories of BFCL: rows to request bodies, answers to result rows. What is sent
// and written is byte for byte what bfcl_eval's OpenAICompletionsHandler sends and writes, with the
// openai package 1 or 2 (version 3 puts "model" before "messages", and changes nothing else).
#ifndef EVALRT_EXAMPLES_BFCL_HPP
#define EVALRT_EXAMPLES_BFCL_HPP

#include "evalrt/request.hpp"

#include <boost/system/result.hpp>

#include <chrono>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace evalrt::bfcl {

template <class T>
using Result = boost::system::result<T, Failure>;

enum class Mode {
    prompt, ///< the functions stand in the system prompt, the answer is text
    fc,     ///< the functions are "tools", the answer has tool calls
};

struct Options {
    Mode mode = Mode::prompt;
    std::string model;
    std::optional<std::int64_t> max_tokens; ///< nothing: none is sent, as bfcl_eval does
    std::optional<double> temperature;      ///< nothing: bfcl_eval's 0.001
};

/// A line of a data file.
struct Item {
    std::string id;
    std::string row;
};

/// A line of a result file, without its end.
struct Row {
    std::string id;
    std::string text;
};

/// Category and group names ("live") to categories: sorted, each once, as bfcl_eval does it.
Result<std::vector<std::string>> categories(std::span<const std::string> names);

/// Where `python`'s bfcl_eval keeps its data. The package is looked up, not imported.
Result<std::filesystem::path> find_data(const std::string& python = "python3");

/// The rows of one category, in the file's order.
Result<std::vector<Item>> load(const std::filesystem::path& data, const std::string& category);

/// The body of POST /v1/chat/completions. It fails where bfcl_eval raises an exception.
Result<std::string> body(const Item& item, const Options& options);

/// The row of an answer. A failed response has none: left out of the file, the item is asked again
/// by the next run, ours or bfcl_eval's.
Result<Row> result_row(const Item& item, const Response& response,
                       std::chrono::duration<double> latency, Mode mode);

/// <result_dir>/<model>/<non_live or live>/BFCL_v4_<category>_result.json
std::filesystem::path result_path(const std::filesystem::path& result_dir, std::string model,
                                  const std::string& category);

/// The answers that a result file holds; none if there is no such file. Rows that bfcl_eval wrote
/// for its own errors, and a line that was cut off by the end of its process, are no answers; the
/// place of that goes to `cut`.
Result<std::vector<Row>> read_results(const std::filesystem::path& path,
                                      std::string* cut = nullptr);

/// The items that have no row.
std::vector<Item> unanswered(std::vector<Item> items, const std::vector<Row>& rows);

/// "live_simple_19-3-15": {"live_simple", 19}.
std::pair<std::string, std::size_t> place(const std::string& id);

/// Rows in bfcl_eval's order, a line each; of rows with one id the last counts.
std::string results_text(std::vector<Row> rows);

/// Replaces the file by these rows, in bfcl_eval's order; of rows with one id the last counts. A
/// reader finds the old file or the new one, never a part.
Failure write_results(const std::filesystem::path& path, std::vector<Row> rows);

} // namespace evalrt::bfcl

#endif
