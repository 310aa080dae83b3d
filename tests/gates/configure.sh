#!/bin/sh
# What `cmake -B` decides, and says, on machines of other kinds: which machine the library is built for, with or without
# CUDA, and what about GPUs that it will not use. Cargo, rustc, nvcc and nvidia-smi are made up here; Cargo writes down how it
# was run and builds nothing.
#
#   configure.sh CMAKE GENERATOR C_COMPILER WORK_FOLDER
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
cmake=$1
generator=$2
compiler=$3
work=$4
. "$root/tests/gates/work_folder.sh"
mkdir -p "$work/bin" "$work/none" "$work/rustlib/lib" "$work/cross"

fail() { printf 'configure gate: %s; it said:\n' "$*" >&2; cat "$work/said" >&2; exit 1; }
program() { printf '#!/bin/sh\n%s\n' "$2" >"$1"; chmod +x "$1"; }
program "$work/cargo" "echo \"\$* \$NVB_BUILD_TOOL \$CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER\" >$work/ran; exit 1"
machine=$(uname -m)
rust() { program "$work/rustc" "case \"\$*\" in
  -vV) printf 'rustc\nbinary: rustc\nhost: $machine-unknown-linux-gnu\nrelease: $1\n' ;;
  *target-libdir*) echo $2 ;;
esac"; }

# configure CODE [-DOPTION...]: configures the library alone in a new build folder; what it says lands in $work/said.
configure() {
  code=$1
  shift
  rm -rf "$work/build"
  result=0
  env -u NVCC -u CUDA_HOME -u CARGO_TARGET_DIR PATH="$work/bin:$work/path" "$cmake" -S "$root" -B "$work/build" -G "$generator" \
    -DCMAKE_MAKE_PROGRAM="$make_program" -DCMAKE_C_COMPILER="$compiler" -DNVBACKEND_CARGO="$work/cargo" \
    -DNVBACKEND_RUSTC="$work/rustc" -DNVBACKEND_BUILD_TESTS=OFF -DNVBACKEND_BUILD_EXAMPLES=OFF "$@" >"$work/output" 2>&1 ||
    result=$?
  # CMake breaks its messages into lines.
  tr -s '\n ' ' ' <"$work/output" >"$work/said"
  if [ "$code" = 0 ]; then [ "$result" = 0 ] || fail "configuring failed"; else [ "$result" != 0 ] || fail "it was not refused"; fi
}
says() { for text in "$@"; do grep -qF -- "$text" "$work/said" || fail "it does not say \"$text\""; done; }
silent() { if grep -qF -- "$1" "$work/said"; then fail "it says \"$1\""; fi; }
# builds TEXT...: Cargo is run with each of these texts.
builds() {
  rm -f "$work/ran"
  "$cmake" --build "$work/build" >"$work/said" 2>&1 && fail "a Cargo that fails does not fail the build"
  [ -f "$work/ran" ] || fail "Cargo was not run"
  for text in "$@"; do grep -qF -- "$text" "$work/ran" || fail "Cargo was run as \"$(cat "$work/ran")\", without $text"; done
}

# A PATH with the system's tools, but without a CUDA compiler and nvidia-smi, whatever this machine has.
mkdir "$work/path"
for folder in /bin /usr/bin; do
  for tool in "$folder"/*; do
    case ${tool##*/} in nvcc | nvidia-smi) ;; *) ln -sf "$tool" "$work/path/" ;; esac
  done
done
case $generator in Ninja) make_program=$(command -v ninja) ;; *) make_program=$(command -v make) ;; esac
rust 1.95.0 "$work/rustlib/lib"

# The machine that builds, and another one.
configure 0 -DNVBACKEND_CUDA=OFF
says "CPU only (NVBACKEND_CUDA is OFF)"
builds --no-default-features cmake
! grep -q -- "--target " "$work/ran" || fail "Cargo was run for a target of its own"
if [ "$machine" = aarch64 ]; then other=x86_64; else other=aarch64; fi
configure 1 -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=$other
says "CMAKE_SYSTEM_PROCESSOR is $other, but the compiler" "builds for $machine"
# A compiler that builds for this machine and says that it builds for the other one is enough to configure.
program "$work/cross/cc" "[ \"\$*\" != -dumpmachine ] || { echo $other-linux-gnu; exit; }
exec $compiler \"\$@\""
native=$compiler
compiler="$work/cross/cc"
configure 0 -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=$other
builds "--target $other-unknown-linux-gnu"
[ $other = x86_64 ] || builds "$work/cross/cc"
rust 1.95.0 "$work/nowhere"
configure 1 -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=$other
says "rustup target add $other-unknown-linux-gnu"
rust 1.95.0 "$work/rustlib/lib"
compiler=$native
configure 1 -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=riscv64
says "CMAKE_SYSTEM_PROCESSOR is riscv64"
# Whatever Cargo did: a library of another machine ends the build.
for kind in 3e00:b700 b700:3e00; do
  printf "\177ELF123456789012__\\$(case ${kind%:*} in 3e00) echo 076 ;; *) echo 267 ;; esac)\\000" >"$work/elf"
  "$cmake" -DBUILT="$work/elf" -DLIBRARY="$work/elf.so" -DMACHINE="${kind%:*}" -DOBJCOPY= -P "$root/cmake/NvbackendStrip.cmake" \
    >"$work/said" 2>&1 || fail "the right machine was refused"
  ! "$cmake" -DBUILT="$work/elf" -DLIBRARY="$work/elf.so" -DMACHINE="${kind#*:}" -DOBJCOPY= \
    -P "$root/cmake/NvbackendStrip.cmake" >"$work/said" 2>&1 || fail "a library of another machine was taken"
done

rust 1.63.0 "$work/rustlib/lib"
configure 1
says "is Rust 1.63.0" "https://rustup.rs"
rust 1.95.0 "$work/rustlib/lib"

if [ -x /usr/local/cuda/bin/nvcc ]; then
  echo "configure gate: /usr/local/cuda has a compiler, so what is done without one is not tried here"
  exit
fi
# CUDA: AUTO asks the system alone, so neither what `make setup` installed nor an earlier configuration decides.
program "$work/bin/nvcc" 'exit 0'
configure 0
says "CUDA by $work/bin/nvcc (NVBACKEND_CUDA is AUTO)"
rm "$work/bin/nvcc"
env PATH="$work/bin:$work/path" "$cmake" -S "$root" -B "$work/build" >"$work/output" 2>&1
tr -s '\n ' ' ' <"$work/output" >"$work/said"
says "CPU only (NVBACKEND_CUDA is AUTO)"
if [ -x "$root/.toolchain/cuda/bin/nvcc" ]; then
  configure 0 -DNVBACKEND_CUDA=ON
  says "CUDA by $root/.toolchain/cuda/bin/nvcc"
else
  configure 1 -DNVBACKEND_CUDA=ON
  says "NVBACKEND_CUDA is ON and nvcc is not in" "make setup" "NVBACKEND_CUDA=OFF"
fi
configure 1 -DNVBACKEND_CUDA=maybe
says "NVBACKEND_CUDA is maybe; it must be ON, OFF or AUTO"
configure 1 -DNVBACKEND_CUDA=ON -DCMAKE_CUDA_COMPILER="$work/nowhere/nvcc"
says "$work/nowhere/nvcc" "does not exist" "NVBACKEND_CUDA=OFF"

# A GPU that the library will not use.
program "$work/bin/nvidia-smi" 'printf "NVIDIA H200\nNVIDIA L4\n"'
configure 0
says "CMake Warning" "has an NVIDIA GPU (NVIDIA H200, NVIDIA L4), which the library will not use" "NVBACKEND_CUDA=ON"
configure 0 -DNVBACKEND_CUDA=OFF
says "will not use, because NVBACKEND_CUDA is OFF"
program "$work/bin/nvcc" 'exit 0'
configure 0
silent "will not use"
