// Gemma 1, 2 and 3 as plain loops in double precision: what the engine is compared with. It shares no code with the
// engine, not even the reading of the configuration.
#ifndef GEMMA_TEST_PLAIN_GEMMA_H
#define GEMMA_TEST_PLAIN_GEMMA_H

#include <cstdint>
#include <string>
#include <vector>

#include "support.h"

namespace gemma_test {

struct PlainGemma {
  int generation = 3;
  int64_t vocabulary = 1024, width = 0, feed_forward = 0, layers = 0, heads = 0, kv_heads = 0, head_dim = 0;
  int64_t window = 0;
  int64_t pattern = 1;          // every pattern-th layer is global, the others see `window` tokens
  double query_scalar = 0;      // scores are divided by its square root
  double attention_cap = 0;     // 0: none
  double logit_cap = 0;         // 0: none
  double base = 10000;          // of the rotation
  double local_base = 10000;    // of the local layers of Gemma 3
  double position_divisor = 1;  // of the global layers
  bool bias = false;
  double embedding_scale = 0;
  TestTensors tensors;

  // Fills `tensors` with random weights, whose sizes keep the activations near 1.
  void randomize(const std::string& dtype, uint64_t seed);

  // config.json, in the words of transformers 4 or 5.
  std::string config_json(bool transformers_5) const;

  // Logits [tokens, vocabulary].
  std::vector<double> logits(const std::vector<int32_t>& tokens) const;

 private:
  bool local(int64_t layer) const { return generation > 1 && (layer + 1) % pattern != 0; }
  const std::vector<double>& tensor(const std::string& name) const { return tensors.at("model." + name).values; }
};

}  // namespace gemma_test

#endif  // GEMMA_TEST_PLAIN_GEMMA_H
