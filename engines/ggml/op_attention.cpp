// FLASH_ATTN_EXT: every query of a batch against all of its keys.
#include <vector>

#include "operations.hpp"
#include "tensor.hpp"

namespace nvb_ggml {
namespace {

// [tokens, heads, head_dim] of one place of the batch.
nvb_tensor heads_at(const Tensor& tensor, int64_t batch) {
  const TypeTraits type = traits(tensor.type);
  char* data = static_cast<char*>(tensor.data) + batch * static_cast<int64_t>(tensor.nb[3]);
  nvb_tensor heads = nvb_tensor_3d(data, type.dtype, tensor.ne[1], tensor.ne[2], tensor.ne[0]);
  heads.strides[0] = static_cast<int64_t>(tensor.nb[1] / type.bytes);
  heads.strides[1] = static_cast<int64_t>(tensor.nb[2] / type.bytes);
  heads.strides[2] = 1;
  return heads;
}

}  // namespace

bool flash_attention(Step& step, const Tensor& node) {
  const Tensor &query = *node.source[0], &key = *node.source[1], &value = *node.source[2];
  const bool masked = node.source[3] != nullptr, has_sinks = node.source[4] != nullptr;
  const float scale = float_parameter(node, 0), max_bias = float_parameter(node, 1);
  const float soft_cap = float_parameter(node, 2);
  if (masked || has_sinks || max_bias != 0.0f || scale == 0.0f) return false;
  if (!is_float(key.type) || value.type != key.type || node.type != TYPE_F32) return false;
  if (query.type != TYPE_F32 && query.type != key.type) return false;
  for (const Tensor* tensor : {&query, &key, &value}) {
    if (!has_rows(*tensor) || !has_element_strides(*tensor)) return false;
  }
  if (!is_contiguous(node) || value.ne[0] != key.ne[0] || query.ne[0] > 512 || key.nb[1] != value.nb[1]) return false;
  // The library's sequences have at least as many keys as queries.
  if (key.ne[1] < query.ne[1] || query.ne[2] % key.ne[2] != 0 || key.ne[2] != value.ne[2]) return false;
  if (key.ne[3] == 0 || query.ne[3] % key.ne[3] != 0) return false;

  const int64_t ratio = query.ne[3] / key.ne[3];
  for (int64_t batch = 0; batch < query.ne[3]; ++batch) {
    step.queue([&] {
      const nvb_attention* attention =
          step.device.attention({static_cast<uint32_t>(query.ne[2]), static_cast<uint32_t>(key.ne[2]),
                                 static_cast<uint32_t>(query.ne[0]), scale, soft_cap});
      if (attention == nullptr) return static_cast<nvb_status>(NVB_ERROR_ATTENTION);
      const int32_t query_starts[2] = {0, static_cast<int32_t>(query.ne[1])};
      const int32_t key_starts[2] = {0, static_cast<int32_t>(key.ne[1])};
      nvb_attention_prefill_args args;
      nvb_attention_prefill_args_init(&args);
      args.query = heads_at(query, batch);
      args.key = heads_at(key, batch / ratio);
      args.value = heads_at(value, batch / ratio);
      // The node is [head_dim, heads, tokens] innermost first.
      char* output = static_cast<char*>(node.data) + batch * static_cast<int64_t>(node.nb[3]);
      args.output = nvb_tensor_3d(output, NVB_DTYPE_F32, query.ne[1], query.ne[2], query.ne[0]);
      args.query_starts = query_starts;
      args.key_starts = key_starts;
      args.sequence_count = 1;
      return nvb_attention_prefill(attention, &args, step.stream);
    });
  }
  return true;
}

}  // namespace nvb_ggml
