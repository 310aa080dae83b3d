// y[t][n] = act(Σ_k x[t][k] W[n][k] + bias[n]) for W in 8 or 4 bits and from about 17 tokens t on, with wgmma.
//
// W is the first operand: it passes through registers, 64 rows a warpgroup, where it becomes T; x is the second one, in
// shared memory. Four producer warps copy stages of 128 k (linear_quantized_wgmma_stage.cuh) into a ring; W needs no
// other grid's results, so it is on its way before the grid waits for the one before. Consumer warpgroups decode a
// piece of W while the tensor cores multiply the piece before. Group scales meet f32 sums: a group's product starts
// from zero and is added to the total with its scale.
//
// The `splits` blocks of a cluster share 64 * Warpgroups rows of W and divide k; their sums meet through distributed
// shared memory, each block finishing some of the tokens, added in the order of the blocks.
//
// Shapes: x [m, k] of f16 or bf16 with 8-byte aligned rows, Tokens of them a block row; k a multiple of 64.
// Compute capability 9.0a. One or two blocks a multiprocessor: the ring takes what shared memory there is.
//
// Tokens past the end are columns of their own, never stored: their x stays what the workspace held.
#pragma once

#include "../common/wgmma.cuh"
#include "linear_epilogue.cuh"
#include "linear_quantized_wgmma_stage.cuh"

namespace nvb {
namespace quantized {

template <typename Weight, typename T, int Tokens, int GroupK, int Warpgroups, int Stages, int BlocksPerSm>
struct WgmmaShape {
  using Input = InputStage<Tokens>;
  static constexpr int kRows = 64 * Warpgroups;
  using Weights = WeightStage<Weight, GroupK, kRows>;
  static constexpr int kConsumers = 128 * Warpgroups;
  static constexpr int kThreads = kConsumers + kProducers;
  static constexpr int kStageBytes = (Input::kBytes + Weights::kBytes + 1023) / 1024 * 1024;
  static constexpr int kResultPitch = kRows + 4;  // floats; spreads a store's four quads over the banks
  static constexpr int kResultBytes = Tokens * kResultPitch * 4;
  static constexpr int kRingBytes = Stages * kStageBytes > kResultBytes ? Stages* kStageBytes : kResultBytes;
  static constexpr int kSharedBytes = 1024 + kRingBytes + 2 * Stages * 8;  // the ring aligns itself to 1024
  // Of the 65,536 registers, whole eights for each thread: what the producers leave goes to the consumers.
  static constexpr bool kFew = Warpgroups == 4 || BlocksPerSm == 2;
  static constexpr int kProducerRegisters = kFew ? 40 : 56;
  static constexpr int kConsumerRegisters = BlocksPerSm == 2 ? 96 : Warpgroups == 4 ? 104 : Warpgroups == 3 ? 152 : 224;
  static_assert(Warpgroups >= 2 && Warpgroups <= 4, "register counts are for two to four consumer warpgroups");
  static_assert(kSharedBytes <= (BlocksPerSm == 2 ? 113 : 227) * 1024, "a block has 227 KB of shared memory");
};

template <typename Weight, typename T, int Tokens, int GroupK, int Warpgroups, int Stages, int BlocksPerSm>
__global__ void __launch_bounds__(128 * (Warpgroups + 1), BlocksPerSm)
    linear_quantized_wgmma(const nvb_linear_quantized_params p, const LinearEpilogue epilogue,
                           const char* __restrict__ arranged, const int splits) {
#ifdef NVB_WGMMA
  using Shape = WgmmaShape<Weight, T, Tokens, GroupK, Warpgroups, Stages, BlocksPerSm>;
  using Input = typename Shape::Input;
  using Weights = typename Shape::Weights;
  extern __shared__ char unaligned[];
  char* const ring = unaligned + (-shared_address(unaligned) & 1023);
  uint64_t* const full = reinterpret_cast<uint64_t*>(ring + Shape::kRingBytes);
  uint64_t* const empty = full + Stages;
  const int rank = blockIdx.x % splits;
  const int64_t block_row = static_cast<int64_t>(blockIdx.x / splits) * Shape::kRows;
  const int64_t first_token = static_cast<int64_t>(blockIdx.y) * Tokens;
  const int all_steps = static_cast<int>((p.k + kStageK - 1) / kStageK);
  const int begin = rank * all_steps / splits;
  const int steps = (rank + 1) * all_steps / splits - begin;

  if (threadIdx.x == 0) {
#pragma unroll
    for (int s = 0; s < Stages; ++s) {
      barrier_init(full + s, kProducers + 1);
      barrier_init(empty + s, 4 * Warpgroups);
    }
    barrier_init_fence();
  }
  __syncthreads();
  allow_next_grid();

  if (threadIdx.x >= Shape::kConsumers) {
    leave_registers<Shape::kProducerRegisters>();
    const Weights weights(p, block_row);
    const char* const inputs = arranged + (static_cast<int64_t>(blockIdx.y) * all_steps + begin) * Input::kBytes;
    const auto copy_weights = [&](int step) {
      const int slot = step % Stages;
      weights.copy(begin + step, ring + slot * Shape::kStageBytes + Input::kBytes);
      barrier_arrive_after_copies(full + slot);
    };
    const auto copy_input = [&](int step) {
      const int slot = step % Stages;
      barrier_expect(full + slot, Input::kBytes);
      bulk_copy(ring + slot * Shape::kStageBytes, inputs + static_cast<int64_t>(step) * Input::kBytes, Input::kBytes,
                full + slot);
    };
    // One thread copies x. Its warp waits for x after its part of two stages of W, the others fill the ring with W.
    const bool copies_input = threadIdx.x == Shape::kThreads - 1;
    const int early = threadIdx.x >= Shape::kThreads - 32 ? min(2, steps) : 0;
    for (int step = 0; step < early; ++step) copy_weights(step);
    if (early > 0) {
      wait_for_previous_grid();
      if (copies_input) {
        fence_before_bulk_copies();
        for (int step = 0; step < early; ++step) copy_input(step);
      }
      __syncwarp();
    }
    for (int step = early; step < steps; ++step) {
      if (step >= Stages) barrier_wait(empty + step % Stages, (step / Stages - 1) & 1);
      if (copies_input) copy_input(step);
      copy_weights(step);
    }
    return;
  }

  take_registers<Shape::kConsumerRegisters>();
  if (GroupK == 0 && threadIdx.x < Shape::kRows && block_row + threadIdx.x < p.n) {
    prefetch_l2(static_cast<const float*>(p.scales) + block_row + threadIdx.x);
  }
  const int warp = threadIdx.x / 32;
  const int group = threadIdx.x % 32 / 4;
  const int quad = threadIdx.x % 4;
  const Weights weights(p, block_row);
  constexpr int kSums = Tokens / 2;
  constexpr int kInstructions = GroupK == 32 || (GroupK != 0 && Shape::kFew) ? 2 : 4;  // of a piece
  constexpr int kPieces = 4 / kInstructions;                                           // of a chunk
  float total[kSums] = {};
  float product[GroupK == 0 ? 1 : kSums] = {};
  float2 pending = make_float2(0.0f, 0.0f);  // the scale of the product that runs
  uint32_t a[2][kInstructions][4];
  uint32_t bits[2];
  Weights::template constants<T>(bits);
  const auto add_product = [&] {
    if constexpr (GroupK != 0) {
      wgmma_hold(product);
#pragma unroll
      for (int i = 0; i < kSums; ++i) total[i] = fmaf(i % 4 < 2 ? pending.x : pending.y, product[i], total[i]);
    }
  };

  for (int step = 0; step < steps; ++step) {
    const int slot = step % Stages;
    const char* const stage = ring + slot * Shape::kStageBytes;
    barrier_wait(full + slot, step / Stages & 1);
    const uint64_t inputs = wgmma_descriptor(stage);
    const auto release_previous = [&] {
      if (step > 0 && threadIdx.x % 32 == 0) barrier_arrive(empty + (step - 1) % Stages);
    };
#pragma unroll
    for (int chunk = 0; chunk < kStageChunks; ++chunk) {
      uint32_t words[Weight::kWords];
      Weights::read(stage + Input::kBytes, warp, chunk, words);
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const int index = chunk * kPieces + piece;
        uint32_t(&fragments)[kInstructions][4] = a[index % 2];
#pragma unroll
        for (int i = 0; i < kInstructions; ++i) {
          Weights::template fragment<T>(words, bits, piece * kInstructions + i, fragments[i]);
        }
        // Asks for the decoding before the wait below, while the piece before is being multiplied.
#pragma unroll
        for (int i = 0; i < kInstructions; ++i) wgmma_hold(fragments[i]);
        const uint64_t descriptor = inputs + chunk * (Input::kChunkBytes / 16) + piece * kInstructions * 2;
        if constexpr (GroupK == 0) {
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < kInstructions; ++i) wgmma<T>(total, fragments[i], descriptor + 2 * i, 1);
          wgmma_commit();
          wgmma_wait<1>();
          if (index == 0) release_previous();
        } else {
          const bool first = index * kInstructions * 16 % GroupK == 0;  // of its group
          float2 scale = pending;
          if (first) {
            scale = weights.scale(stage + Input::kBytes, begin + step, warp, index * kInstructions * 16 / GroupK);
            wgmma_wait<0>();
            add_product();
            if (index == 0) release_previous();
          }
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < kInstructions; ++i) {
            wgmma<T>(product, fragments[i], descriptor + 2 * i, first && i == 0 ? 0 : 1);
          }
          wgmma_commit();
          if (!first) wgmma_wait<1>();
          pending = scale;
        }
      }
    }
  }
  wgmma_wait<0>();
  wgmma_hold(total);
  add_product();

  // Lay the sums out in shared memory, once every consumer has left the ring.
  consumer_barrier<Shape::kConsumers>();
  float* const result = reinterpret_cast<float*>(ring);
  constexpr int kPitch = Shape::kResultPitch;
#pragma unroll
  for (int i = 0; i < kSums; i += 4) {
    float* const address = result + (2 * i + 2 * quad) * kPitch + warp * kTileRows + group;
    address[0] = total[i];
    address[kPitch] = total[i + 1];
    address[8] = total[i + 2];
    address[kPitch + 8] = total[i + 3];
  }
  if (splits > 1) {
    cluster_arrive_release();
    cluster_wait();
  } else {
    consumer_barrier<Shape::kConsumers>();
  }

  // A thread finishes four columns of some tokens: first the sums, whose reads overlap, then one copy of the long code
  // that finishes and stores them, since a call starts with nothing of it in the instruction cache.
  constexpr int kColumnGroups = Shape::kRows / 4;
  constexpr int kTokenStep = Shape::kConsumers / kColumnGroups;
  const int local_column = threadIdx.x % kColumnGroups * 4;
  const int64_t column = block_row + local_column;
  const int step_tokens = kTokenStep * splits;
  const int own_token = threadIdx.x / kColumnGroups * splits + rank;
  const int tokens = static_cast<int>(min(p.m - first_token, int64_t{Tokens}));
  float* const own = result + own_token * kPitch + local_column;
  if (splits > 1) {
    constexpr int kTogether = 4;
    for (int first = 0; own_token + first < tokens; first += kTogether * step_tokens) {
      float4 sums[kTogether] = {};
      for (int s = 0; s < splits; ++s) {
        float4 parts[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const int offset = first + i * step_tokens;
          parts[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (own_token + offset < tokens) parts[i] = cluster_load16(cluster_address(own + offset * kPitch, s));
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          sums[i].x += parts[i].x, sums[i].y += parts[i].y, sums[i].z += parts[i].z, sums[i].w += parts[i].w;
        }
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int offset = first + i * step_tokens;
        if (own_token + offset < tokens) *reinterpret_cast<float4*>(own + offset * kPitch) = sums[i];
      }
    }
    // Nobody leaves while others read its sums; what a block finishes, only it has written.
    __syncwarp();
    cluster_arrive();
  }
  if (column < p.n) {
    float bias[4], row_scales[4];
    load_bias(epilogue, column, bias);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      row_scales[i] = GroupK == 0 && column + i < p.n ? static_cast<const float*>(p.scales)[column + i] : 1.0f;
    }
#pragma unroll 1
    for (int offset = 0; own_token + offset < tokens; offset += step_tokens) {
      const float4 sum = *reinterpret_cast<const float4*>(own + offset * kPitch);
      const float values[4] = {sum.x * row_scales[0], sum.y * row_scales[1], sum.z * row_scales[2],
                               sum.w * row_scales[3]};
      store_columns(epilogue, first_token + own_token + offset, column, values, bias);
    }
  }
  if (splits > 1) {
    __syncwarp();
    cluster_wait();
  }
#else
  __trap();  // a build without code for 9.0a
#endif
}

template <typename Weight, typename T, int Tokens, int GroupK, int Warpgroups, int Stages, int BlocksPerSm>
cudaError_t launch_wgmma_shape(const nvb_linear_quantized_params& params, const nvb_launch& launch, int splits) {
  using Shape = WgmmaShape<Weight, T, Tokens, GroupK, Warpgroups, Stages, BlocksPerSm>;
  const auto kernel = linear_quantized_wgmma<Weight, T, Tokens, GroupK, Warpgroups, Stages, BlocksPerSm>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes);
  if (error != cudaSuccess) return error;
  const int chunks = static_cast<int>((params.k + kStageK - 1) / kStageK * kStageChunks);
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = static_cast<unsigned>(splits);
  attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>((chunks * 4 + 127) / 128), static_cast<unsigned>(params.m));
  config.blockDim = 128;
  config.stream = launch.stream;
  config.attrs = attributes;
  config.numAttrs = 1;
  error = cudaLaunchKernelEx(&config, linear_quantized_arrange_input<Weight, T, Tokens>, params,
                             static_cast<char*>(params.workspace), chunks);
  if (error != cudaSuccess) return error;
  config.gridDim = dim3(static_cast<unsigned>((params.n + Shape::kRows - 1) / Shape::kRows * splits),
                        static_cast<unsigned>((params.m + Tokens - 1) / Tokens));
  config.blockDim = Shape::kThreads;
  config.dynamicSmemBytes = Shape::kSharedBytes;
  config.numAttrs = splits > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, params, make_epilogue(params, params.n),
                            static_cast<const char*>(params.workspace), splits);
}

}  // namespace quantized
}  // namespace nvb
