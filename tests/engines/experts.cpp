// The plug-in adds up what a token's experts give in one call, and gathers their weights in one for all tokens, with
// the results of single calls; it leaves a sum alone that somebody else reads.
//
//   experts PLUGIN
//
// The graph is the end of a mixture of experts as llama.cpp makes it. The program defines the functions of libnvbackend
// that it counts, which the plug-in then calls in their place.
#include <nvbackend.h>

#include <cmath>

#include "small_graph.hpp"

namespace {

struct Counts {
  int sums, gathers, elementwise;
};
Counts counts = {};

constexpr int64_t kAll = 16, kUsed = 6, kColumns = 48;

struct Outcome {
  std::vector<float> result, marked;
  Counts counts;
};

// `marked`: the number of a sum that the host reads after the graph, or -1.
Outcome run(const char* joins, int64_t tokens, int marked) {
  setenv("NVB_GGML_JOIN", joins, 1);
  ggml_backend_t backend = make_backend();
  ggml_context *c = ggml_init({size_t{1} << 20, nullptr, true}), *w = ggml_init({size_t{1} << 20, nullptr, true});
  ggml_tensor* scores = ggml_new_tensor_2d(w, GGML_TYPE_F32, kAll, tokens);
  ggml_tensor* outputs = ggml_new_tensor_3d(w, GGML_TYPE_F32, kColumns, kUsed, tokens);
  ggml_tensor* residual = ggml_new_tensor_2d(w, GGML_TYPE_F32, kColumns, tokens);
  // The experts of a token, and their weights: rows of one element, of which each token has its own.
  ggml_tensor* probabilities = ggml_soft_max(c, scores);
  ggml_tensor* order = ggml_argsort(c, probabilities, GGML_SORT_ORDER_DESC);
  ggml_tensor* ids = ggml_view_2d(c, order, kUsed, tokens, order->nb[1], 0);
  ggml_tensor* weights = ggml_get_rows(c, ggml_reshape_3d(c, probabilities, 1, kAll, tokens), ids);
  ggml_tensor* weighted = ggml_mul(c, outputs, weights);
  const auto of_expert = [&](int64_t i) {
    return ggml_view_2d(c, weighted, kColumns, tokens, weighted->nb[2], static_cast<size_t>(i) * weighted->nb[1]);
  };
  ggml_tensor* sum = of_expert(0);
  ggml_tensor* read = nullptr;
  for (int i = 1; i < kUsed; ++i) {
    sum = ggml_add(c, sum, of_expert(i));
    if (i == marked) ggml_set_output(read = sum);
  }
  ggml_tensor* result = ggml_add(c, sum, residual);
  ggml_set_output(result);
  ggml_cgraph* graph = ggml_new_graph(c);
  ggml_build_forward_expand(graph, result);
  ggml_backend_buffer_t memory = ggml_backend_alloc_ctx_tensors(w, backend);
  ggml_gallocr_t allocator = ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend));
  if (memory == nullptr || !ggml_gallocr_alloc_graph(allocator, graph)) fail("no memory for tensors", 0);
  unsigned random = 1;
  for (ggml_tensor* tensor : {scores, outputs, residual}) {
    std::vector<float> values(static_cast<size_t>(ggml_nelements(tensor)));
    for (float& value : values) {
      random = random * 1664525u + 1013904223u;
      value = static_cast<float>(random >> 8) / 8388608.0f - 1.0f;
    }
    ggml_backend_tensor_set(tensor, values.data(), 0, ggml_nbytes(tensor));
  }
  counts = {};
  if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) fail("the graph failed", 0);
  Outcome outcome = {{}, {}, counts};
  const auto values_of = [](const ggml_tensor* tensor) {
    std::vector<float> values(static_cast<size_t>(ggml_nelements(tensor)));
    ggml_backend_tensor_get(tensor, values.data(), 0, ggml_nbytes(tensor));
    return values;
  };
  outcome.result = values_of(result);
  if (read != nullptr) outcome.marked = values_of(read);
  ggml_gallocr_free(allocator);
  ggml_backend_buffer_free(memory);
  ggml_free(c);
  ggml_free(w);
  ggml_backend_free(backend);
  return outcome;
}

void near(const std::vector<float>& one, const std::vector<float>& other, const char* text) {
  if (one.size() != other.size()) fail(text, static_cast<int>(one.size()));
  for (size_t i = 0; i < one.size(); ++i) {
    if (!(std::fabs(one[i] - other[i]) <= 1e-6f)) fail(text, static_cast<int>(i));
  }
}

void expect(const Counts& found, const Counts& wanted, const char* text) {
  if (found.sums == wanted.sums && found.gathers == wanted.gathers && found.elementwise == wanted.elementwise) return;
  std::fprintf(stderr, "%s: %d sums, %d gathers, %d elementwise\n", text, found.sums, found.gathers, found.elementwise);
  std::exit(1);
}

}  // namespace

extern "C" {

nvb_status nvb_sum_rows(const nvb_backend* backend, const nvb_sum_rows_args* args, nvb_stream* stream) {
  ++counts.sums;
  static auto* function = original<decltype(nvb_sum_rows)>("nvb_sum_rows");
  return function(backend, args, stream);
}

nvb_status nvb_embedding(const nvb_backend* backend, const nvb_embedding_args* args, nvb_stream* stream) {
  ++counts.gathers;
  static auto* function = original<decltype(nvb_embedding)>("nvb_embedding");
  return function(backend, args, stream);
}

nvb_status nvb_pointwise(const nvb_backend* backend, const nvb_pointwise_args* args, nvb_stream* stream) {
  ++counts.elementwise;
  static auto* function = original<decltype(nvb_pointwise)>("nvb_pointwise");
  return function(backend, args, stream);
}
}

int main(int count, char** arguments) {
  if (count < 2 || ggml_backend_load(arguments[1]) == nullptr) fail("PLUGIN", count);
  for (const int64_t tokens : {1, 3, 40}) {
    const Outcome single = run("0", tokens, -1), joined = run("1", tokens, -1);
    // The product with the weights, five additions, the residual; joined the five are a sum.
    expect(single.counts, {0, 1, 7}, "single calls");
    expect(joined.counts, {1, 1, 2}, "joined calls");
    near(joined.result, single.result, "joined calls give something else");
  }
  // A sum of two is no sum to join, and neither are the three behind it; one of four is, and the last two follow.
  const struct {
    int marked;
    Counts counts;
  } marks[] = {{1, {0, 1, 7}}, {3, {1, 1, 4}}, {4, {1, 1, 3}}, {5, {1, 1, 2}}};
  for (const auto& mark : marks) {
    const Outcome alone = run("0", 3, mark.marked), together = run("1", 3, mark.marked);
    expect(together.counts, mark.counts, "the host reads a sum");
    near(together.result, alone.result, "the host reads a sum, and the result is something else");
    near(together.marked, alone.marked, "the host reads something else");
  }
  std::puts("experts' results are added up in one call, and their weights gathered in one, where nobody reads between");
  return 0;
}
