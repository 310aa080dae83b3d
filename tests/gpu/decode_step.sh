#!/usr/bin/env bash
# Builds tests/gpu/decode_step.cu and the kernels beside it with nvcc alone, into target/gpu/, and runs it with the arguments
# where there is a GPU. NVCC names another nvcc; without one, what an earlier call built is run.
set -euo pipefail
cd "$(dirname "$0")/../.."
nvcc=${NVCC:-$(command -v nvcc || echo .toolchain/cuda/bin/nvcc)}
program=target/gpu/decode_step
if [ -x "$nvcc" ]; then
  mkdir -p target/gpu
  # A toolkit out of packages has its libraries beside bin/, and not all of them.
  libraries=$(dirname "$(readlink -f "$nvcc")")/../lib
  flags=(-std=c++17 -O3 --expt-relaxed-constexpr -Icsrc -Itests/gpu -gencode "arch=compute_90a,code=sm_90a")
  "$nvcc" "${flags[@]}" tests/gpu/decode_step.cu tests/gpu/decode_step_int4.cu tests/gpu/decode_step_int8.cu tests/gpu/decode_step_gemv.cu \
    csrc/linear/sm90/linear_gemv_ring.cu csrc/rms_norm/rms_norm.cu csrc/common/constant_reads.cu csrc/common/shared_limit.cu \
    -cudadevrt none "-L$libraries" -o "$program"
fi
# A kernel that is loaded when it is first launched would be loaded during a capture.
export CUDA_MODULE_LOADING=EAGER
if [ -e /dev/nvidiactl ]; then exec "$program" "$@"; fi
echo "$program is built; there is no GPU to run it"
