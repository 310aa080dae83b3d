// The prefill attention of compute capability 9.0 beside the formula in f64, block by block on the CPU (block.h), and
// that each thing which holds it together would be missed.
//
//   emulated_attention_prefill_wgmma [CASE]     runs all cases, or those whose names contain CASE
#include "attention/attention_prefill_wgmma.h"

#include <algorithm>
#include <cstdio>
#include <limits>

#include "attention/sm90/attention_prefill_wgmma.cuh"

namespace nvb {
namespace prefill_wgmma {

alignas(1024) uint8_t memory[227 * 1024];

// With a value dim that the launcher's struct has no place for.
cudaError_t launch_prefill(const nvb_attention_prefill_params& p, int value_dim, const nvb_launch& launch);

}  // namespace prefill_wgmma
}  // namespace nvb

namespace {

struct Lengths {
  int queries, keys;
};

struct Case {
  const char* name;
  int head_dim = 128, value_dim = 128;
  std::vector<Lengths> sequences;
  bool causal = false;
  int window = 0;
  float soft_cap = 0;
  int query_heads = 1, kv_heads = 1;
  uint32_t dtype = NVB_BF16;
  bool f32_output = false;
  bool cache = false;  // [sequence, head, capacity, head_dim] in the place of packed tokens
  float spread = 1;    // of the queries
  int multiprocessors = 2;
  int l2_bytes = 50 << 20;
};

uint16_t to_bits(uint32_t dtype, float value) {
  uint16_t bits;
  if (dtype == NVB_F16) {
    const __half half = __float2half_rn(value);
    std::memcpy(&bits, &half, 2);
  } else {
    const __nv_bfloat16 bf16 = __float2bfloat16_rn(value);
    std::memcpy(&bits, &bf16, 2);
  }
  return bits;
}

float from_bits(uint32_t dtype, uint16_t bits) {
  return dtype == NVB_F16 ? nvb::float_of_bits<__half>(bits) : nvb::float_of_bits<__nv_bfloat16>(bits);
}

constexpr uint16_t kNan = 0x7fff;  // in either dtype
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

// Returns what is wrong, or nothing.
std::string run(const Case& test) {
  const int heads_of_key = test.query_heads / test.kv_heads;
  int query_rows = 0, key_tokens = 0, capacity = 0;
  nvb_attention_prefill_params p = {};
  p.sequences = static_cast<int32_t>(test.sequences.size());
  for (const Lengths& lengths : test.sequences) capacity = std::max(capacity, lengths.keys + kGap);
  const int width = test.head_dim;  // of a row of keys and of values
  for (size_t i = 0; i < test.sequences.size(); ++i) {
    const Lengths& lengths = test.sequences[i];
    p.sequence[i] = {int64_t{test.cache ? static_cast<int>(i) * capacity : key_tokens} * test.kv_heads * width,
                     query_rows, lengths.queries, lengths.keys, -1};
    query_rows += lengths.queries + kGap;
    key_tokens += lengths.keys + (i + 1 < test.sequences.size() ? kGap : 0);
  }
  const int kv_rows = (test.cache ? static_cast<int>(test.sequences.size()) * capacity : key_tokens) * test.kv_heads;
  const auto size = [](int rows, int columns) { return static_cast<size_t>(rows) * static_cast<size_t>(columns); };
  Buffer<uint16_t> query(size(query_rows * test.query_heads, test.head_dim), kNan);
  Buffer<uint16_t> key(size(kv_rows, width), kNan), value(size(kv_rows, width), kNan);
  constexpr uint32_t kUntouched = 0x7fc12345;
  Buffer<uint32_t> output(size(query_rows * test.query_heads, test.value_dim), kUntouched);
  Buffer<float> lse(size(query_rows, test.query_heads), -1e30f);

  p.query = query.data, p.key = key.data, p.value = value.data, p.output = output.data, p.lse = lse.data;
  p.query_head_stride = test.head_dim;
  p.query_token_stride = int64_t{test.query_heads} * test.head_dim;
  p.key_head_stride = p.value_head_stride = test.cache ? int64_t{capacity} * width : width;
  p.key_token_stride = p.value_token_stride = test.cache ? width : int64_t{test.kv_heads} * width;
  p.output_head_stride = test.value_dim;
  p.output_token_stride = int64_t{test.query_heads} * test.value_dim;
  p.query_dtype = p.kv_dtype = test.dtype;
  p.output_dtype = test.f32_output ? uint32_t{NVB_F32} : test.dtype;
  p.query_heads = test.query_heads, p.kv_heads = test.kv_heads, p.head_dim = test.head_dim;
  p.causal = test.causal, p.window = test.window, p.soft_cap = test.soft_cap;
  p.scale = 1.0f / std::sqrt(static_cast<float>(test.head_dim));

  // Rows of the sequences are random, all others stay NaN.
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  const auto fill = [&](uint16_t* row, int columns, float spread) {
    for (int i = 0; i < columns; ++i) row[i] = to_bits(test.dtype, spread * normal(random));
  };
  for (int i = 0; i < p.sequences; ++i) {
    const nvb_attention_sequence& sequence = p.sequence[i];
    for (int row = 0; row < sequence.query_count * test.query_heads; ++row) {
      fill(query.data + sequence.query_start * p.query_token_stride + row * test.head_dim, test.head_dim, test.spread);
    }
    for (int token = 0; token < sequence.kv_length; ++token) {
      for (int head = 0; head < test.kv_heads; ++head) {
        const int64_t at = sequence.kv_offset + head * p.key_head_stride + token * p.key_token_stride;
        fill(key.data + at, test.head_dim, 1);
        fill(value.data + at, test.value_dim, 1);
      }
    }
  }

  emulated::allowed.clear();
  emulated::allow(query.data, query.count * 2);
  emulated::allow(key.data, key.count * 2);
  emulated::allow(value.data, value.count * 2);
  nvb_launch launch = {};
  launch.capability = 90;
  launch.multiprocessors = test.multiprocessors;
  launch.l2_bytes = test.l2_bytes;
  try {
    if (nvb::prefill_wgmma::launch_prefill(p, test.value_dim, launch) != cudaSuccess) return "refused";
  } catch (const emulated::Failure& failure) {
    return failure.what();
  }

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
        const uint16_t* const q = query.data + token * p.query_token_stride + head * p.query_head_stride;
        const int64_t kv = sequence.kv_offset + head / heads_of_key * p.key_head_stride;
        scores.clear();
        std::vector<int> seen;
        double maximum = -std::numeric_limits<double>::infinity();
        for (int k = 0; k < sequence.kv_length; ++k) {
          if (test.causal && k > position) break;
          if (test.window > 0 && std::abs(position - k) >= test.window) continue;
          double score = 0;
          for (int d = 0; d < test.head_dim; ++d) {
            score += static_cast<double>(from_bits(test.dtype, q[d])) *
                     from_bits(test.dtype, key.data[kv + k * p.key_token_stride + d]);
          }
          score *= p.scale;
          if (test.soft_cap > 0) score = test.soft_cap * std::tanh(score / test.soft_cap);
          scores.push_back(score);
          seen.push_back(k);
          maximum = std::max(maximum, score);
        }
        double sum = 0;
        std::fill(expected.begin(), expected.end(), 0.0);
        for (size_t k = 0; k < scores.size(); ++k) {
          const double p_k = std::exp(scores[k] - maximum);
          sum += p_k;
          for (int d = 0; d < test.value_dim; ++d) {
            expected[static_cast<size_t>(d)] +=
                p_k * from_bits(test.dtype, value.data[kv + seen[k] * p.value_token_stride + d]);
          }
        }
        const int64_t at = token * p.output_token_stride + head * p.output_head_stride;
        for (int d = 0; d < test.value_dim; ++d) {
          const double right = sum == 0 ? 0 : expected[static_cast<size_t>(d)] / sum;
          const float given = test.f32_output
                                  ? reinterpret_cast<const float*>(output.data)[at + d]
                                  : from_bits(test.dtype, reinterpret_cast<const uint16_t*>(output.data)[at + d]);
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
  const double bound = test.dtype == NVB_F16 ? 1e-3 : 5e-3;
  char text[128];
  std::snprintf(text, sizeof text, "error %.2e (bound %.0e), lse %.1e", error, bound, worst_lse);
  return error <= bound && worst_lse <= 1e-4 ? std::string() : std::string(text);
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](const char* name, std::vector<Lengths> sequences, const std::function<void(Case&)>& change) {
    Case one;
    one.name = name;
    one.sequences = std::move(sequences);
    change(one);
    all.push_back(one);
  };
  const auto dims = [](int head_dim, int value_dim) {
    return [=](Case& one) { one.head_dim = head_dim, one.value_dim = value_dim; };
  };
  const auto causal = [](Case& one) { one.causal = true; };

  // Edges of tiles of 128 rows, and of 128 and 176 keys.
  const std::vector<Lengths> edges = {{0, 0}, {1, 1},    {1, 0},    {127, 127}, {128, 128}, {129, 129},
                                      {3, 5}, {64, 175}, {65, 176}, {2, 177},   {5, 353},   {0, 9}};
  add("edges full", edges, [](Case&) {});
  add("edges causal", edges, causal);
  add("causal, more keys", {{130, 400}, {7, 260}}, causal);
  add("causal, more queries", {{260, 130}, {140, 1}}, causal);
  add("causal, cache", {{130, 300}, {40, 129}, {1, 1}}, [&](Case& one) {
    causal(one);
    one.cache = true;
    one.query_heads = 4, one.kv_heads = 2;
  });
  add("window", {{300, 420}, {40, 700}}, [&](Case& one) {
    causal(one);
    one.window = 90;
  });
  add("window of one", {{130, 131}}, [&](Case& one) {
    causal(one);
    one.window = 1;
  });
  add("window, not causal", {{200, 500}}, [](Case& one) { one.window = 140; });
  add("soft cap", {{130, 300}}, [&](Case& one) {
    causal(one);
    one.soft_cap = 5;
    one.spread = 8;
  });
  add("grouped heads, persistent", {{140, 300}, {140, 300}, {20, 500}}, [&](Case& one) {
    one.query_heads = 6, one.kv_heads = 2;
    one.multiprocessors = 3;
    one.l2_bytes = 400 * 1024;
  });
  add("rising scores", {{70, 900}}, [](Case& one) { one.spread = 12; });
  add("f32 output", {{70, 200}}, [](Case& one) { one.f32_output = true; });
  add("f16", {{140, 260}}, [&](Case& one) {
    causal(one);
    one.dtype = NVB_F16;
  });
  add("f16 full", {{65, 360}}, [](Case& one) { one.dtype = NVB_F16; });

  // Every other tile, in both dtypes, and dims between them.
  struct Dims {
    int head_dim, value_dim;
  };
  for (const Dims dim : {Dims{64, 64}, Dims{96, 96}, Dims{192, 192}, Dims{192, 128}, Dims{256, 256}}) {
    for (const uint32_t dtype : {NVB_BF16, NVB_F16}) {
      for (const bool is_causal : {false, true}) {
        add("tile", {{200, 270}, {1, 80}, {60, 81}}, [&](Case& one) {
          dims(dim.head_dim, dim.value_dim)(one);
          one.dtype = dtype;
          one.causal = is_causal;
        });
      }
    }
  }
  for (const Dims dim : {Dims{8, 8}, Dims{40, 40}, Dims{80, 80}, Dims{112, 104}, Dims{136, 136}, Dims{248, 200}}) {
    add("between tiles", {{70, 140}}, dims(dim.head_dim, dim.value_dim));
  }
  return all;
}

// A run has to fail with at least one of these.
bool is_missed(const Case& test, const emulated::Faults& faults) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    for (const bool late : {false, true}) {
      emulated::options = {seed, late, faults};
      if (!run(test).empty()) return false;
    }
  }
  return true;
}

int check_faults() {
  Case test;
  test.name = "faults";
  // Both warpgroups have rows in each tile.
  test.sequences = {{250, 560}, {100, 300}};
  test.query_heads = 2;
  test.causal = true;
  int missed = 0;
  const auto expect = [&](const std::string& what, const emulated::Faults& faults) {
    if (!is_missed(test, faults)) return;
    std::printf("not seen: %s\n", what.c_str());
    ++missed;
  };
  emulated::options = {};
  if (!run(test).empty()) {
    std::printf("faults: wrong without one\n");
    return 1;
  }
  const int barriers = static_cast<int>(emulated::block.barriers.size());
  for (int barrier = 0; barrier < barriers; ++barrier) {
    emulated::Faults faults;
    faults.unwaited_barrier = barrier;
    expect("nobody waits for barrier " + std::to_string(barrier), faults);
    faults = {};
    faults.wrong_parity = barrier;
    expect("the parity of barrier " + std::to_string(barrier), faults);
  }
  for (const auto& [what, fault] : std::initializer_list<std::pair<const char*, bool emulated::Faults::*>>{
           {"no proxy fence", &emulated::Faults::no_proxy_fence},
           {"no fence before products", &emulated::Faults::no_product_fence},
           {"no wait for scores", &emulated::Faults::no_product_wait},
           {"another swizzle", &emulated::Faults::wrong_swizzle},
           {"another fragment", &emulated::Faults::wrong_fragment},
           {"another place of the next columns", &emulated::Faults::wrong_next_columns},
           {"copies past the end", &emulated::Faults::swallowed_end}}) {
    emulated::Faults faults;
    faults.*fault = true;
    expect(what, faults);
  }
  return missed;
}

}  // namespace

int main(int argc, char** argv) {
  emulated::shared_memory = nvb::prefill_wgmma::memory;
  emulated::shared_bytes = sizeof nvb::prefill_wgmma::memory;
  const std::string filter = argc > 1 ? argv[1] : "";
  int failures = 0, runs = 0;
  for (const Case& test : cases()) {
    if (std::string(test.name).find(filter) == std::string::npos) continue;
    uint64_t seed = static_cast<uint64_t>(runs);
    for (const bool late : {false, true}) {
      emulated::options = {++seed, late, {}};
      ++runs;
      const std::string wrong = run(test);
      if (wrong.empty()) continue;
      std::printf("%s (%d/%d, %s%s, seed %d, %s): %s\n", test.name, test.head_dim, test.value_dim,
                  test.dtype == NVB_F16 ? "f16" : "bf16", test.causal ? ", causal" : "", static_cast<int>(seed),
                  late ? "late" : "early", wrong.c_str());
      ++failures;
    }
  }
  if (filter.empty() || filter == "faults") failures += check_faults();
  std::printf("%d runs, %d failures\n", runs, failures);
  return failures == 0 ? 0 : 1;
}
