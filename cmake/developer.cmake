# What developers get and users do not: warnings, sanitizers, and the helper that declares a test.

set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/lib")

option(EVALRT_WERROR "Warnings are errors" OFF)
set(EVALRT_SANITIZE "" CACHE STRING "Sanitizers for every target, as in -fsanitize=")

add_library(evalrt_warnings INTERFACE)
target_compile_options(evalrt_warnings INTERFACE
  -Wall -Wextra -Wpedantic -Wshadow $<$<COMPILE_LANGUAGE:CXX>:-Woverloaded-virtual>
  -Wno-missing-field-initializers # designated initializers leave out what is default
  $<$<CXX_COMPILER_ID:GNU>:-Wno-tsan>) # Asio has fences, which GCC's TSan does not model
if(EVALRT_WERROR)
  target_compile_options(evalrt_warnings INTERFACE -Werror)
endif()

if(EVALRT_SANITIZE)
  add_compile_options(-fsanitize=${EVALRT_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${EVALRT_SANITIZE})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    # Clang 14 cannot assemble coroutines with the function type check.
    add_compile_options(-fno-sanitize=function)
  endif()
endif()

# evalrt_test(NAME SOURCES file... LABEL label [LIBRARIES target...])
function(evalrt_test name)
  cmake_parse_arguments(arg "" "LABEL" "SOURCES;LIBRARIES" ${ARGN})
  add_executable(test_${name} ${arg_SOURCES})
  target_include_directories(test_${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests ${PROJECT_SOURCE_DIR}/lib)
  target_link_libraries(test_${name} PRIVATE evalrt::evalrt evalrt_warnings Catch2::Catch2WithMain
    ${arg_LIBRARIES})
  add_test(NAME ${name} COMMAND test_${name} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}/tests)
  set_tests_properties(${name} PROPERTIES LABELS ${arg_LABEL} TIMEOUT 3600)
endfunction()
