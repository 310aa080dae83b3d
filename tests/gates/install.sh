#!/bin/sh
# What `cmake --install` puts where: the library without its debug information, which is a component of its own; every page
# and tool that the installed header names; and nothing is left of it all once it is uninstalled, below a prefix that others use.
#
#   install.sh CMAKE BUILD_FOLDER WORK_FOLDER
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
cmake=$1
build=$2
work=$3
. "$root/tests/gates/work_folder.sh"
mkdir -p "$work/build" "$work/staged/opt/lib" "$work/staged/opt/share/doc"
touch "$work/staged/opt/lib/of_another_package.so"

fail() { echo "install gate: $*" >&2; exit 1; }
# installed OPTION...: installs into DESTDIR, because packagers do, and keeps the list of files for later.
installed() {
  DESTDIR="$work/staged" "$cmake" --install "$build" --prefix /opt "$@" >"$work/log" || fail "$(cat "$work/log")"
  mv "$build"/install_manifest*.txt "$work/build/"
}
sections() { readelf -SW "$1" | sed -n 's/.*\] \(\.[^ ]*\) .*/\1/p'; }

installed
library=$(find "$work/staged/opt" -name 'libnvbackend.so.*.*.*')
[ -f "$library" ] || fail "no single library but: $library"
if command -v objcopy >/dev/null; then
  sections "$library" | grep -q '^\.debug_\|^\.symtab$' && fail "$library has debug information"
  readelf -p .gnu_debuglink "$library" | grep -qF "${library##*/}.debug" || fail "$library names no file of debug information"
  installed --component debug
  sections "$library.debug" | grep -q '^\.debug_info$' || fail "$library.debug has no debug information"
  [ "$(readelf -n "$library" | grep 'Build ID')" = "$(readelf -n "$library.debug" | grep 'Build ID')" ] ||
    fail "$library.debug belongs to another library"
else
  echo "install gate: objcopy is missing, so debug information was not parted and is not looked at"
fi

share="$work/staged/opt/share"
named=$(grep -ohE '(docs/[a-z_]+\.md|tools/[a-z_]+\.py)' "$work"/staged/opt/include/*.h* | sort -u)
[ -n "$named" ] || fail "the header names neither pages nor tools"
for file in $named; do
  case $file in
    docs/*) place="$share/doc/nvbackend/$file" ;;
    *) place="$share/nvbackend/$file" ;;
  esac
  cmp -s "$root/$file" "$place" || fail "the header names $file, which is not installed as $place"
done
"$root/tests/tools/test_api_pages.py" "$share/doc/nvbackend" || fail "the installed pages of the API are wrong"
[ -x "$share/nvbackend/tools/memory_timeline.py" ] || fail "memory_timeline.py cannot be run"

uninstall() { DESTDIR="$work/staged" "$cmake" -DBUILD="$work/build" -DPREFIX="$1" -P "$root/cmake/NvbackendUninstall.cmake"; }
uninstall /usr/local >"$work/log" 2>&1 && fail "it removed what lies below another prefix"
grep -q "nothing was removed" "$work/log" || fail "$(cat "$work/log")"
[ -f "$library" ] || fail "it removed what lies below another prefix"
uninstall /opt >"$work/log" 2>&1 || fail "$(cat "$work/log")"
left=$(cd "$work/staged/opt" && find . ! -type d -o -name '*nvbackend*')
[ "$left" = "./lib/of_another_package.so" ] || fail "after uninstalling there is: $left"
uninstall /opt >"$work/log" 2>&1 && fail "it uninstalled twice"
grep -q "nothing was installed" "$work/log" || fail "$(cat "$work/log")"
