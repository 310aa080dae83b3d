#!/bin/sh
# What tools/setup.sh says and does on machines that lack something. Each case runs a copy of it with a PATH of links to
# the few system tools that it needs and of programs made up here, as an ordinary user, whoever runs this test.
#
#   setup.sh WORK_FOLDER
set -eu
source=$(cd "$(dirname "$0")/../.." && pwd)
work=$1
. "$source/tests/gates/work_folder.sh"
mkdir -p "$work/checkout/tools" "$work/bin" "$work/home"
cp "$source/tools/setup.sh" "$work/checkout/tools/"
cp "$source/Cargo.toml" "$work/checkout/"
for tool in sh awk cat chmod cksum cp cut dirname ln mkdir paste rm sed sort tr; do
  ln -s "$(command -v $tool)" "$work/bin/$tool"
done

fail() { printf 'setup gate: %s; it said:\n' "$*" >&2; cat "$work/said" >&2; exit 1; }

# program NAME [LINE]: puts a program into the PATH that runs the line.
program() { printf '#!/bin/sh\n%s\n' "${2:-}" >"$work/bin/$1"; chmod +x "$work/bin/$1"; }
# lacks NAME...: takes them out again.
lacks() { for name in "$@"; do rm -f "$work/bin/$name"; done; }
# setup CODE [VARIABLE=VALUE...] -- OPTION...: runs it and expects this exit code.
setup() {
  code=$1
  shift
  variables=
  while [ "$1" != -- ]; do variables="$variables $1"; shift; done
  shift
  result=0
  # shellcheck disable=SC2086
  env -i PATH="$work/bin" HOME="$work/home" $variables "$work/checkout/tools/setup.sh" "$@" >"$work/said" 2>&1 || result=$?
  [ "$result" = "$code" ] || fail "exit code $result instead of $code"
}
says() { for text in "$@"; do grep -qF -- "$text" "$work/said" || fail "it does not say \"$text\""; done; }
# A machine that has everything and no network: each way to download ends the case.
complete() {
  program id 'echo 1000'
  program apt-get 'echo apt-get was run; exit 1'
  program sudo 'echo sudo was run; exit 1'
  program rustc 'echo "rustc 1.95.0 (59807616e 2026-04-14)"'
  for name in cargo cc c++ make ninja git pkg-config valgrind abidiff abidw xz curl; do program $name; done
  program cmake 'echo "cmake version 3.25.1"'
  program python3 'case "$*" in *"pip --version"*) exit 0 ;; *) echo downloading "$*"; exit 1 ;; esac'
  rm -rf "$work/checkout/.toolchain"
}

complete
setup 0 -- --help
says "--demo" "--library" "--cpu" "NVB_TOOLCHAIN"
setup 1 -- --no-such-option
says "unknown option --no-such-option"

# Debian 12's Rust: named with what is needed and how to get it, before anything else is done.
program rustc 'echo "rustc 1.63.0"'
lacks rustup ninja
wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$source/Cargo.toml")
setup 1 -- --demo --cpu
says "rustc 1.63.0 is too old" "$wanted" "https://sh.rustup.rs"
[ ! -e "$work/checkout/.toolchain" ] || fail "it began to work with a Rust that is too old"
program rustup
setup 1 -- --demo --cpu
says "rustup update"
lacks rustc cargo
setup 1 -- --demo --cpu
says "Rust is missing" "$wanted" "https://sh.rustup.rs"
mkdir -p "$work/home/.cargo/bin"
cp "$work/bin/make" "$work/home/.cargo/bin/cargo"
setup 1 -- --demo --cpu
says "not in this shell's PATH" ". \"$work/home/.cargo/env\""
rm -r "$work/home/.cargo"

# One message for all that root must install, whichever command meets it, and nothing is downloaded before.
for options in "--demo --cpu" "--cpu"; do
  complete
  lacks c++ ninja valgrind git pkg-config abidiff xz
  program python3 'exit 1'
  # shellcheck disable=SC2086
  setup 1 -- $options
  says "sudo apt-get install -y abigail-tools g++ git libsentencepiece-dev nlohmann-json3-dev pkg-config python3-venv valgrind xz-utils"
  grep -q "was run\|downloading" "$work/said" && fail "it did something before it asked"
done
lacks sudo
setup 1 -- --demo --cpu
says "  apt-get install -y abigail-tools g++" "(as root)"
lacks apt-get
setup 1 -- --demo --cpu
says "what matches these Debian packages" "valgrind"

# The demo stops for nothing that `make test` alone needs, and without a network neither for what is there already.
complete
lacks valgrind git pkg-config abidiff xz
setup 0 -- --demo --cpu
[ ! -s "$work/said" ] || fail "it spoke although nothing was missing"
lacks ninja
setup 1 -- --demo --cpu
says "downloading into .toolchain: ninja" "NVB_TOOLCHAIN"

# A folder of unpacked wheels stands in for the network, and is told when it is not whole.
complete
lacks ninja
mkdir -p "$work/wheels/bin"
setup 1 "NVB_TOOLCHAIN=$work/wheels" -- --demo --cpu
says "$work/wheels holds no ninja=="
cp "$work/bin/make" "$work/wheels/bin/ninja"
setup 0 "NVB_TOOLCHAIN=$work/wheels" -- --demo --cpu
[ -x "$work/checkout/.toolchain/bin/ninja" ] || fail "ninja was not linked"
setup 1 "NVB_TOOLCHAIN=$work/wheels" -- --cpu
says "$work/wheels holds no clang-format=="

# A second purpose downloads what is missing beside what is there, and nothing again.
complete
lacks ninja
program python3 'case "$*" in
  *"pip --version"*) exit 0 ;;
  *ninja*clang-format* | *clang-format*ninja*) echo "both are downloaded"; exit 1 ;;
esac
while [ "$1" != --target ]; do shift; done
mkdir -p "$2/bin" "$2/clang_format/data/bin"
case "$3" in
  ninja*) cp "$0" "$2/bin/ninja" ;;
  *) cp "$0" "$2/clang_format/data/bin/clang-format" ;;
esac'
setup 0 -- --demo --cpu
says "downloading into .toolchain: ninja"
setup 0 -- --demo --cpu
[ ! -s "$work/said" ] || fail "it downloaded twice"
setup 0 -- --cpu
says "downloading into .toolchain: clang-format"
for tool in ninja clang-format; do [ -x "$work/checkout/.toolchain/bin/$tool" ] || fail "$tool is gone"; done
setup 0 -- --cpu
[ ! -s "$work/said" ] || fail "it downloaded three times"
