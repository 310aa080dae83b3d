// What a model's tensors are called, in Hugging Face folders, in GGUF files and in gemma.cpp's.
#ifndef GEMMA_TENSOR_NAMES_H
#define GEMMA_TENSOR_NAMES_H

#include <cstdint>
#include <string>

#include "config.h"
#include "tensor_map.h"

namespace gemma {

// Names without the closing ".weight" or ".bias"; those of a layer follow layer(index).
struct TensorNames {
  std::string embedding, final_norm, head;
  std::string layers;  // before the layer's number
  const char* input_norm;
  const char *query, *key, *value, *output, *query_norm, *key_norm;
  const char *post_attention_norm, *pre_feed_forward_norm, *post_feed_forward_norm;
  const char *gate, *up, *down;

  std::string layer(int64_t index) const { return layers + std::to_string(index) + "."; }
};

// The names by which `tensors` holds its embedding. Errors: none of them.
TensorNames find_tensor_names(const Config& config, const TensorMap& tensors);

}  // namespace gemma

#endif  // GEMMA_TENSOR_NAMES_H
