// What transformers answered with the shipped model (tests/data/reference.*), and what the engine answers.
#ifndef GEMMA_TEST_REFERENCE_H
#define GEMMA_TEST_REFERENCE_H

#include <cstdint>
#include <string>
#include <vector>

#include "generate.h"
#include "model.h"

namespace gemma_test {

using Tokens = std::vector<int32_t>;

struct Reference {
  std::string prompt, continuation;
  Tokens prompt_tokens, continuation_tokens;
  std::vector<double> logits;  // [prompt tokens, 1024]
};

// All five.
std::vector<Reference> read_references();

// Fails where a number differs, but for norm_offset, which belongs to the norms' own values.
void require_same(const gemma::Config& config, const gemma::Config& expected);

// Up to 64 new tokens for each prompt.
gemma::Request greedy_request(const std::vector<Tokens>& prompts);

// The new tokens of each prompt.
std::vector<Tokens> generate(const nvb::backend& backend, const gemma::Model& model, const gemma::Request& request,
                             const gemma::LogitsSink& on_logits = {});

// Logits of all tokens of a text, [tokens, 1024].
std::vector<float> logits_of(const nvb::backend& backend, const gemma::Model& model, const Tokens& text);

// ‖logits − reference‖ / ‖reference‖ over the tokens of a prompt.
double logits_error(const nvb::backend& backend, const gemma::Model& model, const Reference& reference);

// By how much the logit of each token of the continuation exceeds those of all others, given the reference's text
// before it. Below 0: the model would have chosen another token there.
std::vector<float> margins(const nvb::backend& backend, const gemma::Model& model, const Reference& reference);

// The continuations that the model gives token for token.
int count_continuations(const nvb::backend& backend, const gemma::Model& model,
                        const std::vector<Reference>& references);

}  // namespace gemma_test

#endif  // GEMMA_TEST_REFERENCE_H
