// GLU: activation(gate) · up.
#include "operations.hpp"
#include "tensor.hpp"

namespace nvb_ggml {
namespace {

struct Name {
  const char* text;
  uint32_t activation;
};

constexpr Name kGated[] = {
    {"GEGLU", NVB_ACTIVATION_GELU_TANH},
    {"SWIGLU", NVB_ACTIVATION_SILU},
    {"GEGLU_ERF", NVB_ACTIVATION_GELU_ERF},
};

}  // namespace

bool gated_activation(Step& step, const Tensor& node) {
  const char* name = step.device.host().glu_name(node);
  const Name* found = nullptr;
  for (const Name& known : kGated) {
    if (std::strcmp(name, known.text) == 0) found = &known;
  }
  if (found == nullptr) return false;
  // One source holds both halves of each row, which `swapped` exchanges; two hold one each.
  const Tensor& first = *node.source[0];
  const Tensor* second = node.source[1];
  const bool swapped = node.parameters[1] != 0;
  if (!is_float(first.type) || !is_float(node.type) || (second != nullptr && second->type != first.type)) return false;
  for (const Tensor* tensor : {&first, second == nullptr ? &first : second, &node}) {
    if (!has_rows(*tensor) || !has_element_strides(*tensor) || !rows_fold(*tensor)) return false;
  }
  step.queue([&] {
    nvb_gated_activation_args args;
    nvb_gated_activation_args_init(&args);
    args.gate = folded(first);
    args.gate.shape[1] = node.ne[0];
    if (second != nullptr) {
      args.up = folded(*second);
    } else {
      args.up = args.gate;
      nvb_tensor& half = swapped ? args.gate : args.up;
      half.data = static_cast<char*>(half.data) + static_cast<size_t>(node.ne[0]) * traits(first.type).bytes;
    }
    args.output = folded(node);
    args.activation = found->activation;
    return nvb_gated_activation(step.backend(), &args, step.stream);
  });
  return true;
}

}  // namespace nvb_ggml
