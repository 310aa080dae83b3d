// The tiles of attention_prefill_masked.cuh: 16 keys and their values, on their way to a warp through stages in shared
// memory that are its own, so that warps wait for nobody.
//
// A stage holds the keys' rows, the values' rows, and what the mask adds to the scores of each lane. Of a row's 16-byte
// pieces every second key's change places by four, so that the eight lanes that load pieces of two keys together meet
// in no bank; the pieces of values change by their row, of which ldmatrix reads eight. Key k lies in row_of(k): a lane
// then has the scores of keys quad, quad + 4, + 8 and + 12, whose bits make a word without being moved.
#pragma once

#include "../../common/mma.cuh"
#include "../../common/vector.cuh"
#include "../attention_prefill.cuh"
#include "attention_prefill_masked_division.h"

namespace nvb::masked {

inline constexpr int kLaneKeys = kKeys / 4;
inline constexpr int kMostStages = 4;

template <typename Element, int HeadDim>
struct Tile {
  using T = Element;
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kWarps = HeadDim == 256 ? 4 : 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRowBytes = 2 * HeadDim;
  static constexpr int kTensorBytes = kKeys * kRowBytes;
  static constexpr int kStageBytes = 2 * kTensorBytes + 32 * static_cast<int>(sizeof(float4));
  static constexpr int kOutputPitch = HeadDim + 4;  // floats, so that the quads of a warp store to different banks
  static_assert(kMostPairs * kOutputPitch * 4 <= kStageBytes);
};

__device__ __forceinline__ int row_of(int key) {
  return 2 * (key % 4) + key / 4 % 2 + 8 * (key / 8);
}

// Elements of the mask as they are: they are converted when they have come.
struct RawBiases {
  uint32_t bits[kLaneKeys];
};

// The mask of the lane's pair.
struct Mask {
  const void* row;  // null: none
  uint32_t dtype;
  int length;  // of the keys; 0 for a pair too many
  int quad;

  __device__ __forceinline__ RawBiases load(int first_key) const {
    RawBiases raw = {};
    if (row == nullptr) return raw;
    if (dtype == NVB_F32) {
#pragma unroll
      for (int e = 0; e < kLaneKeys; ++e) {
        const int key = first_key + quad + 4 * e;
        if (key < length) raw.bits[e] = __ldg(static_cast<const uint32_t*>(row) + key);
      }
    } else {
#pragma unroll
      for (int e = 0; e < kLaneKeys; ++e) {
        const int key = first_key + quad + 4 * e;
        if (key < length) raw.bits[e] = __ldg(static_cast<const uint16_t*>(row) + key);
      }
    }
    return raw;
  }

  // -inf for what the pair does not see.
  __device__ __forceinline__ float bias(const RawBiases& raw, int first_key, int e) const {
    if (first_key + quad + 4 * e >= length) return -CUDART_INF_F;
    if (row == nullptr) return 0.0f;
    if (dtype == NVB_F32) return __uint_as_float(raw.bits[e]);
    if (dtype == NVB_BF16) return __uint_as_float(raw.bits[e] << 16);
    return __half2float(__ushort_as_half(static_cast<uint16_t>(raw.bits[e])));
  }
};

// Where the keys and values of a KV head lie.
template <typename T>
struct Rows {
  const T* keys;
  const T* values;
  int64_t key_stride;
  int64_t value_stride;
};

// Asks for a tile. What no pair sees is zero and is not read: stale rows of a cache may hold NaN.
template <typename Tile>
__device__ __forceinline__ void copy_tile(unsigned char* stage, const Rows<typename Tile::T>& rows, const Mask& mask,
                                          int first_key, const RawBiases& raw) {
  constexpr int kPieces = Tile::kRowBytes / 16, kKeysAtOnce = 32 / kPieces;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float biases[kLaneKeys];
  uint32_t sees = 0;
#pragma unroll
  for (int e = 0; e < kLaneKeys; ++e) {
    biases[e] = mask.bias(raw, first_key, e);
    if (biases[e] != -CUDART_INF_F) sees |= 1u << (mask.quad + 4 * e);
  }
  reinterpret_cast<float4*>(stage + 2 * Tile::kTensorBytes)[lane] =
      make_float4(biases[0], biases[1], biases[2], biases[3]);
  uint32_t seen = 0;
#if __CUDA_ARCH__ >= 800
  seen = __reduce_or_sync(0xffffffffu, sees);
#endif
  if (seen == 0) return;
  const int piece = lane % kPieces;
  // Four at a time, because with all of them 128 registers are not enough for 128 columns.
#pragma unroll 4
  for (int i = 0; i < kKeys / kKeysAtOnce; ++i) {
    const int key = i * kKeysAtOnce + lane / kPieces;
    const int row = row_of(key);
    const bool reads = (seen >> key & 1) != 0;
    const int64_t token = reads ? first_key + key : 0;
    cp_async16(stage + row * Tile::kRowBytes + 16 * (piece ^ (row % 2 * 4)),
               rows.keys + token * rows.key_stride + 8 * piece, reads);
    cp_async16(stage + Tile::kTensorBytes + row * Tile::kRowBytes + 16 * (piece ^ (row % 8)),
               rows.values + token * rows.value_stride + 8 * piece, reads);
  }
}

// Waits until the oldest of `stages` tiles has come.
__device__ __forceinline__ void wait_for_tile(int stages) {
  if (stages == 1) {
    cp_async_wait<0>();
  } else if (stages == 2) {
    cp_async_wait<1>();
  } else if (stages == 3) {
    cp_async_wait<2>();
  } else {
    cp_async_wait<3>();
  }
  __syncwarp();
}

}  // namespace nvb::masked
