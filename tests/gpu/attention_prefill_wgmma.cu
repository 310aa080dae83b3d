// The prefill attention of compute capability 9.0 on a device: its results beside the formula in f64, and its speed.
// It needs nvcc to build and a driver to run, nothing else of this project (attention_prefill_wgmma.sh builds it):
//
//   tests/gpu/attention_prefill_wgmma.sh                   builds, checks and measures
//   target/gpu/attention_prefill_wgmma check [CASE]        the cases whose names contain CASE
//   target/gpu/attention_prefill_wgmma bench [HEAD_DIM]    TFLOP/s of the shapes below
//   target/gpu/attention_prefill_wgmma parts               few query rows over many keys, whose keys are divided into
//   parts target/gpu/attention_prefill_wgmma tiles [HEAD_DIM]    the same with other tiles, to choose among them
//   target/gpu/attention_prefill_wgmma once HEAD_DIM CAUSAL LENGTH    one shape, launched three times, for a profiler
//
// Shapes: BF16, 16,384 tokens in sequences of 512 to 16,384, 2048 / head_dim heads, head_dim 64, 128 and 256, with and
// without a causal mask, which counts half of the operations; and grouped heads, a window and a value dim of its own. A
// graph of several launches is replayed; tensors are larger than L2. The median of the replays counts.
#include <array>

// The launcher itself, because it can be asked for any tile here.
#include "attention/sm90/attention_prefill_wgmma.cu"
#include "attention_merge/attention_merge.h"
#include "attention_prefill_device.h"

namespace {

using attention_cases::Case;
using namespace attention_device;

cudaError_t launch_case(const nvb_attention_prefill_params& p, const Case&, const nvb_launch& launch) {
  return nvb::prefill_wgmma::launch_prefill(p, launch);
}

// Made before a stream captures.
constexpr int64_t kFloats = int64_t{1} << 27;
float* partial_results() {
  static float* workspace = nullptr;
  if (workspace == nullptr) MUST(cudaMalloc(&workspace, kFloats * sizeof(float)));
  return workspace;
}

// The keys of each tile of rows in so many parts, and their merge, sequence by sequence.
template <int Parts>
cudaError_t launch_parts(const nvb_attention_prefill_params& whole, const nvb_launch& launch) {
  float* const workspace = partial_results();
  int64_t rows = 0;
  for (int i = 0; i < whole.sequences; ++i) {
    rows = std::max<int64_t>(rows, whole.sequence[i].query_start + whole.sequence[i].query_count);
  }
  const int64_t heads = whole.query_heads, dim = whole.value_dim;
  if (Parts * rows * heads * (dim + 1) > kFloats) return cudaErrorInvalidValue;
  nvb_attention_prefill_params p = whole;
  p.output = workspace, p.lse = workspace + Parts * rows * heads * dim;
  p.output_dtype = NVB_F32;
  p.output_token_stride = p.output_sequence_stride = heads * dim, p.output_head_stride = dim;
  p.lse_sequence_stride = 1;
  p.parts = Parts, p.part_rows = static_cast<int32_t>(rows);
  const cudaError_t error = nvb::prefill_wgmma::launch_prefill(p, launch);
  if (error != cudaSuccess) return error;
  for (int i = 0; i < whole.sequences; ++i) {
    const int64_t first = whole.sequence[i].query_start;
    nvb_attention_merge_params merge = {};
    merge.outputs = workspace + first * heads * dim, merge.lses = p.lse + first * heads;
    const int bytes = whole.output_dtype == NVB_F32 ? 4 : 2;
    merge.output = static_cast<uint8_t*>(whole.output) + first * whole.output_token_stride * bytes;
    merge.lse = whole.lse == nullptr ? nullptr : whole.lse + first * heads;
    merge.part_stride = rows * heads * dim, merge.token_stride = heads * dim, merge.head_stride = dim;
    merge.lse_part_stride = rows * heads, merge.lse_token_stride = heads, merge.lse_head_stride = 1;
    merge.output_token_stride = whole.output_token_stride, merge.output_head_stride = whole.output_head_stride;
    merge.parts = Parts, merge.tokens = whole.sequence[i].query_count;
    merge.heads = static_cast<int32_t>(heads), merge.head_dim = static_cast<int32_t>(dim);
    merge.input_dtype = NVB_F32, merge.output_dtype = whole.output_dtype;
    if (merge.tokens == 0) continue;
    const cudaError_t merged = nvb_cuda_attention_merge(&merge, &launch);
    if (merged != cudaSuccess) return merged;
  }
  return cudaSuccess;
}

template <int Parts>
cudaError_t launch_case_in_parts(const nvb_attention_prefill_params& p, const Case&, const nvb_launch& launch) {
  return launch_parts<Parts>(p, launch);
}

template <typename Tile>
Candidate candidate(const char* name) {
  return {name, Tile::kHeadDim, nvb::prefill_wgmma::launch_with<__nv_bfloat16, Tile>};
}

void compare_tiles(int only, const Memory& memory) {
  using nvb::prefill_wgmma::Tile;
  const std::vector<Candidate> candidates = {
      candidate<Tile<64, 64, 3, 128, true>>("192 x 128, turns"),
      candidate<Tile<64, 64, 3, 128, false>>("192 x 128"),
      candidate<Tile<64, 64, 3, 112, true>>("192 x 112, turns"),
      candidate<Tile<64, 64, 2, 128, true>>("128 x 128, turns"),
      candidate<Tile<64, 64, 2, 176, true>>("128 x 176, turns"),
      candidate<Tile<64, 64, 2, 176, false>>("128 x 176"),
      candidate<Tile<128, 128, 2, 128, true>>("128 x 128, turns"),
      candidate<Tile<128, 128, 2, 128, false>>("128 x 128"),
      candidate<Tile<128, 128, 2, 176, true>>("128 x 176, turns"),
      candidate<Tile<128, 128, 2, 176, false>>("128 x 176"),
      candidate<Tile<128, 128, 2, 112, true>>("128 x 112, turns"),
      candidate<Tile<128, 128, 3, 80, true>>("192 x 80, turns"),
      candidate<Tile<256, 256, 2, 80, false>>("128 x 80"),
      candidate<Tile<256, 256, 2, 80, true>>("128 x 80, turns"),
  };
  compare(candidates, only, memory);
}

void bench_parts(const Memory& memory) {
  cudaStream_t stream;
  MUST(cudaStreamCreate(&stream));
  partial_results();
  std::printf(
      "TFLOP/s, the last queries of one causal sequence, keys in 1, 2, 3, 4, 6, 8, 12, 16, 32 parts with their "
      "merge\n");
  for (const auto& [head_dim, heads, kv_heads] : {std::array{256, 8, 4}, {128, 32, 8}, {128, 8, 2}, {64, 32, 8}}) {
    for (const int keys : {2048, 8192, 32768}) {
      for (const int queries : {64, 128, 256, 512}) {
        const Shape shape = {head_dim, head_dim, heads, kv_heads, keys, true, 0, queries};
        std::printf("head_dim %3d, %2d/%d heads, %3d queries over %5d:", head_dim, heads, kv_heads, queries, keys);
        const Launch launches[] = {nvb::prefill_wgmma::launch_prefill,
                                   launch_parts<2>,
                                   launch_parts<3>,
                                   launch_parts<4>,
                                   launch_parts<6>,
                                   launch_parts<8>,
                                   launch_parts<12>,
                                   launch_parts<16>,
                                   launch_parts<32>};
        for (const Launch launch : launches) std::printf(" %4.0f", measure(shape, memory, stream, launch, 0.5));
        std::printf("\n");
        std::fflush(stdout);
      }
    }
  }
  MUST(cudaStreamDestroy(stream));
}

void bench(int only, const Memory& memory) {
  cudaStream_t stream;
  MUST(cudaStreamCreate(&stream));
  const auto rate = [&](const Shape& shape) {
    return measure(shape, memory, stream, nvb::prefill_wgmma::launch_prefill);
  };
  std::printf("TFLOP/s, %d tokens, sequences of 512, 1k, 2k, 4k, 8k, 16k\n", kTokens);
  for (const int head_dim : {64, 128, 256}) {
    if (only != 0 && head_dim != only) continue;
    for (const bool causal : {false, true}) {
      std::printf("head_dim %-3d %-7s", head_dim, causal ? "causal" : "full");
      for (int length = 512; length <= kTokens; length *= 2) {
        std::printf(" %5.0f", rate({head_dim, head_dim, 2048 / head_dim, 2048 / head_dim, length, causal, 0}));
        std::fflush(stdout);
      }
      std::printf("\n");
    }
  }
  if (only != 0) return;
  const std::pair<const char*, Shape> others[] = {
      {"grouped heads 32/8, 128, causal, 4k", {128, 128, 32, 8, 4096, true, 0}},
      {"window 1024, 128, 16k", {128, 128, 16, 16, 16384, true, 1024}},
      {"window 1024, 64, 16k", {64, 64, 32, 32, 16384, true, 1024}},
      {"192/128, causal, 4k", {192, 128, 16, 16, 4096, true, 0}},
      {"192/192, causal, 4k", {192, 192, 16, 16, 4096, true, 0}},
      {"96, causal, 4k", {96, 96, 16, 16, 4096, true, 0}},
      {"512 queries over 8k, 32/8, 128", {128, 128, 32, 8, 8192, true, 0, 512}},
      {"the same in pages of 16", {128, 128, 32, 8, 8192, true, 0, 512, 16}},
      {"the same in pages of 64", {128, 128, 32, 8, 8192, true, 0, 512, 64}},
      {"512 queries over 32k, 32/8, 128", {128, 128, 32, 8, 32768, true, 0, 512}},
      {"the same in pages of 16", {128, 128, 32, 8, 32768, true, 0, 512, 16}},
      {"512 queries over 32k, 8/4, 256", {256, 256, 8, 4, 32768, true, 0, 512}},
      {"the same in pages of 16", {256, 256, 8, 4, 32768, true, 0, 512, 16}},
  };
  for (const auto& [name, shape] : others) std::printf("%-36s %5.0f\n", name, rate(shape));
  MUST(cudaStreamDestroy(stream));
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "all";
  const std::string which = argc > 2 ? argv[2] : "";
  int failures = 0;
  if (what == "check" || what == "all") {
    failures = check(attention_cases::cases(), which, launch_case);
    std::printf("in 3 parts:\n");
    failures += check(attention_cases::cases(), which, launch_case_in_parts<3>);
  }
  if (what == "check") return failures == 0 ? 0 : 1;
  const Memory memory(NVB_BF16, size_t{kTokens} * 4096);
  if (what == "bench" || what == "all") bench(std::atoi(which.c_str()), memory);
  if (what == "parts" || what == "all") bench_parts(memory);
  if (what == "tiles") compare_tiles(std::atoi(which.c_str()), memory);
  if (what == "once" && argc == 5) {
    const int head_dim = std::atoi(argv[2]), heads = 2048 / head_dim;
    const nvb_attention_prefill_params p =
        params_of({head_dim, head_dim, heads, heads, std::atoi(argv[4]), std::atoi(argv[3]) != 0, 0}, memory);
    for (int i = 0; i < 3; ++i) MUST(nvb::prefill_wgmma::launch_prefill(p, device_launch(nullptr)));
    MUST(cudaDeviceSynchronize());
  }
  return failures == 0 ? 0 : 1;
}
