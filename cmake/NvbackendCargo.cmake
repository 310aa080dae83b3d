# How CMake runs Cargo. Cargo decides what is stale, so it is asked with every build. It runs in the source folder, whose
# .cargo/config.toml it reads.

find_program(NVBACKEND_CARGO cargo HINTS ENV CARGO_HOME "$ENV{HOME}/.cargo" PATH_SUFFIXES bin
             DOC "Rust's build tool, from https://rustup.rs" REQUIRED)

# Whether there is a CUDA compiler. build.rs looks in the same places, in the same order, for the one that it uses.
if(CMAKE_CUDA_COMPILER)
  set(NVBACKEND_NVCC "${CMAKE_CUDA_COMPILER}")
elseif(DEFINED ENV{NVCC})
  set(NVBACKEND_NVCC "$ENV{NVCC}")
else()
  find_program(NVBACKEND_NVCC nvcc HINTS ENV CUDA_HOME PATH_SUFFIXES bin DOC "The CUDA compiler"
               PATHS /usr/local/cuda/bin "${CMAKE_CURRENT_LIST_DIR}/../.toolchain/cuda/bin")
endif()
set(NVBACKEND_NVCC_FOUND OFF)
if(NVBACKEND_NVCC)
  set(NVBACKEND_NVCC_FOUND ON)
endif()

# CMAKE_CUDA_ARCHITECTURES as build.rs reads it, with commas because a semicolon parts CMake's arguments.
function(nvbackend_cuda_architectures result)
  set(architectures "${CMAKE_CUDA_ARCHITECTURES}")
  if(architectures STREQUAL "native")
    execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                    OUTPUT_VARIABLE capabilities RESULT_VARIABLE failed ERROR_QUIET)
    if(failed)
      message(FATAL_ERROR "CMAKE_CUDA_ARCHITECTURES is native, but nvidia-smi finds no GPU")
    endif()
    string(REGEX MATCHALL "[0-9]+\\.[0-9]" architectures "${capabilities}")
    list(REMOVE_DUPLICATES architectures)
    string(REPLACE "." "" architectures "${architectures}")
  endif()
  string(REPLACE ";" "," architectures "${architectures}")
  set(${result} "${architectures}" PARENT_SCOPE)
endfunction()

# Defines nvbackend::nvbackend. The library that Cargo built is copied to <build>/lib under its installed names, so
# that programs of this build find it and a later build of other features in Cargo's folder cannot change it.
function(nvbackend_add_library)
  set(built "${NVBACKEND_CARGO_TARGET_DIR}/release/libnvbackend.so")
  set(folder "${CMAKE_CURRENT_BINARY_DIR}/lib")
  set(library "${folder}/libnvbackend.so.${PROJECT_VERSION}")
  set(environment)
  set(features --no-default-features)
  if(NVBACKEND_CUDA)
    if(NOT NVBACKEND_NVCC)
      message(FATAL_ERROR "NVBACKEND_CUDA is ON and nvcc was not found: run `make setup`, or set NVBACKEND_CUDA=OFF")
    endif()
    set(features)
    if(CMAKE_CUDA_COMPILER)
      list(APPEND environment "NVCC=${CMAKE_CUDA_COMPILER}")
    endif()
    nvbackend_cuda_architectures(architectures)
    if(architectures)
      list(APPEND environment "NVB_CUDA_ARCHITECTURES=${architectures}")
    endif()
  endif()

  add_custom_target(nvbackend_cargo ALL
    COMMAND ${CMAKE_COMMAND} -E env ${environment}
            "${NVBACKEND_CARGO}" build --release --locked --lib --target-dir ${NVBACKEND_CARGO_TARGET_DIR} ${features}
    COMMAND ${CMAKE_COMMAND} -E copy_if_different ${built} ${library}
    WORKING_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}
    BYPRODUCTS ${library}
    COMMENT "Building libnvbackend.so with Cargo"
    USES_TERMINAL VERBATIM)
  file(MAKE_DIRECTORY ${folder})
  file(CREATE_LINK libnvbackend.so.${PROJECT_VERSION} ${folder}/libnvbackend.so.${NVBACKEND_SOVERSION} SYMBOLIC)
  file(CREATE_LINK libnvbackend.so.${NVBACKEND_SOVERSION} ${folder}/libnvbackend.so SYMBOLIC)

  add_library(nvbackend SHARED IMPORTED GLOBAL)
  add_dependencies(nvbackend nvbackend_cargo)
  set_target_properties(nvbackend PROPERTIES
    IMPORTED_LOCATION ${library}
    IMPORTED_SONAME libnvbackend.so.${NVBACKEND_SOVERSION}
    INTERFACE_INCLUDE_DIRECTORIES ${CMAKE_CURRENT_SOURCE_DIR}/include)
  add_library(nvbackend::nvbackend ALIAS nvbackend)
  if(NVBACKEND_CUDA)
    message(STATUS "nvbackend ${PROJECT_VERSION}: CUDA by ${NVBACKEND_NVCC}")
  else()
    message(STATUS "nvbackend ${PROJECT_VERSION}: CPU only")
  endif()
endfunction()
