// The batch file: the input format of the OpenAI Batch API, one request a line.
#ifndef EVALRT_PROGRAM_BATCH_HPP
#define EVALRT_PROGRAM_BATCH_HPP

#include "evalrt/request.hpp"

#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace evalrt::batch {

struct Item {
    std::string custom_id;
    Request request;
    std::string problem;    ///< not empty: the line is no request, and why
    std::size_t number = 0; ///< place among the items of the whole file, from 0
    /// What tells the request from others, as the file has it, before any member is set; 0: none.
    std::uint64_t hash = 0;
};

struct Input {
    std::vector<Item> items;
    std::string error; ///< not empty: the file cannot be used, and why; names the line
    std::size_t problems = 0;
    std::uint64_t bytes = 0; ///< of the file
};

/// Reads a file, or standard input for "-". The bodies stay where the file is mapped. A file with
/// a line that is no request is an error, unless `skip_invalid`.
Input read(const std::string& path, bool skip_invalid);

/// Memory that a mapped file's pages have taken goes back; they are read again when looked at.
void let_go();

/// Sets top-level members of every body; `value` is JSON text.
void override_member(Input& input, std::string_view key, const std::string& value);

/// Of each item the first one with the same endpoint and body, if it says "temperature": 0.
std::vector<std::optional<std::size_t>> repeats(const std::vector<Item>& items);

/// An item's hash as an output line has it; empty: it has none.
std::string hash_text(const Item& item);

/// One line of the output, without its end.
std::string output_line(const Item& item, const Response& response);

/// "-", or a name of the system's for it: what a shell has opened there is never replaced.
bool is_standard_output(std::string_view path);

/// The custom_id of an item in this output that is none of ours (by number); empty: there is none.
std::string other_item(const std::string& path, const std::vector<bool>& ours);

/// The output of a run: grows as OUT.part in the order of completion, and becomes OUT in the order
/// of the input once the run has ended.
class Output {
public:
    /// Empty path: standard output. The string says what is wrong. With `journalled` an OUT.part
    /// that an earlier session left is replaced with the first answer: its answers are in the
    /// journal, which has been opened by then.
    static std::string open(const std::string& path, std::size_t count, bool journalled,
                            std::unique_ptr<Output>& out);
    ~Output();

    /// False: it cannot be written.
    bool add(std::size_t index, std::string_view line);

    /// Writes the result in input order. With `whole` false the run was interrupted: what there is
    /// stays in OUT.part, so that nothing looks whole that is not.
    bool finish(bool whole);

    const std::string& part() const { return part_; }

    /// It has nothing in it: away with it.
    void drop();

private:
    Output() = default;
    std::string make(bool replace);
    std::string hold();
    std::string in_use(int fd) const; ///< closes it then
    bool copy_to(std::FILE* target);

    std::string path_, part_;
    bool replaces_ = true; // what is at path_
    std::FILE* file_ = nullptr;
    int held_ = -1; // what an earlier session has left in part_, until there is an answer
    struct Place {
        std::uint64_t offset = 0;
        std::uint32_t size = 0;
    };
    std::vector<Place> places_;
    std::uint64_t end_ = 0;
};

} // namespace evalrt::batch

#endif
