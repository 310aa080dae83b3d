// Greedy decoding with a draft (Leviathan et al., arXiv:2211.17192): something cheaper proposes tokens, and the model
// checks them in one pass with several query rows a sequence. What comes is what plain greedy decoding would give.
#ifndef GEMMA_SPECULATE_H
#define GEMMA_SPECULATE_H

#include <cstdint>
#include <memory>
#include <vector>

#include "generate.h"

namespace gemma {

// Proposals for each sequence and pass: with the newest token they are the rows of an attention's decode, 16 at most.
constexpr int64_t kMaxProposals = 15;

// What proposes tokens.
class Draft {
 public:
  virtual ~Draft() = default;
  // Takes the prompts, once, in front of everything else.
  virtual void begin() = 0;
  // Writes `count` tokens for each sequence, [sequences, count], that may follow its newest token, `newest[i]` at
  // position `positions[i]`; nobody reads those of a sequence whose position is -1. All tokens before the newest are
  // the prompt's or were proposed and accepted, or were newest.
  virtual void propose(const std::vector<int32_t>& newest, const std::vector<int32_t>& positions, int64_t count,
                       int32_t* proposals) = 0;
};

// A smaller model, of the same tokens. Backend, model and prompts outlive it.
std::unique_ptr<Draft> draft_by_model(const nvb::backend& backend, const Model& model,
                                      const std::vector<std::vector<int32_t>>& prompts, const Launching& launching,
                                      int64_t max_tokens, int64_t proposals);

// One that knows the text, [sequences][tokens behind the prompt], and proposes another token in place of each of it
// with a probability of 1 - `right`: for measurements.
std::unique_ptr<Draft> draft_by_text(std::vector<std::vector<int32_t>> texts,
                                     const std::vector<std::vector<int32_t>>& prompts, double right,
                                     int64_t vocabulary);

struct Speculated {
  Timing timing;
  int64_t passes = 0;    // of the model, each over all sequences
  int64_t proposed = 0;  // tokens, in all passes
  int64_t accepted = 0;
  double draft_seconds = 0;  // of the decode's time
};

// Answers the request with `proposals` tokens a pass, 1 to kMaxProposals.
// Errors: those of `generate`, and a temperature: the choice has to be the most probable token.
Speculated speculate(const nvb::backend& backend, const Model& model, const Request& request, Draft& draft,
                     int64_t proposals, const TokenSink& on_token);

}  // namespace gemma

#endif  // GEMMA_SPECULATE_H
