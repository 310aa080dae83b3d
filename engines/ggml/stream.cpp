// Streams: running the host's graphs, call by call or as recordings of such calls.
#include "stream.hpp"

#include <cstdlib>
#include <cstring>

#include "operations.hpp"

namespace nvb_ggml {
namespace {

// NVB_GGML_GRAPHS=0 runs every graph call by call, for tests and for finding what is at fault.
bool records_graphs() {
  const char* value = std::getenv("NVB_GGML_GRAPHS");
  return value == nullptr || std::strcmp(value, "0") != 0;
}

}  // namespace

StreamState::StreamState(DeviceState& device, nvb_stream* stream)
    : device_(device), stream_(stream), scratch_(std::make_unique<Scratch>(device, stream)) {
  if (records_graphs()) recordings_ = std::make_unique<Recordings>(device, stream);
}

std::unique_ptr<StreamState> StreamState::create(DeviceState& device) {
  nvb_stream* stream = device.create_stream();
  if (stream == nullptr) return nullptr;
  return std::unique_ptr<StreamState>(new StreamState(device, stream));
}

StreamState::~StreamState() {
  // Its memory goes back in the order of the stream.
  recordings_.reset();
  scratch_.reset();
  device_.destroy_stream(stream_);
}

void StreamState::synchronize() {
  device_.fail_unless(nvb_stream_synchronize(stream_), "waiting for a stream");
}

// Queues the operations of a graph one by one.
nvb_status StreamState::queue(Graph* graph) {
  const Host& host = device_.host();
  for (int index = 0, count = host.nodes(graph); index < count; ++index) {
    const Tensor& node = *host.node(graph, index);
    if (!is_work(host, node)) continue;
    const nvb_status status = run_operation(device_, stream_, *scratch_, node);
    if (status == NVB_OK) continue;
    device_.succeeded(status, host.op_name(node));
    return status;
  }
  return NVB_OK;
}

Status StreamState::compute(Graph* graph) {
  if (device_.take_failure()) return STATUS_FAILED;
  nvb_status status = NVB_OK;
  if (recordings_ == nullptr) {
    status = queue(graph);
  } else {
    status = recordings_->compute(graph, [this, graph] { return queue(graph); }, [this] { return scratch_->memory(); });
  }
  if (status == NVB_OK) return STATUS_SUCCESS;
  const bool memory = status == NVB_ERROR_OUT_OF_MEMORY || status == NVB_ERROR_MEMORY_ALLOCATION;
  return memory ? STATUS_ALLOC_FAILED : STATUS_FAILED;
}

}  // namespace nvb_ggml
