// The rope kernel for many tokens whose tensors, norms apart, are of one 16-bit dtype and take 16-byte vectors; rope.h
// has the formula and shapes, rope.cu the launcher, rope.cuh the kernel for all other cases.
//
// A block of kWarps warps takes one token. A head has 4 to 32 lanes, so a warp takes a tile of 8 to 1 heads at a time:
// tiles of queries, then of keys, then of values, dealt out to the warps in turn. A lane holds one pair of vectors of
// its head, as in rope.cuh, and has the same columns in every tile: sines, cosines and norm weights stay in registers,
// and the instructions that find them, and the cache's place, are paid once a warp and not once a head.
//
// The next kSlots tiles of a warp are on their way by cp.async. A lane reads only the 32 bytes of a tile that it copied
// itself, so they need no barrier. The outputs are first in line to leave L2: so many tokens leave nothing of them
// there for the next kernel. The copies have no cache policy: from a createpolicy ahead of the loop, ptxas 13.0 makes
// copies that name a register which nothing sets, an illegal instruction to an H200.
//
// On an H200 it has 89.6 % of the speed of a copy of as many bytes for 16,384 tokens with 12 and 4 heads of 256 in
// BF16, norms and append; 10 blocks of 5 slots have 87 %, two tokens a block of rope.cuh's kernel 84.5 %. Without norms
// and append both kernels have 93.5 %.
//
// Shared memory: 2 KiB of sines and cosines, 1 KiB a slot of a warp. Registers: at most 80 for kManyBlocks; the stack
// is that of sincosf.
#pragma once

#include "../common/mma.cuh"
#include "rope.cuh"

namespace nvb {
namespace rope {

constexpr int kWarps = 2;
constexpr int kSlots = 3;
constexpr int kManyBlocks = 12;  // on a multiprocessor

template <typename T>
__global__ void __launch_bounds__(32 * kWarps, kManyBlocks)
    rope_many_kernel(const __grid_constant__ Arguments arguments) {
  static_assert(sizeof(T) == 2, "a lane's vectors are 8 elements of 16 bits");
  static_assert(kMaxHeadDim <= 32 * 16, "the lanes of a warp hold a whole head");
  __shared__ __align__(16) float cosines[kMaxHeadDim / 2];
  __shared__ __align__(16) float sines[kMaxHeadDim / 2];
  __shared__ uint4 slots[kWarps][kSlots][2][32];
  begin_overlapped();
  const nvb_rope_params& p = arguments.params;
  const int half = p.rotary_dim / 2;
  const int64_t token = blockIdx.x;

  // Which lane of which head of a tile. The warp is the same in all lanes, and so are all branches on tiles.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int lanes = 1 << arguments.lane_bits;
  const int lane = threadIdx.x & (lanes - 1);
  const int tile_bits = 5 - arguments.lane_bits;
  const int head_of_tile = (threadIdx.x & 31) >> arguments.lane_bits;
  const auto tiles_of = [&](int heads) { return (heads + (1 << tile_bits) - 1) >> tile_bits; };
  const int key_begin = p.query != nullptr ? tiles_of(p.query_heads) : 0;
  const int value_begin = key_begin + (p.key != nullptr ? tiles_of(p.kv_heads) : 0);
  const int end = value_begin + (p.value_cache != nullptr ? tiles_of(p.kv_heads) : 0);
  const auto head_of = [&](int tile) {
    const int begin = tile < key_begin ? 0 : tile < value_begin ? key_begin : value_begin;
    return ((tile - begin) << tile_bits) + head_of_tile;
  };
  const auto is_valid = [&](int tile, int head) { return head < (tile < key_begin ? p.query_heads : p.kv_heads); };

  // Where this lane's vectors lie.
  const bool rotated = lane * 8 < half;
  const int column[2] = {rotated ? lane * 8 : lane * 16, rotated ? half + lane * 8 : lane * 16 + 8};
  const bool inside[2] = {column[0] < p.head_dim, column[1] < p.head_dim};

  // Every fetch closes one group, an empty one behind the last tile, so that the wait below counts slots.
  const auto fetch = [&](int tile, int slot) {
    if (tile < end) {
      const bool is_query = tile < key_begin;
      const bool is_key = !is_query && tile < value_begin;
      const T* source = static_cast<const T*>(is_query ? p.query : is_key ? p.key : p.value);
      const int64_t token_stride = is_query ? p.query_token_stride : is_key ? p.key_token_stride : p.value_token_stride;
      const int64_t head_stride = is_query ? p.query_head_stride : is_key ? p.key_head_stride : p.value_head_stride;
      const int head = head_of(tile);
      const int64_t start = token * token_stride + head * head_stride;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const bool valid = inside[j] && is_valid(tile, head);
        cp_async16(&slots[warp][slot][j][threadIdx.x & 31], valid ? source + start + column[j] : source, valid);
      }
    }
    cp_async_commit();
  };
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) fetch(warp + slot * kWarps, slot);

  // The token's angles, and the first norm, while the elements come.
  float frequency = threadIdx.x < half ? load_frequency(arguments, threadIdx.x) : 0.0f;
  const bool is_cached = p.key_cache != nullptr;
  const int position = p.positions[token];
  const int cache_slot = is_cached && p.slots != nullptr ? p.slots[token] : 0;
  float weight[2][8] = {};
  const auto load_weight = [&](const void* norm, uint32_t dtype) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (norm == nullptr || !inside[j]) continue;
      load_vector(norm, dtype, column[j], weight[j]);
#pragma unroll
      for (int e = 0; e < 8; ++e) weight[j][e] = p.weight_offset + weight[j][e];
    }
  };
  bool weighs_queries = warp < key_begin;
  load_weight(weighs_queries ? p.query_norm : p.key_norm, weighs_queries ? p.query_norm_dtype : p.key_norm_dtype);
  for (int i = threadIdx.x; i < half; i += 32 * kWarps) {
    if (i != threadIdx.x) frequency = load_frequency(arguments, i);
    sincosf(static_cast<float>(position) * frequency * p.position_scale, &sines[i], &cosines[i]);
  }
  __syncthreads();
  float cosine[8] = {};
  float sine[8] = {};
  if (rotated) {
    load_vector(cosines, NVB_F32, lane * 8, cosine);
    load_vector(sines, NVB_F32, lane * 8, sine);
  }
  const bool is_inside =
      is_cached && position >= 0 && position < p.capacity && cache_slot >= 0 && cache_slot < p.slot_count;
  const int64_t place = is_inside ? cache_place<true>(p, cache_slot, position) : -1;
  const bool appends = place >= 0;

  int slot = 0;
  for (int tile = warp; tile < end; tile += kWarps) {
    const bool is_query = tile < key_begin;
    const bool is_key = !is_query && tile < value_begin;
    const int head = head_of(tile);
    cp_async_wait<kSlots - 1>();
    float x[2][8];
#pragma unroll
    for (int j = 0; j < 2; ++j) unpack16<T>(slots[warp][slot][j][threadIdx.x & 31], x[j]);
    fetch(tile + kSlots * kWarps, slot);
    slot = slot == kSlots - 1 ? 0 : slot + 1;

    // Norm.
    if ((is_query || is_key) && (is_query ? p.query_norm : p.key_norm) != nullptr) {
      if (weighs_queries && is_key) {
        weighs_queries = false;
        load_weight(p.key_norm, p.key_norm_dtype);
      }
      float squares = 0.0f;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int e = 0; e < 8; ++e) squares += x[j][e] * x[j][e];
      }
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) {
        if (offset < lanes) squares += __shfl_xor_sync(0xffffffffu, squares, offset);
      }
      const float inverse = rsqrtf(squares / static_cast<float>(p.head_dim) + p.epsilon);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int e = 0; e < 8; ++e) x[j][e] = x[j][e] * inverse * weight[j][e];
      }
    }

    // Rotate; the rest of the head, and values, are left alone.
    if (rotated && (is_query || is_key)) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float first = x[0][e];
        const float second = x[1][e];
        x[0][e] = first * cosine[e] - second * sine[e];
        x[1][e] = second * cosine[e] + first * sine[e];
      }
    }
    if (is_query) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        x[0][e] *= p.query_scale;
        x[1][e] *= p.query_scale;
      }
    }

    // Store, and append.
    if (!is_valid(tile, head)) continue;
    T* output = static_cast<T*>(is_query ? p.query_output : is_key ? p.key_output : nullptr);
    T* cache = static_cast<T*>(is_query || !appends ? nullptr : is_key ? p.key_cache : p.value_cache);
    const int64_t output_token_stride = is_query ? p.query_output_token_stride : p.key_output_token_stride;
    const int64_t output_head_stride = is_query ? p.query_output_head_stride : p.key_output_head_stride;
    const int64_t output_start = token * output_token_stride + head * output_head_stride;
    const int64_t cache_start = place + head * p.cache_head_stride;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (!inside[j]) continue;
      const uint4 packed = pack16<T>(x[j]);
      if (output != nullptr) __stcs(reinterpret_cast<uint4*>(output + output_start + column[j]), packed);
      if (cache != nullptr) __stcs(reinterpret_cast<uint4*>(cache + cache_start + column[j]), packed);
    }
  }
}

}  // namespace rope
}  // namespace nvb
