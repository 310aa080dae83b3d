#!/usr/bin/env bash
# Builds tests/gpu/attention_prefill_wgmma.cu and its kernels with nvcc alone, into target/gpu/, and runs it with the arguments
# where there is a GPU. NVCC names another nvcc; without one, what an earlier call built is run.
set -euo pipefail
cd "$(dirname "$0")/../.."
nvcc=${NVCC:-$(command -v nvcc || echo .toolchain/cuda/bin/nvcc)}
program=target/gpu/attention_prefill_wgmma
if [ -x "$nvcc" ]; then
  mkdir -p target/gpu
  # A toolkit out of packages has its libraries beside bin/, and not all of them.
  libraries=$(dirname "$(readlink -f "$nvcc")")/../lib
  flags=(-std=c++17 -O3 --expt-relaxed-constexpr -Icsrc -Itests/gpu -gencode "arch=compute_90a,code=sm_90a")
  for tile in D64 D64_SHORT D96 D128 D128_FULL D192 D192_128 D256 D64_SCORES D128_SCORES D256_SCORES; do
    unit=target/gpu/attention_prefill_wgmma_$tile
    {
      echo '#include "attention/sm90/attention_prefill_wgmma.cuh"'
      for element in __half __nv_bfloat16; do
        echo "template cudaError_t nvb::prefill_wgmma::launch_tile<$element, nvb::prefill_wgmma::tiles::$tile>("
        echo "    const nvb::prefill_wgmma::Arguments&, int, const nvb_launch&);"
      done
    } > "$unit.cu"
    printf '%s\0' "$unit"
  done | xargs -0 -P "$(nproc)" -I{} "$nvcc" "${flags[@]}" -c {}.cu -o {}.o
  "$nvcc" "${flags[@]}" tests/gpu/attention_prefill_wgmma.cu csrc/attention_merge/attention_merge.cu \
    target/gpu/attention_prefill_wgmma_D*.o -cudadevrt none "-L$libraries" -o "$program"
fi
if [ -e /dev/nvidiactl ]; then exec "$program" "$@"; fi
echo "$program is built; there is no GPU to run it"
