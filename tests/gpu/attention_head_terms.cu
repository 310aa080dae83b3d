// Sinks, slopes, chunks, prefixes, trees and bits of the kernels of 8.0 and of the plain ones on a device, beside the
// formula in f64, and what they cost.
//
//   attention_head_terms check    1 if anything is wrong
//   attention_head_terms bench    microseconds with and without
#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "attention/attention_decode.cuh"
#include "attention/sm80/attention_prefill_mma.cuh"
#include "device.h"

namespace {

using namespace nvb;
using B = __nv_bfloat16;

struct Case {
  const char* name = "";
  bool sinks = false, slopes = false, causal = true;
  int chunk = 0, window = 0, page_tokens = 0, head_dim = 64, rows = 1;
  float soft_cap = 0, sink = 0;
  // Of a prefill.
  bool prefix = false, tree = false, bits = false;
  int query_heads = 4, kv_heads = 2;
  std::vector<int> lengths = {1, 63, 64, 65, 129, 300};  // of keys
  std::vector<int> counts = {1, 63, 10, 65, 129, 40};    // of query rows, of a prefill
};

template <typename T>
T* on_device(const std::vector<T>& host) {
  T* device = nullptr;
  MUST(cudaMalloc(&device, std::max<size_t>(host.size() * sizeof(T), 16)));
  MUST(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return device;
}

int divided_up(int value, int by) {
  return (value + by - 1) / by;
}

unsigned mixed(unsigned a, unsigned b) {
  return ((a + 1) * 0x9e3779b9u ^ (b + 7) * 0x85ebca6bu) >> 7;
}

int prefix_of(int sequence, int keys) {
  const int all[] = {keys, keys / 2, 0, 1, std::min(keys, 70)};
  return all[sequence % 5];
}

// The row of a tree that a row follows; some name none that comes before them.
int parent_of(int sequence, int row) {
  const unsigned number = mixed(sequence, row);
  return row == 0 || number % 8 == 0 ? -1 : number % 8 == 1 ? row : number % 8 == 2 ? 99 : number / 8 % row;
}

std::vector<int> line_of(int sequence, int row) {
  std::vector<int> line = {row};
  while (true) {
    const int next = parent_of(sequence, line.back());
    if (next < 0 || next >= line.back()) return line;
    line.push_back(next);
  }
}

// One block of 50 keys in three, another for each 40 rows; the third row sees none.
bool has_bit(int sequence, int row, int key) {
  return row != 2 && mixed(sequence + row / 40, key / 50) % 3 == 0 && mixed(row, key) % 3 > 0;
}

struct Scratch {
  unsigned char* workspace;
  uint32_t* counters;
  Scratch() {
    MUST(cudaMalloc(&workspace, 256 << 20)), MUST(cudaMalloc(&counters, 64 << 20));
    MUST(cudaMemset(counters, 0, 64 << 20));
  }
};

cudaError_t decode(nvb_attention_decode_params p, bool mma, const Scratch& scratch, const nvb_launch& launch) {
  nvb_attention_decode_shape shape = {};
  if (!(mma ? supports_decode_mma(p, launch, shape) : supports_decode_simt(p, launch, shape))) {
    return cudaErrorInvalidValue;
  }
  const int items = items_per_kv_head(p);
  p.chunks = divided_up(items, shape.heads_per_block);
  p.heads_per_chunk = divided_up(items, p.chunks);
  const int blocks = p.sequences * p.kv_heads * p.chunks;
  const int most = std::min(divided_up(std::max(1, p.max_kv_length), shape.keys * shape.min_tiles), 256);
  p.splits = std::max(1, std::min(most, 4 * launch.multiprocessors / blocks));
  p.slots_per_head = p.splits > 1 ? p.splits + divided_up(p.splits, 16) : 0;
  const int64_t partials = int64_t{p.sequences} * p.rows_per_sequence * p.query_heads * p.slots_per_head;
  p.workspace = scratch.workspace, p.counters = scratch.counters;
  DecodeArguments arguments;
  arguments.params = p;
  arguments.partial_sums = reinterpret_cast<float2*>(scratch.workspace);
  arguments.partial_outputs = reinterpret_cast<float*>(scratch.workspace + (partials * 8 + 15) / 16 * 16);
  return mma ? launch_decode_mma(arguments, launch) : launch_decode_simt(arguments, launch);
}

cudaError_t prefill(const nvb_attention_prefill_params& p, bool mma, const nvb_launch& launch) {
  PrefillArguments arguments;
  arguments.params = p;
  const SharedClass shared = launch.shared_bytes_per_block > 200 * 1024   ? SharedClass::kLarge
                             : launch.shared_bytes_per_block > 100 * 1024 ? SharedClass::kMedium
                                                                          : SharedClass::kSmall;
  const int tile =
      mma ? with_prefill_tile<B>(p.head_dim, shared, [](auto of) { return decltype(of)::kRows; }) : kPrefillSimtRows;
  int blocks = 0;
  for (int i = 0; i < p.sequences; ++i) {
    arguments.params.sequence[i].first_block = blocks;
    blocks += divided_up(p.sequence[i].query_count, tile) * p.query_heads;
  }
  return mma ? launch_prefill_mma<B>(arguments, shared, blocks, launch.stream)
             : launch_prefill_simt(arguments, blocks, launch.stream);
}

// A kernel: prefill or decode, of 8.0 or plain.
std::string check_one(const Case& c, bool is_prefill, bool mma, const Scratch& scratch) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const int d = c.head_dim, n = static_cast<int>(c.lengths.size());
  const int capacity = divided_up(*std::max_element(c.lengths.begin(), c.lengths.end()) + 3, 16) * 16;
  const int columns = c.page_tokens > 0 ? divided_up(capacity, c.page_tokens) : 0, pages = columns * n + 1;
  const size_t places = c.page_tokens > 0 ? size_t(pages) * c.page_tokens : size_t(n) * capacity;
  std::vector<B> key(places * c.kv_heads * d, __float2bfloat16_rn(NAN)), value(key);
  std::vector<int32_t> table(std::max(1, columns * n), -1), positions, order(pages);
  for (int i = 0; i < pages; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random);
  const auto row_of = [&](int b, int head, int token) -> size_t {
    if (c.page_tokens == 0) return ((size_t(b) * c.kv_heads + head) * capacity + token) * d;
    const int page = table[b * columns + token / c.page_tokens];
    return ((size_t(page) * c.kv_heads + head) * c.page_tokens + token % c.page_tokens) * d;
  };
  std::vector<int> sequence_of;
  for (int b = 0; b < n; ++b) {
    for (int t = 0; t < c.lengths[b]; ++t) {
      if (c.page_tokens > 0) table[b * columns + t / c.page_tokens] = order[b * columns + t / c.page_tokens];
      for (int h = 0; h < c.kv_heads; ++h) {
        for (int i = 0; i < d; ++i) {
          key[row_of(b, h, t) + i] = __float2bfloat16_rn(normal(random));
          value[row_of(b, h, t) + i] = __float2bfloat16_rn(normal(random) + 0.3f);
        }
      }
    }
    for (int r = 0, count = is_prefill ? c.counts[b] : c.rows; r < count; ++r) {
      positions.push_back(std::max(-1, c.lengths[b] - count + r));
      sequence_of.push_back(b);
    }
  }
  const int rows = static_cast<int>(positions.size());
  std::vector<B> query(size_t(rows) * c.query_heads * d);
  for (B& of : query) of = __float2bfloat16_rn(normal(random) * 2);
  std::vector<float> sinks(c.query_heads), slopes(c.query_heads);
  for (int h = 0; h < c.query_heads; ++h) sinks[h] = normal(random) + c.sink, slopes[h] = std::exp2(-1.0f - h);
  const int words = divided_up(capacity, 32);
  std::vector<uint32_t> bits(size_t(rows) * words);
  std::vector<int32_t> parents(rows);
  for (int i = 0, of = 0; i < rows; ++i) {
    of = i > 0 && sequence_of[i] == sequence_of[i - 1] ? of + 1 : 0;
    parents[i] = parent_of(sequence_of[i], of);
    for (int key = 0; key < words * 32; ++key) {
      if (has_bit(sequence_of[i], of, key)) bits[size_t(i) * words + key / 32] |= 1u << key % 32;
    }
  }
  const size_t count = query.size();
  void* const blocks[] = {on_device(query),
                          on_device(key),
                          on_device(value),
                          on_device(table),
                          on_device(positions),
                          on_device(sinks),
                          on_device(slopes),
                          on_device(std::vector<float>(count, NAN)),
                          on_device(std::vector<float>(count / d, NAN)),
                          on_device(parents),
                          on_device(bits)};
  const auto fill = [&](auto& p) {
    p.query = blocks[0], p.key = blocks[1], p.value = blocks[2];
    p.sinks = c.sinks ? static_cast<const float*>(blocks[5]) : nullptr;
    p.slopes = c.slopes ? static_cast<const float*>(blocks[6]) : nullptr;
    p.output = blocks[7], p.lse = static_cast<float*>(blocks[8]);
    p.query_head_stride = p.output_head_stride = d;
    p.query_token_stride = p.output_token_stride = int64_t{d} * c.query_heads;
    p.key_token_stride = p.value_token_stride = d;
    if (c.page_tokens > 0) {
      p.key_head_stride = p.value_head_stride = int64_t{c.page_tokens} * d;
      p.placement.pages = static_cast<const int32_t*>(blocks[3]), p.placement.page_row_stride = columns;
      p.placement.block_stride = p.placement.value_block_stride = int64_t{c.kv_heads} * c.page_tokens * d;
      p.placement.page_tokens = c.page_tokens, p.placement.page_count = pages;
    } else {
      p.key_head_stride = p.value_head_stride = int64_t{capacity} * d;
      p.key_sequence_stride = p.value_sequence_stride = int64_t{c.kv_heads} * capacity * d;
    }
    p.query_dtype = p.kv_dtype = NVB_BF16, p.output_dtype = NVB_F32, p.sequences = n;
    p.query_heads = c.query_heads, p.kv_heads = c.kv_heads, p.head_dim = p.value_dim = d;
    p.window = c.window, p.chunk = c.chunk, p.soft_cap = c.soft_cap, p.scale = 0.7f / std::sqrt(float(d));
  };
  const nvb_launch launch = gpu::device_launch(nullptr);
  cudaError_t status;
  if (is_prefill) {
    nvb_attention_prefill_params p = {};
    fill(p);
    p.query_sequence_stride = p.output_sequence_stride = p.query_token_stride, p.lse_sequence_stride = 1;
    p.causal = c.causal, p.mask_dtype = NVB_F32, p.heads_per_group = c.query_heads;
    for (int b = 0, start = 0; b < n; start += c.counts[b], ++b) {
      p.sequence[b] = {start, c.counts[b], b, c.lengths[b], 0, c.prefix ? prefix_of(b, c.lengths[b]) : 0};
    }
    if (c.tree) p.tree_parents = static_cast<const int32_t*>(blocks[9]);
    if (c.bits) p.mask = blocks[10], p.mask_dtype = NVB_I32, p.mask_sequence_stride = p.mask_row_stride = words;
    status = prefill(p, mma, launch);
  } else {
    nvb_attention_decode_params p = {};
    fill(p);
    p.positions = static_cast<const int32_t*>(blocks[4]), p.rows_per_sequence = c.rows, p.slot_count = n;
    p.capacity = p.max_kv_length = capacity;
    status = decode(p, mma, scratch, launch);
  }
  if (status != cudaSuccess) return cudaGetErrorString(status);
  MUST(cudaDeviceSynchronize());
  std::vector<float> output(count), lse(count / d);
  MUST(cudaMemcpy(output.data(), blocks[7], count * 4, cudaMemcpyDeviceToHost));
  MUST(cudaMemcpy(lse.data(), blocks[8], lse.size() * 4, cudaMemcpyDeviceToHost));
  for (void* block : blocks) MUST(cudaFree(block));

  double error = 0, norm = 0;
  char text[200];
  for (int i = 0; i < rows; ++i) {
    const int b = sequence_of[i], position = positions[i];
    const bool causal = !is_prefill || c.causal;
    // A prefill's row may stand before every key.
    const int of = i - int(std::find(sequence_of.begin(), sequence_of.end(), b) - sequence_of.begin());
    const int trunk = is_prefill ? c.lengths[b] - c.counts[b] : 0;
    const std::vector<int> line = c.tree ? line_of(b, of) : std::vector<int>();
    const int stands = c.tree ? trunk + int(line.size()) - 1 : is_prefill ? trunk + of : position;
    for (int h = 0; h < c.query_heads; ++h) {
      const int kv_head = h / (c.query_heads / c.kv_heads);
      double most = c.sinks ? sinks[h] : -INFINITY, total = 0;
      std::vector<std::pair<int, double>> scores;
      for (int t = 0; t < c.lengths[b]; ++t) {
        const int distance = stands - t;
        if (c.tree && t >= trunk) {
          if (std::find(line.begin(), line.end(), t - trunk) == line.end()) continue;
        } else {
          if (causal && distance < 0 && !(c.prefix && t < prefix_of(b, c.lengths[b]))) continue;
          if (c.window > 0 && std::abs(distance) >= c.window) continue;
        }
        if (c.bits && !has_bit(b, of, t)) continue;
        if (c.chunk > 0 && (stands < 0 || t / c.chunk != stands / c.chunk)) continue;
        double dot = 0;
        for (int j = 0; j < d; ++j) {
          dot += double(__bfloat162float(query[(size_t(i) * c.query_heads + h) * d + j])) *
                 __bfloat162float(key[row_of(b, kv_head, t) + j]);
        }
        double score = dot * (0.7f / std::sqrt(float(d)));
        if (c.soft_cap > 0) score = c.soft_cap * std::tanh(score / c.soft_cap);
        if (c.slopes) score -= double(slopes[h]) * std::abs(distance);
        scores.push_back({t, score}), most = std::max(most, score);
      }
      std::vector<double> sum(d);
      if (c.sinks) total += std::exp(sinks[h] - most);
      for (const auto& [t, score] : scores) {
        const double weight = std::exp(score - most);
        total += weight;
        for (int j = 0; j < d; ++j) sum[j] += weight * __bfloat162float(value[row_of(b, kv_head, t) + j]);
      }
      const double expected = total == 0 ? -INFINITY : most + std::log(total);
      const float got = lse[size_t(i) * c.query_heads + h];
      if (total == 0 ? got != -INFINITY : !(std::abs(got - expected) < 2e-4 * std::max(1.0, std::abs(expected)))) {
        std::snprintf(text, sizeof text, "lse of row %d head %d: %g, expected %g", i, h, got, expected);
        return text;
      }
      for (int j = 0; j < d; ++j) {
        const double of = total == 0 ? 0 : sum[j] / total;
        const double difference = output[(size_t(i) * c.query_heads + h) * d + j] - of;
        error += difference * difference, norm += of * of;
      }
    }
  }
  const double relative = std::sqrt(error / std::max(norm, 1e-30));
  if (relative < 3e-3) return "";
  std::snprintf(text, sizeof text, "relative error %g", relative);
  return text;
}

int check() {
  std::vector<Case> cases;
  const auto add = [&](const char* name, const std::function<void(Case&)>& change) {
    Case c;
    c.name = name;
    change(c);
    cases.push_back(c);
  };
  add("none", [](Case&) {});
  add("sinks", [](Case& c) { c.sinks = true; });
  add("sinks of 40", [](Case& c) { c.sinks = true, c.sink = 40; });
  add("sinks of -200", [](Case& c) { c.sinks = true, c.sink = -200; });
  add("slopes", [](Case& c) { c.slopes = true; });
  add("slopes, soft cap", [](Case& c) { c.slopes = true, c.soft_cap = 3; });
  for (const int chunk : {1, 32, 48, 64, 1 << 30}) add("chunk", [=](Case& c) { c.chunk = chunk; });
  add("all, window", [](Case& c) { c.sinks = c.slopes = true, c.chunk = 100, c.window = 37; });
  add("all, pages of 16", [](Case& c) { c.sinks = c.slopes = true, c.chunk = 70, c.page_tokens = 16; });
  add("all, head_dim 128", [](Case& c) { c.sinks = c.slopes = true, c.chunk = 70, c.head_dim = 128; });
  add("all, head_dim 256", [](Case& c) { c.sinks = c.slopes = true, c.chunk = 70, c.head_dim = 256; });
  add("all, head_dim 40, 3 rows",
      [](Case& c) { c.sinks = c.slopes = true, c.chunk = 70, c.head_dim = 40, c.rows = 3; });
  add("all, group of 8", [](Case& c) { c.sinks = c.slopes = true, c.query_heads = 16; });
  add("not causal", [](Case& c) { c.causal = false, c.sinks = c.slopes = true; });
  add("not causal, chunk", [](Case& c) { c.causal = false, c.chunk = 48; });
  add("not causal, more rows than keys",
      [](Case& c) { c.causal = false, c.sinks = c.slopes = true, c.lengths = {3, 40, 64}, c.counts = {70, 41, 64}; });
  for (const int dim : {64, 128, 256, 40, 512}) {
    const auto with = [=](Case& c) { c.head_dim = dim, c.page_tokens = dim == 128 ? 16 : 0; };
    add("prefix", [=](Case& c) { with(c), c.prefix = true; });
    add("prefix, window, sinks", [=](Case& c) { with(c), c.prefix = c.sinks = true, c.window = 37; });
    add("prefix, chunk, slopes", [=](Case& c) { with(c), c.prefix = c.slopes = true, c.chunk = 48; });
    const std::vector<int> lengths = {1, 64, 65, 129, 300, 700}, counts = {1, 64, 2, 33, 64, 17};
    add("tree", [=](Case& c) { with(c), c.tree = true, c.lengths = lengths, c.counts = counts; });
    add("tree, window, sinks", [=](Case& c) {
      with(c), c.tree = c.sinks = true, c.window = 64, c.lengths = lengths, c.counts = counts, c.soft_cap = 9;
    });
    add("bits",
        [=](Case& c) { with(c), c.bits = true, c.lengths = {900, 64, 65, 129, 300}, c.counts = {130, 64, 65, 2, 40}; });
    add("bits, tree", [=](Case& c) { with(c), c.bits = c.tree = true, c.lengths = lengths, c.counts = counts; });
  }
  Scratch scratch;
  int failures = 0, runs = 0;
  for (const Case& c : cases) {
    for (int kernel = 0; kernel < 4; ++kernel) {
      const bool is_prefill = kernel < 2, mma = kernel % 2 == 0;
      if (!is_prefill && (!c.causal || c.prefix || c.tree || c.bits)) continue;
      // The kernel of 8.0 has no masks, and the decodes have head_dims of their own.
      if (mma && c.bits) continue;
      ++runs;
      const std::string wrong = check_one(c, is_prefill, mma, scratch);
      if (wrong.empty()) continue;
      ++failures;
      std::printf("WRONG %s (chunk %d), %s %s: %s\n", c.name, c.chunk, is_prefill ? "prefill" : "decode",
                  mma ? "mma" : "simt", wrong.c_str());
    }
  }
  std::printf("check: %d runs, %d failures\n", runs, failures);
  return failures != 0;
}

// ---- bench ----
// Microseconds of a call, the median of 15 replays of a graph of `calls`.
double time(int calls, const std::function<void(const nvb_launch&)>& queue) {
  cudaStream_t stream;
  MUST(cudaStreamCreate(&stream));
  const nvb_launch launch = gpu::device_launch(stream);
  queue(launch);
  MUST(cudaStreamSynchronize(stream));
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < calls; ++i) queue(launch);
  MUST(cudaStreamEndCapture(stream, &graph));
  MUST(cudaGraphInstantiate(&replay, graph, 0));
  cudaEvent_t begin, end;
  MUST(cudaEventCreate(&begin)), MUST(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < 17; ++i) {
    MUST(cudaEventRecord(begin, stream)), MUST(cudaGraphLaunch(replay, stream)), MUST(cudaEventRecord(end, stream));
    MUST(cudaEventSynchronize(end));
    float milliseconds;
    MUST(cudaEventElapsedTime(&milliseconds, begin, end));
    if (i > 1) times.push_back(milliseconds * 1e3f / calls);
  }
  std::sort(times.begin(), times.end());
  MUST(cudaGraphExecDestroy(replay)), MUST(cudaGraphDestroy(graph)), MUST(cudaStreamDestroy(stream));
  return times[times.size() / 2];
}

void bench() {
  Scratch scratch;
  B *query, *key, *value;
  float *output, *terms;
  int32_t* positions;
  constexpr size_t kBytes = size_t{640} << 20;
  MUST(cudaMalloc(&query, 256 << 20)), MUST(cudaMalloc(&key, kBytes)), MUST(cudaMalloc(&value, kBytes));
  MUST(cudaMalloc(&output, 256 << 20)), MUST(cudaMalloc(&terms, 4096));
  MUST(cudaMemset(query, 0x3c, 256 << 20)), MUST(cudaMemset(key, 0x3b, kBytes)), MUST(cudaMemset(value, 0x3b, kBytes));
  MUST(cudaMemset(terms, 0, 4096));
  std::vector<int32_t> last(64, 4095);
  positions = on_device(last);
  std::printf("us          %10s %10s %10s %10s %10s\n", "none", "sinks", "slopes", "chunk 1k", "window 1k");
  const auto fill = [&](auto& p, int d, int heads, int kv_heads, int length, int which) {
    p.query = query, p.key = key, p.value = value, p.output = output;
    p.sinks = which == 1 ? terms : nullptr, p.slopes = which == 2 ? terms : nullptr;
    p.chunk = which == 3 ? 1024 : 0, p.window = which == 4 ? 1024 : 0;
    p.query_head_stride = p.output_head_stride = d, p.query_token_stride = p.output_token_stride = int64_t{d} * heads;
    p.key_token_stride = p.value_token_stride = d, p.key_head_stride = p.value_head_stride = int64_t{length} * d;
    p.key_sequence_stride = p.value_sequence_stride = int64_t{kv_heads} * length * d;
    p.query_dtype = p.kv_dtype = p.output_dtype = NVB_BF16, p.query_heads = heads, p.kv_heads = kv_heads;
    p.head_dim = p.value_dim = d, p.scale = 1.0f / std::sqrt(float(d));
  };
  for (const int d : {64, 128, 256}) {
    std::printf("prefill %3d ", d);
    for (int which = 0; which < 5; ++which) {
      std::printf(" %10.1f", time(4, [&](const nvb_launch& launch) {
                    nvb_attention_prefill_params p = {};
                    fill(p, d, 2048 / d, 2048 / d, 4096, which);
                    p.query_sequence_stride = p.output_sequence_stride = p.query_token_stride,
                    p.lse_sequence_stride = 1;
                    p.causal = 1, p.sequences = 4, p.heads_per_group = p.query_heads, p.mask_dtype = NVB_F32;
                    for (int b = 0; b < 4; ++b) p.sequence[b] = {b * 4096, 4096, b, 4096, 0, 0};
                    MUST(prefill(p, true, launch));
                  }));
    }
    std::printf("\n");
  }
  for (const int d : {64, 128}) {
    std::printf("decode %3d  ", d);
    for (int which = 0; which < 5; ++which) {
      std::printf(" %10.1f", time(10, [&](const nvb_launch& launch) {
                    nvb_attention_decode_params p = {};
                    fill(p, d, 32, 8, 4096, which);
                    p.positions = positions, p.sequences = p.slot_count = 64, p.rows_per_sequence = 1;
                    p.capacity = p.max_kv_length = 4096;
                    if (which > 2) p.max_kv_length = 1024;  // as the plan has it
                    MUST(decode(p, true, scratch, launch));
                  }));
    }
    std::printf("\n");
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1 && std::string(arguments[1]) == "bench") {
    bench();
    return 0;
  }
  return check();
}
