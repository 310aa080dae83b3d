// Products of one row with one input, which become one where their weights lie one behind the other: q, k and v, gate
// and up.
#include <algorithm>
#include <functional>

#include "graph_plan.hpp"
#include "own_memory.hpp"
#include "packed_weights.hpp"
#include "tensor.hpp"

namespace nvb_ggml {

// Whether all readers of a result are nodes of this graph, which read it or views of it, and none writes to it.
bool GraphPlan::is_of_graph_alone(const Tensor* result) const {
  const auto views = views_.find(result);
  std::vector<const Tensor*> all = {result};
  if (views != views_.end()) all.insert(all.end(), views->second.begin(), views->second.end());
  for (const Tensor* one : all) {
    const auto reads = reads_.find(one);
    if ((one->flags & TENSOR_FLAG_OUTPUT) != 0) return false;
    if (host_->uses(graph_, one) != (reads == reads_.end() ? 0 : reads->second)) return false;
    if (one != result && (host_->op(*one) != Op::None || !is_contiguous(*one))) return false;
  }
  return true;
}

// Products of one row with the input of an earlier one, of which none is far from it: q, k and v, gate and up.
void GraphPlan::find_stacks() {
  constexpr size_t kFarthest = 16;
  reads_.clear();
  views_.clear();
  for (int index = 0, count = host_->nodes(graph_); index < count; ++index) {
    const Tensor* node = host_->node(graph_, index);
    for (const Tensor* source : node->source) {
      if (source != nullptr) ++reads_[source];
    }
    if (node->view_source != nullptr) views_[node->view_source].push_back(node);
  }
  // Of a weight that nobody computes or writes.
  const auto can_move = [&](const Tensor* node) {
    if (host_->op(*node) != Op::MatMul) return false;
    const Tensor &weight = *node->source[0], &input = *node->source[1];
    return node->type == TYPE_F32 && is_contiguous(*node) && elements(*node) == node->ne[0] &&
           elements(input) == input.ne[0] && host_->op(weight) == Op::None && weight.view_source == nullptr &&
           views_.count(&weight) == 0 && is_contiguous(weight) && weight.ne[2] == 1 && weight.ne[3] == 1 &&
           is_of_graph_alone(node);
  };
  const auto follows = [&](const Tensor& weight, const Tensor& last) {
    const size_t both = last.nb[1] * static_cast<size_t>(last.ne[1] + weight.ne[1]);
    return weight.type == last.type && weight.ne[0] == last.ne[0] && weight.nb[1] == last.nb[1] &&
           weight.data == static_cast<const char*>(last.data) + last.nb[1] * static_cast<size_t>(last.ne[1]) &&
           device_->packed().are_together(last.data, both);
  };
  for (size_t first = 0; first < nodes_.size(); ++first) {
    if (!can_move(nodes_[first])) continue;
    const Tensor* const input = nodes_[first]->source[1];
    std::vector<const Tensor*> others, all = {nodes_[first]};
    const size_t end = std::min(nodes_.size(), first + kFarthest);
    for (size_t place = first + 1; place < end; ++place) {
      const Tensor* node = nodes_[place];
      const bool fits = host_->op(*node) == Op::MatMul && node->source[1] == input && can_move(node) &&
                        node->parameters[0] == nodes_[first]->parameters[0];
      if (fits) others.push_back(node);
    }
    if (others.empty()) continue;
    all.insert(all.end(), others.begin(), others.end());
    std::sort(all.begin(), all.end(), [](const Tensor* one, const Tensor* other) {
      return std::less<const void*>()(one->source[0]->data, other->source[0]->data);
    });
    std::vector<StackWork> stacks;
    for (const Tensor* node : all) {
      const bool next = !stacks.empty() && follows(*node->source[0], *stacks.back().products.back()->source[0]);
      if (!next) stacks.emplace_back();
      stacks.back().products.push_back(node);
    }
    const auto begin = nodes_.begin() + static_cast<std::ptrdiff_t>(first) + 1;
    const auto is_other = [&](const Tensor* node) {
      return std::find(others.begin(), others.end(), node) != others.end();
    };
    const auto last = nodes_.begin() + static_cast<std::ptrdiff_t>(end);
    nodes_.erase(std::remove_if(begin, last, is_other), last);
    stacks_[nodes_[first]] = std::move(stacks);
  }
}

// Gives the results of stacks their places, behind those in 16 bits, as long as works are to come that read them.
void GraphPlan::place_stacks() {
  if (stacks_.empty()) return;
  std::map<const Tensor*, const Tensor*> results;  // of results and their views
  for (const auto& [node, stacks] : stacks_) {
    for (const StackWork& stack : stacks) {
      for (const Tensor* product : stack.products) {
        results[product] = product;
        for (const Tensor* view : views_[product]) results[view] = product;
      }
    }
  }
  std::map<const Tensor*, size_t> last_reads;
  for (size_t place = 0; place < works_.size(); ++place) {
    const Work& work = works_[place];
    const auto reads = [&](const Tensor* tensor) {
      const auto result = results.find(tensor);
      if (result != results.end()) last_reads[result->second] = place;
    };
    if (work.kind == Work::Kind::Norm) {
      reads(work.norm.input);
      reads(work.norm.residual);
    } else if (work.kind == Work::Kind::Rotation) {
      reads(work.rotation.input);
      reads(work.keys.input);
      reads(work.values.input);
    } else {
      for (const Tensor* source : work.node->source) reads(source);
    }
  }
  std::vector<Live> live;
  const size_t begin = own_bytes_;
  for (size_t place = 0; place < works_.size(); ++place) {
    Work& work = works_[place];
    if (work.kind != Work::Kind::Stack) continue;
    size_t bytes = 0, last = place;
    for (const Tensor* product : work.stack.products) {
      bytes += static_cast<size_t>(product->ne[0]) * sizeof(float);
      last = std::max(last, last_reads[product]);
    }
    size_t at = begin + place_among(live, place, last, bytes);
    own_bytes_ = std::max(own_bytes_, begin + live.back().at + live.back().bytes);
    work.stack.at = at;
    for (const Tensor* product : work.stack.products) {
      moved_[product] = at;
      for (const Tensor* view : views_[product]) {
        moved_[view] =
            at + static_cast<size_t>(static_cast<const char*>(view->data) - static_cast<const char*>(product->data));
      }
      at += static_cast<size_t>(product->ne[0]) * sizeof(float);
    }
  }
}

Tensor GraphPlan::moved(const Tensor& tensor, char* memory) const {
  Tensor copy = tensor;
  copy.data = memory + moved_.at(&tensor);
  return copy;
}

}  // namespace nvb_ggml
