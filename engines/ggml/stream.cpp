// Streams: running the host's graphs, call by call or as recordings of such calls.
#include "stream.hpp"

#include <array>

#include "operations.hpp"
#include "packed_weights.hpp"
#include "tensor.hpp"

namespace nvb_ggml {
StreamState::StreamState(DeviceState& device, nvb_stream* stream)
    : device_(device),
      stream_(stream),
      scratch_(std::make_unique<Scratch>(device, stream)),
      own_(std::make_unique<Scratch>(device, stream)) {
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
  own_.reset();
  device_.destroy_stream(stream_);
}

void StreamState::synchronize() {
  device_.fail_unless(nvb_stream_synchronize(stream_), "waiting for a stream");
}

// A product with the weights of a stack as one.
nvb_status StreamState::queue_stack(const StackWork& stack, char* own) {
  Tensor node = *stack.products[0], weight = *node.source[0], input = *node.source[1];
  for (size_t i = 1; i < stack.products.size(); ++i) weight.ne[1] += stack.products[i]->source[0]->ne[1];
  node.ne[0] = weight.ne[1];
  node.data = own + stack.at;
  for (int axis = 1; axis < 4; ++axis) node.nb[axis] = static_cast<size_t>(node.ne[0]) * sizeof(float);
  if (plan_.is_narrow(node.source[1])) {
    input = plan_.narrowed(*node.source[1], own);
  } else if (plan_.is_moved(node.source[1])) {
    input = plan_.moved(*node.source[1], own);
  }
  node.source[0] = &weight;
  node.source[1] = &input;
  return run_operation(device_, stream_, *scratch_, node);
}

nvb_status StreamState::queue(const Work& work, char* own) {
  // What lies in own memory, in the place of the host's tensor.
  std::array<Tensor, MAX_SOURCES> moved;
  const auto where_it_lies = [&](const Tensor* tensor, size_t i) {
    if (tensor == nullptr || !plan_.is_moved(tensor)) return tensor;
    moved[i] = plan_.moved(*tensor, own);
    return static_cast<const Tensor*>(&moved[i]);
  };
  if (work.kind == Work::Kind::Stack) return queue_stack(work.stack, own);
  if (work.kind == Work::Kind::Rotation) {
    RotationWork rotation = work.rotation;
    RotationWork keys = work.keys;
    HeadRows values = work.values;
    rotation.input = where_it_lies(rotation.input, 0);
    keys.input = where_it_lies(keys.input, 1);
    values.input = where_it_lies(values.input, 2);
    return run_rotation(device_, stream_, rotation, keys, values);
  }
  if (work.kind == Work::Kind::Norm) {
    NormWork norm = work.norm;
    norm.input = where_it_lies(norm.input, 0);
    norm.residual = where_it_lies(norm.residual, 1);
    const Tensor* output = norm.output;
    if (output == nullptr || !plan_.is_narrow(output)) return run_norm(device_, stream_, norm, output);
    const Tensor placed = plan_.narrowed(*output, own);
    return run_norm(device_, stream_, norm, &placed);
  }
  if (work.kind == Work::Kind::Sum) return run_sum(device_, stream_, work.sum);
  const Tensor& node = *work.node;
  Tensor placed = plan_.is_narrow(&node) ? plan_.narrowed(node, own) : node;
  for (size_t i = 0; i < MAX_SOURCES; ++i) {
    // The host's tensors are not written to, but its structure has no const.
    placed.source[i] = const_cast<Tensor*>(where_it_lies(node.source[i], i));
  }
  Tensor input;
  if (node.source[1] != nullptr && plan_.is_narrow(node.source[1])) {
    input = plan_.narrowed(*node.source[1], own);
    placed.source[1] = &input;
  }
  return run_operation(device_, stream_, *scratch_, placed);
}

// Queues the works of a graph one by one. Works are joined on GPUs, but where NVB_GGML_JOIN says otherwise; on the CPU
// tests compare its operations with the host's one by one.
nvb_status StreamState::queue(Graph* graph) {
  plan_.read(device_, graph, is_on("NVB_GGML_JOIN", !device_.is_cpu()), device_.rounds_to_halves());
  char* own = nullptr;
  if (plan_.own_bytes() != 0) {
    const nvb_status status = own_->reserve(plan_.own_bytes(), &own);
    if (!device_.succeeded(status, "allocating memory for results")) return status;
  }
  for (const Work& work : plan_.works()) {
    const nvb_status status = queue(work, own);
    if (device_.succeeded(status, device_.host().op_name(*work.node))) continue;
    return status;
  }
  return NVB_OK;
}

Status StreamState::compute(Graph* graph) {
  LayoutLock layout = device_.packed().hold();
  device_.order_after_copies(stream_);
  if (device_.take_failure()) return STATUS_FAILED;
  const auto prepare = [&] { return device_.packed().prepare(graph, layout); };
  nvb_status status = NVB_OK;
  if (recordings_ == nullptr) {
    status = prepare();
    if (status == NVB_OK) status = queue(graph);
  } else {
    status = recordings_->compute(
        graph, prepare, [this, graph] { return queue(graph); },
        [this] { return Recordings::Memory(scratch_->memory(), own_->memory()); });
  }
  if (status == NVB_OK) return STATUS_SUCCESS;
  const bool memory = status == NVB_ERROR_OUT_OF_MEMORY || status == NVB_ERROR_MEMORY_ALLOCATION;
  return memory ? STATUS_ALLOC_FAILED : STATUS_FAILED;
}

}  // namespace nvb_ggml
