// The kernels of convert_heads on a device without Rust. convert_heads.sh builds it:
//
//   target/gpu/convert_heads check   bits beside a loop on the host: shapes, dtypes, strides, scales given and written
//   target/gpu/convert_heads error   what a rotation does for FP8 attention of FlashAttention 3's outliers (9.0 alone)
//   target/gpu/convert_heads bench   microseconds and GB/s
#include <cuda_runtime.h>

#include "attention/attention_prefill_fp8.h"
#include "attention_prefill_device.h"
#include "convert_heads/convert_heads.h"

namespace {

using attention_cases::from_bits;
using attention_cases::is_fp8;
using attention_cases::to_bits;
using gpu::device_launch;

std::mt19937_64 random_source(29);

int bytes_of(uint32_t dtype) {
  return dtype == NVB_F32 ? 4 : is_fp8(dtype) ? 1 : 2;
}

float get(const std::vector<uint8_t>& data, uint32_t dtype, int64_t at) {
  const uint8_t* const place = data.data() + at * bytes_of(dtype);
  float value = 0;
  uint16_t bits = 0;
  if (dtype == NVB_F32) {
    std::memcpy(&value, place, 4);
    return value;
  }
  std::memcpy(&bits, place, static_cast<size_t>(bytes_of(dtype)));
  return from_bits(dtype, bits);
}

void set(std::vector<uint8_t>& data, uint32_t dtype, int64_t at, float value) {
  uint8_t* const place = data.data() + at * bytes_of(dtype);
  if (dtype == NVB_F32) {
    std::memcpy(place, &value, 4);
    return;
  }
  const uint16_t bits = to_bits(dtype, value);
  std::memcpy(place, &bits, static_cast<size_t>(bytes_of(dtype)));
}

struct Shape {
  int64_t first, tokens, heads, head_dim, count;  // count of scales
  uint32_t input, output;
  bool rotate, written, scaled, gaps, in_place;
};

nvb_convert_heads_params params_of(const Shape& s) {
  nvb_convert_heads_params p = {};
  const int64_t shape[4] = {s.first, s.tokens, s.heads, s.head_dim};
  std::copy(shape, shape + 4, p.shape);
  // With gaps heads come before tokens, and the innermost stride of the output is 2.
  const int64_t plain[4] = {s.tokens * s.heads * s.head_dim, s.heads * s.head_dim, s.head_dim, 1};
  const int64_t swapped[4] = {s.tokens * s.heads * (s.head_dim + 3), s.head_dim + 3, s.tokens * (s.head_dim + 3), 1};
  std::copy(s.gaps ? swapped : plain, (s.gaps ? swapped : plain) + 4, p.input_strides);
  for (int axis = 0; axis < 4; ++axis)
    p.output_strides[axis] = s.gaps && !s.in_place ? 2 * plain[axis] : p.input_strides[axis];
  p.heads_per_scale = s.scaled ? s.heads / s.count : s.heads;
  p.input_dtype = s.input, p.output_dtype = s.output, p.write_scales = s.scaled && s.written;
  p.block = static_cast<uint32_t>(s.head_dim & -s.head_dim);
  p.factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(p.block)));
  p.largest = s.output == NVB_F8_E5M2 ? 57344.0f : 448.0f;
  p.rotate = s.rotate;
  for (uint32_t& word : p.signs) word = static_cast<uint32_t>(random_source());
  return p;
}

int64_t span(const int64_t (&shape)[4], const int64_t (&strides)[4]) {
  int64_t last = 0;
  for (int axis = 0; axis < 4; ++axis) last += (shape[axis] - 1) * strides[axis];
  return last + 1;
}

// The head of a row, rotated.
std::vector<float> head_of(const nvb_convert_heads_params& p, const std::vector<uint8_t>& input, int64_t from) {
  std::vector<float> x(static_cast<size_t>(p.shape[3]));
  for (size_t i = 0; i < x.size(); ++i)
    x[i] = get(input, p.input_dtype, from + static_cast<int64_t>(i) * p.input_strides[3]);
  if (!p.rotate) return x;
  for (size_t i = 0; i < x.size(); ++i) x[i] = p.signs[i / 32] >> (i % 32) & 1 ? -x[i] : x[i];
  for (size_t distance = 1; distance < p.block; distance *= 2) {
    for (size_t i = 0; i < x.size(); ++i) {
      if (i & distance) continue;
      const float low = x[i], high = x[i + distance];
      x[i] = low + high, x[i + distance] = low - high;
    }
  }
  for (float& value : x) value *= p.factor;
  return x;
}

void check(const Shape& s, int& checked) {
  nvb_convert_heads_params p = params_of(s);
  std::normal_distribution<float> normal(0.0f, 2.0f);
  const int64_t elements = span(p.shape, p.input_strides), outputs = span(p.shape, p.output_strides);
  std::vector<uint8_t> input(static_cast<size_t>(elements * bytes_of(s.input)));
  for (int64_t i = 0; i < elements; ++i) set(input, s.input, i, normal(random_source));
  std::vector<float> scales(static_cast<size_t>(s.count));
  for (float& scale : scales) scale = s.written ? NAN : std::fabs(normal(random_source)) + 0.01f;
  std::vector<uint8_t> expected(static_cast<size_t>(outputs * bytes_of(s.output)), 0xff);
  if (s.in_place) expected = input;
  if (p.write_scales) std::fill(scales.begin(), scales.end(), 0.0f);
  const std::vector<float> given = scales;
  for (const bool second : {false, true}) {
    if (!second && !p.write_scales) continue;
    for (int64_t row = 0; row < s.first * s.tokens * s.heads; ++row) {
      const int64_t a = row / s.heads / s.tokens, b = row / s.heads % s.tokens, c = row % s.heads;
      const int64_t from = a * p.input_strides[0] + b * p.input_strides[1] + c * p.input_strides[2];
      const int64_t to = a * p.output_strides[0] + b * p.output_strides[1] + c * p.output_strides[2];
      const std::vector<float> x = head_of(p, input, from);
      float& scale = scales[static_cast<size_t>(s.scaled ? c / p.heads_per_scale : 0)];
      for (size_t i = 0; i < x.size(); ++i) {
        if (!second) scale = std::max(scale, std::fabs(x[i]) / p.largest);
        if (second) {
          const float value = !s.scaled ? x[i] : scale == 0.0f ? 0.0f : x[i] / scale;
          set(expected, s.output, to + static_cast<int64_t>(i) * p.output_strides[3], value);
        }
      }
    }
  }
  uint8_t *in = nullptr, *out = nullptr;
  float* factors = nullptr;
  MUST(cudaMalloc(&in, input.size() + 16));
  MUST(cudaMalloc(&out, expected.size() + 16));
  MUST(cudaMalloc(&factors, scales.size() * 4));
  MUST(cudaMemcpy(in, input.data(), input.size(), cudaMemcpyHostToDevice));
  MUST(cudaMemset(out, 0xff, expected.size()));
  std::vector<float> poison(scales.size(), NAN);
  MUST(cudaMemcpy(factors, p.write_scales ? poison.data() : given.data(), scales.size() * 4, cudaMemcpyHostToDevice));
  p.input = in, p.output = s.in_place ? in : out, p.scales = s.scaled ? factors : nullptr;
  const nvb_launch launch = device_launch(nullptr);
  MUST(nvb_cuda_convert_heads(&p, &launch));
  MUST(cudaDeviceSynchronize());
  std::vector<uint8_t> result(expected.size());
  std::vector<float> found(scales.size());
  MUST(cudaMemcpy(result.data(), p.output, result.size(), cudaMemcpyDeviceToHost));
  MUST(cudaMemcpy(found.data(), factors, found.size() * 4, cudaMemcpyDeviceToHost));
  if (result != expected || (p.write_scales && found != scales)) {
    size_t at = 0;
    while (at < result.size() && result[at] == expected[at]) ++at;
    std::printf(
        "WRONG: [%lld, %lld, %lld, %lld], %u to %u, rotate %d, scales %d (%lld, written %d), gaps %d: byte %zu\n",
        static_cast<long long>(s.first), static_cast<long long>(s.tokens), static_cast<long long>(s.heads),
        static_cast<long long>(s.head_dim), s.input, s.output, s.rotate, s.scaled, static_cast<long long>(s.count),
        s.written, s.gaps, at);
    std::exit(1);
  }
  for (void* block : {static_cast<void*>(in), static_cast<void*>(out), static_cast<void*>(factors)})
    MUST(cudaFree(block));
  ++checked;
}

void check_all() {
  int checked = 0;
  const uint32_t floats[] = {NVB_F32, NVB_F16, NVB_BF16};
  const uint32_t outputs[] = {NVB_F32, NVB_F16, NVB_BF16, NVB_F8_E4M3, NVB_F8_E5M2};
  for (const int64_t dim : {8, 24, 64, 80, 96, 128, 192, 256, 320, 512, 576}) {
    for (const uint32_t input : floats) {
      for (const uint32_t output : outputs) {
        for (const bool rotate : {false, true}) {
          for (const bool gaps : {false, true}) {
            const bool scaled = is_fp8(output);
            check({2, 5, 4, dim, 2, input, output, rotate, gaps, scaled, gaps, false}, checked);
            check({1, 300, 4, dim, 1, input, output, rotate, !gaps, scaled, gaps, false}, checked);
            if (input == output) check({2, 3, 2, dim, 1, input, output, rotate, false, false, gaps, true}, checked);
          }
        }
      }
    }
  }
  for (const int64_t tokens : {1, 33, 5000}) {
    for (const int64_t heads : {1, 3, 32}) {
      check({1, tokens, heads, 128, heads, NVB_BF16, NVB_F8_E4M3, true, true, true, false, false}, checked);
    }
  }
  std::printf("convert_heads: %d cases have the host's bits\n", checked);
}

// Which numbers are outliers decides: of one head of 2,048 keys and 256 columns a rotation left 0.74 of the error, and
// of sixteen 0.47.
constexpr int kErrorHeads = 16, kErrorRows = 32;

// A head of `tokens` keys and as many queries: normal numbers, to one in a thousand of which a normal number of
// deviation 10 is added (FlashAttention 3, section 4.3). The mean square of the error beside f64 of what was not
// rounded, over some rows.
double squared_error_of(int head, int head_dim, int tokens, bool rotate) {
  std::mt19937_64 random(5 + static_cast<uint64_t>(head));
  std::normal_distribution<float> normal;
  const size_t elements = static_cast<size_t>(tokens) * static_cast<size_t>(head_dim);
  std::vector<uint8_t> host[3];
  void* rounded[3];
  float* scales = nullptr;
  MUST(cudaMalloc(&scales, 12));
  const nvb_launch launch = device_launch(nullptr);
  std::vector<uint32_t> signs(NVB_CONVERT_HEADS_SIGN_WORDS);
  for (uint32_t& word : signs) word = static_cast<uint32_t>(random());
  for (int which = 0; which < 3; ++which) {
    host[which].resize(elements * 2);
    for (size_t i = 0; i < elements; ++i) {
      float value = normal(random);
      if (random() % 1000 == 0) value += 10.0f * normal(random);
      set(host[which], NVB_BF16, static_cast<int64_t>(i), value);
    }
    nvb_convert_heads_params p =
        params_of({1, tokens, 1, head_dim, 1, NVB_BF16, NVB_F8_E4M3, rotate && which < 2, true, true, false, false});
    std::copy(signs.begin(), signs.end(), p.signs);
    void* input = nullptr;
    MUST(cudaMalloc(&input, elements * 2));
    MUST(cudaMalloc(&rounded[which], elements));
    MUST(cudaMemcpy(input, host[which].data(), elements * 2, cudaMemcpyHostToDevice));
    p.input = input, p.output = rounded[which], p.scales = scales + which;
    MUST(nvb_cuda_convert_heads(&p, &launch));
    MUST(cudaDeviceSynchronize());
    MUST(cudaFree(input));
  }
  nvb_attention_prefill_params p = {};
  void* output = nullptr;
  MUST(cudaMalloc(&output, elements * 4));
  p.query = rounded[0], p.key = rounded[1], p.value = rounded[2], p.output = output;
  p.query_head_stride = p.key_head_stride = p.value_head_stride = p.output_head_stride = head_dim;
  p.query_token_stride = p.key_token_stride = p.value_token_stride = p.output_token_stride = head_dim;
  p.query_sequence_stride = p.key_sequence_stride = p.value_sequence_stride = p.output_sequence_stride = head_dim;
  p.query_dtype = p.kv_dtype = NVB_F8_E4M3, p.output_dtype = NVB_F32;
  p.query_heads = p.kv_heads = 1, p.head_dim = p.value_dim = head_dim;
  p.query_scale = scales, p.key_scale = scales + 1, p.value_scale = scales + 2;
  p.scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  p.sequences = 1;
  p.sequence[0] = {0, tokens, 0, tokens, 0, 0};
  MUST(nvb_cuda_attention_prefill_fp8(&p, &launch));
  MUST(cudaDeviceSynchronize());
  std::vector<float> found(elements);
  MUST(cudaMemcpy(found.data(), output, elements * 4, cudaMemcpyDeviceToHost));
  double squares = 0;
  int rows = 0;
  std::vector<float> numbers[3];
  for (int which = 0; which < 3; ++which) {
    numbers[which].resize(elements);
    for (size_t i = 0; i < elements; ++i) numbers[which][i] = get(host[which], NVB_BF16, static_cast<int64_t>(i));
  }
  const size_t dim = static_cast<size_t>(head_dim);
  std::vector<double> weights(static_cast<size_t>(tokens));
  for (size_t row = 0; row < static_cast<size_t>(tokens); row += static_cast<size_t>(tokens / kErrorRows), ++rows) {
    double sum = 0;
    for (size_t k = 0; k < weights.size(); ++k) {
      double score = 0;
      for (size_t d = 0; d < dim; ++d) score += double{numbers[0][row * dim + d]} * numbers[1][k * dim + d];
      sum += weights[k] = std::exp(score * p.scale);
    }
    for (size_t d = 0; d < dim; ++d) {
      double right = 0;
      for (size_t k = 0; k < weights.size(); ++k) right += weights[k] * numbers[2][k * dim + d];
      squares += std::pow(found[row * dim + d] - right / sum, 2);
    }
  }
  for (void* block : {rounded[0], rounded[1], rounded[2], output, static_cast<void*>(scales)}) MUST(cudaFree(block));
  return squares / (rows * head_dim);
}

double error_of(int head_dim, int tokens, bool rotate) {
  double squares = 0;
  for (int head = 0; head < kErrorHeads; ++head) squares += squared_error_of(head, head_dim, tokens, rotate);
  return std::sqrt(squares / kErrorHeads);
}

double microseconds(const Shape& s) {
  nvb_convert_heads_params p = params_of(s);
  const size_t elements = static_cast<size_t>(s.first * s.tokens * s.heads * s.head_dim);
  // Eight tensors in turn, more than L2 holds.
  uint8_t* memory = nullptr;
  float* scales = nullptr;
  const size_t bytes = elements * static_cast<size_t>(bytes_of(s.input) + bytes_of(s.output));
  MUST(cudaMalloc(&memory, 8 * bytes));
  MUST(cudaMemset(memory, 0x3c, 8 * bytes));
  MUST(cudaMalloc(&scales, 256));
  MUST(cudaMemset(scales, 0x3c, 256));
  p.scales = s.scaled ? scales : nullptr;
  cudaStream_t stream;
  MUST(cudaStreamCreate(&stream));
  const nvb_launch launch = device_launch(stream);
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (size_t i = 0; i < 32; ++i) {
    p.input = memory + i % 8 * bytes;
    p.output = memory + i % 8 * bytes + elements * static_cast<size_t>(bytes_of(s.input));
    MUST(nvb_cuda_convert_heads(&p, &launch));
  }
  MUST(cudaStreamEndCapture(stream, &graph));
  MUST(cudaGraphInstantiate(&replay, graph, 0));
  cudaEvent_t begin, end;
  MUST(cudaEventCreate(&begin));
  MUST(cudaEventCreate(&end));
  float best = 1e30f;
  for (int round = 0; round < 8; ++round) {
    MUST(cudaEventRecord(begin, stream));
    MUST(cudaGraphLaunch(replay, stream));
    MUST(cudaEventRecord(end, stream));
    MUST(cudaEventSynchronize(end));
    float time = 0;
    MUST(cudaEventElapsedTime(&time, begin, end));
    best = std::min(best, time);
  }
  MUST(cudaFree(memory));
  MUST(cudaFree(scales));
  MUST(cudaGraphExecDestroy(replay));
  MUST(cudaGraphDestroy(graph));
  MUST(cudaStreamDestroy(stream));
  return best * 1e3 / 32;
}

void bench() {
  std::printf("BF16 to E4M3, us (GB/s of what is read and written once): scales given; written\n");
  for (const bool rotate : {false, true}) {
    for (const int64_t dim : {64, 128, 256}) {
      for (const int64_t tokens : {64, 2048, 16384}) {
        std::printf("%s %5lld tokens, %2lld heads of %3lld:", rotate ? "rotated" : "as it is",
                    static_cast<long long>(tokens), static_cast<long long>(2048 / dim), static_cast<long long>(dim));
        for (const bool written : {false, true}) {
          const double time =
              microseconds({1, tokens, 2048 / dim, dim, 1, NVB_BF16, NVB_F8_E4M3, rotate, written, true, false, false});
          std::printf("  %6.1f (%4.0f)", time, static_cast<double>(tokens) * 2048 * 3 / time * 1e-3);
        }
        std::printf("\n");
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "all";
  if (what == "check" || what == "all") check_all();
  if (what == "error" || what == "all") {
    for (const int head_dim : {64, 128, 256}) {
      for (const int tokens : {2048, 8192}) {
        const double plain = error_of(head_dim, tokens, false), rotated = error_of(head_dim, tokens, true);
        std::printf("%d heads of %3d, %5d tokens of outliers: RMSE %.2e, rotated %.2e, %.2f times\n", kErrorHeads,
                    head_dim, tokens, plain, rotated, rotated / plain);
      }
    }
  }
  if (what == "bench" || what == "all") bench();
  return 0;
}
