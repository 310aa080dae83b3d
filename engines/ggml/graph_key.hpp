// What makes two of the host's graphs the same to this plug-in: operations, parameters, types, extents, strides and
// addresses of everything that a node names.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "host.hpp"

namespace nvb_ggml {

class GraphKey {
 public:
  // Reads a graph; the memory of an earlier one is used again.
  void read(const Host& host, Graph* graph);
  bool operator==(const GraphKey& other) const { return hash_ == other.hash_ && words_ == other.words_; }
  void swap(GraphKey& other) {
    words_.swap(other.words_);
    std::swap(hash_, other.hash_);
    std::swap(work_, other.work_);
  }
  // Nodes that are computed.
  int work() const { return work_; }

 private:
  void add(uint64_t word);
  void add(const Tensor& tensor);

  std::vector<uint64_t> words_;
  uint64_t hash_ = 0;
  int work_ = 0;
};

// Whether something is to be done for the node.
bool is_work(const Host& host, const Tensor& node);

}  // namespace nvb_ggml
