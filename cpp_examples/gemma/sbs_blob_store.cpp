#include "sbs_blob_store.h"

#include "error.h"
#include "little_endian.h"

namespace gemma {
namespace {

constexpr uint32_t kMagic = 0x0A534253;  // "SBS\n"
constexpr uint64_t kHeaderBytes = 16;    // u32 magic, u32 count of blobs, u64 bytes of the file
constexpr uint64_t kEntryBytes = 32;     // of the directory: a name of 16 bytes, u64 offset, u64 bytes
constexpr uint64_t kNameBytes = 16;
constexpr uint64_t kAlignment = 256;
constexpr uint64_t kMaxBlobs = 1 << 20;

// `value` is at most 2^63, as file sizes and sums of two of them are.
uint64_t align(uint64_t value) {
  return (value + kAlignment - 1) / kAlignment * kAlignment;
}

// A name padded with zeros; those of 16 bytes have none.
std::string read_name(const uint8_t* bytes, uint64_t index, const std::string& path) {
  const std::string text(reinterpret_cast<const char*>(bytes), kNameBytes);
  const size_t length = text.find('\0') == std::string::npos ? kNameBytes : text.find('\0');
  if (length == 0) fail(path, ": blob ", index, " has no name");
  if (text.find_first_not_of('\0', length) != std::string::npos) {
    fail(path, ": blob ", index, " has a name with a zero in it");
  }
  for (size_t i = 0; i < length; ++i) {
    if (text[i] < ' ' || text[i] > '~') fail(path, ": blob ", index, " has a name with the byte ", int{bytes[i]});
  }
  return text.substr(0, length);
}

}  // namespace

BlobStore::BlobStore(const std::string& path) : file_(path) {
  const uint64_t size = file_.size();
  if (size < kHeaderBytes) fail(path, ": ", size, " bytes; a blob store has at least ", kHeaderBytes);
  const uint8_t* header = file_.data();
  if (read_u32(header) != kMagic) fail(path, ": not a blob store of gemma.cpp, which begins with \"SBS\\n\"");
  // A count of 0 stands in front of the newer layout, whose header and directory are at the file's end.
  const bool at_end = read_u32(header + 4) == 0;
  if (at_end) {
    header = file_.data() + size - kHeaderBytes;
    if (size < kAlignment + kHeaderBytes || read_u32(header) != kMagic) {
      fail(path, ": there is no header in the last ", kHeaderBytes, " of ", size, " bytes: the file is cut short");
    }
  }
  const uint64_t count = read_u32(header + 4);
  if (count == 0 || count > kMaxBlobs) fail(path, ": ", count, " blobs; 1 to ", kMaxBlobs, " are possible");
  if (read_u64(header + 8) != size) {
    fail(path, ": ", size, " bytes, where the header says ", read_u64(header + 8));
  }
  const uint64_t directory_bytes = count * kEntryBytes;
  if (directory_bytes > size - kHeaderBytes) {
    fail(path, ": a directory of ", count, " blobs does not fit into ", size, " bytes");
  }
  if (at_end) {
    const uint64_t directory = size - kHeaderBytes - directory_bytes;
    read_directory(directory, count, kAlignment, directory);
  } else {
    read_directory(kHeaderBytes, count, align(kHeaderBytes + directory_bytes), size);
  }
}

// `directory` holds all names, then all offsets and sizes. Blobs lie from `first` on, one behind the other, each at
// the next multiple of 256, and end at `end` or before.
void BlobStore::read_directory(uint64_t directory, uint64_t count, uint64_t first, uint64_t end) {
  const uint8_t* names = file_.data() + directory;
  const uint8_t* ranges = names + count * kNameBytes;
  uint64_t expected = first;
  for (uint64_t i = 0; i < count; ++i) {
    const std::string name = read_name(names + i * kNameBytes, i, path());
    const uint64_t offset = read_u64(ranges + i * 16);
    const uint64_t bytes = read_u64(ranges + i * 16 + 8);
    if (offset != expected) {
      fail(path(), ": blob \"", name, "\" is at byte ", offset, "; those before it end at ", expected);
    }
    if (bytes == 0) fail(path(), ": blob \"", name, "\" is empty");
    if (offset > end || bytes > end - offset) {
      fail(path(), ": blob \"", name, "\" has ", bytes, " bytes from ", offset, " on; blobs end at ", end);
    }
    expected = align(offset + bytes);
    if (!blobs_.emplace(name, Blob{file_.data() + offset, static_cast<size_t>(bytes)}).second) {
      fail(path(), ": blob \"", name, "\" is there twice");
    }
  }
}

const Blob* BlobStore::find(const std::string& name) const {
  const auto found = blobs_.find(name);
  return found == blobs_.end() ? nullptr : &found->second;
}

const Blob& BlobStore::at(const std::string& name) const {
  const Blob* blob = find(name);
  if (blob == nullptr) fail(path(), ": there is no blob \"", name, "\"");
  return *blob;
}

}  // namespace gemma
