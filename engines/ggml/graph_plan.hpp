// What is done for a graph of the host: its nodes one by one, or several in one call of the library, and which results
// are kept in 16 bits because only products with 16-bit weights read them.
//
// Nodes are done together only where they follow one another, and where nobody but the next of them reads what lies
// between: neither another node, as the host's use counts tell, nor the host itself. The call then has the place of the
// last of them, and memory that it writes before all of it is read must not be what it reads.
//
// Products of one row with one input are done at the place of the first, and as one where their weights lie one behind
// the other in memory. Their results are in the stream's own memory, because the host's for the later ones may not be
// free yet.
#pragma once

#include <map>
#include <vector>

#include "graph_key.hpp"
#include "operations.hpp"

namespace nvb_ggml {

// b = post_norm ? post_norm(input) · post_weight : input; sum = residual + b; output = norm(sum) · weight
struct NormWork {
  const Tensor* input = nullptr;
  const Tensor* post_weight = nullptr;
  const Tensor* residual = nullptr;
  const Tensor* sum = nullptr;  // the node whose value the sum is
  const Tensor* weight = nullptr;
  const Tensor* output = nullptr;  // the node whose value the normalised sum is
  float epsilon = 0.0f;
};

// A rotation after the norm of each head, times a factor, whose rows may go to a cache.
struct RotationWork {
  const Tensor* rope = nullptr;
  const Tensor* input = nullptr;
  const Tensor* weight = nullptr;  // of the norm; NULL: none
  const Tensor* output = nullptr;
  const Tensor* rows = nullptr;  // numbers of the output's rows; NULL: none
  float epsilon = 0.0f;
  float factor = 1.0f;
};

// Heads that go to rows of a cache as they are.
struct HeadRows {
  const Tensor* input = nullptr;
  const Tensor* cache = nullptr;
  const Tensor* rows = nullptr;
};

// Matrices that lie one behind the other, added up.
struct SumWork {
  const Tensor* first = nullptr;
  const Tensor* output = nullptr;
  int64_t count = 0;
  size_t stride = 0;  // bytes from one to the next
};

// Products with weights that lie one behind the other, and where the first result goes; the others follow it.
struct StackWork {
  std::vector<const Tensor*> products;
  size_t at = 0;
};

struct Work {
  enum class Kind : uint8_t { Node, Norm, Rotation, Sum, Stack } kind = Kind::Node;
  const Tensor* node = nullptr;  // the first, for messages
  NormWork norm;
  RotationWork rotation;
  RotationWork keys;  // beside the rotation, if `rope` is not NULL
  HeadRows values;    // beside both, if `input` is not NULL
  SumWork sum;
  StackWork stack;
};

class GraphPlan {
 public:
  // `joins`: whether nodes are done together; `narrows`: whether results are kept in 16 bits.
  void read(const DeviceState& device, Graph* graph, bool joins, bool narrows);

  const std::vector<Work>& works() const { return works_; }
  // Bytes of the stream's own memory that results take.
  size_t own_bytes() const { return own_bytes_; }
  // Whether the tensor, or what it is a view of, is a result in 16 bits.
  bool is_narrow(const Tensor* tensor) const { return narrow_.count(tensor) != 0; }
  // The tensor as it lies in such memory.
  Tensor narrowed(const Tensor& tensor, char* memory) const;
  // Whether the tensor, or what it is a view of, is a result of stacked products; and as it lies in own memory.
  bool is_moved(const Tensor* tensor) const { return moved_.count(tensor) != 0; }
  Tensor moved(const Tensor& tensor, char* memory) const;

 private:
  struct Narrow {
    int32_t type;
    size_t at;
  };

  bool is_read_by_next_alone(const Tensor* tensor) const;
  size_t join_norm(size_t first, Work& work) const;
  size_t join_rotation(size_t first, Work& work) const;
  size_t join_sum(size_t first, Work& work) const;
  void join_heads();
  void find_narrow(const Host& host);
  void find_stacks();
  bool is_of_graph_alone(const Tensor* result) const;
  void place_stacks();

  Graph* graph_ = nullptr;
  const DeviceState* device_ = nullptr;
  const Host* host_ = nullptr;
  std::vector<const Tensor*> nodes_;
  std::vector<Work> works_;
  std::map<const Tensor*, Narrow> narrow_;
  // The stacks that stand in the place of a node.
  std::map<const Tensor*, std::vector<StackWork>> stacks_;
  // Where results of stacks and their views lie.
  std::map<const Tensor*, size_t> moved_;
  // How often nodes of the graph read a tensor.
  std::map<const Tensor*, int> reads_;
  std::map<const Tensor*, std::vector<const Tensor*>> views_;
  size_t own_bytes_ = 0;
};

// Whether the library computes the work: addresses, strides and types.
bool fits_one_call(const Host& host, const NormWork& work);
bool fits_one_call(const Host& host, const RotationWork& work);
// Queues it. `output` has the values of the norm's output.
nvb_status run_norm(const DeviceState& device, nvb_stream* stream, const NormWork& work, const Tensor* output);
nvb_status run_rotation(const DeviceState& device, nvb_stream* stream, const RotationWork& work,
                        const RotationWork& keys, const HeadRows& values);
nvb_status run_sum(const DeviceState& device, nvb_stream* stream, const SumWork& work);

}  // namespace nvb_ggml
