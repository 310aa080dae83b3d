// pack_blocks: blocks of GGUF become fragment tiles or rows of bytes with scales of groups beside them, and those the
// same blocks again.
//
// Work: of Int8 a thread has a block. Of Int4 a warp packs a tile of 16 rows x 64 columns, two blocks a row, and each
// lane the four words that are its own in the products (common/quantized.h): word j is 16 j + 4 t .. + 3 of two rows,
// which in a block are the low (j even) or high nibbles (j odd) of four neighbouring bytes. Back, a thread writes a
// block. Once in a weight's life, so neither is tuned beyond that. Shared memory: none.
#include <algorithm>

#include "pack_blocks.h"

namespace nvb {
namespace {

constexpr int kThreads = 256;
constexpr int kMostGrid = 1 << 16;
constexpr int kGroup = 32;

// Blocks lie at even addresses, so 16 bits is what one load may have.
__device__ __forceinline__ uint32_t load_half(const void* from) {
  return *static_cast<const uint16_t*>(from);
}
__device__ __forceinline__ void store_half(void* to, uint32_t bits) {
  *static_cast<uint16_t*>(to) = static_cast<uint16_t>(bits);
}

__device__ __forceinline__ bool is_not_finite(uint32_t half) {
  return (half & 0x7c00u) == 0x7c00u;
}

struct Place {
  char* blocks;
  char* data;
  char* scales;
  char* zero_points;
  int64_t groups;  // of a row
  int64_t tiles;   // of a row
};

__device__ __forceinline__ Place place_of(const nvb_pack_blocks_params& p) {
  return {static_cast<char*>(p.blocks),
          static_cast<char*>(const_cast<void*>(p.matrix.data)),
          static_cast<char*>(const_cast<void*>(p.matrix.scales)),
          static_cast<char*>(const_cast<void*>(p.matrix.zero_points)),
          p.matrix.columns / kGroup,
          p.matrix.columns / 64};
}

__device__ __forceinline__ int64_t first_thread() {
  return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}
__device__ __forceinline__ int64_t all_threads() {
  return static_cast<int64_t>(gridDim.x) * kThreads;
}

__global__ void __launch_bounds__(kThreads) pack_int8(const nvb_pack_blocks_params p) {
  const Place place = place_of(p);
  const int64_t count = p.matrix.rows * place.groups;
  for (int64_t i = first_thread(); i < count; i += all_threads()) {
    const char* const block = place.blocks + i * 34;
    const uint32_t scale = load_half(block);
    if (is_not_finite(scale)) *p.not_finite = 1;
    store_half(place.scales + 2 * i, scale);
    uint32_t words[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) words[j] = load_half(block + 2 + 4 * j) | load_half(block + 4 + 4 * j) << 16;
    // Rows are whole groups, and so lie behind one another without padding.
    uint4* const to = reinterpret_cast<uint4*>(place.data + i * kGroup);
    to[0] = make_uint4(words[0], words[1], words[2], words[3]);
    to[1] = make_uint4(words[4], words[5], words[6], words[7]);
  }
}

__global__ void __launch_bounds__(kThreads) unpack_int8(const nvb_pack_blocks_params p) {
  const Place place = place_of(p);
  const int64_t count = p.matrix.rows * place.groups;
  for (int64_t i = first_thread(); i < count; i += all_threads()) {
    char* const block = place.blocks + i * 34;
    store_half(block, load_half(place.scales + 2 * i));
#pragma unroll
    for (int j = 0; j < 16; ++j) store_half(block + 2 + 2 * j, load_half(place.data + i * kGroup + 2 * j));
  }
}

// Four codes of a row's block, a byte each, from the low or high nibbles of four bytes.
__device__ __forceinline__ uint32_t four_codes(const char* values, int t, int high) {
  const uint32_t bytes = load_half(values + 4 * t) | load_half(values + 4 * t + 2) << 16;
  return bytes >> (4 * high) & 0x0f0f0f0fu;
}

template <bool ZeroPoints>
__global__ void __launch_bounds__(kThreads) pack_int4(const nvb_pack_blocks_params p) {
  constexpr int kHead = ZeroPoints ? 4 : 2;
  constexpr int kBlock = kHead + kGroup / 2;
  const Place place = place_of(p);
  const int lane = static_cast<int>(threadIdx.x % 32), g = lane / 4, t = lane % 4;
  const int64_t count = p.matrix.rows / 16 * place.tiles;
  for (int64_t i = first_thread() / 32; i < count; i += all_threads() / 32) {
    const int64_t row = i / place.tiles * 16 + g, group = i % place.tiles * 2;
    uint32_t words[4];
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const char* const above = place.blocks + (row * place.groups + group + b) * kBlock;
      const char* const below = above + 8 * place.groups * kBlock;
#pragma unroll
      for (int high = 0; high < 2; ++high) {
        const uint32_t x = four_codes(above + kHead, t, high), y = four_codes(below + kHead, t, high);
        // Nibbles from the lowest: x0 y0 x2 y2 x1 y1 x3 y3.
        const uint32_t mixed = x | y << 4;
        words[2 * b + high] = __byte_perm(mixed, 0, 0x3120);
      }
      if (t != 0) continue;
      // The scales of both rows, one behind the other.
      const int64_t at = (i / place.tiles * place.groups + group + b) * 32 + 4 * g;
      const uint32_t scales = load_half(above) | load_half(below) << 16;
      if (is_not_finite(scales) || is_not_finite(scales >> 16)) *p.not_finite = 1;
      *reinterpret_cast<uint32_t*>(place.scales + at) = scales;
      if (!ZeroPoints) continue;
      const uint32_t minima = load_half(above + 2) | load_half(below + 2) << 16;
      if (is_not_finite(minima) || is_not_finite(minima >> 16)) *p.not_finite = 1;
      *reinterpret_cast<uint32_t*>(place.zero_points + at) = minima;
    }
    reinterpret_cast<uint4*>(place.data)[i * 32 + lane] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

template <bool ZeroPoints>
__global__ void __launch_bounds__(kThreads) unpack_int4(const nvb_pack_blocks_params p) {
  constexpr int kHead = ZeroPoints ? 4 : 2;
  constexpr int kBlock = kHead + kGroup / 2;
  const Place place = place_of(p);
  const int64_t count = p.matrix.rows * place.groups;
  for (int64_t i = first_thread(); i < count; i += all_threads()) {
    const int64_t row = i / place.groups, group = i % place.groups;
    const int g = static_cast<int>(row % 8), below = static_cast<int>(row % 16 / 8);
    char* const block = place.blocks + i * kBlock;
    const int64_t at = (row / 16 * place.groups + group) * 32 + 4 * g + 2 * below;
    store_half(block, load_half(place.scales + at));
    if (ZeroPoints) store_half(block + 2, load_half(place.zero_points + at));
    const char* const tile = place.data + (row / 16 * place.tiles + group / 2) * 512;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      // The words with the low and with the high nibbles of bytes 4 t .. + 3 stand side by side.
      const uint2 both = *reinterpret_cast<const uint2*>(tile + (4 * g + t) * 16 + static_cast<int>(group % 2) * 8);
      const uint32_t low = __byte_perm(both.x >> (4 * below) & 0x0f0f0f0fu, 0, 0x3120);
      const uint32_t high = __byte_perm(both.y >> (4 * below) & 0x0f0f0f0fu, 0, 0x3120);
      const uint32_t bytes = low | high << 4;
      store_half(block + kHead + 4 * t, bytes);
      store_half(block + kHead + 4 * t + 2, bytes >> 16);
    }
  }
}

bool is_valid(const nvb_pack_blocks_params& p) {
  const nvb_quantized_matrix& matrix = p.matrix;
  const bool zero_points = p.format == NVB_BLOCKS_Q4_1;
  const uint32_t encoding = p.format == NVB_BLOCKS_Q8_0 ? NVB_INT8 : NVB_INT4;
  if (p.format != NVB_BLOCKS_Q4_0 && p.format != NVB_BLOCKS_Q4_1 && p.format != NVB_BLOCKS_Q8_0) return false;
  if (matrix.encoding != encoding || matrix.scale_kind != NVB_SCALES_GROUPS || matrix.group != kGroup) return false;
  if (zero_points != (matrix.zero_points != nullptr) || p.unpack > 1) return false;
  if (encoding == NVB_INT8 && matrix.row_bytes != matrix.columns) return false;
  return matrix.rows % 16 == 0 && matrix.columns % 64 == 0 && (p.unpack == 1 || p.not_finite != nullptr);
}

}  // namespace
}  // namespace nvb

extern "C" cudaError_t nvb_cuda_pack_blocks(const nvb_pack_blocks_params* params, const nvb_launch* launch) noexcept {
  using namespace nvb;
  const nvb_pack_blocks_params& p = *params;
  if (!is_valid(p)) return cudaErrorInvalidValue;
  const int64_t blocks = p.matrix.rows * (p.matrix.columns / kGroup);
  if (blocks == 0) return cudaSuccess;
  // A warp's tile has 32 blocks, so all four have a thread for each block.
  const auto grid = static_cast<unsigned>(std::min<int64_t>((blocks + kThreads - 1) / kThreads, kMostGrid));
  if (p.matrix.encoding == NVB_INT8) {
    if (p.unpack == 1) {
      unpack_int8<<<grid, kThreads, 0, launch->stream>>>(p);
    } else {
      pack_int8<<<grid, kThreads, 0, launch->stream>>>(p);
    }
  } else if (p.matrix.zero_points != nullptr) {
    if (p.unpack == 1) {
      unpack_int4<true><<<grid, kThreads, 0, launch->stream>>>(p);
    } else {
      pack_int4<true><<<grid, kThreads, 0, launch->stream>>>(p);
    }
  } else {
    if (p.unpack == 1) {
      unpack_int4<false><<<grid, kThreads, 0, launch->stream>>>(p);
    } else {
      pack_int4<false><<<grid, kThreads, 0, launch->stream>>>(p);
    }
  }
  return cudaPeekAtLastError();
}
