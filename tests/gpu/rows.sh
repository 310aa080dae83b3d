#!/usr/bin/env bash
# Builds tests/gpu/rows.cu and the kernels beside it with nvcc alone, into target/gpu/, and runs it where there is a GPU.
# NVCC names another nvcc; without one, what an earlier call built is run.
set -euo pipefail
cd "$(dirname "$0")/../.."
nvcc=${NVCC:-$(command -v nvcc || echo .toolchain/cuda/bin/nvcc)}
program=target/gpu/rows
if [ -x "$nvcc" ]; then
  mkdir -p target/gpu
  # A toolkit out of packages has its libraries beside bin/, and not all of them.
  libraries=$(dirname "$(readlink -f "$nvcc")")/../lib
  flags=(-std=c++17 -O3 --expt-relaxed-constexpr -Icsrc -Itests/gpu
         -gencode "arch=compute_80,code=sm_80" -gencode "arch=compute_90a,code=sm_90a")
  "$nvcc" "${flags[@]}" tests/gpu/rows.cu csrc/sort_rows/sort_rows.cu csrc/sum_rows/sum_rows.cu csrc/l2_norm/l2_norm.cu \
    -cudadevrt none "-L$libraries" -o "$program"
fi
if [ -e /dev/nvidiactl ]; then exec "$program" "$@"; fi
echo "$program is built; there is no GPU to run it"
