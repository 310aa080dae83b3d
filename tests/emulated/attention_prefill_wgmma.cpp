// The prefill attention of compute capability 9.0 beside the formula in f64, block by block on the CPU (block.h), and
// that each thing which holds it together would be missed.
//
//   emulated_attention_prefill_wgmma [CASE [SEED]]     runs all cases, or those whose names contain CASE, from a seed
//   on
#include "attention/attention_prefill_wgmma.h"

#include <cstdio>

#include "attention/sm90/attention_prefill_wgmma.cuh"
#include "attention_prefill_cases.h"

namespace nvb {
namespace prefill_wgmma {

alignas(1024) uint8_t memory[227 * 1024];

cudaError_t launch_prefill(const nvb_attention_prefill_params& p, const nvb_launch& launch);

}  // namespace prefill_wgmma
}  // namespace nvb

namespace {

using attention_cases::Case;

std::string launch(const nvb_attention_prefill_params& p, const Case& test, const attention_cases::Regions& regions) {
  emulated::allowed.clear();
  for (const attention_cases::Region& region : {regions.query, regions.key, regions.value}) {
    emulated::allow(region.data, region.bytes);
  }
  nvb_launch launch = {};
  launch.capability = 90;
  launch.multiprocessors = test.multiprocessors;
  launch.l2_bytes = test.l2_bytes;
  try {
    if (nvb::prefill_wgmma::launch_prefill(p, launch) != cudaSuccess) return "refused";
  } catch (const emulated::Failure& failure) {
    return failure.what();
  }
  return {};
}

std::string run(const Case& test) {
  return attention_cases::check(test, launch);
}

// The same with the keys of each tile in three parts, which are merged here.
std::string run_in_parts(const Case& test) {
  constexpr int kParts = 3;
  return attention_cases::check(
      test,
      [](const nvb_attention_prefill_params& whole, const Case& one,
         const attention_cases::Regions& regions) -> std::string {
        int rows = 0;
        for (int i = 0; i < whole.sequences; ++i) {
          rows = std::max(rows, whole.sequence[i].query_start + whole.sequence[i].query_count);
        }
        const size_t items = static_cast<size_t>(rows) * static_cast<size_t>(whole.query_heads);
        const size_t dim = static_cast<size_t>(whole.value_dim);
        std::vector<float> outputs(kParts * items * dim, std::nanf("")), lses(kParts * items, std::nanf(""));
        nvb_attention_prefill_params p = whole;
        p.output = outputs.data(), p.lse = lses.data(), p.output_dtype = NVB_F32;
        p.output_token_stride = p.output_sequence_stride = int64_t{whole.query_heads} * whole.value_dim;
        p.output_head_stride = whole.value_dim;
        p.parts = kParts, p.part_rows = rows;
        const std::string wrong = launch(p, one, regions);
        if (!wrong.empty()) return wrong;
        for (int i = 0; i < whole.sequences; ++i) {
          const nvb_attention_sequence& sequence = whole.sequence[i];
          for (int row = sequence.query_start * whole.query_heads;
               row < (sequence.query_start + sequence.query_count) * whole.query_heads; ++row) {
            const size_t item = static_cast<size_t>(row);
            double sum = 0;
            for (size_t part = 0; part < kParts; ++part) sum += std::exp(double{lses[part * items + item]});
            whole.lse[item] = static_cast<float>(std::log(sum));
            for (size_t d = 0; d < dim; ++d) {
              double value = 0;
              for (size_t part = 0; part < kParts; ++part) {
                const double weight = std::exp(double{lses[part * items + item]});
                if (weight != 0) value += weight / sum * outputs[(part * items + item) * dim + d];
              }
              const size_t at = item * dim + d;
              if (whole.output_dtype == NVB_F32) {
                static_cast<float*>(whole.output)[at] = static_cast<float>(value);
              } else {
                static_cast<uint16_t*>(whole.output)[at] =
                    attention_cases::to_bits(whole.output_dtype, static_cast<float>(value));
              }
            }
          }
        }
        return {};
      });
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
           {"nobody passes the turn", &emulated::Faults::no_turn_arrival},
           {"nobody waits for a turn", &emulated::Faults::no_turn_wait},
           {"nobody gives registers away", &emulated::Faults::kept_registers},
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

void set_pages(nvb_attention_prefill_params& p, int tokens) {
  static int32_t table[1];
  p.placement.pages = table;
  p.placement.page_tokens = tokens, p.placement.page_count = p.placement.page_row_stride = 1;
  p.placement.block_stride = p.placement.value_block_stride = 2048;
}

// What the launcher has no kernel for it refuses before it touches anything.
int check_refusals() {
  nvb_attention_prefill_params good = {};
  alignas(16) static uint16_t memory[1 << 14];
  good.query = good.key = good.value = good.output = memory;
  good.query_head_stride = good.key_head_stride = good.value_head_stride = good.output_head_stride = 64;
  good.query_token_stride = good.key_token_stride = good.value_token_stride = good.output_token_stride = 128;
  good.query_sequence_stride = good.key_sequence_stride = good.value_sequence_stride = good.output_sequence_stride =
      128;
  good.lse_sequence_stride = 1;
  good.query_dtype = good.kv_dtype = good.output_dtype = NVB_BF16;
  good.sequences = 1, good.query_heads = good.kv_heads = 2, good.head_dim = good.value_dim = 64;
  good.scale = 1;
  good.sequence[0] = {0, 4, 1, 4, 0, 0};
  nvb_launch hopper = {}, other = {};
  hopper.capability = 90, other.capability = 80;
  using Params = nvb_attention_prefill_params;
  const std::pair<const char*, void (*)(Params&)> changes[] = {
      {"f32 keys", [](Params& p) { p.query_dtype = p.kv_dtype = NVB_F32; }},
      {"a query of another dtype", [](Params& p) { p.query_dtype = NVB_F16; }},
      {"an output of another dtype", [](Params& p) { p.output_dtype = NVB_F16; }},
      {"head_dim 264", [](Params& p) { p.head_dim = 264; }},
      {"head_dim 60", [](Params& p) { p.head_dim = 60; }},
      {"heads that are no multiple", [](Params& p) { p.query_heads = 3; }},
      {"scale 0", [](Params& p) { p.scale = 0; }},
      {"a soft cap that is no number", [](Params& p) { p.soft_cap = std::nanf(""); }},
      {"a window below 0", [](Params& p) { p.window = -1; }},
      {"rows of keys that are not aligned", [](Params& p) { p.key_token_stride = 132; }},
      {"heads of values that are not aligned", [](Params& p) { p.value_head_stride = 68; }},
      {"an output that is not aligned", [](Params& p) { p.output = memory + 1; }},
      {"values of 72", [](Params& p) { p.value_dim = 72; }},
      {"values of 60", [](Params& p) { p.value_dim = 60; }},
      {"keys at no token of the map", [](Params& p) { p.key_sequence_stride = 64; }},
      {"values at no token of the map", [](Params& p) { p.value_sequence_stride = 192; }},
      {"keys before the tensor", [](Params& p) { p.sequence[0].kv_start = -1; }},
      {"more tokens than coordinates", [](Params& p) { p.sequence[0].kv_start = INT32_MAX; }},
      {"a start at no row", [](Params& p) { p.query_sequence_stride = 192; }},
      {"an output at another row", [](Params& p) { p.output_sequence_stride = 256; }},
      {"an lse at another row", [](Params& p) { p.lse = reinterpret_cast<float*>(memory), p.lse_sequence_stride = 2; }},
      {"a tree", [](Params& p) { p.tree_parents = reinterpret_cast<const int32_t*>(memory); }},
      {"two prefixes",
       [](Params& p) {
         p.sequences = 2;
         p.sequence[1] = p.sequence[0];
         p.sequence[1].prefix = 2;
       }},
      {"a chunk below 0", [](Params& p) { p.chunk = -1; }},
      {"dropout of rows that no lse counts",
       [](Params& p) {
         p.dropout_threshold = 1;
         p.lse_sequence_stride = 2;
       }},
      {"sinks of more sequences than have room",
       [](Params& p) {
         p.sinks = reinterpret_cast<const float*>(memory);
         p.sequences = 121;
       }},
      {"scales", [](Params& p) { p.key_scale = reinterpret_cast<const float*>(memory); }},
      {"starts on the device without lengths",
       [](Params& p) { p.query_starts = reinterpret_cast<const int32_t*>(memory); }},
      {"pages of 12", [](Params& p) { set_pages(p, 12); }},
      {"no pages",
       [](Params& p) {
         set_pages(p, 16);
         p.placement.page_count = 0;
       }},
      {"a row before the page table",
       [](Params& p) {
         set_pages(p, 16);
         p.sequence[0].kv_start = -1;
       }},
      {"a ring", [](Params& p) { p.placement.ring_tokens = 64; }},
      {"parts that are not F32",
       [](Params& p) {
         p.parts = 2, p.part_rows = 4;
         p.lse = reinterpret_cast<float*>(memory);
       }},
      {"parts without an lse",
       [](Params& p) {
         p.parts = 2, p.part_rows = 4;
         p.output_dtype = NVB_F32;
       }},
      {"more parts than there may be",
       [](Params& p) {
         p.parts = 256, p.part_rows = 4;
         p.output_dtype = NVB_F32, p.lse = reinterpret_cast<float*>(memory);
       }},
      {"too long a sequence", [](Params& p) { p.sequence[0].kv_length = (1 << 30) + 1; }},
  };
  int wrong = 0;
  const auto expect = [&](const char* what, const Params& p, const nvb_launch& launch, bool supported) {
    nvb_attention_prefill_shape shape;
    if ((nvb_cuda_attention_prefill_wgmma_supports(&p, &launch, &shape) != 0) == supported) return;
    std::printf("%s: %s\n", what, supported ? "refused" : "supported");
    ++wrong;
  };
  expect("what is supported", good, hopper, true);
  expect("capability 8.0", good, other, false);
  Params paged = good;
  set_pages(paged, 16);
  expect("pages of 16", paged, hopper, true);
  Params divided = good;
  divided.parts = 255, divided.part_rows = 4, divided.output_dtype = NVB_F32;
  divided.lse = reinterpret_cast<float*>(memory);
  expect("parts", divided, hopper, true);
  for (const auto& [what, change] : changes) {
    Params p = good;
    change(p);
    expect(what, p, hopper, false);
    if (nvb_cuda_attention_prefill_wgmma(&p, &hopper) != cudaErrorInvalidValue) ++wrong;
  }
  // Without rows there is nothing to do.
  good.sequence[0].query_count = 0;
  if (nvb_cuda_attention_prefill_wgmma(&good, &hopper) != cudaSuccess) ++wrong;
  return wrong;
}

}  // namespace

int main(int argc, char** argv) {
  emulated::shared_memory = nvb::prefill_wgmma::memory;
  emulated::shared_bytes = sizeof nvb::prefill_wgmma::memory;
  const std::string filter = argc > 1 ? argv[1] : "";
  const uint64_t first_seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
  int failures = 0, runs = 0;
  for (const Case& test : attention_cases::cases()) {
    if (std::string(test.name).find(filter) == std::string::npos) continue;
    uint64_t seed = first_seed + static_cast<uint64_t>(runs);
    for (const bool late : {false, true}) {
      emulated::options = {++seed, late, {}};
      ++runs;
      std::string wrong = run(test);
      // In parts in one of the two orders, in turn from case to case.
      if (wrong.empty() && late == (runs / 2 % 2 == 0)) {
        wrong = run_in_parts(test);
        if (!wrong.empty()) wrong = "in parts: " + wrong;
      }
      if (wrong.empty()) continue;
      std::printf("%s (%d/%d, %s%s, seed %d, %s): %s\n", test.name, test.head_dim, test.value_dim,
                  test.dtype == NVB_F16 ? "f16" : "bf16", test.causal ? ", causal" : "", static_cast<int>(seed),
                  late ? "late" : "early", wrong.c_str());
      ++failures;
    }
  }
  if (filter.empty() || filter == "refusals") failures += check_refusals();
  if (filter.empty() || filter == "faults") failures += check_faults();
  std::printf("%d runs, %d failures\n", runs, failures);
  return failures == 0 ? 0 : 1;
}
