#include "safetensors.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <set>

#include "error.h"
#include "little_endian.h"
#include "strict_json.h"

namespace gemma {
namespace {

using nlohmann::json;

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the reference implementation's limit
constexpr size_t kMaxIndexBytes = 100'000'000;
constexpr size_t kMaxRank = 8;

// Bytes of an element, for all dtypes of the format: a file may hold tensors that no Gemma needs.
std::optional<uint64_t> element_bytes(const std::string& dtype) {
  static const std::map<std::string, uint64_t> sizes = {
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"U16", 2}, {"I16", 2}, {"F16", 2},
      {"BF16", 2}, {"U32", 4}, {"I32", 4}, {"F32", 4},     {"U64", 8},     {"I64", 8}, {"F64", 8}};
  const auto found = sizes.find(dtype);
  if (found == sizes.end()) return std::nullopt;
  return found->second;
}

// A number that is an integer from 0 on; -1, 1.5, "1" and 1e400 are not.
uint64_t unsigned_value(const json& value, const std::string& where, const char* what) {
  if (!value.is_number_unsigned()) fail(where, ": ", what, " is ", value.dump(), "; it must be an integer from 0 on");
  return value.get<uint64_t>();
}

struct Range {
  uint64_t begin;
  uint64_t end;
  std::string name;
};

HostTensor parse_tensor(const json& entry, const std::string& where, uint64_t data_bytes, Range* range) {
  if (!entry.is_object() || !entry.contains("dtype") || !entry.contains("shape") || !entry.contains("data_offsets")) {
    fail(where, ": an object with dtype, shape and data_offsets is needed");
  }
  HostTensor tensor;
  if (!entry["dtype"].is_string()) fail(where, ": dtype is ", entry["dtype"].dump(), "; it must be a string");
  tensor.dtype = entry["dtype"].get<std::string>();
  const auto element = element_bytes(tensor.dtype);
  if (!element) fail(where, ": dtype ", entry["dtype"].dump(), " is not known");

  const json& shape = entry["shape"];
  if (!shape.is_array() || shape.size() > kMaxRank) {
    fail(where, ": shape must be an array of at most ", kMaxRank, " extents");
  }
  uint64_t bytes = *element;
  for (const json& item : shape) {
    const uint64_t extent = unsigned_value(item, where, "an extent");
    if (extent > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) ||
        __builtin_mul_overflow(bytes, extent, &bytes)) {
      fail(where, ": a shape of ", shape.dump(), " has more bytes than 64 bits can count");
    }
    tensor.shape.push_back(static_cast<int64_t>(extent));
  }

  const json& offsets = entry["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2) fail(where, ": data_offsets must be two numbers");
  range->begin = unsigned_value(offsets[0], where, "a data offset");
  range->end = unsigned_value(offsets[1], where, "a data offset");
  if (range->begin > range->end || range->end > data_bytes) {
    fail(where, ": data_offsets ", offsets.dump(), " do not lie in the file's ", data_bytes, " bytes of data");
  }
  if (range->end - range->begin != bytes) {
    fail(where, ": data_offsets ", offsets.dump(), " span ", range->end - range->begin, " bytes; ", tensor.dtype, " ",
         shape.dump(), " needs ", bytes);
  }
  tensor.bytes = bytes;
  return tensor;
}

}  // namespace

void Safetensors::add(const std::string& path) {
  files_.emplace_back(path);
  const MappedFile& file = files_.back();
  if (file.size() < 8) fail(path, ": ", file.size(), " bytes; a safetensors file has at least 8");
  const uint64_t header_bytes = read_u64(file.data());
  if (header_bytes > kMaxHeaderBytes) {
    fail(path, ": a header of ", header_bytes, " bytes; the limit is ", kMaxHeaderBytes);
  }
  if (header_bytes > file.size() - 8) {
    fail(path, ": a header of ", header_bytes, " bytes in a file of ", file.size(), ": the file is cut short");
  }
  const std::string text(reinterpret_cast<const char*>(file.data()) + 8, header_bytes);
  const json header = parse_object(text, path + ": header");
  const uint8_t* data = file.data() + 8 + header_bytes;
  const uint64_t data_bytes = file.size() - 8 - header_bytes;

  std::vector<Range> ranges;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    Range range{0, 0, name};
    HostTensor tensor = parse_tensor(entry, path + ": tensor " + json(name).dump(), data_bytes, &range);
    tensor.data = data + range.begin;
    if (!tensors_.emplace(name, std::move(tensor)).second)
      fail(path, ": tensor ", json(name), " is in another file too");
    if (range.begin != range.end) ranges.push_back(std::move(range));
  }
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].begin < ranges[i - 1].end) {
      fail(path, ": tensors ", json(ranges[i - 1].name), " and ", json(ranges[i].name), " overlap at byte ",
           ranges[i].begin);
    }
  }
}

Safetensors Safetensors::open_folder(const std::string& folder) {
  const std::string single = folder + "/model.safetensors";
  const std::string index_path = single + ".index.json";
  Safetensors result;
  if (file_exists(single) || !file_exists(index_path)) {
    result.add(single);
    return result;
  }
  const json index = parse_object(read_text(index_path, kMaxIndexBytes), index_path);
  const auto map = index.find("weight_map");
  if (map == index.end() || !map->is_object()) fail(index_path, ": there is no object weight_map");

  std::set<std::string> files;
  for (const auto& [name, value] : map->items()) {
    // A name with a slash could point at any file of this machine.
    const std::string file = value.is_string() ? value.get<std::string>() : "";
    if (file.empty() || file.find('/') != std::string::npos || file.find('\0') != std::string::npos) {
      fail(index_path, ": tensor ", json(name), " is in ", value.dump(), "; a file name without a folder is needed");
    }
    files.insert(file);
  }
  for (const std::string& file : files) result.add(folder + "/" + file);
  for (const auto& item : map->items()) {
    if (result.tensors_.count(item.key()) == 0) {
      fail(index_path, ": tensor ", json(item.key()), " is not in ", item.value());
    }
  }
  return result;
}

}  // namespace gemma
