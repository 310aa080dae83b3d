// y = act(scales * (x Wᵀ) + bias) by wgmma, both operands brought by bulk tensor copies.
//
// Two blocks make a cluster and take two tiles of 128 tokens over the same 256 rows of W, of which each block copies
// half into both. A block has one warp that copies and two warpgroups that multiply, 64 tokens each. Blocks stay and
// walk over the tiles, and the copies for the next one run while the sums of the last are finished. (Warpgroups that
// take turns at tiles of 64 tokens hide that entirely, but write and read more shared memory than it can do at once.)
//
// Shapes: x [m, k], W [n, k], rows 16-byte aligned; tiles past the ends are filled with zeros and not stored.
// Shared memory: 4 stages of 128 bytes of 128 rows of x and of 256 rows of W, 192 KiB together, and 22 KiB for the
// epilogue. Registers: 240 a thread of the warpgroups that multiply, 128 of them sums; 24 for the others.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../common/wgmma_shared.cuh"
#include "linear_epilogue.cuh"
#include "linear_wgmma.h"

namespace nvb {
namespace linear_wgmma {

constexpr int kRows = 128;     // tokens a block
constexpr int kColumns = 256;  // rows of W
constexpr int kDepthBytes = 128;
constexpr int kStages = 4;
constexpr int kConsumers = 2;  // warpgroups
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kBlocks = 2;  // a cluster

// Part of a warp's results on their way to the output: 16 rows of 64 columns. The pitch spreads the pairs of a fragment
// over all banks.
constexpr int kPartColumns = 64;
constexpr int kPartPitch = 72;
constexpr int kWarps = 4 * kConsumers;

struct Shared {
  uint8_t input[kStages][kRows * kDepthBytes];
  uint8_t weight[kStages][kColumns * kDepthBytes];
  uint16_t parts[kWarps][16 * kPartPitch];
  float bias[kConsumers][kColumns];
  float scales[kConsumers][kColumns];
  uint64_t full[kStages];
  uint64_t empty[kStages];
};
static_assert(sizeof(Shared) <= 227 * 1024, "what a block can have");

struct Tiles {
  int64_t down;    // clusters' tiles along m
  int64_t across;  // tiles along n
  int64_t count;
};

// Tiles are walked in bands, so that those in flight together share what they read in L2.
constexpr int64_t kBand = 8;

__host__ __device__ inline Tiles tiles_of(int64_t m, int64_t n) {
  const int64_t down = (m + kBlocks * kRows - 1) / (kBlocks * kRows), across = (n + kColumns - 1) / kColumns;
  return {down, across, down * across};
}

// The place of a tile: (along m, along n).
__device__ __forceinline__ void place_of(const Tiles& tiles, int64_t tile, int64_t& down, int64_t& across) {
  const int64_t band = tile / (kBand * tiles.across);
  const int64_t height = min(kBand, tiles.down - band * kBand);
  const int64_t rest = tile - band * kBand * tiles.across;
  down = band * kBand + rest % height;
  across = rest / height;
}

struct Arguments {
  CUtensorMap input;
  CUtensorMap weight;
  LinearEpilogue epilogue;
  const float* row_scales;
  const float* column_scales;
  int64_t m;
  int64_t n;
  int32_t steps;  // along k
};

// 2^x and 1 / x to within some 2 units of f32's last place: the accurate ones take several times the instructions, which
// in a kernel of this kind nothing hides.
__device__ __forceinline__ float quick_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ float quick_inverse(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// The functions of activation.cuh.
template <uint32_t Activation>
__device__ __forceinline__ float quick_activate(float x) {
  constexpr float kLog2E = 1.4426950408889634f;
  if constexpr (Activation == NVB_GELU_TANH) {
    constexpr float kFirst = -2.0f * kLog2E * 0.7978845608028654f, kThird = kFirst * 0.044715f;
    return x * quick_inverse(1.0f + quick_exp2(x * fmaf(kThird * x, x, kFirst)));
  } else if constexpr (Activation == NVB_SILU) {
    return x * quick_inverse(1.0f + quick_exp2(-kLog2E * x));
  } else {
    return x;
  }
}

// The columns of a tile that a thread fetches bias and scales for while the products run.
struct ColumnTerms {
  float bias[kColumns / 128];
  float scales[kColumns / 128];

  __device__ __forceinline__ void load(const Arguments& arguments, int64_t first, int thread) {
#pragma unroll
    for (int i = 0; i < kColumns / 128; ++i) {
      const int64_t column = first + thread + 128 * i;
      const bool inside = column < arguments.n;
      bias[i] = inside && arguments.epilogue.bias != nullptr
                    ? load_element(arguments.epilogue.bias, arguments.epilogue.bias_dtype, column)
                    : 0.0f;
      scales[i] = inside && arguments.column_scales != nullptr ? arguments.column_scales[column] : 1.0f;
    }
  }
};

// Waits for the 128 threads of one warpgroup.
__device__ __forceinline__ void warpgroup_barrier(int warpgroup) {
  asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
}

__device__ __forceinline__ uint32_t round_pair(uint32_t dtype, float first, float second) {
  return dtype == NVB_F16 ? pack_pair<__half>(first, second) : pack_pair<__nv_bfloat16>(first, second);
}

// Stores the part that lies in `part`, from (row, column) of the output on.
__device__ __forceinline__ void store_part(const Arguments& arguments, const uint16_t* part, int64_t row,
                                           int64_t column, int64_t columns, int lane) {
  const LinearEpilogue& epilogue = arguments.epilogue;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // Eight lanes a row.
    const int down = lane / 8 + 4 * i, across = 8 * (lane % 8);
    if (row + down >= arguments.m) continue;
    const uint16_t* const from = part + down * kPartPitch + across;
    uint16_t* const to =
        static_cast<uint16_t*>(epilogue.output) + (row + down) * epilogue.output_stride + column + across;
    if (epilogue.vectors && column + across + 8 <= columns) {
      store16(to, load16(from));
    } else {
      for (int j = 0; j < 8 && column + across + j < columns; ++j) to[j] = from[j];
    }
  }
}

// Scales, bias, activation, gating, rounding and storing of a warp's 16 rows.
template <bool Scaled, uint32_t Activation, bool Gated, typename Sum, int Count>
__device__ __forceinline__ void finish_warp(const Arguments& arguments, const Sum (&sums)[Count], const float* bias,
                                            const float* scales, uint16_t* part, int64_t first_row,
                                            int64_t first_column) {
  const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const uint32_t dtype = arguments.epilogue.output_dtype;
  constexpr int kSources = Gated ? 2 : 1;  // columns of sums for one of results
  const int64_t columns = arguments.n / kSources, first_result = first_column / kSources;
  float row_scales[2] = {1.0f, 1.0f};
  if constexpr (Scaled) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t row = first_row + group + 8 * i;
      if (row < arguments.m) row_scales[i] = arguments.row_scales[row];
    }
  }
#pragma unroll
  for (int chunk = 0; chunk < kColumns / (kPartColumns * kSources); ++chunk) {
    if (first_result + chunk * kPartColumns >= columns) break;
#pragma unroll
    for (int j = 0; j < kPartColumns * kSources / 8; ++j) {
      const int column = chunk * kPartColumns * kSources + 8 * j + 2 * quad;
      const int at = (chunk * kPartColumns * kSources / 8 + j) * 4;
      const float2 added = *reinterpret_cast<const float2*>(bias + column);
      float2 factors = make_float2(1.0f, 1.0f);
      if constexpr (Scaled) factors = *reinterpret_cast<const float2*>(scales + column);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float first = static_cast<float>(sums[at + 2 * i]), second = static_cast<float>(sums[at + 2 * i + 1]);
        if constexpr (Scaled) first *= row_scales[i] * factors.x, second *= row_scales[i] * factors.y;
        first = quick_activate<Activation>(first + added.x);
        second += added.y;
        uint16_t* const row = part + (group + 8 * i) * kPartPitch;
        if constexpr (Gated) {
          row[4 * j + quad] = static_cast<uint16_t>(round_pair(dtype, first * second, 0.0f));
        } else {
          const uint32_t pair = round_pair(dtype, first, quick_activate<Activation>(second));
          *reinterpret_cast<uint32_t*>(row + 8 * j + 2 * quad) = pair;
        }
      }
    }
    __syncwarp();
    store_part(arguments, part, first_row, first_result + chunk * kPartColumns, columns, lane);
    __syncwarp();
  }
}

template <bool Scaled, typename Sum, int Count>
__device__ __forceinline__ void finish(const Arguments& arguments, Shared& shared, const Sum (&sums)[Count],
                                       const ColumnTerms& terms, int64_t first_row, int64_t first_column,
                                       int warpgroup) {
  const int thread = threadIdx.x % 128, warp = thread / 32;
#pragma unroll
  for (int i = 0; i < kColumns / 128; ++i) {
    shared.bias[warpgroup][thread + 128 * i] = terms.bias[i];
    if constexpr (Scaled) shared.scales[warpgroup][thread + 128 * i] = terms.scales[i];
  }
  warpgroup_barrier(warpgroup);
  const auto with = [&](auto activation, auto gated) {
    finish_warp<Scaled, decltype(activation)::value, decltype(gated)::value>(
        arguments, sums, shared.bias[warpgroup], shared.scales[warpgroup], shared.parts[4 * warpgroup + warp],
        first_row + 16 * warp, first_column);
  };
  const auto with_activation = [&](auto activation) {
    arguments.epilogue.gated ? with(activation, std::true_type()) : with(activation, std::false_type());
  };
  switch (arguments.epilogue.activation) {
    case NVB_GELU_TANH:
      with_activation(std::integral_constant<uint32_t, NVB_GELU_TANH>());
      break;
    case NVB_SILU:
      with_activation(std::integral_constant<uint32_t, NVB_SILU>());
      break;
    default:
      with_activation(std::integral_constant<uint32_t, NVB_NONE>());
  }
  warpgroup_barrier(warpgroup);
}

// A place in the ring of stages, and the parity of its round.
struct Place {
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

template <Operands Kind>
__global__ void __launch_bounds__(kThreads, 1) linear_wgmma(const __grid_constant__ Arguments arguments) {
#ifdef NVB_WGMMA
  using Traits = OperandTraits<Kind>;
  using Sum = std::conditional_t<Traits::kIntegers, int32_t, float>;
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const uint32_t rank = cluster_rank();
  // The same for a whole warp, which the compiler is told.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const Tiles tiles = tiles_of(arguments.m, arguments.n);
  const int64_t cluster = blockIdx.x / kBlocks, clusters = gridDim.x / kBlocks;

  // Barriers: a stage is full once its bytes are there, empty once both warpgroups of both blocks have read it.
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(&shared.full[stage], 1);
      barrier_init(&shared.empty[stage], kBlocks * kConsumers);
    }
    barrier_init_fence();
  }
  __syncthreads();
  cluster_arrive();
  cluster_wait();

  Place place;
  if (warpgroup == kConsumers) {
    // Copies.
    leave_registers<24>();
    if (threadIdx.x == 128 * kConsumers) {
      prefetch_tensor_map(&arguments.input);
      prefetch_tensor_map(&arguments.weight);
      constexpr int kShare = kColumns / kBlocks;
      for (int64_t tile = cluster; tile < tiles.count; tile += clusters) {
        int64_t down, across;
        place_of(tiles, tile, down, across);
        const int row = static_cast<int>((down * kBlocks + rank) * kRows);
        const int column = static_cast<int>(across * kColumns + rank * kShare);
        for (int step = 0; step < arguments.steps; ++step) {
          uint64_t* const full = &shared.full[place.stage];
          barrier_wait(&shared.empty[place.stage], place.phase ^ 1);
          barrier_expect(full, sizeof shared.input[0] + sizeof shared.weight[0]);
          tensor_copy(shared.input[place.stage], &arguments.input, step * kDepthBytes, row, full);
          tensor_copy_multicast(shared.weight[place.stage] + rank * kShare * kDepthBytes, &arguments.weight,
                                step * kDepthBytes, column, full, (1 << kBlocks) - 1);
          place.advance();
        }
      }
      // A block may not end while the other one still announces that it has read a stage.
      for (int i = 0; i < kStages; ++i) {
        barrier_wait(&shared.empty[place.stage], place.phase ^ 1);
        place.advance();
      }
    }
    __syncwarp();
  } else {
    // Products.
    take_registers<240>();
    const int thread = threadIdx.x % 128;
    const auto release = [&](int stage) {
      if (thread < kBlocks) cluster_barrier_arrive(cluster_address(&shared.empty[stage], thread));
    };
    for (int64_t tile = cluster; tile < tiles.count; tile += clusters) {
      int64_t down, across;
      place_of(tiles, tile, down, across);
      const int64_t first_column = across * kColumns;
      ColumnTerms terms;
      terms.load(arguments, first_column, thread);
      Sum sums[kColumns / 2];
      int previous = 0;
      for (int step = 0; step < arguments.steps; ++step) {
        barrier_wait(&shared.full[place.stage], place.phase);
        const uint64_t a = wgmma_descriptor(shared.input[place.stage] + warpgroup * 64 * kDepthBytes);
        const uint64_t b = wgmma_descriptor(shared.weight[place.stage]);
        wgmma_fence();
#pragma unroll
        for (int part = 0; part < 4; ++part) {
          wgmma_shared<Kind>(sums, a + 2 * part, b + 2 * part, step != 0 || part != 0);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (step != 0) release(previous);
        previous = place.stage;
        place.advance();
      }
      wgmma_wait<0>();
      wgmma_hold(sums);
      release(previous);
      finish<Traits::kElementBytes == 1>(arguments, shared, sums, terms,
                                         (down * kBlocks + rank) * kRows + warpgroup * 64, first_column, warpgroup);
    }
  }
  cluster_arrive();
  cluster_wait();
#endif
}

// cuTensorMapEncodeTiled of the driver, or null.
using Encode = decltype(&cuTensorMapEncodeTiled);
Encode tensor_map_encoder() noexcept;

// A map of `rows` rows of `bytes` bytes, in boxes of `box_rows` rows of 128 bytes.
inline cudaError_t make_map(CUtensorMap& map, const void* data, int64_t rows, int64_t bytes, int64_t stride_bytes,
                            int box_rows) {
  const Encode encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(bytes), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride_bytes)};
  const cuuint32_t box[2] = {kDepthBytes, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  // Bytes, because zeros are all that the element type decides here.
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(data), sizes, strides, box,
                                 steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <Operands Kind>
cudaError_t launch_kind(const nvb_linear_wgmma_params& params, const nvb_launch& launch) {
  constexpr int kElementBytes = OperandTraits<Kind>::kElementBytes;
  Arguments arguments;
  // A stride that no row follows may be anything.
  const int64_t bytes = params.k * kElementBytes, least = (bytes + 15) / 16 * 16;
  const int64_t input_stride = params.m == 1 ? least : params.input_stride * kElementBytes;
  const int64_t weight_stride = params.n == 1 ? least : params.weight_stride * kElementBytes;
  cudaError_t error = make_map(arguments.input, params.input, params.m, bytes, input_stride, kRows);
  if (error != cudaSuccess) return error;
  error = make_map(arguments.weight, params.weight, params.n, bytes, weight_stride, kColumns / kBlocks);
  if (error != cudaSuccess) return error;
  arguments.epilogue = make_epilogue(params, params.n);
  arguments.row_scales = params.row_scales;
  arguments.column_scales = params.column_scales;
  arguments.m = params.m;
  arguments.n = params.n;
  arguments.steps = static_cast<int32_t>((bytes + kDepthBytes - 1) / kDepthBytes);
  const auto kernel = linear_wgmma<Kind>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = kBlocks;
  cluster.val.clusterDim.y = 1;
  cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(kBlocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Shared);
  config.stream = launch.stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  const int64_t most = launch.multiprocessors / kBlocks;
  const int64_t clusters = std::min(tiles_of(params.m, params.n).count, most);
  config.gridDim = dim3(static_cast<unsigned>(clusters * kBlocks));
  return cudaLaunchKernelEx(&config, kernel, arguments);
}

}  // namespace linear_wgmma
}  // namespace nvb
