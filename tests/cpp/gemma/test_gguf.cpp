// The shipped model as GGUF files against itself as a Hugging Face folder and against transformers' answers. Run in the
// repository's root.
//
//   test_gguf [FILE.gguf …]     more files of the same model, by tests/tools/make_gemma_gguf.py, named for their type
#include <algorithm>
#include <nvbackend.hpp>

#include "config.h"
#include "gguf_model.h"
#include "model.h"
#include "reference.h"
#include "safetensors.h"
#include "support.h"
#include "tokenizer.h"

namespace {

using gemma_test::require;

const char* const kFolder = "models/tiny-gemma3";
const char* const kFile = "tests/data/tiny-gemma3-q8_0.gguf";

gemma::Model load(const nvb::backend& backend, const gemma::GgufModel& file, const char* weights = "") {
  gemma::Progress progress(0);
  return gemma::load_model(backend, file.config, file.tensors, gemma::parse_weight_formats(weights, ""), &progress);
}

// The metadata says what config.json says.
void check_config() {
  gemma_test::require_same(gemma::open_gguf(kFile).config, gemma::read_config(kFolder));
}

// Any text is cut as the model's own tokenizer cuts it, and comes back.
void check_tokenizer() {
  const gemma::Tokenizer own(std::string(kFolder) + "/tokenizer.model");
  const gemma::Tokenizer made(gemma::open_gguf(kFile).tokenizer, kFile);
  std::vector<std::string> texts = {"", " ", "  two  spaces ", "naïve 😀 日本", "\n\t\x01", "<s>", "</s><unk><0x41>"};
  for (const auto& reference : gemma_test::read_references()) {
    texts.push_back(reference.prompt);
    texts.push_back(reference.continuation);
  }
  for (const std::string& text : texts) {
    const gemma_test::Tokens tokens = own.encode(text, 2, 1024);
    require(made.encode(text, 2, 1024) == tokens, "other tokens for: ", text);
    gemma::TextStream own_stream(own), made_stream(made);
    for (const int32_t token : tokens) {
      require(own_stream.add(token) == made_stream.add(token), "another text for token ", token);
    }
  }
}

struct Expectation {
  const char* type;   // in the file's name
  double error;       // of the logits on the CPU, at most
  int continuations;  // of 5, whole on the CPU
};
// Files of 4 bits are held to the logits alone: test_weights says why.
const Expectation kExpectations[] = {{"q8_0", 5e-3, 5}, {"bf16", 1e-6, 5}, {"f16", 1e-5, 5},
                                     {"f32", 1e-6, 5},  {"q4_0", 5e-2, 0}, {"q4_k_m", 5e-2, 0}};

void check_answers(const std::string& path) {
  const nvb::backend backend(gemma_test::test_device().c_str());
  const bool cpu = backend.device_info().kind == NVB_DEVICE_CPU;
  const auto expected =
      std::find_if(std::begin(kExpectations), std::end(kExpectations),
                   [&path](const auto& candidate) { return path.find(candidate.type) != std::string::npos; });
  require(expected != std::end(kExpectations), "the name does not say what the file's type is");

  const gemma::GgufModel file = gemma::open_gguf(path);
  const gemma::Model model = load(backend, file);
  const std::vector<gemma_test::Reference> references = gemma_test::read_references();
  double error = 0;
  for (const auto& reference : references) {
    error = std::max(error, gemma_test::logits_error(backend, model, reference));
  }
  const int continuations = gemma_test::count_continuations(backend, model, references);
  std::printf("        relative error of the logits %.1e; %d of 5 continuations whole\n", error, continuations);
  for (const auto& [format, use] : model.formats) {
    std::printf("        %s: %.1f M parameters, relative error %.1e against the file at most\n",
                gemma::weight_format_name(format), static_cast<double>(use.parameters) / 1e6, use.largest_error);
  }
  const double bound = cpu ? expected->error : expected->error + 2e-2;
  require(error < bound, "the logits' relative error is ", error, "; the bound is ", bound);
  require(!cpu || continuations >= expected->continuations, continuations, " of 5 continuations are whole; ",
          expected->continuations, " must be");
}

// The file's codes are kept, and converted where --weights asks for it.
void check_formats() {
  const nvb::backend backend(gemma_test::test_device().c_str());
  const gemma::GgufModel file = gemma::open_gguf(kFile);
  const gemma::Model kept = load(backend, file);
  require(kept.formats.size() == 1 && kept.formats.count(NVB_WEIGHT_FORMAT_INT8) == 1, "Q8_0 is not kept as INT8");
  require(kept.formats.at(NVB_WEIGHT_FORMAT_INT8).largest_error == 0, "Q8_0 is not kept exactly");
  const gemma::Model wide = load(backend, file, "bf16");
  require(wide.formats.size() == 1 && wide.formats.count(NVB_WEIGHT_FORMAT_BF16) == 1,
          "--weights bf16 is not followed");
  const gemma::Model narrow = load(backend, file, "int4");
  require(narrow.formats.count(NVB_WEIGHT_FORMAT_INT4) == 1 && narrow.formats.count(NVB_WEIGHT_FORMAT_INT8) == 1,
          "--weights int4 is not followed");
}

}  // namespace

int main(int count, char** arguments) {
  std::vector<gemma_test::Test> tests = {{"metadata", check_config},
                                         {"tokenizer", check_tokenizer},
                                         {"formats", check_formats},
                                         {kFile, [] { check_answers(kFile); }}};
  for (int i = 1; i < count; ++i) {
    const std::string path = arguments[i];
    tests.push_back({path, [path] { check_answers(path); }});
  }
  return gemma_test::run_tests(tests);
}
