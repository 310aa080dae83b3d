#!/bin/sh
# A sanitizer that is not linked finds nothing: the given programs must carry AddressSanitizer's checks.
#
#   sanitized.sh PROGRAM...
set -eu
[ $# -gt 0 ] || { echo "sanitized: no program given" >&2; exit 1; }
for program in "$@"; do
  nm "$program" | grep -q '__asan_init' || { echo "sanitized: $program has no AddressSanitizer" >&2; exit 1; }
done
