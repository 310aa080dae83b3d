// What independent branches of a decode step gain from streams of their own: layers in which q, k and v are three
// products and gate and up two, captured one after the other and with the branches on several streams.
//
// One after the other, each kernel begins under the tail of the one before (programmatic dependent launch) and has its
// weight on the way by then. A branch of its own begins and ends with a full edge, which none of that crosses.
#include <algorithm>
#include <cstring>
#include <vector>

#include "decode_step_layer.h"

namespace {

using decode_step::bf16;

constexpr int kStreams = 3, kRounds = 7, kLayers = 24, kLaunches = 20;

struct Shapes {
  const char* name;
  int64_t width, query, key, feed_forward;
};

enum class Way { kOneProduct, kInTurn, kStreams };
constexpr const char* kWays[] = {"one product each", "in turn", "on streams"};

struct Weight {
  bf16* data;
  int64_t rows, columns;
};

class Layers {
 public:
  Layers(const Shapes& shapes, const nvb_launch& launch) : shapes_(shapes), launch_(launch) {
    const int64_t w = shapes.width;
    for (int i = 0; i < kLayers; ++i) {
      // Of each group the parts lie one behind the other, so that they are one product too.
      attention_.push_back(weight(shapes.query + 2 * shapes.key, w));
      output_.push_back(weight(w, shapes.query));
      gates_.push_back(weight(2 * shapes.feed_forward, w));
      down_.push_back(weight(w, shapes.feed_forward));
    }
    const size_t most = static_cast<size_t>(2 * shapes.feed_forward + shapes.query + 2 * shapes.key);
    for (bf16** buffer : {&x_, &qkv_, &gated_, &hidden_}) *buffer = decode_step::allocate<bf16>(most);
    norm_ = decode_step::allocate<bf16>(w);
    decode_step::fill<<<528, 256>>>(norm_, w, 0.5f, 1.5f, 7u);
    for (cudaStream_t& stream : streams_) MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (cudaEvent_t& event : events_) MUST(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    MUST(cudaDeviceSynchronize());
  }

  cudaGraphExec_t capture(Way way) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t launchable = nullptr;
    MUST(cudaStreamBeginCapture(launch_.stream, cudaStreamCaptureModeRelaxed));
    for (int i = 0; i < kLayers; ++i) queue(i, way);
    MUST(cudaStreamEndCapture(launch_.stream, &graph));
    MUST(cudaGraphInstantiate(&launchable, graph, 0));
    MUST(cudaGraphDestroy(graph));
    return launchable;
  }

  void reset() { decode_step::fill<<<528, 256, 0, launch_.stream>>>(hidden_, shapes_.width, -1.0f, 1.0f, 9u); }

  std::vector<bf16> result() {
    std::vector<bf16> values(shapes_.width);
    MUST(cudaStreamSynchronize(launch_.stream));
    MUST(cudaMemcpy(values.data(), hidden_, values.size() * sizeof(bf16), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  Weight weight(int64_t rows, int64_t columns) {
    auto* const data = decode_step::allocate<bf16>(static_cast<size_t>(rows * columns));
    decode_step::fill<<<528, 256>>>(data, static_cast<size_t>(rows * columns), -0.05f, 0.05f, ++seed_);
    return {data, rows, columns};
  }

  void product(const Weight& weight, int64_t first, int64_t rows, const bf16* input, bf16* output,
               cudaStream_t stream) {
    nvb_launch launch = launch_;
    launch.stream = stream;
    nvb_linear_params p = {};
    p.input = input, p.output = output + first, p.weight = weight.data + first * weight.columns;
    p.m = 1, p.n = rows, p.k = weight.columns, p.input_stride = p.weight_stride = p.k, p.output_stride = p.n;
    p.input_dtype = p.output_dtype = p.weight_dtype = NVB_BF16, p.activation = NVB_NONE;
    MUST(p.k >= 1024 || p.n <= 8192 ? nvb::launch_linear_gemv_ring<bf16>(p, launch) : launch_gemv(p, launch));
  }

  void products(const Weight& weight, const std::vector<int64_t>& parts, const bf16* input, bf16* output, Way way) {
    if (way == Way::kOneProduct) return product(weight, 0, weight.rows, input, output, launch_.stream);
    if (way == Way::kStreams) MUST(cudaEventRecord(events_[0], launch_.stream));
    int64_t first = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
      const bool is_branch = way == Way::kStreams && i > 0;
      if (is_branch) MUST(cudaStreamWaitEvent(streams_[i], events_[0], 0));
      product(weight, first, parts[i], input, output, is_branch ? streams_[i] : launch_.stream);
      if (is_branch) MUST(cudaEventRecord(events_[i], streams_[i]));
      first += parts[i];
    }
    for (size_t i = 1; way == Way::kStreams && i < parts.size(); ++i) {
      MUST(cudaStreamWaitEvent(launch_.stream, events_[i], 0));
    }
  }

  void normalise() {
    nvb_rms_norm_params p = {};
    p.input = hidden_, p.output = x_, p.weight = norm_, p.rows = 1, p.columns = shapes_.width;
    p.input_stride = p.output_stride = shapes_.width, p.epsilon = 1e-6f;
    p.input_dtype = p.output_dtype = p.weight_dtype = NVB_BF16;
    MUST(nvb_cuda_rms_norm(&p, &launch_));
  }

  // A copy stands for rope and attention, and gate and up stay as they are: their time is that of any way.
  void queue(int i, Way way) {
    normalise();
    products(attention_[i], {shapes_.query, shapes_.key, shapes_.key}, x_, qkv_, way);
    MUST(cudaFuncSetAttribute(decode_step::attend, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              decode_step::kAttentionBytes));
    MUST(nvb::launch_overlapped(decode_step::attend, dim3(decode_step::kAttentionBlocks), dim3(128),
                                decode_step::kAttentionBytes, &launch_, qkv_, gated_, shapes_.query));
    product(output_[i], 0, shapes_.width, gated_, hidden_, launch_.stream);
    normalise();
    products(gates_[i], {shapes_.feed_forward, shapes_.feed_forward}, x_, gated_, way);
    product(down_[i], 0, shapes_.width, gated_, hidden_, launch_.stream);
  }

  Shapes shapes_;
  nvb_launch launch_;
  uint32_t seed_ = 0;
  std::vector<Weight> attention_, output_, gates_, down_;
  bf16 *x_, *qkv_, *gated_, *hidden_, *norm_;
  cudaStream_t streams_[kStreams];
  cudaEvent_t events_[kStreams];
};

int measure(const Shapes& shapes, const nvb_launch& launch) {
  Layers layers(shapes, launch);
  cudaGraphExec_t graphs[3];
  std::vector<bf16> results[3];
  std::vector<double> times[3];
  cudaEvent_t start, end;
  MUST(cudaEventCreate(&start));
  MUST(cudaEventCreate(&end));
  for (int way = 0; way < 3; ++way) {
    graphs[way] = layers.capture(static_cast<Way>(way));
    layers.reset();
    MUST(cudaGraphLaunch(graphs[way], launch.stream));
    results[way] = layers.result();
  }
  int wrong = 0;
  // A row of a product is the same sum whatever other rows the kernel has.
  for (int way = 1; way < 3; ++way) {
    const double values = static_cast<float>(results[0][0]);
    if (!(values == values) ||
        std::memcmp(results[0].data(), results[way].data(), results[0].size() * sizeof(bf16)) != 0) {
      ++wrong, std::printf("WRONG: %s, %s\n", shapes.name, kWays[way]);
    }
  }
  for (int round = 0; round < kRounds; ++round) {
    for (int way = 0; way < 3; ++way) {
      MUST(cudaEventRecord(start, launch.stream));
      for (int i = 0; i < kLaunches; ++i) MUST(cudaGraphLaunch(graphs[way], launch.stream));
      MUST(cudaEventRecord(end, launch.stream));
      MUST(cudaEventSynchronize(end));
      float milliseconds = 0;
      MUST(cudaEventElapsedTime(&milliseconds, start, end));
      times[way].push_back(milliseconds * 1e3 / (kLaunches * kLayers));
    }
  }
  std::printf("%s, us a layer:", shapes.name);
  for (int way = 0; way < 3; ++way) {
    std::sort(times[way].begin(), times[way].end());
    std::printf("  %s %.2f", kWays[way], times[way][kRounds / 2]);
  }
  std::printf("\n");
  return wrong;
}

}  // namespace

int main() {
  nvb_launch launch = {};
  MUST(cudaStreamCreateWithFlags(&launch.stream, cudaStreamNonBlocking));
  launch = gpu::device_launch(launch.stream);
  int wrong = 0;
  for (const Shapes& shapes : {Shapes{"270M", 640, 1024, 256, 2048}, Shapes{"1B", 1152, 1024, 256, 6912},
                               Shapes{"4B", 2560, 2048, 1024, 10240}, Shapes{"8B", 4096, 4096, 1024, 14336}}) {
    wrong += measure(shapes, launch);
  }
  return wrong == 0 ? 0 : 1;
}
