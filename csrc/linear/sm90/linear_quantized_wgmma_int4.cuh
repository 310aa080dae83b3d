// Int4 in a stage of linear_quantized_wgmma.cuh, with zero points or without.
//
// Stages of zero points, which meet the groups' sums of x, have those of kStageGroups groups in the place of W.
#pragma once

#include "linear_quantized_wgmma_stage.cuh"

namespace nvb {
namespace quantized {

// Int4: a block of 16 rows keeps its two tiles as they are, then come the blocks' scales of the stage's groups, 32
// bytes each, and, where elements are made before the product, zero points like them. A stage of zero points alone has
// those of kStageGroups groups where the tiles of a block are otherwise.
template <Scales Kind, bool ZeroPoints, typename T, int GroupK, int Rows>
class WeightStage<Int4Weight<Kind, ZeroPoints>, T, GroupK, Rows> {
  using Weight = Int4Weight<Kind, ZeroPoints>;

 public:
  static constexpr int kBlocks = Rows / kTileRows;
  static constexpr int kBlockBytes = kStageChunks * 512;
  static constexpr int kGroups = kStageK / GroupK;
  static constexpr int kScaleBytes = kGroups * 32;
  static constexpr bool kStagedZeroPoints = ZeroPoints && kAsScaledF16<T>;
  static constexpr int kBytes = kBlocks * (kBlockBytes + (kStagedZeroPoints ? 2 : 1) * kScaleBytes);
  static_assert(kStageGroups * 32 == kBlockBytes, "zero points of a stage's groups take the place of a block's tiles");

  __device__ __forceinline__ WeightStage(const nvb_linear_quantized_params& p, int64_t first_row) {
    const int64_t first_block = first_row / kTileRows;
    blocks_ = static_cast<int>(min((p.n + kTileRows - 1) / kTileRows - first_block, int64_t{kBlocks}));
    chunks_ = static_cast<int>((p.k + kChunk - 1) / kChunk);
    groups_ = static_cast<int>((p.k + GroupK - 1) / GroupK);
    weight_ = static_cast<const char*>(p.weight) + first_block * chunks_ * 512;
    scales_ = static_cast<const char*>(p.scales) + first_block * groups_ * 32;
    zero_points_ = static_cast<const char*>(p.zero_points) + (ZeroPoints ? first_block * groups_ * 32 : 0);
  }

  __device__ __forceinline__ void copy(int step, char* stage) const {
    const int thread = threadIdx.x % kProducers;
    const char* const weight = weight_ + static_cast<int64_t>(step) * kBlockBytes;
    const int chunks = min(chunks_ - step * kStageChunks, kStageChunks);
    constexpr int kPieces = kBlockBytes / 16;
    constexpr int kTogether = kProducers / kPieces;
    const int piece = thread % kPieces;
    const bool valid = piece < chunks * 32;
    const int inside = blocks_ - 1 - thread / kPieces;
    const int64_t stride = static_cast<int64_t>(chunks_) * 512;
    const char* source = weight + (inside < 0 ? blocks_ - 1 : thread / kPieces) * stride + (valid ? piece * 16 : 0);
    const uint32_t target = shared_address(stage) + thread * 16;
    if (blocks_ == kBlocks && chunks == kStageChunks) {
      // Without the conditions below, whose instructions would delay those of the consumers.
#pragma unroll
      for (int i = 0; i < kBlocks / kTogether; ++i)
        copy16(target + i * kProducers * 16, source + i * kTogether * stride);
    } else {
#pragma unroll
      for (int i = 0; i < kBlocks / kTogether; ++i) {
        copy16(target + i * kProducers * 16, source, valid);
        if ((i + 1) * kTogether <= inside) source += kTogether * stride;
      }
    }
    constexpr int kScalePieces = kScaleBytes / 16;
    const int groups = min(groups_ - step * kGroups, kGroups);
#pragma unroll
    for (int i = 0; i < (kBlocks * kScalePieces + kProducers - 1) / kProducers; ++i) {
      const int index = i * kProducers + thread;
      const int block = index / kScalePieces, piece = index % kScalePieces;
      if (block < kBlocks) {
        const bool valid = block < blocks_ && piece < 2 * groups;
        const int64_t source = (static_cast<int64_t>(block) * groups_ + step * kGroups) * 32 + piece * 16;
        const uint32_t target = shared_address(stage + kBlocks * kBlockBytes) + index * 16;
        copy16(target, scales_ + (valid ? source : 0), valid);
        if constexpr (kStagedZeroPoints)
          copy16(target + kBlocks * kScaleBytes, zero_points_ + (valid ? source : 0), valid);
      }
    }
  }

  __device__ __forceinline__ void copy_zero_points(int step, char* stage) const {
    const int thread = threadIdx.x % kProducers;
    constexpr int kPieces = kBlockBytes / 16;
    constexpr int kTogether = kProducers / kPieces;
    const int piece = thread % kPieces, first_block = thread / kPieces;
    const bool inside = piece < 2 * (groups_ - step * kStageGroups);
    const int stride = groups_ * 32;  // of 256 rows less than 2^31, as k is at most 2^20
    const int source = first_block * stride + step * kBlockBytes + piece * 16;
    const uint32_t target = shared_address(stage) + thread * 16;
#pragma unroll
    for (int i = 0; i < kBlocks / kTogether; ++i) {
      const bool valid = inside && first_block + i * kTogether < blocks_;
      copy16(target + i * kProducers * 16, zero_points_ + (valid ? source + i * kTogether * stride : 0), valid);
    }
  }

  // Words of chunk `chunk` of block `block`, and the scales of rows g and g + 8 in group `group` of the stage.
  static __device__ __forceinline__ void read(const char* stage, int block, int chunk,
                                              uint32_t (&words)[Weight::kWords]) {
    const uint4 raw = load16(stage + block * kBlockBytes + chunk * 512 + threadIdx.x % 32 * 16);
    words[0] = raw.x, words[1] = raw.y, words[2] = raw.z, words[3] = raw.w;
  }
  // Int4Weight::fragment, or with zero points UndecodedInt4's.
  static __device__ __forceinline__ void fragment(const uint32_t (&words)[Weight::kWords], const uint32_t (&bits)[2],
                                                  int j, uint32_t (&a)[4]) {
    if constexpr (ZeroPoints) {
      UndecodedInt4<T>::fragment(words[j], a);
    } else {
      constexpr uint32_t kMinusEight = kIsBf16<T> ? 0xc308c308u : 0xe408e408u;
#pragma unroll
      for (int p = 0; p < 4; ++p) a[p] = add_pairs<T>(mask_or<0x000f000fu>(words[j] >> (4 * p), bits[0]), kMinusEight);
    }
  }
  // What `fragment` wants in registers.
  static __device__ __forceinline__ void constants(uint32_t (&bits)[2]) {
    bits[0] = bits[1] = ZeroPoints && !kAsScaledF16<T> ? 0 : in_register(kIsBf16<T> ? 0x43004300u : 0x64006400u);
  }

  // Scales, and zero points, of rows g and g + 8 in pairs of f16, as `elements` wants them.
  struct GroupScales {
    uint32_t scale[2];
    uint32_t zero_point[ZeroPoints ? 2 : 1];
  };
  static __device__ __forceinline__ GroupScales group_scales(const char* stage, int block, int group) {
    GroupScales result;
    const char* const place =
        stage + kBlocks * kBlockBytes + block * kScaleBytes + group * 32 + threadIdx.x % 32 / 4 * 4;
    const uint32_t scales = *reinterpret_cast<const uint32_t*>(place);
    result.scale[0] = __byte_perm(scales, 0, 0x1010), result.scale[1] = __byte_perm(scales, 0, 0x3232);
    if constexpr (ZeroPoints) {
      const uint32_t zero_points = *reinterpret_cast<const uint32_t*>(place + kBlocks * kScaleBytes);
      result.zero_point[0] = __byte_perm(zero_points, 0, 0x1010),
      result.zero_point[1] = __byte_perm(zero_points, 0, 0x3232);
    }
    return result;
  }
  // The elements of W in f16, rounded once. 1024 + q and 1024 + 16 q have q in the last places, and give back q or
  // q - 8 exactly.
  static __device__ __forceinline__ void elements(const uint32_t (&words)[Weight::kWords], const uint32_t (&bits)[2],
                                                  int j, const GroupScales& group, uint32_t (&a)[4]) {
    constexpr uint32_t kLow = ZeroPoints ? 0xe400e400u : 0xe408e408u;   // -1024 or -1032
    constexpr uint32_t kHigh = ZeroPoints ? 0xd400d400u : 0xd480d480u;  // -64 or -72
    const uint32_t upper = words[j] >> 8;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const uint32_t word = p < 2 ? words[j] : upper;
      const uint32_t code =
          p % 2 == 0
              ? add_pairs<__half>(mask_or<0x000f000fu>(word, bits[0]), kLow)
              : bits_of(__hfma2(as_f16(mask_or<0x00f000f0u>(word, bits[0])), as_f16(0x2c002c00u), as_f16(kHigh)));
      if constexpr (ZeroPoints) {
        a[p] = bits_of(__hfma2(as_f16(code), as_f16(group.scale[p % 2]), as_f16(group.zero_point[p % 2])));
      } else {
        a[p] = multiply_pairs<__half>(code, group.scale[p % 2]);
      }
    }
  }

  __device__ __forceinline__ float2 scale(const char* stage, int, int block, int group) const {
    return rows_pair(stage + kBlocks * kBlockBytes + block * kScaleBytes + group * 32);
  }
  // The first operand of instruction j of a stage of zero points: those of groups 4 j + t, for both parts of their
  // sums.
  static __device__ __forceinline__ void zero_points(const char* stage, int block, int j, uint32_t (&a)[4]) {
    const float2 pair = rows_pair(stage + block * kBlockBytes + (4 * j + threadIdx.x % 4) * 32);
    a[0] = a[2] = __float_as_uint(pair.x);
    a[1] = a[3] = __float_as_uint(pair.y);
  }

 private:
  // A group has 16 numbers; a lane takes those of rows g and g + 8.
  static __device__ __forceinline__ float2 rows_pair(const char* group) {
    return __half22float2(as_f16(*reinterpret_cast<const uint32_t*>(group + threadIdx.x % 32 / 4 * 4)));
  }

  const char* weight_;
  const char* scales_;
  const char* zero_points_;
  int blocks_;
  int chunks_;
  int groups_;
};

}  // namespace quantized
}  // namespace nvb
