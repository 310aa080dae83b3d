// Where the time of a whole decode step goes: the kernels of a step of Gemma 3, all layers with weights of their own,
// as a replayed graph, and the same graph with one part left out or done in another way.
//
// decode_step.cu compares divisions in a chain of layers without rope and with a stand-in for attention. A part's time
// here is what the step takes longer with it, so what its start hides under its neighbours is not charged to it.
//
// With `sweep` the division of one quantised product after the other is varied within the whole step, of which a
// variant is compared with the product in f32 before it is timed.
//
// Arguments: `sweep`, or nothing; names of configurations such as 4B-int8; without one all of them.
#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <string>

#include "argmax/argmax.h"
#include "attention/attention_decode.cuh"
#include "attention/attention_decode_rope.h"
#include "common/constant_reads.h"
#include "decode_step_layer.h"
#include "embedding/embedding.h"
#include "rope/rope.h"

// attention_decode_short is asked for by name here, and takes what attention_decode_mma does.
bool nvb::supports_decode_mma(const nvb_attention_decode_params&, const nvb_launch&, nvb_attention_decode_shape&) {
  return true;
}

namespace {

using namespace decode_step;

enum class Attention { kNone, kStandIn, kSeparate, kRopeAlone, kAttentionAlone, kFused };
struct Parts {
  Attention attention = Attention::kSeparate;
  bool norms = true, head = true, argmax = true, layers = true;
  int sets = 0;  // of weights that the layers take in turn; 0: as many as layers
  int steps = 4;
  uint32_t constant = NVB_CONSTANT_WEIGHTS | NVB_CONSTANT_POSITIONS;
  const DecodeChoice* choices[kProducts] = {};  // null: by the table
};

constexpr int kVocabulary = 262144, kLength = 136, kPlanned = 512, kCapacity = 1024;

class Step : public Layer {
 public:
  Step(const Model& model, int layers, int window, Format format, const nvb_launch& launch)
      : Layer(model, format, launch, layers), layers_(layers), window_(window) {
    head_int8_ = format == Format::kInt4;
    const size_t elements = static_cast<size_t>(kVocabulary) * model.width;
    head_ = allocate<char>(elements * (head_int8_ ? 1 : 2));
    head_scales_ = allocate<float>(kVocabulary);
    logits_ = allocate<float>(kVocabulary), tokens_ = allocate<int32_t>(64), position_ = allocate<int32_t>(16);
    if (head_int8_) fill(reinterpret_cast<int8_t*>(head_), elements, 127.0f, 77);
    if (!head_int8_) fill(reinterpret_cast<bf16*>(head_), elements, 0.05f, 77);
    fill(head_scales_, kVocabulary, 0.0005f, 78);
    const size_t row = static_cast<size_t>(model.kv_heads) * model.head_dim;
    cache_elements_ = row * kCapacity;
    cache_ = allocate<bf16>(2 * cache_elements_ * layers);
    fill(cache_, 2 * cache_elements_ * layers, 1.0f, 79);
    query_norm_ = allocate<bf16>(2 * model.head_dim), fill(query_norm_, 2 * model.head_dim, 0.1f, 80);
    const int32_t position = kLength - 1, zeros[64] = {};
    MUST(cudaMemcpy(position_, &position, 4, cudaMemcpyHostToDevice));
    MUST(cudaMemcpy(position_ + 8, zeros, 4, cudaMemcpyHostToDevice));
    MUST(cudaMemcpy(tokens_, zeros, sizeof zeros, cudaMemcpyHostToDevice));
    MUST(cudaMalloc(&workspace_, 1 << 20));
    MUST(cudaDeviceSynchronize());
  }
  ~Step() {
    for (void* memory : {static_cast<void*>(head_), static_cast<void*>(head_scales_), static_cast<void*>(logits_),
                         static_cast<void*>(tokens_), static_cast<void*>(position_), static_cast<void*>(cache_),
                         static_cast<void*>(query_norm_), workspace_}) {
      cudaFree(memory);
    }
  }

  double step_bytes() const {
    return layers_ * bytes() + static_cast<double>(kVocabulary) * model_.width * (head_int8_ ? 1 : 2);
  }

  void queue_step(int step, const Parts& parts) {
    nvb_embedding_params e = {};
    e.tokens = tokens_ + step, e.table = head_, e.output = residual_, e.rows = e.batch_tokens = e.token_stride = 1,
    e.vocabulary = kVocabulary / 2;
    e.columns = e.table_stride = e.output_stride = model_.width;
    e.table_dtype = NVB_BF16, e.output_dtype = NVB_F32, e.scale = 1;
    MUST(nvb_cuda_embedding(&e, &launch_));
    nvb_rms_norm_params n = {};
    n.input = residual_, n.output = hidden_, n.rows = 1;
    n.columns = n.input_stride = n.output_stride = model_.width;
    n.input_dtype = NVB_F32, n.weight_dtype = n.output_dtype = NVB_BF16;
    n.weight = norms_, n.epsilon = 1e-6f, n.weight_offset = 1;
    MUST(nvb_cuda_rms_norm(&n, &launch_));
    for (int i = 0; parts.layers && i < layers_; ++i) queue_layer(i, parts);
    if (parts.head) queue_head();
    if (!parts.argmax) return;
    nvb_argmax_params a = {};
    a.logits = logits_, a.tokens = tokens_ + step + 1, a.workspace = workspace_, a.rows = 1;
    a.columns = a.logits_stride = kVocabulary, a.logits_dtype = NVB_F32;
    MUST(nvb_cuda_argmax(&a, &launch_));
  }

  // The output of attention, of one layer by itself.
  std::vector<bf16> attended(const Parts& parts) {
    fill(qkv_, rows_[0], 1.0f, 5);
    queue_attention(0, parts);
    MUST(cudaStreamSynchronize(launch_.stream));
    std::vector<bf16> output(columns_[1]);
    MUST(cudaMemcpy(output.data(), attended_, output.size() * sizeof(bf16), cudaMemcpyDeviceToHost));
    return output;
  }

 private:
  void queue_layer(int i, const Parts& parts) {
    const int set = parts.sets > 0 ? i % parts.sets : i;
    queue_product(set, 0, parts.choices[0], hidden_, qkv_);
    queue_attention(i, parts);
    queue_product(set, 1, parts.choices[1], attended_, hidden_);
    if (parts.norms) queue_norms(0);
    queue_product(set, 2, parts.choices[2], hidden_, gated_);
    queue_product(set, 3, parts.choices[3], gated_, hidden_);
    if (parts.norms) queue_norms(2);
  }

  void queue_attention(int i, const Parts& parts) {
    const bool rotates = parts.attention == Attention::kSeparate || parts.attention == Attention::kRopeAlone;
    if (parts.attention == Attention::kNone) return;
    if (parts.attention == Attention::kStandIn) {
      MUST(cudaFuncSetAttribute(attend, cudaFuncAttributeMaxDynamicSharedMemorySize, kAttentionBytes));
      MUST(nvb::launch_overlapped(attend, dim3(kAttentionBlocks), dim3(128), kAttentionBytes, &launch_, qkv_, attended_,
                                  columns_[1]));
      return;
    }
    bf16* const keys = cache_ + 2 * cache_elements_ * i;
    bf16* const values = keys + cache_elements_;
    const int64_t d = model_.head_dim, width = rows_[0], head_stride = int64_t{kCapacity} * d;
    nvb_rope_params r = {};
    r.query = r.query_output = qkv_, r.key = qkv_ + model_.heads * d,
    r.value = qkv_ + (model_.heads + model_.kv_heads) * d;
    r.query_norm = query_norm_, r.key_norm = query_norm_ + d, r.key_cache = keys, r.value_cache = values;
    r.positions = position_, r.slots = position_ + 8;
    r.query_token_stride = r.key_token_stride = r.value_token_stride = r.query_output_token_stride = width;
    r.query_head_stride = r.key_head_stride = r.value_head_stride = r.query_output_head_stride = d;
    r.cache_slot_stride = static_cast<int64_t>(cache_elements_), r.cache_head_stride = head_stride;
    r.cache_token_stride = d;
    r.query_dtype = r.key_dtype = r.value_dtype = r.query_output_dtype = r.cache_dtype = NVB_BF16;
    r.query_norm_dtype = r.key_norm_dtype = NVB_BF16;
    r.tokens = 1, r.query_heads = model_.heads, r.kv_heads = model_.kv_heads, r.head_dim = r.rotary_dim = d;
    r.slot_count = 1, r.capacity = kCapacity, r.base = 1e4f, r.position_scale = r.query_scale = 1;
    r.epsilon = 1e-6f, r.weight_offset = 1;
    if (window_ > 0)
      r.placement.ring_tokens = kCapacity, r.placement.block_stride = r.placement.value_block_stride = 256 * d;
    if (rotates) MUST(nvb_cuda_rope(&r, &launch_));
    if (parts.attention == Attention::kRopeAlone) return;

    nvb_attention_decode_rope rope = {};
    rope.key = r.key, rope.value = r.value, rope.query_norm = r.query_norm, rope.key_norm = r.key_norm;
    rope.key_token_stride = rope.value_token_stride = width, rope.key_head_stride = rope.value_head_stride = d;
    rope.key_dtype = rope.value_dtype = rope.query_norm_dtype = rope.key_norm_dtype = NVB_BF16;
    rope.rotary_dim = d, rope.base = r.base, rope.position_scale = rope.query_scale = 1;
    rope.epsilon = r.epsilon, rope.weight_offset = 1;
    nvb::DecodeArguments a = {};
    nvb_attention_decode_params& p = a.params;
    p.query = qkv_, p.key = keys, p.value = values, p.positions = position_, p.slots = position_ + 8;
    p.output = attended_, p.query_token_stride = width, p.query_head_stride = p.output_head_stride = d;
    p.key_sequence_stride = p.value_sequence_stride = r.cache_slot_stride;
    p.key_head_stride = p.value_head_stride = head_stride, p.key_token_stride = p.value_token_stride = d;
    p.output_token_stride = columns_[1], p.query_dtype = p.kv_dtype = p.output_dtype = NVB_BF16;
    p.sequences = p.rows_per_sequence = p.slot_count = 1, p.capacity = kCapacity, p.max_kv_length = kPlanned;
    p.query_heads = model_.heads, p.kv_heads = model_.kv_heads, p.head_dim = p.value_dim = d;
    p.window = window_, p.scale = 1 / std::sqrt(static_cast<float>(d)), p.placement = r.placement;
    const bool fused = parts.attention == Attention::kFused;
    if (fused) p.rope = &rope;
    nvb_attention_decode_shape shape = {};
    if (!(fused ? nvb::supports_decode_rope(p, launch_, shape) : nvb::supports_decode_short(p, launch_, shape))) {
      std::printf("no kernel\n"), std::exit(1);
    }
    const int items = p.query_heads / p.kv_heads;
    p.chunks = (items + shape.heads_per_block - 1) / shape.heads_per_block;
    p.heads_per_chunk = (items + p.chunks - 1) / p.chunks;
    p.splits = std::min((kPlanned + shape.keys - 1) / shape.keys, shape.cluster);
    MUST(fused ? nvb::launch_decode_rope(a, launch_) : nvb::launch_decode_short(a, launch_));
  }

  void queue_head() {
    cudaError_t result = cudaErrorInvalidValue;
    const auto describe = [&](auto& p) {
      p.input = hidden_, p.output = logits_, p.weight = head_, p.m = 1, p.n = kVocabulary, p.k = model_.width;
      p.input_stride = p.weight_stride = p.k, p.output_stride = p.n;
      p.input_dtype = NVB_BF16, p.output_dtype = NVB_F32;
    };
    if (!head_int8_) {
      nvb_linear_params p = {};
      describe(p);
      p.weight_dtype = NVB_BF16;
      result = launch_gemv(p, launch_);
    } else {
      nvb_linear_quantized_params p = {};
      describe(p);
      p.scales = head_scales_, p.encoding = NVB_INT8, p.scale_kind = NVB_SCALES_ROWS;
      launch_int8(p, launch_, nullptr, result);
    }
    MUST(result);
  }

  int layers_, window_;
  bool head_int8_;
  size_t cache_elements_;
  char* head_;
  float *head_scales_, *logits_;
  int32_t *tokens_, *position_;
  bf16 *cache_, *query_norm_;
  void* workspace_;
};

// A captured launch of parts.steps steps.
class Replay {
 public:
  Replay(Step& step, const Parts& parts, cudaStream_t stream) : steps_(parts.steps), stream_(stream) {
    nvb_cuda_set_constant_reads(parts.constant);
    cudaGraph_t graph = nullptr;
    MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < steps_; ++i) step.queue_step(i, parts);
    MUST(cudaStreamEndCapture(stream, &graph));
    MUST(cudaGraphInstantiate(&replay_, graph, 0));
    cudaGraphDestroy(graph);
    MUST(cudaEventCreate(&begin_));
    MUST(cudaEventCreate(&end_));
    MUST(cudaGraphLaunch(replay_, stream));
    MUST(cudaStreamSynchronize(stream));
  }
  Replay(const Replay&) = delete;
  ~Replay() { cudaEventDestroy(begin_), cudaEventDestroy(end_), cudaGraphExecDestroy(replay_); }

  // µs a step over launches that follow one another.
  double time() {
    const int launches = std::max(2, 24 / steps_);
    MUST(cudaEventRecord(begin_, stream_));
    for (int i = 0; i < launches; ++i) MUST(cudaGraphLaunch(replay_, stream_));
    MUST(cudaEventRecord(end_, stream_));
    MUST(cudaEventSynchronize(end_));
    float time = 0;
    MUST(cudaEventElapsedTime(&time, begin_, end_));
    return 1e3 * time / launches / steps_;
  }

 private:
  int steps_;
  cudaStream_t stream_;
  cudaGraphExec_t replay_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

struct Configuration {
  const char* name;
  Model model;
  int layers, window;
  Format format;
};
const Configuration kConfigurations[] = {
    {"270M-bf16", {"270M", 640, 4, 1, 256, 2048}, 18, 512, Format::kBf16},
    {"1B-bf16", {"1B", 1152, 4, 1, 256, 6912}, 26, 512, Format::kBf16},
    {"1B-int8", {"1B", 1152, 4, 1, 256, 6912}, 26, 512, Format::kInt8},
    {"1B-int4", {"1B", 1152, 4, 1, 256, 6912}, 26, 512, Format::kInt4},
    {"4B-bf16", {"4B", 2560, 8, 4, 256, 10240}, 34, 1024, Format::kBf16},
    {"4B-int8", {"4B", 2560, 8, 4, 256, 10240}, 34, 1024, Format::kInt8},
    {"4B-int4", {"4B", 2560, 8, 4, 256, 10240}, 34, 1024, Format::kInt4},
    {"12B-int4", {"12B", 3840, 16, 8, 256, 15360}, 48, 1024, Format::kInt4},
};

struct Variant {
  std::string name;
  Parts parts;
};

std::vector<Variant> variants() {
  std::vector<Variant> all = {{"whole", {}}};
  const auto add = [&](const char* name, const std::function<void(Parts&)>& change) {
    Parts parts;
    change(parts);
    all.push_back({name, parts});
  };
  add("one step a launch", [](Parts& p) { p.steps = 1; });
  add("nothing constant", [](Parts& p) { p.constant = 0; });
  add("no argmax", [](Parts& p) { p.argmax = false; });
  add("no head, argmax", [](Parts& p) { p.argmax = p.head = false; });
  add("no layers", [](Parts& p) { p.layers = false; });
  add("no norms", [](Parts& p) { p.norms = false; });
  add("rope alone", [](Parts& p) { p.attention = Attention::kRopeAlone; });
  add("attention alone", [](Parts& p) { p.attention = Attention::kAttentionAlone; });
  add("stand-in for both", [](Parts& p) { p.attention = Attention::kStandIn; });
  add("neither", [](Parts& p) { p.attention = Attention::kNone; });
  add("fused, keys to L2", [](Parts& p) { p.attention = Attention::kFused; });
  add("fused, keys early", [](Parts& p) { p.attention = Attention::kFused, p.constant |= NVB_CONSTANT_OLDER_KEYS; });
  add("four sets of weights", [](Parts& p) { p.sets = 4; });
  return all;
}

int measure(const Configuration& configuration, const nvb_launch& launch) {
  Step step(configuration.model, configuration.layers, configuration.window, configuration.format, launch);
  int wrong = 0;
  for (int i = 0; i < kProducts; ++i) {
    if (!(step.error(i, nullptr) < 5e-3)) ++wrong, std::printf("WRONG: product %s\n", kProductNames[i]);
  }
  Parts parts;
  nvb_cuda_set_constant_reads(parts.constant);
  const std::vector<bf16> expected = step.attended(parts);
  for (const Variant& variant : variants()) {
    if (variant.parts.attention != Attention::kSeparate && variant.parts.attention != Attention::kFused) continue;
    nvb_cuda_set_constant_reads(variant.parts.constant);
    const std::vector<bf16> output = step.attended(variant.parts);
    double difference = 0, norm = 0;
    for (size_t i = 0; i < output.size(); ++i) {
      difference += std::pow(static_cast<float>(output[i]) - static_cast<float>(expected[i]), 2);
      norm += std::pow(static_cast<float>(expected[i]), 2);
    }
    if (!(difference <= 1e-4 * norm))
      ++wrong, std::printf("WRONG: %s: %g of %g\n", variant.name.c_str(), difference, norm);
  }
  std::vector<std::unique_ptr<Replay>> replays;
  for (const Variant& variant : variants()) {
    replays.push_back(std::make_unique<Replay>(step, variant.parts, launch.stream));
  }
  constexpr int kRounds = 7;
  std::vector<std::vector<double>> times(replays.size());
  for (int round = 0; round < kRounds; ++round) {
    for (size_t i = 0; i < replays.size(); ++i) times[i].push_back(replays[i]->time());
  }
  double whole = 0;
  for (size_t i = 0; i < replays.size(); ++i) {
    std::sort(times[i].begin(), times[i].end());
    const double time = times[i][kRounds / 2];
    if (i == 0) {
      whole = time;
      std::printf("%s: %.0f MB, %.1f µs at 4.5 TB/s; whole %.1f µs, %.0f tokens/s\n", configuration.name,
                  step.step_bytes() / 1e6, step.step_bytes() / 4.5e6, whole, 1e6 / whole);
    } else {
      std::printf("  %-32s %8.1f µs, %7.1f less, %6.2f a layer\n", variants()[i].name.c_str(), time, whole - time,
                  (whole - time) / configuration.layers);
    }
  }
  return wrong;
}

struct NamedChoice {
  std::string name;
  DecodeChoice choice;
};

std::vector<NamedChoice> divisions(Format format, int product) {
  using nvb::quantized::DecodeKernel;
  constexpr int kAny = nvb::quantized::kAny;
  std::vector<NamedChoice> all;
  const auto add = [&](const char* name, DecodeKernel kernel, int shift, int warps, int warps_k, int blocks,
                       int groups) {
    char text[96];
    std::snprintf(text, sizeof text, "%s shift %d warps %d/%d blocks %d groups %d", name, shift, warps, warps_k, blocks,
                  groups);
    all.push_back({text, {8, 0, kAny, 0, kAny, kernel, shift, warps, warps_k, blocks, groups}});
  };
  const bool is_small = product < kGated;
  add("registers", DecodeKernel::kRegisters, 0, 0, 0, 0, 1);
  if (format == Format::kInt4) add("registers4", DecodeKernel::kRegisters4, 0, 0, 0, 0, 1);
  const std::pair<int, int> warps[] = {{8, 4}, {12, 4}, {14, 2}, {16, 2}, {16, 4}};
  for (int shift = 0; shift <= (is_small ? 2 : 3); ++shift) {
    for (int blocks = 1; blocks <= 2; ++blocks) {
      for (const auto& [count, warps_k] : warps) add("stream", DecodeKernel::kStream, shift, count, warps_k, blocks, 1);
      if (format != Format::kInt4) continue;
      for (int groups = 1; groups <= 2; ++groups) {
        add("stationary", DecodeKernel::kStationary, shift, 0, 0, blocks, groups);
      }
    }
  }
  return all;
}

// Varies one product after the other, and keeps of each what was clearly faster.
int sweep(const Configuration& configuration, const nvb_launch& launch) {
  constexpr double kClearly = 0.1;  // µs a layer
  Step step(configuration.model, configuration.layers, configuration.window, configuration.format, launch);
  int wrong = 0;
  const auto time = [&](const Parts& parts) {
    Replay replay(step, parts, launch.stream);
    double times[3];
    for (double& value : times) value = replay.time();
    std::sort(times, times + 3);
    return times[1] / configuration.layers;
  };
  Parts best;
  best.steps = 1;
  const Parts table = best;
  std::printf("%s: %.2f µs a layer, head and all, by the table\n", configuration.name, time(table));
  std::vector<std::vector<NamedChoice>> all;
  for (int product = 0; product < kProducts; ++product) all.push_back(divisions(configuration.format, product));
  for (int product : {1, 0, 3, 2}) {
    const double now = time(best);
    std::vector<std::pair<double, const NamedChoice*>> times;
    for (const NamedChoice& variant : all[product]) {
      const double error = step.error(product, &variant.choice);
      if (std::isnan(error)) continue;  // it does not fit
      if (error >= 5e-3) {
        ++wrong, std::printf("WRONG: %s %s: %g\n", kProductNames[product], variant.name.c_str(), error);
        continue;
      }
      Parts parts = best;
      parts.choices[product] = &variant.choice;
      times.push_back({time(parts), &variant});
    }
    std::sort(times.begin(), times.end());
    std::printf("  %s, %lld blocks of rows, %lld chunks: %.2f now", kProductNames[product],
                static_cast<long long>(step.rows(product) / 16), static_cast<long long>(step.columns(product) / 64),
                now);
    for (size_t i = 0; i < std::min<size_t>(4, times.size()); ++i) {
      std::printf(" | %.2f %s", times[i].first, times[i].second->name.c_str());
    }
    std::printf("\n");
    if (!times.empty() && times[0].first < now - kClearly) best.choices[product] = &times[0].second->choice;
  }
  for (int i = 0; i < 3; ++i) {
    const double first = time(table), second = time(best);
    std::printf("  by the table %.2f, by the best %.2f, by the table %.2f\n", first, second, time(table));
  }
  return wrong;
}

}  // namespace

int main(int count, char** arguments) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  nvb_launch launch = {};
  MUST(cudaStreamCreateWithFlags(&launch.stream, cudaStreamNonBlocking));
  launch = gpu::device_launch(launch.stream);
  int wrong = 0;
  const bool sweeps = count > 1 && std::strcmp(arguments[1], "sweep") == 0;
  const int first = sweeps ? 2 : 1;
  for (const Configuration& configuration : kConfigurations) {
    bool asked = count == first;
    for (int i = first; i < count; ++i) asked |= std::strcmp(arguments[i], configuration.name) == 0;
    if (!asked || (sweeps && configuration.format == Format::kBf16)) continue;
    wrong += sweeps ? sweep(configuration, launch) : measure(configuration, launch);
  }
  return wrong == 0 ? 0 : 1;
}
