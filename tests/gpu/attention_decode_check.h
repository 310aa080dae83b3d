// Checks the variants of attention_decode_variants.h beside the formula in f64.
#ifndef NVBACKEND_TESTS_GPU_ATTENTION_DECODE_CHECK_H
#define NVBACKEND_TESTS_GPU_ATTENTION_DECODE_CHECK_H

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "attention_decode_cases.h"
#include "attention_decode_variants.h"

namespace decode_test {

// What the grid in front of a decode writes late, while the decode may already have begun.
struct Late {
  void* to;
  const void* from;  // null: NaN of any dtype
  int bytes;
};
__global__ void write_late(const Late* late, int count, int microseconds) {
  begin_overlapped();
  for (int i = 0; i < microseconds; ++i) __nanosleep(1000);
  for (int i = blockIdx.x; i < count; i += gridDim.x) {
    for (int at = threadIdx.x; at < late[i].bytes; at += blockDim.x) {
      static_cast<uint8_t*>(late[i].to)[at] =
          late[i].from != nullptr ? static_cast<const uint8_t*>(late[i].from)[at] : 0xff;
    }
  }
}

template <typename T>
T* to_device(const std::vector<T>& host) {
  T* device = nullptr;
  MUST(cudaMalloc(&device, std::max<size_t>(host.size() * sizeof(T), 16)));
  MUST(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return device;
}

inline std::string check_one(const Variant* variant, uint32_t constant, int d, const Case& test,
                             const Workspace& workspace) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  const int n = static_cast<int>(test.lengths.size());
  int longest = 1;
  for (int length : test.lengths) longest = std::max(longest, length);
  const int capacity = longest + 3;
  const int slot_count = test.slots ? n + 2 : n;
  const int entries = test.page_tokens > 0 ? (capacity + test.page_tokens - 1) / test.page_tokens : 0;
  const int page_count = test.page_tokens > 0 ? entries * slot_count + 3 : 0;
  const int places = test.ring > 0 ? test.ring : capacity;
  const size_t rows = test.page_tokens > 0 ? size_t(page_count) * test.kv_heads * test.page_tokens
                                           : size_t(slot_count) * test.kv_heads * places;
  const bool fp8 = variant != nullptr && variant->fp8;
  const bool e5m2 = variant != nullptr && variant->e5m2;
  const size_t es = fp8 ? 1 : 2;
  std::vector<uint8_t> key(rows * d * es), value(rows * d * es);
  const auto put = [&](std::vector<uint8_t>& to, size_t at, float f) {
    if (e5m2) {
      to[at] = __nv_fp8_e5m2(f).__x;
    } else if (fp8) {
      to[at] = __nv_fp8_e4m3(f).__x;
    } else {
      const __nv_bfloat16 b = __float2bfloat16_rn(f);
      std::memcpy(to.data() + at * 2, &b, 2);
    }
  };
  const auto get = [&](const std::vector<uint8_t>& from, size_t at) {
    if (e5m2) {
      __nv_fp8_e5m2 f;
      f.__x = from[at];
      return float(f);
    }
    if (fp8) {
      __nv_fp8_e4m3 f;
      f.__x = from[at];
      return float(f);
    }
    __nv_bfloat16 b;
    std::memcpy(&b, from.data() + at * 2, 2);
    return __bfloat162float(b);
  };
  for (size_t i = 0; i < rows * d; ++i) put(key, i, NAN), put(value, i, NAN);
  std::vector<int32_t> table(std::max(1, entries * slot_count)), positions(n * test.rows), slots(n);
  std::vector<int> order(std::max(1, page_count));
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  std::shuffle(order.begin(), order.end(), random);
  for (size_t i = 0; i < table.size() && entries > 0; ++i) table[i] = order[i];
  if (test.bad_pages) {
    for (size_t i = 0; i < table.size(); i += 3) table[i] = i % 2 ? -1 : page_count + 5;
  }
  for (int i = 0; i < n; ++i) {
    for (int r = 0; r < test.rows; ++r) positions[i * test.rows + r] = test.lengths[i] - test.rows + r;
    if (test.rows > 1) positions[i * test.rows] = -1;  // not needed
    slots[i] = test.slots ? (i * 5 + 3) % slot_count : i;
  }
  if (test.slots && n > 1) slots[n - 1] = slot_count;  // outside
  nvb_attention_decode_params p = {};
  p.rows_per_sequence = test.rows, p.query_heads = test.query_heads, p.kv_heads = test.kv_heads,
  p.head_dim = p.value_dim = d;
  p.sequences = n, p.slot_count = slot_count, p.capacity = capacity, p.max_kv_length = longest;
  p.window = test.window, p.soft_cap = test.soft_cap, p.scale = 0.7f / std::sqrt(float(d));
  p.query_dtype = test.query_dtype, p.kv_dtype = NVB_BF16, p.output_dtype = test.output_dtype;
  p.key_token_stride = p.value_token_stride = d;
  p.query_head_stride = d, p.query_token_stride = int64_t{d} * test.query_heads;
  p.output_head_stride = d, p.output_token_stride = int64_t{d} * test.query_heads;
  if (test.page_tokens > 0) {
    p.key_head_stride = p.value_head_stride = int64_t{test.page_tokens} * d;
    p.placement.page_row_stride = entries, p.placement.block_stride = int64_t{test.kv_heads} * test.page_tokens * d;
    p.placement.page_tokens = test.page_tokens, p.placement.page_count = page_count;
  } else {
    p.key_head_stride = p.value_head_stride = int64_t{places} * d;
    p.key_sequence_stride = p.value_sequence_stride = int64_t{test.kv_heads} * places * d;
    if (test.ring > 0) p.placement.ring_tokens = test.ring, p.placement.block_stride = 256 * d;
  }
  if (test.token_major) {  // [page or sequence, token, head, column]
    std::swap(p.key_head_stride, p.key_token_stride), std::swap(p.value_head_stride, p.value_token_stride);
    p.key_head_stride = p.value_head_stride = d;
    p.key_token_stride = p.value_token_stride = int64_t{test.kv_heads} * d;
    if (test.ring > 0) p.placement.block_stride = 256 * p.key_token_stride;
  }
  // Offset of a token's row, or -1.
  const auto row_of = [&](int sequence, int head, int token) -> int64_t {
    const int slot = slots[sequence];
    if (test.page_tokens > 0) {
      const int page = table[slot * entries + token / test.page_tokens];
      if (page < 0 || page >= page_count) return -1;
      if (test.token_major)
        return ((int64_t{page} * test.page_tokens + token % test.page_tokens) * test.kv_heads + head) * d;
      return ((int64_t{page} * test.kv_heads + head) * test.page_tokens + token % test.page_tokens) * d;
    }
    const int place = test.ring > 0 ? token % test.ring : token;
    if (test.token_major) return ((int64_t{slot} * places + place) * test.kv_heads + head) * d;
    return ((int64_t{slot} * test.kv_heads + head) * places + place) * d;
  };
  std::vector<float> query_f(size_t(n) * test.rows * test.query_heads * d);
  std::vector<__nv_bfloat16> query_b(query_f.size());
  for (size_t i = 0; i < query_f.size(); ++i) {
    query_f[i] = normal(random) * 2;
    query_b[i] = __float2bfloat16_rn(query_f[i]);
    if (test.query_dtype != NVB_F32) query_f[i] = __bfloat162float(query_b[i]);
  }
  const auto first_of = [&](int length) { return test.window > 0 ? std::max(0, length - test.window) : 0; };
  const auto length_of = [&](int i) { return slots[i] >= slot_count ? 0 : std::max(0, test.lengths[i]); };
  for (int i = 0; i < n; ++i) {
    for (int h = 0; h < test.kv_heads; ++h) {
      for (int t = first_of(length_of(i) - test.rows + 1); t < length_of(i); ++t) {
        const int64_t row = row_of(i, h, t);
        for (int c = 0; c < d && row >= 0; ++c) {
          put(key, row + c, normal(random));
          put(value, row + c, normal(random) + 0.3f);
        }
      }
    }
  }
  const float* const dq = to_device(query_f);
  const __nv_bfloat16* const dqb = to_device(query_b);
  p.query = test.query_dtype == NVB_F32 ? static_cast<const void*>(dq) : dqb;
  p.key = to_device(key), p.value = to_device(value), p.positions = to_device(positions);
  p.slots = test.slots ? to_device(slots) : nullptr;
  p.placement.pages = test.page_tokens > 0 ? to_device(table) : nullptr;
  std::vector<float> key_scales(test.kv_heads, 1.0f), value_scales(key_scales);
  for (int h = 0; h < test.kv_heads && test.scaled; ++h) key_scales[h] = 0.4f + 0.3f * h, value_scales[h] = 3.0f - h;
  p.key_scale = test.scaled ? to_device(key_scales) : nullptr;
  p.value_scale = test.scaled ? to_device(value_scales) : nullptr;
  const size_t count = query_f.size();
  std::vector<uint32_t> poison(count, 0x7fc12345);
  std::vector<float> lse_poison(count / d, -1e30f), lse(lse_poison), out(count), first;
  p.output = to_device(poison);
  p.lse = to_device(lse_poison);
  p.placement.value_block_stride = p.placement.block_stride;
  cudaStream_t stream;
  MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const nvb_launch launch = gpu::device_launch(stream);
  // Queries, and the newest keys and values where those are not constant, come from a grid that the decode overtakes.
  std::vector<Late> late, poisoned;
  void *query_copy, *key_copy, *value_copy;
  const size_t query_row = size_t(d) * (test.query_dtype == NVB_F32 ? 4 : 2), cache_bytes = rows * d * es;
  MUST(cudaMalloc(&query_copy, n * test.rows * test.query_heads * query_row));
  MUST(cudaMalloc(&key_copy, cache_bytes + 16));
  MUST(cudaMalloc(&value_copy, cache_bytes + 16));
  MUST(cudaMemcpy(query_copy, p.query, n * test.rows * test.query_heads * query_row, cudaMemcpyDeviceToDevice));
  MUST(cudaMemcpy(key_copy, p.key, cache_bytes, cudaMemcpyDeviceToDevice));
  MUST(cudaMemcpy(value_copy, p.value, cache_bytes, cudaMemcpyDeviceToDevice));
  const auto comes_late = [&](const void* to, const void* from, size_t offset, size_t bytes) {
    late.push_back({const_cast<char*>(static_cast<const char*>(to)) + offset, static_cast<const char*>(from) + offset,
                    static_cast<int>(bytes)});
    poisoned.push_back({late.back().to, nullptr, static_cast<int>(bytes)});
  };
  for (int i = 0; i < n * test.rows * test.query_heads; ++i) comes_late(p.query, query_copy, i * query_row, query_row);
  // Late positions are -1 at first: whoever has found its part by then must find it again.
  int32_t *position_copy = to_device(positions), *slot_copy = to_device(slots);
  if ((constant & NVB_CONSTANT_POSITIONS) == 0) {
    comes_late(p.positions, position_copy, 0, positions.size() * 4);
    if (test.slots) comes_late(p.slots, slot_copy, 0, slots.size() * 4);
  }
  for (int i = 0; i < n * test.rows && (constant & NVB_CONSTANT_KEYS) == 0; ++i) {
    for (int h = 0; h < test.kv_heads && positions[i] >= 0 && slots[i / test.rows] < slot_count; ++h) {
      const int64_t row = row_of(i / test.rows, h, positions[i]);
      if (row < 0) continue;
      comes_late(p.key, key_copy, row * es, d * es);
      comes_late(p.value, value_copy, row * es, d * es);
    }
  }
  Late *const late_list = to_device(late), *const poisoned_list = to_device(poisoned);
  std::string wrong;
  for (int round = 0; round < test.rounds && wrong.empty(); ++round) {
    MUST(cudaMemcpy(p.output, poison.data(), count * 4, cudaMemcpyHostToDevice));
    MUST(cudaMemset(workspace.data, 0xff, 4 << 20));
    MUST(cudaDeviceSynchronize());  // the stream does not wait for the default one
    write_late<<<32, 256, 0, stream>>>(poisoned_list, static_cast<int>(poisoned.size()), 0);
    MUST(cudaStreamSynchronize(stream));
    MUST(launch_overlapped(write_late, dim3(32), dim3(256), 0, &launch, late_list, static_cast<int>(late.size()), 20));
    cudaError_t error = variant != nullptr ? launch_new(*variant, p, workspace, test.blocks, launch)
                                           : launch_old(p, workspace, constant, launch);
    if (error != cudaSuccess) wrong = cudaGetErrorString(error);
    MUST(cudaDeviceSynchronize());
    MUST(cudaMemcpy(out.data(), p.output, count * 4, cudaMemcpyDeviceToHost));
    if (round == 0) first = out;
    if (std::memcmp(first.data(), out.data(), count * 4) != 0) wrong = "two runs differ";
  }
  MUST(cudaMemcpy(lse.data(), p.lse, lse.size() * 4, cudaMemcpyDeviceToHost));
  for (const void* q :
       {static_cast<const void*>(dq), static_cast<const void*>(dqb), p.key, p.value,
        static_cast<const void*>(p.positions), static_cast<const void*>(p.slots),
        static_cast<const void*>(p.placement.pages), static_cast<const void*>(p.output),
        static_cast<const void*>(p.lse), static_cast<const void*>(p.key_scale), static_cast<const void*>(query_copy),
        static_cast<const void*>(key_copy), static_cast<const void*>(value_copy), static_cast<const void*>(late_list),
        static_cast<const void*>(poisoned_list), static_cast<const void*>(position_copy),
        static_cast<const void*>(slot_copy), static_cast<const void*>(p.value_scale)}) {
    MUST(cudaFree(const_cast<void*>(q)));
  }
  MUST(cudaStreamDestroy(stream));
  if (!wrong.empty()) return wrong;
  const int group = test.query_heads / test.kv_heads;
  double error = 0, norm = 0;
  for (int i = 0; i < n * test.rows; ++i) {
    const int length = slots[i / test.rows] >= slot_count ? 0 : std::max(0, positions[i] + 1);
    for (int h = 0; h < test.query_heads; ++h) {
      std::vector<double> s;
      std::vector<double> o(d);
      double most = -INFINITY;
      for (int t = first_of(length); t < length; ++t) {
        const int64_t row = row_of(i / test.rows, h / group, t);
        double dot = 0;
        for (int c = 0; c < d && row >= 0; ++c) {
          dot +=
              double(query_f[(size_t(i) * test.query_heads + h) * d + c]) * get(key, row + c) * key_scales[h / group];
        }
        dot *= p.scale;
        if (test.soft_cap > 0) dot = test.soft_cap * std::tanh(dot / test.soft_cap);
        s.push_back(dot), most = std::max(most, dot);
      }
      double sum = 0;
      for (size_t j = 0; j < s.size(); ++j) {
        const double weight = std::exp(s[j] - most);
        sum += weight;
        const int64_t row = row_of(i / test.rows, h / group, first_of(length) + static_cast<int>(j));
        for (int c = 0; c < d && row >= 0; ++c) o[c] += weight * get(value, row + c) * value_scales[h / group];
      }
      const double expected_lse = s.empty() ? -INFINITY : most + std::log(sum);
      const float got = lse[size_t(i) * test.query_heads + h];
      if (s.empty() ? got != -INFINITY
                    : !(std::abs(got - expected_lse) < 1e-4 * std::max(1.0, std::abs(expected_lse)))) {
        char text[200];
        std::snprintf(text, sizeof text, "lse of sequence %d head %d: %g, expected %g", i, h, got, expected_lse);
        return text;
      }
      for (int c = 0; c < d; ++c) {
        const double expected = s.empty() ? 0 : o[c] / sum;
        const double difference = out[(size_t(i) * test.query_heads + h) * d + c] - expected;
        if (s.empty() && difference != 0) return "an empty row is not zero";
        error += difference * difference, norm += expected * expected;
      }
    }
  }
  const double relative = norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
  if (!(relative < 2e-4)) {
    char text[200];
    std::snprintf(text, sizeof text, "relative error %g", relative);
    return text;
  }
  return "";
}

// Every variant asked for, and "8.0", the kernel of 8.0, which has no scales.
inline int check(const std::string& filter) {
  Workspace workspace;
  int failures = 0, runs = 0;
  const auto check_all = [&](const Variant* variant, uint32_t constant, const char* name, int d) {
    for (const Case& test : cases()) {
      if (variant == nullptr && test.scaled) continue;
      ++runs;
      const std::string wrong = check_one(variant, constant, d, test, workspace);
      if (wrong.empty()) continue;
      ++failures;
      std::printf("WRONG %s, d %d, %s: %s\n", name, d, test.name.c_str(), wrong.c_str());
    }
  };
  for (const Variant& variant : kVariants) {
    if (is_asked(variant, filter)) check_all(&variant, variant.options.constant, variant.name, variant.head_dim);
  }
  for (const int d : {64, 128, 256}) {
    if (filter.empty() || filter == "=8.0") check_all(nullptr, 0, "8.0", d);
    if (filter.empty() || filter == "=8.0 old") check_all(nullptr, kOldConstant, "8.0 old", d);
    if (filter.empty() || filter == "=8.0 K") check_all(nullptr, kKeysConstant, "8.0 K", d);
  }
  std::printf("check: %d runs, %d failures\n", runs, failures);
  return failures;
}

}  // namespace decode_test

#endif
