// What the copying warp of attention_decode_ring.cuh does, and where it and the others meet in shared memory.
//
// It finds the block's part and brings, for one segment after the other, what is to be done and the queries, and then
// its tiles through the ring. A tile comes as 16 bulk copies, a lane each: one copy takes some 33 ns of a
// multiprocessor's time whatever its size up to 2 KiB, so a run has that many bytes, and one warp asks for 60 GB/s.
#pragma once

#include "../../common/bulk_copy.cuh"
#include "../../common/wgmma.cuh"
#include "attention_decode_ring_work.cuh"

namespace nvb::decode_ring {

struct Options {
  int stages;
  int prefetch;      // tiles that are asked for before the grid before has ended
  int late_trigger;  // whether the next grid may come when the last copy is under way (1), or at once (0)
};

inline constexpr int kMaxStages = 32;
inline constexpr int kQueryStages = 2;

// What is copied where a token is not to be read; a row of 256 columns of 16 bits.
__device__ const uint4 kZeroRow[32] = {};

// Shared memory, in this order.
template <typename Tile>
struct Layout {
  int segments, keys, barriers, fragments, scales, raw, merge, states, total;
  __host__ __device__ static Layout of(int stages, int items, int query_bytes) {
    Layout layout;
    layout.segments = stages * Tile::kStageBytes;  // the ring comes first
    layout.keys = layout.segments + kQueryStages * static_cast<int>(sizeof(Segment));
    layout.barriers = layout.keys + kQueryStages * Tile::kItems * static_cast<int>(sizeof(DecodeKeys));
    layout.fragments = layout.barriers + (2 * kMaxStages + 2 * kQueryStages) * 8;
    layout.scales = layout.fragments + Tile::kHeadTiles * Tile::kSteps * 32 * 16;
    layout.raw = layout.scales + Tile::kItems * 4;
    layout.merge = layout.raw + kQueryStages * items * Tile::kHeadDim * query_bytes;
    layout.states = layout.merge + Tile::kWarps * items * Tile::kOutputPitch * 4;
    layout.total = layout.states + Tile::kWarps * Tile::kItems * 8;
    return layout;
  }
};

// The same as pointers.
template <typename Tile>
struct Shared {
  unsigned char* ring;
  Segment* segments;  // [kQueryStages]
  DecodeKeys* keys;   // [kQueryStages][kItems], what each item sees
  uint64_t* full;     // [kMaxStages]
  uint64_t* empty;
  uint64_t* query_full;  // [kQueryStages]
  uint64_t* query_empty;
  unsigned char* raw;  // [kQueryStages][items][kHeadDim], queries as they are

  __device__ __forceinline__ Shared(unsigned char* shared, const Layout<Tile>& layout)
      : ring(shared),
        segments(reinterpret_cast<Segment*>(shared + layout.segments)),
        keys(reinterpret_cast<DecodeKeys*>(shared + layout.keys)),
        full(reinterpret_cast<uint64_t*>(shared + layout.barriers)),
        empty(full + kMaxStages),
        query_full(empty + kMaxStages),
        query_empty(query_full + kQueryStages),
        raw(shared + layout.raw) {}
};

// By the lanes of one warp.
template <typename Tile>
__device__ __forceinline__ void copy_part(const nvb_attention_decode_params& p, const Options& options,
                                          const Shared<Tile>& shared, int lane) {
  using Element = typename Tile::Element;
  const int query_bytes = p.query_dtype == NVB_F32 ? 4 : 2;
  const uint32_t stages = options.stages;
  // Lane 8 * tensor + run copies the tokens of that run: the addresses of a tile are found side by side.
  const int run = lane % 8;
  const bool values = lane / 8 % 2 == 1;
  const bool paged = p.placement.pages != nullptr;
  const auto run_begin = [&](const Segment& s, int tile) {
    return max(s.begin, tile * Tile::kKeys + run * Tile::kRun);
  };
  const auto run_end = [&](const Segment& s, int tile) {
    return min(s.end, tile * Tile::kKeys + (run + 1) * Tile::kRun);
  };
  if (options.prefetch > 0) {
    // A hint: what the memory holds now may not be what it holds when the grid before has ended.
    Part<Tile> part;
    part.find(p, lane);
    part.for_each(p, lane, [&](const Segment& segment, int slot) {
      const Tokens<Element> tokens(p, values, slot, segment.kv_head);
      for (uint32_t ring = segment.ring_first; ring < segment.ring_end; ++ring) {
        if (ring >= static_cast<uint32_t>(options.prefetch)) return false;
        const int tile = segment.first_tile + static_cast<int>(ring - segment.ring_first);
        const int first = run_begin(segment, tile), count = run_end(segment, tile) - first;
        if (lane < 16 && count > 0) {
          tokens.for_each_piece(p.placement, first, count, paged ? tokens.page_of(p.placement, first) : 0,
                                [&](const Element* from, int, int piece) {
                                  if (from != nullptr) bulk_prefetch_l2(from, piece * Tile::kRowBytes);
                                });
        }
        __syncwarp();
      }
      return true;
    });
  }
  wait_for_previous_grid();
  order_bulk_copies();
  Part<Tile> part;
  part.find(p, lane);
  const uint32_t query_row = Tile::kHeadDim * query_bytes;
  uint32_t stage = 0, parity = 1, query_stage = 0, query_parity = 1;
  part.for_each(p, lane, [&](const Segment& segment, int slot) {
    const Tokens<Element> tokens(p, values, slot, segment.kv_head);
    const auto find_page = [&](uint32_t ring) {
      const int tile = segment.first_tile + static_cast<int>(ring - segment.ring_first);
      const int first = run_begin(segment, tile);
      return paged && first < run_end(segment, tile) ? tokens.page_of(p.placement, first) : 0;
    };
    int32_t page = find_page(segment.ring_first);
    // The queries, and what is to be done with them.
    barrier_wait(shared.query_empty + query_stage, query_parity);
    const DecodeItem item = item_of(p, segment.block(), lane);
    if (lane < segment.heads) {
      const DecodeKeys own = p.rows_per_sequence == 1 ? DecodeKeys{segment.begin, segment.end}
                                                      : keys_at(p, __ldcg(p.positions + item.row));
      // Those of no slot see nothing.
      shared.keys[query_stage * Tile::kItems + lane] = {own.begin, min(own.end, segment.end)};
    }
    __syncwarp();
    if (lane == 0) {
      shared.segments[query_stage] = segment;
      barrier_expect(shared.query_full + query_stage, segment.heads * query_row);
    }
    __syncwarp();
    if (lane == 0) {
      for (int i = 0; i < segment.heads; ++i) {
        const DecodeItem from = item_of(p, segment.block(), i);
        bulk_copy(shared.raw + (query_stage * p.heads_per_chunk + i) * query_row,
                  static_cast<const char*>(p.query) +
                      (from.row * p.query_token_stride + from.head * p.query_head_stride) * query_bytes,
                  query_row, shared.query_full + query_stage);
      }
    }
    __syncwarp();
    query_stage ^= 1;
    query_parity ^= query_stage == 0 ? 1 : 0;

    for (uint32_t ring = segment.ring_first; ring < segment.ring_end; ++ring) {
      // The table is read a tile ahead, so that no copy waits for it.
      const int32_t own_page = page;
      if (ring + 1 < segment.ring_end) page = find_page(ring + 1);
      const int tile = segment.first_tile + static_cast<int>(ring - segment.ring_first);
      const int start = tile * Tile::kKeys + run * Tile::kRun;
      const int first = run_begin(segment, tile), end = max(first, run_end(segment, tile));
      unsigned char* const to =
          shared.ring + stage * Tile::kStageBytes + (values ? Tile::kTensorBytes : 0) + run * Tile::kPitch;
      barrier_wait(shared.empty + stage, parity);
      if (lane == 0) barrier_expect(shared.full + stage, Tile::kCopiedBytes);
      __syncwarp();
      if (lane < 16) {
        const auto clear = [&](int from, int until) {
          for (int token = max(from, start); token < min(until, start + Tile::kRun); ++token) {
            bulk_copy(to + (token - start) * Tile::kRowBytes, kZeroRow, Tile::kRowBytes, shared.full + stage);
          }
        };
        // Tokens that no item sees are zeros and are not read: stale rows of the cache may hold NaN.
        clear(start, first);
        clear(end, start + Tile::kRun);
        tokens.for_each_piece(
            p.placement, first, end - first, own_page, [&](const Element* from, int token, int piece) {
              if (from != nullptr) {
                bulk_copy(to + (token - start) * Tile::kRowBytes, from, piece * Tile::kRowBytes, shared.full + stage);
              } else {
                clear(token, token + piece);
              }
            });
      }
      __syncwarp();
      stage = stage + 1 == stages ? 0 : stage + 1;
      parity ^= stage == 0 ? 1 : 0;
    }
    return true;
  });
  if (options.late_trigger) allow_next_grid();
  if (part.begin == part.end && lane == 0) {
    shared.segments[0].heads = 0;
    barrier_expect(shared.query_full, 0);
  }
}

}  // namespace nvb::decode_ring
