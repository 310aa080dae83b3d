// The encodings of quantised weights and where their scales lie.
//
// 8-bit weights are row-major [n, k], rows padded to a multiple of 16 bytes. Int4 lies in fragment tiles of 16 rows x
// 64 k: n is padded to 16 rows and k to 64 with q = 8 and scale 0, tile (n / 16, k / 64) is 512 bytes at
// ((n / 16) * tiles_k + k / 64) * 512. Lane 4 g + t of a warp owns 16 bytes of a tile, and their word j holds row g and
// row g + 8 at k = 16 j + 4 t ..+3. Nibble p of the word is the low element, nibble p + 4 the high element of pair p:
//   p = 0: row g, k + 0, 1    p = 1: row g + 8, k + 0, 1    p = 2: row g, k + 2, 3    p = 3: row g + 8, k + 2, 3
// This is the first operand of mma m16n8k16 when the second is x[16 j + 4 t ..+3]: both sides permute k alike.
#pragma once

#include <stdint.h>

// Value of an element: Int8 scale * q; Int4 scale * (q - 8), or scale * q + zero point, which is the value that q = 0
// stands for; FP8 and SFP scale * value(q).
enum nvb_encoding_code : uint32_t {
  NVB_FP8_E4M3 = 1,  // largest finite 448, no infinity, 0x7f and 0xff are NaN
  NVB_FP8_E5M2 = 2,
  NVB_INT8 = 3,
  NVB_INT4 = 4,
  NVB_SFP = 5,  // gemma.cpp's switching floating point, largest 1.875, each value a BF16; 0x80 does not occur
};

// Blocks of GGUF as a file has them, whose scales lie within. They stand where an encoding does, so they share no
// number with it.
enum nvb_block_code : uint32_t {
  NVB_BLOCKS_Q4_0 = 16,
  NVB_BLOCKS_Q4_1 = 17,
  NVB_BLOCKS_Q5_0 = 18,
  NVB_BLOCKS_Q5_1 = 19,
  NVB_BLOCKS_Q8_0 = 20,
  NVB_BLOCKS_Q2_K = 21,
  NVB_BLOCKS_Q3_K = 22,
  NVB_BLOCKS_Q4_K = 23,
  NVB_BLOCKS_Q5_K = 24,
  NVB_BLOCKS_Q6_K = 25,
  NVB_BLOCKS_IQ4_NL = 26,
  NVB_BLOCKS_IQ4_XS = 27,
  NVB_BLOCKS_MXFP4 = 28,
};

// Whether a matrix consists of blocks; its scale_kind is then 0, and its addresses are aligned to 2 bytes, of MXFP4 to
// none.
constexpr bool nvb_is_blocks(uint32_t encoding) {
  return encoding >= NVB_BLOCKS_Q4_0 && encoding <= NVB_BLOCKS_MXFP4;
}

enum nvb_scale_code : uint32_t {
  // f32 [n]; 8-bit encodings, of SFP alone.
  NVB_SCALES_ROWS = 1,
  // f16 a row and group of k. Int8: [n][groups]. Int4: [n / 16][groups][g 0..7][2], the scales of rows g and g + 8.
  NVB_SCALES_GROUPS = 2,
  // f32 [⌈n / 128⌉][⌈k / 128⌉]; FP8.
  NVB_SCALES_BLOCKS = 3,
};

// A quantised [rows, columns] weight in device memory; data, scales and zero points are 16-byte aligned, blocks aside.
struct nvb_quantized_matrix {
  const void* data;
  const void* scales;
  const void* zero_points;  // of Int4 with zero points, as the scales lie; else null
  int64_t rows;
  int64_t columns;
  int64_t row_bytes;  // of an 8-bit encoding, a multiple of 16; of blocks from row to row; ignored for Int4
  uint32_t encoding;
  uint32_t scale_kind;
  uint32_t group;  // of k, with NVB_SCALES_GROUPS: 32, 64 or 128
  uint32_t reserved;
};

// Whether the encoding has this kind of scales, in a layout that kernels read.
inline bool nvb_is_valid_quantized(uint32_t encoding, uint32_t scale_kind, uint32_t group, const void* zero_points) {
  const bool groups = scale_kind == NVB_SCALES_GROUPS && (group == 32 || group == 64 || group == 128);
  if (nvb_is_blocks(encoding)) return scale_kind == 0 && zero_points == nullptr;
  if (encoding == NVB_INT4) return groups;
  if (zero_points != nullptr) return false;
  if (encoding == NVB_INT8) return groups || scale_kind == NVB_SCALES_ROWS;
  if (encoding == NVB_SFP) return scale_kind == NVB_SCALES_ROWS;
  const bool fp8 = encoding == NVB_FP8_E4M3 || encoding == NVB_FP8_E5M2;
  return fp8 && (scale_kind == NVB_SCALES_ROWS || scale_kind == NVB_SCALES_BLOCKS);
}
