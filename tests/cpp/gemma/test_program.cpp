// The program gemma as its users meet it: what it writes where, its exit codes, and what it says about bad input.
//
//   test_program GEMMA     run in the repository's root
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <nvbackend.hpp>

#include "hostile_gguf.h"
#include "plain_gemma.h"
#include "support.h"

namespace {

using gemma_test::CommandResult;
using gemma_test::PlainGemma;
using gemma_test::require;
using gemma_test::TemporaryFolder;
using gemma_test::write_file;
using nlohmann::json;

std::string gemma_path;

CommandResult gemma(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), gemma_path);
  arguments.insert(arguments.end(), {"--device", gemma_test::test_device()});
  return gemma_test::run_command(arguments);
}

void require_failure(const CommandResult& result, int code, const std::string& text) {
  require(result.code == code, "exit code ", result.code, " instead of ", code, "; it said: ", result.errors);
  require(result.errors.find(text) != std::string::npos, "it does not say \"", text, "\" but: ", result.errors);
  require(result.output.empty(), "standard output has: ", result.output);
}

// What the program wrote ------------------------------------------------------------------------------------------

const std::vector<std::string> kShipped = {"--model", "models/tiny-gemma3", "--max-tokens", "64"};

CommandResult shipped(const std::vector<std::string>& arguments) {
  std::vector<std::string> all = kShipped;
  all.insert(all.end(), arguments.begin(), arguments.end());
  CommandResult result = gemma(all);
  require(result.code == 0, "exit code ", result.code, ": ", result.errors);
  return result;
}

void check_text() {
  for (const json& entry : json::parse(gemma_test::read_file("tests/data/reference.json"))) {
    const CommandResult result = shipped({"--prompt", entry["prompt"].get<std::string>()});
    require(result.output == entry["continuation"].get<std::string>() + "\n", "another text: ", result.output);
    for (const char* word : {"device: ", "prefill: ", "decode: ", "memory: ", "tokens/s"}) {
      require(result.errors.find(word) != std::string::npos, "no \"", word, "\" in: ", result.errors);
    }
  }
}

void check_optimize() {
  const json entry = json::parse(gemma_test::read_file("tests/data/reference.json"))[0];
  const std::string prompt = entry["prompt"], expected = entry["continuation"].get<std::string>() + "\n";
  for (const char* level : {"0", "1", "2", "3"}) {
    const CommandResult result = shipped({"--prompt", prompt, "--optimize", level, "--steps", "3"});
    require(result.output == expected, "another text at level ", level, ": ", result.output);
  }
}

// Errors stay within the bound; which texts change by that is told, and with a bound that nothing meets none does.
void check_fp8() {
  constexpr double kBound = 0.05;
  size_t changed = 0, texts = 0;
  for (const json& entry : json::parse(gemma_test::read_file("tests/data/reference.json"))) {
    const std::string prompt = entry["prompt"], expected = entry["continuation"].get<std::string>() + "\n";
    const CommandResult bounded = shipped({"--prompt", prompt, "--fp8", std::to_string(kBound)});
    for (const char* pass : {"fp8 prefill: ", "fp8 decode: "}) {
      const size_t at = bounded.errors.find(pass);
      require(at != std::string::npos, "no \"", pass, "\" in: ", bounded.errors);
      const std::string words = "worst output ";
      const double error = std::stod(bounded.errors.substr(bounded.errors.find(words, at) + words.size()));
      require(error <= kBound, pass, "an error of ", error);
    }
    require(bounded.errors.find("choose") != std::string::npos, "nothing of logits in: ", bounded.errors);
    changed += bounded.output != expected;
    ++texts;
    const CommandResult exact = shipped({"--prompt", prompt, "--fp8", "1e-12"});
    require(exact.output == expected, "another text without a product in FP8: ", exact.output);
    require(exact.errors.find("fp8 decode: 0 of ") != std::string::npos, "products in FP8: ", exact.errors);
  }
  std::printf("fp8: %zu of %zu texts change with a bound of %g\n", changed, texts, kBound);
}

void check_profile() {
  const TemporaryFolder folder;
  const std::string path = folder.path("profile.json");
  const CommandResult result = shipped({"--prompt", "Once", "--max-tokens", "4", "--profile", path});
  require(result.errors.find("us a launch") != std::string::npos, "no table in: ", result.errors);
  const json trace = json::parse(gemma_test::read_file(path));
  require(trace["traceEvents"].size() > 10 && trace["traceEvents"][0]["ph"] == "X", "no operations: ", trace.dump());
  const std::vector<std::string> once = {"--model", "models/tiny-gemma3", "--prompt", "Once"};
  // The text is there by then.
  const auto fails = [&](std::vector<std::string> more, const std::string& text) {
    more.insert(more.begin(), once.begin(), once.end());
    const CommandResult failed = gemma(more);
    require(failed.code == 1, "exit code ", failed.code, ": ", failed.errors);
    require(failed.errors.find(text) != std::string::npos, "it does not say \"", text, "\" but: ", failed.errors);
  };
  fails({"--max-tokens", "4", "--profile", path, "--optimize", "0"}, "--profile needs a launch of a recorded step");
  fails({"--max-tokens", "1", "--profile", path}, "--profile needs a launch of a recorded step");
  fails({"--max-tokens", "4", "--profile", "/nowhere/profile.json"}, "/nowhere/profile.json cannot be opened");
}

void check_batch() {
  const json references = json::parse(gemma_test::read_file("tests/data/reference.json"));
  std::vector<std::string> arguments = {"--batch", "2"};
  for (const json& entry : references) arguments.insert(arguments.end(), {"--prompt", entry["prompt"]});
  const CommandResult result = shipped(arguments);
  for (size_t i = 0; i < 2 * references.size(); ++i) {
    const std::string block =
        "=== " + std::to_string(i + 1) + " ===\n" + references[i / 2]["continuation"].get<std::string>() + "\n";
    require(result.output.find(block) != std::string::npos, "not there: ", block, "in: ", result.output);
  }
}

void check_logits_file() {
  const TemporaryFolder folder;
  const std::string path = folder.path("logits.npy");
  shipped({"--prompt", "Once", "--prompt", "One windy evening", "--logits", path, "--max-tokens", "0"});
  const std::string bytes = gemma_test::read_file(path);
  require(bytes.compare(0, 8, std::string("\x93NUMPY\x01\x00", 8)) == 0, "no NumPy file of format 1.0");
  const size_t header = 10 + static_cast<unsigned char>(bytes[8]) + 256 * static_cast<unsigned char>(bytes[9]);
  require(header % 64 == 0 && bytes[header - 1] == '\n', "a header of ", header, " bytes");
  const std::string text = bytes.substr(10, header - 10);
  const size_t shape = text.find("'shape': (");
  require(text.find("'descr': '<f4'") != std::string::npos &&
              text.find("'fortran_order': False") != std::string::npos && shape != std::string::npos,
          "the header is ", text);
  const size_t rows = std::stoul(text.substr(shape + std::strlen("'shape': (")));
  require(rows >= 4 && bytes.size() == header + rows * 1024 * 4, rows, " rows in ", bytes.size(), " bytes");
}

void check_random_model() {
  const CommandResult result =
      gemma({"--random", "gemma3-270m", "--prompt-tokens", "8", "--max-tokens", "2", "--memory-summary"});
  require(result.code == 0, "exit code ", result.code, ": ", result.errors);
  require(std::count(result.output.begin(), result.output.end(), ' ') == 2, "two tokens are: ", result.output);
  for (const char* word : {"  weights ", "  held ", "in rounding and caches", "with others"}) {
    require(result.errors.find(word) != std::string::npos, "no \"", word, "\" in the summary: ", result.errors);
  }
  require(result.errors.find("short of memory") == std::string::npos, "a recovery step was taken: ", result.errors);
}

void check_help() {
  const CommandResult result = gemma({"--help"});
  require(result.code == 0 && result.errors.empty(), "exit code ", result.code, ": ", result.errors);
  for (const char* option : {"--prompt",       "--model",       "--device",        "--max-tokens",
                             "--seed",         "--temperature", "--top-k",         "--top-p",
                             "--batch",        "--logits",      "--random",        "--memory-summary",
                             "--threads",      "--weights",     "--weights-table", "--weights-zero-points",
                             "--memory-limit", "--version",     "--optimize",      "--steps",
                             "--profile",      "--fp8"}) {
    require(result.output.find(option) != std::string::npos, option, " is not in --help");
  }
}

void check_version() {
  const CommandResult result = gemma_test::run_command({gemma_path, "--version"});
  require(result.code == 0 && result.errors.empty(), "exit code ", result.code, ": ", result.errors);
  const std::string versions = std::string("gemma ") + NVB_VERSION_STRING + ", libnvbackend " + nvb_version_string();
  require(result.output.compare(0, versions.size(), versions) == 0, "it writes: ", result.output);
}

// A limit that the model fits into, and one that it does not.
void check_memory_limit() {
  shipped({"--prompt", "x", "--memory-limit", "1.5GiB"});
  std::vector<std::string> arguments = kShipped;
  arguments.insert(arguments.end(), {"--prompt", "x", "--memory-limit", "1MB"});
  require_failure(gemma(arguments), 1, "1000000");
}

void check_usage() {
  const auto usage = [](const std::vector<std::string>& arguments, const std::string& text) {
    require_failure(gemma(arguments), 2, text);
  };
  usage({"--prompt", "x"}, "either --model FOLDER|FILE.gguf|FILE.sbs or --random NAME");
  usage({"--model", "models/tiny-gemma3"}, "--model needs a --prompt");
  usage({"--random", "gemma3-1b", "--prompt", "x"}, "--random has no tokenizer");
  usage({"--wrong"}, "unknown option \"--wrong\"");
  usage({"--max-tokens", "many"}, "--max-tokens is \"many\"; it must be an integer from 0 to 16777216");
  usage({"--max-tokens", "-1"}, "--max-tokens is \"-1\"");
  usage({"--temperature", "nan"}, "--temperature is \"nan\"; it must be a number from 0 to 100");
  usage({"--top-p", "1.5"}, "--top-p is \"1.5\"; it must be a number from 0 to 1");
  usage({"--seed", "18446744073709551616"}, "--seed is \"18446744073709551616\"");
  usage({"--weights", "int5"}, "--weights is \"int5\"; it must be bf16, fp8, int8 or int4");
  usage({"--weights", "int8", "--weights-zero-points"}, "--weights-zero-points goes with int4");
  usage({"--kv-dtype", "fp16"}, "--kv-dtype is \"fp16\"; it must be f32, f16, bf16, fp8, int8, q8_0 or q4_0");
  usage({"--memory-limit", "8G"}, "--memory-limit is \"8G\"; it must be a size such as 8000000000, 8GB or 8GiB");
  usage({"--optimize", "4"}, "--optimize is \"4\"; it must be an integer from 0 to 3");
  usage({"--fp8", "2"}, "--fp8 is \"2\"; it must be a number from 0 to 1");
  usage({"--model", "m", "--prompt", "x", "--fp8", "0", "--optimize", "0"}, "--fp8 needs recorded steps");
  usage({"--steps", "65"}, "--steps is \"65\"; it must be an integer from 0 to 64");
  usage({"--batch", "0"}, "--batch is \"0\"; it must be an integer from 1 to 4096");
  require_failure(gemma_test::run_command({gemma_path, "--prompt"}), 2, "--prompt needs a value");
}

void check_failures() {
  const auto failure = [](const std::vector<std::string>& arguments, const std::string& text) {
    require_failure(gemma(arguments), 1, text);
  };
  failure({"--model", "/nowhere", "--prompt", "x"}, "/nowhere/config.json: No such file or directory");
  failure({"--model", "/nowhere.gguf", "--prompt", "x"}, "/nowhere.gguf");
  failure({"--model", "/nowhere.sbs", "--prompt", "x"}, "/nowhere.sbs: No such file or directory");
  failure({"--random", "gemma9-1b"}, "--random is \"gemma9-1b\"; it must be one of gemma3-270m");
  failure({"--model", "models/tiny-gemma3", "--prompt", "x", "--max-tokens", "2048"}, "the model has 2048");
  std::string long_prompt;
  for (int i = 0; i < 2100; ++i) long_prompt += "a ";
  failure({"--model", "models/tiny-gemma3", "--prompt", long_prompt}, "the model has 2048 (max_position_embeddings)");
  failure({"--model", "models/tiny-gemma3", "--prompt", "x", "--logits", "/nowhere/logits.npy"},
          "/nowhere/logits.npy: No such file or directory");
  require_failure(
      gemma_test::run_command({gemma_path, "--model", "models/tiny-gemma3", "--prompt", "x", "--device", "tpu"}), 1,
      "tpu");
}

// Hostile model folders -------------------------------------------------------------------------------------------

PlainGemma small_model() {
  PlainGemma plain;
  plain.generation = 3;
  plain.width = 16, plain.feed_forward = 24, plain.layers = 1;
  plain.heads = 2, plain.kv_heads = 1, plain.head_dim = 8, plain.query_scalar = 8;
  plain.window = 4;
  plain.randomize("F32", 3);
  return plain;
}

// A folder with a model that works, to be damaged.
struct Model {
  Model() : plain(small_model()), config(json::parse(plain.config_json(true))) {
    weights = gemma_test::safetensors_bytes(plain.tensors, "F32");
    header = json::parse(weights.substr(8, header_size()));
    data = weights.substr(8 + header_size());
    tokenizer = gemma_test::read_file("models/tiny-gemma3/tokenizer.model");
  }

  size_t header_size() const {
    size_t size = 0;
    for (int i = 7; i >= 0; --i) size = size << 8 | static_cast<unsigned char>(weights[static_cast<size_t>(i)]);
    return size;
  }

  // With weights from `header` and `data`.
  void rebuild() { weights = gemma_test::safetensors_bytes(header.dump(), data); }

  CommandResult run() const {
    const TemporaryFolder folder;
    write_file(folder.path("config.json"), config_text.empty() ? config.dump() : config_text);
    write_file(folder.path("model.safetensors"), weights);
    write_file(folder.path("tokenizer.model"), tokenizer);
    return gemma({"--model", folder.path(), "--prompt", "abc", "--max-tokens", "2"});
  }

  PlainGemma plain;
  json config, header;
  std::string config_text, weights, data, tokenizer;
};

void check_undamaged() {
  const CommandResult result = Model().run();
  require(result.code == 0, "exit code ", result.code, ": ", result.errors);
}

using Damage = void (*)(Model&);
struct Hostile {
  const char* name;
  Damage damage;
  const char* text;  // part of what the program must say
};

// `depth` arrays, each in the one before it.
std::string nested(size_t depth) {
  return std::string(depth, '[') + std::string(depth, ']');
}

const char* const kQuery = "model.layers.0.self_attn.q_proj.weight";

const Hostile kHostileWeights[] = {
    {"empty", [](Model& m) { m.weights.clear(); }, "0 bytes; a safetensors file has at least 8"},
    {"cut in the data", [](Model& m) { m.weights.resize(m.weights.size() - 100); }, "do not lie in the file's"},
    {"cut in the header", [](Model& m) { m.weights.resize(50); }, "the file is cut short"},
    {"header of 2^63 bytes", [](Model& m) { m.weights.replace(0, 8, std::string(7, '\0') + "\x80"); },
     "a header of 9223372036854775808 bytes; the limit is 100000000"},
    {"header beyond the file", [](Model& m) { m.weights.replace(0, 8, std::string("\0\0\x10\0\0\0\0\0", 8)); },
     "a header of 1048576 bytes in a file of"},
    {"not JSON", [](Model& m) { m.weights = gemma_test::safetensors_bytes("{\"a\": ", m.data); }, "not valid JSON"},
    {"not UTF-8", [](Model& m) { m.weights = gemma_test::safetensors_bytes("{\"\xFF\": 1}", m.data); },
     "not valid JSON"},
    {"an array", [](Model& m) { m.weights = gemma_test::safetensors_bytes("[]", m.data); }, "a JSON object is needed"},
    {"a million brackets", [](Model& m) { m.weights = gemma_test::safetensors_bytes(std::string(1000000, '['), ""); },
     "JSON that nests more than 64 levels"},
    {"a field 300,000 levels deep",
     [](Model& m) { m.weights = gemma_test::safetensors_bytes("{\"a\":{\"dtype\":" + nested(300'000) + "}}", m.data); },
     "JSON that nests more than 64 levels"},
    {"a key twice",
     [](Model& m) {
       m.weights = gemma_test::safetensors_bytes(
           R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
           m.data);
     },
     "the key \"a\" is there twice"},
    {"no entry", [](Model& m) { m.header[kQuery] = 5, m.rebuild(); }, "an object with dtype, shape and data_offsets"},
    {"offsets beyond the file", [](Model& m) { m.header[kQuery]["data_offsets"] = {0, 1U << 31}, m.rebuild(); },
     "do not lie in the file's"},
    {"offsets reversed", [](Model& m) { m.header[kQuery]["data_offsets"] = {1024, 0}, m.rebuild(); },
     "do not lie in the file's"},
    {"a negative offset", [](Model& m) { m.header[kQuery]["data_offsets"] = {-1024, 0}, m.rebuild(); },
     "a data offset is -1024; it must be an integer from 0 on"},
    {"offsets that overlap",
     [](Model& m) {
       m.header[kQuery]["data_offsets"] = m.header["model.layers.0.self_attn.o_proj.weight"]["data_offsets"],
       m.rebuild();
     },
     "overlap at byte"},
    {"a size that does not fit its shape", [](Model& m) { m.header[kQuery]["shape"] = {16, 15}, m.rebuild(); },
     "span 1024 bytes; F32 [16,15] needs 960"},
    {"a negative extent", [](Model& m) { m.header[kQuery]["shape"] = {-16, -16}, m.rebuild(); }, "an extent is -16"},
    {"a fractional extent", [](Model& m) { m.header[kQuery]["shape"] = {16.5, 16}, m.rebuild(); }, "an extent is 16.5"},
    {"a shape that overflows", [](Model& m) { m.header[kQuery]["shape"] = {1ULL << 62, 1ULL << 62}, m.rebuild(); },
     "more bytes than 64 bits can count"},
    {"a shape that wraps to its size",
     [](Model& m) { m.header[kQuery]["shape"] = {(1ULL << 62) + 256, 1}, m.rebuild(); },
     "more bytes than 64 bits can count"},
    {"nine extents", [](Model& m) { m.header[kQuery]["shape"] = std::vector<int>(9, 1), m.rebuild(); }, "at most 8"},
    {"an unknown dtype", [](Model& m) { m.header[kQuery]["dtype"] = "F31", m.rebuild(); },
     "dtype \"F31\" is not known"},
    {"an integer dtype", [](Model& m) { m.header[kQuery]["dtype"] = "I32", m.rebuild(); },
     "is I32; F32, F16 and BF16 are supported"},
    {"mixed dtypes",
     [](Model& m) {
       m.header[kQuery]["dtype"] = "BF16";
       m.header[kQuery]["data_offsets"][1] = m.header[kQuery]["data_offsets"][0].get<int>() + 512;
       m.rebuild();
     },
     "have different dtypes"},
    {"another shape", [](Model& m) { m.header[kQuery]["shape"] = {8, 32}, m.rebuild(); },
     "is [8, 32]; config.json asks for [16, 16]"},
    {"another rank", [](Model& m) { m.header["model.norm.weight"]["shape"] = {4, 4}, m.rebuild(); },
     "is [4, 4]; config.json asks for [16]"},
    {"a missing tensor", [](Model& m) { m.header.erase(kQuery), m.rebuild(); },
     "no tensor \"model.layers.0.self_attn.q_proj.weight\", [16, 16]"},
    {"no embedding", [](Model& m) { m.header.erase("model.embed_tokens.weight"), m.rebuild(); },
     "no tensor \"model.embed_tokens.weight\""},
};

const Hostile kHostileConfigs[] = {
    {"not JSON", [](Model& m) { m.config_text = "{"; }, "not valid JSON"},
    {"a field 300,000 levels deep", [](Model& m) { m.config_text = "{\"attention_bias\": " + nested(300'000) + "}"; },
     "config.json: JSON that nests more than 64 levels"},
    {"a field 65 levels deep", [](Model& m) { m.config_text = "{\"attention_bias\": " + nested(64) + "}"; },
     "config.json: JSON that nests more than 64 levels"},
    {"a field 64 levels deep",
     [](Model& m) {
       m.config["attention_bias"] = 7;
       m.config_text = m.config.dump();
       m.config_text.replace(m.config_text.find(":7") + 1, 1, nested(63));
     },
     "attention_bias is [[["},
    {"too large", [](Model& m) { m.config_text = std::string(2000000, ' '); }, "2000000 bytes; the limit is 1000000"},
    {"another model", [](Model& m) { m.config["model_type"] = "llama"; }, "model_type is \"llama\""},
    {"no type", [](Model& m) { m.config.erase("model_type"); }, "model_type is \"\""},
    {"a text as width", [](Model& m) { m.config["hidden_size"] = "16"; },
     "hidden_size is \"16\"; it must be an integer"},
    {"a negative width", [](Model& m) { m.config["hidden_size"] = -16; },
     "hidden_size is -16; it must be an integer from 1 to 65536"},
    {"a huge width", [](Model& m) { m.config["hidden_size"] = 18446744073709551615ULL; },
     "hidden_size is 18446744073709551615"},
    {"2^32 + 1 layers", [](Model& m) { m.config["num_hidden_layers"] = 4294967297; },
     "num_hidden_layers is 4294967297"},
    {"no heads", [](Model& m) { m.config["num_attention_heads"] = 0; }, "num_attention_heads is 0"},
    {"heads that do not divide", [](Model& m) { m.config["num_key_value_heads"] = 3; },
     "num_attention_heads is 2; it must be a multiple of num_key_value_heads = 3"},
    {"an odd head", [](Model& m) { m.config["head_dim"] = 7; }, "head_dim is 7; it must be even"},
    {"a huge head", [](Model& m) { m.config["head_dim"] = 1024; }, "head_dim is 1024"},
    {"a zero epsilon", [](Model& m) { m.config["rms_norm_eps"] = 0; }, "rms_norm_eps is 0"},
    {"another vocabulary", [](Model& m) { m.config["vocab_size"] = 2048; }, "config.json asks for [2048, 16]"},
    {"a small vocabulary", [](Model& m) { m.config["vocab_size"] = 2; }, "bos_token_id is 2"},
    {"another activation", [](Model& m) { m.config["hidden_activation"] = "relu"; }, "the activation \"relu\""},
    {"another rotation", [](Model& m) { m.config["rope_parameters"]["full_attention"]["rope_type"] = "yarn"; },
     "rope_type \"yarn\" is not supported"},
    {"other layers", [](Model& m) { m.config["layer_types"] = {"sliding_attention", "full_attention"}; },
     "layer_types must be an array of num_hidden_layers = 1 names"},
    {"an unknown layer", [](Model& m) { m.config["layer_types"] = {"chunked_attention"}; }, "\"chunked_attention\""},
    {"no window", [](Model& m) { m.config["sliding_window"] = -1; }, "sliding_window is -1"},
    {"both directions", [](Model& m) { m.config["use_bidirectional_attention"] = true; }, "only causal models"},
    {"an eos beyond", [](Model& m) { m.config["eos_token_id"] = {1, 5000}; }, "eos_token_id is 5000"},
    {"few positions", [](Model& m) { m.config["max_position_embeddings"] = 4; }, "the model has 4"},
    {"biases that are missing", [](Model& m) { m.config["attention_bias"] = true; }, "q_proj.bias"},
};

const Hostile kHostileTokenizers[] = {
    {"empty", [](Model& m) { m.tokenizer.clear(); }, "tokenizer.model"},
    {"garbage", [](Model& m) { m.tokenizer = std::string(5000, '\xA5'); }, "not a SentencePiece model"},
    {"cut short", [](Model& m) { m.tokenizer.resize(m.tokenizer.size() / 2); }, "tokenizer.model"},
    {"larger than the vocabulary",
     [](Model& m) {
       m.config["vocab_size"] = 100;
       m.plain.tensors["model.embed_tokens.weight"] = gemma_test::random_tensor({100, 16}, 0, 1, "F32", 5);
       m.weights = gemma_test::safetensors_bytes(m.plain.tensors, "F32");
     },
     "the model's vocabulary has 100"},
};

// A pipe in the place of each file that the program opens: it must not wait for the pipe's other end.
void check_pipes() {
  const auto pipe_at = [](const std::string& path) {
    std::remove(path.c_str());
    require(mkfifo(path.c_str(), 0600) == 0, path, ": ", std::strerror(errno));
  };
  const Model model;
  for (const char* name : {"config.json", "generation_config.json", "tokenizer.model", "model.safetensors",
                           "model.safetensors.index.json", "part.safetensors"}) {
    const TemporaryFolder folder;
    write_file(folder.path("config.json"), model.config.dump());
    write_file(folder.path("tokenizer.model"), model.tokenizer);
    const bool sharded = name == std::string("part.safetensors");
    if (sharded) {
      write_file(folder.path("model.safetensors.index.json"), R"({"weight_map": {"x": "part.safetensors"}})");
    } else if (name != std::string("model.safetensors.index.json")) {
      write_file(folder.path("model.safetensors"), model.weights);
    }
    pipe_at(folder.path(name));
    require_failure(gemma({"--model", folder.path(), "--prompt", "abc"}), 1,
                    folder.path(name) + ": not a regular file");
  }
  const TemporaryFolder folder;
  pipe_at(folder.path("pipe"));
  require_failure(gemma({"--model", folder.path("pipe"), "--prompt", "abc"}), 1, "Not a directory");
  pipe_at(folder.path("pipe.gguf"));
  require_failure(gemma({"--model", folder.path("pipe.gguf"), "--prompt", "abc"}), 1, "it is a pipe");
  pipe_at(folder.path("pipe.sbs"));
  require_failure(gemma({"--model", folder.path("pipe.sbs"), "--prompt", "abc"}), 1,
                  folder.path("pipe.sbs") + ": not a regular file");
  require_failure(gemma({"--model", "models/tiny-gemma3", "--prompt", "x", "--logits", folder.path("pipe")}), 1,
                  folder.path("pipe") + ": not a regular file");
  require_failure(gemma({"--model", "models/tiny-gemma3", "--prompt", "x", "--logits", "/dev/null"}), 1,
                  "/dev/null: not a regular file");
}

// A hundred thousand tensors, one after the other: what is done for one must not look at all the others. With a visit
// to each other tensor this takes more than the minute that a command has.
void check_many_tensors() {
  constexpr size_t kCount = 100'000;
  std::string header = "{", map = "{";
  for (size_t i = 0; i < kCount; ++i) {
    const std::string name = (i == 0 ? "\"t" : ",\"t") + std::to_string(i) + "\":";
    header += name + R"({"dtype":"F32","shape":[1],"data_offsets":[)" + std::to_string(4 * i) + "," +
              std::to_string(4 * i + 4) + "]}";
    map += name + "\"part.safetensors\"";
  }
  Model model;
  model.weights = gemma_test::safetensors_bytes(header + "}", std::string(4 * kCount, '\0'));
  require_failure(model.run(), 1, "no tensor \"model.embed_tokens.weight\"");

  const TemporaryFolder folder;
  write_file(folder.path("config.json"), model.config.dump());
  write_file(folder.path("tokenizer.model"), model.tokenizer);
  write_file(folder.path("model.safetensors.index.json"), "{\"weight_map\":" + map + "}}");
  write_file(folder.path("part.safetensors"), model.weights);
  require_failure(gemma({"--model", folder.path(), "--prompt", "abc"}), 1, "no tensor \"model.embed_tokens.weight\"");
}

// GGUF files --------------------------------------------------------------------------------------------------------

CommandResult run_gguf(const std::string& bytes) {
  const TemporaryFolder folder;
  write_file(folder.path("model.gguf"), bytes);
  return gemma({"--model", folder.path("model.gguf"), "--prompt", "abc", "--max-tokens", "2"});
}

void check_gguf() {
  const json reference = json::parse(gemma_test::read_file("tests/data/reference.json"))[0];
  const CommandResult result = gemma({"--model", "tests/data/tiny-gemma3-q8_0.gguf", "--prompt", reference["prompt"],
                                      "--max-tokens", "8", "--memory-summary"});
  require(result.code == 0, "exit code ", result.code, ": ", result.errors);
  const std::string expected = reference["continuation"];
  require(result.output.size() > 4 &&
              expected.compare(0, result.output.size() - 1, result.output, 0, result.output.size() - 1) == 0,
          "another text: ", result.output);
  require(result.errors.find("\n  int8 ") != std::string::npos, "no weights of int8 in: ", result.errors);
}

void check_weights() {
  const auto summary = [](const std::vector<std::string>& arguments) {
    std::vector<std::string> all = {"--prompt", "abc", "--memory-summary"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    return shipped(all).errors;
  };
  const auto has = [](const std::string& text, const char* format) {
    return text.find(std::string("\n  ") + format + " ") != std::string::npos;
  };
  for (const char* format : {"bf16", "fp8", "int8", "int4"}) {
    const std::string text = summary({"--weights", format});
    const char* table = format == std::string("int4") ? "int8" : "bf16";
    require(has(text, format) && has(text, table), "no ", format, " and ", table, " in: ", text);
  }
  const std::string text = summary({"--weights", "int4", "--weights-table", "fp8"});
  require(has(text, "int4") && has(text, "fp8") && !has(text, "int8"), "another table in: ", text);
}

// Several files with an index -------------------------------------------------------------------------------------

CommandResult run_sharded(const std::function<void(json&, std::vector<std::string>&)>& damage) {
  const Model model;
  gemma_test::TestTensors parts[2];
  json map;
  size_t count = 0;
  for (const auto& [name, tensor] : model.plain.tensors) {
    map[name] = "part-" + std::to_string(count % 2) + ".safetensors";
    parts[count++ % 2][name] = tensor;
  }
  std::vector<std::string> files = {gemma_test::safetensors_bytes(parts[0], "F32"),
                                    gemma_test::safetensors_bytes(parts[1], "F32")};
  json index = {{"weight_map", map}};
  damage(index, files);
  const TemporaryFolder folder;
  write_file(folder.path("config.json"), model.config.dump());
  write_file(folder.path("tokenizer.model"), model.tokenizer);
  write_file(folder.path("model.safetensors.index.json"), index.dump());
  for (size_t i = 0; i < files.size(); ++i) {
    if (!files[i].empty()) write_file(folder.path("part-" + std::to_string(i) + ".safetensors"), files[i]);
  }
  return gemma({"--model", folder.path(), "--prompt", "abc", "--max-tokens", "2"});
}

void check_sharded() {
  const CommandResult good = run_sharded([](json&, std::vector<std::string>&) {});
  require(good.code == 0, "exit code ", good.code, ": ", good.errors);
  require_failure(run_sharded([](json&, std::vector<std::string>& files) { files[1].clear(); }), 1,
                  "part-1.safetensors: No such file");
  require_failure(run_sharded([](json& index, std::vector<std::string>&) {
                    index["weight_map"]["model.norm.weight"] = "../../etc/passwd";
                  }),
                  1, "a file name without a folder is needed");
  require_failure(run_sharded([](json& index, std::vector<std::string>&) { index["weight_map"]["x"] = 7; }), 1,
                  "a file name without a folder is needed");
  require_failure(
      run_sharded([](json& index, std::vector<std::string>&) { index["weight_map"]["x"] = "part-0.safetensors"; }), 1,
      "tensor \"x\" is not in \"part-0.safetensors\"");
  require_failure(run_sharded([](json&, std::vector<std::string>& files) { files[1] = files[0]; }), 1,
                  "is in another file too");
  require_failure(run_sharded([](json& index, std::vector<std::string>&) { index.erase("weight_map"); }), 1,
                  "no object weight_map");
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) {
    std::fprintf(stderr, "usage: test_program GEMMA\n");
    return 2;
  }
  gemma_path = arguments[1];
  std::vector<gemma_test::Test> tests = {{"text", check_text},
                                         {"optimize", check_optimize},
                                         {"fp8", check_fp8},
                                         {"profile", check_profile},
                                         {"batch", check_batch},
                                         {"logits file", check_logits_file},
                                         {"random model", check_random_model},
                                         {"GGUF file", check_gguf},
                                         {"weights", check_weights},
                                         {"help", check_help},
                                         {"version", check_version},
                                         {"memory limit", check_memory_limit},
                                         {"wrong command lines", check_usage},
                                         {"failures", check_failures},
                                         {"undamaged model", check_undamaged},
                                         {"several files", check_sharded},
                                         {"pipes", check_pipes},
                                         {"many tensors", check_many_tensors}};
  const auto add = [&tests](const char* part, const Hostile& hostile) {
    tests.push_back({std::string(part) + hostile.name, [&hostile] {
                       Model model;
                       hostile.damage(model);
                       require_failure(model.run(), 1, hostile.text);
                     }});
  };
  for (const Hostile& hostile : kHostileWeights) add("weights: ", hostile);
  for (const Hostile& hostile : kHostileConfigs) add("config: ", hostile);
  for (const Hostile& hostile : kHostileTokenizers) add("tokenizer: ", hostile);
  for (gemma_test::HostileGguf& hostile : gemma_test::hostile_ggufs()) {
    tests.push_back({"GGUF: " + hostile.name,
                     [hostile = std::move(hostile)] { require_failure(run_gguf(hostile.bytes), 1, hostile.text); }});
  }
  return gemma_test::run_tests(tests);
}
