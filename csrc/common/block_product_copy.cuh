// W of block_product.cuh: units of 16 rows from memory to a warp's ring in shared memory.
#pragma once

#include "block_product_plan.cuh"
#include "cluster.cuh"
#include "mma_bytes.cuh"
#include "wgmma_ss.cuh"

namespace nvb {
namespace quantized {
namespace blocks {

// Whether the architecture at hand has code for such copies. A device that has none is not asked for them (hopper.h).
template <Copies Copy>
__device__ constexpr bool is_made() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return Copy != Copies::kTensor;
#else
  return true;
#endif
}

// Copies units of 16 rows to a warp's ring, by cp.async or by the copy engine.
template <uint32_t Format, Copies Copy>
struct UnitCopy;

// A lane copies of rows lane / 4 and lane / 4 + 8, which are those that it multiplies.
template <uint32_t Format>
struct UnitCopy<Format, Copies::kAsync> {
  static constexpr int kBytes = BlockCodes<Format>::kUnitBytes;
  const uint8_t* weight;
  uint32_t stride;
  int last_row;
  int chunks;
  int place;
  int row_bytes;
  int at_end_from;
  uint32_t address;  // the low bits of `weight`'s
  const uint8_t* rows[2];
  bool at_end;

  // Where the lane's units begin depends on where their rows do, 16 bytes aside.
  using Unit = BlockUnit<kBytes % 4 != 0>;

  // Of `count` rows of W from `first` on.
  __device__ __forceinline__ UnitCopy(const nvb_linear_quantized_params& p, const Plan& plan, const CUtensorMap*,
                                      int64_t first, int64_t count)
      : weight(static_cast<const uint8_t*>(p.weight) + first * p.weight_stride),
        stride(static_cast<uint32_t>(p.weight_stride)),
        last_row(static_cast<int>(count - 1)),
        chunks(plan.chunks),
        place(plan.place),
        row_bytes(plan.row_bytes),
        at_end_from(plan.at_end_from),
        address(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(weight))) {}

  __device__ __forceinline__ void set_rows(int row_block) {
    const int row = row_block * kRows + threadIdx.x % 32 / 4;
    at_end = row_block >= at_end_from;
    rows[0] = weight + uint64_t{static_cast<uint32_t>(min(row, last_row))} * stride;
    rows[1] = weight + uint64_t{static_cast<uint32_t>(min(row + 8, last_row))} * stride;
  }

  // Asks for the unit's lines, a quarter of a row each lane.
  __device__ __forceinline__ void fetch_to_l2(int unit) const {
    const int begin = unit * kBytes;
    const int at = min(begin + static_cast<int>(threadIdx.x % 4) * ((kBytes + 3) / 4), row_bytes - 1);
    prefetch_l2(rows[0] + at);
    prefetch_l2(rows[1] + at);
  }

  __device__ __forceinline__ void make_barriers(uint64_t*) const {}

  // What lies in the place behind the row's last block is 0, or the next row's. `to` is the first lane's.
  __device__ __forceinline__ void start(uint8_t* to, uint64_t*, int unit) const {
    const int first = 16 * (threadIdx.x % 4), begin = unit * kBytes;
    uint8_t* const lane_to = to + threadIdx.x % 32 / 4 * place + first;
    if (at_end) return start_at_end(lane_to, begin, first);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint8_t* const from = rows[r] + begin;
      const int past = has_whole_chunks() ? 0 : static_cast<int>(reinterpret_cast<uintptr_t>(from) & 15u);
      const uint8_t* const aligned = from - past + first;
#pragma unroll
      for (int chunk = 0; chunk < kMostChunks<Format>; chunk += 4) {
        const bool all_lanes = chunk + 4 <= kBytes / 16;  // every unit has so many
        if (all_lanes || chunk * 16 + first < 16 * chunks) {
          cp_async16(lane_to + 8 * r * place + 16 * chunk, aligned + 16 * chunk);
        }
      }
    }
  }

 private:
  // A loop, because few units take it and its code stands in the way of the others.
  __device__ __forceinline__ void start_at_end(uint8_t* lane_to, int begin, int first) const {
#pragma unroll 1
    for (int r = 0; r < 2; ++r) {
      const uint8_t* const from = (r == 0 ? rows[0] : rows[1]) + begin;
      const int past = static_cast<int>(reinterpret_cast<uintptr_t>(from) & 15u);
#pragma unroll 1
      for (int at = first; at < 16 * chunks; at += 64) {
        cp_async16_part(lane_to + 8 * r * place + at - first, from - past + at,
                        max(min(row_bytes - begin + past - at, 16), 0));
      }
    }
  }

  // Whether units begin and end at multiples of 16 bytes.
  __device__ __forceinline__ bool has_whole_chunks() const { return kBytes % 16 == 0 && chunks == kBytes / 16; }

 public:
  __device__ __forceinline__ void commit() const { cp_async_commit(); }
  // Until the unit is there that was asked for as the stage was filled.
  __device__ __forceinline__ void wait(uint64_t*, uint32_t) const { cp_async_wait<kStages - 2>(); }

  // The lane's two rows of a unit in its stage.
  __device__ __forceinline__ void find(const uint8_t* stage, int row_block, int unit, const uint8_t* (&at)[2]) const {
    const int row = threadIdx.x % 32 / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t past = 0;
      if (!has_whole_chunks()) {
        const uint32_t begin = static_cast<uint32_t>(min(row_block * kRows + row + 8 * r, last_row)) * stride;
        past = (address + begin + static_cast<uint32_t>(unit * kBytes)) & 15u;
      }
      at[r] = stage + (row + 8 * r) * place + past;
    }
  }
};

// One lane asks for a unit, from the multiple of 16 bytes at or before it on.
template <uint32_t Format>
struct UnitCopy<Format, Copies::kTensor> {
  static constexpr int kBytes = BlockCodes<Format>::kUnitBytes;
  const CUtensorMap* map;
  int first_row;
  int place;
  int stage_bytes;
  int row;  // the first of those that are copied

  using Unit = BlockUnit<kBytes % 4 != 0>;

  __device__ __forceinline__ UnitCopy(const nvb_linear_quantized_params&, const Plan& plan, const CUtensorMap* rows,
                                      int64_t first, int64_t)
      : map(rows), first_row(static_cast<int>(first)), place(plan.place), stage_bytes(plan.stage_bytes) {}

  __device__ __forceinline__ void set_rows(int row_block) { row = first_row + row_block * kRows; }

  __device__ __forceinline__ void fetch_to_l2(int unit) const {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 != 0) return;
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(element_of(unit)),
                 "r"(row)
                 : "memory");
#endif
  }

  // One for each stage.
  __device__ __forceinline__ void make_barriers(uint64_t* barriers) const {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 == 0) {
      for (int i = 0; i < kStages; ++i) barrier_init(barriers + i, 1);
      barrier_init_fence();
    }
    __syncwarp();
#endif
  }

  // What lies behind the row's last block is 0.
  __device__ __forceinline__ void start(uint8_t* to, uint64_t* barrier, int unit) const {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 != 0) return;
    barrier_expect(barrier, stage_bytes);
    tensor_copy(to, map, element_of(unit), row, barrier);
#endif
  }

  __device__ __forceinline__ void commit() const {}
  __device__ __forceinline__ void wait(uint64_t* barrier, uint32_t parity) const { barrier_wait(barrier, parity); }

  __device__ __forceinline__ void find(const uint8_t* stage, int, int unit, const uint8_t* (&at)[2]) const {
    at[0] = stage + threadIdx.x % 32 / 4 * place + unit * kBytes % 16;
    at[1] = at[0] + 8 * place;
  }

 private:
  static __device__ __forceinline__ int element_of(int unit) { return unit * kBytes / 16 * (16 / kMapBytes<Format>); }
};

// The map of a weight's rows, `rows` in all, of which a box has `box_rows` and `place` bytes of each.
template <uint32_t Format>
cudaError_t make_row_map(CUtensorMap& map, const void* weight, int64_t stride, int64_t row_bytes, int64_t rows,
                         int place, int box_rows) {
  constexpr int bytes = kMapBytes<Format>;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(row_bytes / bytes), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(place / bytes), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const auto type = bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16;
  const CUresult result = tensor_map_encoder()(&map, type, 2, const_cast<void*>(weight), sizes, strides, box, steps,
                                               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace blocks
}  // namespace quantized
}  // namespace nvb
