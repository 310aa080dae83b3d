// Group normalisation, with an activation behind it.
#pragma once

#include "../common/launch.h"

// In f32, with one rounding at the store:
//   y = (x - mean) * rsqrt(variance + epsilon) * weight[c] + bias[c];  output = activation(y)
// where mean and variance are those of all positions of the channels of x's group and sample (Wu and He,
// arXiv:1803.08494; the variance over all elements, as in PyTorch's GroupNorm). A null weight is 1, a null bias 0.
//
// An image is rows of contiguous elements: a row is a channel's positions, or with `channels_last` a position's
// channels. Device memory; float dtypes, one each for input, output, and weight and bias; any strides between rows and
// samples. output may be input (same address, dtype size and strides); no other overlap. Extents up to 2^31 - 1, and
// samples * groups too. Rows that are aligned to 16 bytes (8 for 16-bit rows beside f32 ones) take vector loads; with
// `channels_last` a group's channels, weight and bias must be so too.
struct nvb_group_norm_params {
  const void* input;   // [samples, channels, positions], or [samples, positions, channels]
  void* output;        // of the same shape
  const void* weight;  // [channels], or null
  const void* bias;    // [channels], or null
  int64_t samples;
  int64_t channels;
  int64_t positions;
  int64_t groups;               // divides `channels`
  int64_t input_sample_stride;  // in elements; so are all strides
  int64_t input_row_stride;
  int64_t output_sample_stride;
  int64_t output_row_stride;
  uint32_t input_dtype;
  uint32_t output_dtype;
  uint32_t weight_dtype;  // of weight and bias
  uint32_t activation;    // nvb_activation_code
  uint32_t channels_last;
  float epsilon;
};
static_assert(sizeof(nvb_group_norm_params) == 120, "src/cuda/group_norm.rs mirrors this layout");

extern "C" cudaError_t nvb_cuda_group_norm(const nvb_group_norm_params* params, const nvb_launch* launch) noexcept;
