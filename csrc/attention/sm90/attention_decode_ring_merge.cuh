// How attention_decode_ring.cuh adds partial results: those of a block's warps, and those of the blocks that read a
// row. Every sum is in the order of the parts, whichever block forms it, so equal arguments give equal bits.
#pragma once

#include "../attention_partial.cuh"
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

// Merges the partial results of a row. What takes the time is the latency of loads from L2, so that all of a thread's
// are under way together where registers allow, and several threads share four columns where the block has threads to
// spare: thread `part` of `share` adds every share-th block's results in their order, then they add theirs pairwise.
template <typename Tile, int Batch>
__device__ __forceinline__ void merge_row(const DecodeArguments& arguments, const Segment& segment) {
  const nvb_attention_decode_params& p = arguments.params;
  constexpr int kGroups = Tile::kHeadDim / 4, kThreads = 32 * Tile::kWarps;
  const int total = segment.heads * kGroups;
  int share = 1;
  while (share < 8 && 2 * share * total <= kThreads) share *= 2;
  const int part = static_cast<int>(threadIdx.x) % share;
  for (int base = 0; base < total; base += kThreads / share) {
    const int index = min(base + static_cast<int>(threadIdx.x) / share, total - 1);
    const int head = index / kGroups, column = index % kGroups * 4;
    Merged merged = Merged::none();
    for (int first = part; first < segment.blocks; first += Batch * share) {
      float2 states[Batch];
      float4 outputs[Batch];
      // Loads behind the last block repeat it: a branch around each would put one latency behind the other.
#pragma unroll
      for (int i = 0; i < Batch; ++i) {
        const int block = min(first + i * share, segment.blocks - 1);
        const int slot = 2 * (segment.first_block + block) + (block == 0 ? 1 : 0);
        const int64_t at = static_cast<int64_t>(slot) * p.heads_per_chunk + head;
        states[i] = __ldcg(arguments.partial_sums + at);
        outputs[i] = __ldcg(reinterpret_cast<const float4*>(arguments.partial_outputs + at * Tile::kHeadDim + column));
      }
#pragma unroll
      for (int i = 0; i < Batch; ++i) {
        if (first + i * share >= segment.blocks) states[i] = make_float2(-CUDART_INF_F, 0.0f);
      }
      merged.add(states, outputs);
    }
    for (int offset = 1; offset < share; offset *= 2) {
      const auto other = [&](float value) { return __shfl_xor_sync(0xffffffffu, value, offset); };
      const float2 states[1] = {make_float2(other(merged.maximum), other(merged.sum))};
      const float4 outputs[1] = {
          make_float4(other(merged.output.x), other(merged.output.y), other(merged.output.z), other(merged.output.w))};
      merged.add(states, outputs);
    }
    if (part == 0 && base + static_cast<int>(threadIdx.x) / share < total) {
      store_four(p, segment.block(), head, column, merged.output, make_float2(merged.maximum, merged.sum));
    }
  }
}

}  // namespace nvb::decode_ring
