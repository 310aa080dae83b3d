// What the warpgroups of attention_prefill_fp8.cuh do with P and O beside the products: P as the next operand, O set
// aside and added again, and the store of a tile. A thread has two rows of its warp's 16, eight apart, and of each
// sixteen columns of O four neighbours.
#pragma once

#include "attention_prefill_fp8_transpose.cuh"
#include "attention_prefill_wgmma_softmax.cuh"

namespace nvb {
namespace prefill_fp8 {

using prefill_wgmma::RowSums;

// Rounds P, in pairs of neighbours.
template <int Count>
__device__ __forceinline__ void round_probabilities(uint16_t (&pairs)[Count / 2], const float (&score)[Count]) {
#pragma unroll
  for (int i = 0; i < Count / 2; ++i) pairs[i] = pack_e4m3(score[2 * i], score[2 * i + 1]);
}

// The first operand of P . V: fragments of 32 keys. Neither may be written while a product reads it.
template <int Count>
__device__ __forceinline__ void arrange_probabilities(uint32_t (&p)[Count / 8][4], const uint16_t (&pairs)[Count]) {
#pragma unroll
  for (int k = 0; k < Count / 8; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 8 * k + 4 * (i / 2) + i % 2;
      p[k][i] = join_pairs(pairs[at], pairs[at + 2]);
    }
  }
}

// A row's sum over its four threads.
__device__ __forceinline__ float total_of(float sum) {
  const float pair = sum + __shfl_xor_sync(0xffffffffu, sum, 1);
  return pair + __shfl_xor_sync(0xffffffffu, pair, 2);
}

// The first of this thread's bytes in the output tensor of one of its two rows, or null past the sequence. The next
// sixteen columns, of which it has four neighbours, are as many elements on.
__device__ __forceinline__ uint8_t* output_row(const Arguments& arguments, const Work& work, int warpgroup, int half) {
  const int lane = threadIdx.x % 32;
  const int row = warpgroup * 64 + static_cast<int>(threadIdx.x % 128 / 32) * 16 + half * 8 + lane / 4;
  if (row >= work.rows) return nullptr;
  const int64_t element = (work.first_token + row) * arguments.output_token_stride +
                          work.head * arguments.output_head_stride + lane % 4 * 4;
  return static_cast<uint8_t*>(arguments.output) + element * (arguments.output_dtype == NVB_F32 ? 4 : 2);
}

// The place of a column among O's sums of sixteen columns, from which four neighbours are 0, 4, 1 and 5 on.
template <int Count>
__device__ __forceinline__ void read_four(float (&four)[4], const float (&output)[Count], int at) {
  four[0] = output[at], four[1] = output[at + 4], four[2] = output[at + 1], four[3] = output[at + 5];
}

// What has left the sums of a warpgroup: O divided by `weight`, which follows the maxima, as F16. It lies in shared
// memory, or in the output tensor: the first of a row's fours of this thread, null where it has none, and the bytes
// from one to the next.
struct Flushed {
  float weight[2];
  bool any;
};
struct FlushedRow {
  uint8_t* first;
  int step;
};
template <typename Tile>
__device__ __forceinline__ FlushedRow flushed_row(const Arguments& arguments, Shared<Tile>& shared, const Work& work,
                                                  int warpgroup, int half) {
  if constexpr (Tile::kFlushesToShared) {
    return {shared.flushed[warpgroup] + half * (Tile::kFlushedBytes / 2) + threadIdx.x % 128 * 8, 128 * 8};
  } else {
    return {output_row(arguments, work, warpgroup, half), arguments.output_dtype == NVB_F32 ? 64 : 32};
  }
}

// Adds it to O.
template <typename Tile>
__device__ __forceinline__ void add_flushed(const Arguments& arguments, Shared<Tile>& shared, const Work& work,
                                            float (&output)[Tile::kHeadDim / 2], const Flushed& flushed,
                                            int warpgroup) {
  constexpr int kFours = Tile::kHeadDim / 16, kTogether = kFours < 8 ? kFours : 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const FlushedRow row = flushed_row<Tile>(arguments, shared, work, warpgroup, half);
#pragma unroll
    for (int first = 0; first < kFours; first += kTogether) {
      // All are on their way before the first is waited for.
      uint2 words[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        words[j] = make_uint2(0, 0);
        if (row.first != nullptr && 16 * (first + j) < arguments.value_dim) {
          words[j] = *reinterpret_cast<const uint2*>(row.first + (first + j) * row.step);
        }
      }
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const float2 low = unpack_pair<__half>(words[j].x), high = unpack_pair<__half>(words[j].y);
        float* const four = &output[8 * (first + j) + 2 * half];
        four[0] = fmaf(low.x, flushed.weight[half], four[0]);
        four[4] = fmaf(low.y, flushed.weight[half], four[4]);
        four[1] = fmaf(high.x, flushed.weight[half], four[1]);
        four[5] = fmaf(high.y, flushed.weight[half], four[5]);
      }
    }
  }
}

template <typename Tile>
__device__ __forceinline__ void flush_output(const Arguments& arguments, Shared<Tile>& shared, const Work& work,
                                             float (&output)[Tile::kHeadDim / 2], const RowSums& rows, Flushed& flushed,
                                             int warpgroup) {
  if (flushed.any) add_flushed<Tile>(arguments, shared, work, output, flushed, warpgroup);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float total = total_of(rows.sum[half]);
    const float factor = total == 0.0f ? 0.0f : 1.0f / total;
    flushed.weight[half] = total;
    const FlushedRow row = flushed_row<Tile>(arguments, shared, work, warpgroup, half);
    if (row.first == nullptr) continue;
#pragma unroll
    for (int j = 0; j < Tile::kHeadDim / 16; ++j) {
      float four[4];
      read_four(four, output, 8 * j + 2 * half);
      if (16 * j < arguments.value_dim) {
        *reinterpret_cast<uint2*>(row.first + j * row.step) =
            make_uint2(pack_pair<__half>(four[0] * factor, four[1] * factor),
                       pack_pair<__half>(four[2] * factor, four[3] * factor));
      }
    }
  }
  flushed.any = true;
#pragma unroll
  for (int i = 0; i < Tile::kHeadDim / 2; ++i) output[i] = 0.0f;
}

template <typename T, typename Tile>
__device__ __forceinline__ void store_row(const Arguments& arguments, uint8_t* start,
                                          const float (&output)[Tile::kHeadDim / 2], float factor, int half) {
#pragma unroll
  for (int j = 0; j < Tile::kHeadDim / 16; ++j) {
    float four[4];
    read_four(four, output, 8 * j + 2 * half);
#pragma unroll
    for (int i = 0; i < 4; ++i) four[i] *= factor;
    if (16 * j >= arguments.value_dim) continue;
    T* const to = reinterpret_cast<T*>(start) + 16 * j;
    if constexpr (sizeof(T) == 4) {
      *reinterpret_cast<float4*>(to) = make_float4(four[0], four[1], four[2], four[3]);
    } else {
      *reinterpret_cast<uint2*>(to) = make_uint2(pack_pair<T>(four[0], four[1]), pack_pair<T>(four[2], four[3]));
    }
  }
}

// Normalises and stores a warpgroup's rows, those of the sequence alone. An empty row has sum 0; a NaN stays NaN.
template <typename Tile>
__device__ __forceinline__ void store_rows(const Arguments& arguments, Shared<Tile>& shared, const Work& work,
                                           float (&output)[Tile::kHeadDim / 2], const RowSums& rows,
                                           const Flushed& flushed, float exponent_factor, float value_scale,
                                           int warpgroup) {
  const int lane = threadIdx.x % 32;
  if (flushed.any) add_flushed<Tile>(arguments, shared, work, output, flushed, warpgroup);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float total = total_of(rows.sum[half]);
    const float factor = total == 0.0f ? 0.0f : value_scale / total;
    const int row = warpgroup * 64 + static_cast<int>(threadIdx.x % 128 / 32) * 16 + half * 8 + lane / 4;
    if (arguments.lse != nullptr && lane % 4 == 0 && row < work.rows) {
      arguments.lse[static_cast<int64_t>(work.first_token + row) * arguments.query_heads + work.head] =
          total == 0.0f ? -CUDART_INF_F : rows.maximum[half] * exponent_factor * kLn2 + (logf(total) - kShift * kLn2);
    }
    uint8_t* const start = output_row(arguments, work, warpgroup, half);
    if (start == nullptr) continue;
    if (arguments.output_dtype == NVB_BF16) {
      store_row<__nv_bfloat16, Tile>(arguments, start, output, factor, half);
    } else if (arguments.output_dtype == NVB_F16) {
      store_row<__half, Tile>(arguments, start, output, factor, half);
    } else {
      store_row<float, Tile>(arguments, start, output, factor, half);
    }
  }
}

}  // namespace prefill_fp8
}  // namespace nvb
