// How attention_decode_ring.cuh divides its work: tiles of keys, the parts of sequences that a block reads, and where
// the tokens of a part lie.
//
// The tiles of all sequences, KV heads and chunks of items, in that order, are one list of which every block takes as
// much as any other. So sequences of any lengths keep all blocks equally busy. A row (a sequence, KV head and chunk) is
// read by consecutive blocks, and a block has at most two rows that others read too: its first and its last. Positions
// lie in device memory, so each block finds its part by itself, from the same numbers.
#pragma once

#include "../attention_decode.cuh"

namespace nvb::decode_ring {

// HeadTiles: of 8 items. A stage of the ring holds the keys and values of kKeys tokens, and one of Teams teams of
// TeamWarps warps consumes it, 16 keys a warp.
template <typename Stored, int HeadDim, int HeadTiles, int TeamWarps, int Teams, int Copiers = 1>
struct Tile {
  using Element = Stored;
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kHeadTiles = HeadTiles;
  static constexpr int kItems = 8 * HeadTiles;
  static constexpr int kTeamWarps = TeamWarps;
  static constexpr int kTeams = Teams;
  static constexpr int kWarps = TeamWarps * Teams;  // that multiply
  static constexpr int kCopiers = Copiers;          // warps that copy, every Copiers-th tile each
  static constexpr int kThreads = 32 * (kWarps + kCopiers);
  static constexpr int kKeys = 16 * TeamWarps;
  static constexpr int kRun = kKeys / 8;  // tokens of one copy
  static constexpr int kRowBytes = HeadDim * static_cast<int>(sizeof(Element));
  // Eight rows that one matrix instruction reads come from eight copies, which lie 16 bytes off multiples of 128.
  static constexpr int kPitch = kRun * kRowBytes + 16;
  static constexpr int kTensorBytes = 8 * kPitch;
  static constexpr int kStageBytes = 2 * kTensorBytes;
  static constexpr int kCopiedBytes = 2 * kKeys * kRowBytes;
  static constexpr int kSteps = HeadDim / 16;
  static constexpr int kOutputPitch = HeadDim + 4;  // floats; spreads the items of a fragment over the banks
  // One copying warp follows the teams in turn. Several would not: one could pass a team that lags by a whole ring,
  // whose barrier then has the parity that it waits for. An H200 stopped with a launch failure.
  static_assert(Copiers == 1 || Teams == 1, "a copying warp would pass a team");
  static_assert(kRun * kRowBytes % 128 == 0, "rows of eight copies would share banks");
};

// A part of a row that a block reads.
struct Segment {
  int32_t sequence;
  int32_t kv_head;
  int32_t first;        // item of the KV head
  int32_t heads;        // items; 0: the block has no part
  int32_t first_tile;   // of the sequence
  uint32_t ring_first;  // the place of first_tile among all tiles of the block
  uint32_t ring_end;
  int32_t slot;   // of its partial result; -1: the whole row
  int32_t begin;  // tokens begin .. end are seen by some item
  int32_t end;
  int32_t all_begin;  // all_begin .. all_end by every item
  int32_t all_end;
  int32_t counter;      // of the row
  int32_t first_block;  // of those that read the row
  int32_t blocks;
  int32_t last;  // whether it is the block's last

  __device__ __forceinline__ DecodeBlock block() const {
    return {sequence, kv_head, first, heads, 0, blocks, 0, begin, end};
  }
};

// What the items of a sequence see together, as tiles; at least one, so that a row without a key is written too.
struct Visible {
  int slot, begin, end, all_begin, all_end, first_tile, tiles;
  int old_end;  // the tokens before it are older than every row of the sequence
};
// `position_of(row)` is that of a row of the sequence.
template <typename Tile, typename PositionOf>
__device__ __forceinline__ Visible find_visible(const nvb_attention_decode_params& p, int sequence, int slot,
                                                const PositionOf& position_of) {
  Visible v{};
  if (sequence >= p.sequences) return v;
  v.slot = slot;
  v.begin = v.all_end = v.old_end = kMaxLength;
  for (int row = 0; row < p.rows_per_sequence; ++row) {
    const DecodeKeys keys = keys_at(p, position_of(row));
    if (keys.end > 0) v.begin = min(v.begin, keys.begin), v.old_end = min(v.old_end, keys.end - 1);
    v.end = max(v.end, keys.end);
    v.all_begin = max(v.all_begin, keys.begin), v.all_end = min(v.all_end, keys.end);
  }
  if (v.slot < 0 || v.slot >= p.slot_count) v.end = v.all_end = 0;
  v.begin = min(v.begin, v.end);
  v.first_tile = v.begin / Tile::kKeys;
  v.tiles = max(1, (v.end + Tile::kKeys - 1) / Tile::kKeys - v.first_tile);
  return v;
}

// Where lane i finds sequences i, i + 32, ...: all loaded at once, because the latencies of one load after the other
// would keep the first copies of 128 sequences waiting for 4 us. Loads go past L1, whose lines may be older than what
// the grid before wrote.
struct Places {
  static constexpr int kGroups = 4;
  int positions[kGroups], slots[kGroups];

  __device__ __forceinline__ static bool suffice(const nvb_attention_decode_params& p) {
    return p.rows_per_sequence == 1 && p.sequences <= 32 * kGroups;
  }
  __device__ __forceinline__ void load(const nvb_attention_decode_params& p, int lane) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int sequence = i * 32 + lane;
      const bool inside = sequence < p.sequences;
      positions[i] = inside ? __ldcg(p.positions + sequence) : -1;
      slots[i] = inside && p.slots != nullptr ? __ldcg(p.slots + sequence) : sequence;
    }
  }
  __device__ __forceinline__ bool operator==(const Places& other) const {
    bool same = true;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) same &= positions[i] == other.positions[i] && slots[i] == other.slots[i];
    return same;
  }
};

// The part of this block. The lanes of a warp know a sequence each.
template <typename Tile>
struct Part {
  int begin, end;  // in the list of places
  int blocks;      // that have a part
  int each;        // places of a block; the first `longer` blocks have one more
  int longer;
  int extra;     // places behind the tiles of each row, which stand for what a row costs beside its tiles
  int sequence;  // of the first tile
  int before;    // places of the sequences before it
  int base;      // the sequence of lane 0, a multiple of 32
  Visible visible;
  bool known;  // `places` are those of all sequences
  Places places;

  __device__ __forceinline__ int first_of(int block) const { return block * each + min(block, longer); }
  __device__ __forceinline__ int block_of(int tile) const {
    const int of_longer = longer * (each + 1);
    return tile < of_longer ? tile / (each + 1) : longer + (tile - of_longer) / each;
  }
  __device__ __forceinline__ void load(const nvb_attention_decode_params& p, int at, int lane) {
    base = at;
    const int at_lane = at + lane;
    if (known) {
      int position = places.positions[0], slot = places.slots[0];
#pragma unroll
      for (int i = 1; i < Places::kGroups; ++i) {
        if (at == 32 * i) position = places.positions[i], slot = places.slots[i];
      }
      visible = find_visible<Tile>(p, at_lane, slot, [&](int) { return position; });
    } else {
      const int slot = at_lane < p.sequences && p.slots != nullptr ? __ldcg(p.slots + at_lane) : at_lane;
      visible = find_visible<Tile>(p, at_lane, slot,
                                   [&](int row) { return __ldcg(p.positions + at_lane * p.rows_per_sequence + row); });
    }
  }

  __device__ __forceinline__ void find(const nvb_attention_decode_params& p, int row_extra, int lane) {
    extra = row_extra;
    known = Places::suffice(p);
    if (known) places.load(p, lane);
    const int units = p.kv_heads * p.chunks;
    int mine = 0;
    for (int at = 0; at < p.sequences; at += 32) {
      load(p, at, lane);
      mine += visible.tiles == 0 ? 0 : (visible.tiles + extra) * units;
    }
    const int total = __reduce_add_sync(0xffffffffu, mine);
    blocks = min(static_cast<int>(gridDim.x), total);
    each = total / blocks, longer = total - each * blocks;
    begin = end = sequence = before = 0;
    if (static_cast<int>(blockIdx.x) >= blocks) return;
    begin = first_of(blockIdx.x), end = first_of(blockIdx.x + 1);
    for (int at = 0;; at += 32) {
      if (base != at) load(p, at, lane);
      const int own = visible.tiles == 0 ? 0 : (visible.tiles + extra) * units;
      int sum = own;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, sum, offset);
        if (lane >= offset) sum += other;
      }
      const uint32_t passed = __ballot_sync(0xffffffffu, before + sum > begin);
      if (passed != 0) {
        const int found = __ffs(passed) - 1;
        sequence = at + found;
        before += __shfl_sync(0xffffffffu, sum - own, found);
        return;
      }
      before += __shfl_sync(0xffffffffu, sum, 31);
    }
  }

  // Calls use(segment, slot of the cache, end of its old tokens) for the segments of the part until it returns false.
  template <typename Use>
  __device__ __forceinline__ void for_each(const nvb_attention_decode_params& p, int lane, const Use& use) const {
    Part part = *this;
    const int units = p.kv_heads * p.chunks;
    const int items = items_per_kv_head(p);
    int at = begin;
    uint32_t ring = 0;
    while (at < end) {
      if (part.sequence - part.base >= 32) part.load(p, part.base + 32, lane);
      const auto of_sequence = [&](int value) { return __shfl_sync(0xffffffffu, value, part.sequence - part.base); };
      const int tiles = of_sequence(part.visible.tiles);
      const int places = tiles + extra;
      const int unit = (at - part.before) / places;
      const int row_first = part.before + unit * places;
      const int tile = at - row_first;
      const int count = min(tiles - tile, end - at);
      const int next = row_first + places;
      const auto go_on = [&] {
        at = next;
        if (at == part.before + units * places) part.before = at, ++part.sequence;
      };
      if (count <= 0) {  // the part begins behind the row's tiles
        go_on();
        continue;
      }
      Segment segment;
      segment.sequence = part.sequence;
      segment.kv_head = unit / p.chunks;
      segment.first = unit % p.chunks * p.heads_per_chunk;
      segment.heads = min(p.heads_per_chunk, items - segment.first);
      segment.first_tile = of_sequence(part.visible.first_tile) + tile;
      segment.ring_first = ring;
      segment.ring_end = ring + count;
      segment.slot = count == tiles ? -1 : 2 * static_cast<int>(blockIdx.x) + (tile == 0 ? 1 : 0);
      segment.begin = of_sequence(part.visible.begin), segment.end = of_sequence(part.visible.end);
      segment.all_begin = of_sequence(part.visible.all_begin), segment.all_end = of_sequence(part.visible.all_end);
      segment.counter = part.sequence * units + unit;
      segment.first_block = count == tiles ? static_cast<int>(blockIdx.x) : block_of(row_first);
      segment.blocks = count == tiles ? 1 : block_of(row_first + tiles - 1) - segment.first_block + 1;
      ring += count;
      segment.last = at + count == end || next >= end;
      if (!use(segment, of_sequence(part.visible.slot), of_sequence(part.visible.old_end))) return;
      go_on();
    }
  }
};

// Where the tokens of a KV head of a sequence lie, keys or values.
template <typename Element>
struct Tokens {
  const Element* data;
  const int32_t* pages;
  int64_t stride;
  int64_t block_stride;
  int together;  // tokens without a gap between them

  __device__ __forceinline__ Tokens(const nvb_attention_decode_params& p, bool values, int slot, int kv_head) {
    const bool paged = p.placement.pages != nullptr;
    const int64_t sequence_stride = values ? p.value_sequence_stride : p.key_sequence_stride;
    const int64_t head_stride = values ? p.value_head_stride : p.key_head_stride;
    data = static_cast<const Element*>(values ? p.value : p.key) + (paged ? 0 : slot * sequence_stride) +
           kv_head * head_stride;
    pages = paged ? p.placement.pages + slot * p.placement.page_row_stride : nullptr;
    stride = values ? p.value_token_stride : p.key_token_stride;
    block_stride = values ? p.placement.value_block_stride : p.placement.block_stride;
    together = stride == p.head_dim ? kMaxLength : 1;
  }
  __device__ __forceinline__ int32_t page_of(const nvb_kv_placement& placement, int token) const {
    return __ldcg(pages + token / placement.page_tokens);
  }

  // Calls use(address or null, token, count) for the pieces of first .. first + count that lie without a gap. `page` is
  // that of the first token, if there are pages. Null: an entry of the table that names no page.
  template <typename Use>
  __device__ __forceinline__ void for_each_piece(const nvb_kv_placement& placement, int first, int count, int32_t page,
                                                 const Use& use) const {
    const int end = first + count;
    for (int token = first; token < end;) {
      int piece = min(end - token, together);
      int64_t offset = token * stride;
      if (pages != nullptr) {
        const int place = token % placement.page_tokens;
        piece = min(piece, placement.page_tokens - place);
        if (token != first) page = page_of(placement, token);
        const bool valid = static_cast<uint32_t>(page) < static_cast<uint32_t>(placement.page_count);
        offset = valid ? page * block_stride + place * stride : -1;
      } else if (placement.ring_tokens > 0) {
        const int place = token % placement.ring_tokens;
        piece = min(piece, placement.ring_tokens - place);
        offset = place * stride;
      }
      use(offset >= 0 ? data + offset : nullptr, token, piece);
      token += piece;
    }
  }
};

}  // namespace nvb::decode_ring
