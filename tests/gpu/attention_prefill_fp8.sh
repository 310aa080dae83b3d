#!/usr/bin/env bash
# Builds tests/gpu/attention_prefill_fp8.cu and its kernels with nvcc alone, into target/gpu/, and runs it with the arguments
# where there is a GPU. NVCC names another nvcc; without one, what an earlier call built is run.
set -euo pipefail
cd "$(dirname "$0")/../.."
nvcc=${NVCC:-$(command -v nvcc || echo .toolchain/cuda/bin/nvcc)}
program=target/gpu/attention_prefill_fp8
if [ -x "$nvcc" ]; then
  mkdir -p target/gpu
  # A toolkit out of packages has its libraries beside bin/, and not all of them.
  libraries=$(dirname "$(readlink -f "$nvcc")")/../lib
  flags=(-std=c++17 -O3 --expt-relaxed-constexpr -Icsrc -Itests/gpu -gencode "arch=compute_90a,code=sm_90a")
  rm -f target/gpu/fp8_*
  unit() {
    {
      echo '#include "attention/sm90/attention_prefill_fp8.cuh"'
      echo "template cudaError_t nvb::prefill_fp8::launch_tile<$2, nvb::prefill_fp8::$3>("
      echo "    const nvb::prefill_wgmma::Arguments&, int, const nvb_launch&);"
    } > "target/gpu/fp8_$1.cu"
  }
  for tile in D64 D128 D128_LONG D256; do
    for element in e4m3 e5m2; do unit "${tile}_$element" "__nv_fp8_$element" "tiles::$tile"; done
  done
  number=0
  defaults=$(sed -n 's/^using D[0-9A-Z_]* = Tile<\(.*\)>;/\1/p' csrc/attention/sm90/attention_prefill_fp8.cuh)
  sed -n 's/^NVB_CANDIDATE(\(.*\))$/\1/p' tests/gpu/attention_prefill_fp8_tiles.h | while read -r tile; do
    # A default tile has its unit already.
    if grep -qxF "$tile" <<< "$defaults"; then continue; fi
    number=$((number + 1))
    unit "candidate_$number" __nv_fp8_e4m3 "Tile<$tile>"
  done
  printf "%s\0" target/gpu/fp8_*.cu | xargs -0 -P "$(nproc)" -I{} "$nvcc" "${flags[@]}" -c {} -o {}.o
  "$nvcc" "${flags[@]}" tests/gpu/attention_prefill_fp8.cu target/gpu/fp8_*.o -cudadevrt none "-L$libraries" -o "$program"
fi
if [ -e /dev/nvidiactl ]; then exec "$program" "$@"; fi
echo "$program is built; there is no GPU to run it"
