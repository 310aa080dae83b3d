// Prints the greedy tokens of a model, as an engine on llama.cpp computes them.
//
//   tokens MODEL PROMPT TOKENS FLASH FOLDER [DEVICE]
//
// PROMPT tokens are made up, then TOKENS follow. FLASH: 1 for flash attention. FOLDER: where ggml's back ends lie, ""
// for a build that has its own. DEVICE: the device that every layer runs on; none: the CPU. The environment's
// GGML_BACKEND_PATH names the plug-in.
#include <cstdio>
#include <cstdlib>
#include <cstring>
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

}  // namespace

int main(int count, char** arguments) {
  if (count < 6) return fail("MODEL PROMPT TOKENS FLASH FOLDER [DEVICE]");
  const int prompt = std::atoi(arguments[2]), wanted = std::atoi(arguments[3]);
  llama_log_set(quiet, nullptr);
  if (arguments[5][0] != '\0') {
    ggml_backend_load_all_from_path(arguments[5]);
  } else {
    ggml_backend_load_all();
  }
  ggml_backend_dev_t devices[2] = {nullptr, nullptr};
  if (count > 6) {
    devices[0] = ggml_backend_dev_by_name(arguments[6]);
    if (devices[0] == nullptr) return fail("no such device");
  }
  llama_model_params model_params = llama_model_default_params();
  model_params.devices = devices;
  model_params.n_gpu_layers = count > 6 ? 99 : 0;
  llama_model* model = llama_model_load_from_file(arguments[1], model_params);
  if (model == nullptr) return fail("the model is not loaded");
  llama_context_params params = llama_context_default_params();
  params.n_ctx = 1024;
  params.n_batch = 1024;
  params.n_ubatch = 512;
  params.n_threads = params.n_threads_batch = 2;
  params.flash_attn_type = arguments[4][0] == '1' ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  params.offload_kqv = count > 6;
  llama_context* context = llama_init_from_model(model, params);
  if (context == nullptr) return fail("no context");
  const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));

  std::vector<llama_token> tokens;
  for (int i = 0; i < prompt; ++i) tokens.push_back((i * 37 + 11) % vocabulary);
  std::vector<float> margins;
  for (int i = 0; i < wanted; ++i) {
    if (llama_decode(context, llama_batch_get_one(tokens.data(), static_cast<int32_t>(tokens.size()))) != 0) {
      return fail("llama_decode");
    }
    const float* logits = llama_get_logits_ith(context, -1);
    int best = 0;
    for (int token = 1; token < vocabulary; ++token) best = logits[token] > logits[best] ? token : best;
    float second = -1e30f;
    for (int token = 0; token < vocabulary; ++token) {
      if (token != best && logits[token] > second) second = logits[token];
    }
    margins.push_back(logits[best] - second);
    std::printf("%d ", best);
    tokens = {best};
  }
  std::printf("\n");
  for (const float margin : margins) std::printf("%g ", margin);
  std::printf("\n");
  llama_free(context);
  llama_model_free(model);
  return 0;
}
