#!/bin/sh
# abidiff of the C ABI against the last release's tag. Exit code 77 (skipped) says that there is nothing to compare
# with, and why. Both libraries are built without CUDA, which changes no exported function, and with full debug
# information, because abidiff sees nothing in a stripped library.
#
#   abi.sh WORK_FOLDER
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$1
skip() { echo "abi: skipped: $*"; exit 77; }

command -v abidiff >/dev/null || skip "abidiff is not installed (apt-get install abigail-tools)"
git -C "$root" rev-parse --git-dir >/dev/null 2>&1 || skip "this is no git checkout, so there is no tag"
tag=$(git -C "$root" describe --tags --abbrev=0 --match 'v*' 2>/dev/null) || skip "no release has been tagged yet"

# build SOURCE_FOLDER NAME: a library with debug information, in $work/NAME.
build() {
  (cd "$1" && CARGO_PROFILE_RELEASE_DEBUG=2 CARGO_PROFILE_RELEASE_LTO=off \
    cargo build --quiet --release --locked --lib --no-default-features --target-dir "$work/target")
  mkdir -p "$work/$2"
  cp "$work/target/release/libnvbackend.so" "$work/$2/"
}

mkdir -p "$work"
if [ ! -f "$work/$tag/libnvbackend.so" ]; then
  rm -rf "$work/source"
  mkdir "$work/source"
  git -C "$root" archive "$tag" | tar -x -C "$work/source"
  build "$work/source" "$tag"
fi
build "$root" current

# The SONAME tells which releases must be compatible: with another one every change is allowed.
soname() { readelf -d "$1" | sed -n 's/.*soname: \[\(.*\)\]/\1/p'; }
[ "$(soname "$work/$tag/libnvbackend.so")" = "$(soname "$work/current/libnvbackend.so")" ] ||
  skip "$tag has another SONAME, so its ABI need not be kept"

# A new function breaks nobody, and a struct may grow at its end, because struct_size tells the library which one it got.
# Every line of the report must be one that says so; abidiff's own suppressions also hide a field that changes its type.
grown_at_end='
  /^$/ || /^Functions changes summary: 0 Removed, / || /^Variables changes summary: 0 Removed, 0 Changed, / { next }
  /functions? with some indirect sub-type change:$/ || /has some indirect sub-type changes:$/ { next }
  /parameter [0-9]+ of type .* has sub-type changes:$/ || /in pointed to type .*:$/ || /data member insertions?:$/ { next }
  /type size changed from [0-9]+ to [0-9]+ \(in bits\)$/ { size = $5; next }
  match($0, /at offset [0-9]+ \(in bits\)/) { split(substr($0, RSTART), word, " "); if (word[3] + 0 >= size + 0) next }
  { broken = 1 }
  END { exit broken }'
if abidiff --no-added-syms "$work/$tag/libnvbackend.so" "$work/current/libnvbackend.so" >"$work/report" ||
  awk "$grown_at_end" "$work/report"; then
  echo "abi: compatible with $tag"
else
  cat "$work/report" >&2
  echo "abi: an engine built against $tag would break (above)" >&2
  exit 1
fi
