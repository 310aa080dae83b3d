// MUL_MAT: node[i, m, n] = Σ_k weight[i / ratio, n, k] · input[i, m, k], as products with weights that are read in
// place, or that were made from the blocks of a quantised tensor.
#include "operations.hpp"
#include "tensor.hpp"

namespace nvb_ggml {

bool mat_mul(Step& step, const Tensor& node) {
  const Tensor &weight = *node.source[0], &input = *node.source[1];
  const TypeTraits type = traits(weight.type);
  const bool quantized = is_quantized(weight.type);
  if (!is_float(weight.type) && !quantized) return false;
  // An F32 weight takes F32 alone; a float one takes its own dtype beside that.
  if (input.type != TYPE_F32 && (quantized || input.type != weight.type)) return false;
  if (node.type != TYPE_F32 || !has_rows(weight) || !has_rows(input) || !has_rows(node)) return false;
  if (!quantized && !has_element_strides(weight)) return false;
  if (!has_element_strides(input)) return false;
  // A row that repeats, or rows that overlap, are no weight.
  if (weight.ne[1] > 1 && weight.nb[1] < type.bytes * static_cast<size_t>(weight.ne[0] / type.block)) return false;

  const auto product = [&](int64_t w2, int64_t w3, const nvb_tensor& x, const nvb_tensor& y) {
    step.queue([&] {
      const char* data = static_cast<const char*>(weight.data) + w2 * static_cast<int64_t>(weight.nb[2]) +
                         w3 * static_cast<int64_t>(weight.nb[3]);
      const Weight made = step.device.weight(
          {data, weight.type, weight.ne[1], weight.ne[0], static_cast<size_t>(weight.nb[1])}, step.stream);
      if (made == nullptr) return static_cast<nvb_status>(NVB_ERROR_MEMORY_ALLOCATION);
      nvb_linear_args args;
      nvb_linear_args_init(&args);
      args.input = x;
      args.weight = made.get();
      args.output = y;
      return nvb_linear(step.backend(), &args, step.stream);
    });
  };
  if (weight.ne[2] == 1 && weight.ne[3] == 1 && rows_fold(input) && rows_fold(node)) {
    product(0, 0, folded(input), folded(node));
    return true;
  }
  const int64_t ratio2 = input.ne[2] / weight.ne[2], ratio3 = input.ne[3] / weight.ne[3];
  for_outer(input, [&](int64_t i2, int64_t i3) {
    product(i2 / ratio2, i3 / ratio3, rows_at(input, i2, i3), rows_at(node, i2, i3));
  });
  return true;
}

}  // namespace nvb_ggml
