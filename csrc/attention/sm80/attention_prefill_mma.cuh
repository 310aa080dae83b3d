// Prefill attention on tensor cores, capability 8.0 and later: FlashAttention-2 (Dao, arXiv:2307.08691) with mma.sync.
//
//   S = Q . K^T (registers)   m = max(m, S)   P = 2^(S * factor - m)   l += sum(P)   O = O * 2^(old m - m) + P . V
//
// Shapes and alignment: attention.h. One block takes kRows query rows of one head and walks the keys that they see in
// tiles of kKeys, left to right; the tile of the next step is on its way by cp.async while this one is multiplied. A
// warp owns kWarpRows rows and kColumns output columns; with kColumnWarps = 2 two warps share rows, each computing S
// for itself, because 512 columns of O do not fit the registers of one.
//
// Shared memory: kRows * kHeadDim of Q, and 2 stages of kKeys * kHeadDim of K and of V, 16-bit. Registers a thread:
// O = kWarpRows * kColumns / 32, S = kWarpRows * kKeys / 32, fragments of Q, K and V 12 to 16.
//
// The dtype of P is that of V; sums and maxima are f32. A row's maximum is kept stale while scores pass it by less than
// 2^kRescaleThreshold, so the rescaling of O is skipped for almost every tile.
#pragma once

#include "../../common/kv_placement.cuh"
#include "../../common/mma.cuh"
#include "../../common/vector.cuh"
#include "../attention_prefill.cuh"
#include "../softmax.cuh"

namespace nvb {

template <typename Element, int HeadDim, int Rows, int Keys, int WarpRows, int ColumnWarps>
struct PrefillTile {
  using T = Element;
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kRows = Rows;
  static constexpr int kKeys = Keys;
  static constexpr int kWarpRows = WarpRows;
  static constexpr int kRowWarps = Rows / WarpRows;
  static constexpr int kColumnWarps = ColumnWarps;
  static constexpr int kColumns = HeadDim / ColumnWarps;
  static constexpr int kThreads = 32 * kRowWarps * ColumnWarps;
  static constexpr int kRowBlocks = WarpRows / 16;
  static constexpr int kPitch = 2 * HeadDim;  // bytes of a row in shared memory
  static constexpr int kQueryBytes = Rows * kPitch;
  static constexpr int kTileBytes = Keys * kPitch;
  static constexpr int kSharedBytes = kQueryBytes + 4 * kTileBytes;
  // Blocks a multiprocessor, so that one multiplies while another exponentiates; registers are the limit.
  static constexpr int kBlocks = kThreads > 128 ? 1 : 2;

  // The 16-byte chunks of a row are permuted by its number, so that the 8 rows which ldmatrix reads at one column lie
  // in 8 different bank groups. Rows of 32 * odd elements alternate between two halves of the banks already.
  static constexpr int kSwizzleMask = HeadDim % 64 == 0 ? 7 : 3;
  static constexpr int kSwizzleShift = HeadDim % 64 == 0 ? 0 : 1;
  static __device__ __forceinline__ int swizzle(int row) { return (row >> kSwizzleShift) & kSwizzleMask; }
  static __device__ __forceinline__ int offset(int row, int chunk) {
    return row * kPitch + ((chunk ^ swizzle(row)) << 4);
  }
  // The part of an offset that a step of two chunks adds, for a lane that starts at chunk 0 or 1 of its row.
  static __device__ __forceinline__ int step(int lane_chunk, int step) {
    return ((((2 * step) & kSwizzleMask) ^ lane_chunk) << 4) + (((2 * step) & ~kSwizzleMask) << 4);
  }

  static_assert(HeadDim % 32 == 0, "the swizzle knows rows of whole or half multiples of 128 bytes");
  static_assert(WarpRows % 16 == 0 && Rows % WarpRows == 0, "warps own whole mma row blocks");
  static_assert(Keys <= kThreads, "a thread finds the place of a key");
  static_assert(Keys % 16 == 0, "P is the first operand of mma in steps of 16 keys");
  static_assert(ColumnWarps == 1 || (HeadDim / ColumnWarps) % 64 == 0, "a warp's columns start a swizzle period");
};

// Copies `Rows` rows of a tensor into shared memory; rows at or past `valid_rows` and columns at or past `head_dim`
// become zero without being read. `global` is row 0 and must be readable if anything is.
template <typename Tile, int Rows>
__device__ __forceinline__ void load_tile(unsigned char* shared, const typename Tile::T* global, int64_t stride,
                                          int valid_rows, int head_dim) {
  constexpr int kChunks = Tile::kHeadDim / 8;
  static_assert(Rows * kChunks % Tile::kThreads == 0, "every thread copies as many chunks");
#pragma unroll
  for (int i = 0; i < Rows * kChunks / Tile::kThreads; ++i) {
    const int index = i * Tile::kThreads + static_cast<int>(threadIdx.x);
    const int row = index / kChunks;
    const int chunk = index % kChunks;
    const bool valid = row < valid_rows && chunk * 8 < head_dim;
    const typename Tile::T* source = global + row * stride + chunk * 8;
    cp_async16(shared + Tile::offset(row, chunk), valid ? source : global, valid);
  }
}

// Copies rows of a KV cache, of which `places` say where they lie; what is nowhere becomes zero. Unrolled in full, the
// addresses would cost the registers that the accumulators leave.
template <typename Tile>
__device__ __forceinline__ void load_placed(unsigned char* shared, const typename Tile::T* global,
                                            const nvb_kv_placement& placement, const uint32_t* places, int64_t stride,
                                            int head_dim) {
  constexpr int kChunks = Tile::kHeadDim / 8;
#pragma unroll 2
  for (int i = 0; i < Tile::kKeys * kChunks / Tile::kThreads; ++i) {
    const int index = i * Tile::kThreads + static_cast<int>(threadIdx.x);
    const int row = index / kChunks;
    const int chunk = index % kChunks;
    const uint32_t place = places[row];
    const bool valid = place != kNoRow && chunk * 8 < head_dim;
    const typename Tile::T* source = global + kv_offset(placement.block_stride, place, stride) + chunk * 8;
    cp_async16(shared + Tile::offset(row, chunk), valid ? source : global, valid);
  }
}

// Loads a tile of F32 queries and rounds it to T.
template <typename Tile>
__device__ __forceinline__ void load_rounded(unsigned char* shared, const float* global, int64_t stride, int valid_rows,
                                             int head_dim) {
  constexpr int kChunks = Tile::kHeadDim / 8;
#pragma unroll 4
  for (int index = threadIdx.x; index < Tile::kRows * kChunks; index += Tile::kThreads) {
    const int row = index / kChunks;
    const int chunk = index % kChunks;
    float values[8] = {};
    if (row < valid_rows && chunk * 8 < head_dim) {
      const float4* source = reinterpret_cast<const float4*>(global + row * stride + chunk * 8);
      const float4 low = source[0];
      const float4 high = source[1];
      values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
      values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
    }
    store16(shared + Tile::offset(row, chunk), pack16<typename Tile::T>(values));
  }
}

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    attention_prefill_mma_kernel(const __grid_constant__ PrefillArguments arguments) {
#if __CUDA_ARCH__ >= 800
  using T = typename Tile::T;
  constexpr int kRowBlocks = Tile::kRowBlocks;
  constexpr int kKeyTiles = Tile::kKeys / 8;
  constexpr int kColumnTiles = Tile::kColumns / 8;
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ uint32_t places[2][Tile::kKeys];  // of the next tiles' keys, in rings and pages

  // Which rows, and which keys they see.
  const nvb_attention_prefill_params& p = arguments.params;
  const PrefillBlock block = find_prefill_block(arguments, blockIdx.x, Tile::kRows);
  if (block.sequence < 0) return;
  const nvb_attention_sequence sequence = prefill_sequence(p, block.sequence);
  const int rows = min(Tile::kRows, sequence.query_count - block.first_row);
  const int position = sequence.kv_length - sequence.query_count + block.first_row;  // of the tile's first row
  const int first_key = visible_keys(position, sequence.kv_length, p.causal, p.window).first;
  const int last_key = visible_keys(position + rows - 1, sequence.kv_length, p.causal, p.window).last;
  const int first_tile = first_key / Tile::kKeys;
  const int end_tile = last_key < first_key ? first_tile : last_key / Tile::kKeys + 1;

  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warp_row = warp % Tile::kRowWarps * Tile::kWarpRows;
  const int warp_column = warp / Tile::kRowWarps * Tile::kColumns;
  const int group = lane / 4;
  const int quad = lane % 4;

  // Copy Q and the first tile of K and V.
  const int kv_head = block.head / (p.query_heads / p.kv_heads);
  const int64_t query_start = query_offset(p, sequence, block);
  const int kv_start = p.placement.pages != nullptr ? 0 : sequence.kv_start;
  const T* key = static_cast<const T*>(p.key) + kv_start * p.key_sequence_stride + kv_head * p.key_head_stride;
  const T* value = static_cast<const T*>(p.value) + kv_start * p.value_sequence_stride + kv_head * p.value_head_stride;
  unsigned char* const stages = shared + Tile::kQueryBytes;
  // The table is read two tiles ahead and the barrier of the tile between makes it known. Keys before the first visible
  // one may have no page any more. The empty statement keeps what is found here out of the registers between tiles.
  const auto find_places = [&](int tile) {
    if (static_cast<int>(threadIdx.x) >= Tile::kKeys || tile >= end_tile) return;
    int first_position = position;
    asm volatile("" : "+r"(first_position));
    const int token = tile * Tile::kKeys + static_cast<int>(threadIdx.x);
    const bool visible = token >= visible_keys(first_position, sequence.kv_length, p.causal, p.window).first &&
                         token <= visible_keys(first_position + rows - 1, sequence.kv_length, p.causal, p.window).last;
    places[tile % 2][threadIdx.x] = visible ? kv_row(p.placement, page_row(p, sequence), token) : kNoRow;
  };
  const auto load_keys = [&](int tile) {
    unsigned char* stage = stages + tile % 2 * (2 * Tile::kTileBytes);
    if (is_placed(p.placement)) {
      const uint32_t* const rows = places[tile % 2];
      load_placed<Tile>(stage, key, p.placement, rows, p.key_token_stride, p.head_dim);
      load_placed<Tile>(stage + Tile::kTileBytes, value, p.placement, rows, p.value_token_stride, p.head_dim);
      cp_async_commit();
      return;
    }
    const int64_t row = static_cast<int64_t>(tile) * Tile::kKeys;
    const int valid = last_key + 1 - tile * Tile::kKeys;
    load_tile<Tile, Tile::kKeys>(stage, key + row * p.key_token_stride, p.key_token_stride, valid, p.head_dim);
    load_tile<Tile, Tile::kKeys>(stage + Tile::kTileBytes, value + row * p.value_token_stride, p.value_token_stride,
                                 valid, p.head_dim);
    cp_async_commit();
  };
  if (first_tile < end_tile) {
    if (p.query_dtype == NVB_F32) {
      load_rounded<Tile>(shared, static_cast<const float*>(p.query) + query_start, p.query_token_stride, rows,
                         p.head_dim);
    } else {
      load_tile<Tile, Tile::kRows>(shared, static_cast<const T*>(p.query) + query_start, p.query_token_stride, rows,
                                   p.head_dim);
    }
    if (is_placed(p.placement)) {
      find_places(first_tile);
      find_places(first_tile + 1);
      __syncthreads();
    }
    load_keys(first_tile);
  }

  const int warp_rows = min(Tile::kWarpRows, rows - warp_row);

  // Lane parts of the shared-memory offsets. Q as the first operand, K as the second, V as the second, transposed.
  const int query_offset = (warp_row + lane % 16) * Tile::kPitch;
  const int query_chunk = (lane / 16) ^ Tile::swizzle(lane % 16);
  const int key_offset = (lane % 8 + lane / 16 * 8) * Tile::kPitch;
  const int key_chunk = (lane / 8 % 2) ^ Tile::swizzle(lane % 8 + lane / 16 * 8);
  const int value_offset = lane % 16 * Tile::kPitch + warp_column * 2;
  const int value_chunk = (lane / 16) ^ Tile::swizzle(lane % 16);

  const float factor = p.soft_cap > 0.0f ? p.soft_cap * kLog2E : p.scale * kLog2E;
  const float cap_factor = p.soft_cap > 0.0f ? p.scale / p.soft_cap : 0.0f;

  float output[kRowBlocks][kColumnTiles][4] = {};
  float maximum[kRowBlocks][2];   // of score * factor, as of the last rescaling
  float sum[kRowBlocks][2] = {};  // of this lane's columns only
#pragma unroll
  for (int i = 0; i < kRowBlocks; ++i) maximum[i][0] = maximum[i][1] = -CUDART_INF_F;

  for (int tile = first_tile; tile < end_tile; ++tile) {
    // This tile has landed, and nobody reads the other stage any more: start the next copy.
    cp_async_wait<0>();
    __syncthreads();
    if (tile + 1 < end_tile) load_keys(tile + 1);
    if (is_placed(p.placement)) find_places(tile + 2);

    // The warp's rows see keys of [lowest.first, highest.last]; all of them see [highest.first, lowest.last]. The empty
    // statement makes the compiler find these again for every tile: kept over the loop, they spill at 128 columns.
    int warp_position = position + warp_row;
    asm volatile("" : "+r"(warp_position));
    const KeyRange lowest = visible_keys(warp_position, sequence.kv_length, p.causal, p.window);
    const KeyRange highest = visible_keys(warp_position + warp_rows - 1, sequence.kv_length, p.causal, p.window);
    const int tile_key = tile * Tile::kKeys;
    if (warp_rows <= 0 || tile_key > highest.last || tile_key + Tile::kKeys <= lowest.first) continue;
    const unsigned char* const key_tile = stages + tile % 2 * (2 * Tile::kTileBytes);
    const unsigned char* const value_tile = key_tile + Tile::kTileBytes;

    // S = Q . K^T.
    float score[kRowBlocks][kKeyTiles][4] = {};
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
#pragma unroll
      for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) score[i][n][e] = tanh_fast(score[i][n][e] * cap_factor);
        }
      }
    }

    // Mask, on the tiles that some row of the warp sees in part.
    if (tile_key + Tile::kKeys - 1 > lowest.last || tile_key < highest.first) {
#pragma unroll
      for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const KeyRange range =
              visible_keys(warp_position + i * 16 + half * 8 + group, sequence.kv_length, p.causal, p.window);
#pragma unroll
          for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int column = tile_key + n * 8 + quad * 2 + e;
              if (column < range.first || column > range.last) score[i][n][half * 2 + e] = -CUDART_INF_F;
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

    // P = 2^(S * factor - m), 16 keys at a time and rounded: the accumulator layout of S is the operand layout of P.
    // O += P . V.
#pragma unroll
    for (int k = 0; k < Tile::kKeys / 16; ++k) {
      uint32_t a[kRowBlocks][4];
#pragma unroll
      for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float base = exponent_base(maximum[i][half]);
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            const float p0 = exp2_fast(fmaf(score[i][2 * k + n][half * 2], factor, -base));
            const float p1 = exp2_fast(fmaf(score[i][2 * k + n][half * 2 + 1], factor, -base));
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

  // Normalise. An empty row has sum 0; a NaN stays NaN.
#pragma unroll
  for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = sum[i][half] + __shfl_xor_sync(0xffffffffu, sum[i][half], 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        output[i][n][half * 2] *= inverse;
        output[i][n][half * 2 + 1] *= inverse;
      }
      const int row = warp_row + i * 16 + half * 8 + group;
      if (p.lse != nullptr && warp_column == 0 && quad == 0 && row < rows) {
        p.lse[lse_offset(p, sequence, block, row)] =
            total == 0.0f ? -CUDART_INF_F : maximum[i][half] * kLn2 + logf(total);
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
        if (row >= rows) continue;
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
      if (row < rows && chunk * 8 < p.head_dim) {
        store16(destination + row * p.output_token_stride + chunk * 8, load16(shared + Tile::offset(row, chunk)));
      }
    }
  }
#else
  __trap();  // a library built for 7.5 alone, on a newer device: the launcher chose by the device
#endif
}

// Calls `use` with the tile for a head dimension (to 512) and a class of shared memory. The sizes follow
// FlashAttention-2's for capability 8.0 where they fit with both stages.
template <typename T, typename Use>
auto with_prefill_tile(int head_dim, SharedClass shared, const Use& use) {
  if (head_dim <= 64) return use(PrefillTile<T, 64, 128, 64, 32, 1>());
  if (head_dim <= 96) return use(PrefillTile<T, 96, 128, 64, 32, 1>());
  if (head_dim <= 128) {
    if (shared == SharedClass::kLarge) return use(PrefillTile<T, 128, 128, 64, 32, 1>());
    return use(PrefillTile<T, 128, 128, 32, 32, 1>());
  }
  if (head_dim <= 256) {
    if (shared == SharedClass::kLarge) return use(PrefillTile<T, 256, 128, 64, 16, 1>());
    if (shared == SharedClass::kMedium) return use(PrefillTile<T, 256, 128, 32, 16, 1>());
    return use(PrefillTile<T, 256, 64, 32, 16, 1>());
  }
  if (shared == SharedClass::kLarge) return use(PrefillTile<T, 512, 64, 32, 16, 2>());
  return use(PrefillTile<T, 512, 32, 16, 16, 2>());
}

template <typename Tile>
cudaError_t launch_prefill_tile(const PrefillArguments& arguments, int blocks, cudaStream_t stream) {
  const auto kernel = attention_prefill_mma_kernel<Tile>;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes);
  if (status != cudaSuccess) return status;
  kernel<<<blocks, Tile::kThreads, Tile::kSharedBytes, stream>>>(arguments);
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch_prefill_mma(const PrefillArguments& arguments, SharedClass shared, int blocks, cudaStream_t stream) {
  return with_prefill_tile<T>(arguments.params.head_dim, shared, [&](auto tile) {
    return launch_prefill_tile<decltype(tile)>(arguments, blocks, stream);
  });
}

}  // namespace nvb
