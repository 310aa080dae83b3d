#include "sbs_config.h"

#include <nvbackend.h>

#include <cmath>
#include <limits>

#include "error.h"

namespace gemma {
namespace {

constexpr uint32_t kMaxLayers = 1024;
constexpr uint32_t kAny = UINT32_MAX;
constexpr float kLargest = std::numeric_limits<float>::max();

// gemma.cpp's numbers of published models.
constexpr uint32_t kGemma3Of4B = 14, kGemma3Of1B = 15, kGemma3Of12B = 16, kGemma3Of27B = 17, kGemma3Of270M = 18;
constexpr uint32_t kTextOf4B = 20, kTextOf12B = 21, kTextOf27B = 22;  // of Gemma 3, without the vision tower

bool is_27b(uint32_t model) {
  return model == kGemma3Of27B || model == kTextOf27B;
}
bool divides_positions(uint32_t model) {
  return model == kGemma3Of4B || model == kGemma3Of12B || model == kTextOf4B || model == kTextOf12B || is_27b(model);
}
bool is_published_gemma3(uint32_t model) {
  return divides_positions(model) || model == kGemma3Of1B || model == kGemma3Of270M;
}

// What all layers of a Gemma have in common.
struct LayerShape {
  uint32_t width, feed_forward, query_heads, kv_heads, head_dim, post_norm, activation;
  bool query_key_norm;

  bool operator==(const LayerShape& other) const {
    return width == other.width && feed_forward == other.feed_forward && query_heads == other.query_heads &&
           kv_heads == other.kv_heads && head_dim == other.head_dim && post_norm == other.post_norm &&
           activation == other.activation && query_key_norm == other.query_key_norm;
  }
};

// A field that has this value wherever the engine can run the model.
void expect(Fields& fields, const char* name, uint32_t value) {
  const uint32_t found = fields.integer(name, value, 0, kAny);
  if (found == value) return;
  fail(fields.where(), ": ", name, " is ", static_cast<int32_t>(found), "; only ", static_cast<int32_t>(value),
       " is supported");
}

LayerShape read_layer(Fields fields) {
  LayerShape shape{};
  shape.width = fields.integer("model_dim", {}, 1, 65536);
  fields.integer("griffin_dim", 0, 0, kAny);  // of a model family that is gone
  shape.feed_forward = fields.integer("ff_hidden_dim", {}, 1, 1 << 20);
  shape.query_heads = fields.integer("heads", {}, 1, 1024);
  shape.kv_heads = fields.integer("kv_heads", {}, 1, 1024);
  shape.head_dim = fields.integer("qkv_dim", {}, 2, 512);
  fields.integer("conv1d_width", 0, 0, kAny);
  expect(fields, "ff_biases", 0);
  expect(fields, "softmax_attn_output_biases", 0);
  fields.boolean("optimized_gating", true);  // how the exporter transposed the gate, which the file's shape shows
  shape.post_norm = fields.integer("post_norm", 0, 0, 1);
  expect(fields, "type", 0);
  shape.activation = fields.integer("activation", 0, 0, 1);
  expect(fields, "post_qk", 0);
  shape.query_key_norm = fields.boolean("use_qk_norm", false);
  expect(fields, "norm_v", 0);
  expect(fields, "num_experts", 0);
  expect(fields, "num_experts_per_datapoint", 0);
  expect(fields, "ple_dim", 0);
  expect(fields, "kv_share_layer_idx", kAny);  // -1: none
  expect(fields, "kv_lora_rank", 0);
  fields.skip();  // all that follows belongs to latent attention and to experts, which are absent
  return shape;
}

LayerShape read_layers(Fields& fields, uint32_t layers) {
  const uint32_t count = fields.count("layer_configs", kMaxLayers);
  if (count != layers) fail(fields.where(), ": there are ", count, " layer_configs; num_layers is ", layers);
  const LayerShape first = read_layer(fields.structure("layer_configs[0]"));
  for (uint32_t i = 1; i < count; ++i) {
    const std::string name = "layer_configs[" + std::to_string(i) + "]";
    if (!(read_layer(fields.structure(name)) == first)) {
      fail(fields.where(), ": ", name, " differs from the first, which is not supported");
    }
  }
  if (first.query_heads % first.kv_heads != 0) {
    fail(fields.where(), ": heads is ", first.query_heads, "; it must be a multiple of kv_heads = ", first.kv_heads);
  }
  if (first.query_heads == first.kv_heads && first.query_heads != 1) {
    fail(fields.where(), ": as many kv_heads as heads, ", first.kv_heads, ", are not supported");
  }
  if (first.head_dim % 2 != 0) fail(fields.where(), ": qkv_dim is ", first.head_dim, "; it must be even");
  if (first.query_key_norm && first.post_norm == 0) {
    fail(fields.where(), ": use_qk_norm without post_norm is not supported");
  }
  return first;
}

// A layer whose window is the whole text is global.
void read_windows(Fields& fields, uint32_t longest, Config* config) {
  const uint32_t count = fields.count("attention_window_sizes", kMaxLayers);
  if (count != config->layers) {
    fail(fields.where(), ": there are ", count, " attention_window_sizes; num_layers is ", config->layers);
  }
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t window = fields.integer("attention_window_sizes", longest, 1, longest);
    config->local.push_back(window != longest);
    if (window == longest) continue;
    if (config->window != 0 && config->window != window) {
      fail(fields.where(), ": windows of ", config->window, " and of ", window, " tokens are not supported together");
    }
    config->window = window;
  }
}

float attention_scale(uint32_t query_scale, uint32_t model, const Config& config) {
  const float for_a_head = static_cast<float>(config.width / config.query_heads);
  if (is_27b(model)) return 1 / std::sqrt(for_a_head);
  if (query_scale == 2) return 1;
  return 1 / std::sqrt(query_scale == 1 ? for_a_head : static_cast<float>(config.head_dim));
}

// The fields behind the tokens: they came later, one by one.
void read_ropes(Fields& fields, uint32_t model, Config* config) {
  // Files of before the field say nothing; of those, Gemma 3 alone has a base of its own for global layers.
  const bool two_bases = fields.boolean("use_global_timescale", config->generation == 3);
  const float part = fields.number("partial_rotary_factor", 1, 0, kLargest);
  if (part != 1) fail(fields.where(), ": partial_rotary_factor is ", part, "; only 1 is supported");
  expect(fields, "ple_dim", 0);
  if (fields.integer("hc_mult", 0, 0, kAny) > 1) {
    fail(fields.where(), ": hc_mult is above 1: hyper-connections are not supported");
  }
  config->local_rope.base = fields.number("rope_theta", 1e4F, 1, 1e12F);
  // What YaRN and compressed attention do belongs to layers that are absent.
  fields.number("compress_rope_theta", 0, -kLargest, kLargest);
  fields.integer("yarn_orig_seq_len", 0, 0, kAny);
  for (const char* name : {"yarn_factor", "yarn_beta_fast", "yarn_beta_slow"}) {
    fields.number(name, 1, -kLargest, kLargest);
  }
  fields.integer("hc_sinkhorn_iters", 0, 0, kAny);
  fields.number("hc_eps", 0, -kLargest, kLargest);
  expect(fields, "num_mtp_layers", 0);
  expect(fields, "tokenizer_kind", 0);
  expect(fields, "is_encoder_decoder", 0);
  const float global = fields.number("global_rope_theta", 1e6F, 1, 1e12F);
  fields.skip();  // fields of after this page
  config->global_rope = config->local_rope;
  if (two_bases) config->global_rope.base = global;
  if (!is_published_gemma3(model)) return;
  config->global_rope.base = 1e6F;
  if (divides_positions(model)) config->global_rope.position_scale = 0.125F;
}

}  // namespace

Config read_sbs_config(const Blob& blob, const std::string& where) {
  Fields words(blob, where);
  Fields fields = words.structure("the model");
  if (words.more()) fail(where, ": words behind the model");
  Config config;
  config.origin = "the blob \"config\"";
  // 4 and above: other architectures. Gemma 1 to 3 all have had 1.
  fields.integer("model_family_version", 1, 1, 3);
  fields.text("display_name");
  const uint32_t model = fields.integer("model", {}, 0, 1000);
  fields.integer("wrapping", 0, 0, 3);
  fields.integer("weight", 0, 0, 1000);  // of most tensors; each says its own
  config.layers = fields.integer("num_layers", {}, 1, kMaxLayers);
  config.width = fields.integer("model_dim", {}, 1, 65536);
  config.vocabulary = fields.integer("vocab_size", {}, 3, 1 << 24);
  const uint32_t longest = fields.integer("max_seq_len", {}, 1, 1 << 24);
  config.max_positions = longest;
  fields.integer("num_tensor_scales", 0, 0, kAny);
  config.attention_soft_cap = fields.number("att_cap", 0, 0, 1e6F);
  config.logit_soft_cap = fields.number("final_cap", 0, 0, 1e6F);
  expect(fields, "absolute_pe", 0);
  fields.boolean("use_local_attention", false);
  const uint32_t query_scale = fields.integer("query_scale", 0, 0, 2);

  const LayerShape shape = read_layers(fields, static_cast<uint32_t>(config.layers));
  if (shape.width != config.width) {
    fail(fields.where(), ": model_dim of layers is ", shape.width, "; that of the model is ", config.width);
  }
  config.generation = shape.query_key_norm ? 3 : shape.post_norm != 0 ? 2 : 1;
  config.feed_forward = shape.feed_forward;
  config.query_heads = shape.query_heads;
  config.kv_heads = shape.kv_heads;
  config.head_dim = shape.head_dim;
  config.activation = shape.activation == 0 ? NVB_ACTIVATION_GELU_TANH : NVB_ACTIVATION_SILU;
  config.attention_scale = attention_scale(query_scale, model, config);
  read_windows(fields, longest, &config);
  fields.integer("norm_num_groups", 1, 0, kAny);
  if (fields.more()) fields.structure("vit_config");  // the vision tower, which no text needs
  fields.integer("pool_dim", 1, 0, kAny);
  const uint32_t last = static_cast<uint32_t>(config.vocabulary - 1);
  const uint32_t eos = fields.integer("eos_id", 1, 0, last);
  const uint32_t second_eos = fields.integer("secondary_eos_id", eos, 0, last);
  config.eos = {static_cast<int32_t>(eos)};
  if (second_eos != eos) config.eos.push_back(static_cast<int32_t>(second_eos));
  const uint32_t names = fields.count("scale_base_names", 64 * 1024);
  for (uint32_t i = 0; i < names; ++i) fields.text("scale_base_names");
  read_ropes(fields, model, &config);
  return config;
}

}  // namespace gemma
