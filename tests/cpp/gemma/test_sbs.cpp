// The shipped model as files of gemma.cpp, each against the Hugging Face folder with the same values. Run in the
// repository's root.
//
//   test_sbs FOLDER GEMMA     FOLDER has the files TYPE-LAYOUT.sbs that tests/tools/make_gemma_sbs.py wrote, and the
//                             values of those that round in folders TYPE-LAYOUT; GEMMA is the program
#include <algorithm>
#include <nvbackend.hpp>

#include "config.h"
#include "model.h"
#include "reference.h"
#include "safetensors.h"
#include "sbs_model.h"
#include "support.h"
#include "tokenizer.h"

namespace {

using gemma_test::require;
using gemma_test::Tokens;

const char* const kShipped = "models/tiny-gemma3";

struct File {
  const char* type;
  bool rounded;                   // has values of its own
  std::vector<uint32_t> formats;  // what its matrices are kept in; empty: several
  double error;                   // of the weights against the file, at most
};
const File kFiles[] = {
    {"f32", false, {NVB_WEIGHT_FORMAT_F32}, 0},
    {"bf16", false, {NVB_WEIGHT_FORMAT_BF16}, 0},
    {"sfp", true, {NVB_WEIGHT_FORMAT_SFP}, 0},
    {"sfp_scaled", true, {NVB_WEIGHT_FORMAT_SFP}, 0},
    {"i8", true, {NVB_WEIGHT_FORMAT_BF16}, 2e-3},
    {"i8_symmetric", true, {NVB_WEIGHT_FORMAT_INT8}, 0},
    {"mixed", true, {}, 2e-3},
};
const char* const kLayouts[] = {"first", "last"};

// Files in layout `first` hold the output projection head by head, whose heads of 64 share the groups of 128 of I8: it
// is decoded.
std::vector<uint32_t> expected_formats(const File& file, const std::string& layout) {
  std::vector<uint32_t> formats = file.formats;
  if (layout == "first" && formats == std::vector<uint32_t>{NVB_WEIGHT_FORMAT_INT8})
    formats.push_back(NVB_WEIGHT_FORMAT_BF16);
  std::sort(formats.begin(), formats.end());
  return formats;
}

gemma::Model load(const nvb::backend& backend, const gemma::Config& config, const gemma::TensorMap& tensors) {
  gemma::Progress progress(0);
  return gemma::load_model(backend, config, tensors, gemma::WeightFormats(), &progress);
}

void check_file(const std::string& folder, const File& file, const std::string& layout) {
  const std::string name = folder + "/" + file.type + "-" + layout;
  const std::string source = file.rounded ? name : kShipped;
  const gemma::SbsModel sbs = gemma::open_sbs(name + ".sbs");
  gemma_test::require_same(sbs.config, gemma::read_config(source));
  require(sbs.config.norm_offset == 1, "norms multiply by ", sbs.config.norm_offset, " + weight");
  require(sbs.tokenizer == gemma_test::read_file(source + "/tokenizer.model"), "another tokenizer");

  const nvb::backend backend(gemma_test::test_device().c_str());
  const gemma::Safetensors files = gemma::Safetensors::open_folder(source);
  const gemma::Model expected = load(backend, gemma::read_config(source), files.tensors());
  const gemma::Model model = load(backend, sbs.config, sbs.tensors);
  require(model.parameters == expected.parameters, model.parameters, " parameters; ", expected.parameters,
          " are needed");
  std::vector<uint32_t> formats;
  for (const auto& [format, use] : model.formats) {
    formats.push_back(format);
    require(use.largest_error <= file.error, "weights of ", gemma::weight_format_name(format), " differ by ",
            use.largest_error);
  }
  const std::vector<uint32_t> wanted = expected_formats(file, layout);
  require(wanted.empty() ? formats.size() > 2 : formats == wanted, "kept in ", gemma::weight_format_name(formats[0]),
          ", first of ", formats.size(), " formats");

  std::vector<Tokens> prompts;
  double error = 0;
  for (const auto& reference : gemma_test::read_references()) {
    prompts.push_back(reference.prompt_tokens);
    const std::vector<float> logits = gemma_test::logits_of(backend, expected, reference.prompt_tokens);
    error = std::max(error, gemma_test::relative_error(gemma_test::logits_of(backend, model, reference.prompt_tokens),
                                                       std::vector<double>(logits.begin(), logits.end())));
  }
  std::printf("        relative error of the logits %.1e\n", error);
  const bool cpu = backend.device_info().kind == NVB_DEVICE_CPU;
  // Decoding I8 without zeros rounds to BF16, which the values of the folder are not. Scales of SFP stand behind sums.
  const bool rounds = wanted.size() > 1;
  const bool scales = formats == std::vector<uint32_t>{NVB_WEIGHT_FORMAT_SFP} || wanted.empty();
  // On a GPU activations are BF16 beside one file and F32 beside the other.
  require(error <= (!cpu ? 2e-2 : rounds ? 1e-3 : scales ? 2e-6 : 0), "the logits differ by ", error);
  if (!cpu) return;
  const gemma::Request request = gemma_test::greedy_request(prompts);
  require(gemma_test::generate(backend, model, request) == gemma_test::generate(backend, expected, request),
          "other tokens");
}

// As users call it.
void check_program(const std::string& program, const std::string& path) {
  const auto reference = gemma_test::read_references()[0];
  const std::vector<std::string> rest = {"--prompt", reference.prompt,          "--max-tokens",    "16",
                                         "--device", gemma_test::test_device(), "--memory-summary"};
  const auto run = [&](const std::string& model) {
    std::vector<std::string> arguments = {program, "--model", model};
    arguments.insert(arguments.end(), rest.begin(), rest.end());
    return gemma_test::run_command(arguments);
  };
  const auto result = run(path);
  require(result.code == 0, "exit code ", result.code, ": ", result.errors);
  const auto expected = run(kShipped);
  require(result.output == expected.output, "another text: ", result.output, "instead of: ", expected.output);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) {
    std::fprintf(stderr, "usage: test_sbs FOLDER GEMMA\n");
    return 2;
  }
  const std::string folder = arguments[1], program = arguments[2];
  std::vector<gemma_test::Test> tests;
  for (const File& file : kFiles) {
    for (const std::string layout : kLayouts) {
      tests.push_back({std::string(file.type) + ", " + layout, [=] { check_file(folder, file, layout); }});
    }
  }
  tests.push_back({"program", [=] { check_program(program, folder + "/bf16-last.sbs"); }});
  return gemma_test::run_tests(tests);
}
