#!/usr/bin/env bash
# Builds tests/gpu/attention_kv_rows.cu with the kernels that it calls by nvcc alone, into target/gpu/, and runs it with the
# arguments (check, bench) where there is a GPU. NVCC names another nvcc; without one, what an earlier call built is run.
set -euo pipefail
cd "$(dirname "$0")/../.."
nvcc=${NVCC:-$(command -v nvcc || echo .toolchain/cuda/bin/nvcc)}
program=target/gpu/attention_kv_rows
if [ -x "$nvcc" ]; then
  mkdir -p target/gpu
  # A toolkit out of packages has its libraries beside bin/, and not all of them.
  libraries=$(dirname "$(readlink -f "$nvcc")")/../lib
  flags=(-std=c++17 -O3 --expt-relaxed-constexpr -Icsrc -Itests/gpu -gencode "arch=compute_90a,code=sm_90a")
  attention=csrc/attention
  "$nvcc" "${flags[@]}" tests/gpu/attention_kv_rows.cu "$attention"/sm90/attention_decode_rows.cu \
    "$attention"/sm80/attention_decode_mma.cu "$attention"/attention_decode_simt.cu "$attention"/attention_prefill_simt.cu csrc/rope/rope.cu csrc/common/constant_reads.cu -cudadevrt none "-L$libraries" -o "$program"
fi
if [ -e /dev/nvidiactl ]; then exec "$program" "$@"; fi
echo "$program is built; there is no GPU to run it"
