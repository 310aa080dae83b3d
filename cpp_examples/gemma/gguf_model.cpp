#include "gguf_model.h"

#include <algorithm>
#include <cmath>

#include "error.h"
#include "gguf_metadata.h"
#include "gguf_tokenizer.h"

namespace gemma {
namespace {

constexpr int64_t kMaxVocabulary = 1 << 24;
constexpr int64_t kMaxPositions = 1 << 24;
constexpr uint32_t kBooleans = 7;  // GGUF's number of the type

const char* block_name(uint32_t source_format) {
  switch (source_format) {
    case NVB_SOURCE_FORMAT_GGUF_Q4_0:
      return "Q4_0";
    case NVB_SOURCE_FORMAT_GGUF_Q4_K:
      return "Q4_K";
    case NVB_SOURCE_FORMAT_GGUF_Q6_K:
      return "Q6_K";
    default:
      return "Q8_0";
  }
}

const char* dtype_name(uint32_t dtype) {
  return dtype == NVB_DTYPE_F32 ? "F32" : dtype == NVB_DTYPE_F16 ? "F16" : dtype == NVB_DTYPE_BF16 ? "BF16" : "I32";
}

TensorMap read_tensors(const nvb::gguf& file) {
  TensorMap tensors;
  const uint64_t count = file.info().tensor_count;
  for (uint64_t i = 0; i < count; ++i) {
    const nvb_gguf_tensor entry = file.tensor(i);
    HostTensor tensor;
    tensor.dtype = entry.dtype != 0           ? dtype_name(entry.dtype)
                   : entry.source_format != 0 ? block_name(entry.source_format)
                                              : "of ggml type " + std::to_string(entry.kind);
    tensor.shape.assign(entry.shape, entry.shape + entry.rank);
    tensor.data = entry.data;
    tensor.bytes = entry.bytes;
    tensor.source_format = entry.source_format;
    tensors.emplace(entry.name, std::move(tensor));
  }
  return tensors;
}

int64_t read_vocabulary(const TensorMap& tensors, const std::string& path) {
  const auto table = tensors.find("token_embd.weight");
  if (table == tensors.end()) fail(path, ": there is no tensor \"token_embd.weight\"");
  const std::vector<int64_t>& shape = table->second.shape;
  if (shape.size() != 2 || shape[0] > kMaxVocabulary) {
    fail(path, ": tensor \"token_embd.weight\" is ", shape_text(shape), "; it must be a matrix of at most ",
         kMaxVocabulary, " rows");
  }
  return shape[0];
}

// Which layers see a window only: by Gemma 3's pattern, every sixth sees all, unless the file says something else.
void read_windows(const Metadata& metadata, Config* config) {
  const size_t layers = static_cast<size_t>(config->layers);
  config->local.assign(layers, false);
  config->window = metadata.integer("gemma3.attention.sliding_window", 0, 0, INT32_MAX);
  if (config->window == 0) return;
  const std::string key = "gemma3.attention.sliding_window_pattern";
  const auto pattern = metadata.find(key);
  if (pattern && pattern->content == NVB_GGUF_ARRAY) {
    const std::vector<uint8_t> local = metadata.numbers<uint8_t>(key, kBooleans, layers);
    std::transform(local.begin(), local.end(), config->local.begin(), [](uint8_t value) { return value != 0; });
    return;
  }
  const int64_t period = metadata.integer(key, 6, 1, INT32_MAX);
  for (size_t i = 0; i < layers; ++i) config->local[i] = (static_cast<int64_t>(i) + 1) % period != 0;
}

// Scaling is meant for the global layers alone.
void read_ropes(const Metadata& metadata, Config* config) {
  config->global_rope.base = metadata.number("gemma3.rope.freq_base", 1e6F, 1, 1e12F);
  config->local_rope.base = metadata.number("gemma3.rope.freq_base_swa", 1e4F, 1, 1e12F);
  const std::string scaling = metadata.text("gemma3.rope.scaling.type", "none");
  if (scaling == "linear") {
    config->global_rope.position_scale = 1 / metadata.number("gemma3.rope.scaling.factor", {}, 1e-3F, 1e6F);
  } else if (scaling != "none") {
    fail(metadata.path(), ": gemma3.rope.scaling.type is \"", scaling, "\"; none and linear are supported");
  }
}

void read_attention(const Metadata& metadata, Config* config) {
  config->query_heads = metadata.integer("gemma3.attention.head_count", {}, 1, 1024);
  config->kv_heads = metadata.integer("gemma3.attention.head_count_kv", config->query_heads, 1, 1024);
  if (config->query_heads % config->kv_heads != 0) {
    fail(metadata.path(), ": gemma3.attention.head_count is ", config->query_heads,
         "; it must be a multiple of gemma3.attention.head_count_kv = ", config->kv_heads);
  }
  config->head_dim = metadata.integer("gemma3.attention.key_length", 256, 2, 512);
  if (config->head_dim % 2 != 0) {
    fail(metadata.path(), ": gemma3.attention.key_length is ", config->head_dim, "; it must be even");
  }
  metadata.integer("gemma3.attention.value_length", config->head_dim, config->head_dim, config->head_dim);
  // The 27B model, known by its 62 layers, scales by its width for a head, the others by the head's own. Files say
  // nothing about it, so llama.cpp decides in the same way.
  const float scalar =
      static_cast<float>(config->layers == 62 ? config->width / config->query_heads : config->head_dim);
  config->attention_scale = metadata.number("gemma3.attention.scale", 1 / std::sqrt(scalar), 1e-6F, 1e3F);
}

Config read_config(const Metadata& metadata, const TensorMap& tensors) {
  const std::string architecture = metadata.text("general.architecture", "");
  if (architecture != "gemma3") {
    fail(metadata.path(), ": general.architecture is \"", architecture, "\"; gemma3 is supported");
  }
  Config config;
  config.origin = "the metadata";
  config.generation = 3;
  config.norm_offset = 0;
  config.vocabulary = read_vocabulary(tensors, metadata.path());
  config.width = metadata.integer("gemma3.embedding_length", {}, 1, 65536);
  config.feed_forward = metadata.integer("gemma3.feed_forward_length", {}, 1, 1 << 20);
  config.layers = metadata.integer("gemma3.block_count", {}, 1, 1024);
  config.max_positions = metadata.integer("gemma3.context_length", 131072, 1, kMaxPositions);
  config.epsilon = metadata.number("gemma3.attention.layer_norm_rms_epsilon", 1e-6F, 1e-12F, 1);
  config.activation = NVB_ACTIVATION_GELU_TANH;
  config.logit_soft_cap = metadata.number("gemma3.final_logit_softcapping", 0, 0, 1e6F);
  read_attention(metadata, &config);
  read_windows(metadata, &config);
  read_ropes(metadata, &config);

  const int64_t last = config.vocabulary - 1;
  config.bos = static_cast<int32_t>(metadata.integer("tokenizer.ggml.bos_token_id", 2, 0, last));
  config.eos = {static_cast<int32_t>(metadata.integer("tokenizer.ggml.eos_token_id", 1, 0, last))};
  const int64_t end_of_turn = metadata.integer("tokenizer.ggml.eot_token_id", -1, -1, last);
  if (end_of_turn >= 0) config.eos.push_back(static_cast<int32_t>(end_of_turn));
  return config;
}

}  // namespace

bool is_gguf(const std::string& path) {
  const std::string ending = ".gguf";
  return path.size() > ending.size() && path.compare(path.size() - ending.size(), ending.size(), ending) == 0;
}

GgufModel open_gguf(const std::string& path) {
  GgufModel model;
  model.file = nvb::gguf(path);
  const Metadata metadata(model.file, path);
  model.tensors = read_tensors(model.file);
  model.config = read_config(metadata, model.tensors);
  model.tokenizer = sentencepiece_model(metadata);
  return model;
}

}  // namespace gemma
