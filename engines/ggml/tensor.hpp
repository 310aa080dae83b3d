// Reading the host's tensors: their types, rows and parameters, and the library's tensors over them.
#pragma once

#include <nvbackend.h>

#include <cstring>

#include "ggml_abi.hpp"

namespace nvb_ggml {

struct TypeTraits {
  uint32_t dtype;  // 0 of what no nvb_tensor has
  int64_t block;   // elements that one block of bytes holds
  size_t bytes;    // of a block
};

// {0, 0, 0} for a type that the plug-in does not read.
constexpr TypeTraits traits(int32_t type) {
  switch (type) {
    case TYPE_F32:
      return {NVB_DTYPE_F32, 1, 4};
    case TYPE_F16:
      return {NVB_DTYPE_F16, 1, 2};
    case TYPE_BF16:
      return {NVB_DTYPE_BF16, 1, 2};
    case TYPE_I32:
      return {NVB_DTYPE_I32, 1, 4};
    case TYPE_I64:
      return {0, 1, 8};
    case TYPE_Q4_0:
      return {0, 32, 18};
    case TYPE_Q8_0:
      return {0, 32, 34};
    case TYPE_Q4_K:
      return {0, 256, 144};
    case TYPE_Q6_K:
      return {0, 256, 210};
    default:
      return {0, 0, 0};
  }
}

inline bool is_float(int32_t type) {
  return type == TYPE_F32 || type == TYPE_F16 || type == TYPE_BF16;
}

inline bool is_quantized(int32_t type) {
  return traits(type).block > 1;
}

// Whether elements of a row lie one behind the other.
inline bool has_rows(const Tensor& tensor) {
  const TypeTraits type = traits(tensor.type);
  return type.block != 0 && (tensor.nb[0] == type.bytes || tensor.ne[0] == type.block);
}

// Whether strides are multiples of an element, as the library's are.
inline bool has_element_strides(const Tensor& tensor) {
  const size_t bytes = traits(tensor.type).bytes;
  for (const size_t stride : tensor.nb) {
    if (bytes == 0 || stride % bytes != 0) return false;
  }
  return true;
}

inline bool same_shape(const Tensor& a, const Tensor& b) {
  return std::memcmp(a.ne, b.ne, sizeof a.ne) == 0;
}

inline int64_t elements(const Tensor& tensor) {
  return tensor.ne[0] * tensor.ne[1] * tensor.ne[2] * tensor.ne[3];
}

inline bool is_contiguous(const Tensor& tensor) {
  const TypeTraits type = traits(tensor.type);
  if (!has_rows(tensor)) return false;
  size_t stride = type.bytes * static_cast<size_t>(tensor.ne[0] / type.block);
  for (int axis = 1; axis < 4; ++axis) {
    if (tensor.ne[axis] != 1 && tensor.nb[axis] != stride) return false;
    stride *= static_cast<size_t>(tensor.ne[axis]);
  }
  return true;
}

// The tensor of all four axes, outermost first.
inline nvb_tensor whole(const Tensor& tensor) {
  const TypeTraits type = traits(tensor.type);
  nvb_tensor all = nvb_tensor_make(tensor.data, type.dtype, 4, tensor.ne[3], tensor.ne[2], tensor.ne[1], tensor.ne[0]);
  for (int axis = 0; axis < 4; ++axis) all.strides[3 - axis] = static_cast<int64_t>(tensor.nb[axis] / type.bytes);
  return all;
}

// The rows at places `i2` and `i3` of the outer axes: [ne1, ne0].
inline nvb_tensor rows_at(const Tensor& tensor, int64_t i2, int64_t i3) {
  const TypeTraits type = traits(tensor.type);
  char* data = static_cast<char*>(tensor.data);
  if (data != nullptr) data += i2 * static_cast<int64_t>(tensor.nb[2]) + i3 * static_cast<int64_t>(tensor.nb[3]);
  nvb_tensor rows = nvb_tensor_2d(data, type.dtype, tensor.ne[1], tensor.ne[0]);
  rows.strides[0] = static_cast<int64_t>(tensor.nb[1] / type.bytes);
  rows.strides[1] = 1;
  return rows;
}

// Whether rows of the axes 1, 2 and 3 lie at one distance from each other.
inline bool rows_fold(const Tensor& tensor) {
  return (tensor.ne[2] == 1 || tensor.nb[2] == tensor.nb[1] * static_cast<size_t>(tensor.ne[1])) &&
         (tensor.ne[3] == 1 || tensor.nb[3] == tensor.nb[1] * static_cast<size_t>(tensor.ne[1] * tensor.ne[2]));
}

// All rows as one matrix; `rows_fold` holds.
inline nvb_tensor folded(const Tensor& tensor) {
  nvb_tensor rows = rows_at(tensor, 0, 0);
  rows.shape[0] = tensor.ne[1] * tensor.ne[2] * tensor.ne[3];
  if (tensor.ne[1] == 1 && tensor.ne[2] != 1) {
    rows.strides[0] = static_cast<int64_t>(tensor.nb[2] / traits(tensor.type).bytes);
  } else if (tensor.ne[1] == 1 && tensor.ne[3] != 1) {
    rows.strides[0] = static_cast<int64_t>(tensor.nb[3] / traits(tensor.type).bytes);
  }
  return rows;
}

inline float float_parameter(const Tensor& node, int index) {
  float value;
  std::memcpy(&value, &node.parameters[index], sizeof value);
  return value;
}

// Calls `each(i2, i3)` for the places of two outer axes.
template <typename Each>
void for_outer(const Tensor& tensor, Each&& each) {
  for (int64_t i3 = 0; i3 < tensor.ne[3]; ++i3) {
    for (int64_t i2 = 0; i2 < tensor.ne[2]; ++i2) each(i2, i3);
  }
}

}  // namespace nvb_ggml
