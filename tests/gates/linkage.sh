#!/bin/sh
# The library's SONAME carries the ABI's version, it stays mapped after dlclose, and it needs nothing that a machine
# without an NVIDIA driver lacks.
#
#   linkage.sh LIBRARY SONAME
set -eu
library=$1
soname=$2
dynamic=$(readelf -d "$library")

fail() { echo "linkage: $library $*" >&2; exit 1; }

printf '%s\n' "$dynamic" | grep -qF "soname: [$soname]" || fail "has not the SONAME $soname"
printf '%s\n' "$dynamic" | grep -q 'FLAGS_1.*NODELETE' || fail "may be unloaded (-z nodelete is missing)"
needed=$(printf '%s\n' "$dynamic" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
[ -n "$needed" ] || fail "needs no library, not even libc"
for name in $needed; do
  case $name in
    libc.so.6 | libm.so.6 | libgcc_s.so.1 | libdl.so.2 | librt.so.1 | libpthread.so.0 | ld-linux-*) ;;
    *) fail "needs $name, which not every machine has" ;;
  esac
done
