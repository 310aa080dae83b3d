#!/usr/bin/env bash
# Builds tests/gpu/grouped_linear_sorted_blocks.cu with nvcc alone, into target/gpu/, and runs it where there is a GPU. NVCC names another nvcc;
# without one, what an earlier call built is run.
set -euo pipefail
cd "$(dirname "$0")/../.."
nvcc=${NVCC:-$(command -v nvcc || echo .toolchain/cuda/bin/nvcc)}
program=target/gpu/grouped_linear_sorted_blocks
if [ -x "$nvcc" ]; then
  mkdir -p target/gpu
  # A toolkit out of packages has its libraries beside bin/, and not all of them.
  libraries=$(dirname "$(readlink -f "$nvcc")")/../lib
  "$nvcc" -std=c++17 -O3 --expt-relaxed-constexpr -Icsrc -Itests/gpu -gencode "arch=${ARCH:-compute_90a,code=sm_90a}" \
    tests/gpu/grouped_linear_sorted_blocks.cu csrc/common/linear_epilogue.cu csrc/common/shared_limit.cu -cudadevrt none "-L$libraries" -o "$program"
fi
if [ -e /dev/nvidiactl ]; then exec "$program" "$@"; fi
echo "$program is built; there is no GPU to run it"
