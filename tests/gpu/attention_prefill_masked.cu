// The attention of few rows under an additive mask on a device: its results beside the formula in f64, and its time. It
// needs nvcc to build and a driver to run, nothing else of this project (attention_prefill_masked.sh builds it):
//
//   tests/gpu/attention_prefill_masked.sh                builds, checks and measures
//   target/gpu/attention_prefill_masked check|short|bench   short: a few of the checks, for compute-sanitizer
//
// Times are of a launch in a graph of 50 that is replayed; keys and values of all launches are the same, in L2 if they
// fit.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "attention/sm80/attention_prefill_masked.cuh"

#define UNIT(TYPE, DIM) cudaError_t masked_##TYPE##_##DIM(const nvb::PrefillArguments&, const nvb_launch&)
UNIT(f16, 64);
UNIT(f16, 128);
UNIT(f16, 256);
UNIT(bf16, 64);
UNIT(bf16, 128);
UNIT(bf16, 256);

namespace {

void must(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(2);
}

struct Case {
  int sequences, rows, heads, kv_heads, dim, keys;
  bool bf16;
  bool has_mask, mask_by_head;
  float soft_cap;
  float hidden;  // share of the keys that a row does not see
  bool sinks;
};

cudaError_t launch(const Case& c, const nvb::PrefillArguments& a, const nvb_launch& l) {
  if (c.bf16) return c.dim == 64 ? masked_bf16_64(a, l) : c.dim == 128 ? masked_bf16_128(a, l) : masked_bf16_256(a, l);
  return c.dim == 64 ? masked_f16_64(a, l) : c.dim == 128 ? masked_f16_128(a, l) : masked_f16_256(a, l);
}

uint16_t rounded(bool bf16, float value, float* back) {
  uint16_t bits;
  if (bf16) {
    uint32_t word;
    std::memcpy(&word, &value, 4);
    bits = static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
    word = static_cast<uint32_t>(bits) << 16;
    std::memcpy(back, &word, 4);
  } else {
    const __half half = __float2half(value);
    std::memcpy(&bits, &half, 2);
    *back = __half2float(half);
  }
  return bits;
}

struct Problem {
  std::vector<float> query, key, value, mask, sinks;
  std::vector<uint16_t> key_bits, value_bits, mask_bits;
  nvb::PrefillArguments arguments;
  std::vector<void*> memory;
  float *output, *lse;
  size_t outputs, lses;
  ~Problem() {
    for (void* one : memory) cudaFree(one);
  }
  template <typename T>
  T* copy(const std::vector<T>& from) {
    void* to;
    must(cudaMalloc(&to, std::max<size_t>(from.size() * sizeof(T), 256)), "memory");
    must(cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), "a copy");
    memory.push_back(to);
    return static_cast<T*>(to);
  }
};

// Queries [sequence, row, head, dim], keys and values [sequence, key, kv head, dim], masks [sequence, head or 1, row,
// keys + 7].
void make(Problem& p, const Case& c, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const size_t kv = static_cast<size_t>(c.sequences) * c.keys * c.kv_heads * c.dim;
  const size_t width = static_cast<size_t>(c.keys) + 7, mask_heads = c.mask_by_head ? c.heads : 1;
  p.query.resize(static_cast<size_t>(c.sequences) * c.rows * c.heads * c.dim);
  for (float& x : p.query) x = normal(random);
  p.key.resize(kv), p.value.resize(kv), p.key_bits.resize(kv), p.value_bits.resize(kv);
  // Of many, random numbers take longer than what they are for, so some repeat.
  constexpr size_t kRandom = 1000003;
  for (size_t i = 0; i < kv; ++i) {
    if (i >= kRandom) {
      p.key_bits[i] = p.key_bits[i - kRandom], p.key[i] = p.key[i - kRandom];
      p.value_bits[i] = p.value_bits[i - kRandom], p.value[i] = p.value[i - kRandom];
      continue;
    }
    p.key_bits[i] = rounded(c.bf16, normal(random), &p.key[i]);
    p.value_bits[i] = rounded(c.bf16, normal(random) + 0.5f, &p.value[i]);
  }
  p.mask.resize(c.sequences * mask_heads * c.rows * width), p.mask_bits.resize(p.mask.size());
  // Whole stretches are hidden, single keys too, and in some cases all of a row.
  for (size_t line = 0; line < p.mask.size() / width; ++line) {
    const size_t first = static_cast<size_t>(random() % (c.keys + 1));
    for (size_t k = 0; k < width; ++k) {
      const bool stretch = c.hidden > 0 && k >= first && k < first + static_cast<size_t>(c.hidden * c.keys);
      const bool single = c.hidden > 0 && random() % 5 == 0;
      const float bias = random() % 3 == 0 ? normal(random) : 0.0f;
      p.mask_bits[line * width + k] = rounded(false, stretch || single ? -INFINITY : bias, &p.mask[line * width + k]);
    }
  }
  // What no row sees may be anything.
  if (c.has_mask && c.sequences == 1) {
    for (int k = 0; k < c.keys; ++k) {
      bool seen = false;
      for (size_t line = 0; line < p.mask.size() / width; ++line) seen = seen || p.mask[line * width + k] != -INFINITY;
      if (seen) continue;
      for (int i = 0; i < c.kv_heads * c.dim; ++i) {
        const size_t at = static_cast<size_t>(k) * c.kv_heads * c.dim + i;
        p.key_bits[at] = p.value_bits[at] = 0x7fff;
      }
    }
  }
  p.sinks.resize(c.heads);
  for (float& sink : p.sinks) sink = normal(random);

  p.arguments = nvb::PrefillArguments{};
  nvb_attention_prefill_params& a = p.arguments.params;
  a = nvb_attention_prefill_params{};
  a.query = p.copy(p.query), a.key = p.copy(p.key_bits), a.value = p.copy(p.value_bits);
  a.mask = c.has_mask ? p.copy(p.mask_bits) : nullptr;
  a.sinks = c.sinks ? p.copy(p.sinks) : nullptr;
  p.outputs = p.query.size(), p.lses = p.outputs / c.dim;
  p.output = p.copy(std::vector<float>(p.outputs, NAN)), p.lse = p.copy(std::vector<float>(p.lses, NAN));
  a.output = p.output, a.lse = p.lse;
  a.query_head_stride = a.output_head_stride = c.dim;
  a.query_token_stride = a.output_token_stride = int64_t{c.heads} * c.dim;
  a.query_sequence_stride = a.output_sequence_stride = a.query_token_stride * c.rows;
  a.key_head_stride = a.value_head_stride = c.dim;
  a.key_token_stride = a.value_token_stride = int64_t{c.kv_heads} * c.dim;
  a.key_sequence_stride = a.value_sequence_stride = a.key_token_stride * c.keys;
  a.lse_sequence_stride = c.rows;
  a.mask_row_stride = static_cast<int64_t>(width);
  a.mask_head_stride = c.mask_by_head ? a.mask_row_stride * c.rows : 0;
  a.mask_sequence_stride = a.mask_row_stride * c.rows * static_cast<int64_t>(mask_heads);
  a.query_dtype = a.output_dtype = NVB_F32, a.kv_dtype = c.bf16 ? NVB_BF16 : NVB_F16, a.mask_dtype = NVB_F16;
  a.sequences = c.sequences, a.query_heads = c.heads, a.kv_heads = c.kv_heads, a.head_dim = a.value_dim = c.dim;
  a.scale = 1.0f / std::sqrt(static_cast<float>(c.dim)), a.soft_cap = c.soft_cap, a.heads_per_group = c.heads;
  for (int s = 0; s < c.sequences; ++s) a.sequence[s] = {s, c.rows, s, c.keys, 0};
}

nvb_launch launcher(cudaStream_t stream) {
  cudaDeviceProp device;
  must(cudaGetDeviceProperties(&device, 0), "the device");
  nvb_launch l = {};
  l.stream = stream, l.capability = device.major * 10 + device.minor, l.multiprocessors = device.multiProcessorCount;
  const char* const lower = std::getenv("NVB_FORCE_ARCH");
  if (lower != nullptr) l.capability = std::atoi(lower);
  l.l2_bytes = device.l2CacheSize, l.shared_bytes_per_block = static_cast<int>(device.sharedMemPerBlockOptin);
  return l;
}

// With the scratch that the launch makes use of; false: of none.
bool set_scratch(Problem& p, const nvb_launch& l) {
  nvb_attention_prefill_params& a = p.arguments.params;
  const nvb::masked::Scratch scratch = nvb::masked::scratch_of(a, l);
  if (scratch.counters == 0) return false;
  a.partial = p.copy(std::vector<float>(scratch.partial_bytes / sizeof(float), NAN));
  a.counters = p.copy(std::vector<uint32_t>(scratch.counters, 0));
  return true;
}

// The largest distance of an output, over the root mean square of its row's values.
bool check(const Case& c, unsigned seed, bool has_scratch) {
  Problem p;
  make(p, c, seed);
  const nvb_launch l = launcher(nullptr);
  if (has_scratch && !set_scratch(p, l)) return true;
  std::vector<float> got(p.outputs), again(p.outputs), lse(p.lses);
  for (std::vector<float>* to : {&got, &again}) {
    must(launch(c, p.arguments, l), "a launch");
    must(cudaDeviceSynchronize(), "the kernel");
    must(cudaMemcpy(to->data(), p.output, p.outputs * 4, cudaMemcpyDeviceToHost), "a copy");
  }
  must(cudaMemcpy(lse.data(), p.lse, p.lses * 4, cudaMemcpyDeviceToHost), "a copy");
  double worst = 0, worst_lse = 0;
  const int group = c.heads / c.kv_heads;
  const size_t width = static_cast<size_t>(c.keys) + 7;
  std::vector<double> score(c.keys), sum(c.dim);
  for (int s = 0; s < c.sequences; ++s) {
    for (int row = 0; row < c.rows; ++row) {
      for (int head = 0; head < c.heads; ++head) {
        const size_t line = (static_cast<size_t>(s) * c.rows + row) * c.heads + head;
        const size_t mask_line = c.mask_by_head ? (static_cast<size_t>(s) * c.heads + head) * c.rows + row
                                                : static_cast<size_t>(s) * c.rows + row;
        double most = -INFINITY;
        for (int k = 0; k < c.keys; ++k) {
          const size_t at = ((static_cast<size_t>(s) * c.keys + k) * c.kv_heads + head / group) * c.dim;
          double dot = 0;
          for (int i = 0; i < c.dim; ++i) dot += double(p.query[line * c.dim + i]) * p.key[at + i];
          dot *= p.arguments.params.scale;
          if (c.soft_cap > 0) dot = c.soft_cap * std::tanh(dot / c.soft_cap);
          if (c.has_mask) dot += p.mask[mask_line * width + k];
          score[k] = dot, most = std::max(most, dot);
        }
        if (c.sinks) most = std::max(most, double(p.sinks[head]));
        double total = c.sinks ? std::exp(p.sinks[head] - most) : 0;
        std::fill(sum.begin(), sum.end(), 0.0);
        for (int k = 0; k < c.keys && most != -INFINITY; ++k) {
          if (score[k] == -INFINITY) continue;
          const double weight = std::exp(score[k] - most);
          const size_t at = ((static_cast<size_t>(s) * c.keys + k) * c.kv_heads + head / group) * c.dim;
          total += weight;
          for (int i = 0; i < c.dim; ++i) sum[i] += weight * p.value[at + i];
        }
        const double expected = total > 0 ? most + std::log(total) : -INFINITY;
        const double off = expected == lse[line] ? 0 : std::fabs(expected - lse[line]);
        worst_lse = std::isfinite(off) ? std::max(worst_lse, off) : INFINITY;
        for (int i = 0; i < c.dim; ++i) {
          const double wanted = total > 0 ? sum[i] / total : 0, away = std::fabs(wanted - got[line * c.dim + i]);
          worst = std::isfinite(away) ? std::max(worst, away) : INFINITY;
        }
      }
    }
  }
  const bool same = std::memcmp(got.data(), again.data(), p.outputs * 4) == 0;
  // f32 sums of values near 1, exponentials with an error of 2^-22, scores of up to some 10; queries of 22 bits, with
  // BF16 of 16.
  const double bound = c.bf16 ? 2e-4 : 2e-5;
  const bool good = worst < bound && worst_lse < bound && same;
  if (!good) {
    std::printf(
        "FAILED %d sequences, %d rows, heads %d/%d of %d, %d keys%s%s, cap %g, hidden %g%s%s: off by %g, lse %g%s\n",
        c.sequences, c.rows, c.heads, c.kv_heads, c.dim, c.keys, c.bf16 ? ", bf16" : "",
        !c.has_mask      ? ", no mask"
        : c.mask_by_head ? ", mask by head"
                         : "",
        c.soft_cap, c.hidden, c.sinks ? ", sinks" : "", has_scratch ? ", scratch" : "", worst, worst_lse,
        same ? "" : ", not the same twice");
  }
  return good;
}

double microseconds(const Case& c) {
  Problem p;
  make(p, c, 1);
  cudaStream_t stream;
  must(cudaStreamCreate(&stream), "a stream");
  const nvb_launch l = launcher(stream);
  set_scratch(p, l);
  constexpr int kLaunches = 50, kReplays = 7;
  must(launch(c, p.arguments, l), "a launch");
  must(cudaStreamSynchronize(stream), "the kernel");
  cudaGraph_t graph;
  cudaGraphExec_t launchable;
  must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "a capture");
  for (int i = 0; i < kLaunches; ++i) must(launch(c, p.arguments, l), "a launch");
  must(cudaStreamEndCapture(stream, &graph), "a capture");
  must(cudaGraphInstantiate(&launchable, graph, 0), "a graph");
  cudaEvent_t begin, end;
  must(cudaEventCreate(&begin), "an event"), must(cudaEventCreate(&end), "an event");
  std::vector<float> times;
  for (int i = 0; i < kReplays; ++i) {
    must(cudaEventRecord(begin, stream), "an event");
    must(cudaGraphLaunch(launchable, stream), "a graph");
    must(cudaEventRecord(end, stream), "an event");
    must(cudaEventSynchronize(end), "an event");
    float took;
    must(cudaEventElapsedTime(&took, begin, end), "an event");
    times.push_back(took);
  }
  std::sort(times.begin(), times.end());
  cudaGraphExecDestroy(launchable), cudaGraphDestroy(graph), cudaStreamDestroy(stream);
  return times[kReplays / 2] * 1e3 / kLaunches;
}

}  // namespace

int main(int count, char** arguments) {
  const std::string what = count > 1 ? arguments[1] : "all";
  int failures = 0, cases = 0;
  if (what != "bench") {
    unsigned seed = 0;
    const auto check_both = [&](const Case& c) {
      ++seed;
      for (const bool has_scratch : {false, true}) failures += !check(c, seed, has_scratch), ++cases;
    };
    for (const bool bf16 : {false, true}) {
      for (const int dim : {64, 128, 256}) {
        for (const int keys : {1, 31, 33, 256, 300, 2000, 9001}) {
          if (what == "short") {
            if (!bf16 && (keys == 33 || keys == 9001))
              check_both({1, 2, 8, 1, dim, keys, bf16, true, false, 0.0f, 0.4f, true});
            continue;
          }
          constexpr int kHeads[][3] = {{1, 4, 4}, {1, 8, 4}, {1, 4, 1}, {1, 8, 1}, {3, 4, 2}, {2, 12, 1}, {37, 2, 1}};
          for (const auto& [rows, heads, kv_heads] : kHeads) {
            if (rows * keys > 20000) continue;
            check_both({1, rows, heads, kv_heads, dim, keys, bf16, true, false, 0.0f, 0.4f, false});
          }
          check_both({3, 2, 4, 2, dim, keys, bf16, true, true, 5.0f, 0.9f, true});
          check_both({2, 1, 2, 2, dim, keys, bf16, true, false, 0.0f, 2.0f, true});
          check_both({1, 1, 8, 2, dim, keys, bf16, false, false, 0.0f, 0.0f, false});
        }
      }
    }
    std::printf("%d cases, %d failures\n", cases, failures);
  }
  if (what == "all" || what == "bench") {
    std::printf("us of a launch\n%-28s %8s %8s %8s %8s\n", "heads, kv heads, dim, rows", "256", "1536", "5120",
                "16384");
    constexpr int kShapes[][4] = {{1, 8, 4, 256},  {1, 4, 1, 256}, {1, 16, 8, 256}, {1, 32, 8, 128},
                                  {1, 16, 8, 128}, {4, 8, 4, 256}, {16, 8, 4, 256}, {512, 8, 4, 256}};
    for (const auto& [rows, heads, kv_heads, dim] : kShapes) {
      std::printf("%3d %3d %4d %4d             ", heads, kv_heads, dim, rows);
      for (const int keys : {256, 1536, 5120, 16384}) {
        if (rows * keys > 1 << 22) continue;
        std::printf(" %8.2f",
                    microseconds({1, rows, heads, kv_heads, dim, keys, false, true, false, 0.0f, 0.0f, false}));
      }
      std::printf("\n");
      std::fflush(stdout);
    }
  }
  return failures == 0 ? 0 : 1;
}
