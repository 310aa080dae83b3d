// The tiles of attention_prefill_mma.cuh: their sizes, where the chunks of a row lie in shared memory, and the copies
// of rows that fill them.
#pragma once

#include "../../common/kv_placement.cuh"
#include "../../common/mma.cuh"
#include "../../common/vector.cuh"
#include "../attention_prefill.cuh"

namespace nvb {

template <typename Element, int HeadDim, int Rows, int Keys, int WarpRows, int ColumnWarps, int Stages, int Blocks>
struct PrefillTile {
  using T = Element;
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kRows = Rows;
  static constexpr int kKeys = Keys;
  static constexpr int kWarpRows = WarpRows;
  static constexpr int kRowWarps = Rows / WarpRows;
  static constexpr int kColumnWarps = ColumnWarps;
  static constexpr int kColumns = HeadDim / ColumnWarps;
  static constexpr int kThreads = 32 * kRowWarps * ColumnWarps;
  static constexpr int kRowBlocks = WarpRows / 16;
  static constexpr int kStages = Stages;
  static constexpr int kBlocks = Blocks;  // a multiprocessor, so that one multiplies while another exponentiates
  // Where O and S take 160 registers and fewer, what a block's copies need stays in registers; else in shared memory,
  // because fragments are then read just before they are multiplied, and every product waits for shared memory.
  static constexpr bool kWorkInRegisters = WarpRows * (HeadDim / ColumnWarps + Keys) / 32 <= 160;
  static constexpr int kPitch = 2 * HeadDim;  // bytes of a row in shared memory
  static constexpr int kQueryBytes = Rows * kPitch;
  static constexpr int kTileBytes = Keys * kPitch;
  static constexpr int kSharedBytes = kQueryBytes + 2 * Stages * kTileBytes;
  static constexpr int kPlaceBytes = 8 * Keys;

  // The 16-byte chunks of a row are permuted by its number, so that the 8 rows which ldmatrix reads at one column lie
  // in 8 different bank groups. Rows of 32 * odd elements alternate between two halves of the banks already.
  static constexpr int kSwizzleMask = HeadDim % 64 == 0 ? 7 : 3;
  static constexpr int kSwizzleShift = HeadDim % 64 == 0 ? 0 : 1;
  static __device__ __forceinline__ int swizzle(int row) { return (row >> kSwizzleShift) & kSwizzleMask; }
  static __device__ __forceinline__ int offset(int row, int chunk) {
    return row * kPitch + ((chunk ^ swizzle(row)) << 4);
  }
  // The part of an offset that a step of two chunks adds, for a lane that starts at chunk 0 or 1 of its row.
  static __device__ __forceinline__ int step(int lane_chunk, int step) {
    return ((((2 * step) & kSwizzleMask) ^ lane_chunk) << 4) + (((2 * step) & ~kSwizzleMask) << 4);
  }

  // A row is copied by kCopyLanes threads side by side, a swizzle period of chunks at a time, and a thread's rows are
  // kCopyRows apart, a multiple of 8: all its chunks have one swizzle, and its addresses differ by constants and by
  // multiples of one stride. Addresses found for each chunk cost a sixth of all instructions at head_dim 128.
  static constexpr int kCopyLanes = kSwizzleMask + 1;
  static constexpr int kCopyRows = kThreads / kCopyLanes;
  static constexpr int kCopyColumns = HeadDim / 8 / kCopyLanes;

  static_assert(HeadDim % 32 == 0, "the swizzle knows rows of whole or half multiples of 128 bytes");
  static_assert(WarpRows % 16 == 0 && Rows % WarpRows == 0, "warps own whole mma row blocks");
  static_assert(Keys <= kThreads, "a thread finds the place of a key");
  static_assert(Keys % 16 == 0, "P is the first operand of mma in steps of 16 keys");
  static_assert(ColumnWarps == 1 || (HeadDim / ColumnWarps) % 64 == 0, "a warp's columns start a swizzle period");
  static_assert(kCopyRows % 8 == 0 && Rows % kCopyRows == 0 && Keys % kCopyRows == 0, "threads copy whole columns");
};

// Makes the columns at or past head_dim zero, which no copy writes, in `rows` rows.
template <typename Tile>
__device__ __forceinline__ void clear_columns(unsigned char* shared, int rows, int head_dim) {
  constexpr int kChunks = Tile::kHeadDim / 8;
  const int first = head_dim / 8;
  for (int index = threadIdx.x; index < rows * (kChunks - first); index += Tile::kThreads) {
    const int row = index / (kChunks - first);
    *reinterpret_cast<uint4*>(shared + Tile::offset(row, first + index % (kChunks - first))) = make_uint4(0, 0, 0, 0);
  }
}

// Copies `Rows` rows of a tensor into shared memory; rows at or past `valid_rows` become zero without being read.
// `global` is row 0 and must be readable if anything is.
template <typename Tile, int Rows>
__device__ __forceinline__ void load_tile(unsigned char* shared, const typename Tile::T* global, int64_t stride,
                                          int valid_rows, int head_dim) {
  const int first_row = static_cast<int>(threadIdx.x) / Tile::kCopyLanes;
  const int chunk = static_cast<int>(threadIdx.x) % Tile::kCopyLanes;
  unsigned char* const to = shared + Tile::offset(first_row, chunk);
  const typename Tile::T* from = global + first_row * stride + chunk * 8;
  if (valid_rows >= Rows) {
#pragma unroll
    for (int i = 0; i < Rows / Tile::kCopyRows; ++i) {
#pragma unroll
      for (int c = 0; c < Tile::kCopyColumns; ++c) {
        const int column = c * Tile::kCopyLanes;
        if ((chunk + column) * 8 < head_dim) {
          cp_async16(to + i * Tile::kCopyRows * Tile::kPitch + column * 16, from + column * 8);
        }
      }
      from += Tile::kCopyRows * stride;
    }
    return;
  }
  // A sequence's last tile, and tiles of short sequences.
#pragma unroll 1
  for (int i = 0; i < Rows / Tile::kCopyRows; ++i) {
    const bool valid = first_row + i * Tile::kCopyRows < valid_rows;
#pragma unroll
    for (int c = 0; c < Tile::kCopyColumns; ++c) {
      const int column = c * Tile::kCopyLanes;
      if ((chunk + column) * 8 < head_dim) {
        cp_async16(to + i * Tile::kCopyRows * Tile::kPitch + column * 16, valid ? from + column * 8 : global, valid);
      }
    }
    from += Tile::kCopyRows * stride;
  }
}

// Copies rows of a KV cache, of which `places` say where they lie; what is nowhere becomes zero. Unrolled in full, the
// addresses would cost the registers that the accumulators leave.
template <typename Tile>
__device__ __forceinline__ void load_placed(unsigned char* shared, const typename Tile::T* global, int64_t block_stride,
                                            const uint32_t* places, int64_t stride, int head_dim) {
  const int first_row = static_cast<int>(threadIdx.x) / Tile::kCopyLanes;
  const int chunk = static_cast<int>(threadIdx.x) % Tile::kCopyLanes;
  unsigned char* const to = shared + Tile::offset(first_row, chunk);
#pragma unroll 1
  for (int i = 0; i < Tile::kKeys / Tile::kCopyRows; ++i) {
    const uint32_t place = places[first_row + i * Tile::kCopyRows];
    const bool valid = place != kNoRow;
    const typename Tile::T* from = valid ? global + kv_offset(block_stride, place, stride) + chunk * 8 : global;
#pragma unroll
    for (int c = 0; c < Tile::kCopyColumns; ++c) {
      const int column = c * Tile::kCopyLanes;
      if ((chunk + column) * 8 < head_dim) {
        cp_async16(to + i * Tile::kCopyRows * Tile::kPitch + column * 16, valid ? from + column * 8 : global, valid);
      }
    }
  }
}

// Loads a tile of F32 queries and rounds it to T.
template <typename Tile>
__device__ __forceinline__ void load_rounded(unsigned char* shared, const float* global, int64_t stride, int valid_rows,
                                             int head_dim) {
  constexpr int kChunks = Tile::kHeadDim / 8;
#pragma unroll 4
  for (int index = threadIdx.x; index < Tile::kRows * kChunks; index += Tile::kThreads) {
    const int row = index / kChunks;
    const int chunk = index % kChunks;
    float values[8] = {};
    if (row < valid_rows && chunk * 8 < head_dim) {
      const float4* source = reinterpret_cast<const float4*>(global + row * stride + chunk * 8);
      const float4 low = source[0];
      const float4 high = source[1];
      values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
      values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
    }
    store16(shared + Tile::offset(row, chunk), pack16<typename Tile::T>(values));
  }
}

}  // namespace nvb
