// ROPE: rotary position embedding.
#include "operations.hpp"
#include "tensor.hpp"

namespace nvb_ggml {
namespace {

// `parameters[2]`: pairs are halves of the rotated elements apart.
constexpr int32_t kHalfMode = 2;

}  // namespace

bool rope(Step &step, const Tensor &node) {
  const Tensor &input = *node.source[0], &positions = *node.source[1];
  const int32_t rotated = node.parameters[1], mode = node.parameters[2], first = node.parameters[15];
  const float base = float_parameter(node, 5), position_scale = float_parameter(node, 6);
  const float extension = float_parameter(node, 7), magnitude = float_parameter(node, 8);
  if (node.source[2] != nullptr || mode != kHalfMode || extension != 0.0f || magnitude != 1.0f || first != 0) {
    return false;
  }
  if (!is_float(input.type) || node.type != input.type || !has_rows(input) || !has_rows(node)) return false;
  if (!has_element_strides(input) || !has_element_strides(node) || !same_shape(input, node)) return false;
  if (rotated <= 0 || rotated % 2 != 0 || rotated > input.ne[0]) return false;
  if (!(base > 0.0f) || !(position_scale > 0.0f)) return false;

  for (int64_t batch = 0; batch < input.ne[3]; ++batch) {
    // [tokens, heads, head_dim]
    const auto heads = [&](const Tensor &tensor) {
      const TypeTraits type = traits(tensor.type);
      char *data = static_cast<char *>(tensor.data) + batch * static_cast<int64_t>(tensor.nb[3]);
      nvb_tensor view = nvb_tensor_3d(data, type.dtype, tensor.ne[2], tensor.ne[1], tensor.ne[0]);
      view.strides[0] = static_cast<int64_t>(tensor.nb[2] / type.bytes);
      view.strides[1] = static_cast<int64_t>(tensor.nb[1] / type.bytes);
      view.strides[2] = 1;
      return view;
    };
    step.queue([&] {
      nvb_rope_args args;
      nvb_rope_args_init(&args);
      args.query = heads(input);
      args.query_output = heads(node);
      args.positions = nvb_tensor_1d(positions.data, NVB_DTYPE_I32, input.ne[2]);
      args.rotary_dim = static_cast<uint32_t>(rotated);
      args.base = base;
      args.position_scale = position_scale;
      return nvb_rope(step.backend(), &args, step.stream);
    });
  }
  return true;
}

}  // namespace nvb_ggml
