// What keeps a test from failing because the machine is slow.
#ifndef EVALRT_TESTS_PATIENCE_HPP
#define EVALRT_TESTS_PATIENCE_HPP

#include <chrono>

namespace evalrt::tests {

/// How long is waited for what has to come; and what is over earlier has waited for no time limit
/// that is longer.
constexpr std::chrono::seconds patience{300};

/// A test of a time limit wants a short one, in which a busy machine may not get done what must
/// come before. attempt(1) is made with it; while one says false, the next is made with limits that
/// are longer by the factor that it is given. False: not in the longest ones either.
template <class Attempt>
bool with_longer_limits(Attempt attempt) {
    for (const int times : {1, 5, 25, 100})
        if (attempt(times)) return true;
    return false;
}

} // namespace evalrt::tests

#endif
