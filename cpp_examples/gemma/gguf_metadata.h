// The metadata of a GGUF file, checked: what is there has the type and the range that its reader asks for.
#ifndef GEMMA_GGUF_METADATA_H
#define GEMMA_GGUF_METADATA_H

#include <cstdint>
#include <nvbackend.hpp>
#include <optional>
#include <string>
#include <vector>

namespace gemma {

class Metadata {
 public:
  // `path` names the file in errors. The file outlives this.
  Metadata(const nvb::gguf& file, std::string path) : file_(file), path_(std::move(path)) {}

  const nvb::gguf& file() const { return file_; }
  const std::string& path() const { return path_; }

  // Values by key. A fallback stands for a key that is not there; without one it must be. Errors: a value of another
  // type or out of its range, with key, value and range.
  int64_t integer(const std::string& key, std::optional<int64_t> fallback, int64_t lowest, int64_t highest) const;
  float number(const std::string& key, std::optional<float> fallback, float lowest, float highest) const;
  std::string text(const std::string& key, const std::string& fallback) const;

  std::optional<nvb_gguf_value> find(const std::string& key) const;

  // An array of texts, views of the file's memory.
  std::vector<std::string_view> texts(const std::string& key) const;

  // An array of `count` numbers of GGUF's type `element_kind` (5: I32, 6: F32, 7: boolean in a byte), which is T's.
  template <typename T>
  std::vector<T> numbers(const std::string& key, uint32_t element_kind, size_t count) const {
    std::vector<T> result(count);
    copy_numbers(key, element_kind, count, sizeof(T), result.data());
    return result;
  }

 private:
  void copy_numbers(const std::string& key, uint32_t element_kind, size_t count, size_t size, void* to) const;

  const nvb::gguf& file_;
  std::string path_;
};

}  // namespace gemma

#endif  // GEMMA_GGUF_METADATA_H
