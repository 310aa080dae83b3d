#!/bin/sh
# Installs the library, its headers and its package files for other projects, or takes them away again.
#
#   tools/install.sh [PREFIX]             builds what is not built yet and installs it below PREFIX (/usr/local)
#   tools/install.sh --remove [PREFIX]    removes what the last install put there
#
# Under sudo nothing is built, so that no file of the checkout becomes root's: `make library` first, then
# `sudo make install`. The environment's DESTDIR stands before PREFIX, as packagers expect.
set -eu
cd "$(dirname "$0")/.."
remove=no
if [ "${1:-}" = "--remove" ]; then
  remove=yes
  shift
fi
prefix="${1:-/usr/local}"
case $prefix in /*) ;; *) prefix="$PWD/$prefix" ;; esac
folder=build/library
PATH="$PWD/.toolchain/bin:$PATH:/usr/sbin:/sbin"  # ldconfig lies in the last two

# Programs that are started later find a library in the loader's own folders by its cache alone.
refresh_loader() { [ "$(id -u)" != 0 ] || [ -n "${DESTDIR:-}" ] || ! command -v ldconfig >/dev/null || ldconfig; }

if [ $remove = yes ]; then
  cmake "-DBUILD=$PWD/$folder" "-DPREFIX=$prefix" -P cmake/NvbackendUninstall.cmake
  refresh_loader
  exit
fi
if [ "$(id -u)" = 0 ] && [ "${SUDO_UID:-0}" != 0 ]; then
  [ -f $folder/cmake_install.cmake ] || { echo "install: run \`make library\` first, without sudo" >&2; exit 1; }
else
  tools/build.sh --library
fi
cmake --install $folder --prefix "$prefix" >build/install.log || { cat build/install.log >&2; exit 1; }
refresh_loader
echo "install: below ${DESTDIR:-}$prefix; \`make uninstall PREFIX=$prefix\` removes it"
[ -z "${DESTDIR:-}" ] || exit 0
libraries=$(dirname "$(grep '/libnvbackend\.so$' $folder/install_manifest.txt)")
case ":$(ldconfig -p | sed -n 's/.*=> \(.*\)\/[^/]*$/\1/p' | sort -u | paste -s -d : -):" in
  *":$libraries:"*) ;;
  *) echo "install: the loader does not search $libraries: link programs with -Wl,-rpath,$libraries" ;;
esac
