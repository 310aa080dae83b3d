// Int4 with f16 scales, and perhaps zero points, for groups of a row, into fragment tiles. The scale spans the group's
// range or, with clipping, is the one that loses least (scale_search.cuh).
//
// A warp takes 16 rows x 128 columns: two tiles, whose words a lane fills just as the products will read them
// (common/quantized.h). A group lies in the registers of the four lanes of a quad. Shared memory: none.
#include <algorithm>

#include "scale_search.cuh"

namespace nvb {
namespace quantize {
namespace {

constexpr int kWarps = 4;
constexpr int kSpan = 128;  // columns of a warp

template <bool ZeroPoints>
__device__ __forceinline__ uint32_t encode(float value, const Step& step, float inverse) {
  if (ZeroPoints)
    return static_cast<uint32_t>(__float2int_rn(fminf(fmaxf((value - step.zero_point) * inverse, 0.0f), 15.0f)));
  return static_cast<uint32_t>(__float2int_rn(fminf(fmaxf(value * inverse, -8.0f), 7.0f)) + 8);
}

// The scale of a quad's group, of which this lane has the columns from `first` on; a group past the last column has
// none.
template <int Group, bool ZeroPoints>
__device__ __forceinline__ Step group_step(const nvb_quantize_params& p, const SourceRow& source, int64_t first) {
  constexpr int kSubtiles = Group / 16;
  float values[kSubtiles][4];
  float low = CUDART_INF_F, high = -CUDART_INF_F;
  uint32_t present = 0;
#pragma unroll
  for (int j = 0; j < kSubtiles; ++j) {
    load_four_sources(p, source, first + 16 * j, 0.0f, values[j]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + 16 * j + i >= p.matrix.columns) break;
      low = fminf(low, values[j][i]), high = fmaxf(high, values[j][i]);
      present |= 1u << (4 * j + i);
    }
  }
  low = -warp_max<4>(-low), high = warp_max<4>(high);
  const bool empty = !(low <= high);
  Step step;
  if (p.clipping) {
    const int64_t left = p.matrix.columns - first / Group * Group;
    const int count = static_cast<int>(left < Group ? left : Group);
    step = ScaleSearch<kSubtiles, ZeroPoints>(values, present, count, low, high).best();
  } else {
    step = step_for<ZeroPoints>(low, high);
  }
  return empty ? Step{0.0f, 0.0f} : step;
}

template <int Group, bool ZeroPoints>
__global__ void __launch_bounds__(32 * kWarps) quantize_int4(const nvb_quantize_params p) {
  constexpr int kGroups = kSpan / Group;
  constexpr int kSubtiles = 8;  // of 16 columns, in a span
  constexpr int kGroupSubtiles = Group / 16;
  const nvb_quantized_matrix& matrix = p.matrix;
  const int lane = threadIdx.x % 32, group_row = lane / 4, quad = lane % 4;
  const int64_t tile_rows = (matrix.rows + 15) / 16, tiles = (matrix.columns + 63) / 64;
  const int64_t groups = (matrix.columns + Group - 1) / Group;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * kSpan + 4 * quad;
  Findings findings(p.report);
  for (int64_t tile_row = blockIdx.y * kWarps + threadIdx.x / 32; tile_row < tile_rows;
       tile_row += gridDim.y * kWarps) {
    // The scales first, in a loop that is not unrolled: the search is long. Written and read once, so that local memory
    // costs nothing beside it.
    Step steps[2][kGroups];
#pragma unroll 1
    for (int r = 0; r < 2; ++r) {
      const int64_t row = tile_row * 16 + group_row + 8 * r;
      const SourceRow source = source_row(p, row < matrix.rows ? row : matrix.rows - 1);
#pragma unroll 1
      for (int g = 0; g < kGroups; ++g) {
        const Step step = group_step<Group, ZeroPoints>(p, source, first_column + g * Group);
        // Padded rows have a scale of 0.
        steps[r][g] = row < matrix.rows ? step : Step{0.0f, 0.0f};
        findings.check_scale(steps[r][g].scale);
        findings.check_scale(steps[r][g].zero_point);
      }
    }

    uint32_t words[kSubtiles] = {};
    __half2 scales[kGroups], zero_points[kGroups];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t row = tile_row * 16 + group_row + 8 * r;
      const bool exists = row < matrix.rows;
      const SourceRow source = source_row(p, exists ? row : matrix.rows - 1);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const Step step = steps[r][g];
        const float inverse = inverse_of(step.scale);
#pragma unroll
        for (int j = 0; j < kGroupSubtiles; ++j) {
          const int64_t k = first_column + (g * kGroupSubtiles + j) * 16;
          float values[4];
          load_four_sources(p, source, k, 0.0f, values);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            uint32_t code = 8;
            if (exists && k + i < matrix.columns) {
              code = encode<ZeroPoints>(values[i], step, inverse);
              const float counted = static_cast<float>(code) - (ZeroPoints ? 0.0f : 8.0f);
              findings.add(values[i], fmaf(step.scale, counted, step.zero_point));
            }
            // Pair i / 2 of this row is nibble 2 (i / 2) + r, its second element four nibbles further.
            words[g * kGroupSubtiles + j] |= code << (4 * (2 * (i / 2) + r) + 16 * (i % 2));
          }
        }
        if (r == 0) {
          scales[g].x = __float2half_rn(step.scale), zero_points[g].x = __float2half_rn(step.zero_point);
        } else {
          scales[g].y = __float2half_rn(step.scale), zero_points[g].y = __float2half_rn(step.zero_point);
        }
      }
    }

    uint4* const data = static_cast<uint4*>(const_cast<void*>(matrix.data));
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const int64_t tile = static_cast<int64_t>(blockIdx.x) * 2 + t;
      if (tile >= tiles) break;
      data[(tile_row * tiles + tile) * 32 + lane] =
          make_uint4(words[4 * t], words[4 * t + 1], words[4 * t + 2], words[4 * t + 3]);
    }
    if (quad != 0) continue;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int64_t group = static_cast<int64_t>(blockIdx.x) * kGroups + g;
      if (group >= groups) break;
      const int64_t index = (tile_row * groups + group) * 8 + group_row;
      static_cast<__half2*>(const_cast<void*>(matrix.scales))[index] = scales[g];
      if (ZeroPoints) static_cast<__half2*>(const_cast<void*>(matrix.zero_points))[index] = zero_points[g];
    }
  }
  findings.report();
}

template <int Group>
cudaError_t launch_group(const nvb_quantize_params& params, const nvb_launch& launch) {
  const nvb_quantized_matrix& matrix = params.matrix;
  const int64_t tile_rows = (matrix.rows + 15) / 16;
  const dim3 grid(static_cast<unsigned>((matrix.columns + kSpan - 1) / kSpan),
                  static_cast<unsigned>(std::min<int64_t>((tile_rows + kWarps - 1) / kWarps, 1024)));
  if (matrix.zero_points == nullptr) {
    quantize_int4<Group, false><<<grid, 32 * kWarps, 0, launch.stream>>>(params);
  } else {
    quantize_int4<Group, true><<<grid, 32 * kWarps, 0, launch.stream>>>(params);
  }
  return cudaPeekAtLastError();
}

}  // namespace

cudaError_t launch_int4(const nvb_quantize_params& params, const nvb_launch& launch) {
  if (params.matrix.group == 32) return launch_group<32>(params, launch);
  if (params.matrix.group == 64) return launch_group<64>(params, launch);
  return launch_group<128>(params, launch);
}

}  // namespace quantize
}  // namespace nvb
