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
  int extra;          // what a row costs beside its tiles, in tiles
  uint32_t constant;  // nvb_constant_reads
  bool once;          // what is read leaves L2 first
};

inline constexpr int kMaxStages = 32;
inline constexpr int kQueryStages = 2;

// What is copied where tokens are not to be read: a run at a time, because a copy a token, of up to 126 in a last tile,
// took the copying warp 4 us, four times what a whole tile takes.
inline constexpr int kZeroBytes = 4096;
__device__ const uint4 kZeros[kZeroBytes / 16] = {};

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
    layout.scales = layout.fragments + items * Tile::kSteps * 4 * 16;
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

// By the lanes of warp `copier` of those that copy.
template <typename Tile>
__device__ __forceinline__ void copy_part(const nvb_attention_decode_params& p, const Options& options,
                                          const Shared<Tile>& shared, uint32_t copier, int lane) {
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
  bool waits = true;
  const auto wait_once = [&] {
    if (!waits) return;
    waits = false;
    wait_for_previous_grid();
    order_bulk_copies();
  };
  const bool constant_positions = (options.constant & NVB_CONSTANT_POSITIONS) != 0;
  bool guesses = !constant_positions && Places::suffice(p);
  if (constant_positions) {
    allow_next_grid();
  } else if (!guesses) {
    wait_once();
  }
  Part<Tile> part;
  const uint32_t query_row = Tile::kHeadDim * query_bytes;
  uint32_t stage = 0, parity = 1, query_stage = 0, query_parity = 1;
  bool found = false;
  const auto copy_segment = [&](const Segment& segment, int slot, int old_end) {
    if (waits && !constant_positions) {
      // All this is guessed from positions that the grids before may have written since.
      wait_once();
      Places now;
      now.load(p, lane);
      if (__any_sync(0xffffffffu, !(now == part.places))) return false;
    }
    found = true;
    const Tokens<Element> tokens(p, values, slot, segment.kv_head);
    const auto find_page = [&](uint32_t ring) {
      const int tile = segment.first_tile + static_cast<int>(ring - segment.ring_first);
      const int first = run_begin(segment, tile);
      return paged && first < run_end(segment, tile) ? tokens.page_of(p.placement, first) : 0;
    };
    const uint32_t first_own =
        segment.ring_first + (copier + Tile::kCopiers - segment.ring_first % Tile::kCopiers) % Tile::kCopiers;
    int32_t page = first_own < segment.ring_end ? find_page(first_own) : 0;
    const auto copy_queries = [&] {
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
    };

    const auto copy_tile = [&](uint32_t ring) {
      // The table is read a tile ahead, so that no copy waits for it.
      if (ring % Tile::kCopiers == copier) {
        const int32_t own_page = page;
        if (ring + Tile::kCopiers < segment.ring_end) page = find_page(ring + Tile::kCopiers);
        const int tile = segment.first_tile + static_cast<int>(ring - segment.ring_first);
        const int start = tile * Tile::kKeys + run * Tile::kRun;
        const int first = run_begin(segment, tile), end = max(first, run_end(segment, tile));
        unsigned char* const to =
            shared.ring + stage * Tile::kStageBytes + (values ? Tile::kTensorBytes : 0) + run * Tile::kPitch;
        barrier_wait(shared.empty + stage, parity);
        if (lane == 0) barrier_expect(shared.full + stage, Tile::kCopiedBytes);
        __syncwarp();
        if (lane < 16) {
          static_assert(Tile::kRun * Tile::kRowBytes <= kZeroBytes);
          const auto clear = [&](int from, int until) {
            from = max(from, start), until = min(until, start + Tile::kRun);
            if (from >= until) return;
            bulk_copy(to + (from - start) * Tile::kRowBytes, kZeros, (until - from) * Tile::kRowBytes,
                      shared.full + stage);
          };
          // Tokens that no item sees are zeros and are not read: stale rows of the cache may hold NaN.
          clear(start, first);
          clear(end, start + Tile::kRun);
          tokens.for_each_piece(p.placement, first, end - first, own_page,
                                [&](const Element* from, int token, int piece) {
                                  unsigned char* const place = to + (token - start) * Tile::kRowBytes;
                                  if (from != nullptr && options.once) {
                                    bulk_copy_once(place, from, piece * Tile::kRowBytes, shared.full + stage);
                                  } else if (from != nullptr) {
                                    bulk_copy(place, from, piece * Tile::kRowBytes, shared.full + stage);
                                  } else {
                                    clear(token, token + piece);
                                  }
                                });
        }
        __syncwarp();
      }
      stage = stage + 1 == stages ? 0 : stage + 1;
      parity ^= stage == 0 ? 1 : 0;
    };

    // Tiles that nothing writes come before the grids before have ended, as many as the ring holds; then the queries,
    // and what is to be done with them.
    uint32_t ring = segment.ring_first, until = ring;
    if (waits && (options.constant & (NVB_CONSTANT_KEYS | NVB_CONSTANT_OLDER_KEYS)) != 0) {
      const int tiles = (options.constant & NVB_CONSTANT_KEYS) != 0
                            ? static_cast<int>(segment.ring_end - ring)
                            : max(0, old_end / Tile::kKeys - segment.first_tile);
      until = min(segment.ring_end, ring + min(static_cast<uint32_t>(tiles), stages));
    }
    for (bool asked = false;;) {
      for (; ring < until; ++ring) copy_tile(ring);
      if (asked) break;
      asked = true;
      until = segment.ring_end;
      wait_once();
      if (copier == 0) copy_queries();
    }
    return true;
  };
  // The part and its first segment are found while the grids before still run; in the rare case that those wrote other
  // positions, or made a block without a part need one, again.
  for (;;) {
    part.find(p, options.extra, lane);
    part.for_each(p, lane, copy_segment);
    if (found || !guesses) break;
    guesses = false;
    wait_once();
  }
  allow_next_grid();
  if (!found && lane == 0 && copier == 0) {
    shared.segments[0].heads = 0;
    barrier_expect(shared.query_full, 0);
  }
}

}  // namespace nvb::decode_ring
