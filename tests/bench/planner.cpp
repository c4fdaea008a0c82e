// What planning costs: add, next and progressed of every request, beside one pass over the bytes.
//   groups COUNT BYTES SHARED   COUNT prompts of BYTES bytes, in groups of 16 that share SHARED
//   file PATH                   one prompt a line
// One JSON line: nanoseconds a byte of planning, of reading (memchr) and of copying (memcpy), and
// of having from the system as much memory as the planner takes; seconds in all; and memory of the
// planner by the bytes given.
#include "evalrt/prefix_planner.hpp"

#include <fmt/format.h>

#include <cstdlib>
#include <fstream>
#include <random>

#include <sys/mman.h>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

using namespace evalrt;

namespace {

std::size_t allocated() {
#if defined(__GLIBC__)
    const auto info = ::mallinfo2();
    return info.uordblks + info.hblkhd;
#else
    return 0;
#endif
}

std::string noise(std::size_t bytes, std::minstd_rand& random) {
    std::string text(bytes, ' ');
    for (auto& c : text) c = char('a' + random() / 7 % 26);
    return text;
}

// All pages written to once.
double seconds_to_have(std::size_t bytes) {
    const auto begin = Clock::now();
    void* const memory =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    if (memory == MAP_FAILED) return 0;
    for (std::size_t i = 0; i < bytes; i += 4096) static_cast<volatile char*>(memory)[i] = 1;
    const std::chrono::duration<double> took = Clock::now() - begin;
    ::munmap(memory, bytes);
    return took.count();
}

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

} // namespace

int main(int argc, char** argv) {
    std::vector<std::string> prompts;
    const std::string_view kind = argc > 1 ? argv[1] : "";
    std::minstd_rand random(1);
    if (kind == "groups" && argc == 5) {
        const auto count = std::strtoul(argv[2], nullptr, 10);
        const auto bytes = std::strtoul(argv[3], nullptr, 10);
        const auto shared = std::min(bytes, std::strtoul(argv[4], nullptr, 10));
        const auto tail = noise(bytes, random);
        std::vector<std::string> heads;
        for (std::size_t i = 0; i < std::max<std::size_t>(count / 16, 1); ++i)
            heads.push_back(noise(shared, random));
        for (std::size_t i = 0; i < count; ++i)
            prompts.push_back(heads[i % heads.size()] + std::to_string(i) +
                              tail.substr(0, bytes - shared));
    } else if (kind == "file" && argc == 3) {
        std::ifstream file(argv[2]);
        for (std::string line; std::getline(file, line);) prompts.push_back(line);
    } else {
        fmt::print(stderr, "usage: bench_planner groups COUNT BYTES SHARED | file PATH\n");
        return 2;
    }
    std::size_t bytes = 0;
    for (auto& it : prompts) {
        it.shrink_to_fit(); // as bodies that were read, without what a string keeps to grow
        bytes += it.size();
    }

    std::string copy(1 << 20, ' ');
    auto begin = Clock::now();
    int differ = 0;
    for (const auto& it : prompts)
        std::memcpy(copy.data(), it.data(), std::min(it.size(), copy.size()));
    const auto copied = seconds_since(begin);
    begin = Clock::now();
    for (const auto& it : prompts)
        differ += std::memcmp(copy.data(), it.data(), 0) +
                  (std::memchr(it.data(), 1, it.size()) != nullptr);
    const auto read = seconds_since(begin);

    const auto before = allocated();
    begin = Clock::now();
    RadixPlanner planner;
    Prompt prompt{"/v1/chat/completions", {{}}, 100};
    RequestId id = 0;
    for (const auto& it : prompts) {
        prompt.segments[0] = it;
        planner.add(++id, prompt);
    }
    const auto added = seconds_since(begin);
    const auto memory = allocated() - before;
    std::size_t picked = 0, maximum = 0;
    while (const auto pick = planner.next(begin)) {
        ++picked;
        maximum += *pick->maximum_bytes;
        planner.progressed(pick->id, PrefixPlanner::Stage::first_text, begin);
        planner.progressed(pick->id, PrefixPlanner::Stage::done, begin);
    }
    const auto planned = seconds_since(begin);
    const auto after = allocated() - before;
    const auto had = seconds_to_have(std::max<std::size_t>(memory, 1));
    const auto each = [&](double seconds) { return 1e9 * seconds / double(bytes); };
    fmt::print("{{\"benchmark\": \"planner\", \"suite\": \"{}\", \"requests\": {}, \"bytes\": {}, "
               "\"seconds\": {:.4f}, \"add_seconds\": {:.4f}, \"ns_per_byte\": {:.4f}, "
               "\"read_ns_per_byte\": {:.4f}, \"copy_ns_per_byte\": {:.4f}, "
               "\"memory_ns_per_byte\": {:.4f}, "
               "\"by_read\": {:.2f}, \"by_bound\": {:.2f}, "
               "\"ns_per_request\": {:.0f}, \"memory_ratio\": {:.4f}, \"memory_left\": {}, "
               "\"shared\": {:.3f}}}\n",
               kind, picked, bytes, planned, added, each(planned), each(read), each(copied),
               each(had), planned / read, planned / (read + had), 1e9 * planned / double(picked),
               double(memory) / double(bytes), after, double(maximum) / double(bytes));
    return picked == prompts.size() && differ < 1000000 ? 0 : 1;
}
