// sample with top-k up to 1024: the few largest logits of a row, sorted, then top-p and the draw among them.
//
// The row is cut into groups of columns. The k-th largest of the groups' maxima is a bound below which no kept token
// lies, for at least k logits reach it; with many groups, few more than k do. Only groups whose maximum reaches the
// bound are read again.
//
// Shapes: logits [rows, columns] float, tokens i32[rows]; vectors of 8, 4 or 1 elements by alignment.
// Work, two kernels:
//   groups: several blocks a row (row_chunks.cuh), each finds the maxima of its groups, 16 per element of its vectors;
//           and, where probabilities are asked for, its share of their sum.
//   choose: one block a row: the bound, the candidates, their order, top-p, the draw.
// If more than 2048 candidates reach the bound (equal logits, mostly), choose selects the k-th logit of the row
// exactly. Shared memory: 16 KiB of candidates, 8 KiB of a histogram or of group numbers.
#include "../common/programmatic_launch.cuh"
#include "../common/reduce.cuh"
#include "sample_mass.cuh"
#include "sample_row.cuh"
#include "sample_top_k.h"

namespace nvb {
namespace {

constexpr int kGroupThreads = 512;
constexpr int kRun = 32;  // neighbouring columns of a group; its runs are kGroupThreads * Width apart
constexpr int kChooseThreads = 1024;
constexpr int kMaximumTopK = kChooseThreads;  // a thread each in the sums
constexpr int kTopCandidates = 2048;
constexpr int kDigitBits = 11;
constexpr int kDigits = 1 << kDigitBits;
constexpr int kBoundDigits = 2;  // of the bound among the maxima, which need not be exact
constexpr int kCountedCandidates = 256;

template <int Width>
constexpr int kGroups = kGroupThreads * Width / kRun;  // of a block

static_assert(kDigits == 2 * kChooseThreads && kTopCandidates == 2 * kChooseThreads, "a thread takes two of each");

// Only the reported probability is computed from it; the draw goes by the exact masses of the candidates.
struct chunk_mass {
  float sum;  // of the weights, relative to the largest of the chunk
  float largest;
};

// One per row of the call.
struct top_k_row {
  uint32_t maxima[kMaximumChunks * kGroups<8>];  // ordered keys, [chunk][group]
  chunk_mass masses[kMaximumChunks];
};
static_assert(sizeof(top_k_row) % 16 == 0, "rows follow each other at 16-byte alignment");

__device__ __forceinline__ float temperature_distance(float maximum, float logit, float temperature) {
  const row_scale scale = {0, maximum, temperature, 0.0f};
  return token_distance(scale, logit);
}

// NaN, whose distance is NaN, weighs nothing.
__device__ __forceinline__ uint64_t near_mass(float distance) {
  return distance < kFarDistance ? distance_mass(distance) : 0;
}

template <int Width>
__global__ void __launch_bounds__(kGroupThreads)
    sample_groups_kernel(const nvb_sample_params p, const row_chunks chunks) {
  constexpr int kLanes = kRun / Width;  // of a group
  __shared__ uint64_t scratch[kGroupThreads / 32];
  __shared__ float sum_scratch[kGroupThreads / 32];
  const chunk part = this_chunk(p, chunks);
  top_k_row& row = static_cast<top_k_row*>(p.workspace)[part.row];
  const void* logits = row_logits(p, part.row);
  allow_next_grid();

  // This thread's, the group's.
  uint32_t largest = 0;
  visit_columns<Width>(logits, p.logits_dtype, part.begin, part.end,
                       [&](float value, int32_t) { largest = max(largest, ordered_key(value)); });
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  }
  if (threadIdx.x % kLanes == 0) row.maxima[part.number * kGroups<Width> + threadIdx.x / kLanes] = largest;
  if (p.probabilities == nullptr) return;

  // The chunk's largest.
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  uint64_t ranked = warp_max_ranked(static_cast<uint64_t>(largest) << 32);
  if (lane == 0) scratch[warp] = ranked;
  __syncthreads();
  for (int w = 0; w < kGroupThreads / 32; ++w) ranked = max(ranked, scratch[w]);
  const float maximum = ranked_logit(ranked);

  // The sum of its weights.
  const float reciprocal = 1.0f / p.temperature;
  float sum = 0.0f;
  if (maximum > -__builtin_inff()) {
    visit_columns<Width>(logits, p.logits_dtype, part.begin, part.end, [&](float value, int32_t) {
      const float distance = value == maximum ? 0.0f : (maximum - value) * reciprocal;
      if (distance < kFarDistance) sum += expf(-distance);
    });
  }
  sum = block_sum<kGroupThreads>(sum, sum_scratch);
  if (threadIdx.x == 0) row.masses[part.number] = {sum, maximum};
}

struct choose_shared {
  uint64_t candidates[kTopCandidates];
  union {
    uint32_t histogram[kDigits];
    uint16_t groups[kMaximumChunks * kGroups<8> / 2];
  };
  tally scratch[32];
  uint32_t warp_counts[32];
  uint32_t candidate_count;
  uint32_t group_count;
  uint32_t digit;
  uint32_t above;
  int32_t chosen;
};

// A lower bound of the `wanted`-th largest value, exact in the `digits` highest digits of 11 bits; 0 if there are fewer
// values. visit(f) calls f(value) for this thread's share of them.
template <typename Visit>
__device__ __forceinline__ uint64_t select_bound(Visit visit, uint32_t wanted, int digits, choose_shared& shared) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  uint64_t prefix = 0;
  int shift = 64;
  for (int d = 0; d < digits && shift > 0; ++d) {
    const int next = shift > kDigitBits ? shift - kDigitBits : 0;
    shared.histogram[threadIdx.x] = shared.histogram[threadIdx.x + kChooseThreads] = 0;
    if (threadIdx.x == 0) shared.digit = shared.above = 0;
    __syncthreads();
    visit([&](uint64_t value) {
      if (d != 0 && value >> shift != prefix) return;
      atomicAdd(&shared.histogram[(value >> next) & ((1u << (shift - next)) - 1)], 1u);
    });
    __syncthreads();

    // Counts from the highest digit down, two a thread; one of them takes the sum to what is wanted.
    const int high = kDigits - 1 - 2 * static_cast<int>(threadIdx.x);
    const uint32_t first = shared.histogram[high];
    const uint32_t second = shared.histogram[high - 1];
    uint32_t through = first + second;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const uint32_t other = __shfl_up_sync(0xffffffffu, through, offset);
      if (lane >= offset) through += other;
    }
    if (lane == 31) shared.warp_counts[warp] = through;
    __syncthreads();
    uint32_t before = lane < warp ? shared.warp_counts[lane] : 0;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) before += __shfl_xor_sync(0xffffffffu, before, offset);
    through += before;
    const uint32_t front = through - first - second;
    if (front < wanted && through >= wanted) {
      const bool is_first = front + first >= wanted;
      shared.digit = is_first ? high : high - 1;
      shared.above = is_first ? front : front + first;
    }
    __syncthreads();
    prefix = prefix << (shift - next) | shared.digit;
    wanted -= shared.above;
    shift = next;
    __syncthreads();
  }
  return prefix << shift;
}

// Appends; counts on where there is no room.
__device__ __forceinline__ void append(choose_shared& shared, uint64_t ranked) {
  const uint32_t place = atomicAdd(&shared.candidate_count, 1u);
  if (place < kTopCandidates) shared.candidates[place] = ranked;
}

// The candidates in descending order. They are distinct, so the number of larger ones is a candidate's place.
__device__ __forceinline__ void sort_few(choose_shared& shared, uint32_t count) {
  constexpr int kParts = kChooseThreads / kCountedCandidates;  // neighbouring threads share a candidate
  const uint32_t own = threadIdx.x / kParts;
  const uint64_t ranked = own < count ? shared.candidates[own] : 0;
  uint32_t place = 0;
  for (uint32_t i = threadIdx.x % kParts; i < count; i += kParts) place += shared.candidates[i] > ranked ? 1u : 0u;
#pragma unroll
  for (int offset = kParts / 2; offset > 0; offset /= 2) place += __shfl_xor_sync(0xffffffffu, place, offset);
  __syncthreads();
  if (own < count && threadIdx.x % kParts == 0) shared.candidates[place] = ranked;
  __syncthreads();
}

// Sorts the candidates by a bitonic network, for where too many are there to count each one's place.
__device__ __forceinline__ void sort_many(choose_shared& shared, uint32_t count) {
  uint32_t padded = 2 * kCountedCandidates;
  while (padded < count) padded *= 2;
  for (uint32_t i = count + threadIdx.x; i < padded; i += kChooseThreads) shared.candidates[i] = 0;
  __syncthreads();
  for (uint32_t size = 2; size <= padded; size *= 2) {
    for (uint32_t stride = size / 2; stride > 0; stride /= 2) {
      if (threadIdx.x < padded / 2) {
        const uint32_t low = 2 * threadIdx.x - (threadIdx.x & (stride - 1));
        const uint64_t first = shared.candidates[low];
        const uint64_t second = shared.candidates[low + stride];
        if ((first < second) == ((low & size) == 0)) {
          shared.candidates[low] = second;
          shared.candidates[low + stride] = first;
        }
      }
      // 64 neighbouring candidates are one warp's own until the next wider step.
      if (stride > 32 || stride == 1) {
        __syncthreads();
      } else {
        __syncwarp();
      }
    }
  }
}

// The first thread's place whose running mass reaches the target, for threads in order of their tokens. The target is
// at most the mass of all.
__device__ __forceinline__ int32_t first_place(choose_shared& shared, const tally& before, uint64_t mass,
                                               uint64_t target) {
  if (before.mass < target && before.mass + mass >= target) shared.chosen = static_cast<int32_t>(threadIdx.x);
  __syncthreads();
  const int32_t place = shared.chosen;
  __syncthreads();
  return place;
}

template <int Width>
__global__ void __launch_bounds__(kChooseThreads)
    sample_choose_kernel(const nvb_sample_params p, const row_chunks chunks) {
  constexpr int kMaximaPerThread = kMaximumChunks * kGroups<Width> / kChooseThreads;
  constexpr int kBatch = 8;
  __shared__ choose_shared shared;
  const int64_t row_number = blockIdx.x;
  const top_k_row& row = static_cast<const top_k_row*>(p.workspace)[row_number];
  const void* logits = row_logits(p, row_number);
  const int32_t columns = static_cast<int32_t>(p.columns);
  const uint32_t wanted = static_cast<uint32_t>(p.top_k);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) shared.candidate_count = shared.group_count = 0;
  const uint32_t uniform = row_uniform(p, row_number);
  wait_for_previous_grid();

  // The bound.
  const int groups = chunks.count * kGroups<Width>;
  uint32_t maxima[kMaximaPerThread];
#pragma unroll
  for (int i = 0; i < kMaximaPerThread; ++i) {
    const int group = i * kChooseThreads + static_cast<int>(threadIdx.x);
    maxima[i] = group < groups ? row.maxima[group] : 0;
  }
  const auto visit_maxima = [&](auto visit) {
#pragma unroll
    for (int i = 0; i < kMaximaPerThread; ++i) {
      if (maxima[i] != 0) visit(static_cast<uint64_t>(maxima[i]) << 32);
    }
  };
  const uint64_t bound = select_bound(visit_maxima, wanted, kBoundDigits, shared);

  // The groups that reach it.
#pragma unroll
  for (int i = 0; i < kMaximaPerThread; ++i) {
    if (static_cast<uint64_t>(maxima[i]) << 32 >= bound &&
        i * kChooseThreads + static_cast<int>(threadIdx.x) < groups) {
      const uint32_t place = atomicAdd(&shared.group_count, 1u);
      if (place < sizeof(shared.groups) / sizeof(shared.groups[0])) {
        shared.groups[place] = static_cast<uint16_t>(i * kChooseThreads + threadIdx.x);
      }
    }
  }
  __syncthreads();

  // Their tokens that do: a warp a run, kBatch runs under way at once.
  const int runs = (chunks.columns + kGroupThreads * Width - 1) / (kGroupThreads * Width);
  const bool groups_fit = shared.group_count <= sizeof(shared.groups) / sizeof(shared.groups[0]);
  const int items = groups_fit ? static_cast<int>(shared.group_count) * runs : 0;
  for (int item = warp; item < items; item += 32 * kBatch) {
    int32_t column[kBatch];
    float value[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int current = item + b * 32;
      const int group = shared.groups[min(current, items - 1) / runs];
      const int inside = current % runs * (kGroupThreads * Width) + group % kGroups<Width> * kRun + lane;
      column[b] = group / kGroups<Width> * chunks.columns + inside;
      if (current >= items || inside >= chunks.columns || column[b] >= columns) column[b] = -1;
      value[b] = column[b] >= 0 ? load_element(logits, p.logits_dtype, column[b]) : 0.0f;
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const uint64_t ranked = rank_logit(value[b], column[b]);
      if (column[b] >= 0 && ranked >= bound) append(shared, ranked);
    }
  }
  __syncthreads();

  // Too many: the top_k-th largest exactly, then what reaches that.
  if (shared.candidate_count > kTopCandidates || !groups_fit) {
    const auto visit_row = [&](auto visit) {
      visit_columns<Width>(logits, p.logits_dtype, 0, columns,
                           [&](float value, int32_t column) { visit(rank_logit(value, column)); });
    };
    __syncthreads();
    const uint64_t exact = select_bound(visit_row, wanted, 64, shared);
    if (threadIdx.x == 0) shared.candidate_count = 0;
    __syncthreads();
    visit_row([&](uint64_t ranked) {
      if (ranked >= exact) append(shared, ranked);
    });
    __syncthreads();
  }
  const uint32_t count = min(shared.candidate_count, static_cast<uint32_t>(kTopCandidates));
  if (count <= kCountedCandidates) {
    sort_few(shared, count);
  } else {
    sort_many(shared, count);
  }

  // Nothing to draw from.
  const float maximum = ranked_logit(shared.candidates[0]);
  if (!(maximum > -__builtin_inff())) {
    if (threadIdx.x == 0) store_token(p, row_number, shared.candidates[0], 0.0f);
    return;
  }

  // The kept tokens, a thread each, and their running mass.
  const bool is_kept = threadIdx.x < min(count, wanted);
  const uint64_t ranked = is_kept ? shared.candidates[threadIdx.x] : 0;
  const float distance = temperature_distance(maximum, ranked_logit(ranked), p.temperature);
  const uint64_t mass = is_kept ? near_mass(distance) : 0;
  if (threadIdx.x == 0) shared.chosen = 0;
  tally total;
  const tally before = block_exclusive_scan<kChooseThreads>({mass, 0}, shared.scratch, &total);

  // Top-p, then the draw.
  uint64_t kept = total.mass;
  if (p.top_p < 1.0f) {
    const int32_t last = first_place(shared, before, mass, top_p_target(p.top_p, kept));
    if (static_cast<int32_t>(threadIdx.x) == last) shared.scratch[0].mass = before.mass + mass;
    __syncthreads();
    kept = shared.scratch[0].mass;
  }
  const int32_t chosen = first_place(shared, before, mass, draw_target(uniform, kept));
  if (warp != 0) return;

  // The probability, from the chunks' sums brought to the row's largest logit; a fixed order.
  float probability = 0.0f;
  if (p.probabilities != nullptr) {
    double sum = 0.0;
    for (int c = lane; c < chunks.count; c += 32) {
      const chunk_mass part = row.masses[c];
      if (part.sum == 0.0f) continue;
      const float chunk_distance = temperature_distance(maximum, part.largest, p.temperature);
      sum += static_cast<double>(part.sum) * distance_weight(chunk_distance);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    const float logit = ranked_logit(shared.candidates[chosen]);
    const float weight = distance_weight(temperature_distance(maximum, logit, p.temperature));
    probability = weight / static_cast<float>(sum);
  }
  if (lane == 0) store_token(p, row_number, shared.candidates[chosen], probability);
}

template <int Width>
cudaError_t enqueue(const nvb_sample_params& p, const nvb_launch* launch) {
  const row_chunks chunks = sample_chunks(p, launch);
  const int64_t blocks = p.rows * chunks.count;
  if (blocks > 0x7fffffff) return cudaErrorInvalidValue;
  sample_groups_kernel<Width><<<static_cast<unsigned>(blocks), kGroupThreads, 0, launch->stream>>>(p, chunks);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  return launch_overlapped(sample_choose_kernel<Width>, dim3(static_cast<unsigned>(p.rows)), dim3(kChooseThreads), 0,
                           launch, p, chunks);
}

}  // namespace

// Half of the groups at most may be needed: beyond, ever more logits reach the bound.
bool supports_top_k(const nvb_sample_params& p, int width, const nvb_launch* launch) {
  const row_chunks chunks = sample_chunks(p, launch);
  const int64_t groups = static_cast<int64_t>(chunks.count) * (kGroupThreads * width / kRun);
  return p.temperature > 0.0f && p.top_k > 0 && p.top_k <= kMaximumTopK && p.top_k < p.columns && 2 * p.top_k <= groups;
}

size_t top_k_workspace() {
  return sizeof(top_k_row);
}

cudaError_t enqueue_top_k(const nvb_sample_params& p, int width, const nvb_launch* launch) {
  switch (width) {
    case 8:
      return enqueue<8>(p, launch);
    case 4:
      return enqueue<4>(p, launch);
    default:
      return enqueue<1>(p, launch);
  }
}

}  // namespace nvb
