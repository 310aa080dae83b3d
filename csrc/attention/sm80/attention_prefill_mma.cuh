// Prefill attention on tensor cores, capability 8.0 and later: FlashAttention-2 (Dao, arXiv:2307.08691) with mma.sync.
//
//   S = Q . K^T (registers)   m = max(m, S)   P = 2^(S * factor - m)   l += sum(P)   O = O * 2^(old m - m) + P . V
//
// Shapes and alignment: attention.h. One block takes kRows query rows of one head and walks the keys that they see in
// tiles of kKeys, left to right. A warp owns kWarpRows rows and kColumns output columns; with kColumnWarps = 2 two
// warps share rows, each computing S for itself, because 512 columns of O do not fit the registers of one.
//
// With one stage, V of a tile is on its way by cp.async while S is computed, and the next K during P . V: two barriers
// a tile, for half of the shared memory. With two stages the next tile is on its way all the time, with one barrier.
//
// Shared memory: kRows * kHeadDim of Q, and kStages tiles of kKeys * kHeadDim of K and of V, 16-bit. Registers a
// thread: O = kWarpRows * kColumns / 32, S = kWarpRows * kKeys / 32, fragments of Q, K and V 12 to 16.
//
// The dtype of P is that of V; sums and maxima are f32. A row's maximum is kept stale while scores pass it by less than
// 2^kRescaleThreshold, so the rescaling of O is skipped for almost every tile.
#pragma once

#include "attention_prefill_mma_tile.cuh"

namespace nvb {

// The tiles of keys that a warp's rows see: first and end of those that some row sees, and of those that all rows see
// whole.
struct WarpTiles {
  int first, end, first_whole, end_whole;
};

// What a block computes.
template <typename T>
struct BlockWork {
  const T* key;  // of token 0, or of the first page or row of the ring
  const T* value;
  int position;  // of the block's first row
  int rows;
  int kv_length;
  int last_key;  // that a row sees
  int table;     // the sequence's row of the page table
  // With Terms alone.
  int prefix;
  int trunk;  // keys before a tree
  const int32_t* parents;
};

// The lowest position that a row from `row` on may stand at.
template <bool Terms, typename T>
__device__ __forceinline__ int lowest_position(const nvb_attention_prefill_params& p, const BlockWork<T>& of, int row) {
  return Terms && p.tree_parents != nullptr ? of.trunk : of.position + row;
}

// Terms: with what heads add, a chunk, a prefix and a tree. Without them the loop has no registers to spare: a branch
// on slopes that nobody has spilled 72 bytes at head_dim 256 for 8.0, and 68 at 128 for 9.0.
template <typename Tile, bool Terms>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    attention_prefill_mma_kernel(const __grid_constant__ PrefillArguments arguments) {
#if __CUDA_ARCH__ >= 800
  using T = typename Tile::T;
  constexpr int kRowBlocks = Tile::kRowBlocks;
  constexpr int kKeyTiles = Tile::kKeys / 8;
  constexpr int kColumnTiles = Tile::kColumns / 8;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ WarpTiles warp_tiles[Tile::kThreads / 32];
  __shared__ BlockWork<T> shared_work;

  // Which rows, and which keys they see.
  const nvb_attention_prefill_params& p = arguments.params;
  const PrefillBlock block = arguments.tiles > 0 ? find_prefill_block(arguments, Tile::kRows)
                                                 : find_prefill_block(arguments, blockIdx.x, Tile::kRows);
  if (block.sequence < 0) return;
  const nvb_attention_sequence sequence = prefill_sequence(p, block.sequence);
  BlockWork<T> work;
  work.rows = min(Tile::kRows, sequence.query_count - block.first_row);
  work.kv_length = sequence.kv_length;
  work.position = sequence.kv_length - sequence.query_count + block.first_row;
  work.prefix = Terms ? sequence.prefix : 0;
  work.trunk = sequence.kv_length - sequence.query_count;
  work.parents = Terms && p.tree_parents != nullptr ? tree_of(p, sequence) : nullptr;
  work.last_key = visible_keys<Terms>(p, work.kv_length, work.prefix, work.position + work.rows - 1).last;
  work.table = sequence.kv_start;
  const int first_key = visible_keys<Terms>(p, work.kv_length, work.prefix, lowest_position<Terms>(p, work, 0)).first;
  const int first_tile = first_key / Tile::kKeys;
  const int end_tile = work.last_key < first_key ? first_tile : work.last_key / Tile::kKeys + 1;

  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warp_row = warp % Tile::kRowWarps * Tile::kWarpRows;
  const int warp_column = warp / Tile::kRowWarps * Tile::kColumns;
  const int group = lane / 4;
  const int quad = lane % 4;

  const int kv_head = arguments.group == 1 ? block.head : block.head / arguments.group;
  const int64_t query_start = query_offset(p, sequence, block);
  const int kv_start = p.placement.pages != nullptr ? 0 : sequence.kv_start;
  work.key = static_cast<const T*>(p.key) + kv_start * p.key_sequence_stride + kv_head * p.key_head_stride;
  work.value = static_cast<const T*>(p.value) + kv_start * p.value_sequence_stride + kv_head * p.value_head_stride;
  unsigned char* const keys = shared + Tile::kQueryBytes;
  unsigned char* const values = keys + Tile::kStages * Tile::kTileBytes;
  // Of the keys of two tiles, in rings and pages.
  uint32_t* const places = reinterpret_cast<uint32_t*>(values + Tile::kStages * Tile::kTileBytes);
  const auto stage_of = [](int tile) { return Tile::kStages == 1 ? 0 : tile % Tile::kStages * Tile::kTileBytes; };
  // The table is read before the tiles and a barrier between makes it known. Keys before the first visible one may have
  // no page any more.
  const auto find_places = [&](const BlockWork<T>& of, int tile) {
    if (static_cast<int>(threadIdx.x) >= Tile::kKeys || tile >= end_tile) return;
    const int token = tile * Tile::kKeys + static_cast<int>(threadIdx.x);
    const int first = visible_keys<Terms>(p, of.kv_length, of.prefix, lowest_position<Terms>(p, of, 0)).first;
    const bool visible = token >= first && token <= of.last_key;
    const int32_t* const table = p.placement.pages + of.table * p.placement.page_row_stride;
    places[tile % 2 * Tile::kKeys + threadIdx.x] = visible ? kv_row(p.placement, table, token) : kNoRow;
  };
  const auto load = [&](unsigned char* stages, const T* tensor, int64_t stride, int last_key, int tile) {
    if (tile >= end_tile) return;
    unsigned char* const stage = stages + stage_of(tile);
    if (is_placed(p.placement)) {
      load_placed<Tile>(stage, tensor, p.placement.block_stride, places + tile % 2 * Tile::kKeys, stride, p.head_dim);
    } else {
      load_tile<Tile, Tile::kKeys>(stage, tensor + static_cast<int64_t>(tile) * Tile::kKeys * stride, stride,
                                   last_key + 1 - tile * Tile::kKeys, p.head_dim);
    }
  };
  const auto load_keys = [&](const BlockWork<T>& of, int tile) {
    load(keys, of.key, p.key_token_stride, of.last_key, tile);
  };
  const auto load_values = [&](const BlockWork<T>& of, int tile) {
    load(values, of.value, p.value_token_stride, of.last_key, tile);
  };
  const auto arrive = [] {
    cp_async_wait<0>();
    __syncthreads();
  };

  // Copy Q and the first tiles.
  if (first_tile < end_tile) {
    if (p.head_dim < Tile::kHeadDim) {
      clear_columns<Tile>(shared, Tile::kRows + 2 * Tile::kStages * Tile::kKeys, p.head_dim);
    }
    if (p.query_dtype == NVB_F32) {
      load_rounded<Tile>(shared, static_cast<const float*>(p.query) + query_start, p.query_token_stride, work.rows,
                         p.head_dim);
    } else {
      load_tile<Tile, Tile::kRows>(shared, static_cast<const T*>(p.query) + query_start, p.query_token_stride,
                                   work.rows, p.head_dim);
    }
    if (is_placed(p.placement)) {
      find_places(work, first_tile);
      find_places(work, first_tile + 1);
      __syncthreads();
    }
    load_keys(work, first_tile);
    if (Tile::kStages == 2) load_values(work, first_tile);
    cp_async_commit();
  }

  // What the loop needs now and then waits for it in shared memory: in registers it would leave no room to read
  // fragments ahead of their products, and found for every tile, it costs some thirty instructions.
  if (threadIdx.x == 0) shared_work = work;
  if (lane == 0) {
    const int warp_rows = min(Tile::kWarpRows, work.rows - warp_row);
    const KeyRange lowest =
        visible_keys<Terms>(p, work.kv_length, work.prefix, lowest_position<Terms>(p, work, warp_row));
    const KeyRange highest =
        visible_keys<Terms>(p, work.kv_length, work.prefix, work.position + warp_row + warp_rows - 1);
    WarpTiles tiles = {0, 0, 0, 0};
    if (warp_rows > 0 && highest.last >= lowest.first) {
      tiles.first = lowest.first / Tile::kKeys;
      tiles.end = highest.last / Tile::kKeys + 1;
      tiles.first_whole = (highest.first + Tile::kKeys - 1) / Tile::kKeys;
      tiles.end_whole = (lowest.last + 1) / Tile::kKeys;
      if (Terms && p.tree_parents != nullptr) tiles.end_whole = work.trunk / Tile::kKeys;
    }
    warp_tiles[warp] = tiles;
  }

  // Lane parts of the shared-memory offsets. Q as the first operand, K as the second, V as the second, transposed.
  const int query_offset = (warp_row + lane % 16) * Tile::kPitch;
  const int query_chunk = (lane / 16) ^ Tile::swizzle(lane % 16);
  const int key_offset = (lane % 8 + lane / 16 * 8) * Tile::kPitch;
  const int key_chunk = (lane / 8 % 2) ^ Tile::swizzle(lane % 8 + lane / 16 * 8);
  const int value_offset = lane % 16 * Tile::kPitch + warp_column * 2;
  const int value_chunk = (lane / 16) ^ Tile::swizzle(lane % 16);

  const float factor = p.soft_cap > 0.0f ? p.soft_cap * kLog2E : p.scale * kLog2E;

  float output[kRowBlocks][kColumnTiles][4] = {};
  float maximum[kRowBlocks][2];   // of score * factor, as of the last rescaling
  float sum[kRowBlocks][2] = {};  // of this lane's columns only
#pragma unroll
  for (int i = 0; i < kRowBlocks; ++i) maximum[i][0] = maximum[i][1] = -CUDART_INF_F;

  const BlockWork<T>& kept = Tile::kWorkInRegisters ? work : shared_work;
  for (int tile = first_tile; tile < end_tile; ++tile) {
    // What was asked for has landed, and nobody reads the places of the next copies any more.
    arrive();
    if constexpr (Tile::kStages == 1) {
      load_values(kept, tile);
    } else {
      load_keys(kept, tile + 1);
      load_values(kept, tile + 1);
      if (is_placed(p.placement)) find_places(kept, tile + 2);
    }
    cp_async_commit();

    const WarpTiles seen = warp_tiles[warp];
    const bool is_seen = tile >= seen.first && tile < seen.end;
    float score[kRowBlocks][kKeyTiles][4];
    const unsigned char* const value_tile = values + stage_of(tile);

    if (is_seen) {
      // S = Q . K^T.
#pragma unroll
      for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) score[i][n][e] = 0.0f;
        }
      }
      const unsigned char* const key_tile = keys + stage_of(tile);
#pragma unroll
      for (int k = 0; k < Tile::kHeadDim / 16; ++k) {
        uint32_t a[kRowBlocks][4];
#pragma unroll
        for (int i = 0; i < kRowBlocks; ++i) {
          ldmatrix_x4(a[i], shared + query_offset + i * 16 * Tile::kPitch + Tile::step(query_chunk, k));
        }
#pragma unroll
        for (int n = 0; n < kKeyTiles; n += 2) {
          uint32_t b[4];
          ldmatrix_x4(b, key_tile + key_offset + n * 8 * Tile::kPitch + Tile::step(key_chunk, k));
#pragma unroll
          for (int i = 0; i < kRowBlocks; ++i) {
            mma_m16n8k16<T>(score[i][n], a[i], b[0], b[1]);
            mma_m16n8k16<T>(score[i][n + 1], a[i], b[2], b[3]);
          }
        }
      }

      // Soft cap; its own scale is in `factor`.
      if (p.soft_cap > 0.0f) {
        const float cap_factor = p.scale / p.soft_cap;
#pragma unroll
        for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
          for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) score[i][n][e] = tanh_fast(score[i][n][e] * cap_factor);
          }
        }
      }

      // ALiBi, divided by what multiplies scores. Distances are sums of floats, exact below 2^24: 900 us where 913 were
      // taken with each converted from an integer (4 x 4,096 tokens, causal, 16 heads of 128, one H200).
      if (Terms && p.slopes != nullptr) {
        const float slope = slope_of(p.slopes, block.head) / factor;
        const float nearest = static_cast<float>(kept.position + warp_row + group - tile * Tile::kKeys - quad * 2);
#pragma unroll
        for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
          for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const float distance = nearest + static_cast<float>(i * 16 + e / 2 * 8 - n * 8 - e % 2);
              score[i][n][e] = fmaf(-slope, fabsf(distance), score[i][n][e]);
            }
          }
        }
      }

      // Mask, on the tiles that some row of the warp sees in part.
      if (tile < seen.first_whole || tile >= seen.end_whole) {
        const int tile_key = tile * Tile::kKeys;
#pragma unroll
        for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int row = warp_row + i * 16 + half * 8 + group;
            KeyRange range = visible_keys<Terms>(p, kept.kv_length, kept.prefix, kept.position + row);
            if (Terms && p.tree_parents != nullptr && row < kept.rows) {
              const uint64_t seen = tree_ancestors(kept.parents, kept.position - kept.trunk + row);
              range.first = visible_keys<Terms>(p, kept.kv_length, 0, kept.trunk + __popcll(seen) - 1).first;
              const int in_tree = tile_key + quad * 2 - kept.trunk;
#pragma unroll
              for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                  const int other = in_tree + n * 8 + e;
                  if (other >= 0 && other < kMaxTreeRows && (seen >> other & 1u) == 0) {
                    score[i][n][half * 2 + e] = -CUDART_INF_F;
                  }
                }
              }
            }
            const int first = range.first - tile_key - quad * 2;
            const int last = range.last - tile_key - quad * 2;
#pragma unroll
            for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                if (n * 8 + e < first || n * 8 + e > last) score[i][n][half * 2 + e] = -CUDART_INF_F;
              }
            }
          }
        }
      }

      // Raise the maxima and rescale, if any row of the warp needs it.
      float peak[kRowBlocks][2];
      bool raise = false;
#pragma unroll
      for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float most = fmaxf(score[i][0][half * 2], score[i][0][half * 2 + 1]);
#pragma unroll
          for (int n = 1; n < kKeyTiles; ++n) {
            most = fmaxf(most, fmaxf(score[i][n][half * 2], score[i][n][half * 2 + 1]));
          }
          peak[i][half] = most * factor;
          raise |= peak[i][half] > maximum[i][half] + kRescaleThreshold;
        }
      }
      if (__any_sync(0xffffffffu, raise)) {
#pragma unroll
        for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float most = fmaxf(peak[i][half], __shfl_xor_sync(0xffffffffu, peak[i][half], 1));
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
            most = fmaxf(most, maximum[i][half]);
            const float rescale = exp2_fast(maximum[i][half] - exponent_base(most));
            maximum[i][half] = most;
            sum[i][half] *= rescale;
#pragma unroll
            for (int n = 0; n < kColumnTiles; ++n) {
              output[i][n][half * 2] *= rescale;
              output[i][n][half * 2 + 1] *= rescale;
            }
          }
        }
      }
    }

    if constexpr (Tile::kStages == 1) {
      arrive();
      load_keys(kept, tile + 1);
      if (is_placed(p.placement)) find_places(kept, tile + 2);
      cp_async_commit();
    }

    // P = 2^(S * factor - m), 16 keys at a time and rounded: the accumulator layout of S is the operand layout of P.
    // O += P . V.
    if (is_seen) {
      float base[kRowBlocks][2];
#pragma unroll
      for (int i = 0; i < kRowBlocks; ++i) {
        base[i][0] = exponent_base(maximum[i][0]);
        base[i][1] = exponent_base(maximum[i][1]);
      }
#pragma unroll
      for (int k = 0; k < Tile::kKeys / 16; ++k) {
        uint32_t a[kRowBlocks][4];
#pragma unroll
        for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
              const float p0 = exp2_fast(fmaf(score[i][2 * k + n][half * 2], factor, -base[i][half]));
              const float p1 = exp2_fast(fmaf(score[i][2 * k + n][half * 2 + 1], factor, -base[i][half]));
              sum[i][half] += p0 + p1;
              a[i][2 * n + half] = pack_pair<T>(p0, p1);
            }
          }
        }
#pragma unroll
        for (int n = 0; n < kColumnTiles; n += 2) {
          uint32_t b[4];
          ldmatrix_x4_trans(b, value_tile + value_offset + k * 16 * Tile::kPitch + Tile::step(value_chunk, n / 2));
#pragma unroll
          for (int i = 0; i < kRowBlocks; ++i) {
            mma_m16n8k16<T>(output[i][n], a[i], b[0], b[1]);
            mma_m16n8k16<T>(output[i][n + 1], a[i], b[2], b[3]);
          }
        }
      }
    }
  }

  // Normalise.
#pragma unroll
  for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = sum[i][half] + __shfl_xor_sync(0xffffffffu, sum[i][half], 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      const RowEnd end = row_end(maximum[i][half], total, Terms ? p.sinks : nullptr, block.head);
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        output[i][n][half * 2] *= end.inverse;
        output[i][n][half * 2 + 1] *= end.inverse;
      }
      const int row = warp_row + i * 16 + half * 8 + group;
      if (p.lse != nullptr && warp_column == 0 && quad == 0 && row < work.rows) {
        p.lse[lse_offset(p, sequence, block, row)] = end.lse;
      }
    }
  }

  const int64_t output_start = output_offset(p, sequence, block);
  if (p.output_dtype == NVB_F32) {
    // Store f32 from the registers: a quad writes one 32-byte sector.
    float* destination = static_cast<float*>(p.output) + output_start;
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_row + i * 16 + half * 8 + group;
        if (row >= work.rows) continue;
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n) {
          const int column = warp_column + n * 8;
          if (column >= p.head_dim) continue;
          *reinterpret_cast<float2*>(destination + row * p.output_token_stride + column + quad * 2) =
              make_float2(output[i][n][half * 2], output[i][n][half * 2 + 1]);
        }
      }
    }
  } else {
    // Store 16-bit through the shared memory of Q, for 16-byte rows. All copies have landed and all reads are done.
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_row + i * 16 + half * 8 + group;
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n) {
          *reinterpret_cast<uint32_t*>(shared + Tile::offset(row, warp_column / 8 + n) + quad * 4) =
              pack_pair<T>(output[i][n][half * 2], output[i][n][half * 2 + 1]);
        }
      }
    }
    __syncwarp();
    T* destination = static_cast<T*>(p.output) + output_start;
    constexpr int kChunks = Tile::kColumns / 8;
#pragma unroll
    for (int i = 0; i < Tile::kWarpRows * kChunks / 32; ++i) {
      const int row = warp_row + (i * 32 + lane) / kChunks;
      const int chunk = warp_column / 8 + (i * 32 + lane) % kChunks;
      if (row < work.rows && chunk * 8 < p.head_dim) {
        store16(destination + row * p.output_token_stride + chunk * 8, load16(shared + Tile::offset(row, chunk)));
      }
    }
  }
#else
  __trap();  // a library built for 7.5 alone, on a newer device: the launcher chose by the device
#endif
}

// Calls `use` with the tile for a head dimension (to 512) and a class of shared memory. Those for 8.0 were measured
// (docs/attention.md); those for less shared memory let two blocks share a multiprocessor, or are the largest that fit.
template <typename T, typename Use>
auto with_prefill_tile(int head_dim, SharedClass shared, const Use& use) {
  if (head_dim <= 64) {
    if (shared == SharedClass::kSmall) return use(PrefillTile<T, 64, 128, 64, 32, 1, 2, 2>());
    return use(PrefillTile<T, 64, 128, 128, 32, 1, 2, 2>());
  }
  if (head_dim <= 96) return use(PrefillTile<T, 96, 128, 64, 32, 1, 1, 2>());
  if (head_dim <= 128) {
    if (shared == SharedClass::kSmall) return use(PrefillTile<T, 128, 128, 32, 32, 1, 1, 2>());
    return use(PrefillTile<T, 128, 128, 48, 32, 1, 2, 2>());
  }
  if (head_dim <= 256) {
    if (shared == SharedClass::kSmall) return use(PrefillTile<T, 256, 64, 64, 16, 1, 1, 1>());
    return use(PrefillTile<T, 256, 128, 64, 16, 1, 1, 1>());
  }
  if (shared == SharedClass::kLarge) return use(PrefillTile<T, 512, 64, 32, 16, 2, 2, 1>());
  return use(PrefillTile<T, 512, 32, 16, 16, 2, 2, 1>());
}

template <typename Tile>
cudaError_t launch_prefill_tile(const PrefillArguments& arguments, int blocks, cudaStream_t stream) {
  const auto kernel = has_terms(arguments.params) ? attention_prefill_mma_kernel<Tile, true>
                                                  : attention_prefill_mma_kernel<Tile, false>;
  // Without places two blocks of 80 KiB fit a multiprocessor of capability 8.0.
  const nvb_kv_placement& placement = arguments.params.placement;
  const bool placed = placement.pages != nullptr || placement.ring_tokens > 0;
  const int bytes = Tile::kSharedBytes + (placed ? Tile::kPlaceBytes : 0);
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes + Tile::kPlaceBytes);
  if (status != cudaSuccess) return status;
  PrefillArguments divided = arguments;
  const dim3 grid = divide_prefill(divided, Tile::kRows, blocks);
  kernel<<<grid, Tile::kThreads, bytes, stream>>>(divided);
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch_prefill_mma(const PrefillArguments& arguments, SharedClass shared, int blocks, cudaStream_t stream) {
  return with_prefill_tile<T>(arguments.params.head_dim, shared, [&](auto tile) {
    return launch_prefill_tile<decltype(tile)>(arguments, blocks, stream);
  });
}

}  // namespace nvb
