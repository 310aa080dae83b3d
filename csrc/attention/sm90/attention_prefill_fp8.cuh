// Prefill attention by wgmma on FP8 queries, keys and values, compute capability 9.0. The pipeline is that of
// attention_prefill_wgmma.cuh, whose copies, order of tiles and mask it shares; this is what FP8 changes:
//
//   S = Q . K^T   P = 2^(S * factor - m + 8)   l += sum(P)   O = O * 2^(old m - m) + E4M3(P) . V   output = O / l * scale
//
// - A product of FP8 wants k along the rows of both operands, and the k of P . V are keys. Three warps of the producers
//   transpose each tile of V from where the copy has put it to where the product reads it.
// - The sums of S lie in a thread as two neighbouring keys of every eight, and the first operand of P . V wants four
//   neighbours. P keeps the order of S, and the transposing warps give V the same: key 8 i + 2 q + e of every 16 stands
//   at 4 q + 2 i + e. What ldmatrix makes of V has that order. The columns of V come as even and odd ones of every 16,
//   which a thread's sums bring together again, four neighbours each.
// - E4M3 goes from 2^-9 to 448: the exponent is shifted by 8, and a maximum is raised when scores pass it by 2^0.8.
// - The tensor cores add with 14 bits to what they hold, and cut off the rest of each product. So that long sums do not
//   shrink, O is moved out every so many keys: divided by its row's sum so far, as F16, it lies in shared memory, or
//   where that has no room in the output tensor, until the next time adds to it.
//
// Rows of V past a sequence's end become zeros as they are transposed.
//
// Shapes and alignment: attention_prefill_wgmma.h. Head dims between the tiles' are filled with zeros by the copies.
//
// Shared memory: Shared<Tile>, rows of 128 bytes. Q 64 * head_dim a warpgroup; K, V and the transposed V two stages of
// Keys * head_dim each, keys of the latter in blocks of 128. 208 KiB for D128_LONG with what O left, 224 KiB for D256.
// Registers a thread: S Keys / 2, P Keys / 8, O head_dim / 2. D128_LONG: 96 + 24 + 64, D256: 64 + 16 + 128.
#pragma once

#include "../../common/fp8_fragment.cuh"
#include "attention_prefill_wgmma.cuh"

namespace nvb {
namespace prefill_fp8 {

using prefill_wgmma::Arguments;
using prefill_wgmma::kFirstTurn;
using prefill_wgmma::RowSums;
using prefill_wgmma::Walk;
using prefill_wgmma::Work;

// `Consumers` warpgroups multiply 64 query rows each; a tile of keys has `Keys` of them, and after `FlushKeys` O leaves
// the tensor cores' sums. The value dim is at most the head dim.
template <int HeadDim, int Consumers, int Keys, bool PingPong, int FlushKeys>
struct Tile {
  static constexpr int kHeadDim = HeadDim, kConsumers = Consumers, kKeys = Keys;
  static constexpr bool kPingPong = PingPong;
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

// ---- The warps that transpose ----

// The warp `Warp` of them does a third of the squares of 32 keys and 16 columns, two at a time. Keys from `valid` on become
// zeros. An address is one of two of the thread's, with the bits of a piece of 16 bytes exchanged, plus a constant. They
// are made from the stage's address, because what does not change from tile to tile ptxas keeps, in memory.
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
      load_matrices_transposed(
          read[i], (source ^ columns % 8 * 16) + columns / 8 * (Tile::kKeys * 128) + keys * (32 * 128));
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

// ---- What the warpgroups do between products ----

// Rounds P, in pairs of neighbours.
template <int Count>
__device__ __forceinline__ void round_probabilities(uint16_t (&pairs)[Count / 2], const float (&score)[Count]) {
#pragma unroll
  for (int i = 0; i < Count / 2; ++i) pairs[i] = pack_e4m3(score[2 * i], score[2 * i + 1]);
}

// The first operand of P . V: fragments of 32 keys. Neither may be written while a product reads it.
template <int Count>
__device__ __forceinline__ void arrange_probabilities(uint32_t (&p)[Count / 8][4], const uint16_t (&pairs)[Count]) {
#pragma unroll
  for (int k = 0; k < Count / 8; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 8 * k + 4 * (i / 2) + i % 2;
      p[k][i] = join_pairs(pairs[at], pairs[at + 2]);
    }
  }
}

// A row's sum over its four threads.
__device__ __forceinline__ float total_of(float sum) {
  const float pair = sum + __shfl_xor_sync(0xffffffffu, sum, 1);
  return pair + __shfl_xor_sync(0xffffffffu, pair, 2);
}

// The first of this thread's bytes in the output tensor of one of its two rows, or null past the sequence. The next
// sixteen columns, of which it has four neighbours, are as many elements on.
__device__ __forceinline__ uint8_t* output_row(const Arguments& arguments, const Work& work, int warpgroup, int half) {
  const int lane = threadIdx.x % 32;
  const int row = warpgroup * 64 + static_cast<int>(threadIdx.x % 128 / 32) * 16 + half * 8 + lane / 4;
  if (row >= work.rows) return nullptr;
  const int64_t element = (work.first_token + row) * arguments.output_token_stride +
                          work.head * arguments.output_head_stride + lane % 4 * 4;
  return static_cast<uint8_t*>(arguments.output) + element * (arguments.output_dtype == NVB_F32 ? 4 : 2);
}

// The place of a column among O's sums of sixteen columns, from which four neighbours are 0, 4, 1 and 5 on.
template <int Count>
__device__ __forceinline__ void read_four(float (&four)[4], const float (&output)[Count], int at) {
  four[0] = output[at], four[1] = output[at + 4], four[2] = output[at + 1], four[3] = output[at + 5];
}

// What has left the sums of a warpgroup: O divided by `weight`, which follows the maxima, as F16. It lies in shared
// memory, or in the output tensor: the first of a row's fours of this thread, null where it has none, and the bytes from
// one to the next.
struct Flushed {
  float weight[2];
  bool any;
};
struct FlushedRow {
  uint8_t* first;
  int step;
};
template <typename Tile>
__device__ __forceinline__ FlushedRow flushed_row(const Arguments& arguments, Shared<Tile>& shared, const Work& work,
                                                  int warpgroup, int half) {
  if constexpr (Tile::kFlushesToShared) {
    return {shared.flushed[warpgroup] + half * (Tile::kFlushedBytes / 2) + threadIdx.x % 128 * 8, 128 * 8};
  } else {
    return {output_row(arguments, work, warpgroup, half), arguments.output_dtype == NVB_F32 ? 64 : 32};
  }
}

// Adds it to O.
template <typename Tile>
__device__ __forceinline__ void add_flushed(const Arguments& arguments, Shared<Tile>& shared, const Work& work,
                                            float (&output)[Tile::kHeadDim / 2], const Flushed& flushed,
                                            int warpgroup) {
  constexpr int kFours = Tile::kHeadDim / 16, kTogether = kFours < 8 ? kFours : 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const FlushedRow row = flushed_row<Tile>(arguments, shared, work, warpgroup, half);
#pragma unroll
    for (int first = 0; first < kFours; first += kTogether) {
      // All are on their way before the first is waited for.
      uint2 words[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        words[j] = make_uint2(0, 0);
        if (row.first != nullptr && 16 * (first + j) < arguments.value_dim) {
          words[j] = *reinterpret_cast<const uint2*>(row.first + (first + j) * row.step);
        }
      }
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const float2 low = unpack_pair<__half>(words[j].x), high = unpack_pair<__half>(words[j].y);
        float* const four = &output[8 * (first + j) + 2 * half];
        four[0] = fmaf(low.x, flushed.weight[half], four[0]);
        four[4] = fmaf(low.y, flushed.weight[half], four[4]);
        four[1] = fmaf(high.x, flushed.weight[half], four[1]);
        four[5] = fmaf(high.y, flushed.weight[half], four[5]);
      }
    }
  }
}

template <typename Tile>
__device__ __forceinline__ void flush_output(const Arguments& arguments, Shared<Tile>& shared, const Work& work,
                                             float (&output)[Tile::kHeadDim / 2], const RowSums& rows,
                                             Flushed& flushed, int warpgroup) {
  if (flushed.any) add_flushed<Tile>(arguments, shared, work, output, flushed, warpgroup);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float total = total_of(rows.sum[half]);
    const float factor = total == 0.0f ? 0.0f : 1.0f / total;
    flushed.weight[half] = total;
    const FlushedRow row = flushed_row<Tile>(arguments, shared, work, warpgroup, half);
    if (row.first == nullptr) continue;
#pragma unroll
    for (int j = 0; j < Tile::kHeadDim / 16; ++j) {
      float four[4];
      read_four(four, output, 8 * j + 2 * half);
      if (16 * j < arguments.value_dim) {
        *reinterpret_cast<uint2*>(row.first + j * row.step) =
            make_uint2(pack_pair<__half>(four[0] * factor, four[1] * factor),
                       pack_pair<__half>(four[2] * factor, four[3] * factor));
      }
    }
  }
  flushed.any = true;
#pragma unroll
  for (int i = 0; i < Tile::kHeadDim / 2; ++i) output[i] = 0.0f;
}

template <typename T, typename Tile>
__device__ __forceinline__ void store_row(const Arguments& arguments, uint8_t* start,
                                          const float (&output)[Tile::kHeadDim / 2], float factor, int half) {
#pragma unroll
  for (int j = 0; j < Tile::kHeadDim / 16; ++j) {
    float four[4];
    read_four(four, output, 8 * j + 2 * half);
#pragma unroll
    for (int i = 0; i < 4; ++i) four[i] *= factor;
    if (16 * j >= arguments.value_dim) continue;
    T* const to = reinterpret_cast<T*>(start) + 16 * j;
    if constexpr (sizeof(T) == 4) {
      *reinterpret_cast<float4*>(to) = make_float4(four[0], four[1], four[2], four[3]);
    } else {
      *reinterpret_cast<uint2*>(to) = make_uint2(pack_pair<T>(four[0], four[1]), pack_pair<T>(four[2], four[3]));
    }
  }
}

// Normalises and stores a warpgroup's rows, those of the sequence alone. An empty row has sum 0; a NaN stays NaN.
template <typename Tile>
__device__ __forceinline__ void store_rows(const Arguments& arguments, Shared<Tile>& shared, const Work& work,
                                           float (&output)[Tile::kHeadDim / 2], const RowSums& rows,
                                           const Flushed& flushed, float exponent_factor, float value_scale,
                                           int warpgroup) {
  const int lane = threadIdx.x % 32;
  if (flushed.any) add_flushed<Tile>(arguments, shared, work, output, flushed, warpgroup);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float total = total_of(rows.sum[half]);
    const float factor = total == 0.0f ? 0.0f : value_scale / total;
    const int row = warpgroup * 64 + static_cast<int>(threadIdx.x % 128 / 32) * 16 + half * 8 + lane / 4;
    if (arguments.lse != nullptr && lane % 4 == 0 && row < work.rows) {
      arguments.lse[static_cast<int64_t>(work.first_token + row) * arguments.query_heads + work.head] =
          total == 0.0f ? -CUDART_INF_F
                        : rows.maximum[half] * exponent_factor * kLn2 + (logf(total) - kShift * kLn2);
    }
    uint8_t* const start = output_row(arguments, work, warpgroup, half);
    if (start == nullptr) continue;
    if (arguments.output_dtype == NVB_BF16) {
      store_row<__nv_bfloat16, Tile>(arguments, start, output, factor, half);
    } else if (arguments.output_dtype == NVB_F16) {
      store_row<__half, Tile>(arguments, start, output, factor, half);
    } else {
      store_row<float, Tile>(arguments, start, output, factor, half);
    }
  }
}

// ---- The warpgroups that multiply ----

__device__ __forceinline__ float scale_of(const float* scale, int stride, int kv_head) {
  return scale == nullptr ? 1.0f : scale[kv_head * stride];
}

// T is the dtype of queries, keys and values.
template <typename T, typename Tile>
__device__ __forceinline__ void multiply_all(const Arguments& arguments, Shared<Tile>& shared, int warpgroup) {
  constexpr int kKeys = Tile::kKeys;
  const int thread = threadIdx.x % 128;
  const int row = warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4;
  const int column = thread % 4 * 2;
  const uint64_t query_matrix = wgmma_descriptor(shared.query[warpgroup]);
  const uint64_t key_matrix = wgmma_descriptor(shared.key[0]);
  const uint64_t value_matrix = wgmma_descriptor(shared.transposed[0]);
  RingPlace<Tile::kStages> keys, values;
  uint32_t query_parity = 0;
  const int turn = kFirstTurn + warpgroup;
  const int next_turn = kFirstTurn + (warpgroup + 1) % Tile::kConsumers;
  // The first turn is the first warpgroup's.
  if (Tile::kPingPong && warpgroup == Tile::kConsumers - 1) named_barrier_arrive(next_turn, 256);

  Walk<Tile> walk;
  Work work;
  bool more = walk.next(arguments, work);
#pragma unroll 1
  while (more) {
    float score[kKeys / 2];
    float output[Tile::kHeadDim / 2];
    uint16_t pairs[kKeys / 4];
    uint32_t p[kKeys / 32][4];
    Work next;
    RowSums rows = {{-CUDART_INF_F, -CUDART_INF_F}, {0.0f, 0.0f}};
    Flushed flushed = {{0.0f, 0.0f}, false};
    float scaled[2];
#pragma unroll
    for (int i = 0; i < Tile::kHeadDim / 2; ++i) output[i] = 0.0f;
    const float product_scale = scale_of(arguments.query_scale, arguments.query_scale_stride, work.kv_head) *
                                scale_of(arguments.key_scale, arguments.key_scale_stride, work.kv_head);
    const float cap_factor = arguments.cap_factor * product_scale;
    // A capped score has no scale.
    const float exponent_factor = arguments.exponent_factor * (arguments.cap_factor == 0.0f ? product_scale : 1.0f);

    const auto multiply_keys = [&] {
      const uint64_t b = key_matrix + keys.stage * (Tile::kKeyBytes >> 4);
#pragma unroll
      for (int k = 0; k < Tile::kHeadDim / 32; ++k) {
        const int block = k / 4, part = k % 4;
        wgmma_ss_fp8<T>(score, query_matrix + block * (64 * 128 >> 4) + 2 * part,
                        b + block * (kKeys * 128 >> 4) + 2 * part, k != 0);
      }
    };
    const auto multiply_values = [&] {
      const uint64_t b = value_matrix + values.stage * (Tile::kTransposedBytes >> 4);
#pragma unroll
      for (int k = 0; k < kKeys / 32; ++k) {
        wgmma_rs_fp8<T>(output, p[k], b + k / 4 * (Tile::kTransposedBlock >> 4) + 2 * (k % 4), 1);
      }
    };
    const auto release = [&](uint64_t* barrier) {
      if (thread == 0) barrier_arrive(barrier);
    };
    if (work.first < work.end) {
      // Tiles that every row of this warpgroup sees whole: [clear_first, clear_end).
      const int first_row = warpgroup * 64, last_row = max(first_row, min(first_row + 63, work.rows - 1));
      const int unseen =
          visible_keys(work.position + last_row, work.kv_length, arguments.causal, arguments.window).first;
      const int seen_end =
          visible_keys(work.position + first_row, work.kv_length, arguments.causal, arguments.window).last + 1;
      const int clear_first = (unseen + kKeys - 1) / kKeys, clear_end = seen_end / kKeys;
      prefill_wgmma::RowMask mask;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        mask.range[half] =
            visible_keys(work.position + row + 8 * half, work.kv_length, arguments.causal, arguments.window);
      }
      const auto finish_scores = [&](int tile, bool masked) {
        if (arguments.cap_factor != 0.0f) {
#pragma unroll
          for (int i = 0; i < kKeys / 2; ++i) score[i] = tanh_fast(score[i] * cap_factor);
        }
        if (!masked) return;
        if (tile >= clear_end) mask_last(score, mask, tile * kKeys + column);
        if (tile < clear_first) mask_first(score, mask, tile * kKeys + column);
      };

      // The last tile of keys.
      int tile = work.end - 1;
      int unflushed = Tile::kFlushTiles;
      barrier_wait(&shared.query_full[warpgroup], query_parity);
      query_parity ^= 1;
      barrier_wait(&shared.key_full[keys.stage], keys.parity);
      wgmma_fence();
      multiply_keys();
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_fence_operand(score);
      release(&shared.key_empty[keys.stage]);
      keys.advance();
      if (tile == work.first) release(&shared.query_empty[warpgroup]);
      finish_scores(tile, true);
      prefill_wgmma::exponentiate(score, rows, scaled, exponent_factor, kThreshold, kShift);
      round_probabilities(pairs, score);
      arrange_probabilities(p, pairs);

      // S of one tile beside P . V of the tile after it.
      const auto step = [&](auto masked) {
        barrier_wait(&shared.key_full[keys.stage], keys.parity);
        if constexpr (Tile::kPingPong) named_barrier_sync(turn, 256);
        wgmma_fence();
        multiply_keys();
        wgmma_commit();
        barrier_wait(&shared.transposed_full[values.stage], values.parity);
        wgmma_fence();
        multiply_values();
        wgmma_commit();
        if constexpr (Tile::kPingPong) named_barrier_arrive(next_turn, 256);
        wgmma_wait<1>();
        wgmma_fence_operand(score);
        release(&shared.key_empty[keys.stage]);
        keys.advance();
        if (tile == work.first) release(&shared.query_empty[warpgroup]);
        finish_scores(tile, decltype(masked)::value);
        prefill_wgmma::exponentiate(score, rows, scaled, exponent_factor, kThreshold, kShift);
        round_probabilities(pairs, score);
        // As in attention_prefill_wgmma.cuh: the loop keeps the wait behind the exponentials.
        do {
          wgmma_wait<0>();
        } while (__any_sync(0xffffffffu, rows.sum[0] < 0.0f || rows.sum[1] < 0.0f));
        wgmma_fence_operand(output);
        release(&shared.transposed_empty[values.stage]);
        values.advance();
        if (__any_sync(0xffffffffu, scaled[0] != 1.0f || scaled[1] != 1.0f)) {
          prefill_wgmma::scale_output(output, scaled);
          flushed.weight[0] *= scaled[0];
          flushed.weight[1] *= scaled[1];
        }
        arrange_probabilities(p, pairs);
        --unflushed;
      };
      --tile;
#pragma unroll 1
      while (tile >= work.first) {
        if (unflushed <= 0) {
          flush_output<Tile>(arguments, shared, work, output, rows, flushed, warpgroup);
          unflushed = Tile::kFlushTiles;
        }
        const int last = max(work.first, tile + 1 - unflushed);
#pragma unroll 1
        for (; tile >= last && (tile >= clear_end || tile < clear_first); --tile) step(std::true_type());
#pragma unroll 1
        for (; tile >= last && tile < clear_end && tile >= clear_first; --tile) step(std::false_type());
      }

      // P . V of the first tile.
      barrier_wait(&shared.transposed_full[values.stage], values.parity);
      wgmma_fence();
      multiply_values();
      wgmma_commit();
      // The next tile is looked for beside the product.
      more = walk.next(arguments, next);
      wgmma_wait<0>();
      wgmma_fence_operand(output);
      release(&shared.transposed_empty[values.stage]);
      values.advance();
    } else {
      more = walk.next(arguments, next);
    }
    store_rows<Tile>(arguments, shared, work, output, rows, flushed, exponent_factor,
                     scale_of(arguments.value_scale, arguments.value_scale_stride, work.kv_head), warpgroup);
    work = next;
  }
  // Nobody leaves a barrier half full.
  if (Tile::kPingPong && warpgroup == 0) named_barrier_sync(turn, 256);
}

template <typename T, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) attention_prefill_fp8(const __grid_constant__ Arguments arguments) {
#ifdef NVB_WGMMA
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared<Tile>& shared = *reinterpret_cast<Shared<Tile>*>(memory);
  // All lanes of a warp have one value, and the shuffle tells the compiler so.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);

  if (threadIdx.x == 0) {
    for (int warpgroup = 0; warpgroup < Tile::kConsumers; ++warpgroup) {
      barrier_init(&shared.query_full[warpgroup], 1);
      barrier_init(&shared.query_empty[warpgroup], 1);
    }
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      barrier_init(&shared.key_full[stage], 1);
      barrier_init(&shared.key_empty[stage], Tile::kConsumers);
      barrier_init(&shared.value_full[stage], 1);
      barrier_init(&shared.value_empty[stage], kTransposers);
      barrier_init(&shared.transposed_full[stage], kTransposers);
      barrier_init(&shared.transposed_empty[stage], Tile::kConsumers);
    }
    barrier_init_fence();
    prefetch_tensor_map(&arguments.query);
    prefetch_tensor_map(&arguments.key);
    prefetch_tensor_map(&arguments.value);
  }
  __syncthreads();
  wait_for_previous_grid();

  if (warp >= 4 * Tile::kConsumers) {
    setmaxnreg_dec<Tile::kProducerRegisters>();
    if (warp == 4 * Tile::kConsumers) {
      prefill_wgmma::copy_with_one_warp<Tile>(arguments, shared);
    } else if (warp == 4 * Tile::kConsumers + 1) {
      transpose_all<Tile, 0>(arguments, shared);
    } else if (warp == 4 * Tile::kConsumers + 2) {
      transpose_all<Tile, 1>(arguments, shared);
    } else {
      transpose_all<Tile, 2>(arguments, shared);
    }
  } else {
    setmaxnreg_inc<Tile::kConsumerRegisters>();
    multiply_all<T, Tile>(arguments, shared, warp / 4);
  }
#else
  __trap();  // a library built for other devices alone: the launcher chose by the device
#endif
}

template <typename T, typename Tile>
cudaError_t launch_tile(const Arguments& arguments, int blocks, const nvb_launch& launch) {
  static_assert(sizeof(Shared<Tile>) <= 227 * 1024, "what a block can have");
  const auto kernel = attention_prefill_fp8<T, Tile>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared<Tile>));
  if (error != cudaSuccess) return error;
  return launch_overlapped(kernel, dim3(static_cast<unsigned>(blocks)), dim3(Tile::kThreads), sizeof(Shared<Tile>),
                           &launch, arguments);
}

}  // namespace prefill_fp8
}  // namespace nvb
