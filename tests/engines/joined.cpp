// The plug-in does several nodes of a host's graph in one call, with the results of single calls, and leaves those
// alone whose values somebody else reads.
//
//   joined PLUGIN
//
// The graph is a layer's attention half as llama.cpp makes it, in memory that the host's allocator shares among
// tensors. The program defines the functions of libnvbackend that it counts, which the plug-in then calls in their
// place.
#include <nvbackend.h>

#include <cmath>
#include <cstring>
#include <functional>

#include "small_graph.hpp"

namespace {

struct Counts {
  int norms, rotations, elementwise, scatters, narrow_products;
};
Counts counts = {};
int products = 0;

constexpr int64_t kMostRows = 3, kCells = 24;

// What a test reads after the graph, or marks.
struct Names {
  ggml_tensor *first_norm, *first, *post, *sum, *second, *query, *key, *raw_key, *cache, *value_cache;
};

struct Layer {
  // `change` sees the tensors before memory is shared out.
  Layer(ggml_backend_t backend, ggml_type weights, int64_t rows,
        const std::function<void(ggml_context*, Names&)>& change) {
    constants_ = ggml_init({size_t{1} << 20, nullptr, true});
    context_ = ggml_init({size_t{1} << 20, nullptr, true});
    ggml_context *c = context_, *w = constants_;
    const int64_t width = kHeads * kHeadDim;
    ggml_tensor* input = ggml_new_tensor_2d(w, GGML_TYPE_F32, width, rows);
    ggml_tensor* scales[3];
    for (ggml_tensor*& scale : scales) scale = ggml_new_tensor_1d(w, GGML_TYPE_F32, width);
    ggml_tensor *query_scale = ggml_new_tensor_1d(w, GGML_TYPE_F32, kHeadDim),
                *key_scale = ggml_new_tensor_1d(w, GGML_TYPE_F32, kHeadDim);
    ggml_tensor* matrices[5];
    for (ggml_tensor*& matrix : matrices) matrix = ggml_new_tensor_2d(w, weights, width, width);
    ggml_tensor* positions = ggml_new_tensor_1d(w, GGML_TYPE_I32, rows);
    ggml_tensor* places = ggml_new_tensor_1d(w, GGML_TYPE_I64, rows);
    names.cache = ggml_new_tensor_2d(w, GGML_TYPE_F16, width, kCells);
    names.value_cache = ggml_new_tensor_2d(w, GGML_TYPE_F16, width, kCells);

    // Norm, products, norm and rotation of heads, rows of a cache.
    ggml_tensor* x = ggml_scale(c, input, 2.0f);
    names.first_norm = ggml_rms_norm(c, x, 1e-5f);
    names.first = ggml_mul(c, names.first_norm, scales[0]);
    const auto heads = [&](ggml_tensor* matrix, ggml_tensor* scale) {
      names.raw_key = ggml_mul_mat(c, matrix, names.first);
      ggml_tensor* all = ggml_reshape_3d(c, names.raw_key, kHeadDim, kHeads, rows);
      return ggml_rope_ext(c, ggml_mul(c, ggml_rms_norm(c, all, 1e-6f), scale), positions, nullptr, kHeadDim,
                           GGML_ROPE_TYPE_NEOX, 0, 1e4f, 1.0f, 0.0f, 1.0f, 32.0f, 1.0f);
    };
    names.query = ggml_scale(c, heads(matrices[0], query_scale), 0.125f);
    names.key = heads(matrices[1], key_scale);
    ggml_tensor* cached = ggml_set_rows(c, names.cache, ggml_reshape_2d(c, names.key, width, rows), places);
    ggml_tensor* values = ggml_set_rows(c, names.value_cache, ggml_mul_mat(c, matrices[4], names.first), places);
    // The branch joins the residual stream behind a norm of its own, and the next norm follows.
    ggml_tensor* branch = ggml_mul_mat(c, matrices[2], ggml_reshape_2d(c, names.query, width, rows));
    names.post = ggml_mul(c, ggml_rms_norm(c, branch, 1e-5f), scales[1]);
    names.sum = ggml_add(c, names.post, x);
    names.second = ggml_mul(c, ggml_rms_norm(c, names.sum, 1e-5f), scales[2]);
    result_ = ggml_add(c, ggml_mul_mat(c, matrices[3], names.second), names.sum);
    ggml_set_output(result_);
    graph_ = ggml_new_graph(c);
    ggml_build_forward_expand(graph_, names.query);
    ggml_build_forward_expand(graph_, cached);
    ggml_build_forward_expand(graph_, values);
    ggml_build_forward_expand(graph_, result_);
    if (change) change(c, names);

    memory_ = ggml_backend_alloc_ctx_tensors(w, backend);
    allocator_ = ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend));
    if (memory_ == nullptr || !ggml_gallocr_alloc_graph(allocator_, graph_)) fail("no memory for tensors", 0);
    unsigned random = 1;
    for (ggml_tensor* tensor = ggml_get_first_tensor(w); tensor != nullptr; tensor = ggml_get_next_tensor(w, tensor)) {
      if (tensor != positions && tensor != places) fill(tensor, random);
    }
    const int32_t position[kMostRows] = {5, 6, 900};
    const int64_t place[kMostRows] = {7, 0, 23};
    ggml_backend_tensor_set(positions, position, 0, ggml_nbytes(positions));
    ggml_backend_tensor_set(places, place, 0, ggml_nbytes(places));
  }
  ~Layer() {
    ggml_gallocr_free(allocator_);
    ggml_backend_buffer_free(memory_);
    ggml_free(context_);
    ggml_free(constants_);
  }

  void compute(ggml_backend_t backend) {
    if (ggml_backend_graph_compute(backend, graph_) != GGML_STATUS_SUCCESS) fail("the graph failed", 0);
  }
  std::vector<float> result() const { return floats(result_); }
  static std::vector<float> floats(const ggml_tensor* tensor) {
    std::vector<float> values(static_cast<size_t>(ggml_nelements(tensor)));
    if (tensor->type == GGML_TYPE_F32) {
      ggml_backend_tensor_get(tensor, values.data(), 0, ggml_nbytes(tensor));
      return values;
    }
    std::vector<ggml_fp16_t> halves(values.size());
    ggml_backend_tensor_get(tensor, halves.data(), 0, ggml_nbytes(tensor));
    ggml_fp16_to_fp32_row(halves.data(), values.data(), static_cast<int64_t>(values.size()));
    return values;
  }

  Names names = {};

 private:
  static void fill(ggml_tensor* tensor, unsigned& random) {
    std::vector<float> values(static_cast<size_t>(ggml_nelements(tensor)));
    for (float& value : values) {
      random = random * 1664525u + 1013904223u;
      value = (static_cast<float>(random >> 8) / 8388608.0f - 1.0f) * (tensor->ne[1] == 1 ? 1.0f : 0.1f);
    }
    std::vector<char> encoded(ggml_nbytes(tensor));
    ggml_quantize_chunk(tensor->type, values.data(), encoded.data(), 0, ggml_nrows(tensor), tensor->ne[0], nullptr);
    if (tensor->type == GGML_TYPE_F32) std::memcpy(encoded.data(), values.data(), encoded.size());
    ggml_backend_tensor_set(tensor, encoded.data(), 0, encoded.size());
  }

  ggml_context *context_, *constants_;
  ggml_tensor* result_;
  ggml_cgraph* graph_;
  ggml_backend_buffer_t memory_;
  ggml_gallocr_t allocator_;
};

struct Outcome {
  std::vector<float> result, cache, marked;
  Counts counts;
  int products;
};

using Marked = ggml_tensor* Names::*;

// `marked`: a tensor that the host reads after the graph.
Outcome run(ggml_type weights, const char* joins, const char* narrows, Marked marked, int64_t rows = kMostRows) {
  setenv("NVB_GGML_JOIN", joins, 1);
  setenv("NVB_GGML_NARROW", narrows, 1);
  ggml_backend_t backend = make_backend();
  Outcome outcome;
  {
    Layer layer(backend, weights, rows, [&](ggml_context*, Names& names) {
      if (marked != nullptr) ggml_set_output(names.*marked);
    });
    counts = {};
    products = 0;
    layer.compute(backend);
    outcome.counts = counts;
    outcome.products = products;
    outcome.result = layer.result();
    outcome.cache = Layer::floats(layer.names.cache);
    const std::vector<float> values = Layer::floats(layer.names.value_cache);
    outcome.cache.insert(outcome.cache.end(), values.begin(), values.end());
    if (marked != nullptr) outcome.marked = Layer::floats(layer.names.*marked);
  }
  ggml_backend_free(backend);
  return outcome;
}

float distance(const std::vector<float>& one, const std::vector<float>& other) {
  if (one.size() != other.size() || one.empty()) fail("results of different sizes", static_cast<int>(one.size()));
  float most = 0.0f, largest = 0.0f;
  for (size_t i = 0; i < one.size(); ++i) {
    if (!std::isfinite(one[i]) || !std::isfinite(other[i])) fail("a result is not finite", static_cast<int>(i));
    most = std::fmax(most, std::fabs(one[i] - other[i]));
    largest = std::fmax(largest, std::fabs(other[i]));
  }
  if (largest == 0.0f) fail("a result is zero", 0);
  return most / largest;
}

void expect(const Counts& found, const Counts& wanted, const char* text) {
  if (std::memcmp(&found, &wanted, sizeof found) == 0) return;
  std::fprintf(stderr, "%s: %d norms, %d rotations, %d elementwise, %d scatters, %d products of 16 bits\n", text,
               found.norms, found.rotations, found.elementwise, found.scatters, found.narrow_products);
  std::exit(1);
}

void near(const Outcome& one, const Outcome& other, float bound, const char* text) {
  const float result = distance(one.result, other.result), cache = distance(one.cache, other.cache);
  const float marked = one.marked.empty() ? 0.0f : distance(one.marked, other.marked);
  if (result <= bound && cache <= bound && marked <= bound) return;
  std::fprintf(stderr, "%s: %g %g %g\n", text, static_cast<double>(result), static_cast<double>(cache),
               static_cast<double>(marked));
  std::exit(1);
}

}  // namespace

extern "C" {

nvb_status nvb_rms_norm(const nvb_backend* backend, const nvb_rms_norm_args* args, nvb_stream* stream) {
  ++counts.norms;
  static auto* function = original<decltype(nvb_rms_norm)>("nvb_rms_norm");
  return function(backend, args, stream);
}

nvb_status nvb_rotary_embedding(const nvb_backend* backend, const nvb_rotary_embedding_args* args, nvb_stream* stream) {
  ++counts.rotations;
  static auto* function = original<decltype(nvb_rotary_embedding)>("nvb_rotary_embedding");
  return function(backend, args, stream);
}

nvb_status nvb_pointwise(const nvb_backend* backend, const nvb_pointwise_args* args, nvb_stream* stream) {
  ++counts.elementwise;
  static auto* function = original<decltype(nvb_pointwise)>("nvb_pointwise");
  return function(backend, args, stream);
}

nvb_status nvb_scatter_rows(const nvb_backend* backend, const nvb_scatter_rows_args* args, nvb_stream* stream) {
  ++counts.scatters;
  static auto* function = original<decltype(nvb_scatter_rows)>("nvb_scatter_rows");
  return function(backend, args, stream);
}

nvb_status nvb_linear(const nvb_backend* backend, const nvb_linear_args* args, nvb_stream* stream) {
  ++products;
  counts.narrow_products += args->input.dtype != NVB_DTYPE_F32;
  static auto* function = original<decltype(nvb_linear)>("nvb_linear");
  return function(backend, args, stream);
}
}

int main(int count, char** arguments) {
  if (count < 2 || ggml_backend_load(arguments[1]) == nullptr) fail("PLUGIN", count);
  const Outcome single = run(GGML_TYPE_F32, "0", "0", nullptr);
  // Three norms and those of both heads; a factor first, five weights, a factor, two sums; rows of two caches.
  expect(single.counts, {5, 2, 9, 2, 0}, "single calls");
  const Outcome joined = run(GGML_TYPE_F32, "1", "0", nullptr);
  // The first norm; the post norm, the sum and the norm of it; the factor first and the last sum; the values' rows,
  // which come behind their product.
  expect(joined.counts, {2, 2, 2, 1, 0}, "joined calls");
  near(joined, single, 1e-5f, "joined calls give something else");

  // What the host reads is there, and all around it as before.
  const struct {
    Marked tensor;
    Counts counts;
    const char* text;
  } marks[] = {
      {&Names::first_norm, {2, 2, 3, 1, 0}, "the host reads the first norm"},
      {&Names::first, {2, 2, 2, 1, 0}, "the host reads the first norm's product"},
      {&Names::post, {3, 2, 2, 1, 0}, "the host reads the post norm"},
      {&Names::sum, {2, 2, 2, 1, 0}, "the host reads the sum"},
      {&Names::key, {2, 2, 2, 2, 0}, "the host reads the keys"},
      {&Names::query, {2, 2, 2, 1, 0}, "the host reads the queries"},
  };
  for (const auto& mark : marks) {
    const Outcome alone = run(GGML_TYPE_F32, "0", "0", mark.tensor),
                  together = run(GGML_TYPE_F32, "1", "0", mark.tensor);
    expect(together.counts, mark.counts, mark.text);
    near(together, alone, 1e-5f, mark.text);
  }

  // All products that read the first norm, and the one that reads the second, of which none is read by anybody else.
  for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_BF16}) {
    const Outcome wide = run(type, "1", "0", nullptr), narrow = run(type, "1", "1", nullptr);
    expect(wide.counts, {2, 2, 2, 1, 0}, "16-bit weights");
    expect(narrow.counts, {2, 2, 2, 1, 4}, "inputs in 16 bits");
    near(narrow, wide, type == GGML_TYPE_F16 ? 2e-3f : 2e-2f, "inputs in 16 bits give something else");
    const Outcome read = run(type, "1", "1", &Names::second);
    expect(read.counts, {2, 2, 2, 1, 3}, "the host reads the second norm");
  }
  // Of one row, the products with the weights of queries and keys, which lie one behind the other, are one; behind all
  // three the rotations and the values' rows are one as well.
  const Outcome five = run(GGML_TYPE_F32, "0", "0", nullptr, 1), four = run(GGML_TYPE_F32, "1", "0", nullptr, 1);
  if (five.products != 5 || four.products != 4) fail("products of one row are not joined", four.products);
  expect(four.counts, {2, 1, 2, 0, 0}, "joined products");
  near(four, five, 1e-5f, "joined products give something else");
  for (const ggml_type type : {GGML_TYPE_BF16, GGML_TYPE_Q4_0}) {
    const Outcome wide = run(type, "1", "0", nullptr, 1), narrow = run(type, "1", "1", nullptr, 1);
    if (wide.products != 4 || narrow.products != 4) fail("products are not joined", narrow.products);
    expect(narrow.counts, {2, 1, 2, 0, type == GGML_TYPE_BF16 ? 3 : 0}, "joined products with inputs in 16 bits");
    near(narrow, wide, 2e-2f, "joined products with inputs in 16 bits give something else");
  }
  const Outcome read_alone = run(GGML_TYPE_F32, "0", "0", &Names::raw_key, 1),
                read = run(GGML_TYPE_F32, "1", "0", &Names::raw_key, 1);
  if (read.products != 5) fail("a product that the host reads is joined", read.products);
  near(read, read_alone, 1e-5f, "the host reads a product");

  std::puts(
      "norms, rotations and cache rows are joined, and inputs of products kept in 16 bits, where nobody else reads "
      "them");
  return 0;
}
