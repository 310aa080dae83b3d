// Greedy decoding with a draft gives the tokens of plain greedy decoding, whatever the draft proposes: a model that is
// the same, a smaller one, one that knows the text with some errors, and one that is always wrong.
#include <algorithm>
#include <memory>
#include <nvbackend.hpp>

#include "config.h"
#include "generate.h"
#include "model.h"
#include "plain_gemma.h"
#include "safetensors.h"
#include "speculate.h"
#include "support.h"

namespace {

using gemma_test::PlainGemma;
using gemma_test::require;
using Texts = std::vector<std::vector<int32_t>>;

std::vector<int32_t> prompt_tokens(size_t count, uint32_t seed) {
  std::vector<int32_t> tokens = {2};
  while (tokens.size() < count) {
    seed = seed * 1664525U + 1013904223U;
    tokens.push_back(static_cast<int32_t>(seed >> 8) % 1024);
  }
  return tokens;
}

// A model of random weights in F32, so that no rounding decides between tokens. Its files stay as long as it does.
struct Loaded {
  gemma_test::TemporaryFolder folder;
  std::unique_ptr<gemma::Safetensors> files;
  gemma::Model model;

  Loaded(const nvb::backend& backend, PlainGemma plain, uint32_t seed) {
    plain.randomize("F32", seed);
    gemma_test::write_file(folder.path("config.json"), plain.config_json(true));
    gemma_test::write_file(folder.path("model.safetensors"), gemma_test::safetensors_bytes(plain.tensors, "F32", 0));
    files = std::make_unique<gemma::Safetensors>(gemma::Safetensors::open_folder(folder.path()));
    gemma::Progress progress(0);
    model = gemma::load_model(backend, gemma::read_config(folder.path()), files->tensors(), {}, &progress);
  }
};

// A window shorter than the texts, so that local layers have rings.
PlainGemma large() {
  PlainGemma plain;
  plain.generation = 3;
  plain.width = 80, plain.feed_forward = 120, plain.layers = 4;
  plain.heads = 4, plain.kv_heads = 2, plain.head_dim = 64, plain.query_scalar = 40;
  plain.window = 5, plain.pattern = 3, plain.base = 1e6, plain.position_divisor = 8;
  return plain;
}

PlainGemma small() {
  PlainGemma plain = large();
  plain.width = 48, plain.feed_forward = 64, plain.layers = 2;
  return plain;
}

gemma::Request request_of(uint32_t optimize) {
  gemma::Request request;
  request.prompts = {prompt_tokens(21, 1), prompt_tokens(1, 2), prompt_tokens(13, 3)};
  request.max_tokens = 30;
  request.stop_at_eos = false;
  request.launching.optimize = optimize;
  return request;
}

Texts plain_texts(const nvb::backend& backend, const gemma::Model& model, const gemma::Request& request) {
  Texts texts(request.prompts.size());
  gemma::generate(backend, model, request,
                  [&](size_t sequence, int32_t token, bool) { texts[sequence].push_back(token); });
  return texts;
}

gemma::Speculated expect_same(const nvb::backend& backend, const gemma::Model& model, const gemma::Request& request,
                              gemma::Draft& draft, int64_t proposals, const Texts& expected) {
  Texts texts(request.prompts.size());
  std::vector<bool> ended(request.prompts.size(), false);
  const gemma::Speculated found =
      gemma::speculate(backend, model, request, draft, proposals, [&](size_t sequence, int32_t token, bool last) {
        require(!ended[sequence], "a token behind the last of sequence ", sequence);
        texts[sequence].push_back(token);
        ended[sequence] = last;
      });
  for (size_t i = 0; i < texts.size(); ++i) {
    require(texts[i].size() == expected[i].size(), "sequence ", i, " has ", texts[i].size(), " tokens; ",
            expected[i].size(), " are expected");
    for (size_t at = 0; at < texts[i].size(); ++at) {
      require(texts[i][at] == expected[i][at], "token ", at, " of sequence ", i, " is ", texts[i][at], "; ",
              expected[i][at], " is expected");
    }
    require(ended[i] == !expected[i].empty(), "sequence ", i, " was not ended");
  }
  require(found.accepted <= found.proposed, found.accepted, " accepted of ", found.proposed);
  return found;
}

void by_text(uint32_t optimize) {
  const nvb::backend backend(gemma_test::test_device().c_str());
  const Loaded loaded(backend, large(), 7);
  gemma::Request request = request_of(optimize);
  const int32_t vocabulary = static_cast<int32_t>(loaded.model.config.vocabulary);
  Texts texts = plain_texts(backend, loaded.model, request);
  for (const int64_t proposals : {1, 4, 15}) {
    for (const double right : {0.0, 0.7, 1.0}) {
      const auto draft = gemma::draft_by_text(texts, request.prompts, right, vocabulary);
      const gemma::Speculated found = expect_same(backend, loaded.model, request, *draft, proposals, texts);
      // A pass gives one token more than it accepts, so one that knows everything needs as few as there can be.
      const int64_t fewest = (request.max_tokens + proposals) / (proposals + 1);
      if (right == 1.0) require(found.passes == fewest, found.passes, " passes; ", fewest, " are enough");
      if (right == 0.0) require(found.passes == request.max_tokens && found.accepted == 0, found.accepted, " accepted");
      if (right == 0.7 && proposals == 1) {
        // Some 45 passes of two sequences and more: 0.7 within four deviations of 0.05.
        const double share = static_cast<double>(found.accepted) / static_cast<double>(found.proposed);
        require(share > 0.5 && share < 0.9, "a share of ", share, " was accepted");
      }
    }
  }
  // No token, one token, and an end in the middle.
  for (const int64_t count : {0, 1, 2}) {
    request.max_tokens = count;
    Texts few = texts;
    for (auto& text : few) text.resize(static_cast<size_t>(count));
    const auto draft = gemma::draft_by_text(texts, request.prompts, 1, vocabulary);
    expect_same(backend, loaded.model, request, *draft, 4, few);
  }
}

void by_model(uint32_t optimize) {
  const nvb::backend backend(gemma_test::test_device().c_str());
  const Loaded loaded(backend, large(), 7), smaller(backend, small(), 8);
  const gemma::Request request = request_of(optimize);
  const Texts texts = plain_texts(backend, loaded.model, request);
  for (const int64_t proposals : {1, 3, 8}) {
    const auto other = gemma::draft_by_model(backend, smaller.model, request.prompts, request.launching,
                                             request.max_tokens, proposals);
    expect_same(backend, loaded.model, request, *other, proposals, texts);
    // The model itself is always right: its own cache is rewound to what was accepted as it should be.
    const auto same =
        gemma::draft_by_model(backend, loaded.model, request.prompts, request.launching, request.max_tokens, proposals);
    const gemma::Speculated found = expect_same(backend, loaded.model, request, *same, proposals, texts);
    const int64_t fewest = (request.max_tokens + proposals) / (proposals + 1);
    require(found.passes == fewest, found.passes, " passes with the model as its own draft; ", fewest, " are enough");
  }
}

void at_eos() {
  const nvb::backend backend(gemma_test::test_device().c_str());
  Loaded loaded(backend, large(), 7);
  gemma::Request request = request_of(2);
  Texts texts = plain_texts(backend, loaded.model, request);
  // The fifth token of the first text ends every text that has it.
  loaded.model.config.eos = {texts[0][4]};
  request.stop_at_eos = true;
  const Texts ended = plain_texts(backend, loaded.model, request);
  require(ended[0].size() <= 5, "the first text has ", ended[0].size(), " tokens");
  const auto draft = gemma::draft_by_text(texts, request.prompts, 1, loaded.model.config.vocabulary);
  expect_same(backend, loaded.model, request, *draft, 6, ended);
}

void refusals() {
  const nvb::backend backend(gemma_test::test_device().c_str());
  const Loaded loaded(backend, small(), 7);
  gemma::Request request = request_of(0);
  const auto draft = gemma::draft_by_text(Texts(3), request.prompts, 1, 1024);
  const auto refused = [&](int64_t proposals, const char* text) {
    try {
      gemma::speculate(backend, loaded.model, request, *draft, proposals, [](size_t, int32_t, bool) {});
    } catch (const std::exception& error) {
      require(std::string(error.what()).find(text) != std::string::npos, "the error says: ", error.what());
      return;
    }
    require(false, text, " is no error");
  };
  refused(0, "1 to 15");
  refused(16, "1 to 15");
  request.sampling.temperature = 1;
  refused(4, "--temperature 0");
  request.sampling.temperature = 0;
  request.prompts[1].clear();
  refused(4, "a prompt has no tokens");
}

}  // namespace

int main() {
  return gemma_test::run_tests({{"a draft that knows the text", [] { by_text(0); }},
                                {"a draft that knows the text, recorded", [] { by_text(2); }},
                                {"a model as the draft", [] { by_model(0); }},
                                {"a model as the draft, recorded", [] { by_model(2); }},
                                {"the end of a text", at_eos},
                                {"what is refused", refusals}});
}
