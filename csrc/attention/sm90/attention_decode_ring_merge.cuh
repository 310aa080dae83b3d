// How attention_decode_ring.cuh adds partial results: those of a block's warps, and those of the blocks that read a
// row. Every sum is in the order of the parts, whichever block forms it, so equal arguments give equal bits.
#pragma once

#include "attention_decode_ring_work.cuh"

namespace nvb::decode_ring {

template <typename Tile>
__device__ __forceinline__ void consumers_meet() {
  asm volatile("bar.sync 1, %0;" ::"n"(32 * Tile::kWarps) : "memory");
}

__device__ __forceinline__ void store_four(const nvb_attention_decode_params& p, const DecodeBlock& block, int head,
                                           int column, const float4& output, const float2& total) {
  const float scale = p.value_scale != nullptr ? p.value_scale[block.kv_head] : 1.0f;
  const float inverse = total.y == 0.0f ? 0.0f : scale / total.y;
  const DecodeItem item = item_of(p, block, head);
  const int64_t at = item.row * p.output_token_stride + item.head * p.output_head_stride + column;
  store_element(p.output, p.output_dtype, at, output.x * inverse);
  store_element(p.output, p.output_dtype, at + 1, output.y * inverse);
  store_element(p.output, p.output_dtype, at + 2, output.z * inverse);
  store_element(p.output, p.output_dtype, at + 3, output.w * inverse);
  if (p.lse != nullptr && column == 0) store_item_lse(p, block, head, total);
}

// Adds parts with the weights 2^(maximum - their maximum), kBatch at a time.
struct Merged {
  float maximum, sum;
  float4 output;

  template <int Count>
  __device__ __forceinline__ void add(const float2 (&states)[Count], const float4 (&outputs)[Count]) {
    float most = maximum;
#pragma unroll
    for (int i = 0; i < Count; ++i) most = fmaxf(most, states[i].x);
    const float base = exponent_base(most);
    const float rescale = exp2_fast(maximum - base);
    maximum = most;
    sum *= rescale, output.x *= rescale, output.y *= rescale, output.z *= rescale, output.w *= rescale;
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      const float weight = exp2_fast(states[i].x - base);
      sum += weight * states[i].y;
      output.x += weight * outputs[i].x, output.y += weight * outputs[i].y;
      output.z += weight * outputs[i].z, output.w += weight * outputs[i].w;
    }
  }
};

// Merges the partial results of a row, in the order of its blocks.
template <typename Tile>
__device__ __forceinline__ void merge_row(const DecodeArguments& arguments, const Segment& segment) {
  const nvb_attention_decode_params& p = arguments.params;
  constexpr int kGroups = Tile::kHeadDim / 4;
  constexpr int kBatch = 8;
  for (int index = threadIdx.x; index < segment.heads * kGroups; index += 32 * Tile::kWarps) {
    const int head = index / kGroups, column = index % kGroups * 4;
    Merged merged{-CUDART_INF_F, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
    for (int first = 0; first < segment.blocks; first += kBatch) {
      float2 states[kBatch];
      float4 outputs[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        states[i] = make_float2(-CUDART_INF_F, 0.0f), outputs[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (first + i >= segment.blocks) continue;
        const int slot = 2 * (segment.first_block + first + i) + (first + i == 0 ? 1 : 0);
        const int64_t at = static_cast<int64_t>(slot) * p.heads_per_chunk + head;
        states[i] = __ldcg(arguments.partial_sums + at);
        outputs[i] = __ldcg(reinterpret_cast<const float4*>(arguments.partial_outputs + at * Tile::kHeadDim + column));
      }
      merged.add(states, outputs);
    }
    store_four(p, segment.block(), head, column, merged.output, make_float2(merged.maximum, merged.sum));
  }
}

}  // namespace nvb::decode_ring
