# One consumer of nvbackend, from nothing to a program that runs. Variables: tests/consumer/CMakeLists.txt.
#
# WAY find_package and pkg_config install into WORK/prefix and then move the whole tree to WORK/moved, because a package
# that only works where it was installed is broken.
cmake_minimum_required(VERSION 3.22)

# run(COMMAND...): ends the test if the command fails.
function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE code OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(code)
    list(JOIN ARGV " " command)
    message(FATAL_ERROR "${command}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

set(engine "${CMAKE_CURRENT_LIST_DIR}/engine")
set(configure ${CMAKE_COMMAND} -S ${engine} -B ${WORK}/build -G ${GENERATOR} -DCMAKE_BUILD_TYPE=Release
    -DCMAKE_C_COMPILER=${C_COMPILER} -DCMAKE_CXX_COMPILER=${CXX_COMPILER} -DWAY=${WAY})
file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})

if(WAY STREQUAL "add_subdirectory")
  run(${configure} -DNVBACKEND_SOURCE=${SOURCE} -DNVBACKEND_CUDA=${CUDA} -DNVBACKEND_CARGO_TARGET_DIR=${TARGET_DIR})
else()
  run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)
  file(RENAME ${WORK}/prefix ${WORK}/moved)
  file(GLOB_RECURSE pkgconfig ${WORK}/moved/*.pc)
  get_filename_component(pkgconfig ${pkgconfig} DIRECTORY)
  set(ENV{PKG_CONFIG_PATH} ${pkgconfig})
  run(${configure} -DCMAKE_PREFIX_PATH=${WORK}/moved -DWANTED=${VERSION})
endif()
run(${CMAKE_COMMAND} --build ${WORK}/build)
run(${WORK}/build/engine_c)
run(${WORK}/build/engine_cpp)
# And once it is installed, or linked without CMake, with the loader's path as README.md gives it.
if(WAY STREQUAL "pkg_config")
  run(sh -c "${C_COMPILER} ${engine}/engine.c $(pkg-config --cflags --libs nvbackend) \
    -Wl,-rpath,$(pkg-config --variable=libdir nvbackend) -o ${WORK}/linked")
  run(${WORK}/linked)
  run(sh -c "test -f $(pkg-config --variable=ggml_plugin nvbackend)")
else()
  run(${CMAKE_COMMAND} --install ${WORK}/build --prefix ${WORK}/deployed)
  run(${WORK}/deployed/bin/engine_c)
  run(${WORK}/deployed/bin/engine_cpp)
endif()

# Until 1.0 a minor release may break the ABI, so the package must satisfy a request for neither neighbour.
if(WAY STREQUAL "find_package" AND VERSION MATCHES "^0\\.([0-9]+)")
  math(EXPR older "${CMAKE_MATCH_1} - 1")
  math(EXPR newer "${CMAKE_MATCH_1} + 1")
  foreach(wanted 0.${older} 0.${newer})
    execute_process(COMMAND ${configure} -DCMAKE_PREFIX_PATH=${WORK}/moved -DWANTED=${wanted}
                    RESULT_VARIABLE code OUTPUT_VARIABLE output ERROR_VARIABLE output)
    if(code EQUAL 0 OR NOT output MATCHES "compatible with requested version")
      message(FATAL_ERROR "find_package(nvbackend ${wanted}) was not refused by ${VERSION}\n${output}")
    endif()
  endforeach()
endif()
