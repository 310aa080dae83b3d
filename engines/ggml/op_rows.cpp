// GET_ROWS as an embedding, SET_ROWS as a scatter of rows, ARGMAX, and ARGSORT and TOP_K as a sort.
#include "operations.hpp"
#include "tensor.hpp"

namespace nvb_ggml {

// node[i3, i2, i1] = table[i3, i2, rows[i3, i2, i1]]
bool get_rows(Step& step, const Tensor& node) {
  const Tensor& rows = *node.source[1];
  Tensor table = *node.source[0];
  const bool words = table.type == TYPE_I32 && node.type == TYPE_I32;
  // The library keeps every bit of an F32 row.
  if (words) table.type = TYPE_F32;
  if (!(is_float(table.type) || is_quantized(table.type)) || rows.type != TYPE_I32) return false;
  if (!words && node.type != TYPE_F32) return false;
  if (!has_rows(table) || !has_rows(rows) || !has_rows(node)) return false;
  if (!is_quantized(table.type) && !has_element_strides(table)) return false;
  if (table.ne[1] == 0 || table.ne[0] == 0) return false;
  const size_t row_bytes = traits(table.type).bytes * static_cast<size_t>(table.ne[0] / traits(table.type).block);
  if (table.ne[1] > 1 && table.nb[1] < row_bytes) return false;

  // Tables that lie one behind the other are parts of one: experts' weights of each token, of which a prompt has
  // hundreds.
  const bool follow = !is_quantized(table.type) && table.ne[3] == 1 && node.ne[3] == 1 && table.ne[2] > 1 &&
                      table.nb[2] == table.nb[1] * static_cast<size_t>(table.ne[1]) && rows_fold(node);
  if (follow) {
    step.queue([&] {
      const Weight made =
          step.device.weight({table.data, table.type, table.ne[1] * table.ne[2], table.ne[0], table.nb[1]});
      if (made == nullptr) return static_cast<nvb_status>(NVB_ERROR_MEMORY_ALLOCATION);
      nvb_embedding_args args;
      nvb_embedding_args_init(&args);
      args.tokens = nvb_tensor_2d(rows.data, NVB_DTYPE_I32, rows.ne[1], rows.ne[0]);
      args.tokens.strides[0] = static_cast<int64_t>(rows.nb[1] / 4);
      args.tokens.strides[1] = 1;
      args.table = made.get();
      args.output = folded(node);
      args.output.dtype = NVB_DTYPE_F32;
      return nvb_embedding(step.backend(), &args, step.stream);
    });
    return true;
  }
  for_outer(node, [&](int64_t i2, int64_t i3) {
    step.queue([&] {
      const char* data = static_cast<const char*>(table.data) + i2 * static_cast<int64_t>(table.nb[2]) +
                         i3 * static_cast<int64_t>(table.nb[3]);
      const Weight made = step.device.weight({data, table.type, table.ne[1], table.ne[0], table.nb[1]});
      if (made == nullptr) return static_cast<nvb_status>(NVB_ERROR_MEMORY_ALLOCATION);
      nvb_embedding_args args;
      nvb_embedding_args_init(&args);
      char* tokens =
          static_cast<char*>(rows.data) + i2 * static_cast<int64_t>(rows.nb[1]) + i3 * static_cast<int64_t>(rows.nb[2]);
      args.tokens = nvb_tensor_1d(tokens, NVB_DTYPE_I32, rows.ne[0]);
      args.table = made.get();
      args.output = rows_at(node, i2, i3);
      args.output.dtype = NVB_DTYPE_F32;
      return nvb_embedding(step.backend(), &args, step.stream);
    });
  });
  return true;
}

// node[i3, i2, rows[i3, i2, i1]] = source[i3, i2, i1], where `rows` repeats along the outer axes.
bool set_rows(Step& step, const Tensor& node) {
  const Tensor &from = *node.source[0], &rows = *node.source[1];
  const bool encodes = is_encoded(node.type);
  if (!is_float(from.type) || (rows.type != TYPE_I32 && rows.type != TYPE_I64)) return false;
  if (!encodes && !(is_float(node.type) && has_element_strides(node))) return false;
  if (!has_rows(from) || !has_rows(node) || !has_element_strides(from)) return false;
  if (!has_element_strides(rows) || rows.ne[3] != 1) return false;
  step.queue([&] {
    nvb_tensor numbers = nvb_tensor_3d(rows.data, NVB_DTYPE_I32, rows.ne[2], rows.ne[1], rows.ne[0]);
    // No row number needs more than the low half of 64 bits.
    for (int axis = 0; axis < 3; ++axis) numbers.strides[2 - axis] = static_cast<int64_t>(rows.nb[axis] / 4);
    if (encodes) return block_rows(step, whole(from), whole_blocks(node), &numbers, NVB_BLOCKS_ENCODE);
    nvb_scatter_rows_args args;
    nvb_scatter_rows_args_init(&args);
    args.input = whole(from);
    args.output = whole(node);
    args.rows = numbers;
    return nvb_scatter_rows(step.backend(), &args, step.stream);
  });
  return true;
}

bool sort_rows(Step& step, const Tensor& node, bool descending) {
  const Tensor& input = *node.source[0];
  if (!is_float(input.type) || node.type != TYPE_I32 || !has_rows(input) || !has_rows(node)) return false;
  if (!has_element_strides(input) || !has_element_strides(node) || node.ne[0] > input.ne[0]) return false;
  for (int axis = 1; axis < 4; ++axis) {
    if (input.ne[axis] != node.ne[axis]) return false;
  }
  step.queue([&] {
    nvb_sort_rows_args args;
    nvb_sort_rows_args_init(&args);
    args.input = whole(input);
    args.output = whole(node);
    args.order = descending ? NVB_ORDER_DESCENDING : NVB_ORDER_ASCENDING;
    return nvb_sort_rows(step.backend(), &args, step.stream);
  });
  return true;
}

bool arg_max(Step& step, const Tensor& node) {
  const Tensor& logits = *node.source[0];
  if (!is_float(logits.type) || node.type != TYPE_I32 || !has_rows(logits) || !rows_fold(logits)) return false;
  if (!has_element_strides(logits) || !is_contiguous(node)) return false;
  step.queue([&] {
    nvb_argmax_args args;
    nvb_argmax_args_init(&args);
    args.logits = folded(logits);
    args.tokens = nvb_tensor_1d(node.data, NVB_DTYPE_I32, args.logits.shape[0]);
    return nvb_argmax(step.backend(), &args, step.stream);
  });
  return true;
}

}  // namespace nvb_ggml
