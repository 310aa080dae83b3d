// y = act(x W[expert]ᵀ + bias[expert]) by wgmma, W and x brought by bulk tensor copies through a deep ring.
//
// An expert has few tokens beside its rows of W, so that reading W is the work: rows of W are the 64 rows of wgmma and
// tokens its columns, of which there may be as few as eight. One block stays on each multiprocessor. One warp of it
// copies, `Warpgroups` warpgroups multiply 64 rows each, and the copies for the next piece (grouped_linear_wgmma_tiles)
// run while the sums of the last are finished.
//
// A stage holds `Depth` blocks of 64 k of up to 64 * Warpgroups rows of W and of up to `Tokens` rows of x, in groups of
// eight rows, of which those that the piece has are copied. W is copied in fours of groups, what is left singly,
// because the copy engine takes a while for each copy, however short. Rows of shared memory without a copy keep what
// was there, and rows of x may be another expert's: they spoil rows and columns of sums alone that are not stored.
//
// A token's order of sums depends on k alone: one chain of instructions of 16 k from the first to the last, whatever
// the tiles are.
//
// Shapes: x [rows, k], W [experts * n, k] in F16 or BF16, rows 16-byte aligned, k a multiple of 64, n of 8, at most
// kMostExperts experts. Compute capability 9.0.
//
// Shared memory: WgmmaShared, up to 227 KiB. Registers: Tokens / 2 sums a thread of the warpgroups that multiply.
#pragma once

#include <algorithm>

#include "../../common/programmatic_launch.cuh"
#include "../../common/tensor_map.h"
#include "../../common/wgmma_ss.cuh"
#include "grouped_linear_wgmma.h"
#include "grouped_linear_wgmma_tiles.cuh"

namespace nvb {
namespace grouped {

inline constexpr int kBlockDepth = 64;         // of k, 128 bytes
inline constexpr int kGroupBlockBytes = 1024;  // of a group and 64 k
inline constexpr int kManyGroups = 4;          // in one copy of W

template <int Tokens, int Warpgroups, int Depth, int Stages>
struct WgmmaShape {
  static constexpr int kTokens = Tokens, kWarpgroups = Warpgroups, kDepth = Depth, kStages = Stages;
  // Registers are traded by whole warpgroups, where the sums take more than an equal share of them.
  static constexpr bool kTrades = Tokens > 128;
  static constexpr int kThreads = 128 * Warpgroups + (kTrades ? 128 : 32);
  static constexpr int kGroups = 8 * Warpgroups;  // of W in a stage
  static constexpr int kGroupBytes = Depth * kGroupBlockBytes;
  // Groups of x in one copy. Many make up for what is copied in vain, and blocks of k are not between them then.
  static constexpr int kInputGroups = Tokens > 64 ? 4 : 1;
  static constexpr int kStageBytes = (kGroups + Tokens / kGroupRows) * kGroupBytes;
  // With few tokens for an expert blocks share rows evenly, with many they share L2.
  static constexpr bool kNeighbours = Tokens <= 64;
  // Tokens whose sums a warpgroup has in shared memory together. The pitch, in floats, puts the tokens of a fragment
  // into different banks.
  static constexpr int kPass = std::min(Tokens, 16);
  static constexpr int kPitch = 64 + 4;

  static_assert(!kTrades || Warpgroups == 2, "232 registers for the warpgroups that multiply, 40 for the other");
  static_assert(Tokens % (kInputGroups * kGroupRows) == 0 && Tokens % kPass == 0, "whole copies, whole passes");
  static_assert(kInputGroups == 1 || Depth == 1, "a copy of several groups of x has their rows, not blocks, together");
};

template <typename Shape>
struct WgmmaShared {
  uint8_t stages[Shape::kStages][Shape::kStageBytes];
  float sums[Shape::kWarpgroups][Shape::kPass * Shape::kPitch];
  uint64_t full[Shape::kStages];
  uint64_t empty[Shape::kStages];
  ExpertTiles<Shape::kTokens> tiles;
};

struct WgmmaArguments {
  CUtensorMap input;
  CUtensorMap weight;       // boxes of one group
  CUtensorMap many_weight;  // and of kManyGroups
  LinearEpilogue epilogue;
  const int32_t* expert_offsets;
  int64_t rows;
  int32_t experts;
  int32_t groups;  // of an expert's rows
  int32_t steps;   // of Depth blocks along k
};

// Copies all of a piece, stage by stage, by the lanes of one warp.
template <typename Shape>
__device__ __forceinline__ void copy_piece(const WgmmaArguments& arguments, WgmmaShared<Shape>& shared,
                                           const Piece& piece, RingPlace<Shape::kStages>& place) {
  constexpr int kInputRows = Shape::kInputGroups * kGroupRows;
  const int lane = threadIdx.x % 32;
  const int many = piece.groups / kManyGroups, single = piece.groups % kManyGroups;
  const int inputs = (piece.tokens + kInputRows - 1) / kInputRows;
  const uint32_t bytes = (piece.groups + inputs * Shape::kInputGroups) * Shape::kGroupBytes;
  const int first_group = piece.expert * arguments.groups + piece.first_group;
  const int first_token = static_cast<int>(piece.first_token);
#pragma unroll 1
  for (int step = 0; step < arguments.steps; ++step) {
    uint64_t* const full = &shared.full[place.stage];
    uint8_t* const stage = shared.stages[place.stage];
    const int block = step * Shape::kDepth;
    if (lane == 0) {
      barrier_wait(&shared.empty[place.stage], place.parity ^ 1);
      barrier_expect(full, bytes);
    }
    __syncwarp();
    for (int i = lane; i < many + single + inputs; i += 32) {
      if (i < many) {
        const int group = i * kManyGroups;
        tensor_copy(stage + group * Shape::kGroupBytes, &arguments.many_weight, 0, 0, block, first_group + group, full);
      } else if (i < many + single) {
        const int group = many * kManyGroups + i - many;
        tensor_copy(stage + group * Shape::kGroupBytes, &arguments.weight, 0, 0, block, first_group + group, full);
      } else {
        const int input = i - many - single;
        tensor_copy(stage + (Shape::kGroups + input * Shape::kInputGroups) * Shape::kGroupBytes, &arguments.input, 0,
                    first_token + input * kInputRows, block, full);
      }
    }
    place.advance();
  }
}

// Waits for the 128 threads of one warpgroup.
__device__ __forceinline__ void warpgroup_barrier(int warpgroup) {
  asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
}

// Tokens that lie sorted, and whose sums are what they should be.
struct SortedTokens {
  __device__ __forceinline__ int64_t row(int64_t token) const { return token; }
  __device__ __forceinline__ void repair(int64_t, int64_t, float (&)[4]) const {}
};

// Bias, activation, store of a warpgroup's 64 rows of W, kPass tokens at a time by way of shared memory. `tokens` says
// to which row of the output a token goes, and may put four of its sums right, from a row of all experts' W on.
template <typename Shape, int Count, typename Tokens>
__device__ __forceinline__ void epilogue_piece(const LinearEpilogue& epilogue, const Piece& piece,
                                               const float (&sums)[Count], float* staged, int warpgroup,
                                               const Tokens& tokens) {
  constexpr int kPass = Shape::kPass, kPitch = Shape::kPitch;
  const int thread = threadIdx.x % 128, warp = thread / 32, group = thread % 32 / 4, quad = thread % 4;
  // A thread finishes four columns of every eighth token.
  constexpr int kTokenStep = 128 / (64 / 4);
  static_assert(kPass % kTokenStep == 0, "equal shares of a pass");
  const int local_column = thread % 16 * 4, first_token = thread / 16;
  const int64_t column = static_cast<int64_t>(piece.first_group) * kGroupRows + warpgroup * 64 + local_column;
  const bool inside = warpgroup * 64 + local_column < piece.groups * kGroupRows;
  float bias[4] = {};
  if (inside) load_bias(epilogue, column, bias, piece.expert * epilogue.columns);
#pragma unroll
  for (int pass = 0; pass < Shape::kTokens; pass += kPass) {
    if (pass >= piece.tokens) break;
    float* const target = staged + 2 * quad * kPitch + 16 * warp + group;
#pragma unroll
    for (int j = 0; j < kPass / 8; ++j) {
      const float* const four = sums + (pass / 8 + j) * 4;
      target[8 * j * kPitch] = four[0];
      target[(8 * j + 1) * kPitch] = four[1];
      target[8 * j * kPitch + 8] = four[2];
      target[(8 * j + 1) * kPitch + 8] = four[3];
    }
    warpgroup_barrier(warpgroup);
    if (inside) {
#pragma unroll 1
      for (int token = first_token; token < min(kPass, piece.tokens - pass); token += kTokenStep) {
        const float4 raw = *reinterpret_cast<const float4*>(staged + token * kPitch + local_column);
        const int64_t place = piece.first_token + pass + token;
        float values[4] = {raw.x, raw.y, raw.z, raw.w};
        tokens.repair(place, piece.expert * epilogue.columns + column, values);
        store_columns(epilogue, tokens.row(place), column, values, bias);
      }
    }
    warpgroup_barrier(warpgroup);
  }
}

template <Operands Kind, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    grouped_linear_wgmma(const __grid_constant__ WgmmaArguments arguments) {
#ifdef NVB_WGMMA
  extern __shared__ __align__(1024) uint8_t memory[];
  WgmmaShared<Shape>& shared = *reinterpret_cast<WgmmaShared<Shape>*>(memory);
  // All lanes of a warp have one value, and the shuffle tells the compiler so.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);

  // Barriers: a stage is full once its bytes are there, empty once every warpgroup has read it.
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      barrier_init(&shared.full[stage], 1);
      barrier_init(&shared.empty[stage], Shape::kWarpgroups);
    }
    barrier_init_fence();
    prefetch_tensor_map(&arguments.input);
    prefetch_tensor_map(&arguments.weight);
    prefetch_tensor_map(&arguments.many_weight);
  }

  // Which experts have tokens is known behind the grid before, and without it nothing of W.
  begin_overlapped();
  shared.tiles.load(arguments.expert_offsets, arguments.experts, arguments.rows);
  Walk<Shape::kTokens, Shape::kGroups, Shape::kNeighbours> walk(shared.tiles, arguments.experts, arguments.rows,
                                                                arguments.groups);
  Piece piece;
  RingPlace<Shape::kStages> place;
  if (warpgroup == Shape::kWarpgroups) {
    // Copies.
    if constexpr (Shape::kTrades) setmaxnreg_dec<40>();
    if (threadIdx.x < 128 * Shape::kWarpgroups + 32) {
      fence_before_bulk_copies();
      while (walk.next(piece)) copy_piece(arguments, shared, piece, place);
    }
  } else {
    // Products.
    if constexpr (Shape::kTrades) setmaxnreg_inc<232>();
    const auto release = [&](int stage) {
      if (threadIdx.x % 128 == 0) barrier_arrive(&shared.empty[stage]);
    };
    while (walk.next(piece)) {
      float sums[Shape::kTokens / 2];
      int previous = 0;
#pragma unroll 1
      for (int step = 0; step < arguments.steps; ++step) {
        barrier_wait(&shared.full[place.stage], place.parity);
        const uint8_t* const stage = shared.stages[place.stage];
        const uint64_t a = wgmma_descriptor(stage + warpgroup * 8 * Shape::kGroupBytes, Shape::kGroupBytes);
        const uint64_t b = wgmma_descriptor(stage + Shape::kGroups * Shape::kGroupBytes, Shape::kGroupBytes);
        wgmma_fence();
#pragma unroll
        for (int part = 0; part < 4 * Shape::kDepth; ++part) {
          const int offset = part / 4 * (kGroupBlockBytes / 16) + part % 4 * 2;
          wgmma_ss<Kind>(sums, a + offset, b + offset, step != 0 || part != 0);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (step != 0) release(previous);
        previous = place.stage;
        place.advance();
      }
      wgmma_wait<0>();
      wgmma_fence_operand(sums);
      release(previous);
      epilogue_piece<Shape>(arguments.epilogue, piece, sums, shared.sums[warpgroup], warpgroup, SortedTokens());
    }
  }
#endif
}

// A map of `rows` rows of k elements of 16 bits, in boxes of `depth` blocks. Its dimensions are the 128 bytes of a
// block, the rows and the blocks; of W, eight rows, the blocks and the groups of rows. (No stride need be the largest.)
struct MatrixOfBlocks {
  const void* data;
  int64_t rows;
  int64_t k;
  int64_t stride;  // elements
};

inline cudaError_t make_map(CUtensorMap& map, const MatrixOfBlocks& matrix, int dimensions, int depth, int box_rows,
                            int box_groups) {
  const cuuint64_t row_bytes = static_cast<cuuint64_t>(matrix.stride) * 2;
  const cuuint64_t rows = static_cast<cuuint64_t>(matrix.rows);
  const cuuint64_t sizes[4] = {2 * kBlockDepth, dimensions == 3 ? rows : kGroupRows,
                               static_cast<cuuint64_t>(matrix.k / kBlockDepth), rows / kGroupRows};
  const cuuint64_t strides[3] = {row_bytes, 2 * kBlockDepth, kGroupRows * row_bytes};
  const cuuint32_t box[4] = {2 * kBlockDepth, static_cast<cuuint32_t>(box_rows), static_cast<cuuint32_t>(depth),
                             static_cast<cuuint32_t>(box_groups)};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  // Bytes, because zeros are all that the element type decides here.
  const CUresult result = tensor_map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, static_cast<cuuint32_t>(dimensions),
                                               const_cast<void*>(matrix.data), sizes, strides, box, steps,
                                               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <Operands Kind, typename Shape>
cudaError_t launch_shape(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  static_assert(sizeof(WgmmaShared<Shape>) <= 227 * 1024, "what a block can have");
  WgmmaArguments arguments;
  // A stride that no row follows may be anything.
  const MatrixOfBlocks input = {p.input, p.rows, p.k, p.rows == 1 ? p.k : p.input_stride};
  const MatrixOfBlocks weight = {p.weight, p.n * p.experts, p.k, p.weight_stride};
  cudaError_t error = make_map(arguments.input, input, 3, Shape::kDepth, Shape::kInputGroups * kGroupRows, 1);
  if (error != cudaSuccess) return error;
  error = make_map(arguments.weight, weight, 4, Shape::kDepth, kGroupRows, 1);
  if (error != cudaSuccess) return error;
  error = make_map(arguments.many_weight, weight, 4, Shape::kDepth, kGroupRows, kManyGroups);
  if (error != cudaSuccess) return error;
  arguments.epilogue = make_epilogue_alone(p, p.n);
  arguments.expert_offsets = p.expert_offsets;
  arguments.rows = p.rows;
  arguments.experts = p.experts;
  arguments.groups = static_cast<int32_t>(p.n / kGroupRows);
  constexpr int kDepth = Shape::kDepth * kBlockDepth;
  arguments.steps = static_cast<int32_t>((p.k + kDepth - 1) / kDepth);
  const auto kernel = grouped_linear_wgmma<Kind, Shape>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(WgmmaShared<Shape>));
  if (error != cudaSuccess) return error;
  const int64_t most = most_tiles(p, Shape::kTokens) * arguments.groups;
  const int64_t blocks = std::min<int64_t>(most, std::max(1, launch.multiprocessors));
  return launch_overlapped(kernel, dim3(static_cast<unsigned>(blocks)), dim3(Shape::kThreads),
                           sizeof(WgmmaShared<Shape>), &launch, arguments);
}

// Tiles by the tokens that an expert has on the average: most have room for them then. Columns of wgmma that are not
// stored cost nothing while W is what is waited for, but the second tile of an expert reads W again.
template <Operands Kind>
cudaError_t launch_wgmma(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  const auto mean_within = [&](int64_t tokens) { return p.rows <= tokens * p.all_experts; };
  if (mean_within(2)) return launch_shape<Kind, WgmmaShape<8, 2, 2, 6>>(p, launch);
  if (mean_within(16)) return launch_shape<Kind, WgmmaShape<32, 2, 2, 5>>(p, launch);
  if (mean_within(48)) return launch_shape<Kind, WgmmaShape<64, 2, 2, 4>>(p, launch);
  if (mean_within(160)) return launch_shape<Kind, WgmmaShape<128, 2, 1, 6>>(p, launch);
  return launch_shape<Kind, WgmmaShape<256, 2, 1, 4>>(p, launch);
}

}  // namespace grouped
}  // namespace nvb
