// sample: temperature, top-k, top-p and a Philox draw (semantics in sample.h), without sorting.
//
// Shapes: logits [rows, columns] float, tokens i32[rows]; vectors of 8, 4 or 1 elements by alignment.
// Work, four kernels, the first three with several blocks a row (row_chunks.cuh), the last with one:
//   extremes:  the largest and smallest logit; clears the row's bins.
//   histogram: tallies the tokens in 2048 bins by distance from the largest.
//   gather:    collects the tokens of the few bins in which top-k, top-p or the draw can fall.
//   resolve:   finds the exact tokens of the three among them.
// If more than 8192 tokens would be gathered (thousands of nearly equal logits), resolve reads the row instead.
// temperature <= 0 takes the first and the last kernel alone. A top-k that is small beside the row goes to
// sample_top_k.cu.
// Shared memory: 24 KiB for bins; resolve 12 KiB more for its slots. Integer atomics only, so no order changes a
// result.
#include <algorithm>

#include "sample_row.cuh"
#include "sample_select.cuh"
#include "sample_top_k.h"

namespace nvb {
namespace {

constexpr int kThreads = 512;
constexpr int64_t kMaximumColumns = (int64_t{1} << 20) - 1;

__device__ __forceinline__ sample_row& row_workspace(const nvb_sample_params& p, int64_t row) {
  return static_cast<sample_row*>(p.workspace)[row];
}

template <int Width>
__global__ void __launch_bounds__(kThreads) sample_extremes_kernel(const nvb_sample_params p, const row_chunks chunks) {
  __shared__ uint64_t largest_scratch[kThreads / 32];
  __shared__ float smallest_scratch[kThreads / 32];
  const chunk part = this_chunk(p, chunks);
  sample_row& row = row_workspace(p, part.row);

  // Clear this block's share of the bins.
  for (int bin = part.number * kThreads + threadIdx.x; bin < kBins; bin += chunks.count * kThreads) {
    row.masses[bin] = 0;
    row.counts[bin] = 0;
  }
  if (part.number == 0 && threadIdx.x == 0) row.candidate_count = 0;

  // This thread's extremes.
  constexpr float kInfinity = __builtin_inff();
  uint64_t largest = 0;
  float smallest = kInfinity;
  visit_columns<Width>(row_logits(p, part.row), p.logits_dtype, part.begin, part.end, [&](float value, int32_t column) {
    const uint64_t ranked = rank_logit(value, column);
    largest = ranked > largest ? ranked : largest;
    if (value > -kInfinity) smallest = fminf(smallest, value);
  });

  // The block's.
  const int lane = threadIdx.x % 32;
  largest = warp_max_ranked(largest);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    smallest = fminf(smallest, __shfl_xor_sync(0xffffffffu, smallest, offset));
  }
  if (lane == 0) {
    largest_scratch[threadIdx.x / 32] = largest;
    smallest_scratch[threadIdx.x / 32] = smallest;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kThreads / 32; ++warp) {
    largest = largest_scratch[warp] > largest ? largest_scratch[warp] : largest;
    smallest = fminf(smallest, smallest_scratch[warp]);
  }
  row.extremes[part.number] = {largest, smallest, 0};
}

template <int Width>
__global__ void __launch_bounds__(kThreads)
    sample_histogram_kernel(const nvb_sample_params p, const row_chunks chunks) {
  __shared__ shared_tallies<kBins> bins;
  const chunk part = this_chunk(p, chunks);
  sample_row& row = row_workspace(p, part.row);
  const row_scale scale = load_scale(p, row, chunks.count);
  if (!(scale.maximum > -__builtin_inff())) return;  // nothing to draw from: all bins stay empty

  // Tally this block's tokens.
  bins.clear();
  __syncthreads();
  visit_columns<Width>(row_logits(p, part.row), p.logits_dtype, part.begin, part.end, [&](float value, int32_t) {
    const float distance = token_distance(scale, value);
    const int bin = distance_bin(scale, distance);
    if (bin != kFarBin) bins.add(bin, distance_mass(distance));
  });
  __syncthreads();

  // Add them to the row's.
  for (int bin = threadIdx.x; bin < kBins; bin += kThreads) {
    const tally sum = bins.get(bin);
    if (sum.count == 0) continue;
    atomicAdd(&row.counts[bin], sum.count);
    atomicAdd(reinterpret_cast<unsigned long long*>(&row.masses[bin]), static_cast<unsigned long long>(sum.mass));
  }
}

template <int Width>
__global__ void __launch_bounds__(kThreads) sample_gather_kernel(const nvb_sample_params p, const row_chunks chunks) {
  __shared__ cumulative_bins bins;
  __shared__ tally scratch[32];
  const chunk part = this_chunk(p, chunks);
  sample_row& row = row_workspace(p, part.row);
  const row_scale scale = load_scale(p, row, chunks.count);
  bins.load<kThreads>(row, scratch);
  if (bins.total_mass() == 0) return;

  // Every block of the row comes to the same selection, and to the same answer whether it fits.
  const bin_selection selection = select_bins(p, bins, row_uniform(p, part.row));
  if (selection.count(bins) > kCandidates) return;
  visit_columns<Width>(row_logits(p, part.row), p.logits_dtype, part.begin, part.end, [&](float value, int32_t column) {
    if (!selection.contains(distance_bin(scale, token_distance(scale, value)))) return;
    const uint32_t place = atomicAdd(&row.candidate_count, 1u);
    // The count from the bins holds unless the caller overwrites the logits meanwhile.
    if (place < kCandidates) row.candidates[place] = rank_logit(value, column);
  });
}

__global__ void __launch_bounds__(kSelectThreads)
    sample_resolve_kernel(const nvb_sample_params p, const row_chunks chunks) {
  __shared__ cumulative_bins bins;
  __shared__ select_shared shared;
  const int64_t row_number = blockIdx.x;
  const sample_row& row = row_workspace(p, row_number);
  const row_scale scale = load_scale(p, row, chunks.count);
  if (p.temperature <= 0.0f) {
    const float probability = scale.maximum > -__builtin_inff() ? 1.0f : 0.0f;
    if (threadIdx.x == 0) store_token(p, row_number, scale.largest, probability);
    return;
  }
  bins.load<kSelectThreads>(row, shared.scratch);
  const uint64_t total = bins.total_mass();
  if (total == 0) {
    if (threadIdx.x == 0) store_token(p, row_number, scale.largest, 0.0f);
    return;
  }
  const token_source source = {row.candidates, min(row.candidate_count, static_cast<uint32_t>(kCandidates)),
                               row_logits(p, row_number), p.logits_dtype, static_cast<int32_t>(p.columns)};

  // Top-k: the mass of the top_k first tokens.
  uint64_t kept = total;
  const int count_bin = top_k_bin(p, bins);
  if (count_bin != kFarBin) {
    const uint64_t target = static_cast<uint64_t>(p.top_k);
    kept = find_token(source, scale, count_bin, bins.before(count_bin), measure::count, target, shared).mass;
  }

  // Top-p: the mass of the shortest prefix that reaches top_p of it.
  if (p.top_p < 1.0f) {
    const uint64_t target = top_p_target(p.top_p, kept);
    const int bin = first_reaching(bins.masses, target);
    kept = find_token(source, scale, bin, bins.before(bin), measure::mass, target, shared).mass;
  }

  // Draw.
  const uint64_t target = draw_target(row_uniform(p, row_number), kept);
  const int bin = first_reaching(bins.masses, target);
  const uint64_t token = find_token(source, scale, bin, bins.before(bin), measure::mass, target, shared).ranked;
  if (threadIdx.x == 0) {
    const float weight = distance_weight(token_distance(scale, ranked_logit(token)));
    store_token(p, row_number, token, weight / (static_cast<float>(total) * kMassUnit));
  }
}

template <int Width>
cudaError_t enqueue(const nvb_sample_params& p, const nvb_launch* launch) {
  const row_chunks chunks = sample_chunks(p, launch);
  const int64_t blocks = p.rows * chunks.count;
  if (blocks > 0x7fffffff) return cudaErrorInvalidValue;
  const unsigned grid = static_cast<unsigned>(blocks);
  sample_extremes_kernel<Width><<<grid, kThreads, 0, launch->stream>>>(p, chunks);
  if (p.temperature > 0.0f) {
    sample_histogram_kernel<Width><<<grid, kThreads, 0, launch->stream>>>(p, chunks);
    sample_gather_kernel<Width><<<grid, kThreads, 0, launch->stream>>>(p, chunks);
  }
  sample_resolve_kernel<<<static_cast<unsigned>(p.rows), kSelectThreads, 0, launch->stream>>>(p, chunks);
  return cudaGetLastError();
}

}  // namespace
}  // namespace nvb

extern "C" size_t nvb_cuda_sample_workspace(const nvb_sample_params* params, const nvb_launch*) noexcept {
  const size_t row_bytes = std::max(sizeof(nvb::sample_row), nvb::top_k_workspace());
  return params->rows <= 0 ? 0 : row_bytes * static_cast<size_t>(params->rows);
}

extern "C" cudaError_t nvb_cuda_sample(const nvb_sample_params* params, const nvb_launch* launch) noexcept {
  const nvb_sample_params& p = *params;
  if (p.rows <= 0) return cudaSuccess;
  const bool temperature_is_nan = p.temperature != p.temperature;
  if (nvb::float_dtype_bytes(p.logits_dtype) == 0 || p.columns < 1 || p.columns > nvb::kMaximumColumns ||
      temperature_is_nan || p.workspace == nullptr) {
    return cudaErrorInvalidValue;
  }
  const int width = nvb::widest_vector(p.columns, {{p.logits, p.logits_stride, p.logits_dtype}});
  if (nvb::supports_top_k(p, width, launch)) return nvb::enqueue_top_k(p, width, launch);
  switch (width) {
    case 8:
      return nvb::enqueue<8>(p, launch);
    case 4:
      return nvb::enqueue<4>(p, launch);
    default:
      return nvb::enqueue<1>(p, launch);
  }
}
