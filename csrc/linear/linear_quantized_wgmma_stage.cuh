// A stage of linear_quantized_wgmma.cuh: 128 k of x and of up to 256 rows of W, how producers copy it into shared
// memory and how a warp of a consumer reads its 16 rows.
//
// Stages of offsets, which meet the groups' sums of x, have those of kStageGroups groups in the place of W.
#pragma once

#include "linear_quantized_wgmma_input.cuh"

namespace nvb {
namespace quantized {

constexpr int kProducers = 128;

// A barrier for the producers alone.
__device__ __forceinline__ void producer_barrier() {
  asm volatile("bar.sync 2, %0;" ::"n"(kProducers) : "memory");
}

__device__ __forceinline__ void copy4(uint32_t shared, const void* global, bool valid) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(valid ? 4 : 0)
               : "memory");
#endif
}
__device__ __forceinline__ void copy16(uint32_t shared, const void* global, bool valid) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
#endif
}
__device__ __forceinline__ void copy16(uint32_t shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
#endif
}

// (word & Mask) | bits as one instruction: it has room for one constant, so that `bits` has to be a register.
template <uint32_t Mask>
__device__ __forceinline__ uint32_t mask_or(uint32_t word, uint32_t bits) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "n"(Mask), "r"(bits));
  return result;
}
// A constant that the compiler does not know to be one.
__device__ __forceinline__ uint32_t in_register(uint32_t value) {
  uint32_t result;
  asm volatile("mov.u32 %0, %1;" : "=r"(result) : "r"(value));
  return result;
}

// Four 8-bit elements → pairs (0, 2) and (1, 3) of T with the same value: masks and shifts alone, for the logic units
// are what limits these kernels. The values are those of decode_bytes.
template <uint32_t Encoding, typename T>
__device__ __forceinline__ void decode_alternate(uint32_t word, const uint32_t (&bits)[2], uint32_t& even,
                                                 uint32_t& odd) {
  if constexpr (Encoding == NVB_INT8 && kIsBf16<T>) {
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

// W and its scales; GroupK is 0 for scales of rows, else 32, 64 or 128.
template <typename Weight, typename T, int GroupK, int Rows>
class WeightStage;

// Int4: a block of 16 rows keeps its two tiles as they are, then come the blocks' scales of the stage's groups, 32
// bytes each, and, where elements are made before the product, offsets like them. A stage of offsets alone has those of
// kStageGroups groups where the tiles of a block are otherwise.
template <Scales Kind, bool Offsets, typename T, int GroupK, int Rows>
class WeightStage<Int4Weight<Kind, Offsets>, T, GroupK, Rows> {
  using Weight = Int4Weight<Kind, Offsets>;

 public:
  static constexpr int kBlocks = Rows / kTileRows;
  static constexpr int kBlockBytes = kStageChunks * 512;
  static constexpr int kGroups = kStageK / GroupK;
  static constexpr int kScaleBytes = kGroups * 32;
  static constexpr bool kStagedOffsets = Offsets && kScaled<T>;
  static constexpr int kBytes = kBlocks * (kBlockBytes + (kStagedOffsets ? 2 : 1) * kScaleBytes);
  static_assert(kStageGroups * 32 == kBlockBytes, "offsets of a stage's groups take the place of a block's tiles");

  __device__ __forceinline__ WeightStage(const nvb_linear_quantized_params& p, int64_t first_row) {
    const int64_t first_block = first_row / kTileRows;
    blocks_ = static_cast<int>(min((p.n + kTileRows - 1) / kTileRows - first_block, int64_t{kBlocks}));
    chunks_ = static_cast<int>((p.k + kChunk - 1) / kChunk);
    groups_ = static_cast<int>((p.k + GroupK - 1) / GroupK);
    weight_ = static_cast<const char*>(p.weight) + first_block * chunks_ * 512;
    scales_ = static_cast<const char*>(p.scales) + first_block * groups_ * 32;
    offsets_ = static_cast<const char*>(p.offsets) + (Offsets ? first_block * groups_ * 32 : 0);
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
        if constexpr (kStagedOffsets) copy16(target + kBlocks * kScaleBytes, offsets_ + (valid ? source : 0), valid);
      }
    }
  }

  __device__ __forceinline__ void copy_offsets(int step, char* stage) const {
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
      copy16(target + i * kProducers * 16, offsets_ + (valid ? source + i * kTogether * stride : 0), valid);
    }
  }

  // Words of chunk `chunk` of block `block`, and the scales of rows g and g + 8 in group `group` of the stage.
  static __device__ __forceinline__ void read(const char* stage, int block, int chunk,
                                              uint32_t (&words)[Weight::kWords]) {
    const uint4 raw = load16(stage + block * kBlockBytes + chunk * 512 + threadIdx.x % 32 * 16);
    words[0] = raw.x, words[1] = raw.y, words[2] = raw.z, words[3] = raw.w;
  }
  // Int4Weight::fragment, or with offsets RawInt4's.
  static __device__ __forceinline__ void fragment(const uint32_t (&words)[Weight::kWords], const uint32_t (&bits)[2],
                                                  int j, uint32_t (&a)[4]) {
    if constexpr (Offsets) {
      RawInt4<T>::fragment(words[j], a);
    } else {
      constexpr uint32_t kMinusEight = kIsBf16<T> ? 0xc308c308u : 0xe408e408u;
#pragma unroll
      for (int p = 0; p < 4; ++p) a[p] = add_pairs<T>(mask_or<0x000f000fu>(words[j] >> (4 * p), bits[0]), kMinusEight);
    }
  }
  // What `fragment` wants in registers.
  static __device__ __forceinline__ void constants(uint32_t (&bits)[2]) {
    bits[0] = bits[1] = Offsets && !kScaled<T> ? 0 : in_register(kIsBf16<T> ? 0x43004300u : 0x64006400u);
  }

  // Scales, and offsets, of rows g and g + 8 in pairs of f16, as `elements` wants them.
  struct GroupScales {
    uint32_t scale[2];
    uint32_t offset[Offsets ? 2 : 1];
  };
  static __device__ __forceinline__ GroupScales group_scales(const char* stage, int block, int group) {
    GroupScales result;
    const char* const place =
        stage + kBlocks * kBlockBytes + block * kScaleBytes + group * 32 + threadIdx.x % 32 / 4 * 4;
    const uint32_t scales = *reinterpret_cast<const uint32_t*>(place);
    result.scale[0] = __byte_perm(scales, 0, 0x1010), result.scale[1] = __byte_perm(scales, 0, 0x3232);
    if constexpr (Offsets) {
      const uint32_t offsets = *reinterpret_cast<const uint32_t*>(place + kBlocks * kScaleBytes);
      result.offset[0] = __byte_perm(offsets, 0, 0x1010), result.offset[1] = __byte_perm(offsets, 0, 0x3232);
    }
    return result;
  }
  // The elements of W in f16, rounded once. 1024 + q and 1024 + 16 q have q in the last places, and give back q or
  // q - 8 exactly.
  static __device__ __forceinline__ void elements(const uint32_t (&words)[Weight::kWords], const uint32_t (&bits)[2],
                                                  int j, const GroupScales& group, uint32_t (&a)[4]) {
    constexpr uint32_t kLow = Offsets ? 0xe400e400u : 0xe408e408u;   // -1024 or -1032
    constexpr uint32_t kHigh = Offsets ? 0xd400d400u : 0xd480d480u;  // -64 or -72
    const uint32_t upper = words[j] >> 8;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const uint32_t word = p < 2 ? words[j] : upper;
      const uint32_t code =
          p % 2 == 0
              ? add_pairs<__half>(mask_or<0x000f000fu>(word, bits[0]), kLow)
              : bits_of(__hfma2(as_f16(mask_or<0x00f000f0u>(word, bits[0])), as_f16(0x2c002c00u), as_f16(kHigh)));
      if constexpr (Offsets) {
        a[p] = bits_of(__hfma2(as_f16(code), as_f16(group.scale[p % 2]), as_f16(group.offset[p % 2])));
      } else {
        a[p] = multiply_pairs<__half>(code, group.scale[p % 2]);
      }
    }
  }

  __device__ __forceinline__ float2 scale(const char* stage, int, int block, int group) const {
    return rows_pair(stage + kBlocks * kBlockBytes + block * kScaleBytes + group * 32);
  }
  // The first operand of instruction j of a stage of offsets: those of groups 4 j + t, for both parts of their sums.
  static __device__ __forceinline__ void offsets(const char* stage, int block, int j, uint32_t (&a)[4]) {
    const float2 pair = rows_pair(stage + block * kBlockBytes + (4 * j + threadIdx.x % 4) * 32);
    a[0] = a[2] = __float_as_uint(pair.x);
    a[1] = a[3] = __float_as_uint(pair.y);
  }

 private:
  // Of a group's 16 numbers those of rows g and g + 8.
  static __device__ __forceinline__ float2 rows_pair(const char* group) {
    return __half22float2(as_f16(*reinterpret_cast<const uint32_t*>(group + threadIdx.x % 32 / 4 * 4)));
  }

  const char* weight_;
  const char* scales_;
  const char* offsets_;
  int blocks_;
  int chunks_;
  int groups_;
};

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
    if constexpr (kSplit<T>) {
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
