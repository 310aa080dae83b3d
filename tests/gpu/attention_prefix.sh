#!/usr/bin/env bash
# Builds tests/gpu/attention_prefix.cu, the decode kernel of 8.0 and tiles of the prefill of 9.0 with nvcc alone, into target/gpu/, and runs it with
# the arguments where there is a GPU. NVCC names another nvcc; without one, what an earlier call built is run.
set -euo pipefail
cd "$(dirname "$0")/../.."
nvcc=${NVCC:-$(command -v nvcc || echo .toolchain/cuda/bin/nvcc)}
program=target/gpu/attention_prefix
if [ -x "$nvcc" ]; then
  mkdir -p target/gpu
  # A toolkit out of packages has its libraries beside bin/, and not all of them.
  libraries=$(dirname "$(readlink -f "$nvcc")")/../lib
  flags=(-std=c++17 -O3 --expt-relaxed-constexpr -Icsrc -Itests/gpu -gencode "arch=compute_90a,code=sm_90a")
  for tile in D64 D128_FULL D256; do
    unit=target/gpu/attention_prefix_$tile
    {
      echo '#include "attention/sm90/attention_prefill_wgmma.cuh"'
      echo "template cudaError_t nvb::prefill_wgmma::launch_tile<__nv_bfloat16, nvb::prefill_wgmma::tiles::$tile>("
      echo "    const nvb::prefill_wgmma::Arguments&, int, const nvb_launch&);"
    } > "$unit.cu"
    "$nvcc" "${flags[@]}" -c "$unit.cu" -o "$unit.o"
  done
  "$nvcc" "${flags[@]}" tests/gpu/attention_prefix.cu csrc/attention/attention_prefix.cu target/gpu/attention_prefix_D*.o \
    csrc/attention/sm80/attention_decode_mma.cu -cudadevrt none "-L$libraries" -o "$program"
fi
if [ -e /dev/nvidiactl ]; then exec "$program" "$@"; fi
echo "$program is built; there is no GPU to run it"
