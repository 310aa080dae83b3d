#!/usr/bin/env bash
# Builds tests/gpu/attention_prefill_mma.cu with nvcc alone, into target/gpu/, and runs it with the arguments where there
# is a GPU. NVCC names another nvcc; ARCHITECTURE another one than 90a. TILES names a file with other tiles than those of
# the library: a line each, of a name and the template arguments behind the element.
set -euo pipefail
cd "$(dirname "$0")/../.."
nvcc=${NVCC:-$(command -v nvcc || echo .toolchain/cuda/bin/nvcc)}
architecture=${ARCHITECTURE:-90a}
program=target/gpu/attention_prefill_mma
folder=target/gpu/attention_prefill_mma_units
if [ -x "$nvcc" ]; then
  mkdir -p "$folder"
  rm -f "$folder"/*
  # Without TILES, the tiles are read from the table in the kernel's file.
  if [ -n "${TILES:-}" ]; then
    cp "$TILES" "$folder/tiles"
  else
    sed -n 's/.*use(PrefillTile<T, \(.*\)>());/\1/p' csrc/attention/sm80/attention_prefill_mma.cuh | sort -u |
      awk '{ gsub(" ", ""); print "tile_" NR, $0 }' > "$folder/tiles"
  fi
  {
    echo '#include "attention/attention_prefill.cuh"'
    echo 'namespace mma_tiles {'
    echo 'using Launch = cudaError_t (*)(const nvb::PrefillArguments&, int, cudaStream_t);'
    echo 'struct Entry { const char* name; int head_dim, rows, keys; Launch launch; };'
    while read -r name tile; do
      echo "cudaError_t $name(const nvb::PrefillArguments&, int, cudaStream_t);"
    done < "$folder/tiles"
    echo 'inline const Entry kEntries[] = {'
    while read -r name tile; do
      IFS=, read -r head_dim rows keys _ <<< "$tile"
      echo "  {\"$tile\", $head_dim, $rows, $keys, $name},"
      {
        echo '#include "attention/sm80/attention_prefill_mma.cuh"'
        echo "cudaError_t mma_tiles_launch(const nvb::PrefillArguments& arguments, int blocks, cudaStream_t stream) {"
        echo "  return nvb::launch_prefill_tile<nvb::PrefillTile<__nv_bfloat16, $tile>>(arguments, blocks, stream);"
        echo '}'
      } | sed "s/mma_tiles_launch/mma_tiles::$name/; 1a namespace mma_tiles { cudaError_t $name(const nvb::PrefillArguments\&, int, cudaStream_t); }" > "$folder/$name.cu"
    done < "$folder/tiles"
    echo '};'
    echo '}  // namespace mma_tiles'
  } > "$folder/attention_prefill_mma_tiles.h"
  cp tests/gpu/attention_prefill_mma.cu "$folder/main.cu"
  # A toolkit out of packages has its libraries beside bin/, and not all of them.
  libraries=$(dirname "$(readlink -f "$nvcc")")/../lib
  flags=(-std=c++17 -O3 --expt-relaxed-constexpr -Icsrc -Itests/gpu "-I$folder" -gencode "arch=compute_$architecture,code=sm_$architecture")
  printf '%s\0' "$folder"/*.cu | xargs -0 -P "$(nproc)" -I{} "$nvcc" "${flags[@]}" -c {} -o {}.o
  "$nvcc" "${flags[@]}" "$folder"/*.o -cudadevrt none "-L$libraries" -o "$program"
fi
if [ -e /dev/nvidiactl ]; then exec "$program" "$@"; fi
echo "$program is built; there is no GPU to run it"
