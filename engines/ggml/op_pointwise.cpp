// Functions of elements over four axes: arithmetic with broadcasting, copies of any permutation, unary functions.
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

nvb_pointwise_args arguments(const nvb_tensor& input, const nvb_tensor& output, uint32_t function) {
  nvb_pointwise_args args;
  nvb_pointwise_args_init(&args);
  args.input = input;
  args.output = output;
  args.function = function;
  return args;
}

bool with_numbers(Step& step, const Tensor& node, uint32_t function, float alpha, float beta) {
  const Tensor& input = *node.source[0];
  if (!is_operand(input) || !is_operand(node) || !same_shape(input, node)) return false;
  step.queue([&] {
    nvb_pointwise_args args = arguments(whole(input), whole(node), function);
    args.alpha = alpha;
    args.beta = beta;
    return nvb_pointwise(step.backend(), &args, step.stream);
  });
  return true;
}

// More than a few copies of bytes take longer than a kernel, and a host that has to do them itself than both.
constexpr int64_t kMostRanges = 4096;

// Blocks of any type to blocks of the same type, as ranges of bytes that both tensors have in one piece.
bool copies_bytes(Step& step, const Tensor& from, const Tensor& to) {
  const Host& host = step.device.host();
  const size_t block = host.block_bytes(from.type);
  const int64_t blocks = from.ne[0] / host.block_elements(from.type);
  if (!same_shape(from, to) || (blocks != 1 && (from.nb[0] != block || to.nb[0] != block))) return false;
  size_t range = block * static_cast<size_t>(blocks);
  int axis = 1;
  for (; axis < 4; ++axis) {
    const bool joins = from.ne[axis] == 1 || (from.nb[axis] == range && to.nb[axis] == range);
    if (!joins) break;
    range *= static_cast<size_t>(from.ne[axis]);
  }
  int64_t outer[3] = {1, 1, 1}, count = 1;
  for (int rest = axis; rest < 4; ++rest) count *= outer[rest - 1] = from.ne[rest];
  if (count > kMostRanges) return false;
  const auto place = [&](const Tensor& tensor, int64_t a, int64_t b, int64_t c) {
    const int64_t at[3] = {a, b, c};
    char* data = static_cast<char*>(tensor.data);
    for (int i = 0; i < 3; ++i) data += at[i] * static_cast<int64_t>(tensor.nb[i + 1]);
    return data;
  };
  for (int64_t c = 0; c < outer[2]; ++c) {
    for (int64_t b = 0; b < outer[1]; ++b) {
      for (int64_t a = 0; a < outer[0]; ++a) {
        step.queue([&] {
          return step.device.queue_copy(place(to, a, b, c), place(from, a, b, c), range, NVB_COPY_DEVICE_TO_DEVICE,
                                        step.stream);
        });
      }
    }
  }
  return true;
}

// Whether a tensor of any type has no gaps and the order of its axes.
bool is_one_piece(const Host& host, const Tensor& tensor) {
  size_t stride = host.block_bytes(tensor.type);
  int64_t extent = tensor.ne[0] / host.block_elements(tensor.type);
  for (int axis = 0; axis < 4; ++axis) {
    if (extent != 1 && tensor.nb[axis] != stride) return false;
    stride *= static_cast<size_t>(extent);
    extent = axis < 3 ? tensor.ne[axis + 1] : 1;
  }
  return true;
}

// Elements of `from` in the order of the axes become those of `to`.
bool copies(Step& step, const Tensor& from, const Tensor& to) {
  const Host& host = step.device.host();
  if (from.type == to.type && is_one_piece(host, from) && is_one_piece(host, to)) {
    step.queue([&] {
      return step.device.queue_copy(to.data, from.data, host.bytes(to), NVB_COPY_DEVICE_TO_DEVICE, step.stream);
    });
    return true;
  }
  const bool plain = is_float(from.type) || from.type == TYPE_I32;
  if (from.type == to.type && !plain) return copies_bytes(step, from, to);
  const bool words = from.type == TYPE_I32 && to.type == TYPE_I32;
  if (!words && !(is_float(from.type) && is_float(to.type))) return false;
  if (!has_element_strides(from) || !has_element_strides(to)) return false;
  nvb_tensor input = whole(from), output = whole(to);
  if (!same_shape(from, to)) {
    // One of them has to lie in one piece, and is then seen in the other's shape.
    nvb_tensor& changed = is_contiguous(from) ? input : output;
    const nvb_tensor& kept = is_contiguous(from) ? output : input;
    if (!is_contiguous(from) && !is_contiguous(to)) return false;
    std::memcpy(changed.shape, kept.shape, sizeof changed.shape);
    std::memset(changed.strides, 0, sizeof changed.strides);
  }
  step.queue([&] {
    const nvb_pointwise_args args = arguments(input, output, NVB_POINTWISE_COPY);
    return nvb_pointwise(step.backend(), &args, step.stream);
  });
  return true;
}

}  // namespace

bool binary(Step& step, const Tensor& node, uint32_t function) {
  const Tensor &first = *node.source[0], &second = *node.source[1];
  if (!is_operand(first) || !is_operand(second) || !is_operand(node)) return false;
  if (!same_shape(first, node) || !repeats(second, node)) return false;
  step.queue([&] {
    nvb_pointwise_args args = arguments(whole(first), whole(node), function);
    args.second = whole(second);
    return nvb_pointwise(step.backend(), &args, step.stream);
  });
  return true;
}

bool clamp(Step& step, const Tensor& node) {
  const float low = float_parameter(node, 0), high = float_parameter(node, 1);
  return low <= high && with_numbers(step, node, NVB_POINTWISE_CLAMP, low, high);
}

bool scale(Step& step, const Tensor& node) {
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

bool copy(Step& step, const Tensor& node) {
  const Tensor& from = *node.source[0];
  return elements(from) == elements(node) && copies(step, from, node);
}

bool repeat(Step& step, const Tensor& node) {
  const Tensor& from = *node.source[0];
  const bool words = from.type == TYPE_I32 && node.type == TYPE_I32;
  if (!words && !(is_float(from.type) && is_float(node.type))) return false;
  if (!has_element_strides(from) || !has_element_strides(node) || !repeats(from, node)) return false;
  step.queue([&] {
    const nvb_pointwise_args args = arguments(whole(from), whole(node), NVB_POINTWISE_COPY);
    return nvb_pointwise(step.backend(), &args, step.stream);
  });
  return true;
}

// Each source is copied to its part of the node along one axis.
bool concat(Step& step, const Tensor& node) {
  const int axis = node.parameters[0];
  if (axis < 0 || axis > 3 || step.device.host().block_elements(node.type) != 1) return false;
  int64_t place = 0;
  for (const Tensor* from : {node.source[0], node.source[1]}) {
    Tensor part = node;
    part.ne[axis] = from->ne[axis];
    if (part.data != nullptr) part.data = static_cast<char*>(part.data) + place * static_cast<int64_t>(node.nb[axis]);
    place += from->ne[axis];
    if (from->type != node.type || !same_shape(*from, part)) return false;
    if (elements(*from) != 0 && !copies(step, *from, part)) return false;
  }
  return true;
}

}  // namespace nvb_ggml
