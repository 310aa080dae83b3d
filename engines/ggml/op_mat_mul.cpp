// MUL_MAT: node[i, m, n] = Σ_k weight[i / ratio, n, k] · input[i, m, k], as products with weights that are read in
// place. MUL_MAT_ID: the weight of each row is one of several, by number. ADD_ID: rows of a matrix, by number, are
// added.
#include <algorithm>

#include "operations.hpp"
#include "packed_weights.hpp"
#include "tensor.hpp"

namespace nvb_ggml {
namespace {

bool is_weight(const Tensor& weight) {
  const TypeTraits type = traits(weight.type);
  if (!is_float(weight.type) && !is_quantized(weight.type)) return false;
  if (!has_rows(weight) || !has_element_strides_of_rows(weight)) return false;
  // A row that repeats, or rows that overlap, are no weight.
  return weight.ne[1] <= 1 || weight.nb[1] >= type.bytes * static_cast<size_t>(weight.ne[0] / type.block);
}

bool is_product(const Tensor& weight, const Tensor& input, const Tensor& node) {
  return is_weight(weight) && is_float(input.type) && node.type == TYPE_F32 && has_rows(input) && has_rows(node) &&
         has_element_strides(input);
}

// Whether the library has the blocks in the order of its products, which want inputs of 16 bits on a GPU.
bool is_packed(const Step& step, const Tensor& weight) {
  return !step.asks() && step.device.packed().holds(weight.data);
}

// Up to so many rows the kernels of the f32 units keep up with memory.
constexpr int64_t kMostRowsInF32 = 8;
// Up to so many rows of F32 a product with blocks takes no longer than of 16 bits, because a tensor core multiplies
// eight columns and a number of F32 makes two.
constexpr int64_t kMostRowsOfBlocksInF32 = 4;
// The type in which the library multiplies the input: of a float weight F32 or the weight's. On a GPU tensor cores have
// the latter alone.
int32_t input_type(const Step& step, const Tensor& node, const Tensor& weight, const Tensor& input) {
  if (is_packed(step, weight)) {
    const bool keeps = node.parameters[0] == PRECISION_F32 || input.type != TYPE_F32;
    return keeps || !step.device.rounds_to_halves() ? input.type : static_cast<int32_t>(TYPE_BF16);
  }
  if (is_quantized(weight.type)) {
    return rounds_input_of_blocks(step.device, node) && input.type == TYPE_F32 ? static_cast<int32_t>(TYPE_BF16)
                                                                               : input.type;
  }
  if (input.type == weight.type) return input.type;
  const bool is_half = weight.type == TYPE_F16 || weight.type == TYPE_BF16;
  const bool rounds = step.device.rounds_to_halves() && is_half && node.parameters[0] != PRECISION_F32 &&
                      input.ne[1] * input.ne[2] * input.ne[3] > kMostRowsInF32;
  return rounds ? weight.type : static_cast<int32_t>(TYPE_F32);
}

// An input of this type.
Tensor input_as(Step& step, const Tensor& input, int32_t type) {
  if (input.type == type) return input;
  ScratchPlan plan;
  plan.place(static_cast<size_t>(elements(input)) * traits(type).bytes);
  const Tensor floats = in_one_piece(input, type, traits(type).bytes, step.scratch(plan));
  step.queue([&] { return convert(step, input, whole(floats)); });
  return floats;
}

// An input that the library multiplies with the weight.
Tensor input_for(Step& step, const Tensor& node, const Tensor& weight, const Tensor& input) {
  return input_as(step, input, input_type(step, node, weight, input));
}

// From so many rows on a GPU multiplies decoded weights: its kernels for blocks take no more at a time.
constexpr int64_t kLeastRowsToDecode = 17;
// Elements that are decoded at a time: 64 MiB, of which a part stays in L2 for its product.
constexpr int64_t kMostDecoded = int64_t{1} << 25;

bool is_worth_decoding(const Step& step, const Tensor& weight, const Tensor& input, const Tensor& node) {
  const int64_t rows = input.ne[1] * input.ne[2] * input.ne[3];
  return step.device.rounds_to_halves() && is_quantized(weight.type) && weight.ne[2] == 1 && weight.ne[3] == 1 &&
         rows_fold(input) && rows_fold(node) && rows >= kLeastRowsToDecode && node.parameters[0] != PRECISION_F32 &&
         !is_packed(step, weight);
}

Weight weight_at(const Step& step, const Tensor& weight, int64_t w2, int64_t w3, int64_t rows) {
  const char* data = static_cast<const char*>(weight.data) + w2 * static_cast<int64_t>(weight.nb[2]) +
                     w3 * static_cast<int64_t>(weight.nb[3]);
  return step.device.weight({data, weight.type, rows, weight.ne[0], weight.nb[1]});
}

// A product with slices of a quantised weight that become BF16, as does the input: floats of that range hold what F32
// activations do.
void decoded_product(Step& step, const Tensor& weight, const Tensor& input, const Tensor& node) {
  const TypeTraits half = traits(TYPE_BF16);
  const int64_t columns = weight.ne[0], rows = weight.ne[1];
  const int64_t most = std::min(rows, std::max<int64_t>(1, kMostDecoded / columns));
  ScratchPlan plan;
  const size_t input_at = plan.place(input.type == TYPE_BF16 ? 0 : static_cast<size_t>(elements(input)) * half.bytes);
  const size_t weight_at = plan.place(static_cast<size_t>(most * columns) * half.bytes);
  char* memory = step.scratch(plan);
  Tensor halves = input;
  if (input.type != TYPE_BF16) {
    halves = in_one_piece(input, TYPE_BF16, half.bytes, memory + input_at);
    step.queue([&] { return convert(step, input, whole(halves)); });
  }
  for (int64_t first = 0; first < rows; first += most) {
    Tensor part = weight;
    part.ne[1] = std::min(most, rows - first);
    part.data = static_cast<char*>(weight.data) + first * static_cast<int64_t>(weight.nb[1]);
    const Tensor decoded = in_one_piece(part, TYPE_BF16, half.bytes, memory + weight_at);
    step.queue([&] { return convert(step, part, whole(decoded)); });
    step.queue([&] {
      const Weight made = step.device.weight({decoded.data, TYPE_BF16, part.ne[1], columns, decoded.nb[1]});
      if (made == nullptr) return static_cast<nvb_status>(NVB_ERROR_MEMORY_ALLOCATION);
      nvb_linear_args args;
      nvb_linear_args_init(&args);
      args.input = folded(halves);
      args.weight = made.get();
      args.output = folded(node);
      args.output.data = static_cast<float*>(args.output.data) + first;
      args.output.shape[1] = part.ne[1];
      return nvb_linear(step.backend(), &args, step.stream);
    });
  }
}

// From so many rows on the library may multiply blocks of experts on tensor cores for an input of 16 bits, with the
// rows sorted by expert; fewer it multiplies one by one, which an F32 input serves as well.
constexpr int64_t kLeastRowsToSort = 64;

// BF16 where the library makes use of it, as decoded_product does.
int32_t expert_input_type(const Step& step, const Tensor& node, const Tensor& weight, const Tensor& input,
                          int64_t rows) {
  const bool rounds = step.device.rounds_to_halves() && is_quantized(weight.type) && input.type == TYPE_F32 &&
                      node.parameters[0] != PRECISION_F32 && rows >= kLeastRowsToSort;
  return rounds ? static_cast<int32_t>(TYPE_BF16) : input_type(step, node, weight, input);
}

}  // namespace

bool rounds_input_of_blocks(const DeviceState& device, const Tensor& node) {
  const Tensor& input = *node.source[1];
  return device.rounds_to_halves() && node.parameters[0] != PRECISION_F32 &&
         input.ne[1] * input.ne[2] * input.ne[3] > kMostRowsOfBlocksInF32;
}

bool mat_mul(Step& step, const Tensor& node) {
  const Tensor& weight = *node.source[0];
  if (!is_product(weight, *node.source[1], node)) return false;
  if (is_worth_decoding(step, weight, *node.source[1], node)) {
    decoded_product(step, weight, *node.source[1], node);
    return true;
  }
  const Tensor input = input_for(step, node, weight, *node.source[1]);

  const auto product = [&](int64_t w2, int64_t w3, const nvb_tensor& x, const nvb_tensor& y) {
    step.queue([&] {
      const Weight made = weight_at(step, weight, w2, w3, weight.ne[1]);
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

bool mat_mul_id(Step& step, const Tensor& node) {
  const Tensor &weight = *node.source[0], &ids = *node.source[2];
  if (!is_product(weight, *node.source[1], node) || ids.type != TYPE_I32 || !has_element_strides(ids)) return false;
  // Experts that lie apart are no stacked weight.
  if (weight.ne[3] != 1 || (weight.ne[2] != 1 && weight.nb[2] != weight.nb[1] * static_cast<size_t>(weight.ne[1])))
    return false;
  if (!rows_fold(*node.source[1]) || !rows_fold(node) || node.ne[3] != 1) return false;
  const Tensor& given = *node.source[1];
  const Tensor input = input_as(step, given, expert_input_type(step, node, weight, given, ids.ne[0] * ids.ne[1]));
  step.queue([&] {
    const Weight made = weight_at(step, weight, 0, 0, weight.ne[1] * weight.ne[2]);
    if (made == nullptr) return static_cast<nvb_status>(NVB_ERROR_MEMORY_ALLOCATION);
    nvb_grouped_linear_args args;
    nvb_grouped_linear_args_init(&args);
    args.input = folded(input);
    args.weight = made.get();
    args.experts = static_cast<uint32_t>(weight.ne[2]);
    args.expert_ids = numbers(ids);
    args.output = folded(node);
    return nvb_grouped_linear(step.backend(), &args, step.stream);
  });
  return true;
}

// node[t, u] = first[t, u] + second[ids[t, u]]
bool add_id(Step& step, const Tensor& node) {
  const Tensor &first = *node.source[0], &second = *node.source[1], &ids = *node.source[2];
  if (!is_float(first.type) || !is_weight(second) || !is_float(node.type) || ids.type != TYPE_I32) return false;
  if (!has_element_strides(first) || !has_element_strides(node) || !has_element_strides(ids)) return false;
  if (!same_shape(first, node) || node.ne[3] != 1 || second.ne[2] != 1 || second.ne[3] != 1) return false;
  const int64_t rows = node.ne[1] * node.ne[2];
  ScratchPlan plan;
  const size_t ids_at = plan.place(static_cast<size_t>(rows) * sizeof(int32_t));
  const size_t rows_at = plan.place(static_cast<size_t>(rows * node.ne[0]) * sizeof(float));
  char* memory = step.scratch(plan);
  const nvb_tensor gathered = nvb_tensor_3d(memory + rows_at, NVB_DTYPE_F32, node.ne[2], node.ne[1], node.ne[0]);
  step.queue([&] {
    const nvb_tensor flat = nvb_tensor_2d(memory + ids_at, NVB_DTYPE_I32, node.ne[2], node.ne[1]);
    return pointwise(step, NVB_POINTWISE_COPY, numbers(ids), nullptr, flat);
  });
  step.queue([&] {
    const Weight table = weight_at(step, second, 0, 0, second.ne[1]);
    if (table == nullptr) return static_cast<nvb_status>(NVB_ERROR_MEMORY_ALLOCATION);
    nvb_embedding_args args;
    nvb_embedding_args_init(&args);
    args.tokens = nvb_tensor_1d(memory + ids_at, NVB_DTYPE_I32, rows);
    args.table = table.get();
    args.output = nvb_tensor_2d(memory + rows_at, NVB_DTYPE_F32, rows, node.ne[0]);
    return nvb_embedding(step.backend(), &args, step.stream);
  });
  step.queue([&] { return pointwise(step, NVB_POINTWISE_ADD, whole(first), &gathered, whole(node)); });
  return true;
}

}  // namespace nvb_ggml
