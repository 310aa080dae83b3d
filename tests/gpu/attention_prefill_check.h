// A case of prefill attention and the formula in f64 that its result is compared with (attention_prefill_cases.h).
#ifndef NVBACKEND_TESTS_GPU_ATTENTION_PREFILL_CHECK_H
#define NVBACKEND_TESTS_GPU_ATTENTION_PREFILL_CHECK_H

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "attention/attention_prefill_fp8.h"
#include "common/dropout.cuh"

namespace attention_cases {

constexpr bool is_fp8(uint32_t dtype) {
  return dtype == NVB_F8_E4M3 || dtype == NVB_F8_E5M2;
}

struct Lengths {
  int queries, keys;
};

struct Case {
  const char* name;
  int head_dim = 128, value_dim = 128;
  std::vector<Lengths> sequences;
  bool causal = false;
  int window = 0;
  int chunk = 0;
  int prefix = 0;  // of every sequence
  bool sinks = false;
  bool slopes = false;
  // 0: none; NVB_I32: bits, of which a share is set and most tiles have none or all; a float dtype: numbers and -inf.
  uint32_t mask = 0;
  bool mask_of_heads = false;  // each its own
  bool mask_tiles = true;      // with bits: room to leave tiles out
  float dropout = 0;           // a share of 256
  float soft_cap = 0;
  int query_heads = 1, kv_heads = 1;
  uint32_t dtype = NVB_BF16;
  bool f32_output = false;
  uint32_t fp8_output = NVB_BF16;  // the output's dtype where the others are FP8 and f32_output is not set
  bool scales = false;             // of FP8
  int page_tokens = 0;      // keys and values lie in pages [page, head, token, head_dim], one of which is missing
  bool cache = false;       // [sequence, head, capacity, head_dim] in the place of packed tokens
  float spread = 1;         // of the queries
  int multiprocessors = 2;  // where there is no device
  int l2_bytes = 50 << 20;
};

inline uint16_t to_bits(uint32_t dtype, float value) {
  uint16_t bits;
  if (is_fp8(dtype)) {
    bits = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, dtype == NVB_F8_E4M3 ? __NV_E4M3 : __NV_E5M2);
  } else if (dtype == NVB_F16) {
    const __half half = __float2half_rn(value);
    std::memcpy(&bits, &half, 2);
  } else {
    const __nv_bfloat16 bf16 = __float2bfloat16_rn(value);
    std::memcpy(&bits, &bf16, 2);
  }
  return bits;
}

inline float from_bits(uint32_t dtype, uint16_t bits) {
  if (is_fp8(dtype)) {
    const __half half(
        __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(bits), dtype == NVB_F8_E4M3 ? __NV_E4M3 : __NV_E5M2));
    return __half2float(half);
  }
  if (dtype == NVB_F16) {
    __half half;
    std::memcpy(static_cast<void*>(&half), &bits, 2);
    return __half2float(half);
  }
  __nv_bfloat16 bf16;
  std::memcpy(static_cast<void*>(&bf16), &bits, 2);
  return __bfloat162float(bf16);
}

constexpr uint16_t kNan = 0x7fff;  // in either dtype of 16 bits; its bytes are NaN in E4M3 and E5M2
constexpr int kGap = 3;            // rows of nobody between sequences

// Memory whose addresses are aligned as those of devices are.
template <typename T>
struct Buffer {
  std::vector<T> storage;
  T* data;
  size_t count;

  Buffer(size_t size, T value) : storage(size + 64, value), count(size) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(storage.data());
    data = storage.data() + ((address + 63) / 64 * 64 - address) / sizeof(T);
  }
};

// Elements of one or two bytes.
struct Elements {
  uint32_t dtype;
  Buffer<uint16_t> buffer;

  Elements(uint32_t its_dtype, size_t count)
      : dtype(its_dtype), buffer(is_fp8(its_dtype) ? (count + 1) / 2 : count, is_fp8(its_dtype) ? 0x7f7f : kNan) {}
  int bytes() const { return is_fp8(dtype) ? 1 : 2; }
  uint8_t* at(int64_t index) const { return reinterpret_cast<uint8_t*>(buffer.data) + index * bytes(); }
  void set(int64_t index, float value) const {
    const uint16_t bits = to_bits(dtype, value);
    std::memcpy(at(index), &bits, static_cast<size_t>(bytes()));
  }
  float get(int64_t index) const {
    uint16_t bits = 0;
    std::memcpy(&bits, at(index), static_cast<size_t>(bytes()));
    return from_bits(dtype, bits);
  }
  std::vector<float> floats() const {
    std::vector<float> all(buffer.count * 2 / static_cast<size_t>(bytes()));
    for (size_t i = 0; i < all.size(); ++i) all[i] = get(static_cast<int64_t>(i));
    return all;
  }
};

// Memory of a case.
struct Region {
  void* data;
  size_t bytes;
};
struct Regions {
  Region query, key, value, output, lse;
  Region table;   // of pages
  Region scales;  // of queries, keys and values, each of every KV head; of FP8
  Region sinks;   // of query heads
  Region slopes;  // of query heads
  Region mask;
  Region mask_tiles;
};

// Runs the kernel on the regions, which the pointers of `p` are; returns what went wrong, or nothing.
using Run = std::function<std::string(const nvb_attention_prefill_params& p, const Case& test, const Regions& regions)>;

// Returns what is wrong, or nothing.
inline std::string check(const Case& test, const Run& run) {
  const int heads_of_key = test.query_heads / test.kv_heads;
  int query_rows = 0, key_tokens = 0, capacity = 0;
  nvb_attention_prefill_params p = {};
  p.sequences = static_cast<int32_t>(test.sequences.size());
  for (const Lengths& lengths : test.sequences) capacity = std::max(capacity, lengths.keys + kGap);
  const int width = test.head_dim;  // of a row of keys and of values
  for (size_t i = 0; i < test.sequences.size(); ++i) {
    const Lengths& lengths = test.sequences[i];
    p.sequence[i] = {query_rows, lengths.queries, test.cache ? static_cast<int>(i) : key_tokens, lengths.keys,
                     -1,         test.prefix};
    query_rows += lengths.queries + kGap;
    key_tokens += lengths.keys + (i + 1 < test.sequences.size() ? kGap : 0);
  }
  // Pages in any order, and as many of nobody.
  const int pages_of_row = test.page_tokens > 0 ? (capacity + test.page_tokens - 1) / test.page_tokens : 0;
  const int page_count = 2 * pages_of_row * p.sequences;
  Buffer<int32_t> table(static_cast<size_t>(pages_of_row * p.sequences), 0);
  if (test.page_tokens > 0) {
    std::vector<int32_t> order(static_cast<size_t>(page_count));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(5));
    std::copy_n(order.begin(), table.count, table.data);
    table.data[1] = page_count;
    for (int i = 0; i < p.sequences; ++i) p.sequence[i].kv_start = i;
    p.placement.pages = table.data;
    p.placement.page_row_stride = pages_of_row;
    p.placement.block_stride = p.placement.value_block_stride = int64_t{test.page_tokens} * test.kv_heads * width;
    p.placement.page_tokens = test.page_tokens, p.placement.page_count = page_count;
  }
  const int kv_rows =
      test.page_tokens > 0
          ? page_count * test.page_tokens * test.kv_heads
          : (test.cache ? static_cast<int>(test.sequences.size()) * capacity : key_tokens) * test.kv_heads;
  const auto size = [](int rows, int columns) { return static_cast<size_t>(rows) * static_cast<size_t>(columns); };
  const Elements query(test.dtype, size(query_rows * test.query_heads, test.head_dim));
  const Elements key(test.dtype, size(kv_rows, width)), value(test.dtype, size(kv_rows, width));
  constexpr uint32_t kUntouched = 0x7fc12345;
  Buffer<uint32_t> output(size(query_rows * test.query_heads, test.value_dim), kUntouched);
  Buffer<float> lse(size(query_rows, test.query_heads), -1e30f);

  Buffer<float> scales(size(3, test.kv_heads), 1.0f);
  for (size_t i = 0; test.scales && i < scales.count; ++i) scales.data[i] = 0.5f + 0.3f * static_cast<float>(i);
  if (test.scales) {
    p.query_scale = scales.data, p.key_scale = scales.data + test.kv_heads;
    p.value_scale = scales.data + 2 * test.kv_heads;
    p.query_scale_stride = p.key_scale_stride = p.value_scale_stride = 1;
  }
  // The last head's counts for nothing.
  Buffer<float> sinks(size(1, test.query_heads), -std::numeric_limits<float>::infinity());
  for (size_t i = 0; i + 1 < sinks.count || i == 0; ++i) sinks.data[i] = 2.0f - 1.5f * static_cast<float>(i);
  if (test.sinks) p.sinks = sinks.data;
  Buffer<float> slopes(size(1, test.query_heads), 0.0f);
  for (size_t i = 0; i < slopes.count; ++i) slopes.data[i] = 0.03f / static_cast<float>(i + 1);
  if (test.slopes) p.slopes = slopes.data;
  if (test.dropout > 0) {
    p.dropout_threshold = static_cast<uint32_t>(test.dropout * 256);
    p.dropout_scale = 256.0f / static_cast<float>(256 - p.dropout_threshold);
    p.dropout_seed = 0x123456789abcdef0u, p.dropout_offset = (uint64_t{3} << 40) + 7;
  }
  const auto is_kept = [&](int64_t row, int head, int key) {
    const uint4 counter = {static_cast<uint32_t>(key / 64 * 4 + key % 8 / 2), static_cast<uint32_t>(row),
                           static_cast<uint32_t>(head) | static_cast<uint32_t>(p.dropout_offset >> 32) << 16,
                           static_cast<uint32_t>(p.dropout_offset)};
    const uint4 words = nvb::philox4x32<7>(
        counter, {static_cast<uint32_t>(p.dropout_seed), static_cast<uint32_t>(p.dropout_seed >> 32)});
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
    const int byte = key % 64 / 8 * 2 + key % 2;
    return (word[byte / 4] >> (byte % 4 * 8) & 0xff) >= p.dropout_threshold;
  };

  // [head, row, key], with keys of the longest sequence; of bits words of 32 keys.
  const int mask_columns = test.mask == NVB_I32 ? (capacity - kGap + 31) / 32 : capacity - kGap;
  const int mask_heads = test.mask_of_heads ? test.query_heads : 1;
  const int64_t mask_elements = test.mask == 0 ? 0 : int64_t{mask_heads} * query_rows * mask_columns;
  Buffer<uint32_t> mask(static_cast<size_t>(std::max<int64_t>(1, mask_elements)), 0);
  const auto mask_at = [&](int head, int64_t row) {
    return ((test.mask_of_heads ? head : 0) * query_rows + row) * mask_columns;
  };
  if (test.mask != 0) {
    p.mask = mask.data, p.mask_dtype = test.mask;
    p.mask_row_stride = p.mask_sequence_stride = mask_columns;
    p.mask_head_stride = test.mask_of_heads ? int64_t{query_rows} * mask_columns : 0;
  }
  std::mt19937 mask_random(11);
  for (int64_t at = 0; at < mask_elements; ++at) {
    const int64_t row = at / mask_columns, column = at % mask_columns;
    // Areas of 128 rows and 128 keys: none, all, some.
    const int64_t kind = (row / 128 * 5 + (test.mask == NVB_I32 ? column / 4 : column / 128)) % 3;
    const uint32_t drawn = static_cast<uint32_t>(mask_random());
    if (test.mask == NVB_I32) {
      mask.data[at] = kind == 0 ? 0 : kind == 1 ? ~0u : drawn & static_cast<uint32_t>(mask_random());
      continue;
    }
    const float number = kind == 0 || drawn % 5 == 0 ? -std::numeric_limits<float>::infinity()
                                                     : static_cast<float>(drawn % 1000) / 250.0f - 2.0f;
    if (test.mask == NVB_F32) {
      std::memcpy(&mask.data[at], &number, 4);
    } else {
      const uint16_t bits = to_bits(test.mask, number);
      std::memcpy(reinterpret_cast<uint16_t*>(mask.data) + at, &bits, 2);
    }
  }
  // What a mask adds to a score.
  const auto mask_of = [&](int head, int64_t row, int key) {
    const int64_t at = mask_at(head, row);
    if (test.mask == NVB_I32) {
      return (mask.data[at + key / 32] >> (key % 32) & 1) != 0 ? 0.0 : -std::numeric_limits<double>::infinity();
    }
    float number;
    std::memcpy(&number, &mask.data[test.mask == NVB_F32 ? at + key : 0], 4);
    if (test.mask != NVB_F32) number = from_bits(test.mask, reinterpret_cast<const uint16_t*>(mask.data)[at + key]);
    return double{number};
  };
  // A word for 32 tiles of 64 keys or more.
  const int tile_words = (capacity + 2047) / 2048;
  Buffer<uint32_t> mask_tiles(size(query_rows * mask_heads * 2, tile_words), 0xdeadbeef);
  if (test.mask == NVB_I32 && test.mask_tiles) p.mask_tiles = mask_tiles.data;
  const auto scale_of = [&](int tensor, int head) { return scales.data[tensor * test.kv_heads + head]; };

  p.query = query.at(0), p.key = key.at(0), p.value = value.at(0), p.output = output.data, p.lse = lse.data;
  p.query_head_stride = test.head_dim;
  p.query_token_stride = int64_t{test.query_heads} * test.head_dim;
  const bool heads_first = test.cache || test.page_tokens > 0;
  p.key_head_stride = p.value_head_stride =
      heads_first ? int64_t{test.cache ? capacity : test.page_tokens} * width : width;
  p.key_token_stride = p.value_token_stride = heads_first ? width : int64_t{test.kv_heads} * width;
  p.key_sequence_stride = p.value_sequence_stride = int64_t{test.cache ? capacity : 1} * test.kv_heads * width;
  p.output_head_stride = test.value_dim;
  p.output_token_stride = int64_t{test.query_heads} * test.value_dim;
  p.query_sequence_stride = p.query_token_stride, p.output_sequence_stride = p.output_token_stride;
  p.lse_sequence_stride = 1;
  p.query_dtype = p.kv_dtype = test.dtype;
  const uint32_t output_dtype = is_fp8(test.dtype) ? test.fp8_output : test.dtype;
  p.output_dtype = test.f32_output ? uint32_t{NVB_F32} : output_dtype;
  p.query_heads = test.query_heads, p.kv_heads = test.kv_heads;
  p.head_dim = test.head_dim, p.value_dim = test.value_dim;
  p.causal = test.causal, p.window = test.window, p.chunk = test.chunk, p.soft_cap = test.soft_cap;
  p.scale = 1.0f / std::sqrt(static_cast<float>(test.head_dim));

  // Where a token of a sequence and head is; -1: nowhere.
  const auto kv_at = [&](const nvb_attention_sequence& sequence, int head, int token) {
    const int64_t of_head = head * p.key_head_stride;
    if (test.page_tokens == 0) {
      return sequence.kv_start * p.key_sequence_stride + of_head + token * p.key_token_stride;
    }
    const int page = table.data[sequence.kv_start * pages_of_row + token / test.page_tokens];
    if (page >= page_count) return int64_t{-1};
    return page * p.placement.block_stride + of_head + token % test.page_tokens * p.key_token_stride;
  };

  // Rows of the sequences are random, all others stay NaN.
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  const auto fill = [&](const Elements& to, int64_t start, int columns, float spread) {
    for (int i = 0; i < columns; ++i) to.set(start + i, spread * normal(random));
  };
  for (int i = 0; i < p.sequences; ++i) {
    const nvb_attention_sequence& sequence = p.sequence[i];
    for (int row = 0; row < sequence.query_count * test.query_heads; ++row) {
      fill(query, sequence.query_start * p.query_token_stride + row * test.head_dim, test.head_dim, test.spread);
    }
    for (int token = 0; token < sequence.kv_length; ++token) {
      for (int head = 0; head < test.kv_heads; ++head) {
        const int64_t at = kv_at(sequence, head, token);
        if (at < 0) continue;
        fill(key, at, test.head_dim, 1);
        fill(value, at, test.value_dim, 1);
      }
    }
  }

  const Regions regions = {{query.at(0), query.buffer.count * 2},
                           {key.at(0), key.buffer.count * 2},
                           {value.at(0), value.buffer.count * 2},
                           {output.data, output.count * 4},
                           {lse.data, lse.count * 4},
                           {table.data, table.count * 4},
                           {scales.data, scales.count * 4},
                           {sinks.data, sinks.count * 4},
                           {slopes.data, slopes.count * 4},
                           {mask.data, mask.count * 4},
                           {mask_tiles.data, mask_tiles.count * 4}};
  const std::string failed = run(p, test, regions);
  if (!failed.empty()) return failed;

  const std::vector<float> queries = query.floats(), keys = key.floats(), values = value.floats();
  double difference = 0, norm = 0, worst_lse = 0;
  std::vector<double> scores, expected(static_cast<size_t>(test.value_dim));
  std::vector<bool> is_row(static_cast<size_t>(query_rows), false);
  for (int i = 0; i < p.sequences; ++i) {
    const nvb_attention_sequence& sequence = p.sequence[i];
    for (int row = 0; row < sequence.query_count; ++row) {
      const int64_t token = sequence.query_start + row;
      is_row[static_cast<size_t>(token)] = true;
      const int position = sequence.kv_length - sequence.query_count + row;
      for (int head = 0; head < test.query_heads; ++head) {
        const int64_t q = token * p.query_token_stride + head * p.query_head_stride;
        const int kv_head = head / heads_of_key;
        scores.clear();
        std::vector<int> seen;
        double maximum = -std::numeric_limits<double>::infinity();
        for (int k = 0; k < sequence.kv_length; ++k) {
          if (test.causal && k > std::max(position, test.prefix - 1)) break;
          if (test.window > 0 && std::abs(position - k) >= test.window) continue;
          if (test.chunk > 0 && (position < 0 || k / test.chunk != position / test.chunk)) continue;
          double score = 0;
          const int64_t at = kv_at(sequence, kv_head, k);
          for (int d = 0; at >= 0 && d < test.head_dim; ++d) {
            score += static_cast<double>(queries[static_cast<size_t>(q + d)]) * keys[static_cast<size_t>(at + d)];
          }
          score *= static_cast<double>(p.scale) * scale_of(0, kv_head) * scale_of(1, kv_head);
          if (test.soft_cap > 0) score = test.soft_cap * std::tanh(score / test.soft_cap);
          if (test.slopes) score -= double{slopes.data[head]} * std::abs(position - k);
          if (test.mask != 0) score += mask_of(head, token, k);
          if (score == -std::numeric_limits<double>::infinity()) continue;
          scores.push_back(score);
          seen.push_back(k);
          maximum = std::max(maximum, score);
        }
        double sum = 0;
        if (test.sinks) {
          const double sink = sinks.data[head];
          maximum = std::max(maximum, sink);
          if (std::isfinite(sink)) sum = std::exp(sink - maximum);
        }
        std::fill(expected.begin(), expected.end(), 0.0);
        for (size_t k = 0; k < scores.size(); ++k) {
          const double p_k = std::exp(scores[k] - maximum);
          sum += p_k;
          if (test.dropout > 0 && !is_kept(token, head, seen[k])) continue;
          const double weight = test.dropout > 0 ? p_k * double{p.dropout_scale} : p_k;
          const int64_t of_value = kv_at(sequence, kv_head, seen[k]);
          for (int d = 0; of_value >= 0 && d < test.value_dim; ++d) {
            expected[static_cast<size_t>(d)] +=
                weight * scale_of(2, kv_head) * values[static_cast<size_t>(of_value + d)];
          }
        }
        const int64_t at = token * p.output_token_stride + head * p.output_head_stride;
        for (int d = 0; d < test.value_dim; ++d) {
          const double right = sum == 0 ? 0 : expected[static_cast<size_t>(d)] / sum;
          const float given = test.f32_output
                                  ? reinterpret_cast<const float*>(output.data)[at + d]
                                  : from_bits(output_dtype, reinterpret_cast<const uint16_t*>(output.data)[at + d]);
          // A NaN makes the sum one.
          difference += (given - right) * (given - right);
          norm += right * right;
        }
        const double given = lse.data[token * test.query_heads + head];
        const double right = sum == 0 ? -std::numeric_limits<double>::infinity() : maximum + std::log(sum);
        if (std::isinf(right) ? given != right : !(std::abs(given - right) <= 1e9)) return "lse";
        if (!std::isinf(right)) worst_lse = std::max(worst_lse, std::abs(given - right));
      }
    }
  }
  const size_t row_bytes = size(test.query_heads, test.value_dim) * (test.f32_output ? 4 : 2);
  const uint8_t* const written = reinterpret_cast<const uint8_t*>(output.data);
  for (size_t row = 0; row < is_row.size(); ++row) {
    if (is_row[row]) continue;
    for (size_t byte = row * row_bytes; byte < (row + 1) * row_bytes; ++byte) {
      if (written[byte] != reinterpret_cast<const uint8_t*>(&kUntouched)[byte % 4])
        return "a row of nobody was written";
    }
    for (int head = 0; head < test.query_heads; ++head) {
      if (lse.data[row * static_cast<size_t>(test.query_heads) + static_cast<size_t>(head)] != -1e30f) {
        return "an lse of nobody was written";
      }
    }
  }
  const double error = norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
  // FP8: weights have four bits, but that of equal scores is a power of two; and the tensor cores add with 14 bits.
  const double bound = test.dtype == NVB_F16 ? 1e-3 : !is_fp8(test.dtype) || test.spread == 0 ? 5e-3 : 4e-2;
  const double lse_bound = is_fp8(test.dtype) ? 5e-3 * std::max(1.0f, test.spread / 3) : 1e-4;
  char text[128];
  std::snprintf(text, sizeof text, "error %.2e (bound %.0e), lse %.1e", error, bound, worst_lse);
  return error <= bound && worst_lse <= lse_bound ? std::string() : std::string(text);
}

}  // namespace attention_cases

#endif  // NVBACKEND_TESTS_GPU_ATTENTION_PREFILL_CHECK_H
