// y[t][n] = act(Σ_k x[t][k] W[n][k] + bias[n]) for up to 64 tokens t and W in 8 or 4 bits, on tensor cores (mma.sync),
// of a whole product or of one expert's (grouped_linear_quantized.cuh).
//
// W is the first operand and passes through registers, as in linear_quantized_skinny.cuh; but from 17 tokens on x is
// the larger stream, so all warps of a block share it through shared memory and each multiplies it with RowTiles * 16
// rows. Everything goes through one ring of Stages stages filled by cp.async; of it, a lane reads its own copies of W
// and everybody's of x.
//
// Shapes: x [m, k] of f16 or bf16 with 16-byte aligned rows, m at most 8 * Tiles a block row, k a multiple of 64.
// Compute capability 8.0.
//
// A stage is WarpsK chunks of x (8 * Tiles rows of 128 bytes, 16-byte pieces swizzled) and one slot for each warp and
// row tile. The block's tile is WarpsN * RowTiles * 16 rows of W; WarpsK warps share a tile and interleave over k, and
// their sums meet in shared memory, added in a fixed order.
#pragma once

#include "linear_epilogue.cuh"
#include "quantized_nonfinite.cuh"
#include "quantized_weight.cuh"

namespace nvb {
namespace quantized {

template <typename Weight, int Tiles, int RowTiles, int WarpsN, int WarpsK, int Stages>
struct MmaShape {
  static constexpr int kWarps = WarpsN * WarpsK;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kTokens = 8 * Tiles;
  static constexpr int kWarpRows = RowTiles * kTileRows;
  static constexpr int kRows = WarpsN * kWarpRows;
  static constexpr int kInputBytes = WarpsK * kTokens * kChunk * 2;
  static constexpr int kStageBytes = kInputBytes + kWarps * RowTiles * Weight::kSlotBytes;
  static constexpr int kResultPitch = kRows + 4;  // floats
  static constexpr int kResultBytes = WarpsK * kTokens * kResultPitch * 4;
  static constexpr int kRingBytes = Stages * kStageBytes;
  static constexpr int kSharedBytes = kRingBytes > kResultBytes ? kRingBytes : kResultBytes;
  static_assert(kSharedBytes <= 99 * 1024, "compute capability 8.6 and 8.9 have no more shared memory a block");
  static_assert(kInputBytes / 16 % kThreads == 0 || kThreads % (kInputBytes / 16) == 0, "equal copies of x");
};

// What a block computes: a tile of tokens and of columns. Column c of the product is row weight_row + c of W, and has
// that element of the bias; Int4 has tiles of 16 rows, so that weight_row is a multiple of 16 there.
struct mma_place {
  int64_t first_token;
  int64_t end_token;
  int64_t first_column;
  int64_t weight_row;
};

// Where 16-byte piece `piece` of row `token` of a chunk of x lies, in pieces. A lane reads four elements (eight with
// 8-bit weights) at Weight::x_offset; the swizzle spreads the rows that one phase of the read touches over all banks.
template <typename Weight>
__device__ __forceinline__ int x_piece(int token, int piece) {
  return token * 8 + (piece ^ Weight::swizzle(token));
}

// The columns from `place.first_column` to `epilogue.columns` of at most 8 * Tiles tokens. All threads of a block call
// it.
template <typename Weight, typename T, int Tiles, int RowTiles, int WarpsN, int WarpsK, int Stages>
__device__ __forceinline__ void multiply_block(const nvb_linear_quantized_params& p, const LinearEpilogue& epilogue,
                                               const mma_place& place) {
#if __CUDA_ARCH__ >= 800
  using Shape = MmaShape<Weight, Tiles, RowTiles, WarpsN, WarpsK, Stages>;
  constexpr int kScaleWords = Weight::kScaleWords > 0 ? Weight::kScaleWords : 1;
  extern __shared__ uint4 shared[];
  char* const ring = reinterpret_cast<char*>(shared);
  const int warp = threadIdx.x / 32;
  const int warp_n = warp % WarpsN, warp_k = warp / WarpsN;
  const int group = threadIdx.x % 32 / 4;
  const int quad = threadIdx.x % 4;
  const int64_t first_token = place.first_token;
  const int64_t block_row = place.weight_row + place.first_column;

  Weight weights[RowTiles];
#pragma unroll
  for (int r = 0; r < RowTiles; ++r) {
    weights[r] = Weight(p, block_row + warp_n * Shape::kWarpRows + r * kTileRows);
  }

  const int chunks = static_cast<int>(p.k / kChunk);
  const int steps = (chunks + WarpsK - 1) / WarpsK;
  const auto copy_stage = [&](int step) {
    if (step < steps) {
      char* const stage = ring + step % Stages * Shape::kStageBytes;
      constexpr int kPieces = Shape::kInputBytes / 16;
#pragma unroll
      for (int i = 0; i < (kPieces + Shape::kThreads - 1) / Shape::kThreads; ++i) {
        const int index = i * Shape::kThreads + threadIdx.x;
        if (kPieces % Shape::kThreads != 0 && index >= kPieces) break;
        const int piece = index % 8, token = index / 8 % Shape::kTokens, part = index / (8 * Shape::kTokens);
        const int64_t k = static_cast<int64_t>(step * WarpsK + part) * kChunk + piece * 8;
        const bool valid = first_token + token < place.end_token && k < p.k;
        const T* const source = static_cast<const T*>(p.input) + (first_token + token) * p.input_stride + k;
        cp_async16(stage + (part * Shape::kTokens * 8 + x_piece<Weight>(token, piece)) * 16, valid ? source : p.input,
                   valid);
      }
      const int chunk = step * WarpsK + warp_k;
      if (chunk < chunks) {
        char* const slots = stage + Shape::kInputBytes + warp * RowTiles * Weight::kSlotBytes;
#pragma unroll
        for (int r = 0; r < RowTiles; ++r) weights[r].copy(chunk, slots + r * Weight::kSlotBytes);
      }
    }
    cp_async_commit();
  };

#pragma unroll
  for (int stage = 0; stage < Stages - 1; ++stage) copy_stage(stage);

  float sums[RowTiles][Tiles][4] = {};
  for (int step = 0; step < steps; ++step) {
    // The barrier shows everybody's copies of x, and that everybody has left the stage refilled next.
    cp_async_wait<Stages - 2>();
    __syncthreads();
    copy_stage(step + Stages - 1);
    const int chunk = step * WarpsK + warp_k;
    if (chunk >= chunks) continue;

    const char* const stage = ring + step % Stages * Shape::kStageBytes;
    const char* const slots = stage + Shape::kInputBytes + warp * RowTiles * Weight::kSlotBytes;
    const char* const inputs = stage + warp_k * Shape::kTokens * kChunk * 2;
    uint32_t words[RowTiles][Weight::kWords], scales[RowTiles][kScaleWords];
#pragma unroll
    for (int r = 0; r < RowTiles; ++r) weights[r].read(slots + r * Weight::kSlotBytes, words[r], scales[r]);

    constexpr int kInstructions = 4 / Weight::kSteps;
#pragma unroll
    for (int s = 0; s < Weight::kSteps; ++s) {
      uint32_t a[RowTiles][kInstructions][4];
      float2 scale[RowTiles], zero_point[RowTiles];
#pragma unroll
      for (int r = 0; r < RowTiles; ++r) {
#pragma unroll
        for (int i = 0; i < kInstructions; ++i) {
          Weight::template fragment<T>(words[r], s * kInstructions + i, a[r][i]);
        }
        if constexpr (Weight::kScales != Scales::kRows) scale[r] = weights[r].scale(scales[r], chunk, s);
        if constexpr (Weight::kZeroPoints) zero_point[r] = weights[r].zero_point(scales[r], s);
      }
#pragma unroll
      for (int tile = 0; tile < Tiles; ++tile) {
        uint32_t x[kInstructions][2];
#pragma unroll
        for (int i = 0; i < kInstructions; i += 2) {
          const int offset_first = Weight::x_offset(s * kInstructions + i, quad);
          const int token = 8 * tile + group;
          if constexpr (Weight::kInputPiece == 8) {
            const uint4 raw = load16(inputs + x_piece<Weight>(token, offset_first / 8) * 16);
            x[i][0] = raw.x, x[i][1] = raw.y, x[i + 1][0] = raw.z, x[i + 1][1] = raw.w;
          } else {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const int element = offset_first + 16 * h;
              const uint2 raw =
                  *reinterpret_cast<const uint2*>(inputs + x_piece<Weight>(token, element / 8) * 16 + element % 8 * 2);
              x[i + h][0] = raw.x, x[i + h][1] = raw.y;
            }
          }
        }
        float input_sums[4] = {};
        if constexpr (Weight::kZeroPoints) {
          const uint32_t ones[4] = {kOnes<T>, kOnes<T>, kOnes<T>, kOnes<T>};
#pragma unroll
          for (int i = 0; i < kInstructions; ++i) mma_m16n8k16<T>(input_sums, ones, x[i][0], x[i][1]);
        }
#pragma unroll
        for (int r = 0; r < RowTiles; ++r) {
          float(&total)[4] = sums[r][tile];
          if constexpr (Weight::kScales == Scales::kRows) {
#pragma unroll
            for (int i = 0; i < kInstructions; ++i) mma_m16n8k16<T>(total, a[r][i], x[i][0], x[i][1]);
          } else {
            float products[4] = {};
#pragma unroll
            for (int i = 0; i < kInstructions; ++i) mma_m16n8k16<T>(products, a[r][i], x[i][0], x[i][1]);
#pragma unroll
            for (int e = 0; e < 4; ++e) total[e] = fmaf(e < 2 ? scale[r].x : scale[r].y, products[e], total[e]);
            if constexpr (Weight::kZeroPoints) {
#pragma unroll
              for (int e = 0; e < 4; ++e)
                total[e] = fmaf(e < 2 ? zero_point[r].x : zero_point[r].y, input_sums[e], total[e]);
            }
          }
        }
      }
    }
  }

  // Lay the sums of every k-warp out in shared memory, once nobody reads the ring.
  cp_async_wait<0>();
  __syncthreads();
  float* const result = reinterpret_cast<float*>(shared);
  constexpr int kPitch = Shape::kResultPitch;
#pragma unroll
  for (int r = 0; r < RowTiles; ++r) {
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
      float* const address = result + (warp_k * Shape::kTokens + 8 * tile + 2 * quad) * kPitch +
                             warp_n * Shape::kWarpRows + r * kTileRows + group;
      address[0] = sums[r][tile][0];
      address[kPitch] = sums[r][tile][1];
      address[8] = sums[r][tile][2];
      address[kPitch + 8] = sums[r][tile][3];
    }
  }
  __syncthreads();

  // A thread finishes four columns of some tokens.
  constexpr int kColumnGroups = Shape::kRows / 4;
  constexpr int kTokenStep = Shape::kThreads / kColumnGroups;
  static_assert(Shape::kThreads % kColumnGroups == 0, "a thread keeps its columns");
  const int local_column = threadIdx.x % kColumnGroups * 4;
  const int64_t column = place.first_column + local_column;
  if (column >= epilogue.columns) return;
  float bias[4], row_scales[4];
  load_bias(epilogue, column, bias, place.weight_row);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    row_scales[i] = Weight::kScales == Scales::kRows && column + i < epilogue.columns
                        ? static_cast<const float*>(p.scales)[place.weight_row + column + i]
                        : 1.0f;
  }
#pragma unroll 1
  for (int token = threadIdx.x / kColumnGroups; token < Shape::kTokens && first_token + token < place.end_token;
       token += kTokenStep) {
    float values[4] = {};
#pragma unroll
    for (int w = 0; w < WarpsK; ++w) {
      const float4 part =
          *reinterpret_cast<const float4*>(result + (w * Shape::kTokens + token) * kPitch + local_column);
      values[0] += part.x, values[1] += part.y, values[2] += part.z, values[3] += part.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = __fmul_rn(values[i], row_scales[i]);  // never fused with the bias
    repair_sums<Weight::kZeroPoints, T>(p, first_token + token, place.weight_row + column, values);
    store_columns(epilogue, first_token + token, column, values, bias);
  }
#endif
}

}  // namespace quantized
}  // namespace nvb
