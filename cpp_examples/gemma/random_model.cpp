#include "random_model.h"

#include <nvbackend.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "error.h"

namespace gemma {
namespace {

// From the models' published config.json files.
struct Shape {
  const char* name;
  int generation;
  int64_t layers, width, feed_forward, query_heads, kv_heads, head_dim, window, vocabulary, max_positions;
  float query_scalar;  // attention scale = 1/√query_scalar
  float global_base;
  float global_factor;
};
constexpr Shape kShapes[] = {
    {"gemma3-270m", 3, 18, 640, 2048, 4, 1, 256, 512, 262144, 32768, 256, 1e6F, 1},
    {"gemma3-1b", 3, 26, 1152, 6912, 4, 1, 256, 512, 262144, 32768, 256, 1e6F, 1},
    {"gemma3-4b", 3, 34, 2560, 10240, 8, 4, 256, 1024, 262208, 131072, 256, 1e6F, 8},
    {"gemma3-12b", 3, 48, 3840, 15360, 16, 8, 256, 1024, 262208, 131072, 256, 1e6F, 8},
    {"gemma3-27b", 3, 62, 5376, 21504, 32, 16, 128, 1024, 262208, 131072, 168, 1e6F, 8},
    {"gemma2-2b", 2, 26, 2304, 9216, 8, 4, 256, 4096, 256000, 8192, 256, 1e4F, 1},
    {"gemma2-9b", 2, 42, 3584, 14336, 16, 8, 256, 4096, 256000, 8192, 256, 1e4F, 1},
    {"gemma2-27b", 2, 46, 4608, 36864, 32, 16, 128, 4096, 256000, 8192, 144, 1e4F, 1},
    {"gemma1-2b", 1, 18, 2048, 16384, 8, 1, 256, 0, 256000, 8192, 256, 1e4F, 1},
    {"gemma1-7b", 1, 28, 3072, 24576, 16, 16, 256, 0, 256000, 8192, 256, 1e4F, 1},
};

// transformers' initializer_range; with it the logits of all these shapes have a deviation near 1.
constexpr float kDeviation = 0.02F;
// Random values that are made; a prime, so that the rows of a matrix do not repeat as the values do.
constexpr size_t kBlock = 8388593;

Config make_config(const Shape& shape) {
  Config config;
  config.generation = shape.generation;
  config.vocabulary = shape.vocabulary;
  config.width = shape.width;
  config.feed_forward = shape.feed_forward;
  config.layers = shape.layers;
  config.query_heads = shape.query_heads;
  config.kv_heads = shape.kv_heads;
  config.head_dim = shape.head_dim;
  config.max_positions = shape.max_positions;
  config.activation = NVB_ACTIVATION_GELU_TANH;
  config.attention_scale = 1 / std::sqrt(shape.query_scalar);
  config.attention_soft_cap = shape.generation == 2 ? 50 : 0;
  config.logit_soft_cap = shape.generation == 2 ? 30 : 0;
  config.window = shape.window;
  const int64_t pattern = shape.generation == 3 ? 6 : 2;
  for (int64_t i = 0; i < shape.layers; ++i) config.local.push_back(shape.window > 0 && (i + 1) % pattern != 0);
  config.global_rope = {shape.global_base, 1 / shape.global_factor};
  config.eos = {1};
  return config;
}

// Calls work(first, last) on all cores, with the items [0, count) shared out.
template <typename Work>
void on_all_cores(size_t count, Work work) {
  const size_t threads = std::max(1U, std::thread::hardware_concurrency());
  const size_t share = (count + threads - 1) / threads;
  std::vector<std::thread> workers;
  for (size_t first = 0; first < count; first += share) {
    workers.emplace_back(work, first, std::min(first + share, count));
  }
  for (std::thread& worker : workers) worker.join();
}

// The sum of four uniform numbers: close to a normal distribution, and the same on every machine.
uint16_t random_value(uint64_t index) {
  uint64_t bits = (index + 1) * 0x9E3779B97F4A7C15;  // SplitMix64 (Steele et al. 2014)
  bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9;
  bits = (bits ^ bits >> 27) * 0x94D049BB133111EB;
  bits ^= bits >> 31;
  int32_t sum = -2 * 65535;
  for (int i = 0; i < 4; ++i) sum += static_cast<int32_t>(bits >> 16 * i & 0xFFFF);
  // A uniform number of 16 bits has a deviation of 65536/√12, the sum of four twice that.
  const float value = static_cast<float>(sum) * (kDeviation / (65536 / std::sqrt(3.0F)));
  uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  return static_cast<uint16_t>((word + 0x8000) >> 16);
}

std::unique_ptr<uint16_t[]> random_values(size_t count) {
  std::unique_ptr<uint16_t[]> values(new uint16_t[count]);
  uint16_t* data = values.get();
  const size_t block = std::min(count, kBlock);
  on_all_cores(block, [data](size_t first, size_t last) {
    for (size_t i = first; i < last; ++i) data[i] = random_value(i);
  });
  on_all_cores((count - 1) / block, [data, block, count](size_t first, size_t last) {
    for (size_t i = first + 1; i <= last; ++i) {
      std::memcpy(data + i * block, data, std::min(block, count - i * block) * sizeof *data);
    }
  });
  return values;
}

class Builder {
 public:
  explicit Builder(const Shape& shape) {
    model_.config = make_config(shape);
    // The embedding is the largest tensor; the others are pieces of the same values.
    count_ = static_cast<size_t>(shape.vocabulary * shape.width);
    model_.values = random_values(count_ + static_cast<size_t>(kMaxVector));
    std::memset(model_.values.get() + count_, 0, kMaxVector * sizeof(uint16_t));
  }

  RandomModel build() {
    const Config& config = model_.config;
    matrix("model.embed_tokens.weight", config.vocabulary, config.width);
    norm("model.norm.weight", config.width);
    for (int64_t i = 0; i < config.layers; ++i) {
      const std::string layer = "model.layers." + std::to_string(i) + ".";
      norm(layer + "input_layernorm.weight", config.width);
      norm(layer + "post_attention_layernorm.weight", config.width);
      if (config.post_norm()) {
        norm(layer + "pre_feedforward_layernorm.weight", config.width);
        norm(layer + "post_feedforward_layernorm.weight", config.width);
      }
      if (config.query_key_norm()) {
        norm(layer + "self_attn.q_norm.weight", config.head_dim);
        norm(layer + "self_attn.k_norm.weight", config.head_dim);
      }
      matrix(layer + "self_attn.q_proj.weight", config.query_width(), config.width);
      matrix(layer + "self_attn.k_proj.weight", config.kv_width(), config.width);
      matrix(layer + "self_attn.v_proj.weight", config.kv_width(), config.width);
      matrix(layer + "self_attn.o_proj.weight", config.width, config.query_width());
      matrix(layer + "mlp.gate_proj.weight", config.feed_forward, config.width);
      matrix(layer + "mlp.up_proj.weight", config.feed_forward, config.width);
      matrix(layer + "mlp.down_proj.weight", config.width, config.feed_forward);
    }
    return std::move(model_);
  }

 private:
  static constexpr int64_t kMaxVector = 8192;

  void matrix(const std::string& name, int64_t rows, int64_t columns) {
    const size_t size = static_cast<size_t>(rows * columns);
    const size_t room = (count_ - size) / 64 + 1;  // offsets of 128 bytes
    const size_t offset = matrices_++ * 65537 % room * 64;
    model_.tensors[name] = {"BF16", {rows, columns}, model_.values.get() + offset, size * sizeof(uint16_t)};
  }

  // All zero: norms multiply by 1 + w.
  void norm(const std::string& name, int64_t length) {
    model_.tensors[name] = {
        "BF16", {length}, model_.values.get() + count_, static_cast<size_t>(length) * sizeof(uint16_t)};
  }

  RandomModel model_;
  size_t count_ = 0;
  size_t matrices_ = 0;
};

}  // namespace

std::string random_model_names() {
  std::string names;
  for (const Shape& shape : kShapes) names += (names.empty() ? "" : " ") + std::string(shape.name);
  return names;
}

RandomModel make_random_model(const std::string& name) {
  for (const Shape& shape : kShapes) {
    if (name == shape.name) return Builder(shape).build();
  }
  fail("--random is \"", name, "\"; it must be one of ", random_model_names());
}

}  // namespace gemma
