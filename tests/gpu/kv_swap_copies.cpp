// The copies of a KV cache's swap, as src/kv_cache/swap.rs queues them, beside one copy of as many bytes between
// page-locked and device memory: how much of the link's rate their number and size leave. Needs no kernel:
//
//   g++ -O2 -std=c++17 tests/gpu/kv_swap_copies.cpp -lcudart -o kv_swap_copies
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CUDA(call)                                                                 \
  do {                                                                             \
    const cudaError_t status_ = (call);                                            \
    if (status_ != cudaSuccess) {                                                  \
      std::printf("%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(status_)); \
      std::exit(2);                                                                \
    }                                                                              \
  } while (false)

int main() {
  constexpr int kLayers = 48, kHeads = 8, kCapacity = 8192;
  struct {
    const char* name;
    int tokens, page, row_bytes;
  } const cases[] = {
      {"BF16, 4,096 tokens, contiguous", 4096, 0, 256}, {"BF16, 4,096 tokens, pages of 16", 4096, 16, 256},
      {"INT8, 4,096 tokens, contiguous", 4096, 0, 144}, {"Q4_0, 4,096 tokens, pages of 16", 4096, 16, 80},
      {"BF16, 256 tokens, contiguous", 256, 0, 256},    {"BF16, 256 tokens, pages of 16", 256, 16, 256}};
  cudaStream_t stream;
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const size_t most = size_t{2} * kLayers * kHeads * kCapacity * 256;
  char *device, *host;
  CUDA(cudaMalloc(reinterpret_cast<void**>(&device), most));
  CUDA(cudaMallocHost(reinterpret_cast<void**>(&host), most / 2));
  for (const auto& c : cases) {
    // Where each copy begins on the device; its rows, their bytes and how far they lie apart.
    std::vector<size_t> places;
    size_t bytes, rows = 1, step = 0;
    if (c.page > 0) {
      bytes = size_t{2} * kLayers * kHeads * c.page * c.row_bytes;
      for (int i = 0; i < c.tokens / c.page; ++i) places.push_back((i * 7 % (c.tokens / c.page)) * bytes);
    } else {
      bytes = static_cast<size_t>(c.tokens) * c.row_bytes;
      rows = kHeads, step = static_cast<size_t>(kCapacity) * c.row_bytes;
      for (int i = 0; i < 2 * kLayers; ++i) places.push_back(static_cast<size_t>(i) * kHeads * step);
    }
    const size_t total = bytes * rows * places.size();
    const auto rate = [&](bool out, bool whole) {
      std::vector<double> rates;
      for (int round = 0; round < 6; ++round) {
        CUDA(cudaStreamSynchronize(stream));
        const auto start = std::chrono::steady_clock::now();
        const auto copy = [&](size_t at, size_t place, size_t count) {
          if (out) {
            CUDA(cudaMemcpyAsync(host + at, device + place, count, cudaMemcpyDeviceToHost, stream));
          } else {
            CUDA(cudaMemcpyAsync(device + place, host + at, count, cudaMemcpyHostToDevice, stream));
          }
        };
        if (whole) {
          copy(0, 0, total);
        } else {
          size_t at = 0;
          for (const size_t place : places) {
            if (rows == 1) {
              copy(at, place, bytes);
            } else if (out) {
              CUDA(cudaMemcpy2DAsync(host + at, bytes, device + place, step, bytes, rows, cudaMemcpyDeviceToHost,
                                     stream));
            } else {
              CUDA(cudaMemcpy2DAsync(device + place, step, host + at, bytes, bytes, rows, cudaMemcpyHostToDevice,
                                     stream));
            }
            at += bytes * rows;
          }
        }
        CUDA(cudaStreamSynchronize(stream));
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        if (round > 0) rates.push_back(total / seconds.count() / 1e9);
      }
      std::sort(rates.begin(), rates.end());
      return rates[rates.size() / 2];
    };
    const double out = rate(true, false), in = rate(false, false), whole_out = rate(true, true),
                 whole_in = rate(false, true);
    std::printf("%-34s %4zu copies of %7zu bytes: out %5.1f GB/s, %.2f of one copy's %5.1f; in %5.1f, %.2f of %5.1f\n",
                c.name, places.size(), bytes * rows, out, out / whole_out, whole_out, in, in / whole_in, whole_in);
  }
  return 0;
}
