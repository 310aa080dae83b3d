#include "gguf_metadata.h"

#include <cstring>

#include "error.h"

namespace gemma {

std::optional<nvb_gguf_value> Metadata::find(const std::string& key) const {
  auto value = nvb::make<nvb_gguf_value>();
  if (nvb_gguf_find_value(file_, key.c_str(), &value) != NVB_OK) return std::nullopt;
  return value;
}

int64_t Metadata::integer(const std::string& key, std::optional<int64_t> fallback, int64_t lowest,
                          int64_t highest) const {
  const auto value = find(key);
  if (!value && fallback) return *fallback;
  if (!value) fail(path_, ": there is no metadata ", key);
  if (value->content != NVB_GGUF_INTEGER) fail(path_, ": ", key, " is not an integer");
  if (value->integer < lowest || value->integer > highest) {
    fail(path_, ": ", key, " is ", value->integer, "; it must be an integer from ", lowest, " to ", highest);
  }
  return value->integer;
}

float Metadata::number(const std::string& key, std::optional<float> fallback, float lowest, float highest) const {
  const auto value = find(key);
  if (!value && fallback) return *fallback;
  if (!value) fail(path_, ": there is no metadata ", key);
  if (value->content != NVB_GGUF_REAL && value->content != NVB_GGUF_INTEGER) {
    fail(path_, ": ", key, " is not a number");
  }
  if (!(value->real >= lowest && value->real <= highest)) {
    fail(path_, ": ", key, " is ", value->real, "; it must be a number from ", lowest, " to ", highest);
  }
  return static_cast<float>(value->real);
}

std::string Metadata::text(const std::string& key, const std::string& fallback) const {
  const auto value = find(key);
  if (!value) return fallback;
  if (value->content != NVB_GGUF_TEXT) fail(path_, ": ", key, " is not a text");
  return std::string(static_cast<const char*>(value->data), value->count);
}

std::vector<std::string_view> Metadata::texts(const std::string& key) const {
  const auto value = find(key);
  if (!value) fail(path_, ": there is no metadata ", key);
  if (value->content != NVB_GGUF_TEXTS) fail(path_, ": ", key, " is not an array of texts");
  std::vector<std::string_view> result;
  for (uint64_t i = 0; i < value->count; ++i) {
    const char* data = nullptr;
    size_t bytes = 0;
    nvb::check(nvb_gguf_get_text(file_, key.c_str(), i, &data, &bytes));
    result.emplace_back(data, bytes);
  }
  return result;
}

void Metadata::copy_numbers(const std::string& key, uint32_t element_kind, size_t count, size_t size, void* to) const {
  const auto value = find(key);
  if (!value) fail(path_, ": there is no metadata ", key);
  if (value->content != NVB_GGUF_ARRAY || value->element_kind != element_kind || value->count != count) {
    fail(path_, ": ", key, " is not an array of ", count, " numbers of type ", element_kind);
  }
  if (count > 0) std::memcpy(to, value->data, count * size);
}

}  // namespace gemma
