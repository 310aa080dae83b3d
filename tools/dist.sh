#!/bin/sh
# Packs the library for machines that have no Rust: relocatable archives in build/dist/, which work wherever they are unpacked.
#
#   tools/dist.sh [KIND...]    x86_64-cpu, x86_64-cuda, aarch64-cpu or aarch64-cuda. Without one: both for this machine's
#                              processor, and that for the CPU of the other processor if its compilers are here
#
# An archive holds the library without debug information, its headers, what find_package and pkg-config read, tools, the
# examples' sources, and the pages. No file in it names a folder of the machine that built it. Kernels are built for
# NVB_CUDA_ARCHITECTURES, "all" without it, which takes hours. Another processor takes Rust's target
# (rustup target add aarch64-unknown-linux-gnu) and Debian's g++-aarch64-linux-gnu.
set -eu
cd "$(dirname "$0")/.."
root=$PWD
target="${CARGO_TARGET_DIR:-$root/target}"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
machine=$(uname -m)
PATH="$root/.toolchain/bin:$PATH"

say() { echo "dist: $*"; }
die() { echo "dist: $*" >&2; exit 1; }

if [ $# = 0 ]; then
  set -- "$machine-cpu" "$machine-cuda"
  for other in x86_64 aarch64; do
    [ $other != "$machine" ] || continue
    if command -v "$other-linux-gnu-g++" >/dev/null && rustup target list --installed 2>/dev/null | grep -q "^$other-"; then
      set -- "$@" "$other-cpu"
    else
      say "no archive for $other: $other-linux-gnu-g++ or Rust's target $other-unknown-linux-gnu is missing"
    fi
  done
fi

# Paths that Rust writes into panics, of crates and of our own sources, then begin with a name in place of a folder.
separator=$(printf '\037')
CARGO_ENCODED_RUSTFLAGS="--remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=cargo$separator--remap-path-prefix=$root=nvbackend"
export CARGO_ENCODED_RUSTFLAGS

# build FOLDER PREFIX OPTION...: configures, builds and installs below PREFIX. A log is shown if one of these fails.
build() {
  folder=$1
  prefix=$2
  shift 2
  mkdir -p "$folder"
  if ! {
    cmake -S . -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_LIBDIR=lib -DNVBACKEND_BUILD_TESTS=OFF \
      -DNVBACKEND_BUILD_EXAMPLES=OFF "$@" && cmake --build "$folder" && cmake --install "$folder" --prefix "$prefix" &&
      cmake --install "$folder" --prefix "$prefix" --component examples
  } >"$folder.log" 2>&1; then
    tail -n 40 "$folder.log" >&2
    die "failed; the whole log is in $folder.log"
  fi
}

# What somebody reads who has unpacked an archive.
readme() {
  cat <<TEXT
# nvbackend $version for Linux on $1

This folder may lie anywhere. \`DIR\` stands for it.

- CMake: \`find_package(nvbackend)\` with \`-DCMAKE_PREFIX_PATH=DIR\`, then link \`nvbackend::nvbackend\`.
- pkg-config: \`PKG_CONFIG_PATH=DIR/lib/pkgconfig\`; add \`-Wl,-rpath,DIR/lib\` to the link.
- The API's pages: \`share/doc/nvbackend/api/index.html\`; what else there is to read lies beside them.
- Examples: \`cmake -S DIR/share/nvbackend/examples -B build -DCMAKE_PREFIX_PATH=DIR && cmake --build build\`.

The library needs glibc $2 or newer and nothing else; an NVIDIA driver is opened where there is one.
TEXT
}

# pack KIND: build/dist/nvbackend-VERSION-linux-KIND.tar.xz
pack() {
  kind=$1
  processor=${kind%-*}
  name="nvbackend-$version-linux-$kind"
  stage="$root/build/dist/stage/$name"
  rm -rf "$stage"
  set -- -DCMAKE_SYSTEM_NAME=Linux "-DCMAKE_SYSTEM_PROCESSOR=$processor" "-DCMAKE_C_COMPILER=$processor-linux-gnu-gcc" \
    "-DCMAKE_CXX_COMPILER=$processor-linux-gnu-g++"
  [ "$processor" != "$machine" ] || set --
  case $kind in
    x86_64-cpu | aarch64-cpu) set -- "$@" -DNVBACKEND_CUDA=OFF "-DNVBACKEND_CARGO_TARGET_DIR=$target/dist/cpu-only" ;;
    x86_64-cuda | aarch64-cuda)
      [ "$processor" = "$machine" ] || die "kernels are built on the processor that they are for; this one is $machine"
      # The kernels' objects name no folder, so those of other builds serve.
      mkdir -p "$target/kernels" "$target/dist"
      [ -e "$target/dist/kernels" ] || ln -s ../kernels "$target/dist/kernels"
      set -- "$@" -DNVBACKEND_CUDA=ON "-DNVBACKEND_CARGO_TARGET_DIR=$target/dist" \
        "-DCMAKE_CUDA_ARCHITECTURES=$(echo "${NVB_CUDA_ARCHITECTURES:-all}" | tr , ';')"
      ;;
    *) die "$kind is none of x86_64-cpu, x86_64-cuda, aarch64-cpu, aarch64-cuda" ;;
  esac
  say "building $name"
  build "$root/build/dist/$kind" "$stage" "$@"
  glibc=$(readelf -V "$stage/lib/libnvbackend.so.$version" | sed -n 's/.*Name: GLIBC_\([0-9.]*\).*/\1/p' | sort -V | tail -n 1)
  readme "$kind" "$glibc" >"$stage/README.md"
  # Names in order, and neither times nor owners of this machine: what was built alike is packed alike.
  time=$(git log -1 --format=%ct 2>/dev/null || stat -c %Y Cargo.toml)
  tar -C "$root/build/dist/stage" --sort=name --mtime="@$time" --owner=0 --group=0 --numeric-owner -cJf \
    "$root/build/dist/$name.tar.xz" "$name"
  rm -rf "$stage"
  say "build/dist/$name.tar.xz, $(du -h "$root/build/dist/$name.tar.xz" | cut -f 1)"
}

for kind in "$@"; do pack "$kind"; done
