// Prints the greedy tokens of a model, as an engine on llama.cpp computes them.
//
//   tokens MODEL PROMPT TOKENS FLASH FOLDER [--device NAME] [--f32-cache] [--follow FILE] [--logits FILE]
//
// PROMPT tokens are made up, then TOKENS follow. FLASH: 1 for flash attention. FOLDER: where ggml's back ends lie, ""
// for a build that has its own. The device is the one that every layer runs on; without it the CPU. Keys and values are
// F16 unless they shall be F32. With a file of tokens to follow, each step goes on with the file's token instead of its
// own. The logits of every step go to a file as 32-bit floats. The environment's GGML_BACKEND_PATH names the plug-in.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "llama.h"

namespace {

int fail(const char* text) {
  std::fprintf(stderr, "tokens: %s\n", text);
  return 1;
}

void quiet(ggml_log_level level, const char* text, void*) {
  if (level >= GGML_LOG_LEVEL_WARN || std::getenv("TOKENS_VERBOSE") != nullptr) std::fputs(text, stderr);
}

struct Options {
  const char* device = nullptr;
  const char* follow = nullptr;
  const char* logits = nullptr;
  bool f32_cache = false;
};

bool read_options(int count, char** arguments, Options& options) {
  for (int i = 6; i < count; ++i) {
    const std::string name = arguments[i];
    const bool has_value = i + 1 < count;
    if (name == "--f32-cache") {
      options.f32_cache = true;
    } else if (name == "--device" && has_value) {
      options.device = arguments[++i];
    } else if (name == "--follow" && has_value) {
      options.follow = arguments[++i];
    } else if (name == "--logits" && has_value) {
      options.logits = arguments[++i];
    } else {
      return false;
    }
  }
  return true;
}

}  // namespace

int main(int count, char** arguments) {
  Options options;
  if (count < 6 || !read_options(count, arguments, options)) return fail("MODEL PROMPT TOKENS FLASH FOLDER [OPTIONS]");
  const int prompt = std::atoi(arguments[2]), wanted = std::atoi(arguments[3]);
  llama_log_set(quiet, nullptr);
  if (arguments[5][0] != '\0') {
    ggml_backend_load_all_from_path(arguments[5]);
  } else {
    ggml_backend_load_all();
  }
  ggml_backend_dev_t devices[2] = {nullptr, nullptr};
  if (options.device != nullptr) {
    devices[0] = ggml_backend_dev_by_name(options.device);
    if (devices[0] == nullptr) return fail("no such device");
  }
  llama_model_params model_params = llama_model_default_params();
  model_params.devices = devices;
  model_params.n_gpu_layers = options.device != nullptr ? 99 : 0;
  llama_model* model = llama_model_load_from_file(arguments[1], model_params);
  if (model == nullptr) return fail("the model is not loaded");
  llama_context_params params = llama_context_default_params();
  params.n_ctx = 1024;
  params.n_batch = 1024;
  params.n_ubatch = 512;
  params.n_threads = params.n_threads_batch = 1;
  params.flash_attn_type = arguments[4][0] == '1' ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  params.offload_kqv = options.device != nullptr;
  if (options.f32_cache) params.type_k = params.type_v = GGML_TYPE_F32;
  llama_context* context = llama_init_from_model(model, params);
  if (context == nullptr) return fail("no context");
  const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));

  std::vector<llama_token> followed;
  if (options.follow != nullptr) {
    std::ifstream file(options.follow);
    for (llama_token token; file >> token;) followed.push_back(token);
    if (static_cast<int>(followed.size()) < wanted) return fail("the file has too few tokens to follow");
  }
  std::FILE* logits_file = options.logits != nullptr ? std::fopen(options.logits, "wb") : nullptr;
  if (options.logits != nullptr && logits_file == nullptr) return fail("the file of logits cannot be written");

  std::vector<llama_token> tokens;
  for (int i = 0; i < prompt; ++i) tokens.push_back((i * 37 + 11) % vocabulary);
  std::vector<float> margins;
  for (int i = 0; i < wanted; ++i) {
    if (llama_decode(context, llama_batch_get_one(tokens.data(), static_cast<int32_t>(tokens.size()))) != 0) {
      return fail("llama_decode");
    }
    const float* logits = llama_get_logits_ith(context, -1);
    if (logits_file != nullptr) std::fwrite(logits, sizeof(float), static_cast<size_t>(vocabulary), logits_file);
    int best = 0;
    for (int token = 1; token < vocabulary; ++token) best = logits[token] > logits[best] ? token : best;
    float second = -1e30f;
    for (int token = 0; token < vocabulary; ++token) {
      if (token != best && logits[token] > second) second = logits[token];
    }
    margins.push_back(logits[best] - second);
    std::printf("%d ", best);
    tokens = {followed.empty() ? best : followed[static_cast<size_t>(i)]};
  }
  std::printf("\n");
  for (const float margin : margins) std::printf("%g ", margin);
  std::printf("\n");
  if (logits_file != nullptr && std::fclose(logits_file) != 0) return fail("the file of logits cannot be written");
  llama_free(context);
  llama_model_free(model);
  return 0;
}
