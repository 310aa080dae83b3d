#include "sbs_model.h"

#include <nvbackend.h>

#include <algorithm>
#include <vector>

#include "error.h"
#include "sbs_config.h"

namespace gemma {
namespace {

constexpr size_t kMaxTokenizerBytes = 64 << 20;
constexpr const char* kNoTokenizer = "unavailable";  // what gemma.cpp writes where it has none

class Builder {
 public:
  explicit Builder(SbsModel* model) : model_(*model), matrices_(read_sbs_tensors(model->file)) {}

  void build() {
    const Config& config = model_.config;
    put("c_embedding", {find("c_embedding", config.vocabulary, config.width)});
    norm("c_final_norm", "c_final_norm", config.width);
    if (has("lm_head")) put("lm_head", {find("lm_head", config.vocabulary, config.width)});
    for (int64_t i = 0; i < config.layers; ++i) layer(i);
  }

 private:
  using Matrices = std::vector<SbsMatrix>;

  bool has(const std::string& name) const { return matrices_.count(name) != 0; }

  // A matrix of the file with exactly this shape.
  const SbsMatrix& find(const std::string& name, int64_t rows, int64_t columns) const {
    const std::string& path = model_.file.path();
    const auto found = matrices_.find(name);
    if (found == matrices_.end()) fail(path, ": there is no tensor \"", name, "\", ", shape_text({rows, columns}));
    const SbsMatrix& matrix = found->second;
    if (matrix.rows != rows || matrix.columns != columns) {
      fail(path, ": tensor \"", name, "\" is ", shape_text({matrix.rows, matrix.columns}), "; ", model_.config.origin,
           " asks for ", shape_text({rows, columns}));
    }
    if (!is_read(matrix.type)) {
      fail(path, ": tensor \"", name, "\" is ", sbs_type_name(matrix.type), "; F32, BF16, SFP and I8 are supported");
    }
    return matrix;
  }

  // One of two forms in which files hold something. Errors: both of them.
  bool choose(const std::string& one, const std::string& other) const {
    if (has(one) && has(other)) {
      fail(model_.file.path(), ": there are both \"", one, "\" and \"", other, "\"");
    }
    return has(one);
  }

  void layer(int64_t index) {
    const Config& config = model_.config;
    const std::string suffix = "_" + std::to_string(index);
    const std::string prefix = "layer " + std::to_string(index) + ".";
    const auto layer_norm = [&](const std::string& name, int64_t length) {
      norm(prefix + name, name + suffix, length);
    };
    layer_norm("pre_att_ns", config.width);
    layer_norm("pre_ff_ns", config.width);
    if (config.post_norm()) {
      layer_norm("post_att_ns", config.width);
      layer_norm("post_ff_ns", config.width);
    }
    if (config.query_key_norm()) {
      layer_norm("query_norm", config.head_dim);
      layer_norm("key_norm", config.head_dim);
    }
    const Matrices attention = query_key_value(suffix);
    const Matrices gated = gate_up(suffix);
    put(prefix, {"query", "key", "value"}, attention);
    put(prefix + "att_w", {output(suffix)});
    put(prefix, {"gating1_w", "gating2_w"}, gated);
    put(prefix + "linear_w", {find("linear_w" + suffix, config.width, config.feed_forward)});
  }

  // Rows of queries, then of the first head's keys, its values, the second's keys, and so on; together, or the queries
  // apart from the others.
  Matrices query_key_value(const std::string& suffix) {
    const Config& config = model_.config;
    SbsMatrix query, key_value;
    int64_t before = 0;  // rows in front of the keys
    if (choose("qkv_ein" + suffix, "qkv1_w" + suffix)) {
      key_value = find("qkv_ein" + suffix, config.qkv_width(), config.width);
      query = model_.memory.rows(key_value, {0}, config.query_width());
      before = config.query_width();
    } else {
      query = find("qkv1_w" + suffix, config.query_width(), config.width);
    }
    if (before == 0 || has("qkv2_w" + suffix)) {
      key_value = find("qkv2_w" + suffix, 2 * config.kv_width(), config.width);
      before = 0;
    }
    std::vector<int64_t> keys, values;
    for (int64_t head = 0; head < config.kv_heads; ++head) {
      keys.push_back(before + 2 * head * config.head_dim);
      values.push_back(keys.back() + config.head_dim);
    }
    return {query, model_.memory.rows(key_value, keys, config.head_dim),
            model_.memory.rows(key_value, values, config.head_dim)};
  }

  Matrices gate_up(const std::string& suffix) {
    const int64_t rows = model_.config.feed_forward, columns = model_.config.width;
    if (!choose("gating_ein" + suffix, "gating1_w" + suffix)) {
      return {find("gating1_w" + suffix, rows, columns), find("gating2_w" + suffix, rows, columns)};
    }
    const SbsMatrix& both = find("gating_ein" + suffix, 2 * rows, columns);
    return {model_.memory.rows(both, {0}, rows), model_.memory.rows(both, {rows}, rows)};
  }

  // [width, heads · head_dim], or head by head [heads, width, head_dim].
  SbsMatrix output(const std::string& suffix) {
    const Config& config = model_.config;
    if (!choose("att_ein" + suffix, "att_w" + suffix)) {
      return find("att_w" + suffix, config.width, config.query_width());
    }
    const SbsMatrix& heads = find("att_ein" + suffix, config.query_heads * config.width, config.head_dim);
    return model_.memory.join_heads(heads, config.query_heads);
  }

  void norm(const std::string& name, const std::string& from, int64_t length) {
    put(name, {find(from, 1, length)});
    model_.tensors.at(name + ".weight").shape = {length};
  }

  // Matrices that become one weight are of one type: others are decoded. So are those with a scale that the library
  // has no place for, which gemma.cpp does not write.
  void put(const std::string& prefix, const std::vector<const char*>& names, Matrices matrices) {
    const auto any = [&matrices](auto condition) { return std::any_of(matrices.begin(), matrices.end(), condition); };
    const bool decoded = any([&matrices](const SbsMatrix& matrix) {
      return matrix.type != matrices[0].type || (matrix.type != SbsType::SFP && matrix.scale != 1);
    });
    const bool wide = any([](const SbsMatrix& matrix) { return !fits_bf16(matrix); });
    const bool int8 = std::all_of(matrices.begin(), matrices.end(), is_int8);
    for (size_t i = 0; i < matrices.size(); ++i) {
      if (decoded) matrices[i] = model_.memory.decode(matrices[i], wide ? SbsType::F32 : SbsType::BF16);
      HostTensor tensor = host_tensor(matrices[i]);
      // The library would quantise again what INT8 cannot hold.
      if (matrices[i].type == SbsType::I8 && !int8) tensor.format = NVB_WEIGHT_FORMAT_BF16;
      model_.tensors.emplace(prefix + names[i] + ".weight", std::move(tensor));
    }
  }

  void put(const std::string& name, const Matrices& matrices) { put(name, {""}, matrices); }

  static HostTensor host_tensor(const SbsMatrix& matrix) {
    HostTensor tensor;
    tensor.dtype = sbs_type_name(matrix.type);
    tensor.shape = {matrix.rows, matrix.columns};
    tensor.data = matrix.data;
    tensor.bytes = matrix.bytes;
    tensor.scale = matrix.scale;
    if (matrix.type == SbsType::SFP) tensor.source_format = NVB_SOURCE_FORMAT_SFP;
    if (matrix.type == SbsType::I8) tensor.source_format = NVB_SOURCE_FORMAT_I8;
    return tensor;
  }

  SbsModel& model_;
  const std::map<std::string, SbsMatrix> matrices_;
};

std::string read_tokenizer(const BlobStore& file) {
  const Blob& blob = file.at("tokenizer");
  if (blob.bytes > kMaxTokenizerBytes) {
    fail(file.path(), ": a tokenizer of ", blob.bytes, " bytes; the limit is ", kMaxTokenizerBytes);
  }
  std::string tokenizer(reinterpret_cast<const char*>(blob.data), blob.bytes);
  if (tokenizer == kNoTokenizer) fail(file.path(), ": it was written without a tokenizer");
  return tokenizer;
}

}  // namespace

bool is_sbs(const std::string& path) {
  const std::string ending = ".sbs";
  return path.size() > ending.size() && path.compare(path.size() - ending.size(), ending.size(), ending) == 0;
}

SbsModel open_sbs(const std::string& path) {
  SbsModel model{BlobStore(path), {}, {}, {}, {}};
  const Blob* config = model.file.find("config");
  if (config == nullptr) {
    fail(path, ": there is no blob \"config\": the file is of before 2025, and gemma.cpp's migrate_weights renews it");
  }
  model.config = read_sbs_config(*config, path + ": config");
  model.tokenizer = read_tokenizer(model.file);
  Builder(&model).build();
  return model;
}

}  // namespace gemma
