// ROPE: rotary position embedding of [head_dim, heads, tokens, batch], innermost first.
#include "operations.hpp"
#include "tensor.hpp"

namespace nvb_ggml {
namespace {

// `parameters[2]`. Those with sections have four positions a token, and in parameters[11] to [14] how many pairs each
// turns.
constexpr int32_t kInterleavedMode = 0;
constexpr int32_t kHalfMode = 2;
constexpr int32_t kSectionsMode = 8;
constexpr int32_t kInterleavedSectionsMode = 40;
// The pairs are those of the whole head, of which parameters[1] is the half.
constexpr int32_t kVisionMode = 24;

// Sections begin anew with the first frequency; the host's loop does so behind a section without pairs only if no pair
// follows.
bool has_empty_section_before_another(const Tensor& node) {
  for (int i = 11; i < 14; ++i) {
    if (node.parameters[i] == 0 && node.parameters[i + 1] != 0) return true;
  }
  return false;
}

}  // namespace

bool rope_args(const Tensor& node, nvb_rotary_embedding_args& args) {
  const Tensor &input = *node.source[0], &positions = *node.source[1];
  const Tensor* factors = node.source[2];
  const int32_t mode = node.parameters[2];
  const int32_t rotated = node.parameters[1] * (mode == kVisionMode ? 2 : 1), first = node.parameters[15];
  const bool has_sections = mode == kSectionsMode || mode == kInterleavedSectionsMode || mode == kVisionMode;
  if (mode != kInterleavedMode && mode != kHalfMode && !has_sections) return false;
  if (!is_float(input.type) || !is_float(node.type) || !has_rows(input) || !has_rows(node)) return false;
  if (!has_element_strides(input) || !has_element_strides(node) || !same_shape(input, node)) return false;
  const int64_t tokens = input.ne[2];
  if (positions.type != TYPE_I32 || positions.ne[0] != (has_sections ? 4 * tokens : tokens)) return false;
  if (rotated <= 0 || rotated % 2 != 0 || first < 0 || first + rotated > input.ne[0] || input.ne[0] > 512) return false;
  if (factors != nullptr && (factors->type != TYPE_F32 || factors->ne[0] < rotated / 2 || !has_rows(*factors))) {
    return false;
  }
  nvb_rotary_embedding_args_init(&args);
  args.input = whole(input);
  args.output = whole(node);
  args.positions = nvb_tensor_1d(positions.data, NVB_DTYPE_I32, positions.ne[0]);
  args.positions.strides[0] = static_cast<int64_t>(positions.nb[0] / 4);
  if (factors != nullptr) args.frequency_factors = nvb_tensor_1d(factors->data, NVB_DTYPE_F32, factors->ne[0]);
  if (has_sections) {
    const int64_t stride = args.positions.strides[0];
    args.positions = nvb_tensor_2d(positions.data, NVB_DTYPE_I32, 4, tokens);
    args.positions.strides[0] = tokens * stride;
    args.positions.strides[1] = stride;
    int64_t total = 0;
    for (int i = 11; i < 15; ++i) total += node.parameters[i] < 0 ? 1024 : node.parameters[i];
    if (total == 0 || total > 256) return false;
    args.time_pairs = static_cast<uint32_t>(node.parameters[11]);
    args.height_pairs = static_cast<uint32_t>(node.parameters[12]);
    args.width_pairs = static_cast<uint32_t>(node.parameters[13]);
    args.extra_pairs = static_cast<uint32_t>(node.parameters[14]);
    args.section_order = mode == kSectionsMode              ? NVB_SECTIONS_CONSECUTIVE
                         : mode == kInterleavedSectionsMode ? NVB_SECTIONS_INTERLEAVED
                                                            : NVB_SECTIONS_INDEPENDENT;
    if (mode == kVisionMode && has_empty_section_before_another(node)) return false;
  }
  args.pairs = mode == kInterleavedMode ? NVB_ROTARY_INTERLEAVED : NVB_ROTARY_HALF;
  args.rotary_dim = static_cast<uint32_t>(rotated);
  args.first = static_cast<uint32_t>(first);
  args.original_positions = static_cast<uint32_t>(node.parameters[4]);
  args.base = float_parameter(node, 5);
  args.position_scale = float_parameter(node, 6);
  args.extension = float_parameter(node, 7);
  args.magnitude = float_parameter(node, 8);
  args.beta_fast = float_parameter(node, 9);
  args.beta_slow = float_parameter(node, 10);
  if (!(args.base > 0.0f) || !(args.position_scale > 0.0f) || !(args.magnitude > 0.0f)) return false;
  if (args.extension != 0.0f) {
    const bool is_yarn = args.extension > 0.0f && args.beta_fast > 0.0f && args.beta_slow > 0.0f && args.base != 1.0f;
    if (!is_yarn) return false;
  }
  return true;
}

bool rope(Step& step, const Tensor& node) {
  nvb_rotary_embedding_args args;
  if (!rope_args(node, args)) return false;
  step.queue([&] { return nvb_rotary_embedding(step.backend(), &args, step.stream); });
  return true;
}

}  // namespace nvb_ggml
