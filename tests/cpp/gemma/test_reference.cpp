// The shipped model against transformers' answers (tests/data/reference.*): tokens, greedy continuations, logits.
// Run in the repository's root.
#include <nvbackend.hpp>

#include "config.h"
#include "generate.h"
#include "model.h"
#include "reference.h"
#include "safetensors.h"
#include "support.h"
#include "tokenizer.h"

namespace {

using gemma_test::Reference;
using gemma_test::require;
using gemma_test::Tokens;

const char* const kFolder = "models/tiny-gemma3";

class Fixture {
 public:
  Fixture()
      : backend(gemma_test::test_device().c_str()),
        files(gemma::Safetensors::open_folder(kFolder)),
        tokenizer(std::string(kFolder) + "/tokenizer.model"),
        references(gemma_test::read_references()) {
    gemma::Progress progress(0);
    model = gemma::load_model(backend, gemma::read_config(kFolder), files.tensors(), {}, &progress);
  }

  std::vector<Tokens> generate(const gemma::Request& request) const {
    return gemma_test::generate(backend, model, request);
  }

  nvb::backend backend;
  gemma::Safetensors files;
  gemma::Tokenizer tokenizer;
  std::vector<Reference> references;
  gemma::Model model;
};

void check_text(const Fixture& fixture) {
  for (const Reference& reference : fixture.references) {
    require(fixture.tokenizer.encode(reference.prompt, 2, 1024) == reference.prompt_tokens,
            "other tokens for: ", reference.prompt);
    gemma::TextStream stream(fixture.tokenizer);
    std::string text;
    for (const int32_t token : reference.continuation_tokens) text += stream.add(token);
    require(text + stream.finish() == reference.continuation, "another text: ", text);
  }
}

// Characters that no piece holds are spelled in bytes, and come out whole.
void check_bytes(const Fixture& fixture) {
  const std::string text = "naïve 😀 日本";
  gemma::TextStream stream(fixture.tokenizer);
  std::string result;
  for (const int32_t token : fixture.tokenizer.encode(text, 2, 1024)) {
    const std::string part = stream.add(token);
    require(part.empty() || (static_cast<unsigned char>(part[0]) & 0xC0) != 0x80, "half a character: ", part);
    result += part;
  }
  require(result == text, "another text: ", result);

  // F0 9F starts a character that "x" does not go on with, and FF starts none. Byte b is token 4 + b.
  const std::string replacement = "\xEF\xBF\xBD";
  const int32_t x = fixture.tokenizer.encode("x", 2, 1024).back();
  result.clear();
  for (const int32_t token : {4 + 0xF0, 4 + 0x9F, x, 4 + 0xFF, 4 + 0xE2}) result += stream.add(token);
  result += stream.finish();
  require(result == replacement + replacement + "x" + replacement + replacement, "another text: ", result);
}

void check_continuations(const Fixture& fixture) {
  for (const Reference& reference : fixture.references) {
    const Tokens added = fixture.generate(gemma_test::greedy_request({reference.prompt_tokens})).front();
    require(added == reference.continuation_tokens, "another continuation of: ", reference.prompt);
  }
}

void check_logits(const Fixture& fixture) {
  const double bound = fixture.backend.device_info().kind == NVB_DEVICE_CPU ? 1e-4 : 2e-2;
  for (const Reference& reference : fixture.references) {
    const double error = gemma_test::logits_error(fixture.backend, fixture.model, reference);
    std::printf("        relative error of the logits %.1e\n", error);
    require(error < bound, "relative error ", error, "; the bound is ", bound);
  }
}

// 80 sequences of different length, more tokens than one prefill pass takes, that end at different times.
void check_batch(const Fixture& fixture) {
  std::vector<Tokens> prompts;
  for (int copy = 0; copy < 16; ++copy) {
    for (const Reference& reference : fixture.references) prompts.push_back(reference.prompt_tokens);
  }
  const std::vector<Tokens> added = fixture.generate(gemma_test::greedy_request(prompts));
  for (size_t i = 0; i < added.size(); ++i) {
    require(added[i] == fixture.references[i % 5].continuation_tokens, "another continuation of sequence ", i);
  }
}

void check_sampling(const Fixture& fixture) {
  gemma::Request request = gemma_test::greedy_request({fixture.references[2].prompt_tokens});
  const auto greedy = fixture.generate(request);
  request.sampling.temperature = 1.5F;
  request.sampling.seed = 11;
  const auto first = fixture.generate(request);
  require(fixture.generate(request) == first, "one seed gave two texts");
  request.sampling.seed = 12;
  require(fixture.generate(request) != first, "two seeds gave one text");
  request.sampling.top_k = 1;
  require(fixture.generate(request) == greedy, "the one most probable token is not the greedy one");
  request.sampling.top_k = 0;
  request.sampling.top_p = 1e-6F;
  require(fixture.generate(request) == greedy, "the smallest set of probable tokens is not the greedy token");
}

// Launches of any number of steps, recorded or not, give the tokens of calls that are made one step at a time: greedy
// ones and drawn ones, of sequences that end at a stop token in the middle of a launch or at its end, after one token
// and after all.
void check_launches(const Fixture& fixture) {
  std::vector<Tokens> prompts;
  for (const Reference& reference : fixture.references) prompts.push_back(reference.prompt_tokens);
  prompts.push_back(prompts.front());
  for (const float temperature : {0.0F, 1.5F}) {
    for (const int64_t max_tokens : {1, 2, 64}) {
      gemma::Request request = gemma_test::greedy_request(prompts);
      request.sampling.temperature = temperature;
      request.max_tokens = max_tokens;
      request.launching = {0, 1};
      const auto expected = fixture.generate(request);
      bool ended = max_tokens < 64;
      for (const Tokens& tokens : expected) ended |= tokens.size() < 64;
      require(ended, "no sequence ends early, so that no stop token is tested");
      for (const gemma::Launching launching : {gemma::Launching{0, 3}, {1, 0}, {2, 1}, {2, 2}, {2, 5}, {3, 64}}) {
        request.launching = launching;
        require(fixture.generate(request) == expected, "other tokens with --optimize ", launching.optimize, " --steps ",
                launching.steps, ", ", max_tokens, " tokens and temperature ", temperature);
      }
    }
  }
}

template <typename Call>
void require_error(const std::string& text, Call call) {
  try {
    call();
  } catch (const std::exception& error) {
    require(std::string(error.what()).find(text) != std::string::npos, "the error is: ", error.what());
    return;
  }
  require(false, "no error about ", text);
}

void check_limits(const Fixture& fixture) {
  const auto generate = [&fixture](const std::vector<Tokens>& prompts) {
    fixture.generate(gemma_test::greedy_request(prompts));
  };
  require_error("there is no prompt", [&] { generate({}); });
  require_error("a prompt has no tokens", [&] { generate({{2}, {}}); });
  require_error("token 1024 of a prompt is outside the vocabulary of 1024", [&] { generate({{2, 1024}}); });
  require_error("token -1 of a prompt is outside the vocabulary of 1024", [&] { generate({{-1}}); });
  require_error("a prompt of 2000 tokens and 64 new ones need 2064 positions; the model has 2048",
                [&] { generate({Tokens(2000, 5)}); });
}

}  // namespace

int main() {
  try {
    const Fixture fixture;
    const std::pair<const char*, void (*)(const Fixture&)> checks[] = {{"text to tokens and back", check_text},
                                                                       {"characters in bytes", check_bytes},
                                                                       {"continuations", check_continuations},
                                                                       {"logits", check_logits},
                                                                       {"batch", check_batch},
                                                                       {"sampling", check_sampling},
                                                                       {"launches", check_launches},
                                                                       {"limits", check_limits}};
    std::vector<gemma_test::Test> tests;
    for (const auto& [name, check] : checks) {
      tests.push_back({name, [&fixture, check = check] { check(fixture); }});
    }
    return gemma_test::run_tests(tests);
  } catch (const std::exception& error) {
    std::printf("FAILED  %s\n", error.what());
    return 1;
  }
}
