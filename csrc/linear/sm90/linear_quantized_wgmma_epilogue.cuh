// The end of linear_quantized_wgmma.cuh: the consumers' sums, through shared memory, to the block of the cluster that
// finishes their token, and from there to the output.
#pragma once

#include "../../common/linear_epilogue.cuh"
#include "../../common/quantized_nonfinite.cuh"
#include "../../common/wgmma.cuh"
#include "linear_quantized_wgmma_shape.cuh"

namespace nvb {
namespace quantized {

// A block's place: its rank in the cluster, the rows of W and the tokens that it starts at, the tokens it finishes.
struct WgmmaPlace {
  int rank;
  int own_tokens;
  int64_t row;
  int64_t token;
};

// For the consumers, of which each holds its warp's 16 rows of every tile from block `first_block` on. `exchange`
// receives the other blocks' sums, `arrived` counts their bytes, `factors` are the tokens' where T has them.
template <typename Shape, typename Weight, typename T, int Tokens, int GroupK, int Tiles>
__device__ __forceinline__ void epilogue_sums(const nvb_linear_quantized_params& p, const LinearEpilogue& epilogue,
                                              const WgmmaShare& share, const WgmmaPlace& block, char* ring,
                                              char* exchange, uint64_t* arrived, const float* factors, int first_block,
                                              const float (&total)[Tiles][Tokens / 2]) {
#ifdef NVB_WGMMA
  constexpr int kSums = Tokens / 2;
  const int rank = block.rank, own_tokens = block.own_tokens;
  const int64_t block_row = block.row, first_token = block.token;
  const int group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;

  // A thread will finish four columns of some tokens; what it needs for that arrives meanwhile.
  constexpr int kColumnGroups = Shape::kRows / 4;
  constexpr int kTokenStep = Shape::kConsumers / kColumnGroups;
  const int local_column = threadIdx.x % kColumnGroups * 4;
  const int local_token = threadIdx.x / kColumnGroups;
  const int64_t column = block_row + local_column;
  float bias[4], row_scales[4];
  load_bias(epilogue, column, bias);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    row_scales[i] = GroupK == 0 && column + i < p.n ? static_cast<const float*>(p.scales)[column + i] : 1.0f;
  }

  // Lay the sums out in shared memory, once every consumer has left the ring.
  consumer_barrier<Shape::kConsumers>();
  float* const result = reinterpret_cast<float*>(ring);
  constexpr int kPitch = Shape::kResultPitch;
#pragma unroll
  for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      float* const address = result + (2 * i + 2 * quad) * kPitch + (first_block + 4 * tile) * kTileRows + group;
      address[0] = total[tile][i];
      address[kPitch] = total[tile][i + 1];
      address[8] = total[tile][i + 2];
      address[kPitch + 8] = total[tile][i + 3];
    }
  }
  consumer_barrier<Shape::kConsumers>();

  // The blocks of a cluster send each other their sums for the other's tokens.
  float* const own = result + rank * share.tokens * kPitch + local_column;
  if (share.splits > 1) {
    cluster_wait();
    for (int away = 1; away < share.splits; ++away) {
      const int owner = rank + away < share.splits ? rank + away : rank + away - share.splits;
      const int place = (away - 1) * share.tokens * Shape::kRows + local_column;
      const uint32_t target = cluster_address(exchange + place * 4, owner);
      const uint32_t barrier = cluster_address(arrived, owner);
      const int end = min(Tokens, (owner + 1) * share.tokens) - owner * share.tokens;
#pragma unroll 1
      for (int token = local_token; token < end; token += kTokenStep) {
        const float4 sum =
            *reinterpret_cast<const float4*>(result + (owner * share.tokens + token) * kPitch + local_column);
        const float values[4] = {sum.x, sum.y, sum.z, sum.w};
        cluster_store(target + token * Shape::kRows * 4, values, barrier);
      }
    }
    barrier_wait(arrived, 0);
  }
  if (epilogue.residual != nullptr) wait_for_previous_grid();  // of the consumers, none has waited
  if (column < p.n) {
    const int64_t first_row = first_token + rank * share.tokens;
    const int tokens = static_cast<int>(min(p.m - first_row, static_cast<int64_t>(own_tokens)));
    const auto finished = [&](int token) {
      float4 sum = *reinterpret_cast<const float4*>(own + token * kPitch);
      for (int away = 1; away < share.splits; ++away) {
        const float4 part = *reinterpret_cast<const float4*>(
            exchange + (((away - 1) * share.tokens + token) * Shape::kRows + local_column) * 4);
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      }
      if constexpr (kHasFactors<T>) {
        const float factor = factors[rank * share.tokens + token];
        if (kAsTwoFp8<T> && factor < 0.0f) return sum;
        sum.x *= factor, sum.y *= factor, sum.z *= factor, sum.w *= factor;
      }
      if (GroupK == 0) sum.x *= row_scales[0], sum.y *= row_scales[1], sum.z *= row_scales[2], sum.w *= row_scales[3];
      return sum;
    };
    if constexpr (Weight::kZeroPoints || kHasFactors<T>) {
      bool finite = true;
      const auto is_finite = [](float sum) { return fabsf(sum) < CUDART_INF_F; };
#pragma unroll 4
      for (int token = local_token; token < tokens; token += kTokenStep) {
        if constexpr (kAsTwoFp8<T>) {
          finite = finite && !(factors[rank * share.tokens + token] < 0.0f);
          continue;
        }
        const float4 sum = finished(token);
        finite = finite && is_finite(sum.x) && is_finite(sum.y) && is_finite(sum.z) && is_finite(sum.w);
      }
      if (!finite) {
        // Put right where they lie, so that what follows has one way alone.
        wait_for_previous_grid();
#pragma unroll 1
        for (int token = local_token; token < tokens; token += kTokenStep) {
          if (kAsTwoFp8<T> && !(factors[rank * share.tokens + token] < 0.0f)) continue;
          const float4 sum = finished(token);
          float values[4] = {sum.x, sum.y, sum.z, sum.w};
          repair_sums<true, Element<T>, Weight::kEncoding>(p, first_row + token, column, values);
          // `finished` will multiply by this token's power of two once more.
          const float back = kAsScaledF16<T> ? 1.0f / factors[rank * share.tokens + token] : 1.0f;
          *reinterpret_cast<float4*>(own + token * kPitch) =
              make_float4(values[0] * back, values[1] * back, values[2] * back, values[3] * back);
          for (int away = 1; away < share.splits; ++away) {
            *reinterpret_cast<float4*>(exchange + (((away - 1) * share.tokens + token) * Shape::kRows + local_column) *
                                                      4) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          }
        }
      }
    }
    const bool vectors = !epilogue.gated && epilogue.activation == NVB_NONE && epilogue.vectors && column + 4 <= p.n;
    if (vectors && epilogue.residual != nullptr && epilogue.residual_vectors) {
      // The residual may be the output, so its loads do not pass stores by themselves.
      constexpr int kBatch = 4;
#pragma unroll 1
      for (int token = local_token; token < tokens; token += kBatch * kTokenStep) {
        float values[kBatch][4] = {};
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (token + i * kTokenStep >= tokens) break;
          load_elements(epilogue.residual, epilogue.residual_dtype,
                        (first_row + token + i * kTokenStep) * epilogue.residual_stride + column, values[i]);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (token + i * kTokenStep >= tokens) break;
          const float4 sum = finished(token + i * kTokenStep);
          values[i][0] += sum.x + bias[0], values[i][1] += sum.y + bias[1];
          values[i][2] += sum.z + bias[2], values[i][3] += sum.w + bias[3];
          store_elements(epilogue.output, epilogue.output_dtype,
                         (first_row + token + i * kTokenStep) * epilogue.output_stride + column, values[i]);
        }
      }
    } else if (vectors && epilogue.residual == nullptr) {
#pragma unroll 4
      for (int token = local_token; token < tokens; token += kTokenStep) {
        const float4 sum = finished(token);
        const float values[4] = {sum.x + bias[0], sum.y + bias[1], sum.z + bias[2], sum.w + bias[3]};
        store_elements(epilogue.output, epilogue.output_dtype, (first_row + token) * epilogue.output_stride + column,
                       values);
      }
    } else {
#pragma unroll 1
      for (int token = local_token; token < tokens; token += kTokenStep) {
        const float4 sum = finished(token);
        const float values[4] = {sum.x, sum.y, sum.z, sum.w};
        store_columns(epilogue, first_row + token, column, values, bias);
      }
    }
  }
#endif
}

}  // namespace quantized
}  // namespace nvb
