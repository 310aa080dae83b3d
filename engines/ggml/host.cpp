// Attaching to the host. The functions come from the library that called `ggml_backend_init`, wherever its file lies,
// whatever it is called, and whether or not its symbols are global: two copies of ggml in one process each get their
// own.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "host.hpp"

#include <dlfcn.h>
#include <link.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace nvb_ggml {
namespace {

struct Name {
  const char* text;
  Op op;
};

constexpr Name kNames[] = {
    {"NONE", Op::None},        {"RESHAPE", Op::None},
    {"VIEW", Op::None},        {"PERMUTE", Op::None},
    {"TRANSPOSE", Op::None},   {"ADD", Op::Add},
    {"ADD_ID", Op::AddId},     {"ARGMAX", Op::ArgMax},
    {"ARGSORT", Op::ArgSort},  {"CLAMP", Op::Clamp},
    {"CONCAT", Op::Concat},    {"CONT", Op::Cont},
    {"CPY", Op::Copy},         {"DIV", Op::Div},
    {"DUP", Op::Dup},          {"FLASH_ATTN_EXT", Op::FlashAttention},
    {"GET_ROWS", Op::GetRows}, {"GLU", Op::Glu},
    {"L2_NORM", Op::L2Norm},   {"MEAN", Op::Mean},
    {"MUL_MAT", Op::MatMul},   {"MUL_MAT_ID", Op::MatMulId},
    {"MUL", Op::Mul},          {"NORM", Op::Norm},
    {"REPEAT", Op::Repeat},    {"RMS_NORM", Op::RmsNorm},
    {"ROPE", Op::Rope},        {"SCALE", Op::Scale},
    {"SET_ROWS", Op::SetRows}, {"SOFT_MAX", Op::SoftMax},
    {"SQR", Op::Sqr},          {"SQRT", Op::Sqrt},
    {"SUB", Op::Sub},          {"SUM_ROWS", Op::SumRows},
    {"TOP_K", Op::TopK},       {"UNARY", Op::Unary},
};

// Layouts are known by version. The end of the last range is the newest version whose headers were read.
struct Range {
  int first[3];
  int last[3];
  Layout layout;
};

constexpr Range kKnown[] = {
    {{0, 9, 1}, {0, 9, 999}, Layout::Without2d},
    {{0, 10, 0}, {0, 25, 999}, Layout::With2d},
};
constexpr const char* kKnownText = "0.9.1 to 0.25";

bool at_least(const int (&version)[3], const int (&bound)[3]) {
  for (int part = 0; part < 3; ++part) {
    if (version[part] != bound[part]) return version[part] > bound[part];
  }
  return true;
}

// A handle of the library that holds `address`, which stays loaded as it is. The program itself has no file name here.
void* library_of(const void* address, std::string& name) {
  Dl_info info = {};
  link_map* map = nullptr;
  if (dladdr1(address, &info, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP) == 0 || map == nullptr) return nullptr;
  const bool program = map->l_name == nullptr || map->l_name[0] == '\0';
  name = program ? "the program" : map->l_name;
  return dlopen(program ? nullptr : map->l_name, RTLD_LAZY | RTLD_NOLOAD);
}

}  // namespace

bool Host::resolve(const void* caller, std::string& problem) {
  std::string name;
  void* library = library_of(caller, name);
  if (library == nullptr) {
    problem = "the library that loads it cannot be opened";
    return false;
  }
  const auto function = [&](const char* symbol, auto& to, bool required = true) {
    to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(dlsym(library, symbol));
    if (to == nullptr && required && problem.empty()) problem = name + " does not export " + symbol;
  };
  function("ggml_log_internal", log_, false);
  function("ggml_backend_buffer_get_usage", usage_, false);
  function("ggml_version", version_function_);
  function("ggml_op_name", op_name_);
  function("ggml_unary_op_name", unary_op_name_);
  function("ggml_glu_op_name", glu_op_name_);
  function("ggml_nbytes", nbytes_);
  function("ggml_blck_size", block_elements_);
  function("ggml_type_size", block_bytes_);
  function("ggml_graph_n_nodes", graph_n_nodes_);
  function("ggml_graph_node", graph_node_);
  function("ggml_backend_buffer_init", buffer_init_);
  function("ggml_init", init_);
  function("ggml_free", free_);
  function("ggml_new_tensor_4d", new_tensor_4d_);
  function("ggml_set_name", set_name_);
  function("ggml_view_1d", view_1d_);
  function("ggml_rms_norm", rms_norm_);
  function("ggml_new_graph", new_graph_);
  function("ggml_build_forward_expand", build_forward_);
  // The plug-in lives in the process of this library for as long as that does; the count of its users goes back.
  dlclose(library);
  return problem.empty();
}

bool Host::choose_layout(std::string& problem) {
  version_ = version_function_();
  int version[3] = {0, 0, 0};
  const int parts = std::sscanf(version_.c_str(), "%d.%d.%d", &version[0], &version[1], &version[2]);
  for (const Range& range : kKnown) {
    if (parts >= 2 && at_least(version, range.first) && at_least(range.last, version)) layout_ = range.layout;
  }
  if (layout_ != Layout::Unknown) return true;
  problem = "the layout of ggml " + version_ + "'s tables is not known";
  return false;
}

// Reads a tensor of the host's as this plug-in declares tensors: a build with other limits than the usual ones is
// refused here instead of being read wrongly.
bool Host::probe(std::string& problem) {
  Context* context = init_({1 << 20, nullptr, true});
  if (context == nullptr) {
    problem = "ggml_init failed";
    return false;
  }
  Tensor* tensor = new_tensor_4d_(context, TYPE_F16, 2, 3, 5, 7);
  set_name_(tensor, "probe");
  Tensor* view = view_1d_(context, tensor, 4, 8);
  Tensor* norm = rms_norm_(context, tensor, 0.5f);
  Graph* graph = new_graph_(context);
  build_forward_(graph, norm);
  const float epsilon = 0.5f;
  const bool fits = tensor->type == TYPE_F16 && tensor->buffer == nullptr && tensor->ne[0] == 2 && tensor->ne[1] == 3 &&
                    tensor->ne[2] == 5 && tensor->ne[3] == 7 && tensor->nb[0] == 2 && tensor->nb[1] == 4 &&
                    tensor->nb[2] == 12 && tensor->nb[3] == 60 && std::strcmp(tensor->name, "probe") == 0 &&
                    view->view_source == tensor && view->view_offset == 8 && norm->source[0] == tensor &&
                    norm->source[MAX_SOURCES - 1] == nullptr && norm->view_source == nullptr &&
                    std::memcmp(norm->parameters, &epsilon, sizeof epsilon) == 0 && op(*norm) == Op::RmsNorm &&
                    nodes(graph) == 1 && node(graph, 0) == norm;
  marks_nodes_ = fits && (norm->flags & TENSOR_FLAG_COMPUTE) != 0;
  if (fits) probe_graph(graph, tensor, norm);
  free_(context);
  if (!fits) problem = "tensors of ggml " + version_ + " as it was built here do not lie as they should";
  return fits;
}

// The list of nodes follows a new graph's struct at once, so its place tells the struct's size, and that its members.
void Host::probe_graph(const Graph* graph, const Tensor* tensor, const Tensor* result) {
  const auto bytes = reinterpret_cast<uintptr_t>(graph->nodes) - reinterpret_cast<uintptr_t>(graph);
  if (graph->node_count != 1 || (bytes != offsetof(Graph, uid) && bytes != sizeof(Graph))) return;
  if (graph->nodes[0] != result) return;
  has_use_counts_ = true;
  has_use_counts_ = uses(graph, tensor) == 1 && uses(graph, result) == 0;
  has_uid_ = has_use_counts_ && bytes == sizeof(Graph);
}

int Host::uses(const Graph* graph, const Tensor* tensor) const {
  if (!has_use_counts_ || graph->visited_size == 0) return -1;
  const size_t first = (reinterpret_cast<uintptr_t>(tensor) >> 4) % graph->visited_size;
  for (size_t step = 0; step < graph->visited_size; ++step) {
    const size_t place = (first + step) % graph->visited_size;
    if ((graph->visited_used[place / 32] >> (place % 32) & 1) == 0) return -1;
    if (graph->visited[place] == tensor) return graph->use_counts[place];
  }
  return -1;
}

bool Host::attach(const void* caller) {
  std::string problem;
  if (resolve(caller, problem) && choose_layout(problem) && probe(problem)) return true;
  log(LOG_ERROR, "nvbackend: not loaded: %s; this plug-in knows ggml %s\n", problem.c_str(), kKnownText);
  return false;
}

Op Host::op(const Tensor& node) const {
  const auto find = [&] {
    const char* name = op_name_(node.op);
    for (const Name& known : kNames) {
      if (name != nullptr && std::strcmp(name, known.text) == 0) return known.op;
    }
    return Op::Unknown;
  };
  if (node.op < 0 || node.op >= 256) return Op::Unknown;
  // 0 is a number that was not looked up yet.
  const uint8_t known = ops_[node.op].load(std::memory_order_relaxed);
  if (known != 0) return static_cast<Op>(known - 1);
  const Op found = find();
  ops_[node.op].store(static_cast<uint8_t>(found) + 1, std::memory_order_relaxed);
  return found;
}

void Host::log(LogLevel level, const char* format, ...) const {
  char text[2048];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (log_ != nullptr) {
    log_(level, "%s", text);
  } else {
    std::fputs(text, stderr);
  }
}

}  // namespace nvb_ggml
