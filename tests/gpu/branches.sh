#!/usr/bin/env bash
# Builds tests/gpu/branches.cu and the kernels beside it with nvcc alone, into target/gpu/, and runs it where there is a GPU.
# NVCC names another nvcc; without one, what an earlier call built is run.
set -euo pipefail
cd "$(dirname "$0")/../.."
nvcc=${NVCC:-$(command -v nvcc || echo .toolchain/cuda/bin/nvcc)}
program=target/gpu/branches
if [ -x "$nvcc" ]; then
  mkdir -p target/gpu
  # A toolkit out of packages has its libraries beside bin/, and not all of them.
  libraries=$(dirname "$(readlink -f "$nvcc")")/../lib
  flags=(-std=c++17 -O3 --expt-relaxed-constexpr -Icsrc -Itests/gpu -gencode "arch=compute_90a,code=sm_90a")
  "$nvcc" "${flags[@]}" tests/gpu/branches.cu tests/gpu/decode_step_gemv.cu csrc/linear/sm90/linear_gemv_ring.cu \
    csrc/rms_norm/rms_norm.cu csrc/common/constant_reads.cu csrc/common/shared_limit.cu -cudadevrt none "-L$libraries" -o "$program"
fi
if [ -e /dev/nvidiactl ]; then exec "$program" "$@"; fi
echo "$program is built; there is no GPU to run it"
