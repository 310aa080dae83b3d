// Reads the structs of gemma.cpp's model files: little-endian 32-bit words without names, which docs/engines.md
// describes. What is read has the type and the range that its reader asks for.
#ifndef GEMMA_SBS_FIELDS_H
#define GEMMA_SBS_FIELDS_H

#include <cstdint>
#include <optional>
#include <string>

#include "sbs_blob_store.h"

namespace gemma {

// The fields of one struct, read in their order. Files of before a field was added end in front of it, and the
// fallback stands; a field without a fallback must be there. Files of after the last known field have more, which
// `skip` passes over.
class Fields {
 public:
  // The words of a blob, which hold structs alone. `where` names it in errors. Errors: no whole number of words.
  Fields(const Blob& blob, std::string where);

  // Whether a word is left.
  bool more() const { return at_ != end_; }
  void skip() { at_ = end_; }

  // Errors of all: a value out of its range; a field that goes beyond the struct's end. Floats are finite.
  uint32_t integer(const char* name, std::optional<uint32_t> fallback, uint32_t lowest, uint32_t highest);
  bool boolean(const char* name, bool fallback) { return integer(name, fallback, 0, 1) != 0; }
  float number(const char* name, float fallback, float lowest, float highest);
  // At most 256 bytes. Absent: empty.
  std::string text(const char* name);
  // The count of a vector, whose elements follow. Absent: 0.
  uint32_t count(const char* name, uint32_t highest);
  // The struct that comes next, which this passes over. Errors: the end.
  Fields structure(const std::string& name);

  const std::string& where() const { return where_; }

 private:
  Fields(const uint8_t* at, const uint8_t* end, std::string where) : at_(at), end_(end), where_(std::move(where)) {}
  uint64_t words() const { return static_cast<uint64_t>(end_ - at_) / 4; }
  uint32_t next(const std::string& name);

  const uint8_t* at_;
  const uint8_t* end_;
  std::string where_;
};

}  // namespace gemma

#endif  // GEMMA_SBS_FIELDS_H
