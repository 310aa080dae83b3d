// Lengths of a prefill that lie in device memory: sequences and tiles of query rows as a kernel finds them when it
// runs.
//
// A sequence that passes a bound of the call touches no memory: without rows where its starts are wrong, without keys
// where its keys are.
#pragma once

#include <limits.h>

#include "attention.h"

namespace nvb {

// The rows of a sequence, from its start on.
struct RowRange {
  int start;
  int count;
};
__device__ __forceinline__ RowRange device_rows(const nvb_attention_prefill_params& p, int number) {
  if (p.query_starts == nullptr) return {number, p.max_query_count};
  const int start = p.query_starts[number], end = p.query_starts[number + 1];
  if (start < 0 || end < start || end > p.query_rows) return {0, 0};
  return {start, min(end - start, p.max_query_count)};
}

// Where keys begin, and how many there are; none is at start 0.
__device__ __forceinline__ RowRange device_keys(const nvb_attention_prefill_params& p, int number) {
  if (p.kv_starts != nullptr) {
    const int start = p.kv_starts[number], end = p.kv_starts[number + 1];
    const bool is_valid = start >= 0 && end >= start && end <= p.kv_rows && end - start <= p.max_kv_length;
    return is_valid ? RowRange{start, end - start} : RowRange{0, 0};
  }
  const int place = p.kv_sequences != nullptr ? p.kv_sequences[number] : number;
  const int length = p.kv_lengths[number];
  const bool is_valid = place >= 0 && place < p.kv_rows && length >= 0 && length <= p.max_kv_length;
  return is_valid ? RowRange{place, length} : RowRange{0, 0};
}

// The sequence of this number, as the table or device memory has it.
__device__ __forceinline__ nvb_attention_sequence prefill_sequence(const nvb_attention_prefill_params& p, int number) {
  if (!has_device_lengths(p)) return p.sequence[number];
  const RowRange rows = device_rows(p, number), keys = device_keys(p, number);
  return {rows.start, rows.count, keys.start, keys.count, 0, 0};
}

// Finds the sequence that has the tile of this number, of all tiles of `rows_per_tile` query rows of the sequences in
// their order: its number and the tile's first row, the last tile of a sequence first. -1: past the last. Called by
// whole warps, whose lanes read a sequence each.
struct DeviceTile {
  int sequence;
  int first_row;
};
__device__ __forceinline__ DeviceTile find_device_tile(const nvb_attention_prefill_params& p, int tile,
                                                       int rows_per_tile) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int first = 0; first < p.sequences; first += 32) {
    const int number = first + lane;
    const int tiles = number < p.sequences ? (device_rows(p, number).count + rows_per_tile - 1) / rows_per_tile : 0;
    int end = tiles;  // of this lane's and those before it
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int before = __shfl_up_sync(0xffffffffu, end, offset);
      if (lane >= offset) end += before;
    }
    const unsigned behind = __ballot_sync(0xffffffffu, end > tile);
    if (behind != 0) {
      const int found = __ffs(static_cast<int>(behind)) - 1;
      const int last = __shfl_sync(0xffffffffu, end, found) - 1;
      return {first + found, (last - tile) * rows_per_tile};
    }
    tile -= __shfl_sync(0xffffffffu, end, 31);
  }
  return {-1, 0};
}

}  // namespace nvb
