// Streams: running the host's graphs, operation by operation.
#include "stream.hpp"

#include "operations.hpp"

namespace nvb_ggml {

std::unique_ptr<StreamState> StreamState::create(DeviceState& device) {
  nvb_stream* stream = device.create_stream();
  if (stream == nullptr) return nullptr;
  return std::unique_ptr<StreamState>(new StreamState(device, stream));
}

StreamState::~StreamState() {
  // Its memory goes back in the order of the stream.
  scratch_.reset();
  device_.destroy_stream(stream_);
}

void StreamState::synchronize() {
  device_.fail_unless(nvb_stream_synchronize(stream_), "waiting for a stream");
}

Status StreamState::compute(Graph* graph) {
  const Host& host = device_.host();
  if (device_.take_failure()) return STATUS_FAILED;
  for (int index = 0, count = host.nodes(graph); index < count; ++index) {
    const Tensor& node = *host.node(graph, index);
    if (host.marks_nodes() && (node.flags & TENSOR_FLAG_COMPUTE) == 0) continue;
    const nvb_status status = run_operation(device_, stream_, *scratch_, node);
    if (status == NVB_OK) continue;
    device_.succeeded(status, host.op_name(node));
    const bool memory = status == NVB_ERROR_OUT_OF_MEMORY || status == NVB_ERROR_MEMORY_ALLOCATION;
    return memory ? STATUS_ALLOC_FAILED : STATUS_FAILED;
  }
  return STATUS_SUCCESS;
}

}  // namespace nvb_ggml
