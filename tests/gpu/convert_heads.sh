#!/usr/bin/env bash
# Builds tests/gpu/convert_heads.cu, its kernels and those of FP8 attention with nvcc alone, into target/gpu/, and runs it with the
# arguments where there is a GPU. NVCC names another nvcc; without one, what an earlier call built is run.
set -euo pipefail
cd "$(dirname "$0")/../.."
nvcc=${NVCC:-$(command -v nvcc || echo .toolchain/cuda/bin/nvcc)}
program=target/gpu/convert_heads
if [ -x "$nvcc" ]; then
  mkdir -p target/gpu
  # A toolkit out of packages has its libraries beside bin/, and not all of them.
  libraries=$(dirname "$(readlink -f "$nvcc")")/../lib
  flags=(-std=c++17 -O3 --expt-relaxed-constexpr -Icsrc -Itests/gpu -gencode "arch=compute_90a,code=sm_90a")
  for tile in D64 D128 D128_LONG D256; do
    for element in e4m3 e5m2; do
      unit=target/gpu/convert_heads_${tile}_$element
      {
        echo '#include "attention/sm90/attention_prefill_fp8.cuh"'
        echo "template cudaError_t nvb::prefill_fp8::launch_tile<__nv_fp8_$element, nvb::prefill_fp8::tiles::$tile>("
        echo "    const nvb::prefill_wgmma::Arguments&, int, const nvb_launch&);"
      } > "$unit.cu"
      printf '%s\0' "$unit"
    done
  done | xargs -0 -P "$(nproc)" -I{} "$nvcc" "${flags[@]}" -c {}.cu -o {}.o
  "$nvcc" "${flags[@]}" tests/gpu/convert_heads.cu csrc/convert_heads/convert_heads.cu csrc/attention/sm90/attention_prefill_fp8.cu \
    target/gpu/convert_heads_D*.o -cudadevrt none "-L$libraries" -o "$program"
fi
if [ -e /dev/nvidiactl ]; then exec "$program" "$@"; fi
echo "$program is built; there is no GPU to run it"
