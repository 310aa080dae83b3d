#!/usr/bin/env bash
# Builds tests/gpu/linear_sfp.cu and the kernels of products with SFP weights with nvcc alone, into target/gpu/, and runs it where
# there is a GPU. NVCC names another nvcc; without one, what an earlier call built is run.
set -euo pipefail
cd "$(dirname "$0")/../.."
nvcc=${NVCC:-$(command -v nvcc || echo .toolchain/cuda/bin/nvcc)}
program=target/gpu/linear_sfp
if [ -x "$nvcc" ]; then
  mkdir -p target/gpu
  # A toolkit out of packages has its libraries beside bin/, and not all of them.
  libraries=$(dirname "$(readlink -f "$nvcc")")/../lib
  flags=(-std=c++17 -O3 --expt-relaxed-constexpr -Icsrc -Itests/gpu -gencode "arch=compute_90a,code=sm_90a")
  objects=()
  for unit in tests/gpu/linear_sfp{,_decode,_int8,_tiles,_wgmma}.cu csrc/common/{linear_epilogue,cluster_places,constant_reads}.cu; do
    object=target/gpu/linear_sfp-$(basename "$unit" .cu).o
    [ "$object" -nt "$unit" ] || "$nvcc" "${flags[@]}" -c "$unit" -o "$object"
    objects+=("$object")
  done
  "$nvcc" "${flags[@]}" "${objects[@]}" -cudadevrt none "-L$libraries" -o "$program"
fi
if [ -e /dev/nvidiactl ]; then exec "$program" "$@"; fi
echo "$program is built; there is no GPU to run it"
