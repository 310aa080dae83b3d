// The prefill attention of FP8 of compute capability 9.0 beside the formula in f64, block by block on the CPU (block.h),
// and that each thing which holds it together would be missed.
//
//   emulated_attention_prefill_fp8 [CASE [SEED]]     runs all cases, or those whose names contain CASE, from a seed on
#include <cstdio>

#include "attention_prefill_cases.h"
#include "attention_prefill_fp8_launch.h"

namespace nvb {
namespace prefill_fp8 {

alignas(1024) uint8_t memory[227 * 1024];

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
    const cudaError_t error = nvb::prefill_fp8::launch_prefill_fp8(p, test.dtype == attention_cases::kE5m2, launch);
    if (error != cudaSuccess) return "refused";
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
  test.dtype = attention_cases::kE4m3;
  test.sequences = {{250, 1260}, {100, 700}};
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
           {"another order of bytes", &emulated::Faults::wrong_bytes},
           {"copies past the end", &emulated::Faults::swallowed_end}}) {
    emulated::Faults faults;
    faults.*fault = true;
    expect(what, faults);
  }
  return missed;
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
                  test.dtype == attention_cases::kE4m3 ? "e4m3" : "e5m2", test.causal ? ", causal" : "",
                  static_cast<int>(seed), late ? "late" : "early", wrong.c_str());
      ++failures;
    }
  }
  if (filter.empty() || filter == "faults") failures += check_faults();
  std::printf("%d runs, %d failures\n", runs, failures);
  return failures == 0 ? 0 : 1;
}
