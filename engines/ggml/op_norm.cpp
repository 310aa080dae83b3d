// RMS_NORM, NORM, L2_NORM, SUM_ROWS, MEAN and SOFT_MAX: what works on whole rows.
#include "operations.hpp"
#include "tensor.hpp"

namespace nvb_ggml {
namespace {

constexpr int64_t kWidestNorm = 65536;

bool are_rows(const Tensor& input, const Tensor& output) {
  return is_float(input.type) && is_float(output.type) && has_rows(input) && has_rows(output) &&
         has_element_strides(input) && has_element_strides(output) && same_shape(input, output);
}

// Calls `queue(input, output)` for all rows at once where they lie at one distance, else for those of each outer place.
template <typename Queue>
void for_rows(Step& step, const Tensor& input, const Tensor& output, Queue&& call) {
  if (rows_fold(input) && rows_fold(output)) {
    step.queue([&] { return call(folded(input), folded(output)); });
    return;
  }
  for_outer(input, [&](int64_t i2, int64_t i3) {
    step.queue([&] { return call(rows_at(input, i2, i3), rows_at(output, i2, i3)); });
  });
}

float epsilon_of(const Tensor& node) {
  return given_epsilon(float_parameter(node, 0));
}

}  // namespace

bool rms_norm(Step& step, const Tensor& node) {
  const Tensor& input = *node.source[0];
  if (!are_rows(input, node) || input.ne[0] > kWidestNorm || !(float_parameter(node, 0) >= 0.0f)) return false;
  for_rows(step, input, node, [&](const nvb_tensor& from, const nvb_tensor& to) {
    nvb_rms_norm_args args;
    nvb_rms_norm_args_init(&args);
    args.input = from;
    args.output = to;
    args.epsilon = epsilon_of(node);
    return nvb_rms_norm(step.backend(), &args, step.stream);
  });
  return true;
}

bool norm(Step& step, const Tensor& node) {
  const Tensor& input = *node.source[0];
  if (!are_rows(input, node) || input.ne[0] > kWidestNorm || !(float_parameter(node, 0) >= 0.0f)) return false;
  for_rows(step, input, node, [&](const nvb_tensor& from, const nvb_tensor& to) {
    nvb_layer_norm_args args;
    nvb_layer_norm_args_init(&args);
    args.input = from;
    args.output = to;
    args.epsilon = epsilon_of(node);
    return nvb_layer_norm(step.backend(), &args, step.stream);
  });
  return true;
}

bool l2_norm(Step& step, const Tensor& node) {
  const Tensor& input = *node.source[0];
  if (!is_float(input.type) || !is_float(node.type) || !same_shape(input, node)) return false;
  if (!has_element_strides(input) || !has_element_strides(node) || !(float_parameter(node, 0) >= 0.0f)) return false;
  step.queue([&] {
    nvb_l2_norm_args args;
    nvb_l2_norm_args_init(&args);
    args.input = whole(input);
    args.output = whole(node);
    args.epsilon = epsilon_of(node);
    return nvb_l2_norm(step.backend(), &args, step.stream);
  });
  return true;
}

bool sum_rows(Step& step, const Tensor& node, bool mean) {
  const Tensor& input = *node.source[0];
  if (!is_float(input.type) || !is_float(node.type) || node.ne[0] != 1 || input.ne[0] == 0) return false;
  if (!has_element_strides(input) || !has_element_strides(node)) return false;
  for (int axis = 1; axis < 4; ++axis) {
    if (input.ne[axis] != node.ne[axis]) return false;
  }
  step.queue([&] {
    nvb_sum_rows_args args;
    nvb_sum_rows_args_init(&args);
    args.input = whole(input);
    args.output = whole(node);
    args.scale = mean ? 1.0f / static_cast<float>(input.ne[0]) : 1.0f;
    return nvb_sum_rows(step.backend(), &args, step.stream);
  });
  return true;
}

bool soft_max(Step& step, const Tensor& node) {
  const Tensor& input = *node.source[0];
  const Tensor *mask = node.source[1], *sinks = node.source[2];
  const float scale = float_parameter(node, 0), alibi_bias = float_parameter(node, 1);
  if (!are_rows(input, node) || scale == 0.0f) return false;
  if (mask == nullptr && sinks == nullptr) {
    for_rows(step, input, node, [&](const nvb_tensor& from, const nvb_tensor& to) {
      nvb_softmax_args args;
      nvb_softmax_args_init(&args);
      args.input = from;
      args.output = to;
      args.scale = scale;
      return nvb_softmax(step.backend(), &args, step.stream);
    });
    return true;
  }
  if (!(alibi_bias >= 0.0f)) return false;
  nvb_masked_softmax_args args;
  nvb_masked_softmax_args_init(&args);
  args.input = whole(input);
  args.output = whole(node);
  args.scale = scale;
  args.alibi_bias = alibi_bias;
  if (mask != nullptr) {
    if (!is_float(mask->type) || !has_rows(*mask) || !has_element_strides(*mask)) return false;
    if (mask->ne[0] != input.ne[0] || mask->ne[1] < input.ne[1]) return false;
    if (mask->ne[2] == 0 || mask->ne[3] == 0) return false;
    if (input.ne[2] % mask->ne[2] != 0 || input.ne[3] % mask->ne[3] != 0) return false;
    args.mask = whole(*mask);
    // A mask may have more rows than there are scores.
    args.mask.shape[2] = input.ne[1];
  }
  if (sinks != nullptr) {
    if (sinks->type != TYPE_F32 || sinks->ne[0] != input.ne[2] || !is_contiguous(*sinks)) return false;
    args.sinks = nvb_tensor_1d(sinks->data, NVB_DTYPE_F32, sinks->ne[0]);
  }
  step.queue([&] { return nvb_masked_softmax(step.backend(), &args, step.stream); });
  return true;
}

}  // namespace nvb_ggml
