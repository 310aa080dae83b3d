#!/bin/sh
# Each public header compiles alone, without a warning, and may be included in two files of one program: .h as C11 and
# as C++17, .hpp as C++17.
#
#   header.sh INCLUDE_FOLDER          CC and CXX name the compilers
set -eu
include=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
warnings="-Wall -Wextra -Wconversion -Wshadow -Werror -pedantic"

# compile COMPILER STANDARD LANGUAGE HEADER: two files and a main, linked together.
compile() {
  for part in one two; do
    printf '#include <%s>\nint %s(void);\nint %s(void) { return 0; }\n' "$4" $part $part >"$folder/$part.source"
    # shellcheck disable=SC2086
    "$1" -std="$2" $warnings -I"$include" -x "$3" -c "$folder/$part.source" -o "$folder/$part.o"
  done
  printf 'int one(void);\nint two(void);\nint main(void) { return one() + two(); }\n' >"$folder/main.source"
  "$1" -std="$2" -x "$3" -c "$folder/main.source" -o "$folder/main.o"
  "$1" "$folder/main.o" "$folder/one.o" "$folder/two.o" -o "$folder/program"
  "$folder/program"
}

[ -f "$include/nvbackend.h" ] || { echo "header: $include has no nvbackend.h" >&2; exit 1; }
for header in "$include"/*; do
  name=$(basename "$header")
  case $name in
    *.h)
      compile "${CC:-cc}" c11 c "$name"
      compile "${CXX:-c++}" c++17 c++ "$name"
      ;;
    *.hpp) compile "${CXX:-c++}" c++17 c++ "$name" ;;
    *) echo "header: $name is no header" >&2; exit 1 ;;
  esac
done
