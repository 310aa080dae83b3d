// Numbers as files hold them, at any address.
#ifndef GEMMA_LITTLE_ENDIAN_H
#define GEMMA_LITTLE_ENDIAN_H

#include <cstdint>
#include <cstring>

namespace gemma {

inline uint16_t read_u16(const uint8_t* bytes) {
  return static_cast<uint16_t>(bytes[0] | bytes[1] << 8);
}

inline uint32_t read_u32(const uint8_t* bytes) {
  return read_u16(bytes) | static_cast<uint32_t>(read_u16(bytes + 2)) << 16;
}

inline uint64_t read_u64(const uint8_t* bytes) {
  return read_u32(bytes) | static_cast<uint64_t>(read_u32(bytes + 4)) << 32;
}

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float bf16_value(uint16_t bits) {
  return float_of_bits(static_cast<uint32_t>(bits) << 16);
}

}  // namespace gemma

#endif  // GEMMA_LITTLE_ENDIAN_H
