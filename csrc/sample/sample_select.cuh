// Where top-k, top-p and the draw fall in a row's descending order: first the bin, then the token in it.
//
// All three are one question, "which token is the first at which the running count, or mass, reaches a target?":
//   top-k: count >= top_k;  top-p: mass >= top_p * (mass kept by top-k);  draw: mass > u * (mass kept by top-p).
// What is kept is always a prefix of the order, so its mass alone describes it.
#pragma once

#include "sample_mass.cuh"

namespace nvb {

inline constexpr int kSelectThreads = 1024;
inline constexpr int kSlots = 1024;
inline constexpr int kSlotBits = 10;
static_assert(kSlots == kSelectThreads && kSlots == 1 << kSlotBits, "a thread scans one slot");

// The bin of the last token that top-k keeps; kFarBin if top-k cuts off no mass.
__device__ __forceinline__ int top_k_bin(const nvb_sample_params& p, const cumulative_bins& bins) {
  if (p.top_k <= 0 || p.top_k >= p.columns) return kFarBin;
  const int bin = first_reaching(bins.counts, p.top_k);
  return bin < kFarBin && bins.before(bin).mass < bins.total_mass() ? bin : kFarBin;
}

// The bins in which the tokens of the three questions may lie. Until the token of top-k is known, the kept mass is
// known to within its bin, and with it the next targets; all grow with it, so the bins of its bounds enclose the true
// ones.
struct bin_selection {
  int top_k;
  int top_p_first;
  int top_p_last;  // below the first: no top-p
  int draw_first;
  int draw_last;

  __device__ __forceinline__ bool contains(int bin) const {
    return bin != kFarBin &&
           (bin == top_k || (bin >= top_p_first && bin <= top_p_last) || (bin >= draw_first && bin <= draw_last));
  }
  // Tokens in the selected bins, those in two ranges counted twice.
  __device__ __forceinline__ uint32_t count(const cumulative_bins& bins) const {
    uint32_t sum = bins.counts[draw_last] - bins.before(draw_first).count;
    if (top_p_first <= top_p_last) sum += bins.counts[top_p_last] - bins.before(top_p_first).count;
    if (top_k != kFarBin) sum += bins.counts[top_k] - bins.before(top_k).count;
    return sum;
  }
};

__device__ __forceinline__ bin_selection select_bins(const nvb_sample_params& p, const cumulative_bins& bins,
                                                     uint32_t uniform) {
  bin_selection selection;
  uint64_t least = bins.total_mass();
  uint64_t most = least;
  selection.top_k = top_k_bin(p, bins);
  if (selection.top_k != kFarBin) {
    least = bins.before(selection.top_k).mass;
    most = bins.masses[selection.top_k];
  }
  selection.top_p_first = 1;
  selection.top_p_last = 0;
  if (p.top_p < 1.0f) {
    least = top_p_target(p.top_p, least);
    selection.top_p_first = first_reaching(bins.masses, least);
    selection.top_p_last = first_reaching(bins.masses, top_p_target(p.top_p, most));
    most = min(most, bins.masses[selection.top_p_last]);
  }
  selection.draw_first = first_reaching(bins.masses, draw_target(uniform, least));
  selection.draw_last = first_reaching(bins.masses, draw_target(uniform, most));
  return selection;
}

// The tokens that a question looks through: the gathered candidates, or the whole row if they did not fit.
struct token_source {
  const uint64_t* candidates;
  uint32_t candidate_count;
  const void* logits;
  uint32_t dtype;
  int32_t columns;

  // Calls visit(ranked logit) for this thread's share.
  template <typename Visit>
  __device__ __forceinline__ void visit(Visit visit) const {
    if (candidate_count != 0) {
      for (uint32_t i = threadIdx.x; i < candidate_count; i += kSelectThreads) visit(candidates[i]);
    } else {
      visit_columns<1, 8>(logits, dtype, 0, columns,
                          [&](float value, int32_t column) { visit(rank_logit(value, column)); });
    }
  }
};

enum class measure { count, mass };

__device__ __forceinline__ uint64_t measured(measure by, const tally& value) {
  return by == measure::count ? value.count : value.mass;
}

// The narrowing range of ranked logits [low, high] that holds the token, and what lies in front of it.
struct token_range {
  uint64_t low;
  uint64_t high;
  tally before;
  tally inside;
};

struct select_shared {
  shared_tallies<kSlots> slots;
  tally scratch[32];
  uint64_t lowest[32];
  uint64_t highest[32];
  token_range range;
  uint64_t token;
};

struct token_position {
  uint64_t ranked;
  uint64_t mass;  // of this token and all before it
};

// The token of `bin` at which the running measure reaches `target`, found by histograms over ever narrower ranges of
// ranked logits. Ranked logits are distinct, so equal values part by index, and the range ends at one token. Bins are
// narrow, so one or two histograms are the rule; all tokens equal is the worst case. A caller that overwrites the
// logits meanwhile gets an arbitrary token, never an endless loop: a range without the target ends the search.
__device__ __noinline__ token_position find_token(const token_source& source, const row_scale& scale, int bin,
                                                  tally before, measure by, uint64_t target, select_shared& shared) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;

  // The range of the bin's tokens, exactly: largest, and largest complement.
  uint64_t highest = 0;
  uint64_t complement = 0;
  source.visit([&](uint64_t ranked) {
    if (distance_bin(scale, token_distance(scale, ranked_logit(ranked))) != bin) return;
    highest = ranked > highest ? ranked : highest;
    complement = ~ranked > complement ? ~ranked : complement;
  });
  highest = warp_max_ranked(highest);
  complement = warp_max_ranked(complement);
  __syncthreads();
  if (lane == 0) {
    shared.highest[warp] = highest;
    shared.lowest[warp] = complement;
  }
  __syncthreads();
  token_range range;
  range.high = warp_max_ranked(shared.highest[lane]);
  range.low = ~warp_max_ranked(shared.lowest[lane]);
  range.before = before;
  if (threadIdx.x == 0) shared.token = scale.largest;

  do {
    // Tally the range in kSlots even parts.
    const int bits = 64 - __clzll(static_cast<long long>(range.high - range.low));
    const int shift = bits > kSlotBits ? bits - kSlotBits : 0;
    shared.slots.clear();
    __syncthreads();
    if (threadIdx.x == 0) shared.range.inside = {0, 0};
    source.visit([&](uint64_t ranked) {
      if (ranked < range.low || ranked > range.high) return;
      const float distance = token_distance(scale, ranked_logit(ranked));
      shared.slots.add(static_cast<int>((ranked - range.low) >> shift), distance_mass(distance));
    });
    __syncthreads();

    // Add up from the highest slot; one slot takes the sum to the target and is the next range.
    const int slot = kSlots - 1 - static_cast<int>(threadIdx.x);
    const tally inside = shared.slots.get(slot);
    tally total;
    const tally above = block_exclusive_scan<kSelectThreads>(inside, shared.scratch, &total);
    const tally front = {range.before.mass + above.mass, range.before.count + above.count};
    const tally through = {front.mass + inside.mass, front.count + inside.count};
    if (measured(by, front) < target && measured(by, through) >= target) {
      const uint64_t low = range.low + (static_cast<uint64_t>(slot) << shift);
      const uint64_t high = low + ((uint64_t{1} << shift) - 1);
      shared.range = {low, min(high, range.high), front, inside};  // above range.high may be tokens of the bin before
    }
    __syncthreads();
    range = shared.range;
  } while (range.inside.count > 1);

  // The one token left.
  source.visit([&](uint64_t ranked) {
    if (ranked >= range.low && ranked <= range.high) shared.token = ranked;
  });
  __syncthreads();
  return {shared.token, range.before.mass + range.inside.mass};
}

}  // namespace nvb
