#include "graph_plan.hpp"

#include <algorithm>

#include "operations.hpp"
#include "own_memory.hpp"
#include "packed_weights.hpp"
#include "tensor.hpp"

namespace nvb_ggml {
namespace {

// A vector that multiplies every row of `rows`.
bool is_weight_of(const Tensor& weight, const Tensor& rows) {
  return is_float(weight.type) && is_contiguous(weight) && weight.ne[0] == rows.ne[0] && elements(weight) == rows.ne[0];
}

// The other factor of a product, or addend of a sum, one of which is `tensor`; NULL if none is, or both are.
const Tensor* other_operand(const Tensor& node, const Tensor* tensor) {
  if (node.source[0] == node.source[1]) return nullptr;
  if (node.source[0] == tensor) return node.source[1];
  return node.source[1] == tensor ? node.source[0] : nullptr;
}

bool is_plain_f32(const Tensor& tensor) {
  return tensor.type == TYPE_F32 && has_rows(tensor) && has_element_strides(tensor);
}

}  // namespace

bool GraphPlan::is_read_by_next_alone(const Tensor* tensor) const {
  return (tensor->flags & TENSOR_FLAG_OUTPUT) == 0 && host_->uses(graph_, tensor) == 1;
}

// The number of nodes, from the first on, that become one norm; 0 if they do not.
size_t GraphPlan::join_norm(size_t first, Work& work) const {
  const auto op_at = [&](size_t place) { return place < nodes_.size() ? host_->op(*nodes_[place]) : Op::Unknown; };
  const auto node_at = [&](size_t place) { return nodes_[place]; };
  // norm(input) · weight from `place` on: the weight, or NULL.
  const auto weight_at = [&](size_t place) -> const Tensor* {
    if (op_at(place) != Op::RmsNorm || op_at(place + 1) != Op::Mul) return nullptr;
    const Tensor *norm = node_at(place), *product = node_at(place + 1);
    const Tensor* weight = other_operand(*product, norm);
    const bool fits = weight != nullptr && is_read_by_next_alone(norm) && is_weight_of(*weight, *norm) &&
                      same_shape(*norm, *product) && is_plain_f32(*norm) && is_plain_f32(*product);
    return fits ? weight : nullptr;
  };
  const auto is_sum = [&](size_t place) {
    return op_at(place) == Op::Add && is_plain_f32(*node_at(place)) && is_plain_f32(*node_at(place)->source[0]) &&
           is_plain_f32(*node_at(place)->source[1]) && same_shape(*node_at(place), *node_at(place)->source[0]) &&
           same_shape(*node_at(place), *node_at(place)->source[1]);
  };
  // Adds the norm of the sum that ends before `place`.
  const auto with_output = [&](const NormWork& sum, size_t place) {
    NormWork whole = sum;
    const Tensor* weight = weight_at(place);
    if (weight == nullptr || node_at(place)->source[0] != sum.sum) return NormWork();
    const float epsilon = float_parameter(*node_at(place), 0);
    if (sum.post_weight != nullptr && (sum.post_weight->type != weight->type || sum.epsilon != epsilon)) {
      return NormWork();
    }
    whole.weight = weight;
    whole.output = node_at(place + 1);
    whole.epsilon = epsilon;
    return whole;
  };
  const auto found = [&](const NormWork& norm, size_t count) {
    if (norm.input == nullptr || !fits_one_call(*host_, norm)) return size_t{0};
    work.kind = Work::Kind::Norm;
    work.norm = norm;
    return count;
  };

  if (is_sum(first)) {
    // input + residual, and the norm of it; the host may compute the sum in the place of either.
    const Tensor* sum = node_at(first);
    NormWork norm;
    norm.input = sum->source[0];
    norm.residual = sum->source[1];
    norm.sum = sum;
    return found(with_output(norm, first + 1), 3);
  }
  const Tensor* weight = weight_at(first);
  if (weight == nullptr) return 0;
  NormWork alone;
  alone.input = node_at(first)->source[0];
  alone.weight = weight;
  alone.output = node_at(first + 1);
  alone.epsilon = float_parameter(*node_at(first), 0);
  if (is_sum(first + 2) && is_read_by_next_alone(alone.output)) {
    NormWork post;
    post.input = alone.input;
    post.post_weight = weight;
    post.residual = other_operand(*node_at(first + 2), alone.output);
    post.sum = node_at(first + 2);
    post.epsilon = alone.epsilon;
    if (post.residual != nullptr) {
      if (const size_t count = found(with_output(post, first + 3), 5)) return count;
      if (const size_t count = found(post, 3)) return count;
    }
  }
  return found(alone, 2);
}

// The same of a rotation: norm and its weight, rotation, factor, rows of a cache, of which all but the rotation may
// lack.
size_t GraphPlan::join_rotation(size_t first, Work& work) const {
  const auto op_at = [&](size_t place) { return place < nodes_.size() ? host_->op(*nodes_[place]) : Op::Unknown; };
  size_t place = first;
  RotationWork rotation;
  if (op_at(place) == Op::RmsNorm && op_at(place + 1) == Op::Mul && op_at(place + 2) == Op::Rope) {
    const Tensor *norm = nodes_[place], *product = nodes_[place + 1];
    rotation.weight = other_operand(*product, norm);
    if (rotation.weight == nullptr || !is_weight_of(*rotation.weight, *norm)) return 0;
    if (!is_read_by_next_alone(norm) || !is_read_by_next_alone(product) || !same_shape(*norm, *product)) return 0;
    if (nodes_[place + 2]->source[0] != product) return 0;
    rotation.input = norm->source[0];
    rotation.epsilon = float_parameter(*norm, 0);
    place += 2;
  }
  if (op_at(place) != Op::Rope) return 0;
  rotation.rope = rotation.output = nodes_[place];
  if (rotation.input == nullptr) rotation.input = rotation.rope->source[0];
  ++place;
  const Tensor* last = rotation.output;
  if (op_at(place) == Op::Scale && nodes_[place]->source[0] == last && is_read_by_next_alone(last) &&
      float_parameter(*nodes_[place], 1) == 0.0f && float_parameter(*nodes_[place], 0) > 0.0f &&
      rotation.rope->parameters[1] == last->ne[0] && is_plain_f32(*nodes_[place])) {
    rotation.factor = float_parameter(*nodes_[place], 0);
    rotation.output = last = nodes_[place++];
  }
  if (op_at(place) == Op::SetRows && is_read_by_next_alone(last)) {
    // Its rows are a view of the heads of each token.
    const Tensor &cache = *nodes_[place], &from = *cache.source[0], &rows = *cache.source[1];
    const bool is_view = &from == last || (from.view_source == last && is_read_by_next_alone(&from));
    const bool fits = is_view && from.data == last->data && is_contiguous(from) && is_contiguous(*last) &&
                      from.ne[0] == last->ne[0] * last->ne[1] && from.ne[1] == last->ne[2] && last->ne[3] == 1 &&
                      from.ne[2] == 1 && from.ne[3] == 1 && is_float(cache.type) && has_rows(cache) &&
                      has_element_strides(cache) && cache.ne[2] == 1 && cache.ne[3] == 1 && rows.ne[1] == 1 &&
                      rows.ne[2] == 1;
    if (fits) {
      rotation.output = &cache;
      rotation.rows = &rows;
      ++place;
    }
  }
  // A rotation alone is a node as any other.
  if (place - first < 2 || !fits_one_call(*host_, rotation)) return 0;
  work.kind = Work::Kind::Rotation;
  work.rotation = rotation;
  return place - first;
}

void GraphPlan::read(const DeviceState& device, Graph* graph, bool joins, bool narrows) {
  const Host& host = device.host();
  device_ = &device;
  host_ = &host;
  graph_ = graph;
  nodes_.clear();
  works_.clear();
  narrow_.clear();
  stacks_.clear();
  moved_.clear();
  own_bytes_ = 0;
  for (int index = 0, count = host.nodes(graph); index < count; ++index) {
    const Tensor* node = host.node(graph, index);
    if (is_work(host, *node)) nodes_.push_back(node);
  }
  if (joins) find_stacks();
  for (size_t place = 0; place < nodes_.size();) {
    Work work;
    const auto stacks = stacks_.find(nodes_[place]);
    if (stacks != stacks_.end()) {
      for (const StackWork& stack : stacks->second) {
        work.kind = Work::Kind::Stack;
        work.node = stack.products[0];
        work.stack = stack;
        works_.push_back(work);
      }
      ++place;
      continue;
    }
    work.node = nodes_[place];
    size_t count = 0;
    if (joins) count = join_rotation(place, work);
    if (joins && count == 0) count = join_sum(place, work);
    if (joins && count == 0) count = join_norm(place, work);
    works_.push_back(work);
    place += count == 0 ? 1 : count;
  }
  if (joins) join_heads();
  if (narrows) find_narrow(host);
  place_stacks();
}

// Results that only products with weights of one 16-bit type read. Such products round them to that type anyway, on
// tensor cores; they lie in memory of the stream's own, as long as one of their readers is to come.
void GraphPlan::find_narrow(const Host& host) {
  struct Reader {
    size_t place;  // of the work
    int32_t type;
  };
  // The readers of each tensor within this graph, by way of views that keep the order of its elements.
  std::map<const Tensor*, std::vector<Reader>> readers;
  std::map<const Tensor*, const Tensor*> roots;
  for (int index = 0, count = host.nodes(graph_); index < count; ++index) {
    const Tensor* node = host.node(graph_, index);
    if (host.op(*node) != Op::None || node->view_source == nullptr || node->source[0] == nullptr) continue;
    const Tensor* from = node->source[0];
    const auto root = roots.find(from);
    if (is_contiguous(*node) && is_contiguous(*from) && node->data == from->data &&
        elements(*node) == elements(*from) && host.uses(graph_, from) == 1) {
      roots[node] = root == roots.end() ? from : root->second;
    }
  }
  for (size_t place = 0; place < works_.size(); ++place) {
    const Tensor& node = *works_[place].node;
    const bool is_stack = works_[place].kind == Work::Kind::Stack;
    if (!is_stack && (works_[place].kind != Work::Kind::Node || host.op(node) != Op::MatMul)) continue;
    const Tensor &weight = *node.source[0], &input = *node.source[1];
    const bool is_half = weight.type == TYPE_F16 || weight.type == TYPE_BF16;
    const bool is_rounded =
        device_->packed().holds(weight.data) || (is_quantized(weight.type) && rounds_input_of_blocks(*device_, node));
    if ((!is_half && !is_rounded) || weight.ne[2] != 1 || weight.ne[3] != 1) continue;
    if (!has_rows(weight) || node.parameters[0] == PRECISION_F32 || !is_contiguous(input)) continue;
    const auto root = roots.find(&input);
    const size_t count = is_stack ? works_[place].stack.products.size() : 1;
    std::vector<Reader>& all = readers[root == roots.end() ? &input : root->second];
    // Packed weights and blocks take inputs of either type; BF16 holds what F32 activations do.
    all.insert(all.end(), count, {place, is_half ? weight.type : static_cast<int32_t>(TYPE_BF16)});
  }

  std::vector<Live> live;
  for (size_t place = 0; place < works_.size(); ++place) {
    const Work& work = works_[place];
    const Op op = host.op(*work.node);
    const Tensor* result = nullptr;
    if (work.kind == Work::Kind::Norm) result = work.norm.output;
    // Of attentions, those with a mask have a kernel for outputs of any type.
    const bool is_attention = op == Op::FlashAttention && work.node->source[3] != nullptr;
    if (work.kind == Work::Kind::Node && (op == Op::Glu || is_attention)) result = work.node;
    if (result == nullptr || result->type != TYPE_F32 || !is_contiguous(*result)) continue;
    const auto found = readers.find(result);
    if (found == readers.end() || (result->flags & TENSOR_FLAG_OUTPUT) != 0) continue;
    // All of its readers are those, or a view that they read.
    std::vector<const Tensor*> views;
    int wanted = static_cast<int>(found->second.size());
    for (const auto& [view, root] : roots) {
      if (root == result) views.push_back(view);
    }
    const Tensor* read = result;
    if (views.size() == 1) {
      read = views[0];
      if (host.uses(graph_, result) != 1 || (read->flags & TENSOR_FLAG_OUTPUT) != 0) continue;
    } else if (!views.empty()) {
      continue;
    }
    if (host.uses(graph_, read) != wanted) continue;
    const int32_t type = found->second[0].type;
    size_t last = place;
    bool agree = true;
    for (const Reader& reader : found->second) {
      agree = agree && reader.type == type && reader.place > place;
      last = std::max(last, reader.place);
    }
    if (!agree) continue;
    const size_t at = place_among(live, place, last, static_cast<size_t>(elements(*result)) * 2);
    own_bytes_ = std::max(own_bytes_, live.back().at + live.back().bytes);
    narrow_[result] = {type, at};
    for (const Tensor* view : views) narrow_[view] = {type, at};
  }
}

Tensor GraphPlan::narrowed(const Tensor& tensor, char* memory) const {
  const Narrow& narrow = narrow_.at(&tensor);
  return in_one_piece(tensor, narrow.type, 2, memory + narrow.at);
}

}  // namespace nvb_ggml
