// The weights of a model in host memory, by name: what a loader hands to the model, whatever it read them from.
#ifndef GEMMA_TENSOR_MAP_H
#define GEMMA_TENSOR_MAP_H

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace gemma {

// A view of a row-major tensor in host memory that its loader owns.
struct HostTensor {
  std::string dtype;  // as safetensors spells it, "F32", "F16", "BF16", "I32", …; of blocks in a GGUF file "Q8_0", …,
                      // of gemma.cpp's "SFP", "I8"
  std::vector<int64_t> shape;
  const void* data = nullptr;  // aligned to one byte only
  size_t bytes = 0;
  uint32_t source_format = 0;  // NVB_SOURCE_FORMAT_… of blocks; 0: numbers of the dtype
  float scale = 1;             // of SFP: multiplies each element
  uint32_t format = 0;         // NVB_WEIGHT_FORMAT_… that blocks become by themselves; 0: the library's choice
};

using TensorMap = std::map<std::string, HostTensor>;

// "[1024, 256]"
inline std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

}  // namespace gemma

#endif  // GEMMA_TENSOR_MAP_H
