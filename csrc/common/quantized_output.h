// Where a kernel leaves its result in 8 bits: quantised values, and one scale a row.
#pragma once

#include "launch.h"
#include "quantized.h"

// scale = max |x| / 448 (FP8 E4M3) or / 127 (Int8) of a row's f32 values, value = x / scale to nearest, ties to even:
// as csrc/quantize has it for scales of rows. NaN in a row makes its scale NaN. Given scales are read instead, and
// values end at the largest. Any alignment of the values; 8-byte aligned rows are stored in vectors.
struct nvb_quantized_output {
  void* data;     // one byte an element, or null: no such output
  float* scales;  // [rows]
  int64_t row_bytes;
  uint32_t encoding;      // NVB_FP8_E4M3 or NVB_INT8
  uint32_t given_scales;  // 0 or 1
};

inline bool nvb_is_valid_output(const nvb_quantized_output& output) {
  return output.data == nullptr || (output.scales != nullptr && output.given_scales <= 1 &&
                                    (output.encoding == NVB_FP8_E4M3 || output.encoding == NVB_INT8));
}
