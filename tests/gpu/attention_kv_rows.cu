// Caches in rows with scales of their own, on a device without Rust: what an append leaves, byte by byte, and every
// decode and prefill kernel that reads it against the formula in f64.
//
//   attention_kv_rows check    1 if anything is wrong
//   attention_kv_rows bench    microseconds of decodes beside BF16
#include <cuda_bf16.h>
#include <cuda_fp16.h>
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

#include "attention/attention_decode.cuh"
#include "attention/attention_decode_rows.h"
#include "attention/attention_prefill.cuh"
#include "common/kv_row.cuh"
#include "rope/rope.h"

namespace {

using namespace nvb;

#define CUDA(call)                                                                 \
  do {                                                                             \
    const cudaError_t status_ = (call);                                            \
    if (status_ != cudaSuccess) {                                                  \
      std::printf("%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(status_)); \
      std::exit(2);                                                                \
    }                                                                              \
  } while (false)

int failures = 0;

const char* name_of(uint32_t dtype) {
  const char* const names[] = {"", "f32", "f16", "bf16", "i32", "e4m3", "e5m2", "int8", "q8_0", "q4_0"};
  return names[dtype];
}

template <typename T>
struct Array {
  std::vector<T> host;
  T* device = nullptr;
  explicit Array(size_t count) : host(count + 16) { CUDA(cudaMalloc(&device, host.size() * sizeof(T))); }
  Array(const Array&) = delete;
  ~Array() { cudaFree(device); }
  void up() { CUDA(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice)); }
  void down() { CUDA(cudaMemcpy(host.data(), device, host.size() * sizeof(T), cudaMemcpyDeviceToHost)); }
};

nvb_launch device_launch() {
  cudaDeviceProp properties;
  CUDA(cudaGetDeviceProperties(&properties, 0));
  return {nullptr, 90, properties.multiProcessorCount, static_cast<int>(properties.sharedMemPerBlockOptin),
          properties.l2CacheSize};
}

// The formula of the header, in f32.
std::vector<uint8_t> pack(uint32_t dtype, const float* x, int dim) {
  std::vector<uint8_t> row(kv_row_bytes(dtype, dim), 0);
  const int block = dtype == NVB_KV_INT8 ? dim : 32;
  for (int first = 0; first < dim; first += block) {
    const int count = std::min(block, dim - first);
    float most = 0, signed_most = 0;
    bool finite = true;
    for (int i = first; i < first + count; ++i) {
      finite = finite && std::isfinite(x[i]);
      most = std::max(most, std::fabs(x[i]));
    }
    signed_most = -most;
    for (int i = first; i < first + count; ++i) signed_most = x[i] == most ? most : signed_most;
    const auto half = [](float value) {
      return __half2float(__float2half_rn(std::min(std::max(value, -65504.0f), 65504.0f)));
    };
    const float scale = dtype == NVB_KV_INT8   ? most / 127.0f
                        : dtype == NVB_KV_Q8_0 ? half(most / 127.0f)
                                               : half(signed_most / -8.0f);
    uint8_t* const scales = row.data() + kv_scales_at(dtype, dim);
    if (dtype == NVB_KV_INT8) {
      const float stored = finite ? scale : std::numeric_limits<float>::quiet_NaN();
      std::memcpy(scales, &stored, 4);
    } else {
      const __half value = __float2half_rn(scale);
      uint16_t bits;
      std::memcpy(&bits, &value, 2);
      if (!finite) bits = 0x7e00;
      std::memcpy(scales + first / 32 * 2, &bits, 2);
    }
    const bool divides = finite && scale != 0;
    for (int i = 0; i < (dtype == NVB_KV_Q4_0 ? 32 : count); ++i) {
      const float quotient = divides && i < count ? x[first + i] / scale : 0;
      if (dtype == NVB_KV_Q4_0) {
        const int value =
            divides && i < count ? static_cast<int>(std::min(std::max(std::floor(quotient + 8.5f), 0.0f), 15.0f)) : 8;
        row[first / 2 + i % 16] |= static_cast<uint8_t>(i < 16 ? value : value << 4);
      } else {
        row[first + i] =
            static_cast<uint8_t>(static_cast<int>(std::min(std::max(std::nearbyint(quotient), -127.0f), 127.0f)));
      }
    }
  }
  return row;
}

float element(uint32_t dtype, const uint8_t* row, int dim, int at) {
  if (dtype == NVB_BF16) {
    __nv_bfloat16 value;
    std::memcpy(&value, row + 2 * at, 2);
    return __bfloat162float(value);
  }
  const uint8_t* const scales = row + kv_scales_at(dtype, dim);
  float scale;
  if (dtype == NVB_KV_INT8) {
    std::memcpy(&scale, scales, 4);
  } else {
    __half half;
    std::memcpy(&half, scales + at / 32 * 2, 2);
    scale = __half2float(half);
  }
  if (dtype != NVB_KV_Q4_0) return static_cast<float>(static_cast<int8_t>(row[at])) * scale;
  const uint8_t two = row[at / 32 * 16 + at % 16];
  return (static_cast<float>(at % 32 < 16 ? two & 15 : two >> 4) - 8) * scale;
}

int row_bytes(uint32_t dtype, int dim) {
  return is_kv_row(dtype) ? kv_row_bytes(dtype, dim) : 2 * dim;
}
int unit(uint32_t dtype) {
  return is_kv_row(dtype) ? 1 : 2;
}

struct Case {
  std::vector<int> last;
  int rows = 1, query_heads = 8, kv_heads = 2, head_dim = 128, value_dim = 0, window = 0;
  float soft_cap = 0;
  uint32_t key_dtype = NVB_KV_INT8, value_dtype = 0, query_dtype = NVB_F32;
  int page_tokens = 0, ring = 0;
  std::string text() const {
    char line[256];
    std::snprintf(line, sizeof line,
                  "%zu x %d rows to %d, heads %d/%d of %d/%d, window %d, cap %g, %s over %s/%s, page %d, ring %d",
                  last.size(), rows, last[0], query_heads, kv_heads, head_dim, value_dim, window, soft_cap,
                  name_of(query_dtype), name_of(key_dtype), name_of(value_dtype), page_tokens, ring);
    return line;
  }
};

void check(Case c, std::mt19937& random) {
  if (c.value_dim == 0) c.value_dim = c.head_dim;
  if (c.value_dtype == 0) c.value_dtype = c.key_dtype;
  std::normal_distribution<float> normal;
  const int sequences = static_cast<int>(c.last.size()), rows = sequences * c.rows;
  const int longest = *std::max_element(c.last.begin(), c.last.end()) + 1;
  const int capacity = longest + 5, slots = sequences + 1;
  const int columns = c.page_tokens > 0 ? (capacity + c.page_tokens - 1) / c.page_tokens : 0;
  const int blocks = c.page_tokens > 0 ? slots * columns : slots;
  const int tokens = c.page_tokens > 0 ? c.page_tokens : c.ring > 0 ? c.ring : capacity;
  const int key_bytes = row_bytes(c.key_dtype, c.head_dim), value_bytes = row_bytes(c.value_dtype, c.value_dim);
  Array<uint8_t> key(static_cast<size_t>(blocks) * c.kv_heads * tokens * key_bytes);
  Array<uint8_t> value(static_cast<size_t>(blocks) * c.kv_heads * tokens * value_bytes);
  std::fill(key.host.begin(), key.host.end(), 0xff), std::fill(value.host.begin(), value.host.end(), 0xff);
  key.up(), value.up();
  Array<int32_t> table(std::max(1, slots * columns)), positions(rows), slot(sequences);
  for (int i = 0; i < slots * columns; ++i) table.host[i] = i;
  std::shuffle(table.host.begin(), table.host.begin() + slots * columns, random);
  table.up();

  nvb_kv_placement placement{}, value_placement{};
  int64_t key_sequence = static_cast<int64_t>(c.kv_heads) * tokens * key_bytes / unit(c.key_dtype);
  int64_t value_sequence = static_cast<int64_t>(c.kv_heads) * tokens * value_bytes / unit(c.value_dtype);
  const int64_t key_token = key_bytes / unit(c.key_dtype), value_token = value_bytes / unit(c.value_dtype);
  if (c.page_tokens > 0) {
    placement.pages = table.device, placement.page_row_stride = columns;
    placement.block_stride = key_sequence, placement.value_block_stride = value_sequence;
    placement.page_tokens = c.page_tokens, placement.page_count = blocks;
    key_sequence = value_sequence = 0;
  } else if (c.ring > 0) {
    placement.ring_tokens = c.ring;
    placement.block_stride = 256 * key_token, placement.value_block_stride = 256 * value_token;
  }
  value_placement = placement;
  value_placement.block_stride = placement.value_block_stride;

  // Append everything by the rope kernel, keys and values in a launch each, a token of all sequences after the other
  // where a ring takes one at a time.
  std::vector<std::vector<float>> keys(sequences), values(sequences);
  const nvb_launch launch = device_launch();
  for (int b = 0; b < sequences; ++b) {
    const int count = c.last[b] + 1;
    keys[b].resize(static_cast<size_t>(count) * c.kv_heads * c.head_dim);
    values[b].resize(static_cast<size_t>(count) * c.kv_heads * c.value_dim);
    for (float& x : keys[b]) x = normal(random);
    for (float& x : values[b]) x = normal(random);
    slot.host[b] = sequences - b;
    if (count <= 0) continue;
    const int kept = c.ring > 0 ? std::min(count, c.ring) : count;
    for (const bool of_values : {false, true}) {
      const std::vector<float>& from = of_values ? values[b] : keys[b];
      const int dim = of_values ? c.value_dim : c.head_dim;
      Array<float> input(from.size());
      std::copy(from.begin(), from.end(), input.host.begin());
      input.up();
      Array<int32_t> at(kept), of(kept);
      for (int i = 0; i < kept; ++i) at.host[i] = count - kept + i, of.host[i] = slot.host[b];
      at.up(), of.up();
      nvb_rope_params p{};
      p.key = input.device + static_cast<size_t>(count - kept) * c.kv_heads * dim;
      p.key_cache = of_values ? value.device : key.device;
      p.positions = at.device, p.slots = of.device;
      p.key_token_stride = c.kv_heads * dim, p.key_head_stride = dim;
      p.cache_slot_stride = of_values ? value_sequence : key_sequence;
      p.cache_token_stride = of_values ? value_token : key_token;
      p.cache_head_stride = tokens * p.cache_token_stride;
      p.query_dtype = p.value_dtype = p.query_output_dtype = p.key_output_dtype = p.query_norm_dtype =
          p.key_norm_dtype = p.key_dtype = NVB_F32;
      p.cache_dtype = of_values ? c.value_dtype : c.key_dtype;
      p.tokens = kept, p.kv_heads = c.kv_heads, p.head_dim = dim, p.slot_count = slots, p.capacity = capacity;
      p.base = p.position_scale = p.query_scale = 1.0f, p.epsilon = 1e-6f;
      p.placement = of_values ? value_placement : placement;
      CUDA(nvb_cuda_rope(&p, &launch));
      CUDA(cudaDeviceSynchronize());
    }
  }
  key.down(), value.down();
  const auto row_of = [&](bool of_values, int b, int head, int token) {
    const int at = c.ring > 0 ? token % c.ring : token;
    const int block = c.page_tokens > 0 ? table.host[slot.host[b] * columns + at / c.page_tokens] : slot.host[b];
    const int inside = c.page_tokens > 0 ? at % c.page_tokens : at;
    const size_t row = (static_cast<size_t>(block) * c.kv_heads + head) * tokens + inside;
    return of_values ? value.host.data() + row * value_bytes : key.host.data() + row * key_bytes;
  };
  for (int b = 0; b < sequences; ++b) {
    const int first = c.ring > 0 ? std::max(0, c.last[b] + 1 - c.ring) : 0;
    for (int token = first; token <= c.last[b]; ++token) {
      for (int head = 0; head < c.kv_heads; ++head) {
        for (const bool of_values : {false, true}) {
          const uint32_t dtype = of_values ? c.value_dtype : c.key_dtype;
          if (!is_kv_row(dtype)) continue;
          const int dim = of_values ? c.value_dim : c.head_dim;
          const float* const from =
              (of_values ? values[b] : keys[b]).data() + (static_cast<size_t>(token) * c.kv_heads + head) * dim;
          const std::vector<uint8_t> expected = pack(dtype, from, dim);
          if (std::memcmp(expected.data(), row_of(of_values, b, head, token), expected.size()) != 0) {
            std::printf("the %s of token %d, head %d has other bytes: %s\n", of_values ? "value" : "key", token, head,
                        c.text().c_str());
            ++failures;
            return;
          }
        }
      }
    }
    for (int r = 0; r < c.rows; ++r) positions.host[b * c.rows + r] = std::max(-1, c.last[b] - c.rows + 1 + r);
  }
  positions.up(), slot.up();

  // The formula.
  const int group = c.query_heads / c.kv_heads;
  const int query_size = c.query_dtype == NVB_F32 ? 4 : 2;
  Array<uint8_t> query(static_cast<size_t>(rows) * c.query_heads * c.head_dim * query_size);
  std::vector<double> queries(static_cast<size_t>(rows) * c.query_heads * c.head_dim);
  for (size_t i = 0; i < queries.size(); ++i) {
    const float x = normal(random);
    if (query_size == 4) {
      std::memcpy(query.host.data() + 4 * i, &x, 4);
      queries[i] = x;
    } else {
      const __nv_bfloat16 rounded = __float2bfloat16_rn(x);
      std::memcpy(query.host.data() + 2 * i, &rounded, 2);
      queries[i] = __bfloat162float(rounded);
    }
  }
  query.up();
  std::vector<double> expected(static_cast<size_t>(rows) * c.query_heads * c.value_dim), sums(rows * c.query_heads);
  for (int row = 0; row < rows; ++row) {
    const int b = row / c.rows, position = positions.host[row];
    const int begin = c.window > 0 ? std::max(0, position + 1 - c.window) : 0;
    for (int h = 0; h < c.query_heads; ++h) {
      std::vector<double> scores;
      double most = -std::numeric_limits<double>::infinity(), total = 0;
      for (int token = begin; token <= position; ++token) {
        double score = 0;
        const uint8_t* const k = row_of(false, b, h / group, token);
        for (int d = 0; d < c.head_dim; ++d) {
          score += queries[(static_cast<size_t>(row) * c.query_heads + h) * c.head_dim + d] *
                   element(c.key_dtype, k, c.head_dim, d);
        }
        score /= std::sqrt(static_cast<double>(c.head_dim));
        if (c.soft_cap > 0) score = c.soft_cap * std::tanh(score / c.soft_cap);
        scores.push_back(score);
        most = std::max(most, score);
      }
      double* const out = &expected[(static_cast<size_t>(row) * c.query_heads + h) * c.value_dim];
      for (size_t i = 0; i < scores.size(); ++i) {
        const double weight = std::exp(scores[i] - most);
        total += weight;
        const uint8_t* const v = row_of(true, b, h / group, begin + static_cast<int>(i));
        for (int d = 0; d < c.value_dim; ++d) out[d] += weight * element(c.value_dtype, v, c.value_dim, d);
      }
      for (int d = 0; d < c.value_dim && total > 0; ++d) out[d] /= total;
      sums[row * c.query_heads + h] = most + std::log(total);
    }
  }

  Array<float> output(expected.size()), lse(sums.size());
  nvb_attention_decode_params p{};
  p.query = query.device, p.key = key.device, p.value = value.device;
  p.positions = positions.device, p.slots = slot.device, p.output = output.device, p.lse = lse.device;
  p.query_token_stride = static_cast<int64_t>(c.query_heads) * c.head_dim, p.query_head_stride = c.head_dim;
  p.output_token_stride = static_cast<int64_t>(c.query_heads) * c.value_dim, p.output_head_stride = c.value_dim;
  p.key_sequence_stride = key_sequence, p.value_sequence_stride = value_sequence;
  p.key_token_stride = key_token, p.key_head_stride = tokens * key_token;
  p.value_token_stride = value_token, p.value_head_stride = tokens * value_token;
  p.placement = placement;
  p.query_dtype = c.query_dtype, p.kv_dtype = c.key_dtype, p.value_dtype = c.value_dtype, p.output_dtype = NVB_F32;
  p.sequences = sequences, p.rows_per_sequence = c.rows;
  p.query_heads = c.query_heads, p.kv_heads = c.kv_heads, p.head_dim = c.head_dim, p.value_dim = c.value_dim;
  p.slot_count = slots, p.capacity = capacity, p.max_kv_length = longest, p.window = c.window;
  p.scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim)), p.soft_cap = c.soft_cap;
  constexpr int kMostSplits = 40;
  const size_t partials = static_cast<size_t>(rows) * c.query_heads * (kMostSplits + 3);
  Array<float> workspace(partials * (2 + c.value_dim) + 16);
  Array<uint32_t> counters(static_cast<size_t>(rows) * c.query_heads * NVB_ATTENTION_DECODE_COUNTERS);
  counters.up();
  p.workspace = workspace.device, p.counters = counters.device;
  const auto compare = [&](const char* kernel, int splits) {
    CUDA(cudaDeviceSynchronize());
    output.down(), lse.down();
    double error = 0, norm = 0;
    std::string problem;
    for (size_t i = 0; i < expected.size(); ++i) {
      if (!std::isfinite(output.host[i])) problem = "output " + std::to_string(i) + " is no number";
      error += (output.host[i] - expected[i]) * (output.host[i] - expected[i]);
      norm += expected[i] * expected[i];
    }
    if (problem.empty() && std::sqrt(error) > 1e-5 * std::sqrt(norm))
      problem = "error " + std::to_string(std::sqrt(error / norm));
    for (size_t i = 0; i < sums.size(); ++i) {
      const double out = lse.host[i];
      if (out != sums[i] && !(std::fabs(out - sums[i]) <= 1e-5 * (2 + std::fabs(sums[i]))))
        problem = "lse " + std::to_string(i) + " is " + std::to_string(out) + ", not " + std::to_string(sums[i]);
    }
    if (!problem.empty()) {
      std::printf("%s, %d splits: %s: %s\n", kernel, splits, problem.c_str(), c.text().c_str());
      ++failures;
    }
  };
  const auto poison = [&] {
    std::memset(output.host.data(), 0xff, output.host.size() * 4),
        std::memset(lse.host.data(), 0xff, lse.host.size() * 4);
    output.up(), lse.up();
  };
  for (const bool fast : {true, false}) {
    nvb_attention_decode_shape shape;
    if (!(fast ? supports_decode_rows(p, launch, shape) : supports_decode_simt(p, launch, shape))) continue;
    for (const int splits : {1, 2, 5, 17, kMostSplits}) {
      const int items = c.rows * group;
      p.chunks = (items + shape.heads_per_block - 1) / shape.heads_per_block;
      p.heads_per_chunk = (items + p.chunks - 1) / p.chunks;
      p.splits = splits;
      p.slots_per_head = splits == 1 ? 0 : splits + (splits + 15) / 16;
      DecodeArguments arguments;
      arguments.params = p;
      const size_t results = static_cast<size_t>(rows) * c.query_heads * p.slots_per_head;
      arguments.partial_sums = reinterpret_cast<float2*>(workspace.device);
      arguments.partial_outputs = workspace.device + (results * 2 + 3) / 4 * 4;
      for (int run = 0; run < 2; ++run) {
        poison();
        CUDA(fast ? launch_decode_rows(arguments, launch) : launch_decode_simt(arguments, launch));
        compare(fast ? "rows" : "simt", splits);
      }
    }
  }
  counters.down();
  for (const uint32_t counter : counters.host) {
    if (counter == 0) continue;
    std::printf("a counter is left at %u: %s\n", counter, c.text().c_str());
    ++failures;
    break;
  }

  // The same rows by a prefill, where a sequence has as many keys as rows.
  if (*std::min_element(c.last.begin(), c.last.end()) + 1 < c.rows) return;
  PrefillArguments prefill{};
  nvb_attention_prefill_params& q = prefill.params;
  q.query = p.query, q.key = p.key, q.value = p.value, q.output = p.output, q.lse = p.lse;
  q.query_sequence_stride = q.query_token_stride = p.query_token_stride, q.query_head_stride = p.query_head_stride;
  q.output_sequence_stride = q.output_token_stride = p.output_token_stride, q.output_head_stride = p.output_head_stride;
  q.lse_sequence_stride = 1;
  q.key_sequence_stride = key_sequence, q.key_token_stride = p.key_token_stride, q.key_head_stride = p.key_head_stride;
  q.value_sequence_stride = value_sequence, q.value_token_stride = p.value_token_stride;
  q.value_head_stride = p.value_head_stride;
  q.query_dtype = p.query_dtype, q.kv_dtype = p.kv_dtype, q.value_dtype = p.value_dtype, q.output_dtype = NVB_F32;
  q.mask_dtype = NVB_F32;
  q.sequences = sequences, q.query_heads = p.query_heads, q.kv_heads = p.kv_heads, q.head_dim = p.head_dim;
  q.value_dim = p.value_dim, q.causal = 1, q.window = p.window, q.scale = p.scale, q.soft_cap = p.soft_cap;
  q.placement = placement, q.heads_per_group = p.query_heads;
  int tiles = 0;
  for (int b = 0; b < sequences; ++b) {
    q.sequence[b] = {b * c.rows, c.rows, slot.host[b], c.last[b] + 1, tiles * c.query_heads};
    tiles += (c.rows + kPrefillSimtRows - 1) / kPrefillSimtRows;
  }
  poison();
  CUDA(launch_prefill_simt(prefill, tiles * c.query_heads, nullptr));
  compare("prefill_simt", 0);
}

int run_check() {
  std::mt19937 random(7);
  int cases = 0;
  for (const uint32_t dtype : {uint32_t{NVB_KV_INT8}, uint32_t{NVB_KV_Q8_0}, uint32_t{NVB_KV_Q4_0}}) {
    for (const int page : {0, 16, 5, 64}) {
      std::vector<Case> all;
      Case c;
      c.key_dtype = dtype, c.page_tokens = page;
      for (const int length : {1, 2, 15, 16, 17, 127, 128, 129, 300, 1000}) {
        Case one = c;
        one.last = {length - 1};
        all.push_back(one);
      }
      c.last = {700, 3, 255, -1, 128};
      all.push_back(c);
      Case cap = c;
      cap.soft_cap = 5, cap.window = 100;
      all.push_back(cap);
      Case wide = c;
      wide.query_heads = 16, wide.rows = 2, wide.last = {300, 5, 150};
      all.push_back(wide);
      Case one = c;
      one.query_heads = one.kv_heads = 3, one.query_dtype = NVB_BF16;
      all.push_back(one);
      Case eight = c;
      eight.query_heads = 8, eight.kv_heads = 1, eight.rows = 1;
      all.push_back(eight);
      Case mixed = c;
      mixed.value_dtype = NVB_BF16;
      all.push_back(mixed);
      Case other = c;
      other.value_dtype = dtype == NVB_KV_Q4_0 ? NVB_KV_INT8 : NVB_KV_Q4_0;
      all.push_back(other);
      for (const int dim : {1, 40, 64, 256, 512}) {
        Case narrow = c;
        narrow.head_dim = dim, narrow.value_dim = dim == 64 ? 24 : 0, narrow.last = {70, 3};
        all.push_back(narrow);
      }
      if (page == 0) {
        Case latent = c;
        latent.head_dim = 576, latent.value_dim = 512, latent.last = {40};
        all.push_back(latent);
        Case ring = c;
        ring.ring = 300, ring.window = 280, ring.last = {1000, 200, 301};
        all.push_back(ring);
      }
      for (const Case& one_case : all) check(one_case, random), ++cases;
    }
  }
  std::printf("%d cases of rows with scales: %s\n", cases, failures == 0 ? "right" : "WRONG");
  return failures != 0;
}

// Microseconds of a launch, the median of five rounds.
template <typename Launch>
double time_of(const Launch& launch) {
  cudaEvent_t from, to;
  CUDA(cudaEventCreate(&from));
  CUDA(cudaEventCreate(&to));
  std::vector<double> all;
  for (int round = 0; round < 6; ++round) {
    constexpr int kLaunches = 20;
    CUDA(cudaEventRecord(from));
    for (int i = 0; i < kLaunches; ++i) CUDA(launch());
    CUDA(cudaEventRecord(to));
    CUDA(cudaEventSynchronize(to));
    float milliseconds;
    CUDA(cudaEventElapsedTime(&milliseconds, from, to));
    if (round > 0) all.push_back(milliseconds * 1000 / kLaunches);
  }
  std::sort(all.begin(), all.end());
  return all[all.size() / 2];
}

int run_bench() {
  const nvb_launch launch = device_launch();
  constexpr int kHeads = 32, kKvHeads = 8, kDim = 128;
  std::printf("decode, heads 32/8 of 128, us (GB/s), and beside BF16 by attention_decode_mma\n%-16s",
              "sequences x keys");
  const uint32_t dtypes[] = {NVB_BF16, NVB_KV_INT8, NVB_KV_Q8_0, NVB_KV_Q4_0};
  const char* const names[] = {"bf16 mma", "int8", "q8_0", "q4_0"};
  for (const char* name : names) std::printf("%22s", name);
  std::printf("\n");
  const int shapes[][2] = {{64, 4096}, {128, 1024}, {16, 4096}, {1, 32768}, {1, 4096}, {8, 8192}};
  for (const auto& shape_of : shapes) {
    const int sequences = shape_of[0], length = shape_of[1];
    const size_t most = static_cast<size_t>(sequences) * kKvHeads * length * 2 * kDim;
    Array<uint8_t> key(most), value(most);
    std::mt19937 random(3);
    for (size_t i = 0; i + 4 <= most; i += 4) {
      // Finite in every format: small bytes, also where scales lie.
      const uint32_t word = random() & 0x1f1f1f1fu;
      std::memcpy(key.host.data() + i, &word, 4), std::memcpy(value.host.data() + i, &word, 4);
    }
    key.up(), value.up();
    Array<uint16_t> query(static_cast<size_t>(sequences) * kHeads * kDim), output(query.host.size());
    for (uint16_t& x : query.host) x = static_cast<uint16_t>(0x3f00 + random() % 128);
    query.up();
    Array<int32_t> positions(sequences);
    for (int b = 0; b < sequences; ++b) positions.host[b] = length - 1;
    positions.up();
    Array<float> workspace(static_cast<size_t>(sequences) * kHeads * 300 * (kDim + 2) + 1024);
    Array<uint32_t> counters(static_cast<size_t>(sequences) * kHeads * NVB_ATTENTION_DECODE_COUNTERS);
    counters.up();
    std::printf("%5d x %-8d", sequences, length);
    double bf16 = 1e30;
    for (int i = 0; i < 4; ++i) {
      const uint32_t dtype = dtypes[i];
      const int bytes = row_bytes(dtype, kDim);
      const int64_t token = dtype == NVB_BF16 ? kDim : bytes;
      nvb_attention_decode_params p{};
      p.query = query.device, p.key = key.device, p.value = value.device;
      p.positions = positions.device, p.output = output.device;
      p.query_token_stride = p.output_token_stride = kHeads * kDim;
      p.query_head_stride = p.output_head_stride = kDim;
      p.key_token_stride = p.value_token_stride = token;
      p.key_head_stride = p.value_head_stride = length * token;
      p.key_sequence_stride = p.value_sequence_stride = kKvHeads * length * token;
      p.query_dtype = p.output_dtype = NVB_BF16, p.kv_dtype = p.value_dtype = dtype;
      p.sequences = sequences, p.rows_per_sequence = 1, p.query_heads = kHeads, p.kv_heads = kKvHeads;
      p.head_dim = p.value_dim = kDim, p.slot_count = sequences, p.capacity = p.max_kv_length = length;
      p.scale = 0.01f;
      p.workspace = workspace.device, p.counters = counters.device;
      nvb_attention_decode_shape shape;
      const bool can = i == 0 ? supports_decode_mma(p, launch, shape) : supports_decode_rows(p, launch, shape);
      if (!can) {
        std::printf("%22s", "-");
        continue;
      }
      p.chunks = 1, p.heads_per_chunk = kHeads / kKvHeads;
      // The plan of src/cuda/attention_plan.rs.
      {
        const int most_splits =
            std::min((length + shape.keys * shape.min_tiles - 1) / (shape.keys * shape.min_tiles), 256);
        const int by_memory = (launch.shared_bytes_per_block + 1024) / (shape.shared_bytes + 1024);
        const int places = launch.multiprocessors * std::max(1, std::min(by_memory, 1024 / shape.threads));
        const int blocks = sequences * kKvHeads;
        p.splits = most_splits;
        if (blocks * most_splits > places) {
          const auto occupied = [&](int splits) {
            const int all = blocks * splits;
            return static_cast<double>(all) / ((all + places - 1) / places * places);
          };
          double best = 0;
          for (int s = 1; s <= most_splits; ++s) best = std::max(best, occupied(s));
          const double enough = best >= 0.9 ? 0.9 : 0.9 * best;
          for (p.splits = 1; p.splits < most_splits && occupied(p.splits) < enough; ++p.splits) {
          }
        }
        p.slots_per_head = p.splits == 1 ? 0 : p.splits + (p.splits + 15) / 16;
      }
      DecodeArguments arguments;
      arguments.params = p;
      const size_t results = static_cast<size_t>(sequences) * kHeads * p.slots_per_head;
      arguments.partial_sums = reinterpret_cast<float2*>(workspace.device);
      arguments.partial_outputs = workspace.device + (results * 2 + 3) / 4 * 4;
      const double us = time_of(
          [&] { return i == 0 ? launch_decode_mma(arguments, launch) : launch_decode_rows(arguments, launch); });
      const double moved = 2.0 * sequences * kKvHeads * length * bytes;
      if (i == 0) bf16 = us;
      std::printf("%8.1f (%4.0f) x%5.2f", us, moved / us / 1e3, bf16 / us);
    }
    std::printf("\n");
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "check";
  if (mode == "check") return run_check();
  return run_bench();
}
