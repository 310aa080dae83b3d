// gemma: writes text with a Gemma model through libnvbackend. `gemma --help` lists the options.
//
// The parts, in the order in which a run passes them: options · config, safetensors, tokenizer (or gguf_model, or
// sbs_model, or random_model) · model (weights onto the device) · generate (prefill and decode) · forward (the calls of
// one pass).
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nvbackend.hpp>
#include <optional>
#include <string>
#include <vector>

#include "error.h"
#include "generate.h"
#include "gguf_model.h"
#include "npy.h"
#include "options.h"
#include "random_model.h"
#include "safetensors.h"
#include "sbs_model.h"
#include "speculate.h"
#include "tokenizer.h"

namespace gemma {
namespace {

constexpr int64_t kDefaultMaxTokens = 128;
constexpr double kMiB = 1024 * 1024;

// Everything that came from files or was made up. The tensors' owners stay as long as the model may read them.
struct Source {
  Config config;
  std::optional<Safetensors> files;
  std::optional<GgufModel> gguf;
  std::optional<SbsModel> sbs;
  std::optional<RandomModel> random;
  std::unique_ptr<Tokenizer> tokenizer;  // not with random weights

  const TensorMap& tensors() const {
    return files ? files->tensors() : gguf ? gguf->tensors : sbs ? sbs->tensors : random->tensors;
  }
};

// A model's folder or file, or the name of one of random weights.
Source open_source(const std::string& model, const std::string& random) {
  Source source;
  if (!random.empty()) {
    source.random = make_random_model(random);
    source.config = source.random->config;
  } else if (is_gguf(model)) {
    source.gguf = open_gguf(model);
    source.config = source.gguf->config;
    source.tokenizer = std::make_unique<Tokenizer>(source.gguf->tokenizer, model + ": its tokenizer");
  } else if (is_sbs(model)) {
    source.sbs.emplace(open_sbs(model));
    source.config = source.sbs->config;
    source.tokenizer = std::make_unique<Tokenizer>(source.sbs->tokenizer, model + ": its tokenizer");
  } else {
    source.config = read_config(model);
    source.tokenizer = std::make_unique<Tokenizer>(model + "/tokenizer.model");
    source.files = Safetensors::open_folder(model);
  }
  return source;
}

nvb::backend open_backend(const Options& options) {
  auto backend_options = nvb::make<nvb_backend_options>();
  backend_options.device = options.device.c_str();
  backend_options.threads = options.threads;
  backend_options.memory_limit = options.memory_limit;
  return nvb::backend(backend_options);
}

// The prompts as tokens, each `batch` times.
Request make_request(const Options& options, const Source& source) {
  Request request;
  std::vector<std::vector<int32_t>> prompts;
  if (source.tokenizer) {
    for (const std::string& text : options.prompts) {
      prompts.push_back(source.tokenizer->encode(text, source.config.bos, source.config.vocabulary));
    }
  } else {
    // Any tokens will do; a stride that is prime to the vocabulary visits many rows of the embedding.
    std::vector<int32_t> tokens(static_cast<size_t>(options.prompt_tokens));
    for (size_t i = 0; i < tokens.size(); ++i) {
      tokens[i] = static_cast<int32_t>((i * 7919 + 3) % static_cast<size_t>(source.config.vocabulary));
    }
    prompts.push_back(std::move(tokens));
  }
  for (const auto& prompt : prompts)
    request.prompts.insert(request.prompts.end(), static_cast<size_t>(options.batch), prompt);

  int64_t longest = 0;
  for (const auto& prompt : prompts) longest = std::max(longest, static_cast<int64_t>(prompt.size()));
  const int64_t room = std::max<int64_t>(0, source.config.max_positions - longest);
  request.max_tokens = options.max_tokens.value_or(std::min(kDefaultMaxTokens, room));
  request.stop_at_eos = options.random.empty();
  request.sampling = options.sampling;
  request.launching = options.launching;
  return request;
}

// Writes each token's text to standard output: at once if there is one sequence, else each sequence when it ends.
class Printer {
 public:
  Printer(const Tokenizer* tokenizer, size_t sequences) : tokenizer_(tokenizer), texts_(sequences) {
    for (size_t i = 0; tokenizer != nullptr && i < sequences; ++i) streams_.emplace_back(*tokenizer);
  }

  void add(size_t sequence, int32_t token, bool last) {
    std::string text = tokenizer_ != nullptr ? streams_[sequence].add(token) : std::to_string(token) + " ";
    if (last && tokenizer_ != nullptr) text += streams_[sequence].finish();
    if (texts_.size() == 1) {
      write(text);
      if (last) write("\n");
      return;
    }
    texts_[sequence] += text;
    if (last) write("=== " + std::to_string(sequence + 1) + " ===\n" + texts_[sequence] + "\n");
  }

 private:
  void write(const std::string& text) {
    if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
      fail("standard output cannot be written");
    }
  }

  const Tokenizer* tokenizer_;
  std::vector<TextStream> streams_;
  std::vector<std::string> texts_;
};

void report_device(const nvb::backend& backend) {
  const nvb_device_info info = backend.device_info();
  if (info.kind == NVB_DEVICE_CPU) {
    std::fprintf(stderr, "device: cpu, %s, %d threads\n", info.name, info.multiprocessors);
  } else {
    std::fprintf(stderr, "device: cuda:%d, %s\n", info.ordinal, info.name);
  }
}

void report_formats(const Model& model) {
  for (const auto& [format, use] : model.formats) {
    std::fprintf(stderr,
                 "  %-12s %10.1f MiB for %.1f M parameters, %.1f MiB of it scales, and %.1f MiB read in place; "
                 "relative error %.2g at most\n",
                 weight_format_name(format), static_cast<double>(use.bytes) / kMiB,
                 static_cast<double>(use.parameters) / 1e6, static_cast<double>(use.scale_bytes) / kMiB,
                 static_cast<double>(use.in_place_bytes) / kMiB, use.largest_error);
  }
}

void report(const nvb::backend& backend, const Model& model, const Timing& timing, bool memory) {
  const auto rate = [](int64_t tokens, double seconds) {
    return seconds > 0 ? static_cast<double>(tokens) / seconds : 0;
  };
  std::fprintf(stderr, "prefill: %lld tokens in %.3f s, %.1f tokens/s\n", static_cast<long long>(timing.prefill_tokens),
               timing.prefill_seconds, rate(timing.prefill_tokens, timing.prefill_seconds));
  std::fprintf(stderr, "decode: %lld tokens in %.3f s, %.1f tokens/s\n", static_cast<long long>(timing.decode_tokens),
               timing.decode_seconds, rate(timing.decode_tokens, timing.decode_seconds));
  if (timing.recording_seconds > 0) {
    std::fprintf(stderr, "graph: the first one took %.1f ms, which decode does not count\n",
                 1e3 * timing.recording_seconds);
  }
  const nvb::memory_manager manager(backend);
  if (memory) manager.query_device();  // so that the numbers of the device are those of now
  const nvb_memory_statistics statistics = manager.statistics();
  std::fprintf(stderr, "memory: %.1f MiB at peak, %.1f MiB of it the cache of keys and values\n",
               static_cast<double>(statistics.peak) / kMiB, static_cast<double>(timing.cache_bytes) / kMiB);
  if (!memory) return;
  report_formats(model);
  std::fprintf(stderr,
               "  weights      %10.1f MiB in %llu blocks\n"
               "  allocations  %10llu, frees %llu, refused %llu\n"
               "  held         %10.1f MiB, %.1f MiB at peak, %.1f%% in rounding and caches\n"
               "  device       %10.1f MiB, %.1f MiB free, %.1f MiB with others\n",
               static_cast<double>(statistics.allocated) / kMiB, static_cast<unsigned long long>(statistics.blocks),
               static_cast<unsigned long long>(statistics.allocations),
               static_cast<unsigned long long>(statistics.frees), static_cast<unsigned long long>(statistics.failures),
               static_cast<double>(statistics.reserved) / kMiB, static_cast<double>(statistics.peak_reserved) / kMiB,
               100 * statistics.fragmentation, static_cast<double>(statistics.device_total) / kMiB,
               static_cast<double>(statistics.device_free) / kMiB, static_cast<double>(statistics.unaccounted) / kMiB);
  for (uint32_t i = 0; i < NVB_RECOVERY_STEP_COUNT; ++i) {
    const nvb_memory_recovery_step_statistics step = manager.recovery_step_statistics(i);
    if (step.tried == 0) continue;
    std::fprintf(stderr, "  short of memory: %s tried %llu times, helped %llu\n", step.name,
                 static_cast<unsigned long long>(step.tried), static_cast<unsigned long long>(step.helped));
  }
}

// The program is of the release whose header it was compiled with; the library may be a newer one.
void print_version() {
  auto build = nvb::make<nvb_build_info>();
  nvb::check(nvb_get_build_info(&build));
  std::printf("gemma %s, libnvbackend %s, ABI %u, ", NVB_VERSION_STRING, nvb_version_string(), nvb_abi_version());
  if (build.cuda == 0) {
    std::printf("CPU only\n");
  } else {
    std::printf("CUDA %u.%u, kernels for %s\n", build.cuda_toolkit_version / 1000,
                build.cuda_toolkit_version % 1000 / 10, build.architectures);
  }
}

Model load(const nvb::backend& backend, const Source& source, const Options& options) {
  uint64_t bytes = 0;
  for (const auto& [name, tensor] : source.tensors()) bytes += tensor.bytes;
  Progress progress(bytes);
  Model model = load_model(backend, source.config, source.tensors(), options.weights, &progress);
  model.kv_dtypes = options.kv_dtypes;
  return model;
}

// Answers the request with a draft, and tells what it did.
Timing run_with_draft(const nvb::backend& backend, const Model& model, const Request& request, const Options& options,
                      const TokenSink& on_token) {
  std::optional<Source> source;
  Model smaller;
  std::unique_ptr<Draft> draft;
  double plain = 0;  // tokens a second
  if (options.draft_right) {
    // The text, written without it.
    std::vector<std::vector<int32_t>> texts(request.prompts.size());
    const Timing timing = generate(
        backend, model, request, [&texts](size_t sequence, int32_t token, bool) { texts[sequence].push_back(token); });
    plain = static_cast<double>(timing.decode_tokens) / timing.decode_seconds;
    draft = draft_by_text(std::move(texts), request.prompts, *options.draft_right, model.config.vocabulary);
  } else {
    const bool has_files = options.random.empty();
    source.emplace(open_source(has_files ? options.draft : "", has_files ? "" : options.draft));
    if (source->config.vocabulary != model.config.vocabulary) {
      fail("--draft has a vocabulary of ", source->config.vocabulary, ", the model one of ", model.config.vocabulary);
    }
    smaller = load(backend, *source, options);
    draft =
        draft_by_model(backend, smaller, request.prompts, request.launching, request.max_tokens, options.draft_tokens);
  }
  const Speculated found = speculate(backend, model, request, *draft, options.draft_tokens, on_token);
  const double tokens = static_cast<double>(found.timing.decode_tokens);
  std::fprintf(
      stderr,
      "draft: %lld of %lld proposals accepted (%.1f %%), %.2f tokens a pass and sequence, %.1f %% of the time its "
      "own\n",
      static_cast<long long>(found.accepted), static_cast<long long>(found.proposed),
      found.proposed > 0 ? 100.0 * static_cast<double>(found.accepted) / static_cast<double>(found.proposed) : 0,
      found.passes > 0 ? tokens / static_cast<double>(found.passes) / static_cast<double>(request.prompts.size()) : 0,
      found.timing.decode_seconds > 0 ? 100 * found.draft_seconds / found.timing.decode_seconds : 0);
  if (plain > 0) {
    std::fprintf(stderr, "draft: %.2f times the %.1f tokens/s without it\n",
                 tokens / found.timing.decode_seconds / plain, plain);
  }
  return found.timing;
}

void run(const Options& options) {
  const auto start = std::chrono::steady_clock::now();
  const Source source = open_source(options.model, options.random);
  const Request request = make_request(options, source);
  const nvb::backend backend = open_backend(options);
  report_device(backend);

  const Model model = load(backend, source, options);
  std::fprintf(stderr, "model: Gemma %d, %.1f M parameters, loaded in %.2f s\n", model.config.generation,
               static_cast<double>(model.parameters) / 1e6,
               std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());

  if (source.random) {
    // Libraries that open on first use and the first touch of memory are no part of the speed that is measured.
    Request warm_up = request;
    warm_up.max_tokens = std::min<int64_t>(request.max_tokens, 4);
    warm_up.launching.fp8.reset();
    generate(backend, model, warm_up, [](size_t, int32_t, bool) {});
  }
  std::optional<NpyWriter> writer;
  LogitsSink on_logits;
  if (!options.logits.empty()) {
    int64_t rows = 0;
    for (const auto& prompt : request.prompts) rows += static_cast<int64_t>(prompt.size());
    writer.emplace(options.logits, rows, model.config.vocabulary);
    on_logits = [&writer](const float* logits, int64_t count) { writer->write(logits, count); };
  }
  Printer printer(source.tokenizer.get(), request.prompts.size());
  const TokenSink print = [&printer](size_t sequence, int32_t token, bool last) { printer.add(sequence, token, last); };
  const bool drafts = !options.draft.empty() || options.draft_right;
  const Timing timing = drafts ? run_with_draft(backend, model, request, options, print)
                               : generate(backend, model, request, print, on_logits);
  if (writer) writer->close();
  report(backend, model, timing, options.memory);
}

}  // namespace
}  // namespace gemma

int main(int count, char** arguments) {
  gemma::Options options;
  try {
    options = gemma::parse_options(count, arguments);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gemma: %s\n", error.what());
    return 2;
  }
  if (options.help) {
    std::fputs(gemma::help_text().c_str(), stdout);
    return 0;
  }
  try {
    if (options.version) {
      gemma::print_version();
    } else {
      gemma::run(options);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gemma: %s\n", error.what());
    return 1;
  }
  return 0;
}
