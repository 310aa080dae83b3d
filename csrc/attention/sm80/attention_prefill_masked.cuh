// Prefill attention with an additive mask over contiguous keys and values of 16 bits, as engines have it whose caches
// hold the tokens of several sequences side by side and say by a mask who sees what. Its rows are few (a token of each
// sequence) while keys are many; it takes any number of rows.
//
// Shapes: head_dim = value_dim of 64, 128 or 256; queries, outputs and mask of any float dtype; rows of keys and values
// 16-byte aligned. Neither causal nor with a window.
//
// Work: a block of 8 warps, or 4 of 256 columns, has up to 8 pairs of a row and a query head, which one KV head serves,
// and a part of its keys; a cluster (9.0) has the parts, whose results meet by writes into one another's shared memory.
// Many keys have several clusters, which meet in scratch memory (attention_prefill_masked_division.h). A warp takes
// tiles of 16 keys in turn and has the next ones on their way (attention_prefill_masked_tile.cuh). What the mask hides
// from all pairs is not read, and a tile of such keys costs its mask alone.
//
// S = Q . K^T: rows 0 to 7 of the first operand are the queries rounded to the keys' dtype, rows 8 to 15 what that took
// from them. A lane loads 16 bytes of a key, which are its elements of two products; the queries' columns are in the
// same order. O^T += V^T . P^T: the scores of 8 pairs are the second operand as they are, in two halves like the
// queries. Weights are powers of two over a reference that lies 2^7 below the largest, so that halves of F16 resolve
// 2^-32 of it, and that is raised only when one would pass 2^15.
//
// Registers: queries head_dim / 4, outputs head_dim / 4; 32 Ki a block, beside which a block of the product that
// follows has room, so that it can begin early. Shared memory: as many stages as fit, 4 at most; of 128 columns 8.5 KiB
// a warp each. They are what keeps the memory busy.
#pragma once

#include "../../common/programmatic_launch.cuh"
#include "../../common/shared_limit.h"
#include "attention_prefill_masked_merge.cuh"

namespace nvb {
namespace masked {

// A weight passes 2^15 if its power lies so far above the reference, which is set so far below the largest.
inline constexpr float kMostWeight = 15.0f;
inline constexpr float kReferenceBelow = 7.0f;
inline constexpr int kStaticBytes = 14 * 1024;  // of shared memory, at most

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

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kHeadDim == 256 ? 1 : 2)
    attention_prefill_masked_kernel(const __grid_constant__ PrefillArguments arguments, const int splits,
                                    const int stages) {
  using T = typename Tile::T;
  constexpr int kHeadDim = Tile::kHeadDim;
  constexpr int kSteps = kHeadDim / 32;                   // of 32 columns of a key
  constexpr int kSlices = kHeadDim / 16;                  // of the output
  extern __shared__ __align__(128) unsigned char ring[];  // [kWarps][stages]
  __shared__ Merge<Tile> merge;

  // Which pairs, and which part of the keys.
  const nvb_attention_prefill_params& p = arguments.params;
  const nvb_attention_sequence& sequence = p.sequence[blockIdx.z];
  const int group = p.query_heads / p.kv_heads;
  const int kv_head = static_cast<int>(blockIdx.y) % p.kv_heads;
  const int first_pair = static_cast<int>(blockIdx.y) / p.kv_heads * kMostPairs;
  const int pairs = min(kMostPairs, sequence.query_count * group - first_pair);
  const int length = sequence.kv_length;
  const int blocks = static_cast<int>(gridDim.x);  // that share the keys, in clusters of `splits`
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int quad = lane % 4;
  const int own_pair = lane / 4;  // of a score
  const Pairs block{p, sequence, kv_head, group, first_pair, pairs};
  const Share share(kHeadDim, splits);
  if (splits > 1) {
    if (threadIdx.x == 0) {
      barrier_init(&merge.received, 1);
      barrier_init_fence();
      if (pairs > 0) barrier_expect(&merge.received, share.bytes(pairs));
    }
    cluster_arrive();
  }
  begin_overlapped();
  if (splits > 1) cluster_wait();
  // A shorter sequence than the longest, alike in all blocks of a cluster.
  if (pairs <= 0) return;

  // Queries and the first elements of the mask, all of which are asked for before one is used.
  const bool is_pair = own_pair < pairs;
  const PrefillBlock own_place = block.place(min(own_pair, pairs - 1));
  float own_query[kSteps][8] = {};
  if (is_pair) {
    load_strided_eights<kSteps>(p.query, p.query_dtype, query_offset(p, sequence, own_place) + 8 * quad, own_query);
  }
  Mask mask{nullptr, p.mask_dtype, is_pair ? length : 0, quad};
  if (p.mask != nullptr) {
    mask.row =
        static_cast<const char*>(p.mask) + mask_offset(p, sequence, own_place, 0) * float_dtype_bytes(p.mask_dtype);
  }
  const Rows<T> rows{
      static_cast<const T*>(p.key) + sequence.kv_start * p.key_sequence_stride + kv_head * p.key_head_stride,
      static_cast<const T*>(p.value) + sequence.kv_start * p.value_sequence_stride + kv_head * p.value_head_stride,
      p.key_token_stride, p.value_token_stride};
  unsigned char* const own_ring = ring + warp * stages * Tile::kStageBytes;
  const int step = blocks * Tile::kWarps * kKeys;
  const int first_tile = (warp * blocks + static_cast<int>(blockIdx.x)) * kKeys;
  {
    RawBiases raw[kMostStages];
#pragma unroll
    for (int s = 0; s < kMostStages; ++s) {
      if (s < stages) raw[s] = mask.load(first_tile + s * step);
    }
#pragma unroll
    for (int s = 0; s < kMostStages; ++s) {
      if (s >= stages) continue;
      const int first_key = first_tile + s * step;
      if (first_key < length) copy_tile<Tile>(own_ring + s * Tile::kStageBytes, rows, mask, first_key, raw[s]);
      cp_async_commit();
    }
  }
  uint32_t query[kSteps][4], rest[kSteps][4];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      split_pair<T>(own_query[s][2 * i], own_query[s][2 * i + 1], query[s][i], rest[s][i]);
    }
  }

  // Of each slice columns own_pair and own_pair + 8, of pairs 2 * quad and 2 * quad + 1.
  float output[kSlices][4] = {};
  float reference = -CUDART_INF_F;  // of the own pair, in powers of two
  float sum = 0.0f;                 // of this lane's keys of it
  int stage = 0;
  for (int first_key = first_tile; first_key < length; first_key += step) {
    unsigned char* const tile = own_ring + stage * Tile::kStageBytes;
    const int next_key = first_key + stages * step;
    const RawBiases next = mask.load(next_key);
    wait_for_tile(stages);
    const float4 bias = reinterpret_cast<const float4*>(tile + 2 * Tile::kTensorBytes)[lane];
    const float biases[kLaneKeys] = {bias.x, bias.y, bias.z, bias.w};
    bool sees = false;
#pragma unroll
    for (int e = 0; e < kLaneKeys; ++e) sees = sees || biases[e] != -CUDART_INF_F;
    if (__any_sync(0xffffffffu, sees)) {
      // S = Q . K^T, the scores of the rounded queries in [0] and [1], of what they lost in [2] and [3].
      float score[kKeys / 8][4] = {};
#pragma unroll
      for (int t = 0; t < kKeys / 8; ++t) {
        const unsigned char* const row = tile + (8 * t + own_pair) * Tile::kRowBytes + 16 * quad;
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          const uint4 key = *reinterpret_cast<const uint4*>(row + 64 * (s ^ (own_pair & 1)));
          const uint32_t first[4] = {query[s][0], rest[s][0], query[s][1], rest[s][1]};
          const uint32_t second[4] = {query[s][2], rest[s][2], query[s][3], rest[s][3]};
          mma_m16n8k16<T>(score[t], first, key.x, key.y);
          mma_m16n8k16<T>(score[t], second, key.z, key.w);
        }
      }

      // Scale, soft cap and mask.
      float weights[kLaneKeys];
      float most = -CUDART_INF_F;
#pragma unroll
      for (int e = 0; e < kLaneKeys; ++e) {
        float s = (score[e / 2][e % 2] + score[e / 2][e % 2 + 2]) * p.scale;
        if (p.soft_cap > 0.0f) s = p.soft_cap * tanh_fast(s / p.soft_cap);
        weights[e] = biases[e] == -CUDART_INF_F ? -CUDART_INF_F : (s + biases[e]) * kLog2E;
        most = fmaxf(most, weights[e]);
      }

      // Raise the reference and rescale, if a pair needs it.
      if (__any_sync(0xffffffffu, most > reference + kMostWeight)) {
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        // That of a pair alone, so that its sums do not depend on the other pairs.
        most = most > reference + kMostWeight ? most - kReferenceBelow : reference;
        const float rescale = exp2_fast(reference - exponent_base(most));
        reference = most;
        sum *= rescale;
        const float rescale0 = __shfl_sync(0xffffffffu, rescale, 8 * quad);
        const float rescale1 = __shfl_sync(0xffffffffu, rescale, 8 * quad + 4);
#pragma unroll
        for (int m = 0; m < kSlices; ++m) {
          output[m][0] *= rescale0;
          output[m][1] *= rescale1;
          output[m][2] *= rescale0;
          output[m][3] *= rescale1;
        }
      }
      const float base = exponent_base(reference);
#pragma unroll
      for (int e = 0; e < kLaneKeys; ++e) {
        weights[e] = exp2_fast(weights[e] - base);
        sum += weights[e];
      }
      uint32_t high[2], low[2];
      split_pair<T>(weights[0], weights[1], high[0], low[0]);
      split_pair<T>(weights[2], weights[3], high[1], low[1]);

      // O^T += V^T . P^T.
      const unsigned char* const row = tile + Tile::kTensorBytes + (lane / 16 * 8 + lane % 8) * Tile::kRowBytes;
#pragma unroll
      for (int m = 0; m < kSlices; ++m) {
        uint32_t value[4];
        ldmatrix_x4_trans(value, row + 16 * ((2 * m + lane / 8 % 2) ^ (lane % 8)));
        mma_m16n8k16<T>(output[m], value, high[0], high[1]);
        mma_m16n8k16<T>(output[m], value, low[0], low[1]);
      }
      __syncwarp();
    }
    if (next_key < length) copy_tile<Tile>(tile, rows, mask, next_key, next);
    cp_async_commit();
    stage = stage + 1 == stages ? 0 : stage + 1;
  }

  // Each warp leaves its output where its stages were, all of which it has read.
  __syncwarp();
  float* const own_output = reinterpret_cast<float*>(own_ring);
#pragma unroll
  for (int m = 0; m < kSlices; ++m) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      own_output[(2 * quad + e % 2) * Tile::kOutputPitch + 16 * m + e / 2 * 8 + own_pair] = output[m][e];
    }
  }
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  sum += __shfl_xor_sync(0xffffffffu, sum, 2);
  if (quad == 0) merge.states[warp][own_pair] = make_float2(reference, sum);
  __syncthreads();

  merge_and_store<Tile>(block, share, merge, ring, stages * Tile::kStageBytes);
}

template <typename Tile>
cudaError_t launch_tile(const PrefillArguments& arguments, const nvb_launch& launch) {
  const nvb_attention_prefill_params& p = arguments.params;
  const auto kernel = attention_prefill_masked_kernel<Tile>;
  const Extent extent = extent_of(p);
  if (extent.pairs == 0) return cudaSuccess;
  const int64_t chunks = extent.chunks / p.sequences;
  if (chunks > 65535) return cudaErrorInvalidValue;
  const Division division = division_of(p, launch, extent.chunks, extent.longest, p.partial != nullptr);
  const int keys_at_once = division.splits * division.clusters * Tile::kWarps * kKeys;
  const int stage_bytes = Tile::kWarps * Tile::kStageBytes;
  const int most_stages =
      std::max(1, std::min(kMostStages, (launch.shared_bytes_per_block - kStaticBytes) / stage_bytes));
  const int stages = std::max(1, std::min((extent.longest + keys_at_once - 1) / keys_at_once, most_stages));
  cudaError_t error = nvb_cuda_raise_shared_limit(reinterpret_cast<const void*>(kernel), most_stages * stage_bytes);
  if (error == cudaSuccess && division.splits > kPortableBlocks) {
    error = nvb_cuda_raise_cluster_limit(reinterpret_cast<const void*>(kernel));
  }
  if (error != cudaSuccess) return error;
  const dim3 grid(division.splits * division.clusters, static_cast<unsigned>(chunks), p.sequences);
  return launch_overlapped_clusters(kernel, grid, dim3(division.splits), dim3(Tile::kThreads), stages * stage_bytes,
                                    &launch, arguments, division.splits, stages);
}

}  // namespace masked

// By head_dim, of the keys' dtype.
template <typename T>
cudaError_t launch_prefill_masked(const PrefillArguments& arguments, const nvb_launch& launch) {
  switch (arguments.params.head_dim) {
    case 64:
      return masked::launch_tile<masked::Tile<T, 64>>(arguments, launch);
    case 128:
      return masked::launch_tile<masked::Tile<T, 128>>(arguments, launch);
    case 256:
      return masked::launch_tile<masked::Tile<T, 256>>(arguments, launch);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace nvb
