#include "reference.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "safetensors.h"
#include "support.h"

namespace gemma_test {
namespace {

constexpr int64_t kVocabulary = 1024;

template <typename T>
std::vector<T> values(const gemma::TensorMap& tensors, const std::string& name) {
  const gemma::HostTensor& tensor = tensors.at(name);
  std::vector<T> result(tensor.bytes / sizeof(T));
  std::copy_n(static_cast<const char*>(tensor.data), tensor.bytes, reinterpret_cast<char*>(result.data()));
  return result;
}

}  // namespace

std::vector<Reference> read_references() {
  const gemma::Safetensors file("tests/data/reference.safetensors");
  std::vector<Reference> references;
  for (const auto& entry : nlohmann::json::parse(read_file("tests/data/reference.json"))) {
    const std::string name = std::to_string(references.size()) + ".";
    const std::vector<float> logits = values<float>(file.tensors(), name + "logits");
    references.push_back({entry["prompt"], entry["continuation"], values<int32_t>(file.tensors(), name + "prompt"),
                          values<int32_t>(file.tensors(), name + "continuation"),
                          std::vector<double>(logits.begin(), logits.end())});
  }
  require(references.size() == 5, "tests/data/reference.json has ", references.size(), " prompts");
  return references;
}

void require_same(const gemma::Config& config, const gemma::Config& expected) {
  const auto same = [](auto a, auto b, const char* what) { require(a == b, what, " is ", a, " instead of ", b); };
  same(config.generation, expected.generation, "generation");
  same(config.vocabulary, expected.vocabulary, "vocabulary");
  same(config.width, expected.width, "width");
  same(config.feed_forward, expected.feed_forward, "feed_forward");
  same(config.layers, expected.layers, "layers");
  same(config.query_heads, expected.query_heads, "query_heads");
  same(config.kv_heads, expected.kv_heads, "kv_heads");
  same(config.head_dim, expected.head_dim, "head_dim");
  same(config.max_positions, expected.max_positions, "max_positions");
  same(config.epsilon, expected.epsilon, "epsilon");
  same(config.activation, expected.activation, "activation");
  same(config.attention_scale, expected.attention_scale, "attention_scale");
  same(config.logit_soft_cap, expected.logit_soft_cap, "logit_soft_cap");
  same(config.window, expected.window, "window");
  require(config.local == expected.local, "other layers are local");
  same(config.local_rope.base, expected.local_rope.base, "the base of local layers");
  same(config.global_rope.base, expected.global_rope.base, "the base of global layers");
  same(config.global_rope.position_scale, expected.global_rope.position_scale, "position_scale");
  same(config.bos, expected.bos, "bos");
  require(config.eos == expected.eos, "other tokens end a text");
}

gemma::Request greedy_request(const std::vector<Tokens>& prompts) {
  gemma::Request request;
  request.prompts = prompts;
  request.max_tokens = 64;
  return request;
}

std::vector<Tokens> generate(const nvb::backend& backend, const gemma::Model& model, const gemma::Request& request,
                             const gemma::LogitsSink& on_logits) {
  std::vector<Tokens> added(request.prompts.size());
  gemma::generate(
      backend, model, request, [&](size_t sequence, int32_t token, bool) { added[sequence].push_back(token); },
      on_logits);
  return added;
}

std::vector<float> logits_of(const nvb::backend& backend, const gemma::Model& model, const Tokens& text) {
  gemma::Request request = greedy_request({text});
  request.max_tokens = 0;
  std::vector<float> logits;
  const auto added = generate(backend, model, request, [&logits](const float* rows, int64_t count) {
    logits.insert(logits.end(), rows, rows + count * kVocabulary);
  });
  require(added.front().empty(), "new tokens where none were wanted");
  return logits;
}

double logits_error(const nvb::backend& backend, const gemma::Model& model, const Reference& reference) {
  return relative_error(logits_of(backend, model, reference.prompt_tokens), reference.logits);
}

std::vector<float> margins(const nvb::backend& backend, const gemma::Model& model, const Reference& reference) {
  Tokens text = reference.prompt_tokens;
  text.insert(text.end(), reference.continuation_tokens.begin(), reference.continuation_tokens.end());
  const std::vector<float> logits = logits_of(backend, model, text);
  std::vector<float> result;
  for (size_t i = reference.prompt_tokens.size(); i < text.size(); ++i) {
    const auto row = logits.begin() + static_cast<int64_t>(i - 1) * kVocabulary;
    const auto chosen = row + text[i];
    const float next = std::max(*std::max_element(row, chosen), *std::max_element(chosen + 1, row + kVocabulary));
    result.push_back(*chosen - next);
  }
  return result;
}

int count_continuations(const nvb::backend& backend, const gemma::Model& model,
                        const std::vector<Reference>& references) {
  int kept = 0;
  for (const Reference& reference : references) {
    const Tokens added = generate(backend, model, greedy_request({reference.prompt_tokens})).front();
    if (added == reference.continuation_tokens) ++kept;
  }
  return kept;
}

}  // namespace gemma_test
