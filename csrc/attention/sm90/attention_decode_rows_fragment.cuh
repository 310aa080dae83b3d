// What the warps of attention_decode_rows.cu make of rows with scales of their own (common/kv_row.cuh): operands of
// mma.sync in BF16, which holds every value of INT8 and Q4_0 exactly and has the range of scales, and the scales.
//
// A matrix of ldmatrix is 16 bytes of eight rows: 16 elements of a byte, or a block of 32 of half a byte, whose low
// halves are the first 16 and high halves the last. A lane gets four bytes of a key, and two bytes of each of two
// values. The halves of a register are bytes 0 and 2 of a word, or 1 and 3, so that no byte has to be moved: keys are
// taken in the order of columns 0, 2, 1, 3, and queries likewise; of two values that are the same column.
#pragma once

#include "../../common/kv_row.cuh"
#include "../../common/mma.cuh"
#include "../../common/vector.cuh"

namespace nvb::decode_rows {

// value = high + rest, each BF16.
__device__ __forceinline__ void split_pair(float first, float second, uint32_t& high, uint32_t& rest) {
  high = pack_pair<__nv_bfloat16>(first, second);
  const float2 rounded = unpack_pair<__nv_bfloat16>(high);
  rest = pack_pair<__nv_bfloat16>(first - rounded.x, second - rounded.y);
}

// a - b of two BF16 each, exactly.
__device__ __forceinline__ uint32_t subtract_pair(uint32_t a, uint32_t b) {
  uint32_t difference = 0;
#if __CUDA_ARCH__ >= 900
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
#endif
  return difference;
}

// Bytes 0 and 2 of a word of signed bytes. 0x4300 is 128 in BF16, whose last seven bits count from there in ones; with
// the eighth it is 256, so a byte is (128 + its low bits) - (128 or 256).
__device__ __forceinline__ uint32_t widen_bytes(uint32_t word) {
  return subtract_pair((word & 0x007f007fu) | 0x43004300u, (word & 0x00800080u) | 0x43004300u);
}
// The low halves of bytes 0 and 2, less 8.
__device__ __forceinline__ uint32_t widen_halves(uint32_t word) {
  return subtract_pair((word & 0x000f000fu) | 0x43004300u, 0x43084308u);
}

// The scales of a row: one, or those of four blocks, which stay in F16 until they are used.
template <int kScales>
struct RowScales {
  uint32_t words[kScales == 1 ? 1 : kScales / 2];

  // All 0 where the row is none.
  __device__ __forceinline__ void load(const unsigned char* from, bool none) {
    if constexpr (kScales == 1) {
      words[0] = *reinterpret_cast<const uint32_t*>(from);
    } else {
      static_assert(kScales == 4);
      const uint2 raw = *reinterpret_cast<const uint2*>(from);
      words[0] = raw.x, words[1] = raw.y;
    }
#pragma unroll
    for (uint32_t& word : words) word = none ? 0 : word;
  }
  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (kScales == 1) {
      return __uint_as_float(words[0]);
    } else {
      const float2 two = unpack_pair<__half>(words[i / 2]);
      return i % 2 == 0 ? two.x : two.y;
    }
  }
};

// Calls use(step, operand) for steps of 16 columns: of keys the second operand of S for eight of them and the eight
// tokens after them; of values (`kTransposed`) the first operand of O^T for 16 columns of the same tokens. `tile` is
// the lane's row of the stage.
template <typename Tile, bool kTransposed, typename Use>
__device__ __forceinline__ void for_each_fragment(const unsigned char* tile, const Use& use) {
  constexpr bool kHalves = Tile::kDtype == NVB_KV_Q4_0;
  constexpr int kStepsAtOnce = kHalves ? 4 : 2;  // of two matrices for each of two tokens
#pragma unroll
  for (int step = 0; step < Tile::kSteps; step += kStepsAtOnce) {
    uint32_t raw[4];
    if constexpr (kTransposed) {
      ldmatrix_x4_trans(raw, tile + step / kStepsAtOnce * 32);
    } else {
      ldmatrix_x4(raw, tile + step / kStepsAtOnce * 32);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (kHalves) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t first = raw[i] >> (4 * half), second = raw[i + 2] >> (4 * half);
          const uint32_t operand[4] = {widen_halves(first), widen_halves(first >> 8), widen_halves(second),
                                       widen_halves(second >> 8)};
          use(step + 2 * i + half, operand);
        }
      } else {
        const uint32_t operand[4] = {widen_bytes(raw[i]), widen_bytes(raw[i] >> 8), widen_bytes(raw[i + 2]),
                                     widen_bytes(raw[i + 2] >> 8)};
        use(step + i, operand);
      }
    }
  }
}

}  // namespace nvb::decode_rows
