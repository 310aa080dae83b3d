// The prefill attention of FP8 of compute capability 9.0 on a device: its results beside the formula in f64, its error
// in long sequences, and its speed. attention_prefill_fp8.sh builds it:
//
//   tests/gpu/attention_prefill_fp8.sh                  builds, checks and measures
//   target/gpu/attention_prefill_fp8 check [CASE]       the cases whose names contain CASE
//   target/gpu/attention_prefill_fp8 error              root mean square errors of 16k and 128k tokens
//   target/gpu/attention_prefill_fp8 bench [HEAD_DIM]   TFLOP/s, and the share of FlashAttention 3's FP8 on an H200
//   target/gpu/attention_prefill_fp8 tiles [HEAD_DIM]   the same with other tiles, to choose among them
//   target/gpu/attention_prefill_fp8 once HEAD_DIM CAUSAL LENGTH    one shape, launched three times, for a profiler
//
// Shapes: those of attention_prefill_wgmma.cu, in E4M3, with an output of BF16.
#include <cuda_runtime.h>

// The launcher itself, because it can be asked for any tile here.
#include "attention/sm90/attention_prefill_fp8.cu"
#include "attention_prefill_device.h"

namespace nvb {
namespace prefill_fp8 {
#define NVB_CANDIDATE(...) \
  extern template cudaError_t launch_tile<__nv_fp8_e4m3, Tile<__VA_ARGS__>>(const Arguments&, int, const nvb_launch&);
#include "attention_prefill_fp8_tiles.h"
#undef NVB_CANDIDATE
}  // namespace prefill_fp8
}  // namespace nvb

namespace {

using attention_cases::Case;
using namespace attention_device;

cudaError_t launch_case(const nvb_attention_prefill_params& p, const Case&, const nvb_launch& launch) {
  return nvb_cuda_attention_prefill_fp8(&p, &launch);
}

cudaError_t launch_default(const nvb_attention_prefill_params& p, const nvb_launch& launch) {
  return nvb_cuda_attention_prefill_fp8(&p, &launch);
}

template <typename Tile>
cudaError_t launch_tile(const nvb_attention_prefill_params& p, const nvb_launch& launch) {
  return nvb::prefill_fp8::launch_with<__nv_fp8_e4m3, Tile>(p, launch);
}

// One causal sequence of normal numbers, `mean` added to the values, of which some rows are compared.
void print_error(const char* name, int head_dim, int length, float mean, Launch launch_kernel) {
  const attention_cases::Elements query(NVB_F8_E4M3, size_t(length) * head_dim);
  const attention_cases::Elements key(NVB_F8_E4M3, size_t(length) * head_dim);
  const attention_cases::Elements value(NVB_F8_E4M3, size_t(length) * head_dim);
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal;
  std::vector<float> some(1 << 20);
  for (float& one : some) one = normal(random);
  const auto any = [&] { return some[random() & (some.size() - 1)]; };
  for (int64_t i = 0; i < int64_t{length} * head_dim; ++i)
    query.set(i, any()), key.set(i, any()), value.set(i, mean + any());
  std::vector<float> output(size_t(length) * head_dim);
  nvb_attention_prefill_params p = {};
  const size_t bytes = output.size();
  p.query = to_device({query.at(0), bytes}), p.key = to_device({key.at(0), bytes});
  p.value = to_device({value.at(0), bytes}), p.output = to_device({output.data(), bytes * 4});
  p.query_head_stride = p.key_head_stride = p.value_head_stride = p.output_head_stride = head_dim;
  p.query_token_stride = p.key_token_stride = p.value_token_stride = p.output_token_stride = head_dim;
  p.query_sequence_stride = p.key_sequence_stride = p.value_sequence_stride = p.output_sequence_stride = head_dim;
  p.query_dtype = p.kv_dtype = NVB_F8_E4M3, p.output_dtype = NVB_F32;
  p.query_heads = p.kv_heads = 1, p.head_dim = p.value_dim = head_dim, p.causal = 1;
  p.scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  p.sequences = 1;
  p.sequence[0] = {0, length, 0, length, 0, 0};
  MUST(launch_kernel(p, device_launch(nullptr)));
  MUST(cudaDeviceSynchronize());
  MUST(cudaMemcpy(output.data(), p.output, bytes * 4, cudaMemcpyDeviceToHost));
  double difference = 0, norm = 0, last_difference = 0, last_norm = 0, projected = 0;
  int rows = 0;
  std::vector<double> weights, expected;
  const size_t dim = static_cast<size_t>(head_dim);
  std::vector<float> k_of(size_t(length) * dim), v_of(size_t(length) * dim);
  for (int64_t i = 0; i < int64_t{length} * head_dim; ++i) {
    k_of[static_cast<size_t>(i)] = key.get(i), v_of[static_cast<size_t>(i)] = value.get(i);
  }
  const int step = length / 24 + 1;
  for (int row = length - 1; row >= 0; row -= step, ++rows) {
    expected.assign(dim, 0.0);
    std::vector<float> q(dim);
    for (size_t d = 0; d < dim; ++d) q[d] = query.get(int64_t{row} * head_dim + static_cast<int64_t>(d));
    double sum = 0;
    for (size_t k = 0; k <= static_cast<size_t>(row); ++k) {
      double score = 0;
      for (size_t d = 0; d < dim; ++d) score += double{q[d]} * k_of[k * dim + d];
      const double weight = std::exp(score * p.scale);
      sum += weight;
      for (size_t d = 0; d < dim; ++d) expected[d] += weight * v_of[k * dim + d];
    }
    for (size_t d = 0; d < dim; ++d) {
      const double right = expected[d] / sum, given = output[static_cast<size_t>(row) * dim + d];
      difference += (given - right) * (given - right), norm += right * right;
      if (rows == 0) {
        last_difference += (given - right) * (given - right), last_norm += right * right, projected += given * right;
      }
    }
  }
  std::printf(
      "%-12s d %-3d %7d tokens, mean %.0f: RMSE %.2e, relative %.2e; last row RMSE %.2e, relative %.2e, length %.4f\n",
      name, head_dim, length, mean, std::sqrt(difference / (rows * head_dim)), std::sqrt(difference / norm),
      std::sqrt(last_difference / head_dim), std::sqrt(last_difference / last_norm), projected / last_norm);
  std::fflush(stdout);
  for (const void* device : {p.query, p.key, p.value, static_cast<const void*>(p.output)}) {
    MUST(cudaFree(const_cast<void*>(device)));
  }
}

// FlashAttention 3's FP8 forward on an H200: sequences of 512, 1k, 2k, 4k, 8k, 16k.
constexpr double kFlashAttention3[3][2][6] = {
    {{207, 284, 451, 532, 621, 656}, {135, 224, 354, 455, 553, 601}},
    {{352, 545, 680, 810, 881, 892}, {186, 314, 465, 653, 817, 894}},
    {{438, 655, 872, 1036, 1134, 1126}, {218, 382, 571, 779, 994, 1116}},
};

void bench(int only, const Memory& memory) {
  cudaStream_t stream;
  MUST(cudaStreamCreate(&stream));
  std::printf("TFLOP/s (share of FlashAttention 3), %d tokens, sequences of 512, 1k, 2k, 4k, 8k, 16k\n", kTokens);
  double logs = 0;
  int shapes = 0;
  for (int dim = 0; dim < 3; ++dim) {
    const int head_dim = 64 << dim, heads = 2048 / head_dim;
    if (only != 0 && head_dim != only) continue;
    for (const bool causal : {false, true}) {
      std::printf("head_dim %-3d %-7s", head_dim, causal ? "causal" : "full");
      for (int length = 512, at = 0; length <= kTokens; length *= 2, ++at) {
        const double rate =
            measure({head_dim, head_dim, heads, heads, length, causal, 0}, memory, stream, launch_default, 12);
        const double share = rate / kFlashAttention3[dim][causal][at];
        std::printf(" %5.0f (%.2f)", rate, share);
        std::fflush(stdout);
        logs += std::log(share), ++shapes;
      }
      std::printf("\n");
    }
  }
  std::printf("geometric mean of the shares: %.3f\n", std::exp(logs / shapes));
  MUST(cudaStreamDestroy(stream));
}

std::vector<Candidate> candidates() {
  std::vector<Candidate> all;
#define NVB_CANDIDATE(HEAD_DIM, WARPGROUPS, KEYS, TURNS, FLUSH)                                \
  all.push_back({#WARPGROUPS " x 64 x " #KEYS ", turns: " #TURNS ", flush: " #FLUSH, HEAD_DIM, \
                 launch_tile<nvb::prefill_fp8::Tile<HEAD_DIM, WARPGROUPS, KEYS, TURNS, FLUSH>>});
#include "attention_prefill_fp8_tiles.h"
#undef NVB_CANDIDATE
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "all";
  const std::string which = argc > 2 ? argv[2] : "";
  int failures = 0;
  if (what == "check" || what == "all") failures = check(attention_cases::fp8_cases(), which, launch_case);
  if (what == "error" || what == "all") {
    for (const int head_dim : {64, 128, 256}) print_error("default", head_dim, 16384, 0, launch_default);
    for (const float mean : {0.0f, 1.0f}) {
      print_error("default", 128, 131072, mean, launch_default);
      print_error("every 384", 128, 131072, mean, launch_tile<nvb::prefill_fp8::Tile<128, 2, 192, true, 384>>);
      print_error("not flushed", 128, 131072, mean, launch_tile<nvb::prefill_fp8::Tile<128, 2, 192, true, 1048576>>);
    }
  }
  if (what == "bench" || what == "tiles" || what == "all") {
    const Memory memory(NVB_F8_E4M3, size_t{kTokens} * 2048);
    if (what != "tiles") bench(std::atoi(which.c_str()), memory);
    if (what == "tiles") compare(candidates(), std::atoi(which.c_str()), memory);
  }
  if (what == "once" && argc == 5) {
    const Memory memory(NVB_F8_E4M3, size_t{kTokens} * 2048);
    const int head_dim = std::atoi(argv[2]), heads = 2048 / head_dim;
    const nvb_attention_prefill_params p =
        params_of({head_dim, head_dim, heads, heads, std::atoi(argv[4]), std::atoi(argv[3]) != 0, 0}, memory);
    for (int i = 0; i < 3; ++i) MUST(launch_default(p, device_launch(nullptr)));
    MUST(cudaDeviceSynchronize());
  }
  return failures == 0 ? 0 : 1;
}
