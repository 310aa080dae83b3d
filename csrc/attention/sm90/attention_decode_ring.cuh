// Decode attention of compute capability 9.0: keys and values come by bulk copies through a ring in shared memory, and
// the products are those of ../sm80/attention_decode_mma.cu, whose formula, halves of q and p, and fragments it shares.
// Where a head's tokens lie one after the other, a copy needs no tensor map, which the host would have to make for
// every call.
//
// A block stays on its multiprocessor and takes an equal part of the tiles of all sequences
// (attention_decode_ring_work.cuh). Its last warps copy (attention_decode_ring_copy.cuh); the others wait for a tile,
// take 16 keys each, and say that its place is free. They meet at the end of a segment alone, add their results
// (attention_decode_ring_merge.cuh), and go on. The rows that other blocks read too are merged at the end of the part,
// by the last block of each to arrive.
//
// ldmatrix reads eight rows at once, and rows of 128 bytes or more would share their banks. So a tile is eight copies
// of consecutive tokens, each 16 bytes further from a multiple of 128, and the eight keys of a matrix are one of each
// copy.
//
// Budget of head_dim 128, 4 items: 3 stages of 33 KiB, 4 KiB of queries as fragments, 8 KiB to merge in. In 112 KiB two
// blocks fit a multiprocessor: both of a long grid, or one of the next beside one of a short. At 4.4 TB/s a
// multiprocessor gets 20 bytes a clock, so 16 keys with their values every 410 clocks, whose products are 32 mma and 16
// ldmatrix.
//
// On an H200 one sequence of 4,096 tokens takes 11.2 us where attention_decode_mma takes 17.0 (128 columns, 32/8 heads,
// in a graph), 9.4 where its keys are constant, and 64 sequences 257 us where that takes 243; over FP8 they take 146.
// docs/attention.md has more.
#pragma once

#include "attention_decode_ring_copy.cuh"
#include "attention_decode_ring_fragment.cuh"
#include "attention_decode_ring_merge.cuh"

namespace nvb::decode_ring {

template <typename T, typename Tile, int Blocks>
__global__ void __launch_bounds__(Tile::kThreads, Blocks)
    attention_decode_ring_kernel(const __grid_constant__ DecodeArguments arguments, const Options options) {
#if __CUDA_ARCH__ >= 900
  constexpr int kHeadTiles = Tile::kHeadTiles, kSteps = Tile::kSteps;
  constexpr bool kNarrow = sizeof(typename Tile::Element) == 1;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ Segment pending[2];
  __shared__ int merges[2];
  const nvb_attention_decode_params& p = arguments.params;
  const int query_bytes = p.query_dtype == NVB_F32 ? 4 : 2;
  const Layout<Tile> layout = Layout<Tile>::of(options.stages, p.heads_per_chunk, query_bytes);
  const Shared<Tile> shared(memory, layout);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t stages = options.stages;

  if (warp == Tile::kWarps) {
    // Barriers wait for nothing.
    if (lane < stages) {
      barrier_init(shared.full + lane, 1);
      barrier_init(shared.empty + lane, Tile::kTeamWarps);
    }
    if (lane < kQueryStages) {
      barrier_init(shared.query_full + lane, 1);
      barrier_init(shared.query_empty + lane, Tile::kWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();

  if (warp >= Tile::kWarps) {
    copy_part(p, options, shared, warp - Tile::kWarps, lane);
    return;
  }

  wait_for_previous_grid();
  const int group = lane / 4, quad = lane % 4;
  const int team = warp / Tile::kTeamWarps, member = warp % Tile::kTeamWarps;
  const int row_offset = lane % 8 * Tile::kPitch + (member * 2 + lane / 16) * Tile::kRowBytes + lane / 8 % 2 * 16;
  uint4* const query_fragments = reinterpret_cast<uint4*>(memory + layout.fragments);
  float* const query_scales = reinterpret_cast<float*>(memory + layout.scales);
  float* const merge = reinterpret_cast<float*>(memory + layout.merge);
  float2* const states = reinterpret_cast<float2*>(memory + layout.states);  // [warps][items]
  const float cap = p.soft_cap > 0.0f ? p.soft_cap * kLog2E : 0.0f;
  int pending_count = 0;
  uint32_t ring = team, stage = team, parity = 0;

  for (uint32_t query_stage = 0, query_parity = 0;;) {
    barrier_wait(shared.query_full + query_stage, query_parity);
    const Segment segment = shared.segments[query_stage];
    if (segment.heads == 0) return;  // a block without a part
    const unsigned char* const raw = shared.raw + query_stage * p.heads_per_chunk * Tile::kHeadDim * query_bytes;
    if constexpr (kNarrow) {
      find_query_scales<Tile>(raw, p.query_dtype, segment.heads, query_scales);
      consumers_meet<Tile>();
    }
    make_query_fragments<T, Tile>(raw, p.query_dtype, segment.heads, query_scales, query_fragments);
    // What each item sees, and what its products are multiplied with to become powers of two, or arguments of tanh.
    DecodeKeys visible[kHeadTiles];
    float factor[kHeadTiles];
    int own_fragment[kHeadTiles];  // rows behind the last item repeat it
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
      const int item = h * 8 + group;
      own_fragment[h] = min(item, segment.heads - 1) * 4 + quad;
      visible[h] = item < segment.heads ? shared.keys[query_stage * Tile::kItems + item] : DecodeKeys{0, 0};
      factor[h] = p.soft_cap > 0.0f ? p.scale / p.soft_cap : p.scale * kLog2E;
      if (p.key_scale != nullptr) factor[h] *= p.key_scale[segment.kv_head];
      if constexpr (kNarrow) factor[h] *= item < segment.heads ? query_scales[item] : 0.0f;
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.query_empty + query_stage);
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
      const unsigned char* const key_tile = shared.ring + stage * Tile::kStageBytes + row_offset;
      const unsigned char* const value_tile = key_tile + Tile::kTensorBytes;
      barrier_wait(shared.full + stage, parity);

      // S = Q . K^T, even and odd steps apart to shorten the chain of dependent products.
      float score[kHeadTiles][2][2][4] = {};
      for_each_key_fragment<Tile>(key_tile, [&](int k, const uint32_t(&b)[4]) {
#pragma unroll
        for (int h = 0; h < kHeadTiles; ++h) {
          const uint4 fragment = query_fragments[k * segment.heads * 4 + own_fragment[h]];
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
      if (lane == 0) barrier_arrive(shared.empty + stage);
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
      Merged merged = Merged::none();
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
    merges[threadIdx.x] = arrive_last(p.counters + row.counter, row.blocks - 1);
  }
  consumers_meet<Tile>();
  for (int i = 0; i < pending_count; ++i) {
    if (merges[i]) merge_row<Tile, Tile::kWarps <= 4 ? 18 : 9>(arguments, pending[i]);
  }
#endif
}

// Stages of the ring that fit so many bytes of shared memory: as many for every team, because a barrier shows a phase's
// parity alone. Of an odd number two teams take each stage in turn, and one that is ahead of the other would take the
// phase before the one that it waits for as its own. An H200 gave wrong results and stopped with a launch failure.
template <typename Tile>
int stages_within(int bytes, int items, int query_bytes) {
  int stages = kMaxStages;
  while (stages > 0 && Layout<Tile>::of(stages, items, query_bytes).total > bytes) --stages;
  return stages / Tile::kTeams * Tile::kTeams;
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
