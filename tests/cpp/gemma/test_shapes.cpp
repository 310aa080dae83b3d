// Small random models of all three generations against plain loops in double precision: prefill logits, and the tokens
// that decode chooses, alone and in a batch of prompts of different length.
#include <algorithm>
#include <cmath>
#include <nvbackend.hpp>

#include "config.h"
#include "generate.h"
#include "model.h"
#include "plain_gemma.h"
#include "safetensors.h"
#include "support.h"

namespace {

using gemma_test::PlainGemma;
using gemma_test::require;

struct Case {
  const char* name;
  const char* dtype;
  bool transformers_5;
  size_t padding;  // of the file's header: 1 puts the tensors at odd addresses
  PlainGemma plain;
};

// heads · head_dim is never the width, windows are shorter than the prompts, and heads share keys 1 to 8 to 1.
std::vector<Case> cases() {
  PlainGemma gemma1;
  gemma1.generation = 1;
  gemma1.width = 72, gemma1.feed_forward = 100, gemma1.layers = 2;
  gemma1.heads = 4, gemma1.kv_heads = 1, gemma1.head_dim = 96, gemma1.query_scalar = 96;

  PlainGemma gemma1_bias = gemma1;
  gemma1_bias.width = 64, gemma1_bias.heads = gemma1_bias.kv_heads = 2, gemma1_bias.bias = true;

  PlainGemma gemma2;
  gemma2.generation = 2;
  gemma2.width = 96, gemma2.feed_forward = 152, gemma2.layers = 3;
  gemma2.heads = 8, gemma2.kv_heads = 1, gemma2.head_dim = 32, gemma2.query_scalar = 48;
  gemma2.window = 7, gemma2.pattern = 2, gemma2.attention_cap = 2, gemma2.logit_cap = 3;

  PlainGemma gemma2_plain = gemma2;
  gemma2_plain.head_dim = 256, gemma2_plain.heads = 2, gemma2_plain.attention_cap = gemma2_plain.logit_cap = 0;

  PlainGemma gemma3;
  gemma3.generation = 3;
  gemma3.width = 80, gemma3.feed_forward = 120, gemma3.layers = 4;
  gemma3.heads = 4, gemma3.kv_heads = 2, gemma3.head_dim = 64, gemma3.query_scalar = 40;
  gemma3.window = 5, gemma3.pattern = 3, gemma3.base = 1e6, gemma3.position_divisor = 8;

  PlainGemma gemma3_pattern = gemma3;
  gemma3_pattern.head_dim = 80, gemma3_pattern.layers = 7, gemma3_pattern.pattern = 6, gemma3_pattern.logit_cap = 5;
  return {{"gemma 1, one key head", "BF16", false, 0, gemma1},
          {"gemma 1, biases, F16", "F16", true, 1, gemma1_bias},
          {"gemma 2, soft caps", "BF16", false, 1, gemma2},
          {"gemma 2, no soft caps, F32", "F32", true, 3, gemma2_plain},
          {"gemma 3, scaled positions", "BF16", true, 0, gemma3},
          {"gemma 3, older file, F32", "F32", false, 0, gemma3_pattern}};
}

std::vector<int32_t> prompt_tokens(size_t count, uint32_t seed) {
  std::vector<int32_t> tokens = {2};
  while (tokens.size() < count) {
    seed = seed * 1664525U + 1013904223U;
    tokens.push_back(static_cast<int32_t>(seed >> 8) % 1024);
  }
  return tokens;
}

// Each new token's logit in the plain model is the largest one, but for `tolerance`: rounding may swap near ties.
void check_continuation(const PlainGemma& plain, const std::vector<int32_t>& prompt, const std::vector<int32_t>& added,
                        double tolerance) {
  std::vector<int32_t> all = prompt;
  all.insert(all.end(), added.begin(), added.end());
  const std::vector<double> logits = plain.logits(all);
  for (size_t i = 0; i < added.size(); ++i) {
    const auto row = logits.begin() + static_cast<int64_t>(prompt.size() + i - 1) * plain.vocabulary;
    const double best = *std::max_element(row, row + plain.vocabulary);
    const double chosen = row[added[i]];
    require(chosen >= best - tolerance, "new token ", i, " is ", added[i], " with a logit of ", chosen,
            "; the largest is ", best);
  }
}

// With a cache of these dtypes, 0: that of activations, whose rounding may move the logits by `kv_error` of their size.
void check(const Case& test, gemma::KvDtypes kv_dtypes, double kv_error) {
  const nvb::backend backend(gemma_test::test_device().c_str());
  const bool cpu = backend.device_info().kind == NVB_DEVICE_CPU;
  PlainGemma plain = test.plain;
  plain.randomize(test.dtype, 7);
  // BF16 activations, as a GPU uses them for BF16 weights, want √width rounded to BF16, 8 bits, as transformers do it.
  plain.embedding_scale = std::sqrt(static_cast<double>(plain.width));
  if (!cpu && std::string(test.dtype) == "BF16") {
    const double unit = std::exp2(std::floor(std::log2(plain.embedding_scale)) - 7);
    plain.embedding_scale = std::nearbyint(plain.embedding_scale / unit) * unit;
  }
  const gemma_test::TemporaryFolder folder;
  gemma_test::write_file(folder.path("config.json"), plain.config_json(test.transformers_5));
  gemma_test::write_file(folder.path("model.safetensors"),
                         gemma_test::safetensors_bytes(plain.tensors, test.dtype, test.padding));
  const gemma::Safetensors files = gemma::Safetensors::open_folder(folder.path());
  gemma::Progress progress(0);
  gemma::Model model = gemma::load_model(backend, gemma::read_config(folder.path()), files.tensors(), {}, &progress);
  model.kv_dtypes = kv_dtypes;

  gemma::Request request;
  request.prompts = {prompt_tokens(21, 1), prompt_tokens(1, 2), prompt_tokens(13, 3)};
  request.max_tokens = 8;
  request.stop_at_eos = false;
  std::vector<std::vector<int32_t>> added(request.prompts.size());
  std::vector<float> logits;
  gemma::generate(
      backend, model, request, [&](size_t sequence, int32_t token, bool) { added[sequence].push_back(token); },
      [&](const float* rows, int64_t count) { logits.insert(logits.end(), rows, rows + count * plain.vocabulary); });

  std::vector<double> expected;
  for (const auto& prompt : request.prompts) {
    const std::vector<double> rows = plain.logits(prompt);
    expected.insert(expected.end(), rows.begin(), rows.end());
  }
  const double error = gemma_test::relative_error(logits, expected);
  const double bound = std::max(cpu ? 1e-5 : 2e-2, kv_error);
  require(error < bound, "the logits' relative error is ", error, "; the bound is ", bound);
  double largest = 0;
  for (const double value : expected) largest = std::max(largest, std::fabs(value));
  for (size_t i = 0; i < added.size(); ++i) {
    require(added[i].size() == 8, added[i].size(), " new tokens instead of 8");
    check_continuation(plain, request.prompts[i], added[i], bound * largest);
  }
}

}  // namespace

int main() {
  std::vector<gemma_test::Test> tests;
  for (const Case& test : cases()) {
    tests.push_back({test.name, [test] { check(test, {}, 0); }});
    // A step of E4M3 is an eighth of a number, of INT8 and Q8_0 a 127th of the largest of a row or block, of Q4_0 an
    // eighth of that.
    constexpr uint32_t kFp8 = NVB_DTYPE_FP8_E4M3, kInt8 = NVB_DTYPE_KV_INT8;
    constexpr uint32_t kQ8 = NVB_DTYPE_KV_Q8_0, kQ4 = NVB_DTYPE_KV_Q4_0;
    const struct {
      const char* name;
      gemma::KvDtypes dtypes;
      double error;
    } caches[] = {{"FP8", {kFp8, kFp8}, 0.1},
                  {"INT8", {kInt8, kInt8}, 0.03},
                  {"Q8_0", {kQ8, kQ8}, 0.03},
                  {"Q4_0", {kQ4, kQ4}, 0.3},
                  {"INT8 and Q4_0", {kInt8, kQ4}, 0.3}};
    for (const auto& cache : caches) {
      const std::string name = std::string(test.name) + ", keys and values in " + cache.name;
      tests.push_back({name, [test, cache] { check(test, cache.dtypes, cache.error); }});
    }
  }
  return gemma_test::run_tests(tests);
}
