// Runs a CUDA kernel on the CPU, lane by lane, so that its arithmetic can be compared with the CPU executor's where
// there is no GPU.
//
// A lane is a fiber of its own stack. Lanes run in turn from one exchange (`__shfl_xor_sync`, `__any_sync`) to the
// next, at which all 32 have to take part; a lane that is elsewhere ends the program. Warps run one after the other, so
// kernels that wait for a whole block are refused by `__syncthreads`. Not emulated: shared memory, PTX, other
// exchanges. Only what the emulated kernels use is here; the compiler names what is missing.
#ifndef NVBACKEND_TESTS_EMULATED_WARP_H
#define NVBACKEND_TESTS_EMULATED_WARP_H

#include <cuda_runtime_api.h>
#include <ucontext.h>
#include <vector_functions.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

// CUDA's headers define them for other compilers too.
#undef __device__
#undef __global__
#undef __forceinline__
#undef __launch_bounds__
#define __device__
#define __global__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__ __restrict

namespace emulated {

constexpr int kLanes = 32;

struct Warp {
  ucontext_t scheduler;
  ucontext_t lanes[kLanes];
  std::vector<char> stacks[kLanes];
  bool finished[kLanes];
  int current;
  // What each lane gave to the exchange under way, and to the one before, which slow lanes still read.
  uint64_t given[2][kLanes];
  unsigned exchanges[kLanes];
  const std::function<void()>* body;
};

inline Warp& warp() {
  static Warp instance;
  return instance;
}

[[noreturn]] inline void refuse(const char* what) {
  std::fprintf(stderr, "emulated: %s\n", what);
  std::abort();
}

inline void run_lane() {
  Warp& w = warp();
  (*w.body)();
  w.finished[w.current] = true;
  swapcontext(&w.lanes[w.current], &w.scheduler);
}

// Gives a value, waits for all lanes, and returns what they gave.
inline const uint64_t* exchange(uint64_t value) {
  Warp& w = warp();
  const int lane = w.current;
  const unsigned turn = w.exchanges[lane]++ % 2;
  w.given[turn][lane] = value;
  swapcontext(&w.lanes[lane], &w.scheduler);
  return w.given[turn];
}

template <typename T>
T shuffle_xor(unsigned mask, T value, int distance) {
  static_assert(sizeof(T) <= 8, "a lane gives up to eight bytes");
  if (mask != 0xffffffffu) refuse("an exchange of a part of the warp");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  const int from = warp().current ^ distance;
  bits = exchange(bits)[from];
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline void run_warp(const std::function<void()>& body, const std::function<void(int)>& enter) {
  Warp& w = warp();
  w.body = &body;
  for (int lane = 0; lane < kLanes; ++lane) {
    w.stacks[lane].resize(256 << 10);
    w.finished[lane] = false;
    w.exchanges[lane] = 0;
    getcontext(&w.lanes[lane]);
    w.lanes[lane].uc_stack.ss_sp = w.stacks[lane].data();
    w.lanes[lane].uc_stack.ss_size = w.stacks[lane].size();
    w.lanes[lane].uc_link = nullptr;
    makecontext(&w.lanes[lane], run_lane, 0);
  }
  for (int left = kLanes; left > 0;) {
    left = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      if (w.finished[lane]) continue;
      w.current = lane;
      enter(lane);
      swapcontext(&w.scheduler, &w.lanes[lane]);
      left += w.finished[lane] ? 0 : 1;
    }
    if (left != 0 && left != kLanes) refuse("some lanes ended where others wait for them");
  }
}

}  // namespace emulated

inline dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace emulated {

// In the place of `kernel<<<grid, block, shared, stream>>>(…)`.
template <typename Kernel>
void launch(dim3 grid, dim3 block, size_t shared, cudaStream_t, const Kernel& kernel) {
  if (block.x % kLanes != 0 || block.y != 1 || block.z != 1 || shared != 0) refuse("a block of another kind");
  const std::function<void()> body = kernel;
  gridDim = grid, blockDim = block;
  for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z) {
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
      for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
        for (unsigned first = 0; first < block.x; first += kLanes) {
          run_warp(body, [first](int lane) { threadIdx = dim3(first + static_cast<unsigned>(lane), 0, 0); });
        }
      }
    }
  }
}

template <typename To, typename From>
To bits_of(From value) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}

}  // namespace emulated

using std::max;
using std::min;

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int distance, int = emulated::kLanes) {
  return emulated::shuffle_xor(mask, value, distance);
}
inline int __any_sync(unsigned mask, int predicate) {
  if (mask != 0xffffffffu) emulated::refuse("a vote of a part of the warp");
  const uint64_t* const given = emulated::exchange(predicate != 0);
  return std::any_of(given, given + emulated::kLanes, [](uint64_t one) { return one != 0; });
}
inline void __syncthreads() {
  emulated::refuse("__syncthreads");
}

template <typename T>
T atomicAdd(T* address, T value) {
  const T old = *address;
  *address += value;
  return old;
}
inline uint32_t atomicOr(uint32_t* address, uint32_t value) {
  const uint32_t old = *address;
  *address |= value;
  return old;
}

// Rounded one by one: the compiler is told not to contract.
inline float __fadd_rn(float a, float b) {
  return a + b;
}
inline float __fsub_rn(float a, float b) {
  return a - b;
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline double __dsub_rn(double a, double b) {
  return a - b;
}
inline double __dmul_rn(double a, double b) {
  return a * b;
}
inline float __double2float_rn(double value) {
  return static_cast<float>(value);
}
inline int __float2int_rn(float value) {
  return static_cast<int>(std::nearbyint(value));
}
inline float __uint_as_float(uint32_t bits) {
  return emulated::bits_of<float>(bits);
}
inline uint32_t __float_as_uint(float value) {
  return emulated::bits_of<uint32_t>(value);
}
inline float __int_as_float(int bits) {
  return emulated::bits_of<float>(bits);
}
inline double __longlong_as_double(long long bits) {
  return emulated::bits_of<double>(bits);
}
inline int __ffs(int value) {
  return __builtin_ffs(value);
}

#endif  // NVBACKEND_TESTS_EMULATED_WARP_H
