// Device memory for what one operation computes on its way, which the next one on the same stream uses again.
#pragma once

#include <nvbackend.h>

#include <cstddef>

namespace nvb_ggml {

class DeviceState;

class Scratch {
 public:
  Scratch(DeviceState& device, nvb_stream* stream) : device_(device), stream_(stream) {}
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // At least `bytes`, aligned to 256. What an earlier call returned must not be named by work that is queued after
  // this.
  nvb_status reserve(size_t bytes, char** memory);
  // What `reserve` gives for no more than it gave before.
  const void* memory() const { return memory_; }

 private:
  DeviceState& device_;
  nvb_stream* stream_;
  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

// Places in one reservation: first all of them are counted, then each gets its address.
class ScratchPlan {
 public:
  // The offset of a place.
  size_t place(size_t bytes) {
    const size_t at = bytes_;
    bytes_ += (bytes + 255) / 256 * 256;
    return at;
  }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_ = 0;
};

}  // namespace nvb_ggml
