#!/usr/bin/env bash
# Builds tests/gpu/attention_head_terms.cu and the kernels beside it with nvcc alone, into target/gpu/, and runs it with the
# arguments where there is a GPU. NVCC names another nvcc; without one, what an earlier call built is run.
set -euo pipefail
cd "$(dirname "$0")/../.."
nvcc=${NVCC:-$(command -v nvcc || echo .toolchain/cuda/bin/nvcc)}
program=target/gpu/attention_head_terms
if [ -x "$nvcc" ]; then
  mkdir -p target/gpu
  # A toolkit out of packages has its libraries beside bin/, and not all of them.
  libraries=$(dirname "$(readlink -f "$nvcc")")/../lib
  flags=(-std=c++17 -O3 --expt-relaxed-constexpr -Icsrc -Itests/gpu -gencode "arch=compute_90a,code=sm_90a")
  "$nvcc" "${flags[@]}" tests/gpu/attention_head_terms.cu csrc/attention/attention_prefill_simt.cu \
    csrc/attention/attention_decode_simt.cu csrc/attention/sm80/attention_decode_mma.cu -cudadevrt none "-L$libraries" -o "$program"
fi
if [ -e /dev/nvidiactl ]; then exec "$program" "$@"; fi
echo "$program is built; there is no GPU to run it"
