#!/usr/bin/env bash
# Builds tests/gpu/attention_decode_rope.cu and the kernels of rope and decode attention with nvcc alone, into target/gpu/, and runs
# it with the arguments (check, check WORD of a case, time) where there is a GPU. NVCC names another nvcc; without one, what an earlier call built is run.
set -euo pipefail
cd "$(dirname "$0")/../.."
nvcc=${NVCC:-$(command -v nvcc || echo .toolchain/cuda/bin/nvcc)}
program=target/gpu/attention_decode_rope
units=(tests/gpu/attention_decode_rope csrc/attention/attention_decode csrc/attention/attention_decode_simt
  csrc/attention/sm80/attention_decode_mma csrc/attention/sm80/attention_decode_short csrc/attention/sm90/attention_decode_ring
  csrc/attention/sm90/attention_decode_rope csrc/attention/sm90/attention_decode_rows csrc/rope/rope csrc/common/constant_reads
  csrc/common/shared_limit)
if [ -x "$nvcc" ]; then
  mkdir -p target/gpu/objects
  libraries=$(dirname "$(readlink -f "$nvcc")")/../lib
  flags=(-std=c++17 -O3 --expt-relaxed-constexpr -Icsrc -gencode "arch=compute_90a,code=sm_90a")
  objects=()
  for unit in "${units[@]}"; do
    object=target/gpu/objects/${unit//\//-}.o
    # Only what is older than its unit or than a header.
    if [ ! -e "$object" ] || [ -n "$(find "$unit.cu" csrc/attention csrc/rope csrc/common -newer "$object" -name '*.*' | head -1)" ]; then
      "$nvcc" "${flags[@]}" -c "$unit.cu" -o "$object"
    fi
    objects+=("$object")
  done
  "$nvcc" "${objects[@]}" -cudadevrt none "-L$libraries" -o "$program"
fi
if [ -e /dev/nvidiactl ]; then exec "$program" "$@"; fi
echo "$program is built; there is no GPU to run it"
