// Graphs of the library in the place of the host's: a host's graph that comes again with the same addresses is recorded
// and from then on launched, which costs one call in the place of hundreds. Tokens, positions, masks and row numbers
// lie in device memory, so steps of a decode are the same graph until the host gives it other views of its cache.
#pragma once

#include <nvbackend.h>

#include <functional>
#include <utility>
#include <vector>

#include "device.hpp"
#include "graph_key.hpp"

namespace nvb_ggml {

class Recordings {
 public:
  // Addresses of memory of a stream's own.
  using Memory = std::pair<const void*, const void*>;

  Recordings(DeviceState& device, nvb_stream* stream) : device_(device), stream_(stream) {}
  ~Recordings();
  Recordings(const Recordings&) = delete;
  Recordings& operator=(const Recordings&) = delete;

  // Computes a graph. `prepare` comes before a `queue`, which queues its work call by call; `memory` tells where the
  // memory of the stream's own lies that such calls name, and is the same after `queue` unless that had to make more.
  nvb_status compute(Graph* graph, const std::function<nvb_status()>& prepare, const std::function<nvb_status()>& queue,
                     const std::function<Memory()>& memory);

 private:
  struct Recording {
    GraphKey key;
    uint64_t uid = 0;
    nvb_graph* graph = nullptr;
    Memory memory;
    uint64_t weights = 0;
    // How often the graph came, when it is tried to record it, and when it came last.
    uint64_t count = 0, next_try = 2, last = 0;
  };

  Recording& find(Graph* graph);
  void record(Recording& recording, const std::function<nvb_status()>& queue, const std::function<Memory()>& memory);
  static void drop(Recording& recording);

  DeviceState& device_;
  nvb_stream* stream_;
  std::vector<Recording> recordings_;
  GraphKey key_;
  uint64_t clock_ = 0;
};

}  // namespace nvb_ggml
