# Installs evalrt into a folder of its own and builds and runs the consumer in both ways.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code)
  if(code)
    message(FATAL_ERROR "failed (${code}): ${ARGN}")
  endif()
endfunction()

set(here ${SOURCE}/tests/consumer)
set(work ${BUILD}/consumer)
file(REMOVE_RECURSE ${work})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${work}/prefix)
set(common -G ${GENERATOR} -D CMAKE_CXX_COMPILER=${COMPILER} -D CMAKE_BUILD_TYPE=${CONFIG})

run(${CMAKE_COMMAND} -S ${here} -B ${work}/installed ${common} -D CMAKE_PREFIX_PATH=${work}/prefix)
run(${CMAKE_COMMAND} --build ${work}/installed)
run(${work}/installed/consumer)

run(${CMAKE_COMMAND} -S ${here} -B ${work}/beside ${common} -D EVALRT_SOURCE=${SOURCE})
run(${CMAKE_COMMAND} --build ${work}/beside)
run(${work}/beside/consumer)

run(${work}/prefix/bin/evalrt --version)
