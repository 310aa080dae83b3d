#include "graph_key.hpp"

#include <cstring>

namespace nvb_ggml {

bool is_work(const Host& host, const Tensor& node) {
  if (host.marks_nodes() && (node.flags & TENSOR_FLAG_COMPUTE) == 0) return false;
  for (const int64_t extent : node.ne) {
    if (extent == 0) return false;
  }
  return host.op(node) != Op::None;
}

void GraphKey::add(uint64_t word) {
  words_.push_back(word);
  // FNV-1a over words: it only spares the comparison of graphs that differ.
  hash_ = (hash_ ^ word) * 0x100000001b3;
}

void GraphKey::add(const Tensor& tensor) {
  add(reinterpret_cast<uintptr_t>(tensor.data));
  add(static_cast<uint64_t>(tensor.type));
  for (int axis = 0; axis < 4; ++axis) {
    add(static_cast<uint64_t>(tensor.ne[axis]));
    add(tensor.nb[axis]);
  }
}

void GraphKey::read(const Host& host, Graph* graph) {
  words_.clear();
  hash_ = 0xcbf29ce484222325;
  work_ = 0;
  for (int index = 0, count = host.nodes(graph); index < count; ++index) {
    const Tensor& node = *host.node(graph, index);
    // Views are read by their addresses in what names them.
    if (!is_work(host, node)) continue;
    ++work_;
    add(static_cast<uint64_t>(node.op) << 32 | static_cast<uint32_t>(node.flags));
    add(node);
    for (int i = 0; i < MAX_PARAMETERS; i += 2) {
      uint64_t word;
      std::memcpy(&word, &node.parameters[i], sizeof word);
      add(word);
    }
    for (int i = 0; i < MAX_SOURCES; ++i) {
      if (node.source[i] == nullptr) continue;
      add(static_cast<uint64_t>(i));
      add(*node.source[i]);
    }
  }
}

}  // namespace nvb_ggml
