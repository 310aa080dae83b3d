// Decode over a shared prefix on a device: the kernels of 8.0 with what goes before and after them
// (attention_prefix.h), beside the formula in f64, and its time beside a decode that reads the prefix for every
// sequence.
//
//   attention_prefix check    1 if anything is wrong
//   attention_prefix bench    microseconds, graphs replayed, caches rotated past L2
#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "attention/attention_decode.cuh"
#include "attention/attention_prefix.h"
#include "attention/sm80/attention_prefill_mma.cuh"
#include "attention/sm90/attention_prefill_wgmma.cuh"
#include "attention/sm90/attention_prefill_wgmma_launch.h"
#include "device.h"
#include "driver_function.h"

namespace {

using namespace nvb;
using B = __nv_bfloat16;

template <typename T>
T* on_device(const std::vector<T>& host) {
  T* device = nullptr;
  MUST(cudaMalloc(&device, std::max<size_t>(host.size() * sizeof(T), 16)));
  MUST(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return device;
}

// The prefill of 9.0 by the tiles that attention_prefill_wgmma.cu takes without a mask.
template <typename Tile>
cudaError_t launch_wgmma(const nvb_attention_prefill_params& p, const nvb_launch& launch) {
  if (!prefill_wgmma::supports_shape(p, 2, launch)) return cudaErrorInvalidValue;
  return prefill_wgmma::with_arguments<Tile>(p, 2, launch, [&](const prefill_wgmma::Arguments& arguments, int blocks) {
    return prefill_wgmma::launch_tile<B, Tile>(arguments, blocks, launch);
  });
}
bool with_wgmma = false;

int divided_up(int value, int by) {
  return (value + by - 1) / by;
}

struct Shape {
  int sequences = 3, rows = 1, query_heads = 4, kv_heads = 2, head_dim = 64;
  int prefix = 100, capacity = 200, page_tokens = 0, most_own = 100;
  int parts = 0;  // 0: as planned
};

// As src/cuda/attention_prefix.rs plans it.
int part_tokens(const Shape& s, const nvb_launch& launch) {
  const int tiles = divided_up(s.sequences * s.rows * (s.query_heads / s.kv_heads), 128) * s.kv_heads;
  int parts = s.parts > 0 ? s.parts : std::max(1, launch.multiprocessors / tiles);
  parts = std::min({parts, 64, divided_up(s.prefix, 128)});
  const int unit = s.page_tokens > 0 ? s.page_tokens : 16;
  return divided_up(divided_up(s.prefix, parts), unit) * unit;
}

struct Scratch {
  B* packed;
  int32_t* positions;
  float *outputs, *lses, *own_outputs, *own_lses;
  unsigned char* workspace;
  uint32_t* counters;
  Scratch() {
    MUST(cudaMalloc(&packed, 64 << 20)), MUST(cudaMalloc(&positions, 1 << 20));
    MUST(cudaMalloc(&outputs, 256 << 20)), MUST(cudaMalloc(&lses, 16 << 20));
    MUST(cudaMalloc(&own_outputs, 64 << 20)), MUST(cudaMalloc(&own_lses, 4 << 20));
    MUST(cudaMalloc(&workspace, 256 << 20)), MUST(cudaMalloc(&counters, 64 << 20));
    MUST(cudaMemset(counters, 0, 64 << 20));
  }
  void poison() {
    MUST(cudaMemset(packed, 0xff, 64 << 20)), MUST(cudaMemset(positions, 0x7f, 1 << 20));
    MUST(cudaMemset(outputs, 0xff, 256 << 20)), MUST(cudaMemset(lses, 0xff, 16 << 20));
    MUST(cudaMemset(own_outputs, 0xff, 64 << 20)), MUST(cudaMemset(own_lses, 0xff, 4 << 20));
  }
};

cudaError_t decode(nvb_attention_decode_params p, const Scratch& scratch, const nvb_launch& launch) {
  nvb_attention_decode_shape shape = {};
  if (!supports_decode_mma(p, launch, shape)) return cudaErrorInvalidValue;
  const int items = items_per_kv_head(p);
  p.chunks = divided_up(items, shape.heads_per_block);
  p.heads_per_chunk = divided_up(items, p.chunks);
  const int most = std::min(divided_up(std::max(1, p.max_kv_length), shape.keys * shape.min_tiles), 256);
  const int resident =
      std::max(1, std::min((launch.shared_bytes_per_block + 1024) / (shape.shared_bytes + 1024), 1024 / shape.threads));
  const int slots = launch.multiprocessors * resident, blocks = p.sequences * p.kv_heads * p.chunks;
  const auto busy = [&](int splits) { return double(blocks * splits) / (divided_up(blocks * splits, slots) * slots); };
  double best = 0;
  for (int i = 1; i <= most; ++i) best = std::max(best, busy(i));
  p.splits = most;
  for (int i = most; i >= 1 && blocks * most > slots; --i) {
    if (busy(i) >= (best >= 0.9 ? 0.9 : 0.9 * best)) p.splits = i;
  }
  p.slots_per_head = p.splits > 1 ? p.splits + divided_up(p.splits, 16) : 0;
  const int64_t partials = int64_t{p.sequences} * p.rows_per_sequence * p.query_heads * p.slots_per_head;
  p.workspace = scratch.workspace, p.counters = scratch.counters;
  DecodeArguments arguments;
  arguments.params = p;
  arguments.partial_sums = reinterpret_cast<float2*>(scratch.workspace);
  arguments.partial_outputs = reinterpret_cast<float*>(scratch.workspace + (partials * 8 + 15) / 16 * 16);
  return launch_decode_mma(arguments, launch);
}

// `p` is the decode without a shared prefix; all positions count from the first token. What runs is selected by
// `steps`.
cudaError_t shared(const nvb_attention_decode_params& p, const Shape& s, int prefix_slot, const Scratch& scratch,
                   const nvb_launch& launch, int steps = 15) {
  const int rows = s.sequences * s.rows, group = s.query_heads / s.kv_heads, tokens = part_tokens(s, launch);
  const int parts = divided_up(s.prefix, tokens), d = s.head_dim;
  nvb_attention_prefix_params x = {};
  x.query = p.query, x.positions = p.positions, x.packed = scratch.packed, x.own_positions = scratch.positions;
  x.outputs = scratch.outputs, x.lses = scratch.lses, x.own_outputs = scratch.own_outputs,
  x.own_lses = scratch.own_lses;
  x.output = p.output, x.lse = p.lse;
  x.query_token_stride = p.query_token_stride, x.query_head_stride = p.query_head_stride;
  x.output_token_stride = p.output_token_stride, x.output_head_stride = p.output_head_stride;
  x.query_dtype = p.query_dtype, x.output_dtype = p.output_dtype, x.rows = rows;
  x.query_heads = s.query_heads, x.kv_heads = s.kv_heads, x.head_dim = x.value_dim = d;
  x.prefix_tokens = s.prefix, x.capacity = s.capacity, x.parts = parts;
  if (steps & 1) {
    const cudaError_t status = nvb_cuda_attention_prefix_pack(&x, &launch);
    if (status != cudaSuccess) return status;
  }
  if (steps & 2) {
    nvb_attention_decode_params own = p;
    own.positions = scratch.positions, own.output = scratch.own_outputs, own.lse = scratch.own_lses;
    own.output_dtype = NVB_F32, own.output_head_stride = d, own.output_token_stride = int64_t{d} * s.query_heads;
    if (s.page_tokens > 0) {
      own.placement.pages += s.prefix / s.page_tokens;
    } else {
      own.key = static_cast<const B*>(p.key) + s.prefix * p.key_token_stride;
      own.value = static_cast<const B*>(p.value) + s.prefix * p.value_token_stride;
    }
    own.capacity -= s.prefix, own.max_kv_length = s.most_own;
    const cudaError_t status = decode(own, scratch, launch);
    if (status != cudaSuccess) return status;
  }
  if (steps & 4) {
    PrefillArguments arguments;
    nvb_attention_prefill_params& q = arguments.params;
    q = {};
    q.query = scratch.packed, q.output = scratch.outputs, q.lse = scratch.lses;
    q.query_token_stride = int64_t{s.kv_heads} * d, q.query_head_stride = d,
    q.query_sequence_stride = int64_t{rows} * group * s.kv_heads * d;
    q.output_token_stride = q.query_token_stride, q.output_head_stride = d;
    q.output_sequence_stride = int64_t{rows} * group * s.kv_heads * d, q.lse_sequence_stride = rows * group;
    q.key_token_stride = p.key_token_stride, q.value_token_stride = p.value_token_stride;
    q.key_head_stride = p.key_head_stride, q.value_head_stride = p.value_head_stride;
    q.placement = p.placement;
    if (s.page_tokens > 0) {
      q.key = p.key, q.value = p.value;
      q.placement.pages = p.placement.pages + prefix_slot * p.placement.page_row_stride;
      q.placement.page_row_stride = tokens / s.page_tokens;
    } else {
      q.key = static_cast<const B*>(p.key) + prefix_slot * p.key_sequence_stride;
      q.value = static_cast<const B*>(p.value) + prefix_slot * p.value_sequence_stride;
      q.key_sequence_stride = tokens * p.key_token_stride, q.value_sequence_stride = tokens * p.value_token_stride;
    }
    q.query_dtype = p.query_dtype, q.kv_dtype = p.kv_dtype, q.output_dtype = NVB_F32, q.mask_dtype = NVB_F32;
    q.sequences = parts, q.query_heads = q.kv_heads = s.kv_heads, q.head_dim = q.value_dim = d;
    q.scale = p.scale, q.soft_cap = p.soft_cap, q.heads_per_group = s.kv_heads;
    const SharedClass shared_class = launch.shared_bytes_per_block > 200 * 1024   ? SharedClass::kLarge
                                     : launch.shared_bytes_per_block > 100 * 1024 ? SharedClass::kMedium
                                                                                  : SharedClass::kSmall;
    const int tile = with_prefill_tile<B>(d, shared_class, [](auto of) { return decltype(of)::kRows; });
    int blocks = 0;
    for (int i = 0; i < parts; ++i) {
      q.sequence[i] = {i, rows * group, i, std::min(tokens, s.prefix - i * tokens), blocks, 0};
      blocks += divided_up(rows * group, tile) * s.kv_heads;
    }
    const bool wgmma = with_wgmma && p.query_dtype == NVB_BF16 && (s.page_tokens == 0 || s.page_tokens % 8 == 0);
    const cudaError_t status = !wgmma     ? launch_prefill_mma<B>(arguments, shared_class, blocks, launch.stream)
                               : d <= 64  ? launch_wgmma<prefill_wgmma::tiles::D64>(q, launch)
                               : d <= 128 ? launch_wgmma<prefill_wgmma::tiles::D128_FULL>(q, launch)
                                          : launch_wgmma<prefill_wgmma::tiles::D256>(q, launch);
    if (status != cudaSuccess) return status;
  }
  return steps & 8 ? nvb_cuda_attention_prefix_merge(&x, &launch) : cudaSuccess;
}

// ---- check ----
struct Case {
  const char* name;
  Shape shape;
  std::vector<int> positions;  // of the sequences' last rows
  uint32_t query_dtype = NVB_BF16, output_dtype = NVB_F32;
  float soft_cap = 0;
};

std::string check_one(const Case& c, Scratch& scratch) {
  const Shape& s = c.shape;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const int d = s.head_dim, slots = s.sequences + 1, prefix_slot = s.sequences, rows = s.sequences * s.rows;
  const int columns = s.page_tokens > 0 ? divided_up(s.capacity, s.page_tokens) : 0;
  const int pages = columns * slots + 2;
  const size_t places = s.page_tokens > 0 ? size_t(pages) * s.page_tokens : size_t(slots) * s.capacity;
  std::vector<B> key(places * s.kv_heads * d, __float2bfloat16_rn(NAN)), value(key);
  std::vector<int32_t> table(std::max(1, columns * slots), -1), positions(rows);
  std::vector<int> order(pages);
  for (int i = 0; i < pages; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random);
  const auto row_of = [&](int slot, int head, int token) -> size_t {
    if (s.page_tokens == 0) return ((size_t(slot) * s.kv_heads + head) * s.capacity + token) * d;
    const int page = table[slot * columns + token / s.page_tokens];
    return ((size_t(page) * s.kv_heads + head) * s.page_tokens + token % s.page_tokens) * d;
  };
  const auto fill = [&](int slot, int first, int end) {
    for (int t = first; t < end; ++t) {
      if (s.page_tokens > 0) table[slot * columns + t / s.page_tokens] = order[slot * columns + t / s.page_tokens];
      for (int h = 0; h < s.kv_heads; ++h) {
        for (int i = 0; i < d; ++i) {
          key[row_of(slot, h, t) + i] = __float2bfloat16_rn(normal(random));
          value[row_of(slot, h, t) + i] = __float2bfloat16_rn(normal(random) + 0.3f);
        }
      }
    }
  };
  fill(prefix_slot, 0, s.prefix);
  for (int i = 0; i < rows; ++i) {
    const int last = c.positions[i / s.rows];
    positions[i] = last < 0 ? -1 : last - (s.rows - 1 - i % s.rows);
  }
  // What lies before the prefix's end in a sequence's own place is never read.
  for (int b = 0; b < s.sequences; ++b) fill(b, s.prefix, c.positions[b] + 1);
  std::vector<float> query(size_t(rows) * s.query_heads * d);
  std::vector<B> rounded(query.size());
  for (size_t i = 0; i < query.size(); ++i) {
    query[i] = normal(random) * 2;
    rounded[i] = __float2bfloat16_rn(query[i]);
    query[i] = __bfloat162float(rounded[i]);
  }
  const size_t count = query.size();
  nvb_attention_decode_params p = {};
  const float* const queries = on_device(query);
  const B* const queries16 = on_device(rounded);
  p.query = c.query_dtype == NVB_F32 ? static_cast<const void*>(queries) : queries16;
  p.key = on_device(key), p.value = on_device(value), p.positions = on_device(positions);
  const int32_t* const pages_on_device = on_device(table);
  std::vector<uint32_t> poison(count, 0x7fc12345);
  p.output = on_device(poison);
  p.lse = on_device(std::vector<float>(count / d, NAN));
  p.query_head_stride = p.output_head_stride = d, p.query_token_stride = p.output_token_stride = d * s.query_heads;
  p.key_token_stride = p.value_token_stride = d;
  if (s.page_tokens > 0) {
    p.key_head_stride = p.value_head_stride = int64_t{s.page_tokens} * d;
    p.placement.pages = pages_on_device, p.placement.page_row_stride = columns;
    p.placement.block_stride = p.placement.value_block_stride = int64_t{s.kv_heads} * s.page_tokens * d;
    p.placement.page_tokens = s.page_tokens, p.placement.page_count = pages;
  } else {
    p.key_head_stride = p.value_head_stride = int64_t{s.capacity} * d;
    p.key_sequence_stride = p.value_sequence_stride = int64_t{s.kv_heads} * s.capacity * d;
  }
  p.query_dtype = c.query_dtype, p.kv_dtype = NVB_BF16, p.output_dtype = c.output_dtype;
  p.sequences = s.sequences, p.rows_per_sequence = s.rows, p.query_heads = s.query_heads, p.kv_heads = s.kv_heads;
  p.head_dim = p.value_dim = d, p.slot_count = slots, p.capacity = s.capacity, p.max_kv_length = s.capacity;
  p.scale = 0.7f / std::sqrt(float(d)), p.soft_cap = c.soft_cap;
  std::string wrong;
  std::vector<float> output(count), first, lse(count / d);
  for (int round = 0; round < 3 && wrong.empty(); ++round) {
    scratch.poison();
    MUST(cudaMemcpy(p.output, poison.data(), count * 4, cudaMemcpyHostToDevice));
    const cudaError_t status = shared(p, s, prefix_slot, scratch, gpu::device_launch(nullptr));
    if (status != cudaSuccess) wrong = cudaGetErrorString(status);
    MUST(cudaDeviceSynchronize());
    if (c.output_dtype == NVB_F32) {
      MUST(cudaMemcpy(output.data(), p.output, count * 4, cudaMemcpyDeviceToHost));
    } else {
      std::vector<B> halves(count);
      MUST(cudaMemcpy(halves.data(), p.output, count * 2, cudaMemcpyDeviceToHost));
      for (size_t i = 0; i < count; ++i) output[i] = __bfloat162float(halves[i]);
    }
    if (round == 0) first = output;
    if (std::memcmp(first.data(), output.data(), count * 4) != 0) wrong = "two runs differ";
  }
  MUST(cudaMemcpy(lse.data(), p.lse, lse.size() * 4, cudaMemcpyDeviceToHost));
  for (const void* block : {static_cast<const void*>(queries), static_cast<const void*>(queries16), p.key, p.value,
                            static_cast<const void*>(p.positions), static_cast<const void*>(pages_on_device),
                            static_cast<const void*>(p.output), static_cast<const void*>(p.lse)}) {
    MUST(cudaFree(const_cast<void*>(block)));
  }
  if (!wrong.empty()) return wrong;
  double error = 0, norm = 0;
  char text[200];
  for (int i = 0; i < rows; ++i) {
    const int length = positions[i] >= s.prefix - 1 && positions[i] < s.capacity ? positions[i] + 1 : 0;
    for (int h = 0; h < s.query_heads; ++h) {
      const int kv_head = h / (s.query_heads / s.kv_heads);
      std::vector<double> scores(length), sum(d);
      double most = -INFINITY, total = 0;
      for (int t = 0; t < length; ++t) {
        const size_t from = row_of(t < s.prefix ? prefix_slot : i / s.rows, kv_head, t);
        double dot = 0;
        for (int j = 0; j < d; ++j) {
          dot += double(query[(size_t(i) * s.query_heads + h) * d + j]) * __bfloat162float(key[from + j]);
        }
        scores[t] = dot * p.scale;
        if (c.soft_cap > 0) scores[t] = c.soft_cap * std::tanh(scores[t] / c.soft_cap);
        most = std::max(most, scores[t]);
      }
      for (int t = 0; t < length; ++t) {
        const size_t from = row_of(t < s.prefix ? prefix_slot : i / s.rows, kv_head, t);
        const double weight = std::exp(scores[t] - most);
        total += weight;
        for (int j = 0; j < d; ++j) sum[j] += weight * __bfloat162float(value[from + j]);
      }
      const double expected = length == 0 ? -INFINITY : most + std::log(total);
      const float got = lse[size_t(i) * s.query_heads + h];
      if (length == 0 ? got != -INFINITY : !(std::abs(got - expected) < 1e-4 * std::max(1.0, std::abs(expected)))) {
        std::snprintf(text, sizeof text, "lse of row %d head %d: %g, expected %g", i, h, got, expected);
        return text;
      }
      for (int j = 0; j < d; ++j) {
        const double of = length == 0 ? 0 : sum[j] / total;
        const double difference = output[(size_t(i) * s.query_heads + h) * d + j] - of;
        if (length == 0 && difference != 0) return "an empty row is not zero";
        error += difference * difference, norm += of * of;
      }
    }
  }
  const double relative = norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
  if (relative < (c.output_dtype == NVB_F32 ? 2.5e-3 : 4e-3)) return "";
  std::snprintf(text, sizeof text, "relative error %g", relative);
  return text;
}

int check() {
  std::vector<Case> cases;
  const auto add = [&](const char* name, std::vector<int> positions, const std::function<void(Case&)>& change) {
    Case c{name, {}, std::move(positions)};
    c.shape.sequences = static_cast<int>(c.positions.size());
    change(c);
    c.shape.most_own = c.shape.capacity - c.shape.prefix;
    cases.push_back(c);
  };
  const auto none = [](Case&) {};
  add("one", {100}, none);
  add("edges", {-1, 99, 100, 150, 199, 50, 200}, none);
  add("pages of 16", {-1, 95, 96, 150, 199, 111}, [](Case& c) { c.shape.prefix = 96, c.shape.page_tokens = 16; });
  add("pages of 1", {99, 120}, [](Case& c) { c.shape.page_tokens = 1; });
  add("prefix of 1", {0, 1, 17, 100}, [](Case& c) { c.shape.prefix = 1; });
  for (const int prefix : {47, 48, 49, 127, 128, 129, 700}) {
    add("prefix", {prefix, prefix + 48, prefix - 1},
        [=](Case& c) { c.shape.prefix = prefix, c.shape.capacity = prefix + 60, c.shape.head_dim = 128; });
    add("prefix in parts", {prefix, prefix + 48, prefix - 1}, [=](Case& c) {
      c.shape.prefix = prefix, c.shape.capacity = prefix + 60, c.shape.parts = 5, c.shape.kv_heads = 1;
    });
  }
  add("4 rows of 8 heads", {400, 500, 415, -1}, [](Case& c) {
    c.shape.rows = 4, c.shape.prefix = 384, c.shape.capacity = 520, c.shape.query_heads = 16, c.shape.page_tokens = 64;
  });
  add("f32 queries", {300, 299},
      [](Case& c) { c.query_dtype = NVB_F32, c.shape.prefix = 300, c.shape.capacity = 400; });
  add("16-bit output, soft cap", {300, 350},
      [](Case& c) { c.output_dtype = NVB_BF16, c.soft_cap = 3, c.shape.prefix = 300, c.shape.capacity = 400; });
  add("head_dim 256", {300, 350},
      [](Case& c) { c.shape.head_dim = 256, c.shape.prefix = 256, c.shape.capacity = 400; });
  add("head_dim 40", {300, 350}, [](Case& c) { c.shape.head_dim = 40, c.shape.prefix = 256, c.shape.capacity = 400; });
  std::vector<int> many;
  for (int i = 0; i < 70; ++i) many.push_back(i % 9 == 4 ? -1 : 2047 + i * 2);
  add("70 sequences", many, [](Case& c) {
    c.shape.prefix = 2048, c.shape.capacity = 2200, c.shape.query_heads = 8, c.shape.page_tokens = 32;
  });
  Scratch scratch;
  int failures = 0;
  for (const bool wgmma : {false, true}) {
    with_wgmma = wgmma;
    for (const Case& c : cases) {
      const std::string wrong = check_one(c, scratch);
      if (wrong.empty()) continue;
      ++failures;
      std::printf("WRONG %s (prefix %d, head_dim %d, %s): %s\n", c.name, c.shape.prefix, c.shape.head_dim,
                  wgmma ? "wgmma" : "mma", wrong.c_str());
    }
  }
  std::printf("check: %zu cases, each with mma and wgmma, %d failures\n", cases.size(), failures);
  return failures != 0;
}

// ---- bench ----
__global__ void fill(uint32_t* data, size_t words) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < words; i += size_t(gridDim.x) * blockDim.x) {
    uint64_t x = (i + 1) * 0xbf58476d1ce4e5b9ull;
    x ^= x >> 29, x *= 0x94d049bb133111ebull, x ^= x >> 32;
    const auto one = [](uint32_t bits) {
      const B b = __float2bfloat16_rn((float(bits & 255) + float(bits >> 8 & 255)) / 104.0f - 2.45f);
      return uint32_t(*reinterpret_cast<const uint16_t*>(&b));
    };
    data[i] = one(uint32_t(x)) | one(uint32_t(x >> 32)) << 16;
  }
}

// Microseconds of a call, the median of 15 replays of a graph of 20 calls.
double time(const std::function<void(int call, const nvb_launch&)>& queue) {
  cudaStream_t stream;
  MUST(cudaStreamCreate(&stream));
  const nvb_launch launch = gpu::device_launch(stream);
  queue(0, launch);
  MUST(cudaStreamSynchronize(stream));
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  constexpr int kCalls = 20;
  MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < kCalls; ++i) queue(i, launch);
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
    if (i > 1) times.push_back(milliseconds * 1e3f / kCalls);
  }
  std::sort(times.begin(), times.end());
  MUST(cudaGraphExecDestroy(replay)), MUST(cudaGraphDestroy(graph)), MUST(cudaStreamDestroy(stream));
  return times[times.size() / 2];
}

void bench() {
  constexpr int kPage = 16;
  Scratch scratch;
  struct Line {
    int head_dim, query_heads, kv_heads, sequences, prefix, own;
  };
  std::printf("us; copies: every sequence has pages of its own; forked: all name the prefix's pages\n");
  std::printf("%5s %6s %5s %7s %5s | %8s %8s %8s %6s %6s | parts: us\n", "d", "heads", "seqs", "prefix", "own",
              "copies", "forked", "shared", "x", "x");
  for (const Line l : {Line{128, 32, 8, 32, 8192, 128}, Line{128, 32, 8, 32, 8192, 1024},
                       Line{128, 32, 8, 32, 2048, 128}, Line{128, 32, 8, 8, 8192, 128}, Line{64, 32, 8, 32, 8192, 128},
                       Line{256, 16, 8, 32, 8192, 128}, Line{128, 32, 8, 128, 8192, 128}}) {
    const int d = l.head_dim, length = l.prefix + l.own, columns = divided_up(length, kPage),
              pool = columns * l.sequences;
    if (size_t(pool) * kPage * l.kv_heads * d * 4 > (size_t{60} << 30)) continue;
    const size_t elements = size_t(pool) * kPage * l.kv_heads * d;
    B *key, *value;
    MUST(cudaMalloc(&key, elements * 2)), MUST(cudaMalloc(&value, elements * 2));
    fill<<<1024, 256>>>(reinterpret_cast<uint32_t*>(key), elements / 2);
    fill<<<1024, 256>>>(reinterpret_cast<uint32_t*>(value), elements / 2);
    // Four tables, whose prefixes and own parts are other pages of the pool.
    std::mt19937 random(5);
    std::vector<int> order(pool);
    for (int i = 0; i < pool; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    const int32_t *copies, *forked[4];
    copies = on_device(std::vector<int32_t>(order.begin(), order.end()));
    const int prefix_columns = l.prefix / kPage;
    for (int r = 0; r < 4; ++r) {
      std::vector<int32_t> table(pool);
      for (int b = 0; b < l.sequences; ++b) {
        for (int i = 0; i < columns; ++i) {
          const int from = i < prefix_columns ? (r * 7) % l.sequences * columns + i : b * columns + i;
          table[b * columns + i] = order[from];
        }
      }
      forked[r] = on_device(table);
    }
    const int rows = l.sequences;
    std::vector<int32_t> positions(rows, length - 1);
    nvb_attention_decode_params p = {};
    B *query, *output;
    const size_t queries = size_t(rows) * l.query_heads * d;
    MUST(cudaMalloc(&query, queries * 2)), MUST(cudaMalloc(&output, queries * 2));
    fill<<<64, 256>>>(reinterpret_cast<uint32_t*>(query), queries / 2);
    p.query = query, p.output = output, p.key = key, p.value = value, p.positions = on_device(positions);
    p.query_head_stride = p.output_head_stride = d, p.query_token_stride = p.output_token_stride = d * l.query_heads;
    p.key_token_stride = p.value_token_stride = d, p.key_head_stride = p.value_head_stride = kPage * d;
    p.placement.page_row_stride = columns, p.placement.page_tokens = kPage, p.placement.page_count = pool;
    p.placement.block_stride = p.placement.value_block_stride = int64_t{l.kv_heads} * kPage * d;
    p.query_dtype = p.kv_dtype = p.output_dtype = NVB_BF16;
    p.sequences = p.slot_count = l.sequences, p.rows_per_sequence = 1, p.query_heads = l.query_heads;
    p.kv_heads = l.kv_heads, p.head_dim = p.value_dim = d, p.capacity = p.max_kv_length = length;
    p.scale = 1.0f / std::sqrt(float(d));
    Shape s;
    s.sequences = l.sequences, s.query_heads = l.query_heads, s.kv_heads = l.kv_heads, s.head_dim = d;
    s.prefix = l.prefix, s.capacity = length, s.page_tokens = kPage, s.most_own = l.own;
    const auto with = [&](const int32_t* table) {
      nvb_attention_decode_params of = p;
      of.placement.pages = table;
      return of;
    };
    const double all = time([&](int, const nvb_launch& launch) { MUST(decode(with(copies), scratch, launch)); });
    const double fork =
        time([&](int i, const nvb_launch& launch) { MUST(decode(with(forked[i % 4]), scratch, launch)); });
    const auto of_steps = [&](int steps, int parts) {
      s.parts = parts;
      return time(
          [&](int i, const nvb_launch& launch) { MUST(shared(with(forked[i % 4]), s, 0, scratch, launch, steps)); });
    };
    with_wgmma = false;
    const double by_mma = of_steps(15, 0);
    with_wgmma = true;
    const double once = of_steps(15, 0);
    std::printf("%5d %3d/%-2d %5d %7d %5d | %8.1f %8.1f %8.1f %6.2f %6.2f |", d, l.query_heads, l.kv_heads, l.sequences,
                l.prefix, l.own, all, fork, once, all / once, fork / once);
    std::printf(" by mma %.1f |", by_mma);
    for (const int parts : {4, 8, 12, 16, 24, 32}) std::printf(" %d: %.1f", parts, of_steps(15, parts));
    std::printf(" | pack %.1f, own %.1f, prefix %.1f, merge %.1f\n", of_steps(1, 0), of_steps(2, 0), of_steps(4, 0),
                of_steps(8, 0));
    for (const void* block :
         {static_cast<const void*>(key), static_cast<const void*>(value), static_cast<const void*>(copies),
          static_cast<const void*>(query), static_cast<const void*>(output), static_cast<const void*>(p.positions)}) {
      MUST(cudaFree(const_cast<void*>(block)));
    }
    for (const int32_t* table : forked) MUST(cudaFree(const_cast<int32_t*>(table)));
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
