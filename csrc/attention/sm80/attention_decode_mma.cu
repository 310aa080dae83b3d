// Decode attention on tensor cores, capability 8.0 and later, for F16 and BF16 caches: all query
// heads of all rows that meet a KV head in one block, up to 16 (attention.h calls them items), so that every key and
// value is read once. The formula is that of attention.h.
//
// A warp walks its tiles of 16 keys alone, through a ring of stages of its own that cp.async fills: the warps of a
// block meet only at the end. With g, t = lane / 4, lane % 4 (mma.cuh shows the fragments):
//
//   S [16 x 16 keys] = Q . K^T     row g is head g with the high half of each q, row g + 8 the same head with the rest:
//                                  q = high + rest to about 2^-16, and the two rows add up to the score
//   O^T [columns x 8 heads] = V^T . P^T    S has the layout that P^T wants as second operand; P is split as Q is
//
// so 16-bit products give scores and outputs of nearly f32 accuracy at no cost in memory traffic, which is what decode
// is made of: 4 bytes move for each (key, column) of 16-bit K and V, against 2 multiplications a head.
//
// Shared memory: a warp's ring of kStages * 2 * 16 * kHeadDim * 2 bytes, and Q as ready fragments, kHeadDim * 32 bytes
// for every 8 heads. Registers a thread: O = kHeadTiles * kHeadDim / 4.
#include <algorithm>

#include "../../common/mma.cuh"
#include "../attention_decode.cuh"

namespace nvb {

static_assert(kDecodeMmaKeys == 16, "one step of the second mma takes 16 keys");

template <int HeadDim, int HeadTiles,
          int Stages = HeadDim <= 64    ? 4
                       : HeadDim <= 256 ? 3
                                        : 2>
struct DecodeTile {
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kHeadTiles = HeadTiles;  // of 8 heads
  static constexpr int kStages = Stages;
  static constexpr int kPitch = 2 * HeadDim;
  static constexpr int kTileBytes = kDecodeMmaKeys * kPitch;
  static constexpr int kRingBytes = kStages * 2 * kTileBytes;
  static constexpr int kQueryBytes = HeadTiles * HeadDim / 16 * 32 * 16;
  static constexpr int kOutputPitch = HeadDim + 4;  // floats; spreads the heads of a fragment over the banks
  static_assert(HeadDim % 64 == 0, "a row is a multiple of 128 bytes, the period of the swizzle");
  static_assert(8 * HeadTiles * kOutputPitch * 4 <= kRingBytes, "a warp's output takes the place of its ring");
  static constexpr int shared_bytes(int warps) { return kQueryBytes + warps * kRingBytes; }
};

namespace {

constexpr int kMaxWarps = 4;
constexpr int kKeys = kDecodeMmaKeys;

// value = high + rest, each a 16-bit T.
template <typename T>
__device__ __forceinline__ void split_pair(float first, float second, uint32_t& high, uint32_t& rest) {
  high = pack_pair<T>(first, second);
  const float2 rounded = unpack_pair<T>(high);
  rest = pack_pair<T>(first - rounded.x, second - rounded.y);
}

template <typename T, typename Tile>
__global__ void __launch_bounds__(32 * kMaxWarps)
    attention_decode_mma_kernel(const __grid_constant__ DecodeArguments arguments) {
#if __CUDA_ARCH__ >= 800
  constexpr int kHeadTiles = Tile::kHeadTiles;
  constexpr int kSteps = Tile::kHeadDim / 16;
  constexpr int kChunks = Tile::kHeadDim / 8;
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ float part_maximum[kGroup * kMaxHeadsPerBlock];
  __shared__ float part_sum[kGroup * kMaxHeadsPerBlock];
  __shared__ float2 total[kMaxHeadsPerBlock];

  allow_next_grid();
  // What nothing writes is loaded before the grids before have ended: the first tiles of keys and values, but for the
  // token that the sequence has appended.
  const nvb_attention_decode_params& p = arguments.params;
  bool waits = true;
  const auto wait_once = [&] {
    if (waits) wait_for_previous_grid();
    waits = false;
  };
  if ((arguments.constant & NVB_CONSTANT_POSITIONS) == 0) wait_once();

  // Which keys.
  const int warps = blockDim.x / 32;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int group = lane / 4;
  const int quad = lane % 4;
  const DecodeBlock block = find_decode_block<kKeys>(arguments, warps);
  if (block.split >= block.splits) {
    wait_once();
    return;
  }
  const int tiles = (block.end - block.begin + kKeys - 1) / kKeys;  // of the block; the warp takes every warps-th

  // Start the warp's first copies.
  const T* key = static_cast<const T*>(p.key) + sequence_offset(p, block, p.key_sequence_stride) +
                 block.kv_head * p.key_head_stride;
  const T* value = static_cast<const T*>(p.value) + sequence_offset(p, block, p.value_sequence_stride) +
                   block.kv_head * p.value_head_stride;
  // In rings and pages each of the first 16 lanes knows the row of a key of the tile that is loaded next: the table is
  // read a tile ahead, so that no copy waits for it.
  const bool placed = is_placed(p.placement);
  const auto find_row = [&](int tile) {
    const int token = block.begin + tile * kKeys + lane % kKeys;
    return placed && token < block.end ? kv_row(p.placement, page_row(p, block), token) : kNoRow;
  };
  uint32_t next_row = find_row(warp);
  unsigned char* const ring = shared + Tile::kQueryBytes + warp * Tile::kRingBytes;
  const auto load = [&](int tile, int stage) {
    if (tile < tiles) {
      unsigned char* const key_tile = ring + stage * (2 * Tile::kTileBytes);
      const int first = block.begin + tile * kKeys;
      if (placed) {
        const uint32_t own_row = next_row;
        next_row = find_row(tile + warps);
#pragma unroll
        for (int i = 0; i < kKeys * kChunks / 32; ++i) {
          const int row = (i * 32 + lane) / kChunks;
          const int chunk = (i * 32 + lane) % kChunks;
          const uint32_t source = __shfl_sync(0xffffffffu, own_row, row);
          const bool valid = source != kNoRow && chunk * 8 < p.head_dim;
          const int64_t from = valid ? kv_offset(p.placement.block_stride, source, p.key_token_stride) + chunk * 8 : 0;
          const int offset = row * Tile::kPitch + ((chunk ^ (row % 8)) << 4);
          cp_async16(key_tile + offset, key + from, valid);
          cp_async16(key_tile + Tile::kTileBytes + offset, value + from, valid);
        }
        cp_async_commit();
        return;
      }
#pragma unroll
      for (int i = 0; i < kKeys * kChunks / 32; ++i) {
        const int row = (i * 32 + lane) / kChunks;
        const int chunk = (i * 32 + lane) % kChunks;
        const bool valid = first + row < block.end && chunk * 8 < p.head_dim;
        // Keys past the end are zero, not read: stale rows of the cache may hold NaN.
        const int64_t token = valid ? first + row : first;
        const int column = valid ? chunk * 8 : 0;
        const int offset = row * Tile::kPitch + ((chunk ^ (row % 8)) << 4);
        cp_async16(key_tile + offset, key + token * p.key_token_stride + column, valid);
        cp_async16(key_tile + Tile::kTileBytes + offset, value + token * p.value_token_stride + column, valid);
      }
    }
    cp_async_commit();
  };
#pragma unroll
  for (int stage = 0; stage < Tile::kStages; ++stage) {
    const int tile = warp + stage * warps;
    const bool old = (arguments.constant & NVB_CONSTANT_OLDER_KEYS) != 0 && p.rows_per_sequence == 1 &&
                     block.begin + (tile + 1) * kKeys < block.end;
    if (!old && (arguments.constant & NVB_CONSTANT_KEYS) == 0) wait_once();
    load(tile, stage);
  }
  wait_once();

  // Q as fragments, while the copies are on their way: [head tile][step][lane] of {high, rest, high, rest}. A thread
  // loads all of a batch before it uses any, or the latency of every element would add up.
  uint4* const query_fragments = reinterpret_cast<uint4*>(shared);
  const auto stage_query = [&](auto element) {
    using Query = decltype(element);
    constexpr int kFragments = kHeadTiles * kSteps * 32, kBatch = 4;
    const Query* const query = static_cast<const Query*>(p.query);
    for (int first = threadIdx.x; first < kFragments; first += kBatch * blockDim.x) {
      Query raw[kBatch][4];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int index = first + i * blockDim.x;
        const int head = index / (kSteps * 32) * 8 + index % 32 / 4;
        const int column = index / 32 % kSteps * 16 + index % 4 * 2;
        const DecodeItem item = item_of(p, block, head);
        const int64_t start = item.row * p.query_token_stride + item.head * p.query_head_stride;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int at = column + e / 2 * 8 + e % 2;
          const bool inside = index < kFragments && head < block.heads && at < p.head_dim;
          raw[i][e] = inside ? query[start + at] : from_float<Query>(0.0f);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int index = first + i * blockDim.x;
        uint4 fragment;
        split_pair<T>(to_float(raw[i][0]), to_float(raw[i][1]), fragment.x, fragment.y);
        split_pair<T>(to_float(raw[i][2]), to_float(raw[i][3]), fragment.z, fragment.w);
        if (index < kFragments) query_fragments[index] = fragment;
      }
    }
  };
  if (p.query_dtype == NVB_F32) {
    stage_query(float());
  } else if (p.query_dtype == NVB_F16) {
    stage_query(__half());
  } else {
    stage_query(__nv_bfloat16());
  }
  __syncthreads();

  const int key_offset = (lane % 8 + lane / 16 * 8) * Tile::kPitch;
  const int chunk_start =
      lane / 8 % 2;  // K as second operand: rows by lane / 16; V transposed as first operand: the same
  const float factor = p.soft_cap > 0.0f ? p.soft_cap * kLog2E : p.scale * kLog2E;
  const float cap_factor = p.soft_cap > 0.0f ? p.scale / p.soft_cap : 0.0f;

  float output[kHeadTiles][kSteps][4] = {};  // columns 16 * step + g and + 8, heads 2 * t and + 1
  float maximum[kHeadTiles];                 // of head g, in powers of two, as of the last rescaling
  float sum[kHeadTiles] = {};                // of head g, this lane's keys only
  DecodeKeys visible[kHeadTiles];            // of head g
  ItemSlope slopes[kHeadTiles];
#pragma unroll
  for (int h = 0; h < kHeadTiles; ++h) {
    maximum[h] = -CUDART_INF_F;
    visible[h] = item_keys(p, block, h * 8 + group);
    slopes[h] = item_slope(p, block, h * 8 + group);
  }

  int stage = 0;
  for (int tile = warp; tile < tiles; tile += warps) {
    cp_async_wait<Tile::kStages - 1>();
    __syncwarp();
    const unsigned char* const key_tile = ring + stage * (2 * Tile::kTileBytes);
    const unsigned char* const value_tile = key_tile + Tile::kTileBytes;

    // S = Q . K^T, even and odd steps apart to shorten the chain of dependent products.
    float score[kHeadTiles][2][2][4] = {};
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t b[4];
      ldmatrix_x4(b, key_tile + key_offset + (((2 * k + chunk_start) ^ (lane % 8)) << 4));
#pragma unroll
      for (int h = 0; h < kHeadTiles; ++h) {
        const uint4 fragment = query_fragments[(h * kSteps + k) * 32 + lane];
        const uint32_t a[4] = {fragment.x, fragment.y, fragment.z, fragment.w};
        mma_m16n8k16<T>(score[h][k % 2][0], a, b[0], b[1]);
        mma_m16n8k16<T>(score[h][k % 2][1], a, b[2], b[3]);
      }
    }

    // Add the halves, scale, cap, mask: this lane has keys 2 * t, + 1, + 8, + 9 of head g.
    const int first = block.begin + tile * kKeys + 2 * quad;
    uint32_t high[kHeadTiles][2];
    uint32_t rest[kHeadTiles][2];
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
      float s[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[e] = (score[h][0][e / 2][e % 2] + score[h][1][e / 2][e % 2]) +
               (score[h][0][e / 2][e % 2 + 2] + score[h][1][e / 2][e % 2 + 2]);
        if (p.soft_cap > 0.0f) s[e] = tanh_fast(s[e] * cap_factor);
        const int token = first + e / 2 * 8 + e % 2;
        s[e] *= factor;
        if (p.slopes != nullptr) s[e] -= slopes[h].slope * fabsf(static_cast<float>(slopes[h].position - token));
        if (token < visible[h].begin || token >= visible[h].end) s[e] = -CUDART_INF_F;
      }

      // Raise the maximum and rescale, if any head of the tile needs it.
      const float peak = fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3]));
      if (__any_sync(0xffffffffu, peak > maximum[h] + kRescaleThreshold)) {
        float most = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        most = fmaxf(most, maximum[h]);
        const float rescale = exp2_fast(maximum[h] - exponent_base(most));
        maximum[h] = most;
        sum[h] *= rescale;
        const float rescale0 = __shfl_sync(0xffffffffu, rescale, 8 * quad);
        const float rescale1 = __shfl_sync(0xffffffffu, rescale, 8 * quad + 4);
#pragma unroll
        for (int m = 0; m < kSteps; ++m) {
          output[h][m][0] *= rescale0;
          output[h][m][1] *= rescale1;
          output[h][m][2] *= rescale0;
          output[h][m][3] *= rescale1;
        }
      }

      // P = 2^(S - m).
      const float base = exponent_base(maximum[h]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[e] = exp2_fast(s[e] - base);
        sum[h] += s[e];
      }
      split_pair<T>(s[0], s[1], high[h][0], rest[h][0]);
      split_pair<T>(s[2], s[3], high[h][1], rest[h][1]);
    }

    // O^T += V^T . P^T.
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      uint32_t a[4];
      ldmatrix_x4_trans(a, value_tile + key_offset + (((2 * m + chunk_start) ^ (lane % 8)) << 4));
#pragma unroll
      for (int h = 0; h < kHeadTiles; ++h) {
        mma_m16n8k16<T>(output[h][m], a, high[h][0], high[h][1]);
        mma_m16n8k16<T>(output[h][m], a, rest[h][0], rest[h][1]);
      }
    }

    // Refill the stage.
    __syncwarp();
    load(tile + Tile::kStages * warps, stage);
    stage = stage + 1 == Tile::kStages ? 0 : stage + 1;
  }

  // Leave the warp's result in the place of its ring, whose copies have all landed.
  cp_async_wait<0>();
  __syncwarp();
  float* const warp_output = reinterpret_cast<float*>(ring);
#pragma unroll
  for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        warp_output[(h * 8 + quad * 2 + e % 2) * Tile::kOutputPitch + m * 16 + e / 2 * 8 + group] = output[h][m][e];
      }
    }
    float all = sum[h] + __shfl_xor_sync(0xffffffffu, sum[h], 1);
    all += __shfl_xor_sync(0xffffffffu, all, 2);
    if (quad == 0) {
      part_maximum[warp * kMaxHeadsPerBlock + h * 8 + group] = maximum[h];
      part_sum[warp * kMaxHeadsPerBlock + h * 8 + group] = all;
    }
  }
  __syncthreads();
  const SplitResult result{reinterpret_cast<const float*>(shared + Tile::kQueryBytes),
                           Tile::kRingBytes / 4,
                           Tile::kOutputPitch,
                           warps,
                           part_maximum,
                           part_sum};
  epilogue_split(arguments, block, result, total);
#else
  __trap();  // a library built for 7.5 alone, on a newer device: the launcher chose by the device
#endif
}

// From here on two blocks of six stages of 64 columns find room. On an H200 they take 74.8 us where three blocks of
// four stages take 95.3 (128 sequences of 1,024 tokens, 32/8 heads), and 129 where those take 140 (64 of 4,096).
constexpr int kLargeSharedBytes = 2 * 100 * 1024;

// Calls `use` with the tile for a head dimension (to 512) and a number of heads in a block. 16 heads of 512 columns do
// not fit the registers.
template <typename Use>
auto with_decode_tile(int head_dim, int heads, const nvb_launch& launch, const Use& use) {
  const bool wide = heads > 8;
  if (head_dim <= 64 && launch.shared_bytes_per_block >= kLargeSharedBytes) {
    return wide ? use(DecodeTile<64, 2, 6>()) : use(DecodeTile<64, 1, 6>());
  }
  if (head_dim <= 64) return wide ? use(DecodeTile<64, 2>()) : use(DecodeTile<64, 1>());
  if (head_dim <= 128) return wide ? use(DecodeTile<128, 2>()) : use(DecodeTile<128, 1>());
  if (head_dim <= 256) return wide ? use(DecodeTile<256, 2>()) : use(DecodeTile<256, 1>());
  return use(DecodeTile<512, 1>());
}

template <typename Tile>
int warps_of(const nvb_launch& launch) {
  int warps = kMaxWarps;
  while (warps > 1 && Tile::shared_bytes(warps) + kDecodeStaticBytes > launch.shared_bytes_per_block) --warps;
  return warps;
}

int heads_per_block(const nvb_attention_decode_params& p) {
  return std::min(items_per_kv_head(p), p.head_dim <= 256 ? kMaxHeadsPerBlock : 8);
}

template <typename T, typename Tile>
cudaError_t launch_tile(const DecodeArguments& arguments, const nvb_launch& launch) {
  const auto kernel = attention_decode_mma_kernel<T, Tile>;
  const int warps = warps_of<Tile>(launch);
  const int shared_bytes = Tile::shared_bytes(warps);
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (status != cudaSuccess) return status;
  const nvb_attention_decode_params& p = arguments.params;
  const dim3 grid(p.splits, p.kv_heads * p.chunks, p.sequences);
  return launch_overlapped(kernel, grid, dim3(32 * warps), shared_bytes, &launch, arguments);
}

}  // namespace

bool supports_decode_mma(const nvb_attention_decode_params& p, const nvb_launch& launch,
                         nvb_attention_decode_shape& shape) {
  if (launch.capability < 80 || (p.kv_dtype != NVB_F16 && p.kv_dtype != NVB_BF16) || p.key_scale != nullptr ||
      p.value_scale != nullptr || p.head_dim % 8 != 0 || p.value_dim != p.head_dim || p.head_dim > 512 ||
      p.value_token_stride != p.key_token_stride || p.placement.value_block_stride != p.placement.block_stride ||
      p.placement.block_stride % 8 != 0 || !is_aligned16(p.key, p.key_sequence_stride, 2) ||
      !is_aligned16(p.key, p.key_head_stride, 2) || !is_aligned16(p.key, p.key_token_stride, 2) ||
      !is_aligned16(p.value, p.value_sequence_stride, 2) || !is_aligned16(p.value, p.value_head_stride, 2) ||
      !is_aligned16(p.value, p.value_token_stride, 2)) {
    return false;
  }
  shape = with_decode_tile(p.head_dim, heads_per_block(p), launch, [&](auto tile) {
    const int warps = warps_of<decltype(tile)>(launch);
    using Tile = decltype(tile);
    return nvb_attention_decode_shape{
        heads_per_block(p), kKeys, warps, 32 * warps, Tile::shared_bytes(warps) + kDecodeStaticBytes, 0, 0,
        Tile::kStages};
  });
  return true;
}

cudaError_t launch_decode_mma(const DecodeArguments& arguments, const nvb_launch& launch) {
  const nvb_attention_decode_params& p = arguments.params;
  return with_decode_tile(p.head_dim, heads_per_block(p), launch, [&](auto tile) {
    using Tile = decltype(tile);
    return p.kv_dtype == NVB_F16 ? launch_tile<__half, Tile>(arguments, launch)
                                 : launch_tile<__nv_bfloat16, Tile>(arguments, launch);
  });
}

}  // namespace nvb
