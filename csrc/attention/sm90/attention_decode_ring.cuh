// Decode attention of compute capability 9.0 for caches whose tokens lie one after the other (also in pages and rings).
#pragma once

#include "../../common/bulk_copy.cuh"
#include "../../common/cluster.cuh"
#include "../../common/mma.cuh"
#include "../../common/wgmma.cuh"
#include "attention_decode_ring_fragment.cuh"
#include "attention_decode_ring_work.cuh"

namespace nvb::decode_ring {

struct Options {
  int stages;
  int prefetch;      // stages that are asked for before the grid before has ended
  int late_trigger;  // 0, 1
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

template <typename Tile>
__device__ __forceinline__ void consumers_meet() {
  asm volatile("bar.sync 1, %0;" ::"n"(32 * Tile::kWarps) : "memory");
}

__device__ __forceinline__ void store_four(const nvb_attention_decode_params& p, const DecodeBlock& block, int head,
                                           int column, const float4& output, const float2& total) {
  const float scale = p.value_scale != nullptr ? p.value_scale[block.kv_head] : 1.0f;
  const float inverse = total.y == 0.0f ? 0.0f : scale / total.y;
  const DecodeItem item = item_of(p, block, head);
  const int64_t at = item.row * p.output_token_stride + item.head * p.output_head_stride + column;
  store_element(p.output, p.output_dtype, at, output.x * inverse);
  store_element(p.output, p.output_dtype, at + 1, output.y * inverse);
  store_element(p.output, p.output_dtype, at + 2, output.z * inverse);
  store_element(p.output, p.output_dtype, at + 3, output.w * inverse);
  if (p.lse != nullptr && column == 0) store_item_lse(p, block, head, total);
}

// Adds parts with the weights 2^(maximum - their maximum), kBatch at a time.
struct Merged {
  float maximum, sum;
  float4 output;

  template <int Count>
  __device__ __forceinline__ void add(const float2 (&states)[Count], const float4 (&outputs)[Count]) {
    float most = maximum;
#pragma unroll
    for (int i = 0; i < Count; ++i) most = fmaxf(most, states[i].x);
    const float base = exponent_base(most);
    const float rescale = exp2_fast(maximum - base);
    maximum = most;
    sum *= rescale, output.x *= rescale, output.y *= rescale, output.z *= rescale, output.w *= rescale;
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      const float weight = exp2_fast(states[i].x - base);
      sum += weight * states[i].y;
      output.x += weight * outputs[i].x, output.y += weight * outputs[i].y;
      output.z += weight * outputs[i].z, output.w += weight * outputs[i].w;
    }
  }
};

// Merges the partial results of a row, in the order of its blocks.
template <typename Tile>
__device__ __forceinline__ void merge_row(const DecodeArguments& arguments, const Segment& segment) {
  const nvb_attention_decode_params& p = arguments.params;
  constexpr int kGroups = Tile::kHeadDim / 4;
  constexpr int kBatch = 8;
  for (int index = threadIdx.x; index < segment.heads * kGroups; index += 32 * Tile::kWarps) {
    const int head = index / kGroups, column = index % kGroups * 4;
    Merged merged{-CUDART_INF_F, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
    for (int first = 0; first < segment.blocks; first += kBatch) {
      float2 states[kBatch];
      float4 outputs[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        states[i] = make_float2(-CUDART_INF_F, 0.0f), outputs[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (first + i >= segment.blocks) continue;
        const int slot = 2 * (segment.first_block + first + i) + (first + i == 0 ? 1 : 0);
        const int64_t at = static_cast<int64_t>(slot) * p.heads_per_chunk + head;
        states[i] = __ldcg(arguments.partial_sums + at);
        outputs[i] = __ldcg(reinterpret_cast<const float4*>(arguments.partial_outputs + at * Tile::kHeadDim + column));
      }
      merged.add(states, outputs);
    }
    store_four(p, segment.block(), head, column, merged.output, make_float2(merged.maximum, merged.sum));
  }
}

template <typename T, typename Tile, int Blocks>
__global__ void __launch_bounds__(Tile::kThreads, Blocks)
    attention_decode_ring_kernel(const __grid_constant__ DecodeArguments arguments, const Options options) {
#if __CUDA_ARCH__ >= 900
  using Element = typename Tile::Element;
  constexpr int kHeadTiles = Tile::kHeadTiles, kSteps = Tile::kSteps;
  constexpr bool kNarrow = sizeof(Element) == 1;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ Segment pending[2];
  __shared__ int merges[2];
  const nvb_attention_decode_params& p = arguments.params;
  const int query_bytes = p.query_dtype == NVB_F32 ? 4 : 2;
  const Layout<Tile> layout = Layout<Tile>::of(options.stages, p.heads_per_chunk, query_bytes);
  Segment* const segments = reinterpret_cast<Segment*>(shared + layout.segments);
  DecodeKeys* const keys = reinterpret_cast<DecodeKeys*>(shared + layout.keys);
  uint64_t* const full = reinterpret_cast<uint64_t*>(shared + layout.barriers);
  uint64_t* const empty = full + kMaxStages;
  uint64_t* const query_full = empty + kMaxStages;
  uint64_t* const query_empty = query_full + kQueryStages;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t stages = options.stages;

  if (warp == Tile::kWarps) {
    if (!options.late_trigger) allow_next_grid();
    // Barriers wait for nothing.
    if (lane < stages) {
      barrier_init(full + lane, 1);
      barrier_init(empty + lane, Tile::kTeamWarps);
    }
    if (lane < kQueryStages) {
      barrier_init(query_full + lane, 1);
      barrier_init(query_empty + lane, Tile::kWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();

  if (warp == Tile::kWarps) {
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
      barrier_wait(query_empty + query_stage, query_parity);
      const DecodeItem item = item_of(p, segment.block(), lane);
      if (lane < segment.heads) {
        const DecodeKeys own = p.rows_per_sequence == 1 ? DecodeKeys{segment.begin, segment.end}
                                                        : keys_at(p, __ldcg(p.positions + item.row));
        // Those of no slot see nothing.
        keys[query_stage * Tile::kItems + lane] = {own.begin, min(own.end, segment.end)};
      }
      __syncwarp();
      if (lane == 0) {
        segments[query_stage] = segment;
        barrier_expect(query_full + query_stage, segment.heads * query_row);
      }
      __syncwarp();
      if (lane == 0) {
        for (int i = 0; i < segment.heads; ++i) {
          const DecodeItem from = item_of(p, segment.block(), i);
          bulk_copy(shared + layout.raw + (query_stage * p.heads_per_chunk + i) * query_row,
                    static_cast<const char*>(p.query) +
                        (from.row * p.query_token_stride + from.head * p.query_head_stride) * query_bytes,
                    query_row, query_full + query_stage);
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
            shared + stage * Tile::kStageBytes + (values ? Tile::kTensorBytes : 0) + run * Tile::kPitch;
        barrier_wait(empty + stage, parity);
        if (lane == 0) barrier_expect(full + stage, Tile::kCopiedBytes);
        __syncwarp();
        if (lane < 16) {
          const auto clear = [&](int from, int until) {
            for (int token = max(from, start); token < min(until, start + Tile::kRun); ++token) {
              bulk_copy(to + (token - start) * Tile::kRowBytes, kZeroRow, Tile::kRowBytes, full + stage);
            }
          };
          // Tokens that no item sees are zeros and are not read: stale rows of the cache may hold NaN.
          clear(start, first);
          clear(end, start + Tile::kRun);
          tokens.for_each_piece(
              p.placement, first, end - first, own_page, [&](const Element* from, int token, int piece) {
                if (from != nullptr) {
                  bulk_copy(to + (token - start) * Tile::kRowBytes, from, piece * Tile::kRowBytes, full + stage);
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
      segments[0].heads = 0;
      barrier_expect(query_full, 0);
    }
    return;
  }

  wait_for_previous_grid();
  const int group = lane / 4, quad = lane % 4;
  const int team = warp / Tile::kTeamWarps, member = warp % Tile::kTeamWarps;
  const int row_offset = lane % 8 * Tile::kPitch + (member * 2 + lane / 16) * Tile::kRowBytes + lane / 8 % 2 * 16;
  uint4* const query_fragments = reinterpret_cast<uint4*>(shared + layout.fragments);
  float* const query_scales = reinterpret_cast<float*>(shared + layout.scales);
  float* const merge = reinterpret_cast<float*>(shared + layout.merge);
  float2* const states = reinterpret_cast<float2*>(shared + layout.states);  // [warps][items]
  const float cap = p.soft_cap > 0.0f ? p.soft_cap * kLog2E : 0.0f;
  int pending_count = 0;
  uint32_t ring = team, stage = team, parity = 0;

  for (uint32_t query_stage = 0, query_parity = 0;;) {
    barrier_wait(query_full + query_stage, query_parity);
    const Segment segment = segments[query_stage];
    if (segment.heads == 0) return;  // a block without a part
    const unsigned char* const raw =
        shared + layout.raw + query_stage * p.heads_per_chunk * Tile::kHeadDim * query_bytes;
    if constexpr (kNarrow) {
      find_query_scales<Tile>(raw, p.query_dtype, segment.heads, query_scales);
      consumers_meet<Tile>();
    }
    make_query_fragments<T, Tile>(raw, p.query_dtype, segment.heads, query_scales, query_fragments);
    // What each item sees, and what its products are multiplied with to become powers of two, or arguments of tanh.
    DecodeKeys visible[kHeadTiles];
    float factor[kHeadTiles];
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
      const int item = h * 8 + group;
      visible[h] = item < segment.heads ? keys[query_stage * Tile::kItems + item] : DecodeKeys{0, 0};
      factor[h] = p.soft_cap > 0.0f ? p.scale / p.soft_cap : p.scale * kLog2E;
      if (p.key_scale != nullptr) factor[h] *= p.key_scale[segment.kv_head];
      if constexpr (kNarrow) factor[h] *= item < segment.heads ? query_scales[item] : 0.0f;
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(query_empty + query_stage);
    query_stage ^= 1;
    query_parity ^= query_stage == 0 ? 1 : 0;
    consumers_meet<Tile>();

    float output[kHeadTiles][kSteps][4] = {};  // items 2 * quad and + 1, columns as output_column says
    float maximum[kHeadTiles];                 // of item `group`, in powers of two, as of the last rescaling
    float sum[kHeadTiles] = {};                // of item `group`, this lane's keys only
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) maximum[h] = -CUDART_INF_F;

    while (ring < segment.ring_end) {
      const int tile_first = (segment.first_tile + static_cast<int>(ring - segment.ring_first)) * Tile::kKeys;
      const unsigned char* const key_tile = shared + stage * Tile::kStageBytes + row_offset;
      const unsigned char* const value_tile = key_tile + Tile::kTensorBytes;
      barrier_wait(full + stage, parity);

      // S = Q . K^T, even and odd steps apart to shorten the chain of dependent products.
      float score[kHeadTiles][2][2][4] = {};
      for_each_key_fragment<Tile>(key_tile, [&](int k, const uint32_t(&b)[4]) {
#pragma unroll
        for (int h = 0; h < kHeadTiles; ++h) {
          const uint4 fragment = query_fragments[(h * kSteps + k) * 32 + lane];
          const uint32_t a[4] = {fragment.x, fragment.y, fragment.z, fragment.w};
          mma_m16n8k16<T>(score[h][k % 2][0], a, b[0], b[1]);
          mma_m16n8k16<T>(score[h][k % 2][1], a, b[2], b[3]);
        }
      });

      const bool edge = tile_first < segment.all_begin || tile_first + Tile::kKeys > segment.all_end;
      uint32_t high[kHeadTiles][2];
      uint32_t rest[kHeadTiles][2];
#pragma unroll
      for (int h = 0; h < kHeadTiles; ++h) {
        // Add the halves of q: this lane has two tokens each of two runs.
        float s[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[e] = (score[h][0][e / 2][e % 2] + score[h][1][e / 2][e % 2]) +
                 (score[h][0][e / 2][e % 2 + 2] + score[h][1][e / 2][e % 2 + 2]);
          s[e] *= factor[h];
          if (p.soft_cap > 0.0f) s[e] = tanh_fast(s[e]) * cap;
        }
        if (edge) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int token = tile_first + (2 * quad + e % 2) * Tile::kRun + member * 2 + e / 2;
            if (token < visible[h].begin || token >= visible[h].end) s[e] = -CUDART_INF_F;
          }
        }

        // Raise the maximum and rescale, if any item of the tile needs it.
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
      for_each_value_fragment<Tile>(value_tile, [&](int m, const uint32_t(&a)[4]) {
#pragma unroll
        for (int h = 0; h < kHeadTiles; ++h) {
          mma_m16n8k16<T>(output[h][m], a, high[h][0], high[h][1]);
          mma_m16n8k16<T>(output[h][m], a, rest[h][0], rest[h][1]);
        }
      });
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + stage);
      ring += Tile::kTeams, stage += Tile::kTeams;
      if (stage >= stages) stage -= stages, parity ^= 1;
    }

    // Merge the warps.
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int item = h * 8 + quad * 2 + e;
        if (item >= segment.heads) continue;
        float* const to = merge + (warp * p.heads_per_chunk + item) * Tile::kOutputPitch;
#pragma unroll
        for (int m = 0; m < kSteps; ++m) {
          to[m * 16 + output_column<Tile>(group, 0)] = output[h][m][e];
          to[m * 16 + output_column<Tile>(group, 1)] = output[h][m][e + 2];
        }
      }
      float all = sum[h] + __shfl_xor_sync(0xffffffffu, sum[h], 1);
      all += __shfl_xor_sync(0xffffffffu, all, 2);
      if (quad == 0) states[warp * Tile::kItems + h * 8 + group] = make_float2(maximum[h], all);
    }
    consumers_meet<Tile>();
    constexpr int kGroups = Tile::kHeadDim / 4;
    for (int index = threadIdx.x; index < segment.heads * kGroups; index += 32 * Tile::kWarps) {
      const int item = index / kGroups, column = index % kGroups * 4;
      float2 parts[Tile::kWarps];
      float4 outputs[Tile::kWarps];
#pragma unroll
      for (int i = 0; i < Tile::kWarps; ++i) {
        parts[i] = states[i * Tile::kItems + item];
        outputs[i] =
            *reinterpret_cast<const float4*>(merge + (i * p.heads_per_chunk + item) * Tile::kOutputPitch + column);
      }
      Merged merged{-CUDART_INF_F, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
      merged.add(parts, outputs);
      const float2 total = make_float2(merged.maximum, merged.sum);
      if (segment.slot >= 0) {
        const int64_t at = static_cast<int64_t>(segment.slot) * p.heads_per_chunk + item;
        *reinterpret_cast<float4*>(arguments.partial_outputs + at * Tile::kHeadDim + column) = merged.output;
        if (column == 0) arguments.partial_sums[at] = total;
      } else {
        store_four(p, segment.block(), item, column, merged.output, total);
      }
    }
    if (segment.slot >= 0) {
      if (threadIdx.x == 0) pending[pending_count] = segment;
      ++pending_count;
    }
    if (segment.last) break;
  }

  // The last block of a row to arrive merges it. Both rows of the block wait until here, so that the fence of the
  // device is paid once and no copy waits for it.
  if (pending_count == 0) return;
  consumers_meet<Tile>();
  if (static_cast<int>(threadIdx.x) < pending_count) {
    const Segment& row = pending[threadIdx.x];
    const uint32_t others = row.blocks - 1;
    __threadfence();
    merges[threadIdx.x] = atomicInc(p.counters + row.counter, others) == others;  // back to 0 for the next launch
    __threadfence();
  }
  consumers_meet<Tile>();
  for (int i = 0; i < pending_count; ++i) {
    if (merges[i]) merge_row<Tile>(arguments, pending[i]);
  }
#endif
}

// Stages of the ring that fit so many bytes of shared memory.
template <typename Tile>
int stages_within(int bytes, int items, int query_bytes) {
  int stages = kMaxStages;
  while (stages > 0 && Layout<Tile>::of(stages, items, query_bytes).total > bytes) --stages;
  return stages;
}

template <typename T, typename Tile, int Blocks>
cudaError_t launch_tile(const DecodeArguments& arguments, const Options& options, int blocks,
                        const nvb_launch& launch) {
  const auto kernel = attention_decode_ring_kernel<T, Tile, Blocks>;
  const nvb_attention_decode_params& p = arguments.params;
  const int query_bytes = float_dtype_bytes(p.query_dtype);
  const int shared_bytes = Layout<Tile>::of(options.stages, p.heads_per_chunk, query_bytes).total;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (status != cudaSuccess) return status;
  return launch_overlapped(kernel, dim3(blocks), dim3(Tile::kThreads), shared_bytes, &launch, arguments, options);
}

}  // namespace nvb::decode_ring
