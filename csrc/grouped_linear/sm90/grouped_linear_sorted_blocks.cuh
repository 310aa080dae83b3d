// y = act(x W[expert]ᵀ + bias[expert]) by wgmma for tokens in the order of their experts, W in blocks of GGUF as a file
// has them, which warps decode into the first operand's registers: W is read once for each tile of tokens, and nothing
// of it is written.
//
// Formats of 256 elements whose scales are whole numbers. An element is scale * (code - offset), a whole number that
// F16 holds (of Q6_K and IQ4_XS above 2048 to 11 bits), and a unit's sum is multiplied with the unit's factor and the
// token's power of two in f32; its minima meet sums of x (common/block_codes.cuh). x comes as
// grouped_linear_sorted_blocks_input.cuh makes it.
//
// One block stays on each multiprocessor. One warp of it copies, kWarpgroups warpgroups multiply 64 rows of W each. A
// stage holds a unit of up to as many rows and of up to Tokens tokens, and the tokens' records; rows are copied in
// groups of eight as in grouped_linear_wgmma.cuh, whose division among blocks this kernel has. Rows of shared memory
// without a copy spoil rows and columns of sums alone that are not stored. Results go to the rows of y that `order`
// names.
//
// Shapes: x [rows, k] in F16 or BF16, k a multiple of 256, n of 8, rows of W that begin at multiples of 16 bytes, at
// most kMostExperts experts. Compute capability 9.0.
//
// Shared memory: SortedBlocksShared, as many stages as fit, 2 to 4. Registers: Tokens sums a thread of the warpgroups
// that multiply, of which half are a unit's, 32 for W and its scales.
#pragma once

#include "../../common/block_product_copy.cuh"
#include "../../common/block_product_halves.cuh"
#include "../../common/quantized_nonfinite.cuh"
#include "../../common/shared_limit.h"
#include "../grouped_linear_tiles.cuh"
#include "grouped_linear_sorted_blocks.h"
#include "grouped_linear_sorted_blocks_input.cuh"
#include "grouped_linear_wgmma.cuh"

namespace nvb {
namespace grouped {

inline constexpr int kUnitBlocks = quantized::kUnit / kBlockDepth;  // of 64 k

template <uint32_t Format, int Tokens>
struct SortedBlocksShape {
  static constexpr uint32_t kFormat = Format;
  static constexpr int kTokens = Tokens, kWarpgroups = 3;
  static constexpr int kThreads = 128 * kWarpgroups + 32;
  static constexpr int kGroups = 8 * kWarpgroups;  // of W in a stage
  static constexpr int kPass = std::min(Tokens, 16), kPitch = 64 + 4;
  static constexpr int kUnitBytes = quantized::BlockCodes<Format>::kUnitBytes;
  // A unit of a row begins and ends at multiples of 16 bytes; an odd number of these parts rows by banks.
  static constexpr int kChunks = kUnitBytes % 16 == 0 ? kUnitBytes / 16 : quantized::blocks::kMostChunks<Format>;
  static constexpr int kPlace = 16 * (kChunks | 1);
  static constexpr int kInputBytes = Tokens * 2 * quantized::kUnit;
  static constexpr int kWeightBytes = kGroups * kGroupRows * kPlace;
  static constexpr int kStageBytes = (kInputBytes + kWeightBytes + Tokens * kRecordBytes + 1023) / 1024 * 1024;
  static constexpr int kRest = kWarpgroups * kPass * kPitch * 4 + static_cast<int>(sizeof(ExpertTiles<Tokens>)) + 256;
  static constexpr int kStages = std::min(4, (227 * 1024 - kRest) / kStageBytes);
  static_assert(kStages >= 2, "a stage is copied while another is multiplied");
};

template <typename Shape>
struct SortedBlocksShared {
  uint8_t stages[Shape::kStages][Shape::kStageBytes];
  float sums[Shape::kWarpgroups][Shape::kPass * Shape::kPitch];
  uint64_t full[Shape::kStages];
  uint64_t empty[Shape::kStages];
  ExpertTiles<Shape::kTokens> tiles;
};

// Tokens that an order names. A unit of x that is not finite makes NaN of its token's sums, which are taken again from
// the elements then.
template <uint32_t Format>
struct OrderedTokens {
  const int32_t* order;
  int64_t used;  // rows of the output that share a row of x
  nvb_linear_quantized_params whole;

  __device__ __forceinline__ int64_t row(int64_t place) const { return order[place]; }
  // Not by a call, in whose presence wgmma instructions run one after the other: 140 us for 124.
  __device__ __forceinline__ void repair(int64_t place, int64_t column, float (&values)[4]) const {
    uint32_t broken = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!(fabsf(values[i]) < CUDART_INF_F) && column + i < whole.n) broken |= 1u << i;
    }
#pragma unroll 1
    while (broken != 0) {
      const int one = __ffs(static_cast<int>(broken)) - 1;
      broken &= broken - 1;
      const int64_t first = order[place] / used * whole.input_stride;
      const float sum = quantized::sum_products<Format>(
          whole, column + one, [&](int64_t k) { return load_element(whole.input, whole.input_dtype, first + k); });
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = i == one ? sum : values[i];
    }
  }
};

template <uint32_t Format>
struct SortedBlocksArguments {
  CUtensorMap input;
  CUtensorMap weight;       // boxes of one group
  CUtensorMap many_weight;  // and of kManyGroups
  LinearEpilogue epilogue;
  const int32_t* expert_offsets;
  OrderedTokens<Format> tokens;
  const uint8_t* records;
  int64_t rows;
  int32_t experts;
  int32_t groups;  // of an expert's rows
  int32_t units;
};

// Copies all of a piece, unit by unit, by the lanes of one warp.
template <typename Shape>
__device__ __forceinline__ void copy_blocks(const SortedBlocksArguments<Shape::kFormat>& arguments,
                                            SortedBlocksShared<Shape>& shared, const Piece& piece,
                                            RingPlace<Shape::kStages>& place) {
  constexpr int kMapBytes = quantized::blocks::kMapBytes<Shape::kFormat>;
  const int lane = threadIdx.x % 32;
  const int many = piece.groups / kManyGroups, single = piece.groups % kManyGroups;
  const int inputs = (piece.tokens + kGroupRows - 1) / kGroupRows;
  const uint32_t record_bytes = static_cast<uint32_t>(piece.tokens) * kRecordBytes;
  const uint32_t bytes =
      static_cast<uint32_t>(piece.groups * kGroupRows * Shape::kPlace + inputs * kUnitBlocks * kGroupBlockBytes) +
      record_bytes;
  const int first_row = (piece.expert * arguments.groups + piece.first_group) * kGroupRows;
  const int first_token = static_cast<int>(piece.first_token);
#pragma unroll 1
  for (int unit = 0; unit < arguments.units; ++unit) {
    uint64_t* const full = &shared.full[place.stage];
    uint8_t* const stage = shared.stages[place.stage];
    uint8_t* const weight = stage + Shape::kInputBytes;
    const int element = unit * Shape::kUnitBytes / 16 * (16 / kMapBytes);
    barrier_wait(&shared.empty[place.stage], place.parity ^ 1);
    if (lane == 0) barrier_expect(full, bytes);
    __syncwarp();
    for (int i = lane; i < many + single + inputs + 1; i += 32) {
      if (i < many) {
        const int row = i * kManyGroups * kGroupRows;
        tensor_copy(weight + row * Shape::kPlace, &arguments.many_weight, element, first_row + row, full);
      } else if (i < many + single) {
        const int row = (many * kManyGroups + i - many) * kGroupRows;
        tensor_copy(weight + row * Shape::kPlace, &arguments.weight, element, first_row + row, full);
      } else if (i < many + single + inputs) {
        const int input = i - many - single;
        tensor_copy(stage + input * kUnitBlocks * kGroupBlockBytes, &arguments.input, 0,
                    first_token + input * kGroupRows, unit * kUnitBlocks, full);
      } else {
        bulk_copy(weight + Shape::kWeightBytes,
                  arguments.records + (unit * arguments.rows + first_token) * kRecordBytes, record_bytes, full);
      }
    }
    place.advance();
  }
}

// Four codes less their offset as F16, times a whole number. 1024 and a code times a scale of six bits without a sign
// are within F16, so one instruction takes 1024 times the scale off that; other scales are not.
template <typename Codes>
__device__ __forceinline__ uint2 scaled_codes(uint32_t codes, __half2 scale) {
  const auto as_halves = [](const uint32_t& two) { return *reinterpret_cast<const __half2*>(&two); };
  const auto as_word = [](const __half2& two) { return *reinterpret_cast<const uint32_t*>(&two); };
  if constexpr (Codes::kMinimum) {
    static_assert(Codes::kOffset == 0 && !Codes::kSigned);
    const __half2 less = __hmul2(scale, __float2half2_rn(-1024.0f));
    const auto scaled = [&](uint32_t raised) { return as_word(__hfma2(as_halves(raised), scale, less)); };
    return make_uint2(scaled(__byte_perm(codes, 0x64646464u, 0x4140)), scaled(__byte_perm(codes, 0x64646464u, 0x4342)));
  } else {
    const uint2 halves = quantized::blocks::halves_of_codes<Codes>(codes);
    return make_uint2(as_word(__hmul2(as_halves(halves.x), scale)), as_word(__hmul2(as_halves(halves.y), scale)));
  }
}

// Adds a unit of the warp's 16 rows of W times x of a stage to the sums.
template <typename Shape, int Count>
__device__ __forceinline__ void multiply_blocks(const uint8_t* stage, int row, int unit, int tokens,
                                                float (&sums)[Count]) {
  using Codes = quantized::BlockCodes<Shape::kFormat>;
  using Unit = quantized::BlockUnit<Shape::kUnitBytes % 4 != 0>;
  using Scales = typename Codes::template Scales<Unit>;
  namespace blocks = quantized::blocks;
  const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const uint8_t* const weight =
      stage + Shape::kInputBytes + (row + group) * Shape::kPlace + unit * Shape::kUnitBytes % 16;
  const Unit units[2] = {Unit(weight, quad), Unit(weight + 8 * Shape::kPlace, quad)};
  const Scales scales[2] = {Scales(units[0]), Scales(units[1])};
  const uint64_t b = wgmma_descriptor(stage, kUnitBlocks * kGroupBlockBytes);
  float products[Count];
  uint32_t a[2][4][4];  // of a quarter, of which two are decoded in turn
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {
    if (quarter >= 2) wgmma_wait<1>();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t(&to)[4] = a[quarter % 2][step];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const __half2 scale = __half2half2(__int2half_rn(scales[r].scale(quarter, step / Codes::kGroupSteps)));
        const uint2 scaled = scaled_codes<Codes>(Codes::codes(units[r], quarter, step), scale);
        to[r] = scaled.x, to[r + 2] = scaled.y;
      }
    }
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      wgmma_rs<__half>(products, a[quarter % 2][step], b + quarter * (kGroupBlockBytes / 16) + 2 * step,
                       quarter != 0 || step != 0);
    }
    wgmma_commit();
  }
  uint32_t minima[4] = {};
  blocks::load_minima<Codes>(scales, minima);
  const uint8_t* const records = stage + Shape::kInputBytes + Shape::kWeightBytes;
  wgmma_wait<0>();
  wgmma_fence_operand(products);
#pragma unroll
  for (int tile = 0; tile < Count / 4; ++tile) {
    if (8 * tile >= tokens) break;
    float minima_sums[4] = {};
    if constexpr (Codes::kMinimum) {
      const uint4 step = *reinterpret_cast<const uint4*>(records + (8 * tile + group) * kRecordBytes + 16 * quad);
      blocks::begin_mma(minima_sums, minima, step.z, step.w);
      mma_m16n8k16<__half>(minima_sums, minima, step.x, step.y);
    }
    const uint8_t* const own = records + (8 * tile + 2 * quad) * kRecordBytes + kInverseAt;
    const float2 inverse =
        make_float2(*reinterpret_cast<const float*>(own), *reinterpret_cast<const float*>(own + kRecordBytes));
    const float unit_sums[4] = {products[4 * tile], products[4 * tile + 1], products[4 * tile + 2],
                                products[4 * tile + 3]};
    float four[4] = {sums[4 * tile], sums[4 * tile + 1], sums[4 * tile + 2], sums[4 * tile + 3]};
    blocks::add_unit<Codes>(scales, unit_sums, minima_sums, blocks::kSumsOver, inverse, four);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[4 * tile + i] = four[i];
  }
}

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    grouped_linear_sorted_blocks(const __grid_constant__ SortedBlocksArguments<Shape::kFormat> arguments) {
#ifdef NVB_WGMMA
  extern __shared__ __align__(1024) uint8_t memory[];
  SortedBlocksShared<Shape>& shared = *reinterpret_cast<SortedBlocksShared<Shape>*>(memory);
  // All lanes of a warp have one value, and the shuffle tells the compiler so.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), warpgroup = warp / 4;

  // Barriers: a stage is full once its bytes are there, empty once every warp has read it.
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      barrier_init(&shared.full[stage], 1);
      barrier_init(&shared.empty[stage], 4 * Shape::kWarpgroups);
    }
    barrier_init_fence();
    prefetch_tensor_map(&arguments.input);
    prefetch_tensor_map(&arguments.weight);
    prefetch_tensor_map(&arguments.many_weight);
  }
  begin_overlapped();
  shared.tiles.load(arguments.expert_offsets, arguments.experts, arguments.rows);
  Walk<Shape::kTokens, Shape::kGroups, true> walk(shared.tiles, arguments.experts, arguments.rows, arguments.groups);
  Piece piece;
  RingPlace<Shape::kStages> place;
  if (warpgroup == Shape::kWarpgroups) {
    fence_before_bulk_copies();
    while (walk.next(piece)) copy_blocks(arguments, shared, piece, place);
    return;
  }
  while (walk.next(piece)) {
    const bool has_rows = 8 * warpgroup < piece.groups;
    float sums[Shape::kTokens / 2] = {};
#pragma unroll 1
    for (int unit = 0; unit < arguments.units; ++unit) {
      barrier_wait(&shared.full[place.stage], place.parity);
      if (has_rows) multiply_blocks<Shape>(shared.stages[place.stage], 16 * warp, unit, piece.tokens, sums);
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(&shared.empty[place.stage]);
      place.advance();
    }
    if (has_rows) {
      epilogue_piece<Shape>(arguments.epilogue, piece, sums, shared.sums[warpgroup], warpgroup, arguments.tokens);
    }
  }
#endif
}

template <typename Shape>
cudaError_t launch_sorted_shape(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  static_assert(sizeof(SortedBlocksShared<Shape>) <= 227 * 1024, "what a block can have");
  SortedBlocksArguments<Shape::kFormat> arguments;
  arguments.units = static_cast<int32_t>(p.k / quantized::kUnit);
  const SortedInput staged(p.workspace, p.rows, arguments.units);
  const MatrixOfBlocks input = {staged.numbers, p.rows, p.k, p.k};
  cudaError_t error = make_map(arguments.input, input, 3, kUnitBlocks, kGroupRows, 1);
  if (error != cudaSuccess) return error;
  const auto make_weight_map = [&](CUtensorMap& map, int rows) {
    return quantized::blocks::make_row_map<Shape::kFormat>(map, p.weight, p.weight_stride,
                                                           int64_t{arguments.units} * Shape::kUnitBytes,
                                                           p.n * p.experts, Shape::kPlace, rows);
  };
  error = make_weight_map(arguments.weight, kGroupRows);
  if (error != cudaSuccess) return error;
  error = make_weight_map(arguments.many_weight, kManyGroups * kGroupRows);
  if (error != cudaSuccess) return error;
  arguments.epilogue = make_epilogue_alone(p, p.n);
  arguments.expert_offsets = p.expert_offsets;
  arguments.tokens = {p.order, p.input_rows != p.rows ? p.used : 1, make_whole(p)};
  arguments.records = staged.records;
  arguments.rows = p.rows;
  arguments.experts = p.experts;
  arguments.groups = static_cast<int32_t>(p.n / kGroupRows);
  const auto kernel = grouped_linear_sorted_blocks<Shape>;
  error = nvb_cuda_raise_shared_limit(reinterpret_cast<const void*>(kernel), sizeof(SortedBlocksShared<Shape>));
  if (error != cudaSuccess) return error;
  const int64_t most = most_tiles(p, Shape::kTokens) * arguments.groups;
  const int64_t blocks = std::min<int64_t>(most, std::max(1, launch.multiprocessors));
  return launch_overlapped(kernel, dim3(static_cast<unsigned>(blocks)), dim3(Shape::kThreads),
                           sizeof(SortedBlocksShared<Shape>), &launch, arguments);
}

template <typename T>
cudaError_t launch_sorted_input(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  const int units = static_cast<int>(p.k / quantized::kUnit);
  const int64_t blocks = (p.rows * units + kSortedInputWarps - 1) / kSortedInputWarps;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const bool vectors = is_aligned16(p.input, p.input_stride, 2);
  return launch_overlapped(stage_sorted_input<T>, dim3(static_cast<unsigned>(blocks)), dim3(32 * kSortedInputWarps), 0,
                           &launch, p, units, vectors);
}

// Tiles by the tokens that an expert has on the average, of which most have room for them then.
template <uint32_t Format>
cudaError_t launch_sorted_blocks_format(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  const cudaError_t error = p.input_dtype == NVB_BF16 ? launch_sorted_input<__nv_bfloat16>(p, launch)
                                                      : launch_sorted_input<__half>(p, launch);
  if (error != cudaSuccess) return error;
  return p.rows <= int64_t{20} * p.experts ? launch_sorted_shape<SortedBlocksShape<Format, 32>>(p, launch)
                                           : launch_sorted_shape<SortedBlocksShape<Format, 64>>(p, launch);
}

}  // namespace grouped
}  // namespace nvb
