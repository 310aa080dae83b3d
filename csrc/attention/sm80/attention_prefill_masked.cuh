// Prefill attention with an additive mask over contiguous keys and values of 16 bits, as engines have it whose caches
// hold the tokens of several sequences side by side and say by a mask who sees what. Its rows are few (a token of each
// sequence) while keys are many; it takes any number of rows.
//
// Shapes: head_dim = value_dim of 64, 128 or 256; queries, outputs and mask of any float dtype; rows of keys and values
// 16-byte aligned. Neither causal nor with a window.
//
// Work: a block of 8 warps, or 16, has up to 8 pairs of a row and a query head, which one KV head serves, and a part of
// its keys; a cluster (9.0) has the parts, whose results meet by writes into one another's shared memory. A warp takes
// tiles of 32 keys in turn, or of 8 while there is a warp for each. What the mask hides from all pairs is not read, and
// a tile of such keys costs its mask alone.
//
// Q . K^T runs on tensor cores, keys as the second operand: a lane loads 16 bytes of a key, which are its elements of
// two products, so keys need no shared memory. Rows 0 to 7 of the first operand are the queries rounded to the keys'
// dtype, rows 8 to 15 what an F32 query lost by that. P . V is multiplied on the f32 units, where 8 pairs of 16 rows
// would leave tensor cores half idle and values would have to be transposed: a lane owns head_dim / 32 columns.
//
// Registers: queries head_dim / 4, outputs pairs * head_dim / 32, 16 bytes of 8 keys or values each. Shared memory: 32
// KiB for the merge of 4 warps' outputs, at most, 8 KiB for P.
#pragma once

#include "../../common/cluster.cuh"
#include "../../common/cluster_places.h"
#include "../../common/mma.cuh"
#include "../../common/programmatic_launch.cuh"
#include "../../common/shared_limit.h"
#include "../../common/vector.cuh"
#include "../attention_prefill.cuh"

namespace nvb {

inline constexpr int kMaskedWarps = 8;
inline constexpr int kMaskedKeys = 32;  // of a warp's tile
inline constexpr int kFewMaskedKeys = 8;
inline constexpr int kMaskedSplits = 8;       // blocks of a cluster
inline constexpr int kMostMaskedSplits = 16;  // with many keys, where the device has places for such clusters
inline constexpr int kManyMaskedKeys = 1024;
inline constexpr int kLongMaskedKeys = 5120;  // from which on a block has 16 warps where that helps

template <int kWarps, int kPairs, int kHeadDim, int kKeys>
struct MaskedShared {
  union {
    float outputs[kWarps / 2][kPairs][kHeadDim];
    // [block of the cluster][pair][column of this block's share]: as many elements as a row has, in all.
    float parts[kPairs * kHeadDim];
  };
  float probabilities[kWarps][kPairs][kKeys];
  float rescales[kWarps][kPairs];
  float2 states[kWarps][kPairs];                                // maximum and sum of each warp
  __align__(16) float4 part_states[kMostMaskedSplits][kPairs];  // and of each block
  uint64_t received;
};

// As cluster_arrive; reads before it are over for whoever waits for it.
__device__ __forceinline__ void cluster_arrive_release() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

// What is left of a float behind its rounding to T, and the rounded values, packed in pairs.
template <typename T>
__device__ __forceinline__ void split_pair(float x, float y, uint32_t& high, uint32_t& low);
template <>
__device__ __forceinline__ void split_pair<__half>(float x, float y, uint32_t& high, uint32_t& low) {
  const __half2 rounded = __floats2half2_rn(x, y);
  const float2 back = __half22float2(rounded);
  const __half2 rest = __floats2half2_rn(x - back.x, y - back.y);
  high = *reinterpret_cast<const uint32_t*>(&rounded);
  low = *reinterpret_cast<const uint32_t*>(&rest);
}
template <>
__device__ __forceinline__ void split_pair<__nv_bfloat16>(float x, float y, uint32_t& high, uint32_t& low) {
  const __nv_bfloat162 rounded = __floats2bfloat162_rn(x, y);
  const float2 back = __bfloat1622float2(rounded);
  const __nv_bfloat162 rest = __floats2bfloat162_rn(x - back.x, y - back.y);
  high = *reinterpret_cast<const uint32_t*>(&rounded);
  low = *reinterpret_cast<const uint32_t*>(&rest);
}

// Eight neighbours each 32 elements, from `offset` on: by vectors where they are aligned, with one branch for the
// dtype, so that the reads follow one another.
template <int kSteps>
__device__ __forceinline__ void load_strided_eights(const void* base, uint32_t dtype, int64_t offset,
                                                    float (&values)[kSteps][8]) {
  const int bytes = float_dtype_bytes(dtype);
  if ((reinterpret_cast<uintptr_t>(base) + static_cast<uintptr_t>(offset * bytes)) % 16 == 0) {
    if (dtype == NVB_F32) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) load_elements<8>(base, NVB_F32, offset + 32 * s, values[s]);
    } else {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) load_elements<8>(base, dtype, offset + 32 * s, values[s]);
    }
    return;
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int i = 0; i < 8; ++i) values[s][i] = load_element(base, dtype, offset + 32 * s + i);
  }
}

template <typename T, int kHeadDim, int kPairs, int kKeys, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, 1)
    attention_prefill_masked_kernel(const __grid_constant__ PrefillArguments arguments) {
  constexpr int kSteps = kHeadDim / 32;    // of 32 elements, 8 a lane of a quad
  constexpr int kColumns = kHeadDim / 32;  // of the output, a lane
  constexpr int kTiles = kKeys / 8;        // of 8 keys
  __shared__ __align__(16) MaskedShared<kWarps, kPairs, kHeadDim, kKeys> shared;

  // Which pairs, and which part of the keys.
  const nvb_attention_prefill_params& p = arguments.params;
  const nvb_attention_sequence& sequence = p.sequence[blockIdx.z];
  const int group = p.query_heads / p.kv_heads;
  const int kv_head = static_cast<int>(blockIdx.y) % p.kv_heads;
  const int first_pair = static_cast<int>(blockIdx.y) / p.kv_heads * kPairs;
  const int pairs = min(kPairs, sequence.query_count * group - first_pair);
  const int length = sequence.kv_length;
  const int splits = static_cast<int>(gridDim.x);
  const int split = static_cast<int>(blockIdx.x);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int quad = lane % 4;
  const int own_pair = lane / 4;  // of a score
  if (splits > 1) {
    if (threadIdx.x == 0) {
      barrier_init(&shared.received, 1);
      barrier_init_fence();
    }
    cluster_arrive();
  }
  begin_overlapped();
  if (splits > 1) cluster_wait();
  // A shorter sequence than the longest, alike in all blocks of a cluster.
  if (pairs <= 0) return;

  const auto row_of = [&](int pair) { return (first_pair + pair) / group; };
  const auto head_of = [&](int pair) { return kv_head * group + (first_pair + pair) % group; };
  const auto mask_of = [&](int pair) {
    return mask_offset(p, sequence, PrefillBlock{0, head_of(pair), row_of(pair)}, 0);
  };

  // Queries, all of which are asked for before the first is used.
  float own_query[kSteps][8] = {};
  if (own_pair < pairs) {
    const int64_t offset = query_offset(p, sequence, PrefillBlock{0, head_of(own_pair), row_of(own_pair)}) + 8 * quad;
    load_strided_eights<kSteps>(p.query, p.query_dtype, offset, own_query);
  }
  const T* const keys =
      static_cast<const T*>(p.key) + sequence.kv_start * p.key_sequence_stride + kv_head * p.key_head_stride + 8 * quad;
  const T* const values = static_cast<const T*>(p.value) + sequence.kv_start * p.value_sequence_stride +
                          kv_head * p.value_head_stride + kColumns * lane;
  const int64_t own_mask = p.mask != nullptr && own_pair < pairs ? mask_of(own_pair) : 0;

  // The keys of a tile that some pair sees, a bit each.
  const auto seen_by_some = [&](int first_key) {
    const int key = first_key + lane;
    const bool is_key = key < length && lane < kKeys;
    bool seen = is_key && p.mask == nullptr;
    if (is_key && p.mask != nullptr) {
      for (int pair = 0; pair < pairs; ++pair) {
        if (pair > 0 && p.mask_head_stride == 0 && row_of(pair) == row_of(pair - 1)) continue;
        seen = seen || load_element(p.mask, p.mask_dtype, mask_of(pair) + key) != -CUDART_INF_F;
      }
    }
    return __ballot_sync(0xffffffffu, seen);
  };

  // The mask's elements of the first tile are on their way together with the queries.
  int first_key = (warp * splits + split) * kKeys;
  uint32_t seen = first_key < length ? seen_by_some(first_key) : 0;
  // Of rows 8 to 15 what rounding took from rows 0 to 7.
  uint32_t query[kSteps][4], rest[kSteps][4];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      split_pair<T>(own_query[s][2 * i], own_query[s][2 * i + 1], query[s][i], rest[s][i]);
    }
  }

  float output[kPairs][kColumns] = {};
  float maximum = -CUDART_INF_F;  // of the own pair, in powers of two
  float sum = 0.0f;               // of this lane's keys of it
  for (; first_key < length;
       first_key += splits * kWarps * kKeys, seen = first_key < length ? seen_by_some(first_key) : 0) {
    if (seen == 0) continue;

    // S = Q . K^T, the scores of the rounded queries in [0] and [1], of what they lost in [2] and [3].
    float score[kTiles][4] = {};
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int key = first_key + 8 * t + own_pair;  // the lane's place among the 8 keys is that among the pairs
      const bool read = (seen >> (8 * t + own_pair) & 1) != 0;
      uint4 elements[kSteps];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        elements[s] = read ? load16(keys + key * p.key_token_stride + 32 * s) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const uint32_t first[4] = {query[s][0], rest[s][0], query[s][1], rest[s][1]};
        const uint32_t second[4] = {query[s][2], rest[s][2], query[s][3], rest[s][3]};
        mma_m16n8k16<T>(score[t], first, elements[s].x, elements[s].y);
        mma_m16n8k16<T>(score[t], second, elements[s].z, elements[s].w);
      }
    }

    // Scale, soft cap, mask, and the running maximum of the own pair's 8 keys in each of four lanes.
    float weights[kTiles][2];
    float most = maximum;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int place = 8 * t + 2 * quad + i;
        float s = (score[t][i] + score[t][i + 2]) * p.scale;
        if (p.soft_cap > 0.0f) s = p.soft_cap * tanh_fast(s / p.soft_cap);
        if (own_pair < pairs && (seen >> place & 1) != 0) {
          const float bias =
              p.mask != nullptr ? load_element(p.mask, p.mask_dtype, own_mask + first_key + place) : 0.0f;
          s = bias == -CUDART_INF_F ? bias : (s + bias) * kLog2E;
        } else {
          s = -CUDART_INF_F;
        }
        weights[t][i] = s;
        most = fmaxf(most, s);
      }
    }
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
    const float base = exponent_base(most);
    const float rescale = exp2_fast(maximum - base);
    maximum = most;
    sum *= rescale;
    __syncwarp();
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const float2 pair = make_float2(exp2_fast(weights[t][0] - base), exp2_fast(weights[t][1] - base));
      sum += pair.x + pair.y;
      if (own_pair < kPairs) {
        *reinterpret_cast<float2*>(&shared.probabilities[warp][own_pair][8 * t + 2 * quad]) = pair;
      }
    }
    if (own_pair < kPairs && quad == 0) shared.rescales[warp][own_pair] = rescale;
    const bool changes = __any_sync(0xffffffffu, rescale != 1.0f);
    __syncwarp();

    // O = O * rescale + P . V, 8 keys at a time.
    if (changes) {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const float factor = shared.rescales[warp][pair];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) output[pair][c] *= factor;
      }
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if ((seen >> (8 * t) & 0xff) == 0) continue;
      uint32_t raw[8][kColumns / 2];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const bool read = (seen >> (8 * t + k) & 1) != 0;
        const T* const row = values + (first_key + 8 * t + k) * p.value_token_stride;
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) raw[k][i] = 0;
        if (read) {
          if constexpr (kColumns == 8) {
            const uint4 loaded = load16(row);
            raw[k][0] = loaded.x;
            raw[k][1] = loaded.y;
            raw[k][2] = loaded.z;
            raw[k][3] = loaded.w;
          } else if constexpr (kColumns == 4) {
            const uint2 loaded = __ldg(reinterpret_cast<const uint2*>(row));
            raw[k][0] = loaded.x;
            raw[k][1] = loaded.y;
          } else {
            raw[k][0] = __ldg(reinterpret_cast<const uint32_t*>(row));
          }
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float weight[kPairs][4];
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          load16_as_float<float>(&shared.probabilities[warp][pair][8 * t + 4 * half], weight[pair]);
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
#pragma unroll
          for (int i = 0; i < kColumns / 2; ++i) {
            const float2 value = unpack_pair<T>(raw[4 * half + k][i]);
#pragma unroll
            for (int pair = 0; pair < kPairs; ++pair) {
              output[pair][2 * i] = fmaf(weight[pair][k], value.x, output[pair][2 * i]);
              output[pair][2 * i + 1] = fmaf(weight[pair][k], value.y, output[pair][2 * i + 1]);
            }
          }
        }
      }
    }
  }

  // The warps of the block: all to one maximum, then half of the warps to the other half until one is left.
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  sum += __shfl_xor_sync(0xffffffffu, sum, 2);
  if (own_pair < kPairs && quad == 0) shared.states[warp][own_pair] = make_float2(maximum, sum);
  __syncthreads();
  float2 total[kPairs];
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
    float most = -CUDART_INF_F;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) most = fmaxf(most, shared.states[w][pair].x);
    const float base = exponent_base(most);
    float all = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) all += shared.states[w][pair].y * exp2_fast(shared.states[w][pair].x - base);
    total[pair] = make_float2(most, all);
    const float factor = exp2_fast(shared.states[warp][pair].x - base);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) output[pair][c] *= factor;
  }
#pragma unroll
  for (int left = kWarps / 2; left > 0; left /= 2) {
    if (warp >= left && warp < 2 * left) {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) shared.outputs[warp - left][pair][kColumns * lane + c] = output[pair][c];
      }
    }
    __syncthreads();
    if (warp < left) {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) output[pair][c] += shared.outputs[warp][pair][kColumns * lane + c];
      }
    }
    __syncthreads();
  }

  // The blocks of the cluster: each gets the outputs of its share of the columns from all. The first warp sends, behind
  // the barrier of all threads after which nobody reads `outputs`; another block may write there only once this one is
  // so far too, which a second meeting of the cluster tells.
  const int share = kHeadDim / splits;
  if (splits > 1) {
    if (threadIdx.x == 0) {
      barrier_expect(&shared.received,
                     static_cast<uint32_t>(kPairs * (kHeadDim * sizeof(float) + splits * sizeof(float4))));
    }
    cluster_arrive_release();
    cluster_wait();
    if (warp == 0) {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        if (lane < splits) {
          const float state[4] = {total[pair].x, total[pair].y, 0.0f, 0.0f};
          cluster_store(cluster_address(&shared.part_states[split][pair], lane), state,
                        cluster_address(&shared.received, lane));
        }
        if constexpr (kColumns >= 4) {
#pragma unroll
          for (int c = 0; c < kColumns; c += 4) {
            const int column = kColumns * lane + c;
            const int rank = column / share;
            const float part[4] = {output[pair][c], output[pair][c + 1], output[pair][c + 2], output[pair][c + 3]};
            cluster_store(cluster_address(&shared.parts[(split * kPairs + pair) * share + column % share], rank), part,
                          cluster_address(&shared.received, rank));
          }
        } else {
          // Two neighbouring lanes have four columns.
          const float third = __shfl_down_sync(0xffffffffu, output[pair][0], 1);
          const float fourth = __shfl_down_sync(0xffffffffu, output[pair][1], 1);
          if (lane % 2 == 0) {
            const int column = kColumns * lane;
            const int rank = column / share;
            const float part[4] = {output[pair][0], output[pair][1], third, fourth};
            cluster_store(cluster_address(&shared.parts[(split * kPairs + pair) * share + column % share], rank), part,
                          cluster_address(&shared.received, rank));
          }
        }
      }
    }
    barrier_wait(&shared.received, 0);
  } else {
    if (warp == 0) {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        if (lane == 0) shared.part_states[0][pair] = make_float4(total[pair].x, total[pair].y, 0.0f, 0.0f);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) shared.parts[pair * kHeadDim + kColumns * lane + c] = output[pair][c];
      }
    }
    __syncthreads();
  }

  // Normalise and store this block's share of the columns.
  for (int index = static_cast<int>(threadIdx.x); index < pairs * share; index += kWarps * 32) {
    const int pair = index / share;
    const int column = index - pair * share;
    float most = -CUDART_INF_F;
    for (int part = 0; part < splits; ++part) most = fmaxf(most, shared.part_states[part][pair].x);
    const float base = exponent_base(most);
    float all = 0.0f;
    float value = 0.0f;
    for (int part = 0; part < splits; ++part) {
      const float factor = exp2_fast(shared.part_states[part][pair].x - base);
      all += shared.part_states[part][pair].y * factor;
      value += shared.parts[(part * kPairs + pair) * share + column] * factor;
    }
    const RowEnd end = row_end(most, all, p.sinks, head_of(pair));
    const PrefillBlock place{0, head_of(pair), row_of(pair)};
    store_element(p.output, p.output_dtype, output_offset(p, sequence, place) + split * share + column,
                  value * end.inverse);
    if (p.lse != nullptr && split == 0 && column == 0) p.lse[lse_offset(p, sequence, place, 0)] = end.lse;
  }
}

// Blocks of a cluster: as many as the device has places for, each with keys for its warps, where there are clusters. On
// an H200 4 clusters for 16,384 keys of 256 columns take 39 us with 16 blocks each and 63 with 8; 8 clusters of 16 do
// not all run at once, and take 62 us for 128 columns where those of 8 take 57.
inline int masked_splits(const nvb_launch& launch, int64_t blocks, int longest, int keys) {
  if (launch.capability < 90 || launch.capability >= 120) return 1;
  if (longest >= kManyMaskedKeys && 2 * kMostMaskedSplits * blocks <= launch.multiprocessors &&
      blocks <= cluster_places(launch, kMostMaskedSplits)) {
    return kMostMaskedSplits;
  }
  int splits = 1;
  while (splits < kMaskedSplits && 2 * splits * blocks <= launch.multiprocessors && splits * keys < longest) {
    splits *= 2;
  }
  return splits;
}

template <typename T, int kHeadDim, int kPairs, int kKeys, int kWarps>
cudaError_t launch_prefill_masked_splits(const PrefillArguments& arguments, const dim3& grid,
                                         const nvb_launch& launch) {
  const auto kernel = attention_prefill_masked_kernel<T, kHeadDim, kPairs, kKeys, kWarps>;
  if (grid.x > kMaskedSplits) {
    const cudaError_t error = nvb_cuda_raise_cluster_limit(reinterpret_cast<const void*>(kernel));
    if (error != cudaSuccess) return error;
  }
  return launch_overlapped_clusters(kernel, grid, dim3(grid.x), dim3(kWarps * 32), 0, &launch, arguments);
}

template <typename T, int kHeadDim, int kPairs, int kKeys>
cudaError_t launch_prefill_masked_keys(const PrefillArguments& arguments, int most_pairs, int longest,
                                       const nvb_launch& launch) {
  const nvb_attention_prefill_params& p = arguments.params;
  const int64_t chunks = (most_pairs + kPairs - 1) / kPairs * int64_t{p.kv_heads};
  if (chunks > 65535) return cudaErrorInvalidValue;
  const int splits = masked_splits(launch, chunks * p.sequences, longest, kKeys);
  const dim3 grid(splits, static_cast<unsigned>(chunks), p.sequences);
  // Where clusters of 8 leave half of the device idle, twice the warps have twice the bytes on their way: 8 KV heads of
  // 128 columns with 16,384 keys take 45 us and 57 without, with 1,536 keys 10.7 and 8.9.
  if constexpr (kHeadDim == 128 && kPairs <= 4 && kKeys == kMaskedKeys) {
    if (longest >= kLongMaskedKeys && splits == kMaskedSplits) {
      return launch_prefill_masked_splits<T, kHeadDim, kPairs, kKeys, 2 * kMaskedWarps>(arguments, grid, launch);
    }
  }
  return launch_prefill_masked_splits<T, kHeadDim, kPairs, kKeys, kMaskedWarps>(arguments, grid, launch);
}

template <typename T, int kHeadDim, int kPairs>
cudaError_t launch_prefill_masked_of(const PrefillArguments& arguments, int most_pairs, int longest,
                                     const nvb_launch& launch) {
  // Where blocks fill the device anyway, small tiles only cost more steps.
  const bool few = longest <= kMaskedSplits * kMaskedWarps * kFewMaskedKeys &&
                   int64_t{4} * most_pairs / kPairs * arguments.params.kv_heads * arguments.params.sequences <=
                       launch.multiprocessors;
  return few ? launch_prefill_masked_keys<T, kHeadDim, kPairs, kFewMaskedKeys>(arguments, most_pairs, longest, launch)
             : launch_prefill_masked_keys<T, kHeadDim, kPairs, kMaskedKeys>(arguments, most_pairs, longest, launch);
}

template <typename T, int kHeadDim>
cudaError_t launch_prefill_masked(const PrefillArguments& arguments, const nvb_launch& launch) {
  const nvb_attention_prefill_params& p = arguments.params;
  int rows = 0, longest = 0;
  for (int i = 0; i < p.sequences; ++i) {
    rows = p.sequence[i].query_count > rows ? p.sequence[i].query_count : rows;
    longest = p.sequence[i].kv_length > longest ? p.sequence[i].kv_length : longest;
  }
  if (rows == 0) return cudaSuccess;
  const int pairs = rows * (p.query_heads / p.kv_heads);
  if (pairs <= 2) return launch_prefill_masked_of<T, kHeadDim, 2>(arguments, pairs, longest, launch);
  if (pairs <= 4) return launch_prefill_masked_of<T, kHeadDim, 4>(arguments, pairs, longest, launch);
  return launch_prefill_masked_of<T, kHeadDim, 8>(arguments, pairs, longest, launch);
}

// By head_dim, of the keys' dtype.
template <typename T>
cudaError_t launch_prefill_masked(const PrefillArguments& arguments, const nvb_launch& launch) {
  switch (arguments.params.head_dim) {
    case 64:
      return launch_prefill_masked<T, 64>(arguments, launch);
    case 128:
      return launch_prefill_masked<T, 128>(arguments, launch);
    case 256:
      return launch_prefill_masked<T, 256>(arguments, launch);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace nvb
