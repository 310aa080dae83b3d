// The barriers of linear_skinny_ring's ring that a block shares, and nothing else of that kernel: for racecheck, which
// reports a hazard there.
//
//     nvcc -std=c++17 -arch=sm_90a -Icsrc tests/sanitizers/shared_ring.cu -o shared_ring
//     compute-sanitizer --tool racecheck ./shared_ring elected
//     compute-sanitizer --tool racecheck ./shared_ring each
//
// Bulk copies fill a ring of slots, all warps read a slot, and one warp refills it when all have read it. The warps say
// so on a barrier, in one of two ways: "elected", as the kernel does it, has one thread of each warp arrive behind a
// __syncwarp, for all 32; with "each", every thread arrives itself. PTX orders both: __syncwarp orders the memory
// accesses of the threads that take part, and the arrival releases what is ordered before it.
//
// An H200 with driver 580.159.04: racecheck reports 1 hazard for "elected" and 0 for "each", and the sums are right in
// both. So it takes an arrival for the arriving thread's own accesses alone, and the report on the kernel says no more.
// Exits with 0 where the sums are right, with 77 where there is no GPU that runs this.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>
#include <numeric>
#include <vector>

#include "common/bulk_copy.cuh"

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kSlots = 3;
constexpr int kSteps = 64;
constexpr int kStepBytes = kThreads * static_cast<int>(sizeof(int));

// sums[t]: of the t-th value of all steps, read by a thread that did not copy it.
template <bool Each>
__global__ void __launch_bounds__(kThreads) sum_steps(const int* values, int* sums) {
#if __CUDA_ARCH__ >= 900
  __shared__ __align__(128) int ring[kSlots][kThreads];
  __shared__ uint64_t full[kSlots], empty[kSlots];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kSlots; ++slot) {
      nvb::barrier_init(full + slot, 1);
      nvb::barrier_init(empty + slot, Each ? kThreads : kWarps);
    }
    nvb::barrier_init_fence();
  }
  __syncthreads();
  const auto fetch = [&](int step, int slot) {
    if (lane != 0) return;
    nvb::barrier_expect(full + slot, kStepBytes);
    nvb::bulk_copy_once(ring[slot], values + step * kThreads, kStepBytes, full + slot);
  };
  if (warp == 0) {
    for (int slot = 0; slot < kSlots; ++slot) fetch(slot, slot);
  }
  int slot = 0, sum = 0;
  uint32_t parity = 0;
#pragma unroll 1
  for (int step = 0; step < kSteps; ++step) {
    nvb::barrier_wait(full + slot, parity);
    sum += ring[slot][threadIdx.x];
    __syncwarp();  // the whole warp has read the slot
    if (step + kSlots < kSteps) {
      if (Each || lane == 0) {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(nvb::shared_address(empty + slot)) : "memory");
      }
      if (warp == step % kWarps) {
        nvb::barrier_wait(empty + slot, parity);
        fetch(step + kSlots, slot);
      }
    }
    if (++slot == kSlots) slot = 0, parity ^= 1;
  }
  sums[threadIdx.x] = sum;
#endif
}

bool succeeded(cudaError_t status, const char* what) {
  if (status != cudaSuccess) std::fprintf(stderr, "shared_ring: %s: %s\n", what, cudaGetErrorString(status));
  return status == cudaSuccess;
}

}  // namespace

int main(int count, char** arguments) {
  const bool each = count == 2 && std::strcmp(arguments[1], "each") == 0;
  if (!each && (count != 2 || std::strcmp(arguments[1], "elected") != 0)) {
    std::fprintf(stderr, "usage: shared_ring elected|each\n");
    return 2;
  }
  cudaDeviceProp device;
  if (cudaGetDeviceProperties(&device, 0) != cudaSuccess || device.major != 9) {
    std::fprintf(stderr, "shared_ring: skipped: no GPU of compute capability 9.0\n");
    return 77;
  }
  std::vector<int> values(static_cast<size_t>(kSteps) * kThreads), sums(kThreads);
  std::iota(values.begin(), values.end(), 1);
  int *device_values = nullptr, *device_sums = nullptr;
  const size_t bytes = values.size() * sizeof(int);
  if (!succeeded(cudaMalloc(&device_values, bytes), "cudaMalloc") ||
      !succeeded(cudaMalloc(&device_sums, kStepBytes), "cudaMalloc") ||
      !succeeded(cudaMemcpy(device_values, values.data(), bytes, cudaMemcpyHostToDevice), "cudaMemcpy")) {
    return 1;
  }
  (each ? sum_steps<true> : sum_steps<false>)<<<1, kThreads>>>(device_values, device_sums);
  if (!succeeded(cudaGetLastError(), "the launch") ||
      !succeeded(cudaMemcpy(sums.data(), device_sums, kStepBytes, cudaMemcpyDeviceToHost), "cudaMemcpy")) {
    return 1;
  }
  for (int thread = 0; thread < kThreads; ++thread) {
    // 1 + thread, and kThreads more with each step.
    const int expected = kSteps * (1 + thread) + kThreads * (kSteps * (kSteps - 1) / 2);
    if (sums[static_cast<size_t>(thread)] != expected) {
      std::fprintf(stderr, "shared_ring: sum %d is %d; %d is expected\n", thread, sums[static_cast<size_t>(thread)],
                   expected);
      return 1;
    }
  }
  cudaFree(device_values);
  cudaFree(device_sums);
  std::printf("shared_ring: %s: all sums are right\n", arguments[1]);
  return 0;
}
