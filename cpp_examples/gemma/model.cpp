#include "model.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>

#include "error.h"
#include "tensor_names.h"

namespace gemma {
namespace {

std::optional<uint32_t> float_dtype(const std::string& name) {
  if (name == "F32") return NVB_DTYPE_F32;
  if (name == "F16") return NVB_DTYPE_F16;
  if (name == "BF16") return NVB_DTYPE_BF16;
  return std::nullopt;
}

// A float dtype as a weight's format.
uint32_t format_of(uint32_t dtype) {
  return dtype == NVB_DTYPE_F32   ? NVB_WEIGHT_FORMAT_F32
         : dtype == NVB_DTYPE_F16 ? NVB_WEIGHT_FORMAT_F16
                                  : NVB_WEIGHT_FORMAT_BF16;
}

class Loader {
 public:
  Loader(const nvb::backend& backend, const Config& config, const TensorMap& tensors, const WeightFormats& formats,
         Progress* progress)
      : backend_(backend),
        tensors_(tensors),
        formats_(formats),
        progress_(progress),
        names_(find_tensor_names(config, tensors)) {
    model_.config = config;
  }

  Model load() {
    const Config& config = model_.config;
    const bool cpu = backend_.device_info().kind == NVB_DEVICE_CPU;
    model_.embedding = table(names_.embedding, cpu);
    if (tensors_.count(names_.head + ".weight") != 0) model_.head = table(names_.head, false);
    for (int64_t i = 0; i < config.layers; ++i) model_.layers.push_back(layer(i));
    model_.final_norm = vector({{names_.final_norm + ".weight", config.width}});
    const bool wide = model_.formats.count(NVB_WEIGHT_FORMAT_F32) + model_.formats.count(NVB_WEIGHT_FORMAT_F16) > 0;
    if (!cpu && !wide) model_.activation_dtype = NVB_DTYPE_BF16;
    return std::move(model_);
  }

 private:
  struct Part {
    std::string name;
    int64_t rows;
  };

  Layer layer(int64_t index) {
    const Config& config = model_.config;
    const std::string name = names_.layer(index);
    const auto weight = [&name](const char* part) { return name + part + ".weight"; };
    const auto bias = [&name](const char* part) { return name + part + ".bias"; };
    Layer layer;
    layer.input_norm = vector({{weight(names_.input_norm), config.width}});
    layer.query_key_value = matrix({{weight(names_.query), config.query_width()},
                                    {weight(names_.key), config.kv_width()},
                                    {weight(names_.value), config.kv_width()}},
                                   config.width);
    layer.output = matrix({{weight(names_.output), config.width}}, config.query_width());
    if (config.attention_bias) {
      layer.query_key_value_bias = vector({{bias(names_.query), config.query_width()},
                                           {bias(names_.key), config.kv_width()},
                                           {bias(names_.value), config.kv_width()}});
      layer.output_bias = vector({{bias(names_.output), config.width}});
    }
    if (config.query_key_norm()) {
      layer.query_norm = vector({{weight(names_.query_norm), config.head_dim}});
      layer.key_norm = vector({{weight(names_.key_norm), config.head_dim}});
    }
    layer.pre_feed_forward_norm = vector({{weight(names_.pre_feed_forward_norm), config.width}});
    if (config.post_norm()) {
      layer.post_attention_norm = vector({{weight(names_.post_attention_norm), config.width}});
      layer.post_feed_forward_norm = vector({{weight(names_.post_feed_forward_norm), config.width}});
    }
    layer.gate_up = matrix({{weight(names_.gate), config.feed_forward}, {weight(names_.up), config.feed_forward}},
                           config.width, NVB_WEIGHT_GATED);
    layer.down = matrix({{weight(names_.down), config.width}}, config.feed_forward);
    return layer;
  }

  // A tensor of the map with exactly this shape.
  const HostTensor& find(const std::string& name, const std::vector<int64_t>& shape) {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) fail("the model has no tensor \"", name, "\", ", shape_text(shape));
    const HostTensor& tensor = found->second;
    if (tensor.shape != shape) {
      fail("tensor \"", name, "\" is ", shape_text(tensor.shape), "; ", model_.config.origin, " asks for ",
           shape_text(shape));
    }
    uint64_t parameters = 1;
    for (const int64_t extent : shape) parameters *= static_cast<uint64_t>(extent);
    model_.parameters += parameters;
    progress_->add(tensor.bytes);
    return tensor;
  }

  // A tensor of numbers, at an address that suits its dtype.
  nvb_tensor host_tensor(const std::string& name, const std::vector<int64_t>& shape) {
    const HostTensor& tensor = find(name, shape);
    const auto dtype = float_dtype(tensor.dtype);
    if (!dtype) {
      fail("tensor \"", name, "\" is ", tensor.dtype, "; F32, F16 and BF16 are supported",
           tensor.source_format != 0 ? " here" : ", and of GGUF's blocks Q4_0, Q4_K, Q6_K and Q8_0");
    }
    nvb_tensor result{};
    result.data = const_cast<void*>(tensor.data);  // only ever read
    if (reinterpret_cast<uintptr_t>(tensor.data) % nvb::dtype_size(*dtype) != 0) {
      aligned_.emplace_back(new uint32_t[(tensor.bytes + 3) / 4]);
      result.data = std::memcpy(aligned_.back().get(), tensor.data, tensor.bytes);
    }
    result.dtype = *dtype;
    result.rank = static_cast<uint32_t>(shape.size());
    for (size_t i = 0; i < shape.size(); ++i) result.shape[i] = shape[i];
    return result;
  }

  void check_same_dtype(const std::vector<Part>& names, const std::vector<nvb_tensor>& parts) {
    for (size_t i = 1; i < parts.size(); ++i) {
      if (parts[i].dtype != parts[0].dtype) {
        fail("tensors \"", names[0].name, "\" and \"", names[i].name, "\" have different dtypes");
      }
    }
  }

  nvb::weight table(const std::string& name, bool in_place) {
    const Config& config = model_.config;
    return matrix({{name + ".weight", config.vocabulary}}, config.width, NVB_WEIGHT_STACKED, formats_.table, in_place);
  }

  nvb::weight matrix(const std::vector<Part>& names, int64_t columns, uint32_t arrangement = NVB_WEIGHT_STACKED) {
    return matrix(names, columns, arrangement, formats_.layers, false);
  }

  nvb::weight matrix(const std::vector<Part>& names, int64_t columns, uint32_t arrangement, uint32_t format,
                     bool in_place) {
    auto desc = nvb::make<nvb_weight_desc>();
    desc.part_count = names.size();
    desc.arrangement = arrangement;
    desc.source = NVB_SOURCE_HOST;
    desc.format = format;
    if (format == NVB_WEIGHT_FORMAT_INT4) {
      // The finest groups that the kernels read: the smallest error, for 3/8 bit an element more than groups of 128.
      desc.group_size = 32;
      desc.clipping = 1;
      desc.zero_points = formats_.zero_points ? 1 : 0;
    }
    std::vector<nvb_tensor> parts;
    std::vector<nvb_weight_blocks> blocks;
    const auto first = tensors_.find(names[0].name);
    if (first != tensors_.end() && first->second.source_format != 0) {
      blocks = block_parts(names, columns);
      desc.blocks = blocks.data();
      desc.source_format = blocks[0].source_format;
      const bool mixed = std::any_of(blocks.begin(), blocks.end(), [&blocks](const nvb_weight_blocks& part) {
        return part.source_format != blocks[0].source_format;
      });
      if (format == NVB_WEIGHT_FORMAT_AS_IS && first->second.format != 0) desc.format = first->second.format;
      if (mixed && format == NVB_WEIGHT_FORMAT_AS_IS) {
        // Files of llama.cpp's mixtures, such as Q4_K_M, keep V more finely than Q and K. 8 bits lose little of either.
        desc.format = NVB_WEIGHT_FORMAT_INT8;
        desc.group_size = 32;
      }
    } else {
      for (const Part& part : names) parts.push_back(host_tensor(part.name, {part.rows, columns}));
      check_same_dtype(names, parts);
      desc.parts = parts.data();
      if (format == format_of(parts[0].dtype)) desc.format = NVB_WEIGHT_FORMAT_AS_IS;
      if (in_place && aligned_.empty() && desc.format == NVB_WEIGHT_FORMAT_AS_IS) desc.source = NVB_SOURCE_BORROWED;
    }
    nvb::weight weight = create(names, desc);
    aligned_.clear();
    FormatUse& use = count(weight);
    if (desc.source == NVB_SOURCE_BORROWED) use.in_place_bytes += first->second.bytes;
    return weight;
  }

  // The library's errors count parts; those of a file should name its tensors.
  nvb::weight create(const std::vector<Part>& names, const nvb_weight_desc& desc) {
    try {
      return nvb::weight(backend_, desc);
    } catch (const nvb::error& error) {
      std::string list;
      for (const Part& part : names) list += (list.empty() ? "" : ", ") + part.name;
      fail(list, ": ", error.what());
    }
  }

  std::vector<nvb_weight_blocks> block_parts(const std::vector<Part>& names, int64_t columns) {
    std::vector<nvb_weight_blocks> blocks;
    for (const Part& part : names) {
      const HostTensor& tensor = find(part.name, {part.rows, columns});
      if (tensor.source_format == 0) {
        fail("tensors \"", names[0].name, "\" and \"", part.name, "\" are ", tensors_.at(names[0].name).dtype, " and ",
             tensor.dtype, "; both must be blocks, or both numbers");
      }
      nvb_weight_blocks block{};
      block.data = tensor.data;
      block.bytes = tensor.bytes;
      block.rows = part.rows;
      block.columns = columns;
      block.source_format = tensor.source_format;
      block.scale = tensor.scale;
      blocks.push_back(block);
    }
    return blocks;
  }

  FormatUse& count(const nvb::weight& weight) {
    const nvb_weight_info info = weight.info();
    FormatUse& use = model_.formats[info.encoding];
    use.parameters += info.rows * info.columns;
    use.bytes += info.bytes;
    use.scale_bytes += info.scale_bytes;
    use.largest_error = std::max(use.largest_error, info.relative_error);
    return use;
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
  WeightFormats formats_;
  Progress* progress_;
  TensorNames names_;
  nvb::stream stream_{backend_};
  Model model_;
  std::vector<std::unique_ptr<uint32_t[]>> aligned_;  // copies of tensors that lie at odd addresses, until uploaded
};

}  // namespace

Model load_model(const nvb::backend& backend, const Config& config, const TensorMap& tensors,
                 const WeightFormats& formats, Progress* progress) {
  return Loader(backend, config, tensors, formats, progress).load();
}

}  // namespace gemma
