// A stream of a device, which ggml calls a backend: it queues the operations of the host's graphs.
#pragma once

#include "device.hpp"
#include "graph_plan.hpp"
#include "recordings.hpp"
#include "scratch.hpp"

namespace nvb_ggml {

class StreamState {
 public:
  // NULL if no stream can be had.
  static std::unique_ptr<StreamState> create(DeviceState& device);
  ~StreamState();

  DeviceState& device() { return device_; }
  nvb_stream* stream() { return stream_; }
  void synchronize();
  // Queues the operations of a graph. The host waits for them by `synchronize`.
  Status compute(Graph* graph);

 private:
  StreamState(DeviceState& device, nvb_stream* stream);
  nvb_status queue(Graph* graph);
  nvb_status queue(const Work& work, char* own);
  nvb_status queue_stack(const StackWork& stack, char* own);

  DeviceState& device_;
  nvb_stream* stream_;
  std::unique_ptr<Scratch> scratch_;
  // Of results that are not where the host has them.
  std::unique_ptr<Scratch> own_;
  GraphPlan plan_;
  // NULL where graphs run call by call.
  std::unique_ptr<Recordings> recordings_;
};

}  // namespace nvb_ggml
