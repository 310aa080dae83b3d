// FLASH_ATTN_EXT: softmax(cap(scale · Q·Kᵀ) + slope · mask) · V of a batch of sequences, all of whose keys a query sees
// that the mask does not hide, with sinks.
//
// Keys and values in quantised types, or in two types, become floats in scratch memory. The library adds a mask of
// floats. ALiBi's slopes make one for each head of it, in scratch memory, and sinks follow from the logarithm of the
// sums: a row with the sum e^lse becomes one with e^lse + e^sink by the factor 1 / (1 + e^(sink − lse)).
#include <cmath>

#include "operations.hpp"
#include "tensor.hpp"

namespace nvb_ggml {
namespace {

constexpr int64_t kMostKeyElements = 576;
constexpr int64_t kMostValueElements = 512;

struct Inputs {
  const Tensor& query;
  const Tensor& key;
  const Tensor& value;
  const Tensor* mask;
  const Tensor* sinks;
  float scale, alibi_bias, soft_cap;

  int64_t batch() const { return query.ne[3]; }
  int64_t rows() const { return query.ne[1]; }
  int64_t heads() const { return query.ne[2]; }
  int64_t keys() const { return key.ne[1]; }
};

// [batch, tokens, heads, elements] of a tensor [elements, tokens, heads, batch], innermost first, of which `ratio`
// neighbouring places of a batch read one.
nvb_tensor sequences(const Tensor& tensor, int64_t batch) {
  nvb_tensor all = whole(tensor);
  std::swap(all.shape[1], all.shape[2]);
  std::swap(all.strides[1], all.strides[2]);
  if (all.shape[0] == 1) all.strides[0] = 0;
  all.shape[0] = batch;
  return all;
}

bool is_taken(const Inputs& in, const Tensor& node) {
  if (in.scale <= 0.0f || in.soft_cap < 0.0f || in.alibi_bias < 0.0f) return false;
  if (in.query.type != TYPE_F32 || !is_float(node.type)) return false;
  for (const Tensor* tensor : {&in.query, &in.key, &in.value}) {
    if (!has_rows(*tensor)) return false;
    if (!is_quantized(tensor->type) && (!is_float(tensor->type) || !has_element_strides(*tensor))) return false;
  }
  if (!is_contiguous(node) || in.key.ne[0] > kMostKeyElements || in.value.ne[0] > kMostValueElements) return false;
  if (in.keys() == 0 || in.key.ne[2] == 0 || in.heads() % in.key.ne[2] != 0) return false;
  if (in.key.ne[2] != in.value.ne[2] || in.value.ne[1] != in.keys()) return false;
  // Of several sequences that several places of the batch share no view is made.
  for (const Tensor* tensor : {&in.key, &in.value}) {
    if (tensor->ne[3] != 1 && tensor->ne[3] != in.batch()) return false;
  }
  if (in.mask != nullptr) {
    const Tensor& mask = *in.mask;
    if (!is_float(mask.type) || !has_rows(mask) || !has_element_strides(mask)) return false;
    if (mask.ne[0] < in.keys() || mask.ne[1] < in.rows()) return false;
    if (mask.ne[2] != 1 && mask.ne[2] != in.heads()) return false;
    if (mask.ne[3] != 1 && mask.ne[3] != in.batch()) return false;
  } else if (in.alibi_bias != 0.0f) {
    return false;
  }
  const Tensor* sinks = in.sinks;
  return sinks == nullptr || (sinks->type == TYPE_F32 && sinks->ne[0] == in.heads() && is_contiguous(*sinks));
}

// Whether keys or values are read where they lie: floats of one type.
bool are_read_in_place(const Inputs& in) {
  return is_float(in.key.type) && in.key.type == in.value.type;
}

// The dtype that other keys and values become. On a GPU it is one that tensor cores multiply.
TypeTraits converted_type(const Step& step) {
  return traits(step.device.is_cpu() ? TYPE_F32 : TYPE_F16);
}

// From so many rows on queries become the type of the keys on a GPU: its tensor cores multiply two operands of one
// type, and fewer rows have a kernel that does not round them.
constexpr int64_t kLeastRowsToRound = 65;

// The type that queries are rounded to; F32 if they stay as they are.
int32_t query_type(const Step& step, const Inputs& in) {
  const int32_t key = are_read_in_place(in) ? in.key.type : static_cast<int32_t>(TYPE_F16);
  const bool rounds = step.device.rounds_to_halves() && in.rows() >= kLeastRowsToRound && key != TYPE_F32;
  return rounds ? key : static_cast<int32_t>(TYPE_F32);
}

// Queries in a type of 16 bits in `memory`, token by token with all of its heads.
Tensor by_tokens(const Tensor& from, int32_t type, void* memory) {
  Tensor to = from;
  to.type = type;
  to.data = memory;
  to.nb[0] = 2;
  to.nb[2] = to.nb[0] * static_cast<size_t>(from.ne[0]);
  to.nb[1] = to.nb[2] * static_cast<size_t>(from.ne[2]);
  to.nb[3] = to.nb[1] * static_cast<size_t>(from.ne[1]);
  return to;
}

// Keys or values as floats in `memory`: [batch, tokens, heads, elements].
nvb_tensor converted(Step& step, const Tensor& from, int64_t batch, void* memory) {
  const uint32_t dtype = converted_type(step).dtype;
  nvb_tensor all = nvb_tensor_make(memory, dtype, 4, from.ne[3], from.ne[2], from.ne[1], from.ne[0]);
  step.queue([&] { return convert(step, from, all); });
  all.strides[3] = 1;
  for (int axis = 2; axis >= 0; --axis) all.strides[axis] = all.strides[axis + 1] * all.shape[axis + 1];
  std::swap(all.shape[1], all.shape[2]);
  std::swap(all.strides[1], all.strides[2]);
  if (all.shape[0] == 1) all.strides[0] = 0;
  all.shape[0] = batch;
  return all;
}

// What multiplies the mask of a head (Press, Smith and Lewis 2022).
float slope(float bias, int64_t heads, int64_t head) {
  int64_t power = 1;
  while (2 * power <= heads) power *= 2;
  const double exponent = head < power ? static_cast<double>(bias) / power * (head + 1)
                                       : static_cast<double>(bias) / 2 / power * (2 * (head - power) + 1);
  return static_cast<float>(std::exp2(-exponent));
}

// The mask [batch, heads, rows, keys] as the node has it.
nvb_tensor mask_of(const Inputs& in) {
  nvb_tensor mask = whole(*in.mask);
  mask.shape[2] = in.rows();
  mask.shape[3] = in.keys();
  return mask;
}

// A mask for each head, F32, in `memory`.
nvb_tensor scaled_mask(Step& step, const Inputs& in, void* memory) {
  const nvb_tensor mask = mask_of(in);
  nvb_tensor all = nvb_tensor_make(memory, NVB_DTYPE_F32, 4, mask.shape[0], in.heads(), mask.shape[2], mask.shape[3]);
  for (int64_t head = 0; head < in.heads(); ++head) {
    nvb_tensor from = mask, to = all;
    from.shape[1] = to.shape[1] = 1;
    to.strides[3] = 1;
    to.strides[2] = all.shape[3];
    to.strides[1] = to.strides[2] * all.shape[2];
    to.strides[0] = to.strides[1] * all.shape[1];
    to.data = static_cast<char*>(memory) + head * to.strides[1] * 4;
    if (mask.shape[1] != 1) {
      from.data = static_cast<char*>(mask.data) + head * static_cast<int64_t>(in.mask->nb[2]);
    }
    step.queue([&] {
      return pointwise(step, NVB_POINTWISE_SCALE, from, nullptr, to, slope(in.alibi_bias, in.heads(), head));
    });
  }
  return all;
}

// Multiplies the rows of the output by what the sinks leave of their weights; `lse` becomes those factors.
void add_sinks(Step& step, const Inputs& in, nvb_tensor lse, const nvb_tensor& output) {
  lse = nvb_tensor_make(lse.data, NVB_DTYPE_F32, 4, in.batch(), in.rows(), in.heads(), int64_t{1});
  const nvb_tensor sinks =
      nvb_tensor_make(in.sinks->data, NVB_DTYPE_F32, 4, int64_t{1}, int64_t{1}, in.heads(), int64_t{1});
  step.queue([&] { return pointwise(step, NVB_POINTWISE_SUBTRACT, lse, &sinks, lse); });
  step.queue([&] { return pointwise(step, NVB_POINTWISE_SIGMOID, lse, nullptr, lse); });
  step.queue([&] { return pointwise(step, NVB_POINTWISE_MULTIPLY, output, &lse, output); });
}

}  // namespace

bool flash_attention(Step& step, const Tensor& node) {
  const Inputs in{*node.source[0], *node.source[1],          *node.source[2],          node.source[3],
                  node.source[4],  float_parameter(node, 0), float_parameter(node, 1), float_parameter(node, 2)};
  if (!is_taken(in, node)) return false;
  const bool has_slopes = in.mask != nullptr && in.alibi_bias != 0.0f;
  ScratchPlan plan;
  const size_t mask_at = plan.place(has_slopes ? in.mask->ne[3] * in.heads() * in.rows() * in.keys() * 4 : 0);
  const size_t lse_at = plan.place(in.sinks != nullptr ? in.batch() * in.rows() * in.heads() * 4 : 0);
  const bool in_place = are_read_in_place(in);
  const size_t float_bytes = in_place ? 0 : converted_type(step).bytes;
  const size_t key_at = plan.place(float_bytes * static_cast<size_t>(elements(in.key)));
  const size_t value_at = plan.place(float_bytes * static_cast<size_t>(elements(in.value)));
  const int32_t rounded = query_type(step, in);
  const bool rounds = rounded != TYPE_F32;
  const size_t query_at = plan.place(rounds ? static_cast<size_t>(elements(in.query)) * 2 : 0);
  // That kernel's output has the type of the keys, or F32.
  const bool widens = rounds && node.type != TYPE_F32 && node.type != rounded;
  const size_t output_at = plan.place(widens ? static_cast<size_t>(elements(node)) * sizeof(float) : 0);
  char* memory = step.scratch(plan);

  nvb_attention_prefill_args args;
  nvb_attention_prefill_args_init(&args);
  Tensor query = in.query;
  if (rounds) {
    query = by_tokens(in.query, rounded, memory + query_at);
    step.queue([&] { return convert(step, in.query, whole(query)); });
  }
  args.query = sequences(query, in.batch());
  // The kernel wants rows of one sequence behind those of another in queries and outputs alike, of one sequence too.
  if (rounds) args.query.strides[0] = static_cast<int64_t>(query.nb[3]) / 2;
  args.key = in_place ? sequences(in.key, in.batch()) : converted(step, in.key, in.batch(), memory + key_at);
  args.value = in_place ? sequences(in.value, in.batch()) : converted(step, in.value, in.batch(), memory + value_at);
  const Tensor output = widens ? in_one_piece(node, TYPE_F32, sizeof(float), memory + output_at) : node;
  args.output =
      nvb_tensor_make(output.data, traits(output.type).dtype, 4, in.batch(), in.rows(), in.heads(), in.value.ne[0]);
  if (has_slopes) {
    args.mask = scaled_mask(step, in, memory + mask_at);
  } else if (in.mask != nullptr) {
    args.mask = mask_of(in);
  }
  if (in.sinks != nullptr) {
    args.lse = nvb_tensor_3d(memory + lse_at, NVB_DTYPE_F32, in.batch(), in.rows(), in.heads());
  }
  const nvb_attention* attention = step.device.attention(
      {static_cast<uint32_t>(in.heads()), static_cast<uint32_t>(in.key.ne[2]), static_cast<uint32_t>(in.query.ne[0]),
       static_cast<uint32_t>(in.value.ne[0]), in.scale, in.soft_cap});
  if (step.asks()) {
    // The library knows which shapes the device has a kernel for.
    nvb_attention_plan found;
    nvb_attention_plan_init(&found);
    return attention != nullptr && nvb_attention_get_plan(attention, &args, nullptr, &found) == NVB_OK &&
           found.kernel[0] != '\0';
  }
  step.queue([&] {
    // Its options were accepted when the node was.
    if (attention == nullptr) return static_cast<nvb_status>(NVB_ERROR_MEMORY_ALLOCATION);
    return nvb_attention_prefill(attention, &args, step.stream);
  });
  if (in.sinks != nullptr) add_sinks(step, in, args.lse, args.output);
  if (widens) step.queue([&] { return convert(step, output, whole(node)); });
  return true;
}

}  // namespace nvb_ggml
