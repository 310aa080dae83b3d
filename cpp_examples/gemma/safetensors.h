// Reads safetensors files. Format: a little-endian u64 N, then N bytes of JSON that give each tensor's dtype, shape and
// byte range, then the data, which the ranges count from. https://github.com/huggingface/safetensors
//
// A model file comes from anywhere, so nothing in it is believed: sizes, offsets, shapes and dtypes are checked against
// each other and against the file's length with arithmetic that notices overflow, before any tensor is handed out.
#ifndef GEMMA_SAFETENSORS_H
#define GEMMA_SAFETENSORS_H

#include <string>
#include <vector>

#include "mapped_file.h"
#include "tensor_map.h"

namespace gemma {

// Owns the mapped files that its tensors point into.
class Safetensors {
 public:
  // One file.
  explicit Safetensors(const std::string& path) { add(path); }

  // A model folder: model.safetensors, or else the files that model.safetensors.index.json names.
  static Safetensors open_folder(const std::string& folder);

  const TensorMap& tensors() const { return tensors_; }

 private:
  Safetensors() = default;
  void add(const std::string& path);

  std::vector<MappedFile> files_;
  TensorMap tensors_;
};

}  // namespace gemma

#endif  // GEMMA_SAFETENSORS_H
