// Works of several nodes: a norm with the additions around it, and the rotation of normed heads into a cache.
#include "graph_plan.hpp"
#include "tensor.hpp"

namespace nvb_ggml {
namespace {

constexpr int64_t kWidestNorm = 65536;

bool is_norm_matrix(const Tensor* tensor, const Tensor& like) {
  return tensor == nullptr || (is_float(tensor->type) && has_rows(*tensor) && has_element_strides(*tensor) &&
                               rows_fold(*tensor) && same_shape(*tensor, like));
}

nvb_tensor vector_of(const Tensor* tensor) {
  if (tensor == nullptr) return nvb_tensor{};
  return nvb_tensor_1d(tensor->data, traits(tensor->type).dtype, tensor->ne[0]);
}

// Of the heads of each token: [tokens, heads, head_dim].
nvb_tensor heads_of(const Tensor& tensor) {
  nvb_tensor heads = nvb_tensor_3d(tensor.data, traits(tensor.type).dtype, tensor.ne[2], tensor.ne[1], tensor.ne[0]);
  const int64_t bytes = static_cast<int64_t>(traits(tensor.type).bytes);
  heads.strides[0] = static_cast<int64_t>(tensor.nb[2]) / bytes;
  heads.strides[1] = static_cast<int64_t>(tensor.nb[1]) / bytes;
  heads.strides[2] = 1;
  return heads;
}

// Rows of a cache as such heads: `like` has their shape.
nvb_tensor rows_of_heads(const Tensor& cache, const nvb_tensor& like) {
  const TypeTraits type = traits(cache.type);
  nvb_tensor heads =
      nvb_tensor_3d(cache.data, type.dtype, cache.ne[1], like.shape[like.rank - 2], like.shape[like.rank - 1]);
  heads.strides[0] = static_cast<int64_t>(cache.nb[1] / type.bytes);
  heads.strides[1] = like.shape[like.rank - 1];
  heads.strides[2] = 1;
  return heads;
}

// No row number needs more than the low half of 64 bits.
nvb_tensor numbers_of_rows(const Tensor& rows) {
  nvb_tensor numbers = nvb_tensor_1d(rows.data, NVB_DTYPE_I32, rows.ne[0]);
  numbers.strides[0] = static_cast<int64_t>(rows.nb[0] / sizeof(int32_t));
  return numbers;
}

}  // namespace

bool fits_one_call(const Host&, const NormWork& work) {
  const Tensor& input = *work.input;
  if (input.ne[0] > kWidestNorm || !(work.epsilon >= 0.0f)) return false;
  for (const Tensor* tensor : {work.input, work.residual, work.sum, work.output}) {
    if (!is_norm_matrix(tensor, input)) return false;
  }
  // Each element is read before those at its place are written.
  for (const Tensor* written : {work.sum, work.output}) {
    if (written == nullptr) continue;
    for (const Tensor* read : {work.input, work.residual}) {
      if (read != nullptr && !is_same_place(*read, *written) && !are_apart(*read, *written)) return false;
    }
    for (const Tensor* read : {work.weight, work.post_weight}) {
      if (read != nullptr && !are_apart(*read, *written)) return false;
    }
  }
  return work.sum == nullptr || work.output == nullptr || are_apart(*work.sum, *work.output);
}

nvb_status run_norm(const DeviceState& device, nvb_stream* stream, const NormWork& work, const Tensor* output) {
  nvb_rms_norm_args args;
  nvb_rms_norm_args_init(&args);
  args.input = folded(*work.input);
  args.post_weight = vector_of(work.post_weight);
  if (work.residual != nullptr) args.residual = folded(*work.residual);
  if (work.sum != nullptr) args.residual_output = folded(*work.sum);
  args.weight = vector_of(work.weight);
  if (output != nullptr) args.output = folded(*output);
  args.epsilon = given_epsilon(work.epsilon);
  return nvb_rms_norm(device.backend(), &args, stream);
}

bool fits_one_call(const Host&, const RotationWork& work) {
  nvb_rotary_embedding_args args;
  if (!rope_args(*work.rope, args)) return false;
  const Tensor &input = *work.input, &output = *work.output;
  if (!is_float(input.type) || !has_rows(input) || !has_element_strides(input)) return false;
  if (!same_shape(input, *work.rope) || !(work.epsilon >= 0.0f)) return false;
  const bool in_place = work.rows == nullptr && is_same_place(input, output);
  if (!in_place && !are_apart(input, output)) return false;
  const Tensor* const factors = work.rope->source[2];
  for (const Tensor* read : {static_cast<const Tensor*>(work.rope->source[1]), factors, work.weight, work.rows}) {
    if (read != nullptr && !are_apart(*read, output)) return false;
  }
  if (work.rows == nullptr) return same_shape(input, output) && has_rows(output) && has_element_strides(output);
  return (work.rows->type == TYPE_I32 || work.rows->type == TYPE_I64) && work.rows->ne[0] == input.ne[2];
}

nvb_status run_rotation(const DeviceState& device, nvb_stream* stream, const RotationWork& work,
                        const RotationWork& keys, const HeadRows& values) {
  nvb_rotary_embedding_args args;
  if (!rope_args(*work.rope, args)) return NVB_ERROR_UNSUPPORTED;
  const float magnitude = args.magnitude;
  args.input = whole(*work.input);
  args.output = whole(*work.output);
  if (work.rows != nullptr) {
    args.input = heads_of(*work.input);
    args.output = rows_of_heads(*work.output, args.input);
    args.rows = numbers_of_rows(*work.rows);
  }
  if (work.weight != nullptr) args.norm_weight = vector_of(work.weight);
  const bool has_norm = work.weight != nullptr || keys.weight != nullptr;
  if (has_norm) args.epsilon = given_epsilon(work.weight != nullptr ? work.epsilon : keys.epsilon);
  args.magnitude *= work.factor;
  if (keys.rope != nullptr) {
    args.key_input = heads_of(*keys.input);
    args.key_output = keys.rows == nullptr ? heads_of(*keys.output) : rows_of_heads(*keys.output, args.key_input);
    if (keys.rows != nullptr) args.key_rows = numbers_of_rows(*keys.rows);
    if (keys.weight != nullptr) args.key_norm_weight = vector_of(keys.weight);
    args.key_magnitude = magnitude * keys.factor;
  }
  if (values.input != nullptr) {
    const int64_t head_dim = work.rope->ne[0];
    args.value_input = nvb_tensor_3d(values.input->data, traits(values.input->type).dtype, values.input->ne[1],
                                     values.input->ne[0] / head_dim, head_dim);
    args.value_output = rows_of_heads(*values.cache, args.value_input);
    args.value_rows = numbers_of_rows(*values.rows);
  }
  return nvb_rotary_embedding(device.backend(), &args, stream);
}

}  // namespace nvb_ggml
