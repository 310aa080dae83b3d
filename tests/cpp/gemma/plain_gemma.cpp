#include "plain_gemma.h"

#include <algorithm>
#include <cmath>

namespace gemma_test {
namespace {

using Row = std::vector<double>;

// weight · row (+ bias), weight [outputs, inputs]
Row product(const std::vector<double>& weight, const Row& row, const std::vector<double>& bias = {}) {
  Row result(weight.size() / row.size());
  for (size_t i = 0; i < result.size(); ++i) {
    double sum = bias.empty() ? 0 : bias[i];
    for (size_t j = 0; j < row.size(); ++j) sum += weight[i * row.size() + j] * row[j];
    result[i] = sum;
  }
  return result;
}

// In place, on `size` numbers from `values`.
void normalize(double* values, size_t size, const std::vector<double>& weight) {
  double squares = 0;
  for (size_t i = 0; i < size; ++i) squares += values[i] * values[i];
  const double factor = 1 / std::sqrt(squares / static_cast<double>(size) + 1e-6);
  for (size_t i = 0; i < size; ++i) values[i] *= factor * (1 + weight[i]);
}

Row normalized(Row row, const std::vector<double>& weight) {
  normalize(row.data(), row.size(), weight);
  return row;
}

void rotate(double* head, int64_t size, double position, double base) {
  for (int64_t i = 0; i < size / 2; ++i) {
    const double angle = position * std::pow(base, -2.0 * static_cast<double>(i) / static_cast<double>(size));
    const double a = head[i], b = head[i + size / 2];
    head[i] = a * std::cos(angle) - b * std::sin(angle);
    head[i + size / 2] = b * std::cos(angle) + a * std::sin(angle);
  }
}

double gelu_tanh(double x) {
  const double pi = std::acos(-1.0);
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / pi) * (x + 0.044715 * x * x * x)));
}

void add(Row& row, const Row& other) {
  for (size_t i = 0; i < row.size(); ++i) row[i] += other[i];
}

}  // namespace

void PlainGemma::randomize(const std::string& dtype, uint64_t seed) {
  const auto matrix = [&](const std::string& name, int64_t rows, int64_t columns, double deviation) {
    tensors["model." + name] = random_tensor({rows, columns}, 0, deviation, dtype, ++seed);
  };
  const auto vector = [&](const std::string& name, int64_t size) {
    tensors["model." + name] = random_tensor({size}, 0, 0.3, dtype, ++seed);
  };
  const auto linear = [&](const std::string& name, int64_t outputs, int64_t inputs) {
    matrix(name, outputs, inputs, 1.2 / std::sqrt(static_cast<double>(inputs)));
  };
  matrix("embed_tokens.weight", vocabulary, width, 0.15);
  vector("norm.weight", width);
  for (int64_t i = 0; i < layers; ++i) {
    const std::string layer = "layers." + std::to_string(i) + ".";
    vector(layer + "input_layernorm.weight", width);
    vector(layer + "post_attention_layernorm.weight", width);
    if (generation >= 2) vector(layer + "pre_feedforward_layernorm.weight", width);
    if (generation >= 2) vector(layer + "post_feedforward_layernorm.weight", width);
    if (generation == 3) vector(layer + "self_attn.q_norm.weight", head_dim);
    if (generation == 3) vector(layer + "self_attn.k_norm.weight", head_dim);
    const std::pair<const char*, int64_t> projections[] = {{"q", heads}, {"k", kv_heads}, {"v", kv_heads}};
    for (const auto& [name, count] : projections) {
      linear(layer + "self_attn." + name + "_proj.weight", count * head_dim, width);
      if (bias) vector(layer + "self_attn." + name + "_proj.bias", count * head_dim);
    }
    linear(layer + "self_attn.o_proj.weight", width, heads * head_dim);
    if (bias) vector(layer + "self_attn.o_proj.bias", width);
    linear(layer + "mlp.gate_proj.weight", feed_forward, width);
    linear(layer + "mlp.up_proj.weight", feed_forward, width);
    linear(layer + "mlp.down_proj.weight", width, feed_forward);
  }
}

std::string PlainGemma::config_json(bool transformers_5) const {
  using nlohmann::json;
  static const char* const types[] = {"gemma", "gemma2", "gemma3_text"};
  const auto number_or_null = [](double value) { return value > 0 ? json(value) : json(nullptr); };
  json config = {{"model_type", types[generation - 1]},
                 {"vocab_size", vocabulary},
                 {"hidden_size", width},
                 {"intermediate_size", feed_forward},
                 {"num_hidden_layers", layers},
                 {"num_attention_heads", heads},
                 {"num_key_value_heads", kv_heads},
                 {"head_dim", head_dim},
                 {"max_position_embeddings", 512},
                 {"rms_norm_eps", 1e-6},
                 {"attention_bias", bias},
                 {"eos_token_id", 1},
                 {"bos_token_id", 2}};
  if (generation == 1) {
    config["hidden_act"] = "gelu";  // as the first Gemma files say, meaning the tanh form
  } else {
    config["sliding_window"] = window;
    config["query_pre_attn_scalar"] = query_scalar;
    config["attn_logit_softcapping"] = number_or_null(attention_cap);
    config["final_logit_softcapping"] = number_or_null(logit_cap);
  }
  const json scaling =
      position_divisor == 1 ? json(nullptr) : json{{"rope_type", "linear"}, {"factor", position_divisor}};
  if (!transformers_5) {
    config["rope_theta"] = base;
    config["rope_scaling"] = scaling;
    if (generation == 3) config["rope_local_base_freq"] = local_base;
    if (generation == 3) config["sliding_window_pattern"] = pattern;
    return config.dump();
  }
  json rope = {{"rope_type", "default"}, {"rope_theta", base}};
  if (!scaling.is_null()) rope.update(scaling);
  config["rope_parameters"] = rope;
  if (generation == 3) {
    config["rope_parameters"] = {{"full_attention", rope},
                                 {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", local_base}}}};
  }
  for (int64_t i = 0; generation > 1 && i < layers; ++i) {
    config["layer_types"].push_back(local(i) ? "sliding_attention" : "full_attention");
  }
  return config.dump();
}

std::vector<double> PlainGemma::logits(const std::vector<int32_t>& tokens) const {
  const size_t count = tokens.size();
  const size_t d = static_cast<size_t>(head_dim);
  std::vector<Row> stream;
  for (const int32_t token : tokens) {
    const double* row = tensor("embed_tokens.weight").data() + static_cast<int64_t>(token) * width;
    stream.emplace_back(row, row + width);
    for (double& value : stream.back()) value *= embedding_scale;
  }
  for (int64_t index = 0; index < layers; ++index) {
    const std::string layer = "layers." + std::to_string(index) + ".";
    const bool is_local = local(index);
    const double rope_base = is_local && generation == 3 ? local_base : base;
    const double divisor = is_local && generation == 3 ? 1 : position_divisor;

    const auto project = [&](const char* name, const Row& row) {
      const std::string weight = layer + "self_attn." + name + "_proj.";
      return product(tensor(weight + "weight"), row, bias ? tensor(weight + "bias") : std::vector<double>());
    };
    std::vector<Row> queries, keys, values;
    for (size_t t = 0; t < count; ++t) {
      const Row normed = normalized(stream[t], tensor(layer + "input_layernorm.weight"));
      queries.push_back(project("q", normed));
      keys.push_back(project("k", normed));
      values.push_back(project("v", normed));
      const auto prepare = [&](Row& row, const char* norm) {
        for (double* head = row.data(); head != row.data() + row.size(); head += d) {
          if (generation == 3) normalize(head, d, tensor(layer + "self_attn." + norm + ".weight"));
          rotate(head, head_dim, static_cast<double>(t) / divisor, rope_base);
        }
      };
      prepare(queries.back(), "q_norm");
      prepare(keys.back(), "k_norm");
    }
    for (size_t t = 0; t < count; ++t) {
      Row attended(static_cast<size_t>(heads) * d, 0.0);
      for (int64_t h = 0; h < heads; ++h) {
        const size_t at = static_cast<size_t>(h) * d, kv_at = static_cast<size_t>(h / (heads / kv_heads)) * d;
        std::vector<double> weights;
        const size_t visible = is_local ? std::min<size_t>(t + 1, static_cast<size_t>(window)) : t + 1;
        double sum = 0;
        for (size_t k = t + 1 - visible; k <= t; ++k) {
          double score = 0;
          for (size_t i = 0; i < d; ++i) score += queries[t][at + i] * keys[k][kv_at + i];
          score /= std::sqrt(query_scalar);
          if (attention_cap > 0) score = attention_cap * std::tanh(score / attention_cap);
          weights.push_back(std::exp(score));
          sum += weights.back();
        }
        for (size_t k = 0; k < visible; ++k) {
          for (size_t i = 0; i < d; ++i) attended[at + i] += weights[k] / sum * values[t + 1 - visible + k][kv_at + i];
        }
      }
      Row branch = project("o", attended);
      if (generation >= 2) branch = normalized(branch, tensor(layer + "post_attention_layernorm.weight"));
      add(stream[t], branch);
    }
    for (Row& row : stream) {
      const char* norm = generation == 1 ? "post_attention_layernorm.weight" : "pre_feedforward_layernorm.weight";
      const Row normed = normalized(row, tensor(layer + norm));
      Row gate = product(tensor(layer + "mlp.gate_proj.weight"), normed);
      const Row up = product(tensor(layer + "mlp.up_proj.weight"), normed);
      for (size_t i = 0; i < gate.size(); ++i) gate[i] = gelu_tanh(gate[i]) * up[i];
      Row branch = product(tensor(layer + "mlp.down_proj.weight"), gate);
      if (generation >= 2) branch = normalized(branch, tensor(layer + "post_feedforward_layernorm.weight"));
      add(row, branch);
    }
  }
  std::vector<double> result;
  for (const Row& row : stream) {
    for (double value : product(tensor("embed_tokens.weight"), normalized(row, tensor("norm.weight")))) {
      result.push_back(logit_cap > 0 ? logit_cap * std::tanh(value / logit_cap) : value);
    }
  }
  return result;
}

}  // namespace gemma_test
