// What a block of grouped_linear_wgmma.cuh multiplies: the experts' tiles of tokens, and its share of their rows of W.
//
// The rows of an expert are counted in groups of eight, the unit of what is copied and shared. A piece is up to
// `Groups` neighbouring groups for one tile of tokens of one expert.
#pragma once

#include <stdint.h>

namespace nvb {
namespace grouped {

inline constexpr int kMostExperts = 1024;
inline constexpr int kGroupRows = 8;  // of W or of x: what wgmma's operands in shared memory are made of

// Tiles of `Tokens` tokens, counted expert by expert; the last of each expert may be short.
template <int Tokens>
struct ExpertTiles {
  int64_t first_tile[kMostExperts + 1];      // of each expert; behind the last one, the number of tiles
  int32_t expert_offsets[kMostExperts + 1];  // as they were given

  __device__ __forceinline__ int64_t begin(int32_t expert) const { return max(expert_offsets[expert], 0); }
  __device__ __forceinline__ int64_t end(int32_t expert, int64_t rows) const {
    return min(static_cast<int64_t>(expert_offsets[expert + 1]), rows);
  }

  // All threads of the block call it together.
  __device__ __forceinline__ void load(const int32_t* given, int32_t experts, int64_t rows) {
    for (int32_t i = threadIdx.x; i <= experts; i += blockDim.x) expert_offsets[i] = given[i];
    __syncthreads();
    if (threadIdx.x < 32) {
      // Each lane counts the tiles of neighbouring experts.
      const int32_t count = (experts + 31) / 32, first = static_cast<int32_t>(threadIdx.x) * count;
      const auto tiles_of = [&](int32_t expert) {
        const int64_t tokens = end(expert, rows) - begin(expert);
        return tokens > 0 ? (tokens + Tokens - 1) / Tokens : int64_t{0};
      };
      int64_t own = 0;
      for (int32_t i = first; i < min(first + count, experts); ++i) own += tiles_of(i);
      int64_t through = own;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int64_t other = __shfl_up_sync(0xffffffffu, through, distance);
        if (threadIdx.x >= distance) through += other;
      }
      int64_t tile = through - own;
      for (int32_t i = first; i < min(first + count, experts); ++i) {
        first_tile[i] = tile;
        tile += tiles_of(i);
      }
      if (threadIdx.x == 31) first_tile[experts] = through;
    }
    __syncthreads();
  }

  // The expert of a tile that exists: the last of those that start no later, because the others have none.
  __device__ __forceinline__ int32_t expert_of(int64_t tile, int32_t experts) const {
    int32_t low = 0, high = experts;
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      if (first_tile[middle] <= tile) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

struct Piece {
  int64_t first_token;
  int32_t tokens;
  int32_t expert;
  int32_t first_group;  // of the expert's
  int32_t groups;
};

// The pieces of this block, one after the other. Neighbours: the block's share is an equal part of all tiles' groups in
// a row, so that few tokens keep every multiprocessor as busy with W as the next. Otherwise blocks take pieces in turn,
// so that those in flight together are of few experts and share what they read in L2.
template <int Tokens, int Groups, bool Neighbours>
class Walk {
 public:
  __device__ Walk(const ExpertTiles<Tokens>& tiles, int32_t experts, int64_t rows, int32_t expert_groups)
      : tiles_(tiles), rows_(rows), experts_(experts), groups_(expert_groups) {
    const int64_t count = tiles.first_tile[experts];
    if (Neighbours) {
      const int64_t all = count * groups_;
      next_ = all * blockIdx.x / gridDim.x;
      end_ = all * (blockIdx.x + 1) / gridDim.x;
    } else {
      next_ = blockIdx.x;
      end_ = count * pieces();
    }
  }

  // False behind the last piece.
  __device__ __forceinline__ bool next(Piece& piece) {
    if (next_ >= end_) return false;
    const int64_t per_tile = Neighbours ? groups_ : pieces();
    const int64_t tile = next_ / per_tile;
    const int32_t place = static_cast<int32_t>(next_ - tile * per_tile);
    piece.first_group = Neighbours ? place : place * Groups;
    piece.groups = min(Groups, groups_ - piece.first_group);
    if (Neighbours) piece.groups = static_cast<int32_t>(min(static_cast<int64_t>(piece.groups), end_ - next_));
    piece.expert = tiles_.expert_of(tile, experts_);
    piece.first_token = tiles_.begin(piece.expert) + (tile - tiles_.first_tile[piece.expert]) * Tokens;
    piece.tokens =
        static_cast<int32_t>(min(static_cast<int64_t>(Tokens), tiles_.end(piece.expert, rows_) - piece.first_token));
    next_ += Neighbours ? piece.groups : gridDim.x;
    return true;
  }

 private:
  __device__ __forceinline__ int32_t pieces() const { return (groups_ + Groups - 1) / Groups; }

  const ExpertTiles<Tokens>& tiles_;
  int64_t rows_;
  int64_t next_;
  int64_t end_;
  int32_t experts_;
  int32_t groups_;  // of an expert
};

}  // namespace grouped
}  // namespace nvb
