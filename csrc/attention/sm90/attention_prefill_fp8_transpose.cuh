// The tiles and the shared memory of attention_prefill_fp8.cuh, and the warps that transpose V.
#pragma once

#include "../../common/fp8_fragment.cuh"
#include "../../common/wgmma_widths.cuh"
#include "attention_prefill_wgmma_work.cuh"

namespace nvb {
namespace prefill_fp8 {

using prefill_wgmma::Arguments;
using prefill_wgmma::Walk;
using prefill_wgmma::Work;

// `Consumers` warpgroups multiply 64 query rows each; a tile of keys has `Keys` of them, and after `FlushKeys` O leaves
// the tensor cores' sums. The value dim is at most the head dim.
template <int HeadDim, int Consumers, int Keys, bool PingPong, int FlushKeys>
struct Tile {
  static constexpr int kHeadDim = HeadDim, kConsumers = Consumers, kKeys = Keys;
  static constexpr bool kPingPong = PingPong;
  // Chunks and prefixes would take a stack of 32 and 40 bytes for 16 at 128 columns, and 176 for 112 at 256.
  static constexpr bool kTakesTerms = false, kTakesScoreTerms = false;
  static constexpr int kRows = 64 * Consumers;
  static constexpr int kStages = 2;
  static constexpr int kThreads = 128 * (Consumers + 1);
  // Tiles after which O is moved out of the tensor cores' sums.
  static constexpr int kFlushTiles = FlushKeys / Keys;
  static constexpr int kProducerRegisters = Consumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = Consumers == 2 ? 240 : 160;
  // Blocks of 128 columns, 128 bytes a row.
  static constexpr int kHeadBlocks = (HeadDim + 127) / 128, kValueBlocks = kHeadBlocks;
  static constexpr int kQueryBytes = 64 * 128 * kHeadBlocks;  // of a warpgroup
  static constexpr int kKeyBytes = Keys * 128 * kHeadBlocks, kValueBytes = kKeyBytes;
  // Blocks of 128 keys, 128 bytes a column of V.
  static constexpr int kTransposedBlock = HeadDim * 128;
  static constexpr int kTransposedBytes = (Keys + 127) / 128 * kTransposedBlock;
  // What O leaves of its sums lies in shared memory where there is room for it.
  static constexpr int kFlushedBytes = 64 * HeadDim * 2;  // of a warpgroup
  static constexpr bool kFlushesToShared =
      Consumers * (kQueryBytes + kFlushedBytes) + kStages * (kKeyBytes + kValueBytes + kTransposedBytes) <= 226 * 1024;

  static_assert(Consumers == 2 || Consumers == 3, "registers are divided for two or three warpgroups");
  static_assert(Keys % 32 == 0 && (HeadDim == 64 || HeadDim % 128 == 0), "whole instructions");
};

// `_LONG`: for long sequences, where tiles of fewer keys have no less waste to offer.
namespace tiles {
using D64 = Tile<64, 3, 128, false, 1024>;
using D128 = Tile<128, 2, 128, true, 1024>;
using D128_LONG = Tile<128, 2, 192, true, 960>;
using D256 = Tile<256, 2, 128, true, 2048>;
}  // namespace tiles

// Warps that transpose.
inline constexpr int kTransposers = 3;

inline constexpr float kShift = 8.0f, kThreshold = 0.8f;
// 256 * 2^0.8 is less than the 448 of E4M3.

template <typename Tile>
struct Shared {
  uint8_t query[Tile::kConsumers][Tile::kQueryBytes];
  uint8_t key[Tile::kStages][Tile::kKeyBytes];
  uint8_t value[Tile::kStages][Tile::kValueBytes];
  uint8_t transposed[Tile::kStages][Tile::kTransposedBytes];
  uint8_t flushed[Tile::kConsumers][Tile::kFlushesToShared ? Tile::kFlushedBytes : 16];
  // Full: the bytes are there. Empty: every warp or warpgroup that reads them has.
  uint64_t query_full[Tile::kConsumers];
  uint64_t query_empty[Tile::kConsumers];
  uint64_t key_full[Tile::kStages];
  uint64_t key_empty[Tile::kStages];
  uint64_t value_full[Tile::kStages];
  uint64_t value_empty[Tile::kStages];
  uint64_t transposed_full[Tile::kStages];
  uint64_t transposed_empty[Tile::kStages];

  __device__ __forceinline__ uint64_t* value_copied(int stage, bool) { return &value_full[stage]; }
};

// The warp `Warp` of them does a third of the squares of 32 keys and 16 columns, two at a time. Keys from `valid` on
// become zeros. An address is one of two of the thread's, with the bits of a piece of 16 bytes exchanged, plus a
// constant. They are made from the stage's address, because what does not change from tile to tile ptxas keeps, in
// memory.
template <typename Tile, bool Clears, int Warp>
__device__ __forceinline__ void transpose_squares(const uint8_t* to, const uint8_t* from, int valid) {
  constexpr int kDown = Tile::kKeys / 32, kSquares = kDown * (Tile::kHeadDim / 16), kTogether = 2;
  constexpr int kFirst = kSquares * Warp / kTransposers, kEnd = kSquares * (Warp + 1) / kTransposers;
  const int lane = threadIdx.x % 32, row = lane % 8;
  const uint32_t source = shared_address(from) + static_cast<uint32_t>(lane * 128 + row * 16);
  const uint32_t target = shared_address(to) + static_cast<uint32_t>(lane % 16 * 128 + ((lane / 16) ^ row) * 16);
#pragma unroll(Clears ? 1 : kSquares)
  for (int first = kFirst; first < kEnd; first += kTogether) {
    uint32_t read[kTogether][4];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int square = first + i, keys = square % kDown, columns = square / kDown;
      if (square >= kEnd) break;
      load_matrices_transposed(read[i],
                               (source ^ columns % 8 * 16) + columns / 8 * (Tile::kKeys * 128) + keys * (32 * 128));
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int square = first + i, keys = square % kDown, columns = square / kDown;
      if (square >= kEnd) break;
      uint32_t(&r)[4] = read[i];
      if constexpr (Clears) {
        const int key = keys * 32 + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (key + 8 * j + 1 >= valid) r[j] &= key + 8 * j < valid ? 0x0000ffffu : 0u;
        }
      }
      // Two keys of two columns each become four keys of the even and of the odd column.
      const uint32_t written[4] = {__byte_perm(r[0], r[1], 0x6420), __byte_perm(r[0], r[1], 0x7531),
                                   __byte_perm(r[2], r[3], 0x6420), __byte_perm(r[2], r[3], 0x7531)};
      store_matrices((target ^ keys % 4 * 32) + keys / 4 * Tile::kTransposedBlock + columns * (16 * 128), written);
    }
  }
}

template <typename Tile, int Warp>
__device__ __forceinline__ void transpose_all(const Arguments& arguments, Shared<Tile>& shared) {
  RingPlace<Tile::kStages> place;  // of both rings
  Walk<Tile> walk;
  Work work;
#pragma unroll 1
  while (walk.next(arguments, work)) {
#pragma unroll 1
    for (int tile = work.end - 1; tile >= work.first; --tile) {
      const int stage = place.stage;
      barrier_wait(&shared.value_full[stage], place.parity);
      barrier_wait(&shared.transposed_empty[stage], place.parity ^ 1);
      const int valid = work.kv_length - tile * Tile::kKeys;
      if (valid >= Tile::kKeys) {
        transpose_squares<Tile, false, Warp>(shared.transposed[stage], shared.value[stage], valid);
      } else {
        transpose_squares<Tile, true, Warp>(shared.transposed[stage], shared.value[stage], valid);
      }
      fence_shared_before_products();
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        barrier_arrive(&shared.value_empty[stage]);
        barrier_arrive(&shared.transposed_full[stage]);
      }
      place.advance();
    }
  }
}

}  // namespace prefill_fp8
}  // namespace nvb
