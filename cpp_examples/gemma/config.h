// What a Gemma is: the numbers of config.json, checked, with the defaults of Hugging Face transformers for absent keys.
#ifndef GEMMA_CONFIG_H
#define GEMMA_CONFIG_H

#include <cstdint>
#include <string>
#include <vector>

namespace gemma {

// Rotation of the queries and keys of one kind of layer: by position · position_scale · base^(−2i / head_dim).
struct Rope {
  float base = 10000;
  float position_scale = 1;
};

struct Config {
  int generation = 3;  // 1, 2 or 3
  int64_t vocabulary = 0;
  int64_t width = 0;
  int64_t feed_forward = 0;
  int64_t layers = 0;
  int64_t query_heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t max_positions = 0;
  float epsilon = 1e-6F;
  uint32_t activation = 0;       // NVB_ACTIVATION_…
  float attention_scale = 0;     // multiplies query · key
  float attention_soft_cap = 0;  // 0: none
  float logit_soft_cap = 0;      // 0: none
  int64_t window = 0;            // tokens that a local layer sees, itself included
  std::vector<bool> local;       // of each layer: whether it sees the window only
  Rope local_rope;
  Rope global_rope;
  bool attention_bias = false;
  float norm_offset = 1;  // norms multiply by norm_offset + weight; GGUF files hold the sum, with 0 here
  int32_t bos = 2;
  std::vector<int32_t> eos;
  std::string origin = "config.json";  // what these numbers were read from, for errors about tensors

  bool query_key_norm() const { return generation == 3; }
  // Gemma 2 and 3 normalise each branch before it is added to the residual stream.
  bool post_norm() const { return generation >= 2; }
  int64_t query_width() const { return query_heads * head_dim; }
  int64_t kv_width() const { return kv_heads * head_dim; }
  int64_t qkv_width() const { return query_width() + 2 * kv_width(); }
};

// Reads config.json and, for the tokens that end a text, generation_config.json if it is there.
// Models: gemma, gemma2, gemma3_text, and the text part of gemma3.
// Errors: a model of another type, and any value that is missing, out of its range or not supported.
Config read_config(const std::string& folder);

}  // namespace gemma

#endif  // GEMMA_CONFIG_H
