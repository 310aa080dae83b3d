// The prefill attention of FP8 of compute capability 9.0 beside the formula in f64, block by block on the CPU
// (block.h), and that each thing which holds it together would be missed.
//
//   emulated_attention_prefill_fp8 [CASE [SEED]]     runs all cases, or those whose names contain CASE, from a seed on
#include <cstdio>

#include "attention_prefill_cases.h"

namespace nvb {
namespace prefill_fp8 {

alignas(1024) uint8_t memory[227 * 1024];

cudaError_t launch_prefill(const nvb_attention_prefill_params& p, const nvb_launch& launch);

}  // namespace prefill_fp8
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
    if (nvb::prefill_fp8::launch_prefill(p, launch) != cudaSuccess) return "refused";
  } catch (const emulated::Failure& failure) {
    return failure.what();
  }
  return {};
}

std::string run(const Case& test) {
  return attention_cases::check(test, launch);
}

// A run has to fail with at least one of these.
bool is_missed(const Case& test, const emulated::Faults& faults) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    for (const bool late : {false, true}) {
      emulated::options = {seed, late, faults};
      if (!run(test).empty()) return false;
    }
  }
  return true;
}

// The second stage of values as they are copied, which is empty once they are transposed. Since warpgroups take turns
// no order of this case copies into it too early, in 80 orders as in 24: that nobody waits for the first stage, and the
// parity of both, is seen.
constexpr int kUnseenBarrier = 13;

int check_faults() {
  Case test;
  test.name = "faults";
  // Both warpgroups have rows in each tile.
  test.dtype = NVB_F8_E4M3;
  test.sequences = {{250, 560}, {100, 700}, {128, 1000}, {128, 450}};
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
    if (barrier == kUnseenBarrier) {
      std::printf("skipped: nobody waits for barrier %d, whose lack no order of this case shows\n", barrier);
    } else {
      expect("nobody waits for barrier " + std::to_string(barrier), faults);
    }
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
           {"another order of bytes", &emulated::Faults::wrong_bytes},
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
  alignas(16) static uint8_t memory[1 << 14];
  good.query = good.key = good.value = good.output = memory;
  good.query_head_stride = good.key_head_stride = good.value_head_stride = good.output_head_stride = 64;
  good.query_token_stride = good.key_token_stride = good.value_token_stride = good.output_token_stride = 128;
  good.query_sequence_stride = good.key_sequence_stride = good.value_sequence_stride = good.output_sequence_stride =
      128;
  good.lse_sequence_stride = 1;
  good.query_dtype = good.kv_dtype = NVB_F8_E4M3, good.output_dtype = NVB_BF16;
  good.sequences = 1, good.query_heads = good.kv_heads = 2, good.head_dim = good.value_dim = 64;
  good.scale = 1;
  good.sequence[0] = {0, 4, 1, 4, 0, 0};
  nvb_launch hopper = {}, other = {};
  hopper.capability = 90, other.capability = 89;
  using Params = nvb_attention_prefill_params;
  const std::pair<const char*, void (*)(Params&)> changes[] = {
      {"bf16 keys", [](Params& p) { p.query_dtype = p.kv_dtype = NVB_BF16; }},
      {"a query of another dtype", [](Params& p) { p.query_dtype = NVB_F8_E5M2; }},
      {"an output of fp8", [](Params& p) { p.output_dtype = NVB_F8_E4M3; }},
      {"head_dim 272", [](Params& p) { p.head_dim = 272; }},
      {"head_dim 72", [](Params& p) { p.head_dim = 72; }},
      {"values of 80", [](Params& p) { p.value_dim = 80; }},
      {"values of 40", [](Params& p) { p.value_dim = 40; }},
      {"heads that are no multiple", [](Params& p) { p.query_heads = 3; }},
      {"scale 0", [](Params& p) { p.scale = 0; }},
      {"sinks", [](Params& p) { p.sinks = reinterpret_cast<const float*>(memory); }},
      {"a chunk", [](Params& p) { p.chunk = 4; }},
      {"a prefix", [](Params& p) { p.sequence[0].prefix = 1; }},
      {"rows of keys that are not aligned", [](Params& p) { p.key_token_stride = 136; }},
      {"heads of values that are not aligned", [](Params& p) { p.value_head_stride = 72; }},
      {"an output that is not aligned", [](Params& p) { p.output = memory + 8; }},
      {"keys at no token of the map", [](Params& p) { p.key_sequence_stride = 64; }},
      {"a mask", [](Params& p) { p.mask = memory; }},
      {"lengths on the device", [](Params& p) { p.query_starts = reinterpret_cast<const int32_t*>(memory); }},
      {"pages of 12", [](Params& p) { set_pages(p, 12); }},
      {"no pages",
       [](Params& p) {
         set_pages(p, 16);
         p.placement.page_count = 0;
       }},
      {"pages that are not aligned",
       [](Params& p) {
         set_pages(p, 16);
         p.placement.value_block_stride += 8;
       }},
      {"a ring", [](Params& p) { p.placement.ring_tokens = 64; }},
  };
  int wrong = 0;
  const auto expect = [&](const char* what, const Params& p, const nvb_launch& launch, bool supported) {
    if ((nvb_cuda_attention_prefill_fp8_supports(&p, &launch) != 0) == supported) return;
    std::printf("%s: %s\n", what, supported ? "refused" : "supported");
    ++wrong;
  };
  expect("what is supported", good, hopper, true);
  expect("capability 8.9", good, other, false);
  for (const auto& [what, change] : changes) {
    Params p = good;
    change(p);
    expect(what, p, hopper, false);
    if (nvb_cuda_attention_prefill_fp8(&p, &hopper) != cudaErrorInvalidValue) ++wrong;
  }
  Params paged = good;
  set_pages(paged, 16);
  expect("pages of 16", paged, hopper, true);
  Params p = good;
  p.query_scale = p.key_scale = p.value_scale = reinterpret_cast<const float*>(memory);
  expect("scales", p, hopper, true);
  // Without rows there is nothing to do.
  good.sequence[0].query_count = 0;
  if (nvb_cuda_attention_prefill_fp8(&good, &hopper) != cudaSuccess) ++wrong;
  return wrong;
}

}  // namespace

int main(int argc, char** argv) {
  emulated::shared_memory = nvb::prefill_fp8::memory;
  emulated::shared_bytes = sizeof nvb::prefill_fp8::memory;
  const std::string filter = argc > 1 ? argv[1] : "";
  const uint64_t first_seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
  int failures = 0, runs = 0;
  for (const Case& test : attention_cases::fp8_cases()) {
    if (std::string(test.name).find(filter) == std::string::npos) continue;
    uint64_t seed = first_seed + static_cast<uint64_t>(runs);
    for (const bool late : {false, true}) {
      emulated::options = {++seed, late, {}};
      ++runs;
      const std::string wrong = run(test);
      if (wrong.empty()) continue;
      std::printf("%s (%d/%d, %s%s, seed %d, %s): %s\n", test.name, test.head_dim, test.value_dim,
                  test.dtype == NVB_F8_E4M3 ? "e4m3" : "e5m2", test.causal ? ", causal" : "", static_cast<int>(seed),
                  late ? "late" : "early", wrong.c_str());
      ++failures;
    }
  }
  if (filter.empty() || filter == "refusals") failures += check_refusals();
  if (filter.empty() || filter == "faults") failures += check_faults();
  std::printf("%d runs, %d failures\n", runs, failures);
  return failures == 0 ? 0 : 1;
}
