// Results that lie one behind the other, which the host adds up two by two: llama.cpp has a chain of additions for the
// experts of a token, seven short kernels a layer where eight are used.
#include "graph_plan.hpp"
#include "tensor.hpp"

namespace nvb_ggml {
namespace {

// Fewer additions cost no more by themselves.
constexpr int64_t kLeastSummed = 4;
// Of a sum. sum_rows gives each a warp, and more of them take longer than the additions do.
constexpr int64_t kMostElements = int64_t{1} << 16;

bool is_plain_matrix(const Tensor& tensor) {
  return tensor.type == TYPE_F32 && has_rows(tensor) && has_element_strides(tensor) && tensor.ne[2] == 1 &&
         tensor.ne[3] == 1;
}

// All of them: as many matrices of the first one's extents.
Tensor stacked(const SumWork& work) {
  Tensor all = *work.first;
  all.ne[2] = work.count;
  all.nb[2] = work.stride;
  return all;
}

}  // namespace

// The number of additions, from the first on, that become one sum; 0 if they do not.
size_t GraphPlan::join_sum(size_t first, Work& work) const {
  // Results of products may lie elsewhere, as those of a stack.
  const auto is_product = [&](const Tensor& tensor) {
    return host_->op(tensor.view_source == nullptr ? tensor : *tensor.view_source) == Op::MatMul;
  };
  const auto is_addition = [&](size_t place) {
    if (place >= nodes_.size() || host_->op(*nodes_[place]) != Op::Add) return false;
    const Tensor &node = *nodes_[place], &one = *node.source[0], &other = *node.source[1];
    return is_plain_matrix(node) && is_plain_matrix(one) && is_plain_matrix(other) && same_shape(node, one) &&
           same_shape(node, other) && !is_product(one) && !is_product(other);
  };
  if (!is_addition(first)) return 0;
  SumWork sum;
  sum.first = nodes_[first]->source[0];
  const auto begin = reinterpret_cast<uintptr_t>(sum.first->data),
             second = reinterpret_cast<uintptr_t>(nodes_[first]->source[1]->data);
  if (second <= begin || (second - begin) % sizeof(float) != 0) return 0;
  sum.stride = second - begin;
  sum.output = nodes_[first];
  sum.count = 2;
  const auto follows = [&](const Tensor& tensor) {
    return reinterpret_cast<uintptr_t>(tensor.data) == begin + static_cast<size_t>(sum.count) * sum.stride &&
           tensor.nb[1] == sum.first->nb[1];
  };
  if (nodes_[first]->source[1]->nb[1] != sum.first->nb[1]) return 0;
  size_t next = first + 1;
  for (; is_addition(next); ++next, ++sum.count) {
    if (nodes_[next]->source[0] != sum.output || !follows(*nodes_[next]->source[1])) break;
    if (!is_read_by_next_alone(sum.output)) break;
    sum.output = nodes_[next];
  }
  const Tensor all = stacked(sum);
  const bool fits = sum.count >= kLeastSummed && elements(*sum.output) <= kMostElements && are_apart(all, *sum.output);
  if (!fits) return 0;
  work.kind = Work::Kind::Sum;
  work.sum = sum;
  return next - first;
}

nvb_status run_sum(const DeviceState& device, nvb_stream* stream, const SumWork& work) {
  const Tensor all = stacked(work);
  const auto in_floats = [](size_t bytes) { return static_cast<int64_t>(bytes / sizeof(float)); };
  nvb_sum_rows_args args;
  nvb_sum_rows_args_init(&args);
  args.input = nvb_tensor_3d(all.data, NVB_DTYPE_F32, all.ne[1], all.ne[0], all.ne[2]);
  args.input.strides[0] = in_floats(all.nb[1]);
  args.input.strides[1] = 1;
  args.input.strides[2] = in_floats(all.nb[2]);
  args.output = nvb_tensor_3d(work.output->data, NVB_DTYPE_F32, all.ne[1], all.ne[0], 1);
  args.output.strides[0] = in_floats(work.output->nb[1]);
  args.output.strides[1] = args.output.strides[2] = 1;
  args.scale = 1.0f;
  return nvb_sum_rows(device.backend(), &args, stream);
}

}  // namespace nvb_ggml
