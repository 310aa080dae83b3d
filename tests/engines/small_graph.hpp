// A small graph of a host on NVB0, and what programs that test the plug-in share.
#pragma once

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"

[[noreturn]] inline void fail(const char* text, int number) {
  std::fprintf(stderr, "%s (%d)\n", text, number);
  std::exit(1);
}

// The library's function of this name, for a program that defines one of its own to count or to fail calls.
template <typename Function>
Function* original(const char* name) {
  auto* function = reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
  if (function == nullptr) std::abort();
  return function;
}

inline constexpr int64_t kWidth = 64, kTokens = 5, kKeys = 256, kHeads = 4, kHeadDim = 64;

// Products with quantised and plain weights, a gather, and attention over quantised keys with a mask for each head.
class Model {
 public:
  // `number` goes into the attention's scale, so that models share none; `keys` times as many are seen.
  Model(ggml_backend_t backend, int number, int64_t keys = 1) : backend_(backend) {
    context_ = ggml_init({size_t{1} << 20, nullptr, true});
    ggml_context* c = context_;
    table_ = ggml_new_tensor_2d(c, GGML_TYPE_F16, kWidth, 32);
    rows_ = ggml_new_tensor_1d(c, GGML_TYPE_I32, kTokens);
    weight_ = ggml_new_tensor_2d(c, GGML_TYPE_Q8_0, kWidth, kHeads * kHeadDim);
    key_ = ggml_new_tensor_3d(c, GGML_TYPE_Q8_0, kHeadDim, keys * kKeys, kHeads);
    value_ = ggml_new_tensor_3d(c, GGML_TYPE_Q8_0, kHeadDim, keys * kKeys, kHeads);
    mask_ = ggml_new_tensor_2d(c, GGML_TYPE_F16, keys * kKeys, 64);
    ggml_tensor* x = ggml_get_rows(c, table_, rows_);
    ggml_tensor* q =
        ggml_reshape_3d(c, ggml_mul_mat(c, weight_, ggml_rms_norm(c, x, 1e-5f)), kHeadDim, kHeads, kTokens);
    q = ggml_permute(c, q, 0, 2, 1, 3);
    result_ = ggml_soft_max(c, ggml_flash_attn_ext(c, q, key_, value_, mask_, 0.1f + 1e-4f * number, 8.0f, 0.0f));
    graph_ = ggml_new_graph(c);
    ggml_build_forward_expand(graph_, result_);
    buffer_ = ggml_backend_alloc_ctx_tensors(c, backend);
    if (buffer_ == nullptr) fail("no memory for tensors", number);
    unsigned random = 1;
    for (ggml_tensor* tensor : {table_, weight_, key_, value_, mask_}) fill(tensor, random);
    const int32_t rows[kTokens] = {3, 0, 31, 7, 7};
    ggml_backend_tensor_set(rows_, rows, 0, sizeof rows);
  }
  ~Model() {
    ggml_backend_buffer_free(buffer_);
    ggml_free(context_);
  }

  ggml_status compute() { return ggml_backend_graph_compute(backend_, graph_); }

  // Other values of the table.
  void set_table(unsigned random) { fill(table_, random); }
  // Other rows of the table, which the host writes between two steps.
  void set_rows(const int32_t (&rows)[kTokens]) { ggml_backend_tensor_set(rows_, rows, 0, sizeof rows); }

  std::vector<float> result() const {
    std::vector<float> values(static_cast<size_t>(ggml_nelements(result_)));
    ggml_backend_tensor_get(result_, values.data(), 0, ggml_nbytes(result_));
    return values;
  }

 private:
  static void fill(ggml_tensor* tensor, unsigned& random) {
    const int64_t columns = tensor->ne[0], rows = ggml_nelements(tensor) / columns;
    std::vector<float> values(static_cast<size_t>(rows * columns));
    for (float& value : values) {
      random = random * 1664525u + 1013904223u;
      value = static_cast<float>(random >> 8) / 8388608.0f - 1.0f;
    }
    std::vector<char> encoded(ggml_nbytes(tensor));
    ggml_quantize_chunk(tensor->type, values.data(), encoded.data(), 0, rows, columns, nullptr);
    ggml_backend_tensor_set(tensor, encoded.data(), 0, encoded.size());
  }

  ggml_backend_t backend_;
  ggml_context* context_;
  ggml_tensor *table_, *rows_, *weight_, *key_, *value_, *mask_, *result_;
  ggml_cgraph* graph_;
  ggml_backend_buffer_t buffer_;
};

inline ggml_backend_t make_backend() {
  ggml_backend_t backend = ggml_backend_init_by_name("NVB0", nullptr);
  if (backend == nullptr) fail("NVB0 makes no stream", 0);
  return backend;
}
