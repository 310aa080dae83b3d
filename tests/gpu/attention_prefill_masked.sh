#!/usr/bin/env bash
# Builds tests/gpu/attention_prefill_masked.cu with nvcc alone, into target/gpu/, and runs it with the arguments where there
# is a GPU. NVCC names another nvcc; ARCHITECTURE another one than 90a.
set -euo pipefail
cd "$(dirname "$0")/../.."
nvcc=${NVCC:-$(command -v nvcc || echo .toolchain/cuda/bin/nvcc)}
architecture=${ARCHITECTURE:-90a}
program=target/gpu/attention_prefill_masked
folder=target/gpu/attention_prefill_masked_units
flags=(-O3 -std=c++17 --expt-relaxed-constexpr -Icsrc "-gencode=arch=compute_$architecture,code=sm_$architecture")
if [ -x "$nvcc" ]; then
  mkdir -p "$folder"
  rm -f "$folder"/*
  for unit in "f16 __half" "bf16 __nv_bfloat16"; do
    for dim in 64 128 256; do
      name=masked_${unit%% *}_$dim
      {
        echo '#include "attention/sm80/attention_prefill_masked.cuh"'
        echo "cudaError_t $name(const nvb::PrefillArguments& arguments, const nvb_launch& launch) {"
        echo "  return nvb::masked::launch_tile<nvb::masked::Tile<${unit##* }, $dim>>(arguments, launch);"
        echo '}'
      } > "$folder/$name.cu"
      echo "$folder/$name.cu"
    done
  done | xargs -P "$(nproc)" -I{} "$nvcc" "${flags[@]}" -c {} -o {}.o
  # A toolkit out of packages has its libraries beside bin/, and not all of them.
  libraries=$(dirname "$(readlink -f "$nvcc")")/../lib
  "$nvcc" "${flags[@]}" tests/gpu/attention_prefill_masked.cu csrc/common/{cluster_places,shared_limit}.cu \
    "$folder"/*.o -cudadevrt none "-L$libraries" -o "$program"
fi
if [ -e /dev/nvidia0 ]; then "$program" "$@"; fi
