// y = act(gate) * up, elementwise.
#pragma once

#include "../common/quantized_output.h"

// gate [rows, columns] and up [rows, columns] of one dtype → output [rows, columns], row strides in elements, device
// memory. With `up` null, `gate` is [rows, 2 * columns] in interleaved pairs: column 2i the gate, column 2i + 1 the up
// projection, and up_stride is ignored. Any float dtypes, sizes and alignment. With separate tensors the output may be
// the gate or the up tensor itself (same dtype and stride); interleaved it must not overlap them. quantized_output has
// the same values in 8 bits, quantised before any rounding, with `output` or without (null), and of separate tensors
// alone.
struct nvb_gated_activation_params {
  const void* gate;
  const void* up;
  void* output;  // or null
  int64_t rows;
  int64_t columns;  // of the output
  int64_t gate_stride;
  int64_t up_stride;
  int64_t output_stride;
  uint32_t input_dtype;
  uint32_t output_dtype;
  uint32_t activation;
  uint32_t reserved;
  nvb_quantized_output quantized_output;  // overlaps nothing else
};

extern "C" cudaError_t nvb_cuda_gated_activation(const nvb_gated_activation_params* params,
                                                 const nvb_launch* launch) noexcept;
