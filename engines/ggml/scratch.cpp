#include "scratch.hpp"

#include "device.hpp"

namespace nvb_ggml {

Scratch::~Scratch() {
  if (memory_ != nullptr) device_.succeeded(device_.queue_free(memory_, stream_), "freeing scratch memory");
}

nvb_status Scratch::reserve(size_t bytes, char** memory) {
  if (bytes > bytes_) {
    // Work that reads the old one stands before its release on the stream.
    if (memory_ != nullptr) {
      const nvb_status status = device_.queue_free(memory_, stream_);
      if (status != NVB_OK) return status;
    }
    memory_ = nullptr;
    bytes_ = 0;
    // Caches grow by a few tokens a step: an eighth more keeps most steps from allocating.
    const size_t wanted = bytes + bytes / 8;
    const nvb_status status = device_.queue_allocate(wanted, stream_, &memory_);
    if (status != NVB_OK) return status;
    bytes_ = wanted;
  }
  *memory = static_cast<char*>(memory_);
  return NVB_OK;
}

}  // namespace nvb_ggml
