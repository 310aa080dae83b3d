// What sampling knows of a row: its scale, its tokens' distances from the largest logit, their masses, and the bins
// that sum them up.
//
// A token's distance is (max - logit) / temperature and its mass e^-distance in units of 2^-44, an integer: sums of
// masses are exact, equal in any order, and below 2^64 for fewer than 2^20 tokens. Bins cut the distances from 0 to the
// row's largest, or to 32, evenly; from 32 on, where the mass is 0, tokens are in the far bin and nobody counts them.
// Distance, bin and mass are monotone in the logit, so bins in ascending order hold tokens in descending order.
#pragma once

#include "../common/row_chunks.cuh"
#include "sample.h"

namespace nvb {

inline constexpr int kBins = 2048;
inline constexpr int kFarBin = kBins - 1;
inline constexpr float kFarDistance = 32.0f;
inline constexpr float kMassUnit = 1.0f / 17592186044416.0f;  // 2^-44
inline constexpr int kCandidates = 8192;

// The largest logit of a chunk, ranked, and the smallest one above -inf.
struct chunk_extremes {
  uint64_t largest;
  float smallest;
  uint32_t padding;
};

// One per row of the call.
struct sample_row {
  chunk_extremes extremes[kMaximumChunks];
  uint64_t masses[kBins];
  uint64_t candidates[kCandidates];  // ranked logits of the bins in which a cut or the draw may fall, in any order
  uint32_t counts[kBins];
  uint32_t candidate_count;  // 0: they did not fit
  uint32_t padding[3];
};
static_assert(sizeof(sample_row) % 16 == 0, "rows follow each other at 16-byte alignment");

struct row_scale {
  uint64_t largest;  // ranked
  float maximum;
  float temperature;
  float bins_per_distance;
};

// Every warp for itself, from what the chunks found.
__device__ __forceinline__ row_scale load_scale(const nvb_sample_params& p, const sample_row& row, int chunk_count) {
  static_assert(kMaximumChunks == 64, "a lane reads two chunks");
  const int lane = threadIdx.x % 32;
  uint64_t largest = 0;
  float smallest = __uint_as_float(0x7f800000u);
  for (int chunk = lane; chunk < chunk_count; chunk += 32) {
    const chunk_extremes extremes = row.extremes[chunk];
    largest = extremes.largest > largest ? extremes.largest : largest;
    smallest = fminf(smallest, extremes.smallest);
  }
  row_scale scale;
  scale.largest = warp_max_ranked(largest);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    smallest = fminf(smallest, __shfl_xor_sync(0xffffffffu, smallest, offset));
  }
  scale.maximum = ranked_logit(scale.largest);
  scale.temperature = p.temperature;
  const float span = fminf(kFarDistance, (scale.maximum - smallest) / scale.temperature);
  // Logits so close together that the quotient would overflow share bin 0.
  scale.bins_per_distance = span > 1e-30f ? (kFarBin - 1) / span : 0.0f;
  return scale;
}

// The _rn intrinsics keep the compiler from contracting these into something else in one kernel than in another: a
// token must be in the same bin, with the same mass, wherever it is met.
__device__ __forceinline__ float token_distance(const row_scale& scale, float logit) {
  if (logit == scale.maximum) return 0.0f;  // also where +inf - +inf would be NaN
  return __fdiv_rn(__fsub_rn(scale.maximum, logit), scale.temperature);
}

// NaN distances, of NaN logits, are far too.
__device__ __forceinline__ int distance_bin(const row_scale& scale, float distance) {
  if (!(distance < kFarDistance)) return kFarBin;
  return min(static_cast<int>(__fmul_rn(distance, scale.bins_per_distance)), kFarBin - 1);
}

__device__ __forceinline__ float distance_weight(float distance) {
  return expf(-distance);
}
__device__ __forceinline__ uint64_t distance_mass(float distance) {
  return __float2ull_rn(__fmul_rn(distance_weight(distance), 1.0f / kMassUnit));
}

// ceil(top_p * kept), at least 1. top_p is taken in units of 2^-32.
__device__ __forceinline__ uint64_t top_p_target(float top_p, uint64_t kept) {
  const uint64_t fraction = static_cast<uint64_t>(fmaxf(top_p, 0.0f) * 4294967296.0f);
  const uint64_t low = kept * fraction;
  const uint64_t product = __umul64hi(kept, fraction) << 32 | low >> 32;
  const uint64_t target = product + ((low & 0xffffffffu) != 0 ? 1 : 0);
  return target == 0 ? 1 : target;
}

// The least mass above u * kept, where u = uniform * 2^-24.
__device__ __forceinline__ uint64_t draw_target(uint32_t uniform, uint64_t kept) {
  return (__umul64hi(kept, static_cast<uint64_t>(uniform)) << 40 | kept * uniform >> 24) + 1;
}

// How many tokens, and their mass.
struct tally {
  uint64_t mass;
  uint32_t count;
};

// Tallies in shared memory. The mass is in two words with a carry because shared memory adds 32-bit integers natively
// and 64-bit ones by compare-and-swap.
template <int Slots>
struct shared_tallies {
  uint32_t low[Slots];
  uint32_t high[Slots];
  uint32_t count[Slots];

  __device__ __forceinline__ void clear() {
    for (int i = threadIdx.x; i < Slots; i += blockDim.x) low[i] = high[i] = count[i] = 0;
  }
  __device__ __forceinline__ void add(int slot, uint64_t mass) {
    atomicAdd(&count[slot], 1u);
    const uint32_t addend = static_cast<uint32_t>(mass);
    const uint32_t before = atomicAdd(&low[slot], addend);
    const uint32_t carried = static_cast<uint32_t>(mass >> 32) + (before + addend < before ? 1u : 0u);
    if (carried != 0) atomicAdd(&high[slot], carried);
  }
  __device__ __forceinline__ tally get(int slot) const {
    return {static_cast<uint64_t>(high[slot]) << 32 | low[slot], count[slot]};
  }
};

// The sum of the values of the threads before this one, and of all. `scratch` is 32 tallies of shared memory.
template <int Threads>
__device__ __forceinline__ tally block_exclusive_scan(tally value, tally* scratch, tally* total) {
  constexpr int kWarps = Threads / 32;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  tally inclusive = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint64_t mass = __shfl_up_sync(0xffffffffu, inclusive.mass, offset);
    const uint32_t count = __shfl_up_sync(0xffffffffu, inclusive.count, offset);
    if (lane >= offset) inclusive = {inclusive.mass + mass, inclusive.count + count};
  }
  __syncthreads();
  if (lane == 31) scratch[warp] = inclusive;
  __syncthreads();
  tally before = {inclusive.mass - value.mass, inclusive.count - value.count};
  *total = {0, 0};
  for (int w = 0; w < kWarps; ++w) {
    const tally sum = scratch[w];
    if (w < warp) before = {before.mass + sum.mass, before.count + sum.count};
    *total = {total->mass + sum.mass, total->count + sum.count};
  }
  return before;
}

// Bins summed from the first on: entry b is what bins 0 to b hold together.
struct cumulative_bins {
  uint64_t masses[kBins];
  uint32_t counts[kBins];

  template <int Threads>
  __device__ __forceinline__ void load(const sample_row& row, tally* scratch) {
    constexpr int kPerThread = kBins / Threads;
    const int first = threadIdx.x * kPerThread;
    tally own[kPerThread];
    tally sum = {0, 0};
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      own[i] = {row.masses[first + i], row.counts[first + i]};
      sum = {sum.mass + own[i].mass, sum.count + own[i].count};
    }
    tally total;
    tally running = block_exclusive_scan<Threads>(sum, scratch, &total);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      running = {running.mass + own[i].mass, running.count + own[i].count};
      masses[first + i] = running.mass;
      counts[first + i] = running.count;
    }
    __syncthreads();
  }

  __device__ __forceinline__ uint64_t total_mass() const { return masses[kBins - 1]; }
  __device__ __forceinline__ tally before(int bin) const {
    return bin == 0 ? tally{0, 0} : tally{masses[bin - 1], counts[bin - 1]};
  }
};

// The first of kBins ascending sums that reaches `target`; kBins if none does.
template <typename Sum>
__device__ __forceinline__ int first_reaching(const Sum* sums, uint64_t target) {
  int begin = 0;
  int end = kBins;
  while (begin < end) {
    const int middle = (begin + end) / 2;
    if (sums[middle] >= target) {
      end = middle;
    } else {
      begin = middle + 1;
    }
  }
  return begin;
}

}  // namespace nvb
