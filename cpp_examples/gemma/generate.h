// From prompts to new tokens: prefill, then one token a step for all sequences at once.
#ifndef GEMMA_GENERATE_H
#define GEMMA_GENERATE_H

#include <cstdint>
#include <functional>
#include <vector>

#include "decoder.h"
#include "model.h"

namespace gemma {

struct Request {
  std::vector<std::vector<int32_t>> prompts;
  int64_t max_tokens = 128;  // new ones for each prompt
  bool stop_at_eos = true;
  Sampling sampling;
  Launching launching;
};

struct Timing {
  int64_t prefill_tokens = 0;
  double prefill_seconds = 0;  // until the first token of each sequence is known
  int64_t decode_tokens = 0;   // those after the first of each sequence
  double decode_seconds = 0;
  double recording_seconds = 0;  // of the first graph, before the prompts; 0 without one
  uint64_t cache_bytes = 0;
};

// Receives each new token of a sequence; `last` with its final one, be it eos or the max_tokens-th.
using TokenSink = std::function<void(size_t sequence, int32_t token, bool last)>;

// Receives the logits of the prompts' tokens, [count, vocabulary], all prompts one after the other.
using LogitsSink = std::function<void(const float* rows, int64_t count)>;

// Errors: an empty prompt, a token outside the vocabulary, more positions than the model has.
void check_request(const Request& request, const Config& config);

// Answers the request. `on_logits` may be empty.
// Errors: those of `check_request`.
Timing generate(const nvb::backend& backend, const Model& model, const Request& request, const TokenSink& on_token,
                const LogitsSink& on_logits = {});

}  // namespace gemma

#endif  // GEMMA_GENERATE_H
