#include "model.h"

#include <cstring>
#include <memory>
#include <optional>

#include "error.h"

namespace gemma {
namespace {

std::optional<uint32_t> float_dtype(const std::string& name) {
  if (name == "F32") return NVB_DTYPE_F32;
  if (name == "F16") return NVB_DTYPE_F16;
  if (name == "BF16") return NVB_DTYPE_BF16;
  return std::nullopt;
}

class Loader {
 public:
  Loader(const nvb::backend& backend, const Config& config, const TensorMap& tensors, Progress* progress)
      : backend_(backend), tensors_(tensors), progress_(progress) {
    model_.config = config;
  }

  Model load() {
    const Config& config = model_.config;
    find_prefix();
    const bool cpu = backend_.device_info().kind == NVB_DEVICE_CPU;
    const std::vector<Part> table = {{prefix_ + "embed_tokens.weight", config.vocabulary}};
    model_.embedding = matrix(table, config.width, NVB_WEIGHT_STACKED, cpu);
    if (tensors_.count(head_name_) != 0) model_.head = matrix({{head_name_, config.vocabulary}}, config.width);
    for (int64_t i = 0; i < config.layers; ++i) model_.layers.push_back(layer(i));
    model_.final_norm = vector({{prefix_ + "norm.weight", config.width}});
    if (!cpu && all_bf16_) model_.activation_dtype = NVB_DTYPE_BF16;
    return std::move(model_);
  }

 private:
  struct Part {
    std::string name;
    int64_t rows;
  };

  // Where the text model lies: alone, or inside a multimodal one, whose layout has changed over time.
  void find_prefix() {
    static const char* const prefixes[][2] = {{"model.", "lm_head.weight"},
                                              {"model.language_model.", "lm_head.weight"},
                                              {"language_model.model.", "language_model.lm_head.weight"},
                                              {"", "lm_head.weight"}};
    for (const auto& [prefix, head] : prefixes) {
      prefix_ = prefix;
      head_name_ = head;
      if (tensors_.count(prefix_ + "embed_tokens.weight") != 0) return;
    }
    fail("the model has no tensor \"model.embed_tokens.weight\", nor one of that name where multimodal models keep it");
  }

  Layer layer(int64_t index) {
    const Config& config = model_.config;
    const std::string name = prefix_ + "layers." + std::to_string(index) + ".";
    const std::string attention = name + "self_attn.";
    Layer layer;
    layer.input_norm = vector({{name + "input_layernorm.weight", config.width}});
    layer.query_key_value = matrix({{attention + "q_proj.weight", config.query_width()},
                                    {attention + "k_proj.weight", config.kv_width()},
                                    {attention + "v_proj.weight", config.kv_width()}},
                                   config.width);
    layer.output = matrix({{attention + "o_proj.weight", config.width}}, config.query_width());
    if (config.attention_bias) {
      layer.query_key_value_bias = vector({{attention + "q_proj.bias", config.query_width()},
                                           {attention + "k_proj.bias", config.kv_width()},
                                           {attention + "v_proj.bias", config.kv_width()}});
      layer.output_bias = vector({{attention + "o_proj.bias", config.width}});
    }
    if (config.query_key_norm()) {
      layer.query_norm = vector({{attention + "q_norm.weight", config.head_dim}});
      layer.key_norm = vector({{attention + "k_norm.weight", config.head_dim}});
    }
    if (config.post_norm()) {
      layer.post_attention_norm = vector({{name + "post_attention_layernorm.weight", config.width}});
      layer.pre_feed_forward_norm = vector({{name + "pre_feedforward_layernorm.weight", config.width}});
      layer.post_feed_forward_norm = vector({{name + "post_feedforward_layernorm.weight", config.width}});
    } else {
      // Gemma 1 gives this name to the norm before the feed-forward part.
      layer.pre_feed_forward_norm = vector({{name + "post_attention_layernorm.weight", config.width}});
    }
    layer.gate_up = matrix(
        {{name + "mlp.gate_proj.weight", config.feed_forward}, {name + "mlp.up_proj.weight", config.feed_forward}},
        config.width, NVB_WEIGHT_GATED);
    layer.down = matrix({{name + "mlp.down_proj.weight", config.width}}, config.feed_forward);
    return layer;
  }

  // A tensor of the map with exactly this shape, at an address that suits its dtype.
  nvb_tensor host_tensor(const std::string& name, const std::vector<int64_t>& shape) {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) fail("the model has no tensor \"", name, "\", ", shape_text(shape));
    const HostTensor& tensor = found->second;
    if (tensor.shape != shape) {
      fail("tensor \"", name, "\" is ", shape_text(tensor.shape), "; config.json asks for ", shape_text(shape));
    }
    const auto dtype = float_dtype(tensor.dtype);
    if (!dtype) fail("tensor \"", name, "\" is ", tensor.dtype, "; F32, F16 and BF16 are supported");
    nvb_tensor result{};
    result.data = const_cast<void*>(tensor.data);  // only ever read
    if (reinterpret_cast<uintptr_t>(tensor.data) % nvb::dtype_size(*dtype) != 0) {
      aligned_.emplace_back(new uint32_t[(tensor.bytes + 3) / 4]);
      result.data = std::memcpy(aligned_.back().get(), tensor.data, tensor.bytes);
    }
    result.dtype = *dtype;
    result.rank = static_cast<uint32_t>(shape.size());
    for (size_t i = 0; i < shape.size(); ++i) result.shape[i] = shape[i];
    model_.parameters += tensor.bytes / nvb::dtype_size(*dtype);
    progress_->add(tensor.bytes);
    return result;
  }

  void check_same_dtype(const std::vector<Part>& names, const std::vector<nvb_tensor>& parts) {
    for (size_t i = 1; i < parts.size(); ++i) {
      if (parts[i].dtype != parts[0].dtype) {
        fail("tensors \"", names[0].name, "\" and \"", names[i].name, "\" have different dtypes");
      }
    }
  }

  nvb::weight matrix(const std::vector<Part>& names, int64_t columns, uint32_t arrangement = NVB_WEIGHT_STACKED,
                     bool in_place = false) {
    std::vector<nvb_tensor> parts;
    for (const Part& part : names) parts.push_back(host_tensor(part.name, {part.rows, columns}));
    check_same_dtype(names, parts);
    all_bf16_ = all_bf16_ && parts[0].dtype == NVB_DTYPE_BF16;
    auto desc = nvb::make<nvb_weight_desc>();
    desc.parts = parts.data();
    desc.part_count = parts.size();
    desc.arrangement = arrangement;
    desc.source = in_place && aligned_.empty() ? NVB_SOURCE_BORROWED : NVB_SOURCE_HOST;
    nvb::weight weight(backend_, desc);
    aligned_.clear();
    return weight;
  }

  Vector vector(const std::vector<Part>& names) {
    std::vector<nvb_tensor> parts;
    size_t bytes = 0;
    int64_t length = 0;
    for (const Part& part : names) {
      parts.push_back(host_tensor(part.name, {part.rows}));
      length += part.rows;
      bytes += static_cast<size_t>(part.rows) * nvb::dtype_size(parts.back().dtype);
    }
    check_same_dtype(names, parts);
    std::vector<char> host;
    host.reserve(bytes);
    for (const nvb_tensor& part : parts) {
      const char* data = static_cast<const char*>(part.data);
      host.insert(host.end(), data, data + static_cast<size_t>(part.shape[0]) * nvb::dtype_size(part.dtype));
    }
    Vector result;
    result.memory = nvb::buffer(backend_, bytes, stream_);
    result.memory.upload(host.data(), bytes, stream_);
    stream_.synchronize();  // `host` ends here
    result.tensor = nvb::tensor(result.memory.data(), parts[0].dtype, {length});
    aligned_.clear();
    return result;
  }

  const nvb::backend& backend_;
  const TensorMap& tensors_;
  Progress* progress_;
  nvb::stream stream_{backend_};
  Model model_;
  std::string prefix_;
  std::string head_name_;
  std::vector<std::unique_ptr<uint32_t[]>> aligned_;  // copies of tensors that lie at odd addresses, until uploaded
  bool all_bf16_ = true;
};

}  // namespace

Model load_model(const nvb::backend& backend, const Config& config, const TensorMap& tensors, Progress* progress) {
  return Loader(backend, config, tensors, progress).load();
}

}  // namespace gemma
