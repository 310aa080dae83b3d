#!/bin/sh
# The library exports the functions that exports.txt lists, and no other symbol: what is exported is the ABI.
#
#   exports.sh LIBRARY          compare
#   exports.sh LIBRARY --write  write the list, after an intended change of the ABI
set -eu
list=$(dirname "$0")/exports.txt
exported=$(nm -D --defined-only "$1" | awk '{ print $3 }' | LC_ALL=C sort)
[ -n "$exported" ] || { echo "exports: $1 exports nothing" >&2; exit 1; }
if [ "${2:-}" = "--write" ]; then
  printf '%s\n' "$exported" >"$list"
elif ! printf '%s\n' "$exported" | diff -u "$list" - >&2; then
  echo "exports: $1 differs from tests/gates/exports.txt (above: - listed, + exported)" >&2
  exit 1
fi
