#!/bin/sh
# Builds the library and the examples for this machine; the programs are left in build/bin.
#
#   tools/build.sh             in build/here
#   tools/build.sh --library   the library alone, in build/library, from where tools/install.sh installs it
#
# With an NVIDIA GPU the kernels are built for that GPU alone; without one the library is built CPU-only, and no CUDA
# compiler is needed. NVB_CUDA_ARCHITECTURES (such as "80;90a" or "all") builds kernels for other GPUs, with or without one.
set -eu
cd "$(dirname "$0")/.."
target="${CARGO_TARGET_DIR:-$PWD/target}"
folder=build/here
what="the library and the examples"
purpose=--demo
if [ "${1:-}" = "--library" ]; then
  folder=build/library
  what="the library"
  purpose=--library
fi

# "90" on an H100 or H200; several, joined by semicolons, where the GPUs differ; empty without a driver.
architectures="${NVB_CUDA_ARCHITECTURES:-}"
[ -n "$architectures" ] || architectures=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null |
  tr -d . | sort -un | paste -s -d ';' -) || true
if [ -n "$architectures" ]; then
  echo "build: $what for compute capability $architectures"
  tools/setup.sh $purpose
  set -- -DNVBACKEND_CUDA=ON "-DCMAKE_CUDA_ARCHITECTURES=$architectures"
  duration="it takes a quarter of an hour for each compute capability on two cores, because every kernel is compiled"
else
  if [ -e /dev/nvidiactl ] || [ -e /proc/driver/nvidia/version ]; then
    echo "build: this machine has an NVIDIA driver, but nvidia-smi names no GPU; NVB_CUDA_ARCHITECTURES builds for one" >&2
  fi
  echo "build: $what for the CPU, as there is no NVIDIA GPU here"
  tools/setup.sh $purpose --cpu
  target="$target/cpu-only"
  set -- -DNVBACKEND_CUDA=OFF
  duration="it takes three minutes on two cores, most of them for the library's own code, which is last"
fi
[ "$purpose" = --demo ] || set -- "$@" -DNVBACKEND_BUILD_EXAMPLES=OFF
PATH="$PWD/.toolchain/bin:$PATH"

mkdir -p build
log=build/build.log
started=$(date +%s)

# Says how far the build is, by the last line of its log: on a terminal in one line that is written over, elsewhere twice a minute.
report() {
  interval=30
  [ ! -t 2 ] || interval=1
  seconds=0
  while sleep 1 && kill -0 $$ 2>/dev/null; do
    seconds=$((seconds + 1))
    [ $((seconds % interval)) = 0 ] || continue
    last=$(tail -n 1 "$log" | sed 's/^ *//' | cut -c 1-60)
    line=$(printf '%d:%02d, last: %s' $((seconds / 60)) $((seconds % 60)) "$last")
    if [ $interval = 1 ]; then printf '\r\033[K%s' "$line" >&2; else echo "build: $line"; fi
  done
}

echo "build: the first time $duration; the log is $log"
: >"$log"
report &
reporter=$!
trap 'kill $reporter 2>/dev/null || true; [ ! -t 2 ] || printf "\r\033[K" >&2' EXIT
trap 'exit 130' INT TERM
if ! {
  cmake -S . -B $folder -G Ninja -DCMAKE_BUILD_TYPE=Release -DNVBACKEND_BUILD_TESTS=OFF \
    "-DCMAKE_RUNTIME_OUTPUT_DIRECTORY=$PWD/build/bin" "-DNVBACKEND_CARGO_TARGET_DIR=$target" "$@" >"$log" 2>&1 &&
    cmake --build $folder >>"$log" 2>&1
}; then
  tail -n 40 "$log" >&2
  echo "build: failed; the whole log is in $log" >&2
  exit 1
fi
seconds=$(($(date +%s) - started))
printf 'build: done in %d:%02d\n' $((seconds / 60)) $((seconds % 60))
