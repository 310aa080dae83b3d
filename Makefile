# `make` alone prints what there is. Everything is built inside the checkout: target/ (Cargo), build/ (CMake),
# .toolchain/ (tools that the system lacks). Wherever CARGO_TARGET_DIR is set, it replaces target/.
.DEFAULT_GOAL := help
.PHONY: help setup fetch demo test library install uninstall bench gpu-bundle gpu-programs header abi format lint clean \
        dist fuzz test-rust test-models test-tsan test-fuzz test-helgrind test-aarch64 test-cpu-only build-native \
        test-native test-fault-sweep test-dist test-readme test-engines test-engines-sample build-plugin wheel

export CARGO_TARGET_DIR ?= $(CURDIR)/target
export PATH := $(CURDIR)/.toolchain/bin:$(PATH)
# A CPU-only library keeps its own folder, or it would replace the library with kernels and be replaced in turn.
CPU_ONLY := --no-default-features --target-dir "$(CARGO_TARGET_DIR)/cpu-only"
# What tests are built for: the plain 8.0 kernels, and those of 9.0 that use wgmma and TMA.
TEST_ARCHITECTURES ?= 80,90a
HOST = $(shell rustc -vV | sed -n 's/^host: //p')
# The shared library, which nobody runs here, is linked without the sanitizer's functions.
SANITIZED := -Clink-arg=-Wl,--warn-unresolved-symbols
FUZZ_SECONDS ?= 60
SOURCES := git ls-files '*.c' '*.h' '*.cpp' '*.hpp' '*.cu' '*.cuh' ':!include/nvbackend.h' ':!include/nvbackend_operations.hpp' \
           ':!csrc/driver/symbols.h' ':!csrc/driver/statuses.h'
# The modules that `plain_operations!` declares, which `cargo fmt` does not see.
OPERATIONS := $(shell sed -n '/macro_rules! plain_operations/,/^}/s/^ *[A-Z][A-Za-z0-9]* \([a-z0-9_]*\);$$/\1/p' src/operation/mod.rs)
OPERATION_FILES := $(foreach name,$(OPERATIONS),$(wildcard src/*/$(name).rs tests/conformance/$(name).rs))

help: ## print this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

setup: ## install what is missing, into the checkout where that is possible
	@tools/setup.sh

fetch: setup ## download all that `make demo` and `make test` need, which then work without a network
	cargo fetch --locked
	cargo fetch --locked --manifest-path tests/models/Cargo.toml
	cargo fetch --locked --manifest-path fuzz/Cargo.toml
	tests/engines/run.py build/engines --fetch

demo: ## build the library and the examples, and let the shipped Gemma model write
	@tools/demo.sh

# Two at a time where a part keeps one core busy for minutes: the fuzzers' library is one unit of code, and they, helgrind and
# ThreadSanitizer run one thread.
test: setup lint test-rust ## run every test and gate
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target test-fuzz test-models test-tsan test-helgrind
	@$(MAKE) --no-print-directory test-native test-engines-sample test-dist test-readme
	@echo "make test: all passed"

library: ## build the library alone, for this machine's GPU or CPU
	@tools/build.sh --library

PREFIX ?= /usr/local
install: ## install the library for other projects below PREFIX=/usr/local
	@tools/install.sh "$(PREFIX)"

uninstall: ## remove what the last `make install` installed below PREFIX=/usr/local
	@tools/install.sh --remove "$(PREFIX)"

# DIST: some of x86_64-cpu, x86_64-cuda, aarch64-cpu.
dist: setup ## pack relocatable archives of the library into build/dist/, and use each of them
	tools/dist.sh $(DIST)
	tests/gates/dist.sh "$(CURDIR)/build/dist-test" build/dist/*.tar.xz

wheel: dist ## pack the library and the plug-in for ggml as wheels for pip, into build/dist/wheels/, and install each
	rm -rf build/dist/wheels
	tools/wheel.py build/dist/wheels build/dist/*.tar.xz
	for wheel in build/dist/wheels/*_$(shell uname -m).whl; do tests/gates/wheel.py build/wheel-test "$$wheel" || exit 1; done

bench: ## measure every operation on this machine, beside its peers
	@tools/build.sh
	python3 benches/run.py

gpu-bundle: setup ## pack tests and benchmarks for a machine with a GPU and no Rust
	NVB_CUDA_ARCHITECTURES="$(TEST_ARCHITECTURES)" tools/gpu_bundle.py

gpu-programs: setup ## build each program of tests/gpu, which `make test` does not, and run it where there is a GPU
	for script in tests/gpu/*.sh; do echo "$$script"; "$$script" || exit 1; done

header: ## write include/nvbackend.h, its layout and the list of exports from src/capi
	NVB_UPDATE_HEADER=1 cargo test --release $(CPU_ONLY) --test header
	NVB_UPDATE_HEADER=1 cargo test --release $(CPU_ONLY) --test abi_layout
	cargo build --release $(CPU_ONLY)
	tests/gates/exports.sh "$(CARGO_TARGET_DIR)/cpu-only/release/libnvbackend.so" --write

abi: setup ## write the dump that the ABI is compared with; a change that breaks it raises NVB_ABI_VERSION first
	tests/gates/abi.sh "$(CURDIR)/build/abi" --write

format: setup ## format Rust, C, C++ and CUDA
	cargo fmt
	rustfmt --edition 2021 $(OPERATION_FILES)
	cargo fmt --manifest-path tests/models/Cargo.toml
	cargo fmt --manifest-path fuzz/Cargo.toml
	$(SOURCES) | xargs clang-format -i

lint: setup ## check formatting, and clippy without a warning
	cargo fmt --check
	rustfmt --edition 2021 --check $(OPERATION_FILES)
	cargo fmt --check --manifest-path tests/models/Cargo.toml
	cargo fmt --check --manifest-path fuzz/Cargo.toml
	$(SOURCES) | xargs clang-format --dry-run --Werror
	tools/list_driver_symbols.py --check
	tests/gates/dependencies.py
	tests/gates/layers.py
	tests/gates/records.py
	tests/gates/supported.py
	tests/gates/bindings.py
	tests/tools/test_records.py
	tests/tools/test_layers.py
	tests/tools/test_bindings.py
	NVB_CUDA_ARCHITECTURES="$(TEST_ARCHITECTURES)" cargo clippy --release --locked --all-targets -- -D warnings
	cargo clippy --release --locked $(CPU_ONLY) -- -D warnings

test-rust: setup
	NVB_CUDA_ARCHITECTURES="$(TEST_ARCHITECTURES)" cargo test --release --locked

test-models: setup
	cargo test --release --locked --manifest-path tests/models/Cargo.toml

test-tsan: setup ## run the many-thread tests of the memory manager under ThreadSanitizer
	TSAN_OPTIONS="suppressions=$(CURDIR)/tests/sanitizers/thread.txt" RUSTC_BOOTSTRAP=1 \
	  RUSTFLAGS="--cfg nvb_thread_sanitizer -Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer $(SANITIZED)" \
	  cargo test --release --locked --no-default-features --target $(HOST) --target-dir "$(CARGO_TARGET_DIR)/tsan" \
	  --test memory threads:: -- --test-threads=1

test-helgrind: setup ## run a C program with threads under valgrind's helgrind
	cargo build --release --locked $(CPU_ONLY)
	tests/sanitizers/helgrind.sh "$(CARGO_TARGET_DIR)/cpu-only/release/libnvbackend.so"

# Needs `rustup target add aarch64-unknown-linux-gnu`, Debian's gcc-aarch64-linux-gnu and qemu-user-static.
test-aarch64: setup ## run the unit tests on an emulated Arm CPU
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
	  CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64-static -L /usr/aarch64-linux-gnu" \
	  cargo test --release --locked --no-default-features --target aarch64-unknown-linux-gnu \
	  --target-dir "$(CARGO_TARGET_DIR)/aarch64" --lib

# FUZZ_TARGETS: some of fuzz/Cargo.toml's; FUZZ_OPTIONS: --address.
fuzz: setup ## fuzz the header, files and JSON, each for FUZZ_SECONDS (60)
	fuzz/run.sh $(FUZZ_OPTIONS) $(FUZZ_SECONDS) $(FUZZ_TARGETS)

# Long enough for the kept inputs and thousands of new ones; most of its time is the build.
test-fuzz: FUZZ_SECONDS := 20
test-fuzz: fuzz ## the same for 20 seconds each, as `make test` does

# Before ctest, whose tests named *_cpu_only run with this library.
test-cpu-only: setup
	cargo build --release --locked $(CPU_ONLY)

build-native: setup
	cmake -S . -B build/test -G Ninja -DCMAKE_BUILD_TYPE=Release -DNVBACKEND_CUDA=ON \
	  -DCMAKE_CUDA_ARCHITECTURES="$(TEST_ARCHITECTURES)" -DNVBACKEND_CARGO_TARGET_DIR="$(CARGO_TARGET_DIR)"
	cmake --build build/test

test-native: build-native test-cpu-only
	ctest --test-dir build/test --output-on-failure -j "$(shell nproc)"

test-fault-sweep: build-native ## let each driver call of whole programs fail in turn, on the fake driver
	ctest --test-dir build/test --output-on-failure -C Sweep -R '^fault_sweep_.*_long$$' --verbose

# With the CPU executor, and in a folder of its own, whose hosts are kept: the first run downloads and builds them.
build-plugin: setup
	cmake -S . -B build/engines/library -G Ninja -DCMAKE_BUILD_TYPE=Release -DNVBACKEND_CUDA=OFF -DNVBACKEND_BUILD_TESTS=OFF \
	  -DNVBACKEND_BUILD_EXAMPLES=OFF -DNVBACKEND_CARGO_TARGET_DIR="$(CARGO_TARGET_DIR)/cpu-only"
	cmake --build build/engines/library

test-engines: build-plugin ## test the plug-in for ggml in llama.cpp and other hosts, which are downloaded
	tests/engines/run.py build/engines build/engines/library/lib build/engines/library/lib/libggml-nvb.so
	rm -rf build/engines/install build/engines/wheels
	cmake --install build/engines/library --prefix build/engines/install
	tools/wheel.py build/engines/wheels build/engines/install
	tests/gates/wheel.py build/wheel-test build/engines/wheels/*.whl build/engines/host/bin/libggml.so

test-engines-sample: build-plugin ## some cases of every operation of the plug-in, in one host
	tests/engines/run.py build/engines build/engines/library/lib build/engines/library/lib/libggml-nvb.so --sample

# The archive for the CPU alone, whose build takes two minutes.
test-dist: setup
	tools/dist.sh "$(shell uname -m)-cpu"
	tests/gates/dist.sh "$(CURDIR)/build/dist-test" "$(CURDIR)"/build/dist/*-$(shell uname -m)-cpu.tar.xz
	rm -rf build/wheel-test-wheels
	tools/wheel.py build/wheel-test-wheels build/dist/*-$(shell uname -m)-cpu.tar.xz
	tests/gates/wheel.py build/wheel-test build/wheel-test-wheels/*.whl

test-readme: setup
	tests/gates/readme.py build/readme

clean: ## remove what was built, but not .toolchain/
	cargo clean
	rm -rf build gpu-bundle gpu-bundle.tar.xz
