# Run when Cargo has built the library BUILT: copies it to LIBRARY without debug information, which is four fifths of it,
# and that to LIBRARY.debug, where debuggers find it by the library's .gnu_debuglink while both lie in one folder.
#
# LIBRARY is left alone while BUILT is the same, so that nothing is linked again, and is replaced by a rename, because a
# program that runs may have it mapped. OBJCOPY may be empty; then the library stays as it is. MACHINE is what BUILT's ELF
# header must say, in hexadecimal: a library of another machine would be noticed only when it is loaded there.
cmake_minimum_required(VERSION 3.22)

file(READ "${BUILT}" machine OFFSET 18 LIMIT 2 HEX)
if(NOT machine STREQUAL MACHINE)
  message(FATAL_ERROR "${BUILT} is built for another machine than CMAKE_SYSTEM_PROCESSOR says (ELF ${machine}, not ${MACHINE})")
endif()
file(SHA256 "${BUILT}" checksum)
set(stamp "${LIBRARY}.sha256")
if(EXISTS "${stamp}" AND EXISTS "${LIBRARY}")
  file(READ "${stamp}" known)
  if(known STREQUAL checksum)
    return()
  endif()
endif()

# run(COMMAND...): ends the build if the command fails.
function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE code ERROR_VARIABLE errors)
  if(code)
    list(JOIN ARGV " " command)
    message(FATAL_ERROR "${command}: ${errors}")
  endif()
endfunction()

file(REMOVE "${stamp}")
if(OBJCOPY)
  run("${OBJCOPY}" --only-keep-debug "${BUILT}" "${LIBRARY}.debug")
  run("${OBJCOPY}" --strip-unneeded --add-gnu-debuglink=${LIBRARY}.debug "${BUILT}" "${LIBRARY}.partial")
else()
  message(STATUS "There is no objcopy: ${LIBRARY} keeps its debug information")
  file(COPY_FILE "${BUILT}" "${LIBRARY}.partial")
  file(WRITE "${LIBRARY}.debug" "")
endif()
file(RENAME "${LIBRARY}.partial" "${LIBRARY}")
file(WRITE "${stamp}" "${checksum}")
