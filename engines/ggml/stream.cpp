// Streams: running the host's graphs, call by call or as recordings of such calls.
#include "stream.hpp"

#include "operations.hpp"

namespace nvb_ggml {
StreamState::StreamState(DeviceState& device, nvb_stream* stream)
    : device_(device),
      stream_(stream),
      scratch_(std::make_unique<Scratch>(device, stream)),
      narrow_(std::make_unique<Scratch>(device, stream)) {
  if (is_on("NVB_GGML_GRAPHS", true)) recordings_ = std::make_unique<Recordings>(device, stream);
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
  narrow_.reset();
  device_.destroy_stream(stream_);
}

void StreamState::synchronize() {
  device_.fail_unless(nvb_stream_synchronize(stream_), "waiting for a stream");
}

nvb_status StreamState::queue(const Work& work, char* narrow) {
  if (work.kind == Work::Kind::Rotation) return run_rotation(device_, stream_, work.rotation);
  if (work.kind == Work::Kind::Norm) {
    const Tensor* output = work.norm.output;
    if (output == nullptr || !plan_.is_narrow(output)) return run_norm(device_, stream_, work.norm, output);
    const Tensor placed = plan_.narrowed(*output, narrow);
    return run_norm(device_, stream_, work.norm, &placed);
  }
  const Tensor& node = *work.node;
  const bool writes = plan_.is_narrow(&node), reads = node.source[1] != nullptr && plan_.is_narrow(node.source[1]);
  if (!writes && !reads) return run_operation(device_, stream_, *scratch_, node);
  Tensor placed = writes ? plan_.narrowed(node, narrow) : node;
  Tensor input;
  if (reads) {
    input = plan_.narrowed(*node.source[1], narrow);
    placed.source[1] = &input;
  }
  return run_operation(device_, stream_, *scratch_, placed);
}

// Queues the works of a graph one by one. Works are joined on GPUs, but where NVB_GGML_JOIN says otherwise; on the CPU
// tests compare its operations with the host's one by one.
nvb_status StreamState::queue(Graph* graph) {
  plan_.read(device_.host(), graph, is_on("NVB_GGML_JOIN", !device_.is_cpu()), device_.rounds_to_halves());
  char* narrow = nullptr;
  if (plan_.narrow_bytes() != 0) {
    const nvb_status status = narrow_->reserve(plan_.narrow_bytes(), &narrow);
    if (!device_.succeeded(status, "allocating memory for results in 16 bits")) return status;
  }
  for (const Work& work : plan_.works()) {
    const nvb_status status = queue(work, narrow);
    if (device_.succeeded(status, device_.host().op_name(*work.node))) continue;
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
    status = recordings_->compute(
        graph, [this, graph] { return queue(graph); },
        [this] { return Recordings::Memory(scratch_->memory(), narrow_->memory()); });
  }
  if (status == NVB_OK) return STATUS_SUCCESS;
  const bool memory = status == NVB_ERROR_OUT_OF_MEMORY || status == NVB_ERROR_MEMORY_ALLOCATION;
  return memory ? STATUS_ALLOC_FAILED : STATUS_FAILED;
}

}  // namespace nvb_ggml
