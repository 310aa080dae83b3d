#!/bin/sh
# abidiff of the C ABI against the dump of it that is kept beside this script, abi-N.xml.xz for NVB_ABI_VERSION N: an
# engine that was built against an earlier state of the same number must go on working. The library is built without
# CUDA, which changes no exported function, with full debug information, because abidiff sees nothing in a stripped one,
# and unoptimised, which takes a quarter of the time.
#
#   abi.sh WORK_FOLDER          compare; exit code 77 (skipped) on a machine whose C types are not those of the dump
#   abi.sh WORK_FOLDER --write  write the dump: after functions were added, or with another number after a change that breaks
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$1
number=$(sed -n 's/^#define NVB_ABI_VERSION //p' "$root/include/nvbackend.h")
kept=$root/tests/gates/abi-$number.xml.xz
fail() { echo "abi: $*" >&2; exit 1; }

for tool in abidw abidiff xz; do
  command -v $tool >/dev/null || fail "$tool is not installed (apt-get install abigail-tools xz-utils)"
done
# `char` is signed on one and unsigned on the other, and so differs in every text.
[ "$(uname -m)" = x86_64 ] || { echo "abi: skipped: the dump is of x86_64, this is $(uname -m)"; exit 77; }

(cd "$root" && CARGO_PROFILE_RELEASE_DEBUG=2 CARGO_PROFILE_RELEASE_OPT_LEVEL=0 \
  cargo build --quiet --release --locked --lib --no-default-features --target-dir "$work/target")
library=$work/target/release/libnvbackend.so

# A new function breaks nobody, and a struct may grow at its end, because struct_size tells the library which one it got.
# Every line of the report must be one that says so; abidiff's own suppressions also hide a field that changes its type.
# abidiff 2.4 finds that the empty arrays of opaque structs differ from themselves as a dump has them, and asks to be told;
# what it says around that is nothing where nothing else follows.
grown_at_end='
  /^$/ || /^Functions changes summary: 0 Removed, / || /^Variables changes summary: 0 Removed, 0 Changed, / { next }
  /functions? with some indirect sub-type change:$/ || /has some indirect sub-type changes:$/ { next }
  /parameter [0-9]+ of type .* has sub-type changes:$/ || /in pointed to type .*:$/ || /data member insertions?:$/ { next }
  /type size changed from [0-9]+ to [0-9]+ \(in bits\)$/ { size = $5; next }
  /type size hasn.t changed$/ || /[0-9]+ data member changes?:$/ || /type of .* changed:$/ { next }
  /.u8 _private\[\]. has \*some\* difference - please report as a bug$/ { next }
  match($0, /at offset [0-9]+ \(in bits\)/) { split(substr($0, RSTART), word, " "); if (word[3] + 0 >= size + 0) next }
  { broken = 1 }
  END { exit broken }'
compatible() {
  xz -dc "$kept" >"$work/kept.xml"
  abidiff --no-added-syms "$work/kept.xml" "$library" >"$work/report" || awk "$grown_at_end" "$work/report"
}

if [ "${2:-}" = --write ]; then
  if [ -f "$kept" ] && ! compatible; then
    cat "$work/report" >&2
    fail "what changed breaks engines (above), so NVB_ABI_VERSION must be larger than $number"
  fi
  rm -f "$root"/tests/gates/abi-*.xml.xz
  abidw --no-corpus-path --no-comp-dir-path --no-show-locs --no-elf-needed --out-file "$work/written.xml" "$library"
  xz -9e -c "$work/written.xml" >"$kept"
  exit
fi
[ -f "$kept" ] || fail "there is no dump of ABI $number; \`make abi\` writes it"
if compatible; then
  echo "abi: compatible with the kept dump of ABI $number"
else
  cat "$work/report" >&2
  fail "an engine built against ABI $number would break (above); take the change back, or raise NVB_ABI_VERSION and \`make abi\`"
fi
