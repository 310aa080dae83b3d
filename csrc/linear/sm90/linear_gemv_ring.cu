// y[n] = act(Σ_k x[k] W[n][k] + bias[n]) for one token on compute capability 9.0, in one wave, W by way of shared
// memory.
//
// linear_gemv takes as many blocks as it has rows for: 640 on 528 places for 2560 rows of 10,240, so a second wave that
// is mostly empty, and it reads x again for every four rows. Here each multiprocessor has one block, each block an
// equal share of neighbouring rows, and each warp one part of k for its rows in turn: x is read once and stays in
// registers. A warp has a ring of two or three slots for its part of a row that bulk copies fill, so 40 to 120 KiB a
// multiprocessor are in flight whatever registers and the compiler's order of loads allow (4.5 TB/s and 1 µs of latency
// would ask for 34). Three where shared memory has room: in whole replayed steps of Gemma 3 on an H200 they save 1 µs
// (270M) to 13 µs (1B) over two, and 1.5 % of a layer of 12B. Four slots measured slower from 2560 x 2048 on, alone and
// in a decode step. Two blocks a multiprocessor, which 64 registers would allow, take 2,800 µs for a step of 4B that
// takes 2,455.
//
// H200, BF16, weights rotated past L2, launches overlapping in a graph, µs of linear_gemv and of this kernel:
//   n x k      1536 x 1152   2560 x 2048   4096 x 2560   13824 x 1152   2560 x 10240   20480 x 2560   3840 x 15360
//   gemv           3.7           6.0           8.0           12.0           16.8           29.0           29.3
//   ring           2.7           5.1           7.0            9.4           13.8           24.7           28.7
// and 29.8 to 27.6 for 14336 x 4096. With many waves none of this matters: 54.5 to 53.9 for 30720 x 3840, 297 to 291
// for 262144 x 2560. Gemma 3 4B decodes 376 tokens/s where it had 347 with linear_gemv.
//
// In a replayed graph whose list does not write W (constant_reads.h) the ring is filled while the grid before still
// runs, elsewhere those bytes go to L2: Gemma 3 4B decodes 427 tokens/s and 421, 1B 1056 and 1037, 270M 2008 and 2006.
// With two turns more into L2 they made 421, 1028 and 2016, with six 404, 999 and 2008.
//
// Shapes: x [k], W [n, k] of dtype T (f16 or bf16), k a multiple of 8 from 8 to 20,480, all rows 16-byte aligned; any n
// whose partial sums fit (linear_gemv_ring_supports). A row's order of sums depends on k alone.
//
// Shared memory: kWarps slots a turn in flight (40 KiB), one partial sum for each row of the block and part of k, the
// barriers; up to kMaxSharedBytes, which leaves room beside it for blocks of the grid before and of the next.
// Registers: kVectors vectors of x, as f32.
#include <algorithm>

#include "../../common/bulk_copy.cuh"
#include "../../common/constant_reads.h"
#include "../../common/linear_epilogue.cuh"
#include "../../common/programmatic_launch.cuh"
#include "../../common/reduce.cuh"
#include "../../common/shared_limit.h"
#include "../../common/vector.cuh"
#include "../linear_kernels.h"

namespace nvb {
namespace gemv_ring {

constexpr int kWarps = 16;
constexpr int kThreads = 32 * kWarps;
constexpr int kMostSlots = 3;
constexpr int kVectors = 5;  // a lane's vectors of a slot
constexpr int kSlotBytes = kVectors * 512;
constexpr int kSlotElements = kSlotBytes / 2;
constexpr int kTurnBytes = kWarps * kSlotBytes;
constexpr int kSumBytes = 16 << 10;
template <int Slots>
constexpr int kMaxSharedBytes = Slots * kTurnBytes + kSumBytes;
constexpr int kBarrierBytes = kWarps * kMostSlots * 8;
static_assert(kMaxSharedBytes<2> + kBarrierBytes <= 99 << 10, "a block of 12.0 may have the least of all");

struct Plan {
  int blocks;
  int parts;         // of k, a power of two up to kWarps
  int part_columns;  // a multiple of 8; the last part may have fewer, but has some
  int64_t sums;      // of a block: its rows, at most, times the parts
};

Plan make_plan(const nvb_linear_params& p, const nvb_launch& launch) {
  Plan plan;
  plan.parts = 1;
  while (static_cast<int64_t>(plan.parts) * kSlotElements < p.k) plan.parts *= 2;
  plan.part_columns = static_cast<int>(((p.k + plan.parts - 1) / plan.parts + 7) / 8 * 8);
  const int64_t pairs = (p.n + 1) / 2;
  plan.blocks = static_cast<int>(std::min<int64_t>(pairs, launch.multiprocessors));
  plan.sums = (pairs + plan.blocks - 1) / plan.blocks * 2 * plan.parts;
  return plan;
}

template <typename T, int kSlots>
__global__ void __launch_bounds__(kThreads, 1)
    linear_gemv_ring(const nvb_linear_params p, const LinearEpilogue epilogue, const int parts, const int part_columns,
                     const bool constant_weight) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ uint64_t full[kWarps][kSlots];
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  unsigned char* const ring = memory + warp * (kSlots * kSlotBytes);
  float* const partial = reinterpret_cast<float*>(memory + kSlots * kTurnBytes);  // [rows of the block][parts]

  // The block's rows, whole (gate, up) pairs; of those the warp's, `turns` of them; and its columns.
  const int64_t pairs = (p.n + 1) / 2;
  const int64_t first_row = 2 * (pairs * blockIdx.x / gridDim.x);
  const int rows = static_cast<int>(min(2 * (pairs * (blockIdx.x + 1) / gridDim.x), p.n) - first_row);
  const int groups = kWarps / parts;
  const int group = warp / parts;
  const int part = warp % parts;
  const int turns = group < rows ? (rows - group + groups - 1) / groups : 0;
  const int first_column = part * part_columns;
  const int columns = min(part_columns, static_cast<int>(p.k) - first_column);
  const uint32_t bytes = columns * static_cast<uint32_t>(sizeof(T));
  const T* const weight = static_cast<const T*>(p.weight) + (first_row + group) * p.weight_stride + first_column;
  const int64_t step = groups * p.weight_stride;

  const auto fetch = [&](int turn) {
    uint64_t* const barrier = &full[warp][turn % kSlots];
    barrier_expect(barrier, bytes);
    bulk_copy_once(ring + turn % kSlots * kSlotBytes, weight + turn * step, bytes, barrier);
  };
  const auto fill_ring = [&] {
    if (lane != 0) return;
    for (int turn = 0; turn < kSlots && turn < turns; ++turn) fetch(turn);
  };

  // W is on its way while the grid before this one writes x: to the ring where nobody writes W meanwhile, else to L2
  // and no further, which has what that grid writes.
  allow_next_grid();
  if (!constant_weight && lane < kSlots && lane < turns) bulk_prefetch_l2(weight + lane * step, bytes);
  if (lane == 0) {
    for (int slot = 0; slot < kSlots; ++slot) barrier_init(&full[warp][slot], 1);
    barrier_init_fence();
  }
  __syncwarp();
  if (constant_weight) fill_ring();
  wait_for_previous_grid();
  // No proxy fence: all that the grid before has written is visible to this one behind its wait, and a fence here takes
  // 0.3 µs.
  if (!constant_weight) fill_ring();

  // A lane's vectors, of x as of W, are `kVectors` of every 32nd one; 0 past the part.
  uint4 x[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = (v * 32 + lane) * 8;
    x[v] = column < columns ? load16(static_cast<const T*>(p.input) + first_column + column) : make_uint4(0, 0, 0, 0);
  }

  for (int turn = 0; turn < turns; ++turn) {
    const unsigned char* const slot = ring + turn % kSlots * kSlotBytes;
    barrier_wait(&full[warp][turn % kSlots], turn / kSlots & 1);
    // Four sums, to shorten the chain of additions.
    float sums[4] = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int vector = v * 32 + lane;
      const uint4 raw = vector * 8 < columns ? load16(slot + vector * 16) : make_uint4(0, 0, 0, 0);
      float a[8], b[8];
      unpack16<T>(raw, a);
      unpack16<T>(x[v], b);
#pragma unroll
      for (int e = 0; e < 8; ++e) sums[e % 4] = fmaf(a[e], b[e], sums[e % 4]);
    }
    // This takes what every lane has read of the slot, so that the slot is free behind it.
    const float sum = warp_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    __syncwarp();
    if (lane == 0) {
      partial[(group + turn * groups) * parts + part] = sum;
      if (turn + kSlots < turns) fetch(turn + kSlots);
    }
  }
  __syncthreads();

  // One thread finishes one (gate, up) pair of columns; the parts in their order.
  for (int row = 2 * threadIdx.x; row < rows; row += 2 * kThreads) {
    float pair_sums[2] = {};
    for (int s = 0; s < parts; ++s) {
      pair_sums[0] += partial[row * parts + s];
      if (row + 1 < rows) pair_sums[1] += partial[(row + 1) * parts + s];
    }
    float bias[2];
    load_bias(epilogue, first_row + row, bias);
    store_columns(epilogue, 0, first_row + row, pair_sums, bias);
  }
#endif
}

template <typename T, int Slots>
cudaError_t launch(const nvb_linear_params& params, const nvb_launch& launch) {
  const auto kernel = linear_gemv_ring<T, Slots>;
  // The limit is one for all shapes, so that threads with different shapes do not lower each other's.
  const cudaError_t error = nvb_cuda_raise_shared_limit(reinterpret_cast<const void*>(kernel), kMaxSharedBytes<Slots>);
  if (error != cudaSuccess) return error;
  const Plan plan = make_plan(params, launch);
  const size_t shared_bytes = Slots * kTurnBytes + sizeof(float) * static_cast<size_t>(plan.sums);
  return launch_overlapped(kernel, dim3(plan.blocks), dim3(kThreads), shared_bytes, &launch, params,
                           make_epilogue(params, params.n), plan.parts, plan.part_columns,
                           params.settled != 0 || (nvb_cuda_constant_reads() & NVB_CONSTANT_WEIGHTS) != 0);
}

}  // namespace gemv_ring

bool linear_gemv_ring_supports(const nvb_linear_params& params, const nvb_launch& launch) {
  using namespace gemv_ring;
  return params.n >= 1 && params.k >= 8 && params.k <= kWarps * kSlotElements &&
         make_plan(params, launch).sums <= kSumBytes / static_cast<int>(sizeof(float));
}

template <typename T>
cudaError_t launch_linear_gemv_ring(const nvb_linear_params& params, const nvb_launch& launch) {
  using namespace gemv_ring;
  const bool has_room = launch.shared_bytes_per_block >= kMaxSharedBytes<kMostSlots> + kBarrierBytes;
  // Three slots of a small weight would take the place of the attention beside it: with them for all products a step of
  // 1B takes 975 µs where it took 952 with two, and one of 4B 2,363 where it took 2,396.
  const bool is_large = params.n * params.k > int64_t{1} << 22;
  return has_room && is_large ? gemv_ring::launch<T, kMostSlots>(params, launch)
                              : gemv_ring::launch<T, 2>(params, launch);
}

template cudaError_t launch_linear_gemv_ring<__half>(const nvb_linear_params&, const nvb_launch&);
template cudaError_t launch_linear_gemv_ring<__nv_bfloat16>(const nvb_linear_params&, const nvb_launch&);

}  // namespace nvb
