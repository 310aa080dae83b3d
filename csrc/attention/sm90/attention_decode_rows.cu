// Decode attention of compute capability 9.0 over rows with scales of their own: INT8, Q8_0 and Q4_0 of
// common/kv_row.cuh, heads of 128. The formula is that of attention.h, the parts of a sequence and their merge those of
// attention_decode.cuh.
//
// One warp brings tiles of 128 rows of keys and of values through a ring by bulk copies, which bring the scales too;
// eight warps take 16 of the keys each and meet at the end alone. A tile is eight copies of 16 consecutive tokens, each
// 16 bytes further from a multiple of 128, and the eight rows that ldmatrix reads at once are one of each copy, so that
// they lie in different banks.
//
//   S [16 x 16 keys] = Q . K^T, O^T [columns x 8 items] = V^T . P^T     as in ../sm80/attention_decode_mma.cu, q and p
//                                                                         as two BF16 each
//
// A scale belongs to a key, or to 32 elements of one: a score is the sum over blocks of (q . values) * scale, and a
// weight is multiplied by its value's scale before it is rounded, once for all columns or for each block of them.
//
// Budget: a row of INT8 and Q8_0 has 144 bytes and a stage 36 KiB, of which three fit half a multiprocessor's shared
// memory with up to 4 items; a row of Q4_0 has 80 bytes, a stage 20 KiB, and five fit. Two blocks of nine warps share a
// multiprocessor, with 112 registers a thread, 32 of them O. For a pair of elements of a key or a value a lane spends
// 3.5 instructions in INT8 and 3 in Q4_0, beside half a product.
#include <algorithm>

#include "../../common/bulk_copy.cuh"
#include "../../common/hopper.h"
#include "../../common/wgmma.cuh"
#include "../attention_decode_rows.h"
#include "attention_decode_rows_fragment.cuh"

namespace nvb {
namespace decode_rows {

template <uint32_t Dtype>
struct Tile {
  static constexpr uint32_t kDtype = Dtype;
  static constexpr int kHeadDim = 128;
  static constexpr int kWarps = 8;  // that multiply
  static constexpr int kThreads = 32 * (kWarps + 1);
  static constexpr int kKeys = 16 * kWarps;
  static constexpr int kRun = kKeys / 8;  // tokens of one copy
  static constexpr int kRowBytes = kv_row_bytes(Dtype, kHeadDim);
  static constexpr int kPitch = kRun * kRowBytes + 16;
  static constexpr int kTensorBytes = 8 * kPitch;
  static constexpr int kStageBytes = 2 * kTensorBytes;
  static constexpr int kSteps = kHeadDim / 16;
  static constexpr int kScales = Dtype == NVB_KV_INT8 ? 1 : kHeadDim / kKvBlock;  // of a row
  static constexpr int kStepsOfScale = kSteps / kScales;
  static constexpr int kItems = 8;
  static constexpr int kOutputPitch = kHeadDim + 4;  // floats; spreads the items of a fragment over the banks
  static constexpr int kMaxStages = 8;
  static_assert(kRun * kRowBytes % 128 == 0, "rows of eight copies would share banks");
};

// Shared memory: the ring, in whose place the warps' results are left; Q as fragments; barriers.
template <typename Tile>
struct Layout {
  static constexpr int kStateBytes = 2 * kGroup * kMaxHeadsPerBlock * 4;
  int fragments, barriers, total;
  __host__ __device__ Layout(int stages, int items) {
    const int results = kStateBytes + Tile::kWarps * items * Tile::kOutputPitch * 4;
    const int ring = stages * Tile::kStageBytes;
    fragments = ring > results ? ring : (results + 15) / 16 * 16;
    barriers = fragments + items * Tile::kSteps * 4 * 16;
    total = barriers + 2 * Tile::kMaxStages * 8;
  }
};

// Tiles of a block, at least: one alone would be read as fast as its copies come.
inline constexpr int kMinTiles = 2;

// What is copied where the page table names no page.
inline constexpr int kZeroBytes = 4096;
__device__ const uint4 kZeros[kZeroBytes / 16] = {};

// By the lanes of the warp that copies: lane 8 * tensor + run brings the tokens of that run of every tile.
template <typename Tile>
__device__ __forceinline__ void copy_tiles(const nvb_attention_decode_params& p, const DecodeBlock& block, int stages,
                                           bool once, unsigned char* ring, uint64_t* full, uint64_t* empty, int lane) {
  static_assert(Tile::kRun * Tile::kRowBytes <= kZeroBytes);
  const int run = lane % 8;
  const bool values = lane / 8 == 1;
  const int64_t sequence_stride = values ? p.value_sequence_stride : p.key_sequence_stride;
  const int64_t block_stride = values ? p.placement.value_block_stride : p.placement.block_stride;
  const unsigned char* const base = static_cast<const unsigned char*>(values ? p.value : p.key) +
                                    sequence_offset(p, block, sequence_stride) +
                                    block.kv_head * (values ? p.value_head_stride : p.key_head_stride);
  const bool placed = is_placed(p.placement);
  order_bulk_copies();
  int stage = 0;
  uint32_t parity = 1;
  for (int first = block.begin; first < block.end; first += Tile::kKeys) {
    const int keys = min(Tile::kKeys, block.end - first);
    barrier_wait(empty + stage, parity);
    if (lane == 0) barrier_expect(full + stage, 2 * keys * Tile::kRowBytes);
    __syncwarp();
    if (lane < 16) {
      unsigned char* to = ring + stage * Tile::kStageBytes + (values ? Tile::kTensorBytes : 0) + run * Tile::kPitch;
      const int end = min(first + (run + 1) * Tile::kRun, block.end);
      for (int token = first + run * Tile::kRun; token < end;) {
        int count = end - token;
        const unsigned char* from = base + static_cast<int64_t>(token) * Tile::kRowBytes;
        if (placed) {
          // As many tokens as lie behind this one in its page or ring.
          const bool paged = p.placement.pages != nullptr;
          const int length = paged ? p.placement.page_tokens : p.placement.ring_tokens;
          count = min(count, length - token % length);
          const uint32_t row = kv_row(p.placement, page_row(p, block), token);
          from = row == kNoRow ? reinterpret_cast<const unsigned char*>(kZeros)
                               : base + kv_offset(block_stride, row, Tile::kRowBytes);
        }
        if (once) {
          bulk_copy_once(to, from, count * Tile::kRowBytes, full + stage);
        } else {
          bulk_copy(to, from, count * Tile::kRowBytes, full + stage);
        }
        to += count * Tile::kRowBytes, token += count;
      }
    }
    __syncwarp();
    if (++stage == stages) stage = 0, parity ^= 1;
  }
}

// Q as [step][item][quad] of {high, rest, high, rest}: row `group` of the first operand is the high half of item
// `group`, row group + 8 the rest; the columns of a step in the order that keys are taken in.
template <typename Tile>
__device__ __forceinline__ void make_query_fragments(const nvb_attention_decode_params& p, const DecodeBlock& block,
                                                     uint4* fragments) {
  for (int index = threadIdx.x; index < block.heads * Tile::kSteps * 4; index += 32 * Tile::kWarps) {
    const DecodeItem item = item_of(p, block, index / 4 % block.heads);
    const int64_t at = item.row * p.query_token_stride + item.head * p.query_head_stride +
                       index / (4 * block.heads) * 16 + index % 4 * 4;
    float q[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) q[i] = load_element(p.query, p.query_dtype, at + i);
    uint4 fragment;
    split_pair(q[0], q[2], fragment.x, fragment.y);
    split_pair(q[1], q[3], fragment.z, fragment.w);
    fragments[index] = fragment;
  }
}

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 2)
    attention_decode_rows_kernel(const __grid_constant__ DecodeArguments arguments, int stages, bool once) {
#if __CUDA_ARCH__ >= 900
  using T = __nv_bfloat16;
  constexpr int kSteps = Tile::kSteps, kScales = Tile::kScales;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ float2 total[kMaxHeadsPerBlock];
  __shared__ DecodeBlock whole;  // what the loop would keep in registers for the end
  const nvb_attention_decode_params& p = arguments.params;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Layout<Tile> layout(stages, p.heads_per_chunk);
  uint64_t* const full = reinterpret_cast<uint64_t*>(shared + layout.barriers);
  uint64_t* const empty = full + Tile::kMaxStages;
  uint4* const query_fragments = reinterpret_cast<uint4*>(shared + layout.fragments);

  begin_overlapped();
  if (warp == Tile::kWarps) {
    if (lane < stages) {
      barrier_init(full + lane, 1);
      barrier_init(empty + lane, Tile::kWarps);
    }
    barrier_init_fence();
  }
  const DecodeBlock block = find_decode_block<Tile::kKeys>(arguments, kMinTiles);
  if (block.split >= block.splits) return;
  if (threadIdx.x == 0) whole = block;
  if (warp < Tile::kWarps) make_query_fragments<Tile>(p, block, query_fragments);
  __syncthreads();

  const int group = lane / 4, quad = lane % 4;
  float output[kSteps][4] = {};   // items 2 * quad and + 1, columns 2 * group and + 1 of each step
  float maximum = -CUDART_INF_F;  // of item `group`, in powers of two, as of the last rescaling
  float sum = 0.0f;               // of item `group`, this lane's keys only
  if (warp == Tile::kWarps) {
    copy_tiles<Tile>(p, block, stages, once, shared, full, empty, lane);
  } else {
    const int row_offset = lane % 8 * Tile::kPitch + (warp * 2 + lane / 16) * Tile::kRowBytes + lane / 8 % 2 * 16;
    // This lane's keys are tokens 2 * warp and + 1 of runs 2 * quad and + 1.
    const int scale_offset =
        2 * quad * Tile::kPitch + warp * 2 * Tile::kRowBytes + kv_scales_at(Tile::kDtype, Tile::kHeadDim);
    const auto scales_at = [&](const unsigned char* tile, int e) {
      return tile + scale_offset + e % 2 * Tile::kPitch + e / 2 * Tile::kRowBytes;
    };
    const float cap = p.soft_cap > 0.0f ? p.soft_cap * kLog2E : 0.0f;
    const float factor = p.soft_cap > 0.0f ? p.scale / p.soft_cap : p.scale * kLog2E;
    const DecodeKeys visible = item_keys(p, block, group);
    const int heads = block.heads;
    const int own_fragment = min(group, heads - 1) * 4 + quad;  // rows behind the last item repeat it
    int stage = 0;
    uint32_t parity = 0;
    const int end = block.end;
    for (int first = block.begin; first < end; first += Tile::kKeys) {
      const unsigned char* const key_tile = shared + stage * Tile::kStageBytes;
      const unsigned char* const value_tile = key_tile + Tile::kTensorBytes;
      barrier_wait(full + stage, parity);

      // S = Q . K^T, a sum for the columns of each scale.
      RowScales<kScales> scales[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) scales[e].load(scales_at(key_tile, e), false);
      float s[4] = {};
      float score[2][4];
      for_each_fragment<Tile, false>(key_tile + row_offset, [&](int k, const uint32_t(&b)[4]) {
        if (k % Tile::kStepsOfScale == 0) {
#pragma unroll
          for (int i = 0; i < 8; ++i) score[i / 4][i % 4] = 0.0f;
        }
        const uint4 fragment = query_fragments[k * heads * 4 + own_fragment];
        const uint32_t a[4] = {fragment.x, fragment.y, fragment.z, fragment.w};
        mma_m16n8k16<T>(score[0], a, b[0], b[1]);
        mma_m16n8k16<T>(score[1], a, b[2], b[3]);
        if (k % Tile::kStepsOfScale == Tile::kStepsOfScale - 1) {
          // Add the halves of q.
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            s[e] += (score[e / 2][e % 2] + score[e / 2][e % 2 + 2]) * scales[e][k / Tile::kStepsOfScale];
          }
        }
      });

#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[e] *= factor;
        if (p.soft_cap > 0.0f) s[e] = tanh_fast(s[e]) * cap;
      }
      // What lies behind the last key is what a stage held before: any numbers, and scales that may be NaN.
      const bool edge = p.rows_per_sequence > 1 || first + Tile::kKeys > end;
      if (edge) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int token = first + (2 * quad + e % 2) * Tile::kRun + warp * 2 + e / 2;
          if (token < visible.begin || token >= visible.end) s[e] = -CUDART_INF_F;
        }
      }

      // Raise the maximum and rescale, if any item of the tile needs it.
      const float peak = fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3]));
      if (__any_sync(0xffffffffu, peak > maximum + kRescaleThreshold)) {
        float most = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        most = fmaxf(most, maximum);
        const float rescale = exp2_fast(maximum - exponent_base(most));
        maximum = most;
        sum *= rescale;
        const float rescale0 = __shfl_sync(0xffffffffu, rescale, 8 * quad);
        const float rescale1 = __shfl_sync(0xffffffffu, rescale, 8 * quad + 4);
#pragma unroll
        for (int m = 0; m < kSteps; ++m) {
          output[m][0] *= rescale0;
          output[m][1] *= rescale1;
          output[m][2] *= rescale0;
          output[m][3] *= rescale1;
        }
      }

      // P = 2^(S - m).
      const float base = exponent_base(maximum);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[e] = exp2_fast(s[e] - base);
        sum += s[e];
      }

      // O^T += V^T . P^T, the weights for each scale's columns multiplied by it.
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = first + (2 * quad + e % 2) * Tile::kRun + warp * 2 + e / 2;
        scales[e].load(scales_at(value_tile, e), token >= end);
      }
      uint32_t high[2], rest[2];
      for_each_fragment<Tile, true>(value_tile + row_offset, [&](int m, const uint32_t(&a)[4]) {
        if (m % Tile::kStepsOfScale == 0) {
          float weight[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) weight[e] = s[e] * scales[e][m / Tile::kStepsOfScale];
          split_pair(weight[0], weight[1], high[0], rest[0]);
          split_pair(weight[2], weight[3], high[1], rest[1]);
        }
        mma_m16n8k16<T>(output[m], a, high[0], high[1]);
        mma_m16n8k16<T>(output[m], a, rest[0], rest[1]);
      });
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + stage);
      if (++stage == stages) stage = 0, parity ^= 1;
    }
  }

  // Every copy has landed and been read: the results take the place of the ring.
  __syncthreads();
  const DecodeBlock done = whole;
  float* const part_maximum = reinterpret_cast<float*>(shared);
  float* const part_sum = part_maximum + kGroup * kMaxHeadsPerBlock;
  float* const outputs = part_sum + kGroup * kMaxHeadsPerBlock;
  if (warp < Tile::kWarps) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int item = quad * 2 + e;
      if (item >= done.heads) continue;
      float* const to = outputs + (warp * p.heads_per_chunk + item) * Tile::kOutputPitch + 2 * group;
#pragma unroll
      for (int m = 0; m < kSteps; ++m) {
        *reinterpret_cast<float2*>(to + m * 16) = make_float2(output[m][e], output[m][e + 2]);
      }
    }
    float all = sum + __shfl_xor_sync(0xffffffffu, sum, 1);
    all += __shfl_xor_sync(0xffffffffu, all, 2);
    if (quad == 0) {
      part_maximum[warp * kMaxHeadsPerBlock + group] = maximum;
      part_sum[warp * kMaxHeadsPerBlock + group] = all;
    }
  }
  __syncthreads();
  epilogue_split(arguments, done,
                 SplitResult{outputs, p.heads_per_chunk * Tile::kOutputPitch, Tile::kOutputPitch, Tile::kWarps,
                             part_maximum, part_sum},
                 total);
#else
  __trap();  // a library built for another capability alone: the launcher chose by the device
#endif
}

// Calls `use` with the tile of a format.
template <typename Use>
auto with_tile(uint32_t dtype, const Use& use) {
  if (dtype == NVB_KV_INT8) return use(Tile<NVB_KV_INT8>());
  if (dtype == NVB_KV_Q8_0) return use(Tile<NVB_KV_Q8_0>());
  return use(Tile<NVB_KV_Q4_0>());
}

// What the compiler adds to a block's shared memory, rounded up.
constexpr int kStaticBytes = 512;

// Two blocks share a multiprocessor, of whose memory the system keeps a KiB for each.
template <typename Tile>
int stages_of(int items, const nvb_launch& launch) {
  const int bytes = (launch.shared_bytes_per_block + 1024) / 2 - 1024 - kStaticBytes;
  int stages = Tile::kMaxStages;
  while (stages > 0 && Layout<Tile>(stages, items).total > bytes) --stages;
  return stages;
}

int heads_per_chunk(const nvb_attention_decode_params& p) {
  const int items = items_per_kv_head(p), most = Tile<NVB_KV_INT8>::kItems;
  const int chunks = (items + most - 1) / most;
  return (items + chunks - 1) / chunks;
}

}  // namespace decode_rows

bool supports_decode_rows(const nvb_attention_decode_params& p, const nvb_launch& launch,
                          nvb_attention_decode_shape& shape) {
  if (!is_hopper(launch) || !is_kv_row(p.kv_dtype) || value_dtype_of(p) != p.kv_dtype || p.head_dim != 128 ||
      p.value_dim != 128) {
    return false;
  }
  return decode_rows::with_tile(p.kv_dtype, [&](auto tile) {
    using Tile = decltype(tile);
    if (p.key_token_stride != Tile::kRowBytes || p.value_token_stride != Tile::kRowBytes) return false;
    const nvb_kv_placement& placement = p.placement;
    if (!is_aligned16(p.key, p.key_sequence_stride, 1) || !is_aligned16(p.key, p.key_head_stride, 1) ||
        !is_aligned16(p.value, p.value_sequence_stride, 1) || !is_aligned16(p.value, p.value_head_stride, 1) ||
        placement.block_stride % 16 != 0 || placement.value_block_stride % 16 != 0) {
      return false;
    }
    const int items = decode_rows::heads_per_chunk(p);
    const int stages = decode_rows::stages_of<Tile>(items, launch);
    if (stages < 2) return false;
    const int bytes = decode_rows::Layout<Tile>(stages, items).total + decode_rows::kStaticBytes;
    shape = {Tile::kItems, Tile::kKeys, decode_rows::kMinTiles, Tile::kThreads, bytes, 0, 0, stages};
    return true;
  });
}

cudaError_t launch_decode_rows(const DecodeArguments& arguments, const nvb_launch& launch) {
  const nvb_attention_decode_params& p = arguments.params;
  return decode_rows::with_tile(p.kv_dtype, [&](auto tile) {
    using Tile = decltype(tile);
    const auto kernel = decode_rows::attention_decode_rows_kernel<Tile>;
    const int stages = decode_rows::stages_of<Tile>(p.heads_per_chunk, launch);
    const int shared_bytes = decode_rows::Layout<Tile>(stages, p.heads_per_chunk).total;
    const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (status != cudaSuccess) return status;
    // What is in no L2 when it is read again leaves it first; the blocks of several chunks read it together.
    constexpr int64_t kOnceBytes = int64_t{8} << 20;
    const int visible = p.window > 0 ? std::min(p.window, p.max_kv_length) : p.max_kv_length;
    const bool once = p.chunks == 1 && int64_t{2} * Tile::kRowBytes * p.sequences * p.kv_heads * visible >= kOnceBytes;
    const dim3 grid(p.splits, p.kv_heads * p.chunks, p.sequences);
    return launch_overlapped(kernel, grid, dim3(Tile::kThreads), shared_bytes, &launch, arguments, stages, once);
  });
}

}  // namespace nvb
