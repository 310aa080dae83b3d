// The decode attention of compute capability 9.0 on a device: its results beside the formula in f64, and its speed.
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "attention/sm90/attention_decode_ring.cuh"
#include "device.h"

namespace {

using namespace nvb;
using decode_ring::Options;
using decode_ring::Tile;

using gpu::device_launch;

// ---- variants ----
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

constexpr int kHalf = 113 * 1024 - 256, kWhole = 222 * 1024;
using B = __nv_bfloat16;
template <typename T, typename Tile, int N>
cudaError_t with_stages(const DecodeArguments& a, Options options, int blocks, int bytes, const nvb_launch& l) {
  options.stages =
      decode_ring::stages_within<Tile>(bytes, a.params.heads_per_chunk, float_dtype_bytes(a.params.query_dtype),
                                                   options.cluster);
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
    // name (d, team warps x teams, blocks a multiprocessor, a row's cost in tiles, c: blocks of a cluster, K: constant
    // keys), d, rows, launch, {stages, extra, cluster, constant positions, old keys, keys}, bytes, blocks
    {"128 4x1", 128, 8, go<128, 1, 4, 1>, {0, 0, 1, false, false, false}, kHalf, 1},
    {"128 4x1 200K", 128, 8, go<128, 1, 4, 1>, {0, 0, 1, false, false, false}, kWhole, 1},
    {"128 4x1 x2 e2", 128, 8, go<128, 1, 4, 1>, {0, 2, 1, false, false, false}, kHalf, 2},
    {"128 4x1 c8", 128, 8, go<128, 1, 4, 1>, {0, 0, 8, false, false, false}, kHalf, 1},
    {"128 4x1 c8 200K", 128, 8, go<128, 1, 4, 1>, {0, 0, 8, false, false, false}, kWhole, 1},
    {"128 4x1 c12", 128, 8, go<128, 1, 4, 1>, {0, 0, 12, false, false, false}, kHalf, 1},
    {"128 4x1 c12 200K", 128, 8, go<128, 1, 4, 1>, {0, 0, 12, false, false, false}, kWhole, 1},
    {"128 4x1 c16", 128, 8, go<128, 1, 4, 1>, {0, 0, 16, false, false, false}, kHalf, 1},
    {"128 4x1 c16 200K", 128, 8, go<128, 1, 4, 1>, {0, 0, 16, false, false, false}, kWhole, 1},
    {"128 4x1 K", 128, 8, go<128, 1, 4, 1>, {0, 0, 1, true, true, true}, kHalf, 1},
    {"128 4x1 200K K", 128, 8, go<128, 1, 4, 1>, {0, 0, 1, true, true, true}, kWhole, 1},
    {"128 4x1 x2 e2 K", 128, 8, go<128, 1, 4, 1>, {0, 2, 1, true, true, true}, kHalf, 2},
    {"128 4x1 c8 K", 128, 8, go<128, 1, 4, 1>, {0, 0, 8, true, true, true}, kHalf, 1},
    {"128 4x1 c16 K", 128, 8, go<128, 1, 4, 1>, {0, 0, 16, true, true, true}, kHalf, 1},
    {"128 4x1 x2 e2 old", 128, 8, go<128, 1, 4, 1>, {0, 2, 1, true, true, false}, kHalf, 2},
    {"128 8x1 200K", 128, 8, go<128, 1, 8, 1, 1>, {0, 0, 1, false, false, false}, kWhole, 1},
    {"128 8x1 c8 200K", 128, 8, go<128, 1, 8, 1, 1>, {0, 0, 8, false, false, false}, kWhole, 1},
    {"128 8x1 c12 200K", 128, 8, go<128, 1, 8, 1, 1>, {0, 0, 12, false, false, false}, kWhole, 1},
    {"128 8x1 c16 200K", 128, 8, go<128, 1, 8, 1, 1>, {0, 0, 16, false, false, false}, kWhole, 1},
    {"128 8x1 200K K", 128, 8, go<128, 1, 8, 1, 1>, {0, 0, 1, true, true, true}, kWhole, 1},
    {"64 8x1", 64, 8, go<64, 1, 8, 1>, {0, 0, 1, false, false, false}, kHalf, 1},
    {"64 8x1 200K", 64, 8, go<64, 1, 8, 1>, {0, 0, 1, false, false, false}, kWhole, 1},
    {"64 8x1 x2 e2", 64, 8, go<64, 1, 8, 1>, {0, 2, 1, false, false, false}, kHalf, 2},
    {"64 8x1 c8", 64, 8, go<64, 1, 8, 1>, {0, 0, 8, false, false, false}, kHalf, 1},
    {"64 8x1 c8 200K", 64, 8, go<64, 1, 8, 1>, {0, 0, 8, false, false, false}, kWhole, 1},
    {"64 8x1 c12", 64, 8, go<64, 1, 8, 1>, {0, 0, 12, false, false, false}, kHalf, 1},
    {"64 8x1 c12 200K", 64, 8, go<64, 1, 8, 1>, {0, 0, 12, false, false, false}, kWhole, 1},
    {"64 8x1 c16", 64, 8, go<64, 1, 8, 1>, {0, 0, 16, false, false, false}, kHalf, 1},
    {"64 8x1 c16 200K", 64, 8, go<64, 1, 8, 1>, {0, 0, 16, false, false, false}, kWhole, 1},
    {"64 8x1 K", 64, 8, go<64, 1, 8, 1>, {0, 0, 1, true, true, true}, kHalf, 1},
    {"64 8x1 200K K", 64, 8, go<64, 1, 8, 1>, {0, 0, 1, true, true, true}, kWhole, 1},
    {"64 8x1 x2 e2 K", 64, 8, go<64, 1, 8, 1>, {0, 2, 1, true, true, true}, kHalf, 2},
    {"64 8x1 c8 K", 64, 8, go<64, 1, 8, 1>, {0, 0, 8, true, true, true}, kHalf, 1},
    {"64 8x1 c16 K", 64, 8, go<64, 1, 8, 1>, {0, 0, 16, true, true, true}, kHalf, 1},
    {"64 8x1 x2 e2 old", 64, 8, go<64, 1, 8, 1>, {0, 2, 1, true, true, false}, kHalf, 2},
    {"256 2x2", 256, 4, go<256, 1, 2, 2>, {0, 0, 1, false, false, false}, kHalf, 1},
    {"256 2x2 200K", 256, 4, go<256, 1, 2, 2>, {0, 0, 1, false, false, false}, kWhole, 1},
    {"256 2x2 x2 e2", 256, 4, go<256, 1, 2, 2>, {0, 2, 1, false, false, false}, kHalf, 2},
    {"256 2x2 c8", 256, 4, go<256, 1, 2, 2>, {0, 0, 8, false, false, false}, kHalf, 1},
    {"256 2x2 c8 200K", 256, 4, go<256, 1, 2, 2>, {0, 0, 8, false, false, false}, kWhole, 1},
    {"256 2x2 c12", 256, 4, go<256, 1, 2, 2>, {0, 0, 12, false, false, false}, kHalf, 1},
    {"256 2x2 c12 200K", 256, 4, go<256, 1, 2, 2>, {0, 0, 12, false, false, false}, kWhole, 1},
    {"256 2x2 c16", 256, 4, go<256, 1, 2, 2>, {0, 0, 16, false, false, false}, kHalf, 1},
    {"256 2x2 c16 200K", 256, 4, go<256, 1, 2, 2>, {0, 0, 16, false, false, false}, kWhole, 1},
    {"256 2x2 K", 256, 4, go<256, 1, 2, 2>, {0, 0, 1, true, true, true}, kHalf, 1},
    {"256 2x2 200K K", 256, 4, go<256, 1, 2, 2>, {0, 0, 1, true, true, true}, kWhole, 1},
    {"256 2x2 x2 e2 K", 256, 4, go<256, 1, 2, 2>, {0, 2, 1, true, true, true}, kHalf, 2},
    {"256 2x2 c8 K", 256, 4, go<256, 1, 2, 2>, {0, 0, 8, true, true, true}, kHalf, 1},
    {"256 2x2 c16 K", 256, 4, go<256, 1, 2, 2>, {0, 0, 16, true, true, true}, kHalf, 1},
    {"256 2x2 x2 e2 old", 256, 4, go<256, 1, 2, 2>, {0, 2, 1, true, true, false}, kHalf, 2},
    {"128 fp8 8x1", 128, 8, go8<128, 1, 8, 1>, {0, 0, 1, false, false, false}, kHalf, 1, true},
    {"128 fp8 8x1 200K", 128, 8, go8<128, 1, 8, 1>, {0, 0, 1, false, false, false}, kWhole, 1, true},
    {"128 fp8 8x1 x2 e2", 128, 8, go8<128, 1, 8, 1>, {0, 2, 1, false, false, false}, kHalf, 2, true},
    {"128 fp8 8x1 x2 e2 K", 128, 8, go8<128, 1, 8, 1>, {0, 2, 1, true, true, true}, kHalf, 2, true},
    {"128 fp8 8x1 c16", 128, 8, go8<128, 1, 8, 1>, {0, 0, 16, false, false, false}, kHalf, 1, true},
    {"128 fp8 8x1 c16 K", 128, 8, go8<128, 1, 8, 1>, {0, 0, 16, true, true, true}, kHalf, 1, true},
    {"256 fp8 4x1", 256, 8, go8<256, 1, 4, 1>, {0, 0, 1, false, false, false}, kHalf, 1, true},
    {"256 fp8 4x1 200K", 256, 8, go8<256, 1, 4, 1>, {0, 0, 1, false, false, false}, kWhole, 1, true},
    {"256 fp8 4x1 x2 e2", 256, 8, go8<256, 1, 4, 1>, {0, 2, 1, false, false, false}, kHalf, 2, true},
    {"256 fp8 4x1 x2 e2 K", 256, 8, go8<256, 1, 4, 1>, {0, 2, 1, true, true, true}, kHalf, 2, true},
    {"256 fp8 4x1 c16", 256, 8, go8<256, 1, 4, 1>, {0, 0, 16, false, false, false}, kHalf, 1, true},
    {"256 fp8 4x1 c16 K", 256, 8, go8<256, 1, 4, 1>, {0, 0, 16, true, true, true}, kHalf, 1, true},
    {"128 fp8 r16 4x1 x2 e2", 128, 16, go8<128, 2, 4, 1>, {0, 2, 1, false, false, false}, kHalf, 2, true},
    {"256 fp8 r12 4x1", 256, 12, go8<256, 2, 4, 1, 1>, {0, 0, 1, false, false, false}, kHalf, 1, true},
    {"128 e5m2 8x1 x2 e2", 128, 8, go_e5m2<128, 1, 8, 1>, {0, 2, 1, false, false, false}, kHalf, 2, true, true},
    {"256 e5m2 4x1 x2 e2", 256, 8, go_e5m2<256, 1, 4, 1>, {0, 2, 1, false, false, false}, kHalf, 2, true, true},
};

// Whether the arguments ask for a variant: "" and a part of a name select several, "=name" one; NVB_VARIANTS names a
// file of those to leave in.
bool is_asked(const Variant& variant, const std::string& filter) {
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
int splits_of(int sequences, int blocks, int visible, const nvb_attention_decode_shape& shape,
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

cudaError_t launch_old(nvb_attention_decode_params p, const Workspace& workspace, const nvb_launch& launch) {
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
  const int64_t partials = int64_t{p.sequences} * p.rows_per_sequence * p.query_heads * p.slots_per_head;
  p.workspace = workspace.data, p.counters = workspace.counters;
  arguments.params = p;
  arguments.partial_sums = reinterpret_cast<float2*>(workspace.data);
  arguments.partial_outputs = reinterpret_cast<float*>(workspace.data + (partials * 8 + 15) / 16 * 16);
  return launch_decode_mma(arguments, asked);
}

cudaError_t launch_new(const Variant& variant, nvb_attention_decode_params p, const Workspace& workspace, int blocks,
                       const nvb_launch& launch) {
  const int group = items_per_kv_head(p);
  p.chunks = (group + variant.rows - 1) / variant.rows;
  p.heads_per_chunk = (group + p.chunks - 1) / p.chunks;
  if (variant.options.cluster > 1) {
    blocks = p.sequences * p.kv_heads * p.chunks * variant.options.cluster;
  } else if (blocks == 0) {
    blocks = launch.multiprocessors * variant.blocks_per_multiprocessor;
  }
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

// ---- check ----
struct Case {
  std::string name;
  int query_heads = 4, kv_heads = 1;
  std::vector<int> lengths;
  int window = 0;
  float soft_cap = 0;
  uint32_t query_dtype = NVB_BF16, output_dtype = NVB_F32;
  int page_tokens = 0;
  int ring = 0;
  bool bad_pages = false;
  bool slots = false;
  int blocks = 0;
  int rows = 1;
  bool token_major = false;
  bool scaled = false;
};

template <typename T>
T* to_device(const std::vector<T>& host) {
  T* device = nullptr;
  MUST(cudaMalloc(&device, std::max<size_t>(host.size() * sizeof(T), 16)));
  MUST(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return device;
}

std::string check_one(const Variant* variant, int d, const Case& test, const Workspace& workspace) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  const int n = static_cast<int>(test.lengths.size());
  int longest = 1;
  for (int length : test.lengths) longest = std::max(longest, length);
  const int capacity = longest + 3;
  const int slot_count = test.slots ? n + 2 : n;
  const int entries = test.page_tokens > 0 ? (capacity + test.page_tokens - 1) / test.page_tokens : 0;
  const int page_count = test.page_tokens > 0 ? entries * slot_count + 3 : 0;
  const int places = test.ring > 0 ? test.ring : capacity;
  const size_t rows = test.page_tokens > 0 ? size_t(page_count) * test.kv_heads * test.page_tokens
                                           : size_t(slot_count) * test.kv_heads * places;
  const bool fp8 = variant != nullptr && variant->fp8;
  const bool e5m2 = variant != nullptr && variant->e5m2;
  const size_t es = fp8 ? 1 : 2;
  std::vector<uint8_t> key(rows * d * es), value(rows * d * es);
  const auto put = [&](std::vector<uint8_t>& to, size_t at, float f) {
    if (e5m2) {
      to[at] = __nv_fp8_e5m2(f).__x;
    } else if (fp8) {
      to[at] = __nv_fp8_e4m3(f).__x;
    } else {
      const __nv_bfloat16 b = __float2bfloat16_rn(f);
      std::memcpy(to.data() + at * 2, &b, 2);
    }
  };
  const auto get = [&](const std::vector<uint8_t>& from, size_t at) {
    if (e5m2) {
      __nv_fp8_e5m2 f;
      f.__x = from[at];
      return float(f);
    }
    if (fp8) {
      __nv_fp8_e4m3 f;
      f.__x = from[at];
      return float(f);
    }
    __nv_bfloat16 b;
    std::memcpy(&b, from.data() + at * 2, 2);
    return __bfloat162float(b);
  };
  for (size_t i = 0; i < rows * d; ++i) put(key, i, NAN), put(value, i, NAN);
  std::vector<int32_t> table(std::max(1, entries * slot_count)), positions(n * test.rows), slots(n);
  std::vector<int> order(std::max(1, page_count));
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  std::shuffle(order.begin(), order.end(), random);
  for (size_t i = 0; i < table.size() && entries > 0; ++i) table[i] = order[i];
  if (test.bad_pages) {
    for (size_t i = 0; i < table.size(); i += 3) table[i] = i % 2 ? -1 : page_count + 5;
  }
  for (int i = 0; i < n; ++i) {
    for (int r = 0; r < test.rows; ++r) positions[i * test.rows + r] = test.lengths[i] - test.rows + r;
    if (test.rows > 1) positions[i * test.rows] = -1;  // not needed
    slots[i] = test.slots ? (i * 5 + 3) % slot_count : i;
  }
  if (test.slots && n > 1) slots[n - 1] = slot_count;  // outside
  nvb_attention_decode_params p = {};
  p.rows_per_sequence = test.rows, p.query_heads = test.query_heads, p.kv_heads = test.kv_heads,
  p.head_dim = p.value_dim = d;
  p.sequences = n, p.slot_count = slot_count, p.capacity = capacity, p.max_kv_length = longest;
  p.window = test.window, p.soft_cap = test.soft_cap, p.scale = 0.7f / std::sqrt(float(d));
  p.query_dtype = test.query_dtype, p.kv_dtype = NVB_BF16, p.output_dtype = test.output_dtype;
  p.key_token_stride = p.value_token_stride = d;
  p.query_head_stride = d, p.query_token_stride = int64_t{d} * test.query_heads;
  p.output_head_stride = d, p.output_token_stride = int64_t{d} * test.query_heads;
  if (test.page_tokens > 0) {
    p.key_head_stride = p.value_head_stride = int64_t{test.page_tokens} * d;
    p.placement.page_row_stride = entries, p.placement.block_stride = int64_t{test.kv_heads} * test.page_tokens * d;
    p.placement.page_tokens = test.page_tokens, p.placement.page_count = page_count;
  } else {
    p.key_head_stride = p.value_head_stride = int64_t{places} * d;
    p.key_sequence_stride = p.value_sequence_stride = int64_t{test.kv_heads} * places * d;
    if (test.ring > 0) p.placement.ring_tokens = test.ring, p.placement.block_stride = 256 * d;
  }
  if (test.token_major) {  // [page or sequence, token, head, column]
    std::swap(p.key_head_stride, p.key_token_stride), std::swap(p.value_head_stride, p.value_token_stride);
    p.key_head_stride = p.value_head_stride = d;
    p.key_token_stride = p.value_token_stride = int64_t{test.kv_heads} * d;
    if (test.ring > 0) p.placement.block_stride = 256 * p.key_token_stride;
  }
  // Offset of a token's row, or -1.
  const auto row_of = [&](int sequence, int head, int token) -> int64_t {
    const int slot = slots[sequence];
    if (test.page_tokens > 0) {
      const int page = table[slot * entries + token / test.page_tokens];
      if (page < 0 || page >= page_count) return -1;
      if (test.token_major)
        return ((int64_t{page} * test.page_tokens + token % test.page_tokens) * test.kv_heads + head) * d;
      return ((int64_t{page} * test.kv_heads + head) * test.page_tokens + token % test.page_tokens) * d;
    }
    const int place = test.ring > 0 ? token % test.ring : token;
    if (test.token_major) return ((int64_t{slot} * places + place) * test.kv_heads + head) * d;
    return ((int64_t{slot} * test.kv_heads + head) * places + place) * d;
  };
  std::vector<float> query_f(size_t(n) * test.rows * test.query_heads * d);
  std::vector<__nv_bfloat16> query_b(query_f.size());
  for (size_t i = 0; i < query_f.size(); ++i) {
    query_f[i] = normal(random) * 2;
    query_b[i] = __float2bfloat16_rn(query_f[i]);
    if (test.query_dtype != NVB_F32) query_f[i] = __bfloat162float(query_b[i]);
  }
  const auto first_of = [&](int length) { return test.window > 0 ? std::max(0, length - test.window) : 0; };
  const auto length_of = [&](int i) { return slots[i] >= slot_count ? 0 : std::max(0, test.lengths[i]); };
  for (int i = 0; i < n; ++i) {
    for (int h = 0; h < test.kv_heads; ++h) {
      for (int t = first_of(length_of(i) - test.rows + 1); t < length_of(i); ++t) {
        const int64_t row = row_of(i, h, t);
        for (int c = 0; c < d && row >= 0; ++c) {
          put(key, row + c, normal(random));
          put(value, row + c, normal(random) + 0.3f);
        }
      }
    }
  }
  const float* const dq = to_device(query_f);
  const __nv_bfloat16* const dqb = to_device(query_b);
  p.query = test.query_dtype == NVB_F32 ? static_cast<const void*>(dq) : dqb;
  p.key = to_device(key), p.value = to_device(value), p.positions = to_device(positions);
  p.slots = test.slots ? to_device(slots) : nullptr;
  p.placement.pages = test.page_tokens > 0 ? to_device(table) : nullptr;
  std::vector<float> key_scales(test.kv_heads, 1.0f), value_scales(key_scales);
  for (int h = 0; h < test.kv_heads && test.scaled; ++h) key_scales[h] = 0.4f + 0.3f * h, value_scales[h] = 3.0f - h;
  p.key_scale = test.scaled ? to_device(key_scales) : nullptr;
  p.value_scale = test.scaled ? to_device(value_scales) : nullptr;
  const size_t count = query_f.size();
  std::vector<uint32_t> poison(count, 0x7fc12345);
  std::vector<float> lse_poison(count / d, -1e30f), lse(lse_poison), out(count), first;
  p.output = to_device(poison);
  p.lse = to_device(lse_poison);
  p.placement.value_block_stride = p.placement.block_stride;
  const nvb_launch launch = device_launch(nullptr);
  std::string wrong;
  for (int round = 0; round < 3 && wrong.empty(); ++round) {
    MUST(cudaMemcpy(p.output, poison.data(), count * 4, cudaMemcpyHostToDevice));
    MUST(cudaMemset(workspace.data, 0xff, 4 << 20));
    cudaError_t error =
        variant != nullptr ? launch_new(*variant, p, workspace, test.blocks, launch) : launch_old(p, workspace, launch);
    if (error != cudaSuccess) wrong = cudaGetErrorString(error);
    MUST(cudaDeviceSynchronize());
    MUST(cudaMemcpy(out.data(), p.output, count * 4, cudaMemcpyDeviceToHost));
    if (round == 0) first = out;
    if (std::memcmp(first.data(), out.data(), count * 4) != 0) wrong = "two runs differ";
  }
  MUST(cudaMemcpy(lse.data(), p.lse, lse.size() * 4, cudaMemcpyDeviceToHost));
  for (const void* q : {static_cast<const void*>(dq), static_cast<const void*>(dqb), p.key, p.value,
                        static_cast<const void*>(p.positions), static_cast<const void*>(p.slots),
                        static_cast<const void*>(p.placement.pages), static_cast<const void*>(p.output),
                        static_cast<const void*>(p.lse), static_cast<const void*>(p.key_scale),
                        static_cast<const void*>(p.value_scale)}) {
    MUST(cudaFree(const_cast<void*>(q)));
  }
  if (!wrong.empty()) return wrong;
  const int group = test.query_heads / test.kv_heads;
  double error = 0, norm = 0;
  for (int i = 0; i < n * test.rows; ++i) {
    const int length = slots[i / test.rows] >= slot_count ? 0 : std::max(0, positions[i] + 1);
    for (int h = 0; h < test.query_heads; ++h) {
      std::vector<double> s;
      std::vector<double> o(d);
      double most = -INFINITY;
      for (int t = first_of(length); t < length; ++t) {
        const int64_t row = row_of(i / test.rows, h / group, t);
        double dot = 0;
        for (int c = 0; c < d && row >= 0; ++c) {
          dot +=
              double(query_f[(size_t(i) * test.query_heads + h) * d + c]) * get(key, row + c) * key_scales[h / group];
        }
        dot *= p.scale;
        if (test.soft_cap > 0) dot = test.soft_cap * std::tanh(dot / test.soft_cap);
        s.push_back(dot), most = std::max(most, dot);
      }
      double sum = 0;
      for (size_t j = 0; j < s.size(); ++j) {
        const double weight = std::exp(s[j] - most);
        sum += weight;
        const int64_t row = row_of(i / test.rows, h / group, first_of(length) + static_cast<int>(j));
        for (int c = 0; c < d && row >= 0; ++c) o[c] += weight * get(value, row + c) * value_scales[h / group];
      }
      const double expected_lse = s.empty() ? -INFINITY : most + std::log(sum);
      const float got = lse[size_t(i) * test.query_heads + h];
      if (s.empty() ? got != -INFINITY
                    : !(std::abs(got - expected_lse) < 1e-4 * std::max(1.0, std::abs(expected_lse)))) {
        char text[200];
        std::snprintf(text, sizeof text, "lse of sequence %d head %d: %g, expected %g", i, h, got, expected_lse);
        return text;
      }
      for (int c = 0; c < d; ++c) {
        const double expected = s.empty() ? 0 : o[c] / sum;
        const double difference = out[(size_t(i) * test.query_heads + h) * d + c] - expected;
        if (s.empty() && difference != 0) return "an empty row is not zero";
        error += difference * difference, norm += expected * expected;
      }
    }
  }
  const double relative = norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
  if (!(relative < 2e-4)) {
    char text[200];
    std::snprintf(text, sizeof text, "relative error %g", relative);
    return text;
  }
  return "";
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](const char* name, std::vector<int> lengths, auto change) {
    Case test;
    test.name = name, test.lengths = std::move(lengths);
    change(test);
    all.push_back(test);
  };
  const auto none = [](Case&) {};
  add("one", {1}, none);
  add("some", {700}, none);
  add("some, few blocks", {700}, [](Case& t) { t.blocks = 3, t.kv_heads = 2, t.query_heads = 8; });
  add("one block", {129, 64, 1}, [](Case& t) { t.blocks = 1; });
  add("lengths", {0, 1, 63, 64, 65, 127, 128, 129, 1000, 16, 15, 17},
      [](Case& t) { t.kv_heads = 2, t.query_heads = 4; });
  add("lengths, 7 blocks", {0, 1, 63, 64, 65, 127, 128, 129, 1000, 16, 15, 17},
      [](Case& t) { t.kv_heads = 2, t.query_heads = 4, t.blocks = 7; });
  add("group 8", {333, 12}, [](Case& t) { t.query_heads = 8; });
  add("group 3", {333, 12}, [](Case& t) { t.query_heads = 3; });
  add("group 16", {333, 12}, [](Case& t) { t.query_heads = 16; });
  add("group 20", {333, 12}, [](Case& t) { t.query_heads = 20; });
  add("window", {1000, 40, 300}, [](Case& t) { t.window = 257; });
  add("soft cap", {500}, [](Case& t) { t.soft_cap = 5; });
  add("f32 queries", {500, 3}, [](Case& t) { t.query_dtype = NVB_F32; });
  add("pages of 16", {500, 3, 1000}, [](Case& t) { t.page_tokens = 16, t.kv_heads = 2, t.query_heads = 8; });
  add("pages of 7", {500, 3, 100}, [](Case& t) { t.page_tokens = 7; });
  add("pages of 1", {100}, [](Case& t) { t.page_tokens = 1; });
  add("pages of 64, window", {500, 3, 100}, [](Case& t) { t.page_tokens = 64, t.window = 99; });
  add("bad pages", {500, 3, 100}, [](Case& t) { t.page_tokens = 16, t.bad_pages = true; });
  add("ring", {500, 3, 100}, [](Case& t) { t.ring = 113, t.window = 100; });
  add("scales", {500, 3, 100}, [](Case& t) { t.scaled = true, t.kv_heads = 2, t.query_heads = 8; });
  add("scales, soft cap, rows", {500, 30, 100},
      [](Case& t) { t.scaled = true, t.kv_heads = 3, t.query_heads = 6, t.rows = 2, t.soft_cap = 4; });
  add("slots", {500, 3, 100, 7, 900}, [](Case& t) { t.slots = true; });
  add("token-major", {500, 3, 100}, [](Case& t) { t.token_major = true, t.kv_heads = 2, t.query_heads = 4; });
  add("token-major pages", {500, 3, 100},
      [](Case& t) { t.token_major = true, t.kv_heads = 2, t.query_heads = 4, t.page_tokens = 16; });
  add("4 rows", {500, 30, 100}, [](Case& t) { t.rows = 4, t.kv_heads = 2, t.query_heads = 4; });
  add("4 rows of 4 heads, window", {500, 30, 100}, [](Case& t) { t.rows = 4, t.window = 40, t.blocks = 5; });
  add("16 rows of 3 heads, pages", {500, 30, 100}, [](Case& t) { t.rows = 16, t.query_heads = 3, t.page_tokens = 16; });
  std::vector<int> many;
  for (int i = 0; i < 150; ++i) many.push_back(i % 7 == 3 ? 0 : (i * 37) % 300);
  add("150 sequences", many, [](Case& t) { t.query_heads = 2; });
  return all;
}

// Every variant asked for, and "8.0", the kernel of 8.0, which has no scales.
int check(const std::string& filter) {
  Workspace workspace;
  int failures = 0, runs = 0;
  const auto check_all = [&](const Variant* variant, const char* name, int d) {
    for (const Case& test : cases()) {
      if (variant == nullptr && test.scaled) continue;
      ++runs;
      const std::string wrong = check_one(variant, d, test, workspace);
      if (wrong.empty()) continue;
      ++failures;
      std::printf("WRONG %s, d %d, %s: %s\n", name, d, test.name.c_str(), wrong.c_str());
    }
  };
  for (const Variant& variant : kVariants) {
    if (is_asked(variant, filter)) check_all(&variant, variant.name, variant.head_dim);
  }
  for (const int d : {64, 128, 256}) {
    if (filter.empty() || filter == "=8.0") check_all(nullptr, "8.0", d);
  }
  std::printf("check: %d runs, %d failures\n", runs, failures);
  return failures;
}

// ---- bench ----
__global__ void fill(uint32_t* data, size_t words, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < words; i += size_t(gridDim.x) * blockDim.x) {
    uint64_t x = (i + seed * 0x9e3779b97f4a7c15ull + 1) * 0xbf58476d1ce4e5b9ull;
    x ^= x >> 29, x *= 0x94d049bb133111ebull, x ^= x >> 32;
    const auto one = [](uint32_t bits) {  // a sum of four uniform numbers, about normal
      const float f =
          (float(bits & 255) + float(bits >> 8 & 255) + float(bits >> 16 & 255) + float(bits >> 24)) / 147.8f - 3.45f;
      const __nv_bfloat16 b = __float2bfloat16_rn(f);
      return uint32_t(*reinterpret_cast<const uint16_t*>(&b));
    };
    data[i] = one(uint32_t(x)) | one(uint32_t(x >> 32)) << 16;
  }
}

// E4M3 of about normal numbers.
__global__ void fill_fp8(uint32_t* data, size_t words) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < words; i += size_t(gridDim.x) * blockDim.x) {
    uint64_t x = (i + 1) * 0xbf58476d1ce4e5b9ull;
    x ^= x >> 29, x *= 0x94d049bb133111ebull, x ^= x >> 32;
    uint32_t word = 0;
    for (int byte = 0; byte < 4; ++byte) {
      const uint32_t bits = uint32_t(x >> (16 * byte)) & 0xffff;
      const float f =
          (float(bits & 15) + float(bits >> 4 & 15) + float(bits >> 8 & 15) + float(bits >> 12)) / 9.2f - 3.26f;
      word |= uint32_t(__nv_fp8_e4m3(f).__x) << (8 * byte);
    }
    data[i] = word;
  }
}

__global__ void nothing() {
  begin_overlapped();
}

// Reads bytes by bulk copies of `piece` bytes, 16 a stage, with `stages` stages.
__global__ void __launch_bounds__(32) read_only(const unsigned char* data, size_t bytes, int piece, int stages) {
  extern __shared__ __align__(1024) unsigned char ring[];
  __shared__ uint64_t full[64];
  const int lane = threadIdx.x;
  for (int i = lane; i < stages; i += 32) barrier_init(full + i, 1);
  barrier_init_fence();
  order_bulk_copies();
  __syncwarp();
  begin_overlapped();
  const size_t stage_bytes = size_t(16) * piece;
  const size_t total = bytes / stage_bytes;
  const size_t begin = total * blockIdx.x / gridDim.x, end = total * (blockIdx.x + 1) / gridDim.x;
  const auto issue = [&](size_t at, int slot) {
    if (lane == 0) barrier_expect(full + slot, stage_bytes);
    __syncwarp();
    if (lane < 16) {
      bulk_copy(ring + (slot * 16 + lane) * (piece + 16), data + at * stage_bytes + size_t(lane) * piece, piece,
                full + slot);
    }
    __syncwarp();
  };
  for (int i = 0; i < stages; ++i) {
    if (begin + i < end) issue(begin + i, i);
  }
  int slot = 0, parity = 0;
  for (size_t at = begin; at < end; ++at) {
    barrier_wait(full + slot, parity);
    if (at + stages < end) issue(at + stages, slot);
    if (++slot == stages) slot = 0, parity ^= 1;
  }
}

struct Row {
  int d, query_heads, kv_heads, batch, length;
  double peer;  // TB/s, PyTorch's best of the record
};
const Row kRows[] = {
    {128, 32, 8, 1, 4096, 1.527}, {128, 32, 8, 1, 32768, 3.599}, {128, 32, 8, 1, 131072, 4.241},
    {128, 32, 8, 8, 8192, 4.008}, {128, 32, 8, 64, 4096, 4.419}, {128, 32, 8, 128, 1024, 4.251},
    {256, 8, 4, 1, 4096, 1.225},  {256, 8, 4, 1, 32768, 2.584},  {256, 8, 4, 1, 131072, 3.536},
    {256, 8, 4, 8, 8192, 3.559},  {256, 8, 4, 64, 4096, 4.414},  {256, 8, 4, 128, 1024, 4.203},
    {256, 16, 8, 1, 4096, 1.614}, {256, 16, 8, 1, 32768, 3.393}, {256, 16, 8, 1, 131072, 4.096},
    {256, 16, 8, 8, 8192, 4.134}, {256, 16, 8, 64, 4096, 4.425}, {256, 16, 8, 128, 1024, 4.278},
    {64, 32, 8, 1, 4096, 1.013},  {64, 32, 8, 1, 32768, 3.168},  {64, 32, 8, 1, 131072, 4.102},
    {64, 32, 8, 8, 8192, 3.786},  {64, 32, 8, 64, 4096, 4.326},  {64, 32, 8, 128, 1024, 4.140},
};

struct Bench {
  cudaStream_t stream;
  nvb_launch launch;
  unsigned char* memory;
  size_t memory_bytes;
  Workspace workspace;
  void* query;
  void* output;
  int32_t* positions;
  int32_t* table = nullptr;

  Bench() {
    MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    launch = device_launch(stream);
    memory_bytes = size_t{9} << 29;
    MUST(cudaMalloc(&memory, memory_bytes));
    fill<<<2048, 256>>>(reinterpret_cast<uint32_t*>(memory), memory_bytes / 4, 1);
    MUST(cudaMalloc(&query, 64 << 20));
    fill<<<2048, 256>>>(static_cast<uint32_t*>(query), 16 << 20, 2);
    MUST(cudaMalloc(&output, 64 << 20));
    MUST(cudaMalloc(&positions, 4096 * 4));
    MUST(cudaDeviceSynchronize());
  }

  // Microseconds a call.
  template <typename Call>
  double time(const Call& call, int rotation, double expected_us) {
    int calls = std::max(rotation, std::min(200, static_cast<int>(400 / expected_us) + 1));
    calls = (calls + rotation - 1) / rotation * rotation;
    for (int i = 0; i < 3; ++i) {
      const cudaError_t error = call(i % rotation);
      if (error != cudaSuccess) {
        cudaGetLastError();
        return NAN;
      }
    }
    MUST(cudaStreamSynchronize(stream));
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < calls; ++i) MUST(call(i % rotation));
    MUST(cudaStreamEndCapture(stream, &graph));
    MUST(cudaGraphInstantiate(&replay, graph, 0));
    cudaEvent_t begin, end;
    MUST(cudaEventCreate(&begin));
    MUST(cudaEventCreate(&end));
    std::vector<float> times;
    for (int round = 0; round < 9; ++round) {
      MUST(cudaGraphLaunch(replay, stream));
      MUST(cudaEventRecord(begin, stream));
      MUST(cudaGraphLaunch(replay, stream));
      MUST(cudaEventRecord(end, stream));
      MUST(cudaEventSynchronize(end));
      float milliseconds = 0;
      MUST(cudaEventElapsedTime(&milliseconds, begin, end));
      if (round >= 2) times.push_back(milliseconds);
    }
    std::sort(times.begin(), times.end());
    MUST(cudaEventDestroy(begin));
    MUST(cudaEventDestroy(end));
    MUST(cudaGraphExecDestroy(replay));
    MUST(cudaGraphDestroy(graph));
    return times[times.size() / 2] * 1e3 / calls;
  }

  // Lengths may differ; `page` 0: contiguous.
  nvb_attention_decode_params params(const Row& row, const std::vector<int>& lengths, int page, int rows) {
    nvb_attention_decode_params p = {};
    std::vector<int32_t> host;
    int longest = 0;
    for (const int length : lengths) {
      for (int i = 0; i < rows; ++i) host.push_back(length - rows + i);
      longest = std::max(longest, length);
    }
    MUST(cudaMemcpy(positions, host.data(), host.size() * 4, cudaMemcpyHostToDevice));
    p.query = query, p.output = output, p.positions = positions;
    p.sequences = row.batch, p.rows_per_sequence = rows, p.query_heads = row.query_heads, p.kv_heads = row.kv_heads,
    p.head_dim = p.value_dim = row.d;
    p.slot_count = row.batch, p.capacity = longest, p.max_kv_length = longest;
    p.scale = 1.0f / std::sqrt(float(row.d));
    p.query_dtype = p.kv_dtype = p.output_dtype = NVB_BF16;
    p.key_token_stride = p.value_token_stride = row.d;
    p.key_head_stride = p.value_head_stride = int64_t{longest} * row.d;
    p.key_sequence_stride = p.value_sequence_stride = p.key_head_stride * row.kv_heads;
    p.query_head_stride = p.output_head_stride = row.d;
    p.query_token_stride = p.output_token_stride = int64_t{row.d} * row.query_heads;
    if (page > 0) {
      const int entries = (longest + page - 1) / page;
      std::vector<int32_t> pages(size_t(entries) * row.batch);
      for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<int32_t>(i);
      std::shuffle(pages.begin(), pages.end(), std::mt19937(3));
      if (table != nullptr) MUST(cudaFree(table));
      MUST(cudaMalloc(&table, pages.size() * 4));
      MUST(cudaMemcpy(table, pages.data(), pages.size() * 4, cudaMemcpyHostToDevice));
      p.placement.pages = table, p.placement.page_row_stride = entries, p.placement.page_tokens = page;
      p.placement.page_count = static_cast<int32_t>(pages.size());
      p.key_head_stride = p.value_head_stride = int64_t{page} * row.d;
      p.placement.block_stride = p.placement.value_block_stride = p.key_head_stride * row.kv_heads;
    }
    return p;
  }

  double measure(const Variant* variant, const Row& row, const std::vector<int>& lengths, int page, int rows = 1) {
    const nvb_attention_decode_params base = params(row, lengths, page, rows);
    const size_t tensor =
        (size_t(row.batch) * row.kv_heads * base.capacity * row.d * (variant != nullptr && variant->fp8 ? 1 : 2) +
         4095) /
        4096 * 4096;
    const int rotation = std::max<int>(
        1,
        std::min<int64_t>(2 * tensor >= 600000000 ? 1 : (200 << 20) / (2 * tensor) + 1, memory_bytes / (2 * tensor)));
    const auto call = [&](int i) {
      nvb_attention_decode_params p = base;
      p.key = memory + 2 * tensor * i, p.value = memory + 2 * tensor * i + tensor;
      return variant != nullptr ? launch_new(*variant, p, workspace, 0, launch) : launch_old(p, workspace, launch);
    };
    double bytes = 0;
    for (const int length : lengths) bytes += 4.0 * length * row.kv_heads * row.d;
    return time(call, rotation, bytes / 4.2e6);
  }

  void read_rates() {
    std::printf("empty kernel: %.2f us a call in a graph\n", time(
                                                                 [&](int) {
                                                                   launch_overlapped(nothing, dim3(132), dim3(288), 0,
                                                                                     &launch);
                                                                   return cudaGetLastError();
                                                                 },
                                                                 1, 2));
    MUST(cudaFuncSetAttribute(read_only, cudaFuncAttributeMaxDynamicSharedMemorySize, 226 << 10));
    for (const size_t bytes : {size_t{8} << 20, size_t{16} << 20, size_t{128} << 20, size_t{1} << 30}) {
      std::printf("reading %4zu MiB, TB/s:", bytes >> 20);
      for (const int piece : {512, 1024, 2048, 4096}) {
        for (const int kib : {64, 104, 200}) {
          const int stages = std::min(64, (kib << 10) / (16 * (piece + 16)));
          if (stages < 1) continue;
          const int shared = stages * 16 * (piece + 16);
          const int rotation = bytes >= 600000000 ? 1 : (200 << 20) / bytes + 1;
          const double us = time(
              [&](int i) {
                return launch_overlapped(read_only, dim3(launch.multiprocessors), dim3(32), shared, &launch,
                                         static_cast<const unsigned char*>(memory + bytes * i), bytes, piece, stages);
              },
              rotation, bytes / 4.2e6);
          std::printf(" %d/%dK %.2f (%.1f us)", piece, kib, bytes / us * 1e-6, us);
        }
      }
      std::printf("\n");
    }
  }

  void table_of_rows(const std::string& filter) {
    const bool pages = std::getenv("NVB_PAGES") != nullptr;
    for (const Row& row : kRows) {
      const std::vector<int> lengths(row.batch, row.length);
      const double bytes = 4.0 * row.batch * row.length * row.kv_heads * row.d;
      const double old = measure(nullptr, row, lengths, 0), old_paged = measure(nullptr, row, lengths, 16);
      std::printf("d=%d %d/%d b=%d kv=%d: 8.0 %.1f us, %.2f of the peer, pages of 16 %.2f\n", row.d, row.query_heads,
                  row.kv_heads, row.batch, row.length, old, bytes / old * 1e-6 / row.peer, old / old_paged);
      for (const Variant& variant : kVariants) {
        if (variant.head_dim != row.d || variant.rows > 8 || variant.fp8 || !is_asked(variant, filter)) continue;
        if (row.batch * row.kv_heads * variant.options.cluster > 264 && variant.options.cluster > 1) continue;
        const double us = measure(&variant, row, lengths, 0);
        const double paged = pages ? measure(&variant, row, lengths, 16) : us;
        std::printf("   %-20s %8.1f us %.3f TB/s, %.2f of the peer, pages of 16 %.2f\n", variant.name, us,
                    bytes / us * 1e-6, bytes / us * 1e-6 / row.peer, us / paged);
      }
      std::fflush(stdout);
    }
  }

  void unequal_lengths(const std::string& filter) {
    for (const int d : {128, 64, 256}) {
      const Row row{d, 32, 8, 32, 4096, 0};
      std::vector<int> lengths;
      double sum = 0;
      for (int i = 0; i < 32; ++i) {
        lengths.push_back(static_cast<int>(128 * std::pow(128.0, i / 31.0)));
        sum += lengths.back();
      }
      std::shuffle(lengths.begin(), lengths.end(), std::mt19937(5));
      const std::vector<int> equal(32, static_cast<int>(sum / 32));
      const auto line = [&](const Variant* variant) {
        const double one = measure(variant, row, lengths, 0), other = measure(variant, row, equal, 0);
        std::printf("unequal d=%d %-20s %.1f us, equal %.1f us: %.2f of the rate\n", d,
                    variant != nullptr ? variant->name : "8.0", one, other, sum / one / (equal[0] * 32.0 / other));
      };
      line(nullptr);
      for (const Variant& variant : kVariants) {
        if (variant.head_dim == d && variant.rows <= 8 && !variant.fp8 && is_asked(variant, filter)) line(&variant);
      }
      std::fflush(stdout);
    }
  }

  void rows_of_a_sequence(const std::string& filter) {
    for (const int d : {128, 64, 256}) {
      for (const int batch : {64, 1}) {
        const Row row{d, d == 256 ? 16 : 32, 8, batch, 4096, 0};
        const std::vector<int> lengths(batch, 4096);
        const double one = measure(nullptr, row, lengths, 0), four = measure(nullptr, row, lengths, 0, 4);
        std::printf("4 queries d=%d b=%d: 8.0 %.1f us, one query %.1f us\n", d, batch, four, one);
        for (const Variant& variant : kVariants) {
          if (variant.head_dim != d || variant.rows < 16 || variant.fp8 || !is_asked(variant, filter)) continue;
          std::printf("   %-20s %.1f us\n", variant.name, measure(&variant, row, lengths, 0, 4));
        }
        std::fflush(stdout);
      }
    }
  }

  void fp8(const std::string& filter) {
    fill_fp8<<<2048, 256>>>(reinterpret_cast<uint32_t*>(memory), memory_bytes / 4);
    MUST(cudaDeviceSynchronize());
    for (const Row& row : {Row{128, 32, 8, 64, 4096, 0}, Row{128, 32, 8, 1, 4096, 0}, Row{128, 32, 8, 1, 32768, 0},
                           Row{128, 32, 8, 128, 1024, 0}, Row{256, 16, 8, 64, 4096, 0}, Row{256, 16, 8, 1, 4096, 0}}) {
      const std::vector<int> lengths(row.batch, row.length);
      std::printf("fp8 d=%d b=%d kv=%d\n", row.d, row.batch, row.length);
      for (const Variant& variant : kVariants) {
        if (variant.head_dim != row.d || !variant.fp8 || variant.e5m2 || !is_asked(variant, filter)) continue;
        const double us = measure(&variant, row, lengths, 0), paged = measure(&variant, row, lengths, 16);
        const double four = row.d == 128 && variant.rows == 16 ? measure(&variant, row, lengths, 0, 4) : 0;
        std::printf("   %-20s %.1f us, pages of 16 %.2f, 4 queries %.1f us\n", variant.name, us, us / paged, four);
      }
      std::fflush(stdout);
    }
  }
};

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "all";
  const std::string filter = argc > 2 ? argv[2] : "";
  if (mode == "list") {
    for (const Variant& variant : kVariants) std::printf("%s\n", variant.name);
    std::printf("8.0\n");
    return 0;
  }
  int failures = 0;
  if (mode == "check" || mode == "all") failures = check(filter);
  if (mode == "bench" || mode == "all") {
    Bench bench;
    if (filter.empty() || filter == "read") bench.read_rates();
    if (filter == "read") return 0;
    bench.rows_of_a_sequence(filter);
    bench.unequal_lengths(filter);
    bench.table_of_rows(filter);
    bench.fp8(filter);
  }
  return failures != 0;
}
