// CPY, CONT, DUP and CONCAT: elements and blocks that go from tensor to tensor.
#include "operations.hpp"
#include "tensor.hpp"

namespace nvb_ggml {
namespace {

// More than a few copies of bytes take longer than a kernel, and a host that has to do them itself than both.
constexpr int64_t kMostRanges = 4096;

// Blocks of any type to blocks of the same type, as ranges of bytes that both tensors have in one piece.
bool copies_bytes(Step& step, const Tensor& from, const Tensor& to) {
  const Host& host = step.device.host();
  const size_t block = host.block_bytes(from.type);
  const int64_t blocks = from.ne[0] / host.block_elements(from.type);
  if (!same_shape(from, to) || (blocks != 1 && (from.nb[0] != block || to.nb[0] != block))) return false;
  size_t range = block * static_cast<size_t>(blocks);
  int axis = 1;
  for (; axis < 4; ++axis) {
    const bool joins = from.ne[axis] == 1 || (from.nb[axis] == range && to.nb[axis] == range);
    if (!joins) break;
    range *= static_cast<size_t>(from.ne[axis]);
  }
  int64_t outer[3] = {1, 1, 1}, count = 1;
  for (int rest = axis; rest < 4; ++rest) count *= outer[rest - 1] = from.ne[rest];
  if (count > kMostRanges) return false;
  const auto place = [&](const Tensor& tensor, int64_t a, int64_t b, int64_t c) {
    const int64_t at[3] = {a, b, c};
    char* data = static_cast<char*>(tensor.data);
    for (int i = 0; i < 3; ++i) data += at[i] * static_cast<int64_t>(tensor.nb[i + 1]);
    return data;
  };
  for (int64_t c = 0; c < outer[2]; ++c) {
    for (int64_t b = 0; b < outer[1]; ++b) {
      for (int64_t a = 0; a < outer[0]; ++a) {
        step.queue([&] {
          return step.device.queue_copy(place(to, a, b, c), place(from, a, b, c), range, NVB_COPY_DEVICE_TO_DEVICE,
                                        step.stream);
        });
      }
    }
  }
  return true;
}

// Whether a tensor of any type has no gaps and the order of its axes.
bool is_one_piece(const Host& host, const Tensor& tensor) {
  size_t stride = host.block_bytes(tensor.type);
  int64_t extent = tensor.ne[0] / host.block_elements(tensor.type);
  for (int axis = 0; axis < 4; ++axis) {
    if (extent != 1 && tensor.nb[axis] != stride) return false;
    stride *= static_cast<size_t>(extent);
    extent = axis < 3 ? tensor.ne[axis + 1] : 1;
  }
  return true;
}

// Rows of blocks become floats, or floats blocks.
bool copies_blocks(Step& step, const Tensor& from, const Tensor& to) {
  const bool encodes = is_float(from.type) && is_encoded(to.type);
  if (!encodes && !(is_quantized(from.type) && is_float(to.type))) return false;
  const Tensor &floats = encodes ? from : to, &blocks = encodes ? to : from;
  if (!has_element_strides(floats) || !has_rows(blocks)) return false;
  step.queue([&] {
    return block_rows(step, whole(floats), whole_blocks(blocks), nullptr,
                      encodes ? NVB_BLOCKS_ENCODE : NVB_BLOCKS_DECODE);
  });
  return true;
}

// Elements of `from` go to those of `to` at the same places.
bool copies_places(Step& step, const Tensor& from, const Tensor& to) {
  const bool plain = is_float(from.type) || from.type == TYPE_I32;
  if (from.type == to.type && !plain) return copies_bytes(step, from, to);
  if (is_quantized(from.type) || is_quantized(to.type)) return copies_blocks(step, from, to);
  const bool words = from.type == TYPE_I32 && to.type == TYPE_I32;
  if (!words && !(is_float(from.type) && is_float(to.type))) return false;
  if (!has_element_strides(from) || !has_element_strides(to)) return false;
  step.queue([&] { return pointwise(step, NVB_POINTWISE_COPY, whole(from), nullptr, whole(to)); });
  return true;
}

// Memory without gaps from `data` on as a tensor of the extents of `like`.
Tensor in_shape_of(const Host& host, const Tensor& like, int32_t type, void* data) {
  Tensor shaped = like;
  shaped.type = type;
  shaped.data = data;
  size_t stride = host.block_bytes(type);
  int64_t extent = like.ne[0] / host.block_elements(type);
  for (int axis = 0; axis < 4; ++axis) {
    shaped.nb[axis] = stride;
    stride *= static_cast<size_t>(extent);
    extent = axis < 3 ? like.ne[axis + 1] : 1;
  }
  return shaped;
}

// Elements of `from` in the order of the axes become those of `to`.
bool copies(Step& step, const Tensor& from, const Tensor& to) {
  const Host& host = step.device.host();
  const bool from_is_whole = is_one_piece(host, from), to_is_whole = is_one_piece(host, to);
  if (from.type == to.type && from_is_whole && to_is_whole) {
    step.queue([&] {
      return step.device.queue_copy(to.data, from.data, host.bytes(to), NVB_COPY_DEVICE_TO_DEVICE, step.stream);
    });
    return true;
  }
  if (same_shape(from, to)) return copies_places(step, from, to);
  // What lies in one piece is seen in the other's shape, if the other's rows are whole blocks.
  const auto divides = [&](const Tensor& shape, int32_t type) { return shape.ne[0] % host.block_elements(type) == 0; };
  if (from_is_whole && divides(to, from.type)) {
    return copies_places(step, in_shape_of(host, to, from.type, from.data), to);
  }
  if (to_is_whole && divides(from, to.type)) {
    return copies_places(step, from, in_shape_of(host, from, to.type, to.data));
  }
  if (!divides(to, from.type)) return false;
  ScratchPlan plan;
  plan.place(host.block_bytes(from.type) * static_cast<size_t>(elements(from) / host.block_elements(from.type)));
  char* memory = step.scratch(plan);
  return copies_places(step, from, in_shape_of(host, from, from.type, memory)) &&
         copies_places(step, in_shape_of(host, to, from.type, memory), to);
}

}  // namespace

nvb_status block_rows(const Step& step, const nvb_tensor& floats, const nvb_block_tensor& blocks,
                      const nvb_tensor* rows, uint32_t direction) {
  nvb_block_rows_args args;
  nvb_block_rows_args_init(&args);
  args.floats = floats;
  args.blocks = blocks;
  if (rows != nullptr) args.rows = *rows;
  args.direction = direction;
  return nvb_block_rows(step.backend(), &args, step.stream);
}

nvb_status convert(const Step& step, const Tensor& from, const nvb_tensor& to) {
  if (is_quantized(from.type)) return block_rows(step, to, whole_blocks(from), nullptr, NVB_BLOCKS_DECODE);
  return pointwise(step, NVB_POINTWISE_COPY, whole(from), nullptr, to);
}

bool copy(Step& step, const Tensor& node) {
  const Tensor& from = *node.source[0];
  return elements(from) == elements(node) && copies(step, from, node);
}

// Each source is copied to its part of the node along one axis.
bool concat(Step& step, const Tensor& node) {
  const int axis = node.parameters[0];
  if (axis < 0 || axis > 3 || step.device.host().block_elements(node.type) != 1) return false;
  int64_t place = 0;
  for (const Tensor* from : {node.source[0], node.source[1]}) {
    Tensor part = node;
    part.ne[axis] = from->ne[axis];
    if (part.data != nullptr) part.data = static_cast<char*>(part.data) + place * static_cast<int64_t>(node.nb[axis]);
    place += from->ne[axis];
    if (from->type != node.type || !same_shape(*from, part)) return false;
    if (elements(*from) != 0 && !copies(step, *from, part)) return false;
  }
  return true;
}

}  // namespace nvb_ggml
