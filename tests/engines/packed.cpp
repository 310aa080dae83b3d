// The plug-in packs blocks of a model's weights in their place, with the results of blocks that stay as they are, and
// the host does not see it: what it reads is what it wrote, and what it writes or computes otherwise finds blocks.
//
//   packed PLUGIN
//
// The program defines the functions of libnvbackend that it counts, which the plug-in then calls in their place.
#include <nvbackend.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <thread>

#include "small_graph.hpp"

namespace {

std::atomic<int> packs{0}, restores{0}, products{0};

constexpr int64_t kColumns = 256, kLargest = 64;

// What a layer does beside its products with queries, keys and values.
enum class Also { Nothing, Gather, Decode };

struct Layer {
  Layer(ggml_backend_t backend, ggml_type type, int64_t rows, bool is_model, Also also = Also::Nothing,
        int64_t key_rows = 32) {
    weights_ = ggml_init({size_t{1} << 20, nullptr, true});
    context_ = ggml_init({size_t{1} << 20, nullptr, true});
    const int64_t counts[] = {kLargest, key_rows, 32};
    for (int i = 0; i < 3; ++i) matrices[i] = ggml_new_tensor_2d(weights_, type, kColumns, counts[i]);
    ggml_context* c = context_;
    input = ggml_new_tensor_2d(c, GGML_TYPE_F32, kColumns, rows);
    ggml_tensor* numbers = ggml_new_tensor_1d(c, GGML_TYPE_I32, 3);
    graph_ = ggml_new_graph(c);
    const auto add = [&](ggml_tensor* result) {
      ggml_set_output(result);
      results.push_back(result);
      ggml_build_forward_expand(graph_, result);
    };
    ggml_tensor* x = ggml_scale(c, input, 2.0f);
    for (ggml_tensor* matrix : matrices) {
      // A sum behind each, so that products of one row may be joined.
      add(ggml_scale(c, ggml_mul_mat(c, matrix, x), 0.5f));
    }
    if (also == Also::Gather) add(ggml_get_rows(c, matrices[1], numbers));
    if (also == Also::Decode) add(ggml_cast(c, matrices[1], GGML_TYPE_F32));
    memory_ = ggml_backend_alloc_ctx_tensors(weights_, backend);
    others_ = ggml_backend_alloc_ctx_tensors(c, backend);
    if (memory_ == nullptr || others_ == nullptr) fail("no memory for tensors", 0);
    if (is_model) ggml_backend_buffer_set_usage(memory_, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    unsigned random = 1;
    for (int i = 0; i < 3; ++i) set(i, random++);
    std::vector<float> values(static_cast<size_t>(ggml_nelements(input)));
    for (size_t i = 0; i < values.size(); ++i) values[i] = std::sin(0.7f * static_cast<float>(i));
    ggml_backend_tensor_set(input, values.data(), 0, ggml_nbytes(input));
    const int32_t places[] = {31, 0, 15};
    ggml_backend_tensor_set(numbers, places, 0, sizeof places);
  }
  ~Layer() {
    ggml_backend_buffer_free(others_);
    ggml_backend_buffer_free(memory_);
    ggml_free(context_);
    ggml_free(weights_);
  }

  // Other blocks of a matrix, and what they are.
  void set(int matrix, unsigned random) {
    ggml_tensor* tensor = matrices[matrix];
    std::vector<float> values(static_cast<size_t>(ggml_nelements(tensor)));
    for (float& value : values) {
      random = random * 1664525u + 1013904223u;
      value = static_cast<float>(random >> 8) / 8388608.0f - 1.0f;
    }
    blocks[matrix].resize(ggml_nbytes(tensor));
    ggml_quantize_chunk(tensor->type, values.data(), blocks[matrix].data(), 0, ggml_nrows(tensor), kColumns, nullptr);
    ggml_backend_tensor_set(tensor, blocks[matrix].data(), 0, blocks[matrix].size());
  }
  void expect_blocks(int matrix) const {
    std::vector<char> found(blocks[matrix].size());
    ggml_backend_tensor_get(matrices[matrix], found.data(), 0, found.size());
    if (found != blocks[matrix]) fail("the host reads other blocks than it wrote", matrix);
  }

  std::vector<float> compute(ggml_backend_t backend) {
    if (ggml_backend_graph_compute(backend, graph_) != GGML_STATUS_SUCCESS) fail("the graph failed", 0);
    std::vector<float> all;
    for (const ggml_tensor* result : results) {
      const size_t before = all.size();
      all.resize(before + static_cast<size_t>(ggml_nelements(result)));
      ggml_backend_tensor_get(result, all.data() + before, 0, ggml_nbytes(result));
    }
    return all;
  }

  ggml_tensor *matrices[3], *input;
  std::vector<ggml_tensor*> results;
  std::vector<char> blocks[3];

 private:
  ggml_context *context_, *weights_;
  ggml_cgraph* graph_;
  ggml_backend_buffer_t memory_, others_;
};

void near(const std::vector<float>& found, const std::vector<float>& wanted, const char* text) {
  if (found.size() != wanted.size() || found.empty()) fail(text, static_cast<int>(found.size()));
  for (size_t i = 0; i < found.size(); ++i) {
    const bool equal = std::isnan(wanted[i]) ? std::isnan(found[i])
                                             : std::fabs(found[i] - wanted[i]) <= 1e-4f + 1e-5f * std::fabs(wanted[i]);
    if (!equal) {
      std::fprintf(stderr, "%s: %g for %g at %zu\n", text, static_cast<double>(found[i]),
                   static_cast<double>(wanted[i]), i);
      std::exit(1);
    }
  }
}

void expect_counts(int packed, int restored, const char* text) {
  if (packs == packed && restores == restored) return;
  std::fprintf(stderr, "%s: %d times packed, %d wanted, %d times put back, %d wanted\n", text, packs.load(), packed,
               restores.load(), restored);
  std::exit(1);
}

void begin(const char* value) {
  setenv("NVB_GGML_PACK", value, 1);
  packs = restores = products = 0;
}

void compare(ggml_backend_t backend, ggml_type type, int64_t rows) {
  begin("0");
  Layer plain(backend, type, rows, true);
  const std::vector<float> wanted = plain.compute(backend);
  expect_counts(0, 0, "a plug-in that packs nothing");
  const int plain_products = products;

  begin("1");
  Layer packed(backend, type, rows, true);
  // The third time the graph is a recording.
  for (int time = 0; time < 4; ++time) near(packed.compute(backend), wanted, "packed weights give something else");
  // All three lie one behind the other.
  expect_counts(1, 0, "weights of one input");
  if (rows == 1 && (plain_products != 1 || products != 2)) fail("products of one row are not joined", products);

  packed.expect_blocks(1);
  expect_counts(1, 1, "blocks that the host reads");
  packed.expect_blocks(0);
  packed.expect_blocks(2);
  near(packed.compute(backend), wanted, "weights that were read give something else");
  expect_counts(2, 1, "weights that were read");
  packed.set(1, 77);
  begin("0");
  plain.set(1, 77);
  const std::vector<float> changed = plain.compute(backend);
  begin("1");
  for (int time = 0; time < 3; ++time) near(packed.compute(backend), changed, "other blocks give something else");
  expect_counts(1, 0, "other blocks");

  // A copy of a model's weight is the host's own affair.
  std::vector<char> copy(packed.blocks[2].size());
  ggml_backend_tensor_copy(packed.matrices[2], plain.matrices[2]);
  ggml_backend_tensor_get(plain.matrices[2], copy.data(), 0, copy.size());
  if (copy != packed.blocks[2]) fail("a copied tensor has other blocks", 0);
}

void look_elsewhere(ggml_backend_t backend, ggml_type type) {
  const struct {
    bool is_model;
    Also also;
    int64_t key_rows;
    int packed;
    const char* text;
  } cases[] = {
      {false, Also::Nothing, 32, 0, "tensors that are no model's weights"},
      {true, Also::Gather, 32, 1, "rows gathered from a packed weight"},
      // The keys stay as they are, between queries and values.
      {true, Also::Decode, 32, 2, "a weight that is decoded too"},
      {true, Also::Nothing, 40, 2, "rows that are no whole tiles"},
  };
  for (const auto& one : cases) {
    begin("0");
    Layer plain(backend, type, 3, one.is_model, one.also, one.key_rows);
    const std::vector<float> wanted = plain.compute(backend);
    begin("1");
    Layer packed(backend, type, 3, one.is_model, one.also, one.key_rows);
    for (int time = 0; time < 3; ++time) near(packed.compute(backend), wanted, one.text);
    expect_counts(one.packed, 0, one.text);
  }

  // A scale that is not finite: all three are tried as one and stay as they are, the other two are packed the next
  // time.
  begin("0");
  Layer plain(backend, type, 3, true);
  begin("1");
  Layer packed(backend, type, 3, true);
  for (Layer* layer : {&plain, &packed}) {
    layer->blocks[0][0] = 0x01, layer->blocks[0][1] = 0x7e;
    ggml_backend_tensor_set(layer->matrices[0], layer->blocks[0].data(), 0, layer->blocks[0].size());
  }
  begin("0");
  const std::vector<float> wanted = plain.compute(backend);
  begin("1");
  for (int time = 0; time < 3; ++time) near(packed.compute(backend), wanted, "a scale that is NaN");
  packed.expect_blocks(0);
  expect_counts(2, 0, "a scale that is NaN");
}

// Two streams compute while the host reads blocks, which are put back and packed again under them.
void disturb(ggml_backend_t backend, ggml_type type) {
  begin("1");
  ggml_backend_t other = make_backend();
  {
    Layer one(backend, type, 1, true), two(other, type, 4, true);
    const std::vector<float> first = one.compute(backend), second = two.compute(other);
    std::thread thread([&] {
      for (int time = 0; time < 200; ++time) near(two.compute(other), second, "the second stream");
    });
    std::thread reader([&] {
      for (int time = 0; time < 50; ++time) {
        one.expect_blocks(time % 3);
        two.expect_blocks(time % 3);
      }
    });
    for (int time = 0; time < 200; ++time) near(one.compute(backend), first, "the first stream");
    thread.join();
    reader.join();
  }
  ggml_backend_free(other);
}

}  // namespace

extern "C" {

nvb_status nvb_weight_create(const nvb_backend* backend, const nvb_weight_desc* desc, nvb_stream* stream,
                             nvb_weight** weight) {
  if (desc->source == NVB_SOURCE_IN_PLACE) ++packs;
  static auto* function = original<decltype(nvb_weight_create)>("nvb_weight_create");
  return function(backend, desc, stream, weight);
}

nvb_status nvb_weight_restore_blocks(nvb_weight* weight, nvb_stream* stream) {
  ++restores;
  static auto* function = original<decltype(nvb_weight_restore_blocks)>("nvb_weight_restore_blocks");
  return function(weight, stream);
}

nvb_status nvb_linear(const nvb_backend* backend, const nvb_linear_args* args, nvb_stream* stream) {
  ++products;
  static auto* function = original<decltype(nvb_linear)>("nvb_linear");
  return function(backend, args, stream);
}
}

int main(int count, char** arguments) {
  if (count < 2 || ggml_backend_load(arguments[1]) == nullptr) fail("PLUGIN", count);
  setenv("NVB_GGML_JOIN", "1", 1);
  ggml_backend_t backend = make_backend();
  for (const ggml_type type : {GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q8_0}) {
    for (const int64_t rows : {int64_t{1}, int64_t{5}, int64_t{40}}) compare(backend, type, rows);
    look_elsewhere(backend, type);
    disturb(backend, type);
  }
  begin("1");
  Layer fine(backend, GGML_TYPE_Q4_K, 3, true);
  fine.compute(backend);
  expect_counts(0, 0, "a type that has no packed layout");
  ggml_backend_free(backend);
  std::puts("blocks of a model's weights are packed, and the host reads, writes and computes with them as before");
  return 0;
}
