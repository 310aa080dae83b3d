// The decode kernel of compute capability 9.0 with tiles and divisions to compare, and the kernel of 8.0 beside it.
#ifndef NVBACKEND_TESTS_GPU_ATTENTION_DECODE_VARIANTS_H
#define NVBACKEND_TESTS_GPU_ATTENTION_DECODE_VARIANTS_H

#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>

#include "attention/sm90/attention_decode_ring.cuh"
#include "device.h"

namespace decode_test {

using namespace nvb;
using decode_ring::Options;
using decode_ring::Tile;

struct Variant {
  const char* name;
  int head_dim;
  int rows;  // at most, of a chunk
  cudaError_t (*launch)(const DecodeArguments&, const Options&, int blocks, int bytes, const nvb_launch&);
  Options options;
  int bytes;  // shared memory
  int blocks_per_multiprocessor;
  bool fp8 = false;
  bool e5m2 = false;
};

constexpr uint32_t kOldConstant = NVB_CONSTANT_POSITIONS | NVB_CONSTANT_OLDER_KEYS,
                   kKeysConstant = kOldConstant | NVB_CONSTANT_KEYS;
constexpr int kHalf = 113 * 1024 - 256, kWhole = 222 * 1024;
using B = __nv_bfloat16;
template <typename T, typename Tile, int N>
cudaError_t with_stages(const DecodeArguments& a, Options options, int blocks, int bytes, const nvb_launch& l) {
  options.stages =
      decode_ring::stages_within<Tile>(bytes, a.params.heads_per_chunk, float_dtype_bytes(a.params.query_dtype));
  if (options.stages < Tile::kTeams) return cudaErrorInvalidValue;
  return decode_ring::launch_tile<T, Tile, N>(a, options, blocks, l);
}
template <int D, int H, int W, int TM, int N = 2, int C = 1>
cudaError_t go(const DecodeArguments& a, const Options& o, int blocks, int bytes, const nvb_launch& l) {
  if (a.params.kv_dtype == NVB_F16) return cudaErrorInvalidValue;
  return with_stages<B, Tile<B, D, H, W, TM, C>, N>(a, o, blocks, bytes, l);
}

template <int D, int H, int W, int TM, int N = 2, int C = 1>
cudaError_t go8(const DecodeArguments& a, const Options& o, int blocks, int bytes, const nvb_launch& l) {
  return with_stages<__half, Tile<__nv_fp8_e4m3, D, H, W, TM, C>, N>(a, o, blocks, bytes, l);
}

template <int D, int H, int W, int TM, int N = 2, int C = 1>
cudaError_t go_e5m2(const DecodeArguments& a, const Options& o, int blocks, int bytes, const nvb_launch& l) {
  return with_stages<__half, Tile<__nv_fp8_e5m2, D, H, W, TM, C>, N>(a, o, blocks, bytes, l);
}

const Variant kVariants[] = {
    // name (d, team warps x teams, whole: all shared memory for one block, x2: two blocks a multiprocessor, e: a row's
    // cost in tiles, K: keys constant, old: old ones, once: out of L2 first), d, rows, launch,
    // {stages, extra, constant reads, once}, bytes, blocks
    {"128 4x1", 128, 8, go<128, 1, 4, 1>, {0, 0, 0, false}, kHalf, 1},
    {"128 4x1 x2 e2", 128, 8, go<128, 1, 4, 1>, {0, 2, 0, false}, kHalf, 2},
    {"128 4x1 K", 128, 8, go<128, 1, 4, 1>, {0, 0, kKeysConstant, false}, kHalf, 1},
    {"128 4x1 x2 e2 K", 128, 8, go<128, 1, 4, 1>, {0, 2, kKeysConstant, false}, kHalf, 2},
    {"128 4x1 x2 e2 once", 128, 8, go<128, 1, 4, 1>, {0, 2, 0, true}, kHalf, 2},
    {"128 8x1 whole", 128, 8, go<128, 1, 8, 1, 1>, {0, 0, 0, false}, kWhole, 1},
    {"128 8x1 whole K", 128, 8, go<128, 1, 8, 1, 1>, {0, 0, kKeysConstant, false}, kWhole, 1},
    {"128 8x1 whole once", 128, 8, go<128, 1, 8, 1, 1>, {0, 0, 0, true}, kWhole, 1},
    {"64 8x1", 64, 8, go<64, 1, 8, 1>, {0, 0, 0, false}, kHalf, 1},
    {"64 8x1 x2 e2", 64, 8, go<64, 1, 8, 1>, {0, 2, 0, false}, kHalf, 2},
    {"64 8x1 K", 64, 8, go<64, 1, 8, 1>, {0, 0, kKeysConstant, false}, kHalf, 1},
    {"64 8x1 x2 e2 K", 64, 8, go<64, 1, 8, 1>, {0, 2, kKeysConstant, false}, kHalf, 2},
    {"64 8x1 x2 e2 once", 64, 8, go<64, 1, 8, 1>, {0, 2, 0, true}, kHalf, 2},
    {"64 16x1 whole", 64, 8, go<64, 1, 16, 1, 1>, {0, 0, 0, false}, kWhole, 1},
    {"64 16x1 whole K", 64, 8, go<64, 1, 16, 1, 1>, {0, 0, kKeysConstant, false}, kWhole, 1},
    {"64 16x1 whole once", 64, 8, go<64, 1, 16, 1, 1>, {0, 0, 0, true}, kWhole, 1},
    {"256 2x2", 256, 4, go<256, 1, 2, 2>, {0, 0, 0, false}, kHalf, 1},
    {"256 2x2 x2 e2", 256, 4, go<256, 1, 2, 2>, {0, 2, 0, false}, kHalf, 2},
    {"256 2x2 K", 256, 4, go<256, 1, 2, 2>, {0, 0, kKeysConstant, false}, kHalf, 1},
    {"256 2x2 x2 e2 K", 256, 4, go<256, 1, 2, 2>, {0, 2, kKeysConstant, false}, kHalf, 2},
    {"256 4x1 whole", 256, 4, go<256, 1, 4, 1, 1>, {0, 0, 0, false}, kWhole, 1},
    {"256 4x1 whole K", 256, 4, go<256, 1, 4, 1, 1>, {0, 0, kKeysConstant, false}, kWhole, 1},
    {"256 4x1 whole once", 256, 4, go<256, 1, 4, 1, 1>, {0, 0, 0, true}, kWhole, 1},
    {"128 4x1 x4 e2 once", 128, 8, go<128, 1, 4, 1>, {0, 2, 0, true}, kHalf, 4},
    {"128 4x1 x6 e2 once", 128, 8, go<128, 1, 4, 1>, {0, 2, 0, true}, kHalf, 6},
    {"128 4x1 x8 e2 once", 128, 8, go<128, 1, 4, 1>, {0, 2, 0, true}, kHalf, 8},
    {"128 4x1 x4 e2 once K", 128, 8, go<128, 1, 4, 1>, {0, 2, kKeysConstant, true}, kHalf, 4},
    {"64 8x1 x4 e2 once", 64, 8, go<64, 1, 8, 1>, {0, 2, 0, true}, kHalf, 4},
    {"64 8x1 x6 e2 once", 64, 8, go<64, 1, 8, 1>, {0, 2, 0, true}, kHalf, 6},
    {"64 8x1 x8 e2 once", 64, 8, go<64, 1, 8, 1>, {0, 2, 0, true}, kHalf, 8},
    {"64 8x1 x4 e2 once K", 64, 8, go<64, 1, 8, 1>, {0, 2, kKeysConstant, true}, kHalf, 4},
    {"256 2x2 x4 e2 once", 256, 4, go<256, 1, 2, 2>, {0, 2, 0, true}, kHalf, 4},
    {"256 2x2 x6 e2 once", 256, 4, go<256, 1, 2, 2>, {0, 2, 0, true}, kHalf, 6},
    {"256 2x2 x8 e2 once", 256, 4, go<256, 1, 2, 2>, {0, 2, 0, true}, kHalf, 8},
    {"256 2x2 x4 e2 once K", 256, 4, go<256, 1, 2, 2>, {0, 2, kKeysConstant, true}, kHalf, 4},
    {"128 4x1 x2 e2 old", 128, 8, go<128, 1, 4, 1>, {0, 2, kOldConstant, false}, kHalf, 2},
    {"64 8x1 old", 64, 8, go<64, 1, 8, 1>, {0, 0, kOldConstant, false}, kHalf, 1},
    {"256 2x2 x2 e2 old", 256, 4, go<256, 1, 2, 2>, {0, 2, kOldConstant, false}, kHalf, 2},
    {"128 fp8 8x1", 128, 8, go8<128, 1, 8, 1>, {0, 0, 0, false}, kHalf, 1, true},
    {"128 fp8 8x1 whole", 128, 8, go8<128, 1, 8, 1>, {0, 0, 0, false}, kWhole, 1, true},
    {"128 fp8 8x1 x2 e2", 128, 8, go8<128, 1, 8, 1>, {0, 2, 0, false}, kHalf, 2, true},
    {"128 fp8 8x1 x2 e2 once", 128, 8, go8<128, 1, 8, 1>, {0, 2, 0, true}, kHalf, 2, true},
    {"128 fp8 8x1 K", 128, 8, go8<128, 1, 8, 1>, {0, 0, kKeysConstant, false}, kHalf, 1, true},
    {"256 fp8 4x1", 256, 8, go8<256, 1, 4, 1>, {0, 0, 0, false}, kHalf, 1, true},
    {"256 fp8 4x1 whole", 256, 8, go8<256, 1, 4, 1>, {0, 0, 0, false}, kWhole, 1, true},
    {"256 fp8 4x1 x2 e2", 256, 8, go8<256, 1, 4, 1>, {0, 2, 0, false}, kHalf, 2, true},
    {"256 fp8 4x1 x2 e2 once", 256, 8, go8<256, 1, 4, 1>, {0, 2, 0, true}, kHalf, 2, true},
    {"256 fp8 4x1 K", 256, 8, go8<256, 1, 4, 1>, {0, 0, kKeysConstant, false}, kHalf, 1, true},
    {"128 fp8 r16 4x1 x2 e2", 128, 16, go8<128, 2, 4, 1>, {0, 2, 0, false}, kHalf, 2, true},
    {"256 fp8 r12 4x1", 256, 12, go8<256, 2, 4, 1, 1>, {0, 0, 0, false}, kHalf, 1, true},
    {"128 e5m2 8x1 x2 e2", 128, 8, go_e5m2<128, 1, 8, 1>, {0, 2, 0, false}, kHalf, 2, true, true},
    {"256 e5m2 4x1 x2 e2", 256, 8, go_e5m2<256, 1, 4, 1>, {0, 2, 0, false}, kHalf, 2, true, true},
};

// Whether the arguments ask for a variant: "" and a part of a name select several, "=name" one; NVB_VARIANTS names a
// file of those to leave in.
inline bool is_asked(const Variant& variant, const std::string& filter) {
  const std::string name = variant.name;
  if (!filter.empty() && (filter[0] == '=' ? filter.substr(1) != name : name.find(filter) == std::string::npos))
    return false;
  const char* const path = std::getenv("NVB_VARIANTS");
  if (path == nullptr) return true;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line == name) return true;
  }
  return false;
}

// ---- the kernels of 8.0, as planned by src/cuda/attention_plan.rs ----
inline int splits_of(int sequences, int blocks, int visible, const nvb_attention_decode_shape& shape,
                     const nvb_launch& launch) {
  const int most = std::min((visible + shape.keys * shape.min_tiles - 1) / (shape.keys * shape.min_tiles), 256);
  const int by_memory = (launch.shared_bytes_per_block + 1024) / (shape.shared_bytes + 1024);
  const int resident = std::max(1, std::min(by_memory, 1024 / shape.threads));
  const int slots = launch.multiprocessors * resident;
  if (blocks * most <= slots) return most;
  // NVB_WAVES: blocks of so many waves at least, where sequences may be of unequal length.
  const char* const waves = std::getenv("NVB_WAVES");
  const int enough = waves != nullptr && sequences >= 16 ? static_cast<int>(std::atof(waves) * slots) : 0;
  const auto occupied = [&](int splits) {
    const int64_t all = int64_t{blocks} * splits;
    return static_cast<double>(all) / ((all + slots - 1) / slots * slots);
  };
  double best = 0;
  for (int i = 1; i <= most; ++i) best = std::max(best, occupied(i));
  const double busy = best >= 0.9 ? 0.9 : 0.9 * best;
  for (int i = 1; i <= most; ++i) {
    if (occupied(i) >= busy && (blocks * i >= enough || i == most)) return i;
  }
  return 1;
}

struct Workspace {
  unsigned char* data;
  size_t bytes;
  uint32_t* counters;
  Workspace() {
    bytes = size_t{256} << 20;
    MUST(cudaMalloc(&data, bytes));
    MUST(cudaMalloc(&counters, 64 << 20));
    MUST(cudaMemset(counters, 0, 64 << 20));
  }
};

inline cudaError_t launch_old(nvb_attention_decode_params p, const Workspace& workspace, uint32_t constant,
                              const nvb_launch& launch) {
  nvb_attention_decode_shape shape = {};
  // NVB_SHARED_BYTES: the tiles of a device with so many a block.
  nvb_launch asked = launch;
  if (const char* const bytes = std::getenv("NVB_SHARED_BYTES")) asked.shared_bytes_per_block = std::atoi(bytes);
  if (!supports_decode_mma(p, asked, shape)) return cudaErrorInvalidValue;
  const int group = items_per_kv_head(p);
  p.chunks = (group + shape.heads_per_block - 1) / shape.heads_per_block;
  p.heads_per_chunk = (group + p.chunks - 1) / p.chunks;
  const int visible = std::max(1, p.window > 0 ? std::min(p.window, p.max_kv_length) : p.max_kv_length);
  p.splits = splits_of(p.sequences, p.sequences * p.kv_heads * p.chunks, visible, shape, launch);
  p.slots_per_head = p.splits > 1 ? p.splits + (p.splits + 15) / 16 : 0;
  DecodeArguments arguments;
  arguments.constant = constant;
  const int64_t partials = int64_t{p.sequences} * p.rows_per_sequence * p.query_heads * p.slots_per_head;
  p.workspace = workspace.data, p.counters = workspace.counters;
  arguments.params = p;
  arguments.partial_sums = reinterpret_cast<float2*>(workspace.data);
  arguments.partial_outputs = reinterpret_cast<float*>(workspace.data + (partials * 8 + 15) / 16 * 16);
  return launch_decode_mma(arguments, asked);
}

inline cudaError_t launch_new(const Variant& variant, nvb_attention_decode_params p, const Workspace& workspace,
                              int blocks, const nvb_launch& launch) {
  const int group = items_per_kv_head(p);
  p.chunks = (group + variant.rows - 1) / variant.rows;
  p.heads_per_chunk = (group + p.chunks - 1) / p.chunks;
  if (blocks == 0) blocks = launch.multiprocessors * variant.blocks_per_multiprocessor;
  p.workspace = workspace.data, p.counters = workspace.counters;
  DecodeArguments arguments;
  arguments.params = p;
  arguments.partial_sums = reinterpret_cast<float2*>(workspace.data);
  arguments.partial_outputs =
      reinterpret_cast<float*>(workspace.data + (int64_t{2} * blocks * p.heads_per_chunk * 8 + 15) / 16 * 16);
  int bytes = variant.bytes;
  if (variant.blocks_per_multiprocessor == 2) bytes = kHalf;
  return variant.launch(arguments, variant.options, blocks, bytes, launch);
}

}  // namespace decode_test

#endif
