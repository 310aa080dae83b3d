// pointwise: functions of elements over four strided axes, with operands that repeat.
//
// Dtypes: every operand its own. Work: a thread an element of the output, neighbours along the axis where the output's
// stride is the smallest, so that stores coalesce; loads do where the operand has the same order of axes. Axes that lie
// one behind the other in every operand are one (collapse), which makes contiguous tensors one long axis without
// divisions to speak of. Indices are 32 bits wide where the output has fewer than 2^31 elements: divisions of 64 bits
// cost some ten times as much. Shared memory: none.
#include "../common/activation.cuh"
#include "../common/runtime_vector.cuh"
#include "pointwise.h"

namespace nvb {
namespace {

constexpr int kThreads = 256;

struct operand {
  const void* data;
  int64_t shape[4];
  int64_t strides[4];
  uint32_t dtype;
};

// What the kernel reads: the axes in the order of its index, outermost first.
struct axes {
  operand input;
  operand second;
  void* output;
  int64_t shape[4];
  int64_t output_strides[4];
  int64_t elements;
  uint32_t function;
  uint32_t output_dtype;
  float alpha;
  float beta;
};

__device__ __forceinline__ float apply(uint32_t function, float x, float y, float alpha, float beta) {
  switch (function) {
    case NVB_POINTWISE_ADD:
      return x + y;
    case NVB_POINTWISE_SUBTRACT:
      return x - y;
    case NVB_POINTWISE_MULTIPLY:
      return x * y;
    case NVB_POINTWISE_DIVIDE:
      return x / y;
    case NVB_POINTWISE_SCALE:
      // Two roundings, as the CPU has them.
      return __fadd_rn(__fmul_rn(x, alpha), beta);
    case NVB_POINTWISE_CLAMP:
      x = x < alpha ? alpha : x;
      return x > beta ? beta : x;
    case NVB_POINTWISE_NEGATE:
      return -x;
    case NVB_POINTWISE_ABSOLUTE:
      return fabsf(x);
    case NVB_POINTWISE_SQUARE:
      return x * x;
    case NVB_POINTWISE_SQUARE_ROOT:
      return sqrtf(x);
    case NVB_POINTWISE_EXPONENTIAL:
      return expf(x);
    case NVB_POINTWISE_TANH:
      return tanhf(x);
    case NVB_POINTWISE_SIGMOID:
      return 1.0f / (1.0f + expf(-x));
    case NVB_POINTWISE_RELU:
      return x < 0.0f ? 0.0f : x;
    case NVB_POINTWISE_SILU:
      return activate(NVB_SILU, x);
    case NVB_POINTWISE_GELU_TANH:
      return activate(NVB_GELU_TANH, x);
    case NVB_POINTWISE_GELU_ERF:
      return activate(NVB_GELU_ERF, x);
    case NVB_POINTWISE_GELU_SIGMOID:
      // x = -inf would be -inf * 0.
      return (x < -3.402823466e38f ? -3.402823466e38f : x) / (1.0f + expf(-1.702f * x));
    default:
      return x;
  }
}

template <typename Index>
__device__ __forceinline__ int64_t offset_of(const operand& of, const Index (&place)[4]) {
  int64_t offset = 0;
#pragma unroll
  for (int axis = 0; axis < 4; ++axis) {
    const Index extent = static_cast<Index>(of.shape[axis]);
    // One element serves all by a stride of 0; only other extents need the division.
    const Index at = place[axis] < extent ? place[axis] : place[axis] % extent;
    offset += static_cast<int64_t>(at) * of.strides[axis];
  }
  return offset;
}

template <typename Index>
__global__ void __launch_bounds__(kThreads) pointwise_kernel(const axes p) {
  const int64_t element = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (element >= p.elements) return;
  Index rest = static_cast<Index>(element);
  Index place[4];
#pragma unroll
  for (int axis = 3; axis > 0; --axis) {
    const Index extent = static_cast<Index>(p.shape[axis]);
    const Index outer = rest / extent;
    place[axis] = rest - outer * extent;
    rest = outer;
  }
  place[0] = rest;
  const float x = load_element(p.input.data, p.input.dtype, offset_of(p.input, place));
  const float y =
      p.second.data == nullptr ? 0.0f : load_element(p.second.data, p.second.dtype, offset_of(p.second, place));
  int64_t to = 0;
#pragma unroll
  for (int axis = 0; axis < 4; ++axis) to += static_cast<int64_t>(place[axis]) * p.output_strides[axis];
  store_element(p.output, p.output_dtype, to, apply(p.function, x, y, p.alpha, p.beta));
}

void swap_axes(axes& p, int a, int b) {
  const auto swap = [&](int64_t(&values)[4]) {
    const int64_t kept = values[a];
    values[a] = values[b];
    values[b] = kept;
  };
  swap(p.shape);
  swap(p.output_strides);
  swap(p.input.shape);
  swap(p.input.strides);
  swap(p.second.shape);
  swap(p.second.strides);
}

// Orders the axes by the output's strides, the largest first; axes of one place go to the front.
void order(axes& p) {
  const auto key = [&](int axis) { return p.shape[axis] == 1 ? INT64_MAX : p.output_strides[axis]; };
  for (int last = 3; last > 0; --last) {
    for (int axis = 0; axis < last; ++axis) {
      if (key(axis) < key(axis + 1)) swap_axes(p, axis, axis + 1);
    }
  }
}

bool joins(const operand& of, const axes& p, int outer) {
  if (of.data == nullptr || (of.shape[outer] == 1 && of.shape[outer + 1] == 1)) return true;
  // An operand that repeats along either axis keeps both.
  if (of.shape[outer] != p.shape[outer] || of.shape[outer + 1] != p.shape[outer + 1]) return false;
  return of.strides[outer] == of.strides[outer + 1] * of.shape[outer + 1];
}

// Makes one axis of two wherever every operand steps through them evenly.
void collapse(axes& p) {
  for (int outer = 2; outer >= 0; --outer) {
    const bool even = p.output_strides[outer] == p.output_strides[outer + 1] * p.shape[outer + 1];
    if (p.shape[outer] == 1 || !even || !joins(p.input, p, outer) || !joins(p.second, p, outer)) continue;
    const auto join = [&](int64_t(&shape)[4]) {
      shape[outer + 1] *= shape[outer];
      shape[outer] = 1;
    };
    join(p.shape);
    join(p.input.shape);
    join(p.second.shape);
    // The axis in front becomes the neighbour of the one that has grown.
    for (int axis = outer; axis > 0; --axis) swap_axes(p, axis - 1, axis);
    outer = 3;
  }
}

bool is_supported(const nvb_pointwise_params& p) {
  if (p.function < NVB_POINTWISE_COPY || p.function > NVB_POINTWISE_GELU_SIGMOID) return false;
  const bool binary = p.function >= NVB_POINTWISE_ADD && p.function <= NVB_POINTWISE_DIVIDE;
  if (binary != (p.second != nullptr) || (binary && float_dtype_bytes(p.second_dtype) == 0)) return false;
  const bool words = p.function == NVB_POINTWISE_COPY && p.input_dtype == NVB_I32 && p.output_dtype == NVB_I32;
  return words || (float_dtype_bytes(p.input_dtype) != 0 && float_dtype_bytes(p.output_dtype) != 0);
}

}  // namespace
}  // namespace nvb

extern "C" cudaError_t nvb_cuda_pointwise(const nvb_pointwise_params* params, const nvb_launch* launch) noexcept {
  const nvb_pointwise_params& p = *params;
  if (!nvb::is_supported(p)) return cudaErrorInvalidValue;
  nvb::axes all = {};
  // Words move as f32, which keeps every bit of what is only loaded and stored.
  const auto float_dtype = [](uint32_t dtype) { return dtype == NVB_I32 ? static_cast<uint32_t>(NVB_F32) : dtype; };
  all.input.data = p.input;
  all.input.dtype = float_dtype(p.input_dtype);
  all.second.data = p.second;
  all.second.dtype = p.second_dtype;
  all.output = p.output;
  all.output_dtype = float_dtype(p.output_dtype);
  all.function = p.function;
  all.alpha = p.alpha;
  all.beta = p.beta;
  all.elements = 1;
  for (int axis = 0; axis < 4; ++axis) {
    all.shape[axis] = p.shape[axis];
    all.output_strides[axis] = p.output_strides[axis];
    all.input.shape[axis] = p.input_shape[axis];
    all.input.strides[axis] = p.input_shape[axis] == 1 ? 0 : p.input_strides[axis];
    all.second.shape[axis] = p.second == nullptr ? p.shape[axis] : p.second_shape[axis];
    all.second.strides[axis] = p.second == nullptr || p.second_shape[axis] == 1 ? 0 : p.second_strides[axis];
    all.elements *= p.shape[axis];
  }
  nvb::order(all);
  nvb::collapse(all);
  const int64_t blocks = (all.elements + nvb::kThreads - 1) / nvb::kThreads;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  if (all.elements <= INT32_MAX) {
    nvb::pointwise_kernel<uint32_t><<<static_cast<unsigned>(blocks), nvb::kThreads, 0, launch->stream>>>(all);
  } else {
    nvb::pointwise_kernel<uint64_t><<<static_cast<unsigned>(blocks), nvb::kThreads, 0, launch->stream>>>(all);
  }
  return cudaGetLastError();
}
