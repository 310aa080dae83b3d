// Models of the published shapes with random weights: they write nonsense at the speed of the real ones.
#ifndef GEMMA_RANDOM_MODEL_H
#define GEMMA_RANDOM_MODEL_H

#include <cstdint>
#include <memory>
#include <string>

#include "config.h"
#include "tensor_map.h"

namespace gemma {

struct RandomModel {
  Config config;
  TensorMap tensors;  // BF16; views of `values`
  std::unique_ptr<uint16_t[]> values;
};

// "gemma3-270m gemma3-1b …", for the help text and errors.
std::string random_model_names();

// Errors: a name that is none of random_model_names().
RandomModel make_random_model(const std::string& name);

}  // namespace gemma

#endif  // GEMMA_RANDOM_MODEL_H
