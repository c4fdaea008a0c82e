// Catch2 version 3 or 2, whichever is installed.
#ifndef EVALRT_TESTS_CATCH_HPP
#define EVALRT_TESTS_CATCH_HPP

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#endif
