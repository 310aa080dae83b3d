#!/bin/sh
# Builds the fuzz targets with libFuzzer's coverage and runs each, or the one that is named, for SECONDS.
#
#   fuzz/run.sh [--address] SECONDS [TARGET...]
#
# --address builds with AddressSanitizer, into a folder of its own. Inputs begin at fuzz/corpus/TARGET; new ones are kept in
# build/fuzz/TARGET, and an input that breaks something in build/fuzz/TARGET-crash-….
# The environment's NVB_FUZZ_STATISTICS=failing prints which functions of the header never succeeded, =1 all counts.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
target_folder=${CARGO_TARGET_DIR:-$root/target}
host=$(rustc -vV | sed -n 's/^host: //p')
folder=$target_folder/fuzz
coverage="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4"
for kind in inline-8bit-counters pc-table trace-compares; do coverage="$coverage -Cllvm-args=-sanitizer-coverage-$kind"; done
# The shared library, which nobody runs here, is linked without the sanitizer's functions.
flags="--cfg fuzzing -Ccodegen-units=1 $coverage -Clink-arg=-Wl,--warn-unresolved-symbols"
if [ "${1:-}" = --address ]; then
  shift
  folder=$target_folder/fuzz-address
  flags="$flags -Zsanitizer=address -Cunsafe-allow-abi-mismatch=sanitizer"
  export RUSTC_BOOTSTRAP=1
  # A request that cannot be met is refused, as without it.
  export ASAN_OPTIONS="allocator_may_return_null=1${ASAN_OPTIONS:+:$ASAN_OPTIONS}"
fi
seconds=$1
shift
all=$(sed -n 's/^path = "fuzz_targets\/\(.*\)\.rs"$/\1/p' fuzz/Cargo.toml)

RUSTFLAGS=$flags cargo build --release --locked --manifest-path fuzz/Cargo.toml --target "$host" --target-dir "$folder"
mkdir -p build/fuzz
for target in ${*:-$all}; do
  case $target in
    memory_sequence) seeds=tests/memory/corpus options="-max_len=1500" ;;
    # Half of what is tried are sizes, so a large request is no sign of a fault.
    header*) seeds=fuzz/corpus/header options="-max_len=402 -len_control=0 -timeout=20 -malloc_limit_mb=16777216" ;;
    *) seeds=fuzz/corpus/$target options="-max_len=4096 -timeout=10" ;;
  esac
  mkdir -p "build/fuzz/$target" "$seeds"
  echo "fuzz: $target for $seconds seconds"
  # shellcheck disable=SC2086
  "$folder/$host/release/$target" -max_total_time="$seconds" $options -print_final_stats=1 \
    -artifact_prefix="build/fuzz/$target-" "build/fuzz/$target" "$seeds" 2>"build/fuzz/$target.log" || {
    tail -n 60 "build/fuzz/$target.log" >&2
    echo "fuzz: $target broke; the input is in build/fuzz" >&2
    exit 1
  }
  grep "^fuzz: nvb_" "build/fuzz/$target.log" || true
  grep -E "number_of_executed_units|average_exec_per_sec" "build/fuzz/$target.log"
done
