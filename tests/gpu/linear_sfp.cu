// Products with SFP weights on a device: each kernel against sums in f64 of the same numbers, and the time of one row
// beside INT8 with a scale a row, whose bytes are as many. Every value is decoded by a table that is made from the
// format's definition, not by the kernels' own operations.
#include "linear_sfp.h"

#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "device.h"

namespace {

using gpu::on_device;
using gpu::random_bits;

float sfp_value(int code) {
  const int size = code & 127;
  const float magnitude = size == 0   ? 0
                          : size < 64 ? std::ldexp(1 + (size & 3) / 4.0F, (size >> 2) - 23)
                                      : std::ldexp(1 + (size & 7) / 8.0F, (size >> 3 & 7) - 7);
  return code & 128 ? -magnitude : magnitude;
}

float bf16_value(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

struct Case {
  int64_t m, n, k;
};

class Fixture {
 public:
  explicit Fixture(const Case& shape) : m(shape.m), n(shape.n), k(shape.k) {
    codes.resize(n * k);
    for (size_t i = 0; i < codes.size(); ++i) {
      // All codes but the reserved one, mostly those of ordinary weights.
      const uint64_t bits = random_bits(i);
      codes[i] = static_cast<uint8_t>(i < 256 ? i : bits % 7 == 0 ? bits >> 8 : (bits >> 8 & 0x9f) | 0x20);
      if (codes[i] == 0x80) codes[i] = 0;
    }
    x.resize(m * k);
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] = static_cast<uint16_t>((random_bits(i + 77) & 0x81ff) | 0x3e00);  // 0.125 to 2 and their negatives
    }
    scales.resize(n);
    for (int64_t i = 0; i < n; ++i) scales[i] = 0.5F + static_cast<float>(i % 7) * 0.25F;
    p = {};
    p.input = on_device(x), p.weight = on_device(codes), p.scales = on_device(scales);
    MUST(cudaMalloc(&p.output, m * n * 4));
    MUST(cudaMalloc(&p.workspace, 64 * (k + 128) * 2));
    p.m = m, p.n = n, p.k = k;
    p.input_stride = p.weight_stride = k, p.output_stride = n;
    p.input_dtype = NVB_BF16, p.output_dtype = NVB_F32;
    p.encoding = NVB_SFP, p.scale_kind = NVB_SCALES_ROWS;
  }
  ~Fixture() {
    for (const void* data :
         {p.input, p.weight, p.scales, static_cast<const void*>(p.output), static_cast<const void*>(p.workspace)}) {
      cudaFree(const_cast<void*>(data));
    }
  }

  // The largest difference of the product from the sum of absolute values, for some rows of W.
  double error(Product product, const nvb_launch& launch) {
    MUST(cudaMemset(p.output, 0xff, m * n * 4));
    MUST(product(p, launch));
    MUST(cudaDeviceSynchronize());
    std::vector<float> y(m * n);
    MUST(cudaMemcpy(y.data(), p.output, y.size() * 4, cudaMemcpyDeviceToHost));
    double worst = 0;
    for (int64_t token = 0; token < m; ++token) {
      for (int64_t row = 0; row < n; row += row < 40 || row > n - 20 ? 1 : 97) {
        double sum = 0, size = 0;
        for (int64_t i = 0; i < k; ++i) {
          const double term =
              static_cast<double>(bf16_value(x[token * k + i])) * sfp_value(codes[row * k + i]) * scales[row];
          sum += term, size += std::fabs(term);
        }
        const double difference = std::fabs(y[token * n + row] - sum) / size;
        if (!(difference <= worst)) worst = difference;  // NaN too
      }
    }
    return worst;
  }

  // The least of several averages, in µs, weights out of the cache.
  double time(Product product, const nvb_launch& launch, const std::vector<const void*>& weights) {
    cudaEvent_t begin, end;
    MUST(cudaEventCreate(&begin));
    MUST(cudaEventCreate(&end));
    double best = 1e30;
    for (int round = 0; round < 5; ++round) {
      MUST(cudaEventRecord(begin, launch.stream));
      constexpr int kCalls = 40;
      for (int i = 0; i < kCalls; ++i) {
        nvb_linear_quantized_params params = p;
        params.weight = weights[i % weights.size()];
        MUST(product(params, launch));
      }
      MUST(cudaEventRecord(end, launch.stream));
      MUST(cudaEventSynchronize(end));
      float milliseconds = 0;
      MUST(cudaEventElapsedTime(&milliseconds, begin, end));
      best = std::min(best, 1e3 * milliseconds / kCalls);
    }
    return best;
  }

  int64_t m, n, k;
  std::vector<uint8_t> codes;
  std::vector<uint16_t> x;
  std::vector<float> scales;
  nvb_linear_quantized_params p;
};

int check(const nvb_launch& launch) {
  struct Kernel {
    const char* name;
    Product product;
    int64_t most;  // rows of x
    int capability;
  };
  const Kernel kernels[] = {{"decode", decode_sfp, 16, 90},     {"skinny8", skinny8_sfp, 8, 80},
                            {"skinny16", skinny16_sfp, 16, 80}, {"mma64", mma64_sfp, 1000, 80},
                            {"wgmma", wgmma_sfp, 64, 90},       {"plain", plain_sfp, 1000, 0}};
  const Case cases[] = {{1, 40, 64},    {1, 1000, 4672}, {3, 136, 2560}, {8, 264, 1152},
                        {16, 130, 576}, {33, 264, 2112}, {64, 40, 192},  {100, 136, 640}};
  int failed = 0;
  for (const Case& shape : cases) {
    Fixture fixture(shape);
    for (const Kernel& kernel : kernels) {
      if (shape.m > kernel.most || launch.capability < kernel.capability) continue;
      const double error = fixture.error(kernel.product, launch);
      const bool good = error < 1e-5;
      failed += !good;
      std::printf("%-9s %4ld x %4ld x %5ld  %.1e%s\n", kernel.name, shape.m, shape.n, shape.k, error,
                  good ? "" : "  WRONG");
    }
  }
  return failed;
}

void table(const nvb_launch& launch) {
  std::printf("%-18s %10s %10s %8s %8s\n", "rows, n x k", "sfp, us", "int8, us", "ratio", "GB/s");
  const Case cases[] = {{1, 4096, 2560},  {1, 20480, 2560},  {1, 2560, 10240}, {1, 28672, 4096},
                        {1, 4096, 14336}, {1, 262144, 2560}, {8, 20480, 2560}, {16, 20480, 2560}};
  for (const Case& shape : cases) {
    Fixture fixture(shape);
    // As many copies as exceed the second-level cache.
    std::vector<const void*> weights;
    const size_t bytes = fixture.codes.size();
    for (size_t total = 0; total < size_t{256} << 20 || weights.size() < 2; total += bytes) {
      weights.push_back(on_device(fixture.codes));
    }
    const double sfp = fixture.time(decode_sfp, launch, weights);
    fixture.p.encoding = NVB_INT8;
    const double int8 = fixture.time(decode_int8, launch, weights);
    char name[64];
    std::snprintf(name, sizeof name, "%ld, %ld x %ld", shape.m, shape.n, shape.k);
    std::printf("%-18s %10.2f %10.2f %8.3f %8.0f\n", name, sfp, int8, sfp / int8,
                static_cast<double>(bytes) / sfp / 1e3);
    for (const void* weight : weights) cudaFree(const_cast<void*>(weight));
  }
}

}  // namespace

int main() {
  cudaStream_t stream;
  MUST(cudaStreamCreate(&stream));
  const nvb_launch launch = gpu::device_launch(stream);
  const int failed = check(launch);
  if (failed != 0) {
    std::printf("%d products are wrong\n", failed);
    return 1;
  }
  if (launch.capability == 90) table(launch);
  return 0;
}
