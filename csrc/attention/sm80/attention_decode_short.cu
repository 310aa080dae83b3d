// Decode attention over the few keys of a short sequence or a window, for F16 and BF16 caches: what counts is latency.
//
// A warp has all keys and values of a pass on their way at once, to shared memory, where each lane reads what it
// fetched itself: with loads to registers the compiler puts those of values behind the scores, and one latency behind
// the other. There is no barrier before the output; a lane has 8 columns, so kLanes lanes have a key. Scores are f32
// sums, transposed over the lanes, so that each of them exponentiates one. A block reads its part of the keys
// (attention_decode.cuh) in passes, merges its warps in shared memory, and the blocks of a sequence are a cluster: they
// send their results to the first one, which merges them. So no workspace, no counter and no fence of the device is
// needed.
//
// Shapes: head_dim a multiple of 8, at most 8 * kLanes; up to kHeads query heads a block; rows of queries, keys and
// values 16-byte aligned. Shared memory: 80 KiB for 2 heads of 256 columns, 96 KiB for 4. Registers a thread:
// 16 * kHeads for q and the output; 64 in all with one head, so that a block fits beside those of a product. With 64
// for two heads, too, 16 sequences of Gemma 3 4B decode at 5,230 tokens/s in BF16 where they make 5,310.
#include <algorithm>
#include <type_traits>

#include "../../common/cluster.cuh"
#include "../../common/constant_reads.h"
#include "../../common/programmatic_launch.cuh"
#include "../../common/reduce.cuh"
#include "../../common/shared_limit.h"
#include "../attention_decode.cuh"

namespace nvb {
namespace {

constexpr int kMaxBlocks = 8;  // of a cluster
constexpr int kMaxPasses = 2;
constexpr int kMaxHeads = 4;  // of a block

template <int Lanes, int Heads>
struct ShortTile {
  static constexpr int kLanes = Lanes;  // of a key
  static constexpr int kHeads = Heads;
  static constexpr int kColumns = 8 * Lanes;
  static constexpr int kWarps = 16;
  static constexpr int kUnroll = Lanes / Heads < 4 ? Lanes / Heads : 4;
  static constexpr int kKeysPerLoad = 32 / Lanes;
  static constexpr int kPass = kWarps * kUnroll * kKeysPerLoad;  // keys
  // A warp's keys and values, and in their place its output.
  static constexpr int kWarpFloats = std::max(Heads * kColumns, 2 * kUnroll * 128);
  static constexpr int kSharedBytes = (kWarps * kWarpFloats + kMaxBlocks * Heads * kColumns) * 4;
  static_assert(kUnroll * Heads <= Lanes, "transpose_sum leaves a lane at most one score");
  static_assert(Heads <= kMaxHeadsPerBlock && kWarps <= kGroup, "the arrays of the merge");
};

// Adds over the warps or blocks `i` with the weights 2^(maximum - their maximum), four columns of one head.
template <int Count>
__device__ __forceinline__ float4 merge_columns(const float2* states, int count, int state_stride, const float* parts,
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
    const float4 part = *reinterpret_cast<const float4*>(parts + i * part_stride);
    const float weight = exp2_fast(state.x - base);
    sum += weight * state.y;
    output.x += weight * part.x, output.y += weight * part.y, output.z += weight * part.z, output.w += weight * part.w;
  }
  total = make_float2(most, sum);
  return output;
}

template <typename T, typename Tile>
__global__ void __launch_bounds__(32 * Tile::kWarps, Tile::kHeads == 1 ? 2 : 1)
    attention_decode_short_kernel(const __grid_constant__ DecodeArguments arguments, const bool early) {
  constexpr int kLanes = Tile::kLanes, kHeads = Tile::kHeads, kUnroll = Tile::kUnroll, kColumns = Tile::kColumns;
  constexpr int kKeysPerLoad = Tile::kKeysPerLoad;
  constexpr int kScoreLanes = kLanes / (kUnroll * kHeads);  // lanes with the same score
  extern __shared__ __align__(16) float parts[];            // [kWarps][kWarpFloats], [kMaxBlocks][kHeads][kColumns]
  __shared__ float2 states[Tile::kWarps][kHeads];           // maximum in powers of two, sum
  __shared__ __align__(16) float4 received_states[kMaxBlocks][kHeads];
  __shared__ uint64_t arrived;
  float* const received = parts + Tile::kWarps * Tile::kWarpFloats;
  const nvb_attention_decode_params& p = arguments.params;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* const warp_part = parts + warp * Tile::kWarpFloats;
  uint4* const own_keys = reinterpret_cast<uint4*>(warp_part) + lane;
  const int column = lane % kLanes * 8;
  const bool inside = column < p.head_dim;
  const bool joined = gridDim.x > 1;

  // The first block waits for the results of all, its own too.
  if (joined) {
    if (threadIdx.x == 0) {
      barrier_init(&arrived, 1);
      barrier_init_fence();
      if (blockIdx.x == 0) barrier_expect(&arrived, gridDim.x * kHeads * (kColumns * 4 + 16));
    }
    __syncthreads();
    cluster_arrive();
  }
  allow_next_grid();

  // Which keys. Before the grids in front have finished positions and tables may be old, but what is asked for in L2 is
  // right whoever writes it, and where it was not needed nothing is lost: a cache that a step of other layers has
  // driven out of L2 is there by the time the queries are. `early`: nothing in the graph writes positions and tables,
  // so they need not be looked at again. What depends on the arguments alone is found here too.
  const bool placed = is_placed(p.placement);
  const int warp_first = warp * (kUnroll * kKeysPerLoad) + lane / kLanes;
  DecodeBlock block = block_items(p);
  const int query_bytes = p.query_dtype == NVB_F32 ? 4 : 2;
  const char* query_rows[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    // A head too many repeats the last, and is not stored.
    const DecodeItem item = item_of(p, block, min(h, block.heads - 1));
    query_rows[h] = static_cast<const char*>(p.query) +
                    (item.row * p.query_token_stride + item.head * p.query_head_stride + column) * query_bytes;
  }
#if __CUDA_ARCH__ >= 900
  constexpr bool kOverlapped = true;
#else
  constexpr bool kOverlapped = false;
#endif
  if constexpr (kOverlapped) {
    block = find_decode_block<Tile::kPass, true>(arguments, 1);
    for (int first = block.begin + warp_first; first < block.end; first += Tile::kPass) {
      uint32_t rows[kUnroll];
      if (placed) kv_rows<kUnroll, kKeysPerLoad, true>(p.placement, page_row(p, block), first, block.end, rows);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int token = first + u * kKeysPerLoad;
        if (!inside || lane % 8 != 0 || token >= block.end || (placed && rows[u] == kNoRow)) continue;
#pragma unroll
        for (int tensor = 0; tensor < 2; ++tensor) {
          const int64_t stride = tensor == 0 ? p.key_token_stride : p.value_token_stride;
          const int64_t sequence_stride = tensor == 0 ? p.key_sequence_stride : p.value_sequence_stride;
          const int64_t head_stride = tensor == 0 ? p.key_head_stride : p.value_head_stride;
          prefetch_l2(static_cast<const T*>(tensor == 0 ? p.key : p.value) +
                      sequence_offset(p, block, sequence_stride) + block.kv_head * head_stride +
                      (placed ? kv_offset(p.placement.block_stride, rows[u], stride) : token * stride) + column);
        }
      }
    }
  }
  wait_for_previous_grid();

  // Queries, which wait for no position.
  uint4 query_raw[kHeads][2] = {};
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (inside) query_raw[h][0] = load16(query_rows[h]);
    if (inside && query_bytes == 4) query_raw[h][1] = load16(query_rows[h] + 16);
  }

  if (!kOverlapped || !early) block = find_decode_block<Tile::kPass>(arguments, 1);
  const T* const keys = static_cast<const T*>(p.key) + sequence_offset(p, block, p.key_sequence_stride) +
                        block.kv_head * p.key_head_stride + column;
  const T* const values = static_cast<const T*>(p.value) + sequence_offset(p, block, p.value_sequence_stride) +
                          block.kv_head * p.value_head_stride + column;
  const int score_index = lane % kLanes / kScoreLanes;  // of this lane: kHeads * step + head
  const float factor = p.soft_cap > 0.0f ? p.soft_cap * kLog2E : p.scale * kLog2E;
  const float cap_factor = p.soft_cap > 0.0f ? p.scale / p.soft_cap : 0.0f;

  const DecodeKeys visible = item_keys(p, block, score_index % kHeads);

  float q[kHeads][8];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (p.query_dtype == NVB_F32) {
      const uint4 low = query_raw[h][0], high = query_raw[h][1];
      q[h][0] = __uint_as_float(low.x), q[h][1] = __uint_as_float(low.y), q[h][2] = __uint_as_float(low.z);
      q[h][3] = __uint_as_float(low.w), q[h][4] = __uint_as_float(high.x), q[h][5] = __uint_as_float(high.y);
      q[h][6] = __uint_as_float(high.z), q[h][7] = __uint_as_float(high.w);
    } else if (p.query_dtype == NVB_F16) {
      unpack16<__half>(query_raw[h][0], q[h]);
    } else {
      unpack16<__nv_bfloat16>(query_raw[h][0], q[h]);
    }
  }
  float output[kHeads][8] = {};
  float maximum = -CUDART_INF_F;  // of this lane's head, the same in the whole warp
  float sum = 0.0f;               // of this lane's keys
  for (int first = block.begin; first < block.end; first += Tile::kPass) {
    // Keys past the end are zero, not read: stale rows of the cache may hold NaN.
    uint32_t rows[kUnroll];
    if (placed) {
      kv_rows<kUnroll, kKeysPerLoad>(p.placement, page_row(p, block), first + warp_first, block.end, rows);
    }
#pragma unroll
    for (int tensor = 0; tensor < 2; ++tensor) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t token = first + warp_first + u * kKeysPerLoad;
        const bool valid = inside && token < block.end && (!placed || rows[u] != kNoRow);
        const int64_t stride = tensor == 0 ? p.key_token_stride : p.value_token_stride;
        const int64_t offset = placed ? kv_offset(p.placement.block_stride, rows[u], stride) : token * stride;
        const T* const row = (tensor == 0 ? keys : values) + offset;
        cp_async16(own_keys + (tensor * kUnroll + u) * 32, valid ? row : static_cast<const T*>(p.key), valid);
      }
      cp_async_commit();
    }

    // Scores: this lane's columns, then one whole score a lane.
    cp_async_wait<1>();
    float products[kUnroll * kHeads];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      float k[8];
      unpack16<T>(own_keys[u * 32], k);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        float product = 0.0f;
#pragma unroll
        for (int e = 0; e < 8; ++e) product = fmaf(q[h][e], k[e], product);
        products[u * kHeads + h] = product;
      }
    }
    float score = transpose_sum<kLanes / 2>(products);
    const int token = first + warp_first + score_index / kHeads * kKeysPerLoad;
    if (p.soft_cap > 0.0f) score = tanh_fast(score * cap_factor);
    score = token >= visible.begin && token < visible.end ? score * factor : -CUDART_INF_F;

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
    cp_async_wait<0>();
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
      float v[8];
      unpack16<T>(own_keys[(kUnroll + u) * 32], v);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float weight = __shfl_sync(0xffffffffu, probability, (u * kHeads + h) * kScoreLanes, kLanes);
#pragma unroll
        for (int e = 0; e < 8; ++e) output[h][e] = fmaf(weight, v[e], output[h][e]);
      }
    }
  }

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
      float4* const part = reinterpret_cast<float4*>(warp_part + h * kColumns + column);
      part[0] = make_float4(output[h][0], output[h][1], output[h][2], output[h][3]);
      part[1] = make_float4(output[h][4], output[h][5], output[h][6], output[h][7]);
    }
  }
  __syncthreads();

  // Merge the warps, then the blocks.
  const auto store = [&](int head, int at, const float4& four, const float2& total) {
    if (head >= block.heads) return;
    const float results[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (at + i < p.head_dim) store_final(p, block, head, at + i, results[i], total.y);
    }
    if (at == 0 && p.lse != nullptr) store_item_lse(p, block, head, total);
  };
  const uint32_t target = joined ? cluster_address(received + blockIdx.x * (kHeads * kColumns), 0) : 0;
  const uint32_t state_target = joined ? cluster_address(received_states[blockIdx.x], 0) : 0;
  const uint32_t barrier = joined ? cluster_address(&arrived, 0) : 0;
  if (joined) cluster_wait();
  for (int index = threadIdx.x; index < kHeads * kColumns / 4; index += blockDim.x) {
    const int head = index / (kColumns / 4), at = index % (kColumns / 4) * 4;
    float2 total;
    const float4 four = merge_columns<Tile::kWarps>(&states[0][head], Tile::kWarps, kHeads,
                                                    parts + head * kColumns + at, Tile::kWarpFloats, total);
    if (joined) {
      const float results[4] = {four.x, four.y, four.z, four.w};
      cluster_store(target + (head * kColumns + at) * 4, results, barrier);
      const float state[4] = {total.x, total.y, 0.0f, 0.0f};
      if (at == 0) cluster_store(state_target + head * 16, state, barrier);
    } else {
      store(head, at, four, total);
    }
  }
  if (!joined || blockIdx.x != 0) return;
  barrier_wait(&arrived, 0);
  for (int index = threadIdx.x; index < kHeads * kColumns / 4; index += blockDim.x) {
    const int head = index / (kColumns / 4), at = index % (kColumns / 4) * 4;
    float2 total;
    const float4 four =
        merge_columns<kMaxBlocks>(reinterpret_cast<const float2*>(&received_states[0][head]), gridDim.x, 2 * kHeads,
                                  received + head * kColumns + at, kHeads * kColumns, total);
    store(head, at, four, total);
  }
}

// Calls `use` with the tile for a head dimension (to 256) and a number of heads in a block (to 4).
template <typename Use>
auto with_short_tile(int head_dim, int heads, const Use& use) {
  const auto with_heads = [&](auto lanes) {
    constexpr int kLanes = decltype(lanes)::value;
    if (heads == 1) return use(ShortTile<kLanes, 1>());
    return heads == 2 ? use(ShortTile<kLanes, 2>()) : use(ShortTile<kLanes, 4>());
  };
  if (head_dim <= 64) return with_heads(std::integral_constant<int, 8>());
  return head_dim <= 128 ? with_heads(std::integral_constant<int, 16>())
                         : with_heads(std::integral_constant<int, 32>());
}

// Query heads of a block, at most. One a block has the least arithmetic behind one another, and reads keys and values
// of its KV head beside the blocks of the other heads: with keys asked for early, too, a layer of Gemma 3 with 136 keys
// takes 1.2 (270M) to 3.0 µs (12B) less in a whole step of one sequence than with all heads in a block. With many
// sequences there are blocks enough.
int heads_per_block(const nvb_attention_decode_params& p, const nvb_launch& launch) {
  if (launch.capability < 90) return kMaxHeads;
  const int64_t kv_heads = static_cast<int64_t>(p.sequences) * p.kv_heads;
  for (int heads = 1; heads < kMaxHeads; heads *= 2) {
    const int chunks = (items_per_kv_head(p) + heads - 1) / heads;
    if (kv_heads * chunks * kMaxBlocks <= launch.multiprocessors) return heads;
  }
  return kMaxHeads;
}

template <typename T, typename Tile>
cudaError_t launch_tile(const DecodeArguments& arguments, const nvb_launch& launch) {
  const auto kernel = attention_decode_short_kernel<T, Tile>;
  const cudaError_t status = nvb_cuda_raise_shared_limit(reinterpret_cast<const void*>(kernel), Tile::kSharedBytes);
  if (status != cudaSuccess) return status;
  const unsigned blocks = arguments.params.splits;
  const dim3 grid(blocks, arguments.params.kv_heads * arguments.params.chunks, arguments.params.sequences);
  const bool early = (nvb_cuda_constant_reads() & NVB_CONSTANT_POSITIONS) != 0;
  return launch_overlapped_clusters(kernel, grid, dim3(blocks), dim3(32 * Tile::kWarps), Tile::kSharedBytes, &launch,
                                    arguments, early);
}

}  // namespace

bool supports_decode_short(const nvb_attention_decode_params& p, const nvb_launch& launch,
                           nvb_attention_decode_shape& shape) {
  const int query_bytes = float_dtype_bytes(p.query_dtype);
  if (!supports_decode_mma(p, launch, shape) || p.head_dim > 256 ||
      !is_aligned16(p.query, p.query_token_stride, query_bytes) ||
      !is_aligned16(p.query, p.query_head_stride, query_bytes)) {
    return false;
  }
  const int most = heads_per_block(p, launch), items = items_per_kv_head(p);
  const int chunks = (items + most - 1) / most;
  shape = with_short_tile(p.head_dim, (items + chunks - 1) / chunks, [&](auto tile) {
    using Tile = decltype(tile);
    // A pass over 64 columns is longer with few heads in a block, and its keys are no fewer for that: one sequence of
    // 4,096 takes 12.6 us here and 9.1 by the ring.
    constexpr int kPasses = std::max(1, kMaxPasses * ShortTile<Tile::kLanes, kMaxHeads>::kPass / Tile::kPass);
    return nvb_attention_decode_shape{most,
                                      Tile::kPass,
                                      1,
                                      32 * Tile::kWarps,
                                      Tile::kSharedBytes + kDecodeStaticBytes,
                                      launch.capability >= 90 ? kMaxBlocks : 1,
                                      kPasses,
                                      1};
  });
  return true;
}

cudaError_t launch_decode_short(const DecodeArguments& arguments, const nvb_launch& launch) {
  const nvb_attention_decode_params& p = arguments.params;
  return with_short_tile(p.head_dim, p.heads_per_chunk, [&](auto tile) {
    using Tile = decltype(tile);
    return p.kv_dtype == NVB_F16 ? launch_tile<__half, Tile>(arguments, launch)
                                 : launch_tile<__nv_bfloat16, Tile>(arguments, launch);
  });
}

}  // namespace nvb
