// Prefill attention in f32 on the ordinary cores: all that attention.h has, at any alignment, on every device. It
// serves F32 tensors, capability 7.5, odd shapes, and options that no faster kernel has. Tiles of which bits of a mask
// show no row anything are left out.
//
// A block of 16 x 16 threads takes 64 query rows of one head and walks the keys in tiles of 64. A thread owns a 4 x 4
// patch of S and, in each chunk of 64 output columns, a 4 x 4 patch of O.
//
// Shared memory: 17 KiB for a chunk of Q and K (32 of the head dimension) or of V (64 columns), 17 KiB for P.
// Registers: O = 16 * kChunks a thread.
#include "../common/dropout.cuh"
#include "../common/fp8.cuh"
#include "../common/kv_placement.cuh"
#include "../common/reduce.cuh"
#include "../common/vector.cuh"
#include "attention_prefill.cuh"
#include "softmax.cuh"

namespace nvb {
namespace {

constexpr int kRows = kPrefillSimtRows;
constexpr int kKeys = 64;
constexpr int kDepth = 32;    // of the head dimension in one step of Q . K^T
constexpr int kColumns = 64;  // of the head dimension in one step of P . V
constexpr int kThreads = 256;
constexpr int kPitch = 64 + 4;  // floats; rows stay 16-byte aligned and start in different banks
static_assert(kRows == 64 && kKeys == 64, "16 x 16 threads own 4 x 4 patches");

// Where the rows of a tensor lie: `stride` elements apart, or as `places` say.
struct Rows {
  int64_t stride;
  int64_t block_stride;
  const uint32_t* places;  // null: none
};

// Elements of rows with scales of their own.
struct KvRowElements {
  const uint8_t* rows;
  uint32_t dtype;
  int dim;
};
template <typename T>
__device__ __forceinline__ float element_at(const T* elements, int64_t row, int column) {
  return to_float(elements[row + column]);
}
__device__ __forceinline__ float element_at(const KvRowElements& elements, int64_t row, int column) {
  return kv_row_element(elements.rows + row, elements.dtype, elements.dim, column);
}

// Calls store(row, column, element) for this thread's part of 64 rows and kWidth columns from first_column on: zero
// outside valid_rows x dim, and for rows that lie nowhere. kUnroll loads are under way at a time.
template <int kWidth, int kUnroll, typename Elements, typename Store>
__device__ __forceinline__ void load_rows(const Elements& global, const Rows& rows, int valid_rows, int first_column,
                                          int dim, const Store& store) {
  constexpr int kCount = 64 * kWidth / kThreads;
  if (rows.places == nullptr) {
#pragma unroll kUnroll
    for (int i = 0; i < kCount; ++i) {
      const int index = i * kThreads + static_cast<int>(threadIdx.x);
      const int row = index / kWidth;
      const int column = index % kWidth;
      const bool valid = row < valid_rows && first_column + column < dim;
      store(row, column, valid ? element_at(global, row * rows.stride, first_column + column) : 0.0f);
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kCount; ++i) {
    const int index = i * kThreads + static_cast<int>(threadIdx.x);
    const int row = index / kWidth;
    const int column = index % kWidth;
    const uint32_t place = row < valid_rows ? rows.places[row] : kNoRow;
    const bool valid = place != kNoRow && first_column + column < dim;
    const int64_t offset = valid ? kv_offset(rows.block_stride, place, rows.stride) : 0;
    store(row, column, valid ? element_at(global, offset, first_column + column) : 0.0f);
  }
}

// shared[column][row] = global[row][first_column + column].
template <int kUnroll, typename Elements>
__device__ __forceinline__ void load_transposed(float (*shared)[kPitch], const Elements& global, const Rows& rows,
                                                int valid_rows, int first_column, int dim) {
  load_rows<kDepth, kUnroll>(global, rows, valid_rows, first_column, dim,
                             [&](int row, int column, float value) { shared[column][row] = value; });
}

// shared[row][column] = global[row][first_column + column].
template <int kUnroll, typename Elements>
__device__ __forceinline__ void load_straight(float (*shared)[kPitch], const Elements& global, const Rows& rows,
                                              int valid_rows, int first_column, int dim) {
  load_rows<kColumns, kUnroll>(global, rows, valid_rows, first_column, dim,
                               [&](int row, int column, float value) { shared[row][column] = value; });
}

// Calls `use` with `base + offset` as a pointer of the tensor's element type, or as rows of `dim` elements.
template <typename Use>
__device__ __forceinline__ void with_elements(const void* base, uint32_t dtype, int64_t offset, int dim,
                                              const Use& use) {
  if (dtype == NVB_F32) {
    use(static_cast<const float*>(base) + offset);
  } else if (dtype == NVB_F16) {
    use(static_cast<const __half*>(base) + offset);
  } else if (dtype == NVB_F8_E4M3) {
    use(static_cast<const fp8_e4m3*>(base) + offset);
  } else if (dtype == NVB_F8_E5M2) {
    use(static_cast<const fp8_e5m2*>(base) + offset);
  } else if (is_kv_row(dtype)) {
    use(KvRowElements{static_cast<const uint8_t*>(base) + offset, dtype, dim});
  } else {
    use(static_cast<const __nv_bfloat16*>(base) + offset);
  }
}

// sum[i][j] += left[k][4 * y + i] * right[k][4 * x + j] for k < Depth.
template <int Depth>
__device__ __forceinline__ void multiply(float (&sum)[4][4], const float (*left)[kPitch], const float (*right)[kPitch],
                                         int y, int x) {
#pragma unroll 8
  for (int k = 0; k < Depth; ++k) {
    float a[4];
    float b[4];
    load16_as_float<float>(&left[k][4 * y], a);
    load16_as_float<float>(&right[k][4 * x], b);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[i][j] = fmaf(a[i], b[j], sum[i][j]);
    }
  }
}

template <int kChunks>
__global__ void __launch_bounds__(kThreads, 1)
    attention_prefill_simt_kernel(const __grid_constant__ PrefillArguments arguments) {
  __shared__ __align__(16) float operands[2 * kDepth][kPitch];  // Q and K, or V
  __shared__ __align__(16) float probability[kKeys][kPitch];    // [key][row]
  __shared__ uint32_t places[kKeys];                            // of the tile's keys, in rings and pages
  static_assert(2 * kDepth >= kKeys, "V takes the place of Q and K");
  // Where O takes 64 registers and more, the addresses of 16 loads do not fit beside it: 592 bytes spilled for 512
  // columns. One block a multiprocessor is promised, because ptxas otherwise spills at 128 registers to let two of them
  // run.
  constexpr int kUnroll = kChunks > 4 ? 4 : kChunks > 2 ? 8 : 16;

  // Which rows, and which keys they see.
  const nvb_attention_prefill_params& p = arguments.params;
  const PrefillBlock block = find_prefill_block(arguments, blockIdx.x, kRows);
  if (block.sequence < 0) return;
  const nvb_attention_sequence sequence = prefill_sequence(p, block.sequence);
  const int rows = min(kRows, sequence.query_count - block.first_row);
  const int position = sequence.kv_length - sequence.query_count + block.first_row;
  // The rows of a tree stand at the first one's position or behind it.
  const int trunk = sequence.kv_length - sequence.query_count;
  const int nearest = p.tree_parents != nullptr ? trunk : position;
  const int first_key = visible_keys<true>(p, sequence.kv_length, sequence.prefix, nearest).first;
  const int last_key = visible_keys<true>(p, sequence.kv_length, sequence.prefix, position + rows - 1).last;

  const int x = threadIdx.x % 16;
  const int y = threadIdx.x / 16;
  const int kv_head = block.head / (p.query_heads / p.kv_heads);
  const int64_t first_query = query_offset(p, sequence, block);
  const auto scale_of = [&](const float* scales, int stride) {
    return scales != nullptr ? scales[kv_head * stride] : 1.0f;
  };
  const float scale =
      p.scale * scale_of(p.query_scale, p.query_scale_stride) * scale_of(p.key_scale, p.key_scale_stride);
  const float slope = p.slopes != nullptr ? p.slopes[block.head] : 0.0f;
  const float value_scale = scale_of(p.value_scale, p.value_scale_stride);
  const bool placed = is_placed(p.placement);
  const int kv_start = p.placement.pages != nullptr ? 0 : sequence.kv_start;
  const int64_t key_offset = kv_start * p.key_sequence_stride + kv_head * p.key_head_stride;
  const int64_t value_offset = kv_start * p.value_sequence_stride + kv_head * p.value_head_stride;
  const Rows query_rows{p.query_token_stride, 0, nullptr};
  const Rows key_rows{p.key_token_stride, p.placement.block_stride, placed ? places : nullptr};
  const Rows value_rows{p.value_token_stride, p.placement.value_block_stride, placed ? places : nullptr};

  float output[kChunks][4][4] = {};
  float maximum[4];
  float sum[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) maximum[i] = -CUDART_INF_F;

  const bool has_bits = p.mask != nullptr && p.mask_dtype == NVB_I32;
  // The tiles of the first tokens, where those lie before the window, and then the window's.
  const int sinks = min(p.sink_tokens, first_key);
  const auto next_tile = [&](int tile_key) {
    const int next = tile_key + kKeys;
    return tile_key < sinks && next >= sinks ? first_key : next;
  };
  for (int tile_key = sinks > 0 ? 0 : first_key; tile_key <= last_key; tile_key = next_tile(tile_key)) {
    const int valid_keys = (tile_key < sinks ? sinks : last_key + 1) - tile_key;
    // A tile of whose keys no row sees one is left out. Its keys lie in up to three words, and words past that of the
    // last key need not be there.
    if (has_bits) {
      constexpr int kWords = kKeys / 32 + 1;
      bool any = false;
      for (int i = threadIdx.x; i < rows * kWords; i += kThreads) {
        const int word = tile_key / 32 + i % kWords;
        if (word > min(tile_key + kKeys - 1, last_key) / 32) continue;
        any |= static_cast<const uint32_t*>(p.mask)[mask_offset(p, sequence, block, i / kWords) + word] != 0;
      }
      if (!__syncthreads_or(any)) continue;
    }
    // Of a tile's places the last are read behind the barrier after which these are written.
    if (placed) {
      __syncthreads();
      if (static_cast<int>(threadIdx.x) < min(valid_keys, kKeys)) {
        places[threadIdx.x] = kv_row(p.placement, page_row(p, sequence), tile_key + threadIdx.x);
      }
    }

    // S = Q . K^T.
    float score[4][4] = {};
    for (int column = 0; column < p.head_dim; column += kDepth) {
      __syncthreads();
      with_elements(p.query, p.query_dtype, first_query, p.head_dim, [&](const auto& query) {
        load_transposed<kUnroll>(operands, query, query_rows, rows, column, p.head_dim);
      });
      const int64_t first = key_offset + (placed ? 0 : tile_key * p.key_token_stride);
      with_elements(p.key, p.kv_dtype, first, p.head_dim, [&](const auto& key) {
        load_transposed<kUnroll>(operands + kDepth, key, key_rows, valid_keys, column, p.head_dim);
      });
      __syncthreads();
      multiply<kDepth>(score, operands, operands + kDepth, y, x);
    }

    // Scale, soft cap, mask; then the running maximum, and P to shared memory. 16 neighbouring lanes share a row.
    float rescale[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      KeyRange range = visible_keys<true>(p, sequence.kv_length, sequence.prefix, position + 4 * y + i);
      uint64_t seen = ~uint64_t{0};
      if (p.tree_parents != nullptr && 4 * y + i < rows && (p.window > 0 || tile_key + kKeys > trunk)) {
        seen = tree_ancestors(tree_of(p, sequence), block.first_row + 4 * y + i);
        range.first = visible_keys<true>(p, sequence.kv_length, 0, trunk + __popcll(seen) - 1).first;
      }
      // Rows past the last are masked by nothing, and stored nowhere.
      const int64_t bias = p.mask != nullptr && 4 * y + i < rows ? mask_offset(p, sequence, block, 4 * y + i) : -1;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float s = score[i][j] * scale;
        if (p.soft_cap > 0.0f) s = p.soft_cap * tanhf(s / p.soft_cap);
        const int key = tile_key + 4 * x + j;
        s -= slope * fabsf(static_cast<float>(position + 4 * y + i - key));
        // A tile of the first tokens ends with the last of them, though the window may begin within it.
        bool hidden = (key < range.first && key >= p.sink_tokens) || key > range.last || key >= tile_key + valid_keys;
        if (bias >= 0 && key <= range.last) {
          if (has_bits) {
            hidden |= (static_cast<const uint32_t*>(p.mask)[bias + key / 32] >> (key % 32) & 1u) == 0;
          } else {
            s += load_element(p.mask, p.mask_dtype, bias + key);
          }
        }
        if (key >= trunk && key - trunk < kMaxTreeRows) hidden |= (seen >> (key - trunk) & 1u) == 0;
        score[i][j] = hidden ? -CUDART_INF_F : s * kLog2E;
      }
      float most = fmaxf(fmaxf(score[i][0], score[i][1]), fmaxf(score[i][2], score[i][3]));
      most = fmaxf(maximum[i], warp_max<16>(most));
      const float base = exponent_base(most);
      rescale[i] = exp2_fast(maximum[i] - base);
      maximum[i] = most;
      float added = 0.0f;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        score[i][j] = exp2_fast(score[i][j] - base);
        added += score[i][j];
      }
      sum[i] = sum[i] * rescale[i] + added;
    }
    if (p.dropout_threshold > 0) {
      // A thread's four neighbouring keys have bytes of two blocks, or of three.
      const uint64_t added =
          p.dropout_offsets == nullptr ? 0 : static_cast<uint64_t>(p.dropout_offsets[1]) << 32 | p.dropout_offsets[0];
      const uint64_t offset = p.dropout_offset + added;
      const uint32_t of_head = static_cast<uint32_t>(block.head) | static_cast<uint32_t>(offset >> 32) << 16;
      const uint2 seed = make_uint2(static_cast<uint32_t>(p.dropout_seed), static_cast<uint32_t>(p.dropout_seed >> 32));
      const uint32_t first = static_cast<uint32_t>(tile_key + 4 * x);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t row =
            static_cast<uint32_t>(sequence.query_start * p.lse_sequence_stride + block.first_row) + 4 * y + i;
        uint4 words = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t key = first + j, byte = dropout_byte(key);
          if (j == 0 || key % 2 == 0) {
            words = dropout_words(make_uint4(dropout_block(key), row, of_head, static_cast<uint32_t>(offset)), seed);
          }
          const uint32_t word = byte < 8 ? (byte < 4 ? words.x : words.y) : (byte < 12 ? words.z : words.w);
          const bool kept = (word >> byte % 4 * 8 & 0xff) >= p.dropout_threshold;
          score[i][j] = kept ? score[i][j] * p.dropout_scale : 0.0f;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float column[4] = {score[0][j], score[1][j], score[2][j], score[3][j]};
      store16_from_float<float>(&probability[4 * x + j][4 * y], column);
    }

    // O = O * rescale + P . V, 64 columns at a time.
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (chunk * kColumns >= p.value_dim) break;
      __syncthreads();
      const int64_t first = value_offset + (placed ? 0 : tile_key * p.value_token_stride);
      with_elements(p.value, value_dtype_of(p), first, p.value_dim, [&](const auto& value) {
        load_straight<kUnroll>(operands, value, value_rows, valid_keys, chunk * kColumns, p.value_dim);
      });
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) output[chunk][i][j] *= rescale[i];
      }
      multiply<kKeys>(output[chunk], probability, operands, y, x);
    }
  }

  // Normalise and store.
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 4 * y + i;
    const float total = warp_sum<16>(sum[i]);
    const RowEnd end = row_end(maximum[i], total, p.sinks, block.head);
    const float inverse = end.inverse * value_scale;
    if (row >= rows) continue;
    if (p.lse != nullptr && x == 0) p.lse[lse_offset(p, sequence, block, row)] = end.lse;
    const int64_t start = output_offset(p, sequence, block) + row * p.output_token_stride;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = chunk * kColumns + 4 * x + j;
        if (column < p.value_dim)
          store_element(p.output, p.output_dtype, start + column, output[chunk][i][j] * inverse);
      }
    }
  }
}

}  // namespace

cudaError_t launch_prefill_simt(const PrefillArguments& arguments, int blocks, cudaStream_t stream) {
  if (arguments.params.value_dim <= 128) {
    attention_prefill_simt_kernel<2><<<blocks, kThreads, 0, stream>>>(arguments);
  } else if (arguments.params.value_dim <= 256) {
    attention_prefill_simt_kernel<4><<<blocks, kThreads, 0, stream>>>(arguments);
  } else {
    attention_prefill_simt_kernel<8><<<blocks, kThreads, 0, stream>>>(arguments);
  }
  return cudaGetLastError();
}

}  // namespace nvb
