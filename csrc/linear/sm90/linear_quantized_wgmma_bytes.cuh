// Int8 and FP8 in a stage of linear_quantized_wgmma.cuh.
#pragma once

#include "linear_quantized_wgmma_stage.cuh"

namespace nvb {
namespace quantized {

// Four 8-bit elements → pairs (0, 2) and (1, 3) of T with the same value: masks and shifts alone, for the logic units
// are what limits these kernels. The values are those of decode_bytes.
template <uint32_t Encoding, typename T>
__device__ __forceinline__ void decode_alternate(uint32_t word, const uint32_t (&bits)[2], uint32_t& even,
                                                 uint32_t& odd) {
  if constexpr (Encoding == NVB_SFP) {
    static_assert(kIsBf16<T>, "SFP is BF16 in a byte");
    const uint2 parts = split_sfp(word);
    even = (parts.x & 0x00ff00ffu) * 16u + (parts.y << 8 & 0xff00ff00u);
    odd = (parts.x >> 8 & 0x00ff00ffu) * 16u + (parts.y & 0xff00ff00u);
  } else if constexpr (Encoding == NVB_INT8 && kIsBf16<T>) {
    const uint32_t high = word >> 8;
    even = add_pairs<T>(mask_or<0x007f007fu>(word, bits[0]), mask_or<0x00800080u>(word, bits[1]));
    odd = add_pairs<T>(mask_or<0x007f007fu>(high, bits[0]), mask_or<0x00800080u>(high, bits[1]));
  } else if constexpr (Encoding == NVB_INT8) {
    const uint32_t biased = word ^ 0x80808080u;
    even = add_pairs<T>(mask_or<0x00ff00ffu>(biased, bits[0]), 0xe480e480u);
    odd = add_pairs<T>(mask_or<0x00ff00ffu>(biased >> 8, bits[0]), 0xe480e480u);
  } else if constexpr (Encoding == NVB_FP8_E5M2 && !kIsBf16<T>) {
    even = (word << 8) & 0xff00ff00u;
    odd = word & 0xff00ff00u;
  } else {
    constexpr bool kE4m3 = Encoding == NVB_FP8_E4M3;
    constexpr int kShift = kIsBf16<T> ? (kE4m3 ? 4 : 3) : 1;
    constexpr uint32_t kMask = (0x7f00u >> kShift) * 0x10001u;
    constexpr uint32_t kFactor = kIsBf16<T> ? (kE4m3 ? 0x7b807b80u : 0x77807780u) : 0x5c005c00u;
    even = multiply_pairs<T>(((word << 8) & 0x80008000u) | ((word << (8 - kShift)) & kMask), kFactor);
    odd = multiply_pairs<T>((word & 0x80008000u) | ((word >> kShift) & kMask), kFactor);
  }
}

// Int8 and FP8: of a block of 16 rows first one chunk, then the other, 64 bytes a row; in the second chunk neighbouring
// rows change places, so that a row's eight pieces of 16 bytes go to different banks. Int8's group scales follow as two
// words a row, which hold the stage's groups from the first or the second half word on.
template <uint32_t Encoding, Scales Kind, typename T, int GroupK, int Rows>
class WeightStage<ByteWeight<Encoding, Kind>, T, GroupK, Rows> {
  using Weight = ByteWeight<Encoding, Kind>;
  static constexpr bool kHasGroups = Kind == Scales::kGroups32 || Kind == Scales::kGroups64;
  static constexpr int kGroups = GroupK == 0 ? 1 : kStageK / GroupK;

 public:
  static constexpr int kBlocks = Rows / kTileRows;
  static constexpr int kBlockBytes = kStageChunks * 1024;
  static constexpr int kBytes = kBlocks * kBlockBytes + (kHasGroups ? Rows * 8 : 0);
  struct GroupScales {};

  __device__ __forceinline__ WeightStage(const nvb_linear_quantized_params& p, int64_t first_row) {
    rows_ = static_cast<int>(min(p.n - first_row, int64_t{Rows}));
    stride_ = p.weight_stride;
    columns_ = p.k;
    weight_ = static_cast<const char*>(p.weight) + first_row * p.weight_stride;
    if constexpr (Kind == Scales::kBlocks) {
      scales_ = static_cast<const float*>(p.scales) + (first_row / 128) * ((p.k + 127) / 128);
      last_block_ = static_cast<int>((p.n - 1) / 128 - first_row / 128);
      row_parity_ = static_cast<int>(first_row / 64 % 2);
    } else if constexpr (kHasGroups) {
      const int64_t groups = (p.k + GroupK - 1) / GroupK;
      groups_ = static_cast<int>(groups);
      first_group_ = first_row * groups;
      last_group_ = p.n * groups - 1;
      scales_ = p.scales;
    }
  }

  __device__ __forceinline__ void copy(int step, char* stage) const {
    const int thread = threadIdx.x % kProducers;
    const int piece = thread % 8, row = thread / 8;
    const int64_t k = static_cast<int64_t>(step) * kStageK + piece * 16;
    const bool valid = k < columns_;
    const int inside = rows_ - 1 - row;  // rows past the end repeat the last one
    const char* source = weight_ + (inside < 0 ? rows_ - 1 : row) * stride_ + (valid ? k : 0);
    const uint32_t target = shared_address(stage) + piece / 4 * 1024 + (row ^ (piece / 4)) * 64 + piece % 4 * 16;
    if (rows_ == Rows && (step + 1) * kStageK <= columns_) {
      // Without the conditions below, whose instructions would delay those of the consumers.
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) copy16(target + i * kBlockBytes, source + i * kTileRows * stride_);
    } else {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        copy16(target + i * kBlockBytes, source, valid);
        if ((i + 1) * kTileRows <= inside) source += kTileRows * stride_;
      }
    }
    if constexpr (kHasGroups) {
#pragma unroll
      for (int i = 0; i < Rows * 2 / kProducers; ++i) {
        const int index = i * kProducers + thread;
        const int64_t word =
            ((first_group_ + static_cast<int64_t>(index / 2) * groups_ + step * kGroups) & ~int64_t{1}) + index % 2 * 2;
        const bool inside = index / 2 < rows_ && word <= last_group_;
        copy4(shared_address(stage + kBlocks * kBlockBytes) + index * 4,
              static_cast<const uint16_t*>(scales_) + (inside ? word : 0), inside);
      }
    }
  }

  static __device__ __forceinline__ void read(const char* stage, int block, int chunk,
                                              uint32_t (&words)[Weight::kWords]) {
    const int group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
    const char* const rows = stage + block * kBlockBytes + chunk * 1024 + (group ^ chunk) * 64;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (Kind == Scales::kGroups32) {
        const uint2 first = *reinterpret_cast<const uint2*>(rows + r * 512 + quad * 8);
        const uint2 second = *reinterpret_cast<const uint2*>(rows + r * 512 + quad * 8 + 32);
        words[4 * r] = first.x, words[4 * r + 1] = first.y, words[4 * r + 2] = second.x, words[4 * r + 3] = second.y;
      } else {
        const uint4 raw = load16(rows + r * 512 + quad * 16);
        words[4 * r] = raw.x, words[4 * r + 1] = raw.y, words[4 * r + 2] = raw.z, words[4 * r + 3] = raw.w;
      }
    }
  }
  static __device__ __forceinline__ void fragment(const uint32_t (&words)[Weight::kWords], const uint32_t (&bits)[2],
                                                  int j, uint32_t (&a)[4]) {
    if constexpr (kAsTwoFp8<T>) {
      a[0] = words[2 * j], a[1] = words[4 + 2 * j], a[2] = words[2 * j + 1], a[3] = words[4 + 2 * j + 1];
    } else {
      decode_alternate<Encoding, T>(words[j], bits, a[0], a[2]);
      decode_alternate<Encoding, T>(words[4 + j], bits, a[1], a[3]);
    }
  }
  static __device__ __forceinline__ void constants(uint32_t (&bits)[2]) {
    bits[0] = bits[1] = 0;
    if constexpr (Encoding == NVB_INT8) {
      bits[0] = in_register(kIsBf16<T> ? 0x43004300u : 0x64006400u);
      bits[1] = in_register(0xc300c300u);
    }
  }
  __device__ __forceinline__ float2 scale(const char* stage, int step, int block, int group) const {
    if constexpr (Kind == Scales::kBlocks) {
      const int row_block = min((row_parity_ + block / 4) / 2, last_block_);
      const float scale = __ldg(static_cast<const float*>(scales_) + row_block * ((columns_ + 127) / 128) + step);
      return make_float2(scale, scale);
    } else {
      float values[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = block * kTileRows + threadIdx.x % 32 / 4 + 8 * r;
        const int first = static_cast<int>(first_group_ + static_cast<int64_t>(row) * groups_ + step * kGroups) & 1;
        const __half* const scales = reinterpret_cast<const __half*>(stage + kBlocks * kBlockBytes + row * 8);
        values[r] = __half2float(scales[first + group]);
      }
      return make_float2(values[0], values[1]);
    }
  }

 private:
  const char* weight_;
  const void* scales_;
  int64_t stride_;
  int64_t columns_;
  int64_t first_group_;
  int64_t last_group_;
  int groups_;
  int rows_;
  int last_block_;
  int row_parity_;
};

}  // namespace quantized
}  // namespace nvb
