// The decode attention that rotates and appends its new token, on a device: its results beside those of a rope kernel
// and a decode kernel, and its speed beside theirs between products, as CUDA graphs with programmatic dependent launch.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "common/constant_reads.h"
#include "common/mma.cuh"
#include "common/programmatic_launch.cuh"
#include "common/vector.cuh"
#include "device.h"
#include "rope/rope.h"

namespace {

using gpu::device_launch;

// ---- a decode as src/cuda/attention_plan.rs plans it ----
struct Workspace {
  unsigned char* data;
  uint32_t* counters;
  Workspace() {
    MUST(cudaMalloc(&data, 64 << 20));
    MUST(cudaMalloc(&counters, 16 << 20));
    MUST(cudaMemset(counters, 0, 16 << 20));
  }
};

// The kernel that ran, or null.
const char* decode(nvb_attention_decode_params p, const Workspace& workspace, const nvb_launch& launch,
                   int most_passes = 0) {
  p.workspace = workspace.data, p.counters = workspace.counters;
  for (int row = 0;; ++row) {
    const char* const name = nvb_cuda_attention_decode_kernel_at(row);
    nvb_attention_decode_shape shape;
    if (name == nullptr) return nullptr;
    if (!nvb_cuda_attention_decode_kernel_supports(row, &p, &launch, &shape)) continue;
    const int items = p.query_heads / p.kv_heads;
    p.chunks = (items + shape.heads_per_block - 1) / shape.heads_per_block;
    p.heads_per_chunk = (items + p.chunks - 1) / p.chunks;
    const int blocks = p.sequences * p.kv_heads * p.chunks;
    const int visible = std::max(1, p.window > 0 ? std::min(p.window, p.max_kv_length) : p.max_kv_length);
    p.slots_per_head = 0;
    if (shape.min_tiles == 0) {
      p.splits = std::min(blocks * ((visible + shape.keys - 1) / shape.keys), launch.multiprocessors);
    } else if (shape.cluster > 0) {
      const int passes = (visible + shape.keys - 1) / shape.keys;
      const int most = std::min(launch.multiprocessors / blocks, shape.cluster);
      if (passes > std::max(shape.passes, most_passes) * most) continue;
      p.splits = std::min(passes, most);
    } else {
      const int most = std::min((visible + shape.keys * shape.min_tiles - 1) / (shape.keys * shape.min_tiles), 256);
      p.splits = std::max(1, std::min(most, 2 * launch.multiprocessors / blocks));
      p.slots_per_head = p.splits > 1 ? p.splits + (p.splits + 15) / 16 : 0;
    }
    MUST(nvb_cuda_attention_decode_launch(row, &p, &launch));
    return name;
  }
}

struct Case {
  std::string name;
  std::vector<int> lengths;  // with the new token
  int query_heads = 4, kv_heads = 1, dim = 256;
  int window = 0, ring = 0, page_tokens = 0, max_kv_length = 0;
  float soft_cap = 0;
  bool regular = false;  // a cache of numbers that are quick to make
  bool f16 = false, norms = true, f32_norms = false, slots = false, bad_pages = false, bf16_output = false;
  int rotary_dim = -1;  // dim
  float query_scale = 1, position_scale = 1;
};

template <typename T>
T* to_device(const std::vector<T>& host) {
  T* device = nullptr;
  MUST(cudaMalloc(&device, std::max<size_t>(host.size() * sizeof(T), 16)));
  MUST(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return device;
}

uint16_t narrow(bool f16, float x) {
  uint16_t bits;
  if (f16) {
    const __half h = __float2half_rn(x);
    std::memcpy(&bits, &h, 2);
  } else {
    const __nv_bfloat16 b = __float2bfloat16_rn(x);
    std::memcpy(&bits, &b, 2);
  }
  return bits;
}

// The tensors of a case, and both forms of the call.
struct Set {
  nvb_rope_params rope = {};
  nvb_attention_decode_params separate = {};
  nvb_attention_decode_rope fields = {};
  nvb_attention_decode_params fused = {};
  std::vector<uint16_t> qkv, cache;
  size_t cache_elements = 0;
  std::vector<void*> owned;

  template <typename T>
  T* own(T* pointer) {
    owned.push_back(const_cast<void*>(static_cast<const void*>(pointer)));
    return pointer;
  }
  void release() {
    for (void* pointer : owned) MUST(cudaFree(pointer));
  }

  explicit Set(const Case& test) {
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    const int n = static_cast<int>(test.lengths.size()), d = test.dim;
    int longest = 1;
    for (int length : test.lengths) longest = std::max(longest, length);
    const int max_kv_length = std::max(test.max_kv_length, longest);
    const int capacity = max_kv_length + 5;
    const int slot_count = test.slots ? n + 2 : n;
    const int entries = test.page_tokens > 0 ? (capacity + test.page_tokens - 1) / test.page_tokens : 0;
    const int page_count = entries * slot_count + 3;
    const int places = test.ring > 0 ? test.ring : capacity;
    const size_t rows = test.page_tokens > 0 ? size_t(page_count) * test.kv_heads * test.page_tokens
                                             : size_t(slot_count) * test.kv_heads * places;
    cache_elements = rows * d;
    cache.resize(2 * cache_elements);
    for (size_t i = 0; i < cache.size(); ++i) cache[i] = narrow(test.f16, NAN);
    std::vector<int32_t> table(std::max(1, entries * slot_count)), positions(n), slots(n);
    std::vector<int> order(page_count);
    for (int i = 0; i < page_count; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    for (size_t i = 0; i < table.size() && entries > 0; ++i) table[i] = order[i];
    if (test.bad_pages) {
      for (size_t i = 0; i < table.size(); i += 3) table[i] = i % 2 ? -1 : page_count + 5;
    }
    for (int i = 0; i < n; ++i)
      positions[i] = test.lengths[i] - 1, slots[i] = test.slots ? (i * 5 + 3) % slot_count : i;
    if (test.slots && n > 1) slots[n - 1] = slot_count;  // outside
    if (test.regular) {
      // BF16 of 0.5 to 1 and either sign.
      for (size_t i = 0; i < cache.size(); ++i) {
        const uint32_t bits = static_cast<uint32_t>(i) * 2654435761u >> 16;
        cache[i] = static_cast<uint16_t>(0x3f00 | (bits & 0x807f));
      }
    }
    // Older tokens of the cache.
    for (int i = 0; i < n && !test.regular; ++i) {
      if (slots[i] >= slot_count) continue;
      for (int h = 0; h < test.kv_heads; ++h) {
        const int oldest = test.ring > 0 ? std::max(0, test.lengths[i] - test.ring) : 0;
        for (int t = oldest; t < test.lengths[i] - 1; ++t) {
          int64_t row;
          if (test.page_tokens > 0) {
            const int page = table[slots[i] * entries + t / test.page_tokens];
            if (page < 0 || page >= page_count) continue;
            row = (int64_t{page} * test.kv_heads + h) * test.page_tokens + t % test.page_tokens;
          } else {
            row = (int64_t{slots[i]} * test.kv_heads + h) * places + (test.ring > 0 ? t % test.ring : t);
          }
          for (int c = 0; c < d; ++c) {
            cache[row * d + c] = narrow(test.f16, normal(random));
            cache[cache_elements + row * d + c] = narrow(test.f16, normal(random) + 0.3f);
          }
        }
      }
    }
    const int width = (test.query_heads + 2 * test.kv_heads) * d;
    qkv.resize(size_t(n) * width);
    for (uint16_t& x : qkv) x = narrow(test.f16, normal(random) * 3);
    std::vector<uint16_t> norms(2 * d);
    std::vector<float> wide_norms(2 * d);
    for (int i = 0; i < 2 * d; ++i) wide_norms[i] = normal(random) * 0.3f, norms[i] = narrow(test.f16, wide_norms[i]);
    uint16_t* const row = own(to_device(qkv));
    uint16_t* const kv = own(to_device(cache));
    const void* const factors = test.f32_norms ? static_cast<const void*>(own(to_device(wide_norms)))
                                               : static_cast<const void*>(own(to_device(norms)));
    const void* const key_factors = static_cast<const char*>(factors) + size_t(d) * (test.f32_norms ? 4 : 2);
    const uint32_t dtype = test.f16 ? NVB_F16 : NVB_BF16;

    nvb_attention_decode_params& p = separate;
    p.rows_per_sequence = 1, p.query_heads = test.query_heads, p.kv_heads = test.kv_heads, p.head_dim = p.value_dim = d;
    p.sequences = n, p.slot_count = slot_count, p.capacity = capacity, p.max_kv_length = max_kv_length;
    p.window = test.window, p.soft_cap = test.soft_cap, p.scale = 1 / std::sqrt(float(d));
    p.query_dtype = p.kv_dtype = dtype, p.output_dtype = test.bf16_output ? NVB_BF16 : NVB_F32;
    p.query = row, p.key = kv, p.value = kv + cache_elements;
    p.positions = own(to_device(positions)), p.slots = test.slots ? own(to_device(slots)) : nullptr;
    p.query_token_stride = width, p.query_head_stride = d;
    p.output_token_stride = int64_t{test.query_heads} * d, p.output_head_stride = d;
    p.key_token_stride = p.value_token_stride = d;
    if (test.page_tokens > 0) {
      p.key_head_stride = p.value_head_stride = int64_t{test.page_tokens} * d;
      p.placement.pages = own(to_device(table));
      p.placement.page_row_stride = entries, p.placement.block_stride = int64_t{test.kv_heads} * test.page_tokens * d;
      p.placement.page_tokens = test.page_tokens, p.placement.page_count = page_count;
    } else {
      p.key_head_stride = p.value_head_stride = int64_t{places} * d;
      p.key_sequence_stride = p.value_sequence_stride = int64_t{test.kv_heads} * places * d;
      if (test.ring > 0) p.placement.ring_tokens = test.ring, p.placement.block_stride = 256 * d;
    }
    p.placement.value_block_stride = p.placement.block_stride;
    p.output = own(to_device(std::vector<float>(size_t(n) * test.query_heads * d, NAN)));
    p.lse = own(to_device(std::vector<float>(size_t(n) * test.query_heads, NAN)));

    rope.query = rope.query_output = row;
    rope.key = row + test.query_heads * d, rope.value = row + (test.query_heads + test.kv_heads) * d;
    rope.query_norm = test.norms ? factors : nullptr, rope.key_norm = test.norms ? key_factors : nullptr;
    rope.key_cache = kv, rope.value_cache = kv + cache_elements;
    rope.positions = p.positions;
    rope.slots = p.slots;
    if (rope.slots == nullptr) {
      std::vector<int32_t> all(n);
      for (int i = 0; i < n; ++i) all[i] = i;
      rope.slots = own(to_device(all));
    }
    rope.query_token_stride = rope.key_token_stride = rope.value_token_stride = rope.query_output_token_stride = width;
    rope.query_head_stride = rope.key_head_stride = rope.value_head_stride = rope.query_output_head_stride = d;
    rope.cache_slot_stride = p.key_sequence_stride, rope.cache_head_stride = p.key_head_stride;
    rope.cache_token_stride = d;
    rope.query_dtype = rope.key_dtype = rope.value_dtype = rope.query_output_dtype = rope.cache_dtype = dtype;
    rope.key_output_dtype = NVB_F32;
    rope.query_norm_dtype = rope.key_norm_dtype = test.f32_norms ? NVB_F32 : dtype;
    rope.tokens = n, rope.query_heads = test.query_heads, rope.kv_heads = test.kv_heads, rope.head_dim = d;
    rope.rotary_dim = test.rotary_dim < 0 ? d : test.rotary_dim;
    rope.slot_count = slot_count, rope.capacity = capacity;
    rope.base = 1e4f, rope.position_scale = test.position_scale, rope.query_scale = test.query_scale;
    rope.epsilon = 1e-6f, rope.weight_offset = 1;
    rope.placement = p.placement;

    fields = {rope.key,
              rope.value,
              rope.query_norm,
              rope.key_norm,
              width,
              d,
              width,
              d,
              dtype,
              dtype,
              rope.query_norm_dtype,
              rope.key_norm_dtype,
              rope.rotary_dim,
              rope.base,
              rope.position_scale,
              rope.query_scale,
              rope.epsilon,
              rope.weight_offset};
    fused = separate;
  }

  void fill() {
    MUST(cudaMemcpy(const_cast<void*>(separate.query), qkv.data(), qkv.size() * 2, cudaMemcpyHostToDevice));
    MUST(cudaMemcpy(const_cast<void*>(separate.key), cache.data(), cache.size() * 2, cudaMemcpyHostToDevice));
  }
  template <typename T>
  std::vector<T> read(const void* from, size_t count) {
    std::vector<T> values(count);
    MUST(cudaMemcpy(values.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }
};

double off(const std::vector<float>& one, const std::vector<float>& other) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < one.size(); ++i) {
    if (std::isinf(one[i]) && one[i] == other[i]) continue;
    error += (double(one[i]) - other[i]) * (double(one[i]) - other[i]), norm += double(one[i]) * one[i];
  }
  return norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
}

std::string check_one(const Case& test, uint32_t constant, const Workspace& workspace) {
  Set set(test);
  const nvb_launch launch = device_launch(nullptr);
  const size_t outputs = size_t(set.separate.sequences) * test.query_heads * test.dim;
  nvb_cuda_set_constant_reads(constant);
  MUST(nvb_cuda_rope(&set.rope, &launch));
  if (decode(set.separate, workspace, launch) == nullptr) return "no separate kernel";
  MUST(cudaDeviceSynchronize());
  const auto output = set.read<float>(set.separate.output, outputs);
  const auto lse = set.read<float>(set.separate.lse, outputs / test.dim);
  const auto cache = set.read<uint16_t>(set.separate.key, set.cache.size());
  std::string wrong;
  for (int round = 0; round < 2 && wrong.empty(); ++round) {
    set.fill();
    MUST(cudaMemset(set.separate.output, 0xff, outputs * 4));
    set.fused.rope = &set.fields;
    const char* const name = decode(set.fused, workspace, launch, 64);
    MUST(cudaDeviceSynchronize());
    if (name == nullptr || std::strcmp(name, "attention_decode_rope") != 0) {
      wrong = "no fused kernel";
      break;
    }
    const auto cache_now = set.read<uint16_t>(set.separate.key, set.cache.size());
    size_t apart = 0;
    int most = 0;
    for (size_t i = 0; i < cache.size(); ++i) {
      if (cache[i] != cache_now[i]) ++apart, most = std::max(most, std::abs(int(cache[i]) - int(cache_now[i])));
    }
    const double error = off(output, set.read<float>(set.separate.output, outputs));
    const double lse_error = off(lse, set.read<float>(set.separate.lse, outputs / test.dim));
    // Where only a part of the head rotates, squares are added in another order.
    const bool same_order = set.rope.rotary_dim == test.dim || !test.norms;
    // The compiler contracts products and sums in its own way in each kernel, which few roundings show.
    const size_t few = size_t(set.separate.sequences) * test.kv_heads * test.dim / 500;
    if ((same_order && apart > few) || most > 1 || !(error < (same_order ? 2e-5 : 2e-3)) || !(lse_error < 1e-3)) {
      char text[200];
      std::snprintf(text, sizeof text, "%zu elements of the cache differ, by %d at most; outputs by %.2e, lse by %.2e",
                    apart, most, error, lse_error);
      wrong = text;
    }
  }
  set.release();
  return wrong;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](const char* name, std::vector<int> lengths, std::function<void(Case&)> change) {
    Case test;
    test.name = name, test.lengths = std::move(lengths);
    change(test);
    all.push_back(test);
  };
  const auto none = [](Case&) {};
  for (int length : {1, 2, 8, 9, 16, 48, 49, 383, 384, 385, 511, 512, 513, 1000, 1537, 4096}) {
    const std::string name = "length " + std::to_string(length);
    add(name.c_str(), {length}, none);
  }
  for (int dim : {64, 128, 256}) {
    for (int heads : {1, 2, 3, 4, 8}) {
      add(("dim " + std::to_string(dim) + ", group " + std::to_string(heads)).c_str(), {300},
          [&](Case& t) { t.dim = dim, t.query_heads = 2 * heads, t.kv_heads = 2; });
    }
    add("f16", {200, 3}, [&](Case& t) { t.dim = dim, t.f16 = true; });
    add("half rotates", {200, 3}, [&](Case& t) { t.dim = dim, t.rotary_dim = dim / 2; });
    add("no rotation", {200, 3}, [&](Case& t) { t.dim = dim, t.rotary_dim = 0; });
    add("pages", {200, 3}, [&](Case& t) { t.dim = dim, t.page_tokens = 16, t.kv_heads = 2; });
  }
  add("short of a long bucket", {5}, [](Case& t) { t.max_kv_length = 512; });
  add("empty", {0, 4}, none);
  add("many", std::vector<int>(16, 77), [](Case& t) { t.kv_heads = 4, t.query_heads = 8; });
  add("64 sequences", std::vector<int>(64, 40), [](Case& t) { t.kv_heads = 1, t.query_heads = 4; });
  add("window", {1000, 40, 300}, [](Case& t) { t.window = 257; });
  add("soft cap", {500}, [](Case& t) { t.soft_cap = 5; });
  add("pages of 7", {500, 3, 100}, [](Case& t) { t.page_tokens = 7; });
  add("pages of 1", {100}, [](Case& t) { t.page_tokens = 1; });
  add("bad pages", {500, 3, 100, 33, 49}, [](Case& t) { t.page_tokens = 16, t.bad_pages = true; });
  add("ring", {500, 3, 100, 114}, [](Case& t) { t.ring = 113, t.window = 100; });
  add("slots", {500, 3, 100, 7, 900}, [](Case& t) { t.slots = true; });
  add("no norms", {70, 3}, [](Case& t) { t.norms = false; });
  add("f32 norms", {70, 3}, [](Case& t) { t.f32_norms = true; });
  add("scales", {70, 3}, [](Case& t) { t.query_scale = 0.7f, t.position_scale = 0.125f; });
  return all;
}

int check(const Workspace& workspace, const std::string& some) {
  int wrong = 0, count = 0;
  for (const Case& test : cases()) {
    if (test.name.find(some) == std::string::npos) continue;
    for (uint32_t constant : {0u, 3u, 7u}) {
      const std::string error = check_one(test, constant, workspace);
      ++count;
      if (!error.empty())
        ++wrong, std::printf("WRONG %s (constant %u): %s\n", test.name.c_str(), constant, error.c_str());
    }
  }
  std::printf("%d of %d checks are right\n", count - wrong, count);
  return wrong;
}

// ---- speed ----
constexpr int kThreads = 256, kStaged = 64 * 1024;

// A stand-in for a product of one row: it reads the weight, of which it has the start in shared memory before the row
// is there, reads the row, and writes `source` as its result.
__global__ void __launch_bounds__(kThreads) product(const uint4* weight, size_t vectors, const uint16_t* input,
                                                    int inputs, const uint16_t* source, uint16_t* output, int outputs) {
  extern __shared__ __align__(16) uint4 staged[];
  nvb::allow_next_grid();
  const size_t share = (vectors + gridDim.x - 1) / gridDim.x;
  const size_t first = share * blockIdx.x, end = min(vectors, first + share);
  const size_t early = min(end, first + kStaged / 16);
  for (size_t i = first + threadIdx.x; i < early; i += kThreads) nvb::cp_async16(&staged[i - first], &weight[i]);
  nvb::cp_async_commit();
  nvb::wait_for_previous_grid();
  uint32_t sum = 0;
  for (int i = threadIdx.x; i < inputs; i += kThreads) sum += input[i];
  size_t i = early + threadIdx.x;
  for (; i + 7 * kThreads < end; i += 8 * kThreads) {
    uint4 v[8];
#pragma unroll
    for (int u = 0; u < 8; ++u) v[u] = nvb::load16_streaming(&weight[i + u * kThreads]);
#pragma unroll
    for (int u = 0; u < 8; ++u) sum += v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
  }
  for (; i < end; i += kThreads) sum += nvb::load16_streaming(&weight[i]).x;
  nvb::cp_async_wait<0>();
  __syncthreads();
  for (size_t j = threadIdx.x; j < early - first; j += kThreads) sum += staged[j].x;
  sum = __syncthreads_or(sum == 0x12345678);
  for (int o = blockIdx.x * kThreads + threadIdx.x; o < outputs; o += gridDim.x * kThreads) {
    output[o] = source[o] ^ (sum != 0);
  }
}

struct Model {
  const char* name;
  int layers, width, query_heads, kv_heads;
};

void time_model(const Model& model, int length, int window, const Workspace& workspace) {
  Case test;
  test.lengths = {length}, test.query_heads = model.query_heads, test.kv_heads = model.kv_heads;
  test.max_kv_length = std::max(512, length), test.window = window, test.bf16_output = true, test.regular = true;
  const int layers = model.layers;
  std::vector<Set*> sets;
  std::vector<uint4*> weights[2];
  const int qkv_width = (model.query_heads + 2 * model.kv_heads) * 256, attended = model.query_heads * 256;
  const size_t bytes[2] = {size_t(model.width) * qkv_width * 2, size_t(model.width) * attended * 2};
  uint16_t* hidden;
  uint16_t* source;
  MUST(cudaMalloc(&hidden, 1 << 20));
  MUST(cudaMemset(hidden, 0, 1 << 20));
  MUST(cudaMalloc(&source, 1 << 20));
  for (int i = 0; i < layers; ++i) {
    sets.push_back(new Set(test));
    for (int j : {0, 1}) {
      uint4* w;
      MUST(cudaMalloc(&w, bytes[j]));
      MUST(cudaMemset(w, i, bytes[j]));
      weights[j].push_back(w);
    }
  }
  MUST(cudaMemcpy(source, sets[0]->qkv.data(), sets[0]->qkv.size() * 2, cudaMemcpyHostToDevice));
  MUST(cudaFuncSetAttribute(product, cudaFuncAttributeMaxDynamicSharedMemorySize, kStaged + 18 * 1024));
  cudaStream_t stream;
  MUST(cudaStreamCreate(&stream));
  const nvb_launch launch = device_launch(stream);
  const char* used[4] = {};
  const auto capture = [&](int form) {
    nvb_cuda_set_constant_reads(form == 2 ? 3 : form == 3 ? 7 : 3);
    MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < layers; ++i) {
      Set& set = *sets[i];
      const dim3 grid(launch.multiprocessors), block(kThreads);
      MUST(nvb::launch_overlapped(product, grid, block, kStaged + 18 * 1024, &launch, weights[0][i], bytes[0] / 16,
                                  hidden, model.width, source,
                                  static_cast<uint16_t*>(const_cast<void*>(set.separate.query)), qkv_width));
      if (form == 1) {
        MUST(nvb_cuda_rope(&set.rope, &launch));
        used[form] = decode(set.separate, workspace, launch);
      } else if (form > 1) {
        set.fused.rope = &set.fields;
        used[form] = decode(set.fused, workspace, launch, 64);
      }
      MUST(nvb::launch_overlapped(product, grid, block, kStaged + 18 * 1024, &launch, weights[1][i], bytes[1] / 16,
                                  static_cast<const uint16_t*>(set.separate.output), attended, source, hidden,
                                  model.width));
    }
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    MUST(cudaStreamEndCapture(stream, &graph));
    MUST(cudaGraphInstantiate(&exec, graph, 0));
    MUST(cudaGraphDestroy(graph));
    return exec;
  };
  cudaGraphExec_t execs[4];
  for (int form = 0; form < 4; ++form) execs[form] = capture(form);
  cudaEvent_t begin, end;
  MUST(cudaEventCreate(&begin));
  MUST(cudaEventCreate(&end));
  constexpr int kRounds = 7, kReplays = 10;
  std::vector<float> times[4];
  for (int round = 0; round < kRounds; ++round) {
    for (int form = 0; form < 4; ++form) {
      MUST(cudaGraphLaunch(execs[form], stream));
      MUST(cudaEventRecord(begin, stream));
      for (int i = 0; i < kReplays; ++i) MUST(cudaGraphLaunch(execs[form], stream));
      MUST(cudaEventRecord(end, stream));
      MUST(cudaStreamSynchronize(stream));
      float ms;
      MUST(cudaEventElapsedTime(&ms, begin, end));
      times[form].push_back(ms * 1000 / kReplays / layers);
    }
  }
  double medians[4];
  for (int form = 0; form < 4; ++form) {
    std::sort(times[form].begin(), times[form].end());
    medians[form] = times[form][kRounds / 2];
  }
  std::printf("%-5s %5d %5d  %7.2f  %7.2f  %7.2f  %7.2f   saved %5.2f %5.2f   (%s)\n", model.name, length, window,
              medians[0], medians[1], medians[2], medians[3], medians[1] - medians[2], medians[1] - medians[3],
              used[1] + std::strlen("attention_decode_"));
  for (Set* set : sets) set->release(), delete set;
  for (int j : {0, 1}) {
    for (uint4* w : weights[j]) MUST(cudaFree(w));
  }
  for (cudaGraphExec_t exec : execs) MUST(cudaGraphExecDestroy(exec));
  MUST(cudaFree(hidden));
  MUST(cudaFree(source));
  MUST(cudaStreamDestroy(stream));
}

}  // namespace

int main(int argc, char** argv) {
  const Workspace workspace;
  const std::string what = argc > 1 ? argv[1] : "all";
  int wrong = 0;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  if (what != "time") wrong = check(workspace, argc > 2 ? argv[2] : "");
  if (what == "check" || wrong > 0) return wrong > 0;
  std::printf(
      "us a layer of two products (stand-ins) and: nothing; rope, attention; one kernel with keys asked for in L2;\n"
      "with older keys loaded early. model, length, window\n");
  const Model models[] = {
      {"270M", 26, 640, 4, 1}, {"1B", 26, 1152, 4, 1}, {"4B", 16, 2560, 8, 4}, {"12B", 8, 3840, 16, 8}};
  for (const Model& model : models) {
    for (int length : {16, 256, 512}) time_model(model, length, 0, workspace);
    time_model(model, 4096, model.kv_heads == 1 ? 512 : 1024, workspace);
    time_model(model, 1024, 0, workspace);
    time_model(model, 4096, 0, workspace);
  }
  return 0;
}
