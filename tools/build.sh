#!/bin/sh
# Builds the library and the examples for this machine; the programs are left in build/bin.
#
# With an NVIDIA GPU the kernels are built for that GPU alone; without one the library is built CPU-only, and no CUDA
# compiler is needed.
set -eu
cd "$(dirname "$0")/.."
target="${CARGO_TARGET_DIR:-$PWD/target}"

# "90" on an H100 or H200; several, joined by semicolons, where the GPUs differ; empty without a driver.
architectures=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d . | sort -un | paste -sd ';' -) || true
if [ -n "$architectures" ]; then
  echo "build: for compute capability $architectures"
  tools/setup.sh
  set -- -DNVBACKEND_CUDA=ON "-DCMAKE_CUDA_ARCHITECTURES=$architectures"
else
  echo "build: for the CPU, as there is no NVIDIA GPU here"
  tools/setup.sh --cpu
  target="$target/cpu-only"
  set -- -DNVBACKEND_CUDA=OFF
fi
PATH="$PWD/.toolchain/bin:$PATH"

mkdir -p build
log=build/build.log
if ! {
  cmake -S . -B build/here -G Ninja -DCMAKE_BUILD_TYPE=Release -DNVBACKEND_BUILD_TESTS=OFF \
    "-DCMAKE_RUNTIME_OUTPUT_DIRECTORY=$PWD/build/bin" "-DNVBACKEND_CARGO_TARGET_DIR=$target" "$@" >"$log" 2>&1 &&
    cmake --build build/here >>"$log" 2>&1
}; then
  tail -n 40 "$log" >&2
  echo "build: failed; the whole log is in $log" >&2
  exit 1
fi
