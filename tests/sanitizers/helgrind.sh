#!/bin/bash
# Runs helgrind.c over a CPU-only library: tests/sanitizers/helgrind.sh LIBRARY
# First with a race planted in the program, which helgrind must find.
set -euo pipefail
cd "$(dirname "$0")/../.."
library=$(realpath "$1")
for tool in valgrind objdump; do
  command -v "$tool" >/dev/null || {
    echo "helgrind.sh: $tool is missing; on Debian and Ubuntu: apt-get install valgrind binutils" >&2
    exit 1
  }
done
folder=build/helgrind
mkdir -p "$folder"
ln -sf "$library" "$folder/$(objdump -p "$library" | sed -n 's/^ *SONAME *//p')"

# run NAME [FLAG...]
run() {
  "${CC:-cc}" -std=c11 -O1 -g -Wall -Wextra -Werror -pedantic -Iinclude "${@:2}" tests/sanitizers/helgrind.c \
    -o "$folder/$1" "$library" -lpthread
  LD_LIBRARY_PATH="$folder" valgrind --tool=helgrind --error-exitcode=9 \
    --suppressions=tests/sanitizers/helgrind.txt "$folder/$1" >"$folder/$1.log" 2>&1
}

if run planted -DPLANT_A_RACE; then
  echo "helgrind.sh: the planted race was not found" >&2
  exit 1
fi
run clean || {
  cat "$folder/clean.log" >&2
  exit 1
}
grep '^helgrind:' "$folder/clean.log"
