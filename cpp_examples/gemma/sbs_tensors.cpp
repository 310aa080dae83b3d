#include "sbs_tensors.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "error.h"
#include "little_endian.h"
#include "sbs_fields.h"

namespace gemma {
namespace {

constexpr uint64_t kGroup = 128;  // of I8: BF16 scale, BF16 zero, then as many signed bytes
constexpr uint64_t kGroupBytes = 132;
constexpr uint8_t kReserved = 0x80;  // of SFP: it would be −0

// Bytes of an element, of I8 without the numbers of its group.
uint32_t element_bytes(SbsType type) {
  return type == SbsType::F32 ? 4 : type == SbsType::BF16 ? 2 : 1;
}

// Whether each row has bytes of its own.
bool has_rows(const SbsMatrix& matrix) {
  return matrix.type != SbsType::I8 || static_cast<uint64_t>(matrix.columns) % kGroup == 0;
}

// Sign, then exponent and mantissa: 4 and 2 bits from 2^-23 on, or, where bit 6 is set, 3 and 3 bits from 2^-7 on. So
// shifted they are the upper half of an F32.
float sfp_value(uint8_t byte) {
  const uint32_t magnitude = byte & 0x7FU;
  const uint32_t bits = magnitude == 0 ? 0 : magnitude < 64 ? 0x3400 + (magnitude << 5) : 0x3800 + (magnitude << 4);
  return bf16_value(static_cast<uint16_t>(bits | (byte & 0x80U) << 8));
}

// The nearest BF16, ties to even, of a number that is finite.
uint16_t nearest_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// Element i, without the matrix's scale.
float element(const SbsMatrix& matrix, size_t i) {
  const auto fail_here = [&matrix, i](const char* what, float value) {
    const size_t columns = static_cast<size_t>(matrix.columns);
    fail("tensor \"", matrix.name, "\": row ", i / columns, ", column ", i % columns, what, value);
  };
  const uint8_t* data = matrix.data;
  if (matrix.type == SbsType::F32) return float_of_bits(read_u32(data + 4 * i));
  if (matrix.type == SbsType::BF16) return bf16_value(read_u16(data + 2 * i));
  if (matrix.type == SbsType::SFP) {
    if (data[i] == kReserved) fail_here(" is the reserved byte ", kReserved);
    return sfp_value(data[i]);
  }
  const uint8_t* group = data + i / kGroup * kGroupBytes;
  const float scale = bf16_value(read_u16(group));
  const float zero = bf16_value(read_u16(group + 2));
  if (!std::isfinite(scale)) fail_here(" has a group with the scale ", scale);
  if (!std::isfinite(zero)) fail_here(" has a group with the zero ", zero);
  const float value = scale * static_cast<float>(static_cast<int8_t>(group[4 + i % kGroup])) - zero * scale;
  if (!std::isfinite(value)) fail_here(" is ", value);
  return value;
}

SbsType decoded_type(const SbsMatrix& matrix) {
  return fits_bf16(matrix) ? SbsType::BF16 : SbsType::F32;
}

SbsMatrix read_entry(Fields& fields, const std::string& name, const BlobStore& file) {
  SbsMatrix matrix;
  matrix.name = name;
  matrix.type = static_cast<SbsType>(fields.integer("type", {}, 0, UINT32_MAX));
  const uint32_t size = fields.integer("element_bytes", {}, 0, 16);
  const uint32_t elements = fields.integer("num_elements", {}, 0, UINT32_MAX);
  matrix.rows = fields.integer("rows", {}, 1, 1 << 24);
  matrix.columns = fields.integer("cols", {}, 1, 1 << 24);
  matrix.scale = fields.number("scale", 1, -1e30F, 1e30F);
  const uint32_t stride = fields.integer("stride", static_cast<uint32_t>(matrix.columns), 0, UINT32_MAX);
  fields.skip();
  const Blob& blob = file.at(name);
  matrix.data = blob.data;
  matrix.bytes = blob.bytes;
  if (!is_read(matrix.type)) return matrix;
  const auto wrong = [&](const char* field, uint64_t value, uint64_t needed) {
    fail(fields.where(), ": ", field, " is ", value, "; ", sbs_type_name(matrix.type), " of ", matrix.rows, " x ",
         matrix.columns, " needs ", needed);
  };
  const uint64_t count = static_cast<uint64_t>(matrix.rows) * static_cast<uint64_t>(matrix.columns);
  const uint64_t bytes = sbs_bytes(matrix.type, count);
  if (size != element_bytes(matrix.type)) wrong("element_bytes", size, element_bytes(matrix.type));
  // The file's field has 32 bits, whatever the count.
  const uint64_t stored = matrix.type == SbsType::I8 ? bytes : count;
  if (elements != static_cast<uint32_t>(stored)) wrong("num_elements", elements, stored);
  // Files hold rows without gaps.
  if (matrix.rows > 1 && stride != matrix.columns) wrong("stride", stride, static_cast<uint64_t>(matrix.columns));
  if (matrix.bytes != bytes) wrong("the size of its blob", matrix.bytes, bytes);
  return matrix;
}

}  // namespace

std::string sbs_type_name(SbsType type) {
  static const char* const names[] = {"of no type", "F32", "BF16", "SFP", "NUQ",  "F64",  "U32",
                                      "U64",        "I8",  "U16",  "U8",  "INT8", "Q4_0", "MXFP4"};
  const uint32_t number = static_cast<uint32_t>(type);
  return number < sizeof names / sizeof *names ? names[number] : "of type " + std::to_string(number);
}

bool is_read(SbsType type) {
  return type == SbsType::F32 || type == SbsType::BF16 || type == SbsType::SFP || type == SbsType::I8;
}

size_t sbs_bytes(SbsType type, uint64_t elements) {
  if (type == SbsType::I8) return elements + (elements + kGroup - 1) / kGroup * (kGroupBytes - kGroup);
  return elements * element_bytes(type);
}

bool fits_bf16(const SbsMatrix& matrix) {
  if (matrix.type == SbsType::F32) return false;
  int exponent;
  return matrix.type == SbsType::SFP ? std::frexp(matrix.scale, &exponent) == 0.5F : matrix.scale == 1;
}

bool is_int8(const SbsMatrix& matrix) {
  if (matrix.type != SbsType::I8 || matrix.scale != 1 || !has_rows(matrix)) return false;
  for (size_t at = 0; at < matrix.bytes; at += kGroupBytes) {
    if ((read_u16(matrix.data + at + 2) & 0x7FFF) != 0) return false;
  }
  return true;
}

std::map<std::string, SbsMatrix> read_sbs_tensors(const BlobStore& file) {
  Fields entries(file.at("toc"), file.path() + ": toc");
  std::map<std::string, SbsMatrix> tensors;
  for (uint64_t i = 0; entries.more(); ++i) {
    Fields fields = entries.structure("entry " + std::to_string(i));
    const std::string name = fields.text("name");
    const SbsMatrix matrix = read_entry(fields, name, file);
    if (!tensors.emplace(name, matrix).second) fail(entries.where(), ": tensor \"", name, "\" is there twice");
  }
  return tensors;
}

uint8_t* SbsMemory::allocate(size_t bytes) {
  buffers_.emplace_back(new uint8_t[bytes]);
  return buffers_.back().get();
}

// Pieces of whole rows of `from`, in this order, as a matrix of that shape.
SbsMatrix SbsMemory::copy(const SbsMatrix& from, const std::vector<int64_t>& order, int64_t rows, int64_t columns) {
  const size_t row_bytes = sbs_bytes(from.type, static_cast<uint64_t>(from.columns));
  SbsMatrix result = from;
  result.rows = rows;
  result.columns = columns;
  result.bytes = row_bytes * order.size();
  uint8_t* to = allocate(result.bytes);
  result.data = to;
  for (const int64_t row : order) {
    std::memcpy(to, from.data + static_cast<size_t>(row) * row_bytes, row_bytes);
    to += row_bytes;
  }
  return result;
}

SbsMatrix SbsMemory::rows(const SbsMatrix& from, const std::vector<int64_t>& first, int64_t count) {
  if (!has_rows(from)) return rows(decode(from, decoded_type(from)), first, count);
  if (first.size() == 1) {
    SbsMatrix result = from;
    const size_t row_bytes = sbs_bytes(from.type, static_cast<uint64_t>(from.columns));
    result.rows = count;
    result.data += static_cast<size_t>(first[0]) * row_bytes;
    result.bytes = static_cast<size_t>(count) * row_bytes;
    return result;
  }
  std::vector<int64_t> order;
  for (const int64_t run : first) {
    for (int64_t i = 0; i < count; ++i) order.push_back(run + i);
  }
  return copy(from, order, static_cast<int64_t>(order.size()), from.columns);
}

SbsMatrix SbsMemory::join_heads(const SbsMatrix& from, int64_t heads) {
  if (!has_rows(from)) return join_heads(decode(from, decoded_type(from)), heads);
  const int64_t rows = from.rows / heads;
  std::vector<int64_t> order;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t head = 0; head < heads; ++head) order.push_back(head * rows + row);
  }
  return copy(from, order, rows, heads * from.columns);
}

SbsMatrix SbsMemory::decode(const SbsMatrix& from, SbsType to) {
  const size_t count = static_cast<size_t>(from.rows) * static_cast<size_t>(from.columns);
  const size_t size = element_bytes(to);
  SbsMatrix result = from;
  result.type = to;
  result.scale = 1;
  result.bytes = count * size;
  uint8_t* bytes = allocate(result.bytes);
  result.data = bytes;
  for (size_t i = 0; i < count; ++i, bytes += size) {
    float value = element(from, i);
    if (from.type == SbsType::I8) value = bf16_value(nearest_bf16(value));
    value *= from.scale;
    if (to == SbsType::F32) {
      std::memcpy(bytes, &value, sizeof value);
    } else {
      const uint16_t bits = nearest_bf16(value);
      std::memcpy(bytes, &bits, sizeof bits);
    }
  }
  return result;
}

}  // namespace gemma
