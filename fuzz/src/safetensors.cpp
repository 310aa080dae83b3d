// The reader behind one C function, for fuzz_targets/safetensors.rs.
#include "safetensors.h"

#include <cstdint>
#include <cstdlib>

#include "error.h"

// Reads the file and every byte that its tensors point at; returns a sum of them, 0 for a file that is refused with an
// error of the reader's own. Any other exception ends the process, as it would the example.
extern "C" size_t nvb_fuzz_read_safetensors(const char* path) noexcept {
  try {
    const gemma::Safetensors file(path);
    size_t sum = 1;
    for (const auto& [name, tensor] : file.tensors()) {
      size_t elements = 1;
      for (const int64_t extent : tensor.shape) elements *= static_cast<size_t>(extent);
      if (tensor.bytes < elements) std::abort();
      for (size_t i = 0; i < tensor.bytes; ++i) sum += static_cast<const uint8_t*>(tensor.data)[i];
      sum += name.size();
    }
    return sum;
  } catch (const gemma::Error&) {
    return 0;
  }
}
