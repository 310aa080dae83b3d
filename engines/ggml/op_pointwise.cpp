// Functions of elements over four axes: arithmetic with broadcasting, repetition, unary functions.
#include <cmath>

#include "operations.hpp"
#include "tensor.hpp"

namespace nvb_ggml {
namespace {

struct Name {
  const char* text;
  uint32_t function;
};

constexpr Name kUnary[] = {
    {"ABS", NVB_POINTWISE_ABSOLUTE},
    {"NEG", NVB_POINTWISE_NEGATE},
    {"TANH", NVB_POINTWISE_TANH},
    {"RELU", NVB_POINTWISE_RELU},
    {"SIGMOID", NVB_POINTWISE_SIGMOID},
    {"GELU", NVB_POINTWISE_GELU_TANH},
    {"GELU_QUICK", NVB_POINTWISE_GELU_SIGMOID},
    {"GELU_ERF", NVB_POINTWISE_GELU_ERF},
    {"SILU", NVB_POINTWISE_SILU},
    {"EXP", NVB_POINTWISE_EXPONENTIAL},
};

bool is_operand(const Tensor& tensor) {
  return is_float(tensor.type) && has_element_strides(tensor);
}

// Whether a tensor repeats to the node's extents.
bool repeats(const Tensor& tensor, const Tensor& node) {
  for (int axis = 0; axis < 4; ++axis) {
    if (tensor.ne[axis] == 0 || node.ne[axis] % tensor.ne[axis] != 0) return false;
  }
  return true;
}

bool with_numbers(Step& step, const Tensor& node, uint32_t function, float alpha, float beta) {
  const Tensor& input = *node.source[0];
  if (!is_operand(input) || !is_operand(node) || !same_shape(input, node)) return false;
  step.queue([&] { return pointwise(step, function, whole(input), nullptr, whole(node), alpha, beta); });
  return true;
}

}  // namespace

nvb_status pointwise(const Step& step, uint32_t function, const nvb_tensor& input, const nvb_tensor* second,
                     const nvb_tensor& output, float alpha, float beta) {
  nvb_pointwise_args args;
  nvb_pointwise_args_init(&args);
  args.input = input;
  if (second != nullptr) args.second = *second;
  args.output = output;
  args.function = function;
  args.alpha = alpha;
  args.beta = beta;
  return nvb_pointwise(step.backend(), &args, step.stream);
}

bool binary(Step& step, const Tensor& node, uint32_t function) {
  const Tensor &first = *node.source[0], &second = *node.source[1];
  if (!is_operand(first) || !is_operand(second) || !is_operand(node)) return false;
  if (!same_shape(first, node) || !repeats(second, node)) return false;
  step.queue([&] {
    const nvb_tensor other = whole(second);
    return pointwise(step, function, whole(first), &other, whole(node));
  });
  return true;
}

bool clamp(Step& step, const Tensor& node) {
  const float low = float_parameter(node, 0), high = float_parameter(node, 1);
  return low <= high && with_numbers(step, node, NVB_POINTWISE_CLAMP, low, high);
}

// A factor or a bias that is infinite, by which hosts fill a mask, the library does not take.
bool scale(Step& step, const Tensor& node) {
  if (!std::isfinite(float_parameter(node, 0)) || !std::isfinite(float_parameter(node, 1))) return false;
  return with_numbers(step, node, NVB_POINTWISE_SCALE, float_parameter(node, 0), float_parameter(node, 1));
}

bool unary(Step& step, const Tensor& node, uint32_t function) {
  return with_numbers(step, node, function, 0.0f, 0.0f);
}

bool unary(Step& step, const Tensor& node) {
  const char* name = step.device.host().unary_name(node);
  for (const Name& known : kUnary) {
    if (std::strcmp(name, known.text) == 0) return unary(step, node, known.function);
  }
  return false;
}

bool repeat(Step& step, const Tensor& node) {
  const Tensor& from = *node.source[0];
  const bool words = from.type == TYPE_I32 && node.type == TYPE_I32;
  if (!words && !(is_float(from.type) && is_float(node.type))) return false;
  if (!has_element_strides(from) || !has_element_strides(node) || !repeats(from, node)) return false;
  step.queue([&] { return pointwise(step, NVB_POINTWISE_COPY, whole(from), nullptr, whole(node)); });
  return true;
}

}  // namespace nvb_ggml
