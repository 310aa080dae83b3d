# How CMake runs Cargo. Cargo decides what is stale, so it is asked with every build. It runs in the source folder, whose
# .cargo/config.toml it reads.

find_program(NVBACKEND_CARGO cargo HINTS ENV CARGO_HOME "$ENV{HOME}/.cargo" PATH_SUFFIXES bin
             DOC "Rust's build tool, from https://rustup.rs" REQUIRED)
get_filename_component(cargo_folder "${NVBACKEND_CARGO}" DIRECTORY)
find_program(NVBACKEND_RUSTC rustc HINTS "${cargo_folder}" DOC "Rust's compiler" REQUIRED)

# The CUDA compiler of this system. build.rs looks in the same places, in the same order, for the one that it uses.
if(CMAKE_CUDA_COMPILER)
  set(NVBACKEND_NVCC "${CMAKE_CUDA_COMPILER}")
elseif(DEFINED ENV{NVCC})
  set(NVBACKEND_NVCC "$ENV{NVCC}")
else()
  # Not cached, or the compiler of an earlier configuration would decide.
  find_program(NVBACKEND_NVCC nvcc HINTS ENV CUDA_HOME PATH_SUFFIXES bin PATHS /usr/local/cuda/bin NO_CACHE
               NO_CMAKE_PATH NO_CMAKE_ENVIRONMENT_PATH)
endif()

# The names of the GPUs that the driver shows, empty where there are none.
function(nvbackend_visible_gpus result)
  execute_process(COMMAND nvidia-smi --query-gpu=name --format=csv,noheader
                  OUTPUT_VARIABLE names RESULT_VARIABLE failed ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(failed)
    set(names)
    file(GLOB names /proc/driver/nvidia/gpus/*)
  endif()
  string(REPLACE "\n" ", " names "${names}")
  list(JOIN names ", " names)
  set(${result} "${names}" PARENT_SCOPE)
endfunction()

# Sets NVBACKEND_CUDA to ON or OFF and NVBACKEND_NVCC to the compiler. AUTO depends on the system alone: a compiler that
# `make setup` put into the checkout counts only for ON, or what ran before would decide what is built.
macro(nvbackend_decide_cuda)
  set(nvbackend_asked "${NVBACKEND_CUDA}")
  string(TOUPPER "${nvbackend_asked}" nvbackend_asked)
  if(NOT nvbackend_asked MATCHES "^(AUTO|ON|OFF|YES|NO|TRUE|FALSE|Y|N|1|0)$")
    message(FATAL_ERROR "NVBACKEND_CUDA is ${NVBACKEND_CUDA}; it must be ON, OFF or AUTO")
  endif()
  set(nvbackend_own_nvcc "${PROJECT_SOURCE_DIR}/.toolchain/cuda/bin/nvcc")
  if(nvbackend_asked STREQUAL "AUTO")
    set(NVBACKEND_CUDA OFF)
    if(NVBACKEND_NVCC AND NOT NVBACKEND_RUST_TARGET)
      set(NVBACKEND_CUDA ON)
    endif()
  endif()
  if(NVBACKEND_CUDA)
    if(NOT NVBACKEND_NVCC AND EXISTS "${nvbackend_own_nvcc}")
      set(NVBACKEND_NVCC "${nvbackend_own_nvcc}")
    endif()
    if(NOT NVBACKEND_NVCC)
      message(FATAL_ERROR "NVBACKEND_CUDA is ${nvbackend_asked} and nvcc is not in NVCC, CUDA_HOME, PATH, /usr/local/cuda "
                          "or .toolchain/. Run `make setup`, which installs one into .toolchain/, or set NVBACKEND_CUDA=OFF.")
    elseif(NOT EXISTS "${NVBACKEND_NVCC}")
      message(FATAL_ERROR "The CUDA compiler ${NVBACKEND_NVCC}, which CMAKE_CUDA_COMPILER or NVCC names, does not exist. "
                          "NVBACKEND_CUDA=OFF builds without one.")
    endif()
    message(STATUS "nvbackend ${PROJECT_VERSION}: CUDA by ${NVBACKEND_NVCC} (NVBACKEND_CUDA is ${nvbackend_asked})")
  else()
    message(STATUS "nvbackend ${PROJECT_VERSION}: CPU only (NVBACKEND_CUDA is ${nvbackend_asked})")
    nvbackend_visible_gpus(nvbackend_gpus)
    set(nvbackend_unused "This machine has an NVIDIA GPU (${nvbackend_gpus}), which the library will not use")
    if(NOT nvbackend_gpus)
    elseif(nvbackend_asked STREQUAL "AUTO" AND NOT NVBACKEND_RUST_TARGET)
      message(WARNING "${nvbackend_unused}, because the system has no nvcc. With NVBACKEND_CUDA=ON the one is used that "
                      "`make setup` installs into .toolchain/; NVBACKEND_CUDA=OFF is for the CPU alone.")
    elseif(NOT NVBACKEND_RUST_TARGET)
      message(NOTICE "${nvbackend_unused}, because NVBACKEND_CUDA is ${nvbackend_asked}.")
    endif()
  endif()
endmacro()

# Sets NVBACKEND_RUST_TARGET to Rust's name for the machine that CMake builds for where that is another than the one
# that builds, else to nothing; and NVBACKEND_ELF_MACHINE to what the library's ELF header must then say.
function(nvbackend_find_target)
  set(machine_x86_64 3e00)
  set(machine_aarch64 b700)
  string(TOLOWER "${CMAKE_SYSTEM_PROCESSOR}" processor)
  string(REGEX REPLACE "^amd64$" "x86_64" processor "${processor}")
  string(REGEX REPLACE "^arm64$" "aarch64" processor "${processor}")
  if(NOT DEFINED machine_${processor} OR NOT CMAKE_SYSTEM_NAME STREQUAL "Linux")
    message(FATAL_ERROR "nvbackend builds for Linux on x86_64 and aarch64. CMAKE_SYSTEM_NAME is ${CMAKE_SYSTEM_NAME}, "
                        "CMAKE_SYSTEM_PROCESSOR is ${CMAKE_SYSTEM_PROCESSOR}.")
  endif()
  execute_process(COMMAND "${NVBACKEND_RUSTC}" -vV OUTPUT_VARIABLE about RESULT_VARIABLE failed ERROR_VARIABLE errors)
  if(failed OR NOT about MATCHES "host: ([^\n]+)\nrelease: ([0-9.]+)")
    message(FATAL_ERROR "`${NVBACKEND_RUSTC} -vV` failed: ${errors}")
  endif()
  set(host "${CMAKE_MATCH_1}")
  set(release "${CMAKE_MATCH_2}")
  file(STRINGS "${PROJECT_SOURCE_DIR}/Cargo.toml" wanted REGEX "^rust-version = " LIMIT_COUNT 1)
  string(REGEX MATCH "[0-9.]+" wanted "${wanted}")
  if(release VERSION_LESS wanted)
    message(FATAL_ERROR "${NVBACKEND_RUSTC} is Rust ${release}; ${wanted} or newer is needed, which https://rustup.rs installs.")
  endif()

  set(target)
  if(NOT host MATCHES "^${processor}-")
    set(target "${processor}-unknown-linux-gnu")
    execute_process(COMMAND "${NVBACKEND_RUSTC}" --print target-libdir --target ${target}
                    OUTPUT_VARIABLE libraries ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(NOT libraries OR NOT IS_DIRECTORY "${libraries}")
      message(FATAL_ERROR "CMAKE_SYSTEM_PROCESSOR is ${CMAKE_SYSTEM_PROCESSOR}, and Rust has no standard library for it: "
                          "run `rustup target add ${target}`.")
    endif()
    # Clang builds for any machine and is told which one; another compiler has one machine.
    if(NOT CMAKE_C_COMPILER_TARGET)
      execute_process(COMMAND "${CMAKE_C_COMPILER}" -dumpmachine OUTPUT_VARIABLE machine ERROR_QUIET
                      OUTPUT_STRIP_TRAILING_WHITESPACE)
      if(NOT machine MATCHES "^${processor}-")
        message(FATAL_ERROR "CMAKE_SYSTEM_PROCESSOR is ${CMAKE_SYSTEM_PROCESSOR}, but the compiler ${CMAKE_C_COMPILER} builds "
                            "for ${machine}: set CMAKE_C_COMPILER and CMAKE_CXX_COMPILER, for instance to "
                            "${processor}-linux-gnu-gcc and ${processor}-linux-gnu-g++.")
      endif()
    endif()
    message(STATUS "nvbackend ${PROJECT_VERSION}: for ${target}")
  endif()
  set(NVBACKEND_RUST_TARGET "${target}" PARENT_SCOPE)
  set(NVBACKEND_ELF_MACHINE "${machine_${processor}}" PARENT_SCOPE)
endfunction()

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
  set(built "${NVBACKEND_CARGO_TARGET_DIR}/${NVBACKEND_RUST_TARGET}/release/libnvbackend.so")
  set(folder "${CMAKE_CURRENT_BINARY_DIR}/lib")
  set(library "${folder}/libnvbackend.so.${PROJECT_VERSION}")
  # Messages of build.rs then name the options of CMake instead of those of Cargo.
  set(environment NVB_BUILD_TOOL=cmake)
  set(arguments)
  if(NVBACKEND_CUDA)
    if(CMAKE_CUDA_COMPILER)
      list(APPEND environment "NVCC=${CMAKE_CUDA_COMPILER}")
    endif()
    nvbackend_cuda_architectures(architectures)
    if(architectures)
      list(APPEND environment "NVB_CUDA_ARCHITECTURES=${architectures}")
    endif()
  else()
    list(APPEND arguments --no-default-features)
  endif()
  if(NVBACKEND_RUST_TARGET)
    list(APPEND arguments --target ${NVBACKEND_RUST_TARGET})
    string(REPLACE "-" "_" name "${NVBACKEND_RUST_TARGET}")
    list(APPEND environment "CC_${name}=${CMAKE_C_COMPILER}" "CXX_${name}=${CMAKE_CXX_COMPILER}")
    string(TOUPPER "${name}" name)
    list(APPEND environment "CARGO_TARGET_${name}_LINKER=${CMAKE_C_COMPILER}")
  endif()

  add_custom_target(nvbackend_cargo ALL
    COMMAND ${CMAKE_COMMAND} -E env ${environment}
            "${NVBACKEND_CARGO}" build --release --locked --lib --target-dir ${NVBACKEND_CARGO_TARGET_DIR} ${arguments}
    COMMAND ${CMAKE_COMMAND} -DBUILT=${built} -DLIBRARY=${library} -DOBJCOPY=${CMAKE_OBJCOPY}
            -DMACHINE=${NVBACKEND_ELF_MACHINE} -P ${CMAKE_CURRENT_SOURCE_DIR}/cmake/NvbackendStrip.cmake
    WORKING_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}
    BYPRODUCTS ${library}
    COMMENT "Building libnvbackend.so with Cargo"
    USES_TERMINAL VERBATIM)
  # For what the tests build with Cargo besides.
  set_property(GLOBAL PROPERTY NVBACKEND_CARGO_ENVIRONMENT ${environment})
  file(MAKE_DIRECTORY ${folder})
  file(CREATE_LINK libnvbackend.so.${PROJECT_VERSION} ${folder}/libnvbackend.so.${NVBACKEND_SOVERSION} SYMBOLIC)
  file(CREATE_LINK libnvbackend.so.${NVBACKEND_SOVERSION} ${folder}/libnvbackend.so SYMBOLIC)

  # The imported target has the name that the installed package gives it, because CMake installs no alias
  # (install(IMPORTED_RUNTIME_ARTIFACTS nvbackend::nvbackend) of a project that embeds this one).
  add_library(nvbackend::nvbackend SHARED IMPORTED GLOBAL)
  add_dependencies(nvbackend::nvbackend nvbackend_cargo)
  set_target_properties(nvbackend::nvbackend PROPERTIES
    IMPORTED_LOCATION ${library}
    IMPORTED_SONAME libnvbackend.so.${NVBACKEND_SOVERSION}
    INTERFACE_INCLUDE_DIRECTORIES ${CMAKE_CURRENT_SOURCE_DIR}/include)
  add_library(nvbackend ALIAS nvbackend::nvbackend)
endfunction()
