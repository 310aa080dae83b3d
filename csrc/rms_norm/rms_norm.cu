// rms_norm: post-norm, residual sum and norm of one row in one pass over memory (formula in rms_norm.h).
//
// Shapes: [rows, columns], dtypes per operand, vectors of 8, 4 or 1 elements by alignment. Work: a row block
// (row_block.cuh) a row; rows of at most 256 or 512 elements (head_dim) are one warp each, four to a block.
// Registers: `rms_norm_kernel` keeps the row in registers, 8 or 16 f32 a thread (norm.cuh). It has four forms: the
// norm alone, in few registers so that more rows are under way at once; with the residual sum; and the same for few
// rows, where nobody else hides the latency of a load, so that more threads fetch all they need at the start, weights
// that are constant (constant_reads.h) before the grid in front has finished.
// `rms_norm_long_kernel` takes longer rows and reads them again for each step, through L2: 65536 f32 are a whole
// register file. Output in 8 bits needs the largest magnitude of the normalised row, a third reduction; kernels for it
// are apart, so that the others stay in few registers. Shared memory: 256 bytes for the two reductions, 384 for three.
#include "../common/constant_reads.h"
#include "../common/norm.cuh"
#include "../common/quantized_output.cuh"
#include "rms_norm.h"

namespace nvb {
namespace {

template <int Width>
constexpr int64_t kRegisterRow = kRowValues<Width> * kRowThreads<Width>;
constexpr int64_t kShortRow = kShortRowValues * 32;

enum class form { plain, sums, few_rows, few_rows_constant };

// The plain form of 16-bit operands is held to 64 or 32 registers, for 1024 or 2048 threads on a multiprocessor.
template <int Width, form Form>
constexpr bool kIsNarrow = Width == 8 && Form == form::plain;
constexpr int kNarrowThreads = 512;

template <int Width>
__device__ __forceinline__ float sum_of_squares(const float (&values)[Width], float sum) {
#pragma unroll
  for (int i = 0; i < Width; ++i) sum += values[i] * values[i];
  return sum;
}

// norm() with the weights of these columns; a null weight multiplies by one.
template <int Width>
__device__ __forceinline__ void normalize(const nvb_rms_norm_params& p, const void* weight, const uint4& raw_weight,
                                          float inverse, float (&values)[Width]) {
  if (weight != nullptr) {
    float weights[Width];
    unpack_raw<Width>(raw_weight, p.weight_dtype, weights);
#pragma unroll
    for (int i = 0; i < Width; ++i) values[i] = values[i] * inverse * (p.weight_offset + weights[i]);
  } else {
#pragma unroll
    for (int i = 0; i < Width; ++i) values[i] *= inverse;
  }
}

__device__ __forceinline__ float inverse_rms(const nvb_rms_norm_params& p, float sum) {
  return rsqrtf(sum / static_cast<float>(p.columns) + p.epsilon);
}

constexpr int kPrefetchedBytes = 64;  // of a weight, that one thread asks for
constexpr int kRowsThatPrefetch = 16;

template <int Width, int Values, form Form, bool Quantizes>
__global__ void __launch_bounds__(kIsNarrow<Width, Form> ? kNarrowThreads : kRowThreads<Width>,
                                  !kIsNarrow<Width, Form>     ? 1
                                  : Values == kShortRowValues ? 4
                                                              : 2) rms_norm_kernel(const nvb_rms_norm_params p) {
  constexpr bool kSums = Form != form::plain;
  constexpr bool kConstant = Form == form::few_rows_constant;
  constexpr bool kEarly = Form == form::few_rows || kConstant;  // fetches the second weight, too, at the start
  constexpr int kVectors = Values / Width;
  __shared__ float post_scratch[32];
  __shared__ float scratch[32];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int columns = static_cast<int>(p.columns);
  const int first = threadIdx.x * Width;
  const int step = blockDim.x * Width;
  const bool has_post_weight = kSums && p.post_weight != nullptr;
  const void* first_weight = has_post_weight ? p.post_weight : p.weight;
  uint4 input[kVectors];
  uint4 residual[kVectors];
  uint4 weight[kVectors];
  uint4 second_weight[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) input[v] = residual[v] = weight[v] = second_weight[v] = make_uint4(0, 0, 0, 0);
  // The weight that is needed first; the second one, too, where all is fetched at the start.
  const auto load_weights = [&](int v, int column) {
    if (first_weight != nullptr) weight[v] = load_raw<Width>(first_weight, p.weight_dtype, column);
    if (kEarly && has_post_weight && p.weight != nullptr) {
      second_weight[v] = load_raw<Width>(p.weight, p.weight_dtype, column);
    }
  };

  allow_next_grid();
  if constexpr (kConstant) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (first + v * step < columns) load_weights(v, first + v * step);
    }
  }
#if __CUDA_ARCH__ >= 900
  // Weights that may be written are asked for in L2, which is right whoever writes them: a step has driven them out. Of
  // more rows the first ones' loads do that.
  if (Form == form::few_rows && p.rows <= kRowsThatPrefetch) {
    const int weight_bytes = p.weight_dtype == NVB_F32 ? 4 : 2;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int at = (first + v * step) * weight_bytes;
      if (first + v * step >= columns || at % kPrefetchedBytes != 0) continue;
      if (first_weight != nullptr) prefetch_l2(static_cast<const char*>(first_weight) + at);
      if (has_post_weight && p.weight != nullptr) prefetch_l2(static_cast<const char*>(p.weight) + at);
    }
  }
#endif
  wait_for_previous_grid();
  if (row >= p.rows) return;

  // Load the row, the residual and, unless they are there, the weights.
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = first + v * step;
    if (column < columns) {
      input[v] = load_raw_input<Width>(p, row, column);
      if (kSums && p.residual != nullptr) residual[v] = load_raw_residual<Width>(p, row, column);
      if (!kConstant) load_weights(v, column);
    }
  }
  float values[kVectors][Width];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) unpack_raw<Width>(input[v], p.input_dtype, values[v]);

  // Post-norm. The second weight is fetched once the first is used up, before the second reduction. What lies past the
  // row's end was loaded as zero and stays zero.
  if (has_post_weight) {
    float sum = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) sum = sum_of_squares<Width>(values[v], sum);
    const float inverse = inverse_rms(p, row_sum(sum, post_scratch));
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = first + v * step;
      normalize<Width>(p, p.post_weight, weight[v], inverse, values[v]);
      if (kEarly) {
        weight[v] = second_weight[v];
      } else if (p.weight != nullptr && column < columns) {
        weight[v] = load_raw<Width>(p.weight, p.weight_dtype, column);
      }
    }
  }

  // Residual sum.
  if (kSums && p.residual != nullptr) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) add_residual<Width>(p, residual[v], values[v]);
  }
  if (kSums && p.residual_output != nullptr) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = first + v * step;
      if (column < columns) store_residual_output<Width>(p, row, column, values[v]);
    }
  }
  if (!Quantizes && p.output == nullptr) return;

  // Norm.
  float sum = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) sum = sum_of_squares<Width>(values[v], sum);
  const float inverse = inverse_rms(p, row_sum(sum, scratch));
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = first + v * step;
    if (column >= columns) break;
    normalize<Width>(p, p.weight, weight[v], inverse, values[v]);
    if (!Quantizes || p.output != nullptr) store_output<Width>(p, row, column, values[v]);
  }

  // The row is still in registers when its largest magnitude is known, and is stored in 8 bits from there.
  if constexpr (Quantizes) {
    __shared__ uint32_t magnitude_scratch[32];
    uint32_t most = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (first + v * step < columns) most = largest_bits<Width>(values[v], most);
    }
    const float code_inverse = store_row_scale(p.quantized_output, row, row_largest_bits(most, magnitude_scratch));
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = first + v * step;
      if (column < columns) store_codes<Width>(p.quantized_output, row, column, code_inverse, values[v]);
    }
  }
}

// s at `column`, from memory.
template <int Width>
__device__ __forceinline__ void load_residual_sum(const nvb_rms_norm_params& p, int64_t row, int64_t column,
                                                  float post_inverse, float (&values)[Width]) {
  load_vector<Width>(p.input, p.input_dtype, row * p.input_stride + column, values);
  if (p.post_weight != nullptr) {
    const uint4 weight = load_raw<Width>(p.post_weight, p.weight_dtype, column);
    normalize<Width>(p, p.post_weight, weight, post_inverse, values);
  }
  if (p.residual != nullptr) add_residual<Width>(p, load_raw_residual<Width>(p, row, column), values);
}

// norm(s) at `column`, from memory.
template <int Width>
__device__ __forceinline__ void normalize_sum(const nvb_rms_norm_params& p, int64_t column, float inverse,
                                              float (&values)[Width]) {
  uint4 weight = make_uint4(0, 0, 0, 0);
  if (p.weight != nullptr) weight = load_raw<Width>(p.weight, p.weight_dtype, column);
  normalize<Width>(p, p.weight, weight, inverse, values);
}

template <int Width, bool Quantizes>
__global__ void __launch_bounds__(kLongRowThreads) rms_norm_long_kernel(const nvb_rms_norm_params p) {
  __shared__ float post_scratch[32];
  __shared__ float scratch[32];
  const int64_t row = blockIdx.x;
  const int64_t first = static_cast<int64_t>(threadIdx.x) * Width;
  const int64_t step = static_cast<int64_t>(blockDim.x) * Width;
  float values[Width];
  begin_overlapped();

  // Mean square of the input.
  float post_inverse = 1.0f;
  if (p.post_weight != nullptr) {
    float sum = 0.0f;
    for (int64_t column = first; column < p.columns; column += step) {
      load_vector<Width>(p.input, p.input_dtype, row * p.input_stride + column, values);
      sum = sum_of_squares<Width>(values, sum);
    }
    post_inverse = inverse_rms(p, row_sum(sum, post_scratch));
  }

  // Mean square of s.
  float inverse = 1.0f;
  if (Quantizes || p.output != nullptr) {
    float sum = 0.0f;
    for (int64_t column = first; column < p.columns; column += step) {
      load_residual_sum<Width>(p, row, column, post_inverse, values);
      sum = sum_of_squares<Width>(values, sum);
    }
    inverse = inverse_rms(p, row_sum(sum, scratch));
  }

  // Largest magnitude of the normalised row.
  float code_inverse = 0.0f;
  if constexpr (Quantizes) {
    __shared__ uint32_t magnitude_scratch[32];
    uint32_t most = 0;
    for (int64_t column = first; column < p.columns; column += step) {
      load_residual_sum<Width>(p, row, column, post_inverse, values);
      normalize_sum<Width>(p, column, inverse, values);
      most = largest_bits<Width>(values, most);
    }
    code_inverse = store_row_scale(p.quantized_output, row, row_largest_bits(most, magnitude_scratch));
  }

  // Store all. Each element is read for the last time by the thread that then overwrites it, so in place is sound.
  for (int64_t column = first; column < p.columns; column += step) {
    load_residual_sum<Width>(p, row, column, post_inverse, values);
    if (p.residual_output != nullptr) store_residual_output<Width>(p, row, column, values);
    if (Quantizes || p.output != nullptr) normalize_sum<Width>(p, column, inverse, values);
    if (p.output != nullptr) store_output<Width>(p, row, column, values);
    if constexpr (Quantizes) store_codes<Width>(p.quantized_output, row, column, code_inverse, values);
  }
}

template <int Width, int Values, form Form, bool Quantizes = false>
cudaError_t enqueue_form(const nvb_rms_norm_params& p, const nvb_launch* launch) {
  return enqueue_row_blocks(rms_norm_kernel<Width, Values, Form, Quantizes>, p, Width, Values, launch);
}

template <int Width, bool Quantizes = false>
cudaError_t enqueue_few_rows(const nvb_rms_norm_params& p, const nvb_launch* launch) {
  return (nvb_cuda_constant_reads() & NVB_CONSTANT_WEIGHTS) != 0
             ? enqueue_form<Width, kShortRowValues, form::few_rows_constant, Quantizes>(p, launch)
             : enqueue_form<Width, kShortRowValues, form::few_rows, Quantizes>(p, launch);
}

template <int Width>
cudaError_t enqueue_quantized(const nvb_rms_norm_params& p, const nvb_launch* launch) {
  if (p.columns > kRegisterRow<Width>) return enqueue_long_rows(rms_norm_long_kernel<Width, true>, p, launch);
  if (p.rows <= launch->multiprocessors && p.columns <= kShortRowValues * kRowThreads<Width>) {
    return enqueue_few_rows<Width, true>(p, launch);
  }
  if (p.columns <= kShortRow) return enqueue_form<Width, kShortRowValues, form::sums, true>(p, launch);
  return enqueue_form<Width, kRowValues<Width>, form::sums, true>(p, launch);
}

template <int Width>
cudaError_t enqueue(const nvb_rms_norm_params& p, const nvb_launch* launch) {
  if (p.quantized_output.data != nullptr) return enqueue_quantized<Width>(p, launch);
  const bool sums = p.post_weight != nullptr || p.residual != nullptr || p.residual_output != nullptr;
  if (p.columns > kRegisterRow<Width>) return enqueue_long_rows(rms_norm_long_kernel<Width, false>, p, launch);
  if (p.rows <= launch->multiprocessors && p.columns <= kShortRowValues * kRowThreads<Width>) {
    return enqueue_few_rows<Width>(p, launch);
  }
  if (p.columns <= kShortRow) {
    return sums ? enqueue_form<Width, kShortRowValues, form::sums>(p, launch)
                : enqueue_form<Width, kShortRowValues, form::plain>(p, launch);
  }
  if (!sums && p.columns <= kRowValues<Width> * kNarrowThreads) {
    return enqueue_form<Width, kRowValues<Width>, form::plain>(p, launch);
  }
  return enqueue_form<Width, kRowValues<Width>, form::sums>(p, launch);
}

}  // namespace
}  // namespace nvb

extern "C" cudaError_t nvb_cuda_rms_norm(const nvb_rms_norm_params* params, const nvb_launch* launch) noexcept {
  const nvb_rms_norm_params& p = *params;
  if (!nvb_is_valid_output(p.quantized_output)) return cudaErrorInvalidValue;
  return nvb::enqueue_norm(p, p.post_weight, p.weight,
                           [&](auto width) { return nvb::enqueue<decltype(width)::value>(p, launch); });
}
