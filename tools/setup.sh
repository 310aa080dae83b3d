#!/bin/sh
# Puts what the build needs into the checkout's .toolchain/, or names the one command that installs it.
#
#   tools/setup.sh          everything: CUDA compiler, CMake, Ninja, clang-format, the examples' libraries
#   tools/setup.sh --cpu    no CUDA compiler: for a library that runs on the CPU alone
#   tools/setup.sh --valgrind    valgrind and nothing else: for `make test-helgrind`
#
# A CUDA compiler, CMake or Ninja that is already installed is used as it is. What is missing comes as wheels from PyPI,
# pinned below. NVB_TOOLCHAIN names a folder that holds these wheels unpacked; nothing is downloaded then.
# Afterwards .toolchain/bin holds the tools and .toolchain/cuda is the CUDA toolkit, where build.rs looks for it.
set -eu

CUDA_WHEELS="nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85"
CMAKE_WHEEL="cmake==4.1.3"
NINJA_WHEEL="ninja==1.13.0"
FORMAT_WHEEL="clang-format==19.1.7"
CMAKE_OLDEST="3.22"
DEBIAN_PACKAGES="g++ make pkg-config libsentencepiece-dev nlohmann-json3-dev"

root=$(cd "$(dirname "$0")/.." && pwd)
toolchain="$root/.toolchain"
wheels="${NVB_TOOLCHAIN:-$toolchain/wheels}"
with_cuda=yes
[ "${1:-}" = "--cpu" ] && with_cuda=no

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }
has() { command -v "$1" >/dev/null 2>&1; }

# Runs a command as root, or ends by naming it.
as_root() {
  if [ "$(id -u)" = 0 ]; then
    "$@"
  else
    die "run this once, then again what you ran:  sudo $*"
  fi
}

install_debian_packages() {
  has apt-get || die "install the equivalents of these Debian packages: $*"
  [ "$(id -u)" = 0 ] || as_root apt-get install -y "$@"
  say "installing $*"
  export DEBIAN_FRONTEND=noninteractive
  apt-get install -y -qq "$@" >/dev/null 2>&1 ||
    { apt-get update -qq >/dev/null && apt-get install -y -qq "$@" >/dev/null; } ||
    die "apt-get install -y $* failed"
}

if [ "${1:-}" = "--valgrind" ]; then
  has valgrind || install_debian_packages valgrind
  exit
fi

has_header() { printf '#if !__has_include(<%s>)\n#error\n#endif\n' "$1" | c++ -x c++ -fsyntax-only - >/dev/null 2>&1; }

check_system() {
  has cargo || die "Rust is missing: https://rustup.rs"
  if ! has c++ || ! has make || ! has pkg-config || ! has_header sentencepiece_processor.h ||
    ! has_header nlohmann/json.hpp; then
    # shellcheck disable=SC2086
    install_debian_packages $DEBIAN_PACKAGES
  fi
}

has_nvcc() {
  [ -n "${NVCC:-}" ] || [ -x "${CUDA_HOME:-/nonexistent}/bin/nvcc" ] || has nvcc || [ -x /usr/local/cuda/bin/nvcc ]
}

has_cmake() {
  has cmake && cmake --version | awk -v oldest="$CMAKE_OLDEST" 'NR == 1 {
    split($3, have, "."); split(oldest, want, "."); exit !(have[1] > want[1] || have[1] == want[1] && have[2] >= want[2]) }'
}

# The wheels to unpack: those whose tool the system lacks. Without clang-format 19 formatting would differ, so it is
# always the pinned one.
choose_wheels() {
  list="$FORMAT_WHEEL"
  has_cmake || list="$list $CMAKE_WHEEL"
  has ninja || list="$list $NINJA_WHEEL"
  [ $with_cuda = no ] || has_nvcc || list="$list $CUDA_WHEELS"
  echo "$list"
}

unpack_wheels() {
  has python3 || install_debian_packages python3
  python="python3"
  if ! python3 -m pip --version >/dev/null 2>&1; then
    # Debian's python3 comes without pip; a virtual environment brings its own where python3-venv is installed.
    python="$toolchain/venv/bin/python"
    if ! python3 -m venv "$toolchain/venv" >/dev/null 2>&1; then
      rm -rf "$toolchain/venv"
      install_debian_packages python3-venv
      python3 -m venv "$toolchain/venv" >/dev/null
    fi
  fi
  say "unpacking into .toolchain: $*"
  rm -rf "$wheels"
  # --target keeps the wheels out of the system's Python, so PEP 668 does not forbid it.
  PIP_ROOT_USER_ACTION=ignore "$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target "$wheels" "$@" ||
    die "pip could not install $*"
}

# Links $1, if it exists, as $2.
link() { [ ! -e "$1" ] || ln -sfn "$1" "$2"; }

link_tools() {
  mkdir -p "$toolchain/bin"
  for tool in cmake ctest; do link "$wheels/cmake/data/bin/$tool" "$toolchain/bin/$tool"; done
  link "$wheels/bin/ninja" "$toolchain/bin/ninja"
  link "$wheels/clang_format/data/bin/clang-format" "$toolchain/bin/clang-format"
  link "$wheels/nvidia/cu13" "$toolchain/cuda"
}

# `make` puts .toolchain/bin first; what the system has must be judged without it.
PATH=$(printf '%s' "$PATH" | awk -v RS=: -v ORS=: -v own="$toolchain/bin" '$0 != own')
PATH=${PATH%:}
check_system
mkdir -p "$toolchain"
stamp="$toolchain/stamp"  # a checksum of the folder, which the links name, then the wheels in it
folder=$(printf %s "$wheels" | cksum | cut -d" " -f1)
list=$(choose_wheels)
unpacked=$(cat "$stamp" 2>/dev/null || true)
missing=
for wheel in $list; do
  case " $unpacked " in *" $wheel "*) ;; *) missing="$missing $wheel" ;; esac
done
if [ -n "$missing" ] || [ "${unpacked%% *}" != "$folder" ]; then
  # shellcheck disable=SC2086
  [ -n "${NVB_TOOLCHAIN:-}" ] || unpack_wheels $list
  link_tools
  printf '%s %s\n' "$folder" "$list" >"$stamp"
fi
