// Reading the host's tensors: their types, rows and parameters, and the library's tensors over them.
#pragma once

#include <nvbackend.h>

#include <cfloat>
#include <cstring>

#include "ggml_abi.hpp"

namespace nvb_ggml {

struct TypeTraits {
  uint32_t dtype;   // 0 of what no nvb_tensor has
  uint32_t blocks;  // NVB_SOURCE_FORMAT_GGUF_... of a quantised type, else 0
  int64_t block;    // elements that one block of bytes holds
  size_t bytes;     // of a block
};

// All 0 for a type that the plug-in does not read.
constexpr TypeTraits traits(int32_t type) {
  switch (type) {
    case TYPE_F32:
      return {NVB_DTYPE_F32, 0, 1, 4};
    case TYPE_F16:
      return {NVB_DTYPE_F16, 0, 1, 2};
    case TYPE_BF16:
      return {NVB_DTYPE_BF16, 0, 1, 2};
    case TYPE_I32:
      return {NVB_DTYPE_I32, 0, 1, 4};
    case TYPE_I64:
      return {0, 0, 1, 8};
    case TYPE_Q4_0:
      return {0, NVB_SOURCE_FORMAT_GGUF_Q4_0, 32, 18};
    case TYPE_Q4_1:
      return {0, NVB_SOURCE_FORMAT_GGUF_Q4_1, 32, 20};
    case TYPE_Q5_0:
      return {0, NVB_SOURCE_FORMAT_GGUF_Q5_0, 32, 22};
    case TYPE_Q5_1:
      return {0, NVB_SOURCE_FORMAT_GGUF_Q5_1, 32, 24};
    case TYPE_Q8_0:
      return {0, NVB_SOURCE_FORMAT_GGUF_Q8_0, 32, 34};
    case TYPE_Q2_K:
      return {0, NVB_SOURCE_FORMAT_GGUF_Q2_K, 256, 84};
    case TYPE_Q3_K:
      return {0, NVB_SOURCE_FORMAT_GGUF_Q3_K, 256, 110};
    case TYPE_Q4_K:
      return {0, NVB_SOURCE_FORMAT_GGUF_Q4_K, 256, 144};
    case TYPE_Q5_K:
      return {0, NVB_SOURCE_FORMAT_GGUF_Q5_K, 256, 176};
    case TYPE_Q6_K:
      return {0, NVB_SOURCE_FORMAT_GGUF_Q6_K, 256, 210};
    case TYPE_IQ4_NL:
      return {0, NVB_SOURCE_FORMAT_GGUF_IQ4_NL, 32, 18};
    case TYPE_IQ4_XS:
      return {0, NVB_SOURCE_FORMAT_GGUF_IQ4_XS, 256, 136};
    case TYPE_MXFP4:
      return {0, NVB_SOURCE_FORMAT_GGUF_MXFP4, 32, 17};
    default:
      return {0, 0, 0, 0};
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

// The same where elements of a block have no strides: of the rows alone.
inline bool has_element_strides_of_rows(const Tensor& tensor) {
  const size_t bytes = traits(tensor.type).bytes;
  return bytes != 0 && tensor.nb[1] % bytes == 0;
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

// Blocks over all four axes, outermost first.
inline nvb_block_tensor whole_blocks(const Tensor& tensor) {
  nvb_block_tensor all;
  std::memset(&all, 0, sizeof all);
  all.data = tensor.data;
  all.source_format = traits(tensor.type).blocks;
  all.rank = 4;
  for (int axis = 0; axis < 4; ++axis) {
    all.shape[3 - axis] = tensor.ne[axis];
    all.strides[3 - axis] = static_cast<int64_t>(tensor.nb[axis]);
  }
  return all;
}

// Whether floats are made into blocks of this type.
constexpr bool is_encoded(int32_t type) {
  return type == TYPE_Q4_0 || type == TYPE_Q4_1 || type == TYPE_Q5_0 || type == TYPE_Q5_1 || type == TYPE_Q8_0 ||
         type == TYPE_IQ4_NL;
}

// Memory without gaps as a tensor of another type with the same extents.
inline Tensor in_one_piece(const Tensor& tensor, int32_t type, size_t element_bytes, void* data) {
  Tensor piece = tensor;
  piece.type = type;
  piece.data = data;
  piece.nb[0] = element_bytes;
  for (int axis = 1; axis < 4; ++axis) piece.nb[axis] = piece.nb[axis - 1] * static_cast<size_t>(tensor.ne[axis - 1]);
  return piece;
}

// A matrix of 32-bit numbers: [ne1, ne0].
inline nvb_tensor numbers(const Tensor& tensor) {
  nvb_tensor all = nvb_tensor_2d(tensor.data, NVB_DTYPE_I32, tensor.ne[1], tensor.ne[0]);
  all.strides[0] = static_cast<int64_t>(tensor.nb[1] / sizeof(int32_t));
  all.strides[1] = static_cast<int64_t>(tensor.nb[0] / sizeof(int32_t));
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

// 0 means a default to the library, and to the host that nothing is added.
inline float given_epsilon(float epsilon) {
  return epsilon == 0.0f ? FLT_MIN : epsilon;
}

// The bytes from the first element to the last.
struct Extent {
  const char* first;
  const char* end;
};
inline Extent extent_of(const Tensor& tensor) {
  const TypeTraits type = traits(tensor.type);
  const char* first = static_cast<const char*>(tensor.data);
  size_t bytes = type.block == 0 ? 0 : type.bytes * static_cast<size_t>(tensor.ne[0] / type.block);
  if (type.block == 1) bytes = type.bytes + static_cast<size_t>(tensor.ne[0] - 1) * tensor.nb[0];
  for (int axis = 1; axis < 4; ++axis) bytes += static_cast<size_t>(tensor.ne[axis] - 1) * tensor.nb[axis];
  return {first, first + bytes};
}
inline bool are_apart(const Tensor& one, const Tensor& other) {
  const Extent a = extent_of(one), b = extent_of(other);
  return a.end <= b.first || b.end <= a.first;
}
// Whether both are the same elements of one type.
inline bool is_same_place(const Tensor& one, const Tensor& other) {
  return one.data == other.data && one.type == other.type && std::memcmp(one.ne, other.ne, sizeof one.ne) == 0 &&
         std::memcmp(one.nb, other.nb, sizeof one.nb) == 0;
}

// Calls `each(i2, i3)` for the places of two outer axes.
template <typename Each>
void for_outer(const Tensor& tensor, Each&& each) {
  for (int64_t i3 = 0; i3 < tensor.ne[3]; ++i3) {
    for (int64_t i2 = 0; i2 < tensor.ne[2]; ++i2) each(i2, i3);
  }
}

}  // namespace nvb_ggml
