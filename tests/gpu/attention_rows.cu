// Decode of several rows a sequence, caches in FP8, and the merge of partial results, on a device without Rust: every
// row of the table of decode kernels, with every number of splits, against the formula in f64.
//
//   attention_rows check    1 if anything is wrong
//   attention_rows bench    microseconds of a decode by rows a sequence and by dtype of the cache
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "attention_merge/attention_merge.h"
#include "rope/rope.h"

namespace {

#define CUDA(call)                                                                 \
  do {                                                                             \
    const cudaError_t status_ = (call);                                            \
    if (status_ != cudaSuccess) {                                                  \
      std::printf("%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(status_)); \
      std::exit(2);                                                                \
    }                                                                              \
  } while (false)

int failures = 0;

size_t bytes_of(uint32_t dtype) {
  return dtype == NVB_F32 ? 4 : dtype == NVB_F8_E4M3 || dtype == NVB_F8_E5M2 ? 1 : 2;
}

const char* name_of(uint32_t dtype) {
  const char* names[] = {"", "f32", "f16", "bf16", "i32", "e4m3", "e5m2"};
  return names[dtype];
}

void store(uint32_t dtype, void* base, size_t index, float value) {
  char* const at = static_cast<char*>(base) + index * bytes_of(dtype);
  if (dtype == NVB_F32) {
    std::memcpy(at, &value, 4);
  } else if (dtype == NVB_F16) {
    const __half half = __float2half_rn(value);
    std::memcpy(at, &half, 2);
  } else if (dtype == NVB_BF16) {
    const __nv_bfloat16 bf16 = __float2bfloat16_rn(value);
    std::memcpy(at, &bf16, 2);
  } else {
    *at = static_cast<char>(__nv_cvt_float_to_fp8(value, __NV_SATFINITE, dtype == NVB_F8_E4M3 ? __NV_E4M3 : __NV_E5M2));
  }
}

double load(uint32_t dtype, const void* base, size_t index) {
  const char* const at = static_cast<const char*>(base) + index * bytes_of(dtype);
  if (dtype == NVB_F32) {
    float value;
    std::memcpy(&value, at, 4);
    return value;
  }
  if (dtype == NVB_F16) {
    __half half;
    std::memcpy(static_cast<void*>(&half), at, 2);
    return __half2float(half);
  }
  if (dtype == NVB_BF16) {
    __nv_bfloat16 bf16;
    std::memcpy(static_cast<void*>(&bf16), at, 2);
    return __bfloat162float(bf16);
  }
  const __half_raw raw =
      __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(*at), dtype == NVB_F8_E4M3 ? __NV_E4M3 : __NV_E5M2);
  return __half2float(__half(raw));
}

// Host memory with a copy on the device.
struct Array {
  uint32_t dtype;
  std::vector<char> host;
  void* device = nullptr;

  Array(uint32_t dtype, size_t count) : dtype(dtype), host(count * bytes_of(dtype) + 16) {
    CUDA(cudaMalloc(&device, host.size()));
  }
  Array(const Array&) = delete;
  ~Array() { cudaFree(device); }
  void set(size_t index, float value) { store(dtype, host.data(), index, value); }
  double get(size_t index) const { return load(dtype, host.data(), index); }
  void poison() { std::memset(host.data(), 0xff, host.size()); }
  void up() { CUDA(cudaMemcpy(device, host.data(), host.size(), cudaMemcpyHostToDevice)); }
  void down() { CUDA(cudaMemcpy(host.data(), device, host.size(), cudaMemcpyDeviceToHost)); }
};

struct Case {
  std::vector<int> last;  // positions of the sequences' last rows; rows before 0 are empty
  int rows = 1;           // a sequence
  int query_heads = 4, kv_heads = 2;
  int head_dim = 64, value_dim = 0;
  int window = 0;
  float soft_cap = 0;
  uint32_t query_dtype = NVB_F32, kv_dtype = NVB_BF16, output_dtype = NVB_F32;
  int page_tokens = 0;
  bool scaled = false;

  std::string text() const {
    char line[256];
    std::snprintf(line, sizeof line, "%d x %d rows to %d, heads %d/%d of %d/%d, window %d, %s over %s%s, page %d",
                  static_cast<int>(last.size()), rows, last.empty() ? 0 : last[0], query_heads, kv_heads, head_dim,
                  value_dim, window, name_of(query_dtype), name_of(kv_dtype), scaled ? " scaled" : "", page_tokens);
    return line;
  }
};

nvb_launch launch_of(int capability) {
  cudaDeviceProp properties;
  CUDA(cudaGetDeviceProperties(&properties, 0));
  return {nullptr, capability, properties.multiProcessorCount, static_cast<int>(properties.sharedMemPerBlockOptin),
          properties.l2CacheSize};
}

// Divides the keys among `splits` blocks; false: the kernel has no such plan.
bool plan(nvb_attention_decode_params& p, const nvb_attention_decode_shape& shape, int splits) {
  const int items = p.rows_per_sequence * (p.query_heads / p.kv_heads);
  p.chunks = (items + shape.heads_per_block - 1) / shape.heads_per_block;
  p.heads_per_chunk = (items + p.chunks - 1) / p.chunks;
  p.splits = splits;
  p.slots_per_head = splits == 1 || shape.cluster > 0 || shape.min_tiles == 0 ? 0 : splits + (splits + 15) / 16;
  return shape.cluster == 0 || splits <= shape.cluster;
}

void check_decode(Case c, std::mt19937& random) {
  std::normal_distribution<float> normal;
  if (c.value_dim == 0) c.value_dim = c.head_dim;
  const int sequences = static_cast<int>(c.last.size()), rows = sequences * c.rows;
  const int longest = sequences == 0 ? 1 : *std::max_element(c.last.begin(), c.last.end()) + 1;
  const int capacity = longest + 5, slots = sequences + 1;
  const int columns = c.page_tokens > 0 ? (capacity + c.page_tokens - 1) / c.page_tokens : 0;
  const int blocks = c.page_tokens > 0 ? slots * columns : slots;
  const int tokens = c.page_tokens > 0 ? c.page_tokens : capacity;

  // A cache of NaN but for what the sequences hold; sequence b has slot sequences - b.
  Array key(c.kv_dtype, static_cast<size_t>(blocks) * c.kv_heads * tokens * c.head_dim);
  Array value(c.kv_dtype, static_cast<size_t>(blocks) * c.kv_heads * tokens * c.value_dim);
  Array table(NVB_F32, std::max(1, slots * columns)), positions(NVB_F32, rows), slot(NVB_F32, sequences);
  Array key_scale(NVB_F32, c.kv_heads), value_scale(NVB_F32, c.kv_heads);
  key.poison();
  value.poison();
  std::vector<int> order(slots * columns);
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  std::shuffle(order.begin(), order.end(), random);
  if (!order.empty()) std::memcpy(table.host.data(), order.data(), order.size() * 4);
  for (int head = 0; head < c.kv_heads; ++head) {
    key_scale.set(head, c.scaled ? 0.11f + 0.2f * head : 1.0f);
    value_scale.set(head, c.scaled ? 0.07f + 0.1f * head : 1.0f);
  }
  const auto place = [&](int sequence, int head, int token, int dim) {
    const int block = c.page_tokens > 0 ? order[sequence * columns + token / c.page_tokens] : sequence;
    const int inside = c.page_tokens > 0 ? token % c.page_tokens : token;
    return (static_cast<size_t>(block) * c.kv_heads + head) * tokens * dim + static_cast<size_t>(inside) * dim;
  };
  for (int b = 0; b < sequences; ++b) {
    for (int token = 0; token <= c.last[b]; ++token) {
      for (int head = 0; head < c.kv_heads; ++head) {
        for (int d = 0; d < c.head_dim; ++d)
          key.set(place(sequences - b, head, token, c.head_dim) + d, normal(random) / key_scale.get(head));
        for (int d = 0; d < c.value_dim; ++d)
          value.set(place(sequences - b, head, token, c.value_dim) + d, normal(random) / value_scale.get(head));
      }
    }
    const int32_t at = sequences - b;
    std::memcpy(slot.host.data() + 4 * b, &at, 4);
    for (int r = 0; r < c.rows; ++r) {
      const int32_t position = std::max(-1, c.last[b] - c.rows + 1 + r);
      std::memcpy(positions.host.data() + 4 * (b * c.rows + r), &position, 4);
    }
  }
  Array query(c.query_dtype, static_cast<size_t>(rows) * c.query_heads * c.head_dim);
  for (size_t i = 0; i < static_cast<size_t>(rows) * c.query_heads * c.head_dim; ++i) query.set(i, normal(random));
  Array output(c.output_dtype, static_cast<size_t>(rows) * c.query_heads * c.value_dim);
  Array lse(NVB_F32, static_cast<size_t>(rows) * c.query_heads);
  for (Array* array : {&key, &value, &table, &positions, &slot, &key_scale, &value_scale, &query}) array->up();

  // The formula.
  const int group = c.query_heads / c.kv_heads;
  std::vector<double> expected(static_cast<size_t>(rows) * c.query_heads * c.value_dim), sums(rows * c.query_heads);
  for (int row = 0; row < rows; ++row) {
    const int b = row / c.rows, position = std::max(-1, c.last[b] - c.rows + 1 + row % c.rows);
    const int begin = c.window > 0 ? std::max(0, position + 1 - c.window) : 0;
    for (int h = 0; h < c.query_heads; ++h) {
      const int head = h / group;
      std::vector<double> scores;
      double most = -std::numeric_limits<double>::infinity(), total = 0;
      for (int token = begin; token <= position; ++token) {
        double score = 0;
        for (int d = 0; d < c.head_dim; ++d) {
          score += query.get((static_cast<size_t>(row) * c.query_heads + h) * c.head_dim + d) *
                   key.get(place(sequences - b, head, token, c.head_dim) + d);
        }
        score *= key_scale.get(head) / std::sqrt(static_cast<double>(c.head_dim));
        if (c.soft_cap > 0) score = c.soft_cap * std::tanh(score / c.soft_cap);
        scores.push_back(score);
        most = std::max(most, score);
      }
      double* const out = &expected[(static_cast<size_t>(row) * c.query_heads + h) * c.value_dim];
      for (size_t i = 0; i < scores.size(); ++i) {
        const double weight = std::exp(scores[i] - most);
        total += weight;
        for (int d = 0; d < c.value_dim; ++d) {
          out[d] += weight * value_scale.get(head) *
                    value.get(place(sequences - b, head, begin + static_cast<int>(i), c.value_dim) + d);
        }
      }
      for (int d = 0; d < c.value_dim && total > 0; ++d) out[d] /= total;
      sums[row * c.query_heads + h] = most + std::log(total);
    }
  }

  nvb_attention_decode_params p{};
  p.query = query.device, p.key = key.device, p.value = value.device;
  p.positions = static_cast<const int32_t*>(positions.device), p.slots = static_cast<const int32_t*>(slot.device);
  p.output = output.device, p.lse = static_cast<float*>(lse.device);
  if (c.scaled) {
    p.key_scale = static_cast<const float*>(key_scale.device);
    p.value_scale = static_cast<const float*>(value_scale.device);
  }
  p.query_token_stride = static_cast<int64_t>(c.query_heads) * c.head_dim, p.query_head_stride = c.head_dim;
  p.output_token_stride = static_cast<int64_t>(c.query_heads) * c.value_dim, p.output_head_stride = c.value_dim;
  p.key_token_stride = c.head_dim, p.key_head_stride = static_cast<int64_t>(tokens) * c.head_dim;
  p.value_token_stride = c.value_dim, p.value_head_stride = static_cast<int64_t>(tokens) * c.value_dim;
  const int64_t key_block = c.kv_heads * p.key_head_stride, value_block = c.kv_heads * p.value_head_stride;
  if (c.page_tokens > 0) {
    p.placement.pages = static_cast<const int32_t*>(table.device);
    p.placement.page_row_stride = columns;
    p.placement.block_stride = key_block, p.placement.value_block_stride = value_block;
    p.placement.page_tokens = c.page_tokens, p.placement.page_count = blocks;
  } else {
    p.key_sequence_stride = key_block, p.value_sequence_stride = value_block;
  }
  p.query_dtype = c.query_dtype, p.kv_dtype = c.kv_dtype, p.output_dtype = c.output_dtype;
  p.sequences = sequences, p.rows_per_sequence = c.rows;
  p.query_heads = c.query_heads, p.kv_heads = c.kv_heads, p.head_dim = c.head_dim, p.value_dim = c.value_dim;
  p.slot_count = slots, p.capacity = capacity, p.max_kv_length = longest, p.window = c.window;
  p.scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim)), p.soft_cap = c.soft_cap;
  constexpr int kMostSplits = 40;
  // Those of each row, or two of each block.
  const size_t partials = static_cast<size_t>(rows + 2) * c.query_heads * (2 * kMostSplits + 3);
  const size_t counter_count = static_cast<size_t>(rows) * c.query_heads * NVB_ATTENTION_DECODE_COUNTERS;
  Array workspace(NVB_F32, partials * (2 + c.value_dim) + 16), counters(NVB_F32, counter_count);
  std::memset(counters.host.data(), 0, counters.host.size());
  counters.up();
  p.workspace = workspace.device, p.counters = static_cast<uint32_t*>(counters.device);

  const double bound = c.kv_dtype == NVB_F16       ? 1e-3
                       : c.kv_dtype == NVB_BF16    ? 5e-3
                       : c.output_dtype == NVB_F32 ? 1e-5
                                                   : 5e-3;
  for (const int capability : {90, 80, 75}) {
    const nvb_launch launch = launch_of(capability);
    for (int kernel = 0; nvb_cuda_attention_decode_kernel_at(kernel) != nullptr; ++kernel) {
      nvb_attention_decode_shape shape;
      if (!nvb_cuda_attention_decode_kernel_supports(kernel, &p, &launch, &shape)) continue;
      for (const int splits : {1, 2, 5, 17, kMostSplits}) {
        if (!plan(p, shape, splits)) continue;
        for (int run = 0; run < 2; ++run) {
          output.poison(), lse.poison();
          output.up(), lse.up();
          const cudaError_t status = nvb_cuda_attention_decode_launch(kernel, &p, &launch);
          if (status != cudaSuccess) {
            std::printf("%s, %d splits of %d: %s\n", nvb_cuda_attention_decode_kernel_at(kernel), splits, capability,
                        cudaGetErrorString(status));
            ++failures;
            continue;
          }
          CUDA(cudaDeviceSynchronize());
          output.down(), lse.down();
          double error = 0, norm = 0;
          std::string problem;
          for (size_t i = 0; i < expected.size(); ++i) {
            const double out = output.get(i);
            if (!std::isfinite(out)) problem = "output " + std::to_string(i) + " is no number";
            error += (out - expected[i]) * (out - expected[i]);
            norm += expected[i] * expected[i];
          }
          if (problem.empty() && std::sqrt(error) > bound * std::sqrt(norm))
            problem = "error " + std::to_string(std::sqrt(error / norm));
          for (size_t i = 0; i < sums.size(); ++i) {
            const double out = lse.get(i);
            if (out != sums[i] && !(std::fabs(out - sums[i]) <= bound * (2 + std::fabs(sums[i]))))
              problem = "lse " + std::to_string(i) + " is " + std::to_string(out) + ", not " + std::to_string(sums[i]);
          }
          if (!problem.empty()) {
            std::printf("%s as on %d, %d splits: %s: %s\n", nvb_cuda_attention_decode_kernel_at(kernel), capability,
                        splits, problem.c_str(), c.text().c_str());
            ++failures;
          }
        }
      }
    }
  }
  counters.down();
  for (size_t i = 0; i < counter_count; ++i) {
    uint32_t counter;
    std::memcpy(&counter, counters.host.data() + 4 * i, 4);
    if (counter != 0) {
      std::printf("a counter is left at %u: %s\n", counter, c.text().c_str());
      ++failures;
      break;
    }
  }
}

void check_merge(int parts, int tokens, int heads, int dim, uint32_t in, uint32_t out, int padding,
                 std::mt19937& random) {
  std::normal_distribution<float> normal;
  const int64_t head_stride = dim + padding, token_stride = heads * head_stride, part_stride = tokens * token_stride;
  Array outputs(in, parts * part_stride), lses(NVB_F32, parts * tokens * heads);
  Array output(out, static_cast<size_t>(tokens) * heads * dim), lse(NVB_F32, tokens * heads);
  outputs.poison();
  for (int row = 0; row < parts * tokens * heads; ++row) {
    const bool empty = row % heads == 0 || row % 7 == 3;
    lses.set(row, empty ? -std::numeric_limits<float>::infinity() : 3.0f * normal(random));
    for (int d = 0; d < dim && !empty; ++d) outputs.set(row * head_stride + d, normal(random));
  }
  outputs.up(), lses.up();
  output.poison(), lse.poison();
  output.up(), lse.up();
  nvb_attention_merge_params p{};
  p.outputs = outputs.device, p.lses = static_cast<const float*>(lses.device);
  p.output = output.device, p.lse = static_cast<float*>(lse.device);
  p.part_stride = part_stride, p.token_stride = token_stride, p.head_stride = head_stride;
  p.lse_part_stride = tokens * heads, p.lse_token_stride = heads, p.lse_head_stride = 1;
  p.output_token_stride = static_cast<int64_t>(heads) * dim, p.output_head_stride = dim;
  p.parts = parts, p.tokens = tokens, p.heads = heads, p.head_dim = dim, p.input_dtype = in, p.output_dtype = out;
  const nvb_launch launch = launch_of(90);
  CUDA(nvb_cuda_attention_merge(&p, &launch));
  CUDA(cudaDeviceSynchronize());
  output.down(), lse.down();
  double error = 0, norm = 0;
  bool right = true;
  for (int row = 0; row < tokens * heads; ++row) {
    double total = 0;
    for (int part = 0; part < parts; ++part) total += std::exp(lses.get(part * tokens * heads + row));
    const double joint = std::log(total), found = lse.get(row);
    right = right && (found == joint || std::fabs(found - joint) <= 1e-5 * (1 + std::fabs(joint)));
    for (int d = 0; d < dim; ++d) {
      double sum = 0;
      for (int part = 0; part < parts; ++part) {
        const double weight = std::exp(lses.get(part * tokens * heads + row));
        if (weight > 0) sum += weight / total * outputs.get((part * tokens * heads + row) * head_stride + d);
      }
      const double value = output.get(static_cast<size_t>(row) * dim + d);
      right = right && std::isfinite(value);
      error += (value - sum) * (value - sum), norm += sum * sum;
    }
  }
  const double bound = out == NVB_F32 ? 1e-5 : out == NVB_F16 ? 1e-3 : 5e-3;
  if (!right || std::sqrt(error) > bound * std::sqrt(norm)) {
    std::printf("attention_merge of %d parts, %d x %d heads of %d, %s to %s: error %g\n", parts, tokens, heads, dim,
                name_of(in), name_of(out), std::sqrt(error / norm));
    ++failures;
  }
}

// The append in 8 bits stores what the host's conversion makes of x / scale.
void check_append(int dim, uint32_t dtype, std::mt19937& random) {
  std::normal_distribution<float> normal;
  constexpr int kTokens = 37, kHeads = 3;
  const size_t count = static_cast<size_t>(kTokens) * kHeads * dim;
  Array key(NVB_BF16, count), value(NVB_F32, count), positions(NVB_F32, kTokens), scales(NVB_F32, 2 * kHeads);
  Array key_cache(dtype, count), value_cache(dtype, count);
  for (size_t i = 0; i < count; ++i) {
    key.set(i, normal(random)), value.set(i, normal(random));
  }
  const float values[2 * kHeads] = {0.01f, 0.0021f, 1.0f, 0.37f, 0.0005f, 3.0f};  // some saturate in E4M3
  for (int i = 0; i < 2 * kHeads; ++i) scales.set(i, values[i]);
  for (int i = 0; i < kTokens; ++i) {
    const int32_t position = i == 5 ? -1 : i;
    std::memcpy(positions.host.data() + 4 * i, &position, 4);
  }
  key_cache.poison(), value_cache.poison();
  for (Array* array : {&key, &value, &positions, &scales, &key_cache, &value_cache}) array->up();
  nvb_rope_params p{};
  p.key = key.device, p.value = value.device, p.key_cache = key_cache.device, p.value_cache = value_cache.device;
  p.key_scale = static_cast<const float*>(scales.device), p.value_scale = p.key_scale + kHeads;
  p.positions = static_cast<const int32_t*>(positions.device);
  p.key_token_stride = p.value_token_stride = kHeads * dim, p.key_head_stride = p.value_head_stride = dim;
  p.cache_slot_stride = static_cast<int64_t>(count), p.cache_head_stride = static_cast<int64_t>(kTokens) * dim;
  p.cache_token_stride = dim;
  p.query_dtype = p.query_output_dtype = p.key_output_dtype = p.query_norm_dtype = p.key_norm_dtype = NVB_F32;
  p.key_dtype = NVB_BF16, p.value_dtype = NVB_F32, p.cache_dtype = dtype;
  p.tokens = kTokens, p.kv_heads = kHeads, p.head_dim = dim, p.slot_count = 1, p.capacity = kTokens;
  p.base = p.position_scale = p.query_scale = 1.0f;
  const nvb_launch launch = launch_of(90);
  CUDA(nvb_cuda_rope(&p, &launch));
  CUDA(cudaDeviceSynchronize());
  key_cache.down(), value_cache.down();
  for (int token = 0; token < kTokens; ++token) {
    for (int head = 0; head < kHeads; ++head) {
      for (int d = 0; d < dim; ++d) {
        const size_t from = (static_cast<size_t>(token) * kHeads + head) * dim + d;
        const size_t to = (static_cast<size_t>(head) * kTokens + token) * dim + d;
        unsigned char wanted[2] = {0xff, 0xff};
        if (token != 5) {
          store(dtype, &wanted[0], 0, static_cast<float>(key.get(from)) / values[head]);
          store(dtype, &wanted[1], 0, static_cast<float>(value.get(from)) / values[kHeads + head]);
        }
        if (static_cast<unsigned char>(key_cache.host[to]) != wanted[0] ||
            static_cast<unsigned char>(value_cache.host[to]) != wanted[1]) {
          std::printf("append to %s, head_dim %d: token %d, head %d, element %d\n", name_of(dtype), dim, token, head,
                      d);
          ++failures;
          return;
        }
      }
    }
  }
}

int check() {
  std::mt19937 random(7);
  const uint32_t kv_dtypes[] = {NVB_F32, NVB_F16, NVB_BF16, NVB_F8_E4M3, NVB_F8_E5M2};
  int cases = 0;
  for (const uint32_t kv : kv_dtypes) {
    for (const uint32_t other : {static_cast<uint32_t>(NVB_F32), static_cast<uint32_t>(NVB_BF16)}) {
      if (other == NVB_BF16 && kv != NVB_BF16 && kv != NVB_F8_E4M3) continue;
      for (const int rows : {1, 2, 3, 4, 8, 16}) {
        Case c;
        c.rows = rows, c.kv_dtype = kv, c.query_dtype = c.output_dtype = other;
        c.scaled = kv == NVB_F8_E4M3 || kv == NVB_F8_E5M2;
        for (const int dim : {64, 128, 256, 40}) {
          Case d = c;
          d.head_dim = dim, d.last = {300, 0, 17, 64};
          d.query_heads = dim == 128 ? 8 : 4, d.kv_heads = dim == 256 ? 1 : 2;
          check_decode(d, random);
          d.page_tokens = 16, d.window = 33, d.soft_cap = 8;
          check_decode(d, random);
          cases += 2;
        }
        Case d = c;
        d.head_dim = 320, d.value_dim = 72, d.last = {130, 5}, d.query_heads = 12, d.kv_heads = 1;
        check_decode(d, random);
        d.head_dim = 33, d.value_dim = 0, d.last = {15, 16, 1100}, d.query_heads = 3, d.kv_heads = 3;
        check_decode(d, random);
        cases += 2;
      }
    }
  }
  const uint32_t floats[] = {NVB_F32, NVB_F16, NVB_BF16};
  for (const uint32_t in : floats) {
    for (const uint32_t out : floats) {
      for (const int padding : {0, 8, 3}) check_merge(3, 5, 4, 128, in, out, padding, random);
    }
  }
  for (const int parts : {1, 2, 33, 100}) check_merge(parts, 7, 3, 64, NVB_BF16, NVB_F32, 0, random);
  for (const int dim : {1, 33, 256, 512}) check_merge(4, 3, 2, dim, NVB_F32, NVB_BF16, 0, random);
  for (const int dim : {64, 128, 40, 33}) {
    check_append(dim, NVB_F8_E4M3, random);
    check_append(dim, NVB_F8_E5M2, random);
  }
  std::printf("%d cases of decode, of attention_merge and of the append in FP8: %d failures\n", cases, failures);
  return failures == 0 ? 0 : 1;
}

void bench() {
  std::printf("%-24s %9s %6s %5s %9s\n", "kernel", "cache", "batch", "rows", "us");
  for (const int sequences : {1, 64}) {
    for (const uint32_t kv : {static_cast<uint32_t>(NVB_BF16), static_cast<uint32_t>(NVB_F8_E4M3)}) {
      for (const int rows : {1, 2, 4, 8}) {
        constexpr int kHeads = 32, kKvHeads = 8, kDim = 128, kKeys = 4096;
        const size_t cache_bytes = static_cast<size_t>(sequences) * kKvHeads * kKeys * kDim * bytes_of(kv);
        void *key, *value, *query, *output, *positions, *workspace, *counters;
        CUDA(cudaMalloc(&key, cache_bytes));
        CUDA(cudaMalloc(&value, cache_bytes));
        CUDA(cudaMemset(key, 0, cache_bytes));
        CUDA(cudaMemset(value, 0, cache_bytes));
        const size_t query_bytes = static_cast<size_t>(sequences) * rows * kHeads * kDim * 2;
        CUDA(cudaMalloc(&query, query_bytes));
        CUDA(cudaMemset(query, 0, query_bytes));
        CUDA(cudaMalloc(&output, query_bytes));
        std::vector<int32_t> places(sequences * rows);
        for (size_t i = 0; i < places.size(); ++i) places[i] = kKeys - rows + static_cast<int>(i % rows);
        CUDA(cudaMalloc(&positions, places.size() * 4));
        CUDA(cudaMemcpy(positions, places.data(), places.size() * 4, cudaMemcpyHostToDevice));
        CUDA(cudaMalloc(&workspace, size_t{256} << 20));
        CUDA(cudaMalloc(&counters, size_t{8} << 20));
        CUDA(cudaMemset(counters, 0, size_t{8} << 20));
        nvb_attention_decode_params p{};
        p.query = query, p.key = key, p.value = value, p.output = output, p.workspace = workspace;
        p.positions = static_cast<const int32_t*>(positions), p.counters = static_cast<uint32_t*>(counters);
        p.query_token_stride = p.output_token_stride = kHeads * kDim;
        p.query_head_stride = p.output_head_stride = p.key_token_stride = p.value_token_stride = kDim;
        p.key_head_stride = p.value_head_stride = kKeys * kDim;
        p.key_sequence_stride = p.value_sequence_stride = static_cast<int64_t>(kKvHeads) * kKeys * kDim;
        p.query_dtype = p.output_dtype = NVB_BF16, p.kv_dtype = kv;
        p.sequences = p.slot_count = sequences, p.rows_per_sequence = rows, p.query_heads = kHeads;
        p.kv_heads = kKvHeads, p.head_dim = p.value_dim = kDim, p.capacity = p.max_kv_length = kKeys;
        p.scale = 0.088f;
        const nvb_launch launch = launch_of(90);
        for (int kernel = 0; nvb_cuda_attention_decode_kernel_at(kernel) != nullptr; ++kernel) {
          nvb_attention_decode_shape shape;
          if (!nvb_cuda_attention_decode_kernel_supports(kernel, &p, &launch, &shape)) continue;
          float best = 1e30f;
          for (const int splits : {1, 2, 4, 8, 16, 32}) {
            if (!plan(p, shape, splits)) continue;
            cudaEvent_t start, end;
            CUDA(cudaEventCreate(&start));
            CUDA(cudaEventCreate(&end));
            for (int i = 0; i < 3; ++i) CUDA(nvb_cuda_attention_decode_launch(kernel, &p, &launch));
            CUDA(cudaEventRecord(start));
            constexpr int kRuns = 10;
            for (int i = 0; i < kRuns; ++i) CUDA(nvb_cuda_attention_decode_launch(kernel, &p, &launch));
            CUDA(cudaEventRecord(end));
            CUDA(cudaEventSynchronize(end));
            float milliseconds;
            CUDA(cudaEventElapsedTime(&milliseconds, start, end));
            best = std::min(best, milliseconds * 1e3f / kRuns);
          }
          std::printf("%-24s %9s %6d %5d %9.1f\n", nvb_cuda_attention_decode_kernel_at(kernel), name_of(kv), sequences,
                      rows, best);
        }
        for (void* memory : {key, value, query, output, positions, workspace, counters}) CUDA(cudaFree(memory));
      }
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  const std::string what = count > 1 ? arguments[1] : "check";
  if (what == "bench") {
    bench();
    return 0;
  }
  return check();
}
