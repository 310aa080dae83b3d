// The host's operations on the library's: one function for each kind, which reads a node and says whether it can be
// done, and does it. Asking and doing are one code, so that what is accepted runs.
#pragma once

#include "device.hpp"
#include "scratch.hpp"

namespace nvb_ggml {

// A node that is asked about, or run on a stream.
class Step {
 public:
  // Only asks without `scratch`.
  Step(DeviceState& device, nvb_stream* stream, Scratch* scratch)
      : device(device), stream(stream), scratch_(scratch), runs_(scratch != nullptr) {}

  DeviceState& device;
  nvb_stream* const stream;

  bool asks() const { return !runs_; }
  bool runs() const { return runs_ && status_ == NVB_OK; }
  const nvb_backend* backend() const { return device.backend(); }
  // Memory for this node. NULL, with the status of the failure, if there is none, and where the node is only asked
  // about.
  char* scratch(const ScratchPlan& plan) {
    char* memory = nullptr;
    if (plan.bytes() != 0) queue([&] { return scratch_->reserve(plan.bytes(), &memory); });
    return memory;
  }
  nvb_status status() const { return status_; }
  // Calls `queue`, which returns a status, unless the node is only asked about or an earlier call of it has failed.
  template <typename Queue>
  void queue(Queue&& call) {
    if (runs()) status_ = call();
  }

 private:
  Scratch* const scratch_;
  const bool runs_;
  nvb_status status_ = NVB_OK;
};

// Whether the device computes `node`, from types, extents and strides alone.
bool supports_operation(DeviceState& device, const Tensor& node);
// Whether a product with a weight in main memory is worth the way of that weight to the device.
bool is_worth_offloading(DeviceState& device, const Tensor& node);
// Queues `node`, which `supports_operation` accepted.
nvb_status run_operation(DeviceState& device, nvb_stream* stream, Scratch& scratch, const Tensor& node);

// The arguments of a rotation as the node has it. False if the library does not have it.
bool rope_args(const Tensor& node, nvb_rotary_embedding_args& args);

// Queues a function of elements of plain tensors.
nvb_status pointwise(const Step& step, uint32_t function, const nvb_tensor& input, const nvb_tensor* second,
                     const nvb_tensor& output, float alpha = 0.0f, float beta = 0.0f);
// Queues a conversion between rows of floats and of blocks, whose numbers `rows` has if it is not NULL.
nvb_status block_rows(const Step& step, const nvb_tensor& floats, const nvb_block_tensor& blocks,
                      const nvb_tensor* rows, uint32_t direction);
// Queues a conversion of a tensor of floats or of blocks to floats of the same extents.
nvb_status convert(const Step& step, const Tensor& from, const nvb_tensor& to);

// Whether a product with blocks that are not packed rounds an F32 input to BF16.
bool rounds_input_of_blocks(const DeviceState& device, const Tensor& node);

// Each false if it cannot do the node. `step` has the status of what was queued.
bool add_id(Step& step, const Tensor& node);
bool arg_max(Step& step, const Tensor& node);
bool binary(Step& step, const Tensor& node, uint32_t function);
bool clamp(Step& step, const Tensor& node);
bool concat(Step& step, const Tensor& node);
bool copy(Step& step, const Tensor& node);
bool flash_attention(Step& step, const Tensor& node);
bool get_rows(Step& step, const Tensor& node);
bool gated_activation(Step& step, const Tensor& node);
bool l2_norm(Step& step, const Tensor& node);
bool mat_mul(Step& step, const Tensor& node);
bool mat_mul_id(Step& step, const Tensor& node);
bool norm(Step& step, const Tensor& node);
bool repeat(Step& step, const Tensor& node);
bool rms_norm(Step& step, const Tensor& node);
bool rope(Step& step, const Tensor& node);
bool scale(Step& step, const Tensor& node);
bool set_rows(Step& step, const Tensor& node);
bool soft_max(Step& step, const Tensor& node);
// The first of the sorted columns, as many as the node has.
bool sort_rows(Step& step, const Tensor& node, bool descending);
bool sum_rows(Step& step, const Tensor& node, bool mean);
bool unary(Step& step, const Tensor& node);
bool unary(Step& step, const Tensor& node, uint32_t function);

}  // namespace nvb_ggml
