// What the host registers: the list of devices, each with its two types of buffers, at addresses that stay.
#pragma once

#include "device.hpp"

namespace nvb_ggml {

class Plugin {
 public:
  struct Entry {
    Device device;  // first: a pointer to it is one to the entry
    BufferType buffer_type;
    BufferType host_buffer_type;
    std::unique_ptr<DeviceState> state;
  };

  static Entry& of(Device* device) { return *reinterpret_cast<Entry*>(device); }

  Host host;
  Registration registration;
  std::vector<std::unique_ptr<Entry>> entries;
};

}  // namespace nvb_ggml
