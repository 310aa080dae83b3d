// The host: the copy of ggml that loaded the plug-in, its version, the functions that are taken from it, and its
// numbers of operations.
#pragma once

#include <atomic>
#include <string>

#include "ggml_abi.hpp"

namespace nvb_ggml {

// Operations by this plug-in's numbers. The host's are looked up by name, because ggml renumbers them in every other
// release.
enum class Op : uint8_t {
  Unknown,
  None,  // and every view: nothing is to be done
  Add,
  AddId,
  ArgMax,
  ArgSort,
  Clamp,
  Concat,
  Cont,
  Copy,
  Div,
  Dup,
  FlashAttention,
  GetRows,
  Glu,
  L2Norm,
  MatMul,
  MatMulId,
  Mean,
  Mul,
  Norm,
  Repeat,
  RmsNorm,
  Rope,
  Scale,
  SetRows,
  SoftMax,
  Sqr,
  Sqrt,
  Sub,
  SumRows,
  TopK,
  Unary,
};

enum class Layout { Unknown, Without2d, With2d };

class Host {
 public:
  // Finds the library that holds `caller`, resolves the functions and checks version and layout. On failure false, and
  // one line that says why is written where the host's log goes, or else to standard error.
  bool attach(const void* caller);

  // Whether both are the same copy of ggml.
  bool is(const Host& other) const { return buffer_init_ == other.buffer_init_ && version_ == other.version_; }
  Layout layout() const { return layout_; }
  const std::string& version() const { return version_; }
  Op op(const Tensor& node) const;
  // "GELU" of a unary node, "SWIGLU" of a gated one.
  const char* unary_name(const Tensor& node) const { return unary_op_name_(node.parameters[0]); }
  const char* glu_name(const Tensor& node) const { return glu_op_name_(node.parameters[0]); }
  const char* op_name(const Tensor& node) const { return op_name_(node.op); }
  size_t bytes(const Tensor& tensor) const { return nbytes_(&tensor); }
  // Elements of a block of any type, 1 of plain ones, and its bytes.
  int64_t block_elements(int32_t type) const { return block_elements_(type); }
  size_t block_bytes(int32_t type) const { return block_bytes_(type); }
  int nodes(Graph* graph) const { return graph_n_nodes_(graph); }
  Tensor* node(Graph* graph, int index) const { return graph_node_(graph, index); }
  // A number that equal graphs share, 0 if there is none.
  uint64_t uid(const Graph* graph) const { return has_uid_ ? graph->uid : 0; }
  // How many nodes read the tensor, those outside of a part of a graph among them; -1 if that is not known.
  int uses(const Graph* graph, const Tensor* tensor) const;
  // Whether the host sets TENSOR_FLAG_COMPUTE on what must be computed.
  bool marks_nodes() const { return marks_nodes_; }
  // Whether the host has said that the buffer holds a model's weights.
  bool holds_weights(Buffer* buffer) const {
    return usage_ != nullptr && buffer != nullptr && usage_(buffer) == BUFFER_USAGE_WEIGHTS;
  }
  // `ggml_backend_buffer_init`, whose second parameter is a table by value.
  void* buffer_init() const { return buffer_init_; }

  void log(LogLevel level, const char* format, ...) const __attribute__((format(printf, 3, 4)));

 private:
  bool resolve(const void* caller, std::string& problem);
  bool choose_layout(std::string& problem);
  bool probe(std::string& problem);
  void probe_graph(const Graph* graph, const Tensor* tensor, const Tensor* result);

  Layout layout_ = Layout::Unknown;
  std::string version_;
  bool marks_nodes_ = false;
  bool has_use_counts_ = false;
  bool has_uid_ = false;
  mutable std::atomic<uint8_t> ops_[256] = {};

  const char* (*version_function_)() = nullptr;
  const char* (*op_name_)(int32_t) = nullptr;
  const char* (*unary_op_name_)(int32_t) = nullptr;
  const char* (*glu_op_name_)(int32_t) = nullptr;
  size_t (*nbytes_)(const Tensor*) = nullptr;
  int64_t (*block_elements_)(int32_t) = nullptr;
  size_t (*block_bytes_)(int32_t) = nullptr;
  int (*graph_n_nodes_)(Graph*) = nullptr;
  Tensor* (*graph_node_)(Graph*, int) = nullptr;
  int32_t (*usage_)(Buffer*) = nullptr;
  void* buffer_init_ = nullptr;
  void (*log_)(int32_t level, const char* format, ...) = nullptr;

  // Taken for the probe alone.
  struct InitParameters {
    size_t bytes;
    void* buffer;
    bool no_alloc;
  };
  Context* (*init_)(InitParameters) = nullptr;
  void (*free_)(Context*) = nullptr;
  Tensor* (*new_tensor_4d_)(Context*, int32_t type, int64_t, int64_t, int64_t, int64_t) = nullptr;
  Tensor* (*set_name_)(Tensor*, const char*) = nullptr;
  Tensor* (*view_1d_)(Context*, Tensor*, int64_t, size_t offset) = nullptr;
  Tensor* (*rms_norm_)(Context*, Tensor*, float epsilon) = nullptr;
  Graph* (*new_graph_)(Context*) = nullptr;
  void (*build_forward_)(Graph*, Tensor*) = nullptr;
};

}  // namespace nvb_ggml
