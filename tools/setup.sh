#!/bin/sh
# Checks that this machine has what the build needs and puts what it may put into the checkout's .toolchain/.
#
#   tools/setup.sh              everything: for `make test` and for development
#   tools/setup.sh --demo       for `make demo`: the library and the examples
#   tools/setup.sh --library    for `make library`: the library alone
#   tools/setup.sh --cpu        with any of these: no CUDA compiler, for a library that runs on the CPU alone
#   tools/setup.sh --help       this text
#
# Rust comes from https://rustup.rs and is never installed by this script. Packages that only root can install are named
# in one message, with those that `make test` will need, before anything is done; root gets them installed by apt-get.
# A CUDA compiler, CMake or Ninja that is already installed is used as it is. What is missing comes as wheels from PyPI,
# whose versions are pinned below, and is unpacked into .toolchain/wheels. Afterwards .toolchain/bin holds the tools and
# .toolchain/cuda is the CUDA toolkit, where build.rs looks for it.
#
# NVB_TOOLCHAIN names a folder that holds these wheels unpacked, such as the .toolchain/wheels of another checkout. It is
# used as it is and nothing is downloaded, so that a machine without a network can build.

set -eu

CUDA_WHEELS="nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85"
CMAKE_WHEEL="cmake==4.1.3"
NINJA_WHEEL="ninja==1.13.0"
FORMAT_WHEEL="clang-format==19.1.7"
CMAKE_OLDEST="3.22"

root=$(cd "$(dirname "$0")/.." && pwd)
toolchain="$root/.toolchain"
wheels="${NVB_TOOLCHAIN:-$toolchain/wheels}"
stamp="$toolchain/stamp"  # a checksum of the folder, which the links name, then the wheels in it

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }
has() { command -v "$1" >/dev/null 2>&1; }
has_header() { printf '#if !__has_include(<%s>)\n#error\n#endif\n' "$1" | c++ -x c++ -fsyntax-only - >/dev/null 2>&1; }

# at_least HAVE WANTED: compares versions such as 1.89 and 1.95.0 by their first two numbers.
at_least() {
  awk -v have="$1" -v want="$2" 'BEGIN {
    split(have, h, "."); split(want, w, "."); exit !(h[1] + 0 > w[1] + 0 || h[1] + 0 == w[1] + 0 && h[2] + 0 >= w[2] + 0) }'
}

# Prints what is wrong with the Rust that is installed, and nothing if it will do. $1: the purpose.
rust_problem() {
  wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$root/Cargo.toml")
  folder="${CARGO_HOME:-$HOME/.cargo}"
  if ! has cargo || ! has rustc; then
    if [ -x "$folder/bin/cargo" ]; then
      echo "Rust is installed in $folder, but not in this shell's PATH. Run this, then again what you ran:"
      echo "  . \"$folder/env\""
    else
      echo "Rust is missing. Rust $wanted or newer is needed; this installs it for you alone, without root:"
      echo "  curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh"
    fi
  elif ! version=$(rustc --version 2>&1); then
    echo "rustc does not run: $version"
  elif ! at_least "$(echo "$version" | cut -d' ' -f2)" "$wanted"; then
    echo "$version is too old: Rust $wanted or newer is needed."
    if has rustup; then
      echo "  rustup update"
    else
      echo "It lies in $(command -v rustc). This installs a newer one for you alone, without root, beside it:"
      echo "  curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh"
    fi
  elif [ "$1" = everything ] && ! { cargo fmt --version && cargo clippy --version; } >/dev/null 2>&1; then
    echo "rustfmt or clippy is missing, which \`make test\` runs:"
    echo "  rustup component add rustfmt clippy"
  fi
}

has_nvcc() {
  [ -n "${NVCC:-}" ] || [ -x "${CUDA_HOME:-/nonexistent}/bin/nvcc" ] || has nvcc || [ -x /usr/local/cuda/bin/nvcc ]
}

has_cmake() { has cmake && at_least "$(cmake --version | sed -n '1s/.* //p')" "$CMAKE_OLDEST"; }

# The wheels whose tools the system lacks. Formatting differs with another clang-format, so it is always the pinned one.
wheels_for() {
  list=
  has_cmake || list="$list $CMAKE_WHEEL"
  has ninja || list="$list $NINJA_WHEEL"
  [ "$1" != everything ] || list="$list $FORMAT_WHEEL"
  [ "$with_cuda" = no ] || has_nvcc || list="$list $CUDA_WHEELS"
  echo "$list"
}

# Prints the wheels among $* that .toolchain does not hold.
wheels_missing() {
  unpacked=$(cat "$stamp" 2>/dev/null || true)
  [ "${unpacked%% *}" = "$(folder_checksum)" ] && [ -d "$wheels" ] || unpacked=
  for wheel in "$@"; do
    case " $unpacked " in *" $wheel "*) ;; *) printf '%s ' "$wheel" ;; esac
  done
}

folder_checksum() { printf %s "$wheels" | cksum | cut -d" " -f1; }

# The Debian packages that the system lacks for a purpose: library, demo or everything.
packages_for() {
  has c++ && has cc || printf 'g++ '
  has make || printf 'make '
  if [ "$1" != library ]; then
    has_header sentencepiece_processor.h || printf 'libsentencepiece-dev '
    has_header nlohmann/json.hpp || printf 'nlohmann-json3-dev '
  fi
  # shellcheck disable=SC2046
  [ -n "${NVB_TOOLCHAIN:-}" ] || [ -z "$(wheels_missing $(wheels_for "$1"))" ] || packages_for_download
  if [ "$1" = everything ]; then
    has git || printf 'git '
    has pkg-config || printf 'pkg-config '
    has python3 || printf 'python3 '
    has valgrind || printf 'valgrind '
    has abidiff && has abidw || printf 'abigail-tools '
    has xz || printf 'xz-utils '
  fi
}

# pip comes with Python, or with a virtual environment, for which Debian has a package of its own.
packages_for_download() {
  has python3 || printf 'python3 '
  { python3 -m pip --version || python3 -c 'import ensurepip'; } >/dev/null 2>&1 || printf 'python3-venv '
  [ -n "${SSL_CERT_FILE:-}" ] || [ -e /etc/ssl/certs/ca-certificates.crt ] || [ -e /etc/pki/tls/certs ] ||
    printf 'ca-certificates '
}

# Words in order, each once and parted by a space.
one_of_each() { tr -s ' ' '\n' | sort -u | sed '/^$/d' | paste -s -d ' ' -; }

# One message for all that a person must do, before anything is installed or built.
check_system() {
  problem=$(rust_problem "$purpose")
  packages=$(packages_for "$purpose" | one_of_each)
  if [ -n "$packages" ] && has apt-get && [ "$(id -u)" = 0 ] && [ -z "$problem" ]; then
    install_debian_packages "$packages"
    return
  fi
  [ -n "$problem$packages" ] || return 0
  if [ -n "$problem" ]; then
    printf '%s\n' "$problem" | while IFS= read -r line; do say "$line"; done
    case $problem in *curl*) has curl || packages="$packages curl" ;; esac
  fi
  if [ -n "$packages" ]; then
    packages=$( (printf '%s ' "$packages"; packages_for everything) | one_of_each)
    if has apt-get; then
      say "Packages are missing that only root can install. This is all that \`make demo\` and \`make test\` need:"
      if [ "$(id -u)" = 0 ]; then say "  apt-get install -y $packages"
      elif has sudo; then say "  sudo apt-get install -y $packages"
      else say "  apt-get install -y $packages    (as root)"; fi
    else
      say "Packages are missing that only root can install. Install what matches these Debian packages, which is all that"
      say "\`make demo\` and \`make test\` need: $packages"
    fi
  fi
  die "Then run again what you ran."
}

install_debian_packages() {
  say "installing by apt-get: $1"
  export DEBIAN_FRONTEND=noninteractive
  # shellcheck disable=SC2086
  apt-get install -y -qq $1 >/dev/null 2>&1 ||
    { apt-get update -qq >/dev/null && apt-get install -y -qq $1 >/dev/null; } ||
    die "apt-get install -y $1 failed"
}

# Unpacks the wheels $* beside those that are there; the old ones go first where one of them has another version.
unpack_wheels() {
  python=python3
  if ! python3 -m pip --version >/dev/null 2>&1; then
    python="$toolchain/venv/bin/python"
    [ -x "$python" ] || python3 -m venv "$toolchain/venv" >/dev/null || die "python3 -m venv $toolchain/venv failed"
  fi
  say "downloading into .toolchain: $*"
  rm -rf "$wheels.partial"
  # --target keeps the wheels out of the system's Python, so PEP 668 does not forbid it.
  PIP_ROOT_USER_ACTION=ignore "$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
    --target "$wheels.partial" "$@" ||
    die "pip could not download $*. Without a network set NVB_TOOLCHAIN (tools/setup.sh --help)"
  mkdir -p "$wheels"
  # Not by pip itself, which leaves out what it would have to merge into an existing folder, such as bin/.
  cp -a "$wheels.partial/." "$wheels/"
  rm -rf "$wheels.partial"
}

# link FILE NAME: .toolchain/NAME becomes a link to the wheels' FILE where that exists.
link() { [ ! -e "$wheels/$1" ] || ln -sfn "$wheels/$1" "$toolchain/$2"; }

link_tools() {
  mkdir -p "$toolchain/bin"
  for tool in cmake ctest; do link "cmake/data/bin/$tool" "bin/$tool"; done
  link bin/ninja bin/ninja
  link clang_format/data/bin/clang-format bin/clang-format
  link nvidia/cu13 cuda
}

# The tool of a wheel, relative to .toolchain.
tool_of() {
  case $1 in
    nvidia-*) echo cuda/bin/nvcc ;;
    *) echo "bin/${1%%==*}" ;;
  esac
}

provide_wheels() {
  list=$(wheels_for "$purpose")
  # shellcheck disable=SC2086
  missing=$(wheels_missing $list)
  [ -n "$missing" ] || return 0
  unpacked=$(cat "$stamp" 2>/dev/null || true)
  if [ -z "${NVB_TOOLCHAIN:-}" ]; then
    [ "${unpacked%% *}" = "$(folder_checksum)" ] && [ -d "$wheels" ] || unpacked=
    for wheel in $missing; do
      case " $unpacked" in *" ${wheel%%==*}=="*) unpacked= ;; esac
    done
    if [ -z "$unpacked" ]; then
      rm -rf "$wheels"
      missing=$list
    fi
    # shellcheck disable=SC2086
    unpack_wheels $missing
  else
    unpacked=
    missing=$list
  fi
  link_tools
  for wheel in $missing; do
    [ -x "$toolchain/$(tool_of "$wheel")" ] ||
      die "$wheels holds no $wheel. Unpack it there:  python3 -m pip install --no-deps --target DIR $wheel"
  done
  # shellcheck disable=SC2086
  echo "$(folder_checksum)" ${unpacked#* } $missing >"$stamp"
}

purpose=everything
with_cuda=yes
for option in "$@"; do
  case $option in
    --demo) purpose=demo ;;
    --library) purpose=library ;;
    --cpu) with_cuda=no ;;
    -h | --help)
      sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
      exit
      ;;
    *) die "unknown option $option; --help lists them" ;;
  esac
done

# `make` puts .toolchain/bin first; what the system has must be judged without it.
PATH=$(printf '%s' "$PATH" | awk -v RS=: -v ORS=: -v own="$toolchain/bin" '$0 != own')
PATH=${PATH%:}
check_system
mkdir -p "$toolchain"
provide_wheels
