// A byte stream as the network may deliver it: whole, cut in two at every place, byte by byte.
#ifndef EVALRT_TESTS_EVERY_CUT_HPP
#define EVALRT_TESTS_EVERY_CUT_HPP

#include <string_view>
#include <vector>

namespace evalrt::test {

using Pieces = std::vector<std::string_view>;

/// Calls run(pieces) for each way; the first has the stream whole.
template <class F>
void every_cut(std::string_view bytes, F&& run) {
    run(Pieces{bytes});
    for (std::size_t i = 1; i < bytes.size(); ++i) run(Pieces{bytes.substr(0, i), bytes.substr(i)});
    Pieces single;
    for (std::size_t i = 0; i < bytes.size(); ++i) single.push_back(bytes.substr(i, 1));
    run(single);
}

} // namespace evalrt::test

#endif
