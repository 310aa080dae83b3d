// A Gemma's weights on a device, in the layouts that the forward pass wants.
#ifndef GEMMA_MODEL_H
#define GEMMA_MODEL_H

#include <cstdint>
#include <map>
#include <nvbackend.hpp>
#include <vector>

#include "config.h"
#include "progress.h"
#include "tensor_map.h"
#include "weight_formats.h"

namespace gemma {

// A short vector (a norm's weight, a bias) in device memory; a zero tensor, which calls take as "absent", if there is
// none.
struct Vector {
  nvb::buffer memory;
  nvb_tensor tensor{};
};

struct Layer {
  Vector input_norm;
  nvb::weight query_key_value;  // [query_width + 2 · kv_width, width]: one product instead of three
  Vector query_key_value_bias;
  Vector query_norm;   // Gemma 3
  Vector key_norm;     // Gemma 3
  nvb::weight output;  // [width, query_width]
  Vector output_bias;
  Vector post_attention_norm;     // Gemma 2 and 3, of the branch
  Vector pre_feed_forward_norm;   // of the sum
  nvb::weight gate_up;            // gate and up interleaved: products with it are GeGLU
  nvb::weight down;               // [width, feed_forward]
  Vector post_feed_forward_norm;  // Gemma 2 and 3
};

// The matrices of one format.
struct FormatUse {
  uint64_t parameters = 0;
  uint64_t bytes = 0;           // of device memory
  uint64_t scale_bytes = 0;     // within `bytes`
  uint64_t in_place_bytes = 0;  // of host memory that is read where it lies
  double largest_error = 0;     // of a matrix: ‖weight − file‖ / ‖file‖
};

// NVB_DTYPE_… of the caches; 0: what the model computes in, and of values that of keys.
struct KvDtypes {
  uint32_t key = 0, value = 0;
};

struct Model {
  Config config;
  nvb::weight embedding;  // [vocabulary, width]
  nvb::weight head;       // empty where the embedding is the head too
  std::vector<Layer> layers;
  Vector final_norm;
  // The dtype of everything between the products: F32 on the CPU and for weights in F32 or F16, else BF16.
  uint32_t activation_dtype = NVB_DTYPE_F32;
  KvDtypes kv_dtypes;
  std::map<uint32_t, FormatUse> formats;  // by NVB_WEIGHT_FORMAT_…
  uint64_t parameters = 0;
};

// Creates the weights on the backend's device, in `formats`: numbers are quantised, and blocks of GGUF files converted,
// as they are read. On the CPU an embedding that keeps its dtype is read in place, so the memory behind `tensors`
// outlives the model. Errors: a tensor that is missing or has another shape or dtype than the configuration asks for.
Model load_model(const nvb::backend& backend, const Config& config, const TensorMap& tensors,
                 const WeightFormats& formats, Progress* progress);

}  // namespace gemma

#endif  // GEMMA_MODEL_H
