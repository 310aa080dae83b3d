#!/bin/sh
# An archive of tools/dist.sh serves whoever unpacks it: it names no folder of the machine that built it, its library is
# stripped, and engines find it by find_package and by pkg-config, link it and run. What is for another processor runs
# under qemu where that is installed; where it is not, the ELF headers are looked at and that is said.
#
#   dist.sh WORK_FOLDER ARCHIVE...
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$1
shift
. "$root/tests/gates/work_folder.sh"
machine=$(uname -m)

fail() { echo "dist gate: $archive: $*" >&2; exit 1; }
# quietly COMMAND...: shows what it says if it fails.
quietly() { "$@" >"$work/log" 2>&1 || { cat "$work/log" >&2; fail "failed: $*"; }; }

# names_folder FOLDER: a file below $tree has the name of that folder in it.
names_folder() { grep -rlF -- "$1" "$tree"; }

# elf_machine FILE: such as "AArch64".
elf_machine() { LC_ALL=C readelf -h "$1" | sed -n 's/ *Machine: *//p'; }

check_files() {
  for file in README.md include/nvbackend.h include/nvbackend.hpp include/nvbackend_core.hpp \
    include/nvbackend_operations.hpp lib/libnvbackend.so lib/pkgconfig/nvbackend.pc \
    lib/cmake/nvbackend/nvbackendConfig.cmake share/nvbackend/tools/memory_timeline.py \
    share/nvbackend/examples/CMakeLists.txt share/nvbackend/examples/gemma/main.cpp share/doc/nvbackend/LICENSE-MIT \
    share/doc/nvbackend/LICENSE-APACHE share/doc/nvbackend/docs/errors.md share/doc/nvbackend/api/index.html; do
    [ -e "$tree/$file" ] || fail "it has no $file"
  done
  "$root/tests/tools/test_api_pages.py" "$tree/share/doc/nvbackend" || fail "its pages of the API are wrong"
  for folder in "$root" "${CARGO_HOME:-$HOME/.cargo}" "${CARGO_TARGET_DIR:-$root/target}"; do
    if names_folder "$folder" >&2; then fail "the files above name $folder"; fi
  done
  [ -z "$(find "$tree" -type l -lname '/*')" ] || fail "it has links to absolute paths"
  library=$(readlink -f "$tree/lib/libnvbackend.so")
  if LC_ALL=C readelf -SW "$library" | grep -q ' \.debug_\| \.symtab '; then fail "its library has debug information"; fi
  "$root/tests/gates/exports.sh" "$library" || fail "its library exports something else"
}

# use COMMAND-PREFIX...: builds the engines as strangers would and runs them, each behind the prefix.
use() {
  engine="$root/tests/consumer/engine"
  for way in find_package pkg_config; do
    PKG_CONFIG_PATH="$tree/lib/pkgconfig" quietly cmake -S "$engine" -B "$work/$way" -G Ninja -DCMAKE_BUILD_TYPE=Release \
      -DWAY=$way "-DWANTED=$version" "-DCMAKE_PREFIX_PATH=$tree" $cross
    quietly cmake --build "$work/$way"
    for program in engine_c engine_cpp; do
      case $(elf_machine "$work/$way/$program") in "$(elf_machine "$library")") ;; *) fail "$program is for another machine" ;; esac
      [ $runs = no ] || quietly "$@" "$work/$way/$program"
    done
  done
  # Its examples build beside it. The Gemma engine takes libraries that another processor's compiler has not.
  quietly cmake -S "$tree/share/nvbackend/examples" -B "$work/examples" -G Ninja "-DCMAKE_PREFIX_PATH=$tree" $cross
  quietly cmake --build "$work/examples" --target configuration streams
  for program in configuration streams; do
    [ $runs = no ] || quietly "$@" "$work/examples/$program" cpu
  done
}

[ $# != 0 ] || { echo "dist gate: no archive is given" >&2; exit 2; }
for archive in "$@"; do
  name=$(basename "$archive" .tar.xz)
  processor=$(echo "$name" | sed -n 's/^nvbackend-[0-9.]*-linux-\(.*\)-\(cpu\|cuda\)$/\1/p')
  version=$(echo "$name" | cut -d - -f 2)
  [ -n "$processor" ] || fail "its name does not say what it is for"
  rm -rf "$work/unpacked" "$work/elsewhere" "$work/find_package" "$work/pkg_config" "$work/examples"
  mkdir "$work/unpacked"
  tar -C "$work/unpacked" -xJf "$archive"
  [ "$(ls "$work/unpacked")" = "$name" ] || fail "it does not unpack into one folder of its name"
  mv "$work/unpacked/$name" "$work/elsewhere"
  tree="$work/elsewhere"
  check_files

  cross=
  runs=yes
  set --
  if [ "$processor" != "$machine" ]; then
    if ! command -v "$processor-linux-gnu-g++" >/dev/null; then
      echo "dist gate: $name is not linked with, because $processor-linux-gnu-g++ is missing; its library is for $(elf_machine "$library")"
      continue
    fi
    cross="-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=$processor -DCMAKE_C_COMPILER=$processor-linux-gnu-gcc
      -DCMAKE_CXX_COMPILER=$processor-linux-gnu-g++"
    if command -v "qemu-$processor-static" >/dev/null; then
      set -- "qemu-$processor-static" -L "/usr/$processor-linux-gnu"
    else
      runs=no
      echo "dist gate: what is linked with $name does not run, because qemu-$processor-static is missing"
    fi
  fi
  use "$@"
  echo "dist gate: $name serves engines by find_package and by pkg-config"
done

# The gate sees a folder that is named: the last archive with one such line.
echo "# built in $root" >>"$tree/lib/pkgconfig/nvbackend.pc"
[ "$(names_folder "$root")" = "$tree/lib/pkgconfig/nvbackend.pc" ] || fail "a file that names a folder is passed over"
