// nvbackend_core.hpp: what the classes of nvbackend.hpp are made of: structs with their size set, errors, tensors, and
// the owner of a C object. nvbackend.hpp includes it.
#ifndef NVBACKEND_CORE_HPP
#define NVBACKEND_CORE_HPP

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "nvbackend.h"

namespace nvb {

// A zeroed options, arguments or info struct with its `struct_size` set, as the C `_init` functions make it.
template <typename T>
T make() noexcept {
  T value{};
  value.struct_size = sizeof value;
  return value;
}

// Errors ----------------------------------------------------------------------------------------------------------

// A failed call: what() is the library's text, which names the values and limits.
class error : public std::runtime_error {
 public:
  error(const std::string& text, const nvb_error_detail& detail, const nvb_memory_failure& memory = {})
      : std::runtime_error(text), detail_(detail), memory_(memory) {}

  nvb_status status() const noexcept { return detail_.status; }
  const nvb_error_detail& detail() const noexcept { return detail_; }
  // The memory manager's state, if the status is NVB_ERROR_OUT_OF_MEMORY.
  const nvb_memory_failure& memory() const noexcept { return memory_; }

 private:
  nvb_error_detail detail_;
  nvb_memory_failure memory_;
};

// Throws `error` unless `status` is NVB_OK. Call it on the thread that made the call, before its next one.
inline void check(nvb_status status) {
  if (status == NVB_OK) return;
  auto detail = make<nvb_error_detail>();
  if (nvb_last_error_get(&detail) != NVB_OK) detail = make<nvb_error_detail>();
  detail.status = status;
  auto memory = make<nvb_memory_failure>();
  if (nvb_last_error_get_memory(&memory) != NVB_OK) memory = make<nvb_memory_failure>();
  std::string text(nvb_last_error_message(nullptr, 0), '\0');
  nvb_last_error_message(text.data(), text.size());
  text.resize(text.size() - 1);  // the closing NUL
  throw error(std::string(nvb_status_name(status)) + ": " + text, detail, memory);
}

// Tensors ---------------------------------------------------------------------------------------------------------

// A view of `data` with up to four axes; without strides (in elements) it is contiguous.
inline nvb_tensor tensor(void* data, uint32_t dtype, std::initializer_list<int64_t> shape,
                         std::initializer_list<int64_t> strides = {}) {
  if (shape.size() > 4 || (strides.size() != 0 && strides.size() != shape.size())) {
    throw std::invalid_argument("nvb::tensor: up to four axes, with as many strides or none");
  }
  nvb_tensor result{};
  result.data = data;
  result.dtype = dtype;
  result.rank = static_cast<uint32_t>(shape.size());
  std::size_t axis = 0;
  for (int64_t extent : shape) result.shape[axis++] = extent;
  axis = 0;
  for (int64_t stride : strides) result.strides[axis++] = stride;
  return result;
}

// Activations in 8 bits, without gaps between rows unless there is a row stride in bytes; with scales that are read
// where codes are written if they are given.
inline nvb_quantized_rows quantized_rows(void* data, float* scales, uint32_t format, int64_t rows, int64_t columns,
                                         int64_t row_stride = 0, bool given_scales = false) noexcept {
  nvb_quantized_rows result{};
  result.data = data;
  result.scales = scales;
  result.rows = rows;
  result.columns = columns;
  result.row_stride = row_stride;
  result.format = format;
  result.given_scales = given_scales;
  return result;
}

// Bytes of one element; 0 for a number that is no dtype.
inline std::size_t dtype_size(uint32_t dtype) noexcept {
  switch (dtype) {
    case NVB_DTYPE_F32:
    case NVB_DTYPE_I32:
      return 4;
    case NVB_DTYPE_F16:
    case NVB_DTYPE_BF16:
      return 2;
    case NVB_DTYPE_FP8_E4M3:
    case NVB_DTYPE_FP8_E5M2:
    case NVB_DTYPE_KV_INT8:  // rows of bytes, as are the two below
    case NVB_DTYPE_KV_Q8_0:
    case NVB_DTYPE_KV_Q4_0:
      return 1;
    default:
      return 0;
  }
}

// Handles ---------------------------------------------------------------------------------------------------------

// The one owner of a C object: moves, does not copy, destroys. Empty after `release` or when moved from.
template <typename T, nvb_status (*destroy)(T*)>
class handle {
 public:
  handle() noexcept = default;
  // A template, which takes no 0: that is a preset or the name of a device where a constructor beside this one says so.
  template <typename P, std::enable_if_t<std::is_same_v<P, T*> || std::is_same_v<P, std::nullptr_t>, int> = 0>
  explicit handle(P pointer) noexcept : pointer_(pointer) {}
  handle(handle&& other) noexcept : pointer_(other.release()) {}
  handle& operator=(handle&& other) noexcept {
    std::swap(pointer_, other.pointer_);
    return *this;
  }
  // A failure to destroy is in nvb_last_error_message; a destructor has no one to tell.
  ~handle() { destroy(pointer_); }

  T* get() const noexcept { return pointer_; }
  operator T*() const noexcept { return pointer_; }
  T* release() noexcept { return std::exchange(pointer_, nullptr); }

 protected:
  T* pointer_ = nullptr;
};

// What a call gives as text, which another thread may lengthen between asking for its size and copying it.
template <typename T>
std::string copy_text(nvb_status (*get)(T*, char*, std::size_t, std::size_t*), T* object) {
  std::string text;
  std::size_t needed = 1;
  while (needed > text.size()) {
    text.resize(needed + 64);
    check(get(object, text.data(), text.size(), &needed));
  }
  text.resize(needed - 1);
  return text;
}

}  // namespace nvb

#endif  // NVBACKEND_CORE_HPP
