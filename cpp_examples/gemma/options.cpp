#include "options.h"

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <nvbackend.hpp>

#include "error.h"
#include "random_model.h"
#include "speculate.h"

namespace gemma {
namespace {

constexpr int64_t kMaxTokens = 1 << 24;
constexpr int64_t kMaxBatch = 4096;
constexpr int64_t kMaxSteps = 64;

template <typename T>
T integer(const std::string& option, const std::string& text, T lowest, T highest) {
  T value{};
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failure != std::errc() || end != text.data() + text.size() || value < lowest || value > highest) {
    fail(option, " is \"", text, "\"; it must be an integer from ", lowest, " to ", highest);
  }
  return value;
}

float number(const std::string& option, const std::string& text, float lowest, float highest) {
  char* end = nullptr;
  const float value = std::strtof(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !(value >= lowest && value <= highest)) {
    fail(option, " is \"", text, "\"; it must be a number from ", lowest, " to ", highest);
  }
  return value;
}

// One dtype, or that of keys and that of values: "int8:q4_0".
KvDtypes kv_dtypes(const std::string& option, const std::string& text) {
  const auto dtype = [&](const std::string& name) -> uint32_t {
    if (name == "f32") return NVB_DTYPE_F32;
    if (name == "f16") return NVB_DTYPE_F16;
    if (name == "bf16") return NVB_DTYPE_BF16;
    // With scales of 1: what passes 448 saturates.
    if (name == "fp8") return NVB_DTYPE_FP8_E4M3;
    if (name == "int8") return NVB_DTYPE_KV_INT8;
    if (name == "q8_0") return NVB_DTYPE_KV_Q8_0;
    if (name == "q4_0") return NVB_DTYPE_KV_Q4_0;
    fail(option, " is \"", text,
         "\"; it must be f32, f16, bf16, fp8, int8, q8_0 or q4_0, or one of them for keys, a colon and one for values");
  };
  const size_t colon = text.find(':');
  const uint32_t key = dtype(text.substr(0, colon));
  return {key, colon == std::string::npos ? key : dtype(text.substr(colon + 1))};
}

// Bytes, which the library reads: a number, or one with a unit such as 8GB or 8GiB.
uint64_t size(const std::string& option, const std::string& text) {
  const uint32_t preset = NVB_PRESET_INFERENCE;
  nvb::configuration configuration(preset);
  char bytes[32];
  try {
    configuration.set("memory.limit", text.c_str());
    nvb::check(nvb_configuration_get(configuration.get(), "memory.limit", bytes, sizeof bytes, nullptr));
  } catch (const nvb::error&) {
    fail(option, " is \"", text, "\"; it must be a size such as 8000000000, 8GB or 8GiB");
  }
  return integer<uint64_t>(option, bytes, 0, std::numeric_limits<uint64_t>::max());
}

}  // namespace

std::string help_text() {
  return "Writes text with a Gemma 1, 2 or 3 model through libnvbackend.\n"
         "\n"
         "  gemma --model FOLDER|FILE.gguf|FILE.sbs --prompt TEXT [options]\n"
         "  gemma --random NAME [--prompt-tokens N] [options]\n"
         "\n"
         "What to run\n"
         "  --model FOLDER      config.json, tokenizer.model and model.safetensors, or several with an index\n"
         "  --model FILE.gguf   a Gemma 3 with its tokenizer, in F32, F16, BF16, Q4_0, Q4_K, Q6_K or Q8_0\n"
         "  --model FILE.sbs    a Gemma 1, 2 or 3 of gemma.cpp, in F32, BF16, SFP or I8\n"
         "  --prompt TEXT       give it several times to continue several prompts at once\n"
         "  --random NAME       random weights of a published shape, to measure speed; one of\n"
         "                      " +
         random_model_names() +
         "\n"
         "  --prompt-tokens N   random tokens before the new ones, with --random (128)\n"
         "  --batch N           run each prompt N times at once (1)\n"
         "Where\n"
         "  --device NAME       auto, cpu, cuda or cuda:N (auto: the best GPU, else the CPU)\n"
         "  --threads N         of the CPU (0: one for each core)\n"
         "  --memory-limit SIZE of the device's memory, such as 8GB (8 * 10^9 bytes) or 8GiB (8 * 2^30) (0: no limit)\n"
         "  --weights FORMAT    bf16, fp8, int8 (a scale for each row) or int4 (one for 32 numbers), quantised while\n"
         "                      the model loads (as the file has them)\n"
         "  --weights-table FORMAT\n"
         "                      the same for the token table, which is the head too (int8 with int4, else bf16: its\n"
         "                      rows are the model's input and score every token)\n"
         "  --weights-zero-points\n"
         "                      with int4: a zero point for 32 numbers too, 5 bits a number instead of 4.5 and nearer\n"
         "                      to the original\n"
         "  --kv-dtype TYPE     of the cache of keys and values: f32, f16, bf16, fp8, int8, q8_0 or q4_0, or "
         "KEYS:VALUES\n"
         "                      (what the model computes in; a model that computes in BF16 takes keys of no other "
         "float)\n"
         "How\n"
         "  --max-tokens N      new tokens for each prompt (128, or what the model's positions leave)\n"
         "  --temperature T     0 takes the most probable token (0)\n"
         "  --top-k K           draws among the K most probable tokens (0: all)\n"
         "  --top-p P           draws among the most probable tokens that sum up to P (1: all)\n"
         "  --seed N            of the random numbers (0)\n"
         "  --optimize LEVEL    0: the calls of each decode step; 1 to 3: recorded once as a graph, which is\n"
         "                      optimised at this level and replayed (2)\n"
         "  --steps N           decode steps that are queued together, whose tokens come together (0: 4 on a GPU that\n"
         "                      replays, else 1)\n"
         "  --fp8 BOUND         products of recorded decode steps, and of the prompts, in FP8, as many as change no "
         "output\n"
         "                      by more than this part of it (0: all); tells what that is worth\n"
         "  --draft MODEL       a smaller model of the same tokens, as --model (with --random as that), proposes "
         "tokens, which\n"
         "                      the model checks several at a time: the same text, sooner; tells how many were right\n"
         "  --draft-tokens N    proposals a pass, 1 to 15 (4)\n"
         "  --draft-right P     in place of a model a draft that knows the text, written once without it, and gives "
         "each\n"
         "                      token with probability P: what a draft so good would be worth\n"
         "What to write\n"
         "  --profile FILE      the times of the operations of a recorded launch, as a Chrome trace; a table of them "
         "goes\n"
         "                      to standard error\n"
         "  --logits FILE       the logits of all prompt tokens, float32 [tokens, vocabulary], as .npy\n"
         "  --memory-summary    the memory in use and the weights of each format, on standard error; also --memory\n"
         "  --version           the versions of this program and of the library\n"
         "  --help              this text\n"
         "\n"
         "Standard output receives the new text alone, as it comes; of several sequences each when it is complete,\n"
         "below a line \"=== N ===\". With --random there is no tokenizer, and it receives token numbers. Speed, "
         "memory\n"
         "and device go to standard error. Exit code: 0; 1 for a failure, 2 for a wrong command line.\n";
}

Options parse_options(int count, char** arguments) {
  Options options;
  bool prompt_tokens_given = false, draft_tokens_given = false, zero_points = false;
  std::string weights, table;
  for (int i = 1; i < count; ++i) {
    const std::string option = arguments[i];
    const auto value = [&]() -> std::string {
      if (i + 1 >= count) fail(option, " needs a value");
      return arguments[++i];
    };
    if (option == "--model") {
      options.model = value();
    } else if (option == "--random") {
      options.random = value();
    } else if (option == "--prompt") {
      options.prompts.push_back(value());
    } else if (option == "--device") {
      options.device = value();
    } else if (option == "--logits") {
      options.logits = value();
    } else if (option == "--batch") {
      options.batch = integer<int64_t>(option, value(), 1, kMaxBatch);
    } else if (option == "--prompt-tokens") {
      options.prompt_tokens = integer<int64_t>(option, value(), 1, kMaxTokens);
      prompt_tokens_given = true;
    } else if (option == "--max-tokens") {
      options.max_tokens = integer<int64_t>(option, value(), 0, kMaxTokens);
    } else if (option == "--threads") {
      options.threads = integer<uint32_t>(option, value(), 0, 1024);
    } else if (option == "--memory-limit") {
      options.memory_limit = size(option, value());
    } else if (option == "--seed") {
      options.sampling.seed = integer<uint64_t>(option, value(), 0, std::numeric_limits<uint64_t>::max());
    } else if (option == "--optimize") {
      options.launching.optimize = integer<uint32_t>(option, value(), 0, 3);
    } else if (option == "--steps") {
      options.launching.steps = integer<int64_t>(option, value(), 0, kMaxSteps);
    } else if (option == "--fp8") {
      options.launching.fp8 = number(option, value(), 0, 1);
    } else if (option == "--profile") {
      options.launching.profile = value();
    } else if (option == "--temperature") {
      options.sampling.temperature = number(option, value(), 0, 100);
    } else if (option == "--top-k") {
      options.sampling.top_k = integer<uint32_t>(option, value(), 0, 1 << 24);
    } else if (option == "--top-p") {
      options.sampling.top_p = number(option, value(), 0, 1);
    } else if (option == "--weights") {
      weights = value();
    } else if (option == "--weights-table") {
      table = value();
    } else if (option == "--weights-zero-points") {
      zero_points = true;
    } else if (option == "--kv-dtype") {
      options.kv_dtypes = kv_dtypes(option, value());
    } else if (option == "--draft") {
      options.draft = value();
    } else if (option == "--draft-tokens") {
      options.draft_tokens = integer<int64_t>(option, value(), 1, kMaxProposals);
      draft_tokens_given = true;
    } else if (option == "--draft-right") {
      options.draft_right = number(option, value(), 0, 1);
    } else if (option == "--memory-summary" || option == "--memory") {
      options.memory = true;
    } else if (option == "--help" || option == "-h") {
      options.help = true;
    } else if (option == "--version") {
      options.version = true;
    } else {
      fail("unknown option \"", option, "\"; --help lists them");
    }
  }
  if (options.help || options.version) return options;
  options.weights = parse_weight_formats(weights, table, zero_points);
  if (options.model.empty() == options.random.empty())
    fail("either --model FOLDER|FILE.gguf|FILE.sbs or --random NAME is needed");
  if (!options.random.empty() && !options.prompts.empty()) {
    fail("--random has no tokenizer: give --prompt-tokens instead of --prompt");
  }
  if (options.random.empty() && options.prompts.empty()) fail("--model needs a --prompt");
  if (options.launching.fp8 && options.launching.optimize == 0) fail("--fp8 needs recorded steps: --optimize 1 to 3");
  const bool drafts = !options.draft.empty() || options.draft_right;
  if (!options.draft.empty() && options.draft_right) fail("--draft excludes --draft-right");
  if (draft_tokens_given && !drafts) fail("--draft-tokens goes with --draft or --draft-right");
  if (drafts && options.sampling.temperature > 0) fail("a draft goes with --temperature 0");
  if (drafts && (options.launching.fp8 || !options.launching.profile.empty() || !options.logits.empty())) {
    fail("a draft excludes --fp8, --profile and --logits");
  }
  if (options.random.empty() && prompt_tokens_given) fail("--prompt-tokens goes with --random");
  return options;
}

}  // namespace gemma
