// One warp's stream of W for linear_quantized_stream.cuh: blocks of 16 rows, in stages of Depth chunks of 64 k with
// their scales, copied asynchronously into slots of shared memory that only this warp reads.
//
// `seek` goes to a block of rows, `copy` starts the copies of a stage of it, `load` takes a stage that has arrived into
// registers, `scale` and `zero_point` give the f32 factors of one chunk. A lane reads the words of W that it copied
// itself, and scales that other lanes copied.
#pragma once

#include "../../common/quantized_weight.cuh"

namespace nvb {
namespace quantized {

// Int4: the tiles of a block and its scales are contiguous along k.
template <Scales Kind, bool ZeroPoints, int Depth_>
class Int4Stage {
 public:
  using Weight = Int4Weight<Kind, ZeroPoints>;
  static constexpr int kDepth = Depth_;
  static constexpr int kGroupBytes = 32;
  static constexpr int kScaleBytes = kGroupBytes * Weight::kSteps * kDepth;
  static constexpr int kBytes = kDepth * 512 + kScaleBytes * (ZeroPoints ? 2 : 1);
  static constexpr int kScaleWords = Weight::kScaleWords;

  __device__ __forceinline__ explicit Int4Stage(const nvb_linear_quantized_params& p)
      : p_(p), chunks_(static_cast<int>(p.k / kChunk)), shift_(p.group == 128 ? 1 : 0) {}

  __device__ __forceinline__ void seek(int block) {
    const int lane = threadIdx.x % 32;
    weight_ = static_cast<const char*>(p_.weight) + static_cast<int64_t>(block) * chunks_ * 512 + lane * 16;
    const int groups = Kind == Scales::kGroups32 ? 2 * chunks_ : (chunks_ + shift_) >> shift_;
    scale_at_ = static_cast<int64_t>(block) * groups * kGroupBytes + lane * 16;
  }
  __device__ __forceinline__ void copy(char* slot, int chunk, int count) const {
    const int lane = threadIdx.x % 32;
    const char* const source = weight_ + chunk * 512;
    if (count == kDepth) {
#pragma unroll
      for (int i = 0; i < kDepth; ++i) copy_async<16>(slot + i * 512 + lane * 16, source + i * 512);
    } else {
#pragma unroll 1
      for (int i = 0; i < count; ++i) copy_async<16>(slot + i * 512 + lane * 16, source + i * 512);
    }
    const int first = group_of(chunk);
    if (lane * 16 < (group_of(chunk + count - 1) + Weight::kSteps - first) * kGroupBytes) {
      const int64_t at = scale_at_ + first * kGroupBytes;
      char* const target = slot + kDepth * 512 + lane * 16;
      copy_async<16>(target, static_cast<const char*>(p_.scales) + at);
      if constexpr (ZeroPoints) copy_async<16>(target + kScaleBytes, static_cast<const char*>(p_.zero_points) + at);
    }
  }
  __device__ __forceinline__ void load(const char* slot, int chunk, uint32_t (&words)[kDepth][Weight::kWords],
                                       uint32_t (&scales)[kDepth][kScaleWords]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      const uint4 raw = load16(slot + i * 512 + lane * 16);
      words[i][0] = raw.x, words[i][1] = raw.y, words[i][2] = raw.z, words[i][3] = raw.w;
      const char* const scale =
          slot + kDepth * 512 + (group_of(chunk + i) - group_of(chunk)) * kGroupBytes + lane / 4 * 4;
#pragma unroll
      for (int s = 0; s < Weight::kSteps; ++s) {
        scales[i][s] = *reinterpret_cast<const uint32_t*>(scale + s * kGroupBytes);
        if constexpr (ZeroPoints) {
          scales[i][Weight::kSteps + s] = *reinterpret_cast<const uint32_t*>(scale + kScaleBytes + s * kGroupBytes);
        }
      }
    }
  }
  __device__ __forceinline__ float2 scale(const uint32_t (&scales)[kScaleWords], int, int s) const {
    return __half22float2(as_f16(scales[s]));
  }
  // `fragment` subtracts 8 from q, which the sum of x gives back.
  __device__ __forceinline__ float2 zero_point(const uint32_t (&scales)[kScaleWords], int s) const {
    const float2 scale = __half22float2(as_f16(scales[s]));
    const float2 zero_point = __half22float2(as_f16(scales[kScaleWords / 2 + s]));
    return make_float2(fmaf(8.0f, scale.x, zero_point.x), fmaf(8.0f, scale.y, zero_point.y));
  }

 private:
  // The first group of a chunk.
  __device__ __forceinline__ int group_of(int chunk) const {
    return Kind == Scales::kGroups32 ? 2 * chunk : chunk >> shift_;
  }

  const nvb_linear_quantized_params& p_;
  const char* weight_;
  int64_t scale_at_;
  int chunks_;
  int shift_;
};

// Int8, FP8 and SFP: sixteen rows.
template <uint32_t Encoding, Scales Kind, int Depth_>
class ByteStage {
 public:
  using Weight = ByteWeight<Encoding, Kind>;
  static constexpr int kDepth = Depth_;
  static constexpr bool kHasScales = Kind != Scales::kRows;
  static constexpr int kScaleWords = Kind == Scales::kBlocks ? 1 : 2;
  static constexpr int kBytes = kDepth * 1024 + (kHasScales ? kDepth * kTileRows * 4 : 0);

  __device__ __forceinline__ explicit ByteStage(const nvb_linear_quantized_params& p)
      : p_(p), shift_(Kind == Scales::kBlocks || p.group == 128 ? 1 : 0) {
    const int chunks = static_cast<int>(p.k / kChunk);
    groups_ = kHalves ? 2 * chunks : (chunks + shift_) >> shift_;
  }

  __device__ __forceinline__ void seek(int block) {
    const int lane = threadIdx.x % 32;
    const int last = static_cast<int>(p_.n) - 1, row = block * kTileRows + lane / 4;
    const char* const weight = static_cast<const char*>(p_.weight) + lane % 4 * (kHalves ? 8 : 16);
    low_ = weight + min(row, last) * p_.weight_stride;
    high_ = weight + min(row + 8, last) * p_.weight_stride;
    if constexpr (kHasScales) {
      const int scale_row = min(block * kTileRows + lane % kTileRows, last);
      scale_at_ = static_cast<int64_t>(Kind == Scales::kBlocks ? scale_row >> 7 : scale_row) * groups_;
    }
  }
  __device__ __forceinline__ void copy(char* slot, int chunk, int count) const {
    const int lane = threadIdx.x % 32;
    if (count == kDepth) {
#pragma unroll
      for (int i = 0; i < kDepth; ++i) copy_chunk(slot + i * 1024, chunk + i);
    } else {
#pragma unroll 1
      for (int i = 0; i < count; ++i) copy_chunk(slot + i * 1024, chunk + i);
    }
    if constexpr (kHasScales) {
#pragma unroll
      for (int i = 0; i < kDepth; i += 2) {
        // The aligned word that holds a row's scale for a chunk.
        const int part = i + lane / 16;
        if (part >= count) break;
        const int64_t group = scale_at_ + (kHalves ? 2 * (chunk + part) : (chunk + part) >> shift_);
        const char* const source =
            static_cast<const char*>(p_.scales) + (Kind == Scales::kBlocks ? group * 4 : (group & ~int64_t{1}) * 2);
        copy_async<4>(slot + kDepth * 1024 + part * 64 + lane % 16 * 4, source);
      }
    }
  }
  __device__ __forceinline__ void load(const char* slot, int, uint32_t (&words)[kDepth][Weight::kWords],
                                       uint32_t (&scales)[kDepth][kScaleWords]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const char* const source = slot + i * 1024 + half * 512;
        uint32_t* const target = words[i] + 4 * half;
        if constexpr (kHalves) {
          const uint2 first = *reinterpret_cast<const uint2*>(source + lane * 8);
          const uint2 second = *reinterpret_cast<const uint2*>(source + 256 + lane * 8);
          target[0] = first.x, target[1] = first.y, target[2] = second.x, target[3] = second.y;
        } else {
          const uint4 raw = load16(source + lane * 16);
          target[0] = raw.x, target[1] = raw.y, target[2] = raw.z, target[3] = raw.w;
        }
      }
      if constexpr (kHasScales) {
        const char* const scale = slot + kDepth * 1024 + i * 64 + lane / 4 * 4;
        scales[i][0] = *reinterpret_cast<const uint32_t*>(scale);
        if constexpr (kScaleWords == 2) scales[i][1] = *reinterpret_cast<const uint32_t*>(scale + 32);
      }
    }
  }
  __device__ __forceinline__ float2 scale(const uint32_t (&scales)[kScaleWords], int chunk, int s) const {
    if constexpr (Kind == Scales::kBlocks) {
      return make_float2(__uint_as_float(scales[0]), __uint_as_float(scales[0]));
    } else {
      // Sixteen rows further a group lies in the same half of its word, so only lane / 4 and the chunk count.
      const float2 low = __half22float2(as_f16(scales[0])), high = __half22float2(as_f16(scales[1]));
      const int group = kHalves ? s : (threadIdx.x / 4 & groups_) + (chunk >> shift_);
      return group & 1 ? make_float2(low.y, high.y) : make_float2(low.x, high.x);
    }
  }

 private:
  static constexpr bool kHalves = Kind == Scales::kGroups32;

  __device__ __forceinline__ void copy_chunk(char* target, int chunk) const {
    const int lane = threadIdx.x % 32;
    const char* const low = low_ + chunk * kChunk;
    const char* const high = high_ + chunk * kChunk;
    if constexpr (kHalves) {
      copy_async<8>(target + lane * 8, low);
      copy_async<8>(target + 256 + lane * 8, low + 32);
      copy_async<8>(target + 512 + lane * 8, high);
      copy_async<8>(target + 768 + lane * 8, high + 32);
    } else {
      copy_async<16>(target + lane * 16, low);
      copy_async<16>(target + 512 + lane * 16, high);
    }
  }

  const nvb_linear_quantized_params& p_;
  const char* low_;
  const char* high_;
  int64_t scale_at_;
  int groups_;
  int shift_;
};

}  // namespace quantized
}  // namespace nvb
