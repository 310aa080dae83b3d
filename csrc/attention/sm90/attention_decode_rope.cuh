// Decode attention of one new token a sequence that takes the token as the product before left it: norm and rotation of
// its queries and key, the append of key and value, and the attention over all keys, in one kernel for 9.0. The
// formulas are those of attention.h and rope.h; what a rope kernel and a decode kernel would round between each other
// is rounded here too.
//
// A cluster of up to 8 blocks has a KV head and up to kHeads of its query heads, and divides the visible keys evenly.
// Every block rotates its queries, a warp a head; the block with the last key rotates that, and the cluster of the
// head's first queries writes key and value to the cache. Nobody reads them from there: the block keeps both in shared
// memory.
//
// Before the grids in front have finished (`early`), a block finds its keys, sines, cosines and factors of norms, and
// has the first pass of older keys and values on their way: to shared memory where nothing else in the graph writes the
// cache (`loads_early`), else to L2 alone, which is right whoever writes them.
//
// As in attention_decode_short.cu a lane has 8 columns, kLanes lanes have a key, and nobody waits for a block-wide
// barrier between keys and output. Each block of the cluster then merges a part of the columns, from the warps of all
// blocks.
//
// Shared memory: 48 KiB of keys and values, and at most 8 KiB of queries and results; below 60 KiB, so that the blocks
// of the products in front and behind fit beside it.
#pragma once

#include <algorithm>

#include "../../common/cluster.cuh"
#include "../../common/programmatic_launch.cuh"
#include "../../common/reduce.cuh"
#include "../attention_decode.cuh"

namespace nvb {
namespace decode_rope {

constexpr int kMaxBlocks = 8;  // of a cluster
constexpr int kMaxPairs = 128;

struct Arguments {
  nvb_attention_decode_params params;
  nvb_attention_decode_rope rope;
  int32_t early;        // nothing in the graph writes positions and norms
  int32_t loads_early;  // nor the cache, this operation apart
  float inverse_frequency[kMaxPairs];
};
static_assert(sizeof(Arguments) <= 4096, "drivers before 12.1 take at most 4096 bytes of kernel arguments");

template <int HeadDim, int Heads>
struct Tile {
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kHeads = Heads;
  static constexpr int kLanes = HeadDim / 8;  // of a key
  static constexpr int kWarps = 16;
  // More threads than a block has leave a thread fewer registers.
  static constexpr int kThreadsBound = Heads == 4 ? 32 * kWarps : 48 * kWarps;
  static constexpr int kUnroll = kLanes / Heads < 4 ? kLanes / Heads : 4;
  static constexpr int kKeysPerLoad = 32 / kLanes;
  static constexpr int kPass = kWarps * kUnroll * kKeysPerLoad;  // keys
  static constexpr int kParts = Heads * HeadDim / 4;             // vectors of four columns of a result
  // A warp's keys and values, and in their place its output.
  static constexpr int kWarpFloats = std::max(Heads * HeadDim, 2 * kUnroll * 128);
  // Then a vector of each block for each column that this block merges; their shares are rounded up.
  static constexpr int kReceived = kParts + kMaxBlocks;
  static constexpr int kSharedBytes = kWarps * kWarpFloats * 4 + kReceived * 16 + Heads * HeadDim * 4 + 2 * HeadDim * 2;
  static_assert(HeadDim == 64 || HeadDim == 128 || HeadDim == 256, "a key has 8, 16 or 32 lanes");
  static_assert(kUnroll * Heads <= kLanes, "transpose_sum leaves a lane at most one score");
  static_assert(kSharedBytes <= 74 * 1024 && Heads + 2 <= kWarps, "what the head of the file says");
};

// Eight factors of a norm.
__device__ __forceinline__ void load_factors(const void* norm, uint32_t dtype, int column, float (&factors)[8]) {
  if (dtype == NVB_F32) {
    const float4* const from = reinterpret_cast<const float4*>(static_cast<const float*>(norm) + column);
    const float4 low = from[0], high = from[1];
    factors[0] = low.x, factors[1] = low.y, factors[2] = low.z, factors[3] = low.w;
    factors[4] = high.x, factors[5] = high.y, factors[6] = high.z, factors[7] = high.w;
  } else if (dtype == NVB_F16) {
    load16_as_float(static_cast<const __half*>(norm) + column, factors);
  } else {
    load16_as_float(static_cast<const __nv_bfloat16*>(norm) + column, factors);
  }
}

// Norms one head, whose columns 8 * lane ... the first kLanes lanes have; further lanes repeat them. The squares are
// added in the order of rope.cuh where all of the head rotates.
template <int kLanes>
__device__ __forceinline__ void norm_head(float (&x)[8], const float (&factors)[8], float epsilon, float offset) {
  const int lane = threadIdx.x % kLanes;
  float squares = 0.0f;
#pragma unroll
  for (int e = 0; e < 8; ++e) squares += x[e] * x[e];
  const float first = __shfl_xor_sync(0xffffffffu, squares, kLanes / 2);
  if (lane >= kLanes / 2) {
    squares = first;
#pragma unroll
    for (int e = 0; e < 8; ++e) squares += x[e] * x[e];
  }
  const float pair = __shfl_xor_sync(0xffffffffu, squares, kLanes / 2);
  if (lane < kLanes / 2) squares = pair;
#pragma unroll
  for (int distance = kLanes / 4; distance > 0; distance /= 2) {
    squares += __shfl_xor_sync(0xffffffffu, squares, distance);
  }
  const float inverse = rsqrtf(squares / static_cast<float>(8 * kLanes) + epsilon);
#pragma unroll
  for (int e = 0; e < 8; ++e) x[e] = x[e] * inverse * (offset + factors[e]);
}

// Rotates it: column i and i + rotary_dim / 2 are a pair, which lanes 16 / rotary_dim apart have.
template <int kLanes>
__device__ __forceinline__ void rotate_head(float (&x)[8], const float* cosines, const float* sines, int rotary_dim) {
  const int lane = threadIdx.x % kLanes;
  const int apart = rotary_dim / 16;
  const bool first = lane < apart;
  const bool rotated = lane < 2 * apart;
  const int angle = rotated ? (first ? lane : lane - apart) * 8 : 0;
  const int other = rotated ? (first ? lane + apart : lane - apart) : lane;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const float paired = __shfl_sync(0xffffffffu, x[e], other, kLanes);
    const float cosine = cosines[angle + e], sine = sines[angle + e];
    const float turned = first ? x[e] * cosine - paired * sine : x[e] * cosine + paired * sine;
    x[e] = rotated ? turned : x[e];
  }
}

// Vectors that block `rank` of `blocks` merges, of `parts`: from rank * share on, fewer in the last ones.
__host__ __device__ __forceinline__ int share_of(int parts, int blocks) {
  return (parts + blocks - 1) / blocks;
}

// Adds over parts `i` with the weights 2^(maximum - their maximum), four columns of one head.
template <int Count>
__device__ __forceinline__ float4 merge_columns(const float2* states, int count, int state_stride, const float4* parts,
                                                int part_stride, float2& total) {
  float most = -CUDART_INF_F;
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    if (i < count) most = fmaxf(most, states[i * state_stride].x);
  }
  const float base = exponent_base(most);
  float4 output = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    if (i >= count) continue;
    const float2 state = states[i * state_stride];
    const float4 part = parts[i * part_stride];
    const float weight = exp2_fast(state.x - base);
    sum += weight * state.y;
    output.x += weight * part.x, output.y += weight * part.y, output.z += weight * part.z, output.w += weight * part.w;
  }
  total = make_float2(most, sum);
  return output;
}

template <typename T, typename Tile>
__global__ void __launch_bounds__(Tile::kThreadsBound)
    attention_decode_rope_kernel(const __grid_constant__ Arguments arguments) {
  constexpr int kLanes = Tile::kLanes, kHeads = Tile::kHeads, kUnroll = Tile::kUnroll, kHeadDim = Tile::kHeadDim;
  constexpr int kScoreLanes = kLanes / (kUnroll * kHeads);  // lanes with the same score
  extern __shared__ __align__(16) float shared[];
  __shared__ __align__(16) float cosines[kMaxPairs];
  __shared__ __align__(16) float sines[kMaxPairs];
  __shared__ float2 states[Tile::kWarps][kHeads];  // maximum in powers of two, sum
  __shared__ __align__(16) float4 received_states[kMaxBlocks][kHeads];
  __shared__ uint64_t arrived;
  float4* const received = reinterpret_cast<float4*>(shared + Tile::kWarps * Tile::kWarpFloats);
  float4* const queries = received + Tile::kReceived;                             // [kHeads][2][kLanes]
  uint4* const newest = reinterpret_cast<uint4*>(queries + kHeads * 2 * kLanes);  // [key, value][kLanes]
  const nvb_attention_decode_params& p = arguments.params;
  const nvb_attention_decode_rope& rope = arguments.rope;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int part_lane = lane % kLanes;
  const int column = part_lane * 8;
  float* const warp_part = shared + warp * Tile::kWarpFloats;
  uint4* const own_keys = reinterpret_cast<uint4*>(warp_part) + lane;
  const int blocks = gridDim.x;
  const bool joined = blocks > 1;
  const int share = share_of(Tile::kParts, blocks);
  const int own_parts = max(0, min(share, Tile::kParts - static_cast<int>(blockIdx.x) * share));

  // Every block receives from all, itself too.
  if (joined) {
    if (threadIdx.x == 0) {
      barrier_init(&arrived, 1);
      barrier_init_fence();
      barrier_expect(&arrived, blocks * (own_parts + kHeads) * 16);
    }
    __syncthreads();
    cluster_arrive();
  }
  allow_next_grid();

  DecodeBlock block = block_items(p);
  const bool is_query = warp < block.heads;
  const bool is_key = warp == kHeads;
  const bool is_value = warp == kHeads + 1;
  const bool placed = is_placed(p.placement);

  // Which keys, where the token stands, its angles and the norms' factors.
  int position = 0;
  float factors[8] = {};
  const auto prepare = [&] {
    position = p.positions[block.sequence];
    block.slot = p.slots != nullptr ? p.slots[block.sequence] : block.sequence;
    const bool inside = block.slot >= 0 && block.slot < p.slot_count && position >= 0 && position < p.capacity;
    for (int i = threadIdx.x; i < rope.rotary_dim / 2; i += blockDim.x) {
      sincosf(static_cast<float>(position) * arguments.inverse_frequency[i] * rope.position_scale, &sines[i],
              &cosines[i]);
    }
    if (is_query && rope.query_norm != nullptr) load_factors(rope.query_norm, rope.query_norm_dtype, column, factors);
    if (is_key && rope.key_norm != nullptr) load_factors(rope.key_norm, rope.key_norm_dtype, column, factors);
    const int length = inside ? position + 1 : 0;
    const int first = p.window > 0 ? max(0, length - p.window) : 0;
    const int keys = (length - first + blocks - 1) / blocks;
    block.begin = min(length, first + static_cast<int>(blockIdx.x) * keys);
    block.end = min(length, block.begin + keys);
    __syncthreads();
  };

  // Neighbouring loads of the block go to neighbouring warps, so that few keys are many warps'.
  const auto token_of = [&](int first, int u) {
    return first + (u * Tile::kWarps + warp) * Tile::kKeysPerLoad + lane / kLanes;
  };
  // Where a token's key or value of this lane lies, or null: no token of the block, the newest, or one without a page.
  const auto address = [&](int tensor, int token) -> const T* {
    if (token >= block.end || token == position) return nullptr;
    const int64_t stride = tensor == 0 ? p.key_token_stride : p.value_token_stride;
    int64_t offset = token * stride;
    if (placed) {
      const uint32_t row = kv_row(p.placement, page_row(p, block), token);
      if (row == kNoRow) return nullptr;
      offset = kv_offset(p.placement.block_stride, row, stride);
    }
    const int64_t sequence_stride = tensor == 0 ? p.key_sequence_stride : p.value_sequence_stride;
    const int64_t head_stride = tensor == 0 ? p.key_head_stride : p.value_head_stride;
    return static_cast<const T*>(tensor == 0 ? p.key : p.value) + sequence_offset(p, block, sequence_stride) +
           block.kv_head * head_stride + offset + column;
  };
  const auto load = [&](int tensor, int first) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const T* const from = address(tensor, token_of(first, u));
      // What is not loaded is zero: stale rows of the cache may hold NaN.
      cp_async16(own_keys + (tensor * kUnroll + u) * 32, from != nullptr ? from : static_cast<const T*>(p.key),
                 from != nullptr);
    }
    cp_async_commit();
  };

  // Before the grids in front have finished.
  const bool loads_early = arguments.early != 0 && arguments.loads_early != 0;
  if (arguments.early) {
    prepare();
    if (loads_early) {
      load(0, block.begin);
      load(1, block.begin);
    }
    for (int first = loads_early ? block.begin + Tile::kPass : block.begin; first < block.end; first += Tile::kPass) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int token = token_of(first, u);
        const T* const key = address(0, token);
        const T* const value = address(1, token);
        if (part_lane % 8 == 0 && key != nullptr) prefetch_l2(key), prefetch_l2(value);
      }
    }
  }
  wait_for_previous_grid();
  if (!arguments.early) prepare();

  // The new token. A warp without one repeats a query, for all lanes take part in the shuffles.
  const bool owns_newest = position >= block.begin && position < block.end;
  const DecodeItem item = item_of(p, block, min(warp, block.heads - 1));
  if (is_query || (owns_newest && (is_key || is_value))) {
    const T* const source =
        is_query ? static_cast<const T*>(p.query) + item.row * p.query_token_stride + item.head * p.query_head_stride
        : is_key ? static_cast<const T*>(rope.key) + block.sequence * rope.key_token_stride +
                       block.kv_head * rope.key_head_stride
                 : static_cast<const T*>(rope.value) + block.sequence * rope.value_token_stride +
                       block.kv_head * rope.value_head_stride;
    uint4 raw = load16(source + column);
    if (!loads_early) {
      load(0, block.begin);
      load(1, block.begin);
    }
    if (!is_value) {
      float x[8];
      unpack16<T>(raw, x);
      if ((is_query ? rope.query_norm : rope.key_norm) != nullptr) {
        norm_head<kLanes>(x, factors, rope.epsilon, rope.weight_offset);
      }
      rotate_head<kLanes>(x, cosines, sines, rope.rotary_dim);
      if (is_query) {
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] *= rope.query_scale;
      }
      raw = pack16<T>(x);
      if (is_query) {
        unpack16<T>(raw, x);
        if (lane < kLanes) {
          queries[(warp * 2) * kLanes + lane] = make_float4(x[0], x[1], x[2], x[3]);
          queries[(warp * 2 + 1) * kLanes + lane] = make_float4(x[4], x[5], x[6], x[7]);
        }
      }
    }
    if (!is_query && lane < kLanes) {
      int64_t offset = position * (is_key ? p.key_token_stride : p.value_token_stride);
      bool has_place = true;
      if (placed) {
        const uint32_t row = kv_row(p.placement, page_row(p, block), position);
        has_place = row != kNoRow;
        offset = has_place
                     ? kv_offset(p.placement.block_stride, row, is_key ? p.key_token_stride : p.value_token_stride)
                     : 0;
      }
      offset += sequence_offset(p, block, is_key ? p.key_sequence_stride : p.value_sequence_stride) +
                block.kv_head * (is_key ? p.key_head_stride : p.value_head_stride) + column;
      newest[(is_key ? 0 : kLanes) + lane] = has_place ? raw : make_uint4(0, 0, 0, 0);
      if (has_place && block.first == 0) {
        T* const cache = static_cast<T*>(const_cast<void*>(is_key ? p.key : p.value));
        store16(cache + offset, raw);
      }
    }
  } else if (!loads_early) {
    load(0, block.begin);
    load(1, block.begin);
  }
  __syncthreads();

  const int newest_token = owns_newest ? position : -1;  // elsewhere nobody has written `newest`
  const int score_index = part_lane / kScoreLanes;       // of this lane: kHeads * step + head
  const float factor = p.soft_cap > 0.0f ? p.soft_cap * kLog2E : p.scale * kLog2E;
  const float cap_factor = p.soft_cap > 0.0f ? p.scale / p.soft_cap : 0.0f;
  float q[kHeads][8];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    // A head too many repeats the last, and is not stored.
    const float4* const from = queries + 2 * min(h, block.heads - 1) * kLanes + part_lane;
    const float4 low = from[0], high = from[kLanes];
    q[h][0] = low.x, q[h][1] = low.y, q[h][2] = low.z, q[h][3] = low.w;
    q[h][4] = high.x, q[h][5] = high.y, q[h][6] = high.z, q[h][7] = high.w;
  }
  float output[kHeads][8] = {};
  float maximum = -CUDART_INF_F;  // of this lane's head, the same in the whole warp
  float sum = 0.0f;               // of this lane's keys
  for (int first = block.begin; first < block.end; first += Tile::kPass) {
    // Scores: this lane's columns, then one whole score a lane.
    cp_async_wait<1>();
    float products[kUnroll * kHeads];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint4* const from = token_of(first, u) == newest_token ? newest + part_lane : own_keys + u * 32;
      float k[8];
      unpack16<T>(*from, k);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        float product = 0.0f;
#pragma unroll
        for (int e = 0; e < 8; ++e) product = fmaf(q[h][e], k[e], product);
        products[u * kHeads + h] = product;
      }
    }
    // The next pass's keys take the place of these, which this lane alone reads.
    const bool more = first + Tile::kPass < block.end;
    if (more) load(0, first + Tile::kPass);
    float score = transpose_sum<kLanes / 2>(products);
    const int token = token_of(first, score_index / kHeads);
    if (p.soft_cap > 0.0f) score = tanh_fast(score * cap_factor);
    score = token < block.end ? score * factor : -CUDART_INF_F;

    // Probabilities, of a maximum that the lanes of a head share.
    float most = score;
#pragma unroll
    for (int offset = 16; offset >= kScoreLanes * kHeads; offset /= 2) {
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
    }
    most = fmaxf(most, maximum);
    const float base = exponent_base(most);
    const float rescale = exp2_fast(maximum - base);
    const float probability = exp2_fast(score - base);
    maximum = most;
    sum = sum * rescale + probability;

    // Output.
    if (more) {
      cp_async_wait<1>();
    } else {
      cp_async_wait<0>();
    }
    if (first != block.begin) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float head_rescale = __shfl_sync(0xffffffffu, rescale, h * kScoreLanes);
#pragma unroll
        for (int e = 0; e < 8; ++e) output[h][e] *= head_rescale;
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint4* const from =
          token_of(first, u) == newest_token ? newest + kLanes + part_lane : own_keys + (kUnroll + u) * 32;
      float v[8];
      unpack16<T>(*from, v);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float weight = __shfl_sync(0xffffffffu, probability, (u * kHeads + h) * kScoreLanes, kLanes);
#pragma unroll
        for (int e = 0; e < 8; ++e) output[h][e] = fmaf(weight, v[e], output[h][e]);
      }
    }
    if (more) load(1, first + Tile::kPass);
  }
  cp_async_wait<0>();

  // The warp's result: sums over its keys. Every lane has read its values.
  __syncwarp();
#pragma unroll
  for (int offset = 16; offset >= kScoreLanes * kHeads; offset /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  }
  if (lane < kScoreLanes * kHeads && lane % kScoreLanes == 0) {
    states[warp][lane / kScoreLanes] = make_float2(maximum, sum);
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
#pragma unroll
    for (int offset = 16; offset >= kLanes; offset /= 2) {
#pragma unroll
      for (int e = 0; e < 8; ++e) output[h][e] += __shfl_xor_sync(0xffffffffu, output[h][e], offset);
    }
    if (lane < kLanes) {
      float4* const part = reinterpret_cast<float4*>(warp_part + h * kHeadDim + column);
      part[0] = make_float4(output[h][0], output[h][1], output[h][2], output[h][3]);
      part[1] = make_float4(output[h][4], output[h][5], output[h][6], output[h][7]);
    }
  }
  __syncthreads();

  // Merge the warps, then the blocks.
  const auto store = [&](int part, const float4& four, const float2& total) {
    const int head = part / (kHeadDim / 4), at = part % (kHeadDim / 4) * 4;
    if (head >= block.heads) return;
    const float results[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) store_final(p, block, head, at + i, results[i], total.y);
    if (at == 0 && p.lse != nullptr) store_item_lse(p, block, head, total);
  };
  if (joined) cluster_wait();
  for (int part = threadIdx.x; part < Tile::kParts; part += blockDim.x) {
    const int head = part / (kHeadDim / 4);
    float2 total;
    const float4 four =
        merge_columns<Tile::kWarps>(&states[0][head], Tile::kWarps, kHeads,
                                    reinterpret_cast<const float4*>(shared) + part, Tile::kWarpFloats / 4, total);
    if (!joined) {
      store(part, four, total);
      continue;
    }
    const int rank = part / share;
    const float results[4] = {four.x, four.y, four.z, four.w};
    cluster_store(cluster_address(received + blockIdx.x * share + part % share, rank), results,
                  cluster_address(&arrived, rank));
  }
  if (!joined) return;
  if (static_cast<int>(threadIdx.x) < blocks * kHeads) {
    const int head = threadIdx.x % kHeads, rank = threadIdx.x / kHeads;
    float most = -CUDART_INF_F;
#pragma unroll
    for (int i = 0; i < Tile::kWarps; ++i) most = fmaxf(most, states[i][head].x);
    float all = 0.0f;
#pragma unroll
    for (int i = 0; i < Tile::kWarps; ++i)
      all += exp2_fast(states[i][head].x - exponent_base(most)) * states[i][head].y;
    const float state[4] = {most, all, 0.0f, 0.0f};
    cluster_store(cluster_address(&received_states[blockIdx.x][head], rank), state, cluster_address(&arrived, rank));
  }
  barrier_wait(&arrived, 0);
  for (int index = threadIdx.x; index < own_parts; index += blockDim.x) {
    const int part = blockIdx.x * share + index;
    float2 total;
    const float4 four =
        merge_columns<kMaxBlocks>(reinterpret_cast<const float2*>(&received_states[0][part / (kHeadDim / 4)]), blocks,
                                  2 * kHeads, received + index, share, total);
    store(part, four, total);
  }
}

// Calls `use` with the tile for a head dimension (64, 128 or 256) and a number of heads in a block (to 4).
template <typename Use>
auto with_tile(int head_dim, int heads, const Use& use) {
  const auto with_heads = [&](auto dim) {
    constexpr int kHeadDim = decltype(dim)::value;
    if (heads == 1) return use(Tile<kHeadDim, 1>());
    return heads == 2 ? use(Tile<kHeadDim, 2>()) : use(Tile<kHeadDim, 4>());
  };
  if (head_dim == 64) return with_heads(std::integral_constant<int, 64>());
  return head_dim == 128 ? with_heads(std::integral_constant<int, 128>())
                         : with_heads(std::integral_constant<int, 256>());
}

}  // namespace decode_rope
}  // namespace nvb
