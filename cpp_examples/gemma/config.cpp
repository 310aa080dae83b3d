#include "config.h"

#include <nvbackend.h>

#include <cmath>

#include "error.h"
#include "mapped_file.h"
#include "strict_json.h"

namespace gemma {
namespace {

using nlohmann::json;

constexpr size_t kMaxConfigBytes = 1'000'000;
constexpr int64_t kMaxVocabulary = 1 << 24;
constexpr int64_t kMaxPositions = 1 << 24;

// One JSON object of the configuration and its name for errors. A key that is null counts as absent, but for `off`.
class Section {
 public:
  Section(json object, std::string where) : object_(std::move(object)), where_(std::move(where)) {}

  const json* find(const char* key) const {
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }

  int64_t integer(const char* key, int64_t fallback, int64_t lowest, int64_t highest) const {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    // An unsigned number beyond int64 would turn negative in get<int64_t>.
    if (!value->is_number_integer() || (value->is_number_unsigned() && value->get<uint64_t>() > INT64_MAX) ||
        value->get<int64_t>() < lowest || value->get<int64_t>() > highest) {
      fail(where_, ": ", key, " is ", value->dump(), "; it must be an integer from ", lowest, " to ", highest);
    }
    return value->get<int64_t>();
  }

  float number(const char* key, float fallback, float lowest, float highest) const {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_number() || !(value->get<double>() >= lowest && value->get<double>() <= highest)) {
      fail(where_, ": ", key, " is ", value->dump(), "; it must be a number from ", lowest, " to ", highest);
    }
    return value->get<float>();
  }

  // A key that is there and null: it switches a feature off that has a default.
  bool off(const char* key) const { return object_.contains(key) && find(key) == nullptr; }

  bool boolean(const char* key, bool fallback) const {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) fail(where_, ": ", key, " is ", value->dump(), "; it must be true or false");
    return value->get<bool>();
  }

  std::string string(const char* key, const char* fallback) const {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_string()) fail(where_, ": ", key, " is ", value->dump(), "; it must be a string");
    return value->get<std::string>();
  }

  // The object below a key, empty if it is absent.
  Section section(const char* key) const {
    const json* value = find(key);
    if (value == nullptr) return Section(json::object(), where_ + ": " + key);
    if (!value->is_object()) fail(where_, ": ", key, " is ", value->dump(), "; it must be an object");
    return Section(*value, where_ + ": " + key);
  }

  const std::string& where() const { return where_; }

 private:
  json object_;
  std::string where_;
};

// transformers' defaults, https://github.com/huggingface/transformers, models/gemma*/configuration_*.py.
struct Defaults {
  int generation;
  int64_t vocabulary, width, feed_forward, layers, query_heads, kv_heads, max_positions;
  float attention_soft_cap, logit_soft_cap;
};
constexpr Defaults kGemma1 = {1, 256000, 3072, 24576, 28, 16, 16, 8192, 0, 0};
constexpr Defaults kGemma2 = {2, 256000, 2304, 9216, 26, 8, 4, 8192, 50, 30};
constexpr Defaults kGemma3 = {3, 262208, 2304, 9216, 26, 8, 4, 131072, 0, 0};

const Defaults& defaults_of(const std::string& type, const std::string& where) {
  if (type == "gemma") return kGemma1;
  if (type == "gemma2") return kGemma2;
  if (type == "gemma3_text") return kGemma3;
  fail(where, ": model_type is \"", type, "\"; gemma, gemma2, gemma3_text and gemma3 are supported");
}

uint32_t read_activation(const Section& text, int generation) {
  // Gemma 1 writes hidden_act, and "gelu" where the tanh form is meant.
  std::string name = text.string("hidden_activation", "gelu_pytorch_tanh");
  if (generation == 1) {
    name = text.string("hidden_act", name.c_str());
    if (name == "gelu") name = "gelu_pytorch_tanh";
  }
  if (name == "gelu_pytorch_tanh") return NVB_ACTIVATION_GELU_TANH;
  if (name == "gelu") return NVB_ACTIVATION_GELU_ERF;
  if (name == "silu") return NVB_ACTIVATION_SILU;
  fail(text.where(), ": the activation \"", name, "\" is not one of gelu_pytorch_tanh, gelu, silu");
}

Rope read_rope(const Section& parameters, float base) {
  Rope rope;
  rope.base = parameters.number("rope_theta", base, 1, 1e12F);
  if (parameters.number("partial_rotary_factor", 1, 0, 1) != 1) {
    fail(parameters.where(), ": a partial_rotary_factor other than 1 is not supported");
  }
  const std::string type = parameters.string("rope_type", parameters.string("type", "default").c_str());
  if (type == "linear") {
    rope.position_scale = 1 / parameters.number("factor", 1, 1e-3F, 1e6F);
  } else if (type != "default") {
    fail(parameters.where(), ": rope_type \"", type, "\" is not supported; default and linear are");
  }
  return rope;
}

// Newer files hold rope_parameters, of Gemma 3 one for each kind of layer; older ones rope_theta, rope_local_base_freq
// and rope_scaling, which in Gemma 3 is meant for the global layers alone.
void read_ropes(const Section& text, Config* config) {
  const Section parameters = text.section("rope_parameters");
  const bool two_kinds = config->generation == 3;
  const float base = text.number("rope_theta", two_kinds ? 1e6F : 1e4F, 1, 1e12F);
  const auto global_of = [&](const Section& section) {
    return read_rope(text.find("rope_scaling") != nullptr ? text.section("rope_scaling") : section, base);
  };
  if (!two_kinds) {
    config->global_rope = config->local_rope = global_of(parameters);
    return;
  }
  config->global_rope = global_of(parameters.section("full_attention"));
  config->local_rope =
      read_rope(parameters.section("sliding_attention"), text.number("rope_local_base_freq", 1e4F, 1, 1e12F));
}

void read_layer_types(const Section& text, Config* config) {
  const size_t layers = static_cast<size_t>(config->layers);
  config->local.assign(layers, false);
  if (config->generation == 1) return;
  if (!text.off("sliding_window")) config->window = text.integer("sliding_window", 4096, 1, INT32_MAX);
  if (const json* types = text.find("layer_types")) {
    if (!types->is_array() || types->size() != layers) {
      fail(text.where(), ": layer_types must be an array of num_hidden_layers = ", layers, " names");
    }
    for (size_t i = 0; i < layers; ++i) {
      const json& type = (*types)[i];
      if (type != "sliding_attention" && type != "full_attention") {
        fail(text.where(), ": layer_types holds ", type.dump(), "; sliding_attention and full_attention are supported");
      }
      config->local[i] = type == "sliding_attention";
    }
    return;
  }
  // Every pattern-th layer is global.
  const int64_t pattern = config->generation == 2 ? 2 : text.integer("sliding_window_pattern", 6, 1, INT32_MAX);
  for (size_t i = 0; i < layers; ++i) config->local[i] = (static_cast<int64_t>(i) + 1) % pattern != 0;
}

void read_attention(const Section& text, const Defaults& defaults, Config* config) {
  if (config->query_heads % config->kv_heads != 0) {
    fail(text.where(), ": num_attention_heads is ", config->query_heads,
         "; it must be a multiple of num_key_value_heads = ", config->kv_heads);
  }
  if (config->head_dim % 2 != 0) fail(text.where(), ": head_dim is ", config->head_dim, "; it must be even");
  if (text.boolean("use_bidirectional_attention", false)) {
    fail(text.where(), ": use_bidirectional_attention is true; only causal models are supported");
  }
  float scalar = static_cast<float>(config->head_dim);
  if (config->generation >= 2) scalar = text.number("query_pre_attn_scalar", 256, 1e-3F, 1e6F);
  config->attention_scale = 1 / std::sqrt(scalar);
  // transformers applies these caps in Gemma 2, the second in Gemma 3 too, and neither in Gemma 1.
  const auto soft_cap = [&text](const char* key, float fallback) {
    return text.off(key) ? 0 : text.number(key, fallback, 1e-3F, 1e6F);
  };
  if (config->generation == 2) {
    config->attention_soft_cap = soft_cap("attn_logit_softcapping", defaults.attention_soft_cap);
  }
  if (config->generation >= 2) {
    config->logit_soft_cap = soft_cap("final_logit_softcapping", defaults.logit_soft_cap);
  }
  config->attention_bias = text.boolean("attention_bias", false);
}

// A token or a list of tokens.
std::vector<int32_t> read_tokens(const Section& section, const char* key, int64_t vocabulary) {
  std::vector<int32_t> tokens;
  const json* value = section.find(key);
  if (value == nullptr) return tokens;
  const json list = value->is_array() ? *value : json::array({*value});
  for (const json& item : list) {
    const Section single(json::object({{key, item}}), section.where());
    tokens.push_back(static_cast<int32_t>(single.integer(key, 0, 0, vocabulary - 1)));
  }
  return tokens;
}

}  // namespace

Config read_config(const std::string& folder) {
  const std::string path = folder + "/config.json";
  const Section root(parse_object(read_text(path, kMaxConfigBytes), path), path);
  const bool multimodal = root.string("model_type", "") == "gemma3";
  if (multimodal && root.find("text_config") == nullptr) fail(path, ": a gemma3 needs a text_config");
  const Section text = multimodal ? root.section("text_config") : root;
  const Defaults& defaults = defaults_of(text.string("model_type", multimodal ? "gemma3_text" : ""), text.where());

  Config config;
  config.generation = defaults.generation;
  config.vocabulary = text.integer("vocab_size", defaults.vocabulary, 1, kMaxVocabulary);
  config.width = text.integer("hidden_size", defaults.width, 1, 65536);
  config.feed_forward = text.integer("intermediate_size", defaults.feed_forward, 1, 1 << 20);
  config.layers = text.integer("num_hidden_layers", defaults.layers, 1, 1024);
  config.query_heads = text.integer("num_attention_heads", defaults.query_heads, 1, 1024);
  config.kv_heads = text.integer("num_key_value_heads", defaults.kv_heads, 1, 1024);
  config.head_dim = text.integer("head_dim", 256, 2, 512);
  config.max_positions = text.integer("max_position_embeddings", defaults.max_positions, 1, kMaxPositions);
  config.epsilon = text.number("rms_norm_eps", 1e-6F, 1e-12F, 1);
  config.activation = read_activation(text, config.generation);
  read_attention(text, defaults, &config);
  read_layer_types(text, &config);
  read_ropes(text, &config);

  // A multimodal file may name the special tokens beside the text part; generation_config.json has the last word.
  std::vector<int32_t> bos = read_tokens(text, "bos_token_id", config.vocabulary);
  config.eos = read_tokens(text, "eos_token_id", config.vocabulary);
  if (multimodal && bos.empty()) bos = read_tokens(root, "bos_token_id", config.vocabulary);
  if (multimodal && root.find("eos_token_id") != nullptr) {
    config.eos = read_tokens(root, "eos_token_id", config.vocabulary);
  }
  const std::string generation_path = folder + "/generation_config.json";
  if (file_exists(generation_path)) {
    const Section generation(parse_object(read_text(generation_path, kMaxConfigBytes), generation_path),
                             generation_path);
    if (generation.find("eos_token_id") != nullptr) {
      config.eos = read_tokens(generation, "eos_token_id", config.vocabulary);
    }
  }
  if (config.eos.empty()) config.eos = {1};
  config.bos = bos.empty() ? 2 : bos.front();
  if (config.bos >= config.vocabulary) {
    fail(path, ": bos_token_id is ", config.bos, "; vocab_size is ", config.vocabulary);
  }
  return config;
}

}  // namespace gemma
