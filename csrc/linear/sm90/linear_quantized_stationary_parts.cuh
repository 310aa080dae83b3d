// What a warp of linear_quantized_stationary.cuh does around its loop: W to the first operand of mma, copies
// of W, x into registers, finished sums to y.
#pragma once

#include "../../common/bulk_copy.cuh"
#include "../../common/cluster.cuh"
#include "../../common/linear_epilogue.cuh"
#include "../../common/quantized_nonfinite.cuh"
#include "../../common/quantized_weight.cuh"
#include "linear_quantized_undecoded.cuh"

namespace nvb {
namespace quantized {

// A bulk copy of x, which other blocks read too.
__device__ __forceinline__ void bulk_copy_input(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
#endif
}

// q - 8 in T, divided by kFactor. Masked to its place in the lowest byte of a T, a code is a subnormal number or one
// with the least exponent, which continues them; a fused multiplication makes it the same number for both places and
// subtracts, exactly, so that only one of two pairs needs a shift.
template <typename T>
struct Int4Decoder {
  static constexpr float kFactor = kIsBf16<T> ? 64.0f : 512.0f;
  static constexpr uint32_t kLow = kIsBf16<T> ? 0x7f007f00u : 0x78007800u;         // of bits 0 to 3: 2^127, 2^15
  static constexpr uint32_t kHigh = kIsBf16<T> ? 0x7d007d00u : 0x68006800u;        // of bits 4 to 7: 2^123, 2^11
  static constexpr uint32_t kMinusEight = kIsBf16<T> ? 0xbe00be00u : 0xa400a400u;  // -2^-3, -2^-6

  static __device__ __forceinline__ uint32_t multiply_add(uint32_t a, uint32_t b) {
    if constexpr (kIsBf16<T>) {
      return bits_of(__hfma2(as_bf16(a), as_bf16(b), as_bf16(kMinusEight)));
    } else {
      return bits_of(__hfma2(as_f16(a), as_f16(b), as_f16(kMinusEight)));
    }
  }
  static __device__ __forceinline__ void fragment(uint32_t word, uint32_t (&a)[4]) {
    const uint32_t upper = word >> 8;
    a[0] = multiply_add(word & 0x000f000fu, kLow);
    a[1] = multiply_add(word & 0x00f000f0u, kHigh);
    a[2] = multiply_add(upper & 0x000f000fu, kLow);
    a[3] = multiply_add(upper & 0x00f000f0u, kHigh);
  }
};

// x in the units of UndecodedInt4.
template <typename T, int Chunks, int Tiles>
__device__ __forceinline__ void scale_raw_input(uint32_t (&x)[Chunks][Tiles][4][2]) {
#pragma unroll
  for (int i = 0; i < Chunks * Tiles * 8; ++i) {
    uint32_t& pair = x[i / (Tiles * 8)][i / 8 % Tiles][i / 2 % 4][i % 2];
    pair = UndecodedInt4<T>::scale_input(pair);
  }
}

// The sums of x over each group as second operands of mma m16n8k8: k = t is the leading part of group 4 quad + t,
// k = t + 4 the rest. Summed by the tensor cores as well: rows of ones times x. A lane stores its own at `sums`[(quad
// Tiles + tile) 32].
template <typename T, int GroupK, int Quads, int Chunks, int Tiles>
__device__ __forceinline__ void sum_groups(const uint32_t (&x)[Chunks][Tiles][4][2], uint2* sums) {
  constexpr int kInstructions = GroupK / 16;  // of a group
  const uint32_t ones[4] = {kOnes<T>, kOnes<T>, kOnes<T>, kOnes<T>};
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int quad = 0; quad < Quads; ++quad) {
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
      float own = 0.0f;  // of token lane / 4 and group lane % 4 of the four
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int first = (4 * quad + i) * kInstructions;
        if (first >= 4 * Chunks) break;
        float sum[4] = {};
#pragma unroll
        for (int j = first; j < first + kInstructions; ++j) {
          mma_m16n8k16<T>(sum, ones, x[j / 4][tile][j % 4][0], x[j / 4][tile][j % 4][1]);
        }
        const float even = __shfl_sync(0xffffffffu, sum[0], lane / 8);
        const float odd = __shfl_sync(0xffffffffu, sum[1], lane / 8);
        if (lane % 4 == i) own = lane & 4 ? odd : even;
      }
      own /= UndecodedInt4<T>::kInputFactor;
      const uint32_t leading = __float_as_uint(own) & 0xffffe000u;
      sums[(quad * Tiles + tile) * 32] = make_uint2(leading, __float_as_uint(own - __uint_as_float(leading)));
    }
  }
}

// A warp's chunks of x as second operands of mma; 0 past `count` chunks. `x` is at the first of them.
// Up to 8 tokens: straight from global memory, which takes no barrier. Tokens past the end repeat the last one, whose
// sums are dropped.
template <typename T, int Chunks>
__device__ __forceinline__ void load_stationary(const T* input, int64_t stride, int m, int count, char*,
                                                uint32_t (&x)[Chunks][1][4][2]) {
  const int lane = threadIdx.x % 32;
  const T* const token = input + min(lane / 4, m - 1) * stride + lane % 4 * 4;
#pragma unroll
  for (int c = 0; c < Chunks; ++c) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint2 raw = make_uint2(0u, 0u);
      if (c < count) raw = *reinterpret_cast<const uint2*>(token + c * kChunk + j * 16);
      x[c][0][j][0] = raw.x, x[c][0][j][1] = raw.y;
    }
  }
}

// Bytes of a token on its way through shared memory: half a warp reads four tokens from all banks.
template <int Chunks>
inline constexpr int kTokenBytes = Chunks * 128 + 32;

// Up to 16 tokens: the eight rows of a load would be eight lines, which is what more tokens wait for. Whole lines pass
// through shared memory instead, four tokens at a time, in `scratch` of 4 kTokenBytes.
template <typename T, int Chunks>
__device__ __forceinline__ void load_stationary(const T* input, int64_t stride, int m, int count, char* scratch,
                                                uint32_t (&x)[Chunks][2][4][2]) {
  static_assert(Chunks == 4, "a lane copies 16 bytes of a token");
  const int lane = threadIdx.x % 32;
  uint4 raw[4][4];
#pragma unroll
  for (int batch = 0; batch < 4; ++batch) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 4 * batch + i;
      raw[batch][i] = make_uint4(0u, 0u, 0u, 0u);
      if (token < m && lane < 8 * count) raw[batch][i] = load16(input + token * stride + lane * 8);
    }
  }
#pragma unroll
  for (int batch = 0; batch < 4; ++batch) {
#pragma unroll
    for (int i = 0; i < 4; ++i) store16(scratch + i * kTokenBytes<Chunks> + lane * 16, raw[batch][i]);
    __syncwarp();
    if (lane / 16 == batch % 2) {
      const char* const token = scratch + lane % 16 / 4 * kTokenBytes<Chunks> + lane % 4 * 8;
#pragma unroll
      for (int c = 0; c < Chunks; ++c) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint2 pair = *reinterpret_cast<const uint2*>(token + c * 128 + j * 32);
          x[c][batch / 2][j][0] = pair.x, x[c][batch / 2][j][1] = pair.y;
        }
      }
    }
    __syncwarp();
  }
}

// Fetches x from shared memory, where token t is at x_shared + t * pitch.
template <int Chunks>
__device__ __forceinline__ void load_shared_input(const char* x_shared, int pitch, int m, int count,
                                                  uint32_t (&x)[Chunks][2][4][2]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    const char* const token = x_shared + min(8 * tile + lane / 4, m - 1) * pitch + lane % 4 * 8;
#pragma unroll
    for (int c = 0; c < Chunks; ++c) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint2 raw = make_uint2(0u, 0u);
        if (c < count) raw = *reinterpret_cast<const uint2*>(token + c * 128 + j * 32);
        x[c][tile][j][0] = raw.x, x[c][tile][j][1] = raw.y;
      }
    }
  }
}

// Finishes a lane's sums of a block of rows as mma leaves them. Lanes 4 apart hold neighbouring rows: they swap, so
// that each has (gate, up) pairs of columns of one token. The whole warp calls it.
template <typename T, bool ZeroPoints>
__device__ __forceinline__ void epilogue_fragment(const nvb_linear_quantized_params& p, const LinearEpilogue& epilogue,
                                                  int64_t row_block, int tile, const float (&sums)[4]) {
  const int lane = threadIdx.x % 32;
  const bool odd = (lane & 4) != 0;
  const int token = 8 * tile + lane % 4 * 2 + (odd ? 1 : 0);
  float others[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    others[half] = __shfl_xor_sync(0xffffffffu, odd ? sums[2 * half] : sums[2 * half + 1], 4);
  }
  if (token >= p.m) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t column = row_block * kTileRows + half * 8 + lane / 8 * 2;
    if (column >= p.n) continue;
    const float own = odd ? sums[2 * half + 1] : sums[2 * half];
    constexpr float kUndecodedFactors[2] = {UndecodedInt4<T>::kLowFactor, UndecodedInt4<T>::kHighFactor};
    const float factor = ZeroPoints ? kUndecodedFactors[half] : Int4Decoder<T>::kFactor;
    float pair[2] = {(odd ? others[half] : own) * factor, (odd ? own : others[half]) * factor};
    repair_sums<ZeroPoints, T>(p, token, column, pair);
    float bias[2];
    load_bias(epilogue, column, bias);
    store_columns(epilogue, token, column, pair, bias);
  }
}

}  // namespace quantized
}  // namespace nvb
