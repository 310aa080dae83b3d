// The prefill attention of compute capability 8.0 on a device: its results beside the formula in f64, and its speed
// with several tiles. It needs nvcc to build and a driver to run, nothing else of this project
// (attention_prefill_mma.sh builds it):
//
//   tests/gpu/attention_prefill_mma.sh                   builds, checks and measures
//   target/gpu/attention_prefill_mma check [CASE [TILE]]   the cases whose names contain CASE, by tiles that contain
//   TILE target/gpu/attention_prefill_mma bench [TILE]          TFLOP/s of the 36 shapes by tiles that begin with TILE
//   python3 tests/gpu/attention_prefill_mma_peer.py        TFLOP/s of PyTorch's FlashAttention 2 on the same shapes
//
// Shapes: BF16, 16,384 tokens in sequences of 512 to 16,384, 2048 / head_dim heads, head_dim 64, 128 and 256, with and
// without a causal mask, which counts half of the operations. A graph of several launches is replayed; tensors are
// larger than L2. The median of the replays counts.
#include "attention_prefill_device.h"
#include "attention_prefill_mma_tiles.h"

namespace {

using attention_cases::Case;
using namespace attention_device;
using mma_tiles::Entry;

// What a plan does on the host (src/cuda/attention_plan.rs): first blocks, and heads that share L2.
cudaError_t launch_planned(const Entry& entry, const nvb_attention_prefill_params& p, const nvb_launch& launch) {
  nvb::PrefillArguments arguments;
  arguments.params = p;
  int blocks = 0, longest = 1;
  for (int i = 0; i < p.sequences; ++i) {
    arguments.params.sequence[i].first_block = blocks;
    blocks += (p.sequence[i].query_count + entry.rows - 1) / entry.rows * p.query_heads;
    longest = std::max(longest, p.sequence[i].kv_length);
  }
  const int64_t bytes = int64_t{longest} * (p.head_dim + p.value_dim) * 2;
  const int fitting = static_cast<int>(std::clamp<int64_t>(launch.l2_bytes / bytes, 1, p.kv_heads));
  const int groups = (p.kv_heads + fitting - 1) / fitting;
  arguments.params.heads_per_group = (p.kv_heads + groups - 1) / groups * (p.query_heads / p.kv_heads);
  if (blocks == 0) return cudaSuccess;
  return entry.launch(arguments, blocks, launch.stream);
}

const Entry* current;

cudaError_t launch_case(const nvb_attention_prefill_params& p, const Case&, const nvb_launch& launch) {
  return launch_planned(*current, p, launch);
}
cudaError_t launch_current(const nvb_attention_prefill_params& p, const nvb_launch& launch) {
  return launch_planned(*current, p, launch);
}

// The cases that a tile takes: those of the other programs, and the edges of its own rows and keys.
std::vector<Case> cases_of(const Entry& entry) {
  std::vector<Case> all;
  for (const Case& one : attention_cases::cases()) {
    Case mine = one;
    if (one.dtype != NVB_BF16) continue;
    if (mine.head_dim > entry.head_dim) mine.head_dim = entry.head_dim;
    mine.value_dim = mine.head_dim;
    all.push_back(mine);
  }
  const int r = entry.rows, k = entry.keys;
  for (const bool causal : {false, true}) {
    for (const int window : {0, 1, k, k + 1}) {
      Case one;
      one.name = "edges of the tile";
      one.head_dim = one.value_dim = entry.head_dim;
      one.causal = causal;
      one.window = window;
      one.sequences = {{0, 0},
                       {1, 0},
                       {1, 1},
                       {r - 1, k - 1},
                       {r, k},
                       {r + 1, k + 1},
                       {1, 2 * k},
                       {3, 2 * k + 1},
                       {16, 3 * k - 1},
                       {17, 5 * k},
                       {2 * r + 1, 2 * r + 1},
                       {r, 4 * k - 1}};
      one.query_heads = 4, one.kv_heads = 2;
      all.push_back(one);
    }
  }
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "all";
  const std::string which = argc > 2 ? argv[2] : "";
  const std::string tile = argc > 3 ? argv[3] : "";
  int failures = 0;
  if (what == "check" || what == "all") {
    for (const Entry& entry : mma_tiles::kEntries) {
      if (std::string(entry.name).find(tile) == std::string::npos) continue;
      current = &entry;
      std::printf("%-44s", entry.name);
      int wrong = 0, runs = 0;
      for (const Case& test : cases_of(entry)) {
        if (std::string(test.name).find(which) == std::string::npos) continue;
        ++runs;
        const std::string said = attention_cases::check(
            test, [&](const nvb_attention_prefill_params& p, const Case& one, const Regions& regions) {
              return run_twice(p, one, regions, launch_case);
            });
        if (said.empty()) continue;
        if (++wrong <= 4) {
          std::printf("\n  %s (%d%s, window %d): %s", test.name, test.head_dim, test.causal ? ", causal" : "",
                      test.window, said.c_str());
        }
      }
      std::printf(" %d cases, %d failures\n", runs, wrong);
      std::fflush(stdout);
      failures += wrong;
    }
  }
  if (what == "bench" || what == "all") {
    const Memory memory(NVB_BF16, size_t{kTokens} * 2048);
    cudaStream_t stream;
    MUST(cudaStreamCreate(&stream));
    std::printf("TFLOP/s, %d tokens, sequences of 512, 1k, 2k, 4k, 8k, 16k, full and causal\n", kTokens);
    for (const Entry& entry : mma_tiles::kEntries) {
      const int heads = 2048 / entry.head_dim;
      if (entry.head_dim * heads != 2048 || std::string(entry.name).find(which) != 0) continue;
      current = &entry;
      std::printf("%-44s", entry.name);
      for (const bool causal : {false, true}) {
        for (int length = 512; length <= kTokens; length *= 2) {
          const Shape shape = {entry.head_dim, entry.head_dim, heads, heads, length, causal, 0};
          std::printf(" %4.0f", measure(shape, memory, stream, launch_current, 4));
        }
      }
      std::printf("\n");
      std::fflush(stdout);
    }
    MUST(cudaStreamDestroy(stream));
  }
  return failures == 0 ? 0 : 1;
}
