// Runs a whole block of a warp-specialised kernel of compute capability 9.0 on the CPU: named barriers, mbarriers, bulk
// tensor copies, wgmma and traded registers (csrc/common/ here has their wrappers). So that what holds a kernel
// together can be tested where there is no GPU.
//
// A thread is a fiber. A fiber runs until it waits; which warp comes next, and when a copy lands, is drawn from a seed.
// A product of wgmma reads its operands and writes its sums either as soon as all of its warpgroup have issued it or
// not before they wait for it: a buffer that is written too early shows with one of the two. A copy spoils where it
// goes to from when it is issued until it lands. Shared memory is there twice, as threads see it and as copies and
// wgmma see it; what threads write reaches the second with a proxy fence. All of it begins as NaN.
//
// Every misuse that can be told ends the run by `Failure`: deadlock, a barrier with more arrivals than it was made for
// or left half full, a copy from outside of what `allow` named, registers that the block does not have, a product
// without a fence. `Faults` breaks one thing at a time, so that a test can show that it would be seen.
#ifndef NVBACKEND_TESTS_EMULATED_BLOCK_H
#define NVBACKEND_TESTS_EMULATED_BLOCK_H

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <ucontext.h>
#include <vector_functions.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

// CUDA's headers define them for other compilers too.
#undef __device__
#undef __host__
#undef __global__
#undef __shared__
#undef __forceinline__
#undef __launch_bounds__
#undef __grid_constant__
#define __device__
#define __host__
#define __global__ static
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

namespace emulated {

constexpr int kLanes = 32, kWarpgroup = 128;

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What is broken on purpose. Barriers are counted in the order in which they were made.
struct Faults {
  int unwaited_barrier = -1;     // an mbarrier whose waits return at once
  int wrong_parity = -1;         // an mbarrier that is waited for with the other parity
  bool no_turn_arrival = false;  // nobody arrives at a named barrier without waiting
  bool no_turn_wait = false;     // nobody waits at a named barrier
  bool kept_registers = false;   // nobody gives registers away
  bool no_proxy_fence = false;
  bool no_product_fence = false;
  bool no_product_wait = false;
  bool wrong_swizzle = false;       // copies exchange 16-byte pieces by another bit
  bool wrong_fragment = false;      // the first operand's registers 1 and 2 change places
  bool wrong_bytes = false;         // the bytes 1 and 2 of __byte_perm change places
  bool wrong_next_columns = false;  // 64 more columns of a transposed operand lie elsewhere
  bool swallowed_end = false;       // copies bring what lies outside of the tensor's first and last token
};

struct Options {
  uint64_t seed = 1;
  bool late_products = false;
  Faults faults;
};

inline Options options;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool finished;
  bool (*is_ready)(const void*);  // null: ready
  const void* argument;
  unsigned exchanges;
  // wgmma
  size_t issued, commits, waits;
  bool fenced;
};

struct MBarrier {
  int number;
  uint32_t expected, pending;
  int64_t bytes;
  uint32_t phase;
};

struct NamedBarrier {
  int expected, arrived;
  unsigned generation;
};

// What CUtensorMap holds here.
struct TensorMap {
  const uint8_t* data;
  uint32_t rank;
  uint64_t sizes[5], strides[5];
  uint32_t box[5];
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap), "fits the real one");

struct Copy {
  TensorMap map;
  uint32_t shared;
  int coordinates[5];
  uint64_t* barrier;
};

// What the operands of a product are made of.
struct Elements {
  int bytes;
  float (*first)(uint16_t);
  float (*second)(uint16_t);
};

struct Product {
  std::vector<float*> sums;
  std::vector<const uint32_t*> registers;  // of the first operand; empty: it is in shared memory
  uint64_t a, b;
  Elements elements;
  int columns, issued;
  bool transposed, accumulates;
};

struct Warpgroup {
  std::vector<Product> products;
  std::vector<size_t> groups;  // the end of each committed group
  size_t executed;
};

struct Block {
  ucontext_t scheduler;
  std::vector<Fiber> fibers;
  std::vector<uint64_t> given[2];
  std::vector<int> registers;  // of each warp
  int free_registers;
  NamedBarrier named[16];
  std::map<const uint64_t*, MBarrier> barriers;
  std::vector<Copy> copies;
  std::vector<Warpgroup> warpgroups;
  std::string failure;
  int current;
  const std::function<void()>* body;
  std::mt19937_64 random;
};

inline Block block;
inline uint8_t* shared_memory;  // as threads see it
inline size_t shared_bytes;
inline std::vector<uint8_t> asynchronous;  // as copies and wgmma see it
inline std::vector<std::pair<const uint8_t*, const uint8_t*>> allowed;

// A kernel's own shared memory starts behind what the system keeps.
constexpr uint32_t kSharedStart = 1024;

inline void allow(const void* data, size_t bytes) {
  allowed.emplace_back(static_cast<const uint8_t*>(data), static_cast<const uint8_t*>(data) + bytes);
}

[[noreturn]] void fail(const std::string& what);
void wait_until(bool (*is_ready)(const void*), const void* argument);
template <typename Ready>
void wait_until(const Ready& ready) {
  wait_until([](const void* argument) { return (*static_cast<const Ready*>(argument))(); }, &ready);
}
inline Fiber& fiber() {
  return block.fibers[static_cast<size_t>(block.current)];
}
const uint64_t* exchange(uint64_t value);
void run_block(int threads, size_t bytes, const std::function<void()>& body);

void named_arrive(int barrier, int threads);
void named_sync(int barrier, int threads);
void trade_registers(int count, bool more);

void barrier_init(uint64_t* barrier, uint32_t arrivals);
void barrier_arrive(uint64_t* barrier, uint32_t bytes);
void barrier_wait(uint64_t* barrier, uint32_t parity);

CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data, const cuuint64_t* sizes,
                const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps,
                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                CUtensorMapFloatOOBfill fill);
void copy(void* shared, const CUtensorMap* map, std::initializer_list<int> coordinates, uint64_t* barrier);
void proxy_fence();

void product_fence();
void product_commit();
void product_wait(size_t pending);
void product(float* sums, const uint32_t* registers, uint64_t a, uint64_t b, int columns, bool transposed,
             bool accumulates, Elements elements);

// Four 8x8 matrices of 16-bit elements, whose rows may share no bank.
void load_matrices_transposed(uint32_t (&r)[4], uint32_t row);
void store_matrices(uint32_t row, const uint32_t (&r)[4]);

inline uint32_t shared_address(const void* pointer) {
  const auto offset = static_cast<const uint8_t*>(pointer) - shared_memory;
  if (offset < 0 || static_cast<size_t>(offset) >= shared_bytes) fail("an address outside of shared memory");
  return kSharedStart + static_cast<uint32_t>(offset);
}

template <typename T>
T shuffle(unsigned mask, T value, int from) {
  static_assert(sizeof(T) <= 8, "a lane gives up to eight bytes");
  if (mask != 0xffffffffu) fail("an exchange of a part of the warp");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = exchange(bits)[from];
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace emulated

inline dim3 gridDim, blockDim, blockIdx, threadIdx;

using std::max;
using std::min;

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int distance) {
  return emulated::shuffle(mask, value, emulated::block.current % emulated::kLanes ^ distance);
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return emulated::shuffle(mask, value, lane);
}
inline int __any_sync(unsigned, int predicate) {
  const uint64_t* const given = emulated::exchange(predicate != 0);
  int any = 0;
  for (int lane = 0; lane < emulated::kLanes; ++lane) any |= given[lane] != 0;
  return any;
}
inline unsigned __ballot_sync(unsigned, int predicate) {
  const uint64_t* const given = emulated::exchange(predicate != 0);
  unsigned bits = 0;
  for (int lane = 0; lane < emulated::kLanes; ++lane) bits |= (given[lane] != 0 ? 1u : 0u) << lane;
  return bits;
}
inline int __popc(unsigned bits) {
  return __builtin_popcount(bits);
}
inline int __clz(int bits) {
  return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits));
}
inline int __ffs(int bits) {
  return __builtin_ffs(bits);
}
inline void __syncwarp() {
  emulated::exchange(0);
}
inline void __syncthreads() {
  emulated::named_sync(0, static_cast<int>(blockDim.x));
}
[[noreturn]] inline void __trap() {
  emulated::fail("__trap");
}
inline float __fdividef(float a, float b) {
  return a / b;
}
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t result = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t to = emulated::options.faults.wrong_bytes && (i == 1 || i == 2) ? 3 - i : i;
    result |= static_cast<uint32_t>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * to;
  }
  return result;
}
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline float __int_as_float(int bits) {
  return __uint_as_float(static_cast<uint32_t>(bits));
}
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

template <typename... Parameters>
cudaError_t cudaFuncSetAttribute(void (*)(Parameters...), cudaFuncAttribute attribute, size_t value) {
  return attribute == cudaFuncAttributeMaxDynamicSharedMemorySize && value <= 227 * 1024 ? cudaSuccess
                                                                                         : cudaErrorInvalidValue;
}

// Runs the blocks one after the other. What goes wrong is thrown.
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  gridDim = config->gridDim, blockDim = config->blockDim;
  const std::function<void()> body = [&] { kernel(arguments...); };
  for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z) {
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y) {
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
        emulated::run_block(static_cast<int>(blockDim.x), config->dynamicSmemBytes, body);
      }
    }
  }
  return cudaSuccess;
}

#endif  // NVBACKEND_TESTS_EMULATED_BLOCK_H
