// Which division of the products of one token is fastest within a decode step.
//
// A product alone, or in turn with copies of itself, does not meet what a layer puts beside it: kernels of a replay
// begin while those before them run, as far as shared memory and threads leave room. This captures layers of Gemma 3 as
// a graph and varies the division of one product after the other. A variant is compared with the product in f32 before
// it is timed.
//
// Arguments: formats out of bf16, int8 and int4; without one all three.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "common/constant_reads.h"
#include "decode_step_layer.h"

namespace {

using namespace decode_step;
using nvb::quantized::DecodeKernel;
using nvb::quantized::kAny;

constexpr int kLayers = 24;
constexpr double kBound = 5e-3;       // of a result in BF16
constexpr double kBandwidth = 4.5e6;  // bytes a µs, at which an H200 reads a long stream
constexpr double kClearly = 0.1;      // µs a layer, more than repeated measurements differ by

const Model kModels[] = {
    {"1B", 1152, 4, 1, 256, 6912}, {"4B", 2560, 8, 4, 256, 10240}, {"12B", 3840, 16, 8, 256, 15360}};

using Choices = const DecodeChoice* [kProducts];

std::string describe(const DecodeChoice* choice) {
  if (choice == nullptr) return "by the table";
  const char* const names[] = {"stream", "stream3", "registers", "registers4", "stationary"};
  char text[96];
  std::snprintf(text, sizeof text, "%s shift %d warps %d/%d blocks %d groups %d",
                names[static_cast<int>(choice->kernel)], choice->cluster_shift, choice->warps, choice->warps_k,
                choice->blocks_per_sm, choice->groups);
  return text;
}

std::vector<DecodeChoice> divisions(Format format) {
  std::vector<DecodeChoice> all;
  const auto add = [&](DecodeKernel kernel, int shift, int warps, int warps_k, int blocks, int groups) {
    all.push_back({8, 0, kAny, 0, kAny, kernel, shift, warps, warps_k, blocks, groups});
  };
  add(DecodeKernel::kRegisters, 0, 0, 0, 0, 1);
  if (format == Format::kInt4) add(DecodeKernel::kRegisters4, 0, 0, 0, 0, 1);
  const std::pair<int, int> warps[] = {{8, 1}, {8, 4}, {10, 2}, {12, 2}, {12, 4}, {14, 1}, {14, 2}, {16, 2}, {16, 4}};
  for (int shift = 0; shift <= 3; ++shift) {
    for (int blocks = 1; blocks <= 2; ++blocks) {
      for (const auto& [all_warps, warps_k] : warps) add(DecodeKernel::kStream, shift, all_warps, warps_k, blocks, 1);
      if (format != Format::kInt4) continue;
      for (int groups = 1; groups <= 2; ++groups) add(DecodeKernel::kStationary, shift, 0, 0, blocks, groups);
    }
  }
  return all;
}

// µs a layer, the median of some launches.
double measure(Layer& layer, const Choices& choices, cudaStream_t stream) {
  constexpr int kRuns = 5, kLaunches = 3;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < kLayers; ++i) layer.queue(i, choices);
  MUST(cudaStreamEndCapture(stream, &graph));
  MUST(cudaGraphInstantiate(&replay, graph, 0));
  cudaEvent_t begin = nullptr, end = nullptr;
  MUST(cudaEventCreate(&begin));
  MUST(cudaEventCreate(&end));
  MUST(cudaGraphLaunch(replay, stream));
  std::vector<float> times(kRuns);
  for (float& time : times) {
    MUST(cudaEventRecord(begin, stream));
    for (int i = 0; i < kLaunches; ++i) MUST(cudaGraphLaunch(replay, stream));
    MUST(cudaEventRecord(end, stream));
    MUST(cudaEventSynchronize(end));
    MUST(cudaEventElapsedTime(&time, begin, end));
  }
  cudaEventDestroy(begin), cudaEventDestroy(end), cudaGraphExecDestroy(replay), cudaGraphDestroy(graph);
  std::sort(times.begin(), times.end());
  return 1e3 * times[kRuns / 2] / kLaunches / kLayers;
}

// Varies one product after the other, and keeps of each what was clearly faster. Counts what was wrong.
int sweep(const Model& model, Format format, const nvb_launch& launch) {
  Layer layer(model, format, launch);
  const Choices table = {};
  Choices best = {};
  int wrong = 0;
  const auto is_right = [&](int product, const DecodeChoice* choice) {
    const double error = layer.error(product, choice);
    if (error >= kBound) {
      std::printf("WRONG: %s %s %s: %g\n", model.name, kProductNames[product], describe(choice).c_str(), error);
      ++wrong;
    }
    return error < kBound;
  };
  for (int i = 0; i < kProducts; ++i) is_right(i, nullptr);
  const double floor = layer.bytes() / kBandwidth, before = measure(layer, table, launch.stream);
  std::printf("%.1f MB, %.2f µs at 4.5 TB/s; by the table %.2f, %.2f beyond\n", layer.bytes() / 1e6, floor, before,
              before - floor);
  if (format == Format::kBf16) return wrong;

  const std::vector<DecodeChoice> all = divisions(format);
  for (int product : {3, 2, 0, 1}) {
    const double now = measure(layer, best, launch.stream);
    std::vector<std::pair<double, const DecodeChoice*>> times;
    for (const DecodeChoice& choice : all) {
      if (!is_right(product, &choice)) continue;
      const DecodeChoice* const kept = std::exchange(best[product], &choice);
      times.push_back({measure(layer, best, launch.stream), &choice});
      best[product] = kept;
    }
    std::sort(times.begin(), times.end());
    std::printf("  %s, %lld blocks of rows, %lld chunks: %.2f now", kProductNames[product],
                static_cast<long long>(layer.rows(product) / 16), static_cast<long long>(layer.columns(product) / 64),
                now);
    for (size_t i = 0; i < std::min<size_t>(4, times.size()); ++i) {
      std::printf(" | %.2f %s", times[i].first, describe(times[i].second).c_str());
    }
    std::printf("\n");
    if (!times.empty() && times[0].first < now - kClearly) best[product] = times[0].second;
  }
  for (int i = 0; i < 3; ++i) {
    const double first = measure(layer, table, launch.stream), second = measure(layer, best, launch.stream);
    std::printf("  by the table %.2f, by the best %.2f, by the table %.2f\n", first, second,
                measure(layer, table, launch.stream));
  }
  return wrong;
}

}  // namespace

int main(int count, char** arguments) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  nvb_launch launch = {};
  MUST(cudaStreamCreateWithFlags(&launch.stream, cudaStreamNonBlocking));
  MUST(cudaDeviceGetAttribute(&launch.multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  MUST(cudaDeviceGetAttribute(&launch.shared_bytes_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
  MUST(cudaDeviceGetAttribute(&launch.l2_bytes, cudaDevAttrL2CacheSize, 0));
  launch.capability = 90;
  nvb_cuda_set_constant_reads(NVB_CONSTANT_WEIGHTS | NVB_CONSTANT_POSITIONS);
  const std::pair<const char*, Format> formats[] = {
      {"bf16", Format::kBf16}, {"int8", Format::kInt8}, {"int4", Format::kInt4}};
  int wrong = 0;
  for (const auto& [name, format] : formats) {
    bool asked = count == 1;
    for (int i = 1; i < count; ++i) asked |= std::strcmp(arguments[i], name) == 0;
    if (!asked) continue;
    for (const Model& model : kModels) {
      std::printf("%s %s: ", model.name, name);
      wrong += sweep(model, format, launch);
    }
  }
  return wrong == 0 ? 0 : 1;
}
