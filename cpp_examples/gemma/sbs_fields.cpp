#include "sbs_fields.h"

#include "error.h"
#include "little_endian.h"

namespace gemma {
namespace {

constexpr uint32_t kMaxTextWords = 64;

}  // namespace

Fields::Fields(const Blob& blob, std::string where)
    : at_(blob.data), end_(blob.data + blob.bytes), where_(std::move(where)) {
  if (blob.bytes % 4 != 0) fail(where_, ": ", blob.bytes, " bytes; a multiple of 4 is needed");
}

uint32_t Fields::next(const std::string& name) {
  if (!more()) fail(where_, ": it ends before ", name);
  const uint32_t value = read_u32(at_);
  at_ += 4;
  return value;
}

uint32_t Fields::integer(const char* name, std::optional<uint32_t> fallback, uint32_t lowest, uint32_t highest) {
  if (!more() && fallback) return *fallback;
  const uint32_t value = next(name);
  if (value < lowest || value > highest) {
    fail(where_, ": ", name, " is ", value, "; it must be an integer from ", lowest, " to ", highest);
  }
  return value;
}

float Fields::number(const char* name, float fallback, float lowest, float highest) {
  if (!more()) return fallback;
  const float value = float_of_bits(next(name));
  if (!(value >= lowest && value <= highest)) {
    fail(where_, ": ", name, " is ", value, "; it must be a number from ", lowest, " to ", highest);
  }
  return value;
}

std::string Fields::text(const char* name) {
  if (!more()) return "";
  const uint32_t length = next(name);
  if (length > kMaxTextWords) {
    fail(where_, ": ", name, " has ", length, " words; a text has at most ", kMaxTextWords);
  }
  if (length > words()) fail(where_, ": ", name, " has ", length, " words; ", words(), " are left");
  std::string text(reinterpret_cast<const char*>(at_), size_t{length} * 4);
  at_ += size_t{length} * 4;
  text.resize(text.find_last_not_of('\0') + 1);
  if (text.size() + 3 < size_t{length} * 4) fail(where_, ": ", name, " is padded with more than 3 zeros");
  return text;
}

uint32_t Fields::count(const char* name, uint32_t highest) {
  if (!more()) return 0;
  const uint32_t count = next(name);
  // Each element has a word at least, so a count beyond them is wrong before memory is asked for.
  if (count > highest || count > words()) {
    fail(where_, ": ", name, " has ", count, " elements; ", highest, " are possible, and ", words(), " words are left");
  }
  return count;
}

Fields Fields::structure(const std::string& name) {
  const uint32_t length = next(name);
  if (length > words()) fail(where_, ": ", name, " has ", length, " words; ", words(), " are left");
  Fields result(at_, at_ + size_t{length} * 4, where_ + ": " + name);
  at_ = result.end_;
  return result;
}

}  // namespace gemma
